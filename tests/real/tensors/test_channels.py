"""Channels: in order, bounded, each record to one consumer; a consumer's death gives its records back."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.real.tensors.crew import Crew, clean, repeats, wait_until

from rota.spec.errors import BadInput
from rota.tensors import errors
from rota.tensors.api.channels import Channel
from rota.tensors.api.store import Plane

WAITING = "os.read(os.pipe()[0], 1)"


def fill(channel: Channel, count: int) -> list[int]:
    return [channel.put({"x": np.full(1000, index)}, {"index": index}) for index in range(count)]


def indices(channel: Channel, n_max: int = 100, **how: Any) -> list[int]:
    """Take, acknowledge, and say what came."""
    records = channel.take(n_max, as_="numpy", **how)
    for record in records:
        assert (record.tensors["x"] == record.meta["index"]).all()
        channel.ack(record)
    return [record.meta["index"] for record in records]


def test_records_come_in_order_once_and_their_bytes_go_with_the_last_view(plane: Plane) -> None:
    channel = plane.channel("c")
    numbers = fill(channel, 5)
    assert numbers == sorted(numbers)
    assert channel.depth() == 5
    first = channel.take(2, as_="numpy")
    assert [record.meta["index"] for record in first] == [0, 1]
    assert [record.tries for record in first] == [1, 1]
    assert indices(channel) == [2, 3, 4]
    view = first[0].tensors["x"]
    for record in first:
        channel.ack(record)
    assert channel.depth() == 0
    channel.drain(0.0)
    record = first = None
    gc.collect()
    wait_until(lambda: plane.stats()["versions"] == {"doomed": 1})
    assert (view == 0).all()
    del view
    wait_until(lambda: plane.stats()["versions"] == {})
    assert channel.take(timeout_s=0.01) == []
    channel.put({}, {"only": "meta"})  # a record without a tensor is taken until it is acknowledged, too
    (record,) = channel.take(as_="numpy")
    gc.collect()
    plane._session.release_ended()
    assert channel.take(as_="numpy") == []
    channel.ack(record)


def test_what_is_given_back_or_dropped_is_the_first_again(plane: Plane) -> None:
    channel = plane.channel("c")
    fill(channel, 3)
    first, second = channel.take(2, as_="numpy")
    channel.nack(first, "bad luck")
    with pytest.raises(errors.ProtocolBreach, match="given back"):
        channel.ack(first)
    assert channel.dropped["nack: bad luck"] == 1
    again = channel.take(as_="numpy")[0]
    assert (again.meta["index"], again.tries) == (0, 2)
    assert [record.meta["index"] for record in channel.take(5, as_="numpy")] == [2]  # and dropped at once
    del second
    gc.collect()
    assert wait_until(lambda: indices(channel)) in ([1], [1, 2], [2])
    channel.ack(again)
    with pytest.raises(errors.WaitTimeout, match="not acknowledged"):
        channel.put({"x": np.zeros(1)}, {"index": 9})
        channel.drain(0.01)


def test_a_full_channel_blocks_its_producer_or_drops_the_oldest_and_counts_it(plane: Plane, actors: Crew) -> None:
    channel = plane.channel("c", items_max=3)
    fill(channel, 3)
    with pytest.raises(errors.BackPressure, match="holds 3 records"):
        channel.put({"x": np.zeros(1)})
    code = "plane.channel('c', items_max=3).put({'x': np.full(4, 3)}, {'index': 3}, timeout_s=20)"
    waiting = actors.start(code)
    assert indices(channel, 1) == [0]
    assert actors.wait(waiting) == 0, actors.output(waiting)
    held = channel.take(as_="numpy")[0]
    lossy = plane.channel("c", items_max=3, full="drop_oldest")
    lossy.put({"x": np.full(4, 4)}, {"index": 4})
    assert lossy.dropped["full"] == 1
    channel.ack(held)  # what somebody works on is not dropped
    assert held.meta["index"] == 1
    assert indices(channel) == [3, 4]


@pytest.mark.parametrize("round_", repeats(1, 20))
def test_a_killed_consumer_gives_its_records_back_in_order(plane: Plane, actors: Crew, round_: int) -> None:
    channel = plane.channel("c")
    fill(channel, 6)
    code = f"""
        channel = plane.channel('c')
        mine = channel.take(4, as_='numpy')
        channel.ack(mine[0])
        print('took', len(mine), flush=True)
        {WAITING}
    """
    consumer = actors.start(code)
    actors.says(consumer, "took 4")
    rest = channel.take(9, as_="numpy")
    assert [record.meta["index"] for record in rest] == [4, 5]
    actors.kill(consumer)
    records = wait_until(lambda: channel.take(9, as_="numpy"))
    assert [(record.meta["index"], record.tries) for record in records] == [(1, 2), (2, 2), (3, 2)]
    for record in [*rest, *records]:
        channel.ack(record)
    rest = records = record = None
    wait_until(lambda: clean(plane)["versions"] == {})


def test_a_lost_registry_loses_no_record_and_gives_none_to_a_second_consumer(plane: Plane) -> None:
    channel = plane.channel("c")
    fill(channel, 4)
    mine = channel.take(2, as_="numpy")
    plane.recover()
    assert indices(channel) == [2, 3]
    fill(channel, 1)
    assert [record.meta["index"] for record in mine] == [0, 1]
    for record in mine:
        channel.ack(record)
    assert indices(channel) == [0]
    assert channel.depth() == 0


def test_a_consumer_of_an_older_epoch_gets_nothing(plane: Plane) -> None:
    channel = plane.channel("c", epoch=3)
    fill(channel, 1)
    plane.fence("", 4)
    plane.fence("job", 4)
    plane.label = "job/learner/0"
    try:
        with pytest.raises(errors.StaleEpoch, match="older than 4"):
            plane.channel("c", epoch=3).take()
        assert indices(plane.channel("c", epoch=4)) == [0]
    finally:
        plane.label = ""


def test_a_consumer_that_was_replaced_while_stopped_acknowledges_nothing(plane: Plane, actors: Crew) -> None:
    fill(plane.channel("c"), 2)
    code = """
        from rota.tensors import errors
        channel = plane.channel('c')
        record, = channel.take(as_='numpy')
        print('took', record.meta['index'], flush=True)
        signal.raise_signal(signal.SIGSTOP)
        for act in (lambda: channel.ack(record), lambda: channel.take(), lambda: channel.put({'x': np.zeros(1)})):
            try:
                act()
            except errors.StaleEpoch as error:
                assert 'older than 2' in str(error)
            else:
                raise AssertionError('not fenced')
        print('fenced', flush=True)
        os.read(os.pipe()[0], 1)
    """
    old = actors.start(code, label="job/learner/0", epoch=1)
    actors.says(old, "took 0")
    wait_until(lambda: "T (stopped)" in Path(f"/proc/{old}/status").read_text())
    took = "record, = channel.take(as_='numpy', timeout_s=20); assert record.meta['index'] == {}; channel.ack(record)"
    new = f"channel = plane.channel('c'); {took.format(1)}; print('next', flush=True); {took.format(0)}"
    successor = actors.start(new, label="job/learner/0", epoch=2)
    actors.says(successor, "next")
    plane.recover()  # the fence outlives the registry
    os.kill(old, signal.SIGCONT)
    actors.says(old, "fenced")
    assert plane.channel("c").depth() == 1
    assert plane._space.table.current(plane.ls("c/#")[0].slot) != 0  # a refused ack leaves the fast path as it was
    actors.kill(old)
    assert actors.wait(successor) == 0, actors.output(successor)
    assert clean(plane)["versions"] == {}


@pytest.mark.parametrize("round_", repeats(1, 10))
def test_records_of_many_producers_reach_killed_and_living_consumers_at_least_once(
    plane: Plane, actors: Crew, round_: int
) -> None:
    producer = """
        c = plane.channel('c', items_max=8)
        for i in range(30): c.put({'x': np.full(500, i)}, [os.getpid(), i], timeout_s=30)
    """
    consumer = """
        c = plane.channel('c')
        while True:
            for r in c.take(2, timeout_s=5, as_='numpy'):
                assert (r.tensors['x'] == r.meta[1]).all()
                print(*r.meta, flush=True)
                c.ack(r)
    """
    producers = [actors.start(producer) for _ in range(2)]
    consumers = [actors.start(consumer)]
    actors.says(consumers[0], "\n")  # before the other one, which might take all there are
    consumers.append(actors.start(consumer))
    actors.kill(consumers[0])
    for pid in producers:
        assert actors.wait(pid) == 0, actors.output(pid)
    plane.channel("c").drain(20)
    came = {pid: [tuple(map(int, line.split())) for line in actors.output(pid).splitlines()] for pid in consumers}
    assert set(came[consumers[0]] + came[consumers[1]]) == {(pid, index) for pid in producers for index in range(30)}
    actors.kill(consumers[1])
    assert clean(plane)["names"] == 0


PRODUCER = """
    c = plane.channel('c')
    for i in range(30):
        c.put({'x': np.full(500 * (1 + i % 3), i)}, {'index': i}, timeout_s=30)
        print(i, flush=True)
