"""JobContext: everything the master knows about its job, rebuilt by replaying the events of the job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as dataclass_replace
from typing import Literal, TypeVar

from rota.job.core.graph import Graph, expand
from rota.job.core.placement import bindings
from rota.spec import codec
from rota.spec.codec import JsonObject
from rota.spec.gang import BundleGrant, Placement
from rota.spec.ids import NO_EPOCH, Epoch, GangId, InstanceId, JobId, NodeId, RoleName
from rota.spec.job import JobSpec, RoleSpec
from rota.spec.reasons import Reason
from rota.spec.states import AskState, GangState, InstanceState, JobState, Level

CONTEXT_VERSION = 9
"""Of a kept context. It rises with a change of what is kept, or of what an event means: one of another version is not
read, the log is replayed from its first record."""
START_TIMEOUT_S, START_MAX_S = 300.0, 3600.0
"""Limits of a start or recovery, in seconds: without progress, and in total."""
DIAGNOSE_S = 2.0
"""How long losses that look like consequences of another one wait for it."""
NODE_WAIT_S = 300.0
"""Longest wait for another node in place of a lost one; then the whole job goes through the queue."""
ASK_WAIT_S = 5.0
"""Longest wait for the answer that lets a world begin with more than its fewest members."""
PLATFORM_FAULTS_MAX, PLATFORM_WINDOW_S = 10, 3600.0
"""Faults of the platform (see ``diagnosis.by_platform``) that a job takes within the window and without a commit in
between: as many restarts of the whole job, and as many narrower recoveries. They cost no ``limit`` and no ``retry``."""
FAILED_GRACE_S = 2.0
"""Polite part of stopping what is left of a job that failed."""
FAILOVERS_KEPT_MAX = 200
"""Records of recoveries kept for people; the log has all of them."""

NAMED_MAX = 5
"""Instances that a reason names."""

NO_NODE_ID = NodeId("")

Bindings = Mapping[InstanceId, tuple[GangId, BundleGrant]]
Phase = Literal["commit", "save", "stop"]


T = TypeVar("T")


def replace(value: T, /, **changes: object) -> T:
    """``dataclasses.replace`` for values that are changed with every record; a state changes by ``transitions.moved``.

    Raises TypeError for an unknown field.
    """
    if not isinstance(value, WithState):
        return dataclass_replace(value, **changes)  # pyright: ignore[reportArgumentType, reportUnknownVariableType] - any dataclass
    if "state" in changes:
        raise TypeError(f"the state of a {type(value).__name__} is changed by transitions.moved")
    return changed(value, changes)


def changed(value: T, changes: Mapping[str, object]) -> T:
    """A value of ``WithState`` with other fields. Raises TypeError for an unknown one.

    They have no ``__slots__`` and no ``__post_init__``, so that their fields are copied as one dictionary; running
    ``__init__`` over all fields took a sixth of the time of a replay.
    """
    if unknown := changes.keys() - value.__dict__.keys():
        raise TypeError(f"{type(value).__name__} has no field {', '.join(sorted(unknown))}")
    copy = object.__new__(type(value))
    copy.__dict__.update(value.__dict__, **changes)
    return copy


@dataclass(frozen=True, slots=True)
class NotYet:
    """A decision that is not taken now, and what it waits for. It is false, so that ``or`` asks the next rule."""

    why: str

    def __bool__(self) -> Literal[False]:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that exists, or was asked for (``pid`` is then 0). ``epoch`` is the one in its name."""

    epoch: Epoch
    node: NodeId = NO_NODE_ID
    pid: int = 0
    start_time: float = 0.0
    address: str = ""
    """Where instances on other machines call it, ``host:port``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A failure: of which instance, on which ``node`` if it had a place, and why. ``at_s`` is event time."""

    instance: InstanceId
    epoch: Epoch
    reason: Reason
    text: str = ""
    traceback: str = ""
    node: NodeId = NO_NODE_ID
    at_s: float


