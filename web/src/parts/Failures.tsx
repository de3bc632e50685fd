/** What failed first, what was decided and what it cost: one entry a recovery, the first failing instance on top. */
import type { FailureRow, FailureList } from "../api/types";
import { seconds } from "../format";
import { jobPath, Link } from "../router";
import { Bar, Card, Facts, When } from "./basics";

function LogLink({ job, instance }: { job: string; instance: string }) {
  return <Link to={`${jobPath(job, "logs")}?instance=${encodeURIComponent(instance)}`}>{instance}</Link>;
}

export function Failures({ job, of }: { job: string; of: FailureList }) {
  if (!of.items.length && !of.end && !of.first && !of.open_losses.length) {
    return <p className="card">Nothing has failed. A lost instance shows here with its cause, the level of its recovery and what it cost.</p>;
  }
  return (
    <>
      {of.end && (
        <Card title="The job failed" tone="bad">
          <p className="lead">
            <code>{of.end.reason}</code> {of.end.text}
          </p>
          <Traceback text={of.end.traceback} />
        </Card>
      )}
      {of.first && (
        <Card title="Failed first" tone="warn">
          <p className="lead">
            <LogLink job={job} instance={of.first.instance} /> <code>{of.first.reason}</code> {of.first.text}
          </p>
        </Card>
      )}
      {of.items.map((one) => (
        <Recovery key={one.n} job={job} of={one} />
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

function Recovery({ job, of }: { job: string; of: FailureRow }) {
  const restore = of.seconds === null ? null : of.seconds - of.detect_to_decide_s;
  return (
    <Card title={`Recovery ${of.n}: ${of.healed ? "✓ healed" : of.joined_by ? `joined by ${of.joined_by}` : "↻ under way"}`} tone={of.healed ? "good" : "warn"}>
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
            {of.level} level{of.moved_from && `, moved up from ${of.moved_from}`}; {of.scope.length} instances under new epochs
          </div>
        </li>
        <li>
          <strong>Restored</strong> {of.seconds === null ? "not yet" : `after ${seconds(restore)} more`}
          <div>
            back to commit {of.restore}, {of.lost_commits} commits lost
          </div>
        </li>
      </ol>
      {of.seconds !== null && of.seconds > 0 && (
        <Bar share={of.detect_to_decide_s / of.seconds} tone="warn" label={`${seconds(of.detect_to_decide_s)} of ${seconds(of.seconds)} to the decision`} />
      )}
      <Facts rows={[["Attempt", of.attempt], ["Fault of", of.fault], ["In all", seconds(of.seconds)], ["Scope", of.scope.map((one) => `${one.instance} (epoch ${one.epoch})`).join(", ")]]} />
      <Traceback text={of.traceback || of.losses.find((one) => one.traceback)?.traceback || ""} />
    </Card>
  );
}

function Traceback({ text }: { text: string }) {
  if (!text) return null;
  return (
    <details>
      <summary>Traceback</summary>
      <pre tabIndex={0}>{text}</pre>
    </details>
  );
}
