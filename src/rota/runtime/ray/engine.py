"""Start, find, watch and stop the local engine (Ray's GCS and raylets) without importing Ray.

::

    start_engine ── spawns ──> rota.runtime.ray.node          starts GCS and raylet by Ray's own machinery, then becomes
                               rota.runtime.ray.engine watch  the watcher (same pid): reaps, restarts a dead GCS, and on
                                                              SIGTERM or death of the raylet ends all that it started

One watcher a node; the head's also watches the GCS. What hangs is ended, as if it had died. A dead watcher leaves GCS
and raylet running; the next ``start_engine`` puts a new watcher over them. Leftovers are found, whoever their parent
is, by their session and by ``ROTA_ENGINE=<engine>/<host>``, which every process of a node inherits.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rota.runtime import file_locks, process
from rota.runtime.devices import BUILT_IN
from rota.runtime.node import cores_allowed
from rota.runtime.output import last_line
from rota.runtime.probe import LOOK_S, HangWatch, calls_of, end_hung, listens_http2, note_replaced
from rota.runtime.process import ProcessId, ProcessRecord, RunFolder, Spawn
from rota.spec.codec import JsonObject, JsonValue
from rota.spec.errors import EngineUnavailable

Storage = Literal["rocksdb", "memory"]
HealthCheckPace = Literal["fast", "normal", "slow"]

HOST_LABEL = "rota-host"
NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray gives each node."""
LOOPBACK = "127.0.0.1"
SOCKET_PATH_MAX = 107
_SOCKET_TAIL = len("/r/s/sockets/plasma_store_00")
_PORTS = range(20_000, 32_000)
_GCS_DEATHS_MAX = 5
_GCS_DEATHS_S = 60.0
_STOP_S = 10.0
_POLL_S = 0.02

_HEALTH: Mapping[HealthCheckPace, tuple[int, int, int, int]] = {
    "fast": (0, 500, 500, 3),
    "normal": (0, 1000, 2000, 3),
    "slow": (0, 3000, 10_000, 5),
}
"""Of the checks of nodes by the GCS: first after, every, and time-out in ms; failures until a node counts as dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How to start an engine: label and logical cores of its first node, storage of the GCS, object store, health.

    ``cpus`` are logical: a pretend cluster gives more than the machine has. ``storage`` is what is tried first;
    RocksDB falls back to memory; ``EngineState.storage`` is what is used. ``warm`` idle processes are kept ready, each
    with the modules ``preload`` imported. ``address``: join the engine that runs there, and start none. ``listen``:
    where other machines reach this one, and those of them that join reach the GCS; the loopback address for none.
    ``labels`` are given to the node in Ray's table.
    """

    address: str = ""
    host: str = "local"
    cpus: float = 16.0
    storage: Storage = "rocksdb"
    health: HealthCheckPace = "normal"
    object_store_bytes: int = 512 * 2**20
    warm: int = 0
    preload: Sequence[str] = ()
    listen: str = LOOPBACK
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState(JsonValue):
    """One started node of an engine. ``gcs`` is None but for the head; ``folder`` is Ray's directory in a private one.

    ``session`` is the process that opened the session in which raylet and workers run (the first watcher).
    ``environment`` is what a restarted GCS must find again, down to the same storage.
    """

    engine: str
    host: str
    address: str
    folder: str
    token_path: str
    storage: Storage
    raylet: ProcessId
    session: ProcessId
    boot_id: str
    environment: Mapping[str, str | None]
    gcs: ProcessId | None = None
    gcs_command: tuple[str, ...] = ()
    gcs_restarts: int = 0

    @property
    def volatile(self) -> bool:
        """True when running jobs do not survive the death of the GCS (its state is in memory only)."""
        return self.storage == "memory"


def mark_of(engine: str, host: str) -> str:
    """The environment entry that every process of one node of an engine inherits."""
    return f"ROTA_ENGINE={engine}/{host}"


