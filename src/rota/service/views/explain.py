"""Why a job is where it is: one document for a waiting, a running and an ended job."""

from __future__ import annotations

from heapq import nsmallest
from math import inf
from typing import Literal, cast

from rota.cluster.core.explain import Explanation as SchedulerAnswer
from rota.cluster.sim.forecast import Estimate
from rota.service.models.base import Fields, Why
from rota.service.models.reasons import (
    Blocker,
    Decision,
    EstimateDocument,
    Explanation,
    PlacedOn,
    QueueUse,
    StartChange,
    VictimRow,
)
from rota.service.views.installation import Installation
from rota.service.views.jobs import API, moved_text, phase, reason_of, when
from rota.service.views.story import JobStory
from rota.spec import codec
from rota.spec.reasons import INFO
from rota.spec.resources import Res
from rota.spec.states import JobState

Dim = Literal["gpus", "cpus"]
BLOCKERS_MAX = 10
DECISIONS_MAX = 20


def explanation(
    story: JobStory,
    installation: Installation,
    found: SchedulerAnswer | None = None,
    *,
    estimate: EstimateDocument | None = None,
    undecided: Why | None = None,
) -> Explanation:
    """The document. Of a job that waits now ``found`` is what the scheduler says of it, and ``estimate`` its start.

    ``undecided`` says why nothing is decided at all now; then there is no estimate.
    """
    reason, text = reason_of(story)
    why = None if reason is None else Why(code=reason, text=text, fields=_fields(story))
    if found is not None and undecided is not None:
        why = undecided
    elif found is not None and (wait := found.why) is not None:
        why = Why(code=wait.reason, text=wait.text or INFO[wait.reason].text, fields=wait.fields)
    waiting = story.state in (JobState.SUBMITTED, JobState.QUEUED)
    return {
        "api": API,
        "kind": "Explanation",
        "job": story.id,
        "state": story.state.value,
        "since": when(story.since),
        "phase": phase(story),
        "waiting": waiting,
        "queue": _queue(story, installation),
        "why": why,
        "tally": [{"constraint": one.constraint, "nodes_left": one.nodes_left} for one in found.tally] if found else [],
        "ahead": {"jobs": found.ahead_jobs if found else 0, "gpus": found.ahead_gpus if found else 0},
        "would_start_now_with": cast("list[StartChange]", list(found.would_start_now_with)) if found else [],
        "victims_if_preempted": cast("list[VictimRow]", list(found.victims_if_preempted)) if found else [],
        "estimate": None if undecided else estimate,
        "starts_now": found is not None and found.starts_now and not undecided,
        "blocked_by": _blockers(story, installation) if waiting else [],
        "placement": _placement(story),
        "plans": [
            {"role": role.name, "replicas": one.replicas, "why": one.why}
            for role in story.spec.roles
            for one in role.plans
        ],
        "decisions": _decisions(story),
        "see": f"rota why {story.id}" if story.state is JobState.RUNNING else f"rota show {story.id}",
    }


def estimate_document(found: Estimate, age_s: float | None) -> EstimateDocument:
    """When a job would start, as people read it; ``age_s`` is how long ago that was played."""
    age_s = None if age_s is None else round(age_s, 1)
    return {"p50": when(found.p50), "p90": when(found.p90), "basis": found.basis, "age_s": age_s}


def _fields(story: JobStory) -> Fields:
    waits = story.state is JobState.QUEUED and story.waits is not None
    return dict(story.waits.fields) if waits and story.waits is not None else {}


def _queue(story: JobStory, installation: Installation) -> QueueUse:
    queue = next((queue for queue in installation.queues if queue.path == story.queue), None)
    guaranteed, limit = (None, None) if queue is None else (queue.guaranteed, queue.limit)
    gpus, cpus = used_in(installation, story.queue)
    return {
        "path": story.queue,
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
        for story in installation.live.values()
        if story.state.holds_devices
        and (story.queue == queue or story.queue.startswith(f"{queue}/"))
        and (placement := story.placement) is not None
        for bundle in placement.bundles
    ]
    return sum(res.gpus for res in held), sum(res.cpus for res in held)


def _blockers(story: JobStory, installation: Installation) -> list[Blocker]:
    """Jobs that hold devices now, the soonest to end by its time limit first."""
    holding = (
        one for one in installation.live.values() if one.id != story.id and one.state.holds_devices and one.attempts
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


def _ends(story: JobStory) -> float:
    limit_s = story.spec.time_limit_s
    return inf if limit_s is None else story.attempts[-1].admitted_at + limit_s


def _placement(story: JobStory) -> PlacedOn | None:
    if story.placement is None or not story.state.holds_devices:
        return None
    return {"nodes": list(story.placement.nodes), "why": story.attempts[-1].why}


def _decisions(story: JobStory) -> list[Decision]:
    rows: list[tuple[float, Decision]] = []
    for one in story.attempts:
        at = one.admitted_at
        rows.append((at, {"at": when(at), "decision": "admitted", "attempt": one.attempt, "why": one.why}))
        if (ended_at := one.ended_at) is not None and one.reason is not None:
            text = moved_text(one.reason, one.for_job)
            ended: Decision = {"at": when(ended_at), "decision": "attempt ended", "reason": one.reason, "text": text}
            rows.append((ended_at, {**ended, "attempt": one.attempt}))
    if (waits := story.waits) is not None:
        fields = codec.to_json_value(waits.fields)
        at, reason = story.waits_at, waits.reason
        rows.append((at, Decision(at=when(at), decision="waits", reason=reason, text=waits.text, fields=fields)))
    rows.sort(key=lambda row: row[0])
    return [row for _, row in rows[-DECISIONS_MAX:]]
