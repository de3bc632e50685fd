"""Models of other libraries train under a plan like one process, or are refused: two real processes over Gloo.

``ROTA_DEEP=1`` runs every cell of the table in ``docs/reference/models.md``.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from rota.spec.errors import BadInput
from tests.train import zoo
from tests.train.test_plans_real import free_ports

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


def _rank(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    found: list[object] = []
    for name, strategy in CELLS:
        try:
            found.append([zoo.losses_under(name, strategy), zoo.reference(name)])
        except BadInput as refusal:
            found.append(str(refusal))
    if rank == 0:
        Path(folder, "cells.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], object]:
    """What each cell gave: its losses and those of one process, or a refusal."""
    folder = tmp_path_factory.mktemp("zoo")
    spawn(_rank, args=(str(folder), next(free_ports())), nprocs=2)
    return dict(zip(CELLS, json.loads((folder / "cells.json").read_text()), strict=True))


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
