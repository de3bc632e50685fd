"""Calls between processes: over a Unix socket on one machine, over TCP between machines, in frames of pickle.

A ``CallServer`` listens under a name of the abstract namespace, which belongs to the machine (its network namespace)
and forgets a name with its process: nothing is looked up and no file is left. There each side asks the kernel for the
user of the other one and talks to its own user alone. For callers on other machines it listens at the address of its
node; there both sides prove that they know the key of the job (``handshake``), for the very name that is called.
Nothing is unpickled before either. One connection carries all calls of a process and event loop to a server. Linux.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from rota.runtime import process
from rota.runtime.frames import (
    CALL,
    CANCEL,
    NOTHING,
    RESULT,
    UNSENDABLE,
    FrameLink,
    FrameParts,
    Pickle,
    Room,
    encode,
    pack,
    unpack,
    unwatched,
    watched,
)
from rota.runtime.handshake import AttemptGuard, HandshakeRefused, client_handshake, server_handshake
from rota.runtime.launcher import NotPicklable
from rota.runtime.process import ProcessId
from rota.spec.user_code import UserCode

INFLIGHT_MAX: Final = 1024
"""Calls of one connection that run at once; the next wait until one of them has ended."""
INFLIGHT_BYTES_MAX: Final = 1 << 30
"""Bytes of their arguments; a call with more than that runs alone."""
BACKLOG: Final = 1024
HANDSHAKES_MAX: Final = 64
"""Connections from other machines that have not finished the handshake yet."""
SILENT_S: Final = 90.0
"""A connection between machines over which nothing comes through for this long is broken: longer than the time after
which an instance without an answer of its master ends itself."""
_KEEPALIVE_S: Final = 15
_CREDENTIALS: Final = struct.Struct("3i")
"""As the kernel fills it (unix(7)): process, user and group of the other side, who cannot choose them."""
_REFUSED_S: Final = 1.0
_CONNECT_S, _CONNECT_POLL_S = 10.0, 0.005
_ACCEPT_PAUSE_S: Final = 0.1
_EXIT_S, _EXIT_POLL_S = 2.0, 0.005
"""A process whose sockets are closed has ended, but for what the kernel has yet to do."""
_log = logging.getLogger("rota.runtime")


class ConnectionLost(Exception):
    """The connection of a call broke, or there was none; ``gone``: the process at its other end has ended.

    ``unsure``: the process may live and the call may have reached it; its master knows more.
    """

    def __init__(self, message: str, *, gone: bool, unsure: bool = False) -> None:
        super().__init__(message)
        self.gone, self.unsure = gone, unsure


def unix_address(name: str) -> str:
    """The abstract address of a server, of at most 107 bytes whatever the name."""
    return f"\0rota-{hashlib.sha256(name.encode()).hexdigest()[:48]}"


def _credentials(link: socket.socket) -> tuple[int, int]:
    """Pid and user of the other end, as the kernel has them."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _purpose(name: str) -> str:
    """What a handshake is for: a proof for one server is worth nothing at another."""
    return f"calls to {name}"


def _tcp_socket(host: str) -> socket.socket:
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    link = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    _set_options(link)
    return link


def _set_options(link: socket.socket) -> None:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_S))


Forward = Callable[[Any], Awaitable[object]]


