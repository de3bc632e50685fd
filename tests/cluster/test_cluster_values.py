"""Parts of the scheduler core by values: what is asked, what never fits and why, who shares, who claims, who moves."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
from cluster_makers import ask, node, shape, slot, state
from tests.proof.cases.reference import AffinityNode, ceei, choose_by_affinity, choose_migration

from rota.cluster.core.admission import (
    LIMITS,
    Shortfall,
    _rules,
    amount,
    empty_twin,
    largest,
    roles_of,
    shape_feasible,
    smaller,
    tally,
    with_instances,
    with_slots,
    without,
)
from rota.cluster.core.cycle import events_of, step
from rota.cluster.core.events import (
    Event,
    JobArrived,
    JobGone,
    JobHolds,
    JobPaused,
    JobReleased,
    JobResized,
    JobSaved,
    NodeChanged,
    PairUndone,
    ReasonGiven,
    StopRequested,
    Tick,
    apply,
)
from rota.cluster.core.guarded import refusals
from rota.cluster.core.jobs import (
    PHASE_CHANGES,
    Allocation,
    Allocations,
    LineKey,
    LiveJob,
    Phase,
    Shape,
    Wait,
    compile_shape,
    line_key,
    place_key,
)
from rota.cluster.core.placement import place
from rota.cluster.core.preemption import TentativeAllocations, choose_victims, lost_gpu_s, take_what_is_free
from rota.cluster.core.profile import Admit, Preempt
from rota.cluster.core.quota import ShareRequest, fair_shares
from rota.cluster.core.state import InvariantBroken, State
from rota.cluster.policies import get_profile
from rota.cluster.policies.basic import Fit
from rota.cluster.policies.gandiva import potential
from rota.cluster.sim.sharing import LendAndPack, pair_of
from rota.spec.gang import Apart, BundleAsk, GangRequest, Together
from rota.spec.ids import GangId, InstanceId, JobId, NodeId, RoleName
from rota.spec.queue import Queue
from rota.spec.reasons import Reason
from rota.spec.resources import Health, Res

GIB = 2**30


def bundle(index: int, *roles: str, **res: Any) -> BundleAsk:
    members = tuple(InstanceId(RoleName(role), index) for role in roles)
    return BundleAsk(index=index, members=members, res=Res(**{"cpus": 1.0, **res}))


def request(*bundles: BundleAsk, gang: str = "all", **rules: Any) -> GangRequest:
    return GangRequest(gang=GangId(gang), bundles=bundles, **rules)


def running(s: State, name: str, held: Allocations, *slots: Any, now: float = 0.0, **more: Any) -> JobId:
    job = ask(name, *slots, **more)
    apply(s, JobArrived(ask=job), now)
    apply(s, JobHolds(job=job.id, held=held), now)
    return job.id


# -- asks -------------------------------------------------------------------------------------------------------------


def test_all_gangs_of_a_job_come_in_one_line_with_their_rules() -> None:
    first = request(
        bundle(0, "a", gpus=2.0, memory_bytes=5, gpu_type="A"),
        bundle(1, "a", "b", gpus=0.25),
        together=(Together(bundles=(0, 1), level="node"),),
    )
    second = request(
        bundle(0, "c", gpus=1.5, cpus=2.5),
        bundle(1, gpus=0.0),
        bundle(2, "d", "d"),
        gang="two",
        together=(Together(bundles=(0, 1), level="rack"),),
        apart=(Apart(left=(0,), right=(1, 2), level="node"),),
        tied=((1, 2),),
        close=((0, 1, 2),),
    )
    found = compile_shape([first, second])
    assert [(one.gpus, one.milli, one.type, one.cpu_milli, one.mem) for one in found.slots] == [
        (2, 0, "A", 1000, 5), (0, 250, None, 1000, 0), (2, 0, None, 2500, 0), *[(0, 0, None, 1000, 0)] * 2,
    ]  # fmt: skip
    assert found.names == (("all", 0, "a"), ("all", 1, "a+b"), ("two", 0, "c"), ("two", 1, "bundle 1"), ("two", 2, "d"))
    assert found.together == (((0, 1), "node"), ((2, 3), "rack"))
    assert found.apart == (((2,), (3, 4), "node"),)
    assert (found.tied, found.close) == (((3, 4),), ((2, 3, 4),))
    assert (found.gpu_milli, found.gpus, found.uniform) == (4250, 5, False)
    assert [found.role(i) for i in (0, 1, 3)] == ["a", "a+b", "bundle 1"]
    assert shape(slot(), slot()).role(1) == "bundle 1"


def test_a_shape_is_uniform_when_its_slots_are_equal_whole_and_free_of_rules() -> None:
    assert shape(slot(2), slot(2)).uniform
    for other in (
        shape(slot(2), slot(1)),
        shape(slot(0.5), slot(0.5)),
        shape(slot(), slot(), together=(((0, 1), "node"),)),
        shape(slot(), slot(), apart=(((0,), (1,), "node"),)),
        replace(shape(slot(), slot()), tied=((0, 1),)),
    ):
        assert not other.uniform
    assert shape(slot(2)) == shape(slot(2)) != shape(slot(3))
    assert shape(slot()) != "a shape"


def test_a_tied_group_is_one_slot_where_that_says_the_same() -> None:
    four = replace(
        shape(*[slot(1, cpus=2, gib=3)] * 4), tied=((0, 1), (2, 3)), names=tuple(("g", i, f"r{i}") for i in range(4))
    )
    joined = four.joined
    assert joined.groups == ((0, 1), (2, 3))
    assert [(one.gpus, one.cpu_milli, one.mem) for one in joined.shape.slots] == [(2, 4000, 6 * GIB)] * 2
    assert joined.shape.names == (("g", 0, "r0"), ("g", 2, "r2"))
    ruled = replace(four, together=(((0, 1, 2), "rack"),), apart=(((0, 1), (2, 3), "node"),)).joined.shape
    assert (ruled.together, ruled.apart) == ((((0, 1), "rack"),), (((0,), (1,), "node"),))


@pytest.mark.parametrize(
    "changes",
    (
        {"slots": (slot(0.5), slot(0.5))},
        {"slots": (slot(1, type="A"), slot(1, type="B"))},
        {"together": (((0, 1), "device"),)},
        {"together": (((0, 1), "socket"),)},
        {"apart": (((0,), (1,), "rack"),)},
        {"apart": (((0,), (1,), "socket"),)},
    ),
)
def test_a_tied_group_that_cannot_be_one_slot_is_a_rule(changes: dict[str, Any]) -> None:
    given = replace(shape(slot(), slot()), tied=((0, 1),), **changes)
    assert given.joined.groups == ((0,), (1,))
    assert ((0, 1), "node") in given.joined.shape.together


def test_what_is_wished_close_is_tried_as_a_rule_first() -> None:
    pair = shape(slot(), slot())
    assert pair.closest is None
    assert replace(pair, tied=((0, 1),), close=((0, 1),)).closest is None
    assert replace(pair, close=((0, 1),)).closest == replace(pair, tied=((0, 1),))


def test_who_may_be_a_victim_and_who_is_opportunistic() -> None:
    assert ask("a").may_stop and not ask("a", preemptible=False).may_stop
    assert not ask("a", part_of=JobId("b")).may_stop and ask("a", part_of=JobId("b"), spare=True).may_stop
    assert [ask("a", priority=n).opportunistic for n in (-1, 0, 1)] == [True, False, False]


# -- what never fits --------------------------------------------------------------------------------------------------


def short(*bundles: BundleAsk, nodes: tuple[Any, ...] = (node("n", 4),), **more: Any) -> Shortfall:
    queues, queue = more.pop("queues", ()), more.pop("queue", None)
    empty = empty_twin(state(*nodes, queues=queues))
    found = shape_feasible(empty, compile_shape([request(*bundles, **more)]), queue)
    assert found is not None
    return found


def test_what_fits_is_not_short() -> None:
    s = state(node("n", 4, cpus=8, gib=4))
    whole = request(bundle(0, "a", gpus=4.0, cpus=8.0, memory_bytes=4 * GIB))
    assert shape_feasible(empty_twin(s), compile_shape([whole])) is None
    halves = request(bundle(0, "a", gpus=2.0), bundle(1, "a", gpus=2.0))
    assert shape_feasible(empty_twin(s), compile_shape([halves]), "default") is None


@pytest.mark.parametrize(
    ("res", "resource", "asked", "available"),
    (
        ({"gpus": 5.0}, "gpu", "5 GPUs on one node", "at most 4 GPUs on one node"),
        ({"cpus": 16.5}, "cpu", "16.5 CPUs on one node", "at most 16 CPUs on one node"),
        ({"memory_bytes": 65 * GIB}, "mem", "65GiB memory on one node", "at most 64GiB memory on one node"),
    ),
)
def test_a_slot_that_is_larger_than_every_node_is_named(res: Any, resource: str, asked: str, available: str) -> None:
    found = short(bundle(0, "big", **res), bundle(1, "small"))
    assert (found.reason, found.role, found.resource, found.asked, found.available) == (
        Reason.TOO_LARGE, "big", resource, asked, available,
    )  # fmt: skip
    assert found.text == f"big asks {asked}; the cluster has {available}"


def test_what_no_node_has_together_is_named_by_the_nodes_that_are_left() -> None:
    nodes = (node("devices", 4, cpus=2), node("cores", 0, cpus=32))
    found = short(bundle(0, "a", gpus=1.0, cpus=8.0), nodes=nodes)
    assert (found.resource, found.asked, found.available) == ("cpu", "8 CPUs on one node", "at most 2 CPUs on one node")


def test_a_type_that_is_not_there_is_named_with_those_that_are() -> None:
    found = short(bundle(0, "a", gpus=1.0, gpu_type="X|Y"), nodes=(node("n", 2, type="B"), node("m", 2, type="A")))
    assert (found.reason, found.resource, found.asked) == (Reason.WRONG_TYPE, "gpu_type", "devices of type X or Y")
    assert set(found.available.removeprefix("devices of type ").split(", ")) == {"A", "B"}
    assert {k: found.nearest[0][k] for k in ("set", "value")} == {"set": "roles.a.resources.gpu_type", "value": None}
    none = short(bundle(0, "a", gpus=1.0, gpu_type="X"), nodes=(node("n", 0),))
    assert (none.available, none.nearest) == ("devices of type none", ())
    assert none.remedy == "ask for devices that there are (gpus: 0 is none), or add nodes that have these"


@pytest.mark.parametrize(
    ("res", "resource", "asked", "available"),
    (
        ({"gpus": 3.0}, "gpu", "9 GPUs at once", "8 GPUs in all"),
        ({"cpus": 12.0}, "cpu", "36 CPUs at once", "32 CPUs in all"),
        ({"memory_bytes": 50 * GIB}, "mem", "150GiB memory at once", "128GiB memory in all"),
    ),
)
def test_a_gang_that_is_larger_than_the_cluster_is_named(res: Any, resource: str, asked: str, available: str) -> None:
    found = short(*(bundle(i, "a", **res) for i in range(3)), nodes=(node("n", 4), node("m", 4)))
    assert (found.reason, found.role, found.resource, found.asked, found.available) == (
        Reason.TOO_LARGE, "the whole gang", resource, asked, available,
    )  # fmt: skip
    assert found.nearest[0]["text"] == "2 instead of 3 instances of a"


def test_a_gang_whose_rules_do_not_hold_anywhere_is_a_matter_of_closeness() -> None:
    two = (bundle(0, "a", gpus=3.0), bundle(1, "b", gpus=3.0))
    nodes = (node("n", 4), node("m", 4))
    found = short(*two, nodes=nodes, together=(Together(bundles=(0, 1), level="node"),))
    assert found.reason is Reason.TOPOLOGY
    assert found.nearest[-1] == {
        "drop": "collocate", "roles": ["a", "b"], "level": "node", "text": "without collocate (node) of a and b",
    }  # fmt: skip
    assert "without collocate (node) of a and b" in found.remedy and found.remedy.startswith("it would fit with ")
    loose = short(bundle(0, "a", gpus=3.0), bundle(1, "b", gpus=3.0), bundle(2, "c", gpus=2.0), nodes=nodes)
    assert (loose.reason, loose.role) == (Reason.TOO_LARGE, "the whole gang")


def test_a_limit_of_the_queue_is_named() -> None:
    queues = (Queue(path="q", limit=Res(cpus=0.0, gpus=2.0)),)
    found = short(bundle(0, "a", gpus=3.0), queues=queues, queue="q")
    assert (found.reason, found.role, found.asked) == (Reason.QUOTA_LIMIT, "the job", "3 GPUs in all")
    assert (found.available, found.reason in LIMITS) == ("a limit of 2 GPUs for queue q", True)
    assert found.text == "the job asks 3 GPUs in all; there is a limit of 2 GPUs for queue q"
    assert replace(found, nearest=()).remedy == "ask for less, or an admin for a higher limit"
    assert replace(found, nearest=(), reason=Reason.TOO_LARGE, resource="cpu").remedy == (
        "ask for less, or add nodes that can hold it"
    )


def test_amounts_have_their_units() -> None:
    assert [amount("gpu", 1500), amount("cpu", 500), amount("mem", GIB), amount("gpu:A", 2000)] == [
        "1.5 GPUs", "0.5 CPUs", "1GiB memory", "2 A GPUs",
    ]  # fmt: skip


def test_the_empty_twin_has_every_node_in_order_but_those_that_left_and_the_spares() -> None:
    s = state(node("a"), node("b").with_health(Health.DRAINED), node("c"))
    running(s, "j", (Allocation(0, (0, 1), 0, 0, 0),), slot(2))
    twin = empty_twin(s)
    assert ([one.id for one in twin.nodes], int(twin.free.sum()), not twin.node_health.any()) == (
        ["a", "b", "c"],
        12,
        True,
    )
    assert [one.id for one in empty_twin(s, spares=1).nodes] == ["a", "b"]
    assert empty_twin(s, spares=9).nodes == ()


# -- near relatives ---------------------------------------------------------------------------------------------------


def test_leaving_out_slots_moves_the_rules_with_them() -> None:
    names = tuple(("g", i, role) for i, role in enumerate(("a", "a", "b", "b")))
    given = Shape(
        slots=tuple(slot(n) for n in (1, 2, 3, 4)),
        together=(((0, 1), "node"), ((1, 2, 3), "rack")),
        apart=(((0,), (2,), "node"), ((1,), (3,), "node")),
        names=names,
        tied=((2, 3), (0, 1)),
        close=((1, 2, 3), (0, 1)),
    )
    found = without(given, {0})
    assert [one.gpus for one in found.slots] == [2, 3, 4]
    assert found.together == (((0, 1, 2), "rack"),)
    assert found.apart == (((0,), (2,), "node"),)
    assert (found.tied, found.close, found.names) == (((1, 2),), ((0, 1, 2),), names[1:])
    assert roles_of(given) == {"a": [0, 1], "b": [2, 3]}
    assert [one.gpus for one in with_instances(given, "a", 1).slots] == [1, 3, 4]
    assert [one.gpus for one in with_slots(given, "b", lambda one: replace(one, gpus=9)).slots] == [1, 2, 9, 9]


@pytest.mark.parametrize("most", range(8))
def test_the_largest_number_that_fits_is_found_by_halves(most: int) -> None:
    tried: list[int] = []

    def fits(n: int) -> bool:
        tried.append(n)
        return n <= most

    assert largest(2, 7, fits) == (most if most >= 2 else None)
    assert len(tried) <= 4 and set(tried) <= set(range(2, 8))
    assert largest(3, 2, fits) is None and largest(0, 0, lambda n: True) == 0


def changes(given: Shape, *nodes: Any) -> list[tuple[str, Any]]:
    s = state(*nodes)

    def fits(one: Shape) -> bool:
        with s.txn() as txn:
            return place(s, txn, one) is not None

    return [
        (found.change.get("set", found.change.get("drop")), found.change.get("value")) for found in smaller(given, fits)
    ]


def test_the_least_single_changes_that_make_a_shape_fit_are_listed() -> None:
    assert changes(shape(slot(6, cpus=20)), node("n", 4)) == []
    assert changes(shape(slot(6)), node("n", 4)) == [("roles.bundle 0.resources.gpus", 4)]
    assert changes(shape(slot(1, cpus=20)), node("n", 4)) == [("roles.bundle 0.resources.cpus", 16)]
    assert changes(shape(slot(1, cpus=1)), node("n", 4, cpus=0.5)) == [("roles.bundle 0.resources.cpus", 0.5)]
    assert changes(shape(slot(1, gib=70)), node("n", 4)) == [("roles.bundle 0.resources.memory", "64GiB")]
    assert changes(shape(slot(1, type="B")), node("n", 4)) == [("roles.bundle 0.resources.gpu_type", None)]
    planned = replace(shape(slot(3), slot(3)), tied=((0, 1),), names=(("g", 0, "r"), ("g", 1, "r")))
    assert changes(planned, node("n", 4), node("m", 4)) == []
    loose = replace(planned, tied=(), apart=(((0,), (1,), "rack"),))
    assert changes(loose, node("n", 4, rack="x"), node("m", 4, rack="x")) == [("roles.r.replicas", 1), ("apart", None)]


def test_the_rules_about_closeness_are_left_out_one_at_a_time() -> None:
    names = (("g", 0, "a"), ("g", 1, "b"))
    given = replace(
        shape(slot(2), slot(2), together=(((0, 1), "node"),), apart=(((0,), (1,), "rack"),)),
        names=names,
        tied=((0, 1),),
    )
    rules = list(_rules(state(node("n", 4), node("m", 4)), given))
    assert [rest for rest, _, _ in rules] == [
        replace(given, tied=(), close=()),
        replace(given, together=()),
        replace(given, apart=()),
    ]
    assert [numbers["rule"] for _, _, numbers in rules] == ["plan", "collocate", "apart"]
    assert rules[0][2] | {"nodes_left": 0} == {
        "level": "node", "rule": "plan", "roles": ["a", "b"], "groups": 1, "group_gpus": 4, "nodes_left": 0,
    }  # fmt: skip
    assert rules[0][1].startswith("The plan of a needs 1 times 4 GPUs on one node; nodes that have them free: ")
    assert rules[1][1] == "Enough is free, but no node has room for a and b together."
    assert rules[2][1] == "Enough is free, but not for a and b apart, each in a rack of its own."
    bare = replace(given, slots=(slot(0), slot(0)))
    assert "1 times 2 instances on one node" in next(_rules(state(node("n")), bare))[1]


# -- who holds, claims and shares -------------------------------------------------------------------------------------


def test_what_is_free_of_a_holding_is_taken_and_the_rest_is_owed() -> None:
    s = state(node("n", 3, cpus=4, gib=4))
    running(s, "j", (Allocation(0, (0,), 0, 3000, 3 * GIB),), slot(1, cpus=3, gib=3))
    with s.txn() as txn:
        part = take_what_is_free(s, txn, Allocation(0, (0, 1), 0, 2000, 2 * GIB))
        assert part == Allocation(0, (1,), 0, 1000, GIB)
        assert (list(s.dev_milli), int(s.cpu[0]), int(s.mem[0])) == ([0, 0, 1000], 0, 0)
    with s.txn() as txn:
        claims = TentativeAllocations(s, txn)
        assert (bool(claims), claims.given_back([JobId("j")])) == (False, 3000)
        claims.keep([Allocation(0, (0, 1), 0, 2000, 2 * GIB)])
        claims.jobs.append(JobId("k"))
        assert bool(claims) and claims.given_back([JobId("j")]) == 1000
        assert claims.given_back([]) == 0
        with txn.trial():
            claims.release_all([JobId("j")])
            assert (list(s.dev_milli), int(s.cpu[0]), int(s.mem[0])) == ([0, 0, 1000], 2000, 2 * GIB)


def test_idle_devices_go_to_who_has_least_of_what_it_asked_and_come_back_for_others() -> None:
    s = state(node("n", 4), node("m", 2))
    a = running(s, "a", (Allocation(0, (0,), 0, 0, 0),), slot(1), slots_max=4)
    b = running(s, "b", (Allocation(0, (1,), 0, 0, 0), Allocation(1, (4,), 0, 0, 0)), slot(1), slot(1), slots_max=3)
    running(s, "c", (Allocation(0, (2,), 0, 0, 0),), slot(1))
    with s.txn() as txn:
        more = LendAndPack(60.0).lend(s, txn, Fit())
        assert {job: len(held) for job, held in more.items()} == {a: 3} or {job: len(h) for job, h in more.items()} == {
            a: 2,
            b: 3,
        }
        assert all(held[: len(s.jobs[job].held)] == s.jobs[job].held for job, held in more.items())
        assert int(s.dev_milli.sum()) == 2000, "a trial"
    lent = s.jobs[a]._replace(
        held=(Allocation(0, (0,), 0, 0, 0), Allocation(0, (3,), 0, 0, 0), Allocation(1, (5,), 0, 0, 0))
    )
    with s.txn() as txn:
        for held in lent.held[1:]:
            s.take(txn, held, 1)
        s.put(txn, lent)
        small, large = LiveJob(ask=ask("w", slot(1))), LiveJob(ask=ask("w", slot(3)))
        found = LendAndPack(60.0).give_back(s, txn, small, Fit())
        assert list(found) == [a] and len(found[a]) == 2 and found[a][0] == lent.held[0]
        assert LendAndPack(60.0).give_back(s, txn, large, Fit()) == {}


def test_a_row_knows_its_times_and_its_line() -> None:
    row = LiveJob(ask=ask("a", est_s=100.0, not_before=5.0), back_at=9.0, done_s=30.0, served_s=7.0, started_at=10.0)
    assert (row.left_s, row.begins_at, row.served_by(50.0)) == (70.0, 9.0, 7.0)
    assert row._replace(done_s=130.0).left_s == 0.0
    assert LiveJob(ask=ask("a")).left_s is None
    assert row._replace(held=(Allocation(0, (0,), 0, 0, 0),)).served_by(50.0) == 47.0
    assert row._replace(back_at=1.0).begins_at == 5.0
    waits = row._replace(wait=Wait(reason=Reason.TOPOLOGY))
    assert (
        waits.has_reason(Reason.TOPOLOGY)
        and not waits.has_reason(Reason.TOO_LARGE)
        and not row.has_reason(Reason.TOO_LARGE)
    )
    busy = LiveJob(
        ask=ask("a", queue="q", priority=70, user="u", preemptible=False, avoid=(NodeId("n"),), failover=True)
    )
    key = line_key(busy)
    assert key == LineKey("q", 70, "u", 0.0, False, busy.ask.shape, avoid=(NodeId("n"),), failover=True)
    part = busy._replace(ask=replace(busy.ask, part_of=JobId("whole"), spare=True, pinned="rack"))
    assert line_key(part) == key._replace(part_of="whole", pinned="rack")
    assert line_key(part._replace(ask=replace(part.ask, spare=False))).part_of is None
    place = LineKey("", 0, "", 0.0, True, busy.ask.shape, avoid=(NodeId("n"),), failover=True)
    assert place_key(key) == place and place_key(line_key(part)) == place._replace(pinned="rack")
    assert place_key(key._replace(priority=-3)).priority == -3


def test_facts_about_a_job_count_in_the_phase_that_they_belong_to() -> None:
    s = state(node("n", 4))
    job = running(s, "j", (Allocation(0, (0,), 0, 0, 0),), now=3.0)
    assert (s.jobs[job].phase, s.jobs[job].started_at, int(s.free.sum())) == ("running", 3.0, 3)
    apply(s, JobSaved(job=job), 8.0)
    apply(s, JobPaused(job=job, paused=True), 8.0)
    assert (s.jobs[job].saved_at, s.jobs[job].phase) == (8.0, "running")
    apply(s, StopRequested(job=job), 9.0)
    assert s.jobs[job].phase == "stopping"
    apply(s, JobReleased(job=job, back_at=20.0, done_s=4.0), 10.0)
    row = s.jobs[job]
    assert (row.phase, row.held, row.back_at, row.left_at, row.served_s, row.done_s) == (
        "queued",
        (),
        20.0,
        10.0,
        7.0,
        4.0,
    )
    assert int(s.free.sum()) == 4
    apply(s, JobHolds(job=job, held=(Allocation(0, (1,), 0, 0, 0),)), 21.0)
    apply(s, JobReleased(job=job, back_at=21.0), 21.0)
    assert (s.jobs[job].back_at, s.jobs[job].done_s) == (0.0, 4.0)
    before = s.version
    apply(s, StopRequested(job=JobId("none")), 22.0)
    assert (s.version, s.jobs[job].phase) == (before + 1, "queued")


def test_who_goes_where_when_nodes_are_kept_for_one_size_of_job() -> None:
    def kept(name: str, free: int, **more: Any) -> AffinityNode:
        return AffinityNode(name=name, free=free, **more)

    nodes = [
        kept("other", 4, affinity=4),
        kept("any", 4),
        kept("same", 2, affinity=2, load=0.9),
        kept("full", 1, affinity=2),
    ]
    assert choose_by_affinity(nodes, 2) == ("same", "exclusive")
    assert choose_by_affinity(nodes[:2], 2) == ("any", "exclusive")
    assert choose_by_affinity(nodes[:1], 2) == ("other", "exclusive")
    assert choose_by_affinity([kept("a", 3, load=0.5), kept("b", 4, load=0.2)], 2)[0] == "b"
    assert choose_by_affinity([kept("a", 4), kept("b", 3)], 2)[0] == "b"
    full = [kept("x", 0, affinity=2, suspendable=True, load=0.9), kept("y", 1, affinity=2, suspendable=True, load=0.3)]
    assert choose_by_affinity([*full, kept("z", 1, affinity=2)], 2) == ("y", "time-slice")
    assert choose_by_affinity([kept("z", 1, affinity=2), kept("v", 0, affinity=4, suspendable=True)], 2) == (
        None,
        "queue",
    )
    assert potential([3, 1, 0]) == -10


def test_the_move_that_brings_most_free_devices_together() -> None:
    assert choose_migration({"a": 3, "b": 1, "c": 4}, 4, None, 1) == ("a", "b")
    assert choose_migration({"a": 3, "b": 1, "c": 2}, 4, None, 2) == ("a", "c")
    assert choose_migration({"a": 1, "b": 3}, 4, "a", 1) is None
    assert choose_migration({"a": 2, "b": 2}, 4, "a", 1) == ("a", "b")
    assert choose_migration({"a": 1, "b": 2}, 4, "a", 1) is None
    assert choose_migration({"a": 4, "b": 4}, 4, None, 1) is None
    assert choose_migration({"a": 3, "b": 0}, 4, None, 0) is None
    assert choose_migration({"a": 4, "b": 1}, 4, "a", 1) is None
    assert choose_migration({"a": 3, "b": 1, "c": 1}, 4, None, 1) == ("a", "b")


def test_two_users_with_equal_incomes_have_the_largest_product_of_tasks() -> None:
    F = Fraction
    capacity = {"cpu": F(9), "mem": F(18)}
    assert ceei(capacity, {"a": {"cpu": F(1), "mem": F(4)}, "b": {"cpu": F(3), "mem": F(1)}}) == {
        "a": F(45, 11),
        "b": F(18, 11),
    }
    assert ceei({"cpu": F(8)}, {"a": {"cpu": F(1)}, "b": {"cpu": F(2)}}) == {"a": F(4), "b": F(2)}
    one_binds = ceei({"cpu": F(4), "mem": F(100)}, {"a": {"cpu": F(1), "mem": F(1)}, "b": {"cpu": F(1), "mem": F(2)}})
    assert one_binds == {"a": F(2), "b": F(2)}
    three = ceei({"cpu": F(9)}, {user: {"cpu": F(1)} for user in "abc"})
    assert all(abs(tasks - 3) < F(1, 10**6) for tasks in three.values())


def test_two_jobs_of_one_size_share_their_devices_the_oldest_first() -> None:
    s = state(node("n", 4, cpus=8))
    young = running(s, "y", (Allocation(0, (2, 3), 0, 0, 0),), slot(2), now=5.0, labels={"class": "x"})
    old = running(s, "o", (Allocation(0, (0, 1), 0, 0, 0),), slot(2), now=1.0)
    row = LiveJob(ask=ask("w", slot(2, cpus=3)))
    half, mine = (Allocation(0, (0, 1), 500, 0, 0),), (Allocation(0, (0, 1), 500, 3000, 0),)
    packs = LendAndPack(60.0, 0.1)
    assert packs.join(s, row) == (old, half, mine)
    assert LendAndPack(60.0).join(s, row) is None, "devices are lent, not shared"
    with s.txn() as txn:
        txn.put(s.undone, ("", ""), None)
        assert packs.join(s, row)[0] == young  # type: ignore[index]
    assert pair_of(s.jobs[young], row) == ("", "x")
    for other in (slot(1), slot(0.5), slot(2, cpus=9), slot(2, gib=65), slot(2, type="B"), slot(0)):
        assert packs.join(s, LiveJob(ask=ask("w", other))) is None
    assert packs.join(s, LiveJob(ask=ask("w", slot(2), preemptible=False))) is None
    assert packs.join(s, LiveJob(ask=ask("w", slot(2), slot(2)))) is None


def test_two_that_share_do_not_pay_when_both_together_gain_nothing() -> None:
    one, other = LiveJob(ask=ask("a"), rate=0.6, started_at=1.0), LiveJob(ask=ask("b"), rate=0.5, started_at=5.0)
    assert not LendAndPack(60.0, 0.1).pays(one, other, 70.0)
    assert LendAndPack(60.0, 0.09).pays(one, other, 70.0)
    assert LendAndPack(60.0, 0.1).pays(one, other, 59.0), "not measured for a round"
    assert LendAndPack(60.0, 0.1).pays(one._replace(rate=None), other, 70.0)
    assert LendAndPack(60.0, 0.1).pays(one, other._replace(rate=None), 70.0)


# -- what is counted, and who notices ---------------------------------------------------------------------------------


def test_a_share_of_a_device_is_counted_on_nodes_with_a_device_that_has_it_left() -> None:
    s = state(node("a", 1), node("b", 1), node("c", 0))
    running(s, "half", (Allocation(0, (0,), 600, 0, 0),), slot(0.6))
    left = {one.constraint: one.nodes_left for one in tally(s, shape(slot(0.5)))}
    assert left["in the cluster"] == 3 and list(left.values())[-1] == 1, "half of the device on node b alone"


def test_what_would_start_on_a_device_or_node_out_of_order_or_on_another_node_is_refused() -> None:
    s = state(node("a", 2), node("b", 2))
    for name in ("j", "k"):
        apply(s, JobArrived(ask=ask(name, slot(1))), 0.0)
    apply(s, NodeChanged(node=NodeId("a"), health=Health.SUSPECT, devices=(0,)), 0.0)

    def why(*rows: Allocation) -> dict[JobId, str]:
        return refusals(s, [Admit(job=JobId(name), held=(one,)) for name, one in zip("jk", rows)])

    assert why(Allocation(0, (1,), 0, 0, 0), Allocation(1, (2,), 0, 0, 0)) == {}
    assert why(Allocation(0, (0,), 0, 0, 0)) == {"j": "a, or a device of it, takes no work"}
    assert why(Allocation(0, (2,), 0, 0, 0)) == {"j": "a, or a device of it, takes no work"}
    assert why(Allocation(1, (2,), 0, 0, 0), Allocation(1, (2,), 0, 0, 0)) == {
        "k": "what it would get of b is not free"
    }


def test_a_job_that_does_not_run_is_not_made_larger() -> None:
    s = state(node("n", 4))
    apply(s, JobArrived(ask=ask("waits", slot(1))), 0.0)
    job = running(s, "stops", (Allocation(0, (0,), 0, 0, 0),), slot(1))
    apply(s, StopRequested(job=job), 1.0)
    for name in ("waits", "stops"):
        apply(s, JobResized(job=JobId(name), held=(Allocation(0, (1,), 0, 0, 0), Allocation(0, (2,), 0, 0, 0))), 2.0)
    assert [len(s.jobs[JobId(name)].held) for name in ("waits", "stops")] == [0, 1]
    assert int(s.free.sum()) == 3


def test_who_waits_is_tried_again_when_a_job_gives_back_what_it_had_beyond_its_request() -> None:
    s, fifo = state(node("n", 4)), get_profile("fifo")
    step(s, JobArrived(ask=ask("large", slot(1), slots_max=4)), fifo, 0.0)
    apply(s, JobResized(job=JobId("large"), held=tuple(Allocation(0, (d,), 0, 0, 0) for d in range(4))), 1.0)
    step(s, JobArrived(ask=ask("waits", slot(2))), fifo, 2.0)
    step(s, Tick(), fifo, 3.0)
    assert s.jobs[JobId("waits")].phase == "queued"
    step(s, JobResized(job=JobId("large"), held=(Allocation(0, (0,), 0, 0, 0),)), fifo, 4.0)
    assert s.jobs[JobId("waits")].phase == "running"


def test_what_happens_when_decisions_are_carried_out() -> None:
    job, other = JobId("j"), JobId("k")
    stop = Preempt(job=job, for_job=other, reason=Reason.PREEMPTED_PRIORITY, grace_s=1.0)
    assert list(events_of([stop])) == [StopRequested(job=job, for_job=other)]
    undone = replace(stop, undone=("a", "b"))
    assert list(events_of([undone])) == [StopRequested(job=job, for_job=other), PairUndone(job=job, pair=("a", "b"))]


def test_what_is_left_over_in_whole_units_goes_to_the_largest_remainder_that_may_have_it() -> None:
    def of(weight: int, asks: int) -> ShareRequest:
        return ShareRequest(deserved=Fraction(0), request=Fraction(asks), weight=Fraction(weight))

    shares, left = fair_shares(Fraction(10), {"a": of(1, 99), "b": of(1, 99), "c": of(1, 99)}, Fraction(1))
    assert (shares, left) == ({"a": 4, "b": 3, "c": 3}, 0)
    half = ShareRequest(deserved=Fraction(0), request=Fraction(99), most=Fraction(7, 2), weight=Fraction(1))
    shares, left = fair_shares(Fraction(10), {"a": half, "b": half, "c": half}, Fraction(1))
    assert shares == {"a": Fraction(7, 2), "b": Fraction(7, 2), "c": 3} and left == 0


@pytest.mark.parametrize("seed", range(30))
def test_of_few_candidates_those_are_stopped_that_lose_least(seed: int) -> None:
    rng = random.Random(seed)
    s = state(node("a", 4), node("b", 4))
    candidates = list[tuple[LiveJob, Reason]]()
    for row in range(2):
        first = 0
        while first < 4 and (size := min(rng.randint(1, 3), 4 - first)):
            devices = tuple(range(4 * row + first, 4 * row + first + size))
            job = running(
                s, f"r{4 * row + first}", (Allocation(row, devices, 0, 0, 0),), slot(size), now=rng.random() * 99
            )
            candidates.append((s.jobs[job], Reason.PREEMPTED_PRIORITY))
            first += size
    rng.shuffle(candidates)
    wanted = LiveJob(ask=ask("j", *rng.choice(([slot(4)], [slot(2), slot(2)], [slot(3)], [slot(2)] * 3))))
    with s.txn() as txn:
        found = choose_victims(s, txn, wanted, Fit(), candidates, 100.0)
        fitting = list[float]()
        for n in range(1, len(candidates) + 1):
            for some in combinations(candidates, n):
                with txn.trial():
                    s.lift(txn, [one.ask.id for one, _ in some])
                    if Fit().place(s, txn, wanted) is not None:
                        fitting.append(sum(lost_gpu_s(s, one.ask.id, 100.0, 60.0) for one, _ in some))
    assert found is not None and sum(one.lost_gpu_s for one in found) == pytest.approx(min(fitting))


def test_the_changes_of_phase_of_the_page_are_those_that_events_make() -> None:
    job, held = JobId("a"), (Allocation(0, (0,), 0, 0, 0),)
    to_phase: dict[Phase, list[Event]] = {
        "queued": [],
        "paused": [JobPaused(job=job, paused=True)],
        "running": [JobHolds(job=job, held=held)],
        "stopping": [JobHolds(job=job, held=held), StopRequested(job=job)],
    }
    every: list[Event] = [
        JobArrived(ask=ask("a", priority=60)),
        *(JobPaused(job=job, paused=paused) for paused in (True, False)),
        *(StopRequested(job=job, final=final) for final in (True, False)),
        JobHolds(job=job, held=held),
        JobResized(job=job, held=held),
        JobReleased(job=job),
        JobSaved(job=job, n=1),
        ReasonGiven(job=job, wait=Wait(reason=Reason.FRAGMENTED)),
        NodeChanged(node=NodeId("n"), health=None),
    ]
    found = set[tuple[Phase, Phase, str]]()
    for phase, events in to_phase.items():
        for event in every:
            s = state(node("n"))
            for one in (JobArrived(ask=ask("a")), *events):
                apply(s, one, 0.0)
            assert s.jobs[job].phase == phase
            apply(s, event, 1.0)
            if (after := s.jobs[job].phase) != phase:
                found.add((phase, after, type(event).__name__))
    assert found == {(one, row.enters, row.event) for row in PHASE_CHANGES for one in row.leaves}


def test_a_state_refuses_a_change_of_phase_that_no_event_makes() -> None:
    s, job = state(node("n")), JobId("a")
    for event in (JobArrived(ask=ask("a")), JobPaused(job=job, paused=True)):
        apply(s, event, 1.0)
    before = s.digest()
    with pytest.raises(InvariantBroken) as error, s.txn() as txn:
        s.put(txn, s.jobs[job]._replace(phase="stopping"))
    assert str(error.value) == (
        "a is paused and would be stopping, which PHASE_CHANGES does not have; "
        "last events of the job: JobArrived a at 1, JobPaused a at 1"
    )
    assert error.value.job == job and s.digest() == before


def test_events_that_come_late_change_no_phase() -> None:
    s, job = state(node("n"), node("m")), JobId("a")
    apply(s, JobArrived(ask=ask("a")), 0.0)
    apply(s, JobHolds(job=job, held=()), 1.0)
    assert s.jobs[job].phase == "queued"
    apply(s, JobHolds(job=job, held=(Allocation(0, (0,), 0, 0, 0),)), 1.0)
    lost = s.with_cluster([node("m")], ())
    for event in (JobHolds(job=job, held=(Allocation(0, (0,), 0, 0, 0),)), JobPaused(job=job, paused=True)):
        apply(lost, event, 2.0)
        assert lost.jobs[job].phase == "running"
    apply(lost, JobGone(job=job), 3.0)
