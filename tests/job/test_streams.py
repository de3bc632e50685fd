"""The pumps of streams in one process: whom a wait names, deadlines behind a backlog, sources, a put that cannot be."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any

import pytest
from tests.job.test_rpc_client import Launcher, table
from tests.makers import JOB, at, loop, op, service, spec
from tests.world import virtual

from rota.job.core.ledger import DropReason, ItemState
from rota.job.health.heartbeat import Heartbeat, ProgressMarks
from rota.job.inspect import import_target
from rota.job.instance.streams import Streams, open_source, stream_loop
from rota.job.rpc.client import Request, RpcClient
from rota.runtime.clock import Clock, SystemClock
from rota.spec.errors import BadInput, DataError
from rota.spec.ids import Epoch
from rota.spec.job import Edge, JobSpec, StreamSpec
from rota.testing.memory import VirtualClock

EACH: Any = {"send": "Each", "recv": "Concat", "retry": "safe"}
BEAT = Heartbeat(role=at("loop/0").role, rank=0, epoch=Epoch(1), started_epoch=Epoch(1), pid=1)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(limited())


async def until(true: Callable[[], Any]) -> None:
    while not true():
        await asyncio.sleep(0.001)


def streams_of(job: JobSpec, answer: Any = None, clock: Clock | None = None) -> Streams:
    clock = clock or SystemClock()
    marks = ProgressMarks(clock)
    fields: Any = {"launcher": Launcher(answer), "clock": clock, "caller": at("loop/0"), "job": JOB}
    rpc = RpcClient(spec=job, waiting=marks.waiting, **fields)
    rpc.update(table(2))
    rpc.enter(Epoch(1))
    return Streams(
        job, rpc=rpc, marks=marks, holder=at("loop/0"), epoch=Epoch(1), version=0, cut={}, say=print
    )  # fmt: skip


def notes(cap: int = 64, *edges: Edge, **fields: Any) -> JobSpec:
    roles = [service("w", 2, op("work", **EACH, **fields))] if edges else []
    return spec(*roles, loop(), streams=(StreamSpec(name="notes", cap=cap),), edges=edges)


THROUGH = Edge(source="notes", target="w.work", kind="stream")


def test_a_backlog_is_no_failure_the_deadline_counts_from_the_sending() -> None:
    async def main(clock: VirtualClock) -> None:
        one_by_one = asyncio.Lock()

        async def answer(_: str, request: Request) -> Any:
            async with one_by_one:
                await asyncio.sleep(0.02)
            return request.args[0]

        streams = streams_of(notes(64, THROUGH, deadline_s=0.2), answer, clock)
        pump = streams.find("notes")
        for number in range(24):
            await pump.put(number)
        assert await pump.next_batch(24, "admission") == list(range(24)), "0.5 s of work, each within 0.2 s"
        await streams.close()

    virtual.run(main)


def test_a_loop_that_waits_for_its_source_is_quiet_and_one_that_waits_for_an_item_names_who_has_it() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def answer(_: str, request: Request) -> Any:
            await go.wait()
            return request.args[0]

        streams = streams_of(notes(64, THROUGH), answer)
        pump = streams.find("notes")

        def waits() -> list[str]:
            return [wait.target for wait in streams.marks.read(BEAT).waits if wait.kind == "stream"]

        taking = asyncio.create_task(pump.next_batch(1, "admission"))
        await until(lambda: "waits for items" in streams.marks.read(BEAT).quiet)
        assert waits() == [], "nobody is to blame for a silent source"
        await pump.put("a")
        await until(lambda: waits() == ["w/0"])
        assert not streams.marks.read(BEAT).quiet, "it is w/0 that holds it up, and not the idle w/1"
        go.set()
        assert await taking == ["a"]
        await streams.close()

    run(main())


def test_the_first_of_two_stops_is_named_while_it_has_the_item() -> None:
    async def main() -> None:
        async def answer(_: str, request: Request) -> Any:
            await asyncio.sleep(60)

        ops = op("work", **EACH)
        job = spec(
            service("w", 2, ops),
            service("late", 1, ops),
            loop(),
            streams=(StreamSpec(name="notes"), StreamSpec(name="done")),
            edges=(
                THROUGH,
                Edge(source="w.work", target="late.work", kind="stream"),
                Edge(source="late.work", target="done", kind="stream"),
            ),
        )
        streams = streams_of(job, answer)
        await streams.find("notes").put("a")
        taking = asyncio.create_task(streams.find("done").next_batch(1, "admission"))

        def stops() -> list[str]:
            return [one.target for one in streams.marks.read(BEAT).waits if one.kind == "stream"]

        await until(lambda: named.extend(stops()) or named[-1:] == ["w/0"])  # till then nobody in particular of w
        taking.cancel()
        await streams.close()

    named: list[str] = []
    run(main())
    assert set(named) <= {"w", "w/0"} and named[-1] == "w/0"


def test_only_a_newer_table_lets_the_watch_look_at_what_runs() -> None:
    async def main() -> None:
        streams = streams_of(notes(64, THROUGH))
        pump, looked = streams.find("notes"), list[str]()
        pump.give_up = lambda peer: looked.append(str(peer.id))  # type: ignore[method-assign]
        streams.begin()
        for _ in range(5):
            await asyncio.sleep(0)
            streams.rpc.wake()
        await asyncio.sleep(0)
        assert looked == ["w/0", "w/1"]
        streams.rpc.update(table(2, version=2, epochs={1: 2}))
        await asyncio.sleep(0)
        assert len(looked) == 4
        await streams.close()

    run(main())


def test_streams_that_are_closed_begin_no_more_work_on_what_waits_again() -> None:
    async def main() -> None:
        async def answer(_: str, request: Request) -> Any:
            await asyncio.sleep(60)

        streams = streams_of(notes(64, THROUGH), answer)
        pump = streams.find("notes")
        await pump.put({"uid": "a"})
        await until(lambda: pump.ledger.count(ItemState.RUNNING))
        await streams.close()
        pump.ledger.release("a")
        pump.refresh()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert pump.ledger.count(ItemState.PENDING) == 1

    run(main())


@pytest.mark.parametrize("end", ["failed", "closed"])
def test_a_put_that_waits_for_room_ends_when_it_can_no_longer_be(end: str) -> None:
    async def main() -> None:
        async def answer(_: str, request: Request) -> Any:
            raise AssertionError("not asked")

        pump = streams_of(notes(1), answer).find("notes")
        await pump.put({"uid": "a"})
        waiting = asyncio.create_task(pump.put({"uid": "b"}))
        await asyncio.sleep(0.01)
        if end == "failed":

            async def bad() -> None:
                raise DataError("too much of it is bad")

            await pump._guarded(bad)
        else:
            pump.end_input()
            pump.ledger.drop("a", DropReason.BAD_DATA)
        with pytest.raises(DataError if end == "failed" else BadInput):
            await waiting
        await asyncio.gather(*pump.cancel(), return_exceptions=True)

    run(main())


class Bugged:
    """Ten items of which number 3 has a bug."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return [index][index == 3]


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = ModuleType("sources_of_a_test")
    vars(found).update(feed=iter(range(9)), make=lambda: iter(range(9)), ten=Bugged(), some=[1, 2])
    monkeypatch.setitem(sys.modules, found.__name__, found)
    return found


def test_an_iterator_is_no_source_the_function_that_makes_it_is_one(sources: ModuleType) -> None:
    for _ in range(2):
        assert open_source("sources_of_a_test:make", 0).read(2) == 2
        assert open_source("sources_of_a_test:some", 0).read(1) == 2
    with pytest.raises(BadInput, match="read once"):
        open_source("sources_of_a_test:feed", 0)


def test_an_index_error_before_the_end_is_bad_data_and_not_the_end(sources: ModuleType) -> None:
    found = open_source("sources_of_a_test:ten", 0)
    assert found.read(2) == 2
    with pytest.raises(DataError, match="item 3 of a data set of 10"):
        found.read(3)
    with pytest.raises(IndexError):
        found.read(10)
    with pytest.raises(IndexError):
        open_source("sources_of_a_test:some", 0).read(2)


def test_stored_jobs_find_the_built_in_loop_by_the_path_that_they_name() -> None:
    assert import_target("rota.job.streams:drain") is stream_loop