class CallServer:
    """Answers calls under a name, in the event loop in which it was opened.

    ``forward`` gets what was called and returns the answer; it must not raise, and is cancelled when its caller waits
    no more. ``fallback`` pickles answers that the standard library refuses.
    """

    def __init__(self, forward: Forward, fallback: Pickle | None = None) -> None:
        self._forward, self._fallback = forward, fallback
        self._listening = list[socket.socket]()
        self._tasks = set[asyncio.Task[None]]()

    def open(self, name: str) -> None:
        """Listen to processes of this machine. Raises OSError when another process has the name."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listen(listening, unix_address(name))
        self._own(self._accept_local(listening))

    def open_tcp(self, name: str, host: str, key: bytes) -> str:
        """Listen to other machines at an address of this one; ``host:port``. Raises OSError."""
        listening = _tcp_socket(host)
        self._listen(listening, (host, 0))
        self._own(self._accept_remote(listening, key, _purpose(name)))
        return f"{host}:{listening.getsockname()[1]}"

    def serve(self, link: socket.socket) -> None:
        """Answer the calls of one connected non-blocking socket, whose other end is known."""
        _Serving(link, self._forward, self._fallback)

    def close(self) -> None:
        """Take no more connections."""
        for task in self._tasks:
            task.cancel()
        while self._listening:
            unwatched(self._listening.pop()).close()

    def _listen(self, listening: socket.socket, address: Any) -> None:
        try:
            listening.bind(address)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
        self._listening.append(watched(listening))

    def _own(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_local(self, listening: socket.socket) -> None:
        while True:
            link, _ = await _accepted(listening)
            if (who := _credentials(link)[1]) != os.geteuid():
                _log.warning("a connection was closed: it is of user %d", who)
                link.close()
            else:
                self.serve(link)

    async def _accept_remote(self, listening: socket.socket, key: bytes, purpose: str) -> None:
        guard, rooms = AttemptGuard(), asyncio.Semaphore(HANDSHAKES_MAX)
        while True:
            await rooms.acquire()
            link, address = await _accepted(listening)
            if guard.closed(address):
                link.close()
                rooms.release()
            else:
                self._own(self._admit(link, address, key, purpose, guard, rooms))

    async def _admit(
        self, link: socket.socket, address: str, key: bytes, purpose: str, guard: AttemptGuard, rooms: asyncio.Semaphore
    ) -> None:
        known = guard.suspects(address)
        try:
            _set_options(link)
            peer = await server_handshake(link, key, purpose, guard)
        except OSError as error:
            if not known:
                _log.warning("a connection from %s was refused: %s", address, error)
            link.close()
        except asyncio.CancelledError:
            link.close()
            raise
        else:
            if difference := peer.difference():
                _log.warning("a process at %s has other versions: %s", address, difference)
            self.serve(link)
        finally:
            rooms.release()


async def _accepted(listening: socket.socket) -> tuple[socket.socket, str]:
    """The next connection, and from which host; an error of one, or too many open files, ends nothing."""
    while True:
        try:
            link, address = await asyncio.get_running_loop().sock_accept(listening)
            return link, str(address[0]) if isinstance(address, tuple) else ""
        except OSError as error:
            if listening.fileno() < 0:
                raise asyncio.CancelledError from None
            _log.warning("a connection could not be taken: %s", error)
            await asyncio.sleep(_ACCEPT_PAUSE_S)


class _Serving(FrameLink):
    """The server's end of one connection."""

    def __init__(self, link: socket.socket, forward: Forward, fallback: Pickle | None) -> None:
        super().__init__(link)
        self._forward, self._fallback = forward, fallback
        self._running = dict[int, asyncio.Task[None]]()
        self._in_flight = Room(INFLIGHT_MAX, INFLIGHT_BYTES_MAX)

    def arrived(self, frame: memoryview, call: int, kind: int, count: int) -> None:
        if kind == CANCEL:
            if (task := self._running.get(call)) is not None:
                task.cancel()
            return
        if kind != CALL or call in self._running:
            self.close(f"a frame of kind {kind} for call {call}" if kind != CALL else f"call {call} came twice")
            return
        size = len(frame)
        self._in_flight.enter(size)
        task = self._running[call] = asyncio.get_running_loop().create_task(self._answer(frame, call, count))
        task.add_done_callback(lambda _: self._ended(call, size))
        if self._in_flight.full:
            self.pause()

    def _ended(self, call: int, size: int) -> None:
        del self._running[call]
        self._in_flight.leave(size)
        if not self._in_flight.full:
            self.resume()

    async def _answer(self, frame: memoryview, call: int, count: int) -> None:
        asked: object = None
        with UserCode() as unpickling:
            asked = unpack(frame, count)
        if unpickling.failed:
            text = first_line(unpickling.take())
            _log.warning("a call could not be read: %s", text)
            kind, parts = UNSENDABLE, pack((False, text))
        else:
            del frame
            kind, parts = self._packed(await self._forward(asked))
        with contextlib.suppress(ConnectionResetError):  # no caller waits for it any more
            await self.send(call, kind, parts)

    def _packed(self, answer: object) -> tuple[int, FrameParts]:
        with UserCode() as pickling:
            return RESULT, pack(answer, self._fallback)
        return UNSENDABLE, pack((True, first_line(pickling.take())))


