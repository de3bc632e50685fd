"""Processes are named by pid and start time, ended exactly, and found again by record or mark."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rota.runtime import file_locks, process
from rota.runtime.process import ExitWatch, ProcessId, RunFolder, Spawn
from rota.spec.errors import TimedOut

SLEEP = ("/bin/sleep", "600")
WAIT_S = 30.0


@pytest.fixture
def sleeper():
    child = subprocess.Popen(SLEEP)
    yield child
    child.kill()
    child.wait()


def identity(child: subprocess.Popen) -> ProcessId:
    found = process.identify(child.pid)
    assert found is not None
    return found


def test_a_pid_with_another_start_time_is_another_process(sleeper) -> None:
    own = identity(sleeper)
    other = ProcessId(pid=own.pid, start_time=own.start_time - 1.0)
    assert process.is_alive(own) and not process.is_alive(other)
    assert not process.send_signal(other, signal.SIGKILL)
    assert process.is_alive(own)
    assert process.send_signal(own, signal.SIGKILL)
    assert process.wait_gone((own, other), WAIT_S) == ()


def test_a_zombie_is_not_alive(sleeper) -> None:
    own = identity(sleeper)
    sleeper.kill()
    assert process.wait_gone((own,), WAIT_S) == ()
    assert process.start_time_of(own.pid) is not None and process.identify(own.pid) is None


def test_waiting_ends_with_the_limit_and_tells_who_is_left(sleeper) -> None:
    since = time.monotonic()
    assert process.wait_gone((identity(sleeper),), 0.1) == (identity(sleeper),)
    assert 0.1 <= time.monotonic() - since < 2.0


def test_stop_forces_what_ignores_sigterm() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert process.stop(identity(child), grace_s=0.1)
        assert child.wait() == -signal.SIGKILL


def test_stop_lets_a_stopped_process_end_by_itself() -> None:
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(3)); print('ready', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGSTOP)
        since = time.monotonic()
        assert process.stop(identity(child), grace_s=WAIT_S) and time.monotonic() - since < WAIT_S
        assert child.wait() == 3


def test_stop_tree_ends_children_that_left_the_process_group() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
    with subprocess.Popen([sys.executable, "-c", code + "input()"], stdout=-1, stdin=-1) as child:
        assert child.stdout is not None
        grandchild = process.identify(int(child.stdout.readline()))
        assert grandchild is not None and grandchild in process.descendants(identity(child))
        assert process.stop_tree(identity(child), grace_s=0) == ()
        assert not process.is_alive(grandchild)


@pytest.mark.parametrize("in_turn", [True, False])
def test_what_a_shell_runs_ends_by_itself_when_the_tree_is_stopped_in_turn(tmp_path: Path, in_turn: bool) -> None:
    """Two shells, each above a program that saves at SIGTERM and whose own child would be lost with it."""
    (tmp_path / "save.py").write_text(
        "import pathlib, signal, subprocess, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.3)\n"
        "    pathlib.Path(sys.argv[1]).write_text(str(worker.poll()))\n"
        "    sys.exit()\n"
        "worker = subprocess.Popen(['sleep', '600'])\n"
        "signal.signal(15, save)\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    line = f"{sys.executable} save.py saved; true"
    with subprocess.Popen(["/bin/sh", "-c", f"sh -c '{line}'; true"], stdout=subprocess.PIPE, cwd=tmp_path) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        below = process.descendants(identity(child))
        since = time.monotonic()
        assert process.stop_tree(identity(child), grace_s=WAIT_S, in_turn=in_turn) == ()
        assert time.monotonic() - since < WAIT_S, "it ends as soon as all have"
        assert len(below) == 3 and not any(map(process.is_alive, below))
    saved = tmp_path / "saved"
    assert (saved.read_text() if saved.exists() else "") == ("None" if in_turn else "")


def test_a_spawned_child_is_recorded_and_adopted_by_whoever_reads_the_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    child = process.spawn(Spawn(command=SLEEP, env={"MARK": "x", "HOME": None}), name="sleeper", run=run)
    record = RunFolder(tmp_path / "run").find_alive("sleeper")
    assert record is not None and record.id == identity(child) and record.command == SLEEP
    assert record.boot_id == process.boot_id() and run.alive() == (record,)
    assert os.getsid(child.pid) == child.pid
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "run" / "sleeper.json").stat().st_mode & 0o777 == 0o600
    deadline = time.monotonic() + WAIT_S
    while not (given := Path(f"/proc/{child.pid}/environ").read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.01)  # empty until the new program is in place
    environment = given.split(b"\0")
    assert b"MARK=x" in environment and not any(entry.startswith(b"HOME=") for entry in environment)
    child.kill()
    child.wait()
    assert run.find_alive("sleeper") is None and run.read("sleeper") == record
    run.forget("sleeper")
    assert run.read("sleeper") is None


def test_a_record_of_another_boot_is_not_alive(tmp_path: Path, sleeper, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    run.write("sleeper", identity(sleeper), SLEEP)
    assert run.find_alive("sleeper") is not None
    monkeypatch.setattr(process, "boot_id", lambda: "another boot")
    assert run.find_alive("sleeper") is None


def test_marked_processes_are_found_and_killed_whoever_their_parent_is(tmp_path: Path) -> None:
    mark = f"ROTA_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
    name, _, value = mark.partition("=")
    code = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(600)"
    child = process.spawn(Spawn(command=(sys.executable, "-c", code), env={name: value}), name="forker")
    deadline = time.monotonic() + WAIT_S
    while len(process.marked(mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(process.marked(mark)) == 2
    assert process.kill_all(lambda: process.marked(mark)) == () == process.marked(mark)
    child.wait()


def test_who_has_a_file_locked_is_told_from_who_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    text = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); {}; print(flush=True); time.sleep(60)"
    with contextlib.ExitStack() as stack:
        children = []
        for what in ("fcntl.flock(f, fcntl.LOCK_EX)", "pass"):
            command = [sys.executable, "-c", text.format(what), str(path)]
            child = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(child.kill)
            assert child.stdout is not None and child.stdout.readline()
            children.append(child)
        assert [one.pid for one in process.locking(path)] == [children[0].pid]
        path.unlink()
        assert [one.pid for one in process.locking(path)] == [children[0].pid], "also when it was removed"


def test_a_session_is_found_after_its_leader_died_but_not_under_a_reused_pid() -> None:
    code = "import os, time\nif os.fork(): os._exit(0)\ntime.sleep(600)"
    child = process.spawn(Spawn(command=(sys.executable, "-c", code), env={}), name="leader")
    leader = process.start_time_of(child.pid)
    assert leader is not None
    session = ProcessId(pid=child.pid, start_time=leader)
    assert child.wait(WAIT_S) == 0
    members = process.session_of(session)
    assert len(members) == 1 and os.getsid(members[0].pid) == child.pid
    assert process.kill_all(lambda: process.session_of(session)) == ()
    own = process.own_id()
    assert process.session_of(ProcessId(pid=own.pid, start_time=own.start_time - 1)) == ()


def test_a_process_that_wrote_over_its_environment_is_told_from_others() -> None:
    code = """
