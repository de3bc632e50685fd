"""Capacity by queue with proportional reclaim (YARN): most under-served first, user limits, excess taken back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from rota.cluster.core.admission import amount
from rota.cluster.core.capacity import CPU, GPU, MEM, UNLIMITED
from rota.cluster.core.jobs import LiveJob, Wait
from rota.cluster.core.preemption import choose_victims, lost_gpu_s, lower_in_queue
from rota.cluster.core.profile import Placer, Profile, Rank, Victim
from rota.cluster.core.promises import UNCOVERED
from rota.cluster.core.quota import QueueDemand, ReclaimRules, reclaim
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.basic import STARVE_S, Fit, LimitsOnly
from rota.cluster.policies.default import of_queue, share_rank
from rota.spec.reasons import Reason

ROOT = "(cluster)"
SHARED = (GPU, CPU, MEM)
"""Dimensions of which the dominant one counts."""


@dataclass(frozen=True, slots=True)
class MostUnderServed:
    """What queues are promised first, then lowest used over guaranteed, of the resource of which that is most.

    Of queues that are served alike those of higher priority come first; inside a queue priority, then arrival.
    """

    by_job = False

    def rank(self, state: State, row: LiveJob, now: float) -> Rank:
        """Level of the promise, used over guaranteed, minus the priorities of the queue and of the job."""
        queue = state.queues.row.get(row.ask.queue)
        tier = 0 if queue is None else -state.queues.rows[queue].priority
        return (*of_queue(state, row, now, served_rank), tier, -row.ask.priority)


def served_rank(state: State, speaker: LiveJob) -> tuple[int, float]:
    """Which promise covers the next job of a queue, and used over guaranteed of the dominant resource."""
    level, share = share_rank(state, speaker)
    queue = state.queues.row.get(speaker.ask.queue)
    if queue is None or 0 < level < UNCOVERED:
        return (level, share)
    promised, used = state.queues.guaranteed[queue], state.used[queue]
    parts = [float(used[dim] / promised[dim]) for dim in SHARED if promised[dim]]
    return (level, max(parts) if parts else share)


@dataclass(frozen=True, slots=True)
class WithinUserLimit:
    """No queue passes its limit, and no user in a leaf the part that others leave, where the queue states one.

    A user may have ``max(use / users, min_user_percent of use)``, at most ``user_limit_factor`` times the guarantee;
    ``use`` is that of the queue with the job, at least its guarantee, ``users`` are those that run or wait there. The
    first job of a user starts whatever it asks. Source: the capacity scheduler of Hadoop YARN, user limits.
    """

    def verdict(self, state: State, row: LiveJob) -> Wait | None:
        """As ``LimitsOnly``; then ``USER_LIMIT`` with the part that others leave to the user."""
        wait = LimitsOnly().verdict(state, row)
        if wait is not None or not state.queues.divided_by_user(row.ask.queue):
            return wait
        queue = state.queues.row[row.ask.queue]
        has, need = used_by_user(state, queue, row.ask.user), state.queues.need(row.ask.shape)
        for dim in SHARED:
            most = user_limit(state, queue, dim, int(need[dim]))
            if need[dim] and has[dim] and has[dim] + need[dim] > most:
                asked, name = int(need[dim]), state.queues.dims[dim]
                return Wait(
                    reason=Reason.USER_LIMIT,
                    text=f"In queue {row.ask.queue} user {row.ask.user} has {amount(name, int(has[dim]))} of "
                    f"{amount(name, most)} that others leave; the job asks {amount(name, asked)}.",
                    fields={"queue": row.ask.queue, "dim": name, "used": int(has[dim]), "asked": asked, "limit": most},
                )
        return None


def used_by_user(state: State, queue: int, user: str) -> list[int]:
    """What the jobs of a user hold in a leaf that divides by user."""
    used = state.used_by.get((queue, user))
    return [0] * len(state.queues.dims) if used is None else used.tolist()


def user_limit(state: State, queue: int, dim: int, need: int = 0) -> int:
    """What one user may have of a leaf in this dimension once ``need`` more is in use there."""
    tree = state.queues
    stated, promised = tree.rows[queue], int(tree.guaranteed[queue, dim])
    use = max(int(state.used[queue, dim]) + need, promised)
    users = len(state.users.get(stated.path, ()))
    percent = 100.0 if stated.min_user_percent is None else stated.min_user_percent
    part = max(1 / max(users, 1), percent / 100)
    most = use * part
    if stated.user_limit_factor is not None and promised:
        most = min(most, promised * stated.user_limit_factor)
    return int(most)


@dataclass(frozen=True, slots=True)
class Proportional:
    """Stop jobs of queues that, by the proportional rule over the whole tree, should give something back.

    The rule holds for each resource that is asked and promised. A queue loses nothing to one of lower priority, where
    their lines part. After them come, in the queue itself, jobs of lower priority, then those of users beyond their
    limit for one below it.

    Whole gangs are taken, so a queue may give more than the number; the set is the smallest in cost that makes room.
    """

    rules: ReclaimRules = field(default_factory=ReclaimRules)

    def victims(self, state: State, txn: Txn, row: LiveJob, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        """The set of least cost among them, None if no set makes room or the job is opportunistic."""
        if row.ask.opportunistic:
            return None
        need, promised = state.queues.need(row.ask.shape), state.queues.guaranteed
        kept: list[tuple[LiveJob, Reason]] = []
        for dim in (*state.queues.device_dims, CPU, MEM):
            if need[dim] and (dim == GPU or promised[:, dim].any()):
                kept += ((other, Reason.PREEMPTED_RECLAIM) for other in self._giving(state, row, dim, now))
        kept = list({other.ask.id: (other, reason) for other, reason in kept}.values())
        kept += ((other, Reason.PREEMPTED_PRIORITY) for other in lower_in_queue(state, row, now))
        kept += ((other, Reason.PREEMPTED_RECLAIM) for other in beyond_user_limit(state, row))
        return choose_victims(state, txn, row, placer, kept, now) if kept else None

    def _giving(self, state: State, row: LiveJob, dim: int, now: float) -> Iterator[LiveJob]:
        """Jobs of other queues that should give some of a resource back: of the lowest queues, the lowest first."""
        giving = reclaim(queue_uses(state, dim), self.rules)
        rows = [
            state.jobs[job]
            for (queue, _), jobs in state.running.items()
            if queue != row.ask.queue and giving.get(queue, Fraction(0)) > 0 and _may_lose(state, queue, row.ask.queue)
            for job in jobs
        ]
        rows = [other for other in rows if other.ask.may_stop]
        tiers = {path: state.queues.rows[state.queues.row[path]].priority for path in giving}
        rows.sort(
            key=lambda r: (
                tiers[r.ask.queue],
                r.ask.priority,
                not r.ask.spare,
                lost_gpu_s(state, r.ask.id, now),
                -r.started_at,
                r.ask.id,
            )
        )
        for other in rows:
            if giving[other.ask.queue] > 0:
                giving[other.ask.queue] -= int(state.queues.need(other.ask.shape)[dim])
                yield other


def _may_lose(state: State, path: str, to: str) -> bool:
    """Whether a queue has no higher priority than another one, at the first level at which they differ."""
    tree = state.queues
    pairs = zip(reversed(tree.line_of(path)), reversed(tree.line_of(to)))
    parted = next(((a, b) for a, b in pairs if a != b), None)
    return parted is None or tree.rows[parted[0]].priority <= tree.rows[parted[1]].priority


def beyond_user_limit(state: State, row: LiveJob) -> Iterator[LiveJob]:
    """In the queue of a job whose user stays within its limit: jobs of users that pass theirs, the newest first.

    None of higher priority, and of each user only as much as it is beyond.
    """
    if not state.queues.divided_by_user(row.ask.queue):
        return
    queue, need = state.queues.row[row.ask.queue], state.queues.need(row.ask.shape)
    most = user_limit(state, queue, GPU)
    if used_by_user(state, queue, row.ask.user)[GPU] + int(need[GPU]) > most:
        return
    over = {user: int(used[GPU]) - most for (at, user), used in state.used_by.items() if at == queue}
    rows = [
        state.jobs[job]
        for (path, priority), jobs in state.running.items()
        if path == row.ask.queue and priority == row.ask.priority
        for job in jobs
    ]
    for other in sorted(rows, key=lambda r: (-r.started_at, r.ask.id)):
        gives = int(state.queues.need(other.ask.shape)[GPU])
        if other.ask.may_stop and over.get(other.ask.user, 0) >= gives > 0:
            over[other.ask.user] -= gives
            yield other


def queue_uses(state: State, dim: int = GPU) -> list[QueueDemand]:
    """The queue tree in one resource under one root, the cluster; what jobs have claimed counts as reserved."""
    tree = state.queues
    pending, reserved = [0] * len(tree.rows), [0] * len(tree.rows)
    for key, line in state.lines.items():
        if key.queue in tree.row:
            pending[tree.row[key.queue]] += int(tree.need(key.shape)[dim]) * len(line)
    for job in state.claimed:
        ask = state.jobs[job].ask
        reserved[tree.row[ask.queue]] += int(tree.need(ask.shape)[dim])
    total = Fraction(_total(state, dim))
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
                reserved=Fraction(reserved[row]),
                preemptible=queue.preemptible,
                priority=queue.priority,
            )
        )
    return uses


def _total(state: State, dim: int) -> int:
    if dim in (CPU, MEM):
        return int(state.capacity[dim])
    there = (state.dev_health == 0) & ((dim == GPU) | (state.dev_type == dim - state.queues.device_dims[1]))
    return 1000 * int(there.sum())


def yarn() -> Profile:
    """Most under-served queue first, users kept within limits, excess taken back in proportion."""
    return Profile(
        name="yarn",
        order=MostUnderServed(),
        division=WithinUserLimit(),
        placer=Fit(),
        victims=Proportional(),
        block="none",
        victim_sets_max=1,
        vain_max=4,
        starve_s=STARVE_S,
        promises=True,
    )
