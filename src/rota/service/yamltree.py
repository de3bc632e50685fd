"""YAML or JSON text as a tree of nodes that know their place, read event by event under hard limits.

Nothing is constructed and nothing recurses, so a hostile text costs what its limits allow: the events of ruamel.yaml's
YAML 1.2 parser are folded into nodes on an explicit stack. Aliases share nodes; what they stand for counts as if it
were written out. Plain scalars keep their text, and the field that reads one decides what it means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    DocumentStartEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceStartEvent,
)

from rota.service.problems import PROBLEMS_MAX, Problem
from rota.spec.errors import JobFileError

TEXT_BYTES_MAX = 2**20
DEPTH_MAX = 32
NODES_MAX = 20_000
ALIASES_MAX = 1_000
SCALAR_CHARS_MAX = 256 * 2**10
KEY_CHARS_MAX = 256
LINES_MAX = 50_000

_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,3})?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_TABS_LINE = re.compile(r"^ *\t", re.MULTILINE)
_ADVICE = {
    "found character '\\t' that cannot start any token": ("a tab stands where only spaces may", "indent with spaces"),
    "mapping values are not allowed here": ("':' is not allowed here", "check the indentation, or quote the text"),
    "found unexpected end of stream": ("a quote is opened here and never closed", "close it"),
    "could not find expected ':'": ("a key without ':'", "write 'key: value'"),
}

Kind = Literal["map", "list", "scalar"]


@dataclass(slots=True, eq=False)
class Node:
    """A mapping, list or scalar and where it begins (line and column from 1).

    ``text`` is the literal of a scalar, ``plain`` is False when it was quoted or a block. ``entries`` are the (key,
    value) pairs of a mapping, ``items`` the members of a list. ``size`` counts nodes with aliases written out. ``loc``
    overrides the dotted path in messages; ``file`` and ``source`` are set for what ``--set`` brought in.
    """

    kind: Kind
    line: int
    col: int
    text: str = ""
    plain: bool = True
    entries: list[tuple[Node, Node]] = field(default_factory=list)
    items: list[Node] = field(default_factory=list)
    size: int = 1
    loc: str = ""
    file: str = ""
    source: str = ""

    def get(self, key: str) -> Node | None:
        """The value under ``key`` of a mapping, or None."""
        return next((value for name, value in self.entries if name.text == key), None)

    @property
    def is_null(self) -> bool:
        """True for an empty or ``null`` plain scalar."""
        return self.kind == "scalar" and self.plain and self.text in _NULLS


def plain_value(node: Node) -> bool | int | float | str | None:
    """What a scalar means in YAML 1.2: only ``true`` and ``false`` are booleans, ``08`` is eight, ``1_000`` is text."""
    if not node.plain:
        return node.text
    if node.text in _NULLS:
        return None
    if node.text in _BOOLS:
        return _BOOLS[node.text]
    if _INT.fullmatch(node.text):
        return int(node.text)
    if _FLOAT.fullmatch(node.text):
        return float(node.text)
    return node.text


class Sink:
    """Collects problems of one file. Raises JobFileError by itself once there are PROBLEMS_MAX."""

    def __init__(self, text: str, filename: str) -> None:
        self.filename = filename
        self.problems: list[Problem] = []
        self._text = text
        self._lines: list[str] | None = None

    def source_line(self, line: int) -> str:
        """The text of a line, counted from 1; empty beyond the end."""
        if self._lines is None:
            self._lines = _LINE_BREAK.split(self._text)
        return self._lines[line - 1] if 0 < line <= len(self._lines) else ""

    def add(self, node: Node, loc: str, message: str, *, hint: str = "", code: str = "INVALID") -> None:
        """One more problem, at the place of ``node``."""
        self._append(
            Problem(
                loc=node.loc or loc,
                line=node.line,
                col=node.col,
                message=message,
                hint=hint,
                code=code,
                file=node.file or self.filename,
                source=node.source or self.source_line(node.line),
            )
        )

    def add_at(self, line: int, col: int, message: str, *, hint: str = "", code: str = "SYNTAX") -> None:
        """One more problem of the text itself."""
        self.add(Node("scalar", line, col), "", message, hint=hint, code=code)

    def _append(self, problem: Problem) -> None:
        self.problems.append(problem)
        if len(self.problems) >= PROBLEMS_MAX:
            raise self.error()

    def error(self) -> JobFileError:
        """The exception with everything collected, in the order of the file."""
        order = sorted(self.problems, key=lambda p: (p.file != self.filename, p.file, p.line, p.col))
        return JobFileError(tuple(order))

    def raise_if_any(self) -> None:
        """Raises JobFileError when something was collected."""
        if self.problems:
            raise self.error()


def decode(raw: bytes, *, filename: str) -> str:
    """Text of the bytes of a job file; a UTF-8 byte order mark is dropped.

    Raises JobFileError at the place of the first byte that is not UTF-8, or for a file that is too large.
    """
    sink = Sink("", filename)
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        sink.add_at(1, 1, "the file is UTF-16", hint="save it as UTF-8", code="ENCODING")
        raise sink.error()
    if len(raw) > TEXT_BYTES_MAX:
        sink.add_at(1, 1, f"the file has {len(raw)} bytes, at most {TEXT_BYTES_MAX} are allowed", code="TOO_LARGE")
        raise sink.error()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        before = raw[: exc.start].decode("utf-8", "replace")
        lines = _LINE_BREAK.split(before)
        line_end = raw.find(b"\n", exc.start)
        rest = raw[exc.start : line_end if line_end >= 0 else len(raw)].decode("utf-8", "replace")
        sink = Sink(before + rest, filename)
        sink.add_at(
            len(lines),
            len(lines[-1]) + 1,
            f"byte 0x{raw[exc.start]:02x} is not UTF-8",
            hint="save the file as UTF-8",
            code="ENCODING",
        )
        raise sink.error() from exc


def read_tree(text: str, sink: Sink) -> Node:
    """The root node of ``text``. Duplicate keys are collected in ``sink``; any other fault raises JobFileError."""
    _check_text(text, sink)
    ready = _json_as_yaml(text) if text.lstrip("\ufeff \t\r\n").startswith("{") else text.removeprefix("\ufeff")
    try:
        root = _Composer(sink).compose(_events(ready))
    except MarkedYAMLError as exc:
        _add_syntax(exc, text, sink)
        raise sink.error() from exc
    except (YAMLError, ValueError, OverflowError) as exc:
        sink.add_at(1, 1, f"not YAML: {str(exc).splitlines()[0]}")
        raise sink.error() from exc
    if root is None:
        sink.add_at(1, 1, "the file is empty", hint="'rota init --list' shows templates to begin with", code="EMPTY")
        raise sink.error()
    return root


def read_value(text: str, sink: Sink) -> Node:
    """A value given on the command line: a list or mapping in YAML, or else a scalar with exactly this text."""
    if text[:1] not in ("[", "{"):
        return Node("scalar", 1, 1, text=text)
    return read_tree(text, sink)


def _events(text: str) -> Iterator[Any]:
    return YAML(typ="safe", pure=True).parse(text)


def _check_text(text: str, sink: Sink) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > TEXT_BYTES_MAX:
        sink.add_at(1, 1, f"the file has {size} bytes, at most {TEXT_BYTES_MAX} are allowed", code="TOO_LARGE")
        raise sink.error()
    if text.count("\n") + text.count("\r") > LINES_MAX:
        sink.add_at(1, 1, f"more than {LINES_MAX} lines", code="TOO_LARGE")
        raise sink.error()
    for found in _UNPRINTABLE.finditer(text, 1 if text.startswith("\ufeff") else 0):
        lines = _LINE_BREAK.split(text[: found.start()])
        char = f"U+{ord(found.group()):04X}"
        sink.add_at(
            len(lines), len(lines[-1]) + 1, f"character {char} is not allowed", hint="remove it", code="ENCODING"
        )
        raise sink.error()


def _json_as_yaml(text: str) -> str:
    """JSON text that a YAML parser takes, character for character in place: tabs and ``//`` comments become spaces."""
    out: list[str] = []
    quote, i = "", 0
    while i < len(text):
        char = text[i]
        if quote:
            if char == "\\" and quote == '"':
                out.append(text[i : i + 2])
                i += 2
                continue
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "\t\ufeff":
            char = " "
        elif text.startswith("//", i) and (i == 0 or text[i - 1] in " \t\r\n,{}[]"):
            end = _LINE_BREAK.search(text, i)
            stop = end.start() if end else len(text)
            out.append(" " * (stop - i))
            i = stop
            continue
        out.append(char)
        i += 1
    return "".join(out)


