"""Injected hangs in real processes: the culprit is named and replaced within twice its limit, and nobody else is."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace

import pytest
from tests.real.jobs import Run, deep, job, role, run_job

from rota.runtime.probe import STOPPED_LOOKS
from rota.spec.events import Committed, FailoverStarted, InstanceLost, ProgressStalled
from rota.spec.ids import RoleName
from rota.spec.job import Fail, RoleSpec
from rota.spec.reasons import Reason
from rota.spec.resources import Res
from rota.spec.states import JobState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 5.0
TOLD_MAX_S = 2 * LIMIT_S if os.environ.get("ROTA_DEEP") else 4 * LIMIT_S
"""Twice the limit where the machine has nothing else to do; else its load counts too."""
FAIL = Fail(progress_s=LIMIT_S)
LEGAL_S = float(os.environ.get("ROTA_LEGAL_S", "300"))


def told(run: Run) -> dict[str, ProgressStalled]:
    return {f"{one.role}/{one.rank}": one for one in run.events(ProgressStalled)}


async def healed(run: Run) -> dict[str, ProgressStalled]:
    ended = await run.end()
    assert ended.state is JobState.SUCCEEDED, run.story()
    found = told(run)
    assert len(run.events(ProgressStalled)) == len(found), "each culprit is told once"
    assert run.events(InstanceLost) == []
    stopped = found.get("stop/0")
    assert stopped is None or (stopped.idle_s == STOPPED_LOOKS and "stopped by a signal" in stopped.text), stopped
    rest = {name: one.idle_s for name, one in found.items() if one is not stopped}
    slow = {name: idle_s for name, idle_s in rest.items() if not LIMIT_S <= idle_s <= TOLD_MAX_S}
    assert not slow, "told too late, or too early"
    return found


def test_eleven_ways_to_hang_at_once_are_each_told_with_their_culprit_and_healed(engine) -> None:
    quiet = [role("slow", "hangs:Slow", fail=FAIL), role("idle", "hangs:Slow", fail=FAIL)]
    names = importlib.import_module("hangs").ROLES  # the folder of workloads is on the path since the first role

    stacks = {"sleep": "hang_sleep", "spin": "hang_spin", "gil": "hang_gil", "lock": "hang_lock", "read": "hang_read"}

    async def body(run: Run) -> None:
        found = await healed(run)
        assert set(found) == {f"{name}/0" for name in names}, f"one too many or too few\n{run.story()}"
        assert {name: function in found[f"{name}/0"].stacks for name, function in stacks.items()} == dict.fromkeys(
            stacks, True
        )
        assert "is stopped by a signal" in found["stop/0"].stacks
        hang = {name for name, one in found.items() if one.reason is Reason.HANG}
        assert hang == {"left/0", "right/0", "itself/0"}
        cycle = "left/0 waits for right/0 (declared a socket); right/0 waits for left/0 (declared a socket)"
        assert found["left/0"].text == found["right/0"].text == cycle
        assert "process 4194305" in found["gone/0"].text
        assert all("loop/0" in found[f"{name}/0"].text for name in stacks), "who waits for it is said"
        assert run.context().metrics == {"found": sorted([*names, "slow"])}

    roles = [role(name, "hangs:Hanging", fail=FAIL) for name in names]
    run_job(engine, job(*roles, *quiet, role("loop", "hangs:everything", fail=FAIL)), body)


@deep
def test_a_rank_that_does_not_come_to_the_collective_is_the_culprit_and_not_those_who_wait_there(engine) -> None:
    async def body(run: Run) -> None:
        found = await healed(run)
        assert set(found) == {"ranks/1"}
        assert "loop/0, ranks/0 wait for it" in found["ranks/1"].text
        assert run.context().committed == 5

    ranks = role("ranks", "hangs:Ranks", 2, mesh=(("dp", 2),), fail=replace(FAIL, check="full"))
    run_job(engine, job(ranks, role("loop", "hangs:in_step", fail=FAIL)), body)


@deep
def test_a_loop_that_hangs_between_two_calls_is_told_and_entered_again(engine) -> None:
    async def body(run: Run) -> None:
        found = await healed(run)
        assert set(found) == {"loop/0"}
        assert run.context().metrics == {"done": True}

    run_job(
        engine, job(role("slow", "hangs:Slow", fail=FAIL), role("loop", "hangs:stuck_between_calls", fail=FAIL)), body
    )


@deep
@pytest.mark.timeout(500)
def test_five_minutes_of_long_and_legal_steps_accuse_nobody(engine) -> None:
    async def body(run: Run) -> None:
        ended = await run.end(limit_s=450.0)
        assert ended.state is JobState.SUCCEEDED, run.story()
        assert run.events(ProgressStalled, InstanceLost, FailoverStarted) == []
        assert run.context().metrics == {"found": ["legal", "waited"]}

    silent = RoleSpec(name=RoleName("silent"), run=(f"sleep {LEGAL_S + 20}",), shell=True, res=Res(cpus=0.5))
    roles = [role(name, "hangs:Legal", fail=FAIL) for name in ("legal", "other", "idle")]
    spec = job(*roles, silent, role("loop", "hangs:legally", fail=FAIL), LEGAL_S=str(LEGAL_S))
    run_job(engine, spec, body, limit_s=480.0)


def test_a_loss_that_is_not_finite_is_not_committed_and_the_loop_goes_on_from_the_commit_before(engine) -> None:
    async def body(run: Run) -> None:
        ended = await run.end()
        assert ended.state is JobState.SUCCEEDED, run.story()
        (lost,) = run.events(InstanceLost)
        assert (lost.role, lost.reason) == ("loop", Reason.NAN_LOSS)
        assert "commit 2 is refused: loss=nan" in lost.text
        assert [one.metrics["loss"] for one in run.events(Committed)] == [1.0, 0.5, 1.0 / 3]

    run_job(engine, job(role("loop", "hangs:not_finite", fail=Fail(nan="rollback"))), body)
