"""Which constraint keeps a job from starting: tallies of nodes, and the first relaxation that would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rota.cluster.core.asks import JobAsk, Shape, Slot
from rota.cluster.core.plugins import Placer
from rota.cluster.core.rows import JobRow, Wait
from rota.cluster.core.snapshot import LOST, State
from rota.spec.ids import JobId, NodeId
from rota.spec.reasons import Reason
from rota.spec.resources import Health, format_size

HEALTHS = tuple(str(health) for health in Health)
NAMED_MAX = 8
"""Nodes that a sentence names at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many nodes are left for the most demanding slot after one more constraint."""

    constraint: str
    nodes_left: int


def awaits(state: State, jobs: list[JobId], nodes: list[NodeId]) -> Wait:
    """A job waits for what these jobs are giving back, and will lie on these nodes."""
    gpus = sum(state.jobs[job].ask.shape.gpus for job in jobs)
    return Wait(
        reason=Reason.AWAITING_PREEMPTION,
        text=f"{len(jobs)} jobs are giving {gpus} gpus back.",
        fields={"jobs": list(jobs), "gpus": gpus, "nodes": nodes},
    )


def with_spares(wait: Wait, spares: list[NodeId]) -> Wait:
    """A verdict that was reached without these nodes, which are kept for failover."""
    text = f"{wait.text} Held back for failover: {', '.join(spares[:NAMED_MAX])}."
    return replace(wait, text=text.strip(), fields={**wait.fields, "spares": spares})


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
        if _fits(state, replace(ask, shape=relaxed), placer):
            if reason is Reason.TOPOLOGY:
                return _too_far(state, ask, placer, fields)
            return Wait(reason=reason, text=_TEXTS[reason], fields={**fields})
    if not shape.gpu_milli:
        return _cores_and_memory(state, shape)
    return Wait(reason=Reason.FRAGMENTED, text=_TEXTS[Reason.FRAGMENTED], fields={**fields})


def too_few_free(state: State, shape: Shape) -> Wait | None:
    """The verdict on a shape that asks more devices than are free in all; None if that many are."""
    fields = _gpu_fields(state, shape)
    free = fields["free_gpus"]
    if fields["asked_gpus"] <= free:
        return None
    text = f"{fields['asked_gpus']:g} gpus are asked, {free:g} are free"
    bad = _out_of_order(state)
    if free + bad >= fields["asked_gpus"]:
        return _out_of_use(state, f"{text}, {bad} are out of order", {**fields, "bad_gpus": bad})
    return Wait(reason=Reason.NO_FREE_DEVICES, text=f"{text}.", fields={**fields})


def _gpu_fields(state: State, shape: Shape) -> dict[str, float]:
    return {"asked_gpus": shape.gpu_milli / 1000, "free_gpus": _free_of_types(state, shape) / 1000}


def _cores_and_memory(state: State, shape: Shape) -> Wait:
    """Of a job without devices: what it asks of cores and memory in all, what is free and in use on usable nodes."""
    rows = np.flatnonzero(state.usable)
    cpu, memory = sum(slot.cpu_milli for slot in shape.slots), sum(slot.mem for slot in shape.slots)
    free_cpu, free_memory = int(state.cpu[rows].sum()), int(state.mem[rows].sum())
    used_cpu = sum(round(state.nodes[row].cpus * 1000) for row in rows.tolist()) - free_cpu
    used_memory = sum(state.nodes[row].memory_bytes for row in rows.tolist()) - free_memory
    text = f"{cpu / 1000:g} cores are asked, {free_cpu / 1000:g} are free and {used_cpu / 1000:g} in use"
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


def _out_of_use(state: State, text: str, fields: Mapping[str, object]) -> Wait:
    nodes = sick_nodes(state)
    named = ", ".join(f"{node} is {health}" for node, health in list(nodes.items())[:NAMED_MAX])
    return Wait(
        reason=Reason.BAD_CELLS, text=f"{text}: {named}." if named else f"{text}.", fields={**fields, "nodes": nodes}
    )


def _fits_with_all_nodes(state: State, ask: JobAsk, placer: Placer) -> bool:
    with state.txn() as txn:
        for node in sick_nodes(state):
            state.mark(txn, NodeId(node), Health.HEALTHY)
        return placer.place(state, txn, JobRow(ask=ask)) is not None


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
        if _fits(state, replace(ask, shape=relaxed), placer):
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
        what = f"{gpus} gpus" if gpus else f"{len(group)} instances"
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


def _fits(state: State, ask: JobAsk, placer: Placer) -> bool:
    with state.txn() as txn:
        return placer.place(state, txn, JobRow(ask=ask)) is not None


def _free_of_types(state: State, shape: Shape) -> int:
    """Free thousandths on usable nodes, of the asked types if every device slot names one."""
    wanted = {row for slot in shape.slots if slot.gpus or slot.milli for row in state.type_rows(slot.type)}
    if len(wanted) == len(state.types) and _all_well(state):
        return int(state.dev_milli.sum())
    able = (state.dev_health == 0) & state.usable[state.dev_node]
    if len(wanted) < len(state.types):
        able &= np.isin(state.dev_type, sorted(wanted))
    return int(state.dev_milli[able].sum())


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
