"""Graph of a job: instances of roles, typed edges, sub-graphs, data-flow order, and how far a loss reaches."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, Literal, TypeVar

from rota.spec.ids import InstanceId, RoleName
from rota.spec.job import JobSpec, arrow_of

EdgeType = Literal["call", "stream", "handoff", "grad", "weights", "mesh", "lease"]
"""``mesh`` and ``grad`` are tight: both ends fail together. ``lease`` is tight for placement alone."""

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RoleEdge:
    """An edge between two roles or streams of the job, by name."""

    source: str
    target: str
    kind: EdgeType


@dataclass(frozen=True, slots=True, kw_only=True)
class SubGraph:
    """Instances that are placed and started as one unit; ``index`` counts in data-flow order."""

    index: int
    members: tuple[InstanceId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The computation graph of a job. Every tuple has a fixed order, so equal specs give equal graphs.

    ``units`` are the failure units: instances closed over mesh and grad edges. ``subgraphs`` are closed over mesh,
    grad and lease edges. ``stateful`` roles hold state that goes back to a commit. ``starts_after`` maps a role to the
    roles that must be ready before it starts. ``base`` are the members of a role that start with the gang.
    ``worlds`` are the roles whose members are one process group.
    """

    instances: tuple[InstanceId, ...]
    edges: tuple[RoleEdge, ...]
    subgraphs: tuple[SubGraph, ...]
    units: tuple[tuple[InstanceId, ...], ...]
    order: tuple[str, ...]
    stateful: frozenset[RoleName]
    finite: frozenset[RoleName]
    loop: RoleName | None
    starts_after: Mapping[RoleName, tuple[RoleName, ...]]
    unit_of: Mapping[InstanceId, int] = field(repr=False)
    ranks: Mapping[RoleName, tuple[InstanceId, ...]] = field(repr=False)
    base: Mapping[RoleName, tuple[InstanceId, ...]] = field(repr=False)
    worlds: frozenset[RoleName] = frozenset()

    def unit(self, instance: InstanceId) -> tuple[InstanceId, ...]:
        """The instances that fail together with this one, itself included."""
        return self.units[self.unit_of[instance]]

    def close(self, seeds: Iterable[InstanceId]) -> tuple[InstanceId, ...]:
        """``seeds`` with everything tied to them by mesh and grad edges, in graph order."""
        hit = {self.unit_of[seed] for seed in seeds}
        return tuple(instance for instance in self.instances if self.unit_of[instance] in hit)

    def mesh_peers(self, instance: InstanceId) -> tuple[InstanceId, ...]:
        """The members of the process group of this instance in rank order; itself alone when its role has no mesh."""
        return self.ranks[instance.role] if instance.role in self.worlds else (instance,)

    def waits_for(self, role: RoleName) -> frozenset[RoleName]:
        """Every role that must be ready before ``role`` starts, directly or not."""
        return reachable(self.starts_after, role)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScope:
    """What losing one instance of a role does.

    ``restarts`` get a new process, ``re_forms`` keep their process and go back to the last commit, ``pauses`` are the
    roles whose work waits meanwhile.
    """

    text: str
    restarts: tuple[InstanceId, ...]
    re_forms: tuple[InstanceId, ...]
    pauses: tuple[RoleName, ...]


@lru_cache(maxsize=256)
def expand(spec: JobSpec) -> Graph:
    """The graph of a job. The spec must have passed ``check_graph``; unknown names in edges are left out here."""
    instances = tuple(InstanceId(role.name, rank) for role in spec.roles for rank in range(role.seats))
    ranks = {role.name: tuple(i for i in instances if i.role == role.name) for role in spec.roles}
    edges = tuple(_role_edges(spec))
    units = _classes(instances, ranks, edges, {"mesh", "grad"})
    order = data_flow_order(spec)
    place = {name: index for index, name in enumerate(order)}
    merged = sorted(
        _classes(instances, ranks, edges, {"mesh", "grad", "lease"}),
        key=lambda members: min((place[member.role], member.rank) for member in members),
    )
    loop = spec.loop
    return Graph(
        instances=instances,
        edges=edges,
        subgraphs=tuple(SubGraph(index=index, members=members) for index, members in enumerate(merged)),
        units=units,
        order=order,
        stateful=frozenset(role.name for role in spec.roles if role.stateful),
        finite=frozenset(role.name for role in spec.roles if role.finite),
        loop=loop.name if loop else None,
        starts_after={
            role.name: tuple(RoleName(name) for name in role.start_after if name in ranks) for role in spec.roles
        },
        unit_of={member: index for index, members in enumerate(units) for member in members},
        ranks=ranks,
        worlds=frozenset(role.name for role in spec.roles if role.meshed),
        base={role.name: ranks[role.name][: role.gang_size] for role in spec.roles},
    )


