"""What happens in an attempt, as folds: losses, time limits, a new master, a stop, the requeue, the next start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rota.job.core import migration, repetition, resize, shutdown, survival
from rota.job.core.context import (
    Charge,
    Ending,
    Failover,
    HeldGang,
    InstanceRecord,
    JobContext,
    Loss,
    replace,
)
from rota.job.core.desired import timers
from rota.job.core.failover import PLATFORM, end_or_retry, job_level_ending
from rota.job.core.resize import anew, refused
from rota.job.core.transitions import moved
from rota.spec.events import (
    DowntimePassed,
    FailoverEnded,
    GangReserveFailed,
    InstanceLost,
    JobRequeued,
    ProgressStalled,
    Reattached,
    RolledBack,
    StopAsked,
    TimerFired,
)
from rota.spec.ids import Epoch, GangId, InstanceId, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import GangState, InstanceState, JobState, Level

GONE_TEXT = "its process was gone when the master came back"


def lose(ctx: JobContext, event: InstanceLost) -> JobContext:
    """A process died, or code raised in one that lives on.

    Either way its process is kept on record until a stop of it has come back: a report of a death may be wrong.
    """
    one = ctx.instances.get(event.instance)
    if one is None or one.ended or one.state is InstanceState.LOST or not _concerns(one, event):
        return ctx
    loss = ctx.loss(one, event.reason, event.text, event.traceback)
    if event.reason is Reason.STATE_LOST:  # it was looked for: no memory has it
        ctx = survival.without_state(ctx, one.id)
    return _lost(ctx, one, loss)


def stall(ctx: JobContext, event: ProgressStalled) -> JobContext:
    """No progress within the limit: the instance is given up, and its process stopped by the recovery."""
    one = ctx.instances.get(event.instance)
    if one is None or one.epoch != event.epoch or one.state is not InstanceState.READY:
        return ctx
    text = event.text or f"no progress for {event.idle_s:.0f} s"
    return _lost(ctx, one, ctx.loss(one, event.reason, text, event.stacks))


def not_running(ctx: JobContext, event: DowntimePassed) -> JobContext:
    """Time of this attempt in which it had devices and nothing ran counts as if it had none."""
    return replace(ctx, used_s=ctx.used_s - max(0.0, ctx.at_s - max(event.since, ctx.admitted_s)))


def fire(ctx: JobContext, event: TimerFired) -> JobContext:
    """A timer that is still wanted; one of an earlier time changes nothing."""
    timer = event.timer
    if timer not in {wanted.timer for wanted in timers(ctx)}:
        return ctx
    match timer.partition("/")[0]:
        case "time-limit":
            assert ctx.spec is not None
            ending = Ending(
                reason=Reason.TIME_LIMIT,
                grace_s=ctx.spec.grace_s,
                save_s=ctx.spec.grace_s,
                text=f"the job had devices for its limit of {ctx.spec.time_limit_s:.0f} s, starts included",
            )
            return shutdown.begin(ctx, ending, JobState.STOPPING)
        case "grace":
            return shutdown.overdue(ctx)
        case "diagnose":
            return replace(ctx, diagnosed=True)
        case "backoff":
            return _with_failover(ctx, released=True)
        case "asks":
            return resize.answered(ctx)
        case "node":
            return resize.no_node(ctx)
        case "drain":
            return migration.overdue(ctx)
        case "move":
            return ctx  # its time alone counts
        case "healed":
            return repetition.healed(ctx)
        case _:
            return _blame_late(ctx, event.doing)


def close(ctx: JobContext, event: FailoverEnded) -> JobContext:
    """Every member of the recovery is ready again."""
    if ctx.open_failover != event.failover:
        return ctx
    return replace(_with_failover(ctx, seconds=event.seconds), open_failover=None, starting_s=ctx.at_s)


def kept(ctx: JobContext) -> int:
    """The newest commit that counts: a recovery that is under way may have to go back before the last one."""
    failover = ctx.failover
    back_to = failover.restore if failover is not None and not failover.rolled_back else ctx.rollback_to
    return ctx.committed if back_to is None else min(back_to, ctx.committed)


def roll_back(ctx: JobContext, event: RolledBack) -> JobContext:
    """State is back at an earlier commit, the cut of its streams with it; work after it counts no more."""
    if event.to_commit > ctx.committed:
        return ctx
    ctx = survival.without_later(ctx, event.to_commit)
    if event.to_commit < ctx.committed:
        from_copy = event.to_commit == ctx.copied_n and event.to_commit != ctx.checkpoint_n
        cursor = ctx.copied_cursor if from_copy else ctx.checkpoint_cursor
        ctx = replace(ctx, cursor=cursor if event.to_commit else {})
    if event.to_commit < ctx.copied_n:
        ctx = replace(ctx, copied_n=0, copies=())
    ctx = _with_failover(ctx, rolled_back=True)
    return replace(ctx, committed=event.to_commit, rollback_to=None, resume_from=None)


def reattach(ctx: JobContext, event: Reattached) -> JobContext:
    """Compare what the log says with what is alive: the missing are lost, the unexpected must go."""
    alive: dict[InstanceId, set[Epoch]] = {}
    for role, rank, epoch in event.alive:
        alive.setdefault(InstanceId(role, rank), set()).add(epoch)
    ctx = replace(ctx, attached=True, gangs=(*ctx.gangs, *_unknown_gangs(ctx, event.gangs)))
    ctx = ctx.with_instances(_with_unexpected(one, alive.get(one.id, set())) for one in ctx.instances.values())
    absent = [one for one in ctx.instances.values() if _is_gone(one, alive)]
    past = [one for one in absent if one.ended or one.state is InstanceState.LOST]
    ctx = ctx.with_instances(replace(one, process=None) for one in past)
    absent = [one for one in absent if one not in past]
    if ctx.ending is not None:
        return shutdown.gone(ctx, absent)
    if ctx.placement is None:
        return ctx
    missing = _missing_gang(ctx, event.gangs)
    if missing is not None and any(gang.state is GangState.RESERVED and gang != missing for gang in ctx.gangs):
        ctx = replace(ctx, gangs=tuple(gang for gang in ctx.gangs if gang != missing))
    for one in absent:
        # Known to be absent: the one case in which no stop is needed before the next start.
        away = event.hosts and one.id in ctx.bound and ctx.bundle(one.id)[1].host not in event.hosts
        unplaced = missing is not None and one.id in ctx.bound and ctx.bundle(one.id)[0] == missing.id
        reason = Reason.NODE_LOST if away else Reason.ENGINE_LOST if unplaced else Reason.SIGNALLED
        ctx = _lost(ctx, replace(one, process=None), ctx.loss(one, reason, GONE_TEXT))
    if missing is not None and not ctx.losses:
        return _without_reservation(ctx, missing)
    return ctx


def _is_gone(one: InstanceRecord, alive: Mapping[InstanceId, set[Epoch]]) -> bool:
    return one.alive and one.process is not None and one.process.epoch not in alive.get(one.id, set())


def _lost(ctx: JobContext, one: InstanceRecord, loss: Loss) -> JobContext:
    if one.id in ctx.bound:
        place = ctx.bundle(one.id)[1]
        loss = replace(loss, node=place.node)
        ctx = survival.without_host(ctx, place.host) if loss.reason is Reason.NODE_LOST else ctx
    lost = moved(one, InstanceState.LOST, running=False, error=loss)
    return moved(ctx.with_instances([lost]), JobState.RECOVERING, losses=(*ctx.losses, loss))


def _concerns(one: InstanceRecord, event: InstanceLost) -> bool:
    """True when the event speaks of the present process.

    One process serves every epoch from the one it was started under to the present one. An error in code that lives
    on concerns the present epoch only: an older one has been recovered from.
    """
    if one.process is None:
        return False
    if event.alive:
        return event.epoch == one.epoch
    return one.process.epoch <= event.epoch <= one.epoch


def _blame_late(ctx: JobContext, doing: Mapping[str, str]) -> JobContext:
    """The start took too long: give up those who are furthest behind, since the others may only wait for them."""
    late = [one for one in ctx.instances.values() if one.state is InstanceState.STARTING]
    late = late or [one for one in ctx.instances.values() if one.state is InstanceState.STALE]
    for one in late:
        text = f"not ready within {ctx.at_s - ctx.starting_s:.0f} s; {doing.get(str(one.id), 'nothing was heard')}"
        ctx = _lost(ctx, one, ctx.loss(one, Reason.START_TIMEOUT, text))
    return ctx


def _with_failover(ctx: JobContext, **changes: float | bool) -> JobContext:
    def change(one: Failover) -> Failover:
        return replace(one, **changes) if one.number == ctx.open_failover else one

    return replace(ctx, failovers=tuple(change(one) for one in ctx.failovers))


def _with_unexpected(one: InstanceRecord, alive: set[Epoch]) -> InstanceRecord:
    """Add processes that exist though the log does not want them to those that must go."""
    own = {one.process.epoch} if one.process else set[Epoch]()
    extra = sorted(alive - own - set(one.terminating))
    return replace(one, terminating=(*one.terminating, *extra)) if extra else one


def _unknown_gangs(ctx: JobContext, found: tuple[tuple[GangId, Epoch], ...]) -> Iterator[HeldGang]:
    known = {(gang.id, gang.epoch) for gang in ctx.gangs}
    extra = dict.fromkeys(pair for pair in found if pair not in known)
    return (HeldGang(id=gang, epoch=epoch, state=GangState.RELEASING) for gang, epoch in extra)


def _missing_gang(ctx: JobContext, found: tuple[tuple[GangId, Epoch], ...]) -> HeldGang | None:
    """A reservation that the log has and the engine has not: the engine forgot it."""
    return next(
        (gang for gang in ctx.gangs if gang.state is GangState.RESERVED and (gang.id, gang.epoch) not in found), None
    )


def _without_reservation(ctx: JobContext, gang: HeldGang) -> JobContext:
    """The engine lost a reservation: the job goes back to the queue, and continues from its last commit."""
    first = next(iter(ctx.instances.values()))
    cause = ctx.loss(first, Reason.ENGINE_LOST, f"the engine lost the reservation {gang.id}")
    return end_or_retry(ctx, job_level_ending(ctx, cause))


def stop(ctx: JobContext, event: StopAsked) -> JobContext:
    """The job is asked to end; the reason decides the final state."""
    return moved(ctx, JobState.STOPPING, ending=Ending(reason=event.reason, grace_s=event.grace_s))


def reservation_failed(ctx: JobContext, event: GangReserveFailed) -> JobContext:
    """The engine did not give the reservation: back to the queue some times, then the end."""
    without = without_gang(ctx, event.gang, event.epoch, GangState.RESERVING)
    if without is ctx:
        return ctx
    if (asked := refused(without, event.gang)) is not None:
        return asked
    first = next(iter(ctx.instances.values()))
    ending = job_level_ending(ctx, ctx.loss(first, event.reason, event.text))
    return end_or_retry(without, replace(ending, role=None, rank=None))


def without_gang(ctx: JobContext, gang: GangId, epoch: Epoch, state: GangState) -> JobContext:
    """The reservation does not exist any more; only one that was in ``state`` can go that way."""
    left = tuple(one for one in ctx.gangs if (one.id, one.epoch, one.state) != (gang, epoch, state))
    return ctx if len(left) == len(ctx.gangs) else replace(ctx, gangs=left)


def requeue(ctx: JobContext, event: JobRequeued) -> JobContext:
    """The attempt is over: nothing is held; the next admission starts anew, with fresh budgets of its roles.

    Faults of the platform are counted on: not the attempt, but a commit or the time makes them forgotten.
    """
    if event.attempt != ctx.attempt or not ctx.released:
        return ctx  # a job in the queue holds nothing, so a report that comes before the release says nothing
    charges = tuple(charge for charge in ctx.charges if charge.platform)
    free = not event.counts and event.reason in PLATFORM
    if free:
        charges = (*charges, Charge(role=RoleName(""), level=Level.JOB, at_s=ctx.at_s, platform=True))
    return moved(
        ctx,
        JobState.PAUSED if event.reason is Reason.PAUSED else JobState.QUEUED,
        ending=None,
        placement=None,
        asks=(),
        drains={},
        bound={},
        losses=(),
        diagnosed=False,
        checked=None,
        escalated=None,
        charges=charges,
        open_failover=None,
        runs_since_s=None,
        retries=ctx.retries + (1 if event.counts else 0),
        free_requeues=ctx.free_requeues + (1 if free else 0),
        used_s=ctx.used_s + ctx.at_s - ctx.admitted_s,
        rollback_to=None,
        instances={one.id: anew(ctx, one, one.epoch) for one in ctx.instances.values()},
    )


def restore_point(ctx: JobContext) -> JobContext:
    """Where a new attempt starts: the last commit if its state survived, else the newest copy or checkpoint; or at the
    checkpoint that its user chose.

    State of a commit lives in the memory of the host where its instance ran; it survives the processes, and it is
    found again by an instance of the same role and rank on the same host.
    """
    newest = survival.surviving(ctx)
    if ctx.resume_from is not None:
        newest = min(newest, ctx.resume_from)
    if newest < ctx.committed:
        return replace(ctx, rollback_to=newest)
    fetches = any(survival.source_for(ctx, one) is not None for one in survival.keepers(ctx))
    return replace(ctx, rollback_to=None, hosts=ctx.hosts if fetches else survival.hosts_now(ctx))
