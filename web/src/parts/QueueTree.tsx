/** The tree of queues: bar of what is used, hatched where borrowed, mark at the guarantee, end at the limit. */
import type { CSSProperties } from "react";
import type { QueueRow } from "../api/types";
import { number, stated } from "../format";
import { Link } from "../router";
import { State, When } from "./basics";

export interface Branch {
  queue: QueueRow;
  depth: number;
  share: { used: number; borrowed: number; guaranteed: number | null; limit: number | null };
}

/** Parents before their children, with widths as shares of the whole (`gpus`, or the largest figure there is). */
export function branchesOf(queues: QueueRow[], gpus: number): Branch[] {
  const whole = Math.max(gpus, 1, ...queues.map((one) => Math.max(one.used_gpus, one.guaranteed_gpus ?? 0, one.limit_gpus ?? 0)));
  const share = (value: number | null) => (value === null ? null : value / whole);
  return [...queues]
    .sort((a, b) => a.path.localeCompare(b.path))
    .map((queue) => ({
      queue,
      depth: queue.path.split("/").length - 1,
      share: {
        used: Math.max(0, queue.used_gpus - queue.borrowed_gpus) / whole,
        borrowed: queue.borrowed_gpus / whole,
        guaranteed: share(queue.guaranteed_gpus),
        limit: share(queue.limit_gpus),
      },
    }));
}

export function sentenceOf(queue: QueueRow): string {
  const of = (value: number | null) => (value === null ? "none" : number(value));
  return (
    `${number(queue.used_gpus)} devices used, ${number(queue.borrowed_gpus)} of them borrowed; ` +
    `guaranteed ${of(queue.guaranteed_gpus)}, limit ${of(queue.limit_gpus)}`
  );
}

const percent = (share: number) => `${Math.min(100, share * 100)}%`;

function QueueBar({ branch }: { branch: Branch }) {
  const { used, borrowed, guaranteed, limit } = branch.share;
  const words = sentenceOf(branch.queue);
  return (
    <span className="queue-bar" role="img" aria-label={words} title={words}>
      <span className="used" style={{ width: percent(used) }} />
      <span className="borrowed" style={{ left: percent(used), width: percent(borrowed) }} />
      {guaranteed !== null && <span className="mark" style={{ left: percent(guaranteed) }} />}
      {limit !== null && <span className="limit" style={{ left: percent(limit) }} />}
    </span>
  );
}

export function QueueTree({ queues, gpus }: { queues: QueueRow[]; gpus: number }) {
  return (
    <>
      <p className="legend soft">
        <span className="key used" aria-hidden /> used <span className="key borrowed" aria-hidden /> borrowed{" "}
        <span className="key mark" aria-hidden /> guaranteed <span className="key limit" aria-hidden /> limit
      </p>
      <div className="scroll" role="group" aria-label="Tree of queues" tabIndex={0}>
        <table className="tree">
          <thead>
            <tr>
              <th scope="col">Queue</th>
              <th scope="col">Devices</th>
              {["Used", "CPUs used", "Guaranteed", "Limit", "Limit per user", "Borrowed", "Weight", "Running", "Waiting", "GPUs requested"].map((name) => (
                <th key={name} scope="col" className="number">
                  {name}
                </th>
              ))}
              <th scope="col">Longest wait</th>
            </tr>
          </thead>
          <tbody>
            {branchesOf(queues, gpus).map((branch) => {
              const { queue, depth } = branch;
              return (
                <tr key={queue.path}>
                  <th scope="row" style={{ "--depth": depth } as CSSProperties} className="branch">
                    <Link to={`/jobs?queue=${encodeURIComponent(queue.path)}`}>{queue.path.split("/").at(-1)}</Link>
                    {queue.state !== "open" && <State of={queue.state} />}
                  </th>
                  <td className="wide">
                    <QueueBar branch={branch} />
                  </td>
                  {[
                    number(queue.used_gpus), number(queue.used_cpus), stated(queue.guaranteed), stated(queue.limit), stated(queue.user_limit),
                    number(queue.borrowed_gpus), queue.weight, queue.running_jobs, queue.pending_jobs, number(queue.pending_gpus),
                  ].map((value, i) => (
                    <td key={i} className="number">
                      {value}
                    </td>
                  ))}
                  <td>
                    <When at={queue.oldest_wait_since} ago />
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
    </>
  );
}
