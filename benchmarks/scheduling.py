"""Scheduling speed: time of one decision on large clusters, jobs a second in virtual time, guarantees on a real trace.

``decide`` fills a cluster, queues gangs of a mixed size and measures single decisions. ``sim`` plays a trace.
``guarantee`` compares starts with a private cluster of each tenant. Every command prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from pathlib import Path

import numpy as np

from rota.cluster.core.asks import JobAsk, Shape, Slot
from rota.cluster.core.cycle import apply, decide, step
from rota.cluster.core.facts import JobArrived, JobGone, Tick
from rota.cluster.core.snapshot import State
from rota.cluster.policies.profiles import get_profile
from rota.cluster.runs import compare, run_sim
from rota.spec.ids import JobId
from rota.spec.queue import Queue
from rota.spec.resources import Res, pretend_nodes

SIZES = ((1,), (1,), (1,), (2,), (4,), (8,), (8, 8))
TENANTS = 4


def machine() -> dict[str, object]:
    """Where the figures were measured."""
    return {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}


def measure_decisions(devices: int, queued: int, rounds: int, profile_name: str) -> dict[str, object]:
    """Decision times on a full cluster with ``queued`` waiting gangs, one job ending before each decision."""
    rng = random.Random(0)
    nodes = pretend_nodes(f"{max(1, devices // 128)}x{min(16, devices // 8)}x8", host="bench")
    queues = [Queue(path=f"t{i}", guaranteed=Res(cpus=0, gpus=devices / TENANTS)) for i in range(TENANTS)]
    state, profile = State(nodes, queues), get_profile(profile_name)
    number = 0
    while len(state.waiting()) < queued:
        slots = tuple(Slot(gpus=gpus) for gpus in rng.choice(SIZES))
        ask = JobAsk(
            id=JobId(f"j{number:06}"),
            shape=Shape(slots=slots),
            queue=f"t{rng.randrange(TENANTS)}",
            queued_at=float(number),
            est_s=float(rng.randrange(60, 7200)),
        )
        apply(state, JobArrived(ask=ask), float(number))
        if number % 50 == 49 or state.free.sum() == 0:
            step(state, Tick(), profile, float(number))
        number += 1
    times: list[float] = []
    for _ in range(rounds):
        running = state.holding()
        apply(state, JobGone(job=rng.choice(running).ask.id), float(number))
        began = time.perf_counter()
        decide(state, profile, float(number))
        times.append((time.perf_counter() - began) * 1000)
        step(state, Tick(), profile, float(number))
        number += 1
    p50, p99 = np.percentile(times, (50, 99))
    return {
        "devices": devices,
        "queued": queued,
        "profile": profile_name,
        "decision_ms": {"p50": round(float(p50), 3), "p99": round(float(p99), 3)},
    }


def main() -> None:
    """Run one measurement and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("decide")
    one.add_argument("--devices", type=int, nargs="+", default=[128, 1024, 2304, 8192])
    one.add_argument("--queued", type=int, default=1000)
    one.add_argument("--rounds", type=int, default=100)
    one.add_argument("--profile", default="fifo")
    for name in ("sim", "guarantee"):
        other = commands.add_parser(name)
        other.add_argument("--trace", type=Path, required=True)
        other.add_argument("--vcs", type=Path, required=True)
        other.add_argument("--scale", type=float, default=0.35)
        other.add_argument("--profile", default="fifo")
    given = parser.parse_args()
    found: object
    if given.command == "decide":
        found = [measure_decisions(n, given.queued, given.rounds, given.profile) for n in given.devices]
    elif given.command == "sim":
        found = run_sim(given.trace, given.vcs, given.profile, scale=given.scale)["summary"]
    else:
        found = compare(given.trace, given.vcs, ["private", "hived", "pool-spread"], scale=given.scale)["profiles"]
    json.dump({"machine": machine(), "result": found}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