@dataclass(frozen=True, kw_only=True)
class InstanceRecord:
    """State of one instance, as the master knows it.

    ``epoch`` is what it should be at; ``process`` may have been started under an older one (re-formed in place).
    ``terminating`` are processes of it that must be gone before the next one starts. ``running``: a finite instance was
    asked to run. ``ended``: it returned with success under this epoch. ``retired``: the job continues without it.
    ``spare``: on standby, or starting in the background. ``excluded`` are nodes that
    it may not start on again, until it has another place. ``restored`` is the commit it came up with.
    """

    id: InstanceId
    state: InstanceState = InstanceState.PLANNED
    epoch: Epoch = NO_EPOCH
    process: Process | None = None
    terminating: tuple[Epoch, ...] = ()
    restored: int = 0
    running: bool = False
    ended: bool = False
    retired: bool = False
    spare: bool = False
    excluded: tuple[NodeId, ...] = ()
    restarts: int = 0
    error: Loss | None = None

    @property
    def alive(self) -> bool:
        """True when a process of it exists that is not to be stopped."""
        return self.process is not None and self.process.pid != 0

    @property
    def settled(self) -> bool:
        """Ready for work, done with it, or given up."""
        return self.state is InstanceState.READY or self.ended or not self.active

    @property
    def active(self) -> bool:
        """One of those that the job works with, or waits for."""
        return not (self.retired or self.spare)


@dataclass(frozen=True, kw_only=True)
class HeldGang:
    """One reservation, as far as the log knows."""

    id: GangId
    epoch: Epoch
    state: GangState


