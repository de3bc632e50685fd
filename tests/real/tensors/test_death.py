"""Any process may be killed at any point: counts stay exact, nothing leaks, a version is seen whole or not at all."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from tests.real.tensors.crew import DEEP, HOLDING, WAITING, Cases, Crew, clean, stop_housekeeping, wait_until

from rota.tensors import errors
from rota.tensors.api.store import Plane

BEFORE_COMMIT = ("joining", "joined", "reserved", "allocated", "copying", "copied", "slot-zero", "prepared")
AFTER_COMMIT = ("committed", "slot-stored")
KILLED = -signal.SIGKILL


def numbers(plane: Plane, name: str = "w") -> list[float]:
    return plane.get(name, as_="numpy").tolist()


@pytest.mark.parametrize("point", BEFORE_COMMIT)
def test_a_writer_killed_before_its_commit_leaves_the_old_version_and_no_byte(
    plane: Plane, actors: Crew, cases: Cases, point: str
) -> None:
    for round_ in cases(1, plane, 5, deep=30):
        plane.put("w", np.arange(4.0))
        size = (4, 100_000, 3_000_000)[round_ % 3]  # in a block used before, in another slab, in a file of its own
        assert actors.run(f"plane.put('w', np.ones({size}, np.uint8))", die_at=point) == KILLED
        stats = clean(plane)
        assert numbers(plane) == [0.0, 1.0, 2.0, 3.0]
        assert (stats["names"], stats["versions"], stats["clients"]) == (1, {"ready": 1}, 1)
        plane.put("w", np.full(4, 7.0))  # the lock of the name is free, and its slot works again
        assert numbers(plane) == [7.0] * 4


def test_a_writer_killed_while_its_threads_copy_leaves_the_old_version(
    plane: Plane, actors: Crew, cases: Cases
) -> None:
    size, several = 16 << 20, {"ROTA_TENSORS_COPY_THREADS": "3"}
    for round_ in cases(1, plane, 2, deep=15):
        plane.put("w", np.zeros(size, np.uint8))
        plane.put("free", np.full(size, 7, np.uint8))
        plane.delete("free")  # its memory is used again, through a mapping
        put = f"plane.put('w', np.ones({size}, np.uint8))"
        assert actors.run(put, die_at=f"piece:{1 + 5 * round_ % 8}", env=several) == KILLED
        assert not plane.get("w", as_="numpy").any()
        assert clean(plane)["versions"] == {"ready": 1}
        assert actors.run(put, env=several) == 0
        assert plane.get("w", as_="numpy").all()


@pytest.mark.parametrize("size", [100_000, 3_000_000])  # in a slab, and alone
def test_a_file_whose_memory_its_killed_writer_did_not_make_is_used_or_goes(
    plane: Plane, actors: Crew, cases: Cases, size: int
) -> None:
    put = f"plane.put('w', np.ones({size}))"
    for _ in cases(1, plane, 2, deep=15):
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


@pytest.mark.parametrize("point", AFTER_COMMIT)
def test_a_writer_killed_after_its_commit_has_published(plane: Plane, actors: Crew, cases: Cases, point: str) -> None:
    for _ in cases(1, plane, 5, deep=30):
        plane.put("w", np.arange(4.0))
        assert numbers(plane)[1] == 1.0
        assert actors.run("plane.put('w', np.ones(4))", die_at=point) == KILLED
        assert numbers(plane) == [1.0] * 4  # before any sweep: a slot left at 0 means ask the registry
        stats = clean(plane)
        row = plane.info("w")
        assert plane._space.table.current(row.slot) == row.version
        assert (stats["versions"], stats["clients"]) == ({"ready": 1}, 1)


@pytest.mark.parametrize("point", [*BEFORE_COMMIT[2:], *AFTER_COMMIT])
def test_a_writer_of_a_step_killed_anywhere_shows_the_whole_step_or_the_one_before(
    plane: Plane, actors: Crew, cases: Cases, point: str
) -> None:
    code = "plane.publish_group('g', {k: np.full(3000, 2.0) for k in 'abc'}, step=2)"
    for _ in cases(1, plane, 2, deep=10):
        plane.publish_group("g", {key: np.full(3000, 1.0) for key in "abc"}, step=1)
        assert actors.run(code, die_at=point) == KILLED
        found = plane.get_group("g", as_="numpy")
        assert found.step == (2 if point in AFTER_COMMIT else 1)
        assert all((found[key] == found.step).all() for key in "abc")
        assert clean(plane)["versions"] == {"ready": 1}


@pytest.mark.parametrize("point", ["leased", "mapped", "releasing", "released", "noted", "mapped:2", "releasing:2"])
def test_a_reader_killed_anywhere_takes_its_leases_along(plane: Plane, actors: Crew, cases: Cases, point: str) -> None:
    """The first get asks the registry, the second one only notes its lease."""
    code = """
        for _ in range(2):
            view = plane.get('w', as_='numpy')
            del view
            plane.release('w')
            plane._session.release_ended()
        while True: os.sched_yield()
    """
    for _ in cases(2, plane, 6, deep=30):
        plane.put("w", np.arange(4.0))
        assert actors.run(code, die_at=point) == KILLED
        plane.put("w", np.ones(4))
        stats = clean(plane)
        assert (stats["leases"], stats["versions"]) == (0, {"ready": 1})


def test_a_reader_killed_while_it_looks_gives_the_old_bytes_back(plane: Plane, actors: Crew, cases: Cases) -> None:
    for _ in cases(2, plane, 6, deep=30):
        plane.put("w", np.arange(4.0))
        reader = actors.start(HOLDING)
        actors.says(reader, "holding")
        plane.put("w", np.ones(4))
        assert plane.stats()["versions"] == {"ready": 1, "doomed": 1}
        actors.kill(reader)
        assert clean(plane)["versions"] == {"ready": 1}


@pytest.mark.parametrize("point", ["asked", "leased"])
def test_a_reader_whose_reply_never_came_may_be_killed(plane: Plane, actors: Crew, cases: Cases, point: str) -> None:
    """The question is on its way, or answered and the answer not read."""
    code = f"""
        from rota.runtime.redis import client as redis_client
        real = redis_client._Connection.exchange
        def exchange(self, commands):
            if any(command[1] == GET for command in commands if command[0] == 'EVALSHA'):
                {"pass" if point == "asked" else "real(self, commands)"}
                os.kill(os.getpid(), 9)
            return real(self, commands)
        from rota.tensors.registry import SCRIPTS
        GET = SCRIPTS['get'].sha
        redis_client._Connection.exchange = exchange
        plane.get('w', as_='numpy')
    """
    for _ in cases(2, plane, 5, deep=30):
        plane.put("w", np.arange(4.0))
        assert actors.run(code) == KILLED
        plane.put("w", np.ones(4))
        assert clean(plane)["versions"] == {"ready": 1}


def test_a_sweeper_killed_in_mid_sweep_is_swept_with_the_rest(plane: Plane, actors: Crew, cases: Cases) -> None:
    stop_housekeeping(plane)  # this process does not sweep before it is told to, so that the other one must
    for _ in cases(3, plane, 8, deep=30):
        plane.put("w", np.arange(4.0))
        victim = actors.start(HOLDING)
        actors.says(victim, "holding")
        actors.kill(victim)
        assert actors.run("plane._session.sweep()", die_at="mid-sweep") == KILLED
        plane.put("w", np.ones(4))
        stats = clean(plane)
        assert (stats["leases"], stats["clients"], stats["versions"]) == (0, 1, {"ready": 1})


def test_two_sweepers_at_once_undo_a_dead_client_once(plane: Plane, actors: Crew, cases: Cases) -> None:
    stop_housekeeping(plane)
    code = "s = plane.get_many(prefix='x/', as_='numpy'); print('holding', flush=True); "
    others = [actors.start(f"print('up', flush=True); {WAITING}") for _ in range(2)]  # they sweep in the background
    for pid in others:
        actors.says(pid, "up")
    for round_ in cases(3, plane, 6, deep=30):
        for index in range(20):
            plane.put(f"x/{index}", np.zeros(4))
        victim = actors.start(code + WAITING)
        actors.says(victim, "holding")
        actors.kill(victim)
        swept = [plane._session.sweep() for _ in range(1 + round_ % 3)]
        wait_until(lambda: plane.stats()["leases"] == 0)
        assert sum(len(each) for each in swept) <= 1
        wait_until(lambda: plane.stats()["clients"] == 3)
        assert plane.fsck()["violations"] == []
    for pid in others:
        actors.kill(pid)


def test_a_thousand_leases_of_a_dead_process_are_swept(plane: Plane, actors: Crew, cases: Cases) -> None:
    count = 1000 if DEEP else 150
    code = f"s = plane.get_many(prefix='x/', as_='numpy'); print(len(s), flush=True); {WAITING}"
    for _ in cases(2, plane):
        for index in range(count):
            plane.put(f"x/{index}", np.array([index]))
        reader = actors.start(code)
        actors.says(reader, str(count))
        assert plane.stats()["leases"] == count
        actors.kill(reader)
        wait_until(lambda: plane.stats()["leases"] == 0, 1.0 if DEEP else 5.0)  # by the background sweep, nobody asked
        assert clean(plane)["clients"] == 1


def test_an_orphan_that_is_to_be_dropped_goes_with_its_owner_and_its_bytes_with_the_last_reader(
    plane: Plane, actors: Crew, cases: Cases
) -> None:
    code = f"plane.put('w', np.arange(3), orphan='drop'); print('put', flush=True); {WAITING}"
    for _ in cases(1, plane, 3, deep=10):
        writer = actors.start(code)
        actors.says(writer, "put")
        view = plane.get("w", as_="numpy")
        actors.kill(writer)
        wait_until(lambda: plane._session.sweep() or not plane.ls())
        with pytest.raises(errors.NotFound):
            plane.get("w")
        assert view.tolist() == [0, 1, 2]
        assert plane.stats()["versions"] == {"doomed": 1}
        del view
        wait_until(lambda: plane.stats()["versions"] == {})


def test_two_planes_of_dead_and_living_agree_after_a_storm_of_kills(plane: Plane, actors: Crew, cases: Cases) -> None:
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
    for _ in cases(1, plane, 2, deep=20):
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
        del view
