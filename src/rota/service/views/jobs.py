"""Jobs as documents: one job with its roles, instances and attempts; lists with filters and cursors."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rota.cluster.core.jobs import Wait
from rota.job.core.resize import wanted_size
from rota.job.rpc.peers import CUT
from rota.runtime.clock import iso
from rota.service.api import JobSort
from rota.service.models.base import Moment
from rota.service.models.jobs import (
    AttemptRow,
    Beat,
    EditRow,
    InstanceRow,
    JobDocument,
    JobError,
    JobList,
    JobRow,
    LossFields,
    MasterRow,
    Progress,
    RoleRow,
    StreamRow,
)
from rota.service.views.job_history import Attempt, InstanceHistory, JobHistory, culprit_of
from rota.spec import codec
from rota.spec.errors import BadInput
from rota.spec.events import Committed, InstanceLost
from rota.spec.ids import JobId
from rota.spec.reasons import INFO, Reason
from rota.spec.resources import counted
from rota.spec.states import InstanceState, JobState

API = "rota/v1"
LIMIT_MAX = 200
FILTER_STATES = tuple(state.value for state in JobState)


def when(at: float | None) -> Moment | None:
    """A moment as the documents show it."""
    return None if at is None else iso(at)


def phase(job: JobHistory) -> str:
    """What the job does now inside its state, in words; empty when the state says it all."""
    match job.state:
        case JobState.SUBMITTED:
            return "its workloads are being read"
        case JobState.ADMITTED:
            return "its devices are being reserved" if job.master_is_current else "its master is being started"
        case JobState.CHECKING:
            return _checks(job)
        case JobState.STARTING | JobState.RESIZING:
            return _readiness(job)
        case JobState.RECOVERING if job.failures:
            last = job.failures[-1]
            return f"restarts {last.cause.role}/{last.cause.rank} (level {last.level}), {_readiness(job)}"
        case JobState.STOPPING | JobState.PREEMPTING:
            left = sum(bool(one.now.doomed) for one in job.instances.values())
            stopping = f"{counted(left, 'process', 'processes')} yet to stop"
            what = stopping if left else "its devices are being given back"
            room_for = job.preempt.for_job if job.preempt is not None else ""
            return f"makes room for {room_for}: {what}" if room_for else what
        case JobState.RUNNING if job.commit is not None:
            return f"at commit {job.commit.n}"
        case JobState.QUEUED if job.attempts and job.attempts[-1].for_job:
            return f"preempted for {job.attempts[-1].for_job}"
        case _:
            return ""


def _checks(job: JobHistory) -> str:
    """The first of the processes that have not found their node fit yet."""
    behind = [one for one in job.instances.values() if one.state is InstanceState.STARTING]
    names = ", ".join(f"{one.id} on {job.ctx.bundle(one.id)[1].node}" for one in behind[:3])
    return f"{names}{' ...' if len(behind) > 3 else ''}: the process comes up and checks its node"


def _readiness(job: JobHistory) -> str:
    """How many are ready, and the first of those that the rest waits for."""
    members = [one for one in job.instances.values() if one.now.active]
    behind = [one for one in members if not one.now.settled]
    ready = f"{len(members) - len(behind)} of {counted(len(members), 'instance')} ready"
    names = ", ".join(str(one.id) for one in behind[:3]) + (" ..." if len(behind) > 3 else "")
    return f"{ready}, waits for {names}" if behind else ready


WaitOf = Callable[[JobId], Wait | None]
"""Why a job in a queue waits now, as the scheduler sees it; None where it knows no more than the log."""


def reason_of(job: JobHistory, wait_of: WaitOf = lambda _: None) -> tuple[Reason | None, str]:
    """The code and the sentence behind the present state."""
    if job.ended is not None:
        return job.ended.reason, job.ended.text or INFO[job.ended.reason].text
    if job.stop is not None:
        return job.stop.reason, INFO[job.stop.reason].text
    if job.state is JobState.PAUSED:
        return Reason.PAUSED, INFO[Reason.PAUSED].text
    if job.preempt is not None:
        return job.preempt.reason, moved_text(job.preempt.reason, job.preempt.for_job)
    if job.state in (JobState.QUEUED, JobState.ADMITTED) and job.waits is not None:
        now = wait_of(job.id) if job.state is JobState.QUEUED else None
        wait = now or job.waits
        return wait.reason, wait.text or INFO[wait.reason].text
    if job.state is JobState.RESIZING and job.ctx.failover is not None:
        return job.ctx.failover.cause.reason, job.ctx.failover.cause.text
    if job.state is JobState.RECOVERING and job.failures:
        cause = job.failures[-1].cause
        return cause.reason, cause.text or INFO[cause.reason].text
    return None, ""


def moved_text(reason: Reason, for_job: str) -> str:
    """Why an attempt ended, and for whom if it had to make room."""
    return INFO[reason].text + (f" It made room for {for_job}." if for_job else "")


def job_summary(job: JobHistory, now: float, wait_of: WaitOf) -> JobRow:
    """One row of a list of jobs."""
    reason, text = reason_of(job, wait_of)
    gpus = sum(role.res.gpus * role.replicas_min for role in job.spec.roles)
    return {
        "id": job.id,
        "uid": job.submitted.uid,
        "name": job.spec.name,
        "user": job.submitted.user,
        "queue": job.queue,
        "priority": job.priority,
        "state": job.state.value,
        "phase": phase(job),
        "reason": reason,
        "text": text,
        "since": iso(job.since),
        "submitted_at": iso(job.submitted_at),
        "queued_at": when(job.queued_at),
        "started_at": when(job.running_at),
        "ended_at": when(job.ended_at),
        "run_s": _run_s(job, now),
        "attempt": job.attempts[-1].attempt if job.attempts else 0,
        "failovers": len(job.failures),
        "restarts": sum(one.restarts for one in job.instances.values()),
        "instances_total": sum(one.now.active for one in job.instances.values()),
        "instances_ready": sum(one.state is InstanceState.READY and one.now.active for one in job.instances.values()),
        "gpus": gpus,
        "nodes": list(job.placement.nodes) if job.placement and not job.state.terminal else [],
        "labels": dict(job.spec.labels),
        "progress": _progress(job),
    }


def job_document(
    job: JobHistory,
    now: float,
    wait_of: WaitOf,
    beats: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    output: str = "",
    url: str = "",
) -> JobDocument:
    """Everything about one job: every instance with its state, node, pid, restarts, epoch, progress and last error.

    ``beats`` is what instances last told their master; it is the one thing that no event tells.
    """
    return {
        "api": API,
        "kind": "Job",
        **job_summary(job, now, wait_of),
        "roles": [_role(job, role.name) for role in job.spec.roles],
        "instances": [
            instance_document(job, one, (beats or {}).get(str(one.id)))
            for one in job.instances.values()
            if one.pid or not one.now.retired
        ],
        "streams": stream_rows(job.commit),
        "master": _master(job),
        "attempts": [_attempt(one) for one in job.attempts],
        "error": end_document(job),
        "changes": [{"at": when(one.at), "by": one.by, "changes": one.changes} for one in job.edits],
        "workdir": job.submitted.workdir,
        "filename": job.submitted.filename,
        "version": job.version,
        "seq": job.seq,
        "events": job.last_number,
        "output": output,
        "url": url,
    }


def outlined(document: JobDocument) -> JobDocument:
    """The Job document for who may see the job and not read it: no commands, labels, texts or tracebacks."""
    error = document["error"]
    return {
        **document,
        "roles": [{**role, "run": None} for role in document["roles"]],
        "instances": [{**one, "error": None, "progress": None} for one in document["instances"]],
        "error": None if error is None else {**error, "text": "", "traceback": ""},
        "labels": {},
        "text": INFO[Reason(document["reason"])].text if document["reason"] else "",
        "progress": None,
        "changes": [],
        "workdir": "",
        "output": "",
        "filename": "",
    }


def instance_document(job: JobHistory, one: InstanceHistory, beat: Mapping[str, Any] | None = None) -> InstanceRow:
    """One instance; a beat of another epoch says nothing of it."""
    return {
        "instance": str(one.id),
        "role": one.id.role,
        "rank": one.id.rank,
        "state": one.state.value,
        "since": when(one.since),
        "node": one.node,
        "pid": (one.pid or None) if one.now.alive or one.state.terminal else None,
        "epoch": one.now.epoch,
        "standby": one.now.spare,
        "restarts": one.restarts,
        "devices": _devices(job, one),
        "restored": one.now.restored,
        "progress": _beat(beat) if beat is not None and beat["epoch"] == one.now.epoch else None,
        "error": None if one.error is None else loss_document(one.error_at, one.error),
    }


def loss_document(at: float | None, loss: InstanceLost) -> LossFields:
    """How an instance was lost."""
    return {
        "at": when(at),
        "reason": loss.reason,
        "text": loss.text,
        "traceback": loss.traceback,
        "exit_code": loss.exit_code,
        "signal": loss.signal,
        "epoch": loss.epoch,
    }


def _devices(job: JobHistory, one: InstanceHistory) -> list[int]:
    bundle = job.bundle_of(one.id.role, one.id.rank)
    return list(bundle.devices) if bundle is not None else []


def _beat(beat: Mapping[str, Any]) -> Beat:
    return {
        "n": beat["progress_n"],
        "unit": beat["progress_unit"],
        "idle_s": round(beat["idle_s"], 3),
        "beat_age_s": round(beat["age_s"], 3),
        "busy": list(beat["busy"]),
        "quiet": beat["quiet"],
        "waits_for": [wait["target"] for wait in beat.get("waits", ())],
        "step_s": beat.get("step_s", 0.0),
        "cpus": beat.get("cpus", 0.0),
        "rss_bytes": beat.get("rss_bytes", 0),
        "weights": [
            {"edge": edge, "state": state, "held": held, "behind": behind, "behind_s": behind_s}
            for edge, state, held, behind, behind_s in beat.get("weights", ())
        ],
    }


def _progress(job: JobHistory) -> Progress | None:
    if job.commit is None:
        return None
    return {"commit": job.commit.n, "at": when(job.commit_at), "metrics": job.commit.metrics}


def _run_s(job: JobHistory, now: float) -> float:
    return round(sum((one.ended_at or now) - one.running_at for one in job.attempts if one.running_at is not None), 3)


def _role(job: JobHistory, name: str) -> RoleRow:
    role = job.spec.role(name)
    members = [one for one in job.instances.values() if one.id.role == name]
    return {
        "name": name,
        "workload": role.workload,
        "run": None if role.run is None else list(role.run),
        "replicas": wanted_size(job.ctx, role),
        "ready": sum(one.state is InstanceState.READY for one in members),
        "restarts": sum(one.restarts for one in members),
        "resources": codec.to_json_value(role.res),
        "restart": role.restart,
        "loop": role.is_loop,
        "plans": [{"replicas": one.replicas, "why": one.why} for one in role.plans],
    }


def _master(job: JobHistory) -> MasterRow | None:
    if job.master is None:
        return None
    return {
        "pid": job.master.pid,
        "epoch": job.master.master_epoch,
        "node": job.master.node,
        "since": when(job.master_at),
    }


def _attempt(one: Attempt) -> AttemptRow:
    return {
        "attempt": one.attempt,
        "epoch": one.epoch,
        "admitted_at": when(one.admitted_at),
        "started_at": when(one.running_at),
        "ended_at": when(one.ended_at),
        "reason": one.reason,
        "for_job": one.for_job,
        "nodes": list(one.placement.nodes),
        "why": one.why,
    }


def end_document(job: JobHistory) -> JobError | None:
    """Why the job failed, and whose failure ended it; None for one that did not fail."""
    ended = job.ended
    if ended is None or ended.state is not JobState.FAILED:
        return None
    return {
        "reason": ended.reason,
        "fault": INFO[ended.reason].fault,
        "text": ended.text or INFO[ended.reason].text,
        "role": ended.role,
        "rank": ended.rank,
        "instance": "" if (culprit := culprit_of(job)) is None else culprit.instance,
        "traceback": ended.traceback,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs of a list are wanted; empty fields want all. ``all`` includes those that ended."""

    all: bool = False
    states: tuple[str, ...] = ()
    queue: str = ""
    user: str = ""
    name: str = ""
    text: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    since: float = 0.0

    def wants(self, job: JobHistory) -> bool:
        """True when the job passes every field."""
        if not self.all and not self.states and job.state.terminal:
            return False
        queue = not self.queue or job.queue == self.queue or job.queue.startswith(f"{self.queue}/")
        labels = dict(job.spec.labels)
        return (
            (not self.states or job.state.value in self.states)
            and queue
            and (not self.user or job.submitted.user == self.user)
            and (not self.name or job.spec.name == self.name)
            and (not self.text or self.text in f"{job.id} {job.submitted.user}".lower())
            and all(labels.get(key) == value for key, value in self.labels)
            and (job.ended_at is None or job.ended_at >= self.since)
        )


