"""Many names at once: published and deleted one by one for all others, with few round trips to the registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.real.tensors.crew import Cases, Crew, stop_housekeeping

from rota.spec.errors import BadInput
from rota.tensors import errors
from rota.tensors.api.store import Plane

MANY = {f"m/{index}": np.full(100, index) for index in range(100)}
PUT = "plane.put_many({f'm/{i}': np.full(100, i) for i in range(40)})"


def trips_of(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on how many commands went with each round trip of a plane."""
    trips, client = list[int](), plane._session.machine.client
    real = client._exchange

    def exchange(commands: Sequence[Any]) -> list[Any]:
        trips.append(len(commands))
        return real(commands)

    monkeypatch.setattr(client, "_exchange", exchange)
    return trips


def test_many_names_are_published_and_deleted_with_a_round_trip_for_each_batch(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.put_many({"m/0": np.zeros(1)})
    plane.delete_many(["m/0"])  # the scripts are known from here on
    stop_housekeeping(plane)
    trips = trips_of(plane, monkeypatch)
    versions = plane.put_many(MANY, step=3)
    assert [each for each in trips if each > 1] == [64, 64, 36, 36]
    assert len(trips) <= 6, "beside a look at limbo a batch"
    assert all((each.name, each.step, each.ready) == (name, 3, True) for name, each in versions.items())
    assert all((plane.get(name, as_="numpy") == value).all() for name, value in MANY.items())
    trips.clear()
    assert plane.delete_many(MANY) == 100
    assert trips == [100]
    assert plane.ls() == []
    plane.put("w", np.zeros(3))
    trips.clear()
    plane.delete("w")
    assert trips == [1], "who published it last knows where it is"


def test_names_of_others_and_names_that_are_not_there_are_told_apart(plane: Plane, actors: Crew) -> None:
    plane.put_many(MANY)
    assert actors.run("plane.put('m/7', np.ones(3)); plane.delete('m/8'); plane.put('x', np.ones(3))") == 0
    assert plane.delete_many(["m/7", "m/8", "m/9", "x"], missing_ok=True) == 3
    with pytest.raises(errors.NotFound, match="m/8"):
        plane.delete_many(["m/8", "m/10"])
    assert {row.name for row in plane.ls()} == set(MANY) - {"m/7", "m/8", "m/9", "m/10"}
    with pytest.raises(BadInput, match="iterable of names"):
        plane.delete_many("m/1")
    with pytest.raises(BadInput, match="mapping"):
        plane.put_many([("m/1", np.ones(1))])  # type: ignore[arg-type]


def test_a_name_that_is_refused_leaves_no_name_without_memory_or_lease(plane: Plane, actors: Crew) -> None:
    plane.put("m/5", np.ones(3), epoch=4)
    with pytest.raises(errors.StaleEpoch, match="m/5"):
        plane.put_many(MANY, epoch=3)
    assert {row.name for row in plane.ls()} == {"m/5"}
    assert plane.stats()["versions"] == {"ready": 1}
    with pytest.raises(errors.UnsupportedTensor):
        plane.put_many({"a": np.ones(1), "b": np.array(["text"])})
    assert plane.delete("m/5") is None
    assert actors.run("plane.put('m/5', np.ones(3), step=9)") == 0
    plane.put_many({"m/5": np.zeros(3)})
    assert plane.info("m/5").step == 10, "one after the last, whoever published that"


@pytest.mark.parametrize("point", ["reserved:3", "allocated:3", "copied:3", "slot-zero:3", "committed", "slot-stored"])
def test_a_writer_killed_in_the_middle_of_many_leaves_whole_versions_or_none(
    plane: Plane, actors: Crew, cases: Cases, point: str
) -> None:
    for _ in cases(1, plane, 1, deep=10):
        assert actors.run(PUT, die_at=point) < 0
        plane.gc()
        found = plane.get_many(prefix="m/", as_="numpy")
        assert all((value == int(name[2:])).all() for name, value in found.items())
        assert len(found) == (40 if point in ("committed", "slot-stored") else 0)


@pytest.mark.parametrize("point", ["deleting", "deleted"])
def test_a_writer_killed_in_the_middle_of_deleting_many_leaves_no_name_in_between(
    plane: Plane, actors: Crew, cases: Cases, point: str
) -> None:
    for _ in cases(1, plane, 1, deep=10):
        code = f"{PUT}; plane.delete_many([f'm/{{i}}' for i in range(40)])"
        assert actors.run(code, die_at=point) < 0
        plane.gc()
        assert len(plane.ls()) == (40 if point == "deleting" else 0)
        assert len(plane.get_many(prefix="m/", as_="numpy")) == len(plane.ls())
        left = len(plane.ls())
        plane.recover()
        assert len(plane.ls()) == left, "a rebuilt registry says the same"
