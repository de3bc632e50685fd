"""rota join and rota leave: this machine as a part of an installation whose service runs on another one.

::

    rota join ── asks the service ──> versions, name, token checked; access to the engine
              ── starts ──> the agent (``python -m rota.service.process.joined FOLDER``), which starts the node of the
                            engine and the registry, and keeps them while the service is there
    rota leave ─ ends the agent, the node with all that runs on it, the registry and its shared memory

A watcher (the same module with ``watch``) starts the agent again when it was killed, and the agent the watcher.

The agent joins anew when the engine is another one, or its node died. When service and engine are both ended it ends
the node and waits for the service to come back; what does not answer at all may be cut off, and nothing is ended then.
The registry keeps the state of commits in memory for ``MEMORY_S`` longer: the machine of the service may have lost its
power, and its jobs continue from there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypedDict
from urllib.parse import urlsplit

from rota.runtime import cache, data_cache, environ, file_locks, image, process
from rota.runtime.clock import SystemClock, blocking_sleep
from rota.runtime.devices import FAMILIES_VARIABLE, GPUS_MAX_VARIABLE, local_devices
from rota.runtime.environ import Home
from rota.runtime.node import address_towards, host_name, local_node, machine_identity
from rota.runtime.output import last_line
from rota.runtime.process import RunFolder, Spawn
from rota.runtime.ray.engine import EngineAccess, EngineSettings, find_joined, join_engine, stop_engine
from rota.runtime.redis.server import find_or_start, find_running, registry_lock
from rota.service.client import Client
from rota.service.config import DEFAULT_PORT, Settings
from rota.service.machine_checks import own_versions
from rota.service.process.daemon import find_service
from rota.spec.errors import (
    BadInput,
    Conflict,
    EngineUnavailable,
    NotReachable,
    RegistryUnavailable,
    RotaError,
    TimedOut,
    UnknownName,
)

AGENT, WATCHER, WATCH = "agent", "agent-watcher", "watch"
MODULE = "rota.service.process.joined"
JOIN_S = 150.0
"""Time for a machine to become a node: its node starts within 90 s."""
ASK_S, ASK_TIMEOUT_S = 2.0, 5.0
CONNECT_S = 5.0
ENDED_S = 6.0
"""Service and engine refuse connections for this time before they count as ended: either is started again sooner."""
MEMORY_S = 600.0
"""They have ended for this time before the state of commits in the memory of this machine goes, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What ``rota join`` was asked for. ``cpus`` are logical cores of the engine."""

    url: str
    token: str
    host: str
    address: str
    home: str
    cpus: int
    gpus: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


class MachineStatus(TypedDict):
    """State of the agent: ``joining``, ``joined`` or ``waiting`` (for the service), and why."""

    state: str
    text: str
    engine: str


class JoinDocument(TypedDict):
    """Result of ``join`` and ``leave`` on this machine."""

    api: str
    kind: str
    state: str
    host: str
    url: str
    address: str
    text: str
    ended: list[str]
    still_running: list[int]


class MachineFiles:
    """Where a machine that joined keeps what it must find again; apart from a home that several machines see."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.root = home.run / f"joined-{process.machine_id()}"

    @property
    def membership(self) -> Path:
        return self.root / "membership.json"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def log(self) -> Path:
        return self.root / "agent.log"

    @property
    def lock(self) -> Path:
        """Held while the membership is taken back, and by who starts agent or watcher because there is one."""
        return self.home.run / f"joined-{process.machine_id()}.lock"

    def start(self, name: str) -> None:
        """Start the agent or its watcher if it does not run and this machine is still a member."""
        run = RunFolder(self.root)
        with file_locks.locked(self.lock):
            if run.find_alive(name) is not None or self.read() is None:
                return
            more = (WATCH,) if name == WATCHER else ()
            command = (sys.executable, "-m", MODULE, str(self.home.root), *more)
            process.spawn(Spawn(command=command, env={}, log=self.log, cwd=self.home.root), name=name, run=run)

    def read(self) -> Membership | None:
        """The membership of this machine, or None."""
        try:
            return Membership(**json.loads(self.membership.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
            return None

    def seen(self) -> MachineStatus:
        """What the agent wrote last."""
        try:
            found: MachineStatus = json.loads(self.status.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {"state": "joining", "text": "", "engine": ""}
        return found


def service_url(address: str) -> str:
    """The address of a service from ``HOST``, ``HOST:PORT`` or a URL. Raises BadInput."""
    text = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadInput(f"{address!r} is not the address of a service: {error}", hint="write HOST:PORT") from None
    if not host or parts.scheme not in ("http", "https"):
        raise BadInput(f"{address!r} is not the address of a service", hint="write HOST:PORT or http://HOST:PORT")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port or DEFAULT_PORT}"


def join(
    settings: Settings,
    address: str,
    *,
    token: str,
    name: str = "",
    cpus: int | None = None,
    gpus: int | None = None,
    labels: Sequence[str] = (),
    at: str = "",
) -> JoinDocument:
    """Make this machine a node of the installation whose service is at ``address``; returns once it is one.

    Raises BadInput, NotReachable (service or engine), NoToken, NotAllowed, Conflict (versions, name, what runs here),
    TimedOut when the service does not see the machine. Nothing that this started is left running then; what ran before,
    of a machine that joined already, continues.
    """
    environ.export(FAMILIES_VARIABLE, settings.device_families)
    wanted = _membership(settings, address, token, name, cpus, gpus, labels, at)
    home = Home.of(settings.home).make()
    cache.check_limits(home.root, data_cache.LIMIT, image.LIMIT)
    files = MachineFiles(home)
    with file_locks.locked(home.run / f"join-{process.machine_id()}.lock"):
        _check_free(home, files, wanted)
        joined_before = RunFolder(files.root).find_alive(AGENT) is not None
        try:
            _ask_access(wanted)
            _start_agent(files, wanted)
            _wait_joined(files, wanted)
        except (RotaError, OSError, KeyboardInterrupt):
            if not joined_before:
                _end(files)
            raise
    text = f"{wanted.host} joined {wanted.url}"
    return _document("joined", wanted, text=text)


def leave(settings: Settings, *, force: bool = False) -> JoinDocument:
    """End what ``join`` started here, with the processes of jobs on it; ``force`` does not ask the service."""
    home = Home.of(settings.home)
    files = MachineFiles(home)
    known = files.read()
    if known is None and not files.root.exists():
        return _document("left", None, text="this machine has not joined an installation")
    with file_locks.locked(home.run / f"join-{process.machine_id()}.lock"):
        if known is not None and not force:
            with contextlib.suppress(RotaError), Client(known.url, known.token, timeout_s=ASK_TIMEOUT_S) as client:
                client.leave_machine(known.host)
        ended, left = _end(files)
    return _document("stuck" if left else "left", known, ended=ended, left=left)


def has_joined(settings: Settings) -> bool:
    """True when this machine joined an installation elsewhere, by this home."""
    home = Home.of(settings.home)
    return home.run.is_dir() and MachineFiles(home).root.exists()


def _document(
    state: str, known: Membership | None, *, text: str = "", ended: Sequence[str] = (), left: Sequence[int] = ()
) -> JoinDocument:
    return {
        "api": "rota/v1",
        "kind": "Join",
        "state": state,
        "host": known.host if known else "",
        "url": known.url if known else "",
        "address": known.address if known else "",
        "text": text,
        "ended": list(ended),
        "still_running": list(left),
    }


def _membership(
    settings: Settings,
    address: str,
    token: str,
    name: str,
    cpus: int | None,
    gpus: int | None,
    labels: Sequence[str],
    at: str,
) -> Membership:
    url = service_url(address)
    if not token:
        hint = "an admin makes one: rota token create --role machine; give it as --token or in ROTA_TOKEN"
        raise BadInput("a machine needs a token to join", hint=hint)
    if cpus is not None and cpus < 1:
        raise BadInput(f"--cpus {cpus}: at least 1")
    there = len(local_devices())
    if gpus is not None and not 0 <= gpus <= there:
        raise BadInput(f"--gpus {gpus}: this machine has {there}", hint="leave it out to use all")
    pairs = [text.partition("=") for text in labels]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise BadInput(f"--label {key}{equals}{value}: not KEY=VALUE", hint="for example --label rack=r1")
    parts = urlsplit(url)
    try:
        own = at or address_towards(str(parts.hostname), int(parts.port or DEFAULT_PORT))
    except OSError as error:
        raise NotReachable(f"{parts.hostname}: {error.strerror or error}", hint="is the name right?") from None
    return Membership(
        url=url,
        token=token,
        host=name or host_name(),
        address=own,
        home=settings.home,
        cpus=cpus or math.ceil(local_node().cpus),
        gpus=gpus,
        labels={key: value for key, _, value in pairs},
    )


def _check_free(home: Home, files: MachineFiles, wanted: Membership) -> None:
    """Raises Conflict when this machine has a service in this home, or joined another installation."""
    if (record := find_service(home)) is not None:
        hint = "join from another home: ROTA_HOME=FOLDER rota join ..., or end the service: rota down"
        raise Conflict(f"a Rota service runs in {home.root} on this machine ({record['url']})", hint=hint)
    known = files.read()
    if known is not None and replace(known, token=wanted.token) != wanted:
        text = f"this machine is {known.host} of {known.url} already"
        raise Conflict(text, hint="first: rota leave")
    if known is None and files.root.exists():  # a join that was killed left it: no other would clear it away
        _end(files)


def _facts(wanted: Membership) -> dict[str, object]:
    return {
        "host": wanted.host,
        "identity": machine_identity(),
        "address": wanted.address,
        "versions": own_versions(),
    }


def _ask_access(wanted: Membership) -> EngineAccess:
    """What the service gives to a machine that may join. Raises what is in the way."""
    try:
        with Client(wanted.url, wanted.token) as client:
            found = client.join_machine(_facts(wanted))
    except NotReachable as error:
        hint = f"is it up there (rota up --listen ADDRESS), and its port open to {wanted.address}?"
        raise NotReachable(error.message, hint=hint) from None
    row = found.get("access")
    if row is None:
        raise Conflict(f"{wanted.url} gave no access to its engine", hint="is it of the same version?")
    access = EngineAccess(**row)
    _check_reached(access.address)
    return access


def _check_reached(address: str) -> None:
    """Raises NotReachable when no connection to the engine can be made."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        hint = "machines of an installation reach each other on all TCP ports above 1024: see the firewall between them"
        raise NotReachable(f"the engine at {address} cannot be reached: {error.strerror or error}", hint=hint) from None


def _start_agent(files: MachineFiles, wanted: Membership) -> None:
    files.root.mkdir(mode=environ.PRIVATE_DIR, parents=True, exist_ok=True)
    process.write_private(files.membership, json.dumps(asdict(wanted)))
    if RunFolder(files.root).find_alive(AGENT) is None:
        files.status.unlink(missing_ok=True)
        files.start(AGENT)


def _wait_joined(files: MachineFiles, wanted: Membership) -> None:
    """Until the service lists this machine as a node. Raises TimedOut with what is known of the reason."""
    clock = SystemClock()
    until_s = clock.monotonic_s() + JOIN_S
    run, state = RunFolder(files.root), ""
    with Client(wanted.url, wanted.token, timeout_s=ASK_TIMEOUT_S) as client:
        while clock.monotonic_s() < until_s:
            if run.find_alive(AGENT) is None:
                raise EngineUnavailable("the agent of this machine ended", hint=last_line(files.log))
            with contextlib.suppress(NotReachable, UnknownName, TimedOut):
                state = client.machine(wanted.host)["state"]
            if state not in ("", "joining") and files.seen()["state"] == "joined":
                return
            threading.Event().wait(ASK_S / 4)
    seen = files.seen()
    if seen["state"] == "joined":
        text = f"the engine runs here, and {wanted.url} does not see it within {JOIN_S:.0f} s"
        raise TimedOut(text, hint=f"can that machine reach this one at {wanted.address}? See the firewall between them")
    raise TimedOut(f"{wanted.host} is not a node after {JOIN_S:.0f} s: {seen['text']}", hint=last_line(files.log))


def _end(files: MachineFiles) -> tuple[list[str], list[int]]:
    """End agent, node and registry, and remove their files; what was ended, and processes that do not end."""
    run, ended, left = RunFolder(files.root), list[str](), list[process.ProcessId]()
    with file_locks.locked(files.lock):  # from here on neither starts the other one
        files.membership.unlink(missing_ok=True)
    for name in (WATCHER, AGENT):
        if (found := run.find_alive(name)) is not None:
            ended += [name] if name == AGENT else []
            if not process.stop(found.id, grace_s=0.0):
                left.append(found.id)
    ended += _end_node(files, left) + _end_memory(files)
    if not left:
        shutil.rmtree(files.root, ignore_errors=True)
    return ended, [one.pid for one in left]


def _end_node(files: MachineFiles, left: list[process.ProcessId]) -> list[str]:
    """End the node with all that runs there; what was ended."""
    ended = ["engine"] if find_joined(files.root) is not None else []
    left += stop_engine(files.root)
    return ended


def _end_memory(files: MachineFiles) -> list[str]:
    """End the registry with its shared memory; what was ended."""
    from rota.tensors.api.store import down as end_registry  # noqa: PLC0415 - with numpy, which only an end needs

    return ["registry"] if end_registry(files.home.root) else []


class JoinAgent:
    """Keeps this machine in its installation, until SIGTERM."""

    def __init__(self, files: MachineFiles, member: Membership) -> None:
        self._files, self._member = files, member
        self._clock = SystemClock()
        self._stopping = threading.Event()
        self._refused_s: float | None = None
        """Since when service and engine refuse connections."""
        self._status: MachineStatus = {"state": "", "text": "", "engine": ""}

    def _on_signal(self, signum: int, frame: object) -> None:
        self._stopping.set()

    def run(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)
        process.become_subreaper()
        while not self._stopping.is_set():
            with Client(self._member.url, self._member.token, timeout_s=ASK_TIMEOUT_S) as client:
                self._turns(client)

    def _turns(self, client: Client) -> None:
        """Look at the service until SIGTERM, or until this machine was joined again with another token."""
        while not self._stopping.is_set() and not self._takes_new_token():
            try:
                self._turn(client)
            except (RotaError, OSError) as error:
                self._note("waiting", str(error))
            self._files.start(WATCHER)
            process.reap_adopted()
            self._stopping.wait(ASK_S)

    def _takes_new_token(self) -> bool:
        """True when the membership was written with another token: the one before may have expired."""
        known = self._files.read()
        if known is None or known.token == self._member.token:
            return False
        self._member = known
        return True

    def _turn(self, client: Client) -> None:
        """One look at the service and at the node of this machine."""
        try:
            engine = client.heartbeat_of_machine(self._member.host)["engine"]
        except UnknownName:  # a service that began anew
            engine = ""
        except NotReachable as error:
            self._away(error)
            return
        self._refused_s = None
        mine = find_joined(self._files.root)
        if mine is None or not engine or mine.engine != engine:
            self._join()
        else:
            self._keep_registry()
            self._note("joined", "", engine)

    def _join(self) -> None:
        """Take part in the engine that runs now, with the node and registry of this machine."""
        access = _ask_access(self._member)
        member = self._member
        settings = EngineSettings(
            host=member.host, cpus=member.cpus, listen=member.address, labels=member.labels, address=access.address
        )
        given = {environ.HOME: member.home}
        if member.gpus is not None:
            given[GPUS_MAX_VARIABLE] = str(member.gpus)
        state = join_engine(self._files.root, settings, access, environment=given)
        self._keep_registry()
        self._note("joined", "", state.engine)

    def _keep_registry(self) -> None:
        home = self._files.home
        if find_running(home) is None:
            try:
                with registry_lock(home):
                    find_or_start(home, keep=True)
            except RegistryUnavailable as error:  # the tensor store is off here, as 'rota doctor' says
                _say(str(error))

    def _away(self, error: NotReachable) -> None:
        """End the parts of this machine when the installation has ended; one that is cut off keeps them."""
        mine = find_joined(self._files.root)
        refused = _refuses(*_host_port(self._member.url)) and (mine is None or _refuses(*_split(mine.address)))
        now_s = self._clock.monotonic_s()
        self._refused_s = (self._refused_s or now_s) if refused else None
        if self._refused_s is not None and now_s - self._refused_s >= ENDED_S:
            _end_node(self._files, [])
            if now_s - self._refused_s >= MEMORY_S:
                _end_memory(self._files)
            self._note("waiting", f"the installation has ended: {error.message}")
        else:
            self._note("waiting" if mine is None else "joined", error.message, "" if mine is None else mine.engine)

    def _note(self, state: str, text: str, engine: str = "") -> None:
        found: MachineStatus = {"state": state, "text": text, "engine": engine}
        if found != self._status:
            self._status = found
            process.write_private(self._files.status, json.dumps(found))
            _say(f"{state} {engine} {text}".strip())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the log of the agent


def _host_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or DEFAULT_PORT)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _refuses(host: str, port: int) -> bool:
    """True when the machine is there and nothing listens on the port; False also when it does not answer."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def watch(files: MachineFiles) -> None:
    """Start the agent whenever it does not run, as long as this machine is a member."""
    run = RunFolder(files.root)
    while files.read() is not None:
        agent = run.find_alive(AGENT)
        if agent is None:
            files.start(AGENT)
            blocking_sleep(ASK_S)  # one that ends at once is not started without end
        else:
            process.wait_gone((agent.id,), ASK_S)
        process.reap_adopted()


def main(arguments: list[str]) -> int:
    """``HOME [watch]``: keep the membership of this machine that was written there, or watch who does."""
    os.umask(0o077)
    files = MachineFiles(Home.of(arguments[0]))
    if WATCH in arguments[1:]:
        watch(files)
        return 0
    member = files.read()
    if member is None:
        _say(f"{files.membership} holds no membership")
        return 1
    JoinAgent(files, member).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
