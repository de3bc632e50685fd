"""Jobs as documents: one job with its roles, instances and attempts; lists with filters and cursors."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, NotRequired, TypedDict

from rota.cluster.core.jobs import Wait
from rota.job.core.context import AskState
from rota.job.core.resize import departing, leaves, wanted_size
from rota.job.core.survival import CUT
from rota.runtime.clock import iso
from rota.service.api import JobSort
from rota.service.models.base import Moment, document
from rota.service.models.jobs import (
    InstanceRow,
    JobDocument,
    JobError,
    JobList,
    JobRow,
    LossFields,
    MasterRow,
    Progress,
    ProgressReport,
    RoleRow,
    StreamRow,
    UploadFields,
)
from rota.service.views.job_history import InstanceHistory, JobHistory, culprit_of
from rota.spec.errors import BadInput
from rota.spec.events import Committed
from rota.spec.ids import JobId
from rota.spec.job import RoleSpec
from rota.spec.reasons import INFO, Reason
from rota.spec.resources import counted
from rota.spec.states import InstanceState, JobState

LIMIT_MAX = 200
FILTER_STATES = tuple(state.value for state in JobState)
ENDED_STATES = frozenset(state.value for state in JobState if state.terminal)


class HeartbeatFields(TypedDict):
    """What documents show of the last heartbeat of an instance, as its master keeps it."""

    epoch: int
    progress_n: float
    progress_unit: str
    idle_s: float
    age_s: float
    busy: Sequence[str]
    quiet: str
    waits: NotRequired[Sequence[Mapping[str, str]]]
    step_s: NotRequired[float]
    cpus: NotRequired[float]
    rss_bytes: NotRequired[int]
    ports: NotRequired[Sequence[Sequence[str]]]
    weights: NotRequired[Sequence[Sequence[object]]]
    calls: NotRequired[Sequence[tuple[str, str, str, int, int, float, int]]]


def when(at: float | None) -> Moment | None:
    """A moment as the documents show it."""
    return None if at is None else iso(at)


def phase(job: JobHistory) -> str:
    """What the job does now inside its state, in words; empty when the state says it all."""
    match job.state:
        case JobState.SUBMITTED:
            packages = any(job.spec.packages_of(role) for role in job.spec.roles)
            return "installing packages and inspecting workloads" if packages else "inspecting workloads"
        case JobState.ADMITTED:
            return "its devices are being reserved" if job.master_is_current else "its master is being started"
        case JobState.CHECKING:
            return _checks(job)
        case JobState.STARTING | JobState.RESIZING:
            return _readiness(job)
        case JobState.RECOVERING if job.failures:
            last = job.failures[-1]
            return f"restarts {last.cause.role}/{last.cause.rank} (level {last.level}), {_readiness(job)}"
        case JobState.STOPPING if job.ctx.uploads:
            return f"its output is being uploaded to {job.spec.output_url}"
        case JobState.STOPPING | JobState.PREEMPTING:
            left = sum(bool(one.now.terminating) for one in job.instances.values())
            stopping = f"{counted(left, 'process', 'processes')} yet to stop"
            held = "state in memory is being freed" if job.between_attempts else "devices are being given back"
            what = stopping if left else f"its {held}"
            room_for = job.preempt.for_job if job.preempt is not None else ""
            return f"makes room for {room_for}: {what}" if room_for else what
        case JobState.RUNNING if job.commit is not None:
            return f"at commit {job.commit.n}"
        case JobState.QUEUED if job.attempts and job.attempts[-1].for_job:
            return f"preempted for {job.attempts[-1].for_job}"
        case JobState.QUEUED if job.attempts:
            return job.attempts[-1].text
        case _:
            return ""


def _checks(job: JobHistory) -> str:
    """The first of the processes that have not found their node fit yet."""
    behind = [one for one in job.instances.values() if one.state is InstanceState.STARTING]
    names = ", ".join(f"{one.id} on {job.ctx.bundle(one.id)[1].node}" for one in behind[:3])
    return f"{names}{' ...' if len(behind) > 3 else ''}: starting, checking node"


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
        by_user = job.stop.reason is Reason.STOPPED_BY_USER
        return job.stop.reason, f"stopped by {job.stop.by}" if by_user else INFO[job.stop.reason].text
    if job.state is JobState.PAUSED:
        return Reason.PAUSED, INFO[Reason.PAUSED].text
    if job.preempt is not None:
        return job.preempt.reason, moved_text(job.preempt.reason, job.preempt.for_job)
    ending = job.ctx.ending
    if ending is not None and ending.reason is Reason.MIGRATED_DRAIN and (due := job.drain("waits")) is not None:
        return Reason.MIGRATED_DRAIN, f"{due.cause}: {due.no_room}, so it waits in its queue"
    if job.state in (JobState.QUEUED, JobState.ADMITTED) and job.waits is not None:
        now = wait_of(job.id) if job.state is JobState.QUEUED else None
        wait = now or job.waits
        return wait.reason, wait.text or INFO[wait.reason].text
    if job.state is JobState.RESIZING and job.ctx.failover is not None:
        return job.ctx.failover.cause.reason, job.ctx.failover.cause.text
    if job.state is JobState.RECOVERING and job.failures:
        cause = job.failures[-1].cause
        return cause.reason, cause.text or INFO[cause.reason].text
    if job.state is JobState.RUNNING and (text := leaving(job)):
        return Reason.MIGRATED_DRAIN, text
    return None, ""


def leaving(job: JobHistory) -> str:
    """Which drained node the job must leave, why, by when, how, and at what cost; empty when there is none."""
    ctx = job.ctx
    if not ctx.drains or not (there := departing(ctx)):
        return ""
    node = ctx.bundle(there[0].id)[1].node
    until = datetime.fromtimestamp(ctx.drains[node], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    names = ", ".join(str(one.id) for one in there[:3]) + (" ..." if len(there) > 3 else "")
    lost = "" if ctx.committed else job.at_stake(ctx, ctx.drains[node])
    cost = lost and f", and loses {lost}"
    ask = next((one for one in ctx.asks if one.state in (AskState.ASKED, AskState.HELD) and leaves(ctx, one)), None)
    how = f"to other nodes, at the next commit or checkpoint or then{cost}"
    if ask is None or ask.state is not AskState.HELD:
        room = "no other node has room for them now"
        if (due := job.drain("waits")) is not None and due.limited:
            room = "its limit, or that of its queue, leaves them no room elsewhere now"
        room = room if ask and ask.answered else "room on other nodes is asked for"
        how = f"{room}; without it by then the whole job waits in its queue{cost}"
    cause = next((one.cause for one in job.drains if one.node == node and one.outcome == "waits"), f"{node} is drained")
    return f"{cause}: {names} must leave by {until}; {how}"


def moved_text(reason: Reason, for_job: str, text: str = "") -> str:
    """Why an attempt ended, and for whom if it had to make room, or which drain ended it."""
    return INFO[reason].text + (f" It made room for {for_job}." if for_job else "") + (f" {text}." if text else "")


def job_summary(job: JobHistory, now: float, wait_of: WaitOf, suspected: str = "") -> JobRow:
    """One row of a list of jobs; ``suspected`` is why it may hang, if it runs."""
    reason, text = reason_of(job, wait_of)
    active = [one for one in job.instances.values() if one.now.active]
    there = None if job.state.terminal else job.placement
    held = () if there is None else [bundle.res.gpus for gang in there.gangs for bundle in gang.bundles]
    return document(
        JobRow,
        job,
        job.submitted,
        job.spec,
        phase=phase(job),
        reason=reason,
        text=text,
        run_s=_run_s(job, now),
        attempt=len(job.attempts),
        failovers=len(job.failures),
        restarts=sum(one.now.restarts for one in job.instances.values()),
        instances_total=len(active),
        instances_ready=sum(one.state is InstanceState.READY for one in active),
        gpus=sum(held or (role.res.gpus * role.replicas_min for role in job.spec.roles)),
        nodes=() if there is None else there.nodes,
        progress=_progress(job),
        suspected=suspected if job.state is JobState.RUNNING else "",
    )


def job_document(
    job: JobHistory,
    now: float,
    wait_of: WaitOf,
    beats: Mapping[str, HeartbeatFields] | None = None,
    *,
    suspected: str = "",
    output: str = "",
    checkpoints: str = "",
    url: str = "",
    restored_at: float | None = None,
) -> JobDocument:
    """Everything about one job: every instance with its state, node, pid, restarts, epoch, progress and last error.

    ``beats`` are the last heartbeats of its instances, the one thing that is in no event.
    """
    return document(
        JobDocument,
        job_summary(job, now, wait_of, suspected),
        job,
        job.submitted,
        roles=[_role(job, role) for role in job.spec.roles],
        instances=[
            instance_row(job, one, (beats or {}).get(str(one.id)))
            for one in job.instances.values()
            if one.pid or not one.now.retired
        ],
        streams=stream_rows(job.commit),
        master=_master(job),
        error=job_error(job),
        changes=job.edits,
        events=job.last_number,
        output=output,
        output_url=job.spec.output_url or "",
        checkpoints=checkpoints,
        upload=None if job.upload is None else document(UploadFields, job.upload, notes=list(job.upload.notes)),
        restored_at=restored_at,
        url=url,
    )


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
        "output_url": "",
        "checkpoints": "",
        "upload": None,
        "filename": "",
    }


def instance_row(job: JobHistory, one: InstanceHistory, beat: HeartbeatFields | None = None) -> InstanceRow:
    """One instance; a heartbeat of another epoch does not count."""
    bundle = job.bundle_of(one.id)
    placed = job.state.terminal or job.state.holds_devices
    return document(
        InstanceRow,
        one,
        one.now,
        one.id,
        instance=str(one.id),
        pid=(one.pid or None) if one.now.alive or one.state.terminal else None,
        standby=one.now.spare,
        node=one.node if placed else "",
        devices=bundle.devices if bundle is not None else (),
        progress=_progress_report(beat) if beat is not None and beat["epoch"] == one.now.epoch else None,
        ports={name: port_path(job.id, str(one.id), name) for name, _ in (beat or {}).get("ports", ())},
        error=None if one.error is None else document(LossFields, one.error, at=one.error_at),
    )


def port_path(job: JobId, instance: str, name: str) -> str:
    """Where the page opens a port of an instance."""
    return f"/ports/{job}/{instance}/{name}"


def _progress_report(beat: HeartbeatFields) -> ProgressReport:
    # One of an older version runs on over an upgrade, and does not send these.
    older: dict[str, float] = {"step_s": 0.0, "cpus": 0.0, "rss_bytes": 0}
    return document(
        ProgressReport,
        beat,
        older,
        n=beat["progress_n"],
        unit=beat["progress_unit"],
        idle_s=round(beat["idle_s"], 3),
        beat_age_s=round(beat["age_s"], 3),
        waits_for=[wait["target"] for wait in beat.get("waits", ())],
        weights=[dict(zip(_WEIGHTS, row)) for row in beat.get("weights", ())],
    )


_WEIGHTS = ("edge", "state", "held", "behind", "behind_s")
"""What a heartbeat says of a weights edge, in order."""


def _progress(job: JobHistory) -> Progress | None:
    if (commit := job.commit) is None:
        return None
    return document(Progress, commit, commit=commit.n, commits=job.commits, at=job.commit_at)


def _run_s(job: JobHistory, now: float) -> float:
    began = ((one, one.started_at) for one in job.attempts if one.started_at is not None)
    ran = (end - begin for one, start in began for begin, end in one.spans(start, one.ended_at or now))
    return round(sum(ran), 3)


def _role(job: JobHistory, role: RoleSpec) -> RoleRow:
    members = [one for one in job.instances.values() if one.id.role == role.name]
    return document(
        RoleRow,
        role,
        replicas=wanted_size(job.ctx, role),
        ready=sum(one.state is InstanceState.READY for one in members),
        restarts=sum(one.now.restarts for one in members),
        resources=role.res,
        loop=role.is_loop,
    )


def _master(job: JobHistory) -> MasterRow | None:
    master = job.master
    return None if master is None else document(MasterRow, master, epoch=master.master_epoch, since=job.master_at)


def job_error(job: JobHistory) -> JobError | None:
    """Why the job failed, and whose failure ended it; None for one that did not fail."""
    ended = job.ended
    if ended is None or ended.state is not JobState.FAILED:
        return None
    info, culprit = INFO[ended.reason], culprit_of(job)
    text, instance = ended.text or info.text, culprit.instance if culprit is not None else ""
    return document(JobError, ended, fault=info.fault, text=text, instance=instance)


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

    @property
    def ended(self) -> bool:
        """True when jobs that ended may be wanted."""
        return not ENDED_STATES.isdisjoint(self.states) if self.states else self.all

    def wants(self, job: JobHistory) -> bool:
        """True when the job passes every field."""
        return (
            (job.state.value in self.states if self.states else self.all or not job.state.terminal)
            and (not self.queue or job.queue == self.queue or job.queue.startswith(f"{self.queue}/"))
            and (not self.user or job.submitted.user == self.user)
            and (not self.name or job.spec.name == self.name)
            and (not self.text or self.text in f"{job.id} {job.submitted.user}".lower())
            and (not self.labels or set(self.labels) <= set(job.spec.labels))
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
    suspected: Callable[[JobHistory], str] = lambda _: "",
) -> JobList:
    """In the order of ``sort``. ``next`` is the cursor of the next page; what is submitted meanwhile moves nothing."""
    bad = [state for state in wanted.states if state not in FILTER_STATES]
    if bad:
        raise BadInput(f"unknown state {bad[0]!r}", hint=f"states: {', '.join(FILTER_STATES)}")
    limit = max(1, min(limit, LIMIT_MAX))
    after = _read_cursor(cursor, sort) if cursor else None
    keyed = ((_key(one, sort), one) for one in jobs if wanted.wants(one))
    fits = sorted((one for one in keyed if after is None or one[0] > after), key=itemgetter(0))
    page = fits[:limit]
    return document(
        JobList,
        items=[job_summary(one, now, wait_of, suspected(one)) for _, one in page],
        next=_write_cursor(page[-1][0], sort) if len(fits) > limit else None,
    )


Key = tuple[float, str, float, str]
"""The place of a job in a list: a number or a text of the order, the newest first, its uid."""


def _key(job: JobHistory, sort: JobSort) -> Key:
    rank, text = 0.0, ""
    match sort:
        case "priority":
            rank = -float(job.priority)
        case "name":
            text = job.spec.name
        case "state":
            text = job.state.value
        case "queue":
            text = job.queue
        case "submitted":
            pass
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
    return [document(StreamRow, cut, name=name, leased=cut["running"]) for name, cut in cuts.items()]
