"""What a job asks the scheduler for (one request a gang), and which instance gets which granted bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from rota.job.core.graph import Graph, Merged, expand
from rota.spec.check import Path
from rota.spec.gang import (
    CELL_LEVELS,
    Apart,
    BundleAsk,
    BundleGrant,
    CellLevel,
    GangRequest,
    Grant,
    Placement,
    Together,
)
from rota.spec.ids import GangId, InstanceId, NodeId, RoleName
from rota.spec.job import JobSpec, Near, RoleSpec
from rota.spec.resources import Res, types_of

WHOLE = GangId("all")
"""The one gang of a job with ``gang: all``."""


@dataclass(frozen=True, slots=True)
class Tie:
    """Two instances that must share a cell of ``level``, or must not; ``line`` is the place in the job file."""

    left: InstanceId
    right: InstanceId
    level: CellLevel
    line: Path


def ties(spec: JobSpec, graph: Graph) -> Iterator[Tie]:
    """Every pair that ``collocate`` joins. Members of two roles pair by rank; ``self`` joins all of the role."""
    for role, line, near in _lines(spec, "collocate"):
        mine = graph.base[role.name]
        if near.role in ("self", role.name):
            yield from (Tie(mine[0], member, near.level, line) for member in mine[1:])
        elif other := graph.base.get(RoleName(near.role)):
            yield from (Tie(member, other[member.rank % len(other)], near.level, line) for member in mine)


def separations(spec: JobSpec, graph: Graph) -> Iterator[Tie]:
    """Every pair that ``apart`` keeps in different cells."""
    for role, line, near in _lines(spec, "apart"):
        mine = graph.base[role.name]
        if near.role in ("self", role.name):
            yield from (Tie(a, b, near.level, line) for i, a in enumerate(mine) for b in mine[i + 1 :])
        else:
            other = graph.base.get(RoleName(near.role), ())
            yield from (Tie(a, b, near.level, line) for a in mine for b in other)


@lru_cache(maxsize=256)
def requests_of(spec: JobSpec) -> tuple[GangRequest, ...]:
    """What the job needs: one gang, or with ``gang: subgraph`` one a sub-graph, in data-flow order.

    Sub-graphs that ``collocate`` or ``apart`` tie together are one gang, since a constraint never spans two requests.
    """
    graph = expand(spec)
    return tuple(_request(spec, graph, gang, members) for gang, members in gangs(spec, graph))


def gangs(spec: JobSpec, graph: Graph) -> tuple[tuple[GangId, tuple[InstanceId, ...]], ...]:
    """The gangs of a job and their members, in data-flow order; members that come and go are asked for apart."""
    base = {member for members in graph.base.values() for member in members}
    if spec.gang == "all":
        return ((WHOLE, tuple(member for member in graph.instances if member in base)),)
    merged: Merged[InstanceId] = Merged()
    for part in graph.subgraphs:
        for member in part.members:
            merged.join(part.members[0], member)
    for tie in (*ties(spec, graph), *separations(spec, graph)):
        merged.join(tie.left, tie.right)
    parts: dict[InstanceId, list[InstanceId]] = {}
    for part in graph.subgraphs:
        if members := [member for member in part.members if member in base]:
            parts.setdefault(merged.root(part.members[0]), []).extend(members)
    return tuple((GangId(f"part{index}"), tuple(members)) for index, members in enumerate(parts.values()))


def bind(request: GangRequest, grant: Grant) -> Mapping[InstanceId, BundleGrant]:
    """Which bundle each instance of the gang runs in. Raises ValueError when the grant does not answer the request."""
    if grant.gang != request.gang or len(grant.bundles) != len(request.bundles):
        raise ValueError(
            f"grant {grant.gang} with {len(grant.bundles)} bundles does not answer"
            f" request {request.gang} with {len(request.bundles)}"
        )
    granted = {bundle.index: bundle for bundle in grant.bundles}
    return {member: granted[ask.index] for ask in request.bundles for member in ask.members}


@lru_cache(maxsize=256)
def bindings(spec: JobSpec, placement: Placement) -> Mapping[InstanceId, tuple[GangId, BundleGrant]]:
    """Gang and bundle of every instance under a placement. Raises KeyError or ValueError when one is missing."""
    return {
        member: (request.gang, bundle)
        for request in requests_of(spec)
        for member, bundle in bind(request, placement.gang(request.gang)).items()
    }


def request_of(spec: JobSpec, gang: GangId, members: Sequence[InstanceId]) -> GangRequest:
    """One gang of some members, asked for while the job lives: to join, or to move to another node.

    A constraint that ties them to members elsewhere is not part of it; see ``nodes_apart``.
    """
    return _request(spec, expand(spec), gang, members)


def nodes_apart(
    spec: JobSpec, graph: Graph, members: Sequence[InstanceId], homes: Mapping[InstanceId, NodeId]
) -> tuple[NodeId, ...]:
    """Nodes of others that ``apart`` keeps these members away from; of a cell wider than a node only that node."""
    inside, found = set(members), dict[NodeId, None]()
    for role, _, near in _lines(spec, "apart"):
        mine = graph.ranks[role.name]
        other = mine if near.role == "self" else graph.ranks.get(RoleName(near.role), ())
        for ours, theirs in ((mine, other), (other, mine)) if near.level in ("node", "rack") else ():
            if inside.intersection(ours):
                found |= {homes[one]: None for one in theirs if one in homes and one not in inside}
    return tuple(found)


def _request(spec: JobSpec, graph: Graph, gang: GangId, members: Sequence[InstanceId]) -> GangRequest:
    slots = _slots(spec, graph, members)
    index = {member: i for i, slot in enumerate(slots) for member in slot}
    return GangRequest(
        gang=gang,
        bundles=tuple(BundleAsk(index=i, members=slot, res=_needs(spec, slot)) for i, slot in enumerate(slots)),
        apart=tuple(_apart(spec, graph, index)),
        together=tuple(_together(spec, graph, index)),
        tied=tuple(_runs(spec, graph, index, "together")),
        close=tuple(_runs(spec, graph, index, "close")),
    )


def _slots(spec: JobSpec, graph: Graph, members: Sequence[InstanceId]) -> tuple[tuple[InstanceId, ...], ...]:
    """Members merged over device collocation: each class shares one bundle."""
    merged: Merged[InstanceId] = Merged()
    for tie in ties(spec, graph):
        if tie.level == "device":
            merged.join(tie.right, tie.left)
    slots: dict[InstanceId, list[InstanceId]] = {}
    for member in members:
        slots.setdefault(merged.root(member), []).append(member)
    return tuple(tuple(slot) for slot in slots.values())


def _needs(spec: JobSpec, slot: Sequence[InstanceId]) -> Res:
    """Resources of a shared bundle: CPUs and memory add up; leased devices are the largest ask, fractions add up."""
    roles = [spec.role(member.role) for member in slot]
    fractional = any(near.share == "fraction" for role in roles for near in role.collocate)
    gpus = [role.res.gpus for role in roles]
    return Res(
        cpus=sum(role.res.cpus for role in roles),
        gpus=sum(gpus) if fractional else max(gpus),
        gpu_type=_common_type([types_of(role.gpu_type) for role in roles if role.gpu_type]),
        memory_bytes=sum(role.memory_ask for role in roles),
    )


def _common_type(asked: Sequence[tuple[str, ...]]) -> str | None:
    """The types that all of these take; ``spec.check`` lets none in that have nothing in common."""
    return "|".join(name for name in asked[0] if all(name in names for names in asked)) if asked else None


def _apart(spec: JobSpec, graph: Graph, index: Mapping[InstanceId, int]) -> Iterator[Apart]:
    for role, _, near in _lines(spec, "apart"):
        mine = _indices(graph.ranks[role.name], index)
        other = mine if near.role == "self" else _indices(graph.ranks.get(RoleName(near.role), ()), index)
        if mine and other and len({*mine, *other}) > 1:
            yield Apart(left=mine, right=other, level=near.level)


def _together(spec: JobSpec, graph: Graph, index: Mapping[InstanceId, int]) -> Iterator[Together]:
    """Closed under transitivity: bundles tied over several lines of one level become one constraint."""
    for level in CELL_LEVELS[1:]:
        merged: Merged[int] = Merged()
        tied: dict[int, None] = {}
        for tie in ties(spec, graph):
            if tie.level == level and tie.left in index and tie.right in index:
                merged.join(index[tie.right], index[tie.left])
                tied |= {index[tie.left]: None, index[tie.right]: None}
        classes: dict[int, list[int]] = {}
        for bundle in sorted(tied):
            classes.setdefault(merged.root(bundle), []).append(bundle)
        yield from (Together(bundles=tuple(one), level=level) for one in classes.values() if len(one) > 1)


def _runs(
    spec: JobSpec, graph: Graph, index: Mapping[InstanceId, int], rule: Literal["together", "close"]
) -> Iterator[tuple[int, ...]]:
    """Runs of consecutive instances that the plan of their role keeps on one node, or should.

    A role of several sizes has no such runs: its instances come and go one by one.
    """
    for role in spec.roles:
        size = max((getattr(plan, rule) for plan in role.plans), default=1)
        members = graph.ranks[role.name] if size > 1 and len(role.plans) == 1 else ()
        for first in range(0, len(members), size):
            if len(run := _indices(members[first : first + size], index)) > 1:
                yield run


def _indices(members: Sequence[InstanceId], index: Mapping[InstanceId, int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(index[member] for member in members if member in index))


def _lines(spec: JobSpec, name: str) -> Iterator[tuple[RoleSpec, Path, Near]]:
    for role in spec.roles:
        for i, near in enumerate(role.collocate if name == "collocate" else role.apart):
            yield role, ("roles", role.name, name, i), near
