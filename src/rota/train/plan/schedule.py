"""Exact event simulation of a pipeline schedule.

A task is the forward or backward pass of one micro-batch on one chunk. Each rank runs its tasks in the order of the
schedule; a task starts when its rank is free and its input has arrived. GPipe: Huang et al. (2019); 1F1B: Narayanan et
al., PipeDream-Flush (2021); interleaved 1F1B: Narayanan et al., SC21, section 2.2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Pass = Literal["F", "B"]
PROGRAMS_MAX = 32
"""Orders that are kept ready for the next simulation."""
SAME = 1e-11
"""Two shifts are equal up to this share of the whole: rounding of some ten thousand sums."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An order as one list in which everything comes after what it waits for; durations do not matter for it.

    A step is (step before it on its rank, step whose result it needs, link it comes over, cost); step 0 has no cost.
    ``shifts`` pairs steps with the same ones a period of micro-batches later, up to the last forward pass of each rank:
    empty when there are too few.
    """

    steps: tuple[tuple[int, int, int, int], ...]
    alive_max: tuple[int, ...]
    shifts: tuple[tuple[int, int], ...]


def program_of(order: Sequence[Sequence[Task]], period: int = 1) -> Program:
    """Sort the tasks. Raises ValueError for an order that can never finish (each rank waits for another)."""
    ranks, chunks = len(order), 1 + max(task.chunk for tasks in order for task in tasks)
    stages = ranks * chunks
    steps, made = [(0, 0, ranks, 2 * stages)], dict[tuple[Pass, int, int], int]()
    placed: list[list[int]] = [[] for _ in order]
    left = sum(map(len, order))
    while left:
        before = left
        for rank, tasks in enumerate(order):
            mine = placed[rank]
            while len(mine) < len(tasks):
                task = tasks[len(mine)]
                stage = task.chunk * ranks + rank
                source, link = _input_of(task, stage, stages, ranks, made)
                if source < 0:
                    break
                made[task.kind, stage, task.micro] = len(steps)
                steps.append((mine[-1] if mine else 0, source, link, 2 * stage + (task.kind == "B")))
                mine.append(len(steps) - 1)
                left -= 1
        if left == before:
            raise ValueError(f"the schedule can never finish; {left} tasks wait for each other")
    shifts = _shifts(order, placed, 2 * period * chunks)
    return Program(steps=tuple(steps), alive_max=tuple(map(_alive_max, order)), shifts=shifts)


def _input_of(
    task: Task, stage: int, stages: int, ranks: int, made: dict[tuple[Pass, int, int], int]
) -> tuple[int, int]:
    """The step that a task waits for and the link between them; -1 when that step is not there yet."""
    if task.kind == "F":
        return (made.get(("F", stage - 1, task.micro), -1), (stage - 1) % ranks) if stage else (0, ranks)
    if stage == stages - 1:
        return made.get(("F", stage, task.micro), -1), ranks
    return made.get(("B", stage + 1, task.micro), -1), stage % ranks


def _alive_max(tasks: Sequence[Task]) -> int:
    alive = most = 0
    for task in tasks:
        alive += 1 if task.kind == "F" else -1
        most = max(most, alive)
    return most


def _shifts(
    order: Sequence[Sequence[Task]], placed: Sequence[Sequence[int]], period: int
) -> tuple[tuple[int, int], ...]:
    """Pairs over a window that holds every input of what comes later: what waits is ``2 ranks`` steps away at most."""
    pairs: list[tuple[int, int]] = []
    for tasks, mine in zip(order, placed, strict=True):
        turn = 1 + max(k for k, task in enumerate(tasks) if task.kind == "F")
        first = turn - period - 2 * len(order)
        warm_up = next(k for k, task in enumerate(tasks) if task.kind == "B") - 1
        if first - period < warm_up:
            return ()
        pairs += [(mine[k - period], mine[k]) for k in range(first, turn)]
    return tuple(pairs)


def simulate(
    order: Sequence[Sequence[Task]], costs: Sequence[Sequence[StageCost]], *, transfers_s: Sequence[float] = ()
) -> Timeline:
    """Run every rank's tasks in their order. ``costs[rank][chunk]``; chunk ``c`` of rank ``r`` is stage ``c * p + r``.

    ``transfers_s[r]`` passes on the way from rank ``r`` to the next one or back; the last is the way to the first rank,
    between chunks. Raises ValueError for an order that can never finish (each rank waits for another).
    """
    program = program_of(order)
    ends_s = _run(program, costs, transfers_s)
    busy: dict[int, float] = defaultdict(float)
    for rank, tasks in enumerate(order):
        for task in tasks:
            cost = costs[rank][task.chunk]
            busy[rank] += cost.forward_s if task.kind == "F" else cost.backward_s
    return Timeline(
        total_s=max(ends_s), busy_s=tuple(busy[rank] for rank in range(len(order))), alive_max=program.alive_max
    )


def _run(program: Program, costs: Sequence[Sequence[StageCost]], transfers_s: Sequence[float]) -> list[float]:
    """When each step of a program ends."""
    ranks = len(costs)
    links = [*(transfers_s or [0.0] * ranks), 0.0]
    took: list[float] = []
    for chunk in range(len(costs[0])):
        for rank in range(ranks):
            took += (costs[rank][chunk].forward_s, costs[rank][chunk].backward_s)
    ends_s = [0.0]
    for before, source, link, cost in program.steps[1:]:
        free_s, ready_s = ends_s[before], ends_s[source] + links[link]
        ends_s.append((free_s if free_s > ready_s else ready_s) + took[cost])
    return ends_s


Kind = Literal["gpipe", "1f1b", "interleaved"]


@lru_cache(maxsize=PROGRAMS_MAX)
def _program(kind: Kind, ranks: int, micro: int, chunks: int) -> Program:
    if kind == "interleaved":
        return program_of(interleaved(ranks, micro, chunks), ranks)
    return program_of(gpipe(ranks, micro) if kind == "gpipe" else one_f_one_b(ranks, micro))


def pipeline_s(
    kind: Kind, micro: int, costs: Sequence[Sequence[StageCost]], *, transfers_s: Sequence[float] = ()
) -> float:
    """Total seconds of ``micro`` micro-batches, as ``simulate`` gives them.

    Few micro-batches are simulated when these settle: once every step comes the same time after the one a period before
    it (a micro-batch; interleaved: one for each rank), each further period adds just that, since an end is the maximum
    of sums of earlier ends (Baccelli et al., "Synchronization and Linearity", 1992).
    """
    ranks, chunks = len(costs), len(costs[0])
    period = ranks if kind == "interleaved" else 1
    few = 4 * ranks
    while kind != "gpipe" and few < micro:
        program = _program(kind, ranks, few, chunks)
        ends_s = _run(program, costs, transfers_s)
        total_s = max(ends_s)
        grown = [ends_s[late] - ends_s[early] for early, late in program.shifts]
        if grown and max(grown) - min(grown) <= SAME * total_s:
            return total_s + grown[0] * ((micro - few) // period)
        few *= 2
    return max(_run(_program(kind, ranks, micro, chunks), costs, transfers_s))
