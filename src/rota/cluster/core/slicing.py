"""Several jobs on one device: where a job goes when nodes are kept for one size of job, and who takes turns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["exclusive", "time-slice", "queue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityNode:
    """A node as affinity placement sees it: free devices, the size of job it is kept for (None: any), its load.

    ``load`` is demanded over existing devices; ``suspendable`` = its jobs can be suspended to take turns.
    """

    name: str
    free: int
    affinity: int | None = None
    suspendable: bool = False
    load: float = 0.0


def kinship(sizes: Collection[int], gpus: int) -> int:
    """0 for a node that has jobs of this size, 1 for one without jobs, 2 for one with others."""
    return 0 if gpus in sizes else 2 if sizes else 1


def _sizes(node: AffinityNode) -> tuple[int, ...]:
    return () if node.affinity is None else (node.affinity,)


def potential(free: Sequence[int]) -> int:
    """Minus the sum of the squares of what is free on each node: lowest where free devices lie together.

    Moving ``g`` devices from a node with ``s`` free to one with ``t`` changes it by ``2 g (t - s - g)``. It is a whole
    number with a least value, so moves that lower it come to an end.
    """
    return -sum(devices * devices for devices in free)


def choose_by_affinity(nodes: Sequence[AffinityNode], gpus: int) -> tuple[str | None, Mode]:
    """Where a job of ``gpus`` devices goes, and how; None = it waits.

    In this order: a node of its size with room, an unlabelled one, one of another size, then turns on the least loaded
    node of its size whose jobs can be suspended. Source: Gandiva (OSDI'18), section 3.2.
    """
    room = [node for node in nodes if node.free >= gpus]
    if room:
        return min(room, key=lambda node: (kinship(_sizes(node), gpus), node.load, node.free)).name, "exclusive"
    shared = [node for node in nodes if node.affinity == gpus and node.suspendable]
    if shared:
        return min(shared, key=lambda node: node.load).name, "time-slice"
    return None, "queue"


def choose_migration(free: Mapping[str, int], per_node: int, job_on: str | None, gpus: int) -> tuple[str, str] | None:
    """The move that defragments most: from the non-idle node with most free devices to the one with fewest that fits.

    None when the job already lies best, or when no move lowers fragmentation. Nodes without free devices take nothing;
    idle nodes stay idle. Source: Gandiva, section 3.3.
    """
    busy = {name: n for name, n in free.items() if n < per_node}
    if not busy:
        return None
    source = job_on if job_on is not None else max(busy, key=lambda name: (busy[name], name))
    targets = {name: n for name, n in busy.items() if name != source and n >= max(gpus, 1)}
    if source not in busy or not targets:
        return None
    target = min(targets, key=lambda name: (targets[name], name))
    return (source, target) if targets[target] < busy[source] + gpus else None
