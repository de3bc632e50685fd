"""One installation in virtual time: service, masters, instances, and a seed that draws what goes wrong.

Phase 1 has faults, and safety is checked after each record. In phase 2 nothing fails any more, and every job must end.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from rota.cluster.core.preemption import _place_without as place_without
from rota.cluster.live import Scheduler, SchedulingOutcome
from rota.cluster.policies.basic import fifo
from rota.cluster.policies.default import default
from rota.job.core.context import JobContext
from rota.job.core.machine import fold, initial
from rota.job.core.placement import requests_of
from rota.job.core.resize import is_world
from rota.job.master import master as master_module
from rota.job.master.master import JobMaster
from rota.job.place import JobPlace
from rota.job.rpc.peers import master_handle
from rota.runtime.event_log.interface import INSTALL_SCOPE, EventLog, KeptContext, Writer
from rota.runtime.event_log.sql import SqlLog
from rota.runtime.launcher import Handle, InstanceSpec, Reservation, instance_name
from rota.spec.codec import to_json_value
from rota.spec.errors import Fenced, SeqConflict, StoreUnavailable
from rota.spec.events import (
    Event,
    JobAdmitted,
    JobEnded,
    JobQueued,
    JobSubmitted,
    NodeJoined,
    NodeMarked,
    PreemptAsked,
    QueuesChanged,
    Record,
    ScaleAsked,
    StopAsked,
)
from rota.spec.gang import BundleGrant
from rota.spec.ids import NO_EPOCH, Epoch, JobId, NodeId
from rota.spec.job import JobSpec
from rota.spec.queue import Queue
from rota.spec.reasons import Reason, final_state
from rota.spec.resources import Device, Health, Node, Res
from rota.spec.states import JobState
from rota.testing.launcher import NO_FAULTS, SimEngine, SimFaults, SimLauncher, SimProcess
from rota.testing.memory import MemoryLog, VirtualClock
from tests.world.bodies import SimInstance, Store
from tests.world.checkers import Checkers, Violation
from tests.world.jobs import Scripts, after_another, random_job, with_peers
from tests.world.virtual import run

TICK_S = 0.5
PAUSABLE = frozenset(
    {state for state in JobState if state.holds_devices and state not in (JobState.PREEMPTING, JobState.STOPPING)}
    | {JobState.QUEUED}
)
DECIDE_S = 5.0
"""Without news the scheduler looks again this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    """Which faults a seed draws, and how often: mean seconds between two of a kind, or a probability per try.

    Faults come for ``faults_s``; then all jobs must end within ``quiet_max_s``.
    """

    faults_s: float = 90.0
    quiet_max_s: float = 3600.0
    jobs: int = 2
    shape: str = ""
    """Part of the name of the shapes that jobs may have; empty for any."""
    failing_code: bool = False
    imports_s: float | None = None
    """So long a setup takes, on the mean, of which its beats tell that it goes on."""
    kill_instance_s: float | None = None
    hang_instance_s: float | None = None
    kill_master_s: float | None = None
    second_master_s: float | None = None
    restart_service_s: float | None = None
    stop_job_s: float | None = None
    preempt_job_s: float | None = None
    pause_job_s: float | None = None
    scale_role_s: float | None = None
    lose_node_s: float | None = None
    """Then every node is a host of its own, and comes back after a while."""
    drain_node_s: float | None = None
    """It is used again after a while."""
    stray_s: float | None = None
    """A process of a job is there that its log does not know, as after a restore of an older log."""
    apart: bool = False
    """Every node is a host of its own, with a memory of its own."""
    peers: bool = False
    stop_grace_s: tuple[float, ...] = (2.0,)
    """What jobs are given for a stop; one is drawn."""
    crash_before_append_p: float = 0.0
    crash_after_append_p: float = 0.0
    crash_at: int | None = None
    """Kill the master around its append of this number, before or after it is written (odd numbers: after)."""
    store_error_p: float = 0.0
    torn_context_p: float = 0.0
    store_s: float = 0.003
    after: bool = False
    """Each job starts after one before it."""
    limited: bool = False
    """Two queues with limits, jobs of several priorities, and the policy that preempts for them."""
    engine: SimFaults = NO_FAULTS

    @property
    def calm(self) -> bool:
        """True when nothing fails."""
        faults = ("kill_", "hang_", "second_", "lose_", "crash_", "store_error_p", "failing_code")
        drawn = any(getattr(self, one.name) for one in fields(self) if one.name.startswith(faults))
        return not drawn and self.engine == NO_FAULTS

    @staticmethod
    def draw(rng: random.Random) -> Swarm:
        """A random subset of the faults."""

        def maybe(*values: Any, p: float = 0.4) -> Any:
            return rng.choice(values) if rng.random() < p else None

        return Swarm(
            faults_s=rng.choice((30.0, 90.0, 150.0)),
            jobs=rng.choice((1, 2, 3)),
            failing_code=rng.random() < 0.4,
            kill_instance_s=maybe(3.0, 15.0, 40.0, p=0.6),
            hang_instance_s=maybe(40.0, p=0.2),
            kill_master_s=maybe(2.0, 10.0, 30.0),
            second_master_s=maybe(20.0, p=0.2),
            restart_service_s=maybe(10.0, 40.0, p=0.2),
            stop_job_s=maybe(30.0, 80.0, p=0.3),
            preempt_job_s=maybe(20.0, 60.0, p=0.3),
            crash_before_append_p=maybe(0.02, 0.1, p=0.3) or 0.0,
            crash_after_append_p=maybe(0.02, 0.1, p=0.3) or 0.0,
            store_error_p=maybe(0.05, 0.2, p=0.2) or 0.0,
            torn_context_p=maybe(0.2, 1.0, p=0.2) or 0.0,
            store_s=rng.choice((0.003, 0.003, 0.2)),
            engine=SimFaults(
                start_fails_p=maybe(0.05, 0.3, p=0.2) or 0.0,
                reserve_fails_p=maybe(0.2, p=0.15) or 0.0,
                slow_start_p=maybe(0.1, p=0.2) or 0.0,
                late_p=maybe(0.05, 0.3, p=0.3) or 0.0,
                call_s=rng.choice((0.002, 0.002, 0.05, 0.5)),
                hang_p=maybe(0.005, p=0.1) or 0.0,
                seen_after_s=rng.choice((0.02, 0.5, 3.0)),
            ),
        )

    def with_changes(self, rng: random.Random) -> Swarm:
        """The same with jobs that are paused, roles that are scaled, nodes that are lost or drained, now and then."""

        def maybe(*values: float) -> float | None:
            return rng.choice(values) if rng.random() < 0.25 else None

        return replace(
            self,
            pause_job_s=maybe(20.0, 60.0),
            scale_role_s=maybe(5.0, 30.0),
            lose_node_s=maybe(15.0, 40.0),
            drain_node_s=maybe(10.0, 30.0),
            apart=rng.random() < 0.5,
            stop_grace_s=(0.0, 2.0, 10.0, 30.0),
            peers=rng.random() < 0.5,
        )


