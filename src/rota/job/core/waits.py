"""The wait-for graph: who waits for whom and since when; a sink of it that makes no progress is the culprit.

A vertex is an instance (``role/rank``), or something an instance waits for: ``master``, ``stream groups``, a process
that is gone. An edge goes from the one who waits to the one waited for. Cycles are merged (strongly connected
components, Tarjan 1972); a component that waits for nobody outside is a sink. A sink whose every member is stuck is a
root: one member is the culprit of all who reach it, several wait for each other. A sink that makes progress excuses
those who wait for it: limits are on progress, never on duration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

WaitKind = Literal[
    "call", "ready", "stream", "weights", "collective", "meeting", "lease", "commit", "start", "declared"
]
"""``ready``: a call that nobody can take yet; ``meeting``: a process group that is not complete; ``declared``: told by
user code (``ctx.waiting``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """``source`` has waited for ``target`` for ``age_s`` seconds; ``what`` is the operation, stream or tensor."""

    source: str
    target: str
    kind: WaitKind
    what: str = ""
    age_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.source} waits for {self.target} ({self.kind}{' ' + self.what if self.what else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a vertex stands. ``still_s`` is since its last sign of progress, 0 while nothing is expected of it.

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
    cycle: tuple[Wait, ...] = ()

    @property
    def deadlock(self) -> bool:
        """True when the members wait for each other."""
        return bool(self.cycle)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitGraph:
    """Edges and standings of one moment. A vertex without a standing is taken to make progress."""

    waits: tuple[Wait, ...] = ()
    standings: Mapping[str, Standing]

    def roots(self) -> tuple[Root, ...]:
        """Every sink whose members are all stuck, in the order of their names."""
        found: list[Root] = []
        after = self._arrows()
        for members in components(after):
            inside = frozenset(members)
            sink = all(target in inside for one in members for target in after[one])
            if sink and all(one in self.standings and self.standings[one].stuck for one in members):
                found.append(Root(members=members, cycle=self._cycle(inside)))
        return tuple(sorted(found, key=lambda root: root.members))

    def waiters(self, root: Root) -> tuple[str, ...]:
        """Everybody who waits for a root, directly or through others."""
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
        after: dict[str, list[str]] = {name: [] for name in self.standings}
        for wait in self.waits:
            after.setdefault(wait.source, []).append(wait.target)
            after.setdefault(wait.target, [])
        return after

    def _cycle(self, members: frozenset[str]) -> tuple[Wait, ...]:
        """One closed way inside a component; empty when its only member does not wait for itself."""
        inner = [wait for wait in self.waits if wait.source in members and wait.target in members]
        if not inner:
            return ()
        way: dict[str, Wait] = {}
        vertex = min(members)
        while vertex not in way:
            way[vertex] = max((wait for wait in inner if wait.source == vertex), key=_age)
            vertex = way[vertex].target
        cycle = [way[vertex]]
        while cycle[-1].target != vertex:
            cycle.append(way[cycle[-1].target])
        return tuple(cycle)


def _age(wait: Wait) -> float:
    return wait.age_s


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
class Rank:
    """A member of a process group: how many collectives it has entered, -1 when not known.

    ``inside`` = its code is in a collective now; ``silent`` = it has stopped answering.
    """

    name: str
    entered: int = -1
    inside: bool = False
    silent: bool = False
    still_s: float = 0.0


def collective_waits(ranks: Iterable[Rank], *, still_min_s: float) -> tuple[Wait, ...]:
    """Who waits for whom in a process group, among members without progress for ``still_min_s``.

    A member waits for those that entered fewer collectives. Where all entered as many, it waits for those that do not
    answer; else, if some are inside a collective, for those that are not; else all that are still wait for each other.
    """
    known = [rank for rank in ranks if rank.entered >= 0]
    waits: list[Wait] = []
    for rank in known:
        if rank.silent or rank.still_s < still_min_s:
            continue
        behind = [other for other in known if other.entered < rank.entered]
        if not behind and all(other.entered == rank.entered for other in known):
            behind = _behind_at_same_count(rank, known, still_min_s)
        what = f"number {rank.entered}"
        waits += [
            Wait(source=rank.name, target=other.name, kind="collective", what=what, age_s=rank.still_s)
            for other in behind
        ]
    return tuple(waits)


def _behind_at_same_count(rank: Rank, known: Sequence[Rank], still_min_s: float) -> list[Rank]:
    others = [other for other in known if other is not rank]
    if silent := [other for other in others if other.silent]:
        return silent
    if not rank.inside:
        return []
    outside = [other for other in others if not other.inside]
    return outside or [other for other in others if other.still_s >= still_min_s]
