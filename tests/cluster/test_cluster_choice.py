"""Which of its shapes a job starts with: the best by the objective of the profile, on devices that keep its plan."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from cluster_makers import ask, node, slot, state

from rota.cluster.core.choice import WASTE_MAX, amount_of, choices_of, cost_of, share_of_free, sizes_now
from rota.cluster.core.cycle import step
from rota.cluster.core.events import JobArrived, JobReleased, Tick
from rota.cluster.core.jobs import Allocation, Choice, JobAsk, LiveJob, Shape
from rota.cluster.core.state import State
from rota.cluster.live import Scheduler
from rota.cluster.policies import get_profile
from rota.cluster.sim.simulate import NodeFailure, SimJob, Simulation
from rota.job.core.placement import requests_of
from rota.runtime.clock import SystemClock
from rota.spec.events import (
    Event,
    JobAdmitted,
    JobQueued,
    JobRequeued,
    JobSubmitted,
    NodeJoined,
    PreemptAsked,
    Record,
)
from rota.spec.ids import JobId, NodeId, RoleName
from rota.spec.job import JobSpec, RoleSpec, RoleStart, SizedPlan
from rota.spec.queue import Queue
from rota.spec.reasons import Reason
from rota.spec.resources import Res


def sized(n: int, step_s: float, kind: str | None = None, *, tied: int = 1) -> Choice:
    """``n`` instances of one device; each ``tied`` in a row share a node."""
    groups = tuple(tuple(range(i, i + tied)) for i in range(0, n, tied)) if tied > 1 else ()
    names = tuple(("all", i, "train") for i in range(n))
    return Choice(
        shape=Shape(slots=(slot(1, type=kind),) * n, tied=groups, names=names),
        step_s=step_s,
        starts=(RoleStart(role=RoleName("train"), replicas=n, gpu_type=kind),),
    )


def choosing(name: str, *choices: Choice, at: float = 0.0, **more: object) -> JobAsk:
    return replace(ask(name, at=at, **more), shape=choices[0].shape, choices=choices)


SIZES = (sized(1, 8.0), sized(2, 4.4), sized(4, 2.5), sized(8, 2.4))


def chosen(s: State, job: str = "j") -> int:
    return len(s.jobs[JobId(job)].held)


def test_a_job_that_is_alone_gets_the_fastest_size_that_does_not_waste_devices() -> None:
    s = state(node("a", 8))
    step(s, JobArrived(ask=choosing("j", *SIZES)), get_profile("default"), 0.0)
    assert chosen(s) == 4, "8 devices cost 19 device-seconds a step, more than twice the 8 of one"
    s = state(node("a", 8))
    step(s, JobArrived(ask=choosing("j", *SIZES)), get_profile("fifo"), 0.0)
    assert chosen(s) == 1, "the least device-seconds"


def test_what_other_waiting_jobs_need_is_left_to_them() -> None:
    s = state(node("a", 8))
    for i in range(4):
        with s.txn() as txn:
            s.put(txn, LiveJob(ask=choosing(f"j{i}", *SIZES, at=float(i))))
            txn.keep()
    step(s, JobArrived(ask=choosing("j4", *SIZES, at=4.0)), get_profile("default"), 5.0)
    sizes = [chosen(s, f"j{i}") for i in range(5)]
    assert min(sizes) >= 1 and sum(sizes) <= 8 and sizes == [1, 1, 2, 2, 2]


def test_a_larger_size_passes_no_limit_and_stays_within_the_promise_of_its_smallest() -> None:
    s = state(node("a", 8), queues=(Queue(path="default", limit=Res(cpus=99, gpus=3)),))
    step(s, JobArrived(ask=choosing("j", *SIZES)), get_profile("default"), 0.0)
    assert chosen(s) == 2
    s = state(node("a", 8), queues=(Queue(path="default", guaranteed=Res(cpus=0, gpus=2)),))
    step(s, JobArrived(ask=choosing("j", *SIZES)), get_profile("default"), 0.0)
    assert chosen(s) == 2, "beyond the promise it could be stopped by those whose devices it borrows"


def test_what_is_reserved_for_a_blocked_job_is_not_taken_by_a_larger_size() -> None:
    """A gang of six starts at 100, when two devices are back; what a choice takes until then must be back by then."""
    s = state(node("a", 8))
    with s.txn() as txn:
        s.put(txn, LiveJob(ask=ask("runs", slot(1), slot(1), est_s=100.0)))
        s.hold(txn, JobId("runs"), (Allocation(0, (0,), 0, 0, 0), Allocation(0, (1,), 0, 0, 0)), now=0.0)
        txn.keep()
    step(s, JobArrived(ask=ask("gang", *[slot(1)] * 7)), get_profile("default"), 1.0)
    step(s, JobArrived(ask=choosing("j", *SIZES, at=2.0, est_s=1000.0)), get_profile("default"), 2.0)
    assert chosen(s) == 1, "seven of eight devices are promised to the gang at 100"


def test_a_job_that_lets_go_waits_as_it_did_and_may_start_with_another_size() -> None:
    s = state(node("a", 4))
    step(s, JobArrived(ask=choosing("j", *SIZES)), get_profile("default"), 0.0)
    assert chosen(s) == 4
    with s.txn() as txn:
        s.put(txn, LiveJob(ask=ask("urgent", slot(1), slot(1), slot(1), priority=90)))
        txn.keep()
    step(s, JobReleased(job=JobId("j")), get_profile("default"), 10.0)
    assert (chosen(s), chosen(s, "urgent")) == (1, 3)


def test_why_names_the_choice_its_value_and_the_others() -> None:
    s = state(node("a", 4, type="A"), node("b", 2, type="H"))
    pair = (sized(1, 8.0), sized(1, 8.0, "A"), sized(1, 3.0, "H"), sized(2, 4.4, "A"), sized(2, 1.7, "H"))
    decisions = step(s, JobArrived(ask=choosing("j", *pair)), get_profile("default"), 0.0)
    [why] = [one.why["choice"] for one in decisions if hasattr(one, "why")]
    assert why == (
        "2 of train on H, 1.7 s a step as predicted: the shortest time for all of a step with at most 6 devices, its "
        "part of what is free. It takes 3.4 device-seconds a step; others: 1 of train on H 3 s, 3 device-seconds; "
        "2 of train on A 4.4 s, 8.8 device-seconds; 1 of train on A 8 s, 8 device-seconds."
    )


# -- growth --


def part(job: str, n: int, **more: object) -> JobAsk:
    """A further instance of a running job."""
    shape = Shape(slots=(slot(1),), names=(("g", 0, "train"),))
    return replace(ask(f"{job}~{n}", part_of=JobId(job), spare=True, **more), shape=shape)


def growing(s: State, now: float, *parts: JobAsk) -> list[bool]:
    """Which of these were given to the job."""
    with s.txn() as txn:
        for one in parts:
            s.put(txn, LiveJob(ask=one))
        txn.keep()
    step(s, Tick(), get_profile("default"), now)
    return [bool(s.jobs[one.id].held) for one in parts]


def started_small(*choices: Choice, est_s: float | None = None) -> State:
    """``j`` runs with one instance on a node of eight, as others waited when it started."""
    s = state(node("a", 8))
    with s.txn() as txn:
        s.put(txn, LiveJob(ask=choosing("j", *choices, est_s=est_s)))
        s.hold(txn, JobId("j"), (Allocation(0, (0,), 0, 0, 0),), now=0.0, choice=choices[0])
        txn.keep()
    return s


def test_a_job_grows_to_a_size_that_pays_once_no_other_job_waits() -> None:
    s = started_small(*SIZES)
    assert growing(s, 1.0, *(part("j", n) for n in range(1, 8))) == [True] * 3 + [False] * 4
    why = s.jobs[JobId("j~4")].wait
    assert why is not None and why.text == "No larger size of train saves more time than the move takes."
    assert sizes_now(s, s.jobs[JobId("j")]) == {"train": 4}
    s = started_small(*SIZES)
    step(s, JobArrived(ask=ask("gang", *[slot(1)] * 8)), get_profile("default"), 0.5)
    assert growing(s, 1.0, part("j", 1), part("j", 2)) == [False, False]
    why = s.jobs[JobId("j~1")].wait
    assert why is not None and (why.reason, why.text) == (
        Reason.BEHIND_IN_ORDER,
        "The job grows once no other waits; gang does.",
    )


def test_a_job_that_is_nearly_done_does_not_move() -> None:
    s = started_small(*SIZES, est_s=100.0)
    assert growing(s, 20.0, part("j", 1), part("j", 2), part("j", 3)) == [False] * 3, "80 s * (1 - 2.5 / 8) < 60 s"
    s = started_small(*SIZES, est_s=1000.0)
    assert growing(s, 20.0, part("j", 1), part("j", 2), part("j", 3)) == [True] * 3


def test_a_part_that_a_job_can_do_without_holds_up_no_other_however_old_it_is() -> None:
    """The job that runs would have a third device since hours; a job that comes later takes the one that is free."""
    s = started_small(sized(1, 8.0), sized(3, 1.5))
    step(s, JobArrived(ask=ask("six", *[slot(1)] * 6)), get_profile("default"), 0.5)
    assert growing(s, 1.0, part("j", 1), part("j", 2)) == [False, False]
    step(s, JobArrived(ask=ask("late", slot(1), at=9000.0)), get_profile("default"), 9000.0)
    assert s.jobs[JobId("late")].held


def test_a_size_counts_by_what_it_leaves_to_the_other_jobs_of_the_cluster() -> None:
    """4.4 s with two devices and 3.4 s with four: beside four others of eight devices the smaller one is the better."""
    sizes = (*SIZES[:2], sized(4, 3.4))
    for others, size in ((0, 4), (1, 4), (4, 2)):
        s = state(node("a", 8))
        for i in range(others):
            with s.txn() as txn:
                s.put(txn, LiveJob(ask=ask(f"r{i}")))
                s.hold(txn, JobId(f"r{i}"), (Allocation(0, (i,), 0, 0, 0),), now=0.0)
                txn.keep()
        step(s, JobArrived(ask=choosing("j", *sizes)), get_profile("default"), 0.0)
        values = {len(c.shape.slots): c.step_s * (1 + others * len(c.shape.slots) / 8) for c in sizes}
        assert chosen(s) == min(values, key=values.__getitem__) == size, values


def test_a_job_gets_no_part_of_a_size_that_has_no_place_as_a_whole() -> None:
    s = started_small(sized(1, 8.0), sized(8, 1.5))
    assert growing(s, 1.0, *(part("j", n) for n in range(1, 8))) == [True] * 7
    s = started_small(sized(1, 8.0), sized(8, 1.5))
    step(s, JobArrived(ask=ask("other", slot(1))), get_profile("default"), 0.5)
    assert growing(s, 1.0, *(part("j", n) for n in range(1, 8))) == [False] * 7
    why = s.jobs[JobId("j~1")].wait
    assert why is not None
    assert why.text == "7 more instances of train, which its next size needs, have no place at once."


def test_what_replaces_a_lost_member_is_not_held_back() -> None:
    s = started_small(*SIZES)
    step(s, JobArrived(ask=ask("gang", *[slot(1)] * 8)), get_profile("default"), 0.5)
    assert growing(s, 1.0, part("j", 1, failover=True, at=-1.0)) == [True]


# -- against every shape, placement and split --


def places(free: dict[tuple[int, str], int], shape: Shape) -> bool:
    """Whether some assignment of slots to nodes holds: each device type of each node has so many free."""
    groups = [*shape.tied, *((i,) for i in range(len(shape.slots)) if not any(i in one for one in shape.tied))]

    def descend(left: Sequence[tuple[int, ...]], have: dict[tuple[int, str], int]) -> bool:
        if not left:
            return True
        for at in {place for place, _ in have}:
            for kinds in product(*([kind for _, kind in have if _ == at] for _ in left[0])):
                then = dict(have)
                for i, kind in zip(left[0], kinds):
                    if shape.slots[i].type in (None, kind):
                        then[at, kind] -= shape.slots[i].gpus
                    else:
                        then[at, kind] = -1
                if min(then.values()) >= 0 and descend(left[1:], then):
                    return True
        return False

    return descend(groups, free)


def value_of(choice: Choice, all_of: dict[str, int], others: int) -> float:
    """Time of a step, and for each other job the part of the devices of its type that it takes in that time."""
    kind = choice.starts[0].gpu_type
    total = sum(all_of.values()) if kind is None else all_of.get(kind, 0)
    return choice.step_s * (1 + others * len(choice.shape.slots) / max(total, 1e-3))


def best_value(
    choices: Sequence[Choice], free: dict[tuple[int, str], int], all_of: dict[str, int], others: int
) -> float | None:
    """The least value of all shapes that have a place, of those that waste no devices; any type only as a last way."""

    def least(kind: str | None) -> float:
        return min(cost_of(one) for one in choices if one.starts[0].gpu_type == kind)

    able = [one for one in choices if places(free, one.shape)]
    frugal = [one for one in able if cost_of(one) <= WASTE_MAX * least(one.starts[0].gpu_type) or one is choices[0]]
    typed = [one for one in frugal if one.starts[0].gpu_type] or frugal
    return min((value_of(one, all_of, others) for one in typed), default=None)


def random_choices(rng: random.Random, kinds: Sequence[str]) -> Iterator[Choice]:
    """Sizes of a trainer and of rollouts on one type: a step is over when the slower of both is."""
    speed = {kind: rng.choice((1.0, 1.8, 3.1)) for kind in kinds}
    work = {"train": rng.uniform(2, 9), "rollout": rng.uniform(1, 6)}
    fall = rng.uniform(0.6, 1.0)
    tied = rng.choice((1, 2))

    def made(sizes: tuple[int, int], kind: str | None, factor: float, groups: int) -> Choice:
        slots = (slot(1, type=kind),) * sum(sizes)
        ties = tuple((i, i + 1) for i in range(0, sizes[0] - 1, 2)) if groups == 2 else ()
        pairs = zip(("train", "rollout"), sizes)
        names = ("train",) * sizes[0] + ("rollout",) * sizes[1]
        return Choice(
            shape=Shape(slots=slots, tied=ties, names=tuple(("all", i, role) for i, role in enumerate(names))),
            step_s=max(work[role] / n**fall for role, n in pairs) / factor,
            starts=tuple(
                RoleStart(role=RoleName(role), replicas=n, gpu_type=kind)
                for role, n in zip(("train", "rollout"), sizes)
            ),
        )

    yield made((1, 1), None, min(speed.values()), 1)
    for sizes in product((1, 2, 3), (1, 2)):
        for kind in kinds:
            yield made(sizes, kind, speed[kind], tied)


@pytest.mark.parametrize("part", range(5))
def test_on_random_small_clusters_the_choice_is_the_best_of_all_shapes_placements_and_splits(part: int) -> None:
    rng = random.Random(part)
    started = 0
    for case in range(100):
        kinds = ("A", "H")[: rng.randint(1, 2)]
        nodes = [node(f"n{i}", rng.randint(1, 4), type=rng.choice(kinds)) for i in range(rng.randint(1, 3))]
        s = state(*nodes)
        for row, one in enumerate(nodes):
            for d in range(len(one.devices)):
                if rng.random() < 0.3:
                    name = f"fill{row}.{d}"
                    device = int(s.dev0[row]) + d
                    with s.txn() as txn:
                        s.put(txn, LiveJob(ask=ask(name, slot(1))))
                        s.hold(txn, JobId(name), (Allocation(row, (device,), 0, 0, 0),), now=0.0)
                        txn.keep()
        free = {(row, one.devices[0].type): int(s.free[row].sum()) for row, one in enumerate(nodes)}
        choices = tuple(random_choices(rng, kinds))
        step(s, JobArrived(ask=choosing("j", *choices)), get_profile("default"), 0.0)
        all_of = {kind: sum(len(one.devices) for one in nodes if one.devices[0].type == kind) for kind in kinds}
        others = len(s.jobs) - 1
        row, best = s.jobs[JobId("j")], best_value(choices, free, all_of, others)
        if best is None:
            assert not row.held, f"case {part}/{case}"
            continue
        started += 1
        has = row.ask.chosen
        assert has is not None, f"case {part}/{case}"
        assert value_of(has, all_of, others) == pytest.approx(best), f"case {part}/{case}: {has}"
        for group in row.ask.shape.tied:
            assert len({row.held[i].node for i in group}) == 1, f"case {part}/{case}: a tied group is split"
        for slot_of, held in zip(row.ask.shape.slots, row.held):
            assert slot_of.type in (None, s.types[int(s.dev_type[held.devices[0]])])
    assert started > 50


# -- the simulator --


def test_the_simulator_plays_a_job_at_the_speed_of_its_choice_on_the_devices_that_it_got() -> None:
    s = state(node("a", 4, type="A"), node("b", 2, type="H"))
    pair = (sized(1, 8.0), sized(1, 8.0, "A"), sized(1, 3.0, "H"), sized(2, 5.0, "A"), sized(2, 2.0, "H"))
    jobs = [SimJob(ask=choosing(name, *pair), submit_s=0.0, work_s=800.0) for name in ("j0", "j1")]
    runs = Simulation(s, get_profile("default"), jobs, SystemClock()).run().runs
    assert [runs[JobId(name)].end_s for name in ("j0", "j1")] == [200.0, 500.0]


def test_the_part_of_a_job_counts_those_who_wait() -> None:
    s = state(node("a", 8))
    with s.txn() as txn:
        s.put(txn, LiveJob(ask=choosing("j", *SIZES)))
        s.put(txn, LiveJob(ask=ask("later", slot(1), not_before=9.0)))
        s.put(txn, LiveJob(ask=ask("other", slot(1), slot(1))))
        txn.keep()
    row = s.jobs[JobId("j")]
    assert share_of_free(s, row, 0.0) == amount_of(SIZES[0].shape) + (8000 - 1000 - 2000) // 2
    assert share_of_free(s, row, 9.0) == amount_of(SIZES[0].shape) + (8000 - 1000 - 3000) // 3


# -- the live scheduler --


def planned_job(*sizes: tuple[int, float], steps: dict[str, float] | None = None) -> JobSpec:
    """A role with a plan for each size; on a type of ``steps`` a step takes that part of its time."""
    plans = tuple(
        SizedPlan(
            replicas=n,
            plan="{}",
            why="",
            step_s=step_s,
            steps=tuple((kind, step_s * part) for kind, part in (steps or {}).items()),
        )
        for n, step_s in sizes
    )
    train = RoleSpec(
        name=RoleName("train"),
        run=("torchrun train.py",),
        replicas_min=sizes[0][0],
        replicas_max=sizes[-1][0],
        res=Res(cpus=1, gpus=1),
        plan="auto",
        plans=plans,
    )
    return JobSpec(name="t", roles=(train,))


class Log:
    """Records that a scheduler follows, on a node of four A and one of two H."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.scheduler = Scheduler(get_profile("default"), requests_of)
        for one in (node("a", 4, type="A"), node("h", 2, type="H")):
            self.add(NodeJoined(node=one))

    def add(self, event: Event, job: str | None = None, at: float = 0.0) -> None:
        number = len(self.records) + 1
        record = Record(number=number, job=JobId(job) if job else None, seq=number, at=at, event=event)
        self.records.append(record)
        self.scheduler.apply(record)

    def submit(self, name: str, spec: JobSpec, at: float = 0.0) -> None:
        self.add(JobSubmitted(spec=spec), name, at)
        self.add(JobQueued(), name, at)

    def decide(self, now: float) -> list[Event]:
        outcome = self.scheduler.decide(now)
        assert outcome.broken == ()
        for job, event in outcome.events:
            self.add(event, job, now)
        return [event for _, event in outcome.events]


