"""Decide around what is broken: a bug of the scheduler costs what it touches, and the rest goes on."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from rota.cluster.core.check import InvariantBroken
from rota.cluster.core.cycle import decide
from rota.cluster.core.plugins import Admit, Decision, Profile, WaitOn
from rota.cluster.core.rows import Held, Wait
from rota.cluster.core.snapshot import State
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId
from rota.spec.reasons import Reason
from rota.spec.resources import Health

REFUSED = "A bug of the scheduler keeps it from starting"
PASSES_MAX = 200
"""Passes of one decision: a policy that fails at every job costs no more than these."""


def sound(state: State, profile: Profile, now: float) -> tuple[list[Decision], dict[JobId, str]]:
    """What should happen now, and the jobs that are left out of it, with why.

    Nothing new goes to nodes that are overdrawn. Left out are jobs at which the pass fails, or which it would start
    on what is not free; the pass is made again without them. Raises what fails at no job, or in ``PASSES_MAX`` passes.
    """
    refused: dict[JobId, str] = {}
    with state.txn() as txn:
        for row in overdrawn(state):
            state.mark(txn, state.nodes[row].id, Health.SUSPECT)
        for _ in range(PASSES_MAX):
            try:
                decisions = decide(state, profile, now)
                wrong = unsound(state, decisions)
            except InvariantBroken as error:
                if error.job is None:
                    raise
                decisions, wrong = [], {error.job: str(error)}
            if not wrong:
                told = {job: Wait(reason=Reason.INTERNAL, text=f"{REFUSED}: {why}.") for job, why in refused.items()}
                new = [job for job in told if not state.jobs[job].is_told(Reason.INTERNAL)]
                return [*decisions, *(WaitOn(job=job, wait=told[job]) for job in new)], refused
            refused |= wrong
            for job in wrong:
                state.put(txn, replace(state.jobs[job], phase="paused"))
    raise InvariantBroken(f"in {PASSES_MAX} passes {len(refused)} jobs were left out, and others fail")


@contextmanager
def without_refused(state: State) -> Generator[None]:
    """Jobs that were told that a bug keeps them from starting are not tried meanwhile."""
    with state.txn() as txn:
        for row in state.waiting():
            if row.is_told(Reason.INTERNAL):
                state.put(txn, replace(row, phase="paused"))
        yield


def overdrawn(state: State) -> list[int]:
    """Nodes of which more is given than there is, cores and bytes of those that shrank under their jobs aside."""
    short = set(np.flatnonzero((state.cpu < 0) | (state.mem < 0)).tolist()) - state.shrunk
    return sorted({*state.dev_node[state.dev_milli < 0].tolist(), *short})


def unsound(state: State, decisions: Sequence[Decision]) -> dict[JobId, str]:
    """Jobs that these decisions would start on what is not free, after the starts before them, and why that is wrong.

    This looks at the devices alone: it shares nothing with the policies, which may be what is wrong.
    """
    found: dict[JobId, str] = {}
    with state.txn() as txn:
        for one in decisions:
            if isinstance(one, Admit):
                broken = [text for slot in one.held if (text := _not_free(state, txn, slot))]
                if len(one.held) < (asked := len(state.jobs[one.job].ask.shape.slots)):
                    broken.append(f"it would start with {len(one.held)} of {asked} slots")
                if broken:
                    found[one.job] = broken[0]
    return found


def _not_free(state: State, txn: Txn, slot: Held) -> str:
    """Take a slot; what of it was not there to be given."""
    node = state.nodes[slot.node].id
    sick = [d for d in slot.devices if state.dev_health[d] or int(state.dev_node[d]) != slot.node]
    state.take(txn, slot, 1)
    if sick or state.node_health[slot.node]:
        return f"{node}, or a device of it, takes no work"
    short = [d for d in slot.devices if int(state.dev_milli[d]) < 0]
    if short or (slot.cpu_milli and int(state.cpu[slot.node]) < 0) or (slot.mem and int(state.mem[slot.node]) < 0):
        return f"what it would get of {node} is not free"
    return ""
