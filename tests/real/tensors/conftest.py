"""A namespace of its own for each test, and processes that can be killed at a named point."""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.real.tensors.crew import Actors, Cases, Crew, end, joined

import rota.tensors
from rota.tensors.api.store import Plane


@pytest.fixture(scope="session")
def tensor_home() -> Iterator[Path]:
    """A home with its own registry server and its own shared memory; afterwards nothing of either is left."""
    home = Path(tempfile.mkdtemp(prefix="rt"))
    shm = Path(tempfile.mkdtemp(prefix="rt", dir="/dev/shm"))
    before = {name: os.environ.get(name) for name in ("ROTA_SHM_DIR", "ROTA_REDIS_URL", "ROTA_HOME")}
    os.environ |= {"ROTA_SHM_DIR": str(shm), "ROTA_HOME": str(home)}
    os.environ.pop("ROTA_REDIS_URL", None)
    yield home
    rota.tensors.down(home)
    left = list(shm.rglob("seg-*")) if shm.exists() else []
    for name, value in before.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    shutil.rmtree(shm, ignore_errors=True)
    shutil.rmtree(home, ignore_errors=True)
    assert not left


@pytest.fixture(scope="session")
def zygote(tensor_home: Path) -> Iterator[Actors]:
    folder = Path(tempfile.mkdtemp(prefix="rt"))
    actors = Actors(folder, dict(os.environ))
    yield actors
    actors.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def space_name(request: pytest.FixtureRequest) -> str:
    """A namespace no other test uses."""
    return f"t{zlib.crc32(request.node.nodeid.encode())}"


@pytest.fixture
def plane(tensor_home: Path, space_name: str) -> Iterator[Plane]:
    """A plane of this process; at the end every invariant holds and nothing is left but what the test still holds."""
    with rota.tensors.connect(home=tensor_home, namespace=space_name, keep=True) as made:
        yield made
        end(made)


@pytest.fixture
def other(plane: Plane) -> Iterator[Plane]:
    """A second client of the namespace, in this process."""
    with joined(plane) as made:
        yield made
        end(made)


@pytest.fixture
def actors(zygote: Actors, plane: Plane) -> Iterator[Crew]:
    """Run code in processes of this test's namespace: see ``Crew``."""
    crew = Crew(zygote, plane.home, plane.namespace)
    yield crew
    crew.end()


@pytest.fixture
def cases(record_property: Callable[[str, object], None]) -> Cases:
    """Count the fault cases of this test: see ``Cases``."""
    return Cases(record_property)
