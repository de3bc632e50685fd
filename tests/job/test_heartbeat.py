"""Silence and progress, on a virtual clock."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
from tests.makers import JOB, at, service, spec
from tests.makers import fail as contract

from rota.job.core.context import InstanceRecord, JobContext, Process
from rota.job.core.graph import expand
from rota.job.health.heartbeat import Heartbeat, HeartbeatAnswer, ProgressMarks
from rota.job.master.diagnosis import DiagnosisManager
from rota.job.rpc.tracing import Collectives, own_collectives
from rota.spec.events import InstanceLost, ProgressStalled
from rota.spec.ids import Epoch
from rota.spec.reasons import Reason
from rota.spec.states import InstanceState
from rota.testing.memory import VirtualClock

EMPTY = Heartbeat(role=at("a/0").role, rank=0, epoch=Epoch(1), started_epoch=Epoch(1), pid=7)


def ready(progress_s: float = 30.0) -> JobContext:
    job = spec(service("a", 1, fail=contract(progress_s=progress_s)))
    one = InstanceRecord(
        id=at("a/0"), state=InstanceState.READY, epoch=Epoch(1), process=Process(epoch=Epoch(1), pid=7)
    )
    return replace(JobContext(job=JOB), spec=job, graph=expand(job), instances={one.id: one})


def test_a_beat_and_its_answer_survive_their_json() -> None:
    lost = InstanceLost(role=EMPTY.role, rank=0, epoch=Epoch(2), reason=Reason.USER_ERROR, text="x", alive=True)
    beat = replace(EMPTY, busy=("update",), lost=lost)
    assert Heartbeat.from_json(beat.to_json()) == beat
    answer = HeartbeatAnswer(master_epoch=Epoch(3))
    assert HeartbeatAnswer.from_json(answer.to_json()) == answer


def test_nothing_running_is_not_idle() -> None:
    clock = VirtualClock()
    marks = ProgressMarks(clock)
    clock.advance(1000)
    assert marks.read(EMPTY).idle_s == 0


def test_collectives_of_any_group_are_marks_and_their_place_alone_is_none() -> None:
    clock = VirtualClock()
    marks = ProgressMarks(clock)
    with marks.running("command"):
        for n in (1, 2, 5):
            clock.advance(10)
            marks.collectives = lambda n=n: Collectives(entered=1, activity=n)
            assert (marks.read(EMPTY).idle_s, marks.read(EMPTY).progress_n) == (0, 0)
        clock.advance(10)
        marks.collectives = lambda: Collectives(entered=1, activity=5, inside="barrier")
        assert marks.read(EMPTY).idle_s == 10


def test_idle_counts_from_the_last_mark_of_what_runs_and_not_through_quiet_spans() -> None:
    clock = VirtualClock()
    marks = ProgressMarks(clock)
    clock.advance(50)
    with marks.running("update"):
        clock.advance(10)
        assert marks.read(EMPTY).idle_s == 10
        marks.mark(5, "steps")
        clock.advance(2)
        found = marks.read(EMPTY)
        assert (found.idle_s, found.progress_n, found.progress_unit, found.busy) == (2, 5, "steps", ("update",))
        with marks.quiet("checkpoint", max_s=20):
            clock.advance(15)
            assert (marks.read(EMPTY).idle_s, marks.read(EMPTY).quiet) == (0, "checkpoint")
            clock.advance(6)
            assert marks.read(EMPTY).idle_s == 23, "a silence longer than declared is none"
        assert marks.read(EMPTY).idle_s == 0
    assert marks.read(EMPTY).busy == ()


def test_an_instance_is_given_up_after_80_s_without_a_beat_once_an_epoch() -> None:
    clock, ctx = VirtualClock(), ready()
    watch = DiagnosisManager(clock)
    assert watch.overdue(ctx) == []
    clock.advance(79)
    assert watch.overdue(ctx) == []
    clock.advance(2)
    (event,) = watch.overdue(ctx)
    assert isinstance(event, InstanceLost) and event.reason is Reason.HANG and not event.alive
    assert watch.overdue(ctx) == []


def test_a_new_master_gives_every_instance_the_whole_limit_again() -> None:
    clock, ctx = VirtualClock(start_s=5000.0), ready()
    watch = DiagnosisManager(clock)
    watch.overdue(ctx)
    clock.advance(60)
    watch.heard(EMPTY)
    clock.advance(60)
    assert watch.overdue(ctx) == []


def test_no_progress_is_told_after_the_limit_of_the_role() -> None:
    clock, ctx = VirtualClock(), ready(progress_s=30)
    watch = DiagnosisManager(clock)
    watch.heard(replace(EMPTY, idle_s=29, busy=("update",)))
    assert watch.overdue(ctx) == []
    watch.heard(replace(EMPTY, idle_s=31, busy=("update",)))
    (event,) = watch.overdue(ctx)
    assert isinstance(event, ProgressStalled) and event.idle_s == 31


def test_silence_of_an_older_epoch_accuses_nobody() -> None:
    clock, ctx = VirtualClock(), ready()
    watch = DiagnosisManager(clock)
    watch.heard(replace(EMPTY, epoch=Epoch(0), idle_s=500, busy=("update",)))
    assert watch.overdue(ctx) == []


def test_a_group_is_not_looked_for_in_a_module_that_another_thread_is_importing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", ModuleType("half"))
    assert own_collectives() == Collectives(entered=-1)
