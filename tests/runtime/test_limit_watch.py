"""The watch of an instance: what is above a limit, who belongs to the instance, and that only those are ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rota.runtime import limit_watch, process
from rota.runtime.limit_watch import Table, exceeded, members

WAIT_S = 120.0
MIB = 2**20


def test_within_all_limits_or_without_any_nothing_is_exceeded() -> None:
    assert exceeded({"memory": 10, "processes": 2, "disk": 5}, {"memory": 10, "processes": 2, "disk": 5}) is None
    assert exceeded({}, {"memory": 10**12, "processes": 10**6, "disk": 10**15}) is None
    assert exceeded({"memory": 0, "files": 256}, {"memory": 1, "processes": 1}) is None


@pytest.mark.parametrize(
    ("kind", "limit", "used", "text"),
    [
        ("memory", 256 * MIB, 312 * MIB, "used 312MiB of memory; the limit is 256MiB (resources.memory of its role)"),
        ("processes", 64, 65, "used 65 processes; the limit is 64 (limits.processes of its role)"),
        ("disk", 1536, 2048, "used 2KiB in the folders of its job; the limit is 1.5KiB (limits.disk of its role)"),
    ],
)
def test_what_is_exceeded_is_named_with_both_figures_and_its_field(kind: str, limit: int, used: int, text: str) -> None:
    assert exceeded({kind: limit}, {kind: used}) == {"kind": kind, "used": used, "limit": limit, "text": text}


def test_members_are_the_tree_and_whoever_left_it_but_no_neighbour_and_no_process_with_a_used_number() -> None:
    table: Table = {
        1: (0, 0, "S"),
        10: (1, 5, "S"),
        11: (10, 6, "R"),
        12: (11, 7, "S"),
        13: (10, 7, "Z"),
        20: (1, 8, "S"),  # left the tree: its parent has ended
        21: (20, 9, "S"),
        30: (1, 99, "S"),  # the number of one that has ended, given to another process
        40: (1, 5, "S"),
    }
    assert members(table, 10, {10: 5, 20: 8, 30: 9}) == {10: 5, 11: 6, 12: 7, 20: 8, 21: 9}


def test_a_folder_counts_what_it_has_on_the_disk_and_follows_no_link(tmp_path: Path) -> None:
    folder, other = tmp_path / "job", tmp_path / "other"
    (folder / "a" / "b").mkdir(parents=True)
    other.mkdir()
    (other / "large").write_bytes(b"x" * 4 * MIB)
    (folder / "link").symlink_to(other)
    empty = limit_watch.disk([str(folder)])
    (folder / "a" / "b" / "file").write_bytes(b"x" * MIB)
    os.sync()
    assert empty < MIB and MIB <= limit_watch.disk([str(folder)]) - empty < 2 * MIB
    assert limit_watch.disk([str(tmp_path / "missing")]) == 0


HOG = """
import os, sys, time
if os.fork() == 0:
    time.sleep(600)
kept = []
print('up', flush=True)
sys.stdin.readline()
while True:
    kept.append(bytearray(b'x' * 2**22)); time.sleep(0.01)
"""
BOMB = """
import subprocess, sys, time
print('up', flush=True)
sys.stdin.readline()
kept = [subprocess.Popen(['sleep', '600']) for _ in range(24)]
time.sleep(600)
"""
FILLER = """
import os, sys, time
print('up', flush=True)
sys.stdin.readline()
with open(os.path.join(sys.argv[1], 'filled'), 'wb', buffering=0) as file:
    while file.tell() < 2**28:
        file.write(b'x' * 2**20); time.sleep(0.01)
time.sleep(600)
"""


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as other:
        yield other
        other.kill()


@pytest.mark.parametrize(
    ("source", "kind", "limit"),
    [(HOG, "memory", 64 * MIB), (BOMB, "processes", 12), (FILLER, "disk", 8 * MIB)],
    ids=["memory", "processes", "disk"],
)
def test_who_exceeds_a_limit_is_ended_with_its_children_and_nobody_else(
    source: str, kind: str, limit: int, tmp_path: Path, neighbour: subprocess.Popen[bytes]
) -> None:
    folder, report = tmp_path / "job", tmp_path / "limits" / "w-0-1.json"
    folder.mkdir()
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", source, str(folder)]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, start_new_session=True) as bad:
        assert bad.stdin is not None and bad.stdout is not None and bad.stdout.readline() == b"up\n"
        which = process.identify(bad.pid)
        assert which is not None
        start = round(which.start_time * os.sysconf("SC_CLK_TCK"))
        asked = {
            "pid": bad.pid,
            "start": start,
            "limits": {kind: limit},
            "folders": [str(folder)],
            "report": str(report),
        }
        watch = [sys.executable, "-I", "-S", limit_watch.__file__, json.dumps(asked)]
        subprocess.run(watch, check=True, timeout=WAIT_S, stderr=subprocess.DEVNULL)
        bad.stdin.write(b"go\n")
        bad.stdin.flush()
        assert bad.wait(WAIT_S) == -signal.SIGKILL
    found = json.loads(report.read_text())
    assert (found["kind"], found["limit"]) == (kind, limit) and found["used"] > limit
    deadline = time.monotonic() + WAIT_S
    while process.session_of(which) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.session_of(which) == (), "nothing that it started is left"
    assert neighbour.poll() is None


def test_the_watch_ends_with_an_instance_that_stays_within_its_limits(tmp_path: Path) -> None:
    report = tmp_path / "w-0-1.json"
    with subprocess.Popen(["sleep", "600"]) as good:
        which = process.identify(good.pid)
        assert which is not None
        start = round(which.start_time * os.sysconf("SC_CLK_TCK"))
        mark = str(report)
        asked = {"pid": good.pid, "start": start, "limits": {"memory": MIB * 64}, "folders": [], "report": mark}
        subprocess.run(
            [sys.executable, "-I", "-S", limit_watch.__file__, json.dumps(asked)], check=True, timeout=WAIT_S
        )
        watches = [pid for pid in limit_watch.processes() if mark in process.command_line(pid)]
        assert len(watches) == 1 and good.poll() is None
        good.kill()
    deadline = time.monotonic() + WAIT_S
    while process.identify(watches[0]) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.identify(watches[0]) is None and not report.exists()
