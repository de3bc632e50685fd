"""A home of its own for the groups of these tests; afterwards neither a server nor a segment of it is left."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import rota.tensors


@pytest.fixture(scope="session")
def train_home() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    with rota.tensors.connect(home=home, keep=True):
        yield home
    rota.tensors.down(home)
    shutil.rmtree(home, ignore_errors=True)
