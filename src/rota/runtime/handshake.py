"""Mutual authentication of two processes at the start of a connection, before any other byte is read.

Both sides prove that they know a key without sending it (challenge and response with HMAC-SHA256, RFC 2104; each
answer covers both challenges, the purpose and the identity, so that it can be neither replayed nor used for another
listener). ``client_handshake`` is the side that connects, ``server_handshake`` the side that listens; both work on a
connected socket, with ``await`` on a non-blocking one or blocking with ``_blocking``. Nothing is unpickled and at most
1 KiB is read. A ``AttemptGuard`` limits what an address may use after repeated failures; a right proof always passes.

What follows on the connection is neither encrypted nor authenticated frame by frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import platform
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from typing import Final, TypeAlias

from rota import __version__

PROTOCOL: Final = 1
KEY_BYTES_MIN: Final = 16
KEY_BYTES: Final = 32
"""Of a key that Rota draws."""
HANDSHAKE_S: Final = 5.0
"""A peer that has not finished its handshake by then is refused."""
FAILURES_MAX: Final = 3
"""After this many failures an address is suspect: a machine with a stale process, or a stranger."""
SUSPECT_S: Final = 30.0
"""An address is suspect until it has not failed for this long."""
SUSPECT_HANDSHAKE_S: Final = 1.0
"""Time for the handshake of a suspect address."""
SUSPECT_HANDSHAKES_MAX: Final = 32
"""Handshakes of one suspect address at once; a further connection is closed."""
ADDRESSES_MAX: Final = 1024
IDENTITY_BYTES_MAX: Final = 512
_MAGIC: Final = b"ROTA" + struct.pack(">I", PROTOCOL)
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_LENGTH: Final = struct.Struct(">H")
_ADMITTED: Final = b"\x01"

_Steps: TypeAlias = "Generator[bytes | int, bytes, PeerIdentity]"
"""Yields what to send, or how many bytes to receive."""


class HandshakeRefused(ConnectionError):
    """The handshake failed: another key, another protocol, another purpose, or silence."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Identity that the other side sent; its ``purpose`` is the same as ours."""

    purpose: str
    python: str
    rota: str

    def difference(self) -> str:
        """Differences from the versions of this process; empty when there are none."""
        mine = _identity(self.purpose)
        pairs = (("Python", mine.python, self.python), ("Rota", mine.rota, self.rota))
        return ", ".join(f"{name} {theirs} there and {ours} here" for name, ours, theirs in pairs if ours != theirs)


@dataclass(slots=True)
class AttemptGuard:
    """Failures and running handshakes by address, for the threads of a listener.

    An address that failed is never refused as a whole: other processes of that machine have the right key. What it
    may use of the listener is limited until it has not failed for ``SUSPECT_S`` seconds.
    """

    _failures: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    _handshakes: Counter[str] = field(default_factory=Counter[str])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def suspects(self, address: str) -> bool:
        """Whether an address failed ``FAILURES_MAX`` times; its further failures need no line in a log."""
        count, until_s = self._failures.get(address, (0, 0.0))
        return count >= FAILURES_MAX and time.monotonic() < until_s

    def closed(self, address: str) -> bool:
        """Whether a connection from this address is to be closed at once: too many handshakes of a suspect one run."""
        return self.suspects(address) and self._handshakes[address] >= SUSPECT_HANDSHAKES_MAX

    def failed(self, address: str) -> None:
        """Count a failure. Of more than ``ADDRESSES_MAX`` addresses the oldest is forgotten."""
        with self._lock:
            now_s = time.monotonic()
            count, until_s = self._failures.pop(address, (0, 0.0))
            self._failures[address] = (count + 1 if now_s < until_s else 1, now_s + SUSPECT_S)
            if len(self._failures) > ADDRESSES_MAX:
                self._failures.pop(next(iter(self._failures)))

    @contextlib.contextmanager
    def handshake(self, address: str) -> Generator[None]:
        """Count a handshake of an address while it runs, and its failure. Raises HandshakeRefused when it is closed."""
        if self.closed(address):
            raise HandshakeRefused(
                f"{address} failed {FAILURES_MAX} times, and {SUSPECT_HANDSHAKES_MAX} of its handshakes run already"
            )
        with self._lock:
            self._handshakes[address] += 1
        try:
            yield
        except HandshakeRefused:
            self.failed(address)
            raise
        finally:
            with self._lock:
                self._handshakes[address] -= 1
                if not self._handshakes[address]:
                    del self._handshakes[address]

    def limit_s(self, address: str, timeout_s: float) -> float:
        """Time for a handshake of this address."""
        return min(timeout_s, SUSPECT_HANDSHAKE_S) if self.suspects(address) else timeout_s


