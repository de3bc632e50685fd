"""Streams on real Ray: whatever is killed, each item is trained on once, in order, and none is too old."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from typing import Any

import pytest
from tests.real.jobs import Run, deep, job, role, run_job

from rota.spec.events import Committed
from rota.spec.ids import RoleName
from rota.spec.job import Bound, Edge, Fail, JobSpec, StreamSpec, WeightsEdge
from rota.spec.reasons import Reason
from rota.spec.states import JobState

pytestmark = [pytest.mark.usefixtures("registry"), pytest.mark.slow, pytest.mark.timeout(600)]
SIZE = 4


def streaming(entry: str, versions: int = 2, items: int = 60, bad_data: int = 0, **env: str) -> JobSpec:
    often = Fail(limit_n=10, bad_data=bad_data)
    made = job(
        role("learner", "streaming:Learner", fail=often),
        role("rollout", "streaming:Rollout", 2, fail=often),
        role("judge", "streaming:Judge", 1, fail=often),
        role("loop", f"streaming:{entry}", fail=often),
        weights=(WeightsEdge(source=RoleName("learner"), target=RoleName("rollout")),),
        ITEMS=str(items),
        **env,
    )
    streams = (
        StreamSpec(name="prompts", source="streaming:prompts"),
        StreamSpec(name="groups", cap=16, stale=Bound(versions=versions)),
    )
    ends = ("prompts", "rollout.generate", "judge.score", "groups")
    edges = tuple(Edge(source=a, target=b, kind="stream") for a, b in pairwise(ends))
    return dataclasses.replace(made, streams=streams, edges=edges)


async def finish(run: Run) -> dict[str, Any]:
    ended = await run.end()
    assert ended.state is JobState.SUCCEEDED, run.story()
    return json.loads((run.output / "report.json").read_text())


def ledger(run: Run) -> dict[str, Any]:
    return run.events(Committed)[-1].cursor["cut"]["streams"]["groups"]


def test_five_kills_lose_no_item_train_none_twice_and_keep_the_bound(engine) -> None:
    async def body(run: Run) -> None:
        for step, victim in enumerate(("rollout/0", "judge/0", "learner/0", "loop/0", "rollout/1")):
            await run.until_committed(2 * step + 2)
            run.kill(victim)
        await run.until_committed(12)
        run.kill_master()
        report = await finish(run)
        assert report["seen"] == list(range(80)), run.story()
        assert max(report["ages"]) <= 2
        found = ledger(run)
        assert (found["admitted"], found["trained"], found["dropped"], found["open"]) == (80, 80, {}, [])
        assert found["again"] > 0
        for one in run.events(Committed):
            cut = one.cursor["cut"]["streams"]["groups"]
            left = cut["pending"] + cut["running"] + cut["queued"]
            assert cut["admitted"] == cut["trained"] + left and cut["age"] <= 2

    run_job(engine, streaming("train", items=80), body)


@deep
def test_a_bound_of_zero_gives_the_run_without_streams(engine) -> None:
    reports: list[dict[str, Any]] = []

    async def body(run: Run) -> None:
        reports.append(await finish(run))

    for entry in ("train", "in_step"):
        run_job(engine, streaming(entry, versions=0, items=32), body)
    assert reports[0] == reports[1]
    assert reports[0]["ages"] == [0] * 32


def test_a_bad_item_is_dropped_within_the_contract_and_ends_the_job_beyond_it(engine) -> None:
    async def within(run: Run) -> None:
        report = await finish(run)
        assert report["seen"] == [i for i in range(16) if i != 5]
        assert ledger(run)["dropped"] == {"bad_data": 1}

    async def beyond(run: Run) -> None:
        ended = await run.end()
        assert (ended.state, ended.reason) == (JobState.FAILED, Reason.DATA_ERROR), run.story()
        assert "item 5 of stream prompts" in ended.text and "cannot answer 5" in ended.traceback

    run_job(engine, streaming("train", items=16, bad_data=1, BAD_ITEM="5"), within)
    run_job(engine, streaming("train", items=16, BAD_ITEM="5"), beyond)


def test_what_the_loop_put_in_before_a_commit_survives_its_death(engine) -> None:
    async def body(run: Run) -> None:
        await run.until(lambda: (run.output / "put").exists())
        run.kill("loop/0")
        await run.until(lambda: run.starts("loop/0") == 2)
        (run.output / "go").touch()
        report = await finish(run)
        assert report["found"] == [[f"n{i}", i * (i - 1) // 2] for i in range(6)]
        assert report["kept"] == {"rounds": 1}

    spec = job(role("loop", "streaming:circle"))
    run_job(engine, dataclasses.replace(spec, streams=(StreamSpec(name="notes", cap=16),)), body)
