"""What an instance does when its master cannot be asked; in this process, with a launcher that fails."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.makers import JOB, at, service, spec

from rota.job.health import preflight
from rota.job.health.heartbeat import Heartbeat, HeartbeatAnswer
from rota.job.instance import instance as instance_module
from rota.job.instance import operations
from rota.job.instance.instance import Instance
from rota.job.master.executor import death_event
from rota.job.place import JobPlace
from rota.job.rpc.client import Refusal
from rota.job.rpc.peers import PeerTable
from rota.job.rpc.tracing import Spans
from rota.job.workload import Workload, interface_of, op
from rota.runtime.devices import DeviceFamily
from rota.runtime.event_loop import EventLoopThread
from rota.runtime.launcher import Call, ProcessDied
from rota.spec.dispatch import Rank
from rota.spec.ids import Epoch, RoleName
from rota.spec.job import Checkpoint, WeightsEdge
from rota.spec.reasons import FENCED_EXIT_STATUS, STUCK_EXIT_STATUS, Reason

LIMIT_S = 30.0


def an_instance(folder: Path, *devices: int, workload: type[Workload] | None = None) -> Instance:
    cls = workload or Worked
    place = JobPlace(home=str(folder), job=JOB, workdir=str(folder), launcher="")
    role = replace(service("w", 1), workload=f"{__name__}:{cls.__name__}", interface=interface_of(cls))
    return Instance(
        place=place.to_json(), spec=spec(role).to_json(), instance="w/0", epoch=1, attempt=1, devices=[*devices]
    )


class BrokenLauncher:
    """Every call raises what nobody expects."""

    async def call(self, *_: object) -> Any:
        raise KeyError("a bug in the answer of the master")


@pytest.mark.parametrize("disk_hangs", [False, True], ids=["a whole disk", "a disk that hangs"])
def test_an_instance_whose_beats_fail_in_any_way_ends_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_hangs: bool
) -> None:
    ended, back, statuses = threading.Event(), threading.Event(), list[int]()
    if disk_hangs:
        monkeypatch.setattr(Spans, "write", lambda *_: back.wait())

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()
        raise asyncio.CancelledError

    monkeypatch.setattr(instance_module.os, "_exit", end)
    monkeypatch.setattr(instance_module, "open_launcher", lambda _: BrokenLauncher())
    monkeypatch.setattr(instance_module, "BEAT_S", 0.01)
    monkeypatch.setattr(instance_module, "FENCE_EXIT_S", 0.1)
    instance = an_instance(tmp_path)
    try:
        assert ended.wait(LIMIT_S)
        assert statuses == [FENCED_EXIT_STATUS]
    finally:
        back.set()
        instance._control.close()
        instance._config.user.close()


class QuietLauncher:
    """A master that answers every beat, and says nothing."""

    async def call(self, *_: object) -> Any:
        return HeartbeatAnswer(master_epoch=Epoch(1)).to_json()


BLOCKS, LETS_GO = threading.Event(), threading.Event()


class Worked(Workload):
    """Counts its runs; one operation leaves the interpreter, one blocks."""

    def __init__(self) -> None:
        self.runs = 0
        self.threads: set[int] = set()

    @op(send=Rank(0))
    def work(self, x: int) -> tuple[int, int]:
        self.runs += 1
        self.threads.add(threading.get_ident())
        return x, self.runs

    @op(send=Rank(0))
    def leave(self) -> None:
        raise SystemExit(3)

    @op(send=Rank(0))
    def block(self) -> bool:
        BLOCKS.set()
        return LETS_GO.wait(LIMIT_S)


def test_an_adopted_loop_runs_operations_once_fenced_and_control_goes_on_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_module, "open_launcher", lambda _: QuietLauncher())
    instance = an_instance(tmp_path)

    def head(call_id: str, name: str, *, loop_epoch: int = 4) -> list[Any]:
        return [call_id, name, 1, loop_epoch, {}, True]

    async def stacks_meanwhile() -> str:
        await asyncio.to_thread(BLOCKS.wait, LIMIT_S)
        found = await instance.stacks()
        LETS_GO.set()
        return found

    async def main() -> None:
        instance.adopt(asyncio.get_running_loop())
        assert await instance.assemble(epoch=1, world=1, restore=0, restarts=0, index=0) == {"answer": "done"}
        assert await instance.call(head("a", "work"), 5) == (5, 1)
        assert await instance.call(head("a", "work"), 5) == (5, 1), "a repeated call id gets the first answer"
        body: Any = instance._runner
        assert body._formed.object.threads == {threading.get_ident()}, "no other thread was asked"
        # The table tells of a newer loop before its first call does.
        await instance.peers(PeerTable(version=1, loop_epoch=Epoch(5)).to_json())
        async with asyncio.timeout(LIMIT_S):
            while instance._config.rpc.table.version < 1:
                await asyncio.sleep(0.001)
        fenced = await instance.call(head("b", "work"), 5)
        assert isinstance(fenced, Refusal) and fenced.kind == "stale" and "fenced by 5" in fenced.text
        asked = instance._control.submit(stacks_meanwhile())
        assert await instance.call(head("c", "block", loop_epoch=5)), "control answers while user code blocks its loop"
        assert "block" in asked.result(LIMIT_S)
        left = await instance.call(head("d", "leave", loop_epoch=5))
        assert isinstance(left, Refusal) and left.kind == "failed" and "SystemExit: 3" in left.text
        await asyncio.to_thread(instance._control.close)

    asyncio.run(main())


class Counted(Workload):
    """Operations of each retry class; one waits until it is cancelled."""

    def __init__(self) -> None:
        self.runs = 0
        self.cancelled = False

    @op(send=Rank(0), retry="never")
    def count(self) -> int:
        self.runs += 1
        return self.runs

    @op(send=Rank(0), retry="commit")
    def commit(self) -> int:
        self.runs += 1
        return self.runs

    @op.state
    def state(self) -> dict[str, int]:
        return {"runs": self.runs}

    @op(send=Rank(0))
    async def wait(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


@pytest.mark.parametrize("name", ["count", "commit"])
def test_a_call_that_comes_again_after_its_answer_was_forgotten_is_refused_and_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(instance_module, "open_launcher", lambda _: QuietLauncher())
    monkeypatch.setattr(operations, "REPLIES_KEPT_MAX", 2)
    monkeypatch.setattr(operations.checkpoint, "connect", lambda *_: None)
    instance = an_instance(tmp_path, workload=Counted)

    async def main() -> None:
        instance.adopt(asyncio.get_running_loop())
        assert await instance.assemble(epoch=1, world=1, restore=0, restarts=0, index=0) == {"answer": "done"}
        for number in range(4):
            assert await instance.call([str(number), name, 1, 1, {}, True]) == number + 1
        assert await instance.call(["3", name, 1, 1, {}, True]) == 4, "this answer is still there"
        again = await instance.call(["0", name, 1, 1, {}, True])
        assert isinstance(again, Refusal) and again.kind == "failed" and "was dropped" in again.text
        body: Any = instance._runner
        assert body._formed.object.runs == 4
        reported = instance._failure is not None
        assert reported is (name == "commit"), "only after a commit operation the job has to go back"
        await asyncio.to_thread(instance._control.close)

    asyncio.run(main())


def test_a_cancelled_call_ends_its_operation_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_module, "open_launcher", lambda _: QuietLauncher())
    monkeypatch.setattr(operations.checkpoint, "connect", lambda *_: None)
    instance = an_instance(tmp_path, workload=Counted)

    async def main() -> None:
        instance.adopt(asyncio.get_running_loop())
        assert await instance.assemble(epoch=1, world=1, restore=0, restarts=0, index=0) == {"answer": "done"}
        waiting = asyncio.create_task(instance.call(["a", "wait", 1, 1, {}, True]))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        body: Any = instance._runner
        assert body._formed.object.cancelled and body._formed.active == 0
        assert instance._failure is None, "it is no failure of the instance"
        assert await instance.call(["b", "count", 1, 1, {}, True]) == 1
        await asyncio.to_thread(instance._control.close)

    asyncio.run(main())


class Stateful(Workload):
    """Has a state to save."""

    @op
    def work(self) -> None: ...

    @op.state
    def state(self) -> dict[str, int]:
        return {"n": 1}


def test_a_checkpoint_lies_in_the_home_of_the_machine_that_writes_it_and_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop names a folder below the home of its own machine, which this one may not have."""
    monkeypatch.setattr(instance_module, "open_launcher", lambda _: QuietLauncher())
    monkeypatch.setattr(operations.checkpoint, "connect", lambda *_: None)
    monkeypatch.setattr(operations.checkpoint, "save", lambda *_: 0)
    instance = an_instance(tmp_path / "mine", workload=Stateful)
    theirs = tmp_path / "theirs" / "checkpoints" / JOB

    async def main() -> None:
        instance.adopt(asyncio.get_running_loop())
        assert await instance.assemble(epoch=1, world=1, restore=0, restarts=0, index=0) == {"answer": "done"}
        for n in range(1, 9):
            folder = str(theirs / f"step-{n}.e1")
            answer = await instance.save(n=n, epoch=1, loop_epoch=1, edges=(), folder=folder)
            assert answer["answer"] == "done"
        await asyncio.to_thread(instance._control.close)

    asyncio.run(main())
    there = sorted(one.name for one in (tmp_path / "mine" / "checkpoints" / JOB).iterdir())
    keep = Checkpoint().keep
    assert there == [f"step-{n}.e1" for n in range(9 - keep - 1, 9)], "one more than are kept: the last may be in work"
    assert not theirs.exists()


