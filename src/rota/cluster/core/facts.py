"""What happened, as the scheduling state takes it in."""

from __future__ import annotations

from dataclasses import dataclass

from rota.cluster.core.asks import JobAsk
from rota.cluster.core.snapshot import Held, Wait
from rota.spec.ids import JobId, NodeId
from rota.spec.resources import Health


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArrived:
    """A job waits for devices from now on; again with another ask when the job changed while it waited."""

    ask: JobAsk


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHolds:
    """A job was given these devices."""

    job: JobId
    held: tuple[Held, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResized:
    """A running job has these devices now, at least those that it asked for."""

    job: JobId
    held: tuple[Held, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMeasured:
    """How fast a job runs on the devices that it shares, 1 = as fast as alone."""

    job: JobId
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairUndone:
    """Jobs of these kinds did not gain by sharing devices and are not to be tried again."""

    job: JobId
    pair: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStopping:
    """A job was asked for its devices; it holds them until it lets go."""

    job: JobId
    for_job: JobId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReleased:
    """A job let go of everything and waits again; with ``back_at`` not before that time."""

    job: JobId
    back_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSaved:
    """A job made its progress durable."""

    job: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPaused:
    """A waiting job is not to be tried, or to be tried again."""

    job: JobId
    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWaits:
    """It became known why a job waits."""

    job: JobId
    wait: Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGone:
    """A job ended."""

    job: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanged:
    """The fitness of a node or some of its devices changed; None = the node left."""

    node: NodeId
    health: Health | None
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed."""


Fact = (
    JobArrived
    | JobHolds
    | JobResized
    | JobMeasured
    | PairUndone
    | JobStopping
    | JobReleased
    | JobSaved
    | JobPaused
    | JobWaits
    | JobGone
    | NodeChanged
    | Tick
)
