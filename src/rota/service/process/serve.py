"""The service process: start, run, stop, in order; ``python -m rota.service.process.serve``."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Container, Coroutine, Generator
from dataclasses import replace
from typing import TYPE_CHECKING

import uvicorn

from rota.runtime import environ
from rota.runtime.clock import SystemClock, blocking_sleep
from rota.runtime.devices import FAMILIES_VARIABLE
from rota.runtime.environ import Home
from rota.runtime.process import boot_id, own_id, write_private
from rota.service.config import Settings, load_settings, rota_version
from rota.service.jobfile.problems import cannot_use
from rota.service.process.daemon import PRESTARTED, ServiceRecord, holder_of
from rota.spec.errors import Conflict, NotReachable, RotaError

if TYPE_CHECKING:
    from rota.service.rest.deps import AppState

PREDECESSOR_S = 1.5
FAILED = "rota serve failed: "
"""Before the JSON of the error that kept the service from starting, on a line of its log."""

_Tasks = list[asyncio.Task[object]]
_log = logging.getLogger("rota.service")


@contextlib.contextmanager
def only_one(home: Home) -> Generator[None]:
    """Hold the lock of the installation. Raises Conflict when another process serves it."""
    home.make()
    if home.restoring.exists():
        raise Conflict(f"a restore into {home.root} did not end", hint="run it again: rota restore FILE")
    with home.service_lock.open("a") as file:
        try:
            _patiently(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            raise Conflict(f"another process serves {home.root}", hint="see: rota status") from None
        yield


def bind(settings: Settings) -> socket.socket:
    """The listening socket. Raises NotReachable when the address is taken."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        _patiently(lambda: listener.bind((settings.host, settings.port)))
        listener.listen(128)
    except OSError as error:
        listener.close()
        where = f"port {settings.port} of {settings.host}"
        if error.errno != errno.EADDRINUSE:
            hint = "choose another: rota up --host ADDRESS --port N"
            raise NotReachable(f"{where} cannot be used: {error.strerror}", hint=hint, port=settings.port) from None
        hint = "give this home a port of its own: rota up --port N (0 takes a free one)"
        raise NotReachable(f"{where} is taken by {holder_of(settings.port)}", hint=hint, port=settings.port) from None
    return listener


def _patiently(take: Callable[[], None]) -> None:
    """Take what a killed predecessor may hold for a moment longer: its threads end after it is known dead."""
    clock = SystemClock()
    until_s = clock.monotonic_s() + PREDECESSOR_S
    while True:
        try:
            return take()
        except OSError:
            if clock.monotonic_s() > until_s:
                raise
            blocking_sleep(0.02)


async def serve(settings: Settings, listener: socket.socket) -> None:
    """Run until SIGTERM or SIGINT. Jobs, engine and gateway continue without it."""
    # here, so that ``main`` can hold up the collector first; what a standby is to have imported is in _import_all
    from rota.service.process import assembly, tasks
    from rota.service.rest.app import make_app
    from rota.service.rest.connections import server_config, watch_accepts

    assembly.check_with_owners(settings)
    log = await asyncio.to_thread(assembly.open_store, settings)
    app = assembly.assemble(settings, log)
    watch_accepts(asyncio.get_running_loop())
    server = _Server(server_config(make_app(app)))
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    # 1. the past
    snapshot = await assembly.begin(app)
    app.forecasts.begin()
    there: Container[str] = ()
    app.loop.unknown = recording = "its nodes are being recorded"  # nothing is placed on those of before
    if settings.ray_address or (settings.listen and app.engine.running):  # machines may have come or left meanwhile
        app.loop.unknown, there = tasks.not_known(app), app.loop.installation.nodes.keys()
    # 2. the loop over the log, and the app
    parts = _begun(loop=app.loop.run(), app=server.serve(sockets=[listener]))
    old_logs = tasks.keep_logs(app.loop.installation.jobs, app.home, app.clock, settings.logs_kept_days)
    beside = _begun(webhooks=app.notifier.run(), retention=old_logs)
    # 3. what this machine has; an engine with others is asked for its machines, again and again
    wanted = [] if settings.ray_address else assembly.node_changes(app, assembly.wanted_nodes(settings), there)
    await assembly.take_nodes(app, wanted)
    if app.loop.unknown == recording:
        app.loop.decide_from_now()
    looking = _begun(nodes=tasks.keep_nodes(app)) if settings.ray_address or settings.listen else []
    app.ready = True
    _record(app)
    gc.freeze()
    gc.enable()
    beside += _begun(life=tasks.show_life(app), parts=tasks.watch_parts(app), hangs=tasks.watch_hangs(app))
    beside += _begun(idle=tasks.watch_idle(app), snapshot=tasks.keep_snapshot(app, snapshot))
    _log.info("serving %s from %s as install epoch %s", app.home.root, settings.url, app.loop.writer.epoch)
    # 4. until a signal, the removal of the home, or the failure of a part
    told = asyncio.create_task(stopping.wait(), name="signal")
    removed = asyncio.create_task(tasks.wait_removed(app.home, app.clock), name="home")
    try:
        await asyncio.wait({*parts, *looking, told, removed}, return_when=asyncio.FIRST_COMPLETED)
        if removed.done():
            _log.error("%s was removed: the service ends", app.home.root)
    finally:
        is_mine = not removed.done()  # else another service may have made the folder again
        # 5. the forecast under way, then the app, then the loop, then the engine
        await _end(app, server, parts, [told, removed, *beside, *looking])
        log.close()
        if is_mine:
            app.home.service_record.unlink(missing_ok=True)
    for part in (*parts, *looking):
        if not part.cancelled():
            part.result()


