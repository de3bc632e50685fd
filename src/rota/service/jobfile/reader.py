"""Text of a job file to JobSpec, or every mistake in it at its place.

YAML 1.2 or JSON, strict. The steps are those of ``read_job``; nothing here reads a file, a clock or a network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from rota.service.jobfile.nodes import (
    DEPTH_MAX,
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    decode,
    moved,
    read_tree,
)
from rota.service.jobfile.problems import ErrorCollector, Problem, TextPlace
from rota.spec import check as rules
from rota.spec.check import ROLES_MAX, Path
from rota.spec.errors import JobFileError, did_you_mean, nearest
from rota.spec.job import JobSpec

_TOP = {"jobName": "name", "image": "image", "dataDir": "data", "outputDir": "output"}
_ROLE = {"taskNumber": "replicas", "command": "run", "name": ""}
_RESOURCES = {"cpuNumber": "cpus", "memoryMB": "memory", "gpuNumber": "gpus"}
SETS_MAX = 200
_INDEX = re.compile(r"^(.*)\[(\d{1,6})\]$")


def read_job(
    text: str | bytes,
    *,
    filename: str,
    sets: Sequence[str] = (),
    find_queue: Callable[[str], rules.Finding | None] | None = None,
) -> JobSpec:
    """The job that ``text`` describes, with ``sets`` (``path=value``) applied over it.

    Raises JobFileError with every problem, in the order of the file; problems of ``sets`` come last. What
    ``find_queue`` has against the queue is one of them where there are others; alone it is left to the caller.
    """
    reader = _Reader(text, filename, sets)
    reader.check()
    if find_queue is not None and reader.errors.problems:
        reader.check_queue(find_queue)
    reader.errors.raise_if_any()
    return reader.spec


def placed(
    faults: Iterable[rules.Finding], text: str, *, filename: str, sets: Sequence[str] = ()
) -> tuple[Problem, ...]:
    """What was found out about a job after it was read, at its place in the text; without a text it has none."""
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


def problems_of(spec: JobSpec) -> tuple[Problem, ...]:
    """The rules that a spec without a file breaks (a built one, or one completed by inspecting its workloads)."""
    return placed(rules.check(spec), "", filename="job")


def value_problems(spec: JobSpec) -> tuple[Problem, ...]:
    """Values of a built spec that a job file may not have: ranges and forms are declared once, by the file's models."""
    from rota.service.jobfile.models import job_text  # noqa: PLC0415 - pydantic, as below

    try:
        read_job(job_text(spec), filename="job")
    except JobFileError as error:
        return tuple(replace(one, line=0, col=0, source="") for one in error.problems)
    return ()


class _Reader:
    """One text: its nodes, the job that they describe, and what is wrong with it.

    What is refused is left out of ``spec``, so that the rest of it can be checked as well.
    """

    def __init__(self, text: str | bytes, filename: str, sets: Sequence[str]) -> None:
        from rota.service.jobfile.models import JobPart  # noqa: PLC0415 - as below
        from rota.service.jobfile.validation import read_again, read_part  # noqa: PLC0415 - who only decodes a file needs no pydantic

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
        passes = 0
        while job is None:
            if not isinstance(root, MappingNode) or (passes := passes + 1) > _PASSES_MAX:
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

    def check_queue(self, find_queue: Callable[[str], rules.Finding | None]) -> None:
        """The queue that the text names, unless it could not be read."""
        named = isinstance(self._root, MappingNode) and "queue" in self._root and ("queue",) not in self.errors.paths
        if named and (fault := find_queue(self.spec.queue)) is not None:
            self.place(fault)

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


_PASSES_MAX = 10
"""How often what cannot be read is left out, so that the rules are tried on the rest too; two are enough for most."""


def _without(root: MappingNode, paths: Iterable[Path]) -> MappingNode:
    """A copy without the fields of these problems; the job keeps a name, and its roles at least their names."""
    copy = cut_fields(root, paths)
    was, kept = root.at("roles"), copy.at("roles")
    names = islice(was, ROLES_MAX) if isinstance(was, MappingNode) else ()
    roles = {name: MappingNode({}, root.place) for name in names} | (kept if isinstance(kept, MappingNode) else {})
    name, roles_key = ScalarNode("name", root.place), ScalarNode("roles", root.place)
    job = {name: ScalarNode("job", root.place), **copy, roles_key: MappingNode(roles, root.place)}
    return MappingNode(job, root.place)