async def client_handshake(
    link: socket.socket, key: bytes, purpose: str, *, timeout_s: float = HANDSHAKE_S
) -> PeerIdentity:
    """Authenticate over a connected non-blocking socket as the side that connected. Raises HandshakeRefused."""
    return await _run(link, _client_steps(key, purpose), timeout_s)


async def server_handshake(
    link: socket.socket, key: bytes, purpose: str, guard: AttemptGuard, *, timeout_s: float = HANDSHAKE_S
) -> PeerIdentity:
    """Authenticate over an accepted non-blocking socket. Raises HandshakeRefused."""
    address = _address(link)
    with guard.handshake(address):
        return await _run(link, _server_steps(key, purpose), guard.limit_s(address, timeout_s))


def client_handshake_blocking(
    link: socket.socket, key: bytes, purpose: str, *, timeout_s: float = HANDSHAKE_S
) -> PeerIdentity:
    """``client_handshake`` over a blocking socket; its time limit is as before when it returns."""
    return _run_blocking(link, _client_steps(key, purpose), timeout_s)


def server_handshake_blocking(
    link: socket.socket, key: bytes, purpose: str, guard: AttemptGuard, *, timeout_s: float = HANDSHAKE_S
) -> PeerIdentity:
    """``server_handshake`` over a blocking socket; its time limit is as before when it returns."""
    address = _address(link)
    with guard.handshake(address):
        return _run_blocking(link, _server_steps(key, purpose), guard.limit_s(address, timeout_s))


def _client_steps(key: bytes, purpose: str) -> _Steps:
    """Client: challenge in; challenge, identity and proof out; proof and identity in."""
    _check_key(key)
    _check_magic((yield len(_MAGIC)))
    theirs = yield _NONCE_BYTES
    ours, identity = secrets.token_bytes(_NONCE_BYTES), _encoded(_identity(purpose))
    yield _MAGIC + ours + identity + _proof(key, b"client", theirs, ours, identity)
    if (yield 1) != _ADMITTED:
        raise HandshakeRefused(f"the {purpose} listener refused this process: another key or purpose")
    answer = yield from _receive_identity()
    _check_proof((yield _MAC_BYTES), _proof(key, b"server", ours, theirs, answer))
    return _decoded(answer, purpose)


def _server_steps(key: bytes, purpose: str) -> _Steps:
    """Server: challenge out; challenge, identity and proof in; proof and identity out."""
    _check_key(key)
    ours = secrets.token_bytes(_NONCE_BYTES)
    yield _MAGIC + ours
    _check_magic((yield len(_MAGIC)))
    theirs = yield _NONCE_BYTES
    identity = yield from _receive_identity()
    _check_proof((yield _MAC_BYTES), _proof(key, b"client", ours, theirs, identity))
    peer = _decoded(identity, purpose)
    answer = _encoded(_identity(purpose))
    yield _ADMITTED + answer + _proof(key, b"server", theirs, ours, answer)
    return peer


def _receive_identity() -> Generator[int, bytes, bytes]:
    prefix = yield _LENGTH.size
    (length,) = _LENGTH.unpack(prefix)
    if not 0 < length <= IDENTITY_BYTES_MAX:
        raise HandshakeRefused(f"identity of {length} bytes; from 1 to {IDENTITY_BYTES_MAX} were expected")
    return prefix + (yield length)


