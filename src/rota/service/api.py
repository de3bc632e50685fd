"""The REST API as values: each request once, with its parameters and its answer; how a job becomes a body. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NotRequired,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)
from urllib.parse import quote

from rota.service.user_process import fresh_key
from rota.spec.errors import BadInput, UnknownName, did_you_mean

if TYPE_CHECKING:
    from rota.service.models.accounts import (
        AuditList,
        LoginDocument,
        SecretDocument,
        SecretList,
        TokenDocument,
        TokenList,
        UserDocument,
        UserList,
        WebhookDocument,
        WebhookList,
    )
    from rota.service.models.cluster import (
        AlertList,
        DrainPlan,
        MachineDocument,
        NodeCheck,
        NodeDocument,
        NodeList,
        NodeUsage,
        PlanReport,
        QueueDiff,
        QueueTree,
        SettingList,
        StatusDocument,
        UsageReport,
    )
    from rota.service.models.jobs import (
        EventList,
        ExecDocument,
        FileList,
        GraphDocument,
        JobDocument,
        JobList,
        JobSpecDocument,
        LogPage,
        PlacementDocument,
        TraceDocument,
    )
    from rota.service.models.reasons import Explanation, FailureList, WaitGraphDocument, WhatIf
    from rota.spec.job import JobSpec

API_PATH = "/api/v1"
EXECUTE_EXTRA_S = 30.0
"""On top of what a command may take: more than the service adds, whose answer says more than a broken connection."""
CHECK_TIMEOUT_S = 900.0
JOIN_TIMEOUT_S = 120.0
"""For a join, which starts the engine with the first machine."""
RESOURCES = ("cpus", "gpus", "gpu_type", "memory")
"""Resources of a command without a job file."""
SWEEP_LABELS = ("sweep", "sweep_rung", "sweep_point", "sweep_metric")
"""Labels of a job of a sweep: its name, the rung of a halving, the point, the metric."""
JobSort = Literal["submitted", "name", "state", "priority", "queue"]
"""Orders of a list of jobs: the newest or the highest priority first, names from A on; of equals the newest first."""
D = TypeVar("D")
A = TypeVar("A", covariant=True)
P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest(Generic[A]):
    """One request with an answer of the type ``A``.

    ``safe`` ones may be sent again after a broken connection: reads, and writes with an idempotency key.
    ``timeout_s`` is for an answer that takes longer than others; 0 is the timeout of the client.
    """

    method: str
    path: str
    params: Mapping[str, object] = field(default_factory=dict[str, object])
    body: Mapping[str, object] | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    safe: bool = True
    timeout_s: float = 0.0


class Blocking(Protocol):
    """A client whose requests return the answer."""

    def ask(self, request: ApiRequest[D]) -> D: ...


class Awaiting(Protocol):
    """A client whose requests are awaited."""

    def ask(self, request: ApiRequest[D]) -> Coroutine[object, None, D]: ...


class Method(Generic[P, D]):
    """The type of a declared request: a method that returns the answer, or a coroutine of it, as its client does."""

    @overload
    def __get__(self, client: Blocking, owner: type) -> Callable[P, D]: ...
    @overload
    def __get__(self, client: Awaiting, owner: type) -> Callable[P, Coroutine[object, None, D]]: ...
    def __get__(self, client: object, owner: type) -> object:
        raise NotImplementedError


def request(declared: Callable[Concatenate[Any, P], ApiRequest[D]]) -> Method[P, D]:
    """The method of both clients that sends the request which ``declared`` returns."""

    @wraps(declared)
    def send(client: Blocking | Awaiting, *args: P.args, **given: P.kwargs) -> object:
        return client.ask(declared(client, *args, **given))

    return cast("Method[P, D]", send)


def get(path: str, params: Mapping[str, object] | None = None) -> ApiRequest[Any]:
    """A read below ``/api/v1``; parameters that are None, empty or False are left out."""
    return ApiRequest(method="GET", path=API_PATH + path, params=_given(params or {}))


def _given(params: Mapping[str, object]) -> dict[str, object]:
    shown: dict[str, object] = {}
    for name, value in params.items():
        if value is True:
            shown[name] = "true"
        elif value is not False and value not in (None, "", (), []):  # 0 is a number like others
            shown[name] = list[object](value) if isinstance(value, tuple | list) else value
    return shown


def _send(method: str, path: str, body: Mapping[str, object] | None = None, *, safe: bool = True) -> ApiRequest[Any]:
    return ApiRequest(method=method, path=API_PATH + path, body=body, safe=safe)


def _if_match(version: int | None, request: ApiRequest[Any]) -> ApiRequest[Any]:
    """The request only for this version; sent again it would meet the next one, which it made itself."""
    return request if version is None else replace(request, headers={"If-Match": f'"{version}"'}, safe=False)


def _named(kind: str, name: str) -> str:
    return f"/{kind}/{quote(name, safe='')}"


def job_path(job: str, part: str = "") -> str:
    """``/jobs/<id>[/part]`` with the id quoted. Raises UnknownName for what names an instance."""
    if "/" in job:
        raise UnknownName(f"no job {job!r}: an id has no '/'", hint="the job comes first, then ROLE/N")
    return _named("jobs", job) + (f"/{part}" if part else "")


def events_path(job: str) -> str:
    """The events of a job, or of the whole installation."""
    return job_path(job, "events") if job else "/events"


class JobFilters(TypedDict, total=False):
    """Which jobs to list. ``all``: also those that ended. ``since_s``: that ended within this period."""

    all: bool
    state: str | Sequence[str] | None
    queue: str
    user: str
    name: str
    text: str
    label: str | Sequence[str] | None
    since_s: float | None
    sort: str
    limit: int
    cursor: str


class LineFilters(TypedDict, total=False):
    """Which lines of an instance; times in seconds since 1970."""

    attempt: int | None
    stream: str
    since: float | None
    until: float | None
    tail: int | None
    grep: str
    cursor: str


class LogFilters(LineFilters, total=False):
    """Which log lines. ``instance`` is a role or ``role/rank``."""

    instance: str


class EventFilters(TypedDict, total=False):
    """Which events: of a ``type``, after a record number."""

    after: int
    type: str
    limit: int


class CommandResources(TypedDict, total=False):
    """Resources of a command without a job file, and the name of its job."""

    name: str
    cpus: float | str
    gpus: float | str
    gpu_type: str
    memory: int | str


class JobText(TypedDict):
    """The body of a submission: the text of a job file with its name and ``--set`` values."""

    source: str
    filename: str
    sets: list[str]
    workdir: str
    ignore_image: NotRequired[bool]


class JobObject(TypedDict):
    """The body of a submission of a job built in Python."""

    spec: object
    workdir: str
    ignore_image: NotRequired[bool]


JobBody = JobText | JobObject


class Built(Protocol):
    """A job built in Python: ``rota.Job``."""

    def spec(self) -> JobSpec: ...


Overrides = Mapping[str, object] | Sequence[str]
"""``{path: value}`` or ``path=value`` each, over a job file."""


class JobApi:
    """Requests about jobs, nodes, queues and the service."""

    @request
    def submit(self, body: JobBody, *, key: str = "") -> ApiRequest[JobDocument]:
        """The lower form of ``run``: the body as it is sent; gives the ``Job`` document."""
        headers = {"Idempotency-Key": key or fresh_key()}  # sent again under it, it is still one job
        return ApiRequest(method="POST", path=f"{API_PATH}/jobs", body=cast("dict[str, object]", body), headers=headers)

    @request
    def plan(self, body: JobBody) -> ApiRequest[PlanReport]:
        """``PlanReport``: what the job would become; nothing is started or stored."""
        return _send("POST", "/jobs:plan", cast("dict[str, object]", body))

    @request
    def jobs(self, **filters: Unpack[JobFilters]) -> ApiRequest[JobList]:
        """One page (``JobList``)."""
        return get("/jobs", filters)

    @request
    def job(self, job: str) -> ApiRequest[JobDocument]:
        """``Job``: state, roles, instances, attempts. ``job`` is an id or a unique prefix of one."""
        return get(job_path(job))

    @request
    def explain(self, job: str) -> ApiRequest[Explanation]:
        """``Explanation``: why the job waits, what is ahead, what would help."""
        return get(job_path(job, "explain"))

    @request
    def what_if(self, job: str, changes: Overrides) -> ApiRequest[WhatIf]:
        """``WhatIf``: when a job that waits would start with these changes, and what would bind it; none is made."""
        return _send("POST", job_path(job, "explain"), {"changes": _changes(changes)})

    @request
    def why(self, job: str) -> ApiRequest[WaitGraphDocument]:
        """``WaitGraph``: which instance waits for which in a running job."""
        return get(job_path(job, "why"))

    @request
    def failures(self, job: str, *, attempt: int | None = None) -> ApiRequest[FailureList]:
        """``FailureList``: what failed first, and what was done about it."""
        return get(job_path(job, "failures"), {"attempt": attempt})

    @request
    def trace(self, job: str) -> ApiRequest[TraceDocument]:
        """``Trace``: what every instance ran and waited for, in the form that Perfetto opens, with a ``summary``."""
        return get(job_path(job, "trace"))

    @request
    def graph(self, job: str) -> ApiRequest[GraphDocument]:
        """``Graph``: roles, edges, sub-graphs, blast radius."""
        return get(job_path(job, "graph"))

    @request
    def placement(self, job: str) -> ApiRequest[PlacementDocument]:
        """``Placement``: which devices of which nodes the job holds."""
        return get(job_path(job, "placement"))

    @request
    def spec(self, job: str) -> ApiRequest[JobSpecDocument]:
        """``JobSpec``: the job as it was understood, with the text it came from."""
        return get(job_path(job, "spec"))

    @request
    def stop(self, job: str, *, grace_s: float | None = None) -> ApiRequest[JobDocument]:
        """Ask a job to end; gives the ``Job`` document."""
        return _send("POST", f"{job_path(job)}:stop", {} if grace_s is None else {"grace_s": grace_s})

    @request
    def pause(self, job: str, *, grace_s: float | None = None) -> ApiRequest[JobDocument]:
        """Ask a job to give its devices back and wait until ``resume``; gives the ``Job`` document."""
        return _send("POST", f"{job_path(job)}:pause", None if grace_s is None else {"grace_s": grace_s})

    @request
    def resume(self, job: str, *, from_commit: int | None = None) -> ApiRequest[JobDocument]:
        """Put a paused job into the queue again, at its last commit or at ``from_commit``.

        Of a job that ended ``from_commit`` begins a new one, whose document this gives. Raises UnknownName for a commit
        that is not there, Conflict if the job takes 20 s to give its devices back.
        """
        if from_commit is None:
            return _send("POST", f"{job_path(job)}:resume")
        sent = _send("POST", f"{job_path(job)}:resume", {"from_commit": from_commit})
        return replace(sent, headers={"Idempotency-Key": fresh_key()})

    @request
    def execute(
        self, job: str, instance: str, argv: Sequence[str], *, timeout_s: float = 60.0
    ) -> ApiRequest[ExecDocument]:
        """``Exec``: run a command beside a running instance (``role`` or ``role/rank``): its end and what it printed.

        Raises Conflict when the instance does not run.
        """
        body = {"instance": instance, "argv": list(argv), "timeout_s": timeout_s}
        path, limit_s = f"{API_PATH}{job_path(job)}:exec", timeout_s + EXECUTE_EXTRA_S
        return ApiRequest(method="POST", path=path, body=body, safe=False, timeout_s=limit_s)

    @request
    def files(self, job: str, path: str = "", *, node: str = "") -> ApiRequest[FileList]:
        """``FileList``: what is at a path of the output folder and below it, on all machines or one."""
        return get(job_path(job, "files"), {"path": path, "node": node})

    @request
    def scale(self, job: str, role: str, n: int) -> ApiRequest[JobDocument]:
        """Ask for ``n`` instances of a role, now and in later attempts; gives the ``Job`` document."""
        return _send("POST", f"{job_path(job)}:scale", {"role": role, "n": n})

    @request
    def change(
        self, job: str, changes: Mapping[str, object], *, if_version: int | None = None
    ) -> ApiRequest[JobDocument]:
        """Change priority, queue, time_limit_s or labels; gives the ``Job`` document.

        Raises VersionMismatch when the job has another ``version`` than ``if_version``.
        """
        return _if_match(if_version, _send("PATCH", job_path(job), {"changes": dict(changes)}, safe=False))

    @request
    def mark_node(
        self, node: str, action: str, *, reason: str = "", notice_s: float | None = None, dry_run: bool = False
    ) -> ApiRequest[DrainPlan]:
        """``DrainPlan`` of ``drain``, ``undrain`` or ``cordon``; jobs on a drained node have ``notice_s`` to move."""
        body: dict[str, object] = {"reason": reason, "dry_run": dry_run}
        return _send("POST", f"{_named('nodes', node)}:{action}", body | _only(notice_s=notice_s))

    @request
    def apply_queues(
        self,
        queues: Sequence[Mapping[str, object]] | str,
        *,
        filename: str = "queues.yaml",
        dry_run: bool = False,
        if_version: int | None = None,
    ) -> ApiRequest[QueueDiff]:
        """``QueueDiff`` of putting this tree of queues, values or the text of a file, in place of the present one.

        Raises VersionMismatch, with what changed since, when the tree has another ``version`` than ``if_version``.
        """
        tree = {"source": queues, "filename": filename} if isinstance(queues, str) else {"queues": queues}
        return _if_match(if_version, _send("PUT", "/queues", {**tree, "dry_run": dry_run}))

    @request
    def nodes(self) -> ApiRequest[NodeList]:
        """``NodeList``."""
        return get("/nodes")

    @request
    def node(self, node: str) -> ApiRequest[NodeDocument]:
        """``Node``: one node."""
        return get(_named("nodes", node))

    @request
    def node_usage(self, node: str) -> ApiRequest[NodeUsage]:
        """``NodeUsage``: what the machine of a node does, measured there now."""
        return get(f"{_named('nodes', node)}/usage")

    @request
    def check_nodes(self) -> ApiRequest[NodeCheck]:
        """``NodeCheck``: names, clocks, ports, bandwidth and versions of all machines; for admins."""
        return replace(_send("POST", "/nodes:check"), timeout_s=CHECK_TIMEOUT_S)

    @request
    def join_machine(self, facts: Mapping[str, object]) -> ApiRequest[MachineDocument]:
        """``Machine`` with the access to the engine, which is started unless it runs; ``facts`` as REST says."""
        return replace(_send("POST", "/machines", facts), timeout_s=JOIN_TIMEOUT_S)

    @request
    def machine(self, host: str) -> ApiRequest[MachineDocument]:
        """``Machine``: one that joined."""
        return get(_named("machines", host))

    @request
    def heartbeat_of_machine(self, host: str) -> ApiRequest[MachineDocument]:
        """``Machine``: one that joined, whose agent so says that it is there."""
        return _send("POST", f"{_named('machines', host)}/heartbeat")

    @request
    def leave_machine(self, host: str) -> ApiRequest[MachineDocument]:
        """Say that a machine leaves."""
        return _send("DELETE", _named("machines", host))

    @request
    def queues(self) -> ApiRequest[QueueTree]:
        """``QueueTree``."""
        return get("/queues")

    @request
    def alerts(self) -> ApiRequest[AlertList]:
        """``AlertList``: what needs a person's attention now."""
        return get("/alerts")

    @request
    def acknowledge(self, alert: str, *, note: str = "") -> ApiRequest[AlertList]:
        """``AlertList`` after an alert was marked as seen."""
        return _send("POST", "/alerts:acknowledge", {"alert": alert, "note": note})

    @request
    def report(self, *, by: str = "user", since_s: float | None = None) -> ApiRequest[UsageReport]:
        """``Report``: usage of the last ``since_s`` seconds by user, queue, job or gpu_type."""
        return get("/report", {"by": by, "since_s": since_s})

    @request
    def status(self) -> ApiRequest[StatusDocument]:
        """``Status`` of the service."""
        return get("/status")

    @request
    def settings(self) -> ApiRequest[SettingList]:
        """``SettingList``: each setting of the service and its origin."""
        return get("/settings")

    @request
    def log_page(self, job: str, **filters: Unpack[LogFilters]) -> ApiRequest[LogPage]:
        """``LogPage``: one page of log lines."""
        return get(job_path(job, "logs"), filters)

    @request
    def event_page(self, job: str = "", **filters: Unpack[EventFilters]) -> ApiRequest[EventList]:
        """``EventList``: one page of events, of a job or of everything."""
        return get(events_path(job), filters)


