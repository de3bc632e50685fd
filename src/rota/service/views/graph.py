"""The graph of a job as a document: roles, edges, sub-graphs, and what losing one of each role does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rota.job.core.graph import blast_radius, expand
from rota.job.core.resize import wanted_size
from rota.service.models.jobs import GraphDocument, ObservedEdge
from rota.service.views.jobs import API
from rota.service.views.story import JobStory
from rota.service.views.streams import stream_rows
from rota.spec.job import JobSpec


def graph_document(
    spec: JobSpec, story: JobStory | None = None, beats: Mapping[str, Mapping[str, Any]] | None = None
) -> GraphDocument:
    """Vertices, edges and failure units; with a story also the state of each instance and what streams have seen.

    ``replicas`` are as many as are wanted now, without a story the fewest. ``observed`` are the edges that ``beats``
    tell of, summed over the instances of a role since their processes began.
    """
    graph = expand(spec)
    seen = {row["name"]: row for row in stream_rows(story.commit if story else None)}
    sizes = {role.name: wanted_size(story.ctx, role) if story else role.replicas_min for role in spec.roles}
    states = {} if story is None else {key: one.state.value for key, one in story.instances.items()}
    return {
        "api": API,
        "kind": "Graph",
        "job": None if story is None else story.id,
        "name": spec.name,
        "roles": [
            {
                "name": role.name,
                "replicas": sizes[role.name],
                "replicas_max": role.replicas_max,
                "loop": role.is_loop,
                "stateful": role.name in graph.stateful,
                "restart": role.restart,
                "mesh": dict(role.mesh),
                "blast_radius": blast_radius(spec, graph, role.name).text,
                "states": [states.get((role.name, rank), "PLANNED") for rank in range(sizes[role.name])],
            }
            for role in spec.roles
        ],
        "edges": [{"source": edge.source, "target": edge.target, "kind": edge.kind} for edge in graph.edges],
        "streams": [
            {"name": one.name, "cap": one.cap, "source": one.source, "seen": seen.get(one.name)} for one in spec.streams
        ],
        "subgraphs": [[str(member) for member in part.members] for part in graph.subgraphs],
        "units": [[str(member) for member in unit] for unit in graph.units],
        "order": list(graph.order),
        "observed": observed_edges(beats or {}),
    }


def observed_edges(beats: Mapping[str, Mapping[str, Any]]) -> list[ObservedEdge]:
    """Who really called whom: times, failures, seconds waited and about how many bytes went both ways."""
    sums: dict[tuple[str, str, str, str], tuple[int, int, float, int]] = {}
    for instance, beat in beats.items():
        for kind, target, what, n, failed, waited_s, size in beat.get("calls", ()):
            key = (instance.partition("/")[0], target, kind, what)
            a, b, c, d = sums.get(key, (0, 0, 0.0, 0))
            sums[key] = (a + n, b + failed, c + waited_s, d + size)
    return [
        {
            "source": source,
            "target": target,
            "kind": kind,
            "what": what,
            "n": n,
            "failed": failed,
            "waited_s": round(s, 3),
            "bytes": size,
        }
        for (source, target, kind, what), (n, failed, s, size) in sums.items()
    ]
