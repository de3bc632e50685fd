"""Giving devices back: whoever takes them, the job enters again on the other machine at the commit it stopped at.

Each kind of stop is done ``--stops`` times in a row to one job; nothing of its work is done twice. Without ROTA_DEEP
one is done, and those kinds are left out whose parts the others have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from tests.machines.bed import bed
from tests.machines.counting import CODE, Watched
from tests.machines.site import Site, long, site
from tests.real.jobs import deep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TRAIN = """
import json, os, pathlib, signal, socket, time

import torch
import torch.distributed as dist

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
kept = pathlib.Path(os.environ["ROTA_CHECKPOINT_DIR"])
kept.mkdir(parents=True, exist_ok=True)
dist.init_process_group("gloo")
step = int((kept / "step").read_text()) if (kept / "step").exists() else 0
if dist.get_rank() == 0:
    print(f"ENTER {step} {socket.gethostname()} {dist.get_world_size()}", flush=True)


def keep(word):
    (kept / "draft").write_text(str(step))
    (kept / "draft").rename(kept / "step")
    print(f"{word} {step}", flush=True)


while True:
    time.sleep(0.2)
    step += 1
    if dist.get_rank() == 0 and step % 20 == 0:
        keep("KEPT")
    stop = torch.tensor([len(asked)])
    dist.all_reduce(stop)
    if stop.item():
        break
if dist.get_rank() == 0:
    time.sleep(1.5)
    keep("SAVED")
dist.barrier()
dist.destroy_process_group()
"""
SPMD = """
name: {name}
grace: 30s
priority: 10
roles:
  train:
    run: torchrun --nproc-per-node 1 train.py
    replicas: {{min: 1, max: {most}}}
    mesh: {{dp: "*"}}
    resources: {{cpus: 1}}
