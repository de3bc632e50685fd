"""YAML or JSON text as plain values that know their place, read event by event under hard limits; values as YAML.

A scalar is a ``str``, a mapping a ``dict``, a list a ``list``, each with a ``TextPlace``. The field that reads a plain
scalar decides what it means. The events of ruamel.yaml's YAML 1.2 parser are composed within limits on bytes, depth,
values and aliases (an alias counts as if it were written out), so a hostile text costs what the limits allow.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any, NoReturn, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    DocumentStartEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
)
from ruamel.yaml.scalarstring import DoubleQuotedScalarString
from ruamel.yaml.scanner import Scanner

from rota.service.jobfile.problems import LINE_BREAK, ErrorCollector, TextPlace
from rota.spec.check import Path

TEXT_BYTES_MAX = 2**20
DEPTH_MAX = 32
NODES_MAX = 20_000
ALIASES_MAX = 1_000
ENTRIES_MAX = 1_000
"""Entries of one list or mapping; a file with more is not read to its end."""
SCALAR_CHARS_MAX = 256 * 2**10
KEY_CHARS_MAX = 256
LINES_MAX = 50_000

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,3})?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_TAB_ADVICE = ("tabs are not allowed for indentation", "indent with spaces")
_UNEXPECTED_END = "found unexpected end of stream"
_ADVICE = {
    "found character '\\t' that cannot start any token": _TAB_ADVICE,
    "mapping values are not allowed here": ("':' is not allowed here", "check the indentation, or quote the text"),
    _UNEXPECTED_END: ("a quote is opened here and never closed", "close it"),
    "could not find expected ':'": ("a key without ':'", "write 'key: value'"),
}


class ScalarNode(str):
    """The literal text of a scalar; ``plain`` is False when it was quoted or a block."""

    __slots__ = ("place", "plain", "size")

    def __new__(cls, text: str, place: TextPlace, *, plain: bool = True) -> ScalarNode:
        node = super().__new__(cls, text)
        node.place, node.plain, node.size = place, plain, 1
        return node

    @property
    def is_null(self) -> bool:
        """True for an empty or ``null`` plain scalar."""
        return self.plain and str(self) in _NULLS

    @property
    def value(self) -> bool | int | float | str | None:
        """What it means in YAML 1.2: only ``true`` and ``false`` are booleans, ``08`` is eight, ``1_000`` is text."""
        text = str(self)
        if not self.plain:
            return text
        if text in _NULLS:
            return None
        if text in _BOOLS:
            return _BOOLS[text]
        if _INT.fullmatch(text):
            return int(text)
        return float(text) if _FLOAT.fullmatch(text) else text


class MappingNode(dict["ScalarNode", "Node"]):
    """A mapping in the order of the file; of a duplicate key the first value. ``size`` counts the values in it."""

    __slots__ = ("place", "size")

    def __init__(self, entries: dict[ScalarNode, Node], place: TextPlace) -> None:
        super().__init__(entries)
        self.place, self.size = place, 1

    def key(self, name: str) -> ScalarNode | None:
        """The key of that name with its place, or None."""
        return next((key for key in self if key == name), None)

    def at(self, name: str) -> Node | None:
        """The value under a name, or None."""
        return self.get(name)  # type: ignore[call-overload] - the keys are nodes, equal to their text

    def put(self, key: ScalarNode, value: Node) -> None:
        """Set a value and the place of its key; a key that is there keeps its place in the order."""
        entries = [(key, value) if old == key else (old, item) for old, item in self.items()]
        known = key in self
        self.clear()
        self.update(entries if known else [*entries, (key, value)])


class SequenceNode(list["Node"]):
    """A list."""

    __slots__ = ("place", "size")

    def __init__(self, items: list[Node], place: TextPlace) -> None:
        super().__init__(items)
        self.place, self.size = place, 1


Node: TypeAlias = ScalarNode | MappingNode | SequenceNode


def moved(node: Node, place: TextPlace) -> Node:
    """A copy at another place; what is in it is shared."""
    match node:
        case ScalarNode():
            return ScalarNode(node, place, plain=node.plain)
        case MappingNode():
            return MappingNode(node, place)
        case _:
            return SequenceNode(node, place)


def decode(raw: bytes, *, filename: str) -> str:
    """Text of the bytes of a job file; a UTF-8 byte order mark is dropped.

    Raises JobFileError at the place of the first byte that is not UTF-8, or for a file that is too large.
    """
    errors = ErrorCollector("", filename)
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        errors.fail(1, 1, "the file is UTF-16", hint="save it as UTF-8", code="ENCODING")
    _check_size(len(raw), errors)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        before = raw[: exc.start].decode("utf-8", "replace")
        rest = raw[exc.start :].partition(b"\n")[0].decode("utf-8", "replace")
        message = f"byte 0x{raw[exc.start]:02x} is not UTF-8"
        errors = ErrorCollector(before + rest, filename)
        errors.fail(*_end_of(before), message, hint="save the file as UTF-8", code="ENCODING")


def read_tree(text: str, errors: ErrorCollector) -> Node:
    """The root node of ``text``. Duplicate keys are collected in ``errors``; any other fault raises JobFileError."""
    _check_text(text, errors)
    ready = _json_as_yaml(text) if text.lstrip("\ufeff \t\r\n").startswith("{") else text.removeprefix("\ufeff")
    try:
        root = _Composer(ready, errors).document()
    except MarkedYAMLError as exc:
        _fail_syntax(exc, errors)
    except (YAMLError, ValueError, OverflowError) as exc:
        errors.fail(1, 1, f"not YAML: {str(exc).splitlines()[0]}")
    if root is None:
        errors.fail(1, 1, "the file is empty", hint="'rota init --list' shows templates to begin with", code="EMPTY")
    return root


def _check_size(size: int, errors: ErrorCollector) -> None:
    if size > TEXT_BYTES_MAX:
        errors.fail(1, 1, f"the file has {size} bytes, at most {TEXT_BYTES_MAX} are allowed", code="TOO_LARGE")


def _check_text(text: str, errors: ErrorCollector) -> None:
    _check_size(len(text.encode("utf-8", "surrogatepass")), errors)
    if text.count("\n") + text.count("\r") > LINES_MAX:
        errors.fail(1, 1, f"more than {LINES_MAX} lines", code="TOO_LARGE")
    found = _UNPRINTABLE.search(text, 1 if text.startswith("\ufeff") else 0)
    if found is not None:
        message = f"character U+{ord(found.group()):04X} is not allowed"
        errors.fail(*_end_of(text[: found.start()]), message, hint="remove it", code="ENCODING")


def _end_of(text: str) -> tuple[int, int]:
    """Line and column after ``text``."""
    lines = LINE_BREAK.split(text)
    return len(lines), len(lines[-1]) + 1


def _json_as_yaml(text: str) -> str:
    """JSON text that a YAML parser takes, character for character in place: tabs and ``//`` comments become spaces."""
    return _JSON_PARTS.sub(_blanked, text)


