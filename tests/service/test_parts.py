"""What the watchers noted becomes an event, a warning, a count and a notice; each once."""

from __future__ import annotations

import asyncio
from pathlib import Path

from standing import Standing, with_service

from rota.runtime.hang import note_replaced, noted
from rota.service.notify import notice_of
from rota.service.parts import watch_parts
from rota.spec.events import PartReplaced


def test_a_replaced_part_is_told_by_event_status_metric_and_notice(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        run = service.doors.home.run
        note_replaced(run, "raylet", 41, "is stopped by a signal")
        note_replaced(run, "master of job-1", 42, "ended")
        watching = asyncio.create_task(watch_parts(service.doors))
        while len((await service.get("/events", type="PartReplaced"))["items"]) < 2 or noted(run):
            assert not watching.done(), watching.result()
            await asyncio.sleep(0.02)
        watching.cancel()
        first, second = (await service.get("/events", type="PartReplaced"))["items"]
        assert (first["part"], first["pid"]) == ("raylet", 41)
        assert second["text"] == "master of job-1, process 42, ended"
        warnings = (await service.get("/status"))["warnings"]
        assert any(text.startswith("raylet, process 41, is stopped by a signal; it was replaced") for text in warnings)
        metrics = (await service.http.get("/metrics")).text
        assert 'rota_parts_replaced_total{part="raylet"} 1.0' in metrics
        assert 'rota_parts_replaced_total{part="master"} 1.0' in metrics, "not a row for each job"
        told = [notice_of(one) for one in service.log.read() if isinstance(one.event, PartReplaced)]
        assert told == ["replaced", "replaced"]

    with_service(tmp_path, test)


def test_a_note_that_a_killed_service_had_put_into_the_log_is_not_told_twice(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        run = service.doors.home.run
        note_replaced(run, "gateway", 41, "is stopped by a signal")
        ((path, one),) = noted(run).items()
        told = PartReplaced(part=one.part, pid=one.pid, text="gateway, process 41, hung", found_at=one.at)
        await service.doors.loop.append([told])
        watching = asyncio.create_task(watch_parts(service.doors))
        while path.exists():
            assert not watching.done(), watching.result()
            await asyncio.sleep(0.02)
        watching.cancel()
        assert len((await service.get("/events", type="PartReplaced"))["items"]) == 1

    with_service(tmp_path, test)
