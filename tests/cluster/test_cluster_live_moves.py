"""What a job holds after its members moved one by one is what the engine has reserved for it."""

from __future__ import annotations

from test_cluster_live import Log

from rota.spec.events import GangAsked, GangGranted, GangReleased, InstanceStarted, JobEnded, NodeJoined
from rota.spec.gang import BundleAsk, GangRequest
from rota.spec.ids import Epoch, GangId, InstanceId, NodeId, RoleName
from rota.spec.reasons import Reason
from rota.spec.resources import Res, pretend_nodes
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


def held_nodes(log: Log) -> list[NodeId]:
    state = log.scheduler.state
    return sorted(state.nodes[slot.node].id for row in state.holding() for slot in row.held if slot.devices)


def test_who_moved_alone_keeps_its_place_when_the_gang_that_it_left_is_given_back() -> None:
    log = Log()
    for one in pretend_nodes("1x4x4", host="real"):
        log.add(NodeJoined(node=one))
    log.submit("runs", 2, 4)
    log.decide(1.0)
    assert held_nodes(log) == ["r0n0", "r0n1"]
    (first,) = moves(log, "w-0", (0,), "r0n0", 2.0)
    log.add(InstanceStarted(role=RoleName("w"), rank=0, epoch=Epoch(3), node=first, pid=9), "runs", 4.0)
    assert held_nodes(log) == sorted(("r0n1", first))
    (second,) = moves(log, "w-1", (1,), "r0n1", 5.0)
    log.add(GangReleased(gang=GangId("all"), epoch=Epoch(1), gone=True), "runs", 7.0)
    assert held_nodes(log) == sorted((first, second)), "the place of w/0 is of another gang"
    assert {row.ask.id for row in log.scheduler.state.holding()} == {"runs"}, "no cores are left where they were"
    log.add(JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED), "runs", 8.0)
    assert held_nodes(log) == []


def test_a_gang_that_a_job_lives_in_does_not_count_as_one_that_it_waits_for() -> None:
    """The gang of the admission is given back, then one of those that took its place: the other is still held."""
    log = Log()
    for one in pretend_nodes("1x4x4", host="real"):
        log.add(NodeJoined(node=one))
    log.submit("runs", 2, 4)
    log.decide(1.0)
    (first,) = moves(log, "w-0", (0,), "r0n0", 2.0)
    (second,) = moves(log, "w-1", (1,), "r0n1", 3.0)
    log.add(GangReleased(gang=GangId("all"), epoch=Epoch(1), gone=True), "runs", 5.0)
    assert held_nodes(log) == sorted((first, second))
    log.add(GangReleased(gang=GangId("w-0"), epoch=Epoch(2), gone=True), "runs", 6.0)
    assert second in held_nodes(log)
    (third,) = moves(log, "w-0-again", (0,), first, 7.0)
    log.add(InstanceStarted(role=RoleName("w"), rank=0, epoch=Epoch(5), node=third, pid=9), "runs", 9.0)
    assert held_nodes(log) == sorted((second, third))
    assert {row.ask.id for row in log.scheduler.state.holding()} == {"runs"}, "the cores of w-0 were given back"
