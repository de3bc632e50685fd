"""One play of the live jobs answers for all that wait, until something changes."""

from __future__ import annotations

import threading
from datetime import datetime
from pathlib import Path

import pytest
from tests.service.standing import HELLO, Standing, with_service

from rota.cluster.forecast import Estimates, Forecast
from rota.runtime.clock import Clock
from rota.spec.states import JobState

JOB = HELLO.replace("gpus: 2", "gpus: 4") + "time_limit: 1h\n"


class Plays:
    """Counts the plays; each waits for ``gate``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n, self.gate, real = 0, threading.Event(), Forecast.play
        self.gate.set()

        def counted(forecast: Forecast, clock: Clock) -> Estimates:
            assert self.gate.wait(20)
            self.n += 1
            return real(forecast, clock)

        monkeypatch.setattr(Forecast, "play", counted)


async def starts_at(service: Standing, job: str) -> float:
    return datetime.fromisoformat((await service.get(f"/jobs/{job}/explain"))["estimate"]["p50"]).timestamp()


def test_a_second_question_plays_nothing_and_a_change_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays = Plays(monkeypatch)

    async def test(service: Standing) -> None:
        for _ in range(4):
            await service.submit(JOB)
        await service.until("hello-1", JobState.ADMITTED)
        await service.until("hello-4", JobState.QUEUED)
        third, fourth = await starts_at(service, "hello-3"), await starts_at(service, "hello-4")
        assert fourth == pytest.approx(third + 3600)
        played = []
        for _ in range(6):  # the reasons why they wait may be written down between the first of them
            assert await starts_at(service, "hello-3") == pytest.approx(third, abs=1)
            played.append(plays.n)
        assert played[-1] == played[-2] <= 4
        await service.http.post("/api/v1/jobs/hello-2:stop", json={"grace_s": 1})
        await service.until("hello-2", JobState.CANCELLED)
        assert await starts_at(service, "hello-3") == pytest.approx(third - 3600, abs=60)
        await service.submit(JOB)
        await service.until("hello-5", JobState.QUEUED)
        assert await starts_at(service, "hello-5") > third, "who came after the last play is in the next"

    with_service(tmp_path, test, pretend="1x1x4")


def test_a_recent_answer_is_given_while_a_newer_one_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays = Plays(monkeypatch)

    async def test(service: Standing) -> None:
        for _ in range(3):
            await service.submit(JOB)
        await service.until("hello-3", JobState.QUEUED)
        first = await starts_at(service, "hello-3")
        plays.gate.clear()
        await service.http.post("/api/v1/jobs/hello-2:stop", json={"grace_s": 1})
        await service.until("hello-2", JobState.CANCELLED)
        assert await starts_at(service, "hello-3") == first
        plays.gate.set()

    with_service(tmp_path, test, pretend="1x1x4")
