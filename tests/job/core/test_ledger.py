"""The ledger: conservation, the bound of staleness, exactly once at a commit, and the same after any recovery."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.makers import at

from rota.job.core.ledger import DropReason, ItemState, Ledger, LedgerCut, ranges, uids_of
from rota.spec.ids import Epoch
from rota.spec.job import Bound, StreamSpec

LOOP, ONE, TWO = at("loop/0"), at("w/0"), at("w/1")
FIRST = Epoch(1)


def ledger(cap: int = 64, versions: int | None = None, by: Any = "pace", **fields: Any) -> Ledger:
    stale = None if versions is None else Bound(versions=versions, by=by)
    return Ledger(spec=StreamSpec(name="s", cap=cap, stale=stale), **fields)


def produced(book: Ledger, uid: int, version: int = 0) -> None:
    book.admit(uid)
    assert book.start(uid, ONE, FIRST, version)
    assert book.produce(uid, ONE, FIRST)


def batch(book: Ledger, size: int, version: int = 0, **fields: Any) -> list[Any]:
    fields = {"final": False, **fields}
    return [item.uid for item in book.lease(size, LOOP, FIRST, version, **fields)]


def test_an_item_goes_from_admission_to_a_commit() -> None:
    book = ledger()
    produced(book, 0)
    assert batch(book, 1) == [0]
    assert book.committed(book.leased()) == (0,)
    assert (book.admitted, book.trained, book.open) == (1, 1, 0)


def test_a_batch_waits_for_the_first_admitted_though_later_ones_are_there() -> None:
    book = ledger()
    book.admit(0)
    book.start(0, ONE, FIRST, 0)
    produced(book, 1)
    produced(book, 2)
    assert batch(book, 2) == []
    assert book.produce(0, ONE, FIRST)
    assert batch(book, 2) == [0, 1]


def test_a_batch_in_order_of_arrival_takes_what_is_there() -> None:
    book = ledger()
    book.admit(0)
    produced(book, 1)
    produced(book, 2)
    assert batch(book, 2, order="arrival") == [1, 2]


def test_a_short_batch_comes_only_at_the_end() -> None:
    book = ledger()
    produced(book, 0)
    assert batch(book, 2) == []
    assert batch(book, 2, final=True) == [0]
    assert batch(book, 2, final=True) == []


@pytest.mark.parametrize(("versions", "every", "room"), [(0, 1, 4), (2, 1, 12), (2, 2, 8), (9, 1, 30)])
def test_pace_admits_what_can_be_used_within_the_bound_and_never_more_than_cap(
    versions: int, every: int, room: int
) -> None:
    book = ledger(cap=30, versions=versions, every=every)
    assert book.room(4) == room
    produced(book, 0)
    assert book.room(4) == room - 1


def test_a_leased_batch_holds_its_room_until_the_commit() -> None:
    book = ledger(versions=0)
    for uid in range(4):
        produced(book, uid)
    assert batch(book, 4) == [0, 1, 2, 3]
    assert book.room(4) == 0
    book.committed(book.leased())
    assert book.room(4) == 4


def test_a_lost_holder_gives_its_items_back_and_its_late_report_counts_for_nothing() -> None:
    book = ledger()
    for uid, holder in ((0, ONE), (1, TWO)):
        book.admit(uid)
        book.start(uid, holder, FIRST, 0)
    assert book.release_holder(ONE, Epoch(2)) == (0,)
    assert [item.uid for item in book.claim()] == [0]
    assert not book.produce(0, ONE, FIRST)
    assert book.start(0, ONE, Epoch(2), 0)
    assert not book.produce(0, ONE, FIRST), "a report of the older epoch"
    assert book.produce(0, ONE, Epoch(2))
    assert not book.produce(0, ONE, Epoch(2)), "a repeated report"
    assert book.again == 1


def test_failures_are_counted_by_instance_and_losses_are_not() -> None:
    book = ledger()
    book.admit(0)
    for holder, failed, count in ((ONE, True, 1), (ONE, True, 1), (TWO, False, 1), (TWO, True, 2)):
        book.start(0, holder, FIRST, 0)
        assert book.release(0, failed=failed) == count
    assert book.drop(0, DropReason.BAD_DATA) and not book.drop(0, DropReason.BAD_DATA)
    assert book.dropped == {"bad_data": 1}


@pytest.mark.parametrize(
    ("by", "queued", "running", "again", "dropped"),
    [
        ("pace", "pending", "pending", 2, {}),
        ("drop", "", "running", 0, {"stale": 1}),
        ("abort", "", "", 0, {"stale": 1, "aborted": 1}),
    ],
)
def test_what_a_new_version_makes_too_old(by: str, queued: str, running: str, again: int, dropped: Any) -> None:
    book = ledger(versions=1, by=by)
    produced(book, 0, version=3)
    book.admit(1)
    book.start(1, ONE, FIRST, 3)
    assert book.refresh(4) == ()
    assert sorted(book.refresh(5)) == ([0] if by == "drop" else [0, 1])
    places = [item.place if (item := book.find(uid)) else "" for uid in (0, 1)]
    assert (places, book.again, book.dropped) == ([queued, running], again, dropped)


def test_a_further_stage_keeps_the_oldest_version() -> None:
    book = ledger(versions=1)
    book.admit(0)
    book.start(0, ONE, FIRST, 3)
    assert book.produce(0, ONE, FIRST, last=False)
    assert book.release_holder(ONE, Epoch(2)) == (), "it waits for the next stage, nobody holds it"
    book.start(0, TWO, FIRST, 4)
    assert book.produce(0, TWO, FIRST)
    assert batch(book, 1, version=4) == [0]
    assert book.age_max == 1


def test_an_item_put_in_by_the_loop_is_dropped_when_too_old_since_nobody_can_make_it_again() -> None:
    book = ledger(versions=0, produced=False)
    book.admit("a")
    book.queue("a", 3)
    book.refresh(4)
    assert book.dropped == {"stale": 1}


def test_drop_oldest_makes_room_by_dropping_what_waits_longest() -> None:
    book = Ledger(spec=StreamSpec(name="s", cap=2, full="drop_oldest"))
    for uid in range(3):
        assert book.room(1) > 0
        produced(book, uid)
    assert book.dropped == {"overflow": 1}
    assert batch(book, 2) == [1, 2]


def test_a_uid_is_open_once() -> None:
    book = ledger()
    book.admit("a")
    with pytest.raises(ValueError, match="open already"):
        book.admit("a")


def test_ranges_keep_order_and_come_back() -> None:
    uids = [3, 4, 5, "x", 9, 8, 7]
    assert ranges(uids) == [[3, 5], "x", [9, 9], [8, 8], [7, 7]]
    assert list(uids_of(ranges(uids))) == uids


class Flow(RuleBasedStateMachine):
    """A loop that commits batches, producers that die, versions that pass, and recoveries from the last cut.

    Beside the ledger runs the plainest model of the law: sets of uids that were trained or dropped at the last commit.
    """

    holders = Bundle("holders")

    @initialize(
        versions=st.integers(0, 3),
        by=st.sampled_from(["pace", "drop", "abort", None]),
        cap=st.integers(4, 12),
        size=st.integers(1, 4),
        full=st.sampled_from(["block", "drop_oldest"]),
    )
    def begin(self, versions: int, by: Any, cap: int, size: int, full: Any) -> None:
        bound = None if by is None else Bound(versions=versions, by=by)
        self.spec = StreamSpec(name="s", cap=cap, stale=bound, full=full)
        self.size, self.version = size, 0
        self.book = Ledger(spec=self.spec)
        self.cut: LedgerCut | None = None
        self.seen_at_cut: Counter[int] = Counter()
        self.trained: Counter[Any] = Counter()
        self.handed: list[Any] = []
        self.epochs = {ONE: 1, TWO: 1}
        self.ages: list[int] = []

    @rule(count=st.integers(1, 8), whole=st.booleans())
    def admit(self, count: int, whole: bool) -> None:
        """New items, produced at once if ``whole``."""
        for _ in range(count):
            if self.book.room(self.size) > 0:
                self.book.admit(self.book.cursor)
        for item in self.book.claim() if whole else ():
            assert self.book.start(item.uid, ONE, Epoch(self.epochs[ONE]), self.version)
            assert self.book.produce(item.uid, ONE, Epoch(self.epochs[ONE]))

    @rule(who=st.sampled_from([ONE, TWO]))
    def start(self, who: Any) -> None:
        if (item := next(self.book.claim(), None)) is not None:
            assert self.book.start(item.uid, who, Epoch(self.epochs[who]), self.version)

    @rule(pick=st.integers(0, 11), old=st.booleans())
    def produce(self, pick: int, old: bool) -> None:
        running = [self.book.find(uid) for uid in range(self.book.cursor)]
        running = [item for item in running if item is not None and item.place is ItemState.RUNNING]
        if running:
            item = running[pick % len(running)]
            assert item is not None and item.holder is not None
            taken = self.book.produce(item.uid, item.holder, Epoch(item.epoch - old))
            assert taken is (not old)

    @rule(who=st.sampled_from([ONE, TWO]))
    def die(self, who: Any) -> None:
        self.epochs[who] += 1
        self.book.release_holder(who, Epoch(self.epochs[who]))

    @rule(order=st.sampled_from(["admission", "arrival"]), final=st.booleans())
    def lease(self, order: Any, final: bool) -> None:
        self.book.refresh(self.version)
        for item in self.book.lease(self.size, LOOP, FIRST, self.version, final=final, order=order):
            self.handed.append(item.uid)
            self.ages.append(self.version - (item.version or 0))

    @rule(meanwhile=st.booleans())
    def commit(self, meanwhile: bool) -> None:
        """A batch that is taken while the commit is on its way belongs to the next one."""
        self.cut, taken = json.loads(json.dumps(self.book.cut())), self.book.leased()
        before, self.handed = self.handed, []
        if meanwhile:
            self.lease("arrival", False)
        done = self.book.committed(taken)
        assert sorted(done) == sorted(before)
        self.trained.update(done)
        self.version += 1
        self.book.refresh(self.version)
        self.seen_at_cut = Counter(self.trained)

    @rule()
    def recover(self) -> None:
        """The loop died: all that is not in the last cut never was."""
        self.book = Ledger.restored(self.spec, self.cut)
        self.trained = Counter(self.seen_at_cut)
        self.handed = []
        again = self.book.cut()
        if self.cut:
            assert {**again, "pending": 0, "again": 0, "age": 0} == {
                **self.cut, "pending": 0, "running": 0, "queued": 0, "again": 0, "age": 0,
            }  # fmt: skip

    @invariant()
    def nothing_is_lost_and_nothing_counts_twice(self) -> None:
        self.book.check()
        assert all(count == 1 for count in self.trained.values())
        assert self.book.trained == len(self.trained)
        assert self.book.cursor == self.book.admitted, "each index of the source was admitted once"
        assert self.book.open <= self.spec.cap

    @invariant()
    def no_batch_is_too_old(self) -> None:
        if self.spec.stale is not None:
            assert all(age <= self.spec.stale.versions for age in self.ages)

    @precondition(lambda self: self.spec.stale is not None and self.spec.stale.by == "pace")
    @invariant()
    def pace_keeps_open_what_can_be_used(self) -> None:
        assert self.spec.stale is not None
        assert self.book.open <= (self.spec.stale.versions + 1) * self.size


TestFlow = Flow.TestCase
TestFlow.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_pace_alone_keeps_the_bound_when_each_commit_takes_a_batch() -> None:
    """No item is ever made anew: the bound follows from admission."""
    for versions in range(4):
        book, version, size, made = ledger(versions=versions), 0, 3, 0
        for step in range(40):
            while book.room(size) > 0:
                book.admit(book.cursor)
            for number in range(made, book.cursor - (step % 2)):
                if (item := book.find(number)) is not None and item.place is ItemState.PENDING:
                    book.start(number, ONE, FIRST, version)
                    book.produce(number, ONE, FIRST)
            if batch(book, size, version):
                assert book.age_max <= versions
                book.committed(book.leased())
                version += 1
                book.refresh(version)
        assert (book.again, version > 15) == (0, True)
