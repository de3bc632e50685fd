"""Placements of the log and holdings of the scheduler: one as the other, and gangs asked for beside an admission."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

from rota.cluster.core.jobs import Allocation, Allocations, JobAsk, ask_of, compile_shape
from rota.cluster.core.state import LOST, State
from rota.spec.gang import BundleGrant, GangRequest, Grant, Placement
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


def row_of(job: JobId, gang: GangId) -> JobId:
    """The row of a gang that is asked for beside those of the admission; ``JobAsk.key`` has both again."""
    return JobId(f"{job}~{gang}")


def ask_of_gang(job: JobId, spec: JobSpec, request: GangRequest, *, user: str, queued_at: float) -> JobAsk:
    """What the scheduler needs to know of a gang beside those of the admission."""
    ask = ask_of(row_of(job, request.gang), spec, (request,), user=user, queued_at=queued_at)
    return replace(ask, part_of=job, gang=request.gang)
