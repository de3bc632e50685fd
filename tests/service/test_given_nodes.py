"""The machines of an engine that somebody else runs, as the service knows them; its looking may not die unseen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from standing import PlayedEngine, Standing, with_service
from tests import postgres

from rota.runtime.environ import Home
from rota.runtime.event_log.interface import INSTALL_SCOPE, Writer
from rota.runtime.node import FAULTS_LABEL, LOCAL_HOST, local_node
from rota.runtime.ray.engine import EngineSettings
from rota.service.config import Settings, load_settings
from rota.service.control.engine import Engine
from rota.service.process import assembly, serve, tasks
from rota.service.process.assembly import node_changes
from rota.service.rest import app
from rota.service.rest.deps import AppState
from rota.service.views.alerts import alert_list
from rota.service.views.cluster import node_list, removed_holders
from rota.spec.errors import EngineUnavailable
from rota.spec.events import NodeJoined, NodeLost, PreemptAsked
from rota.spec.ids import JobId, NodeId
from rota.spec.reasons import Reason
from rota.spec.resources import CORES_LABEL, pretend_nodes
from rota.spec.states import JobState


def test_a_machine_that_lives_and_was_not_heard_yet_is_not_lost(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        known = set(service.app.loop.installation.nodes)
        two = local_node("two")
        assert known and node_changes(service.app, [], alive=known) == []
        assert node_changes(service.app, [two], alive=known) == [NodeJoined(node=two)]
        lost = node_changes(service.app, [], alive={"two"})
        assert {one.node for one in lost if isinstance(one, NodeLost)} == known

    with_service(tmp_path, test)


def test_a_machine_with_another_name_is_not_offered_twice(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        machine = local_node("m")
        before, now = replace(machine, host="ray.io/node-id=1"), replace(machine, id="m-aaaa", host="ray.io/node-id=1")
        await service.app.loop.append([NodeJoined(node=before)])
        alive = {*service.app.loop.installation.nodes} - {"m"} | {"ray.io/node-id=1", "m-aaaa"}
        joined, lost = node_changes(service.app, [now], alive=alive)
        assert joined == NodeJoined(node=now) and isinstance(lost, NodeLost) and lost.node == "m"

    with_service(tmp_path, test)


def test_machines_told_by_a_gateway_of_another_version_are_no_bug(tmp_path: Path) -> None:
    engine = Engine(Home.of(tmp_path), db_url="", settings=EngineSettings(address="head:6379"))

    async def told(found: Any) -> Any:
        return found

    for found in ([{"host": "one"}], {"nodes": [{"no": "node"}], "alive": []}, {"nodes": []}):
        engine.machines = lambda found=found: told(found)  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(EngineUnavailable):
            asyncio.run(engine.nodes())


@dataclass
class FaultyEngine(PlayedEngine):
    """Fails in a way that nobody foresaw when it is asked for its machines."""

    async def nodes(self) -> Any:
        raise RuntimeError("a bug")


@dataclass
class SlowEngine(PlayedEngine):
    """Tells of its machines, when it is let."""

    let: asyncio.Event = field(default_factory=asyncio.Event)

    async def nodes(self) -> Any:
        await self.let.wait()
        return pretend_nodes("1x2x2", host=LOCAL_HOST), frozenset[str]()


def test_a_restarted_service_decides_nothing_before_it_knows_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def submit(service: Standing) -> None:
        for _ in range(2):
            await service.submit()
        await service.until("hello-1", JobState.ADMITTED)
        await service.until("hello-2", JobState.QUEUED)

    async def decided(app: AppState) -> None:
        loop = app.loop
        for _ in range(2):  # two rounds after the replay
            turned_s = loop.turned_s
            while loop.turned_s == turned_s:
                await asyncio.sleep(0.005)
        story = loop.installation.live[JobId("hello-2")]
        assert story.state is JobState.QUEUED
        engine.let.set()
        while story.state is JobState.QUEUED:
            await asyncio.sleep(0.005)

    with_service(tmp_path, submit, pretend="1x1x2")  # the second has no room
    engine = SlowEngine()
    settings = settings_of(tmp_path, ray_address="head:6379")
    with contextlib.closing(assembly.open_store(settings)) as log:
        joined = [NodeJoined(node=one) for one in pretend_nodes("1x2x2", host=LOCAL_HOST)]
        log.append(joined, writer=Writer(scope=INSTALL_SCOPE, epoch=log.take_epoch(INSTALL_SCOPE)))
    serve_until(decided, settings, engine, monkeypatch)


def settings_of(home: Path, **given: str) -> Settings:
    db_url = postgres.database(home) if postgres.WANTED else f"sqlite:///{home}/rota.db"
    return replace(load_settings({"home": str(home), "port": 0, "db_url": db_url, **given}, environ={}), poll_s=0.01)


def serve_until(
    test: Callable[[AppState], Awaitable[None]],
    settings: Settings,
    engine: PlayedEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run the process of the service as it is until the test is done with its parts."""
    parts, real = list[AppState](), app.make_app

    def make_app(made: AppState) -> object:
        parts.append(made)
        return real(made)

    async def main() -> None:
        serving = asyncio.create_task(serve.serve(settings, listener))
        async with asyncio.timeout(60):
            while not (parts and parts[0].ready):
                await asyncio.sleep(0.005)
            await test(parts[0])
        os.kill(os.getpid(), signal.SIGTERM)
        await serving

    monkeypatch.setattr(assembly, "make_engine", lambda *_: engine)
    monkeypatch.setattr(app, "make_app", make_app)
    with serve.bind(settings) as listener:
        asyncio.run(main())


