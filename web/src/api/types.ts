/** Documents of the REST API that the UI reads. Written by docs/generate.py from the OpenAPI document. */

/** What is before a job in the order of its queue. */
export interface Ahead {
  jobs: number;
  gpus: number;
}

/** The present alerts: those without an acknowledgement first, then by severity. */
export interface AlertList {
  api: "rota/v1";
  kind: "AlertList";
  items: AlertRow[];
  next: null;
}

/** One alert of a job, a node, a queue or the disk; `hint` is the command that shows more. */
export interface AlertRow {
  id: string;
  code: string;
  severity: "critical" | "warning" | "info";
  since: string | null;
  text: string;
  job: string | null;
  node: string | null;
  hint: string;
  acknowledged_by: string;
  acknowledged_at: string | null;
  note: string;
}

/** One admission of a job to devices and what ended it. */
export interface AttemptRow {
  attempt: number;
  epoch: number;
  admitted_at: string | null;
  started_at: string | null;
  ended_at: string | null;
  reason: string | null;
  for_job: string;
  text: string;
  nodes: string[];
  why: Record<string, unknown>;
}

/** A request that was to change something; `status` is null while it is under way. */
export interface AuditLine {
  at: string;
  user: string;
  token: string;
  by: string;
  address: string;
  method: string;
  path: string;
  request_id: string;
  status: number | null;
  dry_run?: boolean;
  instance?: string;
  command?: string;
  change?: string;
  left_out?: number;
}

/** Requests, the newest first; `next` is the cursor of the older ones. */
export interface AuditList {
  api: "rota/v1";
  kind: "AuditList";
  items: AuditLine[];
  next: string | null;
}

/** What losing an instance of a role does. */
export interface BlastRadius {
  text: string;
  restarts: string[];
  re_forms: string[];
  pauses: string[];
}

/** A job that holds devices, and its latest end: by its time limit, or by its grace if it is stopping. */
export interface Blocker {
  job: string;
  gpus: number;
  cpus: number;
  ends: string | null;
  basis: "time_limit" | "stopping" | "unknown";
}

/** Devices of a node that one bundle of a gang has. */
export interface BundleRow {
  index: number;
  node: string;
  host: string;
  devices: number[];
  res: Resources;
}

/** An edit of a job. */
export interface ChangeRow {
  at: string | null;
  by: string;
  changes: Record<string, unknown>;
}

/** How many nodes, devices and jobs there are; `jobs` by state. */
export interface ClusterTotals {
  nodes: number;
  nodes_bad: number;
  gpus: number;
  gpus_used: number;
  jobs: Record<string, number>;
}

/** One decision of the scheduler about the job. */
export interface Decision {
  at: string | null;
  decision: string;
  reason?: string;
  text?: string;
  attempt?: number;
  why?: Record<string, unknown>;
  fields?: Record<string, unknown>;
}

/** A device of a node and the job that holds it. */
export interface DeviceRow {
  index: number;
  type: string;
  health: string;
  memory_bytes: number;
  job: string | null;
}

/** What marking a node does, or would do; `note` is what it takes back. */
export interface DrainPlan {
  api: "rota/v1";
  kind: "DrainPlan";
  node: string;
  action: string;
  dry_run: boolean;
  jobs: DrainRow[];
  state: string;
  note: string;
}

/** What becomes of a job on the node. */
export interface DrainRow {
  job: string;
  effect: string;
}

/** How far a drained node is: `safe` when it may be taken down. */
export interface DrainState {
  jobs_left: number;
  until: string | null;
  safe: boolean;
}

/** A node that the job was asked to leave: why, by when (`due_at`), and what came of it; `lost` is its work. */
export interface DrainedRow {
  at: string | null;
  attempt: number;
  node: string;
  due_at: string | null;
  why: string;
  outcome: "waits" | "moved" | "queued" | "withdrawn" | "ended";
  ended_at: string | null;
  lost: string;
  text: string;
}

/** When the job would start. */
export interface DryRunEstimate {
  p10: string | null;
  p50: string | null;
  p90: string | null;
  basis: string;
}

/** What the scheduler says of a job that was not submitted. */
export interface DryRunExplanation {
  job: string;
  state: string;
  starts_now: boolean;
  why: Why | null;
  tally: TallyRow[];
  ahead: Ahead;
  would_start_now_with: StartChange[];
  victims_if_preempted: VictimRow[];
  estimate: DryRunEstimate | null;
  since: string;
  decisions: (Record<string, unknown>)[];
}

