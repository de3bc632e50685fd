"""Two jobs on the same devices where one would wait, kept only while both together run faster than one alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rota.cluster.core.rows import Held, JobRow
from rota.cluster.core.snapshot import State
from rota.spec.ids import JobId

HALF = 500
"""Thousandths of a device that each of two has."""

Pair = tuple[str, str]


def kind_of(row: JobRow) -> str:
    """Jobs of one kind are expected to behave alike beside others: their label ``class``, else all."""
    return str(row.ask.labels.get("class", ""))


def pair_of(one: JobRow, other: JobRow) -> Pair:
    """The kinds of two jobs, in order."""
    first, second = sorted((kind_of(one), kind_of(other)))
    return first, second


def partners(state: State) -> Iterator[tuple[JobRow, JobRow | None]]:
    """Running jobs that have half of their devices, each pair once, the older job first; None: it is alone there."""
    by_devices: dict[tuple[int, ...], list[JobRow]] = {}
    for group in state.running.values():
        for job in group:
            row = state.jobs[job]
            if row.held[0].milli == HALF and row.ask.shape.slots[0].gpus:
                by_devices.setdefault(row.held[0].devices, []).append(row)
    for rows in by_devices.values():
        rows.sort(key=lambda row: (row.started_at, row.ask.id))
        yield rows[0], rows[1] if len(rows) > 1 else None


def share_with(
    state: State, row: JobRow, undone: dict[Pair, None]
) -> tuple[JobId, tuple[Held, ...], tuple[Held, ...]] | None:
    """A running job that the waiting one could share all devices with, and what both hold then; the oldest first.

    Only jobs of one slot of equally many whole devices share, two at most, and no pair of kinds that was undone.
    """
    slot = row.ask.shape.slots[0]
    if not slot.gpus or row.ask.shape.gpu_milli != slot.gpus * 1000 or not row.ask.preemptible:
        return None
    able = [
        other
        for group in state.running.values()
        for other in (state.jobs[job] for job in group)
        if len(other.held) == 1
        and not other.held[0].milli
        and other.ask.preemptible
        and other.ask.shape.slots[0].gpus == slot.gpus
        and int(state.dev_type[other.held[0].devices[0]]) in state.type_rows(slot.type)
        and pair_of(row, other) not in undone
        and state.cpu[other.held[0].node] >= slot.cpu_milli
        and state.mem[other.held[0].node] >= slot.mem
        and not state.node_health[other.held[0].node]
    ]
    if not able:
        return None
    other = min(able, key=lambda other: (other.started_at, other.ask.id))
    held = other.held[0]
    mine = Held(held.node, held.devices, HALF, slot.cpu_milli, slot.mem)
    return other.ask.id, (replace(held, milli=HALF),), (mine,)


def too_slow(one: JobRow, other: JobRow, gain: float, now: float, round_s: float) -> bool:
    """Whether two that share run at most ``1 + gain`` times as fast as one alone, after a round in which to measure."""
    if one.rate is None or other.rate is None or other.started_at // round_s == now // round_s:
        return False
    return one.rate + other.rate <= 1.0 + gain
