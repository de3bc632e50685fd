"""Calls between machines: over TCP, closed to strangers, through a cut cable and the death of a machine."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.machines import remote_calls
from tests.machines.bed import Machine, bed
from tests.machines.site import Site, long, site

from rota.runtime.frames import CALL, encode, pack
from rota.runtime.handshake import FAILURES_MAX

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LIMIT_S = 240.0
CUT_S = 3.0

JOB = """
name: across
output: {home}/out
roles:
  one:
    workload: remote_calls:Remote
    resources: {{cpus: 1}}
    apart: [{{role: loop, level: node}}]
  loop:
    workload: remote_calls:drive
    resources: {{cpus: 1}}
"""
HANDSHAKE_BYTES = 40
"""Name, version and challenge: what a call server says to whoever connects."""
STRANGER = """
import socket, sys
host, port, frame = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
said = b""
try:
    with socket.create_connection((host, port), 10) as link:
        link.settimeout(20)
        link.sendall(frame)
        while got := link.recv(4096):
            said += got
    print("closed", len(said))
except ConnectionError:
    print("closed", len(said))
"""
HELD = """
import os, sys
inodes = {line.split()[9] for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]
          if line.split()[3] == "0A" and line.split()[1].endswith(":%04X" % int(sys.argv[1]))}
print(len(inodes))
"""


class Trap:
    """Unpickled, it makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@dataclass
class Across:
    """A job whose loop is on one machine and whose other role on another one; ``stranger`` is no part of the site."""

    site: Site
    stranger: Machine
    job: str
    out: Path

    def until(self, look: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        looked = time.monotonic()
        while not look():
            time.sleep(0.2)
            if time.monotonic() > looked + 5.0:
                looked = time.monotonic()
                over = self.site.json("show", self.job)["state"] in ("SUCCEEDED", "FAILED", "CANCELLED")
                assert not over and looked < deadline, self.site.rota("events", self.job)

    def answers(self) -> list[tuple[int, str, int]]:
        lines = (self.out / "answers").read_text().splitlines() if (self.out / "answers").exists() else []
        return [(int(n), host, int(pid)) for n, host, pid in (line.split() for line in lines)]

    def machine(self, name: str) -> Machine:
        return next(one for one in self.site.machines if one.name == name)

    def started(self) -> list[dict[str, Any]]:
        return self.site.json("events", self.job, "--type", "InstanceStarted")["items"]


@pytest.fixture(scope="module")
def across() -> Iterator[Across]:
    with bed(4, subnet=79) as machines, site(machines[:3], shared=True) as made:
        made.put("remote_calls.py", Path(str(remote_calls.__file__)).read_text())
        made.rota(
            "nodes", "cordon", made.head.name, "--yes"
        )  # a test ends the machine of a role, and the service stays
        job = made.submit(JOB.format(home=made.home))
        found = Across(made, machines[3], job, made.home / "out")
        found.until(lambda: len(found.answers()) > 20)
        made.rota("nodes", "uncordon", made.head.name, "--yes")
        yield found


def test_a_call_goes_to_the_other_machine_and_brings_arrays_and_cancellation(across: Across) -> None:
    hosts = {host for _, host, _ in across.answers()}
    (callee,) = hosts
    caller = next(one["node"] for one in across.started() if one["role"] == "loop")
    assert callee != caller
    assert (across.out / "total").read_text() == "True True"
    assert (across.out / "held").read_text() == "TimedOut"
    across.until((across.out / "cancelled").exists)


def test_a_stranger_is_refused_at_every_call_server_before_anything_is_unpickled(across: Across) -> None:
    trap = f"/tmp/trap-{os.getpid()}"
    frame = b"".join(map(bytes, encode(1, CALL, pack(Trap(trap))))).hex()
    addresses = [one["address"] for one in across.started()]
    assert len(addresses) == 2 and all(addresses)
    for address in addresses:
        host, _, port = address.rpartition(":")
        owner = next(one for one in across.site.machines if one.address == host)
        assert owner.run("python3", "-c", HELD, port).strip() == "1", "it listens at the address of its node"
        for _ in range(FAILURES_MAX + 1):
            said = across.stranger.run("python3", "-c", STRANGER, host, port, frame).split()
            assert said[0] == "closed" and int(said[1]) == HANDSHAKE_BYTES, "the challenge, and nothing after it"
        assert not owner.path(trap).exists()
    before = len(across.answers())
    across.until(lambda: len(across.answers()) > before + 20)


@long
def test_a_cable_that_is_cut_and_plugged_in_again_costs_no_call_and_no_restart(across: Across) -> None:
    callee = across.machine(across.answers()[-1][1])
    before = across.answers()
    callee.link(up=False)
    time.sleep(CUT_S)
    cut = len(across.answers())
    callee.link(up=True)
    across.until(lambda: len(across.answers()) > cut + 20)
    after = across.answers()
    assert [n for n, _, _ in after] == list(range(len(after)))
    assert {(host, pid) for _, host, pid in after} == {before[-1][1:]}
    _no_call_ran_twice(across)


@long
def test_calls_to_a_machine_without_power_end_and_go_on_at_another_one(across: Across) -> None:
    first = across.answers()[-1][1]
    callee = across.machine(first)
    callee.link(up=False)  # nothing says that the connections are closed
    callee.kill()
    across.until(lambda: any(host not in {first, "CallLost"} for _, host, _ in across.answers()[-1:]))
    after = across.answers()
    assert [n for n, _, _ in after] == list(range(len(after))), "each call ended once"
    assert sum(host == "CallLost" for _, host, _ in after) <= 1, "the one that was under way"
    _no_call_ran_twice(across)
    (across.out / "end").touch()
    assert across.site.ended(across.job)["state"] == "SUCCEEDED"


def _no_call_ran_twice(across: Across) -> None:
    runs = Counter(map(int, (across.out / "ran").read_text().split()))
    assert [n for n, count in runs.items() if count > 1] == []
