"""What the processes of a job bring to its master: events to append, and members that wait for each other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rota.job.core.context import JobContext
from rota.spec.events import JobEvent
from rota.spec.ids import RoleName


@dataclass(slots=True)
class _Members:
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
        self._open: dict[tuple[str, int], _Members] = {}

    async def meet(self, *, role: str, rank: int, epoch: int, world: int, address: str) -> str | None:
        """Wait until all members of an epoch are here; the address of rank 0, or None if the epoch is over."""
        for key in [key for key in self._open if key[0] == role and key[1] < epoch]:
            self._open.pop(key).give_up()
        here = self._open.setdefault((role, epoch), _Members(world=world))
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
        """End every wait: the epoch of those who wait is over."""
        for here in self._open.values():
            here.give_up()


INBOX_MAX = 20_000


class InboxFull(Exception):
    """More events wait than a master may hold."""


@dataclass(slots=True)
class AppendRequest:
    """Request to append an event; ``done`` ends when it is in the log, or with the refusal."""

    event: JobEvent
    done: asyncio.Future[None] | None = None

    def answer(self, refusal: Exception | None = None) -> None:
        """It is in the log, or it is refused."""
        if self.done is not None and not self.done.done():
            self.done.set_exception(refusal) if refusal else self.done.set_result(None)


class Inbox(asyncio.Queue[AppendRequest | BaseException]):
    """Append requests, and errors of tasks of the master. Belongs to one event loop."""

    def __init__(self) -> None:
        super().__init__(INBOX_MAX)

    def add(self, request: AppendRequest | BaseException) -> None:
        """Over the limit the master fails, and every request is refused: the next master asks what is alive."""
        if self.full():
            full = InboxFull(f"{INBOX_MAX} events wait to be written")
            self.refuse(full)
            if isinstance(request, AppendRequest):
                request.answer(full)
            request = full
        self.put_nowait(request)

    def refuse(self, refusal: Exception) -> None:
        """Refuse every request that waits."""
        while not self.empty():
            request = self.get_nowait()
            if isinstance(request, AppendRequest):
                request.answer(refusal)
