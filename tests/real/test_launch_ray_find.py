"""Who is found alive on Ray when a process does not answer; the answers are made up, no engine runs for them."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engine")]
NAME = "job-1/actor/0/3"


def actor_that_fails(error: Exception) -> Any:
    future = Future[None]()
    future.set_exception(error)
    begin = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: future))
    return SimpleNamespace(begin=begin, _actor_id=SimpleNamespace(hex=lambda: "a"))


@pytest.mark.parametrize(
    ("error", "state", "alive"),
    [
        ("ActorUnavailableError", "ALIVE", True),
        ("ActorUnavailableError", "DEAD", False),
        ("ActorDiedError", "ALIVE", False),
    ],
)
def test_a_process_that_cannot_be_reached_is_alive_if_the_table_says_so(
    monkeypatch: pytest.MonkeyPatch, error: str, state: str, alive: bool
) -> None:
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    from rota.runtime.ray import launcher as ray_launcher

    failures = {
        "ActorUnavailableError": ActorUnavailableError("the connection broke", None),
        "ActorDiedError": ActorDiedError(),
    }

    async def body() -> None:
        launcher = ray_launcher.RayLauncher("rota/test")
        launcher._actors[NAME] = actor_that_fails(failures[error])
        found = await launcher.find_one(NAME)
        assert (found is not None and found.pid == os.getpid()) is alive
        await launcher.close()

    monkeypatch.setattr(ray_launcher.state, "actors", lambda _: {"Pid": os.getpid(), "State": state})
    asyncio.run(body())
