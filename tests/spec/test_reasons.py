"""Reasons: each is given somewhere in the code, and the closed list says of each what it means."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.banned_words import tree_of

import rota
from rota.spec.errors import RotaError
from rota.spec.reasons import INFO, Reason

SOURCE = Path(rota.__file__).parent
GROUPS = {"_one_of", "frozenset"}
"""Calls whose arguments are reasons to compare with."""


def _given(node: ast.AST) -> Iterator[str]:
    """Reasons in an expression that are not merely compared with: ``Reason.X``, or the code of an error class."""
    if isinstance(node, ast.Compare | ast.MatchValue):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GROUPS:
        return
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Reason":
        yield node.attr
    for child in ast.iter_child_nodes(node):
        yield from _given(child)


def _codes(cls: type[RotaError]) -> Iterator[str]:
    yield cls.code
    yield str(getattr(cls, "reason", ""))
    for below in cls.__subclasses__():
        yield from _codes(below)


def test_every_reason_is_given_somewhere() -> None:
    paths = [path for path in SOURCE.rglob("*.py") if path.name != "reasons.py"]
    using = [path for path in paths if "Reason." in path.read_text(encoding="utf-8")]
    given = {name for path in using for name in _given(tree_of(path))}
    assert sorted(set(Reason.__members__) - given - set(_codes(RotaError))) == []


def test_every_reason_says_what_it_means() -> None:
    assert set(INFO) == set(Reason) and all(info.text.endswith(".") for info in INFO.values())
