"""What a tree of queues must keep to before a cluster takes it: names, parents, guarantees within what there is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rota.spec.errors import nearest
from rota.spec.ids import NAME_PATTERN
from rota.spec.queue import Queue
from rota.spec.resources import Node, Res, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """One mistake: the place of the queue in the list, its field, what is wrong, and the remedy."""

    index: int
    field: str
    message: str
    hint: str = ""


def broken_rules(queues: Sequence[Queue], nodes: Iterable[Node]) -> list[BrokenRule]:
    """Every mistake in a tree of queues for these nodes; none for a tree that may be used.

    Without nodes nothing is known of the capacity, and guarantees are held only against each other. Queues that name
    themselves above themselves cannot be written: a path names its parent.
    """
    there = list(nodes)
    types = {device.type for node in there for device in node.devices} if there else None
    paths: dict[str, int] = {}
    found: list[BrokenRule] = []
    for index, queue in enumerate(queues):
        found += (BrokenRule(index=index, field=field, **rest) for field, rest in _alone(queue, types))
        if queue.path in paths:
            rest = {"message": f"{queue.path!r} is there twice", "hint": f"the first is number {paths[queue.path] + 1}"}
            found.append(BrokenRule(index=index, field="path", **rest))
        paths.setdefault(queue.path, index)
    for index, queue in enumerate(queues):
        if queue.parent is not None and queue.parent not in paths:
            rest = {"message": f"{queue.path!r} has no parent {queue.parent!r}", "hint": "list the parent too"}
            found.append(BrokenRule(index=index, field="path", **rest))
    return found + list(_promised_too_much(queues, there))


def _alone(queue: Queue, types: set[str] | None) -> Iterator[tuple[str, dict[str, str]]]:
    """Mistakes of one queue by itself; without ``types`` nothing is known of the devices there are."""
    if not all(NAME_PATTERN.match(part) for part in queue.path.split("/")):
        yield "path", {"message": f"{queue.path!r} is not NAME/NAME/...", "hint": "letters, digits, '-', '_' and '.'"}
    if not queue.weight > 0:
        yield "weight", {"message": f"{queue.weight} is not above 0"}
    most = _amounts(queue.limit)
    for kind, value in _amounts(queue.guaranteed).items():
        if value > most.get(kind, value):
            text = f"{_told(kind, value)} promised to {queue.path!r}, its limit is {_number(kind, most[kind])}"
            yield "guaranteed", {"message": text, "hint": "raise the limit or lower the guarantee"}
            break
    for field, res in (("guaranteed", queue.guaranteed), ("limit", queue.limit), ("user_limit", queue.user_limit)):
        if res is not None and min(res.cpus, res.gpus, res.memory_bytes) < 0:
            yield field, {"message": f"{queue.path!r} has an amount below 0", "hint": "leave out what is not limited"}
        if types is not None and res is not None and res.gpu_type is not None and res.gpu_type not in types:
            hint = nearest(res.gpu_type, sorted(types), "types")
            yield field, {"message": f"no node has devices of type {res.gpu_type!r}", "hint": hint}


def _promised_too_much(queues: Sequence[Queue], nodes: Sequence[Node]) -> Iterator[BrokenRule]:
    """The queue with which the guarantees of siblings pass that of their parent, or what the nodes have."""
    stated = {queue.path: queue.guaranteed for queue in reversed(queues)}
    sums: dict[tuple[str | None, str], float] = {}
    for index, queue in enumerate(queues):
        for kind, value in _amounts(queue.guaranteed).items():
            key = (queue.parent, kind)
            sums[key] = sums.get(key, 0.0) + value
            have = _stated(stated.get(queue.parent), kind) if queue.parent else _capacity(nodes, kind)
            if have is not None and round(sums[key] - have, 6) > 0:
                owner = f"{queue.parent!r} is promised" if queue.parent else "the cluster has"
                yield BrokenRule(
                    index=index,
                    field="guaranteed",
                    message=f"with {queue.path!r} {_told(kind, sums[key])} promised, {owner} {_number(kind, have)}",
                    hint="lower a guarantee; a limit may be larger than what there is",
                )
                break


def _amounts(res: Res | None) -> dict[str, float]:
    """What is stated, by kind; devices of a type are among all devices."""
    if res is None:
        return {}
    kinds = ("gpus", f"{res.gpu_type} devices") if res.gpu_type else ("gpus",)
    found = {**dict.fromkeys(kinds, res.gpus), "cpus": res.cpus, "memory": float(res.memory_bytes)}
    return {kind: value for kind, value in found.items() if value}


def _stated(res: Res | None, kind: str) -> float | None:
    """What may be promised below a queue of this guarantee (None: anything); of devices of a type no others."""
    return None if res is not None and res.gpu_type and kind == "gpus" else _amounts(res).get(kind)


def _capacity(nodes: Sequence[Node], kind: str) -> float | None:
    """What the nodes have; None where none is known."""
    if not nodes:
        return None
    if kind in ("cpus", "memory"):
        return float(sum(node.cpus if kind == "cpus" else node.memory_bytes for node in nodes))
    return sum(kind in ("gpus", f"{device.type} devices") for node in nodes for device in node.devices)


def _told(kind: str, value: float) -> str:
    return f"{_number(kind, value)} {'of memory' if kind == 'memory' else kind} are"


def _number(kind: str, value: float) -> str:
    return format_size(int(value)) if kind == "memory" else f"{value:g}"