_JSON_PARTS = re.compile(
    r"""(?P<kept>"(?:\\.|[^"\\])*(?:"|\Z)|'[^']*(?:'|\Z))|[\t\ufeff]"""
    r"""|(?<![^ \t\r\n,{}\[\]])//[^\r\n\x85\u2028\u2029]*""",
    re.DOTALL,
)
"""A quoted text, a tab, or a comment."""


def _blanked(found: re.Match[str]) -> str:
    return found["kept"] or " " * len(found.group())


def _fail_syntax(exc: MarkedYAMLError, errors: ErrorCollector) -> NoReturn:
    mark: Any = exc.problem_mark or exc.context_mark
    problem = str(exc.problem or exc).splitlines()[0]
    message, hint = _ADVICE.get(problem, (problem, ""))
    if problem.startswith(_UNEXPECTED_END) and exc.context_mark is not None:
        mark = exc.context_mark
    line, col = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    if "\\t" not in problem and errors.source_line(line).lstrip(" ").startswith("\t"):
        message, hint = _TAB_ADVICE
    if exc.context and problem not in _ADVICE:
        message = f"{message} ({exc.context})"
    errors.fail(line, col, message, hint=hint)


class _Scanner(Scanner):
    """A scanner that looks for no keys below the greatest depth: it looks at all of them again with each token."""

    def save_possible_simple_key(self) -> None:
        if len(self.flow_context) <= DEPTH_MAX:
            super().save_possible_simple_key()