def _begun(**work: Coroutine[None, None, object]) -> _Tasks:
    return [asyncio.create_task(one, name=name) for name, one in work.items()]


async def _end(app: AppState, server: uvicorn.Server, parts: _Tasks, others: _Tasks) -> None:
    """End all parts, those last that others use."""
    app.forecasts.close()
    app.ready = False
    server.should_exit = True
    await app.loop.stop()
    for task in others:
        task.cancel()
    await asyncio.gather(*others, *parts, return_exceptions=True)
    await app.engine.close()


def _import_all() -> None:
    """What ``serve`` imports, and the routes of the application: nine tenths of a start."""
    importlib.import_module("rota.service.process.assembly")
    importlib.import_module("rota.service.process.tasks")
    importlib.import_module("rota.service.rest.app").application()


class _Server(uvicorn.Server):
    """Leaves signals to ``serve``, which also has a loop and an engine to close."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _record(app: AppState) -> None:
    me = own_id()
    record = ServiceRecord(
        url=app.settings.url,
        pid=me.pid,
        start_time=me.start_time,
        boot_id=boot_id(),
        version=rota_version(),
        pretend=app.settings.pretend,
    )
    write_private(app.home.service_record, json.dumps(record))
    app.home.standby_fault.unlink(missing_ok=True)


def run(settings: Settings) -> None:
    """Serve in this process until SIGTERM or SIGINT. Raises Conflict, NotReachable, SchemaTooNew, StoreCorrupt."""
    level = logging.getLevelNamesMapping().get(settings.log_level.upper(), logging.INFO)
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    os.umask(0o077)
    # children find the same home, log and registry, however this process got them
    environ.export(environ.HOME, settings.home)
    environ.export(environ.SERVICE, settings.home)
    environ.export(environ.DB_URL, settings.db_url)
    environ.export(environ.REDIS_URL, settings.redis_url)
    environ.export(FAMILIES_VARIABLE, settings.device_families)
    with only_one(Home.of(settings.home)):
        listener = bind(settings)
        try:
            asyncio.run(serve(replace(settings, port=listener.getsockname()[1]), listener))
        finally:
            listener.close()


def main(arguments: list[str]) -> int:
    """``serve [SETTINGS-AS-JSON [prestarted]]``; what keeps it from serving is one JSON line and its exit status.

    A standby imports what it needs and waits: a line on its input gives the settings anew and lets it serve; when its
    input ends, it ends too.
    """
    gc.disable()  # until it serves: what a start makes stays, and to look through it again and again is a fifth of it
    if arguments[1:] == [PRESTARTED]:
        _import_all()
        arguments = sys.stdin.readlines(1)
        if not arguments:
            return 0
    try:
        flags: dict[str, object] = json.loads(arguments[0]) if arguments else {}
        run(load_settings(flags))
    except (RotaError, OSError) as raised:
        error = raised if isinstance(raised, RotaError) else cannot_use(raised)
        said = {"code": error.code, "message": error.message, "hint": error.hint, "exit": error.exit}
        sys.stderr.write(f"{FAILED}{json.dumps(said)}\n")
        return error.exit
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
