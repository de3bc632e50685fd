"""Orders and journals of data: resizes, torn records, workers that are killed in the middle of an epoch."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rota.spec.errors import BadInput, Fenced, StoreUnavailable, TimedOut
from rota.testing.memory import VirtualClock
from rota.train.data import DataSpec, Lease, ShardJournal, ShardTable, StaticOrder

SPEC = DataSpec(samples=20, shard_size=6, epochs=2, lease_s=30.0)


def test_a_static_order_gives_each_sample_once_an_epoch_while_the_world_changes() -> None:
    cursor, seen = (0, 0), Counter[int]()
    for batch, world in ((8, 2), (8, 4), (8, 3), (8, 1), (8, 5)):
        orders = [StaticOrder(20, seed=3, cursor=cursor) for _ in range(world)]
        for rank, order in enumerate(orders):
            seen.update(order.take(batch, rank, world))
        cursor = orders[0].cursor
    assert cursor == (2, 0)
    assert seen == Counter(dict.fromkeys(range(20), 2))


def test_two_workers_share_a_journal_and_a_third_reads_all_of_it(tmp_path: Path) -> None:
    one, two = (ShardJournal(tmp_path, SPEC, worker=worker) for worker in range(2))
    first, second = one.lease(), two.lease()
    assert isinstance(first, Lease) and isinstance(second, Lease)
    assert (first.offset, second.offset) == (0, 6)
    one.advance(first, 4)
    assert ShardJournal(tmp_path, SPEC, worker=9).snapshot()["counted"] == 4
    assert len(set(one.samples(first, 0, 6) + two.samples(second, 6, 12))) == 12


def test_positions_outside_a_lease_are_refused_with_its_range(tmp_path: Path) -> None:
    journal = ShardJournal(tmp_path, DataSpec(samples=10, shard_size=4), worker=0)
    lease = journal.lease()
    assert lease is not None
    with pytest.raises(BadInput, match="positions: 0 to 99 are not in 0 to 4 of lease 1"):
        journal.samples(lease, 0, 99)
    for offset in (99, -1):
        with pytest.raises(BadInput, match=f"offset: {offset} is not in 0 to 4 of lease 1"):
            journal.advance(lease, offset)


def test_a_torn_record_is_cut_off_and_the_next_one_counts(tmp_path: Path) -> None:
    one = ShardJournal(tmp_path, SPEC, worker=0)
    lease = one.lease()
    assert lease is not None
    with (tmp_path / "shards.jsonl").open("a") as file:
        file.write('{"do": "restore", "kept": {"returned": [' + "[0, 1], " * 50)  # longer than the next record
    one.advance(lease, 2)
    again = ShardJournal(tmp_path, SPEC, worker=1)
    assert again.snapshot()["counted"] == 2
    for line in (tmp_path / "shards.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.slow
def test_a_journal_longer_than_a_read_is_kept_whole(tmp_path: Path) -> None:
    one = ShardJournal(tmp_path, SPEC, worker=0)
    log = tmp_path / "shards.jsonl"
    kept = one.snapshot() | {"note": "x" * (6 << 20)}
    with log.open("a") as file:
        for _ in range(12):
            file.write(json.dumps({"do": "restore", "kept": kept}) + "\n")
    lease, size = one.lease(), log.stat().st_size
    assert lease is not None and size > 64 << 20
    assert ShardJournal(tmp_path, SPEC, worker=1).snapshot()["next_number"] == lease.number + 1
    assert log.stat().st_size > size


def test_a_renewal_that_counts_nothing_reaches_the_other_workers(tmp_path: Path) -> None:
    clock = VirtualClock()
    one, two = (ShardJournal(tmp_path, DataSpec(samples=6, shard_size=6), worker=n, clock=clock) for n in range(2))
    lease = one.lease()
    assert lease is not None
    clock.advance(50)
    one.advance(lease, lease.offset)
    clock.advance(50)  # the first deadline is over, the renewed one is not
    with pytest.raises(TimedOut, match=r"workers \[0\] hold"):
        two.lease(timeout_s=-1)
    assert one.advance(lease, 6).offset == 6


def test_what_could_not_be_written_does_not_hold(tmp_path: Path) -> None:
    one = ShardJournal(tmp_path, SPEC, worker=0)
    lease = one.lease()
    assert lease is not None
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "shards.jsonl").stat().st_size, limits[1]))
    try:
        with pytest.raises(StoreUnavailable, match=r"shards\.jsonl"):
            one.advance(lease, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, heard)
    assert one.snapshot()["counted"] == 0
    assert one.advance(lease, 4).offset == 4
    assert ShardJournal(tmp_path, SPEC, worker=1).snapshot()["counted"] == 4


def test_a_replaced_worker_is_told_that_its_samples_do_not_count(tmp_path: Path) -> None:
    old = ShardJournal(tmp_path, SPEC, worker=0)
    lease = old.lease()
    assert lease is not None
    ShardJournal(tmp_path, SPEC, worker=0, epoch=2)
    with pytest.raises(Fenced, match="lease 1 of worker 0 is over: from sample 0 on"):
        old.advance(lease, 6)
    with pytest.raises(Fenced, match="epoch 1 was replaced"):
        old.lease()


def test_a_rollback_reaches_all_workers(tmp_path: Path) -> None:
    one, two = (ShardJournal(tmp_path, SPEC, worker=worker) for worker in range(2))
    lease = one.lease()
    assert lease is not None
    kept = two.snapshot()
    one.advance(lease, 6)
    two.restore(kept)
    again = one.lease()
    assert again is not None and again.offset == 0


def test_another_data_set_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    ShardJournal(tmp_path, SPEC, worker=0)
    with pytest.raises(BadInput, match=r"shards\.jsonl is of"):
        ShardJournal(tmp_path, DataSpec(samples=21, shard_size=6), worker=1)


WORKER = """
import sys, time
from pathlib import Path
from rota.train.data import ShardJournal
from rota.train.data import DataSpec
folder, worker, epoch, samples = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
spec = DataSpec(samples=samples, shard_size=16, epochs=2, lease_s=60)
journal = ShardJournal(folder, spec, worker=worker, epoch=epoch)
while (lease := journal.lease(60)) is not None:
    while lease.offset < lease.end:
        time.sleep(0.004 * (1 + worker))
        lease = journal.advance(lease, min(lease.offset + 4, lease.end))
