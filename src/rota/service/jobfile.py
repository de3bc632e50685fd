"""Text of a job file to JobSpec, or every mistake in it at its place.

YAML 1.2 or JSON, strict. The steps are those of ``read_job``; nothing here reads a file, a clock or a network.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rota.service.fieldkinds import BAD
from rota.service.jobschema import JOB, MODEL
from rota.service.olderform import convert_older_form, is_older_form
from rota.service.problems import Problem as Problem
from rota.service.sets import apply_sets, find_place
from rota.service.yamltree import Node, Sink, decode, read_tree
from rota.spec import check as rules
from rota.spec.errors import did_you_mean
from rota.spec.ids import RoleName
from rota.spec.job import (
    Bound,
    Checkpoint,
    Edge,
    Fail,
    JobSpec,
    Near,
    RoleSpec,
    Sizes,
    StreamSpec,
    TrainedModel,
    WeightsEdge,
    sizes_of,
)
from rota.spec.resources import Res
from rota.spec.torchrun import is_torchrun, plain_words

ARROW = "->"


def read_job(text: str | bytes, *, filename: str, sets: Sequence[str] = ()) -> JobSpec:
    """The job that ``text`` describes, with ``sets`` (``path=value``) applied over it.

    Raises JobFileError with every problem, in the order of the file; problems of ``sets`` come last.
    """
    reader, spec = _read(text, filename, sets)
    # 5 the rules between them
    reader.check(spec)
    reader.sink.raise_if_any()
    return spec


def placed(
    faults: Iterable[rules.Finding], text: str, *, filename: str, sets: Sequence[str] = ()
) -> tuple[Problem, ...]:
    """What was found out about a job after it was read, at its place in the text; without a text there is no place."""
    if not text:
        none = Problem(loc="", line=0, col=0, message="", file=filename)
        return tuple(
            replace(none, loc=rules.dotted(one.path), message=one.message, hint=one.hint, code=one.code)
            for one in faults
        )
    reader, _ = _read(text, filename, sets)
    for one in faults:
        reader.place(one)
    return reader.sink.error().problems


def problems_of(spec: JobSpec, *, filename: str = "job") -> tuple[Problem, ...]:
    """The rules that a spec without a file breaks (a built one, or one completed by inspecting its workloads)."""
    return placed(rules.check(spec), "", filename=filename)


def _read(text: str | bytes, filename: str, sets: Sequence[str]) -> tuple[_Builder, JobSpec]:
    # 1 bytes to text, text to nodes with places
    text = decode(text, filename=filename) if isinstance(text, bytes) else text
    sink = Sink(text, filename)
    root = read_tree(text, sink)
    # 2 the older form becomes this one; --set goes over the file
    if is_older_form(root):
        root = convert_older_form(root, sink)
    apply_sets(root, sets, sink)
    # 3 nodes to fields, strictly
    fields = JOB.read(root, "", sink)
    if fields is BAD:
        raise sink.error()
    # 4 fields to the spec
    reader = _Builder(root, sink)
    return reader, reader.job(fields)


class _Builder:
    """Makes the values of spec from fields and remembers which node each came from."""

    def __init__(self, root: Node, sink: Sink) -> None:
        self._root = root
        self.sink = sink
        self._edges: list[tuple[Node, str]] = []
        """Node and path of each edge, after chains were taken apart."""

    def job(self, fields: Mapping[str, Any]) -> JobSpec:
        streams = tuple(self._stream(name, raw) for name, raw in fields.get("streams", {}).items() if raw is not BAD)
        kept = ("queue", "priority", "gang", "retry", "workdir", "data", "output", "secrets", "image", "seed")
        renamed = {"time_limit": "time_limit_s", "grace": "grace_s", "success_when": "success_when"}
        return JobSpec(
            name=fields.get("name", "job"),
            roles=tuple(self._role(name, {} if raw is BAD else raw) for name, raw in fields.get("roles", {}).items()),
            streams=streams,
            edges=self._all_edges(_whole(fields, "edges"), {stream.name for stream in streams}),
            weights=tuple(_weights(raw) for raw in _whole(fields, "weights")),
            env=_pairs(fields.get("env", {})),
            labels=_pairs(fields.get("labels", {})),
            checkpoint=Checkpoint(**fields["checkpoint"]) if "checkpoint" in fields else None,
            **_present(fields, {name: name for name in kept} | renamed),
        )

    def _role(self, name: str, fields: Mapping[str, Any]) -> RoleSpec:
        low, high, mesh, elastic = _size(fields)
        run, shell = _command(fields.get("run"), find_place(self._root, ("roles", name, "run")))
        return RoleSpec(
            name=RoleName(name),
            workload=fields.get("workload"),
            run=run,
            shell=shell,
            replicas_min=low,
            replicas_max=high,
            mesh=mesh,
            elastic_axis=elastic,
            res=Res(**_present(fields.get("resources", {}), _RES)),
            env=_pairs(fields.get("env", {})),
            fail=_fail(fields.get("fail", {})),
            collocate=_nears(fields.get("collocate", ())),
            apart=_nears(fields.get("apart", ())),
            plan=fields.get("plan"),
            model=_model(fields.get("model")),
            **_present(fields, {"setup": "setup", "start_after": "start_after"}),
        )

    def _stream(self, name: str, fields: Mapping[str, Any]) -> StreamSpec:
        kept = _present(fields, {key: key for key in ("source", "key", "cap", "full")})
        return StreamSpec(name=name, stale=_bound(fields.get("stale")), **kept)

    def _all_edges(self, fields: Sequence[Any], streams: set[str]) -> tuple[Edge, ...]:
        node = find_place(self._root, ("edges",))
        edges: list[Edge] = []
        for index, item in enumerate(fields):
            place, loc = (node.items[index], f"edges[{index}]") if node.kind == "list" else (node, "edges")
            found = self._chain(item, place, loc, streams) if isinstance(item, str) else [_edge(item, streams)]
            edges += found
            self._edges += [(place, loc)] * len(found)
        return tuple(edges)

    def _chain(self, text: str, place: Node, loc: str, streams: set[str]) -> list[Edge]:
        ends = [end.strip() for end in text.split(ARROW)]
        if len(ends) < 2 or not all(ends):
            self.sink.add(place, loc, f"{text!r} is no edge", hint="write role.op -> role.op", code="BAD_TYPE")
            return []
        return [_edge({"from": a, "to": b}, streams) for a, b in itertools.pairwise(ends)]

    def check(self, spec: JobSpec) -> None:
        """Put what the rules of spec find to its place, but for what follows from a problem that is known already."""
        spoiled = {field for problem in self.sink.problems for field in self._touched(problem)}
        for finding in rules.check(spec):
            if not self._rests_on(finding.path) & spoiled:
                self.place(finding)

    def _touched(self, problem: Problem) -> list[rules.Path]:
        """The field a problem speaks of, and the one that an unknown name was meant to be."""
        loc, meant = problem.loc, problem.hint.partition("did you mean '")[2].partition("'")[0]
        role = next((name for name in self._roles() if loc.startswith(f"roles.{name}.") or loc == f"roles.{name}"), "")
        start: rules.Path = ("roles", role) if role else ()
        field = (loc[len(f"roles.{role}.") :] if role else loc).split(".")[0].split("[")[0]
        return [(*start, name) for name in ((field, meant) if meant else (field,))]

    def _roles(self) -> list[str]:
        roles = self._root.get("roles")
        return sorted((key.text for key, _ in roles.entries), key=len, reverse=True) if roles else []

    def _rests_on(self, path: rules.Path) -> set[rules.Path]:
        """The fields a rule about ``path`` looks at."""
        match path:
            case ("roles", role):
                return {("roles", role, field) for field in ("", "workload", "run")}
            case ("roles", role, "mesh" | "fail" | "replicas" as field, *_):
                return {("roles", role, name) for name in ("", str(field), "mesh", "replicas")}
            case ("roles", role, "plan", *_):
                return {("roles", role, name) for name in ("", "plan", "model", "run")}
            case ("roles", role, field, *_):
                return {("roles", role, ""), ("roles", role, field)}
            case (top, *_):
                return {(top,), ("streams",)} if top in ("edges", "weights") else {(top,)}
            case _:
                return set()

    def place(self, found: rules.Finding) -> None:
        """One more problem, at the field that it speaks of."""
        node, loc, hint = find_place(self._root, found.path), rules.dotted(found.path), found.hint
        match found.path:
            case ("edges", int(index)):
                node, loc = self._edges[index]
            case ("roles", str(role)) if node.file.startswith("--set"):  # only a flag speaks of it
                hint = did_you_mean(role, {*self._roles()} - {role}) or hint
            case _:
                pass
        self.sink.add(node, loc, found.message, hint=hint, code=found.code)


_RES = {"cpus": "cpus", "gpus": "gpus", "gpu_type": "gpu_type", "memory": "memory_bytes"}
_FAIL = {
    "progress": "progress_s",
    "backoff": "backoff_s",
    **{name: name for name in ("restart", "then", "state", "degrade", "standby", "bad_data", "nan", "check", "slow")},
}


def _present(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Those of ``names`` (in the file -> in spec) that were given; the rest keeps the default of spec."""
    return {attr: fields[name] for name, attr in names.items() if name in fields}


