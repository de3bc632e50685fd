"""Device tensors of one process: slabs opened once, blocks asked of the keeper, memory freed in stream order.

The memory of a device belongs to its keeper, a process of its own (``keeper.py``), one a device and namespace. A
version on a device is an ordinary version whose block in shared memory holds, instead of the tensors, the place where
they are. The keeper frees the range of a version when the registry knows the version no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from io import BufferedRWPair
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from rota.runtime import environ, file_locks, process
from rota.runtime.clock import Clock, blocking_sleep
from rota.runtime.undo import undone_if_raised
from rota.spec.errors import BadInput
from rota.tensors import errors
from rota.tensors.arrays import Layout, view_in, view_of
from rota.tensors.core import Fields, Tensor
from rota.tensors.devices.cuda import Cuda
from rota.tensors.devices.memfd import DriverObject, FakeCuda, Memfd
from rota.tensors.locks import is_alive

if TYPE_CHECKING:
    import torch


class Driver(Protocol):
    """One kind of device in this process.

    ``host``: it is memory of the host, whose handles are descriptors that a keeper has to send. ``slab_bytes``: how
    much a keeper takes at once.
    """

    name: str
    host: bool
    slab_bytes: int

    def uuids(self) -> list[str]:
        """The devices this process sees, in its own order. Raises IpcUnavailable when there is none."""
        ...

    def allocate(self, device: int, size: int) -> int:
        """Device memory; its address. Raises OutOfMemory."""
        ...

    def free(self, address: int) -> None:
        """Free memory that no other process has open."""
        ...

    def export(self, address: int) -> bytes:
        """The handle of memory this process allocated."""
        ...

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's memory; its address here. Raises IpcUnavailable when its owner is dead."""
        ...

    def close(self, address: int) -> None:
        """Unmap what ``open`` mapped."""
        ...

    def memory(self, address: int, size: int) -> DriverObject:
        """A range as an object to build tensors on; what is set as its ``lease`` lives as long as they do."""
        ...

    def flat(self, memory: DriverObject, device: int) -> torch.Tensor:
        """A torch uint8 tensor over ``memory``."""
        ...

    def stream(self, device: int) -> DriverObject:
        """The stream that this thread's work goes to."""
        ...

    def record(self, stream: DriverObject) -> DriverObject:
        """An event: all work given to the stream so far."""
        ...

    def is_done(self, event: DriverObject) -> bool:
        """True when that work is done."""
        ...

    def wait(self, event: DriverObject) -> None:
        """Block until that work is done."""
        ...

    def reuse(self, address: int, size: int) -> None:
        """Called before a block is reused, when its last user is done with it."""
        ...


PLACE_BYTES: Final = 128
_DRIVERS: Final[dict[str, type[Driver]]] = {"cuda": Cuda, "fakecuda": FakeCuda, "memfd": Memfd}
_TEXT: Final = re.compile(r"(cuda|fakecuda|memfd)(?::(\d{1,3}))?")
_PLACE: Final = struct.Struct("<32s40sQQ")
_START_S: Final = 30.0
_ANSWER_S: Final = 30.0
_UNUSED_S: Final = 60.0
_DIAL_S: Final = 0.01
_SWEEP_S: Final = 0.05
_ASK_TRIES: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlace:
    """Where a version lies on a device: its keeper (a client), slab, offset and bytes."""

    keeper: str
    slab: str
    offset: int
    bytes: int

    def pack(self) -> bytes:
        """As it is written to shared memory."""
        return _PLACE.pack(self.keeper.encode(), self.slab.encode(), self.offset, self.bytes).ljust(PLACE_BYTES, b"\0")

    @staticmethod
    def unpack(raw: bytes | memoryview) -> DevicePlace:
        """Inverse of ``pack``."""
        keeper, slab, offset, size = _PLACE.unpack_from(raw)
        words = (word.rstrip(b"\0").decode() for word in (keeper, slab))
        return DevicePlace(keeper=next(words), slab=next(words), offset=offset, bytes=size)


@dataclass(slots=True)
class _Slab:
    """A slab this process has open; the descriptor holds a shared lock that keeps the keeper from freeing it.

    ``uses`` counts the versions in it that any store of this process maps or has not let go yet.
    """

    folder: Path
    address: int
    fd: int
    used_s: float
    uses: int = 0