class WatchedEngine(SimEngine):
    """The simulated engine; the checkers see what is asked of it."""

    checkers: Checkers
    strays: frozenset[str] = frozenset()
    """Names of processes that no log knows: whoever starts beside one before a master has looked does no wrong."""

    def _check_alone(self, new: SimProcess) -> None:
        hidden = {name: self.processes.pop(name) for name in sorted(self.strays & self.processes.keys())}
        super()._check_alone(new)
        self.processes |= hidden

    async def stop(self, handle: Handle, *, grace_s: float) -> None:
        until_s = self.clock.wall_s() + grace_s
        self._see(lambda: self.checkers.stopping(handle.job, handle.instance, handle.epoch, until_s))
        await super().stop(handle, grace_s=grace_s)

    async def reserve(
        self, reservation: Reservation, bundles: Sequence[BundleGrant], *, timeout_s: float
    ) -> Reservation:
        self._see(lambda: self.checkers.reserving(reservation.job, reservation.epoch))
        return await super().reserve(reservation, bundles, timeout_s=timeout_s)

    def _see(self, look: Callable[[], None]) -> None:
        try:
            look()
        except Violation as error:
            self.violations.append(str(error))


Turn = tuple[str, str, str]
"""``job`` or ``instance``, the state before, the state after."""


