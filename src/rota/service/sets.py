"""``--set path=value``: changes laid over the nodes of a job file before its fields are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from rota.service.yamltree import DEPTH_MAX, Node, Sink, read_value
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
        spot = next((i for i, (key, _) in enumerate(node.entries) if key.text == name), None)
        last = not path
        if index is None and last:
            entry = (replace(place, text=name), value)
            if spot is None:
                node.entries.append(entry)
            else:
                node.entries[spot] = entry
            return
        below = node.entries[spot][1] if spot is not None else Node("map", 1, 1, file=place.file, source=place.source)
        if spot is None:
            node.entries.append((replace(place, text=name), below))
        elif below.is_null:
            below = Node("map", 1, 1, file=place.file, source=place.source)
            node.entries[spot] = (node.entries[spot][0], below)
        else:
            # an alias shares its node with what it names; a change here must not show there
            below = replace(below, entries=list(below.entries), items=list(below.items))
            node.entries[spot] = (node.entries[spot][0], below)
        if index is not None:
            if below.kind != "list" or index >= len(below.items):
                sink.add(place, f"{walked}[{index}]", "no such entry", code="BAD_SET")
                return
            if last:
                below.items[index] = value
                return
            item = below.items[index]
            below.items[index] = below = replace(item, entries=list(item.entries), items=list(item.items))
        node = below


def _step(node: Node, path: str) -> tuple[str, int | None, str]:
    """The next name (with its list position, if any) and the rest of the path; the longest known name wins."""
    known = [
        key.text for key, _ in node.entries if path == key.text or path.startswith((f"{key.text}.", f"{key.text}["))
    ]
    name = max(known, key=len, default=path.partition(".")[0])
    rest = path[len(name) :]
    index: int | None = None
    found = _INDEX.match(name) or re.match(r"^()\[(\d{1,6})\]", rest)
    if found and found.group(1):
        name, index = found.group(1), int(found.group(2))
    elif found:
        index, rest = int(found.group(2)), rest[found.end() :]
    return name, index, rest.removeprefix(".")
