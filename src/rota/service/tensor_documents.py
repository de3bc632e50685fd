"""Documents about the named tensors of one namespace, for rota tensors."""

from __future__ import annotations

from dataclasses import asdict
from typing import NotRequired, TypedDict, cast

from rota.runtime import environ
from rota.runtime.redis import server as redis_server
from rota.spec.codec import API, JsonObject
from rota.spec.errors import BadInput
from rota.tensors import inspect
from rota.tensors.api.store import Plane, connect
from rota.tensors.bridge import Bridge
from rota.tensors.errors import NotFound
from rota.tensors.recovery import Recovered

NO_REGISTRY = "no tensor registry runs here: nothing is shared"


class StoreAnswer(TypedDict):
    """What every document has; ``text`` where no registry runs."""

    api: str
    kind: str
    text: NotRequired[str]


class TensorListDocument(StoreAnswer, inspect.TensorList):
    """``TensorList``."""

    next: None


class TensorTopDocument(StoreAnswer, inspect.TopDocument):
    """``TensorTop``."""

    next: None


class TensorDoctorDocument(StoreAnswer, inspect.DoctorDocument):
    """``TensorDoctor``."""


class TensorGcDocument(StoreAnswer, inspect.GcDocument):
    """``TensorGc``."""


class TensorFsckDocument(StoreAnswer, inspect.FsckDocument):
    """``TensorFsck``."""


class TensorRecoverDocument(StoreAnswer):
    """``TensorRecover``: the fields of ``Recovered``."""

    epoch: int
    names: int
    leases: int
    promoted: int
    quarantined: list[str]
    lost: list[int]
    seconds: float


class TensorDoorDocument(StoreAnswer):
    """``TensorDoor``: the lists that take commands, in one namespace of the registry at ``url``."""

    url: str
    namespace: str
    lists: list[str]


def tensor_list(prefix: str, *, namespace: str) -> TensorListDocument:
    """``TensorList``: every name with that prefix; empty when no registry runs."""
    plane = _join(namespace)
    items = [] if plane is None else plane.list_document(prefix)["items"]
    return {"api": API, "kind": "TensorList", "items": items, "next": None}


def tensor(name: str, *, namespace: str) -> JsonObject:
    """``Tensor``: one name with its versions and their holders; ``form`` is tensor or group. Raises NotFound."""
    plane = _join(namespace)
    if plane is None:
        raise NotFound(f"no tensor is named {name!r}: {NO_REGISTRY}", hint="rota.tensors.connect()", name=name)
    found = plane.stat_document(name)
    return {**found, "form": found["kind"], "api": API, "kind": "Tensor"}


def tensor_top(count: int, *, namespace: str) -> TensorTopDocument:
    """``TensorTop``: names by the bytes that all their versions take; none when no registry runs."""
    plane = _join(namespace)
    items = [] if plane is None else plane.top(count)["items"]
    return {"api": API, "kind": "TensorTop", "items": items, "next": None}


def tensor_doctor(*, namespace: str) -> TensorDoctorDocument:
    """``TensorDoctor``: what is wrong with the tensor store on this machine, and what to do."""
    plane = _join(namespace)
    found = inspect.doctor(None) if plane is None else plane.doctor()
    return {"api": API, "kind": "TensorDoctor", **found}


def tensor_gc(*, namespace: str, dry_run: bool, every: bool = False) -> TensorGcDocument:
    """``TensorGc``: what was swept and given back, of ``every`` namespace of the registry together. Raises BadInput."""
    if every and namespace:
        raise BadInput(f"--all and --namespace {namespace}: give one of them")
    plane = _join(namespace)
    if plane is None:
        none: inspect.GcDocument = {"swept": 0, "trimmed_bytes": 0, "dropped": [], "dry_run": dry_run}
        return {"api": API, "kind": "TensorGc", **none, "text": NO_REGISTRY}
    return {"api": API, "kind": "TensorGc", **(_gc_all if every else Plane.gc)(plane, dry_run=dry_run)}


def _gc_all(plane: Plane, *, dry_run: bool) -> inspect.GcDocument:
    spaces = sorted(path.parent.name for path in plane.folder.parent.glob("*/gen"))
    done = [connect(namespace=space).gc(dry_run=dry_run) for space in spaces]
    return {
        "swept": sum(one["swept"] for one in done),
        "trimmed_bytes": sum(one["trimmed_bytes"] for one in done),
        "dropped": [each for one in done for each in one["dropped"]],
        "dry_run": dry_run,
    }


def tensor_fsck(*, namespace: str, repair: bool) -> TensorFsckDocument:
    """``TensorFsck``: broken invariants, repaired with ``repair``."""
    plane = _join(namespace)
    if plane is None:
        none: inspect.FsckDocument = {"checked": 0, "violations": [], "registry_bytes": 0, "disk_bytes": 0}
        return {"api": API, "kind": "TensorFsck", **none, "text": NO_REGISTRY}
    return {"api": API, "kind": "TensorFsck", **plane.fsck(repair=repair)}


def tensor_recover(*, namespace: str, dry_run: bool) -> TensorRecoverDocument:
    """``TensorRecover``: the registry built again from what lies in memory, or what would come back."""
    plane = _join(namespace)
    found = asdict(Recovered()) | {"text": NO_REGISTRY} if plane is None else plane.recover(dry_run=dry_run)
    return cast("TensorRecoverDocument", {"api": API, "kind": "TensorRecover", **found})


def tensor_door(*, namespace: str) -> tuple[Bridge, TensorDoorDocument]:
    """A bridge to a namespace, not yet serving, and ``TensorDoor``: where it takes commands. Starts a registry."""
    plane = connect(namespace=namespace or None)
    door = Bridge(plane)
    facts: TensorDoorDocument = {
        "api": API,
        "kind": "TensorDoor",
        "url": plane.address.url,
        "namespace": plane.namespace,
        "lists": door.lists,
    }
    return door, facts


def _join(namespace: str) -> Plane | None:
    """The plane of the registry that runs, or died and left its memory; None, and none is started, without one."""
    if not environ.get(environ.REDIS_URL) and redis_server.was_ended(environ.Home.find()):
        return None
    return connect(namespace=namespace or None)
