"""docs/explanation/job-states.md shows exactly the transitions that the machine is held to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rota.job.core.transitions import INSTANCE, JOB, allowed
from rota.spec.states import InstanceState, JobState

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "job-states.md"


def table(rows: Mapping[JobState, frozenset[JobState]] | Mapping[InstanceState, frozenset[InstanceState]]) -> str:
    """The rows as the page shows them."""
    order = list(type(next(iter(rows))))
    lines = ["| state | may become |", "|---|---|"]
    for state in order:
        after = [f"`{one}`" for one in order if one in rows[state]]  # type: ignore[index, operator]
        lines.append(f"| `{state}` | {', '.join(after) or 'nothing: the end'} |")
    return "\n".join(lines)


def test_the_page_of_states_has_every_transition():
    text = PAGE.read_text(encoding="utf-8")
    for rows in (JOB, INSTANCE):
        assert table(rows) in text, f"{PAGE.name} must hold:\n{table(rows)}"


def test_every_state_is_declared_and_ends_are_never_left():
    assert set(JOB) == set(JobState)
    assert set(INSTANCE) == set(InstanceState)
    assert all(not JOB[state] for state in JobState if state.terminal)
    assert allowed(JobState.RUNNING, JobState.RUNNING)
    assert not allowed(JobState.QUEUED, JobState.RUNNING)
