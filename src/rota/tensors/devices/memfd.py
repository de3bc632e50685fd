"""Host memory without a name, and a GPU on CPU that is made of it.

A keeper has the memory as memfds and sends their descriptors to who asks (SCM_RIGHTS). No path of a file system leads
to the bytes, and none of them outlives its users. A memfd is a slab of whole 2 MiB; its size is sealed, so that no
reader can be killed by a hole. A platform without memfds is refused by name.

``FakeCuda`` enforces the rules of CUDA IPC: a broken rule raises ProtocolBreach, where CUDA would corrupt. Its memory
is a memfd of the process that allocated it, and dies with it. A handle names that process, the descriptor and a number
never used twice. An importer holds a shared lock on the memfd, so that freeing under it is seen. Work on a stream takes
as long as ``launch`` says, and is noted beside the memory: giving a block to a new owner before that time is a breach.
``ROTA_FAKECUDA_DEVICES`` (default ``0,1``) is the order in which a process sees the devices, ``ROTA_FAKECUDA_BYTES``
what each holds.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import mmap
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rota.runtime import environ
from rota.runtime.clock import SystemClock, blocking_sleep
from rota.runtime.random import SystemRandom
from rota.tensors import errors
from rota.tensors.core import DEVICE_HANDLE_BYTES, DEVICE_SLAB_BYTES

if TYPE_CHECKING:
    import torch

DriverObject: TypeAlias = Any
"""What a driver hands out: memory to build tensors on, a stream, an event."""
_HANDLE_BYTES = 8


class ReadOnly(mmap.mmap):
    """A mapping that cannot be written; what is set as its ``lease`` lives as long as views of it do."""

    lease: object = None


@dataclass(frozen=True, slots=True, eq=False)
class HostMemory:
    """One allocation, as its owner or an importer has it: ``size`` bytes behind a front of the driver's own."""

    fd: int
    map: mmap.mmap
    owned: bool
    size: int
    address: int
    device: str = ""
    nonce: bytes = b""


