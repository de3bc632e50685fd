"""Shortest remaining time first; a bound to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rota.cluster.core.plugins import Profile
from rota.cluster.core.rows import JobRow
from rota.cluster.core.snapshot import State
from rota.cluster.policies.fifo import Fit, LimitsOnly
from rota.cluster.policies.las import Outranked


@dataclass(frozen=True, slots=True)
class ShortestFirst:
    """By estimated device-seconds that remain; jobs without an estimate come last."""

    by_job = True

    def rank(self, state: State, row: JobRow, now: float) -> tuple[Any, ...]:
        if row.ask.est_s is None:
            return (1, 0.0)
        return (0, max(0.0, row.ask.est_s - row.served_by(now)) * max(row.ask.shape.gpu_milli, 1))


def srtf() -> Profile:
    """Who is done soonest comes first, also in place of who runs. Needs true estimates."""
    order = ShortestFirst()
    return Profile(
        name="srtf",
        order=order,
        division=LimitsOnly(),
        placer=Fit(),
        victims=Outranked(order),
        remember=False,
    )