class EngineFiles:
    """Where an engine of one ``$ROTA_HOME`` keeps its files."""

    def __init__(self, home: Path) -> None:
        self.run = RunFolder(home / "run")
        self.folder = self.run.path / "engine"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.token = self.folder / "token"
        self.log = self.folder / "engine.log"
        self.lock = self.folder / "lock"
        self.storage = self.folder / "gcs"

    def state_path(self, host: str) -> Path:
        return self.folder / f"node-{host}.json"

    def states(self) -> tuple[EngineState, ...]:
        """All started nodes, the head first."""
        found = [state for path in self.folder.glob("node-*.json") if (state := read_state(path)) is not None]
        return tuple(sorted(found, key=lambda state: (state.gcs is None, state.host)))

    def record_name(self, host: str) -> str:
        return f"engine-{host}"


def end_all(engine: str, host: str, session: ProcessId) -> tuple[ProcessId, ...]:
    """SIGKILL every process of a node; returns what cannot be ended.

    Found by mark, or by session when their environment is lost: a session number alone may be reused in time.
    """
    mark = mark_of(engine, host)

    def find() -> set[ProcessId]:
        members = process.session_of(session)
        return {*process.marked(mark), *(each for each in members if process.lost_environment(each))}

    return process.kill_all(find)


def read_state(path: Path) -> EngineState | None:
    """The state written by a node's watcher under this boot, or None when there is none."""
    try:
        data: JsonObject = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return EngineState.from_json(data) if data.get("boot_id") == process.boot_id() else None


def write_state(path: Path, state: EngineState) -> None:
    """Write the state atomically, mode 0600."""
    process.write_private(path, json.dumps(asdict(state)))


def client_environment(token_path: str | Path, folder: str | Path) -> dict[str, str | None]:
    """What a process needs in its environment before it imports Ray, to be a client of the engine.

    The long reconnect time keeps drivers, actors and raylets alive while a GCS comes back; Ray's own default ends them
    after 60 s. The cluster switch keeps Ray on the loopback address.
    """
    return {
        "RAY_ADDRESS": None,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": None,
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "RAY_TMPDIR": str(folder),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    }


def node_environment(state_folder: Path, settings: EngineSettings, engine: str) -> dict[str, str | None]:
    """Environment of GCS and raylet, from where every worker inherits it."""
    initial, period, timeout, threshold = _HEALTH[settings.health]
    return {
        "ROTA_ENGINE": f"{engine}/{settings.host}",
        "RAY_gcs_storage": settings.storage,
        "RAY_gcs_storage_path": str(state_folder / "gcs") if settings.storage == "rocksdb" else None,
        "RAY_health_check_initial_delay_ms": str(initial),
        "RAY_health_check_period_ms": str(period),
        "RAY_health_check_timeout_ms": str(timeout),
        "RAY_health_check_failure_threshold": str(threshold),
        # Logical cores may be hundreds: never start a worker for each of them ahead of need.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        # But the few that are kept ready stay, also while all cores are given away.
        "RAY_num_workers_soft_limit": str(settings.warm) if settings.warm else None,
        "RAY_preload_python_modules": ",".join(settings.preload) or None,
        # The engine's own 15 would leave a job next to nothing beside whatever else a machine does.
        "RAY_worker_niceness": "0",
        "RAY_worker_maximum_startup_concurrency": str(max(2, cores_allowed())),
        # A killed instance takes the processes with it that it started.
        "RAY_process_group_cleanup_enabled": "1",
        "RAY_enable_metrics_collection": "0",
        # The raylet ends itself when its agents do not answer by then; a busy machine takes longer than Ray's 30 s.
        "RAY_agent_register_timeout_ms": "120000",
        # Devices are chosen by the scheduler and set by the host of each instance.
        **{f"RAY_EXPERIMENTAL_NOSET_{family.variable}": "1" for family in BUILT_IN},
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "PYTHONUNBUFFERED": "1",
    }


def find_engine(home: Path) -> EngineState | None:
    """The head of the engine of this home if its raylet runs (its GCS may be on its way back), else None."""
    states = EngineFiles(home).states()
    return states[0] if states and states[0].gcs is not None and process.is_alive(states[0].raylet) else None


