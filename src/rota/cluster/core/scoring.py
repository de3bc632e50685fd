"""Scores of nodes: expected fragmentation by a task mix, affinity to one size of job, and how free devices lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WHOLE = 1000
MIX_SHARE = 0.95
"""The mix are the commonest shapes that make up this part of the tasks."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Kind(NamedTuple):
    """What a task asks: thousandths of cores, how many devices, thousandths of each (1000: whole), allowed types."""

    cpu: int
    devices: int
    share: int
    types: tuple[int, ...] = ()


class Mix:
    """The typical tasks: shapes with their frequency, as arrays; ``p`` sums to 1.

    Distinct shapes by descending count until they make up ``MIX_SHARE`` of all tasks, then renormalised. Source:
    Fragmentation Gradient Descent (ATC'23), section 3.2.
    """

    def __init__(self, tasks: Iterable[Kind]) -> None:
        counts = Counter(tasks)
        total, taken = counts.total(), 0
        chosen: list[tuple[Kind, int]] = []
        for kind, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            if taken >= MIX_SHARE * total:
                break
            chosen.append((kind, n))
            taken += n
        self.kinds = tuple(kind for kind, _ in chosen)
        self.p: Floats = np.array([n for _, n in chosen], dtype=np.float64) / max(taken, 1)
        self.cpu: Ints = np.array([kind.cpu for kind in self.kinds], dtype=np.int64)
        self.count: Ints = np.array([kind.devices for kind in self.kinds], dtype=np.int64)
        shares = np.array([kind.share for kind in self.kinds], dtype=np.int64)
        self.levels, self.level = np.unique(shares, return_inverse=True)

    def allowed(self, types: Ints) -> NDArray[np.bool_]:
        """Per node of these types and per shape: whether the type suits it."""
        suits = [not kind.types or int(t) in kind.types for t in types for kind in self.kinds]
        return np.array(suits, dtype=np.bool_).reshape(len(types), len(self.kinds))


def fragments(cpu: Ints, left: Ints, mix: Mix, allowed: NDArray[np.bool_]) -> Floats:
    """Expected unusable idle thousandths of devices of each node, given free cores and what is left of its devices.

    ``cpu`` [B], ``left`` [B, G], ``allowed`` [B, M]. For a shape that asks no device, or that the node cannot take
    (cores, type, enough devices), all idle counts; else only devices with less left than it asks of one. Averaged over
    the mix. Source: Fragmentation Gradient Descent (ATC'23), equations 1 to 3.
    """
    enough = left[:, :, None] >= mix.levels
    fitting = enough.sum(axis=1)[:, mix.level]
    small = np.where(enough, 0, left[:, :, None]).sum(axis=1)[:, mix.level]
    takes = (mix.count > 0) & (cpu[:, None] >= mix.cpu) & (fitting >= mix.count) & allowed
    idle: Ints = left.sum(axis=1)[:, None]
    unusable: Floats = np.asarray(np.where(takes, small, idle), dtype=np.float64)
    # Rounded, so that a sum does not depend on how many nodes are computed at once.
    expected: Floats = np.einsum("bm,m->b", unusable, mix.p)
    return np.round(expected, 6)


