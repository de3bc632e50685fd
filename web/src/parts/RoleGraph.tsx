/** The live graph of a job: roles with the state of each instance, lines with the kind of what flows. */
import { Background, Controls, type Edge, Handle, MarkerType, type Node, type NodeProps, Position, ReactFlow } from "@xyflow/react";
import "@xyflow/react/dist/style.css";
import { useMemo, useRef, useState } from "react";
import type { GraphDocument, GraphRole, InstanceRow } from "../api/types";
import { jobPath, Link } from "../router";
import { Card, Facts, glyphOf, State, Table, toneOf, When } from "./basics";
import { CHIPS_MAX, countsOf, type DrawnEdge, notesOf, type Observed, observedOf, place, type PlacedRole, ROLE_WIDTH, waitersOf } from "./layout";

type RoleNode = Node<{ role: GraphRole; chosen: boolean }, "role">;

function RoleBox({ data: { role, chosen } }: NodeProps<RoleNode>) {
  const counts = countsOf(role.states);
  const rest = role.states.length - CHIPS_MAX;
  return (
    <div className={`role-box edge-${toneOf(counts[0]?.[0] ?? "PLANNED")} ${chosen ? "chosen" : ""}`}>
      <Handle type="target" position={Position.Left} isConnectable={false} />
      <div className="role-name">
        {role.name} <span className="soft">× {role.replicas}</span>
      </div>
      <div className="soft small">{[role.loop && "loop", role.stateful && "stateful", `restarts ${role.restart}`].filter(Boolean).join(", ")}</div>
      <div className="chips">
        {role.states.slice(0, CHIPS_MAX).map((state, rank) => (
          <span key={rank} className={`chip ${toneOf(state)}`} title={`${role.name}/${rank} ${state}`}>
            {glyphOf(state)}
          </span>
        ))}
        {rest > 0 && <span className="soft small">+{rest}</span>}
      </div>
      <div className="small">{counts.map(([state, n]) => `${n} ${state}`).join(", ")}</div>
      <Handle type="source" position={Position.Right} isConnectable={false} />
      <Handle type="source" id="below" position={Position.Bottom} isConnectable={false} />
      <Handle type="target" id="below" position={Position.Bottom} isConnectable={false} />
    </div>
  );
}

const NODE_TYPES = { role: RoleBox };

function nodesOf(roles: PlacedRole[], chosen: string): RoleNode[] {
  return roles.map(({ role, x, y, height }) => ({
    id: role.name,
    type: "role",
    position: { x, y },
    width: ROLE_WIDTH,
    height,
    data: { role, chosen: role.name === chosen },
    ariaLabel: `Role ${role.name}: ${countsOf(role.states).map(([state, n]) => `${n} ${state}`).join(", ")}`,
    ariaRole: "button",
  }));
}

function edgesOf(lines: DrawnEdge[], notesOn: (line: DrawnEdge) => string[], instances: InstanceRow[]): Edge[] {
  return lines.map((line) => {
    const { id, source, target, kinds, below } = line;
    const text = [kinds.join(", "), ...notesOn(line)].join(" · ");
    return {
      id,
      source,
      target,
      ...(below ? { type: "smoothstep", sourceHandle: "below", targetHandle: "below", pathOptions: { offset: below } } : {}),
      label: text,
      className: `line-${kinds[0]} ${waitersOf(line, instances) ? "line-waits" : ""}`,
      markerEnd: { type: MarkerType.ArrowClosed },
      ariaLabel: `${source} to ${target}: ${text}`,
      focusable: false,
    };
  });
}

export function RoleGraph({ job, graph, at, instances }: { job: string; graph: GraphDocument; at: number; instances: InstanceRow[] }) {
  const [chosen, choose] = useState("");
  const placed = useMemo(() => place(graph), [graph]);
  const nodes = useMemo(() => nodesOf(placed.roles, chosen), [placed, chosen]);
  const now = useMemo(() => observedOf(graph.observed, at), [graph, at]);
  const looks = useRef<[Observed | null, Observed]>([null, now]);
  if (looks.current[1].at !== now.at) looks.current = [looks.current[1], now];
  const before = looks.current[0];
  const edges = useMemo(
    () => edgesOf(placed.lines, (line) => notesOf(line, graph, instances, now, before), instances),
    [placed, graph, instances, now, before],
  );
  const role = graph.roles.find((one) => one.name === chosen);
  // lines that run back turn below the boxes, which alone are fitted into view
  const below = Math.max(0, ...placed.lines.map((line) => line.below));
  return (
    <>
      <div className="graph" role="group" aria-label="Graph of roles; Enter opens a role">
        <ReactFlow
          nodes={nodes}
          edges={edges}
          nodeTypes={NODE_TYPES}
          nodesDraggable={false}
          nodesConnectable={false}
          fitView
          fitViewOptions={{ maxZoom: 1.3, padding: { x: "5%", top: "24px", bottom: `${below ? Math.round(below * 1.3) + 48 : 24}px` } }}
          minZoom={0.1}
          preventScrolling={false}
          zoomOnScroll={false}
          onNodeClick={(_, node) => choose(node.id === chosen ? "" : node.id)}
          onSelectionChange={({ nodes: picked }) => picked[0] && choose(picked[0].id)}
        >
          <Background gap={24} />
          <Controls showInteractive={false} />
        </ReactFlow>
      </div>
      {role ? <RolePanel job={job} role={role} graph={graph} instances={instances} /> : <InstanceTable job={job} instances={instances} />}
    </>
  );
}

function RolePanel({ job, role, graph, instances }: { job: string; role: GraphRole; graph: GraphDocument; instances: InstanceRow[] }) {
  const units = graph.units.filter((members) => members.some((one) => one.startsWith(`${role.name}/`)));
  return (
    <Card title={`Role ${role.name}`}>
      <Facts
        rows={[
          ["Losing one", role.blast_radius],
          ["Mesh", Object.entries(role.mesh).map(([axis, n]) => `${axis}=${n}`).join(" ")],
          ["Recovers as", units.length === 1 ? `one unit of ${units[0]!.length}` : `${units.length} units`],
        ]}
      />
      <InstanceTable job={job} instances={instances.filter((one) => one.role === role.name)} />
    </Card>
  );
}

export function InstanceTable({ job, instances }: { job: string; instances: InstanceRow[] }) {
  if (!instances.length) return <p className="soft">No instance yet: they come with the devices.</p>;
  return (
    <Table
      name="Instances"
      rows={instances}
      id={(one) => one.instance}
      columns={[
        { name: "Instance", cell: (one) => <Link to={`${jobPath(job, "logs")}?instance=${encodeURIComponent(one.instance)}`}>{one.instance}</Link> },
        { name: "State", cell: (one) => <State of={one.state} /> },
        { name: "Since", cell: (one) => <When at={one.since} /> },
        { name: "Node", cell: (one) => one.node },
        { name: "Devices", cell: (one) => one.devices.join(", ") },
        { name: "Epoch", cell: (one) => one.epoch, numeric: true },
        { name: "Restarts", cell: (one) => one.restarts, numeric: true },
        { name: "Progress", cell: (one) => (one.progress ? `${one.progress.n} ${one.progress.unit}` : "") },
        { name: "Last error", cell: (one) => (one.error ? `${one.error.reason}: ${one.error.text}` : "") },
      ]}
    />
  );
}
