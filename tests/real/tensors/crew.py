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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rota.runtime import environ
from rota.runtime.probe import stacks_of
from rota.runtime.process import identify
from rota.tensors.api.store import Plane
from rota.tensors.locks import is_alive, noted_in

WAIT_S = 60.0
DEEP = os.environ.get("ROTA_DEEP") == "1"
WAITING = "os.read(os.pipe()[0], 1)"
HOLDING = f"v = plane.get('w', as_='numpy'); print('holding', flush=True); {WAITING}"


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

    def __init__(self, folder: Path, environment: dict[str, str], *words: str) -> None:
        self.folder = folder
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
        self, code: str, *, home: Path, namespace: str, die_at: str = "", label: str = "", epoch: int = 0,
        device: str = "", env: dict[str, str] | None = None,
    ) -> int:  # fmt: skip
        """Start a process; its pid."""
        self._count += 1
        out = self.folder / f"out-{self._count}"
        place = f"home={str(home)!r}, namespace={namespace!r}, device={device or None!r}"
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

    def run(self, code: str, **how: Any) -> int:
        """Run a process to its end; its status. A Python error fails the test with its traceback."""
        pid = self.start(code, **how)
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
        """Wait until a process has printed a word; if it does not, what each open process says and where it stands."""
        try:
            return wait_until(lambda: self._said(pid, word))
        except AssertionError as error:
            alive = [found for one in self._open if (found := identify(one))]
            told = [f"== {one.pid}\n{self.output(one.pid)}\n{stacks_of(one)}" for one in alive]
            raise AssertionError(f"{word!r} of {pid}: {error}\n" + "\n".join(told)) from None

    def _said(self, pid: int, word: str) -> str:
        text = self.output(pid)
        return text if word in text else ""

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

    def __init__(self, actors: Actors, home: Path, namespace: str) -> None:
        self._actors = actors
        self._where: dict[str, Any] = {"home": home, "namespace": namespace}
        self._started: list[int] = []

    def start(self, code: str, **how: Any) -> int:
        pid = self._actors.start(code, **self._where, **how)
        self._started.append(pid)
        return pid

    def run(self, code: str, **how: Any) -> int:
        return self._actors.run(code, **self._where, **how)

    def stopped(self, pid: int) -> int:
        """Wait until a process has stopped itself; the same pid."""
        wait_until(lambda: "T (stopped)" in Path(f"/proc/{pid}/status").read_text())
        return pid

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


def stop_housekeeping(plane: Plane) -> None:
    """From now on a plane releases and sweeps only when it is told to."""
    plane._session._gone.set()
    assert plane._session._thread is not None
    plane._session._thread.join()
    plane._session._gone.clear()


def clean(plane: Plane) -> dict[str, Any]:
    """Sweep and trim, then the stats; no invariant may be broken."""
    plane.gc()
    assert plane.fsck()["violations"] == []
    return plane.stats()


class Cases:
    """Counts the fault cases of a test by group, and looks after each what it left behind."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record

    def __call__(self, group: int, plane: Plane, default: int = 1, deep: int = 1) -> Iterator[int]:
        """``for round_ in cases(...)``: the body is one case of a group of docs/explanation/tensor-faults.md."""
        for round_ in repeats(default, max(default, deep)):
            yield round_
            self.done(group, plane)

    def done(self, group: int, plane: Plane) -> None:
        """A case ended. No invariant is violated, and once all names are deleted there is no lease, version, byte or
        range of a device but what views of this process still hold, no dead client, and no file nobody knows."""
        assert plane.fsck()["violations"] == []
        for row in plane.ls():
            plane.delete(row.name)
        try:
            wait_until(lambda: left_over(plane) == {})
        except AssertionError:
            raise AssertionError(f"left: {left_over(plane)}") from None
        assert plane.fsck()["violations"] == []
        self._record("fault group", group)


def left_over(plane: Plane) -> dict[str, Any]:
    """What a namespace without names should not have: a dead client, a version or a byte that no view here holds."""
    plane._session.release_ended()  # what the housekeeping does, which a test may have stopped
    plane._space.claims.shed()
    plane._session.sweep()
    dump = plane._space.registry.dump()
    held = {version for version, _ in plane._space.leases.live()}
    versions = {int(key[2:]): fields for key, fields in dump.items() if key.startswith("v:")}
    leases = {int(v) for key, leased in dump.items() if key.startswith("c:") and key.endswith(":l") for v in leased}
    leases |= set(noted_in(plane._space.clients))
    used = int(dump.get("bytes", {}).get("used", 0)) - sum(int(versions[v]["blk"]) for v in held & versions.keys())
    devices = plane._space.devices
    ranges = devices.ask(devices.uuid, {"op": "blocks"}, start=False).get("blocks", ()) if devices else ()
    found = {
        "versions": set(versions) ^ held, "leases": leases ^ held, "bytes": used,
        "clients": {each for each in dump["clients"] if not is_alive(plane._space.clients, each)},
        "ranges": {version for version, *_ in ranges} - held, "names": [key for key in dump if key.startswith("n:")],
        "pending": [key for key in dump if key.startswith("c:") and key.endswith((":o", ":d"))],
        "files": {seg for seg, _ in plane._space.segments.files()} - dump.get("segs", set()),
    }  # fmt: skip
    return {what: value for what, value in found.items() if value}


def joined(plane: Plane) -> Plane:
    """One client more of the namespace, in this process."""
    return Plane.join(environ.Home.of(plane.home), "", plane.namespace, sealed=False, keep=True)


def end(plane: Plane) -> None:
    """Every invariant holds; without its names the namespace has no version, no lease, no dead client and no file."""
    assert plane.fsck()["violations"] == []
    for row in plane.ls():
        plane.delete(row.name, missing_ok=True)
    wait_until(lambda: left_over(plane) == {})
    plane.gc()
    assert len(plane._space.leases) or not list(plane._space.segments.files())
