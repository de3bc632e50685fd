"""Progress and hangs: wait-for graph, stragglers, memory and disk faults, NaN losses, critical path, collective check.

A vertex is an instance (``role/rank``), or something an instance waits for: ``master``, ``stream groups``, a process
that is gone. An edge goes from the one who waits to the one waited for. Cycles are merged (strongly connected
components, Tarjan 1972); a component without waits to the outside is a sink. A sink whose every member is stuck is a
root: one member is the culprit of all who reach it, several wait for each other. A sink that makes progress excuses
those who wait for it: limits are on progress, never on duration.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import Any, Literal

from rota.spec.job import LOOP_ROLE
from rota.spec.reasons import Reason

WaitKind = Literal[
    "call", "ready", "stream", "weights", "collective", "meeting", "lease", "commit", "start", "declared"
]
"""``ready``: a call for which no instance is ready; ``meeting``: a process group that is not complete; ``declared``: by
user code (``ctx.waiting``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitEdge:
    """``source`` has waited for ``target`` for ``age_s`` seconds; ``what`` is the operation, stream or tensor."""

    source: str
    target: str
    kind: WaitKind
    what: str = ""
    age_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.source} waits for {self.target} ({self.kind}{' ' + self.what if self.what else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class VertexStatus:
    """Status of a vertex. ``still_s`` is since its last sign of progress, 0 while nothing is expected of it.

    ``excuse`` says why its silence is legal (declared, or being recovered). ``silent_s`` is since its last beat.
    """

    name: str
    limit_s: float
    still_s: float = 0.0
    silent_s: float = 0.0
    excuse: str = ""
    doing: str = ""

    @property
    def stuck(self) -> bool:
        """True when it made no progress for longer than it may."""
        return not self.excuse and self.still_s > self.limit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Where waiting ends: ``members`` are one culprit, or several that wait for each other along ``cycle``."""

    members: tuple[str, ...]
    cycle: tuple[WaitEdge, ...] = ()

    @property
    def deadlock(self) -> bool:
        """True when the members wait for each other."""
        return bool(self.cycle)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitGraph:
    """Edges and statuses of one moment. A vertex without a status is taken to make progress."""

    waits: tuple[WaitEdge, ...] = ()
    statuses: Mapping[str, VertexStatus]

    def roots(self) -> tuple[Root, ...]:
        """Every sink whose members are all stuck, in the order of their names."""
        found: list[Root] = []
        after = self._arrows()
        for members in components(after):
            inside = frozenset(members)
            sink = all(target in inside for one in members for target in after[one])
            if sink and all(one in self.statuses and self.statuses[one].stuck for one in members):
                found.append(Root(members=members, cycle=self._cycle(inside)))
        return tuple(sorted(found, key=lambda root: root.members))

    def waiters(self, root: Root) -> tuple[str, ...]:
        """Vertices that wait for a root, directly or through others."""
        inside = set(root.members)
        before: dict[str, list[str]] = {}
        for wait in self.waits:
            before.setdefault(wait.target, []).append(wait.source)
        todo = list(inside)
        while todo:
            for source in before.get(todo.pop(), ()):
                if source not in inside:
                    inside.add(source)
                    todo.append(source)
        return tuple(sorted(inside - set(root.members)))

    def _arrows(self) -> dict[str, list[str]]:
        after: dict[str, list[str]] = {name: [] for name in self.statuses}
        for wait in self.waits:
            after.setdefault(wait.source, []).append(wait.target)
            after.setdefault(wait.target, [])
        return after

    def _cycle(self, members: frozenset[str]) -> tuple[WaitEdge, ...]:
        """One closed way inside a component; empty when its only member does not wait for itself."""
        inner = [wait for wait in self.waits if wait.source in members and wait.target in members]
        if not inner:
            return ()
        way: dict[str, WaitEdge] = {}
        vertex = min(members)
        while vertex not in way:
            way[vertex] = max((wait for wait in inner if wait.source == vertex), key=lambda wait: wait.age_s)
            vertex = way[vertex].target
        cycle = [way[vertex]]
        while cycle[-1].target != vertex:
            cycle.append(way[cycle[-1].target])
        return tuple(cycle)


def components(after: Mapping[str, Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Strongly connected components, those that are waited for first (Tarjan 1972, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[tuple[str, ...]] = []
    done: set[str] = set()
    for start in after:
        if start in index:
            continue
        index[start] = low[start] = len(index)
        stack.append(start)
        walk = [(start, iter(after[start]))]
        while walk:
            vertex, targets = walk[-1]
            fresh = next((target for target in targets if _met(target, vertex, index, low, done)), None)
            if fresh is not None:
                index[fresh] = low[fresh] = len(index)
                stack.append(fresh)
                walk.append((fresh, iter(after[fresh])))
                continue
            walk.pop()
            if walk:
                low[walk[-1][0]] = min(low[walk[-1][0]], low[vertex])
            if low[vertex] == index[vertex]:
                cut = stack.index(vertex)
                found.append(tuple(sorted(stack[cut:])))
                done.update(stack[cut:])
                del stack[cut:]
    return tuple(found)


def _met(target: str, vertex: str, index: dict[str, int], low: dict[str, int], done: set[str]) -> bool:
    """True for a vertex not seen before; an open one lowers the link of ``vertex``."""
    if target not in index:
        return True
    if target not in done:
        low[vertex] = min(low[vertex], index[target])
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """A member of a process group: how many collectives it has entered, -1 when not known.

    ``inside`` = its code is in a collective now; ``silent`` = it has stopped answering.
    """

    name: str
    entered: int = -1
    inside: bool = False
    silent: bool = False
    still_s: float = 0.0


def collective_waits(ranks: Iterable[RankStatus], *, still_min_s: float) -> tuple[WaitEdge, ...]:
    """Wait-for edges of a process group, among members without progress for ``still_min_s``.

    A member waits for those that entered fewer collectives. Where all entered as many, it waits for those that do not
    answer; else, if some are inside a collective, for those that are not; else all that are still wait for each other.
    """
    known = [rank for rank in ranks if rank.entered >= 0]
    waits: list[WaitEdge] = []
    for rank in known:
        if rank.silent or rank.still_s < still_min_s:
            continue
        behind = [other for other in known if other.entered < rank.entered]
        if not behind and all(other.entered == rank.entered for other in known):
            behind = _behind_at_same_count(rank, known, still_min_s)
        what = f"number {rank.entered}"
        waits += [
            WaitEdge(source=rank.name, target=other.name, kind="collective", what=what, age_s=rank.still_s)
            for other in behind
        ]
    return tuple(waits)


def _behind_at_same_count(rank: RankStatus, known: Sequence[RankStatus], still_min_s: float) -> list[RankStatus]:
    others = [other for other in known if other is not rank]
    if silent := [other for other in others if other.silent]:
        return silent
    if not rank.inside:
        return []
    outside = [other for other in others if not other.inside]
    return outside or [other for other in others if other.still_s >= still_min_s]


SLOW_FACTOR = 1.5
SLOW_STEPS = 20
"""A member is slow when the median of this number of its steps exceeds that of its role by this factor."""
DROP_SHARE = 0.6
DROP_S = 30.0
BASELINE_SAMPLES = 60
BASELINE_SAMPLES_MIN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast an instance goes: the median seconds of its last ``steps`` steps."""

    steps: int
    step_s: float


def stragglers(paces: Mapping[str, Pace]) -> dict[str, float]:
    """Members of one role that are slow, with how many times the median of the role their step takes.

    Only those with ``SLOW_STEPS`` steps are compared, and a role needs three of them: of two, none is the normal one.
    """
    known = {name: pace.step_s for name, pace in paces.items() if pace.steps >= SLOW_STEPS and pace.step_s > 0}
    if len(known) < 3:
        return {}
    middle = median(known.values())
    return {name: step_s / middle for name, step_s in known.items() if step_s > SLOW_FACTOR * middle}


@dataclass(frozen=True, slots=True, kw_only=True)
class RateWatch:
    """Watches a rate that follows work (power of a device in watts, cores in use) for a training that stopped silently.

    The baseline is the median of samples taken while progress was marked; the rate has dropped when it is below
    ``DROP_SHARE`` of the way from ``idle`` to the baseline for ``DROP_S`` seconds without an excuse (a declared
    silence, a wait that the graph explains). It restarts nothing by itself: it halves the limit on progress.
    """

    idle: float = 0.0
    working: tuple[float, ...] = ()
    low_since_s: float | None = None
    now_s: float = 0.0

    def seen(self, at_s: float, rate: float, *, progress: bool, excused: bool) -> RateWatch:
        """The watch after a sample; ``progress``: some was marked since the sample before."""
        low = self.is_low(rate)
        working = (*self.working, rate)[-BASELINE_SAMPLES:] if progress and not excused else self.working
        if excused or progress or not low:
            return replace(self, working=working, low_since_s=None, now_s=at_s)
        since_s = at_s if self.low_since_s is None else self.low_since_s
        return replace(self, working=working, low_since_s=since_s, now_s=at_s)

    def is_low(self, rate: float) -> bool:
        """True when a rate is too low for work; never before there is a baseline."""
        if len(self.working) < BASELINE_SAMPLES_MIN:
            return False
        return rate < self.idle + DROP_SHARE * (median(self.working) - self.idle)

    @property
    def dropped(self) -> bool:
        """True while the rate has been low for too long."""
        return self.low_since_s is not None and self.now_s - self.low_since_s >= DROP_S


def memory_faults(before: Mapping[int, int], now: Mapping[int, int]) -> dict[int, int]:
    """Devices whose count of uncorrectable memory errors rose, and by how much; a reset sets a count back to 0.

    Errors that a device corrected by itself are not counted. Source: NVIDIA, "GPU Memory Error Management".
    """
    return {index: n - before[index] for index, n in now.items() if n > before.get(index, n)}


def memory_evidence(signal: int | None, kills_before: int | None, kills_after: int | None) -> str:
    """Evidence that a process was killed for memory; empty without proof.

    A process that the kernel's out-of-memory killer ends dies by SIGKILL, and the control group counts it. A SIGKILL
    alone has another cause, and a word in a text is not evidence.
    """
    if signal != 9 or kills_before is None or kills_after is None or kills_after <= kills_before:
        return ""
    return f"the kernel ended it for memory: oom_kill of its control group went from {kills_before} to {kills_after}"


_STORAGE: dict[int, Reason] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EROFS), Reason.OUTPUT_FULL),
    errno.EMFILE: Reason.OVER_LIMIT,
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO), Reason.DATA_UNREACHABLE),
}


