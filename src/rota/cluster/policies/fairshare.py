"""Weighted shares by borrowing in a cohort: who borrows least comes first."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rota.cluster.core.plugins import Profile
from rota.cluster.core.quota import GPU
from rota.cluster.core.rows import JobRow
from rota.cluster.core.shares import borrowing_share
from rota.cluster.core.snapshot import State
from rota.cluster.policies.default import LeastCost, stops
from rota.cluster.policies.fifo import Fit, LimitsOnly


@dataclass(frozen=True, slots=True)
class LeastBorrowed:
    """The queue that would borrow least with the job comes first; then priority."""

    by_job = False

    def rank(self, state: State, row: JobRow, now: float) -> tuple[Any, ...]:
        tree = state.queues
        queue = tree.row.get(row.ask.queue)
        if queue is None:
            return (0, -row.ask.priority)
        used = {"gpu": Fraction(int(state.used[queue, GPU]) + row.ask.shape.gpu_milli)}
        lendable = {"gpu": Fraction(int(tree.guaranteed[tree.leaf, GPU].sum()))}
        nominal = {"gpu": Fraction(int(tree.guaranteed[queue, GPU]))}
        share = borrowing_share(nominal, lendable, used, Fraction(tree.rows[queue].weight))
        return (share.share_permille, -row.ask.priority)


def kueue() -> Profile:
    """Who borrows least comes first; borrowed devices are taken back."""
    return Profile(
        name="kueue",
        order=LeastBorrowed(),
        division=LimitsOnly(),
        placer=Fit(),
        victims=LeastCost(),
        stops=stops,
        block="none",
    )
