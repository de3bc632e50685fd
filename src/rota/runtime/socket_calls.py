"""Calls between processes of one machine over Unix sockets, in frames of pickle with large buffers beside it.

A ``CallServer`` listens under a name of the abstract namespace, which belongs to the machine (its network namespace)
and forgets a name with its process: nothing is looked up and no file is left. Each side asks the kernel for the user of
the other one and talks to its own user alone, before it unpickles anything. A frame is a header, the lengths of its
parts, and the parts: buffers of 64 KiB and more, at addresses that are multiples of 16, and the pickle last. Linux;
elsewhere ``CallClient.find`` finds no server.
"""

from __future__ import annotations

import asyncio
import contextlib
import copyreg
import hashlib
import io
import logging
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from rota.runtime import process
from rota.runtime.process import ProcessId

FRAME_BYTES_MAX: Final = 1 << 32
"""A frame above this ends its connection."""
BUFFER_BYTES_MIN: Final = 65_536
"""A buffer of at least this size travels beside the pickle, without a copy into it."""
INFLIGHT_MAX: Final = 1024
"""Calls of one connection that run at once; the next are read when one of them has ended."""
BACKLOG: Final = 1024
_READ_BYTES: Final = 65_536
_HEADER: Final = struct.Struct("<QQII")  # bytes after the header, call, kind, number of parts
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_ALIGNED: Final = 16
_CALL, _RESULT, _UNSENDABLE = range(3)
_REFUSED_S: Final = 1.0
_CONNECT_S, _CONNECT_POLL_S = 10.0, 0.005
_EXIT_S, _EXIT_POLL_S = 2.0, 0.005
"""A process whose sockets are closed has ended, but for what the kernel has yet to do."""
_descriptors = set[int]()
"""Of listening sockets and connections of this process."""
_log = logging.getLogger("rota.runtime")


class ConnectionLost(Exception):
    """The connection of a call broke; ``gone`` says whether the process at its other end has ended."""

    def __init__(self, message: str, *, gone: bool) -> None:
        super().__init__(message)
        self.gone = gone


class Unsendable(Exception):
    """Arguments of a call, or its ``answer``, cannot be pickled; the message is what pickle said of it."""

    def __init__(self, message: str, *, answer: bool) -> None:
        super().__init__(message)
        self.answer = answer


Pickle = Callable[[object], bytes]
"""Pickles what the standard library refuses."""


class Parts(NamedTuple):
    """A value on its way: its pickle and the large buffers that belong to it."""

    body: bytes
    buffers: list[memoryview]


def pack(value: object, fallback: Pickle | None = None) -> Parts:
    """A value as parts; ``fallback`` pickles what the standard library refuses. Raises what pickling raises."""
    buffers = list[memoryview]()

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < BUFFER_BYTES_MIN:
            return True
        buffers.append(raw)
        return False

    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=5, buffer_callback=keep)
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "Tensor"):
        pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduced_tensor}
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        if fallback is None:
            raise
        return Parts(fallback(value), [])
    return Parts(out.getvalue(), buffers)


def _reduced_tensor(tensor: Any) -> Any:
    """A plain tensor in the memory of the host as the array below it; any other as torch does it."""
    torch = sys.modules["torch"]
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad
    if plain and not tensor.is_conj() and not tensor.is_neg() and tensor.dtype is not torch.bfloat16 and tensor.numel():
        return torch.from_numpy, (tensor.numpy(),)
    return tensor.__reduce_ex__(5)


def unpack(frame: memoryview, count: int) -> Any:
    """The value of a frame with ``count`` parts. Raises what unpickling raises."""
    lengths = struct.unpack_from(f"<{count}Q", frame)
    at, found = _padded(8 * count), list[memoryview]()
    for length in lengths:
        found.append(frame[at : at + length])
        at = _padded(at + length)
    return pickle.loads(found[-1], buffers=found[:-1])  # noqa: S301 - of a process of the same user, see _peer


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _address(name: str) -> str:
    """The abstract address of a server, of at most 107 bytes whatever the name."""
    return f"\0rota-{hashlib.sha256(name.encode()).hexdigest()[:48]}"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Pid and user of the other end, as the kernel has them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


