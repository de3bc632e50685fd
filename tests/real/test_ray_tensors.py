"""Ray objects that carry tensors through the plane: mapped by who reads them, given back with the last reference."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rota.tensors
from rota.tensors.api.store import Plane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ELEMENTS = 1 << 20


def wait_until(what: Callable[[], Any], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.02)


@pytest.fixture
def plane(engine, engine_home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """The plane of a home of its own, in this process and, by ``runtime_env``, in the actors."""
    monkeypatch.setenv("ROTA_HOME", str(engine_home))
    monkeypatch.delenv("ROTA_SHM_DIR", raising=False)
    from rota.tensors.ray_adapter import register

    made = register()
    yield made
    made.close()
    rota.tensors.down(engine_home)


def test_a_tensor_goes_from_actor_to_actor_and_driver_without_the_object_store_and_leaves_nothing(plane: Plane) -> None:
    import torch

    ray: Any = importlib.import_module("ray")

    class Actor:
        @ray.method(tensor_transport="rota")
        def make(self, value: float) -> torch.Tensor:
            return torch.full((ELEMENTS,), value)

        def total(self, tensor: torch.Tensor) -> float:
            return float(tensor.sum())

        def pid(self) -> int:
            return os.getpid()

    where = {"ROTA_HOME": str(plane.home), "ROTA_SHM_DIR": ""}  # the engine may have begun under another test's
    remote: Any = ray.remote(enable_tensor_transport=True, num_cpus=0.01, runtime_env={"env_vars": where})(Actor)
    maker, reader = remote.remote(), remote.remote()
    ref = maker.make.remote(2.0)
    assert ray.get(reader.total.remote(ref)) == 2.0 * ELEMENTS
    view = ray.get(ref)
    assert plane.version_of(view) is not None, "the driver maps what the actor published"
    assert [row.name for row in plane.ls("ray/")] == [f"ray/{ref.hex()}"]
    del ref
    gc.collect()
    wait_until(lambda: not plane.ls("ray/"))
    assert float(view[-1]) == 2.0  # the bytes stay with their last view
    own = ray.put(torch.ones(ELEMENTS), _tensor_transport="rota")
    assert ray.get(reader.total.remote(own)) == ELEMENTS
    del own, view
    gc.collect()
    wait_until(lambda: plane.stats()["versions"] == {})
    lost = maker.make.remote(3.0)
    assert ray.get(reader.total.remote(lost)) == 3.0 * ELEMENTS
    kept = ray.get(lost)
    os.kill(ray.get(maker.pid.remote()), 9)
    wait_until(lambda: not plane.ls("ray/"))  # the maker's death ends its objects, as Ray sees it too
    assert float(kept.sum()) == 3.0 * ELEMENTS
    del kept
    gc.collect()
    wait_until(lambda: plane.stats()["versions"] == {})
    assert plane.fsck()["violations"] == []
    for actor in (maker, reader):
        ray.kill(actor)
