"""Shortest remaining time first; a bound to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rota.cluster.core.plugins import Profile
from rota.cluster.core.snapshot import JobRow, State
from rota.cluster.policies.fifo import Fit, LimitsOnly


@dataclass(frozen=True, slots=True)
class ShortestFirst:
    """By estimated device-seconds that remain; jobs without an estimate come last."""

    by_job = True

    def rank(self, state: State, row: JobRow, now: float) -> tuple[Any, ...]:
        if row.ask.est_s is None:
            return (1, 0.0)
        return (0, max(0.0, row.ask.est_s - row.served_s) * max(row.ask.shape.gpu_milli, 1))


def srtf() -> Profile:
    """Needs true estimates: with them no order has a lower mean completion time on one device."""
    return Profile(name="srtf", order=ShortestFirst(), division=LimitsOnly(), placer=Fit())
