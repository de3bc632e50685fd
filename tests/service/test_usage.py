"""What ``rota report`` adds up, from the records of jobs."""

from __future__ import annotations

import pytest
from tests.makers import JOB, loop, op, placement, service, spec

from rota.service.views.cluster import usage_history, usage_report
from rota.service.views.job_history import JobHistory, begin_history
from rota.service.views.jobs import job_summary
from rota.spec.events import DowntimePassed, JobAdmitted, JobQueued, JobRequeued, JobSubmitted, Record
from rota.spec.ids import Epoch
from rota.spec.reasons import Reason

T0 = 1000.0


def stopped_once() -> JobHistory:
    """Admitted after 5 s, preempted before it ran, admitted again after 60 s."""
    job = spec(service("reward", 1, op("score")), loop())
    given = [
        (T0, JobSubmitted(spec=job)),
        (T0, JobQueued()),
        (T0 + 5, JobAdmitted(attempt=1, epoch=Epoch(1), placement=placement(job))),
        (T0 + 20, JobRequeued(attempt=1, reason=Reason.PREEMPTED_PRIORITY, counts=False)),
        (T0 + 60, JobAdmitted(attempt=2, epoch=Epoch(9), placement=placement(job))),
    ]
    records = [Record(number=n, job=JOB, seq=n, at=at, event=event) for n, (at, event) in enumerate(given, 1)]
    story = begin_history(records[0])
    for record in records[1:]:
        story.apply(record)
    return story


def test_the_wait_is_to_the_first_devices_and_the_response_to_when_a_job_first_ran() -> None:
    story = stopped_once()

    def figures() -> tuple[float | None, float | None]:
        [row] = usage_report([story], [], by="user", since=T0, now=T0 + 100)["items"]
        return row["wait_s"]["max"], row["response_s"]["max"]

    assert figures() == (5.0, None), "it has not run yet"
    story.attempts[1].started_at = T0 + 75
    assert figures() == (5.0, 75.0)


def test_downtime_counts_in_no_report_and_only_where_it_was() -> None:
    story = stopped_once()
    downtime = Record(number=6, job=JOB, seq=6, at=T0 + 90, event=DowntimePassed(since=T0 + 70))
    story.apply(downtime)
    story.attempts[1].started_at = T0 + 65
    held = sum(bundle.res.cpus for bundle in story.attempts[1].placement.bundles)

    def cpu_s(since: float, now: float) -> float:
        [row] = usage_report([story], [], by="user", since=since, now=now)["items"]
        return row["cpu_hours"] * 3600 / held

    assert cpu_s(T0 + 60, T0 + 100) == pytest.approx(20, abs=0.2)
    assert cpu_s(T0 + 95, T0 + 100) == pytest.approx(5, abs=0.2), "the downtime was before"
    assert cpu_s(T0 + 80, T0 + 85) == 0
    assert job_summary(story, T0 + 100, lambda _: None)["run_s"] == 15.0
    runs = usage_history([story], 8, since=T0, now=T0 + 100, points=10)["items"]
    assert [one["running"] for one in runs] == [0.5, 1, 0, 0, 0, 0, 1, 0, 0, 1]


def test_use_over_time_is_the_mean_of_each_step() -> None:
    held = sum(bundle.res.gpus for bundle in stopped_once().attempts[0].placement.bundles)
    found = usage_history([stopped_once()], 8, since=T0, now=T0 + 100, points=10)
    assert [one["waiting"] for one in found["items"]] == [0.5, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    runs = [one["running"] for one in found["items"]]
    assert runs == [0.5, 1, 0, 0, 0, 0, 1, 1, 1, 1]
    assert [one["gpus_used"] for one in found["items"]] == [one * held for one in runs]
    assert (found["gpus"], found["step_s"]) == (8, 10.0)
    late = usage_history([stopped_once()], 8, since=T0 + 62.5, now=T0 + 65, points=1)
    assert late["items"][0]["running"] == 1
