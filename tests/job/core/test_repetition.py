"""The same error each time ends the job: what counts as the same, what does not count, and what makes it forgotten."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.makers import admitted, at, command, fail, loop, mesh, replay, service, spec

from rota.job.core import repetition
from rota.job.core.context import JobContext, Loss, NotYet
from rota.job.core.desired import next_emit, timers
from rota.job.core.machine import fold
from rota.spec.events import Committed, FailoverStarted, InstanceLost, JobEnded, JobQueued, PreemptAsked, TimerFired
from rota.spec.ids import Epoch
from rota.spec.reasons import Reason
from rota.spec.states import JobState, Level

TRACE = """Traceback (most recent call last):
  File "/home/ada/job/train.py", line 2, in <module>
    import bug
  File "/home/ada/job/bug.py", line {line}, in step
    json.loads(text)
  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode
    raise JSONDecodeError("Expecting value", s, err.value) from None
{text}
"""
OFTEN = 9
"""Failures in the window that the role absorbs: the window never ends these jobs."""


def error(
    driven, who: str, text: str = "ValueError: bad", line: int = 6, reason: Reason = Reason.USER_ERROR
) -> InstanceLost:
    one = driven.ctx.instances[at(who)]
    trace = TRACE.format(line=line, text=text)
    return InstanceLost(
        role=one.id.role, rank=one.id.rank, epoch=one.epoch, reason=reason, text=text, traceback=trace, alive=True
    )


def tries(driven, who: str, *, most: int = OFTEN, after_s: float = 1.0, **of: object) -> int:
    """Fail again and again; after how many tries the job ended, or ``most``."""
    for n in range(1, most + 1):
        driven.feed(error(driven, who, **of), after_s=after_s)
        driven.settle()
        if driven.ctx.state.terminal:
            return n
    return most


def often(**fields: object):
    return fail(limit_n=OFTEN, **fields)


def test_the_third_same_error_ends_the_job_whatever_the_window_says(driven):
    driven.run(spec(service("w", 2, fail=fail(limit_n=3, limit_window_s=1.0)), loop(), retry=5))
    assert tries(driven, "w/1", after_s=20.0) == 3
    end = driven.records[-1].event
    assert isinstance(end, JobEnded)
    assert (end.state, end.reason, end.role, end.rank) == (JobState.FAILED, Reason.USER_ERROR, "w", 1)
    assert end.text == "gave up after 3 tries: the same ValueError at bug.py:6 each time, no commit between"
    last = [one.event for one in driven.records if isinstance(one.event, FailoverStarted)][-1]
    assert (last.level, last.moved_from, last.move_reason) == (Level.JOB, Level.PROCESS, Reason.SAME_ERROR)
    assert driven.alive == {}


@pytest.mark.parametrize(("same", "ends"), [(0, OFTEN), (1, 1), (2, 2), (5, 5)])
def test_the_number_is_that_of_the_role_and_0_is_never(driven, same, ends):
    driven.run(spec(service("w", fail=fail(limit_n=OFTEN + 1, same=same))))
    assert tries(driven, "w/0") == ends
    assert (driven.ctx.state is JobState.FAILED) == bool(same)


def test_each_instance_of_a_role_has_tries_of_its_own(driven):
    driven.run(spec(service("w", 4, fail=often())))
    for rank in range(4):
        driven.feed(error(driven, f"w/{rank}"), error(driven, f"w/{rank}"))
        driven.settle()
    assert driven.ctx.state is JobState.RUNNING


@pytest.mark.parametrize("role", [mesh("w", 3, fail=often()), service("w", 3, fail=often(restart="role"))])
def test_what_is_restarted_together_has_its_tries_together(driven, role):
    driven.run(spec(role))
    for rank in (2, 0, 1):
        driven.feed(error(driven, f"w/{rank}", text=f"rank {rank}: ValueError: bad"))
        driven.settle()
    assert driven.ctx.state is JobState.FAILED


def test_another_line_or_error_begins_anew(driven):
    driven.run(spec(service("w", fail=often())))
    for line, text in ((6, "ValueError: bad"), (6, "ValueError: bad"), (7, "ValueError: bad"), (7, "KeyError: 'x'")):
        driven.feed(error(driven, "w/0", text, line))
        driven.settle()
    assert [one.count for one in driven.ctx.repeats] == [1]
    assert tries(driven, "w/0", text="KeyError: 'x'", line=7) == 2


def test_a_commit_between_makes_it_forgotten(driven):
    driven.run(spec(service("w", fail=often()), loop()))
    for n in range(1, 6):
        driven.feed(error(driven, "w/0"), after_s=1.0)
        driven.settle()
        driven.feed(Committed(n=n, loop_epoch=driven.ctx.loop_epoch))
    assert driven.ctx.state is JobState.RUNNING
    assert (driven.ctx.repeats, driven.ctx.heals_s) == ((), None)


@pytest.mark.parametrize(
    "reason",
    [Reason.SIGNALLED, Reason.OOM_KILLED, Reason.NODE_LOST, Reason.ENGINE_LOST, Reason.SELF_ENDED, Reason.NO_PROGRESS],
)
def test_what_is_not_in_the_code_never_counts_and_makes_nothing_forgotten(driven, reason):
    driven.run(spec(service("w", fail=fail(limit_n=30))))
    assert tries(driven, "w/0", most=2) == 2
    for _ in range(4):
        assert not repetition.is_hopeless(driven.ctx, loss_of(error(driven, "w/0", reason=reason)))
    driven.feed(error(driven, "w/0", text="its process is gone", reason=Reason.SIGNALLED))
    driven.settle()
    assert tries(driven, "w/0") == 1


@pytest.mark.parametrize(("status", "counts"), [(1, True), (2, True), (255, True), (137, False), (143, False)])
def test_an_exit_status_counts_unless_it_stands_for_a_signal(driven, status, counts):
    driven.run(spec(command("w", fail=fail(limit_n=30))))
    text = f"rank 0 ended with exit status {status}: oh, {{}}"
    for n in range(5):
        if not driven.ctx.state.terminal:
            driven.feed(error(driven, "w/0", text.format(n), reason=Reason.EXIT_NONZERO))
            driven.settle()
    assert driven.ctx.state.terminal == counts
    if counts:
        assert driven.records[-1].event.text.startswith(f"gave up after 3 tries: the same exit status {status} at")


@pytest.mark.parametrize(
    ("text", "trace"),
    [
        ("died at its start: its process is gone", ""),
        ("RaySystemError: no answer", 'File "/x/site-packages/ray/worker.py", line 9, in get'),
    ],
)
def test_a_start_that_the_engine_did_not_carry_out_never_counts(driven, text, trace):
    driven.run(spec(service("w", fail=fail(limit_n=30))))
    reason = Reason.USER_ERROR if trace else Reason.EXIT_NONZERO
    for _ in range(5):
        driven.feed(replace(error(driven, "w/0", text, reason=reason), traceback=trace))
        driven.settle()
    assert driven.ctx.repeats == () and not driven.ctx.state.terminal


def test_a_launcher_whose_child_was_killed_never_counts(driven):
    driven.run(spec(command("w", fail=fail(limit_n=30))))
    for _ in range(5):
        text = "ended with exit status 1: train.py FAILED"
        died = error(driven, "w/0", text, reason=Reason.EXIT_NONZERO)
        driven.feed(replace(died, traceback="  exitcode  : -9 (pid: 71)\n  traceback : Signal 9 (SIGKILL) received"))
        driven.settle()
    assert driven.ctx.repeats == () and not driven.ctx.state.terminal


def test_errors_of_a_lost_peer_never_count(driven):
    driven.run(spec(service("w", fail=fail(limit_n=30))))
    for _ in range(5):
        driven.feed(error(driven, "w/0", "RuntimeError: Connection reset by peer"))
        driven.feed(TimerFired(timer=f"diagnose/{driven.ctx.failover_count + 1}"))
        driven.settle()
    assert driven.ctx.repeats == ()


def test_the_count_survives_the_master_a_retry_and_a_preemption(driven):
    job = spec(service("w", fail=fail(limit_n=0)), loop(), retry=5)
    driven.run(job)
    for attempt in (2, 3):
        driven.feed(error(driven, "w/0"))
        driven.settle().master(attempt).settle()
        driven.feed(admitted(job, attempt=attempt))
        driven.settle()
    driven.feed(PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, grace_s=0.0))
    driven.settle()
    driven.feed(admitted(job, attempt=4))
    driven.settle()
    again = JobContext.from_json(driven.ctx.to_json())
    assert again == driven.ctx and [one.count for one in again.repeats] == [2]
    assert tries(driven, "w/0") == 1


def test_resuming_a_paused_job_begins_anew_for_its_user_may_have_repaired_it(driven):
    job = spec(service("w", fail=often()))
    driven.run(job)
    assert tries(driven, "w/0", most=2) == 2
    driven.feed(PreemptAsked(reason=Reason.PAUSED, grace_s=0.0))
    driven.settle()
    driven.feed(JobQueued(), admitted(job, attempt=2))
    driven.settle()
    assert tries(driven, "w/0") == 3


def test_time_that_it_ran_heals_and_a_failure_in_between_begins_that_time_anew(driven):
    driven.run(spec(service("w", fail=often()), service("v", fail=often())))

    def due() -> tuple[str, float]:
        return next((one.timer, one.since_s + one.after_s) for one in timers(driven.ctx) if "healed" in one.timer)

    assert tries(driven, "w/0", most=2) == 2
    first, at_s = due()
    assert at_s == pytest.approx(driven.ctx.at_s + repetition.HEALED_OWN_S)
    driven.feed(error(driven, "v/0", reason=Reason.SIGNALLED), after_s=600.0)
    driven.settle()
    driven.feed(TimerFired(timer=first))
    assert driven.ctx.repeats and due()[1] > at_s, "the timer of before the failure says nothing"
    driven.feed(TimerFired(timer=due()[0]), after_s=repetition.HEALED_OWN_S)
    assert (driven.ctx.repeats, driven.ctx.heals_s) == ((), None)
    assert tries(driven, "w/0") == 3


def test_a_fault_from_outside_is_healed_after_a_minute_of_running(driven):
    driven.run(spec(service("w", fail=often())))
    driven.feed(error(driven, "w/0", reason=Reason.SIGNALLED))
    driven.settle()
    wait = next(one for one in timers(driven.ctx) if one.timer.startswith("healed/"))
    assert wait.after_s == repetition.HEALED_S == 60.0
    driven.feed(TimerFired(timer=wait.timer), after_s=60.0)
    assert not any(one.timer.startswith("healed/") for one in timers(driven.ctx))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ValueError: bad 3 of 17", "ValueError: bad 4 of 1.5e-7"),
        ("KeyError: <Row at 0x7f2e36cd5890>", "KeyError: <Row at 0x7f11}>"),
        ("FileNotFoundError: '/tmp/tmpab1x/data.bin'", "FileNotFoundError: '/tmp/tmpq9/data.bin'"),
        ("KeyError: '3f2b8c1e-9a77-4c11-b7de-0123456789ab'", "KeyError: 'b1c2d3e4-9a77-4c11-b7de-0123456789aa'"),
    ],
)
def test_what_varies_from_try_to_try_is_not_part_of_the_error(one, other):
    first, second = (repetition.identity_of(loss(text)) for text in (one, other.replace("}", "")))
    assert first == second
    assert repetition.identity_of(loss("ValueError: bad")) != repetition.identity_of(loss("ValueError: good"))
    assert repetition.identity_of(loss("ValueError: bad")) != repetition.identity_of(loss("TypeError: bad"))


def test_the_line_is_the_innermost_of_the_jobs_code_in_the_error_that_was_raised():
    assert repetition.place_of(TRACE.format(line=6, text="x")) == "bug.py:6"
    before = TRACE.format(line=3, text="KeyError: 'a'")
    chained = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert repetition.place_of(before + chained + TRACE.format(line=9, text="x")) == "bug.py:9"
    assert repetition.place_of(f'  File "{repetition.__file__}", line 4, in noted') == ""
    assert repetition.place_of("no frames") == ""


def loss(text: str) -> Loss:
    trace = TRACE.format(line=6, text=text)
    return Loss(instance=at("w/0"), epoch=Epoch(1), reason=Reason.USER_ERROR, text=text, traceback=trace, at_s=0.0)


def loss_of(event: InstanceLost) -> Loss:
    return replace(loss(event.text), reason=event.reason)


KINDS = st.sampled_from(("same", "same", "other", "killed", "commit"))


@pytest.mark.slow
@given(kinds=st.lists(KINDS, max_size=14))
def test_a_job_ends_exactly_when_three_in_a_row_were_the_same_with_no_commit_between(kinds: list[str]) -> None:
    from tests.job.core.conftest import Driven

    driven = Driven()
    driven.run(spec(service("w", fail=fail(limit_n=99)), loop()))
    last, count = "", 0
    for kind in kinds:
        if kind == "commit":
            driven.feed(Committed(n=driven.ctx.committed + 1, loop_epoch=driven.ctx.loop_epoch))
            last, count = "", 0
        elif kind == "killed":
            driven.feed(error(driven, "w/0", "ended by SIGKILL", reason=Reason.SIGNALLED))
        else:
            driven.feed(error(driven, "w/0", f"{kind.title()}Error: no {driven.ctx.seq}"))
            count = count + 1 if kind == last else 1
            last = kind
        driven.settle()
        assert driven.ctx.state.terminal == (count >= 3)
        assert functools.reduce(fold, driven.records, replay(driven.ctx.job, ())) == driven.ctx
        if driven.ctx.state.terminal:
            assert isinstance(next_emit(driven.ctx), NotYet)
            return
