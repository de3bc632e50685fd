"""Canonical JSON of frozen dataclasses: the one way values of spec are written and read."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, Literal, NewType, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints, overload

T = TypeVar("T")
JsonObject = dict[str, Any]
"""A JSON object with fields that its reader knows."""
API = "rota/v1"
"""The field ``api`` of every document."""
_AS_IS = frozenset({str, int, float, bool, type(None)})


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass; None for another type."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


def to_json_value(value: object) -> Any:
    """``value`` as dicts, lists, strings, numbers, booleans and None. Fields equal to their default are kept."""
    if type(value) in _AS_IS:
        return value
    if (names := _field_names(value.__class__)) is not None:
        return {name: to_json_value(getattr(value, name)) for name in names}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value)
        return {str(key): to_json_value(item) for key, item in pairs.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in cast("Sequence[object]", value)]
    if isinstance(value, frozenset | set):
        return sorted(to_json_value(item) for item in cast("frozenset[object]", value))
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")


class JsonValue:
    """Base of dataclasses that travel as plain values: between processes, in the log, in the API."""

    __slots__ = ()

    def to_json(self) -> JsonObject:
        """The canonical form as plain values."""
        return to_json_value(self)

    @classmethod
    def from_json(cls, raw: object) -> Self:
        """Inverse of ``to_json``. Raises TypeError or ValueError for another form."""
        return from_json_value(cls, raw)


def dumps(value: object) -> str:
    """Canonical text: sorted keys, no spaces, no NaN."""
    return json.dumps(to_json_value(value), sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


_PLAIN: tuple[type, ...] = (str, int, float, bool, dict, list)


@cache
def _hints(cls: type) -> dict[str, object]:
    return get_type_hints(cls)


@overload
def from_json_value(cls: type[T], raw: object) -> T:
    """A value of a class."""


@overload
def from_json_value(cls: object, raw: object) -> Any:
    """A value of any other annotation, such as a union or ``tuple[int, ...]``."""


def from_json_value(cls: object, raw: object) -> Any:
    """Build a value of type ``cls`` from what ``to_json_value`` gave.

    Unknown keys are ignored (an older reader of a newer log), missing ones take the default. Raises TypeError or
    ValueError when the form does not fit.
    """
    if isinstance(cls, NewType):
        return from_json_value(cls.__supertype__, raw)
    if isinstance(cls, str):
        raise TypeError(f"unresolved annotation {cls!r}")
    origin = get_origin(cls)
    if cls is Any:
        return raw
    if origin in (Union, types.UnionType):
        return _union(get_args(cls), raw)
    if origin is Literal:
        if raw not in get_args(cls):
            raise ValueError(f"{raw!r} is not one of {get_args(cls)}")
        return raw
    if origin in (tuple, list, frozenset, dict, Mapping):
        return _collection(cls, origin, raw)
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        return _dataclass(cls, raw)
    if isinstance(cls, type) and issubclass(cls, Enum):
        return cls(raw)
    return _plain(cls, raw)


def _plain(cls: Any, raw: object) -> object:
    if cls is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if cls in _PLAIN and isinstance(raw, cls) and isinstance(raw, bool) is (cls is bool):
        return raw
    raise TypeError(f"expected {getattr(cls, '__name__', cls)}, got {type(raw).__name__}")


def _dataclass(cls: type, raw: object) -> object:
    if not isinstance(raw, dict):
        raise TypeError(f"expected an object for {cls.__name__}, got {type(raw).__name__}")
    hints, pairs = _hints(cls), cast("dict[str, object]", raw)
    given: dict[str, object] = {}
    for field in dataclasses.fields(cls):
        if field.init and field.name in pairs:
            try:
                given[field.name] = from_json_value(hints[field.name], pairs[field.name])
            except TypeError as error:
                raise TypeError(f"{field.name}: {error}") from error
            except ValueError as error:
                raise ValueError(f"{field.name}: {error}") from error
        elif field.init and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{field.name}: missing")
    return cls(**given)


def _collection(cls: object, origin: Any, raw: object) -> object:
    args = get_args(cls)
    if not isinstance(raw, Mapping if origin in (dict, Mapping) else list | tuple):
        raise TypeError(f"expected {cls}, got {type(raw).__name__}")
    if origin in (dict, Mapping):
        pairs = cast("Mapping[str, object]", raw)
        return {from_json_key(args[0], key): from_json_value(args[1], item) for key, item in pairs.items()}
    items = cast("Sequence[object]", raw)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return tuple(from_json_value(args[0], item) for item in items)
    if origin is tuple:
        return tuple(from_json_value(arg, item) for arg, item in zip(args, items, strict=True))
    rest = [from_json_value(args[0], item) for item in items]
    return frozenset(rest) if origin is frozenset else rest


def from_json_key(cls: object, key: str) -> int | str:
    """A mapping key back from its text; integers and strings are the only kinds."""
    base = cls.__supertype__ if isinstance(cls, NewType) else cls
    return int(key) if base is int else key


def _union(args: tuple[object, ...], raw: object) -> object:
    if raw is None and type(None) in args:
        return None
    for arg in args:
        if arg is type(None):
            continue
        try:
            return from_json_value(arg, raw)
        except (TypeError, ValueError):
            continue
    raise TypeError(f"{raw!r} fits none of {args}")
