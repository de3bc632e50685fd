"""The master of a job: feed events to the machine, carry out its commands; replaceable at any instant.

``JobMaster`` is the master over a log, a launcher and a clock, live and simulated alike; ``Master`` is what the engine
hosts: the same in a thread of its own, with the real log and launcher. A new master begins with the newest context that
was kept beside the log and can be read, and replays the records after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import json
import os
import sys
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypedDict, TypeVar

from rota.job import checkpoint
from rota.job.core import migration, shutdown, survival
from rota.job.core.context import JobContext, Process
from rota.job.core.desired import next_emit
from rota.job.core.ledger import FlowCut
from rota.job.core.machine import accepts_commit, fold, initial, step
from rota.job.core.resize import saved_by_script
from rota.job.core.survival import cursor_with
from rota.job.core.transitions import InvalidTransition
from rota.job.health.heartbeat import Heartbeat, HeartbeatAnswer
from rota.job.health.stacks import of_the_job
from rota.job.inspect import import_target
from rota.job.master.diagnosis import DiagnosisManager, WhyDocument
from rota.job.master.executor import Executor, death_event, losses_with
from rota.job.master.inbox import AppendRequest, Inbox, InboxFull, Rendezvous
from rota.job.place import JobPlace
from rota.job.rpc.commit import CommitAgain, CommitCheckpoint, CommitDone, CommitRefused
from rota.job.rpc.peers import PeerTable, table_of
from rota.runtime.clock import Clock, SystemClock
from rota.runtime.event_log.interface import EventLog, KeptContext, Writer, master_scope
from rota.runtime.event_loop import EventLoopThread
from rota.runtime.launcher import Call, CallTimeout, Launcher, ProcessDied, ProcessGone, RemoteError
from rota.runtime.probe import probe_process
from rota.runtime.process import ProcessId, is_stopped, oom_kills
from rota.spec import codec
from rota.spec.codec import JsonObject
from rota.spec.commands import Emit
from rota.spec.errors import Fenced, SeqConflict, StoreUnavailable
from rota.spec.events import (
    CheckpointSaved,
    Committed,
    JobEnded,
    JobEvent,
    MasterStarted,
    ProgressStalled,
    Reattached,
    Record,
)
from rota.spec.ids import Epoch, InstanceId, JobId, RoleName
from rota.spec.states import InstanceState, JobState

KEEP_EVERY = 1000
"""Records of the job from one kept context to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A context and the number in the log of the last record that is in it."""

    ctx: JobContext
    number: int = 0


def newest_context(log: EventLog, job: JobId) -> Replayed:
    """The newest kept context that this code reads; without one, the context before the first record. Blocks."""
    for kept in log.contexts(job):
        try:
            ctx = JobContext.from_json(json.loads(kept.body))
            return Replayed(ctx=ctx, number=kept.number)
        except (ValueError, TypeError, KeyError) as error:
            report_unreadable(kept, error)
    return Replayed(ctx=initial(job))


def report_unreadable(kept: KeptContext, error: Exception) -> None:
    """Report a kept context that this code does not read: the master replays more records, and loses nothing."""
    sys.stderr.write(f"the context kept at record {kept.seq} is left out: {error}\n")


def keep_context(log: EventLog, found: Replayed, writer: Writer) -> None:
    """Write a context beside the log. Blocks. Raises Fenced, StoreUnavailable."""
    kept = KeptContext(seq=found.ctx.seq, number=found.number, body=codec.dumps(found.ctx.to_json()))
    log.keep_context(found.ctx.job, kept, writer=writer)


T = TypeVar("T")


class Offload(Protocol):
    """Runs a blocking call somewhere else."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


class MasterStatus(TypedDict):
    """State of a job, and the last beat of every instance as plain values with its ``age_s``."""

    job: JobId
    state: JobState
    master_epoch: Epoch
    beats: dict[str, JsonObject]


