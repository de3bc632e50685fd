/** All jobs, newest first: filters live in the address, and only the rows in sight are drawn. */
import { useInfiniteQuery, useMutation, useQuery } from "@tanstack/react-query";
import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef, useState } from "react";
import { api, type JobQuery } from "../api/client";
import type { JobRow, JobStateName } from "../api/types";
import { counted, number } from "../format";
import { JobState, Seconds, Trouble, When } from "../parts/basics";
import { jobPath, Link, useQueryValues } from "../router";

const ROW_HEIGHT = 34;
const PAGE = 200;
const ALL: JobStateName[] = [
  "SUBMITTED", "QUEUED", "ADMITTED", "CHECKING", "STARTING", "RUNNING", "RECOVERING", "RESIZING", "PREEMPTING", "PAUSED", "STOPPING", "SUCCEEDED",
  "FAILED", "CANCELLED",
];
const HEADS = ["", "Job", "State", "Why", "User", "Queue", "Priority", "Devices", "Ready", "Ran", "Age", "Restarts", "Commit"];
const NUMERIC = new Set(["Priority", "Devices", "Ready", "Restarts", "Commit", "Ran"]);
/** Groups of states, as tabs with totals. */
const GROUPS: [string, string, JobStateName[]][] = [
  ["", "All", ALL],
  ["live", "Running", ["ADMITTED", "CHECKING", "STARTING", "RUNNING", "RECOVERING", "RESIZING", "PREEMPTING", "STOPPING"]],
  ["waiting", "Waiting", ["SUBMITTED", "QUEUED"]],
  ["paused", "Paused", ["PAUSED"]],
  ["succeeded", "Succeeded", ["SUCCEEDED"]],
  ["failed", "Failed", ["FAILED"]],
  ["cancelled", "Cancelled", ["CANCELLED"]],
];
const ORDERS: [string, string][] = [["", "newest first"], ["name", "name"], ["state", "state"], ["priority", "priority"], ["queue", "queue"]];

export function Jobs() {
  const [values, change] = useQueryValues();
  const wanted: JobQuery = {
    all: values.get("ended") !== "no",
    state: values.get("state") ? [values.get("state")!] : values.get("show") ? GROUPS.find(([name]) => name === values.get("show"))?.[2] : undefined,
    queue: values.get("queue") ?? "",
    text: values.get("text") ?? "",
    sort: values.get("sort") ?? "",
    limit: PAGE,
  };
  const jobs = useInfiniteQuery({
    queryKey: ["jobs", wanted],
    queryFn: ({ pageParam }) => api.jobs({ ...wanted, cursor: pageParam }),
    initialPageParam: "",
    getNextPageParam: (page) => page.next ?? undefined,
    placeholderData: (before) => before,
  });
  const rows = useMemo(() => jobs.data?.pages.flatMap((page) => page.items) ?? [], [jobs.data]);
  const [chosen, choose] = useState<ReadonlySet<string>>(new Set());
  return (
    <>
      <h1>Jobs</h1>
      <Groups shown={values.get("show") ?? ""} />
      <Filters values={values} change={change} />
      <Bulk chosen={rows.filter((job) => chosen.has(job.id))} done={() => choose(new Set())} />
      <Trouble error={jobs.error} />
      {jobs.data && !rows.length ? (
        <p className="card">
          No job fits. Submit one here under <Link to="/submit">Submit</Link>, or with <code>rota run job.yaml</code>
        </p>
      ) : (
        <JobTable rows={rows} more={jobs.hasNextPage} loading={jobs.isFetchingNextPage} load={() => void jobs.fetchNextPage()} chosen={chosen} choose={choose} />
      )}
    </>
  );
}

function Groups({ shown }: { shown: string }) {
  const status = useQuery({ queryKey: ["cluster", "status"], queryFn: api.status });
  const jobs = status.data?.cluster.jobs;
  return (
    <nav className="tabs" aria-label="Jobs by state">
      {GROUPS.map(([name, title, states]) => (
        <Link key={name} to={name ? `/jobs?show=${name}` : "/jobs"} aria-current={name === shown ? "page" : undefined}>
          {title}
          {jobs && ` (${states.reduce((sum, one) => sum + (jobs[one] ?? 0), 0)})`}
        </Link>
      ))}
    </nav>
  );
}

