"""Jobs as the decisions see them: what they ask, in whole numbers, what they hold, and why they wait."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from rota.spec.gang import CellLevel, GangRequest
from rota.spec.ids import GangId, JobId, NodeId
from rota.spec.job import JobSpec, RoleStart
from rota.spec.queue import DEFAULT_QUEUE
from rota.spec.reasons import Reason
from rota.spec.resources import types_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One bundle: whole devices, or thousandths of one device; thousandths of cores; bytes of memory.

    All its devices are of one type: any, or one of those that ``type`` names, with ``|`` between them.
    """

    gpus: int = 0
    milli: int = 0
    type: str | None = None
    cpu_milli: int = 0
    mem: int = 0

    @property
    def types(self) -> tuple[str, ...]:
        """The types that ``type`` names; empty for any."""
        return types_of(self.type)


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """All bundles of one job in order, with what must lie together or apart; equal shapes are equal values.

    Each group of ``tied`` slots must be on one node, as its parallel plan needs it. Each group of ``close`` slots,
    which holds whole tied groups, should be. ``names`` gives per slot the gang, the bundle index in it, and the role,
    for messages only.
    """

    slots: tuple[Slot, ...]
    together: tuple[tuple[tuple[int, ...], CellLevel], ...] = ()
    apart: tuple[tuple[tuple[int, ...], tuple[int, ...], CellLevel], ...] = ()
    names: tuple[tuple[str, int, str], ...] = ()
    tied: tuple[tuple[int, ...], ...] = ()
    close: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def gpus(self) -> int:
        """Devices in all, a shared one counted as one thousandth steps rounded up."""
        return math.ceil(self.gpu_milli / 1000)

    @cached_property
    def gpu_milli(self) -> int:
        """Thousandths of devices in all."""
        return sum(slot.gpus * 1000 + slot.milli for slot in self.slots)

    @cached_property
    def uniform(self) -> bool:
        """All slots equal, whole devices, no constraint: the common case, placed without search."""
        bound = self.together or self.apart or self.tied
        return len(set(self.slots)) == 1 and not self.slots[0].milli and not bound

    @cached_property
    def closest(self) -> Shape | None:
        """The same with what should be on one node as a rule; None where nothing more than the rules is wished."""
        return None if self.close in ((), self.tied) else replace(self, tied=self.close, close=())

    @cached_property
    def joined(self) -> JoinedShape:
        """The same with each tied group as one slot, which is on one node by itself."""
        return JoinedShape(self)

    @cached_property
    def value(self) -> tuple[object, ...]:
        """What of it equal shapes share: all but the names."""
        return (self.slots, self.together, self.apart, self.tied, self.close)

    @cached_property
    def _key(self) -> int:
        return hash(self.value)

    def __hash__(self) -> int:
        return self._key

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Shape) and self._key == other._key and self.value == other.value

    def __reduce__(self) -> tuple[object, ...]:
        """Without what is computed: hashes differ between processes, and a shape that is read is among those known."""
        return _read, ({one.name: getattr(self, one.name) for one in fields(self)},)

    def role(self, slot: int) -> str:
        """Name of the role of a slot, or its number."""
        return self.names[slot][2] if self.names else f"bundle {slot}"


