"""The service's only client of Ray: a supervised child behind a unix socket; it has no truth of its own.

It imports Ray when the first request needs an engine, with the engine's token in the environment by then. When the
engine it is attached to is gone it ends (exit status 75) and is started again, because one process cannot change from
one Ray cluster to another; Ray itself may also abort it while the GCS is away. Both are harmless: every operation is
idempotent by name.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import importlib
import json
import os
import signal
import sys
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rota.runtime import environ, process
from rota.runtime.environ import Home
from rota.runtime.probe import HangWatch, end_hung
from rota.runtime.process import SUPERVISOR, RunFolder, Spawn
from rota.runtime.ray.client import (
    IN_FLIGHT_MAX,
    MESSAGE_BYTES_MAX,
    NOTHING,
    EngineDocument,
    GatewayFiles,
    encode,
    read_message,
    settings_mark,
)
from rota.runtime.ray.engine import (
    EngineFiles,
    EngineSettings,
    client_environment,
    find_engine,
    is_gone,
    start_engine,
    stop_engine,
)
from rota.spec.codec import JsonObject
from rota.spec.errors import EngineUnavailable

if TYPE_CHECKING:
    from rota.runtime.ray.operations import GatewayOps

ANSWERS_MAX = 4096
ENGINE_LOST = 75
_ENGINE_CHECK_S = 1.0
_FAILURE_MAX = 500
_SUPERVISOR_GONE = 3
"""Looks at which the supervisor of the service is gone before it is started from here."""


class Gateway:
    """Answers requests; one per ``$ROTA_HOME``."""

    def __init__(self, home: Path, settings: EngineSettings, namespace: str) -> None:
        self._home, self._settings, self._namespace = home, settings, namespace
        self._run, self._socket = home / "run", GatewayFiles(home).socket
        self._hang_watches = defaultdict[str, HangWatch](HangWatch)
        self._supervisor = HangWatch()
        self._supervisor_gone = 0
        self._answers: OrderedDict[str, asyncio.Future[JsonObject]] = OrderedDict()
        self._tasks = set[asyncio.Task[None]]()
        self._attaching: asyncio.Future[GatewayOps] | None = None
        self._failure = ""
        """Why the last attempt to attach failed."""
        self._ops: GatewayOps | None = None
        self._engine = ""
        self._raylet: process.ProcessId | None = None
        self._leaving = asyncio.Event()
        self.exit_status = 0

    async def run(self, files: GatewayFiles) -> int:
        """Serve until SIGTERM, ``stop_engine``, or the loss of the engine; returns the exit status."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._leaving.set)
        files.socket.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, files.address, limit=2 * MESSAGE_BYTES_MAX)
        files.socket.chmod(0o600)
        watch = loop.create_task(self._watch_engine())
        await self._leaving.wait()
        watch.cancel()
        server.close()
        if self._ops is not None:
            await self._ops.close()
        return self.exit_status

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        settings = settings_mark(self._settings, self._namespace)
        writer.write(encode(self._stamped({"request_id": "", "settings": settings})))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ValueError):
            while True:
                message = await read_message(reader)
                task = asyncio.get_running_loop().create_task(self._reply(message, writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        writer.close()

    async def _reply(self, message: JsonObject, writer: asyncio.StreamWriter) -> None:
        identity = str(message.get("request_id", ""))
        reply = await asyncio.shield(self._answer_once(identity, message))
        try:
            found = encode(self._stamped({"request_id": identity, **reply}))
        except ValueError as error:  # too long for one message: the asker still gets an answer
            found = encode(self._stamped({"request_id": identity, **_error("BAD_REQUEST", f"its answer: {error}")}))
        if message.get("op") == "terminal":  # may be asked anew, and its answers are many and large
            self._answers.pop(identity, None)
        with contextlib.suppress(ConnectionError, RuntimeError):
            writer.write(found)
            await writer.drain()
        if message.get("op") == "stop_engine" and "error" not in reply:
            self._leaving.set()

    def _answer_once(self, identity: str, message: JsonObject) -> asyncio.Future[JsonObject]:
        """The answer to this request id, the first one again when it is repeated."""
        known = self._answers.get(identity)
        if known is None:
            open_count = sum(not answer.done() for answer in self._answers.values())
            work = self._answer(message) if open_count < IN_FLIGHT_MAX else _busy()
            known = asyncio.ensure_future(work)
            self._answers[identity] = known
            while len(self._answers) > ANSWERS_MAX:
                self._answers.popitem(last=False)
        return known

    async def _answer(self, message: JsonObject) -> JsonObject:
        try:
            limit_s = float(message.get("deadline_s", 60.0))
            async with asyncio.timeout(limit_s):
                return {"result": await self._perform(str(message.get("op")), dict(message.get("args") or {}))}
        except TimeoutError as error:
            return _error("TIMED_OUT", f"{message.get('op')}: {error or 'time is up'}")
        except (ValueError, TypeError, KeyError) as error:
            return _error("BAD_REQUEST", f"{message.get('op')}: {type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - the edge of a process: whatever Ray raises goes to the asker
            return _error("ENGINE_UNAVAILABLE", f"{message.get('op')}: {type(error).__name__}: {error}")

    async def _perform(self, op: str, args: JsonObject) -> Any:
        match op:
            case "ping":
                return {"pid": os.getpid(), "engine": self._engine}
            case "engine_status":
                return self._status()
            case "start_engine":
                await self._attached()
                return self._status()
            case "stop_engine":
                left = await self._stop_engine()
                if left:
                    raise EngineUnavailable(f"processes of the engine do not end: {[each.pid for each in left]}")
                return None
            case "ensure_master" | "nodes" | "usage" | "check_machines" | "list_files" | "read_file":
                return await getattr(await self._attached(), op)(**args)
            case _ if op in NOTHING:
                there = self._settings.address or find_engine(self._home) is not None
                ops = await self._attached() if there else None
                return NOTHING[op] if ops is None else await getattr(ops, op)(**args)
            case _:
                raise ValueError("no such operation")

    async def _attached(self) -> GatewayOps:
        """Operations on the living engine, which is started or adopted first; one attempt for all who wait."""
        if self._attaching is None or (self._attaching.done() and self._attaching.exception() is not None):
            self._attaching = asyncio.ensure_future(self._attach())
        return await asyncio.shield(self._attaching)

    async def _attach(self) -> GatewayOps:
        if given := self._settings.address:  # with what the environment says of its token
            module = await asyncio.to_thread(importlib.import_module, "rota.runtime.ray.operations")
            try:
                joined: GatewayOps = await asyncio.to_thread(module.connect, given, self._namespace)
            except Exception as error:  # whatever Ray raises: the asker gets it, and so does who asks for the status
                self._failure = " ".join(f": {type(error).__name__}: {error}".split())[:_FAILURE_MAX]
                raise
            self._ops, self._engine = joined, given
            return joined
        # Ray reads its environment when it is imported, but for the folder, which the start of the engine chooses.
        environ.set_variables(client_environment(EngineFiles(self._home).token, ""))
        importing = asyncio.to_thread(importlib.import_module, "rota.runtime.ray.operations")
        starting = asyncio.to_thread(start_engine, self._home, self._settings)
        state, module = await asyncio.gather(starting, importing)
        environ.set_variables(client_environment(state.token_path, state.folder))
        self._raylet = state.raylet  # watched from now on: without it Ray would try to connect for two minutes
        ops: GatewayOps = await asyncio.to_thread(module.connect, state.address, self._namespace)
        self._ops, self._engine = ops, state.engine
        ops.keep_warm(state, self._settings.warm)
        return ops

    async def _stop_engine(self) -> tuple[process.ProcessId, ...]:
        self._raylet = None
        if self._ops is not None:
            await self._ops.close()
        return await asyncio.to_thread(stop_engine, self._home)

    def _status(self) -> EngineDocument:
        if given := self._settings.address:
            found: EngineDocument = {"engine": self._engine, "address": given, "state": "off"}
            if self._ops is None and self._attaching is not None:
                text = f"no Ray has answered at {given}{self._failure}; see 'ray status' there, and run/gateway.log"
                found.update({"state": "connecting", "text": text})
            elif self._ops is not None:
                found.update({"state": "running", "hosts": self._ops.machines.hosts, "text": self._ops.machines.text})
            return found
        head = find_engine(self._home)
        if head is None:
            return {"state": "off", "engine": ""}
        recovering = head.gcs is None or not process.is_alive(head.gcs)
        return {
            "state": "recovering" if recovering else "running",
            "engine": head.engine,
            "address": head.address,
            "storage": head.storage,
            "volatile": head.volatile,
            "gcs_restarts": head.gcs_restarts,
            "gcs_pid": head.gcs.pid if head.gcs else 0,
            "raylet_pid": head.raylet.pid,
            "hosts": [state.host for state in EngineFiles(self._home).states()],
        }

    async def _watch_engine(self) -> None:
        """Leave when the engine is gone; put a watcher over it again when that died."""
        while True:
            await asyncio.sleep(_ENGINE_CHECK_S)
            process.reap_adopted()
            if is_gone(self._socket):  # with the home: who asks comes over it, and no other gateway may take its place
                self._leaving.set()
                return
            self._keep_supervisor()
            if self._raylet is None:
                continue
            if not process.is_alive(self._raylet):
                self.exit_status = ENGINE_LOST
                self._leaving.set()
                return
            if find_engine(self._home) is not None:
                self._end_hung_watchers()
                try:
                    await asyncio.to_thread(start_engine, self._home, self._settings)
                except (EngineUnavailable, OSError) as error:  # the loss of the raylet must still be seen
                    sys.stderr.write(f"no watcher over the engine: {error}\n")

    def _keep_supervisor(self) -> None:
        """Start the supervisor of the service again where the service does not: it may be gone too."""
        record = RunFolder(self._run).read(SUPERVISOR)
        if record is None:
            self._supervisor_gone = 0
            return
        if self._supervisor.which != record.id:
            self._supervisor_gone = 0
        if why := self._supervisor.look(record.id):
            end_hung(record.id, self._run, SUPERVISOR, why)
        self._supervisor_gone = 0 if process.is_alive(record.id) else self._supervisor_gone + 1
        if self._supervisor_gone == _SUPERVISOR_GONE:
            log = Home.of(self._home).service_log
            process.spawn(Spawn(command=record.command, env={}, log=log, cwd=self._home), name=SUPERVISOR)

    def _end_hung_watchers(self) -> None:
        """Who watches the engine is watched from here."""
        for one in RunFolder(self._run).alive():
            if one.name.startswith("engine-") and (why := self._hang_watches[one.name].look(one.id)):
                end_hung(one.id, self._run, "watcher of the engine", why, wait_s=_ENGINE_CHECK_S)

    def _stamped(self, message: JsonObject) -> JsonObject:
        return {**message, "gateway": os.getpid(), "engine": self._engine}


async def _busy() -> JsonObject:
    return _error("ENGINE_UNAVAILABLE", f"{IN_FLIGHT_MAX} requests are in flight")


def _error(code: str, text: str) -> JsonObject:
    return {"error": {"code": code, "text": text[:4000]}}


async def _serve_and_exit(gateway: Gateway, files: GatewayFiles) -> None:
    status = await gateway.run(files)
    sys.stdout.flush()
    # Ray's threads would hold up a normal exit for as long as the GCS is away.
    os._exit(status)


def main(arguments: list[str]) -> int:
    """``--home DIR --engine JSON [--namespace NAME]``; 0 when asked to end or when another gateway serves this home."""
    parser = argparse.ArgumentParser(prog="python -m rota.runtime.ray.gateway")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--engine", default="{}")
    parser.add_argument("--namespace", default="rota/local")
    given = parser.parse_args(arguments)
    files = GatewayFiles(given.home)
    with files.lock.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        process.become_subreaper()
        os.environ[environ.HOME] = str(given.home)
        gateway = Gateway(given.home, EngineSettings(**json.loads(given.engine)), given.namespace)
        asyncio.run(_serve_and_exit(gateway, files))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
