"""A gang is placed exactly when a brute force over all placements finds one."""

from __future__ import annotations

from itertools import product

import pytest
from cluster_makers import ask, node, shape, slot, state
from hypothesis import given
from hypothesis import strategies as st

from rota.cluster.core.cycle import step
from rota.cluster.core.events import JobArrived, JobGone, apply
from rota.cluster.core.jobs import Allocation, Shape, Slot
from rota.cluster.core.placement import place, spread
from rota.cluster.core.state import DATA_MAX, State
from rota.cluster.policies import get_profile
from rota.spec.ids import JobId

SLOTS = st.builds(slot, st.sampled_from([0, 0.25, 0.5, 0.75, 1, 2, 3]), cpus=st.sampled_from([0, 2, 4]))


def _brute_force(s: State, wanted: Shape) -> bool:
    """Try every node, and every device for shares, for every slot."""

    def fits(i: int) -> bool:
        if i == len(wanted.slots):
            return _bonds_hold(s, wanted, chosen)
        one = wanted.slots[i]
        for row in range(len(s.nodes)):
            for held in _all_holdings(s, one, row):
                with s.txn() as txn:
                    s.take(txn, held, 1)
                    chosen.append(held)
                    if s.cpu[row] >= 0 and s.mem[row] >= 0 and fits(i + 1):
                        return True
                    chosen.pop()
        return False

    chosen: list[Allocation] = []
    return fits(0)


def _all_holdings(s: State, one: Slot, row: int) -> list[Allocation]:
    rows = range(int(s.dev0[row]), int(s.dev0[row + 1]))
    if one.gpus:
        free = [d for d in rows if s.dev_milli[d] == 1000]
        return [Allocation(row, tuple(free[: one.gpus]), 0, one.cpu_milli, one.mem)] if len(free) >= one.gpus else []
    if one.milli:
        return [Allocation(row, (d,), one.milli, one.cpu_milli, one.mem) for d in rows if s.dev_milli[d] >= one.milli]
    return [Allocation(row, (), 0, one.cpu_milli, one.mem)]


def _bonds_hold(s: State, wanted: Shape, chosen: list[Allocation]) -> bool:
    def cell(i: int, level: str) -> int:
        return int(s.domain[chosen[i].node]) if level == "rack" else chosen[i].node

    for group, level in wanted.together:
        if len({cell(i, level) for i in group}) > 1:
            return False
    for left, right, level in wanted.apart:
        if any(i != j and cell(i, level) == cell(j, level) for i, j in product(left, right)):
            return False
    return True


@st.composite
def gangs(draw: st.DrawFn) -> Shape:
    slots = draw(st.lists(SLOTS, min_size=1, max_size=4))
    level = st.sampled_from(["node", "rack"])
    groups = st.lists(st.integers(0, len(slots) - 1), min_size=1, max_size=3, unique=True).map(tuple)
    together = draw(st.lists(st.tuples(groups, level), max_size=1))
    apart = draw(st.lists(st.tuples(groups, groups, level), max_size=1))
    return shape(*slots, together=tuple(together), apart=tuple(apart))


@pytest.mark.slow
@given(gangs(), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from([0, 500])), max_size=4))
def test_a_gang_fits_exactly_when_brute_force_says_so(gang: Shape, taken: list[tuple[int, int, int]]) -> None:
    s = state(node("a", 3, rack="r0", cpus=6), node("b", 2, rack="r0", cpus=6), node("c", 2, rack="r1", cpus=4))
    with s.txn() as txn:
        for row, device, milli in taken:
            rows = list(range(int(s.dev0[row]), int(s.dev0[row + 1])))
            if device < len(rows) and s.dev_milli[rows[device]] == 1000:
                s.take(txn, Allocation(row, (rows[device],), milli, 0, 0), 1)
        before = s.digest()
        held = place(s, txn, gang)
        assert s.digest() == before
        assert (held is not None) == _brute_force(s, gang)
        if held is not None:
            for one in held:
                s.take(txn, one, 1)
            assert (s.dev_milli >= 0).all()
            assert (s.cpu >= 0).all()
            assert _bonds_hold(s, gang, list(held))


