"""Machines of an engine: their labels, what each says it has, and claims on them in Ray's own table.

Several installations may share a given engine; each of its machines is used by one of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypedDict

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rota.runtime.clock import SystemClock
from rota.runtime.job_files import FILES_LABEL, OWN_FILES, sees
from rota.runtime.node import host_name, local_node, machine_identity
from rota.runtime.ray.client import MachinesDocument, UnusableMachine
from rota.runtime.ray.engine import HOST_LABEL, NODE_ID_LABEL
from rota.runtime.topology import IDENTITY
from rota.runtime.usage import machine_usage
from rota.spec import codec
from rota.spec.codec import JsonObject
from rota.spec.measured import MachineUsage
from rota.spec.resources import CORES_LABEL

TABLE = "rota machines"
RENEW_S = 20.0
STALE_S = 60.0
"""Age at which a claim is void if its installation has nothing in Ray; clocks differ by less."""
_INVENTORY_S, _USAGE_S = 30.0, 20.0
LOOK_S = 2.0
"""How long one look waits for machines that were not heard yet; the next look hears them."""


class RayNode(TypedDict):
    """A node in Ray's table: one row of ``ray.nodes()``."""

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

    def __init__(self, ask: Callable[[RayNode], Awaitable[JsonObject]]) -> None:
        self._ask = ask
        self._names = dict[str, str]()
        self._asking = dict[str, asyncio.Future[JsonObject]]()
        self._known = dict[str, JsonObject]()
        self._silent = set[str]()
        self._doubled = set[str]()
        self._hosts = dict[str, str]()
        self._twins = list[str]()
        """Second raylets of one machine, without a name of their own."""
        self._held = dict[str, tuple[str, str]]()
        """Of those that another installation holds: name, and which installation."""

    async def look(self, rows: Iterable[RayNode], held: Mapping[str, str]) -> MachinesDocument:
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
            # A label that two have pins to both: an instance might come up on the wrong one.
            ambiguous = counts[self._names[identity]] > 1
            if not ambiguous and identity not in self._known.keys() | self._asking.keys():
                self._asking[identity] = asyncio.ensure_future(self._ask(row))
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=LOOK_S)
        for identity in [one for one, task in self._asking.items() if task.done()]:
            self._hear(identity, self._asking.pop(identity).result())
        nodes = named_apart(self._known, taken=counts, before={host: name for name, host in self._hosts.items()})
        self._hosts = {node["id"]: node["host"] for node in nodes.values()}
        self._twins = sorted(self._known.keys() - nodes.keys())
        alive = [*counts, *(pin_of(one) for one, name in self._names.items() if not name)]
        alive += [node["id"] for one, node in nodes.items() if not self._names[one]]
        return {"nodes": list(nodes.values()), "alive": sorted(alive), "unusable": self.problems}

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

    def name_of(self, identity: str) -> str:
        """Name of a machine by Ray's id; empty for one that was not heard."""
        pins = {host: name for name, host in self._hosts.items()}
        return pins.get(pin_of(identity), "") or str(self._known.get(identity, {}).get("id", ""))

    def host_of(self, name: str) -> str:
        """Host of a node of the installation, see ``host_selector``."""
        return self._hosts.get(name, name)

    @property
    def hosts(self) -> list[str]:
        """Names of those that said what they have."""
        return sorted(node["host"] for node in self._known.values())

    @property
    def unusable(self) -> list[str]:
        """Ray's ids of those whose name was taken, or that did not say what they have."""
        found = {one for one, name in self._names.items() if name in self._doubled and one not in self._known}
        return sorted(found | self._silent | self._held.keys() | {*self._twins})

    @property
    def text(self) -> str:
        """What to do about machines that cannot be used; empty when there are none."""
        return "; ".join(f"{one['machine']}: {one['why']}: {one['remedy']}" for one in self.problems)

    @property
    def problems(self) -> list[UnusableMachine]:
        """The machines that cannot be used: what is missing, and the command that repairs it."""
        found: list[UnusableMachine] = []
        start = f"ray start --address=HOST:PORT --labels={HOST_LABEL}=NAME"
        for name in sorted(self._doubled):
            why = f"several machines have the name {name}"
            found.append({"machine": name, "why": why, "remedy": f"give each another: {start}"})
        for name, who in sorted(self._held.values()):
            why = f"used by the installation {who}"
            found.append({"machine": name or "a machine", "why": why, "remedy": "end that one with 'rota down'"})
        for one in sorted(self._silent):
            why = "it did not say what it has"
            remedy = "install Rota there in the version of the service: pip install rota; see gateway.log"
            found.append({"machine": self._names.get(one) or pin_of(one), "why": why, "remedy": remedy})
        for one in self._twins:
            why = "a second Ray node runs on that machine"
            found.append({"machine": self._known[one]["id"], "why": why, "remedy": "end it there: ray stop"})
        return found


def pin_of(identity: str) -> str:
    """Host of a machine without a name in Ray's table, of the id that Ray gave it: see ``host_selector``."""
    return f"{NODE_ID_LABEL}={identity}"


