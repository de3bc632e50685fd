"""Rules of other systems as published, for cases whose rule no policy follows to the letter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from itertools import combinations
from typing import Literal

from rota.cluster.core.quota import Amounts
from rota.spec.states import JobState

Mode = Literal["exclusive", "time-slice", "queue"]

# -- shares of divisible tasks --


def dominant(capacity: Amounts, amounts: Amounts) -> tuple[str | None, Fraction]:
    """The resource of which an amount is the largest part of the capacity, and that part.

    Resources without capacity or demand do not count; of equal ones the first by name. (DRF, NSDI'11, section 4.)
    """
    parts = [(amounts[r] / capacity[r], r) for r in sorted(amounts) if capacity.get(r, 0) > 0 and amounts[r] > 0]
    if not parts:
        return None, Fraction(0)
    best = max(part for part, _ in parts)
    return next(r for part, r in parts if part == best), best


def water_fill(
    capacity: Amounts, demands: Mapping[str, Amounts], cost: Callable[[Amounts], Fraction]
) -> dict[str, Fraction]:
    """Tasks of each user when all rise together, ``cost`` of one task at equal speed, until a resource is used up.

    Users that need that resource stop; the others go on. With the dominant share as cost this is DRF, with the sum of
    shares it is asset fairness (DRF, section 4.2).
    """
    tasks = {user: Fraction(0) for user in demands}
    rising = {user for user in demands if cost(demands[user]) > 0}
    left = dict(capacity)
    while rising:
        speed = {user: 1 / cost(demands[user]) for user in rising}
        rates = {r: sum((speed[u] * demands[u].get(r, Fraction(0)) for u in rising), Fraction(0)) for r in left}
        time = min(left[r] / rate for r, rate in rates.items() if rate > 0)
        for user in rising:
            tasks[user] += speed[user] * time
        left = {r: amount - rates[r] * time for r, amount in left.items()}
        empty = {r for r, amount in left.items() if amount <= 0}
        rising = {u for u in rising if not any(demands[u].get(r, Fraction(0)) > 0 for r in empty)}
    return tasks


def drf_fluid(capacity: Amounts, demands: Mapping[str, Amounts]) -> dict[str, Fraction]:
    """Tasks of each user under DRF when tasks are divisible."""
    return water_fill(capacity, demands, lambda demand: dominant(capacity, demand)[1])


def asset_fluid(capacity: Amounts, demands: Mapping[str, Amounts]) -> dict[str, Fraction]:
    """Tasks of each user under asset fairness: equal sums of the parts of all resources."""
    return water_fill(
        capacity,
        demands,
        lambda demand: sum((need / capacity[r] for r, need in demand.items() if capacity.get(r, 0) > 0), Fraction(0)),
    )


def ceei(capacity: Amounts, demands: Mapping[str, Amounts]) -> dict[str, Fraction]:
    """Tasks of each user in the competitive equilibrium from equal incomes: the largest product of tasks.

    Exact for two users, where one or two resources bind; otherwise by multiplicative price steps to about 1e-9.
    """
    users = sorted(demands)
    exact = _ceei_two(capacity, demands, users) if len(users) == 2 else None
    return exact if exact is not None else _ceei_by_prices(capacity, demands, users)


def _ceei_two(capacity: Amounts, demands: Mapping[str, Amounts], users: Sequence[str]) -> dict[str, Fraction] | None:
    a, b = (demands[user] for user in users)
    zero = Fraction(0)
    points = [
        (capacity[r] / (2 * a[r]), capacity[r] / (2 * b[r]))
        for r in capacity
        if a.get(r, zero) > 0 and b.get(r, zero) > 0
    ]
    for r, s in combinations(capacity, 2):
        ar, br, as_, bs = a.get(r, zero), b.get(r, zero), a.get(s, zero), b.get(s, zero)
        if (det := ar * bs - as_ * br) != 0:
            points.append(((capacity[r] * bs - capacity[s] * br) / det, (ar * capacity[s] - as_ * capacity[r]) / det))
    able = [
        (x, y)
        for x, y in points
        if x >= 0 and y >= 0 and all(a.get(r, zero) * x + b.get(r, zero) * y <= capacity[r] for r in capacity)
    ]
    if not able:
        return None
    best = max(able, key=lambda point: point[0] * point[1])
    return dict(zip(users, best))


def _ceei_by_prices(capacity: Amounts, demands: Mapping[str, Amounts], users: Sequence[str]) -> dict[str, Fraction]:
    prices = {r: 1.0 / float(capacity[r]) for r in capacity if capacity[r] > 0}
    tasks: dict[str, float] = {}
    for _ in range(20_000):
        tasks = {u: 1.0 / sum(prices[r] * float(demands[u].get(r, 0)) for r in prices) for u in users}
        used = {r: sum(tasks[u] * float(demands[u].get(r, 0)) for u in users) for r in prices}
        worst = max(used[r] / float(capacity[r]) for r in prices)
        if worst <= 1 + 1e-12 and all(
            prices[r] * float(capacity[r]) < 1e-12 or used[r] / float(capacity[r]) > 1 - 1e-10 for r in prices
        ):
            break
        prices = {r: max(p * math.sqrt(used[r] / float(capacity[r])), 1e-300) for r, p in prices.items()}
    return {user: Fraction(amount).limit_denominator(10**9) for user, amount in tasks.items()}


# -- nodes of one size of job --


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityNode:
    """A node as affinity placement sees it: free devices, the size of job it is kept for (None: any), its load.

    ``load`` is demanded over existing devices; ``suspendable`` = its jobs can be suspended to take turns.
    """

    name: str
    free: int
    affinity: int | None = None
    suspendable: bool = False
    load: float = 0.0


def _strange(node: AffinityNode, gpus: int) -> int:
    return 1 if node.affinity is None else 2 * (node.affinity != gpus)


def choose_by_affinity(nodes: Sequence[AffinityNode], gpus: int) -> tuple[str | None, Mode]:
    """Where a job of ``gpus`` devices goes, and how; None = it waits.

    In this order: a node of its size with room, an unlabelled one, one of another size, then turns on the least loaded
    node of its size whose jobs can be suspended. Source: Gandiva (OSDI'18), section 3.2.
    """
    room = [node for node in nodes if node.free >= gpus]
    if room:
        return min(room, key=lambda node: (_strange(node, gpus), node.load, node.free)).name, "exclusive"
    shared = [node for node in nodes if node.affinity == gpus and node.suspendable]
    if shared:
        return min(shared, key=lambda node: node.load).name, "time-slice"
    return None, "queue"


def choose_migration(free: Mapping[str, int], per_node: int, job_on: str | None, gpus: int) -> tuple[str, str] | None:
    """The move that defragments most: from the non-idle node with most free devices to the one with fewest that fits.

    None when the job already lies best, or when no move lowers fragmentation. Nodes without free devices take nothing;
    idle nodes stay idle. Source: Gandiva, section 3.3.
    """
    busy = {name: n for name, n in free.items() if n < per_node}
    if not busy:
        return None
    source = job_on if job_on is not None else max(busy, key=lambda name: (busy[name], name))
    targets = {name: n for name, n in busy.items() if name != source and n >= max(gpus, 1)}
    if source not in busy or not targets:
        return None
    target = min(targets, key=lambda name: (targets[name], name))
    return (source, target) if targets[target] < busy[source] + gpus else None


# -- grace before a stop --


@dataclass(slots=True)
class GraceBook:
    """Mark, notify, wait, kill: what was announced to each queue, and since when."""

    wait_s: float
    marked: dict[str, tuple[Fraction, float]] = field(default_factory=dict[str, tuple[Fraction, float]])

    def round(self, wanted: dict[str, Fraction], now: float) -> tuple[dict[str, Fraction], dict[str, Fraction]]:
        """What to announce now (only what is new), and what to stop because its time is up."""
        notify: dict[str, Fraction] = {}
        kill: dict[str, Fraction] = {}
        self.marked = {name: mark for name, mark in self.marked.items() if name in wanted}
        for name, amount in wanted.items():
            known, since = self.marked.get(name, (Fraction(0), now))
            if amount > known:
                notify[name] = amount - known
                self.marked[name] = (amount, since)
            if now - since >= self.wait_s and known > 0:
                kill[name] = min(amount, known)
        return notify, kill


# -- retries --


class LifeEvent(StrEnum):
    """What may happen to a job."""

    ACCEPTED = "accepted"
    ADMITTED = "admitted"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PLATFORM_FAILED = "platform_failed"
    PREEMPTED = "preempted"
    RELEASED = "released"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    RESUMED = "resumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A job between submission and end. ``attempts`` counts starts; a preemption or lost node uses up no retry.

    Invariant: ``attempts = failures + platform_failures + preemptions + 1`` while it runs.
    """

    state: JobState = JobState.SUBMITTED
    retries_max: int = 0
    attempts: int = 0
    retries_used: int = 0
    platform_failures: int = 0
    preemptions: int = 0

    @property
    def holds(self) -> bool:
        """Whether the job has devices."""
        return self.state.holds_devices


_RUNNING = (
    JobState.ADMITTED,
    JobState.CHECKING,
    JobState.STARTING,
    JobState.RUNNING,
    JobState.RECOVERING,
    JobState.RESIZING,
    JobState.STOPPING,
)


def live(life: Life, event: LifeEvent) -> Life:
    """The life after an event; an event that means nothing in this state (late, twice, after the end) changes nothing.

    A failure with ``retries_used < retries_max`` queues the job again, so N retries are N + 1 attempts. A job that
    finishes before it was stopped for a preemption has finished.
    """
    if life.state.terminal:
        return life
    match life.state, event:
        case JobState.SUBMITTED, LifeEvent.ACCEPTED:
            return replace(life, state=JobState.QUEUED)
        case JobState.QUEUED, LifeEvent.ADMITTED:
            return replace(life, state=JobState.ADMITTED, attempts=life.attempts + 1)
        case ((JobState.ADMITTED | JobState.CHECKING), LifeEvent.STARTING):
            return replace(life, state=JobState.STARTING)
        case ((JobState.ADMITTED | JobState.CHECKING | JobState.STARTING), LifeEvent.RUNNING):
            return replace(life, state=JobState.RUNNING)
        case JobState.QUEUED, LifeEvent.PAUSED:
            return replace(life, state=JobState.PAUSED)
        case JobState.RUNNING, LifeEvent.PAUSED:
            return replace(life, state=JobState.PAUSED)
        case JobState.PAUSED, LifeEvent.RESUMED:
            return replace(life, state=JobState.QUEUED)
        case _, LifeEvent.CANCELLED:
            return replace(life, state=JobState.CANCELLED)
        case JobState.PREEMPTING, LifeEvent.RELEASED:
            return replace(life, state=JobState.QUEUED)
        case (state, LifeEvent.PREEMPTED) if state in _RUNNING:
            return replace(life, state=JobState.PREEMPTING, preemptions=life.preemptions + 1)
        case (state, LifeEvent.SUCCEEDED) if state in (*_RUNNING, JobState.PREEMPTING):
            return replace(life, state=JobState.SUCCEEDED)
        case (state, LifeEvent.PLATFORM_FAILED) if state in _RUNNING:
            return replace(life, state=JobState.QUEUED, platform_failures=life.platform_failures + 1)
        case (state, LifeEvent.FAILED) if state in (*_RUNNING, JobState.PREEMPTING):
            return _failed(life)
        case _:
            return life


def _failed(life: Life) -> Life:
    if life.retries_used < life.retries_max:
        return replace(life, state=JobState.QUEUED, retries_used=life.retries_used + 1)
    return replace(life, state=JobState.FAILED)
