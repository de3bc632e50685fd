"""What the codec reads and refuses, form by form, with the place of a mistake in its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NewType

import pytest

from rota.spec import codec

Number = NewType("Number", int)
Word = NewType("Word", str)


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    n: int
    rate: float = 1.5


@dataclass(frozen=True)
class Outer:
    inner: Inner
    colour: Colour = Colour.RED
    counted: int = field(default=0, init=False)


@pytest.mark.parametrize(
    ("value", "raw"),
    (
        (frozenset({"b", "a"}), ["a", "b"]),
        ({3, 1}, [1, 3]),
        ((1, [2.5, None]), [1, [2.5, None]]),
        ({1: Colour.RED}, {"1": "red"}),
        (Inner(n=1), {"n": 1, "rate": 1.5}),
        (True, True),
    ),
)
def test_a_value_has_one_json_form(value: Any, raw: Any) -> None:
    assert codec.to_json_value(value) == raw


@pytest.mark.parametrize("value", (object(), Inner, b"bytes"))
def test_what_has_no_json_form_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=f"{type(value).__name__} has no JSON form"):
        codec.to_json_value(value)


def test_texts_are_canonical_and_hold_no_number_that_is_none() -> None:
    assert codec.dumps({"b": "ü", "a": [1, 2]}) == '{"a":[1,2],"b":"ü"}'
    with pytest.raises(ValueError):
        codec.dumps(float("nan"))


@pytest.mark.parametrize(
    ("cls", "raw", "value"),
    (
        (Number, 3, 3),
        (Any, {"any": [1]}, {"any": [1]}),
        (Literal["a", "b"], "b", "b"),
        (int | None, None, None),
        (int | str, "x", "x"),
        (str | None, "x", "x"),
        (list[int], [1, 2], [1, 2]),
        (frozenset[int], [2, 1], frozenset({1, 2})),
        (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
        (tuple[int, str], [1, "a"], (1, "a")),
        (tuple[int, int], (1, 2), (1, 2)),
        (dict[Number, str], {"7": "x"}, {7: "x"}),
        (dict[Word, int], {"7": 1}, {"7": 1}),
        (Mapping[int, float], {"7": 2}, {7: 2.0}),
        (Colour, "red", Colour.RED),
        (Outer, {"inner": {"n": 1, "later": 2}, "counted": 9}, Outer(inner=Inner(n=1))),
        (dict, {"a": 1}, {"a": 1}),
    ),
)
def test_a_form_gives_its_value(cls: Any, raw: Any, value: Any) -> None:
    found = codec.from_json_value(cls, raw)
    assert (found, type(found)) == (value, type(value))


def test_a_whole_number_is_read_where_a_float_is_expected() -> None:
    found = codec.from_json_value(float, 2)
    assert (found, type(found)) == (2.0, float)


@pytest.mark.parametrize(
    ("cls", "raw", "error", "text"),
    (
        ("Inner", {}, TypeError, "unresolved annotation 'Inner'"),
        (Literal["a", "b"], "c", ValueError, "'c' is not one of"),
        (int, True, TypeError, "expected int, got bool"),
        (bool, 1, TypeError, "expected bool, got int"),
        (float, True, TypeError, "expected float, got bool"),
        (int, 1.5, TypeError, "expected int, got float"),
        (str, 1, TypeError, "expected str, got int"),
        (Inner, [1], TypeError, "expected an object for Inner, got list"),
        (Inner, {}, ValueError, "n: missing"),
        (Outer, {"inner": {"n": "x"}}, TypeError, "inner: n: expected int, got str"),
        (Outer, {"inner": {"n": 1}, "colour": "blue"}, ValueError, "colour: 'blue' is not a valid"),
        (list[int], {"a": 1}, TypeError, "got dict"),
        (dict[str, int], [1], TypeError, "got list"),
        (tuple[int, str], [1], ValueError, "zip"),
        (int | list[int], "x", TypeError, "'x' fits none of"),
        (int | None, "x", TypeError, "'x' fits none of"),
        (int | str, None, TypeError, "None fits none of"),
    ),
)
def test_another_form_is_refused_with_its_place(cls: Any, raw: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        codec.from_json_value(cls, raw)
