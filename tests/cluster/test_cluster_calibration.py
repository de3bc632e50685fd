"""Intervals of estimated starts are as wide as what became of earlier estimates asks."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from rota.cluster.sim.calibration import Calibration
from rota.cluster.sim.forecast import Estimates, Start
from rota.spec.ids import JobId


def told(starts: dict[JobId, Start]) -> Estimates:
    return Estimates(starts=starts, basis="limits")


def played(rng: random.Random, late: float, jobs: int) -> Iterator[tuple[float, Start, Start, float]]:
    """Jobs that come one after another: when, the start they were told by plays, the calibrated one, and the true one.

    Plays say that waits are ``late`` times shorter than they are, with a spread that is too small.
    """
    calibration, waiting = Calibration(), dict[JobId, tuple[Start, float]]()
    for i in range(jobs):
        now, job = 100.0 * i, JobId(f"j{i}")
        for one in [one for one, (_, at) in waiting.items() if at <= now]:
            calibration.started(one, waiting.pop(one)[1])
        wait_s = rng.lognormvariate(7.0, 1.0)
        start = (now + 0.8 * wait_s, now + wait_s, now + 1.25 * wait_s)
        true = now + wait_s * late * rng.lognormvariate(0.0, 0.5)
        waiting[job] = (start, true)
        calibration.tell(told({one: start for one, (start, _) in waiting.items()}), now)
        yield now, start, calibration.of(told({job: start}), now).starts[job], true


@pytest.mark.parametrize("late", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("seed", range(5))
def test_eight_of_ten_starts_lie_in_their_intervals_however_wrong_the_plays_are(late: float, seed: int) -> None:
    all_of_them = list(played(random.Random(seed), late, 700))[200:]
    plain = sum(start[0] <= true <= start[2] for _, start, _, true in all_of_them) / len(all_of_them)
    wide = sum(wider[0] <= true <= wider[2] for _, _, wider, true in all_of_them) / len(all_of_them)
    assert plain < 0.4 and 0.75 <= wide <= 0.95, (plain, wide)
    assert all(w[0] <= s[0] and w[1] == s[1] and w[2] >= s[2] for _, s, w, _ in all_of_them), "none is narrower"
    assert all(w[0] >= now for now, _, w, _ in all_of_them)


def test_a_wait_may_be_twice_as_long_as_likely_until_enough_jobs_have_started() -> None:
    calibration, start = Calibration(), (10.0, 20.0, 30.0)
    for i in range(8):
        calibration.tell(told({JobId(f"j{i}"): start}), 0.0)
        calibration.started(JobId(f"j{i}"), 500.0)
    new, far, never = (JobId(name) for name in ("new", "far", "never"))
    few = calibration.of(told({new: start, far: (10.0, 20.0, 90.0), never: (None, None, 90.0)}), 2.0)
    assert few.starts == {new: (10.0, 20.0, 38.0), far: (10.0, 20.0, 90.0), never: (None, None, 90.0)}
    assert few.basis == "limits"
    calibration.tell(told({JobId("last"): start}), 0.0)
    calibration.started(JobId("last"), 500.0)
    found = calibration.of(told({JobId("new"): start, JobId("never"): (None, None, None)}), 0.0)
    assert found.starts[JobId("new")] == (10.0, 20.0, pytest.approx(500.0))
    assert found.starts[JobId("never")] == (None, None, None)
    assert found.basis == "limits; intervals by what became of 9 estimates"


def test_jobs_that_wait_for_longer_than_they_were_told_count_before_they_start_and_those_that_left_do_not() -> None:
    calibration, start = Calibration(), (10.0, 20.0, 30.0)
    for i in range(20):
        calibration.tell(told({JobId(f"j{i}"): start}), 0.0)
        calibration.started(JobId(f"j{i}"), 20.0)
    new, long = JobId("new"), {JobId(f"w{i}"): start for i in range(20)}
    assert calibration.of(told({new: start}), 0.0).starts[new] == start
    calibration.tell(told(long), 0.0)
    late = calibration.of(told({new: (3010.0, 3020.0, 3030.0)}), 3000.0).starts[new][2]
    assert late == pytest.approx(3000.0 + 90.0 * 3060.0 / 90.0 - 60.0), "as long as those wait by now"
    calibration.tell(told({}), 3000.0)
    assert calibration.of(told({new: start}), 0.0).starts[new] == start


def test_a_job_that_should_have_started_at_once_and_waited_for_a_day_makes_no_interval_of_years() -> None:
    calibration, day_s = Calibration(), 86400.0
    for i in range(20):
        job = JobId(f"j{i}")
        calibration.tell(told({job: (0.0, 0.0, 0.0) if i % 5 == 0 else (day_s, day_s, day_s)}), 0.0)
        calibration.started(job, day_s)
    (_, _, late) = calibration.of(told({JobId("new"): (day_s, day_s, day_s)}), 0.0).starts[JobId("new")]
    assert late is not None and day_s < late < 4 * day_s