"""
CONSUMER = """
    c = plane.channel('c')
    while True:
        records = c.take(3, timeout_s=60, as_='numpy')
        c.ack(*records)
        for r in records: print(r.meta['index'], flush=True)
"""


@pytest.mark.parametrize("die_at", ["ring:5", "copying:4", "copied:9", "committed:6", "block:2"])
def test_a_producer_killed_inside_a_put_loses_no_record_that_it_was_told_of(
    plane: Plane, actors: Crew, die_at: str
) -> None:
    producer = actors.start(PRODUCER, die_at=die_at)
    assert actors.wait(producer) == -signal.SIGKILL, actors.output(producer)
    told = len(actors.output(producer).splitlines())
    came = indices(plane.channel("c"))
    assert came == list(range(len(came)))
    assert told <= len(came) <= told + 1
    wait_until(lambda: clean(plane)["versions"] == {})


@pytest.mark.parametrize("die_at", ["ring:4", "leased:2", "ring:7"])
def test_a_consumer_killed_inside_a_take_or_an_ack_loses_no_record(plane: Plane, actors: Crew, die_at: str) -> None:
    channel = plane.channel("c")
    fill(channel, 20)
    consumer = actors.start(CONSUMER, die_at=die_at)
    assert actors.wait(consumer) == -signal.SIGKILL, actors.output(consumer)
    told = [int(line) for line in actors.output(consumer).splitlines()]
    rest: list[int] = []
    wait_until(lambda: rest.extend(indices(channel)) or channel.depth() == 0)
    assert told == list(range(len(told)))
    assert rest == list(range(20 - len(rest), 20))
    assert 0 <= 20 - len(rest) - len(told) <= 3  # the last ones were acknowledged, and not yet printed
    wait_until(lambda: clean(plane)["versions"] == {})


def test_records_that_a_forked_child_views_stay_whatever_comes_after_them(plane: Plane, actors: Crew) -> None:
    code = """
        channel = plane.channel('c')
        channel.put({'x': np.full(1000, 1)})
        record, = channel.take(as_='numpy')
        view = record.tensors['x']
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(reading, 1)
            os._exit(0 if (view == 1).all() else 9)
        channel.ack(record)
        del record, view
        for i in range(2, 6):
            channel.put({'x': np.full(1000, i)})
            record, = channel.take(as_='numpy')
            channel.ack(record)
        os.write(writing, b'x')
        assert os.waitpid(child, 0)[1] == 0
    """
    assert actors.run(code) == 0
    wait_until(lambda: clean(plane)["versions"] == {})


def test_records_of_any_size_and_many_tensors_share_one_channel(plane: Plane) -> None:
    channel = plane.channel("c")
    for size in (0, 1, 70_000, 3 << 20, 10):
        tensors = {"a": np.arange(size, dtype=np.uint8), "b/c": np.full((2, 3), size, np.float32)}
        channel.put(tensors, [size])
        (record,) = channel.take(as_="numpy")
        assert record.meta == [size]
        for name, value in tensors.items():
            assert record.tensors[name].dtype == value.dtype
            assert (record.tensors[name] == value).all()
        with pytest.raises(errors.NotFound):
            plane.ref(record.tensors["b/c"])  # its memory will be another record's
        channel.ack(record)


def test_a_channel_whose_memory_is_given_back_again_and_again_loses_no_record(plane: Plane, actors: Crew) -> None:
    producer = """
        c = plane.channel('c', items_max=8)
        for i in range(60): c.put({'x': np.full(500, i)}, [os.getpid(), i], timeout_s=60)
    """
    ending = """
        import time
        while True:
            plane._session.rings.end('c')
            time.sleep(0.02)
    """
    producers, ender = [actors.start(producer) for _ in range(2)], actors.start(ending)
    channel, came = plane.channel("c"), dict[int, list[int]]()
    while sum(map(len, came.values())) < 120:
        (record,) = channel.take(timeout_s=60, as_="numpy")
        pid, index = record.meta
        assert (record.tensors["x"] == index).all()
        came.setdefault(pid, []).append(index)
        channel.ack(record)
    assert came == {pid: list(range(60)) for pid in producers}
    actors.kill(ender)
    assert [actors.wait(pid) for pid in producers] == [0, 0]
    del record
    wait_until(lambda: clean(plane)["versions"] == {})


def test_a_channel_says_what_is_wrong_with_its_settings(plane: Plane) -> None:
    for how in ({"full": "spill"}, {"items_max": 0}, {"items_max": 10**6}):
        with pytest.raises(BadInput, match=next(iter(how))):
            plane.channel("c", **how)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="240"):
        plane.channel("c" * 230)
    with pytest.raises(BadInput, match="65536 bytes"):
        plane.channel("c").put({}, "x" * 70_000)
    with pytest.raises(errors.NotFound):
        plane.touch("nothing")


def test_a_touch_is_seen_by_who_watches(plane: Plane) -> None:
    plane.put("table", np.zeros(4), mutable=True)
    with plane.watch("table") as watch:
        plane.get("table", as_="numpy")[0] = 1
        plane.touch("table")
        assert next(iter(watch)).kind == "touched"
