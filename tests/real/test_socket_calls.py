"""Calls over Unix sockets between real processes: values, limits, deaths, strangers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rota.runtime import socket_calls
from rota.runtime.socket_calls import INFLIGHT_MAX, CallClient, CallServer, Connection, ConnectionLost, Unsendable

SERVER = """
import asyncio, os, signal, sys, threading, time
from rota.runtime.socket_calls import CallServer

async def answer(asked):
    what, value = asked
    match what:
        case "echo":
            return value
        case "write":
            value[0] = 7.0
            return float(value[0]), bool(value.flags.writeable), value.__array_interface__["data"][0] % 16
        case "later":
            await asyncio.sleep(value)
            return value
        case "lock":
            return threading.Lock()
        case "fork":
            child = os.fork()
            if child == 0:
                time.sleep(600)
                os._exit(0)
            return child
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)

async def main(name):
    await CallServer(answer).open(name)
    print("up", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(sys.argv[1]))
"""
LIMIT_S = 60.0


@pytest.fixture
def server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process that serves under a name of its own, and the name."""
    name = f"test/{os.getpid()}/{random.random()}"
    child = subprocess.Popen([sys.executable, "-c", SERVER, name], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    yield name, child
    child.kill()
    child.wait(LIMIT_S)


def asking(name: str, talk: Callable[[Connection], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        client = CallClient()
        connection = await client.find(name)
        assert connection is not None
        try:
            async with asyncio.timeout(LIMIT_S):
                return await talk(connection)
        finally:
            client.close()

    return asyncio.run(run())


@pytest.mark.parametrize("count", [0, 1, 8_000, 8_192, 65_536, 65_537, 1_000_003])
def test_bytes_and_arrays_of_every_size_come_back_equal(server: tuple[str, Any], count: int) -> None:
    array = np.arange(count, dtype=np.uint8)

    async def talk(one: Connection) -> None:
        raw, found = await one.call(("echo", (array.tobytes(), {"a": [array, array]})), None)
        assert raw == array.tobytes()
        assert all(np.array_equal(each, array) for each in found["a"])

    asking(server[0], talk)


def test_a_large_array_may_be_written_to_and_is_aligned(server: tuple[str, Any]) -> None:
    array = np.zeros(100_001)
    assert asking(server[0], lambda one: one.call(("write", array), None)) == (7.0, True, 0)
    assert array[0] == 0.0, "it is another copy"


def test_a_tensor_travels_without_being_pickled(server: tuple[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    for tensor in (torch.arange(100_000.0), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, requires_grad=True)):
        found = asking(server[0], lambda one, tensor=tensor: one.call(("echo", tensor), None))
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype
        assert found.requires_grad == tensor.requires_grad
    assert socket_calls.pack(torch.arange(100_000.0)).buffers


def test_many_calls_at_once_each_get_their_own_answer(server: tuple[str, Any]) -> None:
    async def talk(one: Connection) -> list[Any]:
        return await asyncio.gather(*(one.call(("echo", number), None) for number in range(3 * INFLIGHT_MAX)))

    assert asking(server[0], talk) == list(range(3 * INFLIGHT_MAX))


def test_more_calls_than_may_run_at_once_wait_and_none_is_lost(server: tuple[str, Any]) -> None:
    async def talk(one: Connection) -> list[Any]:
        return await asyncio.gather(*(one.call(("later", 0.2), None) for _ in range(INFLIGHT_MAX + 5)))

    began = time.monotonic()
    assert asking(server[0], talk) == [0.2] * (INFLIGHT_MAX + 5)
    assert time.monotonic() - began >= 0.4


def test_a_call_without_an_answer_in_time_ends_and_the_connection_serves_on(server: tuple[str, Any]) -> None:
    async def talk(one: Connection) -> Any:
        with pytest.raises(TimeoutError):
            await one.call(("later", 1.0), 0.05)
        assert await one.call(("echo", 1), None) == 1
        await asyncio.sleep(1.0)  # the late answer comes, and belongs to nothing
        return await one.call(("echo", 2), None)

    assert asking(server[0], talk) == 2


def test_what_cannot_be_pickled_is_named_on_both_ways(server: tuple[str, Any]) -> None:
    async def talk(one: Connection) -> None:
        with pytest.raises(Unsendable, match="lock") as found:
            await one.call(("echo", threading.Lock()), None)
        assert not found.value.answer
        with pytest.raises(Unsendable, match="lock") as found:
            await one.call(("lock", None), None)
        assert found.value.answer
        assert await one.call(("echo", 1), None) == 1

    asking(server[0], talk)


@pytest.mark.parametrize("forks", [False, True])
def test_a_dead_server_is_known_at_once_even_if_a_child_of_it_lives(server: tuple[str, Any], forks: bool) -> None:
    name, _ = server

    async def talk(one: Connection) -> int:
        child = await one.call(("fork", None), None) if forks else 0
        waiting = asyncio.create_task(one.call(("later", 600.0), None))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        with pytest.raises(ConnectionLost) as found:
            await one.call(("die", None), None)
        assert found.value.gone and time.monotonic() - began < 5.0
        with pytest.raises(ConnectionLost):
            await waiting
        return child

    child = asking(name, talk)
    try:
        assert asyncio.run(CallClient().find(name)) is None, "the name is free again"
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


def test_a_name_without_a_server_is_not_found_and_a_name_in_use_not_given_twice(server: tuple[str, Any]) -> None:
    async def talk() -> None:
        assert await CallClient().find("test/nothing") is None
        with pytest.raises(OSError, match="in use"):
            await CallServer(_never).open(server[0])

    asyncio.run(talk())


async def _never(asked: Any) -> Any:
    raise AssertionError(asked)


def test_a_server_whose_queue_is_full_is_reached_once_it_takes_connections() -> None:
    name = f"test/{os.getpid()}/{random.random()}"
    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as links:
        listening.bind(socket_calls._address(name))
        listening.listen(0)
        first = links.enter_context(socket.socket(socket.AF_UNIX))
        first.connect(socket_calls._address(name))

        async def talk() -> Connection | None:
            client = CallClient()
            finding = asyncio.create_task(client.find(name))
            await asyncio.sleep(0.1)
            assert not finding.done()
            links.enter_context(listening.accept()[0])
            found = await asyncio.wait_for(finding, LIMIT_S)
            client.close()
            return found

        assert asyncio.run(talk()) is not None


def test_frames_of_chance_end_their_connection_and_nothing_else(server: tuple[str, Any]) -> None:
    chance = random.Random(5)
    for _ in range(300):
        with socket.socket(socket.AF_UNIX) as link, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            link.connect(socket_calls._address(server[0]))
            link.sendall(chance.randbytes(chance.choice([1, 23, 24, 60, 5_000, 70_000])))
    assert asking(server[0], lambda one: one.call(("echo", 1), None)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_is_neither_served_nor_called(server: tuple[str, Any]) -> None:
    with _stranger("link.connect(address); print(link.recv(1), flush=True)", server[0]) as child:
        out, err = child.communicate(timeout=LIMIT_S)
        assert out == "b''\n" or "ConnectionResetError" in err, (out, err)
    name = f"test/{os.getpid()}/taken"
    with _stranger("link.bind(address); link.listen(); print('up', flush=True); link.accept()", name) as child:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        assert asyncio.run(CallClient().find(name)) is None


@contextlib.contextmanager
def _stranger(script: str, name: str) -> Iterator[subprocess.Popen[str]]:
    """A process of another user with a socket ``link`` and the ``address`` of a server; it ends with the block."""
    start = "import os, socket, sys; link = socket.socket(socket.AF_UNIX); address = bytes.fromhex(sys.argv[1])"
    argv = [sys.executable, "-c", f"{start}; os.setuid(65534); {script}", socket_calls._address(name).encode().hex()]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait(LIMIT_S)
