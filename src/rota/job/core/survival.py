"""Copies of the state of a commit, and which survive: in the memory of its host, of another machine, on disk.

Each stateful instance leaves the state of a commit in the shared memory of its host, where it survives the processes,
the engine and the node of the scheduler. With ``fail.state: peer`` another machine gets a copy of each commit behind
it: one is under way at a time, and the loop is at most one commit ahead of it (``waits_for_copy``). A job goes back to
the newest commit that everybody finds in one of these places, or on disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from rota.job.core.context import JobContext, SavedCommit, StateCopy, replace
from rota.job.core.ledger import FlowCut
from rota.job.core.resize import unplaced
from rota.spec.codec import JsonObject
from rota.spec.commands import CopyCommit, Saving
from rota.spec.events import CheckpointSaved, CommitCopied, Continued
from rota.spec.ids import NO_EPOCH, Epoch, InstanceId
from rota.spec.job import Checkpoint, JobSpec
from rota.spec.states import InstanceState

WEIGHTS = "weights"
"""Key of the cursor of a commit: weights edge -> [epoch of the writer, commit]."""
CUT = "cut"
"""Key of the cursor of a commit: what the loop needs to continue from it; ``streams`` are the cuts of the ledgers."""


def cursor_with(cursor: JsonObject, n: int, published: Mapping[str, int], cut: FlowCut | None) -> JsonObject:
    """The cursor of commit ``n``: the cut of its loop; for each edge published with it the writer's epoch and ``n``.

    The epoch distinguishes a committed version from one of the same number that a rollback took back.
    """
    weights = {**cursor.get(WEIGHTS, {}), **{edge: [epoch, n] for edge, epoch in published.items()}}
    found = {**cursor, WEIGHTS: weights, CUT: dict(cut or {})}
    return {name: found[name] for name in sorted(found)}  # sorted as a store gives it back: replays compare them


def commits_kept(spec: JobSpec) -> int:
    """Commits whose state stays in memory: the one being made and the one before it, which is the truth until then.

    With copies also the one before that: the newest that another machine has.
    """
    return 3 if has_copies(spec) else 2


def has_copies(spec: JobSpec) -> bool:
    """True when the state of a role also goes to another machine."""
    return any("peer" in role.fail.state for role in spec.roles)


def keeps_on_host(ctx: JobContext, one: InstanceId) -> bool:
    """True when the state of the last commit is in the memory of the host of this instance."""
    if one.role == ctx.plan.loop:
        return bool(ctx.cursor.get(CUT, {}).get("keeps"))  # items that no source gives again
    return one.role in ctx.plan.stateful


def keepers(ctx: JobContext) -> Iterator[InstanceId]:
    """Instances whose state is in the memory of their host."""
    roles = {*ctx.plan.stateful, *((ctx.plan.loop,) if ctx.plan.loop is not None else ())}
    for role in ctx.plan.ranks:
        if role in roles:
            yield from (one for one in ctx.plan.ranks[role] if keeps_on_host(ctx, one))


def hosts_now(ctx: JobContext) -> tuple[tuple[InstanceId, str], ...]:
    """The host of each instance that has a place: in its memory a commit of now leaves the state."""
    return tuple((one, ctx.bundle(one)[1].host) for one in ctx.plan.instances if one in ctx.bound)


def missing(ctx: JobContext) -> tuple[InstanceId, ...]:
    """Who would not find the state of the last commit in the memory of the host where its place is."""
    there = dict(ctx.hosts)
    return tuple(one for one in keepers(ctx) if one in ctx.bound and there.get(one) != ctx.bundle(one)[1].host)


def surviving(ctx: JobContext, lost: Collection[InstanceId] = ()) -> int:
    """The newest commit that everybody finds again, those of ``lost`` not in the memory where they were."""
    on_disk = min(ctx.checkpoint_n, ctx.committed)
    for n in sorted({ctx.committed, ctx.copied_n}, reverse=True):
        if on_disk < n <= ctx.committed and all(_finds(ctx, one, n, lost) for one in keepers(ctx)):
            return n
    return on_disk


def _finds(ctx: JobContext, one: InstanceId, n: int, lost: Collection[InstanceId]) -> bool:
    assert ctx.spec is not None
    if copy_of(ctx, one, n) is not None:
        return True
    if one in lost or one not in ctx.bound or n <= ctx.committed - commits_kept(ctx.spec):
        return one not in lost and one not in ctx.bound and n == ctx.committed
    return dict(ctx.hosts).get(one) == ctx.bundle(one)[1].host


def copy_of(ctx: JobContext, one: InstanceId, n: int) -> StateCopy | None:
    """The copy of the state of commit ``n`` that another machine has, if it has one."""
    return next((found for found in ctx.copies if found.owner == one), None) if n == ctx.copied_n else None


def source_for(ctx: JobContext, one: InstanceId) -> StateCopy | None:
    """The machine that has the state of an instance, when its own has it neither in memory nor on disk.

    Of a commit that is on disk, its file may be on the machine where it was written: the memory there has it, too.
    """
    there = dict(ctx.hosts)
    if one not in missing(ctx):
        return None
    if ctx.checkpoint_n < ctx.committed:
        return copy_of(ctx, one, ctx.committed)
    return StateCopy(owner=one, host=there[one], epoch=NO_EPOCH) if ctx.committed and one in there else None


def restorable(ctx: JobContext) -> int | None:
    """The newest commit that survives for everybody; None while one who may find a newer one has no place."""
    if ctx.checkpoint_n >= ctx.committed:
        return ctx.committed
    out = {one.id for one in unplaced(ctx)}
    found = surviving(ctx, out)
    return None if found < ctx.committed and any(one in out for one in keepers(ctx)) else found


def source_of(ctx: JobContext, to_commit: int) -> str:
    """Where a rollback finds its state: ``memory``, ``peer``, ``checkpoint``, or ``start`` for no state at all."""
    if to_commit == 0:
        return "start"
    away = {one.id for one in unplaced(ctx)}  # whose memory is that of a place that they leave
    if to_commit == ctx.committed and not missing(ctx) and away.isdisjoint(keepers(ctx)):
        return "memory"
    return "checkpoint" if to_commit <= ctx.checkpoint_n else "peer"


def unsaved(ctx: JobContext) -> bool:
    """True when the state of the last commit is in memory only."""
    return ctx.checkpoint_n < ctx.committed and next(keepers(ctx), None) is not None


def writer_of(ctx: JobContext, owner: InstanceId, host: str) -> tuple[InstanceId, Epoch] | None:
    """A living process on a host, the owner's own if it lives there."""
    there: dict[InstanceId, Epoch] = {}
    for one in ctx.instances.values():
        if one.process is None or not one.alive or one.state is InstanceState.LOST or one.id not in ctx.bound:
            continue
        place = ctx.bundle(one.id)[1]
        if place.host == host and place.node == one.process.node:  # it may have another place by now
            there[one.id] = one.process.epoch
    found = owner if owner in there else next(iter(there), None)
    return None if found is None else (found, there[found])


