"""Results by reference over a real registry: rows cut and joined without a byte moved, lifetime, what a loop sees."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.real.conftest import made_short_home

from rota import tensors
from rota.job.rpc import payload
from rota.job.rpc.dispatch import merge, split
from rota.job.rpc.payload import Box, Ref, opened
from rota.spec.dispatch import Concat, Shard
from rota.spec.errors import NotReachable
from rota.spec.ids import JobId
from rota.tensors.api.store import Plane

pytestmark = [pytest.mark.timeout(300)]
ROWS = np.arange(40_000, dtype=np.float64).reshape(100, 400)
MESH = (("dp", 3),)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with made_short_home() as found, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROTA_HOME", str(found))
        yield found
        tensors.connect(keep=True).close()
        tensors.down(found)


@pytest.fixture
def plane(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """The plane of a loop: this process gives back what it lets go."""
    monkeypatch.setattr(payload.HELD, "owner", True)
    found = tensors.connect(keep=True)
    yield found
    gc.collect()
    payload.HELD.give_back(found)
    assert found.ls("call/") == []


def answer(plane: Plane, value: object, name: str = "call/j/1/w/0/1") -> Any:
    """What arrives in the loop when an instance answers ``value``."""
    return pickle.loads(pickle.dumps(Box(lambda: plane, name).close(value)))


def test_a_large_array_of_an_answer_arrives_as_a_ref_and_everything_else_as_it_is(plane: Plane) -> None:
    found = answer(plane, {"rows": ROWS, "torch": torch.from_numpy(ROWS), "few": ROWS[:2], "text": "x", "list": [1]})

    assert [type(found[name]).__name__ for name in found] == ["Ref", "Ref", "ndarray", "str", "list"]
    assert np.array_equal(found["rows"], ROWS) and torch.equal(found["torch"].value(), torch.from_numpy(ROWS))
    assert len(pickle.dumps(found["rows"])) < 400, "what travels is a name"


def test_rows_go_from_one_mesh_to_another_without_a_byte_in_the_loop(plane: Plane) -> None:
    parts = split(ROWS, Shard("dp", pad="repeat"), mesh=MESH, world=3)
    made = {rank: answer(plane, part.value, f"call/j/1/w/{rank}/1") for rank, part in parts.items()}
    whole = merge(made, parts, Concat("dp"), axis="dp", mesh=MESH)
    assert isinstance(whole, Ref) and whole.shape == (100, 400), "padding is cut off again"
    again = split({"x": whole}, Shard("dp", pad="repeat"), mesh=(("dp", 7),), world=7)
    assert all(isinstance(part.value["x"], Ref) for part in again.values())
    arrays = [opened(part.value)["x"][: part.real] for part in again.values()]
    assert np.array_equal(np.concatenate(arrays), ROWS)
    assert whole[98:99]._value is None, "nobody has looked"


def test_a_value_lives_as_long_as_a_ref_to_a_part_of_it_is_held(plane: Plane) -> None:
    found = answer(plane, ROWS)
    part = found[10:20]
    del found
    gc.collect()
    payload.HELD.give_back(plane)
    assert np.array_equal(part, ROWS[10:20])
    name = part.pieces[0].name
    del part
    gc.collect()
    payload.HELD.give_back(plane)
    assert plane.ls(name) == []


def test_a_name_that_could_not_be_deleted_is_deleted_later(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer(plane, ROWS)
    name = found.pieces[0].name
    del found
    gc.collect()

    def away(*_: object, **__: object) -> None:
        raise NotReachable("the registry is away")

    with monkeypatch.context() as patch:
        patch.setattr(plane, "delete", away)
        with pytest.raises(NotReachable):
            payload.HELD.give_back(plane)
    payload.HELD.give_back(plane)
    assert plane.ls(name) == []


def test_an_argument_that_an_operation_passes_on_is_not_copied(plane: Plane) -> None:
    item = answer(plane, {"rows": ROWS, "score": 0.0})
    box = Box(lambda: plane, "call/j/1/w/1/2")
    seen = box.open(item)
    assert isinstance(seen["rows"], np.ndarray)
    passed = box.close({**seen, "score": 1.0, "double": seen["rows"] * 2})
    assert passed["rows"].pieces == item["rows"].pieces and passed["double"].pieces[0].name == "call/j/1/w/1/2/0"
    passed = pickle.loads(pickle.dumps(passed))
    assert np.array_equal(passed["double"], ROWS * 2)


def test_to_the_code_of_a_loop_a_ref_is_an_array(plane: Plane) -> None:
    found, tensor = answer(plane, ROWS), answer(plane, torch.from_numpy(ROWS), "call/j/1/w/0/2")
    assert type(found) is type(tensor) is Ref
    assert found.mean() == ROWS.mean() and np.array_equal(found - found * 0.5, ROWS / 2)
    assert np.array_equal(np.concatenate([found, ROWS]), np.concatenate([ROWS, ROWS]))
    assert np.array_equal(1.0 + found[::2], ROWS[::2] + 1) and float(found[3, 4]) == ROWS[3, 4]
    assert torch.equal(torch.cat([tensor, tensor])[:100], torch.from_numpy(ROWS)) and len(list(found)) == 100
    assert (tensor > 5).sum() == (ROWS > 5).sum() and "Ref(100x400 float64" in repr(found)


def test_the_loop_of_a_newer_epoch_gives_back_what_older_ones_held(plane: Plane) -> None:
    kept = [answer(plane, ROWS, f"{payload.prefix_of(JobId('j'), epoch, 'w/0')}/1") for epoch in (1, 2)]
    other = answer(plane, ROWS, "call/other/1/w/0/1")
    payload.sweep(plane, JobId("j"), 2)
    assert [row.name for row in plane.ls("call/")] == ["call/j/2/w/0/1/0", "call/other/1/w/0/1/0"]
    assert np.array_equal(kept[1], ROWS) and np.array_equal(other, ROWS)


def test_a_role_may_keep_its_answers_whole(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(payload.REF_BYTES_MIN, "10_000_000")
    assert isinstance(answer(plane, ROWS), np.ndarray)


def test_an_answer_that_the_plane_cannot_hold_travels_whole(plane: Plane) -> None:
    plane.limit(1 << 20)
    try:
        many = np.zeros(4 << 20)
        assert answer(plane, many) is not many and isinstance(answer(plane, many), np.ndarray)
    finally:
        plane.limit(0)
