"""What the machine waits for while it takes no decision: a sentence for each rule that says "not yet"."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.makers import at, command, loop, rl, service, spec

from rota.job.core.context import NotYet
from rota.job.core.desired import next_emit
from rota.job.master.diagnosis import DiagnosisManager
from rota.runtime.clock import SystemClock
from rota.spec.events import (
    InstanceLost,
    MoveAsked,
    PreemptAsked,
    StopAsked,
)
from rota.spec.ids import NodeId
from rota.spec.reasons import Reason


def why(driven) -> str:
    due = next_emit(driven.ctx)
    assert isinstance(due, NotYet), f"{due} is due"
    return due.why


def lose(driven, who: str, reason: Reason = Reason.SIGNALLED) -> None:
    one = driven.ctx.instances[at(who)]
    driven.feed(InstanceLost(role=one.id.role, rank=one.id.rank, epoch=one.epoch, reason=reason))


def test_a_start_and_a_recovery_name_who_is_not_ready(driven):
    driven.run(rl())
    assert why(driven) == "no role is to change its size"
    lose(driven, "reward/0")
    driven.feed(next_emit(driven.ctx).event)
    assert why(driven) == "not ready yet: reward/0 (the process before has not ended)"
    driven.settle()
    assert why(driven) == "no role is to change its size"


def test_what_holds_up_those_that_have_not_started_is_named(driven):
    driven.admit(spec(service("first", 1), service("later", 2, start_after=("first",)), loop())).settle(hold="reserve")
    assert why(driven) == "not ready yet: first/0, later/0, later/1, loop/0 (gang all is not reserved)"
    driven.settle(hold="start/first")
    assert why(driven) == "not ready yet: first/0; later/0, later/1 (role first has not started)"
    driven.settle()
    assert why(driven) == "no role is to change its size"


def test_many_who_are_not_ready_are_counted(driven):
    driven.run(spec(service("w", 9), loop()))
    for rank in range(9):
        lose(driven, f"w/{rank}")
    driven.feed(next_emit(driven.ctx).event)
    assert why(driven) == "not ready yet: w/0, w/1, w/2, w/3, w/4 and 4 more (the process before has not ended)"


def test_a_recovery_waits_for_its_pause(driven):
    job = rl()
    roles = tuple(replace(role, fail=replace(role.fail, backoff_s=5.0)) for role in job.roles)
    driven.run(replace(job, roles=roles))
    for _ in range(2):
        lose(driven, "reward/0")
        driven.feed(next_emit(driven.ctx).event)
        if driven.ctx.failover.released:
            driven.settle()
    assert (
        why(driven)
        == "after a pause of 5 s they start again; not ready yet: reward/0 (the process before has not ended)"
    )


def test_a_drained_node_waits_for_another_place_and_then_for_a_boundary(driven):
    driven.run(spec(service("w", 2), loop()), "h0", "h1", "h1")
    driven.feed(MoveAsked(node=NodeId("h0"), due_at=1e6))
    driven.settle()
    assert why(driven) == "no other node has room for w/0, whose node is drained"
    driven.free = ["h2"]
    driven.settle()
    assert why(driven) == "the instances on h0, which is drained, leave at a commit or checkpoint"


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (PreemptAsked(reason=Reason.PREEMPTED_PRIORITY), "the loop comes to its next commit"),
        (StopAsked(), "its processes and reservations are being given back"),
    ],
)
def test_the_end_of_an_attempt_says_how_far_it_is(driven, asked, text):
    driven.run(rl())
    driven.feed(asked)
    assert why(driven) == text


def test_a_world_that_may_grow_waits_for_a_boundary(driven):
    role = replace(command("train", 1, mesh=(("dp", 1),), elastic_axis="dp"), replicas_max=3)
    driven.run(spec(role))
    driven.free = ["h1"]
    driven.settle()
    assert why(driven) == "train grows from 1 to 3 members at a commit or checkpoint"


def test_what_may_be_the_consequence_of_another_loss_waits_for_its_cause(driven):
    driven.run(rl())
    lose(driven, "actor/1", Reason.COLLECTIVE_TIMEOUT)
    assert why(driven).startswith("the cause is not known")
    driven.feed(StopAsked())
    assert why(driven) == "its processes and reservations are being given back"


def test_the_master_is_the_last_vertex_of_what_waits_for_what(driven):
    driven.run(rl())
    lose(driven, "reward/0")
    manager = DiagnosisManager(SystemClock())

    def master() -> tuple[str, str, str]:
        row = asyncio.run(manager.explain(driven.ctx, {}, stacks))["vertices"][-1]
        return row["name"], row["state"], row["doing"]

    async def stacks(role: str, rank: int) -> str:
        return ""

    assert master() == ("master", "RECOVERING", "about to write FailoverStarted")
    driven.feed(next_emit(driven.ctx).event)
    assert master() == ("master", "RECOVERING", "not ready yet: reward/0 (the process before has not ended)")
