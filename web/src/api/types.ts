/** Documents of the REST API as the UI reads them; fields that no page shows are left out. */

export type JobState =
  | "SUBMITTED" | "QUEUED" | "ADMITTED" | "CHECKING" | "STARTING" | "RUNNING" | "RECOVERING" | "RESIZING"
  | "PREEMPTING" | "PAUSED" | "STOPPING" | "SUCCEEDED" | "FAILED" | "CANCELLED";

export interface Page<T> {
  items: T[];
  next: string | null;
}

export interface Progress {
  commit: number;
  at: string;
  metrics: Record<string, unknown>;
}

export interface JobRow {
  id: string;
  name: string;
  user: string;
  queue: string;
  priority: number;
  state: JobState;
  phase: string;
  reason: string | null;
  text: string;
  since: string;
  submitted_at: string;
  queued_at: string | null;
  started_at: string | null;
  ended_at: string | null;
  run_s: number;
  attempt: number;
  failovers: number;
  restarts: number;
  instances_total: number;
  instances_ready: number;
  gpus: number;
  nodes: string[];
  labels: Record<string, string>;
  progress: Progress | null;
}

export interface Loss {
  at: string;
  instance: string;
  epoch: number;
  reason: string;
  text: string;
  traceback: string;
  exit_code: number | null;
  signal: number | null;
}

export interface Instance {
  instance: string;
  role: string;
  rank: number;
  state: string;
  since: string;
  node: string;
  pid: number | null;
  epoch: number;
  restarts: number;
  devices: number[];
  restored: number;
  progress: { n: number; unit: string; idle_s: number; beat_age_s: number; busy: string[]; quiet: boolean } | null;
  error: Omit<Loss, "instance"> | null;
}

export interface Attempt {
  attempt: number;
  admitted_at: string;
  started_at: string | null;
  ended_at: string | null;
  reason: string | null;
  nodes: string[];
  why: Record<string, unknown>;
}

export interface Job extends JobRow {
  roles: { name: string; workload: string | null; run: string[] | null; replicas: number; ready: number; restarts: number }[];
  instances: Instance[];
  master: { pid: number; epoch: number; node: string; since: string } | null;
  attempts: Attempt[];
  error: { reason: string; fault: string; text: string; role: string | null; rank: number | null; instance: string; traceback: string } | null;
  changes: { at: string; by: string; changes: Record<string, unknown> }[];
  workdir: string;
  version: number;
}

export interface Why {
  code: string;
  text: string;
  fields?: Record<string, unknown>;
}

export interface Explanation {
  job: string;
  state: JobState;
  since: string;
  waiting: boolean;
  queue: { path: string; used: number; guaranteed: number | null; limit: number | null };
  why: Why | null;
  tally: { constraint: string; nodes_left: number }[];
  ahead: { jobs: number; gpus: number };
  blocked_by: { job: string; gpus: number; cpus: number; ends: string | null; basis: string }[];
  would_start_now_with: { change: unknown; text?: string; cost?: string }[];
  victims_if_preempted: { job: string; lost_gpu_s?: number }[];
  estimate: { p50: number | string | null; p90: number | string | null; basis: string } | null;
  starts_now: boolean;
  placement: { nodes: string[]; why: Record<string, unknown> } | null;
  decisions: { at: string; decision: string; text?: string; reason?: string; why?: Record<string, unknown> }[];
}

export interface Failure {
  n: number;
  attempt: number;
  level: string;
  moved_from: string | null;
  reason: string;
  fault: string;
  text: string;
  instance: string;
  traceback: string;
  scope: { instance: string; epoch: number }[];
  restore: number;
  lost_commits: number;
  seen_at: string;
  decided_at: string;
  ended_at: string | null;
  detect_to_decide_s: number;
  seconds: number | null;
  joined_by: number | null;
  healed: boolean;
  losses: Loss[];
}

export interface FailureList {
  first: Loss | null;
  items: Failure[];
  end: { at: string; reason: string; text: string; role: string | null; rank: number | null; instance: string; traceback: string } | null;
  open_losses: Loss[];
}

export interface GraphRole {
  name: string;
  replicas: number;
  loop: boolean;
  stateful: boolean;
  restart: string;
  mesh: Record<string, unknown>;
  blast_radius: string;
  states: string[];
}

