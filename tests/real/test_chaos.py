"""A minute of ``benchmarks/chaos.py``: kills and stops of every kind of process; nothing is lost, twice or left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CHAOS = Path(__file__).resolve().parents[2] / "benchmarks" / "chaos.py"


def test_a_minute_of_random_kills_and_stops_loses_no_commit_and_leaves_nothing() -> None:
    command = [sys.executable, str(CHAOS), "--minutes", "1", "--every", "4", "--seed", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    found = json.loads(done.stdout)
    assert (found["state"], found["wrong"]) == ("SUCCEEDED", [])
    assert found["faults"] and all(one["job_s"] is not None for one in found["faults"]), found["faults"]
    assert found["noted"] > 0, "the log says what was replaced"
