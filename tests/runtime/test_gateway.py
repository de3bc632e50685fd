"""The gateway without an engine: wire, limits, one per home, and no Ray before it is needed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.runtime.asking import ask_once

from rota.runtime import process
from rota.runtime.ray.client import (
    LENGTH,
    MESSAGE_BYTES_MAX,
    GatewayClient,
    GatewayFiles,
    command_of,
    encode,
    read_message,
    stop_gateway_of,
)
from rota.runtime.ray.engine import EngineSettings
from rota.spec.errors import EngineUnavailable

pytestmark = pytest.mark.slow
SETTINGS = EngineSettings()
LIMIT_S = 90.0


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert stop_gateway_of(tmp_path)


def run(home: Path, body: Callable[[GatewayClient], Awaitable[None]], settings: EngineSettings = SETTINGS) -> None:
    async def main() -> None:
        client = GatewayClient(home, settings)
        try:
            await asyncio.wait_for(body(client), LIMIT_S)
        finally:
            await client.close()

    asyncio.run(main())


def test_asking_without_an_engine_starts_none_and_loads_no_ray(home: Path) -> None:
    async def body(client: GatewayClient) -> None:
        assert await client.engine_status() == {"state": "off", "engine": ""}
        assert await client.list_jobs() == ()
        assert await client.find("job") == {"master": None, "instances": [], "reservations": []}
        assert await client.sweep("job") == {"instances": [], "reservations": []}
        await client.kill_master("job")
        pid = (await client.ping())["pid"]
        assert "_raylet" not in Path(f"/proc/{pid}/maps").read_text()

    run(home, body)


def test_a_second_client_adopts_the_gateway_of_the_first(home: Path) -> None:
    pids = []

    async def body(client: GatewayClient) -> None:
        pids.append((await client.ping())["pid"])

    run(home, body)
    run(home, body)
    assert pids[0] == pids[1]
    done = subprocess.run(command_of(home, SETTINGS), timeout=LIMIT_S, check=False)
    assert done.returncode == 0, "a second gateway must leave the home to the first"
    assert ask_once(home, "ping", {})["pid"] == pids[0]


def test_a_gateway_with_other_settings_is_replaced_and_leaves(home: Path) -> None:
    pids = []

    async def body(client: GatewayClient) -> None:
        pids.append((await client.ping(timeout_s=LIMIT_S))["pid"])

    run(home, body)
    run(home, body, EngineSettings(address="127.0.0.1:1"))
    run(home, body)
    assert len(set(pids)) == 3 and [process.identify(pid) is not None for pid in pids] == [False, False, True]


def test_a_killed_gateway_is_started_again_and_repeats_are_answered(home: Path) -> None:
    async def body(client: GatewayClient) -> None:
        for round_number in range(1, 4):
            pid = (await client.ping())["pid"]
            assert client.generation == round_number
            os.kill(pid, signal.SIGKILL)
        assert (await client.ping())["pid"] != pid

    run(home, body)


def test_a_gateway_that_does_not_listen_is_replaced(home: Path) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    deaf = process.spawn(process.Spawn(command=command, env={}), name="gateway", run=GatewayFiles(home).run)

    async def body(client: GatewayClient) -> None:
        assert (await client.ping(timeout_s=LIMIT_S))["pid"] != deaf.pid

    run(home, body)
    assert deaf.wait(LIMIT_S) == -signal.SIGKILL


def test_a_gateway_that_cannot_start_is_reported_within_the_askers_time(home: Path) -> None:
    (home / "run").mkdir()
    (home / "run" / "gateway.lock").mkdir()

    async def body(client: GatewayClient) -> None:
        with pytest.raises(EngineUnavailable, match="no gateway"):
            await client.ping(timeout_s=1.5)
        assert client.restarts >= 1

    run(home, body)


def test_malformed_and_oversized_messages_end_their_connection_alone(home: Path) -> None:
    async def body(client: GatewayClient) -> None:
        await client.ping()
        for bad in (LENGTH.pack(MESSAGE_BYTES_MAX + 1), LENGTH.pack(4) + b"nope", LENGTH.pack(2) + b"[]"):
            reader, writer = await asyncio.open_unix_connection(GatewayFiles(home).address)
            assert (await read_message(reader))["gateway"]
            writer.write(bad)
            with pytest.raises(asyncio.IncompleteReadError):
                await read_message(reader)
            writer.close()
        assert client.generation == 1 and (await client.ping())["engine"] == ""

    run(home, body)


def test_what_the_gateway_does_not_know_is_the_askers_fault(home: Path) -> None:
    async def body(client: GatewayClient) -> None:
        with pytest.raises(ValueError, match="no such operation"):
            await client.request("make_tea", {}, timeout_s=LIMIT_S)

    run(home, body)


def test_a_message_over_the_limit_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="over the limit"):
        encode({"args": "x" * MESSAGE_BYTES_MAX})


def test_the_service_side_of_the_runtime_runs_where_ray_is_not_installed() -> None:
    modules = ("ray.engine", "ray.gateway", "ray.client", "process", "node", "probe", "launcher")
    code = "import sys; sys.modules['ray'] = None; sys.modules['torch'] = None\n"
    code += "\n".join(f"import rota.runtime.{module}" for module in modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
