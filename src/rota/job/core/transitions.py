"""Transitions of jobs, instances, gangs and asks: the tables that look up each change of state, and what makes it.

``moved`` is the only way in which a state changes; ``replace`` refuses it. A change that no transition names is a bug
of the machine: it raises ``InvalidTransition`` with the last events of the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from rota.job.core.context import GangDemand, HeldGang, InstanceRecord, JobContext, changed
from rota.spec.ids import Epoch
from rota.spec.states import AskState, GangState, InstanceState, JobState

_J = JobState
_I = InstanceState
_G = GangState
_A = AskState
State = JobState | InstanceState | GangState | AskState
S = TypeVar("S", JobState, InstanceState, GangState, AskState)
Thing = TypeVar("Thing", JobContext, InstanceRecord, HeldGang, GangDemand)


@dataclass(frozen=True, slots=True)
class Transition(Generic[S]):
    """Which states are left, which are entered, and when."""

    leaves: tuple[S, ...]
    enters: tuple[S, ...]
    when: str


_ENDS = (_J.SUCCEEDED, _J.FAILED, _J.CANCELLED)
_LIVE = (_J.ADMITTED, _J.CHECKING, _J.STARTING, _J.RUNNING, _J.RESIZING)
WAITING = (_J.SUBMITTED, _J.QUEUED, _J.PAUSED)
"""The job holds nothing."""
_GIVEN_BACK = (_J.RECOVERING, _J.PREEMPTING)

JOB_TRANSITIONS: tuple[Transition[JobState], ...] = (
    Transition((_J.SUBMITTED, _J.PAUSED), (_J.QUEUED,), "it is accepted, or resumed"),
    Transition((_J.QUEUED,), (_J.PAUSED,), "it is paused before it was admitted"),
    Transition(WAITING, (_J.ADMITTED,), "the scheduler gives it a placement"),
    Transition((_J.ADMITTED,), (_J.CHECKING,), "devices are reserved, and the first processes check their nodes"),
    Transition((_J.ADMITTED, _J.CHECKING), (_J.STARTING,), "the first processes found their nodes fit"),
    Transition((_J.STARTING, _J.RESIZING), (_J.RUNNING,), "every instance that is waited for is ready"),
    Transition((_J.RUNNING,), (_J.RESIZING,), "a role changes its size, or leaves a node: a recovery without a loss"),
    Transition(_LIVE, (_J.RECOVERING,), "an instance or a reservation is lost"),
    Transition((_J.RECOVERING,), (_J.STARTING, _J.RUNNING), "the recovery is over"),
    Transition((*_LIVE, _J.RECOVERING), (_J.PREEMPTING,), "it is asked to give its devices back"),
    Transition(_GIVEN_BACK, (_J.QUEUED, _J.PAUSED), "everything is given back, and another attempt follows"),
    Transition((*WAITING, *_LIVE, *_GIVEN_BACK), (_J.STOPPING,), "its end is decided"),
    Transition((*WAITING, *_LIVE, *_GIVEN_BACK, _J.STOPPING), _ENDS, "`JobEnded` is in the log"),
)

_UP = (_I.STARTING, _I.STALE, _I.READY)
"""A process was asked for, or exists."""

INSTANCE_TRANSITIONS: tuple[Transition[InstanceState], ...] = (
    Transition((_I.PLANNED,), (_I.STARTING,), "its gang exists, its old process is gone, what it waits for is ready"),
    Transition((_I.STARTING,), (_I.STALE,), "its process exists"),
    Transition((_I.STALE,), (_I.READY,), "it is set up under its epoch"),
    Transition(_UP, (_I.LOST,), "its process died, its code raised, or it made no progress"),
    Transition((_I.READY, _I.GONE), (_I.STALE,), "a recovery takes it in with the process that lives"),
    Transition((*_UP, _I.LOST, _I.STOPPING, _I.GONE), (_I.PLANNED,), "a recovery, resize or attempt plans a process"),
    Transition((_I.PLANNED, *_UP, _I.LOST, _I.GONE), (_I.STOPPING,), "the attempt ends, and its process has to go"),
    Transition((_I.PLANNED, *_UP, _I.LOST, _I.STOPPING), (_I.GONE,), "it returned, is stopped, or has left its role"),
)

AT_ONCE: tuple[Transition[InstanceState], ...] = (
    Transition((_I.STALE, _I.READY, _I.LOST, _I.GONE), (_I.STARTING,), "one event plans it and lets it start"),
)
"""One event makes both transitions; no other code sees the state between them."""

GANG_TRANSITIONS: tuple[Transition[GangState], ...] = (
    Transition((_G.RESERVING,), (_G.RESERVED,), "the engine has reserved it"),
    Transition((_G.RESERVING, _G.RESERVED), (_G.RELEASING,), "no instance has its place there, or the attempt ends"),
)
"""A gang begins as reserving, or as releasing when the engine holds one that the log does not know."""

ASK_TRANSITIONS: tuple[Transition[AskState], ...] = (
    Transition((_A.WANTED,), (_A.ASKED,), "`GangAsked` is in the log"),
    Transition((_A.ASKED,), (_A.GRANTED,), "the scheduler grants it, and its members have no other place"),
    Transition(
        (_A.ASKED,), (_A.HELD,), "the scheduler grants it, and its members still run on the node that they leave"
    ),
    Transition((_A.HELD,), (_A.GRANTED,), "a recovery moves its members there"),
    Transition((_A.WANTED, _A.ASKED), (_A.DROPPED,), "its members need no other place"),
    Transition((_A.HELD, _A.GRANTED), (_A.DROPPED,), "its place is not reserved, or is given back"),
)
"""An ask begins as wanted."""


def _table(rows: tuple[Transition[S], ...]) -> Mapping[S, frozenset[S]]:
    """Each state with those that may follow it."""
    states: tuple[S, ...] = tuple(type(rows[0].leaves[0]))
    return {one: frozenset(after for row in rows if one in row.leaves for after in row.enters) for one in states}


JOB: Mapping[JobState, frozenset[JobState]] = _table(JOB_TRANSITIONS)
"""A job stays in its state or goes to one of these."""
INSTANCE: Mapping[InstanceState, frozenset[InstanceState]] = _table((*INSTANCE_TRANSITIONS, *AT_ONCE))
"""The same of an instance, from one event to the next."""
GANG: Mapping[GangState, frozenset[GangState]] = _table(GANG_TRANSITIONS)
ASK: Mapping[AskState, frozenset[AskState]] = _table(ASK_TRANSITIONS)
_STEPS = _table(INSTANCE_TRANSITIONS)


class InvalidTransition(Exception):
    """A change of state that no transition names. ``events`` are the last of the job, in order."""

    def __init__(self, what: str, before: State, after: State) -> None:
        super().__init__(f"{what} cannot change from {before} to {after}: no transition is declared")
        self.events: tuple[str, ...] = ()

    def __str__(self) -> str:
        last = "the last events of the job" if len(self.events) > 1 else "the event"
        return "\n  ".join((f"{self.args[0]}; {last}:", *self.events))


def moved(thing: Thing, to: State, /, **changes: object) -> Thing:
    """``thing`` in the state ``to``, with other fields changed as by ``replace``.

    Raises InvalidTransition when the table has no such transition; a state that stays needs none.
    """
    declared: frozenset[State]
    match thing:
        case JobContext():
            declared, name = JOB[thing.state], f"job {thing.job}"
        case InstanceRecord():
            declared, name = _STEPS[thing.state], f"instance {thing.id}"
        case HeldGang():
            declared, name = GANG[thing.state], f"gang {thing.id}"
        case GangDemand():
            declared, name = ASK[thing.state], f"the ask for gang {thing.gang}"
    if to is not thing.state and to not in declared:
        raise InvalidTransition(name, thing.state, to)
    return changed(thing, {**changes, "state": to})


def without_process(one: InstanceRecord, to: InstanceState, epoch: Epoch) -> InstanceRecord:
    """``one`` in ``to`` under ``epoch``; the process that it had must be gone before the next one starts."""
    terminating = (*one.terminating, one.process.epoch) if one.process else one.terminating
    return moved(one, to, epoch=epoch, process=None, terminating=terminating, running=False)