class _Framed(asyncio.BufferedProtocol):
    """Frames in and out of one connection. It belongs to one event loop."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._read = bytearray(_READ_BYTES)
        self._start = self._end = 0
        self._large: tuple[bytearray, int, int, int] | None = None
        self._filled = 0
        self._descriptor = -1
        self._paused = False
        self._writable = asyncio.Event()
        self._writable.set()

    def arrived(self, frame: memoryview, call: int, kind: int, count: int) -> None:
        """A whole frame is here."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._descriptor = transport.get_extra_info("socket").fileno()
        _descriptors.add(self._descriptor)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        _descriptors.discard(self._descriptor)
        self._writable.set()

    async def send(self, call: int, kind: int, parts: Parts) -> None:
        """Write a frame, once the other side keeps up. Raises ConnectionResetError when the connection is gone."""
        await self._writable.wait()
        if self.transport is None:
            raise ConnectionResetError
        pieces = [*parts.buffers, parts.body]
        table = struct.pack(f"<{len(pieces)}Q", *(len(piece) for piece in pieces))
        total = sum(map(_padded, map(len, pieces[:-1])), _padded(len(table))) + len(parts.body)
        head = _HEADER.pack(total, call, kind, len(pieces)) + table.ljust(_padded(len(table)), b"\0")
        for buffer in parts.buffers:
            self.transport.write(head)
            self.transport.write(buffer)
            head = bytes(_padded(len(buffer)) - len(buffer))
        self.transport.write(head + parts.body)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return memoryview(self._large[0])[self._filled :]
        if self._start and self._end == len(self._read):
            rest = self._read[self._start : self._end]
            self._read[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return memoryview(self._read)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._large is not None:
            self._filled += nbytes
            whole, call, kind, count = self._large
            if self._filled == len(whole):
                self._large = None
                self.arrived(memoryview(whole), call, kind, count)
            return
        self._end += nbytes
        self._parse()

    def pause(self) -> None:
        """Take no more frames, of those that are read already either."""
        if self.transport is not None and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Take frames again."""
        if self.transport is not None and self._paused:
            self._paused = False
            self._parse()
            if not self._paused:
                self.transport.resume_reading()

    def _parse(self) -> None:
        while not self._paused and self._end - self._start >= _HEADER.size:
            total, call, kind, count = _HEADER.unpack_from(self._read, self._start)
            if total > FRAME_BYTES_MAX or not 1 <= count <= max(1, total // 8):
                self.close(f"a frame of {total} bytes and {count} parts")
                return
            first, last = self._start + _HEADER.size, self._start + _HEADER.size + total
            if last <= self._end:
                self._start = last
                self.arrived(memoryview(self._read[first:last]), call, kind, count)
            elif last - self._start > len(self._read):
                whole = bytearray(total)
                self._filled = self._end - first
                whole[: self._filled] = self._read[first : self._end]
                self._large, self._start, self._end = (whole, call, kind, count), 0, 0
                return
            else:
                break
        if self._start == self._end:
            self._start = self._end = 0

    def close(self, why: str = "") -> None:
        """End the connection; with a reason that is a fault of the other side, it is logged."""
        if why:
            _log.warning("a connection was closed: %s", why)
        if self.transport is not None:
            self.transport.abort()


Forward = Callable[[Any], Awaitable[object]]


class CallServer:
    """Answers calls under a name, in the event loop in which it was opened.

    ``forward`` gets what was called and returns the answer; it must not raise. ``fallback`` pickles answers that the
    standard library refuses.
    """

    def __init__(self, forward: Forward, fallback: Pickle | None = None) -> None:
        self._forward, self._fallback = forward, fallback
        self._server: asyncio.Server | None = None

    async def open(self, name: str) -> None:
        """Listen. Raises OSError when another process has the name."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listening.bind(_address(name))
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
        _descriptors.add(listening.fileno())
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _Serving(self._forward, self._fallback), sock=listening, backlog=BACKLOG
        )

    def close(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            _descriptors.difference_update(one.fileno() for one in self._server.sockets)
            self._server.close()


class _Serving(_Framed):
    """The server's end of one connection."""

    def __init__(self, forward: Forward, fallback: Pickle | None) -> None:
        super().__init__()
        self._forward, self._fallback = forward, fallback
        self._running = set[asyncio.Task[None]]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if (who := _peer(transport.get_extra_info("socket"))[1]) != os.geteuid():
            self.close(f"it is of user {who}")

    def arrived(self, frame: memoryview, call: int, kind: int, count: int) -> None:
        if kind != _CALL:
            self.close(f"a frame of kind {kind}")
            return
        task = asyncio.get_running_loop().create_task(self._answer(frame, call, count))
        self._running.add(task)
        task.add_done_callback(self._ended)
        if len(self._running) >= INFLIGHT_MAX:
            self.pause()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if len(self._running) < INFLIGHT_MAX:
            self.resume()

    async def _answer(self, frame: memoryview, call: int, count: int) -> None:
        try:
            asked = unpack(frame, count)
        except Exception as error:  # noqa: BLE001 - unpickling runs code of the job; the caller hears of it
            kind, parts = _UNSENDABLE, pack((False, first_line(error)))
        else:
            kind, parts = self._packed(await self._forward(asked))
        with contextlib.suppress(ConnectionResetError):  # no caller waits for it any more
            await self.send(call, kind, parts)

    def _packed(self, answer: object) -> tuple[int, Parts]:
        try:
            return _RESULT, pack(answer, self._fallback)
        except Exception as error:  # noqa: BLE001 - pickling runs code of the job; the caller hears of it
            return _UNSENDABLE, pack((True, first_line(error)))


class CallClient:
    """Connections of one process to servers on its machine, one for each server and event loop; safe in threads."""

    def __init__(self, fallback: Pickle | None = None) -> None:
        self._fallback = fallback
        self._connections = dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Future[Connection | None]]()
        self._absent = dict[str, float]()

    async def find(self, name: str) -> Connection | None:
        """The connection to the server of that name; None if this machine has none."""
        key = asyncio.get_running_loop(), name
        known = self._connections.get(key)
        if known is not None and known.done():
            connection = known.result()
            if connection is not None and connection.transport is not None:
                return connection
            known = None
        if known is None:
            if self._absent.get(name, 0.0) > time.monotonic():
                return None
            known = self._connections[key] = asyncio.ensure_future(self._connect(name))
        connection = await asyncio.shield(known)
        if connection is None:
            self._connections.pop(key, None)
            self._absent[name] = time.monotonic() + _REFUSED_S
        return connection

    def close(self) -> None:
        """Close the connections of the running event loop."""
        here = asyncio.get_running_loop()
        for loop, name in [key for key in self._connections if key[0] is here]:
            known = self._connections.pop((loop, name))
            connection = known.result() if known.done() and not known.cancelled() else None
            if connection is not None:
                connection.close()

    async def _connect(self, name: str) -> Connection | None:
        if sys.platform != "linux":
            return None
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            await _reach(link, name)
            pid, uid = _peer(link)
        except OSError:
            link.close()
            return None
        if uid != os.geteuid():
            link.close()
            _log.warning("the server of %s is of user %d: not called", name, uid)
            return None
        found = Connection(process.identify(pid), self._fallback)
        await asyncio.get_running_loop().create_unix_connection(lambda: found, sock=link)
        return found


