"""Commands and unmodified torchrun scripts as roles: their environment, their end, their errors, their deaths."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.real.jobs import WAIT_S, Run, example, run_job

from rota.runtime import process
from rota.runtime.clock import SystemClock
from rota.runtime.launcher import Call
from rota.service.control.job_plans import with_plans
from rota.spec.events import FailoverStarted, InstanceLost, ProgressStalled
from rota.spec.ids import RoleName
from rota.spec.job import Fail, JobSpec, RoleSpec
from rota.spec.reasons import Reason
from rota.spec.resources import Res
from rota.spec.states import JobState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def command(text: str, n: int = 1, **fields: Any) -> RoleSpec:
    return RoleSpec(
        name=RoleName("main"), run=(text,), shell=True, replicas_min=n, replicas_max=n, res=Res(cpus=0.5), **fields
    )


def job(role: RoleSpec, **env: str) -> JobSpec:
    return JobSpec(name="spmd", roles=(role,), env=tuple(env.items()), grace_s=5.0)


def result(run: Run) -> list[str]:
    return (run.output / "result.txt").read_text().split(maxsplit=7)


def log_of(run: Run, instance: str = "main-0") -> str:
    return (run.home.job(run.job).logs / f"{instance}.log").read_text()


def test_a_plain_python_line_runs_to_success_and_its_output_is_logged(engine) -> None:
    async def body(run: Run) -> None:
        ended = await run.end()
        assert ended.state is JobState.SUCCEEDED, run.story()
        assert f"hello from None of 1 in {run.job}" in log_of(run), "one process has no rank"
        ray = re.search(r"Ray (/tmp/\S+) \['RAY_DEDUP_LOGS', 'RAY_TMPDIR'\]", log_of(run))
        assert ray is not None, "a Ray that the command starts takes no setting of the engine, and has a folder"
        assert not Path(ray[1]).exists(), "that folder goes with the command"

    hello = "print('hello from', e.get('RANK'), 'of 1 in', e['ROTA_JOB'])"
    ray = "mkdir(e['RAY_TMPDIR']); print('Ray', e['RAY_TMPDIR'], sorted(n for n in e if n[:4] == 'RAY_'))"
    line = f'python -c "from os import environ as e, mkdir; {hello}; {ray}"'
    run_job(engine, job(command(line), RAY_DEDUP_LOGS="0"), body)


def test_a_torchrun_line_runs_its_ranks_with_the_environment_of_torchrun(engine) -> None:
    async def body(run: Run) -> None:
        ended = await run.end()
        assert ended.state is JobState.SUCCEEDED, run.story()
        found = result(run)
        assert found[2:7] == ["0", "2", "2", "1", "main"]
        assert found[7] == "['--steps', '60', '--lr', '1e-3']"
        assert abs(float(found[0]) - 3) < 0.5 and abs(float(found[1]) - 1) < 0.5

    run_job(engine, job(command("torchrun --nproc-per-node 2 tiny_train.py --steps 60 --lr 1e-3")), body)


def fitted(steps: int) -> tuple[float, float]:
    """What tiny_train.py fits in one process: the mean of the ranks' gradients is the gradient of the whole batch."""
    line = torch.nn.Linear(1, 1)
    for parameter in line.parameters():
        torch.nn.init.zeros_(parameter)
    optimiser = torch.optim.SGD(line.parameters(), lr=0.2)
    for step in range(steps):
        x = torch.rand(8, 1, generator=torch.Generator().manual_seed(step))
        optimiser.zero_grad()
        ((line(x) - (3 * x + 1)) ** 2).mean().backward()
        optimiser.step()
    return line.weight.item(), line.bias.item()


def test_kill_9_of_one_rank_goes_on_from_the_script_s_checkpoint_with_the_same_result(engine) -> None:
    async def body(run: Run) -> None:
        await run.until(lambda: (run.output / "paused-0").exists() and (run.output / "paused-1").exists())
        before = run.pids()
        victim = psutil.Process(before["main/1"]).children(recursive=True)
        ranks = [one for one in victim if "tiny_train.py" in " ".join(one.cmdline())]
        ranks[0].kill()
        (run.output / "go").touch()
        ended = await run.end()
        assert ended.state is JobState.SUCCEEDED, run.story()
        lost = run.events(InstanceLost)
        assert (lost[0].role, lost[0].rank, lost[0].reason) == ("main", 1, Reason.SIGNALLED), run.story()
        assert len(run.events(FailoverStarted)) == 1, run.story()
        found = result(run)
        assert found[2] == "20", "it resumed"
        assert [float(number) for number in found[:2]] == pytest.approx(fitted(30), abs=2e-6)

    role = command("python tiny_train.py --steps 30", n=2, mesh=(("dp", 2),))
    run_job(engine, job(role, PAUSE_AT="20"), body)


