/** The parts that compute: formats, differences, timelines, layouts, what is kept of a stream. */
import { describe, expect, it } from "vitest";
import type { EventRecord, FailureList, FailureRow, GraphDocument, InstanceRow, JobDocument, LogLine, QueueRow } from "../src/api/types";
import { bytes, clock, counted, hue, moment, number, relative, seconds, stated } from "../src/format";
import { asLines, diffLines, hunks } from "../src/parts/diff";
import { patchOf } from "../src/parts/ExplainCard";
import { heldBy, holdersOf, racksOf, sentenceOf, slotsOf } from "../src/parts/HeatMap";
import { grouped } from "../src/parts/Failures";
import { countsOf, linesOf, notesOf, observedOf, place } from "../src/parts/layout";
import { joined } from "../src/parts/LogView";
import { marksOf, smoothed } from "../src/parts/curves";
import { thinned } from "../src/parts/TimelineChart";
import { branchesOf } from "../src/parts/QueueTree";
import { ticksOf, timelineOf } from "../src/parts/timeline";
import { jobFileOf } from "../src/pages/Submit";

describe("formats", () => {
  it("rounds durations to what people say", () => {
    const shown = [0, 0.0604, 0.9996, 9.94, 59.6, 61, 3600, 3661, 90000, null].map((one) => seconds(one));
    expect(shown).toEqual(["0 ms", "60 ms", "1.0 s", "9.9 s", "60 s", "1 min 1 s", "1 h 0 min", "1 h 1 min", "1 d 1 h", "–"]);
  });
  it("shows sizes, numbers and moments", () => {
    expect([0, 1023, 1536, 80 * 2 ** 30].map(bytes)).toEqual(["0 B", "1023 B", "1.5 KiB", "80.0 GiB"]);
    const nothing = { gpus: 0, cpus: 0, gpu_type: null, memory_bytes: 0 };
    const asked = [null, nothing, { ...nothing, gpus: 2, cpus: 8 }, { ...nothing, cpus: 1, memory_bytes: 2 ** 32 }];
    expect(asked.map(stated)).toEqual(["–", "–", "2, 8 cpus", "1 cpu, 4.0 GiB"]);
    expect([1 / 3, 2, "x"].map(number)).toEqual(["0.3333", "2", "x"]);
    expect(moment(0)?.toISOString()).toBe("1970-01-01T00:00:00.000Z");
    expect([moment("never"), moment(null)]).toEqual([null, null]);
    expect(hue("a")).toBe(hue("a"));
  });
});

describe("one clock", () => {
  const now = new Date(2026, 0, 31, 16, 18, 18);
  it("has 24 hours, and the date of another day", () => {
    expect(clock(now, now)).toBe("16:18:18");
    expect(clock(new Date(2026, 0, 3, 4, 5, 6), now)).toBe("2026-01-03 04:05");
  });
  it("says how long ago", () => {
    const ago = (s: number) => relative(new Date(now.getTime() - s * 1000), now);
    expect([0, 42, 300, 7200, 200000, -90].map(ago)).toEqual(["now", "42 s ago", "5 min ago", "2 h ago", "2 d ago", "in 1 min"]);
    expect([counted(1, "job"), counted(0, "job")]).toEqual(["1 job", "0 jobs"]);
  });
});

describe("what was seen on the lines of the graph", () => {
  const edge = { source: "loop", target: "reward/0", kind: "call", what: "score", failed: 0, bytes: 2048 };
  const graph = {
    roles: [{ name: "loop", states: [] }, { name: "reward", states: [] }], edges: [], streams: [], observed: [{ ...edge, n: 30, waited_s: 3 }],
  } as unknown as GraphDocument;
  const waiting = [{ role: "loop", progress: { waits_for: ["reward/0"], weights: [] } }] as unknown as InstanceRow[];
  it("makes a line of calls that nothing declares, with rate, time and who waits", () => {
    const [line] = linesOf(graph);
    expect([line!.id, line!.kinds]).toEqual(["loop>reward", ["call"]]);
    const [before, now] = [observedOf([{ ...edge, n: 10, waited_s: 1, bytes: 0 }], 0), observedOf(graph.observed, 10_000)];
    expect(notesOf(line!, graph, waiting, now, before)).toEqual(["2/s", "205 B/s", "100 ms each", "1 waiting"]);
    expect(notesOf(line!, graph, [], now, null)).toEqual(["30 in all"]);
  });
});

describe("colours of jobs", () => {
  it("differ, stay while a job is there, and are given again", () => {
    const kept = new Map<string, number>();
    expect([...slotsOf(["a", "b", "c"], kept)]).toEqual([["a", 0], ["b", 1], ["c", 2]]);
    expect([...slotsOf(["c", "d", "b"], kept)]).toEqual([["b", 1], ["c", 2], ["d", 0]]);
  });
  it("are explained with the devices of each job", () => {
    const heat = { jobs: ["a", "b"], items: [{ held: [1, 1, 0, null] }, { held: [1] }] } as never;
    expect(heldBy(heat)).toEqual([["b", 3], ["a", 1]]);
  });
});

