"""CUDA through the driver's own library: slabs by cuMemAlloc, exported as IPC handles, in the context torch uses too.

Only ``libcuda`` is needed, which every machine with an NVIDIA driver has. Memory is allocated plainly: what torch's
allocators hand out (expandable segments, cudaMallocAsync) has no IPC handle.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from functools import cached_property
from typing import TYPE_CHECKING, Final

from rota.tensors import errors
from rota.tensors.core import DEVICE_HANDLE_BYTES, DEVICE_SLAB_BYTES

if TYPE_CHECKING:
    import torch

_OUT_OF_MEMORY: Final = 2
_LAZY_PEER_ACCESS: Final = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * DEVICE_HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class DeviceMemory:
    """A range of device memory as torch and others read it; ``lease`` is kept alive by every tensor built on it."""

    def __init__(self, address: int, size: int) -> None:
        self.lease: object = None
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3, "stream": None,
        }  # fmt: skip


class Cuda:
    """The driver of this process; a forked child may not use its parent's."""

    name = "cuda"
    host = False
    slab_bytes = DEVICE_SLAB_BYTES

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._uuids: list[str] = []
        self._devices: dict[int, int] = {}
        self._contexts: dict[int, ctypes.c_void_p] = {}

    @cached_property
    def _library(self) -> ctypes.CDLL:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise errors.IpcUnavailable(f"no CUDA driver on this machine: {error}") from None
        for name, kinds in _SIGNATURES.items():
            getattr(library, name).argtypes = kinds
        if library.cuInit(0):
            raise errors.IpcUnavailable("the CUDA driver finds no device that this process may use")
        return library

    def uuids(self) -> list[str]:
        """``GPU-...`` of each device, in the order of CUDA_VISIBLE_DEVICES."""
        if os.getpid() != self._pid:
            raise errors.ProtocolBreach("CUDA does not survive a fork: start the process anew (spawn)", rule="fork")
        if not self._uuids:  # they stay the same as long as a process lives
            count = ctypes.c_int()
            self._call("cuDeviceGetCount", ctypes.byref(count))
            self._uuids = [self._uuid(ordinal) for ordinal in range(count.value)]
        return self._uuids

    def allocate(self, device: int, size: int) -> int:
        """A slab. Raises OutOfMemory."""
        self._enter(device)
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        self._devices[address.value] = device
        return address.value

    def free(self, address: int) -> None:
        """Free a slab."""
        self._enter(self._devices.pop(address))
        self._call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """The IPC handle of a slab."""
        self._enter(self._devices[address])
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.reserved)

    def open(self, device: int, handle: bytes) -> int:
        """Map a slab of another process. Raises IpcUnavailable with the driver's words."""
        self._enter(device)
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, _LAZY_PEER_ACCESS)
        self._devices[address.value] = device
        return address.value

    def close(self, address: int) -> None:
        """Unmap a slab of another process."""
        self._enter(self._devices.pop(address))
        self._call("cuIpcCloseMemHandle", address)

    def memory(self, address: int, size: int) -> DeviceMemory:
        """A range with the array interface of CUDA."""
        return DeviceMemory(address, size)

    def flat(self, memory: DeviceMemory, device: int) -> torch.Tensor:
        """A torch tensor on the device, the same bytes."""
        torch = importlib.import_module("torch")
        return torch.as_tensor(memory, device=f"cuda:{device}")

    def stream(self, device: int) -> torch.cuda.Stream:
        """Torch's current stream of this thread."""
        torch = importlib.import_module("torch")
        return torch.cuda.current_stream(device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """A torch event behind the work so far."""
        event = importlib.import_module("torch").cuda.Event()
        event.record(stream)
        return event

    def is_done(self, event: torch.cuda.Event) -> bool:
        """True when the device has passed the event."""
        return event.query()

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait until the device has passed the event."""
        event.synchronize()

    def reuse(self, address: int, size: int) -> None:
        """Nothing to do: releases wait for their events."""

    def _uuid(self, ordinal: int) -> str:
        device, raw = ctypes.c_int(), _Uuid()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)  # of the MIG slice, where there is one
        text = bytes(raw.bytes).hex()
        return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def _enter(self, ordinal: int) -> None:
        """Make the primary context of a device current: the one torch works in."""
        if ordinal not in self._contexts:
            self.uuids()
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), ordinal)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[ordinal] = context
        self._call("cuCtxSetCurrent", self._contexts[ordinal])

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._library, name)(*args)
        if code == _OUT_OF_MEMORY:
            raise errors.OutOfMemory(f"{name}: the device has no memory left")
        if code:
            text = ctypes.c_char_p()
            with contextlib.suppress(AttributeError):
                self._library.cuGetErrorString(code, ctypes.byref(text))
            why = (text.value or b"?").decode()
            namespaces = ", ".join(f"{kind} {os.readlink(f'/proc/self/ns/{kind}')}" for kind in ("pid", "ipc"))  # noqa: PTH115  # a magic link
            raise errors.IpcUnavailable(
                f"{name}: {why} (error {code}; namespaces: {namespaces})",
                hint="sharing processes need one PID and one IPC namespace (docker run --pid --ipc)",
            )


_POINTER: Final = ctypes.c_void_p
_SIGNATURES: Final[dict[str, tuple[type, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (_POINTER,),
    "cuDeviceGet": (_POINTER, ctypes.c_int),
    "cuDeviceGetUuid_v2": (_POINTER, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_POINTER, ctypes.c_int),
    "cuCtxSetCurrent": (_POINTER,),
    "cuMemAlloc_v2": (_POINTER, ctypes.c_size_t),
    "cuMemFree_v2": (ctypes.c_uint64,),
    "cuIpcGetMemHandle": (_POINTER, ctypes.c_uint64),
    "cuIpcOpenMemHandle_v2": (_POINTER, _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (ctypes.c_uint64,),
    "cuGetErrorString": (ctypes.c_int, _POINTER),
}
