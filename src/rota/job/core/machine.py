"""The job state machine: one event in, the next context and the commands it asks for out.

``fold`` is the only way a context changes. An event either has a row in ``ROWS`` for the state or changes
nothing: late, repeated and stale reports are harmless. After each event ``settle`` draws the conclusions that need no
further fact (who may start, who may run, whether the job has succeeded). What should be under way in a state is
``desired.wanted``; a step returns what is newly wanted, and after a restart of the master, when ``Reattached`` is
stepped, everything that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from rota.job.core import attempt, migration, repetition, resize, shutdown, survival
from rota.job.core.context import Ending, HeldGang, JobContext, Process, replace
from rota.job.core.desired import settle, wanted
from rota.job.core.failover import open_failover
from rota.job.core.graph import expand
from rota.job.core.placement import requests_of
from rota.job.core.transitions import WAITING, InvalidTransition, moved
from rota.spec.commands import Command
from rota.spec.events import (
    CheckpointSaved,
    CommitCopied,
    Committed,
    DowntimePassed,
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
from rota.spec.ids import Epoch, JobId
from rota.spec.job import CHANGEABLE, JobSpec, changed_spec, started_spec
from rota.spec.reasons import Reason
from rota.spec.states import GangState, InstanceState, JobState


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
    """The event alone, without its consequences, by its row of ``ROWS``; one that has none changes nothing."""
    change = FOLDS.get((ctx.state, ctx.ending is not None, type(event)))
    return ctx if change is None else change(ctx, event)


def _submitted(ctx: JobContext, event: JobSubmitted) -> JobContext:
    # The event has the folder of the machine that took the job; that of the job file may be relative to the file.
    workdir = event.workdir or event.spec.workdir or ""
    submitted = _with_spec(replace(ctx, workdir=workdir, owner=event.user), event.spec)
    return submitted if event.continues is None else survival.continued(submitted, event.continues)


def _queued(ctx: JobContext, event: JobQueued) -> JobContext:
    known = _with_spec(ctx, event.spec) if event.spec else ctx
    # What failed may have been repaired: its tries begin anew.
    return moved(known, JobState.QUEUED, resume_from=event.from_commit, repeats=())


def _queued_again(ctx: JobContext, event: JobQueued) -> JobContext:
    return _with_spec(ctx, event.spec) if event.spec else ctx


def _paused(ctx: JobContext, event: PreemptAsked) -> JobContext:
    return moved(ctx, JobState.PAUSED) if event.reason is Reason.PAUSED else ctx


def _changed(ctx: JobContext, event: JobChanged) -> JobContext:
    return ctx if ctx.spec is None else _with_spec(ctx, changed_spec(ctx.spec, event.changes))


def _changed_for_later(ctx: JobContext, event: JobChanged) -> JobContext:
    """What a live job can take up, now; the rest with its next attempt."""
    if ctx.spec is None:
        return ctx
    now = {path: event.changes[path] for path in CHANGEABLE if path in event.changes}
    return replace(
        ctx, spec=changed_spec(ctx.spec, now), next_spec=changed_spec(ctx.next_spec or ctx.spec, event.changes)
    )


def _checked(ctx: JobContext, event: NodeChecked) -> JobContext:
    return replace(ctx, checked=(event.node, event.fit)) if ctx.losses else ctx


def _preempted(ctx: JobContext, event: PreemptAsked) -> JobContext:
    if event.gang is not None and (fewer := resize.without(ctx, event.gang)) is not None:
        return fewer
    grace_s = event.grace_s
    ending = Ending(reason=event.reason, requeue=True, counts=False, grace_s=grace_s, save_s=grace_s)
    return shutdown.begin(ctx, ending, JobState.PREEMPTING)


def _stopped_now(ctx: JobContext, event: StopAsked) -> JobContext:
    return shutdown.stopped_now(ctx)


def _requeued(ctx: JobContext, event: JobRequeued) -> JobContext:
    queued = attempt.requeue(ctx, event)
    return _with_spec(queued, queued.next_spec) if queued is not ctx and queued.next_spec else queued


def _mastered(ctx: JobContext, event: MasterStarted) -> JobContext:
    newer = event.master_epoch > ctx.master_epoch
    return replace(ctx, master_epoch=event.master_epoch, attached=False) if newer else ctx


def _reattached(ctx: JobContext, event: Reattached) -> JobContext:
    return attempt.reattach(ctx, event) if event.master_epoch == ctx.master_epoch else ctx


def _saved(ctx: JobContext, event: CheckpointSaved) -> JobContext:
    if not ctx.checkpoint_n <= event.n <= attempt.kept(ctx):
        return ctx
    saved = survival.note_checkpoint(ctx, event)
    return replace(saved, boundary=migration.at_boundary(saved))


def _last_saved(ctx: JobContext, event: CheckpointSaved) -> JobContext:
    return shutdown.saved(_saved(ctx, event))


def _copied(ctx: JobContext, event: CommitCopied) -> JobContext:
    return survival.note_copies(ctx, event, attempt.kept(ctx))


def _upload_started(ctx: JobContext, event: UploadStarted) -> JobContext:
    return replace(ctx, uploads_since_s=ctx.at_s)


def _upload_ended(ctx: JobContext, event: UploadEnded) -> JobContext:
    return replace(ctx, upload_error=event.error)


def _ended_job(ctx: JobContext, event: JobEnded) -> JobContext:
    return moved(ctx, event.state, end_reason=event.reason, open_failover=None, losses=())


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
        instances={one: resize.anew(ctx, was, epoch) for one, was in resize.members_of(ctx, spec, graph).items()},
    )
    return attempt.restore_point(ctx.with_placement(event.placement, ()))


def _reserved(ctx: JobContext, event: GangReserved) -> JobContext:
    """Reserved as asked; one that is not wanted any more is given back."""
    gang, epoch = event.gang, event.epoch
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


def _reserve_failed(ctx: JobContext, event: GangReserveFailed) -> JobContext:
    return attempt.without_gang(ctx, event.gang, event.epoch, GangState.RESERVING)


def _released(ctx: JobContext, event: GangReleased) -> JobContext:
    return resize.released(attempt.without_gang(ctx, event.gang, event.epoch, GangState.RELEASING), event.gang)


def _started(ctx: JobContext, event: InstanceStarted) -> JobContext:
    """The process that was asked for exists; any other one must go."""
    one = ctx.instances.get(event.instance)
    if one is None:
        return ctx
    if one.process is None or one.process.epoch != event.epoch:
        known = event.epoch in one.terminating
        return ctx if known else ctx.with_instances([replace(one, terminating=(*one.terminating, event.epoch))])
    if one.state is not InstanceState.STARTING:
        return ctx
    process = Process(
        epoch=event.epoch, node=event.node, pid=event.pid, start_time=event.start_time, address=event.address
    )
    return ctx.with_instances([moved(one, InstanceState.STALE, process=process)])


def _ready(ctx: JobContext, event: InstanceReady) -> JobContext:
    one = ctx.instances.get(event.instance)
    if one is None or one.state is not InstanceState.STALE or event.epoch != one.epoch:
        return ctx
    ready = ctx.with_instances([moved(one, InstanceState.READY, restored=event.restored)])
    return survival.fetched(ready, event.instance, event.restored)


def _ended(ctx: JobContext, event: InstanceEnded) -> JobContext:
    """Returned with success; its process is stopped with the job, or used again when a recovery takes it in."""
    one = ctx.instances.get(event.instance)
    if one is None or one.state is not InstanceState.READY or not one.running or event.epoch != one.epoch:
        return ctx
    return ctx.with_instances([moved(one, InstanceState.GONE, ended=True, running=False)])


def _ended_on_the_way(ctx: JobContext, event: InstanceEnded) -> JobContext:
    return _ended(ctx, event) if ctx.ending is not None and ctx.ending.phase != "stop" else ctx


def _stopped(ctx: JobContext, event: InstanceStopped) -> JobContext:
    """A process that had to go is gone."""
    one = ctx.instances.get(event.instance)
    if one is None or event.epoch not in one.terminating:
        return ctx
    left = tuple(other for other in one.terminating if other != event.epoch)
    return ctx.with_instances([replace(one, terminating=left)])


def _stopped_at_the_end(ctx: JobContext, event: InstanceStopped) -> JobContext:
    early = shutdown.went_without_saving(ctx, event)
    return _stopped(settle(shutdown.stopped_now(ctx)) if early else ctx, event)


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


def _last_commit(ctx: JobContext, event: Committed) -> JobContext:
    return shutdown.committed(_commit(ctx, event), event)


def accepts_commit(ctx: JobContext, n: int, loop_epoch: Epoch) -> bool:
    """True when the loop under this epoch may make commit ``n`` now; a fenced loop may not, nor any ``n`` twice."""
    loop = ctx.loop
    if loop is None or ctx.state.terminal or n != ctx.committed + 1 or loop_epoch != loop.epoch:
        return False
    if ctx.ending is not None and (ctx.state is JobState.RECOVERING or not shutdown.takes_commits(ctx)):
        return False  # the verdict to restart the whole job is a fence too, and so is the commit that was saved
    return loop.running and loop.state in (InstanceState.READY, InstanceState.STOPPING)


_J = JobState
UP = (_J.CHECKING, _J.STARTING, _J.RUNNING, _J.RESIZING, _J.RECOVERING)
"""A reservation exists, and with it processes may; before that no report of a process says anything."""
LIVE = (_J.ADMITTED, *UP)
"""An attempt whose end is not decided."""
ENDING = (_J.RECOVERING, _J.PREEMPTING, _J.STOPPING)
"""Everything is given back: to begin again (a restart of the whole job is RECOVERING), to wait, or to end."""
E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class EventRow:
    """``event`` changes a job in ``states``, by ``fold``; ``ending``: in those in which everything is given back."""

    event: type[Event]
    states: tuple[JobState, ...]
    ending: bool
    fold: Callable[[JobContext, Any], JobContext]


def _row(event: type[E], states: tuple[JobState, ...], fold: Callable[[JobContext, E], JobContext]) -> EventRow:
    """An event of a job that is not giving everything back."""
    return EventRow(event, states, False, fold)


def _ending(event: type[E], states: tuple[JobState, ...], fold: Callable[[JobContext, E], JobContext]) -> EventRow:
    """An event of a job that gives everything back."""
    return EventRow(event, states, True, fold)


ROWS: tuple[EventRow, ...] = (
    _row(JobSubmitted, (_J.SUBMITTED,), _submitted),
    _row(JobQueued, (_J.SUBMITTED, _J.PAUSED), _queued),
    _row(JobQueued, (_J.QUEUED,), _queued_again),
    _row(JobChanged, WAITING, _changed),
    _row(JobChanged, LIVE, _changed_for_later),
    _row(PreemptAsked, (_J.QUEUED,), _paused),
    _row(PreemptAsked, LIVE, _preempted),
    _row(StopAsked, (*WAITING, *LIVE), attempt.stop),
    _row(JobAdmitted, WAITING, _admit),
    _row(ScaleAsked, (*WAITING, *LIVE), resize.scaled),
    _row(MoveAsked, LIVE, migration.asked),
    _row(MasterStarted, (*WAITING, *LIVE), _mastered),
    _row(Reattached, (*WAITING, *LIVE), _reattached),
    _row(GangReserved, (*WAITING, *LIVE), _reserved),
    _row(GangReserveFailed, LIVE, attempt.reservation_failed),
    _row(GangReleased, (*WAITING, *LIVE), _released),
    _row(GangAsked, LIVE, resize.noted),
    _row(GangGranted, LIVE, resize.granted),
    _row(GangWaits, LIVE, resize.waits),
    _row(InstanceStarted, (*WAITING, *LIVE), _started),
    _row(InstanceReady, UP, _ready),
    _row(InstanceEnded, UP, _ended),
    _row(InstanceStopped, (*WAITING, *LIVE), _stopped),
    _row(InstanceLost, UP, attempt.lose),
    _row(ProgressStalled, UP, attempt.stall),
    _row(NodeChecked, (_J.RECOVERING,), _checked),
    _row(FailoverStarted, (_J.RUNNING, _J.RECOVERING), open_failover),
    _row(FailoverEnded, (_J.RECOVERING, _J.RESIZING), attempt.close),
    _row(RolledBack, LIVE, attempt.roll_back),
    _row(Committed, UP, _commit),
    _row(CheckpointSaved, (*WAITING, *LIVE), _saved),
    _row(CommitCopied, (*WAITING, *LIVE), _copied),
    _row(DowntimePassed, LIVE, attempt.not_running),
    _row(TimerFired, LIVE, attempt.fire),
    _row(JobEnded, (*WAITING, *LIVE), _ended_job),
    _ending(JobChanged, ENDING, _changed_for_later),
    _ending(PreemptAsked, (_J.RECOVERING,), shutdown.preempted),
    _ending(PreemptAsked, (_J.PREEMPTING,), shutdown.preempted_again),
    _ending(StopAsked, (_J.RECOVERING, _J.PREEMPTING), attempt.stop),
    _ending(StopAsked, (_J.STOPPING,), _stopped_now),
    _ending(JobRequeued, (_J.RECOVERING, _J.PREEMPTING), _requeued),
    _ending(MasterStarted, ENDING, _mastered),
    _ending(Reattached, ENDING, _reattached),
    _ending(GangReserved, ENDING, _reserved),
    _ending(GangReserveFailed, ENDING, _reserve_failed),
    _ending(GangReleased, ENDING, _released),
    _ending(InstanceStarted, ENDING, _started),
    _ending(InstanceEnded, ENDING, _ended_on_the_way),
    _ending(InstanceStopped, ENDING, _stopped_at_the_end),
    _ending(InstanceLost, ENDING, shutdown.lost),
    _ending(ProgressStalled, ENDING, shutdown.lost),
    _ending(Committed, (_J.PREEMPTING, _J.STOPPING), _last_commit),
    _ending(CheckpointSaved, ENDING, _last_saved),
    _ending(CommitCopied, ENDING, _copied),
    _ending(DowntimePassed, ENDING, attempt.not_running),
    _ending(TimerFired, ENDING, attempt.fire),
    _ending(UploadStarted, (_J.STOPPING,), _upload_started),
    _ending(UploadEnded, (_J.STOPPING,), _upload_ended),
    _ending(JobEnded, ENDING, _ended_job),
)

FOLDS: dict[tuple[JobState, bool, type[Event]], Callable[[JobContext, Any], JobContext]] = {
    (state, row.ending, row.event): row.fold for row in ROWS for state in row.states
}
"""The rows by state, whether everything is given back, and event."""
