"""Messages of tensor servers: JSON with its length before it, and the bytes of versions in chunks with checksums.

A chunk is up to 4 MiB of a payload and then eight bytes: the sum of its 64-bit words, modulo 2**64. It finds bytes that
were lost or belong to another version; against an attacker on the wire it does nothing.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from rota.runtime.frames import fill, receive_exactly
from rota.tensors.core import Fields

PURPOSE: Final = "tensors"
CHUNK_BYTES: Final = 4 << 20
_PIECE_BYTES: Final = 256 << 10
"""A chunk is summed, sent and received in pieces that stay in the processor's cache in between."""
SMALL_BYTES: Final = 64 << 10
"""A payload of at most this size goes with the message that describes it."""
MESSAGE_BYTES_MAX: Final = 80 << 20
SUM_BYTES: Final = 8
_LENGTH: Final = struct.Struct(">I")
_SUM: Final = struct.Struct(">Q")
_POPULATE_WRITE: Final = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14, which Python's mmap has no name for."""


SILENCE_S: Final = 8.0
"""A connection that moves no byte for this time while one is due is given up."""


def limit_silence(link: socket.socket, seconds: float = SILENCE_S) -> None:
    """Make each send and receive of a blocking socket fail after ``seconds`` without a byte; 0 for no limit."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(socket.SOL_SOCKET, option, limit)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Broken(ConnectionError):
    """A connection that carried what no tensor server sends."""


def pack(message: Fields) -> bytes:
    """A message as it is sent."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def receive(link: socket.socket) -> Fields:
    """The next message. Raises OSError, Broken."""
    (size,) = _LENGTH.unpack(receive_exactly(link, _LENGTH.size))
    if size > MESSAGE_BYTES_MAX:
        raise Broken(f"a message of {size} bytes; at most {MESSAGE_BYTES_MAX} are accepted")
    try:
        found = json.loads(receive_exactly(link, size))
    except ValueError as error:
        raise Broken(f"a message that is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Broken("a message that is not a JSON object")
    return found


def checksum(data: memoryview) -> int:
    """The sum of the 64-bit words of a piece; bytes that are left over are the last word."""
    words = len(data) // SUM_BYTES
    total = int(np.frombuffer(data, np.uint64, words).sum(dtype=np.uint64)) if words else 0
    return total + int.from_bytes(data[words * SUM_BYTES :], "little")


def _pack_sum(total: int) -> bytes:
    return _SUM.pack(total % (1 << 64))


def send_payload(link: socket.socket, message: bytes, parts: Sequence[VersionPart], skip: tuple[int, int]) -> int:
    """Send a message and the payloads of ``parts`` behind it, from byte ``skip[1]`` of part ``skip[0]`` on.

    Returns the bytes of payload that were sent. What the kernel sends it takes from the files of the segments, later:
    the caller keeps their lease until the receiver has said that it has all.
    """
    sent = 0
    for index, part in enumerate(parts):
        at = skip[1] if index == skip[0] else 0 if index > skip[0] else len(part.memory)
        if not at and len(part.memory) <= SMALL_BYTES:
            message += part.memory.tobytes() + _pack_sum(checksum(part.memory)) if len(part.memory) else b""
            sent += len(part.memory)
            continue
        with part.path.open("rb") as file:
            while at < len(part.memory):
                link.sendall(message)
                size = min(CHUNK_BYTES, len(part.memory) - at)
                message, at, sent = _send_chunk(link, file.fileno(), part, at, size), at + size, sent + size
    link.sendall(message)
    return sent


def _send_chunk(link: socket.socket, file: int, part: VersionPart, at: int, size: int) -> bytes:
    """Send a chunk; the checksum to send behind it. Each piece is summed before it is sent: a version that changes
    meanwhile is a fault that the receiver must see."""
    total, end = 0, at + size
    while at < end:
        step = min(_PIECE_BYTES, end - at)
        total += checksum(part.memory[at : at + step])
        _send_file(link, file, part.offset + at, step)
        at += step
    return _pack_sum(total)


class VersionPart:
    """One part of a leased version: its payload in memory, and where that lies in the file of its segment."""

    __slots__ = ("manifest", "memory", "offset", "path", "rank", "world")

    def __init__(self, *, path: Path, offset: int, memory: memoryview, manifest: bytes, rank: int, world: int) -> None:
        self.path, self.offset, self.memory = path, offset, memory
        self.manifest, self.rank, self.world = manifest, rank, world


def receive_payload(
    link: socket.socket, target: memoryview, at: int, ready: Callable[[int, int], None], done: Callable[[int], None]
) -> None:
    """Receive a payload into ``target`` from byte ``at`` on. Raises OSError, Broken.

    ``ready(at, size)`` is called before each chunk, ``done(at)`` with where the next one begins when it is whole.
    """
    while at < len(target):
        size = min(CHUNK_BYTES, len(target) - at)
        ready(at, size)
        total = 0
        for start in range(at, at + size, _PIECE_BYTES):
            piece = target[start : min(start + _PIECE_BYTES, at + size)]
            fill(link, piece)
            total += checksum(piece)
        if receive_exactly(link, SUM_BYTES) != _pack_sum(total):
            raise Broken(f"the checksum of {size} bytes from byte {at} on does not match")
        at += size
        done(at)


def populate(memory: mmap.mmap, at: int, size: int) -> None:
    """Map the pages of a range at once, which costs less than one fault for each; left to the faults where it fails."""
    start = at // mmap.PAGESIZE * mmap.PAGESIZE
    with contextlib.suppress(OSError, ValueError):
        memory.madvise(_POPULATE_WRITE, start, at + size - start)


def _send_file(link: socket.socket, file: int, at: int, size: int) -> None:
    end = at + size
    while at < end:
        count = os.sendfile(link.fileno(), file, at, end - at)
        if not count:
            raise Broken("the file of a segment is shorter than its versions")
        at += count
