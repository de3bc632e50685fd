"""The job state machine: one event in, the next context and the commands it asks for out.

``fold`` is the only way a context changes. An event either fits the state (its line is in ``apply``) or changes
nothing: late, repeated and stale reports are harmless. After each event ``settle`` draws the conclusions that need no
further fact (who may start, who may run, whether the job has succeeded). What should be under way in a state is
``desired.wanted``; a step returns what is newly wanted, and after a restart of the master, when ``Reattached`` is
stepped, everything that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rota.job.core import attempt, migration, repetition, resize, shutdown, survival
from rota.job.core.context import Ending, HeldGang, InstanceRecord, JobContext, Process, replace
from rota.job.core.desired import settle, wanted
from rota.job.core.failover import open_failover
from rota.job.core.graph import expand
from rota.job.core.placement import requests_of
from rota.job.core.transitions import InvalidTransition, moved
from rota.spec.commands import Command
from rota.spec.events import (
    CheckpointSaved,
    CommitCopied,
    Committed,
    Event,
    FailoverEnded,
    FailoverStarted,
    GangAsked,
    GangGranted,
    GangReleased,
    GangReserved,
    GangReserveFailed,
    GangWaits,
    InstanceEnded,
    InstanceEvent,
    InstanceLost,
    InstanceReady,
    InstanceStarted,
    InstanceStopped,
    JobAdmitted,
    JobChanged,
    JobEnded,
    JobQueued,
    JobRequeued,
    JobSubmitted,
    MasterStarted,
    MoveAsked,
    NodeChecked,
    PreemptAsked,
    ProgressStalled,
    Reattached,
    Record,
    RolledBack,
    ScaleAsked,
    StopAsked,
    TimerFired,
    UploadEnded,
    UploadStarted,
)
from rota.spec.ids import Epoch, GangId, JobId
from rota.spec.job import CHANGEABLE, JobSpec, changed_spec, started_spec
from rota.spec.reasons import Reason
from rota.spec.states import GangState, InstanceState, JobState

WAITING = frozenset({JobState.SUBMITTED, JobState.QUEUED, JobState.PAUSED})
"""The job holds nothing."""


def initial(job: JobId) -> JobContext:
    """The context before the first event."""
    return JobContext(job=job)


@dataclass(frozen=True, slots=True)
class Step:
    """A context, the commands to begin now, and the ids of all that are under way with them."""

    ctx: JobContext
    commands: tuple[Command, ...]
    begun: frozenset[str]


def step(ctx: JobContext, records: Iterable[Record], begun: frozenset[str]) -> Step:
    """Apply records of the job that were read together, while the commands ``begun`` are under way.

    What one record asked for and a later one took back is not begun; what was taken back and asked for again is begun
    anew. Raises as ``fold`` does.
    """
    commands: tuple[Command, ...] = ()
    for record in records:
        ctx = fold(ctx, record)
        commands = wanted(ctx)
        begun &= {command.id for command in commands}
    new = tuple(command for command in commands if command.id not in begun)
    return Step(ctx, new, begun | {command.id for command in new})


def fold(ctx: JobContext, record: Record) -> JobContext:
    """The context after a record, for those who look on and command nothing; the time is that of the record.

    A record that was applied before changes nothing. Raises ValueError for a record of another job or one that leaves
    a gap: the caller must read the log again; InvalidTransition.
    """
    if record.job != ctx.job:
        raise ValueError(f"record {record.number} is of {record.job}, not of {ctx.job}")
    if record.seq <= ctx.seq:
        return ctx
    if record.seq != ctx.seq + 1:
        raise ValueError(f"{ctx.job}: record {record.seq} after {ctx.seq}, some are missing")
    now = replace(ctx, seq=record.seq, at_s=max(ctx.at_s, record.at))
    try:
        return settle(apply(now, record.event))
    except InvalidTransition as error:
        error.events = (f"{record.seq} {record.event}",)
        raise


def apply(ctx: JobContext, event: Event) -> JobContext:
    """The event alone, without its consequences: every (state, event) pair that matters is a line."""
    if ctx.state.terminal:
        return ctx
    if ctx.state in WAITING:
        return _apply_waiting(ctx, event)
    if ctx.ending is not None:
        return _apply_ending(ctx, event, ctx.ending)
    return _apply_live(ctx, event)


def _apply_waiting(ctx: JobContext, event: Event) -> JobContext:
    match ctx.state, event:
        case JobState.SUBMITTED, JobSubmitted(spec=spec, workdir=workdir, user=owner, continues=earlier):
            submitted = _with_spec(replace(ctx, workdir=spec.workdir or workdir, owner=owner), spec)
            return submitted if earlier is None else survival.continued(submitted, earlier)
        case ((JobState.SUBMITTED | JobState.PAUSED), JobQueued(spec=spec, from_commit=chosen)):
            known = _with_spec(ctx, spec) if spec else ctx  # what failed may have been repaired: its tries begin anew
            return moved(known, JobState.QUEUED, resume_from=chosen, repeats=())
        case JobState.QUEUED, JobQueued(spec=JobSpec() as spec):
            return _with_spec(ctx, spec)
        case _, JobChanged(changes=changes) if ctx.spec is not None:
            return _with_spec(ctx, changed_spec(ctx.spec, changes))
        case JobState.QUEUED, PreemptAsked(reason=Reason.PAUSED):
            return moved(ctx, JobState.PAUSED)
        case _, ScaleAsked():
            return resize.scaled(ctx, event)
        case _, JobAdmitted():
            return _admit(ctx, event)
        case _, StopAsked(reason=reason, grace_s=grace_s):
            return moved(ctx, JobState.STOPPING, ending=Ending(reason=reason, grace_s=grace_s))
        case _:
            return _apply_always(ctx, event)


def _apply_live(ctx: JobContext, event: Event) -> JobContext:
    match ctx.state, event:
        case _, InstanceReady(instance=instance, restored=restored):
            ready = _with_instance(ctx, event, lambda one: _ready(one, event))
            return ready if ready is ctx else survival.fetched(ready, instance, restored)
        case _, InstanceEnded(epoch=epoch):
            return _with_instance(ctx, event, lambda one: _ended(one, epoch))
        case _, InstanceLost():
            return attempt.lose(ctx, event)
        case _, ProgressStalled():
            return attempt.stall(ctx, event)
        case _, GangReserveFailed():
            return attempt.reservation_failed(ctx, event)
        case _, NodeChecked(node=node, fit=fit) if ctx.losses:
            return replace(ctx, checked=(node, fit))
        case _, FailoverStarted():
            return open_failover(ctx, event)
        case ((JobState.RECOVERING | JobState.RESIZING), FailoverEnded()):
            return attempt.close(ctx, event)
        case _, GangAsked():
            return resize.noted(ctx, event)
        case _, GangGranted():
            return resize.granted(ctx, event)
        case _, GangWaits():
            return resize.waits(ctx, event)
        case _, ScaleAsked():
            return resize.scaled(ctx, event)
        case _, RolledBack():
            return attempt.roll_back(ctx, event)
        case _, Committed():
            return _commit(ctx, event)
        case _, MoveAsked():
            return migration.asked(ctx, event)
        case _, StopAsked():
            return attempt.stop(ctx, event)
        case _, PreemptAsked(gang=str(gang)) if (fewer := resize.without(ctx, gang)) is not None:
            return fewer
        case _, PreemptAsked(reason=reason, grace_s=grace_s):
            ending = Ending(reason=reason, requeue=True, counts=False, grace_s=grace_s, save_s=grace_s)
            return shutdown.begin(ctx, ending, JobState.PREEMPTING)
        case _, TimerFired(timer=timer, doing=doing):
            return attempt.fire(ctx, timer, doing)
        case _:
            return _apply_always(ctx, event)


def _apply_ending(ctx: JobContext, event: Event, ending: Ending) -> JobContext:
    match ctx.state, event:
        case ((JobState.PREEMPTING | JobState.RECOVERING), StopAsked()):
            return attempt.stop(ctx, event)
        case JobState.STOPPING, StopAsked() if ending.phase != "stop":
            return shutdown.stopped_now(ctx)
        case JobState.RECOVERING, PreemptAsked():
            return shutdown.preempted(ctx, event, ending)
        case JobState.PREEMPTING, PreemptAsked():
            return shutdown.preempted_again(ctx, event, ending)
        case _, GangReserveFailed(gang=gang, epoch=epoch):
            return attempt.without_gang(ctx, gang, epoch, GangState.RESERVING)
        case ((JobState.PREEMPTING | JobState.RECOVERING), JobRequeued()):
            queued = attempt.requeue(ctx, event)
            return _with_spec(queued, queued.next_spec) if queued is not ctx and queued.next_spec else queued
        case ((JobState.PREEMPTING | JobState.STOPPING), Committed()):
            return shutdown.committed(_commit(ctx, event), event)
        case _, CheckpointSaved():
            return shutdown.saved(_apply_always(ctx, event))
        case _, (InstanceLost() | ProgressStalled()) if ending.phase != "stop":
            return shutdown.lost(ctx, event)
        case _, InstanceStopped() if shutdown.went_without_saving(ctx, event):
            return _apply_always(settle(shutdown.stopped_now(ctx)), event)
        case _, InstanceEnded(epoch=epoch) if ending.phase != "stop":
            return _with_instance(ctx, event, lambda one: _ended(one, epoch))
        case _, TimerFired(timer=timer, doing=doing):
            return attempt.fire(ctx, timer, doing)
        case _:
            return _apply_always(ctx, event)


def _apply_always(ctx: JobContext, event: Event) -> JobContext:
    """What means the same in every state that is not terminal."""
    match event:
        case MasterStarted(master_epoch=epoch) if epoch > ctx.master_epoch:
            return replace(ctx, master_epoch=epoch, attached=False)
        case Reattached(master_epoch=epoch) if epoch == ctx.master_epoch:
            return attempt.reattach(ctx, event)
        case GangReserved(gang=gang, epoch=epoch):
            return _reserved(ctx, gang, epoch)
        case GangReleased(gang=gang, epoch=epoch):
            return resize.released(attempt.without_gang(ctx, gang, epoch, GangState.RELEASING), gang)
        case InstanceStarted():
            return _with_instance(ctx, event, lambda one: _started(one, event))
        case InstanceStopped(epoch=epoch):
            return _with_instance(ctx, event, lambda one: attempt.stopped(one, epoch))
        case CheckpointSaved(n=n) if ctx.checkpoint_n <= n <= attempt.kept(ctx):
            saved = survival.note_checkpoint(ctx, event)
            return replace(saved, boundary=migration.at_boundary(saved))
        case CommitCopied():
            return survival.note_copies(ctx, event, attempt.kept(ctx))
        case JobChanged(changes=changes) if ctx.spec is not None:
            return replace(
                ctx,
                spec=changed_spec(ctx.spec, {path: changes[path] for path in CHANGEABLE if path in changes}),
                next_spec=changed_spec(ctx.next_spec or ctx.spec, changes),
            )
        case UploadStarted():
            return replace(ctx, uploads_since_s=ctx.at_s)
        case UploadEnded(error=error):
            return replace(ctx, upload_error=error)
        case JobEnded(state=state, reason=reason):
            return moved(ctx, state, end_reason=reason, open_failover=None, losses=())
        case _:
            return ctx


def _with_spec(ctx: JobContext, spec: JobSpec) -> JobContext:
    """Another spec between two attempts; what is known of instances that it still has is kept."""
    graph = expand(spec)
    return replace(ctx, spec=spec, next_spec=None, graph=graph, instances=resize.members_of(ctx, spec, graph))


def _admit(ctx: JobContext, event: JobAdmitted) -> JobContext:
    """A new attempt: every instance and gang under a new epoch, back to the newest commit whose state survived."""
    if ctx.spec is None or event.attempt <= ctx.attempt:
        return ctx
    epoch = Epoch(max(event.epoch, ctx.epoch_max + 1))
    if (spec := started_spec(ctx.spec, event.starts)) is not ctx.spec:
        ctx = replace(ctx, spec=spec, graph=expand(spec))
    graph = ctx.plan
    ctx = moved(
        ctx,
        JobState.ADMITTED,
        attempt=event.attempt,
        epoch_max=epoch,
        admitted_s=ctx.at_s,
        starting_s=ctx.at_s,
        gangs=(
            *ctx.gangs,
            *(HeldGang(id=request.gang, epoch=epoch, state=GangState.RESERVING) for request in requests_of(spec)),
        ),
        instances={one: resize.anew(ctx, ctx.instances[one], epoch) for one in graph.instances},
    )
    return attempt.restore_point(ctx.with_placement(event.placement, ()))


def _reserved(ctx: JobContext, gang: GangId, epoch: Epoch) -> JobContext:
    """Reserved as asked; one that is not wanted any more is given back."""
    known = next((one for one in ctx.gangs if (one.id, one.epoch) == (gang, epoch)), None)
    match known:
        case HeldGang(state=GangState.RESERVING):
            gangs = tuple(moved(one, GangState.RESERVED) if one is known else one for one in ctx.gangs)
            # A boundary that was passed before there was a place says nothing of what would be lost by leaving now.
            leaves = any(ask.gang == gang and ask.leaves for ask in ctx.asks)
            return replace(ctx, gangs=gangs, boundary=ctx.boundary and not leaves)
        case HeldGang():
            return ctx
        case None:
            return replace(ctx, gangs=(*ctx.gangs, HeldGang(id=gang, epoch=epoch, state=GangState.RELEASING)))


def _started(one: InstanceRecord, event: InstanceStarted) -> InstanceRecord:
    """The process that was asked for exists; any other one must go."""
    if one.process is not None and one.process.epoch == event.epoch:
        if one.state is not InstanceState.STARTING:
            return one
        process = Process(
            epoch=event.epoch, node=event.node, pid=event.pid, start_time=event.start_time, address=event.address
        )
        return moved(one, InstanceState.STALE, process=process)
    if event.epoch in one.terminating:
        return one
    return replace(one, terminating=(*one.terminating, event.epoch))


def _ready(one: InstanceRecord, event: InstanceReady) -> InstanceRecord:
    if one.state is not InstanceState.STALE or event.epoch != one.epoch:
        return one
    return moved(one, InstanceState.READY, restored=event.restored)


def _ended(one: InstanceRecord, epoch: Epoch) -> InstanceRecord:
    """Returned with success; its process is stopped with the job, or used again when a recovery takes it in."""
    if one.state is not InstanceState.READY or not one.running or epoch != one.epoch:
        return one
    return moved(one, InstanceState.GONE, ended=True, running=False)


def _commit(ctx: JobContext, event: Committed) -> JobContext:
    if not accepts_commit(ctx, event.n, event.loop_epoch):
        return ctx
    charges = tuple(charge for charge in ctx.charges if not charge.platform)
    done = replace(
        ctx,
        committed=event.n,
        versions={**ctx.versions, **event.versions},
        cursor=event.cursor,
        metrics=event.metrics,
        charges=charges if len(charges) < len(ctx.charges) else ctx.charges,
    )
    done = repetition.healed(replace(done, hosts=survival.hosts_now(done)))
    return replace(done, boundary=migration.at_boundary(done))


def accepts_commit(ctx: JobContext, n: int, loop_epoch: Epoch) -> bool:
    """True when the loop under this epoch may make commit ``n`` now; a fenced loop may not, nor any ``n`` twice."""
    loop = ctx.loop
    if loop is None or ctx.state.terminal or n != ctx.committed + 1 or loop_epoch != loop.epoch:
        return False
    if ctx.ending is not None and (ctx.state is JobState.RECOVERING or not shutdown.takes_commits(ctx)):
        return False  # the verdict to restart the whole job is a fence too, and so is the commit that was saved
    return loop.running and loop.state in (InstanceState.READY, InstanceState.STOPPING)


Change = Callable[[InstanceRecord], InstanceRecord]


def _with_instance(ctx: JobContext, event: InstanceEvent, change: Change) -> JobContext:
    """Apply ``change`` to the instance an event speaks of; an instance that the job does not have changes nothing."""
    one = ctx.instances.get(event.instance)
    if one is None:
        return ctx
    changed = change(one)
    return ctx if changed is one else ctx.with_instances([changed])
