"""Weighted shares: by borrowing in a cohort (Kueue), and by deserved share, tier and weight (KAI)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rota.cluster.core.plugins import Placer, Profile, Victim
from rota.cluster.core.preemption import choose_victims, lost_gpu_s
from rota.cluster.core.quota import GPU
from rota.cluster.core.shares import Claim, borrowing_share, fair_shares
from rota.cluster.core.snapshot import JobRow, State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.default import LeastCost, LimitsAndGuarantee
from rota.cluster.policies.fifo import Fit, LimitsOnly
from rota.spec.reasons import Reason


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


def fair_gpu_shares(state: State) -> dict[str, Fraction]:
    """Fair share of every leaf queue in thousandths of devices, from guarantees, weights and what is asked now."""
    tree = state.queues
    asked = {path: int(state.used[row, GPU]) for path, row in tree.row.items() if tree.leaf[row]}
    for key, line in state.lines.items():
        if key.queue in asked:
            asked[key.queue] += key.shape.gpu_milli * len(line)
    claims = {
        path: Claim(
            deserved=Fraction(int(tree.guaranteed[tree.row[path], GPU])),
            request=Fraction(asked[path]),
            most=Fraction(int(tree.limit[tree.row[path], GPU])),
            weight=Fraction(tree.rows[tree.row[path]].weight),
        )
        for path in asked
    }
    return fair_shares(Fraction(1000 * int((state.dev_health == 0).sum())), claims)[0]


@dataclass(frozen=True, slots=True)
class ByFairShare:
    """Lowest used over fair share first; then priority."""

    by_job = False

    def rank(self, state: State, row: JobRow, now: float) -> tuple[Any, ...]:
        queue = state.queues.row.get(row.ask.queue)
        used = int(state.used[queue, GPU]) if queue is not None else 0
        guaranteed = int(state.queues.guaranteed[queue, GPU]) if queue is not None else 0
        over = used + row.ask.shape.gpu_milli > guaranteed
        weight = state.queues.rows[queue].weight if queue is not None else 1.0
        return (over, used / max(guaranteed, 1) if not over else used / max(weight, 1e-9), -row.ask.priority)


def _preemptible(state: State, queue: str) -> bool:
    return all(state.queues.rows[row].preemptible for row in state.queues.line_of(queue))


@dataclass(frozen=True, slots=True)
class FromAboveFairShare:
    """Take back from queues above their fair share while the own one stays within its own; else lower priority."""

    def victims(self, state: State, txn: Txn, row: JobRow, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        shares = fair_gpu_shares(state)
        tree = state.queues
        mine = tree.row[row.ask.queue]
        within = int(state.used[mine, GPU]) + row.ask.shape.gpu_milli <= shares.get(row.ask.queue, Fraction(0))
        over = {path: int(state.used[tree.row[path], GPU]) - share for path, share in shares.items()}
        found: list[tuple[JobRow, Reason]] = []
        order = sorted(state.jobs.values(), key=lambda r: (r.ask.priority, lost_gpu_s(r, now), -r.started_at, r.ask.id))
        for other in order:
            if other.phase != "running" or not other.ask.preemptible:
                continue
            if other.ask.queue == row.ask.queue:
                if other.ask.priority < row.ask.priority:
                    found.append((other, Reason.PREEMPTED_PRIORITY))
            elif within and over.get(other.ask.queue, Fraction(0)) > 0 and _preemptible(state, other.ask.queue):
                over[other.ask.queue] -= other.ask.shape.gpu_milli
                found.append((other, Reason.PREEMPTED_RECLAIM))
        return choose_victims(state, txn, row, placer, found, now)


def kueue() -> Profile:
    """Who borrows least comes first; borrowed devices are taken back."""
    return Profile(
        name="kueue", order=LeastBorrowed(), division=LimitsOnly(), placer=Fit(), victims=LeastCost(), block="none"
    )


def kai() -> Profile:
    """Fair share by guarantee, tier and weight; reclaim from queues above theirs."""
    return Profile(
        name="kai",
        order=ByFairShare(),
        division=LimitsAndGuarantee(),
        placer=Fit(),
        victims=FromAboveFairShare(),
        block="none",
    )
