"""Fragmentation gradient descent, best fit, and the placements that they are compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota.cluster.core.admission import hardest
from rota.cluster.core.jobs import Allocations, LiveJob, Slot
from rota.cluster.core.placement import place
from rota.cluster.core.profile import Profile
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.basic import STARVE_S, ByArrival, LimitsOnly

WHOLE = 1000
MIX_SHARE = 0.95
"""The mix are the commonest shapes that make up this part of the tasks."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class TaskShape(NamedTuple):
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

    def __init__(self, tasks: Iterable[TaskShape] | Counter[TaskShape]) -> None:
        counts = tasks if isinstance(tasks, Counter) else Counter(tasks)
        total, taken = counts.total(), 0
        chosen: list[tuple[TaskShape, int]] = []
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
        there, at = np.unique(types, return_inverse=True)
        suits = [not kind.types or int(t) in kind.types for t in there for kind in self.kinds]
        return np.array(suits, dtype=np.bool_).reshape(len(there), len(self.kinds))[at]


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


class FreeNodeTable:
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

    def able(self, kind: TaskShape, mem: int) -> Ints:
        """Rows of the nodes that can take the task now."""
        fits = (self.cpu >= kind.cpu) & (self.mem >= mem)
        if kind.devices:
            fits &= (self.left >= kind.share).sum(axis=1) >= kind.devices
        if kind.types:
            fits &= np.isin(self.type, kind.types)
        return np.flatnonzero(fits)

    def take(self, node: int, kind: TaskShape, mem: int, devices: Sequence[int]) -> None:
        """Give a task these devices of a node, with its cores and memory."""
        self.cpu[node] -= kind.cpu
        self.mem[node] -= mem
        self.left[node, list(devices)] -= kind.share
        self.kinds_on[node].add((kind.devices, kind.share))
        self.log.append(node)


class Gradient:
    """Fragmentation that a task of a kind adds to each node, and the device on which it adds least.

    Answers are kept by kind; only nodes that changed since are computed again.
    """

    def __init__(self, board: FreeNodeTable, mix: Mix) -> None:
        self.board, self.mix = board, mix
        self.allowed = mix.allowed(board.type)
        self.now = fragments(board.cpu, board.left, mix, self.allowed)
        self.upto = 0
        self.known: dict[TaskShape, tuple[int, Floats, Ints]] = {}

    def of(self, kind: TaskShape) -> tuple[Floats, Ints]:
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

    def _rise(self, kind: TaskShape, rows: Ints) -> tuple[Floats, Ints]:
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


Draw = Callable[[int], int]
"""A random number below the given one."""
Scores = Callable[[FreeNodeTable, TaskShape, Ints], Floats]
"""How good each of these nodes is for a task; the highest is taken."""


def _best_fit_score(board: FreeNodeTable, kind: TaskShape, nodes: Ints) -> Floats:
    """Best fit: the least that is left of cores and devices, each as part of the largest node."""
    cpu = (board.cpu[nodes] - kind.cpu) / board.capacity[0]
    gpu = (board.left[nodes].sum(axis=1) - kind.devices * kind.share) / board.capacity[1]
    return -(cpu + gpu)


def _aligned_score(board: FreeNodeTable, kind: TaskShape, nodes: Ints) -> Floats:
    """The smallest product of what is free and what is asked."""
    cpu = board.cpu[nodes] * (kind.cpu / board.capacity[0] ** 2)
    return -(cpu + board.left[nodes].sum(axis=1) * (kind.devices * kind.share / board.capacity[1] ** 2))


def _packed_score(board: FreeNodeTable, kind: TaskShape, nodes: Ints) -> Floats:
    """Devices in use first, then idle ones of nodes in use, then idle nodes; the fullest of equal ones."""
    left = board.left[nodes]
    shared = ((left >= kind.share) & (left < WHOLE)).any(axis=1) & (0 < kind.share < WHOLE)
    begun = np.array([len(board.kinds_on[int(node)]) > 0 for node in nodes], dtype=np.bool_)
    return np.where(shared, 20.0, np.where(begun, 10.0, 0.0)) - left.sum(axis=1) / board.capacity[1]


def _clustered_score(board: FreeNodeTable, kind: TaskShape, nodes: Ints) -> Floats:
    """Nodes that run tasks asking as much of devices first; the fullest of equal ones."""
    alike = np.array([(kind.devices, kind.share) in board.kinds_on[node] for node in nodes], dtype=np.float64)
    return 10 * alike - board.left[nodes].sum(axis=1) / board.capacity[1]


def _equal_score(board: FreeNodeTable, kind: TaskShape, nodes: Ints) -> Floats:
    return np.zeros(len(nodes))


SCORES: dict[str, Scores] = {
    "random": _equal_score,
    "bestfit": _best_fit_score,
    "dotprod": _aligned_score,
    "packing": _packed_score,
    "clustering": _clustered_score,
}
POLICIES = (*SCORES, "fgd")


