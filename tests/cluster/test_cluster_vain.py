"""A pass ends after some jobs for which stopping others does not help; passes at once try all the others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from cluster_makers import ask, node, slot, state

from rota.cluster.core.cycle import step
from rota.cluster.core.events import JobArrived, JobGone, JobReleased, Tick, apply
from rota.cluster.core.jobs import LiveJob
from rota.cluster.core.profile import Placer, Preempt, Profile, Victim, Victims, WakeAt
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies import get_profile
from rota.spec.ids import JobId
from rota.spec.queue import Queue
from rota.spec.resources import Res

NODES, GANGS, MAX = 10, 6, 2


@dataclass
class Recorded:
    """The victims of a profile, and the jobs for which each pass asked for them."""

    inner: Victims
    asked: list[list[JobId]] = field(default_factory=lambda: list[list[JobId]]())

    def victims(self, state: State, txn: Txn, row: LiveJob, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        self.asked[-1].append(row.ask.id)
        return self.inner.victims(state, txn, row, placer, now)


def pinned() -> State:
    """Nodes with one device of a job that may not be stopped and seven that are lent; gangs ask whole nodes."""
    queues = [Queue(path="pins", guaranteed=Res(cpus=0, gpus=NODES)), Queue(path="lent")]
    queues += [Queue(path=f"q{i}", guaranteed=Res(cpus=0, gpus=8)) for i in range(GANGS)]
    queues.append(Queue(path="small", guaranteed=Res(cpus=0, gpus=2)))
    s = state(*(node(f"n{i}", 8) for i in range(NODES)), queues=tuple(queues))
    for i in range(NODES):
        for one in (
            replace(ask(f"pin{i}", slot(1), queue="pins", at=float(i)), preemptible=False),
            ask(f"lent{i}", slot(7), queue="lent", at=i + 0.5),
        ):
            step(s, JobArrived(ask=one), get_profile("default"), one.queued_at)
    for i in range(GANGS):
        apply(s, JobArrived(ask=ask(f"gang{i}", slot(8), queue=f"q{i}", at=20.0 + i)), 20.0 + i)
    return s


def moment(s: State, profile: Profile, recorded: Recorded, now: float) -> None:
    """All passes of a moment, each with ``MAX`` tries in vain at most; who is stopped lets go at once."""
    for _ in range(50):
        recorded.asked.append([])
        decisions = step(s, Tick(), profile, now)
        assert len(recorded.asked[-1]) <= MAX + 1
        stopped = [decision.job for decision in decisions if isinstance(decision, Preempt)]
        for job in stopped:
            apply(s, JobReleased(job=job), now)
        if not stopped and not any(isinstance(decision, WakeAt) and decision.at <= now for decision in decisions):
            return
    raise AssertionError("the passes of a moment do not end")


def bounded() -> tuple[Profile, Recorded]:
    default = get_profile("default")
    assert default.victims is not None and default.vain_max < GANGS
    recorded = Recorded(default.victims)
    return replace(default, victims=recorded, vain_max=MAX), recorded


def test_each_job_is_tried_once_in_passes_of_bounded_length_and_the_last_one_starts_at_the_same_time() -> None:
    s, (profile, recorded) = pinned(), bounded()
    moment(s, profile, recorded, 30.0)
    gangs = [f"gang{i}" for i in range(GANGS)]
    assert [job for asked in recorded.asked for job in asked] == gangs
    recorded.asked.clear()
    apply(s, JobArrived(ask=ask("small", slot(2), queue="small", at=31.0)), 31.0)
    moment(s, profile, recorded, 31.0)
    assert s.jobs[JobId("small")].phase == "running"
    assert [job for asked in recorded.asked for job in asked][: GANGS + 1] == [*gangs, "small"]


@pytest.mark.parametrize("gang", [0, 3, GANGS - 1])
def test_who_was_tried_in_vain_is_tried_again_if_something_happened_before_all_were_tried(gang: int) -> None:
    s, (profile, recorded) = pinned(), bounded()
    recorded.asked.append([])
    step(s, Tick(), profile, 30.0)
    assert recorded.asked == [["gang0", "gang1"]]
    for i in range(GANGS):
        if i != gang:
            apply(s, JobGone(job=JobId(f"gang{i}")), 30.0)
            apply(s, JobArrived(ask=ask(f"later{i}", slot(8), queue=f"q{i}", at=29.0)), 30.0)
    apply(s, JobGone(job=JobId("pin0")), 30.0)
    moment(s, profile, recorded, 30.0)
    assert s.jobs[JobId(f"gang{gang}")].phase == "running"
