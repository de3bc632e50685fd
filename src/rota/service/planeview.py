"""Documents about the named tensors of one namespace, for rota tensors."""

from __future__ import annotations

from typing import Any

from rota.runtime import environ, redis_server
from rota.spec.errors import BadInput
from rota.tensors import doctor
from rota.tensors.door import Door
from rota.tensors.plane import Plane, connect

API = "rota/v1"
NO_REGISTRY = "no tensor registry runs here: nothing is shared"


def tensor_list(prefix: str, *, namespace: str) -> dict[str, Any]:
    """``TensorList``: every name with that prefix; empty when no registry runs."""
    plane = _join(namespace)
    found: dict[str, Any] = {"items": []} if plane is None else plane.list_document(prefix)
    return {"api": API, "kind": "TensorList", **found, "next": None}


def tensor(name: str, *, namespace: str) -> dict[str, Any]:
    """``Tensor``: one name with its versions and their holders; ``form`` is tensor or group. Raises NotFound."""
    found = _need(namespace).stat_document(name)
    return {**found, "form": found.get("kind"), "api": API, "kind": "Tensor"}


def tensor_top(count: int, *, namespace: str) -> dict[str, Any]:
    """``TensorTop``: names by the bytes that all their versions take."""
    return {"api": API, "kind": "TensorTop", **_need(namespace).top(count), "next": None}


def tensor_doctor(*, namespace: str) -> dict[str, Any]:
    """``TensorDoctor``: what is wrong with the plane on this machine, and what to do."""
    plane = _join(namespace)
    return {"api": API, "kind": "TensorDoctor", **(doctor.document(None) if plane is None else plane.doctor())}


def tensor_gc(*, namespace: str, dry_run: bool) -> dict[str, Any]:
    """``TensorGc``: what was swept and given back."""
    return {"api": API, "kind": "TensorGc", **_need(namespace).gc(dry_run=dry_run)}


def tensor_fsck(*, namespace: str, repair: bool) -> dict[str, Any]:
    """``TensorFsck``: broken invariants, mended with ``repair``; none, and a ``text``, when no registry runs."""
    plane = _join(namespace)
    none = {"checked": 0, "violations": [], "registry_bytes": 0, "disk_bytes": 0, "text": NO_REGISTRY}
    return {"api": API, "kind": "TensorFsck", **(none if plane is None else plane.fsck(repair=repair))}


def tensor_recover(*, namespace: str) -> dict[str, Any]:
    """``TensorRecover``: the registry built again from what lies in memory."""
    return {"api": API, "kind": "TensorRecover", **_need(namespace).recover()}


def tensor_door(*, namespace: str) -> tuple[Door, dict[str, Any]]:
    """A door of a namespace, not yet serving, and ``TensorDoor``: where its commands are taken. Starts a registry."""
    plane = connect(namespace=namespace or None)
    door = Door(plane)
    facts = {"url": plane.address.url, "namespace": plane.namespace, "lists": door.lists}
    return door, {"api": API, "kind": "TensorDoor", **facts}


def _join(namespace: str) -> Plane | None:
    """The plane of the registry that runs, or None; nothing is started to look at nothing."""
    if not environ.get(environ.REDIS_URL) and redis_server.find_running(environ.Home.find()) is None:
        return None
    return connect(namespace=namespace or None)


def _need(namespace: str) -> Plane:
    plane = _join(namespace)
    if plane is None:
        raise BadInput(NO_REGISTRY, hint="it starts with rota.tensors.connect(), or a job that shares state or weights")
    return plane
