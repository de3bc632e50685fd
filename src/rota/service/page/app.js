// The page: routes by the part of the address after '#', redraws when an event arrives, works with the session cookie.
import { jobPage, leaveJob } from "/page/jobs.js";

const main = document.getElementById("main");
const banner = document.getElementById("banner");
let drawn = 0;

// -- small parts ------------------------------------------------------------------------------------------------------

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick" || name === "oninput" || name === "onchange") node[name] = value;
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

const LOOK = {
  SUBMITTED: ["○", "idle"], QUEUED: ["◔", "idle"], ADMITTED: ["◑", "busy"], CHECKING: ["◑", "busy"],
  STARTING: ["◕", "busy"], RUNNING: ["▶", "good"], RECOVERING: ["↻", "warn"], RESIZING: ["⇔", "warn"],
  PREEMPTING: ["⇣", "warn"], PAUSED: ["⏸", "idle"], STOPPING: ["◼", "idle"], SUCCEEDED: ["✓", "good"],
  FAILED: ["✗", "bad"], CANCELLED: ["–", "idle"], PLANNED: ["○", "idle"], STALE: ["◕", "busy"], READY: ["✓", "good"],
  SUSPECT: ["?", "warn"], LOST: ["✗", "bad"], GONE: ["–", "idle"], ready: ["✓", "good"], degraded: ["!", "warn"],
  starting: ["◔", "busy"], healthy: ["✓", "good"], lost: ["✗", "bad"], drained: ["–", "idle"],
};

export function state(name) {
  const [glyph, tone] = LOOK[name] || ["•", "idle"];
  return el("span", { class: `state ${tone}` }, `${glyph} ${name}`);
}

