"""Every state has its transitions, no other is made, and the error of an undeclared one shows what led to it."""

from __future__ import annotations

import pytest
from tests.makers import command, loop, spec, submitted

from rota.job.core import machine
from rota.job.core.context import GangDemand, HeldGang, JobContext, replace
from rota.job.core.transitions import (
    ASK,
    ASK_TRANSITIONS,
    GANG,
    GANG_TRANSITIONS,
    INSTANCE,
    INSTANCE_TRANSITIONS,
    JOB,
    JOB_TRANSITIONS,
    InvalidTransition,
    moved,
)
from rota.spec.events import (
    Event,
    FailoverEnded,
    InstanceEnded,
    InstanceLost,
    InstanceReady,
    JobRequeued,
    JobWaits,
    PreemptAsked,
)
from rota.spec.ids import Epoch, GangId, InstanceId, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import AskState, GangState, InstanceState, JobState


def test_every_state_is_declared_and_ends_are_never_left():
    assert set(JOB) == set(JobState)
    assert set(INSTANCE) == set(InstanceState)
    assert set(GANG) == set(GangState)
    assert set(ASK) == set(AskState)
    assert all(not JOB[state] for state in JobState if state.terminal)
    assert JobState.RUNNING not in JOB[JobState.QUEUED]


def test_each_pair_of_states_is_declared_once():
    for rows in (JOB_TRANSITIONS, INSTANCE_TRANSITIONS, GANG_TRANSITIONS, ASK_TRANSITIONS):
        pairs = [(before, after) for row in rows for before in row.leaves for after in row.enters]
        assert len(pairs) == len(set(pairs))


def test_each_event_of_a_state_has_one_row_and_ends_have_none():
    keys = [(state, row.ending, row.event) for row in machine.ROWS for state in row.states]
    assert len(keys) == len(set(keys)) == len(machine.FOLDS)
    assert not any(state.terminal for state, _, _ in keys)
    ending = {state for state, ending, _ in keys if ending}
    assert ending == {JobState.RECOVERING, JobState.PREEMPTING, JobState.STOPPING}
    assert {state for state, ending, _ in keys if not ending} == {state for state in JobState if not state.terminal} - {
        JobState.PREEMPTING,
        JobState.STOPPING,
    }


def test_an_event_without_a_row_for_the_state_changes_nothing(driven):
    driven.feed(*submitted(spec(command("a"), loop())))
    for event in (
        InstanceReady(role=RoleName("a"), rank=0, epoch=Epoch(1)),
        FailoverEnded(failover=1, seconds=1.0),
        JobRequeued(attempt=0, reason=Reason.SIGNALLED, counts=True),
        JobWaits(reason=Reason.NO_FREE_DEVICES),
    ):
        before = driven.ctx
        driven.feed(event)
        assert replace(driven.ctx, seq=before.seq, at_s=before.at_s) == before


def test_a_state_changes_by_a_declared_transition_alone(driven):
    driven.run(spec(command("a"), loop()))
    ctx, one = driven.ctx, driven.ctx.instances[InstanceId(RoleName("a"), 0)]
    assert moved(ctx, JobState.PREEMPTING).state is JobState.PREEMPTING
    with pytest.raises(TypeError, match=r"transitions\.moved"):
        replace(ctx, state=JobState.PREEMPTING)
    with pytest.raises(InvalidTransition, match="cannot change from RUNNING to QUEUED"):
        moved(ctx, JobState.QUEUED)
    with pytest.raises(InvalidTransition, match="instance a/0 cannot change from READY to STARTING"):
        moved(one, InstanceState.STARTING)


def test_a_gang_and_an_ask_change_by_a_declared_transition_alone():
    gang = HeldGang(id=GangId("main"), epoch=Epoch(1), state=GangState.RELEASING)
    ask = GangDemand(gang=GangId("moved-2"), epoch=Epoch(2), members=())
    assert moved(ask, AskState.ASKED, answered=True).answered
    for one, to in ((gang, GangState.RESERVED), (ask, AskState.GRANTED)):
        with pytest.raises(TypeError, match=r"transitions\.moved"):
            replace(one, state=to)
    with pytest.raises(InvalidTransition, match="gang main cannot change from releasing to reserved"):
        moved(gang, GangState.RESERVED)
    with pytest.raises(InvalidTransition, match="the ask for gang moved-2 cannot change from wanted to granted"):
        moved(ask, AskState.GRANTED)


def test_the_error_of_an_undeclared_transition_carries_the_event_that_made_it(driven, monkeypatch):
    def back_to_the_queue(ctx: JobContext, event: Event) -> JobContext:
        return moved(ctx, JobState.QUEUED)

    driven.run(spec(command("a"), loop()))
    monkeypatch.setitem(machine.FOLDS, (JobState.RUNNING, False, InstanceLost), back_to_the_queue)
    with pytest.raises(InvalidTransition) as found:
        driven.feed(InstanceLost(role=RoleName("a"), rank=0, epoch=Epoch(1), reason=Reason.SIGNALLED))
    assert "InstanceLost" in str(found.value)
    assert found.value.events[-1].startswith(f"{len(driven.records)} ")


def test_who_has_returned_is_not_lost_when_its_process_is_gone_while_the_loop_comes_to_its_commit(driven):
    driven.run(spec(command("a"), loop()))
    driven.feed(InstanceEnded(role=RoleName("a"), rank=0, epoch=Epoch(1)))
    driven.feed(PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, grace_s=30.0))
    driven.master(2, dead=(("a", 0, 1),))
    one = driven.ctx.instances[InstanceId(RoleName("a"), 0)]
    assert (one.state, one.process) == (InstanceState.GONE, None)
    assert driven.ctx.ending is not None and driven.ctx.ending.phase == "commit"
