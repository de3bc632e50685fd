"""The trace of a job as Perfetto opens it, and what it says of where the time went."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.makers import JOB, loop, op, placement, service, spec

from rota.job.core.progress import Span
from rota.service.views.graph import trace_document
from rota.service.views.job_history import begin_history
from rota.spec.events import Committed, Event, JobAdmitted, JobQueued, JobSubmitted, Record
from rota.spec.ids import Epoch
from rota.spec.job import Edge, JobSpec, StreamSpec

T0 = 1000.0


def played(*events: tuple[float, Event], job: JobSpec | None = None):
    job = job or spec(service("reward", 1, op("score")), loop())
    given = [
        (T0, JobSubmitted(spec=job)),
        (T0, JobQueued()),
        (T0, JobAdmitted(attempt=1, epoch=Epoch(1), placement=placement(job))),
        *events,
    ]
    records = [Record(number=n, job=JOB, seq=n, at=at, event=event) for n, (at, event) in enumerate(given, 1)]
    story = begin_history(records[0])
    for record in records[1:]:
        story.apply(record)
    return story, records


def test_a_trace_has_a_lane_per_instance_calls_as_flows_and_says_what_bounds_the_job() -> None:
    story, records = played((T0 + 10, Committed(n=1, loop_epoch=Epoch(1))))
    spans = {
        "loop/0": [
            Span(kind="call", name="score", at_s=T0, s=8.0, target="reward/0", call="c1"),
            Span(kind="commit", name="1", at_s=T0 + 9, s=1.0, target="master"),
        ],
        "reward/0": [Span(kind="run", name="score", at_s=T0 + 1, s=6.0, call="c1")],
    }
    found = trace_document(story, records, spans)
    assert found["summary"] == {
        "steps": 1,
        "seconds": 10.0,
        "bound_by": {"reward": 0.8, "loop": 0.1, "commit": 0.1},
        "idle": {"reward": pytest.approx(0.4)},
    }
    events = found["traceEvents"]
    lanes = {one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert lanes >= {"loop/0 waits", "reward/0", "critical path", "commits", "recoveries", "states"}
    slices = {(one["name"], one["ts"], one["dur"]) for one in events if one["ph"] == "X"}
    assert {("score", 1_000_000, 6_000_000), ("call reward/0 score", 0, 8_000_000), ("step 1", 0, 10_000_000)} <= slices
    assert ("ADMITTED", 0, 10_000_000) in slices, "its last state goes on to the end of what is known"
    start, finish = (next(one for one in events if one["ph"] == phase) for phase in "sf")
    assert (start["id"], start["ts"], finish["id"], finish["ts"]) == (1, 0, 1, 1_000_000)
    assert start["pid"] != finish["pid"], "the arrow goes from the caller's lane to the callee's"


def test_items_that_go_through_operations_beside_the_loop_do_not_count_as_what_it_waits_for() -> None:
    prompts, groups = StreamSpec(name="prompts", source="m:p"), StreamSpec(name="groups")
    ways = (Edge(source="prompts", target="rollout.generate"), Edge(source="rollout.generate", target="groups"))
    rollout = service("rollout", 1, op("generate", send="Each"))
    job = spec(rollout, loop(), streams=(prompts, groups), edges=tuple(replace(one, kind="stream") for one in ways))
    story, records = played((T0 + 10, Committed(n=1, loop_epoch=Epoch(1))), job=job)
    spans = {
        "loop/0": [
            Span(kind="call", name="generate", at_s=T0, s=10.0, target="rollout/0", call="c1"),
            Span(kind="stream", name="groups", at_s=T0, s=2.0, target="rollout/0"),
        ],
        "rollout/0": [Span(kind="run", name="generate", at_s=T0, s=10.0, call="c1")],
    }
    summary = trace_document(story, records, spans)["summary"]
    assert summary["bound_by"] == {"loop": 0.8, "rollout": 0.2}


def test_a_job_that_left_no_spans_has_an_empty_trace() -> None:
    story, records = played()
    found = trace_document(story, records, {})
    assert found["summary"] == {"steps": 0, "seconds": 0.0, "bound_by": {}, "idle": {}}
