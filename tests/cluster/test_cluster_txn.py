"""Transactions of the scheduling state: undo is exact, also nested."""

from __future__ import annotations

import numpy as np
import pytest
from cluster_makers import KEPT_MAX, StatesMade, ask, node, state
from hypothesis import given
from hypothesis import strategies as st

from rota.cluster.core.events import JobArrived, JobHolds, apply
from rota.cluster.core.guarded import violations
from rota.cluster.core.jobs import Allocation, LiveJob
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId
from rota.spec.queue import Queue
from rota.spec.resources import Res

WRITES = st.recursive(
    st.tuples(st.sampled_from(["set", "slice", "put", "drop"]), st.integers(0, 4), st.integers(-9, 9)),
    lambda inner: st.tuples(st.booleans(), st.lists(inner, max_size=4)),
    max_leaves=20,
)


def _apply(txn: Txn, array: np.ndarray, mapping: dict[int, int], write: object) -> None:
    match write:
        case (bool() as keep, list() as inner):
            with txn.trial():
                for one in inner:
                    _apply(txn, array, mapping, one)
                if keep:
                    txn.keep()
        case ("set", i, value):
            txn.set(array, i, value)
        case ("slice", i, value):
            txn.set(array, slice(i, None), value)
        case ("put", key, value):
            txn.put(mapping, key, value)
        case ("drop", key, _) if key in mapping:
            txn.drop(mapping, key)


@pytest.mark.slow
@given(st.lists(WRITES, max_size=12))
def test_a_scope_that_is_not_kept_leaves_every_byte_as_it_was(writes: list[object]) -> None:
    array, mapping = np.arange(5), {0: 1, 3: 4}
    txn = Txn()
    with txn.trial():
        for write in writes:
            _apply(txn, array, mapping, write)
    assert array.tolist() == [0, 1, 2, 3, 4]
    assert mapping == {0: 1, 3: 4}
    assert txn.changes == 0


def test_an_inner_scope_that_was_kept_goes_with_an_outer_one_that_was_not() -> None:
    array, txn = np.zeros(2), Txn()
    with txn.trial():
        with txn.trial():
            txn.set(array, 0, 7)
            txn.keep()
        assert array[0] == 7
    assert array[0] == 0


def test_an_exception_undoes_the_scope_it_leaves_even_when_it_was_to_be_kept() -> None:
    array, txn = np.zeros(2), Txn()
    with pytest.raises(RuntimeError), txn.trial():
        txn.set(array, 1, 3)
        txn.keep()
        raise RuntimeError
    assert array.tolist() == [0, 0]


def test_values_that_hold_meanwhile_end_with_the_scope_also_by_an_error_and_leave_other_writes() -> None:
    array, txn = np.zeros(3, dtype=np.int64), Txn()
    with txn.trial():
        with pytest.raises(RuntimeError), txn.meanwhile(array, {0: 4, 1: 4}):
            txn.set(array, 2, 1)
            with txn.meanwhile(array, {0: 0}):
                assert array.tolist() == [0, 4, 1]
            assert array.tolist() == [4, 4, 1]
            raise RuntimeError
        assert array.tolist() == [0, 0, 1]
    assert array.tolist() == [0, 0, 0]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.booleans()), max_size=8))
def test_jobs_that_come_and_go_on_trial_leave_the_digest_of_the_state(moves: list[tuple[int, int, bool]]) -> None:
    s = state(node("a"), node("b"), node("c"))
    before = s.digest()
    with s.txn() as txn:
        for i, (row, gpus, leaves) in enumerate(moves):
            job = ask(f"j{i}")
            s.put(txn, LiveJob(ask=job))
            devices = tuple(d for d in range(row * 4, row * 4 + gpus) if s.dev_milli[d] == 1000)
            s.hold(txn, job.id, (Allocation(row, devices, 0, 0, 0),), now=1.0)
            if leaves:
                s.drop(txn, job.id)
    assert s.digest() == before


@pytest.mark.breaks_state
def test_use_by_user_and_the_parts_of_jobs_are_in_the_digest_and_are_checked() -> None:
    s = state(node("a"), queues=(Queue(path="default", user_limit=Res(cpus=0, gpus=4)),))
    for row, job in enumerate((ask("whole", user="ann"), ask("part", user="ann", part_of=JobId("whole")))):
        apply(s, JobArrived(ask=job), 0.0)
        apply(s, JobHolds(job=job.id, held=(Allocation(0, (row,), 0, 0, 0),)), 1.0)
    assert violations(s) == []
    before, used = s.digest(), s.used_by[0, "ann"]
    with s.txn() as txn:
        s.drop(txn, JobId("part"))
    assert s.digest() == before
    s.used_by[0, "ann"] = used + 1
    assert violations(s) == ["the use of ann in default is not the sum of the jobs of ann"] and s.digest() != before
    s.used_by[0, "ann"] = used
    del s.parts[JobId("whole")]
    assert violations(s) == ["the parts of a job are not those that say they belong to it"] and s.digest() != before


@pytest.mark.breaks_state
def test_a_state_that_a_test_broke_and_let_go_is_found_at_its_end(invariants: StatesMade) -> None:
    for _ in range(KEPT_MAX + 1):  # more than are kept: the oldest was checked, and it was whole
        state(node("a"))
    s = state(node("a"))
    s.dev_milli[0] -= 1000
    del s
    assert [text for text in invariants.check() if "device 0" in text] == ["device 0: 0 free, by its holders 1000"]


def test_a_version_counts_the_transactions_that_were_kept_and_no_trial() -> None:
    s = state(node("n", 2))
    apply(s, JobArrived(ask=ask("one")), 0.0)
    version = s.version
    with s.txn() as outer:
        with s.txn() as inner:
            s.put(inner, LiveJob(ask=ask("two")))
            inner.keep()
        assert s.version == version
        outer.keep()
    assert s.version == version + 1
    with s.txn() as txn:
        s.drop(txn, JobId("two"))
    assert (s.version, JobId("two") in s.jobs) == (version + 1, True)
