"""Engine as the service sees it: Ray behind the gateway, or a stand-in where Ray is not installed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from rota.runtime import environ
from rota.runtime.environ import Home
from rota.runtime.job_files import FileRows, installation_of
from rota.runtime.process import ExecResult, RunFolder
from rota.runtime.ray.client import RECORD, GatewayClient, UnusableMachine, has_machines
from rota.runtime.ray.engine import EngineAccess, EngineFiles, EngineSettings, find_engine
from rota.runtime.redis.server import find_running
from rota.runtime.topology import FILE, locate, read_topology
from rota.runtime.usage import machine_usage
from rota.spec import codec
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput, EngineUnavailable, TimedOut
from rota.spec.ids import JobId
from rota.spec.measured import MachineUsage
from rota.spec.resources import Node

if TYPE_CHECKING:
    from rota.service.views.jobs import HeartbeatFields
    from rota.spec.measured import CheckFacts

MASTER_TARGET = "rota.job.master.master:Master"
GIVE_BACK_TARGET = "rota.job.checkpoint:give_back_here"
STATUS_TIMEOUT_S = 2.0


class Engine(Protocol):
    """The engine behind the gateway. Methods are idempotent and raise EngineUnavailable when it cannot be reached."""

    @property
    def unusable(self) -> Sequence[UnusableMachine]:
        """Machines of the engine that get no work, as the last answer of ``nodes`` had it."""
        ...

    @property
    def generation(self) -> int:
        """Rises each time the engine was lost or its gateway started anew: masters must be asked for again."""
        ...

    async def ensure_master(self, job: JobId) -> None:
        """Start the master of a job unless it lives; starts the engine with the first one."""
        ...

    async def sweep(self, job: JobId) -> None:
        """End the master and everything else of a job that is over."""
        ...

    async def jobs(self) -> tuple[JobId, ...]:
        """Jobs of which anything lives in the engine; none while the engine was not started."""
        ...

    async def beats(self, job: JobId) -> dict[str, HeartbeatFields]:
        """The last heartbeat of each instance ``role/rank`` at its master; empty while no master answers."""
        ...

    async def why(self, job: JobId) -> JsonObject:
        """Wait graph of a job, as its master sees it now; empty while no master answers."""
        ...

    async def execute(
        self, job: JobId, role: str, rank: int, argv: Sequence[str], *, timeout_s: float
    ) -> ExecResult | None:
        """Run a command beside an instance to its end: what ``execute_command`` gives; None when that does not run."""
        ...

    async def terminal(
        self, job: JobId, role: str, rank: int, epoch: int, method: str, head: Sequence[object], *, timeout_s: float
    ) -> tuple[int, Any] | None:
        """Ask an instance about a terminal, see ``GatewayClient.terminal``."""
        ...

    async def list_files(self, host: str, job: JobId, area: str, path: str = "", after: str = "") -> FileRows:
        """Files of a job on another machine, see ``JobFiles.listed``."""
        ...

    async def read_file(self, host: str, job: JobId, area: str, path: str, offset: int, count: int) -> bytes:
        """A range of such a file, see ``JobFiles.read``."""
        ...

    async def status(self) -> JsonObject:
        """Parts with their health: ``engine``, ``gateway``, ``registry``; never starts anything."""
        ...

    async def nodes(self) -> tuple[tuple[Node, ...], frozenset[str]]:
        """Machines of a given engine, and the names of all that live, whether they reported yet or not."""
        ...

    async def usage(self, host: str) -> MachineUsage:
        """What a machine does, measured there; see ``machine_usage``."""
        ...

    async def check_machines(self) -> CheckFacts:
        """Names, clocks, ports and bandwidth between all machines, and versions on each."""
        ...

    @property
    def running(self) -> str:
        """Id of the engine that runs on this machine; empty when none does, or it is one that others run."""
        ...

    async def access(self) -> EngineAccess:
        """What a machine needs to join the engine, which is started unless it runs."""
        ...

    async def close(self, *, stop_engine: bool) -> None:
        """Let go; with ``stop_engine`` end the engine and everything in it."""
        ...


def located(node: Node, topology: Mapping[str, Mapping[str, str]]) -> Node:
    """The node with the cells around it and the labels that were found."""
    found = locate(node.id, dict(node.labels), topology)
    return replace(node, cells=found.cells, labels=found.labels)


class NoEngine:
    """Where Ray is not installed: jobs are accepted, planned and explained, and wait for an engine."""

    def __init__(self, why: str) -> None:
        self._why = why
        self.unusable: tuple[UnusableMachine, ...] = ()

    @property
    def generation(self) -> int:
        return 0

    async def ensure_master(self, job: JobId) -> None:
        raise EngineUnavailable(
            f"{job} cannot start: {self._why}", hint="in the source folder: pip install './[engine]'"
        )

    async def sweep(self, job: JobId) -> None:
        """Nothing runs."""

    async def jobs(self) -> tuple[JobId, ...]:
        return ()

    async def beats(self, job: JobId) -> dict[str, HeartbeatFields]:
        return {}

    async def why(self, job: JobId) -> JsonObject:
        return {}

    async def execute(
        self, job: JobId, role: str, rank: int, argv: Sequence[str], *, timeout_s: float
    ) -> ExecResult | None:
        return None

    async def terminal(
        self, job: JobId, role: str, rank: int, epoch: int, method: str, head: Sequence[object], *, timeout_s: float
    ) -> tuple[int, Any] | None:
        return None

    async def list_files(self, host: str, job: JobId, area: str, path: str = "", after: str = "") -> FileRows:
        raise EngineUnavailable(self._why)

    async def read_file(self, host: str, job: JobId, area: str, path: str, offset: int, count: int) -> bytes:
        raise EngineUnavailable(self._why)

    async def status(self) -> JsonObject:
        return {"engine": {"state": "off", "text": self._why}, "gateway": {"state": "off"}}

    async def nodes(self) -> tuple[tuple[Node, ...], frozenset[str]]:
        raise EngineUnavailable(self._why)

    async def usage(self, host: str) -> MachineUsage:
        return await asyncio.to_thread(machine_usage)

    async def check_machines(self) -> CheckFacts:
        raise EngineUnavailable(self._why)

    @property
    def running(self) -> str:
        return ""

    async def access(self) -> EngineAccess:
        raise EngineUnavailable(self._why)

    async def close(self, *, stop_engine: bool) -> None:
        """Nothing to let go of."""


@contextlib.contextmanager
def _unavailable_of(job: str = "") -> Iterator[None]:
    """Raises EngineUnavailable for a request without an answer in time, or that the gateway does not know."""
    try:
        yield
    except (TimedOut, ValueError) as error:
        raise EngineUnavailable(f"{job}: {error}" if job else str(error)) from error


class GatewayEngine:
    """The engine behind the gateway of this home. Gateway and engine start with the first job that needs them."""

    def __init__(self, home: Home, *, db_url: str, settings: EngineSettings) -> None:
        self.unusable: tuple[UnusableMachine, ...] = ()
        self._home, self._db_url, self._settings = home, db_url, settings
        self._client = GatewayClient(home.root, settings)
        self._started = self._given = bool(settings.address)

    @property
    def generation(self) -> int:
        return self._client.generation

    async def ensure_master(self, job: JobId) -> None:
        self._started = True
        args = {"job": job, "db_url": self._db_url, "home": str(self._home.root)}
        log_path = str(self._home.job(job).root / "master.log")
        env = {environ.HOME: str(self._home.root)}  # which a given engine has not
        if many := has_machines(self._settings):
            env[environ.INSTALLATION] = installation_of(self._home.root)
        here = many and self._db_url.startswith("sqlite")  # a file, which other machines do not have
        with _unavailable_of(job):
            await self._client.ensure_master(job, MASTER_TARGET, args, env=env, log_path=log_path, here=here)

    async def sweep(self, job: JobId) -> None:
        with _unavailable_of(job):
            await self._client.sweep(job, give_back=GIVE_BACK_TARGET)

    async def jobs(self) -> tuple[JobId, ...]:
        if not self._started and find_engine(self._home.root) is None:
            return ()
        self._started = True
        with _unavailable_of():
            return await self._client.list_jobs()

    async def beats(self, job: JobId) -> dict[str, HeartbeatFields]:
        if not self._started or not self._client.connected:
            return {}
        try:
            found = await self._client.master_status(job)
        except (EngineUnavailable, TimedOut, ValueError):
            return {}
        return dict(found["beats"]) if found else {}

    async def why(self, job: JobId) -> JsonObject:
        if not self._started or not self._client.connected:
            return {}
        try:
            return await self._client.master_why(job) or {}
        except (EngineUnavailable, TimedOut, ValueError):
            return {}

    async def execute(
        self, job: JobId, role: str, rank: int, argv: Sequence[str], *, timeout_s: float
    ) -> ExecResult | None:
        with _unavailable_of(job):
            return await self._client.execute(job, role, rank, argv, timeout_s=timeout_s)

    async def terminal(
        self, job: JobId, role: str, rank: int, epoch: int, method: str, head: Sequence[object], *, timeout_s: float
    ) -> tuple[int, Any] | None:
        with _unavailable_of(job):
            return await self._client.terminal(job, role, rank, epoch, method, head, timeout_s=timeout_s)

    async def list_files(self, host: str, job: JobId, area: str, path: str = "", after: str = "") -> FileRows:
        with _unavailable_of(host):
            return await self._client.list_files(host, job, area, path, after)

    async def read_file(self, host: str, job: JobId, area: str, path: str, offset: int, count: int) -> bytes:
        with _unavailable_of(host):
            return await self._client.read_file(host, job, area, path, offset, count)

    async def status(self) -> JsonObject:
        gateway = RunFolder(self._home.run).find_alive(RECORD)
        registry = await asyncio.to_thread(find_running, self._home)
        later = {"state": "off"} | ({} if self._started else {"text": "starts with the first job"})
        parts: JsonObject = {
            "gateway": {"restarts": max(0, self._client.restarts - 1)}
            | ({"pid": None, **later} if gateway is None else {"state": "up", "pid": gateway.pid}),
            "engine": later,
            "registry": {"pid": None, **later} if registry is None else {"state": "up", "pid": registry.pid},
        }
        if self._started:
            parts |= await self._engine_part()
        return parts

    async def _engine_part(self) -> Mapping[str, object]:
        try:
            return {"engine": await self._client.engine_status(timeout_s=STATUS_TIMEOUT_S)}
        except (EngineUnavailable, TimedOut) as error:
            return {"gateway": {"state": "down", "text": str(error)}, "engine": {"state": "unknown"}}

    async def usage(self, host: str) -> MachineUsage:
        if not self._given and host == self._settings.host:
            return await asyncio.to_thread(machine_usage)
        with _unavailable_of():
            return await self._client.usage(host)

    async def check_machines(self) -> CheckFacts:
        self._started = True
        with _unavailable_of():
            return await self._client.check_machines()

    @property
    def running(self) -> str:
        head = None if self._given else find_engine(self._home.root)
        return "" if head is None else head.engine

    async def access(self) -> EngineAccess:
        self._started = True
        with _unavailable_of():
            found = await self._client.start_engine()
        token = await asyncio.to_thread(EngineFiles(self._home.root).token.read_text)
        return EngineAccess(engine=found["engine"], address=found.get("address", ""), token=token)

    async def nodes(self) -> tuple[tuple[Node, ...], frozenset[str]]:
        if not self._given and not self.running:
            return (), frozenset()
        try:
            found = await self._client.nodes()
            topology = read_topology(self._home.root / FILE)
            nodes = [codec.from_json_value(Node, one) for one in found["nodes"]]
            self.unusable = tuple(found.get("unusable", ()))
            return tuple(located(node, topology) for node in nodes), frozenset(found["alive"])
        except BadInput as error:  # of the file that says where machines are
            raise EngineUnavailable(error.message, hint=error.hint) from error
        except (TimedOut, ValueError, TypeError, KeyError) as error:  # of another version
            raise EngineUnavailable(str(error)) from error

    async def close(self, *, stop_engine: bool) -> None:
        if stop_engine and self._started:
            await self._client.stop_engine()
        await self._client.close(stop_gateway=stop_engine)
