"""Engine and gateway on real processes, each of them killed: what runs goes on, and nothing is left at the end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.real.nodes import add_node
from tests.runtime.asking import ask_once

from rota.runtime import process
from rota.runtime.probe import noted
from rota.runtime.process import ProcessId
from rota.runtime.ray.client import GatewayClient, GatewayFiles, UnknownResult, stop_gateway_of
from rota.runtime.ray.engine import EngineFiles, EngineSettings, client_environment, find_engine, start_engine
from rota.spec.errors import EngineUnavailable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SETTINGS = EngineSettings(host="here", cpus=32)
TARGETS = str(Path(__file__).resolve().parent.parent / "runtime")
LIMIT_S = 180.0


Body = Callable[[GatewayClient, Path], Awaitable[None]]


def run_in(home: Path, body: Body) -> None:
    """Run a coroutine with a GatewayClient; its gateway goes on."""

    async def main() -> None:
        client = GatewayClient(home, SETTINGS)
        try:
            await asyncio.wait_for(body(client, home), 2 * LIMIT_S)
        finally:
            await client.close()

    asyncio.run(main())


@pytest.fixture
def gateway(engine_home: Path, monkeypatch: pytest.MonkeyPatch):
    """A home of its own for tests that end its engine."""
    monkeypatch.setenv("PYTHONPATH", TARGETS)
    yield lambda body: run_in(engine_home, body)
    assert stop_gateway_of(engine_home)


@pytest.fixture(scope="module")
def shared_home(short_home):
    """One home, engine and gateway for the tests that leave them in order; each uses jobs of its own."""
    with pytest.MonkeyPatch.context() as patch, short_home() as home:
        patch.setenv("PYTHONPATH", TARGETS)
        yield home
        assert stop_gateway_of(home)


@pytest.fixture
def shared(shared_home: Path):
    return lambda body: run_in(shared_home, body)


async def start_master(client: GatewayClient, home: Path, job: str) -> dict[str, Any]:
    folder = home / job
    folder.mkdir(exist_ok=True)
    return await client.start_master(job, "master_target:CountingMaster", {"folder": str(folder)}, timeout_s=LIMIT_S)


async def until(found: Callable[[], Awaitable[Any]], what: str) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        value = await found()
        if value:
            return value
        await asyncio.sleep(0.05)
    raise AssertionError(f"{what} not within {LIMIT_S} s")


async def master_pid(client: GatewayClient, job: str) -> int:
    master = (await client.find(job))["master"]
    return 0 if master is None else master["pid"]


def test_a_killed_gcs_comes_back_under_the_same_processes_and_takes_new_work(shared) -> None:
    async def body(client: GatewayClient, home: Path) -> None:
        first = await start_master(client, home, "first")
        status = await client.engine_status()
        assert (status["state"], status["storage"], status["volatile"]) == ("running", "rocksdb", False)
        for kill in range(1, 3):
            since = time.monotonic()
            os.kill((await client.engine_status())["gcs_pid"], signal.SIGKILL)
            await start_master(client, home, f"new-{kill}")
            print(f"a new actor {time.monotonic() - since:.2f} s after kill {kill} of the GCS")
            assert time.monotonic() - since < 20.0
            assert await master_pid(client, "first") == first["pid"]
        after = await client.engine_status()
        assert after["gcs_restarts"] == status["gcs_restarts"] + 2
        assert after["raylet_pid"] == status["raylet_pid"]
        assert len((home / "first" / "starts").read_text().splitlines()) == 1

    shared(body)


def test_a_killed_gateway_comes_back_and_finds_the_same_masters(shared) -> None:
    async def body(client: GatewayClient, home: Path) -> None:
        master = await start_master(client, home, "kept")
        engine, generation = (await client.ping())["engine"], client.generation
        os.kill((await client.ping())["pid"], signal.SIGKILL)
        assert await master_pid(client, "kept") == master["pid"]
        assert (await client.ping())["engine"] == engine
        assert client.generation == generation + 1
        assert "kept" in await client.list_jobs()

    shared(body)


def test_a_request_in_flight_when_the_gateway_dies_has_an_unknown_result(gateway) -> None:
    async def body(client: GatewayClient, home: Path) -> None:
        pid = (await client.ping())["pid"]
        pending = asyncio.ensure_future(client.request("start_engine", {}, timeout_s=LIMIT_S, request_id="r1"))
        await until(lambda: asyncio.sleep(0, list((home / "run").glob("engine-*.json"))), "a starting engine")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(UnknownResult) as caught:
            await pending
        assert caught.value.fields["request_id"] == "r1"
        status = await client.start_engine(timeout_s=LIMIT_S)
        assert status["state"] == "running"

    gateway(body)


def test_a_repeated_request_gets_its_first_answer_again(shared) -> None:
    async def body(client: GatewayClient, home: Path) -> None:
        before = await client.request("list_jobs", {}, timeout_s=LIMIT_S, request_id="same")
        await start_master(client, home, "repeated")
        assert await client.request("list_jobs", {}, timeout_s=LIMIT_S, request_id="same") == before
        assert "repeated" in await client.list_jobs()
        assert await client.sweep("repeated") == {"instances": [], "reservations": []}
        assert ask_once(home, "ping", {})["pid"] == (await client.ping())["pid"]
        assert GatewayFiles(home).socket.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ValueError, match="no such operation"):
            await client.request("make_tea", {}, timeout_s=LIMIT_S)

    shared(body)


def test_a_killed_master_is_started_again_also_when_ray_has_given_it_up(shared) -> None:
    async def body(client: GatewayClient, home: Path) -> None:
        async def another_than(old: int) -> bool:
            return await master_pid(client, "job") not in (0, old)

        first = (await start_master(client, home, "job"))["pid"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: another_than(first), "a master restarted by Ray")
        state = find_engine(home)
        assert state is not None
        code = (
            "import ray, sys; ray.init(sys.argv[1], namespace='rota/local', logging_level=40);"
            "ray.kill(ray.get_actor('job/master'), no_restart=True)"
        )
        environment = {**os.environ, **client_environment(state.token_path, state.folder)}
        environment = {name: value for name, value in environment.items() if value is not None}
        second = await master_pid(client, "job")
        subprocess.run([sys.executable, "-c", code, state.address], env=environment, check=True, timeout=LIMIT_S)
        await until(lambda: another_than(second), "a master restarted by the gateway")
        await client.kill_master("job")
        assert (await client.find("job"))["master"] is None and "job" not in await client.list_jobs()
        assert len((home / "job" / "starts").read_text().splitlines()) == 3

    shared(body)


def test_a_dead_raylet_ends_the_engine_and_the_next_master_gets_a_new_one(gateway) -> None:
    async def body(client: GatewayClient, home: Path) -> None:
        master = await start_master(client, home, "job")
        old, generation = await client.engine_status(), client.generation
        os.kill(old["raylet_pid"], signal.SIGKILL)
        known = ProcessId(pid=master["pid"], start_time=master["start_time"])
        assert await asyncio.to_thread(process.wait_gone, (known,), LIMIT_S) == ()
        await until(lambda: asyncio.sleep(0, client.generation > generation), "another generation")
        again = await start_master(client, home, "job")
        assert again["pid"] != master["pid"]
        assert (await client.engine_status())["engine"] != old["engine"]

    gateway(body)


def test_control_store_master_watcher_and_raylet_are_replaced_when_they_are_stopped(gateway) -> None:
    async def body(client: GatewayClient, home: Path) -> None:
        master = await start_master(client, home, "job")
        status = await client.engine_status()

        async def another_master() -> bool:
            return await master_pid(client, "job") not in (0, master["pid"])

        async def another(part: str) -> bool:
            return (await client.engine_status()).get(part) not in (None, 0, status[part])

        os.kill(status["gcs_pid"], signal.SIGSTOP)
        await until(lambda: another("gcs_pid"), "another control store")
        assert await master_pid(client, "job") == master["pid"], "the same processes under it"
        os.kill(master["pid"], signal.SIGSTOP)
        await until(another_master, "another master")
        watcher = EngineFiles(home).run.find_alive("engine-here")
        assert watcher is not None and process.send_signal(watcher.id, signal.SIGSTOP)
        await until(
            lambda: asyncio.sleep(0, EngineFiles(home).run.find_alive("engine-here") not in (None, watcher)),
            "another watcher",
        )
        generation = client.generation
        os.kill(status["raylet_pid"], signal.SIGSTOP)
        await until(lambda: asyncio.sleep(0, client.generation > generation), "another generation")
        await start_master(client, home, "job")
        assert await another("raylet_pid")
        parts = [one.part for one in noted(home / "run").values()]
        assert parts == ["control store", "master of job", "watcher of the engine", "raylet"]

    gateway(body)


def test_a_node_whose_raylet_ends_while_it_starts_says_so_at_once_and_can_be_started_again(engine_home: Path) -> None:
    start_engine(engine_home, SETTINGS)
    files, other = EngineFiles(engine_home), EngineSettings(host="other", cpus=1)

    def raylets() -> list[int]:
        starter = files.run.find_alive(files.record_name(other.host))
        children = process.children_of(starter.id.pid) if starter is not None else ()
        return [pid for pid in children if "raylet/raylet" in process.command_line(pid)]

    with ThreadPoolExecutor() as threads:
        starting, deadline = threads.submit(add_node, engine_home, other, timeout_s=LIMIT_S), time.monotonic() + LIMIT_S
        while not (found := raylets()):
            assert not starting.done() and time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(found[0], signal.SIGKILL)
        since = time.monotonic()
        with pytest.raises(EngineUnavailable, match="the raylet ended with -9 before it was ready"):
            starting.result()
    assert time.monotonic() - since < 20.0
    assert process.is_alive(add_node(engine_home, other, timeout_s=LIMIT_S).raylet)


SLOW_AGENTS = """
import time
from pathlib import Path
line = Path("/proc/self/cmdline").read_bytes()
if b"runtime_env/agent/main.py" in line:
    time.sleep(20.0)
