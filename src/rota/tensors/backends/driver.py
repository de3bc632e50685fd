"""The protocol of a device driver.

Addresses are numbers, valid in this process alone. A handle is 64 bytes that another process opens. A stream is what a
driver says it is; an event marks how far a stream had come.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

HANDLE_BYTES: Final = 64


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
        """Give memory back that no other process has open."""
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

    def memory(self, address: int, size: int) -> Any:
        """A range as an object to build tensors on; what is set as its ``lease`` lives as long as they do."""
        ...

    def flat(self, memory: Any, device: int) -> Any:
        """A torch uint8 tensor over ``memory``."""
        ...

    def stream(self, device: int) -> Any:
        """The stream that this thread's work goes to."""
        ...

    def record(self, stream: Any) -> Any:
        """An event: all work given to the stream so far."""
        ...

    def is_done(self, event: Any) -> bool:
        """True when that work is done."""
        ...

    def wait(self, event: Any) -> None:
        """Block until that work is done."""
        ...

    def reuse(self, address: int, size: int) -> None:
        """A block gets a new owner: nobody may still use it."""
        ...
