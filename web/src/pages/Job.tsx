/** One job: what it does, what happened to it, what it says, where it runs, what it is. */
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { lazy, Suspense, useState } from "react";
import { api, type JobAction } from "../api/client";
import type { JobDocument } from "../api/types";
import { placedWords, seconds } from "../format";
import { Answer, Card, Facts, JobState, Seconds, Table, Trouble, When } from "../parts/basics";
import { Diff } from "../parts/Diff";
import { asLines } from "../parts/diff";
import { Decisions, ExplainCard, stopsWhom } from "../parts/ExplainCard";
import { Failures } from "../parts/Failures";
import { LogView } from "../parts/LogView";
import { Metrics } from "../parts/Metrics";
import { Now } from "../parts/Now";
import { TimelineChart } from "../parts/TimelineChart";
import { timelineOf } from "../parts/timeline";
import { jobPath, Link, nodePath, useQueryValues } from "../router";

/** The library that draws it is loaded with the first graph. */
const RoleGraph = lazy(() => import("../parts/RoleGraph").then((found) => ({ default: found.RoleGraph })));

const TABS: [string, string][] = [
  ["", "Graph"], ["now", "Now"], ["timeline", "Timeline"], ["failures", "Failures"], ["logs", "Logs"], ["metrics", "Metrics"],
  ["placement", "Placement"], ["explain", "Explain"], ["spec", "Spec"],
];

export function Job({ id, tab }: { id: string; tab: string }) {
  const job = useQuery({ queryKey: ["job", id, "show"], queryFn: () => api.job(id) });
  return (
    <Answer of={job}>
      {(found) => (
        <>
          <Head job={found} explained={found.state === "QUEUED" && (tab === "" || tab === "explain")} />
          <nav className="tabs" aria-label={`Parts of ${found.id}`}>
            {TABS.map(([name, title]) => (
              <Link key={name} to={jobPath(found.id, name)} aria-current={name === tab ? "page" : undefined}>
                {title}
                {name === "failures" && found.failovers > 0 && ` (${found.failovers})`}
              </Link>
            ))}
          </nav>
          <Body job={found} tab={tab} />
        </>
      )}
    </Answer>
  );
}

/** `explained`: the tab below says why the job waits, with the numbers of now. */
function Head({ job, explained }: { job: JobDocument; explained: boolean }) {
  return (
    <>
      <div className="head">
        <h1>{job.id}</h1>
        <JobState of={job} />
        <Actions job={job} />
      </div>
      {job.suspected && (
        <p className="warning" role="alert">
          <span aria-hidden>?</span> It may hang: {job.suspected}. <Link to={jobPath(job.id, "now")}>Who waits for whom</Link>
        </p>
      )}
      {job.text && !explained && (
        <p className="lead">
          {job.reason && <code>{job.reason}</code>} {job.text}
        </p>
      )}
      <Facts
        rows={[
          ["Queue", <Link to={`/jobs?queue=${encodeURIComponent(job.queue)}`}>{job.queue}</Link>],
          ["Priority", job.priority],
          ["User", job.user],
          ["Submitted", <When at={job.submitted_at} />],
          ["Started", job.started_at && <When at={job.started_at} />],
          ["Ended", job.ended_at && <When at={job.ended_at} />],
          ["Ran", job.run_s > 0 && <Seconds of={job.run_s} />],
          ["Attempt", job.attempt || ""],
          ["Ready", `${job.instances_ready} of ${job.instances_total}`],
          ["Commit", job.progress?.commit ?? ""],
          ["Opens", portsOf(job)],
          ["Master", job.master && [`pid ${job.master.pid}`, `epoch ${job.master.epoch}`, job.master.node].filter(Boolean).join(", ")],
        ]}
      />
    </>
  );
}

/** A link to each port of its instances; the instance is named where a role has several. */
function portsOf(job: JobDocument) {
  const ports = job.instances.flatMap((one) => Object.entries(one.ports).map(([name, path]) => ({ name, path, of: one.instance })));
  if (!ports.length) return "";
  return ports.map((one) => (
    <a key={one.path} href={one.path} target="_blank" rel="noreferrer">
      {one.name} {job.instances.length > 1 && `of ${one.of}`}{" "}
    </a>
  ));
}

const OVER = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);

/** States in which a job can be neither paused nor resumed. */
const BUSY = new Set(["SUBMITTED", "STOPPING", "PREEMPTING"]);