"""


def test_a_node_has_no_agent_of_the_dashboard_and_starts_though_its_other_one_takes_longer_than_ray_waits(
    engine_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's raylet waits for 15 s for the port that an agent chooses, and aborts."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    head = start_engine(engine_home, SETTINGS)
    assert process.is_alive(add_node(engine_home, EngineSettings(host="other", cpus=1), timeout_s=LIMIT_S).raylet)
    assert head.storage == "rocksdb"
    commands = [process.command_line(pid) for pid in process.children_of(head.raylet.pid)]
    assert any("runtime_env/agent" in line or "RuntimeEnvAgent" in line for line in commands), commands
    assert not any("dashboard/agent" in line or "DashboardAgent" in line for line in commands), commands


def test_gateway_and_engine_of_a_home_that_was_removed_end(engine_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", TARGETS)
    there = list[ProcessId]()

    async def body(client: GatewayClient, home: Path) -> None:
        master, status = await start_master(client, home, "job"), await client.engine_status()
        pids = [master["pid"], status["gcs_pid"], status["raylet_pid"], (await client.ping())["pid"]]
        there.extend(one for pid in pids if (one := process.identify(pid)) is not None)
        watcher = EngineFiles(home).run.find_alive("engine-here")
        assert watcher is not None
        there.append(watcher.id)

    run_in(engine_home, body)
    assert len(there) == 5
    shutil.rmtree(engine_home)
    assert process.wait_gone(there, LIMIT_S) == ()


def test_an_engine_whose_watcher_died_is_adopted_and_heals_as_before(gateway) -> None:
    async def body(client: GatewayClient, home: Path) -> None:
        master = await start_master(client, home, "job")
        run = EngineFiles(home).run
        watcher = run.find_alive("engine-here")
        assert watcher is not None
        process.send_signal(watcher.id, signal.SIGKILL)
        await until(lambda: asyncio.sleep(0, run.find_alive("engine-here") not in (None, watcher)), "a new watcher")
        gcs = (await client.engine_status())["gcs_pid"]
        os.kill(gcs, signal.SIGKILL)
        await start_master(client, home, "another")
        assert await master_pid(client, "job") == master["pid"]
        assert (await client.engine_status())["gcs_pid"] != gcs
        await client.stop_engine()
        assert (await client.engine_status())["state"] == "off"
        assert not process.is_alive(ProcessId(pid=master["pid"], start_time=master["start_time"]))

    gateway(body)


def test_where_rocksdb_is_refused_the_engine_runs_on_memory_and_says_so(engine_home: Path) -> None:
    storage = EngineFiles(engine_home).storage
    storage.write_text("a file where the store wants a folder")
    state = start_engine(engine_home, SETTINGS, timeout_s=LIMIT_S)
    assert (state.storage, state.volatile) == ("memory", True)
    assert state.gcs is not None and process.send_signal(state.gcs, signal.SIGKILL)
    assert process.wait_gone((state.raylet,), LIMIT_S) == ()
    assert find_engine(engine_home) is None


def test_a_long_home_gets_a_short_private_folder_and_strangers_are_refused(engine_home: Path) -> None:
    home = engine_home / ("long" * 12) / ("path" * 12)
    state = start_engine(home, SETTINGS, timeout_s=LIMIT_S)
    try:
        folder, token = Path(state.folder), Path(state.token_path)
        assert len(state.folder) < 40 and home not in folder.parents and folder.parent.stat().st_mode & 0o777 == 0o700
        assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) == 64
        assert state.address.startswith("127.0.0.1:")
        assert start_engine(home, SETTINGS) == state
        good = client_environment(token, folder)
        stranger = engine_home / "token"
        stranger.write_text("0" * 64)
        assert reaches(state.address, good) == "True"
        assert "InvalidAuthToken" in reaches(state.address, {**good, "RAY_AUTH_TOKEN_PATH": str(stranger)})
        assert "InvalidAuthToken" in reaches(state.address, {**good, "RAY_AUTH_MODE": "disabled"})
    finally:
        from rota.runtime.ray.engine import stop_engine

        assert stop_engine(home) == () and not folder.parent.exists()


def test_a_home_with_a_long_path_has_a_gateway_too(engine_home: Path) -> None:
    home = engine_home / ("long" * 12) / ("path" * 12)

    async def body(client: GatewayClient, _: Path) -> None:
        assert (await client.engine_status())["state"] == "off"

    run_in(home, body)
    assert ask_once(home, "ping", {})["engine"] == ""
    assert stop_gateway_of(home)


def reaches(address: str, environment: dict[str, str | None]) -> str:
    """What a client of the GCS with this environment is told when it reads."""
    code = """
import sys
from ray._raylet import GcsClient
try:
    print(GcsClient(address=sys.argv[1]).internal_kv_exists(b"session_name", b"session", timeout=5))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
    given = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    command = [sys.executable, "-c", code, address]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=LIMIT_S).stdout.strip()


def test_no_engine_no_gateway_and_asking_starts_nothing(engine_home: Path) -> None:
    assert find_engine(engine_home) is None
    with pytest.raises(FileNotFoundError):
        ask_once(engine_home, "ping", {})
    with pytest.raises(EngineUnavailable):
        from tests.real.nodes import add_node

        add_node(engine_home, replace(SETTINGS, host="other"))