class AccountApi:
    """Requests about users, tokens, secrets, webhooks and the audit log."""

    @request
    def whoami(self) -> ApiRequest[UserDocument]:
        """``User``: the owner of the token, and its roles."""
        return get("/whoami")

    @request
    def login_code(self) -> ApiRequest[LoginDocument]:
        """``Login``: a code that opens the page once, and the address with it."""
        return _send("POST", "/login/code", safe=False)

    @request
    def users(self) -> ApiRequest[UserList]:
        """``UserList``; for admins."""
        return get("/users")

    @request
    def put_user(self, name: str, grants: Iterable[tuple[str, str]]) -> ApiRequest[UserDocument]:
        """Set the roles of a user: pairs of queue (``""`` is the root) and role."""
        return _send("PUT", _named("users", name), {"grants": [{"queue": path, "role": role} for path, role in grants]})

    @request
    def remove_user(self, name: str) -> ApiRequest[UserDocument]:
        """Take every role and token from a user."""
        return _send("DELETE", _named("users", name))

    @request
    def tokens(self) -> ApiRequest[TokenList]:
        """``TokenList``: the valid ones of the caller, for admins all."""
        return get("/tokens")

    @request
    def make_token(
        self, *, user: str = "", name: str = "", role: str = "", queue: str = "", ttl_s: float | None = None
    ) -> ApiRequest[TokenDocument]:
        """``Token``, the only answer that holds it."""
        return _send("POST", "/tokens", _only(user=user, name=name, role=role, queue=queue, ttl_s=ttl_s), safe=False)

    @request
    def revoke_token(self, token_id: str) -> ApiRequest[TokenDocument]:
        """Make a token worthless, by its id."""
        return _send("DELETE", _named("tokens", token_id))

    @request
    def secrets(self) -> ApiRequest[SecretList]:
        """``SecretList``: names alone."""
        return get("/secrets")

    @request
    def set_secret(self, name: str, value: str) -> ApiRequest[SecretDocument]:
        """Store a value for the caller's jobs under the name of an environment variable."""
        return _send("PUT", _named("secrets", name), {"value": value})

    @request
    def remove_secret(self, name: str) -> ApiRequest[SecretDocument]:
        """Delete a value."""
        return _send("DELETE", _named("secrets", name))

    @request
    def webhooks(self) -> ApiRequest[WebhookList]:
        """``WebhookList``; for admins."""
        return get("/webhooks")

    @request
    def make_webhook(self, url: str, *, on: Iterable[str] = (), queue: str = "") -> ApiRequest[WebhookDocument]:
        """``Webhook``, the only answer with the secret that signs its notices."""
        return _send("POST", "/webhooks", {"url": url, "on": list(on), "queue": queue}, safe=False)

    @request
    def remove_webhook(self, webhook: str) -> ApiRequest[WebhookDocument]:
        """Send it no more notices."""
        return _send("DELETE", _named("webhooks", webhook))

    @request
    def audit(self, *, user: str = "", text: str = "", limit: int = 100, cursor: str = "") -> ApiRequest[AuditList]:
        """``AuditList``: who asked for which change, the newest first, after a ``cursor``; for admins."""
        return get("/audit", {"user": user, "text": text, "limit": limit, "cursor": cursor})


