"""A guaranteed job starts no later than in a private cluster of its tenant, whatever others do and estimates say."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from cluster_makers import ask, node, slot, state

from rota.cluster.core.cycle import step
from rota.cluster.core.events import JobArrived, JobGone, JobReleased, NodeChanged, Tick, apply
from rota.cluster.core.jobs import JobAsk
from rota.cluster.core.profile import Preempt, Profile
from rota.cluster.core.promises import counted_anew, leaf_use
from rota.cluster.core.state import TENANT_LABEL, State
from rota.cluster.core.txn import Txn
from rota.cluster.policies import PROFILES, get_profile
from rota.cluster.sim.simulate import SimJob, Simulation
from rota.runtime.clock import SystemClock
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import Queue, QueueState
from rota.spec.reasons import Reason
from rota.spec.resources import Node, Res

DEEP = os.environ.get("ROTA_DEEP") == "1"
SEEDS = 1000 if DEEP else 12
OVERTAKEN = 127
"""In this stream what would be stopped for a job lets another of the same promise start before it."""
EACH_FOR_THE_OTHER = 932
"""Here two promised jobs each find whom to stop, and the other would start in its place."""


def gpus(count: float, type: str | None = None) -> Res:
    return Res(cpus=0, gpus=count, gpu_type=type)


def tenants(rng: random.Random) -> tuple[tuple[Node, ...], tuple[Queue, ...], list[str]]:
    """A tree of two or three departments with one or two leaves each, and the nodes that each leaf is promised."""
    nodes, queues, leaves = list[Node](), list[Queue](), list[str]()
    for department in "abc"[: rng.randint(2, 3)]:
        total = 0
        for leaf in "xy"[: rng.randint(1, 2)]:
            path, count = f"{department}/{leaf}", rng.randint(1, 2)
            total += 4 * count
            leaves.append(path)
            queues.append(Queue(path=path, guaranteed=gpus(4 * count)))
            for i in range(count):
                nodes.append(replace(node(f"{department}{leaf}{i}"), labels=((TENANT_LABEL, path),)))
        queues.append(Queue(path=department, guaranteed=gpus(total)))
    return tuple(nodes), tuple(queues), leaves


def stream(
    rng: random.Random, queues: tuple[Queue, ...], leaves: list[str], *, whole: bool, noise: float
) -> list[SimJob]:
    """Jobs that fit their promise: on ``whole`` devices of a node or on single ones; a quarter is opportunistic."""
    promised = {queue.path: int(queue.guaranteed.gpus) for queue in queues if queue.guaranteed}
    jobs, now = list[SimJob](), 0.0
    for i in range(30):
        now += rng.choice((0.0, 1.0, 3.0, 10.0))
        path = rng.choice(leaves)
        count = rng.choice((1, 1, 2, 3, 4, promised[path]))
        slots = [slot(1)] * count
        if whole:
            slots = [slot(4)] * (count // 4) if count >= 4 else [slot(rng.choice((1, 2, 4)))]
        work_s = rng.choice((5.0, 20.0, 40.0, 100.0))
        est_s = work_s * (1.0 if not noise else rng.choice((1 / noise, 1.0, noise)))
        known = est_s if not noise or rng.random() < 0.8 else None
        priority = -1 if rng.random() < 0.25 else 50
        one = ask(f"j{i:02}", *slots, queue=path, priority=priority, at=now, est_s=known)
        jobs.append(SimJob(ask=one, submit_s=now, work_s=work_s))
    return jobs


def beyond_their_promise(
    rng: random.Random, nodes: tuple[Node, ...], queues: tuple[Queue, ...], leaves: list[str], submits: list[float]
) -> list[SimJob]:
    """Gangs that are larger than what their queue is promised, and fit the cluster."""
    promised = {queue.path: int(queue.guaranteed.gpus) for queue in queues if queue.guaranteed}
    jobs, total = list[SimJob](), sum(len(one.devices) for one in nodes)
    for i in range(4):
        path, at, work_s = rng.choice(leaves), rng.choice(submits), rng.choice((20.0, 100.0))
        count = promised[path] + rng.choice((1, 2, 4))
        if count <= total:
            one = ask(f"x{i:02}", *[slot(1)] * count, queue=path, at=at, est_s=work_s)
            jobs.append(SimJob(ask=one, submit_s=at, work_s=work_s))
    return jobs


def starts(nodes: tuple[Node, ...], queues: tuple[Queue, ...], profile: str, jobs: list[SimJob]) -> dict[JobId, float]:
    """First start of each job that is not opportunistic; one that never started is as late as can be."""
    run = Simulation(State(nodes, queues), get_profile(profile), jobs, SystemClock(), check_every=1).run()
    assert run.violations == 0
    guaranteed = {job: one for job, one in run.runs.items() if not one.job.ask.opportunistic}
    return {job: float("inf") if one.first_start_s is None else one.first_start_s for job, one in guaranteed.items()}


@pytest.mark.parametrize(
    "seeds",
    [(0, 1, OVERTAKEN, EACH_FOR_THE_OTHER), pytest.param(tuple(range(2, SEEDS)), marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("noise", [0.0, 5.0])
@pytest.mark.parametrize("profile", ["default", "hived"])
def test_no_guaranteed_job_starts_later_than_in_the_private_cluster_of_its_tenant(
    profile: str, noise: float, seeds: tuple[int, ...]
) -> None:
    for seed in seeds:
        rng = random.Random(f"{seed} {profile} {noise}")
        nodes, queues, leaves = tenants(rng)
        jobs = stream(rng, queues, leaves, whole=profile == "hived", noise=noise)
        alone, shared = (starts(nodes, queues, name, jobs) for name in ("private", profile))
        later = {job: (at, shared[job]) for job, at in alone.items() if shared[job] > at}
        assert not later, f"seed {seed}"


@pytest.mark.parametrize("seeds", [(0, 3, 10), pytest.param(tuple(range(SEEDS)), marks=pytest.mark.slow)])
@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_a_gang_beyond_its_promise_delays_no_job_of_its_queue_that_the_promise_covers(
    noise: float, seeds: tuple[int, ...]
) -> None:
    for seed in seeds:
        rng = random.Random(f"{seed} default {noise}")
        nodes, queues, leaves = tenants(rng)
        jobs = stream(rng, queues, leaves, whole=False, noise=noise)
        more = beyond_their_promise(rng, nodes, queues, leaves, [one.submit_s for one in jobs])
        alone = starts(nodes, queues, "private", jobs)
        shared = starts(nodes, queues, "default", sorted([*jobs, *more], key=lambda one: (one.submit_s, one.ask.id)))
        later = {job: (at, shared[job]) for job, at in alone.items() if shared[job] > at}
        assert not later, f"seed {seed}"


def test_devices_that_are_promised_are_not_kept_for_a_larger_job_of_the_same_queue() -> None:
    queues = (Queue(path="red", guaranteed=gpus(4)), Queue(path="blue", guaranteed=gpus(4)))
    s = state(node("n"), node("m"), queues=queues)
    asks = (ask("need", slot(4), queue="blue", est_s=100.0), ask("big", slot(4), slot(2), queue="red"))
    assert played("default", s, *asks, ask("more", slot(4), queue="red")) == []
    assert running(s) == {"need", "more"}
    urgent = ask("urgent", slot(4), slot(2), queue="red", priority=60)
    s = state(node("n"), node("m"), queues=queues)
    assert played("default", s, asks[0], urgent, ask("more", slot(4), queue="red")) == []
    assert running(s) == {"need"}  # in a queue priority stands above what a smaller job is promised


def test_a_gang_beyond_its_promise_that_waits_for_long_holds_up_no_job_that_the_promise_covers() -> None:
    queues = (Queue(path="red", guaranteed=gpus(4)), Queue(path="blue", guaranteed=gpus(4)))
    s = state(node("n"), node("m"), queues=queues)
    assert played("default", s, ask("need", slot(4), queue="blue"), ask("big", slot(4), slot(2), queue="red")) == []
    assert played("default", s, ask("more", slot(4), queue="red"), at=get_profile("default").starve_s + 60) == []
    assert running(s) == {"need", "more"}


def played(profile: str | Profile, s: State, *asks: JobAsk, at: float = 0.0) -> list[JobId]:
    """The jobs that are stopped when these arrive one after the other; who is stopped lets go at once."""
    stopped = list[JobId]()
    for now, one in enumerate((*asks, None)):
        if one is not None:
            apply(s, JobArrived(ask=replace(one, queued_at=at + now)), at + now)
        for _ in range(20):
            decisions = step(s, Tick(), get_profile(profile) if isinstance(profile, str) else profile, at + now)
            stops = [d.job for d in decisions if isinstance(d, Preempt)]
            for job in stops:
                apply(s, JobReleased(job=job), at + now)
            stopped += stops
            if not stops:
                break
        else:
            raise AssertionError("jobs are stopped and started in a circle")
    return stopped


def running(s: State) -> set[str]:
    return {str(row.ask.id) for row in s.jobs.values() if row.phase == "running"}


@pytest.mark.parametrize("profile", ["default", "kueue", "yarn", "kai"])
def test_a_promise_to_a_department_is_taken_back_for_a_queue_that_is_promised_nothing_itself(profile: str) -> None:
    queues = (Queue(path="d", guaranteed=gpus(8)), Queue(path="d/x"), Queue(path="other"))
    s = state(node("n"), node("m"), queues=queues)
    stopped = played(
        profile, s, *(ask(f"o{i}", slot(4), queue="other") for i in range(2)), ask("x", slot(4), queue="d/x")
    )
    assert len(stopped) == 1 and stopped[0].startswith("o") and "x" in running(s)
    assert played(profile, s, ask("y", slot(4), queue="d/x"), at=10.0) and {"x", "y"} == running(s)
    assert played(profile, s, ask("z", slot(4), queue="d/x"), at=20.0) == []


@pytest.mark.parametrize("profile", ["default", "kueue", "yarn", "kai", "hived"])
def test_a_promise_of_one_type_of_device_is_taken_back(profile: str) -> None:
    queues = (Queue(path="typed", guaranteed=gpus(4, "A100")), Queue(path="other"))
    s = state(node("a", type="A100"), node("v", type="V100"), queues=queues)
    low = -1 if profile == "hived" else 50
    others = [ask(f"o{i}", slot(4, type=kind), queue="other", priority=low) for i, kind in enumerate(("A100", "V100"))]
    assert played(profile, s, *others, ask("mine", slot(4, type="A100"), queue="typed")) == ["o0"]
    assert running(s) == {"o1", "mine"}


def test_what_is_promised_of_one_type_takes_no_device_of_another_back() -> None:
    queues = (Queue(path="typed", guaranteed=gpus(4, "A100")), Queue(path="other", guaranteed=gpus(4, "V100")))
    s = state(node("a", type="A100"), node("v", type="V100"), queues=queues)
    first = ask("first", slot(4, type="A100"), queue="typed")
    assert (
        played("default", s, first, ask("o", slot(4), queue="other"), ask("more", slot(4, type="V100"), queue="typed"))
        == []
    )
    assert running(s) == {"first", "o"}


@pytest.mark.parametrize("by_user", [False, True])
@pytest.mark.parametrize("profile", ["default", "hived", "kueue", "yarn", "kai", "las", "srtf"])
def test_an_urgent_job_at_a_limit_stops_lower_work_of_its_own_queue(profile: str, by_user: bool) -> None:
    most = {"user_limit": gpus(4)} if by_user else {"limit": gpus(4)}
    s = state(node("n"), node("m"), queues=(Queue(path="q", guaranteed=gpus(4), **most), Queue(path="other")))
    assert not played(profile, s, *(ask(f"low{i}", slot(2), queue="q", priority=10, est_s=5e5) for i in range(2)))
    stopped = played(profile, s, ask("urgent", slot(2), queue="q", priority=90, est_s=50.0), at=1e5)
    assert len(stopped) == 1 and "urgent" in running(s) and len(running(s)) == 2
    assert s.used[s.queues.row["q"], 0] == 4000


@pytest.mark.parametrize("profile", ["default", "kueue"])
def test_own_lower_work_and_what_others_borrowed_are_stopped_together(profile: str) -> None:
    s = state(node("n"), node("m"), queues=(Queue(path="q", guaranteed=gpus(8)), Queue(path="other")))
    low, other = ask("low", slot(4), queue="q", priority=10), ask("other", slot(4), queue="other")
    urgent = ask("urgent", slot(4), slot(4), queue="q", priority=90)
    assert sorted(played(profile, s, low, other, urgent)) == ["low", "other"]
    assert running(s) == {"urgent"}


APART, TURNS = "tenants do not wait for each other", "jobs take turns"
WITHOUT_AGE = {
    "hived": APART, "private": APART, "pool": "what the cells of hived are compared with",
    "pool-spread": "what the cells of hived are compared with", "gandiva": TURNS, "gandiva-pack": TURNS,
}  # fmt: skip
"""Profiles without an age bound, and why."""
AGED = sorted(set(PROFILES) - set(WITHOUT_AGE))


@pytest.mark.parametrize("estimates", [None, *(pytest.param(one, marks=pytest.mark.slow) for one in (1.0, 0.1))])
@pytest.mark.parametrize("profile", AGED)
def test_a_gang_passed_by_a_stream_of_small_jobs_starts_by_its_age(profile: str, estimates: float | None) -> None:
    rng, now = random.Random(1), 0.0
    gang = ask("gang", slot(4), slot(4), queue="a", at=1.0, est_s=50.0)
    jobs = [SimJob(ask=gang, submit_s=1.0, work_s=50.0)]
    for i in range(150):
        now += rng.expovariate(8 / 40)
        work_s = rng.choice((20.0, 40.0, 60.0))
        one = ask(f"s{i}", queue="b", at=now, est_s=estimates and work_s * estimates)
        jobs.append(SimJob(ask=one, submit_s=now, work_s=work_s))
    assert get_profile(profile).starve_s < float("inf")
    s = state(node("n"), node("m"), queues=(Queue(path="a"), Queue(path="b")))
    found = Simulation(s, replace(get_profile(profile), starve_s=100.0), jobs, SystemClock()).run().runs[JobId("gang")]
    assert found.first_start_s is not None and found.first_start_s <= 1.0 + 2 * 100.0 + 60.0


def test_promises_and_higher_priority_come_before_the_age_of_a_gang_that_borrows() -> None:
    s = state(node("n"), node("m"), queues=(Queue(path="a"), Queue(path="b", guaranteed=gpus(2))))
    for one in (ask("run", slot(3), queue="a"), ask("gang", slot(4), slot(4), queue="a", at=1.0)):
        step(s, JobArrived(ask=one), get_profile("default"), one.queued_at)
    later = (("promised", "b", 50), ("urgent", "a", 90), ("small", "a", 50), ("borrows", "b", 50))
    for i, (name, queue, priority) in enumerate(later):
        one = ask(name, slot(2), queue=queue, priority=priority, at=4000.0 + i)
        step(s, JobArrived(ask=one), get_profile("default"), one.queued_at)
    assert running(s) == {"run", "promised", "urgent"}
    assert s.jobs[JobId("borrows")].wait.reason is Reason.RESERVED_FOR_OTHER  # type: ignore[union-attr]


@pytest.mark.parametrize(("queue_state", "runs"), [("draining", {"run"}), ("closed", {"run", "small"})])
def test_a_queue_that_drains_starts_what_is_in_it_and_its_gangs_are_passed_no_longer_than_others(
    queue_state: QueueState, runs: set[str]
) -> None:
    s = state(node("n"), node("m"), queues=(Queue(path="a", state=queue_state), Queue(path="b")))
    jobs = (ask("run", slot(3), queue="b"), ask("gang", slot(4), slot(4), queue="a", at=1.0))
    for one in (*jobs, ask("small", slot(2), queue="b", at=1e6)):
        step(s, JobArrived(ask=one), get_profile("default"), one.queued_at)
    assert running(s) == runs
    for job in sorted(runs):
        step(s, JobGone(job=JobId(job)), get_profile("default"), 1e6 + 1)
    assert ("gang" in running(s)) == (queue_state == "draining")


@pytest.mark.parametrize("gone", ["node", "limit"])
def test_no_device_is_kept_for_a_gang_that_could_not_run_if_all_others_ended(gone: str) -> None:
    s = state(node("n"), node("m"), queues=(Queue(path="a", limit=gpus(8)), Queue(path="b")))
    step(s, JobArrived(ask=ask("gang", slot(4), slot(4), queue="a", at=0.0)), get_profile("fifo"), 0.0)
    step(s, JobReleased(job=JobId("gang")), replace(get_profile("fifo"), starts=False), 1.0)
    if gone == "node":
        apply(s, NodeChanged(node=NodeId("m"), health=None), 1.0)
    else:
        step(s, JobArrived(ask=ask("first", queue="a", priority=90, at=1.0)), get_profile("fifo"), 1.0)
    step(s, JobArrived(ask=ask("small", queue="b", at=1e6)), get_profile("fifo"), 1e6)
    assert "small" in running(s)


@pytest.mark.parametrize("kind", [None, pytest.param("A100", marks=pytest.mark.slow)])
def test_the_use_of_a_queue_after_changes_is_that_counted_anew(kind: str | None) -> None:
    rng = random.Random(5)
    s = state(*(node(f"n{i}", type="A100") for i in range(30)), queues=(Queue(path="q", guaranteed=gpus(60, kind)),))
    for i in range(200):
        one = ask(f"j{i:03}", slot(rng.choice((1, 1, 2, 4))), queue="q", priority=rng.choice((10, 50)), at=i)
        apply(s, JobArrived(ask=replace(one, preemptible=rng.random() < 0.98)), float(i))
    jobs = sorted(s.jobs)

    def change(txn: Txn, depth: int) -> None:
        for _ in range(rng.randint(1, 12)):
            job = rng.choice(jobs)
            row = s.jobs[job]
            s.put(txn, row._replace(phase="queued" if row.phase == "running" else "running"))
            if rng.random() < 0.4:
                assert leaf_use(s, "q") == counted_anew(s, "q")
            if depth < 3 and rng.random() < 0.2:
                with txn.trial():
                    change(txn, depth + 1)

    for _ in range(120):
        with s.txn() as txn:
            change(txn, 0)
            if rng.random() < 0.7:
                txn.keep()
        assert leaf_use(s, "q") == counted_anew(s, "q")
    with s.txn() as txn:
        for job in jobs:
            s.put(txn, s.jobs[job]._replace(phase="queued"))
        txn.keep()