def turns(before: JobContext, after: JobContext) -> frozenset[Turn]:
    """The changes of state between two contexts."""
    found = {("job", before.state.value, after.state.value)}
    for one in after.instances.values():
        was = before.instances.get(one.id)
        found.add(("instance", was.state.value if was else one.state.value, one.state.value))
    return frozenset(turn for turn in found if turn[1] != turn[2])


class ClientLog:
    """The log as one client sees it; ``plan`` may let the client die around an append, or the store fail."""

    def __init__(self, world: World, die: Callable[[], None]) -> None:
        self._world, self._die = world, die
        self._cut = False

    def cut(self) -> None:
        """The process of this client died."""
        self._cut = True

    def take_epoch(self, scope: str, *, expected: Epoch | None = None) -> Epoch:
        self._reach()
        return self._world.log.take_epoch(scope, expected=expected)

    def fence(self, scope: str) -> Epoch:
        self._reach()
        return self._world.log.fence(scope)

    def append(
        self, events: Sequence[Event], *, writer: Writer, job: JobId | None = None, expected_seq: int | None = None
    ) -> tuple[Record, ...]:
        self._reach()
        swarm, rng = self._world.swarm, self._world.rng
        self._world.appends += 1
        due = swarm.crash_at is not None and swarm.crash_at // 2 == self._world.appends
        turning = self._world.turning(events, job)
        if (
            rng.random() < swarm.crash_before_append_p
            or (due and swarm.crash_at is not None and not swarm.crash_at % 2)
            or self._world.kills("before", turning)
        ):
            self._crash()
        try:
            records = self._world.write(events, writer=writer, job=job, expected_seq=expected_seq)
        except (Fenced, SeqConflict):
            self._world.open_again()  # what was refused left nothing behind
            raise
        if rng.random() < swarm.crash_after_append_p or due or self._world.kills("after", turning):
            self._crash()
        if rng.random() < swarm.store_error_p:
            raise StoreUnavailable("the answer of the store was lost")
        return records

    def read(
        self, *, after: int = 0, job: JobId | None = None, limit: int = 10_000, cluster: bool = False
    ) -> tuple[Record, ...]:
        self._reach()
        return self._world.log.read(after=after, job=job, limit=limit, cluster=cluster)

    def last_number(self) -> int:
        self._reach()
        return self._world.log.last_number()

    def keep_context(self, job: JobId, kept: KeptContext, *, writer: Writer) -> None:
        self._reach()
        self._world.log.keep_context(job, kept, writer=writer)

    def contexts(self, job: JobId) -> tuple[KeptContext, ...]:
        self._reach()
        torn = self._world.rng.random() < self._world.swarm.torn_context_p
        found = self._world.log.contexts(job)
        self._world.given[torn] += bool(found)
        return tuple(replace(one, body=one.body[:-9]) for one in found) if torn else found

    def _reach(self) -> None:
        if self._cut:
            raise asyncio.CancelledError("this client is dead")
        if self._world.rng.random() < self._world.swarm.store_error_p:
            raise StoreUnavailable("the store is away")

    def _crash(self) -> None:
        self._die()
        raise asyncio.CancelledError("died around an append")


@dataclass(slots=True, eq=False)
class MasterProcess:
    """A running master."""

    master: JobMaster
    process: SimProcess
    log: ClientLog
    launcher: SimLauncher


def check_victims(scheduler: Scheduler, victims: Sequence[JobId]) -> None:
    """With one job to preempt for, nobody is asked to leave without whom that job had its place as well."""
    state = scheduler.state
    least = min((state.jobs[job].ask.priority for job in victims), default=0)
    waiting = [row for row in state.waiting_jobs() if row.ask.priority > least]
    if len(waiting) != 1 or any(state.jobs[job].phase == "stopping" for job in state.jobs):
        return
    with state.txn() as txn:
        for victim in victims:
            rest = [other for other in victims if other != victim]
            if place_without(state, txn, waiting[0], scheduler.profile.placer, rest) is not None:
                raise Violation(f"{victim} was asked to leave for {waiting[0].ask.id}, which needs not that")


OpenLog = Callable[[VirtualClock], EventLog]
"""How the log is opened: at the start, and a durable one again when the service starts again."""


