"""The machines themselves: what each has of its own, and that every fault is one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.machines.bed import Machine

_TRY = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 7), 1).close()
except ConnectionRefusedError:
    print("there")
except OSError:
    print("gone")
"""
_SERVE = """
import socket
connection, _ = socket.create_server(("", 9)).accept()
connection.sendall(bytes(2_000_000))
connection.close()
"""
_FETCH = """
import socket, sys
connection, count = socket.create_connection((sys.argv[1], 9)), 0
while got := connection.recv(65536):
    count += len(got)
print(count)
"""


def _reaches(one: Machine, other: Machine) -> bool:
    return one.run("python3", "-c", _TRY, other.address).strip() == "there"


def _until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_machine_has_its_own_name_memory_folder_and_processes(two: list[Machine]) -> None:
    a, b = two
    assert [one.run("hostname").strip() for one in two] == ["m0", "m1"]
    a.run("sh", "-c", "echo mine > /dev/shm/x; echo mine > /tmp/x")
    assert a.left_in_memory() == ["x"] and b.left_in_memory() == []
    assert not b.path("/tmp/x").exists()
    a.spawn("sleep", "1000")
    _until(lambda: any("sleep 1000" in line for line in a.processes().values()))
    assert b.processes() == {}


def test_a_cable_that_is_pulled_and_a_route_that_drops_cut_a_machine_off(two: list[Machine]) -> None:
    a, b = two
    assert _reaches(a, b) and _reaches(b, a)
    b.link(up=False)
    assert not _reaches(a, b)
    b.link(up=True)
    assert _reaches(a, b)
    b.deaf_to(a)
    assert not _reaches(a, b) and _reaches(b, b)
    b.deaf_to(a, on=False)
    assert _reaches(a, b)


def test_a_limited_rate_slows_what_a_machine_sends(two: list[Machine]) -> None:
    a, b = two

    def seconds() -> float:
        server = b.spawn("python3", "-c", _SERVE)
        _until(lambda: ":0009 00000000:0000 0A" in b.path("/proc/1/net/tcp").read_text())
        began = time.monotonic()
        assert a.run("python3", "-c", _FETCH, b.address).strip() == "2000000"
        server.wait(10)
        return time.monotonic() - began

    fast = seconds()
    try:
        b.shape("tbf", "rate", "4mbit", "burst", "32kb", "latency", "400ms")
    except RuntimeError as error:
        pytest.skip(f"this kernel limits no rate: {error}")
    assert seconds() > max(3.0, 2 * fast)


def test_a_power_cut_ends_all_processes_and_the_machine_comes_back_empty(two: list[Machine]) -> None:
    a, _ = two
    a.run("sh", "-c", "echo kept > /dev/shm/x")
    child = a.spawn("sh", "-c", "setsid sleep 1000 & setsid sleep 1000 & wait")
    _until(lambda: sum(line == "sleep 1000" for line in a.processes().values()) == 2)
    a.kill()
    assert child.returncode is not None
    a.start()
    assert a.processes() == {} and a.left_in_memory() == []
    assert a.run("hostname").strip() == "m0"
