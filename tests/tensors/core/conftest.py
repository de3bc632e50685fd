"""Every test of the protocol ends with its rules checked, on each registry that it made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.proof.tensor_protocol import ProtocolMachine
from tests.tensors.core.calls import broken_rules


@pytest.fixture(autouse=True)
def rules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves a registry with a broken rule; ``breaks_state`` marks those that break one on purpose."""
    made: list[ProtocolMachine] = []
    initialise = ProtocolMachine.__init__

    def registered(self: ProtocolMachine) -> None:
        initialise(self)
        made.append(self)

    monkeypatch.setattr(ProtocolMachine, "__init__", registered)
    yield
    if request.node.get_closest_marker("breaks_state") is None:
        found = [broken_rules(machine) for machine in made]
        assert not any(found), "the test left a registry that breaks a rule of the protocol"