class Memfd:
    """The driver of this process for memory of the host; no work is ever under way on it.

    A handle is the number of a descriptor of this process: the keeper sends the descriptor, the receiver makes a handle
    of what came.
    """

    name = "memfd"
    host = True
    slab_bytes = 0
    front_bytes = 0

    def __init__(self) -> None:
        self._memories: dict[int, HostMemory] = {}

    def uuids(self) -> list[str]:
        """One device, the host. Raises IpcUnavailable where the platform has no memfds."""
        if not hasattr(os, "memfd_create"):
            raise errors.IpcUnavailable("this platform has no memfds", hint="leave the device out: shared memory")
        return ["memfd"]

    def allocate(self, device: int, size: int) -> int:
        """Memory of this process, there at once. Raises OutOfMemory."""
        return self.make(size, self.uuids()[device])

    def make(self, size: int, device: str, front: bytes = b"") -> int:
        """A memfd with its memory, of a size that can no longer change; the address behind its front."""
        fd = os.memfd_create(f"rota-{self.name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, self.front_bytes + size)
        except OSError as error:
            os.close(fd)
            raise errors.OutOfMemory(f"no memory for {size} bytes: {error.strerror}", bytes=size) from None
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.pwrite(fd, front, 0)
        return self.map(fd, device, front, owned=True)

    def free(self, address: int) -> None:
        """Free memory; processes that still map it keep it."""
        self.unmap(self.need(address, owned=True))

    def export(self, address: int) -> bytes:
        """The number of the descriptor, which another process has to be sent."""
        return self.need(address, owned=True).fd.to_bytes(_HANDLE_BYTES, "little")

    def open(self, device: int, handle: bytes) -> int:
        """Map the memory of a descriptor that came from the keeper; the descriptor is ours from now on."""
        return self.map(int.from_bytes(handle, "little"), self.uuids()[device], b"", owned=False)

    def close(self, address: int) -> None:
        """Breach ``close-under-view`` while a tensor of this process shows it."""
        self.unmap(self.need(address, owned=False))

    def memory(self, address: int, size: int) -> DriverObject:
        """A ctypes array over the range."""
        found, at = self.find(address, size)
        return (ctypes.c_ubyte * size).from_buffer(found.map, at)

    def sealed(self, address: int, size: int) -> tuple[ReadOnly, int]:
        """The range in a mapping of its own that cannot be written, and where it begins there."""
        found, at = self.find(address, size)
        start = at // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        return ReadOnly(found.fd, at - start + size, mmap.MAP_SHARED, mmap.PROT_READ, offset=start), at - start

    def flat(self, memory: DriverObject, device: int) -> torch.Tensor:
        """A torch uint8 tensor on the CPU."""
        del device
        return importlib.import_module("torch").frombuffer(memory, dtype=importlib.import_module("torch").uint8)

    def stream(self, device: int) -> DriverObject:
        """The processor itself."""
        del device

    def record(self, stream: DriverObject) -> DriverObject:
        """No-op: all work is synchronous."""
        return stream

    def is_done(self, event: DriverObject) -> bool:
        """Always."""
        return event is None

    def wait(self, event: DriverObject) -> None:
        """Nothing to wait for."""

    def reuse(self, address: int, size: int) -> None:
        """Nothing to do: all work on it is synchronous."""

    def map(self, fd: int, device: str, nonce: bytes, *, owned: bool) -> int:
        """Map a memfd into this process; its address."""
        size = os.fstat(fd).st_size
        mapped = mmap.mmap(fd, size)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(mapped)) + self.front_bytes
        self._memories[address] = HostMemory(fd, mapped, owned, size - self.front_bytes, address, device, nonce)
        return address

    def unmap(self, found: HostMemory) -> None:
        """Let a memfd go. Breach ``close-under-view`` while a tensor of this process shows it."""
        try:
            found.map.close()
        except BufferError:
            raise self.breach("close-under-view", "memory is closed while a tensor still shows it") from None
        del self._memories[found.address]
        os.close(found.fd)

    def need(self, address: int, *, owned: bool) -> HostMemory:
        """The memory that begins at an address. Breach ``foreign-address``."""
        found = self._memories.get(address)
        if found is None or found.owned != owned:
            whose = "owns" if owned else "opened"
            raise self.breach("foreign-address", f"{address:#x} is not memory that this process {whose}")
        return found

    def find(self, address: int, size: int) -> tuple[HostMemory, int]:
        """The memory a range lies in, and where in its file. Breach ``foreign-address``."""
        for found in self._memories.values():
            if found.address <= address and address + size <= found.address + found.size:
                return found, address - found.address + self.front_bytes
        raise self.breach("foreign-address", f"{address:#x} lies in no memory of this process")

    def breach(self, rule: str, text: str) -> errors.ProtocolBreach:
        """The error of a broken rule."""
        return errors.ProtocolBreach(f"{self.name}: {text} (rule {rule})", rule=rule)


POISON: Final = 0xDB
_FRONT_BYTES: Final = 8192
_NONCE_BYTES: Final = 20
_HANDLE: Final = struct.Struct(f"<II{_NONCE_BYTES}s16s")
_WORK: Final = struct.Struct("<QQd")
_WORK_AT: Final = 64
_WORK_MAX: Final = (_FRONT_BYTES - _WORK_AT) // _WORK.size
_BYTES: Final = 256 << 20


@dataclass(slots=True, eq=False)
class FakeStream:
    """Work in order; ``until_s`` is when the last of it is done."""

    until_s: float = 0.0


