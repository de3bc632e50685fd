"""Nodes, queues, usage, the service itself, and what would happen under other policies."""

from __future__ import annotations

from typing import Literal, NotRequired

from rota.service.models.base import Closed, Fields, Headed, Moment, Quantiles, Resources, Why
from rota.service.models.jobs import BundleRow, SizedPlanRow
from rota.service.models.reasons import Ahead, StartChange, TallyRow, VictimRow
from rota.spec.codec import JsonObject
from rota.spec.measured import DeviceUsage, DiskUsage, MachineFacts, NetworkUsage, PairFacts, ProcessUsage


class DeviceRow(Closed):
    """A device of a node and the job that holds it."""

    index: int
    type: str
    health: str
    memory_bytes: int
    job: str | None


class DrainState(Closed):
    """How far a drained node is: ``safe`` when it may be taken down."""

    jobs_left: int
    until: Moment | None
    safe: bool


class NodeRow(Closed):
    """A node with its devices, who holds them, and its fitness."""

    id: str
    host: str
    state: str
    drain: DrainState | None
    cells: list[str]
    labels: dict[str, str]
    cpus: float
    cpus_used: float
    memory_bytes: int
    gpus: int
    gpus_used: int
    devices: list[DeviceRow]
    jobs: list[str]
    joined_at: Moment | None
    marked_at: Moment | None
    marked_by: str
    text: str


class NodeDocument(NodeRow):
    """One node."""

    api: Literal["rota/v1"]
    kind: Literal["Node"]


class NodeList(Headed):
    """Nodes by id; ``next`` is the cursor of the following page."""

    kind: Literal["NodeList"]
    items: list[NodeRow]
    next: str | None


class NetworkRow(Closed, NetworkUsage):
    """An interface that is up; ``bits_per_s`` is 0 where its card does not say."""


class DiskRow(Closed, DiskUsage):
    """A file system of a machine, by the folder it is mounted on."""


class DeviceUsageRow(Closed, DeviceUsage):
    """A device as its driver measures it; ``busy`` from 0 to 1, null for what it does not say."""


class ProcessRow(Closed, ProcessUsage):
    """A process of a job on a machine: ``member`` is ``role/rank`` or ``master``."""


class NodeUsage(Headed):
    """What the machine of a node does, measured there over ``period_s``."""

    kind: Literal["NodeUsage"]
    node: str
    period_s: float
    cores: int
    cores_busy: float
    load: float
    memory_bytes: int
    memory_used_bytes: int
    shared_bytes: int
    shared_used_bytes: int
    network: list[NetworkRow]
    disks: list[DiskRow]
    devices: list[DeviceUsageRow]
    processes: list[ProcessRow]


class NodeFinding(Closed):
    """Something that is wrong between machines, and the command that repairs it."""

    name: str
    mark: str
    fact: str
    remedy: str


class CheckedNode(Closed, MachineFacts):
    """A machine of a check with its versions by package."""


class PairRow(Closed, PairFacts):
    """What one machine sees of another; null for what could not be measured."""


class NodeCheck(Headed):
    """A check of the machines and of each pair of them; ``mark`` is the worst of ``items``, or ``ok``."""

    kind: Literal["NodeCheck"]
    mark: str
    machines: list[CheckedNode]
    pairs: list[PairRow]
    items: list[NodeFinding]


class EngineAccessRow(Closed):
    """How to reach the engine: its id, the address of its control store, and the token that it asks for."""

    engine: str
    address: str
    token: str


class MachineDocument(Headed):
    """A machine that joined; ``state`` is ``joining`` until it is a node, whose state it then is.

    ``engine`` is the id of the engine that runs now, empty while none does; only the answer to a join has ``access``.
    """

    kind: Literal["Machine"]
    host: str
    state: str
    engine: str
    access: NotRequired[EngineAccessRow]


class HeatNode(Closed):
    """``held`` has for each device the place of its job in ``jobs``, or null; ``bad`` are places of bad devices."""

    id: str
    cells: list[str]
    state: str
    held: list[int | None]
    bad: list[int]


class Heat(Headed):
    """Every node with the holder of each device."""

    kind: Literal["Heat"]
    jobs: list[str]
    items: list[HeatNode]


class DrainRow(Closed):
    """What becomes of a job on the node."""

    job: str
    effect: str


