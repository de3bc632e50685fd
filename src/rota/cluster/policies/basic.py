"""Basic policies: by arrival, by service, by remaining time; best fit, spread or random; static partitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol, cast
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rota.cluster.core.admission import amount, limit_reason
from rota.cluster.core.capacity import GPU
from rota.cluster.core.jobs import Allocations, LiveJob, Wait
from rota.cluster.core.placement import PREFERENCES, Manner, near_data, place
from rota.cluster.core.preemption import enough_of, lost_gpu_s, missing_milli
from rota.cluster.core.profile import Placer, Profile, QueueOrder, Rank, Victim
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId
from rota.spec.mixing import GOLDEN, mix64
from rota.spec.reasons import Reason
from rota.spec.resources import counted


@dataclass(frozen=True, slots=True)
class ByArrival:
    """Highest priority first, then longest queued, then id."""

    by_job = False

    def rank(self, state: State, row: LiveJob, now: float) -> Rank:
        """Minus the priority; queue time and id decide between equals."""
        return (-row.ask.priority,)


@dataclass(frozen=True, slots=True)
class LimitsOnly:
    """A job may start as long as no queue of its line, and no user in one, passes a limit."""

    def verdict(self, state: State, row: LiveJob) -> Wait | None:
        """``QUOTA_LIMIT`` or ``USER_LIMIT`` with the first limit that the job would pass, and its numbers."""
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

    def place(self, state: State, txn: Txn, row: LiveJob) -> Allocations | None:
        """A place by the preference of ``manner``, near the data of the job where it has some; None if none fits."""
        prefer = PREFERENCES[self.manner]
        if row.ask.data:
            prefer = near_data(prefer, state.holds_data(row.ask))
        return place(state, txn, row.ask.shape, prefer=prefer, close=self.close)


STARVE_S = 4 * 3600.0
"""Age bound of policies that would let small jobs pass a large one for ever."""
STARVE_BY_SERVICE_S = 24 * 3600.0
"""Age bound of policies that put long work behind short work on purpose."""


def fifo() -> Profile:
    """Strict order inside a queue: nothing starts before the first of its queue."""
    return Profile(
        name="fifo", order=ByArrival(), division=LimitsOnly(), placer=Fit(), block="queue", starve_s=STARVE_S
    )


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What SplitMix64 gives at each of these steps from 0."""
    return mix64(numbers * np.uint64(GOLDEN))


@dataclass(frozen=True, slots=True)
class RandomFit:
    """Random placement: every bundle goes to any node that has room, all alike.

    Which one follows from the seed, the job and the bundle, so that a trial and the start after it agree.
    """

    seed: int = 0

    def place(self, state: State, txn: Txn, row: LiveJob) -> Allocations | None:
        """The same place for the same seed, job and nodes; None if none fits."""
        job = mixed(np.array([self.seed % 2**64], dtype=np.uint64)) ^ np.uint64(crc32(row.ask.id.encode()))
        bundle = count()

        def drawn(state: State, nodes: NDArray[np.int32]) -> NDArray[np.int64]:
            of_bundle = mixed(mixed(job) ^ np.uint64(next(bundle)))
            return (mixed(of_bundle ^ nodes.astype(np.uint64)) >> np.uint64(1)).astype(np.int64)

        return place(state, txn, row.ask.shape, prefer=drawn, close=False)


def random() -> Profile:
    """First come, first served; placed at random, by the seed of the run."""
    return Profile(
        name="random", order=ByArrival(), division=LimitsOnly(), placer=RandomFit(), block="queue", starve_s=STARVE_S
    )


@dataclass(frozen=True, slots=True)
class OwnDevices:
    """A tenant uses at most as many devices as it is guaranteed; nothing is borrowed, and limits hold."""

    def verdict(self, state: State, row: LiveJob) -> Wait | None:
        """``GUARANTEE_FULL_NO_BORROW`` where the guarantee of the queue, or of one above it, is used up."""
        tree = state.queues
        need = tree.need(row.ask.shape)[GPU]
        for queue in tree.line_of(row.ask.queue):
            guaranteed = tree.guaranteed[queue, GPU]
            if row.ask.opportunistic:
                text = "Work of a priority below 0 runs on devices that are lent; this profile lends none."
                return Wait(reason=Reason.GUARANTEE_FULL_NO_BORROW, text=text, fields={"queue": row.ask.queue})
            if guaranteed and state.used[queue, GPU] + need > guaranteed:
                return Wait(
                    reason=Reason.GUARANTEE_FULL_NO_BORROW,
                    text=f"Needs {counted(need / 1000, 'GPU')}; "
                    f"{state.used[queue, GPU] / 1000:g} of {guaranteed / 1000:g} guaranteed ones are in use.",
                    fields={"queue": tree.rows[queue].path},
                )
        return LimitsOnly().verdict(state, row)


