"""An example with one kill -9 of a random role every so often: what share of the time made progress that counts.

``python benchmarks/ettr.py [--minutes M] [--every S] [--seed N]`` prints one JSON document about grpo_sums; with
``--example NAME [--kills K]`` about a whole example, with at most ``K`` kills. ETTR is useful time over
the time since the job first ran. Useful is the time between two commits that were kept; where a recovery lies between
them only the median of the undisturbed intervals of the same phase counts. A step is lost when its commit is missing
from the curve that the job writes, and trained twice when it is there more than once.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from calls import LIMIT_S, TERMINAL, Records, machine, service
from rota.runtime import process
from rota.runtime.environ import Home
from rota.runtime.event_log.sql import SqlLog
from rota.service.process import daemon
from rota.spec.events import Committed, FailoverStarted, InstanceStarted, JobEnded, Record, RolledBack
from rota.spec.ids import JobId
from run import Row, hand_in

STEPS = 100_000
"""More than fit into the time."""
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def kill_one(records: Records, rng: random.Random) -> str:
    """kill -9 of the newest process of a random instance; its name, or nothing when it was gone already."""
    newest = {
        f"{record.event.role}/{record.event.rank}": record.event
        for record in records.now()
        if isinstance(record.event, InstanceStarted)
    }
    name = rng.choice(sorted(newest))
    which = process.ProcessId(pid=newest[name].pid, start_time=newest[name].start_time)
    return name if process.send_signal(which, signal.SIGKILL) else ""


def accounted(records: Sequence[Record], rows: list[int], began: float, ended: float) -> dict[str, Any]:
    """ETTR and the account of steps, from the log of the job and the rows of its curve."""
    kept: dict[int, tuple[float, float, str, bool]] = {}
    last, disturbed = began, False
    for record in records:
        match record.event:
            case Committed(n=n, metrics=metrics):
                kept[n] = (last, record.at, ",".join(sorted(metrics)), disturbed)
                last, disturbed = record.at, False
            case RolledBack(to_commit=to):
                kept = {n: one for n, one in kept.items() if n <= to}
            case FailoverStarted():
                disturbed = True
            case _:
                pass
    phases: dict[str, list[float]] = {}
    for since, at, phase, hit in kept.values():
        if not hit:
            phases.setdefault(phase, []).append(at - since)
    usual = {phase: statistics.median(values) for phase, values in phases.items()}
    useful = sum(
        min(at - since, usual.get(phase, 0.0)) if hit else at - since for since, at, phase, hit in kept.values()
    )
    counted = Counter(row for row in rows if row <= len(kept))
    return {
        "ettr": round(useful / (ended - began), 4),
        "wall_s": round(ended - began, 1),
        "commits": len(kept),
        "steps_lost": sum(n not in counted for n in kept) if rows else None,
        "steps_twice": sum(times - 1 for times in counted.values()) if rows else None,
        "median_step_s": {phase: round(value, 3) for phase, value in usual.items()},
    }


def measure(home: Home, given: argparse.Namespace) -> dict[str, Any]:
    """The job under kills, until the time is up or it ends."""
    folder, minutes, every_s = EXAMPLES / (given.example or "grpo_sums"), given.minutes, given.every
    source = (folder / "job.yaml").read_text(encoding="utf-8").replace("limit: 10/10m", "limit: 1000/10m")
    if not given.example:
        source = source.replace("env: {", f'env: {{GRPO_STEPS: "{STEPS}", ')
    body = {"source": source, "filename": "job.yaml", "workdir": str(folder)}
    job = str(daemon.ask(home, "POST", "/api/v1/jobs", body)["id"])
    records, rng, kills = Records(SqlLog(home.db_url), JobId(job)), random.Random(given.seed), list[str]()
    deadline = time.monotonic() + LIMIT_S
    while (shown := daemon.ask(home, "GET", f"/api/v1/jobs/{job}"))["state"] != "RUNNING":
        if shown["state"] in TERMINAL or time.monotonic() > deadline:
            raise RuntimeError(f"{job} is {shown['state']} and never ran: {shown['text']}")
        time.sleep(0.2)
    began = time.time()
    while time.time() - began < minutes * 60 and ended_at(records, every_s) is None:
        kills += [name for name in [kill_one(records, rng) if len(kills) < given.kills else ""] if name]
    over = ended_at(records, every_s)
    if over is None:
        over = time.time()
        daemon.ask(home, "POST", f"/api/v1/jobs/{job}:stop", {})
        if ended_at(records, LIMIT_S) is None:
            raise SystemExit(f"{job} does not end within {LIMIT_S:.0f} s of its stop")
    written = [json.loads(line) for path in home.job(job).output.glob("*.jsonl") for line in path.open()]
    found = accounted(records.now(), [row["n"] for row in written if "n" in row], began, over)
    state = daemon.ask(home, "GET", f"/api/v1/jobs/{job}")["state"]
    return {**found, "state": state, "kills": len(kills), "victims": kills}


def ended_at(records: Records, wait_s: float) -> float | None:
    """When the job ended; None if it has not after ``wait_s`` seconds."""
    until_s = time.monotonic() + wait_s
    while True:
        for record in records.now()[-3:]:
            if isinstance(record.event, JobEnded):
                return record.at
        if time.monotonic() > until_s:
            return None
        time.sleep(0.2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--example", default="")
    parser.add_argument("--kills", type=int, default=STEPS)
    given = parser.parse_args()
    with service() as home:
        found = measure(home, given)
    hand_in(
        [
            Row(f"time lost to a kill every {given.every:g} s", 100 * (1 - found["ettr"]), "%"),
            *(
                Row(f"steps {what}", found[key])
                for what, key in (("lost", "steps_lost"), ("trained twice", "steps_twice"))
                if found[key] is not None
            ),
        ]
    )
    print(json.dumps({**found, "every_s": given.every, "machine": machine()}, indent=2))


if __name__ == "__main__":
    main()
