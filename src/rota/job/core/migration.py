"""Migration off a drained node: first another place, then a commit or checkpoint, then a new epoch there."""

from __future__ import annotations

from rota.job.core import shutdown, survival
from rota.job.core.context import NAMED_MAX, Ending, JobContext, NotYet, replace
from rota.job.core.failover import FailoverCoordinator
from rota.job.core.resize import departing, held, next_scope, waits_to_grow
from rota.spec.events import FailoverStarted, MoveAsked
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
        survival.keeps_on_host(ctx, one) for one in (place.everybody if place is not None else ctx.plan.instances)
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
    """The notice is over: those with another place move once their state is saved; else the job goes to the queue."""
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


def wanted_move(ctx: JobContext) -> FailoverStarted | NotYet:
    """The move that is due: another place is reserved, and there is a boundary, or nothing ever makes one.

    Without a node to be left, the reason is empty.
    """
    place, there = held(ctx), departing(ctx)
    if place is None or ctx.state is not JobState.RUNNING:
        names = ", ".join(str(one.id) for one in there[:NAMED_MAX])
        return NotYet(f"no other node has room for {names}, whose node is drained" if there else "")
    bounded = ctx.plan.loop is not None or any(role.run is not None for role in ctx.roles)
    if bounded and not ctx.boundary:
        return NotYet(f"the instances on {place.leaves}, which is drained, leave at a commit or checkpoint")
    if save_until(ctx) is not None:
        return NotYet("the state of the last commit is being written to disk, before its node is left")
    first = there[0].id
    text = f"{len(place.everybody)} of its instances leave {place.leaves}, which is drained"
    cause = ctx.loss(ctx.instances[first], Reason.MIGRATED_DRAIN)
    restore = survival.surviving(ctx, place.everybody)
    return FailoverStarted(
        failover=ctx.failover_count + 1,
        level=Level.NODE,
        scope=next_scope(ctx, FailoverCoordinator(ctx).scope(Level.NODE, cause, restore)),
        restore=restore,
        reason=cause.reason,
        role=first.role,
        rank=first.rank,
        text=text,
    )
