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
from rota.runtime.clock import iso
from rota.service.calls import JobSort
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
)
from rota.service.views.culprit import culprit_of
from rota.service.views.story import Attempt, Instance, JobStory
from rota.service.views.streams import stream_rows
from rota.spec import codec
from rota.spec.errors import BadInput
from rota.spec.events import InstanceLost
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


def phase(story: JobStory) -> str:
    """What the job does now inside its state, in words; empty when the state says it all."""
    match story.state:
        case JobState.SUBMITTED:
            return "its workloads are being read"
        case JobState.ADMITTED:
            return "its devices are being reserved" if story.master_is_current else "its master is being started"
        case JobState.CHECKING:
            return _checks(story)
        case JobState.STARTING | JobState.RESIZING:
            return _readiness(story)
        case JobState.RECOVERING if story.failures:
            last = story.failures[-1]
            return f"restarts {last.cause.role}/{last.cause.rank} (level {last.level}), {_readiness(story)}"
        case JobState.STOPPING | JobState.PREEMPTING:
            left = sum(bool(one.now.doomed) for one in story.instances.values())
            stopping = f"{counted(left, 'process', 'processes')} yet to stop"
            what = stopping if left else "its devices are being given back"
            room_for = story.preempt.for_job if story.preempt is not None else ""
            return f"makes room for {room_for}: {what}" if room_for else what
        case JobState.RUNNING if story.commit is not None:
            return f"at commit {story.commit.n}"
        case JobState.QUEUED if story.attempts and story.attempts[-1].for_job:
            return f"preempted for {story.attempts[-1].for_job}"
        case _:
            return ""


def _checks(story: JobStory) -> str:
    """The first of the processes that have not found their node fit yet."""
    behind = [one for one in story.instances.values() if one.state is InstanceState.STARTING]
    names = ", ".join(f"{one.id} on {story.ctx.bundle(one.id)[1].node}" for one in behind[:3])
    return f"{names}{' ...' if len(behind) > 3 else ''}: the process comes up and checks its node"


def _readiness(story: JobStory) -> str:
    """How many are ready, and the first of those that the rest waits for."""
    members = [one for one in story.instances.values() if one.now.active]
    behind = [one for one in members if not one.now.settled]
    ready = f"{len(members) - len(behind)} of {counted(len(members), 'instance')} ready"
    names = ", ".join(str(one.id) for one in behind[:3]) + (" ..." if len(behind) > 3 else "")
    return f"{ready}, waits for {names}" if behind else ready


Told = Callable[[JobId], Wait | None]
"""Why a job in a queue waits now, as the scheduler sees it; None where it knows no more than the log."""


def reason_of(story: JobStory, told: Told = lambda _: None) -> tuple[Reason | None, str]:
    """The code and the sentence behind the present state."""
    if story.ended is not None:
        return story.ended.reason, story.ended.text or INFO[story.ended.reason].text
    if story.stop is not None:
        return story.stop.reason, INFO[story.stop.reason].text
    if story.state is JobState.PAUSED:
        return Reason.PAUSED, INFO[Reason.PAUSED].text
    if story.preempt is not None:
        return story.preempt.reason, moved_text(story.preempt.reason, story.preempt.for_job)
    if story.state in (JobState.QUEUED, JobState.ADMITTED) and story.waits is not None:
        now = told(story.id) if story.state is JobState.QUEUED else None
        wait = now or story.waits
        return wait.reason, wait.text or INFO[wait.reason].text
    if story.state is JobState.RESIZING and story.ctx.failover is not None:
        return story.ctx.failover.cause.reason, story.ctx.failover.cause.text
    if story.state is JobState.RECOVERING and story.failures:
        cause = story.failures[-1].cause
        return cause.reason, cause.text or INFO[cause.reason].text
    return None, ""


def moved_text(reason: Reason, for_job: str) -> str:
    """Why an attempt ended, and for whom if it had to make room."""
    return INFO[reason].text + (f" It made room for {for_job}." if for_job else "")


def job_summary(story: JobStory, now: float, told: Told) -> JobRow:
    """One row of a list of jobs."""
    reason, text = reason_of(story, told)
    gpus = sum(role.res.gpus * role.replicas_min for role in story.spec.roles)
    return {
        "id": story.id,
        "uid": story.submitted.uid,
        "name": story.spec.name,
        "user": story.submitted.user,
        "queue": story.queue,
        "priority": story.priority,
        "state": story.state.value,
        "phase": phase(story),
        "reason": reason,
        "text": text,
        "since": iso(story.since),
        "submitted_at": iso(story.submitted_at),
        "queued_at": when(story.queued_at),
        "started_at": when(story.running_at),
        "ended_at": when(story.ended_at),
        "run_s": _run_s(story, now),
        "attempt": story.attempts[-1].attempt if story.attempts else 0,
        "failovers": len(story.failures),
        "restarts": sum(one.restarts for one in story.instances.values()),
        "instances_total": sum(one.now.active for one in story.instances.values()),
        "instances_ready": sum(one.state is InstanceState.READY and one.now.active for one in story.instances.values()),
        "gpus": gpus,
        "nodes": list(story.placement.nodes) if story.placement and not story.state.terminal else [],
        "labels": dict(story.spec.labels),
        "progress": _progress(story),
    }


