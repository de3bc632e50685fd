"""KAI policy: fair shares by guarantee, tier and weight over the queue tree; consolidation, reclaim, preemption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from typing import Literal, cast

import numpy as np

from rota.cluster.core.capacity import CPU, GPU, MEM, UNLIMITED, Vector
from rota.cluster.core.jobs import LiveJob, Wait
from rota.cluster.core.preemption import make_room
from rota.cluster.core.profile import Placer, Profile, Rank, Victim
from rota.cluster.core.promises import top_of
from rota.cluster.core.quota import ShareRequest, fair_shares
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.basic import STARVE_S, Fit, LimitsOnly
from rota.spec.ids import JobId
from rota.spec.reasons import Reason
from rota.spec.resources import Health

Action = Literal["consolidate", "reclaim", "preempt"]
DIMS = (GPU, CPU, MEM)
WHOLE = Fraction(1000)
"""One device in thousandths: what is left over of devices is divided in whole ones."""
MOVED_MAX = 16
"""Jobs that one consolidation moves at most."""


_Key = tuple[float, ...]


@dataclass(slots=True)
class ShareBook:
    """Deserved and fair share of every queue in ``DIMS``, taken anew before each pass.

    Cores and memory that a queue is not promised are unlimited; devices that it is not promised are none. A queue
    without a guarantee of its own deserves what those below it do.
    """

    deserved: Vector = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))
    fair: Vector = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))
    bases: list[list[float]] = field(default_factory=list[list[float]])
    """What each queue may count on, in ``DIMS``: the larger of both."""
    seen: tuple[object, ...] = ()
    keys: dict[int, _Key] = field(default_factory=dict[int, "_Key"])

    def follow(self, state: State) -> None:
        """Divide the cluster between the queues by what they use and ask now."""
        tree = state.queues
        asked = used_soon(state)
        for key, line in state.lines.items():
            for queue in tree.line_of(key.queue):
                asked[queue] += tree.need(key.shape)[list(DIMS)] * len(line)
        self.seen = ()
        self.deserved = _deserved(state)
        self.fair = np.zeros_like(self.deserved)
        capacity = _capacity(state)
        tops = [row for row, queue in enumerate(tree.rows) if queue.parent is None]
        for at, dim in enumerate(DIMS):
            self._divide(state, asked, tops, at, dim, Fraction(int(capacity[at])))
        promised = np.where(self.deserved >= UNLIMITED, 0, self.deserved)
        self.bases = np.maximum(promised, self.fair).astype(np.float64).tolist()

    def _divide(self, state: State, asked: Vector, level: Sequence[int], at: int, dim: int, total: Fraction) -> None:
        tree = state.queues
        rows = sorted(level, key=lambda row: tree.born[row])
        claims = {
            str(row): ShareRequest(
                deserved=Fraction(int(self.deserved[row, at])),
                request=Fraction(int(asked[row, at])),
                most=Fraction(int(tree.limit[row, dim])),
                weight=Fraction(tree.rows[row].weight) if dim == GPU else Fraction(1),
                priority=tree.rows[row].priority,
            )
            for row in rows
        }
        shares, _ = fair_shares(total, claims, WHOLE if dim == GPU else None)
        for row in rows:
            self.fair[row, at] = int(shares[str(row)])
            below = [child for child, queue in enumerate(tree.rows) if queue.parent == tree.rows[row].path]
            if below:
                self._divide(state, asked, below, at, dim, shares[str(row)])

    def keys_of(self, state: State) -> dict[int, _Key]:
        """Rank of every queue with waiting jobs among its siblings now."""
        seen = (state.used.tobytes(), len(state.stopping), sum(map(len, state.lines.values())))
        if seen != self.seen:
            self.seen = seen
            self.keys = {}
            heads: dict[int, tuple[int, float, JobId]] = {}
            for key, line in state.lines.items():
                if (leaf := state.queues.row.get(key.queue)) is not None:
                    head = (-key.priority, *line[0])
                    heads[leaf] = min(heads.get(leaf, head), head)
            used = used_soon(state)
            for top, queue in enumerate(state.queues.rows):
                if queue.parent is None:
                    self._note_rank(state, used, heads, top)
        return self.keys

    def _note_rank(
        self, state: State, used: Vector, heads: dict[int, tuple[int, float, JobId]], queue: int
    ) -> JobId | None:
        """Note the key of a queue and of all below it; the job that it would start first, if it has one."""
        tree = state.queues
        below = [c for c, child in enumerate(tree.rows) if child.parent == tree.rows[queue].path]
        first = {child: self._note_rank(state, used, heads, child) for child in below}
        able = [child for child in below if first[child] is not None]
        head = first[min(able, key=lambda c: self.keys[c])] if able else heads.get(queue, (0, 0.0, None))[2]
        if head is not None:
            need = tree.need(state.jobs[head].ask.shape)[list(DIMS)]
            soon = used[queue] + need
            over = bool(((soon > self.fair[queue]) & (need > 0)).any())
            ratios = (self.ratio(queue, used[queue]), self.ratio(queue, soon))
            self.keys[queue] = (-tree.rows[queue].priority, over, *ratios, tree.born[queue])
        return head

    def ratio(self, queue: int, used: Vector) -> float:
        """Largest part of what a queue may count on that ``used`` is; devices beyond nothing count as without end."""
        most = 0.0
        for use, base in zip(used.tolist(), self.bases[queue]):
            if use:
                most = max(most, use / base if base else float("inf"))
        return most


def _deserved(state: State) -> Vector:
    tree = state.queues
    found = np.zeros((len(tree.rows), len(DIMS)), dtype=np.int64)
    for row in sorted(range(len(tree.rows)), key=lambda r: -tree.rows[r].path.count("/")):
        queue = tree.rows[row]
        for at, dim in enumerate(DIMS):
            stated = int(tree.guaranteed[row, dim])
            below = [int(found[c, at]) for c, child in enumerate(tree.rows) if child.parent == queue.path]
            if dim == GPU:
                found[row, at] = sum(below) if queue.guaranteed is None else stated
            else:
                found[row, at] = stated or int(UNLIMITED)
    return np.minimum(found, UNLIMITED)


def _capacity(state: State) -> Vector:
    devices = 1000 * int(((state.dev_health == 0) & state.usable[state.dev_node]).sum())
    healthy = [node for node in state.nodes if node.health is Health.HEALTHY]
    cpu = round(1000 * sum(node.cpus for node in healthy))
    return np.array([devices, cpu, sum(node.memory_bytes for node in healthy)], dtype=np.int64)


def used_soon(state: State) -> Vector:
    """What every queue uses in ``DIMS`` once the jobs that are stopping have let go."""
    used = state.used[:, list(DIMS)].copy()
    for job in state.stopping:
        need = state.queues.need(state.jobs[job].ask.shape)[list(DIMS)]
        for queue in state.queues.line_of(state.jobs[job].ask.queue):
            used[queue] -= need
    return used


@dataclass(frozen=True, slots=True)
class ByShareRatio:
    """From the top of the tree down: the tier, then queues that stay within their fair share, then the least served.

    A queue is judged with the first job of it: by priority inside a leaf, else by the best queue below. The least
    served uses the least part of its share; equal ones by the part that they would use with that job, then by age.
    Source: KAI scheduler, queue order of the proportion plug-in.
    """

    book: ShareBook
    by_job = False

    def rank(self, state: State, row: LiveJob, now: float) -> Rank:
        """Per queue from the top down: tier, whether within its share, used part of it; then minus the priority."""
        keys = self.book.keys_of(state)
        line = state.queues.line_of(row.ask.queue)
        return (*(part for queue in reversed(line) for part in keys.get(queue, ())), -row.ask.priority)


@dataclass(frozen=True, slots=True)
class WithinDeserved:
    """No queue passes its limit; what may not be preempted stays inside what every queue above it deserves."""

    book: ShareBook

    def verdict(self, state: State, row: LiveJob) -> Wait | None:
        """As ``LimitsOnly``; then ``NON_PREEMPTIBLE_OVER_QUOTA`` with the first queue beyond what it deserves."""
        wait = LimitsOnly().verdict(state, row)
        if wait is not None or row.ask.preemptible:
            return wait
        tree = state.queues
        need = tree.need(row.ask.shape)[list(DIMS)]
        lines = {other.ask.id: tree.line_of(other.ask.queue) for other in state.holders() if not other.ask.preemptible}
        for queue in tree.line_of(row.ask.queue):
            fixed = sum(
                (tree.need(state.jobs[job].ask.shape)[list(DIMS)] for job in lines if queue in lines[job]), need
            )
            if (over := (fixed > self.book.deserved[queue]) & (need > 0)).any():
                at = int(over.argmax())
                return Wait(
                    reason=Reason.NON_PREEMPTIBLE_OVER_QUOTA,
                    text=f"Work that may not be preempted would use {fixed[at] / 1000:g} of the "
                    f"{self.book.deserved[queue][at] / 1000:g} that queue {tree.rows[queue].path} deserves.",
                    fields={"queue": tree.rows[queue].path},
                )
        return None


@dataclass(frozen=True, slots=True)
class ShareVictims:
    """Move what can continue elsewhere; take back from queues above their share; preempt lower priority in the queue.

    Taking back keeps the order of the queues: it is allowed from a queue above its fair share, or above what it
    deserves while the own queue stays within that; and never if the own queue would then be above its fair share and
    use a larger part of it than the other did. What is left over goes to higher tiers first, so a lower tier takes
    from a higher one only within what it deserves. Source: KAI scheduler, proportion plug-in, reclaimable.
    """

    book: ShareBook
    actions: tuple[Action, ...] = ("consolidate", "reclaim", "preempt")

    def victims(self, state: State, txn: Txn, row: LiveJob, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        """Those of the first of ``actions`` that makes room, moved ones with their new place; None if none does."""
        for action in self.actions:
            found = None
            if action == "consolidate" and row.ask.preemptible:
                some = islice(self._candidates(state, txn, row, action, now), MOVED_MAX)
                moved = Reason.MIGRATED_AFFINITY
                found = make_room(state, txn, row, placer, some, _none_stopped, moved, now, may_stop=None)
            elif action == "reclaim" and self._may_reclaim(state, row):
                some, rule = self._candidates(state, txn, row, action, now), _Reclaim(self.book, state, row)
                back = Reason.PREEMPTED_RECLAIM
                found = make_room(state, txn, row, placer, some, rule.fair, back, now, may_stop=rule.may_lose)
            elif action == "preempt":
                some = self._candidates(state, txn, row, action, now)
                found = make_room(state, txn, row, placer, some, _any_stopped, Reason.PREEMPTED_PRIORITY, now)
            if found is not None:
                return found
        return None

    def _candidates(self, state: State, txn: Txn, row: LiveJob, action: Action, now: float) -> Iterator[LiveJob]:
        """Running jobs that may be taken: of the queue furthest above its share the least and newest, and so on.

        What started at this very moment stays: the same pass chose it over the job. A queue that is not preemptible
        loses nothing to others.
        """
        by_queue: dict[str, list[LiveJob]] = {}
        for path, jobs in self._running(state, txn, now).items():
            if path == row.ask.queue:
                mine = {"consolidate": jobs, "reclaim": (), "preempt": [r for r in jobs if _below(r, row)]}[action]
            else:
                mine = jobs if action != "preempt" and state.queues.gives_back(path) else ()
            if mine:
                by_queue[path] = list(mine)
        used = used_soon(state)
        ranks = {path: self._excess_rank(state, used, path) for path in by_queue}
        while by_queue:
            path = max(by_queue, key=ranks.__getitem__)
            job = state.jobs[by_queue[path].pop().ask.id]
            if not by_queue[path]:
                del by_queue[path]
            if job.phase != "running":
                continue
            for queue in state.queues.line_of(path):
                used[queue] -= state.queues.need(job.ask.shape)[list(DIMS)]
            ranks |= {
                other: self._excess_rank(state, used, other) for other in by_queue if top_of(other) == top_of(path)
            }
            yield job

    def _running(self, state: State, txn: Txn, now: float) -> dict[str, list[LiveJob]]:
        """By queue, those that may be stopped and ran before now, who is taken first last; found once for a pass."""
        known = cast("dict[str, list[LiveJob]] | None", txn.notes.get(("may stop", now)))
        if known is None:
            known = txn.notes["may stop", now] = dict[str, list[LiveJob]]()
            for (path, _), jobs in state.running.items():
                rows = (state.jobs[job] for job in jobs)
                known.setdefault(path, []).extend(r for r in rows if r.ask.may_stop and r.started_at < now)
            for rows in known.values():
                rows.sort(key=lambda r: (r.ask.spare, -r.ask.priority, r.ask.queued_at, r.ask.id))
        return known

    def _excess_rank(self, state: State, used: Vector, path: str) -> tuple[float, ...]:
        tree = state.queues
        found: list[float] = []
        for queue in reversed(tree.line_of(path)):
            found += [-tree.rows[queue].priority, self.book.ratio(queue, used[queue]), tree.born[queue]]
        return tuple(found)

    def _may_reclaim(self, state: State, row: LiveJob) -> bool:
        queue = state.queues.row[row.ask.queue]
        need = state.queues.need(row.ask.shape)[list(DIMS)]
        return not ((used_soon(state)[queue] + need > self.book.fair[queue]) & (need > 0)).any()


def _none_stopped(stopped: Sequence[LiveJob]) -> bool:
    return not stopped


def _any_stopped(stopped: Sequence[LiveJob]) -> bool:
    return True


def _below(other: LiveJob, row: LiveJob) -> bool:
    return other.ask.priority < row.ask.priority


class _Reclaim:
    """May a job take these devices back? Decided where its queue and that of the victim part in the tree."""

    def __init__(self, book: ShareBook, state: State, row: LiveJob) -> None:
        self.book, self.state = book, state
        self.need = state.queues.need(row.ask.shape)[list(DIMS)]
        self.line = list(reversed(state.queues.line_of(row.ask.queue)))
        self.used = used_soon(state)

    def fair(self, stopped: Sequence[LiveJob]) -> bool:
        """Whether each of these, one after the other, may lose what it holds."""
        left, tree = self.used.copy(), self.state.queues
        for other in stopped:
            theirs = list(reversed(tree.line_of(other.ask.queue)))
            mine, their = next(((a, b) for a, b in zip(self.line, theirs) if a != b), (self.line[-1], theirs[-1]))
            if not self._loses(mine, their, left[their]):
                return False
            for queue in theirs:
                left[queue] -= tree.need(other.ask.shape)[list(DIMS)]
            soon = np.where(self.need > 0, left[mine] + self.need, 0)
            if (soon > self.book.fair[mine]).any() and self.book.ratio(mine, soon) > self.book.ratio(
                their, self.used[their]
            ):
                return False
        return True

    def may_lose(self, other: LiveJob) -> bool:
        """Whether a job might lose what it holds if it were the first; as a later one it has still less to lose."""
        theirs = list(reversed(self.state.queues.line_of(other.ask.queue)))
        mine, their = next(((a, b) for a, b in zip(self.line, theirs) if a != b), (self.line[-1], theirs[-1]))
        return self._loses(mine, their, self.used[their])

    def _loses(self, mine: int, their: int, left: Vector) -> bool:
        tiers = [self.state.queues.rows[queue].priority for queue in (mine, their)]
        if tiers[0] >= tiers[1] and (left > self.book.fair[their]).any():
            return True
        within = not ((self.used[mine] + self.need > self.book.deserved[mine]) & (self.need > 0)).any()
        return within and bool((left > self.book.deserved[their]).any())


def kai() -> Profile:
    """Fair share by guarantee, tier and weight; what can move is moved, what is above its share gives back."""
    book = ShareBook()
    return Profile(
        name="kai",
        order=ByShareRatio(book),
        division=WithinDeserved(book),
        placer=Fit(close=False),
        victims=ShareVictims(book),
        block="none",
        prepare=book.follow,
        remember=False,
        starve_s=STARVE_S,
        promises=True,
    )