def _whole(fields: Mapping[str, Any], name: str) -> Sequence[Any]:
    """The entries of a list of mappings, those that lack an end (told already) left out."""
    return [entry for entry in fields.get(name, ()) if isinstance(entry, str) or {"from", "to"} <= entry.keys()]


def _pairs(raw: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in raw.items() if value is not BAD)


def _size(fields: Mapping[str, Any]) -> Sizes:
    mesh = {axis: size for axis, size in fields.get("mesh", {}).items() if size is not BAD}
    given = fields.get("replicas")
    return sizes_of(mesh, (given.get("min", 1), given.get("max", 1)) if isinstance(given, dict) else given)


def _command(run: Any, node: Node) -> tuple[tuple[str, ...] | None, bool]:
    """The command and whether it goes through the shell: a text does, unless it is a plain torchrun line."""
    if run is None:
        return None, False
    if node.kind == "list":
        return tuple(run), False
    words = plain_words(run[0]) if is_torchrun(tuple(run), shell=True) else None
    return (tuple(words), False) if words else ((run[0],), True)


def _fail(fields: Mapping[str, Any]) -> Fail:
    values = _present(fields, _FAIL)
    if "limit" in fields:
        values["limit_n"], values["limit_window_s"] = fields["limit"]
    return Fail(**values)