@dataclass(frozen=True, slots=True)
class OwnNodes:
    """A tenant uses only the nodes that carry its label."""

    manner: Manner = "pack"

    def place(self, state: State, txn: Txn, row: LiveJob) -> Allocations | None:
        """A place on nodes with the label of the queue; None if none fits there."""
        mine = state.tenant == state.queues.row.get(row.ask.queue, -2)
        return place(state, txn, row.ask.shape, prefer=PREFERENCES[self.manner], allowed=mine, close=False)


def private() -> Profile:
    """Every tenant alone on its own nodes, first come first served: what a guarantee is measured against."""
    return Profile(
        name="private", order=ByArrival(), division=OwnDevices(), placer=OwnNodes(), block="queue", local=True
    )


def pool() -> Profile:
    """One cluster, quotas in devices, best fit."""
    return _pool("pool", "pack")


def pool_spread() -> Profile:
    """One cluster, quotas in devices, emptiest node first: shows why a quota of devices guarantees nothing."""
    return _pool("pool-spread", "spread")


def _pool(name: str, manner: Manner) -> Profile:
    placer = Fit(manner, close=False)
    return Profile(name=name, order=ByArrival(), division=OwnDevices(), placer=placer, block="queue")


ROUND_S = 300.0
"""How often running jobs are ranked anew while others wait."""


Column = NDArray[np.float64] | NDArray[np.bool_]
"""One number of each row."""


class RunningRows:
    """Running jobs that may be stopped, as columns: a pass ranks thousands of them, few of which are new to it.

    ``total_s`` is NaN where it is not known; ``freed_milli`` has thousandths of devices of the job and its parts.
    """

    def __init__(self, state: State, jobs: Sequence[JobId], now: float) -> None:
        known = state.memory.columns
        for job in jobs:
            row, one = state.jobs[job], known.get(job)
            if one is None or one[0] is not row:
                known[job] = (row, _columns_of(row))
        found = np.array([known[job][1] for job in jobs], dtype=np.float64).reshape(-1, 8)
        able = found[:, 0] > 0
        self.jobs = [job for job, may_stop in zip(jobs, able.tolist()) if may_stop]
        columns = found[able].T
        _, self.spare, self.opportunistic, self.total_s, served_s, self.started_at, holds, self.gpu_milli = columns
        self.served_s = served_s + np.where(holds > 0, now - self.started_at, 0.0)
        self.freed_milli = self.gpu_milli
        if not state.parts.keys().isdisjoint(self.jobs):
            self.freed_milli = np.array([_milli_of(state, job) for job in self.jobs], dtype=np.float64)


def _columns_of(row: LiveJob) -> tuple[float, ...]:
    ask, total_s = row.ask, row.total_s
    times = (math.nan if total_s is None else total_s, row.served_s, row.started_at, bool(row.held))
    return (ask.may_stop, ask.spare, ask.opportunistic, *times, ask.shape.gpu_milli)


def _milli_of(state: State, job: JobId) -> int:
    if job not in state.parts:
        return state.jobs[job].ask.shape.gpu_milli
    rows = (state.jobs[one] for one in state.whole(job))
    return sum(len(held.devices) * (held.milli or 1000) for row in rows for held in row.held)


class OrderByTime(QueueOrder, Protocol):
    """An order by numbers that change while jobs run."""

    def ranks(self, rows: RunningRows) -> tuple[Column, ...]:
        """The ranks of running jobs, a column for each element of ``rank``, and equal to those."""
        ...


@dataclass(frozen=True, slots=True)
class LeastService:
    """Jobs below the threshold of device-seconds first, then the others; first come first served inside a level.

    Two levels keep jobs of like service from taking turns for ever. Source: Tiresias (NSDI'19), 2D-LAS.
    """

    threshold_gpu_s: float = 8 * 3600.0
    by_job = True

    def rank(self, state: State, row: LiveJob, now: float) -> Rank:
        """0 below ``threshold_gpu_s`` device-seconds of service, 1 from there on."""
        return (row.served_by(now) * row.ask.shape.gpu_milli / 1000 >= self.threshold_gpu_s,)

    def ranks(self, rows: RunningRows) -> tuple[Column, ...]:
        """The same of all rows."""
        return (rows.served_s * rows.gpu_milli / 1000 >= self.threshold_gpu_s,)


