"""Calls from role to role beside bare Ray in one run: one call, a group of eight, 1 MiB, 64 at once, between machines.

``python benchmarks/calls.py [--rounds N] [--calls N] [--starts N]`` prints one JSON document. Both sides call from an
actor on the same warm engine; no role imports torch. Rounds alternate, a figure is the median over rounds and the ratio
is ours over bare Ray. The bare group call is eight ``remote()`` and one gather, the bare start an actor until its first
answer. ``64 at once`` are as many callers of one loop, each of which calls one of eight instances again and again.
Machines are network namespaces on this computer (``tests/machines``, needs root); without them that row is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rota.runtime.environ import Home
from rota.runtime.event_log.interface import EventLog
from rota.runtime.ray.engine import EngineFiles, client_environment
from rota.service.config import load_settings
from rota.service.process import daemon
from rota.spec.events import Record
from rota.spec.ids import JobId
from run import Row, hand_in

WORKLOADS = Path(__file__).resolve().parent.parent / "tests" / "real" / "workloads"
GROUP = 8
WARM_CALLS = 300
AT_ONCE = 64
KINDS = ("single", "group", "large", "flood")
LIMIT_S = 180.0
SETTLE_S = 8.0
"""Between two starts: what was started ends, and both sides have their idle processes again."""
TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED")


class Records:
    """All records of a job, or of everything: one ``read`` of a log gives a page of them. Each is read once."""

    def __init__(self, log: EventLog, job: JobId | None = None) -> None:
        self._log, self._job = log, job
        self._read: list[Record] = []

    def now(self) -> Sequence[Record]:
        """Those that are there now, in order. Raises what the log raises."""
        while page := self._log.read(after=self._read[-1].number if self._read else 0, job=self._job):
            self._read += page
        return self._read


def client_of(home: Home) -> tuple[str, dict[str, str]]:
    """The address of the engine of an installation, and the environment of a process that connects to it."""
    state = EngineFiles(home.root).states()[0]
    changes = client_environment(state.token_path, state.folder)
    kept = {name: value for name, value in os.environ.items() if name not in changes}
    return state.address, kept | {name: value for name, value in changes.items() if value is not None}


class Bare:
    """Bare Ray's side: an async actor that calls other actors, in a child process of its own."""

    def __init__(
        self,
        address: str,
        environment: Mapping[str, str],
        calls: int,
        kinds: Sequence[str] = KINDS,
        on: Callable[[Sequence[str]], Sequence[str]] = list,
        there: str = "",
    ) -> None:
        given = ["--calls", str(calls), "--kinds", ",".join(kinds), "--there", there]
        words = on([sys.executable, __file__, "--bare", address, *given])
        self.child = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(self.close)
        assert self.ask("ready") == {}

    def ask(self, what: str) -> dict[str, float]:
        """Run one round there; its seconds."""
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.stdin.write(f"{what}\n")
        self.child.stdin.flush()
        for line in self.child.stdout:
            if line.startswith("{"):  # Ray may say something on stdout too
                return json.loads(line)
        raise RuntimeError("bare Ray ended")

    def close(self) -> None:
        """End the child; its actors end with it."""
        self.child.kill()
        self.child.wait(LIMIT_S)


