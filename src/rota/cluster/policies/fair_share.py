"""Fair shares among queues: DRF, and borrowing in a cohort (Kueue)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from rota.cluster.core.capacity import CPU, GPU, MEM, Vector
from rota.cluster.core.jobs import LiveJob, Shape
from rota.cluster.core.preemption import choose_victims
from rota.cluster.core.profile import Placer, Profile, Rank, Victim
from rota.cluster.core.promises import UNCOVERED, beyond, promise_level
from rota.cluster.core.quota import borrowing_share
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.basic import STARVE_S, Fit, LimitsOnly
from rota.cluster.policies.default import LeastCost, of_queue, share_rank, stops
from rota.spec.reasons import Reason


@dataclass(frozen=True, slots=True)
class LowestDominantShare:
    """From the top of the tree down, the queue of the lowest dominant share over its weight comes first.

    Inside a queue priority, then arrival. Gangs are not divisible: one that does not fit is skipped and does not block.
    Source: DRF (NSDI'11), hierarchical form of H-DRF without its rescaling.
    """

    by_job = False

    def rank(self, state: State, row: LiveJob, now: float) -> Rank:
        """Dominant share over weight of each queue from the top of the tree down, then minus the priority."""
        line = state.queues.line_of(row.ask.queue)
        return (*(dominant_share(state, queue) for queue in reversed(line)), -row.ask.priority)


def dominant_share(state: State, queue: int) -> float:
    """Largest part of the cluster that a queue uses, over its weight; resources that do not exist do not count."""
    used = state.used[queue, [GPU, CPU, MEM]]
    parts = np.divide(used, state.capacity, out=np.zeros(3), where=state.capacity > 0)
    return float(parts.max()) / max(state.queues.rows[queue].weight, 1e-9)


def drf() -> Profile:
    """Lowest dominant share first, best fit, no job is stopped."""
    return Profile(name="drf", order=LowestDominantShare(), division=LimitsOnly(), placer=Fit(), starve_s=STARVE_S)


@dataclass(frozen=True, slots=True)
class LeastBorrowed:
    """The queue that would borrow least with its first job comes first; inside it priority, then arrival."""

    by_job = False

    def rank(self, state: State, row: LiveJob, now: float) -> Rank:
        """Level of the promise, what the queue would borrow with its first job, minus the priority."""
        if row.ask.queue not in state.queues.row:
            return (0, -row.ask.priority)
        return (*of_queue(state, row, now, borrowed_rank), -row.ask.priority)


def borrowed_rank(state: State, speaker: LiveJob) -> tuple[int, float]:
    """Which promise covers the next job of a queue, and what the queue would borrow with it as a part of all."""
    queue = state.queues.row[speaker.ask.queue]
    level, since = share_rank(state, speaker)
    if 0 < level < UNCOVERED:
        return (level, since)
    return (level, float(borrowed(state, queue, state.used[queue] + state.queues.need(speaker.ask.shape))))


LENT = {GPU: "gpu", CPU: "cpu", MEM: "mem"}
"""Dimensions of which queues lend each other what they are promised."""


def borrowed(state: State, queue: int, used: Vector) -> Fraction | float:
    """What a leaf that uses as much borrows: a part of what all leaves are promised, of its dominant resource."""
    tree = state.queues
    nominal, lendable, use = (
        {name: int(vector[dim]) for dim, name in LENT.items()}
        for vector in (tree.guaranteed[queue], tree.lendable, used)
    )
    return borrowing_share(nominal, lendable, use, tree.rows[queue].weight).share


@dataclass(frozen=True, slots=True)
class FairBorrowing:
    """``LeastCost``; for a job that would borrow, then, who borrows more: queues of the largest share first.

    A job of another queue may be taken if that queue still borrows at least as much without it as the own one will with
    the job. If that makes no room, one of each queue that borrows more now. The share of the own queue then is below
    what the other had, so that neither takes it back. Shares are compared as they are, not rounded. Source: Kueue, fair
    sharing, rules "less than or equal to final share" and "less than initial share".
    """

    cheapest: LeastCost = field(default_factory=LeastCost)

    def victims(self, state: State, txn: Txn, row: LiveJob, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        """Those of ``LeastCost``; else the set of least cost by final, then initial share; None if none makes room."""
        found = self.cheapest.victims(state, txn, row, placer, now)
        if found is not None or not _may_share(state, row):
            return found
        mine = _share_with(state, row)
        taken, left = self._by_final_share(state, row, mine)
        for more in ((), left):
            kept = [(other, Reason.PREEMPTED_RECLAIM) for other in (*taken, *more)]
            found = choose_victims(state, txn, row, placer, kept, now) if kept else None
            if found is not None:
                return found
        return None

    def _by_final_share(
        self, state: State, row: LiveJob, mine: Fraction | float
    ) -> tuple[Sequence[LiveJob], Sequence[LiveJob]]:
        """Who may be taken by the first rule, and beside them by the second.

        A share only falls here: a size of job that the first rule refuses in a queue is refused there for good.
        """
        tree, used = state.queues, state.used.copy()
        able = {tree.row[path]: list(jobs) for path, jobs in _takeable(state, row)}
        shares = {queue: borrowed(state, queue, used[queue]) for queue in able}
        first, second = list[LiveJob](), list[LiveJob]()
        passed, refused = set[int](), set[tuple[int, Shape]]()
        while able:
            queue = max(able, key=lambda q: (shares[q], -q))
            other = able[queue].pop()
            if not able[queue]:
                del able[queue]
            if (queue, other.ask.shape) not in refused:
                rest = used[queue] - tree.need(other.ask.shape)
                final = borrowed(state, queue, rest)
                if mine <= final:
                    first.append(other)
                    used[queue], shares[queue] = rest, final
                    continue
                refused.add((queue, other.ask.shape))
            if mine < shares[queue] and queue not in passed:
                passed.add(queue)
                second.append(other)
        return first, second


def _share_with(state: State, row: LiveJob) -> Fraction | float:
    """What the queue of a job borrows once the job runs."""
    queue = state.queues.row[row.ask.queue]
    return borrowed(state, queue, state.used[queue] + state.queues.need(row.ask.shape))


def _takeable(state: State, row: LiveJob) -> Iterator[tuple[str, list[LiveJob]]]:
    """By queue that borrows more than that of the job will: who may be stopped there, the lowest and newest last."""
    mine, over = _share_with(state, row), beyond(state, row)
    by_queue = dict[str, list[LiveJob]]()
    for (path, _), jobs in state.running.items():
        if path != row.ask.queue and path in state.queues.row and state.queues.gives_back(path):
            able = (state.jobs[job] for job in over.intersection(jobs) - state.started.keys())
            by_queue.setdefault(path, []).extend(one for one in able if one.ask.may_stop)
    for path, rows in by_queue.items():
        queue = state.queues.row[path]
        if rows and borrowed(state, queue, state.used[queue]) > mine:
            rows.sort(key=lambda r: (-r.ask.priority, r.started_at, r.ask.id))
            yield path, rows


def _may_share(state: State, row: LiveJob) -> bool:
    """Whether a job would borrow: for one that a promise covers ``LeastCost`` takes all that none covers."""
    able = not row.ask.opportunistic and row.ask.queue in state.queues.row
    return able and promise_level(state, row) == UNCOVERED


def _may_take(state: State, row: LiveJob) -> bool:
    """Whether ``FairBorrowing`` could find a victim."""
    if stops(state, row):
        return True
    if not _may_share(state, row):
        return False
    mine = _share_with(state, row)
    paths = {path for (path, _), jobs in state.running.items() if jobs and path != row.ask.queue}
    rows = (state.queues.row[path] for path in paths if path in state.queues.row)
    return any(borrowed(state, queue, state.used[queue]) > mine for queue in rows)


def kueue() -> Profile:
    """Who borrows least comes first; borrowed devices are taken back, and shared evenly by those who borrow."""
    return Profile(
        name="kueue",
        order=LeastBorrowed(),
        division=LimitsOnly(),
        placer=Fit(),
        victims=FairBorrowing(),
        stops=_may_take,
        block="none",
        victim_sets_max=1,
        vain_max=4,
        starve_s=STARVE_S,
        promises=True,
    )
