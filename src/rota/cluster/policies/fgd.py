"""Fragmentation gradient descent, best fit, and the placements that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rota.cluster.core.admission import hardest
from rota.cluster.core.jobs import Held, JobRow, Slot
from rota.cluster.core.placement import place
from rota.cluster.core.profile import Profile
from rota.cluster.core.scoring import WHOLE, Board, Floats, Gradient, Ints, Kind, Mix, fragments
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.fifo import ByArrival, LimitsOnly

Draw = Callable[[int], int]
"""A random number below the given one."""
Scores = Callable[[Board, Kind, Ints], Floats]
"""How good each of these nodes is for a task; the highest is taken."""


def _remaining(board: Board, kind: Kind, nodes: Ints) -> Floats:
    """Best fit: the least that is left of cores and devices, each as part of the largest node."""
    cpu = (board.cpu[nodes] - kind.cpu) / board.capacity[0]
    gpu = (board.left[nodes].sum(axis=1) - kind.devices * kind.share) / board.capacity[1]
    return -(cpu + gpu)


def _alignment(board: Board, kind: Kind, nodes: Ints) -> Floats:
    """The smallest product of what is free and what is asked."""
    cpu = board.cpu[nodes] * (kind.cpu / board.capacity[0] ** 2)
    return -(cpu + board.left[nodes].sum(axis=1) * (kind.devices * kind.share / board.capacity[1] ** 2))


def _packing(board: Board, kind: Kind, nodes: Ints) -> Floats:
    """Devices in use first, then idle ones of nodes in use, then idle nodes; the fullest of equal ones."""
    left = board.left[nodes]
    shared = ((left >= kind.share) & (left < WHOLE)).any(axis=1) & (0 < kind.share < WHOLE)
    begun = np.array([len(board.kinds_on[int(node)]) > 0 for node in nodes], dtype=np.bool_)
    return np.where(shared, 20.0, np.where(begun, 10.0, 0.0)) - left.sum(axis=1) / board.capacity[1]


def _clustering(board: Board, kind: Kind, nodes: Ints) -> Floats:
    """Nodes that run tasks asking as much of devices first; the fullest of equal ones."""
    alike = np.array([(kind.devices, kind.share) in board.kinds_on[node] for node in nodes], dtype=np.float64)
    return 10 * alike - board.left[nodes].sum(axis=1) / board.capacity[1]


def _anywhere(board: Board, kind: Kind, nodes: Ints) -> Floats:
    return np.zeros(len(nodes))


SCORES: dict[str, Scores] = {
    "random": _anywhere,
    "bestfit": _remaining,
    "dotprod": _alignment,
    "packing": _packing,
    "clustering": _clustering,
}
POLICIES = (*SCORES, "fgd")


class Chooser:
    """Picks a node and its devices for one task after the other under a policy by name."""

    def __init__(self, policy: str, board: Board, mix: Mix, draw: Draw) -> None:
        self.policy, self.board, self.draw = policy, board, draw
        self.gradient = Gradient(board, mix) if policy == "fgd" else None

    def choose(self, kind: Kind, mem: int) -> tuple[int, tuple[int, ...]] | None:
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

    def _devices(self, node: int, kind: Kind) -> tuple[int, ...]:
        """The first idle devices; for a share the fullest that has room, or any under ``random``."""
        left = self.board.left[node]
        able = [g for g in range(len(left)) if int(left[g]) >= kind.share] if kind.devices else []
        if kind.share in (0, WHOLE):
            return tuple(able[: kind.devices])
        return (able[self.draw(len(able))] if self.policy == "random" else min(able, key=lambda g: (int(left[g]), g)),)


class LeastFragments:
    """Every bundle goes where the expected fragmentation, by the mix of jobs that are known, grows least."""

    def place(self, state: State, txn: Txn, row: JobRow) -> tuple[Held, ...] | None:
        mix = Mix(_kind(state, slot) for other in state.jobs.values() for slot in other.ask.shape.slots)
        kind = _kind(state, hardest(row.ask.shape))
        width = int(np.diff(state.dev0).max(initial=1))

        def rise(state: State, nodes: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Ints:
            left = np.zeros((len(nodes), width), dtype=np.int64)
            for at, node in enumerate(nodes):
                rows = slice(int(state.dev0[node]), int(state.dev0[node + 1]))
                left[at, : rows.stop - rows.start] = np.where(state.dev_health[rows] == 0, state.dev_milli[rows], 0)
            allowed = mix.allowed(state.dev_type[state.dev0[nodes]].astype(np.int64))
            cpu = state.cpu[nodes].astype(np.int64)
            before = fragments(cpu, left, mix, allowed)
            order = np.argsort(np.where(left >= max(kind.share, 1), left, 10 * WHOLE), axis=1, kind="stable")
            for at in range(len(nodes)):
                left[at, order[at, : kind.devices]] -= kind.share
            return np.round(1000 * (fragments(cpu - kind.cpu, left, mix, allowed) - before)).astype(np.int64)

        return place(state, txn, row.ask.shape, prefer=rise, close=False)


def _kind(state: State, slot: Slot) -> Kind:
    types = tuple(state.type_rows(slot.type)) if slot.type else ()
    if slot.gpus:
        return Kind(slot.cpu_milli, slot.gpus, WHOLE, types)
    return Kind(slot.cpu_milli, int(slot.milli > 0), slot.milli, types)


def fgd() -> Profile:
    """First come, first served; placed by fragmentation gradient descent."""
    return Profile(name="fgd", order=ByArrival(), division=LimitsOnly(), placer=LeastFragments(), block="queue")


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
    """Every bundle goes to the node that has least left; of equal nodes to the first."""

    def place(self, state: State, txn: Txn, row: JobRow) -> tuple[Held, ...] | None:
        return place(state, txn, row.ask.shape, prefer=left_over, close=False)


def bestfit() -> Profile:
    """First come, first served; placed where least of devices and cores is left over."""
    return Profile(name="bestfit", order=ByArrival(), division=LimitsOnly(), placer=LeastLeft(), block="queue")