def savings(ctx: JobContext, owners: Iterable[InstanceId]) -> list[Saving] | None:
    """Who hands over the state of each owner; None while a host of such state has no living process."""
    there, parts = dict(ctx.hosts), list[Saving]()
    for one in owners:
        writer = writer_of(ctx, one, there[one]) if one in there else None
        if writer is None:
            return None
        parts.append(Saving(owner=one, process=writer[0], started_epoch=writer[1]))
    return parts


def kept_weights(ctx: JobContext) -> Iterator[Saving]:
    """Versions of weights edges that readers need after a rollback to the last commit, and that its state has not.

    What was published with this very commit is made from the state again.
    """
    there = dict(ctx.hosts)
    for edge in ctx.spec.weights if ctx.spec is not None else ():
        published = int(ctx.cursor.get(WEIGHTS, {}).get(edge.name, (0, 0))[1])
        source = InstanceId(edge.source, 0)
        home = there.get(source) or (ctx.bundle(source)[1].host if source in ctx.bound else "")
        if 0 < published < ctx.committed and (writer := writer_of(ctx, source, home)) is not None:
            yield Saving(owner=edge.name, process=writer[0], started_epoch=writer[1], n=published)


def copied(ctx: JobContext) -> Iterator[InstanceId]:
    """Whose state also goes to another machine; with that of any role goes what the loop keeps."""
    roles = {role.name for role in ctx.roles if "peer" in role.fail.state}
    for one in keepers(ctx) if roles else ():
        if one.role in roles or one.role == ctx.plan.loop:
            yield one