def start_engine(home: Path, settings: EngineSettings, *, timeout_s: float = 90.0) -> EngineState:
    """The engine of this home: the living one, watched again if its watcher died, or a new one.

    Each try has ``timeout_s``. Memory, in which the loss of the GCS is that of the engine, is tried once RocksDB has
    failed twice: the first time the machine may have been busy, or another process have taken the port.
    Raises EngineUnavailable when the engine does not come up; the hint names the log.
    """
    files = EngineFiles(home)
    with file_locks.locked(files.lock):
        found = find_engine(home)
        if found is not None:
            _ensure_watched(files, found)
            return found
        _clear(files)
        process.write_private(files.token, secrets.token_hex(32))
        engine = secrets.token_hex(6)
        folder = _short_folder(files)
        tries: tuple[Storage, ...] = ("rocksdb", "rocksdb", "memory") if settings.storage == "rocksdb" else ("memory",)
        reasons = list[str]()
        for storage in tries:
            at = f"[{settings.listen}]" if ":" in settings.listen else settings.listen
            config = {"head": True, "address": f"{at}:{free_port(settings.listen)}", "folder": str(folder)}
            try:
                return start_node(files, replace(settings, storage=storage), engine, config, timeout_s)
            except EngineUnavailable as failure:
                reasons.append(f"{storage}: {failure}")
                _set_aside(files.storage)
        raise EngineUnavailable("the engine did not start: " + "; ".join(reasons), hint=f"see {files.log}")


def host_selector(host: str) -> dict[str, str]:
    """The label of Ray's table that finds a machine: ``host`` is its name, or ``ray.io/node-id=ID`` if it has none."""
    key, equals, value = host.partition("=")
    return {key: value} if equals else {HOST_LABEL: host}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAccess:
    """What a machine needs to join an engine: its id, the address of its GCS, and the token that it asks for."""

    engine: str
    address: str
    token: str


def join_engine(
    home: Path,
    settings: EngineSettings,
    access: EngineAccess,
    *,
    environment: Mapping[str, str],
    timeout_s: float = 90.0,
) -> EngineState:
    """A node of this machine in an engine that runs elsewhere: the living one of that engine, or a new one.

    A node of another engine in this home is ended first. ``environment`` is added to that of the node and of all that
    it starts. Raises EngineUnavailable when the node does not come up; the hint names the log.
    """
    files = EngineFiles(home)
    with file_locks.locked(files.lock):
        found = find_joined(home)
        if found is not None and found.engine == access.engine and found.address == access.address:
            _ensure_watched(files, found)
            return found
        _clear(files)
        process.write_private(files.token, access.token)
        config = {
            "head": False,
            "address": access.address,
            "folder": str(_short_folder(files)),
            "more_environment": dict(environment),
        }
        try:
            return start_node(files, settings, access.engine, config, timeout_s)
        except EngineUnavailable as failure:
            raise EngineUnavailable(f"the engine did not start: {failure}", hint=f"see {files.log}") from failure


def find_joined(home: Path) -> EngineState | None:
    """The node of this home in an engine that runs elsewhere, if its raylet runs, else None."""
    states = EngineFiles(home).states()
    return states[0] if states and states[0].gcs is None and process.is_alive(states[0].raylet) else None


def stop_engine(home: Path) -> tuple[ProcessId, ...]:
    """End every process of the engine, workers included; harmless if there is none. Returns what could not be ended."""
    files = EngineFiles(home)
    with file_locks.locked(files.lock):
        return _clear(files)


def _clear(files: EngineFiles) -> tuple[ProcessId, ...]:
    states = files.states()
    left = tuple(process for state in reversed(states) for process in end_node(files, state))
    left += tuple(process for starter in _unfinished(files) for process in _end_unfinished(files, starter))
    for folder in {Path(state.folder).parent for state in states}:
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(files.storage, ignore_errors=True)
    return left


def _unfinished(files: EngineFiles) -> list[ProcessRecord]:
    """Starters that still run although whoever waited for them died: their nodes would have no watcher."""
    records = (record for record in files.run.alive() if record.name.startswith("engine-"))
    return [record for record in records if "rota.runtime.ray.node" in record.command]


