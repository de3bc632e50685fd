/** Events as they happen: one tab of the browser follows the log and notifies the others; each refreshes what it shows. */
import type { QueryClient } from "@tanstack/react-query";
import { useSyncExternalStore } from "react";
import { api, Problem, streams } from "./client";
import type { EventRecord } from "./types";

const CHANNEL = "rota-events";
const JOB_PAUSE_MS = 250;
const LIST_PAUSE_MS = 1000;
const RETRY_MS = 3000;

/** Whether the service is followed, and since when it is not. */
export interface Connection {
  live: boolean;
  lostAt: Date | null;
}

type Told = { event: EventRecord } | { reset: true } | { connection: boolean };

let connection: Connection = { live: true, lostAt: null };
const watchers = new Set<() => void>();

function tellConnection(live: boolean): void {
  if (live === connection.live) return;
  connection = { live, lostAt: live ? null : new Date() };
  for (const one of watchers) one();
}

export function useConnection(): Connection {
  return useSyncExternalStore(
    (watcher) => (watchers.add(watcher), () => watchers.delete(watcher)),
    () => connection,
  );
}

/** Marks parts of the cache as old, each kind at most once a pause however many events come. */
class Refresher {
  private readonly due = new Map<string, ReturnType<typeof setTimeout>>();
  constructor(private readonly cache: QueryClient) {}

  soon(key: string[], pauseMs: number): void {
    const name = key.join("/");
    if (this.due.has(name)) return;
    const run = () => {
      this.due.delete(name);
      void this.cache.invalidateQueries({ queryKey: key }, { cancelRefetch: false });
    };
    this.due.set(name, setTimeout(run, pauseMs));
  }

  event(record: EventRecord): void {
    if (record.job) this.soon(["job", record.job], JOB_PAUSE_MS);
    for (const kind of ["jobs", "cluster"]) this.soon([kind], LIST_PAUSE_MS);
  }

  everything(): void {
    this.soon([], JOB_PAUSE_MS);
  }
}

/** Follow the service until the page is left. HTTP/1.1 gives a browser six connections, so one tab holds the stream. */
export function followService(cache: QueryClient): void {
  const refresher = new Refresher(cache);
  const channel = new BroadcastChannel(CHANNEL);
  const take = (told: Told) => {
    if ("event" in told) refresher.event(told.event);
    else if ("reset" in told) refresher.everything();
    else {
      if (told.connection && !connection.live) refresher.everything();
      tellConnection(told.connection);
    }
  };
  channel.onmessage = (message: MessageEvent<Told>) => take(message.data);
  const tell = (told: Told) => {
    take(told);
    channel.postMessage(told);
  };
  if (!navigator.locks) return lead(tell); // only pages of a secure origin have locks
  void navigator.locks.request(CHANNEL, () => new Promise<never>(() => lead(tell)));
}

/** Whether a refused stream means that the service is away, or that the session has ended. */
async function check(tell: (told: Told) => void): Promise<void> {
  try {
    await api.status();
  } catch (error) {
    if (!(error instanceof Problem && error.status === 401)) tell({ connection: false });
  }
}

function lead(tell: (told: Told) => void): void {
  const open = async () => {
    let after: number;
    try {
      after = Number((await api.status()).parts.store?.records ?? 0);
    } catch (error) {
      if (!(error instanceof Problem && error.status === 401)) tell({ connection: false }); // it answers: sign in first
      setTimeout(open, RETRY_MS);
      return;
    }
    const source = new EventSource(streams.events(after));
    source.onopen = () => tell({ connection: true });
    source.addEventListener("event", (message) => tell({ event: JSON.parse(message.data) }));
    source.addEventListener("reset", () => tell({ reset: true }));
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) void check(tell);
      else tell({ connection: false });
      if (source.readyState !== EventSource.CLOSED) return; // the browser comes back by itself, with Last-Event-ID
      setTimeout(open, RETRY_MS);
    };
  };
  void open();
}