class CallClient:
    """Connections of one process to servers, one for each server and event loop; safe in threads."""

    def __init__(self, fallback: Pickle | None = None) -> None:
        self._fallback = fallback
        self._connections = dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Future[Connection | None]]()
        self._absent = dict[str, float]()

    def ready(self, name: str) -> Connection | None:
        """The connection of the running event loop to that server, if there is one."""
        known = self._connections.get((asyncio.get_running_loop(), name))
        if known is None or not known.done() or known.cancelled() or known.exception():
            return None
        found = known.result()
        return found if found is not None and found.is_open else None

    async def find(self, name: str, address: str = "", key: bytes = b"") -> Connection | None:
        """The connection to the server of that name: on this machine, or at the ``address`` of another one.

        None if this machine has none. Raises ConnectionLost when the other machine lets none be made.
        """
        slot = asyncio.get_running_loop(), name
        if (found := self.ready(name)) is not None:
            return found
        known = self._connections.get(slot)
        if known is None or known.done():
            if not address and self._absent.get(name, 0.0) > time.monotonic():
                return None
            making = self._dial(name, address, key) if address else self._connect(name)
            known = self._connections[slot] = asyncio.ensure_future(making)
        try:
            connection = await asyncio.shield(known)
        except ConnectionLost:
            self._forget(slot, known)
            raise
        except asyncio.CancelledError:
            if known.cancelled():  # by hang_up, not the caller
                raise ConnectionLost("it was given up while it was made", gone=False, unsure=True) from None
            raise
        if connection is None:
            self._forget(slot, known)
            self._absent[name] = time.monotonic() + _REFUSED_S
        return connection

    def _forget(self, slot: tuple[asyncio.AbstractEventLoop, str], known: asyncio.Future[Connection | None]) -> None:
        if self._connections.get(slot) is known:
            del self._connections[slot]

    def hang_up(self, name: str) -> None:
        """Close the connections to a server: the calls on them end with ConnectionLost. From any thread."""
        for slot in [slot for slot in tuple(self._connections) if slot[1] == name]:
            known = self._connections.pop(slot, None)
            if known is not None and not slot[0].is_closed():
                slot[0].call_soon_threadsafe(_close, known)

    def close(self) -> None:
        """Close the connections of the running event loop."""
        here = asyncio.get_running_loop()
        for slot in [slot for slot in self._connections if slot[0] is here]:
            _close(self._connections.pop(slot))

    async def _connect(self, name: str) -> Connection | None:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            await _reach(link, name)
            pid, uid = _credentials(link)
        except OSError:
            link.close()
            return None
        except asyncio.CancelledError:
            link.close()
            raise
        if uid != os.geteuid():
            link.close()
            _log.warning("the server of %s is of user %d: not called", name, uid)
            return None
        return Connection(link, process.identify(pid), self._fallback)

    async def _dial(self, name: str, address: str, key: bytes) -> Connection:
        """Raises ConnectionLost: refused by the kernel there, no process listens; by the handshake, another one."""
        host, _, port = address.rpartition(":")
        link = _tcp_socket(host)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.get_running_loop().sock_connect(link, (host, int(port)))
            peer = await client_handshake(link, key, _purpose(name))
        except HandshakeRefused as error:
            link.close()
            raise ConnectionLost(f"{address} does not let it in: {error}", gone=False, unsure=True) from None
        except ConnectionRefusedError:
            link.close()
            raise ConnectionLost(f"no process listens at {address}", gone=True) from None
        except (OSError, TimeoutError) as error:
            link.close()
            why = str(error) or f"no answer in {_CONNECT_S:g} s"
            raise ConnectionLost(f"{address} cannot be reached: {why}", gone=False, unsure=True) from None
        except asyncio.CancelledError:
            link.close()
            raise
        if difference := peer.difference():
            _log.warning("%s at %s has other versions: %s", name, address, difference)
        return Connection(link, None, self._fallback, remote=True)


