"""One play of the live jobs answers for all that wait; a newer one is played beside the service after a change."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from tests.service.standing import HELLO, PlayedEngine, Standing, empty_database, with_service

from rota.cluster.live import Scheduler
from rota.cluster.sim.calibration import Calibration
from rota.cluster.sim.forecast import Estimates, Forecast
from rota.job.core.placement import requests_of
from rota.runtime.clock import Clock, SystemClock
from rota.service.config import load_settings
from rota.service.control import forecasts
from rota.service.process import assembly, serve
from rota.service.rest import app
from rota.service.rest.deps import AppState
from rota.spec.events import JobEnded
from rota.spec.ids import JobId
from rota.spec.reasons import Reason
from rota.spec.states import JobState

JOB = HELLO.replace("gpus: 2", "gpus: 4") + "time_limit: 1h\n"


class Plays:
    """Counts the plays; each waits for ``gate``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n, self.gate, real = 0, threading.Event(), Forecast.play
        self.gate.set()

        def counted(forecast: Forecast, clock: Clock, between_passes: Callable[[], None]) -> Estimates:
            assert self.gate.wait(60)
            made = real(forecast, clock, between_passes)
            self.n += 1
            return made

        monkeypatch.setattr(Forecast, "play", counted)


async def starts_at(service: Standing, job: str) -> float:
    return datetime.fromisoformat((await service.get(f"/jobs/{job}/explain"))["estimate"]["p50"]).timestamp()


async def submitted(service: Standing, count: int) -> None:
    """Submit that many jobs to one node; the first is admitted, the last waits."""
    for _ in range(count):
        await service.submit(JOB)
    await service.until("hello-1", JobState.ADMITTED)
    await service.until(f"hello-{count}", JobState.QUEUED)


