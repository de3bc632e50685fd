"""What every route needs, and the check that comes before it."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Request
from pydantic import AfterValidator
from starlette.types import Scope

from rota.cluster.core.jobs import Wait
from rota.runtime.clock import Clock
from rota.runtime.environ import Home
from rota.runtime.random import RandomSource
from rota.runtime.secrets import Vault
from rota.service.accounts import Caller, Redactor, UserRole
from rota.service.config import Settings
from rota.service.control.engine import Engine
from rota.service.control.forecasts import Forecasts
from rota.service.control.intake import Intake
from rota.service.control.job_files import SeenLogs
from rota.service.control.loop import ServiceLoop
from rota.service.metrics import Metrics
from rota.service.models.jobs import JobDocument
from rota.service.rest.auth import COOKIE, SAFE_METHODS, Audit, Auth, AuthRequest
from rota.service.rest.forward import Forwards
from rota.service.rest.machine_names import MachineNames
from rota.service.views.alerts import Suspicion
from rota.service.views.job_history import JobHistory
from rota.service.views.jobs import HeartbeatFields, job_document, outlined
from rota.service.webhooks import Notifier
from rota.spec.errors import BadInput, Conflict, LimitExceeded, NotAllowed, SeqConflict, UnknownName, nearest, unknown
from rota.spec.events import Event
from rota.spec.ids import InstanceId, JobId

STREAMS_MAX, STREAMS_OF_USER_MAX = 1024, 64
"""Streams of events and logs that are open at once, in all and of one user."""
EXECS_MAX, EXECS_OF_USER_MAX = 64, 16
"""Commands that run beside instances at once, in all and of one user; each is a request that the gateway holds."""
STOP_TRIES_MAX = 20
MACHINES_PATH = "/api/v1/machines"
AUDITED_PATH_MAX = 200
"""Characters of a path that the audit keeps: a stranger may send any."""

_ZERO = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
T = TypeVar("T")


def _storable(value: T) -> T:
    """Refuse what JSON may say and no store takes: a lone surrogate, a zero byte, a number without an end."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a text holds a lone surrogate (U+D800 to U+DFFF)") from None
    if _ZERO.search(text):
        raise ValueError("a text holds a zero byte")
    return value


STORABLE = AfterValidator(_storable)
"""For fields of a body that hold anything, and for paths."""

TERMINAL_PATH = "/api/v1/jobs/{job}/terminals/{terminal}"
HEARTBEAT_PATH = "/api/v1/machines/{host}/heartbeat"
NOT_AUDITED = (TERMINAL_PATH, HEARTBEAT_PATH)
"""Used again and again, without a change that lasts: of a terminal the audit has its opening, not what is typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The restore of a back-up that filled this home: when, in Unix seconds, and the name of the file."""

    at: float
    file: str

    def has(self, job: JobHistory) -> bool:
        """Whether a job was in the back-up and had not ended."""
        return job.submitted_at < self.at and (job.ended_at is None or job.ended_at > self.at)


