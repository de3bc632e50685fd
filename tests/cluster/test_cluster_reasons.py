"""Each reason of the scheduler for a wait is met where it binds, and says so of the job that waits."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from cluster_makers import ask, node, shape, slot, state
from test_cluster_live import spec, with_nodes

from rota.cluster.core.capacity import OverLimit, QueueTable
from rota.cluster.core.cycle import decide, step, tried
from rota.cluster.core.events import JobArrived, JobGone, JobReleased, NodeChanged, StopRequested, Tick, apply
from rota.cluster.core.explain import explain
from rota.cluster.core.jobs import JobAsk, LiveJob
from rota.cluster.core.queue_order import wait_of
from rota.cluster.policies import PROFILES, get_profile
from rota.spec.events import NodeLost
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import Queue
from rota.spec.reasons import Reason
from rota.spec.resources import Health, Node, Res

DEFAULT = Queue(path="default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Who comes, in order, to which nodes and queue; the last one waits."""

    jobs: tuple[JobAsk, ...]
    nodes: tuple[Node, ...] = (node("n", 4),)
    queue: Queue = DEFAULT
    profile: str = "fifo"
    bad: str = ""
    health: Health = Health.BAD


def gpus(count: int) -> Res:
    return Res(cpus=0, gpus=count)


TWO_BY_THREE = (ask("r1", slot(3)), ask("r2", slot(3)))
CASES = {
    Reason.QUOTA_LIMIT: Case(jobs=(ask("j", slot(2)),), queue=Queue(path="default", limit=gpus(1))),
    Reason.USER_LIMIT: Case(
        jobs=(ask("run", slot(2), user="ann"), ask("other", user="bob"), ask("j", user="ann")),
        queue=Queue(path="default", user_limit=gpus(2)),
    ),
    Reason.NO_FREE_DEVICES: Case(jobs=(ask("run", slot(4)), ask("j"))),
    Reason.FRAGMENTED: Case(jobs=(*TWO_BY_THREE, ask("j", slot(2))), nodes=(node("n", 4), node("m", 4))),
    Reason.WRONG_TYPE: Case(
        jobs=(ask("r1", slot(3, type="A")), ask("r2", slot(3, type="A")), ask("j", slot(2, type="A"))),
        nodes=(node("n", 4), node("m", 4), node("other", 4, type="B")),
    ),
    Reason.CPU_OR_MEMORY: Case(jobs=(ask("run", slot(1, cpus=16)), ask("j", slot(1, cpus=1)))),
    Reason.TOPOLOGY: Case(
        jobs=(JobAsk(id=JobId("j"), queue="default", shape=shape(slot(), slot(), apart=(((0,), (1,), "node"),))),)
    ),
    Reason.BAD_CELLS: Case(jobs=(ask("j", slot(8)),), nodes=(node("n", 4), node("sick", 8)), bad="sick"),
    Reason.NODES_DRAINED: Case(
        jobs=(ask("j", slot(8)),), nodes=(node("n", 4), node("sick", 8)), bad="sick", health=Health.CORDONED
    ),
    Reason.AWAITING_PREEMPTION: Case(jobs=(ask("run", slot(4)), ask("j", priority=90)), profile="default"),
    Reason.AWAITING_RELEASE: Case(jobs=(ask("run", slot(4)), ask("j")), profile="default"),
    Reason.RESERVED_FOR_OTHER: Case(
        jobs=(ask("run", slot(3), est_s=9.0), ask("big", slot(4), at=1, est_s=9.0), ask("j", at=2, est_s=99.0)),
        profile="default",
    ),
    Reason.BEHIND_IN_ORDER: Case(jobs=(ask("run", slot(3)), ask("big", slot(4), at=1), ask("j", at=2))),
    Reason.NOT_BEFORE: Case(jobs=(ask("j", not_before=100.0),)),
    Reason.DEPENDENCY: Case(jobs=(ask("run"), ask("j", after=(JobId("run"),)))),
    Reason.COOL_DOWN: Case(jobs=(ask("j"),)),
    Reason.QUEUE_CLOSED: Case(jobs=(ask("j"),), queue=Queue(path="default", state="closed")),
    Reason.NON_PREEMPTIBLE_OVER_QUOTA: Case(
        jobs=(ask("j", slot(2), preemptible=False),),
        queue=Queue(path="default", guaranteed=gpus(1)),
        profile="default",
    ),
}


