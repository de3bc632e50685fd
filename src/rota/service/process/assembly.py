"""The only place where the parts are wired together."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Container, Iterable
from dataclasses import replace

from rota.cluster.live import Scheduler
from rota.cluster.policies import get_profile
from rota.job.core.placement import requests_of
from rota.runtime.clock import SystemClock
from rota.runtime.environ import Home
from rota.runtime.event_log.interface import INSTALL_SCOPE, EventLog, Writer
from rota.runtime.event_log.sql import SqlLog
from rota.runtime.node import LOCAL_HOST, local_node, own_names
from rota.runtime.random import SystemChance
from rota.runtime.ray.engine import EngineSettings
from rota.runtime.secrets import Vault
from rota.service.config import LOOPBACK, Settings, rota_version
from rota.service.control.engine import Engine, GatewayEngine, NoEngine
from rota.service.control.forecasts import Forecasts
from rota.service.control.intake import Intake
from rota.service.control.loop import ServiceLoop
from rota.service.metrics import Metrics
from rota.service.rest.auth import Audit, Auth, ensure_token
from rota.service.rest.deps import AppState
from rota.service.webhooks import Notifier
from rota.spec.events import Event, NodeJoined, NodeLost, ServiceStarted
from rota.spec.resources import Node, pretend_nodes

WARM = 2
"""Processes that the engine keeps ready: one for the master of a job and one for its first instance."""
PRELOAD = (
    "rota.runtime.ray.launcher",
    "rota.runtime.event_log.sql",
    "rota.job.master.executor",
    "rota.job.health.heartbeat",
)
"""What a process that is kept ready has imported; nothing with numpy, which settles its threads when it is imported."""


def open_store(settings: Settings) -> SqlLog:
    """The event log of the installation, with its schema brought up to date."""
    return SqlLog(db_url(settings), migrate=True)


def db_url(settings: Settings) -> str:
    """Where the event log is: the given address, else the file in the home."""
    return settings.db_url or f"sqlite:///{Home.of(settings.home).db}"


def assemble(settings: Settings, log: EventLog, *, engine: Engine | None = None) -> AppState:
    """Every part of the service over an open log, under a new install epoch; nothing runs yet."""
    clock, chance, home = SystemClock(), SystemChance(), Home.of(settings.home).make()
    writer = Writer(scope=INSTALL_SCOPE, epoch=log.take_epoch(INSTALL_SCOPE))
    started = ServiceStarted(install_epoch=writer.epoch, pid=os.getpid(), version=rota_version())
    log.append([started], writer=writer)
    engine = engine or make_engine(settings, home)
    loop = ServiceLoop(
        log=log,
        writer=writer,
        clock=clock,
        scheduler=Scheduler(
            replace(get_profile(settings.profile), spares=settings.spares, cool_down_s=settings.cool_down_s),
            requests_of,
        ),
        engine=engine,
        poll_s=settings.poll_s,
    )
    metrics = Metrics(loop.installation, clock=clock, version=rota_version())
    auth = Auth.of(ensure_token(home.token, chance), clock=clock, chance=chance, hosts=_names(settings))
    vault = Vault(home)
    notifier = Notifier(
        loop,
        home=home,
        vault=vault,
        clock=clock,
        chance=chance,
        url=settings.url,
        allowed=settings.webhook_hosts,
    )
    forecasts = Forecasts(loop.scheduler, clock)
    for listener in (metrics.apply, auth.accounts.apply, notifier.apply, forecasts.changed):
        loop.listen(listener)
    app = AppState(
        settings=settings,
        home=home,
        clock=clock,
        chance=chance,
        loop=loop,
        forecasts=forecasts,
        intake=Intake(loop, home=home, clock=clock, chance=chance),
        auth=auth,
        vault=vault,
        notifier=notifier,
        audit=Audit(home.root / "audit.jsonl", clock),
        engine=engine,
        metrics=metrics,
        version=rota_version(),
        pid=os.getpid(),
        started_at=clock.wall_s(),
    )
    loop.timed = metrics.timed
    metrics.sse_clients.set_function(lambda: app.streams)
    metrics.loop_age.set_function(lambda: clock.monotonic_s() - loop.turned_s)
    metrics.slips.set_function(lambda: len(loop.broken))
    metrics.store_stale.set_function(lambda: _stale_s(app))
    return app


def _stale_s(app: AppState) -> float:
    since = app.loop.stale_since
    return 0.0 if since is None else app.clock.monotonic_s() - since


def _names(settings: Settings) -> frozenset[str]:
    """Host names under which the service answers: those that it listens on, against DNS rebinding."""
    everywhere = settings.host in ("0.0.0.0", "::")
    return frozenset({*LOOPBACK, settings.host.lower(), *(own_names() if everywhere else ())})


def make_engine(settings: Settings, home: Home) -> Engine:
    """The gateway to Ray, or its stand-in where Ray is not installed. Imports nothing of Ray."""
    found = importlib.util.find_spec("ray")
    if found is None or found.origin is None:  # a mere folder of that name, as Ray leaves one in /tmp, is not a package
        return NoEngine("Ray is not installed")
    if settings.ray_address:
        return GatewayEngine(home, db_url=db_url(settings), settings=EngineSettings(address=settings.ray_address))
    cpus = sum(node.cpus for node in wanted_nodes(settings))
    engine = EngineSettings(host=LOCAL_HOST, cpus=cpus, warm=WARM, preload=PRELOAD)
    return GatewayEngine(home, db_url=db_url(settings), settings=engine)


def wanted_nodes(settings: Settings) -> tuple[Node, ...]:
    """The nodes of this installation: pretend ones, else this machine."""
    if settings.pretend:
        return pretend_nodes(settings.pretend, host=LOCAL_HOST)
    return (local_node(),)


def node_changes(app: AppState, wanted: Iterable[Node], alive: Container[str] = ()) -> list[Event]:
    """What must be appended so that the log knows the wanted nodes, and of others only those that are ``alive``."""
    known = app.loop.installation.nodes
    joined = {node.id: node for node in wanted}
    changes: list[Event] = [
        NodeJoined(node=node)
        for node in joined.values()
        if (old := known.get(node.id)) is None or old.lost or old.joined != node
    ]
    changes += [
        NodeLost(node=one, text="not part of the installation any more")
        for one, old in known.items()
        if one not in joined and one not in alive and not old.lost
    ]
    return changes
