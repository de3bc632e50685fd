"""Guarded decisions: invariants of the state, and a pass that leaves out what breaks them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from rota.cluster.core.capacity import Vector
from rota.cluster.core.cycle import carried_out
from rota.cluster.core.events import JobPaused, ReasonGiven, fold
from rota.cluster.core.jobs import Allocation, Allocations, Wait
from rota.cluster.core.profile import Admit, Decision, Profile, Resize, WaitOn
from rota.cluster.core.state import InvariantBroken, State
from rota.cluster.core.txn import Txn
from rota.cluster.core.verdicts import Learned
from rota.spec.ids import JobId
from rota.spec.reasons import Reason
from rota.spec.resources import Health

REFUSED = "A bug of the scheduler keeps it from starting"
PASSES_MAX = 200
"""Passes of one decision: a policy that fails at every job costs no more than these."""


def guarded(
    state: State, profile: Profile, now: float, avoid: Iterable[int] = ()
) -> tuple[list[Decision], dict[JobId, str], Learned]:
    """What should happen now, which is carried out in the state; jobs that are left out, with why; what was learned.

    Nothing new goes to the nodes to ``avoid``. Left out are jobs at which the pass fails, or which it would start
    on what is not free; the pass is made again without them. Raises what fails at no job, or in ``PASSES_MAX`` passes.
    A caller for whom a log carries decisions out calls this in a transaction that is undone. One that decides again
    lets ``state.memory`` take in what was learned.
    """
    refused: dict[JobId, str] = {}
    if not state.lines and profile.sharing is None:
        return [], refused, Learned(state.memory)
    with state.txn() as txn:
        for row in avoid:
            state.mark(txn, state.nodes[row].id, Health.SUSPECT)
        for _ in range(PASSES_MAX):
            before = txn.changes
            try:
                (decisions, learned), wrong = carried_out(state, txn, profile, now), None
            except InvariantBroken as error:
                if error.job is None:
                    raise
                (decisions, learned), wrong = ([], Learned(state.memory)), {error.job: error.text}
            if wrong is None and not any(isinstance(one, Admit) and _not_free(state, one) for one in decisions):
                txn.keep()
                return [*decisions, *_give_reasons(state, txn, refused, now)], refused, learned
            txn.undo(before)
            wrong = wrong or refusals(state, decisions)
            if not wrong.keys() - refused.keys():
                raise state.broken(f"decisions give what is not free, and no start is wrong by itself: {decisions}")
            refused |= wrong
            for job in refused:
                fold(state, txn, JobPaused(job=job, paused=True), now)
    raise state.broken(f"in {PASSES_MAX} passes {len(refused)} jobs were left out, and others fail")


def _give_reasons(state: State, txn: Txn, refused: Mapping[JobId, str], now: float) -> list[WaitOn]:
    """The jobs that were left out wait again, for the reason that a bug keeps them from starting."""
    found = list[WaitOn]()
    for job, why in refused.items():
        fold(state, txn, JobPaused(job=job, paused=False), now)
        if not state.jobs[job].has_reason(Reason.INTERNAL):
            found.append(WaitOn(job=job, wait=Wait(reason=Reason.INTERNAL, text=f"{REFUSED}: {why}.")))
            fold(state, txn, ReasonGiven(job=job, wait=found[-1].wait), now)
    return found


@contextmanager
def without_refused(state: State) -> Generator[None]:
    """Jobs whose reason is that a bug keeps them from starting are not tried meanwhile."""
    with state.txn() as txn:
        for row in state.waiting_jobs():
            if row.has_reason(Reason.INTERNAL):
                state.put(txn, row._replace(phase="paused"))
        yield


def overdrawn(state: State) -> list[int]:
    """Nodes of which more is given than there is, cores and bytes of those that shrank under their jobs aside."""
    short = set(np.flatnonzero((state.cpu < 0) | (state.mem < 0)).tolist()) - state.shrunk
    return sorted({*state.dev_node[state.dev_milli < 0].tolist(), *short})


def refusals(state: State, decisions: Sequence[Decision]) -> dict[JobId, str]:
    """Jobs that these decisions would start on what is not free, after those before them, and why that is wrong.

    This looks at the devices alone: it shares nothing with the policies, which may be what is wrong.
    """
    found, has = dict[JobId, str](), dict[JobId, Allocations]()
    with state.txn() as txn:
        for one in decisions:
            if not isinstance(one, Admit | Resize):
                continue
            for slot in has.get(one.job, state.jobs[one.job].held):
                state.take(txn, slot, -1)
            for slot in one.held:
                state.take(txn, slot, 1)
            has[one.job] = one.held
            if isinstance(one, Admit) and (why := _not_free(state, one)):
                found[one.job] = why
    return found


def _not_free(state: State, start: Admit) -> str:
    """What of the slots of a start, which are taken, was not there to be given."""
    for slot in start.held:
        node = state.nodes[slot.node].id
        sick = [d for d in slot.devices if state.dev_health[d] or int(state.dev_node[d]) != slot.node]
        if sick or state.node_health[slot.node]:
            return f"{node}, or a device of it, takes no work"
        short = [d for d in slot.devices if int(state.dev_milli[d]) < 0]
        if short or (slot.cpu_milli and int(state.cpu[slot.node]) < 0) or (slot.mem and int(state.mem[slot.node]) < 0):
            return f"what it would get of {node} is not free"
    if len(start.held) < (asked := len(state.jobs[start.job].ask.having(start.choice).shape.slots)):
        return f"it would start with {len(start.held)} of {asked} slots"
    return ""


def violations(state: State) -> list[str]:
    """Every broken rule in words; empty when all is well.

    Rules: no device, core or byte is given twice, cores and bytes of nodes that shrank under their jobs aside; what is
    free plus what is held is what there is; free counts equal the devices; a job that waits holds nothing, one that
    runs its whole gang, and no more than it can use; the use of a queue, and of a user in it, is the sum of the jobs;
    users of a queue are those that wait or hold there; every part is with its job.
    """
    broken: list[str] = []
    held: list[Allocation] = []
    of_users: dict[tuple[str, str], list[Vector]] = {}
    parts: dict[JobId, set[JobId]] = {}
    for row in state.jobs.values():
        if row.held:
            held += row.held
            of_users.setdefault((row.ask.queue, row.ask.user), []).append(state.queues.need(row.ask.shape))
        if row.ask.part_of is not None:
            parts.setdefault(row.ask.part_of, set()).add(row.ask.id)
        if row.phase in ("queued", "paused") and row.held:
            broken.append(f"{row.ask.id} is {row.phase} but holds {len(row.held)} slots")
        asked = len(row.ask.shape.slots)
        if row.phase == "running" and not asked <= len(row.held) <= max(asked, row.ask.slots_max):
            broken.append(f"{row.ask.id} runs with {len(row.held)} of {len(row.ask.shape.slots)} slots")
    milli, cpu, mem = _left_by(state, held)
    used, used_by = _used_by(state, of_users)
    for name, expected, found in (
        ("device", milli, state.dev_milli),
        ("cores of node", cpu, state.cpu),
        ("memory of node", mem, state.mem),
    ):
        broken += [
            f"{name} {i}: {int(found[i])} free, by its holders {int(expected[i])}"
            for i in np.flatnonzero(expected != found)
        ]
        twice = [i for i in np.flatnonzero(found < 0).tolist() if found is state.dev_milli or i not in state.shrunk]
        broken += [f"{name} {i}: {int(-found[i])} given twice" for i in twice]
    if (used != state.used).any():
        broken.append("the use of a queue is not the sum of its jobs")
    for queue, user in sorted(used_by.keys() | state.used_by.keys()):
        nothing = np.zeros_like(used[queue])
        if (used_by.get((queue, user), nothing) != state.used_by.get((queue, user), nothing)).any():
            broken.append(f"the use of {user} in {state.queues.rows[queue].path} is not the sum of the jobs of {user}")
    if (users := _users_of(state, used_by)) != {queue: counts for queue, counts in state.users.items() if counts}:
        broken.append(f"users of queues are counted as {state.users}; by their jobs {users}")
    if parts != {job: set(known) for job, known in state.parts.items() if known}:
        broken.append("the parts of a job are not those that say they belong to it")
    whole = (state.dev_milli == 1000) & (state.dev_health == 0)
    free = np.zeros_like(state.free)
    np.add.at(free, (state.dev_node[whole], state.dev_type[whole]), 1)
    if (free != state.free).any():
        broken.append("the count of free devices of a node is not that of its devices")
    return broken


def _left_by(state: State, held: Sequence[Allocation]) -> tuple[Vector, Vector, Vector]:
    """Thousandths of each device, thousandths of cores and bytes of each node that these slots leave free."""
    milli = np.full(state.dev_milli.shape, 1000, dtype=np.int64)
    devices = np.array([device for one in held for device in one.devices], dtype=np.int64)
    shares = np.array([one.milli or 1000 for one in held for _ in one.devices], dtype=np.int64)
    np.subtract.at(milli, devices, shares)
    cpu = np.array([round(node.cpus * 1000) for node in state.nodes], dtype=np.int64)
    mem = np.array([node.memory_bytes for node in state.nodes], dtype=np.int64)
    nodes = np.array([one.node for one in held], dtype=np.int64)
    np.subtract.at(cpu, nodes, np.array([one.cpu_milli for one in held], dtype=np.int64))
    np.subtract.at(mem, nodes, np.array([one.mem for one in held], dtype=np.int64))
    return milli, cpu, mem


def _used_by(
    state: State, needs: Mapping[tuple[str, str], Sequence[Vector]]
) -> tuple[NDArray[np.int64], dict[tuple[int, str], Vector]]:
    """The use of each queue, and of each user in one that limits them, by what their jobs need."""
    used, used_by = np.zeros_like(state.used), dict[tuple[int, str], Vector]()
    for (path, user), each in needs.items():
        need = np.sum(each, axis=0)
        for queue in state.queues.line_of(path):
            used[queue] += need
            if state.queues.user_limited[queue]:
                used_by[queue, user] = used_by.get((queue, user), 0) + need
    return used, used_by


def _users_of(state: State, used_by: dict[tuple[int, str], Vector]) -> dict[str, dict[str, int]]:
    found = dict[str, Counter[str]]()
    present = [(key.queue, key.user) for key in state.lines]
    present += [(state.queues.rows[queue].path, user) for (queue, user), used in used_by.items() if used.any()]
    for queue, user in present:
        found.setdefault(queue, Counter())[user] += 1
    return {queue: dict(counts) for queue, counts in found.items()}


def check(state: State) -> None:
    """Raise InvariantBroken if any rule is broken."""
    if broken := violations(state):
        raise state.broken("; ".join(broken[:10]))
