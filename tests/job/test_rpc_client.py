"""Calls by retry class when callees die, refuse and raise; over a launcher of functions in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.makers import JOB, at, loop, service, spec

from rota.job.rpc.client import Lost, Refusal, Request, RpcClient, in_order
from rota.job.rpc.peers import Peer, PeerTable
from rota.runtime.clock import SystemClock
from rota.runtime.launcher import Call, CallTimeout, Handle, NotPicklable, ProcessGone
from rota.spec.dispatch import Concat, Each, First, Mean, OpSpec, Same, Shard, rule_to_text
from rota.spec.errors import BadInput, CallFailed, CallLost, RoleDown, RolledBack, TimedOut
from rota.spec.ids import Epoch, NodeId
from rota.spec.job import RoleSpec, WeightsEdge

Answer = Callable[[str, Request], Awaitable[Any]]


class Launcher:
    """Answers each call by a function of the instance and the request; a dead one raises ProcessGone.

    Its master says of every process whether it is ``alive``.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls: list[tuple[str, Request]] = []
        self.alive: bool | Exception = True
        self.asked: list[tuple[Any, ...]] = []
        self.hung_up: list[str] = []

    def hang_up(self, handle: Handle) -> None:
        self.hung_up.append(handle.name)

    async def call(self, to: Handle, call: Call) -> Any:
        if call.method == "is_alive":
            self.asked.append(call.args)
            if isinstance(self.alive, Exception):
                raise self.alive
            return self.alive
        request = Request.of_call(call.head[0], call.args, call.kwargs)
        self.calls.append((str(to.instance), request))
        try:
            async with asyncio.timeout(call.timeout_s):
                return await self.answer(str(to.instance), request)
        except TimeoutError:
            raise CallTimeout("no answer") from None


def table(n: int, *, version: int = 1, epochs: dict[int, int] | None = None, down: tuple[int, ...] = ()) -> PeerTable:
    peers = tuple(
        Peer(
            role=at("w/0").role,
            rank=rank,
            epoch=Epoch((epochs or {}).get(rank, 1)),
            started_epoch=Epoch(1),
            node=NodeId("n"),
            pid=rank + 1,
            ready=rank not in down,
            cause="SIGNALLED: ended by SIGKILL" if rank in down else "",
        )
        for rank in range(n)
    )
    return PeerTable(version=version, peers=peers)


def op(send: Any, recv: Any = None, **fields: Any) -> OpSpec:
    texts = {"send": rule_to_text(send)} | ({"recv": rule_to_text(recv)} if recv is not None else {})
    return OpSpec(name="work", **texts, **fields)


def rpc(role: RoleSpec, answer: Answer, given: PeerTable, **fields: Any) -> tuple[RpcClient, Launcher]:
    launcher = Launcher(answer)
    job = spec(role, loop(), **fields)
    made = RpcClient(job=JOB, spec=job, launcher=launcher, clock=SystemClock(), caller=at("loop/0"))  # type: ignore[arg-type]
    made.update(given)
    return made, launcher


async def each(made: RpcClient, role: RoleSpec, items: list[Any]) -> list[Any]:
    return await in_order(made.stream(role, op(Each, Concat()), items, (), {}), len(items))


async def echo(instance: str, request: Request) -> Any:
    return request.args[0]


def test_a_sharded_call_goes_to_every_member_and_comes_back_joined() -> None:
    async def main() -> None:
        role = service("w", 2, mesh=(("dp", 2),))
        made, launcher = rpc(role, echo, table(2))
        batch = {"x": np.arange(5)}
        out = await made.call(role, op(Shard("dp", "repeat"), Concat("dp")), (batch,), {})
        assert np.array_equal(out["x"], batch["x"])
        assert sorted(instance for instance, _ in launcher.calls) == ["w/0", "w/1"]

    asyncio.run(main())