def test_a_planned_job_is_admitted_with_the_size_and_type_of_most_value_and_its_record_says_which() -> None:
    log = Log()
    log.submit("j", planned_job((1, 8.0), (2, 4.4), (4, 2.5), steps={"A": 1.0, "H": 0.4}))
    [admitted] = log.decide(1.0)
    assert isinstance(admitted, JobAdmitted)
    assert admitted.starts == (RoleStart(role=RoleName("train"), replicas=2, gpu_type="H"),), "1.76 s, of 4 A 2.5 s"
    assert [(one.node, one.devices, one.res.gpu_type) for one in admitted.placement.bundles] == [
        ("h", (0,), "H"),
        ("h", (1,), "H"),
    ]
    assert str(admitted.why["choice"]).startswith("2 of train on H, 1.76 s a step as predicted")
    log.submit("k", planned_job((1, 8.0), (2, 4.4), (4, 2.5), steps={"A": 1.0, "H": 0.4}), at=2.0)
    [second] = log.decide(2.0)
    assert isinstance(second, JobAdmitted) and second.starts[0] == RoleStart(
        role=RoleName("train"), replicas=4, gpu_type="A"
    )
    again = Scheduler(get_profile("default"), requests_of)
    for record in log.records:
        again.apply(record)
    assert again.state.digest() == log.scheduler.state.digest()


