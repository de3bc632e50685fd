"""Engine as the service sees it: Ray behind the gateway, or a stand-in where Ray is not installed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rota.runtime import environ
from rota.runtime.environ import Home
from rota.runtime.job_files import installation_of
from rota.runtime.process import RunFolder
from rota.runtime.ray.client import NOTHING, RECORD, GatewayClient, UnusableMachine, has_machines
from rota.runtime.ray.engine import EngineAccess, EngineFiles, EngineSettings, find_engine
from rota.runtime.redis.server import find_running
from rota.runtime.topology import FILE, locate, read_topology
from rota.runtime.usage import machine_usage
from rota.spec import codec
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput, EngineUnavailable
from rota.spec.ids import JobId
from rota.spec.measured import MachineUsage
from rota.spec.resources import Node

if TYPE_CHECKING:
    from rota.service.views.jobs import HeartbeatFields
    from rota.spec.measured import CheckFacts

MASTER_TARGET = "rota.job.master.master:Master"
GIVE_BACK_TARGET = "rota.job.checkpoint:give_back_here"
STATUS_TIMEOUT_S = 2.0


class Engine(GatewayClient):
    """The engine behind the gateway of this home; both start with the first job that needs them.

    Methods that need only the gateway are those of ``GatewayClient``. Methods are idempotent and raise
    EngineUnavailable when it cannot be reached.
    """

    def __init__(self, home: Home, *, db_url: str, settings: EngineSettings) -> None:
        super().__init__(home.root, settings)
        self.unusable: tuple[UnusableMachine, ...] = ()
        """Machines of the engine that get no work, as the last answer of ``nodes`` had it."""
        self._folders, self._db_url = home, db_url
        self._started = self._given = bool(settings.address)

    async def ensure_master(self, job: JobId) -> None:
        """Start the master of a job unless it lives; starts the engine with the first one."""
        self._started = True
        home = str(self._folders.root)
        args = {"job": job, "db_url": self._db_url, "home": home}
        env = {environ.HOME: home}  # not set on an external Ray cluster
        if many := has_machines(self._settings):
            env[environ.INSTALLATION] = installation_of(self._folders.root)
        here = many and self._db_url.startswith("sqlite")  # a file, which other machines do not have
        log_path = str(self._folders.job(job).root / "master.log")
        await self.start_master(job, MASTER_TARGET, args, env=env, log_path=log_path, here=here)

    async def jobs(self) -> tuple[JobId, ...]:
        """Jobs of which anything lives in the engine; none while the engine was not started."""
        if not self._started and find_engine(self._folders.root) is None:
            return ()
        self._started = True
        return await self.list_jobs()

    async def beats(self, job: JobId) -> dict[str, HeartbeatFields]:
        """The last heartbeat of each instance ``role/rank`` at its master; empty while no master answers."""
        if not self._started or not self.connected:
            return {}
        try:
            found = await self.master_status(job)
        except EngineUnavailable:
            return {}
        return dict(found["beats"]) if found else {}

    async def why(self, job: JobId) -> JsonObject:
        """Wait graph of a job, as its master sees it now; empty while no master answers."""
        if not self._started or not self.connected:
            return {}
        try:
            return await self.master_why(job) or {}
        except EngineUnavailable:
            return {}

    async def status(self) -> JsonObject:
        """Parts with their health: ``engine``, ``gateway``, ``registry``; never starts anything."""
        gateway = RunFolder(self._folders.run).find_alive(RECORD)
        registry = await asyncio.to_thread(find_running, self._folders)
        later = {"state": "off"} | ({} if self._started else {"text": "starts with the first job"})
        parts: JsonObject = {
            "gateway": {"restarts": max(0, self.restarts - 1)}
            | ({"pid": None, **later} if gateway is None else {"state": "up", "pid": gateway.pid}),
            "engine": later,
            "registry": {"pid": None, **later} if registry is None else {"state": "up", "pid": registry.pid},
        }
        if self._started:
            parts |= await self._engine_part()
        return parts

    async def _engine_part(self) -> Mapping[str, object]:
        try:
            return {"engine": await self.engine_status(timeout_s=STATUS_TIMEOUT_S)}
        except EngineUnavailable as error:
            return {"gateway": {"state": "down", "text": str(error)}, "engine": {"state": "unknown"}}

    async def usage(self, host: str, *, timeout_s: float = 30.0) -> MachineUsage:
        """What a machine does, measured there; see ``machine_usage``."""
        if not self._given and host == self._settings.host:
            return await asyncio.to_thread(machine_usage)
        return await super().usage(host, timeout_s=timeout_s)

    async def check_machines(self, *, timeout_s: float = 800.0) -> CheckFacts:
        """Names, clocks, ports and bandwidth between all machines, and versions on each."""
        self._started = True
        return await super().check_machines(timeout_s=timeout_s)

    @property
    def running(self) -> str:
        """Id of the engine that runs on this machine; empty when none does, or it is one that others run."""
        head = None if self._given else find_engine(self._folders.root)
        return "" if head is None else head.engine

    async def access(self) -> EngineAccess:
        """What a machine needs to join the engine, which is started unless it runs."""
        self._started = True
        found = await self.start_engine()
        token = await asyncio.to_thread(EngineFiles(self._folders.root).token.read_text)
        return EngineAccess(engine=found["engine"], address=found.get("address", ""), token=token)

    async def nodes(self) -> tuple[tuple[Node, ...], frozenset[str]]:
        """Machines of a given engine that reported, and the names of all live ones, reported or not."""
        if not self._given and not self.running:
            return (), frozenset()
        found = await self.machines()
        try:
            topology = read_topology(self._folders.root / FILE)
            nodes = [codec.from_json_value(Node, one) for one in found["nodes"]]
            self.unusable = tuple(found.get("unusable", ()))
            return tuple(located(node, topology) for node in nodes), frozenset(found["alive"])
        except BadInput as error:  # a mistake in topology.yaml must not end the service: jobs run on
            raise EngineUnavailable(error.message, hint=error.hint) from error
        except (ValueError, TypeError, KeyError) as error:  # a gateway of another version answers in another form
            raise EngineUnavailable(str(error)) from error


class NoEngine(Engine):
    """Where Ray is not installed: jobs are accepted, planned and explained, and wait for an engine."""

    WHY = "Ray is not installed"

    async def request(
        self, op: str, args: Mapping[str, object], *, timeout_s: float, request_id: str | None = None
    ) -> Any:
        if op not in NOTHING:
            raise EngineUnavailable(self.WHY)
        return NOTHING[op]

    async def ensure_master(self, job: JobId) -> None:
        hint = "in the source folder: pip install './[engine]'"
        raise EngineUnavailable(f"{job} cannot start: {self.WHY}", hint=hint)

    async def status(self) -> JsonObject:
        return {"engine": {"state": "off", "text": self.WHY}, "gateway": {"state": "off"}}

    async def nodes(self) -> tuple[tuple[Node, ...], frozenset[str]]:
        raise EngineUnavailable(self.WHY)


def located(node: Node, topology: Mapping[str, Mapping[str, str]]) -> Node:
    """The node with the cells around it and the labels that were found."""
    found = locate(node.id, dict(node.labels), topology)
    return replace(node, cells=found.cells, labels=found.labels)
