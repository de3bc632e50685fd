"""Why a job is where it is: explanations, failures, who waits for whom."""

from __future__ import annotations

from typing import Literal, NotRequired

from rota.service.models.base import Closed, Fields, Headed, Member, Moment, Timed, Why
from rota.service.models.jobs import JobError, JobStateName, LossFields, SizedPlanRow
from rota.spec.codec import JsonObject


class QueueUse(Closed):
    """Devices and cores that the queue of a job uses, promises and allows; null is not stated."""

    path: str
    used: float
    used_cpus: float
    guaranteed: float | None
    limit: float | None
    guaranteed_cpus: float | None
    limit_cpus: float | None


class TallyRow(Closed):
    """Nodes left after one constraint."""

    constraint: str
    nodes_left: int


class Ahead(Closed):
    """What is before a job in the order of its queue."""

    jobs: int
    gpus: float


class StartChange(Closed):
    """A change that would let the job start now; ``change`` is ``{set, value}``, ``victims`` are stopped for it."""

    change: JsonObject
    text: str
    cost: str
    victims: NotRequired[list[str]]


class VictimRow(Closed):
    """A job that would be stopped, and the device seconds that it would lose."""

    job: str
    lost_gpu_s: NotRequired[float | None]


class EstimateDocument(Closed):
    """When a job would start; ``age_s`` is how long ago that was played."""

    p10: Moment | None
    p50: Moment | None
    p90: Moment | None
    basis: str
    age_s: float | None


class Blocker(Closed):
    """A job that holds devices, and its latest end: by its time limit, or by its grace if it is stopping."""

    job: str
    gpus: float
    cpus: float
    ends: Moment | None
    basis: Literal["time_limit", "stopping", "unknown"]


class PlacedOn(Closed):
    """Where a job runs, and why there."""

    nodes: list[str]
    why: Fields


class RolePlan(SizedPlanRow):
    """The parallel plan of a role; ``placed`` says where the one that runs lies, and why not another size."""

    role: str
    current: bool
    placed: str


class Decision(Closed):
    """One decision of the scheduler about the job."""

    at: Moment | None
    decision: str
    reason: NotRequired[str]
    text: NotRequired[str]
    attempt: NotRequired[int]
    why: NotRequired[Fields]
    fields: NotRequired[Fields]


class Explanation(Headed):
    """Why a job is where it is, and what would let it start now."""

    kind: Literal["Explanation"]
    job: str
    state: JobStateName
    since: Moment | None
    phase: str
    waiting: bool
    queue: QueueUse
    why: Why | None
    tally: list[TallyRow]
    ahead: Ahead
    would_start_now_with: list[StartChange]
    victims_if_preempted: list[VictimRow]
    estimate: EstimateDocument | None
    starts_now: bool
    blocked_by: list[Blocker]
    placement: PlacedOn | None
    plans: list[RolePlan]
    decisions: list[Decision]
    see: str


class StartForecast(Closed):
    """Whether a job starts now; else what binds it, what is before it, and when it would start."""

    starts_now: bool
    why: Why | None
    ahead: Ahead
    victims_if_preempted: list[VictimRow]
    estimate: EstimateDocument | None


class WhatIf(Headed):
    """When a job that waits starts as it is (``now``), and when it would with ``changes`` (``then``); none is made."""

    kind: Literal["WhatIf"]
    job: str
    changes: list[str]
    now: StartForecast
    then: StartForecast


class LossRow(Member, LossFields):
    """A lost instance; ``process_alive``: its code raised and the process is still there."""

    process_alive: bool


class ScopeRow(Member):
    """An instance that a recovery touches, with its new epoch."""

    epoch: int


class FailureRow(Closed):
    """One recovery: cause, level, what was restored, and how long it took until all were ready again (``seconds``).

    ``healed``: a commit, the time that the job ran on, or its success has proved it.
    """

    n: int
    failover: int | None
    attempt: int
    level: str
    moved_from: str | None
    move_reason: str | None
    reason: str
    fault: str
    text: str
    role: str
    rank: int
    instance: str
    traceback: str
    scope: list[ScopeRow]
    restore: int
    restored_from: str
    lost_commits: int
    seen_at: Moment | None
    decided_at: Moment | None
    ended_at: Moment | None
    detect_to_decide_s: float
    seconds: float | None
    joined_by: int | None
    healed: bool
    losses: list[LossRow]


class JobEnd(Timed, JobError):
    """The failure that ended a job."""


class ReplacedMaster(Closed):
    """A master of the job that was replaced: that costs the job nothing."""

    pid: int
    text: str
    at: Moment | None


class DrainedRow(Closed):
    """A node that the job was asked to leave: why, by when (``due_at``), and what came of it; ``lost`` is its work."""

    at: Moment | None
    attempt: int
    node: str
    due_at: Moment | None
    why: str
    outcome: Literal["waits", "moved", "queued", "withdrawn", "ended"]
    ended_at: Moment | None
    lost: str
    text: str


class FailureList(Headed):
    """The failure timeline; ``open_losses`` no recovery has begun for, ``drains`` cost work and are no failures."""

    kind: Literal["FailureList"]
    job: str
    state: JobStateName
    first: LossRow | None
    items: list[FailureRow]
    end: JobEnd | None
    open_losses: list[LossRow]
    masters: list[ReplacedMaster]
    drains: list[DrainedRow]
    next: None


class WaitRow(Closed):
    """``source`` has waited for ``target`` for ``age_s`` seconds."""

    source: str
    target: str
    kind: str
    what: str
    age_s: float


class WaitRoot(Closed):
    """Where waiting ends: one instance that makes no progress, or several that wait for each other."""

    members: list[str]
    deadlock: bool
    text: str
    cycle: list[WaitRow]
    waiters: list[str]


class VertexRow(Closed):
    """An instance, or something that an instance waits for."""

    name: str
    limit_s: float
    still_s: float
    silent_s: float
    excuse: str
    doing: str
    stuck: bool
    state: str


class SlowRow(Closed):
    """An instance that takes ``factor`` times as long for a step as its role."""

    instance: str
    factor: float


class StartingRow(Closed):
    """An instance that is neither ready nor gone."""

    instance: str
    state: str
    since: Moment | None


class WaitGraphDocument(Headed):
    """Who waits for whom in a job; ``live``: its master answered."""

    kind: Literal["WaitGraph"]
    job: str
    state: JobStateName
    live: bool
    culprits: list[WaitRoot]
    suspects: list[WaitRoot]
    waits: list[WaitRow]
    slow: list[SlowRow]
    dropped: list[str]
    vertices: list[VertexRow]
    stacks: dict[str, str]
    items: list[StartingRow]
    cause: FailureRow | None
    see: str
    next: None
