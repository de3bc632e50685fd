"""Machines of an engine: their labels, what each says it has, and claims on them in Ray's own table.

Several installations may share a given engine; each of its machines is used by one of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypedDict

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rota.runtime.clock import SystemClock
from rota.runtime.node import local_node
from rota.runtime.ray.client import MachinesDocument
from rota.runtime.ray.engine import HOST_LABEL
from rota.spec import codec
from rota.spec.codec import JsonObject
from rota.spec.resources import CORES_LABEL

TABLE = "rota machines"
RENEW_S = 20.0
STALE_S = 60.0
"""Age at which a claim is void if its installation has nothing in Ray; clocks differ by less."""
_INVENTORY_S = 30.0
LOOK_S = 2.0
"""How long one look waits for machines that were not heard yet; the next look hears them."""


class NodeRow(TypedDict):
    """What Ray's table says of a node: one row of ``ray.nodes()``."""

    NodeID: str
    Alive: bool
    Labels: dict[str, str]
    Resources: dict[str, float]
    NodeManagerAddress: str
    NodeManagerPort: int


class Machines:
    """What is known of them, kept from look to look.

    ``ask`` gives what a machine has, of its row in Ray's table, or nothing when it does not say; it ends in bounded
    time. A machine is asked by one task at a time, and no more once it has answered.
    """

    def __init__(self, ask: Callable[[NodeRow], Awaitable[JsonObject]]) -> None:
        self._ask = ask
        self._names = dict[str, str]()
        self._asking = dict[str, asyncio.Future[JsonObject]]()
        self._known = dict[str, JsonObject]()
        self._silent = set[str]()
        self._doubled = set[str]()
        self._held = dict[str, tuple[str, str]]()
        """Of those that another installation holds: name, and which installation."""

    async def look(self, rows: Iterable[NodeRow], held: Mapping[str, str]) -> MachinesDocument:
        """``nodes``: what is known by now; ``alive``: the names of all that live, heard or not.

        ``held`` has the machines of other installations, by Ray's ids: to this one they are as if they were not there.
        """
        there = {row["NodeID"]: row for row in rows if row["Alive"]}
        self._held = {one: (there[one]["Labels"].get(HOST_LABEL, ""), held[one]) for one in held if one in there}
        living = {identity: row for identity, row in there.items() if identity not in held}
        self._names = {identity: row["Labels"].get(HOST_LABEL, "") for identity, row in living.items()}
        counts = Counter(name for name in self._names.values() if name)
        self._doubled = {name for name, count in counts.items() if count > 1}
        self._forget(living.keys())
        for identity, row in living.items():
            if counts[self._names[identity]] == 1 and identity not in self._known.keys() | self._asking.keys():
                self._asking[identity] = asyncio.ensure_future(self._ask(row))
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=LOOK_S)
        for identity in [one for one, task in self._asking.items() if task.done()]:
            self._hear(identity, self._asking.pop(identity).result())
        return {"nodes": list(self._known.values()), "alive": sorted(counts)}

    def _hear(self, identity: str, said: JsonObject) -> None:
        if said:
            self._known[identity] = said
            self._silent.discard(identity)
        else:
            self._silent.add(identity)

    def _forget(self, living: Iterable[str]) -> None:
        for identity in (self._known.keys() | self._asking.keys() | self._silent).difference(living):
            self._known.pop(identity, None)
            self._silent.discard(identity)
            if task := self._asking.pop(identity, None):
                task.cancel()

    @property
    def hosts(self) -> list[str]:
        """Names of those that said what they have."""
        return sorted(node["host"] for node in self._known.values())

    @property
    def unusable(self) -> list[str]:
        """Ray's ids of those without a name, with one that was taken, or that did not say what they have."""
        bad = {"", *self._doubled}
        found = {identity for identity, name in self._names.items() if name in bad and identity not in self._known}
        return sorted(found | self._silent | self._held.keys())

    @property
    def text(self) -> str:
        """What to do about machines that cannot be used; empty when there are none."""
        unnamed = sum(not name for name in self._names.values())
        silent = sorted(self._names[identity] for identity in self._silent)
        how = f"start each with: ray start --address=HOST:PORT --labels={HOST_LABEL}=NAME"
        said = [f"{unnamed} machines have no name to place jobs by; {how}"] if unnamed else []
        if self._doubled:
            said.append(f"several machines have the name {', '.join(sorted(self._doubled))}: give each another; {how}")
        for who in sorted({who for _, who in self._held.values()}):
            names = ", ".join(sorted(name for name, other in self._held.values() if other == who))
            said.append(f"{names}: used by the installation {who}; end that one with 'rota down' to use them here")
        if silent:
            said.append(f"{', '.join(silent)} did not say what they have: is Rota installed there? see gateway.log")
        return "; ".join(said)


