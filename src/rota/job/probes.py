"""Beats and progress: what an instance tells its master once a second, and what the master reads from silence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rota.job.core.context import JobContext
from rota.job.peers import PeerTable
from rota.runtime.clock import Clock
from rota.spec import codec
from rota.spec.events import InstanceLost, JobEvent, ProgressStalled
from rota.spec.ids import Epoch, InstanceId, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import InstanceState

BEAT_S = 1.0
LEASE_S = 60.0
"""Without an answer of the master for this long an instance takes no calls."""
FENCE_EXIT_S = 75.0
"""Without an answer for this long an instance ends itself."""
SILENCE_MAX_S = 80.0
"""After this long without a beat the master treats an instance as gone: it has ended itself before."""
QUIET_MAX_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """User code of an instance raised under ``epoch``; repeated in every beat until a newer epoch replaces it."""

    epoch: Epoch
    reason: Reason
    text: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What an instance tells its master. ``idle_s`` = since its last mark of progress, 0 when nothing runs in it.

    ``busy`` names the operations that run, ``quiet`` the reason of a declared silence.
    """

    role: RoleName
    rank: int
    epoch: Epoch
    started_epoch: Epoch
    pid: int
    table_version: int = 0
    progress_n: float = 0.0
    progress_unit: str = ""
    idle_s: float = 0.0
    busy: tuple[str, ...] = ()
    quiet: str = ""
    failure: Failure | None = None

    @property
    def id(self) -> InstanceId:
        """Role and rank."""
        return InstanceId(self.role, self.rank)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the way between processes."""
        return codec.to_json_value(self)

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Beat:
        """Inverse of ``to_json``."""
        return codec.from_json_value(Beat, raw)

    def lost(self) -> InstanceLost | None:
        """The event of its failure, if it has one."""
        if self.failure is None:
            return None
        failure = self.failure
        return InstanceLost(
            role=self.role,
            rank=self.rank,
            epoch=failure.epoch,
            reason=failure.reason,
            text=failure.text,
            traceback=failure.traceback,
            alive=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatAnswer:
    """What the master answers: its epoch, and the table of peers when the instance has an older one."""

    master_epoch: Epoch
    table: PeerTable | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the way between processes."""
        return codec.to_json_value(self)

    @staticmethod
    def from_json(raw: dict[str, Any]) -> BeatAnswer:
        """Inverse of ``to_json``."""
        return codec.from_json_value(BeatAnswer, raw)


class Pulse:
    """Marks of progress of one instance; safe to use from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._n = 0.0
        self._unit = ""
        self._at_s = clock.monotonic_s()
        self._running: dict[int, str] = {}
        self._tokens = 0
        self._quiet: dict[int, tuple[str, float]] = {}

    def mark(self, n: float | None = None, unit: str = "") -> None:
        """Progress was made; ``n`` is how far it is in ``unit``, one more than before when left out."""
        with self._lock:
            self._n = self._n + 1 if n is None else float(n)
            self._unit = unit or self._unit
            self._at_s = self._clock.monotonic_s()

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Something runs that is expected to make progress; its start and its end are marks themselves."""
        with self._lock:
            self._tokens += 1
            token = self._tokens
            if not self._running:
                self._at_s = self._clock.monotonic_s()
            self._running[token] = name
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(token, None)
                self._at_s = self._clock.monotonic_s()

    @contextmanager
    def quiet(self, why: str, max_s: float = QUIET_MAX_S) -> Iterator[None]:
        """A legal silence of at most ``max_s`` seconds."""
        with self._lock:
            self._tokens += 1
            token = self._tokens
            self._quiet[token] = (why, self._clock.monotonic_s() + max_s)
        try:
            yield
        finally:
            with self._lock:
                self._quiet.pop(token, None)
                self._at_s = self._clock.monotonic_s()

    def read(self, beat: Beat) -> Beat:
        """``beat`` with the present marks."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            quiet = next((why for why, until_s in self._quiet.values() if now_s < until_s), "")
            return replace(
                beat,
                progress_n=self._n,
                progress_unit=self._unit,
                idle_s=now_s - self._at_s if self._running and not quiet else 0.0,
                busy=tuple(self._running.values()),
                quiet=quiet,
            )


@dataclass(slots=True)
class Watch:
    """The master's side: the last beat of each instance, and which silences have become too long."""

    clock: Clock
    beats: dict[InstanceId, tuple[Beat, float]] = field(default_factory=dict[InstanceId, tuple[Beat, float]])
    since: dict[tuple[InstanceId, Epoch], float] = field(default_factory=dict[tuple[InstanceId, Epoch], float])
    stalled: set[tuple[InstanceId, Epoch]] = field(default_factory=set[tuple[InstanceId, Epoch]])

    def heard(self, beat: Beat) -> None:
        """Note a beat."""
        self.beats[beat.id] = (beat, self.clock.monotonic_s())

    def overdue(self, ctx: JobContext) -> list[JobEvent]:
        """Events of silences that are too long now, each once an epoch."""
        now_s = self.clock.monotonic_s()
        found: list[JobEvent] = []
        watched = [one for one in ctx.instances.values() if one.state is InstanceState.READY]
        self.since = {key: self.since.get(key, now_s) for key in ((one.id, one.epoch) for one in watched)}
        self.stalled &= set(self.since)
        for one in watched:
            key = (one.id, one.epoch)
            beat, at_s = self.beats.get(one.id, (None, 0.0))
            silent_s = now_s - max(at_s, self.since[key])
            if key in self.stalled or ctx.spec is None:
                continue
            limit_s = ctx.spec.role(one.id.role).fail.progress_s
            if silent_s > SILENCE_MAX_S:
                text = f"no beat for {silent_s:.0f} s"
                lost = InstanceLost(role=one.id.role, rank=one.id.rank, epoch=one.epoch, reason=Reason.HANG, text=text)
                found.append(lost)
                self.stalled.add(key)
            elif beat is not None and beat.epoch == one.epoch and beat.idle_s > limit_s:
                stall = ProgressStalled(role=one.id.role, rank=one.id.rank, epoch=one.epoch, idle_s=beat.idle_s)
                found.append(stall)
                self.stalled.add(key)
        return found
