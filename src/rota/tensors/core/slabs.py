"""Ranges of device memory: first fit in slabs, freed ranges join with free neighbours."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field
from typing import Final

from rota.tensors.core.arena import round_up

BLOCK_BYTES: Final = 512
SLAB_BYTES: Final = 256 << 20
SLAB_STEP_BYTES: Final = 2 << 20


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
        size = round_up(max(size, 1), BLOCK_BYTES)
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


def slab_bytes(wanted: int, preferred: int = SLAB_BYTES) -> int:
    """How large a new slab is that must hold ``wanted`` bytes: the preferred size, or whole 2 MiB steps beyond it."""
    return max(preferred, round_up(wanted, SLAB_STEP_BYTES))
