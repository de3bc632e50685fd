"""Place where least is left over of devices and cores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rota.cluster.core.placement import place
from rota.cluster.core.plugins import Profile
from rota.cluster.core.rows import Held, JobRow
from rota.cluster.core.snapshot import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.fifo import ByArrival, LimitsOnly

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
