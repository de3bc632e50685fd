"""Shards by lease: each sample counts once an epoch, whoever dies, comes, is slow, or rolls back."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.train.data import DataSpec, Lease, ShardTable, sample_at

DEEP = os.environ.get("ROTA_DEEP") == "1"


def table(samples: int = 10, shard_size: int = 4, epochs: int = 1) -> ShardTable:
    return ShardTable(spec=DataSpec(samples=samples, shard_size=shard_size, epochs=epochs, lease_s=5.0))


def take(made: ShardTable, worker: int, now_s: float = 0.0, epoch: int = 1) -> Lease:
    lease = made.lease(worker, epoch, now_s)
    assert isinstance(lease, Lease), lease
    return lease


def test_a_fast_worker_takes_more_shards() -> None:
    made = table(12)
    slow = take(made, 0)
    for expected in ((4, 8), (8, 12)):
        lease = take(made, 1)
        assert (lease.offset, lease.end) == expected
        made.advance(lease.number, lease.end, 0.0)
    assert made.lease(1, 1, 0.0) == "WAIT"
    made.advance(slow.number, 4, 0.0)
    assert made.lease(1, 1, 0.0) == "END"


def test_a_dead_worker_s_shard_goes_on_from_its_last_counted_sample() -> None:
    made = table()
    lease = take(made, 0)
    made.advance(lease.number, 3, 0.0)
    again = take(made, 0, epoch=2)
    assert (again.offset, again.end) == (3, 4)
    assert made.advance(lease.number, 4, 0.0) is None, "the dead one's own report comes late"
    assert made.lease(0, 1, 0.0) == "FENCED"


def test_a_lease_that_ran_out_is_another_s_and_one_that_is_advanced_does_not_run_out() -> None:
    made = table()
    first, second = take(made, 0), take(made, 1)
    made.advance(second.number, 5, now_s=4.0)
    assert take(made, 2, now_s=6.0).offset == 0
    assert made.advance(first.number, 1, now_s=6.0) is None
    assert made.advance(second.number, 8, now_s=6.0) is not None


def test_the_next_epoch_begins_when_all_of_this_one_is_counted() -> None:
    made = table(4, 4, epochs=2)
    lease = take(made, 0)
    assert made.lease(1, 1, 0.0) == "WAIT"
    made.advance(lease.number, 4, 0.0)
    assert take(made, 1).epoch == 1


def test_a_rollback_gives_out_again_what_came_after_the_snapshot_and_nothing_before() -> None:
    made = table(8)
    one, two = take(made, 0), take(made, 1)
    made.advance(one.number, 2, 0.0)
    kept = made.snapshot()
    made.advance(one.number, 4, 0.0)
    made.advance(two.number, 8, 0.0)
    made.restore(kept)
    assert made.advance(one.number, 4, 0.0) is None
    assert [(lease.offset, lease.end) for lease in (take(made, 0), take(made, 0))] == [(2, 4), (4, 8)]


MOVES = st.lists(st.tuples(st.sampled_from("laaaakks"), st.integers(0, 3), st.integers(0, 5)), max_size=120)


@settings(max_examples=1_000 if DEEP else 60)
@given(moves=MOVES, samples=st.integers(1, 30), shard_size=st.integers(1, 7))
def test_random_kills_resizes_and_late_reports_count_each_sample_once_an_epoch(
    moves: list[tuple[str, int, int]], samples: int, shard_size: int
) -> None:
    """l: lease, a: advance by some, k: kill (its old lease still reports), s: time passes."""
    made, now_s = table(samples, shard_size, epochs=2), 0.0
    counted: Counter[tuple[int, int]] = Counter()
    held: dict[int, Lease] = {}
    epochs = dict.fromkeys(range(4), 1)
    ghosts: list[Lease] = []

    def advance(lease: Lease, to: int) -> Lease | None:
        moved = made.advance(lease.number, to, now_s)
        if moved is not None:
            counted.update((lease.epoch, at) for at in range(lease.offset, to))
        return moved

    def lease_one(worker: int) -> None:
        if worker not in held and isinstance(lease := made.lease(worker, epochs[worker], now_s), Lease):
            held[worker] = lease

    for what, worker, amount in moves:
        if what == "l":
            lease_one(worker)
        elif what == "a" and worker in held:
            lease = held.pop(worker)
            moved = advance(lease, min(lease.offset + amount, lease.end))
            if moved is not None and moved.offset < moved.end:
                held[worker] = moved
        elif what == "k":
            ghosts += [held.pop(worker)] if worker in held else []
            epochs[worker] += 1
            made.join(worker, epochs[worker])
        elif what == "s":
            now_s += amount
        for ghost in ghosts:
            assert advance(ghost, ghost.end) is None
        assert made.counted == sum(1 for epoch, _ in counted if epoch == made.epoch)
    for _ in range(10_000):
        lease_one(0)
        if 0 not in held:
            if made.lease(0, epochs[0], now_s) == "END":
                break
            now_s += 10.0
            continue
        lease = held.pop(0)
        advance(lease, lease.end)
    assert counted == Counter({(epoch, at): 1 for epoch in range(2) for at in range(samples)})


@pytest.mark.parametrize("samples", [1, 2, 3, 16, 17, 1000])
def test_the_order_of_an_epoch_is_a_permutation_that_looks_shuffled(samples: int) -> None:
    orders = [[sample_at(at, samples, 7, epoch) for at in range(samples)] for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(samples))
    if samples == 1000:
        assert orders[0] != orders[1]
        fixed = sum(one == at for at, one in enumerate(orders[0]))
        rising = sum(a < b for a, b in zip(orders[0], orders[0][1:], strict=False))
        assert fixed < 8 and 440 < rising < 560
