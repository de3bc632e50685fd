"""Jobs that start after others, as the live scheduler sees them: gated, explained, released, or ended with them."""

from __future__ import annotations

import pytest
from test_cluster_live import requests_of, spec, with_nodes

from rota.cluster.live import Scheduler
from rota.cluster.policies import get_profile
from rota.spec.events import JobAdmitted, JobEnded, JobQueued, JobSubmitted, JobWaits
from rota.spec.ids import JobId
from rota.spec.job import After, AfterWhen
from rota.spec.reasons import Reason
from rota.spec.states import JobState


def test_a_job_starts_after_the_one_it_waits_for_and_explains_it_and_a_replay_says_the_same() -> None:
    log = with_nodes()
    log.add(JobSubmitted(spec=spec("first", 1, 1)), "first")
    after = (After(job="first"),)
    log.submit("next", 1, 1, 1.0, after=after)
    log.submit("other", 1, 1, 1.0)
    (job, waits), (other, _) = sorted(log.decide(2.0))
    assert isinstance(waits, JobWaits) and (job, other) == ("next", "other"), "its first is not even inspected"
    assert (waits.reason, waits.text, waits.fields) == (
        Reason.DEPENDENCY,
        "It starts after first.",
        {"after": ["first"]},
    )
    found = log.scheduler.explain(JobId("next"), 2.0)
    assert found is not None and found.why is not None and found.why.reason is Reason.DEPENDENCY
    assert found.would_start_now_with == ()
    log.add(JobQueued(), "first", 3.0)
    assert [job for job, _ in log.decide(3.0)] == ["first"]
    log.add(JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED), "first", 4.0)
    ((job, admitted),) = log.decide(5.0)
    assert isinstance(admitted, JobAdmitted) and job == "next"
    again = Scheduler(get_profile("fifo"), requests_of)
    for record in log.records:
        again.apply(record)
    assert again.state.digest() == log.scheduler.state.digest()


@pytest.mark.parametrize("when", ["succeeded", "ended"])
def test_a_job_whose_dependency_failed_ends_with_it_unless_any_end_will_do(when: AfterWhen) -> None:
    log = with_nodes()
    log.submit("first", 1, 1)
    log.submit("next", 1, 1, after=(After(job="first", when=when),))
    log.submit("last", 1, 1, after=(After(job="next"),))
    log.decide(1.0)
    log.add(JobEnded(state=JobState.FAILED, reason=Reason.EXIT_NONZERO), "first", 2.0)
    ((job, event),) = log.decide(3.0)
    assert job == "next"
    if when == "ended":
        assert isinstance(event, JobAdmitted)
        return
    assert isinstance(event, JobEnded) and (event.state, event.reason) == (JobState.FAILED, Reason.DEPENDENCY_FAILED)
    assert event.text == "first had to succeed first; it ended as FAILED (EXIT_NONZERO)"
    ((job, event),) = log.decide(4.0)
    assert job == "last" and isinstance(event, JobEnded) and "next had to succeed" in event.text
    assert log.decide(5.0) == []
    log.submit("late", 1, 1, 6.0, after=(After(job="first"),))
    assert [(job, type(event)) for job, event in log.decide(6.0)] == [("late", JobEnded)], "it ended meanwhile"


def test_jobs_of_one_line_each_name_what_they_wait_for_and_hold_up_no_other() -> None:
    log = with_nodes()
    log.submit("a", 1, 4)
    log.submit("b", 1, 4)
    log.decide(0.0)
    log.submit("x", 1, 1, 1.0, after=(After(job="a"),))
    log.submit("y", 1, 1, 1.0, after=(After(job="b"), After(job="a")))
    texts = {job: event.text for job, event in log.decide(1.0) if isinstance(event, JobWaits)}
    assert texts == {"x": "It starts after a.", "y": "It starts after b and a."}
    log.add(JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED), "a", 2.0)
    log.submit("z", 1, 2, 2.0)
    found = dict(log.decide(3.0))
    assert isinstance(found["x"], JobAdmitted) and isinstance(found["z"], JobAdmitted)
    assert isinstance(found["y"], JobWaits) and found["y"].text == "It starts after b."
