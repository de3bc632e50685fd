"""Which level, which scope, which budget: verdicts as values, and the timers around them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.makers import admitted, at, command, fail, loop, mesh, replay, rl, service, spec

from rota.job.core.context import PLATFORM_FAULTS_MAX, Loss, NotYet
from rota.job.core.desired import next_emit, wanted
from rota.job.core.failover import is_secondary, kind_of, root_cause
from rota.job.core.machine import initial
from rota.job.master.executor import death_event
from rota.runtime.launcher import ProcessDied
from rota.spec.commands import Assemble, CheckNode, ReleaseGang, RunInstance, SetTimer, StartInstance
from rota.spec.events import (
    CheckpointSaved,
    Committed,
    DowntimePassed,
    FailoverStarted,
    GangAsked,
    GangReserveFailed,
    InstanceEnded,
    InstanceLost,
    InstanceStarted,
    JobEnded,
    JobRequeued,
    MasterStarted,
    PreemptAsked,
    ProgressStalled,
    Reattached,
    RolledBack,
    StopAsked,
    TimerFired,
)
from rota.spec.ids import Epoch, GangId, NodeId, RoleName
from rota.spec.job import WeightsEdge
from rota.spec.reasons import STUCK_EXIT_STATUS, Reason
from rota.spec.states import JobState, Level


def lost(role: str, rank: int, epoch: int, reason: Reason = Reason.SIGNALLED, text: str = "") -> InstanceLost:
    return InstanceLost(role=RoleName(role), rank=rank, epoch=Epoch(epoch), reason=reason, text=text)


def verdict(driven) -> FailoverStarted:
    emit = next_emit(driven.ctx)
    assert emit is not None
    assert isinstance(emit.event, FailoverStarted)
    return emit.event


def timer(driven, kind: str) -> SetTimer:
    return next(one for one in wanted(driven.ctx) if isinstance(one, SetTimer) and one.timer.startswith(kind))


def test_the_scope_is_in_the_verdict_with_new_epochs(driven):
    driven.run(rl())
    driven.feed(lost("reward", 0, 1))
    found = verdict(driven)
    assert (found.level, found.scope, found.restore) == (Level.PROCESS, (("reward", 0, 2),), 0)


def test_two_losses_before_the_verdict_are_one_charge_and_one_recovery(driven):
    driven.run(rl())
    driven.feed(lost("actor", 1, 1, Reason.USER_ERROR, "Connection reset by peer"), lost("actor", 0, 1))
    found = verdict(driven)
    assert (found.role, found.rank) == ("actor", 0)
    driven.settle()
    assert len(driven.ctx.charges) == 1


def test_an_error_that_only_says_a_peer_is_gone_waits_for_its_cause_and_no_longer(driven):
    driven.run(rl())
    driven.feed(lost("actor", 1, 1, Reason.COLLECTIVE_TIMEOUT))
    assert next_emit(driven.ctx) == NotYet(
        "the cause is not known: what was reported looks like the consequence of another loss"
    )
    wait = timer(driven, "diagnose")
    assert wait.after_s == 2.0
    driven.feed(TimerFired(timer=wait.timer))
    assert verdict(driven).reason is Reason.COLLECTIVE_TIMEOUT


def test_then_role_widens_before_the_job(driven):
    driven.run(spec(service("w", 2, fail=fail(restart="process", limit_n=1, then=("role", "job")))))
    levels = []
    for _ in range(3):
        epoch = driven.ctx.instances[at("w/0")].epoch
        driven.feed(lost("w", 0, epoch))
        levels.append((verdict(driven).level, verdict(driven).move_reason))
        driven.settle()
    assert levels == [
        (Level.PROCESS, None),
        (Level.ROLE, Reason.BUDGET_PROCESS),
        (Level.JOB, Reason.BUDGET_PROCESS),
    ]
    assert driven.ctx.state is JobState.FAILED


def test_the_budget_of_a_role_is_its_own(driven):
    driven.run(spec(service("a", fail=fail(limit_n=1)), service("b", fail=fail(limit_n=1))))
    for role in ("a", "b"):
        driven.feed(lost(role, 0, driven.ctx.instances[at(f"{role}/0")].epoch))
        driven.settle()
    assert driven.ctx.state is JobState.RUNNING


def test_the_budget_survives_the_master(driven):
    driven.run(spec(service("w", fail=fail(limit_n=1))))
    driven.feed(lost("w", 0, 1))
    driven.settle().master(2).settle()
    driven.feed(lost("w", 0, driven.ctx.instances[at("w/0")].epoch))
    assert verdict(driven).level is Level.NODE


def test_a_role_that_may_degrade_goes_on_with_fewer_instead_of_widening(driven):
    driven.run(spec(service("w", 3, fail=fail(limit_n=1, degrade=2)), service("other")))
    for _ in range(2):
        driven.feed(lost("w", 1, driven.ctx.instances[at("w/1")].epoch))
        driven.settle()
    assert driven.ctx.state is JobState.RUNNING
    assert driven.ctx.instances[at("w/1")].retired
    assert not [key for key in driven.alive if key[:2] == ("w", 1)]
    assert driven.ctx.failovers[-1].move_reason is Reason.RESIZED_DEGRADED
    driven.master(2).settle()
    assert driven.ctx.state is JobState.RUNNING
    driven.feed(lost("w", 0, driven.ctx.instances[at("w/0")].epoch, Reason.USER_ERROR))
    driven.settle()
    assert driven.ctx.state is JobState.FAILED


def test_a_lost_node_costs_no_retry(driven):
    driven.run(rl())
    driven.feed(lost("reward", 0, 1, Reason.NODE_LOST))
    driven.settle()
    assert driven.ctx.state is JobState.RECOVERING
    assert timer(driven, "node").after_s == 300.0
    driven.feed(TimerFired(timer=timer(driven, "node").timer))
    driven.settle()
    assert driven.ctx.state is JobState.QUEUED
    assert driven.records[-1].event == JobRequeued(attempt=1, reason=Reason.NODE_LOST, counts=False)
    assert [one.level for one in driven.ctx.failovers] == [Level.NODE, Level.JOB]


def test_back_off_doubles_and_holds_the_start(driven):
    driven.run(spec(service("w", fail=fail(limit_n=9, backoff_s=2.0))))
    waits = []
    for _ in range(4):
        driven.feed(lost("w", 0, driven.ctx.instances[at("w/0")].epoch))
        driven.settle()
        if driven.ctx.state is JobState.RECOVERING:
            assert not [one for one in wanted(driven.ctx) if isinstance(one, StartInstance)]
            waits.append(timer(driven, "backoff").after_s)
            driven.feed(TimerFired(timer=timer(driven, "backoff").timer))
            driven.settle()
        assert driven.ctx.state is JobState.RUNNING
    assert waits == [2.0, 4.0, 8.0]


def test_who_is_furthest_behind_is_given_up_when_a_start_takes_too_long(driven):
    driven.admit(rl()).settle(hold="start/actor/1")
    limit = timer(driven, "start")
    assert limit.after_s == 300.0
    driven.feed(TimerFired(timer=limit.timer, doing={"actor/1": "last heard in its setup"}), after_s=300.0)
    found = verdict(driven)
    assert (found.reason, found.role, found.rank) == (Reason.START_TIMEOUT, "actor", 1)
    assert found.text.endswith("; last heard in its setup")
    driven.settle()
    assert driven.ctx.state is JobState.RUNNING
    driven.feed(TimerFired(timer=limit.timer))
    assert driven.ctx.state is JobState.RUNNING


def test_the_time_limit_counts_run_time_over_all_attempts(driven):
    job = spec(service("w"), time_limit_s=100.0)
    driven.run(job)
    assert timer(driven, "time-limit").after_s == 100.0
    driven.feed(PreemptAsked(reason=Reason.PREEMPTED_RECLAIM), after_s=40.0)
    driven.settle()
    used_s = driven.ctx.used_s
    assert used_s > 40.0
    driven.feed(admitted(job, attempt=2), after_s=500.0)
    driven.settle()
    limit = timer(driven, "time-limit")
    assert limit.after_s == pytest.approx(100.0 - used_s)
    driven.feed(TimerFired(timer=limit.timer))
    driven.settle()
    assert (driven.ctx.state, driven.ctx.end_reason) == (JobState.FAILED, Reason.TIME_LIMIT)


def test_time_in_which_neither_service_nor_engine_ran_counts_for_no_time_limit(driven):
    job = spec(service("w"), time_limit_s=100.0)
    driven.run(job)
    admitted_s, used_s = driven.ctx.admitted_s, driven.ctx.used_s
    since = driven.ctx.at_s + 30.0
    driven.feed(DowntimePassed(since=since), after_s=90.0)
    assert timer(driven, "time-limit").after_s == pytest.approx(160.0), "60 of the 90 s do not count"
    driven.feed(PreemptAsked(reason=Reason.PREEMPTED_RECLAIM))
    driven.settle()
    assert driven.ctx.used_s - used_s == pytest.approx(driven.ctx.at_s - admitted_s - 60.0)


def test_a_stall_is_a_loss_with_its_stacks_and_the_silent_process_is_stopped(driven):
    driven.run(rl())
    driven.feed(ProgressStalled(role=RoleName("reward"), rank=1, epoch=Epoch(1), idle_s=301.0, stacks="S"))
    found = verdict(driven)
    assert (found.reason, found.text, found.traceback) == (Reason.NO_PROGRESS, "no progress for 301 s", "S")
    driven.settle()
    assert "stop/reward/1/1" in [one.id for one in driven.done]


def test_what_a_stall_says_is_kept_with_the_loss(driven):
    driven.run(rl())
    driven.feed(ProgressStalled(role=RoleName("reward"), rank=1, epoch=Epoch(1), idle_s=9.0, text="waits for actor/0"))
    assert verdict(driven).text == "waits for actor/0"


def test_an_engine_that_forgot_everything_requeues_the_job_for_free(driven):
    job = rl()
    driven.run(job).feed(Committed(n=1, loop_epoch=Epoch(1)))
    driven.alive.clear()
    driven.feed(MasterStarted(master_epoch=Epoch(2), pid=1), Reattached(master_epoch=Epoch(2)))
    driven.settle()
    assert driven.records[-1].event == JobRequeued(attempt=1, reason=Reason.ENGINE_LOST, counts=False)
    driven.feed(admitted(job, attempt=2))
    driven.settle()
    assert [one.committed for one in wanted(driven.ctx) if isinstance(one, RunInstance)] == [1]


def test_a_reservation_that_is_not_granted_is_tried_again_while_the_platform_has_budget_and_costs_no_retry(driven):
    job = rl(retry=3)
    driven.admit(job)
    for attempt in range(2, PLATFORM_FAULTS_MAX + 3):
        epoch = driven.ctx.gangs[0].epoch
        driven.feed(GangReserveFailed(gang=GangId("all"), epoch=epoch, reason=Reason.GANG_TIMEOUT, text="full"))
        driven.settle()
        if driven.ctx.state is JobState.QUEUED:
            driven.feed(admitted(job, attempt=attempt))
    assert driven.records[-1].event == JobEnded(state=JobState.FAILED, reason=Reason.GANG_TIMEOUT, text="full")
    assert (driven.ctx.free_requeues, driven.ctx.retries) == (PLATFORM_FAULTS_MAX, 0)


def test_state_in_the_memory_of_another_host_is_lost_and_the_checkpoint_counts(driven):
    job = rl()
    cuts = [{"cut": {"streams": {"groups": {"trained": n}}}} for n in range(4)]
    commits = (Committed(n=n, loop_epoch=Epoch(1), cursor=cuts[n]) for n in (1, 2, 3))
    driven.run(job).feed(*commits, CheckpointSaved(n=2, path="/c", cursor=cuts[2]))
    driven.feed(PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, grace_s=0.0))
    driven.settle()
    driven.feed(admitted(job, attempt=2, hosts=("h9",)), CheckpointSaved(n=3, path="/late", cursor=cuts[3]))
    driven.settle()
    assert RolledBack(from_commit=3, to_commit=2) in [one.event for one in driven.records]
    assert driven.ctx.cursor == cuts[2], "the streams go back with the state"
    driven.feed(CheckpointSaved(n=3, path="/later", cursor=cuts[3]))
    assert driven.ctx.checkpoint_path == "/c", "nothing is kept of a commit that was given up"
    assert {driven.ctx.instances[at(f"actor/{rank}")].restored for rank in (0, 1)} == {2}


def test_a_stop_while_the_job_is_restarted_ends_it(driven):
    driven.run(spec(service("w", fail=fail(limit_n=0)), retry=5))
    driven.feed(lost("w", 0, 1))
    driven.settle(hold="stop/")
    driven.feed(StopAsked())
    driven.settle()
    assert driven.ctx.state is JobState.CANCELLED


def test_a_stop_that_comes_after_success_changes_nothing(driven):
    driven.run(spec(command("c"), service("w")))
    one = driven.ctx.instances[at("c/0")]
    driven.feed(InstanceEnded(role=one.id.role, rank=0, epoch=one.epoch))
    driven.feed(StopAsked())
    driven.settle()
    assert driven.ctx.state is JobState.SUCCEEDED


def test_a_process_that_appears_after_its_stop_is_stopped_again(driven):
    driven.run(rl())
    driven.feed(lost("reward", 0, 1))
    driven.settle()
    driven.feed(InstanceStarted(role=RoleName("reward"), rank=0, epoch=Epoch(1), node=NodeId("h0"), pid=7))
    assert "stop/reward/0/1" in [one.id for one in wanted(driven.ctx)]


def loss(reason: Reason, text: str = "", traceback: str = "", at_s: float = 1.0) -> Loss:
    return Loss(instance=at("a/0"), epoch=Epoch(1), reason=reason, text=text, traceback=traceback, at_s=at_s)


@pytest.mark.parametrize(
    ("found", "kind", "secondary"),
    [
        (loss(Reason.NODE_LOST), "node lost", False),
        (loss(Reason.OOM_KILLED), "out of memory", False),
        (loss(Reason.SIGNALLED, "connection reset by peer"), "killed", False),
        (loss(Reason.USER_ERROR, "ValueError: x"), "own exception", False),
        (loss(Reason.USER_ERROR, "", "Traceback\nRuntimeError: Connection closed by peer"), "peer lost", True),
        (loss(Reason.COLLECTIVE_TIMEOUT), "peer lost", True),
        (loss(Reason.NO_PROGRESS), "culprit of a wait", False),
    ],
)
def test_each_symptom_has_one_kind(found, kind, secondary):
    assert (kind_of(found), is_secondary(found)) == (kind, secondary)


def test_the_root_is_the_strongest_rule_and_then_the_earliest():
    own = loss(Reason.USER_ERROR, "ValueError: x", at_s=5.0)
    later = loss(Reason.USER_ERROR, "ValueError: y", at_s=6.0)
    peer = loss(Reason.COLLECTIVE_TIMEOUT, at_s=1.0)
    assert root_cause([peer, later, own]) is own
    assert root_cause([own, loss(Reason.OOM_KILLED, at_s=9.0)]).reason is Reason.OOM_KILLED


def test_an_online_job_without_a_loop_re_forms_its_stateful_roles_alone(driven):
    driven.run(spec(mesh("train", 2), service("feat", 2), command("driver")))
    driven.feed(lost("train", 0, 1))
    assert {role for role, _, _ in verdict(driven).scope} == {"train"}


# -- doubt about a node ------------------------------------------------------------------------------------------------


def doubted(driven, *, fit: bool) -> list[FailoverStarted]:
    """Two of three workers of one node die within a few seconds; the third one checks the node."""
    driven.fit, driven.free = fit, ["h2"]
    driven.run(spec(service("w", 4)), "h0", "h1", "h0", "h0")
    for who in ("w/0", "w/2"):
        driven.feed(lost_of(driven, who), after_s=2.0)
        driven.settle()
    return [record.event for record in driven.records if isinstance(record.event, FailoverStarted)]


def lost_of(driven, who: str) -> InstanceLost:
    one = driven.ctx.instances[at(who)]
    return InstanceLost(role=one.id.role, rank=one.id.rank, epoch=one.epoch, reason=Reason.SIGNALLED)


def test_two_deaths_on_one_node_of_several_have_it_checked_and_left_when_it_is_not_fit(driven):
    first, second = doubted(driven, fit=False)
    assert (first.level, first.move_reason) == (Level.PROCESS, None)
    assert (second.level, second.moved_from, second.move_reason) == (Level.NODE, Level.PROCESS, Reason.NODE_SUSPECT)
    assert {driven.ctx.bundle(at(who))[1].node for who in ("w/0", "w/2", "w/3")} == {"h2"}
    assert driven.ctx.bundle(at("w/1"))[1].node == "h1"
    assert replay(driven.ctx.job, tuple(driven.records), initial(driven.ctx.job)) == driven.ctx


def test_a_node_that_is_fit_is_stayed_on(driven):
    _, second = doubted(driven, fit=True)
    assert (second.level, second.moved_from, second.move_reason) == (Level.PROCESS, Level.NODE, Reason.NODE_HEALTHY)
    assert driven.ctx.bundle(at("w/2"))[1].node == "h0"


def test_a_node_that_loses_processes_again_and_again_is_left_though_its_check_finds_nothing(driven):
    driven.fit, driven.free = True, ["h2"]
    driven.run(spec(service("w", 4)), "h0", "h1", "h0", "h0")
    for who in ("w/0", "w/2", "w/0"):
        driven.feed(lost_of(driven, who), after_s=120.0)
        driven.settle()
    found = [
        (one.level, one.move_reason) for one in (r.event for r in driven.records) if isinstance(one, FailoverStarted)
    ]
    assert found == [(Level.PROCESS, None), (Level.PROCESS, None), (Level.NODE, Reason.NODE_SUSPECT)]
    assert {driven.ctx.bundle(at(who))[1].node for who in ("w/0", "w/2", "w/3")} == {"h2"}
    asked = next(one for one in (r.event for r in driven.records) if isinstance(one, GangAsked))
    assert asked.avoid == ("h0",), "and it is marked suspect by the scheduler"


def test_deaths_count_at_the_node_where_they_were_and_one_on_the_next_does_not_condemn_it(driven):
    driven.fit, driven.free = True, ["h1", "h2"]
    driven.run(spec(service("w", 2, fail=fail(limit_n=9)), loop()), "h0", "h0", "h9")
    for who in ("w/0", "w/1", "w/0", "w/1"):
        driven.feed(lost_of(driven, who), after_s=100.0)
        driven.settle()
    found = [one.level for one in (r.event for r in driven.records) if isinstance(one, FailoverStarted)]
    assert found == [Level.PROCESS, Level.PROCESS, Level.NODE, Level.PROCESS]
    assert [driven.ctx.bundle(at(who))[1].node for who in ("w/0", "w/1")] == ["h1", "h1"]
    assert [one.cause.node for one in driven.ctx.failovers] == ["h0", "h0", "h0", "h1"]


@pytest.mark.parametrize("reason", [Reason.NODE_SUSPECT, Reason.GPU_ECC, Reason.GPU_LOST])
@pytest.mark.parametrize("hosts", [("h0", "h1"), ("h0",)])
def test_what_a_check_found_stands_without_a_second_one(driven, hosts: tuple[str, ...], reason: Reason):
    driven.fit, driven.free = True, ["h2"]
    driven.run(spec(service("w", 1), loop()), *hosts)
    driven.feed(replace(lost_of(driven, "w/0"), reason=reason, alive=True))
    driven.settle()
    (found,) = [one for one in (r.event for r in driven.records) if isinstance(one, FailoverStarted)]
    assert (found.level, found.move_reason) == (Level.NODE, Reason.NODE_SUSPECT)
    assert driven.ctx.bundle(at("w/0"))[1].node == "h2" and not [c for c in driven.done if isinstance(c, CheckNode)]


def test_a_member_that_went_with_its_peer_keeps_its_node_when_that_of_the_peer_is_left(driven):
    driven.free = ["h2"]
    driven.run(spec(mesh("a", 2), loop()), "h0", "h1", "h9")
    driven.feed(lost("a", 1, 1, Reason.USER_ERROR, "Connection reset by peer"), lost("a", 0, 1, Reason.NODE_LOST))
    driven.settle()
    assert [driven.ctx.bundle(at(who))[1].node for who in ("a/0", "a/1")] == ["h2", "h1"]
    (asked,) = [one for one in (r.event for r in driven.records) if isinstance(one, GangAsked)]
    assert asked.avoid == ("h0",), "h1 is not marked suspect"


def test_a_wrong_sum_condemns_no_node_of_its_mesh(driven):
    driven.free = ["h2", "h3"]
    driven.run(spec(mesh("a", 2, fail=fail(limit_n=1, then=("node", "job"))), loop(), retry=1), "h0", "h1", "h0")
    for _ in range(2):
        both = (replace(lost_of(driven, who), reason=Reason.COLLECTIVE_WRONG, alive=True) for who in ("a/0", "a/1"))
        driven.feed(*both)
        driven.settle()
    found = [one.level for one in (r.event for r in driven.records) if isinstance(one, FailoverStarted)]
    assert (found[-1], Level.NODE in found, driven.ctx.state) == (Level.JOB, False, JobState.QUEUED)
    assert not [r for r in driven.records if isinstance(r.event, GangAsked)]


def test_a_survivor_that_ends_itself_in_a_recovery_is_part_of_it_and_one_that_does_so_alone_is_not(driven):
    driven.run(spec(mesh("a", 2, fail=fail(restart="process", limit_n=2)), loop(), retry=0))
    for _ in range(2):
        driven.feed(lost_of(driven, "a/0"), after_s=1.0)
        driven.settle(hold="assemble/a/1")
        died = ProcessDied(
            name="a-1",
            job=driven.ctx.job,
            instance=at("a/1"),
            epoch=driven.ctx.instances[at("a/1")].process.epoch,
            exit_code=STUCK_EXIT_STATUS,
        )
        driven.feed(death_event(died), after_s=20.0)
        driven.settle()
        assert (driven.ctx.state, driven.ctx.ending) == (JobState.RUNNING, None)
    assert len(driven.ctx.charges) == 2 and driven.ctx.failover_count == 4
    driven.feed(replace(lost_of(driven, "a/1"), reason=Reason.SELF_ENDED))
    driven.settle()
    assert len(driven.ctx.charges) > 2, "nothing was being recovered: it is a failure of its own"


def test_one_reservation_that_the_engine_forgot_does_not_cost_the_others(driven):
    driven.free = ["h3"]
    job = spec(service("a", 1), service("b", 1), gang="subgraph")
    driven.run(job)
    (gone,) = [gang for gang in driven.ctx.gangs if gang.id == driven.ctx.bound[at("b/0")][0]]
    kept = driven.ctx.instances[at("a/0")]
    driven.alive.pop(("b", 0, 1))
    alive = ((RoleName("a"), 0, Epoch(1)),)
    gangs = tuple((gang.id, gang.epoch) for gang in driven.ctx.gangs if gang != gone)
    driven.feed(
        MasterStarted(master_epoch=Epoch(2), pid=2), Reattached(master_epoch=Epoch(2), alive=alive, gangs=gangs)
    )
    driven.settle()
    (verdict,) = [record.event for record in driven.records if isinstance(record.event, FailoverStarted)]
    assert (verdict.level, verdict.moved_from, verdict.move_reason) == (Level.PROCESS, Level.JOB, Reason.SCOPE_NARROW)
    assert driven.ctx.state is JobState.RUNNING
    assert driven.ctx.instances[at("a/0")] == kept
    assert driven.ctx.bundle(at("b/0"))[1].node == "h3"


def test_a_place_that_was_left_is_given_back_when_the_rest_of_its_reservation_is_lost_too(driven):
    """The machine of the place that was left may be back, and have the only room for the rest."""
    driven.free = ["h2"]
    driven.run(spec(mesh("actor", 1), service("reward", 1), loop()), "h0", "h1", "h1")

    def lose(member: str) -> None:
        one = driven.ctx.instances[at(member)]
        driven.feed(InstanceLost(role=one.id.role, rank=one.id.rank, epoch=one.epoch, reason=Reason.NODE_LOST))
        driven.settle()

    def released() -> list[str]:
        return [one.gang for one in driven.done if isinstance(one, ReleaseGang)]

    lose("actor/0")
    assert driven.ctx.bundle(at("actor/0"))[1].node == "h2" and released() == []
    driven.free = []
    lose("reward/0")  # what is said of the loop comes when its recovery has begun, of an epoch that is over
    assert released() == ["all"], "while no place is granted"
    driven.free = ["h0"]
    driven.settle()
    assert driven.ctx.state is JobState.RUNNING
    assert {driven.ctx.bundle(at(one))[1].node for one in ("reward/0", "loop/0")} == {"h0"}


# -- commits that are given up -----------------------------------------------------------------------------------------


def test_readers_of_weights_and_everybody_with_state_go_back_with_a_commit_whose_state_is_lost(driven):
    edge = WeightsEdge(source=RoleName("actor"), target=RoleName("rollout"))
    driven.free = ["h3"]
    roles = (mesh("actor", 2, fail=fail(restart="process")), service("rollout", 1), loop())
    driven.run(spec(*roles, weights=(edge,)), "h0", "h1", "h1", "h1")
    for n in (1, 2):
        driven.feed(Committed(n=n, loop_epoch=driven.ctx.loop_epoch))
    one = driven.ctx.instances[at("actor/0")]
    driven.feed(InstanceLost(role=one.id.role, rank=0, epoch=one.epoch, reason=Reason.NODE_LOST))
    driven.settle()
    (verdict,) = [record.event for record in driven.records if isinstance(record.event, FailoverStarted)]
    assert (verdict.restore, verdict.move_reason) == (0, Reason.STATE_LOST)
    assert {role for role, _, _ in verdict.scope} == {"actor", "rollout", "loop"}
    again = [command for command in driven.done if isinstance(command, Assemble) and command.epoch > 1]
    assert {command.restore for command in again} == {0}
    assert driven.ctx.state is JobState.RUNNING
