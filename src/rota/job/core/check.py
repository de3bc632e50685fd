"""Validation of a job's graph before anything starts: each problem names the role, the line and the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from rota.job.core.graph import Graph, Merged, expand, lease_groups
from rota.job.core.paths import driven_ends, faults_of
from rota.job.core.placement import Tie, separations, ties
from rota.spec import check as rules
from rota.spec.check import Finding
from rota.spec.dispatch import Concat, FirstRule, OpSpec, Rank, SameRule, Shard
from rota.spec.gang import CELL_LEVELS
from rota.spec.ids import InstanceId, RoleName
from rota.spec.job import JobSpec, RoleSpec, endpoint


def check_graph(spec: JobSpec) -> tuple[Finding, ...]:
    """Everything that is wrong with the roles and edges of a job; empty when it can be started.

    First the rules between fields (``rota.spec.check``), then what they do not see. What needs the interface of a
    workload (its operations and state) is checked only for roles that have one.
    """
    found = [*rules.check(spec), *(finding for check in _CHECKS for finding in check(spec))]
    if not found:
        found = [*_contradictions(spec, expand(spec)), *faults_of(spec)]
    return tuple(found)


def _operations(spec: JobSpec) -> Iterator[Finding]:
    for role in spec.roles:
        if role.fail.limit_n < 0 or role.fail.limit_window_s <= 0:
            path, message = ("roles", role.name, "fail", "limit"), "limit needs a count and a window, such as 3/10m"
            yield Finding(path=path, message=message, code="LIMIT")
        if role.fail.same < 0:
            path, message = ("roles", role.name, "fail", "same"), f"same is {role.fail.same}, it must be 0 or more"
            yield Finding(path=path, message=message, hint="0 keeps trying within limit; 3 is usual", code="LIMIT")
        for op in role.interface.ops if role.interface else ():
            yield from _axes(role, op)
            yield from _operation(role, op)


def _axes(role: RoleSpec, op: OpSpec) -> Iterator[Finding]:
    """The mesh must have every axis that is named, also in a role of one instance."""
    axes, rules_of_op = [axis for axis, _ in role.mesh], (op.send_rule, op.recv_rule)
    for axis in dict.fromkeys(rule.axis for rule in rules_of_op if isinstance(rule, Shard | Concat)):
        if axis is not None and axis not in axes:
            size = role.replicas_min if role.replicas_min == role.replicas_max else '"*"'
            yield Finding(
                path=("roles", role.name, "mesh"),
                message=f"{role.name}.{op.name} splits over the axis {axis}, "
                + ("which the mesh does not have" if axes else "and the role has no mesh"),
                hint=rules.nearest(axis, axes) if axes else f"add mesh: {{{axis}: {size}}}",
                code="NO_AXIS",
            )
    for rule in rules_of_op:
        if isinstance(rule, Rank) and not 0 <= rule.rank < role.replicas_min:
            yield Finding(
                path=("roles", role.name, "replicas"),
                message=f"{role.name}.{op.name} uses rank {rule.rank}, but there are {role.replicas_min} instances",
                hint=f"set replicas to at least {rule.rank + 1}",
                code="NO_RANK",
            )


def _operation(role: RoleSpec, op: OpSpec) -> Iterator[Finding]:
    assert role.interface is not None
    if op.retry == "commit" and not role.interface.has_state:
        yield Finding(
            path=("roles", role.name, "workload"),
            message=f"{role.name}.{op.name} is a commit operation, but the workload has no @op.state",
            hint="add a method with @op.state that returns what a restart must bring back, or use retry='safe'",
            code="NO_STATE",
        )
    if isinstance(op.recv_rule, FirstRule) and op.retry != "safe":
        yield Finding(
            path=("roles", role.name, "workload"),
            message=f"{role.name}.{op.name} takes the first answer and cancels the others, but is not safe to repeat",
            hint="use retry='safe', or another recv rule",
            code="FIRST_NOT_SAFE",
        )


def _edges(spec: JobSpec) -> Iterator[Finding]:
    for i, edge in enumerate(spec.edges):
        if edge.micro < 1 or edge.inflight < 1:
            yield Finding(path=("edges", i), message="micro and inflight must be at least 1", code="MICRO")


def _gradients(spec: JobSpec) -> Iterator[Finding]:
    """Ends of gradient edges: two roles, effects that count at a commit, rows that come back as they went."""
    sources = [edge.source for edge in spec.edges if edge.kind == "grad"]
    for i, edge in enumerate(spec.edges):
        if edge.kind != "grad":
            continue
        path, text = ("edges", i), f"{edge.source} -> {edge.target}"
        ends = [endpoint(spec, edge.source), endpoint(spec, edge.target)]
        if ends[0].role is not None and ends[0].role == ends[1].role:
            message, hint = f"{text} joins a role with itself", "call the second operation from the first"
            yield Finding(path=path, message=message, hint=hint, code="GRAD_SELF")
        if sources.count(edge.source) > 1 or edge.target in sources:
            message = f"{text}: one gradient edge leaves an operation, and none leaves where one ends"
            hint = "join the further towers into the role at its end, with a pipeline mesh"
            yield Finding(path=path, message=message, hint=hint, code="GRAD_CHAIN")
        if spec.loop is None and all(role.interface or role.run for role in spec.roles):
            message, hint = f"{text} needs a loop that sends batches over it", "add an async function of one argument"
            yield Finding(path=path, message=message, hint=hint, code="NO_LOOP")
        for end in ends:
            role = next((one for one in spec.roles if one.name == end.role), None)
            op = role.interface.op(end.op) if role is not None and role.interface is not None else None
            if role is not None and op is not None:
                yield from _gradient_end(path, text, role, op)


def _gradient_end(path: rules.Path, text: str, role: RoleSpec, op: OpSpec) -> Iterator[Finding]:
    end = f"{role.name}.{op.name}"
    if op.retry != "commit":
        message = f"{text}: gradients add up in {end} until a commit, but it has retry={op.retry!r}"
        yield Finding(path=path, message=message, hint="declare it with retry='commit'", code="GRAD_RETRY")
    match op.send_rule:
        case Shard(pad="none"):
            return
        case SameRule() if role.replicas_max == 1:
            return
        case _:
            message = f"{text}: every row must come back to where it went, but {end} has send={op.send}"
            hint = "declare it with send=Shard(AXIS) and no padding"
            yield Finding(path=path, message=message, hint=hint, code="DISPATCH")


def _turns(spec: JobSpec) -> Iterator[Finding]:
    """What cannot take turns: a path of items or a gradient edge, which are at work all the time."""
    groups = {name: group for group in lease_groups(spec) for name in group}
    names = {role.name for role in spec.roles}
    streams = {stream.name for stream in spec.streams}
    driven = driven_ends(spec, streams)
    for i, edge in enumerate(spec.edges):
        source, target = endpoint(spec, edge.source).role, endpoint(spec, edge.target).role
        text, group = f"{edge.source} -> {edge.target}", groups.get(target or RoleName(""), ())
        if edge.kind == "grad" and source in group and source != target:
            message = f"{text}: both ends work at the same time, but {source} and {target} take turns on a device"
            yield Finding(path=("edges", i), message=message, hint=_OWN_DEVICES, code="TURNS")
        elif edge.kind != "grad" and edge.source in driven and target in groups and names.issuperset(group):
            message = f"{text}: items come at any time, but {target} takes turns with {_others(group, target)}"
            yield Finding(path=("edges", i), message=message, hint=_OWN_DEVICES, code="TURNS")


_OWN_DEVICES = "give each its own devices, or let the loop call them in turn"


def _others(group: tuple[RoleName, ...], name: RoleName | None) -> str:
    return " and ".join(one for one in group if one != name)


def _weights(spec: JobSpec) -> Iterator[Finding]:
    roles = {role.name: role for role in spec.roles}
    for i, edge in enumerate(spec.weights):
        for side, name in (("from", edge.source), ("to", edge.target)):
            if name in roles and (found := roles[name].interface) is not None:
                gives = found.publishes_weights or found.has_state
                yield from _weights_end(("weights", i, side), name, side, gives, found.loads_weights)
        if edge.via not in ("auto", "shm"):
            yield Finding(
                path=("weights", i, "via"),
                message=f"weights from {edge.source} to {edge.target} cannot go via {edge.via}",
                hint="use shm, which auto chooses too: read in place, fetched once for each other machine",
                code="VIA",
            )
        if edge.every < 1:
            yield Finding(path=("weights", i, "every"), message="every must be at least 1 commit", code="EVERY")


def _weights_end(path: rules.Path, name: str, side: str, gives: bool, takes: bool) -> Iterator[Finding]:
    if side == "from" and not gives:
        yield Finding(
            path=path,
            message=f"{name} writes weights, but has neither @op.state nor a publishing operation",
            hint="add a method with @op.state",
            code="NO_STATE",
        )
    if side == "to" and not takes:
        yield Finding(
            path=path,
            message=f"{name} reads weights, but has no @op.weights",
            hint="add def load(self, version, tensors) with @op.weights",
            code="NO_LOAD",
        )


def _contradictions(spec: JobSpec, graph: Graph) -> Iterator[Finding]:
    """Instances that must share a cell over some lines and must not by another; one problem a pair of lines."""
    together = list(ties(spec, graph))
    reported: set[tuple[str, ...]] = set()
    for apart in separations(spec, graph):
        inner = [tie for tie in together if CELL_LEVELS.index(tie.level) <= CELL_LEVELS.index(apart.level)]
        merged: Merged[InstanceId] = Merged()
        for tie in inner:
            merged.join(tie.left, tie.right)
        if not merged.same(apart.left, apart.right):
            continue
        chain = tuple(dict.fromkeys(rules.dotted(tie.line) for tie in _path(inner, apart.left, apart.right)))
        line = rules.dotted(apart.line)
        if (line, *chain) not in reported:
            reported.add((line, *chain))
            yield Finding(
                path=apart.line,
                message=f"keeps {apart.left} and {apart.right} on different {apart.level}s, but"
                f" {' with '.join(chain)} puts them on the same {inner[-1].level if len(chain) == 1 else 'cell'}",
                hint=f"remove {line} or {chain[0]}",
                code="CONTRADICTION",
            )


def _path(edges: list[Tie], start: InstanceId, end: InstanceId) -> list[Tie]:
    """The fewest ties that lead from one instance to the other (breadth first)."""
    came: dict[InstanceId, Tie | None] = {start: None}
    todo = deque([start])
    while todo and end not in came:
        here = todo.popleft()
        for tie in edges:
            for a, b in ((tie.left, tie.right), (tie.right, tie.left)):
                if a == here and b not in came:
                    came[b] = tie
                    todo.append(b)
    path: list[Tie] = []
    here = end
    while (tie := came[here]) is not None:
        path.append(tie)
        here = tie.left if here == tie.right else tie.right
    return path[::-1]


_CHECKS: tuple[Callable[[JobSpec], Iterator[Finding]], ...] = (_operations, _edges, _gradients, _turns, _weights)
