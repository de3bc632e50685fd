"""Models of other libraries train under a plan like one process, or are refused: two real processes over Gloo.

``ROTA_DEEP=1`` runs every cell of the table in ``docs/reference/models.md``.
"""

from __future__ import annotations

import os
import re

import pytest

from rota.spec.errors import BadInput
from tests.real.train.ranks import LONG_S, run_ranks
from tests.train import zoo

QUICK = (
    ("other names", "tp"),
    ("other names", "cp"),
    ("Qwen3", "tp"),
    ("GPT-2, tied", "pp"),
    ("Mixtral", "ep"),
    ("T5, two stacks", "pp"),
)
ALL = tuple((name, strategy) for name in zoo.MODELS for strategy in zoo.PLANS)
CELLS = ALL if os.environ.get("ROTA_DEEP") else QUICK


def _rank(_rank: int, _size: int) -> list[object]:
    found: list[object] = []
    for name, strategy in CELLS:
        try:
            found.append([zoo.losses_under(name, strategy), zoo.reference(name)])
        except BadInput as refusal:
            found.append(str(refusal))
    return found


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], object]:
    """What each cell gave: its losses and those of one process, or a refusal."""
    first, _ = run_ranks(_rank, 2, home=tmp_path_factory.mktemp("zoo"), limit_s=LONG_S)
    return dict(zip(CELLS, first, strict=True))


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", CELLS, ids=" under ".join)
def test_a_model_of_another_library_trains_like_one_process_or_is_refused(
    cell: tuple[str, str], cells: dict[tuple[str, str], object]
) -> None:
    found = cells[cell]
    if cell in zoo.REFUSED:
        assert isinstance(found, str) and re.search(zoo.REFUSED[cell], found), found
        return
    assert isinstance(found, list), found
    losses, expected = found
    assert losses == pytest.approx(expected, abs=1e-5)
    assert expected[-1] != expected[0]