@pytest.mark.parametrize("reason", CASES, ids=str)
def test_a_job_that_waits_knows_what_binds(reason: Reason) -> None:
    case = CASES[reason]
    s = state(*case.nodes, queues=(case.queue,))
    if case.bad:
        apply(s, NodeChanged(node=NodeId(case.bad), health=case.health), 0.0)
    for at, job in enumerate(case.jobs):
        step(s, JobArrived(ask=job), get_profile(case.profile), float(at))
    if reason is Reason.COOL_DOWN:
        apply(s, JobReleased(job=JobId("j"), back_at=100.0), 2.0)
        step(s, Tick(), get_profile(case.profile), 2.0)
    if reason is Reason.AWAITING_RELEASE:
        step(s, StopRequested(job=JobId("run"), final=True), get_profile(case.profile), 2.0)
    wait = s.jobs[JobId("j")].wait
    assert wait is not None and wait.reason is reason
    assert case.bad in wait.text, "a node that is out of order is named"


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_pass_up_to_a_job_says_of_it_what_the_whole_pass_says(name: str) -> None:
    unbounded = {"candidates_max": 10**6, "victim_sets_max": 10**6, "vain_max": 10**6}
    rng, profile = random.Random(name), replace(get_profile(name), **unbounded)
    s = state(node("n", 4), node("m", 4), queues=(Queue(path="a", guaranteed=gpus(4)), Queue(path="b", limit=gpus(6))))
    kinds: set[str] = set()
    for at in range(40):
        drawn = ask(
            f"j{at}", slot(rng.choice((1, 1, 2, 4))), at=at, queue=rng.choice("ab"), priority=rng.choice((10, 50))
        )
        asked = replace(drawn, est_s=rng.choice((5.0, 50.0)), user=rng.choice("uv"))
        with s.txn() as txn:
            s.put(txn, LiveJob(ask=asked))
            whole, part = decide(s, profile, float(at)), tried(s, profile, float(at), asked.id)[0]
        for each in (whole, part):
            each[:] = [one for one in each if asked.id in (getattr(one, "job", ""), getattr(one, "for_job", ""))]
        assert part == whole
        kinds |= {type(one).__name__ for one in part}
        step(s, JobArrived(ask=asked), profile, float(at))
        if (held := s.holders()) and at % 3 == 0:
            apply(s, JobGone(job=rng.choice(held).ask.id), float(at))
    assert {"WaitOn"} | ({"Admit"} if name != "private" else set()) <= kinds  # no node is anybody's own here


def test_a_job_behind_an_equal_one_has_the_reason_of_that_one_as_it_is_now() -> None:
    s, profile = state(node("n", 4), node("sick", 4)), get_profile("default")
    for at, job in enumerate((ask("r1", slot(4)), ask("r2", slot(4)), ask("one", slot(2)), ask("two", slot(2)))):
        step(s, JobArrived(ask=job), profile, float(at))
    assert (wait := wait_of(s, profile, JobId("two"), 4.0)) and wait.reason is Reason.NO_FREE_DEVICES
    apply(s, JobGone(job=JobId("r2")), 5.0)
    step(s, NodeChanged(node=NodeId("sick"), health=Health.BAD), profile, 5.0)
    assert (row := s.jobs[JobId("two")]).wait and row.wait.reason is Reason.NO_FREE_DEVICES, "only the first has it"
    found = wait_of(s, profile, JobId("two"), 6.0)
    assert found is not None and (found.reason, found.fields["behind"]) == (Reason.BAD_CELLS, "one")
    assert found.text == "It is behind one: Needs 2 GPUs; 0 are free, 4 are out of order: sick is bad."
    own = wait_of(s, profile, JobId("one"), 6.0)
    assert own is not None and own == s.jobs[JobId("one")].wait and "behind" not in own.text