def data_flow_order(spec: JobSpec) -> tuple[str, ...]:
    """All roles, producers before consumers; ties in the order of the file. A cycle is cut where it closes."""
    arrows = data_flow(spec)
    before: dict[str, set[str]] = {role.name: set() for role in spec.roles}
    for source, targets in arrows.items():
        for target in targets:
            before.setdefault(target, set()).add(source)
    done: dict[str, None] = {}

    def visit(name: str, path: frozenset[str]) -> None:
        if name in done or name in path:
            return
        for earlier in sorted(before.get(name, ())):
            visit(earlier, path | {name})
        done[name] = None

    for role in spec.roles:
        visit(role.name, frozenset())
    names = {role.name for role in spec.roles}
    return tuple(name for name in done if name in names)


def data_flow(spec: JobSpec) -> dict[str, tuple[str, ...]]:
    """Arrows of the data flow between roles and streams: call, stream, handoff and grad-forward edges."""
    arrows: dict[str, dict[str, None]] = {}
    for edge in spec.edges:
        source, target = arrow_of(spec, edge)
        arrows.setdefault(source, {})[target] = None
    return {source: tuple(targets) for source, targets in arrows.items()}


def lease_groups(spec: JobSpec) -> tuple[tuple[RoleName, ...], ...]:
    """Roles that share devices by turns, directly or over others; in the order of the file."""
    merged: Merged[RoleName] = Merged()
    sharing: dict[RoleName, None] = {}
    for role in spec.roles:
        for near in role.collocate:
            if near.level == "device" and near.share == "lease" and near.role not in ("self", role.name):
                merged.join(role.name, RoleName(near.role))
                sharing |= {role.name: None, RoleName(near.role): None}
    groups: dict[RoleName, list[RoleName]] = {}
    for role in spec.roles:
        if role.name in sharing:
            groups.setdefault(merged.root(role.name), []).append(role.name)
    return tuple(tuple(group) for group in groups.values())


def reachable(arrows: Mapping[RoleName, Sequence[RoleName]], start: RoleName) -> frozenset[RoleName]:
    """Every vertex reachable from ``start`` over at least one arrow."""
    found: set[RoleName] = set()
    todo = list(arrows.get(start, ()))
    while todo:
        vertex = todo.pop()
        if vertex not in found:
            found.add(vertex)
            todo.extend(arrows.get(vertex, ()))
    return frozenset(found)


def recovery_scope(graph: Graph, lost: Iterable[InstanceId], whole_roles: Iterable[RoleName]) -> tuple[InstanceId, ...]:
    """Every instance that a recovery touches, in graph order.

    The lost ones and all members of ``whole_roles``, closed over mesh and grad edges. When that reaches state (a
    stateful role or the loop), every stateful role and the loop go back to the last commit together, so they belong to
    it too.
    """
    wide = set(whole_roles)
    seeds = [*lost, *(member for role in graph.ranks if role in wide for member in graph.ranks[role])]
    touched = graph.close(seeds)
    keepers = graph.stateful | ({graph.loop} if graph.loop else frozenset[RoleName]())
    if any(member.role in keepers for member in touched):
        touched = graph.close([*touched, *(member for member in graph.instances if member.role in keepers)])
    return touched


def replaced(graph: Graph, lost: Iterable[InstanceId], whole_roles: Iterable[RoleName]) -> frozenset[InstanceId]:
    """Who of the scope gets a new process: the lost ones, and ``whole_roles`` with all that is tied to them."""
    wide = set(whole_roles)
    return frozenset(lost) | frozenset(
        graph.close(member for role in graph.ranks if role in wide for member in graph.ranks[role])
    )


