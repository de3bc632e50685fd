"""Pure rules of the tensor store: what a name, label, namespace and dtype may be, and how memory is divided.

A payload of at most 1 MiB goes to a block of a shared slab file of about 2 MiB, a larger one to a file of its own. The
number of distinct sizes is small, so a freed block is soon used again while its pages are still in memory: writing to
such a block is several times faster than to fresh pages.
"""

from __future__ import annotations

import math
import operator
import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeAlias

from rota.spec.errors import BadInput

Tensor: TypeAlias = Any
"""A torch tensor or a numpy array: ``as_`` says which one is read; torch is not loaded for its type."""
Json: TypeAlias = Any
"""A JSON value."""
Fields: TypeAlias = "dict[str, Json]"
"""A JSON object: of a message, a manifest or a client file."""
NAME_BYTES_MAX: Final = 240
NAMESPACE: Final = re.compile(r"(?!\.)[a-z0-9._-]{1,64}")
PAYLOAD_BYTES_MAX: Final = 1 << 46
STEP_MAX: Final = 1 << 53
"""The registry's scripts count in doubles."""
EPOCH_MAX: Final = (1 << 32) - 1
WORLD_MAX: Final = (1 << 16) - 1
SLOTS_MAX: Final = 65_535
_SHARD: Final = re.compile(r"\[shard=(\d+)-of-(\d+)\]$")
_LABEL_BYTES_MAX: Final = 240
_NO_UTF8: Final = re.compile("[\ud800-\udfff]")
_CONTROL: Final = re.compile("[\0-\x1f\x7f]")

ITEM_BYTES: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Every dtype that can be shared, by its torch name (numpy names are the same where both have it), with its bytes."""

_SHORT: Final = {"bfloat16": "bf16", "bool": "bool"}


def short_dtype(dtype: str) -> str:
    """``float32`` as ``f32``, ``int8`` as ``i8``, ``bfloat16`` as ``bf16``: how tables show a dtype."""
    if dtype in _SHORT:
        return _SHORT[dtype]
    for long, short in (("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if dtype.startswith(long):
            return short + dtype[len(long) :]
    return dtype


def describe(tensors: Sequence[Sequence[Json]], device: str) -> Fields:
    """What the registry keeps of the shape of tensors (name, dtype, shape, ...): all of one, the number of several."""
    where = {"device": device} if device else {}
    if len(tensors) != 1:
        return {"tensors": len(tensors), **where}
    return {"dtype": short_dtype(tensors[0][1]), "shape": list(tensors[0][2]), **where}


def long_dtype(dtype: str) -> str:
    """``f32`` as ``float32``: what ``short_dtype`` shortened. Raises BadInput for an unknown dtype."""
    for long in ITEM_BYTES:
        if dtype in (long, short_dtype(long)):
            return long
    raise BadInput(f"dtype {dtype!r} is none of {', '.join(map(short_dtype, ITEM_BYTES))}")


def payload_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor. Raises BadInput for an unknown dtype, a negative dimension, or more than 64 TiB (the
    registry's scripts count in doubles)."""
    if dtype not in ITEM_BYTES:
        raise BadInput(f"dtype {dtype!r} is none of {', '.join(ITEM_BYTES)}")
    total = ITEM_BYTES[dtype]
    for size in shape:
        if size < 0:
            raise BadInput(f"shape has the negative dimension {size}")
        total *= size
    if total > PAYLOAD_BYTES_MAX:
        raise BadInput(
            f"a tensor of shape {[*shape]} and {dtype} takes {total} bytes, the limit is {PAYLOAD_BYTES_MAX}"
        )
    return total


def check_count(what: str, value: int, least: int, most: int = STEP_MAX) -> int:
    """``value`` as an int. Raises BadInput, which begins with ``what``, unless it is a whole number in that range."""
    try:
        number = operator.index(value)
    except TypeError:
        raise BadInput(f"{what}={value!r} is not a whole number") from None
    if not least <= number <= most:
        raise BadInput(f"{what}={number} is not in {least} to {most}")
    return number


def check_only(what: str, value: str, only: str, remedy: str) -> None:
    """Raise BadInput, with what to do instead, for any ``value`` but the one that is supported."""
    if value != only:
        raise BadInput(f"{what}={value!r} is not supported, {only!r} is: {remedy}")