class Board:
    """Free cores and memory of nodes, and what is left of their devices in thousandths; absent devices have none.

    ``cpu``, ``mem``, ``type`` [N]; ``left`` [N, G]. ``log`` lists the nodes that changed, in order.
    """

    def __init__(self, cpu: Sequence[int], mem: Sequence[int], gpus: Sequence[int], types: Sequence[int]) -> None:
        self.cpu: Ints = np.array(cpu, dtype=np.int64)
        self.mem: Ints = np.array(mem, dtype=np.int64)
        self.type: Ints = np.array(types, dtype=np.int64)
        width = max(gpus, default=1) or 1
        self.left: Ints = np.where(np.arange(width) < np.array(gpus)[:, None], WHOLE, 0).astype(np.int64)
        self.capacity = (max(int(self.cpu.max()), 1), max(int(self.left.sum(axis=1).max()), 1))
        self.total = int(self.left.sum())
        self.kinds_on: list[set[tuple[int, int]]] = [set() for _ in cpu]
        self.log: list[int] = []

    def able(self, kind: Kind, mem: int) -> Ints:
        """Rows of the nodes that can take the task now."""
        fits = (self.cpu >= kind.cpu) & (self.mem >= mem)
        if kind.devices:
            fits &= (self.left >= kind.share).sum(axis=1) >= kind.devices
        if kind.types:
            fits &= np.isin(self.type, kind.types)
        return np.flatnonzero(fits)

    def take(self, node: int, kind: Kind, mem: int, devices: Sequence[int]) -> None:
        """Give a task these devices of a node, with its cores and memory."""
        self.cpu[node] -= kind.cpu
        self.mem[node] -= mem
        self.left[node, list(devices)] -= kind.share
        self.kinds_on[node].add((kind.devices, kind.share))
        self.log.append(node)


class Gradient:
    """By how much a task of a kind would raise the fragmentation of each node, and on which device that is least.

    Answers are kept by kind; only nodes that changed since are computed again.
    """

    def __init__(self, board: Board, mix: Mix) -> None:
        self.board, self.mix = board, mix
        self.allowed = mix.allowed(board.type)
        self.now = fragments(board.cpu, board.left, mix, self.allowed)
        self.upto = 0
        self.known: dict[Kind, tuple[int, Floats, Ints]] = {}

    def of(self, kind: Kind) -> tuple[Floats, Ints]:
        """Rise per node (infinite where no device has room) and the first best device, -1 for tasks of whole ones."""
        board = self.board
        end = len(board.log)
        fresh = np.unique(np.array(board.log[self.upto :], dtype=np.int64))
        if len(fresh):
            self.now[fresh] = fragments(board.cpu[fresh], board.left[fresh], self.mix, self.allowed[fresh])
            self.upto = end
        seen, rise, device = self.known.get(kind, (0, np.full(len(board.cpu), np.inf), np.full(len(board.cpu), -1)))
        rows = np.unique(np.array(board.log[seen:], dtype=np.int64)) if kind in self.known else np.arange(len(rise))
        if len(rows):
            rise[rows], device[rows] = self._rise(kind, rows)
        self.known[kind] = (end, rise, device)
        return rise, device

    def _rise(self, kind: Kind, rows: Ints) -> tuple[Floats, Ints]:
        board = self.board
        cpu = board.cpu[rows] - kind.cpu
        if kind.devices == 0 or kind.share == WHOLE:
            left = board.left[rows].copy()
            idle = (left == WHOLE) & (np.cumsum(left == WHOLE, axis=1) <= kind.devices)
            left[idle] = 0
            after = fragments(cpu, left, self.mix, self.allowed[rows])
            return np.round(after - self.now[rows], 6), np.full(len(rows), -1)
        best, device = np.full(len(rows), np.inf), np.full(len(rows), -1)
        for g in range(board.left.shape[1]):
            left = board.left[rows]
            able = np.flatnonzero(left[:, g] >= kind.share)
            if len(able):
                tried = left[able].copy()
                tried[:, g] -= kind.share
                rise = np.round(
                    fragments(cpu[able], tried, self.mix, self.allowed[rows[able]]) - self.now[rows[able]], 6
                )
                better = rise < best[able]
                best[able[better]], device[able[better]] = rise[better], g
        return best, device


def kinship(sizes: Collection[int], gpus: int) -> int:
    """0 for a node that has jobs of this size, 1 for one without jobs, 2 for one with others."""
    return 0 if gpus in sizes else 2 if sizes else 1


def potential(free: Sequence[int]) -> int:
    """Minus the sum of the squares of what is free on each node: lowest where free devices lie together.

    Moving ``g`` devices from a node with ``s`` free to one with ``t`` changes it by ``2 g (t - s - g)``. It is a whole
    number with a least value, so moves that lower it come to an end.
    """
    return -sum(devices * devices for devices in free)
