"""Alerts: suspected hangs, recoveries, lost nodes, starving queues, limits below a job, a disk that is nearly full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf

from rota.cluster.core.admission import amount
from rota.cluster.core.capacity import OverLimit
from rota.service.models.base import document
from rota.service.models.cluster import AlertList, AlertRow, QueueRow
from rota.service.views.installation import Installation, NodeStatus
from rota.service.views.job_history import JobHistory, culprit_of_recovery
from rota.spec.codec import JsonObject
from rota.spec.errors import first_of
from rota.spec.ids import JobId
from rota.spec.resources import Health, counted
from rota.spec.states import JobState

HANG_MIN_S, HANG_MAX_S = 30.0, 120.0
"""An instance is suspected once a third of its limit has passed without progress, within these bounds."""
DAY_S = 86_400.0
GUARANTEE_MISSED_S, PENDING_LONG_S = 600.0, DAY_S
RECOVERED_S = 3600.0
"""How long a recovery is among the alerts."""
LOOP_RECOVERIES = 3
"""Recoveries of a job within that time from which on they are a warning."""
NAMED = 3
"""Jobs that the alert of a limit names."""
SEVERITIES = ("critical", "warning", "info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """A suspected hang: the instances that make no progress, and who waits for them. ``since`` is Unix time."""

    members: tuple[str, ...]
    text: str
    since: float


def suspicion(why: JsonObject, now: float) -> Suspicion | None:
    """The suspected hang in the wait graph of a master; None while every silence may still be one long step."""
    status = {one["name"]: one for one in why.get("vertices", ())}
    for root in (*why.get("culprits", ()), *why.get("suspects", ())):
        still_s = [status[name]["still_s"] for name in root["members"] if name in status]
        limits_s = [status[name]["limit_s"] or inf for name in root["members"] if name in status]
        if still_s and max(still_s) >= min(max(min(limits_s) / 3, HANG_MIN_S), HANG_MAX_S):
            return Suspicion(members=tuple(root["members"]), text=root["text"], since=now - max(still_s))
    return None


def alert_list(
    installation: Installation,
    *,
    now: float,
    suspicions: Mapping[JobId, Suspicion],
    beyond: Mapping[JobId, OverLimit],
    queues: Sequence[QueueRow],
    disk: Iterable[str],
    jobs: Sequence[JobHistory],
) -> AlertList:
    """Every alert, those without an acknowledgement first, then by severity, the newest first; of these ``jobs`` alone.

    ``id`` names an occurrence: an alert that ends and comes again has another one, and no acknowledgement yet.
    That of a disk names the day: a disk that is still full is shown again.
    """
    found = [
        *_of_jobs(jobs, suspicions, now),
        *_of_limits(jobs, beyond),
        *_of_nodes(installation.nodes.values()),
        *_of_queues(queues, now),
    ]
    found += [
        _row(f"disk:{now // DAY_S:.0f}", "DISK_NEARLY_FULL", "critical", None, one, hint="rota status") for one in disk
    ]
    for one in found:
        if (seen := installation.acknowledged.get(one["id"])) is not None:
            one.update(acknowledged_by=seen.by, acknowledged_at=seen.at_text, note=seen.text)
    found.sort(key=lambda one: one["since"] or "", reverse=True)
    found.sort(key=lambda one: (bool(one["acknowledged_by"]), SEVERITIES.index(one["severity"])))
    return document(AlertList, items=found)


def _row(
    id: str, code: str, severity: str, since: float | None, text: str, *, job: str = "", node: str = "", hint: str
) -> AlertRow:
    empty = {"acknowledged_by": "", "acknowledged_at": None, "note": ""}
    of = {"job": job or None, "node": node or None, "hint": hint}
    return document(AlertRow, empty, of, id=id, code=code, severity=severity, since=since, text=text)


def _of_jobs(jobs: Iterable[JobHistory], suspicions: Mapping[JobId, Suspicion], now: float) -> Iterator[AlertRow]:
    for job in jobs:
        if (one := suspicions.get(job.id)) is not None and job.state is JobState.RUNNING:
            id = f"hang:{job.id}:{','.join(one.members)}:{one.since:.0f}"
            text = f"{job.id} may hang: {one.text}"
            yield _row(id, "SUSPECTED_HANG", "critical", one.since, text, job=job.id, hint=f"rota why {job.id}")
        recent = [one for one in job.failures if one.ended_at is not None and now - one.ended_at < RECOVERED_S]
        often = len(recent) >= LOOP_RECOVERIES and job.state is not JobState.FAILED
        recent = recent if often else [one for one in recent if one.healed_by is not None]
        if not recent or (job.ended_at is not None and now - job.ended_at >= RECOVERED_S):
            continue
        last = recent[-1]
        who = culprit_of_recovery(last)
        times = (
            f"was restarted {counted(len(recent), 'time')} within an hour, the last time after the loss of "
            if often
            else "recovered from the loss of "
        )
        text = f"{job.id} {times}{who.instance}: {last.cause.reason}"
        code, severity = ("RECOVERS_OFTEN", "warning") if often else ("RECOVERED", "info")
        id = f"recovered:{job.id}:{len(job.failures)}"
        yield _row(id, code, severity, last.ended_at, text, job=job.id, hint=f"rota failures {job.id}")


def _of_limits(jobs: Iterable[JobHistory], beyond: Mapping[JobId, OverLimit]) -> Iterator[AlertRow]:
    """One for each limit, however many jobs it is below: with the first of them, and one for all users of a queue."""
    below: dict[tuple[str, str, int, bool], list[JobHistory]] = {}
    for job in jobs:
        if (over := beyond.get(job.id)) is not None:
            below.setdefault((over.queue, over.dim, over.allowed, over.user is not None), []).append(job)
    for (queue, dim, allowed, of_user), found in below.items():
        job, users = found[0].id, {beyond[one.id].user for one in found}
        whose = f"queue {queue}"
        if of_user:
            whose = f"{f'user {users.pop()}' if len(users) == 1 else 'each user'} in {whose}"
        most = amount(dim, max(beyond[one.id].asked for one in found))
        who = f"{job} asks {most} and starts"
        if len(found) > 1:
            names = first_of([one.id for one in found], NAMED)
            who = f"{counted(len(found), 'job')} ({names}) ask up to {most} each and start"
        text = f"{who} only with a higher limit: {whose} has {amount(dim, allowed)}"
        id, hint = f"limit:{job}:{queue}:{dim}:{allowed}", f"rota explain {job}"
        yield _row(id, "LIMIT_BELOW_JOB", "warning", found[0].waits_at, text, job=job, hint=hint)


def _of_nodes(nodes: Iterable[NodeStatus]) -> Iterator[AlertRow]:
    for one in nodes:
        if one.removed:
            continue
        id, node, hint = f"node:{one.node.id}:{one.marked_at:.0f}", str(one.node.id), "rota nodes"
        if one.lost:
            text = f"{node} is lost: {one.text}" if one.text else f"{node} is lost"
            yield _row(id, "NODE_LOST", "critical", one.marked_at, text, node=node, hint=hint)
        elif one.node.health in (Health.BAD, Health.SUSPECT):
            text = f"{node} is {one.node.health.value}" + (f": {one.text}" if one.text else "")
            yield _row(id, "NODE_BAD", "warning", one.marked_at, text, node=node, hint=hint)


def _of_queues(queues: Iterable[QueueRow], now: float) -> Iterator[AlertRow]:
    for one in queues:
        if one["oldest_wait_since"] is None:
            continue
        since = datetime.fromisoformat(one["oldest_wait_since"]).timestamp()
        missed = one["guaranteed_gpus"] is not None and one["used_gpus"] < one["guaranteed_gpus"]
        hint = f"rota ps --queue {one['path']} --state QUEUED"
        waiting = f"{counted(one['pending_jobs'], 'job')} of {one['path']} wait"
        if missed and now - since >= GUARANTEE_MISSED_S:
            text = f"{waiting} while it uses {one['used_gpus']:g} of {one['guaranteed_gpus']:g} guaranteed devices"
            yield _row(f"queue:{one['path']}:{since:.0f}", "QUEUE_STARVING", "warning", since, text, hint=hint)
        elif now - since >= PENDING_LONG_S:
            text = f"{waiting}, the first for more than a day"
            yield _row(f"queue:{one['path']}:{since:.0f}", "PENDING_LONG", "info", since, text, hint=hint)
