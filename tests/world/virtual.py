"""An event loop whose time jumps to the next timer, so that an hour of waiting costs nothing."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rota.testing.memory import VirtualClock

T = TypeVar("T")


STILL_MAX = 10_000
"""Rounds of the loop without a moment passing that are an endless one; worlds that end have fewer than 20."""


class Stuck(AssertionError):
    """Everybody waits and no timer will ever fire, a lost wake-up; or somebody works for ever and waits for nothing."""


class _Jump(selectors.SelectSelector):
    """Instead of waiting for files, moves the clock to the next timer."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self._still = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing is ready and no timer is set")
        self._still += 1
        if timeout > 0:
            self._still = 0
            self._clock.advance(timeout)
        elif self._still > STILL_MAX:
            self._still = 0  # who ends the tasks that are left runs this loop once more
            raise Stuck(f"{STILL_MAX} rounds of work and no time has passed: somebody tries again without a pause")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs on a VirtualClock. Work for threads runs at once, on the spot."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_Jump(clock))
        self._clock = clock

    def time(self) -> float:
        return self._clock.monotonic_s()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run(main: Callable[[VirtualClock], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` to its end in virtual time, and leave no task behind."""
    clock = VirtualClock()
    loop = VirtualLoop(clock)
    try:
        return loop.run_until_complete(main(clock))
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        loop.close()