"""


@pytest.mark.slow
@pytest.mark.real
def test_workers_killed_in_the_middle_of_an_epoch_lose_and_repeat_no_sample(tmp_path: Path) -> None:
    samples = 400

    def start(worker: int, epoch: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", WORKER, str(tmp_path), str(worker), str(epoch), str(samples)]
        return subprocess.Popen(words)

    crew = {worker: (start(worker, 1), 1) for worker in range(3)}
    watcher = ShardJournal(tmp_path, DataSpec(samples=samples, shard_size=16, epochs=2, lease_s=60), worker=99)
    log = tmp_path / "shards.jsonl"
    for victim in (1, 0, 2, 1):
        size = log.stat().st_size
        deadline = time.monotonic() + 30
        while log.stat().st_size < size + 3_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        process, epoch = crew[victim]
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        crew[victim] = (start(victim, epoch + 1), epoch + 1)
    for process, _ in crew.values():
        assert process.wait(60) == 0
    assert watcher.snapshot() | {"worker_epochs": 0, "next_number": 0} == {
        "epoch": 1, "fresh": samples, "counted": samples, "returned": [], "worker_epochs": 0, "next_number": 0,
    }  # fmt: skip
    spans, by_worker = replay(log)
    assert spans == Counter({(epoch, at): 1 for epoch in range(2) for at in range(samples)})
    assert by_worker[0] > by_worker[2], "the fast worker trains more"


def replay(log: Path) -> tuple[Counter[tuple[int, int]], Counter[int]]:
    """What each record counted: positions by data epoch, and samples by worker."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    table = ShardTable(spec=DataSpec(**records[0]["spec"]))
    spans, by_worker = Counter[tuple[int, int]](), Counter[int]()
    for record in records[1:]:
        if record["do"] == "join":
            table.join(record["worker"], record["epoch"])
        elif record["do"] == "lease":
            table.lease(record["worker"], record["epoch"], record["at"])
        else:
            before = table.leases.get(record["number"])
            moved = table.advance(record["number"], record["offset"], record["at"])
            if before is not None and moved is not None:
                spans.update((before.epoch, at) for at in range(before.offset, moved.offset))
                by_worker[before.worker] += moved.offset - before.offset
    return spans, by_worker
