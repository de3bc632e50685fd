"""Reservations, and what may run before them."""

from __future__ import annotations

from dataclasses import dataclass

from rota.cluster.core.plugins import Placer
from rota.cluster.core.snapshot import Held, JobRow, State
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """From ``at`` on these slots are kept for a job that could not start when its turn came."""

    job: JobId
    at: float
    held: tuple[Held, ...]

    def outlived_by(self, row: JobRow, now: float) -> bool:
        """Whether a job started now would still run at the time of the reservation, or might."""
        return row.ask.est_s is None or now + row.ask.est_s > self.at


def earliest_start(state: State, txn: Txn, row: JobRow, placer: Placer, now: float) -> Reservation | None:
    """When the job fits, if running jobs end as estimated, and where; None if that cannot be told from estimates.

    Estimates only reserve; a job that runs on past its own is expected to end at any moment.
    """
    ends = sorted(
        (max(now, other.started_at + other.ask.est_s), other.ask.id)
        for other in state.jobs.values()
        if other.held and other.ask.est_s is not None
    )
    low, high = 1, len(ends)
    best: tuple[float, tuple[Held, ...]] | None = None
    while low <= high:
        middle = (low + high) // 2
        with txn.trial():
            for _, job in ends[:middle]:
                state.release(txn, job)
            held = placer.place(state, txn, row)
        if held is None:
            low = middle + 1
        else:
            best, high = (ends[middle - 1][0], held), middle - 1
    return None if best is None else Reservation(job=row.ask.id, at=best[0], held=best[1])
