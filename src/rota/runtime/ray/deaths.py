"""Deaths of processes on Ray: which process of an instance has ended, how, and whether its node went with it.

A watched process is found dead by a call that never answers: its failure is the news (``RayLauncher.wait_end``).
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from ray.exceptions import OutOfMemoryError, RayError

from rota.runtime.launcher import DeathsLost, Handle, NodeDied, ProcessDied, RuntimeEvent
from rota.runtime.process import ExitWatch, ProcessId
from rota.spec.codec import JsonObject
from rota.spec.ids import JobId

_REAPED_S, _REAPED_MAX_S = 0.02, 1.0
"""Usual and longest wait for the parent of a dead process, which alone learns how it ended."""
_DEATHS_MAX = 4096
# What Ray says of every process that ended without an error message; it names out-of-memory as a mere possibility.
_UNEXPECTED = re.compile(r"Worker unexpectedly exits with a connection error code")
_OUT_OF_MEMORY = re.compile(r"running low on memory|OutOfMemory")
_OUT_OF_MEMORY_TEXT = "out of memory: the node ran low and Ray ended the process"
_NODE_DIED = re.compile(r"node has died|node was terminated")


class DeathWatch:
    """Watches started or found processes, and keeps their deaths for the one consumer of each job.

    It belongs to one event loop. ``wait_end`` returns, once the process of a name is gone for good, how it ended.
    """

    def __init__(self, wait_end: Callable[[str], Awaitable[str]]) -> None:
        self._wait_end = wait_end
        self._watches = dict[str, asyncio.Task[None]]()
        self._events = dict[JobId, asyncio.Queue[RuntimeEvent | DeathsLost]]()

    async def events(self, job: JobId) -> AsyncIterator[RuntimeEvent]:
        """Deaths of a job as they happen; those before the first call are kept. Raises DeathsLost."""
        queue = self._queue(job)
        while True:
            event = await queue.get()
            if isinstance(event, DeathsLost):
                raise event
            yield event

    def watch(self, handle: Handle) -> None:
        """Report the death of a process; harmless if it is watched already."""
        if handle.name not in self._watches:
            task = asyncio.get_running_loop().create_task(self._report_death(handle), name=f"watch/{handle.name}")
            self._watches[handle.name] = task
            task.add_done_callback(lambda _: self._watches.pop(handle.name, None))

    async def close(self) -> None:
        """Stop watching; the processes stay."""
        watches = list(self._watches.values())
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    def add(self, job: JobId, event: RuntimeEvent) -> None:
        """Keep an event for the consumer, who must not believe that it heard of all deaths when it did not."""
        queue = self._queue(job)
        if not queue.full():
            queue.put_nowait(event)
            return
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(DeathsLost(f"{_DEATHS_MAX} deaths of {job} waited to be heard"))

    def _queue(self, job: JobId) -> asyncio.Queue[RuntimeEvent | DeathsLost]:
        return self._events.setdefault(job, asyncio.Queue(_DEATHS_MAX))

    async def _report_death(self, handle: Handle) -> None:
        exits = ExitWatch(ProcessId(pid=handle.pid, start_time=handle.start_time))
        try:
            text = await self._wait_end(handle.name)
            status = await asyncio.to_thread(_exit_status, exits)
        finally:
            exits.close()
        if names_dead_node(text):
            self.add(handle.job, NodeDied(node=handle.node, text=text))
        found = await asyncio.to_thread(_exceeded, handle)
        died = ProcessDied(
            name=handle.name,
            job=handle.job,
            instance=handle.instance,
            epoch=handle.epoch,
            text=text,
            exit_code=status if status is not None and status >= 0 else None,
            signal=-status if status is not None and status < 0 else None,
            out_of_memory=text == _OUT_OF_MEMORY_TEXT or found.get("kind") == "memory",
            exceeded=found.get("text", ""),
        )
        self.add(handle.job, died)


def _exceeded(handle: Handle) -> JsonObject:
    """What the watch of a process wrote before it ended that for its limits; empty when it wrote none, or elsewhere."""
    try:
        return json.loads(Path(handle.breach).read_bytes()) if handle.breach else {}
    except (OSError, ValueError):
        return {}


def _exit_status(exits: ExitWatch) -> int | None:
    """How a process ended; its parent (Ray) reaps it milliseconds after the end, or when it gets a core."""
    began_s = time.monotonic()
    while (status := exits.status()) is None:
        passed_s = time.monotonic() - began_s
        if passed_s > _REAPED_S and (passed_s > _REAPED_MAX_S or not exits.unreaped):
            break
        time.sleep(0.002)
    return status


def cause_of_death(error: RayError) -> str:
    """How a process ended, by the error of a call on it."""
    return _OUT_OF_MEMORY_TEXT if isinstance(error, OutOfMemoryError) else death_text(str(error))


def death_text(text: str) -> str:
    """Ray's account of a death in one line; its standing guess at out-of-memory is left out."""
    if _OUT_OF_MEMORY.search(text):
        return _OUT_OF_MEMORY_TEXT
    if _UNEXPECTED.search(text):
        return "its process ended without an error message"
    return " ".join(text.split())[:1000]


def names_dead_node(text: str) -> bool:
    """Whether a cause of death is that of the node."""
    return bool(_NODE_DIED.search(text))
