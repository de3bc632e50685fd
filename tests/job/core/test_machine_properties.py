"""Whatever comes in whatever order: no exception, only declared transitions, repeats change nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.job.core.conftest import Driven
from tests.makers import JOB, Log, admitted, command, fail, loop, mesh, replay, rl, service, spec, submitted

from rota.job.core.context import JobContext
from rota.job.core.desired import next_emit, wanted
from rota.job.core.machine import fold, step
from rota.spec.events import (
    CheckpointSaved,
    Committed,
    Event,
    FailoverEnded,
    FailoverStarted,
    GangReleased,
    GangReserved,
    GangReserveFailed,
    InstanceEnded,
    InstanceLost,
    InstanceReady,
    InstanceStarted,
    InstanceStopped,
    JobChanged,
    JobEnded,
    JobQueued,
    JobRequeued,
    MasterStarted,
    PreemptAsked,
    ProgressStalled,
    Reattached,
    RolledBack,
    StopAsked,
    TimerFired,
)
from rota.spec.ids import Epoch, GangId, NodeId, RoleName
from rota.spec.job import JobSpec
from rota.spec.reasons import Reason
from rota.spec.states import GangState, JobState, Level

SPECS: tuple[JobSpec, ...] = (
    rl(retry=1),
    rl(gang="subgraph", time_limit_s=60.0),
    spec(command("a", 2), command("b", start_after=("a",)), service("c", start_after=("b",))),
    spec(mesh("m", 2, fail=fail(restart="process", limit_n=1, backoff_s=3.0)), loop(fail=fail(limit_n=0))),
    spec(command("t", 2, mesh=(("dp", 2),)), success_when=("t",)),
)
ROLES = ("actor", "reward", "loop", "a", "b", "c", "m", "t", "nobody")
EPOCHS = st.integers(0, 6).map(Epoch)
WHO = st.fixed_dictionaries({"role": st.sampled_from(ROLES).map(RoleName), "rank": st.integers(0, 2), "epoch": EPOCHS})
GANG = st.fixed_dictionaries({"gang": st.sampled_from(("all", "part0", "part1")).map(GangId), "epoch": EPOCHS})
FAILURES = st.sampled_from(
    (Reason.SIGNALLED, Reason.USER_ERROR, Reason.NODE_LOST, Reason.ENGINE_LOST, Reason.COLLECTIVE_TIMEOUT)
)


def of(cls: type, who: st.SearchStrategy, **more: st.SearchStrategy) -> st.SearchStrategy:
    return st.tuples(who, st.fixed_dictionaries(more)).map(lambda pair: cls(**pair[0], **pair[1]))


EVENTS: st.SearchStrategy[Event] = st.one_of(
    of(InstanceStarted, WHO, node=st.just(NodeId("h0")), pid=st.just(9)),
    of(InstanceReady, WHO),
    of(InstanceEnded, WHO),
    of(InstanceLost, WHO, reason=FAILURES, alive=st.booleans()),
    of(InstanceStopped, WHO),
    of(ProgressStalled, WHO, idle_s=st.just(9.0)),
    of(GangReserved, GANG),
    of(GangReleased, GANG),
    of(GangReserveFailed, GANG, reason=st.just(Reason.GANG_TIMEOUT)),
    st.builds(MasterStarted, master_epoch=EPOCHS, pid=st.just(1)),
    st.builds(
        Reattached,
        master_epoch=EPOCHS,
        alive=st.lists(st.tuples(st.sampled_from(ROLES).map(RoleName), st.integers(0, 2), EPOCHS), max_size=4).map(
            tuple
        ),
        gangs=st.lists(st.tuples(st.sampled_from(("all", "part0")).map(GangId), EPOCHS), max_size=2).map(tuple),
    ),
    st.builds(Committed, n=st.integers(0, 3), loop_epoch=EPOCHS),
    st.builds(RolledBack, from_commit=st.integers(0, 3), to_commit=st.integers(0, 3)),
    st.builds(FailoverEnded, failover=st.integers(0, 4), seconds=st.just(1.0)),
    of(
        FailoverStarted,
        st.fixed_dictionaries({"role": st.just(RoleName("loop")), "rank": st.just(0)}),
        failover=st.integers(0, 4),
        level=st.sampled_from(Level),
        scope=st.just((("loop", 0, 5),)),
        restore=st.integers(0, 2),
        reason=FAILURES,
    ),
    st.builds(StopAsked),
    st.builds(PreemptAsked, reason=st.sampled_from((Reason.PREEMPTED_RECLAIM, Reason.PAUSED))),
    st.builds(JobRequeued, attempt=st.integers(0, 3), reason=FAILURES, counts=st.booleans()),
    st.builds(JobQueued),
    st.builds(JobChanged, changes=st.just({"time_limit_s": 5.0, "roles.reward.replicas": 3, "x.y": 1})),
    st.builds(CheckpointSaved, n=st.integers(0, 3), path=st.just("/c")),
    st.builds(TimerFired, timer=st.sampled_from(("time-limit/1/60", "start/1/0/1004.000", "diagnose/1", "x"))),
    st.builds(JobEnded, state=st.just(JobState.FAILED), reason=st.just(Reason.INTERNAL)),
)
ACT = st.one_of(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), EVENTS)
"""A number carries out one of the wanted commands; an event comes from anywhere."""


def play(job: JobSpec, acts: list[int | Event]) -> Driven:
    """Feed acts to a job that was admitted; the fixture ``invariants`` checks every step."""
    driven = Driven()
    driven.feed(*submitted(job), admitted(job))
    driven.master()
    for act in acts:
        if not isinstance(act, int):
            driven.feed(act)
        elif emit := next_emit(driven.ctx):
            driven.feed(emit.event)
        elif outcomes := [event for one in wanted(driven.ctx) if (event := driven.outcome(one)) is not None]:
            driven.feed(outcomes[act % len(outcomes)])
        again = step(driven.ctx, driven.records[-1:], driven.begun)
        assert (again.ctx, again.commands, again.begun) == (driven.ctx, (), driven.begun)
    return driven


@given(st.integers(0, len(SPECS) - 1), st.lists(ACT, max_size=60))
def test_any_events_in_any_order_keep_to_the_declared_transitions(job, acts):
    driven = play(SPECS[job], acts)
    again = JobContext.from_json(driven.ctx.to_json())
    assert again == driven.ctx
    assert replay(JOB, tuple(driven.records)) == driven.ctx


@given(st.integers(0, len(SPECS) - 1), st.lists(ACT, max_size=40))
def test_after_any_events_a_master_that_carries_out_its_commands_brings_the_job_to_rest(job, acts):
    driven = play(SPECS[job], acts)
    driven.feed(MasterStarted(master_epoch=Epoch(99), pid=1))
    alive = tuple((RoleName(role), rank, Epoch(epoch)) for role, rank, epoch in driven.alive)
    gangs = tuple((gang.id, gang.epoch) for gang in driven.ctx.gangs if gang.state is GangState.RESERVED)
    driven.feed(Reattached(master_epoch=Epoch(99), alive=alive, gangs=gangs))
    driven.settle()
    ctx = driven.ctx
    if ctx.state in (JobState.RUNNING, JobState.RECOVERING, JobState.STARTING, JobState.CHECKING, JobState.ADMITTED):
        assert ctx.state is JobState.RUNNING or any(one.id.startswith("timer/") for one in wanted(ctx))
    elif ctx.state in (JobState.QUEUED, JobState.PAUSED) or ctx.state.terminal:
        assert not ctx.gangs or ctx.state.terminal
    else:
        raise AssertionError(f"rests in {ctx.state}")


def test_a_record_that_leaves_a_gap_is_refused():
    log = Log()
    log.feed(*submitted(rl()))
    records = log.records
    ctx = Log().ctx
    try:
        fold(ctx, records[1])
    except ValueError as error:
        assert "some are missing" in str(error)
    else:
        raise AssertionError("a gap was not noticed")
