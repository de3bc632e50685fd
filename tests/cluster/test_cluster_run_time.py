"""How long jobs are expected to run: by what ended jobs took of their limits, and by the progress of a job itself."""

from __future__ import annotations

import random

import pytest
from cluster_makers import ask, node, slot, state

from rota.cluster.core.cycle import step
from rota.cluster.core.events import JobArrived, JobGone, JobHolds, JobSaved, Tick, apply
from rota.cluster.core.jobs import Allocation, JobAsk, Wait, ask_of
from rota.cluster.core.run_time import EVIDENCE, OVERDUE, expected, groups_of, times_of
from rota.cluster.core.state import State
from rota.cluster.policies import get_profile
from rota.cluster.sim.forecast import Estimate, Forecast
from rota.cluster.sim.simulate import SimJob, Simulation
from rota.runtime.clock import SystemClock
from rota.spec.check import check
from rota.spec.ids import JobId
from rota.spec.job import JobSpec
from rota.spec.queue import Queue
from rota.spec.resources import Res


def ended(s: State, *took_s: float, est_s: float | None = 1000.0, user: str = "local") -> None:
    """Jobs that ran alone, one after the other, for so long."""
    for i, seconds in enumerate(took_s):
        one = ask(f"e{i}-{random.random()}", est_s=est_s, user=user)
        apply(s, JobArrived(ask=one), 0.0)
        apply(s, JobHolds(job=one.id, held=(Allocation(0, (0,), 0, 0, 0),)), 0.0)
        apply(s, JobGone(job=one.id), seconds)


def waiting(est_s: float | None = 1000.0, user: str = "local") -> JobAsk:
    return ask("w", est_s=est_s, user=user)


def test_without_ended_jobs_a_job_takes_what_it_asked_and_one_that_took_it_all_says_the_same() -> None:
    s = state(node("n", 1))
    assert expected(s.taken, waiting()) == (1000.0, 1000.0)
    ended(s, 1000.0, 1000.0, 1000.0)
    assert expected(s.taken, waiting()) == (1000.0, 1000.0)
    assert times_of(s.taken, waiting()).is_known


def test_jobs_that_take_a_fifth_of_their_limit_let_others_be_expected_to() -> None:
    s = state(node("n", 1))
    ended(s, *[200.0] * 60, user="ada")
    assert expected(s.taken, waiting(user="ada")) == (200.0, 200.0)
    assert expected(s.taken, waiting(user="bob"))[0] == 200.0, "of a user without ended jobs: as in the queue"
    ended(s, *[900.0] * 60, user="bob")
    assert [expected(s.taken, waiting(user=user))[0] for user in ("ada", "bob")] == [200.0, 900.0]


def test_one_ended_job_is_weighed_against_what_is_known_of_all() -> None:
    s = state(node("n", 1))
    ended(s, 10.0)
    likely, late = expected(s.taken, waiting())
    assert (likely, late) == (1000.0, 1000.0), "one job counts a fifth beside the limit itself"
    ended(s, *[200.0] * 40, user="ada")
    ended(s, 800.0, user="bob")
    assert expected(s.taken, waiting(user="bob"))[0] == 200.0


def test_jobs_without_a_limit_are_expected_to_take_as_many_seconds_as_their_like() -> None:
    s = state(node("n", 1))
    assert expected(s.taken, waiting(est_s=None)) == (None, None)
    ended(s, *[600.0] * 60, est_s=None)
    assert expected(s.taken, waiting(est_s=None)) == (600.0, 600.0)
    assert expected(s.taken, waiting()) == (1000.0, 1000.0), "seconds say nothing of ratios"


def test_who_has_run_for_long_is_expected_among_those_that_took_longer() -> None:
    s = state(node("n", 1))
    ended(s, *[100.0] * 50, *[900.0] * 50)
    times = times_of(s.taken, waiting())
    assert times.at(0.3) == 100.0
    assert times.at(0.3, 150.0) == 900.0
    assert times.at(0.99, 2000.0) == 2000.0 * OVERDUE[-1], "longer than all that are known"


def test_what_was_learned_is_undone_with_a_transaction_and_kept_over_a_change_of_nodes() -> None:
    s = state(node("n", 1))
    ended(s, *[200.0] * 10)
    before, digest = dict(s.taken), s.digest()
    with s.txn():
        s.taken.copy()
        ended(s, 800.0)
        assert s.digest() != digest
    assert (s.taken, s.digest()) == (before, digest)
    assert s.copy().taken == before == s.with_cluster((node("m", 2),), ()).taken
    assert s.copy().taken is not s.taken
    assert set(before) == set(groups_of(waiting()))


