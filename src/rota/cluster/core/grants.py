"""Placements of the log and holdings of the scheduler: one as the other, and gangs asked for beside an admission."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace

from rota.cluster.core import events
from rota.cluster.core.jobs import Allocation, Allocations, JobAsk, ask_of, compile_shape
from rota.cluster.core.state import LOST, State
from rota.spec.events import CheckpointSaved, Committed, DowntimePassed, MoveAsked
from rota.spec.gang import BundleAsk, BundleGrant, GangRequest, Grant, Placement
from rota.spec.ids import GangId, InstanceId, JobId, NodeId
from rota.spec.job import JobSpec
from rota.spec.resources import Res

Place = tuple[GangRequest, Grant]
"""What was asked for a gang, and what it was given."""

LEFT = "left-"
"""Before the name of a gang: what the engine keeps reserved where it was before."""


def placement_of(state: State, requests: tuple[GangRequest, ...], held: Allocations) -> Placement:
    """Holdings in slot order as grants of the gangs they belong to."""
    rest = iter(held)
    return Placement(
        gangs=tuple(
            Grant(
                gang=request.gang,
                bundles=tuple(_grant(state, bundle.index, bundle.res, next(rest)) for bundle in request.bundles),
            )
            for request in requests
        )
    )


def _grant(state: State, index: int, res: Res, held: Allocation) -> BundleGrant:
    node = state.nodes[held.node]
    devices = tuple(int(state.dev_index[d]) for d in held.devices)
    return BundleGrant(index=index, node=node.id, host=node.host, devices=devices, res=res)


def held_at(state: State, places: tuple[Place, ...]) -> Allocations:
    """Inverse of ``placement_of``; bundles on nodes that are gone hold nothing."""
    shape = compile_shape(tuple(request for request, _ in places))
    found: list[Allocation] = []
    bundles = [bundle for _, grant in places for bundle in grant.bundles]
    for slot, bundle in zip(shape.slots, bundles, strict=True):
        row = state.node_row.get(bundle.node)
        if row is not None:
            devices = state.device_rows(row, bundle.devices)
            found.append(Allocation(row, devices, slot.milli, slot.cpu_milli, slot.mem))
    return tuple(found)


def missing_of(state: State, places: tuple[Place, ...]) -> tuple[NodeId, ...]:
    """Nodes of these places that are lost or removed, or lack a device of them."""

    def there(bundle: BundleGrant) -> bool:
        row = state.node_row.get(bundle.node)
        if row is None or int(state.node_health[row]) == LOST:
            return False
        return len(state.device_rows(row, bundle.devices)) == len(bundle.devices)

    return tuple(dict.fromkeys(one.node for _, grant in places for one in grant.bundles if not there(one)))


def back_of(state: State, places: Sequence[Place], nodes: Sequence[NodeId]) -> tuple[NodeId, ...]:
    """Those of these nodes where all that the places have there is back, under the host that the engine knows.

    A host that is known by the engine's own id has another one after its return: what was reserved there stays lost.
    """
    found: list[NodeId] = []
    for node in nodes:
        grants = [given for _, grant in places for given in grant.bundles if given.node == node]
        row = state.node_row.get(node)
        if grants and row is not None and not state.node_health[row]:
            devices = [state.device_rows(row, given.devices) for given in grants]
            whole = all(len(has) == len(given.devices) for has, given in zip(devices, grants))
            fit = not any(state.dev_health[one] for has in devices for one in has)
            found += [node] if whole and fit and all(one.host == state.nodes[row].host for one in grants) else []
    return tuple(found)


def bundles_of(places: Sequence[Place]) -> int:
    """How many bundles these places have."""
    return sum(len(request.bundles) for request, _ in places)


def home_in(place: Place, member: InstanceId) -> NodeId | None:
    """The node that a place has for a member."""
    request, grant = place
    return next((given.node for ask, given in zip(request.bundles, grant.bundles) if member in ask.members), None)


def divided(place: Place, to: GangId, moved: Mapping[tuple[InstanceId, ...], BundleGrant]) -> Generator[Place]:
    """A place in its bundles, each with the gang that it is of: those that moved are of the gang ``to``."""
    request, grant = place
    for ask, given in zip(request.bundles, grant.bundles):
        gang = to if ask.members in moved else request.gang
        bundle = replace(moved.get(ask.members, given), index=given.index)
        yield GangRequest(gang=gang, bundles=(ask,)), Grant(gang=gang, bundles=(bundle,))


def left_at(left: Sequence[BundleGrant], moved_to: GangId) -> Place:
    """Cores that the engine keeps reserved where the members of a gang were before."""
    gang = GangId(f"{LEFT}{moved_to}")
    asks = (BundleAsk(index=i, members=(), res=Res(cpus=given.res.cpus)) for i, given in enumerate(left))
    bundles = (replace(given, index=i, devices=()) for i, given in enumerate(left))
    return GangRequest(gang=gang, bundles=tuple(asks)), Grant(gang=gang, bundles=tuple(bundles))


def moves_of(
    state: State, drains: Mapping[NodeId, tuple[float, str]], asked: Mapping[tuple[NodeId, JobId], float]
) -> list[tuple[JobId, MoveAsked]]:
    """Jobs that do not know yet that they must leave a node, until when and why, or that they need not any more."""
    holders = [row for row in state.holders() if row.phase != "stopping"] if drains else []
    there = {(state.nodes[slot.node].id, row.ask.key[0]) for row in holders for slot in row.held}
    due = {one: drains[one[0]] for one in sorted(there) if one[0] in drains}
    new = [(one, due_at, why) for one, (due_at, why) in due.items() if asked.get(one) != due_at]
    leave = [(job, MoveAsked(node=node, due_at=due_at, text=why)) for (node, job), due_at, why in new]
    stay = [(job, MoveAsked(node=node, due_at=None)) for node, job in asked if node not in drains]
    return [*leave, *stay]


def row_of(job: JobId, gang: GangId) -> JobId:
    """The row of a gang that is asked for beside those of the admission; ``JobAsk.key`` has both again."""
    return JobId(f"{job}~{gang}")


def in_rows_of(
    job: JobId, asks: Sequence[GangRequest], event: Committed | CheckpointSaved | DowntimePassed
) -> Iterator[events.JobSaved | events.JobWasDown]:
    """What a record of a job is for each of its rows: that of the job and those of the gangs beside it."""
    for row in (job, *(row_of(job, one.gang) for one in asks)):
        if isinstance(event, DowntimePassed):
            yield events.JobWasDown(job=row, since=event.since)
        else:
            yield events.JobSaved(job=row, n=event.n, waited=event.waited if isinstance(event, Committed) else {})


def ask_of_gang(job: JobId, spec: JobSpec, request: GangRequest, *, user: str, queued_at: float) -> JobAsk:
    """What the scheduler needs to know of a gang beside those of the admission."""
    ask = ask_of(row_of(job, request.gang), spec, (request,), user=user, queued_at=queued_at)
    return replace(ask, part_of=job, gang=request.gang)