def cut_fields(root: Node, paths: Iterable[Path]) -> Any:
    """A copy without the fields of the problems at these paths."""
    copy = root
    for path in {_field_at(root, path) for path in paths}:
        copy = _cut(copy, path)
    return copy


def _field_at(root: Node, path: Path) -> Path:
    """The field to leave out for a problem at ``path``: a list as a whole; where a field is missing, what lacks it."""
    here, found = root, list[str | int]()
    for part in path:
        if isinstance(here, MappingNode) and part in here:
            here = here[part]  # type: ignore[index] - as in MappingNode.at
        elif isinstance(here, SequenceNode) and isinstance(part, int):
            here = here[part]
        else:
            break
        found.append(part)
    while found and isinstance(found[-1], int):
        found.pop()
    return tuple(found)


def _cut(node: Any, path: Path) -> Any:
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


def _fields_of(path: Path, hint: str) -> list[Path]:
    """The field a problem speaks of, and the one that an unknown name was meant to be."""
    start, rest = (path[:2], path[2:]) if path[:1] == ("roles",) and len(path) > 1 else ((), path)
    meant = hint.partition("did you mean '")[2].partition("'")[0]
    return [(*start, name) for name in (rest[0] if rest else "", *([meant] if meant else ()))]


def _rests_on(path: Path) -> set[Path]:
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


def is_older_form(root: Node) -> bool:
    """True for a mapping with both ``jobName`` and ``taskRoles``."""
    return isinstance(root, MappingNode) and "jobName" in root and "taskRoles" in root


def convert_older_form(root: Node, errors: ErrorCollector) -> MappingNode:
    """The same job in the present form; every node keeps its place and its old name in messages.

    Unknown keys go into ``errors``. ``memoryMB`` is in MiB. An entry without ``name`` becomes role ``task<index>``.
    """
    assert isinstance(root, MappingNode)
    job = MappingNode({}, root.place)
    for key, value in root.items():
        if key in _TOP:
            job[_named(key, _TOP[key], key)] = _known_as(value, key)
        elif key == "taskRoles":
            job[_named(key, "roles", key)] = _roles(value, errors)
        else:
            _unknown(key, key, [*_TOP, "taskRoles"], errors)
    return job


def _known_as(node: Node, loc: str) -> Node:
    return moved(node, replace(node.place, loc=str(loc)))


def _named(node: Node, text: str, loc: str) -> ScalarNode:
    return ScalarNode(text, replace(node.place, loc=str(loc)))


def _unknown(key: ScalarNode, loc: str, known: list[str], errors: ErrorCollector) -> None:
    hint = nearest(key, known, "fields")
    errors.add(replace(key.place, loc=str(loc)), (), "unknown field", hint=hint, code="UNKNOWN_FIELD")


def _roles(node: Node, errors: ErrorCollector) -> MappingNode:
    roles = MappingNode({}, replace(node.place, loc="taskRoles"))
    if not isinstance(node, SequenceNode):
        errors.add(roles.place, (), "expected a list of task roles", code="BAD_TYPE")
        return roles
    for index, item in enumerate(node):
        loc = f"taskRoles[{index}]"
        name = item.at("name") if isinstance(item, MappingNode) else None
        text = str(name) if isinstance(name, ScalarNode) else f"task{index}"
        key = _named(item if name is None else name, text, loc)
        if text in roles:
            place = replace(key.place, loc=f"{loc}.name")
            errors.add(place, (), "duplicate name", hint="every role needs its own", code="DUPLICATE_KEY")
        roles[key] = _role(item, loc, errors)
    return roles


def _role(node: Node, loc: str, errors: ErrorCollector) -> MappingNode:
    role = MappingNode({}, replace(node.place, loc=loc))
    if not isinstance(node, MappingNode):
        errors.add(role.place, (), "expected a mapping with 'command'", code="BAD_TYPE")
        return role
    resources = MappingNode({}, role.place)
    for key, value in node.items():
        name = f"{loc}.{key}"
        old = _known_as(value, name)
        if key in _RESOURCES:
            if key == "memoryMB" and isinstance(old, ScalarNode):
                old = ScalarNode(f"{old}MiB", old.place, plain=old.plain)
            resources[_named(key, _RESOURCES[key], name)] = old
        elif key not in _ROLE:
            _unknown(key, name, [*_ROLE, *_RESOURCES], errors)
        elif _ROLE[key]:
            role[_named(key, _ROLE[key], name)] = old
    if resources:
        role[_named(node, "resources", loc)] = resources
    return role


