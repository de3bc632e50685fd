"""Leases by a note alone: every interleaving of two readers, a writer and a reclaimer, each killed anywhere."""

from __future__ import annotations

import pytest
from tests.proof.note_protocol import PLANTED, Broken, explore


@pytest.mark.slow
def test_no_interleaving_with_any_crash_frees_or_overwrites_a_block_that_is_mapped() -> None:
    states, places = explore()
    assert states > 10_000
    assert {"slot", "place", "note", "look", "map", "unmap", "strike"} <= places, "the walk got everywhere"


@pytest.mark.parametrize("bug", PLANTED)
def test_each_planted_bug_is_found(bug: str) -> None:
    with pytest.raises(Broken, match=r"I[24]: "):
        explore(bug)
