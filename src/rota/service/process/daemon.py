"""up, down, status of the embedded service: start it detached, adopt what lives, end what was recorded.

Beside the service runs its supervisor (``rota.service.process.supervisor``): each of the two starts the other again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast
from urllib.parse import quote

from rota.runtime import environ, file_locks, process
from rota.runtime.clock import Clock, SystemClock, blocking_sleep
from rota.runtime.environ import Home
from rota.runtime.process import SUPERVISOR, ProcessId, ProcessRecord, RunFolder, Spawn
from rota.runtime.ray.client import RECORD, GatewayFiles
from rota.service.config import Settings
from rota.service.http import RECORD_REMEDY
from rota.service.jobfile.problems import cannot_use
from rota.spec.codec import JsonObject
from rota.spec.errors import Conflict, NotReachable, RotaError, StoreCorrupt, TimedOut
from rota.spec.states import JobState

if TYPE_CHECKING:
    from rota.service.models.cluster import StatusDocument

    class LocalStatus(StatusDocument):
        """The Status document of a service on this machine, with the address of its page."""

        login: str

    class UpDocument(LocalStatus):
        """The same after ``up``; ``started``: it did not run before."""

        started: bool


UP_TIMEOUT_S = 60.0
UP_LOCK_S = 900.0
"""Longest wait for another ``rota up`` or ``down``: it starts an engine, or lets jobs save and ends them."""
STOP_JOBS_S = 60.0
STOP_GRACE_S = 10.0
HOLD_GRACE_S = 45.0
"""The most that a job may take to save when the service is taken down, within ``STOP_JOBS_S``."""
REQUEST_TIMEOUT_S = 5.0
POLL_S, JOBS_POLL_S = 0.02, 0.1
LOG_SHOWN_LINES = 20
ROOM_MIN_BYTES = 2**20
SERVE_MODULE, SUPERVISOR_MODULE = "rota.service.process.serve", "rota.service.process.supervisor"
SNAPSHOT_MODULE = "rota.service.process.snapshot"
PRESTARTED = "prestarted"
PRIVATE = ("db_url", "redis_url", "token")
ENGINE_SETTINGS = ("ray_address", "listen", "pretend")
REMEMBERED = ("host", "port", "profile", *ENGINE_SETTINGS)
"""What one ``up`` was given as flags, and the next one takes again."""
LAST_UP = "last up"
PARTS = {
    SERVE_MODULE: "service",
    SUPERVISOR_MODULE: "supervisor",
    "rota up": "service",
    "rota.runtime.ray.gateway": "gateway",
    "valkey": "registry",
    "redis": "registry",
    "ray": "engine",
}
"""Text in the command of a process by which its part of the installation is recognised, the most specific first."""


class ServiceRecord(TypedDict):
    """Who serves an installation, as written to ``run/service.json``."""

    url: str
    pid: int
    start_time: float
    boot_id: str
    version: str
    pretend: str


class IdleStatus(TypedDict):
    """The Status document where no service runs; what is ``still_running`` all the same.

    ``next_pretend``: the pretended nodes that the next ``up`` takes again.
    """

    api: str
    kind: str
    state: str
    home: str
    still_running: list[str]
    next_pretend: str


class DownDocument(TypedDict):
    """Result of ``down``: what it ended, and what it could not end."""

    api: str
    kind: str
    state: str
    text: str
    ended: list[str]
    stopped_jobs: list[str]
    left_jobs: dict[str, int]
    still_running: list[int]


def up(settings: Settings, *, timeout_s: float = UP_TIMEOUT_S) -> UpDocument:
    """Start the service, or find the one that runs; the Status document, with ``login`` for the page.

    After a kill of the service this adopts everything that continued without it. Raises NotReachable (port taken, cause
    from its log), Conflict, SchemaTooNew, StoreCorrupt, TimedOut.
    """
    home = Home.of(settings.home).make()
    with file_locks.locked(home.up_lock, wait_s=UP_LOCK_S):
        record = _wait_answer(home, timeout_s)
        started = record is None
        if record is None:
            settings = as_before(settings, home)
            record = start_service(settings, home, timeout_s)
            process.write_private(home.last_up, json.dumps(flags_of(settings, REMEMBERED)))
        elif settings.origins.get("pretend", "default") != "default" and settings.pretend != record["pretend"]:
            has = record.get("pretend") or "this machine alone"
            raise Conflict(f"the service runs already with {has}", hint="rota down, then rota up --pretend again")
        ensure_supervisor(settings, home)
    document = ask(home, "GET", "/api/v1/status")
    return cast("UpDocument", document | {"started": started, "login": login_url(home)})


def login_url(home: Home) -> str:
    """An address that opens the page once, in the name of the installation's own token. Raises what ``ask`` raises."""
    return str(ask(home, "POST", "/api/v1/login/code")["url"])


