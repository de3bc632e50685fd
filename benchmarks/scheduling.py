"""Scheduling speed: time of one decision on large clusters, jobs a second in virtual time, guarantees on a real trace.

``decide`` fills a cluster, queues gangs of a mixed size and measures single decisions. ``sim`` plays a trace.
``guarantee`` compares starts with a private cluster of each tenant. Both generate a trace unless one is given.
Without a command all three run, in 15 seconds. Every command prints one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rota.cluster.core.cycle import decide, step
from rota.cluster.core.events import JobArrived, JobGone, JobReleased, Tick, apply
from rota.cluster.core.jobs import JobAsk, Shape, Slot
from rota.cluster.core.profile import Preempt, Profile
from rota.cluster.core.state import State
from rota.cluster.policies import get_profile
from rota.cluster.sim.calibration import Calibration
from rota.cluster.sim.forecast import Estimate, Estimates, Forecast, Start
from rota.cluster.sim.runs import SimInput, compared, document, load, simulate
from rota.cluster.sim.simulate import Simulation
from rota.cluster.sim.traces import Tenant, generate
from rota.runtime.clock import SystemClock
from rota.runtime.random import SeededRandom
from rota.spec.ids import JobId
from rota.spec.queue import Queue
from rota.spec.resources import Res, pretend_nodes
from run import Row, hand_in

SIZES = ((1,), (1,), (1,), (2,), (4,), (8,), (8, 8))
TENANTS = 4
URGENT, URGENT_SHARE = 50, 0.25
"""Priority of urgent jobs, and how many of them there are where several users ask."""
OPPORTUNISTIC_MEAN_S = 6 * 3600.0
MEAN_DEVICES = 33 / 7
"""Of the jobs that ``generate`` makes."""
GENERATED = 1500
"""Jobs of the trace that is played when none is given."""
LIMITS: dict[str, tuple[float, ...]] = {"exact": (1.0, 1.0), "noisy": (2.0, 10.0), "none": ()}
"""Time limits of jobs as multiples of their true time."""
WITHOUT_COMMAND = {
    "decide": ("--devices", "1024", "8192", "--profile", "default"),
    "sim": ("--profile", "default"),
    "guarantee": ("--opportunistic", "0.3"),
}
"""What runs, with which arguments."""


def machine() -> dict[str, object]:
    """Where the figures were measured."""
    return {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}


def measure_decisions(devices: int, queued: int, rounds: int, profile_name: str, users: int = 1) -> dict[str, object]:
    """Decision times on a full cluster with ``queued`` waiting gangs, one job ending before each decision.

    With several users a quarter of the jobs is urgent.
    """
    rng, mix = random.Random(0), random.Random(1)
    nodes = pretend_nodes(f"{max(1, devices // 128)}x{min(16, devices // 8)}x8", host="bench")
    queues = [Queue(path=f"t{i}", guaranteed=Res(cpus=0, gpus=devices / TENANTS)) for i in range(TENANTS)]
    state, profile = State(nodes, queues), get_profile(profile_name)
    number = 0
    while len(state.waiting_jobs()) < queued:
        slots = tuple(Slot(gpus=gpus) for gpus in rng.choice(SIZES))
        ask = JobAsk(
            id=JobId(f"j{number:06}"),
            shape=Shape(slots=slots),
            queue=f"t{rng.randrange(TENANTS)}",
            queued_at=float(number),
            est_s=float(rng.randrange(60, 7200)),
            user=f"u{mix.randrange(users)}",
            priority=URGENT if users > 1 and mix.random() < URGENT_SHARE else 0,
        )
        apply(state, JobArrived(ask=ask), float(number))
        if (number + 1) % min(50, queued) == 0 or state.free.sum() == 0:
            carry_out(state, profile, float(number))
        number += 1
    gc.collect()
    gc.freeze()  # as a service does: else every thirtieth decision or so looks through all of it
    times: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        running = state.holders()
        apply(state, JobGone(job=rng.choice(running).ask.id), float(number))
        began, cpu_began = time.perf_counter(), time.process_time()
        decide(state, profile, float(number))
        took, cpu_ended = time.perf_counter() - began, time.process_time()
        first_fit(state)
        times.append((took, cpu_ended - cpu_began, time.process_time() - cpu_ended))
        carry_out(state, profile, float(number))
        number += 1
    gc.unfreeze()
    found = np.percentile(times, (50, 99), axis=0).T * 1000
    return {
        "devices": devices,
        "queued": queued,
        "users": users,
        "profile": profile_name,
        **{
            name: {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}
            for name, (p50, p99) in zip(("decision_ms", "decision_cpu_ms", "first_fit_cpu_ms"), found)
        },
    }


def first_fit(state: State) -> int:
    """The peer of a decision: in their order, the gangs whose slots find a node each with as many free devices."""
    free, started = state.free.sum(axis=1), 0
    for row in state.waiting_jobs():
        left = free.copy()
        for slot in row.ask.shape.slots:
            nodes = np.flatnonzero(left >= slot.gpus)
            if not nodes.size:
                break
            left[nodes[0]] -= slot.gpus
        else:
            free, started = left, started + 1
    return started


def carry_out(state: State, profile: Profile, now: float) -> None:
    """One pass that counts; whoever is preempted has let go when it returns."""
    for decision in step(state, Tick(), profile, now):
        if isinstance(decision, Preempt):
            apply(state, JobReleased(job=decision.job), now)


def trace_of(given: argparse.Namespace) -> SimInput:
    """The trace that is named, else a generated one of eight tenants that ask 70 % of 1,408 devices."""
    if given.trace is not None:
        return load(given.trace, given.vcs, scale=given.scale)
    tenants = tuple(Tenant(vc=f"t{i}", nodes=8 + 4 * i) for i in range(8))
    trace = generate(SeededRandom(0), tenants, jobs=GENERATED, load=0.7)
    return SimInput(trace=trace, tenants=tenants, scale=1.0, seed=0)


def guarantee(given: SimInput, opportunistic: float) -> dict[str, Any]:
    """Starts on shared cells and in one pool beside those in private clusters, with a load of opportunistic jobs."""
    if opportunistic > 0:
        span_s = given.trace.jobs[-1].submit_s - given.trace.jobs[0].submit_s
        devices = sum(tenant.nodes * tenant.gpus_per_node for tenant in given.tenants)
        count = int(opportunistic * devices * span_s / OPPORTUNISTIC_MEAN_S / MEAN_DEVICES)
        more = generate(SeededRandom(1), given.tenants, jobs=count, load=opportunistic, mean_s=OPPORTUNISTIC_MEAN_S)
        given = replace(given, trace=given.trace.beside(more))
    return compared(given, ["private", "hived", "pool-spread"], SystemClock())["profiles"]


def estimates(given: SimInput, profile_name: str, limits: Sequence[float], sampled: int) -> dict[str, Any]:
    """Estimated starts beside the true ones, of jobs drawn from those that wait; jobs come on after the estimate.

    Each job asks its true time multiplied with a number between two ``limits``, or none. Those of the first tenth of
    the trace are not counted: nothing has ended by which they could be told.
    """
    rng, clock, jobs = random.Random(0), SystemClock(), given.jobs()
    for i, job in enumerate(jobs):
        est_s = job.work_s * rng.uniform(*limits) if limits else None
        jobs[i] = replace(job, ask=replace(job.ask, est_s=est_s))
    drawn = {jobs[i].ask.id for i in rng.sample(range(len(jobs) // 10, len(jobs)), min(8 * sampled, len(jobs) // 2))}
    found: dict[JobId, tuple[float, Estimate]] = {}
    wider: dict[JobId, Estimate] = {}
    calibration, waiting, took = Calibration(), dict[JobId, Start](), list[float]()

    def look() -> None:
        for job in [one for one in waiting if run.runs[one].first_start_s is not None]:
            calibration.started(job, run.now)
            del waiting[job]
        asked = [job for job in run.state.arrivals.keys() | known if job in drawn and job not in found]
        for job in sorted(asked)[: sampled - len(found)]:
            if (row := run.state.jobs.get(job)) is None or row.phase != "queued" or row.wait is None or row.attempt:
                continue  # of one that ran before, the first start is over
            began = time.process_time()
            forecast = Forecast(run.state, run.profile, run.now, until=job, wall_max_s=60.0)
            made = forecast.play(clock)
            found[job], wider[job] = (run.now, made.of(job)), calibration.of(made, run.now).of(job)
            took.append(time.process_time() - began)
            waiting[job] = made.starts[job]
            calibration.tell(Estimates(starts=waiting, basis=""), run.now)
        known.clear()
        known.update(job for job in run.state.arrivals if job in drawn)

    known: set[JobId] = set()
    run = Simulation(State(given.nodes, given.queues), get_profile(profile_name), jobs, clock, between_passes=look)
    runs = run.run().runs
    told = [(*found[job], wider[job], start) for job in found if (start := runs[job].first_start_s) is not None]
    answered = [
        (at, one.p10, one.p50, one.p90, wide.p10, wide.p90, start)
        for at, one, wide, start in told
        if None not in (one.p10, one.p50)
    ]
    if not answered:
        raise SystemExit("no job that was drawn waited and started: give a larger trace, or fewer nodes")
    at, early, likely, late, first, last, start = np.array(answered, dtype=float).T
    waits, errors = start - at, np.abs(likely - start)
    return {
        "jobs": len(told),
        "without_answer": len(told) - len(answered),
        "mean_wait_s": round(float(waits.mean()), 1),
        "mean_error_of_wait": round(float(errors.mean() / waits.mean()), 3),
        "median_error_of_own_wait": round(float(np.median(errors / np.maximum(waits, 1.0))), 3),
        "inside_p10_p90": round(float(((early - 1 <= start) & (start <= late + 1)).mean()), 3),
        "calibrated_inside": round(float(((first - 1 <= start) & (start <= last + 1)).mean()), 3),
        "width_of_wait": [round(float(one.mean() / waits.mean()), 2) for one in (late - early, last - first)],
        "before_p50": round(float((start <= likely).mean()), 3),
        "cpu_s_p50_p99": [round(float(one), 3) for one in np.percentile(took, (50, 99))],
    }


def measure(given: argparse.Namespace) -> Any:
    """The result of one command."""
    if given.command == "decide":
        return [
            measure_decisions(n, given.queued, given.rounds, profile, given.users)
            for profile in given.profile
            for n in given.devices
        ]
    played = trace_of(given)
    if given.command == "estimates":
        played = replace(played, trace=replace(played.trace, jobs=played.trace.jobs[: given.jobs]))
        return {
            name: estimates(played, given.profile, limits, given.sampled)
            for name, limits in LIMITS.items()
            if name in given.limits
        }
    if given.command == "guarantee":
        return guarantee(played, given.opportunistic)
    began = time.process_time()
    summary = document(played, given.profile, simulate(played, given.profile, SystemClock()))["summary"]
    return {**summary, "job_cpu_ms": round((time.process_time() - began) * 1e3 / len(played.trace.jobs), 4)}


def rows(found: dict[str, Any]) -> list[Row]:
    """All three commands as rows of the table."""
    largest, profiles = found["decide"][-1], found["guarantee"]
    text = f"a decision, {largest['queued']} gangs wait for {largest['devices']} devices, 99 %"
    later = {name: profiles[name]["vs_baseline"]["later_guaranteed"] for name in ("hived", "pool-spread")}
    ours, peer = largest["decision_cpu_ms"], largest["first_fit_cpu_ms"]["p50"]
    return [
        Row(text, largest["decision_ms"]["p99"], "ms", 15.0),
        Row("the same, half, CPU", ours["p50"], "ms", peer, "first fit"),
        Row("the same, 99 %, CPU", ours["p99"], "ms", peer, "first fit, half"),
        Row("a job of a simulated trace", 1e3 / found["sim"]["jobs_per_s"], "ms", 0.5),
        Row("a job of a simulated trace, CPU", found["sim"]["job_cpu_ms"], "ms", peer, "first fit of a decision"),
        Row("jobs later than in a private cluster", later["hived"], "jobs", later["pool-spread"], "one pool"),
    ]


def parser() -> argparse.ArgumentParser:
    """Commands and options."""
    made = argparse.ArgumentParser(description=__doc__)
    commands = made.add_subparsers(dest="command")
    one = commands.add_parser("decide")
    one.add_argument("--devices", type=int, nargs="+", default=[128, 1024, 2304, 8192])
    one.add_argument("--queued", type=int, default=1000)
    one.add_argument("--rounds", type=int, default=100)
    one.add_argument("--users", type=int, default=1, help="with several users a quarter of the jobs is urgent")
    one.add_argument("--profile", nargs="+", default=["fifo"], help="one or several")
    for name in ("sim", "guarantee", "estimates"):
        other = commands.add_parser(name)
        other.add_argument("--trace", type=Path)
        other.add_argument("--vcs", type=Path)
        other.add_argument("--scale", type=float, default=0.35)
        other.add_argument("--profile", default="fifo")
        other.add_argument("--opportunistic", type=float, default=0.0, help="load of opportunistic jobs beside")
    other.add_argument("--jobs", type=int, help="the first jobs of the trace only")
    other.add_argument("--sampled", type=int, default=100, help="jobs that are told a start")
    other.add_argument("--limits", nargs="+", choices=LIMITS, default=list(LIMITS), help="what jobs ask of their time")
    return made


def main(arguments: Sequence[str]) -> None:
    """Run one measurement, or all, and print."""
    given = parser().parse_args(arguments)
    if given.command is None:
        found: Any = {name: measure(parser().parse_args([name, *words])) for name, words in WITHOUT_COMMAND.items()}
        hand_in(rows(found))
    else:
        if given.command != "decide" and (given.trace is None) != (given.vcs is None):
            parser().error("--trace and --vcs are given together, or neither and a trace is generated")
        found = measure(given)
    json.dump({"machine": machine(), "result": found}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main(sys.argv[1:])
