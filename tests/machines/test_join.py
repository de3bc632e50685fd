"""Machines join an installation by its address and a token, come back after faults, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.machines.bed import Machine, bed
from tests.machines.site import RAY_ENVIRON, RAY_START, long

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

AGENT = "rota.service.process.joined"
LIMIT_S = 180.0
ROTA = (sys.executable, "-m", "rota")
ENVIRON = {"ROTA_HOME": "/tmp/h", **RAY_ENVIRON}
"""The same path on each machine, and a folder of its own there: ``/tmp`` is not shared."""
ONE_ON_EACH = """
name: wide
roles:
  main:
    run: hostname
    replicas: 2
    resources: {cpus: 1}
    apart: [{role: self, level: node}]
"""


def rota(machine: Machine, *argv: str, ok: bool = True) -> str:
    return machine.run(*ROTA, *argv, env=ENVIRON, timeout_s=LIMIT_S, ok=ok)


def refusal(machine: Machine, *argv: str) -> dict[str, Any]:
    """The error document of a command that is refused."""
    return json.loads(rota(machine, *argv, "--json", ok=False))


def until(look: Callable[[], Any], wanted: Any, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while (seen := look()) != wanted:
        assert time.monotonic() < deadline, seen
        time.sleep(0.3)


@dataclass
class Pair:
    """The machine of the service, another one, and a token that may join it."""

    head: Machine
    other: Machine
    token: str

    def states(self) -> dict[str, str]:
        return {one["id"]: one["state"] for one in json.loads(rota(self.head, "nodes", "--json"))["items"]}

    def raylets(self) -> set[int]:
        """Pids of the node of the engine on the other machine, as this computer counts."""
        return {pid for pid, line in self.other.processes().items() if "raylet/raylet" in line}

    def join(self, *more: str) -> dict[str, Any]:
        return json.loads(rota(self.other, "join", self.head.address, "--token", self.token, *more, "--json"))


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with bed(2, subnet=79) as (head, other):
        rota(head, "up", "--listen", head.address)
        token = json.loads(rota(head, "token", "create", "--role", "machine", "--json"))["token"]
        yield Pair(head, other, token)
        rota(head, "down", "--force", ok=False)


@long
def test_what_is_in_the_way_of_a_join_is_named_with_its_remedy_and_leaves_nothing(pair: Pair) -> None:
    head, other = pair.head, pair.other
    wrong = refusal(other, "join", head.address, "--token", "rota_x_" + "y" * 40)
    assert (wrong["code"], wrong["message"]) == ("NO_TOKEN", "invalid or expired token")
    closed = refusal(other, "join", f"{head.address}:7799", "--token", pair.token)
    assert closed["code"] == "NOT_REACHABLE" and "7799" in closed["message"] and "rota up --listen" in closed["hint"]
    taken = refusal(other, "join", head.address, "--token", pair.token, "--name", "m0")
    assert taken["code"] == "CONFLICT" and "m0 is taken" in taken["message"] and "--name" in taken["hint"]
    assert other.processes() == {}


@long
def test_a_token_that_joins_machines_does_nothing_else(pair: Pair) -> None:
    said = refusal(pair.other, "nodes", "--server", f"http://{pair.head.address}:7700", "--token", pair.token)
    assert said["code"] == "NOT_ALLOWED" and "joining machines alone" in said["message"]


@long
def test_a_machine_joins_works_comes_back_and_leaves(pair: Pair) -> None:
    joined = pair.join("--label", "rack=r1", "--cpus", "3")
    assert (joined["state"], joined["host"], joined["address"]) == ("joined", "m1", pair.other.address)
    assert pair.states() == {"m0": "healthy", "m1": "healthy"}
    (row,) = [one for one in json.loads(rota(pair.head, "nodes", "--json"))["items"] if one["id"] == "m1"]
    assert row["cpus"] == 3
    # 1. a job on both
    pair.head.path("/tmp/wide.yaml").write_text(ONE_ON_EACH)
    job = json.loads(rota(pair.head, "run", "/tmp/wide.yaml", "-d", "--json"))["id"]
    until(lambda: json.loads(rota(pair.head, "show", job, "--json"))["state"], "SUCCEEDED")
    # what each machine does and what lies between them, measured there
    used = json.loads(rota(pair.head, "nodes", "show", "m1", "--json"))
    assert pair.other.address in {one["address"] for one in used["network"]} and used["memory_used_bytes"] > 0
    checked = json.loads(rota(pair.head, "doctor", "--nodes", "--json", ok=False))
    seen = [(one["source"], one["target"], one["error"]) for one in checked["pairs"]]
    assert seen == [("m0", "m1", ""), ("m1", "m0", "")]
    assert all(one["bytes_per_s"] > 1e6 and abs(one["skew_s"]) < 0.5 for one in checked["pairs"])
    assert {one["name"] for one in checked["items"]} <= {"name", "bandwidth"}, "m1 is in no table of names"
    # 2. its node dies: another one is started
    (raylet,) = pair.raylets()
    os.kill(raylet, signal.SIGKILL)
    until(lambda: len(pair.raylets() - {raylet}), 1)
    until(pair.states, {"m0": "healthy", "m1": "healthy"})
    # 3. the installation ends: so does all but the agent and its watcher, which bring it back with the service, and the
    # registry, which keeps the state of commits
    rota(pair.head, "down")
    until(lambda: sorted(AGENT in line for line in pair.other.processes().values()), [False, True, True], 60.0)
    rota(pair.head, "up", "--listen", pair.head.address)
    until(pair.states, {"m0": "healthy", "m1": "healthy"})
    # 4. it leaves
    left = json.loads(rota(pair.other, "down", "--json"))
    assert (left["state"], left["ended"]) == ("left", ["agent", "engine", "registry"])
    assert pair.other.processes() == {} and pair.other.left_in_memory() == []
    until(pair.states, {"m0": "healthy"})


@long
def test_machines_of_a_ray_cluster_need_no_label() -> None:
    """``ray start`` as anybody runs it: nodes have their host names, cells come from Ray's labels and the file."""
    ray = (*RAY_START, "--num-cpus", "4")
    with bed(2, subnet=80) as (head, other):
        at = ("--node-ip-address", head.address, "--head", "--port", "6379", "--include-dashboard", "false")
        head.run(*ray, *at, env=ENVIRON, timeout_s=LIMIT_S)
        labels = ("--labels", "ray.io/availability-zone=z1")
        there = ("--node-ip-address", other.address, "--address", f"{head.address}:6379")
        other.run(*ray, *there, *labels, env=ENVIRON, timeout_s=LIMIT_S)
        head.run("mkdir", "-p", "/tmp/h")
        head.path("/tmp/h/topology.yaml").write_text("m0: {rack: r7}\n")
        rota(head, "up", "--ray", f"{head.address}:6379")

        def rows() -> dict[str, tuple[str, list[str]]]:
            items = json.loads(rota(head, "nodes", "--json"))["items"]
            return {one["id"]: (one["state"], one["cells"]) for one in items}

        until(rows, {"m0": ("healthy", ["r7"]), "m1": ("healthy", ["z1"])})
        head.path("/tmp/wide.yaml").write_text(ONE_ON_EACH)
        job = json.loads(rota(head, "run", "/tmp/wide.yaml", "-d", "--json"))["id"]
        until(lambda: json.loads(rota(head, "show", job, "--json"))["state"], "SUCCEEDED")
        ran = json.loads(rota(head, "show", job, "--json"))["instances"]
        assert sorted(one["node"] for one in ran) == ["m0", "m1"]
        rota(head, "down", "--force", ok=False)
