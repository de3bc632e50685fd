"""The live scheduler says what to append, changes nothing by itself, and replays to the same state."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from cluster_makers import ask, node, slot, state

from rota.cluster.core import admission
from rota.cluster.core.cycle import step
from rota.cluster.core.events import JobArrived, Tick
from rota.cluster.core.explain import explain
from rota.cluster.core.guarded import PASSES_MAX
from rota.cluster.core.jobs import Allocations, LiveJob, asked
from rota.cluster.core.state import InvariantBroken, State
from rota.cluster.core.txn import Txn
from rota.cluster.live import Scheduler
from rota.cluster.policies import get_profile
from rota.cluster.policies.basic import Fit
from rota.cluster.sim.forecast import Forecast
from rota.cluster.sim.runs import replayed
from rota.runtime.clock import SystemClock
from rota.spec.events import (
    CheckpointSaved,
    DowntimePassed,
    Event,
    GangAsked,
    GangGranted,
    GangReleased,
    GangWaits,
    InstanceStarted,
    JobAdmitted,
    JobChanged,
    JobEnded,
    JobQueued,
    JobRequeued,
    JobSubmitted,
    JobWaits,
    MoveAsked,
    NodeJoined,
    NodeLost,
    NodeMarked,
    PreemptAsked,
    QueuesChanged,
    Record,
)
from rota.spec.gang import BundleAsk, GangRequest
from rota.spec.ids import Epoch, GangId, InstanceId, JobId, NodeId, RoleName
from rota.spec.job import JobSpec, RoleSpec
from rota.spec.queue import Queue, queue_from_json
from rota.spec.reasons import Reason
from rota.spec.resources import LOST_BY, Health, Res, pretend_nodes
from rota.spec.states import JobState


def requests_of(spec: JobSpec) -> tuple[GangRequest, ...]:
    members = [(role, rank) for role in spec.roles for rank in range(role.replicas_max)]
    bundles = tuple(
        BundleAsk(index=i, members=(InstanceId(role.name, rank),), res=role.res)
        for i, (role, rank) in enumerate(members)
    )
    return (GangRequest(gang=GangId("all"), bundles=bundles),)


def spec(name: str, count: int, gpus: float, **more: object) -> JobSpec:
    role = RoleSpec(
        name=RoleName("w"), run=("true",), replicas_min=count, replicas_max=count, res=Res(cpus=1, gpus=gpus)
    )
    return JobSpec(name=name, roles=(role,), **more)  # type: ignore[arg-type]


class Log:
    """A log that is applied to a scheduler record by record, and kept."""

    def __init__(self, profile: str = "fifo") -> None:
        self.profile = profile
        self.scheduler = Scheduler(get_profile(profile), requests_of)
        self.records: list[Record] = []

    def add(self, event: Event, job: str | None = None, at: float = 0.0) -> None:
        number = len(self.records) + 1
        record = Record(number=number, job=JobId(job) if job else None, seq=number, at=at, event=event)
        self.records.append(record)
        self.scheduler.apply(record)

    def submit(self, name: str, count: int, gpus: float, at: float = 0.0, **more: object) -> None:
        self.add(JobSubmitted(spec=spec(name, count, gpus, **more)), name, at)
        self.add(JobQueued(), name, at)

    def decide(self, now: float) -> list[tuple[JobId, Event]]:
        outcome = self.scheduler.decide(now)
        assert outcome.broken == ()
        found = list(outcome.events)
        for job, event in found:
            self.add(event, job, now)
        return found


def with_nodes(profile: str = "fifo") -> Log:
    log = Log(profile)
    for one in pretend_nodes("1x2x4", host="real"):
        log.add(NodeJoined(node=one))
    return log


def test_a_job_is_admitted_with_exact_devices_and_the_next_one_learns_why_it_waits_once() -> None:
    log = with_nodes()
    log.submit("one", 2, 3)
    log.submit("two", 1, 2, at=1)
    (job, admitted), (_, waits) = log.decide(2.0)
    assert isinstance(admitted, JobAdmitted)
    assert (job, admitted.attempt) == ("one", 1)
    assert [(b.node, b.host, b.devices) for b in admitted.placement.bundles] == [
        ("r0n0", "real", (0, 1, 2)),
        ("r0n1", "real", (0, 1, 2)),
    ]
    assert isinstance(waits, JobWaits)
    assert waits.reason is Reason.FRAGMENTED
    assert log.decide(3.0) == []


def test_deciding_changes_nothing_until_the_records_come_back() -> None:
    log = with_nodes()
    log.submit("one", 1, 4)
    before = log.scheduler.state.digest()
    assert log.scheduler.decide(1.0) == log.scheduler.decide(1.0)
    assert log.scheduler.state.digest() == before


def test_every_prefix_of_the_log_replays_to_the_same_state() -> None:
    log = with_nodes("default")
    digests = []
    log.submit("one", 1, 4)
    log.decide(1.0)
    log.submit("two", 2, 2, at=2, priority=60)
    log.decide(2.0)
    log.add(NodeMarked(node=NodeId("r0n1"), health=Health.BAD, devices=(3,)), at=3.0)
    log.add(JobRequeued(attempt=1, reason=Reason.NODE_LOST), "one", 4.0)
    log.decide(5.0)
    log.add(JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED), "two", 6.0)
    for length in range(len(log.records) + 1):
        twin = Scheduler(get_profile("default"), requests_of)
        for record in log.records[:length]:
            twin.apply(record)
        digests.append(twin.state.digest())
    assert digests[-1] == log.scheduler.state.digest()


def test_a_second_attempt_has_the_next_number_and_epoch() -> None:
    log = with_nodes()
    log.submit("one", 1, 1)
    log.decide(1.0)
    log.add(JobRequeued(attempt=1, reason=Reason.EXIT_NONZERO), "one", 2.0)
    ((_, admitted),) = log.decide(3.0)
    assert isinstance(admitted, JobAdmitted)
    assert (admitted.attempt, admitted.epoch) == (2, 2)


def test_a_higher_priority_of_the_same_queue_takes_devices_and_starts_when_they_are_free() -> None:
    log = with_nodes("default")
    log.submit("low", 2, 4)
    log.decide(1.0)
    log.submit("high", 1, 4, at=2, priority=90)
    events = dict(log.decide(2.0))
    asked = events[JobId("low")]
    assert isinstance(asked, PreemptAsked)
    assert (asked.for_job, asked.reason) == ("high", Reason.PREEMPTED_PRIORITY)
    assert log.decide(3.0) == []
    log.add(JobRequeued(attempt=1, reason=asked.reason, counts=False), "low", 4.0)
    assert [job for job, event in log.decide(4.0) if isinstance(event, JobAdmitted)] == ["high"]


def test_a_lost_node_keeps_what_runs_there_in_the_books_and_takes_no_new_work() -> None:
    log = with_nodes()
    log.submit("one", 1, 4)
    log.decide(1.0)
    log.add(NodeLost(node=NodeId("r0n0")), at=2.0)
    log.add(NodeJoined(node=pretend_nodes("1x3x4", host="real")[2]), at=3.0)
    log.submit("two", 2, 4, at=4)
    assert {b.node for _, e in log.decide(4.0) if isinstance(e, JobAdmitted) for b in e.placement.bundles} == {
        "r0n1",
        "r0n2",
    }


def test_a_node_that_comes_back_smaller_than_its_jobs_takes_no_more_of_what_is_short_and_others_go_on() -> None:
    log = Log("default")
    log.add(NodeJoined(node=node("n", 8, cpus=8)))
    for name in ("one", "two", "three"):
        log.submit(name, 1, 1)
    log.decide(1.0)
    log.add(NodeJoined(node=node("n", 8, cpus=2)), at=2.0)
    log.submit("beside", 1, 1, at=3.0)
    assert [event.reason for _, event in log.decide(3.0) if isinstance(event, JobWaits)] == [Reason.CPU_OR_MEMORY]
    log.add(NodeJoined(node=node("m", 8, cpus=1)), at=4.0)
    assert [e.placement.bundles[0].node for _, e in log.decide(4.0) if isinstance(e, JobAdmitted)] == ["m"]
    log.add(NodeJoined(node=node("n", 8, cpus=8)), at=5.0)
    assert not log.decide(5.0) and not log.scheduler.state.shrunk, "it is whole again"


def test_a_node_that_has_less_memory_than_its_jobs_hold_takes_work_that_asks_none() -> None:
    log, res = Log("default"), Res(cpus=1, memory_bytes=64 * 2**30)
    log.add(NodeJoined(node=node("n", 8)))
    role = RoleSpec(name=RoleName("w"), run=("true",), replicas_min=1, replicas_max=1, res=res)
    log.add(JobSubmitted(spec=JobSpec(name="one", roles=(role,))), "one")
    log.add(JobQueued(), "one")
    log.decide(1.0)
    log.add(NodeJoined(node=replace(node("n", 8), memory_bytes=2**30)), at=2.0)
    log.submit("two", 1, 1, at=3.0)
    assert log.scheduler.state.shrunk
    assert [job for job, event in log.decide(3.0) if isinstance(event, JobAdmitted)] == ["two"]


def test_after_a_restart_the_reason_of_now_is_known_before_the_first_decision() -> None:
    log = Log("kai")
    log.add(QueuesChanged(queues=({"path": "default", "guaranteed": {"gpus": 8}},)))
    log.add(NodeJoined(node=node("n", 4)))
    for at, name in enumerate(("one", "two"), 1):
        log.submit(name, 1, 4, at=float(at), labels=(("rota.preemptible", "false"),))
        log.decide(float(at))
    again = Scheduler(get_profile("kai"), requests_of)
    for record in log.records:
        again.apply(record)
    for scheduler in (log.scheduler, again):
        wait = scheduler.wait_of(JobId("two"), 3.0)
        assert wait is not None and wait.reason is Reason.NO_FREE_DEVICES


def test_what_can_never_run_is_refused_with_numbers_and_the_nearest_request() -> None:
    log = with_nodes()
    short = log.scheduler.infeasible(spec("x", 3, 4))
    assert short is not None
    assert "asks 12 GPUs at once" in short.text
    assert short.nearest[0]["value"] == 2
    assert log.scheduler.infeasible(spec("x", 2, 4)) is None


def test_the_empty_cluster_is_laid_out_once_until_a_node_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out = []
    twin = admission.empty_twin
    monkeypatch.setattr(admission, "empty_twin", lambda *given: laid_out.append(given) or twin(*given))
    log = with_nodes()
    for _ in range(3):
        assert log.scheduler.infeasible(spec("x", 2, 4)) is None
    assert len(laid_out) == 1
    first, *_ = pretend_nodes("1x2x4", host="real")
    log.add(NodeLost(node=first.id))
    assert log.scheduler.infeasible(spec("x", 2, 4)) is not None
    log.add(NodeJoined(node=first))
    assert log.scheduler.infeasible(spec("x", 2, 4)) is None
    assert len(laid_out) == 3


def test_every_change_that_is_listed_makes_the_job_start() -> None:
    log = with_nodes()
    log.submit("one", 1, 3)
    log.decide(1.0)
    log.submit("two", 2, 4, at=2)
    log.decide(2.0)
    answer = log.scheduler.explain(JobId("two"), 3.0)
    assert answer is not None
    shown = answer.to_json()
    assert shown["why"]["code"] == "NO_FREE_DEVICES"
    counts = {c["change"]["set"]: c["change"]["value"] for c in shown["would_start_now_with"]}
    assert counts == {"roles.w.replicas": 1, "roles.w.resources.gpus": 2}
    assert log.scheduler.explain_spec(spec("new", 2, 5), 3.0, "ann").starts_now is False


def test_on_a_cluster_of_cores_alone_a_wait_counts_cores_and_every_offer_works() -> None:
    log = Log("default")
    log.add(NodeJoined(node=node("n", 0, cpus=8)))
    log.add(QueuesChanged(queues=({"path": "a", "limit": {"gpus": 0, "cpus": 7}}, {"path": "b"})))
    log.submit("runs", 6, 0, queue="a")
    log.submit("long", 1, 0, at=1, queue="b")
    log.decide(1.0)
    log.submit("waits", 2, 0, at=2, queue="b")
    log.submit("limited", 1, 0, at=2, queue="a", priority=40)
    log.decide(3.0)

    def offers(job: str) -> tuple[str, list[str]]:
        found = log.scheduler.explain(JobId(job), 4.0)
        assert found is not None and found.why is not None
        return found.why.text, [f"{one['text']}: {one['cost']}" for one in found.would_start_now_with]

    assert offers("waits")[0] == "Needs 2 cores; 0 are free and 8 in use.", "as it is now, not as it was at the pass"
    log.add(JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED), "limited", 4.0)
    text, found = offers("waits")
    assert text == "Needs 2 cores; 1 is free and 7 in use."
    assert found[:2] == ["priority 51 instead of 50: preempts long first", "1 instead of 2 instances of w: none"]
    log.add(JobChanged(changes={"priority": 51}), "waits", 5.0)
    assert [job for job, event in log.decide(5.0) if isinstance(event, PreemptAsked)] == ["long"]
    for job in ("waits", "long"):
        log.add(JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED), job, 6.0)
    log.submit("more", 2, 0, at=7, queue="a")
    assert "queue b instead of a: the share of b" in offers("more")[1]
    log.add(JobChanged(changes={"queue": "b"}), "more", 8.0)
    assert [job for job, event in log.decide(8.0) if isinstance(event, JobAdmitted)] == ["more"]


def test_a_limit_of_a_queue_holds_for_all_below_it() -> None:
    log = with_nodes()
    queues = ({"path": "team", "limit": {"gpus": 4}}, {"path": "team/a"}, {"path": "team/b"})
    log.add(QueuesChanged(queues=queues))
    log.submit("one", 1, 3, queue="team/a")
    log.submit("two", 1, 2, at=1, queue="team/b")
    events = dict(log.decide(2.0))
    waits = events[JobId("two")]
    assert isinstance(waits, JobWaits)
    assert (waits.reason, waits.fields["queue"]) == (Reason.QUOTA_LIMIT, "team")
    assert log.scheduler.find_queue("team") is not None
    assert log.scheduler.find_queue("team/a") is None
    assert log.scheduler.find_queue("team/q") == "queue 'team/q' does not exist; did you mean 'team/b'?"
    assert log.scheduler.find_queue("x") == "queue 'x' does not exist; queues: team, team/a, team/b"
    assert queue_from_json({"path": "q", "limit": {"gpus": 4}}).limit == Res(cpus=0, gpus=4)


def test_a_user_at_the_limit_of_a_queue_holds_up_nobody_else_in_it() -> None:
    log = with_nodes()
    log.add(QueuesChanged(queues=({"path": "team", "user_limit": {"gpus": 3}}, {"path": "team/a"}, {"path": "team/b"})))
    for name, queue, user in (("one", "a", "ann"), ("two", "b", "ann"), ("three", "b", "bob")):
        log.add(JobSubmitted(spec=spec(name, 1, 2, queue=f"team/{queue}"), user=user), name)
        log.add(JobQueued(), name)
    events = dict(log.decide(1.0))
    waits = events.pop(JobId("two"))
    assert isinstance(waits, JobWaits) and waits.reason is Reason.USER_LIMIT
    assert waits.text == "In queue team user ann has 2 GPUs of a limit of 3 GPUs; the job asks 2 GPUs."
    assert {job for job, event in events.items() if isinstance(event, JobAdmitted)} == {"one", "three"}
    answer = log.scheduler.explain(JobId("two"), 2.0)
    assert answer is not None
    offer = next(one["change"] for one in answer.would_start_now_with if "user" in one["text"])
    assert offer == {"set": "queues.team.user_limit.gpus", "value": 4.0}
    short = log.scheduler.infeasible(spec("x", 2, 2, queue="team/a"))
    assert (
        short is not None and short.text == "the job asks 4 GPUs in all; there is a limit of 3 GPUs for a user of team"
    )
    log.add(QueuesChanged(queues=({"path": "team", "user_limit": {"gpus": 4}}, {"path": "team/a"}, {"path": "team/b"})))
    assert [job for job, event in log.decide(3.0) if isinstance(event, JobAdmitted)] == ["two"]


def test_an_equal_job_that_waits_gets_the_reason_of_its_line_and_a_higher_limit_is_offered() -> None:
    queues = (Queue(path="default", limit=Res(cpus=0, gpus=4)),)
    s, fifo = state(node("n", 8), queues=queues), get_profile("fifo")
    step(s, JobArrived(ask=ask("run", slot(4))), fifo, 0.0)
    step(s, JobArrived(ask=ask("one", slot(2), at=1)), fifo, 1.0)
    step(s, JobArrived(ask=ask("two", slot(2), at=2)), get_profile("drf"), 2.0)
    shown = explain(s, get_profile("drf"), JobId("two"), 3.0).to_json()
    assert shown["why"]["code"] == "QUOTA_LIMIT"
    offer = explain(s, fifo, JobId("one"), 3.0).to_json()["would_start_now_with"][0]
    assert offer["change"] == {"set": "queues.default.limit.gpus", "value": 6.0}
    assert offer["text"] == "a limit of 6 GPUs for queue default instead of 4 GPUs"


def test_of_a_job_that_grew_only_what_it_does_not_need_is_taken_and_it_keeps_its_own() -> None:
    log = with_nodes("default")
    log.submit("grown", 1, 4)
    log.decide(1.0)
    more = BundleAsk(index=0, members=(InstanceId(RoleName("w"), 1),), res=Res(cpus=1, gpus=4))
    log.add(GangAsked(request=GangRequest(gang=GangId("w-1"), bundles=(more,))), "grown", 2.0)
    assert [type(event) for _, event in log.decide(3.0)] == [GangGranted]
    log.add(CheckpointSaved(n=1, path="c"), "grown", 50.0)
    log.submit("high", 1, 4, at=60, priority=90)
    ((_, taken),) = [(job, event) for job, event in log.decide(61.0) if isinstance(event, PreemptAsked)]
    assert (taken.gang, taken.for_job) == ("w-1", "high")
    assert log.decide(62.0) == [] and log.scheduler.state.jobs[JobId("grown")].phase == "running"
    log.add(GangReleased(gang=GangId("w-1"), epoch=Epoch(1), gone=True), "grown", 63.0)
    assert [(job, type(event)) for job, event in log.decide(64.0)] == [("high", JobAdmitted)]
    assert replayed(log.records, get_profile("default"), requests_of)["different"] == []


@pytest.mark.parametrize("profile", ["default", "gandiva", "kai", "kueue", "las", "yarn"])
def test_of_a_job_that_grew_and_then_moved_only_what_it_can_spare_is_taken(profile: str) -> None:
    log = Log(profile)
    for one in pretend_nodes("1x4x4", host="real"):
        log.add(NodeJoined(node=one))
    log.add(QueuesChanged(queues=({"path": "a", "guaranteed": {"gpus": 4}}, {"path": "b", "guaranteed": {"gpus": 12}})))
    log.submit("grown", 1, 2, queue="a")
    log.decide(1.0)
    for gang, rank, gpus, left in (("w-1", 1, 4, ()), ("moved", 0, 2, (NodeId("r0n0"),))):
        bundle = BundleAsk(index=0, members=(InstanceId(RoleName("w"), rank),), res=Res(cpus=1, gpus=gpus))
        asked = GangAsked(request=GangRequest(gang=GangId(gang), bundles=(bundle,)), avoid=left)
        log.add(asked, "grown", 2.0)
        assert [type(event) for _, event in log.decide(3.0)] == [GangGranted]
    log.add(GangReleased(gang=GangId("all"), epoch=Epoch(2), gone=True), "grown", 4.0)
    log.submit("other", 2, 4, at=5, queue="b")
    log.decide(6.0)
    held = {row.ask.id: sum(len(slot.devices) for slot in row.held) for row in log.scheduler.state.holders()}
    assert held == {"grown": 2, "other": 8, "grown~w-1": 4}
    log.submit("high", 1, 4, at=40_000, priority=90, queue="b")
    taken = [(job, event.gang) for job, event in log.decide(40_001.0) if isinstance(event, PreemptAsked)]
    assert taken == [("grown", "w-1")], "stopping its first gang would cost less, and all the rest of it"


def test_a_drained_node_is_named_as_what_binds_and_its_return_is_offered_and_works() -> None:
    log = with_nodes("drf")
    log.add(NodeMarked(node=NodeId("r0n1"), health=Health.DRAINED), at=1.0)
    log.submit("big", 2, 4, at=2)
    ((_, waits),) = log.decide(2.0)
    assert isinstance(waits, JobWaits)
    assert (waits.reason, waits.fields["nodes"]) == (Reason.NODES_DRAINED, {"r0n1": "drained"})
    assert waits.text == "Needs 8 GPUs; 4 are free, 4 take no new work: r0n1 is drained."
    answer = log.scheduler.explain(JobId("big"), 3.0)
    assert answer is not None
    assert answer.would_start_now_with[0]["change"] == {"set": "nodes.r0n1", "value": "undrain"}
    log.submit("cores", 1, 0, at=3, queue="default")
    log.add(NodeMarked(node=NodeId("r0n0"), health=Health.DRAINED), at=4.0)
    (wait,) = (event for job, event in log.decide(4.0) if job == "cores")
    assert isinstance(wait, JobWaits) and "r0n0 is drained, r0n1 is drained" in wait.text
    log.add(NodeMarked(node=NodeId("r0n1"), health=Health.HEALTHY), at=5.0)
    log.add(NodeMarked(node=NodeId("r0n0"), health=Health.HEALTHY), at=5.0)
    assert {job for job, event in log.decide(5.0) if isinstance(event, JobAdmitted)} == {"big", "cores"}


def test_a_cordoned_node_binds_a_job_that_needs_all_nodes_though_others_hold_devices() -> None:
    log = with_nodes("default")
    log.submit("low", 1, 4, priority=10)
    log.decide(1.0)
    log.add(NodeMarked(node=NodeId("r0n1"), health=Health.CORDONED), at=2.0)
    log.submit("whole", 2, 4, at=3, priority=90, time_limit_s=600.0)
    ((_, waits),) = log.decide(4.0)
    assert isinstance(waits, JobWaits)
    text = "Needs 8 GPUs; the nodes that take new work have 4: r0n1 is cordoned."
    assert (waits.reason, waits.text, waits.fields["nodes"]) == (Reason.NODES_DRAINED, text, {"r0n1": "cordoned"})
    scheduler = log.scheduler
    assert Forecast(scheduler.state, scheduler.profile, 5.0).play(SystemClock()).of(JobId("whole")).p50 is None
    found = scheduler.explain(JobId("whole"), 5.0)
    assert found is not None
    (offer,) = [one for one in found.would_start_now_with if one["change"].get("value") == "undrain"]
    assert (offer["change"].get("set"), offer.get("victims")) == ("nodes.r0n1", ["low"])


def test_jobs_on_a_drained_node_are_asked_once_by_when_to_leave_it_and_that_they_may_stay_when_it_is_used_again() -> (
    None
):
    log = with_nodes("fifo")
    log.submit("here", 1, 4, at=1)
    log.decide(1.0)
    home = log.scheduler.state.nodes[log.scheduler.state.jobs[JobId("here")].held[0].node].id
    log.add(NodeMarked(node=home, health=Health.DRAINED), at=2.0)
    assert log.decide(2.0) == [], "a cordon moves nobody"
    log.add(NodeMarked(node=home, health=Health.CORDONED), at=2.0)
    assert log.decide(2.0) == []
    log.add(NodeMarked(node=home, health=Health.DRAINED, notice_s=60.0), at=3.0)
    for due_at in (63.0, None):
        assert log.decide(4.0) == [(JobId("here"), MoveAsked(node=home, due_at=due_at))]
        assert log.decide(5.0) == []
        log.add(NodeMarked(node=home, health=Health.HEALTHY), at=5.0)
    log.add(NodeMarked(node=home, health=Health.DRAINED, notice_s=60.0), at=6.0)
    log.decide(6.0)
    log.add(JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED), job="here", at=7.0)
    log.add(NodeMarked(node=home, health=Health.HEALTHY), at=8.0)
    assert log.decide(9.0) == []


def test_the_label_of_a_job_names_its_data_and_its_admission_says_how_many_nodes_had_it() -> None:
    log = with_nodes()
    log.submit("fill", 1, 3)
    log.submit("reader", 1, 2, at=1, labels=(("rota.data", "imagenet, c4"),))
    log.decide(2.0)
    log.submit("again", 1, 1, at=3, labels=(("rota.data", "c4"),))
    ((_, admitted),) = log.decide(4.0)
    assert isinstance(admitted, JobAdmitted)
    assert [slot.node for slot in admitted.placement.bundles] == ["r0n1"] and admitted.why["nodes_with_data"] == 1


def test_who_left_his_first_place_for_good_holds_only_the_new_one() -> None:
    log = with_nodes()
    log.submit("runs", 1, 4)
    log.decide(1.0)
    (request,) = requests_of(spec("runs", 1, 4))
    for number, left in enumerate(("r0n0", "r0n1", "r0n0")):
        gang, before = GangId(f"drained-{number}"), GangId(f"drained-{number - 1}" if number else "all")
        log.add(GangAsked(request=replace(request, gang=gang), avoid=(NodeId(left),)), "runs", 10.0 * number + 2)
        (granted,) = [event for _, event in log.decide(10.0 * number + 3) if isinstance(event, GangGranted)]
        log.add(GangReleased(gang=before, epoch=Epoch(1)), "runs", 10.0 * number + 4)  # it is made again: still held
        assert not log.scheduler.state.dev_milli.any()
        log.add(GangReleased(gang=before, epoch=Epoch(2), gone=True), "runs", 10.0 * number + 5)
        (row,) = log.scheduler.state.holders()
        (there,) = {bundle.node for bundle in granted.bundles}
        assert there != left and {log.scheduler.state.nodes[slot.node].id for slot in row.held} == {there}
        assert int(log.scheduler.state.dev_milli.sum()) == 4000
    log.submit("next", 1, 4, at=50)
    assert [type(event) for _, event in log.decide(51.0)] == [JobAdmitted]
    log.add(JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED), "runs", 60.0)
    assert int(log.scheduler.state.dev_milli.sum()) == 4000


def test_a_job_that_lost_a_node_gets_the_spare_that_nobody_else_gets() -> None:
    log = Log()
    log.scheduler = Scheduler(replace(get_profile("fifo"), spares=1), requests_of)
    for one in pretend_nodes("1x2x4", host="real"):
        log.add(NodeJoined(node=one))
    log.submit("runs", 1, 4)
    log.decide(1.0)
    log.submit("waits", 1, 4, at=2)
    ((_, waits),) = log.decide(3.0)
    assert isinstance(waits, JobWaits) and "Held back for failover: r0n1." in str(waits)
    (request,) = requests_of(spec("runs", 1, 4))
    log.add(GangAsked(request=replace(request, gang=GangId("more")), avoid=(NodeId("r0n0"),)), "runs", 4.0)
    granted = [event for _, event in log.decide(5.0) if isinstance(event, GangGranted)]
    assert [slot.node for event in granted for slot in event.bundles] == ["r0n1"]


@pytest.mark.parametrize("devices", [8, 4])
@pytest.mark.parametrize("back", ["joined", "healthy"])
def test_a_node_that_was_lost_and_is_back_is_given_to_those_who_wait_for_another_in_its_place(
    back: str, devices: int
) -> None:
    log = Log()
    home = pretend_nodes(f"1x1x{devices}", host="real")[0]
    log.add(NodeJoined(node=home))
    log.submit("runs", 1, 4)
    log.decide(1.0)
    (request,) = requests_of(spec("runs", 1, 4))
    asked = GangAsked(request=replace(request, gang=GangId("moved-2")), avoid=(home.id,), lost=True)
    log.add(asked, "runs", 4.0)
    assert [type(event) for _, event in log.decide(5.0)] == [GangWaits]
    log.add(GangReleased(gang=GangId("all"), epoch=Epoch(1), gone=True), "runs", 6.0)
    for mark in log.scheduler.decide(6.0).marks:
        assert mark.by == LOST_BY, "so that the service takes it back once the engine has the node again"
        log.add(mark, at=6.0)
    assert not [event for _, event in log.decide(7.0) if isinstance(event, GangGranted)], "it is in doubt"
    log.add(NodeJoined(node=home) if back == "joined" else NodeMarked(node=home.id, health=Health.HEALTHY), at=8.0)
    granted = [event for _, event in log.decide(9.0) if isinstance(event, GangGranted)]
    assert [slot.node for event in granted for slot in event.bundles] == [home.id]
    assert log.scheduler.decide(10.0).marks == (), "and it is not in doubt again"
    assert [(row.ask.id, row.phase, len(row.held)) for row in log.scheduler.state.holders()] == [("runs", "running", 1)]
    assert int(log.scheduler.state.dev_milli.sum()) == 1000 * (devices - 4)


def test_a_job_that_waits_for_another_node_holds_nothing_and_is_admitted_only_after_its_requeue() -> None:
    log = Log()
    home = pretend_nodes("1x1x4", host="real")[0]
    log.add(NodeJoined(node=home))
    log.submit("runs", 1, 4)
    log.decide(1.0)
    (request,) = requests_of(spec("runs", 1, 4))
    moved = GangId("moved-2")
    log.add(GangAsked(request=replace(request, gang=moved), avoid=(home.id,)), "runs", 2.0)
    log.add(GangReleased(gang=GangId("all"), epoch=Epoch(1), gone=True), "runs", 3.0)
    assert int(log.scheduler.state.dev_milli.sum()) == 4000
    assert [type(event) for _, event in log.decide(4.0)] == [GangWaits]
    log.add(GangReleased(gang=moved, epoch=Epoch(2)), "runs", 5.0)
    assert log.decide(6.0) == []
    log.add(JobRequeued(attempt=1, reason=Reason.NODE_LOST), "runs", 7.0)
    assert [type(event) for _, event in log.decide(8.0)] == [JobAdmitted]
    assert int(log.scheduler.state.dev_milli.sum()) == 0


def test_who_made_room_for_another_cools_down_and_who_was_paused_may_go_on_at_once() -> None:
    log = with_nodes()
    log.scheduler.profile = replace(log.scheduler.profile, cool_down_s=100.0)
    for at, (name, reason) in enumerate((("paused", Reason.PAUSED), ("moved", Reason.PREEMPTED_PRIORITY))):
        log.submit(name, 1, 4, at=at)
        log.decide(10.0)
        log.add(PreemptAsked(reason=reason, grace_s=1.0), name, 20.0)
        log.add(JobRequeued(attempt=1, reason=reason), name, 30.0)
        log.add(JobQueued(), name, 40.0)
        found = dict(log.decide(50.0))
        assert isinstance(found[JobId(name)], JobAdmitted if name == "paused" else JobWaits)
    assert isinstance(wait := found[JobId("moved")], JobWaits) and (wait.reason, wait.fields) == (
        Reason.COOL_DOWN,
        {"until": 130.0},
    )


@pytest.mark.parametrize(
    ("priority", "label", "stopped"),
    [(99, "true", True), (100, "true", False), (99, "false", False), (-1, "false", True)],
)
def test_work_of_priority_100_is_never_stopped_for_others_and_opportunistic_work_always(
    priority: int, label: str, stopped: bool
) -> None:
    log = with_nodes("default")
    promised = [{"path": path, "guaranteed": {"gpus": gpus}} for path, gpus in (("owed", 8), ("over", 0))]
    log.add(QueuesChanged(queues=tuple(promised)))
    log.submit("over", 2, 4, at=1.0, queue="over", priority=priority, labels=(("rota.preemptible", label),))
    assert [type(event) for _, event in log.decide(1.0)] == [JobAdmitted]
    log.submit("owed", 1, 4, at=2.0, queue="owed")
    assert [job for job, event in log.decide(90.0) if isinstance(event, PreemptAsked)] == ["over"] * stopped


def test_work_of_priority_100_beyond_its_guarantee_learns_which_priority_would_start_it() -> None:
    log = with_nodes("default")
    log.add(QueuesChanged(queues=({"path": "default", "guaranteed": {"gpus": 2}},)))
    log.submit("fixed", 1, 4, at=1.0, priority=100)
    ((_, waits),) = log.decide(1.0)
    assert isinstance(waits, JobWaits) and waits.reason is Reason.NON_PREEMPTIBLE_OVER_QUOTA
    answer = log.scheduler.explain(JobId("fixed"), 2.0)
    assert answer is not None
    assert {"set": "priority", "value": 99} in [one["change"] for one in answer.would_start_now_with]
    log.add(JobChanged(changes={"priority": 99}), "fixed", 3.0)
    assert [type(event) for _, event in log.decide(3.0)] == [JobAdmitted]


def test_time_in_which_nothing_ran_is_no_time_that_a_job_had_devices() -> None:
    log = with_nodes()
    log.submit("a", 2, 4, time_limit_s=60.0)
    log.decide(0.0)
    log.add(DowntimePassed(since=10.0), "a", 1000.0)
    row = log.scheduler.state.jobs[JobId("a")]
    assert (row.served_by(1005.0), row.left_s) == (15.0, 60.0 + 990.0), "from its start, which was at 0"
    log.submit("b", 2, 4, at=1000.0)
    log.decide(1000.0)
    starts = Forecast(log.scheduler.state, log.scheduler.profile, 1000.0).play(SystemClock()).starts
    assert starts[JobId("b")][1] == 1050.0, "after the rest of its limit"


def test_a_forecast_keeps_its_hands_off_the_books_of_the_live_policy() -> None:
    log = with_nodes("kai")
    for at, name in enumerate(("one", "two")):
        log.submit(name, 2, 4, at=float(at), time_limit_s=60.0)
        log.decide(float(at))
    book = log.scheduler.profile.division.book
    before = book.fair
    assert Forecast(log.scheduler.state, log.scheduler.profile, 2.0).play(SystemClock()).starts == {
        "two": (31.0, 60.0, 118.0)
    }
    assert book.fair is before


# -- bugs of the scheduler itself --


class _Slips(Fit):
    """A placer that fails for jobs called "fails", and gives those called "takes" the first device of the cluster."""

    def place(self, state: State, txn: Txn, row: LiveJob) -> Allocations | None:
        if row.ask.id.startswith("fails"):
            raise KeyError("no such cell")
        if row.ask.id == "takes":
            return (asked(row.ask.shape.slots[0], 0, (0,)),)
        return super().place(state, txn, row)


def test_a_job_at_which_a_policy_slips_is_left_out_and_the_others_go_on() -> None:
    log = with_nodes()
    log.submit("whole", 1, 4, at=1.0)
    log.decide(1.0)
    log.scheduler.profile = replace(log.scheduler.profile, placer=_Slips(), block="none")
    for at, name in enumerate(("fails", "takes", "good"), 2):
        log.submit(name, 1, 1, at=float(at))
    before = log.scheduler.state.digest()
    outcome = log.scheduler.decide(5.0)
    assert log.scheduler.state.digest() == before and log.scheduler.decide(5.0) == outcome
    taken = "what it would get of r0n0 is not free"
    failed = "trying it failed with KeyError('no such cell')"
    last = "; last events of the job: JobArrived {0} at {1}, JobPaused {0} at {1}".format
    assert outcome.broken == (f"fails: {failed}{last('fails', 2)}", f"takes: {taken}{last('takes', 3)}")
    waits = {job: (event.reason, event.text) for job, event in outcome.events if isinstance(event, JobWaits)}
    text = "A bug of the scheduler keeps it from starting: {}.".format
    assert waits == {"fails": (Reason.INTERNAL, text(failed)), "takes": (Reason.INTERNAL, text(taken))}
    assert [job for job, event in outcome.events if isinstance(event, JobAdmitted)] == ["good"]
    for job, event in outcome.events:
        log.add(event, job, 5.0)
    again = log.scheduler.decide(6.0)
    assert again.events == () and again.broken == outcome.broken, "it is reported once, and known as long as it is so"
    log.submit("waits", 2, 4, at=6.0)
    for job, event in log.scheduler.decide(6.0).events:
        log.add(event, job, 6.0)
    reasons = {"fails": Reason.INTERNAL, "takes": Reason.INTERNAL, "waits": Reason.NO_FREE_DEVICES}
    for job, reason in reasons.items():
        why = log.scheduler.explain(JobId(job), 7.0)
        assert why is not None and why.why is not None and why.why.reason is reason, job
    assert log.scheduler.explain_spec(spec("new", 1, 1), 7.0, "user").starts_now
    assert Forecast(log.scheduler.state, log.scheduler.profile, 7.0).play(SystemClock()).starts.keys() == reasons.keys()
    with pytest.raises(InvariantBroken, match=r"KeyError.*; last events of the job: JobArrived fails at 2"):
        step(log.scheduler.state, Tick(), log.scheduler.profile, 7.0)


def test_a_bug_with_another_text_every_time_is_reported_once() -> None:
    class Counts(Fit):
        tries = itertools.count()

        def place(self, state: State, txn: Txn, row: LiveJob) -> Allocations | None:
            raise KeyError(next(self.tries))

    log = with_nodes()
    log.scheduler.profile = replace(log.scheduler.profile, placer=Counts())
    log.submit("one", 1, 1)
    for at, reported in ((1.0, 1), (2.0, 0)):
        outcome = log.scheduler.decide(at)
        assert len(outcome.events) == reported and len(outcome.broken) == 1
        for job, event in outcome.events:
            log.add(event, job, at)


def test_a_policy_that_fails_at_every_job_is_given_up_after_so_many_passes() -> None:
    log = with_nodes()
    log.scheduler.profile = replace(log.scheduler.profile, placer=_Slips(), block="none")
    for at in range(PASSES_MAX - 1):
        log.submit(f"fails-{at}", 1, 1, at=float(at))
    assert len(log.scheduler.decide(1000.0).broken) == PASSES_MAX - 1
    log.submit("fails-last", 1, 1, at=1000.0)
    with pytest.raises(InvariantBroken, match="200 jobs were left out"):
        log.scheduler.decide(1000.0)


@pytest.mark.breaks_state
def test_counts_that_are_not_those_of_the_jobs_are_reported_and_counted_anew() -> None:
    log = with_nodes()
    log.submit("runs", 1, 3, at=1.0)
    log.decide(1.0)
    log.scheduler.state.dev_milli[0], log.scheduler.state.used[0, 0] = 700, 0
    log.submit("next", 1, 1, at=2.0)
    outcome = log.scheduler.decide(2.0)
    assert outcome.broken[0] == "device 0: 700 free, by its holders 0" and len(outcome.broken) == 2
    assert [job for job, event in outcome.events if isinstance(event, JobAdmitted)] == ["next"] and not outcome.marks
    assert log.scheduler.decide(2.0).broken == ()


@pytest.mark.breaks_state
@pytest.mark.parametrize("cpus", [16.0, 1.0])
def test_a_node_of_which_a_device_was_given_twice_gets_nothing_more_and_the_others_do(cpus: float) -> None:
    log = with_nodes()
    log.submit("one", 1, 1, at=1.0)
    log.submit("two", 1, 1, at=2.0)
    (_, first), *_ = log.scheduler.decide(2.0).events
    assert isinstance(first, JobAdmitted)
    node = first.placement.bundles[0].node
    log.add(first, "one", 2.0)
    log.add(first, "two", 2.0)
    log.add(NodeJoined(node=replace(pretend_nodes("1x2x4", host="real")[0], cpus=cpus)), at=2.0)
    log.submit("three", 1, 1, at=3.0)
    for _ in range(2):
        outcome = log.scheduler.decide(3.0)
        assert outcome.broken == ("device 0: 1000 given twice",)
        (job, admitted), *_ = outcome.events
        assert job == "three" and isinstance(admitted, JobAdmitted) and admitted.placement.bundles[0].node != node
    (mark,) = outcome.marks
    assert (mark.node, mark.health, mark.by) == (node, Health.SUSPECT, "scheduler")
    assert vars(log.scheduler)["_suspects"] == {}, "a decision notes nothing that the log does not have"
    for event, job in (
        (mark, None),
        (admitted, "three"),
        (JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED), "two"),
    ):
        log.add(event, job, 4.0)
    assert log.scheduler.decide(4.0).broken == ()


def test_who_moved_off_a_drained_node_holds_nothing_there_while_the_rest_of_its_gang_runs_on() -> None:
    """A job is on two nodes of 4; what is on the drained one moves, and another job starts there once it is back."""
    log = Log("default")
    for one in pretend_nodes("1x3x4", host="real"):
        log.add(NodeJoined(node=one))
    log.add(QueuesChanged(queues=({"path": "default", "limit": {"gpus": 12}},)))
    log.submit("runs", 4, 2)
    log.decide(1.0)
    scheduler, job = log.scheduler, JobId("runs")
    home = scheduler.state.nodes[scheduler.state.jobs[job].held[0].node].id
    (request,) = requests_of(spec("runs", 4, 2))
    there = [i for i, held in enumerate(scheduler.state.jobs[job].held) if scheduler.state.nodes[held.node].id == home]
    assert len(there) == 2
    log.add(NodeMarked(node=home, health=Health.DRAINED, notice_s=600.0), at=2.0)
    for number, first in enumerate((there, there)):  # and back again from where it went
        gang = GangId(f"drained-{number}")
        bundles = tuple(replace(request.bundles[i], index=n) for n, i in enumerate(first))
        log.add(GangAsked(request=GangRequest(gang=gang, bundles=bundles)), "runs", 3.0)
        (granted,) = [event for _, event in log.decide(4.0) if isinstance(event, GangGranted)]
        assert int(scheduler.state.used[0, 0]) == 12_000, "both places are held until it has moved"
        for n, i in enumerate(first):
            assert int(scheduler.state.used[0, 0]) == 12_000
            place = granted.bundles[n].node
            log.add(InstanceStarted(role=RoleName("w"), rank=i, epoch=Epoch(3), node=place, pid=9), "runs", 5.0)
        assert int(scheduler.state.used[0, 0]) == 8_000, "it is charged what it asks"
        rows = {row.ask.id: sum(len(one.devices) for one in row.held) for row in scheduler.state.holders()}
        kept = {JobId(f"runs~left-drained-{n}"): 0 for n in range(number + 1)}
        assert rows == {job: 8, **kept}, "of what it left the engine keeps the cores alone"
        nodes = [scheduler.state.nodes[held.node].id for held in scheduler.state.jobs[job].held]
        assert home not in nodes and [nodes[i] for i in first] == [bundle.node for bundle in granted.bundles]
        log.add(NodeMarked(node=home, health=Health.HEALTHY), at=6.0)
        home = granted.bundles[0].node
        log.add(NodeMarked(node=home, health=Health.DRAINED, notice_s=600.0), at=7.0)
        if number:
            log.add(GangReleased(gang=GangId("drained-0"), epoch=Epoch(4), gone=True), "runs", 8.0)
    log.add(NodeMarked(node=home, health=Health.HEALTHY), at=9.0)
    log.submit("next", 1, 4, at=10.0)
    assert [type(event) for job, event in log.decide(11.0) if job == "next"] == [JobAdmitted]
    assert replayed(log.records, get_profile("default"), requests_of)["different"] == []
    log.add(GangReleased(gang=GangId("all"), epoch=Epoch(5), gone=True), "runs", 12.0)
    assert {row.ask.id for row in scheduler.state.holders()} == {job, JobId("next")}
    log.add(JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED), "runs", 13.0)
    assert int(scheduler.state.dev_milli.sum()) == 8000