class World:
    """Everything of one run."""

    def __init__(
        self, seed: int, clock: VirtualClock, swarm: Swarm | None = None, open_log: OpenLog = MemoryLog
    ) -> None:
        self.seed, self.clock = seed, clock
        self.rng = random.Random(seed)
        self.swarm = swarm or Swarm.draw(self.rng).with_changes(random.Random(-seed))
        self.log, self._open_log = open_log(clock), open_log
        self.store = Store()
        self.nodes = [
            Node(
                id=NodeId(f"n{i}"),
                host=f"n{i}" if self.swarm.lose_node_s or self.swarm.apart else "h0",
                cpus=self.rng.choice((10.0, 16.0)),
                memory_bytes=2**36,
                devices=tuple(Device(index=d, type="SIM") for d in range(4)),
            )
            for i in range(1 if self.swarm.limited else self.rng.randint(1, 3))
        ]
        self.store.hosts = sorted({node.host for node in self.nodes})
        capacity = {node.id: node.cpus for node in self.nodes}
        self.checkers = Checkers(capacity=capacity, store=self.store, calm=self.swarm.calm)
        self.engine = WatchedEngine(
            clock=clock,
            rng=self.rng,
            make_body=self._body,
            faults=self.swarm.engine,
            capacity=capacity,
            hosts=frozenset(node.host for node in self.nodes),
        )
        self.engine.checkers = self.checkers
        self.specs: dict[JobId, JobSpec] = {}
        self.scripts: dict[JobId, Scripts] = {}
        self.masters: dict[JobId, list[MasterProcess]] = {}
        self.appends = 0
        self.given = [0, 0]
        """How often a new master got kept contexts, and how often torn ones."""
        self.unread = 0
        """How many of them could not be read; the runs print nothing of it."""
        self.mastered: set[JobId] = set()
        self.kills_at: Callable[[str, frozenset[Turn]], bool] | None = None
        """Whether the master dies ``before`` or ``after`` an append that changes these states."""
        self.trace = hashlib.sha256()
        self.seen: Counter[str] = Counter()
        """How often each kind of event was written."""
        self._tasks: dict[asyncio.Task[Any], None] = {}

    # -- main path ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Both phases and the checks at the end. Raises Violation."""
        asyncio.get_running_loop().set_exception_handler(self._unheard)
        self._write_nodes()
        service = self.own(self._service_for_ever())
        chaos = [self.own(self._chaos(kind, mean_s)) for kind, mean_s in self._kinds()]
        await self._submit_all()
        await self._until(self.clock.monotonic_s() + self.swarm.faults_s, lambda: False)
        # 2 nothing fails any more
        for task in chaos:
            task.cancel()
        self.engine.faults = replace(NO_FAULTS, start_s=self.swarm.engine.start_s)
        swarm = self.swarm
        kept = {name: getattr(swarm, name) for name in ("jobs", "quiet_max_s", "crash_at", "limited")}
        self.swarm = Swarm(**kept)
        await self._until(self.clock.monotonic_s() + self.swarm.quiet_max_s, self._all_ended)
        await self._until(self.clock.monotonic_s() + 200.0, self._nothing_left)
        service.cancel()
        self._check_end()

    def _check_end(self) -> None:
        self.checkers.at_end(self.log.read(limit=10**9))
        if not self._nothing_left():
            left = [*self.engine.processes, *self.engine.reservations]
            raise Violation(f"left behind: {', '.join(left)}")

    def left_out(self, kept: KeptContext, error: Exception) -> None:
        """A context that cannot be read is one that ``torn_context_p`` cut short; a whole one is always read."""
        if kept.body.endswith("}"):
            self.engine.violations.append(f"the context kept at record {kept.seq} cannot be read: {error!r}")
        self.unread += 1

    async def _until(self, deadline_s: float, done: Callable[[], bool]) -> None:
        while self.clock.monotonic_s() < deadline_s and not done():
            await self.clock.sleep(TICK_S)
            self._safe()

    def _safe(self) -> None:
        if self.engine.violations:
            raise Violation("; ".join(self.engine.violations))
        for task in [task for task in self._tasks if task.done()]:
            del self._tasks[task]
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        for masters in self.masters.values():
            for one in masters:
                if one.process.alive:
                    self.checkers.live(one.master.ctx)

    def _all_ended(self) -> bool:
        return self.checkers.ended >= set(self.specs)

    def _nothing_left(self) -> bool:
        return not self.engine.processes and not self.engine.reservations

    def _unheard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nobody looked at."""
        who = context.get("future") or context.get("task")
        self.engine.violations.append(f"{context['message']}: {context.get('exception')!r} in {who}")

    def own(self, work: Any) -> asyncio.Task[Any]:
        """A task that the world watches: an exception in it ends the run."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        return task

    def open_again(self) -> None:
        """A durable log is opened as a service does that was killed before. Raises what that finds wrong."""
        if isinstance(self.log, SqlLog):
            self.log.close()
            self.log = self._open_log(self.clock)

    # -- the log ------------------------------------------------------------------------------------------------------

    def write(
        self, events: Sequence[Event], *, writer: Writer, job: JobId | None = None, expected_seq: int | None = None
    ) -> tuple[Record, ...]:
        """Every append of everybody comes through here, and is checked."""
        records = self.log.append(events, writer=writer, job=job, expected_seq=expected_seq)
        if writer.epoch != self.log.fence(writer.scope):
            raise Violation(f"{writer.scope}: epoch {writer.epoch} wrote {records[0].event} while fenced")
        for record in records:
            self.trace.update(f"{record.number} {record.job} {record.at:.6f} {record.event}".encode())
            self.seen[type(record.event).__name__] += 1
            self.checkers.see(record, snapshot=self.rng.random() < 0.01)
            if isinstance(record.event, NodeMarked) and record.event.health is Health.SUSPECT:
                self.own(self._look_at(record.event.node))
        return records

    def _write_nodes(self) -> None:
        epoch = self.log.take_epoch(INSTALL_SCOPE)
        for node in self.nodes:
            self.write([NodeJoined(node=node)], writer=Writer(scope=INSTALL_SCOPE, epoch=epoch))

    async def _submit_all(self) -> None:
        for i, swarm in enumerate([self.swarm] * self.swarm.jobs):
            job, calm_s, shape = JobId(f"j{i}"), swarm.faults_s, swarm.shape
            spec, scripts = random_job(self.rng, job, failing=swarm.failing_code, calm_after_s=calm_s, shape=shape)
            if (s := swarm.imports_s) is not None:
                scripts = {role: replace(script, setup_s=s) for role, script in scripts.items()}
            spec = self._limited(spec) if swarm.limited else spec
            spec = with_peers(spec) if swarm.peers else spec
            spec = after_another(self.rng, spec, i) if swarm.after and i else spec
            self.specs[job], self.scripts[job] = spec, scripts
            self._append(job, JobSubmitted(spec=spec))
            self._append(job, JobQueued())
            await self.clock.sleep(self.rng.expovariate(1 / 5.0))

    def _limited(self, spec: JobSpec) -> JobSpec:
        """The job in one of two queues, of which one has a limit, which the largest job fits in alone."""
        queue, limits = self.rng.choice(("a", "b", "b")), self.checkers.queues
        need = sum(bundle.res.cpus for request in requests_of(spec) for bundle in request.bundles)
        limits |= {name: max(need, limits.get(name, 0.0)) for name in ("a", "b")}
        limits["b"] = max(limits["b"], 100.0)  # this one never binds, so that jobs meet at the node
        queues = tuple(to_json_value(Queue(path=name, limit=Res(cpus=limit))) for name, limit in limits.items())
        writer = Writer(scope=INSTALL_SCOPE, epoch=self.log.fence(INSTALL_SCOPE))
        self.write([QueuesChanged(queues=queues)], writer=writer)
        return replace(spec, queue=queue, priority=10 * len(self.specs))

    def _append(self, job: JobId, event: Event, seq: int | None = None) -> None:
        writer = Writer(scope=INSTALL_SCOPE, epoch=self.log.fence(INSTALL_SCOPE))
        turning = self.turning([event], job)
        masters = [one for one in self.masters.get(job, ()) if one.process.alive]
        killed = bool(masters) and self.kills("before", turning)
        if killed:
            self.kill_master(masters[-1])
        self.write([event], writer=writer, job=job, expected_seq=seq)
        if masters and not killed and self.kills("after", turning):
            self.kill_master(masters[-1])

    def turning(self, events: Sequence[Event], job: JobId | None) -> frozenset[Turn]:
        """The changes of state that an append would make; none when nothing depends on them."""
        if job is None or self.kills_at is None:
            return frozenset()
        before = after = self.checkers.shadows.get(job) or initial(job)
        for event in events:
            record = Record(number=0, job=job, seq=after.seq + 1, at=self.clock.wall_s(), event=event)
            after = fold(after, record)
        return turns(before, after)

    def kills(self, when: str, turning: frozenset[Turn]) -> bool:
        """True when the master dies around this append."""
        return self.kills_at is not None and self.kills_at(when, turning)

    # -- the service --------------------------------------------------------------------------------------------------

    async def _service_for_ever(self) -> None:
        while True:
            self.restart_service = asyncio.Event()
            self.open_again()
            life = asyncio.get_running_loop().create_task(self._service())
            both = [life, asyncio.ensure_future(self.restart_service.wait())]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
            life.cancel()
            await self.clock.sleep(1.0)

    async def _service(self) -> None:
        self.log.take_epoch(INSTALL_SCOPE)
        scheduler, seen = Scheduler(default() if self.swarm.limited else fifo(), requests_of), 0
        seqs: dict[JobId, int] = {}
        look_at_s = 0.0
        while True:
            news = False
            for record in self.log.read(after=seen):
                seen, news = record.number, True
                scheduler.apply(record)
                if record.job is not None:
                    seqs[record.job] = record.seq
                    self._follow(record.job, record.event)
            now_s = self.clock.wall_s()
            due = news or now_s >= look_at_s
            look_at_s = now_s + DECIDE_S if due else look_at_s
            outcome = scheduler.decide(now_s) if due else SchedulingOutcome(events=())
            if outcome.broken:
                raise Violation("; ".join(outcome.broken))
            check_victims(scheduler, [job for job, event in outcome.events if isinstance(event, PreemptAsked)])
            for job, event in outcome.events:
                try:
                    self._append(job, event, seqs[job])
                except SeqConflict:
                    break
                seqs[job] += 1
            if outcome.marks:
                writer = Writer(scope=INSTALL_SCOPE, epoch=self.log.fence(INSTALL_SCOPE))
                self.write(outcome.marks, writer=writer)
            await self._ensure_masters()
            await self.clock.sleep(TICK_S)

    def _follow(self, job: JobId, event: Event) -> None:
        if isinstance(event, JobAdmitted) and job not in self.mastered:
            self.mastered.add(job)
        if isinstance(event, StopAsked) and job not in self.mastered and job not in self.checkers.ended:
            self._append(job, JobEnded(state=final_state(event.reason), reason=event.reason))

    async def _ensure_masters(self) -> None:
        for job in sorted(self.mastered):
            alive = any(one.process.alive for one in self.masters.get(job, ()))
            if job not in self.checkers.ended and not alive:
                self.start_master(job)
            if job in self.checkers.ended:
                await self._sweep(job)

    async def _sweep(self, job: JobId) -> None:
        found = self.engine.found(job)
        for handle in found.instances:
            self.own(self.engine.stop(handle, grace_s=0.0))
        if not found.instances:
            for reservation in found.reservations:
                await self.engine.release(reservation)

    # -- masters ------------------------------------------------------------------------------------------------------

    def start_master(self, job: JobId) -> None:
        """A new master; an older one that still runs finds out by its next append."""
        launcher = SimLauncher(self.engine)
        log = ClientLog(self, lambda: self.kill_master(running))
        jm = JobMaster(
            job=job,
            place=lambda workdir: JobPlace(home="/h", job=job, workdir=workdir, launcher="sim"),
            log=log,
            launcher=launcher,
            clock=self.clock,
            offload=self._offload,
        )
        process = self.engine.host(master_handle(job), jm)
        running = MasterProcess(jm, process, log, launcher)
        self.masters.setdefault(job, []).append(running)
        self.own(self._live(running, process.spawn(jm.run())))

    async def _live(self, running: MasterProcess, run: asyncio.Task[Any]) -> None:
        await asyncio.wait([run])
        if not run.cancelled() and (error := run.exception()) is not None and not isinstance(error, Fenced):
            raise error
        self.kill_master(running)

    def kill_master(self, running: MasterProcess) -> None:
        """kill -9; the service starts another one."""
        running.log.cut()
        running.launcher.cut()
        self.engine.end_service(running.process)

    async def _offload(self, question: Callable[[], Any]) -> Any:
        await self.clock.sleep(self.rng.expovariate(1 / self.swarm.store_s))
        return question()

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def _kinds(self) -> list[tuple[Callable[[], None], float]]:
        swarm = self.swarm
        kinds = [
            (self._kill_instance, swarm.kill_instance_s),
            (self._hang_instance, swarm.hang_instance_s),
            (self._kill_a_master, swarm.kill_master_s),
            (self._second_master, swarm.second_master_s),
            (self._restart_the_service, swarm.restart_service_s),
            (self._stop_a_job, swarm.stop_job_s),
            (self._preempt_a_job, swarm.preempt_job_s),
            (self._pause_a_job, swarm.pause_job_s),
            (self._scale_a_role, swarm.scale_role_s),
            (self._lose_a_node, swarm.lose_node_s),
            (self._drain_a_node, swarm.drain_node_s),
            (self._add_a_stray, swarm.stray_s),
        ]
        return [(kind, mean_s) for kind, mean_s in kinds if mean_s is not None]

    async def _chaos(self, kind: Callable[[], None], mean_s: float) -> None:
        while True:
            await self.clock.sleep(self.rng.expovariate(1 / mean_s))
            kind()

    def _kill_instance(self) -> None:
        if self.engine.processes:
            self.engine.kill(self.rng.choice(sorted(self.engine.processes)))

    def _hang_instance(self) -> None:
        if self.engine.processes:
            self.engine.hang(self.rng.choice(sorted(self.engine.processes)))

    def _running_masters(self) -> list[MasterProcess]:
        return [one for job in sorted(self.masters) for one in self.masters[job] if one.process.alive]

    def _kill_a_master(self) -> None:
        if running := self._running_masters():
            self.kill_master(self.rng.choice(running))

    def _second_master(self) -> None:
        jobs = sorted(self.mastered - self.checkers.ended)
        if jobs:
            self.start_master(self.rng.choice(jobs))

    def _restart_the_service(self) -> None:
        self.restart_service.set()

    def _live_jobs(self) -> list[JobId]:
        return sorted(set(self.specs) - self.checkers.ended)

    def _stop_a_job(self) -> None:
        if jobs := self._live_jobs():
            self._append(self.rng.choice(jobs), StopAsked(grace_s=self.rng.choice((0.0, 1.0, 10.0))))

    def _preempt_a_job(self) -> None:
        if holding := [job for job in self._live_jobs() if self.checkers.shadows[job].state.holds_devices]:
            self._leave(self.rng.choice(holding), Reason.PREEMPTED_PRIORITY)

    def _pause_a_job(self) -> None:
        live = [job for job in self._live_jobs() if self.checkers.shadows[job].state in PAUSABLE]
        if live:
            job = self.rng.choice(live)
            self._leave(job, Reason.PAUSED)
            self.own(self._resume(job))

    def _leave(self, job: JobId, reason: Reason) -> None:
        """The job is to give its devices back; where hosts are apart, one of its nodes is out of use for a while."""
        placement = self.checkers.shadows[job].placement
        if self.swarm.apart and placement is not None:
            node = self.rng.choice(sorted({bundle.node for bundle in placement.bundles}))
            self._mark(NodeMarked(node=node, health=Health.SUSPECT, by="admin"))
        self._append(job, PreemptAsked(reason=reason, grace_s=self.rng.choice(self.swarm.stop_grace_s)))

    async def _resume(self, job: JobId) -> None:
        await self.clock.sleep(self.rng.expovariate(1 / 10.0))
        while job not in self.checkers.ended and self.checkers.shadows[job].state is not JobState.PAUSED:
            await self.clock.sleep(1.0)
        if job not in self.checkers.ended:
            self._append(job, JobQueued())

    def _scale_a_role(self) -> None:
        roles = [
            (job, role) for job in self._live_jobs() for role in self.specs[job].roles if role.serves or is_world(role)
        ]
        if roles:
            job, role = self.rng.choice(roles)
            self._append(job, ScaleAsked(role=role.name, n=self.rng.randint(role.replicas_min, role.replicas_max + 1)))

    def _lose_a_node(self) -> None:
        if alive := [node.id for node in self.nodes if node.id not in self.engine.dead]:
            node = self.rng.choice(alive)
            self.engine.lose_node(node)
            if self.rng.random() < 0.5:  # the power, or the engine's part alone
                self.store.wipe(node)
            self.own(self._return(node))

    def _drain_a_node(self) -> None:
        if alive := [node.id for node in self.nodes if node.id not in self.engine.dead]:
            node, notice_s = self.rng.choice(alive), self.rng.choice((0.0, 5.0, 60.0))
            self._mark(NodeMarked(node=node, health=Health.DRAINED, by="admin", notice_s=notice_s))
            self.own(self._look_at(node))

    def _add_a_stray(self) -> None:
        running = [name for name, one in self.engine.processes.items() if one.handle.epoch]
        if running:
            handle = self.engine.processes[self.rng.choice(sorted(running))].handle
            name = instance_name(handle.job, handle.instance, NO_EPOCH)
            stray = SimProcess(handle=replace(handle, name=name, epoch=NO_EPOCH, pid=1), reservation="", bundle=0)
            self.engine.processes.setdefault(name, stray)
            self.engine.strays |= {name}

    async def _return(self, node: NodeId) -> None:
        """It comes back empty, and somebody says that it is fit."""
        await self.clock.sleep(self.rng.uniform(5.0, 60.0))
        self.engine.dead.discard(node)
        self._mark(NodeMarked(node=node, health=Health.HEALTHY, by="admin"))

    async def _look_at(self, node: NodeId) -> None:
        """A node that is there was reported as lost, or drained: somebody finds it fit."""
        await self.clock.sleep(self.rng.uniform(5.0, 60.0))
        if node not in self.engine.dead:
            self._mark(NodeMarked(node=node, health=Health.HEALTHY, by="admin"))

    def _mark(self, event: NodeMarked) -> None:
        self.write([event], writer=Writer(scope=INSTALL_SCOPE, epoch=self.log.fence(INSTALL_SCOPE)))

    def _body(self, spec: InstanceSpec, process: SimProcess) -> SimInstance:
        return SimInstance(
            job=spec.job,
            spec=self.specs[spec.job],
            process=process,
            host=next(node.host for node in self.nodes if node.id == process.handle.node),
            launcher=SimLauncher(self.engine),
            clock=self.clock,
            rng=self.rng,
            script=self.scripts[spec.job][spec.instance.role],
            store=self.store,
            leave=self.engine.exit,
        )


