"""An engine on a virtual clock: scripted instances, reservations, masters, and faults drawn from one seed."""

from __future__ import annotations

import asyncio
import inspect
import random
import traceback
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from rota.runtime.clock import Clock
from rota.runtime.launcher import (
    Call,
    CallTimeout,
    Found,
    Handle,
    InstanceSpec,
    NodeDied,
    ProcessDied,
    ProcessGone,
    Reservation,
    ReserveFailed,
    RuntimeEvent,
)
from rota.spec.gang import BundleGrant
from rota.spec.ids import JobId, NodeId

BOOT_S = 1_600_000_000.0
DEATHS_MAX = 10_000
"""Deaths that one watcher may leave unread; one more raises asyncio.QueueFull."""
"""Start times of simulated processes count from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimFaults:
    """How unreliable the engine is. Probabilities are per attempt, times in seconds (mean of an exponential).

    ``hang_p``: a process stops answering for ever right after a call began. ``late_p``: an answer comes ``late_s``
    later. ``send_s``: delay of a request to start on its way to the engine, overtaken by others; a caller that
    gives up before takes it back.
    """

    start_s: float = 0.5
    send_s: float = 0.0
    call_s: float = 0.002
    start_fails_p: float = 0.0
    reserve_fails_p: float = 0.0
    slow_start_p: float = 0.0
    slow_start_s: float = 60.0
    late_p: float = 0.0
    late_s: float = 5.0
    hang_p: float = 0.0
    seen_after_s: float = 0.05


NO_FAULTS = SimFaults()


@dataclass(slots=True, eq=False)
class SimProcess:
    """One simulated process. ``body`` has the methods that calls name; ``hung`` blocks all of them."""

    handle: Handle
    reservation: str
    bundle: int
    body: object = None
    alive: bool = True
    hung: bool = False
    tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict[asyncio.Task[Any], None])
    """In the order in which they began, which is that in which they are cancelled: a seed must give the same again."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def spawn(self, work: Coroutine[object, None, object]) -> asyncio.Task[Any]:
        """Run ``work`` inside the process: it ends with it."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)
        if not task.cancelled():
            task.exception()


MakeBody = Callable[[InstanceSpec, SimProcess], object]


class SimEngine:
    """What exists in the simulated engine, whoever asked for it. Time and chance are given; nothing is real.

    ``make_body`` makes the object that answers the calls to a new process. Reservations hold exact devices and CPUs of
    ``capacity`` (node to CPUs) on ``hosts``; one that does not fit waits. ``violations`` lists what must never be.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        rng: random.Random,
        make_body: MakeBody,
        faults: SimFaults = NO_FAULTS,
        capacity: dict[NodeId, float] | None = None,
        hosts: frozenset[str] | None = None,
    ) -> None:
        self.clock = clock
        self.rng = rng
        self.make_body = make_body
        self.faults = faults
        self.capacity = capacity
        self.hosts = hosts
        self.processes: dict[str, SimProcess] = {}
        self.reservations: dict[str, tuple[Reservation, tuple[BundleGrant, ...]]] = {}
        self.services: dict[str, SimProcess] = {}
        self.violations: list[str] = []
        self.dead: set[NodeId] = set()
        """Nodes that are gone: nothing runs, starts or is reserved there."""
        self.started = 0
        self._starting: dict[str, asyncio.Task[SimProcess]] = {}
        self._freed = asyncio.Condition()
        self._watchers: dict[JobId, list[asyncio.Queue[RuntimeEvent]]] = defaultdict(list)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def reserve(
        self, reservation: Reservation, bundles: Sequence[BundleGrant], *, timeout_s: float
    ) -> Reservation:
        """All bundles or none, once they are free. Raises ReserveFailed."""
        await self._pause(0.02)
        if self._random(self.faults.reserve_fails_p):
            raise ReserveFailed(f"{reservation.name}: refused by the simulated engine")
        try:
            async with self.clock.timeout(timeout_s), self._freed:
                await self._freed.wait_for(lambda: reservation.name in self.reservations or self._fits(bundles))
                self.reservations.setdefault(reservation.name, (reservation, tuple(bundles)))
        except TimeoutError:
            raise ReserveFailed(f"{reservation.name}: nothing free within {timeout_s:.0f} s") from None
        return reservation

    async def release(self, reservation: Reservation) -> None:
        """Give it back; processes that still live in it die with it, which is a mistake of the caller."""
        await self._pause(0.02)
        left = [one for one in self.processes.values() if one.reservation == reservation.name]
        if left:
            self.violations.append(f"{reservation.name} released under {left[0].handle.name}")
        for process in left:
            self._end(process, signal=9)
        self.reservations.pop(reservation.name, None)
        async with self._freed:
            self._freed.notify_all()

    def _fits(self, bundles: Sequence[BundleGrant]) -> bool:
        if self.hosts is not None and any(bundle.host not in self.hosts for bundle in bundles):
            return False
        held = [bundle for _, taken in self.reservations.values() for bundle in taken]
        devices = {(bundle.node, device) for bundle in held for device in bundle.devices}
        if any((bundle.node, device) in devices for bundle in bundles for device in bundle.devices):
            return False
        if any(bundle.node in self.dead for bundle in bundles):
            return False
        if self.capacity is None:
            return True
        used: dict[NodeId, float] = defaultdict(float)
        for bundle in (*held, *bundles):
            used[bundle.node] += bundle.res.cpus
        return all(cpus <= self.capacity.get(node, 0.0) + 1e-9 for node, cpus in used.items())

    async def start(self, spec: InstanceSpec, *, timeout_s: float) -> Handle:
        """Start a process or find the one of that name; the start continues when the caller gives up."""
        if self.faults.send_s > 0:
            await self._pause(self.faults.send_s)
        if spec.name in self.processes:
            return self.processes[spec.name].handle
        if spec.name not in self._starting:
            task = self._own(self._start(spec))
            self._starting[spec.name] = task
            task.add_done_callback(lambda _: self._starting.pop(spec.name, None))
        try:
            async with self.clock.timeout(timeout_s):
                return (await asyncio.shield(self._starting[spec.name])).handle
        except TimeoutError:
            raise CallTimeout(f"{spec.name}: not started within {timeout_s:.0f} s") from None

    async def _start(self, spec: InstanceSpec) -> SimProcess:
        slow = self._random(self.faults.slow_start_p)
        await self._pause(self.faults.slow_start_s if slow else self.faults.start_s)
        if self._random(self.faults.start_fails_p):
            raise ProcessGone(f"{spec.name} died at its start", started=False)
        held = self.reservations.get(spec.reservation)
        if held is None:
            raise ProcessGone(f"{spec.name}: its reservation is gone", started=False)
        if held[1][spec.bundle].node in self.dead:
            raise ProcessGone(f"{spec.name}: its node is gone", started=False, node_died=True)
        self.started += 1
        handle = Handle(
            name=spec.name,
            job=spec.job,
            instance=spec.instance,
            epoch=spec.epoch,
            node=held[1][spec.bundle].node,
            pid=1000 + self.started,
            start_time=BOOT_S + self.clock.monotonic_s(),
        )
        process = SimProcess(handle=handle, reservation=spec.reservation, bundle=spec.bundle)
        self._check_alone(process)
        try:
            process.body = self.make_body(spec, process)
        except Exception as error:
            error.add_note(traceback.format_exc())
            raise
        self.processes[spec.name] = process
        return process

    def _check_alone(self, new: SimProcess) -> None:
        """One live process for each member of a job: a new one may only start when the older one is gone."""
        for other in self.processes.values():
            if other.handle.job == new.handle.job and other.handle.instance == new.handle.instance:
                self.violations.append(f"{new.handle.name} started beside {other.handle.name}")

    async def stop(self, handle: Handle, *, grace_s: float) -> None:
        """Ask, wait ``grace_s``, kill; a start that is under way is waited for, so that nothing comes after."""
        if (starting := self._starting.get(handle.name)) is not None:
            await asyncio.gather(asyncio.shield(starting), return_exceptions=True)
        process = self.processes.get(handle.name)
        if process is None:
            return
        polite = getattr(process.body, "stop", None)
        if polite is not None and not process.hung:
            process.spawn(_method(process.body, Call(method="stop")))
        try:
            async with self.clock.timeout(grace_s):
                await process.gone.wait()
        except TimeoutError:
            self._end(process, signal=9, asked=True)

    def exit(self, process: SimProcess, exit_code: int = 0) -> None:
        """The process ends by itself."""
        self._end(process, exit_code=exit_code)

    def kill(self, name: str) -> None:
        """kill -9."""
        if (process := self.processes.get(name)) is not None:
            self._end(process, signal=9)

    def lose_node(self, node: NodeId) -> None:
        """The node is gone with everything on it."""
        self.dead.add(node)
        for process in [one for one in self.processes.values() if one.handle.node == node]:
            self._end(process)
            self._own(self._tell(process.handle.job, NodeDied(node=node, text="the node is gone")))

    def hang(self, name: str) -> None:
        """SIGSTOP: alive, and silent for ever."""
        if (process := self.processes.get(name)) is not None:
            process.hung = True
            for task in list(process.tasks):
                task.cancel()

    def _end(
        self, process: SimProcess, *, signal: int | None = None, exit_code: int | None = None, asked: bool = False
    ) -> None:
        if not process.alive:
            return
        process.alive = False
        process.gone.set()
        self.processes.pop(process.handle.name, None)
        for task in list(process.tasks):
            task.cancel()
        handle = process.handle
        death = ProcessDied(
            name=handle.name,
            job=handle.job,
            instance=handle.instance,
            epoch=handle.epoch,
            text="stopped" if asked else "",
            exit_code=exit_code,
            signal=signal,
        )
        self._own(self._tell(death.job, death))

    async def _tell(self, job: JobId, event: RuntimeEvent) -> None:
        await self._pause(self.faults.seen_after_s)
        for queue in self._watchers[job]:
            queue.put_nowait(event)

    async def call(self, to: Handle, call: Call) -> Any:
        """Call a method of a process, or of a service such as a master. Raises as the protocol says."""
        try:
            async with self.clock.timeout(call.timeout_s):
                return await self._call(to.name, call)
        except TimeoutError:
            raise CallTimeout(f"{to.name}.{call.method}: no answer within {call.timeout_s} s") from None

    async def _call(self, name: str, call: Call) -> object:
        await self._pause(self.faults.call_s)
        process = self.services.get(name) or self.processes.get(name)
        if process is None:
            raise ProcessGone(f"{name} does not exist", started=False)
        if name in self.processes and self._random(self.faults.hang_p):
            self.hang(name)
        if process.hung:
            await process.gone.wait()
            raise ProcessGone(f"{name} is gone")
        work = process.spawn(_method(process.body, call))
        try:
            await self._until(process, work)
        except asyncio.CancelledError:
            if name in self.processes and not call.control:
                work.cancel()
            raise
        if self._random(self.faults.late_p):
            await self._pause(self.faults.late_s)
        return work.result()

    async def _until(self, process: SimProcess, work: asyncio.Task[Any]) -> None:
        """Wait for the answer, or the end of the process."""
        await asyncio.wait([work])
        if work.cancelled() or not process.alive:
            if process.alive:
                await process.gone.wait()
            raise ProcessGone(f"{process.handle.name} is gone")

    def host(self, handle: Handle, body: object) -> SimProcess:
        """A service such as a master: it answers calls under its name, and takes the place of an older one."""
        process = SimProcess(handle=handle, reservation="", bundle=0, body=body)
        self.services[handle.name] = process
        return process

    def end_service(self, process: SimProcess) -> None:
        """kill -9 of a service."""
        if self.services.get(process.handle.name) is process:
            del self.services[process.handle.name]
        process.alive = False
        process.gone.set()
        for task in list(process.tasks):
            task.cancel()

    def found(self, job: JobId) -> Found:
        """Everything of a job that is alive now."""
        return Found(
            reservations=tuple(one for one, _ in self.reservations.values() if one.job == job),
            instances=tuple(one.handle for one in self.processes.values() if one.handle.job == job),
            hosts=tuple(sorted((self.hosts or frozenset()) - {str(node) for node in self.dead})),
        )

    def watch(self, job: JobId) -> asyncio.Queue[RuntimeEvent]:
        """Deaths of processes of the job from now on."""
        queue: asyncio.Queue[RuntimeEvent] = asyncio.Queue(DEATHS_MAX)
        self._watchers[job].append(queue)
        return queue

    def unwatch(self, job: JobId, queue: asyncio.Queue[RuntimeEvent]) -> None:
        """Remove a queue of deaths."""
        self._watchers[job].remove(queue)

    async def close(self) -> None:
        """End every process and task of the engine."""
        for process in list(self.processes.values()):
            self._end(process, signal=9)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _own(self, work: Coroutine[object, None, object]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def _random(self, p: float) -> bool:
        return p > 0 and self.rng.random() < p

    def _pause(self, mean_s: float) -> Awaitable[None]:
        return self.clock.sleep(self.rng.expovariate(1.0 / mean_s) if mean_s > 0 else 0.0)


async def _method(body: object, call: Call) -> object:
    """Call a method, which may be a plain one; what it raises carries its traceback inside the process."""
    try:
        answer = getattr(body, call.method)(*call.head, *call.args, **call.kwargs)
        return await answer if inspect.isawaitable(answer) else answer
    except Exception as error:
        error.add_note(traceback.format_exc())
        raise


class SimLauncher:
    """The Launcher protocol over a SimEngine, as one client sees it; a client that was ``cut`` reaches nothing more."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._deaths: dict[JobId, asyncio.Queue[RuntimeEvent]] = {}
        self._cut = False

    def cut(self) -> None:
        """The process of this client died: whatever it still tries has no effect."""
        self._cut = True
        self._forget()

    async def close(self) -> None:
        """Watch nothing any more."""
        self._forget()

    async def reserve(
        self, reservation: Reservation, bundles: Sequence[BundleGrant], *, timeout_s: float
    ) -> Reservation:
        self._reach()
        return await self._engine.reserve(reservation, bundles, timeout_s=timeout_s)

    async def start(self, spec: InstanceSpec, *, timeout_s: float) -> Handle:
        self._reach()
        self._watch(spec.job)
        return await self._engine.start(spec, timeout_s=timeout_s)

    async def find(self, job: JobId) -> Found:
        self._reach()
        self._watch(job)
        await self._engine.clock.sleep(0.01)
        return self._engine.found(job)

    async def call(self, to: Handle, call: Call) -> Any:
        self._reach()
        return await self._engine.call(to, call)

    def hang_up(self, handle: Handle) -> None:
        """Connections do not break here."""

    async def stop(self, handle: Handle, *, grace_s: float) -> None:
        self._reach()
        await self._engine.stop(handle, grace_s=grace_s)

    async def release(self, reservation: Reservation) -> None:
        self._reach()
        await self._engine.release(reservation)

    def events(self, job: JobId) -> AsyncIterator[RuntimeEvent]:
        return _each(self._watch(job))

    def _watch(self, job: JobId) -> asyncio.Queue[RuntimeEvent]:
        if job not in self._deaths:
            self._deaths[job] = self._engine.watch(job)
        return self._deaths[job]

    def _forget(self) -> None:
        for job, queue in self._deaths.items():
            self._engine.unwatch(job, queue)
        self._deaths.clear()

    def _reach(self) -> None:
        if self._cut:
            raise asyncio.CancelledError("this client is dead")


async def _each(queue: asyncio.Queue[RuntimeEvent]) -> AsyncIterator[RuntimeEvent]:
    while True:
        yield await queue.get()