def _close(known: asyncio.Future[Connection | None]) -> None:
    """Close a connection, or give up making it."""
    if not known.done():
        known.cancel()
    elif not known.cancelled() and not known.exception() and (connection := known.result()) is not None:
        connection.close()


async def _reach(link: socket.socket, name: str) -> None:
    """Connect; a server whose queue is full, as it is busy, is asked again for some seconds. Raises OSError."""
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            link.connect(unix_address(name))
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(_CONNECT_POLL_S)


class Connection(FrameLink):
    """The client's end of a connection to one server, over a connected non-blocking socket.

    ``server`` is its process, if that is on this machine; of a ``remote`` one the kernel knows nothing.
    """

    def __init__(
        self, link: socket.socket, server: ProcessId | None, fallback: Pickle | None = None, *, remote: bool = False
    ) -> None:
        super().__init__(link)
        self._server, self._fallback, self._remote = server, fallback, remote
        self._last = 0
        self._waiting = dict[int, asyncio.Future[object]]()
        self._in_flight = Room(INFLIGHT_MAX, INFLIGHT_BYTES_MAX)

    async def call(self, asked: object, timeout_s: float | None) -> object:
        """Send, and wait for the answer; when that ends early, the operation there is cancelled.

        Buffers of ``asked`` are sent from where they are: they must not be changed before the call has ended. Raises
        ConnectionLost, TimeoutError, NotPicklable.
        """
        parts = NOTHING
        with UserCode() as pickling:
            parts = pack(asked, self._fallback)
        if pickling.failed:
            raise NotPicklable(first_line(pickling.take()), answer=False)
        self._last += 1
        call, size, loop = self._last, parts.size, asyncio.get_running_loop()
        answer: asyncio.Future[object] = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, _time_out, answer)
        try:
            if not await self._in_flight.wait(size, answer):
                return await answer
            self._waiting[call] = answer
            try:
                await self.send(call, CALL, parts, answer)
                return await answer
            finally:
                del self._waiting[call]
                self._in_flight.leave(size)
        except ConnectionResetError:
            raise await self._loss() from None
        except (TimeoutError, asyncio.CancelledError):
            self.write(encode(call, CANCEL, NOTHING))
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def _loss(self) -> ConnectionLost:
        if self._remote:
            return ConnectionLost("the connection to its machine broke", gone=False, unsure=True)
        gone = await self._has_ended()
        return ConnectionLost("its process has ended" if gone else "the connection broke", gone=gone)

    async def _has_ended(self) -> bool:
        """Whether the process of the server is gone; one that is ending is waited for."""
        deadline = time.monotonic() + _EXIT_S
        while self._server is not None and process.is_alive(self._server):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_EXIT_POLL_S)
        return True

    def arrived(self, frame: memoryview, call: int, kind: int, count: int) -> None:
        answer = self._waiting.get(call)
        if answer is None or answer.done():
            return  # its caller waits no more
        found: Any = None
        with UserCode() as unpickling:
            found = unpack(frame, count)
        if unpickling.failed:
            answer.set_exception(NotPicklable(first_line(unpickling.take()), answer=True))
        elif kind == UNSENDABLE:
            of_answer, text = found
            answer.set_exception(NotPicklable(text, answer=of_answer))
        else:
            answer.set_result(found)

    def lost(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError())


def _time_out(answer: asyncio.Future[object]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
