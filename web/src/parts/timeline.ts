/** The life of a job as rows of bars over one axis of time, from the documents of the API. */
import type { EventRecord, FailureList, JobDocument } from "../api/types";

export type BarKind = "wait" | "start" | "run" | "detect" | "recover" | "lost";

export interface TimeBar {
  kind: BarKind;
  from: number;
  to: number;
  words: string;
}

export interface TimeRow {
  name: string;
  bars: TimeBar[];
}

export interface Timeline {
  from: number;
  to: number;
  rows: TimeRow[];
  commits: { at: number; n: number }[];
}

const INSTANCES_MAX = 40;
const ms = (iso: string | null) => Date.parse(iso ?? "");

/** `now` in milliseconds closes what is still open. */
export function timelineOf(job: JobDocument, failures: FailureList, events: EventRecord[], now: number): Timeline {
  const from = ms(job.submitted_at);
  const end = job.ended_at ? ms(job.ended_at) : now;
  const rows: TimeRow[] = [
    { name: "in the queue", bars: waits(job, end) },
    ...job.attempts.map((one) => attemptRow(one, end)),
    ...failures.items.map((one) => {
      const decided = ms(one.decided_at);
      const over = one.ended_at ? ms(one.ended_at) : end;
      return {
        name: `recovery ${one.n}`,
        bars: [
          { kind: "detect" as const, from: ms(one.seen_at), to: decided, words: `${one.reason} in ${one.instance} seen` },
          { kind: "recover" as const, from: decided, to: over, words: `${one.level} level; back to commit ${one.restore}${one.ended_at ? "" : "; under way"}` },
        ],
      };
    }),
    ...instanceRows(events, end),
  ];
  const commits = events.filter((one) => one.kind === "Committed").map((one) => ({ at: ms(one.at), n: Number(one.n) }));
  return { from, to: Math.max(end, from + 1000), rows, commits };
}

function waits(job: JobDocument, end: number): TimeBar[] {
  let since: string | null = job.submitted_at;
  const bars: TimeBar[] = [];
  for (const one of job.attempts) {
    if (since !== null) bars.push({ kind: "wait", from: ms(since), to: ms(one.admitted_at), words: "waits for devices" });
    since = one.ended_at;
  }
  const over = job.attempts.length > 0 && job.ended_at !== null && since !== null && ms(job.ended_at) - ms(since) < 1000;
  if (since !== null && !over) bars.push({ kind: "wait", from: ms(since), to: end, words: "waits for devices" });
  return bars;
}

function attemptRow(one: JobDocument["attempts"][number], end: number): TimeRow {
  const over = one.ended_at ? ms(one.ended_at) : end;
  const ready = one.started_at ? ms(one.started_at) : over;
  const bars: TimeBar[] = [{ kind: "start", from: ms(one.admitted_at), to: ready, words: "starts" }];
  if (one.started_at) bars.push({ kind: "run", from: ready, to: over, words: one.reason ?? (one.ended_at ? "ended" : "runs") });
  return { name: `attempt ${one.attempt}`, bars };
}

/** One row an instance: a bar for each of its processes, from start over ready to its end or loss. */
function instanceRows(events: EventRecord[], end: number): TimeRow[] {
  const rows = new Map<string, TimeBar[]>();
  for (const event of events) {
    if (event.role === undefined || event.rank === undefined || !String(event.kind).startsWith("Instance")) continue;
    const name = `${event.role}/${event.rank}`;
    const at = ms(event.at);
    const bars = rows.get(name) ?? [];
    rows.set(name, bars);
    const last = bars.at(-1);
    if (event.kind === "InstanceStarted") {
      if (last && last.to === end) last.to = at;
      bars.push({ kind: "start", from: at, to: end, words: `epoch ${event.epoch}, pid ${event.pid}` });
    } else if (event.kind === "InstanceReady") {
      if (last && last.kind === "start") last.to = at;
      else if (last && last.to === end) last.to = at;
      bars.push({ kind: "run", from: at, to: end, words: `epoch ${event.epoch}, ready` });
    } else if (last && last.to === end) {
      last.to = at;
      if (event.kind === "InstanceLost") bars.push({ kind: "lost", from: at, to: at, words: String(event.reason) });
    }
  }
  return [...rows].slice(0, INSTANCES_MAX).map(([name, bars]) => ({ name, bars }));
}

/** Between four and eight round steps of time, in milliseconds after the start. */
export function ticksOf(length: number): number[] {
  const steps = [100, 200, 500, 1e3, 2e3, 5e3, 10e3, 15e3, 30e3, 60e3, 120e3, 300e3, 600e3, 1800e3, 3600e3, 7200e3, 21600e3, 43200e3, 86400e3];
  const step = steps.find((one) => length / one <= 8) ?? Math.ceil(length / 8 / 86400e3) * 86400e3;
  return Array.from({ length: Math.floor(length / step) + 1 }, (_, i) => i * step);
}
