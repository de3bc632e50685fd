"""The only place where the parts are wired together."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
from collections.abc import Container, Iterable
from dataclasses import replace

from rota.cluster.live import Scheduler
from rota.cluster.policies import get_profile
from rota.job.core.placement import requests_of
from rota.runtime import cache, data_cache, image
from rota.runtime.clock import SystemClock
from rota.runtime.environ import Home
from rota.runtime.event_log.interface import INSTALL_SCOPE, EventLog, Writer
from rota.runtime.event_log.sql import SqlLog
from rota.runtime.node import LOCAL_HOST, host_name, local_node, own_names
from rota.runtime.random import SystemRandom
from rota.runtime.ray.engine import LOOPBACK as LOOPBACK_ADDRESS
from rota.runtime.ray.engine import EngineSettings
from rota.runtime.secrets import Vault
from rota.runtime.topology import FILE, read_topology
from rota.service.config import Settings, rota_version
from rota.service.control.engine import Engine, NoEngine, located
from rota.service.control.forecasts import Forecasts
from rota.service.control.intake import Intake
from rota.service.control.loop import ServiceLoop
from rota.service.control.snapshot import SnapshotFile, Views, program
from rota.service.metrics import Metrics
from rota.service.rest.auth import Audit, Auth, ensure_token
from rota.service.rest.deps import AppState, Restored, append_live
from rota.service.rest.machine_names import MachineNames
from rota.service.views.job_history import JobHistory
from rota.service.webhooks import Notifier
from rota.spec.errors import Conflict, UnknownName
from rota.spec.events import DowntimePassed, Event, NodeJoined, NodeLost, PreemptAsked, Record, ServiceStarted
from rota.spec.ids import LOOPBACK, Epoch
from rota.spec.reasons import Reason
from rota.spec.resources import Node, pretend_nodes
from rota.spec.states import JobState

WARM = 2
"""Processes that the engine keeps ready: one for the master of a job and one for its first instance."""
PRELOAD = (
    "rota.runtime.ray.launcher",
    "rota.runtime.event_log.sql",
    "rota.job.master.executor",
    "rota.job.health.heartbeat",
)
"""What a process that is kept ready has imported; nothing with numpy, which settles its threads when it is imported."""


def check_with_owners(settings: Settings) -> None:
    """Check what ``load_settings`` cannot, since a client imports none of the owners. Raises BadInput."""
    try:
        get_profile(settings.profile)
    except UnknownName as error:
        raise settings.wrong("profile", f"cannot be used: {error.message}", error.hint) from None
    cache.check_limits(settings.root, data_cache.LIMIT, image.LIMIT)


def open_store(settings: Settings) -> SqlLog:
    """The event log of the installation, with its schema brought up to date."""
    return SqlLog(db_url(settings), migrate=True)


def db_url(settings: Settings) -> str:
    """Where the event log is: the given address, else the file in the home."""
    return settings.db_url or f"sqlite:///{Home.of(settings.home).db}"


NEWEST = 20
"""Records of the log among which is the last one before the start of this service."""


def assemble(settings: Settings, log: EventLog, *, engine: Engine | None = None) -> AppState:
    """Every part of the service over an open log, under a new install epoch; nothing runs yet."""
    clock, random_source, home = SystemClock(), SystemRandom(), Home.of(settings.home).make()
    writer = Writer(scope=INSTALL_SCOPE, epoch=log.take_epoch(INSTALL_SCOPE))
    started = ServiceStarted(install_epoch=writer.epoch, pid=os.getpid(), version=rota_version())
    log.append([started], writer=writer)
    engine = engine or make_engine(settings, home)
    views = Views(scheduler=make_scheduler(settings))
    loop = ServiceLoop(log=log, writer=writer, clock=clock, views=views, engine=engine, poll_s=settings.poll_s)
    metrics = Metrics(views.installation, views.counts, clock=clock, version=rota_version())
    auth = Auth.of(
        ensure_token(home.token, random_source),
        clock=clock,
        random_source=random_source,
        hosts=_names(settings),
        accounts=views.accounts,
    )
    vault = Vault(home)
    notifier = Notifier(
        loop,
        home=home,
        vault=vault,
        clock=clock,
        random_source=random_source,
        url=settings.url,
        allowed=settings.webhook_hosts,
    )
    forecasts = Forecasts(loop.scheduler, clock)
    loop.listen(forecasts.changed)
    app = AppState(
        settings=settings,
        home=home,
        clock=clock,
        random_source=random_source,
        loop=loop,
        forecasts=forecasts,
        intake=Intake(
            loop,
            home=home,
            clock=clock,
            random_source=random_source,
            stores=settings.store_urls,
            calibration=forecasts.calibration,
        ),
        auth=auth,
        vault=vault,
        notifier=notifier,
        audit=Audit(home.root / "audit.jsonl", clock),
        engine=engine,
        metrics=metrics,
        version=rota_version(),
        pid=os.getpid(),
        started_at=clock.wall_s(),
        machines=MachineNames(home.joined_machines, clock),
        restored=_restored(home),
    )
    _show_in_metrics(app)
    return app


def _show_in_metrics(app: AppState) -> None:
    """Have the metrics read the loop and the app when they are asked."""
    loop, metrics = app.loop, app.metrics
    loop.timed = metrics.timed
    metrics.sse_clients.set_function(lambda: app.streams)
    metrics.loop_age.set_function(lambda: app.clock.monotonic_s() - loop.turned_s)
    metrics.slips.set_function(lambda: len(loop.broken))
    metrics.store_stale.set_function(lambda: _stale_s(app))


def _restored(home: Home) -> Restored | None:
    """The restore that filled the home; None also of a file that is damaged, for which no service may stay down."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(home.restored.read_text(encoding="utf-8"))
        return Restored(at=float(found["at"]), file=str(found["file"]))
    return None


