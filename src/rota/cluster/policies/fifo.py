"""First come, first served, by priority; limits of queues kept; best fit or spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rota.cluster.core.admission import amount, limit_reason
from rota.cluster.core.jobs import Held, JobRow, Wait
from rota.cluster.core.placement import PREFERENCES, Manner, near_data, place
from rota.cluster.core.profile import Profile
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn


@dataclass(frozen=True, slots=True)
class ByArrival:
    """Highest priority first, then longest queued, then id."""

    by_job = False

    def rank(self, state: State, row: JobRow, now: float) -> tuple[Any, ...]:
        return (-row.ask.priority,)


@dataclass(frozen=True, slots=True)
class LimitsOnly:
    """A job may start as long as no queue of its line, and no user in one, passes a limit."""

    def verdict(self, state: State, row: JobRow) -> Wait | None:
        over = state.over_limit(row.ask.queue, row.ask.user, row.ask.shape)
        if over is None:
            return None
        who = f"Queue {over.queue} uses" if over.user is None else f"In queue {over.queue} user {over.user} has"
        return Wait(
            reason=limit_reason(over),
            text=f"{who} {amount(over.dim, over.used)} of {'its' if over.user is None else 'a'} limit of "
            f"{amount(over.dim, over.allowed)}; the job asks {amount(over.dim, over.asked)}.",
            fields={
                "queue": over.queue,
                "dim": over.dim,
                "used": over.used,
                "asked": over.asked,
                "limit": over.allowed,
            },
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """The fullest (``pack``) or emptiest (``spread``) node first; ``close``: inside one enclosing cell if possible.

    Nodes that hold the data of the job come before the others; they do not change which cell it lies in.
    """

    manner: Manner = "pack"
    close: bool = True

    def place(self, state: State, txn: Txn, row: JobRow) -> tuple[Held, ...] | None:
        prefer = PREFERENCES[self.manner]
        if row.ask.data:
            prefer = near_data(prefer, state.holds_data(row.ask))
        return place(state, txn, row.ask.shape, prefer=prefer, close=self.close)


def fifo() -> Profile:
    """Strict order inside a queue: nothing starts before the first of its queue."""
    return Profile(name="fifo", order=ByArrival(), division=LimitsOnly(), placer=Fit(), block="queue")
