"""Reads without the registry: leases that are a note in the reader's own file and nothing else."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from tests.real.tensors.crew import WAITING, Cases, Crew, clean, stop_housekeeping, wait_until

from rota.spec.errors import RegistryUnavailable
from rota.tensors import errors
from rota.tensors.api.store import Plane
from rota.tensors.locks import noted_in

TWICE = "plane.get('w', as_='numpy'); plane.release('w'); plane._session.release_ended(); "
"""Afterwards the name is known and nothing of it is cached: the next get only notes its lease."""


def calls_of(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on the names of the scripts that a plane runs."""
    called, real = list[str](), plane._session.machine.run

    def run(name: str, *args: Any) -> Any:
        called.append(name)
        return real(name, *args)

    monkeypatch.setattr(plane._session.machine, "run", run)
    return called


def test_a_new_version_of_a_known_name_is_read_and_let_go_without_the_registry(
    plane: Plane, other: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.put("w", np.zeros(4), step=0)
    plane.publish_group("g", {"a": np.zeros(2), "b": np.ones(3)}, step=0)
    other.get("w", as_="numpy")
    other.get_group("g", as_="numpy")
    stop_housekeeping(other)
    other.release("w")
    other.release("g")
    other._session.release_ended()
    called = calls_of(other, monkeypatch)
    for step in range(1, 50):
        plane.put("w", np.full(4, step), step=step)
        plane.publish_group("g", {"a": np.full(2, step), "b": np.ones(3)}, step=step, meta={"n": [step]})
        assert (other.get("w", as_="numpy", min_step=step) == step).all()
        found = other.get_group("g", as_="numpy")
        assert (found["a"][0], found.step, found.meta) == (step, step, {"n": [step]})
        found.meta["n"].append(1)
        assert set(other.get_many(["w"], as_="numpy").versions.values()) == {plane.info("w").version}
        other.release("w")
        other.release("g")
        del found
        other._session.release_ended()
    assert called == []
    assert other._space.file.noted() == []
    monkeypatch.undo()
    other._session.release_ended()
    assert clean(plane)["versions"] == {"ready": 2}


def test_a_noted_version_keeps_its_bytes_whatever_is_published_and_counts_as_a_lease(
    plane: Plane, actors: Crew, cases: Cases
) -> None:
    reader_of = "v = plane.get('w', as_='numpy'); print('holding', flush=True); "
    for _ in cases(2, plane, 2, deep=10):
        plane.put("w", np.arange(5000.0))
        stays, dies = (actors.start(f"{TWICE}{reader_of}{WAITING}") for _ in range(2))
        ends = actors.start(f"{TWICE}{reader_of}signal.raise_signal(signal.SIGSTOP); assert v.sum() == 12497500.0")
        for pid in (stays, dies):
            actors.says(pid, "holding")
        actors.stopped(ends)
        old = plane.info("w")
        assert (old.refs, noted_in(plane._space.clients)[old.version]) == (3, 3)
        for value in range(100):
            plane.put("w", np.full(5000, value))
        shown = {each["version"]: each for each in plane.stat_document("w")["versions"]}
        assert (shown[old.version]["leases"], len(shown[old.version]["holders"])) == (3, 3)
        assert plane.stats()["versions"] == {"ready": 1, "doomed": 1}
        actors.kill(dies)
        plane.recover()
        assert clean(plane)["versions"] == {"ready": 1, "doomed": 1}, "after a loss of the registry, too"
        os.kill(ends, signal.SIGCONT)
        assert actors.wait(ends) == 0, actors.output(ends)
        actors.kill(stays)
        assert clean(plane)["versions"] == {"ready": 1}


def test_a_slot_that_another_name_has_by_now_is_not_read_for_the_old_name(plane: Plane, other: Plane) -> None:
    plane.put("a", np.zeros(4))
    other.get("a", as_="numpy")
    plane.delete("a")
    plane.put("b", np.ones(4))
    assert other._reader._slots["a"] == plane.info("b").slot, "the slot was used again"
    with pytest.raises(errors.NotFound):
        other.get("a", as_="numpy")
    plane.put("a", np.full(4, 2.0))
    assert other.get("a", as_="numpy")[0] == 2


def test_an_exact_version_that_a_note_alone_keeps_can_be_handed_on(plane: Plane, other: Plane) -> None:
    plane.put("w", np.zeros(4))
    other.get("w", as_="numpy")
    plane.put("w", np.ones(4))
    view = other.get("w", as_="numpy")
    version = plane.info("w").version
    plane.put("w", np.full(4, 2.0))
    with other._pin("w", "", f"h{version}") as pinned:
        assert pinned.version == version
        assert plane.get("w", version=version, as_="numpy")[0] == view[0] == 1
    del view
    other.release("w")
    wait_until(lambda: plane.stats()["versions"] == {"ready": 1})
    with pytest.raises(errors.VersionGone):
        plane.get("w", version=version)


def test_after_an_acknowledged_publish_nothing_older_is_read_while_the_registry_is_away(
    plane: Plane, other: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.put("w", np.zeros(4))
    other.get("w", as_="numpy")
    plane.put("w", np.ones(4))

    def away(*_: Any) -> Any:
        raise RegistryUnavailable("away")

    monkeypatch.setattr(other._session.machine, "run", away)
    assert other.get("w", as_="numpy")[0] == 1
    monkeypatch.undo()


def test_what_is_replaced_between_the_note_and_the_second_look_is_not_read(
    plane: Plane, other: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.put("w", np.zeros(4))
    other.get("w", as_="numpy")
    other.release("w")
    plane.put("w", np.ones(4))
    seen = list[int]()

    def between() -> None:
        monkeypatch.undo()
        seen.extend(noted_in(plane._space.clients))
        plane.put("w", np.full(4, 2.0))

    monkeypatch.setattr("rota.tensors.leases.fence", between)
    assert (other.get("w", as_="numpy") == 2).all()
    assert len(seen) == 1


def test_a_version_that_is_held_is_read_where_it_lies_also_when_half_of_a_new_place_is_seen(
    plane: Plane, other: Plane
) -> None:
    held, new = plane.put("w", np.zeros(4)), plane.put("new", np.ones(4))
    other.get("w", as_="numpy")
    stop_housekeeping(other)
    other.release("w")
    table, slots = plane._space.table, {row.name: row.slot for row in plane.ls()}
    place = table.place(slots["new"], new.id)
    assert place is not None
    table.store_place(slots["w"], held.id, f"seg-{place[3]}-{place[1]}", *place[2:])
    assert (other.get("w", as_="numpy") == 0).all()


def test_a_lease_that_a_rebuilt_registry_does_not_know_is_not_held(
    plane: Plane, other: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.put("w", np.zeros(4))
    stop_housekeeping(other)

    def rebuilt(point: str) -> None:
        if point == "leased":
            monkeypatch.undo()
            plane.recover()
            other._session.rejoin()  # as another thread of the process does

    monkeypatch.setattr("rota.tensors.reader.failpoint", rebuilt)
    with pytest.raises(errors.EpochChanged):
        other._session.reader.lease([("w", "")], sealed=False)
    assert other._space.leases.live() == []
    assert (other.get("w", as_="numpy") == 0).all()
