"""What follows from a state without a further fact: who may start, who may run, success, and how far an end is."""

from __future__ import annotations

from rota.job.core import stopping
from rota.job.core.context import Ending, Instance, JobContext, Process, replace
from rota.job.core.sizing import PLANNED, sized, waits_for_answers
from rota.spec.ids import Epoch, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import InstanceState, JobState


def settle(ctx: JobContext) -> JobContext:
    """Draw every conclusion; a settled context stays as it is."""
    if ctx.graph is None or ctx.state.terminal:
        return ctx
    if ctx.ending is None and ctx.placement is not None:
        ctx = _succeed(_run(_start(sized(ctx))))
    if ctx.ending is not None and ctx.ending.phase != "stop":
        ctx = _at_its_end(_succeed(ctx))
    if ctx.ending is not None:
        return _wind_down(ctx) if ctx.ending.phase == "stop" else ctx
    return ctx if ctx.placement is None else _with_state(ctx)


def reserved(ctx: JobContext) -> dict[str, Epoch]:
    """Gangs that exist, with their epochs."""
    return {gang.id: gang.epoch for gang in ctx.gangs if gang.state == "reserved"}


def role_started(ctx: JobContext, role: RoleName) -> bool:
    """True when what waits for this role may start: all of it is ready and, if it is finite, runs or has ended."""
    return all(
        not one.active or (one.settled and (role not in ctx.plan.finite or one.running or one.ended))
        for one in ctx.of_role(role)
    )


def _start(ctx: JobContext) -> JobContext:
    """Planned instances start once their gang exists, their old processes are gone and what they wait for is ready."""
    have = reserved(ctx)
    open_one = ctx.failover
    held = open_one.scope if open_one and not open_one.released else ()
    ready_roles: dict[RoleName, bool] = {}

    def may_start(one: Instance) -> bool:
        if one.state is not InstanceState.PLANNED or one.doomed or one.id in held or ctx.rollback_to is not None:
            return False
        if one.barred or one.id not in ctx.bound or ctx.bundle(one.id)[0] not in have:
            return False
        if waits_for_answers(ctx, one.id.role):
            return False
        for role in ctx.plan.starts_after.get(one.id.role, ()):
            if role not in ready_roles:
                ready_roles[role] = role_started(ctx, role)
            if not ready_roles[role]:
                return False
        return True

    starting = [
        replace(one, state=InstanceState.STARTING, process=Process(epoch=one.epoch))
        for one in ctx.instances.values()
        if may_start(one)
    ]
    return ctx.with_instances(starting) if starting else ctx


def _run(ctx: JobContext) -> JobContext:
    """Finite instances run when everybody is ready, those apart that start only after them.

    During a recovery only such run as others wait for; the rest runs again once its end is recorded.
    """
    failover = ctx.failover
    waits = {one.id.role for one in ctx.instances.values() if not one.settled}
    if ctx.losses or (failover is not None and not (waits and failover.rolled_back)):
        return ctx

    def may_run(one: Instance) -> bool:
        role = one.id.role
        if one.state is not InstanceState.READY or one.running or one.ended or role not in ctx.plan.finite:
            return False
        return all(role in ctx.plan.waits_for(other) for other in waits)

    ready = [replace(one, running=True) for one in ctx.instances.values() if may_run(one)]
    return _start(ctx.with_instances(ready)) if ready else ctx


def _succeed(ctx: JobContext) -> JobContext:
    assert ctx.spec is not None
    match ctx.spec.success_when:
        case None | "loop" if ctx.plan.loop is not None:
            needed = frozenset({ctx.plan.loop})
        case tuple() as roles:
            needed = frozenset(RoleName(role) for role in roles)
        case _:
            needed = ctx.plan.finite
    members = [one for one in ctx.instances.values() if one.id.role in needed and one.active]
    if not members or not all(one.ended for one in members):
        return ctx
    return replace(ctx, state=JobState.STOPPING, ending=Ending(reason=Reason.COMPLETED, grace_s=ctx.spec.grace_s))


def _at_its_end(ctx: JobContext) -> JobContext:
    """A loop that has returned comes to no further commit."""
    waits = ctx.ending is not None and ctx.ending.phase == "commit"
    return stopping.saved_first(ctx) if waits and ctx.loop is not None and ctx.loop.ended else ctx


def _with_state(ctx: JobContext) -> JobContext:
    failover = ctx.failover
    if ctx.losses or failover is not None:
        resizes = not ctx.losses and failover is not None and failover.cause.reason in PLANNED
        state = JobState.RESIZING if resizes else JobState.RECOVERING
    elif all(one.settled for one in ctx.instances.values()):
        state = JobState.RUNNING
    else:
        state = _on_the_way(ctx)
    if state is ctx.state:
        return ctx
    first = state is JobState.RUNNING and ctx.started_s is None
    return replace(ctx, state=state, started_s=ctx.at_s if first else ctx.started_s)


def _on_the_way(ctx: JobContext) -> JobState:
    """ADMITTED without a reservation, CHECKING until the first processes have found their nodes fit, then STARTING."""
    assert ctx.spec is not None
    if not reserved(ctx):
        return JobState.ADMITTED
    first = ctx.state in (JobState.ADMITTED, JobState.CHECKING)
    roles = {role.name for role in ctx.spec.roles if role.fail.check != "none"} if first else set[RoleName]()
    coming = (one for one in ctx.instances.values() if one.state is InstanceState.STARTING and one.active)
    return JobState.CHECKING if any(one.id.role in roles for one in coming) else JobState.STARTING


def _wind_down(ctx: JobContext) -> JobContext:
    """First every process goes, then every reservation; then the end can be recorded."""
    going = [_doom(one) for one in ctx.instances.values() if one.process or not one.state.terminal]
    if going:
        ctx = ctx.with_instances(going)
    if any(one.doomed for one in ctx.instances.values()):
        return ctx
    gangs = tuple(replace(gang, state="releasing") for gang in ctx.gangs)
    return replace(ctx, gangs=gangs, asks=(), open_failover=None, losses=())


def _doom(one: Instance) -> Instance:
    """Its processes must go; a start that is still under way is superseded by the stop."""
    doomed = (*one.doomed, one.process.epoch) if one.process else one.doomed
    return replace(one, process=None, doomed=doomed, state=InstanceState.STOPPING if doomed else InstanceState.GONE)
