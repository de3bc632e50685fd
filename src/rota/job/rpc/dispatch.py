"""Dispatch of calls: arguments split and results merged as declared, nested batches cut along dim 0.

A batch is a numpy array, a torch tensor, a Ref, a list, or a dict or tuple (nested) of batches of the same length.
Texts, numbers and None inside a batch are broadcast to every member unchanged. torch is never imported
here: a tensor can only come from a process that has it. Law: ``merge(split(x))`` through an identity operation equals
``x``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rota.job.rpc.payload import Ref, join
from rota.spec.dispatch import Concat, MeanRule, Rank, Receive, SameRule, Send, Shard, SumRule
from rota.spec.errors import BadInput
from rota.tensors.arrays import is_torch

Mesh = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """Share of one member: its value, how many items it is long and how many of them are real (not padding)."""

    value: Any
    size: int
    real: int


def coordinates(mesh: Mesh, rank: int) -> dict[str, int]:
    """Where ``rank`` lies in the mesh; the last axis varies fastest."""
    found: dict[str, int] = {}
    for axis, size in reversed(mesh):
        rank, found[axis] = divmod(rank, size)
    return {axis: found[axis] for axis, _ in mesh}


def representatives(mesh: Mesh, axis: str | None, world: int) -> tuple[int, ...]:
    """One rank for each place on ``axis``, in its order: those at 0 on every other axis; every rank without an axis."""
    if axis is None:
        return tuple(range(world))
    if axis not in dict(mesh):
        raise BadInput(f"the mesh has no axis {axis!r}; its axes are {', '.join(dict(mesh)) or 'none'}")
    return tuple(
        rank
        for rank in range(world)
        if not any(place for name, place in coordinates(mesh, rank).items() if name != axis)
    )


def split(value: object, rule: Send, *, mesh: Mesh, world: int) -> dict[int, BatchPart]:
    """Share of each rank of the first argument. Raises BadInput when it does not divide or has no such axis."""
    match rule:
        case SameRule():
            size = _length_or(value, 1)
            return dict.fromkeys(range(world), BatchPart(value=value, size=size, real=size))
        case Rank(rank=rank):
            if not 0 <= rank < world:
                raise BadInput(f"Rank({rank}): the ranks of this role are 0 to {world - 1}")
            size = _length_or(value, 1)
            return {rank: BatchPart(value=value, size=size, real=size)}
        case Shard(axis=axis, pad=pad):
            ways = len(representatives(mesh, axis, world))
            parts = _shards(value, ways, axis, pad)
            return {rank: parts[coordinates(mesh, rank)[axis]] for rank in range(world)}
        case _:
            raise BadInput("Each has no fixed split: items go one by one")


def _shards(value: object, ways: int, axis: str, pad: str) -> list[BatchPart]:
    total = length(value)
    if total == 0:
        raise BadInput(f"Shard({axis!r}): the batch is empty", hint="send at least one item")
    if total % ways and pad == "none":
        raise BadInput(
            f"Shard({axis!r}): {total} items do not divide over {ways} members",
            hint="give the operation pad='repeat' or pad='drop', or another batch size",
        )
    size = total // ways if pad == "drop" else -(-total // ways)
    if size == 0:
        raise BadInput(
            f"Shard({axis!r}, pad='drop'): {total} items leave nothing for {ways} members", hint="pad='repeat'"
        )
    found: list[BatchPart] = []
    for place in range(ways):
        start = place * size
        real = max(0, min(size, total - start))
        taken = map_batch(value, lambda leaf, start=start, real=real: _take(leaf, start, real, size - real))
        found.append(BatchPart(value=taken, size=size, real=real))
    return found


def merge(
    results: Mapping[int, object], parts: Mapping[int, BatchPart], rule: Receive, *, axis: str | None, mesh: Mesh
) -> object:
    """One value from the results of all ranks; ``axis`` is the one the arguments were split along, if they were."""
    if isinstance(rule, Rank):
        return results[rule.rank]
    along = (rule.axis or axis) if isinstance(rule, Concat) else axis
    ranks = [rank for rank in representatives(mesh, along, max(results) + 1) if rank in results]
    match rule:
        case Concat():
            return concat([_trim(results[rank], parts[rank]) for rank in ranks])
        case MeanRule():
            weights = [parts[rank].real for rank in ranks]
            return weighted_sum([results[rank] for rank in ranks], [weight / sum(weights) for weight in weights])
        case SumRule():
            return weighted_sum([results[rank] for rank in ranks], None)
        case _:
            raise BadInput(f"{rule} does not merge the results of several members")


def of_items(results: list[object], rule: Receive) -> object:
    """What ``send=Each`` gives: the results in the order of the items, or their mean or sum."""
    match rule:
        case MeanRule() | SumRule() if not results:
            raise BadInput("no items to reduce: a mean or sum needs at least one; send a batch that is not empty")
        case MeanRule():
            return weighted_sum(results, [1 / len(results)] * len(results))
        case SumRule():
            return weighted_sum(results, None)
        case _:
            return results


def _is_leaf_batch(value: object) -> bool:
    return isinstance(value, list | np.ndarray | Ref) or is_torch(value)


def map_batch(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Apply ``leaf`` to every array, tensor and list of a nested batch; everything else stays."""
    if isinstance(value, Mapping):
        return {key: map_batch(item, leaf) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map_batch(item, leaf) for item in value)
    return leaf(value) if _is_leaf_batch(value) else value


