"""Jobs with state on real Ray: after any death the job equals a prefix of its commits, bit for bit."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
from tests.real.jobs import Run, deep, job, role, run_job

from rota.spec.events import CheckpointSaved, Committed, FailoverStarted, RolledBack
from rota.spec.ids import RoleName
from rota.spec.job import Checkpoint, Fail, JobSpec, WeightsEdge
from rota.spec.states import JobState

pytestmark = [pytest.mark.usefixtures("registry"), pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 6
TOTAL = sum(n * sum((0 + 2 + 4 + 6 + 1 + 3 + 5 + 7) * 2 / 4 for _ in (0,)) for n in range(1, STEPS + 1))
"""The mean row of each batch, summed over its columns, times the number of the commit."""


def training(pause_at: int = 3, **fields: Any) -> JobSpec:
    learner = role("learner", "learning:Learner", 2, mesh=(("dp", 2),), **fields)
    edge = WeightsEdge(source=RoleName("learner"), target=RoleName("reader"))
    return job(
        learner,
        role("reader", "learning:Reader", 2),
        role("loop", "learning:training"),
        weights=(edge,),
        STEPS=str(STEPS),
        PAUSE_AT=str(pause_at),
    )


async def succeed(run: Run) -> None:
    (run.output / "go").touch()
    ended = await run.end()
    assert ended.state is JobState.SUCCEEDED, run.story()
    assert run.context().metrics["total"] == pytest.approx(TOTAL, abs=1e-6)


async def until_paused(run: Run) -> None:
    """The learner has done update 3, which is not committed."""
    await run.until(lambda: (run.output / "paused-2").exists())


@deep
def test_a_stateful_mesh_and_readers_of_its_weights_run_to_success(engine) -> None:
    async def body(run: Run) -> None:
        await succeed(run)
        assert [one.n for one in run.events(Committed)] == list(range(1, STEPS + 1))
        assert run.context().versions == {"learner-reader": STEPS}

    run_job(engine, training(pause_at=-1), body)


ALSO = [pytest.param(one, marks=deep) for one in ("learner/0", "reader/1")]


@pytest.mark.parametrize("victim", ["learner/1", "loop/0", *ALSO])
def test_kill_9_goes_back_to_the_last_commit_and_reaches_the_same_numbers(engine, victim: str) -> None:
    async def body(run: Run) -> None:
        await until_paused(run)
        before = run.pids()
        nice = {os.getpriority(os.PRIO_PROCESS, pid) for pid in before.values()}
        assert nice == {os.getpriority(os.PRIO_PROCESS, 0)}, "a job has no less of a busy machine than others"
        run.kill(victim)
        await run.until(lambda: run.starts(victim) == 2)
        await succeed(run)
        changed = {name for name, pid in run.pids().items() if pid != before[name]}
        assert victim in changed
        assert not any(name.startswith("reader") for name in changed - {victim}), "readers keep their processes"
        assert [one.n for one in run.events(Committed)] == list(range(1, STEPS + 1))
        rolled = [(one.from_commit, one.to_commit) for one in run.events(RolledBack)]
        assert all(back == (2, 2) for back in rolled), rolled

    run_job(engine, training(), body)


@pytest.mark.parametrize("dead", [0, pytest.param(1, marks=deep)])
def test_restart_process_replaces_the_dead_rank_and_re_forms_the_living_one_in_place(engine, dead: int) -> None:
    async def body(run: Run) -> None:
        await until_paused(run)
        before = run.pids()
        run.kill(f"learner/{dead}")
        await succeed(run)
        changed = {name for name, pid in run.pids().items() if pid != before[name]}
        assert changed == {f"learner/{dead}"}, run.story()

    run_job(engine, training(fail=Fail(restart="process")), body)


def test_state_and_weights_that_are_gone_from_memory_come_back_from_the_checkpoint(engine) -> None:
    async def body(run: Run) -> None:
        from rota import tensors

        await run.until(lambda: (run.output / "paused-3").exists() and run.events(CheckpointSaved))
        plane = tensors.connect(home=engine.home, keep=True)
        shadows = [f"shadow/{run.job}/learner/{rank}" for rank in (0, 1)]
        weights = [f"weights/{run.job}/learner-{reader}" for reader in ("late", "reader")]
        assert [row.name for row in plane.ls()] == shadows + weights, run.story()
        for name in shadows + weights:
            plane.delete(name)
        for victim in ("learner/1", "reader/0", "late/0"):
            run.kill(victim)
        await succeed(run)
        assert [one.n for one in run.events(CheckpointSaved)] == [3, 6], run.story()
        (kept,) = (path for path in (run.home.checkpoints / run.job).iterdir())
        assert kept.name.startswith("step-6") and (kept / "learner-0.state").exists()

    spec = training(pause_at=4)
    late = WeightsEdge(source=RoleName("learner"), target=RoleName("late"), every=2)
    spec = dataclasses.replace(
        spec,
        roles=(*spec.roles, role("late", "learning:Reader")),
        weights=(*spec.weights, late),
        env=(*spec.env, ("LATE", "1")),
        checkpoint=Checkpoint(every="3 commits", keep=1),
    )
    run_job(engine, spec, body)


def test_an_update_that_raises_is_rolled_back_and_never_run_twice_under_one_epoch(engine) -> None:
    async def body(run: Run) -> None:
        await until_paused(run)
        (run.output / "raise-update").touch()
        await succeed(run)
        assert len(run.events(FailoverStarted)) == 1, run.story()
        for rank in (0, 1):
            lines = (run.home.job(run.job).work / f"learner-{rank}" / "updates.txt").read_text().split("\n")[:-1]
            assert len(lines) == len(set(lines)), "the same update twice under one epoch"

    run_job(engine, training(), body)


def test_kill_9_of_the_master_during_the_failover_of_a_mesh_still_reaches_the_same_numbers(engine) -> None:
    async def body(run: Run) -> None:
        await until_paused(run)
        before = run.pids()
        run.kill("learner/1")
        await run.until(lambda: run.events(FailoverStarted))
        run.kill_master()
        await succeed(run)
        changed = {name for name, pid in run.pids().items() if pid != before[name]}
        assert not any(name.startswith(("reader", "loop")) for name in changed), changed

    run_job(engine, training(), body)
