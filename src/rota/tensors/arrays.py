"""Torch tensors and numpy arrays as bytes, and bytes as views again; the only file that knows torch, and loads it late.

Torch is looked up by name when the first torch tensor comes or is asked for: a process that shares numpy arrays alone,
and the service, which only lists names, never pay for it.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import sys
import warnings
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from rota.spec.errors import BadInput, MissingExtra
from rota.tensors import errors
from rota.tensors.core import ITEM_BYTES, Tensor

if TYPE_CHECKING:
    import ctypes

    import torch

Holder: TypeAlias = "mmap.mmap | ctypes.Array[ctypes.c_ubyte]"
"""What keeps the memory of a block: every view of it refers to its holder."""
Bytes: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to publish: its dtype and shape by name, its contiguous bytes (a numpy array, on a device a tensor)."""

    dtype: str
    shape: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """One tensor inside a payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@cache
def load_torch() -> ModuleType:
    """The torch module. Raises MissingExtra when it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise MissingExtra("torch is not installed", hint="pip install 'rota[engine]', or ask as_='numpy'") from error


def is_torch(value: object) -> bool:
    """True for a torch tensor; never loads torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def source_of(value: Tensor, *, device: bool = False) -> TensorSource:
    """Bytes of a dense tensor or array, contiguous and on the CPU; for a ``device`` as a tensor where it is.

    Raises UnsupportedTensor for any other.
    """
    if device:
        return _torch_source(value if is_torch(value) else load_torch().from_numpy(np.asarray(value)), device=True)
    if is_torch(value):
        return _torch_source(value)
    masked = sys.modules.get("numpy.ma")  # not imported here: a signal may come in the middle of an import
    if masked is not None and isinstance(value, masked.MaskedArray):
        hint = "share value.filled(...), or value.data and value.mask under two names"
        raise errors.UnsupportedTensor("a masked array cannot be shared", hint=hint, layout="masked")
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise errors.UnsupportedTensor(f"no dense array: {error}", dtype="", layout="numpy") from None
    name = _numpy_name(array.dtype)
    if name not in ITEM_BYTES or not array.dtype.isnative:
        raise errors.UnsupportedTensor(
            f"numpy dtype {array.dtype} cannot be shared", dtype=str(array.dtype), layout="numpy"
        )
    return TensorSource(name, array.shape, _as_bytes(np.ascontiguousarray(array)))


def view_of(layout: Layout, holder: Holder, base: int, as_: str) -> Tensor:
    """A tensor (``torch``) or array (``numpy``) over the holder's bytes, keeping the holder alive."""
    if as_ == "torch":
        return _torch_view(layout, holder, base)
    if as_ != "numpy":
        raise BadInput(f"as_={as_!r}: torch or numpy")
    if not hasattr(np, layout.dtype if layout.dtype != "bool" else "bool_"):
        text = f"{layout.name}: numpy has no dtype {layout.dtype}"
        raise errors.UnsupportedTensor(text, hint="read it as_='torch'", dtype=layout.dtype, layout="numpy")
    if layout.bytes == 0:
        return np.empty(layout.shape, layout.dtype)
    return np.ndarray(layout.shape, layout.dtype, holder, base + layout.offset)  # pyright: ignore[reportArgumentType]  # ctypes arrays are buffers


def dtype_name(dtype: object) -> str:
    """The name of a torch or numpy dtype, or of a text. Raises UnsupportedTensor for one that cannot be shared."""
    name = dtype if isinstance(dtype, str) else str(dtype)
    name = name.removeprefix("torch.")
    if name not in ITEM_BYTES and dtype is not None:  # which numpy takes for float64
        with contextlib.suppress(TypeError):
            name = np.dtype(dtype).name  # pyright: ignore[reportArgumentType, reportCallIssue]  # what numpy takes, or TypeError
    if name not in ITEM_BYTES:
        raise errors.UnsupportedTensor(f"dtype {dtype!r} is none of {', '.join(ITEM_BYTES)}", dtype=str(dtype))
    return name


def address_of(value: Tensor) -> int:
    """Where the bytes of a tensor or array begin in this process. Raises UnsupportedTensor for what is neither."""
    if is_torch(value):
        return value.data_ptr()
    if not isinstance(value, np.ndarray):
        raise errors.UnsupportedTensor(f"{type(value).__name__} is neither a tensor nor an array")
    return value.__array_interface__["data"][0]


@lru_cache(64)
def _numpy_name(dtype: np.dtype[np.generic]) -> str:
    """The name of a dtype, which numpy puts together anew at each look."""
    return dtype.name


def _as_bytes(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _torch_source(value: Tensor, *, device: bool = False) -> TensorSource:
    torch = load_torch()
    dtype = _torch_name(value.dtype)
    if (
        value.layout is not torch.strided
        or dtype not in ITEM_BYTES
        or value.is_quantized
        or value.is_meta
        or value.is_nested
    ):
        layout = str(value.layout).removeprefix("torch.")
        kind = "meta" if value.is_meta else "nested" if value.is_nested else layout
        hint = "it has no values: give it some first" if value.is_meta else ""
        raise errors.UnsupportedTensor(
            f"a {kind} tensor of {dtype} cannot be shared", hint=hint, dtype=dtype, layout=layout
        )
    plain = value.detach()
    if type(plain) is not torch.Tensor and hasattr(plain, "to_local"):  # a DTensor: this rank's shard
        plain = plain.to_local()
    plain = (plain if device else plain.cpu()).contiguous()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    row = plain.reshape(-1).as_strided((plain.numel(),), (1,))  # one element is contiguous with any stride
    flat = row.view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
    return TensorSource(dtype, tuple(plain.shape), flat if device else flat.numpy())


def view_in(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor that a layout describes in a uint8 tensor; its memory stays as long as either lives."""
    dtype = _torch_dtype(layout.dtype)
    if layout.bytes == 0:
        return load_torch().empty(layout.shape, dtype=dtype, device=flat.device)
    part = flat[layout.offset : layout.offset + layout.bytes]
    if dtype is not flat.dtype:
        part = part.view(dtype)
    return part if part.shape == layout.shape else part.view(layout.shape)


@cache
def _torch_name(dtype: torch.dtype) -> str:
    """The name of a dtype, which torch puts together anew at each look."""
    return str(dtype).removeprefix("torch.")


@cache
def _torch_dtype(name: str) -> torch.dtype:
    return getattr(load_torch(), name)


def _torch_view(layout: Layout, holder: Holder, base: int) -> torch.Tensor:
    torch = load_torch()
    dtype, start = _torch_dtype(layout.dtype), base + layout.offset
    if layout.bytes == 0:
        return torch.empty(layout.shape, dtype=dtype)
    count = layout.bytes // ITEM_BYTES[layout.dtype]
    if isinstance(holder, mmap.mmap):
        # torch says once that it cannot mark a tensor read-only; in sealed mode the page protection does
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            flat = torch.frombuffer(holder, dtype=dtype, count=count, offset=start)
    else:
        flat = torch.frombuffer(holder, dtype=dtype, count=count, offset=start)
    return flat if layout.shape == (count,) else flat.view(layout.shape)
