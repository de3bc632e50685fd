/** Nodes and their devices, grouped by rack: what is busy, idle or out of order, and who holds it. */
import { type CSSProperties, type KeyboardEvent, memo } from "react";
import type { Heat, HeatNode } from "../api/types";
import { counted } from "../format";
import { jobPath, Link, nodePath } from "../router";

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

/** Hues that differ at a glance; none is the red of a device that is out of order. */
const HUES = [250, 150, 75, 310, 195, 110, 345, 280];
const LEGEND_MAX = 12;
const slots = new Map<string, number>();

/** A place in the palette for each job, the lowest that no other job of `jobs` has; a job keeps its own while it is there. */
export function slotsOf(jobs: string[], kept: Map<string, number> = slots): Map<string, number> {
  const here = new Set(jobs);
  for (const job of [...kept.keys()]) if (!here.has(job)) kept.delete(job);
  const taken = new Set(kept.values());
  let next = 0;
  for (const job of jobs) {
    if (kept.has(job)) continue;
    while (taken.has(next)) next += 1;
    taken.add(next);
    kept.set(job, next);
  }
  return kept;
}

/** How a device of a job looks: a hue, and stripes where more jobs are shown than there are hues. */
function lookOf(slot: number): { className: string; style: CSSProperties } {
  const round = Math.floor(slot / HUES.length) % 3;
  return { className: `cell held ${["", "striped", "dotted"][round]}`, style: { "--hue": HUES[slot % HUES.length] } as CSSProperties };
}

/** Jobs by the number of devices they hold. */
export function heldBy(heat: Heat): [string, number][] {
  const counts = new Map<string, number>();
  for (const node of heat.items) for (const job of holdersOf(node, heat.jobs)) if (job) counts.set(job, (counts.get(job) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0]));
}

/** What a screen reader says of a node, and what hovering shows. */
export function sentenceOf(node: HeatNode, holders: string[]): string {
  const names = [...new Set(holders.filter(Boolean))];
  const parts = [`${node.id}, ${node.state}`, `${holders.filter(Boolean).length} of ${holders.length} devices held`];
  if (names.length) parts.push(`by ${names.slice(0, 4).join(", ")}${names.length > 4 ? ` and ${names.length - 4} more` : ""}`);
  if (node.bad.length) parts.push(`out of order: ${node.bad.join(", ")}`);
  return parts.join("; ");
}

/** `holders` is one text, so that a node is drawn again only when its own devices change hands; `job slot` for each device. */
const NodeCells = memo(function NodeCells({ node, holders, stop }: { node: HeatNode; holders: string; stop: boolean }) {
  const devices = node.held.length ? holders.split("\n").map((one) => one.split(" ")) : [];
  const jobs = devices.map(([job]) => job ?? "");
  const bad = new Set(node.bad);
  const words = sentenceOf(node, jobs);
  return (
    <Link to={nodePath(node.id)} className={`heat-node ${node.state}`} aria-label={words} title={words} tabIndex={stop ? 0 : -1}>
      <span className="heat-name">{node.state === "healthy" ? node.id : `${node.id} ${node.state}`}</span>
      <span className="heat-cells" aria-hidden>
        {jobs.map((job, i) => {
          if (bad.has(i) || !job) return <span key={i} className={`cell ${bad.has(i) ? "bad" : "free"}`} />;
          return <span key={i} {...lookOf(Number(devices[i]![1]))} />;
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
  const jobs = heldBy(heat);
  const slot = slotsOf(jobs.map(([job]) => job));
  const told = (node: HeatNode) => holdersOf(node, heat.jobs).map((job) => (job ? `${job} ${slot.get(job)}` : "")).join("\n");
  return (
    <div>
      <p className="legend soft">
        <span className="cell free" aria-hidden /> <span>idle</span>
        <span className="cell bad" aria-hidden /> <span>out of order</span>
        {jobs.slice(0, LEGEND_MAX).map(([job, n]) => (
          <span key={job} title={`${job} holds ${counted(n, "device")}`}>
            <span {...lookOf(slot.get(job)!)} aria-hidden /> <Link to={jobPath(job)}>{job}</Link> {n}
          </span>
        ))}
        {jobs.length > LEGEND_MAX && <span>and {counted(jobs.length - LEGEND_MAX, "job")} more</span>}
      </p>
      <div className={dense ? "heat dense" : "heat"} role="group" aria-label="Heat map of nodes and devices; arrow keys move" onKeyDown={walk}>
        {racksOf(heat.items).map(([rack, nodes]) => (
          <section key={rack} className="rack" aria-label={`${rack}, ${nodes.length} nodes`}>
            <div className="rack-name">{rack}</div>
            <div className="rack-nodes">
              {nodes.map((node) => (
                <NodeCells key={node.id} node={node} holders={told(node)} stop={node.id === first} />
              ))}
            </div>
          </section>
        ))}
      </div>
    </div>
  );
}
