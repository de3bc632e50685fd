"""Paths of a job: from the stream where items come in, over operations, to the stream or operation that takes them.

``prompts -> rollout.generate -> reward.score -> groups`` is a path of two stops whose items the loop takes from
``groups``; ``events -> feat.map -> train.step`` ends in an operation and needs no loop. A path is a line: it is driven
item by item, each stop an operation with ``send=Each``; only its last operation may take whole batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rota.spec.check import Finding
from rota.spec.dispatch import Concat, EachRule, OpSpec, Shard
from rota.spec.job import LOOP_ROLE, STREAM_LOOP, Interface, JobSpec, RoleSpec, StreamSpec, WeightsEdge, endpoint
from rota.spec.resources import Res


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One operation of a path."""

    role: RoleSpec
    op: OpSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The way of items from ``head`` over ``stops``; ``ledger`` is the stream whose ledger accounts for them.

    ``sink`` takes batches of ``micro`` items in the place of a loop. ``weights`` are the edges whose versions make the
    age of an item.
    """

    head: StreamSpec
    ledger: StreamSpec
    stops: tuple[Stop, ...] = ()
    sink: Stop | None = None
    micro: int = 1
    weights: tuple[WeightsEdge, ...] = ()

    @property
    def every(self) -> int:
        """Commits between two versions of the weights that its operations use."""
        return max((edge.every for edge in self.weights), default=1)

    @property
    def put(self) -> bool:
        """True when the loop puts the items in; they cannot be read a second time."""
        return self.head.source is None


def paths_of(spec: JobSpec) -> tuple[Path, ...]:
    """Every path of a job that ``faults_of`` finds nothing in; one a stream from which the loop takes items."""
    after = {edge.source: (index, edge.target) for index, edge in enumerate(spec.edges)}
    fed = {edge.target for edge in spec.edges}
    streams = {stream.name: stream for stream in spec.streams}
    return tuple(_walk(spec, stream, after, streams) for stream in spec.streams if stream.name not in fed)


def with_default_loop(spec: JobSpec) -> JobSpec:
    """The job with a loop that drives its streams to their end, if it has streams and no loop of its own."""
    if not spec.streams or spec.loop is not None or any(role.name == LOOP_ROLE for role in spec.roles):
        return spec
    loop = RoleSpec(name=LOOP_ROLE, workload=STREAM_LOOP, res=Res(cpus=0.1), interface=Interface(kind="loop"))
    return replace(spec, roles=(*spec.roles, loop))


def with_shared_meshes(spec: JobSpec) -> JobSpec:
    """The job in which a role that takes turns with a mesh of its size has that mesh, if it splits over its axes."""
    return replace(spec, roles=tuple(_with_shared_mesh(role, spec) for role in spec.roles))


def _with_shared_mesh(role: RoleSpec, spec: JobSpec) -> RoleSpec:
    rules = [rule for op in (role.interface.ops if role.interface else ()) for rule in (op.send_rule, op.recv_rule)]
    axes = {rule.axis for rule in rules if isinstance(rule, Shard | Concat)} - {None}
    partners = {near.role for near in role.collocate if near.share == "lease"}
    for other in spec.roles if axes and not role.mesh else ():
        same = (role.replicas_min, role.replicas_max) == (other.replicas_min, other.replicas_max)
        if other.name in partners and same and axes <= dict(other.mesh).keys():
            return replace(role, mesh=other.mesh, elastic_axis=other.elastic_axis)
    return role


def _walk(spec: JobSpec, head: StreamSpec, after: dict[str, tuple[int, str]], streams: dict[str, StreamSpec]) -> Path:
    stops: list[Stop] = []
    tail, here, micro = head, head.name, 1
    while here in after:
        index, here = after[here]
        if here in streams:
            tail = streams[here]
            break
        end = endpoint(spec, here)
        role = spec.role(end.vertex)
        op = role.interface.op(end.op) if role.interface else None
        stops.append(Stop(role=role, op=op or OpSpec(name=end.op, send="Each", recv="Concat")))
        micro = spec.edges[index].micro
    takes_batches = bool(stops) and (not isinstance(stops[-1].op.send_rule, EachRule) or stops[-1].op.retry == "commit")
    sink = stops.pop() if tail is head and takes_batches else None
    roles = {stop.role.name for stop in stops}
    edges = tuple(edge for edge in spec.weights if edge.target in roles or not stops)
    return Path(head=head, ledger=tail, stops=tuple(stops), sink=sink, micro=micro, weights=edges)


def faults_of(spec: JobSpec) -> Iterator[Finding]:
    """Everything in the streams of a job that would stall or cannot be driven; the edges must be known ones."""
    yield from _lines(spec)
    for stream in spec.streams:
        at = ("streams", stream.name)
        if stream.full == "spill":
            hint = "use block or drop_oldest"
            yield Finding(path=(*at, "full"), message="items are not spilled to disk", hint=hint, code="FULL")
        if stream.cap < 1:
            yield Finding(path=(*at, "cap"), message=f"cap {stream.cap} holds nothing", hint="at least 1", code="CAP")
        if stream.source is not None and any(edge.target == stream.name for edge in spec.edges):
            edge = next(edge for edge in spec.edges if edge.target == stream.name)
            message = f"{stream.name} has a source, and {edge.source} -> {stream.name} feeds it too"
            yield Finding(path=(*at, "source"), message=message, hint="take one of them out", code="TWO_FEEDS")


def _lines(spec: JobSpec) -> Iterator[Finding]:
    """Forks, joins and chains: what is not a line from a stream; then each line by itself."""
    streams = {stream.name for stream in spec.streams}
    driven = driven_ends(spec, streams)
    seen_from: dict[str, str] = {}
    seen_to: dict[str, str] = {}
    bad = False
    for index, edge in enumerate(spec.edges):
        at, text = ("edges", index), f"{edge.source} -> {edge.target}"
        if edge.source not in driven or edge.kind in ("grad", "handoff"):
            continue
        sides = ((seen_from, edge.source, "leaves", "FORK"), (seen_to, edge.target, "enters", "JOIN"))
        for ends, end, word, code in sides:
            if end in ends:
                bad, message = True, f"{text} {word} {end}, and so does {ends[end]}: a path of items is a line"
                yield Finding(path=at, message=message, hint="let the loop take one of the two by a call", code=code)
            ends[end] = text
        if edge.source in streams and any(other.target == edge.source for other in spec.edges):
            bad, message = True, f"{text} continues from {edge.source}, which a path feeds"
            hint = f"let the path continue over the operations, or let the loop put() what it takes from {edge.source}"
            yield Finding(path=at, message=message, hint=hint, code="CHAIN")
    paths = () if bad else paths_of(spec)
    if len(paths) > 1 and spec.loop is not None and spec.loop.workload == STREAM_LOOP:
        message = (
            f"streams {' and '.join(path.head.name for path in paths)} need a loop that says in which order they go"
        )
        hint = "add an async function of one argument as a role"
        yield Finding(path=("streams",), message=message, hint=hint, code="NO_LOOP")
    else:
        for path in paths:
            yield from _line(spec, path)


def driven_ends(spec: JobSpec, streams: set[str]) -> set[str]:
    """Ends of edges that items of a stream pass."""
    found, size = set(streams), -1
    while size != len(found):
        size = len(found)
        found |= {edge.target for edge in spec.edges if edge.source in found}
    return found


def _line(spec: JobSpec, path: Path) -> Iterator[Finding]:
    head, where = path.head.name, ("streams", path.ledger.name)
    known = all(role.interface is not None or role.run is not None for role in spec.roles)
    for stop in path.stops:
        end = f"{stop.role.name}.{stop.op.name}"
        index, edge = next((i, edge) for i, edge in enumerate(spec.edges) if edge.target == end)
        text = f"{edge.source} -> {end}"
        if stop.role.interface is not None and not isinstance(stop.op.send_rule, EachRule):
            message = f"{text}: items come one by one, but {end} is declared with send={stop.op.send}"
            hint = "declare it with send=Each, or let the loop call it with a batch"
            yield Finding(path=("edges", index), message=message, hint=hint, code="DISPATCH")
        elif stop.op.retry != "safe":
            message = f"{text}: an item may be run again elsewhere, but {end} has retry={stop.op.retry!r}"
            hint = "use retry='safe', or let the loop call it with what it takes from the stream"
            yield Finding(path=("edges", index), message=message, hint=hint, code="NOT_SAFE")
    if path.micro > path.ledger.cap:
        message = (
            f"{head} holds {path.ledger.cap} items, but its consumer waits for {path.micro}: it would wait for ever"
        )
        yield Finding(path=(*where, "cap"), message=message, hint=f"raise cap to {path.micro}", code="CAP_BELOW_BATCH")
    if path.sink is not None and known and spec.loop is not None and spec.loop.workload != STREAM_LOOP:
        sink = f"{path.sink.role.name}.{path.sink.op.name}"
        message = f"{head} ends in {sink}, but the job has a loop, which takes the batches"
        yield Finding(
            path=where, message=message, hint="end the path in a stream, or take out the loop", code="TWO_SINKS"
        )
    bound = path.ledger.stale
    if bound is not None and spec.weights and not path.weights:
        message = f"{path.ledger.name} bounds staleness, but no weights edge leads to a role that makes its items"
        hint = "add the edge, or take out stale"
        yield Finding(path=(*where, "stale"), message=message, hint=hint, code="STALE_WITHOUT_WEIGHTS")
    if bound is not None and bound.versions < path.every - 1:
        message = f"items may be {bound.versions} commits old, but weights come every {path.every} commits"
        hint = f"set versions to at least {path.every - 1}, or every to {bound.versions + 1}"
        yield Finding(path=(*where, "stale"), message=message, hint=hint, code="STALE_BELOW_EVERY")
