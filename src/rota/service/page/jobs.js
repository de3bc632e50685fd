// The page of one job: state, why it waits, roles and instances, timeline, failures, output.
import { ask, draw, el, seconds, state, table, when } from "/page/app.js";

let output = null;

export function leaveJob() {
  if (output) { output.source.close(); output = null; }
}

export async function jobPage(id) {
  const job = await ask(`/jobs/${encodeURIComponent(id)}`);
  const [explain, failures, events] = await Promise.all(
    ["explain", "failures", "events"].map((part) => ask(`/jobs/${job.id}/${part}`)));
  return [
    el("h1", {}, job.id, " ", state(job.state), job.phase ? el("span", { class: "soft" }, ` ${job.phase}`) : ""),
    tools(job), facts(job), explainCard(explain), errorCard(job),
    el("h2", {}, "Timeline"), timeline(job, failures, events.items),
    el("h2", {}, "Instances"), instances(job),
    el("h2", {}, `Failures (${failures.items.length})`), failureStory(failures),
    el("h2", {}, "Output"), outputPane(job),
    el("h2", {}, "Events"), eventList(events.items),
  ].filter(Boolean);
}

function tools(job) {
  if (["SUCCEEDED", "FAILED", "CANCELLED"].includes(job.state)) return null;
  const stop = () => { if (confirm(`Stop ${job.id}?`)) ask(`/jobs/${job.id}:stop`, { method: "POST", body: "{}" }).then(() => draw()); };
  return el("div", { class: "tools" }, el("button", { onclick: stop }, "Stop"));
}

function facts(job) {
  const rows = [
    ["Queue", `${job.queue}, priority ${job.priority}`], ["Submitted", when(job.submitted_at)], ["Started", when(job.started_at)],
    ["Ended", when(job.ended_at)], ["Ran", seconds(job.run_s)], ["Attempt", job.attempt], ["Nodes", job.nodes.join(", ")],
    ["Master", job.master ? `pid ${job.master.pid}, epoch ${job.master.epoch}, node ${job.master.node}` : ""],
    ["Progress", job.progress ? `commit ${job.progress.commit} ${Object.entries(job.progress.metrics).map(([k, v]) => `${k}=${typeof v === "number" ? +v.toPrecision(4) : v}`).join(" ")}` : ""],
    ["Why", job.text],
  ].filter(([, value]) => value !== "" && value !== null);
  return el("div", { class: "card" }, el("dl", {}, rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value instanceof Node ? value : String(value))])));
}

function explainCard(explain) {
  if (!explain.waiting || !explain.why) return null;
  const changes = explain.would_start_now_with.map((one) => el("li", {}, one.text, one.cost ? el("span", { class: "soft" }, ` (${one.cost})`) : ""));
  const blockers = explain.blocked_by.map((one) => el("li", {}, el("a", { href: `#/jobs/${one.job}` }, one.job), ` holds ${one.gpus} GPUs, ${one.cpus} cores`, one.ends ? el("span", {}, ", ends by ", when(one.ends)) : ""));
  return el("section", { class: "card", "aria-label": "Why it waits" },
    el("h2", {}, "Why it waits"),
    el("p", {}, el("strong", {}, explain.why.code), ` ${explain.why.text}`),
    el("p", { class: "soft" }, `${explain.ahead.jobs} jobs with ${explain.ahead.gpus} GPUs are ahead in queue ${explain.queue.path}.`),
    explain.tally.length ? table("Nodes left by constraint", ["Constraint", "#Nodes left"], explain.tally.map((one) => [one.constraint, one.nodes_left])) : null,
    changes.length ? el("div", {}, el("p", {}, "It would start now with:"), el("ul", {}, changes)) : null,
    blockers.length ? el("div", {}, el("p", {}, "Who holds devices:"), el("ul", {}, blockers)) : null);
}

function errorCard(job) {
  if (!job.error) return null;
  const where = job.error.role === null ? "" : ` in ${job.error.role}/${job.error.rank}`;
  return el("section", { class: "card", "aria-label": "Error" }, el("h2", { class: "bad" }, `✗ ${job.error.reason}${where}`),
    el("p", {}, job.error.text), job.error.traceback ? el("pre", {}, job.error.traceback) : null);
}

function instances(job) {
  const rows = job.instances.map((one) => [
    el("a", { href: `#/jobs/${job.id}`, onclick: (event) => { event.preventDefault(); choice = one.instance; leaveJob(); draw(); } }, one.instance), state(one.state), one.node, one.devices.join(","), one.pid ?? "",
    one.epoch, one.restarts, when(one.since), one.error ? `${one.error.reason}: ${one.error.text}` : "",
  ]);
  if (!rows.length) return el("p", { class: "soft" }, "None yet.");
  return table("Instances", ["Instance", "State", "Node", "Devices", "#Pid", "#Epoch", "#Restarts", "Since", "Last error"], rows);
}

// -- timeline: attempts as bars, recoveries as darker bars, commits as ticks ------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
function svg(tag, attributes, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
}

