"""Logs and events as they happen: no gap, no duplicate, whatever breaks in between."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from standing import HELLO, Standing, listening, stream, with_service
from tests.makers import format_line

from rota.job.health.heartbeat import Heartbeat
from rota.runtime.event_log import sql
from rota.runtime.output import log_name
from rota.service.client import Client
from rota.service.process.tasks import keep_logs, old_jobs
from rota.spec.events import (
    Committed,
    FailoverEnded,
    FailoverStarted,
    InstanceEnded,
    InstanceLost,
    InstanceReady,
    InstanceStarted,
    InstanceStopped,
    JobEnded,
    TimerFired,
)
from rota.spec.ids import Epoch, JobId, NodeId, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import JobState, Level
from rota.testing.memory import VirtualClock

MAIN = RoleName("main")
START = 1_700_000_000.0
ENDED = JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED)


def write_log(service: Standing, job: str, rank: int, *lines: str, at: float = 0.0) -> None:
    path = service.app.home.job(job).logs / log_name("main", rank)
    with path.open("a") as file:
        file.writelines(format_line(START + at + i, 1, 1, "out", line) for i, line in enumerate(lines))


async def run_job(service: Standing, *, source: str = HELLO) -> None:
    """Submit, and play the master until the job runs."""
    await service.submit(source)
    await service.until("hello-1", JobState.ADMITTED)
    await service.play_start("hello-1", "main/0")


def test_what_a_master_writes_is_shown_with_pid_node_and_devices(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await run_job(service)
        job = await service.get("/jobs/hello-1")
        assert (job["state"], job["master"]["pid"]) == ("RUNNING", 999)
        one = job["instances"][0]
        assert (one["state"], one["pid"], one["node"], one["devices"]) == ("READY", 1000, "r0n0", [0, 1])
        beat = Heartbeat(role=MAIN, rank=0, epoch=Epoch(1), started_epoch=Epoch(1), pid=1000, progress_n=7, idle_s=0.25)
        service.engine.told = {"main/0": {**beat.to_json(), "age_s": 0.125}}
        one = (await service.get("/jobs/hello-1"))["instances"][0]
        told = {"n": 7, "unit": "", "idle_s": 0.25, "beat_age_s": 0.125, "busy": [], "quiet": "", "waits_for": []}
        assert one["progress"] == told | {"step_s": 0.0, "cpus": 0.0, "rss_bytes": 0, "weights": []}
        calls = [["call", "main", "work", 3, 1, 2.5, 640], ["commit", "master", "", 2, 0, 0.5, 0]]
        service.engine.told = {f"loop/{n}": {"calls": calls} for n in range(2)}
        observed = (await service.get("/jobs/hello-1/graph"))["observed"]
        edge = {"source": "loop", "target": "main", "kind": "call", "what": "work"}
        assert observed[0] == edge | {"n": 6, "failed": 2, "waited_s": 5.0, "bytes": 1280}
        service.engine.told = {"main/0": {**replace(beat, epoch=Epoch(0)).to_json(), "age_s": 0.125}}
        assert (await service.get("/jobs/hello-1"))["instances"][0]["progress"] is None

    with_service(tmp_path, test)


def test_why_shows_what_the_master_tells_of_waits_and_the_log_alone_without_it(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await run_job(service)
        silent = await service.get("/jobs/hello-1/why")
        assert (silent["live"], silent["culprits"], silent["items"]) == (False, [], [])
        root = {"members": ["main/0"], "deadlock": False, "text": "main/0 made no progress", "cycle": [], "waiters": []}
        wait = {"source": "loop/0", "target": "main/0", "kind": "call", "what": "work", "age_s": 7.5}
        service.engine.waits = {"culprits": [root], "suspects": [], "waits": [wait], "stacks": {"main/0": "File x"}}
        told = await service.get("/jobs/hello-1/why")
        assert (told["live"], told["culprits"], told["waits"], told["stacks"]) == (
            True,
            [root],
            [wait],
            {"main/0": "File x"},
        )

    with_service(tmp_path, test)


def test_a_failure_is_told_as_seen_decided_and_healed_with_its_traceback(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await run_job(service)
        loss = InstanceLost(
            role=MAIN, rank=0, epoch=Epoch(1), reason=Reason.SIGNALLED, text="ended by SIGKILL", traceback="T", signal=9
        )
        failover = FailoverStarted(
            failover=1,
            level=Level.PROCESS,
            scope=((MAIN, 0, Epoch(2)),),
            restore=0,
            reason=Reason.SIGNALLED,
            role=MAIN,
            rank=0,
            traceback="T",
        )
        await service.seen(service.as_master("hello-1", loss, failover))
        open_now = await service.get("/jobs/hello-1/failures")
        assert (open_now["items"][0]["healed"], open_now["items"][0]["seconds"]) == (False, None)
        assert (await service.get("/jobs/hello-1"))["state"] == "RECOVERING"
        assert [row["instance"] for row in (await service.get("/jobs/hello-1/why"))["items"]] == ["main/0"]
        gone = InstanceStopped(role=MAIN, rank=0, epoch=Epoch(1))
        await service.seen(service.as_master("hello-1", gone))
        starting = await service.get("/jobs/hello-1")
        assert (starting["instances"][0]["state"], starting["instances"][0]["pid"]) == ("STARTING", None), "no dead pid"
        assert starting["phase"] == "restarts main/0 (level process), 0 of 1 instance ready, waits for main/0"
        healed = (
            InstanceStarted(role=MAIN, rank=0, epoch=Epoch(2), node=NodeId("r0n0"), pid=1001),
            InstanceReady(role=MAIN, rank=0, epoch=Epoch(2)),
            FailoverEnded(failover=1, seconds=0.5),
        )
        await service.seen(service.as_master("hello-1", *healed))
        item = (await service.get("/jobs/hello-1/failures"))["items"][0]
        assert (item["level"], item["instance"], item["traceback"]) == ("process", "main/0", "T")
        assert (item["healed"], item["seconds"] is not None) == (False, True), "it runs again, which proves nothing yet"
        assert "rota_failover_seconds_count" not in (await service.http.get("/metrics")).text
        await service.heal("hello-1")
        assert (await service.get("/jobs/hello-1/failures"))["items"][0]["healed"]
        assert item["losses"][0]["signal"] == 9
        job = await service.get("/jobs/hello-1")
        one = job["instances"][0]
        assert (job["state"], one["pid"], one["epoch"], one["restarts"]) == ("RUNNING", 1001, 2, 1)
        assert one["error"]["text"] == "ended by SIGKILL"
        metrics = (await service.http.get("/metrics")).text
        assert 'rota_failover_seconds_count{level="process"} 1.0' in metrics
        assert 'rota_restarts_total{queue="default"} 1.0' in metrics

    with_service(tmp_path, test)


def test_events_resume_after_the_last_one_that_was_seen(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await run_job(service)
        async with listening(service) as http:
            seen = [event async for event in take(stream(http, "/jobs/hello-1/events"), 5)]
            resumed = asyncio.create_task(all_of(stream(http, "/jobs/hello-1/events", last_id=seen[-1]["id"])))
            await service.seen(service.as_master("hello-1", *(TimerFired(timer=str(i)) for i in range(50))))
            await service.seen(service.as_master("hello-1", ENDED))
            rest = await asyncio.wait_for(resumed, 60)
        assert rest[-1]["event"] == "end"
        numbers = [one["data"]["seq"] for one in [*seen, *rest] if one["event"] == "event"]
        assert numbers == list(range(1, 60))

    with_service(tmp_path, test)


def test_a_place_in_the_log_that_cannot_be_is_refused_as_bad_input(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        for params in ({"after": -1}, {"after": 2**70}):
            answer = await service.http.get("/api/v1/events", params=params)
            assert (answer.status_code, answer.json()["code"]) == (422, "INVALID"), params
        for last_id in (b"\xb2", b"9" * 40):
            answer = await service.http.get("/api/v1/events", headers=[(b"Last-Event-ID", last_id)])
            assert (answer.status_code, answer.json()["exit"]) == (422, 2), last_id
        for cursor in ("main/0:\u00b2", "main/0:" + "9" * 40):
            answer = await service.http.get("/api/v1/jobs/hello-1/logs", params={"cursor": cursor})
            assert (answer.status_code, answer.json()["exit"]) == (422, 2), cursor
        assert (await service.get("/events", after=2**62))["items"] == []

    with_service(tmp_path, test)


def test_a_stream_of_one_type_brings_no_other_and_ends_with_the_job(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await run_job(service)
        async with listening(service) as http:
            await service.seen(service.as_master("hello-1", TimerFired(timer="a"), ENDED))
            found = await asyncio.wait_for(all_of(stream(http, "/jobs/hello-1/events", type="TimerFired")), 10)
        assert [one["event"] for one in found] == ["event", "end"]
        assert found[0]["data"]["kind"] == "TimerFired"

    with_service(tmp_path, test)


def test_a_curve_of_a_long_job_costs_what_is_shown_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    record = sql._record
    monkeypatch.setattr(sql, "_record", lambda row: read.append(row.number) or record(row))

    async def test(service: Standing) -> None:
        await run_job(service)
        made = 0
        for commits in (300, 3000):
            numbers = range(made + 1, commits + 1)
            figures = [Committed(n=n, loop_epoch=Epoch(1), metrics={"loss": 1 / n}) for n in numbers]
            await service.seen(service.as_master("hello-1", *figures, TimerFired(timer="between")))
            made = commits
            read.clear()
            page = await service.get("/jobs/hello-1/events", type="Committed", points=100)
            shown = [one["n"] for one in page["items"]]
            assert shown == list(range(commits // 100, commits + 1, commits // 100))
            assert page["next"] is None and len(read) < 120
        refused = await service.http.get("/api/v1/jobs/hello-1/events", params={"points": 5})
        assert (refused.status_code, refused.json()["code"]) == (404, "UNKNOWN_NAME")
        assert (await service.get("/jobs/hello-1/events", type="Committed", points=1))["items"][0]["n"] == 3000

    with_service(tmp_path, test)


def test_logs_are_removed_days_after_the_end_and_their_absence_is_told(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        for _ in range(2):
            await service.submit()
        await service.http.post("/api/v1/jobs/hello-1:stop")
        await service.until("hello-2", JobState.ADMITTED)
        number = service.as_master("hello-1", JobEnded(state=JobState.CANCELLED, reason=Reason.STOPPED_BY_USER))
        await service.seen(number)
        home, jobs = service.app.home, service.app.loop.installation.jobs
        ended = jobs[JobId("hello-1")].ended_at
        assert ended is not None
        (home.job("hello-1").logs / "main-0.log").write_text("said\n")
        (home.job("hello-1").output / "model").write_text("weights")
        for kept_days, days, old in ((0, 999, []), (7, 6.9, []), (7, 7.1, ["hello-1"])):
            assert old_jobs(jobs, now=ended + days * 86_400, kept_days=kept_days) == old
        assert (await service.http.get("/api/v1/jobs/hello-1/logs")).status_code == 200
        clock = VirtualClock(wall_start_s=ended + 8 * 86_400)
        keeping = asyncio.create_task(keep_logs(jobs, home, clock, 7))
        async with asyncio.timeout(60):
            while home.job("hello-1").logs.exists():
                await asyncio.sleep(0.01)
        keeping.cancel()
        gone = await service.http.get("/api/v1/jobs/hello-1/logs")
        assert gone.status_code == 404 and "no logs any more" in gone.json()["detail"]
        assert (home.job("hello-1").output / "model").read_text() == "weights"
        assert (await service.http.get("/api/v1/jobs/hello-2/logs")).status_code == 200

    with_service(tmp_path, test)


def test_readers_that_leave_before_the_first_byte_hold_no_place(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        app = service.http._transport.app  # type: ignore[attr-defined]
        headers = [(name.lower().encode(), value.encode()) for name, value in service.http.headers.items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/api/v1/events",
            "raw_path": b"/api/v1/events",
            "query_string": b"follow=true",
            "root_path": "",
            "headers": [*headers, (b"host", b"127.0.0.1:7700")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 7700),
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            raise OSError("the reader is gone")

        for _ in range(3):
            with suppress(Exception):
                await asyncio.wait_for(app(dict(scope), receive, send), 10)
        assert service.app.streams == 0

    with_service(tmp_path, test)


async def all_of(events: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event async for event in events]


async def take(events: Any, count: int) -> AsyncIterator[dict[str, Any]]:
    """The first ``count`` events; then the connection is cut."""
    async with aclosing(events) as open_events:
        async for event in open_events:
            yield event
            count -= 1
            if count == 0:
                return


def test_logs_merge_by_time_and_can_be_narrowed(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await run_job(service)
        write_log(service, "hello-1", 0, "loss 1", "loss 2", "done")
        write_log(service, "hello-1", 1, "other", at=1.5)
        texts = [line["text"] for line in (await service.get("/jobs/hello-1/logs"))["items"]]
        assert texts == ["loss 1", "loss 2", "other", "done"]
        for narrowed, expected in (
            ({"tail": 2}, ["other", "done"]),
            ({"grep": "loss"}, ["loss 1", "loss 2"]),
            ({"instance": "main/1"}, ["other"]),
            ({"since": START + 1.2}, ["other", "done"]),
            ({"stream": "err"}, []),
        ):
            page = await service.get("/jobs/hello-1/logs", **narrowed)
            assert [line["text"] for line in page["items"]] == expected, narrowed
        text = await service.http.get("/api/v1/jobs/hello-1/logs", headers={"Accept": "text/plain"})
        assert text.text.splitlines()[0].endswith("main/0 loss 1")
        for name, hint in (
            ("mane", "did you mean 'main'?"),
            ("x", "roles: main"),
            ("main/9", "instances: main/0, main/1"),
        ):
            unknown = await service.http.get("/api/v1/jobs/hello-1/logs", params={"instance": name})
            assert (unknown.status_code, unknown.json()["hint"]) == (404, hint)
        slip = await service.http.get("/api/v1/jobs/hello-1/logs", params={"grp": "loss"})
        assert (slip.status_code, slip.json()["hint"]) == (422, "did you mean 'grep'?")

    with_service(tmp_path, test)


def test_following_from_the_end_gives_only_what_is_new(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await run_job(service)
        write_log(service, "hello-1", 0, "old 1", "old 2")
        async with listening(service) as http:
            following = asyncio.create_task(all_of(stream(http, "/jobs/hello-1/logs", tail=0)))
            async with asyncio.timeout(60):
                while service.app.streams == 0:
                    await service.app.clock.sleep(0.01)
            await service.app.clock.sleep(0.2)  # the first page is read by then
            write_log(service, "hello-1", 0, "new", at=5)
            await service.seen(service.as_master("hello-1", ENDED))
            events = await asyncio.wait_for(following, 60)
        assert [event["data"]["text"] for event in events if event["event"] == "line"] == ["new"]

    with_service(tmp_path, test)


@pytest.mark.slow
def test_ten_thousand_lines_over_cut_connections_come_without_gap_or_duplicate(tmp_path: Path) -> None:
    total = 10_000

    async def write_all(service: Standing) -> None:
        for i in range(0, total, 100):
            write_log(service, "hello-1", i // 100 % 2, *(f"n{i + j}" for j in range(100)), at=i)
            await service.app.clock.sleep(0.01)
        await service.seen(service.as_master("hello-1", InstanceEnded(role=MAIN, rank=0, epoch=Epoch(1)), ENDED))

    async def test(service: Standing) -> None:
        await run_job(service)
        writing = asyncio.create_task(write_all(service))
        seen: dict[tuple[str, int], str] = {}
        last, cuts, over = "", 0, False
        async with listening(service) as http:
            while not over:
                path = "/jobs/hello-1/logs"
                async for event in take(stream(http, path, last_id=last), 1700):
                    over = event["event"] == "end"
                    if not over:
                        line = event["data"]
                        seen[(line["instance"], line["offset"])] = line["text"]
                        last = event.get("id", last)
                cuts += not over
        await writing
        assert cuts >= 4
        assert sorted(int(text[1:]) for text in seen.values()) == list(range(total))

    with_service(tmp_path, test)


def cut(admitted: int, queued: int, **dropped: int) -> dict[str, Any]:
    trained = admitted - queued - sum(dropped.values())
    counts = {"admitted": admitted, "trained": trained, "queued": queued, "pending": 0, "running": 0}
    return {"cut": {"streams": {"groups": {**counts, "dropped": dropped, "again": 3, "age": 2, "open": []}}}}


def test_what_streams_have_seen_is_shown_counted_and_measured_at_each_commit(tmp_path: Path) -> None:
    (tmp_path / "flowing.py").write_text("async def loop(f): ...\n")
    source = "name: hello\nroles:\n  loop: {workload: 'flowing:loop'}\nstreams: {groups: {cap: 8}}\n"

    async def test(service: Standing) -> None:
        await service.submit(source, workdir=str(tmp_path))
        await service.until("hello-1", JobState.ADMITTED)
        await service.play_start("hello-1", "loop/0")
        number = service.as_master(
            "hello-1",
            Committed(n=1, loop_epoch=Epoch(1), cursor=cut(10, 4)),
            Committed(n=2, loop_epoch=Epoch(1), cursor=cut(14, 4, stale=2)),
        )
        await service.seen(number)
        row = {"name": "groups", "admitted": 14, "pending": 0, "leased": 0, "queued": 4, "trained": 8}
        row |= {"dropped": {"stale": 2}, "again": 3, "age": 2}
        assert (await service.get("/jobs/hello-1"))["streams"] == [row]
        assert (await service.get("/jobs/hello-1/graph"))["streams"][0]["seen"] == row
        metrics = (await service.http.get("/metrics")).text
        for line in (
            'rota_samples_total{reason="",state="admitted"} 14.0',
            'rota_samples_total{reason="",state="trained"} 8.0',
            'rota_samples_total{reason="stale",state="dropped"} 2.0',
            'rota_stale_versions{job="hello-1",stream="groups"} 2.0',
        ):
            assert line in metrics, metrics

    with_service(tmp_path, test)


def test_a_log_longer_than_a_page_is_given_whole(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await run_job(service)
        for start in range(0, 12_000, 4000):
            write_log(service, "hello-1", start // 4000 % 2, *(f"n{start + j}" for j in range(4000)), at=start)
        async with listening(service) as http:
            server, token = str(http.base_url), http.headers["authorization"].split()[1]

            def asked(**filters: Any) -> list[str]:
                with Client(server, token) as client:
                    return [line["text"] for line in client.logs("hello-1", **filters)]

            assert sorted(await asyncio.to_thread(asked), key=lambda text: int(text[1:])) == [
                f"n{i}" for i in range(12_000)
            ]
            assert await asyncio.to_thread(lambda: asked(grep="n11999")) == ["n11999"]
            assert await asyncio.to_thread(lambda: asked(tail=3)) == ["n11997", "n11998", "n11999"]

    with_service(tmp_path, test)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ROTA_DEEP"), reason="ROTA_DEEP is not set")
@pytest.mark.timeout(600)
def test_a_gigabyte_is_followed_over_cut_connections_without_loss(tmp_path: Path) -> None:
    pad, total, block = "x" * 16_000, 65_536, 512

    async def write_all(service: Standing) -> None:
        for i in range(0, total, block):
            lines = [f"n{i + j} {pad}" for j in range(block)]
            await asyncio.to_thread(write_log, service, "hello-1", i // block % 2, *lines, at=i)
        await service.seen(service.as_master("hello-1", InstanceEnded(role=MAIN, rank=0, epoch=Epoch(1)), ENDED))

    async def test(service: Standing) -> None:
        await run_job(service)
        writing = asyncio.create_task(write_all(service))
        seen: set[tuple[str, int]] = set()
        numbers: set[str] = set()
        last, cuts, over = "", 0, False
        async with listening(service) as http:
            while not over:
                async for event in take(stream(http, "/jobs/hello-1/logs", last_id=last), 9_000):
                    over = event["event"] == "end"
                    if not over:
                        seen.add((event["data"]["instance"], event["data"]["offset"]))
                        numbers.add(event["data"]["text"].partition(" ")[0])
                        last = event.get("id", last)
                cuts += not over
        await writing
        size = sum(path.stat().st_size for path in service.app.home.job("hello-1").logs.iterdir())
        assert size > 10**9 and cuts >= 7
        assert len(seen) == len(numbers) == total

    with_service(tmp_path, test)
