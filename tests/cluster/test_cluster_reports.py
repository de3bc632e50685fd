"""Reports of the simulator stay as recorded: every profile on small traces, job by job."""

from __future__ import annotations

import csv
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from rota.cluster.policies import PROFILES
from rota.cluster.sim.runs import run_sim
from rota.cluster.sim.simulate import Overheads

RECORDED = Path(__file__).resolve().parent.parent / "data" / "cluster" / "reports.json"
TENANTS = "vc,nodes,guaranteed,limit,weight\na,3,24,40,2\nb,2,16,,1\nc,1,4,24,1\n"
COLUMNS = "job_id submit_s duration_s gpus vc user priority preemptible est_s milli_gpu gang max_gpus job_class"
TRACES = ("whole", "mixed")


def write_trace(kind: str, folder: Path) -> tuple[Path, Path]:
    """Jobs of one kind and their tenants: ``whole`` devices alone, or ``mixed`` with parts of devices, gangs, ranks."""
    rng = random.Random(kind)
    trace, tenants = folder / f"{kind}.csv", folder / "tenants.csv"
    with trace.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS.split())
        writer.writeheader()
        at = 0.0
        for i in range(60):
            at = round(at + rng.expovariate(1 / 55), 3)
            row: dict[str, Any] = {"job_id": f"j{i}", "submit_s": at, "vc": rng.choice("aaabbc")}
            row["duration_s"] = round(rng.lognormvariate(0, 1) * 600, 3)
            row["gpus"] = rng.choice((1, 1, 1, 2, 4, 8, 16))
            if kind == "mixed":
                row["user"], row["priority"] = rng.choice(("ann", "bob", "eve")), rng.choice((-1, 50, 50, 75, 110))
                row["preemptible"], row["est_s"] = rng.choice((0, 1, 1)), row["duration_s"] * rng.choice((1, 2))
                row["job_class"] = rng.choice(("", "small", "large"))
                if row["gpus"] == 1 and rng.random() < 0.4:
                    row["milli_gpu"] = rng.choice((250, 500))
                elif row["gpus"] == 4:
                    row["gang"], row["max_gpus"] = "2x2", 8
            writer.writerow(row)
    tenants.write_text(TENANTS)
    return trace, tenants


def report(kind: str, profile: str, folder: Path) -> dict[str, Any]:
    """The document of ``rota sim run --json --jobs`` without what depends on the speed of the machine."""
    costs = Overheads(start_s=10.0, checkpoint_s=5.0, restore_s=25.0) if kind == "mixed" else None
    shown = run_sim(*write_trace(kind, folder), profile, seed=7, all_jobs=True, overheads=costs)
    for name in ("wall_s", "jobs_per_s", "decision_ms"):
        del shown["summary"][name]
    return shown


def digest(document: dict[str, Any]) -> str:
    """Of the document with six decimals, so that the last bit of a sum does not count."""
    whole = json.loads(json.dumps(document), parse_float=lambda text: round(float(text), 6))
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRACES)
@pytest.mark.parametrize("profile", PROFILES)
def test_the_report_of_a_profile_is_the_recorded_one(profile: str, kind: str, tmp_path: Path) -> None:
    shown = report(kind, profile, tmp_path)
    assert digest(shown) == json.loads(RECORDED.read_text())[f"{kind} {profile}"], (
        f"other decisions than recorded: {shown['summary']}; for intended ones run this file with a scratch folder"
    )


def _record(folder: Path) -> None:
    found = {f"{kind} {name}": digest(report(kind, name, folder)) for kind in TRACES for name in PROFILES}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    _record(Path(sys.argv[1]))
