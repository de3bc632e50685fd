"""An event loop in a thread of its own, which code of users cannot end.

An instance has one for what Rota does and one for the code of its user, so that neither holds the
other up.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")

CLOSE_MAX_S = 30.0


class Exited(Exception):
    """Code in an event loop thread called ``sys.exit``: a failure of that code, not the end of the thread."""


class EventLoopThread:
    """One thread with one event loop. Whatever is given to it runs there, one step at a time."""

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._work, args=(self.loop,), name=name, daemon=True)
        self._thread: threading.Thread | None = thread
        """None of a loop that was adopted."""
        thread.start()

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        loop.run_until_complete(asyncio.sleep(0))  # who came in its last step begins: only then it can be cancelled
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()

    def adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take a loop that runs in a thread of its own already; only before anything was given to this one.

        What arrives in that loop is then run without a change of threads.
        """
        if loop is not self.loop:
            own, self.loop, self._thread = self.loop, loop, None
            own.call_soon_threadsafe(own.stop)

    def submit(self, work: Coroutine[object, object, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine in this loop; its result comes as a future that any thread may wait for.

        Raises RuntimeError when the loop was closed.
        """
        contained = _contained(work)
        try:
            return asyncio.run_coroutine_threadsafe(contained, self.loop)
        except RuntimeError:
            contained.close()
            work.close()
            raise

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine in this loop and wait for it from another event loop; cancelling the wait cancels it."""
        if asyncio.get_running_loop() is self.loop:
            return await work
        return await asyncio.wrap_future(self.submit(work))

    async def do(self, function: Callable[[], T]) -> T:
        """Call a plain function in this thread; it occupies the loop until it returns."""

        async def call() -> T:
            return function()

        return await self.run(call())

    def close(self) -> None:
        """Stop the loop after its present step, cancel what is left in it and wait for its thread, unless this is it.

        Nothing of it runs afterwards, so that what it uses can be closed; a loop that was adopted is not waited for.
        Raises TimeoutError when that takes longer than ``CLOSE_MAX_S``.
        """
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(self.loop.stop)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_MAX_S)
            if self._thread.is_alive():
                raise TimeoutError(
                    f"thread {self._thread.name} still works {CLOSE_MAX_S:g} s after its loop was stopped"
                )


async def _contained(work: Coroutine[object, object, T]) -> T:
    try:
        return await work
    except SystemExit as error:
        raise Exited(f"sys.exit({error.code!r})") from error