@pytest.fixture(autouse=True)
def by_asking_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No play begins by itself, unless a test wants one, none rests, and a busy machine has time for the first."""
    monkeypatch.setattr(forecasts, "REST_FACTOR", 0.0)
    monkeypatch.setattr(forecasts, "SOON_S", 1000.0)
    monkeypatch.setattr(forecasts, "NEW_S", 20.0)


def test_a_second_question_plays_nothing_and_a_change_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays = Plays(monkeypatch)
    monkeypatch.setattr(forecasts, "PATIENCE_S", 20.0)

    async def test(service: Standing) -> None:
        await submitted(service, 4)
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


def test_a_paused_job_is_told_anew_when_it_waits_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "PATIENCE_S", 20.0)

    async def test(service: Standing) -> None:
        await submitted(service, 3)
        scheduler, told = service.app.loop.scheduler, list[set[str]]()
        monkeypatch.setattr(Calibration, "tell", lambda _, made, now: told.append({str(one) for one in made.starts}))
        await service.http.post("/api/v1/jobs/hello-2:pause", json={})
        await service.until("hello-2", JobState.PAUSED)
        await starts_at(service, "hello-3")
        assert told[-1] == {"hello-3"} and scheduler.state.jobs[JobId("hello-2")].phase == "paused"

    with_service(tmp_path, test, pretend="1x1x4")


def test_what_became_of_earlier_estimates_is_in_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "PATIENCE_S", 20.0)

    async def test(service: Standing) -> None:
        await submitted(service, 11)
        assert "intervals" not in (await service.get("/jobs/hello-11/explain"))["estimate"]["basis"]
        for i in range(1, 10):
            service.as_master(f"hello-{i}", JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED))
            await service.until(f"hello-{i + 1}", JobState.ADMITTED)
        told = (await service.get("/jobs/hello-11/explain"))["estimate"]
        assert "; intervals by what became of 9 estimates" in told["basis"], "the first one ran at once"

    with_service(tmp_path, test, pretend="1x1x4")


def test_a_recent_answer_is_given_while_a_newer_one_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays = Plays(monkeypatch)

    async def test(service: Standing) -> None:
        await submitted(service, 3)
        first = await starts_at(service, "hello-3")
        plays.gate.clear()
        await service.http.post("/api/v1/jobs/hello-2:stop", json={"grace_s": 1})
        await service.until("hello-2", JobState.CANCELLED)
        assert await starts_at(service, "hello-3") == first
        plays.gate.set()

    with_service(tmp_path, test, pretend="1x1x4")


def test_who_asks_often_has_no_play_always_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays = Plays(monkeypatch)
    monkeypatch.setattr(forecasts, "PATIENCE_S", 20.0)
    monkeypatch.setattr(forecasts, "REST_FACTOR", 1e6)

    async def test(service: Standing) -> None:
        await submitted(service, 4)
        first = await starts_at(service, "hello-4")
        for job in ("hello-2", "hello-3"):
            await service.http.post(f"/api/v1/jobs/{job}:stop", json={"grace_s": 1})
            await service.until(job, JobState.CANCELLED)
            assert (await starts_at(service, "hello-4"), plays.n) == (first, 1)

    with_service(tmp_path, test, pretend="1x1x4")


def test_a_change_is_played_before_anybody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays = Plays(monkeypatch)
    monkeypatch.setattr(forecasts, "SOON_S", 0.0)

    async def test(service: Standing) -> None:
        await submitted(service, 2)
        made = service.app.forecasts
        async with asyncio.timeout(60):
            while made._made_of != made._now_of():
                await asyncio.sleep(0.01)
        played = plays.n
        plays.gate.clear()
        estimate = (await service.get("/jobs/hello-2/explain"))["estimate"]
        assert (plays.n, estimate["p50"] is not None, estimate["age_s"] < 10) == (played, True, True)
        plays.gate.set()

    with_service(tmp_path, test, pretend="1x1x4")


def test_nobody_waits_for_a_play_that_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays = Plays(monkeypatch)

    async def test(service: Standing) -> None:
        await submitted(service, 2)
        first = await starts_at(service, "hello-2")
        made = service.app.forecasts
        while made._playing is not None:  # one that was not waited for on a busy machine
            await asyncio.sleep(0.01)
        plays.gate.clear()
        made._took_s, made._made_at = 60.0, made._made_at - 45
        estimate = (await service.get("/jobs/hello-2/explain"))["estimate"]
        assert datetime.fromisoformat(estimate["p50"]).timestamp() == first
        assert 45 <= estimate["age_s"] < 75 and "; as of 4" in estimate["basis"]
        await service.submit(JOB)
        await service.until("hello-3", JobState.QUEUED)
        estimate = (await service.get("/jobs/hello-3/explain"))["estimate"]
        assert (estimate["p50"], estimate["age_s"], "in no forecast yet" in estimate["basis"]) == (None, None, True)
        plays.gate.set()

    with_service(tmp_path, test, pretend="1x1x4")


def test_the_end_of_the_service_does_not_wait_for_a_play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    playing, overdue, parts, clock = threading.Event(), list[Forecast](), list[AppState](), SystemClock()

    def endless(self: Forecast, _: Clock, between_passes: Callable[[], None]) -> Estimates:
        playing.set()
        until_s = clock.monotonic_s() + 5
        while clock.monotonic_s() < until_s:
            between_passes()
        overdue.append(self)
        return Estimates(starts={}, basis="")

    def make_app(app: AppState) -> object:
        parts.append(app)
        return real(app)

    async def main() -> None:
        serving = asyncio.create_task(serve.serve(settings, listener))
        async with asyncio.timeout(60):
            while not (parts and parts[0].ready):
                await asyncio.sleep(0.005)
        parts[0].forecasts._play()
        assert await asyncio.to_thread(playing.wait, 20)
        os.kill(os.getpid(), signal.SIGTERM)
        await serving

    real = app.make_app
    monkeypatch.setattr(Forecast, "play", endless)
    monkeypatch.setattr(app, "make_app", make_app)
    monkeypatch.setattr(assembly, "make_engine", lambda *_: PlayedEngine())
    tmp_path.joinpath("rota.db").write_bytes(empty_database())
    settings = load_settings({"home": str(tmp_path), "port": 0, "pretend": "1x1x4"}, environ={})
    with serve.bind(settings) as listener:
        asyncio.run(main())
    assert not overdue


def test_nothing_is_played_before_the_whole_log_is_read(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await submitted(service, 2)
        records = service.log.read(after=0, limit=1000)
        scheduler = Scheduler(service.app.loop.scheduler.profile, requests_of)
        made, dues = forecasts.Forecasts(scheduler, SystemClock()), list[bool]()
        for some in (records[: len(records) // 2], records[len(records) // 2 :]):
            for record in some:
                scheduler.apply(record)
                made.changed(record)
            dues.append(made._due is None)
        made.begin()
        assert (dues, made._due is None) == ([True, True], False)
        made.close()

    with_service(tmp_path, test, pretend="1x1x4")
