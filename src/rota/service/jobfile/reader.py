"""Text of a job file to JobSpec, or every mistake in it at its place.

YAML 1.2 or JSON, strict. The steps are those of ``read_job``; nothing here reads a file, a clock or a network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rota.service.jobfile.legacy import convert_older_form, is_older_form
from rota.service.jobfile.nodes import (
    ErrorCollector,
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    decode,
    read_tree,
)
from rota.service.jobfile.overrides import apply_sets, find_place
from rota.service.jobfile.problems import Problem
from rota.spec import check as rules
from rota.spec.errors import did_you_mean
from rota.spec.job import JobSpec


def read_job(text: str | bytes, *, filename: str, sets: Sequence[str] = ()) -> JobSpec:
    """The job that ``text`` describes, with ``sets`` (``path=value``) applied over it.

    Raises JobFileError with every problem, in the order of the file; problems of ``sets`` come last.
    """
    reader = _Reader(text, filename, sets)
    reader.check()
    reader.errors.raise_if_any()
    return reader.spec


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
    reader = _Reader(text, filename, sets)
    for one in faults:
        reader.place(one)
    return reader.errors.error().problems


def problems_of(spec: JobSpec, *, filename: str = "job") -> tuple[Problem, ...]:
    """The rules that a spec without a file breaks (a built one, or one completed by inspecting its workloads)."""
    return placed(rules.check(spec), "", filename=filename)


class _Reader:
    """One text: its nodes, the job that they describe, and what is wrong with it.

    What is refused is left out of ``spec``, so that the rest of it can be checked as well.
    """

    def __init__(self, text: str | bytes, filename: str, sets: Sequence[str]) -> None:
        from rota.service.jobfile.fields import read_again, read_part  # noqa: PLC0415 - who only decodes a file needs no pydantic
        from rota.service.jobfile.models import JobPart  # noqa: PLC0415

        # 1 bytes to text, text to nodes with places
        text = decode(text, filename=filename) if isinstance(text, bytes) else text
        self.errors = ErrorCollector(text, filename)
        root = read_tree(text, self.errors)
        # 2 the older form becomes this one; --set goes over the file
        if is_older_form(root):
            root = convert_older_form(root, self.errors)
        apply_sets(root, sets, self.errors)
        self._root = root
        # 3 nodes to fields, strictly
        known = len(self.errors.paths)
        job = read_part(JobPart, root, self.errors)
        unread = self.errors.paths[known:]
        while job is None:
            if not isinstance(root, MappingNode):
                raise self.errors.error()
            root, again = _without(root, unread), ErrorCollector("", filename)
            job, unread = read_part(JobPart, root, again), again.paths
        for path, node in self.errors.duplicates:
            read_again(JobPart, path, node, self.errors)
        # 4 fields to the spec
        self._edges = [index for index, _ in job.all_edges()]
        self.spec: JobSpec = job.make()

    def check(self) -> None:
        """Put what the rules of spec find to its place, but for what follows from a problem that is known already."""
        known = zip(self.errors.paths, self.errors.problems, strict=True)
        spoiled = {field for path, problem in known for field in _fields_of(path, problem.hint)}
        for finding in rules.check(self.spec):
            if finding.code == "BAD_NAME" or not _rests_on(finding.path) & spoiled:
                self.place(finding)

    def place(self, found: rules.Finding) -> None:
        """One more problem, at the field that it speaks of."""
        path, hint = found.path, found.hint
        match path:
            case ("edges", int(index)):
                listed = isinstance(self._root, MappingNode) and isinstance(self._root.at("edges"), SequenceNode)
                path = ("edges", self._edges[index]) if listed else ("edges",)
            case ("roles", str(role)) if find_place(self._root, path).file.startswith("--set"):  # only a flag names it
                hint = did_you_mean(role, {one.name for one in self.spec.roles} - {role}) or hint
            case _:
                pass
        self.errors.add(find_place(self._root, path), path, found.message, hint=hint, code=found.code)


def _without(root: MappingNode, paths: Iterable[rules.Path]) -> MappingNode:
    """A copy without the fields of these problems; the job keeps a name, and its roles at least their names."""
    copy = root
    for path in {_field_at(root, path) for path in paths}:
        copy = _cut(copy, path)
    was, kept = root.at("roles"), copy.at("roles")
    names = was if isinstance(was, MappingNode) else ()
    roles = {name: MappingNode({}, root.place) for name in names} | (kept if isinstance(kept, MappingNode) else {})
    name, roles_key = ScalarNode("name", root.place), ScalarNode("roles", root.place)
    job = {name: ScalarNode("job", root.place), **copy, roles_key: MappingNode(roles, root.place)}
    return MappingNode(job, root.place)


def _field_at(root: Node, path: rules.Path) -> rules.Path:
    """The field to leave out for a problem at ``path``: a list as a whole; where a field is missing, what lacks it."""
    here, found = root, list[str | int]()
    for part in path:
        if isinstance(here, MappingNode) and part in here:
            here = here[part]  # type: ignore[index]
        elif isinstance(here, SequenceNode) and isinstance(part, int):
            here = here[part]
        else:
            break
        found.append(part)
    while found and isinstance(found[-1], int):
        found.pop()
    return tuple(found)


def _cut(node: Any, path: rules.Path) -> Any:
    """A copy of ``node`` without the field at ``path``; what does not lead to it is shared."""
    match node, path:
        case MappingNode(), (name,):
            return MappingNode({key: value for key, value in node.items() if key != name}, node.place)
        case MappingNode(), (name, *rest):
            cut = {key: _cut(value, tuple(rest)) if key == name else value for key, value in node.items()}
            return MappingNode(cut, node.place)
        case SequenceNode(), (int(index), *rest):
            return SequenceNode([_cut(v, tuple(rest)) if i == index else v for i, v in enumerate(node)], node.place)
        case _:
            return node


def _fields_of(path: rules.Path, hint: str) -> list[rules.Path]:
    """The field a problem speaks of, and the one that an unknown name was meant to be."""
    start, rest = (path[:2], path[2:]) if path[:1] == ("roles",) and len(path) > 1 else ((), path)
    meant = hint.partition("did you mean '")[2].partition("'")[0]
    return [(*start, name) for name in (rest[0] if rest else "", *([meant] if meant else ()))]


def _rests_on(path: rules.Path) -> set[rules.Path]:
    """The fields a rule about ``path`` looks at."""
    match path:
        case ("roles", role):
            return {("roles", role, field) for field in ("", "workload", "run")}
        case ("roles", role, "mesh" | "fail" | "replicas" as field, *_):
            return {("roles", role, name) for name in ("", field, "mesh", "replicas")}
        case ("roles", role, "plan" | "model" as field, *_):
            return {("roles", role, name) for name in ("", field, "plan", "model", "run")}
        case ("roles", role, "run", *_):
            return {("roles", role, name) for name in ("", "run", "mesh", "replicas")}
        case ("roles", role, field, *_):
            return {("roles", role, ""), ("roles", role, field)}
        case ("streams", *_):
            return {("streams",), ("weights",)}
        case (top, *_):
            return {(top,), ("streams",)} if top in ("edges", "weights") else {(top,)}
        case _:
            return set()
