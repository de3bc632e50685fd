"""Dominant resource fairness as the scheduler does it: jobs of equal queues, started one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from rota.cluster.core.cycle import decide
from rota.cluster.core.events import JobArrived, apply
from rota.cluster.core.jobs import JobAsk, Shape, Slot
from rota.cluster.core.profile import Admit
from rota.cluster.core.quota import Amounts
from rota.cluster.core.state import State
from rota.cluster.policies.fair_share import drf
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import Queue
from rota.spec.resources import Device, Node
from tests.proof.cases.compare import Unsupported
from tests.proof.cases.reference import dominant

KINDS = ("gpu", "cpu", "mem")
"""What the scheduler knows; a resource of another name takes the place of one that the case lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One task given: to whom, and the dominant shares and use after it."""

    user: str
    shares: dict[str, Fraction]
    used: dict[str, Fraction]


def fill(
    capacity: Amounts,
    demands: Mapping[str, Amounts],
    *,
    weights: Mapping[str, Fraction] | None = None,
    first: str | None = None,
) -> list[Step]:
    """The starts of one pass under the profile ``drf``: every user has a queue with more tasks than could ever run.

    Ties go to ``first``, which queued earlier, then by name. Raises Unsupported for more than three resources.
    """
    users = [user for user in sorted(demands) if any(demands[user].values())]
    kind = _kinds(capacity)
    scale = {
        r: lcm(capacity[r].denominator, *(demands[u].get(r, Fraction(0)).denominator for u in users)) for r in kind
    }

    def units(amounts: Amounts) -> dict[str, int]:
        return {kind[r]: int(amounts.get(r, Fraction(0)) * scale[r]) for r in kind}

    have = dict.fromkeys(KINDS, 0) | units(capacity)
    devices = tuple(Device(index=i, type="gpu") for i in range(have["gpu"]))
    node = Node(id=NodeId("n"), host="n", cpus=have["cpu"], memory_bytes=have["mem"] << 20, devices=devices)
    state = State([node], [Queue(path=user, weight=float((weights or {}).get(user, 1))) for user in users])
    for user in users:
        need = dict.fromkeys(KINDS, 0) | units(demands[user])
        slot = Slot(gpus=need["gpu"], cpu_milli=need["cpu"] * 1000, mem=need["mem"] << 20)
        most = min(have[k] // need[k] for k in KINDS if need[k])
        for number in range(most + 1):
            name = JobId(f"{user} {number:06}")
            ask = JobAsk(id=name, shape=Shape(slots=(slot,)), queue=user, queued_at=float(user != first))
            apply(state, JobArrived(ask=ask), 1.0)
    order = [state.jobs[one.job].ask.queue for one in decide(state, drf(), 1.0) if isinstance(one, Admit)]
    return [_step(capacity, demands, order[:count]) for count in range(1, len(order) + 1)]


def _kinds(capacity: Amounts) -> dict[str, str]:
    """The kind of the scheduler that each resource of a case is counted in."""
    found = {r: next((k for k in KINDS if r.startswith(k)), "") for r in capacity}
    left = [k for k in KINDS if k not in found.values()]
    for r in (r for r, k in found.items() if not k):
        if not left:
            raise Unsupported(f"{len(capacity)} resources; the scheduler counts {', '.join(KINDS)}")
        found[r] = left.pop()
    if len(set(found.values())) < len(found):
        raise Unsupported(f"resources {', '.join(capacity)}: two of one kind")
    return found


def _step(capacity: Amounts, demands: Mapping[str, Amounts], order: list[str]) -> Step:
    tasks = {user: order.count(user) for user in demands}
    resources = dict.fromkeys((*capacity, *(r for demand in demands.values() for r in demand)))
    used = {r: sum((n * demands[u].get(r, Fraction(0)) for u, n in tasks.items()), Fraction(0)) for r in resources}
    shares = {user: dominant(capacity, demands[user])[1] * n for user, n in tasks.items()}
    return Step(user=order[-1], shares=shares, used=used)


def tasks_after(steps: list[Step], users: list[str]) -> dict[str, int]:
    """How many tasks each user has after these steps."""
    return {user: sum(step.user == user for step in steps) for user in users}