CORES = "name: {}\nroles:\n  main:\n    run: [sleep, '9']\n    resources: {{cpus: 1}}\n"


def test_a_switch_to_pretended_nodes_removes_the_others_and_jobs_leave_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def before(service: Standing) -> None:
        await service.submit(CORES.format("run"))
        await service.play_start("run-1", "main/0")
        service.app.loop.hold(60.0)
        await service.submit(CORES.format("wait"))
        await service.until("wait-1", JobState.QUEUED)
        lost = NodeLost(node=NodeId("other"), text="no heartbeat")
        await service.app.loop.append([NodeJoined(node=local_node("other")), lost])

    async def after(app: AppState) -> None:
        loop = app.loop
        waiting, running = loop.installation.live[JobId("wait-1")], loop.installation.live[JobId("run-1")]
        while waiting.placement is None or running.state is not JobState.PREEMPTING:
            await asyncio.sleep(0.005)
        assert {bundle.node for bundle in waiting.placement.bundles} <= {"r0n0", "r0n1"}
        asked = [one.event for one in loop.log.read(job=JobId("run-1")) if isinstance(one.event, PreemptAsked)]
        assert [one.reason for one in asked] == [Reason.NODE_REMOVED]
        rows = {one["id"]: one for one in node_list(loop.installation)["items"]}
        assert (rows["local"]["state"], rows["local"]["jobs"]) == ("removed", ["run-1"]) and "other" not in rows
        alerts = alert_list(loop.installation, now=0.0, suspicions={}, beyond={}, queues=(), disk=(), jobs=())["items"]
        assert alerts == [] and removed_holders(loop.installation) == [("local", ["run-1"])]
        assert loop.broken == ()

    with_service(tmp_path, before, pretend="")
    serve_until(after, settings_of(tmp_path, pretend="1x2x2"), PlayedEngine(), monkeypatch)


def test_while_a_given_engine_does_not_answer_status_and_explain_say_that_jobs_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "LOOK_S", 0.01)

    async def test(service: Standing) -> None:
        engine, loop = service.engine, service.app.loop
        engine.away, engine.machines = "nobody answers at head:6379", assembly.wanted_nodes(service.app.settings)
        loop.unknown = tasks.not_known(service.app)
        looking = asyncio.create_task(tasks.keep_nodes(service.app))
        await service.submit()
        while engine.away not in loop.undecided:
            await asyncio.sleep(0.005)
        await service.until("hello-1", JobState.QUEUED)
        assert any(engine.away in one and "no job starts" in one for one in (await service.get("/status"))["warnings"])
        why = (await service.get("/jobs/hello-1/explain"))["why"]
        assert why["code"] == "ENGINE_STARTING" and engine.away in why["text"]
        engine.away = ""
        await service.until("hello-1", JobState.ADMITTED)
        assert (await service.get("/status"))["warnings"] == []
        looking.cancel()

    with_service(tmp_path, test)


@pytest.mark.slow
def test_the_service_ends_when_nobody_looks_at_the_machines_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"home": str(tmp_path), "port": 0, "ray_address": "head:6379", "db_url": f"sqlite:///{tmp_path}/rota.db"}
    settings = load_settings(given, environ={})
    monkeypatch.setattr(assembly, "make_engine", lambda *_: FaultyEngine())
    with serve.bind(settings) as listener, pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(asyncio.wait_for(serve.serve(settings, listener), 20.0))


def test_the_note_of_a_node_names_devices_that_are_not_given_out(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        hot = replace(local_node("hot"), labels=((FAULTS_LABEL, "device 2: too hot"), (CORES_LABEL, "2")))
        await service.app.loop.append([NodeJoined(node=hot)])
        rows = {one["id"]: one["text"] for one in (await service.get("/nodes"))["items"]}
        assert rows["hot"].startswith("device 2: too hot; 2 cores, shared in time")

    with_service(tmp_path, test)
