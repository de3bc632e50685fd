"""The scheduler on real processes: exact devices, preemption, drain, suspend and resume; its log replays the same."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.real.jobs import deep
from tests.real.test_service import Installation, made_settings

from rota.service.offline import sim_replay
from rota.service.process import daemon

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6
WORKER = """
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["ROTA_CHECKPOINT_DIR"])
saved = folder / "step"
done = int(saved.read_text()) if saved.exists() else 0
print("devices", os.environ.get("CUDA_VISIBLE_DEVICES"), "from", done, flush=True)
while not (pathlib.Path(sys.argv[1]).exists() and done >= 6):
    time.sleep(0.05)
    if done < 6:
        done += 1
        (folder / "new").write_text(str(done))
        (folder / "new").replace(saved)
        with open(sys.argv[1] + ".steps", "a") as file:
            file.write(f"{done} ")
"""
WORLD = """
import os, pathlib, sys, time
folder, rank = pathlib.Path(os.environ["ROTA_CHECKPOINT_DIR"]), int(os.environ["RANK"])
saved = folder / "step"
done = int(saved.read_text()) if saved.exists() else 0
if rank == 0:
    with open(sys.argv[1], "a") as file:
        file.write(os.environ["WORLD_SIZE"] + f" {done}\\n")
while True:
    time.sleep(0.2)
    if rank == 0:
        done += 1
        (folder / "new").write_text(str(done))
        (folder / "new").replace(saved)
