/** The one module that speaks to the service: paths, headers and errors of the REST API. */
import type {
  AlertList, AuditList, DrainPlan, EventList, Explanation, FailureList, GraphDocument, Heat, JobDocument, JobList, JobSpecDocument, NodeList, NodeRow, Outlook, Place,
  GrantedRole, LogPage, PlacementDocument, PlanReport, ProfileList, QueueTree, ReasonList, SecretList, StatusDocument, TemplateList, TokenDocument, TokenList,
  UsageHistory, UserDocument, UserList, WaitGraphDocument, WebhookList, WhatIf,
} from "./types";

const BASE = "/api/v1";

/** A refusal (RFC 9457): what is wrong, where, and what to do. */
export class Problem extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    detail: string,
    readonly hint: string,
    readonly places: Place[],
  ) {
    super(detail);
  }
}

async function ask<T>(method: string, path: string, body?: unknown, headers: Record<string, string> = {}): Promise<T> {
  const answer = await send(method, BASE + path, body, headers);
  return (await answer.json()) as T;
}

async function send(method: string, address: string, body?: unknown, headers: Record<string, string> = {}): Promise<Response> {
  let answer: Response;
  try {
    answer = await fetch(address, {
      method,
      headers: { "Rota-CSRF": "1", ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new Problem(0, "NOT_REACHABLE", "The service does not answer.", "rota status", []);
  }
  if (!answer.ok) {
    const document = await answer.json();
    throw new Problem(answer.status, document.code ?? "", document.detail ?? answer.statusText, document.hint ?? "", document.errors ?? []);
  }
  return answer;
}

/** Open a session of this browser with a code or a token. */
export async function signIn(by: { code: string } | { token: string }): Promise<void> {
  await send("POST", "/login", by);
}

/** End the session of this browser. */
export async function signOut(): Promise<void> {
  await send("POST", "/logout");
}

const get = <T>(path: string) => ask<T>("GET", path);
const part = (text: string) => encodeURIComponent(text);

function query(values: Record<string, string | number | boolean | string[] | undefined>): string {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== "" && one !== false) found.append(name, String(one));
    }
  }
  const text = found.toString();
  return text && `?${text}`;
}

export interface JobQuery {
  all?: boolean;
  state?: string[];
  queue?: string;
  text?: string;
  sort?: string;
  label?: string;
  limit?: number;
  cursor?: string;
}

export interface SubmitBody {
  source: string;
  filename: string;
  workdir: string;
  sets: string[];
}

/** Job actions that a POST to `/jobs/{id}:{action}` asks for. */
export type JobAction = "stop" | "pause" | "resume";

export const api = {
  status: () => get<StatusDocument>("/status"),
  whoami: () => get<UserDocument>("/whoami"),
  alerts: () => get<AlertList>("/alerts"),
  acknowledge: (alert: string, note: string) => ask<AlertList>("POST", "/alerts:acknowledge", { alert, note }),
  audit: (text: string, cursor: string) => get<AuditList>(`/audit${query({ text, cursor })}`),
  why: (id: string) => get<WaitGraphDocument>(`/jobs/${part(id)}/why`),
  logs: (id: string, wanted: { instance?: string; since?: number; tail?: number }) => get<LogPage>(`/jobs/${part(id)}/logs${query(wanted)}`),
  heat: () => get<Heat>("/cluster/heat"),
  history: (sinceS: number, points: number) => get<UsageHistory>(`/cluster/history${query({ since_s: sinceS, points })}`),
  reasons: () => get<ReasonList>("/reasons"),
  users: () => get<UserList>("/users"),
  putUser: (name: string, grants: GrantedRole[]) => ask<UserDocument>("PUT", `/users/${part(name)}`, { grants }),
  removeUser: (name: string) => ask<UserDocument>("DELETE", `/users/${part(name)}`),
  tokens: () => get<TokenList>("/tokens"),
  makeToken: (body: { user: string; name: string; role: string; queue: string; ttl_s: number | null }) => ask<TokenDocument>("POST", "/tokens", body),
  revokeToken: (id: string) => ask<TokenDocument>("DELETE", `/tokens/${part(id)}`),
  secrets: () => get<SecretList>("/secrets"),
  webhooks: () => get<WebhookList>("/webhooks"),
  queues: () => get<QueueTree>("/queues"),
  nodes: () => get<NodeList>("/nodes"),
  node: (id: string) => get<NodeRow>(`/nodes/${part(id)}`),
  markNode: (id: string, action: string, reason: string, dryRun: boolean) =>
    ask<DrainPlan>("POST", `/nodes/${part(id)}:${action}`, { reason, dry_run: dryRun }),
  jobs: (wanted: JobQuery) => get<JobList>(`/jobs${query({ ...wanted })}`),
  job: (id: string) => get<JobDocument>(`/jobs/${part(id)}`),
  explain: (id: string) => get<Explanation>(`/jobs/${part(id)}/explain`),
  failures: (id: string) => get<FailureList>(`/jobs/${part(id)}/failures`),
  graph: (id: string) => get<GraphDocument>(`/jobs/${part(id)}/graph`),
  placement: (id: string) => get<PlacementDocument>(`/jobs/${part(id)}/placement`),
  spec: (id: string) => get<JobSpecDocument>(`/jobs/${part(id)}/spec`),
  events: (id: string, type = "", after = 0) =>
    get<EventList>(`/jobs/${part(id)}/events${query({ type, after: after || undefined, limit: 1000 })}`),
  /** At most `points` events of one type, evenly spread over the job, the newest among them. */
  sample: (id: string, type: string, points: number) => get<EventList>(`/jobs/${part(id)}/events${query({ type, points })}`),
  /** What would happen to a job that waits if it were changed so; nothing is. */
  whatIf: (id: string, changes: string[]) => ask<WhatIf>("POST", `/jobs/${part(id)}/explain`, { changes }),
  act: (id: string, action: JobAction) => ask<JobDocument>("POST", `/jobs/${part(id)}:${action}`, {}),
  /** `version` of the document that the change was made from: the service refuses it after an edit by another user. */
  change: (id: string, changes: Record<string, unknown>, version?: number) =>
    ask<JobDocument>("PATCH", `/jobs/${part(id)}`, { changes }, version === undefined ? {} : { "If-Match": `"${version}"` }),
  plan: (body: SubmitBody) => ask<PlanReport>("POST", "/jobs:plan", body),
  submit: (body: SubmitBody, key: string) => ask<JobDocument>("POST", "/jobs", body, { "Idempotency-Key": key }),
  templates: () => get<TemplateList>("/templates"),
  profiles: () => get<ProfileList>("/sim/profiles"),
  outlook: (profiles: string[]) => ask<Outlook>("POST", "/sim/outlook", { profiles }),
};

/** Address of a stream of server-sent events. */
export const streams = {
  events: (after: number) => `${BASE}/events${query({ follow: true, after })}`,
  /** All lines that hold `find`, whatever its case; without it the last `tail` lines, or those since a time. */
  logs: (job: string, { instance, find, since, tail }: { instance: string; find: string; since?: number; tail: number }) =>
    `${BASE}/jobs/${part(job)}/logs${query({ follow: true, instance, since, ...(find ? { grep: find, ignore_case: true } : since ? {} : { tail }) })}`,
};
