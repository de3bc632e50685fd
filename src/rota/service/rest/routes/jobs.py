"""Routes of jobs: submit, plan, list, show, explain, stop, and everything that is told of one."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from typing import Annotated, Any, cast

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from rota.job.rpc.tracing import read_spans
from rota.service.accounts import Caller, Role
from rota.service.api import JobSort
from rota.service.control.changes import checked_changes, checked_size
from rota.service.control.submission import Submission
from rota.service.models.base import Sent, Why
from rota.service.models.cluster import PlanReport
from rota.service.models.jobs import (
    AttemptList,
    ExecDocument,
    GraphDocument,
    JobDocument,
    JobList,
    JobSpecDocument,
    PlacementDocument,
    PlacementRow,
    TraceDocument,
)
from rota.service.models.reasons import Explanation, FailureList, WaitGraphDocument
from rota.service.rest.deps import STORABLE, AppState, Asker, Parts, append_live, check_attempt, member_of
from rota.service.views.graph import graph_document, trace_document
from rota.service.views.job_history import JobHistory
from rota.service.views.jobs import API, JobFilter, WaitOf, edits, job_document, job_list, outlined
from rota.service.views.reasons import estimate_document, explanation, failure_list, why_document
from rota.spec import codec
from rota.spec.errors import BadInput, Conflict, NotAllowed, VersionMismatch
from rota.spec.events import JobChanged, JobQueued, PreemptAsked, ScaleAsked, StopAsked
from rota.spec.ids import InstanceId, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import JobState

SOURCE_BYTES_MAX = 2**20
TRACE_RECORDS_MAX = 100_000
RESUME_WAIT_S = 20.0
"""How long a request to resume (to pause) waits for a job that is being paused (inspected); clients wait for 30 s."""
EXEC_TIMEOUT_MAX_S = 600.0
EXEC_AUDITED_MAX = 1000
"""Characters of a command that the audit keeps."""

router = APIRouter(prefix="/api/v1", tags=["jobs"])


class SubmitBody(BaseModel):
    """A job file as text with its name, ``--set`` values and the folder that relative paths start from; or a spec.

    A job that names an image is refused without ``ignore_image``: nothing is started in a container.
    """

    model_config = ConfigDict(extra="forbid")

    source: Annotated[str, Field(max_length=SOURCE_BYTES_MAX)] = ""
    filename: Annotated[str, Field(max_length=4096), STORABLE] = "job.yaml"
    sets: list[str] = []
    workdir: Annotated[str, Field(max_length=4096), STORABLE] = ""
    spec: Annotated[dict[str, Any] | None, STORABLE] = None
    ignore_image: bool = False

    def submission(self) -> Submission:
        """The same as a value. Raises BadInput when there is neither text nor spec."""
        if not self.source and self.spec is None:
            raise BadInput("there is neither 'source' nor 'spec'", hint="send the text of a job file as 'source'")
        return Submission(**{**vars(self), "sets": tuple(self.sets)})


class StopBody(BaseModel):
    """How to stop: ``grace_s`` bounds the polite part, ``reason`` is told to people."""

    model_config = ConfigDict(extra="forbid")

    grace_s: Annotated[float, Field(ge=0, le=86400)] = 30.0
    reason: Annotated[str, Field(max_length=500)] = ""


class ScaleBody(BaseModel):
    """How many instances of which role."""

    model_config = ConfigDict(extra="forbid")

    role: Annotated[str, Field(max_length=200)]
    n: Annotated[int, Field(ge=1, le=10_000)]


class ExecBody(BaseModel):
    """What to run word by word beside which instance, ``role`` or ``role/rank``, and how long at most."""

    model_config = ConfigDict(extra="forbid")

    instance: Annotated[str, Field(min_length=1, max_length=200)]
    argv: Annotated[list[Annotated[str, Field(max_length=100_000)]], Field(min_length=1, max_length=1000)]
    timeout_s: Annotated[float, Field(gt=0, le=EXEC_TIMEOUT_MAX_S)] = 60.0


class ChangeBody(BaseModel):
    """Fields that may change after submit, as dotted paths."""

    model_config = ConfigDict(extra="forbid")

    changes: Annotated[dict[str, Any], STORABLE]


@router.post("/jobs", status_code=201)
async def submit(
    body: SubmitBody,
    app: Parts,
    caller: Asker,
    response: Response,
    idempotency_key: Annotated[str, Header(max_length=200)] = "",
) -> Sent[JobDocument]:
    """Submit a job; durable when this answers. The same ``Idempotency-Key`` with the same body gives the same job."""
    history, new = await app.intake.submit(body.submission(), caller=caller, key=idempotency_key)
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"/api/v1/jobs/{history.id}"
    return show_document(app, caller, history)


@router.post("/jobs:plan")
async def plan(body: SubmitBody, request: Request, app: Parts, caller: Asker) -> Sent[PlanReport]:
    """Dry run: roles, gangs, placement on the cluster as it is, what losing each role would do. Keeps nothing."""
    app.audit.add(request.state.request_id, dry_run=True)
    document = await app.intake.plan(body.submission(), caller=caller)
    return app.redacted(caller, cast("PlanReport", {"api": API, **document}))


@router.get("/jobs")
async def list_jobs(
    app: Parts,
    caller: Asker,
    all: bool = False,
    state: Annotated[list[str] | None, Query()] = None,
    queue: str = "",
    user: str = "",
    name: str = "",
    text: Annotated[str, Query(max_length=200)] = "",
    label: Annotated[list[str] | None, Query()] = None,
    since_s: Annotated[float | None, Query(ge=0)] = None,
    sort: JobSort = "submitted",
    limit: Annotated[int, Query(ge=1, le=200)] = 200,
    cursor: str = "",
) -> Sent[JobList]:
    """Jobs, newest first unless ``sort`` says else; those that ended only with ``all`` or ``state``.

    ``since_s``: ended at most so long ago. ``text``: a part of the id or the user.
    """
    now = app.clock.wall_s()
    wanted = JobFilter(
        all=all,
        states=tuple(one.upper() for one in state or ()),
        queue=queue,
        user=user,
        name=name,
        text=text.lower(),
        labels=tuple(_label(one) for one in label or ()),
        since=0.0 if since_s is None else now - since_s,
    )
    jobs = (one for one in app.loop.installation.jobs.values() if caller.sees(one))
    return app.redacted(caller, job_list(jobs, wanted, _wait_of(app), now=now, sort=sort, limit=limit, cursor=cursor))


@router.get("/jobs/{job}")
async def show(job: str, app: Parts, caller: Asker, response: Response) -> Sent[JobDocument]:
    """One job with every instance: state, node, pid, restarts, epoch, progress, last error.

    ``ETag`` is the version of what can be edited; ``PATCH`` with it as ``If-Match`` refuses to undo another's edit.
    """
    history = app.seen(caller, job)
    response.headers["ETag"] = f'"{history.version}"'
    beats = await app.engine.beats(history.id) if history.state.holds_devices and history.master is not None else {}
    return show_document(app, caller, history, beats)


@router.patch("/jobs/{job}")
async def change(
    job: str, body: ChangeBody, app: Parts, caller: Asker, if_match: Annotated[str, Header(max_length=100)] = ""
) -> Sent[JobDocument]:
    """Change priority, queue, time limit or labels of a job that has not ended."""
    history = app.steered(caller, job)
    _check_version(history, if_match)
    changes = checked_changes(body.changes, history.spec, app.loop.scheduler)
    caller.need(Role.USER, str(changes.get("queue", history.queue)))
    await append_live(app, history, JobChanged(changes=changes, by=caller.user))
    return show_document(app, caller, history)


@router.post("/jobs/{job}:stop", status_code=202)
async def stop(job: str, app: Parts, caller: Asker, body: StopBody | None = None) -> Sent[JobDocument]:
    """Ask a job to end. Asking again is harmless; a job that ended is a conflict."""
    history = app.steered(caller, job)
    asked = body or StopBody()
    if history.ended is not None:
        raise Conflict(f"{history.id} has ended: {history.state.value}", state=history.state.value)
    if history.stop is None or asked.grace_s < history.stop.grace_s:
        event = StopAsked(reason=Reason.STOPPED_BY_USER, by=caller.user, grace_s=asked.grace_s)
        await append_live(app, history, event)
    return show_document(app, caller, history)


@router.post("/jobs/{job}:pause", status_code=202)
async def pause(job: str, app: Parts, caller: Asker, body: StopBody | None = None) -> Sent[JobDocument]:
    """Give the devices back and keep the job: it stops within ``grace_s`` and waits, PAUSED, until it is resumed.

    What it committed stays. Asking again is harmless. One whose workloads are being inspected is waited for; after 20 s
    that is a conflict.
    """
    history = app.steered(caller, job)
    await _wait_while(app, history, JobState.SUBMITTED)
    if history.state in (JobState.SUBMITTED, JobState.STOPPING):
        raise Conflict(f"{history.id} is {history.state.value}: it cannot be paused now", state=history.state.value)
    pausing = history.preempt is not None and history.preempt.reason is Reason.PAUSED
    if history.state is not JobState.PAUSED and not pausing:
        asked = body or StopBody(grace_s=history.spec.grace_s)
        await append_live(app, history, PreemptAsked(reason=Reason.PAUSED, grace_s=asked.grace_s))
    return show_document(app, caller, history)


@router.post("/jobs/{job}:resume", status_code=202)
async def resume(job: str, app: Parts, caller: Asker) -> Sent[JobDocument]:
    """Put a paused job into the queue again, with its old queue time; it goes on from its last commit.

    One that still gives its devices back is waited for; after 20 s that is a conflict.
    """
    history = app.steered(caller, job)
    await _wait_while(app, history, JobState.PREEMPTING)
    if history.ended is not None or history.state is JobState.PREEMPTING:
        hint = "" if history.ended else "ask again when it is PAUSED"
        raise Conflict(f"{history.id} is {history.state.value}", hint=hint, state=history.state.value)
    if history.state is JobState.PAUSED:
        await append_live(app, history, JobQueued())
    return show_document(app, caller, history)


@router.post("/jobs/{job}:scale", status_code=202)
async def scale(job: str, body: ScaleBody, app: Parts, caller: Asker) -> Sent[JobDocument]:
    """Another number of instances of a role, now and in later attempts. More of them start as devices become free."""
    history = app.steered(caller, job)
    if history.ended is not None:
        raise Conflict(f"{history.id} has ended: {history.state.value}", state=history.state.value)
    role = checked_size(history.spec, body.role, body.n)
    await append_live(app, history, ScaleAsked(role=role.name, n=body.n, by=caller.user))
    return show_document(app, caller, history)


@router.post("/jobs/{job}:exec")
async def execute(job: str, body: ExecBody, request: Request, app: Parts, caller: Asker) -> Sent[ExecDocument]:
    """Run a command in the environment of a running instance, without input, to its end; the audit has the command."""
    history = app.steered(caller, job)
    if history.spec.secrets and history.submitted.user != caller.user and not caller.has(Role.ADMIN):
        text = f"{history.id} has secrets of {history.submitted.user}, which a command could read"
        raise NotAllowed(text, hint=f"ask {history.submitted.user}, or an admin")
    role, rank = member_of(history, body.instance)
    found = InstanceId(RoleName(role), rank or 0)
    command = shlex.join(body.argv)[:EXEC_AUDITED_MAX]
    app.audit.add(request.state.request_id, instance=str(found), command=command)
    with app.exec_slot(caller.user):
        done = await app.engine.execute(history.id, found.role, found.rank, body.argv, timeout_s=body.timeout_s)
    if done is None:
        raise Conflict(f"{found} of {history.id} does not run", hint=f"see: rota show {history.id}")
    return cast("ExecDocument", {"api": API, "kind": "Exec", "job": history.id, "instance": str(found), **done})


@router.get("/jobs/{job}/explain")
async def explain(job: str, app: Parts, caller: Asker) -> Sent[Explanation]:
    """Why the job is where it is, and what would let it start now."""
    history = app.seen(caller, job)
    found, estimate = None, None
    if history.state is JobState.QUEUED:
        found = app.loop.scheduler.explain(history.id, app.clock.wall_s())
        if found is not None:
            estimate = estimate_document(*await app.forecasts.of(history.id))
    code = Reason.SERVICE_DOWN if app.loop.held else Reason.ENGINE_STARTING
    undecided = Why(code=code, text=app.loop.undecided, fields={}) if app.loop.undecided else None
    known = app.loop.installation
    return app.redacted(caller, explanation(history, known, found, estimate=estimate, undecided=undecided))


@router.get("/jobs/{job}/failures")
async def failures(job: str, app: Parts, caller: Asker, attempt: int | None = None) -> Sent[FailureList]:
    """The failure timeline: cause, level, moves, seconds, what was lost."""
    history = app.read(caller, job)
    check_attempt(history, attempt)
    return failure_list(history, attempt=attempt, replaced=app.loop.installation.replaced)


@router.get("/jobs/{job}/graph")
async def graph(job: str, app: Parts, caller: Asker) -> Sent[GraphDocument]:
    """Roles, edges and sub-graphs with the state of every instance, and beside them what really flowed."""
    history = app.read(caller, job)
    beats = await app.engine.beats(history.id) if history.state.holds_devices and history.master is not None else {}
    return graph_document(history.spec, history, beats)


@router.get("/jobs/{job}/placement")
async def placement(job: str, app: Parts, caller: Asker) -> Sent[PlacementDocument]:
    """Which devices of which nodes each instance has, in the present or last attempt."""
    history = app.seen(caller, job)
    rows: list[PlacementRow] = []
    for one in history.instances.values():
        bundle = history.bundle_of(one.id.role, one.id.rank)
        if bundle is not None:
            rows.append(cast("PlacementRow", {"instance": str(one.id), **codec.to_json_value(bundle)}))
    found: PlacementDocument = {
        "api": API,
        "kind": "Placement",
        "job": history.id,
        "attempt": len(history.attempts),
        "why": history.attempts[-1].why if history.attempts else None,
        "items": rows,
        "next": None,
    }
    return app.redacted(caller, found)


@router.get("/jobs/{job}/spec")
async def spec(job: str, app: Parts, caller: Asker) -> Sent[JobSpecDocument]:
    """The job as it was given and as it was understood."""
    history = app.read(caller, job)
    return {
        "api": API,
        "kind": "JobSpec",
        "job": history.id,
        "source": history.submitted.source,
        "filename": history.submitted.filename,
        "digest": history.spec.digest,
        "spec": history.spec.to_json(),
        "edits": edits(history),
    }


@router.get("/jobs/{job}/attempts")
async def attempts(job: str, app: Parts, caller: Asker) -> Sent[AttemptList]:
    """Every attempt with its reason."""
    history = app.seen(caller, job)
    items = show_document(app, caller, history)["attempts"]
    return {"api": API, "kind": "AttemptList", "job": history.id, "items": items, "next": None}


@router.get("/jobs/{job}/why")
async def why(job: str, app: Parts, caller: Asker) -> Sent[WaitGraphDocument]:
    """Who waits for whom in a running job: the culprit with its stack, every wait, and the recovery that is open."""
    history = app.read(caller, job)
    live = await app.engine.why(history.id) if history.state.holds_devices and history.master is not None else {}
    return why_document(history, live)


@router.get("/jobs/{job}/trace")
async def trace(job: str, app: Parts, caller: Asker) -> Sent[TraceDocument]:
    """One trace for Perfetto: a lane per instance, calls as flows, commits, recoveries, and what bounds each step."""
    history = app.read(caller, job)
    folder = app.home.job(history.id).spans

    def made() -> TraceDocument:
        records = app.loop.log.read(job=history.id, limit=TRACE_RECORDS_MAX)
        return trace_document(history, records, read_spans(folder))

    return await asyncio.to_thread(made)


def show_document(
    app: AppState, caller: Caller, history: JobHistory, beats: dict[str, dict[str, Any]] | None = None
) -> JobDocument:
    """The Job document with its page address; without commands and tracebacks for who may only see it."""
    output = history.spec.output or str(app.home.job(history.id).output)
    url = f"{app.settings.url}/jobs/{history.id}"
    document = job_document(history, app.clock.wall_s(), _wait_of(app), beats, output=output, url=url)
    if not caller.reads(history):
        document = outlined(document)
    return app.redacted(caller, document)


def _wait_of(app: AppState) -> WaitOf:
    return lambda job: app.loop.scheduler.wait_of(job, app.clock.wall_s())


async def _wait_while(app: AppState, history: JobHistory, state: JobState) -> None:
    """Wait until the job has left a state that it leaves by itself; for ``RESUME_WAIT_S`` at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RESUME_WAIT_S):
            while history.state is state and not app.loop.stopping:
                await app.loop.wait_for(app.loop.installation.number + 1)


def _check_version(history: JobHistory, if_match: str) -> None:
    """Raises VersionMismatch when the job was edited since the version that a caller names."""
    wanted = [one.strip().removeprefix("W/").strip('"') for one in if_match.split(",") if one.strip()]
    if wanted and "*" not in wanted and str(history.version) not in wanted:
        raise VersionMismatch(
            f"{history.id} was edited: it has version {history.version}, not {' or '.join(wanted)}",
            hint="look at it again, then repeat the change",
            version=history.version,
        )


def _label(text: str) -> tuple[str, str]:
    key, sep, value = text.partition("=")
    if not sep:
        raise BadInput(f"label {text!r} is not KEY=VALUE")
    return key, value
