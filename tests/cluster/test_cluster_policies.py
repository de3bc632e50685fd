"""Every profile keeps the invariants on random work, starts gangs whole, and lets nobody wait on an idle cluster."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace

import pytest
from cluster_makers import ask, node, shape, slot, state
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rota.cluster.core.cycle import decide, events_of, step
from rota.cluster.core.events import JobArrived, JobGone, JobReleased, NodeChanged, Tick, apply
from rota.cluster.core.explain import _ahead, explain
from rota.cluster.core.guarded import check, guarded
from rota.cluster.core.jobs import Allocations, JobAsk, LiveJob
from rota.cluster.core.preemption import RoomBound
from rota.cluster.core.profile import Admit, Preempt, Profile, WaitOn, WakeAt
from rota.cluster.core.queue_order import place_in_order
from rota.cluster.core.state import TENANT_LABEL, State
from rota.cluster.core.txn import Txn
from rota.cluster.policies import PROFILES, basic, get_profile
from rota.cluster.policies.basic import ROUND_S, Fit, LeastService, ShortestFirst, las
from rota.cluster.policies.default import LeastCost
from rota.cluster.policies.hived import book_of
from rota.cluster.sim.sharing import with_sharing
from rota.spec.errors import UnknownName
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import Queue
from rota.spec.reasons import Reason
from rota.spec.resources import Health, Res

DEEP = os.environ.get("ROTA_DEEP") == "1"
TRIES = (200, 2, 1)
QUEUES = (
    Queue(path="a", guaranteed=Res(cpus=0, gpus=8)),
    Queue(path="b", guaranteed=Res(cpus=0, gpus=8)),
)


def cluster() -> State:
    nodes = (replace(node(f"n-{tenant}", 8), labels=((TENANT_LABEL, tenant),)) for tenant in "ab")
    return state(*nodes, queues=QUEUES)


ASKS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from([-1, 10, 50]),
        st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=2),
        st.sampled_from([None, 5.0, 50.0]),
    ),
    min_size=1,
    max_size=10,
)


def _ask(i: int, drawn: tuple[str, int, list[int], float | None]) -> JobAsk:
    queue, priority, gpus, est = drawn
    return ask(f"j{i:02}", *(slot(n) for n in gpus), queue=queue, priority=priority, at=float(i), est_s=est)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROFILES))
@settings(max_examples=200 if DEEP else 7, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=ASKS, ends=st.lists(st.integers(0, 9), max_size=10), tries=st.sampled_from(TRIES))
@example(
    drawn=[("a", -1, [1], None), *2 * [("a", 10, [2, 1], None)], ("a", 50, [2, 4], None), ("b", -1, [1], None)],
    ends=[],
    tries=200,
)
@example(
    drawn=[("a", -1, gpus, None) for gpus in ([1], [1, 8], [2, 4], [1], [1, 1], [2], [4])] + [("b", -1, [1], None)],
    ends=[],
    tries=200,
)
def test_a_profile_never_overcommits_starts_whole_gangs_and_leaves_no_trace_of_trials(
    name: str, drawn: list[tuple[str, int, list[int], float | None]], ends: list[int], tries: int
) -> None:
    s, profile = cluster(), replace(with_sharing(get_profile(name)), candidates_max=tries)
    asks = [_ask(i, one) for i, one in enumerate(drawn)]
    for now, one in enumerate(asks):
        apply(s, JobArrived(ask=one), float(now))
        before = s.digest()
        first = decide(s, profile, float(now))
        assert decide(s, profile, float(now)) == first
        assert s.digest() == before
        with s.txn():
            assert guarded(s, profile, float(now))[1] == {}
        assert s.digest() == before
        twin = s.copy()
        decisions, _, learned = guarded(s, profile, float(now))
        for event in events_of(decisions):
            apply(twin, event, float(now))
        s.memory.take_in(learned)
        assert s.digest() == twin.digest(), "the state is as the decisions make it"
        for decision in decisions:
            if isinstance(decision, Preempt):
                apply(s, JobReleased(job=decision.job), float(now))
        check(s)
        if now < len(ends) and ends[now] < len(asks):
            apply(s, JobGone(job=asks[ends[now]].id), float(now))
        check(s)
    for row in s.jobs.values():
        assert len(row.held) in (0, len(row.ask.shape.slots))
    stops = 0
    for idle in range(30):
        for decision in step(s, Tick(), profile, float(len(asks))):
            if isinstance(decision, Preempt):
                apply(s, JobReleased(job=decision.job), float(len(asks)))
                stops += 1
                assert idle < 10, "jobs are stopped though nobody asked for anything new"
    check(s)
    assert stops <= len(asks)


GPU_LIMITS = (
    Queue(path="d", limit=Res(cpus=0, gpus=10), guaranteed=Res(cpus=0, gpus=8)),
    Queue(path="d/a", limit=Res(cpus=0, gpus=6), guaranteed=Res(cpus=0, gpus=4), user_limit=Res(cpus=0, gpus=3)),
    Queue(path="d/b", guaranteed=Res(cpus=0, gpus=4)),
    Queue(path="e", limit=Res(cpus=0, gpus=5), guaranteed=Res(cpus=0, gpus=4)),
)
LIMITED = st.lists(
    st.tuples(
        st.sampled_from(["d/a", "d/b", "e"]),
        st.sampled_from(["", "ann", "bob"]),
        st.sampled_from([-1, 50, 90]),
        st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=2),
        st.integers(0, 7),
    ),
    min_size=4,
    max_size=14,
)
"""Queue, user, priority and slots of a job, and how many arrivals later it ends."""


def beyond_limits(s: State) -> list[str]:
    """Queues and users that hold more devices than their limits, counted from the jobs alone."""
    held: dict[tuple[str, str | None], int] = {}
    for row in s.jobs.values():
        devices = sum(len(one.devices) for one in row.held)
        parts = row.ask.queue.split("/")
        for path in ("/".join(parts[: n + 1]) for n in range(len(parts))):
            for user in (None, row.ask.user):
                held[path, user] = held.get((path, user), 0) + devices
    limits = {queue.path: (queue.limit, queue.user_limit) for queue in GPU_LIMITS}
    found = list[str]()
    for (path, user), devices in held.items():
        limit = limits[path][user is not None]
        if limit is not None and devices > limit.gpus:
            found.append(f"{user or 'all'} in {path}: {devices} of {limit.gpus}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROFILES))
@settings(max_examples=300 if DEEP else 8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=LIMITED)
def test_no_profile_gives_a_queue_or_a_user_more_than_its_limit(
    name: str, drawn: list[tuple[str, str, int, list[int], int]]
) -> None:
    nodes = (replace(node(f"n-{path}", 8), labels=((TENANT_LABEL, path),)) for path in ("d/a", "d/b", "e"))
    s, profile, ends = state(*nodes, queues=GPU_LIMITS), with_sharing(get_profile(name)), dict[int, list[JobId]]()
    for now, (queue, user, priority, gpus, lasts) in enumerate(drawn):
        one = ask(f"j{now:02}", *(slot(n) for n in gpus), queue=queue, priority=priority, user=user, at=float(now))
        ends.setdefault(now + lasts, []).append(one.id)
        apply(s, JobArrived(ask=one), float(now))
        for _ in range(3):
            for decision in step(s, Tick(), profile, float(now)):
                if isinstance(decision, Preempt):
                    apply(s, JobReleased(job=decision.job), float(now))
            assert beyond_limits(s) == []
        for job in ends.pop(now, []):
            apply(s, JobGone(job=job), float(now))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "hived", "kai", "kueue", "yarn"])
@settings(max_examples=300 if DEEP else 8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    promised=st.lists(st.integers(0, 5), min_size=2, max_size=3),
    borrowed=st.lists(st.integers(0, 2), min_size=14, max_size=20),
    order=st.permutations(range(3)),
)
def test_each_queue_gets_back_what_it_is_promised_from_whoever_borrowed_it(
    name: str, promised: list[int], borrowed: list[int], order: list[int]
) -> None:
    """Jobs of one device each, so that nothing but the rules of the queues can hold one up."""
    paths = "abc"[: len(promised)]
    nodes = (replace(node(f"n-{p}", n), labels=((TENANT_LABEL, p),)) for p, n in zip(paths, promised) if n)
    queues = tuple(Queue(path=p, guaranteed=Res(cpus=0, gpus=n) if n else None) for p, n in zip(paths, promised))
    s, profile, now = state(*nodes, queues=queues), get_profile(name), 0.0
    lent = {"priority": -1} if name == "hived" else {}
    for i, queue in enumerate(borrowed):
        apply(s, JobArrived(ask=ask(f"o{i:02}", slot(1), queue=paths[queue % len(paths)], at=now, **lent)), now)
    settle(s, profile, now)
    for queue in (one for one in order if one < len(promised)):
        now += 1000.0
        for i in range(promised[queue]):
            apply(s, JobArrived(ask=ask(f"{paths[queue]}{i}", slot(1), queue=paths[queue], at=now)), now)
        settle(s, profile, now)
    held = dict.fromkeys(paths, 0)
    for row in s.jobs.values():
        held[row.ask.queue] += len(row.held)
    assert all(held[path] >= count for path, count in zip(paths, promised)), (held, promised)


def settle(s: State, profile: Profile, now: float) -> None:
    """Passes until one stops nobody; whoever is stopped lets go at once."""
    for _ in range(60):
        stops = [one.job for one in step(s, Tick(), profile, now) if isinstance(one, Preempt)]
        for job in stops:
            apply(s, JobReleased(job=job), now)
        if not stops:
            return
    raise AssertionError("jobs are stopped and started in a circle")


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_lonely_job_starts_at_once(name: str) -> None:
    s = cluster()
    decisions = step(s, JobArrived(ask=ask("j", slot(4), queue="a")), get_profile(name), 0.0)
    assert [type(d) for d in decisions] == [Admit]


def test_fifo_holds_up_a_queue_behind_its_first_job_and_names_it() -> None:
    s, fifo = cluster(), get_profile("fifo")
    step(s, JobArrived(ask=ask("one", slot(8), slot(4), queue="a")), fifo, 0.0)
    step(s, JobArrived(ask=ask("two", slot(8), queue="a", at=1)), fifo, 1.0)
    waits = step(s, JobArrived(ask=ask("three", slot(1), queue="a", at=2)), fifo, 2.0)
    assert [(d.job, d.wait.reason) for d in waits if isinstance(d, WaitOn)] == [("three", Reason.BEHIND_IN_ORDER)]


def test_a_queue_takes_back_what_it_lent_and_only_as_much_as_it_is_promised() -> None:
    s, default = cluster(), get_profile("default")
    for i in range(4):
        step(s, JobArrived(ask=ask(f"b{i}", slot(4), queue="b", at=i)), default, float(i))
    decisions = step(s, JobArrived(ask=ask("mine", slot(8), queue="a", at=9)), default, 9.0)
    victims = [d.job for d in decisions if isinstance(d, Preempt)]
    assert len(victims) == 2
    assert all(d.reason is Reason.PREEMPTED_RECLAIM for d in decisions if isinstance(d, Preempt))
    for victim in victims:
        apply(s, JobReleased(job=victim), 10.0)
    assert any(isinstance(d, Admit) and d.job == "mine" for d in step(s, Tick(), default, 10.0))
    assert not any(isinstance(d, Preempt) for _ in range(100) for d in step(s, Tick(), default, 11.0))


@pytest.mark.parametrize("name", ["default", "yarn", "kueue"])
def test_a_gang_beyond_its_guarantee_gives_way_to_a_promise_once_and_does_not_come_back(name: str) -> None:
    s, profile = cluster(), get_profile(name)
    step(s, JobArrived(ask=ask("beyond", slot(8), slot(1), queue="a")), profile, 0.0)
    decisions = step(s, JobArrived(ask=ask("promised", slot(8), queue="b", at=1)), profile, 1.0)
    assert [d.job for d in decisions if isinstance(d, Preempt)] == ["beyond"]
    apply(s, JobReleased(job=JobId("beyond")), 2.0)
    later = [d for now in range(2, 12) for d in step(s, Tick(), profile, float(now))]
    assert [d.job for d in later if isinstance(d, Admit | Preempt)] == ["promised"]


def test_priority_in_a_queue_stands_above_what_a_smaller_job_of_it_is_promised() -> None:
    s, default = cluster(), get_profile("default")
    step(s, JobArrived(ask=ask("small", slot(8), queue="a", priority=10)), default, 0.0)
    step(s, JobArrived(ask=ask("b", slot(4), queue="b", priority=10, at=1)), default, 1.0)
    urgent = ask("urgent", slot(8), slot(4), queue="a", priority=50, at=2)
    stops = [d.job for d in step(s, JobArrived(ask=urgent), default, 2.0) if isinstance(d, Preempt)]
    assert stops == ["small"]
    apply(s, JobReleased(job=JobId("small")), 3.0)
    assert [d.job for d in step(s, Tick(), default, 3.0) if isinstance(d, Admit)] == ["urgent"]


def test_nobody_is_stopped_for_a_job_that_a_reservation_would_hold_back_all_the_same() -> None:
    s, default = cluster(), get_profile("default")
    for at, one in enumerate((ask("b", slot(2), queue="b"), ask("wide", slot(2), slot(8), queue="a", est_s=50.0))):
        step(s, JobArrived(ask=replace(one, queued_at=float(at), est_s=50.0)), default, float(at))
    step(s, JobArrived(ask=ask("first", slot(1), slot(4), queue="a", at=2, est_s=50.0)), default, 2.0)
    step(s, JobArrived(ask=ask("fill", slot(1), queue="b", priority=-1, at=3, est_s=5.0)), default, 3.0)
    decisions = step(s, JobArrived(ask=ask("next", slot(2), queue="a", at=4, est_s=50.0)), default, 4.0)
    assert [type(d) for d in decisions] == [WaitOn]


def test_a_short_job_runs_before_a_reservation_and_a_long_one_waits_for_it() -> None:
    s, default = state(node("n", 8)), get_profile("default")
    step(s, JobArrived(ask=ask("run", slot(6), est_s=100.0)), default, 0.0)
    step(s, JobArrived(ask=ask("big", slot(8), at=1)), default, 1.0)
    long = step(s, JobArrived(ask=ask("long", slot(2), at=2, est_s=500.0)), default, 2.0)
    assert [d.wait.reason for d in long if isinstance(d, WaitOn)] == [Reason.RESERVED_FOR_OTHER]
    short = step(s, JobArrived(ask=ask("short", slot(2), at=3, est_s=50.0)), default, 3.0)
    assert [d.job for d in short if isinstance(d, Admit)] == ["short"]


def test_a_pass_that_tried_enough_leaves_waiting_who_was_held_back_by_a_reservation_before() -> None:
    s, default = state(node("n", 8)), replace(get_profile("default"), candidates_max=1)
    step(s, JobArrived(ask=ask("run", slot(6), est_s=100.0)), default, 0.0)
    step(s, JobArrived(ask=ask("big", slot(8), at=1)), get_profile("default"), 1.0)
    step(s, JobArrived(ask=ask("long", slot(2), at=2, est_s=500.0)), get_profile("default"), 2.0)
    assert [type(d) for d in step(s, Tick(), default, 3.0)] == [WakeAt], "the others are tried in the next"
    for name in sorted(PROFILES):  # one that knows no reservations meets the reason that another left
        decide(s, replace(get_profile(name), candidates_max=1), 4.0)


@pytest.mark.parametrize("name", sorted(name for name in PROFILES if get_profile(name).block != "queue"))
def test_nobody_is_passed_over_for_ever_by_passes_that_try_only_a_few(name: str) -> None:
    s, few = state(node("n", 8)), replace(get_profile(name), candidates_max=3)
    step(s, JobArrived(ask=ask("run", slot(7), est_s=100.0)), few, 0.0)
    for i in range(10):
        apply(s, JobArrived(ask=ask(f"w{i}", slot(8, cpus=i), at=1.0, est_s=100.0)), 1.0)
    apply(s, JobArrived(ask=ask("last", slot(1), at=2.0, est_s=5.0)), 2.0)
    passes = [step(s, Tick(), few, 3.0)]
    for _ in range(3):
        explain(s, few, JobId("w0"), 3.0)  # who only asks does not set back what the passes have come to
        passes.append(step(s, Tick(), few, 3.0))
    assert [d.job for decisions in passes for d in decisions if isinstance(d, Admit)] == ["last"]
    assert WakeAt(at=3.0) in passes[0], "the first asks for the next at once"


def test_a_node_out_of_order_takes_no_new_work_and_is_named_as_the_cause() -> None:
    s, fifo = state(node("n", 4)), get_profile("fifo")
    apply(s, NodeChanged(node=NodeId("n"), health=Health.BAD), 0.0)
    decisions = step(s, JobArrived(ask=ask("j", slot(1))), fifo, 0.0)
    assert [d.wait.reason for d in decisions if isinstance(d, WaitOn)] == [Reason.BAD_CELLS]
    apply(s, NodeChanged(node=NodeId("n"), health=Health.HEALTHY), 1.0)
    assert [d.job for d in step(s, Tick(), fifo, 1.0) if isinstance(d, Admit)] == [JobId("j")]


def test_least_service_gives_a_new_job_the_place_of_one_that_had_much_and_counts_what_it_had() -> None:
    s, profile = state(node("n", 8)), las(threshold_gpu_s=8 * 1000.0)
    step(s, JobArrived(ask=ask("old", slot(8))), profile, 0.0)
    early = step(s, JobArrived(ask=ask("new", slot(8), at=900)), profile, 900.0)
    assert not any(isinstance(d, Preempt) for d in early), "both had less than the threshold"
    assert [d.at for d in early if isinstance(d, WakeAt)] == [ROUND_S * 4]
    (stop,) = (d for d in step(s, Tick(), profile, ROUND_S * 4) if isinstance(d, Preempt))
    apply(s, JobReleased(job=stop.job), ROUND_S * 4)
    assert (stop.job, s.jobs[JobId("old")].served_s) == ("old", ROUND_S * 4)
    assert [d.job for d in step(s, Tick(), profile, ROUND_S * 4) if isinstance(d, Admit)] == ["new"]
    assert not any(isinstance(d, Preempt) for i in range(5, 9) for d in step(s, Tick(), profile, ROUND_S * i))


def test_shortest_remaining_first_counts_what_ran_before_a_preemption() -> None:
    s, profile = state(node("n", 1)), get_profile("srtf")
    step(s, JobArrived(ask=ask("long", est_s=100.0)), profile, 0.0)
    step(s, JobArrived(ask=ask("short", at=90, est_s=20.0)), profile, 90.0)
    assert s.jobs[JobId("long")].phase == "running", "10 s remain of it"
    decisions = step(s, JobArrived(ask=ask("tiny", at=91, est_s=1.0)), profile, 91.0)
    assert [d.job for d in decisions if isinstance(d, Preempt)] == ["long"]
    apply(s, JobReleased(job=JobId("long")), 91.0)
    assert [d.job for d in step(s, Tick(), profile, 91.0) if isinstance(d, Admit)] == ["tiny"]
    apply(s, JobGone(job=JobId("tiny")), 92.0)
    assert [d.job for d in step(s, Tick(), profile, 92.0) if isinstance(d, Admit)] == ["long"], "9 s against 20"


def test_an_unknown_profile_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(UnknownName) as caught:
        get_profile("hivd")
    assert caught.value.hint == "did you mean 'hived'?"


@pytest.mark.parametrize("name", ["default", "yarn", "kueue"])
def test_a_node_that_a_victim_gives_back_is_no_new_spare(name: str) -> None:
    s, profile = state(node("n0"), node("n1"), node("n2")), replace(get_profile(name), spares=1)
    for low in ("low0", "low1"):
        step(s, JobArrived(ask=ask(low, slot(4), priority=10)), profile, 0.0)
    alone = state(node("n0"), node("n1"))
    for low in ("low0", "low1"):
        step(alone, JobArrived(ask=ask(low, slot(4), priority=10)), replace(profile, spares=0), 0.0)
    high = JobArrived(ask=ask("high", slot(4), priority=50, at=1e5))
    without = [d for d in step(alone, high, replace(profile, spares=0), 1e5) if isinstance(d, Preempt)]
    assert [d for d in step(s, high, profile, 1e5) if isinstance(d, Preempt)] == without
    assert without or name == "yarn"


def test_spares_are_kept_for_who_loses_a_node_and_lent_to_opportunistic_work_meanwhile() -> None:
    s, profile = state(node("n0"), node("n1"), node("n2")), replace(get_profile("default"), spares=1)
    for name in ("one", "two"):
        step(s, JobArrived(ask=ask(name, slot(4))), profile, 0.0)
    (waits,) = step(s, JobArrived(ask=ask("three", slot(4), at=1)), profile, 1.0)
    assert isinstance(waits, WaitOn) and waits.wait.fields["spares"] == ["n2"]
    assert waits.wait.reason is Reason.NO_FREE_DEVICES and "failover: n2." in waits.wait.text
    step(s, JobArrived(ask=ask("lent", slot(4), priority=-1, at=2)), profile, 2.0)
    assert s.jobs[JobId("lent")].held[0].node == 2
    apply(s, NodeChanged(node=NodeId("n0"), health=Health.BAD), 3.0)
    again = ask("one/again", slot(4), at=0, avoid=(NodeId("n0"),), failover=True)
    stops = [d for d in step(s, JobArrived(ask=again), profile, 3.0) if isinstance(d, Preempt)]
    assert [(d.job, d.for_job) for d in stops] == [("lent", "one/again")]
    apply(s, JobReleased(job=JobId("lent")), 4.0)
    (admit,) = (d for d in step(s, Tick(), profile, 4.0) if isinstance(d, Admit))
    assert (admit.job, s.nodes[admit.held[0].node].id) == ("one/again", "n2")


@pytest.mark.parametrize("seed", range(25))
def test_a_guaranteed_job_keeps_its_cells_also_where_a_promise_is_no_whole_number_of_nodes(seed: int) -> None:
    rng = random.Random(seed)
    size, count = rng.choice((4, 8)), rng.randint(1, 3)
    cuts = sorted(rng.randint(0, size * count) for _ in range(2))
    shares = zip("abc", (cuts[0], cuts[1] - cuts[0], size * count - cuts[1]))
    s = state(*(node(f"n{i}", size) for i in range(count)), queues=tuple(_promised(*one) for one in shares))
    hived = get_profile("hived")
    for now in range(40):
        slots = [slot(rng.choice((1, 1, 2, 4)))] * rng.choice((1, 1, 2))
        new = JobArrived(ask=ask(f"j{now:02}", *slots, queue=rng.choice("abc"), priority=rng.choice((-1, 50)), at=now))
        held = s.holders()
        fact = JobGone(job=rng.choice(held).ask.id) if held and rng.random() < 0.4 else new
        for decision in step(s, fact, hived, float(now)):
            if isinstance(decision, Preempt):
                assert s.jobs[decision.job].ask.opportunistic
                apply(s, JobReleased(job=decision.job), float(now))
        step(s, Tick(), hived, float(now))
        check(s)
        assert [name for name, gang in book_of(s).cluster.gangs.items() if gang.lazily_preempted] == []


def test_a_gang_of_unequal_members_starts_on_cells_of_unequal_size() -> None:
    s, hived = state(node("n", 4), node("m", 4), queues=(_promised("a", 6), _promised("b", 2))), get_profile("hived")
    admit, *_ = step(s, JobArrived(ask=ask("mixed", slot(4), slot(2), queue="a")), hived, 0.0)
    assert isinstance(admit, Admit) and [len(held.devices) for held in admit.held] == [4, 2]
    assert isinstance(step(s, JobArrived(ask=ask("b", slot(2), queue="b")), hived, 1.0)[0], Admit)


@pytest.mark.parametrize("name", ["hived", "default", "yarn", "kai"])
def test_guaranteed_work_that_may_not_be_preempted_is_nobodys_victim(name: str) -> None:
    s, profile = state(node("n", 4), queues=(_promised("a", 4),)), get_profile(name)
    step(s, JobArrived(ask=ask("fixed", slot(4), queue="a", preemptible=False)), profile, 0.0)
    decisions = step(s, JobArrived(ask=ask("high", slot(4), queue="a", priority=90, at=1)), profile, 1.0)
    assert not any(isinstance(one, Preempt) for one in decisions)


@pytest.mark.parametrize("name", ["default", "yarn", "kai"])
@pytest.mark.parametrize("gives", [True, False])
def test_a_queue_that_is_not_preemptible_loses_nothing_to_others(name: str, gives: bool) -> None:
    queues = (_promised("owed", 4), Queue(path="top", preemptible=gives), Queue(path="top/over"))
    s, profile = state(node("n", 4), queues=queues), get_profile(name)
    step(s, JobArrived(ask=ask("over", slot(4), queue="top/over")), profile, 0.0)
    decisions = step(s, JobArrived(ask=ask("owed", slot(4), queue="owed", at=1)), profile, 1.0)
    assert [one.job for one in decisions if isinstance(one, Preempt)] == ["over"] * gives


def on_cells(nodes: int, promised: int, *asks: JobAsk) -> dict[str, list[str] | Reason]:
    """Nodes that each job gets under cells, or why it waits."""
    s = state(*(node(f"n{i}", 8) for i in range(nodes)), node("plain", 0), queues=(_promised("a", promised),))
    for one in asks:
        apply(s, JobArrived(ask=one), 0.0)
    step(s, Tick(), get_profile("hived"), 0.0)
    check(s)
    rows = {row.ask.id: (row.held, row.wait) for row in s.jobs.values()}
    return {job: [s.nodes[h.node].id for h in held] or wait.reason for job, (held, wait) in rows.items()}  # type: ignore[union-attr]


def _promised(path: str, gpus: int) -> Queue:
    return Queue(path=path, guaranteed=Res(cpus=0, gpus=gpus))


def test_cells_of_nodes_that_are_not_there_are_missing_and_the_others_serve() -> None:
    whole, half = ask("whole", slot(8), queue="a"), ask("half", slot(4), queue="a", at=1)
    assert on_cells(1, 16, whole) == {"whole": ["n0"]}
    assert on_cells(2, 12, whole, half) == {"whole": ["n0"], "half": ["n1"]}, "half a node is a cell as well"
    assert on_cells(2, 4, whole, half) == {"whole": Reason.GUARANTEE_FULL_NO_BORROW, "half": Reason.BEHIND_IN_ORDER}


def test_on_cells_slots_without_devices_share_what_is_left_beside_and_constraints_hold() -> None:
    mixed = ask("mixed", slot(8, cpus=8), *(slot(0, cpus=8) for _ in range(3)), queue="a")
    assert sorted(on_cells(1, 8, mixed)["mixed"]) == ["n0", "n0", "plain", "plain"], "16 cores a node"
    assert on_cells(1, 8, ask("cores", slot(0, cpus=8), queue="a"))["cores"] == ["plain"]
    apart = replace(mixed, shape=replace(mixed.shape, slots=mixed.shape.slots[:2], apart=(((0,), (1,), "node"),)))
    assert on_cells(1, 8, apart)["mixed"] == ["n0", "plain"]
    two = replace(mixed, shape=shape(slot(1), slot(1), apart=(((0,), (1,), "node"),)))
    assert on_cells(1, 8, two)["mixed"] is Reason.TOPOLOGY
    assert on_cells(1, 8, ask("share", slot(0.5), queue="a"))["share"] is Reason.TOO_LARGE


def test_a_limit_above_two_queues_on_cells_holds_for_one_only_until_the_other_gives_back() -> None:
    top = Queue(path="t", limit=Res(cpus=0, gpus=8))
    s = state(node("n", 8), node("m", 8), queues=(top, _promised("t/a", 8), _promised("t/b", 8)))
    hived = get_profile("hived")
    step(s, JobArrived(ask=ask("a", slot(8), queue="t/a")), hived, 0.0)
    step(s, JobArrived(ask=ask("b", slot(8), queue="t/b")), hived, 1.0)
    assert s.jobs[JobId("b")].held == ()
    assert [type(d) for d in step(s, JobGone(job=JobId("a")), hived, 2.0)] == [Admit]


def test_who_let_go_waits_in_one_line_with_its_equals_unless_its_time_has_not_come() -> None:
    s = cluster()
    for i in range(3):
        step(s, JobArrived(ask=ask(f"j{i}", slot(4), queue="a", at=i)), get_profile("fifo"), float(i))
    for i in range(3):
        apply(s, JobReleased(job=JobId(f"j{i}"), back_at=10.0 + i, done_s=1.0), 10.0 + i)
    assert [len(line) for line in s.lines.values()] == [3]
    step(s, Tick(), get_profile("fifo"), 20.0)
    apply(s, JobReleased(job=JobId("j0"), back_at=30.0), 21.0)
    assert [key.begins_at for key in s.lines] == [30.0]
    assert not any(isinstance(d, Admit) for d in step(s, Tick(), get_profile("fifo"), 29.0))
    assert [d.job for d in step(s, Tick(), get_profile("fifo"), 30.0) if isinstance(d, Admit)] == ["j0"]


def test_a_job_that_used_some_of_its_time_is_expected_to_end_sooner() -> None:
    s, fifo = cluster(), get_profile("fifo")
    step(s, JobArrived(ask=ask("j", slot(4), queue="a", est_s=100.0)), fifo, 0.0)
    apply(s, JobReleased(job=JobId("j"), done_s=40.0), 50.0)
    assert s.jobs[JobId("j")].left_s == 60.0
    step(s, Tick(), fifo, 50.0)
    assert s.ends == [(110.0, "j")]


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_what_stands_ahead_is_what_the_order_tries_before(name: str) -> None:
    s, profile = cluster(), get_profile(name)
    for i in range(30):
        drawn = ("ab"[i % 2], (10, -1, 50)[i % 3], [(1, 2, 4, 8)[i * 7 % 4]], (None, 5.0, 50.0)[i % 5 % 3])
        apply(s, JobArrived(ask=replace(_ask(i, drawn), user="uv"[i // 3 % 2])), 0.0)
    if profile.prepare is not None:
        profile.prepare(s)
    place = {job: place_in_order(s, profile, row, 100.0) for job, row in s.jobs.items()}
    for job, row in s.jobs.items():
        ahead = [one for one in s.jobs.values() if one.ask.queue == row.ask.queue and place[one.ask.id] < place[job]]
        found = _ahead(s, profile, row.ask, 100.0)
        assert found == (len(ahead), sum(one.ask.shape.gpus for one in ahead)), job


@pytest.mark.parametrize(("other_at", "stopped"), [(20.0, "own"), (30.0, "other")])
def test_a_job_costs_what_all_its_gangs_lose_and_stops_with_all_of_them(other_at: float, stopped: str) -> None:
    s, default = state(node("n", 4), node("m", 4)), get_profile("default")
    step(s, JobArrived(ask=ask("own~part", slot(3), part_of=JobId("own"))), default, 10.0)
    step(s, JobArrived(ask=ask("other", slot(4))), default, other_at)
    step(s, JobArrived(ask=ask("own", slot(1))), default, 50.0)
    decisions = step(s, JobArrived(ask=ask("high", slot(4), priority=90)), default, 100.0)
    assert [d.job for d in decisions if isinstance(d, Preempt)] == [stopped]
    assert set(s.stopping) == set(s.whole(JobId(stopped)))


@dataclass(frozen=True, slots=True)
class Counting:
    """Best fit that remembers for whom it was asked."""

    asked: list[str] = field(default_factory=list)

    def place(self, state: State, txn: Txn, row: LiveJob) -> Allocations | None:
        self.asked.append(row.ask.id)
        return Fit().place(state, txn, row)


def test_equal_requests_of_all_queues_ask_once_where_they_fit() -> None:
    placer = Counting()
    s, default = cluster(), replace(get_profile("default"), placer=placer, victims=None)
    for at, (name, queue, gpus) in enumerate((("r1", "a", 8), ("r2", "b", 7), ("a1", "a", 2), ("b1", "b", 2))):
        apply(s, JobArrived(ask=ask(name, slot(gpus), queue=queue, at=at, est_s=99.0)), float(at))
    step(s, Tick(), default, 5.0)
    assert len({"a1", "b1"}.intersection(placer.asked)) == 1, "neither fits"
    placer.asked.clear()
    step(s, JobArrived(ask=ask("b2", slot(1), queue="b", priority=90, at=6)), default, 6.0)
    assert placer.asked == ["b2"], "what did not fit before does not fit now, as nothing came back"


@pytest.mark.parametrize("seed", range(6))
def test_the_room_that_jobs_give_back_is_counted_as_placing_finds_it(seed: int) -> None:
    rng = random.Random(seed)
    s, fifo = (
        state(*(node(f"n{i}", rng.choice((2, 4, 8))) for i in range(3))),
        replace(get_profile("fifo"), block="none"),
    )
    shares = seed % 2 == 0
    for i in range(12):
        step(s, JobArrived(ask=ask(f"r{i}", slot(rng.choice((0.5, 1, 2) if shares else (1, 1, 2))))), fifo, 0.0)
    order = [row.ask.id for row in s.holders()]
    rng.shuffle(order)
    for gpus, count in ((0.5, 1), (1, 3), (2, 2), (4, 1), (1, 9)):
        row = LiveJob(ask=ask("j", *(slot(gpus) for _ in range(count))))
        fits: list[bool] = []
        for some in range(1, len(order) + 1):
            with s.txn() as txn:
                s.lift(txn, order[:some])
                fits.append(Fit().place(s, txn, row) is not None)
        too_few = RoomBound(s, row.ask.shape).too_few(order)
        first = fits.index(True) if True in fits else len(order)
        assert too_few <= first if shares or gpus < 1 else too_few == first


def test_what_is_held_beside_a_job_stops_with_it_and_takes_no_place_before_who_asks() -> None:
    s, profile = state(node("n"), node("m")), get_profile("las")
    step(s, JobArrived(ask=ask("long", slot(4))), profile, 0.0)
    step(s, JobArrived(ask=ask("long~more", slot(4), part_of=JobId("long"))), profile, 8000.0)
    wide = ask("wide", slot(4), slot(4), at=8001)
    stops = [d for d in step(s, JobArrived(ask=wide), profile, 8001.0) if isinstance(d, Preempt)]
    assert {d.for_job for d in stops} == {"wide"} and "long" in {d.job for d in stops}


def test_a_reservation_is_not_on_a_node_that_its_job_avoids() -> None:
    s, profile = state(node("n"), node("m")), get_profile("default")
    for job in (ask("short", slot(3), est_s=5.0), ask("long", slot(4), est_s=50.0)):
        step(s, JobArrived(ask=job), profile, 0.0)
    home = s.nodes[s.jobs[JobId("short")].held[0].node].id
    step(s, JobArrived(ask=ask("big", slot(4), at=1, avoid=(home,))), profile, 1.0)
    step(s, JobArrived(ask=ask("fits", at=2, est_s=20.0)), profile, 2.0)
    assert s.jobs[JobId("fits")].phase == "running", "what is free there is not kept for who may not have it"


def test_a_reservation_may_be_on_a_node_that_the_job_before_which_it_is_made_avoids() -> None:
    s, profile = state(node("n"), node("m"), node("o", 1)), get_profile("default")
    for job in (ask("long", slot(4), est_s=50.0), ask("short", slot(3), est_s=5.0)):
        step(s, JobArrived(ask=job), profile, 0.0)
    home = s.nodes[s.jobs[JobId("short")].held[0].node].id
    for job in (
        ask("big", slot(4), at=1),
        ask("fits", at=2, est_s=20.0, avoid=(home,)),
        ask("small", at=3, est_s=20.0),
    ):
        apply(s, JobArrived(ask=job), 3.0)
    step(s, Tick(), profile, 3.0)
    assert (s.jobs[JobId("fits")].phase, s.jobs[JobId("small")].phase) == ("running", "queued")
    assert (wait := s.jobs[JobId("small")].wait) and wait.fields["until"] == 5.0, "when the short one ends"


@pytest.mark.parametrize("name", ["default", "fifo", "drf"])
def test_what_a_spare_has_left_once_it_is_used_goes_to_whoever_waits(name: str) -> None:
    s, profile = state(node("n"), node("m")), replace(get_profile(name), spares=1)
    for at, job in enumerate((ask("run", slot(4)), ask("waits", slot(2)), ask("lost", failover=True, priority=60))):
        step(s, JobArrived(ask=replace(job, queued_at=at)), profile, float(at))
    step(s, Tick(), profile, 3.0)
    assert [s.jobs[JobId(job)].phase for job in ("lost", "waits")] == ["running", "running"]


def test_two_rules_of_least_cost_in_one_pass_each_see_whom_they_may_stop() -> None:
    s, placer = state(node("n")), get_profile("default").placer
    step(s, JobArrived(ask=ask("low", slot(4), priority=10)), get_profile("default"), 0.0)
    high = LiveJob(ask=ask("high", slot(4), priority=90))
    with s.txn() as txn:
        found = [
            LeastCost(restart_s=restart_s, min_runtime_s=least_s).victims(s, txn, high, placer, 10.0)
            for restart_s, least_s in ((60.0, 0.0), (60.0, 20.0), (5.0, 0.0))
        ]
    assert [one and [victim.lost_gpu_s for victim in one] for one in found] == [[280.0], None, [60.0]]


@pytest.mark.parametrize("order", [ShortestFirst(), ShortestFirst(by_service=True), LeastService(600.0)])
def test_running_jobs_ranked_in_bulk_have_the_rank_of_each_and_the_last_is_the_first_victim(
    order: ShortestFirst | LeastService, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[JobId]] = []
    monkeypatch.setattr(basic, "enough_of", lambda *given: asked.append(list(given[-1])))
    monkeypatch.setattr(basic, "missing_milli", lambda *_: 0)
    rng, now, found = random.Random(5), 1000.0, 0
    for _ in range(30):
        s, rule = state(*(node(f"n{i}", 8) for i in range(4))), basic.Outranked(order)
        with s.txn() as txn:
            for i in rng.sample(range(100), 12):
                one = ask(f"j{i:02}", priority=rng.choice((-1, 50)), est_s=rng.choice((None, 50.0, 700.1, 700.1, 1e5)))
                one = replace(one, preemptible=rng.random() < 0.8, shape=shape(slot(rng.choice((0.5, 1, 2)))))
                s.put(txn, LiveJob(ask=one, served_s=rng.choice((0.0, 0.0, 33.3, 600.0))))
                held = Fit().place(s, txn, s.jobs[one.id])
                s.hold(txn, one.id, held or (), now=rng.choice((0.0, 990.5, 990.5)))
            part = ask("j00~part", spare=True, part_of=JobId("j00"))
            s.put(txn, LiveJob(ask=part, phase="running", started_at=1.0))
            mine = LiveJob(ask=ask("asks", priority=rng.choice((-1, 50)), est_s=rng.choice((60.0, 701.0))))
            place = {row.ask.id: (row.ask.opportunistic, *order.rank(s, row, now)) for row in (*s.jobs.values(), mine)}
            rows = [row for row in s.jobs.values() if row.ask.may_stop and place[row.ask.id] > place[mine.ask.id]]
            rows = [
                s.jobs[one[-1]]
                for one in sorted(((r.ask.spare, place[r.ask.id], r.started_at, r.ask.id) for r in rows), reverse=True)
            ]
            rule.victims(s, txn, mine, Fit(), now)
            for row in rows[:1]:
                s.put(txn, row._replace(phase="stopping"))
            rule.victims(s, txn, mine, Fit(), now)
        assert asked == ([[row.ask.id for row in rows], [row.ask.id for row in rows[1:]]] if rows else [])
        found += len(rows)
        asked.clear()
    assert found > 50