@dataclass(frozen=True, kw_only=True)
class GangDemand:
    """A gang that is asked for beside those of the admission; kept while it is held.

    ``members`` are those of each bundle. ``answered``: there was an answer, or none for too long. On ``avoid`` they
    died (the engine lost ``lost_nodes``), on ``apart`` are others that they must be apart from. ``leaves`` is the node
    on which its members still run.
    ``back``: it is given back as soon as its members have left.
    """

    gang: GangId
    epoch: Epoch
    members: tuple[tuple[InstanceId, ...], ...]
    avoid: tuple[NodeId, ...] = ()
    apart: tuple[NodeId, ...] = ()
    lost: bool = False
    lost_nodes: tuple[NodeId, ...] = ()
    state: AskState = AskState.WANTED
    answered: bool = False
    at_s: float = 0.0
    leaves: NodeId | None = None
    back: bool = False

    @property
    def everybody(self) -> tuple[InstanceId, ...]:
        """The members of all bundles."""
        return tuple(member for members in self.members for member in members)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopy:
    """The state of an instance in the memory of another machine; ``epoch`` is the one that it was saved under."""

    owner: InstanceId
    host: str
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Failover:
    """A recovery: open until ``ended_s`` is set or a later one took its scope over (``superseded_by``).

    ``delay_s`` is the back-off before its starts; it is over once ``released``. ``replaced`` get a new process.
    """

    number: int
    level: Level
    scope: tuple[InstanceId, ...]
    replaced: tuple[InstanceId, ...]
    epoch: Epoch
    restore: int
    cause: Loss
    started_s: float
    moved_from: Level | None = None
    move_reason: Reason | None = None
    delay_s: float = 0.0
    released: bool = True
    rolled_back: bool = False
    seconds: float | None = None
    superseded_by: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """One use of the budget of a role, or with ``platform`` of that for faults of the platform."""

    role: RoleName
    level: Level
    at_s: float
    platform: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedError:
    """How often in a row a unit (named by its first instance) failed with the same error; see ``repetition``."""

    unit: InstanceId
    identity: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the attempt ends once everything is stopped: the job's end, or the queue again.

    ``phase`` is how far it is (see ``stopping``), ``since_s`` when it began, ``save_s`` how long the loop may take to
    its commit and the state to disk.
    """

    reason: Reason
    phase: Phase = "stop"
    since_s: float = 0.0
    save_s: float = 0.0
    requeue: bool = False
    counts: bool = True
    grace_s: float = 30.0
    text: str = ""
    role: RoleName | None = None
    rank: int | None = None
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class SavedCommit:
    """A durable checkpoint of commit ``n`` in the folder ``path``; ``cursor`` is that of the commit."""

    n: int
    path: str
    cursor: JsonObject = field(default_factory=JsonObject)


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """The state of one job; changed only by ``machine.fold``.

    ``graph`` and ``bound`` follow from spec and placement. ``attached``: the present master has compared the log with
    what is alive; before that nothing is asked for. ``epoch_max`` is the highest epoch of an instance or gang ever
    seen. ``losses`` wait for a verdict, and may be judged once ``diagnosed`` though all look like consequences;
    ``escalated`` is the level that was just found impossible, ``checked`` a suspected node and whether it is fit.
    ``repeats`` are errors that came again and again since the last commit; ``heals_s`` is how long the job must run
    until its recoveries count as healed without a commit (None: they do), ``runs_since_s`` since when it has run.
    ``retries`` counts restarts of the whole job that were its own fault, ``free_requeues`` the others. ``hosts`` is
    where each instance was at the last commit: there memory has its state. ``copies`` are those of commit
    ``copied_n`` on other machines, ``copy_fails`` counts outcomes without one since the last. ``starting_s`` is when
    the present start or recovery began, ``used_s`` the run time of earlier attempts. ``rollback_to`` is the commit that
    a new attempt must go back to first, ``resume_from`` the one that a user chose for it. ``checkpoints`` are kept, the
    newest first. ``next_spec`` holds changes that take effect with the next attempt. ``asks``
    are gangs beside those of the admission, ``sizes`` the numbers of instances that were asked for. ``resized_s`` is
    when a world last changed its size, ``boundary`` that it may grow now at small cost. ``drains`` are nodes to leave,
    and until when. ``uploads_since_s`` is when the upload of the output began, ``upload_error``
    why it is not at its URL, empty once it is.
    """

    job: JobId
    seq: int = 0
    at_s: float = 0.0
    state: JobState = JobState.SUBMITTED
    workdir: str = ""
    owner: str = ""
    spec: JobSpec | None = None
    next_spec: JobSpec | None = None
    graph: Graph | None = field(default=None, compare=False, repr=False)
    attempt: int = 0
    master_epoch: Epoch = NO_EPOCH
    attached: bool = False
    epoch_max: Epoch = NO_EPOCH
    placement: Placement | None = None
    bound: Bindings = field(default_factory=dict[InstanceId, tuple[GangId, BundleGrant]], compare=False, repr=False)
    hosts: tuple[tuple[InstanceId, str], ...] = ()
    gangs: tuple[HeldGang, ...] = ()
    asks: tuple[GangDemand, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    resized_s: float = 0.0
    boundary: bool = False
    drains: Mapping[NodeId, float] = field(default_factory=dict[NodeId, float])
    instances: Mapping[InstanceId, InstanceRecord] = field(default_factory=dict[InstanceId, InstanceRecord])
    committed: int = 0
    versions: Mapping[str, int] = field(default_factory=dict[str, int])
    cursor: JsonObject = field(default_factory=JsonObject)
    metrics: JsonObject = field(default_factory=JsonObject)
    checkpoint_n: int = 0
    checkpoint_path: str = ""
    checkpoint_cursor: JsonObject = field(default_factory=JsonObject)
    checkpoints: tuple[SavedCommit, ...] = ()
    copied_n: int = 0
    copies: tuple[StateCopy, ...] = ()
    copied_cursor: JsonObject = field(default_factory=JsonObject)
    copy_tries: int = 0
    copy_fails: int = 0
    losses: tuple[Loss, ...] = ()
    uploads_since_s: float | None = None
    upload_error: str | None = None
    diagnosed: bool = False
    checked: tuple[NodeId, bool] | None = None
    escalated: Level | None = None
    failovers: tuple[Failover, ...] = ()
    failover_count: int = 0
    open_failover: int | None = None
    charges: tuple[Charge, ...] = ()
    repeats: tuple[RepeatedError, ...] = ()
    heals_s: float | None = None
    runs_since_s: float | None = None
    retries: int = 0
    free_requeues: int = 0
    admitted_s: float = 0.0
    starting_s: float = 0.0
    started_s: float | None = None
    used_s: float = 0.0
    rollback_to: int | None = None
    resume_from: int | None = None
    ending: Ending | None = None
    end_reason: Reason | None = None

    @property
    def failover(self) -> Failover | None:
        """The open recovery."""
        if self.open_failover is None:
            return None
        return next(one for one in reversed(self.failovers) if one.number == self.open_failover)

    @property
    def plan(self) -> Graph:
        """The graph of the job, known from JobSubmitted on."""
        assert self.graph is not None, f"{self.job} has no spec yet"
        return self.graph

    @property
    def released(self) -> bool:
        """True when no reservation is held and no process is left that must go."""
        return not self.gangs and not any(one.terminating for one in self.instances.values())

    @property
    def uploads(self) -> bool:
        """True when nothing but its output, which goes to a URL, keeps the job from its end."""
        ending = self.ending
        if ending is None or ending.requeue or ending.phase != "stop" or not self.released:
            return False
        return self.spec is not None and self.spec.output_url is not None and self.upload_error is None

    @property
    def shares_tensors(self) -> bool:
        """True when shared memory may hold state, weights or results of the job."""
        return self.spec is not None and bool(self.plan.loop or self.plan.stateful)

    @property
    def loop_epoch(self) -> Epoch:
        """Epoch that a commit must carry; 0 when the job has no loop."""
        loop = self.loop
        return loop.epoch if loop else NO_EPOCH

    @property
    def loop(self) -> InstanceRecord | None:
        """The loop instance."""
        if self.graph is None or self.graph.loop is None:
            return None
        return self.instances.get(InstanceId(self.graph.loop, 0))

    def of_role(self, role: RoleName) -> Iterator[InstanceRecord]:
        """The instances of one role in rank order."""
        return (self.instances[one] for one in self.plan.ranks[role] if one in self.instances)

    @property
    def roles(self) -> tuple[RoleSpec, ...]:
        """The roles of the job; none before it has a spec."""
        return self.spec.roles if self.spec is not None else ()

    def role(self, name: RoleName) -> RoleSpec:
        """The role of that name. Raises KeyError."""
        assert self.spec is not None, f"{self.job} has no spec yet"
        return self.spec.role(name)

    def loss(self, one: InstanceRecord, reason: Reason, text: str = "", traceback: str = "") -> Loss:
        """A failure of an instance, now."""
        return Loss(instance=one.id, epoch=one.epoch, reason=reason, text=text, traceback=traceback, at_s=self.at_s)

    def active_of(self, role: RoleName) -> tuple[InstanceRecord, ...]:
        """Instances of a role that the job works with, in rank order."""
        return tuple(one for one in self.of_role(role) if one.active)

    def bundle(self, instance: InstanceId) -> tuple[GangId, BundleGrant]:
        """Gang and bundle that the placement gives to an instance. Raises KeyError without a placement."""
        return self.bound[instance]

    def with_placement(self, placement: Placement | None, asks: tuple[GangDemand, ...]) -> JobContext:
        """The same context with other grants."""
        return replace(self, placement=placement, asks=asks, bound=bound_of(self.spec, placement, asks))

    def with_instances(self, changed: Iterable[InstanceRecord]) -> JobContext:
        """The same context with some instance records replaced."""
        return replace(self, instances={**self.instances, **{one.id: one for one in changed}})

    def to_json(self) -> JsonObject:
        """A snapshot as plain values: replaying the records after ``seq`` onto it gives the live context."""
        raw = {name: codec.to_json_value(getattr(self, name)) for name in _SNAPSHOT_FIELDS}
        raw["instances"] = [codec.to_json_value(one) for one in self.instances.values()]
        return {"version": CONTEXT_VERSION, **raw}

    @staticmethod
    def from_json(raw: JsonObject) -> JobContext:
        """Inverse of ``to_json``.

        Raises ValueError for another version, KeyError for a missing field, also TypeError for a wrong form.
        """
        if raw.get("version") != CONTEXT_VERSION:
            raise ValueError(f"snapshot version {raw.get('version')!r}, this code reads {CONTEXT_VERSION}")
        records: list[InstanceRecord] = [codec.from_json_value(InstanceRecord, one) for one in raw["instances"]]
        found: JobContext = codec.from_json_value(JobContext, {name: raw[name] for name in _SNAPSHOT_FIELDS})
        graph = expand(found.spec) if found.spec else None
        bound = bound_of(found.spec, found.placement, found.asks)
        return replace(found, graph=graph, bound=bound, instances={one.id: one for one in records})


def bound_of(spec: JobSpec | None, placement: Placement | None, asks: tuple[GangDemand, ...]) -> Bindings:
    """Gang and bundle of every instance that has one: by the admission, or by the last grant for it."""
    if spec is None or placement is None:
        return {}
    bound = dict(bindings(spec, placement))
    for ask in asks:
        if ask.state is AskState.GRANTED:
            bundles = placement.gang(ask.gang).bundles
            bound |= {member: (ask.gang, bundles[i]) for i, members in enumerate(ask.members) for member in members}
    return bound


WithState = JobContext | InstanceRecord | HeldGang | GangDemand
"""What has a state that ``transitions.moved`` changes."""
_MADE_ANEW = ("graph", "bound")
_SNAPSHOT_FIELDS = tuple(name for name in JobContext.__dataclass_fields__ if name not in (*_MADE_ANEW, "instances"))