def storage_reason(error: BaseException | None) -> Reason | None:
    """Reason of an error of the disk or of open files, or of one it came from, by its number; None for others."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _STORAGE:
            return _STORAGE[error.errno]
        error = error.__cause__ or error.__context__
    return None


def bad_losses(metrics: Mapping[str, object]) -> tuple[str, ...]:
    """Names of reported losses (``loss``, ``policy_loss``, ``loss/value`` ...) that are not finite."""
    return tuple(name for name, value in metrics.items() if "loss" in name.lower() and not _finite(value))


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What an instance ran (``kind`` is ``run``) or waited for (``call``, ``commit``, ``ready``, ``weights`` ...).

    ``at_s`` is wall time, ``s`` its length. ``call`` is the id of a call: that of the caller's wait and of the run.
    """

    kind: str
    name: str
    at_s: float
    s: float
    target: str = ""
    call: str = ""

    @property
    def end_s(self) -> float:
        """When it ended."""
        return self.at_s + self.s

    @property
    def bound(self) -> str:
        """Who a wait is charged to: the role waited for, or ``commit``, or the recovery of a role."""
        role = self.target.partition("/")[0]
        match self.kind:
            case "commit":
                return "commit"
            case "ready":
                return f"{role} not ready"
            case _:
                return role


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of the critical path: from ``at_s`` for ``s`` seconds it was ``name`` that everything waited for."""

    name: str
    at_s: float
    s: float


def critical_path(waits: Iterable[Span], begin_s: float, end_s: float) -> tuple[Piece, ...]:
    """What bounded the time from ``begin_s`` to ``end_s`` of the instance that made these waits, in order of time.

    Backwards from the end: the wait that ended last bounds the time back to its own start, then the one that ended last
    before that; what no wait covers is its own time, ``loop``. The pieces add up to the whole.
    """
    pieces: list[Piece] = []
    now_s = end_s
    for wait in sorted((one for one in waits if one.at_s < end_s), key=lambda one: one.end_s, reverse=True):
        if now_s <= begin_s or wait.end_s <= begin_s:
            break
        if wait.at_s >= now_s:
            continue
        until_s = min(wait.end_s, now_s)
        if until_s < now_s:
            pieces.append(Piece(name=LOOP_ROLE, at_s=until_s, s=now_s - until_s))
        start_s = max(wait.at_s, begin_s)
        pieces.append(Piece(name=wait.bound, at_s=start_s, s=until_s - start_s))
        now_s = start_s
    if now_s > begin_s:
        pieces.append(Piece(name=LOOP_ROLE, at_s=begin_s, s=now_s - begin_s))
    return tuple(reversed(pieces))


def shares(pieces: Iterable[Piece]) -> dict[str, float]:
    """Name to its share of the whole, 0 to 1, the largest first."""
    sums: dict[str, float] = {}
    for piece in pieces:
        sums[piece.name] = sums.get(piece.name, 0.0) + piece.s
    whole_s = sum(sums.values())
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return {name: s / whole_s for name, s in ordered} if whole_s > 0 else {}


def busy_s(spans: Iterable[Span], begin_s: float, end_s: float) -> float:
    """Seconds of the window in which at least one of the spans ran."""
    total_s, until_s = 0.0, begin_s
    for one in sorted(spans, key=lambda one: one.at_s):
        start_s, stop_s = max(one.at_s, until_s), min(one.end_s, end_s)
        if stop_s > start_s:
            total_s += stop_s - start_s
            until_s = stop_s
    return total_s


def idle_shares(spans: Mapping[str, Sequence[Span]], begin_s: float, end_s: float) -> dict[str, float]:
    """Role to the mean share of the window in which its instances (``role/rank``) ran nothing."""
    if end_s <= begin_s:
        return {}
    found: dict[str, list[float]] = {}
    for instance, those in spans.items():
        runs = [one for one in those if one.kind == "run"]
        idle = 1.0 - busy_s(runs, begin_s, end_s) / (end_s - begin_s)
        found.setdefault(instance.partition("/")[0], []).append(idle)
    return {role: sum(values) / len(values) for role, values in found.items()}


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans in as few rows as possible, none overlapping another of its row, each row in order of time."""
    rows: list[list[Span]] = []
    for one in sorted(spans, key=lambda one: (one.at_s, -one.s)):
        row = next((row for row in rows if row[-1].end_s <= one.at_s), None)
        if row is None:
            rows.append([one])
        else:
            row.append(one)
    return rows


