"""Stop at a commit: before devices are given back, the loop comes to its next commit and the state goes to disk.

One way for everybody who takes the devices of a job: a preemption, a pause, a drain without another place, the time
limit, a restart of the whole job. An ``Ending`` goes through up to three phases within its grace: ``commit`` (the loop
works on to its next commit), ``save`` (the state of the last commit is written from memory to the checkpoint folder),
``stop`` (processes are stopped). A phase that has nothing to do, or no process to do it, is left out.

Where the state of the last commit is, is decided here too: each stateful instance leaves it in the shared memory of its
host, where it survives the processes, the engine and the node of the scheduler. An instance on the same host finds it
there; elsewhere only the newest checkpoint has it.
"""

from __future__ import annotations

from collections.abc import Iterator

from rota.job.core.context import FAILED_GRACE_S, Ending, InstanceRecord, JobContext, Phase, replace
from rota.job.core.resize import unplaced
from rota.job.core.transitions import moved
from rota.spec.commands import SaveCommit, Saving, SetTimer
from rota.spec.events import Committed, InstanceLost, InstanceStopped, PreemptAsked, ProgressStalled
from rota.spec.ids import Epoch, InstanceId, NodeId
from rota.spec.reasons import Reason
from rota.spec.states import InstanceState, JobState

WEIGHTS = "weights"
"""Key of the cursor of a commit: weights edge -> [epoch of the writer, commit]."""
CUT = "cut"
"""Key of the cursor of a commit: what the loop needs to continue from it; ``streams`` are the cuts of the ledgers."""


def keeps_on_host(ctx: JobContext, one: InstanceId) -> bool:
    """True when the state of the last commit is in the memory of the host of this instance."""
    assert ctx.spec is not None
    if one.role == ctx.plan.loop:
        return bool(ctx.cursor.get(CUT, {}).get("keeps"))  # items that no source gives again
    return one.role in ctx.plan.stateful and "shadow" in ctx.spec.role(one.role).fail.state


def keepers(ctx: JobContext) -> Iterator[InstanceId]:
    """Instances whose state is in the memory of their host."""
    roles = {*ctx.plan.stateful, *((ctx.plan.loop,) if ctx.plan.loop is not None else ())}
    for role in ctx.plan.ranks:
        if role in roles:
            yield from (one for one in ctx.plan.ranks[role] if keeps_on_host(ctx, one))


def hosts_now(ctx: JobContext) -> tuple[tuple[InstanceId, str], ...]:
    """The host of everybody who has a place: in its memory a commit of now leaves the state."""
    return tuple((one, ctx.bundle(one)[1].host) for one in ctx.plan.instances if one in ctx.bound)


def missing(ctx: JobContext) -> tuple[InstanceId, ...]:
    """Who would not find the state of the last commit in the memory of the host where its place is."""
    there = dict(ctx.hosts)
    return tuple(one for one in keepers(ctx) if one in ctx.bound and there.get(one) != ctx.bundle(one)[1].host)


def restorable(ctx: JobContext) -> int | None:
    """The newest commit that survives for everybody: in memory, else on disk; None while one of them has no place."""
    if ctx.checkpoint_n >= ctx.committed:
        return ctx.committed
    out = {one.id for one in unplaced(ctx)}
    if any(one in out for one in keepers(ctx)):
        return None
    return ctx.checkpoint_n if missing(ctx) else ctx.committed


def source_of(ctx: JobContext, to_commit: int) -> str:
    """Where a rollback finds the state of its commit: ``memory``, ``checkpoint``, or ``start`` for no state at all."""
    if to_commit == 0:
        return "start"
    return "checkpoint" if to_commit < ctx.committed or missing(ctx) else "memory"


def unsaved(ctx: JobContext) -> bool:
    """True when the state of the last commit is in memory only."""
    return ctx.checkpoint_n < ctx.committed and next(keepers(ctx), None) is not None


def saving(ctx: JobContext) -> SaveCommit | None:
    """Write the last commit from memory to disk; None when nothing is to be written, or no process can write a part."""
    if not unsaved(ctx):
        return None
    there, parts = dict(ctx.hosts), list[Saving]()
    for one in keepers(ctx):
        writer = _writer(ctx, one, there[one]) if one in there else None
        if writer is None:
            return None
        parts.append(Saving(owner=one, process=writer[0], started_epoch=writer[1]))
    for edge in ctx.spec.weights if ctx.spec is not None else ():
        published = int(ctx.cursor.get(WEIGHTS, {}).get(edge.name, (0, 0))[1])
        source = InstanceId(edge.source, 0)
        home = there.get(source) or (ctx.bundle(source)[1].host if source in ctx.bound else "")
        if 0 < published < ctx.committed and (writer := _writer(ctx, source, home)) is not None:
            # What was published with this very commit is made from the state again.
            parts.append(Saving(owner=edge.name, process=writer[0], started_epoch=writer[1], n=published))
    lost = sum(one.state is InstanceState.LOST for one in ctx.instances.values())
    return SaveCommit(n=ctx.committed, attempt=ctx.attempt, tries=lost, parts=tuple(parts))


def _writer(ctx: JobContext, owner: InstanceId, host: str) -> tuple[InstanceId, Epoch] | None:
    """A living process on a host, the owner's own if it lives there."""
    alive = [
        one
        for one in ctx.instances.values()
        if one.process is not None and one.alive and one.state is not InstanceState.LOST and one.id in ctx.bound
    ]
    there = [one for one in alive if _host_of_process(ctx, one.id, one.process.node if one.process else None) == host]
    found = next((one for one in there if one.id == owner), None) or next(iter(there), None)
    return (found.id, found.process.epoch) if found is not None and found.process is not None else None


def _host_of_process(ctx: JobContext, one: InstanceId, node: NodeId | None) -> str | None:
    """The host where a process is: that of its place, unless it has another place by now."""
    bundle = ctx.bundle(one)[1]
    return bundle.host if bundle.node == node else None


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
    """Stop the processes, politely for what is left of the grace."""
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
    """An instance failed on the way: there is no further commit, and another process of the host saves its state."""
    one = ctx.instances.get(InstanceId(event.role, event.rank))
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
    one = ctx.instances.get(InstanceId(event.role, event.rank))
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