async def _reach(link: socket.socket, name: str) -> None:
    """Connect; a server whose queue is full, as it is busy, is asked again for some seconds. Raises OSError."""
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            link.connect(_address(name))
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(_CONNECT_POLL_S)


class Connection(_Framed):
    """The client's end of a connection to one server."""

    def __init__(self, server: ProcessId | None, fallback: Pickle | None) -> None:
        super().__init__()
        self._server, self._fallback = server, fallback
        self._last = 0
        self._waiting = dict[int, asyncio.Future[object]]()

    async def call(self, asked: object, timeout_s: float | None) -> object:
        """Send, and wait for the answer. Raises ConnectionLost, TimeoutError, Unsendable, what pickling raises."""
        try:
            parts = pack(asked, self._fallback)
        except Exception as error:  # noqa: BLE001 - pickling runs code of the job, which may raise anything
            raise Unsendable(first_line(error), answer=False) from None
        self._last += 1
        call, loop = self._last, asyncio.get_running_loop()
        answer = self._waiting[call] = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, _time_out, answer)
        try:
            await self.send(call, _CALL, parts)
            return await answer
        except ConnectionResetError:
            gone = await self._has_ended()
            raise ConnectionLost("its process has ended" if gone else "the connection broke", gone=gone) from None
        finally:
            if timer is not None:
                timer.cancel()
            del self._waiting[call]

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
        try:
            found = unpack(frame, count)
        except Exception as error:  # noqa: BLE001 - unpickling runs code of the job; the caller hears of it
            answer.set_exception(Unsendable(first_line(error), answer=True))
            return
        if kind == _UNSENDABLE:
            of_answer, text = found
            answer.set_exception(Unsendable(text, answer=of_answer))
        else:
            answer.set_result(found)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError())


def _time_out(answer: asyncio.Future[object]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _close_after_fork() -> None:
    """A child of this process must not hold its connections open, nor the name of its server."""
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_after_fork)
