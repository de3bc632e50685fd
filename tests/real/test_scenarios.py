"""The example jobs on real Ray, killed while they run: the figures are those of one process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.real.jobs import Run, run_job

from rota.service.inspection import inspect_workloads
from rota.service.jobfile import read_job
from rota.spec.events import Committed
from rota.spec.job import JobSpec
from rota.spec.states import JobState

pytestmark = [
    pytest.mark.usefixtures("registry"),
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEEP = bool(os.environ.get("ROTA_DEEP"))


def example(name: str, file: str = "job.yaml", **env: Any) -> JobSpec:
    """The job of an example; ``env`` shortens it."""
    folder = EXAMPLES / name
    spec = read_job((folder / file).read_text(), filename=file)
    words = tuple((key, str(value)) for key, value in env.items())
    spec = dataclasses.replace(spec, env=(*spec.env, *words), workdir=str(folder))
    found = asyncio.run(inspect_workloads(spec, str(folder)))
    assert isinstance(found, JobSpec), found
    return found


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
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_two_towers_learn_over_a_gradient_edge_what_one_process_learns_though_one_is_killed(engine) -> None:
    pytest.importorskip("sklearn")
    steps = 300 if DEEP else 8

    async def body(run: Run) -> None:
        for n, victim in ((2, "speller/1"), *(((40, "vision/0"), (80, "loop/0")) if DEEP else ())):
            await run.until_committed(n)
            run.kill(victim)
        ended = await run.end(500)
        assert ended.state is JobState.SUCCEEDED, run.story()
        rows = [json.loads(line) for line in (run.output / "curve.jsonl").read_text().splitlines()]
        wanted = reference("mm_digits", MM_STEPS=steps)
        assert len(rows) == steps
        for row, want in zip(rows, wanted, strict=False):
            assert row == pytest.approx(want, rel=0, abs=1e-5)
        right = json.loads((run.output / "result.json").read_text())["right"]
        assert right == pytest.approx(wanted[-1]["right"], abs=1e-9)
        assert not DEEP or right >= 0.95

    run_job(engine, example("mm_digits", MM_STEPS=steps), body, 550)


def test_players_an_actor_and_a_critic_give_the_run_of_one_process_though_three_are_killed(engine) -> None:
    pytest.importorskip("gymnasium")
    steps = 100 if DEEP else 6

    async def body(run: Run) -> None:
        for n, victim in ((2, "player/0"), (4, "actor/0"), *(((20, "critic/0"), (50, "loop/0")) if DEEP else ())):
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
        assert not DEEP or greedy >= 195

    run_job(engine, example("ppo_cartpole", PPO_STEPS=steps), body, 550)
