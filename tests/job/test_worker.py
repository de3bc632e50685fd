"""What an instance does when its master cannot be asked; in this process, with a launcher that fails."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.makers import JOB, at, service, spec

from rota.job import worker
from rota.job.executor import JobPlace, death_event
from rota.job.worker import FENCED_EXIT_STATUS, Instance
from rota.runtime.launch import ProcessDied
from rota.spec.ids import Epoch

LIMIT_S = 10.0


class BrokenLauncher:
    """Every call raises what nobody expects."""

    async def call(self, *_: object) -> Any:
        raise KeyError("a bug in the answer of the master")


def test_an_instance_whose_beats_fail_in_any_way_ends_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, statuses = threading.Event(), list[int]()

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()
        raise asyncio.CancelledError

    monkeypatch.setattr(worker.os, "_exit", end)
    monkeypatch.setattr(worker, "open_launcher", lambda _: BrokenLauncher())
    monkeypatch.setattr(worker, "BEAT_S", 0.01)
    monkeypatch.setattr(worker, "FENCE_EXIT_S", 0.1)
    place = JobPlace(home=str(tmp_path), job=JOB, workdir=str(tmp_path), launcher="")
    instance = Instance(
        place=place.to_json(),
        spec=spec(service("w", 1)).to_json(),
        instance="w/0",
        epoch=1,
        attempt=1,
        devices=[],
    )
    assert ended.wait(LIMIT_S)
    assert statuses == [FENCED_EXIT_STATUS]
    instance._control.close()
    instance._seat.user.close()


@pytest.mark.parametrize(("number", "text"), [(9, "ended by SIGKILL"), (35, "ended by signal 35")])
def test_a_death_by_any_signal_is_told(number: int, text: str) -> None:
    died = ProcessDied(name="n", job=JOB, instance=at("w/0"), epoch=Epoch(1), signal=number)
    assert death_event(died).text == text
