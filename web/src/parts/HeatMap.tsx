/** Nodes and their devices, grouped by rack: what is busy, idle or out of order, and who holds it. */
import { type CSSProperties, type KeyboardEvent, memo } from "react";
import type { Heat, HeatNode } from "../api/types";
import { hue } from "../format";
import { Link, nodePath } from "../router";

/** Nodes by the cells above them, in order of first sight; a node without cells is on its own ground. */
export function racksOf(nodes: HeatNode[]): [string, HeatNode[]][] {
  const racks = new Map<string, HeatNode[]>();
  for (const node of nodes) {
    const name = node.cells.filter((cell) => cell !== node.id).join(" / ") || "nodes";
    racks.set(name, [...(racks.get(name) ?? []), node]);
  }
  return [...racks];
}

/** For each device of a node the job that holds it, or an empty text. */
export const holdersOf = (node: HeatNode, jobs: string[]): string[] => node.held.map((one) => (one === null ? "" : (jobs[one] ?? "")));

/** What a screen reader says of a node, and what hovering shows. */
export function sentenceOf(node: HeatNode, holders: string[]): string {
  const names = [...new Set(holders.filter(Boolean))];
  const parts = [`${node.id}, ${node.state}`, `${holders.filter(Boolean).length} of ${holders.length} devices held`];
  if (names.length) parts.push(`by ${names.slice(0, 4).join(", ")}${names.length > 4 ? ` and ${names.length - 4} more` : ""}`);
  if (node.bad.length) parts.push(`out of order: ${node.bad.join(", ")}`);
  return parts.join("; ");
}

/** `holders` is one text, so that a node is drawn again only when its own devices change hands. */
const NodeCells = memo(function NodeCells({ node, holders, stop }: { node: HeatNode; holders: string; stop: boolean }) {
  const jobs = node.held.length ? holders.split("\n") : [];
  const bad = new Set(node.bad);
  const words = sentenceOf(node, jobs);
  return (
    <Link to={nodePath(node.id)} className={`heat-node ${node.state}`} aria-label={words} title={words} tabIndex={stop ? 0 : -1}>
      <span className="heat-name">{node.state === "healthy" ? node.id : `${node.id} ${node.state}`}</span>
      <span className="heat-cells" aria-hidden>
        {jobs.map((job, i) => {
          const kind = bad.has(i) ? "bad" : job ? "held" : "free";
          return <span key={i} className={`cell ${kind}`} style={kind === "held" ? ({ "--hue": hue(job) } as CSSProperties) : undefined} />;
        })}
        {!jobs.length && <span className="soft">no devices</span>}
      </span>
    </Link>
  );
});

/** Arrow keys go from node to node; Tab leaves the map. */
function walk(event: KeyboardEvent<HTMLDivElement>): void {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const all = [...event.currentTarget.querySelectorAll<HTMLElement>(".heat-node")];
  const here = all.indexOf(document.activeElement as HTMLElement);
  const next = all[Math.min(all.length - 1, Math.max(0, here + step))];
  if (here >= 0 && next) {
    event.preventDefault();
    next.focus();
  }
}

export function HeatMap({ heat }: { heat: Heat }) {
  const first = heat.items[0]?.id;
  const dense = heat.items.length > 120;
  return (
    <div>
      <p className="legend soft">
        <span className="cell free" aria-hidden /> idle <span className="cell held" aria-hidden /> held (one colour a job){" "}
        <span className="cell bad" aria-hidden /> out of order
      </p>
      <div className={dense ? "heat dense" : "heat"} role="group" aria-label="Heat map of nodes and devices; arrow keys move" onKeyDown={walk}>
        {racksOf(heat.items).map(([rack, nodes]) => (
          <section key={rack} className="rack" aria-label={`${rack}, ${nodes.length} nodes`}>
            <div className="rack-name">{rack}</div>
            <div className="rack-nodes">
              {nodes.map((node) => (
                <NodeCells key={node.id} node={node} holders={holdersOf(node, heat.jobs).join("\n")} stop={node.id === first} />
              ))}
            </div>
          </section>
        ))}
      </div>
    </div>
  );
}
