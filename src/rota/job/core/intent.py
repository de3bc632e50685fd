"""What should be under way in a state: the commands a context asks for, level-triggered, each with a stable id.

Rules for whoever carries commands out. A command is carried out once per id while it stays wanted, and again after the
master was restarted. ``StopInstance`` supersedes ``StartInstance`` of the same process, and ``ReleaseGang`` supersedes
``ReserveGang`` of the same reservation: the older effect is abandoned first, and the outcome is reported only when
nothing of that name exists or can still come into being. ``Emit`` goes before everything else: append its event with
``expected_seq = ctx.seq``, step it, look again (``next_emit``); never keep one over a step: its content may change.
"""

from __future__ import annotations

from collections.abc import Iterator

from rota.job.core import memory, moving, sizing, stopping
from rota.job.core.context import (
    ASK_WAIT_S,
    DIAGNOSE_S,
    FENCED_GRACE_S,
    NODE_WAIT_S,
    START_TIMEOUT_S,
    Failover,
    Instance,
    JobContext,
)
from rota.job.core.diagnosis import root_cause
from rota.job.core.failover import FailoverCoordinator
from rota.spec.commands import (
    Assemble,
    CheckNode,
    Command,
    Emit,
    ReleaseGang,
    ReserveGang,
    RunInstance,
    SaveCommit,
    SetTimer,
    StartInstance,
    StopInstance,
)
from rota.spec.events import FailoverEnded, JobEnded, JobEvent, JobRequeued, RolledBack
from rota.spec.ids import Epoch, GangId
from rota.spec.reasons import final_state
from rota.spec.states import InstanceState, JobState


def wanted(ctx: JobContext) -> tuple[Command, ...]:
    """Every command that should be under way now; none before the master has compared the log with what is alive."""
    if not ctx.attached or ctx.state.terminal or ctx.graph is None:
        return ()
    return (*emits(ctx), *_checks(ctx), *_saves(ctx), *_of_gangs(ctx), *_of_instances(ctx), *timers(ctx))


def next_emit(ctx: JobContext) -> Emit | None:
    """The event that must be appended before anything else is done."""
    return next(emits(ctx), None) if ctx.attached and not ctx.state.terminal and ctx.graph is not None else None


def emits(ctx: JobContext) -> Iterator[Emit]:
    """Facts that follow from the state and are not in the log yet, in the order in which they belong there."""
    if ctx.ending is not None:
        if ctx.released and ctx.ending.phase == "stop":
            yield _end(ctx)
        return
    if ctx.rollback_to is not None:
        event = RolledBack(from_commit=ctx.committed, to_commit=ctx.rollback_to)
        yield Emit(event=event, key=f"rollback/attempt-{ctx.attempt}")
    if verdict := FailoverCoordinator(ctx).verdict():
        yield Emit(event=verdict, key=f"failover/{verdict.failover}")
    elif (failover := ctx.failover) and not ctx.losses:
        yield from _progress(ctx, failover)
    elif change := moving.wanted_move(ctx) or sizing.wanted_resize(ctx):
        yield Emit(event=change, key=f"failover/{change.failover}")
    yield from sizing.ask_emits(ctx)


def timers(ctx: JobContext) -> Iterator[SetTimer]:
    """Limits that hold in this state."""
    yield from stopping.timers(ctx)
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
    if ctx.state is JobState.RUNNING and (there := sizing.leavers(ctx)):
        node = ctx.bundle(there[0].id)[1].node
        due_s, until_s = ctx.drains[node], moving.save_until(ctx)
        yield SetTimer(timer=f"drain/{node}/{due_s:.3f}", since_s=due_s, after_s=0.0)
        if until_s is not None:
            yield SetTimer(timer=f"move/{node}/{due_s:.3f}", since_s=until_s, after_s=0.0)
    failover = ctx.failover
    if failover is not None and not failover.released:
        yield SetTimer(timer=f"backoff/{failover.number}", since_s=failover.started_s, after_s=failover.delay_s)
    elif failover is not None and sizing.homeless(ctx):
        yield SetTimer(timer=f"node/{failover.number}", since_s=failover.started_s, after_s=NODE_WAIT_S)
    elif any(sizing.waits_for_answers(ctx, role.name) for role in ctx.spec.roles):
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


