"""The machines of an engine that somebody else runs, as the service knows them; its looking may not die unseen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from standing import PlayedEngine, Standing, with_service
from tests import postgres

from rota.runtime.environ import Home
from rota.runtime.event_log.interface import INSTALL_SCOPE, Writer
from rota.runtime.node import LOCAL_HOST, local_node
from rota.runtime.ray.engine import EngineSettings
from rota.service.config import load_settings
from rota.service.control.engine import GatewayEngine
from rota.service.process import assembly, serve, tasks
from rota.service.process.assembly import node_changes
from rota.service.rest import app
from rota.service.rest.deps import AppState
from rota.spec.errors import EngineUnavailable
from rota.spec.events import NodeJoined, NodeLost
from rota.spec.ids import JobId
from rota.spec.resources import pretend_nodes
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
    engine = GatewayEngine(Home.of(tmp_path), db_url="", settings=EngineSettings(address="head:6379"))

    async def told(found: Any) -> Any:
        return found

    for found in ([{"host": "one"}], {"nodes": [{"no": "node"}], "alive": []}, {"nodes": []}):
        engine._client.nodes = lambda found=found: told(found)  # pyright: ignore[reportAttributeAccessIssue]
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

    async def main() -> None:
        engine = SlowEngine()
        monkeypatch.setattr(assembly, "make_engine", lambda *_: engine)
        serving = asyncio.create_task(serve.serve(settings, listener))
        async with asyncio.timeout(60):
            while not (parts and parts[0].ready):
                await asyncio.sleep(0.005)
            loop = parts[0].loop
            for _ in range(2):  # two rounds after the replay
                turned_s = loop.turned_s
                while loop.turned_s == turned_s:
                    await asyncio.sleep(0.005)
            story = loop.installation.live[JobId("hello-2")]
            assert story.state is JobState.QUEUED
            engine.let.set()
            while story.state is JobState.QUEUED:
                await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        await serving

    def make_app(app: AppState) -> object:
        parts.append(app)
        return real(app)

    with_service(tmp_path, submit, pretend="1x1x2")  # the second has no room
    db_url = postgres.database(tmp_path) if postgres.WANTED else f"sqlite:///{tmp_path}/rota.db"
    given = {"home": str(tmp_path), "port": 0, "ray_address": "head:6379", "db_url": db_url}
    settings, parts, real = replace(load_settings(given, environ={}), poll_s=0.01), list[AppState](), app.make_app
    with contextlib.closing(assembly.open_store(settings)) as log:
        joined = [NodeJoined(node=one) for one in pretend_nodes("1x2x2", host=LOCAL_HOST)]
        log.append(joined, writer=Writer(scope=INSTALL_SCOPE, epoch=log.take_epoch(INSTALL_SCOPE)))
    monkeypatch.setattr(app, "make_app", make_app)
    with serve.bind(settings) as listener:
        asyncio.run(main())


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