def _lengths(value: Any, path: str) -> list[tuple[str, int]]:
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in _lengths(item, f"{path}.{key}")]
    if isinstance(value, tuple):
        return [found for index, item in enumerate(value) for found in _lengths(item, f"{path}[{index}]")]
    if isinstance(value, list):
        return [(path, len(value))]
    if _is_leaf_batch(value) and value.ndim > 0:
        return [(path, int(value.shape[0]))]
    return []


def length(value: object) -> int:
    """Number of items of a batch. Raises BadInput when nothing in it can be cut or its parts differ in length."""
    found = _lengths(value, "batch")
    if not found:
        raise BadInput(f"{type(value).__name__} cannot be cut along dim 0; give an array, a list, or a dict of them")
    odd = next((item for item in found if item[1] != found[0][1]), None)
    if odd is not None:
        raise BadInput(f"{found[0][0]} has {found[0][1]} items but {odd[0]} has {odd[1]}")
    return found[0][1]


def _length_or(value: object, default: int) -> int:
    found = _lengths(value, "batch")
    return found[0][1] if found else default


def _take(leaf: Any, start: int, real: int, padding: int) -> Any:
    """``real`` items from ``start``, then the last item of all ``padding`` times."""
    if isinstance(leaf, list):
        return leaf[start : start + real] + [leaf[-1]] * padding
    if leaf.ndim == 0:
        return leaf
    if padding == 0:
        return leaf[start : start + real]
    index = [*range(start, start + real), *([leaf.shape[0] - 1] * padding)]
    return leaf[index]


def _trim(result: object, part: BatchPart) -> object:
    if part.real == part.size:
        return result

    def cut(leaf: Any) -> Any:
        long = len(leaf) if isinstance(leaf, list) else (leaf.shape[0] if leaf.ndim else -1)
        return leaf[: part.real] if long == part.size else leaf

    return map_batch(result, cut)


def concat(values: Sequence[Any]) -> object:
    """Join nested batches in order along dim 0; what belongs to every item is taken from the first."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: concat([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(concat(items) for items in zip(*values, strict=True))
    if isinstance(first, list):
        return [item for value in values for item in value]
    if all(isinstance(value, Ref) and value.dtype == first.dtype for value in values):
        return join(values)
    values = [value.value() if isinstance(value, Ref) else value for value in values]
    first = values[0]
    if isinstance(first, np.ndarray) and first.ndim > 0:
        return np.concatenate(values)
    if is_torch(first) and first.ndim > 0:
        return sys.modules["torch"].cat(list(values))
    return first


def weighted_sum(values: Sequence[Any], weights: Sequence[float] | None) -> object:
    """Sum of nested numbers, arrays and tensors, each times its weight; texts and None are taken from the first."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: weighted_sum([value[key] for value in values], weights) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(weighted_sum(items, weights) for items in zip(*values, strict=True))
    if isinstance(first, str) or first is None:
        return first
    if weights is None:
        return sum(values[1:], first)
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total
