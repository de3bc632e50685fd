"""Idle processes of the engine, started ahead of need: a master or instance takes one instead of waiting for Python.

A raylet starts them when it is asked to, for one driver: a detached actor of anybody may be made in them, other work of
another driver may not, and they end with that driver.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import ray
from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc

from rota.runtime import process
from rota.runtime.engine import EngineState

PAUSE_S = (3.0, 30.0)
"""Between two looks: first, and at most. The first is long enough for a job that took processes to be up by itself."""
ANSWER_MAX_S = 10.0
KEEP_S = 365 * 86_400
"""So long the raylet does not end an idle process by itself."""
_IDLE, _STARTING = "ray::IDLE", "default_worker.py"


async def keep_warm(state: EngineState, count: int) -> None:
    """Keep ``count`` idle processes under the raylet while it lives. To be run by a driver of that engine.

    None is added while others start, which need the cores; what does not come is asked for ever more seldom.
    """
    pause_s, pause_max_s = PAUSE_S
    while process.is_alive(state.raylet):
        await asyncio.sleep(pause_s)
        enough = await warm_up(state, count)
        pause_s = PAUSE_S[0] if enough else min(2 * pause_s, pause_max_s)


async def warm_up(state: EngineState, count: int) -> bool:
    """Ask for as many processes as are missing, unless some start; True when none is missing."""
    commands = [process.command_line(pid) for pid in process.children_of(state.raylet.pid)]
    missing = count - sum(command.startswith(_IDLE) for command in commands)
    if missing > 0 and not any(_STARTING in command for command in commands):
        with contextlib.suppress(grpc.RpcError):  # the raylet is busy, or on its way out: asked again
            await asyncio.to_thread(_start, state, missing)
    return missing <= 0


def _start(state: EngineState, count: int) -> None:
    """Ask the raylet of this node for processes; it answers before they are there."""
    nodes: list[dict[str, Any]] = [one for one in ray.nodes() if one["Alive"] and one["NodeID"] == _own_node()]
    if not nodes:
        return  # not known as alive yet, or no more: asked again
    node = nodes[0]
    languages: Any = common_pb2
    proto: Any = node_manager_pb2
    request = proto.PrestartWorkersRequest(
        language=languages.Language.Value("PYTHON"),
        num_workers=count,
        keep_alive_duration_secs=KEEP_S,
        job_id=bytes.fromhex(ray.get_runtime_context().get_job_id()),
    )
    token = Path(state.token_path).read_text().strip()
    with grpc.insecure_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
        stub: Any = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
        stub.PrestartWorkers(request, timeout=ANSWER_MAX_S, metadata=(("authorization", f"Bearer {token}"),))


def _own_node() -> str:
    return str(ray.get_runtime_context().get_node_id())