describe("curves", () => {
  it("are smoothed without a pull to zero at their start", () => {
    expect(smoothed([[1, 4], [2, 4], [3, 8]], 0.5).map(([, value]) => value)).toEqual([4, 4, 44 / 7]);
    expect(smoothed([[1, 4]], 0)).toEqual([[1, 4]]);
  });
  it("are marked where a job went back, and ticks of commits do not run into each other", () => {
    expect(marksOf({ items: [{ n: 2, restore: 5 }] } as never)).toEqual([{ x: 5, words: "recovery 2" }]);
    expect(thinned([0, 1, 2, 3, 4, 6])).toEqual([0, 3, 6]);
  });
});

describe("failures", () => {
  const one = (n: number, reason: string) => ({ n, reason, role: "a", text: "bug.py:6", traceback: "", healed: true }) as FailureRow;
  it("are one entry where the same error comes again and again", () => {
    const found = grouped([one(1, "X"), one(2, "X"), one(3, "X"), one(4, "Y")]);
    expect(found.map(({ last, times }) => [last.n, times])).toEqual([[3, 3], [4, 1]]);
  });
});

describe("differences", () => {
  const told = (before: string, after: string) => diffLines(before, after).map((one) => one.kind[0] + one.text);
  it("keeps the longest common part", () => {
    expect(told("a\nb\nc", "a\nx\nc")).toEqual(["sa", "ob", "nx", "sc"]);
    expect(told("a", "a")).toEqual(["sa"]);
    expect(told("b\na", "a\nb\na")).toEqual(["na", "sb", "sa"]);
  });
  it("can be undone: without the old lines it is the new text, without the new lines the old one", () => {
    const [before, after] = ["q w e r t y u", "w q e t t u y i"].map((text) => text.replaceAll(" ", "\n"));
    const lines = diffLines(before!, after!);
    const without = (kind: string) => lines.filter((one) => one.kind !== kind).map((one) => one.text).join("\n");
    expect([without("new"), without("old")]).toEqual([before, after]);
  });
  it("leaves out what is far from a change", () => {
    const lines = diffLines("1\n2\n3\n4\n5\n6", "1\n2\n3\n4\n5\nx");
    expect(hunks(lines, 1).map((one) => one && one.text)).toEqual([null, "5", "6", "x"]);
  });
  it("writes values as lines", () => {
    expect(asLines({ a: 1, b: { c: [] }, r: [{ name: "x", n: null }], s: "" })).toBe('a: 1\nb:\n  c: []\nr:\n  - x:\n    name: x\n    n: null\ns: ""');
  });
});

const at = (second: number) => new Date(second * 1000).toISOString();
const event = (second: number, kind: string, fields: Record<string, unknown> = {}): EventRecord => ({ number: second, seq: second, job: "j", at: at(second), kind, ...fields });

describe("the timeline", () => {
  const job = {
    submitted_at: at(0),
    ended_at: at(30),
    attempts: [{ attempt: 1, admitted_at: at(5), started_at: at(8), ended_at: at(30), reason: "COMPLETED", nodes: [], why: {} }],
  } as unknown as JobDocument;
  const failures = {
    items: [{ n: 1, seen_at: at(10), decided_at: at(11), ended_at: at(14), level: "process", instance: "a/0", reason: "SIGNALLED", restore: 3 }],
  } as unknown as FailureList;
  const a = { role: "a", rank: 0 };
  const events = [
    event(6, "InstanceStarted", { ...a, epoch: 1, pid: 9 }),
    event(8, "InstanceReady", { ...a, epoch: 1 }),
    event(9, "Committed", { n: 3 }),
    event(10, "InstanceLost", { ...a, reason: "SIGNALLED" }),
    event(12, "InstanceStarted", { ...a, epoch: 2, pid: 10 }),
    event(14, "InstanceReady", { ...a, epoch: 2 }),
    event(30, "InstanceEnded", a),
  ];
  const spans = (name: string) => {
    const row = timelineOf(job, failures, events, 99_000).rows.find((one) => one.name === name);
    return row!.bars.map((bar) => [bar.kind, bar.from / 1000, bar.to / 1000]);
  };
  it("tells when the job waited, started and ran", () => {
    expect(spans("in the queue")).toEqual([["wait", 0, 5]]);
    expect(spans("attempt 1")).toEqual([["start", 5, 8], ["run", 8, 30]]);
  });
  it("tells the recovery and the processes of each instance", () => {
    expect(spans("recovery 1")).toEqual([["detect", 10, 11], ["recover", 11, 14]]);
    expect(spans("a/0")).toEqual([["start", 6, 8], ["run", 8, 10], ["lost", 10, 10], ["start", 12, 14], ["run", 14, 30]]);
    expect(timelineOf(job, failures, events, 0).commits).toEqual([{ at: 9000, n: 3 }]);
  });
  it("a job that waits again after an attempt shows it", () => {
    const again = { ...job, ended_at: null, attempts: [{ ...job.attempts[0]!, ended_at: at(20) }] } as JobDocument;
    const bars = timelineOf(again, { items: [] } as unknown as FailureList, [], 40_000).rows[0]!.bars;
    expect(bars.map((bar) => [bar.from, bar.to])).toEqual([[0, 5000], [20_000, 40_000]]);
  });
  it("has at most nine marks", () => {
    for (const length of [1000, 7777, 3.6e6, 9e9]) expect(ticksOf(length).length).toBeLessThan(10);
  });
});