def job_list(
    jobs: Iterable[JobHistory],
    wanted: JobFilter,
    wait_of: WaitOf,
    *,
    now: float,
    sort: JobSort = "submitted",
    limit: int = LIMIT_MAX,
    cursor: str = "",
) -> JobList:
    """In the order of ``sort``. ``next`` is the cursor of the next page; what is submitted meanwhile moves nothing."""
    bad = [state for state in wanted.states if state not in FILTER_STATES]
    if bad:
        raise BadInput(f"unknown state {bad[0]!r}", hint=f"states: {', '.join(FILTER_STATES)}")
    limit = max(1, min(limit, LIMIT_MAX))
    after = _read_cursor(cursor, sort) if cursor else None
    keyed = ((_key(one, sort), one) for one in jobs if wanted.wants(one))
    fits = sorted((one for one in keyed if after is None or one[0] > after), key=lambda one: one[0])
    page = fits[:limit]
    return {
        "api": API,
        "kind": "JobList",
        "items": [job_summary(one, now, wait_of) for _, one in page],
        "next": _write_cursor(page[-1][0], sort) if len(fits) > limit else None,
    }


def edits(job: JobHistory) -> list[EditRow]:
    """Every edit in order, with the spec before and after it."""
    return [
        {"at": when(one.at), "by": one.by, "before": one.before.to_json(), "after": one.after.to_json()}
        for one in job.edits
    ]