def count_of(what: str, text: str, least: int, most: int) -> int:
    """The whole number that a setting writes. Raises BadInput as ``check_count``."""
    if not text.isdecimal():
        raise BadInput(f"{what}={text!r} is not a whole number, {least} to {most}")
    return check_count(what, int(text), least, most)


def check_seconds(what: str, value: float) -> float:
    """``value`` itself. Raises BadInput unless it is a number: every wait has a limit."""
    try:
        if not math.isnan(value):
            return value
    except TypeError:
        pass
    raise BadInput(f"{what}={value!r} is not a number of seconds")


def check_shape(shape: Sequence[int] | int) -> tuple[int, ...]:
    """``shape`` as a tuple of ints. Raises BadInput."""
    try:
        return tuple(operator.index(size) for size in ((shape,) if isinstance(shape, int) else shape))
    except TypeError:
        raise BadInput(f"shape={shape!r} is not whole numbers") from None


def check_name(name: str) -> str:
    """``name`` itself. Raises BadInput when empty, over 240 bytes, with control characters or what no UTF-8 says, a
    level ``.`` or ``..``, or a bad shard suffix."""
    if not isinstance(name, str) or _NO_UTF8.search(name):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise BadInput(f"tensor name {name!r}: a name is text of UTF-8")
    if {".", ".."} & set(name.split("/")):
        raise BadInput(f"tensor name {name!r}: no level may be . or ..")
    if not name or name.startswith("/") or name.endswith("/") or "//" in name:
        raise BadInput(f"tensor name {name!r}: levels between / must not be empty")
    size = len(name.encode())
    if size > NAME_BYTES_MAX:
        raise BadInput(f"tensor name {name[:40]!r}...: {size} bytes, the limit is {NAME_BYTES_MAX}")
    if _CONTROL.search(name):
        raise BadInput(f"tensor name {name!r}: control characters are not allowed")
    if "[shard=" in name:
        shard_of(name)
    return name


def check_namespace(namespace: str) -> str:
    """``namespace`` itself. Raises BadInput unless it is 1 to 64 of ``a-z 0-9 . _ -``, the first no dot (a folder)."""
    if not isinstance(namespace, str) or not NAMESPACE.fullmatch(namespace):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise BadInput(f"namespace {namespace!r}: 1 to 64 characters of a-z 0-9 . _ -, the first no dot")
    return namespace


def check_label(label: str) -> str:
    """``label`` itself: who publishes, a job or ``job/role/rank``. Raises BadInput over 240 bytes or with spaces."""
    text = isinstance(label, str) and label.isprintable()  # pyright: ignore[reportUnnecessaryIsInstance]  # as above
    if not text or " " in label or len(label.encode()) > _LABEL_BYTES_MAX:
        raise BadInput(f"label {label!r}: at most {_LABEL_BYTES_MAX} bytes, no spaces")
    return label


def label_covers(prefix: str, label: str) -> bool:
    """True when ``label`` is ``prefix`` or lies below it: ``job`` covers ``job/actor/0`` but not ``job2``."""
    return label == prefix or label.startswith(prefix + "/")


def shard_of(name: str) -> tuple[int, int] | None:
    """``(i, n)`` of a ``[shard=i-of-n]`` suffix, None without one. Raises BadInput for a malformed one."""
    if "[shard=" not in name:
        return None
    found = _SHARD.search(name)
    if not found or not int(found[1]) < int(found[2]):
        raise BadInput(f"tensor name {name!r}: a shard suffix reads [shard=i-of-n] with i < n, at the end")
    return int(found[1]), int(found[2])


HEADER_BYTES: Final = 512
PAGE_BYTES: Final = 4096
ALIGN_BYTES: Final = 64
SMALL_BYTES_MAX: Final = 1 << 20
SLAB_BYTES: Final = 2 << 20
SLAB_BLOCKS_MAX: Final = 1024
DEVICE_HANDLE_BYTES: Final = 64
DEVICE_BLOCK_BYTES: Final = 512
DEVICE_SLAB_BYTES: Final = 256 << 20
DEVICE_SLAB_STEP_BYTES: Final = 2 << 20
_SMALL_STEPS: Final = 4
_LARGE_STEPS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeClass:
    """How blocks of one size lie in files: ``block`` bytes each, ``count`` of them in a file of ``file`` bytes."""

    block: int
    count: int

    @property
    def file(self) -> int:
        return round_up(self.block * self.count, PAGE_BYTES)