def _end_unfinished(files: EngineFiles, starter: ProcessRecord) -> tuple[ProcessId, ...]:
    plan = json.loads(starter.command[-1])
    left = end_all(plan["engine"], plan["host"], starter.id)
    files.run.forget(files.record_name(plan["host"]))
    Path(plan["state_path"]).unlink(missing_ok=True)
    if plan["head"]:
        shutil.rmtree(Path(plan["folder"]).parent, ignore_errors=True)
    return left


def end_node(files: EngineFiles, state: EngineState) -> tuple[ProcessId, ...]:
    """End one node with all its workers, and forget it; returns what could not be ended."""
    name = files.record_name(state.host)
    watcher = files.run.find_alive(name)
    if watcher is not None:
        process.stop(watcher.id, grace_s=_STOP_S)
    left = end_all(state.engine, state.host, state.session)
    process.reap_adopted()
    if not left:
        files.run.forget(name)
        files.state_path(state.host).unlink(missing_ok=True)
    return left


def start_node(
    files: EngineFiles, settings: EngineSettings, engine: str, config: Mapping[str, object], timeout_s: float
) -> EngineState:
    """Start the processes of one node and wait until its state is written. Raises EngineUnavailable."""
    folder = str(config["folder"])
    more: Any = config.get("more_environment") or {}
    environment = {
        **client_environment(files.token, folder),
        **node_environment(files.folder, settings, engine),
        **more,
    }
    state_path = files.state_path(settings.host)
    state_path.unlink(missing_ok=True)
    plan: dict[str, object] = {
        **asdict(settings),
        **config,
        "engine": engine,
        "token_path": str(files.token),
        "state_path": str(state_path),
        "environment": environment,
    }
    command = (sys.executable, "-m", "rota.runtime.ray.node", json.dumps(plan))
    child = process.spawn(
        Spawn(command=command, env=environment, log=files.log), name=files.record_name(settings.host), run=files.run
    )
    starter = process.identify(child.pid)
    try:
        return _wait_ready(child, state_path, files.log, timeout_s)
    except EngineUnavailable:
        if starter is not None:
            end_all(engine, settings.host, starter)
        child.wait()
        raise


def _wait_ready(child: subprocess.Popen[bytes], state_path: Path, log: Path, timeout_s: float) -> EngineState:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        state = read_state(state_path)
        if state is not None:
            return state
        if child.poll() is not None:
            raise EngineUnavailable(f"its starter ended with {child.returncode}: {last_line(log)}")
        time.sleep(_POLL_S)
    starter = process.identify(child.pid)
    calls = calls_of(starter) if starter is not None else ""
    raise EngineUnavailable(f"not ready within {timeout_s:.0f} s" + (f": its starter is in {calls}" if calls else ""))


def _ensure_watched(files: EngineFiles, head: EngineState) -> None:
    for state in files.states():
        if state.engine != head.engine or files.run.find_alive(files.record_name(state.host)) is not None:
            continue
        command = (sys.executable, "-m", "rota.runtime.ray.engine", "watch", str(files.state_path(state.host)))
        name = files.record_name(state.host)
        process.spawn(Spawn(command=command, env=state.environment, log=files.log), name=name, run=files.run)


def _short_folder(files: EngineFiles) -> Path:
    """Where Ray may put its directory: inside the home if its sockets fit into 107 bytes there, else a temporary one.

    Ray opens its own directory to everybody, so it is the child of a private one.
    """
    inside = files.run.path / "ray"
    if len(os.fsencode(inside)) + _SOCKET_TAIL > SOCKET_PATH_MAX:
        return Path(tempfile.mkdtemp(prefix="rota-")) / "r"
    shutil.rmtree(inside, ignore_errors=True)
    inside.mkdir(mode=0o700)
    return inside / "r"


def _set_aside(storage: Path) -> None:
    if storage.is_dir():
        storage.replace(storage.with_name(f"{storage.name}.failed-{secrets.token_hex(4)}"))


def free_port(host: str = LOOPBACK) -> int:
    """A free port below the ephemeral range, so that no outgoing connection takes it while a GCS restarts."""
    for _ in range(200):
        port = secrets.choice(_PORTS)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise EngineUnavailable("no free port between 20000 and 32000")


