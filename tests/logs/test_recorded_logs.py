"""Recorded logs of real jobs and simulated systems replay to what they were recorded with, in every later version."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rota.spec import events
from rota.spec.events import Record, event_from_json, event_to_json
from rota.spec.ids import JobId
from tests.logs.record import looks
from tests.makers import replay

FOLDER = Path(__file__).parent
LOGS = sorted(path for path in FOLDER.glob("*.json") if not path.stem.endswith("-events"))
WORLDS, EVENTS = sorted(FOLDER.glob("*-world-*.json.gz")), sorted(FOLDER.glob("*-events.json"))


RENAMED = {"doomed": "terminating", "barred": "excluded"}
"""Fields of contexts in the recordings, and what they are called now; contexts of another version are never read."""


def older_fields(found: Any, recorded: Any) -> Any:
    """What of ``found`` the recording knew: a newer version may have added fields anywhere."""
    if isinstance(found, dict) and isinstance(recorded, dict):
        now = {name: name if name in found else RENAMED.get(name, name) for name in recorded}
        return {name: older_fields(found[now[name]], recorded[name]) for name in recorded}
    if isinstance(found, list) and isinstance(recorded, list) and len(found) == len(recorded):
        return [older_fields(one, old) for one, old in zip(found, recorded, strict=True)]
    return found


def test_the_logs_are_there() -> None:
    assert {path.stem.partition("-")[2] for path in LOGS} >= {"success", "kill", "raises", "master", "loop", "requeue"}


def records_of(document: dict[str, Any]) -> list[Record]:
    return [
        Record(
            number=raw["number"],
            job=JobId(raw["job"]) if raw["job"] is not None else None,
            seq=raw["seq"],
            at=raw["at"],
            event=event_from_json(raw["event"]),
        )
        for raw in document["records"]
    ]


def context_of(job: str, records: list[Record]) -> Any:
    return json.loads(json.dumps(replay(JobId(job), [one for one in records if one.job == job]).to_json()))


def without_version(context: dict[str, Any]) -> dict[str, Any]:
    """The version is that of snapshots."""
    return {name: value for name, value in context.items() if name != "version"}


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_recorded_log_replays_to_the_context_it_was_recorded_with(path: Path) -> None:
    document = json.loads(path.read_text())
    records = records_of(document)
    found, expected = context_of(records[0].job or "", records), without_version(document["context"])
    assert older_fields(found, expected) == expected
    assert found["state"] == "SUCCEEDED"


@pytest.mark.parametrize("path", WORLDS, ids=lambda path: path.name)
def test_a_recorded_system_replays_to_the_same_jobs_and_the_same_books(path: Path) -> None:
    document = json.loads(gzip.decompress(path.read_bytes()))
    records = records_of(document)
    assert document["contexts"]
    for job, context in document["contexts"].items():
        expected = without_version(context)
        assert older_fields(context_of(job, records), expected) == expected
    found = json.loads(json.dumps(looks(records, limited=document["limited"])))
    assert older_fields(found, document["books"]) == document["books"]
    assert any(job["held"] for _, books in document["books"] for job in books["jobs"].values())


@pytest.mark.parametrize("path", EVENTS, ids=lambda path: path.name)
def test_events_of_the_service_are_read_as_they_were_written(path: Path) -> None:
    for raw in json.loads(path.read_text()):
        assert older_fields(json.loads(json.dumps(event_to_json(event_from_json(raw)))), raw) == raw


def test_each_kind_of_event_is_in_a_recording() -> None:
    recorded = {raw["kind"] for path in EVENTS for raw in json.loads(path.read_text())}
    for path in WORLDS:
        recorded |= {one["event"]["kind"] for one in json.loads(gzip.decompress(path.read_bytes()))["records"]}
    assert not events.KINDS.keys() - recorded, "record them: python -m tests.logs.record"
