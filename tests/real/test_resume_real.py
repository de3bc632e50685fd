"""``rota resume JOB --from COMMIT`` on real processes, of a paused and of an ended job; every sum is right after it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.real.test_service import Installation, made_settings

from rota.service.process import daemon
from rota.spec.errors import RotaError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORKLOADS = Path(__file__).parent / "workloads"
SPEC = {
    "name": "count",
    "checkpoint": {"every": "1 commits", "keep": 4},
    "roles": {"counter": {"workload": "counting:Counter"}, "loop": {"workload": "counting:counting"}},
}


@pytest.fixture
def service() -> Iterator[Installation]:
    home = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    installation = Installation(made_settings(home))
    installation.up()
    try:
        yield installation
    finally:
        daemon.down(installation.settings, force=True)
        shutil.rmtree(home, ignore_errors=True)


def commits(service: Installation, job: str, kind: str) -> list[dict[str, Any]]:
    return service.ask(f"/jobs/{job}/events?type={kind}")["items"]


def reached(service: Installation, job: str, n: int) -> dict[str, Any]:
    return service.wait(job, lambda one: (one["progress"] or {}).get("commit", 0) >= n, f"at commit {n}")


def test_a_paused_and_an_ended_job_continue_from_a_commit_that_is_chosen(service: Installation) -> None:
    body = {"source": json.dumps(SPEC), "filename": "job.json", "workdir": str(WORKLOADS)}
    job = str(service.ask("/jobs", body)["id"])
    # 1. paused at a later commit, it enters at the oldest one that is saved
    reached(service, job, 8)
    service.ask(f"/jobs/{job}:pause", {"grace_s": 10})
    paused = service.wait(job, lambda one: one["state"] == "PAUSED", "paused")["progress"]
    chosen = paused["commits"][1]
    assert paused["commits"][0] == 0 < chosen < paused["commit"] and len(paused["commits"]) >= 4
    with pytest.raises(RotaError, match="has no saved commit 1") as refused:
        service.ask(f"/jobs/{job}:resume", {"from_commit": 1})
    assert ", ".join(map(str, paused["commits"])) in refused.value.hint
    service.ask(f"/jobs/{job}:resume", {"from_commit": chosen})
    rolled = service.wait(job, lambda one: one["state"] == "RUNNING", "running") and commits(service, job, "RolledBack")
    assert [(one["from_commit"], one["to_commit"]) for one in rolled] == [(paused["commit"], chosen)]
    last = reached(service, job, paused["commit"] + 2)
    assert service.ask(f"/jobs/{job}/failures")["items"] == [], "what its user chose is no failure"
    # 2. ended, a new job begins with a commit of it; the loop of both checks every sum
    (Path(last["output"]) / "go").touch()
    ended = service.ended(job)
    assert ended["state"] == "SUCCEEDED", ended["error"]
    begin = ended["progress"]["commits"][1]
    new = service.ask(f"/jobs/{job}:resume", {"from_commit": begin})
    assert (new["id"], service.ask(f"/jobs/{job}")["state"]) == ("count-2", "SUCCEEDED")
    more = reached(service, new["id"], begin + 3)
    assert commits(service, new["id"], "Committed")[0]["n"] == begin + 1
    (Path(more["output"]) / "go").touch()
    assert service.ended(new["id"])["state"] == "SUCCEEDED"
