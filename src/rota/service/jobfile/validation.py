"""Fields of the job file: how each kind of value is read, checked and written, and unknown keys are reported.

A kind is an annotation of a pydantic field. It reads a value that knows its place, writes it back, and knows its JSON
Schema. A model names the class of ``rota.spec`` that it fills; the defaults are those of that class.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from difflib import SequenceMatcher
from math import isfinite
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Self, TypeVar, Unpack, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from rota.service.jobfile.nodes import ENTRIES_MAX, MappingNode, Node, ScalarNode, SequenceNode
from rota.service.jobfile.problems import ErrorCollector, TextPlace
from rota.spec.check import Path
from rota.spec.errors import JobFileError, did_you_mean, nearest
from rota.spec.resources import counted, parse_duration, parse_size

V = TypeVar("V")
P = TypeVar("P", bound="Part")
Values = dict[str, Any]
"""Arguments of the class that a part makes, by name."""
_YES_NO = {"yes": "true", "no": "false", "on": "true", "off": "false", "y": "true", "n": "false"}
_SIZE_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def refused(message: str, *, hint: str = "", code: str = "BAD_TYPE") -> PydanticCustomError:
    """The error of a value: what is wrong, what to do, and the stable code."""
    return PydanticCustomError(code, "{message}", {"message": message, "hint": hint})  # type: ignore[arg-type] - wants a literal


def unexpected(expected: str, node: object, *, hint: str = "", code: str = "BAD_TYPE") -> PydanticCustomError:
    """The error of a value that is not what was expected."""
    return refused(f"expected {expected}, got {_described(node)}", hint=hint, code=code)


def _described(node: object) -> str:
    match node:
        case MappingNode():
            return "a mapping"
        case SequenceNode():
            return "a list"
        case _:
            text = str(node)
            if isinstance(node, ScalarNode) and node.is_null:
                return "nothing"
            return repr(text) if len(text) <= 60 else repr(text[:57] + "...")


class Kind(Generic[V]):
    """One kind of scalar, put into ``Annotated``. ``words`` names it in the reference."""

    words: Any

    def read(self, node: object) -> V:
        """The value of ``node``. Raises PydanticCustomError."""
        raise NotImplementedError

    def write(self, value: V) -> object:
        """The value as it is written into a file; inverse of ``read``."""
        return value

    def schema(self) -> JsonSchemaValue:
        """The JSON Schema of the values."""
        return {"type": "string"}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        writer = core_schema.plain_serializer_function_ser_schema(self.write)
        return core_schema.no_info_plain_validator_function(self.read, serialization=writer)

    def __get_pydantic_json_schema__(self, source: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return self.schema()


@dataclasses.dataclass(frozen=True, slots=True)
class Text(Kind[str]):
    """A text. ``literal`` also takes numbers and true/false, as they are written (environment, labels)."""

    words: str = "text"
    literal: bool = False

    def read(self, node: object) -> str:
        if not isinstance(node, ScalarNode) or node.is_null:
            raise unexpected(self.words, node)
        if not self.literal and not node.place.file and not isinstance(node.value, str):
            raise unexpected(self.words, node, hint=f'quote it: "{node}"')
        if "\0" in node:
            raise unexpected(f"{self.words} without NUL characters", node, code="OUT_OF_RANGE")
        return str(node)

    def schema(self) -> JsonSchemaValue:
        return {"type": ["string", "number", "boolean"] if self.literal else "string"}


class Value(Kind[Any]):
    """Any value, as YAML 1.2 reads it: text, number, true or false, nothing, or a list or mapping of them."""

    words = "any value"

    def read(self, node: object) -> Any:
        match node:
            case MappingNode():
                return {str(key): self.read(value) for key, value in node.items()}
            case SequenceNode():
                return [self.read(value) for value in node]
            case ScalarNode():
                return node.value
            case _:
                return node

    def schema(self) -> JsonSchemaValue:
        return {}


@dataclasses.dataclass(frozen=True, slots=True)
class Number(Kind[float]):
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

    def read(self, node: object) -> float:
        value = node.value if isinstance(node, ScalarNode) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise unexpected(self.words, node, hint=_number_hint(node, whole=self.whole))
        if self.whole and not isinstance(value, int):
            hint = f"write {int(value)}" if isfinite(value) and value == int(value) else ""
            raise unexpected(self.words, node, hint=hint)
        if not self.low <= value <= self.high:
            raise unexpected(self.words, node, code="OUT_OF_RANGE")
        return value if self.whole else float(value)

    def write(self, value: float) -> float:
        return int(value) if value == int(value) else value

    def schema(self) -> JsonSchemaValue:
        limits: JsonSchemaValue = {"type": "integer" if self.whole else "number", "minimum": self.low}
        return {**limits, "maximum": self.high} if self.high < 10**9 else limits


def _number_hint(node: object, *, whole: bool) -> str:
    if not isinstance(node, ScalarNode):
        return ""
    bare = node.strip().replace("_", "").replace(",", "")
    if not whole and re.fullmatch(r"\d{1,9}m", bare):  # of Kubernetes: thousandths of a core
        return f"write {int(bare[:-1]) / 1000:g}"
    if bare.lstrip("+-").isdigit() and len(bare) <= 18 and (not node.plain or bare != node):
        return f"write {int(bare)}"
    return ""


class AxisSize(Kind[float | str]):
    """The size of a mesh axis, or ``*`` for the axis that grows and shrinks."""

    words = 'whole number, or `"*"`'

    def read(self, node: object) -> float | str:
        return "*" if node == "*" else Number(1, 100_000).read(node)

    def schema(self) -> JsonSchemaValue:
        return {"oneOf": [{"type": "integer", "minimum": 1}, {"const": "*"}]}


class Bool(Kind[bool]):
    """``true`` or ``false``; ``yes`` and ``no`` are texts in YAML 1.2."""

    words = "true or false"

    def read(self, node: object) -> bool:
        value = node.value if isinstance(node, ScalarNode) else None
        if isinstance(value, bool):
            return value
        meant = _YES_NO.get(str(node).lower(), "")
        raise unexpected(self.words, node, hint=f"write {meant}" if meant else "")

    def schema(self) -> JsonSchemaValue:
        return {"type": "boolean"}


@dataclasses.dataclass(frozen=True, slots=True)
class Measure(Kind[float]):
    """A size or a duration with its unit; a bare number is refused."""

    words: str
    parse: Callable[[str], float]
    format: Callable[[float], str]
    low: float = 0

    def read(self, node: object) -> float:
        if not isinstance(node, ScalarNode) or node.is_null or len(node) > 64:
            raise unexpected(self.words, node)
        value = _parsed(self.parse, str(node))
        if value < self.low or value >= 2**62:
            raise unexpected(f"{self.words}, at least {self.low:g}", node, code="OUT_OF_RANGE")
        return value

    def write(self, value: float) -> str:
        return self.format(value)

    def schema(self) -> JsonSchemaValue:
        return {"type": "string", "description": self.words}


def _parsed(parse: Callable[[str], float], text: str, hint: str = "") -> float:
    try:
        return parse(text)
    except (ValueError, OverflowError) as exc:
        message, _, better = str(exc).partition("; ")
        raise refused(message, hint=better or hint, code="BAD_UNIT") from None


def duration_text(seconds: float) -> str:
    """A duration that reads back as exactly ``seconds``, without an exponent: ``90s``, ``0.5s``."""
    text = format(Decimal(repr(seconds)), "f")
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}s"


def size_text(size_bytes: float) -> str:
    """A size that reads back as exactly ``size_bytes``: ``2GiB``, ``1500B``."""
    factor, unit = next((one for one in _SIZE_UNITS if size_bytes and size_bytes % one[0] == 0), (1, "B"))
    return f"{int(size_bytes) // factor}{unit}"


def duration(low_s: float = 0.0) -> Measure:
    """A duration such as ``90s``, read as seconds."""
    return Measure("a duration with a unit, for example 90s, 5m, 8h, 2d", parse_duration, duration_text, low_s)


SIZE = Measure("a size with a unit, for example 512MiB", parse_size, size_text)
"""A size such as ``512MiB``, read as bytes."""


class OneOf(Kind[str]):
    """One word of a closed list: the choices of a ``Literal``; ``others`` has hints for words of other systems."""

    def __init__(self, literal: object, others: Mapping[str, str] = MappingProxyType({})) -> None:
        self.choices: tuple[str, ...] = get_args(literal)
        self.others = others
        self.words = " \\| ".join(f"`{choice}`" for choice in self.choices)

    def read(self, node: object) -> str:
        if isinstance(node, ScalarNode) and node in self.choices:
            return str(node)
        word = str(node) if isinstance(node, ScalarNode) else ""
        hint = self.others.get(word.casefold()) or (did_you_mean(word, self.choices) if word else "")
        raise unexpected("one of " + ", ".join(self.choices), node, hint=hint, code="BAD_CHOICE")

    def schema(self) -> JsonSchemaValue:
        return {"enum": list(self.choices)}


class Limit(Kind[tuple[int, float]]):
    """``3/10m``: at most this number of failures within a sliding window; read as (count, seconds)."""

    words = "failures/window, for example `3/10m`"

    def read(self, node: object) -> tuple[int, float]:
        count, slash, window = node.partition("/") if isinstance(node, ScalarNode) else ("", "", "")
        if not re.fullmatch(r"\s*\d{1,9}\s*", count):
            raise unexpected("failures/window, for example 3/10m", node)
        if not slash:
            hint = f"{count}/10m heals {counted(count, 'failure')} within 10 minutes there; the next one goes to `then`"
            raise refused(f"{counted(count, 'failure')} within which time?", hint=hint, code="BAD_UNIT")
        seconds = _parsed(parse_duration, window, "for example 3/10m")
        if seconds <= 0:
            raise unexpected("a window longer than nothing", node, code="OUT_OF_RANGE")
        return int(count), seconds

    def write(self, value: tuple[int, float]) -> str:
        return f"{value[0]}/{duration_text(value[1])}"

    def schema(self) -> JsonSchemaValue:
        return {"type": "string", "pattern": r"^\s*\d+\s*/.+$"}


class Every(Kind[str]):
    """``auto``, ``<n> commits`` or a duration; read as the text itself, without needless spaces."""

    words = "`auto`, `<n> commits` or a duration"

    def read(self, node: object) -> str:
        text = " ".join(node.split()) if isinstance(node, ScalarNode) else ""
        if text == "auto" or re.fullmatch(r"[1-9]\d{0,8} commits?", text):
            return text
        try:
            if parse_duration(text) > 0:
                return text
        except ValueError:
            pass  # said below, with all three forms
        raise unexpected("auto, '<n> commits' or a duration such as 90s", node)


@dataclasses.dataclass(frozen=True, slots=True)
class Several:
    """A list. ``single`` also takes one value without brackets, ``bars`` one text ``a|b``; ``kept``: one stays one."""

    single: bool = False
    bars: bool = False
    kept: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        writer = core_schema.plain_serializer_function_ser_schema(
            lambda one: one if isinstance(one, str) else list(one)
        )
        kept = writer if self.kept else None
        return core_schema.no_info_wrap_validator_function(self.read, handler(source), serialization=kept)

    def read(self, node: object, handler: Callable[[object], Sequence[object]]) -> object:
        """The entries as a tuple."""
        if isinstance(node, SequenceNode):
            return handler(node)
        if self.bars and isinstance(node, ScalarNode) and not node.is_null:
            return handler([ScalarNode(part.strip(), node.place, plain=False) for part in node.split("|")])
        if not self.single:
            raise unexpected("a list", node)
        return handler([node])[0] if self.kept else handler([node])

    def __get_pydantic_json_schema__(self, source: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        many = handler(source["schema"])
        if self.bars:
            return {"oneOf": [{"type": "string"}, many]}
        return {"oneOf": [many["items"], many]} if self.single else many


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """A mapping from names of the user's choice."""

    what: str = "a mapping"
    entries_max: int = ENTRIES_MAX

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.read, handler(source))

    def read(self, node: object) -> MappingNode:
        """The mapping. Raises PydanticCustomError."""
        if not isinstance(node, MappingNode):
            raise unexpected(self.what, node)
        if len(node) > self.entries_max:
            raise unexpected(f"at most {self.entries_max} entries", node, code="OUT_OF_RANGE")
        return node


