"""A job from admission to its end, and its recoveries, as values in and values out."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from tests.makers import admitted, at, command, fail, ids, loop, mesh, replay, rl, service, spec

from rota.job.core import machine
from rota.job.core.context import JobContext, NotYet
from rota.job.core.desired import next_emit, wanted
from rota.job.core.machine import accepts_commit, apply
from rota.spec.commands import Assemble, RunInstance, StartInstance
from rota.spec.events import (
    Committed,
    InstanceEnded,
    InstanceLost,
    InstanceReady,
    JobChanged,
    JobEnded,
    JobRequeued,
    JobSubmitted,
    MasterStarted,
    PreemptAsked,
    RolledBack,
    StopAsked,
)
from rota.spec.ids import Epoch, JobId, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import InstanceState, JobState, Level


def lost(role: str, rank: int, epoch: int, reason: Reason = Reason.SIGNALLED, **fields: object) -> InstanceLost:
    return InstanceLost(role=RoleName(role), rank=rank, epoch=Epoch(epoch), reason=reason, **fields)  # type: ignore[arg-type]


def test_a_job_starts_gang_first_then_processes_then_assembly_then_its_loop(driven):
    driven.admit(rl())
    assert ids(wanted(driven.ctx)) == ["reserve/all/1"]
    driven.settle()
    assert ids(driven.done)[0] == "reserve/all/1"
    assert sorted(one.id.split("/")[0] for one in driven.done[1:]) == [*["assemble"] * 5, *["start"] * 5]
    assert driven.ctx.state is JobState.RUNNING
    assert ids(wanted(driven.ctx)) == ["run/loop/0/1"]


def test_a_job_starts_in_the_folder_that_was_found_at_submit_where_its_own_is_relative_to_the_file():
    given = JobSubmitted(spec=replace(rl(), workdir="code"), workdir="/home/me/code")
    assert apply(JobContext(job=JobId("j")), given).workdir == "/home/me/code"


def test_mesh_members_assemble_only_when_all_of_them_have_a_process(driven):
    driven.admit(rl()).settle(hold="start/actor/1")
    assert not [one for one in wanted(driven.ctx) if isinstance(one, Assemble)]
    assert driven.ctx.instances[at("actor/0")].state is InstanceState.STALE
    assert driven.ctx.instances[at("reward/0")].state is InstanceState.READY


def test_a_job_is_checking_until_its_first_processes_have_found_their_nodes_fit(driven):
    driven.admit(rl()).settle(hold="start/actor/1")
    assert driven.ctx.state is JobState.CHECKING, "ready members do not make up for one that checks"
    driven.settle(hold="assemble/actor/1")
    assert driven.ctx.state is JobState.STARTING
    driven.settle()
    assert driven.ctx.state is JobState.RUNNING
    driven.feed(lost("actor", 1, 1))
    driven.settle(hold="start/actor/1")
    assert driven.ctx.state is JobState.RECOVERING, "one that comes later is checked within the recovery"


def test_a_job_that_has_no_check_asked_for_is_never_checking(driven):
    job = rl()
    roles = tuple(replace(role, fail=replace(role.fail, check="none")) for role in job.roles)
    driven.admit(replace(job, roles=roles)).settle(hold="start/actor/1")
    assert driven.ctx.state is JobState.STARTING


def test_a_loss_of_a_stateless_instance_touches_nobody_else(driven):
    driven.run(rl())
    before = dict(driven.ctx.instances)
    driven.feed(lost("reward", 1, 1))
    driven.settle()
    assert driven.ctx.state is JobState.RUNNING
    changed = [str(one) for one, record in driven.ctx.instances.items() if record != before[one]]
    assert changed == ["reward/1"]
    assert driven.ctx.instances[at("reward/1")].restarts == 1


def test_a_lost_rank_re_forms_state_and_loop_from_the_newest_commit(driven):
    job = spec(mesh("actor", 2, fail=fail(restart="process")), service("reward", 2), mesh("critic", 1), loop())
    driven.run(job).feed(Committed(n=1, loop_epoch=Epoch(1)))
    driven.done.clear()
    pids = dict(driven.alive)
    driven.feed(lost("actor", 0, 1))
    driven.settle()
    started = [one for one in driven.done if isinstance(one, StartInstance)]
    assert [str(one.instance) for one in started] == ["actor/0"]
    assembled = [one for one in driven.done if isinstance(one, Assemble)]
    assert sorted(str(one.instance) for one in assembled) == ["actor/0", "actor/1", "critic/0", "loop/0"]
    assert {(one.epoch, one.restore) for one in assembled} == {(2, 1)}
    assert driven.alive["actor", 1, 1] == pids["actor", 1, 1]
    runs = [one for one in wanted(driven.ctx) if isinstance(one, RunInstance)]
    assert [(one.id, one.started_epoch, one.committed) for one in runs] == [("run/loop/0/2", 1, 1)]
    assert [one.event for one in driven.records if isinstance(one.event, RolledBack)] == [
        RolledBack(from_commit=1, to_commit=1)
    ]


def test_role_restart_gives_every_member_of_the_role_a_new_process(driven):
    driven.run(rl())
    driven.done.clear()
    driven.feed(lost("actor", 0, 1))
    driven.settle()
    assert ids(driven.done).count("stop/actor/1/1") == 1
    assert sorted(str(one.instance) for one in driven.done if isinstance(one, StartInstance)) == ["actor/0", "actor/1"]
    assert driven.ctx.instances[at("loop/0")].process.epoch == 1
    assert driven.ctx.failovers[-1].level is Level.ROLE


def test_the_old_process_is_gone_before_the_new_one_starts(driven):
    driven.run(rl())
    driven.feed(lost("reward", 0, 1, Reason.USER_ERROR, alive=True))
    driven.settle(hold="stop/")
    assert "stop/reward/0/1" in ids(wanted(driven.ctx))
    assert not [one for one in wanted(driven.ctx) if isinstance(one, StartInstance)]
    driven.settle()
    assert driven.ctx.state is JobState.RUNNING


def test_the_commit_of_a_fenced_loop_is_refused(driven):
    driven.run(rl())
    driven.feed(lost("loop", 0, 1))
    driven.settle()
    driven.feed(Committed(n=1, loop_epoch=Epoch(1)))
    assert driven.ctx.committed == 0
    driven.feed(Committed(n=1, loop_epoch=Epoch(2)), Committed(n=1, loop_epoch=Epoch(2)))
    assert driven.ctx.committed == 1


def test_a_verdict_to_restart_the_whole_job_fences_the_loop(driven):
    driven.run(spec(service("w", fail=fail(limit_n=0)), loop(), retry=1))
    driven.feed(lost("w", 0, 1))
    driven.settle(hold="stop/")
    assert driven.ctx.state is JobState.RECOVERING
    assert not accepts_commit(driven.ctx, 1, Epoch(1))
    driven.feed(Committed(n=1, loop_epoch=Epoch(1)))
    assert driven.ctx.committed == 0


def test_a_failure_during_a_failover_joins_it(driven):
    driven.run(rl())
    driven.feed(lost("reward", 0, 1))
    driven.settle(hold="start/")
    driven.feed(lost("actor", 0, 1))
    driven.settle()
    first, second = driven.ctx.failovers
    assert first.superseded_by == 2
    assert {str(one) for one in second.scope} == {"actor/0", "actor/1", "reward/0", "loop/0"}
    assert second.seconds is not None
    assert driven.ctx.state is JobState.RUNNING


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_limit_k_is_exactly_k_plus_one_runs_then_failed_with_the_traceback(driven, limit):
    driven.run(spec(service("w", 2, fail=fail(limit_n=limit, same=0)), command("c")))
    starts = 0
    for _ in range(20):
        if driven.ctx.state.terminal:
            break
        starts += 1
        epoch = driven.ctx.instances[at("w/1")].epoch
        driven.feed(lost("w", 1, epoch, Reason.USER_ERROR, text="boom", traceback="T", alive=True))
        driven.settle()
    assert starts == limit + 1
    end = driven.records[-1].event
    assert end == JobEnded(
        state=JobState.FAILED, reason=Reason.USER_ERROR, text="boom", role=RoleName("w"), rank=1, traceback="T"
    )
    assert driven.alive == {}
    assert [one.move_reason for one in driven.ctx.failovers[-2:]] == [Reason.BUDGET_PROCESS, Reason.NO_NODE]


def test_failures_older_than_the_window_are_forgotten(driven):
    driven.run(spec(service("w", fail=fail(limit_n=1, limit_window_s=60.0))))
    for _ in range(5):
        driven.feed(lost("w", 0, driven.ctx.instances[at("w/0")].epoch), after_s=61.0)
        driven.settle()
    assert driven.ctx.state is JobState.RUNNING


def test_a_retry_goes_through_the_queue_with_new_epochs(driven):
    job = spec(service("w", fail=fail(limit_n=0)), loop(), retry=1)
    driven.run(job).feed(Committed(n=1, loop_epoch=Epoch(1)))
    driven.feed(lost("w", 0, 1, Reason.USER_ERROR))
    driven.settle()
    assert driven.ctx.state is JobState.QUEUED
    assert driven.records[-1].event == JobRequeued(attempt=1, reason=Reason.USER_ERROR, counts=True)
    assert not driven.alive
    assert not driven.ctx.gangs
    driven.feed(admitted(job, attempt=2, epoch=1))
    driven.settle()
    assert driven.ctx.state is JobState.RUNNING
    assert driven.ctx.instances[at("loop/0")].epoch == 2
    assert [one.committed for one in wanted(driven.ctx) if isinstance(one, RunInstance)] == [1]
    driven.feed(lost("w", 0, 2, Reason.USER_ERROR))
    driven.settle()
    assert driven.ctx.state is JobState.FAILED


def test_preemption_gives_everything_back_and_costs_no_retry(driven):
    driven.run(rl())
    driven.feed(PreemptAsked(reason=Reason.PREEMPTED_RECLAIM))
    assert driven.ctx.state is JobState.PREEMPTING
    driven.settle()
    assert driven.ctx.state is JobState.QUEUED
    assert (driven.ctx.retries, driven.alive, driven.ctx.gangs) == (0, {}, ())


@pytest.mark.parametrize("hold", ["reserve/", "start/", "assemble/", "start/actor/1", "\0"])
def test_a_stop_in_any_phase_leaves_nothing_and_ends_once(driven, hold):
    driven.admit(rl()).settle(hold=hold)
    driven.feed(StopAsked())
    driven.settle(hold=hold)
    assert driven.ctx.state is JobState.CANCELLED
    assert not driven.alive
    assert sum(isinstance(one.event, JobEnded) for one in driven.records) == 1


def test_success_of_the_loop_ends_the_job_and_stops_the_others(driven):
    driven.run(rl())
    driven.feed(InstanceEnded(role=RoleName("loop"), rank=0, epoch=Epoch(1)))
    driven.settle()
    assert driven.ctx.state is JobState.SUCCEEDED
    assert not driven.alive


def test_readiness_is_a_set_so_a_repeated_report_counts_once(driven):
    driven.admit(rl()).settle(hold="assemble/actor/1")
    again = InstanceReady(role=RoleName("actor"), rank=0, epoch=Epoch(1))
    driven.feed(again, again, again)
    assert driven.ctx.state is JobState.STARTING


def test_a_returning_master_replaces_only_what_is_gone(driven):
    driven.run(rl())
    pids = dict(driven.alive)
    driven.master(2, dead=(("reward", 0, 1),)).settle()
    assert driven.ctx.state is JobState.RUNNING
    assert {key: pid for key, pid in driven.alive.items() if key in pids} == {
        key: pid for key, pid in pids.items() if key != ("reward", 0, 1)
    }


def test_a_returning_master_asks_again_for_all_that_is_open(driven):
    driven.admit(rl()).settle(hold="assemble/")
    commands = driven.master(2).commands
    assert sorted(ids(commands)) == sorted(ids(wanted(driven.ctx)))
    assert driven.settle().ctx.state is JobState.RUNNING


def test_a_returning_master_ends_processes_that_nobody_expects(driven):
    driven.run(rl())
    driven.alive["reward", 0, 0] = 7
    driven.master(2)
    assert "stop/reward/0/0" in ids(wanted(driven.ctx))
    assert driven.settle().ctx.state is JobState.RUNNING


def test_who_starts_after_a_finite_role_waits_until_it_runs_also_in_a_recovery(driven):
    job = spec(command("server"), service("log", start_after=("server",)))
    driven.run(job)
    driven.feed(lost("log", 0, 1))
    driven.settle(hold="start/")
    driven.feed(lost("server", 0, 1))
    driven.settle()
    assert driven.ctx.state is JobState.RUNNING
    assert ids(wanted(driven.ctx)) == ["run/server/0/3"]


def test_a_snapshot_with_the_tail_gives_the_live_context(driven):
    driven.run(rl())
    middle = JobContext.from_json(driven.ctx.to_json())
    assert middle == driven.ctx
    driven.feed(Committed(n=1, loop_epoch=Epoch(1), cursor={"at": 5}), lost("actor", 0, 1))
    driven.settle()
    records = tuple(driven.records)
    assert replay(driven.ctx.job, records) == driven.ctx
    assert replay(driven.ctx.job, records, middle) == driven.ctx


def test_every_field_of_a_context_is_kept_or_follows_from_those_that_are(driven):
    """A field that a kept context leaves out is lost with its master, though a replay would know it."""
    driven.run(rl())
    raw = driven.ctx.to_json()
    assert raw.keys() - {"version"} == {one.name for one in fields(JobContext)} - {"graph", "bound"}
    with pytest.raises(KeyError, match="retries"):
        JobContext.from_json({name: value for name, value in raw.items() if name != "retries"})


def test_nothing_is_asked_for_before_the_log_was_compared_with_what_is_alive(driven):
    driven.run(rl())
    driven.feed(lost("reward", 0, 1))
    assert next_emit(driven.ctx)
    driven.feed(MasterStarted(master_epoch=Epoch(2), pid=1))
    assert wanted(driven.ctx) == ()
    assert next_emit(driven.ctx) == NotYet("its master compares the log with what is alive")


def test_a_new_size_takes_effect_with_the_next_attempt(driven):
    job = rl()
    driven.run(job)
    driven.feed(JobChanged(changes={"roles.reward.replicas": 3, "time_limit_s": 7200.0}))
    assert driven.ctx.spec.time_limit_s == 7200.0
    assert at("reward/2") not in driven.ctx.instances
    driven.feed(PreemptAsked(reason=Reason.PREEMPTED_RECLAIM))
    driven.settle()
    assert at("reward/2") in driven.ctx.instances
    driven.feed(admitted(driven.ctx.spec, attempt=2))
    driven.settle()
    assert driven.ctx.state is JobState.RUNNING
    assert driven.ctx.instances[at("reward/2")].state is InstanceState.READY


def test_a_master_that_says_twice_that_it_began_stays_attached(driven):
    driven.run(rl())
    driven.feed(MasterStarted(master_epoch=driven.ctx.master_epoch, pid=1))
    assert driven.ctx.attached and ids(wanted(driven.ctx)) == ["run/loop/0/1"]
    driven.feed(MasterStarted(master_epoch=Epoch(driven.ctx.master_epoch + 1), pid=2))
    assert not driven.ctx.attached and wanted(driven.ctx) == ()


def test_a_context_that_another_version_wrote_is_not_read(driven):
    driven.run(rl())
    raw = driven.ctx.to_json()
    with pytest.raises(ValueError, match="snapshot version 0, this code reads"):
        JobContext.from_json({**raw, "version": 0})


BROKEN = {
    "a transition that is not declared": lambda ctx, event: replace(ctx, state=JobState.PAUSED),
    "a conclusion that is not drawn": lambda ctx, event: replace(
        ctx, instances={one: replace(each, running=False) for one, each in ctx.instances.items()}
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_step_that_breaks_a_rule_of_the_machine_fails_whatever_the_test_looks_at(driven, monkeypatch, what: str):
    driven.run(rl())
    monkeypatch.setattr(machine, "apply", BROKEN[what])
    monkeypatch.setattr(machine, "settle", lambda ctx: ctx)
    with pytest.raises(AssertionError):
        driven.feed(MasterStarted(master_epoch=Epoch(9), pid=1))
