"""Where the state of the last commit is: on which hosts, whether it is reached from where the job is now, who saves it.

A commit leaves the state of each stateful instance in the shared memory of its host, where it survives the processes,
the engine and the node of the scheduler. An instance on the same host finds it there; elsewhere only the newest
checkpoint has it.
"""

from __future__ import annotations

from collections.abc import Iterator

from rota.job.core.context import JobContext
from rota.job.core.resize import unplaced
from rota.spec.commands import SaveCommit, Saving
from rota.spec.ids import Epoch, InstanceId, NodeId
from rota.spec.states import InstanceState

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
