"""Mechanisms of the systems whose policies are imitated: one test each, built from the description of the mechanism."""

from __future__ import annotations

from fractions import Fraction

import pytest
from cluster_makers import ask, node, slot, state
from test_cluster_promises import gpus, played, running

from rota.cluster.core.cycle import decide
from rota.cluster.core.events import JobArrived, JobHolds, NodeChanged, apply
from rota.cluster.core.jobs import Allocation, JobAsk
from rota.cluster.core.profile import Admit, WaitOn
from rota.cluster.core.quota import QueueDemand, ReclaimRules, broken_rules, reclaim
from rota.cluster.core.state import State
from rota.cluster.policies import get_profile
from rota.cluster.policies.capacity import queue_uses
from rota.cluster.policies.hived import book_of
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import OwnedCells, Queue
from rota.spec.reasons import Reason
from rota.spec.resources import Health, Node, Res


def demand(name: str, parent: str | None, guaranteed: int, used: int, pending: int = 0, **more: object) -> QueueDemand:
    amounts = {"guaranteed": guaranteed, "used": used, "pending": pending, "limit": 1000}
    return QueueDemand(name=name, parent=parent, **{k: Fraction(v) for k, v in amounts.items()}, **more)  # type: ignore[arg-type]


def starts(profile: str, s: State, *asks: JobAsk, at: float = 100.0) -> list[str]:
    """Who would start, in order, when all of these wait at the same time."""
    for one in asks:
        apply(s, JobArrived(ask=one), at)
    return [str(d.job) for d in decide(s, get_profile(profile), at) if isinstance(d, Admit)]


def runs(s: State, one: JobAsk, *nodes: int, at: float = 0.0) -> None:
    """A job that holds the first free devices of these nodes."""
    apply(s, JobArrived(ask=one), at)
    held = list[Allocation]()
    for want, place in zip(one.shape.slots, nodes, strict=True):
        free = [d for d in range(int(s.dev0[place]), int(s.dev0[place + 1])) if s.dev_milli[d] == 1000]
        held.append(Allocation(place, tuple(free[: want.gpus]), 0, want.cpu_milli, want.mem))
    apply(s, JobHolds(job=one.id, held=tuple(held)), at)


# -- capacity (YARN) --


def test_a_leaf_below_its_promise_is_served_from_beside_its_parent_that_is_full() -> None:
    # a is above its guarantee, all of it by y, which loses nothing; x in a has had nothing of its 50 yet.
    queues = (
        demand("root", None, 200, 0),
        demand("a", "root", 100, 110),
        demand("x", "a", 50, 10, 40),
        demand("y", "a", 50, 100, preemptible=False),
        demand("b", "root", 60, 90),
        demand("c", "root", 40, 0),
    )
    assert reclaim(queues, ReclaimRules())["b"] > 0


def test_a_leaf_above_its_promise_gets_no_more_of_others_that_are_above_theirs() -> None:
    queues = (demand("root", None, 100, 0), demand("a", "root", 40, 60, 30), demand("b", "root", 30, 40))
    assert reclaim(queues, ReclaimRules()) == {}


@pytest.mark.parametrize(("reserved", "given"), [(0, 10), (10, 0)])
def test_what_is_reserved_is_in_use_and_is_not_asked_a_second_time(reserved: int, given: int) -> None:
    queues = (
        demand("root", None, 100, 0),
        demand("a", "root", 50, 40, 10, reserved=Fraction(reserved)),
        demand("b", "root", 50, 60),
    )
    assert reclaim(queues, ReclaimRules()).get("b", 0) == given


def test_what_a_job_of_the_pass_has_claimed_counts_as_reserved() -> None:
    s = state(node("n"), queues=(Queue(path="q", guaranteed=gpus(4)), Queue(path="other")))
    for name in ("o1", "o2"):
        runs(s, ask(name, slot(2), queue="other"), 0)
    apply(s, JobArrived(ask=ask("mine", slot(2), queue="q", at=1.0)), 1.0)
    with s.txn() as txn:
        s.charge(txn, s.jobs[JobId("mine")], 1)
        txn.put(s.claimed, JobId("mine"), None)
        mine = next(one for one in queue_uses(s) if one.name == "q")
    assert (mine.used, mine.pending, mine.reserved) == (2000, 2000, 2000)


