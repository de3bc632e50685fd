"""What must hold after every step."""

from __future__ import annotations

import numpy as np

from rota.cluster.core.quota import Vector
from rota.cluster.core.snapshot import State
from rota.spec.ids import JobId


class InvariantBroken(AssertionError):
    """A bug of the scheduler: the message names the rule and the numbers; ``job`` is that at which it was met."""

    def __init__(self, text: str, job: JobId | None = None) -> None:
        super().__init__(text)
        self.job = job


def violations(state: State) -> list[str]:
    """Every broken rule in words; empty when all is well.

    Rules: no device, core or byte is given twice, cores and bytes of nodes that shrank under their jobs aside; what is
    free plus what is held is what there is; free counts equal the devices; a job that waits holds nothing, one that
    runs its whole gang, and no more than it can use; the use of a queue, and of a user in it, is the sum of the jobs;
    every part is with its job.
    """
    broken: list[str] = []
    milli = np.full_like(state.dev_milli, 1000)
    cpu = np.array([round(node.cpus * 1000) for node in state.nodes], dtype=np.int64)
    mem = np.array([node.memory_bytes for node in state.nodes], dtype=np.int64)
    used = np.zeros_like(state.used)
    used_by: dict[tuple[int, str], Vector] = {}
    parts: dict[JobId, set[JobId]] = {}
    for row in state.jobs.values():
        for held in row.held:
            cpu[held.node] -= held.cpu_milli
            mem[held.node] -= held.mem
            for device in held.devices:
                milli[device] -= held.milli or 1000
        if row.held:
            for queue in state.queues.line_of(row.ask.queue):
                need = state.queues.need(row.ask.shape)
                used[queue] += need
                if state.queues.user_limited[queue]:
                    key = (queue, row.ask.user)
                    used_by[key] = used_by.get(key, 0) + need
        if row.ask.part_of is not None:
            parts.setdefault(row.ask.part_of, set()).add(row.ask.id)
        if row.phase in ("queued", "paused") and row.held:
            broken.append(f"{row.ask.id} is {row.phase} but holds {len(row.held)} slots")
        asked = len(row.ask.shape.slots)
        if row.phase == "running" and not asked <= len(row.held) <= max(asked, row.ask.slots_max):
            broken.append(f"{row.ask.id} runs with {len(row.held)} of {len(row.ask.shape.slots)} slots")
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
    if parts != {job: set(known) for job, known in state.parts.items() if known}:
        broken.append("the parts of a job are not those that say they belong to it")
    whole = (state.dev_milli == 1000) & (state.dev_health == 0)
    free = np.zeros_like(state.free)
    np.add.at(free, (state.dev_node[whole], state.dev_type[whole]), 1)
    if (free != state.free).any():
        broken.append("the count of free devices of a node is not that of its devices")
    return broken


def check(state: State) -> None:
    """Raise InvariantBroken if any rule is broken."""
    if broken := violations(state):
        raise InvariantBroken("; ".join(broken[:10]))
