"""Who joins, who stands by, who leaves: standby, degrade, elastic worlds, other nodes, and sizes asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.makers import at, command, fail, loop, mesh, replay, service, spec, started, submitted

from rota.job.core.context import JobContext
from rota.job.core.desired import wanted
from rota.job.core.machine import initial
from rota.job.core.resize import saved_by_script, sized, world_of
from rota.service.views.job_history import JobHistory, begin_history
from rota.service.views.reasons import failure_list
from rota.service.webhooks import notice_of
from rota.spec.commands import FENCED_GRACE_S, Assemble, SetTimer, StopInstance
from rota.spec.events import (
    CheckpointSaved,
    Committed,
    FailoverStarted,
    GangAsked,
    GangReleased,
    GangReserveFailed,
    GangWaits,
    InstanceLost,
    PreemptAsked,
    ScaleAsked,
    TimerFired,
)
from rota.spec.ids import Epoch, JobId, NodeId, RoleName
from rota.spec.job import Near, RoleSpec
from rota.spec.reasons import Reason
from rota.spec.states import GangState, InstanceState, JobState, Level


def elastic(low: int = 1, high: int = 3, **fields: object) -> RoleSpec:
    role = command("train", low, mesh=(("dp", low),), elastic_axis="dp", **fields)
    return replace(role, replicas_max=high)


def lost(driven, who: str, reason: Reason = Reason.SIGNALLED) -> InstanceLost:
    one = driven.ctx.instances[at(who)]
    return InstanceLost(role=one.id.role, rank=one.id.rank, epoch=one.epoch, reason=reason)


def active(driven, role: str) -> list[int]:
    return [one.id.rank for one in driven.ctx.active_of(RoleName(role))]


def verdicts(driven) -> list[FailoverStarted]:
    return [record.event for record in driven.records if isinstance(record.event, FailoverStarted)]


def moves(driven) -> list[tuple[str, str | None]]:
    return [(one.level.value, one.move_reason) for one in verdicts(driven)]


def fire(driven, kind: str) -> None:
    timer = next(one.timer for one in wanted(driven.ctx) if isinstance(one, SetTimer) and one.timer.startswith(kind))
    driven.feed(TimerFired(timer=timer))
    driven.settle()


def worlds(driven) -> list[int]:
    return [len(one.peers) for one in driven.done if isinstance(one, Assemble)]


def replayed(driven) -> JobContext:
    return replay(driven.ctx.job, tuple(driven.records), initial(driven.ctx.job))


def told_by(driven) -> JobHistory:
    story = begin_history(driven.records[0])
    for record in driven.records[1:]:
        story.apply(record)
    return story


# -- standby and degrade ----------------------------------------------------------------------------------------------


def test_a_spare_takes_over_at_the_verdict_and_what_was_lost_comes_up_as_the_next_spare(driven):
    driven.run(spec(service("w", 2, fail=fail(standby=1)), loop()))
    assert active(driven, "w") == [0, 1]
    assert driven.ctx.instances[at("w/2")].state is InstanceState.READY
    driven.feed(lost(driven, "w/0"))
    driven.settle(hold="stop/w/0")  # the old process is not even gone
    assert (active(driven, "w"), driven.ctx.state) == ([1, 2], JobState.RUNNING)
    driven.settle()
    assert active(driven, "w") == [1, 2]
    assert driven.ctx.instances[at("w/0")].spare
    assert driven.ctx.instances[at("w/0")].state is InstanceState.READY


def test_a_spare_that_dies_disturbs_nobody(driven):
    driven.run(spec(service("w", 1, fail=fail(standby=1)), loop()))
    before = driven.ctx.instances[at("w/0")]
    driven.feed(lost(driven, "w/1"))
    driven.settle()
    assert driven.ctx.instances[at("w/0")] == before
    assert verdicts(driven)[0].scope == (("w", 1, 2),)
    assert driven.ctx.instances[at("w/1")].state is InstanceState.READY


def test_degrade_goes_on_with_fewer_while_the_lost_one_comes_up_in_the_background(driven):
    driven.run(spec(service("w", 3, fail=fail(degrade=2)), loop()))
    driven.feed(lost(driven, "w/1"))
    driven.settle(hold="stop/w/1")
    assert (active(driven, "w"), driven.ctx.state) == ([0, 2], JobState.RUNNING)
    driven.feed(lost(driven, "w/0"))
    driven.settle(hold="stop/w")
    assert driven.ctx.state is JobState.RECOVERING, "fewer than the contract allows"
    driven.settle()
    assert (active(driven, "w"), driven.ctx.state) == ([0, 1, 2], JobState.RUNNING)


def test_a_checkpoint_of_a_script_keeps_what_is_known_of_those_of_commits():
    ctx = replace(initial(JobId("j")), checkpoint_n=7, checkpoint_path="c/7", checkpoint_cursor={"s": 3})
    assert saved_by_script(ctx) == CheckpointSaved(n=7, path="c/7", cursor={"s": 3})


def test_over_its_limit_a_degraded_role_is_asked_for_elsewhere_and_taken_in_when_granted(driven):
    driven.run(spec(service("w", 2, fail=fail(degrade=1, limit_n=0))))
    driven.feed(lost(driven, "w/1"))
    driven.settle()
    asked = next(record.event for record in driven.records if isinstance(record.event, GangAsked))
    assert (asked.avoid, active(driven, "w"), driven.ctx.state) == (("h0",), [0], JobState.RUNNING)
    driven.free = ["h0", "h1"]
    driven.settle()
    assert active(driven, "w") == [0, 1]
    assert driven.ctx.bundle(at("w/1"))[1].node == "h1"
    assert replayed(driven) == driven.ctx


# -- worlds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "size"),
    [(1, 0), (2, 2), (3, 2), (4, 4), (7, 6), (9, 8)],
)
def test_a_world_is_a_multiple_of_its_fixed_axes(members: int, size: int):
    role = replace(command("t", 2, mesh=(("dp", 1), ("tp", 2)), elastic_axis="dp"), replicas_max=8)
    assert world_of(role, members) == size


def test_a_world_divides_the_global_batch():
    role = elastic(1, 8, env=(("ROTA_GLOBAL_BATCH", "12"),))
    assert [world_of(role, n) for n in range(1, 9)] == [1, 2, 3, 4, 4, 6, 6, 6]


def test_a_world_begins_with_everything_that_is_granted(driven):
    driven.free = ["h1"]
    driven.run(spec(elastic(1, 3)))
    assert worlds(driven) == [3, 3, 3]
    assert (active(driven, "train"), driven.ctx.state) == ([0, 1, 2], JobState.RUNNING)
    assert not verdicts(driven)


def test_a_world_begins_with_its_fewest_when_no_more_is_to_be_had_or_nobody_answers(driven):
    driven.free = None
    driven.run(spec(elastic(1, 3)))
    assert driven.ctx.state is JobState.STARTING
    fire(driven, "asks")
    assert (worlds(driven), driven.ctx.state) == ([1], JobState.RUNNING)


def test_a_world_grows_at_a_checkpoint_and_not_twice_in_a_minute(driven):
    driven.run(spec(elastic(1, 3)))
    driven.free = ["h1"]
    driven.settle()
    assert active(driven, "train") == [0], "warm, and waiting for a boundary"
    driven.feed(CheckpointSaved(n=0, path="c"), after_s=1.0)
    driven.settle()
    assert (active(driven, "train"), driven.ctx.state) == ([0, 1, 2], JobState.RUNNING)
    assert verdicts(driven)[-1].reason is Reason.RESIZED
    assert not driven.ctx.charges
    assert driven.ctx.instances[at("train/0")].restarts == 0, "the same process, another world"


def test_a_member_that_came_later_waits_a_minute_after_the_last_change(driven):
    driven.free = ["h1"]
    driven.run(spec(elastic(1, 2, fail=fail(limit_n=0))))
    driven.feed(lost(driven, "train/1"))
    driven.settle()
    assert active(driven, "train") == [0]
    driven.feed(CheckpointSaved(n=0, path="c"), after_s=5.0)
    driven.settle()
    assert active(driven, "train") == [0]
    driven.feed(CheckpointSaved(n=0, path="c"), after_s=60.0)
    driven.settle()
    assert active(driven, "train") == [0], "its node is excluded, and there is no other"
    driven.free = ["h2"]
    driven.settle()
    driven.feed(CheckpointSaved(n=0, path="c"), after_s=1.0)
    driven.settle()
    assert active(driven, "train") == [0, 1]


def test_a_lost_node_shrinks_the_world_at_once_and_the_living_keep_their_processes(driven):
    driven.free = ["h1"]
    driven.run(spec(elastic(1, 3)))
    driven.free = []
    before = driven.ctx.instances[at("train/0")].process
    driven.feed(lost(driven, "train/2", Reason.NODE_LOST))
    driven.settle()
    assert (active(driven, "train"), driven.ctx.state) == ([0], JobState.RUNNING)
    assert driven.ctx.instances[at("train/0")].process == before
    assert worlds(driven)[-1] == 1
    assert verdicts(driven)[-1].leave == (("train", 1), ("train", 2))
    driven.free = ["h1", "h2"]
    driven.settle()
    driven.feed(CheckpointSaved(n=0, path="c"), after_s=61.0)
    driven.settle()
    assert active(driven, "train") == [0, 1, 2]
    assert {driven.ctx.bundle(at(f"train/{rank}"))[1].node for rank in (1, 2)} == {"h2"}
    assert replayed(driven) == driven.ctx


def test_a_job_admitted_with_more_than_its_fewest_starts_so_and_goes_on_smaller_when_a_node_is_lost(driven):
    job = spec(elastic(1, 4))
    driven.feed(*submitted(job), started(job, "train", 3, "h0", "h1", "h2"))
    driven.master().settle()
    assert (active(driven, "train"), worlds(driven)[-1]) == ([0, 1, 2], 3)
    asked = [one.event.request for one in driven.records if isinstance(one.event, GangAsked)]
    assert [one.bundles[0].members[0].rank for one in asked] == [3]
    driven.feed(lost(driven, "train/1", Reason.NODE_LOST))
    driven.settle()
    assert (driven.ctx.state, active(driven, "train"), worlds(driven)[-1]) == (JobState.RUNNING, [0, 2], 2)
    driven.free = ["h3", "h4"]
    driven.settle()
    driven.feed(CheckpointSaved(n=0, path="c"), after_s=61.0)
    driven.settle()
    assert active(driven, "train") == [0, 1, 2, 3], "with free devices it grows back, and on"
    assert replayed(driven) == driven.ctx


@pytest.mark.parametrize("alive", [True, False])
def test_who_only_went_with_a_peer_whose_node_is_lost_is_what_is_left_of_the_world(driven, alive: bool):
    driven.free = ["h1"]
    driven.run(spec(elastic(1, 2)))
    driven.free = []
    reset = replace(lost(driven, "train/0", Reason.USER_ERROR), text="Connection reset by peer", alive=alive)
    driven.feed(reset, lost(driven, "train/1", Reason.NODE_LOST))
    driven.settle()
    assert (active(driven, "train"), driven.ctx.state) == ([0], JobState.RUNNING)
    assert verdicts(driven)[-1].leave == (("train", 1),)
    assert (worlds(driven)[-1], driven.ctx.bundle(at("train/0"))[1].node) == (1, "h0")
    driven.free = ["h2"]
    driven.settle()
    driven.feed(CheckpointSaved(n=0, path="c"), after_s=61.0)
    driven.settle()
    assert active(driven, "train") == [0, 1]
    assert replayed(driven) == driven.ctx


def test_a_process_that_dies_within_its_limit_is_started_where_it_was(driven):
    driven.free = ["h1"]
    driven.run(spec(elastic(1, 2)))
    driven.feed(lost(driven, "train/1"))
    driven.settle()
    assert active(driven, "train") == [0, 1]
    assert verdicts(driven)[-1].leave == ()


def test_an_exception_never_shrinks_a_world(driven):
    driven.free = ["h1"]
    driven.run(spec(elastic(1, 2, fail=fail(limit_n=0))))
    driven.feed(lost(driven, "train/1", Reason.USER_ERROR))
    driven.settle()
    assert driven.ctx.state is JobState.FAILED


# -- other nodes ------------------------------------------------------------------------------------------------------


def test_a_lost_node_is_replaced_by_another_and_the_rest_goes_on(driven):
    driven.run(spec(service("w", 2, fail=fail(limit_n=0)), gang="subgraph"))
    driven.free = ["h1"]
    other = driven.ctx.instances[at("w/1")]
    driven.feed(lost(driven, "w/0"))
    driven.settle()
    assert moves(driven) == [("node", "BUDGET_PROCESS")]
    assert driven.ctx.state is JobState.RUNNING
    assert driven.ctx.bundle(at("w/0"))[1].node == "h1"
    assert driven.ctx.instances[at("w/1")].restarts == other.restarts + 1, "it was on the same node"


def test_who_waits_for_a_node_starts_where_it_was_as_soon_as_its_own_is_back(driven):
    driven.run(spec(service("w", 3), loop()), "h0", "h1", "h2", "h0")
    gangs = driven.ctx.gangs
    driven.feed(lost(driven, "w/1", Reason.NODE_LOST), lost(driven, "w/2", Reason.NODE_LOST))
    driven.settle()
    (asked,) = driven.ctx.asks
    assert (driven.ctx.state, asked.avoid) == (JobState.RECOVERING, ("h1", "h2"))
    driven.feed(GangWaits(gang=asked.gang, reason=Reason.NO_FREE_DEVICES, back=(NodeId("h1"),)))
    driven.settle()
    (asked,) = driven.ctx.asks
    assert ([str(one) for one in asked.everybody], asked.avoid) == (["w/2"], ("h2",))
    assert driven.ctx.instances[at("w/1")].state is InstanceState.READY, "it does not wait for the other"
    driven.feed(GangWaits(gang=asked.gang, reason=Reason.NO_FREE_DEVICES, back=(NodeId("h2"),)))
    driven.settle()
    assert (driven.ctx.state, driven.ctx.asks, driven.ctx.gangs) == (JobState.RUNNING, (), gangs)
    assert [driven.ctx.bundle(at(f"w/{rank}"))[1].node for rank in (1, 2)] == ["h1", "h2"]
    assert replayed(driven) == driven.ctx


@pytest.mark.parametrize(
    ("reasons", "lost_nodes"),
    [
        ((Reason.NODE_LOST, Reason.NODE_LOST), ("h1", "h2")),
        ((Reason.GPU_ECC, Reason.NODE_LOST), ("h2",)),
        ((Reason.GPU_LOST, Reason.NODE_SUSPECT), ()),
    ],
)
def test_an_ask_says_which_of_the_nodes_the_engine_lost(driven, reasons, lost_nodes):
    driven.run(spec(service("w", 3), loop()), "h0", "h1", "h2", "h0")
    driven.feed(*(lost(driven, f"w/{rank}", reason) for rank, reason in enumerate(reasons, 1)))
    driven.settle()
    (asked,) = [record.event for record in driven.records if isinstance(record.event, GangAsked)]
    assert (asked.avoid, asked.lost, asked.lost_nodes) == (("h1", "h2"), True, lost_nodes)


def test_a_node_with_a_broken_device_is_not_lost_though_the_engine_lost_it_then(driven):
    driven.run(spec(service("w", 2), loop()), "h1", "h1", "h0")
    driven.feed(lost(driven, "w/0", Reason.NODE_LOST), lost(driven, "w/1", Reason.GPU_ECC))
    driven.settle()
    assert [(ask.avoid, ask.lost_nodes) for ask in driven.ctx.asks] == [(("h1",), ())]


def test_a_world_that_shrank_grows_again_where_it_was_when_the_node_is_back(driven):
    role = replace(command("train", 2, mesh=(("dp", 2),), elastic_axis="dp"), replicas_min=1, replicas_max=2)
    driven.feed(*submitted(spec(role)), started(spec(role), "train", 2, "h0", "h1"))
    driven.master().settle()
    driven.feed(lost(driven, "train/1", Reason.NODE_LOST))
    driven.settle()
    (asked,) = driven.ctx.asks
    assert (active(driven, "train"), asked.avoid) == ([0], ("h1",))
    driven.feed(GangWaits(gang=asked.gang, reason=Reason.NO_FREE_DEVICES, back=(NodeId("h1"),)))
    driven.settle()
    driven.feed(CheckpointSaved(n=0, path="c"), after_s=61.0)
    driven.settle()
    assert (active(driven, "train"), driven.ctx.asks) == ([0, 1], ())
    assert driven.ctx.bundle(at("train/1"))[1].node == "h1"
    assert replayed(driven) == driven.ctx


def test_a_place_that_the_engine_refuses_is_avoided_beside_the_lost_node(driven):
    driven.free = None
    driven.run(spec(service("w", 2), loop(), gang="subgraph"))
    home = driven.ctx.bundle(at("w/0"))[1].node
    driven.feed(lost(driven, "w/0", Reason.NODE_LOST))
    driven.free = ["h9"]
    driven.settle(hold="reserve/moved")
    gang = next(one for one in driven.ctx.gangs if one.state is GangState.RESERVING)
    driven.free = None
    driven.feed(GangReserveFailed(gang=gang.id, epoch=gang.epoch, reason=Reason.GANG_TIMEOUT))
    driven.settle()
    assert [one.avoid for one in driven.ctx.asks] == [(home, "h9")]
    assert replayed(driven) == driven.ctx


def test_the_last_member_of_a_world_whose_new_place_is_refused_is_not_given_up(driven):
    """A world cannot begin with nobody: the job would stay RUNNING with no member."""
    driven.free = []
    driven.run(spec(elastic(1, 2)))
    driven.feed(lost(driven, "train/0", Reason.NODE_LOST))
    driven.free = ["h9"]
    driven.settle(hold="reserve/")
    driven.free = []
    for gang in driven.ctx.gangs:
        driven.feed(GangReserveFailed(gang=gang.id, epoch=gang.epoch, reason=Reason.GANG_TIMEOUT))
    driven.settle()
    assert active(driven, "train") == [0]
    assert [one.avoid for one in driven.ctx.asks if one.everybody[0].rank == 0] == [("h0", "h9")]
    assert replayed(driven) == driven.ctx


def test_a_whole_gang_is_given_back_before_its_replacement_is_reserved(driven):
    driven.run(spec(service("w", 2)))
    driven.free = ["h1"]
    driven.feed(lost(driven, "w/0", Reason.NODE_LOST))
    driven.settle()
    ids = [one.id for one in driven.done]
    assert ids.index("release/all/1") < ids.index(next(one for one in ids if one.startswith("reserve/moved")))
    assert [gang.id for gang in driven.ctx.gangs] == [driven.ctx.bundle(at("w/0"))[0]]


def test_without_another_node_a_fit_one_is_used_again_until_the_budget_of_moves_is_used_up(driven):
    driven.run(spec(service("w", 1, fail=fail(limit_n=0))))
    for _ in range(3):
        driven.feed(lost(driven, "w/0"))
        driven.settle()
    assert moves(driven) == [
        ("node", "BUDGET_PROCESS"),
        ("process", "NO_NODE"),
        ("node", "BUDGET_PROCESS"),
        ("process", "NO_NODE"),
        ("job", "BUDGET_NODE"),
    ]
    assert driven.ctx.state is JobState.FAILED


def test_without_another_node_everybody_of_the_node_comes_back_and_a_free_one_later_moves_nobody(driven):
    driven.run(spec(service("w", 1, fail=fail(limit_n=0)), service("log", 1, fail=fail(standby=1))))
    driven.feed(lost(driven, "w/0"))
    driven.settle()
    assert moves(driven) == [("node", "BUDGET_PROCESS"), ("process", "NO_NODE")]
    assert at("log/1") not in driven.ctx.failovers[-1].scope, "who stands by is in nobody's way"
    driven.free = ["h1"]
    driven.settle()
    assert driven.ctx.asks == ()
    assert {driven.ctx.bundle(one)[1].node for one in driven.ctx.instances} == {"h0"}
    assert {one.state for one in driven.ctx.instances.values()} == {InstanceState.READY}
    assert replayed(driven) == driven.ctx


def test_a_move_for_which_one_of_its_members_waits_no_more_is_asked_anew_for_the_others(driven):
    driven.free = None
    driven.run(spec(service("w", 1), service("log", 1), gang="subgraph"))
    driven.feed(lost(driven, "w/0", Reason.NODE_LOST))
    driven.settle()
    (asked,) = driven.ctx.asks
    assert {str(one) for one in asked.everybody} == {"w/0", "log/0"}
    driven.ctx = sized(driven.ctx.with_instances([replace(driven.ctx.instances[at("log/0")], excluded=())]))
    left = {ask.gang: (ask.state, {str(one) for one in ask.everybody}) for ask in driven.ctx.asks}
    assert left.pop(asked.gang) == ("dropped", {"w/0", "log/0"})
    assert list(left.values()) == [("wanted", {"w/0"})]


def test_state_that_was_in_the_memory_of_a_lost_node_comes_back_from_the_last_checkpoint(driven):
    driven.run(spec(mesh("actor", 2), loop()))
    for n in range(1, 5):
        driven.feed(Committed(n=n, loop_epoch=Epoch(1)))
    driven.feed(CheckpointSaved(n=2, path="c"))
    driven.free = ["h1"]
    driven.feed(lost(driven, "actor/0", Reason.NODE_LOST))
    driven.settle()
    found = verdicts(driven)[0]
    assert (found.level, found.restore, found.move_reason) == (Level.NODE, 2, Reason.STATE_LOST)
    assert (driven.ctx.committed, driven.ctx.state) == (2, JobState.RUNNING)
    assert {one.restored for one in driven.ctx.instances.values()} == {2}


# -- sizes that are asked for -----------------------------------------------------------------------------------------


def test_scale_up_asks_for_more_and_scale_down_gives_them_back(driven):
    driven.free = ["h1"]
    driven.run(spec(service("w", 1), loop()))
    driven.feed(ScaleAsked(role=RoleName("w"), n=3))
    driven.settle()
    assert (active(driven, "w"), driven.ctx.state) == ([0, 1, 2], JobState.RUNNING)
    driven.feed(ScaleAsked(role=RoleName("w"), n=2))
    driven.settle()
    assert active(driven, "w") == [0, 1]
    assert sum(isinstance(record.event, GangReleased) for record in driven.records) == 1
    assert not [key for key in driven.alive if key[:2] == ("w", 2)]
    assert replayed(driven) == driven.ctx
    assert JobContext.from_json(driven.ctx.to_json()) == driven.ctx


def test_a_role_with_a_spare_that_is_scaled_down_keeps_the_number_of_its_spares(driven):
    driven.free = ["h1"]
    driven.run(spec(service("w", 2, fail=fail(standby=1)), loop()))
    driven.feed(ScaleAsked(role=RoleName("w"), n=3))
    driven.settle()
    assert active(driven, "w") == [0, 1, 2] and driven.ctx.instances[at("w/3")].spare
    before = driven.ctx.instances[at("w/2")]
    driven.feed(ScaleAsked(role=RoleName("w"), n=2))
    driven.settle()
    assert active(driven, "w") == [0, 1]
    assert driven.ctx.instances[at("w/2")] == replace(before, spare=True), "its process stays"
    assert driven.ctx.instances[at("w/3")].retired


def test_an_ask_that_nobody_needs_any_more_is_taken_back(driven):
    driven.run(spec(service("w", 1), loop()))
    driven.feed(ScaleAsked(role=RoleName("w"), n=2))
    driven.settle()
    assert [ask.state for ask in driven.ctx.asks] == ["asked"]
    driven.feed(ScaleAsked(role=RoleName("w"), n=1))
    driven.settle()
    assert driven.ctx.asks == ()


def test_a_world_that_is_scaled_down_shrinks_at_once(driven):
    driven.free = ["h1"]
    driven.run(spec(elastic(1, 3)))
    driven.feed(ScaleAsked(role=RoleName("train"), n=2))
    driven.settle()
    assert (active(driven, "train"), driven.ctx.state) == ([0, 1], JobState.RUNNING)
    assert len(driven.ctx.gangs) == 2


def test_the_ranks_of_a_world_that_changes_its_size_have_the_grace_of_the_job_to_save(driven):
    driven.free = ["h1"]
    driven.run(spec(elastic(1, 3), grace_s=12.0))
    driven.feed(ScaleAsked(role=RoleName("train"), n=2))
    driven.settle()
    ended = [one for one in driven.done if isinstance(one, StopInstance)]
    formed = [one for one in driven.done if isinstance(one, Assemble) and one.epoch == driven.ctx.epoch_max]
    assert [(str(one.instance), one.grace_s) for one in ended] == [("train/2", 12.0)]
    assert [(str(one.instance), one.grace_s) for one in formed] == [("train/0", 12.0), ("train/1", 12.0)]
    driven.feed(lost(driven, "train/1"))
    driven.settle()
    again = [one for one in driven.done if isinstance(one, Assemble) and one.epoch == driven.ctx.epoch_max]
    assert {one.grace_s for one in again} == {FENCED_GRACE_S}, "after a loss the others may hang"


@pytest.mark.parametrize("role", [elastic(1, 3), replace(service("train", 1), replicas_max=3)])
def test_a_gang_that_others_want_leaves_the_job_which_goes_on_with_fewer_and_grows_again(driven, role):
    driven.free = ["h1"]
    driven.run(spec(role) if role.elastic_axis else spec(role, loop()))
    gang, driven.free = driven.ctx.bound[at("train/1")][0], []
    driven.feed(PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, gang=gang))
    driven.settle()
    assert (active(driven, "train"), driven.ctx.state, driven.ctx.attempt) == ([0, 2], JobState.RUNNING, 1)
    told = told_by(driven)
    assert told.preempt is None and not [record for record in driven.records if notice_of(record, told) == "preempted"]
    assert [r.event.gang for r in driven.records if isinstance(r.event, GangReleased)] == [gang]
    assert not [key for key in driven.alive if key[:2] == ("train", 1)]
    driven.free = ["h1"]
    driven.settle()
    driven.feed(CheckpointSaved(n=0, path="c"), after_s=61.0)
    driven.settle()
    assert (active(driven, "train"), driven.ctx.charges) == ([0, 1, 2], ())
    assert replayed(driven) == driven.ctx
    assert JobContext.from_json(driven.ctx.to_json()) == driven.ctx


def test_servers_give_gangs_back_down_to_the_fewest_that_they_need(driven):
    driven.free = ["h1"]
    driven.run(spec(replace(service("serve", 3), replicas_min=1, replicas_max=3), loop()))
    gangs, driven.free = [driven.ctx.bound[at(f"serve/{rank}")][0] for rank in (1, 2)], []
    for left in ([0, 2], [0]):
        driven.feed(PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, gang=gangs.pop(0)))
        assert (active(driven, "serve"), driven.ctx.state) == (left, JobState.RUNNING)


def test_a_job_that_cannot_go_on_without_the_gang_that_others_want_gives_all_back(driven):
    driven.free = ["h1"]
    driven.run(spec(elastic(1, 2)))
    gang = driven.ctx.bound[at("train/0")][0]
    driven.feed(PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, gang=gang, for_job="high"))
    story = told_by(driven)
    assert story.preempt is not None and story.preempt.for_job == "high"
    asked = next(record for record in driven.records if isinstance(record.event, PreemptAsked))
    assert notice_of(asked, story) == "preempted"
    driven.settle()
    assert (driven.ctx.state, driven.ctx.gangs) == (JobState.QUEUED, ())


@pytest.mark.parametrize("found", [True, False])
def test_gangs_that_others_want_are_given_back_though_too_few_stay_after_a_loss(driven, found):
    driven.free = ["h1"]
    driven.run(spec(elastic(2, 4)))
    gangs, driven.free = [driven.ctx.bound[at(f"train/{rank}")][0] for rank in (2, 3)], []
    driven.feed(*(PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, gang=gang) for gang in gangs))
    driven.feed(lost(driven, "train/0", Reason.NODE_LOST))
    driven.settle()
    assert driven.ctx.state is JobState.RECOVERING, "it waits for another node, not goes on in what it shall give back"
    if found:
        driven.free = ["h2"]
        driven.settle()
    else:
        fire(driven, "node")
    after = JobState.RUNNING if found else JobState.QUEUED
    assert (driven.ctx.state, active(driven, "train")) == (after, [0, 1])
    assert not {gang.id for gang in driven.ctx.gangs} & set(gangs)
    assert replayed(driven) == driven.ctx


def test_who_moves_keeps_away_from_those_it_must_be_apart_from(driven):
    driven.run(spec(service("w", 2, apart=(Near(role="self", level="node"),), fail=fail(limit_n=0))), "h0", "h1")
    driven.feed(lost(driven, "w/0"))
    driven.settle()
    asked = next(record.event for record in driven.records if isinstance(record.event, GangAsked))
    assert (asked.avoid, asked.apart) == (("h0",), ("h1",))


def test_a_size_that_somebody_wanted_is_no_failure_in_the_story(driven):
    driven.free = ["h1"]
    driven.run(spec(elastic(1, 3)))
    driven.feed(ScaleAsked(role=RoleName("train"), n=1))
    driven.settle()
    assert [one.reason for one in verdicts(driven)] == [Reason.RESIZED]
    story = told_by(driven)
    assert failure_list(story)["items"] == []
    driven.feed(lost(driven, "train/0"))
    driven.settle()
    for record in driven.records:
        story.apply(record)
    assert [one["instance"] for one in failure_list(story)["items"]] == ["train/0"]
