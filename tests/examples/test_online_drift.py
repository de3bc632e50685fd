"""Online learning without Ray: the model restored from its state goes on exactly, and the source repeats itself."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "online_drift"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("river") is None, reason="river is not installed")]


@pytest.fixture
def example() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield importlib.import_module("online_drift")
    finally:
        sys.path.remove(str(EXAMPLE))
        sys.modules.pop("online_drift", None)


def test_a_restored_model_goes_on_exactly_and_two_readings_give_the_same_rows(example: Any) -> None:
    whole, first, second = example.Model(), example.Model(), example.Model()
    rows = [example.features(row) for row in itertools.islice(example.rows(), 1500)]
    for row in rows:
        whole.step(row)
    for row in rows[:700]:
        first.step(row)
    second.restore(first.state())
    for row in map(example.features, itertools.islice(example.rows(), 700, 1500)):
        second.step(row)
    assert second.right == whole.right
    kept, wanted = second.state(), whole.state()
    assert kept.pop("right").tolist() == wanted.pop("right").tolist()
    assert kept == wanted