def test_of_the_ranks_of_a_world_the_one_that_stands_still_is_suspected_and_not_those_who_wait_for_it(engine) -> None:
    async def body(run: Run) -> None:
        await run.until(lambda: (run.output / "paused-0").exists() and (run.output / "paused-1").exists())
        below = psutil.Process(run.pids()["main/1"]).children(recursive=True)
        rank = next(one for one in below if "tiny_train.py" in " ".join(one.cmdline()))
        report = Path(rank.environ()["ROTA_PROGRESS_FILE"])
        await run.until(lambda: report.exists() and int(report.read_text().split()[1]) > 0)  # written every 0.25 s
        rank.suspend()
        (run.output / "go").touch()
        assert run.master is not None
        async with asyncio.timeout(WAIT_S):
            while True:
                told = await run.launcher.call(run.master, Call(method="why", timeout_s=30.0))
                if told["stacks"] and any(one["kind"] == "collective" for one in told["waits"]):
                    break
                await asyncio.sleep(0.5)
        assert [(one["source"], one["target"]) for one in told["waits"]] == [("main/0", "main/1")]
        assert set(told["stacks"]) == {"main/1"}, "one that waits in a collective is not suspected"
        stopped = rf"rank 1: process {rank.pid} is stopped by a signal, \d+ collectives entered"
        assert re.search(stopped, told["stacks"]["main/1"])
        rank.resume()
        assert (await run.end()).state is JobState.SUCCEEDED, run.story()
        assert run.events(InstanceLost, FailoverStarted) == []

    role = command("python tiny_train.py --steps 30", n=2, mesh=(("dp", 2),), fail=Fail(progress_s=200.0))
    run_job(engine, job(role, PAUSE_AT="20"), body)


RUNS_S, SAMPLING_S = 15.0, 10.0
"""How long the command runs before its rank is stopped; how far the age of a wait may be off on a busy machine."""


async def why(run: Run) -> dict[str, Any]:
    assert run.master is not None
    return await run.launcher.call(run.master, Call(method="why", timeout_s=30.0))


async def ranks_of(run: Run) -> list[psutil.Process]:
    """The processes of the two ranks, once both are in the loop of ``collectives.py``."""
    await run.until(lambda: all((run.output / f"rank-{rank}").exists() for rank in (0, 1)))
    found = [await run.until((run.output / f"rank-{rank}").read_text) for rank in (0, 1)]
    return [psutil.Process(int(pid)) for pid in found]


def test_a_script_that_only_enters_collectives_moves_under_a_short_limit_on_progress(engine) -> None:
    async def body(run: Run) -> None:
        await ranks_of(run)
        began_s = time.monotonic()
        while time.monotonic() - began_s < 1.5 * limit_s:
            found = await why(run)
            assert found["culprits"] == [], "its collectives are progress"
            await asyncio.sleep(1.0)
        (run.output / "go").touch()
        assert (await run.end()).state is JobState.SUCCEEDED, run.story()
        assert run.events(InstanceLost, FailoverStarted) == []
        assert run.events(ProgressStalled) == []

    limit_s = 20.0
    line = "torchrun --nproc-per-node 2 collectives.py"
    run_job(engine, job(command(line, fail=Fail(progress_s=limit_s))), body)


def test_a_stopped_rank_is_named_without_a_limit_and_the_wait_counts_from_its_stop(engine) -> None:
    """The command runs for longer than the wait is old, and whoever asks again gets the same answer."""

    async def body(run: Run) -> None:
        ranks, began_s = await ranks_of(run), time.monotonic()
        await asyncio.sleep(RUNS_S)
        ranks[1].suspend()
        stopped_s = time.monotonic()
        async with asyncio.timeout(WAIT_S):
            while not (found := await why(run))["waits"] or not found["stacks"]:
                await asyncio.sleep(0.2)
        for _ in range(5):
            found, age_s = await why(run), time.monotonic() - stopped_s
            assert [(one["source"], one["target"]) for one in found["waits"]] == [("main/0", "main/1")]
            assert found["waits"][0]["age_s"] < age_s + SAMPLING_S < time.monotonic() - began_s
            [suspect] = found["suspects"]
            assert (suspect["members"], suspect["waiters"]) == (["main/1"], ["main/0"])
            assert f"in command: rank 1, process {ranks[1].pid}, is stopped by a signal" in suspect["text"]
            assert set(found["stacks"]) == {"main/1"}
            assert not any(word in found["stacks"]["main/1"] for word in ("importlib", "runpy", "rota-progress"))
            await asyncio.sleep(0.5)
        ranks[1].resume()
        (run.output / "go").touch()
        assert (await run.end()).state is JobState.SUCCEEDED, run.story()
        assert run.events(InstanceLost, FailoverStarted) == []

    run_job(engine, job(command("python collectives.py", n=2, mesh=(("dp", 2),))), body)


