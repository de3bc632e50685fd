"""Clock protocol, and the clock of this machine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Protocol, TypeVar

T = TypeVar("T")
_LOOK_S = 0.25


class Clock(Protocol):
    """Where every part asks for the time. Durations use ``monotonic_s``; ``wall_s`` is for people and token expiry."""

    def monotonic_s(self) -> float:
        """Seconds that never jump and that count suspend (CLOCK_BOOTTIME)."""
        ...

    def wall_s(self) -> float:
        """Seconds since 1970-01-01 UTC."""
        ...

    def sleep(self, seconds: float) -> Awaitable[None]:
        """Wait without blocking the event loop."""
        ...

    def timeout(self, seconds: float | None) -> asyncio.Timeout:
        """``async with``: raises TimeoutError when its body takes longer; None: no limit."""
        ...

    def call_later(self, seconds: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        """Call it from the running event loop, unless the returned timer is cancelled before."""
        ...


class LoopTimers:
    """Waits and timers of a clock whose time the running event loop keeps."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float | None) -> asyncio.Timeout:
        return asyncio.timeout(seconds)

    def call_later(self, seconds: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, call)


class SystemClock(LoopTimers):
    """The real clock of this machine."""

    def monotonic_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall_s(self) -> float:
        return time.time()


def iso(wall_s: float) -> str:
    """ISO 8601 in UTC with milliseconds, as every JSON document shows times."""
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def backoff(first_s: float, max_s: float) -> Iterator[float]:
    """Pauses between tries: each twice as long as the one before, at most ``max_s``."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, max_s)


def blocking_sleep(seconds: float) -> None:
    """Wait in a plain thread (never in an event loop)."""
    time.sleep(seconds)


async def within_cpu_time(call: Callable[[], T], limit_s: float) -> T:
    """The result of ``call``, run in a thread of its own. Raises TimeoutError once it took ``limit_s`` of CPU time.

    Unlike the time of a clock, that of a processor is the same on a busy machine. A thread cannot be ended: one that is
    given up runs on.
    """
    began = list[tuple[int, float]]()

    def timed() -> T:
        clock = time.pthread_getcpuclockid(threading.get_ident())
        began.append((clock, time.clock_gettime(clock)))
        return call()

    running = asyncio.ensure_future(asyncio.to_thread(timed))
    while not (await asyncio.wait((running,), timeout=_LOOK_S))[0]:
        if began and time.clock_gettime(began[0][0]) - began[0][1] > limit_s:
            running.add_done_callback(lambda late: late.exception())  # an error of it is not wanted any more
            raise TimeoutError(f"it took more than {limit_s:g} s of processor time")
    return running.result()