def down(settings: Settings, *, jobs: str = "leave", force: bool = False) -> DownDocument:
    """End the service with its gateway, engine and registry: the recorded processes, and no others.

    On a given engine it ends what the jobs of this home have there; ``text`` names what could not be ended.
    ``jobs``: with ``leave`` those that run save and are queued again, and all continue at the next ``up``; with
    ``cancel`` they are stopped first, those that wait too. ``force`` asks no job and waits for nothing: they continue
    from what they have on disk. Returns what was ended, the jobs that are left by state, and what could not be ended.
    """
    home, grace_s = Home.of(settings.home), 0.0 if force else STOP_GRACE_S
    if not home.root.exists():  # removed under what may still run
        ended, left = _end_unrecorded(home, grace_s=grace_s)
        return _down_document(ended, left, [])
    home.make()
    with file_locks.locked(home.up_lock, wait_s=UP_LOCK_S):
        ended: list[str] = []
        left: list[ProcessId] = []
        stopped: list[str] = []
        live: dict[str, int] = {}
        record = _found(home)
        if record is not None and jobs == "cancel":
            stopped = _stop_jobs(home)
        if record is not None and not force:
            live = _requeue_jobs(home)
        _end_supervisor(home)
        record = _found(home)
        if record is not None:
            service = identity_of(record)
            ended.append("service")
            if not process.stop(service, grace_s=grace_s):
                left.append(service)
        home.service_record.unlink(missing_ok=True)
        address = _given_engine(home)
        with environ.exported(_stores_of_gateway(home, settings)):
            text = _sweep(home, address, grace_s=grace_s) if address else ""
        kept = RunFolder(home.run).read(RECORD) if text else None
        left += _end_rest(home, ended, grace_s=grace_s)
        more, still = _end_unrecorded(home, grace_s=grace_s)
        ended += [name for name in more if name not in ended]
        left += [one for one in still if one not in left]
        _note_left(home, left, kept)
    return _down_document(ended, left, stopped, text, live)


def status(settings: Settings) -> LocalStatus | IdleStatus:
    """The Status document; ``state`` is ``down`` when no service runs here."""
    home = Home.of(settings.home)
    record = find_service(home)
    if record is None:
        rest = [one.name for one in RunFolder(home.run).alive()] if home.run.is_dir() else []
        rest = rest or [f"{_kind(home, one)} (process {one.pid})" for one in _unrecorded(home)]
        return {
            "api": "rota/v1",
            "kind": "Status",
            "state": "down",
            "home": str(home.root),
            "still_running": rest,
            "next_pretend": as_before(settings, home).pretend,
        }
    return cast("LocalStatus", ask(home, "GET", "/api/v1/status") | {"login": f"{record['url']}/login"})


def find_service(home: Home) -> ServiceRecord | None:
    """The record of the service if its very process lives, else None. Raises StoreCorrupt for a damaged record."""
    record = last_service(home)
    return record if record is not None and process.is_alive(identity_of(record)) else None


