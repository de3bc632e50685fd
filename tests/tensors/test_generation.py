"""The table of generations as it stands in the file, without a registry."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import pytest

from rota.runtime.clock import SystemClock
from rota.tensors import generation
from rota.tensors.core import SLOTS_MAX
from rota.tensors.generation import GenerationTable


def test_a_lost_registry_leaves_no_slot_that_says_what_is_current_and_forgets_nothing_else(tmp_path: Path) -> None:
    table, slots = GenerationTable(tmp_path / "gen", SystemClock()), (1, 2, 700, SLOTS_MAX)
    for slot in slots:
        table.store(slot, 10 + slot)
    table.store_deleted(3, 9)
    table.created(5)
    assert table.newest() == 10 + SLOTS_MAX
    table.store_deleted(1, 1 << 40)
    table.lose_all(4)
    assert table.newest() == 1 << 40, "of a deleted name, and after the loss"
    assert (table.epoch, table.creations) == (4, 5)
    assert not any(table.current(slot) for slot in range(1, SLOTS_MAX + 1))
    assert [table.last(slot) for slot in slots] == [1 << 40, *(10 + slot for slot in slots[1:])]
    assert table.deleted(3)
    assert table.deleted(1)


def test_who_follows_one_that_ended_inside_a_lock_waits_for_what_that_had_sent(tmp_path: Path) -> None:
    table, waited = GenerationTable(tmp_path / "gen", SystemClock()), list[int]()
    table.settle = lambda: waited.append(table.current(1))
    with table.slot_lock(1, "a"):
        table.store(1, 5)
        assert table.is_newest(1, 5)
    with table.slot_lock(1, "a"):
        table.store_deleted(1, 5)
    assert waited == []
    if not (child := os.fork()):
        with table.slot_lock(1, "a"):
            table.store_deleted(1, 6)
            os._exit(0)
    os.waitpid(child, 0)
    assert (table.last(1), table.newest(), table.deleted(1)) == (6, 6, True)
    for _ in range(2):  # the second has nobody dead before it
        with table.slot_lock(1, "a"):
            assert waited == [0]
            table.store(1, 7)
    with pytest.raises(Hit), table.slot_locks([(1, "a"), (2, "b")]):
        raise Hit  # gave up with a command that may not be done
    with table.slot_lock(1, "a"), table.slot_lock(2, "b"):
        assert waited == [0, 0, 0]
        table.store(1, 7)
    assert table.is_newest(1, 7)


class Hit(Exception):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("begin", ["__enter__", "take", "_take", "lock", "__exit__", "give_back", "unlock", "stripe"])
def test_locks_are_given_back_wherever_a_handler_ends_the_block(tmp_path: Path, begin: str) -> None:
    table = GenerationTable(tmp_path / "gen", SystemClock())

    def raises(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        called = event == "call" and code.co_filename == generation.__file__ and code.co_name == begin
        if called and (begin != "stripe" or frame.f_back.f_code.co_name == "give_back"):
            sys.setprofile(None)
            raise Hit

    def ended() -> bool:
        sys.setprofile(raises)
        try:
            with table.slot_locks([(1, "a"), (700, "b")]):
                table.store(1, 5)
        except Hit:
            return True
        finally:
            sys.setprofile(None)
        return False

    assert ended() and table.inside == {}
    with ThreadPoolExecutor(1) as other:  # another thread and another process find them free
        assert other.submit(table.try_store, 1, 6).result(10) and other.submit(table.try_store, 700, 6).result(10)
    if not (child := os.fork()):
        found = table.try_store(1, 7) and table.try_store(700, 7)
        os._exit(0 if found else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
