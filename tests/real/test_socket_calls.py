"""Calls between real processes, the same in memory, over Unix sockets and over TCP: values, limits, deaths, strangers.

``--frames N`` gives the number of frames of chance that a server in this process gets (ROTA_DEEP: 100,000).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.runtime import call_server

from rota.runtime import frames, socket_calls
from rota.runtime.frames import CALL, NOTHING, QUEUE_BYTES_MAX, encode, pack
from rota.runtime.handshake import FAILURES_MAX
from rota.runtime.launcher import NotPicklable
from rota.runtime.socket_calls import (
    INFLIGHT_MAX,
    CallClient,
    CallServer,
    Connection,
    ConnectionLost,
    unix_address,
)

LIMIT_S = 60.0
KEY = bytes(range(32))


@dataclass
class Served:
    """A server: its name, its address for other machines if it has one, and its process if that is another one."""

    name: str
    address: str = ""
    child: subprocess.Popen[str] | None = None

    def asking(self, talk: Callable[[Connection], Awaitable[Any]]) -> Any:
        """Connect, and talk."""

        async def run() -> Any:
            async with asyncio.timeout(LIMIT_S):
                if self.child is None:
                    here, there = socket.socketpair()
                    for end in (here, there):
                        end.setblocking(False)
                    CallServer(call_server.answer).serve(there)
                    connection = Connection(here, None)
                    try:
                        return await talk(connection)
                    finally:
                        connection.close()
                        await asyncio.sleep(0)
                client = CallClient()
                connection = await client.find(self.name, self.address, KEY)
                assert connection is not None
                try:
                    return await talk(connection)
                finally:
                    client.close()

        return asyncio.run(run())


@contextlib.contextmanager
def served(*, tcp: bool) -> Iterator[Served]:
    """A process that serves under a name of its own."""
    name = f"test/{os.getpid()}/{random.random()}"
    more = ["127.0.0.1", KEY.hex()] if tcp else []
    argv = [sys.executable, "-m", "tests.runtime.call_server", name, *more]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        yield Served(name, address if tcp else "", child)
    finally:
        child.kill()
        child.wait(LIMIT_S)


@pytest.fixture(params=["memory", "unix", "tcp"])
def anywhere(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server over each of the three."""
    if request.param == "memory":
        yield Served("memory")
        return
    with served(tcp=request.param == "tcp") as one:
        yield one