def test_kill_9_of_the_wrapper_leaves_no_rank_behind(engine) -> None:
    async def body(run: Run) -> None:
        await run.until(lambda: (run.output / "paused-0").exists() and (run.output / "paused-1").exists())
        wrapper = run.pids()["main/0"]
        below = [pid for pid in process.children_of(wrapper) if "tiny_train.py" in process.command_line(pid)]
        ranks = [one for pid in below if (one := process.identify(pid)) is not None]
        assert len(ranks) == 2
        run.kill("main/0")
        await run.until(lambda: not any(map(process.is_alive, ranks)), 10)
        (run.output / "go").touch()
        assert (await run.end()).state is JobState.SUCCEEDED, run.story()
        assert run.starts("main/0") == 2

    line = "torchrun --nproc-per-node 2 tiny_train.py --steps 30"
    run_job(engine, job(command(line), PAUSE_AT="20"), body)


def test_plan_auto_gives_the_ranks_the_plan_that_was_searched_and_they_learn_under_it(engine) -> None:
    """Planned for other devices: bf16, which the ranks would not choose here by themselves."""
    file = Path(__file__).parents[2] / "examples" / "pretrain" / "job.yaml"
    given = example(file, name="planned")
    [role] = given.roles
    assert role.model is not None
    role = dataclasses.replace(role, model=dataclasses.replace(role.model, hardware="a100-80g-dgx"))
    spec = with_plans(dataclasses.replace(given, roles=(role,)), str(file.parent), SystemClock())
    chosen = [one.plan for one in spec.role("main").plans if one.replicas == 2]
    assert '"param":"bf16"' in chosen[0]

    async def body(run: Run) -> None:
        assert (await run.end()).state is JobState.SUCCEEDED, run.story()
        losses = [float(text) for text in re.findall(r"step +\d+ +loss ([\d.]+)", log_of(run))]
        assert len(losses) == 2 and losses[1] < losses[0] < 5, f"a fresh model is at 5.55\n{run.story()}"
        [manifest] = (run.home.root / "checkpoints" / run.job).rglob("manifest.json")
        assert [json.loads(manifest.read_text())["extra"]["plan"]] == chosen

    run_job(engine, spec, body)


def test_an_exception_in_one_rank_is_the_reported_error_and_limit_k_is_k_plus_1_runs(engine) -> None:
    async def body(run: Run) -> None:
        ended = await run.end()
        assert (ended.state, ended.reason) == (JobState.FAILED, Reason.USER_ERROR), run.story()
        assert "ValueError: planned failure in step" in ended.text
        assert "failing.py" in ended.traceback
        assert ended.role == "main"
        assert "rank 1:" in ended.text
        assert log_of(run).count("ValueError: planned failure in step") == 2, "limit 1 is two runs"

    role = command("torchrun --nproc-per-node 2 failing.py", fail=Fail(limit_n=1, then=("job",)))
    run_job(engine, job(role), body)


def test_exit_status_and_signal_are_reasons(engine) -> None:
    async def exits(run: Run) -> None:
        ended = await run.end()
        told = "ended with exit status 7: no such data"
        assert (ended.reason, ended.text) == (Reason.EXIT_NONZERO, told), run.story()
        assert ended.traceback == "opening\nno such data", "its own words, and nothing of Rota's"

    async def signalled(run: Run) -> None:
        ended = await run.end()
        assert (ended.reason, ended.text) == (Reason.SIGNALLED, "was ended by SIGABRT"), run.story()

    once = Fail(limit_n=0, then=("job",))
    run_job(engine, job(command("echo opening >&2; echo no such data >&2; exit 7", fail=once)), exits)
    run_job(engine, job(command("kill -ABRT $$", fail=once)), signalled)
