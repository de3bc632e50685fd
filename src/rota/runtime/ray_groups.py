"""Reservations as detached placement groups of Ray: asked for, found again, removed; every method blocks.

A group is named ``<namespace>/<reservation>``, since Ray's table of groups shows no namespaces.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from rota.runtime.engine import HOST_LABEL
from rota.spec.gang import BundleGrant

CPUS_MIN = 0.001
"""Ray takes no empty bundle; one whose instances ask for no core holds this much of one."""
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