def test_of_queues_served_alike_the_one_of_higher_priority_comes_first() -> None:
    queues = tuple(Queue(path=p, guaranteed=gpus(2), priority=100 + n) for n, p in enumerate("ab"))
    asks = (ask("first", slot(2), queue="a", at=1.0), ask("second", slot(2), queue="b", at=2.0))
    assert starts("yarn", state(node("n"), queues=queues), *asks) == ["second", "first"]


def test_a_queue_takes_nothing_back_from_one_of_higher_priority() -> None:
    for priority, stopped in ((200, []), (100, ["o"])):
        queues = (Queue(path="q", guaranteed=gpus(4)), Queue(path="other", priority=priority))
        s = state(node("n"), queues=queues)
        assert played("yarn", s, ask("o", slot(4), queue="other"), ask("mine", slot(4), queue="q")) == stopped


def test_the_resource_of_which_most_is_used_says_how_well_a_queue_is_served() -> None:
    promise = Res(cpus=8, gpus=4)
    s = state(node("n", 8), queues=(Queue(path="a", guaranteed=promise), Queue(path="b", guaranteed=promise)))
    runs(s, ask("cores", slot(1, cpus=8), queue="a"), 0)  # a quarter of its devices, all of its cores
    runs(s, ask("devices", slot(2, cpus=1), queue="b"), 0)  # half of its devices, an eighth of its cores
    order = starts("yarn", s, ask("a1", slot(1), queue="a", at=1.0), ask("b1", slot(1), queue="b", at=2.0))
    assert order == ["b1", "a1"]


def test_cores_that_were_lent_are_taken_back_too() -> None:
    queues = (Queue(path="q", guaranteed=Res(cpus=8, gpus=2)), Queue(path="other", guaranteed=Res(cpus=8, gpus=2)))
    s = state(node("n", cpus=16), queues=queues)
    wide = (ask("o1", slot(1, cpus=8), queue="other"), ask("o2", slot(1, cpus=8), queue="other"))
    assert played("yarn", s, *wide, ask("mine", slot(1, cpus=8), queue="q")) == ["o2"]
    assert running(s) == {"o1", "mine"}


def test_users_of_a_queue_share_it_and_one_beyond_its_part_gives_way_to_one_below() -> None:
    queues = (Queue(path="q", guaranteed=gpus(4), min_user_percent=25),)
    s = state(node("n"), queues=queues)
    own = tuple(ask(f"ann{i}", slot(1), queue="q", user="ann") for i in range(4))
    assert played("yarn", s, *own) == [] and len(running(s)) == 4
    stopped = played("yarn", s, *(ask(f"bob{i}", slot(1), queue="q", user="bob") for i in range(3)), at=10.0)
    assert stopped == ["ann3", "ann2"] and {"bob0", "bob1"} < running(s)
    assert s.jobs[JobId("bob2")].wait.reason is Reason.USER_LIMIT  # type: ignore[union-attr]


def test_a_user_has_at_most_its_factor_of_the_guarantee() -> None:
    s = state(node("n", 8), queues=(Queue(path="q", guaranteed=gpus(4), user_limit_factor=1.5),))
    played("yarn", s, *(ask(f"j{i}", slot(1), queue="q", user="ann") for i in range(8)))
    assert len(running(s)) == 6


# -- borrowing in a cohort (Kueue) --