class DrainPlan(Headed):
    """What marking a node does, or would do; ``note`` is what it takes back."""

    kind: Literal["DrainPlan"]
    node: str
    action: str
    dry_run: bool
    jobs: list[DrainRow]
    state: str
    note: str


class OwnedCellsDocument(Closed):
    """Cells that a queue owns, of a level."""

    level: str
    count: int
    gpu_type: str | None


class QueueFields(Closed):
    """A queue as it was declared."""

    path: str
    guaranteed: Resources | None
    cells: list[OwnedCellsDocument]
    pinned: list[str]
    limit: Resources | None
    user_limit: Resources | None
    min_user_percent: float | None
    user_limit_factor: float | None
    weight: float
    priority: int
    preemptible: bool
    state: str
    run_as: str | None


class QueueRow(QueueFields):
    """A queue with its guarantee, use and waiting jobs."""

    parent: str | None
    used_gpus: float
    used_cpus: float
    guaranteed_gpus: float | None
    limit_gpus: float | None
    borrowed_gpus: float
    running_jobs: int
    pending_jobs: int
    pending_gpus: float
    oldest_wait_since: Moment | None


class QueueDocument(QueueRow):
    """One queue."""

    api: Literal["rota/v1"]
    kind: Literal["Queue"]


class QueueTree(Headed):
    """Every queue, parents first; ``version`` counts the trees that were applied, ``by`` whom and ``at`` when."""

    kind: Literal["QueueTree"]
    version: int
    by: str
    at: Moment | None
    items: list[QueueRow]
    next: None


class LimitPassed(Closed):
    """A limit below what is in use."""

    queue: str
    user: str | None
    dim: str
    used: float
    limit: float
    text: str


class QueueChange(Closed):
    """A field of a queue before and after, in words."""

    queue: str
    field: str
    before: str
    after: str


class QueueDiff(Headed):
    """What replacing the queue tree changes; ``version``, ``by`` and ``at`` are of the tree that it replaces."""

    kind: Literal["QueueDiff"]
    version: int
    by: str
    at: Moment | None
    fields: list[QueueChange]
    dry_run: bool
    added: list[str]
    removed: list[str]
    changed: list[str]
    over: list[LimitPassed]


class ClusterTotals(Closed):
    """How many nodes, devices and jobs there are; ``jobs`` by state."""

    nodes: int
    nodes_bad: int
    gpus: int
    gpus_used: int
    jobs: dict[str, int]


class ClusterDocument(ClusterTotals):
    """The same as a document."""

    api: Literal["rota/v1"]
    kind: Literal["Cluster"]


class StatusDocument(Headed):
    """The service and its parts; ``stores`` are named URLs for jobs, ``warnings`` name what is not well."""

    kind: Literal["Status"]
    state: str
    version: str
    url: str
    pid: int
    started_at: Moment
    home: str
    install_epoch: int
    profile: str
    pretend: str | None
    parts: dict[str, JsonObject]
    cluster: ClusterTotals
    stores: dict[str, str]
    warnings: list[str]


class HoldDocument(Headed):
    """The service starts nothing for ``seconds``; ``jobs`` have not ended, by state."""

    kind: Literal["Hold"]
    jobs: dict[str, int]
    seconds: float


class SettingRow(Closed):
    """A setting with where its value came from."""

    name: str
    value: str | int | float
    origin: str


class SettingList(Headed):
    """Every setting of the service."""

    kind: Literal["SettingList"]
    items: list[SettingRow]
    next: None


class ReasonRow(Closed):
    """A reason: its family, whose fault it is, its sentence, and the state that it ends a job in."""

    code: str
    family: str
    fault: str
    text: str
    ends_in: str | None


class ReasonList(Headed):
    """Every reason."""

    kind: Literal["ReasonList"]
    items: list[ReasonRow]
    next: None


class UsageRow(Closed):
    """Use of one group; one of ``user``, ``queue``, ``job`` and ``gpu_type`` names it."""

    user: NotRequired[str]
    queue: NotRequired[str]
    job: NotRequired[str]
    gpu_type: NotRequired[str]
    jobs: int
    succeeded: int
    failed: int
    cancelled: int
    gpu_hours: float
    cpu_hours: float
    wait_s: Quantiles
    response_s: Quantiles
    restarts: int


