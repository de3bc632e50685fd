"""Logs of real jobs, recorded with the version that wrote them, are replayed to the same context for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rota.job.core.machine import replay
from rota.spec.events import Record, event_from_json
from rota.spec.ids import JobId

LOGS = sorted(Path(__file__).parent.glob("*.json"))


def older_fields(found: Any, recorded: Any) -> Any:
    """What of ``found`` the recording knew: a newer version may have added fields anywhere."""
    if isinstance(found, dict) and isinstance(recorded, dict):
        return {name: older_fields(found[name], recorded[name]) for name in recorded}
    if isinstance(found, list) and isinstance(recorded, list) and len(found) == len(recorded):
        return [older_fields(one, old) for one, old in zip(found, recorded, strict=True)]
    return found


def test_the_logs_are_there() -> None:
    assert {path.stem.partition("-")[2] for path in LOGS} >= {"success", "kill", "raises", "master", "loop", "requeue"}


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_recorded_log_replays_to_the_context_it_was_recorded_with(path: Path) -> None:
    document = json.loads(path.read_text())
    records = tuple(
        Record(
            number=raw["number"],
            job=JobId(raw["job"]),
            seq=raw["seq"],
            at=raw["at"],
            event=event_from_json(raw["event"]),
        )
        for raw in document["records"]
    )
    found = json.loads(json.dumps(replay(JobId(records[0].job or ""), records).to_json()))
    expected = {name: value for name, value in document["context"].items() if name != "version"}  # of snapshots
    assert older_fields(found, expected) == expected
    assert found["state"] == "SUCCEEDED"
