"""Whole jobs on real Ray through the real master: they end, and they survive kill -9 of every kind of process."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.real.jobs import Run, deep, job, role, run_job

from rota.runtime.environ import Home
from rota.runtime.secrets import Vault
from rota.spec.events import (
    Committed,
    FailoverStarted,
    InstanceLost,
    InstanceStarted,
    MasterStarted,
    ProgressStalled,
    Reattached,
    RolledBack,
    StopAsked,
)
from rota.spec.job import Fail, JobSpec
from rota.spec.reasons import Reason
from rota.spec.states import JobState, Level

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_role_and_its_loop_run_to_success(engine) -> None:
    async def body(run: Run) -> None:
        ended = await run.end()
        assert (ended.state, ended.reason) == (JobState.SUCCEEDED, Reason.COMPLETED), run.story()
        ctx = run.context()
        assert ctx.committed == 5
        assert ctx.metrics["sum"] == 56
        assert set(ctx.metrics["pids"]) <= {run.pids()["doubler/0"], run.pids()["doubler/1"]}

    run_job(engine, job(role("doubler", "basic:Doubler", 2), role("loop", "basic:doubling")), body)


def doubling(*, pause_at: int = 2, steps: int = 5, **fields: Any) -> JobSpec:
    """Two doublers and a loop that pauses after a commit until the file ``go`` exists, still calling them."""
    roles = (role("doubler", "basic:Doubler", 2, **fields), role("loop", "basic:doubling"))
    return job(*roles, STEPS=str(steps), PAUSE_AT=str(pause_at))


async def succeed(run: Run) -> None:
    (run.output / "go").touch()
    ended = await run.end()
    assert (ended.state, ended.reason) == (JobState.SUCCEEDED, Reason.COMPLETED), run.story()


def changed(before: dict[str, int], after: dict[str, int]) -> set[str]:
    return {name for name in after if after[name] != before.get(name)}


def test_kill_9_of_a_stateless_instance_replaces_that_one_process_only(engine) -> None:
    async def body(run: Run) -> None:
        await run.until_committed(2)
        before = run.pids()
        run.kill("doubler/1")
        await run.until(lambda: run.starts("doubler/1") == 2)
        await succeed(run)
        assert changed(before, run.pids()) == {"doubler/1"}
        started, lost = run.events(FailoverStarted), run.events(InstanceLost)
        assert [(one.level, one.reason, one.scope[0][:2]) for one in started] == [
            (Level.PROCESS, Reason.SIGNALLED, ("doubler", 1))
        ]
        assert run.events(RolledBack) == [] or all(one.from_commit == one.to_commit for one in run.events(RolledBack))
        assert len(lost) == 1

    run_job(engine, doubling(), body)


def test_kill_9_of_the_loop_enters_it_again_at_the_last_commit(engine) -> None:
    async def body(run: Run) -> None:
        await run.until_committed(2)
        before = run.pids()
        run.kill("loop/0")
        await run.until(lambda: run.starts("loop/0") == 2)
        await succeed(run)
        assert changed(before, run.pids()) == {"loop/0"}
        assert [one.n for one in run.events(Committed)] == [1, 2, 3, 4, 5], "no commit twice, none lost"

    run_job(engine, doubling(), body)


@pytest.mark.parametrize("moment", ["starting", "running", pytest.param("failover", marks=deep)])
def test_kill_9_of_the_master_replaces_no_instance(engine, moment: str) -> None:
    async def body(run: Run) -> None:
        if moment == "starting":
            await run.until(lambda: run.events(InstanceStarted))
            before = {f"{one.role}/{one.rank}": one.pid for one in run.events(InstanceStarted)}
        else:
            await run.until_committed(2)
            before = run.pids()
        expected: set[str] = set()
        if moment == "failover":
            run.kill("doubler/0")
            await run.until(lambda: run.events(FailoverStarted))
            expected = {"doubler/0"}
        masters = len(run.events(MasterStarted))
        run.kill_master()
        await run.until(lambda: len(run.events(Reattached)) > masters)
        await run.until_committed(2)
        await succeed(run)
        after = run.pids()
        assert {name for name in before if after[name] != before[name]} <= expected, run.story()
        assert run.events(MasterStarted)[-1].master_epoch == run.events(MasterStarted)[0].master_epoch + 1

    run_job(engine, doubling(), body)


def test_an_operation_that_raises_once_costs_one_recovery_and_no_result(engine) -> None:
    async def body(run: Run) -> None:
        (run.output / "raise-once").touch()
        await run.until(lambda: run.events(FailoverStarted))  # the loop paused: it cannot end before the loss is told
        await succeed(run)
        lost = run.events(InstanceLost)
        assert [(one.reason, one.alive) for one in lost] == [(Reason.USER_ERROR, True)]
        assert "planned failure on item" in lost[0].text
        assert "basic.py" in lost[0].traceback
        assert len(run.events(FailoverStarted)) == 1

    run_job(engine, doubling(), body)


def test_an_operation_that_always_raises_ends_the_job_after_its_limit(engine) -> None:
    async def body(run: Run) -> None:
        (run.output / "raise-always").touch()
        ended = await run.end()
        assert (ended.state, ended.reason) == (JobState.FAILED, Reason.USER_ERROR), run.story()
        assert (ended.role, ended.rank) == ("doubler", 0)
        assert "planned failure on item" in ended.traceback
        assert len(run.events(InstanceLost)) == 3, "limit 2 is three runs"

    spec = job(role("doubler", "basic:Doubler", 1, fail=Fail(limit_n=2, then=("job",))), role("loop", "basic:doubling"))
    run_job(engine, spec, body)


def test_setup_that_raises_ends_the_job_with_its_traceback(engine) -> None:
    async def body(run: Run) -> None:
        ended = await run.end()
        assert (ended.state, ended.role, ended.rank) == (JobState.FAILED, "broken", 0), run.story()
        assert "setup is broken" in ended.traceback

    spec = job(
        role("broken", "basic:NeverReady", 1, fail=Fail(limit_n=0, then=("job",))), role("loop", "basic:doubling")
    )
    run_job(engine, spec, body)


def test_a_folder_that_takes_no_writes_is_told_while_the_job_is_checking_and_no_code_of_it_runs(
    engine, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    async def body(run: Run) -> None:
        ended = await run.end()
        assert (ended.state, ended.reason) == (JobState.FAILED, Reason.OUTPUT_FULL), run.story()
        assert f"{tmp_path / 'file' / 'below'} takes no writes: Not a directory" in ended.text
        states = [ctx.state for ctx in run.contexts()]
        assert JobState.CHECKING in states and JobState.STARTING not in states
        assert run.events(InstanceStarted) == []

    spec = job(role("main", "basic:leaks", fail=Fail(limit_n=0, then=())))
    run_job(engine, replace(spec, output=str(tmp_path / "file" / "below")), body)


def test_a_never_operation_raises_to_the_loop_and_restarts_nothing(engine) -> None:
    async def body(run: Run) -> None:
        await succeed(run)
        assert run.context().metrics == {"code": "CALL_FAILED", "role": "doubler", "has_trace": True}
        assert run.events(InstanceLost) == []

    run_job(engine, job(role("doubler", "basic:Doubler"), role("loop", "basic:catching")), body)


def test_what_cannot_travel_is_a_named_error_and_a_forgotten_await_is_in_the_log(engine) -> None:
    async def body(run: Run) -> None:
        await succeed(run)
        lock = "cannot be sent: cannot pickle '_thread.lock' object"
        assert run.context().metrics == {
            "arguments": f"INVALID: doubler.holds: args[0]['rows'][1] {lock}",
            "result": f"CALL_FAILED: doubler/0.holds: its result {lock}",
            "generator": "CALL_FAILED: doubler/0.lazily: BadInput: operation 'lazily' returned a generator; return a"
            " list; for results as they finish declare send=Each, recv=Stream and return one for each item",
        }
        assert run.events(InstanceLost) == []
        log = (run.home.job(run.job).logs / "loop-0.log").read_text()
        assert "basic.py" in log and "doubler.once() was called 1 time and never awaited, so it never ran" in log
        assert "\x1b" not in log and "RuntimeWarning" not in log

    run_job(engine, job(role("doubler", "basic:Doubler"), role("loop", "basic:sending")), body)


def test_a_loop_calls_one_instance_and_takes_the_answers_as_they_come(engine: Any) -> None:
    async def body(run: Run) -> None:
        await succeed(run)
        assert run.context().metrics == {
            "pids": 3,
            "order": [0.0, 0.25, 0.5],
            "error": "doubler[7]: its instances are 0 to 2",
        }

    run_job(engine, job(role("doubler", "basic:Doubler", 3), role("loop", "basic:choosing")), body)


def test_a_call_to_a_dead_role_ends_by_its_deadline_without_using_cpu(engine) -> None:
    async def body(run: Run) -> None:
        await run.until(lambda: run.context().state is JobState.RUNNING)
        (run.output / "dead").touch()
        run.kill("healing/0")
        await run.until(lambda: run.starts("healing/0") == 2)
        (run.output / "ask").touch()
        await run.until(lambda: (run.output / "healed").exists())
        found = json.loads((run.output / "found.json").read_text())
        assert found["raised"] == "ROLE_DOWN"
        assert found["role"] == "healing"
        assert 1.9 < found["seconds"] < 3.0
        assert found["cpu_s"] < 0.05 * found["seconds"] + 0.05, found

    run_job(engine, job(role("healing", "basic:Healing"), role("loop", "basic:asking_the_dead")), body)


def test_stop_ends_everything_as_cancelled(engine) -> None:
    async def body(run: Run) -> None:
        await run.until_committed(2)
        run.append(StopAsked(grace_s=2.0))
        ended = await run.end()
        assert (ended.state, ended.reason) == (JobState.CANCELLED, Reason.STOPPED_BY_USER)

    run_job(engine, doubling(), body)


@deep
def test_a_hang_is_told_with_its_stack_and_healed_while_a_declared_rest_and_slow_work_are_left_alone(engine) -> None:
    async def body(run: Run) -> None:
        ended = await run.end()
        assert ended.state is JobState.SUCCEEDED, run.story()
        (stalled,) = run.events(ProgressStalled)
        assert (stalled.role, stalled.rank) == ("sleepy", 0)
        assert 3.0 < stalled.idle_s < 15.0
        assert "stuck_here" in stalled.stacks
        assert run.starts("sleepy/0") == 2, "the hung process was replaced"
        assert run.context().metrics == {"rested": "rested", "pid": run.pids()["sleepy/0"]}

    run_job(engine, job(role("sleepy", "basic:Sleepy", fail=Fail(progress_s=3.0)), role("loop", "basic:napping")), body)


def test_a_plain_function_runs_once_with_its_context(engine) -> None:
    async def body(run: Run) -> None:
        assert (await run.end()).state is JobState.SUCCEEDED, run.story()
        assert (run.output / "plain.txt").read_text() == f"main 0 {run.job} here 127.0.0.1"

    run_job(engine, job(role("main", "basic:plain")), body)


def test_a_secret_reaches_the_job_and_neither_its_log_nor_its_events_nor_any_process_list(engine) -> None:
    value = "correct-horse-battery"

    async def body(run: Run) -> None:
        ended = await run.end()
        assert ended.state is JobState.FAILED, run.story()
        assert (run.output / "used").read_text() == value
        log = (run.home.job(run.job).logs / "main-0.log").read_text()
        assert "the key is ******, once more ******" in log and "child knows ******" in log
        assert "cannot log in with ******" in ended.text + ended.traceback
        assert value not in log and value not in run.story()
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                assert value not in process.read_text(errors="replace")

    Vault(Home.of(engine.home).make()).put("local", "API_KEY", value)
    spec = job(role("main", "basic:leaks", fail=Fail(limit_n=0, then=())))
    run_job(engine, replace(spec, secrets=("API_KEY",)), body)