class JoinedShape:
    """A shape with each tied group as one slot, and the slots of the given shape that each of its slots has.

    A group of which a slot is a share of a device, is of another type than the rest, or has a rule about places inside
    a node cannot be one slot: it is a ``together`` rule instead.
    """

    def __init__(self, given: Shape) -> None:
        whole = {i: group for group in given.tied if _is_one(given, group) for i in group}
        groups = dict.fromkeys(whole.get(i, (i,)) for i in range(len(given.slots)))
        self.groups: tuple[tuple[int, ...], ...] = tuple(groups)
        at = {i: new for new, group in enumerate(self.groups) for i in group}

        def moved(group: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(dict.fromkeys(at[i] for i in group))

        rules: list[tuple[tuple[int, ...], CellLevel]] = []
        rules.extend((moved(group), level) for group, level in given.together)
        rules.extend((moved(group), "node") for group in given.tied if group[0] not in whole)
        self.shape = Shape(
            slots=tuple(_joined([given.slots[i] for i in group]) for group in self.groups),
            together=tuple(rule for rule in rules if len(rule[0]) > 1),
            apart=tuple((moved(a), moved(b), level) for a, b, level in given.apart),
            names=tuple(given.names[group[0]] for group in self.groups) if given.names else (),
        )


def _is_one(given: Shape, group: tuple[int, ...]) -> bool:
    slots = [given.slots[i] for i in group]
    if any(slot.milli for slot in slots) or len({slot.type for slot in slots}) > 1:
        return False
    mine = set(group)
    inside = [members for members, level in given.together if level in ("device", "socket")]
    inside += [(*a, *b) for a, b, level in given.apart if level in ("device", "socket")]
    split = any(mine.intersection(a) and mine.intersection(b) for a, b, _ in given.apart)
    return not split and not any(mine.intersection(members) for members in inside)


def _joined(slots: Sequence[Slot]) -> Slot:
    return replace(
        slots[0],
        gpus=sum(slot.gpus for slot in slots),
        cpu_milli=sum(slot.cpu_milli for slot in slots),
        mem=sum(slot.mem for slot in slots),
    )


Basis = Literal["predicted", "assumed", "estimated", "estimated at best", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the shapes that a job may have: seconds a step as predicted (0 = unknown), and what it is in its roles."""

    shape: Shape
    step_s: float = 0.0
    starts: tuple[RoleStart, ...] = ()
    basis: Basis = "predicted"
    """What ``step_s`` is: predicted by a plan, measured with this split, estimated from what was measured with another,
    or assumed, as a part of the step with the fewest, before anything was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAsk:
    """One job as the scheduler knows it from its submission; sizes in ``shape``, times in seconds.

    ``queued_at`` orders the queue and never changes, also after a preemption. ``est_s`` is the expected run time.
    """

    id: JobId
    shape: Shape
    queue: str = DEFAULT_QUEUE
    user: str = "local"
    priority: int = 50
    queued_at: float = 0.0
    est_s: float | None = None
    steps: int = 0
    """Commits that it makes until its end; 0 = unknown."""
    grace_s: float = 30.0
    preemptible: bool = True
    not_before: float = 0.0
    after: tuple[JobId, ...] = ()
    """Jobs that must end before it may start; those that have are left out."""
    avoid: tuple[NodeId, ...] = ()
    """Nodes that it must not be on."""
    data: tuple[str, ...] = ()
    """Data sets that it reads: nodes that lately ran a job with one of them are preferred."""
    pinned: str = ""
    """The pinned cell of its queue in which it runs, where a policy has cells."""
    lazy: bool = False
    """When its queue needs its cells for another job it runs on, as opportunistic work, until its devices are taken."""
    failover: bool = False
    """In place of devices that a running job lost: it may have the nodes that are held back as spares."""
    part_of: JobId | None = None
    """The job that asks for this beside what it was admitted with; None for what a job is admitted with."""
    gang: GangId | None = None
    """The gang of ``part_of`` that this asks for; None for what a job is admitted with."""
    spare: bool = False
    """A part that its job can do without."""
    slots_max: int = 0
    """With equal slots: how many of them it can use at most, while no other job waits for them; 0 = those it asks."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    choices: tuple[Choice, ...] = ()
    """Shapes of which one is chosen at the start; the first, which fits wherever one of them fits, is ``shape``."""
    chosen: Choice | None = None
    """That which the job has, while it runs with another one than the first."""

    def having(self, choice: Choice | None) -> JobAsk:
        """The same with the shape of a choice; None: as it waits."""
        if choice is None and self.chosen is None:
            return self
        shape = self.choices[0].shape if choice is None else choice.shape
        return replace(self, shape=shape, chosen=choice)

    @property
    def key(self) -> tuple[JobId, GangId | None]:
        """Job and gang; no gang for what a job is admitted with."""
        return self.part_of or self.id, self.gang

    @property
    def opportunistic(self) -> bool:
        """Runs on what is left over and gives way at once."""
        return self.priority < 0

    @property
    def may_stop(self) -> bool:
        """Whether it can be a victim by itself: a part that its job needs stops with the job."""
        return self.preemptible and (self.part_of is None or self.spare)


def compile_shape(requests: Sequence[GangRequest]) -> Shape:
    """Put the bundles of all gangs of a job in one line. More than one device is rounded up."""
    slots: list[Slot] = []
    names: list[tuple[str, int, str]] = []
    together: list[tuple[tuple[int, ...], CellLevel]] = []
    apart: list[tuple[tuple[int, ...], tuple[int, ...], CellLevel]] = []
    tied: list[tuple[int, ...]] = []
    close: list[tuple[int, ...]] = []
    for request in requests:
        base = len(slots)
        for bundle in request.bundles:
            whole = bundle.res.gpus >= 1
            slots.append(
                Slot(
                    gpus=math.ceil(bundle.res.gpus - 1e-9) if whole else 0,
                    milli=0 if whole else round(bundle.res.gpus * 1000),
                    type=bundle.res.gpu_type,
                    cpu_milli=round(bundle.res.cpus * 1000),
                    mem=bundle.res.memory_bytes,
                )
            )
            roles = dict.fromkeys(member.role for member in bundle.members)
            names.append((request.gang, bundle.index, "+".join(roles) or f"bundle {bundle.index}"))
        together.extend((tuple(base + i for i in t.bundles), t.level) for t in request.together)
        apart.extend(
            (tuple(base + i for i in a.left), tuple(base + i for i in a.right), a.level) for a in request.apart
        )
        for found, groups in ((tied, request.tied), (close, request.close)):
            found.extend(tuple(base + i for i in group) for group in groups)
    shape = Shape(
        slots=tuple(slots),
        together=tuple(together),
        apart=tuple(apart),
        names=tuple(names),
        tied=tuple(tied),
        close=tuple(close),
    )
    return _known(shape)


def _known(shape: Shape) -> Shape:
    return _shapes.setdefault((shape.value, shape.names), shape)


def _read(values: Mapping[str, Any]) -> Shape:
    return _known(Shape(**values))


_shapes = WeakValueDictionary[tuple[object, ...], Shape]()
"""Each shape once: in every mapping by shape an equal one that is another object is compared slot by slot."""


STEPS_LABEL = "rota.steps"
"""Job label: how many commits the job makes until its end."""
STEPS_DIGITS_MAX = 32
DATA_LABEL = "rota.data"
"""Job label: the data sets that the job reads, with commas between them."""
CELL_LABEL = "rota.cell"
"""Job label: the pinned cell of its queue in which the job runs."""
LAZY_LABEL = "rota.lazy"
"""Job label: ``true`` where the job gives its cells up for its queue without a stop, and runs on as opportunistic."""


def _steps(label: str) -> int:
    """The number of commits; 0 (unknown) for a label that a submit refuses today and an older log may have."""
    return int(label) if label.isascii() and label.isdecimal() and len(label) <= STEPS_DIGITS_MAX else 0


def ask_of(job: JobId, spec: JobSpec, requests: tuple[GangRequest, ...], *, user: str, queued_at: float) -> JobAsk:
    """What the scheduler needs to know of a job; opportunistic work always gives way, that of priority 100 never."""
    labels = dict(spec.labels)
    return JobAsk(
        id=job,
        shape=compile_shape(requests),
        queue=spec.queue,
        user=user,
        priority=spec.priority,
        queued_at=queued_at,
        est_s=spec.time_limit_s,
        steps=_steps(labels.get(STEPS_LABEL, "")),
        grace_s=spec.grace_s,
        preemptible=spec.priority < 0 or (spec.priority < 100 and labels.get("rota.preemptible", "true") != "false"),
        pinned=labels.get(CELL_LABEL, ""),
        lazy=labels.get(LAZY_LABEL) == "true",
        data=tuple(name for part in labels.get(DATA_LABEL, "").split(",") if (name := part.strip())),
    )


Phase = Literal["queued", "running", "stopping", "paused"]
"""Whether a row is to be tried, holds what it asked for, is asked to give that back, or is not to be tried."""


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """Which phases of a row are left, which is entered, by which event (``core/events.py``), and when."""

    leaves: tuple[Phase, ...]
    enters: Phase
    event: str
    when: str


PHASE_CHANGES = (
    PhaseChange(("queued", "paused"), "running", "JobHolds", "it is given what it asks for"),
    PhaseChange(("running",), "stopping", "StopRequested", "it is asked for what it holds, as are the gangs beside it"),
    PhaseChange(("running", "stopping"), "queued", "JobReleased", "it has given everything back, and waits again"),
    PhaseChange(("queued",), "paused", "JobPaused", "it is not to be tried: its user paused it, or its end is decided"),
    PhaseChange(("paused",), "queued", "JobPaused", "it is to be tried again"),
)
"""Each change of ``LiveJob.phase``; ``State.put`` refuses any other."""
NEXT_PHASES = frozenset((phase, row.enters) for row in PHASE_CHANGES for phase in row.leaves)


class Allocation(NamedTuple):
    """What one slot holds: node row, device rows, thousandths if the device is shared, cores, memory."""

    node: int
    devices: tuple[int, ...]
    milli: int
    cpu_milli: int
    mem: int


Allocations = tuple[Allocation, ...]
"""What the slots of a job hold, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Why a job waits: the reason, one sentence, and the numbers behind it."""

    reason: Reason
    text: str = ""
    fields: dict[str, object] = field(default_factory=dict[str, object])

    def number(self, name: str) -> float:
        """A number of ``fields``; without limit where it is not given."""
        value = self.fields.get(name)
        return value if isinstance(value, int | float) else math.inf


Sizes = tuple[tuple[str, int], ...]
"""Members of each role of a split."""


class Speeds(NamedTuple):
    """The latest commits of a job with one split: seconds of each, and the part in which it waited for each role.

    ``scales`` has the time of the calls of a role by its number of members, as measured where the job changed it; else
    it is 1 / members. ``before`` is the split before this one, with the seconds for each role there. ``start_s`` went
    from the devices of this attempt to its first commit, ``last`` is the newest commit and its time.
    """

    attempt: int
    sizes: Sizes
    last: tuple[int, float]
    start_s: float = 0.0
    commits: tuple[tuple[float, Mapping[str, float]], ...] = ()
    scales: Mapping[tuple[str, int], float] = {}
    before: tuple[Sizes, Mapping[str, float]] | None = None


class LiveJob(NamedTuple):
    """One live job: what it asks, what it holds, why it waits. ``held`` is empty exactly while it holds nothing.

    A tuple: each event of a job makes a new row, and a frozen dataclass of as many fields takes four times as long.
    """

    ask: JobAsk
    phase: Phase = "queued"
    final: bool = False
    """It stops for good: once it let go it has ended or is paused, and does not wait again."""
    held: Allocations = ()
    attempt: int = 0
    started_at: float = 0.0
    saved_at: float = 0.0
    served_s: float = 0.0
    wait: Wait | None = None
    back_at: float = 0.0
    left_at: float = 0.0
    done_s: float = 0.0
    """Seconds of its estimate that were over with when it last let go."""
    rate: float | None = None
    """Measured speed beside another job on the same devices, 1 = alone."""
    likely_s: float | None = None
    """How long it runs in all by what its like took; None: as long as it asked."""
    late_s: float | None = None
    """The same, which one of ten exceeds."""
    reported_s: float | None = None
    """The same by its own progress, or as predicted by its plan; it goes before the others."""
    speeds: Speeds | None = None
    """What its commits took with its present split, where it has one."""
    pace: tuple[int, float] | None = None
    """The first commit of its present size, and when it was made."""

    @property
    def total_s(self) -> float | None:
        """How long it is expected to run in all; None: not known."""
        return self.reported_s or self.likely_s or self.ask.est_s

    @property
    def left_s(self) -> float | None:
        """The same from its last start, or from its next one if it waits."""
        return self._left(self.likely_s)

    @property
    def left_late_s(self) -> float | None:
        """The same if it is one of those that run long: what others may count on."""
        return self._left(self.late_s)

    def _left(self, learnt_s: float | None) -> float | None:
        total_s = self.reported_s or learnt_s or self.ask.est_s
        return None if total_s is None else max(0.0, total_s - self.done_s)

    @property
    def begins_at(self) -> float:
        """When it may start at the earliest; infinite while it waits for other jobs to end."""
        return math.inf if self.ask.after else max(self.ask.not_before, self.back_at)

    def may_become(self, phase: Phase) -> bool:
        """Whether this is its phase, or one that ``PHASE_CHANGES`` lets it enter."""
        return phase == self.phase or (self.phase, phase) in NEXT_PHASES

    def has_reason(self, reason: Reason) -> bool:
        """Whether this is the last reason that the job was given."""
        return self.wait is not None and self.wait.reason is reason

    def served_by(self, now: float) -> float:
        """Seconds on devices until now, over all attempts."""
        return self.served_s + (now - self.started_at if self.held else 0.0)


class LineKey(NamedTuple):
    """Waiting jobs with equal keys form one line: what holds for the first of them holds for all.

    ``begins_at`` is the time before which none of them may start, 0 for most, infinite for those that wait for others.
    """

    queue: str
    priority: int
    user: str
    begins_at: float
    preemptible: bool
    shape: Shape
    avoid: tuple[NodeId, ...] = ()
    failover: bool = False
    pinned: str = ""
    part_of: JobId | None = None
    """The job of a part that it can do without: such parts wait for what they wait for, not for other jobs."""


def line_key(row: LiveJob, user: str | None = None) -> LineKey:
    """The line in which a job waits, as a job of that ``user`` if one is named."""
    ask = row.ask
    return LineKey(
        ask.queue,
        ask.priority,
        ask.user if user is None else user,
        row.begins_at,
        ask.preemptible,
        ask.shape,
        ask.avoid,
        ask.failover,
        ask.pinned,
        ask.part_of if ask.spare else None,
    )


def place_key(key: LineKey) -> LineKey:
    """The same without what has no say in where a job fits: whose it is, when, and how urgent."""
    # Not ``_replace``, which takes four times as long.
    return LineKey("", min(key.priority, 0), "", 0.0, True, key.shape, key.avoid, key.failover, key.pinned)


def asked(slot: Slot, node: int, devices: tuple[int, ...]) -> Allocation:
    """What a slot holds once it lies on these devices of this node."""
    return Allocation(node, devices, slot.milli, slot.cpu_milli, slot.mem)
