"""Division among queues: borrowing, fair shares, reclaim, and the rules of a queue tree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from rota.spec.errors import nearest
from rota.spec.ids import NAME_PATTERN
from rota.spec.queue import Queue
from rota.spec.resources import Node, Res, counted, format_size

Amounts = Mapping[str, Fraction]
"""Amount by resource."""
Numbers = Mapping[str, Fraction | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowedShare:
    """How much a queue borrows: part of what the cohort can lend of its dominant resource, over its weight.

    ``share`` is exact, infinite for a queue of no weight; ``share_permille`` is for people, rounded up.
    """

    resource: str | None
    share: Fraction | float
    share_permille: int
    borrowing: bool


def borrowing_share(nominal: Numbers, lendable: Numbers, used: Numbers, weight: Fraction | float = 1) -> BorrowedShare:
    """``max_r max(0, used - nominal) / lendable_r / weight``; in thousandths rounded up, so that it is never none.

    Resources of which nothing can be lent do not count; ties go to the first name. Source: Kueue, fair sharing.
    """
    over = {r: used[r] - nominal.get(r, 0) for r in sorted(used) if used[r] > nominal.get(r, 0)}
    parts = {r: Fraction(amount, lendable[r]) for r, amount in over.items() if lendable.get(r, 0) > 0}
    if not parts:
        return BorrowedShare(resource=None, share=Fraction(0), share_permille=0, borrowing=bool(over))
    resource = max(parts, key=lambda r: parts[r])
    if not weight > 0:
        return BorrowedShare(resource=resource, share=math.inf, share_permille=2**63 - 1, borrowing=True)
    share = parts[resource] / Fraction(weight)
    return BorrowedShare(resource=resource, share=share, share_permille=math.ceil(1000 * share), borrowing=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRequest:
    """What a queue deserves, asks, may have at most (None: no limit), and how it competes for what is left over."""

    deserved: Fraction | None
    request: Fraction
    most: Fraction | None = None
    weight: Fraction = Fraction(0)
    priority: int = 100


def fair_shares(
    total: Fraction, claims: Mapping[str, ShareRequest], unit: Fraction | None = None
) -> tuple[dict[str, Fraction], Fraction]:
    """Fair share of each queue, and what is left over.

    First what is deserved, as far as it is asked; the rest by tiers of priority, inside one by weight, until everyone
    has what it asks or may have. Weight 0 gets nothing of the rest. ``deserved`` None = unlimited. With a ``unit`` the
    rest is handed out in whole units: rounded down, then one each by the largest remainder, equal ones in the order
    given. Source: KAI scheduler, resource division of the proportion plug-in.
    """
    ceiling = {name: min(c.request, c.request if c.most is None else c.most) for name, c in claims.items()}
    shares = {
        name: min(ceiling[name], ceiling[name] if c.deserved is None else c.deserved) for name, c in claims.items()
    }
    left = max(Fraction(0), total - sum(shares.values(), Fraction(0)))
    for tier in sorted({claim.priority for claim in claims.values()}, reverse=True):
        weights = {n: c.weight for n, c in claims.items() if c.priority == tier and c.weight > 0}
        left = _by_weight(left, weights, ceiling, shares, unit)
    return shares, left


def _by_weight(
    left: Fraction,
    weights: Mapping[str, Fraction],
    ceiling: Mapping[str, Fraction],
    shares: dict[str, Fraction],
    unit: Fraction | None,
) -> Fraction:
    """Who wants no more than its part gets what it wants; when all want more, the parts are final."""
    while left > 0:
        hungry = [name for name in weights if shares[name] < ceiling[name]]
        if not hungry:
            break
        whole = sum((weights[name] for name in hungry), Fraction(0))
        part = {name: left * weights[name] / whole for name in hungry}
        modest = [name for name in hungry if ceiling[name] - shares[name] <= part[name]]
        given = {name: ceiling[name] - shares[name] for name in modest} or _rounded(part, unit)
        for name, amount in given.items():
            shares[name] += amount
            left -= amount
        if not modest:
            return _remainders(left, part, ceiling, shares, unit) if unit else left
    return left


def _rounded(part: Mapping[str, Fraction], unit: Fraction | None) -> dict[str, Fraction]:
    return {name: amount // unit * unit if unit else amount for name, amount in part.items()}


def _remainders(
    left: Fraction,
    part: Mapping[str, Fraction],
    ceiling: Mapping[str, Fraction],
    shares: dict[str, Fraction],
    unit: Fraction,
) -> Fraction:
    for name in sorted(part, key=lambda name: -(part[name] % unit)):
        given = min(unit, left, ceiling[name] - shares[name])
        shares[name] += given
        left -= given
    return left


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDemand:
    """One queue of a tree in one resource. ``reserved`` is the part of ``used`` that is kept for what is pending.

    Of queues that are served alike those of higher ``priority`` get more first.
    """

    name: str
    parent: str | None
    guaranteed: Fraction
    limit: Fraction
    used: Fraction
    pending: Fraction
    reserved: Fraction = Fraction(0)
    preemptible: bool = True
    priority: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimRules:
    """How hard excess is taken back.

    At most a part of the cluster each round; a part of the excess, as the rest ends by itself; nothing of a queue that
    is above its guarantee by no more than the dead zone.
    """

    max_per_round: Fraction = Fraction(1)
    natural_termination: Fraction = Fraction(1)
    dead_zone: Fraction = Fraction(0)
    observe_only: bool = False


@dataclass(slots=True)
class _Node:
    queue: QueueDemand
    used: Fraction
    pending: Fraction
    """What is asked beside what is used: what is reserved is in both, and counts once."""
    children: list[_Node] = field(default_factory=list["_Node"])
    preemptible: bool = True
    untouchable: Fraction = Fraction(0)
    touchable: Fraction = Fraction(0)
    ideal: Fraction = Fraction(0)
    excess: Fraction = Fraction(0)


def reclaim(queues: Sequence[QueueDemand], rules: ReclaimRules) -> dict[str, Fraction]:
    """How much every leaf should give back now; leaves that give nothing are left out.

    Per level, every queue starts at what it uses of its guarantee, plus untouchable excess. The remainder
    goes to the most under-served first, in proportion to guarantees among those that still want, up to the limit and
    to what is used and pending; leaves get nothing beyond ``max(guaranteed, used)``, while a queue above them may, so
    that a child below its guarantee is served from beside its parent. So two leaves that are both above their guarantee
    are never balanced, and a parent below its guarantee loses nothing to outsiders. Source: the capacity scheduler of
    Hadoop YARN, proportional preemption.
    """
    root = _tree(queues)
    root.ideal = min(root.queue.guaranteed, root.queue.limit)
    allowed = root.queue.guaranteed * rules.max_per_round
    _distribute(root, allowed)
    if rules.observe_only:
        return {}
    given: dict[str, Fraction] = {}
    for leaf in _leaves(root):
        if leaf.excess > 0 and leaf.used > leaf.queue.guaranteed * (1 + rules.dead_zone):
            given[leaf.queue.name] = leaf.excess * rules.natural_termination
    return given


def _tree(queues: Sequence[QueueDemand]) -> _Node:
    nodes = {q.name: _Node(q, q.used, q.pending - min(q.reserved, q.pending)) for q in queues}
    root = next(node for node in nodes.values() if node.queue.parent is None)
    for node in nodes.values():
        if node.queue.parent is not None:
            nodes[node.queue.parent].children.append(node)
    _mark(root, True)
    return root


def _mark(node: _Node, above: bool) -> None:
    """Whether a queue may lose anything is inherited; excess that no child may lose cannot be taken from the parent."""
    node.preemptible = above and node.queue.preemptible
    extra = max(Fraction(0), node.used - node.queue.guaranteed)
    if not node.children:
        node.untouchable, node.touchable = (Fraction(0), extra) if node.preemptible else (extra, Fraction(0))
        return
    for child in node.children:
        _mark(child, node.preemptible)
    node.pending = sum((child.pending for child in node.children), Fraction(0))
    below = sum((child.touchable for child in node.children), Fraction(0))
    node.touchable = min(below, extra)
    node.untouchable = extra - node.touchable


def _distribute(node: _Node, allowed: Fraction) -> None:
    if not node.children:
        return
    left = node.ideal
    for promised in (True, False):
        level = [child for child in node.children if (child.queue.guaranteed > 0) is promised]
        left = _share_out(level, left, by_guarantee=promised)
    excess = sum((max(Fraction(0), child.used - child.ideal) for child in node.children), Fraction(0))
    factor = min(Fraction(1), allowed / excess) if excess > 0 else Fraction(1)
    for child in node.children:
        child.excess = max(Fraction(0), child.used - child.ideal) * factor
        _distribute(child, allowed)


def _share_out(level: Sequence[_Node], left: Fraction, *, by_guarantee: bool) -> Fraction:
    for node in level:
        node.ideal = min(node.used, node.queue.guaranteed) + node.untouchable
        left -= node.ideal
    wanting = [node for node in level if _room(node) > 0]
    while wanting and left > 0:
        weights = {id(n): n.queue.guaranteed if by_guarantee else Fraction(1) for n in wanting}
        total = sum(weights.values(), Fraction(0))
        first = min((_served(node), -node.queue.priority) for node in wanting)
        offer = left
        for node in [node for node in wanting if (_served(node), -node.queue.priority) == first]:
            taken = min(offer * weights[id(node)] / total, _room(node))
            left -= taken
            node.ideal += taken
            if _room(node) <= 0:
                wanting.remove(node)
        if offer - left < Fraction(1, 10**6):
            break
    return left


def _served(node: _Node) -> Fraction:
    """How far a queue has come towards its guarantee; one that has no guarantee always comes last."""
    return node.ideal / node.queue.guaranteed if node.queue.guaranteed > 0 else Fraction(0)


def _room(node: _Node) -> Fraction:
    most = min(node.queue.limit, node.used + node.pending)
    if not node.children:
        most = min(most, max(node.queue.guaranteed, node.used))
    return max(Fraction(0), most - node.ideal)


def _leaves(node: _Node) -> Iterable[_Node]:
    if not node.children:
        yield node
    for child in node.children:
        yield from _leaves(child)


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
        found += (BrokenRule(index=index, field=name, **rest) for name, rest in _alone(queue, types))
        if queue.path in paths:
            rest = {"message": f"{queue.path!r} is there twice", "hint": f"the first is number {paths[queue.path] + 1}"}
            found.append(BrokenRule(index=index, field="path", **rest))
        paths.setdefault(queue.path, index)
    for index, queue in enumerate(queues):
        if queue.parent is not None and queue.parent not in paths:
            rest = {"message": f"{queue.path!r} has no parent {queue.parent!r}", "hint": "list the parent too"}
            found.append(BrokenRule(index=index, field="path", **rest))
    return found + list(_promised_too_much(queues, there)) + list(_cells_wrong(queues, there))


def _cells_wrong(queues: Sequence[Queue], nodes: Sequence[Node]) -> Iterator[BrokenRule]:
    """Pinned cells that are not there, or twice; more cells of a level than there are; cells of no leaf."""
    racks = {node.cells[-1] for node in nodes if node.cells}
    have = {"rack": len(racks), "node": len(nodes), "device": sum(len(node.devices) for node in nodes)}
    names = {node.id for node in nodes} | {name for node in nodes for name in node.cells}
    parents, owner, owned = {queue.parent for queue in queues}, dict[str, str](), Counter[str]()
    for index, queue in enumerate(queues):
        if (queue.cells or queue.pinned) and queue.path in parents:
            name = "cells" if queue.cells else "pinned"
            hint = "give them to the queues below it"
            yield BrokenRule(index=index, field=name, message=f"{queue.path!r} has queues below it", hint=hint)
        for name in queue.pinned:
            if nodes and name not in names:
                text = f"no node or rack has the name {name!r}"
                hint = nearest(name, sorted(names), "nodes and racks")
                yield BrokenRule(index=index, field="pinned", message=text, hint=hint)
            elif (other := owner.setdefault(name, queue.path)) != queue.path:
                yield BrokenRule(index=index, field="pinned", message=f"{name!r} is pinned for {other!r} already")
        for one in queue.cells if nodes else ():
            owned[one.level] += one.count
            if owned[one.level] > have[one.level]:
                text = f"with {queue.path!r} {owned[one.level]} cells of level {one.level} are owned"
                text += f", there are {have[one.level]}"
                yield BrokenRule(index=index, field="cells", message=text, hint="lower a count")


def _alone(queue: Queue, types: set[str] | None) -> Iterator[tuple[str, dict[str, str]]]:
    """Mistakes of one queue by itself; without ``types`` nothing is known of the devices there are."""
    if not all(NAME_PATTERN.match(part) for part in queue.path.split("/")):
        yield "path", {"message": f"{queue.path!r} is not NAME/NAME/...", "hint": "letters, digits, '-', '_' and '.'"}
    if not queue.weight > 0:
        yield "weight", {"message": f"{queue.weight} is not above 0"}
    if queue.min_user_percent is not None and not 0 <= queue.min_user_percent <= 100:
        yield "min_user_percent", {"message": f"{queue.min_user_percent:g} is not between 0 and 100"}
    if queue.user_limit_factor is not None and not queue.user_limit_factor >= 0:
        yield "user_limit_factor", {"message": f"{queue.user_limit_factor:g} is below 0"}
    if any(one.count < 1 for one in queue.cells):
        yield "cells", {"message": f"{queue.path!r} owns {min(one.count for one in queue.cells)} of a cell, at least 1"}
    most = _amounts(queue.limit)
    for kind, value in _amounts(queue.guaranteed).items():
        if value > most.get(kind, value):
            text = f"{_share(kind, value)} promised to {queue.path!r}, its limit is {_number(kind, most[kind])}"
            yield "guaranteed", {"message": text, "hint": "raise the limit or lower the guarantee"}
            break
    for name, res in (("guaranteed", queue.guaranteed), ("limit", queue.limit), ("user_limit", queue.user_limit)):
        if res is not None and min(res.cpus, res.gpus, res.memory_bytes) < 0:
            yield name, {"message": f"{queue.path!r} has an amount below 0", "hint": "leave out what is not limited"}
        if types is not None and res is not None and res.gpu_type is not None and res.gpu_type not in types:
            hint = nearest(res.gpu_type, sorted(types), "types")
            yield name, {"message": f"no node has devices of type {res.gpu_type!r}", "hint": hint}


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
                    message=f"with {queue.path!r} {_share(kind, sums[key])} promised, {owner} {_number(kind, have)}",
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


def _share(kind: str, value: float) -> str:
    if noun := {"gpus": "GPU", "cpus": "CPU"}.get(kind):
        return f"{counted(value, noun)} {'is' if value == 1 else 'are'}"
    return f"{_number(kind, value)} {'of memory' if kind == 'memory' else kind} are"


def _number(kind: str, value: float) -> str:
    return format_size(int(value)) if kind == "memory" else f"{value:g}"
