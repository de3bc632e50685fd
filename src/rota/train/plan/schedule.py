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
    order: Sequence[Sequence[Task]], costs: Sequence[Sequence[StageCost]], *, transfer_s: float = 0.0
) -> Timeline:
    """Run every rank's tasks in their order. ``costs[rank][chunk]``; chunk ``c`` of rank ``r`` is stage ``c * p + r``.

    ``transfer_s`` passes between a task and the task of the next stage. Raises ValueError for an order that can never
    finish (each rank waits for another).
    """
    ranks, chunks = len(order), len(costs[0])
    done: dict[tuple[Pass, int, int], float] = {}
    position, free_s = [0] * ranks, [0.0] * ranks
    alive, alive_max = [0] * ranks, [0] * ranks
    left = sum(len(tasks) for tasks in order)
    while left:
        moved = False
        for rank in range(ranks):
            while position[rank] < len(order[rank]):
                task = order[rank][position[rank]]
                ready_s = _ready_s(done, task, rank, ranks, chunks, transfer_s)
                if ready_s is None:
                    break
                cost = costs[rank][task.chunk]
                free_s[rank] = max(free_s[rank], ready_s) + (cost.forward_s if task.kind == "F" else cost.backward_s)
                done[task.kind, task.micro, task.chunk * ranks + rank] = free_s[rank]
                alive[rank] += 1 if task.kind == "F" else -1
                alive_max[rank] = max(alive_max[rank], alive[rank])
                position[rank] += 1
                left -= 1
                moved = True
        if not moved:
            raise ValueError(f"the schedule can never finish; {left} tasks wait for each other")
    busy = [
        sum(costs[r][t.chunk].forward_s if t.kind == "F" else costs[r][t.chunk].backward_s for t in order[r])
        for r in range(ranks)
    ]
    return Timeline(total_s=max(free_s), busy_s=tuple(busy), alive_max=tuple(alive_max))


def _ready_s(
    done: dict[tuple[Pass, int, int], float], task: Task, rank: int, ranks: int, chunks: int, transfer_s: float
) -> float | None:
    """When the input of a task is there; None when it has not been computed yet."""
    stage, last = task.chunk * ranks + rank, ranks * chunks - 1
    if task.kind == "F":
        if stage == 0:
            return 0.0
        made = done.get(("F", task.micro, stage - 1))
        return None if made is None else made + transfer_s
    own = done.get(("F", task.micro, stage))
    if own is None:
        return None
    if stage == last:
        return own
    made = done.get(("B", task.micro, stage + 1))
    return None if made is None else max(own, made + transfer_s)
