"""Traces play through the live cycle; figures follow from them; a private cluster is the yardstick of guarantees."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cluster_makers import ask, node, slot, state

from rota.cluster.core.cycle import step
from rota.cluster.core.events import JobArrived, apply
from rota.cluster.core.guarded import guarded
from rota.cluster.core.jobs import Allocations, LiveJob
from rota.cluster.core.profile import Placer
from rota.cluster.core.state import InvariantBroken, State
from rota.cluster.core.txn import Txn
from rota.cluster.policies import PROFILES, get_profile
from rota.cluster.sim.forecast import Estimates, Forecast
from rota.cluster.sim.report import means, waits
from rota.cluster.sim.runs import SimInput, compare, lines_of, load, run_sim, simulate
from rota.cluster.sim.sharing import LendAndPack, with_sharing
from rota.cluster.sim.simulate import Overheads, SimJob, Simulation
from rota.cluster.sim.traces import Tenant, TraceError, generate, read_trace
from rota.runtime.clock import SystemClock
from rota.runtime.random import SeededRandom
from rota.spec.ids import JobId
from rota.spec.reasons import Reason
from rota.testing.memory import VirtualClock

DEEP = os.environ.get("ROTA_DEEP") == "1"
TRACE = """job_id,submit_s,duration_s,gpus,vc
late,5,10,8,a
first,0,100,8,a
other,0,7,12,b
lost,0,1,1,nowhere
"""


def files(tmp_path: Path, trace: str = TRACE, vcs: str = "vc,nodes\na,1\nb,2\n") -> tuple[Path, Path]:
    (tmp_path / "t.csv").write_text(trace)
    (tmp_path / "v.csv").write_text(vcs)
    return tmp_path / "t.csv", tmp_path / "v.csv"


def test_a_private_run_has_the_times_that_follow_by_hand(tmp_path: Path) -> None:
    shown = run_sim(*files(tmp_path), "private")
    times = {job["job_id"]: (job["first_start_s"], job["end_s"], job["gpus"]) for job in shown["jobs"]}
    assert times == {"first": (0, 100, 8), "late": (100, 110, 8), "other": (0, 7, 16)}
    assert shown["cluster"] == {"nodes": 3, "gpus": 24, "vcs": {"a": 1, "b": 2}}
    figures = shown["summary"]
    assert (figures["jobs"], figures["finished"], figures["skipped"], figures["makespan_s"]) == (3, 3, 1, 110)
    assert shown["unknown_tenants"] == ["nowhere"]
    assert figures["wait_s"]["max"] == 95
    assert figures["utilisation"] == pytest.approx((8 * 110 + 16 * 7) / (24 * 110))
    assert figures["invariant_violations"] == 0


def test_the_response_of_a_job_is_from_its_submission_to_its_first_work(tmp_path: Path) -> None:
    """A start costs 30 s: the response is the wait and 30 s; who is stopped before that responds at its next start."""
    costs = Overheads(start_s=30.0)
    shown = run_sim(*files(tmp_path), "private", overheads=costs)
    times = {job["job_id"]: (job["wait_s"], job["response_s"], job["end_s"]) for job in shown["jobs"]}
    assert times == {"first": (0, 30, 130), "late": (125, 155, 170), "other": (0, 30, 37)}
    figures = shown["summary"]
    assert (figures["wait_s"]["max"], figures["response_s"]["max"]) == (125, 155)
    assert run_sim(*files(tmp_path), "private")["summary"]["response_s"]["max"] == 95, "without costs it is the wait"
    trace = "job_id,submit_s,duration_s,gpus,vc,priority\nlow,0,10,8,a,1\nhigh,20,10,8,a,90\n"
    shown = run_sim(*files(tmp_path, trace, "vc,nodes\na,1\n"), "default", overheads=costs)
    times = {job["job_id"]: (job["first_start_s"], job["wait_s"], job["response_s"]) for job in shown["jobs"]}
    assert times == {"high": (20, 0, 30), "low": (0, 0, 90)}


def test_the_gap_of_dominant_shares_is_that_between_who_has_most_and_the_one_that_waits(tmp_path: Path) -> None:
    trace = "job_id,submit_s,duration_s,gpus,vc\nmost,0,100,16,a\nwaits,0,10,8,b\n"
    shown = run_sim(*files(tmp_path, trace, "vc,nodes\na,1\nb,1\n"), "fifo")
    assert shown["summary"]["dominant_share_gap"] == pytest.approx(2.0), "a uses twice its part, b nothing, for 100 s"
    alone = run_sim(*files(tmp_path, trace.replace(",16,", ",8,"), "vc,nodes\na,1\nb,1\n"), "fifo")
    assert alone["summary"]["dominant_share_gap"] == 0.0, "nobody waits"


def test_the_same_input_gives_the_same_output(tmp_path: Path) -> None:
    one, two = (run_sim(*files(tmp_path), "hived") for _ in range(2))
    for shown in (one, two):
        for measured in ("wall_s", "jobs_per_s", "decision_ms"):
            shown["summary"].pop(measured)
    assert one == two


def test_a_job_that_never_fits_is_unschedulable_and_has_no_times(tmp_path: Path) -> None:
    shown = run_sim(*files(tmp_path, TRACE + "huge,1,1,640,a\n"), "fifo")
    (huge,) = (job for job in shown["jobs"] if job["job_id"] == "huge")
    assert (huge["state"], huge["first_start_s"], shown["summary"]["unschedulable"]) == ("UNSCHEDULABLE", None, 1)
    (never,) = shown["never_started"]
    assert (never["job_id"], never["reason"]) == ("huge", "TOO_LARGE")
    assert never["text"].startswith("the whole gang asks 640 GPUs at once; the cluster has ")


def test_the_state_of_a_job_is_what_the_scheduler_has_of_it_when_the_run_is_over() -> None:
    """At 50 s the first works, the second waits for its devices, the third has ended, two come later or never fit."""
    jobs = [
        SimJob(ask=ask("ended", slot(4)), submit_s=0.0, work_s=10.0),
        SimJob(ask=ask("works", slot(8)), submit_s=10.0, work_s=100.0),
        SimJob(ask=ask("waits", slot(4)), submit_s=20.0, work_s=1.0),
        SimJob(ask=ask("huge", slot(64)), submit_s=20.0, work_s=1.0),
        SimJob(ask=ask("later", slot(1)), submit_s=60.0, work_s=1.0),
    ]
    found = Simulation(state(node("n0", 8)), get_profile("fifo"), jobs, SystemClock(), until_s=50.0).run().runs
    states = {"ended": "SUCCEEDED", "works": "RUNNING", "waits": "QUEUED", "huge": "UNSCHEDULABLE", "later": "QUEUED"}
    assert {job: run.state for job, run in found.items()} == states
    reasons = {job: run.why and run.why.reason for job, run in found.items()}
    assert (reasons["huge"], reasons["later"], reasons["waits"] is None) == (Reason.TOO_LARGE, None, False)


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("job_id,submit_s,gpus,vc\n", "lacks duration_s"),
        (TRACE + "first,1,1,1,a\n", "occurs twice"),
        (TRACE + "x,1,soon,1,a\n", "t.csv:6:5: duration_s: 'soon' is not a number"),
        (TRACE + "\nx,1,nan,1,a\n", "t.csv:7:5: duration_s: 'nan' is not a number"),
        (TRACE + "x,inf,1,1,a\n", "t.csv:6:3: submit_s: 'inf' is not a number"),
        (TRACE + "x,1,1,1.5,a\n", "t.csv:6:7: gpus: 1.5 is not a whole number"),
        ("job_id,submit_s,duration_s,gpus,vc,gang\nx,1,1,8,a,0x8\n", "t.csv:2:11: gang: '0x8' is not MEMBERSxDEVICES"),
        (TRACE + "x,-1,1,1,a\n", "is below 0"),
    ],
)
def test_a_bad_trace_names_line_field_and_rule(tmp_path: Path, trace: str, message: str) -> None:
    path, _ = files(tmp_path, trace)
    with pytest.raises(TraceError, match=message):
        read_trace(path, [Tenant(vc="a", nodes=1)])


def test_a_tenant_that_is_there_twice_is_refused_at_its_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"v\.csv:4:1: vc: 'a' occurs twice"):
        load(*files(tmp_path, vcs="vc,nodes\na,1\nb,2\na,3\n"))


def random_input(seed: int, load: float, jobs: int = 250, opportunistic: int = 0) -> SimInput:
    tenants = (Tenant(vc="a", nodes=2), Tenant(vc="b", nodes=3), Tenant(vc="c", nodes=1))
    trace = generate(SeededRandom(seed), tenants, jobs=jobs, load=load)
    if opportunistic:
        trace = trace.beside(generate(SeededRandom(seed + 1), tenants, jobs=opportunistic, load=load))
    return SimInput(trace=trace, tenants=tenants, scale=1.0, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_guaranteed_job_starts_later_on_shared_cells_than_on_a_private_cluster(seed: int) -> None:
    given = random_input(seed, load=0.9)
    starts = {
        profile: {line.job_id: line.first_start_s for line in lines_of(given, simulate(given, profile, SystemClock()))}
        for profile in ("private", "hived")
    }
    assert starts["private"] == starts["hived"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40) if DEEP else (0, 27))
def test_opportunistic_work_that_fills_the_rest_makes_no_guaranteed_job_later(seed: int) -> None:
    given = random_input(seed, 0.9, 100, opportunistic=100)
    runs = {profile: simulate(given, profile, SystemClock()) for profile in ("private", "hived")}
    starts = {
        name: {line.job_id: line.first_start_s for line in lines_of(given, run) if line.guaranteed}
        for name, run in runs.items()
    }
    assert starts["private"] == starts["hived"]
    assert runs["hived"].violations == 0 and runs["hived"].used_gpu_s > 1.2 * runs["private"].used_gpu_s


def test_comparing_counts_who_starts_later_than_in_the_baseline(tmp_path: Path) -> None:
    trace = "job_id,submit_s,duration_s,gpus,vc\n" + "".join(f"s{i},0,100,1,a\n" for i in range(4)) + "big,1,10,8,b\n"
    shown = compare(*files(tmp_path, trace, "vc,nodes\na,1\nb,1\n"), ["private", "hived", "pool-spread"])
    later = {name: run["vs_baseline"]["later_guaranteed"] for name, run in shown["profiles"].items()}
    assert later == {"private": 0, "hived": 0, "pool-spread": 1}
    assert shown["profiles"]["pool-spread"]["vs_baseline"]["extra_s"]["max"] == 99


def test_an_estimate_is_exact_when_durations_are_and_leaves_the_state_alone() -> None:
    s, fifo = state(node("n", 8)), get_profile("fifo")
    step(s, JobArrived(ask=ask("run", slot(8), est_s=100.0)), fifo, 0.0)
    step(s, JobArrived(ask=ask("next", slot(8), at=10, est_s=50.0)), fifo, 10.0)
    step(s, JobArrived(ask=ask("last", slot(1), at=20, est_s=5.0)), fifo, 20.0)
    before = s.digest()
    found = Forecast(s, fifo, 30.0).play(VirtualClock()).of(JobId("last"))
    assert found.p50 == 150.0
    assert s.digest() == before


def test_a_simulated_job_starts_when_those_before_it_are_over_and_so_does_an_estimate_of_it() -> None:
    first, long, last = (JobId(name) for name in ("first", "long", "last"))
    asks = (ask("first", est_s=10.0), ask("long", est_s=30.0), ask("last", after=(first, long), est_s=5.0))
    jobs = [SimJob(ask=one, submit_s=at, work_s=one.est_s or 0.0) for one, at in zip(asks, (0.0, 0.0, 20.0))]
    run = Simulation(state(node("n", 8)), get_profile("default"), jobs, SystemClock()).run()
    assert {job: one.first_start_s for job, one in run.runs.items()} == {first: 0.0, long: 0.0, last: 30.0}
    s = state(node("n", 8))
    for one in asks:
        step(s, JobArrived(ask=one), get_profile("default"), 0.0)
    assert Forecast(s, get_profile("default"), 1.0).play(VirtualClock()).of(last).p50 == 30.0


class Starts(Simulation):
    """A run that keeps every start."""

    def _start(self, job: JobId, held: Allocations) -> None:
        self.__dict__.setdefault("starts", []).append((self.now, job))
        super()._start(job, held)


@pytest.mark.parametrize("seed", range(6 if DEEP else 1))
@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(name, marks=[pytest.mark.slow] * name.startswith(("gandiva", "kai")))
        for name in sorted(PROFILES)
        if DEEP or name != "gandiva-pack"
    ],
)
def test_an_estimate_is_the_next_start_under_every_profile_when_nobody_comes_later(
    tmp_path: Path, profile: str, seed: int
) -> None:
    rng, fork = random.Random(seed), 230.5 if profile.startswith("gandiva") else 23.5
    rows = "".join(
        f"j{i:02},{i},{rng.randrange(100, 400)},{rng.choice((1, 2, 4, 8))},{rng.choice('ab')},{rng.choice((50, -1))}\n"
        for i in range(24 if DEEP else 10)
    )
    given = load(*files(tmp_path, "job_id,submit_s,duration_s,gpus,vc,priority\n" + rows, "vc,nodes\na,1\nb,1\n"))
    jobs = [replace(job, ask=replace(job.ask, est_s=job.work_s)) for job in given.jobs()]
    rules = with_sharing(get_profile(profile))
    real = Starts(State(given.nodes, given.queues), rules, jobs, SystemClock())
    real.run()
    live = State(given.nodes, given.queues)
    Simulation(live, rules, jobs, SystemClock(), until_s=fork).run()
    waiting = sorted(row.ask.id for row in live.waiting_jobs())
    assert len(waiting) >= 2
    found = Forecast(live, rules, fork).play(VirtualClock())
    for job in waiting:
        after = [at for at, one in real.__dict__["starts"] if one == job and at > fork]
        assert found.of(job).p50 == (after[0] if after else None)


def test_no_job_is_promised_a_start_in_the_past_and_who_ran_is_played_anew() -> None:
    one, two = JobId("one"), JobId("two")
    known = Estimates(starts={one: (3.0, 5.0, 20.0)}, basis="")
    assert (known.of(one, 9.0).p50, known.of(one, 9.0).p90, known.of(two, 9.0).p50) == (9.0, 20.0, None)
    s = state(node("n", 4))
    for at, job in enumerate(("one", "two")):
        step(s, JobArrived(ask=ask(job, slot(4), at=at, est_s=50.0)), get_profile("fifo"), float(at))
    assert Forecast(s, get_profile("fifo"), 2.0).play(VirtualClock()).starts == {two: (26.0, 50.0, 98.0)}


@dataclass(frozen=True)
class FailsAt:
    """A placer with a bug: it raises for one job, and gives another what a running one has."""

    inner: Placer

    def place(self, state: State, txn: Txn, row: LiveJob) -> Allocations | None:
        if row.ask.id == "raises":
            raise ZeroDivisionError
        held = next((one.held for one in state.holders()), None)
        return held if held and row.ask.id == "twice" else self.inner.place(state, txn, row)


def test_a_simulation_leaves_out_the_jobs_at_which_a_policy_fails_as_a_service_does() -> None:
    profile = get_profile("fifo")
    jobs = [
        SimJob(ask=ask(name, slot(2), at=float(at)), submit_s=float(at), work_s=9.0)
        for at, name in enumerate(("raises", "first", "twice", "last"))
    ]
    result = Simulation(
        state(node("n", 4)), replace(profile, placer=FailsAt(profile.placer)), jobs, SystemClock()
    ).run()
    ended = {job: run.end_s for job, run in result.runs.items()}
    assert ended == {"raises": None, "first": 10.0, "twice": 21.0, "last": 12.0}
    assert result.violations == 2, "one for each job that was left out, however many decisions there were"
    why = result.runs[JobId("raises")].why
    assert why is not None and why.reason is Reason.INTERNAL and "ZeroDivisionError" in why.text


def test_a_pass_that_gives_one_thing_twice_without_a_wrong_start_ends_the_decision_and_shows_it() -> None:
    """A policy that lends a running job what it starts another on: leaving out jobs would not help."""
    s, profile = state(node("n", 4)), get_profile("gandiva")
    step(s, JobArrived(ask=replace(ask("lent", slot(2)), slots_max=2)), profile, 0.0)
    apply(s, JobArrived(ask=ask("starts", slot(2))), 1.0)

    class LendsTwice(LendAndPack):
        def lend(self, state: State, txn: Txn, placer: Placer) -> dict[JobId, Allocations]:
            lent, starts = (state.jobs[JobId(job)].held for job in ("lent", "starts"))
            return {JobId("lent"): lent + starts} if starts else {}

    with pytest.raises(InvariantBroken, match=r"no start is wrong by itself.*Admit.*Resize"):
        guarded(s, replace(profile, sharing=LendsTwice(60.0)), 2.0)


def test_drawings_show_what_the_run_did(tmp_path: Path) -> None:
    trace = "job_id,submit_s,duration_s,gpus,vc\nfirst,0,100,8,a\nnext,50,100,8,a\nb,0,300,4,b\n"
    shown = compare(*files(tmp_path, trace, "vc,nodes\na,1\nb,1\n"), ["private", "fifo"], plots=tmp_path / "drawn")
    names = ["utilisation.svg", "queue.svg", "fairness.svg", "waits-private.svg", "waits-fifo.svg"]
    assert shown["plots"] == names and sorted(p.name for p in (tmp_path / "drawn").iterdir()) == sorted(names)
    for name in names:
        lines = ElementTree.parse(tmp_path / "drawn" / name).findall(".//{http://www.w3.org/2000/svg}polyline")
        assert len(lines) == 2 and all(line.get("points") for line in lines)
    result = simulate(load(*files(tmp_path, trace, "vc,nodes\na,1\nb,1\n")), "private", SystemClock())
    assert [(s.at, s.seconds, s.used_gpus, s.waiting) for s in result.samples] == [
        (0, 50, 12, 0),
        (50, 50, 12, 1),
        (100, 100, 12, 0),
        (200, 100, 4, 0),
    ]
    hours, used = means(result.samples, [s.used_gpus for s in result.samples])
    assert (hours[0], used[0], used[-1]) == (0.0, 12.0, 4.0) and used.mean() == pytest.approx(28 / 3)
    x, y = waits(lines_of(load(tmp_path / "t.csv", tmp_path / "v.csv"), result))["a"]
    assert list(x) == pytest.approx([0.0, 1.69897]) and list(y) == [0.5, 1.0]
