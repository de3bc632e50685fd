"""Priority, then fair share; borrow what is idle, take it back at least cost; backfill before reservations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from rota.cluster.core.capacity import GPU
from rota.cluster.core.jobs import JobRow, Wait
from rota.cluster.core.preemption import choose_victims, lost_gpu_s
from rota.cluster.core.profile import Placer, Profile, Rank, Victim
from rota.cluster.core.state import State, Txn
from rota.cluster.policies.basic import Fit, LimitsOnly
from rota.spec.ids import JobId
from rota.spec.reasons import Reason


@dataclass(frozen=True, slots=True)
class PriorityThenShare:
    """What queues are promised first; then highest priority; then the queue that uses least of its guarantee."""

    by_job = False

    def rank(self, state: State, row: JobRow, now: float) -> Rank:
        beyond, share = share_rank(state, row, now)
        return (beyond, -row.ask.priority, share)


def share_rank(state: State, row: JobRow, now: float) -> tuple[bool, float]:
    """Whether the queue of a job asks more devices than it is promised, and used over guaranteed devices.

    The first of its waiting jobs whose time has come speaks for all. A queue that is promised nothing has 1 plus used
    over weight: after the others.
    """
    tree = state.queues
    queue = tree.row.get(row.ask.queue)
    if queue is None:
        return (False, 0.0)
    used, guaranteed = int(state.used[queue, GPU]), int(tree.guaranteed[queue, GPU])
    first = row
    for _, _, job in state.asking.get(row.ask.queue, ()):
        if (one := state.jobs[job]).begins_at <= now:
            first = one
            break
    share = used / guaranteed if guaranteed else 1.0 + used / 1000 / max(tree.rows[queue].weight, 1e-9)
    return (used + first.ask.shape.gpu_milli > guaranteed, share)


@dataclass(frozen=True, slots=True)
class LimitsAndGuarantee:
    """No queue passes its limit; work that may not be preempted must fit into the guarantee, where there is one."""

    def verdict(self, state: State, row: JobRow) -> Wait | None:
        wait = LimitsOnly().verdict(state, row)
        if wait is not None or row.ask.preemptible:
            return wait
        tree = state.queues
        queue = tree.row[row.ask.queue]
        guaranteed, need = int(tree.guaranteed[queue, GPU]), int(tree.need(row.ask.shape)[GPU])
        if guaranteed and need and int(state.used[queue, GPU]) + need > guaranteed:
            return Wait(
                reason=Reason.NON_PREEMPTIBLE_OVER_QUOTA,
                text=f"{state.used[queue, GPU] / 1000:g} of {guaranteed / 1000:g} guaranteed gpus are in use.",
                fields={"queue": row.ask.queue},
            )
        return None


_Entry = tuple[bool, float, float, JobId]
"""Not to be spared, what stopping it loses, how new it is, and who."""


@dataclass(frozen=True, slots=True)
class LeastCost:
    """Opportunistic work first, then borrowed, then lower priority of the same queue; never what may not be preempted.

    A queue takes back only while it stays inside its guarantee, and only from queues that are above theirs; a queue
    that is not preemptible loses nothing. ``min_runtime_s`` protects fresh jobs, so that idle rounds change nothing.
    """

    restart_s: float = 60.0
    min_runtime_s: float = 0.0

    def victims(self, state: State, txn: Txn, row: JobRow, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        if row.ask.opportunistic:
            return None
        entitled = self._inside_guarantee(state, row)
        over = self._spare(state) if entitled else {}
        found: list[tuple[int, int, bool, float, float, JobId]] = []
        # The lowest priority of a queue comes first: it counts first towards what the queue has above its promise.
        for queue, priority in sorted(state.running):
            kind = self._kind(row, queue, priority, entitled and over.get(queue, 0) > 0)
            if kind is None:
                continue
            able = ((kind, priority, *one) for one in self._able(state, txn, (queue, priority), now))
            if kind != 1:
                found += able
                continue
            for entry in able:
                # The last victim may take a queue below its excess, no further one may.
                if over[queue] <= 0:
                    break
                over[queue] -= state.jobs[entry[-1]].ask.shape.gpu_milli
                found.append(entry)
        reasons = (Reason.PREEMPTED_RECLAIM, Reason.PREEMPTED_RECLAIM, Reason.PREEMPTED_PRIORITY)
        kept = [(state.jobs[entry[-1]], reasons[entry[0]]) for entry in sorted(found)]
        return choose_victims(state, txn, row, placer, kept, now, restart_s=self.restart_s) if kept else None

    def _able(self, state: State, txn: Txn, group: tuple[str, int], now: float) -> Iterator[_Entry]:
        """Who runs in a queue at a priority and may be stopped, the cheapest first; put in order once for a pass."""
        known = cast("list[_Entry] | None", txn.notes.get((self, now, *group)))
        if known is None:
            rows = [state.jobs[job] for job in state.running[group]]
            known = txn.notes[self, now, *group] = sorted(
                (not row.ask.spare, lost_gpu_s(state, row.ask.id, now, self.restart_s), -row.started_at, row.ask.id)
                for row in rows
                if row.ask.may_stop and now - row.started_at >= self.min_runtime_s
            )
        running = state.running[group]
        return (one for one in known if one[-1] in running)

    def _kind(self, row: JobRow, queue: str, priority: int, lends: bool) -> int | None:
        """0 opportunistic, 1 borrowed by another queue, 2 lower priority of this queue, None = safe."""
        if priority < 0:
            return 0
        if queue != row.ask.queue:
            return 1 if lends else None
        return 2 if priority < row.ask.priority else None

    def _spare(self, state: State) -> dict[str, int]:
        """Thousandths of devices that each preemptible queue uses above its guarantee."""
        tree = state.queues
        return {
            queue.path: int(state.used[row, GPU] - tree.guaranteed[row, GPU])
            for row, queue in enumerate(tree.rows)
            if tree.leaf[row] and tree.gives_back(queue.path)
        }

    def _inside_guarantee(self, state: State, row: JobRow) -> bool:
        tree = state.queues
        queue = tree.row[row.ask.queue]
        need = int(tree.need(row.ask.shape)[GPU])
        return bool(need) and int(state.used[queue, GPU]) + need <= int(tree.guaranteed[queue, GPU])


def stops(state: State, row: JobRow) -> bool:
    """Whether ``LeastCost`` could find a victim: lower work of the own queue, opportunistic, or lent by a promise."""
    tree = state.queues
    queue = tree.row[row.ask.queue]
    back = sum(
        state.jobs[job].ask.shape.gpu_milli for job in state.stopping if state.jobs[job].ask.queue == row.ask.queue
    )
    promised = state.used[queue, GPU] - back + row.ask.shape.gpu_milli <= tree.guaranteed[queue, GPU]
    return bool(promised) or any(
        jobs and (priority < 0 or (path == row.ask.queue and priority < row.ask.priority))
        for (path, priority), jobs in state.running.items()
    )


def default() -> Profile:
    """What a shared cluster wants: guarantees kept, idle devices lent, gangs not starved."""
    return Profile(
        name="default",
        order=PriorityThenShare(),
        division=LimitsAndGuarantee(),
        placer=Fit(),
        victims=LeastCost(),
        stops=stops,
        block="reserve",
        victim_sets_max=1,
    )
