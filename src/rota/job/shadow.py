"""State of an instance in shared memory outside its process: one group of tensors a commit, the rest as JSON."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from rota import tensors
from rota.runtime import environ, redis_server
from rota.runtime.environ import Home
from rota.spec.errors import BadInput, NotReachable, TensorError
from rota.spec.ids import Epoch, InstanceId, JobId
from rota.spec.reasons import Reason
from rota.tensors.arrays import is_torch
from rota.tensors.plane import Plane
from rota.tensors.session import shm_root

SHADOWS_KEPT = 2
"""The commit being made and the one before it: until the log has the newer one, the older is the truth."""
WEIGHTS_KEPT = 3
WAIT_S = 20.0


class StateLost(TensorError):
    """The state of a commit is in no memory any more."""

    reason = Reason.STATE_LOST


def connect(job: JobId, instance: InstanceId, epoch: Epoch) -> Plane:
    """The tensor plane as this instance; publishers of the same instance under older epochs are fenced from here on.

    The registry is kept, since the state in it must survive every process of the job.
    """
    label = f"{job}/{instance}"
    plane = tensors.connect(label=label, epoch=epoch, keep=True)
    plane.fence(label, epoch)
    return plane


def opened(job: JobId) -> Plane:
    """The tensor plane of this process, to read what others have published."""
    return tensors.connect(label=job, keep=True)


def drop(job: JobId, home: str) -> None:
    """Give back everything the job has published; harmless when there is nothing."""
    tensors.connect(home=home, keep=True).drop_label(job)


def in_use(home: str) -> bool:
    """True when processes of this home may share tensors: there is memory of a registry, or one was named."""
    socket = redis_server.Address(path=str(redis_server.socket_path(Home.of(home))))
    return bool(environ.get(environ.REDIS_URL)) or shm_root(socket.url).exists()


def give_back(job: JobId, home: str) -> None:
    """``drop`` at the end of a job: a registry that is gone, or was never there, has nothing left of it."""
    if not in_use(home):
        return
    try:
        drop(job, home)
    except (NotReachable, TensorError) as error:
        sys.stderr.write(f"tensors of {job} were not given back: {error}\n")


def shadow_name(job: JobId, instance: InstanceId) -> str:
    """Name of the group that holds the state of one instance."""
    return f"shadow/{job}/{instance.role}/{instance.rank}"


def weights_name(job: JobId, edge: str) -> str:
    """Name of the group of a weights edge."""
    return f"weights/{job}/{edge}"


def flatten(state: Any) -> tuple[Any, dict[str, Any]]:
    """``(outline, tensors)`` of nested dicts, lists and tuples.

    The outline is JSON: a tensor or array is ``{"t": name}``, a dict ``{"d": [[key, outline], ...]}`` (keys may be
    numbers, as in an optimiser's state), a list ``{"l": [...]}``, a tuple ``{"u": [...]}``, anything else itself.
    Raises BadInput for a value that is none of these.
    """
    found: dict[str, Any] = {}

    def outline(value: Any, path: str) -> Any:
        if isinstance(value, np.ndarray) or is_torch(value):
            name = str(len(found))
            found[name] = _detached(value)
            return {"t": name, "torch": is_torch(value)}
        if isinstance(value, Mapping):
            return {"d": [[_key(key, path), outline(item, f"{path}.{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            items = [outline(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return {"l" if isinstance(value, list) else "u": items}
        if value is None or isinstance(value, str | int | float | bool):
            return value
        if isinstance(value, np.generic):
            return value.item()
        raise BadInput(
            f"{path} is a {type(value).__name__}; state holds dicts, lists, tensors, arrays, numbers and texts only"
        )

    return outline(state, "state"), found


def tensors_of(state: Any, path: str = "") -> dict[str, Any]:
    """The tensors and arrays of a state by the way to them: ``net.0.weight``."""
    if isinstance(state, np.ndarray) or is_torch(state):
        return {path: state}
    items = state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, list | tuple) else ()
    ways = ((f"{path}.{key}" if path else str(key), item) for key, item in items)
    return {name: tensor for way, item in ways for name, tensor in tensors_of(item, way).items()}


def rebuild(outline: Any, held: Mapping[str, Any]) -> Any:
    """Inverse of ``flatten``; tensors are copies that their owner may change."""
    if not isinstance(outline, dict):
        return outline
    if "t" in outline:
        return _own(held[outline["t"]], torch=outline["torch"])
    if "d" in outline:
        return {key: rebuild(item, held) for key, item in outline["d"]}
    if "l" in outline:
        return [rebuild(item, held) for item in outline["l"]]
    return tuple(rebuild(item, held) for item in outline["u"])


def save(plane: Plane, job: JobId, instance: InstanceId, n: int, epoch: Epoch, state: Any) -> int:
    """Publish the state of commit ``n``; returns its bytes."""
    outline, parts = flatten(state)
    plane.publish_group(
        shadow_name(job, instance),
        parts,
        step=n,
        retain=SHADOWS_KEPT,
        epoch=epoch,
        meta={"outline": outline, "torch": any(is_torch(part) for part in parts.values())},
    )
    return sum(_bytes(tensor) for tensor in parts.values())


def epoch_of(plane: Plane, job: JobId, instance: InstanceId, n: int) -> int:
    """The epoch under which the state of commit ``n`` was put into memory; 0 when it is not there."""
    try:
        return int(plane.get_group(shadow_name(job, instance), step=n, as_="numpy").epoch)
    except TensorError:
        return 0


def load(plane: Plane, job: JobId, instance: InstanceId, n: int) -> Any:
    """The state of commit ``n``. Raises StateLost when it is gone."""
    try:
        found = plane.get_group(shadow_name(job, instance), step=n, as_=_form())
        if found.meta["torch"] and _form() != "torch":
            importlib.import_module("torch")
            found = plane.get_group(shadow_name(job, instance), step=n, as_="torch")
    except TensorError as error:
        raise StateLost(f"the state of {instance} at commit {n} is gone: {error}") from error
    return rebuild(found.meta["outline"], found)


def publish(plane: Plane, job: JobId, edge: str, n: int, epoch: Epoch, weights: Mapping[str, Any]) -> None:
    """Publish version ``n`` of a weights edge as one group: readers see all of it or none."""
    owned = {name: _detached(tensor) for name, tensor in weights.items()}
    plane.publish_group(weights_name(job, edge), owned, step=n, retain=WEIGHTS_KEPT, epoch=epoch)


def find_weights(plane: Plane, job: JobId, edge: str, n: int) -> Mapping[str, Any] | None:
    """What was published with commit ``n``, if memory has it."""
    try:
        return plane.get_group(weights_name(job, edge), step=n, as_=_form())
    except TensorError:
        return None


def fetch(plane: Plane, job: JobId, edge: str, version: tuple[int, int]) -> Mapping[str, Any]:
    """The tensors of (epoch of the writer, n), read in place. Raises TensorError when they do not come in time.

    A newer epoch that published step ``n`` did so again, after a rollback to it.
    """
    epoch, n = version
    found = plane.get_group(weights_name(job, edge), step=n, wait_s=WAIT_S, as_=_form())
    if found.epoch < epoch:
        raise TensorError(f"{weights_name(job, edge)} step {n} is of epoch {found.epoch}, not {epoch}")
    return found


def _form() -> str:
    """Tensors for a process that has torch loaded, arrays for one that has not: reading never loads it."""
    return "torch" if "torch" in sys.modules else "numpy"


def _detached(value: Any) -> Any:
    return value.detach() if is_torch(value) else value


def _key(key: Any, path: str) -> str | int:
    if isinstance(key, str | int):
        return key
    raise BadInput(f"{path} has a key of type {type(key).__name__}; keys are texts or whole numbers")


def _own(tensor: Any, *, torch: bool) -> Any:
    if torch:
        return tensor.clone()
    return np.array(tensor.numpy() if is_torch(tensor) else tensor)


def _bytes(tensor: Any) -> int:
    return int(tensor.nbytes)
