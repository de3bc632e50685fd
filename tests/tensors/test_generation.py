"""The table of generations as it stands in the file, without a registry."""

from __future__ import annotations

from pathlib import Path

from rota.runtime.clock import SystemClock
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
