"""Nodes, queues and the service itself as documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import cast

from rota.cluster.core.admission import amount
from rota.cluster.core.state import State
from rota.service.models.cluster import (
    ClusterTotals,
    DrainState,
    Heat,
    HeatNode,
    LimitPassed,
    NodeList,
    NodeRow,
    QueueFields,
    QueueRow,
    QueueTree,
)
from rota.service.views.explain import stated, used_in
from rota.service.views.installation import Installation, NodeStory
from rota.service.views.jobs import API, when
from rota.service.views.story import JobStory
from rota.spec import codec
from rota.spec.ids import NodeId
from rota.spec.resources import CORES_LABEL, Health, Node, counted
from rota.spec.states import JobState


def node_list(installation: Installation) -> NodeList:
    """Every node with its devices, who holds them, and its fitness."""
    held = _holders(installation)
    items = [_node(story, held[story.node.id]) for story in _there(installation, held)]
    return {"api": API, "kind": "NodeList", "items": items, "next": None}


def _there(installation: Installation, held: Mapping[NodeId, object]) -> Iterator[NodeStory]:
    """The nodes, and of those that left the installation the ones on which a job still counts."""
    return (story for story in installation.nodes.values() if not story.lost or held[story.node.id])


def _holders(installation: Installation) -> dict[NodeId, list[tuple[str, tuple[int, ...], float]]]:
    held: dict[NodeId, list[tuple[str, tuple[int, ...], float]]] = defaultdict(list)
    for story in installation.live.values():
        if story.state.holds_devices and story.placement is not None:
            for bundle in story.placement.bundles:
                held[bundle.node].append((story.id, bundle.devices, bundle.res.cpus))
    return held


def _node(story: NodeStory, held: list[tuple[str, tuple[int, ...], float]]) -> NodeRow:
    node = story.node
    owner = {device: job for job, devices, _ in held for device in devices}
    jobs = sorted({job for job, _, _ in held})
    return {
        "id": node.id,
        "host": node.host,
        "state": _state(story, jobs),
        "drain": _drain(story, jobs),
        "cells": list(node.cells),
        "labels": dict(node.labels),
        "cpus": node.cpus,
        "cpus_used": round(sum(cpus for _, _, cpus in held), 3),
        "memory_bytes": node.memory_bytes,
        "gpus": len(node.devices),
        "gpus_used": len(owner),
        "devices": [
            {
                "index": device.index,
                "type": device.type,
                "health": device.health.value,
                "memory_bytes": device.memory_bytes,
                "job": owner.get(device.index),
            }
            for device in node.devices
        ],
        "jobs": jobs,
        "joined_at": when(story.joined_at),
        "marked_at": when(story.marked_at) if story.marked_at else None,
        "marked_by": story.marked_by,
        "text": story.text or _time_shared(node),
    }


def _state(story: NodeStory, jobs: Collection[str]) -> str:
    """The fitness of a node; it is ``draining`` until the last job has left, then ``drained``."""
    if story.lost:
        return "lost"
    return "draining" if story.node.health is Health.DRAINED and jobs else story.node.health.value


def _drain(story: NodeStory, jobs: Collection[str]) -> DrainState | None:
    """How far a drained node is: jobs that have not left, by when they must, and whether it may be taken down."""
    if story.lost or story.node.health is not Health.DRAINED:
        return None
    return {"jobs_left": len(jobs), "until": when(story.leave_by) if jobs else None, "safe": not jobs}


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
    for story in _there(installation, held):
        node = story.node
        owner = {device: job for job, devices, _ in held[node.id] for device in devices}
        items.append(
            {
                "id": node.id,
                "cells": list(node.cells),
                "state": _state(story, {job for job, _, _ in held[node.id]}),
                "held": [
                    places.setdefault(owner[device.index], len(places)) if device.index in owner else None
                    for device in node.devices
                ],
                "bad": [i for i, device in enumerate(node.devices) if device.health is Health.BAD],
            }
        )
    return {"api": API, "kind": "Heat", "jobs": list(places), "items": items}


def limits_passed(state: State) -> list[LimitPassed]:
    """Limits of queues, and of users in them, that are below what is in use, with what that means."""
    return [
        {
            "queue": one.queue,
            "user": one.user,
            "dim": one.dim,
            "used": one.used,
            "limit": one.allowed,
            "text": f"{f'user {one.user} in ' if one.user else ''}queue {one.queue} uses {amount(one.dim, one.used)}, "
            f"above a limit of {amount(one.dim, one.allowed)}: nothing is stopped, and nothing new starts until less "
            "is in use",
        }
        for one in state.queues.passed(state.used, state.used_by)
    ]


def queue_tree(installation: Installation) -> QueueTree:
    """Every queue, parents first, with what it promises, holds and lets wait."""
    items: list[QueueRow] = []
    for queue in sorted(installation.queues, key=lambda one: one.path):
        waiting = waiting_in(installation, queue.path)
        running = [
            one
            for one in installation.live.values()
            if one.state.holds_devices and (one.queue == queue.path or one.queue.startswith(f"{queue.path}/"))
        ]
        used = used_in(installation, queue.path)[0]
        guaranteed = stated(queue.guaranteed, "gpus")
        declared = cast("QueueFields", codec.to_json_value(queue))
        row: QueueRow = {
            **declared,
            "parent": queue.parent,
            "used_gpus": used,
            "guaranteed_gpus": guaranteed,
            "limit_gpus": stated(queue.limit, "gpus"),
            "borrowed_gpus": max(0.0, used - guaranteed) if guaranteed is not None else 0.0,
            "running_jobs": len(running),
            "pending_jobs": len(waiting),
            "pending_gpus": sum(r.res.gpus * r.replicas_min for one in waiting for r in one.spec.roles),
            "oldest_wait_since": when(min((one.since for one in waiting), default=None)),
        }
        items.append(row)
    return {"api": API, "kind": "QueueTree", "items": items, "next": None}


def waiting_in(installation: Installation, queue: str) -> list[JobStory]:
    """Jobs that wait in a queue and in those below it."""
    live = (one for one in installation.live.values() if one.state is JobState.QUEUED)
    return [one for one in live if one.queue == queue or one.queue.startswith(f"{queue}/")]


def cluster_totals(installation: Installation) -> ClusterTotals:
    """Counts for the head of pages and for ``status``."""
    nodes = [story for story in installation.nodes.values() if not story.lost]
    jobs: dict[str, int] = {state.value: 0 for state in JobState}
    for story in installation.jobs.values():
        jobs[story.state.value] += 1
    return {
        "nodes": len(nodes),
        "nodes_bad": sum(story.node.health is not Health.HEALTHY for story in nodes),
        "gpus": sum(len(story.node.devices) for story in nodes),
        "gpus_used": sum(
            len(bundle.devices)
            for story in installation.live.values()
            if story.state.holds_devices and story.placement is not None
            for bundle in story.placement.bundles
        ),
        "jobs": {state: count for state, count in jobs.items() if count},
    }
