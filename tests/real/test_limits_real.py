"""Limits of an instance on a real engine: who exceeds one ends alone, with a named reason; a job beside it goes on."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from tests.real.jobs import Run, deep, run_job

from rota.spec.events import InstanceLost
from rota.spec.ids import RoleName
from rota.spec.job import Fail, JobSpec, RoleSpec
from rota.spec.reasons import Reason
from rota.spec.resources import Limits, Res
from rota.spec.states import JobState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 2**20
ONCE = Fail(limit_n=0, then=())
GOOD = "until [ -e $ROTA_OUTPUT_DIR/stop ]; do sleep 0.1; done"
MEMORY = """
import multiprocessing, time
def grow():
    kept = []
    while True: kept.append(bytearray(b'x' * 2**22)); time.sleep(0.02)
multiprocessing.Process(target=grow).start()
"""
BOMB = """
import subprocess, time
kept = [subprocess.Popen(['sleep', '611']) for _ in range(30)]
time.sleep(600)
"""
FILLER = """
import os, time
with open(os.environ['ROTA_OUTPUT_DIR'] + '/filled', 'wb', buffering=0) as file:
    while file.tell() < 2**28: file.write(b'x' * 2**20); time.sleep(0.01)
time.sleep(600)
"""
LEAK = """
import os
kept = [open(os.devnull) for _ in range(100_000)]
"""


def bad(name: str, source: str, limits: Limits | None = None, memory: int = 0) -> RoleSpec:
    return RoleSpec(
        name=RoleName(name),
        run=("python", "-c", source),
        res=Res(cpus=0.2, memory_bytes=memory),
        limits=limits or Limits(),
        fail=ONCE,
    )


CASES: dict[str, tuple[RoleSpec, Reason, str]] = {
    "memory": (bad("hog", MEMORY, memory=128 * MIB), Reason.OOM_KILLED, "of memory; the limit is 128MiB"),
    "processes": (bad("bomb", BOMB, Limits(processes=16)), Reason.OVER_LIMIT, "processes; the limit is 16"),
    "disk": (bad("filler", FILLER, Limits(disk_bytes=32 * MIB)), Reason.OVER_LIMIT, "the limit is 32MiB"),
    "files": (bad("leak", LEAK, Limits(files=512)), Reason.OVER_LIMIT, "Too many open files"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in ("memory", "processes") else deep) for name in CASES]
)
def test_who_exceeds_a_limit_ends_alone_with_a_named_reason(engine: Any, case: str) -> None:
    role, reason, text = CASES[case]
    good = RoleSpec(name=RoleName("good"), run=(GOOD,), shell=True, res=Res(cpus=0.2), fail=ONCE)
    spec = JobSpec(name="limits", roles=(good, role), success_when=("good",), grace_s=5.0)

    async def body(run: Run) -> None:
        ended = await run.end()
        lost = [one for one in run.events(InstanceLost) if one.role != "good"]
        assert (lost[0].role, lost[0].reason) == (role.name, reason), run.story()
        assert text in lost[0].text + lost[0].traceback, lost[0]
        assert (ended.state, ended.reason) == (JobState.FAILED, reason), run.story()
        await run.until(lambda: not left())
        if case in ("memory", "processes", "disk"):
            assert "ended for its limits: it used" in lost[0].text

    def left() -> list[psutil.Process]:
        return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "611"]]

    run_job(engine, spec, body)


@deep
def test_a_job_within_its_limits_is_left_alone(engine: Any) -> None:
    source = "import os, subprocess; kept = bytearray(2**26); subprocess.run(['sleep', '1'], check=True)"
    role = bad("main", source, Limits(processes=8, files=1024, disk_bytes=64 * MIB), memory=256 * MIB)

    async def body(run: Run) -> None:
        assert (await run.end()).state is JobState.SUCCEEDED, run.story()
        assert run.events(InstanceLost) == []

    run_job(engine, JobSpec(name="within", roles=(role,), grace_s=5.0), body)
