"""Start GCS and raylet of one node through Ray's own machinery, then become their watcher.

Run by ``rota.runtime.ray.engine.start_engine`` as a child with its environment set: Ray reads it when it is imported.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from ray._private import services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import (  # Ray's annotations of its extension leave these out
    DASHBOARD_AGENT_LISTEN_PORT_NAME,  # pyright: ignore[reportAttributeAccessIssue] - as above
    persist_port,  # pyright: ignore[reportAttributeAccessIssue] - as above
)

from rota.runtime import process
from rota.runtime.ray import raylet_child
from rota.runtime.ray.engine import HOST_LABEL, EngineState, Storage, free_port, write_state
from rota.spec.errors import EngineUnavailable

_ray_start_process = services.start_ray_process
_GCS_READY_S = 45.0
_MEMORY_BYTES = 1 << 44


class NodePlan(TypedDict):
    """What ``start_engine`` asks of one node; it has more fields of ``EngineSettings``, which nothing reads here."""

    engine: str
    host: str
    head: bool
    address: str
    cpus: float
    object_store_bytes: int
    folder: str
    token_path: str
    state_path: str
    storage: Storage
    environment: dict[str, str]
    listen: str
    labels: dict[str, str]


class _Node(Node):
    """A node whose raylet waits for no agent of the dashboard, and that ends when its raylet ends before it is ready.

    A raylet waits for 15 s, which no setting changes, for each port that an agent is to choose itself, and then aborts:
    on a machine with much to do the imports of an agent take longer. It takes ports that are given; that of the HTTP
    server of the agent is the one without an option, and is read from the file that the agent would write.
    """

    def start_ray_processes(self) -> None:
        port = self.dashboard_agent_listen_port
        persist_port(self.get_session_dir_path(), self.node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
        super().start_ray_processes()
        raylet = self.all_processes["raylet"][0].process
        threading.Thread(target=_end_with, args=(raylet,), name="rota-raylet", daemon=True).start()


def _start_process(command: Sequence[str], kind: str, **options: Any) -> services.ProcessInfo:
    """As Ray's own, but a raylet has an idle process for the agent of the dashboard, see ``raylet_child``."""
    option, idle = "--dashboard_agent_command=", (sys.executable, "-I", "-S", raylet_child.__file__, raylet_child.AGENT)
    words = [option + subprocess.list2cmdline(idle) if word.startswith(option) else word for word in command]
    return _ray_start_process(words, kind, **options)


def _end_with(raylet: subprocess.Popen[bytes]) -> None:
    """End this process when the raylet does; ``exec``, when the node is ready, ends the thread."""
    code = raylet.wait()
    print(f"the raylet ended with {code} before it was ready", file=sys.stderr, flush=True)  # noqa: T201 - the log
    os._exit(1)


class _Head(_Node):
    """A head without Ray's dashboard server; it notices at once when its GCS cannot start."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Left out: nothing here reads it, and it costs a process of 100 MB."""

    def start_gcs_server(self) -> None:
        super().start_gcs_server()
        child = self.all_processes["gcs_server"][0].process
        host, _, port = self.gcs_address.rpartition(":")
        deadline = time.monotonic() + _GCS_READY_S
        while not _listens(host, int(port)):
            if child.poll() is not None:
                raise EngineUnavailable(f"the GCS ended with {child.returncode}")
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"the GCS does not listen after {_GCS_READY_S:.0f} s")
            time.sleep(0.02)


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=1.0):
            return True
    except OSError:
        return False


def start_node(plan: NodePlan) -> EngineState:
    """Start the processes of one node as the plan says. Raises EngineUnavailable, or what Ray raises."""
    address: str = plan["address"]
    head: bool = plan["head"]
    agents = [free_port(plan["listen"]) for _ in range(4)]
    params = RayParams(
        num_cpus=int(plan["cpus"]),
        num_gpus=0,
        memory=_MEMORY_BYTES,
        labels={**plan["labels"], HOST_LABEL: plan["host"]},
        object_store_memory=plan["object_store_bytes"],
        temp_dir=plan["folder"] if head else f"{plan['folder']}/{plan['host']}",
        session_name="s" if head else None,
        node_ip_address=plan["listen"],
        include_dashboard=False,
        no_monitor=True,
        include_log_monitor=False,  # pyright: ignore[reportArgumentType] - Ray's annotation is wrong, it is a flag
        gcs_server_port=int(address.rpartition(":")[2]) if head else None,
        gcs_address=None if head else address,
        setup_worker_path=raylet_child.__file__,
        metrics_agent_port=agents[0],
        metrics_export_port=agents[1],
        dashboard_agent_listen_port=agents[2],
        runtime_env_agent_port=agents[3],
    )
    services.start_ray_process = _start_process
    node = (_Head if head else _Node)(params, head=head, shutdown_at_exit=False, spawn_reaper=False)
    raylet = process.identify(node.all_processes["raylet"][0].process.pid)
    assert raylet is not None
    gcs = node.all_processes["gcs_server"][0].process if head else None
    return EngineState(
        engine=plan["engine"],
        host=plan["host"],
        address=address,
        folder=plan["folder"],
        token_path=plan["token_path"],
        storage=plan["storage"],
        raylet=raylet,
        session=process.own_id(),
        boot_id=process.boot_id(),
        environment=plan["environment"],
        gcs=process.identify(gcs.pid) if gcs is not None else None,
        gcs_command=tuple(gcs.args) if gcs is not None else (),
    )


def main(plan: NodePlan) -> None:
    """Start, write the state, and become the watcher in the same process: children stay children, Ray is unloaded."""
    process.become_subreaper()
    path = Path(plan["state_path"])
    write_state(path, start_node(plan))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "rota.runtime.ray.engine", "watch", str(path)])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