def blast_radius(spec: JobSpec, graph: Graph, role: RoleName) -> LossScope:
    """What losing instance 0 of ``role`` does, as values and as the sentence shown before a start."""
    lost = (graph.ranks[role][0],)
    wide = (role,) if spec.role(role).restart in ("role", "node", "job") else ()
    if spec.role(role).restart == "job":
        everything = graph.instances
        return LossScope(
            text=f"losing {lost[0]} restarts the whole job",
            restarts=everything,
            re_forms=(),
            pauses=tuple(graph.ranks),
        )
    scope, fresh = recovery_scope(graph, lost, wide), replaced(graph, lost, wide)
    restarts = tuple(member for member in scope if member in fresh)
    re_forms = tuple(member for member in scope if member not in fresh)
    pauses = tuple(dict.fromkeys(member.role for member in scope if member not in lost))
    if len(scope) == 1 and len(graph.ranks[role]) == 1:
        pauses = (role,)
    limits = [f"{stream.name} holds {stream.cap}" for stream in spec.streams if stream.source is None]
    rest = [name for name in graph.ranks if name not in {member.role for member in scope}]
    return LossScope(
        text=_radius_text(lost[0], restarts, re_forms, pauses, rest, limits),
        restarts=restarts,
        re_forms=re_forms,
        pauses=pauses,
    )


def _radius_text(
    lost: InstanceId,
    restarts: Sequence[InstanceId],
    re_forms: Sequence[InstanceId],
    pauses: Sequence[RoleName],
    rest: Sequence[RoleName],
    until: Sequence[str],
) -> str:
    parts = [f"restarts {_named(restarts)}"]
    if re_forms:
        parts.append(f"re-forms {_named(re_forms)} from the last commit")
    parts.append(f"pauses {', '.join(pauses)}" if pauses else "pauses nothing")
    if rest and pauses:
        verb = "continues" if len(rest) == 1 else "continue"
        parts.append(f"{', '.join(rest)} {verb}" + (f" until {' or '.join(until)}" if until else ""))
    return f"losing {lost} " + "; ".join(parts)


def _named(members: Sequence[InstanceId]) -> str:
    counts: dict[RoleName, list[int]] = {}
    for member in members:
        counts.setdefault(member.role, []).append(member.rank)
    return ", ".join(
        f"{role}/{ranks[0]}" if len(ranks) == 1 else f"{role} ({len(ranks)} instances)"
        for role, ranks in counts.items()
    )


def _role_edges(spec: JobSpec) -> Iterator[RoleEdge]:
    names = {role.name for role in spec.roles}
    for edge in spec.edges:
        yield RoleEdge(*arrow_of(spec, edge), edge.kind)
    for weights in spec.weights:
        if {weights.source, weights.target} <= names:
            yield RoleEdge(weights.source, weights.target, "weights")
    for role in spec.roles:
        if role.meshed:
            yield RoleEdge(role.name, role.name, "mesh")
        for near in role.collocate:
            if near.level == "device" and near.role in names:
                yield RoleEdge(role.name, near.role, "lease")


def _classes(
    instances: Sequence[InstanceId],
    ranks: Mapping[RoleName, Sequence[InstanceId]],
    edges: Iterable[RoleEdge],
    kinds: set[EdgeType],
) -> tuple[tuple[InstanceId, ...], ...]:
    """Instances merged over edges of ``kinds``, in the order of their first member."""
    merged: Merged[InstanceId] = Merged()
    for edge in edges:
        left, right = ranks.get(RoleName(edge.source), ()), ranks.get(RoleName(edge.target), ())
        if edge.kind in kinds:
            for a, b in _pairs_of_kind(edge.kind, left, right):
                merged.join(a, b)
    classes: dict[InstanceId, list[InstanceId]] = {}
    for instance in instances:
        classes.setdefault(merged.root(instance), []).append(instance)
    return tuple(tuple(members) for members in classes.values())


def _pairs_of_kind(
    kind: EdgeType, left: Sequence[InstanceId], right: Sequence[InstanceId]
) -> Iterator[tuple[InstanceId, InstanceId]]:
    """Pairs joined by a role edge: collocated ones by rank, a mesh as a ring, all else every with every."""
    if not left or not right:
        return
    if kind == "lease":
        yield from ((member, right[member.rank % len(right)]) for member in left)
    elif kind == "mesh":
        yield from zip(left, [*left[1:], left[0]])
    else:
        yield from ((a, b) for a in left for b in right)


class Merged(Generic[T]):
    """Union-find: classes of values that were joined (Tarjan 1975, path halving)."""

    def __init__(self) -> None:
        self._parent: dict[T, T] = {}

    def root(self, item: T) -> T:
        """The representative of the class of ``item``."""
        parent = self._parent
        while (above := parent.get(item, item)) != item:
            parent[item] = parent.get(above, above)
            item = above
        return item

    def join(self, left: T, right: T) -> None:
        """Make the two classes one; the older representative stays."""
        a, b = self.root(left), self.root(right)
        if a != b:
            self._parent[b] = a

    def same(self, left: T, right: T) -> bool:
        """True when both are in one class."""
        return self.root(left) == self.root(right)