def test_a_job_that_is_requeued_asks_its_fewest_again_and_is_chosen_anew() -> None:
    log = Log()
    log.submit("j", planned_job((1, 8.0), (2, 4.4)))
    log.decide(1.0)
    assert len(log.scheduler.state.jobs[JobId("j")].held) == 2
    log.add(PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, grace_s=1.0, for_job=JobId("x")), "j", 2.0)
    log.add(JobRequeued(attempt=1, reason=Reason.PREEMPTED_PRIORITY), "j", 3.0)
    row = log.scheduler.state.jobs[JobId("j")]
    assert (row.held, len(row.ask.shape.slots)) == ((), 1)
    [admitted] = log.decide(4.0)
    assert isinstance(admitted, JobAdmitted) and admitted.attempt == 2 and admitted.starts[0].replicas == 2


def test_a_job_of_two_planned_roles_gets_the_split_with_the_least_time_of_the_slower_one() -> None:
    job = planned_job((1, 8.0), (2, 4.4), (4, 2.5))
    other = replace(planned_job((1, 3.0), (2, 1.6), (4, 0.9)).roles[0], name=RoleName("rollout"))
    log = Log()
    log.submit("j", replace(job, roles=(*job.roles, other)))
    [admitted] = log.decide(1.0)
    assert isinstance(admitted, JobAdmitted)
    assert [(one.role, one.replicas) for one in admitted.starts] == [("train", 4), ("rollout", 2)]


