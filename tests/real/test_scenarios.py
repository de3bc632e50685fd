"""The example jobs on real Ray, killed while they run: the figures are those of one process."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.examples.test_sft_stdlib import result, torchrun
from tests.real.jobs import Run, deep, example, run_job

from rota.service.jobfile.reader import read_job
from rota.spec.events import Committed
from rota.spec.job import JobSpec
from rota.spec.states import JobState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
shares_tensors = pytest.mark.usefixtures("registry")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SFT = 2
"""Supervised steps of the shortened grpo_sums."""
Rows = dict[int, dict[str, float]]


def scenario(
    name: str, file: str = "job.yaml", change: Callable[[JobSpec], JobSpec] | None = None, **env: Any
) -> JobSpec:
    """The job of an example; ``change`` and ``env`` shorten it."""
    path = EXAMPLES / name / file
    spec = read_job(path.read_text(), filename=file)
    spec = change(spec) if change is not None else spec
    words = tuple((key, str(value)) for key, value in env.items())
    return example(path, roles=spec.roles, weights=spec.weights, streams=spec.streams, env=(*spec.env, *words))


def reference(name: str, **env: Any) -> list[dict[str, Any]]:
    """What the same training prints in one process."""
    words = {**os.environ, **{key: str(value) for key, value in env.items()}}
    done = subprocess.run(
        [sys.executable, "reference.py"],
        cwd=EXAMPLES / name,
        env=words,
        capture_output=True,
        check=True,
        text=True,
    )
    try:
        return [json.loads(done.stdout)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in done.stdout.splitlines()]


@deep
@shares_tensors
def test_two_towers_learn_over_a_gradient_edge_what_one_process_learns_though_three_are_killed(engine) -> None:
    pytest.importorskip("sklearn")
    steps = 300

    async def body(run: Run) -> None:
        for n, victim in ((2, "speller/1"), (40, "vision/0"), (80, "loop/0")):
            await run.until_committed(n)
            run.kill(victim)
        ended = await run.end(500)
        assert ended.state is JobState.SUCCEEDED, run.story()
        rows = [json.loads(line) for line in (run.output / "curve.jsonl").read_text().splitlines()]
        wanted = reference("mm_digits", MM_STEPS=steps)
        assert len(rows) == steps
        for row, want in zip(rows, wanted, strict=False):
            assert row == pytest.approx(want, rel=1e-12), "to the last digits: the reference sums up in the same order"
        right = json.loads((run.output / "result.json").read_text())["right"]
        assert right == pytest.approx(wanted[-1]["right"], abs=1e-9)
        assert right >= 0.95

    run_job(engine, scenario("mm_digits", MM_STEPS=steps), body, 550)


@deep
@shares_tensors
def test_players_an_actor_and_a_critic_give_the_run_of_one_process_though_four_are_killed(engine) -> None:
    pytest.importorskip("gymnasium")
    steps = 100

    async def body(run: Run) -> None:
        for n, victim in ((2, "player/0"), (4, "actor/0"), (20, "critic/0"), (50, "loop/0")):
            await run.until_committed(n)
            run.kill(victim)
        ended = await run.end(500)
        assert ended.state is JobState.SUCCEEDED, run.story()
        greedy = json.loads((run.output / "result.json").read_text())["greedy"]
        (wanted,) = reference("ppo_cartpole", PPO_STEPS=steps)
        assert greedy == wanted["greedy"]
        commits = run.events(Committed)
        assert [one.n for one in commits] == list(range(1, steps + 2))
        assert commits[-1].metrics == wanted["last"], "bit for bit, to the last step"
        assert greedy >= 195

    run_job(engine, scenario("ppo_cartpole", PPO_STEPS=steps), body, 550)


@deep
@shares_tensors
def test_online_learning_killed_three_times_gives_the_figures_of_one_process_and_servers_keep_up(engine) -> None:
    pytest.importorskip("river")

    async def body(run: Run) -> None:
        for n, victim in ((1, "feat/0"), (2, "train/0"), (3, "loop/0")):
            await run.until_committed(n)
            run.kill(victim)
        ended = await run.end()
        assert ended.state is JobState.SUCCEEDED, run.story()
        assert json.loads((run.output / "result.json").read_text()) == reference("online_drift")[0]
        commits = run.events(Committed)
        cut = commits[-1].cursor["cut"]["streams"]["events"]
        assert (cut["trained"], cut["open"], cut["dropped"]) == (370, [], {})
        served = (run.home.job(run.job).logs / "serve-0.log").read_text()
        versions = [int(found) for found in re.findall(r"version (\d+), ", served)]
        assert len(versions) >= 2 and versions == sorted(versions) and commits[-1].n - versions[-1] <= 10

    run_job(engine, scenario("online_drift"), body)


@deep
def test_an_unmodified_torchrun_script_killed_once_gives_the_curve_of_torchrun(engine, tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        await run.until(lambda: (run.output / "paused-0").exists() and (run.output / "paused-1").exists())
        ranks = psutil.Process(run.pids()["train/1"]).children(recursive=True)
        next(one for one in ranks if "train.py" in " ".join(one.cmdline())).kill()
        (run.output / "go").touch()
        assert (await run.end()).state is JobState.SUCCEEDED, run.story()
        found, wanted = result(run.output), result(tmp_path)
        assert found["resumed_at"] == 40, "the second start went on from the checkpoint"
        assert found["curve"] == wanted["curve"] and found["share"] == wanted["share"] <= 0.75

    def shorter(spec: JobSpec) -> JobSpec:
        line = "python train.py --steps 60 --save-every 20 --bytes 2000000 --pause-at 50"
        role = dataclasses.replace(spec.roles[0], run=(line,), replicas_min=2, mesh=(("dp", 2),))
        return dataclasses.replace(spec, roles=(role,))

    assert torchrun(tmp_path).wait(120) == 0
    run_job(engine, scenario("sft_stdlib", change=shorter), body)


def grpo(file: str, versions: int | None = None, steps: int = 10) -> JobSpec:
    def shorter(spec: JobSpec) -> JobSpec:
        weights = tuple(dataclasses.replace(edge, every=min(edge.every, SFT)) for edge in spec.weights)
        streams = tuple(
            dataclasses.replace(one, stale=dataclasses.replace(one.stale, versions=versions)) if one.stale else one
            for one in spec.streams
        )
        return dataclasses.replace(spec, weights=weights, streams=streams)

    return scenario("grpo_sums", file, shorter, SFT_STEPS=SFT, GRPO_STEPS=steps)


async def rows_of(run: Run) -> Rows:
    ended = await run.end(400)
    assert ended.state is JobState.SUCCEEDED, run.story()
    lines = (run.output / "metrics.jsonl").read_text().splitlines()
    return {row["n"]: row for row in map(json.loads, lines)}


@deep
@shares_tensors
def test_in_step_the_streams_of_grpo_give_the_synchronous_run_bit_for_bit(engine) -> None:
    found: list[Rows] = []

    async def body(run: Run) -> None:
        found.append(await rows_of(run))

    run_job(engine, grpo("job.yaml"), body, 500)
    run_job(engine, grpo("job_async.yaml", versions=0), body, 500)
    in_turn, in_step = found
    assert len(in_turn) == SFT + 10
    assert all(row.pop("age", 0.0) == 0 for row in in_step.values())
    assert in_step == in_turn


@deep
@shares_tensors
def test_five_kills_of_grpo_never_let_a_sample_get_too_old(engine) -> None:
    async def body(run: Run) -> None:
        for n, victim in enumerate(("rollout/0", "actor/1", "reward/0", "loop/0", "rollout/1")):
            await run.until_committed(SFT + 2 * n + 2, 200)
            run.kill(victim)
        rows = await rows_of(run)
        ages = [row["age"] for n, row in rows.items() if n > SFT]
        assert len(ages) == 16 and 1 <= max(ages) <= 2, ages
        cut = run.events(Committed)[-1].cursor["cut"]["streams"]["groups"]
        assert (cut["admitted"], cut["trained"], cut["dropped"]) == (16 * 4, 16 * 4, {}), cut

    run_job(engine, grpo("job_async.yaml", versions=2, steps=16), body, 500)
