"""What a verdict changes: the record of the recovery, its charge, new epochs and places for its scope, or the queue."""

from __future__ import annotations

from rota.job.core import stopping
from rota.job.core.context import (
    FAILED_GRACE_S,
    FAILOVERS_KEPT_MAX,
    Charge,
    Ending,
    Failover,
    Instance,
    JobContext,
    Loss,
    replace,
)
from rota.job.core.diagnosis import by_platform, is_free, may_move, platform_left, root_cause
from rota.job.core.failover import FailoverCoordinator
from rota.job.core.graph import replaced
from rota.job.core.sizing import OF_THE_NODE, PLANNED, has_place, homeless, is_world, leaving
from rota.spec.events import FailoverStarted
from rota.spec.ids import Epoch, InstanceId, RoleName
from rota.spec.reasons import INFO, Reason
from rota.spec.states import InstanceState, JobState, Level

BACKOFF_MAX_S = 60.0
CHARGES_KEPT_MAX = 1000


def open_failover(ctx: JobContext, event: FailoverStarted) -> JobContext:
    """Apply a verdict, or a change of size: from here on the older epochs of its scope are fenced."""
    planned = event.reason in PLANNED and not ctx.losses
    if event.failover != ctx.failover_count + 1 or not (ctx.losses or (planned and ctx.open_failover is None)):
        return ctx
    cause = _cause(ctx, event) if planned else root_cause(ctx.losses)
    new = _record(ctx, event, cause)
    platform = by_platform(ctx, cause)
    charge = Charge(role=event.role, level=event.level, at_s=ctx.at_s, platform=platform)
    charges = () if planned or is_free(ctx, cause) or (platform and event.level is Level.JOB) else (charge,)
    resized = bool(event.join) or any(_is_world_of(ctx, role) for role, _ in event.leave)
    ctx = replace(
        ctx,
        failovers=(*_superseded(ctx, new), new)[-FAILOVERS_KEPT_MAX:],
        failover_count=new.number,
        charges=(*ctx.charges, *charges)[-CHARGES_KEPT_MAX:],
        resized_s=ctx.at_s if resized else ctx.resized_s,
        boundary=False,
    )
    match event.level:
        case Level.NODE if not may_move(cause):
            return replace(ctx, escalated=Level.NODE)
        case Level.JOB:
            return _restart_job(ctx, cause)
        case Level.PROCESS | Level.ROLE | Level.NODE:
            return _restart_scope(ctx, new, event)


def _is_world_of(ctx: JobContext, role: RoleName) -> bool:
    """True when the members of this role are one process group whose size may change."""
    return ctx.spec is not None and is_world(ctx.spec.role(role))


def _cause(ctx: JobContext, event: FailoverStarted) -> Loss:
    """A change of size or place in the form of a loss; nothing was lost."""
    one = ctx.instances[InstanceId(event.role, event.rank)]
    return Loss(instance=one.id, epoch=one.epoch, reason=event.reason, text=event.text, at_s=ctx.at_s)


def job_level_ending(ctx: JobContext, cause: Loss) -> Ending:
    """What a restart of the whole job means: the queue again, or the end for the reason of the cause.

    A fault of the platform never uses up a retry: it has a budget of its own.
    """
    assert ctx.spec is not None
    free = by_platform(ctx, cause)
    own = ctx.retries < ctx.spec.retry and cause.reason is not Reason.DATA_ERROR
    requeue = platform_left(ctx, Level.JOB, ctx.at_s) > 0 if free else own
    fails = INFO[cause.reason].ends_in is not None
    return Ending(
        reason=cause.reason if fails else Reason.INTERNAL,
        requeue=requeue,
        counts=not free,
        grace_s=FAILED_GRACE_S,
        save_s=ctx.spec.grace_s if requeue else 0.0,
        text=cause.text,
        role=cause.instance.role,
        rank=cause.instance.rank,
        traceback=cause.traceback,
    )


def _record(ctx: JobContext, event: FailoverStarted, cause: Loss) -> Failover:
    scope = tuple(InstanceId(role, rank) for role, rank, _ in event.scope)
    coordinator = FailoverCoordinator(ctx)
    # A world that changes its size goes on in the processes that live.
    shrinks = {role for role, _ in event.leave if _is_world_of(ctx, role)}
    wide = coordinator.whole_roles(event.level, event.role) - shrinks
    lost = coordinator.lost(event.level, cause) if ctx.losses or cause.reason is not Reason.RESIZED else ()
    fresh = replaced(ctx.plan, lost, wide)
    delay_s = _backoff_s(ctx, cause) if ctx.losses else 0.0
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
        rolled_back=not _touches_state(ctx, scope) or event.level is Level.JOB or _opens_nothing(event, cause),
    )