def test_jobs_without_choices_are_admitted_as_before() -> None:
    assert choices_of(planned_job((2, 4.0)), requests_of) == ()
    assert choices_of(planned_job((2, 0.0), (4, 0.0)), requests_of) == (), "no predicted time, no choice"


def test_in_the_simulator_a_job_grows_when_another_ends_and_takes_up_the_speed_of_its_size() -> None:
    """Two jobs share four devices; the second has all of them from 400 s on, for the 800 s of work that are left."""
    choices = (sized(1, 8.0), sized(2, 4.0), sized(4, 2.0))
    s = state(node("a", 4))
    jobs = [
        SimJob(ask=choosing("j0", *choices), submit_s=0.0, work_s=800.0),
        SimJob(ask=choosing("j1", *choices), submit_s=0.0, work_s=1600.0),
    ]
    run = Simulation(s, get_profile("default"), jobs, SystemClock()).run()
    assert run.runs[JobId("j0")].end_s == 400.0
    assert run.runs[JobId("j1")].end_s == 400.0 + (1600 - 2 * 400) / 4
    assert not s.jobs and run.violations == 0


def test_in_the_simulator_a_job_that_loses_a_node_with_a_member_goes_on_smaller_and_grows_back() -> None:
    choices = (sized(1, 8.0), sized(2, 4.0), sized(4, 2.0))
    s = state(node("a", 2), node("b", 2))
    jobs = [
        SimJob(ask=ask("first", slot(1), slot(1)), submit_s=0.0, work_s=100.0),
        SimJob(ask=choosing("j", *choices, at=1.0), submit_s=1.0, work_s=8000.0),
    ]
    lost = [NodeFailure(node=NodeId("a"), at_s=500.0, back_s=900.0)]
    run = Simulation(s, get_profile("default"), jobs, SystemClock(), failures=lost).run()
    # 2 devices from 1 to 100, 4 to 500, 2 until the node is back at 900, then 4
    done = (100 - 1) * 2 + (500 - 100) * 4 + (900 - 500) * 2
    assert (run.runs[JobId("j")].attempts, run.runs[JobId("j")].end_s) == (1, 900 + (8000 - done) / 4)
    assert run.violations == 0