def copying(ctx: JobContext) -> CopyCommit | None:
    """Copy the last commit; None when nothing is to be copied, or no process can do it."""
    calm = ctx.ending is None and not ctx.losses and ctx.failover is None and ctx.rollback_to is None
    if not calm or ctx.copied_n >= ctx.committed:
        return None
    if not (parts := savings(ctx, copied(ctx))):
        return None
    hosts = tuple(sorted({bundle.host for _, bundle in ctx.bound.values()}))
    return CopyCommit(
        n=ctx.committed,
        loop_epoch=ctx.loop_epoch,
        attempt=ctx.attempt,
        tries=ctx.copy_tries,
        fails=ctx.copy_fails,
        hosts=hosts,
        parts=(*parts, *kept_weights(ctx)),
    )


def waits_for_copy(ctx: JobContext, n: int) -> bool:
    """True while the loop is to wait after commit ``n``, since the one before it is not on another machine yet.

    A copy that fails makes no loop wait.
    """
    return ctx.copied_n < n - 1 and ctx.copy_fails == 0 and copying(ctx) is not None


def note_copies(ctx: JobContext, event: CommitCopied, newest: int) -> JobContext:
    """Another machine has the state of a commit; one that was given up since, and a copy of a part, do not count.

    ``newest`` is the newest commit that counts.
    """
    wanted = set(copied(ctx))
    found = {InstanceId(role, rank): (host, epoch) for role, rank, host, epoch in event.copies}
    whole = bool(wanted) and wanted <= found.keys()
    ctx = replace(ctx, copy_tries=ctx.copy_tries + 1, copy_fails=0 if whole else ctx.copy_fails + 1)
    if not whole or event.loop_epoch != ctx.loop_epoch or not ctx.copied_n < event.n <= newest:
        return ctx
    copies = tuple(StateCopy(owner=one, host=host, epoch=epoch) for one, (host, epoch) in found.items())
    return replace(ctx, copied_n=event.n, copies=copies, copied_cursor=event.cursor)


def note_checkpoint(ctx: JobContext, event: CheckpointSaved) -> JobContext:
    """A checkpoint is complete; those beyond the number that the job keeps are removed with it."""
    keep = ((ctx.spec and ctx.spec.checkpoint) or Checkpoint()).keep
    newest = SavedCommit(n=event.n, path=event.path, cursor=event.cursor)
    return _with_checkpoints(ctx, (newest, *(one for one in ctx.checkpoints if one.n < event.n))[:keep])


def continued(ctx: JobContext, earlier: Continued) -> JobContext:
    """A new job begins with the commit of another one, under epochs that follow those of that job."""
    first = SavedCommit(n=earlier.commit, path=earlier.path, cursor=earlier.cursor)
    begun = replace(ctx, committed=first.n, cursor=first.cursor, epoch_max=earlier.epoch)
    return _with_checkpoints(begun, (first,))


def without_later(ctx: JobContext, n: int) -> JobContext:
    """The job goes back to commit ``n``: checkpoints of later ones are removed with the next one that is saved."""
    return _with_checkpoints(ctx, tuple(one for one in ctx.checkpoints if one.n <= n)) if n < ctx.checkpoint_n else ctx


def _with_checkpoints(ctx: JobContext, checkpoints: tuple[SavedCommit, ...]) -> JobContext:
    last = checkpoints[0] if checkpoints else SavedCommit(n=0, path="")
    return replace(
        ctx,
        checkpoints=checkpoints,
        checkpoint_n=last.n,
        checkpoint_path=last.path,
        checkpoint_cursor=last.cursor,
    )


def without_host(ctx: JobContext, host: str) -> JobContext:
    """A machine is lost, and the copies in its memory."""
    left = tuple(one for one in ctx.copies if one.host != host)
    return ctx if len(left) == len(ctx.copies) else replace(ctx, copies=left)


def without_state(ctx: JobContext, one: InstanceId) -> JobContext:
    """The state of an instance was looked for in vain: in the memory of its host, or where its copy should be.

    A host that was started anew has its name and not its memory: the copy on another machine is asked for then.
    """
    fetched_copy = source_for(ctx, one) is not None
    ctx = replace(ctx, hosts=tuple(there for there in ctx.hosts if there[0] != one))
    return ctx if not fetched_copy else replace(ctx, copies=tuple(copy for copy in ctx.copies if copy.owner != one))


def fetched(ctx: JobContext, one: InstanceId, restored: int) -> JobContext:
    """An instance came up with a copy: from now on the memory of its host has the state, too."""
    if restored != ctx.committed or ctx.checkpoint_n >= restored or source_for(ctx, one) is None:
        return ctx
    hosts = tuple(there for there in ctx.hosts if there[0] != one)
    return replace(ctx, hosts=(*hosts, (one, ctx.bundle(one)[1].host)))