def _only(**values: object) -> dict[str, object]:
    """The values that were given."""
    return {name: value for name, value in values.items() if value not in (None, "")}


def body_of(
    job: str | Path | JobSpec | Built | None,
    *,
    sets: Overrides = (),
    command: Sequence[str] | None = None,
    workdir: str = "",
    res: Mapping[str, object] | None = None,
) -> JobBody:
    """The body of a submission: ``command_of`` when there is a command, else ``source_of``."""
    res = dict(res or {})
    name = res.pop("name", None)
    for other in res.keys() - {*RESOURCES}:
        hint = did_you_mean(other, ("name", "set", "command", "workdir", *RESOURCES))
        hint = hint or f"a field of the job: set={{{other!r}: ...}}, or Job(..., {other}=...) of a built one"
        raise BadInput(f"run() takes no {other!r}", hint=hint)
    if command is not None:
        given = None if name is None else str(name)
        return command_of(command, sets=_changes(sets), res=res, workdir=workdir, name=given)
    if name is not None:
        sets = [f"name={name}", *_changes(sets)]
    if res:
        raise BadInput(f"{', '.join(res)}: only with a command", hint="set={'roles.NAME.resources.gpus': 1}")
    return source_of(job, sets=sets, workdir=workdir)


def source_of(job: object, *, sets: Overrides = (), workdir: str = "") -> JobBody:
    """The body of a submission: of a path, of the text of a job file, of a JobSpec, or of a built ``rota.Job``.

    Raises BadInput for a file that cannot be read and for anything else.
    """
    changes = _changes(sets)
    built = getattr(job, "spec", job)
    spec = built() if callable(built) else built
    if hasattr(spec, "to_json"):
        if changes:
            raise BadInput("'set' changes the text of a job file; change the built job itself instead")
        return {"spec": cast("JobSpec", spec).to_json(), "workdir": workdir or str(Path.cwd())}
    if isinstance(job, Path) or (isinstance(job, str) and "\n" not in job and ":" not in job.strip("{")):
        path = Path(job).expanduser()
        folder = workdir or str(path.absolute().parent)
        return {"source": read_file(path), "filename": str(path), "sets": changes, "workdir": folder}
    if not isinstance(job, str):
        raise BadInput(f"{type(job).__name__} is not a job", hint="give a path, the text of a job file, or a rota.Job")
    return {"source": job, "filename": "job.yaml", "sets": changes, "workdir": workdir or str(Path.cwd())}


