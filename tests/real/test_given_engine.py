"""A service on an engine that somebody else runs: its machines, one that joins later, one that leaves."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.real.conftest import HOST, Engine
from tests.real.jobs import deep
from tests.real.nodes import Raylets
from tests.real.test_service import Installation, free_port, of_home
from tests.runtime.asking import ask_once

from rota.runtime import process
from rota.runtime.ray.client import GatewayClient
from rota.runtime.ray.engine import EngineSettings
from rota.service.config import load_settings
from rota.service.process import daemon

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), deep]

LIMIT_S = 180.0


def until(look: Callable[[], Any], wanted: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while (seen := look()) != wanted:
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)


def _left(home: Path, address: str) -> tuple[str, ...]:
    async def ask() -> tuple[str, ...]:
        client = GatewayClient(home, EngineSettings(address=address))
        try:
            return await client.list_jobs()
        finally:
            await client.close(stop_gateway=True)

    return asyncio.run(ask())


def test_jobs_run_on_the_machines_of_a_given_engine_and_on_one_that_joins_later(engine: Engine) -> None:
    given = {"port": free_port(), "ray_address": engine.address}
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        site, raylets = Installation(load_settings({"home": folder, **given}, environ={})), Raylets(engine)

        def states() -> dict[str, str]:
            return {one["id"]: one["state"] for one in site.ask("/nodes")["items"]}

        try:
            site.up()
            raylets.ensure("second", cpus=4)
            until(states, {HOST: "healthy", "second": "healthy"})
            say = "import os, pathlib, time; print(os.environ['ROTA_HOME'], flush=True)\n"
            say += f"while not pathlib.Path('{folder}/apart.flag').exists(): time.sleep(0.05)"
            role = {"run": [sys.executable, "-c", say], "replicas": 2, "apart": [{"role": "self", "level": "node"}]}
            source = json.dumps({"name": "apart", "roles": {"main": role}})
            job = site.ask("/jobs", {"source": source, "filename": "job.json"})["id"]
            running = site.running(job)
            assert {one["node"] for one in running["instances"]} == {HOST, "second"}
            site.finish(job)
            assert site.ended(job)["state"] == "SUCCEEDED"
            assert {line["text"] for line in site.ask(f"/jobs/{job}/logs")["items"]} == {folder}
            assert site.ask("/status")["parts"]["engine"]["hosts"] == [HOST, "second"]
            raylets.stop()
            until(states, {HOST: "healthy"})
            source = json.dumps({"name": "left", "roles": {"main": {"run": ["sleep", "600"]}}})
            left = site.ask("/jobs", {"source": source, "filename": "job.json"})["id"]
            site.running(left)
            assert left in ask_once(Path(folder), "list_jobs", {})
        finally:
            ended = daemon.down(site.settings, force=True)
            assert _left(Path(folder), engine.address) == ()
            raylets.stop()
        assert (ended["state"], of_home(Path(folder))) == ("down", [])
        assert process.is_alive(engine.state.raylet)


def test_two_installations_on_one_engine_never_hand_out_the_same_machine(engine: Engine) -> None:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        first, second = (
            Installation(
                load_settings(
                    {"home": f"{folder}/{name}", "port": free_port(), "ray_address": engine.address}, environ={}
                )
            )
            for name in ("a", "b")
        )

        def nodes(site: Installation) -> list[str]:
            return [one["id"] for one in site.ask("/nodes")["items"] if one["state"] == "healthy"]

        def told() -> bool:
            engine_part = second.ask("/status")["parts"]["engine"]
            return f"{HOST}: used by the installation in {folder}/a on " in engine_part.get("text", "")

        try:
            first.up()
            until(lambda: nodes(first), [HOST])
            second.up()
            until(told, True)
            assert (nodes(first), nodes(second)) == ([HOST], [])
            assert daemon.down(first.settings, force=True)["state"] == "down"
            until(lambda: nodes(second), [HOST])
        finally:
            ended = [daemon.down(site.settings, force=True)["state"] for site in (first, second)]
        assert ended == ["down", "down"]