def last_service(home: Home) -> ServiceRecord | None:
    """The record of a service of this boot that runs, or that was killed; None if it ended in order.

    Raises StoreCorrupt for a damaged record.
    """
    try:
        record: ServiceRecord = json.loads(home.service_record.read_bytes())
        named = (identity_of(record), str(record["boot_id"]), str(record["url"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        text = f"{home.service_record} is not the record of a service: {type(error).__name__}: {error}"
        raise StoreCorrupt(text, hint=RECORD_REMEDY) from None
    return record if named[1] == process.boot_id() else None


def _found(home: Home) -> ServiceRecord | None:
    """The same for those who start and end it: a damaged record is none, and the next start writes a whole one."""
    try:
        return find_service(home)
    except StoreCorrupt:
        return None


def ask(home: Home, method: str, path: str, body: Mapping[str, object] | None = None) -> JsonObject:
    """One request to the local service with the admin token. Raises NotReachable, or RotaError for a refusal."""
    record = find_service(home)
    if record is None:
        raise NotReachable(f"no service runs in {home.root}", hint="start it: rota up")
    request = urllib.request.Request(
        f"{record['url']}{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {home.token.read_text(encoding='utf-8').strip()}",
            "Content-Type": "application/json",
        },
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        problem = json.loads(error.read() or b"{}")
        raise RotaError(str(problem.get("detail", error)), hint=str(problem.get("hint", ""))) from error
    except (OSError, HTTPException) as error:  # the latter when it dies in the middle of an answer
        raise NotReachable(f"{record['url']} does not answer: {error}", hint="see rota status") from error


def holder_of(port: int) -> str:
    """Who listens on a port of this machine, in words: the Rota service of which home, else which process."""
    found = process.listening_on(port)
    if found is None:
        return "a process of another user"
    pid, name, files = found
    lock = Home.of("/").service_lock
    root = next((str(Path(one).parents[1]) for one in files if Path(one).parts[-2:] == lock.parts[-2:]), "")
    return f"the Rota service of {root} (process {pid})" if root else f"process {pid} ({name})"


def ensure_supervisor(settings: Settings, home: Home) -> None:
    """Start the supervisor of the service unless one runs; of two that start at once one ends again."""
    if RunFolder(home.run).find_alive(SUPERVISOR) is None:
        process.spawn(_command(SUPERVISOR_MODULE, settings, home), name=SUPERVISOR)


def _end_supervisor(home: Home) -> None:
    """Its record goes first, so that the service does not start another."""
    run = RunFolder(home.run)
    supervisor = run.find_alive(SUPERVISOR)
    run.forget(SUPERVISOR)
    if supervisor is not None:
        process.stop(supervisor.id, grace_s=0.0)


def flags_of(settings: Settings, names: Collection[str] = ()) -> dict[str, object]:
    """The settings that were given as flags, now or at the last ``up``; those of ``names`` alone, if any are named."""
    given = (name for name, origin in settings.origins.items() if origin in ("flag", LAST_UP))
    return {name: getattr(settings, name) for name in given if not names or name in names}


def as_before(settings: Settings, home: Home) -> Settings:
    """The settings, with address, engine and profile of the last ``up``, unless this one says otherwise.

    Of the engine (its own or a given one, for other machines, pretended) all is forgotten once any of it is said:
    ``--pretend none`` returns to this machine.
    """
    try:
        known: JsonObject = json.loads(home.last_up.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return settings
    said = {name for name, origin in settings.origins.items() if origin not in ("default", "listen")}
    said |= set(ENGINE_SETTINGS) if said & set(ENGINE_SETTINGS) else set()
    kept = {name: value for name, value in known.items() if name in REMEMBERED and name not in said}
    if "listen" in kept and "host" not in said:
        kept.setdefault("host", kept["listen"])
    return replace(settings, **kept, origins={**settings.origins, **dict.fromkeys(kept, LAST_UP)})


def _command(module: str, settings: Settings, home: Home, *, standby: bool = False) -> Spawn:
    """How to start a process of the service with the settings that were given as flags."""
    flags = flags_of(settings)
    # what may hold a password goes by the environment: arguments stand in the list of processes
    private = {f"ROTA_{name.upper()}": str(flags.pop(name)) for name in PRIVATE if name in flags}
    command = (sys.executable, "-m", module, json.dumps(flags | {"home": str(home.root)}))
    marked = {**private, environ.SERVICE: str(home.root)}
    more = (PRESTARTED,) if standby else ()
    return Spawn(command=(*command, *more), env=marked, log=home.service_log, cwd=home.root, input=standby)


def start_standby(settings: Settings, home: Home) -> process.Child:
    """A process that has imported the service and waits for ``start_service``; it ends with its parent."""
    return process.spawn(_command(SERVE_MODULE, settings, home, standby=True), name="service")


def start_snapshot(settings: Settings, home: Home) -> process.Child:
    """A process that brings the snapshot up to the log, and ends."""
    return process.spawn(_command(SNAPSHOT_MODULE, settings, home), name="snapshot")


def start_service(
    settings: Settings, home: Home, timeout_s: float = UP_TIMEOUT_S, *, standby: process.Child | None = None
) -> ServiceRecord:
    """Start a service and wait until it answers; its record. To be called under the lock of ``up``.

    A ``standby`` becomes that service, in a tenth of the processor time.
    """
    seen = home.service_log.stat().st_size if home.service_log.exists() else 0
    if standby is None or standby.stdin is None:
        child = process.spawn(_command(SERVE_MODULE, settings, home), name="service")
    else:
        child = standby
        standby.stdin.write(f"{_command(SERVE_MODULE, settings, home).command[-1]}\n".encode())
        standby.stdin.close()
    for _ in _rounds(timeout_s, POLL_S):
        if child.poll() is not None:
            raise _failure(home.service_log, seen, child.returncode)
        record = _found(home)
        if record is not None and _ready(home):
            return record
    child.kill()
    child.wait()
    raise TimedOut(f"the service was not ready within {timeout_s:.0f} s", hint=f"see {home.service_log}")


def _wait_answer(home: Home, timeout_s: float) -> ServiceRecord | None:
    """The record of a service that answers; None once there is none (one that was just killed may still be going)."""
    record = None
    for _ in _rounds(timeout_s, POLL_S):
        if (record := _found(home)) is None or _ready(home):
            return record
    assert record is not None
    raise TimedOut(f"process {record['pid']} serves {home.root} but does not answer", hint="rota down --force")


def _rounds(limit_s: float, pause_s: float) -> Iterator[None]:
    """Rounds with a pause between them, until ``limit_s`` has passed; at least one."""
    clock: Clock = SystemClock()
    until_s = clock.monotonic_s() + limit_s
    while True:
        yield
        if clock.monotonic_s() > until_s:
            return
        blocking_sleep(pause_s)


def _ready(home: Home) -> bool:
    try:
        return bool(ask(home, "GET", "/readyz").get("ok"))
    except (RotaError, FileNotFoundError):
        return False


def _failure(log: Path, seen: int, exit_status: int) -> RotaError:
    """The error that the child wrote before it ended, as the exception it was."""
    with log.open("rb") as file:
        file.seek(seen)
        lines = file.read().decode(errors="replace").splitlines()
    said = next((line for line in reversed(lines) if line.startswith("rota serve failed: ")), None)
    if not lines and shutil.disk_usage(log.parent).free < ROOM_MIN_BYTES:  # it could not even say so
        return cannot_use(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(log.parent)))
    if said is None:
        shown = "\n".join(lines[-LOG_SHOWN_LINES:])
        return RotaError(f"the service ended with status {exit_status}:\n{shown}", hint=f"see {log}")
    raw = json.loads(said.partition(": ")[2])
    kinds = {cls.code: cls for cls in reversed([*_leaves(RotaError)])}  # of classes with one code the first
    return kinds.get(raw["code"], RotaError)(raw["message"], hint=raw["hint"])


def _leaves(cls: type[RotaError]) -> Iterator[type[RotaError]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _leaves(below)


def _stop_jobs(home: Home) -> list[str]:
    """Ask every live job to end and wait for it, at most ``STOP_JOBS_S``; what is left ends with the engine.

    Returns the jobs that took it.
    """
    asked: list[str] = []
    for _ in _rounds(STOP_JOBS_S, JOBS_POLL_S):
        try:
            live = [row["id"] for row in ask(home, "GET", "/api/v1/jobs")["items"]]
        except RotaError:
            break
        if not live:
            break
        for job in live:
            if job not in asked:
                with contextlib.suppress(RotaError):  # the next round asks again
                    ask(home, "POST", f"/api/v1/jobs/{job}:stop", {"grace_s": STOP_GRACE_S})
                    asked.append(job)
    return asked


def _requeue_jobs(home: Home) -> dict[str, int]:
    """Let running jobs save and go back into the queue, at most ``STOP_JOBS_S``; how many jobs are left in each state.

    One that takes longer ends with the engine, and continues from its last commit.
    """
    live: dict[str, int] = {}
    with contextlib.suppress(RotaError):  # it does not answer, or is an older one: its log has the jobs all the same
        with contextlib.suppress(NotReachable):  # asking many jobs takes longer than one answer may
            ask(home, "POST", "/api/v1/service:hold", {"grace_s": HOLD_GRACE_S})
        for _ in _rounds(STOP_JOBS_S, JOBS_POLL_S):
            status = ask(home, "GET", "/api/v1/status")
            counts = status["cluster"]["jobs"]
            live = {state: n for state, n in counts.items() if n and not JobState(state).terminal}
            runs = any(JobState(state).holds_devices for state in live) and status["parts"]["engine"]["state"] != "off"
            if not runs:
                break
    return live


def live_in_log(settings: Settings) -> dict[str, int]:
    """How many jobs have not ended, by state, as the log of a service has it that does not run; none without a log."""
    from rota.runtime.event_log.sql import SqlLog
    from rota.service.process.assembly import db_url
    from rota.service.views.installation import Installation

    if not settings.db_url and not Home.of(settings.home).db.exists():
        return {}
    found = Installation()
    with contextlib.closing(SqlLog(db_url(settings))) as log:
        while records := log.read(after=found.number):
            for record in records:
                found.apply(record)
    return dict(Counter(one.state.value for one in found.live.values()))


def live_by_user(settings: Settings) -> dict[str, int]:
    """How many jobs of each user have not ended; nothing when no service runs. Raises what ``ask`` raises."""
    home, counts, cursor = Home.of(settings.home), Counter[str](), ""
    while _found(home) is not None:
        page = ask(home, "GET", f"/api/v1/jobs?limit=200&cursor={quote(cursor)}")
        counts.update(row["user"] for row in page["items"])
        if not (cursor := page.get("next") or ""):
            break
    return dict(counts)


def _given_engine(home: Home) -> str:
    """Address of the given engine that the gateway was started for, alive or not; empty if there is none."""
    record = RunFolder(home.run).read(RECORD)
    if record is None or "--engine" not in record.command:
        return ""
    return str(json.loads(record.command[record.command.index("--engine") + 1]).get("address", ""))


def _stores_of_gateway(home: Home, settings: Settings) -> dict[str, str | None]:
    """The variables that name the stores as the gateway has them: one that has others is replaced by who asks it."""
    gateway = RunFolder(home.run).find_alive(RECORD)
    if gateway is None:
        return {environ.DB_URL: settings.db_url or None, environ.REDIS_URL: settings.redis_url or None}
    given = process.environment_of(gateway.pid)
    return {name: given.get(name) for name in (environ.DB_URL, environ.REDIS_URL)}


def _sweep(home: Home, address: str, *, grace_s: float) -> str:
    """End what jobs have on a given engine; what is left there, in words, empty when nothing is."""
    from rota.runtime.ray.client import GatewayClient
    from rota.runtime.ray.engine import EngineSettings

    async def sweep() -> Sequence[str]:
        client = GatewayClient(home.root, EngineSettings(address=address))
        try:
            jobs = await client.list_jobs()
            await asyncio.gather(*(client.sweep(job, grace_s=grace_s) for job in jobs), return_exceptions=True)
            left = await client.list_jobs() if jobs else ()
            if not left:
                await client.let_go()
            return left
        finally:
            await client.close()

    try:
        left = asyncio.run(sweep())
    except RotaError as error:
        return f"the engine at {address} does not report what runs there: {error.message}"
    return f"on the engine at {address} there is left of: {', '.join(left)}" if left else ""


def _end_rest(home: Home, ended: list[str], *, grace_s: float) -> list[ProcessId]:
    """Gateway first, since it would start the engine again; then engine, registry and all else that is recorded."""
    from rota.runtime.ray.engine import EngineFiles, stop_engine
    from rota.tensors.api.store import down as end_registry

    left: list[ProcessId] = []
    run = RunFolder(home.run)
    records = {one.name: one for one in run.alive()}
    order = sorted(records, key=lambda name: (not name.startswith("gateway"), name))
    for name in order:
        if name.startswith("engine"):
            continue
        ended.append(name)
        if name == RECORD:  # alone: the watcher of the engine is its child, and would take its own part for lost
            left += () if process.stop(records[name].id, grace_s=grace_s) else (records[name].id,)
        else:
            left += process.stop_tree(records[name].id, grace_s=grace_s)
        run.forget(name)
    if EngineFiles(home.root).states():
        ended.append("engine")
        left += stop_engine(home.root)
    if end_registry(home.root):  # and the shared memory of its namespaces
        ended.append("registry")
    return left


def _unrecorded(home: Home) -> list[ProcessId]:
    """What runs of a home by the mark of its service, recorded or not, and who has it locked; never the caller."""
    found = {*process.marked(f"{environ.SERVICE}={home.root}"), *process.locking(home.service_lock)}
    return sorted((one for one in found if one.pid != os.getpid()), key=lambda one: one.pid)


def _end_unrecorded(home: Home, *, grace_s: float) -> tuple[list[str], list[ProcessId]]:
    """End what no record names, as the home or its records were removed; what it was, and what could not be ended."""
    found = _unrecorded(home)
    names = sorted({_kind(home, one) for one in found if process.command_line(one.pid)})  # an ending one has none
    for one in found if grace_s else ():
        process.send_signal(one, signal.SIGTERM)
        process.send_signal(one, signal.SIGCONT)  # one that was stopped can end by itself, too
    process.wait_gone(found, grace_s)
    return names, list(process.kill_all(lambda: _unrecorded(home))) if found else []


def _kind(home: Home, one: ProcessId) -> str:
    """What a process of the installation is; a standby that became the service has its lock."""
    command = process.command_line(one.pid)
    if command.rstrip().endswith(PRESTARTED) and one not in process.locking(home.service_lock):
        return "standby"
    return next((name for part, name in PARTS.items() if part in command), f"process {one.pid}")


def _note_left(home: Home, left: Sequence[ProcessId], gateway: ProcessRecord | None) -> None:
    """Record what could not be ended, for the next ``down`` must not say that all is; else tidy up after the killed.

    ``gateway`` is the record that names the given engine on which something is left.
    """
    run = RunFolder(home.run)
    for old in home.run.glob("left-*.json"):  # of an earlier one: what still runs of it is in ``left`` again
        old.unlink(missing_ok=True)
    for one in left:
        run.write(f"left-{one.pid}", one, ())
    if gateway is not None:
        run.write(gateway.name, gateway.id, gateway.command)
    if not left:
        GatewayFiles(home.root).socket.unlink(missing_ok=True)
        if home.db.with_name(f"{home.db.name}-wal").exists():
            from rota.runtime.event_log.sql import fold_journal

            fold_journal(home.db)


def _down_document(
    ended: list[str], left: list[ProcessId], stopped: list[str], text: str = "", live: Mapping[str, int] | None = None
) -> DownDocument:
    return {
        "api": "rota/v1",
        "kind": "Status",
        "state": "stuck" if left or text else "down",
        "text": text,
        "ended": ended,
        "stopped_jobs": stopped,
        "left_jobs": dict(live or {}),
        "still_running": [one.pid for one in left],
    }


def identity_of(record: ServiceRecord) -> ProcessId:
    """The process that a record of the service names."""
    return ProcessId(pid=int(record["pid"]), start_time=float(record["start_time"]))
