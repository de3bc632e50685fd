/** Output of a job as it comes: merged by time or of one instance; searched, paused, and never more lines than fit memory. */
import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef, useState } from "react";
import { streams } from "../api/client";
import type { LogLine } from "../api/types";
import { hue } from "../format";

const LINES_MAX = 20_000;
const TAIL = 2000;
const FLUSH_MS = 100;
const LINE_HEIGHT = 18;

/** New lines after the known ones without those that came before; the oldest go when there are more than `max`. */
export function joined(known: LogLine[], more: LogLine[], ends: Map<string, number>, max = LINES_MAX): LogLine[] {
  const fresh = more.filter((line) => {
    const key = `${line.instance} ${line.attempt}`;
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
function useLines(job: string, instance: string): { lines: LogLine[]; over: boolean } {
  const [lines, setLines] = useState<LogLine[]>([]);
  const [over, setOver] = useState(false);
  useEffect(() => {
    setLines([]);
    setOver(false);
    const ends = new Map<string, number>();
    let waiting: LogLine[] = [];
    const source = new EventSource(streams.logs(job, instance, TAIL));
    source.addEventListener("line", (message) => waiting.push(JSON.parse(message.data)));
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
  }, [job, instance]);
  return { lines, over };
}

interface Props {
  job: string;
  instances: string[];
  chosen: string;
  choose: (instance: string) => void;
}

export function LogView({ job, instances, chosen, choose }: Props) {
  const { lines, over } = useLines(job, chosen);
  const [find, setFind] = useState("");
  const [follow, setFollow] = useState(true);
  const pane = useRef<HTMLDivElement>(null);
  const shown = useMemo(() => {
    const word = find.toLowerCase();
    return word ? lines.filter((line) => line.text.toLowerCase().includes(word)) : lines;
  }, [lines, find]);
  const rows = useVirtualizer({ count: shown.length, getScrollElement: () => pane.current, estimateSize: () => LINE_HEIGHT, overscan: 30 });
  useEffect(() => {
    if (follow && shown.length) rows.scrollToIndex(shown.length - 1, { align: "end" });
  }, [shown, follow, rows]);
  const scrolled = () => {
    const at = pane.current;
    if (at && at.scrollHeight - at.scrollTop - at.clientHeight > 4 * LINE_HEIGHT) setFollow(false);
  };
  return (
    <>
      <div className="tools">
        <label>
          Instance{" "}
          <select value={chosen} onChange={(event) => choose(event.target.value)}>
            <option value="">all, by time</option>
            {instances.map((one) => (
              <option key={one}>{one}</option>
            ))}
          </select>
        </label>
        <input type="search" aria-label="Find in the output" placeholder="Find" value={find} onChange={(event) => setFind(event.target.value)} />
        <label>
          <input type="checkbox" checked={follow} onChange={(event) => setFollow(event.target.checked)} /> follow
        </label>
        <span className="soft" role="status">
          {shown.length} lines{over ? "; the job has ended" : ""}
        </span>
      </div>
      <div ref={pane} className="log" role="log" aria-label="Output" aria-live="off" tabIndex={0} onWheel={scrolled} onKeyUp={scrolled}>
        <div style={{ height: rows.getTotalSize() }}>
          {rows.getVirtualItems().map((row) => {
            const line = shown[row.index]!;
            return (
              <div key={row.key} className={`log-line ${line.stream === "err" ? "err" : ""}`} style={{ transform: `translateY(${row.start}px)` }}>
                <time title={line.ts ?? ""}>{timeOf(line.ts)}</time>
                <span className="who" style={{ "--hue": hue(line.instance) } as React.CSSProperties}>
                  {line.instance}
                </span>
                <span>{line.text}</span>
              </div>
            );
          })}
        </div>
        {!shown.length && <p className="soft">{find ? "No line has this." : "No output yet."}</p>}
      </div>
    </>
  );
}
