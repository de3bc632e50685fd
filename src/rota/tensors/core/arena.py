"""Size classes: how a payload is rounded to a block, and a block laid into a slab or a file of its own.

A payload of at most 1 MiB goes to a block of a shared slab file of about 2 MiB, a larger one to a file of its own. The
number of distinct sizes is small, so a freed block is soon used again while its pages are still in memory: writing to
such a block is several times faster than to fresh pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HEADER_BYTES: Final = 512
PAGE_BYTES: Final = 4096
ALIGN_BYTES: Final = 64
SMALL_BYTES_MAX: Final = 1 << 20
SLAB_BYTES: Final = 2 << 20
SLAB_BLOCKS_MAX: Final = 1024
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
        return SizeClass(block=block, count=min(max(2, SLAB_BYTES // block), SLAB_BLOCKS_MAX))
    block = round_up(front_bytes, PAGE_BYTES) + stepped(payload, _LARGE_STEPS, PAGE_BYTES)
    return SizeClass(block=block, count=1)


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