/** An edge as it was declared. */
export interface EdgeRow {
  source: string;
  target: string;
  kind: string;
}

/** An edit with the spec before and after it. */
export interface EditRow {
  at: string | null;
  by: string;
  before: Record<string, unknown>;
  after: Record<string, unknown>;
}

/** When a job would start; `age_s` is how long ago that was played. */
export interface EstimateDocument {
  p10: string | null;
  p50: string | null;
  p90: string | null;
  basis: string;
  age_s: number | null;
}

/** A page of events; `last` is the number of the last record that was looked at. */
export interface EventList {
  api: "rota/v1";
  kind: "EventList";
  job: string | null;
  items: EventRecord[];
  next: number | null;
  last: number;
}

/** One event: these fields, and those of its kind for whoever may read the job. */
export interface EventRecord {
  number: number;
  job: string | null;
  seq: number;
  at: string;
  kind: string;
  [field: string]: unknown;
}

/** Why a job is where it is, and what would let it start now. */
export interface Explanation {
  api: "rota/v1";
  kind: "Explanation";
  job: string;
  state: JobStateName;
  since: string | null;
  phase: string;
  waiting: boolean;
  queue: QueueUse;
  why: Why | null;
  tally: TallyRow[];
  ahead: Ahead;
  would_start_now_with: StartChange[];
  victims_if_preempted: VictimRow[];
  estimate: EstimateDocument | null;
  starts_now: boolean;
  blocked_by: Blocker[];
  placement: PlacedOn | null;
  plans: RolePlan[];
  decisions: Decision[];
  see: string;
}

/** The failure timeline; `open_losses` no recovery has begun for, `drains` cost work and are no failures. */
export interface FailureList {
  api: "rota/v1";
  kind: "FailureList";
  job: string;
  state: JobStateName;
  first: LossRow | null;
  items: FailureRow[];
  end: JobEnd | null;
  open_losses: LossRow[];
  masters: ReplacedMaster[];
  drains: DrainedRow[];
  next: null;
}

/** One recovery: cause, level, what was restored, and how long it took until all were ready again (`seconds`). `healed`: a commit, the time that the job ran on, or its success has proved it. */
export interface FailureRow {
  n: number;
  failover: number | null;
  attempt: number;
  level: string;
  moved_from: string | null;
  move_reason: string | null;
  reason: string;
  fault: string;
  text: string;
  role: string;
  rank: number;
  instance: string;
  traceback: string;
  scope: ScopeRow[];
  restore: number;
  restored_from: string;
  lost_commits: number;
  seen_at: string | null;
  decided_at: string | null;
  ended_at: string | null;
  detect_to_decide_s: number;
  seconds: number | null;
  joined_by: number | null;
  healed: boolean;
  losses: LossRow[];
}

/** The devices of a gang. */
export interface GrantRow {
  gang: string;
  bundles: BundleRow[];
}

/** The devices of a whole job. */
export interface GrantedPlacement {
  gangs: GrantRow[];
}

/** A role on a queue and all below it; `""` is the root. */
export interface GrantedRole {
  queue: string;
  role: string;
}

/** Roles, edges and sub-graphs; `job` is null for a job file that was not submitted. */
export interface GraphDocument {
  api: "rota/v1";
  kind: "Graph";
  job: string | null;
  name: string;
  roles: GraphRole[];
  edges: EdgeRow[];
  streams: GraphStream[];
  subgraphs: string[][];
  units: string[][];
  order: string[];
  observed: ObservedEdge[];
}

/** A role in the graph; `states` has one entry an instance. */
export interface GraphRole {
  name: string;
  replicas: number;
  replicas_max: number;
  loop: boolean;
  stateful: boolean;
  restart: string;
  mesh: Record<string, number>;
  blast_radius: string;
  states: string[];
}

/** A stream, with its ledger at the last commit. */
export interface GraphStream {
  name: string;
  cap: number;
  source: string | null;
  seen: StreamRow | null;
}

/** Every node with the holder of each device. */
export interface Heat {
  api: "rota/v1";
  kind: "Heat";
  jobs: string[];
  items: HeatNode[];
}

/** `held` has for each device the place of its job in `jobs`, or null; `bad` are places of bad devices. */
export interface HeatNode {
  id: string;
  cells: string[];
  state: string;
  held: (number | null)[];
  bad: number[];
}