import ctypes, os
start = int(open("/proc/self/stat").read().rpartition(")")[2].split()[47])
print("ready", flush=True)
input()
ctypes.memset(start, ord(" "), 8)
print("written over", flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        assert not process.lost_environment(identity(child))
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "written over\n"
        assert process.lost_environment(identity(child))
        child.kill()


def test_a_subreaper_takes_in_and_reaps_orphans() -> None:
    code = """
import os, subprocess, time
from rota.runtime import process
process.become_subreaper()
orphan = int(subprocess.check_output(["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"]))
assert orphan in process.children_of(os.getpid()), "not adopted"
identity = process.identify(orphan)
process.send_signal(identity, 9)
process.wait_gone([identity], 30)
assert process.reap_adopted() == [orphan]
assert process.start_time_of(orphan) is None
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=WAIT_S).returncode == 0


@pytest.mark.parametrize(("command", "status"), [(("sh", "-c", "exit 7"), 7), (("sh", "-c", "kill -11 $$"), -11)])
def test_an_exit_watch_tells_how_a_process_ended(command: tuple[str, ...], status: int) -> None:
    child = subprocess.Popen(("sh", "-c", f"read x; {command[2]}"), stdin=subprocess.PIPE)
    watch = ExitWatch(identity(child))
    assert watch.status() is None
    child.communicate(b"\n")
    if watch.status() is None and tuple(int(part) for part in os.uname().release.split(".")[:2]) < (6, 15):
        pytest.skip("the kernel does not tell")
    assert watch.status() == status
    watch.close()
    assert watch.status() is None


def test_an_exit_watch_waits_for_a_parent_that_is_late_to_reap() -> None:
    code = "import subprocess, time; c = subprocess.Popen(['sh', '-c', 'read x']); time.sleep(1); c.wait(); input()"
    with subprocess.Popen((sys.executable, "-c", code), stdin=subprocess.PIPE) as parent:
        watched = ProcessId(pid=0, start_time=0.0)
        while not watched.pid:
            pids = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
            watched = process.identify(int(pids[0])) or watched if pids else watched
        watch = ExitWatch(watched)
        assert not watch.unreaped
        process.send_signal(watched, signal.SIGKILL)
        while process.is_alive(watched):
            time.sleep(0.002)
        assert watch.unreaped
        while watch.unreaped:
            time.sleep(0.01)
        assert watch.status() in (-9, None)
        watch.close()
        parent.kill()


def test_usage_is_measured_for_exactly_this_process(sleeper) -> None:
    usage = process.usage_of(identity(sleeper))
    assert usage is not None and usage.rss_bytes > 0 and usage.threads == 1
    assert process.usage_of(ProcessId(pid=sleeper.pid, start_time=0.0)) is None


def test_the_wait_for_a_lock_ends_and_names_who_has_it(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with file_locks.locked(path), pytest.raises(TimedOut) as found, file_locks.locked(path, wait_s=0.01):
        pass
    assert f"{path} is locked by process {os.getpid()} (" in found.value.message
    assert f"kill {os.getpid()}" in found.value.hint
    with file_locks.locked(path, wait_s=0.01):
        pass


def test_a_lock_is_taken_as_soon_as_it_is_free(tmp_path: Path) -> None:
    tries = iter([False, False, True])
    file_locks.take_lock(tmp_path / "a.lock", lambda: next(tries))
    assert list(tries) == []


def test_the_remedy_for_a_stopped_holder_is_to_continue_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks, "is_stopped", lambda _: True)
    path = tmp_path / "a.lock"
    with (
        file_locks.locked(path),
        pytest.raises(TimedOut, match=f"kill -CONT {os.getpid()}"),
        file_locks.locked(path, wait_s=0.0),
    ):
        pass
