"""Static partitions: a private cluster for each tenant, or one pool with a quota of devices."""

from __future__ import annotations

from dataclasses import dataclass

from rota.cluster.core.capacity import GPU
from rota.cluster.core.jobs import Held, JobRow, Wait
from rota.cluster.core.placement import PREFERENCES, Manner, place
from rota.cluster.core.profile import Profile
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.fifo import ByArrival, Fit
from rota.spec.reasons import Reason


@dataclass(frozen=True, slots=True)
class OwnDevices:
    """A tenant uses at most as many devices as it is guaranteed; nothing is borrowed."""

    def verdict(self, state: State, row: JobRow) -> Wait | None:
        tree = state.queues
        need = tree.need(row.ask.shape)[GPU]
        for queue in tree.line_of(row.ask.queue):
            guaranteed = tree.guaranteed[queue, GPU]
            if row.ask.opportunistic or (guaranteed and state.used[queue, GPU] + need > guaranteed):
                return Wait(
                    reason=Reason.GUARANTEE_FULL_NO_BORROW,
                    text=f"{need / 1000:g} gpus are asked, "
                    f"{state.used[queue, GPU] / 1000:g} of {guaranteed / 1000:g} guaranteed ones are in use.",
                    fields={"queue": tree.rows[queue].path},
                )
        return None


@dataclass(frozen=True, slots=True)
class OwnNodes:
    """A tenant uses only the nodes that carry its label."""

    manner: Manner = "pack"

    def place(self, state: State, txn: Txn, row: JobRow) -> tuple[Held, ...] | None:
        mine = state.tenant == state.queues.row.get(row.ask.queue, -2)
        return place(state, txn, row.ask.shape, prefer=PREFERENCES[self.manner], allowed=mine, close=False)


def private() -> Profile:
    """Every tenant alone on its own nodes, first come first served: what a guarantee is measured against."""
    return Profile(
        name="private", order=ByArrival(), division=OwnDevices(), placer=OwnNodes(), block="queue", local=True
    )


def pool() -> Profile:
    """One cluster, quotas in devices, best fit."""
    return _pool("pool", "pack")


def pool_spread() -> Profile:
    """One cluster, quotas in devices, emptiest node first: shows why a quota of devices guarantees nothing."""
    return _pool("pool-spread", "spread")


def _pool(name: str, manner: Manner) -> Profile:
    placer = Fit(manner, close=False)
    return Profile(name=name, order=ByArrival(), division=OwnDevices(), placer=placer, block="queue")
