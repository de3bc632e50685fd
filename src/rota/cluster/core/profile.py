"""Profile of a policy: its plug-ins, and the decisions that come out of a pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rota.cluster.core.jobs import Allocations, Choice, LiveJob, Wait
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId
from rota.spec.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Start a job on exactly these devices, as one of its choices. ``why`` has the numbers behind the decision."""

    job: JobId
    held: Allocations
    choice: Choice | None = None
    why: dict[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """Ask a job for its devices back on behalf of another; ``to`` is where it could continue at once, if anywhere."""

    job: JobId
    for_job: JobId
    reason: Reason
    grace_s: float
    lost_gpu_s: float = 0.0
    to: Allocations = ()
    undone: tuple[str, str] | None = None
    """Kinds of jobs that are not to share devices again, as they did not gain by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Let a running job use these slots from now on, without a stop: its own, and idle ones that no job waits for."""

    job: JobId
    held: Allocations


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitOn:
    """The job was tried and cannot start now."""

    job: JobId
    wait: Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Decide again at this time even if nothing happens until then."""

    at: float


Decision = Admit | Preempt | Resize | WaitOn | WakeAt


Rank = tuple[float, ...]
"""Place of a waiting job among others; compared element by element."""


class QueueOrder(Protocol):
    """In which order waiting jobs are tried; the lowest rank first, equal ranks by queue time and id.

    A rank may depend on what is used now, and may only rise when another job starts. Inside a line of equal jobs the
    longest queued is first, unless ``by_job`` says that every job has a rank of its own.
    """

    @property
    def by_job(self) -> bool:
        """True when jobs of one line differ in rank; that of a waiting job then follows from its row alone."""
        ...

    def rank(self, state: State, row: LiveJob, now: float) -> Rank:
        """The rank of a waiting job."""
        ...


class Division(Protocol):
    """Decides whether the queue of a job may use more resources now."""

    def verdict(self, state: State, row: LiveJob) -> Wait | None:
        """Why the queue of a job may not start it now, or None."""
        ...


Objective = Literal["finish", "goodput"]
"""What a shape is chosen by: the least time of the job, or the least device-seconds of a step."""


class Placer(Protocol):
    """Where a job goes."""

    def place(self, state: State, txn: Txn, row: LiveJob) -> Allocations | None:
        """A holding for every slot, or None; the state is as before either way."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """One job to stop, why, the device-seconds of work that are lost with it, and where it could continue at once."""

    job: JobId
    reason: Reason
    lost_gpu_s: float
    to: Allocations = ()


class Victims(Protocol):
    """Whom to stop so that a job fits."""

    def victims(self, state: State, txn: Txn, row: LiveJob, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        """A set that makes room, smallest cost first found, or None; the state is as before either way.

        Jobs that are stopping have let go in the state that it sees.
        """
        ...


class SharedDevices(Protocol):
    """Devices that running jobs share, or are lent while no job waits for them."""

    def has_pairs(self, state: State) -> bool:
        """Whether some jobs share devices, so that passes are made while no job waits."""
        ...

    def separate(self, state: State, now: float) -> list[Resize | Preempt]:
        """Jobs that get their devices whole again, and jobs that are stopped because sharing does not pay."""
        ...

    def give_back(self, state: State, txn: Txn, row: LiveJob, placer: Placer) -> dict[JobId, Allocations]:
        """What jobs keep that give lent slots back so that a waiting one fits; empty if it would not fit."""
        ...

    def join(self, state: State, row: LiveJob) -> tuple[JobId, Allocations, Allocations] | None:
        """A running job with which a waiting one can share all devices, and what both hold then."""
        ...

    def lend(self, state: State, txn: Txn, placer: Placer) -> dict[JobId, Allocations]:
        """What jobs hold that get idle devices."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One plug-in of each kind. ``block`` says what the first job that does not fit holds up behind it."""

    name: str
    order: QueueOrder
    division: Division
    placer: Placer
    victims: Victims | None = None
    stops: Callable[[State, LiveJob], bool] | None = None
    """A cheap test before ``victims``: False where no job could be stopped for this one, whatever else is released."""
    block: Literal["none", "queue", "reserve"] = "none"
    candidates_max: int = 200
    """Different kinds of request tried in one pass; equal ones share a verdict."""
    victim_sets_max: int = 1000
    """Jobs for which others are stopped in one pass; the next pass, at once, continues."""
    vain_max: int = 1000
    """Jobs of a pass for which preemption is tried and does not help; the next pass, at once, continues after them."""
    spares: int = 0
    """Nodes kept free for jobs that lose some; opportunistic work may use them meanwhile."""
    grace_max_s: float = 300.0
    cool_down_s: float = 0.0
    """How long a job that was preempted waits at least before it is tried again."""
    local: bool = False
    """What a guaranteed job may get depends on its own queue alone."""
    starve_s: float = math.inf
    """Age bound: for the first job of a queue that waited this long others of no higher priority keep devices free."""
    promises: bool = False
    """Whether a promise to a queue comes before the age bound."""
    prepare: Callable[[State], None] | None = None
    """Called before every pass, for policies that keep books of their own."""
    round_s: float = 0.0
    """With it a pass is made at every multiple as long as jobs wait beside running ones."""
    objective: Objective = "goodput"
    """What decides among the shapes that a job may have."""
    sharing: SharedDevices | None = None
    """None: a device is of one job, and a running job has what it asked for."""
    starts: bool = True
    """False: jobs are only stopped and moved; what is idle is left alone."""
    remember: bool = True
    """True: refusals are cached until resources are released. False where they also depend on other waiting jobs."""
