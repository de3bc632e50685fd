/** Where the roles of a job's graph are drawn, and what is written on the lines between them. */
import { Graph as Layers, layout } from "@dagrejs/dagre";
import type { GraphDocument, GraphRole, InstanceRow, ObservedEdge } from "../api/types";
import { bytes, number, seconds } from "../format";

export const ROLE_WIDTH = 210;
const ROLE_HEIGHT = 84;
const CHIPS_A_ROW = 12;
const CHIP_ROW_HEIGHT = 18;
export const CHIPS_MAX = 48;
const BACK_GAP = 24;

export interface PlacedRole {
  role: GraphRole;
  x: number;
  y: number;
  height: number;
}

export interface DrawnEdge {
  id: string;
  source: string;
  target: string;
  kinds: string[];
  /** For a line that runs against the layers: how far below its boxes it turns, to pass under all others; else 0. */
  below: number;
}

/** Role of an instance `role/rank`, or the role itself. */
const roleOf = (name: string) => name.split("/")[0]!;

/** Edges between two roles as one line that names every kind, declared and seen; what a role does to itself is said in its box. */
export function linesOf(graph: GraphDocument): DrawnEdge[] {
  const lines = new Map<string, DrawnEdge>();
  const roles = new Set(graph.roles.map((one) => one.name));
  const seen = graph.observed
    .map(({ source, target, kind }) => ({ source: roleOf(source), target: roleOf(target), kind }))
    .filter(({ source, target }) => roles.has(source) && roles.has(target));
  for (const { source, target, kind } of [...graph.edges, ...seen]) {
    if (source === target) continue;
    const id = `${source}>${target}`;
    const line = lines.get(id) ?? { id, source, target, kinds: [], below: 0 };
    if (!line.kinds.includes(kind)) line.kinds.push(kind);
    lines.set(id, line);
  }
  return [...lines.values()];
}

/** Calls and transfers that were seen on each line, at a moment in milliseconds: two of them give rates. */
export interface Observed {
  at: number;
  lines: Map<string, { n: number; failed: number; waited_s: number; bytes: number }>;
}

export function observedOf(observed: ObservedEdge[], at: number): Observed {
  const lines: Observed["lines"] = new Map();
  for (const one of observed) {
    const id = `${roleOf(one.source)}>${roleOf(one.target)}`;
    const sum = lines.get(id) ?? { n: 0, failed: 0, waited_s: 0, bytes: 0 };
    lines.set(id, { n: sum.n + one.n, failed: sum.failed + one.failed, waited_s: sum.waited_s + one.waited_s, bytes: sum.bytes + one.bytes });
  }
  return { at, lines };
}

/** What is written below the kinds of a line: its rate, failures, bytes, streams, lag of weights, who waits now. */
export function notesOf(line: DrawnEdge, graph: GraphDocument, instances: InstanceRow[], now: Observed, before: Observed | null): string[] {
  const notes: string[] = [];
  const [seen, last] = [now.lines.get(line.id), before?.lines.get(line.id)];
  if (seen) {
    const elapsed_s = before ? (now.at - before.at) / 1000 : 0;
    const live = last !== undefined && elapsed_s > 0 && seen.n >= last.n;
    notes.push(live ? `${number((seen.n - last.n) / elapsed_s)}/s` : `${seen.n} in all`);
    if (live && seen.bytes > last.bytes) notes.push(`${bytes((seen.bytes - last.bytes) / elapsed_s)}/s`);
    if (live && seen.n > last.n) notes.push(`${seconds((seen.waited_s - last.waited_s) / (seen.n - last.n))} each`);
    if (seen.failed) notes.push(`${seen.failed} failed`);
  }
  if (line.kinds.includes("stream")) {
    for (const one of graph.streams) if (one.seen && one.source && roleOf(one.source) === line.source) notes.push(`${one.name}: ${one.seen.queued} of ${one.cap} queued`);
  }
  const members = instances.filter((one) => one.role === line.target);
  const behind = members.flatMap((one) => one.progress?.weights ?? []).filter((row) => line.kinds.includes("weights") && row.edge.includes(line.source)).map((row) => row.behind ?? 0);
  if (behind.length && Math.max(...behind) > 0) notes.push(`${Math.max(...behind)} versions behind`);
  const waiting = waitersOf(line, instances);
  if (waiting) notes.push(`${waiting} waiting`);
  return notes;
}

/** How many instances of the source wait now for one of the target. */
export const waitersOf = (line: DrawnEdge, instances: InstanceRow[]): number =>
  instances.filter((one) => one.role === line.source && one.progress?.waits_for.some((name) => roleOf(name) === line.target)).length;

/** Roles in layers from left to right in the direction of the edges, and the lines between them. */
export function place(graph: GraphDocument): { roles: PlacedRole[]; lines: DrawnEdge[] } {
  const layers = new Layers({ directed: true });
  layers.setGraph({ rankdir: "LR", nodesep: 36, ranksep: 90 });
  layers.setDefaultEdgeLabel(() => ({}));
  const heights = new Map<string, number>();
  for (const role of graph.roles) {
    const rows = Math.ceil(Math.min(role.states.length, CHIPS_MAX) / CHIPS_A_ROW);
    const height = ROLE_HEIGHT + rows * CHIP_ROW_HEIGHT;
    heights.set(role.name, height);
    layers.setNode(role.name, { width: ROLE_WIDTH, height });
  }
  const lines = linesOf(graph).filter((line) => heights.has(line.source) && heights.has(line.target));
  for (const line of lines) {
    layers.setEdge(line.source, line.target);
  }
  layout(layers);
  const roles = graph.roles.map((role) => {
    const { x, y } = layers.node(role.name) as { x: number; y: number };
    const height = heights.get(role.name)!;
    return { role, x: x - ROLE_WIDTH / 2, y: y - height / 2, height };
  });
  const boxes = new Map(roles.map((one) => [one.role.name, one]));
  const floor = Math.max(0, ...roles.map((one) => one.y + one.height));
  let backs = 0;
  for (const line of lines) {
    const [from, to] = [boxes.get(line.source)!, boxes.get(line.target)!];
    if (to.x <= from.x) line.below = floor - Math.max(from.y + from.height, to.y + to.height) + BACK_GAP * ++backs;
  }
  return { roles, lines };
}

/** States of a role's instances with how many are in each, the most frequent first. */
export function countsOf(states: string[]): [string, number][] {
  const counts = new Map<string, number>();
  for (const state of states) counts.set(state, (counts.get(state) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}
