"""Hung or busy: real processes that are stopped, spin, wait for a core or for nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rota.runtime import probe, process
from rota.runtime.probe import SILENT_LOOKS, STOPPED_LOOKS, HangWatch, end_hung, listens_http2, noted
from rota.runtime.process import Demand, ProcessId

SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"
SPINS = "print('ready', flush=True)\nwhile True: pass"


@pytest.fixture
def start() -> Iterator[Callable[[str], ProcessId]]:
    children: list[subprocess.Popen[str]] = []

    def started(code: str) -> ProcessId:
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        found = process.identify(child.pid)
        assert found is not None
        return found

    yield started
    for child in children:
        child.kill()
        child.communicate()


def stop(which: ProcessId) -> None:
    os.kill(which.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, which.pid, os.WSTOPPED)


def test_a_process_stopped_at_three_looks_hangs_and_one_that_was_continued_in_between_does_not(start) -> None:
    which = start(SLEEPS)
    watch = HangWatch()
    stop(which)
    assert [watch.look(which) for _ in range(STOPPED_LOOKS - 1)] == ["", ""]
    os.kill(which.pid, signal.SIGCONT)
    os.waitid(os.P_PID, which.pid, os.WCONTINUED)
    assert watch.look(which) == ""
    stop(which)
    assert [watch.look(which) for _ in range(STOPPED_LOOKS)] == ["", "", "was stopped by a signal"]
    other = start(SLEEPS)
    stop(other)
    assert watch.look(other) == "", "another process than before is counted anew"


def test_a_silent_process_that_wants_no_processor_hangs_after_ten_looks_and_an_answer_begins_the_count_anew(
    start,
) -> None:
    which = start(SLEEPS)
    while (demand := process.demand_of(which)) is not None and demand.runs:
        pass  # from its word to its sleep
    watch = HangWatch()
    assert watch.look(which, answers=False) == "", "the first look has nothing to compare with"
    assert {watch.look(which, answers=False) for _ in range(SILENT_LOOKS - 1)} == {""}
    assert watch.look(which, answers=True) == ""
    found = [watch.look(which, answers=False) for _ in range(SILENT_LOOKS)]
    assert set(found[:-1]) == {""} and "gave no answer for 10 s" in found[-1]


def test_a_silent_process_that_computes_is_busy_for_ever(start) -> None:
    which, watch = start(SPINS), HangWatch()
    assert {watch.look(which, answers=False) for _ in range(5 * SILENT_LOOKS)} == {""}


def test_a_process_that_waits_for_a_core_is_busy_also_while_it_gets_none(
    start, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = iter(range(100))
    monkeypatch.setattr(process, "demand_of", lambda which: Demand(seconds=float(next(waited)), runs=False))
    which, watch = start(SLEEPS), HangWatch()
    assert {watch.look(which, answers=False) for _ in range(3 * SILENT_LOOKS)} == {""}


def test_a_process_that_waits_for_the_disk_is_busy_for_no_signal_reaches_it(start) -> None:
    # its child shares its memory and runs nothing else: until that ends, it waits as for a disk
    waits = "import ctypes, os, time; me = os.getpid(); print('ready', flush=True); ctypes.CDLL(None).vfork()\n"
    which = start(waits + "while os.getppid() == me: time.sleep(0.05)\nos._exit(0)")
    while process.state_of(which) != process._STATES["D"]:
        assert process.is_alive(which)
    watch = HangWatch()
    assert {watch.look(which, answers=False) for _ in range(3 * SILENT_LOOKS)} == {""}


def test_a_process_that_is_gone_does_not_hang() -> None:
    which, watch = ProcessId(pid=os.getpid(), start_time=1.0), HangWatch()
    assert {watch.look(which, answers=False) for _ in range(2 * SILENT_LOOKS)} == {""}


def test_what_was_ended_is_noted_and_the_note_has_a_limit(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = start(SLEEPS)
    stop(which)
    assert end_hung(which, tmp_path, "master of job-1", "was stopped by a signal")
    assert process.wait_gone((which,), 60) == ()
    assert not end_hung(which, tmp_path, "gateway", "was stopped by a signal"), "it is gone, and somebody else's fault"
    ((path, found),) = noted(tmp_path).items()
    assert (found.part, found.pid, found.why) == ("master of job-1", which.pid, "was stopped by a signal")
    assert path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(probe, "_KEPT_MAX", 1)
    probe.note_replaced(tmp_path, "gateway", 7, "ended")
    assert len(noted(tmp_path)) == 1


def test_a_server_that_answers_is_heard_and_one_that_only_takes_the_connection_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not listens_http2(port)

        def answer() -> None:
            for _ in range(2):  # the silent one from before is still in the queue
                asked, _ = server.accept()
                with asked:
                    asked.sendall(bytes(9))

        thread = threading.Thread(target=answer)
        thread.start()
        monkeypatch.setattr(probe, "ANSWER_S", 30.0)
        assert listens_http2(port)
        thread.join()
    assert not listens_http2(port)
