"""The master dies just before and just after every change of state that the tables of the job machine allow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from rota.job.core.context import InstanceRecord
from rota.job.core.transitions import INSTANCE, JOB
from rota.runtime.launcher import instance_name
from rota.spec.events import Event, PreemptAsked, StopAsked
from rota.spec.ids import JobId
from rota.spec.reasons import Reason
from rota.spec.states import InstanceState, JobState
from rota.testing.launcher import SimFaults
from tests.world.world import Swarm, Turn, World, play

ROUNDS_MAX = 30
J, R = JobState, InstanceState
ENDS = (J.SUCCEEDED, J.FAILED, J.CANCELLED)
BUSY = Swarm(
    jobs=3, faults_s=60.0, kill_instance_s=4.0, stop_job_s=25.0, preempt_job_s=15.0, pause_job_s=10.0, scale_role_s=1.0
)
SWARMS: tuple[dict[str, Any], ...] = (
    {"failing_code": True, "engine": SimFaults(start_fails_p=0.05)},
    {"lose_node_s": 20.0},
    {"engine": SimFaults(hang_p=0.01, reserve_fails_p=0.1)},
    {"shape": "spmd", "pause_job_s": None, "preempt_job_s": None},
)

CALM = Swarm(jobs=4, faults_s=90.0, shape="spmd", kill_instance_s=30.0)

ASKS: tuple[tuple[JobState, Event], ...] = (
    (J.STOPPING, StopAsked(grace_s=1.0)),
    (J.PREEMPTING, PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, grace_s=1.0)),
)
WHEN = ("before", "after")

NEVER: Mapping[str, tuple[tuple[JobState | InstanceState, tuple[JobState | InstanceState, ...]], ...]] = {
    "before the first admission there is no master; the service alone ends or moves the job": (
        (J.SUBMITTED, (J.QUEUED, J.ADMITTED, J.STOPPING, *ENDS)),
    ),
    "with a master the end is decided first, and everything is given back: STOPPING": tuple(
        (state, ENDS) for state in J if not state.terminal and state not in (J.SUBMITTED, J.STOPPING)
    ),
    "the scheduler admits what is QUEUED": ((J.PAUSED, (J.ADMITTED,)),),
    "a pause that comes while the whole job restarts makes it PREEMPTING": ((J.RECOVERING, (J.PAUSED,)),),
    "an older process goes first, so that one append plans a member and a later one starts it": (
        (R.READY, (R.STARTING,)),
        (R.STALE, (R.STARTING,)),
        (R.STOPPING, (R.PLANNED,)),
    ),
}
"""Allowed by the tables, and yet not to be had while a master lives; why not."""


def allowed() -> Iterator[Turn]:
    for kind, table in (("job", JOB), ("instance", INSTANCE)):
        for before, after in ((before, after) for before, those in table.items() for after in those):
            if before.value != after.value:
                yield (kind, before.value, after.value)


def never() -> set[Turn]:
    return {
        ("job" if isinstance(before, JobState) else "instance", before.value, after.value)
        for rows in NEVER.values()
        for before, those in rows
        for after in those
        if before is not after
    }


def killing(killed: set[tuple[str, Turn]]) -> Callable[[World], None]:
    """Kills the master at every change of state at which none was killed yet."""

    def kills(when: str, turning: frozenset[Turn]) -> bool:
        new = {(when, turn) for turn in turning} - killed
        killed.update(new)
        return bool(new)

    def prepare(world: World) -> None:
        world.kills_at = kills

    return prepare


def asking(event: Event, to: JobState, killed: set[tuple[str, Turn]]) -> Callable[[World], None]:
    """Asks for ``to`` in the states from which no master died on that way; some of them last a turn of the master."""
    kills = killing(killed)

    def prepare(world: World) -> None:
        kills(world)
        kill = world.kills_at
        assert kill is not None

        def ask(when: str, turning: frozenset[Turn]) -> bool:
            states = {turn[2] for turn in turning if turn[0] == "job" and when == "after"}
            left = [
                one for one in states if to in JOB[J(one)] and not {(w, ("job", one, to.value)) for w in WHEN} <= killed
            ]
            for state in left:
                world.own(say(world, J(state)))
            return kill(when, turning)

        world.kills_at = ask

    async def say(world: World, state: JobState) -> None:
        for job in [job for job, ctx in world.checkers.shadows.items() if ctx.state is state]:
            world._append(JobId(job), event)

    return prepare


def undoing(killed: set[tuple[str, Turn]]) -> Callable[[World], None]:
    """Kills the process of a member that has ended, then the master, then another member: the first has none."""
    kills = killing(killed)

    def prepare(world: World) -> None:
        kills(world)
        kill = world.kills_at
        assert kill is not None

        def ask(when: str, turning: frozenset[Turn]) -> bool:
            if when == "after" and ("instance", R.READY.value, R.GONE.value) in turning:
                world.own(undo(world))
            return kill(when, turning)

        world.kills_at = ask

    async def undo(world: World) -> None:
        for job, ctx in tuple(world.checkers.shadows.items()):
            ended = [one for one in ctx.instances.values() if one.ended and one.process is not None]
            left = [one for one in ctx.instances.values() if one.state is R.READY and one.process is not None]
            if ended and left:
                kill_process(world, job, ended[0])
                world.kill_master(world.masters[job][-1])
                await world.clock.sleep(10.0)
                kill_process(world, job, left[0])

    return prepare


def kill_process(world: World, job: JobId, one: InstanceRecord) -> None:
    assert one.process is not None
    world.engine.kill(instance_name(job, one.id, one.process.epoch))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_master_dies_before_and_after_every_change_of_state_and_every_law_holds() -> None:
    """All of them with ROTA_DEEP, some 30 s of one core; else as many as two rounds of plays come by."""
    deep = bool(os.environ.get("ROTA_DEEP"))
    killed: set[tuple[str, Turn]] = set()
    wanted = {(when, turn) for turn in set(allowed()) - never() for when in WHEN}
    for seed in range(ROUNDS_MAX if deep else 2):
        plays = [(replace(BUSY, **faults), killing(killed)) for faults in SWARMS]
        for changes in ({}, {"shape": "elastic", "scale_role_s": 2.0}):
            plays += [(replace(BUSY, **changes), asking(event, to, killed)) for to, event in ASKS]
        plays.append((CALM, undoing(killed)))
        for swarm, prepare in plays:
            if not wanted <= killed:
                play(seed, swarm, prepare)
    left = wanted - killed
    assert len(left) <= (0 if deep else len(wanted) // 4), f"changes of state at which no master has died: {left}"
    assert {turn for _, turn in killed} & never() == set(), "said to be impossible, and it happened"