@pytest.fixture(params=["unix", "tcp"])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server that is another process."""
    with served(tcp=request.param == "tcp") as one:
        yield one


@pytest.fixture
def local() -> Iterator[Served]:
    """A server of this machine."""
    with served(tcp=False) as one:
        yield one


@pytest.fixture
def remote() -> Iterator[Served]:
    """A server that other machines can reach."""
    with served(tcp=True) as one:
        yield one


# -- the same over all three ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 8_000, 8_192, 65_536, 65_537, 1_000_003, 9_000_001])
def test_bytes_and_arrays_of_every_size_come_back_equal(anywhere: Served, count: int) -> None:
    array = np.arange(count, dtype=np.uint8)

    async def talk(one: Connection) -> None:
        raw, found = await one.call(("echo", (array.tobytes(), {"a": [array, array]})), None)
        assert raw == array.tobytes()
        assert all(np.array_equal(each, array) for each in found["a"])

    anywhere.asking(talk)


def test_more_buffers_than_a_frame_may_have_are_copied_into_it(anywhere: Served) -> None:
    arrays = [np.full(frames.BUFFER_BYTES_MIN, n % 251, np.uint8) for n in range(frames.BUFFERS_MAX + 3)]

    async def talk(one: Connection) -> None:
        found = await one.call(("echo", arrays), None)
        assert all(np.array_equal(a, b) for a, b in zip(found, arrays, strict=True))

    anywhere.asking(talk)


@pytest.mark.parametrize("count", [100_001, 1_000_001])
def test_a_large_array_may_be_written_to_and_is_aligned(anywhere: Served, count: int) -> None:
    array = np.zeros(count)
    assert anywhere.asking(lambda one: one.call(("write", array), None)) == (7.0, True, 0)
    assert array[0] == 0.0, "it is another copy"


def test_a_tensor_travels_without_being_pickled(anywhere: Served) -> None:
    torch = pytest.importorskip("torch")
    for tensor in (torch.arange(100_000.0), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, requires_grad=True)):
        found = anywhere.asking(lambda one, tensor=tensor: one.call(("echo", tensor), None))
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype
        assert found.requires_grad == tensor.requires_grad
    assert pack(torch.arange(100_000.0)).buffers


def test_many_calls_at_once_each_get_their_own_answer(anywhere: Served) -> None:
    async def talk(one: Connection) -> list[Any]:
        return await asyncio.gather(*(one.call(("echo", number), None) for number in range(3 * INFLIGHT_MAX)))

    assert anywhere.asking(talk) == list(range(3 * INFLIGHT_MAX))


def test_more_calls_than_may_run_at_once_wait_and_none_is_lost(anywhere: Served) -> None:
    async def talk(one: Connection) -> list[Any]:
        return await asyncio.gather(*(one.call(("later", 0.2), None) for _ in range(INFLIGHT_MAX + 5)))

    began = time.monotonic()
    assert anywhere.asking(talk) == [0.2] * (INFLIGHT_MAX + 5)
    assert time.monotonic() - began >= 0.4


def test_more_bytes_than_may_be_in_flight_wait_and_none_is_lost(
    anywhere: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_calls, "INFLIGHT_BYTES_MAX", 3_000_000)
    array = np.zeros(1_000_000, np.uint8)

    async def talk(one: Connection) -> int:
        async def call() -> None:
            await one.call(("echo", array), None)

        most, tasks = 0, [asyncio.create_task(call()) for _ in range(20)]
        while not all(task.done() for task in tasks):
            most = max(most, one._in_flight._bytes)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert await one.call(("echo", 4 * array.tobytes()), None) == 4 * array.tobytes(), "one alone always may"
        return most

    assert 1_000_000 < anywhere.asking(talk) <= 3_000_000


def test_a_call_without_an_answer_in_time_ends_and_the_connection_serves_on(anywhere: Served) -> None:
    async def talk(one: Connection) -> Any:
        with pytest.raises(TimeoutError):
            await one.call(("later", 1.0), 0.05)
        return await one.call(("echo", 2), None)

    assert anywhere.asking(talk) == 2


def test_the_operation_of_a_call_that_is_given_up_is_cancelled_and_no_other(anywhere: Served) -> None:
    call_server.cancelled.clear()

    async def talk(one: Connection) -> Any:
        tasks = [asyncio.create_task(one.call(("wait", number), None)) for number in range(3)]
        await asyncio.sleep(0)
        await one.call(("echo", 1), None)
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        with pytest.raises(TimeoutError):
            await one.call(("wait", "late"), 0.05)
        found = await one.call(("cancelled", None), None)
        assert not tasks[0].done() and not tasks[2].done()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found

    assert anywhere.asking(talk) == [1, "late"]


def test_what_cannot_be_pickled_is_named_on_both_ways(anywhere: Served) -> None:
    async def talk(one: Connection) -> None:
        with pytest.raises(NotPicklable, match="lock") as found:
            await one.call(("echo", threading.Lock()), None)
        assert not found.value.answer
        with pytest.raises(NotPicklable, match="lock") as found:
            await one.call(("lock", None), None)
        assert found.value.answer
        assert await one.call(("echo", 1), None) == 1

    anywhere.asking(talk)


def test_who_writes_to_a_process_that_does_not_read_waits_and_no_longer_than_its_limit(elsewhere: Served) -> None:
    async def talk(one: Connection) -> None:
        stopping = asyncio.create_task(one.call(("stop", None), None))
        await asyncio.sleep(0.2)
        text = bytes(60_000)
        calls = [asyncio.create_task(one.call(("echo", text), 2.0)) for _ in range(400)]
        await asyncio.sleep(0.5)
        assert one._queued <= QUEUE_BYTES_MAX + 2 * len(text), "what waits is with its callers"
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(one) for one in ended} == {TimeoutError}
        assert elsewhere.child is not None
        os.kill(elsewhere.child.pid, signal.SIGCONT)
        assert await one.call(("echo", 1), None) == 1
        await stopping

    elsewhere.asking(talk)


# -- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forks", [False, True])
def test_a_dead_server_is_known_at_once_even_if_a_child_of_it_lives(elsewhere: Served, forks: bool) -> None:
    async def talk(one: Connection) -> int:
        child = await one.call(("fork", None), None) if forks else 0
        waiting = asyncio.create_task(one.call(("later", 600.0), None))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        with pytest.raises(ConnectionLost) as found:
            await one.call(("die", None), None)
        assert found.value.gone is (not elsewhere.address) and found.value.unsure is bool(elsewhere.address)
        assert time.monotonic() - began < 5.0
        with pytest.raises(ConnectionLost):
            await waiting
        return child

    child = elsewhere.asking(talk)
    try:
        if elsewhere.address:
            assert elsewhere.child is not None
            elsewhere.child.wait(LIMIT_S)  # its connections are closed before it stops to listen
            with pytest.raises(ConnectionLost, match="no process listens") as found:
                asyncio.run(CallClient().find(elsewhere.name, elsewhere.address, KEY))
            assert found.value.gone
        else:
            assert asyncio.run(CallClient().find(elsewhere.name)) is None, "the name is free again"
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


def test_calls_on_a_connection_that_is_hung_up_end_and_the_next_makes_a_new_one(remote: Served) -> None:
    async def talk() -> None:
        client = CallClient()
        one = await client.find(remote.name, remote.address, KEY)
        assert one is not None
        waiting = asyncio.create_task(one.call(("wait", None), None))
        await asyncio.sleep(0)
        await asyncio.to_thread(client.hang_up, remote.name)
        with pytest.raises(ConnectionLost) as found:
            await waiting
        assert found.value.unsure
        again = await client.find(remote.name, remote.address, KEY)
        assert again is not None and again is not one and await again.call(("echo", 2), None) == 2
        client.close()

    asyncio.run(talk())


def test_a_name_without_a_server_is_not_found_and_a_name_in_use_not_given_twice(local: Served) -> None:
    async def talk() -> None:
        assert await CallClient().find("test/nothing") is None
        with pytest.raises(OSError, match="in use"):
            CallServer(_never).open(local.name)

    asyncio.run(talk())


async def _never(asked: Any) -> Any:
    raise AssertionError(asked)


def test_a_server_whose_queue_is_full_is_reached_once_it_takes_connections() -> None:
    name = f"test/{os.getpid()}/{random.random()}"
    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as links:
        listening.bind(unix_address(name))
        listening.listen(0)
        first = links.enter_context(socket.socket(socket.AF_UNIX))
        first.connect(unix_address(name))

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


# -- strangers --------------------------------------------------------------------------------------------------------


class Trap:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_without_the_key_and_the_name_nothing_is_unpickled_and_others_of_that_host_still_come_in(
    remote: Served, tmp_path: Path
) -> None:
    bad = b"".join(map(bytes, encode(1, CALL, pack(Trap(tmp_path / "made")))))
    host, _, port = remote.address.rpartition(":")
    with socket.create_connection((host, int(port)), LIMIT_S) as link:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            link.sendall(bad)
        with contextlib.suppress(ConnectionResetError):
            while link.recv(4096):
                pass
    for name, key in ((remote.name, bytes(32)), (f"{remote.name}0", KEY)) * FAILURES_MAX:
        with pytest.raises(ConnectionLost, match="does not let it in"):
            asyncio.run(CallClient().find(name, remote.address, key))
    assert list(tmp_path.iterdir()) == []
    assert remote.asking(lambda one: one.call(("echo", 1), None)) == 1


def test_strangers_that_say_nothing_do_not_keep_others_out(remote: Served) -> None:
    host, _, port = remote.address.rpartition(":")
    with contextlib.ExitStack() as links:
        for _ in range(socket_calls.HANDSHAKES_MAX - 1):
            links.enter_context(socket.create_connection((host, int(port)), LIMIT_S))
        assert remote.asking(lambda one: one.call(("echo", 1), None)) == 1


def test_frames_of_chance_cost_a_connection_at_most_and_are_named_in_the_log(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the connections of one server in this process: nothing ends it, and nothing grows in it."""
    given = request.config.getoption("--frames", default=None)
    count = int(given or (100_000 if os.environ.get("ROTA_DEEP") else 4_000))
    chance = random.Random(count)
    base = [b"".join(map(bytes, encode(n, CALL, pack(value)))) for n, value in enumerate(VALUES)]
    logged = Counter[str]()
    logger = logging.getLogger("rota.runtime")
    monkeypatch.setattr(logger, "propagate", False)  # whoever captures the lines keeps them, and grows
    monkeypatch.setattr(logger, "handlers", [_Counting(logged)])

    async def main() -> None:
        server = CallServer(_echo)
        before: dict[str, int] = {}
        for number in range(count):
            here, there = socket.socketpair()
            there.setblocking(False)
            server.serve(there)
            here.sendall(_frame_of_chance(chance, base)[:60_000])
            for _ in range(4):
                await asyncio.sleep(0)
            here.close()
            if number % 500 == 499:
                await asyncio.sleep(0.01)
                gc.collect()
                now = {
                    "descriptors": psutil.Process().num_fds(),
                    "tasks": len(asyncio.all_tasks()),
                    "megabytes": psutil.Process().memory_info().rss >> 20,
                }
                before = before or now
                assert now["descriptors"] <= before["descriptors"] + 5 and now["tasks"] <= before["tasks"] + 5, now
                assert now["megabytes"] <= before["megabytes"] + 24, (before, now)
        assert set(logged) <= {"a connection was closed", "a call could not be read"}, logged
        assert logged["a connection was closed"] > count // 20 and logged["a call could not be read"] > count // 20
        here, there = socket.socketpair()
        here.setblocking(False)
        there.setblocking(False)
        server.serve(there)
        connection = Connection(here, None)
        assert await connection.call(("echo", 1), LIMIT_S) == ("echo", 1)
        connection.close()

    asyncio.run(main())