class FakeCuda(Memfd):
    """The driver of this process; a forked child may not use its parent's, as with CUDA.

    The front of each memory holds its number and the work on it.
    """

    name = "fakecuda"
    host = False
    slab_bytes = DEVICE_SLAB_BYTES
    front_bytes = _FRONT_BYTES

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()
        self._clock = SystemClock()
        self._streams: dict[int, FakeStream] = {}

    def uuids(self) -> list[str]:
        """``FAKE-n`` for each visible n."""
        self._check_process()
        return [f"FAKE-{word.strip()}" for word in (environ.get("ROTA_FAKECUDA_DEVICES") or "0,1").split(",")]

    def allocate(self, device: int, size: int) -> int:
        """Memory of this process. Raises OutOfMemory beyond what the device holds."""
        uuid = self.uuids()[device]
        used = sum(each.size for each in self._memories.values() if each.owned and each.device == uuid)
        total = int(environ.get("ROTA_FAKECUDA_BYTES") or _BYTES)
        if used + size > total:
            raise errors.OutOfMemory(f"device {uuid} holds {total} bytes, {used} are taken", bytes=size)
        return self.make(size, uuid, SystemRandom().new_id(96).encode())

    def free(self, address: int) -> None:
        """Breach ``free-while-open`` when another process has it open."""
        found = self.need(address, owned=True)
        try:
            fcntl.lockf(found.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except (BlockingIOError, PermissionError):
            raise self.breach("free-while-open", "memory is freed that another process has open") from None
        self.unmap(found)

    def export(self, address: int) -> bytes:
        """The handle of memory this process owns."""
        found = self.need(address, owned=True)
        return _HANDLE.pack(self._pid, found.fd, found.nonce, found.device.encode()).ljust(DEVICE_HANDLE_BYTES, b"\0")

    def open(self, device: int, handle: bytes) -> int:
        """Breaches ``open-in-exporter``, ``open-twice``, ``wrong-device``, ``stale-handle``."""
        pid, their_fd, nonce, raw = _HANDLE.unpack_from(handle)
        uuid = raw.rstrip(b"\0").decode()
        if pid == self._pid:
            raise self.breach("open-in-exporter", "a process opens a handle of its own memory")
        if any(each.nonce == nonce for each in self._memories.values()):
            raise self.breach("open-twice", "this process has the handle open already")
        if self.uuids()[device] != uuid:
            raise self.breach("wrong-device", f"a handle of {uuid} is opened on {self.uuids()[device]}")
        try:
            fd = os.open(f"/proc/{pid}/fd/{their_fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            text = f"process {pid}, the owner of this memory, cannot be reached: {os.strerror(error.errno or 0)}"
            raise errors.IpcUnavailable(text, pid=pid) from None
        if os.pread(fd, _NONCE_BYTES, 0) != nonce:
            os.close(fd)
            raise self.breach("stale-handle", "the handle names memory that was freed")
        fcntl.lockf(fd, fcntl.LOCK_SH, 1)
        return self.map(fd, uuid, nonce, owned=False)

    def stream(self, device: int) -> FakeStream:
        """One stream a device."""
        return self._streams.setdefault(device, FakeStream())

    def launch(self, address: int, size: int, seconds: float, stream: FakeStream) -> None:
        """Stand-in for a kernel: uses a range for ``seconds``, behind the work before it. Returns at once."""
        found, at = self.find(address, size)
        stream.until_s = max(stream.until_s, self._clock.monotonic_s()) + seconds
        places = range(_WORK_AT, _WORK_AT + _WORK_MAX * _WORK.size, _WORK.size)
        oldest = min(places, key=lambda place: _WORK.unpack_from(found.map, place)[2])
        _WORK.pack_into(found.map, oldest, at, at + size, stream.until_s)

    def record(self, stream: FakeStream) -> float:
        """When the work so far is done."""
        return stream.until_s

    def is_done(self, event: float) -> bool:
        """True when that time is over."""
        return self._clock.monotonic_s() >= event

    def wait(self, event: float) -> None:
        """Wait for that time."""
        blocking_sleep(max(event - self._clock.monotonic_s(), 0))

    def reuse(self, address: int, size: int) -> None:
        """Poison the block; breach ``reuse-before-event`` when work that uses it is not done."""
        found, at = self.find(address, size)
        for start, end, until_s in _WORK.iter_unpack(found.map[_WORK_AT : _WORK_AT + _WORK_MAX * _WORK.size]):
            if start < at + size and at < end and until_s > self._clock.monotonic_s():
                raise self.breach("reuse-before-event", "a block is given away while work on a stream still uses it")
        ctypes.memset(address, POISON, size)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise self.breach("fork", "a forked child uses the driver of its parent; start the process anew (spawn)")
