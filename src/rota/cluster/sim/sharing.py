"""Shared and lent devices, which a simulation adds to the profiles of Gandiva: no service does so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rota.cluster.core.jobs import Allocation, Allocations, LiveJob
from rota.cluster.core.profile import Placer, Preempt, Profile, Resize
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.gandiva import book_of
from rota.spec.ids import JobId
from rota.spec.reasons import Reason

HALF = 500
"""Thousandths of a device that each of two has."""
PACK_GAIN = 0.05
"""What two jobs on the same devices must run more than one alone."""
LENT = "Idle devices are lent in simulations alone; a service lets jobs grow within their range."
PACKED = "Two jobs share devices in simulations alone; a service runs this profile as gandiva."


@dataclass(frozen=True, slots=True)
class Simulated:
    """What of a profile no service does, as it warns, and the gain by which two jobs share devices (None: never)."""

    warning: str
    pack_gain: float | None = None


SIMULATED = {"gandiva": Simulated(LENT), "gandiva-pack": Simulated(f"{PACKED} {LENT}", PACK_GAIN)}


def with_sharing(profile: Profile) -> Profile:
    """The profile of a simulation: with lent and shared devices, where it has them."""
    if profile.name not in SIMULATED:
        return profile
    return replace(profile, sharing=LendAndPack(profile.round_s, SIMULATED[profile.name].pack_gain))


def _lent(row: LiveJob) -> Allocations:
    """What a job holds above what it asked for; its own slots come first."""
    return row.held[len(row.ask.shape.slots) :]


def _able(state: State) -> list[LiveJob]:
    """Running jobs that can use more than they asked for, in the order of their ids."""
    rows = (state.jobs[job] for job in sorted(book_of(state).elastic))
    return [row for row in rows if row.phase == "running"]


def kind_of(row: LiveJob) -> str:
    """Jobs of one kind are expected to behave alike beside others: their label ``class``, else all."""
    return str(row.ask.labels.get("class", ""))


def pair_of(one: LiveJob, other: LiveJob) -> tuple[str, str]:
    """The kinds of two jobs, in order."""
    first, second = sorted((kind_of(one), kind_of(other)))
    return first, second


def partners(state: State) -> Iterator[tuple[LiveJob, LiveJob | None]]:
    """Running jobs that have half of their devices, each pair once, the older job first; None: it is alone there."""
    by_devices: dict[tuple[int, ...], list[LiveJob]] = {}
    for group in state.running.values():
        for job in group:
            row = state.jobs[job]
            if row.held[0].milli == HALF and row.ask.shape.slots[0].gpus:
                by_devices.setdefault(row.held[0].devices, []).append(row)
    for rows in by_devices.values():
        rows.sort(key=lambda row: (row.started_at, row.ask.id))
        yield rows[0], rows[1] if len(rows) > 1 else None


@dataclass(frozen=True, slots=True)
class LendAndPack:
    """Idle devices for running jobs that can use more; with a ``gain``, two jobs on the devices of one.

    Lent devices come back before any job waits for them. Two share as long as both together run faster than one alone
    by more than the gain; pairs of kinds that did not are not tried again. Source: Gandiva (OSDI'18), section 3.2.
    """

    round_s: float
    gain: float | None = None

    def has_pairs(self, state: State) -> bool:
        """Whether two jobs share devices now."""
        return self.gain is not None and any(other is not None for _, other in partners(state))

    def separate(self, state: State, now: float) -> list[Resize | Preempt]:
        """The younger of two that gain too little saves and waits again; a job that is alone gets its devices whole."""
        found: list[Resize | Preempt] = []
        for one, other in partners(state) if self.gain is not None else ():
            if other is None:
                found.append(Resize(job=one.ask.id, held=(one.held[0]._replace(milli=0),)))
            elif not self.pays(one, other, now):
                found.append(
                    Preempt(
                        job=other.ask.id,
                        for_job=one.ask.id,
                        reason=Reason.TIME_SLICE,
                        grace_s=other.ask.grace_s,
                        undone=pair_of(one, other),
                    )
                )
        return found

    def pays(self, one: LiveJob, other: LiveJob, now: float) -> bool:
        """Whether two that share run over ``1 + gain`` times as fast as one alone; True until that is measured."""
        measured = other.started_at // self.round_s != now // self.round_s
        if self.gain is None or one.rate is None or other.rate is None or not measured:
            return True
        return one.rate + other.rate > 1.0 + self.gain

    def give_back(self, state: State, txn: Txn, row: LiveJob, placer: Placer) -> dict[JobId, Allocations]:
        """Whose lent slots go back so that the job fits: only those on the nodes it gets; none if it would not fit."""
        lenders = [other for other in _able(state) if _lent(other)]
        with txn.trial():
            for other in lenders:
                for slot in _lent(other):
                    state.take(txn, slot, -1)
            held = placer.place(state, txn, row) if lenders else None
        nodes = {slot.node for slot in held or ()}
        kept: dict[JobId, Allocations] = {}
        for other in lenders:
            own = other.held[: len(other.ask.shape.slots)]
            stays = own + tuple(slot for slot in _lent(other) if slot.node not in nodes)
            if stays != other.held:
                kept[other.ask.id] = stays
        return kept

    def join(self, state: State, row: LiveJob) -> tuple[JobId, Allocations, Allocations] | None:
        """A running job with which the waiting one can share all devices, and what both hold then; the oldest first.

        Only jobs of one slot of equally many whole devices share, two at most, and no pair of kinds that was undone.
        """
        slot = row.ask.shape.slots[0]
        if self.gain is None or not slot.gpus or row.ask.shape.gpu_milli != slot.gpus * 1000 or not row.ask.preemptible:
            return None
        able = [
            other
            for other in (state.jobs[job] for job in book_of(state).single.get(slot.gpus, ()))
            if other.phase == "running"
            and len(other.held) == 1
            and not other.held[0].milli
            and other.ask.preemptible
            and other.ask.shape.slots[0].gpus == slot.gpus
            and int(state.dev_type[other.held[0].devices[0]]) in state.type_rows(slot.type)
            and pair_of(row, other) not in state.undone
            and state.cpu[other.held[0].node] >= slot.cpu_milli
            and state.mem[other.held[0].node] >= slot.mem
            and not state.node_health[other.held[0].node]
        ]
        if not able:
            return None
        other = min(able, key=lambda other: (other.started_at, other.ask.id))
        held = other.held[0]
        mine = Allocation(held.node, held.devices, HALF, slot.cpu_milli, slot.mem)
        return other.ask.id, (held._replace(milli=HALF),), (mine,)

    def lend(self, state: State, txn: Txn, placer: Placer) -> dict[JobId, Allocations]:
        """Who gets which slots: one more each in turn while there is room, lowest share of its own ask first."""
        held = {row.ask.id: row.held for row in _able(state)}
        open_ones = dict(held)
        with txn.trial():
            while open_ones:
                job = min(open_ones, key=lambda job: (len(held[job]) / len(state.jobs[job].ask.shape.slots), job))
                row = state.jobs[job]
                one = replace(row.ask.shape, slots=row.ask.shape.slots[:1], names=row.ask.shape.names[:1])
                more = None
                if len(held[job]) < row.ask.slots_max:
                    more = placer.place(state, txn, row._replace(ask=replace(row.ask, shape=one)))
                if more is None:
                    del open_ones[job]
                    continue
                for slot in more:
                    state.take(txn, slot, 1)
                held[job] += more
        return {job: slots for job, slots in held.items() if slots != state.jobs[job].held}