class _Composer:
    """Makes nodes of the events of one document and counts what they cost."""

    def __init__(self, text: str, errors: ErrorCollector) -> None:
        self._errors = errors
        yaml = YAML(typ="safe", pure=True)
        yaml.Scanner = _Scanner
        self._events: Iterator[Any] = iter(yaml.parse(text))
        self._anchors: dict[str, Node | None] = {}
        """The node of each anchor; None as long as it is open."""
        self._aliases = 0
        self._nodes = 0

    def document(self) -> Node | None:
        """The root of the only document; None when the text has no value."""
        root: Node | None = None
        documents = 0
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._refuse(event, "a second document", hint="one job a file")
            elif isinstance(event, NodeEvent):
                root = self._node(event, ())
        return root

    def _refuse(self, event: Any, message: str, *, hint: str = "", code: str = "SYNTAX") -> NoReturn:
        self._errors.fail(*_position(event), message, hint=hint, code=code)

    def _node(self, event: Any, path: Path) -> Node:
        if getattr(event, "tag", None) is not None:
            tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
            self._refuse(event, f"the tag {tag} is not allowed", hint="write the plain value")
        if isinstance(event, AliasEvent):
            node = self._alias(event)
            self._count(event, node.size)
            return node
        if isinstance(event, ScalarEvent):
            node = self._scalar(event)
            self._count(event, 1)
        else:
            if len(path) >= DEPTH_MAX:
                self._refuse(event, f"nested more than {DEPTH_MAX} deep", code="TOO_LARGE")
            self._count(event, 1)
            if event.anchor is not None:
                self._anchors[str(event.anchor)] = None
            place, before = TextPlace(*_position(event)), self._nodes
            node = self._mapping(place, path) if isinstance(event, MappingStartEvent) else self._list(place, path)
            node.size = 1 + self._nodes - before
        if event.anchor is not None:
            self._anchors[str(event.anchor)] = node
        return node

    def _count(self, event: Any, size: int) -> None:
        self._nodes += size
        if self._nodes > NODES_MAX:
            self._refuse(event, f"more than {NODES_MAX} values, aliases written out", code="TOO_LARGE")

    def _alias(self, event: Any) -> Node:
        self._aliases += 1
        if self._aliases > ALIASES_MAX:
            self._refuse(event, f"more than {ALIASES_MAX} aliases", code="TOO_LARGE")
        name = str(event.anchor)
        if name not in self._anchors:
            self._refuse(event, f"no anchor &{name} before this alias")
        node = self._anchors[name]
        if node is None:
            self._refuse(event, f"*{name} is used inside the value that it names")
        return node

    def _scalar(self, event: Any) -> ScalarNode:
        text = str(event.value)
        if len(text) > SCALAR_CHARS_MAX:
            self._refuse(event, f"a text of more than {SCALAR_CHARS_MAX} characters", code="TOO_LARGE")
        if max(text, default="") >= "\ud800" and re.search("[\ud800-\udfff]", text):
            try:
                text = text.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                self._refuse(event, "half of a surrogate pair", hint="write the character itself", code="ENCODING")
        plain = not event.style
        if plain and _NOT_FINITE.fullmatch(text):
            self._refuse(event, f"{text} is not a number a job can use", hint="give a finite number", code="BAD_TYPE")
        return ScalarNode(text, TextPlace(*_position(event)), plain=plain)

    def _inside(self) -> Iterator[Any]:
        """The events of the values of an open collection, up to its end."""
        for event in self._events:
            if isinstance(event, CollectionEndEvent):
                return
            yield event

    def _list(self, place: TextPlace, path: Path) -> SequenceNode:
        node = SequenceNode([], place)
        for event in self._inside():
            self._check_entries(node, path)
            node.append(self._node(event, (*path, len(node))))
        return node

    def _mapping(self, place: TextPlace, path: Path) -> MappingNode:
        node = MappingNode({}, place)
        merged: list[Node] = []
        for event in self._inside():
            self._check_entries(node, path)
            key = self._key(self._node(event, (*path, "")))
            merges = key == "<<" and key.plain
            first = node.key(key) if key in node and not merges else None
            if first is not None:
                hint = f"the first is in line {first.place.line}"
                self._errors.add(key.place, (*path, str(key)), "duplicate key", hint=hint, code="DUPLICATE_KEY")
            value = self._node(next(self._events), (*path, str(key)))
            if merges:
                merged.append(value)
            elif first is None:
                node[key] = value
            else:
                self._errors.duplicates.append(((*path, str(key)), value))
        for value in merged:
            for source in value if isinstance(value, SequenceNode) else [value]:
                self._merge(node, source)
        return node

    def _check_entries(self, node: MappingNode | SequenceNode, path: Path) -> None:
        if len(node) >= ENTRIES_MAX:
            kind = "a list" if isinstance(node, SequenceNode) else "a mapping"
            message = f"expected at most {ENTRIES_MAX} entries, got {kind} with more"
            self._errors.add(node.place, path, message, code="OUT_OF_RANGE")
            raise self._errors.error()

    def _key(self, node: Node) -> ScalarNode:
        line, col = node.place.line, node.place.col
        if not isinstance(node, ScalarNode):
            self._errors.fail(line, col, "a key must be a name", hint="quote it", code="BAD_TYPE")
        if len(node) > KEY_CHARS_MAX:
            self._errors.fail(line, col, f"a key of more than {KEY_CHARS_MAX} characters", code="TOO_LARGE")
        return node

    def _merge(self, node: MappingNode, source: Node) -> None:
        """Carry out a merge key (``<<: *defaults``): own keys win, then the earlier mapping."""
        if isinstance(source, MappingNode):
            node.update({key: value for key, value in source.items() if key not in node})
        else:
            self._errors.add(source.place, ("<<",), "only mappings can be merged", code="BAD_TYPE")


def _position(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


def yaml_text(value: object) -> str:
    """Plain values as YAML text, in their order."""
    out = io.StringIO()
    yaml = YAML(typ="rt", pure=True)
    yaml.width = 120
    yaml.dump(_quoted(value), out)
    return out.getvalue()


def _quoted(value: Any) -> Any:
    """Plain values with every text that YAML could read as something else in quotes."""
    if isinstance(value, dict):
        return {_quoted(key): _quoted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_quoted(item) for item in value]
    if isinstance(value, str) and not (value.replace("_", "").isalnum() and value[0].isalpha() and value.isascii()):
        return DoubleQuotedScalarString(value)
    return value