"""
JOB = """
name: {name}
grace: 30s
priority: 10
env: {{STEP_S: "0.3"}}
roles:
  counter: {{workload: "counting:Counter", resources: {{cpus: 1}}}}
  loop: {{workload: "counting:counts", resources: {{cpus: 1}}, collocate: [{{role: counter, level: node}}]}}
{more}
"""


@pytest.fixture(scope="module")
def over_two() -> Iterator[Site]:
    with bed(2, subnet=79) as machines, site(machines, shared=True) as made:
        made.put("counting.py", CODE)
        made.put("train.py", TRAIN)
        yield made


def submitted(over: Site, name: str, more: str = "") -> Watched:
    job = Watched(over, over.submit(JOB.format(name=name, more=more)))
    job.goes_on()
    return job


def moved(job: Watched, stop: Callable[[], None], stops: int) -> None:
    """Stop it that way again and again: each time it enters on the other machine at the commit it stopped at."""
    for n in range(1, stops + 1):
        target = job.other
        stop()
        job.wait(lambda: len(job.entries()) > n, f"entry {n}")  # noqa: B023 - called at once
        job.goes_on()
        assert job.machine == job.entries()[-1][1] == target
    assert len(job.entries()) == stops + 1
    job.end()


def _pause(job: Watched) -> None:
    left = job.machine
    job.site.rota("pause", job.id)
    job.wait(lambda: job.state == "PAUSED", "it is paused")
    job.site.rota("nodes", "cordon", left)
    job.site.rota("resume", job.id)
    job.wait(lambda: job.state == "RUNNING", "it runs again")
    job.site.rota("nodes", "uncordon", left)


def _drain(job: Watched) -> None:
    left, other = job.machine, job.other
    job.site.rota("nodes", "drain", left, "--notice", "3s", "--yes")
    job.wait(lambda: job.state == "RUNNING" and job.machine == other, "it has left")
    job.site.rota("nodes", "undrain", left)


@deep
@pytest.mark.parametrize("stop", [_pause, _drain])
def test_a_script_with_its_own_checkpoint_enters_again_elsewhere_at_the_step_it_saved(
    over_two: Site, stops: int, stop: Callable[[Watched], None]
) -> None:
    job = Watched(over_two, over_two.submit(SPMD.format(name="script", most=1)))
    for n in range(1, stops + 1):
        job.wait(lambda: len(job.entries()) == n, f"entry {n}")  # noqa: B023 - called at once
        time.sleep(2.0)
        stop(job)
    job.wait(lambda: len(job.entries()) == stops + 1, "the last entry")
    assert job.alternates(), job.entries()
    job.end_script(stops)


@long
def test_a_world_that_is_resized_enters_again_at_the_step_it_saved(over_two: Site, stops: int) -> None:
    job = Watched(over_two, over_two.submit(SPMD.format(name="world", most=2)))
    job.wait(lambda: job.worlds()[-1:] == ["2"], "it has begun, or grown at its first checkpoint")
    for n in range(1, stops + 1):
        time.sleep(2.0)
        size = str(2 - n % 2)
        over_two.rota("scale", job.id, "train", size)
        job.wait(lambda: job.worlds()[-1] == size, f"{size} members")  # noqa: B023 - called at once
    assert job.worlds()[-stops:] == [str(2 - n % 2) for n in range(1, stops + 1)]
    job.end_script(len(job.entries()) - 1)


@deep
def test_a_job_that_is_paused_enters_again_elsewhere_at_the_commit_it_stopped_at(over_two: Site, stops: int) -> None:
    job = submitted(over_two, "paused")
    moved(job, lambda: _pause(job), stops)
    assert job.alternates(), job.entries()


@long
def test_a_job_that_is_preempted_enters_again_elsewhere_at_the_commit_it_stopped_at(over_two: Site, stops: int) -> None:
    job = submitted(over_two, "preempted")
    command = "{run: sleep 600, resources: {cpus: 4}}"
    urgent = f"name: urgent\npriority: 90\nroles:\n  main: {command}\n"

    def preempt() -> None:
        other = job.other
        over_two.rota("nodes", "cordon", other)
        taker = Watched(over_two, over_two.submit(urgent))
        taker.wait(lambda: taker.state == "RUNNING", "it has taken the machine")
        assert job.state == "QUEUED"
        over_two.rota("nodes", "uncordon", other)
        job.wait(lambda: job.state == "RUNNING", "it runs again")
        over_two.rota("stop", taker.id)
        over_two.ended(taker.id)

    moved(job, preempt, stops)


@long
@pytest.mark.parametrize("place", ["there is another place", pytest.param("there is none", marks=deep)])
def test_a_job_whose_machine_is_drained_enters_again_elsewhere_at_the_commit_it_stopped_at(
    over_two: Site, stops: int, place: str
) -> None:
    job = submitted(over_two, "drained")

    def drain() -> None:
        left, other = job.machine, job.other
        if place == "there is none":
            over_two.rota("nodes", "cordon", other)
        over_two.rota("nodes", "drain", left, "--notice", "3s", "--yes")
        if place == "there is none":
            job.wait(lambda: job.state == "QUEUED", "it waits for a place")
            over_two.rota("nodes", "uncordon", other)
        job.wait(lambda: job.state == "RUNNING" and job.machine == other, "it has left")
        over_two.rota("nodes", "undrain", left)

    moved(job, drain, stops)
    assert job.alternates(), job.entries()


@long
def test_a_job_that_is_resized_works_on_without_going_back(over_two: Site, stops: int) -> None:
    more = '  echo: {workload: "counting:Echo", replicas: {min: 1, max: 2}, resources: {cpus: 1}}'
    job = submitted(over_two, "resized", more)

    def ready() -> int:
        return sum(one["role"] == "echo" and one["state"] == "READY" for one in job.document()["instances"])

    for size in [1, 2] * stops:
        over_two.rota("scale", job.id, "echo", str(size))
        job.wait(lambda: ready() == size, f"{size} members")  # noqa: B023 - called at once
        job.goes_on()
    assert len(job.entries()) == 1
    job.end()


@long
def test_a_job_at_its_time_limit_has_its_last_commit_on_disk(over_two: Site, stops: int) -> None:
    for _ in range(stops):
        job = submitted(over_two, "limited")
        over_two.rota("set", job.id, "time_limit=1s")
        assert over_two.ended(job.id)["reason"] == "TIME_LIMIT"
        job.check()
        kept = over_two.home / "checkpoints" / job.id
        newest = max(int(one.name.removeprefix("step-").partition(".")[0]) for one in kept.iterdir())
        assert newest == job.commits() > 0
