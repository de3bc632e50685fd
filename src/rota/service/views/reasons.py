"""Why a job is where it is, what failed, and who waits for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import nsmallest
from math import inf
from typing import Literal

from rota.cluster.core.explain import SchedulerExplanation
from rota.cluster.sim.forecast import Estimate
from rota.runtime.probe import master_part
from rota.service.models.base import Fields, Why, document
from rota.service.models.reasons import (
    Ahead,
    Blocker,
    Decision,
    DrainedRow,
    EstimateDocument,
    Explanation,
    FailureList,
    FailureRow,
    JobEnd,
    LossRow,
    PlacedOn,
    QueueUse,
    ReplacedMaster,
    RolePlan,
    StartForecast,
    StartingRow,
    WaitGraphDocument,
)
from rota.service.views.installation import Installation
from rota.service.views.job_history import JobHistory, Recovery, culprit_of, culprit_of_recovery
from rota.service.views.jobs import job_error, leaving, moved_text, phase, reason_of
from rota.spec import codec
from rota.spec.events import InstanceLost, PartReplaced
from rota.spec.ids import NodeId
from rota.spec.job import RoleSpec, SizedPlan
from rota.spec.reasons import INFO
from rota.spec.resources import Res, counted
from rota.spec.states import InstanceState, JobState

Dim = Literal["gpus", "cpus"]
BLOCKERS_MAX = 10
DECISIONS_MAX = 20
NODES_NAMED = 8


def explanation(
    job: JobHistory,
    installation: Installation,
    found: SchedulerExplanation | None = None,
    *,
    estimate: EstimateDocument | None = None,
    undecided: Why | None = None,
) -> Explanation:
    """The document. Of a job that waits now ``found`` is what the scheduler says of it, and ``estimate`` its start.

    ``undecided`` says why nothing is decided now; the estimate is then empty.
    """
    reason, text = reason_of(job)
    why = None if reason is None else Why(code=reason, text=text, fields=_fields(job))
    waiting = job.state in (JobState.SUBMITTED, JobState.QUEUED)
    if waiting and undecided is not None:
        why = undecided
    elif found is not None and (wait := found.why) is not None:
        why = Why(code=wait.reason, text=wait.text or INFO[wait.reason].text, fields=wait.fields)
    answer = found or SchedulerExplanation(job=job.id, state=job.state, starts_now=False, why=None)
    return document(
        Explanation,
        job,
        answer,
        job=job.id,
        phase=phase(job),
        waiting=waiting,
        queue=_queue(job, installation),
        why=why,
        ahead=document(Ahead, jobs=answer.ahead_jobs, gpus=answer.ahead_gpus),
        estimate=None if undecided else estimate,
        starts_now=answer.starts_now and not undecided,
        blocked_by=_blockers(job, installation) if waiting else (),
        placement=_placement(job),
        plans=[row for role in job.spec.roles for row in _plans(job, role)],
        decisions=_decisions(job),
        see=f"rota why {job.id}" if job.state is JobState.RUNNING else f"rota show {job.id}",
    )


def estimate_document(found: Estimate, age_s: float | None) -> EstimateDocument:
    """When a job would start, as people read it; ``age_s`` is how long ago that was played."""
    return document(EstimateDocument, found, age_s=None if age_s is None else round(age_s, 1))


def start_forecast(found: SchedulerExplanation, estimate: EstimateDocument | None) -> StartForecast:
    """What the scheduler says of a job that waits, or would say; a job that starts now needs no ``estimate``."""
    wait = found.why
    why = None if wait is None else Why(code=wait.reason, text=wait.text or INFO[wait.reason].text, fields=wait.fields)
    return document(
        StartForecast,
        found,
        why=why,
        ahead=document(Ahead, jobs=found.ahead_jobs, gpus=found.ahead_gpus),
        estimate=None if found.starts_now else estimate,
    )


def _fields(job: JobHistory) -> Fields:
    waits = job.state is JobState.QUEUED and job.waits is not None
    return dict(job.waits.fields) if waits and job.waits is not None else {}


def _queue(job: JobHistory, installation: Installation) -> QueueUse:
    queue = next((queue for queue in installation.queues if queue.path == job.queue), None)
    guaranteed, limit = (None, None) if queue is None else (queue.guaranteed, queue.limit)
    gpus, cpus = used_in(installation, job.queue)
    return document(
        QueueUse,
        path=job.queue,
        used=gpus,
        used_cpus=cpus,
        guaranteed=stated(guaranteed, "gpus"),
        limit=stated(limit, "gpus"),
        guaranteed_cpus=stated(guaranteed, "cpus"),
        limit_cpus=stated(limit, "cpus"),
    )


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
    """Jobs that hold devices now, the soonest to end first: by its grace where it is stopping, or its time limit."""
    holding = (
        one for one in installation.live.values() if one.id != job.id and one.state.holds_devices and one.attempts
    )
    soonest = nsmallest(BLOCKERS_MAX, holding, key=lambda one: (_ends(one), one.id))
    return [
        document(
            Blocker,
            job=one.id,
            gpus=sum(bundle.res.gpus for bundle in placement.bundles),
            cpus=sum(bundle.res.cpus for bundle in placement.bundles),
            ends=ends if ends < inf else None,
            basis="stopping" if one.ctx.ending is not None else "time_limit" if ends < inf else "unknown",
        )
        for one in soonest
        if (placement := one.placement) is not None
        for ends in [_ends(one)]
    ]


def _ends(job: JobHistory) -> float:
    if (ending := job.ctx.ending) is not None:
        return job.since + ending.grace_s
    limit_s = job.spec.time_limit_s
    return inf if limit_s is None else job.attempts[-1].admitted_at + limit_s - job.ctx.used_s


def _placement(job: JobHistory) -> PlacedOn | None:
    if job.placement is None or not job.state.holds_devices:
        return None
    return document(PlacedOn, job.placement, why=job.attempts[-1].why)


def _plans(job: JobHistory, role: RoleSpec) -> list[RolePlan]:
    """The plan of each size of a role; of the one that runs also where it lies and why it is this one."""
    active = job.ctx.active_of(role.name) if job.state.holds_devices else ()
    size = next((one.replicas for one in role.plans if one.replicas == len(active)), 0)
    nodes = Counter(bundle.node for one in active if (bundle := job.bundle_of(one.id)) is not None)
    return [
        document(
            RolePlan,
            one,
            role=role.name,
            current=one.replicas == size,
            placed=_placed(job, role, one, nodes) if one.replicas == size else "",
        )
        for one in role.plans
    ]


def _placed(job: JobHistory, role: RoleSpec, plan: SizedPlan, nodes: Mapping[NodeId, int]) -> str:
    """Where the plan that runs lies, the rule that it keeps, and why it is this size: what the others would take."""
    where = ", ".join(f"{node} ({count})" for node, count in sorted(nodes.items())[:NODES_NAMED])
    more = f" and {len(nodes) - NODES_NAMED} more nodes" if len(nodes) > NODES_NAMED else ""
    rule = f"; each {plan.together} in a row must be on one node" if plan.together > 1 and len(role.plans) == 1 else ""
    text = f"Runs with {counted(plan.replicas, 'instance')} on {where}{more}{rule}."
    if chosen := job.attempts[-1].why.get("choice"):
        return f"{text} Started as {chosen}"
    others = [one for one in role.plans if one is not plan and one.step_s]
    if not plan.step_s or not others:
        return text
    told = (
        f"{counted(one.replicas, 'instance')} {one.step_s:.3g} s a step, "
        + ("slower" if one.step_s > plan.step_s else f"for {one.replicas - plan.replicas} more")
        for one in others
    )
    return f"{text} Predicted {plan.step_s:.3g} s a step; its other sizes: {'; '.join(told)}."


def _decisions(job: JobHistory) -> list[Decision]:
    rows: list[tuple[float, Decision]] = []
    for one in job.attempts:
        rows.append((one.admitted_at, _decision(one.admitted_at, "admitted", attempt=one.attempt, why=one.why)))
        if (ended_at := one.ended_at) is not None and one.reason is not None:
            text = moved_text(one.reason, one.for_job, one.text)
            row = _decision(ended_at, "attempt ended", reason=one.reason, text=text, attempt=one.attempt)
            rows.append((ended_at, row))
    if (waits := job.waits) is not None:
        fields = codec.to_json_value(waits.fields)
        rows.append(
            (job.waits_at, _decision(job.waits_at, "waits", reason=waits.reason, text=waits.text, fields=fields))
        )
    rows.sort(key=lambda row: row[0])
    return [row for _, row in rows[-DECISIONS_MAX:]]


def _decision(at: float, decision: str, **more: object) -> Decision:
    return document(Decision, at=at, decision=decision, **more)


def failure_list(job: JobHistory, *, attempt: int | None = None, replaced: Iterable[PartReplaced] = ()) -> FailureList:
    """Every recovery of the job in order, and the end if the job failed; ``first`` is the culprit of ``culprit_of``.

    ``open_losses`` no recovery has begun for: they wait for a verdict, or the job ended with them. ``masters`` are
    those of the ``replaced`` parts that were the master of this job: they cost it nothing, and count as no failure.
    """
    items = [_item(n, one) for n, one in enumerate(job.failures, 1) if attempt in (None, one.attempt)]
    first = culprit_of(job, attempt=attempt)
    end = job_error(job)
    return document(
        FailureList,
        job=job.id,
        state=job.state,
        first=None if first is None else _loss(first.at, first.loss, instance=first.instance),
        items=items,
        end=None if end is None else document(JobEnd, end, at=job.ended_at),
        open_losses=[_loss(at, loss) for at, loss in job.unclaimed],
        drains=[
            document(DrainedRow, one, text=leaving(job) or one.text if one.outcome == "waits" else one.text)
            for one in job.drains
            if attempt in (None, one.attempt)
        ],
        masters=[document(ReplacedMaster, one, at=one.found_at) for one in replaced if one.part == master_part(job.id)],
    )


def _item(n: int, one: Recovery) -> FailureRow:
    cause, info, ended_at = one.cause, INFO[one.cause.reason], one.ended_at
    return document(
        FailureRow,
        one,
        cause,
        n=n,
        failover=one.number,
        fault=info.fault,
        text=cause.text or info.text,
        instance=culprit_of_recovery(one).instance,
        scope=[{"instance": f"{role}/{rank}", "epoch": epoch} for role, rank, epoch in one.scope],
        detect_to_decide_s=round(one.decided_at - one.seen_at, 3),
        seconds=None if ended_at is None else round(ended_at - one.seen_at, 3),
        healed=one.healed_by is not None,
        losses=[_loss(at, loss) for at, loss in one.losses],
    )


def _loss(at: float, loss: InstanceLost, *, instance: str = "") -> LossRow:
    return document(LossRow, loss, at=at, instance=instance or f"{loss.role}/{loss.rank}", process_alive=loss.alive)


def why_document(job: JobHistory, live: Mapping[str, object]) -> WaitGraphDocument:
    """``WaitGraph``. ``live`` is the answer of the master, empty without one: then only the log is known.

    ``culprits`` are past their limit on progress and hold up the rest, ``suspects`` would be if the limit were short;
    each has ``members`` (several wait for each other), ``text`` and ``waiters``. ``stacks`` maps an instance to text.
    ``slow`` members take much longer for a step than their role, ``dropped`` ones use far fewer cores than at work.
    """
    numbered = [] if job.state.terminal else list(enumerate(job.failures, 1))  # how it ended is in FailureList
    opened = next((one for one in reversed(numbered) if one[1].ended_at is None), None)
    return document(
        WaitGraphDocument,
        live,
        _NO_MASTER,
        job=job.id,
        state=job.state,
        live=bool(live),
        items=[
            document(StartingRow, one, instance=str(one.id))
            for one in job.instances.values()
            if one.state not in (InstanceState.READY, InstanceState.GONE)
        ],
        cause=None if opened is None else _item(*opened),
        see=f"rota explain {job.id}" if job.state is JobState.QUEUED else f"rota failures {job.id}",
    )


_NO_MASTER: Mapping[str, object] = {
    **dict.fromkeys(("culprits", "suspects", "waits", "slow", "dropped", "vertices"), ()),
    "stacks": {},
}
"""What a master that cannot be asked leaves empty."""
