/** Where the roles of a job's graph are drawn, and what is written on the lines between them. */
import { Graph as Layers, layout } from "@dagrejs/dagre";
import type { Graph, GraphRole } from "../api/types";

export const ROLE_WIDTH = 210;
const ROLE_HEIGHT = 84;
const CHIPS_A_ROW = 12;
const CHIP_ROW_HEIGHT = 18;
export const CHIPS_MAX = 48;

export interface PlacedRole {
  role: GraphRole;
  x: number;
  y: number;
  height: number;
  unit: number;
}

export interface DrawnEdge {
  id: string;
  source: string;
  target: string;
  kinds: string[];
}

/** Edges between two roles as one line that names every kind; lines of a role to itself are said in its box. */
export function linesOf(graph: Graph): DrawnEdge[] {
  const lines = new Map<string, DrawnEdge>();
  for (const { source, target, kind } of graph.edges) {
    if (source === target) continue;
    const id = `${source}>${target}`;
    const line = lines.get(id) ?? { id, source, target, kinds: [] };
    if (!line.kinds.includes(kind)) line.kinds.push(kind);
    lines.set(id, line);
  }
  return [...lines.values()];
}

/** Layers from left to right in the direction of the edges. */
export function place(graph: Graph): PlacedRole[] {
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
  for (const line of linesOf(graph)) {
    if (heights.has(line.source) && heights.has(line.target)) layers.setEdge(line.source, line.target);
  }
  layout(layers);
  return graph.roles.map((role) => {
    const { x, y } = layers.node(role.name) as { x: number; y: number };
    const height = heights.get(role.name)!;
    const unit = graph.units.findIndex((members) => members.some((member) => member.startsWith(`${role.name}/`)));
    return { role, x: x - ROLE_WIDTH / 2, y: y - height / 2, height, unit };
  });
}

/** States of a role's instances with how many are in each, the most frequent first. */
export function countsOf(states: string[]): [string, number][] {
  const counts = new Map<string, number>();
  for (const state of states) counts.set(state, (counts.get(state) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}
