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
from dataclasses import replace
from pathlib import Path

import numpy as np

from rota.cluster.core.asks import JobAsk, Shape, Slot
from rota.cluster.core.cycle import decide, step
from rota.cluster.core.facts import JobArrived, JobGone, JobReleased, Tick, apply
from rota.cluster.core.plugins import Preempt, Profile
from rota.cluster.core.snapshot import State
from rota.cluster.policies.profiles import get_profile
from rota.cluster.runs import compared, load, run_sim
from rota.cluster.traces import generate
from rota.runtime.chance import SeededChance
from rota.runtime.clock import SystemClock
from rota.spec.ids import JobId
from rota.spec.queue import Queue
from rota.spec.resources import Res, pretend_nodes

SIZES = ((1,), (1,), (1,), (2,), (4,), (8,), (8, 8))
TENANTS = 4
OPPORTUNISTIC_MEAN_S = 6 * 3600.0
MEAN_DEVICES = 33 / 7
"""Of the jobs that ``generate`` makes."""


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
            carry_out(state, profile, float(number))
        number += 1
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        running = state.holding()
        apply(state, JobGone(job=rng.choice(running).ask.id), float(number))
        began, cpu_began = time.perf_counter(), time.process_time()
        decide(state, profile, float(number))
        times.append((time.perf_counter() - began, time.process_time() - cpu_began))
        carry_out(state, profile, float(number))
        number += 1
    found = np.percentile(times, (50, 99), axis=0).T * 1000
    return {
        "devices": devices,
        "queued": queued,
        "profile": profile_name,
        **{
            name: {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}
            for name, (p50, p99) in zip(("decision_ms", "decision_cpu_ms"), found)
        },
    }


def carry_out(state: State, profile: Profile, now: float) -> None:
    """One pass that counts; whoever is preempted has let go when it returns."""
    for decision in step(state, Tick(), profile, now):
        if isinstance(decision, Preempt):
            apply(state, JobReleased(job=decision.job), now)


def guarantee(trace: Path, vcs: Path, scale: float, opportunistic: float) -> dict[str, object]:
    """Starts on shared cells and in one pool beside those in private clusters, with a load of opportunistic jobs."""
    given = load(trace, vcs, scale=scale)
    if opportunistic > 0:
        span_s = given.trace.jobs[-1].submit_s - given.trace.jobs[0].submit_s
        devices = sum(tenant.nodes * tenant.gpus_per_node for tenant in given.tenants)
        count = int(opportunistic * devices * span_s / OPPORTUNISTIC_MEAN_S / MEAN_DEVICES)
        more = generate(SeededChance(1), given.tenants, jobs=count, load=opportunistic, mean_s=OPPORTUNISTIC_MEAN_S)
        given = replace(given, trace=given.trace.beside(more))
    return compared(given, ["private", "hived", "pool-spread"], SystemClock())["profiles"]


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
        other.add_argument("--opportunistic", type=float, default=0.0, help="load of opportunistic jobs beside")
    given = parser.parse_args()
    found: object
    if given.command == "decide":
        found = [measure_decisions(n, given.queued, given.rounds, given.profile) for n in given.devices]
    elif given.command == "sim":
        found = run_sim(given.trace, given.vcs, given.profile, scale=given.scale)["summary"]
    else:
        found = guarantee(given.trace, given.vcs, given.scale, given.opportunistic)
    json.dump({"machine": machine(), "result": found}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
