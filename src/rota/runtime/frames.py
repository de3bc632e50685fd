"""Frames over a connected socket: a pickle and, beside it, the large buffers that belong to it.

A frame is a header (bytes that follow, number of the call, kind, number of parts), the lengths of its parts, and the
parts: buffers of 64 KiB and more, at addresses that are multiples of 16, and the pickle last. Buffers go to the kernel
from where they are (``sendmsg``) and arrive in the memory in which the receiver uses them (``recv_into``).
"""

from __future__ import annotations

import asyncio
import contextlib
import copyreg
import io
import itertools
import logging
import mmap
import os
import pickle
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

T = TypeVar("T")

FRAME_BYTES_MAX: Final = 1 << 32
"""A frame above this ends its connection."""
BUFFER_BYTES_MIN: Final = 65_536
"""A buffer of at least this size travels beside the pickle, without a copy into it."""
BUFFERS_MAX: Final = 1024
"""Buffers of one frame; further ones are copied into its pickle."""
QUEUE_BYTES_MAX: Final = 1 << 20
"""Bytes that wait for the other side to read; whoever wants to write more waits."""
CALL, RESULT, UNSENDABLE, CANCEL = range(4)
"""Kinds: arguments, an answer, why one of these cannot be sent, and the caller waits no more."""
_READ_BYTES: Final = 65_536
_HEADER: Final = struct.Struct("<QQII")
_SMALL: Final = struct.Struct("<QQIIQ8x")
"""Header and padded table of a frame without buffers, the most frequent one."""
_ALIGNED: Final = 16
_PAGED_BYTES_MIN: Final = 4 << 20
_PIECES_MAX: Final = 512
"""Pieces of one ``sendmsg``, below the limit of the kernel (IOV_MAX, 1024)."""
_log = logging.getLogger("rota.runtime")
_descriptors = set[int]()
"""Of listening sockets and connections of this process."""

Pickle = Callable[[object], bytes]