/** One instance: `error` is the last loss, `progress` the last report to the master. `ports`: where the page opens each of its ports, by name. */
export interface InstanceRow {
  instance: string;
  role: string;
  rank: number;
  state: string;
  since: string | null;
  node: string;
  pid: number | null;
  epoch: number;
  standby: boolean;
  restarts: number;
  devices: number[];
  restored: number;
  progress: ProgressReport | null;
  ports: Record<string, string>;
  error: LossFields | null;
}

/** One job with every instance; `output` is the folder of what it leaves, `url` its page. `output_url` is where that folder is copied when the job ends, empty for nowhere; `upload` how that went. `restored_at` is when it came from a back-up in which it had not ended, None where it did not. */
export interface JobDocument {
  id: string;
  uid: string;
  name: string;
  user: string;
  queue: string;
  priority: number;
  state: JobStateName;
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
  suspected: string;
  api: "rota/v1";
  kind: "Job";
  roles: RoleRow[];
  instances: InstanceRow[];
  streams: StreamRow[];
  master: MasterRow | null;
  attempts: AttemptRow[];
  error: JobError | null;
  changes: ChangeRow[];
  workdir: string;
  filename: string;
  version: number;
  seq: number;
  events: number;
  output: string;
  output_url: string;
  checkpoints: string;
  upload: UploadFields | null;
  restored_at: string | null;
  url: string;
}

/** The failure that ended a job. */
export interface JobEnd {
  at: string | null;
  reason: string;
  fault: string;
  text: string;
  role: string | null;
  rank: number | null;
  instance: string;
  traceback: string;
}

/** Why a job failed, and whose failure ended it. */
export interface JobError {
  reason: string;
  fault: string;
  text: string;
  role: string | null;
  rank: number | null;
  instance: string;
  traceback: string;
}

/** A page of jobs; `next` is the cursor of the following one. */
export interface JobList {
  api: "rota/v1";
  kind: "JobList";
  items: JobRow[];
  next: string | null;
}

/** One row of a list of jobs. `suspected` says why a running job may hang, with the instance that holds it up. */
export interface JobRow {
  id: string;
  uid: string;
  name: string;
  user: string;
  queue: string;
  priority: number;
  state: JobStateName;
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
  suspected: string;
}

/** A job as it was given and as it was understood. */
export interface JobSpecDocument {
  api: "rota/v1";
  kind: "JobSpec";
  job: string;
  source: string;
  filename: string;
  digest: string;
  spec: Record<string, unknown>;
  edits: EditRow[];
}

export type JobStateName = "SUBMITTED" | "QUEUED" | "ADMITTED" | "CHECKING" | "STARTING" | "RUNNING" | "RECOVERING" | "RESIZING" | "PREEMPTING" | "PAUSED" | "STOPPING" | "SUCCEEDED" | "FAILED" | "CANCELLED";

/** One line that an instance printed; `ts` is null for what came without a time. `node` is the machine that keeps the line, empty for that of the service; `offset` counts in its file there. */
export interface LogLine {
  kind: "LogLine";
  instance: string;
  node: string;
  attempt: number;
  epoch: number;
  offset: number;
  ts: string | null;
  stream: string;
  text: string;
}

/** A page of log lines; `next` is the cursor of the following one. `notices` say which machines do not answer, and what was known of the lines that lie there. */
export interface LogPage {
  api: "rota/v1";
  kind: "LogPage";
  job: string;
  items: LogLine[];
  next: string;
  ended: boolean;
  notices: string[];
}

/** How an instance was lost, and when that was reported. */
export interface LossFields {
  at: string | null;
  reason: string;
  text: string;
  traceback: string;
  exit_code: number | null;
  signal: number | null;
  epoch: number;
}

/** A lost instance; `process_alive`: its code raised and the process is still there. */
export interface LossRow {
  instance: string;
  at: string | null;
  reason: string;
  text: string;
  traceback: string;
  exit_code: number | null;
  signal: number | null;
  epoch: number;
  process_alive: boolean;
}

/** The master of a job. */
export interface MasterRow {
  pid: number;
  epoch: number;
  node: string;
  since: string | null;
}

/** Nodes by id; `next` is the cursor of the following page. */
export interface NodeList {
  api: "rota/v1";
  kind: "NodeList";
  items: NodeRow[];
  next: string | null;
}

