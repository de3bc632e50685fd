"""What the master reads from beats: chains, meetings, collectives, the silent, strangers; on a virtual clock."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.makers import JOB, at, command, loop, mesh, service, spec
from tests.makers import fail as contract

from rota.job.core.context import InstanceRecord, JobContext, Process
from rota.job.core.graph import expand
from rota.job.core.progress import WaitEdge
from rota.job.health.heartbeat import SETTING_UP, Heartbeat, ProgressMarks
from rota.job.master.diagnosis import DiagnosisManager, sentence
from rota.job.master.inbox import Rendezvous
from rota.spec.events import InstanceLost, ProgressStalled
from rota.spec.ids import Epoch
from rota.spec.job import RoleSpec
from rota.spec.reasons import Reason
from rota.spec.states import InstanceState
from rota.testing.memory import VirtualClock

FAIL = contract(progress_s=10.0)


class Bench:
    """Instances that are ready, and a manager that hears what a test says."""

    def __init__(self, *roles: RoleSpec) -> None:
        roles = roles or (mesh("actor", 2, fail=FAIL), service("reward", 1, fail=FAIL), loop(fail=FAIL))
        job = spec(*roles)
        ready = [
            InstanceRecord(id=one, state=InstanceState.READY, epoch=Epoch(1), process=Process(epoch=Epoch(1), pid=7))
            for one in expand(job).instances
        ]
        self.clock = VirtualClock()
        self.ctx = replace(JobContext(job=JOB), spec=job, graph=expand(job), instances={one.id: one for one in ready})
        self.manager = DiagnosisManager(self.clock)
        self.manager.overdue(self.ctx)

    def say(self, name: str, *waits: tuple[str, str], **fields) -> None:
        one, age_s = at(name), fields.get("still_s", fields.get("idle_s", 0.0))
        told = tuple(WaitEdge(source=name, target=target, kind=kind, age_s=age_s) for target, kind in waits)  # type: ignore[arg-type]
        beat = Heartbeat(
            role=one.role, rank=one.rank, epoch=Epoch(1), started_epoch=Epoch(1), pid=7, waits=told, **fields
        )
        self.manager.heard(beat)

    def told(self, **absent: tuple[str, ...]) -> dict[str, ProgressStalled]:
        events = self.manager.overdue(self.ctx, absent)
        return {f"{one.role}/{one.rank}": one for one in events if isinstance(one, ProgressStalled)}


def test_who_waits_for_a_stuck_callee_is_not_accused_and_the_callee_is_with_its_waiters_named() -> None:
    bench = Bench()
    bench.say("loop/0", ("reward/0", "call"), idle_s=14.0, busy=("train",))
    bench.say("reward/0", idle_s=12.0, busy=("score",))
    found = bench.told()
    assert set(found) == {"reward/0"}
    assert found["reward/0"].text == "reward/0 made no progress for 12 s in score; loop/0 waits for it"


def test_a_loop_with_an_open_call_to_one_that_makes_progress_waits_for_ever_in_peace() -> None:
    bench = Bench()
    bench.say("loop/0", ("reward/0", "call"), idle_s=900.0, busy=("train",))
    bench.say("reward/0", idle_s=1.0, busy=("score",))
    assert bench.told() == {}


def test_a_callee_that_answers_beats_but_does_not_run_the_call_is_found() -> None:
    bench = Bench()
    bench.say("loop/0", ("reward/0", "call"), idle_s=12.0, busy=("train",))
    bench.say("reward/0", still_s=60.0)
    assert set(bench.told()) == {"reward/0"}


def test_an_idle_instance_that_nobody_waits_for_may_be_silent_for_ever() -> None:
    bench = Bench()
    bench.say("reward/0", still_s=9000.0)
    assert bench.told() == {}


def test_a_rank_that_entered_fewer_collectives_is_accused_and_not_the_one_that_waits_in_it() -> None:
    bench = Bench()
    bench.say("actor/0", idle_s=12.0, busy=("update",), collectives=5, inside="all_reduce")
    bench.say("actor/1", idle_s=12.0, busy=("update",), collectives=4)
    assert set(bench.told()) == {"actor/1"}


def test_a_joiner_that_stands_by_hides_no_rank_of_the_world() -> None:
    world = replace(command("actor", 2, mesh=(("dp", 2),), elastic_axis="dp", fail=FAIL), replicas_max=3)
    bench = Bench(world)
    joiner = replace(bench.ctx.instances[at("actor/2")], state=InstanceState.STALE, spare=True)
    bench.ctx = bench.ctx.with_instances([joiner])
    bench.say("actor/0", idle_s=12.0, busy=("run",), collectives=5, inside="all_reduce")
    bench.say("actor/1", idle_s=12.0, busy=("run",), collectives=4)
    assert set(bench.told()) == {"actor/1"}


def test_those_who_have_not_come_to_a_meeting_are_named_by_their_seats() -> None:
    async def main() -> dict[str, tuple[str, ...]]:
        world = replace(command("actor", 2, mesh=(("dp", 2),), elastic_axis="dp"), replicas_max=3)
        bench, meetings = Bench(world), Rendezvous()
        gone = replace(bench.ctx.instances[at("actor/0")], retired=True)
        coming = meetings.meet(role="actor", rank=2, epoch=1, world=2, address="")
        waiting = asyncio.create_task(coming)
        await asyncio.sleep(0)
        found = meetings.absent(bench.ctx.with_instances([gone]))
        meetings.give_up()
        assert await waiting is None
        return found

    assert asyncio.run(main()) == {"actor": ("actor/1",)}


def test_each_process_that_the_kernel_ended_for_memory_is_told_as_that_and_no_other() -> None:
    kills = 0
    manager = DiagnosisManager(VirtualClock(), oom_kills=lambda: kills)
    kills = 2
    lost = InstanceLost(role=at("w/0").role, rank=0, epoch=Epoch(1), reason=Reason.SIGNALLED, signal=9)
    found = [manager.with_evidence(lost).reason for _ in range(3)]
    assert found == [Reason.OOM_KILLED, Reason.OOM_KILLED, Reason.SIGNALLED]


def test_a_meeting_is_held_up_by_the_member_that_has_not_come() -> None:
    bench = Bench()
    bench.say("actor/0", ("master", "meeting"), idle_s=12.0, busy=("update",))
    bench.say("actor/1", idle_s=12.0, busy=("update",))
    assert set(bench.told(actor=("actor/1",))) == {"actor/1"}


def test_who_waits_for_the_lease_of_a_device_waits_for_the_role_that_holds_it() -> None:
    bench = Bench()
    bench.say("loop/0", ("reward", "lease"), idle_s=14.0, busy=("train",))
    bench.say("reward/0", idle_s=12.0, busy=("score",))
    found = bench.told()
    assert set(found) == {"reward/0"} and "loop/0 waits for it" in found["reward/0"].text


def test_a_beat_from_a_long_setup_is_no_evidence_against_who_is_ready_now() -> None:
    bench = Bench()
    bench.say("loop/0", ("actor/0", "call"), idle_s=14.0, busy=("train",))
    bench.say("actor/0", idle_s=14.0, busy=(SETTING_UP,))
    assert bench.told() == {}
    bench.say("actor/0", idle_s=14.0, busy=("update",))
    assert set(bench.told()) == {"actor/0"}


def test_one_that_stops_answering_is_accused_for_what_others_wait_for_and_not_for_what_it_told_last() -> None:
    bench = Bench()
    for _ in range(12):
        bench.clock.advance(1.0)
        bench.say("loop/0", ("reward/0", "call"), idle_s=bench.clock.monotonic_s(), busy=("train",))
        if bench.clock.monotonic_s() < 2:
            bench.say("reward/0", ("loop/0", "declared"), idle_s=0.5, busy=("score",))
    found = bench.told()
    assert set(found) == {"reward/0"}
    assert "does not answer" in found["reward/0"].text


def test_two_that_wait_for_each_other_are_a_deadlock() -> None:
    bench = Bench()
    bench.say("actor/0", ("reward/0", "declared"), idle_s=12.0, busy=("update",))
    bench.say("reward/0", ("actor/0", "declared"), idle_s=12.0, busy=("score",))
    found = bench.told()
    assert {name: one.reason for name, one in found.items()} == dict.fromkeys(("actor/0", "reward/0"), Reason.HANG)


def test_each_culprit_is_told_once_an_epoch() -> None:
    bench = Bench()
    bench.say("reward/0", idle_s=12.0, busy=("score",))
    assert set(bench.told()) == {"reward/0"}
    assert bench.told() == {}


def test_cores_that_fall_idle_without_an_excuse_halve_the_limit() -> None:
    bench = Bench()
    for n in range(60):
        bench.clock.advance(1.0)
        working = n < 28
        bench.say(
            "reward/0", progress_n=float(min(n, 28)), idle_s=0.0 if working else 6.0, busy=("score",), cpus=working
        )
    assert set(bench.told()) == {"reward/0"}, "6 s of 10, but the processor says that nothing is done"


def test_a_role_without_one_that_is_ready_is_waited_for_as_a_whole_and_its_recovery_is_an_excuse() -> None:
    bench = Bench()
    gone = replace(bench.ctx.instances[at("reward/0")], state=InstanceState.STARTING)
    bench.ctx = bench.ctx.with_instances([gone])
    bench.say("loop/0", ("reward", "ready"), idle_s=30.0, busy=("train",))
    assert bench.told() == {}
    assert ("loop/0", "reward/0") in {(one.source, one.target) for one in bench.manager.graph(bench.ctx).waits}


def test_waits_and_steps_of_a_process_are_told_by_its_pulse() -> None:
    clock = VirtualClock()
    marks = ProgressMarks(clock)
    with marks.running("loop"), marks.waiting.on("reward/0", "call", "score"):
        clock.advance(3.0)
        beat = marks.read(Heartbeat(role=at("loop/0").role, rank=0, epoch=Epoch(1), started_epoch=Epoch(1), pid=7))
        assert [(one.source, one.target, one.what, one.age_s) for one in beat.waits] == [
            ("loop/0", "reward/0", "score", 3.0)
        ]
        for n in range(1, 6):
            clock.advance(2.0)
            marks.mark(n)
    after = marks.read(beat)
    assert (after.waits, after.steps, after.step_s) == ((), 5, 2.0)
    assert after.calls == (("call", "reward", "score", 1, 0, 13.0, 0),)


def test_a_command_that_marks_no_progress_is_left_alone_unless_its_limit_was_given() -> None:
    bench = Bench(command("train"))
    bench.say("train/0", idle_s=4000.0, busy=("command",))
    assert bench.told() == {}
    assert bench.manager.suspects(bench.manager.graph(bench.ctx)) == ()
    bench.say("train/0", idle_s=4000.0, busy=("command",), progress_n=3.0)
    assert set(bench.told()) == {"train/0"}, "one that marked progress must go on with it"
    given = Bench(command("train", fail=FAIL))
    given.say("train/0", idle_s=12.0, busy=("command",))
    assert set(given.told()) == {"train/0"}


def suspected(bench: Bench) -> list[str]:
    return [name for root in bench.manager.suspects(bench.manager.graph(bench.ctx)) for name in root.members]


def test_a_command_without_a_limit_is_suspected_by_its_collectives_and_not_replaced() -> None:
    bench = Bench(command("train", 2, mesh=(("dp", 2),)))
    bench.say("train/0", idle_s=900.0, busy=("command",), collectives=5, inside="all_reduce")
    bench.say("train/1", idle_s=900.0, busy=("command",), collectives=4)
    assert bench.told() == {}
    assert suspected(bench) == ["train/1"]
    bench.say("train/0", idle_s=900.0, busy=("command",))
    bench.say("train/1", idle_s=900.0, busy=("command",))
    assert suspected(bench) == [], "one that marks nothing at all may be silent for ever"


def test_a_rank_that_is_stopped_is_named_and_counts_from_when_it_was_stopped() -> None:
    bench = Bench(command("train", 2, mesh=(("dp", 2),)))
    stopped = "rank 1, process 9, is stopped by a signal"
    say = {"idle_s": 900.0, "busy": ("command",), "collectives": 5, "inside": "all_reduce"}
    bench.say("train/0", **say)
    bench.say("train/1", **say, held_up=stopped, stopped_s=7.0)
    assert suspected(bench) == ["train/1"], "both are in the same collective"
    (suspect,) = bench.manager.suspects(bench.manager.graph(bench.ctx))
    text = f"train/1 made no progress for 7 s in command: {stopped}; train/0 waits for it"
    assert sentence(bench.manager.graph(bench.ctx), suspect) == text
    assert bench.told() == {}, "before the limit of its role"
    bench.say("train/1", **say, held_up=stopped, stopped_s=301.0)
    assert set(bench.told()) == {"train/1"}


def test_a_loop_that_computes_may_be_silent_longer_than_one_that_rests() -> None:
    bench = Bench()
    bench.say("loop/0", idle_s=100.0, busy=("train",), cpus=1.0)
    assert bench.told() == {}
    bench.say("loop/0", idle_s=130.0, busy=("train",), cpus=1.0)
    assert set(bench.told()) == {"loop/0"}
    rests = Bench()
    rests.say("loop/0", idle_s=12.0, busy=("train",), cpus=0.01)
    assert set(rests.told()) == {"loop/0"}


def test_a_start_is_late_when_nobody_comes_further_in_it_and_its_message_says_at_what() -> None:
    bench = Bench(mesh("actor", 2))
    told, doing = [], {}
    coming = [replace(one, state=InstanceState.STALE) for one in bench.ctx.instances.values()]
    bench.ctx = bench.ctx.with_instances(coming)
    steps = (
        {"busy": (SETTING_UP, "last import torch._C"), "idle_s": 0.5},  # it imports
        {"busy": (SETTING_UP,), "idle_s": 90.0, "cpus": 0.9},  # it computes
        {"busy": (SETTING_UP,), "idle_s": 90.0, "cpus": 0.9, "inside": "all_reduce"},  # it spins
        {"busy": (SETTING_UP, "last import slow"), "idle_s": 90.0, "cpus": 0.1},
    )
    for step in steps:
        bench.clock.advance(100.0)
        bench.say("actor/1", **step)
        still_s, doing = bench.manager.coming(bench.ctx)
        told.append(still_s)
    assert told == [0.0, 0.0, 100.0, 200.0]
    assert doing == {"actor/1": "last heard 0 s ago, in its setup, last import slow"}
    ready = [replace(one, state=InstanceState.READY) for one in coming[:1]]
    assert bench.manager.coming(bench.ctx.with_instances(ready))[0] == 0.0


def test_one_whose_process_is_stopped_is_told_at_the_third_look_whatever_its_limit_and_a_shorter_stop_is_not() -> None:
    bench = Bench()
    stopped = {"now": True}
    bench.ctx = replace(
        bench.ctx,
        instances={
            one: each if str(one) == "reward/0" else replace(each, process=None)
            for one, each in bench.ctx.instances.items()
        },
    )
    bench.manager.is_stopped = lambda which: stopped["now"]
    bench.say("loop/0", ("reward/0", "call"), idle_s=3.0, busy=("train",))
    bench.say("reward/0", idle_s=0.5, busy=("score",))
    assert [bench.told(), bench.told()] == [{}, {}]
    stopped["now"] = False
    assert bench.told() == {}
    stopped["now"] = True
    assert [bench.told(), bench.told()] == [{}, {}]
    found = bench.told()
    assert set(found) == {"reward/0"}
    assert found["reward/0"].text == (
        "reward/0 makes no progress: its process 7 is stopped by a signal; loop/0 waits for it"
    )
    assert found["reward/0"].idle_s == 3.0
    assert bench.told() == {}, "once an epoch"


def test_one_that_is_stopped_while_it_starts_is_lost_and_not_waited_for() -> None:
    bench = Bench()
    one = replace(bench.ctx.instances[at("reward/0")], state=InstanceState.STARTING)
    bench.ctx = replace(bench.ctx, instances={at("reward/0"): one})
    bench.manager.is_stopped = lambda which: True
    events = [event for _ in range(3) for event in bench.manager.overdue(bench.ctx)]
    (lost,) = events
    assert isinstance(lost, InstanceLost)
    assert (lost.role, lost.reason, lost.alive) == ("reward", Reason.NO_PROGRESS, True)
