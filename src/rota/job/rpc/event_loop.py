"""Threads with an event loop each: control code stays responsive while user code computes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Exited(Exception):
    """Code in a lane called ``sys.exit``: a failure of that code, not the end of the lane."""


class EventLoopThread:
    """One thread with one event loop. Whatever is given to it runs there, one step at a time."""

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        threading.Thread(target=self._work, args=(self.loop,), name=name, daemon=True).start()

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))

    def adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Be the lane of a loop that runs in a thread of its own already; only before anything was given to this one.

        What arrives in that loop is then in this lane without a change of threads.
        """
        if loop is not self.loop:
            self.close()
            self.loop = loop

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine in this lane; its result comes as a future that any thread may wait for."""
        return asyncio.run_coroutine_threadsafe(_contained(work), self.loop)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this lane and wait for it from another event loop; cancelling the wait cancels it."""
        if asyncio.get_running_loop() is self.loop:
            return await work
        return await asyncio.wrap_future(self.submit(work))

    async def do(self, function: Callable[[], T]) -> T:
        """Call a plain function in this lane; it occupies the lane until it returns."""

        async def call() -> T:
            return function()

        return await self.run(call())

    def close(self) -> None:
        """Stop the loop after its present step and cancel what is left in it; the thread ends with it."""
        self.loop.call_soon_threadsafe(self.loop.stop)


async def _contained(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except SystemExit as error:
        raise Exited(f"sys.exit({error.code!r})") from error
