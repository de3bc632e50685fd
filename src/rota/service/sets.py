"""``--set path=value``: changes laid over the nodes of a job file before its fields are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from rota.service.yamltree import DEPTH_MAX, Node, Sink, read_value
from rota.spec.check import Path
from rota.spec.errors import JobFileError

SETS_MAX = 200
_INDEX = re.compile(r"^(.*)\[(\d{1,6})\]$")


def apply_sets(root: Node, sets: Sequence[str], sink: Sink) -> None:
    """Change the tree in place, one ``path=value`` after the other.

    A path goes through names and list positions: ``roles.trainer.replicas=4``, ``weights[0].every=2``. Names that hold
    dots are found as long as they stand in the file. What is not there is made. The schema decides what a value means.
    """
    for number, text in enumerate(sets[:SETS_MAX], 1):
        file = f"--set #{number}"
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            place = Node("scalar", 1, 1, file=file, source=text)
            sink.add(
                place, "", f"{text!r} is not path=value", hint="for example roles.trainer.replicas=4", code="BAD_SET"
            )
            continue
        if path.count(".") + path.count("[") >= DEPTH_MAX:
            place = Node("scalar", 1, 1, file=file, source=text)
            sink.add(place, "", f"a path of more than {DEPTH_MAX} steps", code="BAD_SET")
            continue
        node = _value(value, file, text, len(path) + 2, sink)
        if node is not None:
            _lay(root, path.strip(), node, Node("scalar", 1, 1, file=file, source=text), sink)


def find_place(root: Node, path: Path) -> Node:
    """The node at ``path``, or the nearest one above it; of a mapping its key, which is the name of it."""
    node = best = root
    for part in path:
        if isinstance(part, int):
            if node.kind != "list" or part >= len(node.items):
                return best  # one value without brackets
            node = best = node.items[part]
            continue
        key, below = next(((key, value) for key, value in node.entries if key.text == part), (None, None))
        if key is None or below is None:
            return best
        node, best = below, key if below.kind == "map" else below
    return best


def _value(text: str, file: str, source: str, col: int, sink: Sink) -> Node | None:
    own = Sink(text, file)
    try:
        node = read_value(text, own)
    except JobFileError as exc:
        message = str(exc.problems[0].message)
        sink.add(Node("scalar", 1, col, file=file, source=source), "", message, code="BAD_SET")
        return None
    todo = [node]
    while todo:
        item = todo.pop()
        item.file, item.source, item.line, item.col = file, source, 1, col
        todo += [*item.items, *(part for entry in item.entries for part in entry)]
    return node


def _lay(node: Node, path: str, value: Node, place: Node, sink: Sink) -> None:
    """Walk down ``path``, making mappings where nothing is, and put ``value`` at its end."""
    walked = ""
    while path:
        name, index, path = _step(node, path)
        walked = f"{walked}.{name}" if walked else name
        if node.kind != "map":
            sink.add(place, walked, "the field above it is not a mapping", code="BAD_SET")
            return
        if index is None and not path:
            _put(node, name, value, place)
            return
        node = _below(node, name, place)
        if index is None:
            continue
        if node.kind != "list" or index >= len(node.items):
            sink.add(place, f"{walked}[{index}]", "no such entry", code="BAD_SET")
            return
        node.items[index] = value if not path else _copy(node.items[index])
        node = node.items[index]


def _put(node: Node, name: str, value: Node, place: Node) -> None:
    """Set a key of a mapping; the key that is there keeps its place in the order."""
    entry = (replace(place, text=name), value)
    spot = next((i for i, (key, _) in enumerate(node.entries) if key.text == name), None)
    if spot is None:
        node.entries.append(entry)
    else:
        node.entries[spot] = entry


def _below(node: Node, name: str, place: Node) -> Node:
    """What stands under a key, made when nothing does; a copy, since an alias shares its node with what it names."""
    key, old = next(((key, value) for key, value in node.entries if key.text == name), (None, None))
    new = Node("map", 1, 1, file=place.file, source=place.source) if old is None or old.is_null else _copy(old)
    _put(node, name, new, key or place)
    return new


def _copy(node: Node) -> Node:
    return replace(node, entries=list(node.entries), items=list(node.items))


def _step(node: Node, path: str) -> tuple[str, int | None, str]:
    """The next name (with its list position, if any) and the rest of the path; the longest known name wins."""
    known = [
        key.text for key, _ in node.entries if path == key.text or path.startswith((f"{key.text}.", f"{key.text}["))
    ]
    name = max(known, key=len, default=path.partition(".")[0])
    rest = path[len(name) :]
    index: int | None = None
    found = (None if known else _INDEX.match(name)) or re.match(r"^()\[(\d{1,6})\]", rest)
    if found and found.group(1):
        name, index = found.group(1), int(found.group(2))
    elif found:
        index, rest = int(found.group(2)), rest[found.end() :]
    return name, index, rest.removeprefix(".")
