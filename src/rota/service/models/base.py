"""Documents in general: their header, how one is built from values, and how a route declares its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, TypeVar, Union, cast, get_args, get_origin

from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, SerializerFunctionWrapHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypeAliasType, TypedDict, get_type_hints, is_typeddict

from rota.runtime.clock import iso
from rota.spec.codec import JsonObject

T = TypeVar("T")
_TIME = "time"
Moment = Annotated[str, _TIME]
"""Time in UTC, ISO 8601 with milliseconds; ``document`` makes it of Unix seconds."""
Fields = JsonObject
"""Values whose names depend on what they explain: a reason, a decision, an edit."""


class _AsItIs:
    """Describes an answer by its type and sends what the view made: nothing is checked or converted on the way.

    The tests hold every stored answer against its description, so a request need not pay for it again.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        described = handler(source)

        def describe(_: CoreSchema, to_json: GetJsonSchemaHandler) -> JsonSchemaValue:
            # As a reference: written out, one document would stand in each that has it.
            return to_json(core_schema.definitions_schema(described, []))

        as_it_is = core_schema.wrap_serializer_function_ser_schema(_unchanged, schema=described)
        return core_schema.any_schema(metadata={"pydantic_js_annotation_functions": [describe]}, serialization=as_it_is)


def _unchanged(value: Any, _: SerializerFunctionWrapHandler) -> Any:
    return value


Sent = Annotated[T, _AsItIs()]
"""``async def show(...) -> Sent[JobDocument]``: the answer of a route."""


def document(model: type[T], *sources: object, **given: object) -> T:
    """A document of ``model``: each field as ``given``, else as it is named in the first source that has it.

    A source is a mapping or an object. The model says how a value is written: Unix seconds as a ``Moment``, an enum as
    its value, a tuple as a list, an object as the document that is declared for it. Fields with one possible value
    (``kind``, ``next``) need no source. Raises TypeError for a value that no field takes, or a field without a value.
    """
    fields = _fields(model)
    if unknown := given.keys() - fields.keys():
        raise TypeError(f"{model.__name__} has no field {', '.join(sorted(unknown))}")
    found: dict[str, object] = {}
    finds: list[Callable[[str, object], object]] = [
        cast("Mapping[str, object]", one).get if isinstance(one, Mapping) else partial(getattr, one)
        for one in (given, *sources)
    ]
    for name, (write, required) in fields.items():
        value: object = _MISSING
        for find in finds:
            if (value := find(name, _MISSING)) is not _MISSING:
                break
        if value is not _MISSING:
            found[name] = write(value)
        elif isinstance(write, _Constant):
            found[name] = write(None)
        elif required:
            raise TypeError(f"{model.__name__} lacks {name}")
    return cast("T", found)


_MISSING = object()
Writer = Callable[[Any], object]


def _moment(value: float | str) -> str:
    return value if isinstance(value, str) else iso(value)


class _Constant:
    """Writes the one value that a field may have."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __call__(self, _: object) -> object:
        return self._value


@cache
def _fields(model: type) -> dict[str, tuple[Writer, bool]]:
    """How each field is written and whether it must be there; ``api`` and ``kind`` first."""
    hints = get_type_hints(model, include_extras=True)
    names = sorted(hints, key=lambda name: name not in ("api", "kind") or "api" not in hints)
    return {name: (_writer(hints[name]), get_origin(hints[name]) is not NotRequired) for name in names}


def _writer(hint: Any) -> Writer:
    if isinstance(hint, TypeAliasType):
        return _writer(hint.__value__)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _moment if _TIME in args else _writer(args[0])
    if origin is NotRequired:
        return _writer(args[0])
    if origin in (Union, UnionType):
        write = _writer(next(one for one in args if one is not NoneType))
        return lambda value: None if value is None else write(value)
    if hint is NoneType or (origin is Literal and len(args) == 1):
        return _Constant(None if hint is NoneType else args[0])
    if origin is list:
        write = _writer(args[0])
        return lambda values: [write(one) for one in values]
    if origin is dict:
        return dict
    if is_typeddict(hint):
        return lambda value: cast("object", value) if isinstance(value, dict) else document(hint, value)
    return lambda value: value.value if isinstance(value, Enum) else value


class Closed(TypedDict):
    """A document or a part of one that has these fields and no other."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # pyright: ignore[reportGeneralTypeIssues] - how pydantic takes it


class Headed(Closed):
    """A whole document; subclasses narrow ``kind``."""

    api: Literal["rota/v1"]


class Member(Closed):
    """An instance by name: ``role/rank``."""

    instance: str


class Timed(Closed):
    """Something that happened at a moment, if that is known."""

    at: Moment | None


class Resources(Closed):
    """What one instance asks for, or a queue promises: memory in bytes."""

    cpus: float
    gpus: float
    gpu_type: str | None
    memory_bytes: int


class Quantiles(Closed):
    """Mean, quantiles and maximum; null without values."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


class Why(Closed):
    """A reason code, its sentence, and the values that go with it."""

    code: str
    text: str
    fields: Fields


class Place(Closed):
    """A mistake in a job file or request, and where it is; ``line`` and ``col`` count from 1."""

    loc: str
    line: int
    col: int
    message: str
    hint: str
    code: str
    file: str
    source: str


class ProblemDocument(Closed):
    """A refusal (RFC 9457): ``detail`` says what is wrong, ``hint`` what to do next."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str
    exit: int
    request_id: str
    errors: NotRequired[list[Place]]
    fields: NotRequired[Fields]


PROBLEM = "application/problem+json"
REFS = "#/components/schemas/{model}"
REFUSAL: dict[int | str, JsonObject] = {
    "default": {
        "description": "A refusal, as RFC 9457 describes it",
        "content": {PROBLEM: {"schema": {"$ref": REFS.format(model=ProblemDocument.__name__)}}},
    }
}
"""What every route may answer in place of its document."""