export interface Graph {
  roles: GraphRole[];
  edges: { source: string; target: string; kind: string }[];
  streams: { name: string; cap: number | null; source: string | null }[];
  subgraphs: string[][];
  units: string[][];
}

export interface Placement {
  attempt: number;
  why: Record<string, unknown> | null;
  items: { instance: string; node: string; devices: number[] }[];
}

export interface JobSpecDocument {
  source: string;
  filename: string;
  spec: Record<string, unknown>;
  edits: { at: string; by: string; before: Record<string, unknown>; after: Record<string, unknown> }[];
}

export interface LogLine {
  instance: string;
  attempt: number;
  offset: number;
  ts: string | null;
  stream: string;
  text: string;
}

export interface EventRecord {
  number: number;
  job: string | null;
  at: string;
  kind: string;
  [field: string]: unknown;
}

export interface EventList {
  items: EventRecord[];
  next: number | null;
  last: number;
}

export interface NodeDocument {
  id: string;
  host: string;
  state: string;
  cells: string[];
  labels: Record<string, string>;
  cpus: number;
  cpus_used: number;
  memory_bytes: number;
  gpus: number;
  gpus_used: number;
  devices: { index: number; type: string; health: string; memory_bytes: number; job: string | null }[];
  jobs: string[];
  joined_at: string | null;
  marked_at: string | null;
  marked_by: string;
  text: string;
}

/** One node of the heat map: `held` has for each device the place of its job in `jobs`, or null. */
export interface HeatNode {
  id: string;
  cells: string[];
  state: string;
  held: (number | null)[];
  bad: number[];
}

export interface Heat {
  jobs: string[];
  items: HeatNode[];
}

/** What a queue promises or allows; 0 is not stated. */
export interface Stated {
  gpus: number;
  cpus: number;
  memory_bytes: number;
}

export interface Queue {
  path: string;
  parent: string | null;
  state: string;
  weight: number;
  used_gpus: number;
  guaranteed: Stated | null;
  limit: Stated | null;
  user_limit: Stated | null;
  guaranteed_gpus: number | null;
  limit_gpus: number | null;
  borrowed_gpus: number;
  running_jobs: number;
  pending_jobs: number;
  pending_gpus: number;
  oldest_wait_since: string | null;
}

export interface Status {
  state: string;
  version: string;
  url: string;
  pid: number;
  started_at: string;
  home: string;
  install_epoch: number;
  profile: string;
  pretend: string | null;
  parts: Record<string, Record<string, unknown>>;
  cluster: { nodes: number; nodes_bad: number; gpus: number; gpus_used: number; jobs: Partial<Record<JobState, number>> };
  warnings: string[];
}

export interface DrainPlan {
  node: string;
  action: string;
  dry_run: boolean;
  jobs: { job: string; effect: string }[];
  state: string;
}

export interface Place {
  loc: string;
  line: number;
  col: number;
  message: string;
  hint: string;
  code: string;
}

export interface PlanReport {
  name: string;
  starts_now: boolean;
  why: Why | null;
  explanation: Explanation;
  roles: { name: string; workload: string | null; run: string[] | null; replicas: number; blast_radius: { text: string } }[];
  subgraphs: string[][];
  placement: { gangs: { gang: string; bundles: { node: string; devices: number[] }[] }[] } | null;
}

export interface Template {
  name: string;
  text: string;
  files: Record<string, string>;
}

export interface Profile {
  name: string;
  text: string;
}

/** One job of a comparison: when it would start under each policy, in seconds from now; null: not within the horizon. */
export interface OutlookJob {
  job: string;
  queue: string;
  gpus: number;
  state: string;
  starts_s: Record<string, number | null>;
  preemptions: Record<string, number>;
}

export interface Spread {
  mean: number | null;
  p50: number | null;
  p95: number | null;
  max: number | null;
}

export interface Outlook {
  profiles: string[];
  basis: string;
  summary: Record<string, { started: number; jobs: number; wait_s: Spread; jct_s: Spread; makespan_s: number; utilisation: number | null; preemptions: number }>;
  items: OutlookJob[];
}
