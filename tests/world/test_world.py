"""Seeds of the whole system, and planted bugs that it must find."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace

import pytest

from rota.spec.events import FailoverStarted, JobAdmitted, JobEnded, RolledBack, TimerFired
from rota.spec.ids import InstanceId, JobId, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import JobState
from rota.testing.memory import VirtualClock
from tests.real.jobs import deep
from tests.world import virtual
from tests.world.bodies import Store
from tests.world.bugs import BUGS, SHOWN, STOPS, Bug
from tests.world.kept import keep_seed, kept_seeds
from tests.world.world import Swarm, play

SEEDS = (0, 2, 4, 6)
SLOW_SEEDS = (1, 3, 5, *range(7, 30))
BUG_SEEDS_MAX = 500 if os.environ.get("ROTA_DEEP") else 40
LONG = {"snapshot_without_tail", "superfluous_victim", "timer_of_an_old_epoch", "reserved_before_released"}
"""Planted bugs that take many seeds, or a long one, to be found."""
KEPT = tuple(kept_seeds())[:4]
"""Seeds that once found something; the later ones of the file are slow tests."""
KEPT_SLOW = tuple(kept_seeds())[4:]


@pytest.mark.parametrize(
    "seed", [*SEEDS, *KEPT, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (*SLOW_SEEDS, *KEPT_SLOW))]
)
def test_a_seed_keeps_every_law_and_every_job_ends(seed):
    assert play(seed).appends > 0


def test_a_seed_gives_the_same_trace_again():
    assert play(7).trace.hexdigest() == play(7).trace.hexdigest()


def test_a_world_that_works_for_ever_is_found_and_what_waits_in_it_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(virtual, "STILL_MAX", 1_000)
    ended = list[str]()

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waiting")

    async def main(clock: VirtualClock) -> None:
        kept = asyncio.create_task(waiting())
        while not kept.done():
            await asyncio.sleep(0)

    with pytest.raises(virtual.Stuck, match="1000 rounds"):
        virtual.run(main)
    assert ended == ["waiting"]


def test_a_master_that_begins_with_a_kept_context_knows_what_the_whole_log_says():
    """The world compares each living master with a replay from the first record; some get torn contexts."""
    world = play(60, Swarm(jobs=2, faults_s=60.0, kill_master_s=4.0, kill_instance_s=9.0, torn_context_p=0.3))
    assert min(world.given) >= 2


@pytest.mark.slow
def test_a_job_that_has_time_to_stop_at_a_commit_loses_none_though_it_comes_up_on_another_host():
    moved, swarm = 0, replace(STOPS, pause_job_s=15.0)
    for seed in range(8):
        seen, homes = play(seed, swarm).log.read(limit=10**9), dict[JobId | None, set[str]]()
        for record in seen:
            if isinstance(record.event, JobAdmitted):
                home = {bundle.host for bundle in record.event.placement.bundles}
                moved += homes.get(record.job, home) != home
                homes[record.job] = home
        back = [one.event for one in seen if isinstance(one.event, RolledBack)]
        assert [one for one in back if one.to_commit < one.from_commit] == []
    assert moved > 5


def test_who_is_still_importing_is_not_taken_for_one_that_hangs():
    world = play(3, Swarm(jobs=2, faults_s=60.0, kill_instance_s=20.0, imports_s=600.0, quiet_max_s=20_000.0))
    events = [record.event for record in world.log.read(limit=10**9)]
    assert any(isinstance(one, FailoverStarted) for one in events)
    assert not [one for one in events if isinstance(one, TimerFired) and one.timer.startswith("start/")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", (5, 12, *(pytest.param(one, marks=deep) for one in (1, 23))))
def test_the_master_may_die_before_and_after_each_of_its_appends(scenario):
    """Every one of them in turn; a kill of an instance every few seconds makes recoveries part of the scenario."""
    swarm = Swarm(jobs=1, faults_s=20.0, kill_instance_s=6.0)
    appends = play(scenario, swarm).appends
    assert appends > 10
    for crash_at in range(2, 2 * appends + 2):
        play(scenario, replace(swarm, crash_at=crash_at))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "bug", [pytest.param(one, id=one.name, marks=[deep] if one.name in LONG else []) for one in BUGS]
)
def test_the_world_finds_a_planted_bug(bug: Bug, monkeypatch: pytest.MonkeyPatch):
    bug.plant(monkeypatch)
    assert any(finds(bug, seed) for seed in range(BUG_SEEDS_MAX)), f"not found: {bug.plant.__doc__}"


def test_what_every_planted_bug_breaks_is_there_to_be_broken(monkeypatch: pytest.MonkeyPatch):
    """A rename that leaves a plant without its function is seen by the fast tests, too."""
    for bug in BUGS:
        with monkeypatch.context() as patch:
            bug.plant(patch)
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 30


def finds(bug: Bug, seed: int) -> bool:
    try:
        play(seed, bug.swarm, log=bug.log)
    except SHOWN:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("seed", (3, 8))
def test_the_world_over_the_sql_log_gives_the_trace_of_the_one_in_memory(seed):
    over_sql = play(seed, log="sql")
    assert (over_sql.trace.hexdigest(), over_sql.unread) == (play(seed).trace.hexdigest(), over_sql.given[1])


def test_jobs_of_queues_with_limits_keep_every_law_and_some_are_preempted():
    seen = play(15, Swarm(faults_s=60.0, jobs=5, limited=True)).seen
    assert seen["PreemptAsked"] and seen["JobEnded"] == 5


@pytest.mark.parametrize("seed", (0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))))
def test_jobs_that_start_after_others_start_once_those_ended_as_asked_or_end_with_them(seed):
    world = play(seed, replace(Swarm.draw(random.Random(seed)), jobs=4, after=True, faults_s=60.0))
    ends = {one.job: one.event for one in world.log.read(limit=10**9) if isinstance(one.event, JobEnded)}
    failed = {job for job, end in ends.items() if end.state is not JobState.SUCCEEDED}
    never = {
        job for job, spec in world.specs.items() if any(o.when == "succeeded" and o.job in failed for o in spec.after)
    }
    assert {job for job, end in ends.items() if end.reason is Reason.DEPENDENCY_FAILED} <= never <= failed


def test_a_seed_that_failed_is_kept_once_with_what_it_found(tmp_path):
    file = tmp_path / "seeds.txt"
    file.write_text("65\n")
    for _ in range(2):
        keep_seed(7, "Violation: j0: commit 3\nafter 1", file)
    assert kept_seeds(file) == {65: "", 7: "Violation: j0: commit 3 after 1"}


def test_a_context_is_unreadable_only_when_it_was_cut_short(capfd):
    torn = Swarm(jobs=2, faults_s=60.0, kill_master_s=4.0, kill_instance_s=9.0, torn_context_p=0.3)
    world = play(60, torn)
    assert world.unread >= world.given[1] > 0
    assert play(60, replace(torn, torn_context_p=0.0)).unread == 0
    assert "is left out" not in capfd.readouterr().err


def test_a_commit_that_was_given_up_is_not_the_later_one_of_its_number():
    store, job, one = Store(), JobId("j0"), InstanceId(RoleName("actor"), 0)
    store.shadow("h0", job, one, 3, 12)
    assert store.has("h0", job, one, 3) and store.in_memory("h0", job, one, 3, 12)
    assert not store.in_memory("h0", job, one, 3, 15) and not store.in_memory("h1", job, one, 3, 12)
    store.shadow("h0", job, one, 3, 15)
    assert store.in_memory("h0", job, one, 3, 15) and not store.in_memory("h0", job, one, 3, 12)
