"""How fast the service starts and answers on 1,000 nodes with 10,000 jobs: up, submit, lists, explain, metrics.

First ``rota up`` on a home with all of these jobs: without a snapshot of its log, and with one. Then a service over the
same log on the loopback address; its scheduler places what fits, the engine is played. Requests of all kinds take
turns, so that every figure is from the same minute. With ``--churn S`` a job ends every S seconds and the scheduler
fills the gap meanwhile. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.service.standing import Standing, listening, standing

from rota.job.core.placement import requests_of
from rota.runtime.event_log.interface import INSTALL_SCOPE, Writer
from rota.runtime.event_log.sql import SqlLog
from rota.service.control.loop import ServiceLoop
from rota.service.jobfile.reader import read_job
from rota.spec.events import (
    Committed,
    GangReleased,
    GangReserved,
    InstanceEnded,
    InstanceReady,
    InstanceStarted,
    InstanceStopped,
    JobAdmitted,
    JobEnded,
    JobEvent,
    JobQueued,
    JobSubmitted,
    MasterStarted,
    NodeJoined,
    Reattached,
)
from rota.spec.gang import BundleGrant, Grant, Placement
from rota.spec.ids import Epoch, JobId
from rota.spec.job import JobSpec
from rota.spec.reasons import Reason
from rota.spec.resources import Node, pretend_nodes
from rota.spec.states import JobState
from run import Row, hand_in

SIZES = (1, 1, 1, 2, 4, 8, 16)
ENDED = 0.68
"""Share of the jobs that ended. Of the others 1,500 wait: the rest fills the devices."""
COMMITS = 100_000
LONG = "learn-1"
"""The job with that many commits."""
BATCH = 1000
SETTLE_S = 600.0
LIMITS_MS = {"submit": 100.0, "list": 150.0, "explain": 150.0, "metrics": 500.0}
"""Limits at the 95th percentile by the first word of a row; the others share one."""
LIMIT_MS = 300.0
UP_LIMIT_S = 3.0


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


def fill(home: Path, jobs: int, shape: str) -> None:
    """Put jobs into the log of an installation as its parts would have; in memory, which has no disk to wait for."""
    rng, nodes = random.Random(0), pretend_nodes(shape, host="here")
    specs = {gpus: read_job(source("work", gpus, 60), filename="job.yaml") for gpus in SIZES}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as quick:
        with contextlib.closing(SqlLog(f"sqlite:///{quick}/rota.db", migrate=True)) as log:
            writer = Writer(scope=INSTALL_SCOPE, epoch=log.take_epoch(INSTALL_SCOPE))
            log.append([NodeJoined(node=node) for node in nodes], writer=writer)
            for number in range(1, jobs + 1):
                spec = specs[rng.choice(SIZES)]
                submitted = JobSubmitted(spec=spec, user=f"user{number % 40}", uid=f"{number:026}")
                past = ran(spec, rng.sample(nodes, 2)) if number <= jobs * ENDED else []
                log.append([submitted, JobQueued(), *past], writer=writer, job=JobId(f"work-{number}"))
                if number % 1000 == 0:
                    tell(f"{number} of {jobs} jobs are in the log")
            curve(log, writer)
        shutil.copytree(quick, home, dirs_exist_ok=True)


def ran(spec: JobSpec, nodes: Sequence[Node]) -> list[JobEvent]:
    """The records of a job from its admission to its end."""
    first, requests = Epoch(1), requests_of(spec)
    grants = [
        Grant(
            gang=request.gang,
            bundles=tuple(
                BundleGrant(
                    index=ask.index, node=node.id, host=node.host, devices=tuple(range(int(ask.res.gpus))), res=ask.res
                )
                for ask, node in zip(request.bundles, nodes)
            ),
        )
        for request in requests
    ]
    where = [
        (member, given.node)
        for grant, request in zip(grants, requests)
        for ask, given in zip(request.bundles, grant.bundles)
        for member in ask.members
    ]
    return [
        JobAdmitted(attempt=1, epoch=first, placement=Placement(gangs=tuple(grants))),
        MasterStarted(master_epoch=first, pid=999),
        Reattached(master_epoch=first),
        *(GangReserved(gang=request.gang, epoch=first) for request in requests),
        *(InstanceStarted(role=one.role, rank=one.rank, epoch=first, node=node, pid=1000) for one, node in where),
        *(InstanceReady(role=one.role, rank=one.rank, epoch=first) for one, _ in where),
        *(InstanceEnded(role=one.role, rank=one.rank, epoch=first) for one, _ in where),
        *(InstanceStopped(role=one.role, rank=one.rank, epoch=first) for one, _ in where),
        *(GangReleased(gang=request.gang, epoch=first) for request in requests),
        JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED),
    ]


def curve(log: SqlLog, writer: Writer) -> None:
    """A job without devices that made ``COMMITS`` commits of three figures each, and stopped."""
    text = "name: learn\nroles:\n  loop: {workload: 'flowing:loop'}\n"
    submitted = JobSubmitted(spec=read_job(text, filename="job.yaml"), user="user1", uid="learn")
    log.append([submitted, JobQueued()], writer=writer, job=JobId(LONG))
    for first in range(1, COMMITS + 1, BATCH):
        figures = ({"loss": 1 / n, "reward": n / COMMITS, "kl": 0.01} for n in range(first, first + BATCH))
        made = [Committed(n=first + i, loop_epoch=Epoch(1), metrics=one) for i, one in enumerate(figures)]
        log.append(made, writer=writer, job=JobId(LONG))
    log.append([JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED)], writer=writer, job=JobId(LONG))
    tell(f"{COMMITS} commits are in the log")


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
        "submit": "/api/v1/jobs",
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
        "metrics of 100,000 commits": f"/api/v1/jobs/{LONG}/events?type=Committed&points=1000",
    }
    job = source("late", 8, 60)
    took: dict[str, list[Took]] = {name: [] for name in questions}
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}")
        for name, path in questions.items():
            began, worked = time.perf_counter(), time.process_time()
            answer = await (http.post(path, json={"source": job}) if name == "submit" else http.get(path))
            took[name].append(Took(time.perf_counter() - began, time.process_time() - worked))
            assert answer.status_code in (200, 201), answer.text
    return took


async def start(home: Path, nodes: str) -> None:
    """A service starts on a home, and says on standard output how much of its time that took."""
    worked = time.process_time()
    gc.disable()  # as the service does until it answers
    async with standing(home, pretend=nodes):
        print(json.dumps({"cpu_s": time.process_time(), "import_s": worked}), flush=True)
        os._exit(0)  # a killed one


def started(home: Path, nodes: str) -> dict[str, float]:
    """Seconds of a process from its first instruction until its service answers, and until it has its imports."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--start", str(home), "--nodes", nodes], stdout=subprocess.PIPE, check=True
    )
    return {"wall_s": time.perf_counter() - began, **json.loads(done.stdout)}


