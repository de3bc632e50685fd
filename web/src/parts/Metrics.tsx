/** The figures that a job's loop commits, as curves over all attempts. */
import { useQuery } from "@tanstack/react-query";
import { api } from "../api/client";
import type { EventRecord } from "../api/types";
import { number } from "../format";
import { Answer, Table } from "./basics";
import { Chart } from "./Chart";

const PAGES_MAX = 20;
const ROWS_SHOWN = 200;

/** All commits of a job, page by page. */
async function commitsOf(job: string): Promise<EventRecord[]> {
  const found: EventRecord[] = [];
  let after = 0;
  for (let page = 0; page < PAGES_MAX; page++) {
    const { items, next } = await api.events(job, "Committed", after);
    found.push(...items);
    if (next === null) break;
    after = next;
  }
  return found;
}

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
  const commits = useQuery({ queryKey: ["job", job, "commits"], queryFn: () => commitsOf(job) });
  return (
    <Answer of={commits}>
      {(found) => {
        const curves = curvesOf(found);
        if (!curves.length) {
          return (
            <p className="card">
              No figures yet. A loop gives them with its commits: <code>await flow.commit(loss=0.1)</code>
            </p>
          );
        }
        return (
          <div className="charts">
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
