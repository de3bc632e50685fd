"""Jobs over several nodes of one engine: real raylets on this machine, the real scheduler over the real log.

``Raylets`` starts, kills and ends nodes of the engine. ``NodesRun`` is a ``Run`` whose placements come from the
scheduler, so that asks for other nodes, sizes, pauses and drains are answered as the service would.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.real.jobs import WORKLOADS, Run, run_job

from rota.cluster.core.profile import Profile
from rota.cluster.live import Scheduler
from rota.cluster.policies.basic import fifo
from rota.job.core.placement import requests_of
from rota.runtime import file_locks, process
from rota.runtime.process import ProcessId
from rota.runtime.ray.engine import EngineFiles, EngineSettings, EngineState, end_node, find_engine, start_node
from rota.spec.errors import EngineUnavailable, SeqConflict
from rota.spec.events import Event, InstanceStarted, JobAdmitted, JobQueued, JobSubmitted, NodeJoined, NodeMarked
from rota.spec.ids import JobId, NodeId
from rota.spec.job import JobSpec
from rota.spec.resources import Health, Node

LOOK_S = 0.05
"""How often the scheduler looks into the log."""


def add_node(home: Path, settings: EngineSettings, *, timeout_s: float = 60.0) -> EngineState:
    """One more raylet on this machine under another ``host`` label. Raises EngineUnavailable."""
    files = EngineFiles(home)
    head = find_engine(home)
    if head is None:
        raise EngineUnavailable("there is no engine to join", hint="start one first")
    settings = replace(settings, storage=head.storage)
    config = {"head": False, "address": head.address, "folder": head.folder}
    with file_locks.locked(files.lock):
        return start_node(files, settings, head.engine, config, timeout_s)


def stop_node(home: Path, host: str) -> tuple[ProcessId, ...]:
    """End one joined node with all its workers. Returns what could not be ended."""
    files = EngineFiles(home)
    states = [state for state in files.states() if state.host == host]
    return tuple(left for state in states for left in end_node(files, state))


@dataclass
class Raylets:
    """The nodes beside the head of an engine."""

    engine: Any
    alive: dict[str, EngineState] = field(default_factory=dict[str, EngineState])

    def ensure(self, *names: str, cpus: float = 8.0) -> None:
        """Start those that are missing."""
        missing = [name for name in names if name not in self.alive]
        if missing:
            with ThreadPoolExecutor(len(missing)) as threads:
                wanted = [EngineSettings(host=name, cpus=cpus) for name in missing]
                started = threads.map(lambda one: add_node(self.engine.home, one), wanted)
                self.alive |= dict(zip(missing, started, strict=True))

    def kill(self, name: str) -> None:
        """kill -9 of the raylet: as if the machine were gone, its watcher ends what ran there."""
        assert process.send_signal(self.alive.pop(name).raylet, signal.SIGKILL)

    def stop(self) -> None:
        """End all of them, the killed ones' leftovers too."""
        for name in list(self.alive):
            assert stop_node(self.engine.home, name) == ()
            del self.alive[name]


@contextlib.contextmanager
def raylets_of(engine: Any) -> Iterator[Raylets]:
    """Nodes for the tests of one file."""
    raylets = Raylets(engine)
    try:
        yield raylets
    finally:
        raylets.stop()


@dataclass
class NodesRun(Run):
    """A job that the real scheduler places on the given nodes."""

    raylets: Raylets | None = None
    nodes: dict[str, float] = field(default_factory=dict[str, float])
    """Node to its cores for the scheduler."""
    profile: Profile = field(default_factory=fifo)
    answering: asyncio.Task[None] | None = None
    began: int = 0

    async def start(self) -> None:
        self.began = self.log.last_number()
        self.join(*self.nodes)
        self.append(JobSubmitted(spec=self.spec, workdir=self.spec.workdir or str(WORKLOADS)), JobQueued())
        self.answering = asyncio.get_running_loop().create_task(self._answer(self.began))
        await self.until(lambda: self.events(JobAdmitted))
        await self.start_master()

    def join(self, *names: str) -> None:
        """Nodes that can be used from now on."""
        node = [
            Node(id=NodeId(one), host=one, cpus=self.nodes.setdefault(one, 4.0), memory_bytes=2**36) for one in names
        ]
        self.log.append([NodeJoined(node=one) for one in node], writer=self.writer)

    def kill_node(self, name: str) -> None:
        assert self.raylets is not None
        self.raylets.kill(name)

    def node_of(self, instance: str) -> str:
        """Where the newest process of an instance was started."""
        return str([one for one in self.events(InstanceStarted) if f"{one.role}/{one.rank}" == instance][-1].node)

    def marks(self) -> list[tuple[str, Health]]:
        """What the scheduler has written about nodes since the job was submitted."""
        events = (record.event for record in self.log.read(after=self.began))
        return [(str(one.node), one.health) for one in events if isinstance(one, NodeMarked)]

    async def _answer(self, seen: int) -> None:
        """What the service does with a scheduler: apply the log, decide, append."""
        self.scheduler = Scheduler(self.profile, requests_of)
        seqs: dict[JobId, int] = {}
        while True:
            records = self.log.read(after=seen)
            for record in records:
                seen = record.number
                self.scheduler.apply(record)
                if record.job is not None:
                    seqs[record.job] = record.seq
            outcome = self.scheduler.decide(time.time()) if records else None
            assert not (outcome and outcome.broken), outcome
            for job, event in outcome.events if outcome else ():
                with contextlib.suppress(SeqConflict):
                    self._append_at(job, event, seqs[job])
                    seqs[job] += 1
            if outcome and outcome.marks:
                self.log.append(outcome.marks, writer=self.writer)
            await asyncio.sleep(LOOK_S)

    def _append_at(self, job: JobId, event: Event, seq: int) -> None:
        self.log.append([event], writer=self.writer, job=job, expected_seq=seq)

    async def close(self) -> None:
        if self.answering is not None:
            self.answering.cancel()
            (failed,) = await asyncio.gather(self.answering, return_exceptions=True)
            assert isinstance(failed, asyncio.CancelledError), failed


def run_on(
    raylets: Raylets, nodes: dict[str, float], spec: JobSpec, body: Callable[[NodesRun], Awaitable[None]], **more: Any
) -> None:
    """Run ``body`` over a job on these nodes."""
    raylets.ensure(*nodes)
    made = {"raylets": raylets, "nodes": dict(nodes), **more}
    run_job(raylets.engine, spec, body, make=lambda **fields: NodesRun(**made, **fields))
