"""Stop at a commit: before devices are given back the last commit is on disk, whoever asks for them and whatever fails.

Where state is found again: in the memory of the same host, else on disk; and what faults of the platform cost.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.makers import admitted, at, loop, mesh, replay, rl, service, spec

from rota.job.core.context import PLATFORM_FAULTS_MAX, PLATFORM_WINDOW_S
from rota.job.core.desired import wanted
from rota.job.core.machine import accepts_commit, initial
from rota.service.views.job_history import begin_history
from rota.service.views.reasons import failure_list
from rota.spec.commands import SaveCommit, SetTimer, StopInstance
from rota.spec.events import (
    CheckpointSaved,
    Committed,
    Event,
    FailoverStarted,
    GangGranted,
    InstanceEnded,
    InstanceLost,
    JobEnded,
    JobRequeued,
    MasterStarted,
    MoveAsked,
    PreemptAsked,
    Reattached,
    RolledBack,
    StopAsked,
    TimerFired,
    UploadEnded,
    UploadStarted,
)
from rota.spec.gang import BundleGrant
from rota.spec.ids import Epoch, NodeId, RoleName
from rota.spec.reasons import Reason
from rota.spec.resources import Res
from rota.spec.states import JobState

PREEMPT = PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, grace_s=30.0)


def commit(driven, n: int) -> None:
    driven.feed(Committed(n=n, loop_epoch=driven.ctx.loop_epoch))


def lost(role: str, rank: int, epoch: int, reason: Reason = Reason.SIGNALLED) -> InstanceLost:
    return InstanceLost(role=RoleName(role), rank=rank, epoch=Epoch(epoch), reason=reason)


def rollbacks(driven) -> list[tuple[int, int]]:
    found = [record.event for record in driven.records if isinstance(record.event, RolledBack)]
    return [(one.from_commit, one.to_commit) for one in found if one.from_commit != one.to_commit]


def saves(driven) -> list[SaveCommit]:
    return [one for one in wanted(driven.ctx) if isinstance(one, SaveCommit)]


def stops(driven) -> list[StopInstance]:
    return [one for one in wanted(driven.ctx) if isinstance(one, StopInstance)]


def timer(driven, kind: str) -> SetTimer:
    (found,) = (one for one in wanted(driven.ctx) if isinstance(one, SetTimer) and one.timer.startswith(kind))
    return found


def admit_on(driven, host: str) -> None:
    attempt = driven.ctx.attempt + 1
    driven.feed(admitted(driven.ctx.spec, attempt=attempt, epoch=int(driven.ctx.epoch_max) + 1, hosts=(host,)))
    driven.settle()
    assert driven.ctx.state is JobState.RUNNING


def test_a_preempted_job_works_on_to_its_next_commit_saves_it_and_enters_again_there_on_another_host(driven):
    driven.run(rl())
    commit(driven, 1)
    driven.feed(PREEMPT)
    assert (driven.ctx.state, stops(driven), saves(driven)) == (JobState.PREEMPTING, [], [])
    commit(driven, 2)
    (save,) = saves(driven)
    assert (save.n, [str(part.owner) for part in save.parts]) == (2, ["actor/0", "actor/1"])
    assert not stops(driven), "the devices are held until the state is on disk"
    assert not accepts_commit(driven.ctx, 3, driven.ctx.loop_epoch), "what is saved is the last commit"
    driven.settle()
    assert (driven.ctx.state, driven.ctx.checkpoint_n) == (JobState.QUEUED, 2)
    admit_on(driven, "h9")
    assert (driven.ctx.committed, rollbacks(driven)) == (2, [])
    assert {one.restored for one in driven.ctx.instances.values()} == {2}
    assert replay(driven.ctx.job, tuple(driven.records), initial(driven.ctx.job)) == driven.ctx


def drain(driven) -> Event:
    driven.feed(MoveAsked(node=NodeId("h0"), due_at=driven.ctx.at_s + 5.0))
    driven.settle()
    return TimerFired(timer=timer(driven, "drain").timer)


ASKS = {
    "preempted": lambda driven: PREEMPT,
    "paused": lambda driven: PreemptAsked(reason=Reason.PAUSED),
    "drained": drain,
    "time limit": lambda driven: TimerFired(timer=timer(driven, "time-limit").timer),
    "out of restarts": lambda driven: lost("actor", 0, 1, Reason.USER_ERROR),
}


@pytest.mark.parametrize("who", ASKS)
def test_a_loop_that_comes_to_no_further_commit_loses_none_whoever_takes_the_devices(driven, who: str):
    fail = replace(mesh("actor").fail, limit_n=0, then=("job",))
    driven.run(spec(mesh("actor", fail=fail), service("reward", 2), loop(), time_limit_s=1000.0, retry=1))
    commit(driven, 1)
    driven.feed(ASKS[who](driven), after_s=10.0)
    driven.settle()
    ids = [one.id for one in driven.done]
    assert next(i for i, one in enumerate(ids) if one.startswith("save/1/")) < next(
        i for i, one in enumerate(ids) if one.startswith("stop/")
    )
    assert (driven.ctx.checkpoint_n, driven.ctx.gangs) == (1, ())
    if who == "time limit":
        assert (driven.ctx.state, driven.ctx.end_reason) == (JobState.FAILED, Reason.TIME_LIMIT)
        return
    if who == "paused":
        assert driven.ctx.state is JobState.PAUSED
        return
    admit_on(driven, "h9")
    assert (driven.ctx.committed, rollbacks(driven)) == (1, [])


def test_half_of_the_grace_is_for_the_next_commit_and_all_of_it_for_the_disk(driven):
    driven.run(rl())
    commit(driven, 1)
    driven.feed(PREEMPT)
    began_s = driven.ctx.at_s
    first = timer(driven, "grace/commit")
    assert (first.since_s, first.after_s) == (began_s, 15.0)
    driven.feed(TimerFired(timer=first.timer), after_s=15.0)
    second = timer(driven, "grace/save")
    assert (second.since_s, second.after_s, saves(driven)[0].n) == (began_s, 30.0, 1)
    driven.feed(TimerFired(timer=second.timer), after_s=15.0)
    assert {one.grace_s for one in stops(driven)} == {2.0} and not saves(driven), "the disk hangs: the devices go"


def restarts(driven) -> SetTimer:
    """A job that is restarted as a whole saves its state, and the disk hangs; the timer of that."""
    fail = replace(mesh("actor").fail, limit_n=0, then=("job",))
    driven.run(spec(mesh("actor", fail=fail), loop(), retry=1))
    commit(driven, 1)
    driven.saves = False
    driven.feed(lost("actor", 0, 1, Reason.USER_ERROR))
    driven.settle(hold="timer/grace")
    assert driven.ctx.state is JobState.RECOVERING
    return timer(driven, "grace/save")


def test_a_preemption_while_a_restart_saves_leaves_the_disk_no_more_than_its_own_grace(driven):
    long = restarts(driven)
    assert long.after_s == 30.0
    driven.feed(replace(PREEMPT, grace_s=5.0), after_s=10.0)
    short = timer(driven, "grace/save")
    assert short.after_s == 15.0 and short.id != long.id, "a timer of the same name is not set again"
    driven.feed(TimerFired(timer=long.timer), after_s=0.0)
    assert not stops(driven)
    driven.feed(TimerFired(timer=short.timer), after_s=5.0)
    assert driven.ctx.state is JobState.PREEMPTING and {one.grace_s for one in stops(driven)} == {2.0}


def test_who_is_preempted_while_a_restart_saves_has_the_grace_from_then_on(driven):
    long = restarts(driven)
    driven.feed(PREEMPT, after_s=10.0)
    assert timer(driven, "grace/save") == long
    driven.feed(TimerFired(timer=long.timer), after_s=20.0)
    assert {round(one.grace_s, 3) for one in stops(driven)} == {10.0}, "of 30 s from the preemption on"


def test_who_leaves_a_drained_node_already_keeps_to_the_sooner_end_of_the_two_graces(driven):
    driven.run(rl())
    commit(driven, 1)
    driven.feed(drain(driven))
    long = timer(driven, "grace/commit")
    assert (driven.ctx.state, long.after_s) == (JobState.PREEMPTING, 15.0)
    driven.feed(replace(PREEMPT, grace_s=60.0), after_s=1.0)
    assert timer(driven, "grace/commit") == long and driven.ctx.ending.reason is Reason.MIGRATED_DRAIN
    driven.feed(replace(PREEMPT, grace_s=4.0), after_s=1.0)
    assert timer(driven, "grace/commit").after_s == 3.0, "half of the 6 s from the end of the notice on"
    driven.feed(PreemptAsked(reason=Reason.PAUSED, grace_s=2.0), after_s=1.0)
    assert timer(driven, "grace/commit").after_s == 2.5
    driven.settle()
    assert driven.ctx.state is JobState.PAUSED


def test_who_stops_its_processes_already_gives_them_the_grace_that_they_were_promised(driven):
    driven.run(rl())
    driven.feed(replace(PREEMPT, grace_s=20.0))
    driven.feed(TimerFired(timer=timer(driven, "grace/commit").timer), after_s=10.0)
    first = stops(driven)
    driven.feed(replace(PREEMPT, grace_s=0.0), after_s=1.0)
    assert first and stops(driven) == first


def test_what_stops_after_a_quick_save_has_the_rest_of_the_grace_for_a_polite_end(driven):
    driven.run(rl())
    driven.feed(PREEMPT)
    commit(driven, 1)
    driven.feed(CheckpointSaved(n=1, path="/c"), after_s=4.0)
    assert {one.grace_s for one in stops(driven)} == {25.0}


def test_without_a_grace_the_job_stops_at_once_and_goes_back_to_what_survives_where_it_comes_up(driven):
    at_once = PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, grace_s=0.0)
    driven.run(rl())
    for n in (1, 2, 3):
        commit(driven, n)
    driven.feed(CheckpointSaved(n=2, path="/c"), at_once)
    assert not saves(driven) and stops(driven)
    driven.settle()
    admit_on(driven, "h0")
    assert (driven.ctx.committed, rollbacks(driven)) == (3, []), "the memory of the host has it"
    driven.feed(at_once)
    driven.settle()
    admit_on(driven, "h9")
    assert (driven.ctx.committed, rollbacks(driven)) == (2, [(3, 2)]), "the disk has the commit before"


def test_where_a_job_was_at_its_last_commit_counts_and_not_where_it_was_admitted(driven):
    driven.free = ["h9"]
    driven.run(spec(mesh("actor"), loop()))
    driven.feed(MoveAsked(node=NodeId("h0"), due_at=1e6))
    driven.settle()
    commit(driven, 1)
    driven.feed(CheckpointSaved(n=1, path="/c"))
    driven.settle()
    assert {bundle.host for _, bundle in driven.ctx.bound.values()} == {"h9"}
    commit(driven, 2)
    driven.feed(PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, grace_s=0.0))
    driven.settle()
    admit_on(driven, "h0")
    assert (driven.ctx.committed, rollbacks(driven)) == (1, [(2, 1)])


def test_who_dies_on_the_way_is_saved_by_another_process_of_its_host(driven):
    driven.run(rl())
    commit(driven, 1)
    driven.feed(PREEMPT, lost("actor", 0, 1))
    (save,) = saves(driven)
    assert {str(part.owner): str(part.process) for part in save.parts} == {"actor/0": "actor/1", "actor/1": "actor/1"}
    driven.feed(lost("actor", 1, 1))
    (again,) = saves(driven)
    assert again.id != save.id and {str(part.process) for part in again.parts} == {"reward/0"}
    driven.settle()
    assert (driven.ctx.state, driven.ctx.checkpoint_n) == (JobState.QUEUED, 1)


def test_of_two_hosts_each_writes_what_its_memory_has_and_a_dead_one_is_not_waited_for(driven):
    driven.run(rl(), "h0", "h1", "h0", "h0", "h0")
    commit(driven, 1)
    driven.feed(PREEMPT, lost("loop", 0, 1))
    (save,) = saves(driven)
    assert {str(part.owner): str(part.process) for part in save.parts} == {"actor/0": "actor/0", "actor/1": "actor/1"}
    driven.feed(lost("actor", 1, 1))
    assert not saves(driven) and stops(driven), "no process is left on its host, so the commit cannot be saved"


def test_a_new_master_asks_again_for_what_is_not_saved_and_sees_who_died_meanwhile(driven):
    driven.run(rl())
    commit(driven, 1)
    driven.feed(PREEMPT)
    driven.master(2)
    assert not saves(driven) and not stops(driven), "the loop is still on its way to a commit"
    driven.master(3, dead=(("loop", 0, 1),))
    assert saves(driven)[0].n == 1
    driven.settle()
    assert (driven.ctx.state, driven.ctx.checkpoint_n) == (JobState.QUEUED, 1)


def test_a_loop_that_returns_instead_of_a_further_commit_has_succeeded(driven):
    driven.run(rl())
    driven.feed(PREEMPT, InstanceEnded(role=RoleName("loop"), rank=0, epoch=Epoch(1)))
    driven.settle()
    assert driven.records[-1].event == JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED)


@pytest.mark.parametrize("who", ["preempted", "time limit"])
def test_its_user_need_not_wait_for_a_commit(driven, who: str):
    driven.run(rl(time_limit_s=1000.0))
    commit(driven, 1)
    driven.feed(ASKS[who](driven), StopAsked(grace_s=1.0))
    assert stops(driven) and not saves(driven)
    driven.settle()
    assert driven.ctx.state.terminal


def test_a_drained_node_is_left_with_the_last_commit_though_the_loop_makes_none_in_time(driven):
    driven.free = ["h1"]
    driven.run(spec(mesh("actor", 2), loop(), grace_s=30.0))
    commit(driven, 1)
    driven.settle()
    driven.feed(MoveAsked(node=NodeId("h0"), due_at=driven.ctx.at_s + 50.0))
    driven.saves = False
    driven.settle()
    driven.feed(TimerFired(timer=timer(driven, "drain").timer), after_s=50.0)
    driven.settle()
    assert [one.n for one in saves(driven)] == [1] and driven.ctx.state is JobState.RUNNING
    commit(driven, 2)
    assert [one.n for one in saves(driven)] == [2], "the loop is not held: another commit came meanwhile"
    driven.saves = True
    driven.settle()
    assert (driven.ctx.committed, rollbacks(driven)) == (2, [])
    assert {bundle.node for _, bundle in driven.ctx.bound.values()} == {"h1"}


def test_a_drained_node_is_left_at_last_though_the_disk_hangs(driven):
    driven.free, driven.saves = ["h1"], False
    driven.run(spec(mesh("actor", 2), loop(), grace_s=30.0))
    commit(driven, 1)
    driven.settle()
    driven.feed(MoveAsked(node=NodeId("h0"), due_at=driven.ctx.at_s + 50.0))
    driven.settle()
    driven.feed(TimerFired(timer=timer(driven, "drain").timer), after_s=50.0)
    driven.settle()
    driven.feed(TimerFired(timer=timer(driven, "move").timer), after_s=30.0)
    driven.settle()
    assert (driven.ctx.state, rollbacks(driven)) == (JobState.RUNNING, [(1, 0)])


# -- state that is found again ----------------------------------------------------------------------------------------


def test_a_node_that_is_lost_and_comes_back_has_the_state_of_the_last_commit_in_the_memory_of_its_host(driven):
    driven.run(rl())
    for n in range(1, 8):
        commit(driven, n)
    driven.feed(*(lost(one.id.role, one.id.rank, 1, Reason.NODE_LOST) for one in driven.ctx.instances.values()))
    driven.settle()
    assert (driven.ctx.state, rollbacks(driven)) == (JobState.RECOVERING, []), "where it comes up is not known yet"
    lose_the_engine(driven)
    assert driven.records[-1].event == JobRequeued(attempt=1, reason=Reason.ENGINE_LOST, counts=False)
    admit_on(driven, "h0")
    assert (driven.ctx.committed, rollbacks(driven)) == (7, [])


def test_who_is_left_waits_for_the_node_of_the_others_and_none_goes_back_before_it_is_known_where_they_come_up(driven):
    driven.run(rl(), "h0", "h1", "h1", "h1", "h1")
    for n in (1, 2):
        commit(driven, n)
    driven.feed(lost("actor", 0, 1, Reason.NODE_LOST))
    driven.settle()
    assert (driven.ctx.state, rollbacks(driven)) == (JobState.RECOVERING, [])
    (ask,) = driven.ctx.asks
    bundle = BundleGrant(index=0, node=NodeId("h0"), host="h0", devices=(), res=Res())
    driven.feed(GangGranted(gang=ask.gang, bundles=(bundle,)))  # the scheduler knows that the node is back
    driven.settle()
    assert (driven.ctx.state, driven.ctx.committed, rollbacks(driven)) == (JobState.RUNNING, 2, [])


def test_state_of_a_lost_node_comes_from_the_disk_elsewhere(driven):
    driven.free = ["h1"]
    driven.run(rl())
    for n in (1, 2, 3):
        commit(driven, n)
    driven.feed(CheckpointSaved(n=2, path="/c"))
    driven.feed(*(lost(one.id.role, one.id.rank, 1, Reason.NODE_LOST) for one in driven.ctx.instances.values()))
    driven.settle()
    assert (driven.ctx.state, rollbacks(driven)) == (JobState.RUNNING, [(3, 2)])


def test_memory_that_has_lost_the_state_though_the_host_is_the_same_costs_no_budget_and_the_disk_counts(driven):
    fail = replace(mesh("actor").fail, limit_n=0, then=("job",))
    driven.run(spec(mesh("actor", fail=fail), loop()))
    for n in (1, 2, 3):
        commit(driven, n)
    driven.feed(CheckpointSaved(n=2, path="/c"))
    driven.feed(replace(lost("actor", 1, 1, Reason.STATE_LOST), alive=True))
    driven.settle()
    assert (driven.ctx.state, rollbacks(driven)) == (JobState.RUNNING, [(3, 2)])
    assert [one.platform for one in driven.ctx.charges] == [True]


def test_a_way_back_that_was_not_begun_when_the_attempt_ended_is_no_longer_wanted(driven):
    at_once = PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, grace_s=0.0)
    driven.run(rl())
    commit(driven, 1)
    driven.feed(at_once)
    driven.settle()
    driven.feed(admitted(driven.ctx.spec, attempt=2, epoch=5, hosts=("h9",)), at_once)
    driven.settle()
    assert (driven.ctx.state, rollbacks(driven)) == (JobState.QUEUED, [])
    admit_on(driven, "h0")
    assert (driven.ctx.committed, rollbacks(driven)) == (1, []), "the memory of the first host has it"


def test_only_the_memory_that_was_looked_into_has_lost_the_state(driven):
    driven.run(rl())
    commit(driven, 1)
    before = dict(driven.ctx.hosts)
    driven.feed(replace(lost("actor", 1, 1, Reason.STATE_LOST), alive=True))
    assert dict(driven.ctx.hosts) == {one: host for one, host in before.items() if one != at("actor/1")}
    assert len(driven.ctx.hosts) == len(before) - 1


def test_a_checkpoint_that_is_gone_ends_the_job_by_its_own_budgets(driven):
    fail = replace(mesh("actor").fail, limit_n=1, then=("job",))
    driven.run(spec(mesh("actor", fail=fail), loop()))
    commit(driven, 1)
    driven.feed(CheckpointSaved(n=1, path="/c"))
    while not driven.ctx.state.terminal:
        driven.feed(replace(lost("actor", 0, int(driven.ctx.epoch_max), Reason.STATE_LOST), alive=True))
        driven.settle()
        if driven.ctx.failover is not None and not driven.ctx.failover.released:
            driven.feed(TimerFired(timer=timer(driven, "backoff").timer), after_s=60.0)
            driven.settle()
    assert (driven.ctx.state, driven.ctx.end_reason) == (JobState.FAILED, Reason.STATE_LOST)
    assert driven.ctx.failover_count == 2


def failures_of(driven) -> list[tuple[str, int, str, int]]:
    """What ``rota failures`` shows: reason, the commit gone back to, where its state was, commits lost."""
    story = begin_history(driven.records[0])
    for record in driven.records[1:]:
        story.apply(record)
    items = failure_list(story)["items"]
    return [(one["reason"], one["restore"], one["restored_from"], one["lost_commits"]) for one in items]


def test_the_list_of_failures_says_where_the_state_came_from_and_what_it_cost(driven):
    driven.run(rl())
    for n in (1, 2, 3):
        commit(driven, n)
    driven.feed(CheckpointSaved(n=2, path="/c"), lost("actor", 0, 1))
    driven.settle()
    assert failures_of(driven) == [(Reason.SIGNALLED, 3, "memory", 0)]
    driven.feed(PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, grace_s=0.0))
    driven.settle()
    admit_on(driven, "h9")
    assert failures_of(driven)[1:] == [(Reason.PREEMPTED_PRIORITY, 2, "checkpoint", 1)]
    driven.feed(PREEMPT)
    driven.settle()
    admit_on(driven, "h0")
    assert len(failures_of(driven)) == 2, "a stop at a commit costs nothing, so there is nothing to show"


# -- what faults of the platform cost ---------------------------------------------------------------------------------


def lose_the_engine(driven, after_s: float = 1.0) -> None:
    """It forgot every process and reservation; a new master finds nothing."""
    driven.alive.clear()
    epoch = Epoch(driven.ctx.master_epoch + 1)
    driven.feed(MasterStarted(master_epoch=epoch, pid=1), after_s=after_s)
    driven.feed(Reattached(master_epoch=epoch))
    driven.settle()


def test_engine_losses_are_counted_from_the_last_commit_and_never_use_up_a_retry(driven):
    driven.run(rl(retry=2))
    for n in range(1, 2 * PLATFORM_FAULTS_MAX):
        commit(driven, n)
        lose_the_engine(driven)
        assert driven.ctx.state is JobState.QUEUED, f"loss {n} of the engine ended the job"
        admit_on(driven, "h0")
    assert (driven.ctx.retries, rollbacks(driven)) == (0, [])


@pytest.mark.parametrize(("apart_s", "lives"), [(60.0, False), (PLATFORM_WINDOW_S, True)])
def test_without_a_commit_in_between_many_engine_losses_in_an_hour_end_the_job_and_slower_ones_do_not(
    driven, apart_s: float, lives: bool
):
    driven.run(rl(retry=2))
    for _ in range(PLATFORM_FAULTS_MAX):
        lose_the_engine(driven, apart_s)
        admit_on(driven, "h0")
    lose_the_engine(driven, apart_s)
    assert (driven.ctx.state is JobState.QUEUED) == lives
    assert lives or (driven.ctx.end_reason, driven.ctx.retries) == (Reason.ENGINE_LOST, 0)


def test_processes_that_ended_themselves_since_no_master_answered_cost_the_budgets_of_their_roles_nothing(driven):
    fail = replace(service("reward").fail, limit_n=1, limit_window_s=86400.0, then=("job",))
    driven.run(spec(service("reward", fail=fail), loop()))
    for _ in range(5):
        driven.feed(lost("reward", 0, int(driven.ctx.instances[at("reward/0")].epoch), Reason.SELF_ENDED))
        driven.settle()
        assert driven.ctx.state is JobState.RUNNING
    driven.feed(lost("reward", 0, int(driven.ctx.instances[at("reward/0")].epoch), Reason.USER_ERROR))
    driven.settle()
    found = [record.event for record in driven.records if isinstance(record.event, FailoverStarted)]
    assert {one.level for one in found} == {"process"} and driven.ctx.state is JobState.RUNNING


URL = "s3://team/run7"


@pytest.mark.parametrize(
    ("stop", "error", "ends"),
    [
        (False, "", (JobState.SUCCEEDED, Reason.COMPLETED, "")),
        (False, "output: busy", (JobState.FAILED, Reason.OUTPUT_UNREACHABLE, "output: busy")),
        (True, "output: busy", (JobState.CANCELLED, Reason.STOPPED_BY_USER, "output: busy")),
    ],
)
def test_the_end_waits_for_the_upload_and_says_what_was_not_uploaded(driven, stop: bool, error: str, ends: tuple):
    driven.run(rl(output=URL))
    driven.feed(StopAsked() if stop else InstanceEnded(role=RoleName("loop"), rank=0, epoch=Epoch(1)))
    driven.settle()
    assert driven.ctx.state is JobState.STOPPING and driven.ctx.uploads and not driven.ctx.gangs
    driven.feed(UploadStarted(url=URL))
    driven.settle()
    assert driven.ctx.uploads and driven.ctx.uploads_since_s == driven.ctx.at_s
    driven.feed(UploadEnded(url=URL, error=error))
    driven.settle()
    ended = driven.records[-1].event
    assert isinstance(ended, JobEnded) and (ended.state, ended.reason, ended.text) == ends


def test_a_job_that_is_queued_again_uploads_nothing_yet(driven):
    driven.run(rl(output=URL))
    driven.feed(PREEMPT)
    driven.settle(hold="save/")
    assert not driven.ctx.uploads
    driven.settle()
    assert driven.ctx.state is JobState.QUEUED
