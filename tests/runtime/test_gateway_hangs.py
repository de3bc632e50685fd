"""A stopped gateway is replaced, also one that was stopped before its service came; it watches the supervisor too."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rota.runtime import process
from rota.runtime.probe import noted
from rota.runtime.process import SUPERVISOR, RunFolder
from rota.runtime.ray.client import RECORD, GatewayClient, stop_gateway_of
from rota.runtime.ray.engine import EngineSettings
from rota.runtime.ray.gateway import Gateway

LIMIT_S = 120.0
SETTINGS = EngineSettings()


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        yield Path(folder)
        assert stop_gateway_of(Path(folder))


@pytest.mark.slow
def test_a_stopped_gateway_is_replaced_under_an_open_connection_and_before_there_is_one(home: Path) -> None:
    async def ask(stop_first: bool) -> int:
        client = GatewayClient(home, SETTINGS)
        try:
            first = (await client.ping(timeout_s=LIMIT_S))["pid"]
            if stop_first:
                os.kill(first, signal.SIGSTOP)
                assert (await client.ping(timeout_s=LIMIT_S))["pid"] != first
            return (await client.ping(timeout_s=LIMIT_S))["pid"]
        finally:
            await client.close()

    second = asyncio.run(ask(stop_first=True))
    os.kill(second, signal.SIGSTOP)
    assert asyncio.run(ask(stop_first=False)) != second, "this client did not start it and never heard it"
    assert [(one.part, one.why) for one in noted(home / "run").values()] == [(RECORD, "was stopped by a signal")] * 2


def test_a_supervisor_that_is_gone_for_three_looks_is_started_again_and_one_that_was_asked_to_end_is_not(
    home: Path,
) -> None:
    run, flag = RunFolder(home / "run"), home / "started"
    dead = process.ProcessId(pid=os.getpid(), start_time=1.0)
    command = (sys.executable, "-c", f"open({str(flag)!r}, 'w')")
    run.write(SUPERVISOR, dead, command)
    gateway = Gateway(home, SETTINGS, "rota/local")
    for _ in range(2):
        gateway._keep_supervisor()
    run.forget(SUPERVISOR)
    gateway._keep_supervisor()
    run.write(SUPERVISOR, dead, command)
    for _ in range(2):
        gateway._keep_supervisor()
    assert gateway._supervisor_gone == 2 and not flag.exists(), "the count began anew"
    gateway._keep_supervisor()
    deadline = time.monotonic() + LIMIT_S
    while not flag.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_supervisor_that_hangs_is_ended_by_the_gateway_too(home: Path) -> None:
    run = RunFolder(home / "run")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        which = process.identify(child.pid)
        assert which is not None
        run.write(SUPERVISOR, which, (sys.executable, "-c", "pass"))
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        gateway = Gateway(home, SETTINGS, "rota/local")
        for _ in range(3):
            gateway._keep_supervisor()
        assert child.wait(LIMIT_S) == -signal.SIGKILL
