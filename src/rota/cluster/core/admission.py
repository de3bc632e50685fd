"""Refuse what can never run, naming the shortfall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rota.cluster.core.asks import Shape, Slot, compile_shape
from rota.cluster.core.placement import place
from rota.cluster.core.quota import OverLimit
from rota.cluster.core.snapshot import LOST, State
from rota.cluster.core.variants import smaller
from rota.spec.gang import GangRequest
from rota.spec.reasons import Reason
from rota.spec.resources import Health, format_size

LIMITS = (Reason.QUOTA_LIMIT, Reason.USER_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Why a request fits no state of the cluster: the role, what it asks, the most there is, and what would fit.

    ``nearest`` lists single changes, each of which makes the whole job feasible.
    """

    reason: Reason
    role: str
    resource: str
    asked: str
    available: str
    nearest: tuple[dict[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """One sentence for people."""
        what = "there is" if self.reason in LIMITS else "the cluster has"
        return f"{self.role} asks {self.asked}; {what} {self.available}"

    @property
    def remedy(self) -> str:
        """What to ask for instead, or to add."""
        if self.nearest:
            return f"it would fit with {'; or with '.join(str(change['text']) for change in self.nearest)}"
        if self.reason in LIMITS:
            return "ask for less, or an admin for a higher limit"
        if self.resource in ("gpu", "gpu_type"):
            return "ask for devices that there are (gpus: 0 is none), or add nodes that have these"
        return "ask for less, or add nodes that can hold it"


def empty_twin(state: State, spares: int = 0) -> State:
    """The same nodes with nothing on them and everything in order; nodes that left, and spares, are left out."""
    nodes = [node.with_health(Health.HEALTHY) for node, health in zip(state.nodes, state.node_health) if health != LOST]
    return State(nodes[: max(0, len(nodes) - spares)], state.queues.rows)


def feasible(
    state: State, requests: Sequence[GangRequest], queue: str | None = None, spares: int = 0
) -> Shortfall | None:
    """None if the empty cluster, and the limits of the queue, could hold all gangs at once; else what is short."""
    return shape_feasible(empty_twin(state, spares), compile_shape(requests), queue)


def shape_feasible(empty: State, shape: Shape, queue: str | None = None) -> Shortfall | None:
    """``feasible`` for a compiled shape and an empty state (``empty_twin``)."""
    if _fits(empty, shape, queue):
        return None
    short = _limit_shortfall(empty, shape, queue) or _slot_shortfall(empty, shape) or _gang_shortfall(empty, shape)
    nearest = tuple(
        {**variant.change, "text": variant.text} for variant in smaller(shape, lambda s: _fits(empty, s, queue))
    )
    return replace(short, nearest=nearest)


def _fits(empty: State, shape: Shape, queue: str | None) -> bool:
    if queue is not None and empty.over_limit(queue, "", shape):
        return False
    with empty.txn() as txn:
        return place(empty, txn, shape) is not None


def _limit_shortfall(empty: State, shape: Shape, queue: str | None) -> Shortfall | None:
    over = empty.over_limit(queue, "", shape) if queue is not None else None
    if over is None:
        return None
    return Shortfall(
        reason=limit_reason(over),
        role="the job",
        resource=over.dim,
        asked=f"{amount(over.dim, over.asked)} in all",
        available=f"a limit of {amount(over.dim, over.allowed)} for {'queue' if over.user is None else 'a user of'} "
        f"{over.queue}",
    )


def limit_reason(over: OverLimit) -> Reason:
    """Whether the limit is that of a queue or of a user in it."""
    return Reason.QUOTA_LIMIT if over.user is None else Reason.USER_LIMIT


def amount(dim: str, value: int) -> str:
    """A quota number (thousandths, or bytes for memory) with its unit."""
    if dim == "mem":
        return f"{format_size(value)} memory"
    kind = dim.partition(":")[2]
    return f"{value / 1000:g} {'cpus' if dim == 'cpu' else f'{kind} gpus' if kind else 'gpus'}"


def _slot_shortfall(empty: State, shape: Shape) -> Shortfall | None:
    """The first slot, or group of slots that a plan ties, that alone fits no node."""
    checked: set[Slot] = set()
    joined = shape.joined
    for i, slot in enumerate(joined.shape.slots):
        if slot in checked:
            continue
        checked.add(slot)
        with empty.txn() as txn:
            if place(empty, txn, Shape(slots=(slot,))) is None:
                count = len(joined.groups[i])
                role = shape.role(joined.groups[i][0])
                return _largest_node(empty, slot, role if count == 1 else f"the plan of {role}")
    return None


def _largest_node(empty: State, slot: Slot, role: str) -> Shortfall:
    """What one node lacks for a slot."""
    columns = empty.type_rows(slot.type)
    if not columns:
        return Shortfall(
            reason=Reason.WRONG_TYPE,
            role=role,
            resource="gpu_type",
            asked=f"devices of type {' or '.join(slot.types)}",
            available=f"devices of type {', '.join(t for t in empty.types if t) or 'none'}",
        )
    free = empty.free[:, columns].max(axis=1, initial=0).astype(np.int64) * 1000
    checks = (
        ("gpu", free, max(slot.gpus * 1000, slot.milli)),
        ("cpu", empty.cpu, slot.cpu_milli),
        ("mem", empty.mem, slot.mem),
    )
    able = np.ones(len(empty.nodes), dtype=np.bool_)
    for dim, column, wanted in checks:
        most = int(column[able].max(initial=0))
        if most < wanted:
            return Shortfall(
                reason=Reason.TOO_LARGE,
                role=role,
                resource=dim,
                asked=f"{amount(dim, wanted)} on one node",
                available=f"at most {amount(dim, most)} on one node",
            )
        able &= column >= wanted
    return Shortfall(reason=Reason.TOO_LARGE, role=role, resource="node", asked="one node", available="no such node")


def _gang_shortfall(empty: State, shape: Shape) -> Shortfall:
    """Every slot fits alone but not all at once: by totals, else by closeness."""
    totals = (
        ("gpu", int(empty.free.sum()) * 1000, shape.gpu_milli),
        ("cpu", int(empty.cpu.sum()), sum(s.cpu_milli for s in shape.slots)),
        ("mem", int(empty.mem.sum()), sum(s.mem for s in shape.slots)),
    )
    for dim, have, wanted in totals:
        if wanted > have:
            return Shortfall(
                reason=Reason.TOO_LARGE,
                role="the whole gang",
                resource=dim,
                asked=f"{amount(dim, wanted)} at once",
                available=f"{amount(dim, have)} in all",
            )
    bound = bool(shape.together or shape.apart or shape.tied)
    rules = " with their collocate and apart rules" if shape.together or shape.apart else ""
    rules += f" with {len(shape.tied)} groups on one node each by their plan" if shape.tied else ""
    return Shortfall(
        reason=Reason.TOPOLOGY if bound else Reason.TOO_LARGE,
        role="the whole gang",
        resource="topology" if bound else "nodes",
        asked=f"{len(shape.slots)} bundles at once{rules}",
        available=f"{len(empty.nodes)} nodes on which they do not fit together",
    )
