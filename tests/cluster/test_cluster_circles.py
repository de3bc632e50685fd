"""Jobs do not stop each other in a circle: who is stopped for whom is a strict order while nothing else happens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from cluster_makers import ask, node, slot, state
from test_cluster_promises import beyond_their_promise, gpus, played, stream, tenants

from rota.cluster.core import cycle
from rota.cluster.core.admission import HeldBack, held_back, with_held_back
from rota.cluster.core.events import Event, JobArrived, JobGone, JobReleased, NodeChanged, StopRequested, apply
from rota.cluster.core.explain import explain
from rota.cluster.core.jobs import LiveJob, Wait
from rota.cluster.core.profile import Decision, Placer, Preempt, Profile, Victim
from rota.cluster.core.queue_order import wait_of
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.core.verdicts import Learned
from rota.cluster.policies import PROFILES, get_profile
from rota.cluster.sim import simulate
from rota.cluster.sim.sharing import with_sharing
from rota.cluster.sim.simulate import Simulation
from rota.runtime.clock import SystemClock
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import Queue
from rota.spec.reasons import Reason

Stop = tuple[JobId, JobId]
"""Who is stopped, and for whom."""
IN_A_CIRCLE = (97, 176)
"""In these streams work that borrows stopped promised work, which stopped it, and so on."""


class Watch:
    """Who is stopped for whom between two things that happen by themselves: arrivals and ends, or the begin of a round.

    Each set of stops for one job has one that is new, and none is stopped for who was stopped for it.
    """

    def __init__(self) -> None:
        self.moment: object = None
        self._guarded, self._stops = simulate.guarded, set[Stop]()

    def guarded(self, state: State, profile: Profile, now: float) -> tuple[list[Decision], dict[JobId, str], Learned]:
        decisions, refused, learned = self._guarded(state, profile, now)
        moment = (frozenset(state.jobs), now // profile.round_s if profile.round_s else 0)
        if moment != self.moment:
            self.moment, self._stops = moment, set[Stop]()
        sets: dict[JobId, set[Stop]] = {}
        for one in decisions:
            if isinstance(one, Preempt):
                sets.setdefault(one.for_job, set()).add((one.job, one.for_job))
        for new in sets.values():
            assert not new <= self._stops, f"at {now} stopped twice for one job: {new}"
            self._stops |= new
        assert not find_circle(self._stops), f"at {now} stopped in a circle: {self._stops}"
        return decisions, refused, learned


def find_circle(stops: set[Stop]) -> set[Stop]:
    """What is left once all are taken out who were stopped for someone that was not stopped, or is taken out."""
    while ends := {stop for stop in stops if all(stop[1] != other for other, _ in stops)}:
        stops = stops - ends
    return stops


@pytest.mark.parametrize("seeds", [IN_A_CIRCLE, pytest.param(tuple(range(20)), marks=pytest.mark.slow)])
@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_in_any_stream_no_job_is_stopped_twice_for_another_nor_for_one_that_was_stopped_for_it(
    profile: str, seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        rng = random.Random(f"{seed} {profile} 5.0")
        nodes, queues, leaves = tenants(rng)
        jobs = stream(rng, queues, leaves, whole=profile == "hived", noise=5.0)
        jobs += beyond_their_promise(rng, nodes, queues, leaves, [one.submit_s for one in jobs])
        jobs.sort(key=lambda one: (one.submit_s, one.ask.id))
        watch, rules = Watch(), with_sharing(get_profile(profile))
        monkeypatch.setattr(simulate, "guarded", watch.guarded)
        run = Simulation(State(nodes, queues), rules, jobs, SystemClock(), check_every=20).run()
        monkeypatch.undo()
        assert run.violations == 0 and watch.moment is not None


def test_who_borrows_less_takes_from_who_borrows_more_only_what_no_promise_covers() -> None:
    promised = (Queue(path=path, guaranteed=gpus(4)) for path in "ab")
    s, stops = state(node("n"), node("m"), queues=(*promised, Queue(path="other"))), list[JobId]()
    rows = (("more", 4, "b", 1.0), ("covered", 4, "b", 0.0), ("less", 2, "other", 2.0))
    for now, (name, count, queue, since) in enumerate(rows):
        one = ask(name, slot(count), queue=queue, at=since)
        decisions = cycle.step(s, JobArrived(ask=one), get_profile("kueue"), 3.0 + now)
        stops += [decision.job for decision in decisions if isinstance(decision, Preempt)]
    assert stops == ["more"], "though the other one started last"


@dataclass(frozen=True, slots=True)
class FewestAttempts:
    """An order by which who ran less often comes first, and so never ends."""

    by_job = True

    def rank(self, state: State, row: LiveJob, now: float) -> tuple[float, ...]:
        return (row.attempt,)

    def victims(self, state: State, txn: Txn, row: LiveJob, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        rows = (state.jobs[job] for jobs in state.running.values() for job in jobs)
        return tuple(
            Victim(job=one.ask.id, reason=Reason.PREEMPTED_PRIORITY, lost_gpu_s=0.0)
            for one in rows
            if one.attempt >= row.attempt
        )


def test_a_policy_without_an_order_of_its_own_stops_each_job_once_until_something_else_happens() -> None:
    rule = FewestAttempts()
    profile = replace(get_profile("las"), order=rule, victims=rule, round_s=0.0)
    s = state(node("n"))
    assert played(profile, s, ask("a", slot(4)), ask("b", slot(4))) == ["a"], (
        "and b not for a, which was stopped for it"
    )
    wait = s.jobs[JobId("a")].wait
    assert wait is not None and wait.reason is Reason.NO_FREE_DEVICES and wait.fields["held_back_by"] == ["b"]
    assert wait.text.endswith(
        "It waits for b, not stopped for it until a job arrives or ends, or a node changes: "
        "it was stopped for b, or for a job that was stopped for that."
    )
    assert wait_of(s, profile, JobId("a"), 5.0) == wait
    assert played(profile, s, ask("c", slot(4)), at=10.0) == ["b", "c"], "an arrival is something else"


def test_who_is_held_back_is_said_of_now_also_where_the_code_of_the_reason_is_the_last_one() -> None:
    rule = FewestAttempts()
    profile = replace(get_profile("las"), order=rule, victims=rule, round_s=0.0)
    s = state(node("n"))
    played(profile, s, ask("a", slot(4)), ask("b", slot(4)))
    apply(s, JobArrived(ask=ask("later", slot(8))), 3.0)
    wait = wait_of(s, profile, JobId("a"), 3.0)
    assert wait is not None and "held_back_by" not in wait.fields and "waits for b" not in wait.text, "it is over"
    apply(s, JobGone(job=JobId("later")), 4.0)

    played(profile, s, ask("c", slot(4)), at=10.0)
    (holder,) = (row.ask.id for row in s.jobs.values() if row.phase == "running")
    given = [row.wait.fields for row in s.jobs.values() if row.wait is not None]
    assert given and not any("held_back_by" in fields for fields in given), "no reason is put again for it"
    said = {job: wait_of(s, profile, JobId(job), 20.0) for job in {"a", "b", "c"} - {holder}}
    (held,) = (wait for wait in said.values() if wait is not None and "held_back_by" in wait.fields)
    assert held.fields["held_back_by"] == [holder]
    assert held in [explain(s, profile, JobId(job), 20.0).why for job in said]


def test_who_was_stopped_for_a_job_already_is_not_stopped_for_it_again_and_it_says_so() -> None:
    s = state(node("n"))
    for name in "ab":
        cycle.step(s, JobArrived(ask=ask(name, slot(2))), get_profile("fifo"), 0.0)
    apply(s, StopRequested(job=JobId("a"), for_job=JobId("b")), 1.0)
    row, wait = s.jobs[JobId("b")], Wait(reason=Reason.NO_FREE_DEVICES, text="None is free.")
    found = held_back(s, row, [JobId("a")], 0.0, 2.0)
    assert found == HeldBack((JobId("a"),), again=True)
    said = with_held_back(wait, found, until_round=True)
    assert (
        said.text == "None is free. It waits for a, not stopped for it until the next round: a stopped for it already."
    )
    assert held_back(s, row, [JobId("a")], 10.0, 12.0).jobs == (), "in another round"


@pytest.mark.parametrize(
    "event", [JobArrived(ask=ask("c")), JobGone(job=JobId("b")), NodeChanged(node=NodeId("n"), health=None)]
)
def test_who_was_stopped_for_whom_is_kept_in_the_state_until_something_else_happens(event: Event) -> None:
    s = state(node("n"))
    for name in "ab":
        cycle.step(s, JobArrived(ask=ask(name, slot(2))), get_profile("fifo"), 0.0)
    before = s.digest()
    apply(s, StopRequested(job=JobId("a"), for_job=JobId("b")), 1.0)
    apply(s, JobReleased(job=JobId("a")), 2.0)
    assert s.stopped_for == {(JobId("a"), JobId("b")): 1.0} and s.copy().digest() == s.digest() != before
    apply(s, event, 3.0)
    assert s.stopped_for == {}