def open_sql(folder: str) -> OpenLog:
    """A log on SQLite in ``folder``."""
    return lambda clock: SqlLog(f"sqlite:///{folder}/log.db", clock=clock, migrate=True)


def play(
    seed: int,
    swarm: Swarm | None = None,
    prepare: Callable[[World], None] = lambda world: None,
    *,
    log: Literal["memory", "sql"] = "memory",
) -> World:
    """One seed from its start to its end. Raises what it found, with the world as ``world`` and how to replay it."""
    master_module.POLL_S, master_module.WATCH_S = 0.5, 5.0  # virtual hours would be spent on looking into the log
    master_module.KEEP_EVERY = 20  # jobs are short here
    kept: list[World] = []
    with tempfile.TemporaryDirectory(prefix="rota-world-") as folder:

        async def main(clock: VirtualClock) -> None:
            kept.append(World(seed, clock, swarm, open_sql(folder) if log == "sql" else MemoryLog))
            master_module.report_unreadable = kept[0].left_out
            prepare(kept[0])
            await kept[0].run()

        said = master_module.report_unreadable
        try:
            run(main)
        except BaseException as error:
            error.add_note(f"replay with: make sim SEED={seed}{' LOG=sql' if log == 'sql' else ''}")
            error.world = kept[0] if kept else None  # type: ignore[attr-defined]
            raise
        finally:
            master_module.report_unreadable = said
            if kept and isinstance(kept[0].log, SqlLog):
                kept[0].log.close()
    return kept[0]
