"""Size classes: how a payload is rounded to a block, and a block laid into a slab or a file of its own.

A payload of at most 1 MiB goes to a block of a shared slab file of about 2 MiB, a larger one to a file of its own. The
number of distinct sizes is small, so a freed block is soon used again while its pages are still in memory: writing to
such a block is several times faster than to fresh pages.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field
from typing import Final

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
