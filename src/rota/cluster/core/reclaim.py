"""Take back what queues lent: ideal use of every queue of the tree, and how much of the excess is preempted now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueUse:
    """One queue of a tree in one resource. ``reserved`` counts as used by its owner but asks for nothing."""

    name: str
    parent: str | None
    guaranteed: Fraction
    limit: Fraction
    used: Fraction
    pending: Fraction
    reserved: Fraction = Fraction(0)
    preemptible: bool = True


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
    queue: QueueUse
    used: Fraction
    pending: Fraction
    children: list[_Node] = field(default_factory=list["_Node"])
    preemptible: bool = True
    untouchable: Fraction = Fraction(0)
    touchable: Fraction = Fraction(0)
    ideal: Fraction = Fraction(0)
    excess: Fraction = Fraction(0)


def reclaim(queues: Sequence[QueueUse], rules: ReclaimRules) -> dict[str, Fraction]:
    """How much every leaf should give back now; leaves that give nothing are left out.

    Per level, every queue starts at what it uses of its guarantee, plus the excess that nobody may touch. The remainder
    goes to the most under-served first, in proportion to guarantees among those that still want, up to the limit and
    to what is used and pending, and never beyond ``max(guaranteed, used)``. So two queues that are both above their
    guarantee are never balanced, and a parent below its guarantee loses nothing to outsiders. Source: the
    capacity scheduler of Hadoop YARN, proportional preemption.
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


def _tree(queues: Sequence[QueueUse]) -> _Node:
    nodes = {q.name: _Node(q, q.used + q.reserved, q.pending) for q in queues}
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
        lowest = min(_served(node) for node in wanting)
        offer = left
        for node in [node for node in wanting if _served(node) == lowest]:
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
    most = max(node.queue.guaranteed, node.used)
    return max(Fraction(0), min(node.queue.limit, node.used + node.pending, most) - node.ideal)


def _leaves(node: _Node) -> Iterable[_Node]:
    if not node.children:
        yield node
    for child in node.children:
        yield from _leaves(child)


@dataclass(slots=True)
class GraceBook:
    """Mark, notify, wait, kill: what was announced to each queue, and since when."""

    wait_s: float
    marked: dict[str, tuple[Fraction, float]] = field(default_factory=dict[str, tuple[Fraction, float]])

    def round(self, wanted: dict[str, Fraction], now: float) -> tuple[dict[str, Fraction], dict[str, Fraction]]:
        """What to announce now (only what is new), and what to stop because its time is up."""
        notify: dict[str, Fraction] = {}
        kill: dict[str, Fraction] = {}
        self.marked = {name: mark for name, mark in self.marked.items() if name in wanted}
        for name, amount in wanted.items():
            known, since = self.marked.get(name, (Fraction(0), now))
            if amount > known:
                notify[name] = amount - known
                self.marked[name] = (amount, since)
            if now - since >= self.wait_s and known > 0:
                kill[name] = min(amount, known)
        return notify, kill
