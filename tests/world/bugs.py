"""Planted bugs: each breaks one line of the system; the world must find every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rota.job import executor
from rota.job import master as master_module
from rota.job.core import failover, intent, ledger, losing, machine, memory, settling, stopping
from rota.job.core.context import JobContext
from rota.runtime import log as log_module
from rota.runtime.launch_sim import SimFaults
from rota.spec.commands import SetTimer
from rota.spec.events import MasterStarted
from rota.spec.states import InstanceState
from tests.world.world import Swarm

Patch = pytest.MonkeyPatch
SHORT = Swarm(faults_s=60.0, quiet_max_s=900.0, jobs=2)
KILLS = replace(SHORT, kill_instance_s=4.0)
MASTERS = replace(SHORT, kill_master_s=3.0)
BOTH = replace(SHORT, kill_instance_s=6.0, kill_master_s=4.0)
STOPS = replace(SHORT, jobs=3, apart=True, preempt_job_s=8.0, stop_grace_s=(30.0,))
"""Jobs that come up again on other hosts; nothing fails."""
SLOW_CALLS = SimFaults(call_s=0.5)


@dataclass(frozen=True, slots=True)
class Bug:
    """What is broken, how, and the faults that bring it out."""

    name: str
    plant: Callable[[Patch], None]
    swarm: Swarm
    shows_as: type[Exception] | tuple[type[Exception], ...] = AssertionError
    """A broken law or a job that never ends, unless the system itself refuses what comes of the bug."""


def no_epoch_check(patch: Patch) -> None:
    """Readiness reported for an epoch that is over counts."""

    def ready(one: Any, event: Any) -> Any:
        if one.state is not InstanceState.STALE:
            return one
        return replace(one, state=InstanceState.READY, restored=event.restored)

    patch.setattr(machine, "_ready", ready)


def lost_wake_up(patch: Patch) -> None:
    """A returning master does not ask again for what is open."""
    real = machine._apply_always

    def apply(ctx: JobContext, event: Any) -> JobContext:
        moved = real(ctx, event)
        return replace(moved, attached=ctx.attached) if isinstance(event, MasterStarted) else moved

    patch.setattr(machine, "_apply_always", apply)


def released_too_early(patch: Patch) -> None:
    """Reservations are given back while processes are still being stopped."""
    real = settling._wind_down

    def wind_down(ctx: JobContext) -> JobContext:
        ctx = real(ctx)
        return replace(ctx, gangs=tuple(replace(gang, state="releasing") for gang in ctx.gangs))

    patch.setattr(settling, "_wind_down", wind_down)


def budget_reset_at_restart(patch: Patch) -> None:
    """A new master forgets how often a role was restarted."""
    real = losing.reattach
    patch.setattr(losing, "reattach", lambda ctx, event: replace(real(ctx, event), charges=()))


def started_beside_the_old_one(patch: Patch) -> None:
    """A replacement starts while the old process is still being stopped."""
    real = settling._start

    def start(ctx: JobContext) -> JobContext:
        doomed = {one.id: one.doomed for one in ctx.instances.values()}
        bare = ctx.with_instances([replace(one, doomed=()) for one in ctx.instances.values()])
        moved = real(bare)
        return moved.with_instances([replace(one, doomed=doomed[one.id]) for one in moved.instances.values()])

    patch.setattr(settling, "_start", start)


def fenced_loop_commits(patch: Patch) -> None:
    """A loop that was replaced may still commit."""

    def accepts(ctx: JobContext, n: int, loop_epoch: int) -> bool:
        return n == ctx.committed + 1 and not ctx.state.terminal

    patch.setattr(machine, "accepts_commit", accepts)
    patch.setattr(master_module, "accepts_commit", accepts)


def no_fence_in_the_log(patch: Patch) -> None:
    """The log takes appends of a writer whose epoch is over."""
    patch.setattr(log_module, "check_fence", lambda writer, fence: None)


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
    real = master_module.keep

    def keep(log: Any, found: Any, writer: Any) -> None:
        real(log, replace(found, number=found.number + 1), writer)

    patch.setattr(master_module, "keep", keep)


def checks_not_looked_at(patch: Patch) -> None:
    """A process is started whatever it found wrong with its node."""
    real = executor.Executor._ask

    async def ask(self: Any, one: Any, started: Any, call: Any) -> Any:
        found = await real(self, one, started, call)
        return "done" if call.method == "check" else found

    patch.setattr(executor.Executor, "_ask", ask)


def no_start_limit(patch: Patch) -> None:
    """Nobody gives up an instance that never gets ready."""
    real = intent.timers

    def timers(ctx: JobContext) -> Iterator[SetTimer]:
        return (one for one in real(ctx) if not one.timer.startswith("start/"))

    patch.setattr(intent, "timers", timers)


def one_failure_too_many(patch: Patch) -> None:
    """The limit of restarts is off by one."""
    real = failover.FailoverCoordinator.budget_left
    patch.setattr(failover.FailoverCoordinator, "budget_left", lambda self, cause, level: real(self, cause, level) + 1)


def failover_without_end(patch: Patch) -> None:
    """The end of a recovery is never recorded, so nobody runs again."""
    patch.setattr(intent, "_progress", lambda ctx, one: iter(()))


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
        leased = [item.uid for item in self._open.values() if item.place is ledger.Place.LEASED]
        return {**found, "trained": self.trained, "open": [*ledger.ranges(leased), *found["open"]]}

    patch.setattr(ledger.Ledger, "cut", cut)


def devices_before_state(patch: Patch) -> None:
    """A job that stops gives its devices back at once, its state in memory alone."""
    patch.setattr(stopping, "begin", lambda ctx, ending, state: replace(ctx, state=state, ending=ending))


def disk_before_memory(patch: Patch) -> None:
    """A job goes back to its checkpoint though all find the last commit in the memory of their hosts."""
    patch.setattr(memory, "restorable", lambda ctx: min(ctx.checkpoint_n, ctx.committed))


BUGS = (
    Bug("no_epoch_check", no_epoch_check, replace(KILLS, kill_instance_s=1.5, store_s=0.3)),
    Bug("lost_wake_up", lost_wake_up, MASTERS),
    Bug("released_too_early", released_too_early, KILLS),
    Bug("budget_reset_at_restart", budget_reset_at_restart, replace(BOTH, kill_instance_s=2.0)),
    Bug("started_beside_the_old_one", started_beside_the_old_one, KILLS),
    Bug("fenced_loop_commits", fenced_loop_commits, replace(KILLS, kill_instance_s=2.0, jobs=3, engine=SLOW_CALLS)),
    Bug(
        "no_fence_in_the_log", no_fence_in_the_log, replace(MASTERS, second_master_s=2.0), (ValueError, AssertionError)
    ),
    Bug("answered_before_it_is_durable", answered_before_it_is_durable, replace(SHORT, crash_before_append_p=0.1)),
    Bug("snapshot_without_budget", snapshot_without_budget, KILLS),
    Bug("kept_context_ahead_of_itself", kept_context_ahead_of_itself, MASTERS, ValueError),
    Bug("checks_not_looked_at", checks_not_looked_at, replace(SHORT, failing_code=True)),
    Bug("no_start_limit", no_start_limit, replace(SHORT, engine=SimFaults(hang_p=0.1))),
    Bug("one_failure_too_many", one_failure_too_many, KILLS),
    Bug("failover_without_end", failover_without_end, KILLS),
    Bug("open_items_forgotten", open_items_forgotten, KILLS),
    Bug("age_not_looked_at", age_not_looked_at, KILLS),
    Bug("cut_of_the_commit_before", cut_of_the_commit_before, KILLS),
    Bug("devices_before_state", devices_before_state, STOPS),
    Bug("disk_before_memory", disk_before_memory, KILLS),
)