def fill(link: socket.socket, target: memoryview) -> None:
    """Receive into all of ``target`` from a blocking socket. Raises OSError, ConnectionError at its end."""
    done = 0
    while done < len(target):
        count = link.recv_into(target[done:], flags=socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the other side closed the connection")
        done += count


def receive_exactly(link: socket.socket, size: int) -> bytearray:
    """The next ``size`` bytes of a blocking socket. Raises as ``fill``."""
    found = bytearray(size)
    fill(link, memoryview(found))
    return found


"""Pickles what the standard library refuses."""


class FrameParts(NamedTuple):
    """A value on its way: its pickle and the large buffers that belong to it."""

    body: bytes
    buffers: list[memoryview]

    @property
    def size(self) -> int:
        """Bytes of both."""
        return len(self.body) + sum(map(len, self.buffers))


NOTHING: Final = FrameParts(b"", [])


def pack(value: object, fallback: Pickle | None = None) -> FrameParts:
    """A value as parts; ``fallback`` pickles what the standard library refuses. Raises what pickling raises."""
    buffers = list[memoryview]()

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < BUFFER_BYTES_MIN or len(buffers) == BUFFERS_MAX:
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
        return FrameParts(fallback(value), [])
    return FrameParts(out.getvalue(), buffers)


def _reduced_tensor(tensor: Any) -> Any:
    """A plain tensor in the memory of the host as the array below it; any other as torch does it."""
    torch = sys.modules["torch"]
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad
    if plain and not tensor.is_conj() and not tensor.is_neg() and tensor.dtype is not torch.bfloat16 and tensor.numel():
        return torch.from_numpy, (tensor.numpy(),)
    return tensor.__reduce_ex__(5)


def unpack(frame: memoryview, count: int) -> object:
    """The value of a frame with ``count`` parts, of a process that may be trusted. Raises what unpickling raises."""
    lengths = struct.unpack_from(f"<{count}Q", frame)
    at, found = _padded(8 * count), list[memoryview]()
    for length in lengths:
        if at + length > len(frame):
            raise ValueError(f"a part of {length} bytes at {at} in a frame of {len(frame)}")
        found.append(frame[at : at + length])
        at = _padded(at + length)
    return pickle.loads(found[-1], buffers=found[:-1])  # noqa: S301 - whoever connects is authenticated first


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def encode(call: int, kind: int, parts: FrameParts) -> list[bytes | memoryview]:
    """A frame as pieces to write one after another."""
    if not parts.buffers:
        size = len(parts.body)
        return [_SMALL.pack(_ALIGNED + size, call, kind, 1, size) + parts.body]
    lengths = [*map(len, parts.buffers), len(parts.body)]
    table = struct.pack(f"<{len(lengths)}Q", *lengths)
    total = sum(map(_padded, lengths[:-1]), _padded(len(table))) + len(parts.body)
    head = _HEADER.pack(total, call, kind, len(lengths)) + table.ljust(_padded(len(table)), b"\0")
    pieces: list[bytes | memoryview] = [head]
    for buffer in parts.buffers:
        pieces.append(buffer)
        if padding := _padded(len(buffer)) - len(buffer):
            pieces.append(bytes(padding))
    pieces.append(parts.body)
    return pieces


class FrameLink:
    """Frames in and out of one connected non-blocking socket. It belongs to the event loop in which it was made."""

    def __init__(self, link: socket.socket) -> None:
        self._socket: socket.socket | None = link
        self._loop = asyncio.get_running_loop()
        self._descriptor = link.fileno()
        self._read = bytearray(_READ_BYTES)
        self._view = memoryview(self._read)
        self._start = self._end = 0
        self._large: tuple[memoryview, int, int, int] | None = None
        self._filled = 0
        self._paused = False
        self._queue = deque[memoryview]()
        self._queued = 0
        self._writers = deque[asyncio.Future[None]]()
        _descriptors.add(self._descriptor)
        self._loop.add_reader(self._descriptor, self._readable)

    def arrived(self, frame: memoryview, call: int, kind: int, count: int) -> None:
        """A whole frame is here."""
        raise NotImplementedError

    def lost(self) -> None:
        """The connection is closed, by whichever side."""

    @property
    def is_open(self) -> bool:
        """Whether frames can still be written."""
        return self._socket is not None

    async def send(self, call: int, kind: int, parts: FrameParts, until: asyncio.Future[object] | None = None) -> None:
        """Write a frame, once the other side keeps up, if that is before ``until`` is done.

        Raises ConnectionResetError when the connection is gone.
        """
        while self._queued > QUEUE_BYTES_MAX and self._socket is not None:
            waiting: asyncio.Future[None] = self._loop.create_future()
            self._writers.append(waiting)
            if until is not None:
                until.add_done_callback(lambda _, waiting=waiting: _end(waiting, None))
            await waiting
            if until is not None and until.done():
                return
        if self._socket is None:
            raise ConnectionResetError
        self.write(encode(call, kind, parts))

    def write(self, pieces: list[bytes | memoryview]) -> None:
        """Write one frame now; what the kernel does not take waits in memory. For frames that are small, or rare."""
        if self._socket is None:
            return
        waited = bool(self._queue)
        if not waited and len(pieces) == 1:
            try:
                sent = self._socket.send(pieces[0])
            except OSError:  # the way of the others shows what it is
                sent = 0
            if sent == len(pieces[0]):
                return
            pieces = [memoryview(pieces[0])[sent:]]
        for piece in pieces:
            self._queue.append(memoryview(piece).cast("B"))
            self._queued += len(piece)
        if not waited:
            self._flush()
            if self._queue and self._socket is not None:
                self._loop.add_writer(self._descriptor, self._writable)

    def _writable(self) -> None:
        self._flush()
        if self._socket is not None and not self._queue:
            self._loop.remove_writer(self._descriptor)
        if self._queued <= QUEUE_BYTES_MAX:
            self._wake_writers()

    def _flush(self) -> None:
        """Send as much as the kernel accepts."""
        while self._queue and self._socket is not None:
            try:
                sent = self._socket.sendmsg(list(itertools.islice(self._queue, _PIECES_MAX)))
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.close()
                return
            self._queued -= sent
            while sent:
                first = self._queue.popleft()
                if sent < len(first):
                    self._queue.appendleft(first[sent:])
                    return
                sent -= len(first)

    def _wake_writers(self) -> None:
        while self._writers:
            _end(self._writers.popleft(), None)

    def _readable(self) -> None:
        if self._socket is None:
            return
        try:
            found = self._socket.recv_into(self._room())
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            found = 0
        if found == 0:
            self.close()
            return
        self.took(found)

    def _room(self) -> memoryview:
        """Buffer for the next bytes."""
        if self._large is not None:
            return self._large[0][self._filled :]
        if self._start and self._end == len(self._read):
            rest = self._read[self._start : self._end]
            self._read[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._view[self._end :]

    def took(self, count: int) -> None:
        """``count`` bytes more are in the room."""
        if self._large is None:
            self._end += count
            self._parse()
            return
        self._filled += count
        whole, call, kind, parts = self._large
        if self._filled == len(whole):
            self._large = None
            self.arrived(whole, call, kind, parts)

    def _parse(self) -> None:
        while self._socket is not None and not self._paused and self._end - self._start >= _HEADER.size:
            total, call, kind, count = _HEADER.unpack_from(self._read, self._start)
            if total > FRAME_BYTES_MAX or not 1 <= count <= BUFFERS_MAX + 1 or 8 * count > total:
                self.close(f"a frame of {total} bytes and {count} parts")
                return
            first, last = self._start + _HEADER.size, self._start + _HEADER.size + total
            if last <= self._end:
                self._start = last
                self.arrived(memoryview(self._read[first:last]), call, kind, count)
            elif last - self._start > len(self._read):
                whole = _memory(total)
                self._filled = self._end - first
                whole[: self._filled] = self._view[first : self._end]
                self._large, self._start, self._end = (whole, call, kind, count), 0, 0
                return
            else:
                break
        if self._start == self._end:
            self._start = self._end = 0

    def pause(self) -> None:
        """Take no more frames, of those that are read already either."""
        if self._socket is not None and not self._paused:
            self._paused = True
            self._loop.remove_reader(self._descriptor)

    def resume(self) -> None:
        """Take frames again."""
        if self._socket is not None and self._paused:
            self._paused = False
            self._parse()
            if self._socket is not None and not self._paused:
                self._loop.add_reader(self._descriptor, self._readable)

    def close(self, why: str = "") -> None:
        """End the connection; with a reason that is a fault of the other side, it is logged."""
        if self._socket is None:
            return
        if why:
            _log.warning("a connection was closed: %s", why)
        link, self._socket = self._socket, None
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        _descriptors.discard(self._descriptor)
        with contextlib.suppress(OSError):  # wakes the other side even if a child of this process has a copy
            link.shutdown(socket.SHUT_RDWR)
        link.close()
        self._queue.clear()
        self._queued, self._large = 0, None
        self._wake_writers()
        self.lost()


def _memory(size: int) -> memoryview:
    """Memory for a frame; of a large one the pages are there once they are written to: its length alone costs none."""
    if size < _PAGED_BYTES_MIN:
        return memoryview(bytearray(size))
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Room:
    """Calls and bytes that may be in flight at once; who finds no room waits in line. One value alone always may."""

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self._count_max, self._bytes_max = count_max, bytes_max
        self._count = self._bytes = 0
        self._line = deque[tuple[int, asyncio.Future[bool]]]()

    @property
    def full(self) -> bool:
        """Whether the next one has to wait."""
        return self._count >= self._count_max or self._bytes >= self._bytes_max

    def enter(self, size: int) -> None:
        """Be in flight without asking for room."""
        self._count += 1
        self._bytes += size

    async def wait(self, size: int, until: asyncio.Future[object]) -> bool:
        """Be in flight once there is room; False if ``until`` was done before."""
        if not self._line and self._fits(size):
            self.enter(size)
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._line.append((size, turn))
        until.add_done_callback(lambda _: _end(turn, False))
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.result():
                self.leave(size)
            raise
        finally:
            self._admit()

    def leave(self, size: int) -> None:
        """Be in flight no more."""
        self._count -= 1
        self._bytes -= size
        self._admit()

    def _fits(self, size: int) -> bool:
        return self._count < self._count_max and (not self._count or self._bytes + size <= self._bytes_max)

    def _admit(self) -> None:
        while self._line and (self._line[0][1].done() or self._fits(self._line[0][0])):
            size, turn = self._line.popleft()
            if not turn.done():
                self.enter(size)
                turn.set_result(True)


def _end(waiting: asyncio.Future[T], value: T) -> None:
    if not waiting.done():
        waiting.set_result(value)


def watched(link: socket.socket) -> socket.socket:
    """A listening socket that a child of this process must not keep open."""
    _descriptors.add(link.fileno())
    return link


def unwatched(link: socket.socket) -> socket.socket:
    """Inverse of ``watched``, before it is closed."""
    _descriptors.discard(link.fileno())
    return link


def _close_after_fork() -> None:
    """A child of this process must not hold its connections open, nor the name of its server."""
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_after_fork)