RAY_LAUNCHER = "rota.runtime.ray.launcher:RayLauncher.here"
READ_MAX = 5000
"""Records read at once."""
POLL_S = 0.15
"""The log is read this often for events of the service."""
WATCH_S = 1.0
COPY_LOOK_S, COPY_WAIT_S = 0.05, 8.0
"""Between two looks at whether the commit before has reached another machine, and the longest wait for that."""
STORE_RETRY_S = 0.5
DEGRADED_MAX_S = 600.0
"""Limit of the wait for a store that is away, in which heartbeats are answered; after it the master steps down."""
PUSH_MAX_S, STACKS_MAX_S, ALIVE_MAX_S = 5.0, 3.0, 3.0
CRASH_PAUSE_S = 1.0
"""A master that fails again and again does so no faster than this."""
STORY_MAX = 30


class JobMaster:
    """One run of the master of a job; belongs to one event loop.

    ``offload`` runs a blocking call elsewhere (in virtual time: at once). ``give_back`` drops the tensors of the job,
    before the end is written: whoever reads the end may end this process. ``look_at`` gives the stacks of a process of
    this node that does not answer, empty when it cannot; ``oom_kills`` counts what the kernel ended for memory;
    ``is_stopped`` says whether a process of this node is stopped by a signal.
    """

    def __init__(
        self,
        *,
        job: JobId,
        place: Callable[[str], JobPlace],
        log: EventLog,
        launcher: Launcher,
        clock: Clock,
        offload: Offload = asyncio.to_thread,
        pid: int = 0,
        give_back: Callable[[], None] = lambda: None,
        look_at: Callable[[ProcessId], str] = lambda which: "",
        oom_kills: Callable[[], int | None] = lambda: None,
        is_stopped: Callable[[Process], bool] = lambda which: False,
    ) -> None:
        self.ctx: JobContext = initial(job)
        self.epoch = Epoch(0)
        self._job, self._place, self._log, self._launcher, self._clock = job, place, log, launcher, clock
        self._offload, self._pid, self._give_back, self._look_at = offload, pid, give_back, look_at
        self._number = 0
        self._kept_seq = 0
        self._inbox = Inbox()
        self._story: deque[Record] = deque(maxlen=STORY_MAX)
        self._watch = DiagnosisManager(clock, oom_kills=oom_kills, is_stopped=is_stopped)
        self._executor: Executor | None = None
        self._begun: frozenset[str] = frozenset()
        """Commands that the context asks for and that were begun; a returning master begins all of them anew."""
        self._owned: dict[asyncio.Task[None], None] = {}
        self._table = PeerTable()
        self._rendezvous = Rendezvous()
        self._loaded = asyncio.Event()
        self._saved_s = 0.0

    async def run(self) -> JobContext:
        """Be the master until the job has ended. Raises Fenced when another master has taken over."""
        try:
            # 1 take the epoch of this job: from here on an older master is fenced
            self.epoch = await self._ask_store(lambda: self._log.take_epoch(master_scope(self._job)))
            # 2 replay what happened since the newest context that was kept
            found: Replayed = await self._ask_store(lambda: newest_context(self._log, self._job))
            self.ctx, self._number, self._kept_seq = found.ctx, found.number, found.ctx.seq
            await self._read_log()
            if self.ctx.state.terminal:
                return self.ctx
            # 3 say who is master now
            await self._grant(AppendRequest(MasterStarted(master_epoch=self.epoch, pid=self._pid)))
            # 4 ask what is alive, and compare: the missing are lost, the unexpected must go
            await self._reattach()
            self._saved_s = self._clock.wall_s()  # what was saved before is not a boundary now
            self._loaded.set()
            # 5 for ever: what is decided, then what was reported, then what others wrote
            self._own(self._watch_silences())
            while not self.ctx.state.terminal:
                await self._turn()
                await self._keep_context()
            return self.ctx
        finally:
            await self._close()

    async def _turn(self) -> None:
        if emit := next_emit(self.ctx):
            await self._emit(emit)
            return
        try:
            async with self._clock.timeout(POLL_S):
                request = await self._inbox.get()
        except TimeoutError:
            await self._read_log()
            return
        if isinstance(request, BaseException):
            raise request
        await self._grant(request)

    async def _emit(self, emit: Emit) -> None:
        """Append a fact that follows from the state, only if the state is still the one it follows from."""
        if isinstance(emit.event, JobEnded) and self.ctx.shares_tensors:
            await self._offload(self._give_back)
        try:
            await self._append_at(emit.event, self.ctx.seq)
        except SeqConflict:
            await self._read_log()

    async def _grant(self, request: AppendRequest) -> None:
        """Append what was asked for; a commit only if the state still takes it."""
        while (refusal := self._refusal(request.event)) is None:
            try:
                await self._append_at(request.event, self.ctx.seq)
                break
            except SeqConflict:
                await self._read_log()
        request.answer(refusal)

    def _refusal(self, event: JobEvent) -> Fenced | None:
        if isinstance(event, Committed) and not accepts_commit(self.ctx, event.n, event.loop_epoch):
            return Fenced(
                f"commit {event.n} of loop epoch {event.loop_epoch}: the job is {self.ctx.state} at commit "
                f"{self.ctx.committed} of loop epoch {self.ctx.loop_epoch}"
            )
        return None

    async def _keep_context(self) -> None:
        """Keep it every ``KEEP_EVERY`` records; when the store does not take it, the records are still there."""
        if self.ctx.seq - self._kept_seq < KEEP_EVERY or self.ctx.state.terminal:
            return
        self._kept_seq, found = self.ctx.seq, Replayed(ctx=self.ctx, number=self._number)
        with contextlib.suppress(StoreUnavailable):
            await self._offload(lambda: keep_context(self._log, found, self._writer))

    @property
    def _writer(self) -> Writer:
        return Writer(scope=master_scope(self._job), epoch=self.epoch)

    async def _append_at(self, event: JobEvent, seq: int) -> None:
        records: tuple[Record, ...] = await self._ask_store(
            lambda: self._log.append([event], writer=self._writer, job=self._job, expected_seq=seq)
        )
        self._step(records)

    async def _read_log(self) -> None:
        while True:
            read = functools.partial(self._log.read, after=self._number, job=self._job, limit=READ_MAX)
            records: tuple[Record, ...] = await self._ask_store(read)
            self._step(records)
            if len(records) < READ_MAX:
                return

    async def _ask_store(self, question: Callable[[], T]) -> T:
        """Ask the store; while it is away nothing changes, beats are answered. Raises StoreUnavailable in the end."""
        since_s = self._clock.monotonic_s()
        while True:
            try:
                return await self._offload(question)
            except StoreUnavailable:
                if self._clock.monotonic_s() - since_s > DEGRADED_MAX_S:
                    raise
                await self._clock.sleep(STORE_RETRY_S)

    def _step(self, records: tuple[Record, ...]) -> None:
        """Step the machine and start what it newly asks for. The only place where the context changes."""
        for record in records:
            self._story.append(record)
            self._number = max(self._number, record.number)
        try:
            if self._executor is None:
                self.ctx = functools.reduce(fold, records, self.ctx)
            elif records:
                done = step(self.ctx, records, self._begun)
                self.ctx, self._begun = done.ctx, done.begun
                for command in done.commands:
                    self._executor.launch(command, self.ctx)
                self._executor.keep(self._begun)
                self._push_table()
        except InvalidTransition as error:
            error.events = tuple(self.last_events())
            raise
        if self.ctx.master_epoch > self.epoch:
            raise Fenced(f"master {self.ctx.master_epoch} of {self._job} has taken over from {self.epoch}")

    async def _reattach(self) -> None:
        place = replace(self._place(self.ctx.workdir), owner=self.ctx.owner)
        self._executor = Executor(self._launcher, self._clock, place, self.report, lambda: self._watch.coming(self.ctx))
        watching = asyncio.Event()
        self._own(self._watch_deaths(watching))
        await watching.wait()
        found = await self._launcher.find(self._job)
        for handle in found.instances:
            self._executor.know(handle)
        alive = tuple((one.instance.role, one.instance.rank, one.epoch) for one in found.instances)
        gangs = tuple((one.gang, one.epoch) for one in found.reservations)
        await self._grant(
            AppendRequest(Reattached(master_epoch=self.epoch, alive=alive, gangs=gangs, hosts=found.hosts))
        )

    async def _watch_deaths(self, watching: asyncio.Event) -> None:
        deaths = self._launcher.events(self._job)
        watching.set()
        async for event in deaths:
            if not isinstance(event, ProcessDied):
                for lost in losses_with(self.ctx, event):
                    self.report(lost)
            elif self._executor is None or event.name not in self._executor.stopping:
                self.report(self._watch.with_evidence(death_event(event)))

    async def _watch_silences(self) -> None:
        while True:
            await self._clock.sleep(WATCH_S)
            for event in self._watch.overdue(self.ctx, self._rendezvous.absent(self.ctx)):
                self._own(self._report_overdue(event))  # stacks take seconds; meanwhile the others are judged

    async def _report_overdue(self, event: JobEvent) -> None:
        if isinstance(event, ProgressStalled):
            event = replace(event, stacks=await self.stacks(event.role, event.rank))
        self.report(event)

    def report(self, event: JobEvent) -> None:
        """Put an event into the inbox: it is appended and stepped in its turn."""
        self._inbox.add(AppendRequest(event))

    def _push_table(self) -> None:
        """Send it to every ready instance that calls others; the rest get it with their next heartbeat."""
        table = table_of(self.ctx)
        if table.same(self._table):
            return
        self._table = table
        loop = self.ctx.loop
        if loop is not None and loop.state is InstanceState.READY and loop.process is not None:
            self._own(self._push(loop.id.role, loop.id.rank, table))

    async def _push(self, role: str, rank: int, table: PeerTable) -> None:
        call = Call(method="peers", args=(table.to_json(),), timeout_s=PUSH_MAX_S, control=True)
        with contextlib.suppress(ProcessGone, CallTimeout, RemoteError):
            await self._call_instance(role, rank, call)

    async def _call_instance(self, role: str, rank: int, call: Call) -> Any:
        one = self.ctx.instances.get(InstanceId(RoleName(role), rank))
        if one is None or self._executor is None or one.process is None or not one.process.pid:
            raise ProcessGone(f"{role}/{rank} has no process")
        return await self._launcher.call(self._executor.handle(one.id, one.process.epoch), call)

    async def beat(self, raw: JsonObject) -> JsonObject:
        """A beat of an instance; the answer renews its lease and brings the table if it has an older one."""
        beat = Heartbeat.from_json(raw)
        self._watch.heard(beat)
        if self._loaded.is_set():  # before that it only keeps its lease; what it reports, it reports again
            self._judge(beat)
        table = self._table if self._table.version > beat.table_version else None
        return HeartbeatAnswer(master_epoch=self.epoch, table=table).to_json()

    def _judge(self, beat: Heartbeat) -> None:
        one, lost = self.ctx.instances.get(beat.id), beat.lost
        if lost is not None and one is not None and one.epoch == lost.epoch and one.state is InstanceState.READY:
            self.report(lost)
        if beat.saved_s > self._saved_s and migration.waits_for_boundary(replace(self.ctx, at_s=self._clock.wall_s())):
            self.report(saved_by_script(self.ctx))
        self._saved_s = max(self._saved_s, beat.saved_s)

    async def commit(
        self,
        *,
        n: int,
        loop_epoch: int,
        versions: dict[str, int],
        metrics: JsonObject,
        saved: CommitCheckpoint | None = None,
        cut: FlowCut | None = None,
        waited: dict[str, float] | None = None,
    ) -> CommitDone | CommitRefused | CommitAgain:
        """Make commit ``n`` durable. Repeated by the same loop it is answered from the log.

        ``versions`` maps each weights edge that got version ``n`` to the epoch of its writer. ``saved`` (path, seconds)
        says that a durable checkpoint of it is complete, ``cut`` is what the loop needs to continue from it.
        ``waited`` has the seconds of the loop by role.
        """
        await self._loaded.wait()  # what it adds to is what the log says, which a master that just came does not know
        if not self._has(n, loop_epoch):
            if self.ctx.state.terminal:
                return {"answer": "refused", "text": f"the job is {self.ctx.state}"}
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            cursor = cursor_with(self.ctx.cursor, n, versions, cut)
            published = dict.fromkeys(versions, n)
            epoch = Epoch(loop_epoch)
            event = Committed(
                n=n, loop_epoch=epoch, versions=published, metrics=metrics, cursor=cursor, waited=waited or {}
            )
            self._inbox.add(AppendRequest(event, done))
            try:
                await done
            except Fenced as error:
                # The store may have lost its answer after it wrote this very commit: then it is done.
                if not self._has(n, loop_epoch):
                    return {"answer": "refused", "text": str(error)}
            except InboxFull as error:
                return {"answer": "again", "text": str(error)}
        if saved is not None and self.ctx.checkpoint_n < n:
            self.report(CheckpointSaved(n=n, cursor=dict(self.ctx.cursor), **saved))
        began_s = self._clock.monotonic_s()
        while survival.waits_for_copy(self.ctx, n) and self._clock.monotonic_s() - began_s < COPY_WAIT_S:
            await self._clock.sleep(COPY_LOOK_S)
        return {
            "answer": "done",
            "table": table_of(self.ctx).to_json(),
            "save": migration.needs_save(self.ctx),
            "stop": not shutdown.takes_commits(self.ctx),
        }

    def _has(self, n: int, loop_epoch: int) -> bool:
        return n == self.ctx.committed and loop_epoch == self.ctx.loop_epoch

    async def meet(self, *, role: str, rank: int, epoch: int, world: int, address: str) -> str | None:
        """Wait until all members of an epoch are here; the address of rank 0, or None if the epoch is over."""
        await self._loaded.wait()
        one = self.ctx.instances.get(InstanceId(RoleName(role), rank))
        if one is None or one.epoch != epoch:
            return None
        return await self._rendezvous.meet(role=role, rank=rank, epoch=epoch, world=world, address=address)

    async def stacks(self, role: str, rank: int) -> str:
        """The stacks of one instance; one that does not answer is looked at from outside, if it is on this node."""
        await self._loaded.wait()
        one = self.ctx.instances.get(InstanceId(RoleName(role), rank))
        try:
            if one is not None and one.process is not None and self._watch.is_stopped(one.process):
                raise ProcessGone("its process is stopped by a signal")
            return str(
                await self._call_instance(role, rank, Call(method="stacks", timeout_s=STACKS_MAX_S, control=True))
            )
        except (ProcessGone, CallTimeout, RemoteError) as error:
            if one is None or one.process is None:
                return f"no stacks: {error}"
            which = ProcessId(pid=one.process.pid, start_time=one.process.start_time)
            return of_the_job(await self._offload(lambda: self._look_at(which))) or f"no stacks: {error}"

    async def why(self) -> WhyDocument:
        """The wait-for graph now, with the stacks of the culprit; before a limit is reached, with the suspects."""
        await self._loaded.wait()
        return await self._watch.explain(self.ctx, self._rendezvous.absent(self.ctx), self.stacks)

    async def is_alive(self, role: str, rank: int, started_epoch: int) -> bool:
        """Whether a process still belongs to the job and answers, or is only silent; for who lost its connection."""
        one = self.ctx.instances.get(InstanceId(RoleName(role), rank))
        if one is None or one.process is None or one.process.epoch != started_epoch:
            return False
        try:
            await self._call_instance(role, rank, Call(method="ping", timeout_s=ALIVE_MAX_S, control=True))
        except ProcessGone:
            return False
        except (CallTimeout, RemoteError):
            return True  # it is silent, or answers with an error: its heartbeats decide
        return True

    async def ping(self) -> None:
        """Answers at once while the loop of this master turns, whatever else it waits for."""

    async def status(self) -> MasterStatus:
        """The state of the job and the last beat of every instance, with its age."""
        await self._loaded.wait()
        now_s = self._clock.monotonic_s()
        beats = {str(one): {**beat.to_json(), "age_s": now_s - at_s} for one, (beat, at_s) in self._watch.beats.items()}
        return {"job": self._job, "state": self.ctx.state, "master_epoch": self.epoch, "beats": beats}

    def last_events(self) -> list[str]:
        """The last events, for the report of an internal failure."""
        return [f"{record.seq} {record.event}" for record in self._story]

    def _own(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._owned[task] = None
        task.add_done_callback(self._disown)

    def _disown(self, task: asyncio.Task[None]) -> None:
        """A task that failed fails the master: nothing continues as if it had worked."""
        self._owned.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._inbox.add(error)

    async def _close(self) -> None:
        tasks = list(self._owned)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._executor is not None:
            await self._executor.close()
        if self.ctx.state.terminal:
            self._send_away()

    def _send_away(self) -> None:
        """The job is over: end every wait. A master that merely fails leaves them to the next one."""
        self._loaded.set()
        self._inbox.refuse(Fenced(f"the job is {self.ctx.state}"))
        self._rendezvous.give_up()


ASKED = frozenset(
    name for name, method in vars(JobMaster).items() if inspect.iscoroutinefunction(method) and name[0] != "_"
) - {"run"}
"""Methods of a JobMaster for the processes of the job and the service."""


class Master:
    """The master as the engine hosts it: detached, restarted by the engine, no user code, no torch.

    ``db_url`` is the log, ``home`` the folder of the installation, ``launcher`` the import path of what opens the
    launcher in this process and in the instances.
    """

    def __init__(self, *, job: str, db_url: str, home: str, launcher: str = RAY_LAUNCHER) -> None:
        self._thread = EventLoopThread("master")
        self._job = JobId(job)
        found = self._thread.submit(self._make(db_url, home, launcher)).result()
        self._master: JobMaster = found
        self._run = self._thread.submit(self._live())

    async def _make(self, db_url: str, home: str, launcher: str) -> JobMaster:
        sql: Any = importlib.import_module("rota.runtime.event_log.sql")
        opened: Any = import_target(launcher)
        return JobMaster(
            job=self._job,
            place=lambda workdir: JobPlace(home=home, job=self._job, workdir=workdir, launcher=launcher),
            log=sql.SqlLog(db_url),
            launcher=opened(),
            clock=SystemClock(),
            pid=os.getpid(),
            give_back=functools.partial(checkpoint.give_back, self._job, home),
            look_at=probe_process,
            oom_kills=oom_kills,
            is_stopped=lambda which: is_stopped(ProcessId(pid=which.pid, start_time=which.start_time)),
        )

    async def _live(self) -> None:
        try:
            await self._master.run()
        except Fenced:
            os._exit(0)  # another master has taken over; this process must not answer in its place
        except Exception:  # noqa: BLE001 - the edge of the process: the engine starts it again, and it replays
            traceback.print_exc()
            sys.stderr.write("the last events of the job:\n" + "\n".join(self._master.last_events()) + "\n")
            sys.stderr.flush()
            await SystemClock().sleep(CRASH_PAUSE_S)
            os._exit(1)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """A method of the JobMaster out of ``ASKED``, run in its thread."""
        if name not in ASKED:
            raise AttributeError(name)
        method = getattr(self._master, name)

        async def asked(*args: Any, **kwargs: Any) -> Any:
            return await self._thread.run(method(*args, **kwargs))

        return asked
