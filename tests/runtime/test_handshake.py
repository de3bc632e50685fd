"""The handshake of a connection: both sides prove the key; who fails is refused before anything else is read."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import socket
import threading
from collections.abc import Awaitable, Callable

import pytest

from rota.runtime import handshake
from rota.runtime.handshake import AttemptGuard, HandshakeRefused, PeerIdentity

KEY, OTHER = b"k" * 32, b"o" * 32


def _both(
    client: Callable[[socket.socket], object], server: Callable[[socket.socket], object]
) -> tuple[object, object]:
    """What each side returned or raised."""
    found: list[object] = [None, None]

    def side(at: int, run: Callable[[socket.socket], object], link: socket.socket) -> None:
        try:
            found[at] = run(link)
        except HandshakeRefused as error:
            found[at] = error
        finally:
            link.close()

    pair = socket.socketpair()
    threads = [threading.Thread(target=side, args=(at, run, pair[at])) for at, run in enumerate((client, server))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return found[0], found[1]


def _client(key: bytes = KEY, purpose: str = "calls") -> Callable[[socket.socket], PeerIdentity]:
    return lambda link: handshake.client_handshake_blocking(link, key, purpose, timeout_s=2)


def _server(guard: AttemptGuard, key: bytes = KEY, purpose: str = "calls") -> Callable[[socket.socket], PeerIdentity]:
    return lambda link: handshake.server_handshake_blocking(link, key, purpose, guard, timeout_s=2)


def _send(data: bytes) -> Callable[[socket.socket], object]:
    """A stranger that waits for the challenge and answers with ``data``."""

    def side(link: socket.socket) -> None:
        link.recv(40)
        link.sendall(data)

    return side


def test_both_sides_learn_the_versions_of_the_other() -> None:
    client, server = _both(_client(), _server(AttemptGuard()))
    assert isinstance(client, PeerIdentity) and client == server
    assert client.purpose == "calls" and not client.difference()
    assert PeerIdentity("calls", "2.7.18", client.rota).difference().startswith("Python 2.7.18 there and 3.")


def test_the_asynchronous_sides_agree_with_the_blocking_ones() -> None:
    async def over(
        ours: Callable[[socket.socket], Awaitable[PeerIdentity]], theirs: Callable[[socket.socket], PeerIdentity]
    ) -> None:
        one, two = socket.socketpair()
        one.setblocking(False)
        with one, two:
            other = asyncio.create_task(asyncio.to_thread(theirs, two))
            assert await ours(one) == await other

    asyncio.run(over(lambda link: handshake.client_handshake(link, KEY, "calls"), _server(AttemptGuard())))
    asyncio.run(over(lambda link: handshake.server_handshake(link, KEY, "calls", AttemptGuard()), _client()))


@pytest.mark.parametrize(
    ("client", "said"),
    [
        (_client(OTHER), "another key"),
        (_client(purpose="files"), "asked for 'files'"),
        (_send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 9), "not a Rota connection"),
        (_send(b"ROTA\0\0\0\7" + bytes(200)), "protocol 7 there and 1 here"),
        (_send(handshake._MAGIC + bytes(32) + b"\xff\xff" + bytes(600)), "identity of 65535 bytes"),
        (_send(b""), "closed the connection"),
    ],
)
def test_a_stranger_is_refused_by_name(client: Callable[[socket.socket], object], said: str) -> None:
    _, server = _both(client, _server(AttemptGuard()))
    assert isinstance(server, HandshakeRefused) and said in str(server)


def test_a_client_does_not_believe_a_server_without_the_key() -> None:
    def impostor(link: socket.socket) -> None:
        link.sendall(handshake._MAGIC + bytes(32))
        answer = handshake._encoded(handshake._identity("calls"))
        link.sendall(handshake._ADMITTED + answer + hashlib.sha256(b"guess").digest())
        link.recv(4096)

    client, _ = _both(_client(), impostor)
    assert isinstance(client, HandshakeRefused) and "another key" in str(client)


def test_an_answer_cannot_be_replayed() -> None:
    """What a client sent once opens no second connection: the challenge of the listener is another one."""
    sent: list[bytes] = []

    def overheard(link: socket.socket) -> PeerIdentity:
        class Recorded(socket.socket):
            def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
                sent.append(bytes(data))
                super().sendall(data, flags)

        with Recorded(fileno=link.detach()) as recorded:
            return handshake.client_handshake_blocking(recorded, KEY, "calls")

    client, _ = _both(overheard, _server(AttemptGuard()))
    assert isinstance(client, PeerIdentity)
    _, server = _both(_send(b"".join(sent)), _server(AttemptGuard()))
    assert isinstance(server, HandshakeRefused) and "another key" in str(server)


def test_a_silent_peer_is_refused_in_time() -> None:
    one, two = socket.socketpair()
    with one, two, pytest.raises(HandshakeRefused, match=r"no handshake within 0\.05 s"):
        handshake.server_handshake_blocking(one, KEY, "calls", AttemptGuard(), timeout_s=0.05)


def test_a_stale_process_that_redials_locks_out_nobody_on_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_address", lambda link: "10.0.0.9")
    guard = AttemptGuard()
    for _ in range(3 * handshake.FAILURES_MAX):
        _, server = _both(_client(OTHER), _server(guard))
        assert isinstance(server, HandshakeRefused)
    assert guard.suspects("10.0.0.9") and not guard.suspects("10.0.0.8")
    client, server = _both(_client(), _server(guard))
    assert isinstance(client, PeerIdentity) and client == server


def test_handshakes_of_a_suspect_address_are_short_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(handshake.time, "monotonic", lambda: now_s[0])
    guard = AttemptGuard()
    for _ in range(handshake.FAILURES_MAX):
        assert guard.limit_s("10.0.0.9", 5.0) == 5.0
        guard.failed("10.0.0.9")
    assert guard.limit_s("10.0.0.9", 5.0) == handshake.SUSPECT_HANDSHAKE_S and guard.limit_s("10.0.0.8", 5.0) == 5.0
    with contextlib.ExitStack() as running:
        for _ in range(handshake.SUSPECT_HANDSHAKES_MAX):
            running.enter_context(guard.handshake("10.0.0.9"))
        assert guard.closed("10.0.0.9") and not guard.closed("10.0.0.8")
        with pytest.raises(HandshakeRefused, match="of its handshakes run already"), guard.handshake("10.0.0.9"):
            pass
    assert not guard.closed("10.0.0.9") and not guard._handshakes
    now_s[0] += handshake.SUSPECT_S
    assert not guard.suspects("10.0.0.9")
    guard.failed("10.0.0.9")
    assert not guard.suspects("10.0.0.9"), "a new count begins"
    for at in range(handshake.ADDRESSES_MAX + 10):
        guard.failed(f"10.1.{at // 256}.{at % 256}")
    assert len(guard._failures) <= handshake.ADDRESSES_MAX


def test_random_bytes_never_open_a_listener() -> None:
    rng = random.Random(7)
    for _ in range(200):
        noise = rng.choice([b"", handshake._MAGIC, handshake._MAGIC + bytes(32)]) + rng.randbytes(rng.randrange(300))

        def stranger(link: socket.socket, noise: bytes = noise) -> None:
            link.sendall(noise)

        _, server = _both(stranger, _server(AttemptGuard()))
        assert isinstance(server, HandshakeRefused)


def test_a_short_key_is_refused() -> None:
    one, two = socket.socketpair()
    with one, two, pytest.raises(ValueError, match="a key of 3 bytes"):
        handshake.client_handshake_blocking(one, b"abc", "calls")
