"""Client of the gateway: start and watch it, ask it; imports nothing of Ray.

The wire is a unix socket of mode 0600; a message is four bytes of length (big endian) and that much JSON: a request
``{request_id, op, args, deadline_s}``, its reply ``{request_id, result}`` or ``{request_id, error: {code, text}}``.
``deadline_s`` is how long the asker will wait, from now.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import os
import platform
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict

from rota.runtime import environ, process
from rota.runtime.clock import backoff
from rota.runtime.execute import ExecResult
from rota.runtime.job_files import FIRST_READ_S, INSTALLATION, FileEntries
from rota.runtime.probe import ANSWER_S, LOOK_S, HangWatch, end_hung
from rota.runtime.process import RunFolder, Spawn
from rota.runtime.random import RandomSource, SystemRandom
from rota.runtime.ray.engine import LOOPBACK, SOCKET_PATH_MAX, EngineSettings
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput, EngineUnavailable, LimitExceeded, StoreUnavailable, TimedOut, UnknownName
from rota.spec.ids import JobId

if TYPE_CHECKING:
    from rota.spec.measured import CheckFacts, MachineUsage

LENGTH = struct.Struct(">I")
MESSAGE_BYTES_MAX = 1 << 20
IN_FLIGHT_MAX = 1000
EXECUTE_EXTRA_S = 20.0
"""On top of what a command may take: to find the instance and to end what the command left."""
FILES_S = FIRST_READ_S + 5.0
NOTHING: Mapping[str, object] = {
    "find": {"master": None, "instances": [], "reservations": []},
    "master_status": None,
    "master_why": None,
    "execute": None,
    "terminal": None,
    "kill_master": None,
    "sweep": {"instances": [], "reservations": []},
    "list_jobs": [],
    "let_go": None,
}
"""Operations that never start an engine, and their result when none is running."""
RECORD = "gateway"
LOCAL_NAMESPACE = "rota/local"
_BACKOFF_S = (0.2, 5.0)
_CONNECT_S = 10.0
_DEAF_S = 5.0

_log = logging.getLogger("rota.runtime")


class MasterDocument(TypedDict):
    """A living master."""

    name: str
    pid: int
    start_time: float


class ProcessDocument(MasterDocument):
    """A living instance or master."""

    role: str
    rank: int
    epoch: int
    node: str


class FoundDocument(TypedDict):
    """Processes and reservations of a job in the engine."""

    master: ProcessDocument | None
    instances: list[ProcessDocument]
    reservations: list[JsonObject]


class SweptDocument(TypedDict):
    """Names of what was ended of a job."""

    instances: list[str]
    reservations: list[str]


class UnusableMachine(TypedDict):
    """A machine of the engine that gets no work: what is missing, and the command that repairs it."""

    machine: str
    why: str
    remedy: str


class MachinesDocument(TypedDict):
    """``nodes``: machines of an engine with what each has; ``alive``: names and hosts of all that live."""

    nodes: list[JsonObject]
    alive: list[str]
    unusable: list[UnusableMachine]


class PingDocument(TypedDict):
    """The gateway's pid and the engine it is attached to."""

    pid: int
    engine: str


class EngineDocument(TypedDict, total=False):
    """State of the engine: ``off``, ``connecting``, ``running`` or ``recovering``; the rest as far as there is one."""

    state: Required[str]
    engine: Required[str]
    address: str
    text: str
    hosts: list[str]
    storage: str
    volatile: bool
    gcs_restarts: int
    gcs_pid: int
    raylet_pid: int


class UnknownResult(EngineUnavailable):
    """The gateway died with the request in flight: it may or may not have had its effect; ``fields`` has request_id."""


class GatewayFiles:
    """Where the gateway of one ``$ROTA_HOME`` listens and writes."""

    def __init__(self, home: Path) -> None:
        self.run = RunFolder(home / "run")
        self.socket = self.run.path / "gateway.sock"
        self._folder: int | None = None
        self.lock = self.run.path / "gateway.lock"
        self.log = self.run.path / "gateway.log"

    @property
    def address(self) -> str:
        """What to bind or connect to: the socket, through a descriptor of its folder when its path is too long."""
        if len(os.fsencode(self.socket)) <= SOCKET_PATH_MAX:
            return str(self.socket)
        if self._folder is None:
            self._folder = os.open(self.run.path, os.O_PATH | os.O_DIRECTORY)
        return f"/proc/self/fd/{self._folder}/{self.socket.name}"


