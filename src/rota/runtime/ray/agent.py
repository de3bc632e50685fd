"""Agent of a machine: an actor that reads files of jobs there by range; that of the service's machine also sends code.

It travels over the calls of the engine, so that no machine has a listener for it. A machine that sees the home of the
service needs none. What a start takes from it: ``localize.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rota.runtime import environ, process, secrets
from rota.runtime.code_pack import CodeCache
from rota.runtime.environ import Home
from rota.runtime.job_files import (
    FIRST_READ_S,
    READ_S,
    FileEntries,
    JobFiles,
    installation_of,
    machine_home,
)
from rota.runtime.ray.engine import host_selector
from rota.spec.errors import EngineUnavailable, RotaError

T = TypeVar("T")

SERVICE = "service"
"""Name of the agent of the service's machine; others have the name of their machine."""
CALLS_MAX = 16
PART_BYTES = 4 * 2**20
ANSWER_S = 30.0


def namespace_of(namespace: str) -> str:
    """Where the agents of an installation live in Ray, apart from its jobs."""
    return f"{namespace}/agents"


class Agent:
    """Reads below the home that processes of its machine use. Methods block; Ray runs ``CALLS_MAX`` at once."""

    def __init__(self, service_home: str, installation: str) -> None:
        self._home = machine_home(service_home, installation)
        self._files = JobFiles(self._home)

    def listed(self, job: str, area: str, path: str, after: str) -> FileEntries | RotaError:
        """See ``JobFiles.listed``."""
        return _value(lambda: self._files.listed(job, area, path, after))

    def read(self, job: str, area: str, path: str, offset: int, count: int) -> bytes | RotaError:
        """See ``JobFiles.read``."""
        return _value(lambda: self._files.read(job, area, path, offset, count))

    def give_back(self, job: str, target: str) -> None:
        """Call the cleanup function ``target`` (``module:name`` of job and home) for an ended job on this machine."""
        module, _, name = target.partition(":")
        getattr(importlib.import_module(module), name)(job, str(self._home.root))

    def code(self, job: str, workdir: str) -> tuple[str, int] | RotaError:
        """Digest and bytes of the code of a job; it is packed now if that was not done at its submit."""
        return _value(lambda: packed(self._home, job, workdir))

    def code_part(self, digest: str, offset: int) -> bytes:
        """The next ``PART_BYTES`` of an archive."""
        with CodeCache(self._home.code_archives).path(digest).open("rb") as file:
            return os.pread(file.fileno(), PART_BYTES, offset)

    def secrets(self, named: str) -> dict[str, str] | RotaError:
        """Values of the secrets that ``ROTA_SECRETS`` of a process names: they never lie on another machine's disk."""
        return _value(lambda: secrets.open_from_environ({environ.HOME: str(self._home.root), secrets.VARIABLE: named}))


def _value(work: Callable[[], T]) -> T | RotaError:
    try:
        return work()
    except RotaError as error:  # raised where it was asked for: Ray would wrap it
        return error


def packed(home: Home, job: str, workdir: str) -> tuple[str, int]:
    """Digest and bytes of the archive of a job, made unless it was made before. Raises BadInput for a bad workdir."""
    archives, named = CodeCache(home.code_archives), home.job(job).code_name
    with contextlib.suppress(FileNotFoundError):
        digest = named.read_text(encoding="utf-8")
        if (found := archives.find(digest)) is not None:
            return digest, found.stat().st_size
    digest = archives.pack(Path(workdir), without=home.root)
    home.job(job).make()
    process.write_private(named, digest)
    return digest, archives.path(digest).stat().st_size


class Agents:
    """The agents of an installation as its gateway asks them; each is started when it is first needed."""

    def __init__(self, namespace: str, home: Home) -> None:
        self._namespace, self._home = namespace, home
        self.installation = installation_of(home.root)
        """Empty for an engine that never had another machine."""
        self._known = dict[str, tuple[str, Any]]()
        """By machine: Ray's id of its node, and the agent there."""
        self._started = set[str]()
        """Machines whose agent has answered, or had the time to start."""

    async def serve(self) -> None:
        """Let the agent of this machine send code and secrets."""
        if SERVICE not in self._known:
            await asyncio.to_thread(self._start, SERVICE, ray.get_runtime_context().get_node_id())

    async def ask(self, node: str, host: str, method: str, *args: object) -> Any:
        """Ask the agent of a node, see ``host_selector``; the first time it is started.

        Raises EngineUnavailable unless it answers in ``READ_S``, the first time in ``FIRST_READ_S``.
        """
        limit_s = READ_S if host in self._started else FIRST_READ_S
        try:
            async with asyncio.timeout(limit_s):
                known = self._known.get(host) or await asyncio.to_thread(self._find, host)
                answer = await getattr(known[1], method).remote(*args)
        except TimeoutError:
            why = f"nothing came within {limit_s:g} s"
            self._started.add(host)
        except (RayError, EngineUnavailable) as error:
            why = error.message if isinstance(error, EngineUnavailable) else "the engine does not reach it"
            self._started.discard(host)
        else:
            self._started.add(host)
            return answer
        self._known.pop(host, None)
        raise EngineUnavailable(f"{node} does not answer: {why}")

    def _find(self, host: str) -> tuple[str, Any]:
        wanted = host_selector(host).items()
        rows = [row for row in ray.nodes() if row["Alive"] and wanted <= row["Labels"].items()]
        if len(rows) != 1:
            raise EngineUnavailable("it is not a machine of the engine now")
        return self._start(host, rows[0]["NodeID"])

    def _start(self, name: str, node_id: str) -> tuple[str, Any]:
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor: Any = ray.remote(Agent)
        started = actor.options(
            name=name,
            namespace=namespace_of(self._namespace),
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=CALLS_MAX,
            scheduling_strategy=here,
        ).remote(str(self._home.root), self.installation)
        known = self._known[name] = node_id, started
        return known


def end_agents(namespace: str) -> None:
    """End every agent of an installation. Blocks."""
    where = namespace_of(namespace)
    rows: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    for row in rows:
        if row["namespace"] == where:
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(row["name"], namespace=where), no_restart=True)
