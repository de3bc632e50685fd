"""The inbox of a master: what is to be written into the log, in the order in which it came."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rota.spec.events import JobEvent

INBOX_MAX = 20_000


class InboxFull(Exception):
    """More events wait than a master may hold."""


@dataclass(slots=True)
class Wish:
    """An event that somebody wants in the log; ``done`` is told when it is there, or why it is refused."""

    event: JobEvent
    done: asyncio.Future[None] | None = None

    def answer(self, refusal: Exception | None = None) -> None:
        """It is in the log, or it is refused."""
        if self.done is not None and not self.done.done():
            self.done.set_exception(refusal) if refusal else self.done.set_result(None)


class Inbox(asyncio.Queue[Wish | BaseException]):
    """Wishes, and what went wrong in a task of the master. Belongs to one event loop."""

    def __init__(self) -> None:
        super().__init__(INBOX_MAX)

    def add(self, wish: Wish | BaseException) -> None:
        """Over the limit nothing is dropped in silence: the master fails, and the next one asks what is alive."""
        if self.full():
            while not self.empty():
                self.get_nowait()
            wish = InboxFull(f"{INBOX_MAX} events wait to be written")
        self.put_nowait(wish)

    def refuse(self, refusal: Exception) -> None:
        """Tell everybody who waits for a wish that it is not granted any more."""
        while not self.empty():
            wish = self.get_nowait()
            if isinstance(wish, Wish):
                wish.answer(refusal)
