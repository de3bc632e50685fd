/** Curves of what a job commits: points, smoothing, marks; without the picture. */
import type { EventRecord, FailureList } from "../api/types";

export interface Series {
  name: string;
  points: [number, number][];
}

/** A place on the x axis, drawn as a dashed line with its words. */
export interface Mark {
  x: number;
  words: string;
}

/** One curve a metric over the number of the commit; a commit that came again after a rollback counts with its last value. */
export function curvesOf(commits: EventRecord[]): Series[] {
  const curves = new Map<string, Map<number, number>>();
  for (const one of commits) {
    for (const [name, value] of Object.entries((one.metrics ?? {}) as Record<string, unknown>)) {
      if (typeof value !== "number" || !Number.isFinite(value)) continue;
      const curve = curves.get(name) ?? new Map<number, number>();
      curves.set(name, curve.set(Number(one.n), value));
    }
  }
  return [...curves].map(([name, points]) => ({ name, points: [...points].sort((a, b) => a[0] - b[0]) }));
}

/** Exponential mean with the weight `of` of the past, 0 to 1, without the bias of its first values (Kingma and Ba 2015, section 3). */
export function smoothed(points: [number, number][], of: number): [number, number][] {
  if (of <= 0) return points;
  let mean = 0;
  let weight = 0;
  return points.map(([n, value]): [number, number] => {
    mean = of * mean + (1 - of) * value;
    weight = of * weight + (1 - of);
    return [n, mean / weight];
  });
}

/** Where the job went back after a failure: at the commit that it restored. */
export function marksOf(failures: FailureList | undefined): Mark[] {
  return (failures?.items ?? []).map((one) => ({ x: one.restore, words: `recovery ${one.n}` }));
}
