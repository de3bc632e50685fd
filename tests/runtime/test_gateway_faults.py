"""What the two sides of the gateway do when the machine refuses them something: they go on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rota.runtime import process
from rota.runtime.ray import client as gateway_client
from rota.runtime.ray import gateway
from rota.runtime.ray.client import (
    MESSAGE_BYTES_MAX,
    GatewayClient,
    GatewayFiles,
    encode,
    namespace_of,
    read_message,
    settings_mark,
)
from rota.runtime.ray.engine import EngineSettings
from rota.runtime.ray.gateway import ENGINE_LOST, Gateway
from rota.spec.errors import EngineUnavailable, TimedOut
from rota.spec.ids import JobId

SETTINGS = EngineSettings()
MARK = settings_mark(SETTINGS, "rota/local")
LIMIT_S = 30.0


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(encode({"request_id": "", "gateway": 1, "engine": "", "settings": MARK}))
    message = await read_message(reader)
    writer.write(encode({"request_id": message["request_id"], "result": {"pid": 1}, "gateway": 1, "engine": ""}))
    await writer.drain()
    writer.close()


def test_a_client_goes_on_after_the_machine_refused_it_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals, servers = [OSError(11, "no process left"), OSError(28, "no space left")], list[asyncio.Task[Any]]()

    def spawn(*_: object, **__: object) -> SimpleNamespace:
        if refusals:
            raise refusals.pop()
        address = GatewayFiles(tmp_path).address
        servers.append(asyncio.get_running_loop().create_task(asyncio.start_unix_server(answer, address)))
        return SimpleNamespace(poll=lambda: None)

    async def body() -> None:
        client = GatewayClient(tmp_path, SETTINGS)
        try:
            assert await client.ping(timeout_s=LIMIT_S) == {"pid": 1}
        finally:
            await client.close()
            for server in servers:
                (await server).close()

    monkeypatch.setattr(gateway_client.process, "spawn", spawn)
    asyncio.run(body())
    assert refusals == []


def test_a_gateway_that_leaves_at_once_is_waited_for_again(tmp_path: Path) -> None:
    async def body() -> None:
        client = GatewayClient(tmp_path, SETTINGS)
        client._keeper = asyncio.create_task(asyncio.sleep(LIMIT_S))
        asking = asyncio.create_task(client.request("ping", {}, timeout_s=0.1))
        await asyncio.sleep(0)
        client._connected.set()
        client._lost()
        with pytest.raises(EngineUnavailable, match="no gateway within"):
            await asking
        await client.close()

    asyncio.run(body())


def test_a_gateway_that_cannot_watch_its_engine_still_leaves_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = asyncio.Event()

    def start_engine(*_: object) -> None:
        loop.call_soon_threadsafe(tried.set)
        raise OSError(11, "no process left")

    async def body() -> None:
        raylet = subprocess.Popen(["sleep", "60"])
        try:
            own = Gateway(tmp_path, SETTINGS, "rota/test")
            own._socket.parent.mkdir(parents=True, exist_ok=True)
            own._socket.touch()
            own._raylet = process.identify(raylet.pid)
            watch = asyncio.create_task(own._watch_engine())
            await asyncio.wait_for(tried.wait(), LIMIT_S)
            raylet.kill()
            await asyncio.wait_for(own._leaving.wait(), LIMIT_S)
            await watch
            assert own.exit_status == ENGINE_LOST
        finally:
            raylet.kill()

    monkeypatch.setattr(gateway, "_ENGINE_CHECK_S", 0.01)
    monkeypatch.setattr(gateway, "find_engine", lambda _: object())
    monkeypatch.setattr(gateway, "start_engine", start_engine)
    loop = asyncio.new_event_loop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(body())


def test_a_gateway_whose_engine_dies_while_it_connects_does_not_wait_for_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connects, forever = threading.Event(), threading.Event()

    def connect(*_: object) -> None:
        connects.set()
        forever.wait(LIMIT_S)

    async def body() -> None:
        raylet = subprocess.Popen(["sleep", "60"])
        state = SimpleNamespace(raylet=process.identify(raylet.pid), token_path="", folder="", address="", engine="e")
        monkeypatch.setattr(gateway, "start_engine", lambda *_: state)
        try:
            own = Gateway(tmp_path, SETTINGS, "rota/test")
            own._socket.parent.mkdir(parents=True, exist_ok=True)
            own._socket.touch()
            watch = asyncio.create_task(own._watch_engine())
            asking = asyncio.create_task(own._attached())
            await asyncio.to_thread(connects.wait, LIMIT_S)
            raylet.kill()
            raylet.wait()
            await asyncio.wait_for(own._leaving.wait(), LIMIT_S)
            await watch
            assert own.exit_status == ENGINE_LOST
        finally:
            raylet.kill()
            asking.cancel()
            forever.set()

    monkeypatch.setattr(gateway, "_ENGINE_CHECK_S", 0.01)
    monkeypatch.setattr(gateway.environ, "set_variables", lambda _: None)
    monkeypatch.setattr(gateway.importlib, "import_module", lambda _: SimpleNamespace(connect=connect))
    asyncio.run(body())


def test_a_gateway_with_another_store_is_another_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_DB_URL", "postgresql://elsewhere/rota")
    assert settings_mark(SETTINGS, "rota/local") != MARK, "it would start the supervisor with the old one"


def test_an_answer_over_the_limit_is_an_error_to_its_asker_and_to_nobody_else(tmp_path: Path) -> None:
    async def list_jobs() -> list[str]:
        return ["x" * MESSAGE_BYTES_MAX]

    async def body() -> None:
        own = Gateway(tmp_path, SETTINGS, "rota/local")
        own._perform = lambda op, args: list_jobs() if op == "list_jobs" else Gateway._perform(own, op, args)
        serving = asyncio.create_task(own.run(GatewayFiles(tmp_path)))
        client = GatewayClient(tmp_path, SETTINGS)
        try:
            with pytest.raises(EngineUnavailable, match=r"its answer: a message of \d+ bytes is over"):
                await client.list_jobs()
            assert (await client.ping(timeout_s=LIMIT_S))["pid"] == os.getpid()
        finally:
            await client.close()
            own._leaving.set()
            assert await serving == 0

    asyncio.run(body())


def test_a_named_operation_without_an_answer_says_about_what_the_engine_was_asked(tmp_path: Path) -> None:
    async def answer_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode({"request_id": "", "gateway": 1, "engine": "", "settings": MARK}))
        await reader.read()

    async def body() -> None:
        server = await asyncio.start_unix_server(answer_nothing, GatewayFiles(tmp_path).address)
        client = GatewayClient(tmp_path, SETTINGS)
        await client.start()
        async with asyncio.timeout(LIMIT_S):
            await client._connected.wait()
        try:
            with pytest.raises(EngineUnavailable, match="m1: the gateway gave no answer to usage in time"):
                await client.usage("m1", timeout_s=0.1)
            with pytest.raises(EngineUnavailable, match="learn-1: the gateway gave no answer to sweep in time"):
                await client.sweep(JobId("learn-1"), timeout_s=0.1)
        finally:
            await client.close()
            server.close()

    asyncio.run(body())


def test_an_answer_that_comes_too_late_is_nobodys_and_the_next_one_is_its_askers(tmp_path: Path) -> None:
    asked = list[str]()

    async def answer_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode({"request_id": "", "gateway": 1, "engine": "", "settings": MARK}))
        while True:
            message = await read_message(reader)
            asked.append(message["request_id"])
            if len(asked) == 1:
                continue
            for identity in asked:  # the late one first
                writer.write(encode({"request_id": identity, "result": {"of": identity}, "gateway": 1, "engine": ""}))

    async def body() -> None:
        server = await asyncio.start_unix_server(answer_late, GatewayFiles(tmp_path).address)
        client = GatewayClient(tmp_path, SETTINGS)
        try:
            with pytest.raises(TimedOut):
                await client.request("ping", {}, timeout_s=0.1)
            found = await client.request("ping", {}, timeout_s=LIMIT_S)
            assert found == {"of": asked[1]} and asked[0] != asked[1]
            assert client._waiting == {}
        finally:
            await client.close()
            server.close()

    asyncio.run(body())


def test_each_home_on_a_given_engine_has_a_namespace_of_its_own_and_keeps_it(tmp_path: Path) -> None:
    given = EngineSettings(address="head:6379")
    first = namespace_of(tmp_path / "home", given)
    assert namespace_of(tmp_path / "home", EngineSettings(address="other:6379")) == first != "rota/local"
    (tmp_path / "home").rename(tmp_path / "moved")
    assert namespace_of(tmp_path / "home", given) != first, "the same path on another machine"
    assert namespace_of(tmp_path / "moved", given) == first
    assert namespace_of(tmp_path / "home", SETTINGS) == "rota/local"


def test_a_given_engine_that_does_not_answer_is_told_with_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(address: str, namespace: str) -> Any:
        raise ConnectionError(f"{address} {namespace}:\n refused")

    monkeypatch.setattr(gateway.importlib, "import_module", lambda _: SimpleNamespace(connect=connect))

    async def body() -> None:
        asked = Gateway(tmp_path, EngineSettings(address="head:1"), "rota/x")
        assert asked._status()["state"] == "off"
        with pytest.raises(ConnectionError):
            await asked._perform("nodes", {})
        status = asked._status()
        assert status["state"] == "connecting"
        assert status["text"].startswith("no Ray has answered at head:1: ConnectionError: head:1 rota/x: refused;")

    asyncio.run(body())
