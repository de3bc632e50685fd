/** Times, durations, sizes and numbers as people read them; the exact value belongs in a title. */
import type { Resources } from "./api/types";

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(value < 9.95 ? 1 : 0)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let rest = value;
  let i = 0;
  while (rest >= 1024 && i < units.length - 1) {
    rest /= 1024;
    i += 1;
  }
  return `${i === 0 || rest >= 100 ? Math.round(rest) : rest.toFixed(1)} ${units[i]}`;
}

/** Four significant digits, no trailing zeros. */
export function number(value: unknown): string {
  return typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value);
}

/** A guarantee or limit: devices, and cores and memory by name. */
export function stated(of: Resources | null): string {
  if (of === null) return "–";
  const cores = of.cpus && `${number(of.cpus)} ${of.cpus === 1 ? "cpu" : "cpus"}`;
  return [of.gpus && number(of.gpus), cores, of.memory_bytes && bytes(of.memory_bytes)].filter(Boolean).join(", ") || "–";
}

/** Unix seconds or an ISO text as a date; null for what is neither. */
export function moment(value: number | string | null): Date | null {
  if (value === null) return null;
  const found = new Date(typeof value === "number" ? value * 1000 : value);
  return Number.isNaN(found.getTime()) ? null : found;
}

const two = (n: number) => String(n).padStart(2, "0");

/** The browser's time on a clock of 24 hours: of today 16:18:18, else 2026-01-31 16:18. */
export function clock(at: Date, now: Date = new Date()): string {
  const time = `${two(at.getHours())}:${two(at.getMinutes())}`;
  if (at.toDateString() === now.toDateString()) return `${time}:${two(at.getSeconds())}`;
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${time}`;
}

/** How long ago, or in how long: "5 min ago", "in 2 h"; its exact time belongs in a title. */
export function relative(at: Date, now: Date = new Date()): string {
  const s = Math.round((now.getTime() - at.getTime()) / 1000);
  const far = Math.abs(s);
  if (far < 5) return "now";
  const text = far < 60 ? `${far} s` : far < 3600 ? `${Math.floor(far / 60)} min` : far < 86400 ? `${Math.floor(far / 3600)} h` : `${Math.floor(far / 86400)} d`;
  return s < 0 ? `in ${text}` : `${text} ago`;
}

/** One thing, two things. */
export const counted = (n: number, noun: string): string => `${number(n)} ${noun}${n === 1 ? "" : "s"}`;

/** Why a job was placed where it is, from the facts of the decision. */
export function placedWords(why: Record<string, unknown>): string {
  const parts = [`Placed on ${counted(Number(why.nodes ?? 0), "node")} by the profile ${String(why.profile ?? "default")}`];
  if (typeof why.nodes_with_data === "number") parts.push(`${why.nodes_with_data} of them with its data`);
  return `${parts.join(", ")}.${typeof why.choice === "string" ? ` ${why.choice}` : ""}`;
}

/** A hue of 0..360 that is the same for the same name. */
export function hue(name: string): number {
  let hash = 2166136261;
  for (const char of name) hash = Math.imul(hash ^ char.codePointAt(0)!, 16777619);
  return Math.round((Math.abs(hash) * 137.508) % 360); // the golden angle keeps neighbours apart
}