def _add_syntax(exc: MarkedYAMLError, text: str, sink: Sink) -> None:
    mark = exc.problem_mark or exc.context_mark
    line, col = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    problem = str(exc.problem or exc).splitlines()[0]
    message, hint = _ADVICE.get(problem, (problem, ""))
    tab = _TABS_LINE.search(text)
    if problem.startswith("found unexpected end of stream") and exc.context_mark is not None:
        line, col = exc.context_mark.line + 1, exc.context_mark.column + 1
    if tab is not None and "\\t" not in problem and sink.source_line(line).lstrip(" ").startswith("\t"):
        message, hint = "a tab stands where only spaces may", "indent with spaces"
    if exc.context and problem not in _ADVICE:
        message = f"{message} ({exc.context})"
    sink.add_at(line, col, message, hint=hint)


class _Composer:
    """Folds events into nodes; ``_open`` is the stack of collections that are not closed yet."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._open: list[Node] = []
        self._keys: list[Node | None] = []
        self._seen: list[dict[str, Node]] = []
        self._anchors: dict[str, Node] = {}
        self._aliases = 0
        self._nodes = 0
        self._root: Node | None = None

    def compose(self, events: Iterator[Any]) -> Node | None:
        documents = 0
        for event in events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._refuse(event, "a second document", "one job a file", "SYNTAX")
            elif isinstance(event, NodeEvent):
                self._take(event)
            elif isinstance(event, CollectionEndEvent):
                self._close()
        return self._root

    def _refuse(self, event: Any, message: str, hint: str, code: str) -> None:
        mark = event.start_mark
        self._sink.add_at(mark.line + 1, mark.column + 1, message, hint=hint, code=code)
        raise self._sink.error()

    def _take(self, event: Any) -> None:
        if getattr(event, "tag", None) is not None:
            tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
            self._refuse(event, f"the tag {tag} is not allowed", "write the plain value", "SYNTAX")
        line, col = event.start_mark.line + 1, event.start_mark.column + 1
        if isinstance(event, AliasEvent):
            node = self._alias(event)
        elif isinstance(event, ScalarEvent):
            node = self._scalar(event, line, col)
        else:
            node = Node("map" if isinstance(event, MappingStartEvent) else "list", line, col)
            if len(self._open) >= DEPTH_MAX:
                self._refuse(event, f"nested more than {DEPTH_MAX} deep", "", "TOO_LARGE")
        self._count(event, node.size)
        if event.anchor is not None and not isinstance(event, AliasEvent):
            self._anchors[str(event.anchor)] = node
        if isinstance(event, MappingStartEvent | SequenceStartEvent):
            self._open.append(node)
            self._keys.append(None)
            self._seen.append({})
        else:
            self._attach(node)

    def _count(self, event: Any, size: int) -> None:
        self._nodes += size
        if self._nodes > NODES_MAX:
            self._refuse(event, f"more than {NODES_MAX} values, aliases written out", "", "TOO_LARGE")

    def _alias(self, event: Any) -> Node:
        self._aliases += 1
        if self._aliases > ALIASES_MAX:
            self._refuse(event, f"more than {ALIASES_MAX} aliases", "", "TOO_LARGE")
        node = self._anchors.get(str(event.anchor))
        if node is None:
            self._refuse(event, f"no anchor &{event.anchor} before this alias", "", "SYNTAX")
        elif any(node is outer for outer in self._open):
            self._refuse(event, f"*{event.anchor} stands inside what it names", "", "SYNTAX")
        assert node is not None
        return node

    def _scalar(self, event: Any, line: int, col: int) -> Node:
        text = str(event.value)
        if len(text) > SCALAR_CHARS_MAX:
            self._refuse(event, f"a text of more than {SCALAR_CHARS_MAX} characters", "", "TOO_LARGE")
        if max(text, default="") >= "\ud800" and re.search("[\ud800-\udfff]", text):
            try:
                text = text.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                self._refuse(event, "half of a surrogate pair", "write the character itself", "ENCODING")
        plain = not event.style
        if plain and _NOT_FINITE.fullmatch(text):
            self._refuse(event, f"{text} is not a number a job can use", "give a finite number", "BAD_TYPE")
        return Node("scalar", line, col, text=text, plain=plain)

    def _close(self) -> None:
        node = self._open.pop()
        self._keys.pop()
        self._seen.pop()
        if node.kind == "map":
            _merge(node, self._sink)
        self._attach(node)

    def _attach(self, node: Node) -> None:
        if not self._open:
            self._root = node
            return
        parent = self._open[-1]
        parent.size += node.size
        if parent.kind == "list":
            parent.items.append(node)
            return
        key = self._keys[-1]
        if key is None:
            self._keys[-1] = self._key(node)
        else:
            self._keys[-1] = None
            parent.entries.append((key, node))

    def _path(self, last: str) -> str:
        """The dotted path of a key of the innermost open mapping."""
        path = ""
        for node, key in zip(self._open[:-1], self._keys[:-1], strict=True):
            if node.kind == "list":
                path += f"[{len(node.items)}]"
            elif key is not None:
                path += f".{key.text}" if path else key.text
        return f"{path}.{last}" if path else last

    def _key(self, node: Node) -> Node:
        if node.kind != "scalar":
            self._sink.add_at(node.line, node.col, "a key must be a name", hint="quote it", code="BAD_TYPE")
            raise self._sink.error()
        if len(node.text) > KEY_CHARS_MAX:
            self._sink.add_at(node.line, node.col, f"a key of more than {KEY_CHARS_MAX} characters", code="TOO_LARGE")
            raise self._sink.error()
        first = self._seen[-1].setdefault(node.text, node)
        if first is not node and not (node.plain and node.text == "<<"):
            self._sink.add(
                node,
                self._path(node.text),
                "duplicate key",
                hint=f"the first is in line {first.line}",
                code="DUPLICATE_KEY",
            )
        return node


def _merge(node: Node, sink: Sink) -> None:
    """Carry out merge keys (``<<: *defaults``): own keys win, then the earlier mapping."""
    merges = [value for key, value in node.entries if key.plain and key.text == "<<"]
    if not merges:
        return
    own = [(key, value) for key, value in node.entries if not (key.plain and key.text == "<<")]
    seen = {key.text for key, _ in own}
    for value in merges:
        for source in value.items if value.kind == "list" else [value]:
            if source.kind != "map":
                sink.add(source, "<<", "only mappings can be merged", code="BAD_TYPE")
                continue
            fresh = [(key, item) for key, item in source.entries if key.text not in seen]
            seen.update(key.text for key, _ in fresh)
            own.extend(fresh)
    node.entries = own