function Filters({ values, change }: { values: URLSearchParams; change: (values: Record<string, string>) => void }) {
  const queues = useQuery({ queryKey: ["cluster", "queues"], queryFn: api.queues });
  const [text, setText] = useState(values.get("text") ?? "");
  useEffect(() => {
    if (text === (values.get("text") ?? "")) return;
    const timer = setTimeout(() => change({ text }), 200);
    return () => clearTimeout(timer);
  });
  return (
    <div className="tools" role="search" aria-label="Filter jobs">
      <input type="search" aria-label="Job or user has" placeholder="Job or user (press /)" value={text} onChange={(event) => setText(event.target.value)} />
      <label>
        State{" "}
        <select value={values.get("state") ?? ""} onChange={(event) => change({ state: event.target.value })}>
          <option value="">any</option>
          {ALL.map((one) => (
            <option key={one}>{one}</option>
          ))}
        </select>
      </label>
      <label>
        Queue{" "}
        <select value={values.get("queue") ?? ""} onChange={(event) => change({ queue: event.target.value })}>
          <option value="">any</option>
          {queues.data?.items.map((one) => (
            <option key={one.path}>{one.path}</option>
          ))}
        </select>
      </label>
      <label>
        Order{" "}
        <select value={values.get("sort") ?? ""} onChange={(event) => change({ sort: event.target.value })}>
          {ORDERS.map(([value, title]) => (
            <option key={value} value={value}>
              {title}
            </option>
          ))}
        </select>
      </label>
      <label>
        <input type="checkbox" checked={values.get("ended") !== "no"} onChange={(event) => change({ ended: event.target.checked ? "" : "no" })} /> ended ones too
      </label>
    </div>
  );
}

function Bulk({ chosen, done }: { chosen: JobRow[]; done: () => void }) {
  const stop = useMutation({
    mutationFn: () => Promise.all(chosen.filter((job) => !job.ended_at).map((job) => api.act(job.id, "stop"))),
    onSuccess: done,
  });
  if (!chosen.length) return null;
  return (
    <div className="tools" role="status">
      {chosen.length} chosen{" "}
      <button type="button" onClick={() => confirm(`Stop ${chosen.map((job) => job.id).join(", ")}?`) && stop.mutate()} disabled={stop.isPending}>
        Stop them
      </button>
      <button type="button" onClick={done}>
        None
      </button>
      <Trouble error={stop.error} />
    </div>
  );
}

interface TableProps {
  rows: JobRow[];
  more: boolean;
  loading: boolean;
  load: () => void;
  chosen: ReadonlySet<string>;
  choose: (chosen: ReadonlySet<string>) => void;
}

function JobTable({ rows, more, loading, load, chosen, choose }: TableProps) {
  const pane = useRef<HTMLDivElement>(null);
  const list = useVirtualizer({ count: rows.length, getScrollElement: () => pane.current, estimateSize: () => ROW_HEIGHT, overscan: 12 });
  const items = list.getVirtualItems();
  const last = items.at(-1)?.index ?? 0;
  useEffect(() => {
    if (more && !loading && last >= rows.length - 30) load();
  }, [more, loading, last, rows.length, load]);
  const above = items[0]?.start ?? 0;
  const below = list.getTotalSize() - (items.at(-1)?.end ?? 0);
  const toggle = (id: string) => {
    const next = new Set(chosen);
    if (!next.delete(id)) next.add(id);
    choose(next);
  };
  return (
    <>
      <div ref={pane} className="scroll tall" role="group" aria-label="Jobs" tabIndex={0}>
        <table aria-rowcount={more ? -1 : rows.length + 1}>
          <thead>
            <tr>
              {HEADS.map((name) => (
                <th key={name} scope="col" className={NUMERIC.has(name) ? "number" : undefined}>
                  {name || <span className="unseen">Choose</span>}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {above > 0 && <tr aria-hidden className="gap" style={{ height: above }} />}
            {items.map((item) => (
              <Row key={rows[item.index]!.id} job={rows[item.index]!} index={item.index} chosen={chosen.has(rows[item.index]!.id)} toggle={toggle} />
            ))}
            {below > 0 && <tr aria-hidden className="gap" style={{ height: below }} />}
          </tbody>
        </table>
      </div>
      <p className="soft" role="status">
        {counted(rows.length, "job")}
        {more ? ", more when you scroll" : ""} with {counted(rows.reduce((sum, job) => sum + (job.ended_at ? 0 : job.gpus), 0), "device")} held or wanted
      </p>
    </>
  );
}

function Row({ job, index, chosen, toggle }: { job: JobRow; index: number; chosen: boolean; toggle: (id: string) => void }) {
  return (
    <tr aria-rowindex={index + 2} style={{ height: ROW_HEIGHT }}>
      <td>
        <input type="checkbox" aria-label={`Choose ${job.id}`} checked={chosen} onChange={() => toggle(job.id)} />
      </td>
      <th scope="row">
        <Link to={jobPath(job.id)} className="row-link">
          {job.id}
        </Link>
      </th>
      <td>
        <JobState of={{ ...job, phase: "" }} />
      </td>
      <td className="cut" title={job.suspected || job.text || job.phase}>
        {job.reason && <code>{job.reason}</code>} {job.suspected || job.text || job.phase}
      </td>
      <td>{job.user}</td>
      <td>{job.queue}</td>
      <td className="number">{job.priority}</td>
      <td className="number">{number(job.gpus)}</td>
      <td className="number">
        {job.instances_ready}/{job.instances_total}
      </td>
      <td className="number">
        <Seconds of={job.run_s || null} />
      </td>
      <td>
        <When at={job.submitted_at} ago />
      </td>
      <td className="number">{job.restarts}</td>
      <td className="number">{job.progress?.commit ?? ""}</td>
    </tr>
  );
}
