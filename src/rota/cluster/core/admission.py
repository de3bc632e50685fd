"""Admission: requests that can never run, why a job waits now, and the nearest requests that would start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, TypedDict

import numpy as np

from rota.cluster.core.capacity import OverLimit
from rota.cluster.core.jobs import JobAsk, LiveJob, Shape, Slot, Wait
from rota.cluster.core.placement import place
from rota.cluster.core.profile import Placer
from rota.cluster.core.state import LOST, State
from rota.spec.ids import JobId, NodeId, RoleName
from rota.spec.job import JobSpec
from rota.spec.reasons import Reason
from rota.spec.resources import Health, counted, format_size

LIMITS = (Reason.QUOTA_LIMIT, Reason.USER_LIMIT)


class RequestChange(TypedDict, total=False):
    """One change of a request: a setting and its new value, or a rule to drop between roles; a sentence for people."""

    set: str
    value: str | float | None
    drop: str
    roles: list[str]
    level: str
    text: str


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
    nearest: tuple[RequestChange, ...] = ()

    @property
    def text(self) -> str:
        """One sentence for people."""
        what = "there is" if self.reason in LIMITS else "the cluster has"
        return f"{self.role} asks {self.asked}; {what} {self.available}"

    @property
    def remedy(self) -> str:
        """What to ask for instead, or to add."""
        if self.nearest:
            return f"it would fit with {'; or with '.join(change.get('text', '') for change in self.nearest)}"
        if self.reason in LIMITS:
            return "ask for less, or an admin for a higher limit"
        if self.resource in ("gpu", "gpu_type"):
            return "ask for devices that there are (gpus: 0 is none), or add nodes that have these"
        return "ask for less, or add nodes that can hold it"


def empty_twin(state: State, spares: int = 0) -> State:
    """The same nodes with nothing on them and everything in order; nodes that left, and spares, are left out."""
    nodes = [node.with_health(Health.HEALTHY) for node, health in zip(state.nodes, state.node_health) if health != LOST]
    return State(nodes[: max(0, len(nodes) - spares)], state.queues.rows)


class EmptyTwins:
    """Empty twins of the present state by number of spares, each laid out once until a node or a queue changes."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[State, int, State]] = {}

    def of(self, state: State, spares: int) -> State:
        """``empty_twin``; whoever tries a shape on it goes back."""
        made = self._made.get(spares)
        if made is None or made[0] is not state or made[1] != state.marks:
            made = self._made[spares] = (state, state.marks, empty_twin(state, spares))
        return made[2]


def shape_feasible(empty: State, shape: Shape, queue: str | None = None) -> Shortfall | None:
    """None if the empty cluster (``empty_twin``), and the limits of the queue, could hold it; else what is short."""
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
    return counted(value / 1000, "CPU" if dim == "cpu" else f"{kind} GPU".strip())


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A changed request: what changed (``change``, one sentence in ``text``) and the shape that results."""

    change: RequestChange
    text: str
    shape: Shape


def roles_of(shape: Shape) -> dict[str, list[int]]:
    """Slots of each role, in order of first appearance."""
    roles: dict[str, list[int]] = {}
    for i in range(len(shape.slots)):
        roles.setdefault(shape.role(i), []).append(i)
    return roles


def without(shape: Shape, gone: set[int]) -> Shape:
    """The shape with some slots left out; constraints follow."""
    kept = [i for i in range(len(shape.slots)) if i not in gone]
    new = {old: i for i, old in enumerate(kept)}

    def moved(group: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new[i] for i in group if i in new)

    return Shape(
        slots=tuple(shape.slots[i] for i in kept),
        together=tuple((moved(group), level) for group, level in shape.together if len(moved(group)) > 1),
        apart=tuple((moved(a), moved(b), level) for a, b, level in shape.apart if moved(a) and moved(b)),
        names=tuple(shape.names[i] for i in kept) if shape.names else (),
        tied=tuple(moved(group) for group in shape.tied if len(moved(group)) > 1),
        close=tuple(moved(group) for group in shape.close if len(moved(group)) > 1),
    )


def with_instances(shape: Shape, role: str, count: int) -> Shape:
    """The shape with only the first ``count`` slots of a role."""
    return without(shape, set(roles_of(shape)[role][count:]))


def with_slots(shape: Shape, role: str, change: Callable[[Slot], Slot]) -> Shape:
    """The shape with every slot of a role changed."""
    mine = set(roles_of(shape)[role])
    return replace(shape, slots=tuple(change(s) if i in mine else s for i, s in enumerate(shape.slots)))


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number in ``low..high`` that fits, by bisection (fitting is monotone), or None."""
    if low > high or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def can_follow(spec: JobSpec, change: RequestChange) -> bool:
    """False for a number of instances that the mesh of their role does not have."""
    path, value = change.get("set", "").split("."), change.get("value")
    if path[0] != "roles" or path[-1] != "replicas" or not isinstance(value, int):
        return True
    role = spec.role(RoleName(path[1]))
    rest = prod(size for axis, size in role.mesh if axis != role.elastic_axis)
    return not role.mesh or (role.elastic_axis is not None and value % rest == 0)