def test_each_spreads_items_over_the_least_loaded_and_keeps_their_order() -> None:
    async def main() -> None:
        running: Counter[str] = Counter()
        most: Counter[str] = Counter()

        async def slow(instance: str, request: Request) -> Any:
            running[instance] += 1
            most[instance] = max(most[instance], running[instance])
            await asyncio.sleep(0.03 if instance == "w/0" else 0.001)
            running[instance] -= 1
            return request.args[0] * 10

        role = service("w", 2)
        made, launcher = rpc(role, slow, table(2))
        assert await each(made, role, list(range(40))) == [i * 10 for i in range(40)]
        per = Counter(instance for instance, _ in launcher.calls)
        assert per["w/1"] > 2 * per["w/0"], "the fast one does more"
        assert max(most.values()) == 2

    asyncio.run(main())


class Batch:
    """A value of the job that holds a lock somewhere inside."""

    def __init__(self) -> None:
        self.rows = [1, {"lock": threading.Lock()}]


@pytest.mark.parametrize("answer", [False, True], ids=["arguments", "result"])
def test_what_cannot_be_pickled_is_an_error_that_names_the_operation_and_the_part(answer: bool) -> None:
    async def refuses(instance: str, request: Request) -> Any:
        raise NotPicklable("cannot pickle '_thread.lock' object", answer=answer)

    async def main() -> None:
        role = service("w", 1)
        made, launcher = rpc(role, refuses, table(1))
        with pytest.raises(CallFailed if answer else BadInput) as failed:
            await made.call(role, op(Same), (1, {"a": Batch()}), {})
        where = "w/0.work: its result" if answer else "w.work: args[1]['a'].rows[1]['lock']"
        assert failed.value.message == f"{where} cannot be sent: cannot pickle '_thread.lock' object"
        assert "locks, files, sockets" in failed.value.hint
        assert len(launcher.calls) == 1, "the same arguments are not sent again"
        began: Callable[[Peer], bool] = lambda _: True  # noqa: E731
        lost = await made.offer(role, op(Each), Batch(), loop_epoch=Epoch(1), avoid=frozenset(), began=began)
        assert isinstance(lost, Lost) and "cannot be sent" in lost.text and lost.traceback, "the item is to blame"

    asyncio.run(main())


def test_an_item_of_a_dead_instance_goes_to_another_one() -> None:
    async def main() -> None:
        async def answer(instance: str, request: Request) -> Any:
            if instance == "w/0":
                raise ProcessGone("w/0 is gone")
            return (instance, request.args[0])

        role = service("w", 2)
        made, launcher = rpc(role, answer, table(2))
        assert await each(made, role, [1, 2, 3]) == [("w/1", i) for i in (1, 2, 3)]
        ids = [request.call_id for _, request in launcher.calls]
        assert len(set(ids)) == 3, "the item keeps its call id when it is sent again"

    asyncio.run(main())


def test_a_safe_call_to_a_dead_member_waits_for_its_new_epoch() -> None:
    async def main() -> None:
        async def answer(instance: str, request: Request) -> Any:
            if request.epoch == 1:
                raise ProcessGone("gone")
            return request.epoch

        role = service("w", 1)
        made, launcher = rpc(role, answer, table(1))
        call = asyncio.create_task(made.call(role, op(Same), ("x",), {}))
        while not launcher.calls:
            await asyncio.sleep(0)
        made.update(table(1, version=2, down=(0,)))
        made.update(table(1, version=3, epochs={0: 2}))
        assert await call == 2
        assert len(launcher.calls) == 2

    asyncio.run(main())


