"""Why a job is where it is, what failed, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import nsmallest
from math import inf
from typing import Any, Literal, cast

from rota.cluster.core.explain import Explanation as SchedulerAnswer
from rota.cluster.sim.forecast import Estimate
from rota.runtime.probe import master_part
from rota.service.models.base import Fields, Why
from rota.service.models.reasons import (
    Blocker,
    Decision,
    EstimateDocument,
    Explanation,
    FailureList,
    FailureRow,
    LossRow,
    PlacedOn,
    QueueUse,
    StartChange,
    VictimRow,
    WaitGraphDocument,
)
from rota.service.views.installation import Installation
from rota.service.views.job_history import JobHistory, Recovery, culprit_of, culprit_of_recovery
from rota.service.views.jobs import API, end_document, loss_document, moved_text, phase, reason_of, when
from rota.spec import codec
from rota.spec.events import InstanceLost, PartReplaced
from rota.spec.reasons import INFO
from rota.spec.resources import Res
from rota.spec.states import JobState

Dim = Literal["gpus", "cpus"]
BLOCKERS_MAX = 10
DECISIONS_MAX = 20


def explanation(
    job: JobHistory,
    installation: Installation,
    found: SchedulerAnswer | None = None,
    *,
    estimate: EstimateDocument | None = None,
    undecided: Why | None = None,
) -> Explanation:
    """The document. Of a job that waits now ``found`` is what the scheduler says of it, and ``estimate`` its start.

    ``undecided`` says why nothing is decided at all now; then there is no estimate.
    """
    reason, text = reason_of(job)
    why = None if reason is None else Why(code=reason, text=text, fields=_fields(job))
    if found is not None and undecided is not None:
        why = undecided
    elif found is not None and (wait := found.why) is not None:
        why = Why(code=wait.reason, text=wait.text or INFO[wait.reason].text, fields=wait.fields)
    waiting = job.state in (JobState.SUBMITTED, JobState.QUEUED)
    return {
        "api": API,
        "kind": "Explanation",
        "job": job.id,
        "state": job.state.value,
        "since": when(job.since),
        "phase": phase(job),
        "waiting": waiting,
        "queue": _queue(job, installation),
        "why": why,
        "tally": [{"constraint": one.constraint, "nodes_left": one.nodes_left} for one in found.tally] if found else [],
        "ahead": {"jobs": found.ahead_jobs if found else 0, "gpus": found.ahead_gpus if found else 0},
        "would_start_now_with": cast("list[StartChange]", list(found.would_start_now_with)) if found else [],
        "victims_if_preempted": cast("list[VictimRow]", list(found.victims_if_preempted)) if found else [],
        "estimate": None if undecided else estimate,
        "starts_now": found is not None and found.starts_now and not undecided,
        "blocked_by": _blockers(job, installation) if waiting else [],
        "placement": _placement(job),
        "plans": [
            {"role": role.name, "replicas": one.replicas, "why": one.why}
            for role in job.spec.roles
            for one in role.plans
        ],
        "decisions": _decisions(job),
        "see": f"rota why {job.id}" if job.state is JobState.RUNNING else f"rota show {job.id}",
    }


def estimate_document(found: Estimate, age_s: float | None) -> EstimateDocument:
    """When a job would start, as people read it; ``age_s`` is how long ago that was played."""
    age_s = None if age_s is None else round(age_s, 1)
    return {"p50": when(found.p50), "p90": when(found.p90), "basis": found.basis, "age_s": age_s}


def _fields(job: JobHistory) -> Fields:
    waits = job.state is JobState.QUEUED and job.waits is not None
    return dict(job.waits.fields) if waits and job.waits is not None else {}


def _queue(job: JobHistory, installation: Installation) -> QueueUse:
    queue = next((queue for queue in installation.queues if queue.path == job.queue), None)
    guaranteed, limit = (None, None) if queue is None else (queue.guaranteed, queue.limit)
    gpus, cpus = used_in(installation, job.queue)
    return {
        "path": job.queue,
        "used": gpus,
        "used_cpus": cpus,
        "guaranteed": stated(guaranteed, "gpus"),
        "limit": stated(limit, "gpus"),
        "guaranteed_cpus": stated(guaranteed, "cpus"),
        "limit_cpus": stated(limit, "cpus"),
    }


def stated(res: Res | None, dim: Dim) -> float | None:
    """What a guarantee or limit says of devices or cores; None where it says nothing, which is kept as zero."""
    return getattr(res, dim) or None if res else None


def used_in(installation: Installation, queue: str) -> tuple[float, float]:
    """Devices and cores that jobs of a queue, and of the queues below it, hold now."""
    held = [
        bundle.res
        for job in installation.live.values()
        if job.state.holds_devices
        and (job.queue == queue or job.queue.startswith(f"{queue}/"))
        and (placement := job.placement) is not None
        for bundle in placement.bundles
    ]
    return sum(res.gpus for res in held), sum(res.cpus for res in held)


def _blockers(job: JobHistory, installation: Installation) -> list[Blocker]:
    """Jobs that hold devices now, the soonest to end by its time limit first."""
    holding = (
        one for one in installation.live.values() if one.id != job.id and one.state.holds_devices and one.attempts
    )
    soonest = nsmallest(BLOCKERS_MAX, holding, key=lambda one: (_ends(one), one.id))
    return [
        {
            "job": one.id,
            "gpus": sum(bundle.res.gpus for bundle in placement.bundles),
            "cpus": sum(bundle.res.cpus for bundle in placement.bundles),
            "ends": None if one.spec.time_limit_s is None else when(_ends(one)),
            "basis": "time_limit" if one.spec.time_limit_s is not None else "unknown",
        }
        for one in soonest
        if (placement := one.placement) is not None
    ]


def _ends(job: JobHistory) -> float:
    limit_s = job.spec.time_limit_s
    return inf if limit_s is None else job.attempts[-1].admitted_at + limit_s


def _placement(job: JobHistory) -> PlacedOn | None:
    if job.placement is None or not job.state.holds_devices:
        return None
    return {"nodes": list(job.placement.nodes), "why": job.attempts[-1].why}


def _decisions(job: JobHistory) -> list[Decision]:
    rows: list[tuple[float, Decision]] = []
    for one in job.attempts:
        at = one.admitted_at
        rows.append((at, {"at": when(at), "decision": "admitted", "attempt": one.attempt, "why": one.why}))
        if (ended_at := one.ended_at) is not None and one.reason is not None:
            text = moved_text(one.reason, one.for_job)
            ended: Decision = {"at": when(ended_at), "decision": "attempt ended", "reason": one.reason, "text": text}
            rows.append((ended_at, {**ended, "attempt": one.attempt}))
    if (waits := job.waits) is not None:
        fields = codec.to_json_value(waits.fields)
        at, reason = job.waits_at, waits.reason
        rows.append((at, Decision(at=when(at), decision="waits", reason=reason, text=waits.text, fields=fields)))
    rows.sort(key=lambda row: row[0])
    return [row for _, row in rows[-DECISIONS_MAX:]]


def failure_list(job: JobHistory, *, attempt: int | None = None, replaced: Iterable[PartReplaced] = ()) -> FailureList:
    """Every recovery of the job in order, and the end if the job failed; ``first`` is the culprit of ``culprit_of``.

    ``open_losses`` no recovery has begun for: they wait for a verdict, or the job ended with them. ``masters`` are
    those of the ``replaced`` parts that were the master of this job: they cost it nothing, and count as no failure.
    """
    items = [_item(n, one) for n, one in enumerate(job.failures, 1) if attempt in (None, one.attempt)]
    open_losses = [_loss(at, loss) for at, loss in job.unclaimed]
    first = culprit_of(job, attempt=attempt)
    return {
        "api": API,
        "kind": "FailureList",
        "job": job.id,
        "state": job.state.value,
        "first": None if first is None else {**_loss(first.at, first.loss), "instance": first.instance},
        "items": items,
        "end": None if (end := end_document(job)) is None else {"at": when(job.ended_at), **end},
        "open_losses": open_losses,
        "masters": [
            {"pid": one.pid, "text": one.text, "at": when(one.found_at)}
            for one in replaced
            if one.part == master_part(job.id)
        ],
        "next": None,
    }


def _item(n: int, one: Recovery) -> FailureRow:
    cause = one.cause
    return {
        "n": n,
        "failover": one.number,
        "attempt": one.attempt,
        "level": one.level.value,
        "moved_from": None if one.moved_from is None else one.moved_from.value,
        "move_reason": one.move_reason,
        "reason": cause.reason,
        "fault": INFO[cause.reason].fault,
        "text": cause.text or INFO[cause.reason].text,
        "role": cause.role,
        "rank": cause.rank,
        "instance": culprit_of_recovery(one).instance,
        "traceback": cause.traceback,
        "scope": [{"instance": f"{role}/{rank}", "epoch": epoch} for role, rank, epoch in one.scope],
        "restore": one.restore,
        "restored_from": one.restored_from,
        "lost_commits": one.lost_commits,
        "seen_at": when(one.seen_at),
        "decided_at": when(one.decided_at),
        "ended_at": when(one.ended_at),
        "detect_to_decide_s": round(one.decided_at - one.seen_at, 3),
        "seconds": None if one.ended_at is None else round(one.ended_at - one.seen_at, 3),
        "joined_by": one.joined_by,
        "healed": one.ended_at is not None,
        "losses": [_loss(at, loss) for at, loss in one.losses],
    }


def _loss(at: float, loss: InstanceLost) -> LossRow:
    return {"instance": f"{loss.role}/{loss.rank}", **loss_document(at, loss), "process_alive": loss.alive}


def why_document(job: JobHistory, live: Mapping[str, Any]) -> WaitGraphDocument:
    """``WaitGraph``. ``live`` is what the master tells, empty when there is none to ask: then only the log speaks.

    ``culprits`` are past their limit on progress and hold up the rest, ``suspects`` would be if the limit were short;
    each has ``members`` (several wait for each other), ``text`` and ``waiters``. ``stacks`` maps an instance to text.
    ``slow`` members take much longer for a step than their role, ``dropped`` ones use far fewer cores than at work.
    """
    open_failover = next((one for one in reversed(job.failures) if one.ended_at is None), None)
    cause = None if open_failover is None else failure_list(job)["items"][job.failures.index(open_failover)]
    return {
        "api": API,
        "kind": "WaitGraph",
        "job": job.id,
        "state": job.state.value,
        "live": bool(live),
        "culprits": live.get("culprits", []),
        "suspects": live.get("suspects", []),
        "waits": live.get("waits", []),
        "slow": live.get("slow", []),
        "dropped": live.get("dropped", []),
        "vertices": live.get("vertices", []),
        "stacks": live.get("stacks", {}),
        "items": [
            {"instance": str(one.id), "state": one.state.value, "since": when(one.since)}
            for one in job.instances.values()
            if one.state.value not in ("READY", "GONE")
        ],
        "cause": cause,
        "see": f"rota explain {job.id}" if job.state is JobState.QUEUED else f"rota failures {job.id}",
        "next": None,
    }