@dataclass(slots=True)
class _Use:
    """A version mapped by this process: its addresses, and the streams that may have pending work on it."""

    name: str
    start: int
    end: int
    slab: str
    streams: list[DriverObject] = field(default_factory=list[DriverObject])


# a process opens a slab once for all its namespaces
_open: dict[str, _Slab] = {}
_open_lock = threading.Lock()
# held while a slab is opened, which may wait for its keeper: not for that of another slab
_opening: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()


def _end_use(slab: str) -> None:
    with _open_lock:
        _open[slab].uses -= 1


class Devices:
    """The devices of one tensor store; ``uuid`` is the one that ``put`` goes to."""

    def __init__(self, folder: Path, home: environ.Home, url: str, device: str, clock: Clock) -> None:
        self.driver: Driver = load(parse(device)[0])
        self.use(device)
        self.folder = folder / "k"
        self.folder.mkdir(mode=environ.PRIVATE_DIR, exist_ok=True)
        self._clients, self._home, self._url, self._namespace = folder / "c", home, url, folder.name
        self._clock = clock
        self._uses: dict[int, _Use] = {}
        self._leaving: list[tuple[tuple[int, int, int], str, list[DriverObject]]] = []
        self._lock = threading.RLock()
        self._sockets: dict[str, BufferedRWPair] = {}
        self._children: list[process.Child] = []

    def use(self, device: str) -> None:
        """Let puts go to another device of the same driver from now on. Raises WrongDevice, BadInput."""
        name, ordinal = parse(device)
        uuids = self.driver.uuids()
        if name != self.driver.name:
            raise BadInput(f"device {device!r}: this connection already uses {self.driver.name}")
        if ordinal >= len(uuids):
            raise errors.WrongDevice(f"{device}: this process sees {len(uuids)} devices ({', '.join(uuids)})")
        self.ordinal, self.uuid = ordinal, uuids[ordinal]

    def take(self, version: int, size: int) -> DevicePlace:
        """Device memory for a version that the registry knows. Raises OutOfMemory, IpcUnavailable."""
        reply = self.ask(self.uuid, {"op": "take", "version": version, "bytes": size})
        if "slab" not in reply:
            if reply.get("rule"):
                raise errors.ProtocolBreach(reply["error"], rule=reply["rule"])
            raise errors.OutOfMemory(reply["error"], hint="free names, or share less on this device", bytes=size)
        return DevicePlace(keeper=reply["keeper"], slab=reply["slab"], offset=reply["offset"], bytes=reply["bytes"])

    def view(
        self, name: str, version: int, uuid: str, place: DevicePlace, layouts: Sequence[Layout], lease: object, *,
        as_: str = "torch", sealed: bool = False,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Tensors over a version's memory; the last of them ends ``lease``. ``sealed``: host memory mapped read-only.

        Raises OwnerLost, WrongDevice, UnsupportedTensor.
        """
        if as_ != "torch" and not self.driver.host:
            text = f"{name} is on device {uuid}: it cannot be read as {as_}"
            raise errors.UnsupportedTensor(text, hint="read it as_='torch'", layout=as_)
        device = self._ordinal(name, uuid)
        if not is_alive(self._clients, place.keeper):
            raise _lost(name, uuid)
        start = self._opened(name, uuid, place, device) + place.offset
        with undone_if_raised(_end_use, place.slab), self._lock:
            used = lease is not None and version not in self._uses
            if lease is not None:  # without one a writer looks, who waits for his stream himself
                stream = self.driver.stream(device)
                use = self._uses.setdefault(version, _Use(name, start, start + place.bytes, place.slab))
                self._note(use, stream)
        if not used:
            _end_use(place.slab)
        memory, base = self.driver.memory(start, place.bytes), 0
        if sealed and self.driver.host and isinstance(self.driver, Memfd):
            memory, base = self.driver.sealed(start, place.bytes)
        memory.lease = lease
        if self.driver.host:
            return {each.name: view_of(each, memory, base, as_) for each in layouts}
        flat = self.driver.flat(memory, device)
        return {each.name: view_in(flat, each) for each in layouts}

    def find(self, address: int) -> tuple[str, int] | None:
        """Name and version of the device memory that an address lies in."""
        with self._lock:
            for version, use in self._uses.items():
                if use.start <= address < use.end:
                    return use.name, version
        return None

    def record_stream(self, version: int, stream: DriverObject) -> None:
        """Another stream works on a version: it is not released before that work is done."""
        with self._lock:
            if version in self._uses:
                self._note(self._uses[version], stream)

    def finish(self) -> None:
        """Wait for what this thread gave to its stream: bytes are there before they are published."""
        self.driver.wait(self.driver.record(self.driver.stream(self.ordinal)))

    def settle(self, ended: Sequence[tuple[int, int, int]], *, block: bool = False) -> list[tuple[int, int, int]]:
        """The leases that ended, now and before, whose memory has no pending work of a stream."""
        done: list[tuple[int, int, int]] = []
        with self._lock:
            for lease in ended:
                use = self._uses.pop(lease[0], None)
                events = [self.driver.record(stream) for stream in use.streams] if use else []
                self._leaving.append((lease, use.slab if use else "", events))
            for item in list(self._leaving):
                lease, slab, events = item
                for event in events if block else ():
                    self.driver.wait(event)
                if all(self.driver.is_done(event) for event in events):
                    self._leaving.remove(item)
                    done.append(lease)
                    with _open_lock:
                        if slab in _open:
                            _open[slab].uses -= 1
                            _open[slab].used_s = self._clock.monotonic_s()
        return done

    def close_unused(self, unused_s: float = _UNUSED_S) -> int:
        """Close slabs without a version of this process for ``unused_s``; returns how many. Keepers that this process
        started and that have ended are waited for, so that none stays a zombie."""
        closed = 0
        with self._lock, _open_lock:
            self._children = [child for child in self._children if child.poll() is None]
            for slab in [name for name, one in _open.items() if not one.uses and one.folder == self.folder]:
                if self._clock.monotonic_s() - _open[slab].used_s >= unused_s:
                    with contextlib.suppress(errors.ProtocolBreach):
                        self.driver.close(_open[slab].address)
                        os.close(_open.pop(slab).fd)
                        closed += 1
        return closed

    def ask(self, uuid: str, words: Fields, *, start: bool = True) -> Fields:
        """Send a request to the keeper of a device, started if need be; empty when none runs and ``start`` is False."""
        with self._lock:
            for attempt in range(_ASK_TRIES):
                if attempt:
                    blocking_sleep(_DIAL_S * attempt)  # a keeper that is just dying still accepts
                try:
                    stream = self._sockets.get(uuid) or self._connect(uuid, start=start)
                    if stream is None:
                        return {}
                    self._sockets[uuid] = stream
                    stream.write(json.dumps(words).encode() + b"\n")
                    stream.flush()
                    if line := stream.readline():
                        return json.loads(line)
                except OSError:
                    pass
                self._sockets.pop(uuid, None)
        raise errors.IpcUnavailable(f"the keeper of device {uuid} does not answer", hint=f"see {self.log(uuid)}")

    def log(self, uuid: str) -> Path:
        """What a keeper printed."""
        return self.folder / f"{uuid}.log"

    def _ordinal(self, name: str, uuid: str) -> int:
        uuids = self.driver.uuids()
        if uuid not in uuids:
            text = f"{name} is on device {uuid}; this process sees {', '.join(uuids)}"
            raise errors.WrongDevice(text, name=name, wanted=uuid, visible=uuids)
        return uuids.index(uuid)

    def _opened(self, name: str, uuid: str, place: DevicePlace, device: int) -> int:
        """The address of a slab, opened if need be, with one use more of it."""
        with _open_lock:
            lock = _opening.setdefault(place.slab, threading.Lock())
        with lock:
            with _open_lock:
                found = _open.get(place.slab)
                if found is not None:
                    found.uses, found.used_s = found.uses + 1, self._clock.monotonic_s()
                    return found.address
            address, fd = self._mapped(name, uuid, place, device)
            with _open_lock:
                _open[place.slab] = _Slab(self.folder, address, fd, self._clock.monotonic_s(), uses=1)
                return address

    def _mapped(self, name: str, uuid: str, place: DevicePlace, device: int) -> tuple[int, int]:
        """The address of a slab that is opened now, and the descriptor that is locked as long as it is."""
        try:
            fd = os.open(self.folder / place.slab, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _lost(name, uuid) from None
        with undone_if_raised(os.close, fd):
            fcntl.lockf(fd, fcntl.LOCK_SH)
            facts = json.loads(os.pread(fd, 4096, 0))
            try:
                handle = self._receive(uuid, place.slab) if self.driver.host else bytes.fromhex(facts["handle"])
                return self.driver.open(device, handle), fd
            except errors.IpcUnavailable:
                blocking_sleep(_SWEEP_S)  # who sweeps a dead keeper holds its lock for a moment
                if not is_alive(self._clients, place.keeper):
                    raise _lost(name, uuid) from None
                raise

    def _receive(self, uuid: str, slab: str) -> bytes:
        """The descriptor of a slab, sent by its keeper, as a handle. Raises IpcUnavailable when there is none."""
        with contextlib.suppress(OSError), self._reach(uuid) as channel:
            channel.sendall(json.dumps({"op": "descriptor", "slab": slab}).encode() + b"\n")
            _, fds, *_ = socket.recv_fds(channel, 4096, 1, socket.MSG_CMSG_CLOEXEC)
            if fds:
                return fds[0].to_bytes(8, "little")
        raise errors.IpcUnavailable(f"the keeper of {uuid} sends no descriptor of {slab}", hint=f"see {self.log(uuid)}")

    def _note(self, use: _Use, stream: DriverObject) -> None:
        if stream not in use.streams:
            use.streams.append(stream)

    def _connect(self, uuid: str, *, start: bool) -> BufferedRWPair | None:
        found = self._dial(uuid)
        if found is not None or not start:
            return found
        with file_locks.locked(self.folder / f"{uuid}.lock"):
            found = self._dial(uuid)
            if found is None:
                self._start(uuid)
                deadline_s = self._clock.monotonic_s() + _START_S
                while (found := self._dial(uuid)) is None and self._clock.monotonic_s() < deadline_s:
                    blocking_sleep(_DIAL_S)
        return found

    def _start(self, uuid: str) -> None:
        words = (str(self._home.root), self._namespace, self.driver.name, uuid)
        # it belongs to no instance, and outlives the client that needed it first
        unset = dict.fromkeys(("ROTA_TENSORS_DIE_AT", "ROTA_ENGINE", environ.JOB, environ.INSTANCE, environ.EPOCH))
        env = {**unset, environ.REDIS_URL: self._url or None}
        what = process.Spawn(command=(sys.executable, "-m", "rota.tensors.keeper", *words), env=env, log=self.log(uuid))
        self._children.append(process.spawn(what, name="keeper"))

    def _dial(self, uuid: str) -> BufferedRWPair | None:
        try:
            with self._reach(uuid) as dial:
                return dial.makefile("rwb")
        except OSError:
            return None

    def _reach(self, uuid: str) -> socket.socket:
        """A connection to a keeper. Raises OSError."""
        dial = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        dial.settimeout(_ANSWER_S)
        try:
            with socket_folder(self.folder) as near:
                dial.connect(f"{near}/{uuid}.sock")
        except OSError:
            dial.close()
            raise
        return dial


def _lost(name: str, uuid: str) -> errors.OwnerLost:
    text = f"{name}: the keeper of device {uuid} died, and the memory with it"
    return errors.OwnerLost(text, hint="publish it again", name=name, device=uuid)


@contextlib.contextmanager
def socket_folder(folder: Path) -> Iterator[str]:
    """A short path of a folder: the address of a unix socket holds 107 bytes."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


@cache
def load(name: str) -> Driver:
    """The one driver of that name in this process: ``cuda``, ``fakecuda`` or ``memfd``."""
    return _DRIVERS[name]()


def parse(device: str) -> tuple[str, int]:
    """Driver and ordinal of ``cuda:0``, ``fakecuda:1`` or ``memfd``. Raises BadInput."""
    found = _TEXT.fullmatch(device)
    if not found:
        raise BadInput(f"device {device!r}: cuda:N, memfd or fakecuda:N")
    return found[1], int(found[2] or 0)