def _check_magic(found: bytes) -> None:
    if found[:4] != _MAGIC[:4]:
        raise HandshakeRefused(f"not a Rota connection: it began with {found!r}")
    if found != _MAGIC:
        (version,) = struct.unpack(">I", found[4:])
        raise HandshakeRefused(
            f"protocol {version} there and {PROTOCOL} here: install the same version of Rota on both"
        )


def _check_key(key: bytes) -> None:
    if len(key) < KEY_BYTES_MIN:
        raise ValueError(f"a key of {len(key)} bytes; at least {KEY_BYTES_MIN} are needed")


def _check_proof(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise HandshakeRefused("the other side has another key")


def _proof(key: bytes, side: bytes, challenge: bytes, own: bytes, identity: bytes) -> bytes:
    return hmac.digest(key, side + challenge + own + identity, "sha256")


def _identity(purpose: str) -> PeerIdentity:
    return PeerIdentity(purpose=purpose, python=platform.python_version(), rota=__version__)


def _encoded(peer: PeerIdentity) -> bytes:
    text = json.dumps(asdict(peer)).encode()
    return _LENGTH.pack(len(text)) + text


def _decoded(identity: bytes, purpose: str) -> PeerIdentity:
    """Only called for what a proof covers."""
    try:
        found = PeerIdentity(**{name: str(value) for name, value in json.loads(identity[_LENGTH.size :]).items()})
    except (ValueError, TypeError, AttributeError):
        raise HandshakeRefused("an identity that cannot be read") from None
    if found.purpose != purpose:
        raise HandshakeRefused(f"it asked for {found.purpose!r}; this is {purpose!r}")
    return found


def _address(link: socket.socket) -> str:
    """Of the peer; empty for a Unix socket."""
    name = link.getpeername() if link.family in {socket.AF_INET, socket.AF_INET6} else ""
    return str(name[0]) if isinstance(name, tuple) else ""


async def _run(link: socket.socket, steps: _Steps, timeout_s: float) -> PeerIdentity:
    loop = asyncio.get_running_loop()
    received: bytes | None = None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                step = next(steps) if received is None else steps.send(received)
                received = b""
                if isinstance(step, bytes):
                    await loop.sock_sendall(link, step)
                    continue
                while len(received) < step:
                    received += _some(await loop.sock_recv(link, step - len(received)))
    except StopIteration as end:
        peer: PeerIdentity = end.value
        return peer
    except (OSError, TimeoutError) as error:
        raise _refusal(error, timeout_s) from error


def _run_blocking(link: socket.socket, steps: _Steps, timeout_s: float) -> PeerIdentity:
    before_s, end_s = link.gettimeout(), time.monotonic() + timeout_s
    received: bytes | None = None
    try:
        while True:
            step = next(steps) if received is None else steps.send(received)
            received = b""
            link.settimeout(max(0.001, end_s - time.monotonic()))
            if isinstance(step, bytes):
                link.sendall(step)
                continue
            while len(received) < step:
                link.settimeout(max(0.001, end_s - time.monotonic()))
                received += _some(link.recv(step - len(received)))
    except StopIteration as end:
        peer: PeerIdentity = end.value
        return peer
    except (OSError, TimeoutError) as error:
        raise _refusal(error, timeout_s) from error
    finally:
        link.settimeout(before_s)


def _some(data: bytes) -> bytes:
    if not data:
        raise HandshakeRefused(
            "the other side closed the connection during the handshake: another key, or its process ended"
        )
    return data


def _refusal(error: OSError | TimeoutError, timeout_s: float) -> HandshakeRefused:
    if isinstance(error, HandshakeRefused):
        return error
    said = f"no handshake within {timeout_s:g} s" if isinstance(error, TimeoutError) else f"{error}"
    return HandshakeRefused(said)
