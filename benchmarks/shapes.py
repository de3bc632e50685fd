"""Jobs whose shape the scheduler chooses, beside fixed shapes and two other ways to divide the same mixed cluster.

``python benchmarks/shapes.py [--jobs 40] [--seeds 3] [--load 1.2] [--json]``. Two racks, one of A100 and one of H100.
Each job trains one of four transformers with a fixed batch and has a plan for each size; its length is drawn. Ours is
the ``default`` profile in the simulator, with real places on nodes. The peers count devices by type and know no places.

- fixed: every job asks one size and one type, in proportion to the devices, under the ``default`` profile. The best
  size of all jobs alike counts.
- goodput: as Pollux (OSDI'21), every minute devices go where the harmonic mean of the speedups grows most.
- types: as Gavel (OSDI'20), of every fixed size the best; the share of time on each type by the linear program of
  max-min fairness (section 4.1 there), rounds of six minutes by its priorities.

A move, or a start from saved state, costs a minute everywhere.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from rota.cluster.core.choice import choices_of
from rota.cluster.core.jobs import Choice, JobAsk
from rota.cluster.core.state import State
from rota.cluster.policies import get_profile
from rota.cluster.sim.simulate import Overheads, SimJob, Simulation
from rota.job.core.placement import requests_of
from rota.runtime.clock import SystemClock
from rota.service.control.job_plans import with_plans
from rota.service.control.plan_hardware import PlannedDevices
from rota.spec.ids import JobId, RoleName
from rota.spec.job import AUTO_PLAN, JobSpec, RoleSpec, TrainedModel
from rota.spec.resources import Device, Node, Res, pretend_nodes
from run import Row, hand_in

KINDS: tuple[str, ...] = ("A100", "H100")
NODES, DEVICES = 2, 8
"""Nodes of each rack, devices of each node."""
MOVE_S = 60.0
ROUND_GOODPUT_S, ROUND_TYPES_S = 60.0, 360.0
MEAN_S = 3600.0
"""Mean length of a job on its fewest A100."""
WIDTH = 1.0
"""Spread of the log of the lengths."""
MODELS = {
    "350M": TrainedModel(layers=24, hidden=1024, heads=16, seq=1024, vocab=51200, batch=64),
    "1.3B": TrainedModel(layers=24, hidden=2048, heads=16, seq=1024, vocab=51200, batch=64),
    "2.7B": TrainedModel(layers=32, hidden=2560, heads=32, seq=1024, vocab=51200, batch=64),
    "small batch": TrainedModel(layers=24, hidden=1024, heads=16, seq=1024, vocab=51200, batch=8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A job: when it comes, its steps, and the seconds a step by type and number of devices."""

    name: str
    at: float
    steps: float
    step_s: Mapping[tuple[str, int], float]
    choices: tuple[Choice, ...]


Ends = dict[str, float]


def cluster() -> tuple[Node, ...]:
    """The nodes: a rack of each type."""
    made: list[Node] = []
    for node in pretend_nodes(f"2x{NODES}x{DEVICES}", host="bench"):
        kind = KINDS[node.cells[0] == "rack-1"]
        devices = tuple(Device(index=d.index, type=kind) for d in node.devices)
        made.append(replace(node, cpus=1e4, memory_bytes=10**14, devices=devices))
    return tuple(made)


def planned(model: TrainedModel) -> tuple[Choice, ...]:
    """The choices of a job as ``plan: auto`` gives them, 1 to 16 devices."""
    role = RoleSpec(
        name=RoleName("train"),
        run=("torchrun", "train.py"),
        replicas_min=1,
        replicas_max=2 * DEVICES,
        res=Res(cpus=1, gpus=1, gpu_type="|".join(KINDS)),
        plan=AUTO_PLAN,
        model=model,
    )
    spec = with_plans(JobSpec(name="bench", roles=(role,)), "", SystemClock(), PlannedDevices.of(cluster()))
    return choices_of(spec, requests_of)


def works(shapes: Mapping[str, tuple[Choice, ...]], seed: int, jobs: int, load: float) -> list[Work]:
    """Jobs that ask ``load`` times what the cluster gives, each taken on its fewest A100."""
    rng, at, made = random.Random(seed), 0.0, list[Work]()
    for i in range(jobs):
        at += rng.expovariate(load * len(KINDS) * NODES * DEVICES / MEAN_S / 4)
        choices = shapes[rng.choice(sorted(shapes))]
        step_s = {(str(c.starts[0].gpu_type), c.starts[0].replicas): c.step_s for c in choices[1:]}
        least = min(n for kind, n in step_s if kind == "A100")
        steps = rng.lognormvariate(0, WIDTH) * MEAN_S * 4 / step_s["A100", least]
        made.append(Work(name=f"j{i:02}", at=at, steps=steps, step_s=step_s, choices=choices))
    return made


