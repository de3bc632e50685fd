"""What a tree of queues must keep to before a cluster takes it: names, parents, guarantees within what there is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rota.spec.errors import nearest
from rota.spec.ids import NAME_PATTERN
from rota.spec.queue import Queue
from rota.spec.resources import Node, Res


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
    devices = [device.type for node in nodes for device in node.devices]
    paths: dict[str, int] = {}
    found: list[BrokenRule] = []
    for index, queue in enumerate(queues):
        found += (BrokenRule(index=index, field=field, **rest) for field, rest in _alone(queue, set(devices)))
        if queue.path in paths:
            rest = {"message": f"{queue.path!r} is there twice", "hint": f"the first is number {paths[queue.path] + 1}"}
            found.append(BrokenRule(index=index, field="path", **rest))
        paths.setdefault(queue.path, index)
    for index, queue in enumerate(queues):
        if queue.parent is not None and queue.parent not in paths:
            rest = {"message": f"{queue.path!r} has no parent {queue.parent!r}", "hint": "list the parent too"}
            found.append(BrokenRule(index=index, field="path", **rest))
    return found + list(_promised_too_much(queues, devices))


def _alone(queue: Queue, types: set[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Mistakes of one queue by itself."""
    if not all(NAME_PATTERN.match(part) for part in queue.path.split("/")):
        yield "path", {"message": f"{queue.path!r} is not NAME/NAME/...", "hint": "letters, digits, '-', '_' and '.'"}
    if not queue.weight > 0:
        yield "weight", {"message": f"{queue.weight} is not above 0"}
    if queue.guaranteed and queue.limit and queue.guaranteed.gpus > queue.limit.gpus > 0:
        text = f"{queue.guaranteed.gpus:g} gpus are promised to {queue.path!r}, its limit is {queue.limit.gpus:g}"
        yield "guaranteed", {"message": text, "hint": "raise the limit or lower the guarantee"}
    for field, res in (("guaranteed", queue.guaranteed), ("limit", queue.limit), ("user_limit", queue.user_limit)):
        if types and res is not None and res.gpu_type is not None and res.gpu_type not in types:
            hint = nearest(res.gpu_type, sorted(types), "types")
            yield field, {"message": f"no node has devices of type {res.gpu_type!r}", "hint": hint}


def _promised_too_much(queues: Sequence[Queue], devices: Sequence[str]) -> Iterator[BrokenRule]:
    """The queue with which the guarantees of siblings pass that of their parent, or the devices there are."""
    stated = {queue.path: queue.guaranteed for queue in reversed(queues)}
    sums: dict[tuple[str | None, str | None], float] = {}
    for index, queue in enumerate(queues):
        res = queue.guaranteed
        if res is None or not res.gpus:
            continue
        for kind in dict.fromkeys((None, res.gpu_type)):
            key = (queue.parent, kind)
            sums[key] = sums.get(key, 0.0) + res.gpus
            have, owner = _room(queue.parent, kind, stated, devices)
            if have is not None and sums[key] > have:
                what = f"{kind} devices" if kind else "gpus"
                yield BrokenRule(
                    index=index,
                    field="guaranteed",
                    message=f"with {queue.path!r} {sums[key]:g} {what} are promised, {owner} {have:g}",
                    hint="lower a guarantee; a limit may be larger than what there is",
                )
                break


def _room(
    parent: str | None, kind: str | None, stated: dict[str, Res | None], devices: Sequence[str]
) -> tuple[float | None, str]:
    """What may be promised below a parent (None: anything), and whose that is."""
    if parent is None:
        return (sum(kind in (None, one) for one in devices) if devices else None), "the cluster has"
    above = stated.get(parent)
    if above is None or not above.gpus or above.gpu_type != kind:
        return None, ""
    return above.gpus, f"{parent!r} is promised"
