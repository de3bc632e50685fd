"""Every test of the scheduler ends with its invariants checked, on each state that it made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_makers import StatesMade

from rota.cluster.core.state import State


@pytest.fixture(autouse=True)
def invariants(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatesMade]:
    """Fail a test that leaves a broken state; the mark ``breaks_state`` is for tests that break one on purpose."""
    made = StatesMade()
    initialise = State.__init__

    def registered(self: State, *args: object, **kwargs: object) -> None:
        initialise(self, *args, **kwargs)  # type: ignore[arg-type]
        made.add(self)

    monkeypatch.setattr(State, "__init__", registered)
    yield made
    if request.node.get_closest_marker("breaks_state") is None:
        assert made.check() == [], "the test left a state that breaks an invariant of the scheduler"
