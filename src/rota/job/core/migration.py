"""Off a node that is drained: first another place, then a commit or checkpoint, then a new epoch there."""

from __future__ import annotations

from rota.job.core import shutdown
from rota.job.core.context import Ending, JobContext, Loss, replace
from rota.job.core.failover import FailoverCoordinator
from rota.job.core.resize import departing, held, waits_to_grow
from rota.spec.events import FailoverStarted, MoveAsked
from rota.spec.ids import Epoch
from rota.spec.reasons import Reason
from rota.spec.states import JobState, Level


def asked(ctx: JobContext, event: MoveAsked) -> JobContext:
    """A node is to be left by a time, or may be stayed on again."""
    drains = {node: due_s for node, due_s in ctx.drains.items() if node != event.node}
    return replace(ctx, drains=drains if event.due_at is None else {**drains, event.node: event.due_at})


def needs_save(ctx: JobContext) -> bool:
    """True when the state of the last commit is only in memory that is to be left.

    It is that of those who have another place; while there is none everybody's, since at the end of the notice the
    whole job goes back into the queue, and comes up anywhere.
    """
    if ctx.checkpoint_n >= ctx.committed or not departing(ctx):
        return False
    place = held(ctx)
    return any(
        shutdown.keeps_on_host(ctx, one) for one in (place.everybody if place is not None else ctx.plan.instances)
    )


def waits_for_boundary(ctx: JobContext) -> bool:
    """True when a boundary would let a world grow, or members leave their node."""
    return waits_to_grow(ctx) or held(ctx) is not None


def at_boundary(ctx: JobContext) -> bool:
    """True when what was just committed or saved lets a world grow, or members leave, at small cost."""
    return waits_to_grow(ctx) or (held(ctx) is not None and (not needs_save(ctx) or _is_due(ctx)))


def _is_due(ctx: JobContext) -> bool:
    return ctx.at_s >= ctx.drains[ctx.bundle(departing(ctx)[0].id)[1].node]


def overdue(ctx: JobContext) -> JobContext:
    """The notice is over: who has another place goes there once its state is saved; else the job goes to the queue."""
    assert ctx.spec is not None
    if held(ctx) is not None:
        return replace(ctx, boundary=True)
    grace_s = ctx.spec.grace_s
    ending = Ending(reason=Reason.MIGRATED_DRAIN, requeue=True, counts=False, grace_s=grace_s, save_s=grace_s)
    return shutdown.begin(ctx, ending, JobState.PREEMPTING)


def save_until(ctx: JobContext) -> float | None:
    """At the end of the notice no commit has brought the state to disk: until then that is waited for; else None."""
    if not ctx.boundary or not needs_save(ctx) or held(ctx) is None or ctx.spec is None:
        return None
    if shutdown.saving(ctx) is None:
        return None
    node = ctx.bundle(departing(ctx)[0].id)[1].node
    end_s = ctx.drains[node] + ctx.spec.grace_s
    return end_s if ctx.at_s < end_s else None


def wanted_move(ctx: JobContext) -> FailoverStarted | None:
    """The move that is due: another place is reserved, and there is a boundary, or nothing ever makes one."""
    place = held(ctx)
    if place is None or ctx.spec is None or ctx.state is not JobState.RUNNING:
        return None
    bounded = ctx.plan.loop is not None or any(role.run is not None for role in ctx.spec.roles)
    if (bounded and not ctx.boundary) or save_until(ctx) is not None:
        return None
    first = departing(ctx)[0].id
    text = f"{len(place.everybody)} of its instances leave {place.leaves}, which is drained"
    cause = Loss(instance=first, epoch=ctx.instances[first].epoch, reason=Reason.MIGRATED_DRAIN, at_s=ctx.at_s)
    restore = min(ctx.checkpoint_n, ctx.committed) if needs_save(ctx) else ctx.committed
    epoch = Epoch(ctx.epoch_max + 1)
    scope = FailoverCoordinator(ctx).scope(Level.NODE, cause, restore)
    return FailoverStarted(
        failover=ctx.failover_count + 1,
        level=Level.NODE,
        scope=tuple((one.role, one.rank, epoch) for one in scope),
        restore=restore,
        reason=cause.reason,
        role=first.role,
        rank=first.rank,
        text=text,
    )