def test_a_job_that_finds_no_place_has_the_reason_of_now_though_no_pass_gives_it_again() -> None:
    s, profile = state(node("n", 4), node("m", 4)), replace(get_profile("fifo"), block="none")
    for at, (name, gpus) in enumerate((("a", 3), ("b", 2), ("whole", 3), ("again", 3), ("c", 1))):
        step(s, JobArrived(ask=ask(name, slot(gpus), at=at)), profile, float(at))
    assert (row := s.jobs[JobId("whole")]).wait and row.wait.reason is Reason.FRAGMENTED
    for job, behind in (("whole", ""), ("again", "It is behind whole: ")):
        now = wait_of(s, profile, JobId(job), 6.0)
        assert now is not None and now.reason is Reason.NO_FREE_DEVICES
        assert now.text == f"{behind}Needs 3 GPUs; 2 are free."
        why = explain(s, profile, JobId(job), 6.0).why
        assert why is not None and why.reason is now.reason


def test_behind_whom_a_job_waits_is_who_holds_up_its_queue_now() -> None:
    s, fifo = state(node("n", 4)), get_profile("fifo")
    for at, job in enumerate(
        (ask("run", slot(3)), ask("big", slot(4), at=1), ask("j", at=2), ask("l", not_before=99.0))
    ):
        step(s, JobArrived(ask=job), fifo, float(at))
    assert (wait := wait_of(s, fifo, JobId("j"), 4.0)) and wait.fields["behind"] == "big"
    apply(s, JobGone(job=JobId("big")), 5.0)
    apply(s, JobArrived(ask=ask("urgent", slot(4), priority=90, at=5)), 5.0)
    step(s, Tick(), fifo, 5.0)
    found = wait_of(s, fifo, JobId("j"), 6.0)
    assert found is not None and found.reason is Reason.BEHIND_IN_ORDER and found.fields["behind"] == "urgent"
    assert found.text == "It is behind urgent: Needs 4 GPUs; 1 is free."
    assert (late := wait_of(s, fifo, JobId("l"), 6.0)) and late.reason is Reason.NOT_BEFORE, (
        "its own reason comes first"
    )


def test_whoever_would_outlive_a_reservation_is_behind_the_first_that_would() -> None:
    s, profile = state(node("n", 4)), get_profile("default")
    jobs = (ask("run", slot(3), est_s=9.0), ask("big", slot(4), est_s=9.0))
    for at, job in enumerate(
        (*jobs, *(ask(name, at=4, est_s=long_s) for name, long_s in zip("abc", (90.0, 80.0, 3.0))))
    ):
        step(s, JobArrived(ask=job), profile, float(at))
    assert s.jobs[JobId("c")].phase == "running", "it is over before"
    found = wait_of(s, profile, JobId("b"), 4.0)
    assert found is not None and (found.reason, found.fields["behind"]) == (Reason.RESERVED_FOR_OTHER, "a")


def test_a_no_that_is_remembered_comes_with_the_numbers_of_now() -> None:
    s, profile = state(node("n", 4), queues=(Queue(path="a"), Queue(path="b"))), get_profile("default")
    step(s, JobArrived(ask=ask("run", queue="a")), profile, 0.0)
    step(s, JobArrived(ask=ask("one", slot(4), queue="a")), profile, 1.0)
    step(s, JobArrived(ask=ask("small", queue="b")), profile, 2.0)
    step(s, JobArrived(ask=ask("two", slot(4), queue="b")), profile, 3.0)
    assert [(wait := s.jobs[JobId(job)].wait) and wait.fields["free_gpus"] for job in ("one", "two")] == [3.0, 2.0]