describe("the graph", () => {
  const role = (name: string, n: number) => ({ name, states: Array(n).fill("READY"), replicas: n }) as unknown as GraphDocument["roles"][number];
  const edge = (source: string, target: string, kind: string) => ({ source, target, kind });
  const graph = { roles: [role("a", 2), role("b", 30), role("c", 1)], edges: [edge("a", "b", "call"), edge("a", "b", "weights"), edge("b", "c", "call"), edge("c", "a", "call"), edge("b", "b", "mesh")], observed: [] as unknown[] } as GraphDocument;
  it("draws one line for all kinds between two roles, and none from a role to itself", () => {
    expect(linesOf(graph).map((one) => [one.id, one.kinds])).toEqual([["a>b", ["call", "weights"]], ["b>c", ["call"]], ["c>a", ["call"]]]);
  });
  it("puts no box on another, and lines that go back below all of them", () => {
    const { roles, lines } = place(graph);
    expect(roles.map((one) => one.x)).toEqual([...roles.map((one) => one.x)].sort((x, y) => x - y));
    expect(new Set(roles.map((one) => one.x)).size).toBe(3);
    const back = lines.filter((one) => one.below > 0);
    expect(back.map((one) => one.id)).toEqual(["c>a"]);
    const floor = Math.max(...roles.map((one) => one.y + one.height));
    const [from, to] = [roles[2]!, roles[0]!];
    expect(Math.max(from.y + from.height, to.y + to.height) + back[0]!.below).toBeGreaterThan(floor);
  });
  it("counts states", () => expect(countsOf(["READY", "LOST", "READY"])).toEqual([["READY", 2], ["LOST", 1]]));
});

describe("the heat map", () => {
  const node = { id: "n1", cells: ["rack-0", "n1"], state: "healthy", held: [0, null, 1], bad: [1] };
  it("groups nodes by what is above them and says who holds what", () => {
    expect(racksOf([node, { ...node, id: "n2", cells: [] }]).map(([rack, nodes]) => [rack, nodes.length])).toEqual([["rack-0", 1], ["nodes", 1]]);
    expect(sentenceOf(node, holdersOf(node, ["x-1", "y-1"]))).toBe("n1, healthy; 2 of 3 devices held; by x-1, y-1; out of order: 1");
  });
});

describe("the queue tree", () => {
  it("draws what is borrowed after what is owned, in shares of the cluster", () => {
    const queue = { path: "a/b", used_gpus: 6, borrowed_gpus: 2, guaranteed_gpus: 4, limit_gpus: null } as QueueRow;
    expect(branchesOf([queue, { ...queue, path: "a" }], 8).map((one) => [one.queue.path, one.depth])).toEqual([["a", 0], ["a/b", 1]]);
    expect(branchesOf([queue], 8)[0]!.share).toEqual({ used: 0.5, borrowed: 0.25, guaranteed: 0.5, limit: null });
  });
});

describe("output", () => {
  const line = (offset: number): LogLine => ({ kind: "LogLine", instance: "a/0", node: "", attempt: 1, epoch: 1, offset, ts: null, stream: "out", text: String(offset) });
  it("drops what came before and keeps the newest lines", () => {
    const ends = new Map<string, number>();
    const first = joined([], [line(0), line(5)], ends);
    const again = joined(first, [line(0), line(5), line(9)], ends);
    expect(again.map((one) => one.offset)).toEqual([0, 5, 9]);
    expect(joined(again, [line(5)], ends)).toBe(again);
    expect(joined(again, [line(12)], ends, 2).map((one) => one.offset)).toEqual([9, 12]);
    const elsewhere = { ...line(9), node: "m1" };
    expect(joined(again, [elsewhere], ends)).toEqual([...again, elsewhere]);
  });
});

describe("changes and job files", () => {
  it("offers only changes that a running job takes", () => {
    expect(patchOf({ set: "priority", value: 90 })).toEqual({ priority: 90 });
    expect([patchOf({ set: "roles.a.replicas", value: 1 }), patchOf(null)]).toEqual([{}, {}]);
  });
  it("writes texts so that YAML reads them as they are", () => {
    const text = jobFileOf({ name: "no", queue: "default", command: 'echo "a: b" # c', replicas: 2, gpus: 1 });
    expect(text).toContain('name: "no"');
    expect(text).toContain('run: "echo \\"a: b\\" # c"');
  });
});
