"""What the watchers noted becomes an event, a warning, a count and a notice; each once."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from standing import Standing, with_service

from rota.runtime import process
from rota.runtime.clock import SystemClock
from rota.runtime.environ import Home
from rota.runtime.probe import master_part, note_replaced, noted
from rota.runtime.process import RunFolder
from rota.runtime.ray.engine import EngineSettings
from rota.service.config import Settings, load_settings
from rota.service.control.engine import Engine, NoEngine
from rota.service.process import supervisor
from rota.service.process.tasks import wait_removed, watch_parts
from rota.service.webhooks import notice_of
from rota.spec.errors import EngineUnavailable, NotReachable, RotaError
from rota.spec.events import PartReplaced
from rota.spec.ids import JobId


def test_a_replaced_part_is_in_events_status_metrics_and_notices(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        run = service.app.home.run
        note_replaced(run, "raylet", 41, "was stopped by a signal")
        note_replaced(run, "master of job-1", 42, "ended")
        watching = asyncio.create_task(watch_parts(service.app))
        while len((await service.get("/events", type="PartReplaced"))["items"]) < 2 or noted(run):
            assert not watching.done(), watching.result()
            await asyncio.sleep(0.02)
        watching.cancel()
        first, second = (await service.get("/events", type="PartReplaced"))["items"]
        assert (first["part"], first["pid"]) == ("raylet", 41)
        assert second["text"] == "master of job-1, process 42, ended"
        warnings = (await service.get("/status"))["warnings"]
        assert any(text.startswith("raylet, process 41, was stopped by a signal; it was replaced") for text in warnings)
        service.app.home.last_up.write_text("{}")
        assert not any("process 41" in text for text in (await service.get("/status"))["warnings"]), "all is new since"
        metrics = (await service.http.get("/metrics")).text
        assert 'rota_parts_replaced_total{part="raylet"} 1.0' in metrics
        assert 'rota_parts_replaced_total{part="master"} 1.0' in metrics, "not a row for each job"
        told = [notice_of(one) for one in service.log.read() if isinstance(one.event, PartReplaced)]
        assert told == ["replaced", "replaced"]

    with_service(tmp_path, test)


def test_the_failures_of_a_job_name_its_master_that_was_replaced(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        note_replaced(service.app.home.run, master_part("hello-1"), 42, "ended")
        note_replaced(service.app.home.run, master_part("hello-12"), 43, "ended")
        watching = asyncio.create_task(watch_parts(service.app))
        while noted(service.app.home.run):
            assert not watching.done(), watching.result()
            await asyncio.sleep(0.02)
        watching.cancel()
        document = await service.get("/jobs/hello-1/failures")
        assert [(one["pid"], one["text"]) for one in document["masters"]] == [
            (42, "master of hello-1, process 42, ended")
        ]
        assert document["items"] == []

    with_service(tmp_path, test)


def test_parts_that_start_with_the_first_job_say_so(tmp_path: Path) -> None:
    engine = Engine(Home.of(tmp_path).make(), db_url="", settings=EngineSettings())
    parts = asyncio.run(engine.status())
    assert {name: part["text"] for name, part in parts.items()} == dict.fromkeys(
        ("gateway", "engine", "registry"), "starts with the first job"
    )


def test_without_ray_jobs_wait_for_an_engine_and_nothing_is_started(tmp_path: Path) -> None:
    async def body() -> None:
        engine = NoEngine(Home.of(tmp_path).make(), db_url="", settings=EngineSettings())
        assert (await engine.status())["engine"] == {"state": "off", "text": "Ray is not installed"}
        assert await engine.jobs() == () and await engine.beats(JobId("hello-1")) == {}
        assert await engine.execute(JobId("hello-1"), "main", 0, ["true"], timeout_s=1.0) is None
        for asked in (engine.ensure_master(JobId("hello-1")), engine.nodes(), engine.access(), engine.check_machines()):
            with pytest.raises(EngineUnavailable, match="Ray is not installed"):
                await asked
        await engine.close()
        assert engine.restarts == 0 and not RunFolder(tmp_path / "run").alive()

    asyncio.run(body())


def test_a_death_that_two_watchers_noted_is_one_event(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        run = service.app.home.run
        note_replaced(run, "supervisor", 41, "was stopped by a signal")
        note_replaced(run, "supervisor", 41, "ended")
        note_replaced(run, "supervisor", 42, "ended")
        watching = asyncio.create_task(watch_parts(service.app))
        while noted(run):
            assert not watching.done(), watching.result()
            await asyncio.sleep(0.02)
        watching.cancel()
        told = [(one["pid"], one["text"]) for one in (await service.get("/events", type="PartReplaced"))["items"]]
        assert told == [(41, "supervisor, process 41, was stopped by a signal"), (42, "supervisor, process 42, ended")]

    with_service(tmp_path, test)


def test_a_service_is_replaced_once_and_leaves_its_address_only_when_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, ports = Home.of(tmp_path).make(), list[int]()
    fails = [RotaError("it was killed"), NotReachable("the port is taken"), *[RotaError("the disk is full")] * 9]
    dead = {"pid": 2**22 + 1, "start_time": 1.0, "boot_id": process.boot_id(), "url": "http://127.0.0.1:7"}
    home.service_record.write_text(json.dumps(dead))

    def start_service(settings: Settings, home: Home, *, standby: object) -> None:
        assert standby is None, "there was no service to prepare one for"
        ports.append(settings.port)
        if fails:
            raise fails.pop(0)
        home.service_record.unlink()  # another record would be here

    monkeypatch.setattr(supervisor, "start_service", start_service)
    monkeypatch.setattr(supervisor, "GRACE_S", 0.0)
    monkeypatch.setattr(supervisor, "blocking_sleep", lambda _: None)
    supervisor.Supervisor(load_settings({"home": str(tmp_path), "port": 0}, environ={})).run()
    assert ports == [7, 7, 0, *[7] * 9], "it does not give up"
    assert [(one.part, one.why) for one in noted(home.run).values()] == [("service", "ended")]


def test_a_standby_that_ends_by_itself_is_tried_five_times_ever_later_and_status_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(service: Standing) -> None:
        home, now_s, starts = service.app.home, [0.0], list[float]()

        class Child:
            returncode = 1

            def poll(self) -> int:
                return 1

        def start_standby(settings: Settings, home: Home) -> Child:
            starts.append(now_s[0])
            return Child()

        monkeypatch.setattr(supervisor, "start_standby", start_standby)
        kept = supervisor.Supervisor(load_settings({"home": str(home.root)}, environ={}))
        monkeypatch.setattr(kept._clock, "monotonic_s", lambda: now_s[0])
        kept._since_s = 0.0
        for now_s[0] in map(float, range(3600)):
            kept._keep_standby()
        assert starts == [10.0, 20.0, 40.0, 80.0, 160.0]
        (text,) = [one for one in (await service.get("/status"))["warnings"] if "standby" in one]
        assert text.startswith(
            "the standby ended with status 1 (5 times): a restart of the service takes longer; see /"
        )

    with_service(tmp_path, test)


def test_a_service_notices_that_its_home_was_removed(tmp_path: Path) -> None:
    async def test() -> None:
        home = Home.of(tmp_path / "home").make()
        waiting = asyncio.create_task(wait_removed(home, SystemClock()))
        await asyncio.sleep(1.5)
        assert not waiting.done()
        shutil.rmtree(home.root)
        await asyncio.wait_for(waiting, 30)

    asyncio.run(test())


def test_a_note_that_a_killed_service_had_put_into_the_log_is_not_logged_twice(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        run = service.app.home.run
        note_replaced(run, "gateway", 41, "was stopped by a signal")
        ((path, one),) = noted(run).items()
        told = PartReplaced(part=one.part, pid=one.pid, text="gateway, process 41, hung", found_at=one.at)
        await service.app.loop.append([told])
        watching = asyncio.create_task(watch_parts(service.app))
        while path.exists():
            assert not watching.done(), watching.result()
            await asyncio.sleep(0.02)
        watching.cancel()
        assert len((await service.get("/events", type="PartReplaced"))["items"]) == 1

    with_service(tmp_path, test)
