"""Dominant resource fairness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rota.cluster.core.plugins import Profile
from rota.cluster.core.quota import CPU, GPU, MEM
from rota.cluster.core.rows import JobRow
from rota.cluster.core.snapshot import State
from rota.cluster.policies.fifo import Fit, LimitsOnly


@dataclass(frozen=True, slots=True)
class LowestDominantShare:
    """From the top of the tree down, the queue of the lowest dominant share over its weight comes first.

    Gangs are not divisible: one that does not fit is skipped and does not block. Source: DRF (NSDI'11), hierarchical
    form of H-DRF without its rescaling.
    """

    by_job = False

    def rank(self, state: State, row: JobRow, now: float) -> tuple[Any, ...]:
        line = state.queues.line_of(row.ask.queue)
        return tuple(dominant_share(state, queue) for queue in reversed(line))


def dominant_share(state: State, queue: int) -> float:
    """Largest part of the cluster that a queue uses, over its weight; resources that do not exist do not count."""
    used = state.used[queue, [GPU, CPU, MEM]]
    parts = np.divide(used, state.capacity, out=np.zeros(3), where=state.capacity > 0)
    return float(parts.max()) / max(state.queues.rows[queue].weight, 1e-9)


def drf() -> Profile:
    """Lowest dominant share first, best fit, nobody is stopped."""
    return Profile(name="drf", order=LowestDominantShare(), division=LimitsOnly(), placer=Fit())
