"""Processes of a test that can be killed at a named point, and waits with a limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rota.tensors.plane import Plane

WAIT_S = 10.0
DEEP = os.environ.get("ROTA_DEEP") == "1"


def repeats(default: int, deep: int) -> range:
    """How often a case runs: few by default, many with ROTA_DEEP=1."""
    return range(deep if DEEP else default)


def wait_until(what: Callable[[], Any], limit_s: float = WAIT_S) -> Any:
    """Wait for a condition, with a limit; its value."""
    deadline = time.monotonic() + limit_s
    while not (value := what()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(0.002)
    return value


class Actors:
    """Processes that run a piece of code; ``plane`` in it is a plane of the test's namespace."""

    def __init__(self, home: Path, folder: Path, environment: dict[str, str], *words: str) -> None:
        self.home, self.folder = home, folder
        self._namespace = "default"
        here = Path(__file__).with_name("zygote.py")
        self._zygote = subprocess.Popen(
            [sys.executable, str(here), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._count = 0
        self._open: set[int] = set()
        self.outputs: dict[int, Path] = {}

    def start(
        self, code: str, *, namespace: str, die_at: str = "", label: str = "", epoch: int = 0, device: str = "",
        env: dict[str, str] | None = None,
    ) -> int:  # fmt: skip
        """Start a process; its pid."""
        self._count += 1
        out = self.folder / f"out-{self._count}"
        place = f"home={str(self.home)!r}, namespace={namespace!r}, device={device or None!r}"
        joined = f"plane = connect({place}, label={label!r}, epoch={epoch})"
        body = f"from rota.tensors import connect\n{joined}\n" + textwrap.dedent(code)
        env = {"ROTA_TENSORS_DIE_AT": die_at, **(env or {})}
        pid = self._ask({"run": body, "env": env, "out": str(out)})["pid"]
        self._open.add(pid)
        self.outputs[pid] = out
        return pid

    def wait(self, pid: int) -> int:
        """Exit status of a process, negative for a signal."""
        self._open.discard(pid)
        return self._ask({"wait": pid})["status"]

    def run(self, code: str, *, namespace: str, **how: Any) -> int:
        """Run a process to its end; its status. A Python error fails the test with its traceback."""
        pid = self.start(code, namespace=namespace, **how)
        status = self.wait(pid)
        assert status <= 0, self.output(pid)
        return status

    def kill(self, pid: int) -> None:
        """SIGKILL a process and wait for its end."""
        os.kill(pid, signal.SIGKILL)
        assert self.wait(pid) == -signal.SIGKILL

    def output(self, pid: int) -> str:
        """What a process printed so far."""
        return self.outputs[pid].read_text() if self.outputs[pid].exists() else ""

    def says(self, pid: int, word: str) -> str:
        """Wait until a process has printed a word."""
        return wait_until(lambda: self.output(pid) if word in self.output(pid) else "")

    def close(self) -> None:
        for pid in list(self._open):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.wait(pid)
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait(WAIT_S)
        assert self._zygote.stdout is not None
        self._zygote.stdout.close()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(command) + "\n")
        self._zygote.stdin.flush()
        return json.loads(self._zygote.stdout.readline())


class Crew:
    """The actors of one test."""

    def __init__(self, actors: Actors, namespace: str) -> None:
        self._actors, self._namespace = actors, namespace
        self._started: list[int] = []

    def start(self, code: str, **how: Any) -> int:
        pid = self._actors.start(code, namespace=self._namespace, **how)
        self._started.append(pid)
        return pid

    def run(self, code: str, **how: Any) -> int:
        return self._actors.run(code, namespace=self._namespace, **how)

    def wait(self, pid: int) -> int:
        self._started.remove(pid)
        return self._actors.wait(pid)

    def kill(self, pid: int) -> None:
        self._started.remove(pid)
        self._actors.kill(pid)

    def output(self, pid: int) -> str:
        return self._actors.output(pid)

    def says(self, pid: int, word: str) -> str:
        return self._actors.says(pid, word)

    def end(self) -> None:
        for pid in list(self._started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.wait(pid)


def clean(plane: Plane) -> dict[str, Any]:
    """Sweep and trim, then the stats; no invariant may be broken."""
    plane.gc()
    assert plane.fsck()["violations"] == []
    return plane.stats()
