/** Small parts that every page is made of: states, moments, tables, cards, problems. */
import type { UseQueryResult } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { Problem } from "../api/client";
import { bytes, clock, moment, relative, seconds } from "../format";

type Tone = "good" | "busy" | "warn" | "bad" | "idle";

const LOOK: Record<string, [string, Tone]> = {
  SUBMITTED: ["○", "idle"], QUEUED: ["◔", "idle"], ADMITTED: ["◑", "busy"], CHECKING: ["◑", "busy"],
  STARTING: ["◕", "busy"], RUNNING: ["▶", "good"], RECOVERING: ["↻", "warn"], RESIZING: ["⇔", "warn"],
  PREEMPTING: ["⇣", "warn"], PAUSED: ["‖", "idle"], STOPPING: ["◼", "idle"], SUCCEEDED: ["✓", "good"],
  FAILED: ["✗", "bad"], CANCELLED: ["–", "idle"], PLANNED: ["○", "idle"], STALE: ["◕", "busy"], READY: ["✓", "good"],
  SUSPECT: ["?", "warn"], LOST: ["✗", "bad"], GONE: ["–", "idle"],
  critical: ["✗", "bad"], warning: ["!", "warn"], info: ["i", "idle"],
  ready: ["✓", "good"], degraded: ["!", "warn"], starting: ["◔", "busy"], healthy: ["✓", "good"], lost: ["✗", "bad"], removed: ["–", "warn"],
  drained: ["–", "idle"], bad: ["✗", "bad"], suspect: ["?", "warn"], up: ["✓", "good"], down: ["✗", "bad"], running: ["✓", "good"],
  away: ["✗", "bad"], off: ["–", "idle"], stopped: ["–", "idle"], open: ["✓", "good"], closed: ["–", "idle"],
};

export const toneOf = (state: string): Tone => LOOK[state]?.[1] ?? "idle";
export const glyphOf = (state: string): string => LOOK[state]?.[0] ?? "•";

/** The state of a job, and beside it that it may hang. */
export function JobState({ of: { state, phase, suspected } }: { of: { state: string; phase: string; suspected: string } }) {
  if (!suspected) return <State of={state} note={phase} />;
  return (
    <span className="state warn" title={suspected}>
      <span aria-hidden>?</span> {state} <span className="soft">may hang</span>
    </span>
  );
}

/** A state as colour, glyph and word: each of them alone suffices. */
export function State({ of, note }: { of: string; note?: string }) {
  return (
    <span className={`state ${toneOf(of)}`}>
      <span aria-hidden>{glyphOf(of)}</span> {of}
      {note && <span className="soft"> {note}</span>}
    </span>
  );
}

/** A moment in the browser's time, or `ago` how long ago; the exact one with its zone on hover. */
export function When({ at, ago = false }: { at: number | string | null; ago?: boolean }) {
  const date = moment(at);
  if (!date) return <>–</>;
  return (
    <time dateTime={date.toISOString()} title={date.toString()}>
      {ago ? relative(date) : clock(date)}
    </time>
  );
}

export const Seconds = ({ of }: { of: number | null | undefined }) => <span title={of == null ? "" : `${of} s`}>{seconds(of)}</span>;
export const Bytes = ({ of }: { of: number }) => <span title={`${of} bytes`}>{bytes(of)}</span>;

export function Card({ title, children, tone, label }: { title?: ReactNode; children: ReactNode; tone?: Tone; label?: string }) {
  return (
    <section className={`card ${tone ? `edge-${tone}` : ""}`} aria-label={label ?? (typeof title === "string" ? title : undefined)}>
      {title && <h2>{title}</h2>}
      {children}
    </section>
  );
}

/** Facts as name and value; those without a value are left out. */
export function Facts({ rows }: { rows: [string, ReactNode][] }) {
  return (
    <dl className="facts">
      {rows
        .filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false)
        .map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
    </dl>
  );
}

export interface Column<T> {
  name: string;
  cell: (row: T) => ReactNode;
  numeric?: boolean;
}

export function Table<T>({ name, columns, rows, id }: { name: string; columns: Column<T>[]; rows: T[]; id: (row: T) => string | number }) {
  return (
    <div className="scroll" role="group" aria-label={name} tabIndex={0}>
      <table>
        <thead>
          <tr>
            {columns.map((one) => (
              <th key={one.name} scope="col" className={one.numeric ? "number" : undefined}>
                {one.name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={id(row)}>
              {columns.map((one) => (
                <td key={one.name} className={one.numeric ? "number" : undefined}>
                  {one.cell(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** What went wrong and what to do about it. */
export function Trouble({ error }: { error: unknown }) {
  if (!error) return null;
  const hint = error instanceof Problem ? error.hint : "";
  return (
    <div className="trouble" role="alert">
      <strong>{error instanceof Problem && error.code ? `${error.code}: ` : ""}</strong>
      {error instanceof Error ? error.message : String(error)}
      {hint && <div className="soft">{hint}</div>}
    </div>
  );
}

/** The answer of a query when it is there; until then that it loads, or why it does not come. */
export function Answer<T>({ of, children }: { of: UseQueryResult<T>; children: (value: T) => ReactNode }) {
  if (of.data !== undefined) return <>{children(of.data)}</>;
  if (of.error) return <Trouble error={of.error} />;
  return (
    <p className="soft" role="status">
      Loading.
    </p>
  );
}

export function Bar({ share, label, tone = "busy" }: { share: number; label: string; tone?: Tone }) {
  return (
    <span className={`bar ${tone}`} role="img" aria-label={label} title={label}>
      <span style={{ width: `${Math.min(100, Math.max(0, share * 100))}%` }} />
    </span>
  );
}
