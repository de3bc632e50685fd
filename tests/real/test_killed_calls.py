"""Calls of every retry class while their callees are killed: each ends once, and none runs twice that must not."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from tests.real.jobs import Run, deep, job, role, run_job

from rota.spec.events import FailoverEnded
from rota.spec.job import Fail
from rota.spec.states import JobState

pytestmark = [pytest.mark.usefixtures("registry"), pytest.mark.slow, pytest.mark.timeout(1700)]
CALLEES = 3
OVER = {"Cancelled", "RolledBack"}
"""The loop went back to a commit while the call was under way, or before it was sent."""
ERRORS = {"CallLost", "RoleDown", "TimedOut"} | OVER


@pytest.mark.parametrize(("calls", "kills"), [(1_000, 2), pytest.param(10_000, 15, marks=deep)])
def test_each_call_ends_once_and_none_of_commit_and_never_runs_twice(engine, calls: int, kills: int) -> None:
    chance = random.Random(calls)

    async def body(run: Run) -> None:
        ended = run.output / "ended"
        await run.until(lambda: ended.exists() and len(ended.read_text().splitlines()) > 100)
        for number in range(kills):
            run.kill(f"killed/{chance.randrange(CALLEES)}")
            await run.until(lambda number=number: len(run.events(FailoverEnded)) > number)
            await asyncio.sleep(chance.uniform(0.0, 0.5))
        (run.output / "enough").touch()
        assert (await run.end()).state is JobState.SUCCEEDED, run.story()
        found = [line.split() for line in ended.read_text().splitlines()]
        assert len(found) >= calls and len({key for _, key, _ in found}) == len(found), "one end each"
        hows = Counter(how for _, _, how in found)
        assert set(hows) - {"value"} <= ERRORS, hows
        assert sum(hows.values()) - hows["value"] <= 60 * kills, f"what was under way at a death: {hows}"
        assert {how for kind, _, how in found if kind == "safe"} <= {"value"} | OVER, "these are repeated"
        notes = [line for path in run.output.glob("ran-*") for line in path.read_text().splitlines()]
        ran = Counter(tuple(line.split()) for line in notes)
        twice = [(kind, key) for (kind, key), count in ran.items() if count > 1 and kind != "safe"]
        assert twice == []
        assert all(ran[kind, key] for kind, key, how in found if how == "value"), "a value comes from a run"

    callees = role("killed", "killed:Killed", CALLEES, fail=Fail(limit_n=1000))
    run_job(engine, job(callees, role("loop", "killed:many"), CALLS=str(calls)), body, limit_s=1600.0)