VALUES = (("echo", 1), ("echo", "x" * 5000), ("echo", {"a": [1.5, None, b"y" * 300]}), ("echo", bytearray(70_000)))


class _Counting(logging.Handler):
    """Counts lines by what they begin with."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        self.found[record.getMessage().partition(":")[0]] += 1


async def _echo(asked: object) -> object:
    return asked


def _frame_of_chance(chance: random.Random, base: list[bytes]) -> bytes:
    """Noise, a length that is a lie, or a frame with some bytes changed, cut, or sent twice."""
    frame = bytearray(chance.choice(base))
    match chance.randrange(7):
        case 0:
            return chance.randbytes(chance.choice([1, 23, 24, 60, 5_000]))
        case 1:
            return struct.pack("<QQII", chance.randrange(1 << 33), 1, CALL, chance.randrange(1 << 12)) + bytes(frame)
        case 2:
            return bytes(frame) + bytes(frame)
        case 3:
            return bytes(frame[: chance.randrange(len(frame))])
        case 4:
            return b"".join(map(bytes, encode(chance.randrange(9), chance.randrange(9), NOTHING)))
        case _:
            for _ in range(chance.randrange(1, 6)):
                frame[chance.randrange(min(len(frame), 200))] = chance.randrange(256)
            return bytes(frame)


def test_frames_of_chance_end_their_connection_and_nothing_else(local: Served) -> None:
    chance = random.Random(5)
    for _ in range(300):
        with socket.socket(socket.AF_UNIX) as link, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            link.connect(unix_address(local.name))
            link.sendall(chance.randbytes(chance.choice([1, 23, 24, 60, 5_000, 70_000])))
    assert local.asking(lambda one: one.call(("echo", 1), None)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_is_neither_served_nor_called(local: Served) -> None:
    with _stranger("link.connect(address); print(link.recv(1), flush=True)", local.name) as child:
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
    argv = [sys.executable, "-c", f"{start}; os.setuid(65534); {script}", unix_address(name).encode().hex()]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait(LIMIT_S)
