"""Exact event simulation of a pipeline schedule.

A task is the forward or backward pass of one micro-batch on one chunk. Each rank runs its tasks in the order of the
schedule; a task starts when its rank is free and its input has arrived. GPipe: Huang et al. (2019); 1F1B: Narayanan et
al., PipeDream-Flush (2021); interleaved 1F1B: Narayanan et al., SC21, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Pass = Literal["F", "B"]


@dataclass(frozen=True, slots=True)
class Task:
    """One pass of one micro-batch on one chunk of a rank."""

    kind: Pass
    micro: int
    chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Result of a simulation: total seconds, busy seconds of each rank, most micro-batches alive on each rank."""

    total_s: float
    busy_s: tuple[float, ...]
    alive_max: tuple[int, ...]

    @property
    def bubble_s(self) -> float:
        """Idle time of the busiest rank: the part of the total that is not work."""
        return self.total_s - max(self.busy_s)


def gpipe(ranks: int, micro: int) -> tuple[tuple[Task, ...], ...]:
    """All forwards, then all backwards, on every rank."""
    order = tuple(Task("F", i) for i in range(micro)) + tuple(Task("B", i) for i in range(micro))
    return tuple(order for _ in range(ranks))


def one_f_one_b(ranks: int, micro: int) -> tuple[tuple[Task, ...], ...]:
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards."""
    return tuple(
        _alternate(min(ranks - rank - 1, micro), [Task("F", i) for i in range(micro)], _backs(micro))
        for rank in range(ranks)
    )


def _backs(micro: int) -> list[Task]:
    return [Task("B", i) for i in range(micro)]


def interleaved(ranks: int, micro: int, chunks: int) -> tuple[tuple[Task, ...], ...]:
    """1F1B over ``chunks`` model chunks a rank, in groups of ``ranks`` micro-batches.

    Raises ValueError unless ``micro`` is a multiple of ``ranks``.
    """
    if micro % ranks:
        raise ValueError(f"interleaved: micro_batches {micro} is not a multiple of {ranks} ranks")
    forward = [
        Task("F", group * ranks + i, chunk)
        for group in range(micro // ranks)
        for chunk in range(chunks)
        for i in range(ranks)
    ]
    backward = [
        Task("B", group * ranks + i, chunk)
        for group in range(micro // ranks)
        for chunk in reversed(range(chunks))
        for i in range(ranks)
    ]
    total = micro * chunks
    return tuple(
        _alternate(min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total), forward, backward)
        for rank in range(ranks)
    )


def _alternate(warm_up: int, forward: Sequence[Task], backward: Sequence[Task]) -> tuple[Task, ...]:
    order = list(forward[:warm_up])
    for ahead, back in zip(forward[warm_up:], backward, strict=False):
        order += [ahead, back]
    order += backward[len(forward) - warm_up :]
    return tuple(order)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Seconds of one pass of one micro-batch on one chunk."""

    forward_s: float
    backward_s: float


def simulate(
    order: Sequence[Sequence[Task]], costs: Sequence[Sequence[StageCost]], *, transfers_s: Sequence[float] = ()
) -> Timeline:
    """Run every rank's tasks in their order. ``costs[rank][chunk]``; chunk ``c`` of rank ``r`` is stage ``c * p + r``.

    ``transfers_s[r]`` passes on the way from rank ``r`` to the next one or back; the last is the way to the first rank,
    between chunks. Raises ValueError for an order that can never
    finish (each rank waits for another).
    """
    ranks = len(order)
    run = _Run(order, costs, transfers_s or [0.0] * ranks)
    waiting = set(range(ranks))
    while waiting:
        left = run.left
        for rank in sorted(waiting):
            if run.advance(rank):
                waiting.discard(rank)
        if run.left == left:
            raise ValueError(f"the schedule can never finish; {left} tasks wait for each other")
    busy = [
        sum(costs[r][t.chunk].forward_s if t.kind == "F" else costs[r][t.chunk].backward_s for t in order[r])
        for r in range(ranks)
    ]
    return Timeline(total_s=max(run.free_s), busy_s=tuple(busy), alive_max=tuple(run.alive_max))


class _Run:
    """The state of one simulation: when every pass of every stage ended, and how far each rank has come."""

    def __init__(
        self, order: Sequence[Sequence[Task]], costs: Sequence[Sequence[StageCost]], transfers_s: Sequence[float]
    ) -> None:
        self._order, self._costs, self._transfers_s = order, costs, transfers_s
        self._ranks, self._stages = len(order), len(order) * len(costs[0])
        micro = 1 + max((task.micro for tasks in order for task in tasks), default=0)
        self._forward_s = [[-1.0] * micro for _ in range(self._stages)]
        self._backward_s = [[-1.0] * micro for _ in range(self._stages)]
        self._position = [0] * self._ranks
        self.free_s = [0.0] * self._ranks
        self.alive_max = [0] * self._ranks
        self._alive = [0] * self._ranks
        self.left = sum(len(tasks) for tasks in order)

    def advance(self, rank: int) -> bool:
        """Run the tasks of a rank until one lacks its input; True when all are done."""
        tasks, costs = self._order[rank], self._costs[rank]
        free_s, alive = self.free_s[rank], self._alive[rank]
        begin = position = self._position[rank]
        while position < len(tasks):
            task = tasks[position]
            stage = task.chunk * self._ranks + rank
            ready_s = self._ready_s(task, stage)
            if ready_s < 0:
                break
            if task.kind == "F":
                free_s = max(free_s, ready_s) + costs[task.chunk].forward_s
                self._forward_s[stage][task.micro] = free_s
                alive += 1
                self.alive_max[rank] = max(self.alive_max[rank], alive)
            else:
                free_s = max(free_s, ready_s) + costs[task.chunk].backward_s
                self._backward_s[stage][task.micro] = free_s
                alive -= 1
            position += 1
        self.free_s[rank], self._alive[rank], self._position[rank] = free_s, alive, position
        self.left -= position - begin
        return position == len(tasks)

    def _ready_s(self, task: Task, stage: int) -> float:
        """When the input of a task is there; negative when it has not been computed yet."""
        if task.kind == "F":
            if stage == 0:
                return 0.0
            made = self._forward_s[stage - 1][task.micro]
            return made + self._transfers_s[(stage - 1) % self._ranks] if made >= 0 else -1.0
        own = self._forward_s[stage][task.micro]
        if own < 0 or stage == self._stages - 1:
            return own
        made = self._backward_s[stage + 1][task.micro]
        return max(own, made + self._transfers_s[stage % self._ranks]) if made >= 0 else -1.0
