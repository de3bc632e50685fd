/** The nodes, and one node: its devices, who holds them, and how to take it out of use. */
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api } from "../api/client";
import type { DrainPlan, NodeRow } from "../api/types";
import { number } from "../format";
import { Answer, Bytes, Card, Facts, State, Table, Trouble, When } from "../parts/basics";
import { HeatMap } from "../parts/HeatMap";
import { jobPath, Link } from "../router";

export function Nodes() {
  const heat = useQuery({ queryKey: ["cluster", "heat"], queryFn: api.heat });
  return (
    <>
      <h1>Nodes</h1>
      <Answer of={heat}>{(found) => <HeatMap heat={found} />}</Answer>
    </>
  );
}

export function Node({ id }: { id: string }) {
  const node = useQuery({ queryKey: ["cluster", "node", id], queryFn: () => api.node(id) });
  return (
    <Answer of={node}>
      {(found) => (
        <>
          <div className="head">
            <h1>{found.id}</h1>
            <State of={found.state} />
          </div>
          <Facts
            rows={[
              ["Place", found.cells.join(" / ")],
              ["Host", found.host],
              ["Cores", `${number(found.cpus_used)} of ${number(found.cpus)} held`],
              ["Memory", <Bytes of={found.memory_bytes} />],
              ["Devices", `${found.gpus_used} of ${found.gpus} held`],
              ["Joined", <When at={found.joined_at} />],
              ["Marked", found.marked_at && <When at={found.marked_at} />],
              ["By", found.marked_by],
              ["Because", found.text],
              ["Labels", Object.entries(found.labels).map(([key, value]) => `${key}=${value}`).join(" ")],
            ]}
          />
          <Use node={found} />
          <Devices node={found} />
        </>
      )}
    </Answer>
  );
}

const VERBS: [string, string][] = [
  ["drain", "Drain"], ["cordon", "Cordon"], ["undrain", "Use it again"],
];

/** First what would happen, then the deed: draining asks for a look at the touched jobs. */
function Use({ node }: { node: NodeRow }) {
  const cache = useQueryClient();
  const [reason, setReason] = useState("");
  const [plan, setPlan] = useState<DrainPlan | null>(null);
  const mark = useMutation({
    mutationFn: ({ action, dry }: { action: string; dry: boolean }) => api.markNode(node.id, action, reason, dry),
    onSuccess: async (found) => {
      setPlan(found.dry_run ? found : null);
      if (!found.dry_run) await cache.invalidateQueries({ queryKey: ["cluster"] });
    },
  });
  const out = node.state !== "healthy";
  return (
    <Card title="Use">
      <div className="tools">
        <input className="long" aria-label="Reason" placeholder="Reason, shown to the owners" value={reason} onChange={(event) => setReason(event.target.value)} />
        {VERBS.filter(([action]) => (action === "undrain") === out).map(([action, title]) => (
          <button key={action} type="button" disabled={mark.isPending || node.state === "lost" || node.state === "removed"} onClick={() => mark.mutate({ action, dry: action !== "undrain" })}>
            {title}
          </button>
        ))}
      </div>
      {plan && (
        <div role="status" className="plan">
          <p>
            {plan.action === "drain" ? "Draining" : "Cordoning"} {plan.node} touches {plan.jobs.length}{" "}
            {plan.jobs.length === 1 ? "job" : "jobs"}.
          </p>
          <ul>
            {plan.jobs.map((one) => (
              <li key={one.job}>
                <Link to={jobPath(one.job)}>{one.job}</Link>: {one.effect}
              </li>
            ))}
          </ul>
          <button type="button" className="main" disabled={mark.isPending} onClick={() => mark.mutate({ action: plan.action, dry: false })}>
            {plan.action === "drain" ? "Drain it now" : "Cordon it now"}
          </button>{" "}
          <button type="button" onClick={() => setPlan(null)}>
            Leave it
          </button>
        </div>
      )}
      <Trouble error={mark.error} />
    </Card>
  );
}

function Devices({ node }: { node: NodeRow }) {
  if (!node.devices.length) return <p className="card">This node has cores and memory, and no devices.</p>;
  return (
    <Card title="Devices">
      <Table
        name={`Devices of ${node.id}`}
        rows={node.devices}
        id={(one) => one.index}
        columns={[
          { name: "Device", cell: (one) => one.index },
          { name: "Type", cell: (one) => one.type },
          { name: "Health", cell: (one) => <State of={one.health} /> },
          { name: "Memory", cell: (one) => <Bytes of={one.memory_bytes} />, numeric: true },
          { name: "Held by", cell: (one) => (one.job ? <Link to={jobPath(one.job)}>{one.job}</Link> : <span className="soft">idle</span>) },
        ]}
      />
    </Card>
  );
}