@dataclass(slots=True, kw_only=True)
class AppState:
    """The parts behind the routes."""

    settings: Settings
    home: Home
    clock: Clock
    random_source: RandomSource
    loop: ServiceLoop
    forecasts: Forecasts
    intake: Intake
    auth: Auth
    vault: Vault
    audit: Audit
    notifier: Notifier
    engine: Engine
    metrics: Metrics
    version: str
    pid: int
    started_at: float
    machines: MachineNames
    restored: Restored | None = None
    ready: bool = False
    streams_of: Counter[str] = field(default_factory=Counter[str])
    """Open streams, by user."""
    execs: Counter[str] = field(default_factory=Counter[str])
    """Commands that run beside instances, by user."""
    seen_logs: SeenLogs = field(default_factory=SeenLogs)
    suspicions: dict[JobId, Suspicion] = field(default_factory=dict[JobId, Suspicion])
    """Running jobs that may hang, as the watch over their masters last saw it."""
    check_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while machines are checked: a second check would slow the first."""
    tree_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a tree of queues is written: of two that were made from one version only one is."""
    outlook_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the jobs of now are played under other policies: one such play at a time."""

    idle_since_s: dict[JobId, float] = field(default_factory=dict[JobId, float])
    """Since when the processes of a job with an idle limit do no work, in monotonic seconds."""

    terminals_used_s: dict[JobId, float] = field(default_factory=dict[JobId, float])
    """When input was last sent to a terminal of a job, in monotonic seconds."""

    forwards: Forwards = field(init=False)
    """The ports of jobs that are open for browsers."""

    def __post_init__(self) -> None:
        self.forwards = Forwards(
            auth=self.auth,
            clock=self.clock,
            host=self.settings.host,
            page_port=self.settings.port,
            may=self.entered,
            find=self._port_address,
        )

    async def _port_address(self, key: tuple[JobId, str, str]) -> str:
        job, instance, name = key
        beat = (await self.engine.beats(job)).get(instance)
        ports = {row[0]: row[1] for row in beat.get("ports", ())} if beat is not None else {}
        if name not in ports:
            hint = f"see: rota show {job} --json" if ports else "a role names its ports: ports: [notebook]"
            raise UnknownName(f"{instance} of {job} has no port {name!r} now", hint=hint)
        return ports[name]

    def terminal_used(self, job: JobId) -> None:
        """A user types at a terminal of the job."""
        self.terminals_used_s[job] = self.clock.monotonic_s()

    def used_s(self, job: JobId) -> float:
        """When a port or terminal of a job was last used, in monotonic seconds; 0 where none was."""
        return max(self.forwards.used_s(job), self.terminals_used_s.get(job, 0.0))

    @property
    def streams(self) -> int:
        """How many streams are open."""
        return self.streams_of.total()

    def open_stream(self, user: str) -> None:
        """Count a long answer. Raises LimitExceeded."""
        if self.streams >= STREAMS_MAX or self.streams_of[user] >= STREAMS_OF_USER_MAX:
            text = f"{self.streams} streams are open, {self.streams_of[user]} of {user}"
            hint = f"at most {STREAMS_MAX}, {STREAMS_OF_USER_MAX} of one user: close a page or a follower"
            raise LimitExceeded(text, hint=hint)
        self.streams_of[user] += 1

    @contextmanager
    def exec_slot(self, user: str) -> Generator[None]:
        """Count a command that runs beside an instance. Raises LimitExceeded."""
        if self.execs.total() >= EXECS_MAX or self.execs[user] >= EXECS_OF_USER_MAX:
            text = f"{self.execs.total()} commands run beside instances, {self.execs[user]} of {user}"
            raise LimitExceeded(text, hint=f"at most {EXECS_MAX}, {EXECS_OF_USER_MAX} of one user: wait for one to end")
        self.execs[user] += 1
        try:
            yield
        finally:
            self.execs -= Counter([user])  # drops a user at 0: else the table grows with each that ever came

    def seen(self, caller: Caller, job: str) -> JobHistory:
        """A job that the caller may know of. Raises UnknownName or BadInput (several fit)."""
        return self.loop.installation.find(job, caller.sees)

    def read(self, caller: Caller, job: str) -> JobHistory:
        """A job whose output and text the caller may read. Raises NotAllowed beside what ``seen`` raises."""
        return _allowed(self.seen(caller, job), Caller.reads, caller, "read what it holds or says")

    def steered(self, caller: Caller, job: str) -> JobHistory:
        """A job that the caller may stop or change. Raises NotAllowed beside what ``seen`` raises."""
        return _allowed(self.seen(caller, job), Caller.steers, caller, "stop or change it")

    def entered(self, caller: Caller, job: str) -> JobHistory:
        """A job in which the caller may run code. Raises NotAllowed beside what ``seen`` raises."""
        found = self.steered(caller, job)
        owner = found.submitted.user
        if found.spec.secrets and owner != caller.user and not caller.has(UserRole.ADMIN):
            text = f"{found.id} has secrets of {owner}, which a command could read"
            raise NotAllowed(text, hint=f"ask {owner}, or an admin")
        return found

    def redacted(self, caller: Caller, document: T) -> T:
        """The document without the names of what the caller may not see."""
        return self.redactor(caller).redact(document)

    def redactor(self, caller: Caller) -> Redactor:
        """Redaction for this caller, of many documents of one answer."""
        return Redactor(self.loop.installation.jobs, caller)

    def wait_of(self, job: JobId) -> Wait | None:
        """Why a job waits now, as the scheduler sees it."""
        return self.loop.scheduler.wait_of(job, self.clock.wall_s())

    def suspected(self, job: JobId) -> str:
        """Why a running job may hang; empty while nothing says so."""
        found = self.suspicions.get(job)
        return "" if found is None else found.text

    def close_stream(self, user: str) -> None:
        """A long answer is over."""
        self.streams_of -= Counter([user])  # as ``execs``


def _allowed(job: JobHistory, may: Callable[[Caller, JobHistory], bool], caller: Caller, what: str) -> JobHistory:
    if not may(caller, job):
        mine = f"it is {job.submitted.user}'s job, and you are {caller.user}"
        hint = f"ask {job.submitted.user}, or a queue-admin of {job.queue}"
        raise NotAllowed(f"{job.id}: only its owner may {what}; {mine}", hint=hint)
    return job


async def append_live(app: AppState, job: JobHistory, event: Event) -> None:
    """Append to a job unless it ended; its master may write at the same time, so try on the newer state again."""
    for _try in range(STOP_TRIES_MAX):
        check_live(job)
        try:
            await app.loop.append([event], job=job.id, expected_seq=job.seq)
        except SeqConflict:
            await app.loop.wait_for(await asyncio.to_thread(app.loop.log.last_number))
            continue
        return
    raise Conflict(f"{job.id} was modified concurrently", hint="retry")


def check_live(job: JobHistory) -> None:
    """Raises Conflict for a job that has ended."""
    if job.ended is not None:
        raise Conflict(f"{job.id} has ended: {job.state.value}", state=job.state.value)


IfMatch = Annotated[str, Header(max_length=100)]
"""The header by which a change names the version that it was made from; empty: any."""


def versions_of(if_match: str) -> list[str]:
    """The versions that ``If-Match`` names."""
    return [one.strip().removeprefix("W/").strip('"') for one in if_match.split(",") if one.strip()]


def is_version(version: int, if_match: str) -> bool:
    """True where ``If-Match`` is empty, or names this version or any."""
    wanted = versions_of(if_match)
    return not wanted or "*" in wanted or str(version) in wanted


def member_of(job: JobHistory, text: str, more: Collection[str] = ()) -> tuple[str, int | None]:
    """Role, and rank if one is named, of a job's ``role`` or ``role/rank``; ``more`` names members of earlier times.

    Raises BadInput for another form, UnknownName for a role or instance that the job has not.
    """
    name, slash, _ = text.partition("/")
    role = next((one for one in job.spec.roles if one.name == name), None)
    if role is None:
        raise unknown(f"{job.id} has no role {name!r}", name, [one.name for one in job.spec.roles], "roles")
    if not slash:
        return role.name, None
    try:
        found = InstanceId.parse(text)
    except ValueError as error:
        raise BadInput(str(error)) from None
    there = [str(one.id) for one in job.instances.values()]
    known = [one for one in dict.fromkeys((*there, *more)) if one.startswith(f"{name}/")]
    if found.rank >= role.seats and text not in known:
        known = known or [f"{name}/{rank}" for rank in range(role.gang_size)]
        raise unknown(f"{job.id} has no instance {text}", "", known, "instances")
    return role.name, found.rank


def check_attempt(job: JobHistory, attempt: int | None, *, may_come: bool = False) -> None:
    """Raises UnknownName for an attempt that a job has not; ``may_come``: a later one will do."""
    there = len(job.attempts)
    if attempt is not None and (attempt < 1 or (attempt > there and not may_come)):
        known = f"attempts: 1 to {there}" if there else "it has not started"
        raise UnknownName(f"{job.id} has no attempt {attempt}", hint=known)


async def app_of(request: Request) -> AppState:
    """The parts of the application that this request came to."""
    return request.state.app


def auth_request(request: Request) -> AuthRequest:
    """What of a request matters for its permission."""
    return AuthRequest(
        method=request.method,
        headers={name.lower(): value for name, value in request.headers.items()},
        cookie=request.cookies.get(COOKIE, ""),
        address=request.client.host if request.client else "",
    )


async def caller_of(request: Request) -> Caller:
    """Who asks; a change is in the audit before it is made. Raises NoToken, NotAllowed or StoreUnavailable."""
    app = await app_of(request)
    caller: Caller = getattr(request.state, "asker", None) or app.auth.check(auth_request(request))
    if request.method not in SAFE_METHODS and request.scope["route"].path not in NOT_AUDITED:
        app.audit.begin(asked_line(request.scope, caller))
    request.state.caller = caller
    if caller.joins_only and not request.scope["route"].path.startswith(MACHINES_PATH):
        raise NotAllowed("this token is for joining machines alone", hint="use one of another role, or ask an admin")
    _refuse_unknown_parameters(request)
    return caller


def _refuse_unknown_parameters(request: Request) -> None:
    """A filter with a slip in its name would be no filter."""
    known = [one.alias for one in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            hint = nearest(name, known, "parameters of this route") if known else "this route takes none"
            raise BadInput(f"query.{name}: unknown parameter", hint=hint)


def asked_line(scope: Scope, caller: Caller | None) -> dict[str, object]:
    """A request as the audit keeps it."""
    return {
        "user": caller.user if caller else "",
        "token": caller.token if caller else "",
        "by": caller.by if caller else "",
        "address": (scope.get("client") or ("",))[0],
        "method": scope["method"],
        "path": scope["path"][:AUDITED_PATH_MAX],
        "request_id": scope["state"]["request_id"],
    }


Parts = Annotated[AppState, Depends(app_of)]
Asker = Annotated[Caller, Depends(caller_of)]


async def audit_of(request: Request, app: Parts, caller: Asker) -> Callable[..., None]:
    """Adds fields to the audit of this request, before it is done."""
    return partial(app.audit.add, request.state.request_id)


Note = Annotated[Callable[..., None], Depends(audit_of)]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAccess:
    """The job that a request names, with the caller who has the right that the route declares."""

    app: AppState
    caller: Caller
    job: JobHistory

    async def append(self, event: Event) -> None:
        """Append to the job. Raises Conflict when it has ended or is modified all the time."""
        await append_live(self.app, self.job, event)

    async def beats(self) -> Mapping[str, HeartbeatFields]:
        """The last heartbeat of each instance; none of a job without a master."""
        return await self.app.engine.beats(self.job.id) if self.has_master else {}

    @property
    def has_master(self) -> bool:
        """True when there may be a master to ask."""
        return self.job.state.holds_devices and self.job.master is not None

    def checkpoints(self) -> str:
        """The folder of its checkpoints: that of its file, else its own where it is here and not empty; else empty."""
        job = self.job
        if job.spec.checkpoint and job.spec.checkpoint.dir:
            return job.spec.checkpoint.dir
        own = self.app.home.checkpoints / job.id
        with suppress(OSError):
            return str(own) if any(own.iterdir()) else ""
        return ""

    def document(self, beats: Mapping[str, HeartbeatFields] | None = None) -> JobDocument:
        """The job as its caller may see it: without commands and tracebacks for who may not read it."""
        app, job = self.app, self.job
        output = job.spec.output_dir or str(app.home.job(job.id).output)
        url = f"{app.settings.url}/jobs/{job.id}"
        suspected = app.suspected(job.id) if self.caller.reads(job) else ""
        restored_at = app.restored.at if app.restored is not None and app.restored.has(job) else None
        found = job_document(
            job,
            app.clock.wall_s(),
            app.wait_of,
            beats,
            suspected=suspected,
            output=output,
            checkpoints=self.checkpoints(),
            url=url,
            restored_at=restored_at,
        )
        return app.redacted(self.caller, found if self.caller.reads(job) else outlined(found))

    def redacted(self, document: T) -> T:
        """The document without the names of what the caller may not see."""
        return self.app.redacted(self.caller, document)


def _job_with(find: Callable[[AppState, Caller, str], JobHistory]) -> Any:
    async def access(job: str, app: Parts, caller: Asker) -> JobAccess:
        return JobAccess(app=app, caller=caller, job=find(app, caller, job))

    return Depends(access)


SeenJob = Annotated[JobAccess, _job_with(AppState.seen)]
ReadJob = Annotated[JobAccess, _job_with(AppState.read)]
SteeredJob = Annotated[JobAccess, _job_with(AppState.steered)]
EnteredJob = Annotated[JobAccess, _job_with(AppState.entered)]
"""The job of the path, for a caller who may know of it, read its output, change it, or run code in it."""
