"""Routes of jobs: submit, plan, list, show, explain, change, stop, and every document of one."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from functools import cache, partial
from typing import Annotated, Any, cast

from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from rota.job.rpc.tracing import read_spans, spans_of
from rota.service.accounts import Caller, UserRole, is_below
from rota.service.api import JobSort
from rota.service.control.changes import checked_changes, checked_size
from rota.service.control.job_files import texts_elsewhere
from rota.service.control.submission import Submission
from rota.service.models.base import REFUSAL, Sent, Why, document
from rota.service.models.cluster import PlanReport
from rota.service.models.jobs import (
    AttemptList,
    EditRow,
    ExecDocument,
    GraphDocument,
    JobDocument,
    JobList,
    JobSpecDocument,
    PlacementDocument,
    PlacementRow,
    TraceDocument,
)
from rota.service.models.reasons import Explanation, FailureList, WaitGraphDocument, WhatIf
from rota.service.rest.deps import (
    STORABLE,
    AppState,
    Asker,
    EnteredJob,
    IfMatch,
    JobAccess,
    Note,
    Parts,
    ReadJob,
    SeenJob,
    SteeredJob,
    check_attempt,
    check_live,
    is_version,
    member_of,
    versions_of,
)
from rota.service.views.cluster import no_usable_node
from rota.service.views.graph import graph_document, trace_document
from rota.service.views.job_history import JobHistory
from rota.service.views.jobs import JobFilter, job_list
from rota.service.views.reasons import estimate_document, explanation, failure_list, start_forecast, why_document
from rota.spec.codec import API, JsonObject
from rota.spec.errors import BadInput, Conflict, UnknownName, VersionMismatch, unknown
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

router = APIRouter(prefix="/api/v1", tags=["jobs"], responses=REFUSAL)


class SubmitBody(BaseModel):
    """A job file as text with its name, ``--set`` values and the folder that relative paths start from; or a spec.

    With ``ignore_image`` a job that names an image runs in the environment of the service.
    """

    model_config = ConfigDict(extra="forbid")

    source: Annotated[str, Field(max_length=SOURCE_BYTES_MAX)] = ""
    filename: Annotated[str, Field(max_length=4096), STORABLE] = "job.yaml"
    sets: list[str] = []
    workdir: Annotated[str, Field(max_length=4096), STORABLE] = ""
    spec: Annotated[JsonObject | None, STORABLE] = None
    ignore_image: bool = False

    def submission(self) -> Submission:
        """The same as a value. Raises BadInput when there is neither text nor spec."""
        if not self.source and self.spec is None:
            raise BadInput("provide 'source' or 'spec'", hint="send the text of a job file as 'source'")
        given: dict[str, Any] = {**vars(self), "sets": tuple(self.sets)}
        return Submission(**given)


class StopBody(BaseModel):
    """How to stop: ``grace_s`` bounds the polite part, ``reason`` is shown to people."""

    model_config = ConfigDict(extra="forbid")

    grace_s: Annotated[float, Field(ge=0, le=86400)] = 30.0
    reason: Annotated[str, Field(max_length=500)] = ""


class ResumeBody(BaseModel):
    """Which commit to continue from: one of ``progress.commits``, 0 for the start; without it the last one."""

    model_config = ConfigDict(extra="forbid")

    from_commit: Annotated[int | None, Field(ge=0, le=2**53)] = None


class ScaleBody(BaseModel):
    """How many instances of which role."""

    model_config = ConfigDict(extra="forbid")

    role: Annotated[str, Field(max_length=200)]
    n: Annotated[int, Field(ge=1, le=10_000)]


Argv = Annotated[list[Annotated[str, Field(max_length=100_000)]], Field(max_length=1000)]


class ExecBody(BaseModel):
    """What to run word by word, beside which instance, ``role`` or ``role/rank`` (else the first), how long at most."""

    model_config = ConfigDict(extra="forbid")

    instance: Annotated[str, Field(max_length=200)] = ""
    argv: Annotated[Argv, Field(min_length=1)]
    timeout_s: Annotated[float, Field(gt=0, le=EXEC_TIMEOUT_MAX_S)] = 60.0


class ChangeBody(BaseModel):
    """Fields that may change after submit, as dotted paths."""

    model_config = ConfigDict(extra="forbid")

    changes: Annotated[JsonObject, STORABLE]


class WhatIfBody(BaseModel):
    """``path=value`` over the job file, as with ``--set``; for a job of one role also ``gpus=2`` or ``replicas=2``."""

    model_config = ConfigDict(extra="forbid")

    changes: Annotated[list[Annotated[str, Field(max_length=4096), STORABLE]], Field(min_length=1, max_length=100)]


@router.post("/jobs", status_code=201)
async def submit(
    body: SubmitBody,
    app: Parts,
    caller: Asker,
    response: Response,
    idempotency_key: Annotated[str, Header(max_length=200)] = "",
) -> Sent[JobDocument]:
    """Submit a job; durable when this answers. The same ``Idempotency-Key`` with the same body gives the same job."""
    job, new = await app.intake.submit(body.submission(), caller=caller, key=idempotency_key)
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"/api/v1/jobs/{job.id}"
    return JobAccess(app=app, caller=caller, job=job).document()


@router.post("/jobs:plan")
async def plan(body: SubmitBody, app: Parts, caller: Asker, note: Note) -> Sent[PlanReport]:
    """Dry run: roles, gangs, placement on the cluster as it is, what losing each role would do. Keeps nothing."""
    note(dry_run=True)
    found = await app.intake.plan(body.submission(), caller=caller)
    return app.redacted(caller, cast("PlanReport", {"api": API, **found}))


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
    """Jobs, newest first unless ``sort`` says else; those that ended only with ``all`` or ``state`` (one, or ``A,B``).

    ``since_s``: the longest time since the end, in seconds. ``text``: a part of the id or the user.
    """
    now = app.clock.wall_s()
    wanted = JobFilter(
        all=all,
        states=tuple(one.strip().upper() for given in state or () for one in given.split(",")),
        queue=queue,
        user=user,
        name=name,
        text=text.lower(),
        labels=tuple(_label(one) for one in label or ()),
        since=0.0 if since_s is None else now - since_s,
    )
    _check_queue(app, caller, queue)
    known, visible = app.loop.installation, cache(partial(caller.has, UserRole.VIEWER))
    jobs = (one for one in (known.jobs if wanted.ended else known.live).values() if visible(one.queue))

    def suspected(one: JobHistory) -> str:
        return app.suspected(one.id) if caller.reads(one) else ""

    wait_of = app.loop.scheduler.waits_now(now)
    page = job_list(jobs, wanted, wait_of, now=now, sort=sort, limit=limit, cursor=cursor, suspected=suspected)
    return app.redacted(caller, page)


def _check_queue(app: AppState, caller: Caller, queue: str) -> None:
    """Raises UnknownName for a queue that there is not and, as far as the caller may see, never was."""
    paths = [one.path for one in app.loop.installation.queues if caller.role_on(one.path) is not None]
    if not queue or any(is_below(one, queue) for one in paths):
        return
    if not any(is_below(one.queue, queue) for one in app.loop.installation.jobs.values() if caller.sees(one)):
        raise unknown(f"no queue {queue!r}", queue, paths, "queues")


@router.get("/jobs/{job}")
async def show(on: SeenJob, response: Response) -> Sent[JobDocument]:
    """One job with every instance: state, node, pid, restarts, epoch, progress, last error.

    ``ETag`` is the version of what can be edited; ``PATCH`` with it as ``If-Match`` refuses to undo another's edit.
    """
    response.headers["ETag"] = f'"{on.job.version}"'
    return on.document(await on.beats())


@router.patch("/jobs/{job}")
async def change(on: SteeredJob, body: ChangeBody, if_match: IfMatch = "") -> Sent[JobDocument]:
    """Change priority, queue, time limit or labels of a job that has not ended."""
    _check_version(on.job, if_match)
    changes = checked_changes(body.changes, on.job.spec, on.app.loop.scheduler)
    on.caller.need(UserRole.USER, str(changes.get("queue", on.job.queue)))
    await on.append(JobChanged(changes=changes, by=on.caller.user))
    return on.document()


@router.post("/jobs/{job}:stop", status_code=202)
async def stop(on: SteeredJob, body: StopBody | None = None) -> Sent[JobDocument]:
    """Ask a job to end. Asking again is harmless; a job that ended is a conflict."""
    check_live(on.job)
    grace_s = (body or StopBody()).grace_s
    if on.job.stop is None or grace_s < on.job.stop.grace_s:
        await on.append(StopAsked(reason=Reason.STOPPED_BY_USER, by=on.caller.user, grace_s=grace_s))
    return on.document()


@router.post("/jobs/{job}:pause", status_code=202)
async def pause(on: SteeredJob, body: StopBody | None = None) -> Sent[JobDocument]:
    """Give the devices back and keep the job: it stops within ``grace_s`` and waits, PAUSED, until it is resumed.

    What it committed stays. Asking again is harmless. One whose workloads are being inspected is waited for; after 20 s
    that is a conflict.
    """
    await _wait_while(on, JobState.SUBMITTED)
    job = on.job
    if job.state in (JobState.SUBMITTED, JobState.STOPPING):
        raise Conflict(f"{job.id} is {job.state.value}: it cannot be paused now", state=job.state.value)
    pausing = job.preempt is not None and job.preempt.reason is Reason.PAUSED
    if job.state is not JobState.PAUSED and not pausing:
        grace_s = (body or StopBody(grace_s=job.spec.grace_s)).grace_s
        await on.append(PreemptAsked(reason=Reason.PAUSED, grace_s=grace_s))
    return on.document()


@router.post("/jobs/{job}:resume", status_code=202)
async def resume(
    on: SteeredJob,
    response: Response,
    body: ResumeBody | None = None,
    idempotency_key: Annotated[str, Header(max_length=200)] = "",
) -> Sent[JobDocument]:
    """Put a paused job into the queue again, with its old queue time; it continues from its last commit.

    With ``from_commit`` it continues from that one; later ones are given up. A job that ended stays as it is: then a
    new one begins with that commit, and is the answer (201). One that still gives its devices back is waited for; after
    20 s that is a conflict.
    """
    await _wait_while(on, JobState.PREEMPTING)
    job, chosen = on.job, None if body is None else body.from_commit
    if chosen is not None:
        _check_commit(job, chosen)
    if job.ended is not None and chosen is not None:
        new, fresh = await on.app.intake.continued(job, chosen, caller=on.caller, key=idempotency_key)
        response.status_code = 201 if fresh else 200
        response.headers["Location"] = f"/api/v1/jobs/{new.id}"
        return JobAccess(app=on.app, caller=on.caller, job=new).document()
    if job.ended is not None or job.state is JobState.PREEMPTING:
        hint = _how_to_begin_anew(on) if job.ended else "ask again when it is PAUSED"
        raise Conflict(f"{job.id} is {job.state.value}", hint=hint, state=job.state.value)
    if job.state is JobState.PAUSED:
        await on.append(JobQueued(from_commit=chosen))
    elif chosen is not None and job.ctx.resume_from != chosen:
        hint = f"rota pause {job.id}, then resume it from a commit"
        raise Conflict(f"{job.id} is {job.state.value}, not PAUSED", hint=hint, state=job.state.value)
    return on.document()


@router.post("/jobs/{job}:scale", status_code=202)
async def scale(on: SteeredJob, body: ScaleBody) -> Sent[JobDocument]:
    """Another number of instances of a role, now and in later attempts. More of them start as devices become free."""
    check_live(on.job)
    role = checked_size(on.job.spec, body.role, body.n)
    await on.append(ScaleAsked(role=role.name, n=body.n, by=on.caller.user))
    return on.document()


@router.post("/jobs/{job}:exec")
async def execute(on: EnteredJob, body: ExecBody, note: Note) -> Sent[ExecDocument]:
    """Run a command in the environment of a running instance, without input, to its end; the audit has the command."""
    job = on.job
    role, rank = member_of(job, body.instance or job.spec.roles[0].name)
    found = InstanceId(RoleName(role), rank or 0)
    note(instance=str(found), command=shlex.join(body.argv)[:EXEC_AUDITED_MAX])
    with on.app.exec_slot(on.caller.user):
        done = await on.app.engine.execute(job.id, found.role, found.rank, body.argv, timeout_s=body.timeout_s)
    if done is None:
        raise Conflict(f"{found} of {job.id} does not run", hint=f"see: rota show {job.id}")
    return document(ExecDocument, done, job=job.id, instance=str(found))


@router.get("/jobs/{job}/explain")
async def explain(on: SeenJob) -> Sent[Explanation]:
    """Why the job is where it is, and what would let it start now."""
    app, job = on.app, on.job
    found, estimate = None, None
    if job.state is JobState.QUEUED:
        found = app.loop.scheduler.explain(job.id, app.clock.wall_s())
        if found is not None:
            estimate = estimate_document(*await app.forecasts.of(job.id))
    code = Reason.SERVICE_DOWN if app.loop.held else Reason.ENGINE_STARTING
    undecided = Why(code=code, text=app.loop.undecided, fields={}) if app.loop.undecided else None
    undecided = undecided or no_usable_node(app.loop.installation, app.loop.unusable)
    return on.redacted(explanation(job, app.loop.installation, found, estimate=estimate, undecided=undecided))


@router.post("/jobs/{job}/explain")
async def what_if(on: ReadJob, body: WhatIfBody, note: Note) -> Sent[WhatIf]:
    """When a job that waits would start with these ``changes``, and what would bind it then; nothing is changed.

    The scheduler is played from now on, once as the job is and once with all changes. A job that does not wait is a
    conflict.
    """
    note(dry_run=True)
    app, job = on.app, on.job
    found = app.loop.scheduler.explain(job.id, app.clock.wall_s())
    if job.state is not JobState.QUEUED or found is None:
        hint = "what a new job would do: rota run FILE --dry-run --set PATH=VALUE"
        raise Conflict(f"{job.id} is {job.state.value}, it does not wait", hint=hint, state=job.state.value)
    if app.loop.undecided:
        raise Conflict(f"no job is started now: {app.loop.undecided}", hint="see: rota status")
    changed, estimate = await app.intake.what_if(job, body.changes, caller=on.caller)
    now = start_forecast(found, estimate_document(*await app.forecasts.of(job.id)))
    then = start_forecast(changed, estimate_document(estimate, 0.0))
    return on.redacted(document(WhatIf, job=job.id, changes=body.changes, now=now, then=then))


@router.get("/jobs/{job}/failures")
async def failures(on: ReadJob, attempt: int | None = None) -> Sent[FailureList]:
    """The failure timeline: cause, level, moves, seconds, what was lost."""
    check_attempt(on.job, attempt)
    return failure_list(on.job, attempt=attempt, replaced=on.app.loop.installation.replaced)


@router.get("/jobs/{job}/graph")
async def graph(on: ReadJob) -> Sent[GraphDocument]:
    """Roles, edges and sub-graphs with the state of every instance, and beside them what really flowed."""
    return graph_document(on.job.spec, on.job, await on.beats())


@router.get("/jobs/{job}/placement")
async def placement(on: SeenJob) -> Sent[PlacementDocument]:
    """Which devices of which nodes each instance has, in the present or last attempt."""
    job = on.job
    items = [
        document(PlacementRow, bundle, instance=str(one.id))
        for one in job.instances.values()
        if (bundle := job.bundle_of(one.id)) is not None
    ]
    why = job.attempts[-1].why if job.attempts else None
    return on.redacted(document(PlacementDocument, job=job.id, attempt=len(job.attempts), why=why, items=items))


@router.get("/jobs/{job}/spec")
async def spec(on: ReadJob) -> Sent[JobSpecDocument]:
    """The job as it was given and as it was understood."""
    job = on.job
    edits = [document(EditRow, one, before=one.before.to_json(), after=one.after.to_json()) for one in job.edits]
    given = {"job": job.id, "digest": job.spec.digest, "spec": job.spec.to_json(), "edits": edits}
    return document(JobSpecDocument, given, job.submitted)


@router.get("/jobs/{job}/attempts")
async def attempts(on: SeenJob) -> Sent[AttemptList]:
    """Every attempt with its reason."""
    return document(AttemptList, job=on.job.id, items=on.document()["attempts"])


@router.get("/jobs/{job}/why")
async def why(on: ReadJob) -> Sent[WaitGraphDocument]:
    """Who waits for whom in a running job: the culprit with its stack, every wait, and the recovery that is open."""
    return why_document(on.job, await on.app.engine.why(on.job.id) if on.has_master else {})


@router.get("/jobs/{job}/trace")
async def trace(on: ReadJob) -> Sent[TraceDocument]:
    """One trace for Perfetto: a lane per instance, calls as flows, commits, recoveries, and what bounds each step."""
    app, job = on.app, on.job
    elsewhere = await texts_elsewhere(job, app.loop.installation, app.engine, "spans")

    def made() -> TraceDocument:
        records = app.loop.log.read(job=job.id, limit=TRACE_RECORDS_MAX)
        here = read_spans(app.home.job(job.id).spans)
        for instance, spans in spans_of(elsewhere).items():
            here[instance] = [*here.get(instance, ()), *spans]
        return trace_document(job, records, here)

    return await asyncio.to_thread(made)


async def _wait_while(on: JobAccess, state: JobState) -> None:
    """Wait until the job has left a state that it leaves by itself; for ``RESUME_WAIT_S`` at most."""
    loop = on.app.loop
    with contextlib.suppress(TimeoutError):
        async with loop.clock.timeout(RESUME_WAIT_S):
            while on.job.state is state and not loop.stopping:
                await loop.wait_for(loop.installation.number + 1)


def _check_version(job: JobHistory, if_match: str) -> None:
    """Raises VersionMismatch when the job was edited since the version that a caller names."""
    if not is_version(job.version, if_match):
        raise VersionMismatch(
            f"{job.id} was edited: it has version {job.version}, not {' or '.join(versions_of(if_match))}",
            hint="look at it again, then repeat the change",
            version=job.version,
        )


def _check_commit(job: JobHistory, n: int) -> None:
    """Raises UnknownName, with the commits that there are, for one that the job cannot continue from."""
    if n not in job.commits:
        every = ", ".join(map(str, job.commits))
        raise UnknownName(f"{job.id} has no saved commit {n}", hint=f"there are: {every} (0 is the start)")


def _how_to_begin_anew(on: JobAccess) -> str:
    """What to do in place of resuming a job that ended."""
    job, folder = on.job, on.checkpoints()
    if saved := [n for n in job.commits if n]:
        return f"rota resume {job.id} --from {saved[-1]} begins a new job with that commit"
    if folder:
        given = (
            ""
            if job.spec.checkpoint and job.spec.checkpoint.dir
            else f" --set {shlex.quote(f'checkpoint.dir={folder}')}"
        )
        return f"a script that saves and loads its own checkpoints continues by: rota clone {job.id}{given}"
    stopped = job.ended is not None and job.ended.reason is Reason.STOPPED_BY_USER
    advice = "; rota pause in place of stop keeps them" if stopped else ""
    return f"none of its commits is kept: rota clone {job.id} begins anew{advice}"


def _label(text: str) -> tuple[str, str]:
    key, sep, value = text.partition("=")
    if not sep:
        raise BadInput(f"label {text!r} is not KEY=VALUE")
    return key, value
