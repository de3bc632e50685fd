/** What a job does now: who waits for whom, the one that holds up the rest with its stack, and the load of each instance. */
import { useQuery } from "@tanstack/react-query";
import { api } from "../api/client";
import type { JobDocument, WaitGraphDocument, WaitRoot } from "../api/types";
import { seconds } from "../format";
import { jobPath, Link } from "../router";
import { Answer, Bytes, Card, Seconds, State, Table, When } from "./basics";

const ASK_MS = 3000;

export function Now({ job }: { job: JobDocument }) {
  const why = useQuery({ queryKey: ["job", job.id, "why"], queryFn: () => api.why(job.id), refetchInterval: ASK_MS });
  return (
    <>
      <Answer of={why}>{(found) => <Waits of={found} />}</Answer>
      <Card title="Instances">
        <Load job={job} />
      </Card>
    </>
  );
}

function Waits({ of }: { of: WaitGraphDocument }) {
  const roots: [string, WaitRoot][] = [
    ...of.culprits.map((one): [string, WaitRoot] => [one.deadlock ? "Deadlock" : "Holds up the others", one]),
    ...of.suspects.map((one): [string, WaitRoot] => ["May hold up the others", one]),
  ];
  return (
    <>
      {of.cause && (
        <Card title={`Recovery of ${of.cause.instance} under way`} tone="warn">
          <p>
            <code>{of.cause.reason}</code> {of.cause.text}
          </p>
        </Card>
      )}
      {roots.map(([title, root]) => (
        <Card key={root.members.join()} title={`${title}: ${root.members.join(", ")}`} tone={title.startsWith("May") ? "busy" : "bad"}>
          <p className="lead">{root.text}</p>
          {root.waiters.length > 0 && <p>Waiting for it: {root.waiters.join(", ")}</p>}
          {root.members.filter((name) => of.stacks[name]).map((name) => (
            <details key={name} open={of.culprits.includes(root)}>
              <summary>Stacks of {name}</summary>
              <pre tabIndex={0}>{of.stacks[name]}</pre>
            </details>
          ))}
        </Card>
      ))}
      {of.slow.map((one) => (
        <p key={one.instance} className="warning" role="note">
          <span aria-hidden>!</span> {one.instance} takes {one.factor} times as long for a step as its role.
        </p>
      ))}
      <Card title="Who waits for whom">
        {of.waits.length ? (
          <Table
            name="Waits"
            rows={of.waits}
            id={(one) => `${one.source} ${one.target} ${one.kind} ${one.what} ${one.age_s}`}
            columns={[
              { name: "Waits", cell: (one) => one.source },
              { name: "For", cell: (one) => one.target },
              { name: "Kind", cell: (one) => one.kind },
              { name: "What", cell: (one) => one.what },
              { name: "Since", cell: (one) => `${seconds(one.age_s)}`, numeric: true },
            ]}
          />
        ) : (
          <p className="soft">{of.live ? "No instance waits for another." : "The job has no master to ask now."}</p>
        )}
      </Card>
    </>
  );
}

function Load({ job }: { job: JobDocument }) {
  if (!job.instances.length) return <p className="soft">No instance yet: they start once the job has its devices.</p>;
  return (
    <Table
      name="What each instance does"
      rows={job.instances}
      id={(one) => one.instance}
      columns={[
        { name: "Instance", cell: (one) => <Link to={`${jobPath(job.id, "logs")}?instance=${encodeURIComponent(one.instance)}`}>{one.instance}</Link> },
        { name: "State", cell: (one) => <State of={one.state} /> },
        { name: "Does", cell: (one) => one.progress?.quiet || one.progress?.busy.join(", ") },
        { name: "Waits for", cell: (one) => one.progress?.waits_for.join(", ") },
        { name: "Progress", cell: (one) => one.progress && `${one.progress.n} ${one.progress.unit}`, numeric: true },
        { name: "Step", cell: (one) => one.progress && one.progress.step_s > 0 && <Seconds of={one.progress.step_s} />, numeric: true },
        { name: "No progress for", cell: (one) => one.progress && <Seconds of={one.progress.idle_s} />, numeric: true },
        { name: "Cores", cell: (one) => one.progress?.cpus.toFixed(2), numeric: true },
        { name: "Memory", cell: (one) => one.progress && one.progress.rss_bytes > 0 && <Bytes of={one.progress.rss_bytes} />, numeric: true },
        { name: "Weights behind", cell: (one) => one.progress?.weights.map((row) => `${row.edge} ${row.behind ?? "?"}`).join(", ") },
        { name: "Since", cell: (one) => <When at={one.since} ago /> },
      ]}
    />
  );
}