def test_a_job_that_says_how_many_commits_it_makes_is_expected_by_its_own_speed() -> None:
    s = state(node("n", 1))
    one = ask("j", est_s=10_000.0, steps=100)
    step(s, JobArrived(ask=one), get_profile("default"), 0.0)
    apply(s, JobSaved(job=one.id, n=1), 60.0)  # what it took to start is not counted
    apply(s, JobSaved(job=one.id, n=11), 80.0)
    row = s.jobs[one.id]
    assert (row.reported_s, s.ends) == (80.0 + 89 * 2.0, [(258.0, "j")])
    apply(s, JobSaved(job=one.id, n=1), 90.0)
    assert s.jobs[one.id].pace == (1, 90.0), "it went back to its first: measured anew"
    step(s, JobArrived(ask=ask("next", at=91.0, est_s=5.0)), get_profile("default"), 91.0)
    found = Forecast(s, get_profile("default"), 91.0).play(SystemClock()).of(JobId("next"))
    assert found.p10 is not None and found.p90 is not None
    assert found.p50 == 258.0 and found.p10 < 258.0 < found.p90


@pytest.mark.parametrize("value", ["0", "many", "-3", "1.5"])
def test_a_number_of_commits_that_is_none_is_refused(value: str) -> None:
    [found] = [
        one for one in check(JobSpec(name="j", roles=(), labels=(("rota.steps", value),))) if "steps" in str(one)
    ]
    assert str(found).startswith(f"labels.rota.steps: {value!r} is not a whole number above 0; say how many")


@pytest.mark.parametrize(
    ("value", "steps"), [("many", 0), ("-3", 0), ("1.5", 0), ("²", 0), ("9" * 5000, 0), ("40", 40)]
)
def test_a_log_with_a_number_of_commits_that_is_none_is_read(value: str, steps: int) -> None:
    spec = JobSpec(name="j", roles=(), labels=(("rota.steps", value),))
    assert ask_of(JobId("j-1"), spec, (), user="ada", queued_at=0.0).steps == steps


def test_a_job_that_is_expected_to_be_over_in_time_passes_before_a_reservation() -> None:
    """A gang of two is due at 1000; a job of limit 5000 passes once its like are known to take a tenth."""
    for known, starts in ((0, False), (60, True)):
        s, profile = state(node("n", 2)), get_profile("default")
        ended(s, *[500.0] * known, est_s=5000.0, user="ada")
        step(s, JobArrived(ask=ask("runs", est_s=1000.0, user="bob")), profile, 0.0)
        held = s.jobs[JobId("runs")]
        with s.txn() as txn:
            s.put(txn, held._replace(reported_s=1000.0))
            txn.keep()
        step(s, JobArrived(ask=ask("gang", slot(2), at=1.0, est_s=10.0)), profile, 1.0)
        step(s, JobArrived(ask=ask("small", at=2.0, est_s=5000.0, user="ada")), profile, 2.0)
        assert bool(s.jobs[JobId("small")].held) is starts


def trace(limits: tuple[float, float]) -> list[SimJob]:
    rng, now, jobs = random.Random(0), 0.0, list[SimJob]()
    for i in range(120):
        now += rng.expovariate(1 / 140.0)
        work_s = rng.lognormvariate(6, 1)
        one = ask(f"j{i:03}", slot(rng.choice((1, 1, 2, 4))), at=now, est_s=work_s * rng.uniform(*limits))
        jobs.append(SimJob(ask=one, submit_s=now, work_s=work_s))
    return jobs


@pytest.mark.parametrize("limits", [pytest.param((2.0, 10.0), marks=pytest.mark.slow), (1.0, 1.0)])
def test_estimates_are_close_and_say_how_sure_they_are(limits: tuple[float, float]) -> None:
    """Jobs that ask 2 to 10 times what they take; ``benchmarks/scheduling.py estimates`` measures it on traces."""
    shown: dict[JobId, tuple[float, Estimate]] = {}
    profile, jobs = get_profile("fifo"), trace(limits)

    def look() -> None:
        for _, job in sorted(entry for line in run.state.lines.values() for entry in line):
            if job not in shown and int(job[1:]) % 10 == 9 and int(job[1:]) > 40 and run.state.jobs[job].wait:
                estimates = Forecast(run.state, profile, run.now, until=job, wall_max_s=60.0).play(SystemClock())
                shown[job] = (run.now, estimates.of(job))

    run = Simulation(state(node("n", 8)), profile, jobs, SystemClock(), between_passes=look)
    runs = run.run().runs
    waits = errors = inside = 0.0
    for job, (at, one) in shown.items():
        start = runs[job].first_start_s
        assert start is not None and one.p10 is not None and one.p50 is not None and one.p90 is not None
        waits, errors = waits + start - at, errors + abs(one.p50 - start)
        inside += one.p10 - 1 <= start <= one.p90 + 1
        assert limits[0] > 1 or (one.p10, one.p90) == (one.p50, one.p50), "nothing is uncertain"
    assert len(shown) >= 5 and errors <= (0.5 if limits[0] > 1 else 1e-9) * waits
    assert inside >= 0.8 * len(shown)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_start_that_is_not_reached_in_time_is_estimated_from_the_work_before_it(devices: int) -> None:
    s = state(node("n", devices))
    for i in range(EVIDENCE):
        step(s, JobArrived(ask=ask(f"j{i}", at=float(i), est_s=100.0)), get_profile("fifo"), float(i))
    found = Forecast(s, get_profile("fifo"), 10.0, wall_max_s=0.0).play(SystemClock())
    left = sum(90.0 + i for i in range(devices))  # of those that run, on all devices
    starts = [10.0 + (left + 100.0 * i) / devices for i in range(EVIDENCE - devices)]
    assert [found.of(JobId(f"j{i}")).p50 for i in range(devices, EVIDENCE)] == starts


