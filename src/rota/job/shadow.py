"""State of an instance in shared memory outside its process: one group of tensors a commit, the rest as JSON."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from rota.spec.errors import BadInput, TensorError
from rota.spec.ids import Epoch, InstanceId, JobId

SHADOWS_KEPT = 2
"""The commit being made and the one before it: until the log has the newer one, the older is the truth."""
WEIGHTS_KEPT = 3
WAIT_S = 20.0


def connect(job: JobId, epoch: Epoch) -> Any:
    """The tensor plane of this machine as a member of ``job``; loaded here, because not every instance needs it."""
    tensors = importlib.import_module("rota.tensors")
    return tensors.connect(label=job, epoch=epoch)


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
    tensors: dict[str, Any] = {}

    def outline(value: Any, path: str) -> Any:
        if isinstance(value, np.ndarray) or _is_tensor(value):
            name = str(len(tensors))
            tensors[name] = _detached(value)
            return {"t": name, "torch": _is_tensor(value)}
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

    return outline(state, "state"), tensors


def rebuild(outline: Any, tensors: Mapping[str, Any]) -> Any:
    """Inverse of ``flatten``; tensors are copies that their owner may change."""
    if not isinstance(outline, dict):
        return outline
    if "t" in outline:
        return _own(tensors[outline["t"]], torch=outline["torch"])
    if "d" in outline:
        return {key: rebuild(item, tensors) for key, item in outline["d"]}
    if "l" in outline:
        return [rebuild(item, tensors) for item in outline["l"]]
    return tuple(rebuild(item, tensors) for item in outline["u"])


def save(plane: Any, job: JobId, instance: InstanceId, n: int, epoch: Epoch, state: Any) -> int:
    """Publish the state of commit ``n``; returns its bytes."""
    outline, tensors = flatten(state)
    plane.publish_group(
        shadow_name(job, instance),
        tensors,
        step=n,
        retain=SHADOWS_KEPT,
        meta={"epoch": epoch, "n": n, "outline": outline},
    )
    return sum(_bytes(tensor) for tensor in tensors.values())


def load(plane: Any, job: JobId, instance: InstanceId, n: int) -> Any:
    """The state of commit ``n``. Raises TensorError when it is gone."""
    found = plane.get_group(shadow_name(job, instance), step=n)
    if found.meta.get("n") != n:
        raise TensorError(f"{shadow_name(job, instance)} holds commit {found.meta.get('n')}, not {n}")
    return rebuild(found.meta["outline"], found)


def publish(plane: Any, job: JobId, edge: str, n: int, epoch: Epoch, tensors: Mapping[str, Any]) -> None:
    """Publish version ``n`` of a weights edge as one group: readers see all of it or none."""
    owned = {name: _detached(tensor) for name, tensor in tensors.items()}
    plane.publish_group(weights_name(job, edge), owned, step=n, retain=WEIGHTS_KEPT, meta={"epoch": epoch, "n": n})


def fetch(plane: Any, job: JobId, edge: str, version: tuple[int, int]) -> Mapping[str, Any]:
    """The tensors of (epoch of the writer, n), read in place. Raises TensorError when they do not come in time."""
    epoch, n = version
    found = plane.get_group(weights_name(job, edge), step=n, wait_s=WAIT_S)
    if found.meta.get("epoch") != epoch:
        raise TensorError(f"{weights_name(job, edge)} step {n} is of epoch {found.meta.get('epoch')}, not {epoch}")
    return found


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _detached(value: Any) -> Any:
    return value.detach() if _is_tensor(value) else value


def _key(key: Any, path: str) -> str | int:
    if isinstance(key, str | int):
        return key
    raise BadInput(f"{path} has a key of type {type(key).__name__}; keys are texts or whole numbers")


def _own(tensor: Any, *, torch: bool) -> Any:
    if torch:
        return tensor.clone()
    return np.array(tensor.numpy() if _is_tensor(tensor) else tensor)


def _bytes(tensor: Any) -> int:
    return int(tensor.nbytes)
