"""Joining and leaving: what is refused, what a failed join leaves, when the last one ends the server."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.real.tensors.crew import WAIT_S, Crew

import rota.tensors
from rota.runtime import environ, process
from rota.runtime.redis import server as redis_server
from rota.spec.errors import BadInput
from rota.tensors import errors
from rota.tensors.api.store import Plane
from rota.tensors.generation import GenerationTable
from rota.tensors.locks import LockFile, shared


@pytest.fixture
def home(tensor_home: Path) -> Iterator[Path]:
    """A home without a server."""
    made = Path(tempfile.mkdtemp(prefix="rt"))
    yield made
    rota.tensors.down(made)
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def small(tensor_home: Path, home: Path) -> Iterator[Path]:
    """A tmpfs of 4 MiB for the shared memory of a home."""
    folder = Path(tempfile.mkdtemp(prefix="rt"))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], check=False).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
    folder.rmdir()


def fill(folder: Path) -> None:
    """Leave no page free."""
    with pytest.raises(OSError, match="No space"), (folder / "junk").open("wb", buffering=0) as junk:
        while True:
            junk.write(bytes(4096))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ROTA_SHM_DIR", "/proc/nope", "/proc/nope"),
        ("ROTA_SHM_DIR", "shm", "ROTA_SHM_DIR='shm': an absolute folder"),
        ("ROTA_SPILL_DIR", "/proc/nope", "/proc/nope"),
        ("ROTA_EPOCH", "last", "ROTA_EPOCH='last' is not a whole number"),
        ("ROTA_JOB", "a b", "label 'a b'"),
        ("ROTA_TENSORS_COPY_THREADS", "many", "ROTA_TENSORS_COPY_THREADS='many'"),
    ],
)
def test_a_wrong_variable_is_named_and_the_server_started_for_nothing_goes(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.chdir(home)
    with monkeypatch.context() as patched:
        patched.setenv(name, value)
        with pytest.raises(BadInput, match=said):
            rota.tensors.connect(home=home)
    assert redis_server.find_running(environ.Home.of(home)) is None
    with rota.tensors.connect(home=home) as plane:
        assert plane.put("w", np.ones(2)).ready


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"namespace": 5}, "namespace 5"),
        ({"label": 5}, "label 5"),
        ({"epoch": "x"}, "epoch='x'"),
        ({"epoch": -1}, "epoch=-1"),
        ({"home": "/proc/nope"}, "/proc/nope"),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(plane: Plane, given: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        rota.tensors.connect(**{"home": plane.home, "namespace": plane.namespace} | given)  # type: ignore[arg-type]
    assert plane.put("w", np.ones(2)).epoch == 0


def test_a_join_that_fails_spares_the_server_of_others(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_EPOCH", "last")
    with pytest.raises(BadInput, match="ROTA_EPOCH"):
        rota.tensors.connect(home=plane.home, namespace="other")
    assert plane.put("w", np.ones(2)).ready


def test_a_full_file_system_is_out_of_memory_for_every_call_and_leaves_no_half_client(
    small: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROTA_SHM_DIR", str(small))
    with rota.tensors.connect(home=home, namespace="full") as plane:
        plane.put("w", np.ones(3))
        fill(small)
        before = sorted(small.rglob("*"))
        assert plane.get("w", as_="numpy").tolist() == [1, 1, 1]
        for call in (
            lambda: rota.tensors.connect(home=home, namespace="late"),
            lambda: plane.fence("job", 3),
            lambda: plane.pin("w"),
            lambda: plane.put("big", np.zeros(1 << 20)),
        ):
            with pytest.raises(errors.OutOfMemory):
                call()
        held = []
        with pytest.raises(errors.OutOfMemory):
            while len(held) < 2000:  # until the file that notes leases has to grow
                held.append((plane.put("w", np.ones(3)), plane.get("w", as_="numpy")))
        assert len(held) > 400
        left = [path.name for path in set(small.rglob("*")) - set(before) if not path.is_dir()]
        assert [name for name in left if not name.startswith(("seg-", "."))] == []
        assert list((plane.folder / "c").glob(".*")) == []
        (small / "junk").unlink()
        del held
        assert plane.fsck()["violations"] == []
        plane.pin("w").close()
        with rota.tensors.connect(home=home, namespace="late") as late:
            assert late.put("w", np.ones(3)).ready
        plane.delete("w")
    rota.tensors.down(home)


def test_a_pin_in_another_namespace_keeps_the_server_and_its_bytes(home: Path) -> None:
    with rota.tensors.connect(home=home, namespace="pins") as plane:
        plane.put("w", np.arange(5))
        pin = plane.pin("w", label="job")
    with rota.tensors.connect(home=home, namespace="other") as other:
        other.put("w", np.zeros(5))
    with rota.tensors.connect(home=home, namespace="pins") as plane:
        assert plane.get("w", version=pin.version, as_="numpy").tolist() == [0, 1, 2, 3, 4]
        plane.drop_label("job")
    with rota.tensors.connect(home=home, namespace="other"):
        pass
    assert redis_server.find_running(environ.Home.of(home)) is None


def test_the_folder_named_for_shared_memory_keeps_its_mode(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be /dev/shm itself, which belongs to all."""
    with tempfile.TemporaryDirectory(prefix="rt", dir="/dev/shm") as common:
        Path(common).chmod(0o1777)
        Path(common, "others").mkdir()
        monkeypatch.setenv("ROTA_SHM_DIR", common)
        with rota.tensors.connect(home=home) as plane:
            assert plane.put("w", np.ones(2)).ready
            assert Path(common).stat().st_mode & 0o7777 == 0o1777
            assert plane.folder.parent.stat().st_mode & 0o777 == 0o700
        assert [path.name for path in Path(common).iterdir()] == ["others"]


