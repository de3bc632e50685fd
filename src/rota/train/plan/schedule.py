"""Exact event simulation of a pipeline schedule.

A task is the forward or backward pass of one micro-batch on one chunk. Each rank runs its tasks in the order of the
schedule; a task starts when its rank is free and its input has arrived. GPipe: Huang et al. (2019); 1F1B: Narayanan et
al., PipeDream-Flush (2021); interleaved 1F1B: Narayanan et al., SC21, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Pass = Literal["F", "B"]
PROGRAMS_MAX = 32
"""Orders that are kept ready for the next simulation."""
SAME = 1e-11
"""Two shifts are equal up to this share of the whole: rounding of some ten thousand sums."""


class Task(NamedTuple):
    """One pass of one micro-batch on one chunk of a rank."""

    kind: Pass
    micro: int
    chunk: int = 0


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
    ``regular`` are the steps of each rank while it runs one pass of each kind in turn.
    """

    steps: tuple[tuple[int, int, int, int], ...]
    regular: tuple[tuple[int, ...], ...]


def program_of(order: Sequence[Sequence[Task]]) -> Program:
    """Sort the tasks. Raises ValueError for an order that can never finish (each rank waits for another)."""
    ranks, chunks = len(order), 1 + max(task.chunk for task in order[0])
    micro = 1 + max(task.micro for task in order[0])
    half = ranks * chunks * micro  # a task is numbered by pass, stage, micro-batch
    codes = [
        [(half if kind == "B" else 0) + (chunk * ranks + rank) * micro + number for kind, number, chunk in tasks]
        for rank, tasks in enumerate(order)
    ]
    steps, made = [(0, 0, ranks, 0)], [-1] * (2 * half)
    placed: list[list[int]] = [[] for _ in order]
    while any(len(mine) < len(todo) for mine, todo in zip(placed, codes, strict=True)):
        before = len(steps)
        for rank, (mine, todo) in enumerate(zip(placed, codes, strict=True)):
            for at in range(len(mine), len(todo)):
                code = todo[at]
                if code < micro:
                    source, link = 0, ranks  # the first stage waits for nothing
                elif code < half:
                    source, link = made[code - micro], (rank - 1) % ranks
                elif code < 2 * half - micro:
                    source, link = made[code + micro], rank
                else:
                    source, link = made[code - half], ranks
                if source < 0:
                    break
                made[code] = len(steps)
                steps.append((mine[-1] if mine else 0, source, link, code // micro))
                mine.append(made[code])
        if len(steps) == before:
            left = sum(map(len, codes)) - before + 1
            raise ValueError(f"the schedule can never finish; {left} tasks wait for each other")
    regular = tuple(tuple(mine[_regular(tasks)]) for tasks, mine in zip(order, placed, strict=True))
    return Program(steps=tuple(steps), regular=regular)


def _regular(tasks: Sequence[Task]) -> slice:
    """From the forward pass before the first backward pass to the last forward pass."""
    first_back = next((k for k, task in enumerate(tasks) if task.kind == "B"), len(tasks))
    last_ahead = max((k for k, task in enumerate(tasks) if task.kind == "F"), default=-1)
    return slice(max(first_back - 1, 0), last_ahead + 1)


def run(program: Program, costs: Sequence[Sequence[StageCost]], transfers_s: Sequence[float]) -> list[float]:
    """When each step of a program ends. ``costs[rank][chunk]``; chunk ``c`` of rank ``r`` is stage ``c * p + r``.

    ``transfers_s[r]`` passes on the way from rank ``r`` to the next one or back; the last is the way to the first rank,
    between chunks.
    """
    ranks = len(costs)
    links = [*(transfers_s or [0.0] * ranks), 0.0]
    stages = [costs[rank][chunk] for chunk in range(len(costs[0])) for rank in range(ranks)]
    took = [*(one.forward_s for one in stages), *(one.backward_s for one in stages)]
    ends_s = [0.0]
    for before, source, link, cost in program.steps[1:]:
        free_s, ready_s = ends_s[before], ends_s[source] + links[link]
        ends_s.append((free_s if free_s > ready_s else ready_s) + took[cost])
    return ends_s


Kind = Literal["gpipe", "1f1b", "interleaved"]


@lru_cache(maxsize=PROGRAMS_MAX)
def _program(kind: Kind, ranks: int, micro: int, chunks: int) -> Program:
    if kind == "interleaved":
        return program_of(interleaved(ranks, micro, chunks))
    return program_of(gpipe(ranks, micro) if kind == "gpipe" else one_f_one_b(ranks, micro))


def pipeline_s(
    kind: Kind, micro: int, costs: Sequence[Sequence[StageCost]], *, transfers_s: Sequence[float] = ()
) -> float:
    """Total seconds of ``micro`` micro-batches, as ``run`` gives them.

    Few micro-batches are simulated when these settle: once every step comes the same time after the one a fixed
    number of micro-batches before it, as many more add just that time, since each end is a maximum of sums of earlier
    ends (Baccelli et al., "Synchronization and Linearity", 1992). As many are as stages that bound each
    other: one for a single slowest stage, several where neighbours are equally slow.
    """
    ranks, chunks = len(costs), len(costs[0])
    unit = ranks if kind == "interleaved" else 1
    few = 4 * ranks
    while kind != "gpipe" and few < micro:
        program = _program(kind, ranks, few, chunks)
        ends_s = run(program, costs, transfers_s)
        settled = _settled(program, ends_s, 2 * unit * chunks)
        if settled is not None:
            units, grown_s = settled
            more, rest = divmod(micro - few, units * unit)
            if rest:
                ends_s = run(_program(kind, ranks, few + rest, chunks), costs, transfers_s)
            return max(ends_s) + more * grown_s
        few *= 2
    return max(run(_program(kind, ranks, micro, chunks), costs, transfers_s))


def _settled(program: Program, ends_s: Sequence[float], unit: int) -> tuple[int, float] | None:
    """(units, seconds): every step comes ``seconds`` after the one ``units`` units of steps before it on its rank.

    Compared over a window that holds whatever a later step waits for: that is ``2 ranks`` steps away at most.
    """
    ranks, least = len(program.regular), min(map(len, program.regular))
    for units in range(1, ranks + 1):
        span = units * unit
        window = span + 2 * ranks
        if window + span > least:
            return None
        one = program.regular[0]
        grown_s = ends_s[one[-1]] - ends_s[one[-1 - span]]
        if all(
            abs(ends_s[steps[-k]] - ends_s[steps[-k - span]] - grown_s) <= SAME * ends_s[-1]
            for steps in program.regular
            for k in range(1, window + 1)
        ):
            return units, grown_s
    return None
