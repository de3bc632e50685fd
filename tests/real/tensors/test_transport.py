"""Versions from another tensor server: two homes of this computer stand for two machines."""

from __future__ import annotations

import contextlib
import errno
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rota.tensors
from rota.runtime import directory, environ
from rota.runtime.directory import FixedDirectory
from rota.runtime.handshake import HandshakeRefused
from rota.tensors import errors, messages, transport
from rota.tensors import server as server_module
from rota.tensors.api.store import Plane
from rota.tensors.server import TensorServer

KEY = b"k" * 32


@dataclass
class Two:
    """``far`` publishes and has a tensor server at ``store``; ``near`` reads as another machine would."""

    far: Plane
    near: Plane
    store: str
    known: FixedDirectory


@pytest.fixture
def two() -> Iterator[Two]:
    homes = [Path(tempfile.mkdtemp(prefix="rt")) for _ in range(2)]
    far, near = (rota.tensors.connect(home=home) for home in homes)
    try:
        directory.use(FixedDirectory("far", "127.0.0.1", KEY))
        store = transport.own_store(far)
        known = FixedDirectory("near", "127.0.0.1", KEY, {"far": store})
        directory.use(known)
        yield Two(far, near, store, known)
    finally:
        directory.use(None)
        for plane in (far, near):
            plane.close()
        for home in homes:
            rota.tensors.down(home)
            shutil.rmtree(home)


def test_every_dtype_the_parts_and_what_is_said_of_them_arrive(two: Two) -> None:
    torch = pytest.importorskip("torch")
    sent = {
        "f": torch.arange(70_000, dtype=torch.float32).reshape(7, 100, 100),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.empty(0, 4),
        "one": torch.tensor(5),
    }
    two.far.publish_group("g", sent, step=3, epoch=2, part=(0, 2), retain=3, meta="a", label="job/a/0")
    two.far.publish_group(
        "g", {"x": np.arange(9)}, step=3, epoch=2, part=(1, 2), retain=3, meta={"b": 1}, label="job/a/1"
    )
    found = transport.pull(two.near, "g", step=3, near="far")
    assert {name: (value.dtype, value.shape) for name, value in found.items() if name != "x"} == {
        name: (value.dtype, value.shape) for name, value in sent.items()
    }
    assert all(torch.equal(found[name], value) for name, value in sent.items())
    assert (found.step, found.epoch, found.meta, len(found.parts)) == (3, 2, ["a", {"b": 1}], 2)
    row = two.near.info("g")
    assert (row.epoch, row.step, row.label) == (2, 3, two.far.info("g").label)
    assert two.near.fsck()["violations"] == []


def test_a_step_older_than_what_is_here_is_kept_beside_it(two: Two) -> None:
    for step in (1, 2):
        two.far.publish_group("g", {"x": np.full(3, step)}, step=step, retain=2)
    assert [transport.pull(two.near, "g", step=step, near="far", as_="numpy")["x"][0] for step in (2, 1, 2, 1)] == [
        2,
        1,
    ] * 2
    assert two.near.info("g").step == 2
    assert transport.pull(two.near, "g", min_step=1, near="far").step == 2


def test_an_older_epoch_is_not_taken(two: Two) -> None:
    two.far.publish_group("g", {"x": np.zeros(3)}, step=4, epoch=1)
    assert transport.pull(two.near, "g", step=4, epoch_min=1, near="far").epoch == 1
    with pytest.raises(errors.WaitTimeout, match="step 4 is of epoch 1, wanted 2"):
        transport.pull(two.near, "g", step=4, epoch_min=2, near="far", wait_s=0.2)
    two.far.publish_group("g", {"x": np.ones(3)}, step=4, epoch=2)
    found = transport.pull(two.near, "g", step=4, epoch_min=2, near="far", as_="numpy")
    assert (found.epoch, found["x"][0]) == (2, 1.0)


def test_a_replica_that_takes_longer_than_a_silence_arrives(two: Two) -> None:
    """The far machine is asked to have a step of this one, which is published two seconds later."""
    two.near.publish_group("other", {"x": np.zeros(3)}, step=1)
    transport.own_store(two.near)
    publish = threading.Timer(2.5, lambda: two.near.publish_group("late", {"x": np.arange(3)}, step=7, epoch=2))
    publish.start()
    transport.replicate(two.near, "late", "far", step=7, epoch=2)
    publish.join()
    assert two.far.get_group("late", step=7, as_="numpy")["x"].tolist() == [0, 1, 2]
    with pytest.raises(errors.WaitTimeout, match="late: not here"):
        transport.replicate(two.near, "late", "far", step=8, wait_s=0.2)


