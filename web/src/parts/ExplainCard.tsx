/** Why a job waits and when it would start, with numbers, and what would let it start now. */
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { api } from "../api/client";
import type { DryRunEstimate, Explanation, PlanReport } from "../api/types";
import { counted, number, placedWords } from "../format";
import { jobPath, Link } from "../router";
import { Card, Table, Trouble, When } from "./basics";

/** The body of a change that `PATCH /jobs/{id}` could take; empty for any other. */
export function patchOf(change: unknown): Record<string, unknown> {
  if (change === null || typeof change !== "object") return {};
  const { set, value } = change as { set?: unknown; value?: unknown };
  return typeof set === "string" && ["priority", "queue", "time_limit_s"].includes(set) ? { [set]: value } : {};
}

/** The explanation of a submitted job, or of one that a dry run looked at. */
type Explained = Omit<PlanReport["explanation"], "state" | "decisions"> & {
  waiting: boolean;
  queue: Pick<Explanation["queue"], "path" | "used" | "guaranteed" | "limit">;
  blocked_by: Explanation["blocked_by"];
  placement: Explanation["placement"];
} | Explanation;

export function ExplainCard({ of }: { of: Explained }) {
  if (!of.waiting) return <Placed of={of} />;
  return (
    <Card title="Why it waits" tone="busy">
      {of.why ? (
        <p className="lead">
          <code>{of.why.code}</code> {of.why.text}
        </p>
      ) : (
        <p className="lead">The scheduler has not looked at it yet.</p>
      )}
      <div className="columns">
        <div>
          <h3>When</h3>
          <Estimate of={of.estimate} starts={of.starts_now} />
          <p>
            Ahead{of.queue.path && " in "}
            {of.queue.path && <Link to={`/jobs?queue=${encodeURIComponent(of.queue.path)}`}>{of.queue.path}</Link>}: {counted(of.ahead.jobs, "job")} with{" "}
            {counted(of.ahead.gpus, "device")}.
            {of.queue.path && ` The queue uses ${number(of.queue.used)}`}
            {of.queue.guaranteed !== null && `, its guarantee is ${of.queue.guaranteed}`}
            {of.queue.limit !== null && `, its limit ${of.queue.limit}`}
            {of.queue.path && "."}
          </p>
          <p className="soft">
            Waits since <When at={of.since} />.
          </p>
        </div>
        {of.tally.length > 0 && (
          <div>
            <h3>Nodes that fit, rule by rule</h3>
            <Table
              name="Nodes left after each constraint"
              rows={of.tally}
              id={(one) => one.constraint}
              columns={[
                { name: "Rule", cell: (one) => (one.constraint === "in order" ? "healthy" : one.constraint) },
                { name: "Nodes that fit", cell: (one) => one.nodes_left, numeric: true },
              ]}
            />
          </div>
        )}
      </div>
      <Changes of={of} job={of.queue.path ? of.job : ""} />
      {of.victims_if_preempted.length > 0 && (
        <p>
          It will start by preempting{" "}
          {of.victims_if_preempted.map((one, i) => (
            <span key={one.job}>
              {i > 0 && ", "}
              <Link to={jobPath(one.job)}>{one.job}</Link>
            </span>
          ))}
          .
        </p>
      )}
      {of.blocked_by.length > 0 && (
        <>
          <h3>Who holds devices</h3>
          <Table
            name="Jobs that hold devices"
            rows={of.blocked_by}
            id={(one) => one.job}
            columns={[
              { name: "Job", cell: (one) => <Link to={jobPath(one.job)}>{one.job}</Link> },
              { name: "Devices", cell: (one) => number(one.gpus), numeric: true },
              { name: "Cores", cell: (one) => number(one.cpus), numeric: true },
              { name: "Ends by", cell: (one) => (one.ends ? <When at={one.ends} /> : "not known: no time limit") },
            ]}
          />
        </>
      )}
    </Card>
  );
}

function Estimate({ of, starts }: { of: Explanation["estimate"] | DryRunEstimate; starts: boolean }) {
  if (starts) return <p>It starts at the next pass of the scheduler.</p>;
  if (!of || of.p50 === null) return <p>Not known{of?.basis ? `: ${of.basis}` : ""}.</p>;
  return (
    <p>
      Likely <When at={of.p50} />
      {of.p10 !== null && of.p90 !== null && (
        <>
          , with 80 % between <When at={of.p10} /> and <When at={of.p90} />
        </>
      )}
      . <span className="soft">{of.basis}</span>
    </p>
  );
}

/** The jobs that a change preempts, with their owners. */
export async function stopsWhom(jobs: string[]): Promise<string> {
  const named = await Promise.all(jobs.map(async (job) => `${job} of ${(await api.job(job)).user}`));
  return `This preempts ${named.join(", ")}.`;
}

/** What a change does to others, with the owners of the jobs that it stops, as the question before it is made. */
async function questionOf(offer: Explained["would_start_now_with"][number]): Promise<string> {
  const cost = offer.victims?.length ? await stopsWhom(offer.victims) : offer.cost && offer.cost !== "none" ? `Cost: ${offer.cost}.` : "No other job is stopped.";
  return `Change to ${offer.text}? ${cost}`;
}

/** `job` is empty for a dry run: there is nothing to change yet. */
function Changes({ of, job }: { of: Explained; job: string }) {
  const cache = useQueryClient();
  const change = useMutation({
    mutationFn: async (offer: Explained["would_start_now_with"][number]) => {
      if (confirm(await questionOf(offer))) await api.change(job, patchOf(offer.change));
    },
    onSuccess: () => cache.invalidateQueries({ queryKey: ["job", of.job] }),
  });
  if (!of.would_start_now_with.length) return null;
  return (
    <>
      <h3>It would start now with</h3>
      <ul className="changes">
        {of.would_start_now_with.map((one, i) => {
          const patch = patchOf(one.change);
          return (
            <li key={i}>
              {one.text ?? JSON.stringify(one.change)} {one.cost && one.cost !== "none" && <span className="soft">({one.cost})</span>}{" "}
              {job && Object.keys(patch).length > 0 && (
                <button type="button" onClick={() => change.mutate(one)} disabled={change.isPending}>
                  Change it
                </button>
              )}
            </li>
          );
        })}
      </ul>
      <Trouble error={change.error} />
    </>
  );
}

function Placed({ of }: { of: Explained }) {
  if (!of.placement && !of.why) return null;
  return (
    <Card title={of.placement ? "Why it is where it is" : "Why it ended"}>
      {of.why && (
        <p className="lead">
          <code>{of.why.code}</code> {of.why.text}
        </p>
      )}
      {of.placement && (
        <p>
          On {of.placement.nodes.join(", ")}
          {of.placement.why && <span className="soft">. {placedWords(of.placement.why)}</span>}
        </p>
      )}
    </Card>
  );
}

export function Decisions({ of }: { of: Explanation }) {
  if (!of.decisions.length) return null;
  return (
    <Card title="Decisions">
      <ol className="events" tabIndex={0} aria-label="Decisions in order">
        {of.decisions.map((one, i) => (
          <li key={i}>
            <When at={one.at} /> <strong>{one.decision}</strong> {one.reason && <code>{one.reason}</code>} {one.text}
          </li>
        ))}
      </ol>
    </Card>
  );
}