def job_document(
    story: JobStory,
    now: float,
    told: Told,
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
        **job_summary(story, now, told),
        "roles": [_role(story, role.name) for role in story.spec.roles],
        "instances": [
            instance_document(story, one, (beats or {}).get(str(one.id)))
            for one in story.instances.values()
            if one.pid or not one.now.retired
        ],
        "streams": stream_rows(story.commit),
        "master": _master(story),
        "attempts": [_attempt(one) for one in story.attempts],
        "error": end_document(story),
        "changes": [{"at": when(one.at), "by": one.by, "changes": one.changes} for one in story.edits],
        "workdir": story.submitted.workdir,
        "filename": story.submitted.filename,
        "version": story.version,
        "seq": story.seq,
        "events": story.last_number,
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


def instance_document(story: JobStory, one: Instance, beat: Mapping[str, Any] | None = None) -> InstanceRow:
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
        "devices": _devices(story, one),
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


def _devices(story: JobStory, one: Instance) -> list[int]:
    bundle = story.bundle_of(one.id.role, one.id.rank)
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


def _progress(story: JobStory) -> Progress | None:
    if story.commit is None:
        return None
    return {"commit": story.commit.n, "at": when(story.commit_at), "metrics": story.commit.metrics}


def _run_s(story: JobStory, now: float) -> float:
    return round(sum((one.ended_at or now) - one.running_at for one in story.attempts if one.running_at is not None), 3)


def _role(story: JobStory, name: str) -> RoleRow:
    role = story.spec.role(name)
    members = [one for one in story.instances.values() if one.id.role == name]
    return {
        "name": name,
        "workload": role.workload,
        "run": None if role.run is None else list(role.run),
        "replicas": wanted_size(story.ctx, role),
        "ready": sum(one.state is InstanceState.READY for one in members),
        "restarts": sum(one.restarts for one in members),
        "resources": codec.to_json_value(role.res),
        "restart": role.restart,
        "loop": role.is_loop,
        "plans": [{"replicas": one.replicas, "why": one.why} for one in role.plans],
    }


def _master(story: JobStory) -> MasterRow | None:
    if story.master is None:
        return None
    return {
        "pid": story.master.pid,
        "epoch": story.master.master_epoch,
        "node": story.master.node,
        "since": when(story.master_at),
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


def end_document(story: JobStory) -> JobError | None:
    """Why the job failed, and whose failure ended it; None for one that did not fail."""
    ended = story.ended
    if ended is None or ended.state is not JobState.FAILED:
        return None
    return {
        "reason": ended.reason,
        "fault": INFO[ended.reason].fault,
        "text": ended.text or INFO[ended.reason].text,
        "role": ended.role,
        "rank": ended.rank,
        "instance": "" if (culprit := culprit_of(story)) is None else culprit.instance,
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

    def wants(self, story: JobStory) -> bool:
        """True when the job passes every field."""
        if not self.all and not self.states and story.state.terminal:
            return False
        queue = not self.queue or story.queue == self.queue or story.queue.startswith(f"{self.queue}/")
        labels = dict(story.spec.labels)
        return (
            (not self.states or story.state.value in self.states)
            and queue
            and (not self.user or story.submitted.user == self.user)
            and (not self.name or story.spec.name == self.name)
            and (not self.text or self.text in f"{story.id} {story.submitted.user}".lower())
            and all(labels.get(key) == value for key, value in self.labels)
            and (story.ended_at is None or story.ended_at >= self.since)
        )


def job_list(
    stories: Iterable[JobStory],
    wanted: JobFilter,
    told: Told,
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
    keyed = ((_key(one, sort), one) for one in stories if wanted.wants(one))
    fits = sorted((one for one in keyed if after is None or one[0] > after), key=lambda one: one[0])
    page = fits[:limit]
    return {
        "api": API,
        "kind": "JobList",
        "items": [job_summary(one, now, told) for _, one in page],
        "next": _write_cursor(page[-1][0], sort) if len(fits) > limit else None,
    }


def edits(story: JobStory) -> list[EditRow]:
    """Every edit in order, with the spec before and after it."""
    return [
        {"at": when(one.at), "by": one.by, "before": one.before.to_json(), "after": one.after.to_json()}
        for one in story.edits
    ]


Key = tuple[float, str, float, str]
"""The place of a job in a list: a number or a text of the order, the newest first, its uid."""


def _key(story: JobStory, sort: JobSort) -> Key:
    text = {"name": story.spec.name, "state": story.state.value, "queue": story.queue}.get(sort, "")
    rank = -float(story.priority) if sort == "priority" else 0.0
    return (rank, text, -story.submitted_at, story.submitted.uid or story.id)


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
