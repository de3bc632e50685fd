"""Who used what: jobs, devices and cores over time, waiting and restarts, by user, queue, job or kind of device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

from rota.cluster.sim.report import jain, spread_of
from rota.service.models.base import Spread
from rota.service.models.cluster import UsageReport, UsageRow
from rota.service.views.jobs import API, when
from rota.service.views.story import JobStory
from rota.spec.errors import BadInput
from rota.spec.ids import NodeId
from rota.spec.resources import Node
from rota.spec.states import JobState

GROUPS = ("user", "queue", "job", "gpu_type")


@dataclass(slots=True)
class _Sum:
    jobs: set[str] = field(default_factory=set)
    ends: dict[str, int] = field(default_factory=lambda: {"SUCCEEDED": 0, "FAILED": 0, "CANCELLED": 0})
    gpu_s: float = 0.0
    cpu_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    responses_s: list[float] = field(default_factory=list)
    restarts: int = 0


def usage_report(
    stories: Iterable[JobStory], nodes: Iterable[Node], *, by: str, since: float, now: float
) -> UsageReport:
    """``Report`` of the time from ``since`` to ``now``, in Unix seconds: the devices that attempts held meanwhile.

    A job counts where it held devices, waited or ended in that time. ``wait_s`` is from submit to the first admission,
    ``response_s`` from submit to when it first ran, with all instances ready, whichever attempt that was.
    Devices of gangs that were granted to a running job later are not counted.
    """
    if by not in GROUPS:
        raise BadInput(f"by={by}: not a group", hint=f"one of {', '.join(GROUPS)}")
    types = {(node.id, device.index): device.type for node in nodes for device in node.devices}
    sums: defaultdict[str, _Sum] = defaultdict(_Sum)
    users: defaultdict[str, float] = defaultdict(float)
    for story in stories:
        if story.ended_at is not None and story.ended_at < since:
            continue
        key = _key(story, by)
        held = _held(story, lambda node, index: types.get((node, index), "unknown"), since, now)
        users[story.submitted.user] += sum(gpu_s for gpu_s, _ in held.values())
        groups = held if by == "gpu_type" else {key: tuple(map(sum, zip(*held.values()))) if held else (0.0, 0.0)}
        for group, (gpu_s, cpu_s) in groups.items():
            one = sums[group]
            one.jobs.add(story.id)
            one.gpu_s, one.cpu_s = one.gpu_s + gpu_s, one.cpu_s + cpu_s
            _count(one, story)
    rows = [_row(by, key, one) for key, one in sorted(sums.items(), key=lambda item: (-item[1].gpu_s, item[0]))]
    return {
        "api": API,
        "kind": "Report",
        "by": by,
        "since": when(since),
        "until": when(now),
        "items": rows,
        "total": {"gpu_hours": _hours(sum(users.values())), "fairness_jain": jain(list(users.values()))},
        "next": None,
    }


def _key(story: JobStory, by: str) -> str:
    return {"user": story.submitted.user, "queue": story.queue, "job": str(story.id)}.get(by, "")


def _held(
    story: JobStory, type_of: Callable[[NodeId, int], str], since: float, now: float
) -> dict[str, tuple[float, float]]:
    """Device and core seconds by kind of device; cores of what has no device are under ``cpu``."""
    found: defaultdict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for attempt in story.attempts:
        seconds = min(attempt.ended_at or now, now) - max(attempt.admitted_at, since)
        if seconds <= 0:
            continue
        for bundle in attempt.placement.bundles:
            kind = type_of(bundle.node, bundle.devices[0]) if bundle.devices else "cpu"
            gpu_s, cpu_s = found[kind]
            found[kind] = (gpu_s + bundle.res.gpus * seconds, cpu_s + bundle.res.cpus * seconds)
    return dict(found)


def _count(one: _Sum, story: JobStory) -> None:
    if story.attempts:
        one.waits_s.append(story.attempts[0].admitted_at - story.submitted_at)
    ran_at = next((attempt.running_at for attempt in story.attempts if attempt.running_at is not None), None)
    if ran_at is not None:
        one.responses_s.append(ran_at - story.submitted_at)
    one.restarts += sum(instance.restarts for instance in story.instances.values())
    if story.state.terminal:
        one.ends[JobState(story.state).value] += 1


def _row(by: str, key: str, one: _Sum) -> UsageRow:
    row: UsageRow = {
        "jobs": len(one.jobs),
        "succeeded": one.ends["SUCCEEDED"],
        "failed": one.ends["FAILED"],
        "cancelled": one.ends["CANCELLED"],
        "gpu_hours": _hours(one.gpu_s),
        "cpu_hours": _hours(one.cpu_s),
        "wait_s": _spread(one.waits_s),
        "response_s": _spread(one.responses_s),
        "restarts": one.restarts,
    }
    return cast("UsageRow", {by: key, **row})


def _spread(values: list[float]) -> Spread:
    return cast("Spread", spread_of(values))


def _hours(seconds: float) -> float:
    return round(seconds / 3600, 4)
