"""What ``rota report`` adds up, from the records of jobs."""

from __future__ import annotations

from tests.makers import JOB, loop, op, placement, service, spec

from rota.service.views.cluster import usage_history, usage_report
from rota.service.views.job_history import JobHistory, begin_history
from rota.spec.events import JobAdmitted, JobQueued, JobRequeued, JobSubmitted, Record
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