/** A node with its devices, who holds them, and its fitness. */
export interface NodeRow {
  id: string;
  host: string;
  state: string;
  drain: DrainState | null;
  cells: string[];
  labels: Record<string, string>;
  cpus: number;
  cpus_used: number;
  memory_bytes: number;
  gpus: number;
  gpus_used: number;
  devices: DeviceRow[];
  jobs: string[];
  joined_at: string | null;
  marked_at: string | null;
  marked_by: string;
  text: string;
}

/** Who really called whom since the processes began: `bytes` both ways, about. */
export interface ObservedEdge {
  source: string;
  target: string;
  kind: string;
  what: string;
  n: number;
  failed: number;
  waited_s: number;
  bytes: number;
}

/** What would become of the live jobs under other profiles. */
export interface Outlook {
  api: "rota/v1";
  kind: "Outlook";
  profiles: string[];
  basis: string;
  summary: Record<string, OutlookFigures>;
  items: OutlookJob[];
}

/** What one profile makes of the live jobs. */
export interface OutlookFigures {
  jobs: number;
  started: number;
  finished: number;
  wait_s: Quantiles;
  jct_s: Quantiles;
  makespan_s: number;
  utilisation: number | null;
  preemptions: number;
}

/** When a job would start and end under each profile, in seconds from now; null: not within the horizon. */
export interface OutlookJob {
  job: string;
  queue: string;
  gpus: number;
  state: string;
  starts_s: Record<string, number | null>;
  ends_s: Record<string, number | null>;
  preemptions: Record<string, number>;
}

/** Cells that a queue owns, of a level. */
export interface OwnedCellsDocument {
  level: string;
  count: number;
  gpu_type: string | null;
}

/** A mistake in a job file or request, and where it is; `line` and `col` count from 1. */
export interface Place {
  loc: string;
  line: number;
  col: number;
  message: string;
  hint: string;
  code: string;
  file: string;
  source: string;
}

/** Where a job runs, and why there. */
export interface PlacedOn {
  nodes: string[];
  why: Record<string, unknown>;
}

/** Which devices each instance has, in the present or last attempt. */
export interface PlacementDocument {
  api: "rota/v1";
  kind: "Placement";
  job: string;
  attempt: number;
  why: Record<string, unknown> | null;
  items: PlacementRow[];
  next: null;
}

/** Devices of a node that one instance has. */
export interface PlacementRow {
  instance: string;
  index: number;
  node: string;
  host: string;
  devices: number[];
  res: Resources;
}

/** What submitting a job would do. */
export interface PlanReport {
  api: "rota/v1";
  kind: "PlanReport";
  name: string;
  digest: string;
  feasible: boolean;
  starts_now: boolean;
  why: Why | null;
  explanation: DryRunExplanation;
  notes: string[];
  roles: PlannedRole[];
  gangs: (Record<string, unknown>)[];
  subgraphs: string[][];
  placement: GrantedPlacement | null;
  spec: Record<string, unknown>;
}

/** A role as a dry run shows it; `fixed_size` says why it cannot grow. */
export interface PlannedRole {
  name: string;
  workload: string | null;
  run: string[] | null;
  replicas: number;
  replicas_max: number;
  fixed_size: string;
  resources: Resources;
  restart: string;
  stateful: boolean;
  loop: boolean;
  plans: SizedPlanRow[];
  blast_radius: BlastRadius;
}

/** Every scheduling profile. */
export interface ProfileList {
  api: "rota/v1";
  kind: "ProfileList";
  items: ProfileRow[];
  next: null;
}

/** A scheduling profile with the sentence of its policy. */
export interface ProfileRow {
  name: string;
  text: string;
}

/** The last commit of a job, with the metrics that its loop gave; `commits` are those that it can resume from. */
export interface Progress {
  commit: number;
  commits: number[];
  at: string | null;
  metrics: Record<string, unknown>;
}

/** What an instance last reported to its master. */
export interface ProgressReport {
  n: number;
  unit: string;
  idle_s: number;
  beat_age_s: number;
  busy: string[];
  quiet: string;
  waits_for: string[];
  step_s: number;
  cpus: number;
  rss_bytes: number;
  weights: WeightsRow[];
}

/** Mean, quantiles and maximum; null without values. */
export interface Quantiles {
  mean: number | null;
  p50: number | null;
  p95: number | null;
  p99: number | null;
  max: number | null;
}

