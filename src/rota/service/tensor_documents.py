"""Documents about the named tensors of one namespace, for rota tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rota.runtime import environ
from rota.runtime.redis import server as redis_server
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput
from rota.tensors import inspect
from rota.tensors.api.store import Plane, connect
from rota.tensors.bridge import Bridge
from rota.tensors.errors import NotFound
from rota.tensors.recovery import Recovered

API = "rota/v1"
NO_REGISTRY = "no tensor registry runs here: nothing is shared"


def _document(kind: str, found: Mapping[str, object]) -> JsonObject:
    return {"api": API, "kind": kind, **found}


def tensor_list(prefix: str, *, namespace: str) -> JsonObject:
    """``TensorList``: every name with that prefix; empty when no registry runs."""
    plane = _join(namespace)
    items = [] if plane is None else plane.list_document(prefix)["items"]
    return _document("TensorList", {"items": items, "next": None})


def tensor(name: str, *, namespace: str) -> JsonObject:
    """``Tensor``: one name with its versions and their holders; ``form`` is tensor or group. Raises NotFound."""
    plane = _join(namespace)
    if plane is None:
        raise NotFound(f"no tensor is named {name!r}: {NO_REGISTRY}", hint="rota.tensors.connect()", name=name)
    found = plane.stat_document(name)
    return {**found, "form": found["kind"], "api": API, "kind": "Tensor"}


def tensor_top(count: int, *, namespace: str) -> JsonObject:
    """``TensorTop``: names by the bytes that all their versions take; none when no registry runs."""
    plane = _join(namespace)
    items = [] if plane is None else plane.top(count)["items"]
    return _document("TensorTop", {"items": items, "next": None})


def tensor_doctor(*, namespace: str) -> JsonObject:
    """``TensorDoctor``: what is wrong with the tensor store on this machine, and what to do."""
    plane = _join(namespace)
    return _document("TensorDoctor", inspect.doctor(None) if plane is None else plane.doctor())


def tensor_gc(*, namespace: str, dry_run: bool, every: bool = False) -> JsonObject:
    """``TensorGc``: what was swept and given back, of ``every`` namespace of the registry together. Raises BadInput."""
    if every and namespace:
        raise BadInput(f"--all and --namespace {namespace}: give one of them")
    plane = _join(namespace)
    if plane is None:
        none: inspect.GcDocument = {"swept": 0, "trimmed_bytes": 0, "dropped": [], "dry_run": dry_run}
        return _document("TensorGc", {**none, "text": NO_REGISTRY})
    return _document("TensorGc", (_gc_all if every else Plane.gc)(plane, dry_run=dry_run))


def _gc_all(plane: Plane, *, dry_run: bool) -> inspect.GcDocument:
    spaces = sorted(path.parent.name for path in plane.folder.parent.glob("*/gen"))
    done = [connect(namespace=space).gc(dry_run=dry_run) for space in spaces]
    return {
        "swept": sum(one["swept"] for one in done),
        "trimmed_bytes": sum(one["trimmed_bytes"] for one in done),
        "dropped": [each for one in done for each in one["dropped"]],
        "dry_run": dry_run,
    }


def tensor_fsck(*, namespace: str, repair: bool) -> JsonObject:
    """``TensorFsck``: broken invariants, repaired with ``repair``."""
    plane = _join(namespace)
    if plane is None:
        none: inspect.FsckDocument = {"checked": 0, "violations": [], "registry_bytes": 0, "disk_bytes": 0}
        return _document("TensorFsck", {**none, "text": NO_REGISTRY})
    return _document("TensorFsck", plane.fsck(repair=repair))


def tensor_recover(*, namespace: str, dry_run: bool) -> JsonObject:
    """``TensorRecover``: the registry built again from what lies in memory, or what would come back."""
    plane = _join(namespace)
    found = asdict(Recovered()) | {"text": NO_REGISTRY} if plane is None else plane.recover(dry_run=dry_run)
    return _document("TensorRecover", found)


def tensor_door(*, namespace: str) -> tuple[Bridge, JsonObject]:
    """A bridge to a namespace, not yet serving, and ``TensorDoor``: where it takes commands. Starts a registry."""
    plane = connect(namespace=namespace or None)
    door = Bridge(plane)
    facts = {"url": plane.address.url, "namespace": plane.namespace, "lists": door.lists}
    return door, _document("TensorDoor", facts)


def _join(namespace: str) -> Plane | None:
    """The plane of the registry that runs, or died and left its memory; None, and none is started, without one."""
    if not environ.get(environ.REDIS_URL) and redis_server.was_ended(environ.Home.find()):
        return None
    return connect(namespace=namespace or None)