@dataclass(frozen=True, slots=True)
class Outranked:
    """Running jobs that rank after the requesting job, the lowest first; jobs of equal rank are not preempted."""

    order: OrderByTime

    def victims(self, state: State, txn: Txn, row: LiveJob, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        """The fewest of those behind the job, from the last, with which it fits; empty if all of them are too few.

        What ran before now is ranked once for a pass; jobs that released theirs since then are left out.
        """
        known = cast("_Ranked | None", txn.notes.get((self, now)))
        if known is None:
            running = [job for jobs in state.running.values() for job in jobs]
            known = txn.notes[self, now] = self._ranked(state, running, now), frozenset(running)
        (rows, places), listed = known
        late = [job for job in state.started if job not in listed and state.jobs[job].phase == "running"]
        fresh, fresh_places = self._ranked(state, late, now)
        # Opportunistic work comes last here as it does in the queue: else it would stop who then stops it.
        mine = (row.ask.opportunistic, *self.order.rank(state, row, now))
        behind = _after(places, mine)
        if rows.freed_milli[behind].sum() + fresh.freed_milli.sum() < missing_milli(state, row.ask.shape):
            return ()
        jobs, able = [*rows.jobs, *fresh.jobs], np.concatenate((behind, _after(fresh_places, mine)))
        if not able.any():
            return ()
        columns = [np.concatenate(both) for both in zip(places, fresh_places)]
        started_at, spare = (np.concatenate(both) for both in zip(*((r.started_at, r.spare) for r in (rows, fresh))))
        last_first = np.lexsort((np.array(jobs), started_at, *reversed(columns), spare))[::-1]
        found: list[JobId] = [jobs[i] for i in last_first[able[last_first]].tolist()]
        order = [job for job in found if state.jobs[job].phase == "running"]
        return tuple(
            Victim(job=job, reason=Reason.PREEMPTED_PRIORITY, lost_gpu_s=lost_gpu_s(state, job, now))
            for job in enough_of(state, txn, row, placer, order) or ()
        )

    def _ranked(self, state: State, jobs: Sequence[JobId], now: float) -> tuple[RunningRows, tuple[Column, ...]]:
        rows = RunningRows(state, jobs, now)
        return rows, (rows.opportunistic, *self.order.ranks(rows))


_Ranked = tuple[tuple[RunningRows, tuple[Column, ...]], frozenset[JobId]]
"""Rows with the columns of their places, and who was looked at."""


def _after(places: Sequence[Column], mine: Rank) -> NDArray[np.bool_]:
    """Mask of the rows that rank after ``mine``, compared lexicographically."""
    after = np.zeros(len(places[0]), dtype=np.bool_)
    equal = ~after
    for column, value in zip(places, mine):
        after |= equal & (column > value)
        equal &= column == value
    return after


def las(threshold_gpu_s: float = 8 * 3600.0) -> Profile:
    """Least attained service: jobs with less service so far come first, and preempt those with more."""
    order = LeastService(threshold_gpu_s)
    return Profile(
        name="las",
        order=order,
        division=LimitsOnly(),
        placer=Fit(),
        victims=Outranked(order),
        remember=False,
        victim_sets_max=1,
        vain_max=4,
        round_s=ROUND_S,
        starve_s=STARVE_BY_SERVICE_S,
    )


@dataclass(frozen=True, slots=True)
class ShortestFirst:
    """By the estimated time that remains, or ``by_service``: that times devices; jobs without an estimate come last."""

    by_service: bool = False
    by_job = True

    def rank(self, state: State, row: LiveJob, now: float) -> Rank:
        """Seconds that remain, or device-milliseconds ``by_service``, behind a 0; (1, 0) without an estimate."""
        if (total_s := row.total_s) is None:
            return (1, 0.0)
        left_s = max(0.0, total_s - row.served_by(now))
        return (0, left_s * max(row.ask.shape.gpu_milli, 1) if self.by_service else left_s)

    def ranks(self, rows: RunningRows) -> tuple[Column, ...]:
        """The same of all rows."""
        left_s = np.maximum(0.0, rows.total_s - rows.served_s)
        left = left_s * np.maximum(rows.gpu_milli, 1) if self.by_service else left_s
        return (np.isnan(rows.total_s), np.where(np.isnan(rows.total_s), 0.0, left))


def srtf() -> Profile:
    """Jobs with the shortest remaining time come first, and preempt others. Needs true estimates."""
    return _shortest("srtf", ShortestFirst())


def srsf() -> Profile:
    """Who needs the fewest device-seconds until its end comes first. Source: Tiresias (NSDI'19), SRSF."""
    return _shortest("srsf", ShortestFirst(by_service=True))


def _shortest(name: str, order: ShortestFirst) -> Profile:
    return Profile(
        name=name,
        order=order,
        division=LimitsOnly(),
        placer=Fit(),
        victims=Outranked(order),
        remember=False,
        victim_sets_max=1,
        vain_max=4,
        starve_s=STARVE_BY_SERVICE_S,
    )
