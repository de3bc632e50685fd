"""The protocol alone: no order of calls breaks an invariant, and every small interleaving with crashes is clean."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.proof.tensor_protocol import ProtocolMachine
from tests.tensors.core.calls import Driver, broken_rules, call

from rota.tensors.registry import Registry, ScriptRefused, VersionRequest

DEEP = os.environ.get("ROTA_DEEP") == "1"
Step = Callable[[Registry], object]


def ask(name: str = "w", **how: Any) -> VersionRequest:
    plain = {"kind": "t", "epoch": 0, "step": None, "label": "", "block": 1024, "count": 2, "file": 2048}
    return VersionRequest(name=name, payload=10, desc="", **{**plain, **how})  # type: ignore[arg-type]


def publish(registry: Registry, client: str = "w1", request: str = "r", **how: Any) -> int:
    version = registry.reserve(client, f"{request}{how}", ask(**how)).version
    registry.commit(client, version)
    return version


@pytest.fixture
def registry() -> Registry:
    made = Registry(ProtocolMachine())
    for client in ("w1", "w2", "r1", "r2"):
        made.join(client, "")
    return made


@given(st.lists(call, max_size=40))
def test_no_sequence_of_calls_breaks_an_invariant(calls: list[tuple[object, ...]]) -> None:
    machine = ProtocolMachine()
    driver = Driver(Registry(machine))
    order: dict[str, tuple[int, int, int]] = {}
    for each in calls:
        driver.make(each)
        assert broken_rules(machine) == [], each
        for name, entry in machine.names.items():
            now = (entry.e, entry.s, entry.v)
            if entry.v and each[0] != "delete":
                assert now >= order.get(name, now), f"I3: {name} went back from {order[name]} to {now}"
            order[name] = now
        order = {name: seen for name, seen in order.items() if name in machine.names and machine.names[name].v}


@given(st.lists(call, max_size=40))
def test_when_all_clients_are_swept_and_all_names_deleted_no_block_is_in_use(calls: list[tuple[object, ...]]) -> None:
    machine = ProtocolMachine()
    driver = Driver(Registry(machine))
    for each in calls:
        driver.make(each)
    for client in list(machine.clients):
        for name, _, base in driver.registry.claims(client)[0]:
            driver.registry.settle(name, base, 0, 0, 0, 0, "")
        spare = [(each, each, 0, 0, "") for each, *_ in driver.registry.claims(client)[1]]
        driver.registry.stock(client, (0, 0, 0), 0, spare)
    for name in list(machine.names):
        driver.make(("delete", name, 0, False, "", 0))
    for client in list(machine.clients):
        while driver.registry.sweep(client).left:
            pass
    driver.registry.reap(list(machine.limbo))
    assert (machine.versions, machine.names, machine.clients) == ({}, {}, {})
    assert all(segment.used == 0 for segment in machine.segments.values())


def writer(client: str) -> list[Step]:
    version: dict[int, int] = {}

    def reserve(registry: Registry) -> None:
        version[id(registry)] = registry.reserve(client, "r", ask()).version

    def commit(registry: Registry) -> None:
        machine: Any = registry.machine
        own = machine.clients[client].own
        for v in list(own):
            registry.commit(client, v)

    return [reserve, commit]


def reader(client: str) -> list[Step]:
    def get(registry: Registry) -> None:
        registry.get(client, 1, [("w", "")])

    def release(registry: Registry) -> None:
        machine: Any = registry.machine
        leases = machine.clients[client].leases
        registry.release(client, list(leases.items()))

    return [get, release]


def interleavings(lengths: list[int]) -> Iterator[tuple[int, ...]]:
    letters = [actor for actor, length in enumerate(lengths) for _ in range(length)]
    yield from sorted(set(itertools.permutations(letters)))


@pytest.mark.slow
def test_every_interleaving_of_two_writers_and_two_readers_with_a_crash_is_clean() -> None:
    """Each actor may be killed before any of its steps; then its client is swept. All orders are tried."""
    actors = [("w1", writer("w1")), ("w2", writer("w2")), ("r1", reader("r1")), ("r2", reader("r2"))]
    tried, every = 0, list(interleavings([2, 2, 2, 2]))
    orders = every if DEEP else every[:: len(every) // 250]
    for order in orders:
        for crash in range(len(order) + 1):
            machine = ProtocolMachine()
            registry = Registry(machine)
            registry.join("w0", "")
            publish(registry, "w0")
            for client, _ in actors:
                registry.join(client, "")
            done, dead, newest = [0] * 4, -1, machine.names["w"].v
            for at, actor in enumerate(order):
                client, steps = actors[actor]
                if at == crash:
                    registry.sweep(client)
                    dead = actor
                if actor != dead:
                    try:
                        steps[done[actor]](registry)
                    except ScriptRefused as refused:
                        assert refused.code in ("LOST", "STALE")
                    done[actor] += 1
                assert broken_rules(machine) == []
                assert machine.names["w"].v >= newest
                newest = machine.names["w"].v
            for client in list(machine.clients):
                registry.sweep(client)
            assert [version.st for version in machine.versions.values()] == ["r"]
            tried += 1
    assert (len(every), tried) == (2520, 9 * len(orders))


def broken(machine: ProtocolMachine, **methods: Callable[..., object]) -> ProtocolMachine:
    return type("Broken", (ProtocolMachine,), methods)()


@pytest.mark.breaks_state
@pytest.mark.parametrize("bug", ["release without seq", "commit without order", "block not recorded"])
def test_a_planted_bug_is_found(bug: str) -> None:
    def release(self: ProtocolMachine, client: str, *leases: int) -> int:
        for v in leases[::2]:
            if v in self.clients[client].leases:
                self._unlease(self.clients[client], v)
        return 0

    def refusal(self: ProtocolMachine, *args: object) -> None:
        return None

    def undo(self: ProtocolMachine, v: int) -> None:
        version = self.versions.pop(v)  # forgets to give the block back
        self.clients[version.owner].own.pop(v, None)
        self.names[version.name].pend -= 1
        self._forget_if_empty(version.name)

    planted = {
        "release without seq": {"_release": release},
        "commit without order": {"_refusal": refusal},
        "block not recorded": {"_undo": undo},
    }[bug]
    machine = broken(ProtocolMachine(), **planted)
    registry = Registry(machine)
    registry.join("w1", "")
    registry.join("r1", "")
    publish(registry, "w1", step=5)
    found: list[str] = []
    if bug == "release without seq":
        old = registry.get("r1", 1, [("w", "")])[0].version
        registry.get("r1", 2, [("w", "")])
        registry.release("r1", [(old, 1)])  # the release of the first get comes late
        found = [] if "r1" in machine.clients and old in machine.clients["r1"].leases else ["a newer lease was taken"]
    elif bug == "commit without order":
        slow = registry.reserve("w1", "slow", ask(step=6)).version
        publish(registry, "w1", request="fast", step=7)
        registry.commit("w1", slow)
        found = ["went back"] if machine.names["w"].s < 7 else []
    else:
        registry.abort("w1", registry.reserve("w1", "x", ask(step=6)).version)
        found = broken_rules(machine)
    assert found


def test_a_repeated_call_changes_nothing(registry: Registry) -> None:
    machine = registry.machine
    assert isinstance(machine, ProtocolMachine)
    first = registry.reserve("w1", "req", ask())
    assert registry.reserve("w1", "req", ask()) == first
    done = registry.commit("w1", first.version)
    before = copy.deepcopy(machine.__dict__)
    assert registry.commit("w1", first.version).current == done.current
    lease = registry.get("r1", 1, [("w", "")])[0]
    once = copy.deepcopy(machine.versions)
    registry.get("r1", 1, [("w", "")])
    assert machine.versions == once
    assert registry.release("r1", [(lease.version, 1)]) == 1
    assert registry.release("r1", [(lease.version, 1)]) == 0
    assert machine.versions == before["versions"]


def test_a_block_is_not_used_again_while_a_doomed_version_is_leased(registry: Registry) -> None:
    publish(registry, step=1)
    lease = registry.get("r1", 1, [("w", "")])[0]
    publish(registry, step=2)
    third = registry.reserve("w1", "x", ask(step=3))
    assert (third.seg, third.offset) != (lease.blocks[0].seg, lease.blocks[0].offset)
    registry.release("r1", [(lease.version, 1)])
    fourth = registry.reserve("w1", "y", ask(step=3))
    assert (fourth.seg, fourth.offset) == (lease.blocks[0].seg, lease.blocks[0].offset)