def encode(message: Mapping[str, object]) -> bytes:
    """One message for the wire. Raises ValueError when it is over 1 MiB."""
    body = json.dumps(message).encode()
    if len(body) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes is over the limit of {MESSAGE_BYTES_MAX}")
    return LENGTH.pack(len(body)) + body


async def read_message(reader: asyncio.StreamReader) -> JsonObject:
    """The next message. Raises IncompleteReadError at the end of the stream, ValueError for anything else."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {length} bytes is over the limit of {MESSAGE_BYTES_MAX}")
    message = json.loads(await reader.readexactly(length))
    if not isinstance(message, dict):
        raise ValueError("a message must be an object")
    return message


def command_of(home: Path, settings: EngineSettings) -> tuple[str, ...]:
    """The command that starts a gateway."""
    words = ("-m", "rota.runtime.ray.gateway", "--home", str(home), "--engine", json.dumps(asdict(settings)))
    return (sys.executable, *words, "--namespace", namespace_of(home, settings))


def namespace_of(home: Path, settings: EngineSettings) -> str:
    """Where the jobs of this home live in Ray: on a given engine one of its own, drawn once,
    because other installations share it.

    Not of the path, which may be the same on another machine. Called by who alone serves the home.
    """
    if not has_machines(settings):
        return LOCAL_NAMESPACE
    path = home / INSTALLATION
    if not path.exists():
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        process.write_private(path, SystemRandom().new_id())
    return f"rota/{path.read_text()}" if settings.address else LOCAL_NAMESPACE


def has_machines(settings: EngineSettings) -> bool:
    """True when the engine may have machines beside that of the service."""
    return bool(settings.address) or settings.listen != LOOPBACK


def settings_mark(settings: EngineSettings, namespace: str) -> str:
    """Digest of the settings and stores of a gateway; its greeting has it.

    The stores count too: what a gateway starts, it starts with its own environment.
    """
    stores = [environ.get(name) for name in (environ.DB_URL, environ.REDIS_URL)]
    return hashlib.sha256(json.dumps([asdict(settings), namespace, stores]).encode()).hexdigest()


class GatewayClient:
    """Keeps one gateway alive and asks it; belongs to one event loop.

    A living gateway is adopted, one with other settings replaced; a dead one is started again at once, then after
    0.2 s, doubling up to 5 s. ``request`` raises UnknownResult when the gateway dies meanwhile; the named operations,
    all idempotent, are repeated then. What is asked while the gateway is away waits for it until its own time is up.
    """

    def __init__(self, home: Path, settings: EngineSettings, *, random_source: RandomSource | None = None) -> None:
        self._home, self._settings = home, settings
        self._files = GatewayFiles(home)
        self._mark = settings_mark(settings, namespace_of(home, settings))
        self._random = random_source or SystemRandom()
        self._writer: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()
        self._parted = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._waiting = dict[str, asyncio.Future[Any]]()
        self._generation = 0
        self._seen: tuple[object, object] = (None, None)
        self.restarts = 0

    @property
    def generation(self) -> int:
        """Rises each time the gateway or the engine behind it is another one: masters must be asked for again."""
        return self._generation

    @property
    def connected(self) -> bool:
        """True while a gateway answers."""
        return self._connected.is_set()

    async def start(self) -> None:
        """Start or adopt the gateway and keep it alive from now on; harmless when it was started before."""
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="gateway-keeper")
            self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="gateway-watcher")

    async def ping(self, *, timeout_s: float = 5.0) -> PingDocument:
        """Proof of life: the gateway's pid and the engine it is attached to."""
        return await self._ask("ping", {}, timeout_s=timeout_s)

    async def engine_status(self, *, timeout_s: float = 10.0) -> EngineDocument:
        """State of the engine (``off``, ``running``, ``recovering``) with pids and storage; starts nothing."""
        return await self._ask("engine_status", {}, timeout_s=timeout_s)

    async def start_engine(self, *, timeout_s: float = 90.0) -> EngineDocument:
        """Start the engine, or adopt the living one; returns its status."""
        return await self._ask("start_engine", {}, timeout_s=timeout_s)

    async def machines(self, *, timeout_s: float = 60.0) -> MachinesDocument:
        """``nodes``: the machines of a given engine with what each has; ``alive``: the names of all that live.

        No other installation on that engine uses them until ``let_go``.
        """
        return await self._ask("nodes", {"holder": f"in {self._home} on {platform.node()}"}, timeout_s=timeout_s)

    async def usage(self, host: str, *, timeout_s: float = 30.0) -> MachineUsage:
        """Usage of a machine, measured there."""
        return await self._ask("usage", {"host": host}, timeout_s=timeout_s)

    async def check_machines(self, *, timeout_s: float = 800.0) -> CheckFacts:
        """Names, clocks, ports and bandwidth between all machines of the engine, which is started if need be."""
        return await self._ask("check_machines", {}, timeout_s=timeout_s)

    async def let_go(self, *, timeout_s: float = 30.0) -> None:
        """Let other installations use the machines of a given engine."""
        await self._ask("let_go", {}, timeout_s=timeout_s)

    async def start_master(
        self,
        job: JobId,
        target: str,
        args: Mapping[str, object],
        *,
        env: Mapping[str, str] | None = None,
        log_path: str = "",
        here: bool = False,
        timeout_s: float = 120.0,
    ) -> MasterDocument:
        """Start the master of a job unless it lives, and keep it alive until ``kill_master`` or ``sweep``.

        Starts the engine unless one runs. ``here``: on this machine alone. Returns its ``name`` and ``pid``.
        """
        wanted = {"job": job, "target": target, "args": args, "env": dict(env or {}), "log_path": log_path}
        if here:
            wanted["here"] = True
        return await self._ask("ensure_master", wanted, timeout_s=timeout_s)

    async def find(self, job: JobId, *, timeout_s: float = 30.0) -> FoundDocument:
        """``master`` (or null), ``instances`` and ``reservations`` of a job that exist in the engine."""
        return await self._ask("find", {"job": job}, timeout_s=timeout_s)

    async def master_status(self, job: JobId, *, timeout_s: float = 2.0) -> JsonObject | None:
        """What the master of a job says of it and of the last beat of each instance; None while it does not answer."""
        return await self._ask_once("master_status", {"job": job}, timeout_s=timeout_s)

    async def master_why(self, job: JobId, *, timeout_s: float = 18.0) -> JsonObject | None:
        """The wait-for graph of a job, as its master sees it now; None while it does not answer."""
        return await self._ask_once("master_why", {"job": job}, timeout_s=timeout_s)

    async def execute(
        self, job: JobId, role: str, rank: int, argv: Sequence[str], *, timeout_s: float
    ) -> ExecResult | None:
        """Run a command beside an instance, once: the answer of ``execute_command``; None if that does not run."""
        args = {"job": job, "role": role, "rank": rank, "argv": list(argv), "timeout_s": timeout_s}
        return await self._ask_once("execute", args, timeout_s=timeout_s + EXECUTE_EXTRA_S)

    async def terminal(
        self, job: JobId, role: str, rank: int, epoch: int, method: str, head: Sequence[object], *, timeout_s: float
    ) -> tuple[int, Any] | None:
        """Ask the instance of an epoch, or the newest for 0, about a terminal: its epoch and answer.

        ``method`` and ``head`` as in ``Instance``; None when that instance does not run.
        """
        args = {"job": job, "role": role, "rank": rank, "epoch": epoch, "method": method, "head": list(head)}
        limit_s = timeout_s + EXECUTE_EXTRA_S
        found = await self._ask_once("terminal", {**args, "timeout_s": timeout_s}, timeout_s=limit_s)
        return None if found is None else (found[0], found[1])

    async def list_files(
        self, host: str, job: JobId, area: str, path: str = "", after: str = "", *, timeout_s: float = FILES_S
    ) -> FileEntries:
        """Files of a job on another machine, as ``JobFiles.listed``; also raises what that raises."""
        args = {"host": host, "job": job, "area": area, "path": path, "after": after}
        return _value_of(await self._ask("list_files", args, timeout_s=timeout_s))

    async def read_file(
        self, host: str, job: JobId, area: str, path: str, offset: int, count: int, *, timeout_s: float = FILES_S
    ) -> bytes:
        """A range of a file of a job on another machine, as ``JobFiles.read``; also raises what that raises."""
        args = {"host": host, "job": job, "area": area, "path": path, "offset": offset, "count": count}
        return base64.b64decode(_value_of(await self._ask("read_file", args, timeout_s=timeout_s)))

    async def kill_master(self, job: JobId, *, timeout_s: float = 30.0) -> None:
        """End the master of a job for good; its instances stay."""
        await self._ask("kill_master", {"job": job}, timeout_s=timeout_s)

    async def sweep(
        self, job: JobId, *, grace_s: float = 0.0, give_back: str = "", timeout_s: float = 60.0
    ) -> SweptDocument:
        """End the master, every instance and every reservation of a job that is over; returns what was ended.

        ``give_back``, a function as ``module:name``, frees its tensors on machines that did not answer at its end.
        """
        return await self._ask("sweep", {"job": job, "grace_s": grace_s, "give_back": give_back}, timeout_s=timeout_s)

    async def list_jobs(self, *, timeout_s: float = 30.0) -> tuple[JobId, ...]:
        """Jobs of which anything exists in the engine, sorted."""
        return tuple(JobId(job) for job in await self._ask("list_jobs", {}, timeout_s=timeout_s))

    async def stop_engine(self, *, timeout_s: float = 60.0) -> None:
        """End the engine with everything in it. The gateway ends too and comes back without an engine."""
        await self._ask("stop_engine", {}, timeout_s=timeout_s)
        async with asyncio.timeout(timeout_s):
            await self._parted.wait()

    async def _ask(self, op: str, args: Mapping[str, object], *, timeout_s: float) -> Any:
        """Ask, and repeat under the same id when the gateway died meanwhile: every operation is idempotent."""
        identity, deadline = self._random.new_id(), time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                return await self._ask_once(op, args, timeout_s=left_s, request_id=identity)
            except UnknownResult:
                if time.monotonic() > deadline:
                    raise

    async def _ask_once(
        self, op: str, args: Mapping[str, object], *, timeout_s: float, request_id: str | None = None
    ) -> Any:
        """As ``request``, but no answer in time or an op that the gateway does not know raises EngineUnavailable."""
        try:
            return await self.request(op, args, timeout_s=timeout_s, request_id=request_id)
        except (TimedOut, ValueError) as error:
            about = args.get("host") or args.get("job")
            raise EngineUnavailable(f"{about}: {error}" if about else str(error)) from error

    async def request(
        self, op: str, args: Mapping[str, object], *, timeout_s: float, request_id: str | None = None
    ) -> Any:
        """Ask once. Repeating a ``request_id`` gets the first answer again.

        Raises UnknownResult, EngineUnavailable, TimedOut; ValueError for an op or argument the gateway does not know.
        """
        await self.start()
        identity = request_id or self._random.new_id()
        deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while self._writer is None:  # a gateway may come and go before this task runs again
                    await self._connected.wait()
        except TimeoutError:
            raise EngineUnavailable(f"no gateway within {timeout_s:g} s", hint=f"see {self._files.log}") from None
        if len(self._waiting) >= IN_FLIGHT_MAX:
            raise EngineUnavailable(f"{IN_FLIGHT_MAX} requests are in flight", hint="try again later")
        return await self._exchange(identity, op, args, deadline - time.monotonic())

    async def _exchange(self, identity: str, op: str, args: Mapping[str, object], left_s: float) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._waiting[identity] = future
        assert self._writer is not None
        try:
            self._writer.write(encode({"request_id": identity, "op": op, "args": args, "deadline_s": left_s}))
            async with asyncio.timeout(left_s):
                return await future
        except TimeoutError:
            raise TimedOut(f"the gateway gave no answer to {op} in time", op=op, request_id=identity) from None
        finally:
            self._waiting.pop(identity, None)

    async def close(self, *, stop_gateway: bool = False) -> None:
        """Stop keeping the gateway; with ``stop_gateway`` end it too (the engine continues)."""
        tasks = [task for task in (self._keeper, self._watcher) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._keeper = self._watcher = None
        if self._writer is not None:
            self._writer.close()
        if stop_gateway:
            await asyncio.to_thread(stop_gateway_of, self._home)
            if self._child is not None:
                self._child.poll()

    async def _keep(self) -> None:
        pauses = backoff(*_BACKOFF_S)
        while True:
            try:
                opened = await self._open()
            except OSError as error:  # no memory, disk or process number for a child: as if it had not started
                _log.error("the gateway cannot be started: %s", error)
                opened = None
            if opened is None or not await self._is_own(*opened):
                await asyncio.sleep(next(pauses) * (0.5 + self._random.rng().random() / 2))
                continue
            pauses = backoff(*_BACKOFF_S)
            reader, self._writer = opened
            self._parted.clear()
            self._connected.set()
            try:
                await self._read_replies(reader)
            finally:
                self._lost()

    async def _watch(self) -> None:
        """End a gateway that hangs, so that another is started, whoever started this one."""
        looks = HangWatch()
        while True:
            await asyncio.sleep(LOOK_S)
            record = self._files.run.find_alive(RECORD)
            if record is None:
                continue
            if why := looks.look(record.id, answers=await self._is_heard()):
                _log.error("the gateway, process %s, %s: it is started again", record.pid, why)
                end_hung(record.id, self._files.run.path, RECORD, why)

    async def _is_heard(self) -> bool:
        """True while the gateway answers; also without a connection, which the keeper is about then."""
        if self._writer is None:
            return True
        try:
            await self.request("ping", {}, timeout_s=ANSWER_S)
        except TimedOut:
            return False
        except (EngineUnavailable, ValueError):  # gone meanwhile, or too much in flight
            return True
        return True

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        if self._child is not None:
            self._child.poll()  # else it stays a zombie, and looks alive
        with contextlib.suppress(OSError):
            return await asyncio.open_unix_connection(self._files.address, limit=2 * MESSAGE_BYTES_MAX)
        record = self._files.run.find_alive(RECORD)
        if record is None:
            self._spawn()
        deadline = time.monotonic() + (_CONNECT_S if record is None else _DEAF_S)
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                return await asyncio.open_unix_connection(self._files.address, limit=2 * MESSAGE_BYTES_MAX)
            if self._child is not None and self._child.poll() is not None:
                return None
            await asyncio.sleep(0.02)
        if record is not None:  # it does not answer, and would keep the socket from the next one
            await asyncio.to_thread(process.stop, record.id, grace_s=0.0)
        return None

    async def _is_own(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read the hello of the gateway, and stop one with other settings, as a killed service may leave behind."""
        try:
            async with asyncio.timeout(_DEAF_S):
                greeting = await read_message(reader)
        except (OSError, EOFError, ValueError):
            writer.close()
            return False
        if greeting.get("settings") == self._mark:
            self._see(greeting)
            return True
        writer.close()
        _log.warning("the gateway has other settings than the service: it is started anew")
        await asyncio.to_thread(stop_gateway_of, self._home)
        return False

    def _spawn(self) -> None:
        what = Spawn(command=command_of(self._home, self._settings), env={}, log=self._files.log)
        self._child = process.spawn(what, name=RECORD, run=self._files.run)
        self.restarts += 1

    async def _read_replies(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ValueError):
            while True:
                message = await read_message(reader)
                self._see(message)
                future = self._waiting.get(message.get("request_id", ""))
                if future is None or future.done():
                    continue
                if "error" in message:
                    future.set_exception(_error_of(message["error"]))
                else:
                    future.set_result(message.get("result"))

    def _see(self, message: Mapping[str, object]) -> None:
        gateway, engine = message.get("gateway"), message.get("engine")
        if gateway != self._seen[0] or (self._seen[1] and engine != self._seen[1]):
            self._generation += 1
        self._seen = (gateway, engine)

    def _lost(self) -> None:
        self._connected.clear()
        self._parted.set()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for identity, future in self._waiting.items():
            if not future.done():
                future.set_exception(UnknownResult("the gateway ended with the request in flight", request_id=identity))


_REFUSALS = {kind.code: kind for kind in (BadInput, UnknownName, LimitExceeded, StoreUnavailable)}


def _value_of(answer: JsonObject) -> Any:
    if "value" in answer:
        return answer["value"]
    raw = answer["error"]
    raise _REFUSALS.get(raw["code"], EngineUnavailable)(raw["text"], hint=raw["hint"])


def _error_of(raw: Mapping[str, str]) -> Exception:
    kinds: dict[str, type[Exception]] = {"BAD_REQUEST": ValueError, "TIMED_OUT": TimedOut}
    return kinds.get(raw["code"], EngineUnavailable)(raw["text"])


def stop_gateway_of(home: Path) -> bool:
    """End the gateway of this home; True when none runs any more."""
    files = GatewayFiles(home)
    record = files.run.find_alive(RECORD)
    gone = record is None or process.stop(record.id, grace_s=3.0)
    if gone:
        files.run.forget(RECORD)
        files.socket.unlink(missing_ok=True)
    return gone