def test_what_is_published_here_while_a_version_comes_is_kept(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.far.publish_group("g", {"x": np.full(3, 4)}, step=4, epoch=1)
    receive = messages.receive_payload

    def receive_late(*args: Any) -> None:
        receive(*args)
        if two.near.info("g").version == 0:
            two.near.publish_group("g", {"x": np.full(3, 5)}, step=5, epoch=1)

    monkeypatch.setattr(messages, "receive_payload", receive_late)
    assert transport.pull(two.near, "g", step=4, near="far", as_="numpy")["x"][0] == 4
    assert two.near.get_group("g", as_="numpy")["x"][0] == 5


def test_a_value_that_is_deleted_where_it_was_made_goes_where_it_was_sent(two: Two) -> None:
    for name in ("t", "u"):
        two.far.put(name, np.zeros(3))
        transport.pull(two.near, name, near="far", as_="numpy")
    directory.use(FixedDirectory("far", "127.0.0.1", KEY))  # the loop runs on the machine that made them
    transport.delete(two.far, [("t", two.store), ("away", "127.0.0.1:1")])
    assert [row.name for plane in (two.far, two.near) for row in plane.ls() if row.version] == ["u", "u"]


def test_whoever_has_another_key_gets_nothing(two: Two) -> None:
    two.far.put("t", np.zeros(3))
    two.known.secret = b"x" * 32
    with pytest.raises(HandshakeRefused):
        transport.ask(two.store, {"op": "stat"})
    with pytest.raises(errors.WaitTimeout, match="another key"):
        transport.pull(two.near, "t", near="far", wait_s=0.1)


@pytest.fixture
def server(two: Two) -> Iterator[TensorServer]:
    """A tensor server of ``near`` in this process."""
    own = FixedDirectory("near", "127.0.0.1", KEY)
    found = TensorServer(environ.Home.of(two.near.home), two.near.address.url, own)
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            found.serve_for(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    yield found
    over.set()
    thread.join()
    found.plane().close()


def wait_until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20.0
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_replica_whose_asker_went_away_is_forgotten(
    two: Two, server: TensorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds would stay in memory for as long as the server lives."""
    monkeypatch.setattr(server_module, "_RECHECK_S", 0.0)
    two.far.publish_group("g", {"x": np.arange(3)}, step=1, epoch=1)
    ask = {"op": "bring", "namespace": two.near.namespace, "name": "g", "step": 1, "near": two.store}
    assert transport.ask(server.address, ask)["coming"]
    wait_until(lambda: not server._bringing)
    assert two.near.get_group("g", step=1, as_="numpy")["x"].tolist() == [0, 1, 2]


def test_an_idle_connection_is_closed_and_its_process_asks_over_another(
    two: Two, server: TensorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < server_module._IDLE_S < 600, "0 is no limit"
    monkeypatch.setattr(server_module, "_IDLE_S", 0.2)
    assert transport.ask(server.address, {"op": "stat"})["ok"] and server._open == 1
    wait_until(lambda: server._open == 0)
    assert transport.ask(server.address, {"op": "stat"})["ok"]


def test_a_server_listens_at_an_ipv6_address(two: Two) -> None:
    own = FixedDirectory("v6", "::1", KEY)
    server = TensorServer(environ.Home.of(two.near.home), two.near.address.url, own)
    thread = threading.Thread(target=server.serve_for, args=(10.0,))
    thread.start()
    assert transport.ask(server.address, {"op": "stat"})["ok"]
    thread.join()
    server.plane().close()


def test_a_server_that_cannot_take_a_connection_continues(
    two: Two, server: TensorServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    listening = server._listen

    class Full:
        """Answers as the kernel does when this process has too many open files."""

        def settimeout(self, seconds: float) -> None:
            del seconds

        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(server, "_listen", Full())
        server.serve_for(0.01)
    assert server._listen is listening and "Too many open files" in capfd.readouterr().err
    assert transport.ask(server.address, {"op": "stat"})["ok"]


@pytest.mark.parametrize("changed", [0, 100_000, messages.CHUNK_BYTES + 5, 5 << 20])
def test_a_byte_that_changed_on_the_way_is_noticed(changed: int, tmp_path: Path) -> None:
    payload = np.random.default_rng(0).integers(0, 255, (5 << 20) + 3, np.uint8)
    path = tmp_path / "segment"
    path.write_bytes(payload.tobytes())
    memory = memoryview(payload.tobytes())
    part = messages.VersionPart(path=path, offset=0, memory=memory, manifest=b"", rank=0, world=1)
    ours, between = socket.socketpair()
    onward, theirs = socket.socketpair()
    chunks = changed // messages.CHUNK_BYTES

    def carry() -> None:
        at, wanted = 0, changed + chunks * messages.SUM_BYTES
        with between, onward, contextlib.suppress(OSError):  # the receiver gives up
            while data := bytearray(between.recv(65536)):
                if at <= wanted < at + len(data):
                    data[wanted - at] ^= 1
                at += len(data)
                onward.sendall(data)

    threads = [threading.Thread(target=carry), threading.Thread(target=_send, args=(ours, part))]
    for thread in threads:
        thread.start()
    target, done = bytearray(len(payload)), list[int]()
    with pytest.raises(messages.Broken, match=f"from byte {chunks * messages.CHUNK_BYTES} on does not match"):
        messages.receive_payload(theirs, memoryview(target), 0, lambda at, size: None, done.append)
    theirs.close()
    for thread in threads:
        thread.join()
    assert done == [messages.CHUNK_BYTES] * chunks
    assert target[: chunks * messages.CHUNK_BYTES] == memory[: chunks * messages.CHUNK_BYTES]


def _send(link: socket.socket, part: messages.VersionPart) -> None:
    with link, contextlib.suppress(OSError):
        messages.send_payload(link, b"", [part], (0, 0))
