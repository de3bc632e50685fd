"""``rota explain --what-if``: when a waiting job would start with changes; asking changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from standing import Standing, with_service
from test_cli import own_home, with_cli

from rota.service.control import forecasts
from rota.spec.states import JobState

assert own_home  # the fixture of every test here, too

RUNS = """
name: runs
time_limit: 1h
roles: {a: {run: [x], resources: {gpus: 4}}, b: {run: [x], resources: {gpus: 3}}}
"""
AHEAD = "name: ahead\ntime_limit: 2h\nroles: {m: {run: [x], replicas: 2, resources: {gpus: 4}}}\n"
WAITS = "name: waits\ntime_limit: {limit}\nroles: {{m: {{run: [x], resources: {{gpus: {gpus}}}}}}}\n"


@pytest.fixture(autouse=True)
def a_forecast_is_played_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forecast of the job as it is comes with the answer, on a busy machine too."""
    monkeypatch.setattr(forecasts, "NEW_S", 20.0)
    monkeypatch.setattr(forecasts, "PATIENCE_S", 20.0)
    monkeypatch.setattr(forecasts, "REST_FACTOR", 0.0)


async def three_jobs(service: Standing) -> float:
    """One job runs for an hour on 7 of 8 devices, one wants all of them for two hours, the third is asked about."""
    for source in (RUNS, AHEAD, WAITS.format(limit="3h", gpus=2)):
        await service.submit(source)
    await service.until("runs-1", JobState.ADMITTED)
    await service.until("ahead-1", JobState.QUEUED)

    async def reason() -> object:
        return (await service.get("/jobs/waits-1"))["reason"]

    await service.until_true(reason)
    return service.app.loop.installation.find("runs-1").attempts[0].admitted_at


def hours_after(began: float, estimate: dict[str, Any]) -> float:
    return (datetime.fromisoformat(estimate["p50"]).timestamp() - began) / 3600


def test_what_if_says_what_then_comes_true_and_changes_nothing(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        began = await three_jobs(service)
        state, records = service.app.loop.scheduler.state, service.app.loop.installation.number
        before = state.digest()
        done = await ask("explain", "waits-1", "--what-if", "gpus=1", "--what-if", "time_limit=30m", "--json")
        document = done.document
        assert (done.status, document["kind"]) == (0, "WhatIf")
        assert document["changes"] == ["gpus=1", "time_limit=30m"]
        now, then = document["now"], document["then"]
        assert (now["starts_now"], now["ahead"]) == (False, {"jobs": 1, "gpus": 8})
        assert hours_after(began, now["estimate"]) == pytest.approx(3, abs=0.1), "after both that are before it"
        assert (then["starts_now"], then["why"], then["estimate"]) == (True, None, None), "it ends before they need it"
        longer = (await ask("explain", "waits-1", "--what-if", "gpus=1", "--json")).document["then"]
        assert (longer["starts_now"], longer["why"] is None) == (False, False), "three hours would delay the other"
        assert hours_after(began, longer["estimate"]) == pytest.approx(3, abs=0.1)
        urgent = (await ask("explain", "waits-1", "--what-if", "priority=60", "--json")).document["then"]
        assert [row["job"] for row in urgent["victims_if_preempted"]] == ["runs-1"]
        assert hours_after(began, urgent["estimate"]) < 0.1, "as soon as that job gave its devices back"
        shown = (await ask("explain", "waits-1", "--what-if", "priority=60")).out
        assert "if   priority=60" in shown and "with the changes:" in shown and "runs-1" in shown
        assert (state.digest(), service.app.loop.installation.number) == (before, records)
        await service.submit(WAITS.format(limit="30m", gpus=1))
        await service.until("waits-2", JobState.ADMITTED)

    with_cli(tmp_path / "service", test)


REFUSED = [
    ("priority=1000", 2, "--what-if priority=1000: priority"),
    ("prioritty=10", 2, "did you mean 'priority'"),
    ("queue=defualt", 2, "default"),
    ("gpus=999", 4, "999"),
    ("roles.m.replicas=999", 4, "999"),
    ("gpus", 2, "gpus"),
]


def test_a_change_that_cannot_be_is_refused_as_at_submit(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await three_jobs(service)
        for change, status, text in REFUSED:
            done = await ask("explain", "waits-1", "--what-if", change)
            assert (done.status, text in done.err) == (status, True), (change, done.err)
        running = await ask("explain", "runs-1", "--what-if", "priority=60")
        assert (running.status, "rota run FILE --dry-run" in running.err) == (2, True)
        await service.submit(RUNS)
        await service.until("runs-2", JobState.QUEUED)
        several = await ask("explain", "runs-2", "--what-if", "gpus=1")
        assert (several.status, "roles.a.resources.gpus=" in several.err) == (2, True)

    with_cli(tmp_path / "service", test)


def test_what_if_of_a_queue_needs_the_right_to_submit_there(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        queues = [{"path": "a", "weight": 1}, {"path": "b", "weight": 1}]
        assert (await service.http.put("/api/v1/queues", json={"queues": queues})).status_code == 200
        grants = {"grants": [{"queue": "a", "role": "user"}]}
        assert (await service.http.put("/api/v1/users/ann", json=grants)).status_code == 200
        token = (await service.http.post("/api/v1/tokens", json={"user": "ann"})).json()["token"]
        await service.submit("queue: b\n" + AHEAD)
        service.http.headers["Authorization"] = f"Bearer {token}"
        await service.submit("queue: a\n" + WAITS.format(limit="1h", gpus=2))
        await service.until("waits-1", JobState.QUEUED)
        for queue, status in (("a", 200), ("b", 403)):
            body = {"changes": [f"queue={queue}"]}
            answer = await service.http.post("/api/v1/jobs/waits-1/explain", json=body)
            assert answer.status_code == status, answer.text

    with_service(tmp_path, test)