"""


@pytest.fixture(scope="module")
def four_nodes() -> Iterator[Installation]:
    home = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    installation = Installation(made_settings(home, pretend="2x2x2", profile="default"))
    installation.up()
    try:
        yield installation
    finally:
        daemon.down(installation.settings, force=True)
        shutil.rmtree(home, ignore_errors=True)


class Cluster:
    """One installation and the jobs of this test on it."""

    def __init__(self, site: Installation) -> None:
        self.site = site

    def submit(self, name: str, replicas: int, gpus: int, **fields: Any) -> str:
        run = [sys.executable, "-c", WORKER, str(self.flag(name))]
        role = {"run": run, "replicas": replicas, "resources": {"cpus": 0.5, "gpus": gpus}}
        spec = {"name": name, "roles": {"main": role}, **fields}
        return str(self.site.ask("/jobs", {"source": json.dumps(spec), "filename": "job.json"})["id"])

    def flag(self, name: str) -> Path:
        return self.site.home.root / f"{name}.flag"

    def finish(self, job: str) -> None:
        self.site.finish(job)
        assert self.site.ended(job)["state"] == "SUCCEEDED"

    def where(self, job: str) -> dict[str, list[int]]:
        items = self.site.ask(f"/jobs/{job}/placement")["items"]
        return {row["instance"]: [row["node"], *row["devices"]] for row in items}

    def said(self, job: str) -> set[str]:
        return {row["text"] for row in self.site.ask(f"/jobs/{job}/logs")["items"] if "devices" in row["text"]}

    def state(self, job: str, *states: str) -> dict[str, Any]:
        return self.site.wait(job, lambda one: one["state"] in states, " or ".join(states))


def test_four_nodes_share_devices_by_priority_and_pause_and_the_log_replays_to_the_same_decisions(
    four_nodes: Installation,
) -> None:
    cluster = Cluster(four_nodes)
    nodes = [one["id"] for one in four_nodes.ask("/nodes")["items"]]
    # 1. a gang over all nodes gets exactly these devices
    learner = cluster.submit("learner", 1, 2)
    wide = cluster.submit("wide", 3, 2)
    four_nodes.running(learner), four_nodes.running(wide)
    held = [*cluster.where(learner).values(), *cluster.where(wide).values()]
    assert sorted(held) == [[node, 0, 1] for node in sorted(nodes)]
    assert all("devices 0,1 " in line for line in cluster.said(wide) | cluster.said(learner))
    # 2. who is more urgent gets the devices of one that saved its work and waits again
    urgent = cluster.submit("urgent", 1, 2, priority=90)
    assert four_nodes.running(urgent)["state"] == "RUNNING"
    events = four_nodes.events(wide) + four_nodes.events(learner)
    assert events.count("PreemptAsked") == events.count("JobRequeued") == 1
    cluster.finish(urgent)
    four_nodes.running(wide), four_nodes.running(learner)
    # 3. suspend: the devices are free; resume: it goes on after the last step that was saved
    four_nodes.ask(f"/jobs/{learner}:pause", {"grace_s": 1})
    cluster.state(learner, "PAUSED")
    place = four_nodes.home.root / "checkpoints" / learner / "step"
    steps = int(place.read_text())
    assert not four_nodes.ask("/queues")["items"][0]["used_gpus"] > 6
    four_nodes.ask(f"/jobs/{learner}:resume", {})
    four_nodes.running(learner)
    cluster.finish(wide), cluster.finish(learner)
    assert {line.partition("from ")[2] for line in cluster.said(learner)} >= {"0", str(steps)}
    # 4. the log of all this replays to the same decisions
    found = sim_replay(four_nodes.home.db, "default")
    assert found["different"] == [] and found["decisions"] >= 6


@deep
def test_a_drained_node_gets_nothing_new_and_is_named_as_what_binds(four_nodes: Installation) -> None:
    cluster = Cluster(four_nodes)
    nodes = [one["id"] for one in four_nodes.ask("/nodes")["items"]]
    gone = nodes[0]
    four_nodes.ask(f"/nodes/{gone}:drain", {"reason": "new driver"})
    small, all_four = cluster.submit("small", 3, 2), cluster.submit("all-four", 4, 2)
    four_nodes.running(small)
    assert {held[0] for held in cluster.where(small).values()} == set(nodes) - {gone}
    cluster.finish(small)
    cluster.state(all_four, "QUEUED")
    why = four_nodes.ask(f"/jobs/{all_four}/explain")
    assert why["why"]["code"] == "NODES_DRAINED" and gone in why["why"]["text"]
    assert {"set": f"nodes.{gone}", "value": "undrain"} in [one["change"] for one in why["would_start_now_with"]]
    four_nodes.ask(f"/nodes/{gone}:uncordon", {})
    four_nodes.running(all_four)
    cluster.finish(all_four)


@deep
def test_a_world_gives_way_to_an_urgent_job_with_what_it_does_not_need_and_grows_back_and_loses_no_saved_step(
    four_nodes: Installation,
) -> None:
    cluster, told = Cluster(four_nodes), four_nodes.home.root / "worlds"
    role = {
        "run": [sys.executable, "-c", WORLD, str(told)],
        "replicas": {"min": 1, "max": 4},
        "mesh": {"dp": "*"},
        "resources": {"cpus": 0.5, "gpus": 2},
    }
    spec = {"name": "world", "roles": {"main": role}, "grace": "2s"}
    job = str(four_nodes.ask("/jobs", {"source": json.dumps(spec), "filename": "job.json"})["id"])

    def of(size: int) -> tuple[int, int]:
        """Where a world of this size began, and the last step that it saved."""
        lines = told.read_text().splitlines() if told.exists() else [""]
        began = lines[-1].split()
        place = four_nodes.home.root / "checkpoints" / job / "step"
        return (int(began[1]), int(place.read_text())) if began[:1] == [str(size)] and place.exists() else (0, 0)

    def has(size: int) -> int:
        """The first step of a world of this size that runs, and saved a step of its own, in the first attempt."""
        four_nodes.wait(
            job,
            lambda one: (one["state"], one["attempt"]) == ("RUNNING", 1) and of(size)[0] < of(size)[1],
            f"a world of {size}",
        )
        return of(size)[0]

    four_nodes.running(job)
    has(4)
    _, before = of(4)
    urgent = cluster.submit("sooner", 1, 2, priority=90)
    assert four_nodes.running(urgent)["state"] == "RUNNING"
    assert has(3) >= before
    assert four_nodes.ask("/queues")["items"][0]["used_gpus"] == 8
    _, before = of(3)
    cluster.finish(urgent)
    four_nodes.wait(job, lambda _: four_nodes.ask("/queues")["items"][0]["used_gpus"] == 8, "given its place again")
    assert has(4) >= before
    events = four_nodes.events(job)
    assert events.count("PreemptAsked") == 1 and "JobRequeued" not in events
    four_nodes.ask(f"/jobs/{job}:stop", {})
    assert four_nodes.ended(job)["state"] == "CANCELLED"
    assert four_nodes.ask("/queues")["items"][0]["used_gpus"] == 0
    assert sim_replay(four_nodes.home.db, "default")["different"] == []