def bare_main(address: str, calls: int, kinds: Sequence[str], there: str) -> None:
    """The child: rounds of bare Ray, one line of JSON each. ``there`` is the host of whom it calls."""
    import numpy as np
    import ray

    ray.init(address, log_to_driver=False, logging_level="error")

    class Echo:
        async def echo(self, value: Any) -> Any:
            return value

        async def size(self, value: Any) -> int:
            return len(value)

    class Caller:
        def __init__(self, one: Any, eight: list[Any]) -> None:
            self.one, self.eight = one, eight

        async def call(self, kind: str, number: int) -> Any:
            match kind:
                case "single":
                    return await self.one.echo.remote(b"x" * 100)
                case "group":
                    return await asyncio.gather(*(each.echo.remote(b"x" * 100) for each in self.eight))
                case "large":
                    return await self.one.size.remote(np.ones(1 << 20, np.uint8))
                case _:
                    return await self.eight[number % GROUP].echo.remote(b"x" * 100)

        async def repeated(self, kind: str, number: int, count: int) -> None:
            for _ in range(count):
                await self.call(kind, number)

        async def measure(self, count: int) -> dict[str, float]:
            found: dict[str, float] = {}
            for kind in kinds:
                at_once, each = (AT_ONCE, max(1, count // 16)) if kind == "flood" else (1, count)
                began = time.perf_counter()
                await asyncio.gather(*(self.repeated(kind, number, each) for number in range(at_once)))
                found[kind] = (time.perf_counter() - began) / (at_once * each)
            return found

    class Restarted:
        def __init__(self) -> None:
            pass  # what an instance of ours has imported

        def pid(self) -> int:
            return os.getpid()

    where: dict[str, Any] = {"label_selector": {"rota-host": there}} if there else {}
    away: dict[str, Any] = {"label_selector": {"rota-host": f"!{there}"}} if there else {}
    make = ray.remote(num_cpus=0.1, **where)(Echo)
    restarted = ray.remote(num_cpus=0.1, max_restarts=-1, max_task_retries=-1)(Restarted).remote()
    one, eight = make.remote(), [make.remote() for _ in range(GROUP if kinds == KINDS else 0)]
    caller = ray.remote(num_cpus=0.1, **away)(Caller).remote(one, eight)
    ray.get(caller.measure.remote(WARM_CALLS))
    for line in sys.stdin:
        match line.strip():
            case "ready":
                found: dict[str, float] = {}
            case "start":
                began = time.perf_counter()
                fresh = make.remote()
                ray.get(fresh.echo.remote(1))
                found = {"start": time.perf_counter() - began}
                ray.kill(fresh)
            case "restart":
                pid = ray.get(restarted.pid.remote())
                began = time.perf_counter()
                os.kill(pid, signal.SIGKILL)
                while ray.get(restarted.pid.remote()) == pid:
                    time.sleep(0.005)
                found = {"restart": time.perf_counter() - began}
            case _:
                found = ray.get(caller.measure.remote(calls))
        print(json.dumps(found), flush=True)
    ray.shutdown()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def machine() -> dict[str, Any]:
    """Where the figures are from."""
    return {"cores": os.cpu_count(), "load": os.getloadavg()[0], "system": platform.platform()}


@contextmanager
def service(**settings: object) -> Iterator[Home]:
    """A service with a home of its own, which are gone after the block."""
    root = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    given = load_settings({"home": str(root), "port": free_port(), **settings}, environ={})
    daemon.up(given)
    try:
        yield Home.of(given.home)
    finally:
        daemon.down(given, force=True)
        shutil.rmtree(root, ignore_errors=True)


def submit(home: Home, name: str, roles: dict[str, Any], env: dict[str, str]) -> str:
    """Submit a job of the echo workload; its id."""
    source = json.dumps({"name": name, "roles": roles, "env": env})
    body = {"source": source, "filename": "job.json", "workdir": str(WORKLOADS)}
    return str(daemon.ask(home, "POST", "/api/v1/jobs", body)["id"])


def wait_for(path: Path, home: Home, job: str) -> None:
    """Wait until the job has written a file. Raises RuntimeError when the job ended without it.

    The service is asked once a second only: it must not compute while a round is measured.
    """
    began = asked = time.monotonic()
    while not path.exists():
        time.sleep(0.01)
        if time.monotonic() > asked + 1.0:
            asked = time.monotonic()
            state = daemon.ask(home, "GET", f"/api/v1/jobs/{job}")["state"]
            if state in TERMINAL or asked > began + LIMIT_S:
                raise RuntimeError(f"{job} is {state} and has not written {path.name}")


def role(workload: str, replicas: int = 1) -> dict[str, Any]:
    return {"workload": workload, "replicas": replicas, "resources": {"cpus": 0.1}}


def measure_calls(home: Home, rounds: int, calls: int) -> tuple[dict[str, list[float]], dict[str, list[float]], Bare]:
    """Rounds of both sides in turn."""
    roles = {"one": role("echo:Echo"), "eight": role("echo:Eight", GROUP), "loop": role("echo:measure")}
    job = submit(home, "calls", roles, environment_of(rounds, calls, KINDS))
    output = home.job(job).output
    wait_for(output / "warm", home, job)
    bare = Bare(*client_of(home), calls)
    ours, theirs = in_turn(output, bare, rounds, KINDS, lambda path: wait_for(path, home, job))
    return ours, theirs, bare


def environment_of(rounds: int, calls: int, kinds: Sequence[str]) -> dict[str, str]:
    """What the loop of the workload reads."""
    counts = {"ROUNDS": rounds, "CALLS": calls, "WARM_CALLS": WARM_CALLS, "AT_ONCE": AT_ONCE}
    return {**{name: str(count) for name, count in counts.items()}, "KINDS": ",".join(kinds)}


def in_turn(
    output: Path, bare: Bare, rounds: int, kinds: Sequence[str], wait: Callable[[Path], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds per call of ours and of bare Ray, a round of each after the other."""
    theirs: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind, seconds in bare.ask("round").items():
            theirs[kind].append(seconds)
        (output / f"round-{number}").touch()
        wait(output / f"done-{number}")
    return json.loads((output / "calls.json").read_text()), theirs


def measure_between(rounds: int, calls: int) -> tuple[list[float], list[float]]:
    """Rounds of one call from the first of two machines to the second."""
    from tests.machines.bed import bed
    from tests.machines.site import GCS_PORT, site

    with bed(2, subnet=83) as machines, site(machines, shared=True) as made:
        output = made.home / "out"
        near = {**role("echo:Echo"), "apart": [{"role": "loop", "level": "node"}]}
        document = {
            "name": "between",
            "workdir": str(WORKLOADS),
            "output": str(output),
            "env": environment_of(rounds, calls, ["single"]),
            "roles": {"one": near, "loop": role("echo:measure")},
        }
        job = made.submit(json.dumps(document))

        def wait(path: Path) -> None:
            deadline = time.monotonic() + LIMIT_S
            while not path.exists():
                time.sleep(0.01)
                if time.monotonic() > deadline:
                    raise RuntimeError(made.rota("events", job))

        wait(output / "warm")
        head = made.head
        environment = {**head.environ, **made.environ}
        there = machines[1].name
        bare = Bare(f"{head.address}:{GCS_PORT}", environment, calls, ["single"], head.entered, there)
        try:
            ours, theirs = in_turn(output, bare, rounds, ["single"], wait)
        finally:
            bare.close()
    return ours["single"], theirs["single"]


def measure_starts(home: Home, bare: Bare, starts: int) -> tuple[list[float], list[float]]:
    """Submit to the first role set up, beside a bare actor until its first answer."""
    ours, theirs = list[float](), list[float]()
    for _ in range(starts):
        time.sleep(SETTLE_S)
        theirs.append(bare.ask("start")["start"])
        time.sleep(SETTLE_S)
        began = time.perf_counter()
        job = submit(home, "start", {"one": role("echo:Echo"), "loop": role("echo:once")}, {})
        while not list(home.job(job).work.rglob("ready-*")):
            if time.perf_counter() - began > LIMIT_S:
                raise RuntimeError(f"{job}: its first role never came")
            time.sleep(0.005)
        ours.append(time.perf_counter() - began)
        while daemon.ask(home, "GET", f"/api/v1/jobs/{job}")["state"] not in TERMINAL:
            time.sleep(0.05)
    return ours, theirs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--starts", type=int, default=3)
    for name in ("--bare", "--kinds", "--there"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        bare_main(given.bare, given.calls, tuple(given.kinds.split(",")), given.there)
        return
    sys.path.insert(0, str(WORKLOADS.parents[2]))
    from tests.machines.bed import missing

    with service(pretend="1x2x0") as home:
        ours, theirs, bare = measure_calls(home, given.rounds, given.calls)
        begun, bare_begun = measure_starts(home, bare, given.starts) if given.starts else ([], [])
        bare.close()
    if why := missing():
        print(f"no machines: {why}", file=sys.stderr)
    else:
        ours["between"], theirs["between"] = measure_between(given.rounds, given.calls)
    rows = {
        kind: {
            "ours_us": 1e6 * statistics.median(ours[kind]),
            "ray_us": 1e6 * statistics.median(theirs[kind]),
            "ratio": statistics.median(a / b for a, b in zip(ours[kind], theirs[kind], strict=True)),
        }
        for kind in ours
    }
    named = {
        "single": "one call",
        "group": f"a call of a group of {GROUP}",
        "large": "a call with 1 MiB",
        "flood": f"a call of {AT_ONCE} at once",
        "between": "one call between two machines",
    }
    table = [Row(named[kind], row["ours_us"], "us", row["ray_us"], "Ray") for kind, row in rows.items()]
    start: dict[str, float] = {}
    if begun:
        start = {"ours_s": statistics.median(begun), "ray_s": statistics.median(bare_begun)}
        start["more_s"] = start["ours_s"] - start["ray_s"]
        table.append(Row("submit to the first role", start["ours_s"], "s", start["ray_s"], "Ray, an actor"))
    hand_in(table)
    print(json.dumps({**rows, "submit_to_first_role": start, "rounds": given.rounds, "machine": machine()}, indent=2))


if __name__ == "__main__":
    main()