def _nears(entries: Sequence[Any]) -> tuple[Near, ...]:
    whole: list[dict[str, Any]] = [{"role": entry} if isinstance(entry, str) else entry for entry in entries]
    return tuple(Near(**entry) for entry in whole if "role" in entry)


def _model(fields: Mapping[str, Any] | None) -> TrainedModel | None:
    """None also for a mapping that lacks what it must have, which was told."""
    whole = fields is not None and all(name in fields for name, item in MODEL.fields.items() if item.required)
    return TrainedModel(**fields) if fields is not None and whole else None


def _bound(fields: Mapping[str, Any] | None) -> Bound | None:
    return Bound(**fields) if fields and "versions" in fields else None


def _weights(fields: Mapping[str, Any]) -> WeightsEdge:
    return WeightsEdge(
        source=RoleName(fields["from"]),
        target=RoleName(fields["to"]),
        lag=_bound(fields.get("lag")),
        **_present(fields, {"every": "every", "via": "via"}),
    )


def _edge(fields: Mapping[str, Any], streams: set[str]) -> Edge:
    source, target = fields["from"].strip(), fields["to"].strip()
    kind = "stream" if source in streams or target in streams else "call"
    options = _present(fields, {name: name for name in ("kind", "micro", "inflight")})
    return Edge(**{"source": source, "target": target, "kind": kind, **options})
