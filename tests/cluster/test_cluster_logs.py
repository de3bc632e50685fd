"""Whatever a log says, the state of the scheduler agrees with itself, and no job runs on nodes that are not there."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cluster_live import Log, requests_of, with_nodes

from rota.cluster.core import events
from rota.cluster.core.grants import row_of
from rota.cluster.core.guarded import violations
from rota.cluster.core.state import State
from rota.cluster.live import Scheduler
from rota.cluster.policies import get_profile
from rota.cluster.sim.forecast import Forecast
from rota.cluster.sim.runs import replayed
from rota.runtime.clock import SystemClock
from rota.service.cli import app
from rota.service.offline import sim_replay
from rota.spec.errors import BadInput
from rota.spec.events import (
    CheckpointSaved,
    Event,
    GangAsked,
    GangGranted,
    GangReleased,
    InstanceStarted,
    JobAdmitted,
    JobEnded,
    JobQueued,
    JobRequeued,
    JobWaits,
    NodeJoined,
    NodeLost,
    NodeMarked,
    PreemptAsked,
    QueuesChanged,
    StopAsked,
    event_to_json,
)
from rota.spec.gang import BundleAsk, GangRequest
from rota.spec.ids import Epoch, GangId, InstanceId, JobId, NodeId, RoleName
from rota.spec.queue import Queue
from rota.spec.reasons import Reason
from rota.spec.resources import Device, Health, Node, Res
from rota.spec.states import JobState

DEEP = os.environ.get("ROTA_DEEP") == "1"
NODES, JOBS = 4, 4
ROLE = RoleName("w")
OPERATIONS = (
    *("join", "lose", "mark", "queues", "submit", "decide", "decide", "append", "append", "requeue", "end", "save"),
    *("rejoin", "late", "gang", "grown", "release", "start", "stop", "pause", "resume"),
)


def machine(i: int, devices: int) -> Node:
    rows = tuple(Device(index=d, type="A100") for d in range(devices))
    return Node(id=NodeId(f"n{i}"), host=f"host{i}", cpus=8, memory_bytes=2**36, devices=rows)


def named(event: JobAdmitted | GangGranted) -> set[tuple[NodeId, int]]:
    """Devices that a record gives, by node and index."""
    bundles = event.bundles if isinstance(event, GangGranted) else (b for g in event.placement.gangs for b in g.bundles)
    return {(bundle.node, device) for bundle in bundles for device in bundle.devices}


class Drawn:
    """A log of drawn events; decisions may be appended after others, as far as their job has no newer record."""

    def __init__(self, profile: str) -> None:
        self.log = Log(profile)
        self.later: list[tuple[int, JobId, Event]] = []
        self.gangs = 0
        self.at = 0.0
        self.given: dict[JobId, set[tuple[NodeId, int]]] = {}
        """What the log gave each row last."""
        self.reserved: dict[JobId, set[tuple[NodeId, int]]] = {}
        """What an admission gave a job: the engine may keep it until all is given back, or some of it is moved."""
        for i in range(NODES):
            self.add(NodeJoined(node=machine(i, 4)))

    def add(self, event: Event, job: str | None = None) -> None:
        before = self.held()
        self.log.add(event, job, self.at)
        assert violations(self.log.scheduler.state) == [], self.log.records[-1]
        for row, devices in self.held().items() if job is None else ():
            was = set(before.pop(row, ()))
            back = set(devices) - was
            assert was <= set(devices) and back <= self.given.get(row, set()), f"{event} changes what {row} holds"
        assert job is not None or not before, f"{event} takes from {before}"
        match event:
            case JobAdmitted() if job is not None:
                self.given[JobId(job)] = self.reserved[JobId(job)] = named(event)
            case GangGranted() if job is not None:
                self.given[row_of(JobId(job), event.gang)] = named(event)
            case JobRequeued() | JobEnded() | GangReleased() | InstanceStarted() if job is not None:
                self.reserved.pop(JobId(job), None)
            case _:
                pass

    def held(self) -> dict[JobId, list[tuple[NodeId, int]]]:
        state = self.log.scheduler.state
        devices = {row.ask.id: [d for slot in row.held for d in slot.devices] for row in state.holders()}
        return {
            job: [(state.nodes[state.dev_node[d]].id, int(state.dev_index[d])) for d in held]
            for job, held in devices.items()
        }

    def seq(self, job: str) -> int:
        return max((record.number for record in self.log.records if record.job == job), default=0)

    def submitted(self) -> list[str]:
        return sorted({str(record.job) for record in self.log.records if record.job is not None})

    def live(self, number: int) -> str | None:
        ended = {str(r.job) for r in self.log.records if isinstance(r.event, JobEnded)}
        jobs = [job for job in self.submitted() if job not in ended]
        return jobs[number % len(jobs)] if jobs else None

    def decide(self) -> None:
        outcome = self.log.scheduler.decide(self.at)
        assert outcome.broken == ()
        for job, event in outcome.events:
            if isinstance(event, JobAdmitted | GangGranted):
                others = {one for other, given in self.reserved.items() if other != job for one in given}
                assert named(event).isdisjoint(others), f"{job} would get what another job may still have"
        self.later = [(self.seq(job), job, event) for job, event in outcome.events]

    def append(self) -> None:
        for seq, job, event in self.later:
            if self.seq(job) == seq or any(of == job and one != event for _, of, one in self.later):
                self.add(event, job)
        self.later = []

    def play(self, operation: str, a: int, b: int) -> None:
        self.at += 1.0
        node, job = NodeId(f"n{a % NODES}"), self.live(a)
        match operation:
            case "join":
                self.add(NodeJoined(node=machine(a % NODES, (4, 4, 2)[b % 3])))
            case "rejoin" if held := sorted({node for places in self.held().values() for node, _ in places}):
                node = held[a % len(held)]
                self.add(NodeJoined(node=machine(int(node[1:]), (4, 2, 1, 0)[b % 4])))
            case "lose":
                self.add(NodeLost(node=node))
            case "late":  # a decision reaches the log after a node of it has lost devices
                self.decide()
                for node in [min(named(one))[0] for *_, one in self.later if isinstance(one, JobAdmitted)][:1]:
                    self.add(NodeJoined(node=machine(int(node[1:]), b % 4)))
                self.append()
            case "mark":
                health = (Health.BAD, Health.SUSPECT, Health.HEALTHY)[b % 3]
                self.add(NodeMarked(node=node, health=health, devices=((), (1,))[b % 2]))
            case "submit" if len(self.submitted()) < 8:
                self.log.submit(f"j{len(self.submitted())}", 1 + a % 3, (1, 2, 4)[b % 3], at=self.at, priority=50 + b)
                assert violations(self.log.scheduler.state) == []
            case "decide":
                self.decide()
            case "append":
                self.append()
            case "queues":
                self.add(QueuesChanged(queues=({"path": "default"}, {"path": f"q{a}"})))
            case _ if job is not None:
                self.of_job(operation, job, node, b)
            case _:
                pass

    def of_job(self, operation: str, job: str, node: NodeId, b: int) -> None:
        row = self.log.scheduler.state.jobs.get(JobId(job))
        runs, stops = row is not None and row.phase == "running", row is not None and row.phase == "stopping"
        match operation:
            case "requeue" if runs or stops or self.refused(job):
                reason = (Reason.NODE_LOST, Reason.PAUSED, Reason.PREEMPTED_PRIORITY)[b % 3]
                self.add(JobRequeued(attempt=1, reason=reason), job)
            case "end":
                self.add(JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED), job)
            case "gang" | "grown" if runs:
                self.gangs += 1
                members = (InstanceId(ROLE, b % 4 + (10 if operation == "grown" else 0)),)
                bundle = BundleAsk(index=0, members=members, res=Res(cpus=1, gpus=1 + b % 2))
                request = GangRequest(gang=GangId(f"g{self.gangs}"), bundles=(bundle,))
                avoid = (node,) if operation == "gang" else ()
                self.add(GangAsked(request=request, avoid=avoid, lost=b % 2 == 0), job)
            case "release" if runs or stops:
                gang = GangId("all" if b % 3 == 0 else f"g{b % (self.gangs + 1)}")
                self.add(GangReleased(gang=gang, epoch=Epoch(1), gone=b % 2 == 0), job)
            case "start" if runs:
                granted = [r.event for r in self.log.records if r.job == job and isinstance(r.event, GangGranted)]
                for bundle in granted[-1].bundles if granted else ():
                    rank = b % 4
                    self.add(InstanceStarted(role=ROLE, rank=rank, epoch=Epoch(1), node=bundle.node, pid=7), job)
            case "stop" if runs:
                self.add(StopAsked(reason=Reason.STOPPED_BY_USER, grace_s=1.0), job)
            case "pause" if runs:
                self.add(PreemptAsked(reason=Reason.PAUSED), job)
            case "resume" if row is not None and row.phase == "paused" and not self.refused(job):
                self.add(JobQueued(), job)
            case "save":
                self.add(CheckpointSaved(n=b, path="c"), job)
            case _:
                pass

    def refused(self, job: str) -> bool:
        """Whether the last admission of a job was refused, so that its master ends what it began."""
        last = [r.event for r in self.log.records if r.job == job and isinstance(r.event, JobAdmitted | JobRequeued)]
        return bool(last) and isinstance(last[-1], JobAdmitted)


operations = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 7), st.integers(0, 11)), min_size=10, max_size=60
)
EXAMPLES = [25, pytest.param(1000 if DEEP else 100, marks=pytest.mark.slow)]


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("profile", ["default", "hived", "fifo"])
def test_every_drawn_log_leaves_a_state_that_agrees_with_itself_and_replays(profile: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(steps=operations)
    def agrees(steps: list[tuple[str, int, int]]) -> None:
        drawn = Drawn(profile)
        for one in steps:
            drawn.play(*one)
        replayed(drawn.log.records, get_profile(profile), requests_of)
        again = Scheduler(get_profile(profile), requests_of)
        for record in drawn.log.records:
            again.apply(record)
        assert again.decide(drawn.at) == drawn.log.scheduler.decide(drawn.at)

    agrees()


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("profile", ["default", "hived"])
def test_the_state_is_what_was_laid_out_last_and_the_events_since(profile: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(steps=operations)
    def agrees(steps: list[tuple[str, int, int]]) -> None:
        mirror = [State(())]
        lay_out, apply = State.with_cluster, events.apply

        def mirrored_layout(self: State, nodes: Sequence[Node], queues: Sequence[Queue]) -> State:
            new = lay_out(self, nodes, queues)
            mirror[0] = new.copy()
            return new

        def mirrored(state: State, event: events.Event, now: float) -> None:
            apply(state, event, now)
            apply(mirror[0], event, now)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(State, "with_cluster", mirrored_layout)
            patched.setattr(events, "apply", mirrored)
            drawn = Drawn(profile)
            for one in steps:
                drawn.play(*one)
                state = drawn.log.scheduler.state
                assert (mirror[0].digest(), mirror[0].shrunk) == (state.digest(), state.shrunk), one

    agrees()


@pytest.mark.parametrize("removed", [False, True], ids=["lost", "removed"])
def test_an_admission_that_came_after_the_loss_of_its_node_is_taken_back_with_a_record(removed: bool) -> None:
    drawn = Drawn("default")
    steps = [
        ("submit", 1, 2),
        ("decide", 0, 0),
        ("lose", 0, 0),
        *([("join", 3, 0)] if removed else []),
        ("append", 0, 0),
    ]
    for one in steps:
        drawn.play(*one)
    stale = drawn.log.records[-1]
    assert isinstance(stale.event, JobAdmitted)
    asked = drawn.log.decide(drawn.at)
    assert asked == [(JobId("j0"), PreemptAsked(reason=Reason.NODE_LOST, grace_s=0.0))]
    assert drawn.log.decide(drawn.at) == [], "once"
    drawn.add(JobRequeued(attempt=1, reason=Reason.NODE_LOST, counts=False), "j0")
    ((job, admitted),) = drawn.log.decide(drawn.at)
    assert job == "j0" and isinstance(admitted, JobAdmitted)
    assert {bundle.node for bundle in admitted.placement.bundles}.isdisjoint({"n0"})
    different = replayed(drawn.log.records, get_profile("default"), requests_of)["different"]
    assert [one["number"] for one in different] == [stale.number]


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("shrunk", [2, 0, None])
def test_devices_of_an_admission_that_were_gone_are_no_one_elses_when_they_come_back_before_the_job_has_stopped(
    shrunk: int | None, asked: bool
) -> None:
    drawn = Drawn("default")
    for one in [("submit", 0, 2), ("decide", 0, 0)]:
        drawn.play(*one)
    ((_, _, admitted),) = drawn.later
    assert isinstance(admitted, JobAdmitted)
    (node,) = {node for node, _ in named(admitted)}
    number = int(node[1:])
    drawn.add(NodeLost(node=node) if shrunk is None else NodeJoined(node=machine(number, shrunk)))
    if shrunk is None:  # and forgotten, as nothing is held there
        drawn.add(NodeJoined(node=machine((number + 1) % NODES, 4)))
    drawn.append()
    if asked:
        drawn.log.decide(drawn.at)
    drawn.add(NodeJoined(node=machine(number, 4)))
    assert set(drawn.held()[JobId("j0")]) == named(admitted)
    for i in range(4):
        drawn.log.submit(f"j{i + 1}", 1, 4, at=drawn.at)
    given = [event for _, event in drawn.log.decide(drawn.at) if isinstance(event, JobAdmitted)]
    assert len(given) == NODES - 1 and all(named(one).isdisjoint(named(admitted)) for one in given)
    drawn.add(JobRequeued(attempt=1, reason=Reason.NODE_LOST, counts=False), "j0")
    assert [job for job, event in drawn.log.decide(drawn.at) if isinstance(event, JobAdmitted)] == ["j0"]


def test_a_node_that_comes_back_with_fewer_cores_than_are_held_there_breaks_no_rule() -> None:
    drawn = Drawn("default")
    drawn.log.submit("j0", 4, 1, at=1.0)
    drawn.decide()
    ((_, _, admitted),) = drawn.later
    assert isinstance(admitted, JobAdmitted)
    (node,) = {node for node, _ in named(admitted)}
    drawn.add(NodeLost(node=node))
    drawn.add(NodeJoined(node=machine((int(node[1:]) + 1) % NODES, 4)))  # and it is forgotten
    drawn.append()
    drawn.add(NodeJoined(node=replace(machine(int(node[1:]), 4), cpus=2)))
    assert drawn.held()[JobId("j0")]
    drawn.decide()


@pytest.mark.parametrize(
    "events",
    [
        (NodeLost(node=NodeId("n0")),),
        (NodeLost(node=NodeId("n0")), NodeMarked(node=NodeId("n0"), health=Health.BAD)),
        (NodeLost(node=NodeId("n0")), NodeJoined(node=machine(9, 4)), NodeJoined(node=machine(0, 4))),
    ],
    ids=["lost", "lost and marked", "lost and back"],
)
def test_what_is_laid_out_follows_from_the_log_and_not_from_when_it_was_read(events: tuple[Event, ...]) -> None:
    log = Log("default")
    for event in (*(NodeJoined(node=machine(i, 4)) for i in range(NODES)), *events):
        log.add(event, None, 0.0)
    read, unread = (Scheduler(get_profile("default"), requests_of) for _ in range(2))
    for record in log.records:
        read.apply(record)
        assert read.state is not None
        unread.apply(record)
    assert [one.id for one in read.state.nodes] == [one.id for one in unread.state.nodes]
    assert read.state.node_health.tolist() == unread.state.node_health.tolist()


def test_a_mark_on_a_lost_node_does_not_bring_it_back() -> None:
    log = Log("default")
    for event in (
        *(NodeJoined(node=machine(i, 4)) for i in range(2)),
        NodeLost(node=NodeId("n0")),
        NodeMarked(node=NodeId("n0"), health=Health.HEALTHY),
    ):
        log.add(event, None, 0.0)
    log.submit("wide", 2, 4)
    assert not any(isinstance(event, JobAdmitted) for _, event in log.decide(1.0))


def test_a_gang_that_was_granted_after_the_loss_of_its_node_holds_nothing_and_is_asked_for_again() -> None:
    drawn = Drawn("default")
    for one in [("submit", 0, 2), ("decide", 0, 0), ("append", 0, 0), ("grown", 0, 0), ("decide", 0, 0)]:
        drawn.play(*one)
    ((_, _, granted),) = drawn.later
    assert isinstance(granted, GangGranted)
    node = granted.bundles[0].node
    for one in [("lose", int(node[1:]), 0), ("join", 3, 0), ("append", 0, 0)]:
        drawn.play(*one)
    row = drawn.log.scheduler.state.jobs[row_of(JobId("j0"), granted.gang)]
    assert (row.phase, row.held) == ("paused", ())
    assert drawn.log.decide(drawn.at) == []
    drawn.add(GangReleased(gang=granted.gang, epoch=Epoch(1), gone=True), "j0")
    drawn.play("grown", 0, 0)
    ((_, again),) = drawn.log.decide(drawn.at)
    assert isinstance(again, GangGranted) and again.bundles[0].node != node


def lived_log(profile: str) -> Log:
    """A log of a service: three jobs, a preemption, a node out of order, one that waits."""
    log = with_nodes(profile)
    log.submit("low", 2, 3)
    log.decide(1.0)
    log.submit("high", 1, 4, at=2, priority=90)
    log.decide(2.0)
    log.add(JobRequeued(attempt=1, reason=Reason.PREEMPTED_PRIORITY, counts=False), "low", 4.0)
    log.decide(4.1)
    log.add(NodeMarked(node=NodeId("r0n1"), health=Health.DRAINED), at=5.0)
    log.submit("more", 1, 2, at=6)
    log.decide(6.0)
    return log


def test_a_log_replays_to_the_decisions_that_are_in_it_and_another_policy_is_seen_to_differ() -> None:
    records = lived_log("default").records
    found = replayed(records, get_profile("default"), requests_of)
    assert (found["same"], found["decisions"], found["different"]) == (7, 7, [])
    other = replayed(records, get_profile("fifo"), requests_of)
    assert next((one["job"], one["recorded"]["kind"]) for one in other["different"]) == ("low", "PreemptAsked")


@pytest.mark.parametrize("reason", [Reason.SERVICE_DOWN, Reason.NODE_REMOVED, Reason.PAUSED])
def test_a_stop_that_the_service_asked_for_is_no_decision_of_a_replay(reason: Reason) -> None:
    log = with_nodes("default")
    log.submit("held", 2, 4)
    log.decide(1.0)
    log.add(PreemptAsked(reason=reason), "held", 2.0)
    log.add(JobRequeued(attempt=1, reason=reason, counts=False), "held", 3.0)
    log.decide(4.0)
    found = replayed(log.records, get_profile("default"), requests_of)
    admissions = 1 if reason is Reason.PAUSED else 2
    assert (found["same"], found["decisions"], found["different"]) == (admissions, admissions, [])


@pytest.mark.parametrize("event", [StopAsked(grace_s=20.0), PreemptAsked(reason=Reason.PAUSED)])
def test_an_estimate_counts_on_what_a_stopped_job_gives_back_and_not_on_its_return(event: Event) -> None:
    log = with_nodes("default")
    log.submit("held", 2, 4, time_limit_s=3600.0)
    log.decide(1.0)
    log.submit("next", 2, 4, at=2.0, time_limit_s=3600.0)
    log.decide(3.0)
    log.add(event, "held", 100.0)
    ((job, waits),) = log.decide(100.0)
    assert (job, isinstance(waits, JobWaits) and waits.reason) == ("next", Reason.AWAITING_RELEASE)
    found = Forecast(log.scheduler.state, log.scheduler.profile, 100.0).play(SystemClock()).of(JobId("next"))
    assert found.p50 == 130.0


def test_a_decision_that_was_tampered_with_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = lived_log("default")
    rows = [
        {"number": r.number, "job": r.job, "seq": r.seq, "at": r.at, "event": event_to_json(r.event)}
        for r in log.records
    ]
    moved = next(row for row in rows if row["event"]["kind"] == "JobAdmitted" and row["job"] == "high")
    moved["event"]["placement"]["gangs"][0]["bundles"][0]["node"] = "r0n1"
    assert moved["event"] != event_to_json(log.records[moved["number"] - 1].event)
    (tmp_path / "log.json").write_text(json.dumps({"records": rows}))
    found = sim_replay(tmp_path / "log.json", "default")
    assert found["different"][0]["number"] == moved["number"]
    assert app.call(["sim", "run", "--log", str(tmp_path / "log.json")]) == 1
    shown = capsys.readouterr().out
    assert "high: recorded JobAdmitted r0n1:0,1,2,3, here JobAdmitted r0n0:0,1,2,3" in shown
    assert f"{found['same']} of {found['decisions']} decisions the same under default, in " in shown
    status = app.call(["sim", "run", "--log", str(tmp_path / "log.json"), "--profile", "fifo"])
    assert (
        status == 1
        and "low: recorded PreemptAsked PREEMPTED_PRIORITY for high, here no decision" in capsys.readouterr().out
    )
    (tmp_path / "log.json").write_text("[]")
    with pytest.raises(BadInput, match="not a recorded log"):
        sim_replay(tmp_path / "log.json", "default")
