"""Where the members of a mesh meet at their master, once an epoch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rota.job.core.context import JobContext
from rota.spec.ids import RoleName


@dataclass(slots=True)
class _Gathering:
    """Members that meet under one epoch: their number, the address of rank 0, who is here."""

    world: int
    ranks: set[int] = field(default_factory=set[int])
    address: str = ""
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False

    def give_up(self) -> None:
        self.over = True
        self.complete.set()


class Rendezvous:
    """All meetings of a job; belongs to the event loop of its master."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], _Gathering] = {}

    async def meet(self, *, role: str, rank: int, epoch: int, world: int, address: str) -> str | None:
        """Wait until all members of an epoch are here; the address of rank 0, or None if the epoch is over."""
        for key in [key for key in self._open if key[0] == role and key[1] < epoch]:
            self._open.pop(key).give_up()
        here = self._open.setdefault((role, epoch), _Gathering(world=world))
        here.ranks.add(rank)
        here.address = address or here.address
        if len(here.ranks) >= here.world:
            here.complete.set()
        await here.complete.wait()
        return None if here.over else here.address

    def absent(self, ctx: JobContext) -> dict[str, tuple[str, ...]]:
        """Who of those that take part has not come, by role. The seats of a world may have gaps."""
        return {
            role: tuple(str(one.id) for one in ctx.active_of(RoleName(role)) if one.id.rank not in here.ranks)
            for (role, _), here in self._open.items()
            if not here.complete.is_set()
        }

    def give_up(self) -> None:
        """Nobody meets any more: those who wait are told that their epoch is over."""
        for here in self._open.values():
            here.give_up()
