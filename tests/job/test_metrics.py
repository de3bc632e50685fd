"""What a loop may commit as metrics."""

from __future__ import annotations

import numpy as np
import pytest

from rota.job.instance.flow import _commit_arguments
from rota.spec.errors import BadInput


def test_metrics_become_json_numbers_whatever_made_them() -> None:
    given = {"a": np.float32(0.5), "b": np.array([3]), "c": [1, np.int64(2)], "d": {"e": "text", "f": None}}
    assert _commit_arguments(given, None, None, {}) == (
        None,
        {"a": 0.5, "b": 3, "c": [1, 2], "d": {"e": "text", "f": None}},
    )


def test_a_loss_that_is_not_finite_is_kept_as_text() -> None:
    assert _commit_arguments(None, 4, {"loss": float("nan"), "top": np.inf}, {}) == (4, {"loss": "nan", "top": "inf"})


def test_a_number_and_metrics_in_one_call() -> None:
    assert _commit_arguments(7, None, {"x": 1}, {}) == (7, {"x": 1})


@pytest.mark.parametrize("given", ["seven", True, 1.0, {"a": object()}, {"a": np.zeros(3)}])
def test_anything_else_is_refused(given: object) -> None:
    with pytest.raises(BadInput):
        _commit_arguments(given, None, None, {})
