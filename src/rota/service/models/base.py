"""What all documents have in common, and how a route declares the one that it answers with."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, SerializerFunctionWrapHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

T = TypeVar("T")
Moment = str
"""Time in UTC, ISO 8601 with milliseconds."""
Fields = dict[str, Any]
"""Values whose names depend on what they explain: a reason, a decision, an edit."""


class _AsItIs:
    """Describes an answer by its type and sends what the view made: nothing is checked or converted on the way.

    The tests hold every stored answer against its description, so a request need not pay for it again.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        described = handler(source)

        def describe(_: CoreSchema, to_json: GetJsonSchemaHandler) -> JsonSchemaValue:
            return to_json(core_schema.definitions_schema(described, []))  # by its name, not its text

        as_it_is = core_schema.wrap_serializer_function_ser_schema(_unchanged, schema=described)
        return core_schema.any_schema(metadata={"pydantic_js_annotation_functions": [describe]}, serialization=as_it_is)


def _unchanged(value: Any, _: SerializerFunctionWrapHandler) -> Any:
    return value


Sent = Annotated[T, _AsItIs()]
"""``async def show(...) -> Sent[JobDocument]``: the answer of a route."""


class Closed(TypedDict):
    """A document or a part of one that has these fields and no other."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # pyright: ignore[reportGeneralTypeIssues]


class Headed(Closed):
    """A whole document; subclasses narrow ``kind``."""

    api: Literal["rota/v1"]


class Resources(Closed):
    """What one instance asks for, or a queue promises: memory in bytes."""

    cpus: float
    gpus: float
    gpu_type: str | None
    memory_bytes: int


class Spread(Closed):
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


class ProblemDocument(TypedDict, total=False):
    """A refusal (RFC 9457): ``detail`` says what is wrong, ``hint`` what to do next."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str
    exit: int
    request_id: str
    errors: list[Place]
    fields: Fields
