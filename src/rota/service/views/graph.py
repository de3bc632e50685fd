"""The graph of a job, and its trace for Perfetto."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from rota.job.core.graph import blast_radius, expand
from rota.job.core.paths import paths_of
from rota.job.core.progress import Piece, Span, critical_path, idle_shares, lanes, shares
from rota.job.core.resize import wanted_size
from rota.service.models.base import document
from rota.service.models.jobs import (
    GraphDocument,
    GraphRole,
    GraphStream,
    ObservedEdge,
    TraceDocument,
    TraceEvent,
    TraceSummary,
)
from rota.service.views.job_history import JobHistory
from rota.service.views.jobs import HeartbeatFields, stream_rows
from rota.spec.events import Committed, Record
from rota.spec.job import JobSpec


def graph_document(
    spec: JobSpec, job: JobHistory | None = None, beats: Mapping[str, HeartbeatFields] | None = None
) -> GraphDocument:
    """Vertices, edges and failure units; with a job also the state of each instance and what streams have seen.

    ``replicas`` are as many as are wanted now, without a job the fewest. ``observed`` are the edges that ``beats``
    report, summed over the instances of a role since their processes began.
    """
    graph = expand(spec)
    seen = {row["name"]: row for row in stream_rows(job.commit if job else None)}
    sizes = {role.name: wanted_size(job.ctx, role) if job else role.replicas_min for role in spec.roles}
    states = {} if job is None else {key: one.state.value for key, one in job.instances.items()}
    return document(
        GraphDocument,
        graph,
        job=None if job is None else job.id,
        name=spec.name,
        roles=[
            document(
                GraphRole,
                role,
                replicas=sizes[role.name],
                loop=role.is_loop,
                stateful=role.name in graph.stateful,
                blast_radius=blast_radius(spec, graph, role.name).text,
                states=[states.get((role.name, rank), "PLANNED") for rank in range(sizes[role.name])],
            )
            for role in spec.roles
        ],
        streams=[document(GraphStream, one, seen=seen.get(one.name)) for one in spec.streams],
        subgraphs=[map(str, part.members) for part in graph.subgraphs],
        units=[map(str, unit) for unit in graph.units],
        observed=observed_edges(beats or {}),
    )


def observed_edges(beats: Mapping[str, HeartbeatFields]) -> list[ObservedEdge]:
    """Who really called whom: times, failures, seconds waited and about how many bytes went both ways."""
    sums: dict[tuple[str, str, str, str], tuple[int, int, float, int]] = {}
    for instance, beat in beats.items():
        for kind, target, what, n, failed, waited_s, size in beat.get("calls", ()):
            key = (instance.partition("/")[0], target, kind, what)
            a, b, c, d = sums.get(key, (0, 0, 0.0, 0))
            sums[key] = (a + n, b + failed, c + waited_s, d + size)
    return [
        ObservedEdge(
            source=source, target=target, kind=kind, what=what, n=n, failed=failed, waited_s=round(s, 3), bytes=size
        )
        for (source, target, kind, what), (n, failed, s, size) in sums.items()
    ]


SPANS_MAX = 200_000
"""Of more spans than that the oldest are left out."""
JOB_PID = 1
_US = 1e6


def trace_document(job: JobHistory, records: Iterable[Record], spans: Mapping[str, Sequence[Span]]) -> TraceDocument:
    """The Trace Event format that Perfetto and chrome://tracing open; ``summary`` says in shares what bound the job.

    Times are microseconds since the first admission. Lanes 0 of each role are its instances; what overlaps gets more.
    """
    kept = _newest(spans)
    begins = [one.at_s for those in kept.values() for one in those]
    origin_s = min([*begins, *(one.admitted_at for one in job.attempts[:1])], default=job.submitted_at)
    steps = _steps(job, records, kept)
    path = [piece for waits, begin_s, end_s in steps for piece in critical_path(waits, begin_s, end_s)]
    events = [*_names(kept), *_instances(kept, origin_s), *_job(job, path, steps, origin_s)]
    window = (
        (steps[0][1], steps[-1][2])
        if steps
        else (origin_s, max((one.end_s for s in kept.values() for one in s), default=origin_s))
    )
    loop = job.ctx.graph.loop if job.ctx.graph else None
    served = {name: those for name, those in kept.items() if name != f"{loop}/0"}  # its time is the path above
    summary = TraceSummary(
        steps=len(steps),
        seconds=round(window[1] - window[0], 3),
        bound_by={name: round(share, 4) for name, share in shares(path).items()},
        idle={role: round(share, 4) for role, share in idle_shares(served, *window).items()},
    )
    return document(TraceDocument, job=job.id, traceEvents=events, summary=summary)


def _newest(spans: Mapping[str, Sequence[Span]]) -> dict[str, list[Span]]:
    """At most ``SPANS_MAX`` in all: the same cut in time for every instance."""
    ends = sorted(one.end_s for those in spans.values() for one in those)
    cut_s = ends[-SPANS_MAX] if len(ends) > SPANS_MAX else float("-inf")
    return {name: [one for one in those if one.end_s >= cut_s] for name, those in spans.items()}


Step = tuple[list[Span], float, float]


def _steps(job: JobHistory, records: Iterable[Record], spans: Mapping[str, Sequence[Span]]) -> list[Step]:
    """The loop's waits of each step: from one commit to the next, the first from the loop's first wait."""
    graph = job.ctx.graph
    loop = next((those for name, those in spans.items() if graph and name == f"{graph.loop}/0"), [])
    # Items of streams go through operations beside the loop, which waits for the stream alone.
    stops = [stop for path in paths_of(job.spec) for stop in path.stops] if graph else []
    beside = {(stop.role.name, stop.op.name) for stop in stops}
    waits = [
        one
        for one in loop
        if one.kind != "run" and not (one.kind == "call" and (one.target.partition("/")[0], one.name) in beside)
    ]
    if not waits:
        return []
    commits = [record.at for record in records if isinstance(record.event, Committed)]
    edges = [min(one.at_s for one in waits), *(at for at in commits if at > min(one.at_s for one in waits))]
    return [([w for w in waits if w.end_s > a and w.at_s < b], a, b) for a, b in pairwise(edges)]


def _pid(names: Sequence[str], role: str) -> int:
    return JOB_PID + 1 + names.index(role)


def _roles(spans: Mapping[str, object]) -> list[str]:
    return sorted({name.partition("/")[0] for name in spans})


def _names(spans: Mapping[str, object]) -> Iterator[TraceEvent]:
    roles = _roles(spans)
    yield _name("process_name", JOB_PID, 0, "job")
    for tid, text in enumerate(("critical path", "commits", "recoveries", "states")):
        yield _name("thread_name", JOB_PID, tid, text)
    for role in roles:
        yield _name("process_name", _pid(roles, role), 0, role)


def _name(what: str, pid: int, tid: int, text: str) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": text}}


def _instances(spans: Mapping[str, Sequence[Span]], origin_s: float) -> Iterator[TraceEvent]:
    roles = _roles(spans)
    callees: dict[str, tuple[int, int, Span]] = {}
    callers: list[tuple[int, int, Span]] = []
    for name, those in spans.items():
        role, _, rank = name.partition("/")
        pid, tid = _pid(roles, role), int(rank) * 1000
        for title, some in (
            (name, [one for one in those if one.kind == "run"]),
            (f"{name} waits", [one for one in those if one.kind != "run"]),
        ):
            for row in lanes(some):
                yield _name("thread_name", pid, tid, title)
                for one in row:
                    yield _slice(pid, tid, _title(one), one.at_s, one.s, origin_s, kind=one.kind)
                    if one.call and one.kind == "run":
                        callees[one.call] = (pid, tid, one)
                    elif one.call:
                        callers.append((pid, tid, one))
                tid += 1
    for number, (pid, tid, wait) in enumerate(callers, 1):
        if wait.call in callees:
            to_pid, to_tid, run = callees[wait.call]
            flow: TraceEvent = {"name": wait.name, "cat": "call", "id": number}
            yield {**flow, "ph": "s", "pid": pid, "tid": tid, "ts": _us(wait.at_s, origin_s)}
            yield {**flow, "ph": "f", "bp": "e", "pid": to_pid, "tid": to_tid, "ts": _us(run.at_s, origin_s)}


def _title(one: Span) -> str:
    return one.name if one.kind == "run" else f"{one.kind} {one.target} {one.name}".strip()


def _job(job: JobHistory, path: Sequence[Piece], steps: Sequence[Step], origin_s: float) -> Iterator[TraceEvent]:
    for piece in path:
        yield _slice(JOB_PID, 0, piece.name, piece.at_s, piece.s, origin_s)
    for number, (_, begin_s, end_s) in enumerate(steps, 1):
        yield _slice(JOB_PID, 1, f"step {number}", begin_s, end_s - begin_s, origin_s)
    for number, one in enumerate(job.failures, 1):
        ended_s = one.ended_at or one.decided_at
        text = f"recovery {number} of {one.cause.role}/{one.cause.rank} ({one.level}): {one.cause.reason}"
        yield _slice(JOB_PID, 2, text, one.seen_at, ended_s - one.seen_at, origin_s)
    known_s = max((one.at_s + one.s for one in path), default=job.since)
    for (at, state), (until, _) in pairwise([*job.state_changes, (known_s, job.state)]):
        if state.holds_devices:
            yield _slice(JOB_PID, 3, state.value, at, max(0.0, until - at), origin_s)


def _slice(pid: int, tid: int, name: str, at_s: float, s: float, origin_s: float, **args: str) -> TraceEvent:
    ts, dur = _us(at_s, origin_s), round(s * _US)
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": dur, "args": args}


def _us(at_s: float, origin_s: float) -> int:
    return round((at_s - origin_s) * _US)