/** A queue with its guarantee, use and waiting jobs. */
export interface QueueRow {
  path: string;
  guaranteed: Resources | null;
  cells: OwnedCellsDocument[];
  pinned: string[];
  limit: Resources | null;
  user_limit: Resources | null;
  min_user_percent: number | null;
  user_limit_factor: number | null;
  weight: number;
  priority: number;
  preemptible: boolean;
  state: string;
  run_as: string | null;
  parent: string | null;
  used_gpus: number;
  used_cpus: number;
  guaranteed_gpus: number | null;
  limit_gpus: number | null;
  borrowed_gpus: number;
  running_jobs: number;
  pending_jobs: number;
  pending_gpus: number;
  oldest_wait_since: string | null;
}

/** Every queue, parents first; `version` counts the trees that were applied, `by` whom and `at` when. */
export interface QueueTree {
  api: "rota/v1";
  kind: "QueueTree";
  version: number;
  by: string;
  at: string | null;
  items: QueueRow[];
  next: null;
}

/** Devices and cores that the queue of a job uses, promises and allows; null is not stated. */
export interface QueueUse {
  path: string;
  used: number;
  used_cpus: number;
  guaranteed: number | null;
  limit: number | null;
  guaranteed_cpus: number | null;
  limit_cpus: number | null;
}

/** Every reason. */
export interface ReasonList {
  api: "rota/v1";
  kind: "ReasonList";
  items: ReasonRow[];
  next: null;
}

/** A reason: its family, whose fault it is, its sentence, and the state that it ends a job in. */
export interface ReasonRow {
  code: string;
  family: string;
  fault: string;
  text: string;
  ends_in: string | null;
}

/** A master of the job that was replaced: that costs the job nothing. */
export interface ReplacedMaster {
  pid: number;
  text: string;
  at: string | null;
}

/** What one instance asks for, or a queue promises: memory in bytes. */
export interface Resources {
  cpus: number;
  gpus: number;
  gpu_type: string | null;
  memory_bytes: number;
}

/** The parallel plan of a role; `placed` says where the one that runs lies, and why not another size. */
export interface RolePlan {
  replicas: number;
  why: string;
  step_s: number;
  role: string;
  current: boolean;
  placed: string;
}

/** One role of a job: `replicas` are wanted now, `ready` are there. */
export interface RoleRow {
  name: string;
  workload: string | null;
  run: string[] | null;
  replicas: number;
  ready: number;
  restarts: number;
  resources: Resources;
  restart: string;
  loop: boolean;
  plans: SizedPlanRow[];
}

/** An instance that a recovery touches, with its new epoch. */
export interface ScopeRow {
  instance: string;
  epoch: number;
}

/** The names of one's secrets. */
export interface SecretList {
  api: "rota/v1";
  kind: "SecretList";
  items: SecretRow[];
  next: null;
}

/** The name of a secret; no answer has its value. */
export interface SecretRow {
  name: string;
}

/** The parallel plan of a role for one number of instances; `step_s` predicted, 0 unknown. */
export interface SizedPlanRow {
  replicas: number;
  why: string;
  step_s: number;
}

/** An instance that takes `factor` times as long for a step as its role. */
export interface SlowRow {
  instance: string;
  factor: number;
}

/** A change that would let the job start now; `change` is `{set, value}`, `victims` are stopped for it. */
export interface StartChange {
  change: Record<string, unknown>;
  text: string;
  cost: string;
  victims?: string[];
}

/** Whether a job starts now; else what binds it, what is before it, and when it would start. */
export interface StartForecast {
  starts_now: boolean;
  why: Why | null;
  ahead: Ahead;
  victims_if_preempted: VictimRow[];
  estimate: EstimateDocument | null;
}

/** An instance that is neither ready nor gone. */
export interface StartingRow {
  instance: string;
  state: string;
  since: string | null;
}

/** The service and its parts; `stores` are named URLs for jobs, `warnings` name what is not well. */
export interface StatusDocument {
  api: "rota/v1";
  kind: "Status";
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
  cluster: ClusterTotals;
  stores: Record<string, string>;
  warnings: string[];
}

/** The ledger of a stream: `admitted = pending + leased + queued + trained + dropped`. */
export interface StreamRow {
  name: string;
  admitted: number;
  pending: number;
  leased: number;
  queued: number;
  trained: number;
  dropped: Record<string, number>;
  again: number;
  age: number;
}

/** Nodes left after one constraint. */
export interface TallyRow {
  constraint: string;
  nodes_left: number;
}

/** The jobs to begin with. */
export interface TemplateList {
  api: "rota/v1";
  kind: "TemplateList";
  items: TemplateRow[];
  next: null;
}

/** A job to begin with, and its files. */
export interface TemplateRow {
  name: string;
  text: string;
  files: Record<string, string>;
}

