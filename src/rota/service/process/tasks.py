"""Background tasks of the service: liveness file, supervisor, machines of an engine, hangs, idle jobs, old logs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace

from rota.runtime import process
from rota.runtime.clock import Clock
from rota.runtime.environ import Home
from rota.runtime.probe import LOOK_S, HangWatch, end_hung, note_replaced, noted
from rota.runtime.process import SUPERVISOR, RunFolder
from rota.service.control.snapshot import SnapshotFile
from rota.service.process.assembly import node_changes, take_nodes, wanted_nodes
from rota.service.process.daemon import ensure_supervisor, start_snapshot
from rota.service.rest.deps import AppState, append_live
from rota.service.views.alerts import HANG_MIN_S, suspicion
from rota.service.views.job_history import JobHistory
from rota.spec.errors import Conflict, EngineUnavailable, RotaError, StoreUnavailable
from rota.spec.events import PartReplaced, StopAsked
from rota.spec.ids import JobId
from rota.spec.reasons import Reason
from rota.spec.states import JobState

HANGS_S = 10.0
"""Between two looks at the running jobs for one that may hang."""
NODES_S = 2.0
"""Between two looks at a given engine: after 'ray start' a machine gets work within this time."""
END_S = 5.0
IDLE_LOOK_S = 2.0
IDLE_CORES = 0.1
"""What a notebook server without a user needs is below it, a computation above."""
SNAPSHOT_EVERY = 5_000
"""Records after the last snapshot from which on another one is made: a start reads them in about a second."""
SNAPSHOT_LOOK_S = 5.0
SNAPSHOT_REST_FACTOR = 9.0
"""Pause after a snapshot, as a multiple of its duration: they take at most a tenth of a core."""
SAME_S = 60.0
"""Notes of one process within this time are of one death."""
LOGS_S = 3600.0
DAY_S = 86_400.0

_log = logging.getLogger("rota.service")


async def show_life(app: AppState) -> None:
    """Until cancelled: touch the pulse, which the supervisor looks at. Does nothing else, so that nothing delays it."""
    while True:
        with contextlib.suppress(OSError):
            app.home.service_pulse.touch(mode=0o600)
        await app.clock.sleep(LOOK_S)


async def keep_snapshot(app: AppState, file: SnapshotFile) -> None:
    """Until cancelled: have a snapshot made whenever a start would have to read many records after the last one."""
    while True:
        while app.loop.installation.number - file.number() < SNAPSHOT_EVERY:
            await app.clock.sleep(SNAPSHOT_LOOK_S)
        began_s = app.clock.monotonic_s()
        child = await asyncio.to_thread(start_snapshot, app.settings, app.home)
        try:
            status = await asyncio.to_thread(child.wait)
        finally:
            child.kill()
        if status:
            _log.error("no snapshot was made: its process ended with %s", status)
        took_s = app.clock.monotonic_s() - began_s
        await app.clock.sleep(max(SNAPSHOT_LOOK_S, SNAPSHOT_REST_FACTOR * took_s))


async def wait_removed(home: Home, clock: Clock) -> None:
    """Return once the home was removed, also when another one was made at its path."""
    mine = home.run.stat().st_ino
    while True:
        await clock.sleep(LOOK_S)
        try:
            if home.run.stat().st_ino != mine:
                return
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError:  # the disk does not answer
            continue


async def watch_parts(app: AppState) -> None:
    """Until cancelled: keep the supervisor, and put into the log what the watchers noted."""
    looks = HangWatch()
    while True:
        try:
            await asyncio.to_thread(_watch_supervisor, app, looks)
            await _log_replaced(app)
        except (OSError, RotaError) as error:  # the disk or the store is away: looked at again
            _log.warning("the parts of the installation: %s", error)
        await app.clock.sleep(LOOK_S)


def _watch_supervisor(app: AppState, looks: HangWatch) -> None:
    """Start the supervisor again when it is gone or hangs; a service that was started without one has none."""
    run = RunFolder(app.home.run)
    record = run.read(SUPERVISOR)
    if record is None:
        return
    if process.is_alive(record.id):
        if why := looks.look(record.id):
            end_hung(record.id, run.path, SUPERVISOR, why, wait_s=END_S)
        return
    if looks.which == record.id:
        note_replaced(run.path, SUPERVISOR, record.pid, "ended")
        looks.which = None  # its end is noted once, however often it is looked at
    ensure_supervisor(app.settings, app.home)


async def _log_replaced(app: AppState) -> None:
    """Put what the watchers noted into the log, each death once: a crash leaves its note, and two may see it."""
    known = {(one.part, one.pid): one.found_at for one in app.loop.installation.replaced}
    for path, one in (await asyncio.to_thread(noted, app.home.run)).items():
        if abs(one.at - known.get((one.part, one.pid), -SAME_S)) >= SAME_S:
            known[one.part, one.pid] = one.at
            text = f"{one.part}, process {one.pid}, {one.why}"
            await app.loop.append([PartReplaced(part=one.part, pid=one.pid, text=text, found_at=one.at)])
        path.unlink(missing_ok=True)


def not_known(app: AppState, why: str = "it has not answered yet") -> str:
    """What jobs wait for until the engine has said which machines it has."""
    where = f" at {app.settings.ray_address}" if app.settings.ray_address else ""
    return f"the machines of the engine{where} are not known: {why}"


async def keep_nodes(app: AppState) -> None:
    """Until cancelled. Nothing is decided before the first answer; while one is awaited later, the known nodes stay."""
    own = {} if app.settings.ray_address else {node.id: node for node in wanted_nodes(app.settings)}
    while True:
        try:
            found, alive = await app.engine.nodes()
            app.loop.unusable = app.engine.unusable
            await take_nodes(app, node_changes(app, ({node.id: node for node in found} | own).values(), alive))
            app.loop.decide_from_now()
        except (EngineUnavailable, StoreUnavailable) as error:
            text = not_known(app, str(error))
            _log.warning("%s", text)
            if app.loop.unknown:
                app.loop.unknown = text
        await app.clock.sleep(NODES_S)


async def watch_hangs(app: AppState) -> None:
    """Until cancelled: ask the master of each running job whose instances are silent for its wait graph."""
    while True:
        try:
            await look_for_hangs(app)
        except (EngineUnavailable, StoreUnavailable) as error:
            _log.warning("looking for hangs later: %s", error)
        await app.clock.sleep(HANGS_S)


async def look_for_hangs(app: AppState) -> None:
    """One look; a job that makes progress again, or has ended, is not suspected any more."""
    running = [one for one in app.loop.installation.live.values() if one.state is JobState.RUNNING and one.master]
    for gone in app.suspicions.keys() - {one.id for one in running}:
        del app.suspicions[gone]
    for job in running:
        try:
            await _look_at(app, job.id)
        except EngineUnavailable as error:
            _log.warning("looking later whether %s hangs: %s", job.id, error)


async def _look_at(app: AppState, job: JobId) -> None:
    beats = await app.engine.beats(job)
    silent = any(max(one["idle_s"], one["age_s"]) >= HANG_MIN_S for one in beats.values())
    found = suspicion(await app.engine.why(job), app.clock.wall_s()) if silent else None
    before = app.suspicions.pop(job, None)
    if found is not None:  # the same silence keeps its beginning, so that its alert keeps its id
        same = before is not None and before.members == found.members
        app.suspicions[job] = replace(found, since=before.since) if same and before is not None else found


async def watch_idle(app: AppState) -> None:
    """Until cancelled: end jobs that were not used for their idle limit; close the ports of those that have ended."""
    try:
        while True:
            try:
                await look_for_idle(app)
            except (EngineUnavailable, StoreUnavailable, Conflict) as error:
                _log.warning("looking for idle jobs later: %s", error)
            await app.clock.sleep(IDLE_LOOK_S)
    finally:
        await app.forwards.close()


async def look_for_idle(app: AppState) -> None:
    """One look: a job is in use while its ports are, and while its processes use more than ``IDLE_CORES``."""
    live = app.loop.installation.live
    for job in {key[0] for key in app.forwards.open_ports} - live.keys():
        await app.forwards.close(job)
    app.terminals_used_s = {job: used_s for job, used_s in app.terminals_used_s.items() if job in live}
    limited = [one for one in live.values() if one.spec.idle_limit_s and one.state is JobState.RUNNING and not one.stop]
    app.idle_since_s = {one.id: app.idle_since_s.get(one.id, app.clock.monotonic_s()) for one in limited}
    for one in limited:
        beats, now_s = await app.engine.beats(one.id), app.clock.monotonic_s()
        if not beats or any(beat.get("cpus", 0.0) > IDLE_CORES for beat in beats.values()):
            app.idle_since_s[one.id] = now_s
        since_s = max(app.idle_since_s[one.id], app.used_s(one.id))
        if now_s - since_s >= (one.spec.idle_limit_s or 0.0):
            await append_live(app, one, StopAsked(reason=Reason.IDLE, by="service", grace_s=one.spec.grace_s))


def old_jobs(jobs: Mapping[JobId, JobHistory], *, now: float, kept_days: float) -> list[JobId]:
    """Jobs that ended more than ``kept_days`` days before ``now``; none for 0 days, which keeps logs for ever."""
    if not kept_days:
        return []
    since = now - kept_days * DAY_S
    return [one.id for one in jobs.values() if one.ended_at is not None and one.ended_at < since]


def remove_logs(home: Home, jobs: Iterable[JobId]) -> int:
    """Remove the logs of jobs; the number of jobs that had some. A failure is logged and tried again; blocks."""
    removed = 0
    for job in jobs:
        dirs = home.job(job)
        there = [path for path in (dirs.logs, dirs.spans) if path.is_dir()]
        for path in there:
            try:
                shutil.rmtree(path)
            except OSError as error:
                _log.warning("the logs of %s stay: %s", job, error)
        removed += bool(there)
    return removed


async def keep_logs(jobs: Mapping[JobId, JobHistory], home: Home, clock: Clock, kept_days: float) -> None:
    """Until cancelled: look once an hour."""
    while kept_days:
        old = old_jobs(jobs, now=clock.wall_s(), kept_days=kept_days)
        if removed := await asyncio.to_thread(remove_logs, home, old):
            _log.info("removed the logs of %s jobs that ended %g days ago", removed, kept_days)
        await clock.sleep(LOGS_S)