def optional(doc: str, *, alias: str | None = None, default: str = "") -> Any:
    """A field that may be left out; ``default`` says what then holds where the default of the class does not."""
    return Field(default=None, alias=alias, description=doc, json_schema_extra={"x-default": default})


def required(doc: str, *, alias: str | None = None) -> Any:
    """A field that must be given."""
    return Field(alias=alias, description=doc)


class Part(BaseModel):
    """A mapping with known fields, named as the attributes of ``makes`` that they fill; the alias is the name here."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    what: ClassVar[str] = "a mapping"
    words: ClassVar[str] = "mapping"
    makes: ClassVar[Any] = dict
    short: ClassVar[Any] = None
    """The kind of a scalar that is short for a mapping."""
    always: ClassVar[tuple[str, ...]] = ()
    """Fields that are written also at their default."""
    models: ClassVar[dict[Any, type[Part]]] = {}
    """The model that fills each class."""

    def __init_subclass__(cls, **given: Unpack[ConfigDict]) -> None:
        super().__init_subclass__(**given)
        if "makes" in cls.__dict__:
            Part.models[cls.makes] = cls

    @model_validator(mode="before")
    @classmethod
    def _mapping(cls, node: object) -> object:
        node = cls.long_form(node)
        if not isinstance(node, dict):
            raise unexpected(cls.what, node)
        return node

    @classmethod
    def long_form(cls, node: object) -> object:
        """The mapping that a shorter form means; anything else unchanged."""
        return node

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        return schema if cls.short is None else {"oneOf": [cls.short.schema(), schema]}

    @classmethod
    def by_name(cls) -> dict[str, tuple[str, FieldInfo]]:
        """Attribute and field of each name in the file."""
        return {field.alias or name: (name, field) for name, field in cls.model_fields.items()}

    @classmethod
    def defaults(cls) -> Values:
        """The defaults of the class that is made."""
        made = dataclasses.fields(cls.makes) if dataclasses.is_dataclass(cls.makes) else ()
        return {
            one.name: one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
            for one in made
        }

    def given(self) -> Values:
        """The attributes that the file gives, parts in them made."""
        return {name: _made(getattr(self, name)) for name in self.model_fields_set}

    def make(self) -> object:
        """The value of ``makes``."""
        return self.makes(**self.given())

    @classmethod
    def attributes(cls, value: Any) -> Values:
        """What ``value`` has of these fields, but for defaults."""
        defaults = cls.defaults()
        names = [name for name in cls.model_fields if name in defaults]
        return {
            name: getattr(value, name) for name in names if name in cls.always or getattr(value, name) != defaults[name]
        }

    @classmethod
    def of(cls, value: object) -> Self:
        """The part that makes ``value``, without what is default."""
        found: Values = {name: _part_of(one) for name, one in cls.attributes(value).items()}
        return cls.model_construct(**found)


def _made(value: object) -> object:
    if isinstance(value, Part):
        return value.make()
    return tuple(_made(one) for one in value) if isinstance(value, tuple) else value


def _part_of(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(_part_of(one) for one in value)
    model = Part.models.get(type(value))
    return model.of(value) if model is not None else value


_PACKAGES = ("requirements", "pip", "uv", "conda", "dependencies")
OTHER_WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "count",
            "instances",
            "nodes",
            "nnodes",
            "num_nodes",
            "num_replicas",
            "num_workers",
            "parallelism",
            "taskNumber",
        ),
        ("replicas",),
    ),
    **dict.fromkeys(("command", "cmd", "entrypoint", "script", "exec"), ("run",)),
    **dict.fromkeys(("environment", "env_vars", "environ"), ("env",)),
    **dict.fromkeys(_PACKAGES, ("packages",)),
    **dict.fromkeys(("time", "timeout", "walltime", "deadline", "max_time"), ("time_limit",)),
    **dict.fromkeys(("mem", "ram"), ("memory", "resources.memory")),
    **dict.fromkeys(("partition", "pool"), ("queue",)),
    **dict.fromkeys(("depends", "depends_on", "dependsOn", "dependency", "needs"), ("after", "start_after")),
    **dict.fromkeys(("max_restarts", "max_retries", "retries", "backoffLimit"), ("limit", "fail.limit")),
}
"""What other systems call a field."""
OTHER_FILES: dict[str, str] = {
    "apiVersion": "a manifest of Kubernetes is read by kubectl; 'rota init --list' shows job files",
    "metadata": "write the name as 'name:'",
    "spec": "write each container as a role: 'roles: {main: {run: [python, train.py]}}'",
}
"""What to do with a field of the files of other systems."""


def read_part(model: type[P], root: Node, errors: ErrorCollector, above: Path = ()) -> P | None:
    """The part that ``root``, found at ``above``, describes; None after its mistakes were added to ``errors``."""
    try:
        return model.model_validate(root)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        misspelt = {one["loc"]: _meant(model, one["loc"]) for one in found if one["type"] == "extra_forbidden"}
        meant = {(*loc[:-1], name) for loc, name in misspelt.items()}
        for one in sorted(found, key=lambda one: one["type"] == "missing"):
            if one["type"] != "missing" or one["loc"] not in meant:
                _collect(model, root, one, errors, above)
        _below_misspelt(model, root, misspelt, errors, above)
        return None


def _below_misspelt(
    model: type[P], root: Node, misspelt: Mapping[tuple[int | str, ...], str], errors: ErrorCollector, above: Path
) -> None:
    """Add the mistakes in what is below a misspelt key, read as the field that it is nearest to."""
    renamed, written = root, dict[tuple[int | str, ...], str]()
    for loc, meant in misspelt.items():
        path, _ = place_of(root, loc)
        if _is_misspelt(str(loc[-1]), meant) and path == loc and (*loc[:-1], meant) not in written:
            renamed, named = _renamed(renamed, loc, meant)
            written |= {(*loc[:-1], meant): str(loc[-1])} if named else {}
    if not written:
        return
    again = ErrorCollector("", errors.filename)
    with suppress(JobFileError):  # too many: those before it count
        read_part(model, renamed, again)
    for path, one in zip(again.paths, again.problems, strict=True):
        start = next((path[: len(key)] for key in written if path[: len(key)] == key and len(path) > len(key)), None)
        if start is not None:
            file = "" if one.file == errors.filename else one.file
            place = TextPlace(one.line, one.col, file, one.source, one.loc if file else "")
            there = (*start[:-1], written[start], *path[len(start) :])
            errors.add(place, (*above, *there), one.message, hint=one.hint, code=one.code)


def _is_misspelt(name: str, meant: str) -> bool:
    """Whether the two are one word: what is below a key that is only near a field may be of another kind."""
    return meant in OTHER_WORDS.get(name, ()) or SequenceMatcher(None, name.casefold(), meant).ratio() >= 0.75


def _renamed(node: Node, loc: Sequence[int | str], meant: str) -> tuple[Node, bool]:
    """A copy in which the mapping or list at ``loc`` has the key that was ``meant``; False where that is taken."""
    match node, loc:
        case MappingNode(), (str(name),) if meant not in node and isinstance(node.at(name), MappingNode | SequenceNode):
            renamed = {ScalarNode(meant, key.place) if key == name else key: one for key, one in node.items()}
            return MappingNode(renamed, node.place), True
        case MappingNode(), (str(name), _, *_) if (value := node.at(name)) is not None:
            below, done = _renamed(value, loc[1:], meant)
            return MappingNode({key: below if key == name else one for key, one in node.items()}, node.place), done
        case SequenceNode(), (int(index), _, *_):
            below, done = _renamed(node[index], loc[1:], meant)
            return SequenceNode([below if i == index else one for i, one in enumerate(node)], node.place), done
        case _:
            return node, False


def _meant(model: type[Part], loc: tuple[int | str, ...]) -> str:
    """The field that the unknown key at ``loc`` is nearest to; empty for none."""
    name, known = str(loc[-1]), _at(model, loc[:-1]).by_name()
    if name in OTHER_WORDS:
        return next((one for one in OTHER_WORDS[name] if one in known), "")
    return did_you_mean(name, known).removeprefix("did you mean '").removesuffix("'?")


def _collect(model: type[Part], root: Node, error: Any, errors: ErrorCollector, above: Path) -> None:
    """Add one error of pydantic at its place."""
    loc, code, context = error["loc"], error["type"], error.get("ctx", {})
    path, place = place_of(root, loc, key=code == "extra_forbidden")
    message, hint = context.get("message", error["msg"]), context.get("hint", "")
    if code in ("missing", "extra_forbidden"):
        name, known = loc[-1], _at(model, loc[:-1]).by_name()
        if code == "missing":
            path = (*path, name)
            message, hint, code = "missing", f"add '{name}:', {known[name][1].description}", "MISSING"
        else:
            inner = {sub: f"{name}.{sub}" for name, (_, field) in known.items() for sub in _names_below(field)}
            message, code = "unknown field", "UNKNOWN_FIELD"
            words = (name, *OTHER_WORDS.get(name, ()))
            meant = next((one for one in words[1:] if one in known or one in inner.values()), "") or next(
                (f"{outer}.NAME.{one}" for one in words for outer, (_, field) in known.items() if one in _each(field)),
                "",
            )
            top = model.by_name() if len(loc) > 1 and not meant else {}
            of_all = next((one for one in words if one in top and "roles" in top), "")
            hint = f"'{of_all}:' is a field of the job, beside 'roles:'" if of_all else ""
            hint = (
                hint
                or (OTHER_FILES.get(name, "") if len(loc) == 1 and not above else "")
                or (f"did you mean '{meant}'?" if meant else did_you_mean(name, known, inner))
            )
            hint = hint or nearest(name, [*known], "fields")
    elif path[-2:-1] == ("env",) and path[-1] in ("packages", *_PACKAGES):
        hint = hint or "variables are text; 'packages:' installs packages"
    errors.add(place, (*above, *path), message, hint=hint, code=code)


def place_of(root: Node, loc: Sequence[str | int], *, key: bool = False) -> tuple[Path, TextPlace]:
    """The path and place of what is at ``loc``; steps into a shorter form do not count. ``key``: of its key."""
    here, path, place = root, (), root.place
    for part in loc:
        if isinstance(here, MappingNode) and isinstance(part, str) and part in here:
            name = here.key(part)
            here = here[name] if name is not None else here
            place = name.place if key and name is not None else here.place
        elif isinstance(here, SequenceNode) and isinstance(part, int):
            here = here[part]
            place = here.place
        else:
            continue
        path = (*path, part)
    return path, place


def _at(model: type[Part], loc: Sequence[str | int]) -> Any:
    """The annotation of what is at ``loc``; None where no field is."""
    here: Any = model
    for part in loc:
        if isinstance(here, type) and issubclass(here, Part):
            field = here.by_name().get(str(part))
            here = field and field[1].annotation
        else:
            here = next(iter(get_args(here)[-1 if get_origin(here) is dict else 0 :]), None)
    return here


def read_again(model: type[Part], root_path: Path, node: Node, errors: ErrorCollector) -> None:
    """Add the mistakes in the value of a duplicate key, where the keys are names of the user's choice."""
    part = _at(model, root_path)
    if get_origin(_at(model, root_path[:-1])) is dict and isinstance(part, type) and issubclass(part, Part):
        read_part(part, node, errors, root_path)


def part_in(field: FieldInfo) -> type[Part] | None:
    """The model of the mappings in a field, also in a list or below names; None for scalars."""
    found: Any = field.annotation
    while get_origin(found) in (dict, tuple):
        found = get_args(found)[1 if get_origin(found) is dict else 0]
    return found if isinstance(found, type) and issubclass(found, Part) else None


def _names_below(field: FieldInfo) -> Sequence[str]:
    """The names in a field that is one mapping."""
    return _names_in(field.annotation)


def _each(field: FieldInfo) -> Sequence[str]:
    """The names in each value of a field that maps names to mappings."""
    return _names_in(get_args(field.annotation)[1]) if get_origin(field.annotation) is dict else ()


def _names_in(part: object) -> Sequence[str]:
    return [*part.by_name()] if isinstance(part, type) and issubclass(part, Part) else ()