def simulated(jobs: Sequence[SimJob]) -> Ends:
    """Ends under the ``default`` profile."""
    costs = Overheads(restore_s=MOVE_S)
    run = Simulation(State(cluster()), get_profile("default"), jobs, SystemClock(), overheads=costs).run()
    return {str(job): one.end_s or np.inf for job, one in run.runs.items()}


def ask(work: Work, choices: tuple[Choice, ...], seconds: float) -> SimJob:
    """A job of the simulator that takes so long with the first of its choices."""
    asked = JobAsk(
        id=JobId(work.name),
        shape=choices[0].shape,
        queued_at=work.at,
        est_s=seconds,
        choices=choices if len(choices) > 1 else (),
    )
    return SimJob(ask=asked, submit_s=work.at, work_s=seconds)


def ours(jobs: Sequence[Work]) -> Ends:
    return simulated([ask(one, one.choices, one.steps * one.choices[0].step_s) for one in jobs])


def sized(work: Work, kind: str, n: int) -> Choice:
    """The choice with this type and the largest size up to ``n``, else the smallest."""
    able = [c for c in work.choices[1:] if c.starts[0].gpu_type == kind]
    return max(able, key=lambda c: (c.starts[0].replicas <= n, c.starts[0].replicas * (c.starts[0].replicas <= n)))


def fixed(jobs: Sequence[Work], n: int) -> Ends:
    """Each job asks one type, in turn, and ``n`` devices."""
    chosen = [(one, sized(one, KINDS[i % 2], n)) for i, one in enumerate(jobs)]
    return simulated([ask(one, (choice,), one.steps * choice.step_s) for one, choice in chosen])


Given = dict[str, tuple[str, int]]
"""What each job has: a type and a number of devices."""


def in_rounds(jobs: Sequence[Work], round_s: float, divide: Callable[[list[Work], Given], Given]) -> Ends:
    """Play a way to divide devices by rounds; a job that is moved or started loses ``MOVE_S`` of its round."""
    left, ends, now, given = {one.name: one.steps for one in jobs}, Ends(), 0.0, Given()
    while len(ends) < len(jobs):
        active = [one for one in jobs if one.at <= now and one.name not in ends]
        new = divide(active, given) if active else {}
        for one in active:
            if one.name not in new:
                continue
            lost_s = 0.0 if given.get(one.name, new[one.name]) == new[one.name] else MOVE_S
            took_s = lost_s + left[one.name] * one.step_s[new[one.name]]
            if took_s <= round_s:
                ends[one.name] = now + took_s
            else:
                left[one.name] -= (round_s - lost_s) / one.step_s[new[one.name]]
        given, now = given | new, now + round_s
    return ends


def goodput(active: list[Work], given: Given) -> Given:
    """Every job its fewest, in order of arrival, then the devices of most gain of the harmonic mean of speedups."""
    free, new = dict.fromkeys(KINDS, NODES * DEVICES), Given()
    base = {one.name: max(one.step_s.values()) for one in active}
    for one in active:
        able = [place for place in one.step_s if place[1] <= free[place[0]]]
        if able:
            least = min(n for _, n in able)
            new[one.name] = min((p for p in able if p[1] == least), key=lambda p: one.step_s[p])
            free[new[one.name][0]] -= least
    while True:
        best, gain = None, 0.0
        for one in (one for one in active if one.name in new):
            kind, n = new[one.name]
            for to, more in one.step_s:
                if to == kind and n < more <= n + free[kind]:
                    worth = (one.step_s[kind, n] - one.step_s[to, more]) / base[one.name] / (more - n)
                    if worth > gain:
                        best, gain = (one.name, (to, more)), worth
        if best is None:
            break
        free[best[1][0]] -= best[1][1] - new[best[0]][1]
        new[best[0]] = best[1]

    def fitness(what: Given) -> float:
        return sum(base[one.name] / one.step_s[what[one.name]] for one in active if one.name in what)

    old = {one.name: given[one.name] for one in active if one.name in given}
    same = old.keys() == new.keys() and all(
        sum(n for kind, n in old.values() if kind == one) <= NODES * DEVICES for one in KINDS
    )
    return old if same and fitness(new) < 1.05 * fitness(old) else new