class Reader(Workload):
    """Needs weights for its operation."""

    @op
    def read(self) -> None: ...

    @op.weights
    def load(self, version: int, tensors: Any) -> None: ...


def test_weights_that_cannot_be_read_are_a_loss_of_the_instance_and_no_fault_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = threading.Event()

    class Listening(QuietLauncher):
        async def call(self, _: object, call: Call) -> Any:
            if call.method == "beat" and Heartbeat.from_json(call.args[0]).lost is not None:
                reported.set()
            return await super().call()

    monkeypatch.setattr(instance_module, "open_launcher", lambda _: Listening())
    monkeypatch.setattr(operations.checkpoint, "connect", lambda *_: None)  # nothing is shared here
    role = replace(service("w", 1), workload=f"{__name__}:Reader", interface=interface_of(Reader))
    made = replace(spec(role), weights=(WeightsEdge(source=RoleName("a"), target=role.name),))
    place = JobPlace(home=str(tmp_path), job=JOB, workdir=str(tmp_path), launcher="")
    instance = Instance(place=place.to_json(), spec=made.to_json(), instance="w/0", epoch=1, attempt=1, devices=[])

    async def main() -> None:
        instance.adopt(asyncio.get_running_loop())
        assert await instance.assemble(epoch=1, world=1, restore=0, restarts=0, index=0) == {"answer": "done"}
        found = await instance.call(["a", "read", 1, 4, {"a-w": (1, 1)}, False])
        assert isinstance(found, Refusal) and (found.kind, found.traceback) == ("stale", "")
        assert "AttributeError" in found.text and await asyncio.to_thread(reported.wait, LIMIT_S)
        await asyncio.to_thread(instance._control.close)

    asyncio.run(main())