def test_memory_in_the_hand_of_another_user_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    with tempfile.TemporaryDirectory(prefix="rt", dir="/dev/shm") as taken:
        os.chown(taken, 65534, 65534)
        monkeypatch.setenv("ROTA_SHM_DIR", taken)
        with pytest.raises(BadInput, match="belongs to another user"):
            rota.tensors.connect(home=home)


def test_a_closed_plane_rebuilds_nothing_and_a_forked_child_neither(home: Path) -> None:
    plane = rota.tensors.connect(home=home)
    epoch = plane.stats()["registry_epoch"]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            plane.recover()
        except errors.ForkedClient:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert plane.stats()["registry_epoch"] == epoch
    assert repr(plane) == f"<tensors of namespace {plane.namespace!r} in {home}>"
    plane.close()
    assert repr(plane).endswith(f" in {home}, closed>")
    with pytest.raises(errors.ClosedPlane):
        plane.recover()


def test_two_threads_that_leave_and_recover_at_once_never_stand_still(home: Path) -> None:
    """The one that leaves is the first that waits for the registry's lock, the one that found the server dead the
    second: in the wrong order each would hold what the other waits for."""
    code = f"""
        import threading
        import rota.tensors
        from rota.runtime import environ, process
        from rota.runtime.redis import server as redis_server
        from rota.runtime.file_locks import locked
        from rota.runtime.process import ProcessId
        home = environ.Home.of({str(home)!r})
        for _ in range(3):
            plane = rota.tensors.connect(home=home.root)
            session, server = plane._session, redis_server.find_running(home)
            process.send_signal(server.process, 9)
            assert not process.wait_gone((server.process,), 5)
            def recover():
                try:
                    session.rejoin()
                except rota.spec.errors.RegistryUnavailable:
                    pass  # it was ended meanwhile
            lock = next(home.run.glob('registry-*')) / 'registry.lock'
            threads = [threading.Thread(target=lambda: session.close(at_exit=True)), threading.Thread(target=recover)]
            with locked(lock):
                for thread in threads:
                    thread.start()
                    threading.Event().wait(0.3)
            for thread in threads:
                thread.join()
        print('done')
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.stdout == "done\n", done.stderr


def descriptors() -> list[str]:
    """What this process has open."""
    links = Path("/proc/self/fd").iterdir()
    return sorted(str(link.readlink()) for link in links if link.is_symlink())


def test_joining_and_leaving_again_and_again_leaves_no_descriptor_open(home: Path, plane: Plane) -> None:
    def use() -> None:
        with rota.tensors.connect(home=home, namespace="again", keep=True) as made:
            made.put("x", np.ones(4))
            made.get("x")
        gc.collect()

    use()
    once = descriptors()
    for _ in range(5):
        use()
    assert not Counter(descriptors()) - Counter(once), "those of earlier tests may be closed meanwhile"


def test_a_closed_client_does_not_end_the_locks_of_another_in_the_same_process(plane: Plane) -> None:
    """A record lock ends when its process closes any descriptor of the file: a live client keeps what it locks."""
    plane.put("x", np.ones(4))
    space = plane._session.space
    row = space.find_row("x")
    assert row is not None
    table, slot = space.table, row.slot
    path = table.path
    with table.slot_lock(slot, "x"):
        again = shared(path, GenerationTable, lambda at: GenerationTable(at, table._clock))
        assert again is table
        del again
        gc.collect()
        ask = (
            "import fcntl, os, struct, sys;"
            "fd = os.open(sys.argv[1], os.O_RDWR);"
            f"row = struct.pack('hhqqi4x', fcntl.F_WRLCK, os.SEEK_SET, {slot * 16}, 16, 0);"
            "print(struct.unpack('hhqqi4x', fcntl.fcntl(fd, fcntl.F_GETLK, row))[4])"
        )
        seen = subprocess.run([sys.executable, "-c", ask, path], capture_output=True, text=True, check=True)
        assert int(seen.stdout) == os.getpid()


def test_a_client_that_looks_for_the_memory_elsewhere_is_refused_and_loses_nothing(
    home: Path, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would rebuild the registry from an empty folder, and every name of the others would be gone."""
    plane.put("w", np.arange(3))
    shm, root = os.environ["ROTA_SHM_DIR"], str(plane.folder)
    with tempfile.TemporaryDirectory(prefix="rt", dir="/dev/shm") as elsewhere:
        code = (
            "import sys; from rota import tensors\n"
            "try: tensors.connect(home=sys.argv[1], namespace=sys.argv[2])\n"
            "except Exception as error: print(type(error).__name__, error, error.hint)"
        )
        command = [sys.executable, "-c", code, str(plane.home), plane.namespace]
        env = os.environ | {"ROTA_SHM_DIR": elsewhere}
        said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
    assert "RegistryUnavailable" in said and root in said and f"ROTA_SHM_DIR={shm}," in said
    assert plane.get("w", as_="numpy").tolist() == [0, 1, 2]
    plane.delete("w")
    # where the folder is gone, nothing is lost by another one
    with tempfile.TemporaryDirectory(prefix="rt", dir="/dev/shm") as first:
        monkeypatch.setenv("ROTA_SHM_DIR", first)
        with rota.tensors.connect(home=home, namespace="n", keep=True) as made:
            made.put("w", np.ones(2))
    with tempfile.TemporaryDirectory(prefix="rt", dir="/dev/shm") as second:
        monkeypatch.setenv("ROTA_SHM_DIR", second)
        with rota.tensors.connect(home=home, namespace="n") as made:
            assert made.ls() == []
            assert made.put("w", np.ones(2)).ready
            rota.tensors.down(home)