class ByTypes:
    """Max-min fair shares of time on each type, then rounds in which those most behind their share go first."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._rounds: dict[tuple[str, str], int] = {}
        self._known: tuple[str, ...] = ()
        self._share: dict[tuple[str, str], float] = {}

    def __call__(self, active: list[Work], given: Given) -> Given:
        sizes = {(one.name, kind): sized(one, kind, self._n).starts[0].replicas for one in active for kind in KINDS}
        if self._known != (names := tuple(one.name for one in active)):
            self._known, self._rounds = names, {}
            self._share = self._solve(active, sizes)
        order = sorted(self._share, key=lambda one: (-self._share[one] / (self._rounds.get(one, 0) + 1e-3), one))
        free, new = dict.fromkeys(KINDS, NODES * DEVICES), Given()
        for job, kind in order:
            if self._share[job, kind] > 1e-6 and job not in new and sizes[job, kind] <= free[kind]:
                new[job] = kind, sizes[job, kind]
                free[kind] -= sizes[job, kind]
                self._rounds[job, kind] = self._rounds.get((job, kind), 0) + 1
        return new

    @staticmethod
    def _solve(active: list[Work], sizes: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], float]:
        keys, k = [(one.name, kind) for one in active for kind in KINDS], len(KINDS)
        rate = [1 / one.step_s[kind, sizes[one.name, kind]] for one in active for kind in KINDS]
        rows, limits = list[list[float]](), list[float]()
        for i in range(len(active)):
            equal = sum(rate[k * i : k * i + k]) / k
            rows.append([-rate[j] / equal if j // k == i else 0.0 for j in range(len(keys))] + [1.0])
            rows.append([1.0 if j // k == i else 0.0 for j in range(len(keys))] + [0.0])
            limits += [0.0, 1.0]
        for kind in KINDS:
            rows.append([float(sizes[key]) if key[1] == kind else 0.0 for key in keys] + [0.0])
            limits.append(float(NODES * DEVICES))
        # A little for all throughput, so that what the least served cannot use is given to others.
        objective = [-1e-3 * r / max(rate) for r in rate] + [-1.0]
        found = linprog(objective, A_ub=rows, b_ub=limits, bounds=[(0, None)] * (len(keys) + 1), method="highs")
        return dict(zip(keys, found.x))


def figures(jobs: Sequence[Work], ends: Ends) -> tuple[float, float]:
    """Mean completion and makespan in seconds."""
    return float(np.mean([ends[one.name] - one.at for one in jobs])), max(ends.values()) - jobs[0].at


SIZES = (1, 2, 4, 8, 16)


def measure(seeds: int, count: int, load: float) -> dict[str, tuple[float, float]]:
    """Mean completion and makespan of each way, over the seeds; of fixed sizes the best for each figure."""
    shapes = {name: planned(model) for name, model in MODELS.items()}
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(seeds):
        jobs = works(shapes, seed, count, load)
        ways: dict[str, list[Ends]] = {
            "ours": [ours(jobs)],
            "fixed": [fixed(jobs, n) for n in SIZES],
            "goodput": [in_rounds(jobs, ROUND_GOODPUT_S, goodput)],
            "types": [in_rounds(jobs, ROUND_TYPES_S, ByTypes(n)) for n in SIZES],
        }
        for name, runs in ways.items():
            both = [figures(jobs, one) for one in runs]
            found.setdefault(name, []).append((min(one for one, _ in both), min(one for _, one in both)))
    return {
        name: (float(np.mean([a for a, _ in all_])), float(np.mean([b for _, b in all_])))
        for name, all_ in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--load", type=float, default=1.2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measure(given.seeds, given.jobs, given.load)
    mean_s, span_s = found["ours"]
    rows = [
        Row("mean completion of jobs with chosen shapes", mean_s, "s", found[one][0], one)
        for one in found
        if one != "ours"
    ]
    rows += [Row("makespan of the same", span_s, "s", found[one][1], one) for one in found if one != "ours"]
    hand_in(rows)
    if given.json:
        print(json.dumps({name: {"mean_s": a, "makespan_s": b} for name, (a, b) in found.items()}))
        return
    for row in rows:
        print("  ".join(f"{cell:45}" if i == 0 else f"{cell:18}" for i, cell in enumerate(row.cells())))


if __name__ == "__main__":
    main()