def smaller(shape: Shape, fits: Callable[[Shape], bool]) -> Iterator[Variant]:
    """The least single changes that make the shape fit: instances, devices, cores, memory of a role; a constraint.

    A role with tied slots has the instances and devices that its plan is for.
    """
    planned = {shape.role(i) for group in shape.tied for i in group}
    for role, slots in roles_of(shape).items():
        rest = 1 if len(slots) == len(shape.slots) else 0
        most = 0 if role in planned else len(slots) - 1
        count = largest(max(rest, 1), most, lambda n, r=role: fits(with_instances(shape, r, n)))
        if count is not None:
            yield Variant(
                change={"set": f"roles.{role}.replicas", "value": count},
                text=f"{count} instead of {len(slots)} instances of {role}",
                shape=with_instances(shape, role, count),
            )
        yield from _smaller_slots(shape, role, shape.slots[slots[0]], fits, planned=role in planned)
    yield from _unbound(shape, fits)


def _smaller_slots(
    shape: Shape, role: str, slot: Slot, fits: Callable[[Shape], bool], *, planned: bool
) -> Iterator[Variant]:
    def attempt(name: str, n: int) -> Shape:
        return with_slots(shape, role, lambda s: replace(s, **{name: min(n, getattr(s, name))}))

    core = 1000 if fits(attempt("cpu_milli", 1000)) else 100  # below one core a tenth counts
    for name, unit, key in (("gpus", 1, "gpus"), ("cpu_milli", core, "cpus"), ("mem", 2**30, "memory")):
        if name == "gpus" and planned:
            continue
        have: int = getattr(slot, name)
        count = largest(1, -(-have // unit) - 1, lambda n, a=name, u=unit: fits(attempt(a, n * u)))
        if count is not None:
            value = f"{count}GiB" if name == "mem" else count if unit != 100 else count / 10
            was = {"mem": f"{have / 2**30:g}GiB", "cpu_milli": f"{have / 1000:g}"}.get(name, have)
            yield Variant(
                change={"set": f"roles.{role}.resources.{key}", "value": value},
                text=f"{key} {value} instead of {was} for each instance of {role}",
                shape=attempt(name, count * unit),
            )
    if slot.type is not None:
        other = with_slots(shape, role, lambda s: replace(s, type=None))
        if fits(other):
            yield Variant(
                change={"set": f"roles.{role}.resources.gpu_type", "value": None},
                text=f"any type of device instead of {slot.type} for {role}",
                shape=other,
            )


def _unbound(shape: Shape, fits: Callable[[Shape], bool]) -> Iterator[Variant]:
    for kind in ("together", "apart"):
        rules = getattr(shape, kind)
        for i, rule in enumerate(rules):
            free = replace(shape, **{kind: (*rules[:i], *rules[i + 1 :])})
            if fits(free):
                roles = list(dict.fromkeys(shape.role(s) for group in rule[:-1] for s in group))
                word = "collocate" if kind == "together" else "apart"
                yield Variant(
                    change={"drop": word, "roles": roles, "level": rule[-1]},
                    text=f"without {word} ({rule[-1]}) of {' and '.join(roles)}",
                    shape=free,
                )


HEALTHS = tuple(str(health) for health in Health)
NAMED_MAX = 8
"""Nodes that a sentence names at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many nodes are left for the most demanding slot after one more constraint."""

    constraint: str
    nodes_left: int


AWAITED = frozenset({Reason.AWAITING_PREEMPTION, Reason.AWAITING_RELEASE})
"""Reasons of jobs that have claimed what others are giving back, as they must or as they stop for good."""


def waits_for_others(state: State, jobs: list[JobId], nodes: list[NodeId]) -> Wait:
    """A job waits for what these jobs are giving back, and will lie on these nodes."""
    gpus = sum(state.jobs[job].ask.shape.gpus for job in jobs)
    return Wait(
        reason=Reason.AWAITING_RELEASE if all(state.jobs[job].final for job in jobs) else Reason.AWAITING_PREEMPTION,
        text=f"{counted(len(jobs), 'job')} {'is' if len(jobs) == 1 else 'are'} giving {counted(gpus, 'GPU')} back.",
        fields={"jobs": list(jobs), "gpus": gpus, "nodes": nodes},
    )


def with_spares(wait: Wait, spares: list[NodeId]) -> Wait:
    """A verdict that was reached without these nodes, which are kept for failover."""
    text = f"{wait.text} Held back for failover: {', '.join(spares[:NAMED_MAX])}."
    return replace(wait, text=text.strip(), fields={**wait.fields, "spares": spares})


class HeldBack(NamedTuple):
    """Jobs that are not stopped for one, until something happens that decisions do not cause, or the next round.

    ``again``: they were stopped for it already. Else it was stopped for them, or for one that was stopped for them.
    """

    jobs: tuple[JobId, ...] = ()
    again: bool = False


def held_back(state: State, row: LiveJob, chosen: Sequence[JobId], round_s: float, now: float) -> HeldBack:
    """Which of the jobs that a policy would stop for this one are not: who is stopped for whom stays a strict order."""
    begin = now // round_s * round_s if round_s else 0.0
    pairs = {pair for pair, at in dict(state.stopped_for).items() if at >= begin}  # a copy: others decide
    before = found = {row.ask.id, row.ask.key[0]}  # a log names the job that a part is of
    again = all(pairs & {(job, one) for one in before} for job in chosen)
    while found and not again:
        found = {other for job, other in pairs if job in found} - before
        before = before | found
    return HeldBack(tuple(job for job in chosen if again or job in before), again)


def with_held_back(wait: Wait, found: HeldBack, *, until_round: bool) -> Wait:
    """A verdict on a job for which these are not stopped."""
    if not found.jobs:
        return wait
    names = ", ".join(found.jobs[:NAMED_MAX])
    until = "the next round" if until_round else "a job arrives or ends, or a node changes"
    stops = f"it was stopped for {names}, or for a job that was stopped for that"
    stops = f"{names} stopped for it already" if found.again else stops
    text = f"{wait.text or wait.reason.info.text} It waits for {names}, not stopped for it until {until}: {stops}."
    return replace(wait, text=text, fields={**wait.fields, "held_back_by": list(found.jobs)})


def hardest(shape: Shape) -> Slot:
    """The slot that asks most: devices, then a share, then cores, then memory."""
    return max(shape.slots, key=lambda s: (s.gpus, s.milli, s.cpu_milli, s.mem))


def tally(state: State, shape: Shape) -> list[Tally]:
    """Nodes left for the hardest slot, or group of slots that a plan ties, constraint by constraint."""
    slot = hardest(shape.joined.shape)
    wanted = slot.gpus or (1 if slot.milli else 0)
    typed = state.type_rows(slot.type)
    per_node = np.zeros((len(state.nodes), len(state.types)), dtype=np.int32)
    np.add.at(per_node, (state.dev_node, state.dev_type), 1)
    free = state.free if slot.gpus else _shareable(state, slot.milli)
    steps = (
        ("in the cluster", state.node_health != LOST),
        ("in order", state.usable),
        ("of the asked type", (per_node[:, typed] > 0).any(axis=1) if wanted else state.usable),
        ("with that many devices", (per_node[:, typed] >= wanted).any(axis=1) if wanted else state.usable),
        ("with that many free devices", (free[:, typed] >= wanted).any(axis=1) if wanted else state.usable),
        ("with free cores", state.cpu >= slot.cpu_milli),
        ("with free memory", state.mem >= slot.mem),
    )
    left = np.ones(len(state.nodes), dtype=np.bool_)
    found: list[Tally] = []
    for name, mask in steps:
        left = left & mask
        found.append(Tally(constraint=name, nodes_left=int(left.sum())))
    return found


def _shareable(state: State, milli: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    count = np.zeros((len(state.nodes), len(state.types)), dtype=np.int32)
    able = (state.dev_milli >= milli) & (state.dev_health == 0)
    np.add.at(count, (state.dev_node[able], state.dev_type[able]), 1)
    return count


def waits_because(state: State, ask: JobAsk, placer: Placer) -> Wait:
    """The binding constraint of a job that cannot be placed now, with its numbers.

    Too few free devices in all is named first. Then one constraint at a time is relaxed on a trial state; the first
    whose relaxation lets the whole gang be placed binds. If none does, the free devices are not together.
    """
    shape = ask.shape
    if (wait := too_few_free(state, shape)) is not None:
        return wait
    fields = _gpu_fields(state, shape)
    if sick_nodes(state) and _fits_with_all_nodes(state, ask, placer):
        return _out_of_use(state, "It would fit on nodes that take no new work", fields)
    for reason, relaxed in _relaxations(shape):
        if _fits_now(state, replace(ask, shape=relaxed), placer):
            if reason is Reason.TOPOLOGY:
                return _too_far(state, ask, placer, fields)
            return Wait(reason=reason, text=_TEXTS[reason], fields={**fields})
    if not shape.gpu_milli:
        return _cores_and_memory(state, shape)
    return Wait(reason=Reason.FRAGMENTED, text=_TEXTS[Reason.FRAGMENTED], fields={**fields})


def too_few_free(state: State, shape: Shape) -> Wait | None:
    """The verdict on a shape that asks more devices than are free in all; None if that many are.

    Where it asks more than the nodes in use have, those that are out of use bind, whoever else holds devices.
    """
    fields = _gpu_fields(state, shape)
    free = fields["free_gpus"]
    if fields["asked_gpus"] <= free:
        return None
    text = f"Needs {counted(fields['asked_gpus'], 'GPU')}; {free:g} {_are(free)} free"
    bad = _out_of_order(state)
    if free + bad >= fields["asked_gpus"]:
        how = "take no new work" if _all_drained(sick_nodes(state)) else "are out of order"
        return _out_of_use(state, f"{text}, {bad} {how}", {**fields, "bad_gpus": bad})
    in_use, there = usable_milli(state, shape) / 1000, _present_milli(state, shape) / 1000
    if in_use < fields["asked_gpus"] <= there:
        text = f"Needs {counted(fields['asked_gpus'], 'GPU')}; the nodes that take new work have {in_use:g}"
        return _out_of_use(state, text, {**fields, "bad_gpus": there - in_use})
    return Wait(reason=Reason.NO_FREE_DEVICES, text=f"{text}.", fields={**fields})


def _are(n: float) -> str:
    return "is" if n == 1 else "are"


def _gpu_fields(state: State, shape: Shape) -> dict[str, float]:
    return {"asked_gpus": shape.gpu_milli / 1000, "free_gpus": _free_of_types(state, shape) / 1000}


def _cores_and_memory(state: State, shape: Shape) -> Wait:
    """Of a job without devices: what it asks of cores and memory in all, what is free and in use on usable nodes."""
    rows = np.flatnonzero(state.usable)
    cpu, memory = sum(slot.cpu_milli for slot in shape.slots), sum(slot.mem for slot in shape.slots)
    free_cpu, free_memory = int(state.cpu[rows].sum()), int(state.mem[rows].sum())
    used_cpu = sum(round(state.nodes[row].cpus * 1000) for row in rows.tolist()) - free_cpu
    used_memory = sum(state.nodes[row].memory_bytes for row in rows.tolist()) - free_memory
    free = free_cpu / 1000
    text = f"Needs {counted(cpu / 1000, 'core')}; {free:g} {_are(free)} free and {used_cpu / 1000:g} in use"
    fields: dict[str, object] = {"asked_cpus": cpu / 1000, "free_cpus": free_cpu / 1000, "used_cpus": used_cpu / 1000}
    if memory:
        sizes = {"asked": memory, "free": free_memory, "used": used_memory}
        text += f"; memory: {', '.join(f'{format_size(size)} {word}' for word, size in sizes.items())}"
        fields |= {f"{word}_memory": size for word, size in sizes.items()}
    if cpu <= free_cpu and memory <= free_memory:
        text += ", but not together on nodes as the gang needs them"
    return Wait(reason=Reason.CPU_OR_MEMORY, text=f"{text}.", fields=fields)


def sick_nodes(state: State) -> dict[str, str]:
    """Nodes that are there and take no new work, with their health."""
    rows = np.flatnonzero((state.node_health != 0) & (state.node_health != LOST))
    return {state.nodes[row].id: HEALTHS[int(state.node_health[row])] for row in rows.tolist()}


def _all_drained(sick: Mapping[str, str]) -> bool:
    """True when people took these nodes out of use, and nothing is wrong with them."""
    return bool(sick) and {*sick.values()} <= {Health.DRAINED, Health.CORDONED}


def _out_of_use(state: State, text: str, fields: Mapping[str, object]) -> Wait:
    nodes = sick_nodes(state)
    named = ", ".join(f"{node} is {health}" for node, health in list(nodes.items())[:NAMED_MAX])
    return Wait(
        reason=Reason.NODES_DRAINED if _all_drained(nodes) else Reason.BAD_CELLS,
        text=f"{text}: {named}." if named else f"{text}.",
        fields={**fields, "nodes": nodes},
    )


def _fits_with_all_nodes(state: State, ask: JobAsk, placer: Placer) -> bool:
    with state.txn() as txn:
        for node in sick_nodes(state):
            state.mark(txn, NodeId(node), Health.HEALTHY)
        return placer.place(state, txn, LiveJob(ask=ask)) is not None


_TEXTS = {
    Reason.WRONG_TYPE: "Devices of another type are free; those of the asked type are not.",
    Reason.CPU_OR_MEMORY: "The cores or the memory that the gang asks beside its devices are not free.",
    Reason.TOPOLOGY: "Enough is free, but not as close or as far apart as the roles ask.",
    Reason.FRAGMENTED: "Enough devices are free in all, but not together on nodes as the gang needs them.",
}


def _relaxations(shape: Shape) -> Iterator[tuple[Reason, Shape]]:
    if any(slot.type for slot in shape.slots):
        yield Reason.WRONG_TYPE, replace(shape, slots=tuple(replace(s, type=None) for s in shape.slots))
    if shape.gpu_milli and any(slot.cpu_milli or slot.mem for slot in shape.slots):
        yield Reason.CPU_OR_MEMORY, replace(shape, slots=tuple(replace(s, cpu_milli=0, mem=0) for s in shape.slots))
    if shape.together or shape.apart or shape.tied:
        yield Reason.TOPOLOGY, replace(shape, together=(), apart=(), tied=(), close=())


def _too_far(state: State, ask: JobAsk, placer: Placer, fields: Mapping[str, object]) -> Wait:
    """Enough is free, but not where the gang needs it: the first rule without which it fits, and its level."""
    shape = ask.shape
    for relaxed, text, more in _rules(state, shape):
        if _fits_now(state, replace(ask, shape=relaxed), placer):
            return Wait(reason=Reason.TOPOLOGY, text=text, fields={**fields, **more})
    return Wait(reason=Reason.TOPOLOGY, text=_TEXTS[Reason.TOPOLOGY], fields={**fields})


def _rules(state: State, shape: Shape) -> Iterator[tuple[Shape, str, dict[str, object]]]:
    """The shape without each of its rules about closeness, what the rule says, and its numbers."""

    def roles(slots: Sequence[int]) -> list[str]:
        return list(dict.fromkeys(shape.role(i) for i in slots))

    if shape.tied:
        group = max(shape.tied, key=lambda group: sum(shape.slots[i].gpus for i in group))
        gpus = sum(shape.slots[i].gpus for i in group)
        nodes = tally(state, shape)[-1].nodes_left
        what = counted(gpus, "GPU") if gpus else f"{len(group)} instances"
        text = (
            f"The plan of {shape.role(group[0])} needs {len(shape.tied)} times {what} on one node; nodes that have "
            f"them free: {nodes}."
        )
        numbers = {"level": "node", "rule": "plan", "roles": roles(group), "groups": len(shape.tied)}
        yield replace(shape, tied=(), close=()), text, {**numbers, "group_gpus": gpus, "nodes_left": nodes}
    for i, (group, level) in enumerate(shape.together):
        rest = replace(shape, together=(*shape.together[:i], *shape.together[i + 1 :]))
        text = f"Enough is free, but no {level} has room for {' and '.join(roles(group))} together."
        yield rest, text, {"level": level, "rule": "collocate", "roles": roles(group)}
    for i, (left, right, level) in enumerate(shape.apart):
        rest = replace(shape, apart=(*shape.apart[:i], *shape.apart[i + 1 :]))
        names = roles((*left, *right))
        text = f"Enough is free, but not for {' and '.join(names)} apart, each in a {level} of its own."
        yield rest, text, {"level": level, "rule": "apart", "roles": names}


def _fits_now(state: State, ask: JobAsk, placer: Placer) -> bool:
    with state.txn() as txn:
        return placer.place(state, txn, LiveJob(ask=ask)) is not None


def _free_of_types(state: State, shape: Shape) -> int:
    """Free thousandths on usable nodes, of the asked types if every device slot names one."""
    if _all_alike(state, shape):
        return int(state.dev_milli.sum())
    return int(state.dev_milli[_of_types(state, shape) & _in_service(state)].sum())


def usable_milli(state: State, shape: Shape) -> int:
    """Thousandths of the devices of the asked types that take new work, free or not."""
    if _all_alike(state, shape):
        return 1000 * len(state.dev_milli)
    return 1000 * int((_of_types(state, shape) & _in_service(state)).sum())


def _present_milli(state: State, shape: Shape) -> int:
    if _all_alike(state, shape):
        return 1000 * len(state.dev_milli)
    return 1000 * int((_of_types(state, shape) & (state.node_health[state.dev_node] != LOST)).sum())


def _all_alike(state: State, shape: Shape) -> bool:
    """Whether all devices are in order and of the asked types: then they are counted without a look at each."""
    return _all_well(state) and bool(_wanted(state, shape).all())


def _of_types(state: State, shape: Shape) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return _wanted(state, shape)[state.dev_type]


def _wanted(state: State, shape: Shape) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    wanted = np.zeros(len(state.types), dtype=np.bool_)
    for slot in shape.slots:
        if slot.gpus or slot.milli:
            wanted[state.type_rows(slot.type)] = True
    return wanted


def _in_service(state: State) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return (state.dev_health == 0) & state.usable[state.dev_node]


def _all_well(state: State) -> bool:
    return not state.node_health.any() and not state.dev_health.any()


def _out_of_order(state: State) -> int:
    """Idle devices that only their health, or that of their node, keeps from being used."""
    if _all_well(state):
        return 0
    present = state.node_health[state.dev_node] != LOST
    sick = (state.dev_health != 0) | ~state.usable[state.dev_node]
    return int((present & sick & (state.dev_milli == 1000)).sum())


def unusable_share(state: State) -> float:
    """Share of the free devices that the waiting mix could not use where they are, 0 to 1.

    For every waiting line: free devices minus those that whole members of it could take node by node; averaged over
    lines weighted by their length.
    """
    free = np.where(state.usable[:, None], state.free, 0).sum(axis=1)
    total = int(free.sum())
    if total == 0:
        return 0.0
    weighted, count = 0.0, 0
    for key, line in state.lines.items():
        gpus = max((slot.gpus for slot in key.shape.slots), default=0)
        if gpus:
            weighted += len(line) * float((free % gpus).sum()) / total
            count += len(line)
    return weighted / count if count else 0.0
