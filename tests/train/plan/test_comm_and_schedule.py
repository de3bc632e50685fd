"""Collective times against closed forms; pipeline schedules against their published bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.train.plan import hardware
from rota.train.plan.hardware import Link
from rota.train.plan.schedule import StageCost, Task, gpipe, interleaved, one_f_one_b, pipeline_s, program_of, run

FAST = Link(gb_s=100, latency_us=5)


@dataclass(frozen=True)
class Timeline:
    """Total seconds of a schedule, busy seconds of each rank, most micro-batches alive on each rank."""

    total_s: float
    busy_s: tuple[float, ...]
    alive_max: tuple[int, ...]


def simulate(
    order: Sequence[Sequence[Task]], costs: Sequence[Sequence[StageCost]], *, transfers_s: Sequence[float] = ()
) -> Timeline:
    """Run every rank's tasks in their order."""
    ends_s = run(program_of(order), costs, transfers_s)
    busy_s, alive_max = [0.0] * len(order), [0] * len(order)
    for rank, tasks in enumerate(order):
        alive = 0
        for task in tasks:
            cost = costs[rank][task.chunk]
            busy_s[rank] += cost.forward_s if task.kind == "F" else cost.backward_s
            alive += 1 if task.kind == "F" else -1
            alive_max[rank] = max(alive_max[rank], alive)
    return Timeline(total_s=max(ends_s), busy_s=tuple(busy_s), alive_max=tuple(alive_max))


def even(ranks: int, forward_s: float, backward_s: float, chunks: int = 1) -> list[list[StageCost]]:
    return [[StageCost(forward_s=forward_s, backward_s=backward_s)] * chunks for _ in range(ranks)]


@given(st.integers(1, 8), st.integers(1, 24), st.floats(0.1, 2), st.floats(0.1, 4))
def test_even_1f1b_and_gpipe_take_m_plus_p_minus_1_rounds(p: int, m: int, f: float, b: float) -> None:
    expected = (m + p - 1) * (f + b)
    assert simulate(one_f_one_b(p, m), even(p, f, b)).total_s == pytest.approx(expected)
    assert simulate(gpipe(p, m), even(p, f, b)).total_s == pytest.approx(expected)


@given(st.integers(1, 6), st.integers(1, 12))
def test_1f1b_holds_at_most_p_minus_stage_micro_batches_and_gpipe_all(p: int, m: int) -> None:
    assert simulate(one_f_one_b(p, m), even(p, 1, 2)).alive_max == tuple(min(m, p - stage) for stage in range(p))
    assert simulate(gpipe(p, m), even(p, 1, 2)).alive_max == (m,) * p


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 4), (3, 9, 3)])
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, m: int, v: int) -> None:
    """SC21, section 2.2.2: bubble time over ideal time is (p - 1) / (m v)."""
    line = simulate(interleaved(p, m, v), even(p, 1 / v, 2 / v, chunks=v))
    assert (line.total_s - max(line.busy_s)) / max(line.busy_s) == pytest.approx((p - 1) / (m * v))


@given(st.lists(st.floats(0.1, 3), min_size=2, max_size=5), st.integers(2, 10))
def test_the_slowest_stage_bounds_the_pipeline_from_below(forward_s: list[float], m: int) -> None:
    costs = [[StageCost(forward_s=f, backward_s=2 * f)] for f in forward_s]
    line = simulate(one_f_one_b(len(forward_s), m), costs)
    slowest = max(range(len(forward_s)), key=forward_s.__getitem__)
    fill = 3 * (sum(forward_s) - forward_s[slowest])
    assert line.total_s >= 3 * m * forward_s[slowest] - 1e-9
    assert line.total_s <= 3 * m * forward_s[slowest] + fill * m + 1e-6


def test_every_micro_batch_passes_every_chunk_once_each_way() -> None:
    for order in (gpipe(3, 6), one_f_one_b(3, 6), interleaved(3, 6, 2)):
        chunks = 2 if any(task.chunk for task in order[0]) else 1
        for tasks in order:
            assert sorted(tasks, key=repr) == sorted(
                (Task(kind, i, c) for kind in ("F", "B") for i in range(6) for c in range(chunks)), key=repr
            )


def test_a_schedule_that_can_never_finish_is_an_error() -> None:
    with pytest.raises(ValueError, match="can never finish"):
        simulate([[Task("B", 0), Task("F", 0)]], even(1, 1, 1))
    with pytest.raises(ValueError, match="not a multiple"):
        interleaved(4, 6, 2)


def test_transfers_add_to_the_fill_and_drain_of_the_pipeline() -> None:
    plain = simulate(one_f_one_b(4, 1), even(4, 1, 2)).total_s
    assert simulate(one_f_one_b(4, 1), even(4, 1, 2), transfers_s=[0.5] * 4).total_s == pytest.approx(plain + 6 * 0.5)


@given(st.integers(2, 512), st.floats(1, 1e10))
def test_all_reduce_is_never_slower_than_reduce_scatter_with_all_gather(ranks: int, size: float) -> None:
    both = hardware.reduce_scatter_s(ranks, size, FAST) + hardware.all_gather_s(ranks, size, FAST)
    assert hardware.all_reduce_s(ranks, size, FAST) <= both * (1 + 1e-12)


def test_one_rank_communicates_for_free() -> None:
    for cost in (hardware.all_reduce_s, hardware.all_gather_s, hardware.reduce_scatter_s):
        assert cost(1, 1e9, FAST) == 0.0


@given(
    st.sampled_from(["1f1b", "interleaved", "gpipe"]),
    st.lists(st.sampled_from([1.0, 1.0, 1.3, 2.0]), min_size=2, max_size=5),
    st.integers(1, 60),
    st.integers(1, 3),
    st.floats(0, 0.5),
)
def test_micro_batches_beyond_those_that_settle_are_not_simulated_and_cost_the_same(
    kind: str, stages_s: list[float], m: int, v: int, hop_s: float
) -> None:
    """Neighbours that are equally slow settle to a rhythm of several micro-batches; one slowest stage to one of one."""
    p = len(stages_s)
    m, v = (m * p, v + 1) if kind == "interleaved" else (4 * m, 1)
    costs = [[StageCost(forward_s=one, backward_s=2.1 * one)] * v for one in stages_s]
    orders = {"1f1b": one_f_one_b(p, m), "gpipe": gpipe(p, m)}
    order = orders[kind] if kind in orders else interleaved(p, m, v)
    whole = simulate(order, costs, transfers_s=[hop_s] * p)
    assert pipeline_s(kind, m, costs, transfers_s=[hop_s] * p) == pytest.approx(whole.total_s, rel=1e-9)  # type: ignore[arg-type]