def test_a_client_from_before_the_registry_was_ended_does_not_rebuild_the_next_one(home: Path, actors: Crew) -> None:
    """It has the table of files that were removed: of the names that lie there now it would know nothing."""
    code = f"""
        import time
        from rota.runtime import environ, process
        from rota.runtime.redis import server as redis_server
        from rota.tensors import connect
        plane = connect(home={str(home)!r}, keep=True)
        home = environ.Home.of({str(home)!r})
        server = redis_server.find_running(home)
        process.send_signal(server.process, 9)
        assert not process.wait_gone((server.process,), 5)
        for n in range(20):
            plane.put(f'old/{{n}}', np.ones(4))
        print('ready', flush=True)
        while not (home.root / 'again').exists():
            time.sleep(0.01)
        try:
            plane._session.rejoin()
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        print('over', flush=True)
    """
    old = actors.start(code)
    actors.says(old, "ready")
    rota.tensors.down(home)
    with rota.tensors.connect(home=home, keep=True) as plane:
        plane.put("new", np.arange(3))
        epoch = plane.stats()["registry_epoch"]
        (home / "again").touch()
        actors.says(old, "over")
        assert "was removed meanwhile" in actors.output(old), actors.output(old)
        assert plane.stats()["registry_epoch"] == epoch
        assert plane.get("new", as_="numpy").tolist() == [0, 1, 2]
        assert actors.wait(old) == 0, actors.output(old)


