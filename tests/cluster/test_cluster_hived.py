"""Virtual clusters keep every tenant's guarantee through any sequence of starts, preemptions, losses and ends."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.proof.cases.hived import set_node_health, start_all_nodes

from rota.cluster.core.capacity import CellSpec
from rota.cluster.core.txn import Txn
from rota.cluster.virtual.cells import CellType, TenantCells, TopologyError, VirtualCells
from rota.cluster.virtual.hived import GangAsk, GangPlan, HivedCluster
from rota.spec.errors import BadInput

TYPES = {
    "gpu4": CellType(child="gpu", count=4),
    "node": CellType(child="gpu4", count=2, is_node=True),
    "pair": CellType(child="node", count=2),
}


def forest(pairs: int = 2) -> list[CellSpec]:
    def build(kind: str, address: str) -> CellSpec:
        made = TYPES.get(kind)
        if made is None:
            return CellSpec(kind=kind, address=address)
        children = tuple(build(made.child, f"{address}.{i}") for i in range(made.count))
        return CellSpec(kind=kind, address=address, children=children, is_node=made.is_node)

    return [build("pair", str(i)) for i in range(pairs)]


def cluster(*tenants: tuple[str, str, int], pairs: int = 2) -> HivedCluster:
    owned = [TenantCells(name=name, cells=((path, count),)) for name, path, count in tenants]
    made = HivedCluster(VirtualCells(forest(pairs), TYPES, owned))
    start_all_nodes(made, Txn())
    return made


def start(
    c: HivedCluster, name: str, tenant: str, *members: int, priority: int = 0, lazy: bool = False
) -> GangPlan | None:
    ask = GangAsk(name=name, tenant=tenant, priority=priority, members=tuple(sorted(members)), lazy=lazy)
    plan = c.find(Txn(), ask, None)
    if plan is not None and not plan.victims:
        c.allocate(Txn(), plan)
    return plan


def test_sixteen_small_jobs_of_one_tenant_leave_the_other_its_whole_node() -> None:
    c = cluster(("a", "pair.node", 1), ("b", "pair.node", 1), pairs=1)
    for i in range(8):
        assert start(c, f"a{i}", "a", 1) is not None
    assert start(c, "a8", "a", 1) is None
    assert start(c, "b0", "b", 8) is not None


def test_a_gang_that_is_too_large_for_its_tenant_waits_and_a_smaller_one_behind_it_runs() -> None:
    c = cluster(("a", "pair.node.gpu4", 1))
    assert start(c, "six", "a", 1, 1, 1, 1, 1, 1) is None
    assert start(c, "four", "a", 1, 1, 1, 1) is not None


def test_opportunistic_work_uses_what_others_own_and_gives_way_to_them() -> None:
    c = cluster(("a", "pair.node", 1), ("b", "pair.node", 3))
    assert start(c, "opp", "a", 8, 8, 8, 8, priority=-1) is not None
    plan = start(c, "owner", "b", 8)
    assert plan is not None
    assert plan.victims == ("opp",)


def test_two_single_device_pods_get_buddies() -> None:
    c = cluster(("a", "pair.node", 1))
    plan = start(c, "g", "a", 1, 1)
    assert plan is not None
    assert len({c.buddy.parent[leaf] for leaf, _ in plan.flat}) == 1


def test_a_gang_that_gives_way_lazily_runs_on_as_opportunistic() -> None:
    c = cluster(("a", "pair.node", 1))
    start(c, "low", "a", 8, lazy=True)
    plan = start(c, "high", "a", 8, priority=5)
    assert plan is not None
    assert plan.victims == ()
    assert c.gangs["low"].lazily_preempted
    assert {c.buddy.prio[leaf] for leaf, _ in c.gangs["low"].plan.flat} == {-1}


def test_more_cells_than_there_are_is_a_configuration_error_with_numbers() -> None:
    with pytest.raises(TopologyError) as caught:
        cluster(("a", "pair.node", 4), ("b", "pair", 1))
    assert (caught.value.fields["need"], caught.value.fields["have"]) == (4, 2)


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        ("pair.rack", {}, "a: pair.rack: a pair has no rack in it"),
        ("row", {}, "a: row: no physical cell has the kind row"),
        ("pair", {"gpu": CellType(child="pair", count=1)}, "would lie in itself: gpu4 > gpu > pair > node > gpu4"),
    ],
)
def test_cells_that_contradict_each_other_are_refused(path: str, change: dict[str, CellType], said: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(said)):
        VirtualCells(forest(), TYPES | change, [TenantCells(name="a", cells=((path, 1),))])


def test_a_node_that_is_there_twice_is_refused_by_name() -> None:
    with pytest.raises(TopologyError, match=r"node '0\.0' is there twice"):
        VirtualCells([*forest(1), *forest(1)], TYPES, [])


def test_an_unknown_tenant_is_refused() -> None:
    with pytest.raises(BadInput):
        start(cluster(("a", "pair", 1)), "g", "nobody", 1)


OPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "preempt", "cancel", "end", "bad", "good"]),
        st.integers(0, 7),
        st.sampled_from(["a", "b"]),
        st.sampled_from([-1, 0, 5]),
        st.sampled_from([(1,), (2,), (4,), (8,), (4, 4), (8, 8)]),
        st.booleans(),
    ),
    max_size=25,
)


@given(OPS)
def test_guarantees_stay_safe_and_every_change_can_be_undone(
    ops: list[tuple[str, int, str, int, tuple[int, ...], bool]],
) -> None:
    c = cluster(("a", "pair.node", 2), ("b", "pair", 1))
    buddy, txn = c.buddy, Txn()
    before = (list(buddy.bound), list(buddy.prio), dict(buddy.free), dict(buddy.left), dict(buddy.quota_left))
    for op, number, tenant, priority, members, lazy in ops:
        name = f"g{number}"
        gang = c.gangs.get(name)
        if op in ("start", "preempt") and gang is None:
            ask = GangAsk(name=name, tenant=tenant, priority=priority, members=members, lazy=lazy)
            plan = c.find(txn, ask, None)
            if plan is not None and not plan.victims:
                c.allocate(txn, plan)
            elif plan is not None and op == "preempt":
                c.reserve(txn, plan)
        elif op == "cancel" and gang is not None and gang.state == "preempting":
            c.cancel(txn, name)
        elif op == "end" and gang is not None and gang.state != "preempting":
            c.release(txn, name)
        elif op in ("bad", "good"):
            set_node_health(c, txn, number % 4, op == "good")
        assert buddy.is_safe("pair")
        for leaf, cell in enumerate(c.cells.physical.leaf_cells):
            used = cell in c.user or cell in c.reserver
            assert used == (buddy.prio[cell] != -2), leaf
    txn.undo()
    assert before == (buddy.bound, buddy.prio, buddy.free, buddy.left, buddy.quota_left)
    assert not c.gangs
