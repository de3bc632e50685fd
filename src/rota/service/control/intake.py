"""Take a job in: read it, refuse what can never run, give it an id, make it durable; or plan it and keep nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rota.cluster.sim.forecast import Forecast
from rota.job.core.graph import blast_radius, expand
from rota.job.core.placement import requests_of
from rota.runtime.clock import Clock
from rota.runtime.environ import Home
from rota.runtime.random import Chance, ulid
from rota.runtime.secrets import Vault
from rota.service.accounts import Caller, Role
from rota.service.control.loop import ServiceLoop
from rota.service.control.submission import Submission, check_image, with_interfaces, workdir_of
from rota.service.jobfile.reader import problems_of, read_job
from rota.service.views.job_history import JobHistory
from rota.spec import codec
from rota.spec.check import fixed_size, unenforced
from rota.spec.codec import JsonObject
from rota.spec.errors import (
    BadInput,
    IdempotencyConflict,
    Infeasible,
    JobFileError,
    LimitExceeded,
    UnknownName,
    nearest,
)
from rota.spec.events import JobAdmitted, JobEnded, JobQueued, JobSubmitted, JobWaits, Record
from rota.spec.gang import Placement
from rota.spec.ids import JobId
from rota.spec.job import JobSpec
from rota.spec.reasons import INFO, Reason
from rota.spec.states import JobState

if TYPE_CHECKING:
    from rota.service.models.cluster import PlannedRole

PARSE_TIMEOUT_S = 2.0
SEARCH_WAIT_S = 20.0
"""How long a job waits for the search of plans of another."""
QUEUED_MAX = 10_000
DRY_RUNS_MAX = 2
"""Children that import workloads for dry runs at once; the next one waits."""
_DRY_RUN = JobId("(dry run)")


class Intake:
    """The way into the log for new jobs."""

    def __init__(self, loop: ServiceLoop, *, home: Home, clock: Clock, chance: Chance) -> None:
        self._loop, self._home, self._clock, self._chance = loop, home, clock, chance
        self._one_at_a_time = asyncio.Lock()
        self._dry_runs = asyncio.Semaphore(DRY_RUNS_MAX)
        self._searches = asyncio.Lock()

    async def submit(self, given: Submission, *, caller: Caller, key: str = "") -> tuple[JobHistory, bool]:
        """The job, and whether it is new. Durable when it returns.

        Raises JobFileError, Infeasible, UnknownName (queue, secret), NotAllowed, LimitExceeded, or IdempotencyConflict
        (same key, other body).
        """
        spec, user = await self._checked(given, caller), caller.user
        async with self._one_at_a_time:
            if key and (known := self._find_key(user, key, given.digest)) is not None:
                return known, False
            if len(self._loop.installation.live) >= QUEUED_MAX:
                raise LimitExceeded(f"{QUEUED_MAX} jobs have not ended yet", hint="stop some, or wait")
            job = self._loop.installation.next_id(spec.name)
            event = JobSubmitted(
                spec=spec,
                user=user,
                source=given.source,
                filename=given.filename,
                workdir=workdir_of(spec, given),
                idempotency_key=f"{key}#{given.digest}" if key else "",
                uid=ulid(self._clock.wall_s(), self._chance),
            )
            self._home.job(job).make()
            await self._loop.append([event], job=job, expected_seq=0)
        return self._loop.installation.jobs[job], True

    async def plan(self, given: Submission, *, caller: Caller | None) -> JsonObject:
        """What would happen: roles, gangs, placement on the cluster as it is, blast radius of each role.

        Raises what ``submit`` raises, and JobFileError also for all workloads that cannot be imported.
        """
        spec = await self._checked(given, caller)
        async with self._dry_runs:
            completed = await with_interfaces(spec, given)
        now, user = self._clock.wall_s(), caller.user if caller is not None else "local"
        explanation = self._loop.scheduler.explain_spec(completed, now, user).to_json()
        placement, waits, forecast = self._trial(completed, now, user)
        if forecast is not None:
            estimates = await asyncio.to_thread(forecast.play, self._clock)
            explanation |= {"estimate": estimates.of(_DRY_RUN).to_json()}
        if waits is not None:
            why = {"code": waits.reason, "text": waits.text or INFO[waits.reason].text, "fields": waits.fields}
            explanation |= {"why": why, "starts_now": False}
        return {
            "kind": "PlanReport",
            "name": completed.name,
            "digest": completed.digest,
            "feasible": True,
            "starts_now": placement is not None,
            "why": None if placement is not None else explanation["why"],
            "explanation": explanation,
            "notes": list(unenforced(completed)),
            "roles": _roles(completed),
            "gangs": [codec.to_json_value(request) for request in requests_of(completed)],
            "subgraphs": [[str(member) for member in part.members] for part in expand(completed).subgraphs],
            "placement": None if placement is None else codec.to_json_value(placement),
            "spec": completed.to_json(),
        }

    def _find_key(self, user: str, key: str, digest: str) -> JobHistory | None:
        installation = self._loop.installation
        if (job := installation.keys.get((user, f"{key}#{digest}"))) is not None:
            return installation.jobs[job]
        if any(known.rpartition("#")[0] == key for whose, known in installation.keys if whose == user):
            raise IdempotencyConflict(f"key {key!r} came before with another job", hint="use a new key")
        return None

    async def _read(self, given: Submission) -> JobSpec:
        if given.spec is not None:
            return _from_json(given.spec)
        reading = asyncio.to_thread(read_job, given.source, filename=given.filename, sets=given.sets)
        try:
            return await asyncio.wait_for(reading, PARSE_TIMEOUT_S)
        except TimeoutError:
            raise BadInput(f"{given.filename} took more than {PARSE_TIMEOUT_S:.0f} s to read") from None

    async def _checked(self, given: Submission, caller: Caller | None) -> JobSpec:
        """The job as it would run. Nothing is searched and no file opened for who may not submit it."""
        spec = await self._read(given)
        self._check_right(spec, caller)
        check_image(spec, given)
        spec = await self._planned(spec, given)
        self._check_feasible(spec)
        return spec

    async def _planned(self, spec: JobSpec, given: Submission) -> JobSpec:
        """The job with its parallel plans; they are searched one job at a time, beside the loop."""
        if all(role.plan is None and not role.plans for role in spec.roles):
            return spec
        from rota.service.control.job_plans import with_plans  # noqa: PLC0415 - the planner is a fifth of a start of the service

        try:
            async with asyncio.timeout(SEARCH_WAIT_S):
                await self._searches.acquire()
        except TimeoutError:
            raise LimitExceeded("plans of other jobs are being searched", hint="submit it again later") from None
        try:
            devices = [device for node in self._loop.scheduler.state.nodes for device in node.devices]
            return await asyncio.to_thread(with_plans, spec, workdir_of(spec, given), self._clock, devices)
        finally:
            self._searches.release()

    def _check_right(self, spec: JobSpec, caller: Caller | None) -> None:
        if (problem := self._loop.scheduler.find_queue(spec.queue)) is not None:
            raise UnknownName(problem, code=str(Reason.UNKNOWN_QUEUE))
        if caller is not None:  # without a service nothing can be asked
            caller.need(Role.USER, spec.queue)
            Vault(self._home).check(caller.user, spec.secrets)

    def _check_feasible(self, spec: JobSpec) -> None:
        shortfall = self._loop.scheduler.infeasible(spec)
        if shortfall is not None:
            raise Infeasible(
                shortfall.text,
                hint=shortfall.remedy,
                reason=str(shortfall.reason),
                role=shortfall.role,
                resource=shortfall.resource,
                asked=shortfall.asked,
                available=shortfall.available,
                nearest=list(shortfall.nearest),
            )

    def _trial(self, spec: JobSpec, now: float, user: str) -> tuple[Placement | None, JobWaits | None, Forecast | None]:
        """Where the job would go, or why it would wait and, from a copy of the state with it, for how long.

        It is put before the scheduler and taken back before anybody else may look.
        """
        scheduler = self._loop.scheduler
        trial = (JobSubmitted(spec=spec, user=user), JobQueued())
        for event in trial:
            scheduler.apply(Record(number=0, job=_DRY_RUN, seq=0, at=now, event=event))
        try:
            outcome = scheduler.decide(now)
            mine = [event for job, event in outcome.events if job == _DRY_RUN]
            placement = next((event.placement for event in mine if isinstance(event, JobAdmitted)), None)
            forecast = None if placement else Forecast(scheduler.state, scheduler.profile, now, until=_DRY_RUN)
        finally:
            ended = JobEnded(state=JobState.CANCELLED, reason=Reason.STOPPED_BY_USER)
            scheduler.apply(Record(number=0, job=_DRY_RUN, seq=0, at=now, event=ended))
        return placement, next((event for event in mine if isinstance(event, JobWaits)), None), forecast


def _from_json(raw: JsonObject) -> JobSpec:
    try:
        spec = JobSpec.from_json(raw)
    except (TypeError, ValueError, KeyError) as error:
        raise BadInput(
            f"spec: {error}", hint="send the text of a job file as 'source', or JobSpec.to_json()"
        ) from error
    if unread := _unread(raw, spec.to_json(), "spec"):
        path, name, known = unread
        raise BadInput(f"{path}.{name}: unknown field", hint=nearest(name, known, "fields"))
    if problems := problems_of(spec):
        raise JobFileError(problems)
    return spec


def _unread(raw: Any, read: Any, path: str) -> tuple[str, str, list[str]] | None:
    """Where, how and among which names a value has one that reading it passed over."""
    if isinstance(raw, dict) and isinstance(read, dict):
        for name, below in raw.items():
            found = _unread(below, read[name], f"{path}.{name}") if name in read else (path, name, [*read])
            if found is not None:
                return found
    elif isinstance(raw, list) and isinstance(read, list):
        rows = (_unread(one, other, f"{path}[{i}]") for i, (one, other) in enumerate(zip(raw, read)))
        return next((found for found in rows if found is not None), None)
    return None


def _roles(spec: JobSpec) -> list[PlannedRole]:
    graph = expand(spec)
    rows: list[PlannedRole] = []
    for role in spec.roles:
        radius = blast_radius(spec, graph, role.name)
        rows.append(
            {
                "name": role.name,
                "workload": role.workload,
                "run": None if role.run is None else list(role.run),
                "replicas": role.replicas_min,
                "replicas_max": role.replicas_max,
                "fixed_size": fixed_size(role) if role.replicas_max > role.replicas_min else "",
                "resources": codec.to_json_value(role.res),
                "restart": role.restart,
                "stateful": role.name in graph.stateful,
                "loop": role.is_loop,
                "plans": [{"replicas": one.replicas, "why": one.why} for one in role.plans],
                "blast_radius": {
                    "text": radius.text,
                    "restarts": [str(member) for member in radius.restarts],
                    "re_forms": [str(member) for member in radius.re_forms],
                    "pauses": list(radius.pauses),
                },
            }
        )
    return rows
