"""Online learning without a loop: killed three times it still gives the figures of one process, to the last row."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.real.jobs import Run, example, run_job

from rota.spec.events import Committed
from rota.spec.states import JobState

pytest.importorskip("river")
pytestmark = [
    pytest.mark.usefixtures("registry"),
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not os.environ.get("ROTA_DEEP"), reason="ROTA_DEEP is not set"),
]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "online_drift"


def test_three_kills_change_no_figure_and_servers_keep_up(engine) -> None:
    async def body(run: Run) -> None:
        for n, victim in ((1, "feat/0"), (2, "train/0"), (3, "loop/0")):
            await run.until_committed(n)
            run.kill(victim)
        ended = await run.end()
        assert ended.state is JobState.SUCCEEDED, run.story()
        asked = subprocess.run(
            [sys.executable, "reference.py"], cwd=EXAMPLE, capture_output=True, check=True, text=True
        )
        assert json.loads((run.output / "result.json").read_text()) == json.loads(asked.stdout)
        commits = run.events(Committed)
        cut = commits[-1].cursor["cut"]["streams"]["events"]
        assert (cut["trained"], cut["open"], cut["dropped"]) == (370, [], {})
        served = (run.home.job(run.job).logs / "serve-0.log").read_text()
        versions = [int(found) for found in re.findall(r"version (\d+), ", served)]
        assert len(versions) >= 2 and versions == sorted(versions) and commits[-1].n - versions[-1] <= 10

    run_job(engine, example(EXAMPLE / "job.yaml"), body)