def is_gone(path: Path) -> bool:
    """True when the file does not exist; False also while the disk does not answer."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


class Watcher:
    """Keeps one node of the engine: restarts its GCS, reaps, ends everything at the end."""

    def __init__(self, state_path: Path, state: EngineState) -> None:
        self._path = state_path
        self._state = state
        self._stopping = False
        self._looked_s = time.monotonic()
        self._gcs_deaths = list[float]()
        self._hang_watches = defaultdict[str, HangWatch](HangWatch)
        self._ports = dict[ProcessId, int]()
        self._ended = set[ProcessId]()
        """What hung: its death is noted already."""
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)

    def run(self) -> None:
        """Until SIGTERM, the death of the raylet, or a GCS that dies again and again."""
        process.become_subreaper()
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._ask_stop)
        signal.signal(signal.SIGINT, self._ask_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while self._keep():
            watched = [self._state.raylet, *([self._state.gcs] if self._state.gcs else [])]
            process.watch_exits(watched, self._wake_out.fileno(), LOOK_S)
            self._drain()
            process.reap_adopted()
            self._look()
        if not self._stopping and not process.is_alive(self._state.raylet):
            self._note_death("raylet", self._state.raylet)
        self._end()

    def _look(self) -> None:
        """End what hangs; from there on it is a death like any other. No more often than is due."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S / 2:
            return
        self._looked_s = now_s
        parts = {"raylet": self._state.raylet, "control store": self._state.gcs}
        for part, which in parts.items():
            if which is None or not process.is_alive(which):
                continue
            if why := self._hang_watches[part].look(which, answers=process.is_stopped(which) or self._answers(which)):
                end_hung(which, self._path.parent.parent, part, why, wait_s=_STOP_S)
                self._ended.add(which)

    def _answers(self, which: ProcessId) -> bool:
        """Silence counts from the first answer on: one that has just begun listens nowhere yet."""
        if which in self._ports:
            return listens_http2(self._ports[which])
        port = next((port for port in process.ports_of(which) if listens_http2(port)), None)
        self._ports |= {which: port} if port is not None else {}
        return True

    def _note_death(self, part: str, which: ProcessId) -> None:
        if which not in self._ended:
            note_replaced(self._path.parent.parent, part, which.pid, "ended")

    def _ask_stop(self, *_: object) -> None:
        self._stopping = True

    def _drain(self) -> None:
        try:
            while self._wake_out.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _keep(self) -> bool:
        if is_gone(self._path.parent):  # with the home: no process could find the engine, to use it or to end it
            return False
        if self._stopping or not process.is_alive(self._state.raylet):
            return False
        if self._state.gcs is None or process.is_alive(self._state.gcs):
            return True
        if self._state.volatile:  # a GCS that forgot everything is of no use to what still runs
            return False
        self._note_death("control store", self._state.gcs)
        now = time.monotonic()
        self._gcs_deaths = [at for at in self._gcs_deaths if now - at < _GCS_DEATHS_S] + [now]
        if len(self._gcs_deaths) > _GCS_DEATHS_MAX:
            return False
        child = subprocess.Popen(self._state.gcs_command, stdin=subprocess.DEVNULL, start_new_session=True)
        gcs = process.identify(child.pid)
        child.returncode = 0  # reaped by reap_adopted, like every other child
        self._state = replace(self._state, gcs=gcs, gcs_restarts=self._state.gcs_restarts + 1)
        write_state(self._path, self._state)
        return True

    def _end(self) -> None:
        raylet, gcs = self._state.raylet, self._state.gcs
        process.stop(raylet, grace_s=2.0)
        if gcs is not None:
            process.stop(gcs, grace_s=1.0)
        process.reap_adopted()
        end_all(self._state.engine, self._state.host, self._state.session)
        self._path.unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    """``watch STATE``: keep the node described by the state file."""
    if len(arguments) != 2 or arguments[0] != "watch":
        print("usage: python -m rota.runtime.ray.engine watch STATE", file=sys.stderr)  # noqa: T201 - its only output
        return 2
    path = Path(arguments[1])
    state = read_state(path)
    if state is None:
        return 1
    Watcher(path, state).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
