"""A real job whose devices are split between its trainer and its rollouts: it shrinks with a node and grows back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.real.jobs import deep, example
from tests.real.nodes import NodesRun, Raylets, raylets_of, run_on

from rota.cluster.core.splits import WINDOW
from rota.cluster.policies import get_profile
from rota.service.jobfile.reader import read_job
from rota.spec.events import Committed, JobAdmitted, JobRequeued, RolledBack, StopAsked
from rota.spec.job import JobSpec
from rota.spec.reasons import Reason
from rota.spec.states import JobState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FILE = Path(__file__).resolve().parents[2] / "examples" / "grpo_sums" / "job_split.yaml"
SFT = 2


@pytest.fixture(scope="module")
def raylets(engine: Any) -> Iterator[Raylets]:
    with raylets_of(engine) as found:
        yield found


def split_job() -> JobSpec:
    spec = read_job(FILE.read_text(), filename=FILE.name)
    weights = tuple(dataclasses.replace(one, every=min(one.every, SFT)) for one in spec.weights)
    env = (*spec.env, ("SFT_STEPS", str(SFT)), ("GRPO_STEPS", "1000"))
    return example(FILE, roles=spec.roles, weights=weights, checkpoint=spec.checkpoint, env=env)


def splits(run: NodesRun) -> list[tuple[int, ...]]:
    return [tuple(start.replicas for start in one.starts) for one in run.events(JobAdmitted)]


@deep
@pytest.mark.usefixtures("registry")
def test_a_split_job_goes_on_smaller_without_a_node_and_grows_back_and_loses_no_commit(raylets: Raylets) -> None:
    async def body(run: NodesRun) -> None:
        assert run.raylets is not None
        assert sum(splits(run)[0]) == 4, run.events(JobAdmitted)[0].why
        await run.until_committed(SFT + 3)
        assert set(run.events(Committed)[-1].waited) >= {"actor", "rollout"}
        run.kill_node("b")
        await run.until(lambda: len(splits(run)) == 2)
        assert splits(run)[1] == (1, 1), run.story()
        await run.until_committed(run.context().committed + WINDOW + 2)
        run.raylets.ensure("b")
        run.join("b")
        await run.until(lambda: run.events(JobRequeued)[-1].reason is Reason.RESIZED and len(splits(run)) > 2)
        assert sum(splits(run)[-1]) > 2, run.story()
        await run.until_committed(run.context().committed + 3)
        run.append(StopAsked(grace_s=5.0))
        assert (await run.end()).state is JobState.CANCELLED, run.story()
        commits = [one.n for one in run.events(Committed)]
        assert commits == list(range(1, len(commits) + 1)), "no commit twice, none lost"
        assert all(one.from_commit == one.to_commit for one in run.events(RolledBack)), run.story()

    run_on(raylets, {"a": 2.5, "b": 2.5}, split_job(), body, profile=get_profile("default"))
