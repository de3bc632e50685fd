"""Desired state: the commands that a context asks for, recomputed from it (level-triggered), with deterministic ids.

Rules for whoever carries commands out. A command is carried out once per id while it stays wanted, and again after the
master was restarted. ``StopInstance`` supersedes ``StartInstance`` of the same process, and ``ReleaseGang`` supersedes
``ReserveGang`` of the same reservation: the older effect is abandoned first, and the outcome is reported only when
nothing of that name exists or can still come into being. ``Emit`` goes before everything else: append its event with
``expected_seq = ctx.seq``, step it, look again (``next_emit``); never keep one over a step: its content may change.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping

from rota.job.core import migration, resize, shutdown, survival
from rota.job.core.context import (
    ASK_WAIT_S,
    DIAGNOSE_S,
    NAMED_MAX,
    NODE_WAIT_S,
    START_TIMEOUT_S,
    Ending,
    Failover,
    InstanceRecord,
    JobContext,
    NotYet,
    Process,
    replace,
)
from rota.job.core.failover import FailoverCoordinator, root_cause
from rota.job.core.resize import PLANNED, sized, waits_for_answers
from rota.job.core.transitions import moved
from rota.spec.commands import (
    Assemble,
    CheckNode,
    Command,
    CopyCommit,
    Emit,
    ReleaseGang,
    ReserveGang,
    RunInstance,
    SaveCommit,
    SetTimer,
    StartInstance,
    StopInstance,
)
from rota.spec.errors import first_of
from rota.spec.events import FailoverEnded, JobEnded, JobRequeued, RolledBack
from rota.spec.ids import Epoch, InstanceId, RoleName
from rota.spec.reasons import Reason, final_state
from rota.spec.states import GangState, InstanceState, JobState


def wanted(ctx: JobContext) -> tuple[Command, ...]:
    """Every command that should be under way now; none before the master has compared the log with what is alive."""
    if not ctx.attached or ctx.state.terminal or ctx.graph is None:
        return ()
    return (*emits(ctx), *_checks(ctx), *_saves(ctx), *_of_gangs(ctx), *_of_instances(ctx), *timers(ctx))


def next_emit(ctx: JobContext) -> Emit | NotYet:
    """The event that must be appended before anything else is done, or what the next one waits for."""
    if ctx.state.terminal:
        return NotYet("the job has ended")
    if not ctx.attached or ctx.graph is None:
        return NotYet("its master compares the log with what is alive")
    try:
        return next(emits(ctx))
    except StopIteration as end:
        return NotYet(end.value)


def emits(ctx: JobContext) -> Generator[Emit, None, str]:
    """Facts that follow from the state and are not in the log yet, in the order in which they belong there.

    Returns what the next one waits for.
    """
    if ctx.ending is not None:
        if ctx.uploads:
            return "its output is being uploaded"
        if ctx.released and ctx.ending.phase == "stop":
            yield _end(ctx, ctx.ending)
        return shutdown.PHASES[ctx.ending.phase]
    if ctx.rollback_to is not None:
        event = RolledBack(from_commit=ctx.committed, to_commit=ctx.rollback_to)
        yield Emit(event=event, key=f"rollback/attempt-{ctx.attempt}")
    if ctx.losses:
        change = FailoverCoordinator(ctx).verdict()
    elif (failover := ctx.failover) is not None:
        change = NotYet((yield from _progress(ctx, failover)))
    else:
        move = migration.wanted_move(ctx)
        change = move or resize.wanted_resize(ctx)
        if not move and not change:
            change = NotYet(_not_ready(ctx, ctx.instances) or move.why or change.why)
    if change:
        yield Emit(event=change, key=f"failover/{change.failover}")
    yield from resize.ask_emits(ctx)
    return "" if change else change.why


def timers(ctx: JobContext) -> Iterator[SetTimer]:
    """Timers that must be running in this state."""
    yield from shutdown.timers(ctx)
    if ctx.ending is not None or ctx.placement is None or ctx.spec is None:
        return
    if (limit_s := ctx.spec.time_limit_s) is not None:
        left_s = max(0.0, limit_s - ctx.used_s)
        yield SetTimer(timer=f"time-limit/{ctx.attempt}/{limit_s:g}", since_s=ctx.admitted_s, after_s=left_s)
    if ctx.losses:
        if not FailoverCoordinator(ctx).judged:
            first_s = min(loss.at_s for loss in ctx.losses)
            yield SetTimer(timer=f"diagnose/{ctx.failover_count + 1}", since_s=first_s, after_s=DIAGNOSE_S)
        return
    if ctx.state is JobState.RUNNING and ctx.heals_s is not None and ctx.runs_since_s is not None:
        timer = f"healed/{ctx.failover_count}/{ctx.runs_since_s:.3f}"
        yield SetTimer(timer=timer, since_s=ctx.runs_since_s, after_s=ctx.heals_s)
    if ctx.state is JobState.RUNNING and (there := resize.departing(ctx)):
        node = ctx.bundle(there[0].id)[1].node
        due_s, until_s = ctx.drains[node], migration.save_until(ctx)
        yield SetTimer(timer=f"drain/{node}/{due_s:.3f}", since_s=due_s, after_s=0.0)
        if until_s is not None:
            yield SetTimer(timer=f"move/{node}/{due_s:.3f}", since_s=until_s, after_s=0.0)
    failover = ctx.failover
    if failover is not None and not failover.released:
        yield SetTimer(timer=f"backoff/{failover.number}", since_s=failover.started_s, after_s=failover.delay_s)
    elif failover is not None and resize.unplaced(ctx):
        yield SetTimer(timer=f"node/{failover.number}", since_s=failover.started_s, after_s=NODE_WAIT_S)
    elif any(resize.waits_for_answers(ctx, role.name) for role in ctx.spec.roles):
        yield SetTimer(timer=f"asks/{ctx.attempt}", since_s=ctx.admitted_s, after_s=ASK_WAIT_S)
    elif not all(one.settled and not _comes_up(ctx, one) for one in ctx.instances.values()):
        delay_s = failover.delay_s if failover else 0.0
        timer = f"start/{ctx.attempt}/{ctx.failover_count}/{ctx.starting_s:.3f}"
        yield SetTimer(timer=timer, since_s=ctx.starting_s, after_s=START_TIMEOUT_S + delay_s)


def _checks(ctx: JobContext) -> Iterator[CheckNode]:
    """The check that a verdict waits for, by those of the node that are alive."""
    coordinator = FailoverCoordinator(ctx)
    if not ctx.losses or ctx.ending is not None or not coordinator.judged:
        return
    node = coordinator.suspect(root_cause(ctx.losses))
    if node is None or (ctx.checked is not None and ctx.checked[0] == node):
        return
    there = [one for one in ctx.instances.values() if one.id in ctx.bound and ctx.bundle(one.id)[1].node == node]
    alive = tuple((one.id, one.process.epoch) for one in there if one.state is InstanceState.READY and one.process)
    yield CheckNode(node=node, failover=ctx.failover_count + 1, processes=alive)


def _saves(ctx: JobContext) -> Iterator[SaveCommit | CopyCommit]:
    """The last commit goes to another machine, and to disk before devices are given back."""
    stops = ctx.ending is not None and ctx.ending.phase == "save"
    if (stops or (ctx.ending is None and migration.save_until(ctx) is not None)) and (save := shutdown.saving(ctx)):
        yield save
    if (copy := survival.copying(ctx)) is not None:
        yield copy


def _comes_up(ctx: JobContext, one: InstanceRecord) -> bool:
    """True for a spare that must become ready; one that waits for its world to grow need not."""
    waits = one.state is InstanceState.STALE and one.id.role in ctx.plan.worlds
    return one.spare and one.state in (InstanceState.STARTING, InstanceState.STALE) and not waits


def _progress(ctx: JobContext, failover: Failover) -> Generator[Emit, None, str]:
    waits = _not_ready(ctx, failover.scope)
    if not failover.rolled_back:
        # The verdict names the worst case; where everybody has a place, the newest commit that survives is known.
        if (back_to := survival.restorable(ctx)) is not None:
            event = RolledBack(from_commit=ctx.committed, to_commit=back_to)
            yield Emit(event=event, key=f"rollback/{failover.number}")
        return "those whose state may be newer have no place yet, so the commit to go back to is not known"
    if not failover.released:
        return f"after a pause of {failover.delay_s:g} s they start again; {waits}"
    if not waits:
        seconds = round(max(0.0, ctx.at_s - failover.started_s), 3)
        ended = FailoverEnded(failover=failover.number, seconds=seconds)
        yield Emit(event=ended, key=f"failover-ended/{failover.number}")
    return waits


def _not_ready(ctx: JobContext, members: Iterable[InstanceId]) -> str:
    """Who of some members is waited for, in words; empty when all are ready."""
    have, ready_roles, by_reason = reserved(ctx), dict[RoleName, bool](), dict[str, list[str]]()
    for one in (ctx.instances[member] for member in members):
        if not one.settled:
            why = _held_up(ctx, one, have, ready_roles) if one.state is InstanceState.PLANNED else ""
            by_reason.setdefault(f" ({why})" if why else "", []).append(str(one.id))
    said = "; ".join(f"{first_of(names, NAMED_MAX)}{why}" for why, names in by_reason.items())
    return f"not ready yet: {said}" if said else ""


def _end(ctx: JobContext, ending: Ending) -> Emit:
    if ending.requeue:
        again = JobRequeued(attempt=ctx.attempt, reason=ending.reason, counts=ending.counts)
        return Emit(event=again, key=f"requeue/{ctx.attempt}")
    reason, text = ending.reason, "; ".join(filter(None, (ending.text, ctx.upload_error)))
    if ctx.upload_error and reason is Reason.COMPLETED:
        reason = Reason.OUTPUT_UNREACHABLE
    ended = JobEnded(
        state=final_state(reason),
        reason=reason,
        text=text,
        role=ending.role,
        rank=ending.rank,
        traceback=ending.traceback,
    )
    return Emit(event=ended, key="end")


def _of_gangs(ctx: JobContext) -> Iterator[Command]:
    """Gang-atomic: a reservation is asked for only after every older one is given back."""
    releasing = [gang for gang in ctx.gangs if gang.state is GangState.RELEASING]
    yield from (ReleaseGang(gang=gang.id, epoch=gang.epoch) for gang in releasing)
    if not releasing and ctx.placement is not None and not resize.abandoned(ctx):
        for gang in ctx.gangs:
            if gang.state is GangState.RESERVING:
                bundles = ctx.placement.gang(gang.id).bundles
                yield ReserveGang(gang=gang.id, epoch=gang.epoch, bundles=bundles)


def _of_instances(ctx: JobContext) -> Iterator[Command]:
    gangs = reserved(ctx)
    for one in ctx.instances.values():
        for epoch in one.terminating:
            yield StopInstance(instance=one.id, started_epoch=epoch, grace_s=shutdown.grace_s(ctx, one))
        if one.process is not None and (command := _of_instance(ctx, one, one.process.epoch, gangs)):
            yield command


def _of_instance(ctx: JobContext, one: InstanceRecord, started: Epoch, gangs: dict[str, Epoch]) -> Command | None:
    match one.state:
        case InstanceState.STARTING:
            gang, bundle = ctx.bundle(one.id)
            return StartInstance(instance=one.id, epoch=started, gang=gang, gang_epoch=gangs[gang], bundle=bundle)
        case InstanceState.STALE:
            if (failover := ctx.failover) and not failover.rolled_back and one.id in failover.scope:
                return None  # the commit to go back to is not the last one yet
            peers = tuple(peer for peer in ctx.plan.mesh_peers(one.id) if ctx.instances[peer].active)
            if len(ctx.plan.mesh_peers(one.id)) == 1:
                peers = (one.id,)  # a standby alone gets ready too
            elif one.spare:
                return None
            if not all(ctx.instances[peer].alive and ctx.instances[peer].epoch == one.epoch for peer in peers):
                return None
            copy = survival.source_for(ctx, one.id)
            return Assemble(
                instance=one.id,
                epoch=one.epoch,
                started_epoch=started,
                peers=peers,
                restore=ctx.committed,
                grace_s=shutdown.grace_s(ctx, one),
                source=copy.host if copy else "",
                source_epoch=copy.epoch if copy else Epoch(0),
            )
        case InstanceState.READY if one.running:
            return RunInstance(instance=one.id, epoch=one.epoch, started_epoch=started, committed=ctx.committed)
        case _:
            return None


def settle(ctx: JobContext) -> JobContext:
    """Apply all transitions that need no further event; idempotent."""
    if ctx.graph is None or ctx.state.terminal:
        return ctx
    if ctx.ending is None and ctx.placement is not None:
        ctx = _succeed(_run(_start(sized(ctx))))
    if ctx.ending is not None and ctx.ending.phase != "stop":
        ctx = _succeed(ctx)
        if ctx.ending is not None and ctx.ending.phase == "commit" and ctx.loop is not None and ctx.loop.ended:
            ctx = shutdown.saved_first(ctx)  # a loop that has returned comes to no further commit
    if ctx.ending is not None:
        return _wind_down(ctx) if ctx.ending.phase == "stop" else ctx
    return ctx if ctx.placement is None else _with_state(ctx)


def reserved(ctx: JobContext) -> dict[str, Epoch]:
    """Gangs that exist, with their epochs."""
    return {gang.id: gang.epoch for gang in ctx.gangs if gang.state is GangState.RESERVED}


def role_started(ctx: JobContext, role: RoleName) -> bool:
    """True when what waits for this role may start: all of it is ready and, if it is finite, runs or has ended."""
    return all(
        not one.active or (one.settled and (role not in ctx.plan.finite or one.running or one.ended))
        for one in ctx.of_role(role)
    )


def _start(ctx: JobContext) -> JobContext:
    """Planned instances start once their gang exists, their old processes are gone and what they wait for is ready."""
    have, ready_roles = reserved(ctx), dict[RoleName, bool]()
    starting = [
        moved(one, InstanceState.STARTING, process=Process(epoch=one.epoch))
        for one in ctx.instances.values()
        if one.state is InstanceState.PLANNED and not _held_up(ctx, one, have, ready_roles)
    ]
    return ctx.with_instances(starting) if starting else ctx


def _held_up(ctx: JobContext, one: InstanceRecord, have: Mapping[str, Epoch], ready_roles: dict[RoleName, bool]) -> str:
    """Why a planned instance does not start now; empty when it does. ``ready_roles`` keeps what is worked out."""
    if one.terminating:
        return "the process before has not ended"
    if ctx.failover and not ctx.failover.released and one.id in ctx.failover.scope:
        return "after the pause"
    if ctx.rollback_to is not None:
        return f"the job goes back to commit {ctx.rollback_to} first"
    if one.excluded or one.id not in ctx.bound:
        return "without a place"
    if (gang := ctx.bundle(one.id)[0]) not in have:
        return f"gang {gang} is not reserved"
    if waits_for_answers(ctx, one.id.role):
        return "the world may still be granted more members"
    for role in ctx.plan.starts_after.get(one.id.role, ()):
        if role not in ready_roles:
            ready_roles[role] = role_started(ctx, role)
        if not ready_roles[role]:
            return f"role {role} has not started"
    return ""


def _run(ctx: JobContext) -> JobContext:
    """Finite instances run when everybody is ready, those apart that start only after them.

    During a recovery only such run as others wait for; the rest runs again once its end is recorded.
    """
    failover = ctx.failover
    waits = {one.id.role for one in ctx.instances.values() if not one.settled}
    if ctx.losses or (failover is not None and not (waits and failover.rolled_back)):
        return ctx

    def may_run(one: InstanceRecord) -> bool:
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
    return moved(ctx, JobState.STOPPING, ending=Ending(reason=Reason.COMPLETED, grace_s=ctx.spec.grace_s))


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
    if state is not JobState.RUNNING:
        return moved(ctx, state)
    started_s, since_s = (ctx.at_s if one is None else one for one in (ctx.started_s, ctx.runs_since_s))
    return moved(ctx, state, started_s=started_s, runs_since_s=since_s)


def _on_the_way(ctx: JobContext) -> JobState:
    """ADMITTED until it is reserved, CHECKING until the first processes found their nodes fit, then STARTING."""
    if ctx.state is JobState.ADMITTED and not reserved(ctx):
        return JobState.ADMITTED
    first = ctx.state in (JobState.ADMITTED, JobState.CHECKING)
    roles = {role.name for role in ctx.roles if role.fail.check != "none"} if first else set[RoleName]()
    coming = (one for one in ctx.instances.values() if one.state is InstanceState.STARTING and one.active)
    return JobState.CHECKING if any(one.id.role in roles for one in coming) else JobState.STARTING


def _wind_down(ctx: JobContext) -> JobContext:
    """First every process goes, then every reservation; then the end can be recorded."""
    going = [_terminate(one) for one in ctx.instances.values() if one.process or not one.state.terminal]
    if going:
        ctx = ctx.with_instances(going)
    if any(one.terminating for one in ctx.instances.values()):
        return ctx
    gangs = tuple(moved(gang, GangState.RELEASING) for gang in ctx.gangs)
    return replace(ctx, gangs=gangs, asks=(), open_failover=None, losses=())


def _terminate(one: InstanceRecord) -> InstanceRecord:
    """Its processes must go; a start that is still under way is superseded by the stop."""
    terminating = (*one.terminating, one.process.epoch) if one.process else one.terminating
    return moved(
        one, InstanceState.STOPPING if terminating else InstanceState.GONE, process=None, terminating=terminating
    )
