/** The figures that a job's loop commits, as curves over all attempts, beside those of other jobs. */
import { useQueries, useQuery } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { api } from "../api/client";
import { number } from "../format";
import { useQueryValues } from "../router";
import { Answer, Table } from "./basics";
import { Chart } from "./Chart";
import { curvesOf, type Mark, marksOf, type Series, smoothed } from "./curves";

/** Of each curve: more than a chart has pixels for is not shown. */
const POINTS = 1000;
const ROWS_SHOWN = 200;
const JOBS_MAX = 4;

export function Metrics({ job }: { job: string }) {
  const commits = useQuery({ queryKey: ["job", job, "commits"], queryFn: () => api.sample(job, "Committed", POINTS) });
  const failures = useQuery({ queryKey: ["job", job, "failures"], queryFn: () => api.failures(job) });
  const [values, change] = useQueryValues();
  const others = (values.get("with") ?? "").split(",").filter((one) => one && one !== job).slice(0, JOBS_MAX);
  const beside = useQueries({
    queries: others.map((one) => ({ queryKey: ["job", one, "commits"], queryFn: () => api.sample(one, "Committed", POINTS) })),
  });
  const smoothing = Number(values.get("smooth") ?? 0) || 0;
  const marks = useMemo(() => marksOf(failures.data), [failures.data]);
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
        const compared = others.map((name, i) => ({ name, curves: curvesOf(beside[i]?.data?.items ?? []) }));
        return (
          <>
            <Choices job={job} others={others} smoothing={smoothing} change={change} />
            {newest > items.length && (
              <p className="soft">
                {number(items.length)} of {number(newest)} commits, evenly spread, the newest among them.
              </p>
            )}
            <div className="charts">
              {curves.map((one) => (
                <Curve key={one.name} job={job} curve={one} compared={compared} smoothing={smoothing} marks={marks} />
              ))}
            </div>
          </>
        );
      }}
    </Answer>
  );
}

interface CurveProps {
  job: string;
  curve: Series;
  compared: { name: string; curves: Series[] }[];
  smoothing: number;
  marks: Mark[];
}

function Curve({ job, curve, compared, smoothing, marks }: CurveProps) {
  const same = compared.flatMap(({ name, curves }) => curves.filter((one) => one.name === curve.name).map((one) => ({ name, points: one.points })));
  const all = [{ name: compared.length ? job : curve.name, points: curve.points }, ...same];
  return (
    <Chart
      name={curve.name}
      kind="line"
      series={all.map((one) => ({ name: one.name, points: smoothed(one.points, smoothing) }))}
      marks={marks}
      x="commit"
      y={curve.name}
      table={
        <Table
          name={curve.name}
          rows={curve.points.slice(-ROWS_SHOWN)}
          id={([n]) => n}
          columns={[
            { name: "Commit", cell: ([n]) => n, numeric: true },
            { name: curve.name, cell: ([, value]) => number(value), numeric: true },
          ]}
        />
      }
    />
  );
}

interface ChoicesProps {
  job: string;
  others: string[];
  smoothing: number;
  change: (values: Record<string, string>) => void;
}

/** How much the curves are smoothed, and beside which jobs they are drawn; both are in the address. */
function Choices({ job, others, smoothing, change }: ChoicesProps) {
  const [text, setText] = useState("");
  const jobs = useQuery({ queryKey: ["jobs", "names"], queryFn: () => api.jobs({ all: true, limit: 200 }) });
  const names = (jobs.data?.items ?? []).filter((one) => one.progress?.commit && one.id !== job && !others.includes(one.id)).map((one) => one.id);
  const put = (found: string[]) => change({ with: found.join(",") });
  return (
    <div className="tools" role="group" aria-label="Curves">
      <label>
        Smoothing{" "}
        <input type="range" min={0} max={0.99} step={0.01} value={smoothing} onChange={(event) => change({ smooth: event.target.value === "0" ? "" : event.target.value })} />{" "}
        {smoothing.toFixed(2)}
      </label>
      <form
        className="tools flat"
        onSubmit={(event) => {
          event.preventDefault();
          if (text) put([...others, text]);
          setText("");
        }}
      >
        <label>
          Beside{" "}
          <input list="jobs-with-commits" value={text} placeholder="another job" onChange={(event) => setText(event.target.value)} />
        </label>
        <datalist id="jobs-with-commits">
          {names.map((one) => (
            <option key={one} value={one} />
          ))}
        </datalist>
        <button type="submit" disabled={!text || others.length >= JOBS_MAX}>
          Compare
        </button>
      </form>
      {others.map((one) => (
        <button key={one} type="button" title={`Without ${one}`} onClick={() => put(others.filter((name) => name !== one))}>
          {one} ✕
        </button>
      ))}
    </div>
  );
}