@pytest.mark.parametrize("first", ["the table", "the loop"])
def test_a_call_of_a_loop_that_is_over_is_not_sent_to_who_came_back(first: str) -> None:
    async def main() -> None:
        role = service("w", 1)
        made, launcher = rpc(role, echo, table(1, down=(0,)))
        made.enter(Epoch(3))
        call = asyncio.create_task(made.call(role, op(Same, retry="commit"), ("x",), {}))
        await asyncio.sleep(0)
        back = table(1, version=2, epochs={0: 4})
        own = replace(back.peers[0], role=at("loop/0").role, epoch=Epoch(4))
        news = [lambda: made.update(replace(back, peers=(*back.peers, own))), lambda: made.enter(Epoch(4))]
        for tell in news if first == "the table" else reversed(news):
            tell()
            for _ in range(10):
                await asyncio.sleep(0)
        with pytest.raises(RolledBack, match="loop epoch 3"):
            await call
        assert launcher.calls == []
        assert await made.call(role, op(Same), ("y",), {}) == "y"
        assert [request.loop_epoch for _, request in launcher.calls] == [4]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("retry", "reply", "error"),
    [
        ("never", None, CallLost),
        ("never", Refusal(kind="failed", text="ValueError: x", traceback="tb"), CallFailed),
        ("commit", None, CallLost),
        ("commit", Refusal(kind="failed", text="ValueError: x", traceback="tb"), CallLost),
    ],
)
def test_commit_and_never_operations_are_sent_once(retry: Any, reply: Refusal | None, error: type[Exception]) -> None:
    async def main() -> None:
        async def answer(instance: str, request: Request) -> Any:
            if reply is None:
                raise ProcessGone("gone")
            return reply

        role = service("w", 1)
        made, launcher = rpc(role, answer, table(1))
        with pytest.raises(error) as found:
            await made.call(role, op(Same, retry=retry, deadline_s=0.1), ("x",), {})
        assert found.value.fields["op"] == "work"  # type: ignore[attr-defined]
        made.update(table(1, version=2, epochs={0: 2}))
        await asyncio.sleep(0)
        assert len(launcher.calls) == 1

    asyncio.run(main())


@pytest.mark.parametrize("retry", ["safe", "commit", "never"])
@pytest.mark.parametrize("alive", [True, CallTimeout("the master is away")])
def test_over_a_connection_that_broke_the_same_call_is_sent_again_once_the_master_was_asked(
    retry: Any, alive: bool | Exception
) -> None:
    async def main() -> None:
        async def answer(instance: str, request: Request) -> Any:
            if len(launcher.calls) < 3:
                raise ProcessGone("the connection broke", unsure=True)
            return request.args[0]

        role = service("w", 1)
        made, launcher = rpc(role, answer, table(1))
        launcher.alive = alive
        assert await made.call(role, op(Same, retry=retry), ("x",), {}) == "x"
        assert len({request.call_id for _, request in launcher.calls}) == 1, "its instance runs no call twice"
        assert launcher.asked == [("w", 0, 1)] * 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("alive", "second", "error"),
    [(False, None, CallLost), (True, Refusal(kind="stale", text="w/0 is at epoch 2"), CallLost)],
    ids=["its process is gone", "it was set up anew and has forgotten the call"],
)
def test_a_call_that_may_have_run_before_its_connection_broke_is_never_sent_as_another_one(
    alive: bool, second: Refusal | None, error: type[Exception]
) -> None:
    async def main() -> None:
        async def answer(instance: str, request: Request) -> Any:
            if len(launcher.calls) == 1:
                raise ProcessGone("the connection broke", unsure=True)
            return second

        role = service("w", 1)
        made, launcher = rpc(role, answer, table(1))
        launcher.alive = alive
        with pytest.raises(error, match="the connection broke"):
            await made.call(role, op(Same, retry="never"), ("x",), {})
        assert len({request.call_id for _, request in launcher.calls}) == 1

    asyncio.run(main())


def test_connections_to_processes_that_the_master_has_given_up_are_closed() -> None:
    async def main() -> None:
        role = service("w", 2)
        made, launcher = rpc(role, echo, table(2))
        made.update(table(2, version=2, epochs={0: 2}))
        assert launcher.hung_up == [], "a new epoch of the same process"
        made.update(table(1, version=3))
        assert launcher.hung_up == [f"{JOB}/w/1/1"]

    asyncio.run(main())


def test_who_raised_in_a_never_operation_takes_the_next_call() -> None:
    async def main() -> None:
        async def answer(instance: str, request: Request) -> Any:
            return Refusal(kind="failed", text="ValueError: x", traceback="tb") if request.args[0] else "well"

        role = service("w", 1)
        made, _ = rpc(role, answer, table(1))
        with pytest.raises(CallFailed):
            await made.call(role, op(Same, retry="never"), (True,), {})
        async with asyncio.timeout(5):
            assert await made.call(role, op(Same), (False,), {}) == "well"

    asyncio.run(main())