_VARIABLE = re.compile(r"\s*(roles\.[^.]+\.)?env\.")


def apply_sets(root: Node, sets: Sequence[str], errors: ErrorCollector) -> None:
    """Change the tree in place, one ``path=value`` after the other.

    A path goes through names and list positions: ``roles.trainer.replicas=4``, ``weights[0].every=2``. Names that hold
    dots are found if they are in the file. What is missing is made. The models decide what a value means; that of a
    variable is its text, as in a shell.
    """
    for number, text in enumerate(sets[:SETS_MAX], 1):
        place = TextPlace(1, 1, file=f"--set #{number}", source=text)
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            hint = "for example roles.trainer.replicas=4"
            errors.add(place, (), f"{text!r} is not path=value", hint=hint, code="BAD_SET")
        elif path.count(".") + path.count("[") >= DEPTH_MAX:
            errors.add(place, (), f"a path of more than {DEPTH_MAX} steps", code="BAD_SET")
        else:
            where = TextPlace(1, len(path) + 2, file=place.file, source=text)
            node = ScalarNode(value, where, plain=False) if _VARIABLE.match(path) else _value(value, where, errors)
            if node is not None:
                _lay(root, path.strip(), node, place, errors)


def find_place(root: Node, path: Path) -> TextPlace:
    """The place of what is at ``path``, or of the nearest above it; a mapping is placed at its key."""
    node, best = root, root.place
    for part in path:
        if isinstance(part, int):
            if not isinstance(node, SequenceNode) or part >= len(node):
                return best  # a list of one value was written without brackets: its value has no place of its own
            node = node[part]
            best = node.place
            continue
        key = node.key(part) if isinstance(node, MappingNode) else None
        if key is None or not isinstance(node, MappingNode):
            return best
        node = node[key]
        best = key.place if isinstance(node, MappingNode) else node.place
    return best


def _value(text: str, place: TextPlace, errors: ErrorCollector) -> Node | None:
    """A list or mapping in YAML, or else a scalar with exactly this text."""
    if text[:1] not in ("[", "{"):
        return ScalarNode(text, place)
    try:
        node = read_tree(text, ErrorCollector(text, place.file))
    except JobFileError as exc:
        errors.add(place, (), str(exc.problems[0].message), code="BAD_SET")
        return None
    todo = [node]
    while todo:
        item = todo.pop()
        item.place = place
        if isinstance(item, MappingNode):
            todo += [*item, *item.values()]
        elif isinstance(item, SequenceNode):
            todo += item
    return node


def _lay(node: Node, path: str, value: Node, place: TextPlace, errors: ErrorCollector) -> None:
    """Walk down ``path``, making mappings where nothing is, and put ``value`` at its end."""
    walked: Path = ()
    while path:
        name, index, path = _step(node, path)
        walked = (*walked, name)
        if not isinstance(node, MappingNode):
            errors.add(place, walked, "the field above it is not a mapping", code="BAD_SET")
            return
        if index is None and not path:
            node.put(ScalarNode(name, place), value)
            return
        node = _below(node, name, place)
        if index is None:
            continue
        walked = (*walked, index)
        if not isinstance(node, SequenceNode) or index >= len(node):
            errors.add(place, walked, "no such entry", code="BAD_SET")
            return
        node[index] = moved(node[index], node[index].place) if path else value
        node = node[index]


def _below(node: MappingNode, name: str, place: TextPlace) -> Node:
    """What is under a key, made when nothing is; a copy, since an alias shares its node with what it names."""
    key = node.key(name)
    old = ScalarNode("", place) if key is None else node[key]
    new = MappingNode({}, place) if isinstance(old, ScalarNode) and old.is_null else moved(old, old.place)
    node.put(key or ScalarNode(name, place), new)
    return new


def _step(node: Node, path: str) -> tuple[str, int | None, str]:
    """The next name (with its list position, if any) and the rest of the path; the longest known name wins."""
    names = node if isinstance(node, MappingNode) else ()
    known = [str(name) for name in names if path == name or path.startswith((f"{name}.", f"{name}["))]
    name = max(known, key=len, default=path.partition(".")[0])
    rest = path[len(name) :]
    index: int | None = None
    found = (None if known else _INDEX.match(name)) or re.match(r"^()\[(\d{1,6})\]", rest)
    if found and found.group(1):
        name, index = found.group(1), int(found.group(2))
    elif found:
        index, rest = int(found.group(2)), rest[found.end() :]
    return name, index, rest.removeprefix(".")
