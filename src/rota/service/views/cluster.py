"""Nodes, queues, the service itself and who used what, as documents."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate

from rota.cluster.core.admission import amount
from rota.cluster.core.state import State
from rota.cluster.sim.report import jain, spread_of
from rota.runtime.clock import iso
from rota.runtime.node import FAULTS_LABEL
from rota.service.models.base import Why, document
from rota.service.models.cluster import (
    ClusterTotals,
    DeviceRow,
    DrainState,
    Heat,
    HeatNode,
    LimitPassed,
    NodeList,
    NodeRow,
    QueueChange,
    QueueRow,
    QueueTree,
    UsageHistory,
    UsageMoment,
    UsageReport,
    UsageRow,
    UsageTotal,
)
from rota.service.views.installation import Installation, NodeStatus
from rota.service.views.job_history import JobHistory
from rota.service.views.reasons import stated, used_in
from rota.spec import codec
from rota.spec.errors import BadInput, first_of
from rota.spec.ids import NodeId
from rota.spec.queue import Queue
from rota.spec.reasons import Reason
from rota.spec.resources import CORES_LABEL, Health, Node, Res, counted, format_size
from rota.spec.states import JobState

CHANGES_NAMED = 5
"""Changes of a tree of queues that one line names."""


def no_usable_node(installation: Installation, unusable: Sequence[Mapping[str, str]]) -> Why | None:
    """Why the cluster has no node: what each machine of the engine lacks, and the commands; None where it has one.

    ``unusable`` has ``machine``, ``why`` and ``remedy`` of each.
    """
    if any(True for _ in installation.usable_nodes()):
        return None
    parts = [f"{one['machine']}: {one['why']} ({one['remedy']})" for one in unusable]
    text = f"no machine can be used: {'; '.join(parts)}" if parts else "the engine has no machine; see: rota status"
    return Why(code=Reason.NO_USABLE_NODE, text=text, fields={"machines": [dict(one) for one in unusable]})


def node_list(installation: Installation) -> NodeList:
    """Every node with its devices, who holds them, and its fitness."""
    held = _holders(installation)
    items = [_node(status, held[status.node.id]) for status in _there(installation, held)]
    return document(NodeList, items=items, next=None)


def removed_holders(installation: Installation) -> list[tuple[NodeId, list[str]]]:
    """Removed nodes on which jobs still count, with these jobs."""
    if not (removed := [one.node.id for one in installation.nodes.values() if one.removed]):
        return []
    held = _holders(installation)
    return [(node, sorted({job for job, _, _ in held[node]})) for node in removed if held[node]]


def _there(installation: Installation, held: Mapping[NodeId, object]) -> Iterator[NodeStatus]:
    """The nodes, and of those that left the installation the ones on which a job still counts."""
    return (status for status in installation.nodes.values() if not status.lost or held[status.node.id])


def _holders(installation: Installation) -> dict[NodeId, list[tuple[str, tuple[int, ...], float]]]:
    held: dict[NodeId, list[tuple[str, tuple[int, ...], float]]] = defaultdict(list)
    for job in installation.live.values():
        if job.state.holds_devices and job.placement is not None:
            for bundle in job.placement.bundles:
                held[bundle.node].append((job.id, bundle.devices, bundle.res.cpus))
    return held


def _node(status: NodeStatus, held: list[tuple[str, tuple[int, ...], float]]) -> NodeRow:
    node = status.node
    owner = {device: job for job, devices, _ in held for device in devices}
    jobs = sorted({job for job, _, _ in held})
    return document(
        NodeRow,
        status,
        node,
        state=_state(status, jobs),
        drain=_drain(status, jobs),
        cpus_used=round(sum(cpus for _, _, cpus in held), 3),
        gpus=len(node.devices),
        gpus_used=len(owner),
        devices=[document(DeviceRow, device, job=owner.get(device.index)) for device in node.devices],
        jobs=jobs,
        marked_at=status.marked_at or None,
        text=status.text or "; ".join(filter(None, (dict(node.labels).get(FAULTS_LABEL), _time_shared(node)))),
    )


def _state(status: NodeStatus, jobs: Collection[str]) -> str:
    """The fitness of a node; it is ``draining`` until the last job has left, then ``drained``."""
    if status.lost:
        return "removed" if status.removed else "lost"
    return "draining" if status.node.health is Health.DRAINED and jobs else status.node.health.value


def _drain(status: NodeStatus, jobs: Collection[str]) -> DrainState | None:
    """How far a drained node is: jobs that have not left, by when they must, and whether it may be taken down."""
    if status.lost or status.node.health is not Health.DRAINED:
        return None
    return document(DrainState, jobs_left=len(jobs), until=status.leave_by if jobs else None, safe=not jobs)


def _time_shared(node: Node) -> str:
    """Why there are more cores to ask for than the machine has, if so."""
    cores = dict(node.labels).get(CORES_LABEL, "")
    return f"{counted(cores, 'core')}, shared in time by up to {node.cpus:g} that are asked" if cores else ""


def heat_document(installation: Installation) -> Heat:
    """Every node with the holder of each device: ``held`` has places in ``jobs``, or None for a device that is free.

    ``bad`` lists the places of devices that are out of order; both count devices in the order of ``node_list``.
    """
    held = _holders(installation)
    places: dict[str, int] = {}
    items: list[HeatNode] = []
    for status in _there(installation, held):
        node = status.node
        owner = {device: job for job, devices, _ in held[node.id] for device in devices}
        indices = [
            places.setdefault(owner[device.index], len(places)) if device.index in owner else None
            for device in node.devices
        ]
        bad = [i for i, device in enumerate(node.devices) if device.health is Health.BAD]
        state = _state(status, {job for job, _, _ in held[node.id]})
        items.append(document(HeatNode, node, state=state, held=indices, bad=bad))
    return document(Heat, jobs=list(places), items=items)


def limits_passed(state: State) -> list[LimitPassed]:
    """Limits of queues, and of users in them, that are below what is in use, with what that means."""
    meaning = "nothing is stopped, and nothing new starts until less is in use"
    return [
        document(
            LimitPassed,
            one,
            limit=one.allowed,
            text=f"{f'user {one.user} in ' if one.user else ''}queue {one.queue} uses {amount(one.dim, one.used)}, "
            f"above a limit of {amount(one.dim, one.allowed)}: {meaning}",
        )
        for one in state.queues.passed(state.used, state.used_by)
    ]


def queue_tree(installation: Installation) -> QueueTree:
    """Every queue, parents first, with its guarantee, use and waiting jobs."""
    items: list[QueueRow] = []
    for queue in sorted(installation.queues, key=lambda one: one.path):
        waiting = waiting_in(installation, queue.path)
        running = [
            one
            for one in installation.live.values()
            if one.state.holds_devices and (one.queue == queue.path or one.queue.startswith(f"{queue.path}/"))
        ]
        used, cpus = used_in(installation, queue.path)
        guaranteed = stated(queue.guaranteed, "gpus")
        row = document(
            QueueRow,
            queue,
            used_gpus=used,
            used_cpus=cpus,
            guaranteed_gpus=guaranteed,
            limit_gpus=stated(queue.limit, "gpus"),
            borrowed_gpus=max(0.0, used - guaranteed) if guaranteed is not None else 0.0,
            running_jobs=len(running),
            pending_jobs=len(waiting),
            pending_gpus=sum(r.res.gpus * r.replicas_min for one in waiting for r in one.spec.roles),
            oldest_wait_since=min((one.since for one in waiting), default=None),
        )
        items.append(row)
    return document(QueueTree, installation.trees[-1], items=items)


def queue_changes(old: Iterable[Queue], new: Iterable[Queue]) -> list[QueueChange]:
    """The fields of queues in both trees that differ, by path."""
    known = {queue.path: queue for queue in old}
    both = [(known[one.path], one) for one in sorted(new, key=lambda one: one.path) if one.path in known]
    return [
        document(QueueChange, queue=queue.path, field=one.name, before=_in_words(was), after=_in_words(value))
        for before, queue in both
        for one in fields(Queue)
        if (was := getattr(before, one.name)) != (value := getattr(queue, one.name))
    ]


def _in_words(value: object) -> str:
    """A value of a field of a queue."""
    match value:
        case None | ():
            return "none"
        case Res():
            sizes = [format_size(value.memory_bytes)] * bool(value.memory_bytes)
            return ", ".join([counted(value.gpus, "GPU"), *[counted(value.cpus, "CPU")] * bool(value.cpus), *sizes])
        case _:
            return json.dumps(codec.to_json_value(value)).strip('"')


def tree_difference(old: Sequence[Queue], new: Sequence[Queue]) -> str:
    """What another tree of queues has otherwise, in a line."""
    paths, before = {queue.path for queue in new}, {queue.path for queue in old}
    said = [f"{path} is new" for path in sorted(paths - before)]
    said += [f"{path} is gone" for path in sorted(before - paths)]
    said += [f"{one['queue']} {one['field']} {one['before']} -> {one['after']}" for one in queue_changes(old, new)]
    return first_of(said, CHANGES_NAMED) or "as before"


def waiting_in(installation: Installation, queue: str) -> list[JobHistory]:
    """Jobs that wait in a queue and in those below it."""
    live = (one for one in installation.live.values() if one.state is JobState.QUEUED)
    return [one for one in live if one.queue == queue or one.queue.startswith(f"{queue}/")]


def cluster_totals(installation: Installation) -> ClusterTotals:
    """Counts for the head of pages and for ``status``."""
    nodes = [status for status in installation.nodes.values() if not status.lost]
    jobs: dict[str, int] = {state.value: 0 for state in JobState}
    for job in installation.jobs.values():
        jobs[job.state.value] += 1
    held = (
        len(bundle.devices)
        for job in installation.live.values()
        if job.state.holds_devices and job.placement is not None
        for bundle in job.placement.bundles
    )
    return ClusterTotals(
        nodes=len(nodes),
        nodes_bad=sum(status.node.health is not Health.HEALTHY for status in nodes),
        gpus=sum(len(status.node.devices) for status in nodes),
        gpus_used=sum(held),
        jobs={state: count for state, count in jobs.items() if count},
    )


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
    jobs: Iterable[JobHistory], nodes: Iterable[Node], *, by: str, since: float, now: float
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
    for job in jobs:
        if job.ended_at is not None and job.ended_at < since:
            continue
        key = _key(job, by)
        held = _held(job, lambda node, index: types.get((node, index), "unknown"), since, now)
        users[job.submitted.user] += sum(gpu_s for gpu_s, _ in held.values())
        groups = held if by == "gpu_type" else {key: tuple(map(sum, zip(*held.values()))) if held else (0.0, 0.0)}
        for group, (gpu_s, cpu_s) in groups.items():
            one = sums[group]
            one.jobs.add(job.id)
            one.gpu_s, one.cpu_s = one.gpu_s + gpu_s, one.cpu_s + cpu_s
            _count(one, job)
    rows = [_row(by, key, one) for key, one in sorted(sums.items(), key=lambda item: (-item[1].gpu_s, item[0]))]
    return document(
        UsageReport,
        by=by,
        since=since,
        until=now,
        items=rows,
        total=UsageTotal(gpu_hours=_hours(sum(users.values())), fairness_jain=jain(list(users.values()))),
    )


def usage_history(jobs: Iterable[JobHistory], gpus: int, *, since: float, now: float, points: int) -> UsageHistory:
    """``UsageHistory`` from ``since`` to ``now``, in Unix seconds, in ``points`` steps.

    As in ``usage_report``, devices granted to a running job later are not counted.
    """
    step = (now - since) / points
    used, running, waiting = (_Steps(points) for _ in range(3))
    for job in jobs:
        if job.ended_at is not None and job.ended_at < since:
            continue
        waits: float | None = job.submitted_at
        for attempt in job.attempts:
            if waits is not None:
                waiting.add((waits - since) / step, (attempt.admitted_at - since) / step, 1)
            gpus_held = sum(bundle.res.gpus for bundle in attempt.placement.bundles)
            for span in attempt.spans(attempt.admitted_at, attempt.ended_at or now):
                begin, end = ((at - since) / step for at in span)
                running.add(begin, end, 1)
                used.add(begin, end, gpus_held)
            waits = attempt.ended_at
        if waits is not None:
            waiting.add((waits - since) / step, ((job.ended_at or now) - since) / step, 1)
    rows = zip(used.means(), running.means(), waiting.means())
    items = [
        UsageMoment(
            at=iso(since + i * step), gpus_used=round(gpus_used, 3), running=round(runs, 3), waiting=round(waits, 3)
        )
        for i, (gpus_used, runs, waits) in enumerate(rows)
    ]
    return document(UsageHistory, gpus=gpus, step_s=step, items=items, next=None)


class _Steps:
    """Mean of a sum of rectangles over each of ``n`` equal steps: a rectangle costs the same however long it is."""

    def __init__(self, n: int) -> None:
        self._parts = [0.0] * n
        self._changes = [0.0] * (n + 1)

    def add(self, begin: float, end: float, height: float) -> None:
        """A rectangle from ``begin`` to ``end``, counted in steps."""
        n = len(self._parts)
        begin, end = max(0.0, begin), min(float(n), end)
        if end <= begin:
            return
        first, last = min(n - 1, int(begin)), min(n - 1, int(end))
        if first == last:
            self._parts[first] += (end - begin) * height
            return
        self._parts[first] += (first + 1 - begin) * height
        self._parts[last] += (end - last) * height
        self._changes[first + 1] += height
        self._changes[last] -= height

    def means(self) -> list[float]:
        """Of each step."""
        return [part + whole for part, whole in zip(self._parts, accumulate(self._changes))]


def _key(job: JobHistory, by: str) -> str:
    return {"user": job.submitted.user, "queue": job.queue, "job": str(job.id)}.get(by, "")


def _held(
    job: JobHistory, type_of: Callable[[NodeId, int], str], since: float, now: float
) -> dict[str, tuple[float, float]]:
    """Device and core seconds by kind of device; cores of what has no device are under ``cpu``."""
    found: defaultdict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for attempt in job.attempts:
        spans = attempt.spans(max(attempt.admitted_at, since), min(attempt.ended_at or now, now))
        if not (seconds := sum(end - begin for begin, end in spans)):
            continue
        for bundle in attempt.placement.bundles:
            kind = type_of(bundle.node, bundle.devices[0]) if bundle.devices else "cpu"
            gpu_s, cpu_s = found[kind]
            found[kind] = (gpu_s + bundle.res.gpus * seconds, cpu_s + bundle.res.cpus * seconds)
    return dict(found)


def _count(one: _Sum, job: JobHistory) -> None:
    if job.attempts:
        one.waits_s.append(job.attempts[0].admitted_at - job.submitted_at)
    if job.started_at is not None:
        one.responses_s.append(job.started_at - job.submitted_at)
    one.restarts += sum(instance.now.restarts for instance in job.instances.values())
    if job.state.terminal:
        one.ends[JobState(job.state).value] += 1


def _row(by: str, key: str, one: _Sum) -> UsageRow:
    return document(
        UsageRow,
        {by: key},
        jobs=len(one.jobs),
        succeeded=one.ends["SUCCEEDED"],
        failed=one.ends["FAILED"],
        cancelled=one.ends["CANCELLED"],
        gpu_hours=_hours(one.gpu_s),
        cpu_hours=_hours(one.cpu_s),
        wait_s=spread_of(one.waits_s),
        response_s=spread_of(one.responses_s),
        restarts=one.restarts,
    )


def _hours(seconds: float) -> float:
    return round(seconds / 3600, 4)