def named_apart(
    known: Mapping[str, JsonObject], *, taken: Container[str], before: Mapping[str, str]
) -> dict[str, JsonObject]:
    """Machines by Ray's ids, each with a name of its own; ``before`` has the names of the last look, by host.

    Of those with a host name alone (their ``host`` is Ray's id), two of one name on two machines get four digits of
    their identity behind it; of two on one machine the second is left out, for both would offer the same cores. Who
    has a name keeps it, whoever comes or goes: under another one it would be another node, beside the one on which
    jobs run.
    """
    found = dict[str, JsonObject]()
    seen = set[tuple[str, str]]()
    for one, node in known.items():
        if node["host"] != pin_of(one):
            found[one] = node
            continue
        machine = (node["id"], dict(node.get("labels", ())).get(IDENTITY, ""))
        if machine in seen:
            continue
        seen.add(machine)
        identities = {dict(n.get("labels", ())).get(IDENTITY, "") for n in known.values() if n["id"] == node["id"]}
        apart = len(identities) > 1 or node["id"] in taken
        name = f"{node['id']}-{machine[1][:4]}" if apart else node["id"]
        kept = before.get(node["host"], "")
        found[one] = {**node, "id": kept if kept and kept not in taken else name}
    return found


async def ask_machine(row: RayNode, *, home: str, installation: str) -> JsonObject:
    """What a machine has: devices by its own account, cores by Ray's; empty without an answer in time.

    ``home`` of ``installation`` is that of the service: a machine that does not see it is labelled so.
    """
    name = row["Labels"].get(HOST_LABEL, "")
    labels = {key: value for key, value in row["Labels"].items() if key not in (HOST_LABEL, NODE_ID_LABEL)}
    pin, cpus = name or pin_of(row["NodeID"]), row["Resources"].get("CPU", 0.0)
    place = (home, installation)
    try:
        return await ask_node(row["NodeID"], _INVENTORY_S, _inventory_of, name, pin, cpus, labels, place)
    except (TimeoutError, RayError) as error:
        print(f"{pin} does not say what it has: {type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the log
        return {}


async def ask_node(node_id: str, limit_s: float, task: Any, *args: object) -> Any:
    """What a task of Ray gives on a node, by Ray's id of it.

    Raises TimeoutError, or Ray's error; the task is then cancelled: it is asked anew, and none may pile up there.
    """
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    asked = task.options(scheduling_strategy=here).remote(*args)
    try:
        async with asyncio.timeout(limit_s):
            return await asked
    except (TimeoutError, RayError):
        await asyncio.to_thread(ray.cancel, asked, force=True)
        raise


async def usage_of(node_id: str) -> MachineUsage:
    """Usage of a machine, by Ray's id of it. Raises ValueError without an answer in time."""
    try:
        return await ask_node(node_id, _USAGE_S, _usage)
    except (TimeoutError, RayError) as error:
        raise ValueError(f"it does not say what it does: {type(error).__name__}: {error}") from error


@ray.remote(num_cpus=0, max_retries=0)
def _usage() -> MachineUsage:
    return machine_usage()


@ray.remote(num_cpus=0, max_retries=0)
def _inventory_of(name: str, host: str, cpus: float, labels: Mapping[str, str], service: tuple[str, str]) -> JsonObject:
    """What the machine has that this runs on, under the name it carries, or its host name.

    ``service``: home of the service, and id of its installation.
    """
    node = local_node(name or host_name())
    own = tuple(pair for pair in node.labels if pair[0] != CORES_LABEL)  # Ray's number is not shared in time
    files = () if sees(*service) else ((FILES_LABEL, OWN_FILES),)
    found = (*own, *sorted(labels.items()), (IDENTITY, machine_identity()), *files)
    return codec.to_json_value(replace(node, host=host, cpus=cpus, labels=found))


def hosts() -> tuple[str, ...]:
    """Hosts of the nodes that the engine has now, sorted: their names, or what ``pin_of`` gives."""
    nodes: list[RayNode] = ray.nodes()
    return tuple(sorted(node["Labels"].get(HOST_LABEL) or pin_of(node["NodeID"]) for node in nodes if node["Alive"]))


def own_host(name: str) -> str:
    """Host of the machine that this process runs on, which is the node ``name`` of the installation."""
    context = ray.get_runtime_context()
    return name if HOST_LABEL in context.get_node_labels() else pin_of(context.get_node_id())


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
    """Release every machine of the installation of a namespace; blocks."""
    for machine in _internal_kv_list("", namespace=TABLE):
        found = json.loads(_internal_kv_get(machine, namespace=TABLE) or "{}")
        if found.get("namespace") == namespace:
            _internal_kv_del(machine, namespace=TABLE)


def _is_void(found: Claim, now: float) -> bool:
    if now - found["at"] < STALE_S:
        return False
    rows: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return found["namespace"] not in {row["namespace"] for row in rows}
