"""Moves make room only where they gain and come to an end; in over-subscription everybody gets turns."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from cluster_makers import ask, node, slot, state
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.proof.cases.reference import choose_migration

from rota.cluster.core.cycle import step
from rota.cluster.core.events import JobArrived, JobGone, JobHolds, JobReleased, Tick, apply
from rota.cluster.core.guarded import check
from rota.cluster.core.jobs import Allocation
from rota.cluster.core.profile import Admit, Decision, Preempt
from rota.cluster.core.state import State
from rota.cluster.policies import get_profile
from rota.cluster.policies.gandiva import gandiva, gandiva_pack, potential
from rota.cluster.sim.sharing import with_sharing
from rota.cluster.sim.simulate import Overheads, SimJob, SimResult, Simulation
from rota.spec.ids import JobId, NodeId
from rota.spec.reasons import Reason
from rota.testing.memory import VirtualClock

DEEP = os.environ.get("ROTA_DEEP") == "1"
ROUND_S = 60.0


def laid(lay: list[list[int]], gpus: int = 4, fixed: tuple[str, ...] = ()) -> State:
    """Nodes n0, n1, ... of ``gpus`` devices with running jobs of these sizes."""
    s = state(*(node(f"n{i}", gpus) for i in range(len(lay))))
    for i, sizes in enumerate(lay):
        row, dev = s.node_row[NodeId(f"n{i}")], 0
        for k, size in enumerate(sizes):
            job = JobId(f"n{i}j{k}")
            devices = tuple(int(s.dev0[row]) + d for d in range(dev, dev + size))
            dev += size
            apply(s, JobArrived(ask=ask(job, slot(size), preemptible=job not in fixed)), 0.0)
            apply(s, JobHolds(job=job, held=(Allocation(row, devices, 0, 0, 0),)), 0.0)
    return s


def free(s: State) -> list[int]:
    return [int(n) for n in s.free.sum(axis=1)]


def preempted(decisions: list[Decision], reason: Reason) -> list[Preempt]:
    return [d for d in decisions if isinstance(d, Preempt) and d.reason is reason]


def settle(s: State, decisions: list[Decision], now: float) -> list[Decision]:
    """Everybody who was asked lets go, and the next pass decides."""
    for decision in decisions:
        if isinstance(decision, Preempt):
            apply(s, JobReleased(job=decision.job), now)
    return step(s, Tick(), gandiva(ROUND_S), now)


def test_a_job_goes_to_nodes_of_its_size_then_to_empty_ones_then_to_others() -> None:
    s, profile = laid([[1], [2], []]), gandiva(ROUND_S)
    where: list[str] = []
    for i, size in enumerate((2, 4, 1, 2)):
        (admit,) = (d for d in step(s, JobArrived(ask=ask(f"k{i}", slot(size))), profile, 1.0) if isinstance(d, Admit))
        where.append(s.nodes[admit.held[0].node].id)
    assert where == ["n1", "n2", "n0", "n0"]


def test_a_waiting_job_makes_another_move_and_both_run_where_planned() -> None:
    s, profile = laid([[2], [2]]), gandiva(ROUND_S)
    decisions = step(s, JobArrived(ask=ask("big", slot(4), at=70)), profile, 70.0)
    (move,) = preempted(decisions, Reason.MIGRATED_AFFINITY)
    before = potential(free(s))
    admits = {d.job: d.held for d in settle(s, decisions, 71.0) if isinstance(d, Admit)}
    assert set(admits) == {"big", move.job}
    assert admits[move.job] == move.to
    assert before == -8 and free(s) == [0, 0]
    assert not [d for now in range(72, 400, 7) for d in step(s, Tick(), profile, float(now))]


@pytest.mark.parametrize(
    ("lay", "asks", "now"),
    [([[2], [2]], ask("big", slot(4), est_s=14.0), 70.0), ([[2], [2]], ask("big", slot(4)), 59.0)],
    ids=["costs more than it gives", "in the round in which they started"],
)
def test_no_job_moves_without_gain_or_twice_in_a_round(lay: list[list[int]], asks: object, now: float) -> None:
    s = laid(lay)
    decisions = step(s, JobArrived(ask=asks), gandiva(ROUND_S), now)  # type: ignore[arg-type]
    assert not preempted(decisions, Reason.MIGRATED_AFFINITY)


def test_a_gang_that_would_fit_moves_nobody_where_that_spreads_what_is_free() -> None:
    s = laid([[2], [1, 3]], gpus=5, fixed=("n0j0", "n1j1"))
    decisions = step(s, JobArrived(ask=ask("gang", slot(2), slot(2), at=70)), gandiva(ROUND_S), 70.0)
    assert not preempted(decisions, Reason.MIGRATED_AFFINITY)


LAYS = st.lists(st.lists(st.integers(1, 3), max_size=3).filter(lambda sizes: sum(sizes) <= 4), min_size=2, max_size=3)


@settings(max_examples=40, deadline=None)
@given(lay=LAYS, want=st.integers(1, 4))
def test_moves_lower_the_potential_and_one_is_found_where_brute_force_finds_one(
    lay: list[list[int]], want: int
) -> None:
    s, profile = laid(lay), gandiva(ROUND_S)
    before = free(s)
    decisions = step(s, JobArrived(ask=ask("big", slot(want), at=70)), profile, 70.0)
    moves = preempted(decisions, Reason.MIGRATED_AFFINITY)
    if want <= max(before):
        assert [type(d) for d in decisions] == [Admit]
        return
    singles = [
        (i, j)
        for i, sizes in enumerate(lay)
        for size in sizes
        for j in range(len(lay))
        if i != j and before[j] >= size and before[i] + size >= want and before[j] < before[i] + size
    ]
    assert len(moves) == 1 if singles else len(moves) != 1
    if moves:
        after = list(before)
        for move in moves:
            size = s.jobs[move.job].ask.shape.gpus
            after[s.jobs[move.job].held[0].node] += size
            after[move.to[0].node] -= size
        assert max(after) >= want and min(after) >= 0 and potential(after) < potential(before)
        admits = {d.job: d.held for d in settle(s, decisions, 71.0) if isinstance(d, Admit)}
        assert admits.keys() == {"big", *(move.job for move in moves)}
        assert all(admits[move.job] == move.to for move in moves)
        check(s)


@settings(max_examples=40, deadline=None)
@given(held=st.lists(st.integers(0, 8), min_size=2, max_size=4), gpus=st.integers(1, 8))
def test_the_published_move_is_one_that_lowers_the_potential(held: list[int], gpus: int) -> None:
    before = {f"n{i}": 8 - n for i, n in enumerate(held)}
    move = choose_migration(before, 8, None, gpus)
    if move is not None:
        after = before | {move[0]: before[move[0]] + gpus, move[1]: before[move[1]] - gpus}
        assert potential(list(after.values())) < potential(list(before.values()))


def played(jobs: list[SimJob], *nodes: int, overheads: Overheads | None = None, packs: bool = False) -> SimResult:
    s = state(*(node(f"n{i}", gpus) for i, gpus in enumerate(nodes)))
    profile = with_sharing(gandiva_pack(ROUND_S) if packs else gandiva(ROUND_S))
    result = Simulation(s, profile, jobs, VirtualClock(), overheads=overheads).run()
    assert result.violations == 0 and all(run.state == "SUCCEEDED" for run in result.runs.values())
    return result


def sim(name: str, gpus: int, work_s: float, at: float = 0.0) -> SimJob:
    return SimJob(ask=ask(name, slot(gpus), at=at), submit_s=at, work_s=work_s)


def test_a_move_costs_a_save_and_a_restore_and_loses_no_work() -> None:
    jobs = [sim("a", 2, 500), sim("b", 2, 20), sim("c", 2, 1000), sim("d", 2, 20), sim("big", 4, 100, at=70)]
    result = played(jobs, 4, 4, overheads=Overheads(checkpoint_s=5.0, restore_s=25.0))
    assert (result.migrations, result.turns) == (1, 0)
    ends: dict[str, float | None] = {name: run.end_s for name, run in result.runs.items()}
    assert ends["big"] == 70 + 5 + 100
    assert (ends["a"], ends["c"]) in ((500, 1030), (530, 1000))
    assert sum(run.lost_gpu_s for run in result.runs.values()) == 0


@settings(max_examples=6, deadline=None)
@given(count=st.integers(2, 5), rounds=st.integers(1, 3))
def test_equal_jobs_on_one_device_get_equal_turns(count: int, rounds: int) -> None:
    result = played([sim(f"j{i}", 1, ROUND_S * rounds) for i in range(count)], 1)
    ends = sorted(run.end_s or 0.0 for run in result.runs.values())
    assert ends == [ROUND_S * (count * (rounds - 1) + i + 1) for i in range(count)]
    assert Counter(run.attempts for run in result.runs.values()) == {rounds: count}
    assert result.turns == count * (rounds - 1)


def test_turns_cost_a_twentieth_of_the_devices_at_most() -> None:
    jobs, cost = [sim(f"j{i}", 1, 6 * 3600.0) for i in range(2)], Overheads(checkpoint_s=5.0, restore_s=25.0)
    run = Simulation(state(node("n", 1)), get_profile("gandiva"), jobs, VirtualClock(), overheads=cost).run()
    assert run.turns >= 2 * 6 * 3600 / 660 - 2
    assert 12 * 3600.0 < run.last_s <= 12 * 3600.0 * 1.06


def test_a_large_job_gets_its_turns_among_small_ones_that_keep_coming() -> None:
    small = [sim(f"s{i}", 1, 90, at=i * 10.0) for i in range(36)]
    result = played([*small, sim("big", 4, 120, at=100.0)], 4)
    big = result.runs[JobId("big")]
    assert big.first_start_s == 180.0 and big.end_s is not None
    assert big.end_s < max(run.end_s or 0.0 for run in result.runs.values()) - 5 * ROUND_S


def test_jobs_that_may_not_be_stopped_neither_move_nor_take_turns() -> None:
    s = state(node("n", 1))
    apply(s, JobArrived(ask=ask("fixed", slot(1), preemptible=False)), 0.0)
    step(s, Tick(), gandiva(ROUND_S), 0.0)
    decisions = step(s, JobArrived(ask=ask("next", slot(1), at=70)), gandiva(ROUND_S), 70.0)
    assert not any(isinstance(d, Preempt) for d in decisions)
    apply(s, JobGone(job=JobId("fixed")), 80.0)
    assert [d.job for d in step(s, Tick(), gandiva(ROUND_S), 80.0) if isinstance(d, Admit)] == ["next"]


def elastic(name: str, most: int, work_s: float, at: float = 0.0) -> SimJob:
    return SimJob(ask=ask(name, slot(1), at=at, slots_max=most), submit_s=at, work_s=work_s)


def test_a_job_grows_into_idle_devices_and_gives_them_back_before_another_waits() -> None:
    result = played([elastic("wide", 4, 400.0), sim("two", 2, 50.0, at=30.0)], 4)
    wide, two = (result.runs[JobId(name)] for name in ("wide", "two"))
    assert (two.first_start_s, two.end_s) == (30.0, 80.0)
    assert wide.end_s == 80.0 + (400 - 4 * 30 - 2 * 50) / 4
    assert (result.preemptions, result.resizes, wide.used_gpu_s) == (0, 4, 400.0)


def test_two_that_grow_share_what_is_idle_evenly() -> None:
    result = played([elastic("a", 8, 40.0), elastic("b", 8, 40.0)], 8)
    assert [run.end_s for run in result.runs.values()] == [10.0, 10.0]


@settings(max_examples=300 if DEEP else 25, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 2, 8]), st.integers(0, 90)), min_size=2, max_size=7)
)
def test_nobody_waits_while_what_it_asks_is_idle_or_lent(jobs: list[tuple[int, int, int]]) -> None:
    s, profile = state(node("n0", 4), node("n1", 4)), with_sharing(gandiva(ROUND_S))
    for now, (gpus, most, leaves) in enumerate(jobs):
        asked = ask(f"j{now}", slot(gpus), at=float(now), slots_max=most // gpus)
        for decision in step(s, JobArrived(ask=asked), profile, float(now)):
            assert not isinstance(decision, Preempt), "in their first round jobs are neither moved nor stopped"
        check(s)
        rows = s.jobs.values()
        free = [4 - sum(len(h.devices) for r in rows for h in r.held[:1] if h.node == i) for i in range(2)]
        waiting = s.waiting_jobs()
        assert all(row.ask.shape.gpus > max(free) for row in waiting), "it would fit without what others were lent"
        if f"j{leaves // 13}" in s.jobs:
            apply(s, JobGone(job=JobId(f"j{leaves // 13}")), float(now))
            check(s)


@pytest.mark.parametrize(("speed", "stays"), [(0.8, True), (0.4, False), (0.52, False)])
def test_two_jobs_share_devices_only_as_long_as_that_was_measured_to_gain(speed: float, stays: bool) -> None:
    jobs = [sim("old", 2, 200.0), sim("new", 2, 200.0, at=1.0)]
    result = played(jobs, 2, overheads=Overheads(sharing={("", ""): speed}), packs=True)
    old, new = (result.runs[JobId(name)] for name in ("old", "new"))
    assert (old.first_start_s, new.first_start_s) == (0.0, 1.0), "nobody waits to begin with"
    if stays:
        assert (result.preemptions, old.end_s) == (0, 1 + (200 - 1) / speed)
        assert new.end_s == pytest.approx(1 + (200 - 1) / speed + 1)
    else:
        assert (result.resizes, result.turns >= 1) == (2, True), "shared once, whole again, never tried again"
        assert max(old.end_s or 0, new.end_s or 0) == pytest.approx(400 + 59 * (1 - 2 * speed))
    assert sum(run.lost_gpu_s for run in result.runs.values()) == 0


def test_sharing_gains_over_turns_where_jobs_leave_each_other_room_and_costs_little_where_not() -> None:
    jobs = [sim(f"j{i}", 1, 300.0, at=float(i)) for i in range(6)]

    def last(speed: float, *, packs: bool) -> float:
        result = played(jobs, 2, overheads=Overheads(sharing={("", ""): speed}), packs=packs)
        return max(run.end_s or 0.0 for run in result.runs.values())

    assert last(0.75, packs=True) < 0.8 * last(0.75, packs=False)
    assert last(0.5, packs=True) <= 1.05 * last(0.5, packs=False)