Key = tuple[float, str, float, str]
"""The place of a job in a list: a number or a text of the order, the newest first, its uid."""


def _key(job: JobHistory, sort: JobSort) -> Key:
    text = {"name": job.spec.name, "state": job.state.value, "queue": job.queue}.get(sort, "")
    rank = -float(job.priority) if sort == "priority" else 0.0
    return (rank, text, -job.submitted_at, job.submitted.uid or job.id)


def _write_cursor(key: Key, sort: JobSort) -> str:
    return base64.urlsafe_b64encode(json.dumps([sort, *key]).encode()).decode()


def _read_cursor(cursor: str, sort: JobSort) -> Key:
    try:
        of, rank, text, at, uid = json.loads(base64.urlsafe_b64decode(cursor.encode()))
        key = (float(rank), str(text), float(at), str(uid))
    except (binascii.Error, ValueError, TypeError, UnicodeDecodeError):
        raise BadInput(f"{cursor!r} is not a cursor", hint="use 'next' of the page before") from None
    if of != sort:
        raise BadInput(f"the cursor is of a list in the order {of!r}", hint=f"ask for sort={of}, or without a cursor")
    return key


def stream_rows(commit: Committed | None) -> list[StreamRow]:
    """One row a ledger: ``admitted = pending + leased + queued + trained + dropped`` holds in each.

    ``leased`` are with their producers; ``again`` counts productions begun anew; ``age`` is in model versions.
    """
    cuts: Mapping[str, Mapping[str, Any]] = commit.cursor.get(CUT, {}).get("streams", {}) if commit else {}
    return [
        {
            "name": name,
            "admitted": cut["admitted"],
            "pending": cut["pending"],
            "leased": cut["running"],
            "queued": cut["queued"],
            "trained": cut["trained"],
            "dropped": dict(cut["dropped"]),
            "again": cut["again"],
            "age": cut["age"],
        }
        for name, cut in cuts.items()
    ]
