"""Where the time of a job went: the critical path of each step, and the share of time each role was idle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


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


def critical_path(waits: Iterable[Span], begin_s: float, end_s: float, *, own: str = "loop") -> tuple[Piece, ...]:
    """What bounded the time from ``begin_s`` to ``end_s`` of the instance that made these waits, in order of time.

    Backwards from the end: the wait that ended last bounds the time back to its own start, then the one that ended last
    before that; what no wait covers is the instance's own time, ``own``. The pieces add up to the whole.
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
            pieces.append(Piece(name=own, at_s=until_s, s=now_s - until_s))
        start_s = max(wait.at_s, begin_s)
        pieces.append(Piece(name=wait.bound, at_s=start_s, s=until_s - start_s))
        now_s = start_s
    if now_s > begin_s:
        pieces.append(Piece(name=own, at_s=begin_s, s=now_s - begin_s))
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
