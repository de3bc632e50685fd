"""Events that end an attempt or bound it: stop, failed reservation, requeue, changed limits, the restore point."""

from __future__ import annotations

from typing import Any

from rota.job.core import memory, stopping
from rota.job.core.context import Charge, Ending, GangState, JobContext, Loss, replace
from rota.job.core.diagnosis import PLATFORM
from rota.job.core.recovering import job_level_ending
from rota.job.core.sizing import first, refused
from rota.spec.events import GangReserveFailed, JobRequeued, StopAsked
from rota.spec.ids import Epoch, GangId, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import JobState, Level

CHANGEABLE = frozenset({"priority", "queue", "time_limit_s", "grace_s", "retry", "labels"})
"""Fields of a job that may change after submit without a new attempt."""


def stop(ctx: JobContext, event: StopAsked) -> JobContext:
    """Somebody wants the job to end; the reason decides the final state."""
    return replace(ctx, state=JobState.STOPPING, ending=Ending(reason=event.reason, grace_s=event.grace_s))


def reservation_failed(ctx: JobContext, event: GangReserveFailed) -> JobContext:
    """The engine did not give the reservation: back to the queue some times, then the end."""
    without = without_gang(ctx, event.gang, event.epoch, "reserving")
    if without is ctx:
        return ctx
    if (asked := refused(without, event.gang)) is not None:
        return asked
    first = next(iter(ctx.instances.values()))
    cause = Loss(instance=first.id, epoch=first.epoch, reason=event.reason, text=event.text, at_s=ctx.at_s)
    ending = replace(job_level_ending(ctx, cause), role=None, rank=None)
    return stopping.begin(without, ending, JobState.RECOVERING if ending.requeue else JobState.STOPPING)


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
    assert ctx.spec is not None
    charges = tuple(charge for charge in ctx.charges if charge.platform)
    free = not event.counts and event.reason in PLATFORM
    if free:
        charges = (*charges, Charge(role=RoleName(""), level=Level.JOB, at_s=ctx.at_s, platform=True))
    return replace(
        ctx,
        state=JobState.PAUSED if event.reason is Reason.PAUSED else JobState.QUEUED,
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
        retries=ctx.retries + (1 if event.counts else 0),
        free_requeues=ctx.free_requeues + (1 if free else 0),
        used_s=ctx.used_s + ctx.at_s - ctx.admitted_s,
        instances={
            one.id: replace(
                first(ctx.spec.role(one.id.role), one.id), epoch=one.epoch, restarts=one.restarts, error=one.error
            )
            for one in ctx.instances.values()
        },
    )


def restore_point(ctx: JobContext) -> JobContext:
    """Where a new attempt starts: the last commit if its state survived, else the newest checkpoint.

    State of a commit lives in the memory of the host where its instance ran; it survives the processes, and it is
    found again by an instance of the same role and rank on the same host.
    """
    newest = min(ctx.checkpoint_n, ctx.committed) if memory.missing(ctx) else ctx.committed
    if newest < ctx.committed:
        return replace(ctx, rollback_to=newest)
    return replace(ctx, rollback_to=None, hosts=memory.hosts_now(ctx))


def changeable(changes: dict[str, Any]) -> dict[str, Any]:
    """Those of the changes that need no new attempt."""
    return {path: value for path, value in changes.items() if path in CHANGEABLE}
