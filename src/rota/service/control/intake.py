"""Intake of jobs: read, refuse what can never run, give an id, make durable; or plan and keep nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from rota.cluster.core.explain import SchedulerExplanation
from rota.cluster.sim.calibration import Calibration
from rota.cluster.sim.forecast import Estimate, Forecast
from rota.job.core.graph import blast_radius, expand
from rota.job.core.placement import requests_of
from rota.runtime.clock import Clock, within_cpu_time
from rota.runtime.code_pack import CodeCache
from rota.runtime.environ import Home
from rota.runtime.image import MISSING, find_tool
from rota.runtime.job_files import FILES_LABEL, OWN_FILES
from rota.runtime.process import write_private
from rota.runtime.random import RandomSource, ulid
from rota.runtime.secrets import Vault
from rota.service.accounts import Caller, UserRole
from rota.service.api import RESOURCES
from rota.service.control.changes import check_queue, queue_fault
from rota.service.control.loop import ServiceLoop
from rota.service.control.submission import (
    Submission,
    check_urls,
    dependency_fault,
    secret_faults,
    with_interfaces,
    with_stores,
    workdir_fault,
    workdir_of,
)
from rota.service.jobfile.models import job_text
from rota.service.jobfile.reader import placed, problems_of, read_job, value_problems
from rota.service.models.base import document
from rota.service.models.cluster import DryRunEstimate, DryRunExplanation
from rota.service.views.cluster import no_usable_node
from rota.service.views.job_history import JobHistory
from rota.spec import codec
from rota.spec.check import Finding, fixed_size, image_refused, tenant_refused, unenforced
from rota.spec.codec import JsonObject
from rota.spec.errors import (
    BadInput,
    Conflict,
    IdempotencyConflict,
    Infeasible,
    JobFileError,
    LimitExceeded,
    nearest,
)
from rota.spec.events import Continued, JobAdmitted, JobEnded, JobQueued, JobSubmitted, JobWaits, Record
from rota.spec.gang import Placement
from rota.spec.ids import JobId
from rota.spec.job import SPEC_VERSION, After, JobSpec, started_spec
from rota.spec.reasons import INFO, Reason
from rota.spec.states import JobState

if TYPE_CHECKING:
    from rota.service.models.cluster import PlannedRole

PARSE_CPU_S = 2.0
SEARCH_WAIT_S = 20.0
"""How long a job waits for the search of plans of another."""
TOOL_KNOWN_S = 60.0
"""For how long a tool that holds images, or that there is none, is remembered."""
QUEUED_MAX = 10_000
DRY_RUNS_MAX = 2
"""Children that import workloads for dry runs at once; the next one waits."""
_DRY_RUN = JobId("(dry run)")


class Intake:
    """The way into the log for new jobs."""

    def __init__(
        self,
        loop: ServiceLoop,
        *,
        home: Home,
        clock: Clock,
        random_source: RandomSource,
        stores: Mapping[str, str] = MappingProxyType({}),
        calibration: Calibration | None = None,
    ) -> None:
        self._calibration = calibration or Calibration()
        self._loop, self._home, self._clock, self._random = loop, home, clock, random_source
        self._stores = stores
        self._one_at_a_time = asyncio.Lock()
        self._dry_runs = asyncio.Semaphore(DRY_RUNS_MAX)
        self._searches = asyncio.Lock()
        self._one_asks_tools = asyncio.Lock()
        self._tool = (float("-inf"), "")

    async def submit(
        self, given: Submission, *, caller: Caller, key: str = "", earlier: tuple[JobHistory, int] | None = None
    ) -> tuple[JobHistory, bool]:
        """The job, and whether it is new. Durable when it returns. It begins with a commit of an ``earlier`` job.

        Raises JobFileError, Infeasible, UnknownName (queue, secret), NotAllowed, LimitExceeded, or IdempotencyConflict
        (same key, other body).
        """
        user = caller.user
        if key and (known := self._find_key(user, key, given.digest)) is not None:
            return known, False
        spec = await self._checked(given, caller)
        code = await self._packed(workdir_of(spec, given))
        async with self._one_at_a_time:
            if key and (known := self._find_key(user, key, given.digest)) is not None:  # sent twice at once
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
                uid=ulid(self._clock.wall_s(), self._random),
                continues=None if earlier is None else await asyncio.to_thread(self._continues, job, spec, *earlier),
            )
            dirs = self._home.job(job).make()
            if code:
                write_private(dirs.code_name, code)
                await asyncio.to_thread(self._trim_codes)
            await self._loop.append([event], job=job, expected_seq=0)
        return self._loop.installation.jobs[job], True

    async def continued(self, job: JobHistory, n: int, *, caller: Caller, key: str) -> tuple[JobHistory, bool]:
        """A new job that begins with commit ``n`` of one that ended, and whether it is new.

        Raises what ``submit`` raises, and Conflict when a file of the commit is not here.
        """
        given = Submission(
            source=job_text(replace(job.spec, workdir=None)),
            filename=f"{job.id} from commit {n}",
            workdir=job.submitted.workdir,
        )
        return await self.submit(given, caller=caller, key=key, earlier=(job, n) if n else None)

    def _continues(self, new: JobId, spec: JobSpec, job: JobHistory, n: int) -> Continued:
        """The commit of an ended job, with its files among those of the new job. Raises Conflict without them."""
        from rota.job import checkpoint  # noqa: PLC0415 - the tensor store is for those that resume

        saved = next(one for one in job.ctx.checkpoints if one.n == n)
        old, path = Path(saved.path).parent, Path(saved.path)
        graph = job.ctx.plan
        members = (one for role in graph.stateful for one in graph.ranks[role])
        if missing := [str(one) for one in members if checkpoint.find(old, one, n) is None]:
            hint = "give the job a checkpoint.dir that all machines see"
            raise Conflict(f"{path} of commit {n} has no file of {missing[0]} on the machine of the service", hint=hint)
        if not (spec.checkpoint and spec.checkpoint.dir):
            path = self._home.checkpoints / new / path.name
            checkpoint.link(old, path.parent, n)
        return Continued(job=job.id, commit=n, path=str(path), epoch=job.ctx.epoch_max, cursor=dict(saved.cursor))

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
            estimates = self._calibration.of(await asyncio.to_thread(forecast.play, self._clock), now)
            explanation |= {"estimate": document(DryRunEstimate, estimates.of(_DRY_RUN).to_json())}
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
            "explanation": document(DryRunExplanation, explanation),
            "notes": list(unenforced(await self._named(given))) if given.ignore_image else [],
            "roles": _roles(completed),
            "gangs": [codec.to_json_value(request) for request in requests_of(completed)],
            "subgraphs": [[str(member) for member in part.members] for part in expand(completed).subgraphs],
            "placement": None if placement is None else codec.to_json_value(placement),
            "spec": completed.to_json(),
        }

    async def what_if(
        self, job: JobHistory, changes: Sequence[str], *, caller: Caller
    ) -> tuple[SchedulerExplanation, Estimate]:
        """What the scheduler would say of a job that waits if it were changed, and when it would start; nothing is.

        ``changes`` are ``path=value`` over its job file. Raises JobFileError, Infeasible, UnknownName, NotAllowed, or
        BadInput for a short path of a job with several roles.
        """
        sets = {_whole_path(one, job.spec): one for one in changes}
        given = Submission(source=job_text(job.spec), sets=tuple(sets), workdir=job.submitted.workdir)
        try:
            spec = await self._read(given)
        except JobFileError as error:
            found = (
                replace(one, file=f"--what-if {sets.get(one.source, one.source)}", line=0) for one in error.problems
            )
            raise JobFileError(tuple(found), hint=error.hint, **error.fields) from None
        self._check_queue(spec, caller)
        spec = self._with_dependencies(spec, given, caller)
        known = {(role.name, role.workload): role.interface for role in job.spec.roles}
        roles = (replace(role, interface=known.get((role.name, role.workload))) for role in spec.roles)
        spec = await self._planned(replace(spec, roles=tuple(roles)), given)
        self._check_feasible(spec)
        scheduler, now = self._loop.scheduler, self._clock.wall_s()
        async with self._dry_runs:
            if job.state is not JobState.QUEUED:
                raise Conflict(f"{job.id} is {job.state.value}", state=job.state.value)
            ask = scheduler.ask_with(job.id, spec)
            found = scheduler.explain_ask(ask, now)
            forecast = Forecast(scheduler.state, scheduler.profile, now, until=job.id, instead=ask)
            estimates = await asyncio.to_thread(forecast.play, self._clock, scheduler.wait_idle)
        return found, self._calibration.of(estimates, now).of(job.id, now)

    async def _packed(self, workdir: str) -> str:
        """Digest of the code of a job, packed for machines that do not see this home; empty until it is packed."""
        nodes = self._loop.installation.usable_nodes()
        if not workdir or not any((FILES_LABEL, OWN_FILES) in node.labels for node in nodes):
            return ""
        return await asyncio.to_thread(CodeCache(self._home.code_archives).pack, Path(workdir), self._home.root)

    def _trim_codes(self) -> None:
        """Keep the cache below its limit, with the code of every job that has not ended."""
        keep = set[str]()
        for job in tuple(self._loop.installation.live):
            with contextlib.suppress(OSError):
                keep.add(self._home.job(job).code_name.read_text(encoding="utf-8"))
        CodeCache(self._home.code_archives).trim(keep)

    def _find_key(self, user: str, key: str, digest: str) -> JobHistory | None:
        installation = self._loop.installation
        if (job := installation.keys.get((user, f"{key}#{digest}"))) is not None:
            return installation.jobs[job]
        if any(known.rpartition("#")[0] == key for whose, known in installation.keys if whose == user):
            raise IdempotencyConflict(f"key {key!r} came before with another job", hint="use a new key")
        return None

    async def _read(self, given: Submission) -> JobSpec:
        spec = await self._named(given)
        return replace(spec, image=None) if given.ignore_image else spec

    async def _named(self, given: Submission) -> JobSpec:
        if given.spec is not None:
            return started_spec(_from_json(given.spec), ())
        find_queue = partial(queue_fault, self._loop.scheduler)
        read = partial(read_job, given.source, filename=given.filename, sets=given.sets, find_queue=find_queue)
        try:
            return await within_cpu_time(read, PARSE_CPU_S)
        except TimeoutError as error:
            hint = "fewer roles and values; what is long belongs into files that the job reads"
            raise BadInput(f"{given.filename} cannot be read: {error}", hint=hint) from None

    async def _checked(self, given: Submission, caller: Caller | None) -> JobSpec:
        """The job as it would run. Nothing is searched and no file opened for who may not submit it."""
        spec = await self._read(given)
        self._check_rights(spec, caller)
        holds_images = spec.image is None or await self._holds_images()
        self._check_names(spec, given, caller, holds_images=holds_images)
        spec = with_stores(spec, given, self._stores)
        await asyncio.to_thread(check_urls, spec, given)
        if caller is not None:  # without a service there are no other jobs, and no queues with users
            spec = self._with_dependencies(self._as_tenant(spec, given), given, caller)
        spec = await self._planned(spec, given)
        self._check_feasible(spec)
        return spec

    async def _holds_images(self) -> bool:
        """Whether a tool of images works here; it is asked once in ``TOOL_KNOWN_S``."""
        async with self._one_asks_tools:
            if self._clock.monotonic_s() >= self._tool[0]:
                tool = await asyncio.to_thread(find_tool)
                self._tool = (self._clock.monotonic_s() + TOOL_KNOWN_S, tool)
            return bool(self._tool[1])

    async def _planned(self, spec: JobSpec, given: Submission) -> JobSpec:
        """The job with its parallel plans; they are searched one job at a time, beside the loop."""
        if all(role.plan is None and not role.plans for role in spec.roles):
            return spec
        from rota.service.control.job_plans import PlannedDevices, with_plans  # noqa: PLC0415 - the planner is a fifth of a start of the service

        try:
            async with self._clock.timeout(SEARCH_WAIT_S):
                await self._searches.acquire()
        except TimeoutError:
            raise LimitExceeded("plans of other jobs are being searched", hint="submit it again later") from None
        try:
            devices = PlannedDevices.of(self._loop.scheduler.state.nodes, self._home.hardware)
            return await asyncio.to_thread(with_plans, spec, workdir_of(spec, given), self._clock, devices)
        finally:
            self._searches.release()

    def _check_rights(self, spec: JobSpec, caller: Caller | None) -> None:
        """Raises what is wrong with the queue, or with the caller's rights; not for a user who mistyped it."""
        queue = queue_fault(self._loop.scheduler, spec.queue)
        if queue is None or not (caller is None or any(role >= UserRole.USER for _, role in caller.grants)):
            self._check_queue(spec, caller)

    def _check_names(self, spec: JobSpec, given: Submission, caller: Caller | None, *, holds_images: bool) -> None:
        """The queue, secrets, earlier jobs and folder that the job names are there, and its image can be used.

        Raises what is wrong with the queue or a secret as itself where nothing else is, all other mistakes together
        as a JobFileError. Who may submit to no queue learns of the queue alone, before.
        """
        queue = queue_fault(self._loop.scheduler, spec.queue)
        found = [queue] if queue is not None else []
        vault = Vault(self._home)
        if caller is not None:
            found += secret_faults(spec.secrets, vault.names(caller.user) if spec.secrets else ())
            found += self._dependencies(spec, caller)[1]
        found += image_refused(spec)
        if not holds_images:
            message, hint = f"{spec.image!r} cannot be used: {MISSING}", "or submit with --ignore-image (ignore_image)"
            found.append(Finding(path=("image",), message=message, hint=hint, code="NOT_SUPPORTED"))
        if (folder := workdir_fault(spec, given)) is not None:
            found.append(folder)
        if len(found) == 1:
            check_queue(self._loop.scheduler, spec.queue)
            if caller is not None:
                vault.check(caller.user, spec.secrets)
        if found:
            raise JobFileError(placed(found, given.source, filename=given.filename, sets=given.sets))

    def _check_queue(self, spec: JobSpec, caller: Caller | None) -> None:
        check_queue(self._loop.scheduler, spec.queue)
        if caller is not None:  # without a service nothing can be asked
            caller.need(UserRole.USER, spec.queue)

    def _as_tenant(self, spec: JobSpec, given: Submission) -> JobSpec:
        """The job with the user of its queue, or of the nearest one above. Raises JobFileError for what needs root.

        A caller's own ``run_as`` is worth nothing. Packages of Python run code when they are installed; workloads of
        Python run in a process of Rota.
        """
        users = {one.path: one.run_as for one in self._loop.installation.queues}
        parts = spec.queue.split("/")
        above = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
        spec = replace(spec, run_as=next((users[path] for path in above if users.get(path)), None))
        if spec.run_as is None:
            return spec
        found = [*tenant_refused(spec)]
        if any((FILES_LABEL, OWN_FILES) in node.labels for node in self._loop.installation.usable_nodes()):
            message = f"jobs of {spec.queue} run as {spec.run_as}, which needs one machine, or one home for all"
            found.append(Finding(path=("queue",), message=message, hint="use another queue", code="NOT_SUPPORTED"))
        if found:
            raise JobFileError(placed(found, given.source, filename=given.filename, sets=given.sets))
        return spec

    def _with_dependencies(self, spec: JobSpec, given: Submission, caller: Caller) -> JobSpec:
        """The job with the ids of the jobs that it starts after, which were submitted before, so that no cycle can be.

        Raises JobFileError for one that is not there, and for one that had to succeed and did not.
        """
        found, faults = self._dependencies(spec, caller)
        if faults:
            raise JobFileError(placed(faults, given.source, filename=given.filename, sets=given.sets))
        return replace(spec, after=tuple(found))

    def _dependencies(self, spec: JobSpec, caller: Caller) -> tuple[list[After], list[Finding]]:
        """The jobs that it starts after by their ids, and what is wrong with the others."""
        found: list[After] = []
        faults: list[Finding] = []
        for index, one in enumerate(spec.after):
            job = self._find_dependency(one.job, caller)
            seen = job and (job.id, job.state, job.ended and job.ended.reason)
            if fault := dependency_fault(index, one, seen, lambda: self._names_of(caller)):
                faults.append(fault)
            if job is not None:
                found.append(replace(one, job=job.id))
        return found, faults

    def _names_of(self, caller: Caller) -> set[str]:
        return {known.spec.name for known in self._loop.installation.jobs.values() if caller.reads(known)}

    def _find_dependency(self, name: str, caller: Caller) -> JobHistory | None:
        """The job of this id that the caller may see, else the newest of this name that is theirs."""
        jobs = self._loop.installation.jobs
        if (job := jobs.get(JobId(name))) is not None and caller.sees(job):
            return job
        mine = (one for one in reversed(jobs.values()) if one.submitted.user == caller.user)
        return next((one for one in mine if one.spec.name == name), None)

    def _check_feasible(self, spec: JobSpec) -> None:
        shortfall = self._loop.scheduler.infeasible(spec)
        if shortfall is None:
            return
        unusable = self._loop.unusable
        if unusable and (none := no_usable_node(self._loop.installation, unusable)) is not None:
            raise Infeasible(none["text"], hint="see: rota nodes, rota status", reason=none["code"], **none["fields"])
        others = "; ".join(f"{one['machine']} cannot be used: {one['why']}" for one in unusable)
        raise Infeasible(
            shortfall.text,
            hint="; ".join(filter(None, [shortfall.remedy, others])),
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
        stopped_for = dict(scheduler.state.stopped_for)  # a job that arrives makes it forget these
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
            scheduler.state.stopped_for.update(stopped_for)
        return placement, next((event for event in mine if isinstance(event, JobWaits)), None), forecast


def _whole_path(change: str, spec: JobSpec) -> str:
    """``path=value`` with the whole path of a field that the one role of a job has. Raises BadInput for several."""
    path = change.partition("=")[0]
    if path != "replicas" and path not in RESOURCES:
        return change
    names = [role.name for role in spec.roles]
    part = path if path == "replicas" else f"resources.{path}"
    if len(names) > 1:
        hint = f"--what-if roles.{names[0]}.{part}=..."
        raise BadInput(f"{change}: the job has the roles {', '.join(names)}", hint=hint)
    return f"roles.{names[0]}.{part}{change.removeprefix(path)}"


def _from_json(raw: JsonObject) -> JobSpec:
    try:
        spec = JobSpec.from_json({**raw, "spec_version": SPEC_VERSION})  # a client of an older one means it as today
    except (TypeError, ValueError, KeyError) as error:
        raise BadInput(
            f"spec: {error}", hint="send the text of a job file as 'source', or JobSpec.to_json()"
        ) from error
    if unread := _unread(raw, spec.to_json(), "spec"):
        path, name, known = unread
        raise BadInput(f"{path}.{name}: unknown field", hint=nearest(name, known, "fields"))
    if problems := problems_of(spec) or value_problems(spec):
        raise JobFileError(problems)
    return spec


def _unread(raw: object, read: object, path: str) -> tuple[str, str, list[str]] | None:
    """Where, how and among which names a value has one that reading it passed over."""
    if isinstance(raw, dict) and isinstance(read, dict):
        fields = cast("dict[str, object]", read)
        for name, below in cast("dict[str, object]", raw).items():
            found = _unread(below, fields[name], f"{path}.{name}") if name in fields else (path, name, [*fields])
            if found is not None:
                return found
    elif isinstance(raw, list) and isinstance(read, list):
        pairs = zip(cast("list[object]", raw), cast("list[object]", read))
        rows = (_unread(one, other, f"{path}[{i}]") for i, (one, other) in enumerate(pairs))
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
                "plans": [{"replicas": one.replicas, "why": one.why, "step_s": one.step_s} for one in role.plans],
                "blast_radius": {
                    "text": radius.text,
                    "restarts": [str(member) for member in radius.restarts],
                    "re_forms": [str(member) for member in radius.re_forms],
                    "pauses": list(radius.pauses),
                },
            }
        )
    return rows