def test_two_clients_of_one_process_never_recover_or_sweep_at_once(home: Path, plane: Plane) -> None:
    """A record lock belongs to the process: it keeps neither its threads nor its clients apart."""
    url = plane.address.url
    with rota.tensors.connect(url, namespace=plane.namespace) as other:
        first, second = plane._session, other._session
        assert first is not second
        for mine, its in ((first._recover, second._recover), (first._sweeper, second._sweeper)):
            inside = threading.Event()

            def enter(lock: LockFile = its, inside: threading.Event = inside) -> None:
                with lock.locked():
                    inside.set()

            with mine.locked():
                thread = threading.Thread(target=enter)
                thread.start()
                assert not inside.wait(0.2)
            thread.join(WAIT_S)
            assert inside.is_set()


def test_to_keep_the_server_is_heard_by_a_process_that_is_connected_already(home: Path) -> None:
    with rota.tensors.connect(home=home) as plane:
        plane.put("w", np.arange(3))
        assert rota.tensors.connect(home=home, keep=True) is plane
    assert redis_server.find_running(environ.Home.of(home)) is not None
    with rota.tensors.connect(home=home) as plane:
        assert plane.get("w", as_="numpy").tolist() == [0, 1, 2]


def test_a_home_with_a_long_path_leaves_no_folder_for_its_socket_behind(home: Path) -> None:
    long = home / ("h" * 100)
    path = redis_server.socket_path(environ.Home.of(long))
    assert path.parent.parent == Path("/tmp")
    assert not path.parent.exists(), "asking where the socket will be makes nothing"
    with rota.tensors.connect(home=long, namespace="long") as made:
        made.put("x", np.ones(4))
        assert path.is_socket()
    rota.tensors.down(long)
    assert not path.parent.exists()


def test_namespaces_that_were_left_keep_no_file_open(tensor_home: Path) -> None:
    def use(namespace: str) -> int:
        with rota.tensors.connect(home=tensor_home, namespace=namespace, keep=True) as plane:
            plane.put("a", np.arange(1000))
            assert plane.get("a")[999] == 999
            plane.delete("a")
        del plane
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    opened = [use(f"left{n}") for n in range(5)]
    assert max(opened[1:]) <= opened[0]


STARTER = """
import os, signal, sys
from rota.runtime import environ, process
from rota.runtime.redis import server
seen, home = set(), environ.Home.of(sys.argv[1])
def at_line(frame, event, arg):
    if event == 'line' and 'life' in frame.f_locals:
        seen.add(frame.f_lineno)
    if len(seen) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return at_line
sys.settrace(lambda frame, *_: at_line if frame.f_code is server._start.__code__ else None)
with server.registry_lock(home):
    server.find_or_start(home)
"""


def servers_of(home: Path) -> set[int]:
    """Every process with the socket of this home in its command line."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return {pid for pid in pids if str(redis_server.socket_path(environ.Home.of(home))) in process.command_line(pid)}


def test_a_home_has_one_server_wherever_its_starter_was_killed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = home / "late"
    (real,) = list(redis_server._programs([]))[:1]
    late.write_text(f'#!/bin/sh\n[ "$1" = --version ] || sleep 0.2\nexec {real} "$@"\n')
    late.chmod(0o700)
    monkeypatch.setenv("ROTA_REDIS_SERVER", str(late))
    own, killed = environ.Home.of(home), 0
    for line in itertools.count(1):
        status = subprocess.run([sys.executable, "-c", STARTER, home, str(line)], check=False).returncode
        with redis_server.registry_lock(own):
            found = redis_server.find_or_start(own)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
        time.sleep(0.4)  # what the one before started would listen by now
        assert servers_of(home) == {found.pid}, f"killed at line {line}"
        rota.tensors.down(home)
    assert killed > 8
    rota.tensors.down(home)


def test_the_server_of_a_starter_that_was_killed_goes_with_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (real,) = list(redis_server._programs([]))[:1]
    program = home / "program"
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] || {{ kill -9 $PPID; sleep 0.1; }}\nexec {real} "$@"\n')
    program.chmod(0o700)
    env = {**os.environ, "ROTA_REDIS_SERVER": str(program)}
    never = [sys.executable, "-c", STARTER, home, "-1"]
    assert subprocess.run(never, check=False, env=env).returncode == -signal.SIGKILL
    rota.tensors.down(home)
    time.sleep(0.3)
    assert servers_of(home) == set()
