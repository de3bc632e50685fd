"""Shutdown at a commit: before devices are given back, the loop comes to its next commit and the state goes to disk.

One way for everybody who takes the devices of a job: a preemption, a pause, a drain without another place, the time
limit, a restart of the whole job. An ``Ending`` goes through up to three phases within its grace: ``commit`` (the loop
works on to its next commit), ``save`` (the state of the last commit is written from memory to the checkpoint folder),
``stop`` (processes are stopped). A phase that has nothing to do, or no process to do it, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rota.job.core.context import FAILED_GRACE_S, Ending, InstanceRecord, JobContext, Phase, replace
from rota.job.core.resize import PLANNED
from rota.job.core.survival import keepers, kept_weights, savings, unsaved
from rota.job.core.transitions import moved
from rota.spec.commands import FENCED_GRACE_S, SaveCommit, SetTimer
from rota.spec.events import Committed, InstanceLost, InstanceStopped, PreemptAsked, ProgressStalled
from rota.spec.reasons import Reason
from rota.spec.states import InstanceState, JobState

PHASES: Mapping[Phase, str] = {
    "commit": "the loop comes to its next commit",
    "save": "the state of the last commit is being written to disk",
    "stop": "its processes and reservations are being given back",
}
"""What the end of an attempt waits for."""


def saving(ctx: JobContext) -> SaveCommit | None:
    """Write the last commit from memory to disk; None when nothing is to be written, or no process can write a part."""
    if not unsaved(ctx):
        return None
    if (parts := savings(ctx, keepers(ctx))) is None:
        return None
    lost = sum(one.state is InstanceState.LOST for one in ctx.instances.values())
    return SaveCommit(n=ctx.committed, attempt=ctx.attempt, tries=lost, parts=(*parts, *kept_weights(ctx)))


def grace_s(ctx: JobContext, one: InstanceRecord) -> float:
    """Polite part of stopping an older process of an instance, or what runs in its present one.

    In a change of size or place nothing was lost, and a command keeps its own checkpoints: it has the grace of the job
    to write one. Of any other process what counts is a commit.
    """
    if ctx.ending is not None:
        return ctx.ending.grace_s
    last = next((found for found in reversed(ctx.failovers) if one.id in found.scope), None)
    if ctx.spec is None or last is None or last.cause.reason not in PLANNED or ctx.role(one.id.role).run is None:
        return FENCED_GRACE_S
    return ctx.spec.grace_s


COMMIT_SHARE = 0.5
"""Of the grace, for the loop to come to its next commit; the rest is for the state of it."""


def begin(ctx: JobContext, ending: Ending, state: JobState) -> JobContext:
    """End the attempt at a commit, ``ending.save_s`` at most from now."""
    ctx = moved(ctx, state, ending=replace(ending, since_s=ctx.at_s))
    if ending.save_s <= 0.0:
        return ctx
    return _in_phase(ctx, "commit") if _comes_to_a_commit(ctx, state) else saved_first(ctx)


def preempted(ctx: JobContext, event: PreemptAsked) -> JobContext:
    """A restart of the job gives its devices back for another reason now: within the grace from now on."""
    ending = ctx.ending
    assert ending is not None
    grace_s = event.grace_s + (0.0 if ending.phase == "stop" else ctx.at_s - ending.since_s)
    save_s = min(ending.save_s, grace_s)
    ending = replace(ending, reason=event.reason, counts=False, grace_s=grace_s, save_s=save_s)
    return moved(ctx, JobState.PREEMPTING, ending=ending)


def preempted_again(ctx: JobContext, event: PreemptAsked) -> JobContext:
    """A job that gives its devices back already is asked for them: the sooner end of the two graces counts."""
    ending = ctx.ending
    assert ending is not None
    reason = Reason.PAUSED if event.reason is Reason.PAUSED else ending.reason
    grace_s = ending.grace_s
    if ending.phase != "stop":
        grace_s = min(grace_s, event.grace_s + ctx.at_s - ending.since_s)
    ending = replace(ending, reason=reason, grace_s=grace_s, save_s=min(ending.save_s, grace_s))
    return replace(ctx, ending=ending)


def saved_first(ctx: JobContext) -> JobContext:
    """No further commit is waited for: save the last one, unless it is on disk."""
    return _in_phase(ctx, "save") if saving(ctx) is not None else stopped_now(ctx)


def stopped_now(ctx: JobContext) -> JobContext:
    """Stop the processes gracefully, within the rest of the grace period."""
    ending = ctx.ending
    assert ending is not None
    if ending.phase == "stop":
        return ctx
    left_s = ending.grace_s - (ctx.at_s - ending.since_s)
    return replace(ctx, ending=replace(ending, phase="stop", grace_s=max(left_s, min(ending.grace_s, FAILED_GRACE_S))))


def committed(ctx: JobContext, event: Committed) -> JobContext:
    """The loop has come to its commit."""
    ending = ctx.ending
    return saved_first(ctx) if ending is not None and ending.phase == "commit" and ctx.committed == event.n else ctx


def saved(ctx: JobContext) -> JobContext:
    """A checkpoint is complete; once it is that of the last commit, the processes may go."""
    ending = ctx.ending
    return stopped_now(ctx) if ending is not None and ending.phase == "save" and not unsaved(ctx) else ctx


def lost(ctx: JobContext, event: InstanceLost | ProgressStalled) -> JobContext:
    """An instance failed on the way: no further commit follows, and another process of the host saves its state."""
    one = ctx.instances.get(event.instance)
    if one is None or one.process is None or one.ended or one.state is InstanceState.LOST:
        return ctx
    if not one.process.epoch <= event.epoch <= one.epoch:
        return ctx
    return gone(ctx, [one])


def gone(ctx: JobContext, those: list[InstanceRecord]) -> JobContext:
    """The same of processes that are known to be gone, or that failed."""
    if ctx.ending is None or ctx.ending.phase == "stop" or not those:
        return ctx
    ctx = ctx.with_instances(moved(one, InstanceState.LOST, running=False) for one in those)
    return saved_first(ctx)


def went_without_saving(ctx: JobContext, event: InstanceStopped) -> bool:
    """True when a process was stopped before that was asked for: in logs of versions that saved nothing."""
    one = ctx.instances.get(event.instance)
    early = ctx.ending is not None and ctx.ending.phase != "stop"
    return early and one is not None and one.process is not None and one.process.epoch == event.epoch


def timers(ctx: JobContext) -> Iterator[SetTimer]:
    """How long the present phase may take."""
    ending = ctx.ending
    if ending is None or ending.phase == "stop":
        return
    share = COMMIT_SHARE if ending.phase == "commit" and next(keepers(ctx), None) is not None else 1.0
    after_s = ending.save_s * share
    # The name has the time: a preemption while the job saves may leave less, which is then another timer.
    timer = f"grace/{ending.phase}/{ctx.attempt}/{ending.since_s + after_s:.3f}"
    yield SetTimer(timer=timer, since_s=ending.since_s, after_s=after_s)


def overdue(ctx: JobContext) -> JobContext:
    """The time of the phase is over."""
    assert ctx.ending is not None
    return saved_first(ctx) if ctx.ending.phase == "commit" else stopped_now(ctx)


def takes_commits(ctx: JobContext) -> bool:
    """False once the commit that is saved must be the last one: of a job that is queued again, or while it is saved."""
    ending = ctx.ending
    if ending is None or ending.phase == "commit":
        return True
    return ending.phase == "stop" and not ending.requeue


def _comes_to_a_commit(ctx: JobContext, state: JobState) -> bool:
    loop = ctx.loop
    calm = not ctx.losses and ctx.failover is None and ctx.rollback_to is None
    works = loop is not None and loop.running and loop.state is InstanceState.READY
    return calm and works and state is not JobState.RECOVERING


def _in_phase(ctx: JobContext, phase: Phase) -> JobContext:
    assert ctx.ending is not None
    return replace(ctx, ending=replace(ctx.ending, phase=phase))
