/** The figures that a job's loop commits, as curves over all attempts. */
import { useQuery } from "@tanstack/react-query";
import { api } from "../api/client";
import type { EventRecord } from "../api/types";
import { number } from "../format";
import { Answer, Table } from "./basics";
import { Chart } from "./Chart";

/** Of each curve: more than a chart has pixels for is not shown. */
const POINTS = 1000;
const ROWS_SHOWN = 200;

/** One curve a metric over the number of the commit; a commit that came again after a rollback counts with its last value. */
export function curvesOf(commits: EventRecord[]): { name: string; points: [number, number][] }[] {
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

export function Metrics({ job }: { job: string }) {
  const commits = useQuery({ queryKey: ["job", job, "commits"], queryFn: () => api.sample(job, "Committed", POINTS) });
  return (
    <Answer of={commits}>
      {({ items }) => {
        const curves = curvesOf(items);
        const newest = Number(items.at(-1)?.n ?? 0);
        if (!curves.length) {
          return (
            <p className="card">
              No figures yet. A loop gives them with its commits: <code>await flow.commit(loss=0.1)</code>
            </p>
          );
        }
        return (
          <div className="charts">
            {newest > items.length && (
              <p className="soft">
                {number(items.length)} of {number(newest)} commits, evenly spread, the newest among them.
              </p>
            )}
            {curves.map((one) => (
              <Chart
                key={one.name}
                name={one.name}
                kind="line"
                series={[one]}
                x="commit"
                y={one.name}
                table={
                  <Table
                    name={one.name}
                    rows={one.points.slice(-ROWS_SHOWN)}
                    id={([n]) => n}
                    columns={[
                      { name: "Commit", cell: ([n]) => n, numeric: true },
                      { name: one.name, cell: ([, value]) => number(value), numeric: true },
                    ]}
                  />
                }
              />
            ))}
          </div>
        );
      }}
    </Answer>
  );
}
