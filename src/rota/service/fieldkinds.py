"""Kinds of value a job file holds: how each is read from a node, named in a message, and put into a JSON Schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Protocol

from rota.service.yamltree import Node, Sink, plain_value
from rota.spec.errors import did_you_mean, nearest
from rota.spec.resources import parse_duration, parse_size


class _Bad:
    """What a reader gives when it has put a problem into the sink."""

    def __repr__(self) -> str:
        return "BAD"


BAD: Any = _Bad()
_YES_NO = {"yes": "true", "no": "false", "on": "true", "off": "false", "y": "true", "n": "false"}


class FieldKind(Protocol):
    """One kind of value. ``read`` gives the value, or BAD after it told the sink why not."""

    @property
    def words(self) -> str:
        """The kind as people read it: ``whole number, at least 1``."""
        ...

    def read(self, node: Node, loc: str, sink: Sink) -> Any:
        """The value of ``node``; BAD when it does not fit."""
        ...

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the values."""
        ...


def describe(node: Node) -> str:
    """What stands in the file, for the second half of a message."""
    match node.kind:
        case "map":
            return "a mapping"
        case "list":
            return "a list"
        case _:
            if node.is_null:
                return "nothing"
            return repr(node.text) if len(node.text) <= 60 else repr(node.text[:57] + "...")


def refuse(node: Node, loc: str, sink: Sink, expected: str, *, hint: str = "", code: str = "BAD_TYPE") -> Any:
    """Tell the sink that ``expected`` should stand here; gives BAD."""
    sink.add(node, loc, f"expected {expected}, got {describe(node)}", hint=hint, code=code)
    return BAD


def child(loc: str, name: str) -> str:
    """The dotted path one step further down."""
    return f"{loc}.{name}" if loc else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text. ``literal`` also takes numbers and true/false, as they are written (environment, labels)."""

    what: str = "text"
    literal: bool = False
    pattern: str = ""

    @property
    def words(self) -> str:
        return self.what

    def read(self, node: Node, loc: str, sink: Sink) -> Any:
        if node.kind != "scalar" or node.is_null:
            return refuse(node, loc, sink, self.what)
        if not self.literal and not node.file and not isinstance(plain_value(node), str):
            return refuse(node, loc, sink, self.what, hint=f'quote it: "{node.text}"')
        if "\0" in node.text:
            return refuse(node, loc, sink, f"{self.what} without NUL characters", code="OUT_OF_RANGE")
        return node.text

    def schema(self) -> dict[str, Any]:
        kinds: dict[str, Any] = {"type": ["string", "number", "boolean"] if self.literal else "string"}
        return {**kinds, "pattern": self.pattern} if self.pattern else kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A whole number (``whole``) or a number, between ``low`` and ``high``."""

    low: float
    high: float = 10**9
    whole: bool = True

    @property
    def words(self) -> str:
        what = "a whole number" if self.whole else "a number"
        if self.high >= 10**9:
            return f"{what}, at least {self.low:g}"
        return f"{what} from {self.low:g} to {self.high:g}"

    def read(self, node: Node, loc: str, sink: Sink) -> Any:
        value = plain_value(node) if node.kind == "scalar" else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return refuse(node, loc, sink, self.words, hint=_number_hint(node))
        if self.whole and not isinstance(value, int):
            hint = f"write {int(value)}" if isfinite(value) and value == int(value) else ""
            return refuse(node, loc, sink, self.words, hint=hint)
        if not self.low <= value <= self.high:
            return refuse(node, loc, sink, self.words, code="OUT_OF_RANGE")
        return value if self.whole else float(value)

    def schema(self) -> dict[str, Any]:
        limits: dict[str, Any] = {"type": "integer" if self.whole else "number", "minimum": self.low}
        return {**limits, "maximum": self.high} if self.high < 10**9 else limits


