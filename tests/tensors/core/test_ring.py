"""The words of a channel: order, room, and a death at every single store of every operation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.tensors.ring import BUSY, IDLE, ITEMS, OPEN, ROOM, Ring, RingRecord, clear, is_memory, words_of

ENTRIES = 4
NOTHING_WRONG: tuple[set[int], set[int], list[int]] = (set(), set(), [])
Act = Callable[["Users"], object]


class Died(Exception):
    """A process was killed before this store."""


class Memory(list[int]):
    """Shared words; the process dies before the store number ``dies_at``."""

    dies_at = -1

    def __setitem__(self, key: SupportsIndex | slice, value: object) -> None:
        if self.dies_at == 0:
            raise Died
        self.dies_at -= 1
        super().__setitem__(key, value)  # type: ignore[assignment, index]


class Users:
    """A producer, a consumer and who comes after their death; what was acknowledged to them."""

    def __init__(self) -> None:
        self.memory = Memory([0] * words_of(ENTRIES))
        clear(self.memory, ENTRIES, 100)
        self.producer, self.consumer, self.heir = (Ring(self.memory, name) for name in ("producer", "consumer", "heir"))
        self.put: list[int] = []
        self.acked: list[int] = []
        self.held: list[RingRecord] = []
        self.doubtful: set[int] = set()
        """Of records that an operation without an answer was about."""

    @staticmethod
    def begun() -> Users:
        """With a free list, which the first operation makes."""
        users = Users()
        users.locked(lambda _: None)
        return users

    def locked(self, act: Act) -> object:
        """What every operation does: make the queue anew if somebody died inside, then act."""
        if self.memory[BUSY]:
            self.heir.rebuild()
        self.memory[BUSY] = 1
        done = act(self)
        self.memory[BUSY] = 0
        return done


def begin(users: Users) -> None:
    entry = users.producer.begin()
    if entry is not None:
        users.producer.set_block(entry, 7, 8, 9)
        users.doubtful.add(users.memory[3])
        number = users.producer.commit(entry, 5, 0)
        assert number is not None
        users.put.append(number)
        users.doubtful.discard(number)


def give_up(users: Users) -> None:
    entry = users.producer.begin()
    if entry is not None:
        assert users.producer.writes(entry)
        users.producer.give_up(entry)


def take(users: Users) -> None:
    users.consumer.take(2, users.held)


def ack(users: Users) -> None:
    if users.held:
        record = users.held.pop(0)
        users.doubtful.add(record.number)
        assert users.consumer.ack(record)
        users.acked.append(record.number)
        users.doubtful.discard(record.number)
        users.consumer.ended([record])


def give_back(users: Users) -> None:
    users.consumer.give_back([users.held.pop()] if users.held else [])


def view_ends(users: Users) -> None:
    users.consumer.ended([users.held.pop(0)] if users.held else [])


def drop(users: Users) -> None:
    if users.memory[8] != users.memory[9]:
        number = users.memory[16 + 10 * users.memory[16 + 10 * ENTRIES + users.memory[8] % ENTRIES]] >> 3
        users.doubtful.add(number)
        assert users.producer.drop_oldest()
        users.acked.append(number)
        users.doubtful.discard(number)


ACTS: tuple[Act, ...] = (begin, take, ack, begin, give_back, give_up, begin, take, view_ends, drop, begin, ack, take)


def inherit(users: Users) -> list[int]:
    """Both died: the heir takes, in order, what nobody acknowledged, once each; then all is free."""

    def bury(users: Users) -> None:
        users.heir.bury(lambda client: client != "heir")

    users.memory.dies_at = -1
    users.locked(bury)
    found: list[RingRecord] = []
    users.locked(lambda users: users.heir.take(99, found))
    numbers = [record.number for record in found]
    for record in found:
        assert users.heir.ack(record)
        assert not users.heir.ack(record)
    users.locked(lambda users: users.heir.ended(found))
    assert (users.memory[OPEN], users.memory[IDLE]) == (0, ENTRIES)
    assert sorted(users.memory[-ENTRIES:]) == list(range(ENTRIES))
    return numbers


def lost_and_repeated(users: Users) -> tuple[set[int], set[int], list[int]]:
    """Records that were put and never come, that come though they were acknowledged, and that come out of order."""
    numbers = inherit(users)
    sure = set(users.put) - set(users.acked)
    lost, again = sure - users.doubtful - set(numbers), set(numbers) - sure - users.doubtful
    return lost, again, [one for one, after in pairwise(numbers) if one >= after]


@pytest.mark.parametrize("length", range(1, len(ACTS) + 1))
def test_a_death_at_any_store_loses_and_repeats_no_record(length: int) -> None:
    stores = 0
    while True:
        users = Users()
        for act in ACTS[: length - 1]:
            users.locked(act)
        users.memory.dies_at = stores
        try:
            users.locked(ACTS[length - 1])
        except Died:
            stores += 1
        else:
            break
        finally:
            assert lost_and_repeated(users) == NOTHING_WRONG
    assert stores > 0


@given(st.lists(st.sampled_from(ACTS), max_size=25), st.integers(0, 400))
@settings(max_examples=300, deadline=None)
def test_a_death_in_any_history_loses_and_repeats_no_record(acts: list[Act], dies_at: int) -> None:
    users = Users()
    users.memory.dies_at = dies_at
    try:
        for act in acts:
            users.locked(act)
    except Died:
        pass
    assert lost_and_repeated(users) == NOTHING_WRONG


def test_a_death_while_the_dead_are_undone_loses_nothing() -> None:
    stores = 0
    while True:
        users = Users()
        for act in (begin, begin, begin, take, ack):
            users.locked(act)
        users.producer.begin()
        users.memory.dies_at = stores
        try:
            users.locked(lambda users: users.heir.bury(lambda client: client != "heir"))
        except Died:
            assert lost_and_repeated(users) == NOTHING_WRONG
            stores += 1
        else:
            break
    assert stores > 10


def test_records_come_in_order_and_room_is_kept() -> None:
    users = Users()
    for _ in range(ENTRIES):
        users.locked(begin)
    assert users.put == [100, 101, 102, 103]
    assert users.producer.begin() is None
    assert users.memory[OPEN] == ENTRIES
    users.locked(take)
    assert [record.number for record in users.held] == [100, 101]
    assert [record.tries for record in users.held] == [1, 1]
    assert (users.held[0].block, users.held[0].version, users.held[0].manifest_bytes) == (7, 8, 5)
    assert users.heir.owners() == {"consumer"}
    again = users.held[:1]
    users.locked(lambda users: users.consumer.give_back(again))
    users.held.clear()
    users.locked(take)
    assert [(record.number, record.tries) for record in users.held] == [(100, 2), (102, 1)]
    assert not users.consumer.ack(again[0])  # its second taking has another count
    assert not users.heir.ack(users.held[0])


@pytest.mark.parametrize(
    ("acts", "items", "room"),
    [
        pytest.param((begin,), 1, 0, id="a record is there"),
        pytest.param((take,), 0, 0, id="nothing to take"),
        pytest.param((begin, take, ack), 1, 2, id="fewer are open, then an entry is free"),
        pytest.param((begin, take, give_back), 2, 0, id="it is there again"),
        pytest.param((give_up,), 0, 1, id="an entry is free"),
        pytest.param((begin, drop), 1, 1, id="the oldest went"),
        pytest.param((begin, take, lambda users: users.heir.bury(lambda _: True)), 2, 1, id="its consumer died"),
        pytest.param((begin, take, lambda users: users.heir.bury(lambda _: False)), 1, 0, id="its consumer lives"),
    ],
)
def test_who_waits_for_a_record_or_for_room_is_woken(acts: tuple[Act, ...], items: int, room: int) -> None:
    users = Users()
    for act in acts:
        users.locked(act)
    assert (users.memory[ITEMS], users.memory[ROOM]) == (items, room)


def test_an_entry_is_written_by_the_client_that_began_it_until_it_commits_or_gives_up() -> None:
    users = Users.begun()
    entry = users.producer.begin()
    assert entry is not None
    users.consumer.give_up(entry)
    assert users.consumer.commit(entry, 5, 0) is None
    assert users.producer.writes(entry)
    users.producer.give_up(entry)
    assert not users.producer.writes(entry)
    assert users.memory[IDLE] == ENTRIES
    entry = users.producer.begin()
    assert entry is not None
    users.producer.commit(entry, 5, 0)
    assert not users.producer.writes(entry)


def test_what_dead_clients_had_is_undone_once_and_their_unfinished_memory_has_no_version() -> None:
    users = Users.begun()
    long = "a-name-of-24-characters"
    writer, other = Ring(users.memory, f"{long}1"), Ring(users.memory, f"{long}2")
    first, second = writer.begin(), other.begin()
    assert first is not None and second is not None
    writer.set_block(first, 7, 8, 9)
    other.set_block(second, 7, 8, 9)
    assert users.heir.bury(lambda client: client == f"{long}1")
    assert not users.heir.bury(lambda client: client == f"{long}1")
    assert (users.heir.block(first)[1], users.heir.block(second)[1]) == (0, 8)
    assert users.heir.owners() == {f"{long}2"}


def test_entries_that_have_memory_are_used_first() -> None:
    users = Users.begun()
    entries = [users.producer.begin() for _ in range(2)]
    assert entries[1] is not None
    users.producer.set_block(entries[1], 7, 8, 9)
    users.locked(lambda users: users.producer.give_up(entries[1] or 0))
    users.locked(lambda users: users.producer.give_up(entries[0] or 0))
    users.heir.rebuild()
    assert users.producer.begin() == entries[1]


def test_memory_that_may_be_viewed_by_a_forked_process_is_never_written_again() -> None:
    users = Users()
    users.locked(begin)
    users.locked(take)
    users.consumer.abandon_block(users.held[0])
    assert users.producer.block(users.held[0].entry) == (7, 8, 0)


def test_words_of_something_else_are_no_ring() -> None:
    assert not Ring([0] * 64, "x").sound
    words = [0] * words_of(2)
    clear(words, 2, 1)
    assert Ring(words, "x").sound
    assert not Ring(words[:-1], "x").sound


def test_names_of_memory_are_told_from_those_of_users() -> None:
    assert is_memory("c/#")
    assert is_memory(f"a/b/#{7:020d}")
    assert not is_memory("a/#7")
    assert not is_memory("a/b")