def _opens_nothing(event: FailoverStarted, cause: Loss) -> bool:
    return event.level is Level.NODE and not may_move(cause)


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
        impossible = one.level is Level.NODE and one.number == by.number - 1 and one.superseded_by is None
        opens = by.level is not Level.NODE or may_move(by.cause)
        return opens and (one.number == ctx.open_failover or impossible)

    return tuple(replace(one, superseded_by=by.number) if taken_over(one) else one for one in ctx.failovers)


def _restart_job(ctx: JobContext, cause: Loss) -> JobContext:
    ending = job_level_ending(ctx, cause)
    ctx = stopping.begin(ctx, ending, JobState.RECOVERING if ending.requeue else JobState.STOPPING)
    return replace(ctx, losses=(), escalated=None, diagnosed=False, checked=None, open_failover=None)


def _restart_scope(ctx: JobContext, failover: Failover, event: FailoverStarted) -> JobContext:
    fresh, join = frozenset(failover.replaced), {InstanceId(*pair) for pair in event.join}
    lost = frozenset(loss.instance for loss in ctx.losses)
    away = frozenset(FailoverCoordinator(ctx).lost(event.level, failover.cause)) if event.level is Level.NODE else lost
    leave = {InstanceId(*pair) for pair in event.leave}
    if not leave and event.move_reason is Reason.RESIZED_DEGRADED:
        leave = set(lost)  # as logs say it that do not list who leaves

    stays = event.move_reason is Reason.NO_NODE
    barred = {} if stays else {one.id: one.barred for one in ctx.instances.values() if one.barred}
    moved = away if failover.cause.reason is Reason.MIGRATED_DRAIN else frozenset[InstanceId]()
    if (event.level is Level.NODE and not moved) or leave:
        # Who was lost elsewhere, by its peer's end, says nothing of its own node.
        own = {loss.node for loss in ctx.losses if loss.instance in leave or loss.reason in OF_THE_NODE}
        bad = own | {failover.cause.node}
        homes = {one: ctx.bundle(one)[1].node for one in away if one in ctx.bound and not ctx.instances[one].barred}
        barred |= {one: (node,) for one, node in homes.items() if node in bad}

    def changed(member: InstanceId) -> Instance:
        one = ctx.instances[member]
        if member in leave:
            return leaving(one, failover.epoch, barred=barred.get(member, ()))
        if member in join:
            return replace(_re_form(one, failover.epoch), spare=False)
        if member not in fresh:
            return replace(_re_form(one, failover.epoch), barred=barred.get(member, ()))
        new = _replace(one, failover.epoch, lost=member in away)
        return replace(new, spare=one.spare or _in_background(ctx, member, lost), barred=barred.get(member, ()))

    # Without another node nobody waits for one: who is not replaced now comes up again where it was, too.
    back = [one for one in homeless(ctx) if stays and one.id not in failover.scope and has_place(ctx, one)]
    asks = tuple(replace(ask, state="granted") if frozenset(ask.everybody) == moved else ask for ask in ctx.asks)
    instances = [*(changed(member) for member in failover.scope), *(replace(one, barred=()) for one in back)]
    return replace(
        ctx.with_instances(instances).with_placement(ctx.placement, asks),
        open_failover=failover.number,
        epoch_max=Epoch(max(ctx.epoch_max, failover.epoch)),
        starting_s=ctx.at_s,
        losses=(),
        escalated=None,
        diagnosed=False,
        checked=None,
    )


def _in_background(ctx: JobContext, member: InstanceId, lost: frozenset[InstanceId]) -> bool:
    """True when nobody waits for the replacement: a spare takes over, or the role may go on with fewer."""
    assert ctx.spec is not None
    role = ctx.spec.role(member.role)
    if member not in lost or not role.serves:
        return False
    members = [one for one in ctx.of_role(role.name) if one.id not in lost and one.state is InstanceState.READY]
    spares = sum(one.spare for one in members)
    mine = sorted(one for one in lost if one.role == role.name and ctx.instances[one].active)
    fewest = role.fail.degrade or (role.replicas_min if role.replicas_max > role.replicas_min else None)
    if fewest is not None and len(members) - spares >= fewest:
        return True
    return member in mine[:spares]


def _replace(one: Instance, epoch: Epoch, *, lost: bool) -> Instance:
    """A new process under ``epoch``; one that was only asked for and did not fail is as good as new and stays."""
    if one.state is InstanceState.PLANNED or (not lost and one.state is InstanceState.STARTING):
        return replace(one, epoch=epoch)
    new = one.let_go(InstanceState.PLANNED, epoch)
    return replace(new, ended=False, retired=False, restarts=one.restarts + 1)


def _re_form(one: Instance, epoch: Epoch) -> Instance:
    """The same process under ``epoch``, to be assembled anew; without a process it starts like any other."""
    state = InstanceState.STALE if one.alive else one.state
    if one.process is None:
        state = InstanceState.PLANNED
    return replace(one, state=state, epoch=epoch, running=False, ended=False, retired=False)
