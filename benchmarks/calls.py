"""Calls from role to role beside bare Ray in one run: one call, a call to a group of eight, submit to first role.

``python benchmarks/calls.py [--rounds N] [--calls N] [--starts N]`` prints one JSON document. Both sides call from an
actor on the same warm engine; no role imports torch. Rounds alternate, a figure is the median over rounds and the ratio
is ours over bare Ray. The bare group call is eight ``remote()`` and one gather, the bare start an actor until its first
answer.
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
from collections.abc import Sequence
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

    def __init__(self, home: Home, calls: int) -> None:
        address, environment = client_of(home)
        words = [sys.executable, __file__, "--bare", address, "--calls", str(calls)]
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


def bare_main(address: str, calls: int) -> None:
    """The child: rounds of bare Ray, one line of JSON each."""
    import ray

    ray.init(address, log_to_driver=False, logging_level="error")

    class Echo:
        async def echo(self, value: Any) -> Any:
            return value

    class Caller:
        def __init__(self, one: Any, eight: list[Any]) -> None:
            self.one, self.eight = one, eight

        async def measure(self, count: int) -> dict[str, float]:
            began = time.perf_counter()
            for _ in range(count):
                await self.one.echo.remote(b"x" * 100)
            single_s = time.perf_counter() - began
            began = time.perf_counter()
            for _ in range(count):
                await asyncio.gather(*(each.echo.remote(b"x" * 100) for each in self.eight))
            return {"single": single_s / count, "group": (time.perf_counter() - began) / count}

    class Restarted:
        def __init__(self) -> None:
            pass  # what an instance of ours has imported

        def pid(self) -> int:
            return os.getpid()

    make = ray.remote(num_cpus=0.1)(Echo)
    restarted = ray.remote(num_cpus=0.1, max_restarts=-1, max_task_retries=-1)(Restarted).remote()
    one, eight = make.remote(), [make.remote() for _ in range(GROUP)]
    caller = ray.remote(num_cpus=0.1)(Caller).remote(one, eight)
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
    roles = {"one": role("echo:Echo"), "eight": role("echo:Echo", GROUP), "loop": role("echo:measure")}
    env = {"ROUNDS": str(rounds), "CALLS": str(calls), "WARM_CALLS": str(WARM_CALLS)}
    job = submit(home, "calls", roles, env)
    output = home.job(job).output
    wait_for(output / "warm", home, job)
    bare = Bare(home, calls)
    theirs: dict[str, list[float]] = {"single": [], "group": []}
    for number in range(rounds):
        for kind, seconds in bare.ask("round").items():
            theirs[kind].append(seconds)
        (output / f"round-{number}").touch()
        wait_for(output / f"done-{number}", home, job)
    ours = json.loads((output / "calls.json").read_text())
    return ours, theirs, bare


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
    parser.add_argument("--bare", default="")
    given = parser.parse_args()
    if given.bare:
        bare_main(given.bare, given.calls)
        return
    root = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    settings = load_settings({"home": str(root), "port": free_port(), "pretend": "1x2x0"}, environ={})
    daemon.up(settings)
    try:
        home = Home.of(settings.home)
        ours, theirs, bare = measure_calls(home, given.rounds, given.calls)
        begun, bare_begun = measure_starts(home, bare, given.starts)
        bare.close()
    finally:
        daemon.down(settings, force=True)
        shutil.rmtree(root, ignore_errors=True)
    rows = {
        kind: {
            "ours_us": 1e6 * statistics.median(ours[kind]),
            "ray_us": 1e6 * statistics.median(theirs[kind]),
            "ratio": statistics.median(a / b for a, b in zip(ours[kind], theirs[kind], strict=True)),
        }
        for kind in ("single", "group")
    }
    start = {"ours_s": statistics.median(begun), "ray_s": statistics.median(bare_begun)}
    start["more_s"] = start["ours_s"] - start["ray_s"]
    named = {"single": "one call", "group": f"a call of a group of {GROUP}"}
    table = [Row(text, rows[kind]["ours_us"], "us", rows[kind]["ray_us"], "Ray") for kind, text in named.items()]
    hand_in([*table, Row("submit to the first role", start["ours_s"], "s", start["ray_s"], "Ray, an actor")])
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "system": platform.platform()}
    print(json.dumps({**rows, "submit_to_first_role": start, "rounds": given.rounds, "machine": machine}, indent=2))


if __name__ == "__main__":
    main()
