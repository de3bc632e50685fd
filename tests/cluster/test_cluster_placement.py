"""A gang is placed exactly when a brute force over all placements finds one."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from cluster_makers import ask, node, shape, slot, state
from hypothesis import given
from hypothesis import strategies as st

from rota.cluster.core.capacity import forest_of
from rota.cluster.core.cycle import step
from rota.cluster.core.events import JobArrived, JobGone, JobHolds, apply
from rota.cluster.core.jobs import Allocation, Shape, Slot
from rota.cluster.core.placement import place, spread
from rota.cluster.core.state import DATA_MAX, State
from rota.cluster.policies import get_profile
from rota.spec.gang import CellLevel
from rota.spec.ids import JobId
from rota.spec.resources import SOCKETS_LABEL, Node

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


# -- sockets --


def sockets(name: str, gpus: int = 8) -> Node:
    """A node whose devices are on two sockets, half on each."""
    return replace(node(name, gpus), labels=((SOCKETS_LABEL, "2"),))


def placed(s: State, gang: Shape) -> list[tuple[int, ...]] | None:
    with s.txn() as txn:
        found = place(s, txn, gang)
    return None if found is None else [held.devices for held in found]


def take(s: State, *devices: int) -> None:
    """These devices of the only node are those of a job."""
    job = ask(f"has{devices}", *(slot(1) for _ in devices))
    apply(s, JobArrived(ask=job), 0.0)
    apply(s, JobHolds(job=job.id, held=tuple(Allocation(0, (device,), 0, 0, 0) for device in devices)), 0.0)


def test_devices_of_a_slot_are_on_the_fullest_socket_that_has_them_or_on_both() -> None:
    s = state(sockets("a"))
    take(s, 0)
    assert placed(s, shape(slot(3))) == [(1, 2, 3)]
    assert placed(s, shape(slot(4))) == [(4, 5, 6, 7)]
    assert placed(s, shape(slot(5))) == [(1, 2, 3, 4, 5)]
    take(s, 1, 4)
    assert placed(s, shape(slot(3))) == [(5, 6, 7)]
    assert placed(s, shape(slot(6))) is None


def test_slots_that_belong_on_one_socket_are_there_or_nowhere() -> None:
    s = state(sockets("a"))
    take(s, 0)
    pair = (((0, 1), "socket"),)
    assert placed(s, shape(slot(2), slot(2), together=pair)) == [(4, 5), (6, 7)]
    assert placed(s, shape(slot(3), slot(2), together=pair)) is None
    assert placed(s, shape(slot(5), slot(1), together=pair)) is None
    assert placed(s, shape(slot(5), together=(((0,), "socket"),))) is None, "a slot on both is on none"
    assert placed(s, shape(slot(2), slot(0), together=pair)) is not None, "a slot without devices has no socket"


def test_slots_that_belong_on_different_sockets_are_apart_or_nowhere() -> None:
    s = state(sockets("a"))
    parted = (((0,), (1,), "socket"),)
    found = placed(s, shape(slot(1), slot(2), apart=parted))
    assert found is not None and {device // 4 for device in found[0]}.isdisjoint(device // 4 for device in found[1])
    assert placed(s, shape(slot(5), slot(1), apart=parted)) is None
    assert placed(s, shape(slot(4), slot(4), apart=parted)) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_a_node_with_sockets_is_a_cell_of_them_unless_its_devices_cannot_be_halved() -> None:
    (even,), (odd,) = forest_of([sockets("a", 4)]), forest_of([sockets("b", 3)])
    assert [(one.kind, one.address, [leaf.address for leaf in one.children]) for one in even.children] == [
        ("socket", "0", ["0", "1"]),
        ("socket", "1", ["2", "3"]),
    ]
    assert [one.kind for one in odd.children] == ["A"] * 3


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([slot(n) for n in (0, 0.5, 1, 2, 3)]), min_size=2, max_size=4),
    st.sampled_from(["device", "socket", "node"]),
    st.lists(st.integers(0, 3), max_size=3, unique=True),
)
def test_slots_that_belong_together_fit_exactly_when_brute_force_over_devices_says_so(
    slots: list[Slot], level: CellLevel, taken: list[int]
) -> None:
    s = state(sockets("a", 4), node("b", 2))
    if taken:
        take(s, *taken)
    gang = shape(*slots, together=((tuple(range(len(slots))), level),))
    found = placed(s, gang)
    assert (found is not None) == _somewhere(s, gang, level)


def _somewhere(s: State, gang: Shape, level: CellLevel) -> bool:
    """Whether some choice of devices, out of all, puts every slot into one cell of the level."""
    cells = {"device": lambda d: d, "socket": lambda d: int(s.dev_socket[d]), "node": lambda d: int(s.dev_node[d])}
    for row in range(len(s.nodes)):
        mine = [d for d in range(len(s.dev_milli)) if s.dev_node[d] == row]
        choices = [list(combinations(mine, one.gpus or (1 if one.milli else 0))) for one in gang.slots]
        for chosen in product(*choices):
            left = {d: int(s.dev_milli[d]) for d in mine}
            for one, devices in zip(gang.slots, chosen):
                for d in devices:
                    left[d] -= one.milli or 1000
            inside = [{cells[level](d) for d in devices} for devices in chosen if devices]
            close = all(one == inside[0] for one in inside) and (level != "socket" or all(len(i) == 1 for i in inside))
            if min(left.values()) >= 0 and close:
                return True
    return False


# -- which cell, which nodes --


def test_a_gang_of_unequal_slots_lies_in_one_rack_although_the_gaps_elsewhere_are_smaller() -> None:
    s = state(node("a", 2, rack="r0"), node("b", 2, rack="r0"), node("c", 1, rack="r1"))
    gang = shape(slot(2), slot(1))
    with s.txn() as txn:
        close, anywhere = place(s, txn, gang), place(s, txn, gang, close=False)
    assert close is not None and {int(s.domain[held.node]) for held in close} == {int(s.domain[0])}
    assert anywhere is not None and [held.node for held in anywhere][1] == 2


def test_devices_of_nodes_that_are_not_allowed_do_not_count_for_the_size_of_a_rack() -> None:
    """The first rack has four that may be used, the second five; all six of the first would be more."""
    sizes = (("a", 2, "r0"), ("b", 2, "r0"), ("c", 2, "r0"), ("d", 2, "r1"), ("e", 3, "r1"))
    s = state(*(node(name, count, rack=rack) for name, count, rack in sizes))
    with s.txn() as txn:
        found = place(s, txn, shape(slot(2), slot(2)), allowed=np.array([True, False, True, True, True]))
    assert found is not None and [held.node for held in found] == [0, 2]


def test_what_a_tied_group_holds_is_divided_and_a_share_beside_it_keeps_its_device() -> None:
    gang = replace(shape(slot(1), slot(2), slot(0.5)), tied=((0, 1),))
    with (s := state(node("a", 4))).txn() as txn:
        found = place(s, txn, gang)
    assert found is not None
    assert [(len(held.devices), held.milli) for held in found] == [(1, 0), (2, 0), (1, 500)]
    assert len({device for held in found for device in held.devices}) == 4
