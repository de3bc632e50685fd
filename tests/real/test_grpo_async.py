"""The streaming form of the main example: in step it is the synchronous run; no kill lets a sample get too old."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from tests.real.jobs import Run, example, run_job

from rota.service.jobfile import read_job
from rota.spec.events import Committed
from rota.spec.job import JobSpec
from rota.spec.states import JobState

pytestmark = [
    pytest.mark.usefixtures("registry"),
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.environ.get("ROTA_DEEP"), reason="ROTA_DEEP is not set"),
]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_sums"
SFT = 2
Rows = dict[int, dict[str, float]]


def spec_of(file: str, versions: int | None = None, steps: int = 10) -> JobSpec:
    spec = read_job((EXAMPLE / file).read_text(), filename=file)
    weights = tuple(dataclasses.replace(edge, every=min(edge.every, SFT)) for edge in spec.weights)
    streams = tuple(
        dataclasses.replace(one, stale=dataclasses.replace(one.stale, versions=versions)) if one.stale else one
        for one in spec.streams
    )
    env = (*spec.env, ("SFT_STEPS", str(SFT)), ("GRPO_STEPS", str(steps)))
    return example(EXAMPLE / file, weights=weights, streams=streams, env=env)


async def rows_of(run: Run) -> Rows:
    ended = await run.end(400)
    assert ended.state is JobState.SUCCEEDED, run.story()
    lines = (run.output / "metrics.jsonl").read_text().splitlines()
    return {row["n"]: row for row in map(json.loads, lines)}


def test_in_step_the_stream_gives_the_synchronous_run_bit_for_bit(engine) -> None:
    found: list[Rows] = []

    async def body(run: Run) -> None:
        found.append(await rows_of(run))

    run_job(engine, spec_of("job.yaml"), body, 500)
    run_job(engine, spec_of("job_async.yaml", versions=0), body, 500)
    in_turn, in_step = found
    assert len(in_turn) == SFT + 10
    assert all(row.pop("age", 0.0) == 0 for row in in_step.values())
    assert in_step == in_turn


def test_five_kills_never_let_a_sample_get_too_old(engine) -> None:
    async def body(run: Run) -> None:
        for n, victim in enumerate(("rollout/0", "actor/1", "reward/0", "loop/0", "rollout/1")):
            await run.until_committed(SFT + 2 * n + 2, 200)
            run.kill(victim)
        rows = await rows_of(run)
        ages = [row["age"] for n, row in rows.items() if n > SFT]
        assert len(ages) == 16 and 1 <= max(ages) <= 2, ages
        cut = run.events(Committed)[-1].cursor["cut"]["streams"]["groups"]
        assert (cut["admitted"], cut["trained"], cut["dropped"]) == (16 * 4, 16 * 4, {}), cut

    run_job(engine, spec_of("job_async.yaml", versions=2, steps=16), body, 500)