function Actions({ job }: { job: JobDocument }) {
  const cache = useQueryClient();
  const act = useMutation({
    mutationFn: (action: JobAction) => api.act(job.id, action),
    onSuccess: () => cache.invalidateQueries({ queryKey: ["job", job.id] }),
  });
  const again = (
    <Link className="button" to={`/submit?from=${encodeURIComponent(job.id)}`}>
      Submit again
    </Link>
  );
  if (OVER.has(job.state)) return <span className="tools">{again}</span>;
  const paused = job.state === "PAUSED";
  return (
    <span className="tools">
      {again}
      <button type="button" disabled={act.isPending || BUSY.has(job.state)} onClick={() => act.mutate(paused ? "resume" : "pause")}>
        {paused ? "Resume" : "Pause"}
      </button>
      <button type="button" disabled={act.isPending || job.state === "STOPPING"} onClick={() => confirm(`Stop ${job.id}?`) && act.mutate("stop")}>
        Stop
      </button>
      <Trouble error={act.error} />
    </span>
  );
}

function Body({ job, tab }: { job: JobDocument; tab: string }) {
  switch (tab) {
    case "":
      return <GraphTab job={job} />;
    case "now":
      return <Now job={job} />;
    case "timeline":
      return <TimelineTab job={job} />;
    case "failures":
      return <FailuresTab job={job} />;
    case "logs":
      return <LogsTab job={job} />;
    case "metrics":
      return <Metrics job={job.id} />;
    case "placement":
      return <PlacementTab job={job} />;
    case "explain":
      return <ExplainTab job={job} />;
    case "spec":
      return <SpecTab job={job} />;
    default:
      return <p className="card">This job has no part “{tab}”.</p>;
  }
}

/** Explaining costs the scheduler trial passes, so it is asked for only where it is shown. */
const useExplain = (job: JobDocument, enabled: boolean) =>
  useQuery({ queryKey: ["job", job.id, "explain"], queryFn: () => api.explain(job.id), enabled });

function GraphTab({ job }: { job: JobDocument }) {
  const graph = useQuery({ queryKey: ["job", job.id, "graph"], queryFn: () => api.graph(job.id) });
  const explain = useExplain(job, job.state === "QUEUED");
  return (
    <>
      {job.state === "QUEUED" && explain.data?.waiting && <ExplainCard of={explain.data} />}
      {job.error && (
        <Card title={`✗ ${job.error.reason}${job.error.instance && ` in ${job.error.instance}`}`} tone="bad">
          <p>{job.error.text}</p>
          {job.error.traceback && <pre tabIndex={0}>{job.error.traceback}</pre>}
        </Card>
      )}
      <Suspense fallback={<p className="soft">Loading.</p>}>
        <Answer of={graph}>{(found) => <RoleGraph job={job.id} graph={found} at={graph.dataUpdatedAt} instances={job.instances} />}</Answer>
      </Suspense>
    </>
  );
}

function TimelineTab({ job }: { job: JobDocument }) {
  const failures = useQuery({ queryKey: ["job", job.id, "failures"], queryFn: () => api.failures(job.id) });
  const events = useQuery({ queryKey: ["job", job.id, "events"], queryFn: () => api.events(job.id) });
  if (!failures.data || !events.data) return <Trouble error={failures.error ?? events.error} />;
  return (
    <>
      <Card title="Timeline">
        <TimelineChart of={timelineOf(job, failures.data, events.data.items, Date.now())} />
      </Card>
      <Card title="Attempts">
        <Table
          name="Attempts"
          rows={job.attempts}
          id={(one) => one.attempt}
          columns={[
            { name: "Attempt", cell: (one) => one.attempt },
            { name: "Admitted", cell: (one) => <When at={one.admitted_at} /> },
            { name: "Running", cell: (one) => <When at={one.started_at} /> },
            { name: "Ended", cell: (one) => <When at={one.ended_at} /> },
            { name: "Reason", cell: (one) => one.reason && <code>{one.reason}</code> },
            { name: "Nodes", cell: (one) => one.nodes.join(", ") },
          ]}
        />
      </Card>
      <Card title={`Events (the first ${events.data.items.length})`}>
        <ol className="events small" tabIndex={0} aria-label="Events">
          {events.data.items.slice(-200).map((one) => (
            <li key={one.number}>
              <When at={one.at} /> <strong>{one.kind}</strong> {one.role !== undefined && `${one.role}/${one.rank ?? ""}`}{" "}
              {one.reason !== undefined && one.reason !== null && <code>{String(one.reason)}</code>} {typeof one.text === "string" && one.text}
            </li>
          ))}
        </ol>
      </Card>
    </>
  );
}

function FailuresTab({ job }: { job: JobDocument }) {
  const failures = useQuery({ queryKey: ["job", job.id, "failures"], queryFn: () => api.failures(job.id) });
  return <Answer of={failures}>{(found) => <Failures job={job.id} of={found} />}</Answer>;
}