export function when(iso) {
  if (!iso) return "";
  const at = new Date(iso);
  return el("time", { datetime: iso, title: `${at.toString()}` }, at.toLocaleTimeString());
}

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export function table(caption, heads, rows) {
  const head = heads.map((name) => el("th", { scope: "col", class: name.startsWith("#") ? "number" : null }, name.replace("#", "")));
  const body = rows.map((cells) => el("tr", {}, cells.map((cell, i) =>
    el("td", { class: heads[i].startsWith("#") ? "number" : null }, cell instanceof Node ? cell : String(cell ?? "")))));
  return el("div", { class: "scroll" }, el("table", { "aria-label": caption }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

// -- asking -----------------------------------------------------------------------------------------------------------

export class Refused extends Error {}

export async function ask(path, options = {}) {
  const answer = await fetch(`/api/v1${path}`, { ...options, headers: { "Rota-CSRF": "1", "Content-Type": "application/json", ...options.headers } });
  const document_ = await answer.json();
  if (!answer.ok) throw new Refused(answer.status === 401 ? "sign in" : `${document_.detail} ${document_.hint || ""}`);
  return document_;
}

// -- pages ------------------------------------------------------------------------------------------------------------

const filter = { text: "", all: true };

async function jobsPage() {
  const { items } = await ask(`/jobs?limit=200${filter.all ? "&all=true" : ""}`);
  const shown = items.filter((job) => `${job.id} ${job.queue} ${job.state} ${job.user}`.toLowerCase().includes(filter.text));
  const rows = shown.map((job) => [
    el("a", { href: `#/jobs/${job.id}` }, job.id),
    el("span", {}, state(job.state), job.phase ? el("span", { class: "soft" }, ` ${job.phase}`) : ""),
    job.queue, job.priority, job.gpus, `${job.instances_ready}/${job.instances_total}`, job.restarts,
    job.progress ? `commit ${job.progress.commit}` : "", seconds(job.run_s), when(job.submitted_at), job.text,
  ]);
  const search = el("input", { type: "search", placeholder: "Filter", "aria-label": "Filter jobs", value: filter.text,
    oninput: (event) => { filter.text = event.target.value.toLowerCase(); draw({ keepFocus: true }); } });
  const all = el("input", { type: "checkbox", id: "all", onchange: (event) => { filter.all = event.target.checked; draw(); } });
  all.checked = filter.all;
  const list = rows.length
    ? table("Jobs", ["Job", "State", "Queue", "#Priority", "#GPUs", "#Ready", "#Restarts", "Progress", "#Ran", "Submitted", "Why"], rows)
    : el("p", { class: "card" }, "No jobs. Submit one with ", el("code", {}, "rota run job.yaml"), ".");
  return [el("h1", {}, "Jobs"), el("div", { class: "tools" }, search, el("label", {}, all, " ended ones too")), list];
}

async function nodesPage() {
  const { items } = await ask("/nodes");
  const cards = items.map((node) => el("section", { class: "node", "aria-label": `Node ${node.id}` },
    el("strong", {}, node.id), " ", state(node.state),
    el("div", { class: "soft" }, `${node.cells.join(" / ")} ${node.cpus_used}/${node.cpus} cores`),
    el("div", { class: "cells" }, node.devices.map((device) => el("span", {
      class: `cell ${device.health !== "healthy" ? "broken" : device.job ? "held" : ""}`,
      title: `${device.type} ${device.index}: ${device.job || device.health}`,
    }, device.health !== "healthy" ? "✗" : device.job ? "■" : String(device.index)))),
    el("div", {}, node.jobs.map((job) => el("a", { href: `#/jobs/${job}` }, `${job} `)))));
  return [el("h1", {}, "Nodes"), el("p", { class: "soft" }, "■ held by a job, ✗ out of order, a number is a free device."), el("div", { class: "grid" }, cards)];
}

async function queuesPage() {
  const { items } = await ask("/queues");
  const rows = items.map((one) => [one.path, one.state, one.used_gpus, one.guaranteed_gpus ?? "–", one.limit_gpus ?? "–",
    one.borrowed_gpus, one.running_jobs, one.pending_jobs, one.pending_gpus, when(one.oldest_wait_since)]);
  return [el("h1", {}, "Queues"), table("Queues", ["Queue", "State", "#GPUs used", "#Guaranteed", "#Limit", "#Borrowed", "#Running", "#Pending", "#GPUs pending", "Oldest wait"], rows)];
}

function signIn() {
  return [el("h1", {}, "Sign in"), el("p", { class: "card" }, "Run ", el("code", {}, "rota status"), " and open the address with the code that it prints.")];
}

// -- drawing ----------------------------------------------------------------------------------------------------------

async function page() {
  const [, part, id] = location.hash.split("/");
  if (part === "jobs" && id) return jobPage(decodeURIComponent(id));
  leaveJob();
  if (part === "nodes") return nodesPage();
  if (part === "queues") return queuesPage();
  return jobsPage();
}

export async function draw({ keepFocus = false } = {}) {
  const mine = ++drawn;
  let content;
  try {
    content = await page();
    status();
  } catch (error) {
    if (!(error instanceof Refused) && !(error instanceof TypeError)) throw error;
    content = error.message === "sign in" ? signIn() : null;
    if (!content) return lost(error.message);
  }
  const had = document.activeElement;
  if (mine !== drawn || !content || (had && had.tagName === "SELECT" && !keepFocus && main.contains(had))) return;
  const scrolled = new Map([...main.querySelectorAll("pre[aria-label]")].map((pane) => [pane, pane.scrollTop]));
  const open = new Set([...main.querySelectorAll("details[open][id]")].map((one) => one.id));
  const at = had && had.type === "search" ? had.selectionStart : null;
  main.replaceChildren(...content);
  for (const [pane, top] of scrolled) pane.scrollTop = top;
  for (const one of main.querySelectorAll("details[id]")) one.open = open.has(one.id);
  if (at !== null || keepFocus) {
    const search = main.querySelector("input[type=search]");
    if (search) { search.focus(); search.setSelectionRange(at ?? search.value.length, at ?? search.value.length); }
  }
}

async function status() {
  const { state: name, cluster, warnings } = await ask("/status");
  const pill = document.getElementById("service");
  pill.replaceChildren(state(name));
  document.getElementById("counts").textContent =
    `${cluster.nodes} nodes, ${cluster.gpus_used}/${cluster.gpus} GPUs held, ` +
    (Object.entries(cluster.jobs).map(([name, count]) => `${count} ${name.toLowerCase()}`).join(", ") || "no jobs");
  banner.hidden = warnings.length === 0;
  banner.textContent = warnings.join(" ");
}

function lost(text) {
  banner.hidden = false;
  banner.textContent = `Reconnecting; what you see is of ${new Date().toLocaleTimeString()}. ${text}`;
}

// -- events -----------------------------------------------------------------------------------------------------------

let redraw = null;
function soon() {
  if (redraw === null) redraw = setTimeout(() => { redraw = null; draw(); }, 250);
}

async function follow() {
  const { parts } = await ask("/status");
  const source = new EventSource(`/api/v1/events?follow=true&after=${parts.store.records}`);
  source.addEventListener("event", soon);
  source.addEventListener("reset", soon);
  source.onopen = soon;
  source.onerror = () => lost("The service does not answer.");
}

addEventListener("hashchange", () => { main.focus(); draw(); });
addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target.tagName !== "INPUT") {
    const search = main.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); }
  }
});
setInterval(soon, 10_000); // running times move without events
draw();
follow().catch((error) => lost(error.message));
