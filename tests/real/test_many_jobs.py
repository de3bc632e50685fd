"""Many jobs on one engine, one after another and side by side: nothing of an ended job is left anywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.real.jobs import WORKLOADS, deep
from tests.real.test_service import Installation, made_settings

from rota.runtime.ray.engine import EngineFiles, client_environment
from rota.service.process import daemon

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STATELESS: dict[str, Any] = {
    "roles": {
        "doubler": {"workload": "basic:Doubler", "replicas": 2, "resources": {"cpus": 0.25}},
        "loop": {"workload": "basic:doubling", "resources": {"cpus": 0.25}},
    },
}
STATEFUL: dict[str, Any] = {
    "roles": {
        "learner": {
            "workload": "learning:Learner",
            "replicas": 2,
            "mesh": {"dp": 2},
            "resources": {"cpus": 0.25},
            "env": {"OMP_NUM_THREADS": "1"},
        },
        "reader": {"workload": "learning:Reader", "resources": {"cpus": 0.25}},
        "loop": {"workload": "learning:training", "resources": {"cpus": 0.25}, "env": {"STEPS": "3"}},
    },
    "weights": [{"from": "learner", "to": "reader"}],
}
LOOK = """
import json, sys, ray
from ray.util import list_named_actors, placement_group_table
ray.init(sys.argv[1], log_to_driver=False, logging_level="error")
groups = [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
actors = [one["name"] for one in list_named_actors(all_namespaces=True)]
print(json.dumps({"actors": actors, "groups": groups}))
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Installation]:
    home = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    installation = Installation(made_settings(home, pretend="1x2x0"))
    installation.up()
    try:
        yield installation
    finally:
        daemon.down(installation.settings, force=True)
        shutil.rmtree(home, ignore_errors=True)


def submit(site: Installation, name: str, shape: dict[str, Any]) -> str:
    source = json.dumps({"name": name, **shape})
    body = {"source": source, "filename": "job.json", "workdir": str(WORKLOADS)}
    return str(site.ask("/jobs", body)["id"])


def left_in_engine(site: Installation) -> dict[str, list[str]]:
    """What the engine itself still knows by name, asked by a stranger to Rota's own books."""
    state = EngineFiles(site.home.root).states()[0]
    environment = dict(os.environ)
    for key, value in client_environment(state.token_path, state.folder).items():
        environment.pop(key, None)
        if value is not None:
            environment[key] = value
    done = subprocess.run(
        [sys.executable, "-c", LOOK, state.address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def left_in_plane(site: Installation) -> dict[str, Any]:
    """Names, leases and segment bytes of the tensor store, and what its check finds."""
    environment = {**os.environ, "ROTA_HOME": str(site.home.root)}
    words = [sys.executable, "-m", "rota", "tensors"]
    found = {
        verb: json.loads(
            subprocess.run(
                [*words, verb, "--json"], env=environment, capture_output=True, text=True, timeout=180, check=False
            ).stdout
        )
        for verb in ("ls", "gc", "fsck")
    }
    return {"names": [one["name"] for one in found["ls"]["items"]], "violations": found["fsck"]["violations"]}


NOTHING = {"actors": [], "groups": [], "names": [], "violations": []}


def left(site: Installation) -> dict[str, Any]:
    return left_in_engine(site) | left_in_plane(site)


def outcome(site: Installation, job: str) -> tuple[str, str]:
    site.wait(job, lambda one: one["state"] != "STARTING" and one["started_at"] is not None, "started")
    ended = site.ended(job)
    return ended["state"], ended["reason"]


@deep
def test_ten_jobs_in_sequence_leave_nothing(site: Installation) -> None:
    for number in range(10):
        job = submit(site, "sequence", STATEFUL if number % 5 == 0 else STATELESS)
        assert outcome(site, job) == ("SUCCEEDED", "COMPLETED")
    assert left(site) == NOTHING


def test_three_jobs_at_once_leave_nothing(site: Installation) -> None:
    jobs = [submit(site, "beside", shape) for shape in (STATEFUL, STATELESS, STATEFUL)]
    for job in jobs:
        assert outcome(site, job) == ("SUCCEEDED", "COMPLETED")
    assert left(site) == NOTHING
