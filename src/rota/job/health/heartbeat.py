"""Heartbeats and progress: what an instance reports to its master once a second, and the marks it is read from."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, NotRequired, TypedDict

from rota.job.core.progress import WaitEdge
from rota.job.rpc.peers import PeerTable
from rota.job.rpc.tracing import Collectives, Waiting, own_collectives
from rota.runtime.clock import Clock
from rota.spec.codec import JsonValue
from rota.spec.events import InstanceLost
from rota.spec.ids import Epoch, InstanceId, RoleName

BEAT_S = 1.0
LEASE_S = 60.0
"""Without an answer of the master for this long an instance takes no calls."""
FENCE_EXIT_S = 75.0
"""Without an answer for this long an instance ends itself."""
QUIET_MAX_S = 600.0
SETTING_UP = "its setup"
"""What an instance is busy with until it is ready."""
STEPS_KEPT = 20
"""Number of steps whose median duration a heartbeat reports."""


class Answer(TypedDict):
    """What an instance answers to its master or its loop; the fields beside ``answer`` depend on it."""

    answer: Literal["done", "failed", "stale"]
    failure: NotRequired[Mapping[str, object]]
    """An ``InstanceLost`` as plain values."""
    text: NotRequired[str]
    bytes: NotRequired[int]
    host: NotRequired[str]
    epoch: NotRequired[int]
    seconds: NotRequired[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(JsonValue):
    """Report of an instance to its master. ``idle_s`` = since its last mark of progress, 0 when nothing runs in it.

    ``busy`` names the operations that run, ``quiet`` the reason of a declared silence. ``still_s`` is since its last
    mark whether or not something runs, ``waits`` whom it waits for, the oldest first. ``collectives`` counts those it
    has entered (-1: no process group), ``inside`` names the one it is in, ``held_up`` the rank of its command that the
    others wait for, ``stopped_s`` for how long a rank has been stopped by a signal. ``step_s`` is the median of its
    last ``steps`` steps. ``cpus`` are the cores that it and its children use, ``rss_bytes`` their resident memory.
    ``saved_s`` is when its script last wrote a checkpoint (wall time).
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
    still_s: float = 0.0
    waits: tuple[WaitEdge, ...] = ()
    collectives: int = -1
    inside: str = ""
    held_up: str = ""
    stopped_s: float = 0.0
    step_s: float = 0.0
    steps: int = 0
    cpus: float = 0.0
    rss_bytes: int = 0
    calls: tuple[tuple[str, str, str, int, int, float, int], ...] = ()
    """Observed edges: kind, target role, operation, times, of which failed, seconds waited, bytes."""
    saved_s: float = 0.0
    ports: tuple[tuple[str, str], ...] = ()
    """Where each of its ports is: name, ``address:port``."""
    weights: tuple[tuple[str, str, int, int, float], ...] = ()
    """Weights edges that end here: name, state of the replica, commit held, commits and seconds behind."""
    lost: InstanceLost | None = None
    """Its code raised under the present epoch; repeated in every beat until a newer epoch replaces it."""

    @property
    def id(self) -> InstanceId:
        """Role and rank."""
        return InstanceId(self.role, self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAnswer(JsonValue):
    """Answer of the master: its epoch, and the table of peers when the instance has an older one."""

    master_epoch: Epoch
    table: PeerTable | None = None


class ProgressMarks:
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
        self._step_at_s: float | None = None
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)
        self._saved_s = 0.0
        self.waiting = Waiting(clock)
        self.collectives: Callable[[], Collectives] = own_collectives
        """Position in the collectives of torch; a command reads it from its ranks."""
        self._collectives_n = 0

    def touch(self) -> None:
        """Activity that is not a step: the silence begins anew."""
        with self._lock:
            self._at_s = self._clock.monotonic_s()

    def saved(self, at_s: float) -> None:
        """The script was seen to have a checkpoint of that time."""
        with self._lock:
            self._saved_s = at_s

    def mark(self, n: float | None = None, unit: str = "") -> None:
        """Progress was made; ``n`` is how far it is in ``unit``, one more than before when left out."""
        with self._lock:
            steps = 1.0 if n is None else float(n) - self._n
            self._n += steps
            self._unit = unit or self._unit
            self._at_s = now_s = self._clock.monotonic_s()
            if self._step_at_s is not None and steps > 0:
                self._steps.append((now_s - self._step_at_s) / steps)
            self._step_at_s = now_s

    def begin(self, name: str) -> tuple[int, float]:
        """Something begins that is expected to make progress; its start and its ``end`` are marks themselves."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            self._tokens += 1
            if not self._running:
                self._at_s = self._step_at_s = now_s
            self._running[self._tokens] = name
            return self._tokens, now_s

    def end(self, begun: tuple[int, float], name: str, *, call: str = "") -> None:
        """What ``begin`` announced is over."""
        token, began_s = begun
        took_s = self.waiting.spans.add("run", name, began_s, call=call)
        with self._lock:
            self._running.pop(token, None)
            self._at_s = max(self._at_s, began_s + took_s)

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """``begin`` and ``end`` around a block."""
        begun = self.begin(name)
        try:
            yield
        finally:
            self.end(begun, name)

    @contextmanager
    def quiet(self, why: str, max_s: float = QUIET_MAX_S) -> Iterator[None]:
        """Suspend the detection of hangs for at most ``max_s`` seconds."""
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

    def read(self, beat: Heartbeat) -> Heartbeat:
        """``beat`` with the present marks. A collective or an import since the last call is a mark."""
        place = self.collectives()
        with self._lock:
            now_s = self._clock.monotonic_s()
            if place.activity != self._collectives_n:
                self._collectives_n, self._at_s = place.activity, now_s
            quiet = next((why for why, until_s in self._quiet.values() if now_s < until_s), "")
            return replace(
                beat,
                progress_n=self._n,
                progress_unit=self._unit,
                idle_s=now_s - self._at_s if self._running and not quiet else 0.0,
                busy=tuple(self._running.values()),
                quiet=quiet,
                still_s=now_s - self._at_s,
                waits=self.waiting.read(str(beat.id)),
                collectives=place.entered,
                inside=place.inside,
                held_up=place.held_up,
                stopped_s=place.stopped_s,
                step_s=median(self._steps) if self._steps else 0.0,
                steps=len(self._steps),
                calls=tuple(
                    (*edge, count.n, count.failed, round(count.seconds, 3), count.bytes)
                    for edge, count in self.waiting.counts.copy().items()
                ),
                saved_s=self._saved_s,
            )