def make_scheduler(settings: Settings) -> Scheduler:
    """The scheduler of an installation, before it has read any record."""
    profile = replace(get_profile(settings.profile), spares=settings.spares, cool_down_s=settings.cool_down_s)
    return Scheduler(profile, requests_of)


def snapshot_file(settings: Settings) -> SnapshotFile:
    """Where the snapshot of an installation is, and what it must have been made by."""
    profile = f"{settings.profile} {settings.spares} {settings.cool_down_s}"
    return SnapshotFile(path=Home.of(settings.home).snapshot, program=program(profile))


async def replay(app: AppState) -> SnapshotFile:
    """Load the past: the snapshot of the log where there is one that can be used, then the records after it."""
    file = await asyncio.to_thread(snapshot_file, app.settings)
    await asyncio.to_thread(file.restore, app.loop.views, app.loop.log)
    await app.loop.replay()
    return file


async def begin(app: AppState) -> SnapshotFile:
    """Load the past, and what passed since it ended."""
    file = await replay(app)
    await note_downtime(app)
    return file


def _is_this_start(record: Record, epoch: Epoch) -> bool:
    return isinstance(record.event, ServiceStarted) and record.event.install_epoch == epoch


async def note_downtime(app: AppState) -> None:
    """Record of each job that holds devices, when no engine runs here, since when nothing of it has run.

    That is since the pulse of the last service or the last record, whichever is newer; a restored home has no pulse.
    Before the loop, so that it comes before whatever is decided by the time that jobs have used.
    """
    loop = app.loop
    held = [one for one in loop.installation.live.values() if one.state.holds_devices and one.placement is not None]
    if not held or app.settings.ray_address or app.engine.running:
        return
    records = loop.log.read(after=max(0, loop.log.last_number() - NEWEST))
    since = max((one.at for one in records if not _is_this_start(one, loop.writer.epoch)), default=0.0)
    with contextlib.suppress(OSError):
        since = max(since, app.home.service_pulse.stat().st_mtime)
    for job in held:
        await asyncio.to_thread(loop.log.append, [DowntimePassed(since=since)], writer=loop.writer, job=job.id)
    await loop.replay()


