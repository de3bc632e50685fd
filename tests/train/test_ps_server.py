"""Parameter servers over real sockets: equal to all-reduce, bounded lead, deaths of workers, links and servers."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from rota.spec.errors import BadInput, Fenced, TimedOut
from rota.train.ps import server
from rota.train.ps.client import PsClient, ServerLost
from rota.train.ps.clocks import Rule
from rota.train.ps.server import PsServer, ServerSpec
from rota.train.ps.table import ParameterTable, RowOptimizer, TableFull, TableSpec

ADAM = RowOptimizer(kind="adam", lr=0.01)
WORDS = TableSpec(name="words", dim=4, optimizer=RowOptimizer(kind="adagrad", lr=0.1), scale=0.1)


@contextmanager
def servers(n: int, gone_s: float = 0.3, **rule: Any) -> Iterator[tuple[list[PsServer], list[str]]]:
    spec = ServerSpec(rule=Rule(**rule), dense=ADAM, tables=(WORDS,), token="s", gone_s=gone_s)
    made = [PsServer(spec) for _ in range(n)]
    try:
        yield made, [one.serve() for one in made]
    finally:
        for one in made:
            one.close()


def place(addresses: list[str]) -> tuple[str, int]:
    """Host and port of the first."""
    host, _, port = addresses[0].rpartition(":")
    return host, int(port)


def together(work: Callable[[int], Any], n: int) -> list[Any]:
    """``work(worker)`` in n threads; results in order, the first error raised."""
    found: dict[int, Any] = {}

    def run(worker: int) -> None:
        try:
            found[worker] = work(worker)
        except BaseException as error:
            found[worker] = error

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for worker in range(n):
        if isinstance(found.get(worker), BaseException):
            raise found[worker]
    return [found[worker] for worker in range(n)]


def gradient(worker: int, clock: int, weights: Any) -> Any:
    target = np.random.default_rng([worker, clock]).normal(size=len(weights)).astype(np.float32)
    return weights - target


@pytest.mark.slow
def test_sync_servers_equal_one_process_with_the_mean_gradient() -> None:
    torch = pytest.importorskip("torch")
    start = np.linspace(-1, 1, 11).astype(np.float32)
    joined = threading.Barrier(3, timeout=90)

    def work(worker: int) -> Any:
        client = PsClient(addresses, worker, token="s")
        client.offer_dense(start)
        joined.wait()  # who joins later begins at the clock of the others
        for clock in range(12):
            assert client.wait_turn(dense=True) == clock
            weights = client.pull_dense()
            ids = np.array([clock % 3, 7, worker, 7])
            rows = client.pull("words", ids)
            client.push("words", ids, rows + worker)
            client.push_dense(gradient(worker, clock, weights))
            client.tick()
        client.wait_turn(dense=True)
        return client.pull_dense()

    with servers(2, gone_s=30.0, mode="ps_sync") as (_, addresses):
        ends = together(work, 3)
        late = PsClient(addresses, 9, token="s", takes_part=False)
        rows = late.pull("words", np.arange(8))
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.Adam([weight], lr=0.01)
    table = ParameterTable(WORDS)
    for clock in range(12):
        now = weight.detach().numpy()
        weight.grad = torch.from_numpy(np.mean([gradient(worker, clock, now) for worker in range(3)], axis=0))
        optimizer.step()
        ids = np.concatenate([np.array([clock % 3, 7, worker, 7]) for worker in range(3)])
        seen = np.concatenate([table.pull(ids[worker * 4 : worker * 4 + 4]) + worker for worker in range(3)])
        table.push(ids, seen / np.float32(3))
    for end in ends:
        np.testing.assert_allclose(end, weight.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(rows, table.pull(np.arange(8)), atol=1e-6)


def straggle(worker: int, clock: int) -> None:
    """Each worker in turn is slow for one iteration: 40 ms among 4 ms."""
    time.sleep(0.04 if clock % 3 == worker else 0.004)


def run_with_stragglers(addresses: list[str], steps: int) -> None:
    def work(worker: int) -> None:
        client = PsClient(addresses, worker, token="s")
        if worker == 0:
            client.offer_dense(np.zeros(4, np.float32))
        for _ in range(steps):
            clock = client.wait_turn()
            straggle(worker, clock)
            client.tick()

    together(work, 3)


@pytest.mark.slow
def test_ssp_lets_workers_lead_up_to_its_bound_and_sync_never_when_they_straggle_in_turn() -> None:
    leads = {}
    for name, rule in (("sync", {"mode": "ps_sync"}), ("ssp", {"mode": "ps_ssp", "s": 2})):
        with servers(2, gone_s=30.0, **rule) as (made, addresses):
            run_with_stragglers(addresses, 24)
            leads[name] = max(one.stats()["lead_max"] for one in made)
    assert leads == {"sync": 0, "ssp": 2}


def test_a_worker_that_dies_holds_the_others_up_for_its_grace_only() -> None:
    with servers(1, mode="ps_sync") as (made, addresses):
        dead, live = PsClient(addresses, 0, token="s"), PsClient(addresses, 1, token="s")
        live.wait_turn()
        dead.wait_turn()
        live.tick()
        dead.close(leave=False)
        assert live.wait_turn(timeout_s=5) == 1
        assert made[0].stats()["clocks"] == {"1": 1}
        back = PsClient(addresses, 0, epoch=2, token="s")
        assert back.clock == 1
        with pytest.raises(Fenced, match="worker 0: FENCED"):
            dead.tick()


def test_a_turn_that_does_not_come_names_the_slowest() -> None:
    with servers(1, mode="ps_ssp", s=0) as (_, addresses):
        slow, fast = PsClient(addresses, 0, token="s"), PsClient(addresses, 1, token="s")
        fast.wait_turn()
        fast.tick()
        with pytest.raises(TimedOut, match=r"worker 1 got no turn for clock 1 in 0.2 s: worker 0 is at clock 0"):
            fast.wait_turn(timeout_s=0.2)
        slow.close()
        assert fast.wait_turn() == 1


def test_a_cut_line_is_mended_and_a_push_that_came_twice_counts_once() -> None:
    with servers(1, mode="ps_async") as (made, addresses):
        client = PsClient(addresses, 0, token="s")
        client.offer_dense(np.zeros(3, np.float32))
        for clock in range(4):
            assert client.wait_turn(dense=True) == clock
            client.push_dense(np.ones(3, np.float32))
            if clock % 2:  # the line is cut after the request was sent: the server has it, the answer is lost
                link = client._links[0]
                sent = {"op": "push", "worker": 0, "epoch": 1, "clock": clock}
                link.begin(sent, {"dense": np.ones(3, np.float32)}, 5.0)
                time.sleep(0.05)
                link.close()
            client.tick()
        assert made[0].stats()["version"] == 4


def test_a_server_goes_on_from_its_snapshot_with_the_same_weights_and_clock() -> None:
    with servers(2, mode="ps_ssp", s=1) as (made, addresses):
        client = PsClient(addresses, 0, token="s", retry_s=0.1)
        client.offer_dense(np.arange(5, dtype=np.float32))
        for _ in range(3):
            client.wait_turn(dense=True)
            client.push_dense(client.pull_dense())
            ids = np.arange(20)
            client.push("words", ids, client.pull("words", ids))
            client.tick()
        client.wait_turn(dense=True)
        want, rows = client.pull_dense(), client.pull("words", np.arange(20))
        kept = [one.snapshot() for one in made]
        made[0].close()
        client._links[0].close()
        with pytest.raises(ServerLost, match=addresses[0]):
            client.pull("words", np.arange(20))
    with servers(2, mode="ps_ssp", s=1) as (made, addresses):
        for one, state in zip(made, kept, strict=True):
            one.restore(state)
        again = PsClient(addresses, 0, epoch=2, token="s")
        assert again.wait_turn(dense=True) == 3
        assert np.array_equal(again.pull_dense(), want)
        assert np.array_equal(again.pull("words", np.arange(20)), rows)
        ids, exported = again.export("words")
        assert np.array_equal(exported[np.argsort(ids)], rows)


def test_a_fenced_push_leaves_the_acknowledged_one_of_the_living_worker() -> None:
    server = PsServer(ServerSpec(rule=Rule(mode="ps_sync"), dense=RowOptimizer(lr=1.0)))
    for worker, epoch in ((0, 2), (1, 1)):
        clock = server.join(worker, epoch)
        server.turn(worker, epoch, clock, 1.0)
    server.offer_dense(np.zeros(2, np.float32))
    server.push(0, 2, 0, {"dense": np.ones(2, np.float32)})
    with pytest.raises(Fenced):
        server.push(0, 1, 0, {"dense": np.full(2, 9, np.float32)})
    server.push(1, 1, 0, {"dense": np.ones(2, np.float32)})
    assert server.pull_dense().tolist() == [-1, -1]


def test_after_a_lost_server_the_others_answers_are_not_taken_for_later_ones() -> None:
    with servers(2, mode="ps_async") as (made, addresses):
        client = PsClient(addresses, 0, token="s", retry_s=0.1)
        port = int(addresses[0].rpartition(":")[2])
        made[0].close()
        client._links[0].close()
        with pytest.raises(ServerLost):
            client.stats()
        made[0].serve(port=port)
        assert client.wait_turn() == 0
        assert "version" in client.stats()[1]


def test_a_stranger_gets_no_memory_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HELLO_S", 0.1)
    with servers(1, mode="ps_async") as (_, addresses):
        host, _, port = addresses[0].rpartition(":")
        text = json.dumps({"token": "", "worker": 0, "arrays": []}).encode()
        for said in (struct.pack("<IQ", len(text), 1 << 33) + text, b""):
            with socket.create_connection((host, int(port)), timeout=5) as line:
                line.sendall(said)
                assert line.recv(1) == b"", "the server hangs up"


def test_frames_that_are_none_end_their_connection_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(0)
    head = {"token": "s", "worker": 0, "arrays": [["a", "<f4", [2, 3]]]}
    good = json.dumps(head).encode()
    odd = (b"[]", b"7", b"{}", b'{"arrays": 3}', b'{"arrays": [[1]]}', b"[" * 60_000, b"\xff\xfe")
    shapes = ("[-1]", "[-2, -3]", '["x"]', "[1e300]", "[99999999999999]", "null", "[[]]", "{}")
    heads = [b'{"token": "s", "worker": 0, "arrays": [["a", "<f4", %s]]}' % one.encode() for one in shapes]
    large = b'{"token": "s", "worker": 0, "arrays": [["a", "V2000000000", %s]]}'
    heads += [large % shape for shape in (b'["x"]', b"[[1]]", b"[true]", b"[2.0]")]
    heads += [
        b'{"token": "s", "worker": 0, "arrays": [["a", "%s", [1]]]}' % one
        for one in (b"O", b"V9999999999", b"<f4,", b"M8[")
    ]
    heads += [json.dumps({**head, "arrays": [], "worker": one}).encode() for one in ("a", None, [], 1.5)]
    heads += [bytes(rng.choice((byte, rng.randrange(256))) for byte in good) for _ in range(300)]
    with servers(1, mode="ps_async") as (_, addresses):
        client = PsClient(addresses, 0, token="s")
        for text in (*odd, *heads):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                ours.sendall(struct.pack("<IQ", len(text), 24) + text + bytes(24))
                with contextlib.suppress(BadInput):
                    server.receive(theirs)
            with socket.create_connection(place(addresses), timeout=5) as line:
                line.sendall(struct.pack("<IQ", len(text), 0) + text)
                with contextlib.suppress(OSError):  # of more than a hello may have, the rest is not read
                    line.shutdown(socket.SHUT_WR)
                    assert line.recv(1) == b"", "the server hangs up"
        assert client.wait_turn() == 0, "and serves its workers"
    assert capfd.readouterr().err == "", "no thread ended with a traceback"


def test_strangers_take_a_limited_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STRANGERS_MAX", 3)
    monkeypatch.setattr(server, "HELLO_S", 1.0)
    with servers(1, mode="ps_async") as (_, addresses), contextlib.ExitStack() as opened:
        lines = [opened.enter_context(socket.create_connection(place(addresses), timeout=5)) for _ in range(4)]
        assert lines[3].recv(1) == b"", "the fourth is closed at once"
        lines[0].close()
        assert PsClient(addresses, 0, token="s").wait_turn() == 0
        lines[1].sendall(struct.pack("<IQ", 4000, 0))
        with pytest.raises(OSError):
            for _ in range(100):  # a byte now and then does not prolong the time that a hello has
                lines[1].sendall(b"x")
                time.sleep(0.1)


def test_a_thread_that_cannot_be_started_costs_no_place(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_thread(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(server, "STRANGERS_MAX", 2)
    with servers(1, mode="ps_async") as (_, addresses):
        with monkeypatch.context() as patch:
            patch.setattr(socketserver.ThreadingMixIn, "process_request", no_thread)
            for _ in range(4):
                with socket.create_connection(place(addresses), timeout=5) as line:
                    assert line.recv(1) == b""
        assert PsClient(addresses, 0, token="s").wait_turn() == 0
    assert "can't start new thread" in capfd.readouterr().err


def test_a_head_cannot_make_the_server_take_memory() -> None:
    ours, theirs = socket.socketpair()
    text = json.dumps({"arrays": [["a", "V2000000000", ["x"]]]}).encode()
    with ours, theirs, pytest.raises(BadInput, match="not whole numbers from 0"):
        ours.sendall(struct.pack("<IQ", len(text), 0) + text)
        server.receive(theirs)


def test_it_listens_on_addresses_of_ipv6() -> None:
    made = PsServer(ServerSpec(rule=Rule(mode="ps_async"), token="s"))
    try:
        address = made.serve("::1")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    assert address.startswith("[::1]:") and PsClient([address], 0, token="s").wait_turn() == 0
    made.close()


def test_without_a_token_it_listens_on_loopback_alone() -> None:
    with pytest.raises(BadInput, match="the spec has no token"):
        PsServer(ServerSpec(rule=Rule(mode="ps_async"))).serve("0.0.0.0")


def test_a_server_that_ends_waits_for_the_workers_to_hang_up() -> None:
    with servers(1, mode="ps_async") as (made, addresses):
        client = PsClient(addresses, 0, token="s")
        ending = threading.Thread(target=lambda: made[0].close(wait_s=20))
        ending.start()
        ending.join(0.1)
        assert ending.is_alive() and client.wait_turn() == 0
        client.close(leave=False)
        ending.join(5)
        assert not ending.is_alive()


def test_errors_come_back_as_they_were_raised() -> None:
    spec = ServerSpec(rule=Rule(mode="ps_async"), tables=(TableSpec(name="t", dim=2, bytes_max=64),), token="s")
    server = PsServer(spec)
    address = server.serve()
    try:
        client = PsClient([address], 0, token="s")
        with pytest.raises(BadInput, match="table 'u': unknown"):
            client.pull("u", np.arange(2))
        with pytest.raises(TableFull, match="bytes_max is 64"):
            client.pull("t", np.arange(9))
        with pytest.raises(BadInput, match="no worker has offered"):
            client.wait_turn(dense=True)
        with pytest.raises(ServerLost):
            PsClient([address], 1, token="wrong", retry_s=0.1)
    finally:
        server.close()
