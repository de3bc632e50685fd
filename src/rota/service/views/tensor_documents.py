"""Documents about the named tensors of one namespace, for rota tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rota.runtime import environ
from rota.runtime.redis import server as redis_server
from rota.spec.errors import BadInput
from rota.tensors import inspect
from rota.tensors.api.store import Plane, connect
from rota.tensors.bridge import Bridge
from rota.tensors.errors import NotFound

API = "rota/v1"
NO_REGISTRY = "no tensor registry runs here: nothing is shared"


def tensor_list(prefix: str, *, namespace: str) -> dict[str, Any]:
    """``TensorList``: every name with that prefix; empty when no registry runs."""
    return _ask("TensorList", namespace, lambda plane: plane.list_document(prefix), items=[]) | {"next": None}


def tensor(name: str, *, namespace: str) -> dict[str, Any]:
    """``Tensor``: one name with its versions and their holders; ``form`` is tensor or group. Raises NotFound."""
    plane = _join(namespace)
    if plane is None:
        raise NotFound(f"no tensor is named {name!r}: {NO_REGISTRY}", hint="rota.tensors.connect()", name=name)
    found = plane.stat_document(name)
    return {**found, "form": found.get("kind"), "api": API, "kind": "Tensor"}


def tensor_top(count: int, *, namespace: str) -> dict[str, Any]:
    """``TensorTop``: names by the bytes that all their versions take; none when no registry runs."""
    return _ask("TensorTop", namespace, lambda plane: plane.top(count), items=[]) | {"next": None}


def tensor_doctor(*, namespace: str) -> dict[str, Any]:
    """``TensorDoctor``: what is wrong with the tensor store on this machine, and what to do."""
    return _ask("TensorDoctor", namespace, lambda plane: plane.doctor(), **inspect.doctor(None))


def tensor_gc(*, namespace: str, dry_run: bool, every: bool = False) -> dict[str, Any]:
    """``TensorGc``: what was swept and given back, of ``every`` namespace of the registry together. Raises BadInput."""
    none = {"swept": 0, "trimmed_bytes": 0, "dropped": [], "dry_run": dry_run, "text": NO_REGISTRY}
    if every and namespace:
        raise BadInput(f"--all and --namespace {namespace}: give one of them")
    return _ask("TensorGc", namespace, lambda plane: (_gc_all if every else Plane.gc)(plane, dry_run=dry_run), **none)


def _gc_all(plane: Plane, *, dry_run: bool) -> inspect.GcDocument:
    spaces = sorted(path.parent.name for path in plane.folder.parent.glob("*/gen"))
    done = [connect(namespace=space).gc(dry_run=dry_run) for space in spaces]
    return {
        "swept": sum(one["swept"] for one in done),
        "trimmed_bytes": sum(one["trimmed_bytes"] for one in done),
        "dropped": [each for one in done for each in one["dropped"]],
        "dry_run": dry_run,
    }


def tensor_fsck(*, namespace: str, repair: bool) -> dict[str, Any]:
    """``TensorFsck``: broken invariants, repaired with ``repair``."""
    none = {"checked": 0, "violations": [], "registry_bytes": 0, "disk_bytes": 0, "text": NO_REGISTRY}
    return _ask("TensorFsck", namespace, lambda plane: plane.fsck(repair=repair), **none)


def tensor_recover(*, namespace: str, dry_run: bool) -> dict[str, Any]:
    """``TensorRecover``: the registry built again from what lies in memory, or what would come back."""
    none = {"epoch": 0, "names": 0, "leases": 0, "promoted": 0, "quarantined": [], "lost": [], "seconds": 0.0}
    return _ask("TensorRecover", namespace, lambda plane: plane.recover(dry_run=dry_run), **none, text=NO_REGISTRY)


def tensor_door(*, namespace: str) -> tuple[Bridge, dict[str, Any]]:
    """A bridge to a namespace, not yet serving, and ``TensorDoor``: where it takes commands. Starts a registry."""
    plane = connect(namespace=namespace or None)
    door = Bridge(plane)
    facts = {"url": plane.address.url, "namespace": plane.namespace, "lists": door.lists}
    return door, {"api": API, "kind": "TensorDoor", **facts}


def _ask(kind: str, namespace: str, ask: Callable[[Plane], Mapping[str, object]], **none: Any) -> dict[str, Any]:
    """A document of the tensor store; ``none``, with a ``text`` where a list says too little, when no registry runs."""
    plane = _join(namespace)
    return {"api": API, "kind": kind, **(none if plane is None else ask(plane))}


def _join(namespace: str) -> Plane | None:
    """The plane of the registry that runs, or died and left its memory; None, and none is started, without one."""
    if not environ.get(environ.REDIS_URL) and redis_server.was_ended(environ.Home.find()):
        return None
    return connect(namespace=namespace or None)
