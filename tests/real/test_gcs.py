"""Kill -9 of the GCS under running instances: same processes, calls go on, new ones start soon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rota.runtime.ray.engine import EngineSettings, client_environment, start_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KILLS = 3

# The driver is a child: Ray may abort a process whose GCS dies.
DRIVER = """
import asyncio, json, os, signal, sys, time
from pathlib import Path
import ray
from conformance import bundles, instance, reservation
from rota.runtime.ray.engine import find_engine
from rota.runtime.launcher import Call
from rota.runtime.ray.launcher import RayLauncher
from rota.spec.ids import JobId

class rig:
    host, workdir, target = "here", sys.argv[3], "conformance_targets:Subject"

async def main(home, kills):
    launcher, job = RayLauncher("rota/test"), JobId("job")
    await launcher.reserve(reservation(job), bundles(rig, 2 + kills), timeout_s=30)
    handle = await launcher.start(instance(rig, job), timeout_s=30)
    gaps, starts, over = [], [], asyncio.Event()

    async def call_on():
        last = time.monotonic()
        while not over.is_set():
            await launcher.call(handle, Call(method="pid", timeout_s=30))
            now = time.monotonic()
            gaps.append(now - last)
            last = now
            await asyncio.sleep(0.01)

    caller = asyncio.ensure_future(call_on())
    for kill in range(1, kills + 1):
        os.kill(find_engine(home).gcs.pid, signal.SIGKILL)
        since = time.monotonic()
        await launcher.start(instance(rig, job, kill, bundle=kill), timeout_s=60)
        starts.append(time.monotonic() - since)
    over.set()
    await caller
    found = await launcher.find(job)
    print(json.dumps({
        "gap_s": max(gaps), "calls": len(gaps), "starts_s": starts, "same": found.instances[0] == handle,
        "alive": len(found.instances), "reserved": len(found.reservations),
    }))

ray.init(sys.argv[2], namespace="rota/test", log_to_driver=False, logging_level=40)
asyncio.run(main(Path(sys.argv[1]), int(sys.argv[4])))
"""


def test_calls_go_on_and_new_instances_start_while_the_gcs_is_killed_again_and_again(engine_home: Path) -> None:
    state = start_engine(engine_home, EngineSettings(host="here", cpus=32))
    assert state.storage == "rocksdb"
    targets = str(Path(__file__).resolve().parent.parent / "runtime")
    given = {**os.environ, **client_environment(state.token_path, state.folder), "PYTHONPATH": targets}
    environment = {name: value for name, value in given.items() if value is not None}
    command = [sys.executable, "-c", DRIVER, str(engine_home), state.address, targets, str(KILLS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    starts = ", ".join(f"{seconds:.1f}" for seconds in told["starts_s"])
    print(f"{KILLS} kills: longest gap of {told['calls']} calls {told['gap_s']:.2f} s; new instances after {starts} s")
    assert told["same"] and told["alive"] == KILLS + 1 and told["reserved"] == 1
    assert told["gap_s"] < 2.0
    assert max(told["starts_s"]) < 20.0
