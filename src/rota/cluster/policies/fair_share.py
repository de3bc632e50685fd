"""Fair shares among queues: DRF, borrowing in a cohort (Kueue), capacity with proportional reclaim (YARN)."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from rota.cluster.core.capacity import CPU, GPU, MEM, UNLIMITED
from rota.cluster.core.jobs import JobRow
from rota.cluster.core.preemption import choose_victims, lost_gpu_s
from rota.cluster.core.profile import Placer, Profile, Rank, Victim
from rota.cluster.core.quota import QueueDemand, ReclaimRules, borrowing_share, reclaim
from rota.cluster.core.state import State, Txn
from rota.cluster.policies.basic import Fit, LimitsOnly
from rota.cluster.policies.default import LeastCost, share_rank, stops
from rota.spec.reasons import Reason


@dataclass(frozen=True, slots=True)
class LowestDominantShare:
    """From the top of the tree down, the queue of the lowest dominant share over its weight comes first.

    Gangs are not divisible: one that does not fit is skipped and does not block. Source: DRF (NSDI'11), hierarchical
    form of H-DRF without its rescaling.
    """

    by_job = False

    def rank(self, state: State, row: JobRow, now: float) -> Rank:
        line = state.queues.line_of(row.ask.queue)
        return tuple(dominant_share(state, queue) for queue in reversed(line))


def dominant_share(state: State, queue: int) -> float:
    """Largest part of the cluster that a queue uses, over its weight; resources that do not exist do not count."""
    used = state.used[queue, [GPU, CPU, MEM]]
    parts = np.divide(used, state.capacity, out=np.zeros(3), where=state.capacity > 0)
    return float(parts.max()) / max(state.queues.rows[queue].weight, 1e-9)


def drf() -> Profile:
    """Lowest dominant share first, best fit, no job is stopped."""
    return Profile(name="drf", order=LowestDominantShare(), division=LimitsOnly(), placer=Fit())


@dataclass(frozen=True, slots=True)
class LeastBorrowed:
    """The queue that would borrow least with the job comes first; then priority."""

    by_job = False

    def rank(self, state: State, row: JobRow, now: float) -> Rank:
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


ROOT = "(cluster)"


@dataclass(frozen=True, slots=True)
class MostUnderServed:
    """What queues are promised first, then lowest used over guaranteed; by priority and arrival inside a queue."""

    by_job = False

    def rank(self, state: State, row: JobRow, now: float) -> Rank:
        return (*share_rank(state, row, now), -row.ask.priority)


@dataclass(frozen=True, slots=True)
class Proportional:
    """Stop jobs only of queues that, by the proportional rule over the whole tree, should give something back.

    Whole gangs are taken, so a queue may give more than the number; the set is the smallest in cost that makes room.
    """

    rules: ReclaimRules = field(default_factory=ReclaimRules)

    def victims(self, state: State, txn: Txn, row: JobRow, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        if row.ask.opportunistic:
            return None
        giving = reclaim(queue_uses(state), self.rules)
        candidates = [
            other
            for other in state.jobs.values()
            if other.phase == "running"
            and other.ask.may_stop
            and other.ask.queue != row.ask.queue
            and giving.get(other.ask.queue, Fraction(0)) > 0
        ]
        candidates.sort(
            key=lambda r: (r.ask.priority, not r.ask.spare, lost_gpu_s(state, r.ask.id, now), -r.started_at, r.ask.id)
        )
        kept: list[tuple[JobRow, Reason]] = []
        for other in candidates:
            if giving[other.ask.queue] > 0:
                giving[other.ask.queue] -= other.ask.shape.gpu_milli
                kept.append((other, Reason.PREEMPTED_RECLAIM))
        return choose_victims(state, txn, row, placer, kept, now)


def queue_uses(state: State) -> list[QueueDemand]:
    """The queue tree in thousandths of devices, under one root that is the cluster."""
    tree = state.queues
    pending = [0] * len(tree.rows)
    for key, line in state.lines.items():
        if key.queue in tree.row:
            pending[tree.row[key.queue]] += key.shape.gpu_milli * len(line)
    total = Fraction(1000 * int((state.dev_health == 0).sum()))
    uses = [QueueDemand(name=ROOT, parent=None, guaranteed=total, limit=total, used=Fraction(0), pending=Fraction(0))]
    for row, queue in enumerate(tree.rows):
        limit = int(tree.limit[row, GPU])
        uses.append(
            QueueDemand(
                name=queue.path,
                parent=queue.parent or ROOT,
                guaranteed=Fraction(int(tree.guaranteed[row, GPU])),
                limit=total if limit >= UNLIMITED else Fraction(limit),
                used=Fraction(int(state.used[row, GPU])),
                pending=Fraction(pending[row]),
                preemptible=queue.preemptible,
            )
        )
    return uses


def yarn() -> Profile:
    """Most under-served queue first, excess taken back in proportion."""
    return Profile(
        name="yarn", order=MostUnderServed(), division=LimitsOnly(), placer=Fit(), victims=Proportional(), block="none"
    )