def test_free_totals_are_not_enough_when_no_node_has_room_for_one_member() -> None:
    s = state(*(node(f"n{i}", 0, cpus=6) for i in range(10)))
    with s.txn() as txn:
        assert place(s, txn, shape(*(slot(0, cpus=4) for _ in range(12)))) is None
        assert place(s, txn, shape(*(slot(0, cpus=4) for _ in range(10)))) is not None


def test_pack_fills_the_fuller_node_and_spread_the_emptier() -> None:
    s = state(node("a"), node("b"))
    with s.txn() as txn:
        s.take(txn, Allocation(1, (4,), 0, 0, 0), 1)
        packed = place(s, txn, shape(slot(1)))
        apart = place(s, txn, shape(slot(1)), prefer=spread)
    assert packed is not None
    assert apart is not None
    assert (packed[0].node, apart[0].node) == (1, 0)


def test_a_gang_lies_in_one_rack_when_one_has_room() -> None:
    s = state(node("a", 2, rack="r0"), node("b", 4, rack="r1"), node("c", 4, rack="r1"))
    with s.txn() as txn:
        held = place(s, txn, shape(slot(2), slot(2), slot(2)))
    assert held is not None
    assert {int(s.domain[h.node]) for h in held} == {int(s.domain[1])}


def test_two_shares_kept_apart_by_device_get_two_devices() -> None:
    s = state(node("a", 2))
    with s.txn() as txn:
        one = place(s, txn, shape(slot(0.5), slot(0.5)))
        two = place(s, txn, shape(slot(0.5), slot(0.5), apart=(((0,), (1,), "device"),)))
    assert one is not None
    assert two is not None
    assert len({h.devices for h in one}) == 1
    assert len({h.devices for h in two}) == 2


def test_a_job_goes_where_its_data_was_read_unless_that_takes_it_into_another_rack() -> None:
    s, fifo = state(*(node(f"n{i}", rack=f"r{i // 2}") for i in range(4))), get_profile("fifo")
    for name, gpus in (("fill", 3), ("reader", 2)):
        step(s, JobArrived(ask=ask(name, slot(gpus), data=("imagenet",) if name == "reader" else ())), fifo, 0.0)
    assert s.data == {"n1": ("imagenet",)}
    (other,) = step(s, JobArrived(ask=ask("other", data=("c4",), at=1)), fifo, 1.0)
    assert [s.nodes[h.node].id for h in other.held] == ["n0"], "the fullest node"
    apply(s, JobGone(job=JobId("other")), 2.0)
    (again,) = step(s, JobArrived(ask=ask("again", data=("imagenet",), at=3)), fifo, 3.0)
    assert [s.nodes[h.node].id for h in again.held] == ["n1"] and again.why["nodes_with_data"] == 1
    (gang,) = step(s, JobArrived(ask=ask("gang", slot(4), slot(4), data=("imagenet",), at=4)), fifo, 4.0)
    assert [s.nodes[h.node].id for h in gang.held] == ["n2", "n3"] and gang.why["nodes_with_data"] == 0


def test_a_node_remembers_the_data_sets_used_last_and_keeps_them_when_the_cluster_changes() -> None:
    s, fifo = state(node("n0"), node("n1")), get_profile("fifo")
    for i in range(DATA_MAX + 1):
        step(s, JobArrived(ask=ask(f"j{i}", data=(f"d{i}",), at=i)), fifo, float(i))
        apply(s, JobGone(job=JobId(f"j{i}")), float(i))
    assert s.data["n0"] == tuple(f"d{i}" for i in range(DATA_MAX, 0, -1))
    assert s.with_cluster((node("n0"), node("n2")), ()).data == s.data
