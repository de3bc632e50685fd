"""The records of a channel as words of shared memory: states of entries, and the queue that follows from them.

An entry is free, or a record is being written to it, ready, taken by a consumer, or acknowledged but still viewed:
``free -> writing -> ready -> taken -> acked -> free``, and back from ``taken`` to ``ready``. Its state and the number
of its record are one word, so each of these moves is one store, and who is killed died before or after it. Queue, free
list and counts follow from the states: ``BUSY`` is set while they change, and who finds it set makes them anew. All
calls need the lock of the ring, which ends with its holder's life, but for those that say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

FREE, WRITING, READY, TAKEN, ACKED = range(5)
_STATE_BITS: Final = 3
_STATE: Final = (1 << _STATE_BITS) - 1
_HEAD: Final = 16
"""Words before the first entry."""
FORMAT, COUNT, BUSY, NEXT, ITEMS, ITEMS_WANTED, ROOM, ROOM_WANTED, FIRST, LAST, IDLE, OPEN = range(12)
"""Words: format, number of entries, busy, next number, two words to wait on, each with who waits (for room: until fewer
records than that are open), ends of the queue, number of free entries, number of records that are ready or taken."""
_ENTRY: Final = 10
_OWNER, _BLOCK, _VERSION, _CAPACITY, _TRIES, _SIZES = 1, 4, 5, 6, 7, 8
_OWNER_WORDS: Final = 3
_FORMAT: Final = 0x31474E4952
_LOW: Final = (1 << 32) - 1
MARK: Final = "/#"
"""Behind the name of a channel in the names of its memory: the table, and with 20 digits behind it a block."""
_DIGITS: Final = 20
Words: TypeAlias = "memoryview[int] | list[int]"
"""Unsigned words of 64 bits; in shared memory the store of one is atomic."""


@dataclass(frozen=True, slots=True)
class RingRecord:
    """A record that was taken: its entry, its number, how often it was taken, and where its bytes are.

    ``block`` names its memory, ``version`` is that memory's version, ``manifest_bytes`` begin it, ``crc`` is 0 unless
    the producer checks payloads.
    """

    entry: int
    number: int
    tries: int
    block: int
    version: int
    manifest_bytes: int
    crc: int


def is_memory(name: str) -> bool:
    """True for the name of memory of a channel."""
    _, mark, number = name.rpartition(MARK)
    return bool(mark) and (not number or (len(number) == _DIGITS and number.isdecimal()))


def words_of(entries: int) -> int:
    """How many words a ring of that many entries has."""
    return _HEAD + entries * (_ENTRY + 2)


def clear(words: Words, entries: int, number: int) -> None:
    """Make words, all of them 0, an empty ring; records are numbered from ``number``. They are not shared yet."""
    words[FORMAT], words[COUNT], words[NEXT], words[BUSY] = _FORMAT, entries, number, 1


class Ring:
    """A ring as one client sees it; ``client`` is its name, of at most 24 ASCII characters."""

    def __init__(self, words: Words, client: str) -> None:
        self.words = words
        self._me = _owner_words(client)
        self._count = words[COUNT] if words[FORMAT] == _FORMAT else 0
        self._queue = _HEAD + self._count * _ENTRY
        self._idle = self._queue + self._count

    @property
    def sound(self) -> bool:
        """False when the words are not those of a ring."""
        return self._count > 0 and words_of(self._count) <= len(self.words)

    def begin(self) -> int | None:
        """An entry to write a record to, None when none is free."""
        words = self.words
        idle = words[IDLE]
        if not idle:
            return None
        entry = words[self._idle + idle - 1]
        at = self._at(entry)
        self._own(at)
        words[at] = WRITING
        words[IDLE] = idle - 1
        return entry

    def writes(self, entry: int) -> bool:
        """True while this client may write to an entry; needs no lock, since it alone changes that."""
        at = self._at(entry)
        return self.words[at] == WRITING and self._owns(at)

    def number(self) -> int:
        """A number above all before it."""
        number = self.words[NEXT]
        self.words[NEXT] = number + 1
        return number

    def block(self, entry: int) -> tuple[int, int, int]:
        """Name, version and capacity of the memory of an entry; version 0 without any. Its owner needs no lock."""
        at = self._at(entry)
        return self.words[at + _BLOCK], self.words[at + _VERSION], self.words[at + _CAPACITY]

    def set_block(self, entry: int, block: int, version: int, capacity: int) -> None:
        """Give the entry that this client writes other memory; no lock needed. Unfinished, it has none."""
        at, words = self._at(entry), self.words
        words[at + _VERSION] = 0
        words[at + _BLOCK], words[at + _CAPACITY] = block, capacity
        words[at + _VERSION] = version

    def commit(self, entry: int, manifest_bytes: int, crc: int) -> int | None:
        """The bytes are complete: the record is the last of the queue. Its number, None when another's entry."""
        if not self.writes(entry):
            return None
        at, words = self._at(entry), self.words
        words[at + _SIZES] = manifest_bytes | crc << 32
        words[at + _TRIES] = 0
        number = self.number()
        words[at] = number << _STATE_BITS | READY
        last = words[LAST]
        words[self._queue + last % self._count] = entry
        words[LAST] = last + 1
        words[OPEN] += 1
        words[ITEMS] += 1
        return number

    def give_up(self, entry: int) -> None:
        """Undo ``begin``."""
        if self.writes(entry):
            self._free(entry)

    def drop_oldest(self) -> bool:
        """Forget the first record that no consumer has; False when consumers have them all."""
        words = self.words
        first = words[FIRST]
        if first == words[LAST]:
            return False
        words[FIRST] = first + 1
        self._free(words[self._queue + first % self._count])
        words[OPEN] -= 1
        return True

    def take(self, n_max: int, into: list[RingRecord]) -> None:
        """Put the first records that no consumer has into a list, each before it is taken."""
        words = self.words
        first = words[FIRST]
        for place in range(first, min(first + n_max, words[LAST])):
            entry = words[self._queue + place % self._count]
            at = self._at(entry)
            number = words[at] >> _STATE_BITS
            self._own(at)
            words[at + _TRIES] += 1
            tries, sizes = words[at + _TRIES], words[at + _SIZES]
            block, version = words[at + _BLOCK], words[at + _VERSION]
            into.append(RingRecord(entry, number, tries, block, version, sizes & _LOW, sizes >> 32))
            words[at] = number << _STATE_BITS | TAKEN
            words[FIRST] = place + 1

    def ack(self, record: RingRecord) -> bool:
        """The record is done with; its memory stays until ``ended``. False when it is not this client's."""
        at = self._at(record.entry)
        if not self._is(record, TAKEN):
            return False
        self.words[at] = record.number << _STATE_BITS | ACKED
        self.words[OPEN] -= 1
        self.words[ROOM] += 1
        return True

    def give_back(self, records: Iterable[RingRecord]) -> None:
        """Those of the records that this client still has are the first again, in the order of all."""
        mine = [record for record in records if self._is(record, TAKEN)]
        for record in mine:
            self.words[self._at(record.entry)] = record.number << _STATE_BITS | READY
        if mine:
            self.rebuild()
            self.words[ITEMS] += 1

    def ended(self, records: Iterable[RingRecord]) -> None:
        """Nothing views these records any more: free the acknowledged, give the others back."""
        left: list[RingRecord] = []
        for record in records:
            if self._is(record, ACKED):
                self._free(record.entry)
            else:
                left.append(record)
        self.give_back(left)

    def abandon_block(self, record: RingRecord) -> None:
        """The memory of this record is never written again, a forked process may view it; needs no lock."""
        self.words[self._at(record.entry) + _CAPACITY] = 0

    def owners(self) -> set[str]:
        """The clients that write, have or view a record."""
        return {self._owner(at) for at in self._ats() if self.words[at] & _STATE in (WRITING, TAKEN, ACKED)}

    def bury(self, is_dead: Callable[[str], bool]) -> bool:
        """Undo what dead clients began: what they had taken is ready again. Whether there was anything."""
        dead = {owner for owner in self.owners() if is_dead(owner)}
        for at in self._ats() if dead else ():
            word = self.words[at]
            if word & _STATE in (WRITING, TAKEN, ACKED) and self._owner(at) in dead:
                if word & _STATE == WRITING:
                    self.words[at + _VERSION] = 0  # it may have died between two of these words
                self.words[at] = word & ~_STATE | READY if word & _STATE == TAKEN else FREE
        if dead:
            self.rebuild()
            self.words[ITEMS] += 1
            self.words[ROOM] += 1
        return bool(dead)

    def rebuild(self) -> None:
        """Make queue, free list and counts anew from the states."""
        words = self.words
        states = [(words[self._at(entry)], entry) for entry in range(self._count)]
        ready = sorted(each for each in states if each[0] & _STATE == READY)
        for place, (_, entry) in enumerate(ready):
            words[self._queue + place] = entry
        words[FIRST], words[LAST] = 0, len(ready)
        free = [entry for word, entry in states if word & _STATE == FREE]
        free.sort(key=lambda entry: (words[self._at(entry) + _VERSION] != 0, -entry))  # with memory: used first
        for place, entry in enumerate(free):
            words[self._idle + place] = entry
        words[IDLE] = len(free)
        words[OPEN] = sum(word & _STATE in (READY, TAKEN) for word, _ in states)

    def _at(self, entry: int) -> int:
        return _HEAD + entry * _ENTRY

    def _ats(self) -> range:
        return range(_HEAD, self._queue, _ENTRY)

    def _free(self, entry: int) -> None:
        words = self.words
        words[self._at(entry)] = FREE
        words[self._idle + words[IDLE]] = entry
        words[IDLE] += 1
        words[ROOM] += 1

    def _own(self, at: int) -> None:
        for index, word in enumerate(self._me):
            self.words[at + _OWNER + index] = word

    def _owns(self, at: int) -> bool:
        return all(self.words[at + _OWNER + index] == word for index, word in enumerate(self._me))

    def _owner(self, at: int) -> str:
        raw = b"".join(self.words[at + _OWNER + index].to_bytes(8, "little") for index in range(_OWNER_WORDS))
        return raw.rstrip(b"\0").decode()

    def _is(self, record: RingRecord, state: int) -> bool:
        at = self._at(record.entry)
        same = self.words[at] == record.number << _STATE_BITS | state and self.words[at + _TRIES] == record.tries
        return same and self._owns(at)


def _owner_words(client: str) -> list[int]:
    raw = client.encode("ascii").ljust(8 * _OWNER_WORDS, b"\0")
    return [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]