def _changes(sets: Overrides) -> list[str]:
    return [f"{path}={value}" for path, value in sets.items()] if isinstance(sets, Mapping) else list(sets)


def command_of(
    argv: Sequence[str],
    *,
    sets: Sequence[str] = (),
    res: Mapping[str, object] | None = None,
    workdir: str = "",
    name: str | None = None,
) -> JobText:
    """The body of a job of one role ``main``: words as they are, a text by a shell. ``res``: cpus, gpus, memory.

    ``name`` is that of the job; without one it is the first word of the command.
    """
    from rota.service.jobfile.scripts import job_name  # noqa: PLC0415 - as below

    first = argv.split() if isinstance(argv, str) else argv
    if not first:
        raise BadInput("the command is empty", hint="for example ['python', 'train.py']")
    role = {"run": argv if isinstance(argv, str) else [str(word) for word in argv]}
    source = json.dumps({"name": job_name(str(first[0])) if name is None else name, "roles": {"main": role}}, indent=1)
    asked = [f"roles.main.resources.{key}={value}" for key, value in (res or {}).items() if value not in ("", None)]
    return {"source": source, "filename": "command", "sets": [*sets, *asked], "workdir": workdir or str(Path.cwd())}


def copy_of(
    job: JobDocument, understood: JobSpecDocument, *, sets: Overrides = (), ignore_image: bool = False
) -> JobText:
    """The body that submits a job again as it is now, with changes; the labels that put it into a sweep stay behind."""
    from rota.service.jobfile.models import job_text  # noqa: PLC0415 - as below
    from rota.spec.job import JobSpec  # noqa: PLC0415 - only for a copy

    spec = JobSpec.from_json(understood["spec"])
    labels = tuple(pair for pair in spec.labels if pair[0] not in SWEEP_LABELS)
    source = job_text(replace(spec, workdir=None, labels=labels))
    return {
        "source": source,
        "filename": f"copy of {job['id']}",
        "sets": _changes(sets),
        "workdir": job["workdir"],
        "ignore_image": ignore_image,
    }


def read_file(path: Path, *, hint: str = "'rota init --list' shows templates to begin with") -> str:
    """Text of a job file. Raises BadInput when it is missing or cannot be read, JobFileError when it is not UTF-8."""
    from rota.service.jobfile.nodes import decode  # noqa: PLC0415 - a client that submits nothing needs no parser

    try:
        return decode(path.read_bytes(), filename=str(path))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file", hint=hint) from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a folder", hint="name the job file in it") from None
    except OSError as exc:
        raise BadInput(f"{path}: {exc.strerror or exc}") from exc
