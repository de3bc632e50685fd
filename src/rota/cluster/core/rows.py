"""One job as the decisions see it: what it asks and holds, why it waits, in which line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rota.cluster.core.asks import JobAsk, Shape, Slot
from rota.spec.ids import NodeId
from rota.spec.reasons import Reason

Phase = Literal["queued", "running", "stopping", "paused"]


@dataclass(frozen=True, slots=True)
class Held:
    """What one slot holds: node row, device rows, thousandths if the device is shared, cores, memory."""

    node: int
    devices: tuple[int, ...]
    milli: int
    cpu_milli: int
    mem: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Why a job waits: the reason, one sentence, and the numbers behind it."""

    reason: Reason
    text: str = ""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One live job: what it asks, what it holds, why it waits. ``held`` is empty exactly while it holds nothing."""

    ask: JobAsk
    phase: Phase = "queued"
    held: tuple[Held, ...] = ()
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

    @property
    def left_s(self) -> float | None:
        """How long it is expected to run from its last start, or from its next one if it waits."""
        return None if self.ask.est_s is None else max(0.0, self.ask.est_s - self.done_s)

    @property
    def begins_at(self) -> float:
        """When it may start at the earliest."""
        return max(self.ask.not_before, self.back_at)

    def is_told(self, reason: Reason) -> bool:
        """Whether this is the last reason that the job was given."""
        return self.wait is not None and self.wait.reason is reason

    def served_by(self, now: float) -> float:
        """Seconds on devices until now, over all attempts."""
        return self.served_s + (now - self.started_at if self.held else 0.0)


class LineKey(NamedTuple):
    """Waiting jobs with equal keys form one line: what holds for the first of them holds for all.

    ``after`` is the time before which none of them may start, 0 for most.
    """

    queue: str
    priority: int
    user: str
    after: float
    preemptible: bool
    shape: Shape
    avoid: tuple[NodeId, ...] = ()
    failover: bool = False


def line_key(row: JobRow) -> LineKey:
    """The line in which a job waits."""
    ask = row.ask
    return LineKey(
        ask.queue,
        ask.priority,
        ask.user,
        row.begins_at,
        ask.preemptible,
        ask.shape,
        ask.avoid,
        ask.failover,
    )


def place_key(key: LineKey) -> LineKey:
    """The same without what has no say in where a job fits: whose it is, when, and how urgent."""
    return key._replace(queue="", priority=min(key.priority, 0), user="", after=0.0, preemptible=True)


def asked(slot: Slot, node: int, devices: tuple[int, ...]) -> Held:
    """What a slot holds once it lies on these devices of this node."""
    return Held(node, devices, slot.milli, slot.cpu_milli, slot.mem)
