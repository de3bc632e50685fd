"""Files to lock, opened and dropped by several threads at once."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rota.spec.errors import TimedOut
from rota.tensors import locks
from rota.tensors.locks import LockFile, shared


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns at nearly every line."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("often")
def test_a_client_that_comes_while_the_last_one_goes_has_an_open_file(tmp_path: Path) -> None:
    path, stop = tmp_path / "lock", threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            shared(path, LockFile, LockFile)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(3000):
            mine = shared(path, LockFile, LockFile)
            fcntl.lockf(mine.fd, fcntl.LOCK_EX)  # refuses a closed descriptor
            assert os.path.samestat(os.fstat(mine.fd), path.stat())
            del mine
    finally:
        stop.set()
        thread.join()


def test_a_file_closes_with_its_last_client(tmp_path: Path) -> None:
    first = shared(tmp_path / "lock", LockFile, LockFile)
    second = shared(tmp_path / "lock", LockFile, LockFile)
    fd = first.fd
    assert first is second
    del first
    os.fstat(fd)
    del second
    gc.collect()
    assert fd not in locks._fds.values()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_the_wait_for_a_lock_of_another_process_ends_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    mine = shared(path, LockFile, LockFile)
    code = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(TimedOut, match=f"locked by process {holder.pid} "), mine.locked(wait_s=0.01):
            pass
        holder.communicate("\n")
    with mine.locked():
        assert True