def cohort(*held: tuple[str, int]) -> State:
    """Three queues that are promised two devices of twelve each, and jobs of one device that run in them."""
    s = state(*(node(n) for n in "xyz"), queues=tuple(Queue(path=p, guaranteed=gpus(2)) for p in "abc"))
    places = iter(range(12))
    for path, count in held:
        for i in range(count):
            runs(s, ask(f"{path}{i}", queue=path, at=float(i)), next(places) // 4, at=float(i))
    return s


def test_a_queue_that_borrows_less_takes_from_one_that_borrows_more_until_they_are_alike() -> None:
    s = cohort(("a", 8), ("b", 4))
    stopped = played("kueue", s, *(ask(f"new{i}", queue="b") for i in range(4)), at=100.0)
    assert stopped == ["a7", "a6"]  # six each: then b would have more than a
    assert sum(s.jobs[job].ask.queue == "a" for job in s.jobs if s.jobs[job].held) == 6


def test_a_gang_that_is_small_beside_what_another_borrows_takes_the_whole_of_it_by_the_second_rule() -> None:
    s = cohort(("a", 0), ("b", 2))
    runs(s, ask("large", slot(4), slot(4), queue="a"), 1, 2)
    apply(s, JobArrived(ask=ask("fill", slot(2), queue="c")), 1.0)
    runs(s, ask("fill", slot(2), queue="c"), 0)
    # Without its gang a has nothing, less than b would have with four; now it borrows six.
    assert played("kueue", s, ask("new", slot(4), queue="b"), at=100.0) == ["large"]
    assert "new" in running(s) and "large" not in running(s)


def test_shares_of_what_is_borrowed_are_compared_before_they_are_rounded() -> None:
    queues = (Queue(path="a"), Queue(path="b"), Queue(path="lends", guaranteed=gpus(10_000)))
    s = state(node("n", 8), queues=queues)
    runs(s, ask("two", slot(2), queue="a"), 0)
    runs(s, ask("one", slot(1), queue="b"), 0)  # both borrow less than a thousandth of what can be lent
    assert starts("kueue", s, ask("of-a", queue="a", at=1.0), ask("of-b", queue="b", at=2.0)) == ["of-b", "of-a"]


# -- cells (HiveD) --

RACKS = tuple(node(f"{rack}{i}", rack=rack) for rack in ("r", "s") for i in range(2))


def test_one_bad_node_leaves_the_others_of_its_unsplit_rack_to_their_owner() -> None:
    nodes = (*(node(f"n{i}", rack="r") for i in range(3)), node("m", rack="t"))
    queues = (Queue(path="q", cells=(OwnedCells(level="node", count=2),)), Queue(path="other", pinned=("t",)))
    s = state(*nodes, queues=queues)
    apply(s, NodeChanged(node=NodeId("n0"), health=Health.BAD), 0.0)
    assert starts("hived", s, ask("two", slot(4), slot(4), queue="q")) == ["two"]


def test_a_bad_node_of_a_rack_that_somebody_owns_a_node_of() -> None:
    nodes = (*(node(f"n{i}", rack="r") for i in range(3)), *(node(f"m{i}", rack="t") for i in range(3)))
    queues = (
        Queue(path="q", cells=(OwnedCells(level="node", count=2),)),
        Queue(path="w", cells=(OwnedCells(level="rack", count=1),)),
    )
    s = state(*nodes, queues=queues)
    apply(s, NodeChanged(node=NodeId("n0"), health=Health.BAD), 0.0)
    assert starts("hived", s, ask("rack", *[slot(4)] * 3, queue="w"), ask("two", slot(4), slot(4), queue="q")) == [
        "rack",
        "two",
    ]
    assert {n.id[0] for n in nodes_of(s, "rack")} == {"m"}


def nodes_of(s: State, job: str, profile: str = "hived", at: float = 100.0) -> list[Node]:
    """Where a waiting job would start."""
    found = next(d for d in decide(s, get_profile(profile), at) if isinstance(d, Admit) and d.job == job)
    return [s.nodes[held.node] for held in found.held]


def test_a_queue_that_owns_a_rack_finds_one_whole_however_many_small_jobs_of_others_came_before() -> None:
    queues = (Queue(path="wide", cells=(OwnedCells(level="rack", count=1),)), Queue(path="small", guaranteed=gpus(8)))
    s = state(*RACKS, queues=queues)
    smalls = [ask(f"s{i}", slot(2), queue="small", at=float(i)) for i in range(4)]
    assert played("hived", s, *smalls) == [] and len(running(s)) == 4
    assert played("hived", s, ask("wide", slot(4), slot(4), queue="wide"), at=10.0) == []
    racks = [{s.nodes[held.node].cells for held in s.jobs[JobId(job)].held} for job in ("wide", "s0")]
    assert len(racks[0]) == 1 and racks[0] != racks[1]


def test_a_pinned_cell_is_for_jobs_that_name_it_and_for_nobody_elses() -> None:
    queues = (
        Queue(path="q", cells=(OwnedCells(level="node", count=1),), pinned=("r1",)),
        Queue(path="other", guaranteed=gpus(4)),
    )
    s = state(*RACKS, queues=queues)
    asks = (
        ask("mine", slot(4), queue="q", pinned="r1"),
        ask("plain", slot(4), queue="q"),
        ask("o", slot(4), queue="other"),
    )
    assert sorted(starts("hived", s, *asks)) == ["mine", "o", "plain"]
    assert [n.id for n in nodes_of(s, "mine")] == ["r1"]
    apply(s, JobArrived(ask=ask("wrong", slot(4), queue="q", pinned="r0")), 101.0)
    wait = next(d.wait for d in decide(s, get_profile("hived"), 101.0) if isinstance(d, WaitOn) and d.job == "wrong")
    assert wait.reason is Reason.GUARANTEE_FULL_NO_BORROW and "r1" in wait.text


@pytest.mark.parametrize("lazy", [False, True])
def test_a_lazy_job_gives_its_cell_up_and_runs_on_until_its_devices_are_taken(lazy: bool) -> None:
    queues = (Queue(path="q", cells=(OwnedCells(level="node", count=1),)), Queue(path="other", guaranteed=gpus(4)))
    s = state(node("n"), node("m"), queues=queues)
    low, high = ask("low", slot(4), queue="q", priority=10, lazy=lazy), ask("high", slot(4), queue="q", priority=90)
    assert played("hived", s, low, high) == ([] if lazy else ["low"])
    assert running(s) == ({"low", "high"} if lazy else {"high"})
    assert played("hived", s, ask("o", slot(4), queue="other"), at=10.0) == (["low"] if lazy else [])
    assert running(s) == {"high", "o"}


def test_what_runs_keeps_its_cells_when_the_queues_change() -> None:
    # After the change q owns one node: the first of its jobs has it, the other runs on without.
    owned = tuple((Queue(path="q", cells=(OwnedCells(level="node", count=n),)), Queue(path="other")) for n in (2, 1))
    s = state(node("n"), node("m"), queues=owned[0])
    played("hived", s, ask("high", slot(4), queue="q", priority=90), ask("low", slot(4), queue="q", priority=10))
    where = {job: s.jobs[JobId(job)].held for job in ("high", "low")}
    after = s.with_cluster(s.nodes, owned[1])
    assert {str(j): after.jobs[j].held for j in after.jobs} == where
    gangs = book_of(after).cluster.gangs
    assert {name: gang.lazily_preempted for name, gang in gangs.items()} == {"high": False, "low": True}


@pytest.mark.parametrize(
    ("queue", "said"),
    [
        (Queue(path="q", pinned=("r9",)), "no node or rack has the name 'r9'"),
        (Queue(path="q", cells=(OwnedCells(level="rack", count=3),)), "3 cells of level rack are owned, there are 2"),
    ],
)
def test_cells_that_are_not_there_are_named_when_they_are_given(queue: Queue, said: str) -> None:
    found = broken_rules((queue,), RACKS)
    assert [said in one.message for one in found] == [True]


# -- order inside a queue --


@pytest.mark.parametrize("profile", ["kueue", "drf", "yarn", "kai"])
def test_in_a_queue_a_large_urgent_job_goes_before_a_small_one_of_low_priority(profile: str) -> None:
    s = state(node("n"), queues=(Queue(path="q", guaranteed=gpus(4)),))
    asks = (ask("small", queue="q", priority=10, at=1.0), ask("urgent", slot(4), queue="q", priority=90, at=2.0))
    assert starts(profile, s, *asks) == ["urgent"]


# -- shortest first --


@pytest.mark.parametrize(("profile", "first"), [("srtf", "wide"), ("srsf", "long")])
def test_time_and_service_are_two_orders(profile: str, first: str) -> None:
    asks = (ask("wide", slot(4), est_s=60.0, at=1.0), ask("long", slot(1), est_s=100.0, at=2.0))
    assert starts(profile, state(node("n")), *asks)[0] == first


# -- who stops --


def test_no_job_stops_where_stopping_the_other_alone_is_enough() -> None:
    # The newest job alone gives too little; with both stopped the place that is found takes from both.
    s = state(node("n", 8), node("m", 8), queues=(Queue(path="q", guaranteed=gpus(16)),))
    kept = ask("kept", slot(4), queue="q", priority=90)
    whole, newest = (ask(name, slot(n), queue="q", at=at) for name, n, at in (("whole", 8, 1.0), ("newest", 4, 2.0)))
    assert played("kai", s, kept, whole, newest) == []
    assert played("kai", s, ask("urgent", slot(4), slot(4), queue="q", priority=90, at=3.0), at=200.0) == ["whole"]
    assert running(s) == {"kept", "newest", "urgent"}
