"""kill -9 of a stateless instance, again and again: how fast it is back, and whether anybody else noticed.

``python benchmarks/recovery.py [--kills N] [--records N]`` prints one JSON document. Ours: from the signal to
``InstanceReady`` in the log. Bare Ray: from the signal to the first answer of an actor with ``max_restarts`` whose
constructor imports the same modules, on the same engine, in turn with ours. ``spare_s``: a role of which one more
stands by; from the signal until its callers are given that one. ``beat_gap_s`` is the longest silence of any other
instance as its master hears it, without faults and with them. ``master``: kill -9 of the master of a job of many
records, until the next one knows what is alive, with the kept context and with a replay of everything, in turn.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sqlalchemy import create_engine, text

from calls import LIMIT_S, Bare, Records, client_of, machine, role, service, submit
from rota.runtime import process
from rota.runtime.environ import Home
from rota.runtime.event_log.interface import INSTALL_SCOPE, EventLog, Writer
from rota.runtime.event_log.sql import SqlLog
from rota.service.process import daemon
from rota.spec.events import Committed, FailoverStarted, InstanceReady, InstanceStarted, MasterStarted, Reattached
from rota.spec.ids import Epoch, JobId
from run import Row, hand_in

VICTIM = ("one", 0)
KILLED = ("one/0", "spared/0", "spared/1")
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
                if one["progress"] and one["instance"] not in KILLED:
                    known = self.gaps[self.phase]
                    known[one["instance"]] = max(known.get(one["instance"], 0.0), one["progress"]["beat_age_s"])


def newest(records: Records, kind: type) -> tuple[Any, float] | None:
    """The last event of a kind about the victim, and its time."""
    found: list[tuple[Any, float]] = [
        (record.event, record.at) for record in records.now() if isinstance(record.event, kind)
    ]
    return next((one for one in reversed(found) if (one[0].role, one[0].rank) == VICTIM), None)


def one_kill(records: Records) -> float:
    """Kill the victim and wait until its successor is ready; the seconds between."""
    started = newest(records, InstanceStarted)
    assert started is not None
    victim = process.ProcessId(pid=started[0].pid, start_time=started[0].start_time)
    began = time.time()
    assert process.send_signal(victim, signal.SIGKILL)
    while True:
        ready = newest(records, InstanceReady)
        if ready is not None and ready[0].epoch > started[0].epoch and ready[1] > began:
            return ready[1] - began
        if time.time() - began > LIMIT_S:
            raise RuntimeError("the victim did not come back")
        time.sleep(0.01)


def one_take_over_by_a_spare(home: Home, log: EventLog, job: str) -> float:
    """Kill the one of two that does not stand by; the seconds until the verdict that puts the other in its place."""
    while True:
        shown = [one for one in daemon.ask(home, "GET", f"/api/v1/jobs/{job}")["instances"] if one["role"] == "spared"]
        if all(one["state"] == "READY" for one in shown) and [one["standby"] for one in shown].count(True) == 1:
            break
        time.sleep(0.1)
    one = next(one for one in shown if not one["standby"])
    victim, newest_number = process.identify(one["pid"]), log.last_number()
    assert victim is not None
    began = time.time()
    assert process.send_signal(victim, signal.SIGKILL)
    while time.time() - began < LIMIT_S:
        for record in log.read(job=JobId(job), after=newest_number):
            if isinstance(record.event, FailoverStarted) and record.event.role == "spared":
                return record.at - began
        time.sleep(0.01)
    raise RuntimeError("the spare did not take over")


def pids(home: Home, job: str) -> dict[str, int]:
    shown = daemon.ask(home, "GET", f"/api/v1/jobs/{job}")
    return {one["instance"]: one["pid"] for one in shown["instances"]}


def take_over(log: EventLog, job: str) -> float:
    """Kill the master and wait until the next one knows what is alive; the seconds between."""
    records = Records(log, JobId(job)).now()
    started = [record.event for record in records if isinstance(record.event, MasterStarted)]
    master = process.identify(started[-1].pid)
    assert master is not None
    began = time.time()
    assert process.send_signal(master, signal.SIGKILL)
    while not any(isinstance(one.event, Reattached) for one in log.read(job=JobId(job), after=records[-1].number)):
        if time.time() - began > LIMIT_S:
            raise RuntimeError("no master came")
        time.sleep(0.01)
    return time.time() - began


def measure_take_over(home: Home, job: str, records: int, rounds: int) -> dict[str, float]:
    """Take-overs of a job with many records: with the kept context, and with a replay from the first record."""
    log, engine = SqlLog(home.db_url), create_engine(home.db_url)
    writer = Writer(scope=INSTALL_SCOPE, epoch=log.fence(INSTALL_SCOPE))
    refused = Committed(n=1, loop_epoch=Epoch(0), metrics={"loss": 0.25}, cursor={"cut": {"streams": {}}})
    for _ in range(0, records, 100):
        log.append([refused] * 100, writer=writer, job=JobId(job))
    while not log.contexts(JobId(job)):
        time.sleep(0.1)
    seconds: dict[str, list[float]] = {"kept_s": [], "replayed_s": []}
    for _ in range(rounds):
        seconds["kept_s"].append(take_over(log, job))
        time.sleep(2.0)
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM contexts"))
        seconds["replayed_s"].append(take_over(log, job))
        time.sleep(2.0)
    engine.dispose()
    log.close()
    return {"records": float(records)} | {name: statistics.median(each) for name, each in seconds.items()}


def measure(home: Home, kills: int, records: int) -> dict[str, Any]:
    """A job that waits for its rounds, killed and watched."""
    roles = {"one": {**role("echo:Echo"), "fail": {"limit": f"{kills + 1}/1h"}}}
    spare = {"standby": 1, "limit": f"{kills + 1}/1h"}
    roles |= {"spared": {**role("echo:Echo"), "fail": spare}}
    roles |= {"eight": role("echo:Echo", 2), "loop": role("echo:measure")}
    job = submit(home, "recovery", roles, {"ROUNDS": "1", "CALLS": "10", "WARM_CALLS": "20"})
    output = home.job(job).output
    while not (output / "warm").exists():
        time.sleep(0.05)
    bare = Bare(*client_of(home), 10)
    before = pids(home, job)
    watch = BeatWatch(home, job)
    watch.start()
    time.sleep(QUIET_S)
    watch.phase = "with_kills"
    log = SqlLog(home.db_url)
    records_of_job = Records(log, JobId(job))
    ours, theirs, spares = list[float](), list[float](), list[float]()
    for _ in range(kills):
        ours.append(one_kill(records_of_job))
        theirs.append(bare.ask("restart")["restart"])
        spares.append(one_take_over_by_a_spare(home, log, job))
    after = pids(home, job)
    watch.over.set()
    watch.join()
    bare.close()
    taken_over = measure_take_over(home, job, records, 3) if records else {}
    daemon.ask(home, "POST", f"/api/v1/jobs/{job}:stop", {})
    worst = {phase: max(gaps.values()) for phase, gaps in watch.gaps.items()}
    return {
        "kills": kills,
        "ours_s": statistics.median(ours),
        "ray_s": statistics.median(theirs),
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "ours_max_s": max(ours),
        "spare_s": statistics.median(spares),
        "spare_max_s": max(spares),
        "changed": sorted(name for name in after if after[name] != before[name] and name not in KILLED),
        "beat_gap_s": worst,
        "beat_gap_more_s": worst["with_kills"] - worst["fault_free"],
        "master": taken_over,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--records", type=int, default=10_000)
    given = parser.parse_args()
    with service(pretend="1x2x0") as home:
        found = measure(home, given.kills, given.records)
    gap = found["beat_gap_s"]
    table = [
        Row("an instance is back after kill -9", found["ours_s"], "s", found["ray_s"], "Ray, an actor"),
        Row("a spare has its place after kill -9", found["spare_s"], "s"),
        Row("instances changed besides those killed", len(found["changed"]), "", 0),
        Row(
            "longest silence of the others",
            gap["with_kills"],
            "s",
            gap["fault_free"],
            "no kill",
        ),
    ]
    if found["master"]:
        text = f"a master after {found['master']['records']:.0f} records"
        table.append(Row(text, found["master"]["kept_s"], "s", found["master"]["replayed_s"], "replay of all"))
    hand_in(table)
    print(json.dumps({**found, "machine": machine()}, indent=2))


if __name__ == "__main__":
    main()
