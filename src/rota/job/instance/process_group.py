"""A fresh torch process group for the mesh of an instance, once an epoch."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from datetime import timedelta
from typing import Any

from rota.job.health.preflight import NodeUnfit, collective, pairwise, slow_text, told_of
from rota.job.instance.runners import InstanceConfig, Setup
from rota.job.rpc.peers import master_handle
from rota.runtime.devices import group_backend
from rota.runtime.environ import get
from rota.runtime.launcher import Call, CallTimeout, ProcessGone

GROUP_TIMEOUT_S = 1800.0
"""Longest collective before torch gives up; limits on progress act long before."""
MEET_MAX_S = 240.0
RETRY_S = 0.5


class Superseded(Exception):
    """A newer epoch has begun, so this one will never be complete."""


class Meeting:
    """The process group of one epoch: made on demand in the user lane, dropped from the control lane."""

    def __init__(self, config: InstanceConfig, setup: Setup) -> None:
        self._config = config
        self._setup = setup
        self._store: Any = None
        self._group: Any = None
        self._task: asyncio.Task[Any] | None = None
        self._over = False

    def make(self) -> Any:
        """Meet the other members and initialise ``torch.distributed``. Called from user code, in the user lane."""
        if self._group is not None:
            return self._group
        if self._over:
            raise Superseded(f"epoch {self._setup.epoch} of {self._config.id} is over")
        dist = importlib.import_module("torch.distributed")
        rank, world = self._setup.index, self._setup.world
        host = own_address()
        if rank == 0:
            # The store listens on a port of its own choice before anybody hears of it: none is picked and released.
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, use_libuv=True)
        mine = f"{host}:{self._store.port}" if rank == 0 else ""
        address = self._config.control.submit(self._meet(mine)).result()
        if rank != 0:
            name, _, port = address.rpartition(":")
            self._store = dist.TCPStore(name, int(port), is_master=False, use_libuv=True)
        backend = group_backend()
        dist.init_process_group(
            backend=backend,
            store=dist.PrefixStore(f"{self._config.id.role}/{self._setup.epoch}", self._store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        self._group = dist.group.WORLD
        if self._config.role.fail.check == "full":
            self._check(rank, world, "cuda" if "nccl" in backend else "cpu")
        return self._group

    def _check(self, rank: int, world: int, device: str) -> None:
        """Raises NodeUnfit in the member that is broken, or in all of them when only their sum is wrong."""
        pairs = importlib.import_module("torch.distributed").PrefixStore("pairs", self._store)
        judged = pairwise(self._group, pairs, rank, world, device)
        if found := told_of(judged, rank, exclude=self._config.role.fail.slow == "exclude"):
            raise NodeUnfit(found)
        if rank in judged.slow:
            sys.stderr.write(f"rota: {slow_text(judged.slow[rank])}\n")
        # With a broken member there is no sum of all; it leaves, and everybody meets again without it.
        if not judged.faulty and (found := collective(self._group, rank, world, device)):
            raise NodeUnfit(found)

    async def _meet(self, address: str) -> str:
        self._task = asyncio.current_task()
        return await meet(self._config, self._setup, address)

    def leave(self) -> None:
        """End the group; unblocks members that wait in a collective with this one. Called from the control lane."""
        self._over = True
        if self._task is not None:
            self._task.cancel()
        if self._group is not None:
            dist = importlib.import_module("torch.distributed")
            with contextlib.suppress(RuntimeError, ValueError):
                dist.distributed_c10d._abort_process_group(self._group)
        self._group = None
        self._store = None


async def meet(config: InstanceConfig, setup: Setup, address: str) -> str:
    """Wait at the master until every member of this epoch is there; the address that rank 0 gave.

    Raises Superseded when a newer epoch has begun.
    """
    kwargs = {
        "role": config.id.role,
        "rank": config.id.rank,
        "epoch": setup.epoch,
        "world": setup.world,
        "address": address,
    }
    call = Call(method="meet", kwargs=kwargs, timeout_s=MEET_MAX_S)
    while True:
        try:
            with config.pulse.waiting.on("master", "meeting", f"epoch {setup.epoch}"):
                found: str | None = await config.launcher.call(master_handle(config.place.job), call)
        except (ProcessGone, CallTimeout):
            await config.clock.sleep(RETRY_S)  # the master is back within seconds; everybody comes to it again
            continue
        if found is None:
            raise Superseded(f"epoch {setup.epoch} of {config.id} is over")
        return found


def own_address() -> str:
    """Where other members reach this process: ``ROTA_NODE_ADDRESS``, else the loopback of the one machine."""
    return get("ROTA_NODE_ADDRESS", "127.0.0.1")