def _stale_s(app: AppState) -> float:
    since = app.loop.stale_since
    return 0.0 if since is None else app.clock.monotonic_s() - since


def _names(settings: Settings) -> frozenset[str]:
    """Host names under which the service answers: those that it listens on, against DNS rebinding."""
    everywhere = settings.host in ("0.0.0.0", "::") or settings.listen
    return frozenset({*LOOPBACK, settings.host.lower(), *(own_names() if everywhere else ())})


def make_engine(settings: Settings, home: Home) -> Engine:
    """The gateway to Ray, or its stand-in where Ray is not installed. Imports nothing of Ray."""
    found = importlib.util.find_spec("ray")
    # A mere folder of that name, as Ray leaves one in /tmp, is not a package.
    kind = NoEngine if found is None or found.origin is None else Engine
    if settings.ray_address:
        return kind(home, db_url=db_url(settings), settings=EngineSettings(address=settings.ray_address))
    cpus = sum(node.cpus for node in wanted_nodes(settings))
    listen = settings.listen or LOOPBACK_ADDRESS
    engine = EngineSettings(host=own_host(settings), cpus=cpus, warm=WARM, preload=PRELOAD, listen=listen)
    return kind(home, db_url=db_url(settings), settings=engine)


def own_host(settings: Settings) -> str:
    """Name of this machine in the engine: its host name once others may join, who have one too."""
    return host_name() if settings.listen else LOCAL_HOST


def wanted_nodes(settings: Settings) -> tuple[Node, ...]:
    """The nodes of this installation that its service knows of: pretend ones, else this machine."""
    if settings.pretend:
        return pretend_nodes(settings.pretend, host=LOCAL_HOST)
    return (located(local_node(own_host(settings)), read_topology(settings.root / FILE)),)


def node_changes(app: AppState, wanted: Iterable[Node], alive: Container[str] = ()) -> list[Event]:
    """What must be appended so that the log knows the wanted nodes, and of others only those that are ``alive``.

    One whose machine has another name by now leaves: the machine would be offered twice. It is removed, not lost, as is
    a pretended node, and a real one where nodes are pretended now.
    """
    known = app.loop.installation.nodes
    joined = {node.id: node for node in wanted}
    renamed = {node.host for node in joined.values()}
    pretend = any(map(_pretended, joined.values()))
    changes: list[Event] = [
        NodeJoined(node=node)
        for node in joined.values()
        if (old := known.get(node.id)) is None or old.lost or old.joined != node
    ]
    for one, old in known.items():
        host = old.node.host
        if one in joined or (host not in renamed and (one in alive or host in alive)):
            continue
        removed = pretend or host in renamed or _pretended(old.node)
        if not old.lost or (removed and not old.removed):
            changes.append(NodeLost(node=one, text="not part of the installation any more", removed=removed))
    return changes


def _pretended(node: Node) -> bool:
    """True for one of several nodes that share this machine."""
    return node.host == LOCAL_HOST != node.id


def must_leave(app: AppState) -> list[JobHistory]:
    """Jobs that hold something of a node that was removed, and were not asked to leave yet."""
    removed = {one.node.id for one in app.loop.installation.nodes.values() if one.removed}
    return [
        job
        for job in (app.loop.installation.live.values() if removed else ())
        if job.state.holds_devices
        and job.state not in (JobState.STOPPING, JobState.PREEMPTING)
        and job.placement is not None
        and any(bundle.node in removed for bundle in job.placement.bundles)
    ]


async def take_nodes(app: AppState, changes: list[Event]) -> None:
    """Record which nodes there are now; jobs on those that were removed save, stop and are queued again."""
    if changes:
        await app.loop.append(changes)
    for job in must_leave(app):
        with contextlib.suppress(Conflict):  # it ended meanwhile
            await append_live(app, job, PreemptAsked(reason=Reason.NODE_REMOVED, grace_s=job.spec.grace_s))
