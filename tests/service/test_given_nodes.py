"""The machines of an engine that somebody else runs, as the service knows them; its looking may not die unseen."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from standing import PlayedEngine, Standing, with_service

from rota.runtime.devices import local_node
from rota.runtime.engine import EngineSettings
from rota.runtime.environ import Home
from rota.service import assembly, serve
from rota.service.assembly import node_changes
from rota.service.config import load_settings
from rota.service.engine import GatewayEngine
from rota.spec.errors import EngineUnavailable
from rota.spec.events import NodeJoined, NodeLost


def test_a_machine_that_lives_and_was_not_heard_yet_is_not_lost(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        known = set(service.doors.loop.installation.nodes)
        two = local_node("two")
        assert known and node_changes(service.doors, [], alive=known) == []
        assert node_changes(service.doors, [two], alive=known) == [NodeJoined(node=two)]
        lost = node_changes(service.doors, [], alive={"two"})
        assert {one.node for one in lost if isinstance(one, NodeLost)} == known

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


@pytest.mark.slow
def test_the_service_ends_when_nobody_looks_at_the_machines_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"home": str(tmp_path), "port": 0, "ray_address": "head:6379", "db_url": f"sqlite:///{tmp_path}/rota.db"}
    settings = load_settings(given, environ={})
    monkeypatch.setattr(assembly, "make_engine", lambda *_: FaultyEngine())
    with serve.bind(settings) as listener, pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(asyncio.wait_for(serve.serve(settings, listener), 20.0))
