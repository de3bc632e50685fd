"""What is wrong with a graph before anything starts: each problem names the role, the line and the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod

from rota.job.core.graph import Endpoint, Graph, Merged, data_flow, endpoint, expand, find_cycle, lease_groups
from rota.job.core.paths import driven_ends, faults_of
from rota.job.core.placement import LEVELS, Tie, separations, ties
from rota.spec.dispatch import Concat, FirstRule, OpSpec, Rank, SameRule, Shard
from rota.spec.ids import InstanceId, RoleName
from rota.spec.job import JobSpec, RoleSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProblem:
    """One thing to mend. ``path`` is the place in the job file, ``hint`` the next step, ``code`` stable."""

    path: str
    message: str
    hint: str = ""
    code: str = "GRAPH"

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" + (f" ({self.hint})" if self.hint else "")


def check_graph(spec: JobSpec) -> tuple[GraphProblem, ...]:
    """Everything that is wrong with the roles and edges of a job; empty when it can be started.

    What needs the interface of a workload (its operations and state) is checked only for roles that have one.
    """
    problems = [problem for check in _CHECKS for problem in check(spec)]
    if not problems:
        problems = [*_contradictions(spec, expand(spec)), *_shares(spec), *_flows(spec)]
    return tuple(problems)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint with the nearest known names, or all of them when none is near."""
    names = list(dict.fromkeys(known))
    near = get_close_matches(name, names, n=2, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there are {', '.join(names)}" if names else "there are none"


def _roles(spec: JobSpec) -> Iterator[GraphProblem]:
    seen: set[str] = set()
    loops = [role.name for role in spec.roles if role.is_loop]
    for role in spec.roles:
        path = f"roles.{role.name}"
        if role.name in seen:
            yield GraphProblem(path=path, message=f"role {role.name} appears twice", code="DUPLICATE_ROLE")
        seen.add(role.name)
        if (role.workload is None) is (role.run is None):
            yield GraphProblem(
                path=path,
                message=f"role {role.name} needs exactly one of workload and run",
                hint="workload: module:Class, or run: a command",
                code="WORKLOAD",
            )
        if not 1 <= role.replicas_min <= role.replicas_max:
            yield GraphProblem(
                path=f"{path}.replicas",
                message=f"replicas {role.replicas_min} to {role.replicas_max} is no range",
                hint="at least 1, and min not above max",
                code="REPLICAS",
            )
    if len(loops) > 1:
        yield GraphProblem(
            path=f"roles.{loops[1]}",
            message=f"{' and '.join(loops)} are both loops; a job has at most one",
            hint="make the other one a class with operations",
            code="TWO_LOOPS",
        )
    if not spec.roles:
        yield GraphProblem(path="roles", message="a job needs at least one role", code="NO_ROLES")


def _meshes(spec: JobSpec) -> Iterator[GraphProblem]:
    for role in spec.roles:
        sizes = " * ".join(f"{axis}={size}" for axis, size in role.mesh)
        product = prod(size for _, size in role.mesh)
        if role.mesh and product != role.replicas_min:
            yield GraphProblem(
                path=f"roles.{role.name}.mesh",
                message=f"mesh of {role.name}: {sizes} = {product}, but it has {role.replicas_min} instances",
                hint=f"set replicas to {product}, or change an axis",
                code="MESH_PRODUCT",
            )
        for op in role.interface.ops if role.interface else ():
            yield from _axes(role, op)


def _axes(role: RoleSpec, op: OpSpec) -> Iterator[GraphProblem]:
    """A role without a mesh has one axis of any name that spans its instances; a mesh must have the axis named."""
    axes = [axis for axis, _ in role.mesh]
    for rule in (op.send_rule, op.recv_rule):
        match rule:
            case Shard(axis=axis) | Concat(axis=str() as axis) if axes and axis not in axes:
                yield GraphProblem(
                    path=f"roles.{role.name}.mesh",
                    message=f"{role.name}.{op.name} splits over the axis {axis}, which the mesh does not have",
                    hint=did_you_mean(axis, axes),
                    code="NO_AXIS",
                )
            case Rank(rank=rank) if not 0 <= rank < role.replicas_min:
                yield GraphProblem(
                    path=f"roles.{role.name}.replicas",
                    message=f"{role.name}.{op.name} uses rank {rank}, but there are {role.replicas_min} instances",
                    hint=f"set replicas to at least {rank + 1}",
                    code="NO_RANK",
                )
            case _:
                pass


def _contracts(spec: JobSpec) -> Iterator[GraphProblem]:
    for role in spec.roles:
        path, degrade = f"roles.{role.name}.fail", role.fail.degrade
        if degrade is not None and not 1 <= degrade <= role.replicas_min:
            yield GraphProblem(
                path=f"{path}.degrade",
                message=f"degrade of {role.name} is {degrade}; it must be from 1 to {role.replicas_min}",
                hint=f"the job can go on with at most the {role.replicas_min} instances it starts with",
                code="DEGRADE",
            )
        if role.fail.limit_n < 0 or role.fail.limit_window_s <= 0:
            yield GraphProblem(
                path=f"{path}.limit", message="limit needs a count and a window, such as 3/10m", code="LIMIT"
            )
        for op in role.interface.ops if role.interface else ():
            yield from _operation(role, op)


def _operation(role: RoleSpec, op: OpSpec) -> Iterator[GraphProblem]:
    assert role.interface is not None
    if op.retry == "commit" and not role.interface.has_state:
        yield GraphProblem(
            path=f"roles.{role.name}.workload",
            message=f"{role.name}.{op.name} is a commit operation, but the workload has no @op.state",
            hint="add a method with @op.state that returns what a restart must bring back, or use retry='safe'",
            code="NO_STATE",
        )
    if isinstance(op.recv_rule, FirstRule) and op.retry != "safe":
        yield GraphProblem(
            path=f"roles.{role.name}.workload",
            message=f"{role.name}.{op.name} takes the first answer and cancels the others, but is not safe to repeat",
            hint="use retry='safe', or another recv rule",
            code="FIRST_NOT_SAFE",
        )


def _edges(spec: JobSpec) -> Iterator[GraphProblem]:
    for i, edge in enumerate(spec.edges):
        path = f"edges[{i}]"
        for text in (edge.source, edge.target):
            yield from _end(spec, path, endpoint(spec, text))
        if edge.micro < 1 or edge.inflight < 1:
            yield GraphProblem(path=path, message="micro and inflight must be at least 1", code="MICRO")
        if edge.kind in ("grad", "handoff"):
            for end in (endpoint(spec, edge.source), endpoint(spec, edge.target)):
                if end.role is None and any(stream.name == end.text for stream in spec.streams):
                    yield GraphProblem(
                        path=path,
                        message=f"a {edge.kind} edge joins two roles, but {end.text} is a stream",
                        hint="name an operation of a role, such as llm.step",
                        code="EDGE_KIND",
                    )


def _gradients(spec: JobSpec) -> Iterator[GraphProblem]:
    """Ends of gradient edges: two roles, effects that count at a commit, rows that come back as they went."""
    sources = [edge.source for edge in spec.edges if edge.kind == "grad"]
    for i, edge in enumerate(spec.edges):
        if edge.kind != "grad":
            continue
        path, text = f"edges[{i}]", f"{edge.source} -> {edge.target}"
        ends = [endpoint(spec, edge.source), endpoint(spec, edge.target)]
        if ends[0].role is not None and ends[0].role == ends[1].role:
            message, hint = f"{text} joins a role with itself", "call the second operation from the first"
            yield GraphProblem(path=path, message=message, hint=hint, code="GRAD_SELF")
        if sources.count(edge.source) > 1 or edge.target in sources:
            message = f"{text}: one gradient edge leaves an operation, and none leaves where one ends"
            hint = "join the further towers into the role at its end, with a pipeline mesh"
            yield GraphProblem(path=path, message=message, hint=hint, code="GRAD_CHAIN")
        if spec.loop is None and all(role.interface or role.run for role in spec.roles):
            message, hint = f"{text} needs a loop that sends batches over it", "add an async function of one argument"
            yield GraphProblem(path=path, message=message, hint=hint, code="NO_LOOP")
        for end in ends:
            role = next((one for one in spec.roles if one.name == end.role), None)
            op = role.interface.op(end.op) if role is not None and role.interface is not None else None
            if role is not None and op is not None:
                yield from _gradient_end(path, text, role, op)


def _gradient_end(path: str, text: str, role: RoleSpec, op: OpSpec) -> Iterator[GraphProblem]:
    end = f"{role.name}.{op.name}"
    if op.retry != "commit":
        message = f"{text}: gradients add up in {end} until a commit, but it has retry={op.retry!r}"
        yield GraphProblem(path=path, message=message, hint="declare it with retry='commit'", code="GRAD_RETRY")
    match op.send_rule:
        case Shard(pad="none"):
            return
        case SameRule() if role.replicas_max == 1:
            return
        case _:
            message = f"{text}: every row must come back to where it went, but {end} has send={op.send}"
            hint = "declare it with send=Shard(AXIS) and no padding"
            yield GraphProblem(path=path, message=message, hint=hint, code="DISPATCH")


def _turns(spec: JobSpec) -> Iterator[GraphProblem]:
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
            yield GraphProblem(path=f"edges[{i}]", message=message, hint=_OWN_DEVICES, code="TURNS")
        elif edge.kind != "grad" and edge.source in driven and target in groups and names.issuperset(group):
            message = f"{text}: items come at any time, but {target} takes turns with {_others(group, target)}"
            yield GraphProblem(path=f"edges[{i}]", message=message, hint=_OWN_DEVICES, code="TURNS")


_OWN_DEVICES = "give each its own devices, or let the loop call them in turn"


def _others(group: tuple[RoleName, ...], name: RoleName | None) -> str:
    return " and ".join(one for one in group if one != name)


def _end(spec: JobSpec, path: str, end: Endpoint) -> Iterator[GraphProblem]:
    streams = [stream.name for stream in spec.streams]
    if end.role is None:
        if end.text not in streams:
            head = end.text.split(".")[0]
            yield GraphProblem(
                path=path,
                message=f"{end.text} is neither a stream nor an operation of a role",
                hint=did_you_mean(head, [*(role.name for role in spec.roles), *streams]),
                code="UNKNOWN_END",
            )
        return
    role = spec.role(end.role)
    if role.interface is None or not end.op or role.interface.op(end.op) is not None:
        return
    yield GraphProblem(
        path=path,
        message=f"role {role.name} has no operation {end.op}",
        hint=did_you_mean(end.op, (op.name for op in role.interface.ops)),
        code="UNKNOWN_OP",
    )


def _weights(spec: JobSpec) -> Iterator[GraphProblem]:
    names = [role.name for role in spec.roles]
    for i, edge in enumerate(spec.weights):
        for side, name in (("from", edge.source), ("to", edge.target)):
            path = f"weights[{i}].{side}"
            if name not in names:
                yield GraphProblem(
                    path=path, message=f"there is no role {name}", hint=did_you_mean(name, names), code="UNKNOWN_ROLE"
                )
            elif (found := spec.role(name).interface) is not None:
                yield from _weights_end(
                    path, name, side, found.publishes_weights or found.has_state, found.loads_weights
                )
        if edge.via not in ("auto", "shm"):
            yield GraphProblem(
                path=f"weights[{i}].via",
                message=f"weights from {edge.source} to {edge.target} cannot go via {edge.via}",
                hint="use shm, which auto chooses too: one host, read in place",
                code="VIA",
            )
        if edge.every < 1:
            yield GraphProblem(path=f"weights[{i}].every", message="every must be at least 1 commit", code="EVERY")
    for stream in spec.streams:
        if stream.stale is not None and not spec.weights:
            yield GraphProblem(
                path=f"streams.{stream.name}.stale",
                message=f"{stream.name} bounds staleness in versions, but no weights edge makes versions",
                hint="add weights: [{from: ..., to: ...}]",
                code="STALE_WITHOUT_WEIGHTS",
            )


def _weights_end(path: str, name: str, side: str, gives: bool, takes: bool) -> Iterator[GraphProblem]:
    if side == "from" and not gives:
        yield GraphProblem(
            path=path,
            message=f"{name} writes weights, but has neither @op.state nor a publishing operation",
            hint="add a method with @op.state",
            code="NO_STATE",
        )
    if side == "to" and not takes:
        yield GraphProblem(
            path=path,
            message=f"{name} reads weights, but has no @op.weights",
            hint="add def load(self, version, tensors) with @op.weights",
            code="NO_LOAD",
        )


def _cycles(spec: JobSpec) -> Iterator[GraphProblem]:
    if cycle := find_cycle(data_flow(spec)):
        yield GraphProblem(
            path="edges",
            message=f"the data flow goes in a circle: {' -> '.join(cycle)}",
            hint="feed back by a weights edge, or call from the loop",
            code="FLOW_CYCLE",
        )
    names = [role.name for role in spec.roles]
    for role in spec.roles:
        for name in role.start_after:
            if name not in names:
                yield GraphProblem(
                    path=f"roles.{role.name}.start_after",
                    message=f"there is no role {name}",
                    hint=did_you_mean(name, names),
                    code="UNKNOWN_ROLE",
                )
    if cycle := find_cycle({role.name: role.start_after for role in spec.roles}):
        yield GraphProblem(
            path=f"roles.{cycle[0]}.start_after",
            message=f"these roles wait for each other: {' -> '.join(cycle)}",
            hint="take one of them out",
            code="START_CYCLE",
        )


def _success(spec: JobSpec) -> Iterator[GraphProblem]:
    if spec.success_when == "loop" and spec.loop is None and all(role.interface or role.run for role in spec.roles):
        yield GraphProblem(
            path="success_when", message="the job has no loop", hint="use all, or a list of roles", code="NO_LOOP"
        )
    if not isinstance(spec.success_when, tuple):
        return
    names = [role.name for role in spec.roles]
    for name in spec.success_when:
        if name not in names:
            yield GraphProblem(
                path="success_when",
                message=f"there is no role {name}",
                hint=did_you_mean(name, names),
                code="UNKNOWN_ROLE",
            )
        elif not spec.role(name).finite and spec.role(name).interface is not None:
            yield GraphProblem(
                path="success_when",
                message=f"{name} waits for calls and never ends by itself",
                hint="name the loop, a command or a function",
                code="NEVER_ENDS",
            )


def _nears(spec: JobSpec) -> Iterator[GraphProblem]:
    names = [role.name for role in spec.roles]
    for role in spec.roles:
        for kind, lines in (("collocate", role.collocate), ("apart", role.apart)):
            for i, near in enumerate(lines):
                path = f"roles.{role.name}.{kind}[{i}]"
                if near.role != "self" and near.role not in names:
                    yield GraphProblem(
                        path=path,
                        message=f"there is no role {near.role}",
                        hint=did_you_mean(near.role, [*names, "self"]),
                        code="UNKNOWN_ROLE",
                    )
                elif kind == "apart" and near.role == role.name:
                    yield GraphProblem(
                        path=path,
                        message=f"{role.name} cannot be apart from itself by name",
                        hint="write role: self to keep its members apart",
                        code="APART_SELF",
                    )


def _contradictions(spec: JobSpec, graph: Graph) -> Iterator[GraphProblem]:
    """Instances that must share a cell over some lines and must not by another; one problem a pair of lines."""
    together = list(ties(spec, graph))
    told: set[tuple[str, ...]] = set()
    for apart in separations(spec, graph):
        inner = [tie for tie in together if LEVELS.index(tie.level) <= LEVELS.index(apart.level)]
        merged: Merged[InstanceId] = Merged()
        for tie in inner:
            merged.join(tie.left, tie.right)
        if not merged.same(apart.left, apart.right):
            continue
        chain = tuple(dict.fromkeys(tie.line for tie in _path(inner, apart.left, apart.right)))
        if (apart.line, *chain) not in told:
            told.add((apart.line, *chain))
            yield GraphProblem(
                path=apart.line,
                message=f"keeps {apart.left} and {apart.right} on different {apart.level}s, but"
                f" {' with '.join(chain)} puts them on the same {inner[-1].level if len(chain) == 1 else 'cell'}",
                hint=f"remove {apart.line} or {chain[0]}",
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


def _shares(spec: JobSpec) -> Iterator[GraphProblem]:
    for role in spec.roles:
        for i, near in enumerate(role.collocate):
            if near.level == "device" and near.share == "fraction" and near.role != "self":
                total = role.res.gpus + spec.role(near.role).res.gpus
                if total > 1:
                    yield GraphProblem(
                        path=f"roles.{role.name}.collocate[{i}]",
                        message=f"{role.name} and {near.role} share a device by fractions that sum to {total:g}",
                        hint="make them sum to at most 1, or use share: lease",
                        code="FRACTIONS",
                    )


def _flows(spec: JobSpec) -> Iterator[GraphProblem]:
    for fault in faults_of(spec):
        yield GraphProblem(path=fault.path, message=fault.message, hint=fault.hint, code=fault.code)


_CHECKS: tuple[Callable[[JobSpec], Iterator[GraphProblem]], ...] = (
    _roles,
    _meshes,
    _contracts,
    _edges,
    _gradients,
    _turns,
    _weights,
    _cycles,
    _success,
    _nears,
)
