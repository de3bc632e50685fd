"""Any process may be killed at any point: counts stay exact, nothing leaks, a version is seen whole or not at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tests.real.tensors.crew import DEEP, Crew, clean, repeats, wait_until

from rota.tensors import errors
from rota.tensors.plane import Plane

BEFORE_COMMIT = ("joining", "joined", "reserved", "allocated", "copying", "copied", "slot-zero")
AFTER_COMMIT = ("committed", "slot-stored")
KILLED = -signal.SIGKILL


def numbers(plane: Plane, name: str = "w") -> list[float]:
    return plane.get(name, as_="numpy").tolist()


@pytest.mark.parametrize("round_", repeats(1, 30))
@pytest.mark.parametrize("point", BEFORE_COMMIT)
def test_a_writer_killed_before_its_commit_leaves_the_old_version_and_no_byte(
    plane: Plane, actors: Crew, point: str, round_: int
) -> None:
    plane.put("w", np.arange(4.0))
    assert actors.run("plane.put('w', np.ones(100_000))", die_at=point) == KILLED
    stats = clean(plane)
    assert numbers(plane) == [0.0, 1.0, 2.0, 3.0]
    assert stats["versions"] == {"ready": 1}
    assert stats["names"] == 1
    assert stats["clients"] == 1
    plane.put("w", np.full(4, 7.0))  # the lock of the name is free, and its slot works again
    assert numbers(plane) == [7.0] * 4


def test_a_file_whose_memory_its_killed_writer_did_not_make_is_used_or_goes(plane: Plane, actors: Crew) -> None:
    for put in ("plane.put('w', np.ones(100_000))", "plane.put('w', np.ones(3_000_000))"):  # in a slab, and alone
        assert actors.run(put, die_at="opened") == KILLED
        plane._session.sweep()
        assert [size for _, size in plane._space.segments.files() if not size] == [0]
        assert plane.fsck()["violations"] == []
        assert actors.run(put) == 0
        assert plane.fsck()["violations"] == []
        plane.delete("w")
        plane.gc()
        assert actors.run(put, die_at="opened") == KILLED
        plane.recover()
        assert actors.run(put) == 0
        assert plane.fsck()["violations"] == []
        plane.delete("w")
        assert clean(plane)["file_bytes"] == 0


@pytest.mark.parametrize("round_", repeats(1, 30))
@pytest.mark.parametrize("point", AFTER_COMMIT)
def test_a_writer_killed_after_its_commit_has_published(plane: Plane, actors: Crew, point: str, round_: int) -> None:
    plane.put("w", np.arange(4.0))
    assert numbers(plane)[1] == 1.0
    assert actors.run("plane.put('w', np.ones(4))", die_at=point) == KILLED
    assert numbers(plane) == [1.0] * 4  # before any sweep: a slot left at 0 means ask the registry
    stats = clean(plane)
    row = plane.info("w")
    assert plane._space.table.current(row.slot) == row.version
    assert (stats["versions"], stats["clients"]) == ({"ready": 1}, 1)


@pytest.mark.parametrize("round_", repeats(1, 30))
@pytest.mark.parametrize("point", ["leased", "mapped", "releasing", "released"])
def test_a_reader_killed_anywhere_takes_its_leases_along(plane: Plane, actors: Crew, point: str, round_: int) -> None:
    plane.put("w", np.arange(4.0))
    code = """
        view = plane.get('w', as_='numpy')
        del view
        plane.release('w')
        plane._session.release_ended()
        while True: os.sched_yield()
    """
    assert actors.run(code, die_at=point) == KILLED
    plane.put("w", np.ones(4))
    stats = clean(plane)
    assert (stats["leases"], stats["versions"]) == (0, {"ready": 1})


def test_a_sweeper_killed_in_mid_sweep_is_swept_with_the_rest(plane: Plane, actors: Crew) -> None:
    plane.put("w", np.arange(4.0))
    victim = actors.start("v = plane.get('w', as_='numpy'); print('holding', flush=True); os.read(os.pipe()[0], 1)")
    actors.says(victim, "holding")
    plane._session._gone.set()  # this process does not sweep, so that the next one must
    plane._session._thread.join()
    sweeper = actors.start("os.read(os.pipe()[0], 1)", die_at="mid-sweep")
    actors.kill(victim)
    assert actors.wait(sweeper) == KILLED
    plane.put("w", np.ones(4))
    stats = clean(plane)
    assert (stats["leases"], stats["clients"], stats["versions"]) == (0, 1, {"ready": 1})
    plane._session._gone.clear()


def test_a_stopped_reader_keeps_its_bytes_through_many_publishes(plane: Plane, actors: Crew) -> None:
    plane.put("w", np.zeros(5000))
    code = """
        view = plane.get('w', as_='numpy')
        print('holding', flush=True)
        os.kill(os.getpid(), 19)
        assert (view == 0).all(), view
    """
    reader = actors.start(code)
    actors.says(reader, "holding")
    wait_until(lambda: "T (stopped)" in Path(f"/proc/{reader}/status").read_text())
    for value in range(1, 101):
        plane.put("w", np.full(5000, float(value)))
    assert plane.gc()["swept"] == 0
    assert plane.stats()["versions"]["doomed"] == 1
    os.kill(reader, signal.SIGCONT)
    assert actors.wait(reader) == 0, actors.output(reader)
    assert clean(plane)["versions"] == {"ready": 1}


def test_a_thousand_leases_of_a_dead_process_are_swept(plane: Plane, actors: Crew) -> None:
    count = 1000 if DEEP else 150
    for index in range(count):
        plane.put(f"x/{index}", np.array([index]))
    code = "s = plane.get_many(prefix='x/', as_='numpy'); print(len(s), flush=True); os.read(os.pipe()[0], 1)"
    reader = actors.start(code)
    actors.says(reader, str(count))
    assert plane.stats()["leases"] == count
    actors.kill(reader)
    wait_until(lambda: plane.stats()["leases"] == 0, 5.0)  # by the background sweep, nobody asked for it
    assert clean(plane)["clients"] == 1


def test_an_orphan_that_is_to_be_dropped_goes_with_its_owner_and_its_bytes_with_the_last_reader(
    plane: Plane, actors: Crew
) -> None:
    writer = actors.start(
        "plane.put('w', np.arange(3), orphan='drop'); print('put', flush=True); os.read(os.pipe()[0], 1)"
    )
    actors.says(writer, "put")
    view = plane.get("w", as_="numpy")
    actors.kill(writer)
    wait_until(lambda: not plane.ls())
    with pytest.raises(errors.NotFound):
        plane.get("w")
    assert view.tolist() == [0, 1, 2]
    assert plane.stats()["versions"] == {"doomed": 1}
    del view
    wait_until(lambda: plane.stats()["versions"] == {})


def test_two_planes_of_dead_and_living_agree_after_a_storm_of_kills(plane: Plane, actors: Crew) -> None:
    code = """
        i = 0
        while True:
            try:
                plane.put('w', np.full(3000, float(i)), step=None)
            except Exception as e:
                if type(e).__name__ not in ('LostRace', 'PublishBlocked'): raise
            v = plane.get('w', as_='numpy')
            assert (v == v[0]).all()
            i += 1
            if i == 3: print('busy', flush=True)
    """
    for _ in repeats(2, 20):
        pids = [actors.start(code) for _ in range(3)]
        for pid in pids:
            actors.says(pid, "busy")
        for pid in pids:
            actors.kill(pid)
    stats = clean(plane)
    assert stats["leases"] == 0
    assert stats["versions"] == {"ready": 1}
    view = plane.get("w", as_="numpy")
    assert (view == view[0]).all()
