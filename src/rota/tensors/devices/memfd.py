"""Host memory without a name: a keeper has it as memfds and sends their descriptors to who asks (SCM_RIGHTS).

No path of a file system leads to the bytes, and none of them outlives its users. A memfd is a slab of whole 2 MiB; its
size is sealed, so that no reader can be killed by a hole. A platform without memfds is refused by name.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import mmap
import os
from dataclasses import dataclass
from typing import Any

from rota.tensors import errors

_HANDLE_BYTES = 8


class ReadOnly(mmap.mmap):
    """A mapping that cannot be written; what is set as its ``lease`` lives as long as views of it do."""

    lease: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
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
        self._memories: dict[int, Memory] = {}

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
        """Give memory back; who still maps it keeps it."""
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

    def memory(self, address: int, size: int) -> Any:
        """A ctypes array over the range."""
        found, at = self.find(address, size)
        return (ctypes.c_ubyte * size).from_buffer(found.map, at)

    def sealed(self, address: int, size: int) -> tuple[ReadOnly, int]:
        """The range in a mapping of its own that cannot be written, and where it begins there."""
        found, at = self.find(address, size)
        start = at // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        return ReadOnly(found.fd, at - start + size, mmap.MAP_SHARED, mmap.PROT_READ, offset=start), at - start

    def flat(self, memory: Any, device: int) -> Any:
        """A torch uint8 tensor on the CPU."""
        del device
        return importlib.import_module("torch").frombuffer(memory, dtype=importlib.import_module("torch").uint8)

    def stream(self, device: int) -> Any:
        """The processor itself."""
        del device

    def record(self, stream: Any) -> Any:
        """What was done is done."""
        return stream

    def is_done(self, event: Any) -> bool:
        """Always."""
        return event is None

    def wait(self, event: Any) -> None:
        """Nothing to wait for."""

    def reuse(self, address: int, size: int) -> None:
        """Nothing to do: all work on it is synchronous."""

    def map(self, fd: int, device: str, nonce: bytes, *, owned: bool) -> int:
        """Have a memfd in this process; its address."""
        size = os.fstat(fd).st_size
        mapped = mmap.mmap(fd, size)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(mapped)) + self.front_bytes
        self._memories[address] = Memory(fd, mapped, owned, size - self.front_bytes, address, device, nonce)
        return address

    def unmap(self, found: Memory) -> None:
        """Let a memfd go. Breach ``close-under-view`` while a tensor of this process shows it."""
        try:
            found.map.close()
        except BufferError:
            raise self.breach("close-under-view", "memory is closed while a tensor still shows it") from None
        del self._memories[found.address]
        os.close(found.fd)

    def need(self, address: int, *, owned: bool) -> Memory:
        """The memory that begins at an address. Breach ``foreign-address``."""
        found = self._memories.get(address)
        if found is None or found.owned != owned:
            whose = "owns" if owned else "opened"
            raise self.breach("foreign-address", f"{address:#x} is not memory that this process {whose}")
        return found

    def find(self, address: int, size: int) -> tuple[Memory, int]:
        """The memory a range lies in, and where in its file. Breach ``foreign-address``."""
        for found in self._memories.values():
            if found.address <= address and address + size <= found.address + found.size:
                return found, address - found.address + self.front_bytes
        raise self.breach("foreign-address", f"{address:#x} lies in no memory of this process")

    def breach(self, rule: str, text: str) -> errors.ProtocolBreach:
        """The error of a broken rule."""
        return errors.ProtocolBreach(f"{self.name}: {text} (rule {rule})", rule=rule)
