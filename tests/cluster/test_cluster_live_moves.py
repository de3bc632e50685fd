"""What a job holds after its members moved one by one is what the engine has reserved for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_cluster_live import Log, requests_of, spec

from rota.cluster.live import RequestsOf, Scheduler
from rota.cluster.policies import get_profile
from rota.spec.events import (
    GangAsked,
    GangGranted,
    GangReleased,
    GangWaits,
    InstanceStarted,
    JobAdmitted,
    JobEnded,
    JobRequeued,
    NodeJoined,
    NodeLost,
    NodeMarked,
)
from rota.spec.gang import BundleAsk, GangRequest
from rota.spec.ids import Epoch, GangId, InstanceId, NodeId, RoleName
from rota.spec.job import JobSpec
from rota.spec.reasons import Reason
from rota.spec.resources import FAILOVER, LOST_BY, Health, Res, pretend_nodes
from rota.spec.states import JobState


def moves(log: Log, gang: str, ranks: tuple[int, ...], left: str, at: float) -> tuple[NodeId, ...]:
    """The members of a job that leave a node ask for another place, and get it."""
    bundles = tuple(
        BundleAsk(index=i, members=(InstanceId(RoleName("w"), rank),), res=Res(cpus=1, gpus=4))
        for i, rank in enumerate(ranks)
    )
    log.add(GangAsked(request=GangRequest(gang=GangId(gang), bundles=bundles), avoid=(NodeId(left),)), "runs", at)
    (granted,) = [event for _, event in log.decide(at + 1) if isinstance(event, GangGranted)]
    return tuple(bundle.node for bundle in granted.bundles)


def running(nodes: str, members: int, gpus: int, gangs: RequestsOf = requests_of) -> Log:
    """A job of that many members has started on pretend nodes; ``gangs`` says what it asks for."""
    log = Log()
    log.scheduler = Scheduler(get_profile("fifo"), gangs)
    for one in pretend_nodes(nodes, host="real"):
        log.add(NodeJoined(node=one))
    log.submit("runs", members, gpus)
    log.decide(1.0)
    return log


def held_nodes(log: Log) -> list[NodeId]:
    state = log.scheduler.state
    return sorted(state.nodes[slot.node].id for row in state.holders() for slot in row.held if slot.devices)


def test_who_moved_alone_keeps_its_place_when_the_gang_that_it_left_is_given_back() -> None:
    log = running("1x4x4", 2, 4)
    assert held_nodes(log) == ["r0n0", "r0n1"]
    (first,) = moves(log, "w-0", (0,), "r0n0", 2.0)
    log.add(InstanceStarted(role=RoleName("w"), rank=0, epoch=Epoch(3), node=first, pid=9), "runs", 4.0)
    assert held_nodes(log) == sorted(("r0n1", first))
    (second,) = moves(log, "w-1", (1,), "r0n1", 5.0)
    log.add(GangReleased(gang=GangId("all"), epoch=Epoch(1), gone=True), "runs", 7.0)
    assert held_nodes(log) == sorted((first, second)), "the place of w/0 is of another gang"
    assert {row.ask.id for row in log.scheduler.state.holders()} == {"runs"}, "no cores are left where they were"
    log.add(JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED), "runs", 8.0)
    assert held_nodes(log) == []


def test_a_gang_that_a_job_lives_in_does_not_count_as_one_that_it_waits_for() -> None:
    """The gang of the admission is given back, then one of those that took its place: the other is still held."""
    log = running("1x4x4", 2, 4)
    (first,) = moves(log, "w-0", (0,), "r0n0", 2.0)
    (second,) = moves(log, "w-1", (1,), "r0n1", 3.0)
    log.add(GangReleased(gang=GangId("all"), epoch=Epoch(1), gone=True), "runs", 5.0)
    assert held_nodes(log) == sorted((first, second))
    log.add(GangReleased(gang=GangId("w-0"), epoch=Epoch(2), gone=True), "runs", 6.0)
    assert second in held_nodes(log)
    (third,) = moves(log, "w-0-again", (0,), first, 7.0)
    log.add(InstanceStarted(role=RoleName("w"), rank=0, epoch=Epoch(5), node=third, pid=9), "runs", 9.0)
    assert held_nodes(log) == sorted((second, third))
    assert {row.ask.id for row in log.scheduler.state.holders()} == {"runs"}, "the cores of w-0 were given back"


@pytest.mark.parametrize(
    ("returns", "told"),
    [
        ("1x2x4", ["r0n1"]),
        ("1x2x4 as another host", []),  # what the engine reserved under its own id of a machine, it never places again
        ("1x2x2", []),
    ],
)
def test_a_job_that_holds_all_of_a_lost_node_learns_once_that_it_is_back(returns: str, told: list[str]) -> None:
    log = running("1x2x4", 2, 4)
    log.add(NodeLost(node=NodeId("r0n1")), at=2.0)
    member = BundleAsk(index=0, members=(InstanceId(RoleName("w"), 1),), res=Res(cpus=1, gpus=4))
    request = GangRequest(gang=GangId("moved-2"), bundles=(member,))
    log.add(GangAsked(request=request, avoid=(NodeId("r0n1"),), lost=True), "runs", 3.0)
    waits = [event for _, event in log.decide(4.0)]
    assert [event.back for event in waits if isinstance(event, GangWaits)] == [()]
    for mark in log.scheduler.decide(4.0).marks:
        log.add(mark, at=4.0)
    node = pretend_nodes(returns.split()[0], host="real")[1]
    log.add(NodeJoined(node=replace(node, host="other") if "another" in returns else node), at=5.0)
    waits = [event for _, event in log.decide(6.0)]
    assert not [event for event in waits if isinstance(event, GangGranted)], "its own reservation has the room"
    assert [node for event in waits if isinstance(event, GangWaits) for node in event.back] == told
    assert not [event for _, event in log.decide(7.0) if isinstance(event, GangWaits)]
    log.add(GangReleased(gang=GangId("moved-2"), epoch=Epoch(2)), "runs", 8.0)
    assert log.decide(9.0) == [] and {row.ask.id for row in log.scheduler.state.holders()} == {"runs"}


@pytest.mark.parametrize("lost_nodes", [(), ("r0n1",)])
def test_only_a_node_that_the_engine_lost_is_back_with_it_and_not_one_with_a_broken_device(
    lost_nodes: tuple[str, ...],
) -> None:
    log = running("1x2x4", 2, 4)
    member = BundleAsk(index=0, members=(InstanceId(RoleName("w"), 1),), res=Res(cpus=1, gpus=4))
    request = GangRequest(gang=GangId("moved-2"), bundles=(member,))
    nodes = tuple(NodeId(node) for node in lost_nodes)
    log.add(GangAsked(request=request, avoid=(NodeId("r0n1"),), lost=True, lost_nodes=nodes), "runs", 3.0)
    (mark,) = log.scheduler.decide(4.0).marks
    assert (mark.node, mark.health, mark.by) == ("r0n1", Health.SUSPECT, LOST_BY if lost_nodes else FAILOVER)
    log.add(mark, at=4.0)
    assert [type(event) for _, event in log.decide(5.0)] == [GangWaits]
    log.add(NodeMarked(node=NodeId("r0n1"), health=Health.HEALTHY), at=6.0)
    waits = [event for _, event in log.decide(7.0) if isinstance(event, GangWaits)]
    assert [node for event in waits for node in event.back] == list(lost_nodes)


def test_a_mark_of_a_broken_device_is_not_replaced_by_one_that_the_service_takes_back() -> None:
    for lost_first in (True, False):
        log = two_gangs("1x2x4")
        node = NodeId("r0n1")
        for rank, lost_nodes in enumerate(((node,), ()) if lost_first else ((), (node,))):
            request = replace(gang_of_each(spec("runs", 2, 4))[rank], gang=GangId(f"again-{rank}"))
            log.add(GangAsked(request=request, avoid=(node,), lost=True, lost_nodes=lost_nodes), "runs", 2.0)
        assert [mark.by for mark in log.scheduler.decide(3.0).marks] == [FAILOVER]


def test_a_job_learns_of_each_of_its_lost_nodes_though_it_was_told_of_another_before() -> None:
    log = running("1x3x4", 3, 4)
    nodes = NodeId("r0n1"), NodeId("r0n2")
    asks = [BundleAsk(index=i, members=(InstanceId(RoleName("w"), i + 1),), res=Res(cpus=1, gpus=4)) for i in range(2)]
    request = GangRequest(gang=GangId("moved-2"), bundles=tuple(asks))
    log.add(GangAsked(request=request, avoid=nodes, lost=True, lost_nodes=nodes), "runs", 2.0)
    for mark in log.scheduler.decide(3.0).marks:
        log.add(mark, at=3.0)
    for node in nodes:
        log.add(NodeMarked(node=node, health=Health.HEALTHY), at=4.0)
    log.add(GangWaits(gang=GangId("moved-2"), reason=Reason.NO_FREE_DEVICES, back=nodes[:1]), "runs", 5.0)
    waits = [event for _, event in log.decide(6.0) if isinstance(event, GangWaits)]
    assert [event.back for event in waits] == [nodes[1:]]


def gang_of_each(spec: JobSpec) -> tuple[GangRequest, ...]:
    """A gang for each member."""
    (one,) = requests_of(spec)
    return tuple(
        GangRequest(gang=GangId(f"g{bundle.index}"), bundles=(replace(bundle, index=0),)) for bundle in one.bundles
    )


def two_gangs(nodes: str) -> Log:
    """A job of two gangs, each on a node of its own."""
    log = running(nodes, 2, 4, gang_of_each)
    assert held_nodes(log) == ["r0n0", "r0n1"]
    return log


def ask_again(log: Log, rank: int, node: str, at: float, *, lost: bool = False) -> None:
    """A member asks for another place than its node."""
    request = replace(gang_of_each(spec("runs", 2, 4))[rank], gang=GangId(f"again-{rank}"))
    log.add(GangAsked(request=request, avoid=(NodeId(node),), lost=lost), "runs", at)


def release(log: Log, gang: str, at: float) -> None:
    log.add(GangReleased(gang=GangId(gang), epoch=Epoch(1), gone=True), "runs", at)


def test_a_released_gang_is_free_while_the_job_holds_the_other_and_waits_for_a_new_place() -> None:
    log = two_gangs("1x2x4")
    ask_again(log, 1, "r0n1", 2.0, lost=True)
    assert [type(event) for _, event in log.decide(3.0)] == [GangWaits]
    release(log, "g1", 4.0)
    assert held_nodes(log) == ["r0n0"] and int(log.scheduler.state.used[0, 0]) == 4000
    log.add(NodeMarked(node=NodeId("r0n1"), health=Health.HEALTHY), at=5.0)
    (granted,) = [event for _, event in log.decide(6.0) if isinstance(event, GangGranted)]
    assert [bundle.node for bundle in granted.bundles] == ["r0n1"], "the node is back, and the job may use it again"
    assert {row.ask.id for row in log.scheduler.state.holders()} == {"runs"}
    assert held_nodes(log) == ["r0n0", "r0n1"] and int(log.scheduler.state.used[0, 0]) == 8000
    log.add(JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED), "runs", 7.0)
    assert held_nodes(log) == []


def test_a_gang_is_held_until_its_own_reservation_is_released_also_when_all_gangs_wait() -> None:
    log = two_gangs("1x2x4")
    for rank in (0, 1):
        ask_again(log, rank, f"r0n{rank}", 2.0)
    log.add(NodeMarked(node=NodeId("r0n0"), health=Health.DRAINED), at=2.0)
    log.decide(3.0)
    release(log, "g0", 4.0)
    assert held_nodes(log) == ["r0n1"], "the engine still has the reservation of g1"
    release(log, "g1", 5.0)
    assert held_nodes(log) == []
    log.add(JobRequeued(attempt=1, reason=Reason.NODE_LOST), "runs", 6.0)
    log.add(NodeMarked(node=NodeId("r0n0"), health=Health.HEALTHY), at=7.0)
    admitted = [event for _, event in log.decide(8.0) if isinstance(event, JobAdmitted)]
    assert [len(event.placement.gangs) for event in admitted] == [2]


def test_a_job_that_lost_one_gang_of_two_is_admitted_with_both_after_its_requeue() -> None:
    log = two_gangs("1x2x4")
    ask_again(log, 1, "r0n1", 2.0)
    log.decide(3.0)
    release(log, "g1", 4.0)
    log.add(JobRequeued(attempt=1, reason=Reason.NODE_LOST), "runs", 5.0)
    admitted = [event for _, event in log.decide(6.0) if isinstance(event, JobAdmitted)]
    assert [len(event.placement.gangs) for event in admitted] == [2]
    assert held_nodes(log) == ["r0n0", "r0n1"]


def test_members_of_a_released_gang_and_of_one_that_stays_move_together_and_leave_no_device_behind() -> None:
    log = running("1x3x4", 3, 2, lambda spec: _first_alone(requests_of(spec)[0]))
    assert held_nodes(log) == ["r0n0", "r0n0", "r0n1"]
    bundles = tuple(
        BundleAsk(index=i, members=(InstanceId(RoleName("w"), i),), res=Res(cpus=1, gpus=2)) for i in (0, 1)
    )
    asked = GangAsked(request=GangRequest(gang=GangId("drained"), bundles=bundles), avoid=(NodeId("r0n0"),))
    log.add(asked, "runs", 2.0)
    (granted,) = [event for _, event in log.decide(3.0) if isinstance(event, GangGranted)]
    log.add(GangReleased(gang=GangId("first"), epoch=Epoch(1), gone=True), "runs", 4.0)
    for rank in (0, 1):
        place = granted.bundles[rank].node
        log.add(InstanceStarted(role=RoleName("w"), rank=rank, epoch=Epoch(3), node=place, pid=9), "runs", 5.0)
    assert held_nodes(log) == sorted((*(bundle.node for bundle in granted.bundles), "r0n1"))
    assert int(log.scheduler.state.used[0, 0]) == 6000, "it is charged what it asks"
    assert log.decide(6.0) == []


def _first_alone(request: GangRequest) -> tuple[GangRequest, ...]:
    first, *rest = request.bundles
    others = tuple(replace(bundle, index=i) for i, bundle in enumerate(rest))
    return GangRequest(gang=GangId("first"), bundles=(first,)), GangRequest(gang=GangId("rest"), bundles=others)