async def ask_machine(row: NodeRow) -> JsonObject:
    """What a machine has: devices by its own account, cores by Ray's; empty without an answer in time."""
    host: str = row["Labels"][HOST_LABEL]
    here = NodeAffinitySchedulingStrategy(row["NodeID"], soft=False)
    asked = _inventory_of.options(scheduling_strategy=here).remote(host, row["Resources"].get("CPU", 0.0))
    try:
        return await asyncio.wait_for(asked, _INVENTORY_S)
    except (TimeoutError, RayError) as error:
        print(f"{host} does not say what it has: {type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        await asyncio.to_thread(ray.cancel, asked, force=True)  # it is asked anew: none may pile up there
        return {}


@ray.remote(num_cpus=0, max_retries=0)
def _inventory_of(host: str, cpus: float) -> JsonObject:
    """What the machine has that this runs on, under the name it carries."""
    node = local_node(host)
    labels = tuple(pair for pair in node.labels if pair[0] != CORES_LABEL)  # Ray's number is not shared in time
    return codec.to_json_value(replace(node, cpus=cpus, labels=labels))


def hosts() -> tuple[str, ...]:
    """Labels of the nodes that the engine has now, sorted."""
    nodes: list[NodeRow] = ray.nodes()
    return tuple(sorted(node["Labels"].get(HOST_LABEL, "") for node in nodes if node["Alive"]))


class Claim(TypedDict):
    """Who uses a machine: the namespace of an installation, where that is, wall time of the last renewal."""

    namespace: str
    holder: str
    at: float


def claim(machines: Iterable[str], namespace: str, holder: str) -> dict[str, str]:
    """Claim machines (Ray's ids) for the installation of a namespace, or renew the claims; blocks.

    Returns those that another installation holds, with who it is. Of two that find a machine free at once, Ray lets one
    have it; of two that find a void claim, the later one has it, and the other learns it when it renews its own.
    """
    now, held = SystemClock().wall_s(), dict[str, str]()
    mine = json.dumps(Claim(namespace=namespace, holder=holder, at=now))
    for machine in machines:
        known = _internal_kv_get(machine, namespace=TABLE)
        if known is None and not _internal_kv_put(machine, mine, overwrite=False, namespace=TABLE):
            continue
        found: Claim = json.loads(known or _internal_kv_get(machine, namespace=TABLE) or mine)
        own = found["namespace"] == namespace
        if not own and not _is_void(found, now):
            held[machine] = found["holder"]
        elif not own or now - found["at"] > RENEW_S:
            _internal_kv_put(machine, mine, namespace=TABLE)
    return held


def let_go(namespace: str) -> None:
    """Give back every machine of the installation of a namespace; blocks."""
    for machine in _internal_kv_list("", namespace=TABLE):
        found = json.loads(_internal_kv_get(machine, namespace=TABLE) or "{}")
        if found.get("namespace") == namespace:
            _internal_kv_del(machine, namespace=TABLE)


def _is_void(found: Claim, now: float) -> bool:
    if now - found["at"] < STALE_S:
        return False
    rows: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return found["namespace"] not in {row["namespace"] for row in rows}
