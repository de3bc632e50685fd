"""Puts and deletes without the registry: of names that their writer claimed."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from tests.real.tensors.crew import WAITING, Cases, Crew, clean, end, joined, stop_housekeeping, wait_until
from tests.real.tensors.test_notes import calls_of

from rota.tensors import errors, ownership
from rota.tensors.api.store import Plane
from rota.tensors.locks import noted_in
from rota.tensors.namespace import Namespace

KILLED = -signal.SIGKILL
POINTS = ("beginning", "copying", "copied", "claimed", "readied", "slot-stored", "reusing", "stocked")
PUTS = "for n in range(200): plane.put('w', np.full(512, n)); print(n, flush=True)"


def claim(plane: Plane, name: str = "w") -> None:
    """Put a name until this client puts it by itself."""
    for _ in range(40):
        plane.put(name, np.full(512, -1))
    assert plane._space.claims.has(name)


def value(plane: Plane, name: str = "w") -> int:
    """What all 512 numbers of a tensor are."""
    found = plane.get(name, as_="numpy")
    assert (found == found[0]).all()
    return int(found[0])


def test_a_name_that_is_put_again_and_again_costs_no_call(
    plane: Plane, other: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_housekeeping(plane)
    stop_housekeeping(other)
    claim(plane)
    assert value(other) == -1
    called, read = calls_of(plane, monkeypatch), calls_of(other, monkeypatch)
    for n in range(200):
        made = plane.put("w", np.full(512, n), step=2 * n + 100)
        assert value(other) == n
        assert other.get("w", as_="numpy", min_version=made.id)[0] == n
        if n % 3 == 0:
            plane.delete("w")
        other._session.release_ended()
    assert [name for name in called if name not in ("stock", "claims")] == []
    assert len(called) <= 8, "a block that a reader notes is handed in, all others are used again"
    assert read == []
    monkeypatch.undo()
    plane._space.claims.shed()  # its housekeeping would


@pytest.mark.parametrize("what", ["put", "delete", "pin", "retain", "step", "info", "ls", "version", "many", "recover"])
def test_who_needs_the_registry_finds_there_what_was_put_without_it(plane: Plane, other: Plane, what: str) -> None:
    claim(plane)
    made = plane.put("w", np.full(512, 5))
    if what == "put":
        assert other.put("w", np.full(512, 6)).step == made.step + 1
        assert (value(plane), value(other)) == (6, 6)
    elif what == "delete":
        other.delete("w")
        with pytest.raises(errors.NotFound):
            plane.get("w")
        with pytest.raises(errors.NotFound):
            plane.delete("w")
    elif what == "pin":
        with other.pin("w") as pin:
            assert pin.version == made.id
            plane.put("w", np.full(512, 7))
            assert other.get("w", version=made.id, as_="numpy")[0] == 5
    elif what == "retain":
        plane.put("w", np.full(512, 7), retain=2)
        assert other.get("w", version=plane.info("w").kept[0] if plane.info("w").kept else 0, as_="numpy")[0] == 5
    elif what == "step":
        with pytest.raises(errors.StaleStep):
            other.put("w", np.zeros(512), step=made.step - 1)
    elif what == "info":
        row = other.info("w")
        assert (row.version, row.step, row.state, row.payload) == (made.id, made.step, "ready", 4096)
    elif what == "ls":
        assert [(row.name, row.version) for row in other.ls()] == [("w", made.id)]
    elif what == "version":
        assert other.get("w", version=made.id, as_="numpy")[0] == 5
    elif what == "many":
        assert other.put_many({"w": np.full(512, 8), "x": np.full(512, 9)})["w"].step == made.step + 1
        assert (value(plane), other.delete_many(["w", "x"])) == (8, 2)
    else:
        plane.recover()
        assert value(other) == 5
        plane.put("w", np.full(512, 6))
        assert value(other) == 6
    plane.delete("w", missing_ok=True)
    other.delete("x", missing_ok=True)
    wait_until(lambda: clean(other)["versions"] == {})


def test_a_name_may_be_claimed_while_another_client_is_about_to_delete_it(
    plane: Plane, other: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.put("w", np.zeros(512))
    find, late = Namespace.find_row, iter([True])

    def found(self: Namespace, name: str) -> Any:
        row = find(self, name)
        if self is other._space and next(late, False):
            claim(plane)
        return row

    monkeypatch.setattr(Namespace, "find_row", found)
    other.delete("w")
    assert not next(late, False)
    with pytest.raises(errors.NotFound):
        plane.get("w")


@pytest.mark.parametrize("nth", [1, 45, 90])
@pytest.mark.parametrize("point", POINTS)
def test_a_claimant_killed_anywhere_leaves_its_last_put_or_the_next(
    plane: Plane, actors: Crew, cases: Cases, point: str, nth: int
) -> None:
    for _ in cases(1, plane, 1, deep=5):
        pid = actors.start(PUTS, die_at=f"{point}:{1 + nth // 40 if point in ('reusing', 'stocked') else nth}")
        status = actors.wait(pid)
        done = int((actors.output(pid).split() or ["-1"])[-1])
        assert status == KILLED or point == "stocked"
        if done >= 0 or plane.ls("w"):
            first = value(plane)
            assert first in (done, done + 1)
            if nth < 90:  # else it is deleted as it was found
                plane.recover()
                assert value(plane) in (first, done + 1)
                assert clean(plane)["versions"] == {"ready": 1}
                plane.put("w", np.full(512, 1000))
                assert value(plane) == 1000
            plane.delete("w")
        plane.recover()
        with pytest.raises(errors.NotFound):
            plane.get("w")


@pytest.mark.parametrize("point", ["deleting", "deleted"])
def test_a_name_that_its_claimant_deleted_never_comes_back(
    plane: Plane, actors: Crew, cases: Cases, point: str
) -> None:
    code = """
        for n in range(99):
            plane.put('w', np.full(512, n))
            plane.delete('w', missing_ok=True)
    """
    for round_ in cases(1, plane, 4, deep=12):
        pid = actors.start(code, die_at=f"{point}:{20 + round_}")
        assert actors.wait(pid) == KILLED
        if point == "deleted":
            for step in (plane.recover, plane.gc, plane.recover) if round_ % 2 else (plane.gc, plane.recover):
                step()
                with pytest.raises(errors.NotFound):
                    plane.get("w")
        plane.delete("w", missing_ok=True)
        assert clean(plane)["versions"] == {}


@pytest.mark.parametrize("point", ["settling", "settled"])
def test_who_settles_may_be_killed(plane: Plane, actors: Crew, cases: Cases, point: str) -> None:
    for _ in cases(1, plane, 2, deep=10):
        claim(plane)
        plane.put("w", np.full(512, 5))
        assert actors.run("plane.info('w')", die_at=point) == KILLED
        assert plane.put("w", np.full(512, 6)).step == plane.info("w").step
        assert (value(plane), clean(plane)["versions"]) == (6, {"ready": 1})


@pytest.mark.parametrize("point", ["copying", "claimed", "readied", "slot-stored"])
def test_readers_go_on_while_a_claimant_is_stopped_anywhere(
    plane: Plane, actors: Crew, cases: Cases, point: str
) -> None:
    for _ in cases(1, plane):
        pid = actors.start(PUTS, die_at=f"{point}:{9 if point == 'slot-stored' else 7}:stop")
        actors.stopped(pid)
        seen = value(plane)
        assert seen == value(plane) == plane.get("w", as_="numpy")[0]
        os.kill(pid, signal.SIGCONT)
        assert actors.wait(pid) == 0
        assert value(plane) == 199
        plane.delete("w")


def test_every_put_that_is_watched_is_an_event(plane: Plane, other: Plane) -> None:
    claim(plane)
    with other.watch("w") as watch:
        events = iter(watch)
        made = [plane.put("w", np.full(512, n)).id for n in range(20)]
        found: list[Any] = []
        while len(found) < 20:
            event = next(events)
            found += [event.version] if event.kind == "published" else []
        assert found == made


def test_a_replaced_version_can_be_handed_on_while_it_is_read(plane: Plane, other: Plane, actors: Crew) -> None:
    claim(plane)
    plane.put("w", np.full(512, 5))
    view = other.get("w", as_="numpy")
    for n in range(100):
        plane.put("w", np.full(512, 6 + n))
        if n == 3:
            ref = other.ref(view)
        elif n == 40:  # claimed again
            only_read = other.get("w", as_="numpy")
    look = f"v = plane.get('w', version={ref.version}, as_='numpy'); assert (v == 5).all()"
    pid = actors.start(f"{look}; print('ok', flush=True); {WAITING}")
    actors.says(pid, "ok")
    del view
    other._session.release_ended()
    for n in range(200):
        plane.put("w", np.full(512, n))
    assert (only_read == 46).all()
    del only_read
    assert plane.fsck()["violations"] == []
    actors.kill(pid)
    plane.delete("w")
    wait_until(lambda: clean(plane)["versions"] == {})


def test_the_late_word_of_one_who_handed_a_version_on_hides_no_other(
    plane: Plane, other: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes hand one version on; the second says so only after another version was handed on."""
    claim(plane)
    plane.put("w", np.full(512, 5))
    first = other.get("w", as_="numpy")
    version = (other.version_of(first) or ("", 0))[1]
    (block,) = other._space.leases.blocks_of(version)
    for _ in range(2):
        plane.put("w", np.full(512, 0))
    early = other._space.registry.claims(plane._space.client)
    assert other.ref(first).version == version
    for n in range(100):
        plane.put("w", np.full(512, n))
    plane.put("w", np.full(512, 6))
    second = other.get("w", as_="numpy")
    plane.put("w", np.full(512, 7))
    ref = other.ref(second)
    with monkeypatch.context() as patch:
        patch.setattr(other._space.registry, "claims", lambda _: early)
        ownership.adopt(other._space, version, block.seg, block.offset)
    with joined(plane) as third:
        held = third.get("w", version=ref.version, as_="numpy")
        del first, second
        other.release("w")
        other._session.release_ended()
        assert ref.version not in noted_in(plane._space.clients), "the registry alone knows who reads it"
        for n in range(200):
            plane.put("w", np.full(512, n))
        assert (held == 6).all()
        assert plane.fsck()["violations"] == []
        del held
        end(third)


@pytest.mark.parametrize("point", ["copied", "readied"])
def test_a_put_during_which_the_registry_is_rebuilt_is_published_and_leaves_nothing(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    stop_housekeeping(plane)
    claim(plane)
    points = iter([point])

    def rebuild(name: str) -> None:
        if name == point and next(points, ""):
            plane.recover()

    with monkeypatch.context() as patch:
        patch.setattr(ownership, "failpoint", rebuild)
        plane.put("w", np.full(512, 5))
    assert next(points, "") == "" and value(plane) == 5
    plane._space.claims.settle_idle()
    assert plane.stats()["versions"] == {"ready": 1}


def test_an_idle_claimant_gives_its_blocks_back(plane: Plane) -> None:
    claim(plane)
    wait_until(lambda: not plane._space.claims.has("w"), 10)
    wait_until(lambda: "s" not in {v["st"] for k, v in plane._space.registry.dump().items() if k.startswith("v:")}, 10)
    assert plane.info("w").step == 39
