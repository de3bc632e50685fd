"""Fair shares among queues: DRF, borrowing in a cohort (Kueue), capacity with proportional reclaim (YARN)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from rota.cluster.core.capacity import CPU, GPU, MEM, UNLIMITED
from rota.cluster.core.jobs import LiveJob
from rota.cluster.core.preemption import choose_victims, lost_gpu_s, lower_in_queue
from rota.cluster.core.profile import Placer, Profile, Rank, Victim
from rota.cluster.core.promises import UNCOVERED
from rota.cluster.core.quota import QueueDemand, ReclaimRules, borrowing_share, reclaim
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.basic import STARVE_S, Fit, LimitsOnly
from rota.cluster.policies.default import LeastCost, first_of, of_queue, share_rank, stops
from rota.spec.reasons import Reason


@dataclass(frozen=True, slots=True)
class LowestDominantShare:
    """From the top of the tree down, the queue of the lowest dominant share over its weight comes first.

    Inside a queue priority, then arrival. Gangs are not divisible: one that does not fit is skipped and does not block.
    Source: DRF (NSDI'11), hierarchical form of H-DRF without its rescaling.
    """

    by_job = False

    def rank(self, state: State, row: LiveJob, now: float) -> Rank:
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
        if row.ask.queue not in state.queues.row:
            return (0, -row.ask.priority)
        return (*of_queue(state, row, now, borrowed_rank), -row.ask.priority)


def borrowed_rank(state: State, row: LiveJob, now: float) -> tuple[int, float]:
    """Which promise covers the next job of a queue, and what the queue would borrow with it, in thousandths."""
    tree = state.queues
    queue, first = tree.row[row.ask.queue], first_of(state, row, now)
    used = {"gpu": Fraction(int(state.used[queue, GPU]) + first.ask.shape.gpu_milli)}
    lendable = {"gpu": Fraction(int(tree.guaranteed[tree.leaf, GPU].sum()))}
    nominal = {"gpu": Fraction(int(tree.guaranteed[queue, GPU]))}
    share = borrowing_share(nominal, lendable, used, Fraction(tree.rows[queue].weight))
    level, since = share_rank(state, row, now)
    return (level, since if 0 < level < UNCOVERED else share.share_permille)


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
        starve_s=STARVE_S,
        promises=True,
    )


ROOT = "(cluster)"


@dataclass(frozen=True, slots=True)
class MostUnderServed:
    """What queues are promised first, then lowest used over guaranteed; by priority and arrival inside a queue."""

    by_job = False

    def rank(self, state: State, row: LiveJob, now: float) -> Rank:
        return (*of_queue(state, row, now, share_rank), -row.ask.priority)


@dataclass(frozen=True, slots=True)
class Proportional:
    """Stop jobs of queues that, by the proportional rule over the whole tree, should give something back.

    After them come jobs of lower priority in the queue itself.

    Whole gangs are taken, so a queue may give more than the number; the set is the smallest in cost that makes room.
    """

    rules: ReclaimRules = field(default_factory=ReclaimRules)

    def victims(self, state: State, txn: Txn, row: LiveJob, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        if row.ask.opportunistic:
            return None
        need = state.queues.need(row.ask.shape)
        kept: list[tuple[LiveJob, Reason]] = []
        for dim in state.queues.device_dims:
            if need[dim] and (dim == GPU or state.queues.guaranteed[:, dim].any()):
                kept += ((other, Reason.PREEMPTED_RECLAIM) for other in self._giving(state, row, dim, now))
        kept = list({other.ask.id: (other, reason) for other, reason in kept}.values())
        kept += ((other, Reason.PREEMPTED_PRIORITY) for other in lower_in_queue(state, row, now))
        return choose_victims(state, txn, row, placer, kept, now) if kept else None

    def _giving(self, state: State, row: LiveJob, dim: int, now: float) -> Iterator[LiveJob]:
        """Jobs of other queues that should give devices back, of a type or of any: the lowest and cheapest first."""
        giving = reclaim(queue_uses(state, dim), self.rules)
        rows = [
            state.jobs[job]
            for (queue, _), jobs in state.running.items()
            if queue != row.ask.queue and giving.get(queue, Fraction(0)) > 0
            for job in jobs
        ]
        rows = [other for other in rows if other.ask.may_stop]
        rows.sort(
            key=lambda r: (r.ask.priority, not r.ask.spare, lost_gpu_s(state, r.ask.id, now), -r.started_at, r.ask.id)
        )
        for other in rows:
            if giving[other.ask.queue] > 0:
                giving[other.ask.queue] -= int(state.queues.need(other.ask.shape)[dim])
                yield other


def queue_uses(state: State, dim: int = GPU) -> list[QueueDemand]:
    """The queue tree in thousandths of devices, of any type or of that of ``dim``, under one root: the cluster."""
    tree = state.queues
    pending = [0] * len(tree.rows)
    for key, line in state.lines.items():
        if key.queue in tree.row:
            pending[tree.row[key.queue]] += int(tree.need(key.shape)[dim]) * len(line)
    there = (state.dev_health == 0) & ((dim == GPU) | (state.dev_type == dim - tree.device_dims[1]))
    total = Fraction(1000 * int(there.sum()))
    uses = [QueueDemand(name=ROOT, parent=None, guaranteed=total, limit=total, used=Fraction(0), pending=Fraction(0))]
    for row, queue in enumerate(tree.rows):
        limit = int(tree.limit[row, dim])
        uses.append(
            QueueDemand(
                name=queue.path,
                parent=queue.parent or ROOT,
                guaranteed=Fraction(int(tree.guaranteed[row, dim])),
                limit=total if limit >= UNLIMITED else Fraction(limit),
                used=Fraction(int(state.used[row, dim])),
                pending=Fraction(pending[row]),
                preemptible=queue.preemptible,
            )
        )
    return uses


def yarn() -> Profile:
    """Most under-served queue first, excess taken back in proportion."""
    return Profile(
        name="yarn",
        order=MostUnderServed(),
        division=LimitsOnly(),
        placer=Fit(),
        victims=Proportional(),
        block="none",
        starve_s=STARVE_S,
        promises=True,
    )
