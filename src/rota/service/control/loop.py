"""Control loop of the service: read the log, call the listeners, decide, append, act; every restart is a replay."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rota.cluster.live import SchedulingOutcome
from rota.runtime.clock import Clock
from rota.runtime.environ import Home
from rota.runtime.event_log.interface import EventLog, Writer
from rota.runtime.job_files import FILES_LABEL, OWN_FILES
from rota.service.control.engine import GIVE_BACK_TARGET, Engine
from rota.service.control.job_files import upload_output
from rota.service.control.snapshot import Views
from rota.service.control.submission import Refused, fetch_data, inspect_workloads, install_packages, pull_image
from rota.service.views.job_history import JobHistory
from rota.spec.errors import EngineUnavailable, Fenced, RotaError, SeqConflict, StoreUnavailable
from rota.spec.events import (
    EngineLost,
    EngineStateVolatile,
    Event,
    JobEnded,
    JobQueued,
    JobWaits,
    NodeMarked,
    Record,
    UploadStarted,
)
from rota.spec.ids import JobId
from rota.spec.reasons import Reason, final_state
from rota.spec.resources import LOST_BY, Health
from rota.spec.states import JobState

PAGE = 10_000
SWEEP_PERIOD_S = 30.0
RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
INSPECTIONS_MAX = 2
FAILED_PAUSE_S = 1.0
"""Pause before work that failed with an unexpected error is begun again."""

_log = logging.getLogger("rota.service")

Listener = Callable[[Record], None]


class ServiceLoop:
    """Owns the read side (``views``, listeners) and every write of the service.

    All of it lives on one event loop; only the log and the engine are reached from threads and children.
    """

    def __init__(
        self,
        *,
        log: EventLog,
        writer: Writer,
        clock: Clock,
        views: Views,
        engine: Engine,
        poll_s: float,
    ) -> None:
        self.log, self.writer, self.clock = log, writer, clock
        self.views, self.engine = views, engine
        self.installation, self.scheduler = views.installation, views.scheduler
        self.stale_since: float | None = None
        self.turned_s = clock.monotonic_s()
        """When the last round was over; it grows old when the loop is stuck."""
        self.timed: Callable[[str, float], None] = lambda what, seconds: None
        """Called with the duration in seconds of each ``read`` and ``append`` of the log and each ``decide``."""
        self.broken: tuple[str, ...] = ()
        """Bugs of the scheduler that its last round met."""
        self._listeners: list[Listener] = []
        self._poll_s = poll_s
        self._wake = asyncio.Event()
        self._moved = asyncio.Condition()
        self._due_at: float | None = 0.0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._engine_name = ""
        self._fenced: Fenced | None = None
        self._ends = 0
        self._mastered: dict[JobId, tuple[int, int]] = {}
        self._changed: dict[str, None] = {}
        """Jobs with a record, or with work that ended, since the last round acted; in their order."""
        self._acted_for: int | None = None
        """Generation of the engine in the last round; another one concerns every job."""
        self._inspections = asyncio.Semaphore(INSPECTIONS_MAX)
        self.stopping = False
        self.unknown = ""
        """Why the machines of another's engine are not known; ``decide_from_now`` empties it."""
        self.unusable: Sequence[Mapping[str, Any]] = ()
        """Machines of the engine that get no work, each with ``machine``, ``why`` and ``remedy``."""
        self._held_until_s: float | None = None

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` with every record, after the read side took it in. To be called before ``replay``."""
        self._listeners.append(listener)

    @property
    def undecided(self) -> str:
        """Why nothing is decided, empty when it is: the service is held, or its machines are not known."""
        return "the service is being taken down" if self.held else self.unknown

    @property
    def held(self) -> bool:
        """True while nothing is decided because the service is about to be taken down."""
        return self._held_until_s is not None

    def hold(self, for_s: float) -> None:
        """Start nothing for this time from now on: the service is about to be taken down."""
        self._held_until_s = self.clock.monotonic_s() + for_s
        self._spawn("hold", self._release())

    async def _release(self) -> None:
        while self._held_until_s is not None and (left_s := self._held_until_s - self.clock.monotonic_s()) > 0:
            await self.clock.sleep(left_s)  # another hold may have come meanwhile
        self._held_until_s, self._due_at = None, 0.0
        self._wake.set()

    def decide_from_now(self) -> None:
        """The machines are known: decide on all that came until now."""
        if self.unknown:
            self.unknown, self._due_at = "", 0.0
            self._wake.set()

    async def append(
        self, events: list[Event], *, job: JobId | None = None, expected_seq: int | None = None
    ) -> tuple[Record, ...]:
        """Append and wait until the read side shows it. Raises what the log raises."""
        try:
            written = await self._write(events, job=job, expected_seq=expected_seq)
        except Fenced as fenced:
            self._replaced(fenced)
            raise
        self._wake.set()
        await self.wait_for(written[-1].number)
        return written

    async def _write(
        self, events: Sequence[Event], *, job: JobId | None = None, expected_seq: int | None = None
    ) -> tuple[Record, ...]:
        began_s = self.clock.monotonic_s()
        written = await asyncio.to_thread(
            self.log.append, events, writer=self.writer, job=job, expected_seq=expected_seq
        )
        self.timed("append", self.clock.monotonic_s() - began_s)
        return written

    async def wait_for(self, number: int) -> None:
        """Wait until the read side has taken in record ``number``."""
        async with self._moved:
            await self._moved.wait_for(lambda: self.installation.number >= number or self.stopping)

    async def replay(self) -> None:
        """Take in the whole log, before the first request."""
        while await self._read():
            pass

    async def run(self) -> None:
        """Turn until ``stop``; a store that is away makes it wait, never end.

        Raises Fenced when another service took over the installation.
        """
        failures = 0
        while not self.stopping:
            if self._fenced is not None:
                raise self._fenced
            if "sweeper" not in self._tasks:
                self._spawn("sweeper", self._sweep_forever())
            try:
                while await self._turn():
                    pass
                failures, self.stale_since = 0, None
                self.turned_s = self.clock.monotonic_s()
                pause_s = self._poll_s
            except StoreUnavailable as error:
                self.stale_since = self.stale_since or self.clock.monotonic_s()
                pause_s = RETRY_S[min(failures, len(RETRY_S) - 1)]
                failures += 1
                _log.error("the event log cannot be reached: %s", error)
            await self._pause(pause_s)

    async def stop(self) -> None:
        """End the loop and every task it started."""
        self.stopping = True
        self._wake.set()
        async with self._moved:
            self._moved.notify_all()
        for task in tuple(self._tasks.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, RotaError):
                await task

    async def _pause(self, pause_s: float) -> None:
        if not self.undecided and self._due_at is not None:
            pause_s = min(pause_s, max(0.0, self._due_at - self.clock.wall_s()))
        with contextlib.suppress(TimeoutError):
            async with self.clock.timeout(max(pause_s, 0.001)):
                await self._wake.wait()
        self._wake.clear()

    async def _turn(self) -> bool:
        """One round; True when something was appended, so that the next round must follow at once."""
        # 1. read what anybody appended, and fold it
        moved = await self._read()
        # 2. end what was stopped while it has no master and needs none to end
        wrote = await self._end_the_waiting()
        # 3. decide, when something changed or a time has come
        now = self.clock.wall_s()
        if not self.undecided and (moved or (self._due_at is not None and now >= self._due_at)):
            outcome = self._decide(now)
            self._due_at = outcome.wake_at
            # 4. append what was decided; what conflicts is decided anew on the newer state
            wrote = await self._append_all(outcome.events) or wrote
            if outcome.marks:
                await self._write(list(outcome.marks))
                wrote = True
        # 5. act on the jobs that changed: whatever their state asks for and is not under way
        same_engine = self.engine.generation == self._acted_for
        changed = self._changed if same_engine else dict.fromkeys(self.installation.live)
        self._changed, self._acted_for = {}, self.engine.generation
        for job in changed:
            if (history := self.installation.live.get(JobId(job))) is not None:
                self._act(history)
        return wrote

    def _decide(self, now: float) -> SchedulingOutcome:
        """Ask the scheduler. A bug in it is logged and costs what it touches; jobs that run continue in any case."""
        began_s = self.clock.monotonic_s()
        outcome = SchedulingOutcome(events=(), wake_at=now + SWEEP_PERIOD_S)
        try:
            outcome = self.scheduler.decide(now)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an edge: what runs must be watched
            _log.error("the scheduler failed: nothing new starts", exc_info=error)
            outcome = replace(outcome, broken=(f"nothing new starts: {error!r}",))
        self.timed("decide", self.clock.monotonic_s() - began_s)
        for text in set(outcome.broken) - set(self.broken):
            _log.critical("the scheduler contradicts itself: %s", text)
        self.broken = outcome.broken
        return outcome

    async def _read(self) -> bool:
        began_s = self.clock.monotonic_s()
        records = await asyncio.to_thread(self.log.read, after=self.installation.number, limit=PAGE)
        self.timed("read", self.clock.monotonic_s() - began_s)
        if not records:
            return False
        for record in records:
            self.views.apply((record,))
            for listener in self._listeners:
                listener(record)
            if record.job is not None:
                self._changed[record.job] = None
            if isinstance(record.event, JobEnded) and record.job is not None:
                self._mastered.pop(record.job, None)
                self._ends += 1
        async with self._moved:
            self._moved.notify_all()
        return True

    async def _append_all(self, events: Iterable[tuple[JobId, Event]]) -> bool:
        wrote = False
        for job, event in events:
            history = self.installation.live.get(job)
            if history is not None:
                wrote = await self._append_if_current(history, event) or wrote
        return wrote

    async def _append_if_current(self, history: JobHistory, event: Event) -> bool:
        try:
            await self._write([event], job=history.id, expected_seq=history.seq)
        except SeqConflict:
            self._due_at = 0.0  # the job moved on: read, then decide again
        return True

    async def _end_the_waiting(self) -> bool:
        wrote = False
        for history in tuple(self.installation.live.values()):
            if history.stop is not None and history.holds_nothing:
                reason = history.stop.reason
                ended = JobEnded(state=final_state(reason), reason=reason, text=f"stopped by {history.stop.by}")
                wrote = await self._append_if_current(history, ended) or wrote
        return wrote

    def _act(self, history: JobHistory) -> None:
        if history.state is JobState.SUBMITTED and history.stop is None:
            self._spawn(f"inspect/{history.id}", self._inspect(history))
        elif not history.holds_nothing and (history.state.holds_devices or history.stop is not None):
            wanted = (history.attempts[-1].attempt, self.engine.generation)
            if self._mastered.get(history.id) != wanted:
                self._spawn(f"master/{history.id}", self._ensure_master(history))
            if history.ctx.uploads:
                self._spawn(f"upload/{history.id}", self._upload(history))

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        if name in self._tasks or self.stopping:
            work.close()
            return
        task = asyncio.create_task(self._paced(name, work), name=name)
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._done(name, work))

    async def _paced(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Fenced as fenced:
            self._replaced(fenced)
        except Exception:  # noqa: BLE001 - a bug in one job's work must not end the others'; the next turn begins it again
            _log.exception("%s failed", name)
            await self.clock.sleep(FAILED_PAUSE_S)

    def _done(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        work.close()  # one that was cancelled before it began
        self._tasks.pop(name, None)
        self._changed[name.partition("/")[2]] = None
        self._wake.set()

    def _replaced(self, fenced: Fenced) -> None:
        """Another service has the installation: end at the next turn."""
        self._fenced = fenced
        self._wake.set()

    async def _inspect(self, history: JobHistory) -> None:
        # Not among the inspections, which are few at once: a download may take minutes.
        spec = history.spec
        here = not any((FILES_LABEL, OWN_FILES) in node.labels for node in self.installation.usable_nodes())
        fetched = await fetch_data(spec, history.submitted.user, here=here)
        fetched = fetched or await pull_image(spec)
        installed = fetched or await install_packages(spec, history.submitted.workdir)
        async with self._inspections:
            refused = isinstance(installed, Refused)
            found = installed if refused else await inspect_workloads(spec, history.submitted.workdir, installed)
        if history.spec is not spec:
            return  # it was edited meanwhile: the next turn looks at what it is now
        if isinstance(found, Refused):
            ended = JobEnded(
                state=final_state(found.reason),
                reason=found.reason,
                text=found.text,
                role=next((role.name for role in history.spec.roles if role.name == found.role), None),
                traceback=found.traceback,
            )
            await self._append_if_current(history, ended)
            return
        await self._append_if_current(history, JobQueued(spec=found))

    async def _upload(self, history: JobHistory) -> None:
        if history.ctx.uploads_since_s is None:
            await self.append([UploadStarted(url=history.spec.output_url or "")], job=history.id)
        ended = await upload_output(history, self.installation, self.engine, Home.find(), self.clock)
        await self._write([ended], job=history.id)

    async def _ensure_master(self, history: JobHistory) -> None:
        attempt = history.attempts[-1].attempt
        for pause_s in (*RETRY_S, None):
            generation = self.engine.generation
            try:
                await self.engine.ensure_master(history.id)
            except EngineUnavailable as error:
                await self._report_waiting(history, str(error))
                if pause_s is None:
                    return
                await self.clock.sleep(pause_s)
                continue
            self._mastered[history.id] = (attempt, generation)
            await self._note_engine()
            return

    async def _report_waiting(self, history: JobHistory, text: str) -> None:
        """Let people see that the job has devices and waits for the engine; once for each cause."""
        _log.warning("master of %s: %s", history.id, text)
        known = history.waits
        if known is None or known.reason is not Reason.ENGINE_STARTING or known.text != text:
            await self._append_if_current(history, JobWaits(reason=Reason.ENGINE_STARTING, text=text))

    async def _note_engine(self) -> None:
        """Record that the engine is another one, or that its state is not durable; once each."""
        found = (await self.engine.status()).get("engine", {})
        name = str(found.get("engine", ""))
        if not name or name == self._engine_name:
            return
        events: list[Event] = []
        if self._engine_name:
            events.append(EngineLost(text=f"{self._engine_name} is gone, {name} is new"))
        if found.get("volatile"):
            events.append(EngineStateVolatile(text=f"{name} keeps its state in memory"))
        self._engine_name = name
        events += self._returned(name)
        if events:
            await self._write(events)

    def _returned(self, engine: str, until: float = math.inf) -> list[Event]:
        """Nodes that a job reported as lost, until then, and that did not leave: they may be used again."""
        return [
            NodeMarked(node=one.node.id, health=Health.HEALTHY, by=LOST_BY, text=f"it did not leave {engine}")
            for one in self.installation.nodes.values()
            if one.node.health is Health.SUSPECT and one.marked_by == LOST_BY and not one.lost
            if one.marked_at <= until
        ]

    async def _sweep_forever(self) -> None:
        while True:
            ends = self._ends
            await self._sweep_ended()
            with contextlib.suppress(TimeoutError):
                async with self.clock.timeout(SWEEP_PERIOD_S):
                    await self._wait_for_end(ends)

    async def _wait_for_end(self, ends: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self._ends != ends)

    async def _sweep_ended(self) -> None:
        """List first, read the log second: a job submitted in between is never taken for a leftover."""
        try:
            found = await self.engine.jobs()
            if back := self._returned("the engine", self.clock.wall_s() - SWEEP_PERIOD_S):
                await self._write(back)  # it was recorded while no job asked for its master
            if not found:
                return
            await self.wait_for(await asyncio.to_thread(self.log.last_number))
            for job in found:
                if job not in self.installation.live:
                    await self.engine.sweep(job, give_back=GIVE_BACK_TARGET)
        except (EngineUnavailable, StoreUnavailable) as error:
            _log.warning("sweeping later: %s", error)