def test_a_start_that_is_not_reached_in_a_queue_with_a_limit_waits_for_the_work_of_that_queue() -> None:
    queues = (Queue(path="a", limit=Res(gpus=2)), Queue(path="a/b"), Queue(path="c"))
    s = state(node("n", 8), queues=queues)
    for i in range(6):
        step(s, JobArrived(ask=ask(f"j{i}", at=float(i), est_s=100.0, queue="a/b")), get_profile("fifo"), 0.0)
    step(s, JobArrived(ask=ask("wide", slot(8), at=9.0, est_s=100.0, queue="c")), get_profile("fifo"), 0.0)
    found = Forecast(s, get_profile("fifo"), 0.0, wall_max_s=0.0).play(SystemClock())
    assert [found.starts[JobId(f"j{i}")][1] for i in range(2, 6)] == [100.0, 150.0, 200.0, 250.0]
    assert found.starts[JobId("wide")][1] == 600 / 8


def test_a_paused_job_has_no_estimated_start() -> None:
    s = state(node("n", 1))
    step(s, Tick(), get_profile("fifo"), 0.0)
    for i in range(2):
        step(s, JobArrived(ask=ask(f"j{i}", at=float(i), est_s=100.0)), get_profile("fifo"), float(i))
    with s.txn() as txn:
        row = s.jobs[JobId("j1")]
        s.put(txn, row.__class__(ask=row.ask, phase="paused", wait=Wait(reason=row.wait.reason) if row.wait else None))
        txn.keep()
    assert Forecast(s, get_profile("fifo"), 10.0).play(SystemClock()).of(JobId("j1")).p50 is None


def test_a_job_that_asked_for_no_time_or_less_belongs_to_those_of_which_none_is_known() -> None:
    """A log may have one: reading it must not end the service."""
    assert len({groups_of(waiting(est_s)) for est_s in (None, 0.0, -5.0)}) == 1


def test_jobs_to_come_go_first_in_a_forecast_where_those_of_the_last_day_would() -> None:
    found = dict[float, Estimate]()
    for age_s in (3600.0, 86400.0):  # as many are here either way, of the last day or of the one before
        s = state(node("n", 4), queues=(Queue(path="a", guaranteed=Res(cpus=0, gpus=4)), Queue(path="b")))
        ended(s, *(5400.0 + 200 * i for i in range(EVIDENCE)), est_s=7200.0)
        now, profile = 2 * 86400.0, get_profile("default")
        promised = (ask(f"a{i}", slot(4), queue="a", est_s=7200.0, at=now - age_s) for i in range(8))
        for one in (*promised, ask("last", slot(4), queue="b", est_s=7200.0, at=now)):
            step(s, JobArrived(ask=one), profile, now)
        found[age_s] = Forecast(s, profile, now, wall_max_s=60.0).play(SystemClock()).of(JobId("last"))
        assert s.jobs.keys() == {JobId("last"), *(JobId(f"a{i}") for i in range(8))}
    (more, none), hour_s = found.values(), 3600.0
    assert more.p50 and more.p90 and none.p50 and none.p90
    assert more.p50 > none.p50 + 2 * hour_s and more.p90 > none.p90 + 2 * hour_s, (more, none)
    assert "come as in the last day" in more.basis
    known = state(node("n", 4))  # what is known exactly stays exact
    for one in (ask("r", slot(4), est_s=50.0, at=1.0), ask("w", slot(4), est_s=50.0, at=2.0)):
        step(known, JobArrived(ask=one), get_profile("default"), 2.0)
    assert Forecast(known, get_profile("default"), 2.0).play(SystemClock()).of(JobId("w")).p50 == 52.0


def test_a_job_that_never_starts_prolongs_no_forecast() -> None:
    s, profile, passes = state(node("n", 4)), get_profile("default"), list[None]()
    ended(s, *(50.0 + 10 * i for i in range(EVIDENCE)), est_s=100.0)
    for one in (ask("r", slot(4), at=1.0), ask("w", slot(4), at=2.0), ask("never", slot(8), at=3.0)):
        step(s, JobArrived(ask=one), profile, 3.0)
    found = Forecast(s, profile, 3.0, wall_max_s=60.0).play(SystemClock(), lambda: passes.append(None))
    assert found.of(JobId("w")).p90 is not None and found.of(JobId("never")).p90 is None
    assert len(passes) < 100, "jobs come for a multiple of the wait of the one that starts, and not for a month"
