"""Puts without the registry: every interleaving of a claimant, a settler, a reader and a loss of the registry."""

from __future__ import annotations

import pytest
from tests.proof.claim_protocol import LOSES, PLANTED, Broken, explore


@pytest.mark.slow
@pytest.mark.parametrize(("ops", "loss"), [(2, False), (1, True)])
def test_no_interleaving_with_any_crash_tears_loses_or_revives_a_version(ops: int, loss: bool) -> None:
    states, places = explore(ops=ops, loss=loss)
    assert states > 10_000
    assert {"ready", "slot", "zero", "script", "own", "map", "dead"} <= places
    assert {"hand in", "adopt"} <= places or loss


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_each_planted_bug_is_found(bug: str) -> None:
    with pytest.raises(Broken):
        explore(bug, loss=bug in LOSES)
