"""An installation over several machines of a bed: an engine on all of them, the service on the first.

The machines share no folder: each has a home of its own in its own ``/tmp``. With ``shared`` all have one home. The
engine is one of ``ray start``; with ``joined`` it is Rota's own, the machines join it, and homes survive a power cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.machines.bed import DISK, Machine

long = pytest.mark.skipif(
    not (os.environ.get("ROTA_MACHINES") or os.environ.get("ROTA_DEEP")), reason="takes a minute or more: make machines"
)
LIMIT_S = 240.0
GCS_PORT = 6399
CPUS = 4
SHARED = "/var/tmp"
"""A folder of this computer that all machines see."""
_PORTS = {
    "dashboard-agent-grpc": 22365,
    "dashboard-agent-listen": 22366,
    "runtime-env-agent": 22367,
    "metrics-export": 22368,
}
RAY_ENVIRON = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "180", "RAY_worker_niceness": "0"}
"""The last as docs/how-to/run-on-a-ray-cluster.md says: the computer may have more to do."""
_RAY_START = """
from ray._private import node
from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port
from ray.scripts.scripts import main

def started(self, start=node.Node.start_ray_processes):
    folder, port = self.get_session_dir_path(), self.dashboard_agent_listen_port
    persist_port(folder, self.node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
    start(self)

node.Node.start_ray_processes = started
main()
"""
_GIVEN = tuple(f"--{name}-port={port}" for name, port in _PORTS.items())
RAY_START = (sys.executable, "-c", _RAY_START, "start", "--disable-usage-stats", *_GIVEN)
"""``ray start`` whose raylet has the ports of its agents: for one that an agent chooses it waits 15 s, and aborts."""
_ROTA = (sys.executable, "-m", "rota")
_WAIT = "import json, sys, rota; print(json.dumps(rota.Client().wait(sys.argv[1], timeout_s=float(sys.argv[2]))))"
"""One process that waits: a command of each look took half a processor from what was waited for."""


@dataclass
class Site:
    """The first of the machines is the head of the engine and has the service, whose ``$ROTA_HOME`` is ``home``.

    ``code`` is a folder of the head, where jobs start. Both are paths of the head; a shared home is one of all.
    """

    machines: Sequence[Machine]
    home: Path
    code: Path
    shared: bool = False
    joined: bool = False
    token: str = ""
    """With which machines join."""

    @property
    def head(self) -> Machine:
        """The machine of the service."""
        return self.machines[0]

    @property
    def environ(self) -> dict[str, str]:
        """What every process on the head has in its environment."""
        return self.environ_of(self.head)

    def environ_of(self, machine: Machine) -> dict[str, str]:
        """What every process of the installation on a machine has in its environment."""
        ray = {"RAY_DEDUP_LOGS": "0", **RAY_ENVIRON}
        if not self.joined:  # a token in ~/.ray, which all machines see, would make the head alone ask for it
            ray["RAY_AUTH_MODE"] = "disabled"
        return {"ROTA_HOME": self.home_of(machine), **ray}

    def home_of(self, machine: Machine) -> str:
        """``$ROTA_HOME`` of a machine."""
        own = not (self.shared or self.joined) and machine is not self.head
        return f"/tmp/rota-{machine.name}" if own else str(self.home)

    def put(self, name: str, text: str) -> None:
        """Write a file into ``code`` on the head."""
        path = self.head.path(str(self.code / name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def up(self) -> None:
        """Start the service, or start it again."""
        head = self.head.address
        self.rota("up", *(["--listen", head] if self.joined else ["--ray", f"{head}:{GCS_PORT}"]))

    def join(self, machine: Machine, cpus: int) -> None:
        """Make a machine part of the engine, under its host name."""
        if self.joined:
            how = ("--token", self.token, "--cpus", str(cpus))
            machine.run(*_ROTA, "join", self.head.address, *how, env=self.environ_of(machine), timeout_s=LIMIT_S)
            return
        given = ["--num-cpus", str(cpus), "--labels", f"rota-host={machine.name}", "--node-ip-address", machine.address]
        where = ["--head", "--port", str(GCS_PORT), "--include-dashboard", "false"]
        if machine is not self.head:
            where = ["--address", f"{self.head.address}:{GCS_PORT}"]
        machine.run(*RAY_START, *where, *given, env=self.environ_of(machine), timeout_s=LIMIT_S)

    def leave(self, machine: Machine) -> None:
        """End what ``join`` started on a machine."""
        machine.run(*_ROTA, "leave", env=self.environ_of(machine), timeout_s=LIMIT_S)

    def rota(self, *argv: str, ok: bool = True) -> str:
        """Run the command line on the head; what it printed."""
        return self.head.run(*_ROTA, *argv, env=self.environ, timeout_s=LIMIT_S, ok=ok)

    def json(self, *argv: str) -> Any:
        """The document that a command printed."""
        return json.loads(self.rota(*argv, "--json"))

    def until(self, look: Callable[[], Any], wanted: Any) -> None:
        """Wait until ``look`` gives what is wanted; fails with what it gave last."""
        deadline = time.monotonic() + LIMIT_S
        while (seen := look()) != wanted:
            assert time.monotonic() < deadline, seen
            time.sleep(1.0)  # a look is a command: a third of a second of a core

    def healthy(self) -> None:
        """Wait until each machine is a healthy node."""
        wanted = {machine.name: "healthy" for machine in self.machines}
        self.until(lambda: {one["id"]: one["state"] for one in self.json("nodes")["items"]}, wanted)

    def tensors(self) -> dict[str, list[str]]:
        """Names that the tensor stores of the machines have, by machine."""
        code = "import json; from rota import tensors; print(json.dumps([r.name for r in tensors.connect().ls()]))"
        return {
            machine.name: json.loads(machine.run(sys.executable, "-c", code, env=self.environ_of(machine)))
            for machine in self.machines
        }

    def submit(self, text: str) -> str:
        """Submit a job file; the id of the job."""
        self.put("job.yaml", text)
        return str(self.json("run", str(self.code / "job.yaml"), "-d")["id"])

    def ended(self, job: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Wait for the end of a job; its document. Fails with what the job did and wrote."""
        argv = (sys.executable, "-c", _WAIT, job, str(limit_s))
        try:
            document: dict[str, Any] = json.loads(self.head.run(*argv, env=self.environ, timeout_s=limit_s + LIMIT_S))
        except AssertionError as error:
            did = (self.rota(verb, job, ok=False) for verb in ("why", "events", "logs"))
            raise AssertionError("\n".join((str(error), *did))) from None
        return document


@contextlib.contextmanager
def site(
    machines: Sequence[Machine], *, shared: bool = False, joined: bool = False, cpus: Sequence[int] | None = None
) -> Iterator[Site]:
    """An installation over the machines, up and with a healthy node for each; it is down after the block.

    ``cpus`` are the cores of each; without it all have 4. A head with ``joined`` has those that it has.
    """
    common = Path(tempfile.mkdtemp(prefix="r", dir=SHARED)) if shared else Path(f"{DISK if joined else '/tmp'}/rota")
    made = Site(machines, common, common / "code" if shared else Path("/tmp/code"), shared, joined)
    each = list(zip(machines, cpus or [CPUS] * len(machines), strict=True))
    try:
        if joined:
            made.up()
            made.token = made.json("token", "create", "--role", "machine")["token"]
        else:
            made.join(*each[0])
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda one: made.join(*one), each[1:]))
        if not joined:
            made.up()
        made.healthy()
        yield made
    finally:
        if made.head.pid:
            made.rota("down", "--force", ok=False)
        if shared:
            shutil.rmtree(common, ignore_errors=True)
