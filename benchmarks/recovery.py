"""kill -9 of a stateless instance, again and again: how fast it is back, and whether anybody else noticed.

``python benchmarks/recovery.py [--kills N]`` prints one JSON document. Ours: from the signal to ``InstanceReady`` in
the log. Bare Ray: from the signal to the first answer of an actor with ``max_restarts`` whose constructor imports the
same modules, on the same engine, in turn with ours. ``beat_gap_s`` is the longest silence of any other instance as
its master hears it, without faults and with them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from calls import LIMIT_S, Bare, free_port, role, submit
from rota.runtime import process
from rota.runtime.environ import Home
from rota.runtime.log import EventLog
from rota.runtime.sql_log import SqlLog
from rota.service import daemon
from rota.service.config import load_settings
from rota.spec.events import InstanceReady, InstanceStarted
from rota.spec.ids import JobId

VICTIM = ("one", 0)
QUIET_S = 12.0
"""So long the beats are watched before the first kill."""


class BeatWatch(threading.Thread):
    """Asks for the age of every last beat; keeps the greatest of each instance and phase."""

    def __init__(self, home: Home, job: str) -> None:
        super().__init__(daemon=True)
        self.home, self.job, self.phase = home, job, "fault_free"
        self.gaps: dict[str, dict[str, float]] = defaultdict(dict)
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.1):
            shown = daemon.ask(self.home, "GET", f"/api/v1/jobs/{self.job}")
            for one in shown["instances"]:
                if one["progress"] and one["instance"] != f"{VICTIM[0]}/{VICTIM[1]}":
                    known = self.gaps[self.phase]
                    known[one["instance"]] = max(known.get(one["instance"], 0.0), one["progress"]["beat_age_s"])


def newest(log: EventLog, job: str, kind: type) -> tuple[Any, float] | None:
    """The last event of a kind about the victim, and its time."""
    found = [
        (record.event, record.at)
        for record in log.read(job=JobId(job))
        if isinstance(record.event, kind) and (record.event.role, record.event.rank) == VICTIM
    ]
    return found[-1] if found else None


def one_kill(log: EventLog, job: str) -> float:
    """Kill the victim and wait until its successor is ready; the seconds between."""
    started = newest(log, job, InstanceStarted)
    assert started is not None
    victim = process.ProcessId(pid=started[0].pid, start_time=started[0].start_time)
    began = time.time()
    assert process.send_signal(victim, signal.SIGKILL)
    while True:
        ready = newest(log, job, InstanceReady)
        if ready is not None and ready[0].epoch > started[0].epoch and ready[1] > began:
            return ready[1] - began
        if time.time() - began > LIMIT_S:
            raise RuntimeError("the victim did not come back")
        time.sleep(0.01)


def pids(home: Home, job: str) -> dict[str, int]:
    shown = daemon.ask(home, "GET", f"/api/v1/jobs/{job}")
    return {one["instance"]: one["pid"] for one in shown["instances"]}


def measure(home: Home, kills: int) -> dict[str, Any]:
    """A job that waits for its rounds, killed and watched."""
    roles = {"one": {**role("echo:Echo"), "fail": {"limit": f"{kills + 1}/1h"}}}
    roles |= {"eight": role("echo:Echo", 2), "loop": role("echo:measure")}
    job = submit(home, "recovery", roles, {"ROUNDS": "1", "CALLS": "10", "WARM_CALLS": "20"})
    output = home.job(job).output
    while not (output / "warm").exists():
        time.sleep(0.05)
    bare = Bare(home, 10)
    before = pids(home, job)
    watch = BeatWatch(home, job)
    watch.start()
    time.sleep(QUIET_S)
    watch.phase = "with_kills"
    log = SqlLog(home.db_url)
    ours, theirs = list[float](), list[float]()
    for _ in range(kills):
        ours.append(one_kill(log, job))
        theirs.append(bare.ask("restart")["restart"])
    after = pids(home, job)
    watch.over.set()
    watch.join()
    bare.close()
    daemon.ask(home, "POST", f"/api/v1/jobs/{job}:stop", {})
    worst = {phase: max(gaps.values()) for phase, gaps in watch.gaps.items()}
    return {
        "kills": kills,
        "ours_s": statistics.median(ours),
        "ray_s": statistics.median(theirs),
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "ours_max_s": max(ours),
        "changed": sorted(name for name in after if after[name] != before[name]),
        "beat_gap_s": worst,
        "beat_gap_more_s": worst["with_kills"] - worst["fault_free"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    settings = load_settings({"home": str(root), "port": free_port(), "pretend": "1x2x0"}, environ={})
    daemon.up(settings)
    try:
        found = measure(Home.of(settings.home), given.kills)
    finally:
        daemon.down(settings, force=True)
        shutil.rmtree(root, ignore_errors=True)
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "system": platform.platform()}
    print(json.dumps({**found, "machine": machine}, indent=2))


if __name__ == "__main__":
    main()
