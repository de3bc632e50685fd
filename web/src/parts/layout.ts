/** Where the roles of a job's graph are drawn, and what is written on the lines between them. */
import { Graph as Layers, layout } from "@dagrejs/dagre";
import type { GraphDocument, GraphRole } from "../api/types";

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

/** Edges between two roles as one line that names every kind; lines of a role to itself are said in its box. */
export function linesOf(graph: GraphDocument): DrawnEdge[] {
  const lines = new Map<string, DrawnEdge>();
  for (const { source, target, kind } of graph.edges) {
    if (source === target) continue;
    const id = `${source}>${target}`;
    const line = lines.get(id) ?? { id, source, target, kinds: [], below: 0 };
    if (!line.kinds.includes(kind)) line.kinds.push(kind);
    lines.set(id, line);
  }
  return [...lines.values()];
}

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
