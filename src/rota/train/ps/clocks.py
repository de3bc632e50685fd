"""Parameter server, decisions: clocks, whose turn it is, which pushes are applied together, who is too old.

A worker asks for its turn, computes with what it pulled, and pushes once a clock to every shard; each shard decides for
itself from the same ticks. Iteration c of a worker is the one before its push of clock c.

======== ============================================================ ==============================================
mode     iteration c may run when                                     a push of clock c
======== ============================================================ ==============================================
ps_sync  all clocks before c are applied                              joins the one update of clock c (mean, rank order)
ps_async always                                                       is applied when it comes
ps_ssp   c - min(clocks of live workers) <= s                         is applied when it comes
======== ============================================================ ==============================================

Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014); Ho et al., "More
Effective Distributed ML via a Stale Synchronous Parallel Parameter Server" (NIPS 2013), section 2, whose bound on the
lead is ours; Chen et al., "Revisiting Distributed Synchronous SGD" (2016), for backup workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PsMode = Literal["ps_sync", "ps_async", "ps_ssp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``s`` bounds the lead (ps_ssp); ``backup`` late workers are not waited for (ps_sync); ``staleness_max`` pushes
    applied since the pull drop one (ps_async, None: never), and ``damp`` weighs it by 1 / (1 + staleness)."""

    mode: PsMode
    s: int = 0
    backup: int = 0
    staleness_max: int | None = None
    damp: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A worker came, or came back under a newer epoch."""

    worker: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft:
    """A worker is gone for good, known by the epoch that replaced it or its own word."""

    worker: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAsked:
    """A worker wants to run iteration ``clock``."""

    worker: int
    epoch: int
    clock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsPushed:
    """A worker finished iteration ``clock`` and sent its gradients, which may be none."""

    worker: int
    epoch: int
    clock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitWorker:
    """Admission of a worker, whose first iteration is ``clock``."""

    worker: int
    clock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantTurn:
    """Let the worker run iteration ``clock``."""

    worker: int
    clock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyPushes:
    """Apply ``weight`` times the sum of these workers' pushes, in this order, as one update."""

    pushes: tuple[tuple[int, int], ...]
    """(worker, clock) of each."""
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPush:
    """Forget a push; ``why`` is LATE (its clock was applied without it), STALE or REPEATED."""

    worker: int
    clock: int
    why: Literal["LATE", "STALE", "REPEATED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseWorker:
    """Nothing was done: an older epoch (FENCED), an unknown worker (UNKNOWN), or out of turn (NOT_ITS_TURN)."""

    worker: int
    why: Literal["FENCED", "UNKNOWN", "NOT_ITS_TURN"]


PsEvent = WorkerJoined | WorkerLeft | TurnAsked | GradientsPushed
PsEffect = AdmitWorker | GrantTurn | ApplyPushes | DropPush | RefuseWorker


@dataclass(slots=True, kw_only=True)
class PsShard:
    """The clocks of one shard. ``handle`` is the only way to change it.

    ``clocks`` maps a live worker to the iteration it runs or will run next; ``version`` counts applied updates, which
    in ps_sync is the clock being gathered. ``base`` is where the first worker starts: the clock of the snapshot.
    """

    rule: Rule
    base: int = 0
    version: int = 0
    clocks: dict[int, int] = field(default_factory=dict[int, int])
    epochs: dict[int, int] = field(default_factory=dict[int, int])
    waiting: dict[int, int] = field(default_factory=dict[int, int])
    gathered: dict[int, int] = field(default_factory=dict[int, int])
    """ps_sync: worker -> clock of the pushes that wait for the others."""
    pulled: dict[int, int] = field(default_factory=dict[int, int])
    """Version that each worker computes with."""
    dropped: int = 0

    @property
    def low(self) -> int:
        """The clock of the slowest live worker."""
        return min(self.clocks.values(), default=self.base)

    def handle(self, event: PsEvent) -> list[PsEffect]:
        """Take one event; what has to be done for it, in order."""
        worker = event.worker
        if event.epoch < self.epochs.get(worker, 0):
            return [RefuseWorker(worker=worker, why="FENCED")]
        unknown = worker not in self.clocks or event.epoch > self.epochs[worker]
        match event:
            case WorkerJoined():
                return self._join(event)
            case WorkerLeft():
                return self._leave(event)
            case TurnAsked() | GradientsPushed() if unknown:
                return [RefuseWorker(worker=worker, why="UNKNOWN")]
            case TurnAsked():
                return self._ask(worker, event.clock)
            case GradientsPushed():
                return self._push(worker, event.clock)

    def _join(self, event: WorkerJoined) -> list[PsEffect]:
        worker = event.worker
        self._forget(worker)
        self.epochs[worker] = event.epoch
        # A push that was acknowledged counts, so its sender continues with the next clock.
        start = self.version if self.rule.mode == "ps_sync" else self.low
        self.clocks[worker] = self.gathered.get(worker, start - 1) + 1
        return [AdmitWorker(worker=worker, clock=self.clocks[worker]), *self._settle()]

    def _leave(self, event: WorkerLeft) -> list[PsEffect]:
        self._forget(event.worker)
        self.epochs[event.worker] = event.epoch
        return self._settle()

    def _forget(self, worker: int) -> None:
        self.base = self.low
        self.clocks.pop(worker, None)
        self.waiting.pop(worker, None)
        self.pulled.pop(worker, None)

    def _ask(self, worker: int, clock: int) -> list[PsEffect]:
        if clock > self.clocks[worker]:
            return [RefuseWorker(worker=worker, why="NOT_ITS_TURN")]
        if self.rule.mode == "ps_sync" and worker not in self.pulled:  # clocks that passed without it are over
            self.clocks[worker] = max(self.clocks[worker], self.version)
        self.waiting[worker] = self.clocks[worker]
        return self._settle()

    def _push(self, worker: int, clock: int) -> list[PsEffect]:
        if clock < self.clocks[worker]:
            return [DropPush(worker=worker, clock=clock, why="REPEATED")]
        if clock > self.clocks[worker] or worker not in self.pulled:
            return [RefuseWorker(worker=worker, why="NOT_ITS_TURN")]
        staleness = self.version - self.pulled.pop(worker)
        self.clocks[worker] = clock + 1
        if self.rule.mode == "ps_sync":
            if clock < self.version:
                self.dropped += 1
                self.clocks[worker] = self.version
                return [DropPush(worker=worker, clock=clock, why="LATE"), *self._settle()]
            self.gathered[worker] = clock
            return self._settle()
        if self.rule.staleness_max is not None and staleness > self.rule.staleness_max:
            self.dropped += 1
            return [DropPush(worker=worker, clock=clock, why="STALE"), *self._settle()]
        self.version += 1
        weight = 1.0 / (1 + staleness) if self.rule.damp else 1.0
        return [ApplyPushes(pushes=((worker, clock),), weight=weight), *self._settle()]

    def _settle(self) -> list[PsEffect]:
        """Apply what is complete, then let the workers run whose turn has come."""
        effects: list[PsEffect] = []
        missing = [worker for worker, clock in self.clocks.items() if clock <= self.version]
        if self.rule.mode == "ps_sync" and self.gathered and len(missing) <= self.rule.backup:
            pushes = tuple(sorted(self.gathered.items()))
            effects.append(ApplyPushes(pushes=pushes, weight=1.0 / len(pushes)))
            self.gathered.clear()
            self.version += 1
        for worker, clock in sorted(self.waiting.items()):
            if self._may_run(clock):
                del self.waiting[worker]
                self.pulled[worker] = self.version
                effects.append(GrantTurn(worker=worker, clock=clock))
        return effects

    def _may_run(self, clock: int) -> bool:
        match self.rule.mode:
            case "ps_sync":
                return clock <= self.version
            case "ps_ssp":
                return clock - self.low <= self.rule.s
            case "ps_async":
                return True
