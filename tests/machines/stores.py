"""Processes that use the tensor store on machines of a bed, without an engine: each runs a script and answers lines."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.machines.bed import Machine

KEY = "6b" * 32
_HEAD = """
import json, os, sys, threading, time
import numpy as np
from rota import tensors
from rota.runtime import directory
from rota.tensors import transport
from rota.tensors.errors import *
known = directory.FixedDirectory({host!r}, {address!r}, bytes.fromhex({key!r}), json.loads({stores!r}))
directory.use(known)
plane = tensors.connect(home="/tmp/home", keep=True, label="job/" + {host!r})
def say(**what): print("SAID", json.dumps(what), flush=True)
"""


class Crew:
    """Starts scripts on machines. ``plane``, ``transport``, ``np`` and ``say(**fields)`` are there."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.machines = list(machines)
        self.stores: dict[str, str] = {}
        self._open: list[Script] = []

    def start(self, machine: Machine, code: str, *, key: str = KEY) -> Script:
        """Run ``code`` on a machine; it knows the tensor servers that were started so far."""
        stores = json.dumps(self.stores)
        head = _HEAD.format(host=machine.name, address=machine.address, key=key, stores=stores)
        child = machine.spawn(sys.executable, "-u", "-c", head + textwrap.dedent(code), env={"ROTA_HOME": "/tmp/home"})
        made = Script(child)
        self._open.append(made)
        return made

    def serve(self) -> None:
        """Start the tensor server of every machine."""
        code = "say(store=transport.own_store(plane))"
        scripts = {machine.name: self.start(machine, code) for machine in self.machines}
        for name, script in scripts.items():
            self.stores[name] = script.said()["store"]

    def stat(self, machine: Machine, asker: Machine | None = None) -> dict[str, Any]:
        """What the tensor server of a machine has sent."""
        code = f"say(**transport.ask({self.stores[machine.name]!r}, {{'op': 'stat'}}))"
        return self.start(asker or machine, code).said()

    def close(self) -> None:
        """End what still runs."""
        for script in self._open:
            script.end()


class Script:
    """One running script."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child
        self._lines: list[str] = []
        self._rest = ""

    def said(self, timeout_s: float = 90.0) -> dict[str, Any]:
        """The next thing it says; fails with its output when it ends or is silent instead."""
        assert self.child.stdout is not None
        deadline, fd = time.monotonic() + timeout_s, self.child.stdout.fileno()
        while True:
            while "\n" in self._rest:
                line, _, self._rest = self._rest.partition("\n")
                self._lines.append(line)
                if line.startswith("SAID "):
                    found: dict[str, Any] = json.loads(line[5:])
                    return found
            left_s = deadline - time.monotonic()
            assert left_s > 0 and select.select([fd], [], [], left_s)[0], (
                f"silent for {timeout_s:g} s:\n{self.output()}"
            )
            data = os.read(fd, 65536).decode()
            assert data, f"it ended:\n{self.output()}"
            self._rest += data

    def output(self) -> str:
        """All that it wrote so far."""
        return "\n".join([*self._lines, self._rest])[-4000:]

    def end(self) -> None:
        """Kill it if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.child.kill()
        self.child.wait()
        assert self.child.stdout is not None
        self.child.stdout.close()


@contextlib.contextmanager
def crew(machines: Sequence[Machine]) -> Iterator[Crew]:
    """Scripts on these machines; all have ended after the block."""
    made = Crew(machines)
    try:
        made.serve()
        yield made
    finally:
        made.close()
