/** Output of a job as it comes: merged by time or of one instance; searched, paused, and never more lines than fit memory. */
import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useRef, useState } from "react";
import { streams } from "../api/client";
import type { LogLine } from "../api/types";
import { counted, hue } from "../format";

const LINES_MAX = 20_000;
const TAIL = 2000;
const FLUSH_MS = 100;
const LINE_HEIGHT = 18;
const FIND_PAUSE_MS = 300;
/** Seconds of output before a line that was found. */
const CONTEXT_S = 60;

/** Lines of which instance, with which text, or around which time. */
export interface Wanted {
  instance: string;
  find: string;
  at: string;
}

/** New lines after the known ones without those that came before; the oldest go when there are more than `max`. */
export function joined(known: LogLine[], more: LogLine[], ends: Map<string, number>, max = LINES_MAX): LogLine[] {
  const fresh = more.filter((line) => {
    const key = `${line.instance} ${line.node} ${line.attempt}`;
    if (line.offset <= (ends.get(key) ?? -1)) return false;
    ends.set(key, line.offset);
    return true;
  });
  if (!fresh.length) return known;
  const all = [...known, ...fresh];
  return all.length > max ? all.slice(all.length - max) : all;
}

function timeOf(ts: string | null): string {
  if (!ts) return "";
  const at = new Date(ts);
  return `${at.toLocaleTimeString([], { hourCycle: "h23" })}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}

/** The lines of a job while the part is shown; a cut stream continues where it was, by its last id. */
function useLines(job: string, { instance, find, at }: Wanted): { lines: LogLine[]; over: boolean; notices: string[] } {
  const [lines, setLines] = useState<LogLine[]>([]);
  const [over, setOver] = useState(false);
  const [notices, setNotices] = useState<string[]>([]);
  useEffect(() => {
    setLines([]);
    setOver(false);
    setNotices([]);
    const ends = new Map<string, number>();
    let waiting: LogLine[] = [];
    const since = at ? Date.parse(at) / 1000 - CONTEXT_S : undefined;
    const source = new EventSource(streams.logs(job, { instance, find, since, tail: TAIL }));
    source.addEventListener("line", (message) => waiting.push(JSON.parse(message.data)));
    source.addEventListener("notice", (message) => {
      const text: string = JSON.parse(message.data).text;
      setNotices((known) => [...known.slice(-4), text]);
    });
    source.addEventListener("end", () => {
      setOver(true);
      source.close();
    });
    const flush = setInterval(() => {
      if (!waiting.length) return;
      const more = waiting;
      waiting = [];
      setLines((known) => joined(known, more, ends));
    }, FLUSH_MS);
    return () => {
      source.close();
      clearInterval(flush);
    };
  }, [job, instance, find, at]);
  return { lines, over, notices };
}

interface Props {
  job: string;
  instances: string[];
  /** From the address of the page, so that a link leads to the same lines. */
  wanted: Wanted;
  change: (wanted: Partial<Wanted>) => void;
}

export function LogView({ job, instances, wanted, change }: Props) {
  const { lines: shown, over, notices } = useLines(job, wanted);
  const [find, setFind] = useState(wanted.find);
  const [follow, setFollow] = useState(!wanted.at);
  useEffect(() => setFind(wanted.find), [wanted.find]);
  const latest = useRef(change);
  latest.current = change;
  useEffect(() => {
    if (find === wanted.find) return;
    // Not anew with each line that comes: where output never pauses, the search would never begin.
    const timer = setTimeout(() => latest.current({ find, at: "" }), FIND_PAUSE_MS);
    return () => clearTimeout(timer);
  }, [find, wanted.find]);
  const pane = useRef<HTMLDivElement>(null);
  const rows = useVirtualizer({ count: shown.length, getScrollElement: () => pane.current, estimateSize: () => LINE_HEIGHT, overscan: 30 });
  const jump = (line: LogLine) => {
    setFollow(false);
    change({ find: "", at: line.ts ?? "" });
  };
  useEffect(() => {
    if (follow && shown.length) rows.scrollToIndex(shown.length - 1, { align: "end" });
  }, [shown, follow, rows]);
  const marked = wanted.at ? shown.findIndex((line) => line.ts !== null && line.ts >= wanted.at) : -1;
  useEffect(() => {
    if (marked >= 0) rows.scrollToIndex(marked, { align: "center" });
  }, [marked, rows]);
  const scrolled = () => {
    const at = pane.current;
    if (at && at.scrollHeight - at.scrollTop - at.clientHeight > 4 * LINE_HEIGHT) setFollow(false);
  };
  return (
    <>
      <div className="tools">
        <label>
          Instance{" "}
          <select value={wanted.instance} onChange={(event) => change({ instance: event.target.value })}>
            <option value="">all, by time</option>
            {instances.map((one) => (
              <option key={one}>{one}</option>
            ))}
          </select>
        </label>
        <input type="search" aria-label="Find in the output" placeholder="Find in all lines" value={find} onChange={(event) => setFind(event.target.value)} />
        <label>
          <input type="checkbox" checked={follow} onChange={(event) => setFollow(event.target.checked)} /> follow
        </label>
        <span className="soft" role="status">
          {wanted.find ? `${counted(shown.length, "line")} with “${wanted.find}”${shown.length >= LINES_MAX ? ", the newest" : ""}; choose one to see what is around it` : counted(shown.length, "line")}
          {over ? "; the job has ended" : ""}
        </span>
        {wanted.at && (
          <button type="button" onClick={() => change({ at: "" })}>
            To the end
          </button>
        )}
      </div>
      {notices.map((text) => (
        <p key={text} className="soft" role="status">
          {text}
        </p>
      ))}
      <div ref={pane} className="log" role="log" aria-label="Output" aria-live="off" tabIndex={0} onWheel={scrolled} onKeyUp={scrolled}>
        <div style={{ height: rows.getTotalSize() }}>
          {rows.getVirtualItems().map((row) => {
            const line = shown[row.index]!;
            return (
              <div key={row.key} className={`log-line ${line.stream === "err" ? "err" : ""} ${row.index === marked ? "marked" : ""}`} style={{ transform: `translateY(${row.start}px)` }}>
                <time title={line.ts ?? ""}>{timeOf(line.ts)}</time>
                <span className="who" style={{ "--hue": hue(line.instance) } as React.CSSProperties}>
                  {line.instance}
                </span>
                {wanted.find && line.ts ? (
                  <button type="button" className="found" onClick={() => jump(line)}>
                    {line.text}
                  </button>
                ) : (
                  <span>{line.text}</span>
                )}
              </div>
            );
          })}
        </div>
        {!shown.length && <p className="soft">{wanted.find ? "No line has this." : "No output yet."}</p>}
      </div>
    </>
  );
}
