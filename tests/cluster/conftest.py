"""Every test of the scheduler ends with its invariants checked, on each state that it made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_makers import StatesMade

from rota.cluster.core.events import PHASE_CHANGES
from rota.cluster.core.jobs import LiveJob
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn

CHANGES = {(phase, row.enters) for row in PHASE_CHANGES for phase in row.leaves}


@pytest.fixture(autouse=True)
def invariants(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatesMade]:
    """Fail a test that leaves a broken state; the mark ``breaks_state`` is for tests that break one on purpose."""
    made = StatesMade()
    initialise = State.__init__

    def registered(self: State, *args: object, **kwargs: object) -> None:
        initialise(self, *args, **kwargs)  # type: ignore[arg-type]
        made.add(self)

    put = State.put

    def looked_at(self: State, txn: Txn, row: LiveJob) -> None:
        old = self.jobs.get(row.ask.id, row).phase
        if old != row.phase and (old, row.phase) not in CHANGES:
            made.broken.append(f"{row.ask.id} was {old} and is {row.phase}, which PHASE_CHANGES does not have")
        put(self, txn, row)

    monkeypatch.setattr(State, "__init__", registered)
    monkeypatch.setattr(State, "put", looked_at)
    yield made
    if request.node.get_closest_marker("breaks_state") is None:
        assert made.check() == [], "the test left a state that breaks an invariant of the scheduler"