def round_up(value: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``value``."""
    return -(-value // step) * step


def stepped(value: int, steps: int, quantum: int) -> int:
    """``value`` rounded up to one of ``steps`` sizes an octave, each a multiple of ``quantum``.

    The waste is below ``1/steps`` of the value (plus one quantum), the number of sizes grows with the logarithm.
    """
    if value <= quantum:
        return quantum
    octave = 1 << ((value - 1).bit_length() - 1)
    return round_up(round_up(value, max(octave // steps, 1)), quantum)


@lru_cache(1024)
def size_class(front_bytes: int, payload: int) -> SizeClass:
    """The class of a block with ``front_bytes`` of header and manifest before ``payload`` bytes.

    Four steps an octave up to 1 MiB, sixteen above (a quarter of a large tensor is too much to waste).
    """
    if payload <= SMALL_BYTES_MAX:
        block = round_up(front_bytes, ALIGN_BYTES) + stepped(payload, _SMALL_STEPS, ALIGN_BYTES)
        block = stepped(block, _LARGE_STEPS, ALIGN_BYTES) if front_bytes > 2 * HEADER_BYTES else block
        return SizeClass(block=block, count=blocks_in_slab(block))
    block = round_up(front_bytes, PAGE_BYTES) + stepped(payload, _LARGE_STEPS, PAGE_BYTES)
    return SizeClass(block=block, count=1)


def blocks_in_slab(block: int) -> int:
    """How many blocks of a size a shared slab file holds."""
    return min(max(2, SLAB_BYTES // block), SLAB_BLOCKS_MAX)


def payload_offset(front_bytes: int, payload: int) -> int:
    """Where the payload begins in its block: 64-byte aligned in slabs, page aligned in files of their own."""
    return round_up(front_bytes, ALIGN_BYTES if payload <= SMALL_BYTES_MAX else PAGE_BYTES)


def pack(sizes: list[int]) -> tuple[list[int], int]:
    """Offsets of tensors of these sizes laid one after the other, 64-byte aligned, and the bytes they take in all."""
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end = round_up(end + size, ALIGN_BYTES)
    return offsets, end


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """A range of one slab."""

    slab: str
    offset: int
    size: int


@dataclass(slots=True)
class Slabs:
    """Slabs by name, in the order they came, with their free ranges as sorted ``[offset, size]``."""

    sizes: dict[str, int] = field(default_factory=dict[str, int])
    _free: dict[str, list[list[int]]] = field(default_factory=dict[str, list[list[int]]])

    def add(self, slab: str, size: int) -> None:
        """A new slab, wholly free."""
        self.sizes[slab] = size
        self._free[slab] = [[0, size]]

    def remove(self, slab: str) -> None:
        """Forget a slab."""
        del self.sizes[slab], self._free[slab]

    def take(self, size: int) -> Range | None:
        """The first free range that is large enough, 512-byte aligned; None when there is none."""
        size = round_up(max(size, 1), DEVICE_BLOCK_BYTES)
        for slab, free in self._free.items():
            for index, (offset, length) in enumerate(free):
                if length >= size:
                    free[index : index + 1] = [[offset + size, length - size]] if length > size else []
                    return Range(slab, offset, size)
        return None

    def give(self, taken: Range) -> None:
        """Free a range that was taken."""
        free = self._free[taken.slab]
        at = bisect(free, [taken.offset])
        free.insert(at, [taken.offset, taken.size])
        for left in (at, at - 1):  # join with the neighbour behind, then with the one before
            if 0 <= left < len(free) - 1 and sum(free[left]) == free[left + 1][0]:
                free[left][1] += free.pop(left + 1)[1]

    def idle(self) -> list[str]:
        """Slabs that are wholly free."""
        return [slab for slab, free in self._free.items() if free == [[0, self.sizes[slab]]]]

    @property
    def free_bytes(self) -> int:
        """Bytes in free ranges."""
        return sum(size for free in self._free.values() for _, size in free)


def slab_bytes(wanted: int, preferred: int = DEVICE_SLAB_BYTES) -> int:
    """How large a new slab is that must hold ``wanted`` bytes: the preferred size, or whole 2 MiB steps beyond it."""
    return max(preferred, round_up(wanted, DEVICE_SLAB_STEP_BYTES))
