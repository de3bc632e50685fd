"""Which installation uses which machine of an engine that several share: a claim on each, in Ray's own table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from rota.runtime.clock import SystemClock

TABLE = "rota machines"
RENEW_S = 20.0
STALE_S = 60.0
"""A claim that was not renewed for so long is void if its installation has nothing in Ray; clocks differ by less."""


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