Pair = tuple[int, int]
NOISE_S = 0.01
"""What a busy processor adds to a pair says nothing of its member."""
Times = Mapping[Pair, float | None]
"""Seconds that a pair took for its sum; None: it failed, or the sum was wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Members that failed in every pair, and those that were slow in every pair, with how many times the usual."""

    faulty: tuple[int, ...] = ()
    slow: Mapping[int, float] = field(default_factory=dict[int, float])


def first_round(world: int) -> tuple[Pair, ...]:
    """Neighbours; of an odd number of members the last one is left over."""
    return tuple((n, n + 1) for n in range(0, world - 1, 2))


def second_round(world: int, first: Times) -> tuple[Pair, ...]:
    """Everybody whose pair was not good, or who had none, with a member whose pair was; nothing when no pair was good.

    The first of a pair is the good one: it measures.
    """
    slow_s = _slow_s(_usual_s(first))
    good = [n for pair, s in first.items() if s is not None and s <= slow_s for n in pair]
    rest = [n for n in range(world) if n not in good]
    return tuple((good[i % len(good)], n) for i, n in enumerate(rest)) if good else ()


def verdict(first: Times, second: Times) -> Verdict:
    """Members at fault; none when no pair of the first round was good: then the links as a whole are suspect."""
    usual_s = _usual_s(first)
    slow = {n: s / usual_s for (_, n), s in second.items() if s is not None and s > _slow_s(usual_s)}
    return Verdict(faulty=tuple(n for (_, n), s in second.items() if s is None), slow=slow)


def _slow_s(usual_s: float) -> float:
    return max(SLOW_FACTOR * usual_s, usual_s + NOISE_S)


def _usual_s(first: Times) -> float:
    return median_low([s for s in first.values() if s is not None] or [0.0])