def test_a_refused_commit_call_ran_nowhere_and_is_sent_again() -> None:
    async def main() -> None:
        async def answer(instance: str, request: Request) -> Any:
            return Refusal(kind="stale") if request.epoch == 1 else "done"

        role = service("w", 1)
        made, launcher = rpc(role, answer, table(1))
        call = asyncio.create_task(made.call(role, op(Same, retry="commit"), ("x",), {}))
        while not launcher.calls:
            await asyncio.sleep(0)
        made.update(table(1, version=2, epochs={0: 2}))
        assert await call == "done"

    asyncio.run(main())


def test_a_call_to_a_dead_role_raises_at_its_deadline_with_the_cause() -> None:
    async def main() -> None:
        role = service("w", 1)
        made, launcher = rpc(role, echo, table(1, down=(0,)))
        began_s = time.monotonic()
        with pytest.raises(RoleDown) as found:
            await made.call(role, op(Same, deadline_s=0.05), ("x",), {})
        assert found.value.fields["role"] == "w"
        assert found.value.fields["cause"] == "SIGNALLED: ended by SIGKILL"
        assert (
            0 < found.value.fields["since_s"] <= time.monotonic() - began_s + 0.001
            and time.monotonic() - began_s >= 0.05
        )
        assert launcher.calls == []

    asyncio.run(main())


def test_a_call_that_gets_no_answer_raises_at_its_deadline() -> None:
    async def main() -> None:
        async def never(instance: str, request: Request) -> Any:
            await asyncio.Event().wait()
            raise AssertionError

        role = service("w", 1)
        made, _ = rpc(role, never, table(1))
        with pytest.raises(TimedOut, match=r"within its deadline of 0\.05 s"):
            await made.call(role, op(Same, deadline_s=0.05), ("x",), {})

    asyncio.run(main())


def test_first_takes_the_first_answer_and_cancels_the_others() -> None:
    async def main() -> None:
        cancelled: list[str] = []

        async def answer(instance: str, request: Request) -> Any:
            if instance == "w/1":
                return instance
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(instance)
                raise
            raise AssertionError

        role = service("w", 2)
        made, _ = rpc(role, answer, table(2))
        assert await made.call(role, op(Same, First), ("x",), {}) == "w/1"
        assert cancelled == ["w/0"]

    asyncio.run(main())


def test_one_member_that_raises_cancels_the_calls_to_the_others() -> None:
    async def main() -> None:
        cancelled = asyncio.Event()

        async def answer(instance: str, request: Request) -> Any:
            if instance == "w/0":
                return Refusal(kind="failed", text="ValueError: x", traceback="tb")
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

        role = service("w", 2, mesh=(("dp", 2),))
        made, _ = rpc(role, answer, table(2))
        with pytest.raises(CallFailed):
            await made.call(role, op(Shard("dp"), Mean, retry="never"), ([1, 2],), {})
        assert cancelled.is_set()

    asyncio.run(main())


def test_a_call_names_the_weights_that_the_callee_must_have() -> None:
    async def main() -> None:
        role = service("w", 1)
        edge = WeightsEdge(source=at("a/0").role, target=at("w/0").role)
        given = replace(table(1), weights={"a-w": (4, 7), "other": (1, 1)})
        made, launcher = rpc(role, echo, given, weights=(edge,))
        await made.call(role, op(Same), ("x",), {})
        assert launcher.calls[0][1].weights == {"a-w": (4, 7)}

    asyncio.run(main())


def test_an_older_table_changes_nothing() -> None:
    async def main() -> None:
        role = service("w", 1)
        made, _ = rpc(role, echo, table(1, version=5))
        made.update(table(1, version=4, down=(0,)))
        assert await made.call(role, op(Same), ("x",), {}) == "x"

    asyncio.run(main())
