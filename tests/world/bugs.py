"""Planted bugs: each breaks one line of the system; the world must find every one of them.

Not among them: a ledger that counts what a former producer gives. The pump cancels the work on an item when it takes
the item from its producer, so that no answer is left to count; the tests of the ledger alone show that line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from rota.cluster.core import events, preemption
from rota.cluster.core.capacity import QueueTable
from rota.cluster.core.state import State
from rota.cluster.live import Scheduler
from rota.job.core import attempt, desired, failover, ledger, machine, shutdown, survival
from rota.job.core.context import JobContext
from rota.job.core.desired import wanted
from rota.job.core.machine import fold
from rota.job.core.transitions import moved
from rota.job.master import executor
from rota.job.master import master as master_module
from rota.runtime.event_log.sql import SqlLog
from rota.spec.commands import FENCED_GRACE_S, SetTimer, StopInstance
from rota.spec.errors import StoreCorrupt
from rota.spec.events import Committed, InstanceEnded, InstanceReady, JobEnded, RolledBack, StopAsked, TimerFired
from rota.spec.reasons import Reason
from rota.spec.states import GangState, JobState
from rota.testing import memory as memory_log
from rota.testing.launcher import SimFaults
from tests.world.world import Swarm

Patch = pytest.MonkeyPatch
Fold = Callable[[JobContext, Any], JobContext]
SHORT = Swarm(faults_s=60.0, quiet_max_s=900.0, jobs=2)
KILLS = replace(SHORT, kill_instance_s=4.0)
MASTERS = replace(SHORT, kill_master_s=3.0)
BOTH = replace(SHORT, kill_instance_s=6.0, kill_master_s=4.0)
STOPS = replace(SHORT, jobs=3, apart=True, preempt_job_s=8.0, stop_grace_s=(30.0,))
"""Jobs that come up again on other hosts; nothing fails."""
RESIZES = replace(STOPS, preempt_job_s=None, drain_node_s=12.0, scale_role_s=6.0, shape="elastic")
"""Commands that keep their own checkpoints change their size and place; nothing fails."""
PEERS = replace(SHORT, jobs=3, apart=True, peers=True, lose_node_s=12.0, kill_instance_s=20.0)
CANCELS = replace(SHORT, stop_job_s=15.0)
PREEMPTS = replace(SHORT, preempt_job_s=8.0, jobs=3)
LIMITED = replace(SHORT, jobs=5, limited=True)
RESTARTS = replace(SHORT, restart_service_s=5.0, second_master_s=4.0, kill_master_s=6.0)
SLOW_CALLS = SimFaults(call_s=0.5)
STREAMS = replace(SHORT, shape="streams", engine=SimFaults(late_p=0.3, late_s=1.0))
SLOW_SENDS = SimFaults(send_s=3.0)
LATE = SimFaults(call_s=0.5, late_p=0.3, seen_after_s=3.0)


SHOWN = (AssertionError, ValueError, KeyError, StoreCorrupt)
"""A broken law, a job that never ends, or what the system raises when it refuses what comes of the bug: which of them
comes first depends on when two calls meet. A mistake in the plant itself (TypeError, AttributeError) is not a find."""


@dataclass(frozen=True, slots=True)
class Bug:
    """What is broken, how, and the faults that bring it out."""

    name: str
    plant: Callable[[Patch], None]
    swarm: Swarm
    log: Literal["memory", "sql"] = "memory"


def _folds(patch: Patch, kinds: tuple[type, ...], around: Callable[[Fold, JobContext, Any], JobContext]) -> None:
    """Whatever these kinds of event do to a job is done by ``around``, which is given what would be done."""
    for key, real in tuple(machine.FOLDS.items()):
        if key[2] in kinds:
            patch.setitem(machine.FOLDS, key, functools.partial(around, real))


def no_epoch_check(patch: Patch) -> None:
    """Readiness reported for an epoch that is over counts."""

    def ready(real: Fold, ctx: JobContext, event: Any) -> JobContext:
        return real(ctx, replace(event, epoch=ctx.instances[event.instance].epoch))

    _folds(patch, (InstanceReady,), ready)


def lost_wake_up(patch: Patch) -> None:
    """A returning master takes what is open for begun and does not ask for it again."""
    real = master_module.JobMaster._step

    def step(self: Any, records: Any) -> None:
        if self._executor is not None and self.epoch > 1 and not self._begun:
            self._begun = frozenset(one.id for one in wanted(functools.reduce(fold, records, self.ctx)))
        real(self, records)

    patch.setattr(master_module.JobMaster, "_step", step)


def released_too_early(patch: Patch) -> None:
    """Reservations are given back while processes are still being stopped."""
    real = desired._wind_down

    def wind_down(ctx: JobContext) -> JobContext:
        ctx = real(ctx)
        return replace(ctx, gangs=tuple(moved(gang, GangState.RELEASING) for gang in ctx.gangs))

    patch.setattr(desired, "_wind_down", wind_down)


def budget_reset_at_restart(patch: Patch) -> None:
    """A new master forgets how often a role was restarted."""
    real = attempt.reattach
    patch.setattr(attempt, "reattach", lambda ctx, event: replace(real(ctx, event), charges=()))


def repeated_errors_forgotten_at_restart(patch: Patch) -> None:
    """A new master forgets which errors came again and again."""
    real = attempt.reattach
    patch.setattr(attempt, "reattach", lambda ctx, event: replace(real(ctx, event), repeats=()))


def started_beside_the_old_one(patch: Patch) -> None:
    """A replacement starts while the old process is still being stopped."""
    real = desired._start

    def start(ctx: JobContext) -> JobContext:
        terminating = {one.id: one.terminating for one in ctx.instances.values()}
        bare = ctx.with_instances([replace(one, terminating=()) for one in ctx.instances.values()])
        moved = real(bare)
        return moved.with_instances([replace(one, terminating=terminating[one.id]) for one in moved.instances.values()])

    patch.setattr(desired, "_start", start)


def fenced_loop_commits(patch: Patch) -> None:
    """A loop that was replaced may still commit."""

    def accepts(ctx: JobContext, n: int, loop_epoch: int) -> bool:
        return n == ctx.committed + 1 and not ctx.state.terminal

    patch.setattr(machine, "accepts_commit", accepts)
    patch.setattr(master_module, "accepts_commit", accepts)


def no_fence_in_the_log(patch: Patch) -> None:
    """The log takes appends of a writer whose epoch is over."""
    patch.setattr(memory_log, "check_fence", lambda writer, fence: None)


def answered_before_it_is_durable(patch: Patch) -> None:
    """The master acknowledges a commit that is not in the log yet."""
    real = master_module.JobMaster.commit

    async def commit(self: Any, *, n: int, loop_epoch: int, **rest: Any) -> dict[str, Any]:
        self._own(real(self, n=n, loop_epoch=loop_epoch, **rest))
        return {"answer": "done", "table": {}}

    patch.setattr(master_module.JobMaster, "commit", commit)


def snapshot_without_budget(patch: Patch) -> None:
    """A snapshot leaves out what a replay of the whole log knows."""
    real = JobContext.to_json
    patch.setattr(JobContext, "to_json", lambda self: {**real(self), "charges": []})


def kept_context_ahead_of_itself(patch: Patch) -> None:
    """A kept context claims one record more than is in it, so that the replay after it leaves one out."""
    real = master_module.keep_context

    def keep(log: Any, found: Any, writer: Any) -> None:
        real(log, replace(found, number=found.number + 1), writer)

    patch.setattr(master_module, "keep_context", keep)


def checks_not_looked_at(patch: Patch) -> None:
    """A process is started whatever it found wrong with its node."""
    real = executor.Executor._ask

    async def ask(self: Any, one: Any, started: Any, call: Any) -> Any:
        found = await real(self, one, started, call)
        return "done" if call.method == "check" else found

    patch.setattr(executor.Executor, "_ask", ask)


def no_start_limit(patch: Patch) -> None:
    """Nobody gives up an instance that never gets ready."""
    real = desired.timers

    def timers(ctx: JobContext) -> Iterator[SetTimer]:
        return (one for one in real(ctx) if not one.timer.startswith("start/"))

    patch.setattr(desired, "timers", timers)


def one_failure_too_many(patch: Patch) -> None:
    """The limit of restarts is off by one."""
    real = failover.FailoverCoordinator.budget_left
    patch.setattr(failover.FailoverCoordinator, "budget_left", lambda self, cause, level: real(self, cause, level) + 1)


def failover_without_end(patch: Patch) -> None:
    """The end of a recovery is never recorded, so nobody runs again."""
    patch.setattr(desired, "_progress", lambda ctx, one: iter(()))


def open_items_forgotten(patch: Patch) -> None:
    """After a recovery of the loop only new items of the source are produced."""
    real = ledger.Ledger.restored

    def restored(spec: Any, cut: Any, **more: Any) -> ledger.Ledger:
        if cut:
            left = len(list(ledger.uids_of(cut["open"])))
            cut = {**cut, "open": [], "admitted": cut["admitted"] - left}
        return real(spec, cut, **more)

    patch.setattr(ledger.Ledger, "restored", restored)


def age_not_looked_at(patch: Patch) -> None:
    """A batch may hold items that are too old."""
    patch.setattr(ledger.Ledger, "refresh", lambda self, version: ())


def cut_of_the_commit_before(patch: Patch) -> None:
    """A cut does not know the batch that its commit makes trained."""
    real = ledger.Ledger.cut

    def cut(self: Any) -> dict[str, Any]:
        found = real(self)
        leased = [item.uid for item in self._open.values() if item.place is ledger.ItemState.LEASED]
        return {**found, "trained": self.trained, "open": [*ledger.ranges(leased), *found["open"]]}

    patch.setattr(ledger.Ledger, "cut", cut)


def devices_before_state(patch: Patch) -> None:
    """A job that stops gives its devices back at once, its state in memory alone."""
    patch.setattr(shutdown, "begin", lambda ctx, ending, state: replace(ctx, state=state, ending=ending))


def no_grace_for_commands_that_move(patch: Patch) -> None:
    """A command that changes its size or place is killed before it has written its own checkpoint."""
    real = shutdown.grace_s
    patch.setattr(shutdown, "grace_s", lambda ctx, one: real(ctx, one) if ctx.ending else FENCED_GRACE_S)


def peer_not_asked(patch: Patch) -> None:
    """A job whose machine is lost goes back to its checkpoint, though another machine has a newer commit."""
    patch.setattr(survival, "copy_of", lambda ctx, one, n: None)


def disk_before_memory(patch: Patch) -> None:
    """A job goes back to its checkpoint though all find the last commit in the memory of their hosts."""
    patch.setattr(survival, "restorable", lambda ctx: min(ctx.checkpoint_n, ctx.committed))


def dependency_not_waited_for(patch: Patch) -> None:
    """A job starts while the one that it comes after still runs."""
    patch.setattr(Scheduler, "_after", lambda self, spec: ())


def failed_dependency_forgotten(patch: Patch) -> None:
    """A job starts though the one that had to succeed before it did not."""
    patch.setattr(Scheduler, "_failed", lambda self, after: None)


def stale_death_believed(patch: Patch) -> None:
    """The report of the end of an earlier process counts against the present one."""
    patch.setattr(attempt, "_concerns", lambda one, event: one.process is not None)


def timer_of_an_old_epoch(patch: Patch) -> None:
    """A timer is not ended with its time, and when it fires it counts."""
    patch.setattr(executor.Executor, "keep", lambda self, wanted: None)

    def fire(real: Fold, ctx: JobContext, event: Any) -> JobContext:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(attempt, "timers", lambda ctx: (SetTimer(timer=event.timer, since_s=0.0, after_s=0.0),))
            return real(ctx, event)

    _folds(patch, (TimerFired,), fire)


def cancel_overwritten_by_finish(patch: Patch) -> None:
    """A job that is being cancelled and whose work ends meanwhile counts as a success."""

    def ends(real: Fold, ctx: JobContext, event: Any) -> JobContext:
        if ctx.ending is None:
            return real(ctx, event)
        return replace(ctx, ending=replace(ctx.ending, reason=Reason.COMPLETED))

    _folds(patch, (InstanceEnded, Committed), ends)


def two_terminal_events(patch: Patch) -> None:
    """The end of a job is written and does not end it."""
    _folds(patch, (JobEnded,), lambda real, ctx, event: ctx)


def reserved_before_released(patch: Patch) -> None:
    """A reservation is asked for while an older one is still held."""
    real = desired._of_gangs

    def of_gangs(ctx: JobContext) -> Iterator[Any]:
        yield from real(ctx)
        yield from real(replace(ctx, gangs=tuple(one for one in ctx.gangs if one.state is not GangState.RELEASING)))

    patch.setattr(desired, "_of_gangs", of_gangs)


def _without_grace(patch: Patch, which: Callable[[JobContext], bool]) -> None:
    real = desired._of_instances

    def of_instances(ctx: JobContext) -> Iterator[Any]:
        for one in real(ctx):
            yield replace(one, grace_s=0.0) if isinstance(one, StopInstance) and which(ctx) else one

    patch.setattr(desired, "_of_instances", of_instances)


def grace_skipped(patch: Patch) -> None:
    """Who is cancelled is killed at once."""
    _without_grace(patch, lambda ctx: ctx.ending is not None and not ctx.ending.requeue)


def grace_of_the_preempted_skipped(patch: Patch) -> None:
    """Who is preempted or paused is killed at once."""
    _without_grace(patch, lambda ctx: ctx.ending is not None and ctx.ending.requeue)


def _with_events(patch: Patch, change: Callable[[Any, Any], Any]) -> None:
    """The scheduler takes in another event than the one that happened, or none."""
    real = Scheduler._happened

    def happened(self: Any, one: Any, at: float) -> None:
        if (other := change(self, one)) is not None:
            real(self, other, at)

    patch.setattr(Scheduler, "_happened", happened)


def released_twice(patch: Patch) -> None:
    """What a job held is counted as free twice."""
    real = State.release

    def release(self: Any, txn: Any, job: Any, **more: Any) -> None:
        held = self.jobs[job].held
        real(self, txn, job, **more)
        for slot in held:
            self.take(txn, slot, -1)

    patch.setattr(State, "release", release)


def half_a_gang_kept(patch: Patch) -> None:
    """A job that lets go keeps the first of its places."""
    real = State.release

    def release(self: Any, txn: Any, job: Any, **more: Any) -> None:
        first = self.jobs[job].held[0]
        real(self, txn, job, **more)
        self.take(txn, first, 1)

    patch.setattr(State, "release", release)


def retry_without_id(patch: Patch) -> None:
    """A commit that is asked for again, since its answer was lost, is taken for another one."""
    patch.setattr(master_module.JobMaster, "_has", lambda self, n, loop_epoch: False)


def node_used_early(patch: Patch) -> None:
    """A drained or suspected node is used before somebody has found it fit."""
    _with_events(patch, lambda self, one: None if isinstance(one, events.NodeChanged) and not one.devices else one)


def paused_job_admitted(patch: Patch) -> None:
    """The scheduler does not know that a job is paused."""
    _with_events(patch, lambda self, one: None if isinstance(one, events.JobPaused) and one.paused else one)


def rollback_ignored(patch: Patch) -> None:
    """After a return to an earlier commit the job counts on from the last one."""
    _folds(patch, (RolledBack,), lambda real, ctx, event: replace(real(ctx, event), committed=ctx.committed))


def weights_forgotten(patch: Patch) -> None:
    """The cursor of a commit names the versions that are due with it alone."""
    real = master_module.cursor_with
    patch.setattr(master_module, "cursor_with", lambda cursor, *args: real({}, *args))


def snapshot_without_tail(patch: Patch) -> None:
    """A new master begins with a kept context and does not replay what came after it."""
    real = master_module.newest_context

    def newest(log: Any, job: Any) -> Any:
        found = real(log, job)
        return replace(found, number=log.last_number()) if found.number else found

    patch.setattr(master_module, "newest_context", newest)


def mark_before_the_commit(patch: Patch) -> None:
    """A record is marked as acknowledged before it is written; the service finds it missing when it starts again."""
    real = SqlLog.append

    def append(self: Any, events: Any, **more: Any) -> Any:
        self._mark.advance(self.last_number() + len(events))
        return real(self, events, **more)

    patch.setattr(SqlLog, "append", append)


def quota_off_by_one(patch: Patch) -> None:
    """A queue may pass its limit by one core."""
    real = QueueTable.over_limit

    def over_limit(self: Any, used: Any, by_user: Any, path: str, user: str, need: Any) -> Any:
        less = need.copy()
        less[1] -= 1000
        return real(self, used, by_user, path, user, less)

    patch.setattr(QueueTable, "over_limit", over_limit)


def superfluous_victim(patch: Patch) -> None:
    """Everybody who may be preempted is, whether that is needed or not."""
    patch.setattr(preemption, "enough_of", lambda state, txn, row, placer, order: list(order))
    patch.setattr(preemption, "_cheapest", lambda state, txn, row, placer, order, cost, chosen: chosen)


def requeue_forgets_commits(patch: Patch) -> None:
    """A job that goes back to the queue begins again with commit 1."""
    real = attempt.requeue
    patch.setattr(attempt, "requeue", lambda ctx, event: replace(real(ctx, event), committed=0))


def cancel_lost_in_the_queue(patch: Patch) -> None:
    """A job that is cancelled while it waits for another attempt runs on."""
    waiting = (JobState.QUEUED, JobState.PAUSED)
    _folds(
        patch,
        (StopAsked,),
        lambda real, ctx, event: ctx if ctx.state in waiting and ctx.attempt else real(ctx, event),
    )


def requeued_before_released(patch: Patch) -> None:
    """A job is back in the queue while its processes still run."""
    patch.setattr(JobContext, "released", property(lambda self: True))


def commit_taken_twice(patch: Patch) -> None:
    """The same commit may be made a second time."""
    real = machine.accepts_commit

    def accepts(ctx: JobContext, n: int, loop_epoch: Any) -> bool:
        return real(ctx, n, loop_epoch) or real(ctx, n + 1, loop_epoch)

    patch.setattr(machine, "accepts_commit", accepts)
    patch.setattr(master_module, "accepts_commit", accepts)
    patch.setattr(master_module.JobMaster, "_has", lambda self, n, loop_epoch: False)


def victims_places_given_too_early(patch: Patch) -> None:
    """What a job that is asked to leave still holds is given to the next one at once."""

    def change(self: Any, one: Any) -> Any:
        return events.JobReleased(job=one.job) if isinstance(one, events.StopRequested) else one

    _with_events(patch, change)


def stop_beside_a_start(patch: Patch) -> None:
    """A process is stopped while the request to start it is still on its way, and comes to be afterwards."""
    patch.setattr(executor, "_superseded", lambda command: "")


def missing_not_lost(patch: Patch) -> None:
    """A new master takes a process that is gone for alive."""
    patch.setattr(attempt, "_is_gone", lambda one, alive: False)


def unexpected_left_alone(patch: Patch) -> None:
    """A new master leaves processes alone that its log does not know."""
    patch.setattr(attempt, "_with_unexpected", lambda one, alive: one)


def age_of_the_last_stage(patch: Patch) -> None:
    """An item counts as made with the model of its last stage, not with the oldest one."""
    real = ledger.Ledger.start

    def start(self: Any, uid: Any, holder: Any, epoch: Any, version: int) -> bool:
        began = real(self, uid, holder, epoch, version)
        if began:
            self._move(replace(self.find(uid), version=version), ledger.ItemState.RUNNING)
        return began

    patch.setattr(ledger.Ledger, "start", start)


BUGS = (
    Bug("no_epoch_check", no_epoch_check, replace(KILLS, kill_instance_s=1.5, store_s=0.3)),
    Bug("lost_wake_up", lost_wake_up, MASTERS),
    Bug("released_too_early", released_too_early, KILLS),
    Bug("budget_reset_at_restart", budget_reset_at_restart, replace(BOTH, kill_instance_s=2.0)),
    Bug(
        "repeated_errors_forgotten_at_restart",
        repeated_errors_forgotten_at_restart,
        replace(MASTERS, failing_code=True, jobs=4),
    ),
    Bug("started_beside_the_old_one", started_beside_the_old_one, KILLS),
    Bug("fenced_loop_commits", fenced_loop_commits, replace(KILLS, kill_instance_s=2.0, jobs=3, engine=SLOW_CALLS)),
    Bug("no_fence_in_the_log", no_fence_in_the_log, replace(MASTERS, second_master_s=2.0)),
    Bug("answered_before_it_is_durable", answered_before_it_is_durable, replace(SHORT, crash_before_append_p=0.1)),
    Bug("snapshot_without_budget", snapshot_without_budget, KILLS),
    Bug("kept_context_ahead_of_itself", kept_context_ahead_of_itself, MASTERS),
    Bug("checks_not_looked_at", checks_not_looked_at, replace(SHORT, failing_code=True)),
    Bug("no_start_limit", no_start_limit, replace(SHORT, engine=SimFaults(hang_p=0.1))),
    Bug("one_failure_too_many", one_failure_too_many, KILLS),
    Bug("failover_without_end", failover_without_end, KILLS),
    Bug("open_items_forgotten", open_items_forgotten, KILLS),
    Bug("age_not_looked_at", age_not_looked_at, KILLS),
    Bug("cut_of_the_commit_before", cut_of_the_commit_before, KILLS),
    Bug("devices_before_state", devices_before_state, STOPS),
    Bug("no_grace_for_commands_that_move", no_grace_for_commands_that_move, RESIZES),
    Bug("peer_not_asked", peer_not_asked, PEERS),
    Bug("dependency_not_waited_for", dependency_not_waited_for, replace(SHORT, jobs=4, after=True)),
    Bug(
        "failed_dependency_forgotten",
        failed_dependency_forgotten,
        replace(SHORT, jobs=4, after=True, failing_code=True),
    ),
    Bug("disk_before_memory", disk_before_memory, KILLS),
    Bug("stale_death_believed", stale_death_believed, replace(BOTH, kill_instance_s=2.0, engine=LATE)),
    Bug("timer_of_an_old_epoch", timer_of_an_old_epoch, replace(KILLS, failing_code=True)),
    Bug("cancel_overwritten_by_finish", cancel_overwritten_by_finish, CANCELS),
    Bug("two_terminal_events", two_terminal_events, SHORT),
    Bug("reserved_before_released", reserved_before_released, replace(BOTH, preempt_job_s=8.0, scale_role_s=5.0)),
    Bug("grace_skipped", grace_skipped, CANCELS),
    Bug("grace_of_the_preempted_skipped", grace_of_the_preempted_skipped, PREEMPTS),
    Bug("released_twice", released_twice, PREEMPTS),
    Bug("half_a_gang_kept", half_a_gang_kept, PREEMPTS),
    Bug("retry_without_id", retry_without_id, replace(SHORT, store_error_p=0.2)),
    Bug("node_used_early", node_used_early, replace(PREEMPTS, drain_node_s=10.0)),
    Bug("paused_job_admitted", paused_job_admitted, replace(SHORT, pause_job_s=10.0)),
    Bug("rollback_ignored", rollback_ignored, replace(BOTH, lose_node_s=15.0, failing_code=True)),
    Bug("weights_forgotten", weights_forgotten, SHORT),
    Bug("snapshot_without_tail", snapshot_without_tail, MASTERS),
    Bug("mark_before_the_commit", mark_before_the_commit, RESTARTS, log="sql"),
    Bug("quota_off_by_one", quota_off_by_one, LIMITED),
    Bug("superfluous_victim", superfluous_victim, LIMITED),
    Bug("requeue_forgets_commits", requeue_forgets_commits, PREEMPTS),
    Bug("cancel_lost_in_the_queue", cancel_lost_in_the_queue, replace(PREEMPTS, pause_job_s=6.0, stop_job_s=8.0)),
    Bug("requeued_before_released", requeued_before_released, PREEMPTS),
    Bug("commit_taken_twice", commit_taken_twice, replace(SHORT, store_error_p=0.2)),
    Bug("victims_places_given_too_early", victims_places_given_too_early, replace(LIMITED, preempt_job_s=6.0)),
    Bug("stop_beside_a_start", stop_beside_a_start, replace(PREEMPTS, stop_grace_s=(0.0,), engine=SLOW_SENDS)),
    Bug("age_of_the_last_stage", age_of_the_last_stage, STREAMS),
    Bug("missing_not_lost", missing_not_lost, BOTH),
    Bug("unexpected_left_alone", unexpected_left_alone, replace(MASTERS, stray_s=5.0)),
)