class UsageTotal(Closed):
    """Use of all, and Jain's index of fairness between users."""

    gpu_hours: float
    fairness_jain: float | None


class UsageReport(Headed):
    """Who used what between two moments."""

    kind: Literal["Report"]
    by: str
    since: Moment | None
    until: Moment | None
    items: list[UsageRow]
    total: UsageTotal
    next: None


class UsageMoment(Closed):
    """Means over one step of time: devices held, jobs that had devices, jobs that waited for some."""

    at: Moment | None
    gpus_used: float
    running: float
    waiting: float


class UsageHistory(Headed):
    """Use of the cluster over the last while, in equal steps; ``gpus`` are those there are now."""

    kind: Literal["UsageHistory"]
    gpus: int
    step_s: float
    items: list[UsageMoment]
    next: None


class ProfileRow(Closed):
    """A scheduling profile with the sentence of its policy."""

    name: str
    text: str


class ProfileList(Headed):
    """Every scheduling profile."""

    kind: Literal["ProfileList"]
    items: list[ProfileRow]
    next: None


class OutlookFigures(Closed):
    """What one profile makes of the live jobs."""

    jobs: int
    started: int
    finished: int
    wait_s: Quantiles
    jct_s: Quantiles
    makespan_s: float
    utilisation: float | None
    preemptions: int


class OutlookJob(Closed):
    """When a job would start and end under each profile, in seconds from now; null: not within the horizon."""

    job: str
    queue: str
    gpus: float
    state: str
    starts_s: dict[str, float | None]
    ends_s: dict[str, float | None]
    preemptions: dict[str, int]


class Outlook(Headed):
    """What would become of the live jobs under other profiles."""

    kind: Literal["Outlook"]
    profiles: list[str]
    basis: str
    summary: dict[str, OutlookFigures]
    items: list[OutlookJob]


class TemplateRow(Closed):
    """A job to begin with, and its files."""

    name: str
    text: str
    files: dict[str, str]


class TemplateList(Headed):
    """The jobs to begin with."""

    kind: Literal["TemplateList"]
    items: list[TemplateRow]
    next: None


class DryRunEstimate(Closed):
    """When the job would start."""

    p10: Moment | None
    p50: Moment | None
    p90: Moment | None
    basis: str


class DryRunExplanation(Closed):
    """What the scheduler says of a job that was not submitted."""

    job: str
    state: str
    starts_now: bool
    why: Why | None
    tally: list[TallyRow]
    ahead: Ahead
    would_start_now_with: list[StartChange]
    victims_if_preempted: list[VictimRow]
    estimate: DryRunEstimate | None
    since: Moment
    decisions: list[Fields]


class BlastRadius(Closed):
    """What losing an instance of a role does."""

    text: str
    restarts: list[str]
    re_forms: list[str]
    pauses: list[str]


class PlannedRole(Closed):
    """A role as a dry run shows it; ``fixed_size`` says why it cannot grow."""

    name: str
    workload: str | None
    run: list[str] | None
    replicas: int
    replicas_max: int
    fixed_size: str
    resources: Resources
    restart: str
    stateful: bool
    loop: bool
    plans: list[SizedPlanRow]
    blast_radius: BlastRadius


class GrantRow(Closed):
    """The devices of a gang."""

    gang: str
    bundles: list[BundleRow]


class GrantedPlacement(Closed):
    """The devices of a whole job."""

    gangs: list[GrantRow]


class PlanReport(Headed):
    """What submitting a job would do."""

    kind: Literal["PlanReport"]
    name: str
    digest: str
    feasible: bool
    starts_now: bool
    why: Why | None
    explanation: DryRunExplanation
    notes: list[str]
    roles: list[PlannedRole]
    gangs: list[JsonObject]
    subgraphs: list[list[str]]
    placement: GrantedPlacement | None
    spec: JsonObject


class AlertRow(Closed):
    """One alert of a job, a node, a queue or the disk; ``hint`` is the command that shows more."""

    id: str
    code: str
    severity: Literal["critical", "warning", "info"]
    since: Moment | None
    text: str
    job: str | None
    node: str | None
    hint: str
    acknowledged_by: str
    acknowledged_at: Moment | None
    note: str


class AlertList(Headed):
    """The present alerts: those without an acknowledgement first, then by severity."""

    kind: Literal["AlertList"]
    items: list[AlertRow]
    next: None
