"""Seeds of the whole system, and planted bugs that it must find."""

from __future__ import annotations

import pytest

from tests.world.bugs import BUGS, Bug
from tests.world.world import play

SEEDS = range(20)
BUG_SEEDS_MAX = 40
KEPT = (65, 79, 80, 188, 192, 1039, 2041, 2072)
"""Seeds that once found something."""


@pytest.mark.parametrize("seed", [*SEEDS, *KEPT])
def test_a_seed_keeps_every_law_and_every_job_ends(seed):
    play(seed)


def test_a_seed_gives_the_same_trace_again():
    assert play(7).trace.hexdigest() == play(7).trace.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_world_finds_a_planted_bug(bug: Bug, monkeypatch: pytest.MonkeyPatch):
    bug.plant(monkeypatch)
    for seed in range(BUG_SEEDS_MAX):
        try:
            play(seed, bug.swarm)
        except Exception:
            return
    pytest.fail(f"{BUG_SEEDS_MAX} seeds did not find: {bug.plant.__doc__}")