class Chooser:
    """Picks a node and its devices for one task after the other under a policy by name."""

    def __init__(self, policy: str, board: FreeNodeTable, mix: Mix, draw: Draw) -> None:
        self.policy, self.board, self.draw = policy, board, draw
        self.gradient = Gradient(board, mix) if policy == "fgd" else None

    def choose(self, kind: TaskShape, mem: int) -> tuple[int, tuple[int, ...]] | None:
        """Node and devices, or None if no node has room now."""
        nodes = self.board.able(kind, mem)
        if not len(nodes):
            return None
        if self.gradient is None:
            node = self._best(nodes, SCORES[self.policy](self.board, kind, nodes))
            return node, self._devices(node, kind)
        rise, device = self.gradient.of(kind)
        # Whole numbers, as published: nodes whose rise differs by little count as equal, and the first is filled.
        node = self._best(nodes, np.floor(100 / (1 + np.exp(rise[nodes] / WHOLE))))
        return node, (int(device[node]),) if device[node] >= 0 else self._devices(node, kind)

    def _best(self, nodes: Ints, scores: Floats) -> int:
        """Equal nodes in their order, so that tasks that harm nowhere do not spread; anywhere only under ``random``."""
        best = nodes[scores == scores.max()]
        return int(best[self.draw(len(best)) if self.policy == "random" else 0])

    def _devices(self, node: int, kind: TaskShape) -> tuple[int, ...]:
        """The first idle devices; for a share the fullest that has room, or any under ``random``."""
        left = self.board.left[node]
        able = [g for g in range(len(left)) if int(left[g]) >= kind.share] if kind.devices else []
        if kind.share in (0, WHOLE):
            return tuple(able[: kind.devices])
        return (able[self.draw(len(able))] if self.policy == "random" else min(able, key=lambda g: (int(left[g]), g)),)


class LeastFragments:
    """Every bundle goes where the expected fragmentation, by the mix of jobs that are known, grows least."""

    def place(self, state: State, txn: Txn, row: LiveJob) -> Allocations | None:
        """A place bundle by bundle, each by the least rise in thousandths of devices that the mix cannot use."""
        mix, kind = self._mix(state, txn), _kind(state, hardest(row.ask.shape))
        width = int(np.diff(state.dev0).max(initial=1))

        def rise(state: State, nodes: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Ints:
            places = state.dev0[nodes, None] + np.arange(width)
            there = places < state.dev0[nodes + 1, None]
            places = np.where(there, places, 0)
            left = np.where(there & (state.dev_health[places] == 0), state.dev_milli[places], 0).astype(np.int64)
            allowed = mix.allowed(state.dev_type[state.dev0[nodes]].astype(np.int64))
            cpu = state.cpu[nodes].astype(np.int64)
            before = fragments(cpu, left, mix, allowed)
            order = np.argsort(np.where(left >= max(kind.share, 1), left, 10 * WHOLE), axis=1, kind="stable")
            taken = order[:, : kind.devices]
            np.put_along_axis(left, taken, np.take_along_axis(left, taken, axis=1) - kind.share, axis=1)
            return np.round(1000 * (fragments(cpu - kind.cpu, left, mix, allowed) - before)).astype(np.int64)

        return place(state, txn, row.ask.shape, prefer=rise, close=False)

    def _mix(self, state: State, txn: Txn) -> Mix:
        """The mix of all jobs there are, which a pass does not change."""
        known = txn.notes.get(("mix",))
        if not isinstance(known, Mix):
            shapes = Counter(other.ask.shape for other in state.jobs.values())
            counts = Counter[TaskShape]()
            for shape, jobs in shapes.items():
                for slot, of_shape in Counter(shape.slots).items():
                    counts[_kind(state, slot)] += jobs * of_shape
            known = txn.notes["mix",] = Mix(counts)
        return known


def _kind(state: State, slot: Slot) -> TaskShape:
    types = tuple(state.type_rows(slot.type)) if slot.type else ()
    if slot.gpus:
        return TaskShape(slot.cpu_milli, slot.gpus, WHOLE, types)
    return TaskShape(slot.cpu_milli, int(slot.milli > 0), slot.milli, types)


def fgd() -> Profile:
    """First come, first served; placed by fragmentation gradient descent."""
    return Profile(
        name="fgd", order=ByArrival(), division=LimitsOnly(), placer=LeastFragments(), block="queue", starve_s=STARVE_S
    )


PART = 2**20
"""The largest node, as the unit in which what is left of a node is compared."""


def left_over(state: State, nodes: NDArray[np.int32]) -> NDArray[np.int64]:
    """What is free of devices and of cores, each as part of the node that has most of it.

    Of the nodes that could take one task the one with least now is the one with least after it.
    """
    milli = np.append(np.cumsum(np.append(0, state.dev_milli)), 0)
    devices = milli[state.dev0[nodes + 1]] - milli[state.dev0[nodes]]
    most_devices = 1000 * max(int(np.diff(state.dev0).max(initial=1)), 1)
    most_cores = max(1000.0, *(1000 * node.cpus for node in state.nodes))
    return np.round(PART * (devices / most_devices + state.cpu[nodes] / most_cores)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class LeastLeft:
    """Best fit: every bundle goes to the node that has least left; ties go to the first node."""

    def place(self, state: State, txn: Txn, row: LiveJob) -> Allocations | None:
        """A place bundle by bundle; None if none fits."""
        return place(state, txn, row.ask.shape, prefer=left_over, close=False)


def bestfit() -> Profile:
    """First come, first served; placed where least of devices and cores is left over."""
    return Profile(
        name="bestfit", order=ByArrival(), division=LimitsOnly(), placer=LeastLeft(), block="queue", starve_s=STARVE_S
    )
