/** What failed first, what was decided and what it cost: one entry a recovery, the first failing instance on top. */
import type { FailureRow, FailureList } from "../api/types";
import { counted, seconds } from "../format";
import { jobPath, Link } from "../router";
import { Bar, Card, Facts, When } from "./basics";

const CAUSES: Record<string, string> = { user: "your code", data: "the data", infra: "infrastructure", policy: "the scheduler", rota: "Rota" };

/** Consecutive recoveries from the same error of the same role, as one entry with the last of them. */
export function grouped(items: FailureRow[]): { last: FailureRow; times: number }[] {
  const found: { last: FailureRow; times: number }[] = [];
  const same = (a: FailureRow, b: FailureRow) => a.seconds !== null && b.seconds !== null && a.healed === b.healed && a.role === b.role && a.reason === b.reason && a.text === b.text && a.traceback === b.traceback;
  for (const one of items) {
    const before = found.at(-1);
    if (before && same(before.last, one)) {
      before.last = one;
      before.times += 1;
    } else found.push({ last: one, times: 1 });
  }
  return found;
}

function LogLink({ job, instance }: { job: string; instance: string }) {
  return <Link to={`${jobPath(job, "logs")}?instance=${encodeURIComponent(instance)}`}>{instance}</Link>;
}

export function Failures({ job, of }: { job: string; of: FailureList }) {
  if (!of.items.length && !of.end && !of.first && !of.open_losses.length && !of.drains.length) {
    return <p className="card">Nothing has failed. A lost instance shows here with its cause, the level of its recovery and what it cost.</p>;
  }
  return (
    <>
      {of.end && (
        <Card title="The job failed" tone="bad">
          <p className="lead">
            <code>{of.end.reason}</code> {of.end.text}
          </p>
          <Traceback open text={of.end.traceback} />
        </Card>
      )}
      {of.first && (
        <Card title="Failed first" tone="warn">
          <p className="lead">
            <LogLink job={job} instance={of.first.instance} /> <code>{of.first.reason}</code> {of.first.text}
          </p>
        </Card>
      )}
      {grouped(of.items).map(({ last, times }) => (
        <Recovery key={last.n} job={job} of={last} times={times} ended={!!of.end} />
      ))}
      {of.drains.map((one) => (
        <Card key={`${one.node} ${one.at}`} title={`Drained: ${one.node}`} tone="warn">
          <p>
            <When at={one.at} /> {one.text}
          </p>
        </Card>
      ))}
      {of.open_losses.map((one) => (
        <Card key={`${one.instance} ${one.epoch}`} title={`Lost: ${one.instance}`} tone="bad">
          <p>
            <When at={one.at} /> <code>{one.reason}</code> {one.text}
          </p>
        </Card>
      ))}
    </>
  );
}

/** A recovery is healed once a commit, or the time that the job ran on, has proved it. */
function outcome(of: FailureRow, ended: boolean): string {
  if (of.healed) return "✓ healed";
  if (of.joined_by) return `merged into recovery ${of.joined_by}`;
  if (ended) return "not healed";
  return of.seconds === null ? "↻ under way" : "restarted, not proven yet";
}

function Recovery({ job, of, times, ended }: { job: string; of: FailureRow; times: number; ended: boolean }) {
  const restore = of.seconds === null ? null : of.seconds - of.detect_to_decide_s;
  return (
    <Card title={`${times > 1 ? `Recoveries ${of.n - times + 1} to ${of.n}, ${times} times the same error` : `Recovery ${of.n}`}: ${outcome(of, ended)}`} tone={of.healed ? "good" : "warn"}>
      <ol className="steps">
        <li>
          <strong>Seen</strong> <When at={of.seen_at} />
          <div>
            <LogLink job={job} instance={of.instance} /> <code>{of.reason}</code> {of.text}
          </div>
        </li>
        <li>
          <strong>Decided</strong> after {seconds(of.detect_to_decide_s)}
          <div>
            Restarted {of.instance}
            {of.scope.length > 1 && ` and ${counted(of.scope.length - 1, "dependent")}`} ({of.level} level{of.moved_from && `, moved up from ${of.moved_from}`})
          </div>
        </li>
        <li>
          <strong>{of.seconds === null ? "Not restarted yet" : `${of.healed ? "Healed" : "Restarted"} in ${seconds(restore)}`}</strong>
          <div>
            back to commit {of.restore}, {counted(of.lost_commits, "commit")} lost
          </div>
        </li>
      </ol>
      {of.seconds !== null && of.seconds > 0 && (
        <Bar share={of.detect_to_decide_s / of.seconds} tone="warn" label={`${seconds(of.detect_to_decide_s)} of ${seconds(of.seconds)} to the decision`} />
      )}
      <Facts rows={[["Attempt", of.attempt], ["Cause", CAUSES[of.fault] ?? of.fault], ["Total", seconds(of.seconds)], ["Restarted", of.scope.map((one) => one.instance).join(", ")]]} />
      <Traceback open={times > 1} text={of.traceback || of.losses.find((one) => one.traceback)?.traceback || ""} />
    </Card>
  );
}

function Traceback({ text, open = false }: { text: string; open?: boolean }) {
  if (!text) return null;
  return (
    <details open={open}>
      <summary>Traceback</summary>
      <pre tabIndex={0}>{text}</pre>
    </details>
  );
}
