"""Split of the cores of a machine between actor and rollouts: the one that is found beside all of them run by hand.

``python benchmarks/splits.py [--commits 40] [--rounds 1]``. The job is ``examples/grpo_sums/job_split.yaml`` with four
equal shares of the cores that the service sees; by hand it has each split for so many commits, in turn, ``rounds``
times. ``ratio`` is the median commit of the split that is found, as it was by hand, over that of the best one. It needs
a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ruamel.yaml import YAML

from calls import LIMIT_S, TERMINAL, Records, machine, service
from ettr import ended_at
from rota.cluster.core.splits import WINDOW
from rota.runtime.environ import Home
from rota.runtime.event_log.sql import SqlLog
from rota.service.process import daemon
from rota.spec.events import Committed, JobAdmitted
from rota.spec.ids import JobId
from run import Row, hand_in

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "grpo_sums"
SLOTS, BESIDE = 4, 0.4
"""Members of both roles together; cores of the other roles."""
SFT = 2
"""Supervised commits before those that are measured."""
STAYS = 4 * WINDOW
"""Commits after which a split that was not left counts as found."""
Split = tuple[int, int]
SPLITS: tuple[Split, ...] = ((1, 3), (2, 2))
"""All that there are: the 256 rows of a step have no three equal parts."""


def job_of(split: Split | None, cores: float) -> str:
    """The job file: with a split by hand, or with one that is chosen."""
    spec = YAML(typ="safe").load(FOLDER / "job_split.yaml")
    for role, n in zip(("actor", "rollout"), split or (0, 0)):
        spec["roles"][role]["resources"]["cpus"] = round((cores - BESIDE) / SLOTS - 0.005, 2)
        spec["roles"][role] |= {"replicas": n} if n else {}
    if split:
        del spec["roles"]["actor"]["plan"]
        spec["roles"]["actor"]["mesh"] = {"dp": split[0]}
    spec["env"] |= {"SFT_STEPS": str(SFT), "GRPO_STEPS": "100000"}
    return json.dumps(spec)


def run(home: Home, split: Split | None, commits: int) -> tuple[Split, list[Split], float, str]:
    """The last split of a job, all that it had, the median seconds of the commits of the last, and why it has it."""
    cores = sum(node["cpus"] for node in daemon.ask(home, "GET", "/api/v1/nodes")["items"])
    body = {"source": job_of(split, cores), "filename": "job.json", "workdir": str(FOLDER)}
    job = str(daemon.ask(home, "POST", "/api/v1/jobs", body)["id"])
    records, until_s = Records(SqlLog(home.db_url), JobId(job)), time.monotonic() + LIMIT_S
    had, times, why = list[Split](), list[float](), ""
    while len(times) < (commits if split else STAYS):
        seen = len(times)
        shown = daemon.ask(home, "GET", f"/api/v1/jobs/{job}")
        if shown["state"] in TERMINAL or time.monotonic() > until_s:
            raise RuntimeError(f"{job} is {shown['state']} with {len(times)} commits: {shown['text']}")
        had, times = [], []
        for record in records.now():
            if isinstance(record.event, JobAdmitted):
                starts = record.event.starts
                had.append(split or (starts[0].replicas, starts[1].replicas))
                times, why = [], str(record.event.why.get("choice", ""))
            elif isinstance(record.event, Committed) and record.event.n > SFT:
                times.append(record.at)
        until_s = until_s if len(times) == seen else time.monotonic() + LIMIT_S
        time.sleep(1.0)
    daemon.ask(home, "POST", f"/api/v1/jobs/{job}:stop", {})
    if ended_at(records, LIMIT_S) is None:
        raise RuntimeError(f"{job} does not end within {LIMIT_S:.0f} s of its stop")
    return had[-1], had, median(b - a for a, b in pairwise(times)), why


def measure(home: Home, commits: int, rounds: int) -> dict[str, Any]:
    """All splits in turn, and the one that is found."""
    by_hand: dict[Split, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for split in SPLITS:
            by_hand[split].append(run(home, split, commits)[2])
    found, had, own_s, why = run(home, None, commits)
    step_s = {split: median(times) for split, times in by_hand.items()}
    return {
        "by_hand_step_s": {str(split): round(seconds, 4) for split, seconds in step_s.items()},
        "splits": had,
        "found": found,
        "found_step_s": round(own_s, 4),
        "why": why,
        "ratio": round(step_s[found] / min(step_s.values()), 4) if found in step_s else None,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    with service() as home:
        found = measure(home, given.commits, given.rounds)
    if found["ratio"]:
        hand_in([Row("step of the split that is found over the best by hand", found["ratio"], "")])
    print(json.dumps({**found, "machine": machine()}, indent=2))


if __name__ == "__main__":
    main()
