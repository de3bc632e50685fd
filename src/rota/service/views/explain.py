"""Why a job is where it is: one document for a waiting, a running and an ended job."""

from __future__ import annotations

from heapq import nsmallest
from math import inf
from typing import Any, Literal

from rota.service.views.installation import Installation
from rota.service.views.jobs import API, moved_text, phase, reason_of, when
from rota.service.views.story import JobStory
from rota.spec import codec
from rota.spec.resources import Res
from rota.spec.states import JobState

Dim = Literal["gpus", "cpus"]
BLOCKERS_MAX = 10
DECISIONS_MAX = 20


def explanation(story: JobStory, installation: Installation, found: dict[str, Any] | None) -> dict[str, Any]:
    """The document; ``found`` is what the scheduler says of a job that waits now, None for all others."""
    reason, text = reason_of(story)
    why = None if reason is None else {"code": reason, "text": text, "fields": _fields(story)}
    base: dict[str, Any] = {
        "why": why,
        "tally": [],
        "ahead": {"jobs": 0, "gpus": 0},
        "would_start_now_with": [],
        "victims_if_preempted": [],
        "estimate": None,
        "starts_now": False,
    }
    if found is not None:
        base |= {key: found[key] for key in base if key in found and found[key] is not None}
        base["why"] = found["why"] or why
        if base["estimate"] is not None:
            base["estimate"] |= {name: when(base["estimate"][name]) for name in ("p50", "p90")}
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
        **base,
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


def _fields(story: JobStory) -> dict[str, Any]:
    waits = story.state is JobState.QUEUED and story.waits is not None
    return dict(story.waits.fields) if waits and story.waits is not None else {}


def _queue(story: JobStory, installation: Installation) -> dict[str, Any]:
    from_tree = next((queue for queue in installation.queues if queue.path == story.queue), None)
    promised = [(name, getattr(from_tree, name, None)) for name in ("guaranteed", "limit")]
    gpus, cpus = used_in(installation, story.queue)
    return {
        "path": story.queue,
        "used": gpus,
        "used_cpus": cpus,
        **{name: stated(res, "gpus") for name, res in promised},
        **{f"{name}_cpus": stated(res, "cpus") for name, res in promised},
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


def _blockers(story: JobStory, installation: Installation) -> list[dict[str, Any]]:
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


def _placement(story: JobStory) -> dict[str, Any] | None:
    if story.placement is None or not story.state.holds_devices:
        return None
    return {"nodes": list(story.placement.nodes), "why": story.attempts[-1].why}


def _decisions(story: JobStory) -> list[dict[str, Any]]:
    rows: list[tuple[float, dict[str, Any]]] = []
    for one in story.attempts:
        rows.append((one.admitted_at, {"decision": "admitted", "attempt": one.attempt, "why": one.why}))
        if one.ended_at is not None and one.reason is not None:
            ended = {"decision": "attempt ended", "reason": one.reason, "text": moved_text(one.reason, one.for_job)}
            rows.append((one.ended_at, ended | {"attempt": one.attempt}))
    if story.waits is not None:
        waits = {"decision": "waits", "reason": story.waits.reason, "text": story.waits.text}
        rows.append((story.waits_at, waits | {"fields": codec.to_json_value(story.waits.fields)}))
    rows.sort(key=lambda row: row[0])
    return [{"at": when(at), **row} for at, row in rows[-DECISIONS_MAX:]]
