"""Segment header, open, map, allocate: files of shared memory that hold the bytes of tensors.

Before each payload is a header of 512 bytes and a manifest (JSON): what is needed to rebuild a lost registry. A
header is ``pending`` while bytes are copied, ``prepared`` when the commit is sent, ``ready`` after it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from rota.runtime import environ
from rota.runtime.file_locks import take_lock, try_lock
from rota.spec.errors import BadInput
from rota.tensors import errors
from rota.tensors.core import HEADER_BYTES
from rota.tensors.errors import failpoint

DIR: Final = "ROTA_SPILL_DIR"
BYTES_MAX: Final = "ROTA_SPILL_BYTES_MAX"
_SHARE: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """Where segments of ``links`` (a namespace's folder in shared memory) go when that is full, and how many bytes
    all that spill into ``folder`` may take there."""

    links: Path
    folder: Path
    bytes_max: int

    @staticmethod
    def of(links: Path) -> Spill | None:
        """As ``ROTA_SPILL_DIR`` and ``ROTA_SPILL_BYTES_MAX`` (bytes; default: half of its file system) say; None
        without a folder. Raises BadInput."""
        if not (name := environ.get(DIR)):
            return None
        folder, limit = Path(name), environ.get(BYTES_MAX, "0")
        if not folder.is_absolute() or not limit.isdigit():
            raise BadInput(f"{DIR}={name!r}, {BYTES_MAX}={limit!r}: an absolute folder, and a number of bytes")
        folder.mkdir(mode=environ.PRIVATE_DIR, parents=True, exist_ok=True)
        own = folder.stat()
        if own.st_uid != os.getuid() or own.st_mode & 0o077:
            raise BadInput(f"{DIR}={name!r}: others may read or change what lies there", hint=f"chmod 700 {name}")
        facts = os.statvfs(folder)
        return Spill(links=links, folder=folder, bytes_max=int(limit) or facts.f_blocks * facts.f_frsize // _SHARE)

    def make(self, seg: str, file_bytes: int) -> None:
        """Make the file of a segment, with its memory, and the link to it. Raises OutOfMemory, then neither is left."""
        lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            take_lock(self.folder, lambda: try_lock(lock))  # two that look at the same sum would both find room
            used = sum(_size(path) for path in self.folder.glob("*+*+seg-*"))
            if used + file_bytes > self.bytes_max:
                self._refuse(f"{used} of at most {self.bytes_max} bytes are taken", file_bytes)
            link, file = self.links / seg, self._file(seg)
            link.unlink(missing_ok=True)
            link.symlink_to(file)
            file.unlink(missing_ok=True)
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, environ.PRIVATE_FILE)
            try:
                os.posix_fallocate(fd, 0, file_bytes)
            except OSError as error:
                remove_file(link)
                if error.errno not in errors.FULL:
                    raise
                self._refuse(os.strerror(error.errno), file_bytes)
            finally:
                os.close(fd)
        finally:
            os.close(lock)

    def sweep(self) -> list[tuple[str, int]]:
        """Remove the strays; name and bytes of each."""
        gone: list[tuple[str, int]] = []
        for path in self.strays():
            with contextlib.suppress(FileNotFoundError):  # another sweeps, too
                gone.append((path.name, path.stat().st_size))
                path.unlink()
        return gone

    def strays(self) -> Iterator[Path]:
        """Files of this namespace to which no link leads: left by a process killed in between, or by another boot."""
        for file in list(self.folder.glob(self._file("seg-*").name)):
            if not (self.links / file.name.rpartition("+")[2]).is_symlink():
                yield file

    def _file(self, seg: str) -> Path:
        return self.folder / f"{self.links.parent.name}+{self.links.name}+{seg}"  # no plus sign is in any of them

    def _refuse(self, why: str, file_bytes: int) -> None:
        text = f"{self.folder}: shared memory is full, and {file_bytes} bytes do not fit here either: {why}"
        raise errors.OutOfMemory(text, hint=f"free names, or raise {BYTES_MAX}", bytes=file_bytes)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # removed meanwhile by a process without the lock
        return 0


def remove_file(segment: Path) -> None:
    """Remove a segment's file wherever it lies; harmless when it is gone."""
    if segment.is_symlink():
        segment.readlink().unlink(missing_ok=True)
    segment.unlink(missing_ok=True)


MAGIC: Final = b"ROTATSR1"
FORMAT: Final = 1
PENDING, PREPARED, READY = 1, 2, 3
KEPT_MAX: Final = 8
_NONE_KEPT: Final = (0,) * KEPT_MAX
_FIXED: Final = struct.Struct("<8sIHHQIIqHHIQQIQQ32sH")
_STATE: Final = struct.Struct("<IB3xQ8Q")
_CRC_AT: Final = 8
_CRC_BEFORE: Final = zlib.crc32(MAGIC + bytes(4))
STATE_AT: Final = 384


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeader:
    """What a block says of itself. ``kept`` are the older versions of the name that were still kept at its commit."""

    state: int
    version: int
    slot: int
    epoch: int
    step: int
    name: str
    owner: str
    offset: int
    bytes: int
    manifest_bytes: int
    block: int
    ctime_ns: int
    head: int = 0
    part: int = 0
    world: int = 1
    payload_crc: int = 0
    group: bool = False
    kept: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """The 512 bytes, little-endian: what never changes, then what the commit changes, each with its own CRC.

        Two, since a reader that leased the version right after the commit reads the first while the second is written.
        """
        numbers = (
            int(self.group), self.version, self.slot, self.epoch, self.step, self.part, self.world,
            self.manifest_bytes, self.offset, self.bytes, self.payload_crc, self.block, self.ctime_ns,
        )  # fmt: skip
        return pack_fixed(numbers, self.owner, self.name) + pack_state(self.state, self.head, self.kept)

    @staticmethod
    def unpack(raw: bytes | memoryview, where: str, *, settled: bool) -> BlockHeader:
        """Read a header; unless ``settled`` without state, head and kept. Raises Corrupt, naming the field."""
        data = bytes(raw[:STATE_AT])
        if len(data) < STATE_AT or data[:8] != MAGIC:
            raise errors.Corrupt(f"{where}: no tensor header", file=where, field="magic")
        found = _FIXED.unpack_from(data)
        if zlib.crc32(data[_CRC_AT + 4 :], _CRC_BEFORE) != found[1]:
            raise errors.Corrupt(f"{where}: the header's checksum does not match", file=where, field="crc32")
        if found[2] != FORMAT:
            raise errors.Corrupt(f"{where}: header format {found[2]}, this is {FORMAT}", file=where, field="format")
        state, head, kept = _unpack_state(raw, where) if settled else (0, 0, ())
        return BlockHeader(
            state=state, head=head, kept=kept, group=bool(found[3]), version=found[4], slot=found[5], epoch=found[6],
            step=found[7], part=found[8], world=found[9], manifest_bytes=found[10], offset=found[11], bytes=found[12],
            payload_crc=found[13], block=found[14], ctime_ns=found[15], owner=found[16].rstrip(b"\0").decode(),
            name=data[_FIXED.size : _FIXED.size + found[17]].decode(),
        )  # fmt: skip


def pack_fixed(numbers: tuple[int, ...], owner: str, name: str) -> bytes:
    """The first part of a header alone, of its numbers in their order there."""
    text = name.encode()
    raw = (_FIXED.pack(MAGIC, 0, FORMAT, *numbers, owner.encode(), len(text)) + text).ljust(STATE_AT, b"\0")
    return raw[:_CRC_AT] + zlib.crc32(raw).to_bytes(4, "little") + raw[_CRC_AT + 4 :]


def pack_state(state: int, head: int = 0, kept: tuple[int, ...] = ()) -> bytes:
    """The second part of a header alone, to be written at ``STATE_AT``."""
    if not head and not kept:
        return _STATES[state]
    return _packed(state, head, kept)


def _packed(state: int, head: int, kept: tuple[int, ...]) -> bytes:
    body = _STATE.pack(0, state, head, *kept, *_NONE_KEPT[len(kept) :])[4:]
    return (struct.pack("<I", zlib.crc32(body)) + body).ljust(HEADER_BYTES - STATE_AT, b"\0")


_STATES: Final = {state: _packed(state, 0, ()) for state in (PENDING, PREPARED, READY)}


def _unpack_state(raw: bytes | memoryview, where: str) -> tuple[int, int, tuple[int, ...]]:
    crc, state, head, *kept = _STATE.unpack_from(raw, STATE_AT)
    if zlib.crc32(bytes(raw[STATE_AT + 4 : STATE_AT + _STATE.size])) != crc:
        raise errors.Corrupt(f"{where}: the checksum of the state does not match", file=where, field="state")
    return state, head, tuple(v for v in kept if v)


class SegmentMap:
    """One segment file mapped into this process, writable and shared."""

    __slots__ = ("array", "map", "seg")

    def __init__(self, seg: str, path: Path, flags: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.map = mmap.mmap(fd, 0, mmap.MAP_SHARED | flags, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        self.seg = seg
        self.array = np.frombuffer(self.map, np.uint8)


class Segments:
    """The segment files of one namespace, in one directory; each is mapped at most once in this process."""

    def __init__(self, folder: Path, spill: Spill | None = None) -> None:
        self.folder, self.spill = folder, spill
        self._maps: dict[str, SegmentMap] = {}
        self._lock = threading.RLock()

    def path(self, seg: str) -> Path:
        """The file of a segment."""
        return self.folder / seg

    def ensure(self, seg: str, file_bytes: int, *, spill: bool = False) -> None:
        """Make the file and its memory exist; harmless when they do. Raises OutOfMemory when the file system is full,
        and with ``spill`` the disk too.

        ``posix_fallocate`` and not ``ftruncate``: a hole in a full tmpfs would kill the writer by SIGBUS later. A file
        that exists is used again and again by its writer: it is mapped whole at once, after which a copy into it costs
        what a plain copy does.
        """
        if seg in self._maps:
            return
        fd = os.open(self.path(seg), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            failpoint("opened")
            recycled = os.fstat(fd).st_size >= file_bytes
            if not recycled:
                os.posix_fallocate(fd, 0, file_bytes)
        except OSError as error:
            if error.errno not in errors.FULL:
                raise
            if not spill or self.spill is None:
                text = f"{self.folder}: no room for {file_bytes} bytes ({os.strerror(error.errno)})"
                hint = "free names, raise the size of /dev/shm, or name a folder on disk: ROTA_SPILL_DIR"
                raise errors.OutOfMemory(text, hint=hint, bytes=file_bytes) from None
            self.spill.make(seg, file_bytes)
            recycled = False
        finally:
            os.close(fd)
        if recycled:
            self.open(seg, mmap.MAP_POPULATE)

    def open(self, seg: str, flags: int = 0) -> SegmentMap:
        """The mapping of a segment. Raises Corrupt when its file is missing."""
        found = self._maps.get(seg)
        if found is not None:
            return found
        with self._lock:
            found = self._maps.get(seg)
            if found is None:
                try:
                    found = self._maps[seg] = SegmentMap(seg, self.path(seg), flags)
                except (FileNotFoundError, ValueError) as error:
                    where = str(self.path(seg))
                    raise errors.Corrupt(f"{where} is missing or empty", file=where, field="file") from error
            return found

    def read(self, seg: str, offset: int, size: int) -> bytes:
        """Bytes of a segment, without mapping it. Raises FileNotFoundError."""
        with self.path(seg).open("rb") as file:
            return os.pread(file.fileno(), size, offset)

    def take_back(self, seg: str, offset: int, version: int) -> None:
        """Let the header of a version that the registry did not commit say ``pending`` again."""
        try:
            header = BlockHeader.unpack(self.read(seg, offset, HEADER_BYTES), seg, settled=True)
        except (FileNotFoundError, errors.Corrupt):  # its writer did not come so far
            return
        if header.version == version and header.state != PENDING:
            with self.path(seg).open("r+b") as file:
                os.pwrite(file.fileno(), pack_state(PENDING), offset + STATE_AT)

    def find(self, address: int) -> tuple[Path, int] | None:
        """File and offset of the byte that an address of this process shows, None for other memory."""
        with self._lock:
            for mapping in self._maps.values():
                start = mapping.array.__array_interface__["data"][0]
                if start <= address < start + mapping.array.nbytes:
                    return self.path(mapping.seg), address - start
        return None

    def is_open(self, seg: str) -> bool:
        """True when this process has the segment mapped."""
        return seg in self._maps

    def forget_gone(self) -> None:
        """Unmap, once their last view dies, segments whose files were unlinked."""
        with self._lock:
            for seg in [seg for seg in self._maps if not self.path(seg).exists()]:
                del self._maps[seg]

    def unlink(self, seg: str) -> None:
        """Free a segment's memory; views that still map it keep it until they die."""
        with self._lock:
            self._maps.pop(seg, None)
        remove_file(self.path(seg))

    def spilled_bytes(self) -> int:
        """Bytes of segments that lie on disk."""
        return sum(size for seg, size in self.files() if self.path(seg).is_symlink())

    def files(self) -> Iterator[tuple[str, int]]:
        """Every segment file with its bytes."""
        for path in sorted(self.folder.glob("seg-*")):
            try:
                yield path.name, path.stat().st_size
            except FileNotFoundError:
                continue