/** One token; `token`, its value, is in the answer that makes it and in no other. */
export interface TokenDocument {
  id: string;
  user: string;
  name: string;
  role: string;
  grants: GrantedRole[];
  queue: string;
  made_at: string;
  made_by: string;
  expires_at: string | null;
  revoked: boolean;
  api: "rota/v1";
  kind: "Token";
  token?: string;
  url?: string;
}

/** The valid tokens. */
export interface TokenList {
  api: "rota/v1";
  kind: "TokenList";
  items: TokenRow[];
  next: null;
}

/** A token, never its value; `role` is the highest of `grants`, what it lets its holder do now. */
export interface TokenRow {
  id: string;
  user: string;
  name: string;
  role: string;
  grants: GrantedRole[];
  queue: string;
  made_at: string;
  made_by: string;
  expires_at: string | null;
  revoked: boolean;
}

/** A copy of the output folder at its URL; `error` says why there is none, `notes` what is not as it was. */
export interface UploadFields {
  url: string;
  files: number;
  bytes: number;
  seconds: number;
  error: string;
  notes: string[];
}

/** Use of the cluster over the last while, in equal steps; `gpus` are those there are now. */
export interface UsageHistory {
  api: "rota/v1";
  kind: "UsageHistory";
  gpus: number;
  step_s: number;
  items: UsageMoment[];
  next: null;
}

/** Means over one step of time: devices held, jobs that had devices, jobs that waited for some. */
export interface UsageMoment {
  at: string | null;
  gpus_used: number;
  running: number;
  waiting: number;
}

/** One user. `by` is how the caller proved who it is; `jobs` cannot start again without their secrets. `live` are the jobs of a removed user that have not ended. */
export interface UserDocument {
  api: "rota/v1";
  kind: "User";
  by?: string;
  name: string;
  grants: GrantedRole[];
  jobs?: string[];
  live?: string[];
}

/** Every user. */
export interface UserList {
  api: "rota/v1";
  kind: "UserList";
  items: UserRow[];
  next: null;
}

/** A user and what it may do. */
export interface UserRow {
  name: string;
  grants: GrantedRole[];
}

/** An instance, or something that an instance waits for. */
export interface VertexRow {
  name: string;
  limit_s: number;
  still_s: number;
  silent_s: number;
  excuse: string;
  doing: string;
  stuck: boolean;
  state: string;
}

/** A job that would be stopped, and the device seconds that it would lose. */
export interface VictimRow {
  job: string;
  lost_gpu_s?: number | null;
}

/** Who waits for whom in a job; `live`: its master answered. */
export interface WaitGraphDocument {
  api: "rota/v1";
  kind: "WaitGraph";
  job: string;
  state: JobStateName;
  live: boolean;
  culprits: WaitRoot[];
  suspects: WaitRoot[];
  waits: WaitRow[];
  slow: SlowRow[];
  dropped: string[];
  vertices: VertexRow[];
  stacks: Record<string, string>;
  items: StartingRow[];
  cause: FailureRow | null;
  see: string;
  next: null;
}

/** Where waiting ends: one instance that makes no progress, or several that wait for each other. */
export interface WaitRoot {
  members: string[];
  deadlock: boolean;
  text: string;
  cycle: WaitRow[];
  waiters: string[];
}

/** `source` has waited for `target` for `age_s` seconds. */
export interface WaitRow {
  source: string;
  target: string;
  kind: string;
  what: string;
  age_s: number;
}

/** Every webhook. */
export interface WebhookList {
  api: "rota/v1";
  kind: "WebhookList";
  items: WebhookRow[];
  next: null;
}

/** A webhook: which notices go to which address, without its password. */
export interface WebhookRow {
  id: string;
  url: string;
  on: string[];
  queue: string;
  by: string;
}

/** What an instance holds of a weights edge: `behind` in versions, `behind_s` in seconds. */
export interface WeightsRow {
  edge: string;
  state: string;
  held: number | null;
  behind: number | null;
  behind_s: number | null;
}

/** When a job that waits starts as it is (`now`), and when it would with `changes` (`then`); none is made. */
export interface WhatIf {
  api: "rota/v1";
  kind: "WhatIf";
  job: string;
  changes: string[];
  now: StartForecast;
  then: StartForecast;
}

/** A reason code, its sentence, and the values that go with it. */
export interface Why {
  code: string;
  text: string;
  fields: Record<string, unknown>;
}
