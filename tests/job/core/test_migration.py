"""A drained node is left: another place first, then a boundary, then the move; back to the queue when there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.makers import admitted, at, command, loop, mesh, replay, service, spec

from rota.job.core.context import JobContext
from rota.job.core.desired import wanted
from rota.job.core.machine import initial
from rota.job.core.migration import needs_save
from rota.spec.commands import SetTimer
from rota.spec.events import (
    CheckpointSaved,
    Committed,
    FailoverStarted,
    GangAsked,
    GangReleased,
    GangReserveFailed,
    InstanceLost,
    MoveAsked,
    PreemptAsked,
    RolledBack,
    TimerFired,
)
from rota.spec.ids import Epoch, NodeId, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import AskState, JobState, Level

FAR_S = 1e6


def drain(driven, node: str = "h0", due_at: float | None = FAR_S) -> None:
    driven.feed(MoveAsked(node=NodeId(node), due_at=due_at))
    driven.settle()


def commit(driven, n: int) -> None:
    driven.feed(Committed(n=n, loop_epoch=driven.ctx.loop_epoch))
    driven.settle()


def homes(driven) -> dict[str, str]:
    return {str(one): bundle.node for one, (_, bundle) in driven.ctx.bound.items()}


def moved(driven) -> list[FailoverStarted]:
    return [record.event for record in driven.records if isinstance(record.event, FailoverStarted)]


def rewritten(driven) -> JobContext:
    found = replay(driven.ctx.job, tuple(driven.records), initial(driven.ctx.job))
    return JobContext.from_json(found.to_json())


def test_who_is_on_a_drained_node_moves_at_the_next_commit_and_the_others_keep_their_processes(driven):
    driven.free = ["h2"]
    driven.run(spec(service("w", 2), loop()), "h0", "h1", "h1")
    before = dict(driven.ctx.instances)
    drain(driven)
    asked = next(record.event for record in driven.records if isinstance(record.event, GangAsked))
    assert (asked.avoid, asked.lost) == ((), False), "the scheduler knows what is drained, and that it is no fault"
    assert homes(driven)["w/0"] == "h0" and driven.ctx.state is JobState.RUNNING, "until there is a commit"
    commit(driven, 1)
    assert (homes(driven), driven.ctx.state) == ({"w/0": "h2", "w/1": "h1", "loop/0": "h1"}, JobState.RUNNING)
    (move,) = moved(driven)
    assert (move.level, move.reason, move.restore) == (Level.NODE, Reason.MIGRATED_DRAIN, 1)
    assert driven.ctx.charges == () and driven.ctx.instances[at("w/0")].excluded == ()
    assert driven.ctx.instances[at("w/1")].process == before[at("w/1")].process
    assert rewritten(driven) == driven.ctx


def test_a_whole_gang_moves_and_the_place_that_it_left_is_given_back_after_it(driven):
    driven.free = ["h1"]
    driven.run(spec(service("w", 2)))
    drain(driven)
    ids = [one.id for one in driven.done]
    reserved = next(one for one in ids if one.startswith("reserve/drained"))
    assert (
        ids.index(reserved)
        < ids.index(next(one for one in ids if one.startswith("stop/w/0")))
        < ids.index("release/all/1")
    )
    assert set(homes(driven).values()) == {"h1"} and len(driven.ctx.gangs) == 1


def test_state_in_the_memory_of_the_node_is_saved_before_it_is_left_and_no_commit_is_lost(driven):
    driven.free = ["h1"]
    driven.run(spec(mesh("actor", 2), loop()))
    commit(driven, 1)
    drain(driven)
    commit(driven, 2)
    assert needs_save(driven.ctx) and not moved(driven), "a commit in memory is no boundary here"
    driven.feed(CheckpointSaved(n=2, path="c"))
    driven.settle()
    assert (driven.ctx.committed, set(homes(driven).values())) == (2, {"h1"})
    assert {one.restored for one in driven.ctx.instances.values()} == {2}


def test_without_another_place_state_is_saved_all_the_same_and_the_queue_takes_no_commit_back(driven):
    job = spec(mesh("actor", 2), loop())
    driven.run(job)
    commit(driven, 1)
    drain(driven, due_at=driven.ctx.at_s + 60.0)
    commit(driven, 2)
    assert needs_save(driven.ctx), "whoever comes up on another host finds nothing of it there"
    driven.feed(Committed(n=3, loop_epoch=driven.ctx.loop_epoch), CheckpointSaved(n=3, path="c"))
    assert not needs_save(driven.ctx)
    (timer,) = (one for one in wanted(driven.ctx) if isinstance(one, SetTimer) and one.timer.startswith("drain"))
    driven.feed(TimerFired(timer=timer.timer), after_s=60.0)
    driven.settle()
    driven.feed(admitted(job, hosts=("h1",), attempt=2, epoch=int(driven.ctx.epoch_max) + 1))
    driven.settle()
    assert (driven.ctx.state, driven.ctx.committed) == (JobState.RUNNING, 3)
    assert not [record for record in driven.records if isinstance(record.event, RolledBack)]


def test_of_two_drained_nodes_the_one_that_goes_first_is_left_first(driven):
    driven.run(spec(service("w", 2), loop()), "h0", "h1", "h2")
    drain(driven, "h0", driven.ctx.at_s + 3600.0)
    drain(driven, "h1", driven.ctx.at_s + 60.0)
    (timer,) = (one for one in wanted(driven.ctx) if isinstance(one, SetTimer) and one.timer.startswith("drain"))
    assert timer.timer.startswith("drain/h1/")
    driven.free = ["h3"]
    driven.settle()
    commit(driven, 1)
    assert (homes(driven)["w/1"], homes(driven)["w/0"]) == ("h3", "h0")
    commit(driven, 2)
    assert homes(driven)["w/0"] == "h3"


def test_a_boundary_from_before_there_was_a_place_does_not_move_anybody(driven):
    driven.free = ["h1"]
    world = command("train", 2, mesh=(("dp", 1), ("tp", 2)), elastic_axis="dp")
    driven.run(spec(replace(world, replicas_max=3)))  # the third member waits for a fourth, for ever
    driven.feed(CheckpointSaved(n=0, path="c"), after_s=100.0)
    assert driven.ctx.boundary
    driven.free = ["h2"]
    drain(driven)
    assert (moved(driven), set(homes(driven).values())) == ([], {"h0", "h1"})
    driven.feed(CheckpointSaved(n=0, path="c"), after_s=1.0)
    driven.settle()
    assert len(moved(driven)) == 1 and "h0" not in homes(driven).values()


@pytest.mark.parametrize("place", [True, False])
def test_when_the_notice_is_over_it_goes_to_its_place_at_once_or_waits_in_the_queue(driven, place: bool):
    driven.free = ["h1"] if place else []
    driven.run(spec(service("w", 1), loop()))
    drain(driven, due_at=driven.ctx.at_s + 60.0)
    (timer,) = (one for one in wanted(driven.ctx) if isinstance(one, SetTimer) and one.timer.startswith("drain"))
    driven.feed(TimerFired(timer=timer.timer), after_s=60.0)
    driven.settle()
    if place:
        assert (driven.ctx.state, homes(driven)["w/0"]) == (JobState.RUNNING, "h1")
    else:
        assert (driven.ctx.state, driven.ctx.retries, driven.ctx.drains) == (JobState.QUEUED, 0, {})


def test_a_node_that_is_used_again_is_stayed_on_and_the_place_is_given_back(driven):
    driven.free = ["h1"]
    driven.run(spec(service("w", 1), loop()))
    drain(driven)
    assert len(driven.ctx.gangs) == 2
    drain(driven, due_at=None)
    commit(driven, 1)
    assert (moved(driven), driven.ctx.asks, [gang.id for gang in driven.ctx.gangs]) == ([], (), ["all"])
    assert rewritten(driven) == driven.ctx


def test_a_death_before_the_move_heals_where_it_was_and_the_move_follows(driven):
    driven.free = ["h1"]
    driven.run(spec(service("w", 1), loop()))
    drain(driven)
    driven.feed(InstanceLost(role=RoleName("w"), rank=0, epoch=Epoch(1), reason=Reason.SIGNALLED))
    driven.settle()
    assert (homes(driven)["w/0"], driven.ctx.state) == ("h0", JobState.RUNNING)
    commit(driven, 1)
    assert [one.reason for one in moved(driven)] == [Reason.SIGNALLED, Reason.MIGRATED_DRAIN]
    assert homes(driven)["w/0"] == "h1" and len(driven.ctx.gangs) == 1


def test_a_drained_node_that_dies_is_left_as_a_lost_one(driven):
    driven.free = None
    driven.run(spec(service("w", 2), loop()), "h0", "h1", "h1")
    drain(driven)
    driven.feed(InstanceLost(role=RoleName("w"), rank=0, epoch=Epoch(1), reason=Reason.NODE_LOST))
    driven.settle()
    driven.free = ["h2"]
    driven.settle()
    assert (homes(driven)["w/0"], driven.ctx.state) == ("h2", JobState.RUNNING)
    driven.feed(PreemptAsked(reason=Reason.PREEMPTED_PRIORITY))
    driven.settle()
    assert (driven.ctx.state, driven.ctx.asks) == (JobState.QUEUED, ())


@pytest.mark.parametrize("top", [1, 2])
def test_a_reserved_place_that_others_want_is_given_back_and_the_job_goes_on_where_it_is(driven, top):
    driven.free = ["h1"]
    driven.run(spec(replace(service("w", 1), replicas_max=top), loop()))
    node, driven.free = driven.ctx.bundle(at(f"w/{top - 1}"))[1].node, ["h2"]
    drain(driven, node)
    (ask,) = (one for one in driven.ctx.asks if one.leaves)
    assert ask.state is AskState.HELD
    driven.free = []
    driven.feed(PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, gang=ask.gang))
    driven.settle()
    assert (driven.ctx.state, driven.ctx.attempt) == (JobState.RUNNING, 1)
    assert [r.event.gang for r in driven.records if isinstance(r.event, GangReleased)] == [ask.gang]
    assert rewritten(driven) == driven.ctx
    driven.free = ["h3"]
    driven.settle()
    commit(driven, 1)
    assert (homes(driven)[f"w/{top - 1}"], driven.ctx.state) == ("h3", JobState.RUNNING)


def test_who_has_not_started_yet_keeps_its_place_when_the_one_held_for_its_move_is_refused(driven):
    """Barred from the place that it has, it would wait for another node for ever, and the job with it."""
    driven.free = []
    job = spec(command("server", 1), replace(command("worker", 1), start_after=(RoleName("server"),)))
    driven.admit(job).settle(hold="start/")
    driven.feed(MoveAsked(node=NodeId("h0"), due_at=FAR_S))
    driven.settle(hold="start/")
    driven.free = ["h1"]
    driven.feed(driven.answer())
    (held,) = (gang for gang in driven.ctx.gangs if gang.id.startswith("drained"))
    driven.free = []
    driven.feed(MoveAsked(node=NodeId("h0"), due_at=None))
    driven.feed(GangReserveFailed(gang=held.id, epoch=held.epoch, reason=Reason.GANG_TIMEOUT))
    driven.settle()
    assert {one.id: one.excluded for one in driven.ctx.instances.values() if one.excluded} == {}
    assert set(homes(driven).values()) == {"h0"} and driven.ctx.state is JobState.RUNNING
    assert rewritten(driven) == driven.ctx