def _saves(ctx: JobContext) -> Iterator[SaveCommit]:
    """The last commit goes to disk before devices are given back."""
    stops = ctx.ending is not None and ctx.ending.phase == "save"
    if (stops or (ctx.ending is None and moving.save_until(ctx) is not None)) and (save := memory.saving(ctx)):
        yield save


def _comes_up(ctx: JobContext, one: Instance) -> bool:
    """True for a spare that must become ready; one that waits for its world to grow need not."""
    waits = one.state is InstanceState.STALE and one.id.role in ctx.plan.worlds
    return one.spare and one.state in (InstanceState.STARTING, InstanceState.STALE) and not waits


def _progress(ctx: JobContext, failover: Failover) -> Iterator[Emit]:
    if not failover.rolled_back:
        # The verdict names the worst case; where everybody has a place, the newest commit that survives is known.
        if (back_to := memory.restorable(ctx)) is not None:
            event = RolledBack(from_commit=ctx.committed, to_commit=back_to)
            yield Emit(event=event, key=f"rollback/{failover.number}")
    elif failover.released and all(ctx.instances[member].settled for member in failover.scope):
        seconds = round(max(0.0, ctx.at_s - failover.started_s), 3)
        ended = FailoverEnded(failover=failover.number, seconds=seconds)
        yield Emit(event=ended, key=f"failover-ended/{failover.number}")


def _end(ctx: JobContext) -> Emit:
    ending = ctx.ending
    assert ending is not None
    if ending.requeue:
        again = JobRequeued(attempt=ctx.attempt, reason=ending.reason, counts=ending.counts)
        return Emit(event=again, key=f"requeue/{ctx.attempt}")
    return Emit(event=_job_ended(ctx), key="end")


def _job_ended(ctx: JobContext) -> JobEvent:
    ending = ctx.ending
    assert ending is not None
    try:
        state = final_state(ending.reason)
    except KeyError:
        state = JobState.CANCELLED if ending.role is None else JobState.FAILED
    return JobEnded(
        state=state,
        reason=ending.reason,
        text=ending.text,
        role=ending.role,
        rank=ending.rank,
        traceback=ending.traceback,
    )


def _of_gangs(ctx: JobContext) -> Iterator[Command]:
    """Gang-atomic: a reservation is asked for only after every older one is given back."""
    releasing = [gang for gang in ctx.gangs if gang.state == "releasing"]
    yield from (ReleaseGang(gang=gang.id, epoch=gang.epoch) for gang in releasing)
    if not releasing and ctx.placement is not None and not sizing.abandoned(ctx):
        for gang in ctx.gangs:
            if gang.state == "reserving":
                bundles = ctx.placement.gang(gang.id).bundles
                yield ReserveGang(gang=gang.id, epoch=gang.epoch, bundles=bundles)


def _of_instances(ctx: JobContext) -> Iterator[Command]:
    grace_s = ctx.ending.grace_s if ctx.ending else FENCED_GRACE_S
    gangs = {gang.id: gang.epoch for gang in ctx.gangs if gang.state == "reserved"}
    for one in ctx.instances.values():
        for doomed in one.doomed:
            yield StopInstance(instance=one.id, started_epoch=doomed, grace_s=grace_s)
        if one.process is not None and (command := _of_instance(ctx, one, one.process.epoch, gangs)):
            yield command


def _of_instance(ctx: JobContext, one: Instance, started: Epoch, gangs: dict[GangId, Epoch]) -> Command | None:
    match one.state:
        case InstanceState.STARTING:
            gang, bundle = ctx.bundle(one.id)
            return StartInstance(instance=one.id, epoch=started, gang=gang, gang_epoch=gangs[gang], bundle=bundle)
        case InstanceState.STALE:
            if (failover := ctx.failover) and not failover.rolled_back and one.id in failover.scope:
                return None  # the commit to go back to is not the last one yet
            peers = tuple(peer for peer in ctx.plan.mesh_peers(one.id) if ctx.instances[peer].active)
            if len(ctx.plan.mesh_peers(one.id)) == 1:
                peers = (one.id,)  # one that stands by alone gets ready too
            elif one.spare:
                return None
            if not all(ctx.instances[peer].alive and ctx.instances[peer].epoch == one.epoch for peer in peers):
                return None
            return Assemble(instance=one.id, epoch=one.epoch, started_epoch=started, peers=peers, restore=ctx.committed)
        case InstanceState.READY if one.running:
            return RunInstance(instance=one.id, epoch=one.epoch, started_epoch=started, committed=ctx.committed)
        case _:
            return None