async def run(jobs: int, nodes: str, rounds: int, churn_s: float) -> dict[str, Any]:
    """One measurement on a fresh home."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        fill(home, jobs, nodes)
        up = {"without a snapshot": started(home, nodes)}
        settings = json.dumps({"home": folder, "pretend": nodes})
        subprocess.run([sys.executable, "-m", "rota.service.process.snapshot", settings], check=True)
        up["with a snapshot"] = started(home, nodes)
        async with standing(home, pretend=nodes) as service:
            began = time.perf_counter()
            await settled(service.app.loop)
            placed_s = time.perf_counter() - began
            gc.freeze()  # as the service does before it answers
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
                "records": counts.number,
                "holding": sum(one.state.holds_devices for one in counts.live.values()),
                "waiting": sum(one.state is JobState.QUEUED for one in counts.live.values()),
                "placed_s": round(placed_s, 1),
                "churn_s": churn_s,
                "rounds": rounds,
                "up": up,
                "ms": {name: shown(values) for name, values in took.items()},
            }


def main(arguments: list[str]) -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--nodes", default="25x40x8")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--churn", type=float, default=0.0)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.start:
        asyncio.run(start(given.start, given.nodes))
    found = asyncio.run(run(given.jobs, given.nodes, given.rounds, given.churn))
    rows = [Row(f"start, {name}", one["wall_s"], "s", UP_LIMIT_S) for name, one in found["up"].items()]
    for name, one in found["ms"].items():
        limit = next((limit for word, limit in LIMITS_MS.items() if name.startswith(word)), LIMIT_MS)
        rows.append(Row(f"{name}, 95 %", one["p95"], "ms", limit))
    hand_in(rows)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
