"""FailoverCoordinator: from losses to the level, scope and budget of a recovery, and what a recovery changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rota.job.core.context import (
    FAILED_GRACE_S,
    FAILOVERS_KEPT_MAX,
    FREE_REQUEUES_MAX,
    Charge,
    Ending,
    Failover,
    Instance,
    JobContext,
    Loss,
)
from rota.job.core.diagnosis import is_secondary, root_cause
from rota.job.core.graph import recovery_scope, replaced
from rota.spec.events import FailoverStarted
from rota.spec.ids import Epoch, InstanceId, RoleName
from rota.spec.job import Restart, RoleSpec
from rota.spec.reasons import INFO, Reason
from rota.spec.states import InstanceState, JobState, Level

BACKOFF_MAX_S = 60.0
CHARGES_KEPT_MAX = 1000
NO_FAULT = frozenset({Reason.NODE_LOST, Reason.ENGINE_LOST, Reason.GANG_TIMEOUT})
"""Causes that are no fault of the job: a restart of the whole job for one of them costs no retry at first."""
_LEVELS: dict[Restart, Level] = {"process": Level.PROCESS, "role": Level.ROLE, "node": Level.NODE, "job": Level.JOB}


@dataclass(frozen=True, slots=True)
class Move:
    """The chosen level; if it is not where the contract starts, from where and why it moved."""

    level: Level
    moved_from: Level | None = None
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class FailoverCoordinator:
    """The verdict about the losses of a context."""

    ctx: JobContext

    def verdict(self) -> FailoverStarted | None:
        """The recovery that the present losses call for; None while there is none, or its cause may still come."""
        ctx = self.ctx
        if not ctx.losses or ctx.ending is not None or not self.judged:
            return None
        cause = root_cause(ctx.losses)
        move = self.move(cause)
        epoch = Epoch(ctx.epoch_max + 1)
        return FailoverStarted(
            failover=ctx.failover_count + 1,
            level=move.level,
            scope=tuple((member.role, member.rank, epoch) for member in self.scope(move.level, cause)),
            restore=ctx.committed,
            reason=cause.reason,
            role=cause.instance.role,
            rank=cause.instance.rank,
            text=cause.text,
            traceback=cause.traceback,
            moved_from=move.moved_from,
            move_reason=move.reason,
        )

    @property
    def judged(self) -> bool:
        """False while every loss looks like the consequence of one that has not been reported yet."""
        return self.ctx.diagnosed or any(not is_secondary(loss) for loss in self.ctx.losses)

    def move(self, cause: Loss) -> Move:
        """The narrowest level of the ladder that still has budget and is possible."""
        ladder = list(self.ladder(cause))
        if self.ctx.escalated is Level.NODE:
            return Move(Level.JOB, Level.NODE, Reason.NO_NODE)
        for level in ladder:
            if self.budget_left(cause, level) > 0:
                if level is ladder[0]:
                    return self._first(cause, level)
                return self._wider(cause, ladder[0], level)
        return Move(Level.JOB, ladder[0], Reason.BUDGET_PROCESS)

    def _wider(self, cause: Loss, start: Level, level: Level) -> Move:
        """A wider level, unless the role may go on with the instances that it still has."""
        if self.may_degrade(cause):
            return Move(Level.PROCESS, start, Reason.RESIZED_DEGRADED)
        return Move(level, start, Reason.BUDGET_PROCESS)

    def may_degrade(self, cause: Loss) -> bool:
        """True when enough members are left for ``degrade`` and no one else needs the lost one to go on."""
        role = self._role(cause)
        if role.fail.degrade is None or role.finite or len(self.ctx.plan.unit(cause.instance)) > 1:
            return False
        if role.name in self.ctx.plan.stateful or any(loss.instance.role != role.name for loss in self.ctx.losses):
            return False
        left = sum(one.state is InstanceState.READY for one in self.ctx.of_role(role.name))
        return left >= role.fail.degrade

    def ladder(self, cause: Loss) -> Iterator[Level]:
        """Levels to try for this cause, narrowest first: the contract of the role, then its ``then``."""
        role = self._role(cause)
        if cause.reason in (Reason.ENGINE_LOST, Reason.DATA_ERROR):
            yield Level.JOB
        elif cause.reason is Reason.NODE_LOST:
            yield from (Level.NODE, Level.JOB)
        else:
            yield _LEVELS[role.restart]
            yield from (_LEVELS[one] for one in role.fail.then)

    def budget_left(self, cause: Loss, level: Level) -> int:
        """How many failures of the role the level may still absorb in the window that ends now."""
        if level in (Level.NODE, Level.JOB):
            return 1
        fail = self._role(cause).fail
        since_s = cause.at_s - fail.limit_window_s
        used = sum(
            1
            for charge in self.ctx.charges
            if charge.role == cause.instance.role and charge.level is level and charge.at_s > since_s
        )
        return fail.limit_n - used

    def scope(self, level: Level, cause: Loss) -> tuple[InstanceId, ...]:
        """Every instance that the recovery touches, those of an open recovery that it joins included."""
        graph = self.ctx.plan
        if level is Level.JOB:
            return graph.instances
        lost = [loss.instance for loss in self.ctx.losses]
        if level is Level.NODE:
            home = self.ctx.bundle(cause.instance)[1].node
            lost += [one for one in graph.instances if self.ctx.bundle(one)[1].node == home]
        before = self.ctx.failover.scope if self.ctx.failover else ()
        joined = [one for one in before if not self.ctx.instances[one].retired]
        return recovery_scope(graph, [*lost, *joined], self.whole_roles(level, cause.instance.role))

    def whole_roles(self, level: Level, role: RoleName) -> frozenset[RoleName]:
        """Roles that get new processes as a whole: by their contract, or because the recovery widened to the role."""
        assert self.ctx.spec is not None
        wide = {
            loss.instance.role for loss in self.ctx.losses if self.ctx.spec.role(loss.instance.role).restart == "role"
        }
        return frozenset(wide | ({role} if level is Level.ROLE else set()))

    def _first(self, cause: Loss, level: Level) -> Move:
        """The level where the contract starts. Without another node, a node-level contract restarts in place."""
        if level is Level.NODE and cause.reason is not Reason.NODE_LOST:
            if self.budget_left(cause, Level.PROCESS) > 0:
                return Move(Level.PROCESS, Level.NODE, Reason.NO_NODE)
            return Move(Level.JOB, Level.NODE, Reason.BUDGET_PROCESS)
        return Move(level)

    def _role(self, cause: Loss) -> RoleSpec:
        assert self.ctx.spec is not None
        return self.ctx.spec.role(cause.instance.role)


def open_failover(ctx: JobContext, event: FailoverStarted) -> JobContext:
    """Apply a verdict: from here on the older epochs of its scope are fenced."""
    if event.failover != ctx.failover_count + 1 or not ctx.losses:
        return ctx
    cause = root_cause(ctx.losses)
    new = _record(ctx, event, cause)
    ctx = replace(
        ctx,
        failovers=(*_superseded(ctx, new), new)[-FAILOVERS_KEPT_MAX:],
        failover_count=new.number,
        charges=(*ctx.charges, Charge(role=event.role, level=event.level, at_s=ctx.at_s))[-CHARGES_KEPT_MAX:],
    )
    match event.level:
        case Level.NODE:
            return replace(ctx, escalated=Level.NODE)
        case Level.JOB:
            return _restart_job(ctx, cause)
        case Level.PROCESS | Level.ROLE:
            return _restart_scope(ctx, new)


def job_level_ending(ctx: JobContext, cause: Loss) -> Ending:
    """What a restart of the whole job means: the queue again, or the end for the reason of the cause."""
    assert ctx.spec is not None
    free = cause.reason in NO_FAULT and ctx.free_requeues < FREE_REQUEUES_MAX
    requeue = free or (ctx.retries < ctx.spec.retry and cause.reason is not Reason.DATA_ERROR)
    fails = INFO[cause.reason].ends_in is not None
    return Ending(
        reason=cause.reason if fails else Reason.INTERNAL,
        requeue=requeue,
        counts=not free,
        grace_s=FAILED_GRACE_S,
        text=cause.text,
        role=cause.instance.role,
        rank=cause.instance.rank,
        traceback=cause.traceback,
    )


def _record(ctx: JobContext, event: FailoverStarted, cause: Loss) -> Failover:
    scope = tuple(InstanceId(role, rank) for role, rank, _ in event.scope)
    coordinator = FailoverCoordinator(ctx)
    fresh = replaced(ctx.plan, (loss.instance for loss in ctx.losses), coordinator.whole_roles(event.level, event.role))
    delay_s = _backoff_s(ctx, cause)
    return Failover(
        number=event.failover,
        level=event.level,
        scope=scope,
        replaced=tuple(member for member in scope if member in fresh),
        epoch=max((epoch for _, _, epoch in event.scope), default=ctx.epoch_max),
        restore=event.restore,
        cause=cause,
        started_s=ctx.at_s,
        moved_from=event.moved_from,
        move_reason=event.move_reason,
        delay_s=delay_s,
        released=delay_s == 0.0,
        rolled_back=not _touches_state(ctx, scope) or event.level in (Level.NODE, Level.JOB),
    )


def _touches_state(ctx: JobContext, scope: tuple[InstanceId, ...]) -> bool:
    return any(member.role in ctx.plan.stateful for member in scope)


def _backoff_s(ctx: JobContext, cause: Loss) -> float:
    """0 for the first failure of the role in its window, then the base of the contract, doubled each time."""
    assert ctx.spec is not None
    fail = ctx.spec.role(cause.instance.role).fail
    earlier = sum(
        1
        for charge in ctx.charges
        if charge.role == cause.instance.role and charge.at_s > cause.at_s - fail.limit_window_s
    )
    return min(BACKOFF_MAX_S, fail.backoff_s * 2.0 ** (earlier - 1)) if earlier else 0.0


def _superseded(ctx: JobContext, by: Failover) -> tuple[Failover, ...]:
    """The records with the open recovery taken over by the new one; a level that was not possible changes nothing."""

    def taken_over(one: Failover) -> bool:
        impossible = one.level is Level.NODE and one.number == by.number - 1
        return by.level is not Level.NODE and (one.number == ctx.open_failover or impossible)

    return tuple(replace(one, superseded_by=by.number) if taken_over(one) else one for one in ctx.failovers)


def _restart_job(ctx: JobContext, cause: Loss) -> JobContext:
    ending = job_level_ending(ctx, cause)
    return replace(
        ctx,
        state=JobState.RECOVERING if ending.requeue else JobState.STOPPING,
        ending=ending,
        losses=(),
        escalated=None,
        diagnosed=False,
        open_failover=None,
    )


def _restart_scope(ctx: JobContext, failover: Failover) -> JobContext:
    fresh = frozenset(failover.replaced)
    lost = frozenset(loss.instance for loss in ctx.losses)
    changed = [
        _retire(ctx.instances[member], failover.epoch)
        if member in lost and failover.move_reason is Reason.RESIZED_DEGRADED
        else _replace(ctx.instances[member], failover.epoch, lost=member in lost)
        if member in fresh
        else _re_form(ctx.instances[member], failover.epoch)
        for member in failover.scope
    ]
    return replace(
        ctx.with_instances(changed),
        open_failover=failover.number,
        epoch_max=Epoch(max(ctx.epoch_max, failover.epoch)),
        starting_s=ctx.at_s,
        losses=(),
        escalated=None,
        diagnosed=False,
    )


def _replace(one: Instance, epoch: Epoch, *, lost: bool) -> Instance:
    """A new process under ``epoch``; one that was only asked for and did not fail is as good as new and stays."""
    if not lost and one.state in (InstanceState.PLANNED, InstanceState.STARTING):
        return replace(one, epoch=epoch)
    doomed = (*one.doomed, one.process.epoch) if one.process else one.doomed
    return replace(
        one,
        state=InstanceState.PLANNED,
        epoch=epoch,
        process=None,
        doomed=doomed,
        running=False,
        ended=False,
        retired=False,
        restarts=one.restarts + 1,
    )


def _retire(one: Instance, epoch: Epoch) -> Instance:
    """The job goes on without it: its process is stopped and none is started."""
    doomed = (*one.doomed, one.process.epoch) if one.process else one.doomed
    return replace(one, state=InstanceState.GONE, epoch=epoch, process=None, doomed=doomed, running=False, retired=True)


def _re_form(one: Instance, epoch: Epoch) -> Instance:
    """The same process under ``epoch``, to be assembled anew; without a process it starts like any other."""
    state = InstanceState.STALE if one.alive else one.state
    if one.process is None:
        state = InstanceState.PLANNED
    return replace(one, state=state, epoch=epoch, running=False, ended=False, retired=False)
