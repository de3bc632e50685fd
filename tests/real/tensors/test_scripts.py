"""The Lua scripts on a real server answer, and leave, exactly what tests/proof/tensor_protocol.py does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.proof.tensor_protocol import ProtocolMachine
from tests.tensors.core.calls import Driver, call

from rota.runtime import environ
from rota.runtime.clock import SystemClock
from rota.runtime.redis import server as redis_server
from rota.tensors.core import SLOTS_MAX
from rota.tensors.inspect import check
from rota.tensors.registry import RedisMachine, Registry, ScriptRefused

EXAMPLES = 5000 if os.environ.get("ROTA_DEEP") == "1" else 40


@pytest.fixture(scope="module")
def machine(tensor_home: Path) -> Iterator[RedisMachine]:
    home = environ.Home.of(tensor_home)
    with redis_server.registry_lock(home):
        server = redis_server.find_or_start(home, keep=True)
    made = RedisMachine(server.address, "scripts", SystemClock())
    yield made
    made.wipe()
    made.client.close()


def content_of_machine(machine: ProtocolMachine) -> dict[str, Any]:
    return {
        "versions": {
            v: (x.name, x.st, x.refs, x.owner, x.e, x.s, x.seg, x.off, sorted(x.parts), x.head)
            for v, x in machine.versions.items()
        },
        "names": {n: (x.slot, x.kind, x.v, x.e, x.s, x.hist, x.pend) for n, x in machine.names.items()},
        "free": {blk: blocks for blk, blocks in machine.free.items() if blocks},
        "segments": {seg: (x.blk, x.count, x.next, x.used) for seg, x in machine.segments.items()},
        "leases": {c: x.leases for c, x in machine.clients.items() if x.leases},
        "own": {c: x.own for c, x in machine.clients.items() if x.own},
        "drops": {c: x.drops for c, x in machine.clients.items() if x.drops},
        "stock": {c: set(x.stock) for c, x in machine.clients.items() if x.stock},
        "claims": {c: x.claims for c, x in machine.clients.items() if x.claims},
        "claimed": {n: (x.claim, x.by) for n, x in machine.names.items() if x.claim},
        "claimants": {c for c, x in machine.clients.items() if x.claims},
        "clients": set(machine.clients),
        "limbo": machine.limbo,
    }


def content_of_dump(dump: dict[str, Any]) -> dict[str, Any]:
    def under(prefix: str, suffix: str = "") -> dict[str, Any]:
        keys = [k for k in dump if k.startswith(prefix) and k.endswith(suffix)]
        return {k[len(prefix) : len(k) - len(suffix)]: dump[k] for k in keys}

    def ids(text: str) -> list[int]:
        return [int(word) for word in text.split()]

    return {
        "versions": {
            int(v): (
                x["name"], x["st"], int(x["refs"]), x["owner"], int(x["e"]), int(x["s"]), x["seg"], int(x["off"]),
                sorted(ids(x.get("parts", ""))), int(x.get("head", 0)),
            )
            for v, x in under("v:").items()
        },
        "names": {
            n: (int(x["slot"]), x["kind"], int(x["v"]), int(x["e"]), int(x["s"]), ids(x["hist"]), int(x["pend"]))
            for n, x in under("n:").items()
        },
        "free": {
            int(blk): [(item.split()[0], int(item.split()[1])) for item in items]
            for blk, items in under("free:").items()
        },
        "segments": {
            seg: (int(x["blk"]), int(x["count"]), int(x["next"]), int(x["used"])) for seg, x in under("s:").items()
        },
        "leases": {c: {int(v): int(seq) for v, seq in x.items()} for c, x in under("c:", ":l").items()},
        "own": {c: {int(v): request for v, request in x.items()} for c, x in under("c:", ":o").items()},
        "drops": {c: {int(v): name for v, name in x.items()} for c, x in under("c:", ":d").items()},
        "stock": {c: set(map(int, x)) for c, x in under("c:", ":b").items()},
        "claims": {c: {n: int(base) for n, base in x.items()} for c, x in under("c:", ":n").items()},
        "claimed": {n: (int(x["claim"]), x["by"]) for n, x in under("n:").items() if "claim" in x},
        "claimants": set(dump.get("claimants", ())),
        "clients": set(dump.get("clients", ())),
        "limbo": {int(v) for v in dump.get("limbo", ())},
    }  # fmt: skip


def open_empty(machine: RedisMachine) -> None:
    """A namespace with nothing in it, at epoch 1."""
    machine.wipe()
    machine.epoch = 1
    machine.client.call("HSET", f"{machine.prefix}cfg", "filling", "now")
    machine.run("begin", 1, SLOTS_MAX, 0, 0, "", "now")


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(call, min_size=5, max_size=40))
def test_scripts_and_machine_agree_on_every_reply_and_on_what_is_left(
    machine: RedisMachine, calls: list[tuple[Any, ...]]
) -> None:
    open_empty(machine)
    real, model = Registry(machine), ProtocolMachine()
    beside, alone = Driver(real), Driver(Registry(model))
    for each in calls:
        if each[0] == "hold" and each[1] not in model.clients:
            continue
        assert beside.make(each) == alone.make(each), each
    dump = real.dump()
    assert content_of_dump(dump) == content_of_machine(model)
    assert check(dump) == []


def test_nothing_gets_into_a_registry_while_it_is_wiped(machine: RedisMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a block that a sweep gave back just then stays free in the registry that is built up from the files."""
    open_empty(machine)
    registry, real, refused = Registry(machine), machine.client.call, list[str]()
    registry.join("a", "{}")

    def call(*words: Any) -> Any:
        answer = real(*words)
        if words[0] == "SCAN":
            try:
                registry.join("b", "{}")
            except ScriptRefused as error:
                refused.append(error.code)
        return answer

    monkeypatch.setattr(machine.client, "call", call)
    machine.wipe()
    monkeypatch.undo()
    assert set(refused) == {"EPOCH"}
    assert not any(registry.dump().values())