function LogsTab({ job }: { job: JobDocument }) {
  const [values, put] = useQueryValues();
  const change = (wanted: object) => put(wanted as Record<string, string>);
  const failed = job.error?.instance ?? "";
  return (
    <>
      {failed && (
        <p className="soft">
          First to fail: <Link to={`${jobPath(job.id, "logs")}?instance=${encodeURIComponent(failed)}`}>{failed}</Link>
        </p>
      )}
      <LogView
        job={job.id}
        instances={job.instances.map((one) => one.instance)}
        wanted={{ instance: values.get("instance") ?? "", find: values.get("find") ?? "", at: values.get("at") ?? "" }}
        change={change}
      />
    </>
  );
}

function PlacementTab({ job }: { job: JobDocument }) {
  const placement = useQuery({ queryKey: ["job", job.id, "placement"], queryFn: () => api.placement(job.id) });
  return (
    <Answer of={placement}>
      {(found) =>
        found.items.length ? (
          <Card title={`Placement of attempt ${found.attempt}`}>
            {found.why && <p className="soft">{placedWords(found.why)}</p>}
            <Table
              name="Which devices of which nodes each instance has"
              rows={found.items}
              id={(one) => one.instance}
              columns={[
                { name: "Instance", cell: (one) => one.instance },
                { name: "Node", cell: (one) => <Link to={nodePath(one.node)}>{one.node}</Link> },
                { name: "Devices", cell: (one) => one.devices.join(", ") || "none" },
              ]}
            />
          </Card>
        ) : (
          <p className="card">
            It holds nothing: a waiting job takes no device. <Link to={jobPath(job.id, "explain")}>Why it waits</Link>
          </p>
        )
      }
    </Answer>
  );
}

function ExplainTab({ job }: { job: JobDocument }) {
  const explain = useExplain(job, true);
  return (
    <Answer of={explain}>
      {(found) => (
        <>
          <ExplainCard of={found} />
          <Decisions of={found} />
        </>
      )}
    </Answer>
  );
}

const EDITABLE: [string, string, (text: string) => unknown][] = [
  ["priority", "Priority", Number],
  ["queue", "Queue", String],
  ["time_limit_s", "Time limit in seconds", (text) => (text === "" ? null : Number(text))],
];

function SpecTab({ job }: { job: JobDocument }) {
  const spec = useQuery({ queryKey: ["job", job.id, "spec"], queryFn: () => api.spec(job.id) });
  return (
    <Answer of={spec}>
      {(found) => (
        <>
          {!OVER.has(job.state) && <Edit job={job} spec={found.spec} />}
          {found.edits.toReversed().map((one, i) => (
            <Card key={one.at} title={i === 0 ? "Last edit" : "Earlier edit"}>
              <p className="soft">
                by {one.by}, <When at={one.at} />
              </p>
              <Diff before={one.before} after={one.after} name={`Edit by ${one.by}`} />
            </Card>
          ))}
          <div className="columns">
            <Card title={`As given${found.filename && `: ${found.filename}`}`}>
              <pre tabIndex={0}>{found.source || "It came as a spec from a program."}</pre>
            </Card>
            <Card title="As understood, with every edit">
              <pre tabIndex={0}>{asLines(found.spec)}</pre>
            </Card>
          </div>
        </>
      )}
    </Answer>
  );
}

function Edit({ job, spec }: { job: JobDocument; spec: Record<string, unknown> }) {
  const cache = useQueryClient();
  const [field, setField] = useState(0);
  const [text, setText] = useState("");
  const [path, , read] = EDITABLE[field]!;
  const edit = useMutation({
    mutationFn: () => api.change(job.id, { [path]: read(text) }, job.version),
    onSuccess: () => setText(""),
    onSettled: () => void cache.invalidateQueries({ queryKey: ["job", job.id] }),
  });
  const present = spec[path];
  const ask = async () => {
    const asked = path === "time_limit_s" ? `time_limit=${text || 0}s` : `${path}=${text}`;
    const victims = job.state === "QUEUED" && text ? (await api.whatIf(job.id, [asked])).then.victims_if_preempted : [];
    if (!victims.length || confirm(`${await stopsWhom(victims.map((one) => one.job))} Change it?`)) edit.mutate();
  };
  const asking = useMutation({ mutationFn: ask });
  return (
    <Card title="Edit">
      <form
        className="tools"
        onSubmit={(event) => {
          event.preventDefault();
          asking.mutate();
        }}
      >
        <label>
          Field{" "}
          <select value={field} onChange={(event) => setField(Number(event.target.value))}>
            {EDITABLE.map(([, title], i) => (
              <option key={title} value={i}>
                {title}
              </option>
            ))}
          </select>
        </label>
        <label>
          New value <input value={text} onChange={(event) => setText(event.target.value)} placeholder={present == null ? "none" : String(present)} />
        </label>
        <button type="submit" disabled={edit.isPending || asking.isPending}>
          Change it
        </button>
        <span className="soft">
          now {present == null ? "none" : path.endsWith("_s") ? seconds(Number(present)) : String(present)}
        </span>
      </form>
      <Trouble error={edit.error ?? asking.error} />
    </Card>
  );
}