def _number_hint(node: Node) -> str:
    if node.kind != "scalar":
        return ""
    bare = node.text.strip().replace("_", "").replace(",", "")
    if bare.lstrip("+-").isdigit() and len(bare) <= 18:
        return f"write {int(bare)}" if not node.plain or bare != node.text else ""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bool:
    """``true`` or ``false``; ``yes`` and ``no`` are texts in YAML 1.2."""

    words: str = "true or false"

    def read(self, node: Node, loc: str, sink: Sink) -> Any:
        value = plain_value(node) if node.kind == "scalar" else None
        if isinstance(value, bool):
            return value
        meant = _YES_NO.get(node.text.lower(), "")
        return refuse(node, loc, sink, self.words, hint=f"write {meant}" if meant else "")

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A size or a duration with its unit; a bare number is refused."""

    what: str
    parse: Callable[[str], float]
    low: float = 0

    @property
    def words(self) -> str:
        return self.what

    def read(self, node: Node, loc: str, sink: Sink) -> Any:
        if node.kind != "scalar" or node.is_null:
            return refuse(node, loc, sink, self.what)
        if len(node.text) > 64:
            return refuse(node, loc, sink, self.what)
        try:
            value = self.parse(node.text)
        except (ValueError, OverflowError) as exc:
            message, _, hint = str(exc).partition("; ")
            sink.add(node, loc, message, hint=hint, code="BAD_UNIT")
            return BAD
        if value < self.low or value >= 2**62:
            return refuse(node, loc, sink, f"{self.what}, at least {self.low:g}", code="OUT_OF_RANGE")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "description": self.what}


def duration(low_s: float = 0.0) -> Measure:
    """A duration such as ``90s``, read as seconds."""
    return Measure(what="a duration with a unit, for example 90s, 5m, 8h, 2d", parse=parse_duration, low=low_s)


def size() -> Measure:
    """A size such as ``512MiB``, read as bytes."""
    return Measure(what="a size with a unit, for example 512MiB", parse=parse_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOf:
    """One word of a closed list."""

    choices: tuple[str, ...]

    @property
    def words(self) -> str:
        return " \\| ".join(f"`{choice}`" for choice in self.choices)

    def read(self, node: Node, loc: str, sink: Sink) -> Any:
        if node.kind == "scalar" and node.text in self.choices:
            return node.text
        expected = "one of " + ", ".join(self.choices)
        hint = did_you_mean(node.text, self.choices) if node.kind == "scalar" else ""
        return refuse(node, loc, sink, expected, hint=hint, code="BAD_CHOICE")

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.choices)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOf:
    """A list of one kind. ``single`` also takes one value without brackets, ``bars`` one text ``a|b``."""

    item: FieldKind
    single: bool = False
    bars: bool = False
    len_max: int = 1_000

    @property
    def words(self) -> str:
        words = f"list of {self.item.words}"
        return f"{words}, or `a\\|b`" if self.bars else words

    def read(self, node: Node, loc: str, sink: Sink) -> Any:
        if self.bars and node.kind == "scalar" and not node.is_null:
            parts = [
                Node("scalar", node.line, node.col, text=part.strip(), plain=False) for part in node.text.split("|")
            ]
            for part in parts:
                part.file, part.source = node.file, node.source
            return self._read_all([(loc, part) for part in parts], sink)
        if self.single and node.kind != "list":
            return self._read_all([(loc, node)], sink)
        if node.kind != "list":
            return refuse(node, loc, sink, "a list")
        if len(node.items) > self.len_max:
            return refuse(node, loc, sink, f"at most {self.len_max} entries", code="OUT_OF_RANGE")
        return self._read_all([(f"{loc}[{i}]", item) for i, item in enumerate(node.items)], sink)

    def _read_all(self, items: Sequence[tuple[str, Node]], sink: Sink) -> Any:
        values = [self.item.read(item, place, sink) for place, item in items]
        return BAD if any(value is BAD for value in values) else tuple(values)

    def schema(self) -> dict[str, Any]:
        many = {"type": "array", "items": self.item.schema()}
        if self.bars:
            return {"oneOf": [{"type": "string"}, many]}
        return {"oneOf": [self.item.schema(), many]} if self.single else many


@dataclass(frozen=True, slots=True, kw_only=True)
class MapOf:
    """A mapping from names of the user's choice to one kind; read as a dict in file order."""

    value: FieldKind
    what: str = "a mapping"
    len_max: int = 1_000

    @property
    def words(self) -> str:
        return f"map of name to {self.value.words}"

    def read(self, node: Node, loc: str, sink: Sink) -> Any:
        if node.kind != "map":
            return refuse(node, loc, sink, self.what)
        if len(node.entries) > self.len_max:
            return refuse(node, loc, sink, f"at most {self.len_max} entries", code="OUT_OF_RANGE")
        return {key.text: self.value.read(value, child(loc, key.text), sink) for key, value in node.entries}

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.value.schema()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a record: its kind, its default as text, and what it means."""

    kind: FieldKind
    doc: str
    default: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A mapping with known fields; unknown ones are refused. Read as a dict of the good fields that are present."""

    fields: Mapping[str, Field]
    what: str = "a mapping"
    words: str = "mapping"

    def read(self, node: Node, loc: str, sink: Sink) -> Any:
        if node.kind != "map":
            return refuse(node, loc, sink, self.what)
        found: dict[str, Any] = {}
        for key, value in node.entries:
            known = self.fields.get(key.text)
            if known is None:
                inner = {
                    sub: f"{name}.{sub}"
                    for name, item in self.fields.items()
                    for sub in getattr(item.kind, "fields", ())
                }
                hint = did_you_mean(key.text, self.fields, inner) or nearest(key.text, [*self.fields], "fields")
                sink.add(key, child(loc, key.text), "unknown field", hint=hint, code="UNKNOWN_FIELD")
            elif key.text not in found:
                found[key.text] = known.kind.read(value, child(loc, key.text), sink)
        for name, item in self.fields.items():
            if item.required and name not in found:
                sink.add(node, child(loc, name), "missing", hint=f"add '{name}:', {item.doc}", code="MISSING")
        return {name: value for name, value in found.items() if value is not BAD}

    def schema(self) -> dict[str, Any]:
        properties = {name: {**item.kind.schema(), "description": item.doc} for name, item in self.fields.items()}
        required = [name for name, item in self.fields.items() if item.required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Either:
    """A mapping or something else: ``by`` picks the kind from the shape of the node (map, list or scalar)."""

    by: Mapping[str, FieldKind]
    words: str
    expected: str = field(default="")

    def read(self, node: Node, loc: str, sink: Sink) -> Any:
        kind = self.by.get(node.kind)
        if kind is None or node.is_null:
            return refuse(node, loc, sink, self.expected or self.words)
        return kind.read(node, loc, sink)

    def schema(self) -> dict[str, Any]:
        return {"oneOf": [kind.schema() for kind in self.by.values()]}
