"""Reservations as detached placement groups of Ray, and claims on machines in Ray's own table; every function blocks.

A group is named ``<namespace>/<reservation>``, since Ray's table of groups shows no namespaces.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from rota.runtime.clock import SystemClock
from rota.runtime.ray.engine import HOST_LABEL
from rota.spec.gang import BundleGrant

CPUS_MIN = 0.001
"""Ray takes no empty bundle; one whose instances ask for no core holds this much of one."""
TABLE = "rota machines"
RENEW_S = 20.0
STALE_S = 60.0
"""A claim that was not renewed for so long is void if its installation has nothing in Ray; clocks differ by less."""
_RELEASE_S = 10.0
_POLL_S = 0.05


def hosts() -> tuple[str, ...]:
    """Labels of the nodes that the engine has now, sorted."""
    nodes: list[dict[str, Any]] = ray.nodes()
    return tuple(sorted(node["Labels"].get(HOST_LABEL, "") for node in nodes if node["Alive"]))


class RayGroups:
    """The placement groups of one namespace; remembers those it asked for or found."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._known = dict[str, PlacementGroup]()

    def ask(self, name: str, bundles: Sequence[BundleGrant], timeout_s: float) -> bool:
        """Ask for a group unless it exists, and wait; False when it is not granted in time (it stays asked for).

        The label of its host pins each bundle; Ray decides nothing.
        """
        group = self._look_up(name) or placement_group(
            [{"CPU": max(bundle.res.cpus, CPUS_MIN)} for bundle in bundles],
            strategy="PACK",
            name=f"{self._namespace}/{name}",
            lifetime="detached",
            bundle_label_selector=[{HOST_LABEL: bundle.host} for bundle in bundles],
        )
        granted = group.wait(timeout_s)
        if granted:
            self._known[name] = group
        return granted

    def find(self, name: str) -> PlacementGroup | None:
        """A group by name, from memory if known: a start must not read the table of the whole engine."""
        if name not in self._known and (found := self._look_up(name)) is not None:
            self._known[name] = found
        return self._known.get(name)

    def stands(self, name: str, bundle: int) -> bool:
        """False when the node of a bundle is gone: Ray looks for another one, which the label of the host forbids."""
        group = self.find(name)
        table: dict[str, Any] = placement_group_table(group) if group else {}
        return table.get("state") != "RESCHEDULING" or bool(table["bundles_to_node_id"].get(bundle))

    def names(self, prefix: str) -> tuple[str, ...]:
        """Names with the prefix of all groups that are not removed, granted or not, sorted."""
        return tuple(sorted(self._table(prefix)))

    def release(self, name: str) -> None:
        """Remove a group; harmless if there is none. Raises TimeoutError when Ray does not do it within 10 s."""
        self._known.pop(name, None)
        deadline = time.monotonic() + _RELEASE_S
        if (group := self._look_up(name)) is None:
            return
        remove_placement_group(group)
        while self._look_up(name) is not None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} is still reserved {_RELEASE_S:g} s after its release")
            time.sleep(_POLL_S)

    def _look_up(self, name: str) -> PlacementGroup | None:
        return self._table(name).get(name)

    def _table(self, prefix: str) -> dict[str, PlacementGroup]:
        start = f"{self._namespace}/{prefix}"
        table: dict[str, dict[str, Any]] = placement_group_table()
        return {
            row["name"].removeprefix(f"{self._namespace}/"): PlacementGroup(
                ray.PlacementGroupID.from_hex(row["placement_group_id"])
            )
            for row in table.values()
            if row["name"].startswith(start) and row["state"] != "REMOVED"
        }


def claim(machines: Iterable[str], namespace: str, holder: str) -> dict[str, str]:
    """Claim machines (Ray's ids) for the installation of a namespace, or renew the claims; blocks.

    Returns those that another installation holds, with who it is. Of two that find a machine free at once, Ray lets one
    have it; of two that find a void claim, the later one has it, and the other learns it when it renews its own.
    """
    now, held = SystemClock().wall_s(), dict[str, str]()
    mine = json.dumps({"namespace": namespace, "holder": holder, "at": now})
    for machine in machines:
        known = _internal_kv_get(machine, namespace=TABLE)
        if known is None and not _internal_kv_put(machine, mine, overwrite=False, namespace=TABLE):
            continue
        found = json.loads(known or _internal_kv_get(machine, namespace=TABLE) or mine)
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


def _is_void(found: dict[str, Any], now: float) -> bool:
    if now - found["at"] < STALE_S:
        return False
    rows: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return found["namespace"] not in {row["namespace"] for row in rows}
