"""Idle devices for running jobs that can use more, given back before anybody waits. Source: Gandiva, section 3.2."""

from __future__ import annotations

from dataclasses import replace

from rota.cluster.core.plugins import Placer
from rota.cluster.core.rows import Held, JobRow
from rota.cluster.core.snapshot import State
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId


def _lent(row: JobRow) -> tuple[Held, ...]:
    """What a job holds above what it asked for; its own slots come first."""
    return row.held[len(row.ask.shape.slots) :]


def _able(state: State) -> list[JobRow]:
    """Running jobs that can use more than they asked for, in the order of their ids."""
    jobs = sorted(job for group in state.running.values() for job in group)
    return [row for row in (state.jobs[job] for job in jobs) if row.ask.slots_max and row.ask.shape.uniform]


def grown(state: State, txn: Txn, placer: Placer) -> dict[JobId, tuple[Held, ...]]:
    """Who gets which slots: one more each in turn, who has least of what it asked first, as long as there is room."""
    held = {row.ask.id: row.held for row in _able(state)}
    open_ones = dict(held)
    with txn.trial():
        while open_ones:
            job = min(open_ones, key=lambda job: (len(held[job]) / len(state.jobs[job].ask.shape.slots), job))
            row = state.jobs[job]
            one = replace(row.ask.shape, slots=row.ask.shape.slots[:1], names=row.ask.shape.names[:1])
            more = None
            if len(held[job]) < row.ask.slots_max:
                more = placer.place(state, txn, replace(row, ask=replace(row.ask, shape=one)))
            if more is None:
                del open_ones[job]
                continue
            for slot in more:
                state.take(txn, slot, 1)
            held[job] += more
    return {job: slots for job, slots in held.items() if slots != state.jobs[job].held}


def shrunk_for(state: State, txn: Txn, row: JobRow, placer: Placer) -> dict[JobId, tuple[Held, ...]]:
    """Whose lent slots go back so that the job fits: only those on the nodes it gets; none if it would not fit."""
    lenders = [other for other in _able(state) if _lent(other)]
    with txn.trial():
        for other in lenders:
            for slot in _lent(other):
                state.take(txn, slot, -1)
        held = placer.place(state, txn, row) if lenders else None
    nodes = {slot.node for slot in held or ()}
    kept: dict[JobId, tuple[Held, ...]] = {}
    for other in lenders:
        own = other.held[: len(other.ask.shape.slots)]
        stays = own + tuple(slot for slot in _lent(other) if slot.node not in nodes)
        if stays != other.held:
            kept[other.ask.id] = stays
    return kept