class Given(Workload):
    def __init__(self, lr: float, *, layers: list[int]) -> None:
        self.given = [lr, layers]

    @op
    def read(self) -> list[object]:
        return self.given


def test_an_object_is_made_with_the_arguments_of_its_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_module, "open_launcher", lambda _: QuietLauncher())
    args = {"lr": 1e-4, "layers": [1, 2]}
    role = replace(service("w", 1), workload=f"{__name__}:Given", args=args, interface=interface_of(Given, args))
    place = JobPlace(home=str(tmp_path), job=JOB, workdir=str(tmp_path), launcher="")
    instance = Instance(
        place=place.to_json(), spec=spec(role).to_json(), instance="w/0", epoch=1, attempt=1, devices=[]
    )

    async def main() -> object:
        instance.adopt(asyncio.get_running_loop())
        assert await instance.assemble(epoch=1, world=1, restore=0, restarts=0, index=0) == {"answer": "done"}
        found = await instance.call(["a", "read", 1, 4, {}, False])
        await asyncio.to_thread(instance._control.close)
        return found

    assert asyncio.run(main()) == [1e-4, [1, 2]]


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What does not answer waits for it: a check of the node gives up after 0.01 s."""
    back = threading.Event()
    monkeypatch.setattr(instance_module, "open_launcher", lambda _: QuietLauncher())
    monkeypatch.setattr(instance_module, "CHECK_MAX_S", 0.01)
    yield back
    back.set()


def refused(instance: Instance, back: threading.Event) -> dict[str, Any]:
    """The failure that the check of an instance answers with."""
    try:
        answer = asyncio.run(instance.check())
    finally:
        back.set()
        instance._control.close()
        instance._config.user.close()
    assert answer["answer"] == "failed"
    return answer["failure"]


def test_a_node_whose_disk_does_not_answer_is_unfit_and_the_folders_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unanswered: threading.Event
) -> None:
    monkeypatch.setattr(instance_module, "quick", lambda *_: unanswered.wait())
    failure = refused(an_instance(tmp_path), unanswered)
    assert failure["reason"] == Reason.DATA_UNREACHABLE
    assert str(tmp_path) in failure["text"] and "did not answer in 0.01 s" in failure["text"]


def test_devices_whose_driver_does_not_answer_are_named_and_not_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unanswered: threading.Event
) -> None:
    family = DeviceFamily()
    monkeypatch.setattr(family, "inventory", lambda: unanswered.wait() and ())
    monkeypatch.setattr(preflight, "local_family", lambda: family)
    monkeypatch.setattr(instance_module, "quick", lambda _: [])
    failure = refused(an_instance(tmp_path, 1), unanswered)
    assert failure["reason"] == Reason.GPU_LOST
    assert "or their driver, did not answer in 0.01 s" in failure["text"]


def test_a_device_that_fails_under_its_work_fails_the_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors, reported = {1: 4}, threading.Event()
    family = DeviceFamily()
    monkeypatch.setattr(family, "inventory", tuple)
    monkeypatch.setattr(family, "memory_errors", lambda: dict(errors))
    monkeypatch.setattr(preflight, "local_family", lambda: family)
    monkeypatch.setattr(instance_module, "DEVICES_EVERY_S", 0.01)

    class Listening(QuietLauncher):
        async def call(self, _: object, call: Call) -> Any:
            beat = Heartbeat.from_json(call.args[0])
            if beat.lost is not None and beat.lost.reason is Reason.GPU_ECC:
                reported.set()
            return await super().call()

    monkeypatch.setattr(instance_module, "open_launcher", lambda _: Listening())
    instance = an_instance(tmp_path, 1)
    try:
        assert asyncio.run(instance.check()) == {"answer": "done"}, "four errors of an earlier time are no fault"
        assert not reported.is_set()
        errors[1] = 5
        assert reported.wait(LIMIT_S), "the master hears of it at the next beat"
    finally:
        instance._control.close()
        instance._config.user.close()


@pytest.mark.parametrize(("number", "text"), [(9, "ended by SIGKILL"), (35, "ended by signal 35")])
def test_a_death_by_any_signal_is_reported(number: int, text: str) -> None:
    died = ProcessDied(name="n", job=JOB, instance=at("w/0"), epoch=Epoch(1), signal=number)
    assert death_event(died).text == text


def test_an_operation_that_holds_its_thread_over_a_new_epoch_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses, go, began = list[int](), threading.Event(), threading.Event()

    def end(status: int) -> None:
        statuses.append(status)
        raise asyncio.CancelledError

    def block(self: Worked) -> bool:
        began.set()
        return go.wait(LIMIT_S)

    monkeypatch.setattr(Worked, "block", op(send=Rank(0))(block))
    monkeypatch.setattr(instance_module, "open_launcher", lambda _: QuietLauncher())
    monkeypatch.setattr(instance_module.os, "_exit", end)
    monkeypatch.setattr(operations, "LET_GO_S", 0.05)
    instance = an_instance(tmp_path)

    async def main() -> list[dict[str, Any]]:
        found = [await instance.assemble(epoch=1, world=1, restore=0, restarts=0, index=0)]
        call = asyncio.create_task(instance.call(["a", "block", 1, 4, {}, True]))
        await asyncio.to_thread(began.wait, LIMIT_S)
        found.append(await instance.assemble(epoch=2, world=1, restore=0, restarts=0, index=0))
        go.set()
        await asyncio.gather(call, return_exceptions=True)
        return found

    try:
        assert asyncio.run(main())[0] == {"answer": "done"}
        assert statuses == [STUCK_EXIT_STATUS]
    finally:
        instance._control.close()
        instance._config.user.close()


def test_what_is_given_to_a_loop_in_its_last_step_is_begun_and_cancelled() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    async def close_and_give(thread: EventLoopThread) -> None:
        thread.close()
        thread.submit(work())

    thread = EventLoopThread("t")
    thread.submit(close_and_give(thread))
    deadline = time.monotonic() + 10.0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == ["cancelled"]


def test_nothing_of_a_loop_runs_after_it_was_closed() -> None:
    thread, began, ended = EventLoopThread("t"), threading.Event(), threading.Event()

    def step() -> None:
        began.set()
        time.sleep(0.2)
        ended.set()

    thread.submit(thread.do(step))
    assert began.wait(LIMIT_S)
    thread.close()
    assert ended.is_set() and thread._thread is not None and not thread._thread.is_alive()
    thread.close()


def test_a_loop_that_does_not_end_is_named_and_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.runtime.event_loop.CLOSE_MAX_S", 0.2)
    thread, free = EventLoopThread("deaf"), threading.Event()

    async def works() -> None:
        free.wait(60)

    thread.submit(works())
    try:
        with pytest.raises(TimeoutError, match="thread deaf still works"):
            thread.close()
    finally:
        free.set()
    monkeypatch.undo()
    thread.close()


def test_a_loop_that_takes_another_gives_work_to_that_and_ends_its_own() -> None:
    own, other = EventLoopThread("own"), EventLoopThread("other")
    thread, taken = own._thread, other._thread
    assert thread is not None and taken is not None
    own.adopt(other.loop)
    thread.join(LIMIT_S)
    assert not thread.is_alive() and own.submit(own.do(threading.get_ident)).result(LIMIT_S) == taken.ident
    other.close()
