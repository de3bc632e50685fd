"""Effects that the job machine asks for; the master carries them out and their outcome comes back as an event.

Commands are imperative and idempotent by ``(job, epoch, id)``: carrying one out twice is harmless, and after a restart
of the master every command without an outcome in the log is issued again with the same id. ``id`` is deterministic,
made from the fields that say what is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

from rota.spec.events import JobEvent
from rota.spec.gang import BundleGrant
from rota.spec.ids import NO_EPOCH, Epoch, GangId, InstanceId, NodeId

FENCED_GRACE_S = 0.5
"""Polite part of stopping what runs under an epoch that is over: nothing it could still save would count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveGang:
    """Reserve all bundles of a gang under an epoch. Outcome: GangReserved or GangReserveFailed."""

    gang: GangId
    epoch: Epoch
    bundles: tuple[BundleGrant, ...]

    @property
    def id(self) -> str:
        return f"reserve/{self.gang}/{self.epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseGang:
    """Give a reservation back. Outcome: GangReleased."""

    gang: GangId
    epoch: Epoch

    @property
    def id(self) -> str:
        return f"release/{self.gang}/{self.epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartInstance:
    """Start one process in its bundle. Outcome: InstanceStarted, or InstanceLost."""

    instance: InstanceId
    epoch: Epoch
    gang: GangId
    gang_epoch: Epoch
    bundle: BundleGrant

    @property
    def id(self) -> str:
        return f"start/{self.instance}/{self.epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assemble:
    """Set a living process up under ``epoch``: import and set up the workload, join the mesh, restore a commit.

    ``started_epoch`` names the process (it may be older than ``epoch``: a re-formed member keeps its process).
    ``peers`` are the instances of its mesh in rank order. What still runs of an older epoch is asked to end, and has
    ``grace_s`` for it. Host ``source`` has the state under ``source_epoch`` when its own does not. Outcome:
    InstanceReady, or InstanceLost.
    """

    instance: InstanceId
    epoch: Epoch
    started_epoch: Epoch
    peers: tuple[InstanceId, ...]
    restore: int
    grace_s: float = FENCED_GRACE_S
    source: str = ""
    source_epoch: Epoch = NO_EPOCH

    @property
    def id(self) -> str:
        return f"assemble/{self.instance}/{self.epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInstance:
    """Let a finite instance (loop, command, function) run from ``committed``. Outcome: InstanceEnded, InstanceLost."""

    instance: InstanceId
    epoch: Epoch
    started_epoch: Epoch
    committed: int

    @property
    def id(self) -> str:
        return f"run/{self.instance}/{self.epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopInstance:
    """End a process: gracefully within ``grace_s``, then by force. Outcome: InstanceStopped."""

    instance: InstanceId
    started_epoch: Epoch
    grace_s: float

    @property
    def id(self) -> str:
        return f"stop/{self.instance}/{self.started_epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckNode:
    """Let one of the processes on a node check it; ``failover`` is the verdict that waits. Outcome: NodeChecked."""

    node: NodeId
    failover: int
    processes: tuple[tuple[InstanceId, Epoch], ...]

    @property
    def id(self) -> str:
        return f"check/{self.failover}/{self.node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """One part of a commit: the state of an instance, or version ``n`` of a weights edge, and who saves it."""

    owner: InstanceId | str
    process: InstanceId
    started_epoch: Epoch
    n: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommit:
    """Write commit ``n`` from memory to the checkpoint folder. ``tries`` rises when a writer was lost.

    Outcome: CheckpointSaved once every part is written; a part that fails is tried again while it is wanted.
    """

    n: int
    attempt: int
    tries: int
    parts: tuple[Saving, ...]

    @property
    def id(self) -> str:
        return f"save/{self.n}/{self.attempt}/{self.tries}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCommit:
    """Copy the state of commit ``n`` of a loop epoch into the memory of another machine, one of ``hosts`` if possible.

    ``tries`` counts the outcomes before, ``fails`` those without a copy since the last one. Outcome: CommitCopied.
    """

    n: int
    loop_epoch: Epoch
    attempt: int
    tries: int
    fails: int
    hosts: tuple[str, ...]
    parts: tuple[Saving, ...]

    @property
    def id(self) -> str:
        return f"copy/{self.attempt}/{self.loop_epoch}/{self.tries}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Fire TimerFired(timer) after ``after_s`` seconds, counted from ``since_s`` (event time)."""

    timer: str
    since_s: float
    after_s: float

    @property
    def id(self) -> str:
        return f"timer/{self.timer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Append an event that follows from the state (FailoverStarted, RolledBack, FailoverEnded, JobEnded ...)."""

    event: JobEvent
    key: str

    @property
    def id(self) -> str:
        return f"emit/{self.key}"


Command = (
    ReserveGang
    | ReleaseGang
    | StartInstance
    | Assemble
    | RunInstance
    | StopInstance
    | CheckNode
    | SaveCommit
    | CopyCommit
    | SetTimer
    | Emit
)
