"""How fast the REST API answers: lists, one job, explain, heat map, queues, on 1,000 nodes with 10,000 jobs.

A service over a real log on the loopback address; its scheduler places what fits, the engine is played. Requests of all
kinds take turns, so that every figure is from the same minute. With ``--churn S`` a job ends every S seconds and the
scheduler fills the gap meanwhile. Prints one JSON document; the goal is 300 ms at the 95th percentile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.service.standing import Standing, listening, standing

from rota.runtime.event_log.interface import INSTALL_SCOPE, Writer
from rota.runtime.event_log.sql import SqlLog
from rota.service.control.loop import ServiceLoop
from rota.service.jobfile.reader import read_job
from rota.spec.events import JobEnded, JobQueued, JobSubmitted
from rota.spec.ids import JobId
from rota.spec.reasons import Reason
from rota.spec.states import JobState
from run import Row, hand_in

SIZES = (1, 1, 1, 2, 4, 8, 16)
SETTLE_S = 600.0
LIMIT_MS = 300.0


class Took(NamedTuple):
    """Seconds of the clock, and of the processor: client and service are one process, and a busy machine slows only
    the first.
    """

    wall_s: float
    cpu_s: float


def shown(values: list[Took]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    wall, cpu = np.array(values).T * 1000
    return {
        "p50": round(float(np.percentile(wall, 50)), 1),
        "p95": round(float(np.percentile(wall, 95)), 1),
        "cpu_p95": round(float(np.percentile(cpu, 95)), 1),
    }


def source(name: str, gpus: int, minutes: int) -> str:
    """A job of one role; more than eight devices are two instances."""
    each, replicas = (gpus, 1) if gpus <= 8 else (8, gpus // 8)
    return (
        f"name: {name}\ntime_limit: {minutes}m\nroles:\n  main:\n    run: [sleep, '9']\n"
        f"    replicas: {replicas}\n    resources: {{gpus: {each}, cpus: 1}}\n"
    )


def fill(home: Path, jobs: int) -> None:
    """Put jobs into the log of an installation as its intake would have; in memory, which has no disk to wait for."""
    rng = random.Random(0)
    specs = {gpus: read_job(source("work", gpus, 60), filename="job.yaml") for gpus in SIZES}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as quick:
        with contextlib.closing(SqlLog(f"sqlite:///{quick}/rota.db", migrate=True)) as log:
            writer = Writer(scope=INSTALL_SCOPE, epoch=log.take_epoch(INSTALL_SCOPE))
            for number in range(1, jobs + 1):
                submitted = JobSubmitted(spec=specs[rng.choice(SIZES)], user=f"user{number % 40}", uid=f"{number:026}")
                log.append([submitted, JobQueued()], writer=writer, job=JobId(f"work-{number}"))
                if number % 1000 == 0:
                    tell(f"{number} of {jobs} jobs are in the log")
        shutil.copytree(quick, home, dirs_exist_ok=True)


async def settled(loop: ServiceLoop) -> None:
    """Wait until the scheduler has nothing left to place: a whole round of the loop without a record."""
    async with asyncio.timeout(SETTLE_S):
        number = -1
        while number != loop.installation.number:
            number, turned_s = loop.installation.number, loop.turned_s
            while loop.turned_s == turned_s:
                await asyncio.sleep(0.05)
            tell(f"{sum(one.state.holds_devices for one in loop.installation.live.values())} jobs hold devices")


def tell(text: str) -> None:
    """Progress, to the people who wait; the document alone is on standard output."""
    print(f"{time.process_time():7.1f} s of CPU  {text}", file=sys.stderr, flush=True)


async def churn(service: Standing, every_s: float) -> None:
    """End a running job now and then, so that the scheduler has work while requests are answered."""
    while True:
        await asyncio.sleep(every_s)
        running = [one.id for one in service.app.loop.installation.live.values() if one.state.holds_devices]
        if running:
            service.as_master(running[0], JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED))


async def measure(http: httpx.AsyncClient, waiting: str, running: str, rounds: int) -> dict[str, list[Took]]:
    """What every request of every kind took."""
    middle = (await http.get("/api/v1/jobs", params={"limit": 200})).json()["next"]
    questions = {
        "list, first page": "/api/v1/jobs?limit=200",
        "list, a later page": f"/api/v1/jobs?limit=200&all=true&cursor={middle}",
        "list, filtered": "/api/v1/jobs?limit=200&state=QUEUED&text=work-77",
        "show": f"/api/v1/jobs/{running}",
        "graph": f"/api/v1/jobs/{running}/graph",
        "explain": f"/api/v1/jobs/{waiting}/explain",
        "heat": "/api/v1/cluster/heat",
        "nodes": "/api/v1/nodes",
        "queues": "/api/v1/queues",
        "status": "/api/v1/status",
    }
    took: dict[str, list[Took]] = {name: [] for name in questions}
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}")
        for name, path in questions.items():
            began, worked = time.perf_counter(), time.process_time()
            answer = await http.get(path)
            took[name].append(Took(time.perf_counter() - began, time.process_time() - worked))
            assert answer.status_code == 200, answer.text
    return took


async def run(jobs: int, nodes: str, rounds: int, churn_s: float) -> dict[str, Any]:
    """One measurement on a fresh home."""
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), jobs)
        async with standing(Path(folder), pretend=nodes) as service:
            began = time.perf_counter()
            await settled(service.app.loop)
            placed_s = time.perf_counter() - began
            live = service.app.loop.installation.live.values()
            waiting = next(one.id for one in live if one.state is JobState.QUEUED)
            running = next(one.id for one in reversed(list(live)) if one.state.holds_devices)
            busy = asyncio.create_task(churn(service, churn_s)) if churn_s else None
            async with listening(service) as http:
                took = await measure(http, waiting, running, rounds)
            if busy is not None:
                busy.cancel()
            counts = service.app.loop.installation
            return {
                "jobs": len(counts.jobs),
                "nodes": len(counts.nodes),
                "holding": sum(one.state.holds_devices for one in counts.live.values()),
                "placed_s": round(placed_s, 1),
                "churn_s": churn_s,
                "rounds": rounds,
                "ms": {name: shown(values) for name, values in took.items()},
            }


def main(arguments: list[str]) -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--nodes", default="25x40x8")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--churn", type=float, default=0.0)
    given = parser.parse_args(arguments)
    found = asyncio.run(run(given.jobs, given.nodes, given.rounds, given.churn))
    hand_in(Row(f"{name}, 95 %", one["p95"], "ms", LIMIT_MS) for name, one in found["ms"].items())
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
