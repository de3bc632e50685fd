"""Least attained service in two dimensions (Tiresias), and shortest remaining time first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rota.cluster.core.jobs import JobRow
from rota.cluster.core.preemption import enough_of, lost_gpu_s
from rota.cluster.core.profile import Order, Placer, Profile, Victim
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.fifo import Fit, LimitsOnly
from rota.spec.reasons import Reason

ROUND_S = 300.0
"""How often running jobs are ranked anew while others wait."""


@dataclass(frozen=True, slots=True)
class LeastService:
    """Jobs below the threshold of device-seconds first, then the others; first come first served inside a level.

    Two levels keep jobs of like service from taking turns for ever. Source: Tiresias (NSDI'19), 2D-LAS.
    """

    threshold_gpu_s: float = 8 * 3600.0
    by_job = True

    def rank(self, state: State, row: JobRow, now: float) -> tuple[Any, ...]:
        served = row.served_by(now) * row.ask.shape.gpu_milli / 1000
        return (served >= self.threshold_gpu_s,)


@dataclass(frozen=True, slots=True)
class Outranked:
    """Running jobs that the order puts behind the one that asks, the last first; equals are left alone."""

    order: Order

    def _place(self, state: State, row: JobRow, now: float) -> tuple[Any, ...]:
        """Opportunistic work comes last here as it does in the queue: else it would stop who then stops it."""
        return (row.ask.opportunistic, *self.order.rank(state, row, now))

    def victims(self, state: State, txn: Txn, row: JobRow, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        mine = self._place(state, row, now)
        behind = [
            (other.ask.spare, place, other.started_at, job)
            for group in state.running.values()
            for job in group
            if (other := state.jobs[job]).ask.may_stop and (place := self._place(state, other, now)) > mine
        ]
        chosen = enough_of(state, txn, row, placer, [job for *_, job in sorted(behind, reverse=True)])
        return tuple(
            Victim(job=job, reason=Reason.PREEMPTED_PRIORITY, lost_gpu_s=lost_gpu_s(state, job, now))
            for job in chosen or ()
        )


def las(threshold_gpu_s: float = 8 * 3600.0) -> Profile:
    """Who got least so far comes first, and takes the place of who got much."""
    order = LeastService(threshold_gpu_s)
    return Profile(
        name="las",
        order=order,
        division=LimitsOnly(),
        placer=Fit(),
        victims=Outranked(order),
        remember=False,
        round_s=ROUND_S,
    )


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
