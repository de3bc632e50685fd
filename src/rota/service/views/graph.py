"""The graph of a job as a document: roles, edges, sub-graphs, and what losing one of each role does."""

from __future__ import annotations

from typing import Any

from rota.job.core.graph import blast_radius, expand
from rota.service.views.jobs import API
from rota.service.views.story import JobStory
from rota.service.views.streams import stream_rows
from rota.spec.job import JobSpec


def graph_document(spec: JobSpec, story: JobStory | None = None) -> dict[str, Any]:
    """Vertices, edges and failure units; with a story also the state of each instance and what streams have seen."""
    graph = expand(spec)
    seen = {row["name"]: row for row in stream_rows(story.commit if story else None)}
    states = {} if story is None else {key: one.state.value for key, one in story.instances.items()}
    return {
        "api": API,
        "kind": "Graph",
        "job": None if story is None else story.id,
        "name": spec.name,
        "roles": [
            {
                "name": role.name,
                "replicas": role.replicas_min,
                "loop": role.is_loop,
                "stateful": role.name in graph.stateful,
                "restart": role.restart,
                "mesh": dict(role.mesh),
                "blast_radius": blast_radius(spec, graph, role.name).text,
                "states": [states.get((role.name, rank), "PLANNED") for rank in range(role.replicas_min)],
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
    }
