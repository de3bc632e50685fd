"""``--set path=value``: changes laid over the nodes of a job file before its fields are read."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rota.service.jobfile.nodes import (
    DEPTH_MAX,
    ErrorCollector,
    MappingNode,
    Node,
    Place,
    ScalarNode,
    SequenceNode,
    moved,
    read_tree,
)
from rota.spec.check import Path
from rota.spec.errors import JobFileError

SETS_MAX = 200
_INDEX = re.compile(r"^(.*)\[(\d{1,6})\]$")


def apply_sets(root: Node, sets: Sequence[str], errors: ErrorCollector) -> None:
    """Change the tree in place, one ``path=value`` after the other.

    A path goes through names and list positions: ``roles.trainer.replicas=4``, ``weights[0].every=2``. Names that hold
    dots are found if they are in the file. What is missing is made. The models decide what a value means.
    """
    for number, text in enumerate(sets[:SETS_MAX], 1):
        place = Place(1, 1, file=f"--set #{number}", source=text)
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            hint = "for example roles.trainer.replicas=4"
            errors.add(place, (), f"{text!r} is not path=value", hint=hint, code="BAD_SET")
        elif path.count(".") + path.count("[") >= DEPTH_MAX:
            errors.add(place, (), f"a path of more than {DEPTH_MAX} steps", code="BAD_SET")
        else:
            node = _value(value, Place(1, len(path) + 2, file=place.file, source=text), errors)
            if node is not None:
                _lay(root, path.strip(), node, place, errors)


def find_place(root: Node, path: Path) -> Place:
    """The place of what is at ``path``, or of the nearest above it; a mapping is placed at its key."""
    node, best = root, root.place
    for part in path:
        if isinstance(part, int):
            if not isinstance(node, SequenceNode) or part >= len(node):
                return best  # one value without brackets
            node = node[part]
            best = node.place
            continue
        key = node.key(part) if isinstance(node, MappingNode) else None
        if key is None or not isinstance(node, MappingNode):
            return best
        node = node[key]
        best = key.place if isinstance(node, MappingNode) else node.place
    return best


def _value(text: str, place: Place, errors: ErrorCollector) -> Node | None:
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


def _lay(node: Node, path: str, value: Node, place: Place, errors: ErrorCollector) -> None:
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


def _below(node: MappingNode, name: str, place: Place) -> Node:
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
