"""Which member of a mesh is broken or slow, from timed sums of two members each: two rounds of pairs.

Round 1 pairs neighbours. A sum of two that fails or is slow says that one of them is at fault, not which; round 2 pairs
each of them with a member whose pair was good, so that what is wrong again is wrong with that member. Source: DLRover,
"Node health check" (two rounds of paired collectives). We differ in the measure: a pair is slow beside the lower median
of its round. A member without a neighbour has its first pair in round 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low

from rota.job.core.symptoms import SLOW_FACTOR

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
    """Who is at fault. Nobody is where no pair of the first round was good: then the links as a whole are in doubt."""
    usual_s = _usual_s(first)
    slow = {n: s / usual_s for (_, n), s in second.items() if s is not None and s > _slow_s(usual_s)}
    return Verdict(faulty=tuple(n for (_, n), s in second.items() if s is None), slow=slow)


def _slow_s(usual_s: float) -> float:
    return max(SLOW_FACTOR * usual_s, usual_s + NOISE_S)


def _usual_s(first: Times) -> float:
    return median_low([s for s in first.values() if s is not None] or [0.0])
