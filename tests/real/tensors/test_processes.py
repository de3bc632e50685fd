"""Stopped processes, forks, and what a pid does not say: fault groups 6 to 8 of docs/explanation/tensor-faults.md."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.real.tensors.crew import HOLDING, WAITING, Cases, Crew, clean, stop_housekeeping, wait_until

import rota.tensors
from rota.tensors import errors
from rota.tensors.api.store import Plane
from rota.tensors.locks import clients_in

# 6: stopped processes; 8: what a pid does not say

STOPPED = ("joined", "reserved", "allocated", "copying", "copied", "slot-zero", "prepared", "committed", "slot-stored")


@pytest.mark.parametrize("point", STOPPED)
def test_a_writer_stopped_anywhere_is_alive_and_goes_on_later(
    plane: Plane, actors: Crew, cases: Cases, point: str
) -> None:
    for _ in cases(6, plane, 2, deep=10):
        plane.put("w", np.zeros(4))
        plane.put("other", np.zeros(4))
        stopped = actors.stopped(actors.start("plane.put('w', np.ones(4))", die_at=f"{point}:1:stop"))
        assert plane.gc()["swept"] == 0
        assert plane.stats()["clients"] == 2
        plane.put("other", np.ones(4))  # nobody but the publishers of this name waits for it
        assert plane.get("w", as_="numpy")[0] == (point in ("committed", "slot-stored"))
        os.kill(stopped, signal.SIGCONT)
        assert actors.wait(stopped) == 0, actors.output(stopped)
        assert plane.get("w", as_="numpy")[0] == 1
        assert clean(plane)["versions"] == {"ready": 2}


def test_a_rebuilt_registry_gives_no_block_away_whose_header_is_about_to_be_written(
    plane: Plane, actors: Crew, cases: Cases
) -> None:
    for _ in cases(6, plane, 2, deep=10):
        code = "plane.put('w', np.ones(200_000))"
        stopped = actors.stopped(actors.start(code, die_at="beginning:1:stop"))
        plane._session.machine.client.call("DEL", f"{plane._session.machine.prefix}cfg")
        with pytest.raises(errors.PublishBlocked, match=f"process {stopped} is beginning"):
            plane.put("other", np.zeros(200_000))
        os.kill(stopped, signal.SIGCONT)
        assert actors.wait(stopped) == 0, actors.output(stopped)
        plane.put("other", np.zeros(200_000))
        assert plane.get("w", as_="numpy")[0] == 1
        assert plane.get("other", as_="numpy")[0] == 0
        assert clean(plane)["versions"] == {"ready": 2}


@pytest.mark.parametrize("point", ["leased", "mapped", "releasing", "released"])
def test_a_reader_stopped_anywhere_keeps_what_it_leased(plane: Plane, actors: Crew, cases: Cases, point: str) -> None:
    code = """
        view = plane.get('w', as_='numpy')
        assert (view == 0).all()
        del view
        plane.release('w')
        plane._session.release_ended()
    """
    for _ in cases(6, plane, 2, deep=10):
        plane.put("w", np.zeros(5000))
        reader = actors.stopped(actors.start(code, die_at=f"{point}:1:stop"))
        for value in range(1, 5):
            plane.put("w", np.full(5000, float(value)))
        assert plane.gc()["swept"] == 0
        assert plane.stats()["versions"].get("doomed", 0) == (point != "released")
        os.kill(reader, signal.SIGCONT)
        assert actors.wait(reader) == 0, actors.output(reader)
        assert clean(plane)["versions"] == {"ready": 1}


def test_a_stopped_reader_keeps_its_bytes_through_many_publishes(plane: Plane, actors: Crew, cases: Cases) -> None:
    code = """
        view = plane.get('w', as_='numpy')
        signal.raise_signal(signal.SIGSTOP)
        assert (view == 0).all(), view
    """
    for _ in cases(6, plane, 1, deep=10):
        plane.put("w", np.zeros(5000))
        reader = actors.stopped(actors.start(code))
        for value in range(1, 101):
            plane.put("w", np.full(5000, float(value)))
        assert plane.gc()["swept"] == 0
        assert plane.stats()["versions"]["doomed"] == 1
        os.kill(reader, signal.SIGCONT)
        assert actors.wait(reader) == 0, actors.output(reader)
        assert clean(plane)["versions"] == {"ready": 1}


def test_a_publisher_stopped_inside_the_lock_of_a_name_is_named_and_its_death_frees_it(
    plane: Plane, actors: Crew, cases: Cases
) -> None:
    for _ in cases(6, plane, 1, deep=3):  # a second each: that long a publisher waits for another
        plane.put("w", np.zeros(4))
        stopped = actors.stopped(actors.start("plane.put('w', np.ones(4))", die_at="slot-zero:1:stop"))
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


def _halt(plane: Plane, pid: int) -> None:
    """Stop a process, so that it does not sweep, and outside of its own sweep: nobody else could sweep then."""
    session, mine = plane._session, False
    while not mine:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.002)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        with session._sweeper.tried() as mine:
            pass


def test_the_lock_decides_who_is_dead_whatever_became_of_the_pid(plane: Plane, actors: Crew, cases: Cases) -> None:
    stop_housekeeping(plane)
    for _ in cases(8, plane, 4, deep=10):
        plane.put("w", np.zeros(4))
        dead, alive = actors.start(HOLDING), actors.start(HOLDING)
        for pid in (dead, alive):
            actors.says(pid, "holding")
        _halt(plane, alive)
        _rewrite(plane, dead, pid=os.getpid())  # its pid was given to another process, which lives
        _rewrite(plane, alive, pid=1 << 22)  # a pid that nobody has here
        actors.kill(dead)
        assert len(plane._session.sweep()) == 1
        assert plane.stats()["leases"] == 1
        os.kill(alive, signal.SIGCONT)
        actors.kill(alive)
        assert clean(plane)["leases"] == 0


def test_a_reader_in_another_pid_namespace_holds_its_lease_and_ends_it_by_dying(
    plane: Plane, tensor_home: Path, cases: Cases
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
    cases.done(8, plane)


def test_what_an_earlier_boot_left_is_wiped(tensor_home: Path, space_name: str, cases: Cases) -> None:
    for size in (4, 100_000, 3_000_000):
        with rota.tensors.connect(home=tensor_home, namespace=space_name, keep=True) as plane:
            plane.put("w", np.zeros(size, np.uint8))
            folder = plane._space.folder
        (folder / "boot").write_text("another boot")
        with rota.tensors.connect(home=tensor_home, namespace=space_name) as plane:
            assert plane.ls() == []
            assert list(folder.glob("seg-*")) == []
            assert plane.fsck()["violations"] == []
            plane.put("w", np.ones(4))
            assert plane.get("w", as_="numpy")[0] == 1
            cases.done(8, plane)


# 7: forks


@pytest.mark.parametrize("thread", [False, True])
def test_a_forked_child_may_not_use_the_plane_and_its_exit_takes_nothing_of_its_parent(
    plane: Plane, actors: Crew, cases: Cases, thread: bool
) -> None:
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
    for _ in cases(7, plane, 4, deep=10):
        plane.put("w", np.zeros(4))
        parent = actors.start(code)
        actors.says(parent, "forked")
        plane.put("w", np.ones(4))
        wait_until(lambda: plane._session.sweep() or plane.stats()["leases"] == 1)  # the parent's, not the child's
        assert plane.stats()["versions"] == {"ready": 1, "doomed": 1}
        actors.kill(parent)
        assert clean(plane)["versions"] == {"ready": 1}


def test_a_forked_child_that_outlives_its_killed_parent_keeps_the_bytes(
    plane: Plane, actors: Crew, cases: Cases
) -> None:
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
    for _ in cases(7, plane, 4, deep=10):
        plane.put("w", np.zeros(5000))
        parent = actors.start(code)
        child = int(actors.says(parent, "\n").split()[1])
        actors.kill(parent)
        wait_until(lambda: plane.gc() and plane.stats()["clients"] == 2)  # this process and the child's hold
        for value in range(20):
            plane.put("w", np.full(5000, value + 1.0))
        assert plane.stats()["versions"] == {"ready": 1, "doomed": 1}
        os.kill(child, signal.SIGUSR1)
        assert "intact" in actors.says(parent, "t\n")
        wait_until(lambda: clean(plane)["versions"] == {"ready": 1})


def test_a_fork_while_another_thread_connects_may_connect_in_the_child(
    plane: Plane, actors: Crew, cases: Cases
) -> None:
    code = """
        import signal
        from rota.tensors.api import store as planes
        planes._planes_lock.acquire()  # as a thread of the parent would at that moment
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            connect(namespace=plane.namespace, home=plane.home).put('child', np.zeros(3))
            os._exit(0)
        planes._planes_lock.release()
        assert os.waitpid(child, 0)[1] == 0
    """
    for _ in cases(7, plane, 2, deep=10):
        assert actors.run(code) == 0
        assert plane.get("child", as_="numpy").tolist() == [0.0] * 3
