"""Limits of the shell of a job: what it holds, tries and waits for has an end, and the end is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.makers import JOB, at, loop, mesh, op, service, spec
from tests.world.virtual import run as virtual

from rota.job.core.context import START_MAX_S, START_TIMEOUT_S, InstanceRecord, Process
from rota.job.core.graph import expand
from rota.job.health import stacks
from rota.job.health.heartbeat import Heartbeat, ProgressMarks
from rota.job.instance import flow
from rota.job.instance.flow import Flow, LoopRunner
from rota.job.instance.runners import StillRunning
from rota.job.instance.spmd import SETUP_MAX_S
from rota.job.master import executor, inbox, master
from rota.job.master.diagnosis import DiagnosisManager
from rota.job.master.executor import Executor, death_event
from rota.job.master.inbox import AppendRequest, InboxFull
from rota.job.master.master import JobMaster
from rota.job.place import JobPlace
from rota.job.rpc.client import RpcClient
from rota.job.rpc.peers import Peer, PeerTable
from rota.runtime.clock import SystemClock
from rota.runtime.event_loop import EventLoopThread, Exited
from rota.runtime.launcher import Call, CallTimeout, ProcessDied, ProcessGone, RemoteError
from rota.spec.commands import ReleaseGang, ReserveGang, SetTimer
from rota.spec.errors import BadInput, CallError, Fenced
from rota.spec.events import Committed, GangReserveFailed, InstanceLost, JobEvent, ProgressStalled, TimerFired
from rota.spec.ids import Epoch, GangId, InstanceId, NodeId, RoleName
from rota.spec.job import StreamSpec, WeightsEdge
from rota.spec.reasons import Reason
from rota.spec.states import InstanceState, JobState
from rota.testing.memory import MemoryLog, VirtualClock

PLACE = JobPlace(home="/nowhere", job=JOB, workdir="", launcher="")
FORMING: Any = SimpleNamespace(epoch=Epoch(1), world=1, restore=0, restarts=0)
PEER: Any = {
    "role": at("w/0").role, "epoch": Epoch(1), "started_epoch": Epoch(1), "node": NodeId("n"), "pid": 1, "ready": True
}  # fmt: skip


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(limited())


def a_master() -> JobMaster:
    clock = SystemClock()
    launcher: Any = None
    return JobMaster(job=JOB, place=lambda _: PLACE, log=MemoryLog(clock), launcher=launcher, clock=clock)


def test_a_full_inbox_fails_the_master_and_drops_nothing_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "INBOX_MAX", 3)

    async def main() -> None:
        one = a_master()
        for number in range(5):
            one.report(TimerFired(timer=str(number)))
        while isinstance(found := one._inbox.get_nowait(), AppendRequest):
            pass
        assert isinstance(found, InboxFull) and "3 events" in str(found)

    run(main())


def test_a_full_inbox_answers_every_request_and_a_commit_is_to_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "INBOX_MAX", 2)

    async def main() -> None:
        one = a_master()
        one._loaded.set()
        waiting = [asyncio.create_task(one.commit(n=1, loop_epoch=1, versions={}, metrics={})) for _ in range(3)]
        assert {(await each)["answer"] for each in waiting} == {"again"}
        assert isinstance(one._inbox.get_nowait(), InboxFull) and one._inbox.empty()

    run(main())


@pytest.mark.parametrize(
    ("answer", "alive"),
    [(None, True), (RemoteError("ping raised"), True), (CallTimeout("silent"), True), (ProcessGone("gone"), False)],
)
def test_only_a_process_that_is_gone_is_not_alive(
    answer: Exception | None, alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        one, who = a_master(), InstanceId(RoleName("w"), 0)
        record = InstanceRecord(id=who, epoch=Epoch(1), process=Process(epoch=Epoch(1)))
        one.ctx = replace(one.ctx, instances={who: record})

        async def call_instance(role: str, rank: int, call: Call) -> object:
            if answer is not None:
                raise answer
            return None

        monkeypatch.setattr(one, "_call_instance", call_instance)
        assert await one.is_alive("w", 0, 1) is alive

    run(main())


def test_a_hosted_master_answers_what_the_processes_of_a_job_ask_and_nothing_of_its_own() -> None:
    hosted = object.__new__(master.Master)
    hosted._master = a_master()
    for name in ("beat", "commit", "is_alive", "meet", "ping", "stacks", "status", "why"):
        assert callable(getattr(hosted, name))
    for name in ("run", "report", "_send_away"):
        with pytest.raises(AttributeError):
            getattr(hosted, name)


def test_the_end_of_a_job_refuses_its_waiters_and_a_failed_master_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        for state, told in ((JobState.RUNNING, False), (JobState.FAILED, True)):
            one = a_master()
            one.ctx = SimpleNamespace(state=state, committed=0, loop_epoch=Epoch(1))  # type: ignore[assignment]
            event = Committed(n=1, loop_epoch=Epoch(1), versions={}, metrics={}, cursor={})
            done = asyncio.get_running_loop().create_future()
            one._inbox.add(AppendRequest(event, done))
            coming = one._rendezvous.meet(role="w", rank=0, epoch=1, world=2, address="")
            meeting = asyncio.create_task(coming)
            await asyncio.sleep(0)
            await one._close()
            await asyncio.sleep(0)
            assert (done.done(), meeting.done()) == (told, told)
            if told:
                assert isinstance(done.exception(), Fenced)
                assert meeting.result() is None
                late = await one.commit(n=1, loop_epoch=1, versions={}, metrics={})
                assert late["answer"] == "refused"
            meeting.cancel()

    run(main())


def test_a_master_that_has_not_read_its_log_keeps_leases_and_answers_nothing_else() -> None:
    async def main() -> None:
        one = a_master()
        who: Any = {"role": RoleName("w"), "rank": 0, "epoch": Epoch(1), "started_epoch": Epoch(1), "pid": 1}
        lost = InstanceLost(
            role=RoleName("w"), rank=0, epoch=Epoch(1), reason=Reason.USER_ERROR, text="boom", alive=True
        )
        beat = Heartbeat(**who, saved_s=5.0, lost=lost)
        assert (await one.beat(beat.to_json()))["table"] is None
        asked = [asyncio.create_task(work) for work in (one.status(), one.stacks("w", 0), one.why())]
        await asyncio.sleep(0)
        assert not any(task.done() for task in asked)
        ready = InstanceRecord(id=at("w/0"), state=InstanceState.READY, epoch=Epoch(1))
        job = spec(service("w"))
        one.ctx = replace(one.ctx, spec=job, graph=expand(job), instances={ready.id: ready})
        one._loaded.set()
        assert (await asked[0])["beats"]["w/0"]["pid"] == 1
        assert one._inbox.empty() and one._saved_s == 0.0, "it judged what it did not know"
        await one.beat(beat.to_json())
        assert one._inbox.get_nowait() == AppendRequest(beat.lost)
        await asyncio.gather(*asked)

    run(main())


def test_while_stacks_are_taken_the_others_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = ProgressStalled(role=RoleName("w"), rank=0, epoch=Epoch(1), idle_s=9.0, reason=Reason.NO_PROGRESS)
    gone = InstanceLost(role=RoleName("w"), rank=1, epoch=Epoch(1), reason=Reason.HANG)
    rounds = iter([[stuck], [gone]])
    monkeypatch.setattr(master, "WATCH_S", 0.001)
    monkeypatch.setattr(DiagnosisManager, "overdue", lambda *_: next(rounds, []))

    async def main() -> None:
        one, taken = a_master(), asyncio.Event()

        async def stacks(*_: object) -> str:
            await taken.wait()
            return "in read()"

        monkeypatch.setattr(one, "stacks", stacks)
        watching = asyncio.create_task(one._watch_silences())
        told = [await one._inbox.get()]
        taken.set()
        told.append(await one._inbox.get())
        watching.cancel()
        assert told == [AppendRequest(gone), AppendRequest(replace(stuck, stacks="in read()"))]

    run(main())


class DeafEngine:
    """Every effect fails in a way that nobody expects."""

    def __init__(self) -> None:
        self.tries = 0

    async def reserve(self, *_: object, **__: object) -> None:
        self.tries += 1
        raise RuntimeError("the engine is confused")

    async def release(self, *_: object) -> None:
        self.tries += 1
        raise RuntimeError("the engine is confused")


def test_a_command_that_the_engine_never_carries_out_becomes_an_event() -> None:
    reported: list[JobEvent] = []
    engine: Any = DeafEngine()

    async def main(clock: VirtualClock) -> None:
        doing = Executor(engine, clock, PLACE, reported.append, lambda: (0.0, {}))
        ctx: Any = None
        doing.launch(ReserveGang(gang=GangId("g"), epoch=Epoch(1), bundles=()), ctx)
        await asyncio.gather(*doing.tasks.values())
        assert engine.tries > 2
        doing.launch(ReleaseGang(gang=GangId("g"), epoch=Epoch(1)), ctx)
        await clock.sleep(2 * executor.GIVE_UP_S)
        await doing.close()

    virtual(main)
    (failed,) = reported
    assert isinstance(failed, GangReserveFailed) and "the engine is confused" in failed.text


def test_a_setup_command_comes_to_its_own_limit_before_its_start_is_given_up() -> None:
    assert START_MAX_S >= SETUP_MAX_S + START_TIMEOUT_S


def test_a_start_that_goes_on_is_late_only_at_its_far_limit() -> None:
    reported: list[JobEvent] = []
    nobody: Any = None

    async def due_after_s(clock: VirtualClock, signs_s: float) -> float:
        def coming() -> tuple[float, dict[str, str]]:
            return max(0.0, clock.wall_s() - began_s - signs_s), {"w/0": "in its setup"}

        began_s = clock.wall_s()
        doing = Executor(nobody, clock, PLACE, reported.append, coming)
        doing.launch(SetTimer(timer="start/1/0/0.000", since_s=began_s, after_s=300.0), nobody)
        await asyncio.gather(*doing.tasks.values())
        return clock.wall_s() - began_s

    found = [virtual(partial(due_after_s, signs_s=signs_s)) for signs_s in (0.0, 500.0, 5000.0)]
    assert found == pytest.approx([300.0, 800.0, START_MAX_S], abs=0.2)
    assert reported[-1] == TimerFired(timer="start/1/0/0.000", doing={"w/0": "in its setup"})


@pytest.mark.parametrize(("told", "reason"), [(True, Reason.OOM_KILLED), (False, Reason.EXIT_NONZERO)])
def test_only_the_engine_s_word_makes_a_death_an_out_of_memory(told: bool, reason: Reason) -> None:
    text = "Segmentation fault: invalid memory reference"
    died = ProcessDied(
        name="n", job=JOB, instance=at("w/0"), epoch=Epoch(1), text=text, exit_code=1, out_of_memory=told
    )
    found = death_event(died)
    assert isinstance(found, InstanceLost) and found.reason is reason


class TestFlow:
    """The flow over a seat whose launcher never answers."""

    @pytest.fixture
    def seat(self, tmp_path: Path) -> Any:
        async def call(*_: object) -> Any:
            raise CallTimeout("no answer")

        role = service("loop", 1)
        place = JobPlace(home=str(tmp_path), job=JOB, workdir="", launcher="")
        launcher, clock = SimpleNamespace(call=call, hang_up=lambda handle: None), SystemClock()
        found = SimpleNamespace(place=place, spec=spec(role), role=role, id=at("loop/0"), devices=(), clock=clock)
        vars(found).update(launcher=launcher, marks=ProgressMarks(SystemClock()), rpc=None)
        return found

    def flow(self, seat: Any) -> Flow:
        return Flow(seat, FORMING, 0, {})

    def flow_among(self, seat: Any, *peers: Peer) -> Flow:
        seat.rpc = RpcClient(job=JOB, spec=seat.spec, launcher=seat.launcher, clock=seat.clock, caller=seat.id)
        seat.rpc.update(PeerTable(version=1, peers=peers))
        return self.flow(seat)

    def test_what_the_flow_has_not_is_told_with_its_place_in_the_job_and_the_remedy(self, seat: Any) -> None:
        seat.spec = spec(seat.role, service("squares", 1))
        flow = self.flow(seat)
        for ask, text in (
            (lambda: flow.squares.square(1), "the flow has no 'squares'; did you mean 'roles.squares'?"),
            (lambda: flow.comit({}), "the flow has no 'comit'; did you mean 'commit'?"),
            (lambda: flow.roles.square, "the job has no role 'square'; did you mean 'squares'?"),
            (lambda: flow.roles["a.b"], "the job has no role 'a.b'; there is squares"),
            (lambda: flow.roles.squares.go, "role 'squares' has no operation 'go'; there is none"),
        ):
            with pytest.raises(AttributeError) as refused:
                ask()
            line = ask.__code__.co_firstlineno
            assert str(refused.value) == f"{__file__}:{line}:22: {text}"
        assert not hasattr(flow, "__len__") and not hasattr(flow, "other")

    def test_metrics_may_be_named_arguments_of_a_commit(self, seat: Any) -> None:
        async def main() -> None:
            one, begun = self.flow(seat), list[Any]()

            async def commit(*given: Any) -> int:
                begun.append(given)
                return 1

            one._commit = commit  # type: ignore[method-assign]
            assert await one.commit(loss=0.1, reward=2) == 1
            await one.commit({"a": 1}, n=1, b=2)
            assert begun == [(1, {"loss": 0.1, "reward": 2}, {}), (1, {"a": 1, "b": 2}, {})]

        run(main())

    def test_calls_that_were_never_awaited_are_named_with_their_line_at_the_end_of_the_loop(
        self, seat: Any, capfd: pytest.CaptureFixture[str]
    ) -> None:
        role = service("w", 1, op("work", send="Each", recv="Concat"), op("items", send="Each", recv="Stream"))
        seat.spec = spec(seat.role, role, streams=(StreamSpec(name="notes", cap=8),))
        seat.control = SimpleNamespace(run=lambda work: work)

        async def forgets(f: Flow) -> None:
            for _ in range(2):
                f.roles.w.work([1])
            f.roles.w.items([1])
            f.streams.notes.put("a")
            awaited = asyncio.ensure_future(f.roles.w.work([]))
            cancelled = asyncio.ensure_future(f.roles.w.work([]))
            cancelled.cancel()
            await asyncio.gather(awaited, cancelled, return_exceptions=True)

        async def fails(f: Flow) -> None:
            found: Any = f.roles.w.work([1])
            print(found["loss"])

        async def main() -> None:
            seat.control.loop = asyncio.get_running_loop()
            body = LoopRunner(seat)
            one = self.flow_among(seat)
            await body._enter(forgets, one, threading.Lock(), asyncio.Event())
            first = forgets.__code__.co_firstlineno
            shown = [line.partition(" and never awaited")[0] for line in capfd.readouterr().err.splitlines()]
            assert shown == [
                f"rota: warning: {__file__}:{first + 4}: notes.put() was called 1 time",
                f"rota: warning: {__file__}:{first + 3}: w.items() was called 1 time",
                f"rota: warning: {__file__}:{first + 2}: w.work() was called 2 times",
            ]
            with pytest.raises(TypeError, match="not subscriptable") as failed:
                await body._enter(fails, self.flow_among(seat), threading.Lock(), asyncio.Event())
            _, trace = stacks.error_summary(failed.value)
            line = fails.__code__.co_firstlineno + 1
            assert f"{__file__}:{line}: w.work() was called 1 time and never awaited" in trace
            assert "write 'await w.work(...)'" in trace

        run(main())

    def test_a_member_that_does_not_save_in_time_fails_the_commit(self, seat: Any) -> None:
        async def main() -> None:
            with pytest.raises(CallError, match="did not save its state in"):
                await self.flow(seat)._save(Peer(rank=0, **PEER), 1, (), "")

        run(main())

    def test_a_commit_that_failed_unseen_is_raised_by_the_next_one(self, seat: Any) -> None:
        async def failing() -> int:
            raise CallError("commit 1 was lost")

        async def main() -> None:
            one = self.flow(seat)
            one._pending = asyncio.ensure_future(failing())
            await asyncio.wait([one._pending])
            with pytest.raises(CallError, match="commit 1 was lost"):
                one.commit({"n": 1})

        run(main())

    def test_a_loop_that_does_not_let_go_is_no_longer_waited_for(
        self, seat: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(flow, "CANCEL_MAX_S", 0.01)

        async def main() -> None:
            body = LoopRunner(seat)
            body._flow, body._task = self.flow(seat), asyncio.ensure_future(asyncio.sleep(60))
            body._first.acquire()
            with pytest.raises(StillRunning):
                await body.dissolve(0.0)

        run(main())

    @pytest.mark.parametrize("where", ["restoring", "queued"])
    def test_a_loop_that_is_cancelled_before_its_function_begins_has_let_go(
        self, seat: Any, monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        monkeypatch.setattr(flow, "CANCEL_MAX_S", 0.2)
        entered = threading.Event()

        async def function(_: Flow) -> None:
            entered.set()

        async def restoring(self: Flow, *, keeps: bool) -> None:
            await asyncio.sleep(60 if where == "restoring" else 0)

        monkeypatch.setattr(Flow, "begin", restoring)

        async def main() -> None:
            seat.user, seat.control, free = EventLoopThread("user"), SimpleNamespace(), threading.Event()
            seat.control.loop = asyncio.get_running_loop()
            body = LoopRunner(seat)
            body._setup, body._function = FORMING, function
            seat.user.loop.call_soon_threadsafe(free.wait)
            task = asyncio.ensure_future(body.run(0))
            await asyncio.sleep(0.01)
            await body.dissolve(0.0)
            free.set()
            await seat.user.do(int)
            assert task.cancelled() and not entered.is_set()
            seat.user.close()

        run(main())

    def test_of_two_tasks_that_wait_for_a_commit_none_begins_it_again(self, seat: Any) -> None:
        async def main() -> None:
            one, saving, begun = self.flow(seat), asyncio.Event(), list[int]()

            async def commit(n: int, *_: object) -> int:
                begun.append(n)
                await saving.wait()
                one.committed = n
                return n

            one._commit = commit  # type: ignore[method-assign]
            first = asyncio.ensure_future(one.commit())
            waiters = [asyncio.create_task(one.settle()) for _ in range(3)]
            await asyncio.sleep(0)
            waiters.pop().cancel()
            await asyncio.sleep(0)
            with pytest.raises(BadInput, match="under way"):
                one.commit()
            saving.set()
            await asyncio.gather(*waiters)
            assert (await first, await one.commit(), begun) == (1, 2, [1, 2])

        run(main())

    def test_a_commit_carries_one_moment_whatever_the_loop_does_while_members_save(self, seat: Any) -> None:
        seat.spec = spec(mesh("w", 1), loop(), streams=(StreamSpec(name="notes", cap=8),))
        told: dict[str, Any] = {}

        async def main() -> None:
            one = self.flow_among(seat, Peer(rank=0, **PEER))
            pump = one.pumps.find("notes")
            one._keep = lambda n, kept, folder: told.update(items=kept)  # type: ignore[method-assign]

            async def call(_: object, call: Call) -> Any:
                if call.method == "save":
                    assert (await pump.next_batch(1, "admission")) == [{"uid": "b"}]
                    await pump.put({"uid": "d"})
                    return {"answer": "done"}
                told.update(call.kwargs)
                return {"answer": "done", "table": PeerTable(version=2).to_json()}

            seat.launcher.call = call
            for uid in "abc":
                await pump.put({"uid": uid})
            assert (await pump.next_batch(1, "admission")) == [{"uid": "a"}]
            await one._save_and_commit(1, {}, {})
            assert [item.uid for item in pump.ledger._open.values()] == ["b", "c", "d"], "b was taken after the cut"
            pump.ledger.check()

            again = Flow(seat, FORMING, 1, told["cut"])
            again.pumps.restore(told["items"])
            found = again.pumps.find("notes")
            assert (await found.next_batch(2, "admission")) == [{"uid": "b"}, {"uid": "c"}]
            await asyncio.gather(*pump.cancel(), *found.cancel(), return_exceptions=True)

        run(main())

    def test_the_first_of_those_that_take_part_publishes_the_weights(self, seat: Any) -> None:
        edge = WeightsEdge(source=RoleName("w"), target=RoleName("r"))
        seat.spec = spec(service("w", 2), service("r", 1), loop(), weights=(edge,))
        saves: dict[str, Any] = {}

        async def main() -> None:
            one = self.flow_among(seat, Peer(rank=0, seat=1, **PEER), Peer(rank=1, seat=2, **PEER))

            async def call(to: Any, call: Call) -> Any:
                if call.method == "save":
                    saves[str(to.instance)] = call.kwargs["edges"]
                return {"answer": "done", "table": PeerTable(version=2).to_json()}

            seat.launcher.call = call
            await one._save_and_commit(1, {}, {})
            assert saves == {"w/1": (edge.name,), "w/2": ()}

        run(main())


def test_sys_exit_in_a_lane_is_a_failure_and_the_lane_goes_on() -> None:
    lane = EventLoopThread("test")

    async def leave() -> None:
        raise SystemExit(3)

    async def stay() -> int:
        return 7

    with pytest.raises(Exited, match="3"):
        lane.submit(leave()).result(5)
    assert lane.submit(stay()).result(5) == 7
    lane.close()
