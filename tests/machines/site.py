"""An installation over several machines of a bed: an engine on all of them, the service on the first."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.machines.bed import Machine

LIMIT_S = 240.0
GCS_PORT = 6399
SHARED = "/var/tmp"
"""A folder of this computer that all machines see."""
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_ROTA = (sys.executable, "-m", "rota")


@dataclass
class Site:
    """``home`` is ``$ROTA_HOME`` of all machines; the first of them is the head of the engine and has the service."""

    machines: Sequence[Machine]
    home: Path

    @property
    def head(self) -> Machine:
        """The machine of the service."""
        return self.machines[0]

    @property
    def environ(self) -> dict[str, str]:
        """What every process of the installation has in its environment."""
        return {"ROTA_HOME": str(self.home), "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}

    def join(self, machine: Machine, cpus: int = 4) -> None:
        """Make a machine part of the engine, under its host name."""
        given = ["--num-cpus", str(cpus), "--labels", f"rota-host={machine.name}", "--node-ip-address", machine.address]
        where = ["--head", "--port", str(GCS_PORT), "--include-dashboard", "false"]
        if machine is not self.head:
            where = ["--address", f"{self.head.address}:{GCS_PORT}"]
        machine.run(*_RAY, "start", *where, *given, "--disable-usage-stats", env=self.environ, timeout_s=LIMIT_S)

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
            time.sleep(0.3)

    def submit(self, text: str) -> str:
        """Submit a job file; the id of the job."""
        path = self.home / "job.yaml"
        path.write_text(text)
        return str(self.json("run", str(path), "-d")["id"])

    def ended(self, job: str) -> dict[str, Any]:
        """Wait for the end of a job; its document."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            document: dict[str, Any] = self.json("show", job)
            if document["state"] in ("SUCCEEDED", "FAILED", "CANCELLED"):
                return document
            assert time.monotonic() < deadline, document
            time.sleep(0.5)


@contextlib.contextmanager
def site(machines: Sequence[Machine]) -> Iterator[Site]:
    """An installation over the machines, up and with a healthy node for each; it is down after the block."""
    made = Site(machines, Path(tempfile.mkdtemp(prefix="r", dir=SHARED)))
    try:
        for machine in machines:
            made.join(machine)
        made.rota("up", "--ray", f"{made.head.address}:{GCS_PORT}")
        wanted = {machine.name: "healthy" for machine in machines}
        made.until(lambda: {one["id"]: one["state"] for one in made.json("nodes")["items"]}, wanted)
        yield made
    finally:
        if made.head.pid:
            made.rota("down", "--force", ok=False)
        shutil.rmtree(made.home, ignore_errors=True)
