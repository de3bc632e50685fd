"""Number of members of a role: which join, are on standby or leave, and which gangs are asked for meanwhile.

Members of a role that serves calls come and go one by one: one that comes up in the background is taken in when it is
ready, and the job does not wait for it. The world of a command changes as a whole, by a recovery without a loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from rota.job.core.context import GangDemand, HeldGang, InstanceRecord, JobContext, Loss, NotYet, replace
from rota.job.core.graph import Graph, expand
from rota.job.core.placement import nodes_apart, request_of
from rota.job.core.transitions import moved, without_process
from rota.spec.commands import Emit
from rota.spec.events import (
    CheckpointSaved,
    FailoverStarted,
    GangAsked,
    GangGranted,
    GangReleased,
    GangWaits,
    ScaleAsked,
)
from rota.spec.gang import BundleGrant, Grant, Placement
from rota.spec.ids import Epoch, GangId, InstanceId, NodeId, RoleName
from rota.spec.job import JobSpec, RoleSpec
from rota.spec.reasons import Reason
from rota.spec.states import AskState, GangState, InstanceState, JobState, Level

GROW_EVERY_S = 60.0
"""A world grows no more often than this."""
OF_THE_NODE = frozenset({Reason.NODE_LOST, Reason.NODE_SUSPECT, Reason.GPU_LOST, Reason.GPU_ECC})
"""Causes that lie in the node: nothing may be started there again."""
PLANNED = frozenset({Reason.RESIZED, Reason.MIGRATED_DRAIN})
"""Recoveries in which nothing was lost: they do not count as failures, and cost no budget."""
_OPEN = (AskState.WANTED, AskState.ASKED)


def first(role: RoleSpec, one: InstanceId) -> InstanceRecord:
    """The record of a member before an attempt: it starts with the gang, is on standby, or waits for a grant."""
    if one.rank >= role.gang_size:
        return InstanceRecord(id=one, state=InstanceState.GONE, retired=True)
    return InstanceRecord(id=one, spare=one.rank >= role.starts)


def members_of(ctx: JobContext, spec: JobSpec, graph: Graph) -> dict[InstanceId, InstanceRecord]:
    """The members under another spec; what is known of those that it still has is kept."""
    return {one: ctx.instances.get(one) or first(spec.role(one.role), one) for one in graph.instances}


def anew(ctx: JobContext, one: InstanceRecord, epoch: Epoch) -> InstanceRecord:
    """The record of a member before the next attempt: its restarts and its last failure are kept."""
    return replace(first(ctx.role(one.id.role), one.id), epoch=epoch, restarts=one.restarts, error=one.error)


def is_world(role: RoleSpec) -> bool:
    """True when the members are one process group whose size may change."""
    return role.meshed and role.resizes


def world_of(role: RoleSpec, members: int) -> int:
    """The largest allowed world of at most ``members`` instances; 0 when there is none.

    Only the elastic axis changes, so the product of the others divides it; a world divides the global batch, so that
    every optimiser step sees the same number of samples. A role with plans has the sizes that there are plans for.
    """
    rest = prod(size for axis, size in role.mesh if axis != role.elastic_axis) if role.elastic_axis else 1
    sizes = range(min(members, role.replicas_max), role.replicas_min - 1, -1)
    planned = {one.replicas for one in role.plans} or sizes
    return next((size for size in sizes if size % rest == 0 and role.divides_batch(size) and size in planned), 0)


def wanted_size(ctx: JobContext, role: RoleSpec) -> int:
    """How many members a role shall have: what was asked for, at most what it may have."""
    top = role.replicas_max if role.resizes else role.replicas_min
    return min(ctx.sizes.get(role.name, top), top)


def sized(ctx: JobContext) -> JobContext:
    """Every conclusion about sizes; one that is drawn already changes nothing."""
    for role in ctx.roles:
        if is_world(role):
            ctx = _trimmed(ctx, role) if not any(one.process for one in ctx.of_role(role.name)) else ctx
            ctx = _asked(ctx, role)
        elif role.serves:
            ctx = _filled(_asked(ctx, role), role)
    return _unused(_moved(ctx))


def waits_for_answers(ctx: JobContext, role: RoleName) -> bool:
    """True while a world has not begun, and may still be granted more members."""
    if not is_world(ctx.role(role)) or any(one.process for one in ctx.of_role(role)):
        return False
    return any(not ask.answered and ask.everybody[0].role == role for ask in ctx.asks)


def unplaced(ctx: JobContext) -> tuple[InstanceRecord, ...]:
    """Members that are waited for and may not start where they were, or whose place was given back."""
    return tuple(one for one in ctx.instances.values() if not one.retired and (one.excluded or not has_place(ctx, one)))


def departing(ctx: JobContext) -> tuple[InstanceRecord, ...]:
    """Members on a node that is to be left, of that which goes first; none while anything is being recovered."""
    if ctx.failover is not None or ctx.losses or ctx.ending is not None:
        return ()
    for node, _ in sorted(ctx.drains.items(), key=lambda drain: drain[1]):
        there = (one for one in ctx.instances.values() if not (one.retired or one.ended) and has_place(ctx, one))
        if found := tuple(one for one in there if ctx.bundle(one.id)[1].node == node):
            return found
    return ()


def leaves(ctx: JobContext, ask: GangDemand) -> bool:
    """True while an ask is for exactly those who are to leave their node."""
    return set(ask.everybody) == {one.id for one in departing(ctx)}


def held(ctx: JobContext) -> GangDemand | None:
    """The place that is reserved for those who are to leave their node."""
    have = {gang.id for gang in ctx.gangs if gang.state is GangState.RESERVED}
    return next((ask for ask in ctx.asks if ask.gang in have and _is_held(ctx, ask)), None)


def _is_held(ctx: JobContext, ask: GangDemand) -> bool:
    return ask.state is AskState.HELD and not ask.back and leaves(ctx, ask)


def has_place(ctx: JobContext, one: InstanceRecord) -> bool:
    """True when the reservation in which it ran exists."""
    return one.id in ctx.bound and any(gang.id == ctx.bound[one.id][0] for gang in ctx.gangs)


def ask_emits(ctx: JobContext) -> Iterator[Emit]:
    """Asks that the scheduler does not know yet, and those that it shall forget."""
    assert ctx.spec is not None
    for ask in ctx.asks:
        if ask.state is AskState.WANTED:
            request = request_of(ctx.spec, ask.gang, ask.everybody)
            yield Emit(
                event=GangAsked(
                    request=request, avoid=ask.avoid, apart=ask.apart, lost=ask.lost, lost_nodes=ask.lost_nodes
                ),
                key=f"ask/{ask.gang}",
            )
        elif ask.state is AskState.DROPPED:
            yield Emit(event=GangReleased(gang=ask.gang, epoch=ask.epoch), key=f"drop/{ask.gang}")


def noted(ctx: JobContext, event: GangAsked) -> JobContext:
    """The scheduler can know of an ask."""
    return _with_ask(ctx, event.request.gang, AskState.WANTED, AskState.ASKED)


def granted(ctx: JobContext, event: GangGranted) -> JobContext:
    """Reserve it; members that are not waited for come up in the background."""
    ask = next((one for one in ctx.asks if one.gang == event.gang and one.state is AskState.ASKED), None)
    if ask is None or ctx.placement is None or len(event.bundles) != len(ask.members):
        return ctx
    grant = Grant(gang=ask.gang, bundles=event.bundles)
    placement = Placement(gangs=(*ctx.placement.gangs, grant))
    ctx = _with_ask(ctx, ask.gang, AskState.ASKED, AskState.HELD if ask.leaves else AskState.GRANTED, answered=True)
    ctx = ctx.with_placement(placement, ctx.asks)
    gangs = (*ctx.gangs, HeldGang(id=ask.gang, epoch=ask.epoch, state=GangState.RESERVING))
    if ask.leaves:
        return replace(ctx, gangs=gangs)
    coming = [_coming(ctx.instances[member], ask.epoch) for member in ask.everybody]
    return replace(ctx.with_instances(coming), gangs=gangs, starting_s=ctx.at_s)


def waits(ctx: JobContext, event: GangWaits) -> JobContext:
    """No grant now. Members whose old node is fit, or back, stay there; the others wait."""
    ctx = _with_ask(ctx, event.gang, AskState.ASKED, answered=True)
    ask = next((one for one in ctx.asks if one.gang == event.gang), None)
    ctx = ctx if ask is None else _returned(ctx, ask, event.back)
    moves = ask is not None and any(not ctx.instances[one].retired for one in ask.everybody)
    failover = ctx.failover
    fit = failover is not None and is_fit(ctx, failover.cause)
    return no_node(ctx) if moves and fit else ctx


def _returned(ctx: JobContext, ask: GangDemand, nodes: tuple[NodeId, ...]) -> JobContext:
    """Members of an ask whose place is on a node that is back may start there again: the ask is dropped without them.

    The job has held these places all the time, so that they are granted to no gang.
    """
    have = {gang.id for gang in ctx.gangs if gang.state is GangState.RESERVED}
    homes = {one: ctx.bound[one] for one in ask.everybody if one in ctx.bound}
    back = (ctx.instances[one] for one, (gang, bundle) in homes.items() if gang in have and bundle.node in nodes)
    away = [one for one in back if one.excluded]
    there = [one for one in away if not one.retired or one.id.rank < ctx.role(one.id.role).gang_size]
    if not there:
        return ctx
    ctx = replace(ctx.with_instances([replace(one, excluded=()) for one in there]), starting_s=ctx.at_s)
    joins = ask.state is AskState.ASKED and all(one.retired for one in there)
    return _with_ask(ctx, ask.gang, AskState.ASKED, AskState.DROPPED) if joins else ctx


def is_fit(ctx: JobContext, cause: Loss) -> bool:
    """True when everybody may start again where they were: the fault is not in the node, and the places are held."""
    return cause.reason not in OF_THE_NODE and all(has_place(ctx, one) for one in unplaced(ctx))


def no_node(ctx: JobContext) -> JobContext:
    """The open recovery finds no other node: it is judged again, without one."""
    failover = ctx.failover
    if failover is None or not unplaced(ctx):
        return ctx
    return replace(ctx, losses=(failover.cause,), escalated=Level.NODE, diagnosed=True)


def answered(ctx: JobContext) -> JobContext:
    """No answer in time: worlds begin with the members that they have."""
    return replace(ctx, asks=tuple(replace(ask, answered=True) for ask in ctx.asks))


def refused(ctx: JobContext, gang: GangId) -> JobContext | None:
    """The engine did not give a grant: its members are as before, and ask anew. None for a gang of the admission.

    Those who have another place, and may start there, keep it: the grant was only held for their move.
    """
    ask = next((one for one in ctx.asks if one.gang == gang), None)
    if ask is None:
        return None
    granted = ctx.placement.gang(gang).bundles if ctx.placement is not None else ()
    ctx = _without_grant(ctx, gang)
    for members, bundle in zip(ask.members, granted):
        those = [ctx.instances[member] for member in members if ctx.instances[member].process is None]
        waiting = [one for one in those if one.retired or one.excluded or not has_place(ctx, one)]
        for one in waiting:  # one after the other: the last of a world is not given up
            ctx = ctx.with_instances([_refused(ctx, one, (*ask.avoid, bundle.node))])
    return ctx


def _refused(ctx: JobContext, one: InstanceRecord, avoid: tuple[NodeId, ...]) -> InstanceRecord:
    """A spare, or one that its world can begin without, is as if it had not been granted.

    Another asks anew, and avoids what it avoided before and the node that was granted.
    """
    role = ctx.role(one.id.role)
    others = len(ctx.active_of(role.name)) - 1
    if one.retired or one.spare or (is_world(role) and others and world_of(role, others) == others):
        return moved(one, InstanceState.GONE, retired=True, spare=False)
    return replace(one, excluded=tuple(dict.fromkeys(avoid)))


def released(ctx: JobContext, gang: GangId) -> JobContext:
    """The reservation of an ask is gone, or the ask is forgotten."""
    left = tuple(ask for ask in ctx.asks if ask.gang != gang)
    return ctx if len(left) == len(ctx.asks) else replace(_without_grant(ctx, gang), asks=left)


def scaled(ctx: JobContext, event: ScaleAsked) -> JobContext:
    """Another number of members is wanted. A role that cannot change its size keeps it."""
    role = next((role for role in ctx.roles if role.name == event.role), None)
    if ctx.spec is None or role is None or event.n < 1 or not (role.serves or is_world(role)):
        return ctx
    spec = resized_spec(ctx.spec, event)
    graph = expand(spec)
    after = resized_spec(ctx.next_spec, event) if ctx.next_spec else None
    ctx = replace(ctx, spec=spec, next_spec=after, graph=graph, instances=members_of(ctx, spec, graph))
    return replace(ctx.with_placement(ctx.placement, ctx.asks), sizes={**ctx.sizes, event.role: event.n})


def resized_spec(spec: JobSpec, event: ScaleAsked) -> JobSpec:
    """The spec with room for the number of members that is asked for."""
    return replace(
        spec,
        roles=tuple(
            replace(role, replicas_max=max(role.replicas_max, event.n)) if role.name == event.role else role
            for role in spec.roles
        ),
    )


def _filled(ctx: JobContext, role: RoleSpec) -> JobContext:
    """Fill the role to its size; the rest is on standby up to its number, and surplus members leave."""
    want, standby = wanted_size(ctx, role), role.spares
    present = [one for one in ctx.of_role(role.name) if not one.retired]
    surplus = present[want + standby :] if len(present) > want + standby else []
    changed = [leaving(one, one.epoch) for one in surplus]
    present = present[: len(present) - len(surplus)]
    goal = max(min(len(present), want, role.replicas_min), min(want, len(present) - standby))
    active = [one for one in present if one.active]
    ready = [one for one in present if one.spare and one.state is InstanceState.READY]
    changed += [replace(one, spare=False) for one in ready[: max(0, goal - len(active))]]
    changed += [replace(one, spare=True) for one in active[goal:] if one.state is InstanceState.READY]
    return ctx.with_instances(changed) if changed else ctx


def leaving(one: InstanceRecord, epoch: Epoch, *, excluded: tuple[NodeId, ...] = ()) -> InstanceRecord:
    """The job continues without it: its process is stopped and none is started."""
    return replace(
        without_process(one, InstanceState.GONE, epoch), retired=True, spare=False, excluded=excluded or one.excluded
    )


def _coming(one: InstanceRecord, epoch: Epoch) -> InstanceRecord:
    if not one.retired:
        return replace(one, excluded=())
    return moved(one, InstanceState.PLANNED, epoch=epoch, retired=False, spare=True, excluded=(), ended=False)


def without(ctx: JobContext, gang: GangId) -> JobContext | None:
    """The members of a gang that was granted beside the admission leave; None if the job needs them.

    Those of a world leave by its next recovery, the others now. A place that is only held for a move has none yet.
    """
    ask = next((one for one in ctx.asks if one.gang == gang and one.state in (AskState.GRANTED, AskState.HELD)), None)
    if ask is None:
        return None
    if ask.state is AskState.HELD:
        return _with_ask(ctx, gang, AskState.HELD, back=True)
    going: list[InstanceRecord] = []
    for name in sorted({member.role for member in ask.everybody}):
        role, active = ctx.role(name), ctx.active_of(name)
        left = sum(one.id not in ask.everybody for one in active)
        if not (world_of(role, left) if is_world(role) else role.serves and left >= role.replicas_min):
            return None
        going += [one for one in ctx.of_role(name) if one.id in ask.everybody and not (is_world(role) and one.active)]
    ctx = _with_ask(ctx, gang, AskState.GRANTED, back=True)
    return ctx.with_instances([leaving(one, one.epoch) for one in going if not one.retired])


def _trimmed(ctx: JobContext, role: RoleSpec) -> JobContext:
    """Before it begins, the largest allowed world of the members that are there; the rest is on standby."""
    present = [one for one in ctx.of_role(role.name) if not one.retired]
    size = world_of(role, min(len(present), max(wanted_size(ctx, role), role.replicas_min)))
    if not size or any(one.state is not InstanceState.PLANNED for one in present):
        return ctx
    epoch = max(one.epoch for one in present)
    new = [replace(one, epoch=epoch, spare=i >= size) for i, one in enumerate(present)]
    return ctx.with_instances(new) if new != present else ctx


def wanted_resize(ctx: JobContext) -> FailoverStarted | NotYet:
    """The change of size of a world that is due: fewer at once, more at a boundary and not too often."""
    if ctx.state is not JobState.RUNNING:
        return NotYet(f"the job is {ctx.state}, and a world changes its size while it runs")
    why = "no role is to change its size"
    for role in ctx.roles:
        active = ctx.active_of(role.name) if is_world(role) else ()
        if not active or any(one.ended for one in active):
            continue
        want = max(wanted_size(ctx, role), role.replicas_min)
        joiners = candidates_of(ctx, role)
        going = {member for ask in ctx.asks if ask.back for member in ask.everybody}
        stays = [one for one in active if one.id not in going]
        size = world_of(role, min(want, len(stays)))
        if size and size < len(active):
            return _resize(ctx, active, leave=[one for one in active if one not in stays[:size]])
        size = world_of(role, min(want, len(active) + len(joiners)))
        if size > len(active):
            if ctx.boundary:
                return _resize(ctx, active, join=joiners[: size - len(active)])
            why = f"{role.name} grows from {len(active)} to {size} members at a commit or checkpoint"
            left_s = GROW_EVERY_S - (ctx.at_s - ctx.resized_s)
            why += f", in {left_s:.0f} s at the earliest" if left_s > 0 else ""
    return NotYet(why)


def candidates_of(ctx: JobContext, role: RoleSpec) -> tuple[InstanceRecord, ...]:
    """Members whose process waits for the world to grow."""
    return tuple(one for one in ctx.of_role(role.name) if one.spare and one.alive and one.state is InstanceState.STALE)


def waits_to_grow(ctx: JobContext) -> bool:
    """True when a boundary would let a world grow."""
    if ctx.state is not JobState.RUNNING or ctx.at_s - ctx.resized_s < GROW_EVERY_S:
        return False
    return any(is_world(role) and candidates_of(ctx, role) for role in ctx.roles)


def saved_by_script(ctx: JobContext) -> CheckpointSaved:
    """A script wrote a checkpoint of its own: a boundary; what is known of checkpoints of commits stays."""
    return CheckpointSaved(n=ctx.checkpoint_n, path=ctx.checkpoint_path, cursor=dict(ctx.checkpoint_cursor))


def _resize(
    ctx: JobContext,
    active: tuple[InstanceRecord, ...],
    *,
    leave: Iterable[InstanceRecord] = (),
    join: Iterable[InstanceRecord] = (),
) -> FailoverStarted:
    leave, join = tuple(leave), tuple(join)
    first = active[0].id
    size = len(active) - len(leave) + len(join)
    return FailoverStarted(
        failover=ctx.failover_count + 1,
        level=Level.PROCESS,
        scope=next_scope(ctx, (one.id for one in (*active, *join))),
        restore=ctx.committed,
        reason=Reason.RESIZED,
        role=first.role,
        rank=first.rank,
        text=f"{first.role} goes from {len(active)} to {size} members",
        leave=tuple((one.id.role, one.id.rank) for one in leave),
        join=tuple((one.id.role, one.id.rank) for one in join),
    )


def next_scope(ctx: JobContext, members: Iterable[InstanceId]) -> tuple[tuple[RoleName, int, Epoch], ...]:
    """The scope of a recovery of these members, under the next epoch."""
    epoch = Epoch(ctx.epoch_max + 1)
    return tuple((one.role, one.rank, epoch) for one in members)


def _asked(ctx: JobContext, role: RoleSpec) -> JobContext:
    """Ask for what a role lacks, each member by itself; forget what it lacks no more."""
    members = list(ctx.of_role(role.name))
    present = sum(not one.retired for one in members)
    lacks = wanted_size(ctx, role) + role.spares - present
    open_asks = [ask for ask in ctx.asks if ask.state in _OPEN and ask.everybody[0].role == role.name]
    joining = [ask for ask in open_asks if ctx.instances[ask.everybody[0]].retired]
    for ask in joining[max(0, lacks) :]:
        ctx = _with_ask(ctx, ask.gang, ask.state, AskState.DROPPED)
    busy = {member for ask in ctx.asks for member in ask.everybody}
    free = [one for one in members if one.retired and one.id not in busy and not one.terminating]
    for one in free[: max(0, lacks - len(joining))]:
        home = one.id.rank < role.gang_size and not one.excluded
        ctx = _back(ctx, one) if home else _with_new_ask(ctx, [one.id], f"{role.name}-{one.id.rank}")
    return ctx


def _back(ctx: JobContext, one: InstanceRecord) -> JobContext:
    """A member whose place in the gang is still held comes up again."""
    epoch = Epoch(ctx.epoch_max + 1)
    return replace(ctx.with_instances([_coming(one, epoch)]), epoch_max=epoch, starting_s=ctx.at_s)


def _moved(ctx: JobContext) -> JobContext:
    """Everybody who is waited for and has no place: one ask for all of them.

    An ask of which a member has a place again is forgotten: granted, it would move who runs there.
    """
    out, leaving_now = unplaced(ctx), departing(ctx)
    homes = {one.id for one in out}
    for ask in ctx.asks:
        joins = all(ctx.instances[member].retired for member in ask.everybody)
        stays = leaves(ctx, ask) if ask.leaves else joins or homes.issuperset(ask.everybody)
        if ask.state in _OPEN and not stays:
            ctx = _with_ask(ctx, ask.gang, ask.state, AskState.DROPPED)
    busy = {member for ask in ctx.asks if ask.state in (*_OPEN, AskState.HELD) for member in ask.everybody}
    new = [one.id for one in out if one.id not in busy]
    if new:
        return _with_new_ask(ctx, new, "moved")
    if out or not leaving_now or any(one.id in busy for one in leaving_now):
        return ctx
    home = ctx.bundle(leaving_now[0].id)[1].node
    return _with_new_ask(ctx, [one.id for one in leaving_now], "drained", home)


def _with_new_ask(
    ctx: JobContext, members: list[InstanceId], name: str, leaves_node: NodeId | None = None
) -> JobContext:
    assert ctx.spec is not None
    epoch = Epoch(ctx.epoch_max + 1)
    gang = GangId(f"{name}-{epoch}")
    excluded = [ctx.instances[one] for one in members if ctx.instances[one].excluded]
    ask = GangDemand(
        gang=gang,
        epoch=epoch,
        members=tuple(bundle.members for bundle in request_of(ctx.spec, gang, members).bundles),
        avoid=tuple(dict.fromkeys(node for one in excluded for node in one.excluded)),
        apart=nodes_apart(ctx.spec, ctx.plan, members, _homes(ctx)),
        lost=any(one.error is not None and one.error.reason in OF_THE_NODE for one in excluded),
        lost_nodes=_lost_nodes(ctx, excluded),
        at_s=ctx.at_s,
        leaves=leaves_node,
    )
    return replace(ctx, asks=(*ctx.asks, ask), epoch_max=epoch)


def _lost_nodes(ctx: JobContext, excluded: list[InstanceRecord]) -> tuple[NodeId, ...]:
    """Nodes that the engine lost, of those that these members may not start on; none on which a device is broken."""
    reports = (one for one in ctx.instances.values() if one.error is not None and one.error.node in one.excluded)
    errors = [one.error for one in reports if one.error is not None]
    unfit = {error.node for error in errors if error.reason in OF_THE_NODE and error.reason is not Reason.NODE_LOST}
    lost = {error.node for error in errors if error.reason is Reason.NODE_LOST} - unfit
    return tuple(dict.fromkeys(node for one in excluded for node in one.excluded if node in lost))


def _homes(ctx: JobContext) -> dict[InstanceId, NodeId]:
    """Where the members are that have a place and keep it."""
    present = (one for one in ctx.instances.values() if not one.retired and not one.excluded)
    return {one.id: ctx.bundle(one.id)[1].node for one in present if has_place(ctx, one)}


def abandoned(ctx: JobContext) -> frozenset[GangId]:
    """Reservations that exist, though no instance has its place there any more."""
    if not ctx.asks and not any(one.excluded for one in ctx.instances.values()):
        return frozenset()
    used = places(ctx)
    return frozenset(gang.id for gang in ctx.gangs if gang.state is GangState.RESERVED and gang.id not in used)


def places(ctx: JobContext) -> frozenset[GangId]:
    """Reservations in which an instance runs or will run."""
    used = {
        ctx.bound[one.id][0]
        for one in ctx.instances.values()
        if one.id in ctx.bound and not (one.retired and (one.excluded or one.id.rank >= _base(ctx, one)))
    }
    used |= {ask.gang for ask in ctx.asks if _is_held(ctx, ask)}
    return frozenset(used) - _in_the_way(ctx)


def _in_the_way(ctx: JobContext) -> frozenset[GangId]:
    """Reservations with a place that was left, and without members but those whose machine is lost.

    The engine holds what was left as long as the reservation, also when that machine is back: the only room, perhaps,
    for those who are lost now.
    """
    excluded = [one for one in ctx.instances.values() if one.id in ctx.bound and one.excluded and not one.retired]
    reported = (one for one in excluded if one.error is not None and one.error.reason is Reason.NODE_LOST)
    lost = {ctx.bundle(one.id)[1].node for one in reported if ctx.bundle(one.id)[1].node in one.excluded}
    taken: dict[GangId, list[BundleGrant]] = {}
    for one in ctx.instances.values():
        if one.id in ctx.bound and not one.retired:
            gang, bundle = ctx.bound[one.id]
            taken.setdefault(gang, []).append(bundle)
    grants = {grant.gang: grant for grant in ctx.placement.gangs} if lost and ctx.placement is not None else {}
    return frozenset(
        gang
        for gang, bundles in taken.items()
        if gang in grants
        and len({one.index for one in bundles}) < len(grants[gang].bundles)
        and all(one.node in lost for one in bundles)
    )


def _unused(ctx: JobContext) -> JobContext:
    """What is abandoned is given back once every process that has to go is gone."""
    gone = abandoned(ctx)
    if not gone or any(one.terminating for one in ctx.instances.values()):
        return ctx
    return replace(ctx, gangs=tuple(moved(one, GangState.RELEASING) if one.id in gone else one for one in ctx.gangs))


def _base(ctx: JobContext, one: InstanceRecord) -> int:
    return len(ctx.plan.base[one.id.role])


def _with_ask(
    ctx: JobContext, gang: GangId, was: AskState, to: AskState | None = None, **changes: object
) -> JobContext:
    def change(ask: GangDemand) -> GangDemand:
        return moved(ask, to or was, **changes) if (ask.gang, ask.state) == (gang, was) else ask

    return replace(ctx, asks=tuple(change(ask) for ask in ctx.asks))


def _without_grant(ctx: JobContext, gang: GangId) -> JobContext:
    if ctx.placement is None:
        return ctx
    grants = tuple(grant for grant in ctx.placement.gangs if grant.gang != gang)
    asks = tuple(moved(ask, AskState.DROPPED) if ask.gang == gang else ask for ask in ctx.asks)
    return ctx.with_placement(Placement(gangs=grants), asks)
