"""Two machines on this computer, how often to stop a job; tests of this folder are skipped where none can be made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.machines.bed import Machine, bed, missing

STOPS = 2 if os.environ.get("ROTA_DEEP") else 1
"""How often a job is stopped in each way, without ``--stops``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--stops N``: how often a job is stopped in each way."""
    parser.addoption("--stops", type=int, help="stops of each kind that a job of tests/machines is given")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever lies in this folder starts processes and needs what ``missing`` names."""
    mine = [item for item in items if Path(item.path).is_relative_to(Path(__file__).parent)]
    why = missing() if mine else ""
    for item in mine:
        item.add_marker(pytest.mark.real)
        if why:
            item.add_marker(pytest.mark.skip(reason=f"machines on one computer: {why}"))


@pytest.fixture
def two() -> Iterator[list[Machine]]:
    """Two machines that are on, with an empty ``/tmp`` each."""
    with bed(2) as made:
        yield made


@pytest.fixture
def stops(request: pytest.FixtureRequest) -> int:
    """How often a job is stopped in each way."""
    return int(request.config.getoption("--stops", None) or STOPS)