@pytest.mark.parametrize(
    ("used", "asked", "less"), [(2, 1, []), (1.5, 1.5, ["cpus 0.5 instead of 1.5 for each instance of bundle 0"])]
)
def test_no_job_is_advised_to_ask_for_no_cores(used: float, asked: float, less: list[str]) -> None:
    s, fifo = state(node("n", 0), queues=(Queue(path="default", user_limit=Res(cpus=2)),)), get_profile("fifo")
    for job in (ask("run", slot(0, cpus=used)), ask("j", slot(0, cpus=asked))):
        step(s, JobArrived(ask=job), fifo, 0.0)
    assert [one["text"] for one in explain(s, fifo, JobId("j"), 1.0).would_start_now_with] == [
        "a user limit of 3 CPUs for queue default instead of 2 CPUs",
        *less,
    ]


def test_what_a_question_tried_says_nothing_of_other_jobs_to_the_next_pass() -> None:
    profile = replace(get_profile("fifo"), local=True)
    s = state(node("n", 4), node("m", 4), queues=(Queue(path="a"), Queue(path="b")))
    for name in ("r1", "r2"):
        step(s, JobArrived(ask=ask(name, slot(1, cpus=16), queue="b")), profile, 0.0)
    apply(s, JobArrived(ask=ask("small", slot(1, cpus=1), queue="a")), 1.0)
    apply(s, JobArrived(ask=ask("big", slot(4), queue="b", at=1.0)), 1.0)
    assert explain(s, profile, JobId("big"), 2.0).would_start_now_with, "it tried changes"
    step(s, Tick(), profile, 3.0)
    assert (wait := s.jobs[JobId("small")].wait) and wait.reason is Reason.CPU_OR_MEMORY
    step(s, JobGone(job=JobId("r1")), profile, 4.0)
    assert s.jobs[JobId("small")].phase == "running", "cores came back, though of another queue"


@pytest.mark.parametrize(
    ("mesh", "elastic", "offered"), [((), None, 2), (("dp", "pp"), None, None), (("dp", "pp"), "dp", 2)]
)
def test_no_number_of_instances_is_advised_that_the_mesh_does_not_have(
    mesh: tuple[str, ...], elastic: str | None, offered: int | None
) -> None:
    log, wanted = with_nodes("drf"), spec("x", 4, 2)
    role = replace(wanted.roles[0], mesh=tuple((axis, 2) for axis in mesh), elastic_axis=elastic)
    wanted = replace(wanted, roles=(role,))
    log.add(NodeLost(node=NodeId("r0n0")), at=1.0)
    short = log.scheduler.infeasible(wanted)
    assert short is not None
    changes = {one.get("set"): one.get("value") for one in short.nearest}
    assert changes.get("roles.w.replicas") == offered and changes["roles.w.resources.gpus"] == 1


@pytest.mark.parametrize("promise", [{"limit": gpus(4)}, {"user_limit": gpus(4)}])
def test_limits_below_what_waiting_jobs_ask_are_found_once_a_line(
    promise: dict[str, Res], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many jobs wait: who asks for alerts waits for this in the event loop."""
    s = state(node("n", 8), queues=(DEFAULT, Queue(path="low", **promise)))
    for i in range(600):
        arrived = ask(f"j{i}", slot((2, 8)[i % 2]), queue=("default", "low")[i // 2 % 2], user=f"u{i % 5}", at=i)
        apply(s, JobArrived(ask=arrived), float(i))
    looks, whole = list[str](), QueueTable.over_limit

    def counted(table: QueueTable, *given: Any) -> OverLimit | None:
        looks.append(given[2])
        return whole(table, *given)

    monkeypatch.setattr(QueueTable, "over_limit", counted)
    found = s.limits_below()
    assert found.keys() == {f"j{i}" for i in range(600) if i % 4 == 3}
    assert {(one.queue, one.asked, one.allowed, one.user is None) for one in found.values()} == {
        ("low", 8000, 4000, "limit" in promise)
    }
    assert all(found[f"j{i}"].user in (None, f"u{i % 5}") for i in range(3, 600, 4))
    assert len(looks) == len(s.lines) <= 12
