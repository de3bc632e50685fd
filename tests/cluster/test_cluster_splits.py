"""A job with a trainer and rollouts: which split of devices it gets, what is measured of it, and when it changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from rota.cluster.core.choice import WASTE_MAX, choices_of
from rota.cluster.core.splits import GAIN_MIN, WINDOW, sizes_of
from rota.cluster.live import Scheduler
from rota.cluster.policies import get_profile
from rota.job.core.placement import request_of, requests_of
from rota.spec.dispatch import OpSpec
from rota.spec.events import (
    Committed,
    Event,
    GangAsked,
    JobAdmitted,
    JobQueued,
    JobRequeued,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    PreemptAsked,
    Record,
)
from rota.spec.ids import Epoch, GangId, InstanceId, JobId, NodeId, RoleName
from rota.spec.job import Interface, JobSpec, RoleSpec, started_spec
from rota.spec.reasons import Reason
from rota.spec.resources import Node, Res

JOB = JobId("rl")
START_S = 20.0
"""From the devices to the first commit."""
Split = tuple[int, ...]
Truth = Callable[[Split], tuple[float, Mapping[str, float]]]
"""Seconds of a step with this many actors and rollouts, and of the waits of the loop for both."""


def spec_of(most: int = 3, least: int = 1) -> JobSpec:
    """An actor whose members are copies along ``dp``, and rollouts that come and go; a core each."""
    actor = Interface(kind="class", ops=(OpSpec(name="fit", send="Shard(dp)", recv="Mean", retry="commit"),))
    rollout = Interface(kind="class", ops=(OpSpec(name="generate", send="Each", recv="Concat"),))
    sizes = {"replicas_min": least, "replicas_max": most, "res": Res(cpus=1)}
    mesh = {"mesh": (("dp", least),), "elastic_axis": "dp", "plan": "auto"}
    return JobSpec(
        name="rl",
        roles=(
            RoleSpec(name=RoleName("actor"), workload="m:A", interface=replace(actor, has_state=True), **sizes, **mesh),
            RoleSpec(name=RoleName("rollout"), workload="m:R", interface=rollout, **sizes),
        ),
    )


class Played:
    """The job under the live scheduler; it commits as fast as ``truth`` says, and starts anew when it is asked to."""

    def __init__(self, truth: Truth, *, nodes: int = 2, cpus: float = 2.0, spec: JobSpec | None = None) -> None:
        self.truth, self.now, self.n, self.numbers = truth, 0.0, 0, 0
        self.splits: list[Split] = []
        self.whys: list[str] = []
        self.scheduler = Scheduler(get_profile("default"), requests_of)
        self.nodes = [Node(id=NodeId(f"n{i}"), host=f"n{i}", cpus=cpus, memory_bytes=2**36) for i in range(nodes)]
        for node in self.nodes:
            self.add(NodeJoined(node=node), None)
        self.add(JobSubmitted(spec=spec or spec_of()))
        self.add(JobQueued())
        self.decide()

    def add(self, event: Event, job: JobId | None = JOB) -> None:
        self.numbers += 1
        self.scheduler.apply(Record(number=self.numbers, job=job, seq=self.numbers, at=self.now, event=event))
        match event:
            case JobAdmitted(starts=starts):
                self.splits.append(tuple(one.replicas for one in starts))
                self.whys.append(str(event.why.get("choice")))
                self.now += START_S
            case PreemptAsked(reason=reason):
                self.requeue(reason)

    def requeue(self, reason: Reason) -> None:
        self.add(JobRequeued(attempt=len(self.splits), reason=reason))
        self.decide()

    def decide(self) -> None:
        outcome = self.scheduler.decide(self.now)
        assert outcome.broken == ()
        for job, event in outcome.events:
            self.add(event, job)

    def commit(self, times: int = 1) -> None:
        for _ in range(times):
            step_s, waited = self.truth(self.splits[-1])
            self.now, self.n = self.now + step_s, self.n + 1
            self.add(Committed(n=self.n, loop_epoch=Epoch(1), waited=dict(waited)))
            self.decide()


def in_turn(
    actor_s: float,
    rollout_s: float,
    rest_s: float = 0.1,
    *,
    shared: tuple[float, float] = (0.0, 0.0),
    hidden: tuple[float, float] = (0.0, 0.0),
) -> Truth:
    """The loop waits for the rollouts, then for the actor; further members do not shorten the part ``shared`` of it.

    It does other work meanwhile: of each it does not wait for ``hidden`` seconds.
    """

    def wait_s(seconds: float, n: int, shared: float, hidden: float) -> float:
        return max(0.0, seconds * (shared + (1 - shared) / n) - hidden)

    def truth(split: Split) -> tuple[float, Mapping[str, float]]:
        roles = zip(("actor", "rollout"), (actor_s, rollout_s), split, shared, hidden, strict=True)
        waited = {role: wait_s(*numbers) for role, *numbers in roles}
        return rest_s + sum(waited.values()), waited

    return truth


def test_the_choices_are_all_splits_and_an_attempt_has_the_mesh_of_its_members() -> None:
    spec = spec_of()
    choices = choices_of(spec, requests_of)
    assert [tuple(n for _, n in sizes_of(one)) for one in choices] == [(a, r) for a in (1, 2, 3) for r in (1, 2, 3)]
    started = started_spec(spec, choices[-1].starts)
    assert (started.role("actor").mesh, started.role("actor").seats) == ((("dp", 3),), 3)
    assert started_spec(started, ()).role("actor").mesh == (("dp", 1),)


def test_sizes_that_do_not_divide_the_global_batch_are_left_out() -> None:
    spec = spec_of()
    actor = replace(spec.roles[0], env=(("ROTA_GLOBAL_BATCH", "256"),))
    found = choices_of(replace(spec, roles=(actor, spec.roles[1])), requests_of)
    assert {one.starts[0].replicas for one in found} == {1, 2}


def test_before_anything_is_measured_the_split_is_even_and_the_admission_says_that_it_is_assumed() -> None:
    run = Played(in_turn(1.0, 1.0))
    assert run.splits == [(2, 2)]
    assert run.whys[0].startswith("2 of actor and 2 of rollout, 50% of a step as assumed"), run.whys


@pytest.mark.parametrize(
    ("actor_s", "rollout_s", "splits"),
    [(1, 9, [(2, 2), (1, 3)]), (9, 1, [(2, 2), (3, 1)]), (3, 3, [(2, 2), (1, 3), (2, 2)])],
)
def test_one_trial_of_another_split_tells_the_best_one(actor_s: float, rollout_s: float, splits: list[Split]) -> None:
    run = Played(in_turn(actor_s, rollout_s))
    run.commit(WINDOW)
    assert run.splits == [(2, 2)], "the first commit only begins the measuring"
    run.commit(100)
    assert run.splits == splits
    a, r = splits[1]
    first_s, best_s = 0.1 + (actor_s + rollout_s) / 2, 0.1 + actor_s / max(a, 2) + rollout_s / max(r, 2)
    assert run.whys[1].startswith(f"{a} of actor and {r} of rollout, {best_s:.3g} s a step as estimated at best")
    assert f"2 of actor and 2 of rollout {first_s:.3g} s a step (measured)" in run.whys[1]


def test_a_trial_that_could_cost_more_than_a_move_must_gain_is_not_made() -> None:
    """Eight steps, each longer by 3 s at worst, and two starts, are more than 5 % of 900 s."""
    for left_s, trials in ((900, 0), (1800, 1)):
        run = Played(in_turn(3, 3), spec=replace(spec_of(), time_limit_s=START_S + left_s))
        run.commit(40)
        assert (1, 3) in run.splits if trials else run.splits == [(2, 2)], (left_s, run.splits)


def test_a_job_about_to_end_does_not_move() -> None:
    spec = replace(spec_of(), time_limit_s=START_S + 9 * 5.1 + 30)
    run = Played(in_turn(1, 9), spec=spec)
    run.commit(12)
    assert run.splits == [(2, 2)], "it would save 20 % of 30 s, and a start takes 20 s"


def test_a_split_that_is_slower_than_its_estimate_is_left_and_not_taken_again() -> None:
    """More than two rollouts bring nothing, which nobody knows before it was tried."""

    def truth(split: Split) -> tuple[float, Mapping[str, float]]:
        waited = {"actor": 1.0 / split[0], "rollout": 9.0 / min(split[1], 2)}
        return sum(waited.values()), waited

    run = Played(truth)
    run.commit(200)
    assert run.splits == [(2, 2), (1, 3), (3, 1), (2, 2)], "one rollout is tried too: three were as slow as two"
    assert "1 of actor and 3 of rollout 5.5 s a step (measured)" in run.whys[-1], run.whys[-1]


def test_the_split_that_is_found_is_the_fastest_that_wastes_nothing_but_for_the_gain_that_a_move_needs() -> None:
    """Members help by their number, less, or not at all, and may be hidden; no estimate knows which."""
    rng = random.Random(7)
    for case in range(60):
        seconds = [rng.uniform(0.2, 20) for _ in range(2)]
        actor, rollout = (rng.choice((0.0, 1.0, rng.uniform(0, 1))) for _ in range(2))
        hides, shares = rng.choice((0.0, rng.uniform(0, 0.5))), rng.choice((0.0, rng.uniform(0, 0.5)))
        hidden = (seconds[0] * hides, seconds[1] * shares)
        truth = in_turn(*seconds, rng.uniform(0.2, 2), shared=(actor, rollout), hidden=hidden)
        run = Played(truth, nodes=3, spec=spec_of(most=5))
        run.commit(80)
        total = [(a, r) for a in range(1, 6) for r in range(1, 6) if a + r <= 6]
        most = WASTE_MAX * min(truth(split)[0] * sum(split) for split in total)
        best_s = min(truth(split)[0] for split in total if truth(split)[0] * sum(split) <= most)
        assert truth(run.splits[-1])[0] <= best_s / (1 - GAIN_MIN), (case, run.splits, best_s)
        assert len(run.splits) <= 6, (case, run.splits)


def test_a_lost_node_makes_it_smaller_and_it_grows_back_to_the_best_split_when_the_node_is_back() -> None:
    run = Played(in_turn(1, 9))
    run.commit(30)
    assert run.splits[-1] == (1, 3)
    run.add(NodeLost(node=NodeId("n1")), None)
    lost = [InstanceId(RoleName("rollout"), rank) for rank in (1, 2)]
    moved = request_of(started_spec(spec_of(), ()), GangId("moved-2"), lost)
    run.add(GangAsked(request=moved, avoid=(NodeId("n1"),), lost=True, lost_nodes=(NodeId("n1"),)))
    run.decide()
    assert run.splits[-1] == (1, 3), "it is told that there is no other place"
    run.decide()
    assert run.splits[-1] == (1, 1), "two cores are left"
    run.commit(20)
    run.add(NodeJoined(node=run.nodes[1]), None)
    run.commit(30)
    assert run.splits[-1] == (1, 3), run.splits


def test_while_another_job_waits_nothing_moves() -> None:
    run = Played(in_turn(1, 9))
    alone = replace(spec_of().roles[1], replicas_min=1, replicas_max=1)
    other = JobId("other")
    run.add(JobSubmitted(spec=JobSpec(name="other", roles=(alone,))), other)
    run.add(JobQueued(), other)
    run.commit(30)
    assert run.splits == [(2, 2)]