function timeline(job, failures, events) {
  const start = Date.parse(job.submitted_at);
  const end = Math.max(job.ended_at ? Date.parse(job.ended_at) : Date.now(), start + 1000);
  const width = 1000, left = 90, scale = (iso) => left + ((iso ? Date.parse(iso) : end) - start) / (end - start) * (width - left - 10);
  const rows = [["waiting", job.submitted_at, job.attempts[0] ? job.attempts[0].admitted_at : job.ended_at, "--idle", "waits for devices"]];
  for (const one of job.attempts) {
    rows.push([`attempt ${one.attempt}`, one.admitted_at, one.ended_at, "--busy", `attempt ${one.attempt}: ${one.reason || "goes on"}`]);
  }
  const height = 24 * (rows.length + 2) + 20;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": `Timeline of ${job.id}: ${failures.items.length} recoveries` });
  rows.forEach(([name, from, to, tone, title], i) => {
    picture.append(svg("text", { x: 0, y: 24 * i + 16 }, name));
    const bar = svg("rect", { x: scale(from), y: 24 * i + 4, width: Math.max(2, scale(to) - scale(from)), height: 16, fill: `var(${tone})`, rx: 2 });
    bar.append(svg("title", {}, title));
    picture.append(bar);
  });
  const y = 24 * rows.length;
  picture.append(svg("text", { x: 0, y: y + 16 }, "recoveries"), svg("text", { x: 0, y: y + 40 }, "commits"));
  for (const one of failures.items) {
    const bar = svg("rect", { x: scale(one.seen_at), y: y + 4, width: Math.max(4, scale(one.ended_at) - scale(one.seen_at)), height: 16, fill: one.healed ? "var(--warn)" : "var(--bad)", rx: 2 });
    bar.append(svg("title", {}, `${one.n}. ${one.instance} ${one.reason}, ${one.level} level, ${one.seconds === null ? "open" : seconds(one.seconds)}`));
    picture.append(bar);
  }
  for (const one of events.filter((event) => event.kind === "Committed")) {
    const tick = svg("rect", { x: scale(one.at), y: y + 28, width: 2, height: 14, fill: "var(--good)" });
    tick.append(svg("title", {}, `commit ${one.n}`));
    picture.append(tick);
  }
  picture.append(svg("text", { x: left, y: height - 4 }, new Date(start).toLocaleTimeString()),
    svg("text", { x: width - 10, y: height - 4, "text-anchor": "end" }, new Date(end).toLocaleTimeString()));
  return el("div", { class: "card" }, picture);
}

function failureStory(failures) {
  if (!failures.items.length && !failures.end) return el("p", { class: "soft" }, "None.");
  const rows = failures.items.map((one) => [
    one.n, when(one.seen_at), one.instance, el("span", {}, one.reason, " ", el("span", { class: "soft" }, one.text)),
    one.moved_from ? `${one.moved_from} → ${one.level} (${one.move_reason})` : one.level, one.scope.map((part) => part.instance).join(" "),
    one.restore, one.lost_commits, one.seconds === null ? el("span", { class: "bad" }, "open") : el("span", { class: "good" }, `✓ ${seconds(one.seconds)}`),
    one.traceback ? el("details", { id: `traceback-${one.n}` }, el("summary", {}, "traceback"), el("pre", {}, one.traceback)) : "",
  ]);
  return table("Failures", ["#", "Seen", "First failing", "Cause", "Level", "Touched", "#Back to commit", "#Lost", "Healed in", ""], rows);
}

// -- output -----------------------------------------------------------------------------------------------------------

let choice = "";

function outputPane(job) {
  const names = ["", ...job.instances.map((one) => one.instance)];
  const pick = el("select", { "aria-label": "Instance", onchange: (event) => { choice = event.target.value; leaveJob(); draw({ keepFocus: true }); } },
    names.map((name) => el("option", { value: name, selected: name === choice }, name || "all instances")));
  if (!output || output.job !== job.id || output.choice !== choice) {
    leaveJob();
    const pane = el("pre", { tabindex: "0", "aria-label": "Output" });
    const instance = choice ? `&instance=${encodeURIComponent(choice)}` : "";
    const source = new EventSource(`/api/v1/jobs/${job.id}/logs?follow=true&tail=300${instance}`);
    const seen = new Set();
    source.addEventListener("line", (event) => {
      const line = JSON.parse(event.data);
      const key = `${line.instance} ${line.offset}`;
      if (seen.has(key)) return;
      seen.add(key);
      const below = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 40;
      pane.append(`${line.ts ? new Date(line.ts).toLocaleTimeString() : ""} ${line.instance} ${line.text}\n`);
      while (pane.childNodes.length > 2000) pane.firstChild.remove();
      if (below) pane.scrollTop = pane.scrollHeight;
    });
    source.addEventListener("end", () => source.close());
    output = { job: job.id, choice, pane, source };
  }
  return el("div", {}, el("div", { class: "tools" }, pick), output.pane);
}

function eventList(events) {
  const rows = events.slice(-200).reverse().map((one) => {
    const { number, at, kind, job, seq, spec, source, traceback, ...rest } = one;
    return [number, when(at), kind, el("code", { class: "soft" }, JSON.stringify(rest).slice(0, 300))];
  });
  return el("details", { id: "events" }, el("summary", {}, `${events.length} events`), table("Events", ["#Number", "At", "Event", "Fields"], rows));
}
