"""A whole service in one test: real log, loop, scheduler, intake, app; only the engine is played by the test."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
from tests import postgres
from tests.service.described import check

from rota.job.core.desired import timers
from rota.runtime.clock import SystemClock
from rota.runtime.environ import Home
from rota.runtime.event_log.interface import EventLog, Writer, master_scope
from rota.runtime.event_log.sql import SqlLog
from rota.runtime.execute import execute_command
from rota.runtime.job_files import FileEntries, JobFiles
from rota.runtime.ray.engine import EngineAccess
from rota.runtime.terminal import Terminals
from rota.service.config import load_settings
from rota.service.process import assembly
from rota.service.process.assembly import assemble, begin, node_changes, take_nodes, wanted_nodes
from rota.service.rest.app import make_app
from rota.service.rest.connections import Connections, server_config
from rota.service.rest.deps import AppState
from rota.service.rest.routes import logs
from rota.spec.errors import EngineUnavailable
from rota.spec.events import (
    GangReserved,
    InstanceReady,
    InstanceStarted,
    JobEvent,
    MasterStarted,
    Reattached,
    TimerFired,
)
from rota.spec.ids import Epoch, GangId, InstanceId, JobId, NodeId
from rota.spec.resources import Node
from rota.spec.states import JobState

logs.SETTLE_S = 0.2  # nothing writes after the end here: a second of it in every test that follows is waiting
T = TypeVar("T")
LIMIT_S = 60.0
HELLO = "name: hello\nroles:\n  main:\n    run: [echo, hi]\n    resources: {gpus: 2}\n"


@dataclass
class PlayedEngine:
    """The engine as a test plays it: it notes what it is asked for. ``away`` makes it unreachable."""

    asked: list[JobId] = field(default_factory=list)
    terminals: Terminals = field(default_factory=lambda: Terminals(SystemClock()))
    swept: list[JobId] = field(default_factory=list)
    alive: set[JobId] = field(default_factory=set)
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    waits: dict[str, Any] = field(default_factory=dict)
    generation: int = 1
    away: str = ""
    machines: tuple[Node, ...] = ()
    homes: dict[str, Path] = field(default_factory=dict)
    """Homes of machines that do not see that of the service."""
    unusable: tuple[dict[str, str], ...] = ()

    async def ensure_master(self, job: JobId) -> None:
        if self.away:
            raise EngineUnavailable(self.away)
        self.asked.append(job)
        self.alive.add(job)

    async def sweep(self, job: JobId, *, give_back: str) -> None:
        self.swept.append(job)
        self.alive.discard(job)

    async def jobs(self) -> tuple[JobId, ...]:
        return tuple(self.alive)

    async def beats(self, job: JobId) -> dict[str, dict[str, Any]]:
        return self.told

    async def why(self, job: JobId) -> dict[str, Any]:
        return self.waits

    async def execute(
        self, job: JobId, role: str, rank: int, argv: Sequence[str], *, timeout_s: float
    ) -> dict[str, Any] | None:
        return await execute_command(argv, timeout_s=timeout_s) if job in self.alive else None

    async def terminal(
        self, job: JobId, role: str, rank: int, epoch: int, method: str, head: Sequence[Any], *, timeout_s: float
    ) -> tuple[int, Any] | None:
        if job not in self.alive:
            return None
        if method == "open_terminal":
            name, user, argv, term, size = head
            return 1, await self.terminals.start(name, user, argv, {**os.environ, "TERM": term}, size)
        if method == "read_terminal":
            found: Any = await self.terminals.read(*head)
        else:
            name, user, offset, data, size, leave = head
            found = self.terminals.write(name, user, offset, base64.b64decode(data), size, leave)
        return None if found is None else (1, found)

    async def list_files(self, host: str, job: JobId, area: str, path: str = "", after: str = "") -> FileEntries:
        return self._files(host).listed(job, area, path, after)

    async def read_file(self, host: str, job: JobId, area: str, path: str, offset: int, count: int) -> bytes:
        return self._files(host).read(job, area, path, offset, count)

    def _files(self, host: str) -> JobFiles:
        """Of another machine: a home of its own in the place of that."""
        if self.away or host not in self.homes:
            raise EngineUnavailable(f"{host} does not answer: {self.away or 'it is not a machine of the engine now'}")
        return JobFiles(Home.of(self.homes[host]))

    async def nodes(self) -> tuple[tuple[Node, ...], frozenset[str]]:
        if self.away:
            raise EngineUnavailable(self.away)
        return self.machines, frozenset(one.id for one in self.machines)

    async def usage(self, host: str) -> dict[str, Any]:
        process = {"job": "learn-1", "member": "actor/0", "pid": 7, "cores": 0.5, "memory_bytes": 2**28}
        network = {"name": "eth0", "address": "10.0.0.5", "bits_per_s": 10**10}
        device = {"index": 0, "name": "H200", "busy": 0.5, "memory_used_bytes": 2**30, "memory_bytes": 2**37}
        return {
            "period_s": 0.5,
            "cores": 8,
            "cores_busy": 1.5,
            "load": 2.0,
            "memory_bytes": 2**34,
            "memory_used_bytes": 2**33,
            "shared_bytes": 2**33,
            "shared_used_bytes": 2**20,
            "network": [{**network, "received_bytes_per_s": 1e6, "sent_bytes_per_s": 0.0}],
            "disks": [{"path": "/", "total_bytes": 2**40, "used_bytes": 2**39}],
            "devices": [{**device, "power_w": 300.0, "temperature_c": None}],
            "processes": [process],
        }

    async def check_machines(self) -> dict[str, Any]:
        versions = {"python": "3.11.4", "ray": "2.60.0", "rota": "0.1.0", "torch": "2.9.0"}
        one = {"node": "m0", "host_name": "m0", "address": "10.0.0.5", "versions": versions, "error": ""}
        other = {
            **one,
            "node": "m1",
            "host_name": "m1",
            "address": "10.0.0.6",
            "versions": versions | {"torch": "2.8.0"},
        }
        seen = {"resolves": True, "latency_s": 0.0002, "skew_s": 0.8, "bytes_per_s": 1e9, "error": ""}
        there, back = (
            {**seen, "source": "m0", "target": "m1"},
            {**seen, "source": "m1", "target": "m0", "resolves": False},
        )
        return {"machines": [one, other], "pairs": [there, back]}

    @property
    def running(self) -> str:
        return f"e{self.generation}"

    async def access(self) -> EngineAccess:
        return EngineAccess(engine=self.running, address="10.0.0.5:20000", token="t" * 64)

    async def status(self) -> dict[str, Any]:
        return {"engine": {"state": "running", "engine": f"e{self.generation}"}, "gateway": {"state": "up"}}

    async def close(self) -> None:
        await self.terminals.close()


@dataclass
class Standing:
    """A service that runs, with a client that may ask it."""

    app: AppState
    log: EventLog
    engine: PlayedEngine
    http: httpx.AsyncClient

    async def submit(self, source: str = HELLO, *, key: str = "", **body: Any) -> dict[str, Any]:
        answer = await self.http.post(
            "/api/v1/jobs", json={"source": source, **body}, headers={"Idempotency-Key": key} if key else {}
        )
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    async def get(self, path: str, **params: Any) -> dict[str, Any]:
        answer = await self.http.get(f"/api/v1{path}", params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def until(self, job: str, *states: JobState) -> dict[str, Any]:
        """Wait, on the records that come in, until the job is in one of the states."""

        async def reached() -> dict[str, Any]:
            document = await self.get(f"/jobs/{job}")
            return document if document["state"] in states else {}

        return await self.until_true(reached)

    async def until_true(self, look: Callable[[], Awaitable[T]]) -> T:
        """The first answer of ``look`` that is true; it is asked again at each record that the service has taken in.

        Also at one that came while it was answering, which may be the last.
        """
        async with asyncio.timeout(LIMIT_S):
            while True:
                number = self.app.loop.installation.number
                if found := await look():
                    return found
                await self.app.loop.wait_for(number + 1)

    async def until_asked(self, job: str, times: int = 1) -> None:
        """Wait until the master of the job was asked for so many times."""
        async with asyncio.timeout(LIMIT_S):
            while self.engine.asked.count(JobId(job)) < times:
                await asyncio.sleep(0.005)

    def as_master(self, job: str, *events: JobEvent) -> int:
        """Append as the master of the job does: from its own side of the log. Returns the last number."""
        scope = master_scope(JobId(job))
        epoch = self.log.fence(scope) or self.log.take_epoch(scope)
        return self.log.append(list(events), writer=Writer(scope=scope, epoch=epoch), job=JobId(job))[-1].number

    async def heal(self, job: str) -> None:
        """Let the time pass that the job must run until its recoveries count as healed."""
        ctx = self.app.loop.installation.jobs[JobId(job)].ctx
        name = next(one.timer for one in timers(ctx) if one.timer.startswith("healed/"))
        await self.seen(self.as_master(job, TimerFired(timer=name)))

    async def play_start(self, job: str, *members: str, pid: int = 1000) -> None:
        """What the master of an admitted job writes until its instances run where they are placed, ``pid`` and up."""
        await self.until_asked(job)
        where = {one["instance"]: one["node"] for one in (await self.get(f"/jobs/{job}/placement"))["items"]}
        first, ids = Epoch(1), [InstanceId.parse(member) for member in members]
        number = self.as_master(
            job,
            MasterStarted(master_epoch=first, pid=pid - 1),
            Reattached(master_epoch=first),
            GangReserved(gang=GangId("all"), epoch=first),
            *(
                InstanceStarted(role=one.role, rank=one.rank, epoch=first, node=NodeId(where[str(one)]), pid=pid + i)
                for i, one in enumerate(ids)
            ),
            *(InstanceReady(role=one.role, rank=one.rank, epoch=first) for one in ids),
        )
        await self.seen(number)

    async def seen(self, number: int) -> None:
        """Wait until the service has taken in a record that somebody else wrote."""
        await asyncio.wait_for(self.app.loop.wait_for(number), LIMIT_S)


@asynccontextmanager
async def standing(
    home: Path, *, pretend: str = "1x2x4", engine: PlayedEngine | None = None
) -> AsyncIterator[Standing]:
    """Start a service over ``home``; a second one over the same home finds what the first left."""
    played = engine or PlayedEngine()
    db_url = postgres.database(home) if postgres.WANTED else ""
    settings = replace(
        load_settings({"home": str(home), "pretend": pretend, "db_url": db_url}, environ={}), poll_s=0.01
    )
    if not db_url and not (database := home / "rota.db").exists():
        home.mkdir(exist_ok=True)
        database.write_bytes(empty_database())
    log = SqlLog(assembly.db_url(settings), migrate=True)
    app = assemble(settings, log, engine=played)
    await begin(app)
    app.forecasts.begin()
    turning = asyncio.create_task(app.loop.run())
    try:
        await take_nodes(app, node_changes(app, wanted_nodes(settings)))
        app.ready = True
        token = app.home.token.read_text().strip()
        transport = httpx.ASGITransport(app=make_app(app), raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport,
            base_url="http://127.0.0.1:7700",
            headers={"Authorization": f"Bearer {token}"},
            timeout=LIMIT_S,
            event_hooks={"response": [check]},
        ) as http:
            yield Standing(app=app, log=log, engine=played, http=http)
    finally:
        app.forecasts.close()
        await app.loop.stop()
        await turning
        log.close()


@cache
def empty_database() -> bytes:
    """A store with its schema and no record: making one takes as long as many a test."""
    with tempfile.TemporaryDirectory() as folder:
        SqlLog(f"sqlite:///{folder}/rota.db", migrate=True).close()
        return Path(folder, "rota.db").read_bytes()


@asynccontextmanager
async def listening(service: Standing, shared: Connections | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """The same service on a port of the loopback address, where a connection can be cut."""
    door = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(server_config(make_app(service.app), shared))
    serving = asyncio.create_task(server._serve([door]))
    url = f"http://127.0.0.1:{door.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, headers=service.http.headers, timeout=LIMIT_S, verify=False) as http:
        yield http
    server.should_exit = True
    await serving


def with_service(home: Path, test: Callable[[Standing], Awaitable[T]], **given: Any) -> T:
    """Run one coroutine of a test against a service."""

    async def main() -> T:
        async with standing(home, **given) as service:
            return await test(service)

    return asyncio.run(main())


async def stream(
    http: httpx.AsyncClient, path: str, *, last_id: str = "", **params: Any
) -> AsyncGenerator[dict[str, Any]]:
    """Server-sent events ``{id, event, data}`` of one connection; leaving the iteration cuts it."""
    headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
    current: dict[str, Any] = {}
    async with http.stream("GET", f"/api/v1{path}", params=params, headers=headers) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line and current:
                yield current
                current = {}
            name, _, value = line.partition(": ")
            if name == "data":
                current["data"] = json.loads(value)
            elif name in ("id", "event"):
                current[name] = value
