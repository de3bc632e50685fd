"""Records the logs of real jobs for tests/logs: run once a version with ``ROTA_RECORD=<folder>``."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.real.jobs import Run, job, role, run_job

from rota.spec.events import FailoverStarted, JobRequeued, MasterStarted, PreemptAsked, event_to_json
from rota.spec.job import Fail
from rota.spec.reasons import Reason
from rota.spec.states import JobState

FOLDER = os.environ.get("ROTA_RECORD", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not FOLDER, reason="ROTA_RECORD is not set"),
]


async def success(run: Run) -> None:
    (run.output / "go").touch()


async def kill(run: Run) -> None:
    await run.until_committed(2)
    run.kill("doubler/1")
    await run.until(lambda: run.starts("doubler/1") == 2)
    (run.output / "go").touch()


async def raises(run: Run) -> None:
    (run.output / "raise-once").touch()
    await run.until(lambda: run.events(FailoverStarted))
    await success(run)


async def master(run: Run) -> None:
    await run.until_committed(2)
    run.kill_master()
    await run.until(lambda: len(run.events(MasterStarted)) > 1)
    (run.output / "go").touch()


async def loop(run: Run) -> None:
    await run.until_committed(2)
    run.kill("loop/0")
    await run.until(lambda: run.events(FailoverStarted))
    (run.output / "go").touch()


async def requeue(run: Run) -> None:
    await run.until_committed(2)
    run.append(PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, grace_s=2.0))
    await run.until(lambda: run.events(JobRequeued))
    (run.output / "go").touch()
    await run.admit()


@pytest.mark.parametrize("play", [success, kill, raises, master, loop, requeue])
def test_record(engine, play: Callable[[Run], Awaitable[None]]) -> None:
    async def body(run: Run) -> None:
        await play(run)
        assert (await run.end()).state is JobState.SUCCEEDED, run.story()
        records = [
            {"number": one.number, "job": one.job, "seq": one.seq, "at": one.at, "event": event_to_json(one.event)}
            for one in run.log.read(job=run.job)
        ]
        version = importlib.metadata.version("rota")
        document = {"version": version, "records": records, "context": run.context().to_json()}
        path = Path(FOLDER) / f"{version}-{play.__name__}.json"
        path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")

    roles = (role("doubler", "basic:Doubler", 2, fail=Fail(limit_n=2)), role("loop", "basic:doubling"))
    run_job(engine, job(*roles, STEPS="4", PAUSE_AT="2"), body)
