"""The actor class of every process Rota starts: prepares the process, makes the target, forwards calls to it."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import inspect
import ipaddress
import json
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import ray
from ray import cloudpickle

from rota.runtime import directory, environ, limit_watch, output_pump, packages, process, secrets
from rota.runtime.devices import local_family
from rota.runtime.environ import Home
from rota.runtime.launcher import RemoteError
from rota.runtime.node import NODE_ADDRESS, network_environment
from rota.runtime.probe import LOOK_S, HangWatch
from rota.runtime.ray.directory import RayDirectory
from rota.runtime.ray.localize import localized
from rota.runtime.ray.machines import own_host
from rota.runtime.socket_calls import CallServer
from rota.spec.codec import JsonObject
from rota.spec.user_code import UserCode

NAMESPACE_VARIABLE = "ROTA_NAMESPACE"
CONTROL_CALLS_MAX = 256
USER_CALLS_MAX = 1024
_CONTROL_THREADS = 8
_USER_THREADS = 64
_RESTART_PAUSE_S = 5.0
PUMPS_MAX = 20
"""Times that the pump of a log is started anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What a host needs to become an instance or a master. ``label`` stamps its lines in the log.

    ``restarts``: Ray starts it again when it dies, as only a master is.
    """

    name: str
    namespace: str
    target: str
    args: Mapping[str, object]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    devices: tuple[int, ...] = ()
    cpus: float = 0.0
    workdir: str = ""
    imports: bool = True
    log_path: str = ""
    label: str = "0/0"
    node: str = ""
    restarts: bool = False
    key: bytes = field(default=b"", repr=False)
    """What the process proves to others of its job that it belongs to it; a master derives those of its instances."""
    packages: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict[str, int])
    """``memory`` and ``disk`` in bytes, ``processes``, ``files``; what is missing or 0 has no limit."""
    installation: str = ""
    """Set on an engine that others run: a machine may have files of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """How the start went: the process, or what the import or constructor of the target raised."""

    pid: int
    start_time: float
    node: str
    failure: Raised | None = None
    address: str = ""
    """Where processes on other machines call it."""
    breach: str = ""
    """See Handle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception on its way to the caller, with its traceback as text."""

    error: BaseException
    traceback: str


_keys = list[bytes]()
"""The key of this process, once it is a host."""


def own_key() -> bytes:
    """The key with which this process was started; empty where none was."""
    return _keys[-1] if _keys else b""


CallHead = list[object]
"""The name of a method, then the first arguments of a call."""


class Host:
    """Made as a detached named actor. Ray runs each concurrency group in an event loop and thread of its own.

    A sync method of the target runs in a pool of threads, an async one in the event loop of its group, so that control
    calls go through whatever user code does. A target with a method ``adopt`` is given the loop of its user calls. Only
    the constructor runs again when Ray restarts a master, therefore the target is made there.
    """

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._threads = {
            "control": ThreadPoolExecutor(_CONTROL_THREADS, thread_name_prefix="control"),
            "user": ThreadPoolExecutor(_USER_THREADS, thread_name_prefix="user"),
        }
        self._target: Any = None
        self._server: CallServer | None = None
        self._address = ""
        self._methods: dict[str, tuple[Callable[..., Any], bool]] = {}
        self._failure: Raised | None = None
        _keys.append(boot.key)
        try:
            self._boot = boot = prepare(boot)
            self._target = make_target(boot)
        except BaseException as error:  # noqa: BLE001 - the edge of a process; the launcher raises it to the caller
            self._failure = raised(error)
            traceback.print_exc()
        if self._failure is not None and boot.restarts and ray.get_runtime_context().was_current_actor_reconstructed:
            # No caller waits for the constructor of a restarted master: end, so that Ray tries again, but not at once.
            time.sleep(_RESTART_PAUSE_S)
            os._exit(1)

    @ray.method(concurrency_group="user")
    async def born(self) -> Begun:
        """The first call: gives the target the event loop of its user calls."""
        adopt = getattr(self._target, "adopt", None)
        if adopt is not None:
            adopt(asyncio.get_running_loop())
        self._listen()
        return self._begun()

    def _listen(self) -> None:
        """Take user calls over sockets: of this machine, and of others where its address is not the loopback one.

        Also of a job that has no member elsewhere yet: it may get one while this process lives.
        """
        if self._server is not None or self._target is None or self._boot.restarts:
            return
        name = f"{self._boot.namespace}/{self._boot.name}"
        self._server = CallServer(self._called, fallback=cloudpickle.dumps)  # pyright: ignore[reportPrivateImportUsage] - public
        try:
            self._server.open(name)
        except OSError as error:
            self._failure = raised(error)
        host = os.environ[NODE_ADDRESS]
        if self._boot.key and not ipaddress.ip_address(host).is_loopback:
            try:
                self._address = self._server.open_tcp(name, host, self._boot.key)
            except OSError as error:
                sys.stderr.write(f"cannot listen at {host}, so other machines cannot call this instance: {error}\n")

    async def _called(self, asked: tuple[CallHead, tuple[object, ...], Mapping[str, object]]) -> object:
        return await self._forward("user", *asked)

    @ray.method(concurrency_group="control")
    async def begin(self) -> Begun:
        """Who this is, and whether the target could be made."""
        return self._begun()

    def _begun(self) -> Begun:
        own = process.own_id()
        node, failure, address, breach = self._boot.node, self._failure, self._address, breach_file(self._boot)
        begun = Begun(pid=own.pid, start_time=own.start_time, node=node, failure=failure, address=address)
        return replace(begun, breach=breach)

    @ray.method(concurrency_group="control")
    async def until_end(self) -> None:
        """Never answers; it fails when this process is gone, and the caller learns of it so."""
        await asyncio.Event().wait()

    @ray.method(concurrency_group="control")
    async def control(self, head: CallHead, /, *args: object, **kwargs: object) -> object:
        """A control call on the target; ``head`` is the name of the method and its first arguments."""
        return await self._forward("control", head, args, kwargs)

    @ray.method(concurrency_group="user")
    async def user(self, head: CallHead, /, *args: object, **kwargs: object) -> object:
        """A user call on the target; ``head`` is the name of the method and its first arguments."""
        return await self._forward("user", head, args, kwargs)

    @ray.method(concurrency_group="control")
    async def end(self) -> object:
        """Let the target end gracefully (its ``stop()`` if it has one); the process itself is ended by the launcher."""
        answer = None
        if getattr(self._target, "stop", None) is not None:
            answer = await self._forward("control", ["stop"], (), {})
        flush()
        return answer

    async def _forward(
        self, group: str, head: CallHead, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        if self._failure is not None:
            return self._failure
        try:
            name = cast("str", head[0])
            if name not in self._methods:
                method = getattr(self._target, name)
                self._methods[name] = method, inspect.iscoroutinefunction(method)
            method, is_async = self._methods[name]
            args = (*head[1:], *args)
            if is_async:
                return await method(*args, **kwargs)
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self._threads[group], lambda: method(*args, **kwargs))
            return await result if inspect.isawaitable(result) else result
        except BaseException as error:  # noqa: BLE001 - carried to the caller, who raises it
            return raised(error)


def prepare(boot: Boot) -> Boot:
    """Output, environment, devices, working folder and import path of this process, before anything else is imported.

    Returns the boot with the paths of this machine.

    The environment is set here and not by Ray's ``runtime_env``, which costs a fresh worker and 1.2-1.7 s.
    """
    boot, opened = localized(boot)
    if boot.log_path:
        redirect_output(Path(boot.log_path), boot.label, hide=tuple(opened.values()))
    environ.forget_private()
    os.environ.update({**boot.env, **opened})
    os.environ[NAMESPACE_VARIABLE] = boot.namespace
    if "OMP_NUM_THREADS" not in boot.env:
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(boot.cpus)))
    shown = local_family().environment(boot.devices)
    os.environ.update({name: value for name, value in shown.items() if name not in boot.env})
    address = ray.util.get_node_ip_address()
    for name, value in network_environment(address).items():
        os.environ.setdefault(name, value)
    alone = ipaddress.ip_address(address).is_loopback
    directory.use(None if alone else RayDirectory(boot.namespace, own_host(boot.node), address))
    if boot.workdir:
        os.chdir(boot.workdir)
    if boot.packages:
        home = Home.of(boot.env[environ.HOME])
        packages.activate(packages.build(home, boot.packages, boot.workdir, boot.env, print))
    if boot.workdir and boot.imports:
        sys.path.insert(0, boot.workdir)
    enforce(boot)
    return boot


def enforce(boot: Boot) -> None:
    """Bound what this process and its children may use: open files by the kernel, the rest by a watch beside it."""
    if files := boot.limits.get("files", 0):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files) if most < 0 else (min(files, most), min(files, most)))
    if not (report := breach_file(boot)):
        return
    dirs = Home.of(boot.env[environ.HOME]).job(boot.env[environ.JOB])
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    asked = {
        "pid": os.getpid(),
        "start": int(stat[19]),
        "limits": dict(boot.limits),
        "folders": sorted({str(dirs.root), boot.env.get("ROTA_OUTPUT_DIR") or str(dirs.root)}),
        "report": report,
    }
    command = [sys.executable, "-I", "-S", limit_watch.__file__, json.dumps(asked)]
    subprocess.run(command, stdin=subprocess.DEVNULL, start_new_session=True, check=True, timeout=60)


def breach_file(boot: Boot) -> str:
    """Where the watch of this process writes which limit was exceeded; empty when it has none to watch."""
    if not any(boot.limits.get(kind) for kind in limit_watch.KINDS):
        return ""
    dirs = Home.of(boot.env[environ.HOME]).job(boot.env[environ.JOB])
    return str(dirs.breach(boot.env[environ.INSTANCE], os.getpid()))


def redirect_output(log_path: Path, label: str, hide: tuple[str, ...] = ()) -> None:
    """Send file descriptors 1 and 2, and Python's streams over them, line by line to the log of this instance.

    Values in ``hide`` are blacked out on the way. A pump that is killed is started anew: this process keeps the pipes,
    so that a writer never gets a broken pipe.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    flush()
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    pipes = (out_read, err_read)
    command = [sys.executable, "-I", "-S", output_pump.__file__, str(log_path), label, *map(str, pipes), "apart"]
    # The values are not an argument: those stand in the list of processes.
    values = b"\0".join(value.encode() for value in hide)

    def start(stderr: int | None) -> int:
        options: JsonObject = {"pass_fds": pipes, "start_new_session": True, "check": True, "timeout": 60}
        return int(subprocess.run(command, input=values, stdout=subprocess.PIPE, stderr=stderr, **options).stdout)

    pump = start(None)
    os.dup2(out_write, 1)
    os.dup2(err_write, 2)
    for fd in (out_write, err_write):
        os.close(fd)
    threading.Thread(target=_keep_pumping, args=(start, pump, pipes), name="rota-log", daemon=True).start()
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def _keep_pumping(start: Callable[[int], int], pump: int, pipes: Sequence[int]) -> None:
    """Start another pump when one is gone; what a killed one had read and not written yet is lost.

    When no further one is to be had, all that is written is lost from then on: a full pipe would hold the writers up.
    """
    for _ in range(PUMPS_MAX):
        _wait_gone(pump)
        try:
            pump = start(subprocess.DEVNULL)  # stderr is its own pipe by now: holding that it would never see the end
        except (OSError, ValueError, subprocess.SubprocessError):
            break
    else:
        _wait_gone(pump)
    output_pump.pump(os.open(os.devnull, os.O_WRONLY), b"", dict.fromkeys(pipes, b""), [])


def _wait_gone(pid: int) -> None:
    """Until a pump is gone; one that hangs is ended."""
    with contextlib.suppress(ProcessLookupError):
        gone = os.pidfd_open(pid)
        try:
            poller = select.poll()
            poller.register(gone, select.POLLIN)
            which = process.identify(pid)
            looks = HangWatch()
            while not poller.poll(LOOK_S * 1000):
                if which is not None and looks.look(which):  # stopped: the pipes fill up, and hold up who writes
                    process.send_signal(which, signal.SIGKILL)
        finally:
            os.close(gone)


def flush() -> None:
    """Push out what Python's streams still hold."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def make_target(boot: Boot) -> object:
    """Import ``module:Class`` and make it. Raises ImportError, AttributeError, or what the constructor raises."""
    module_name, _, class_name = boot.target.partition(":")
    target: Any = importlib.import_module(module_name)
    for part in class_name.split("."):
        target = getattr(target, part)
    return target(**boot.args)


def raised(error: BaseException) -> Raised:
    """An exception that every caller can read: those of Rota and of Python itself, others as RemoteError."""
    text = secrets.redact("".join(traceback.format_exception(error)))
    return Raised(error=_portable(error, text), traceback=text)


def _portable(error: BaseException, text: str) -> BaseException:
    kind = type(error)
    foreign = kind.__module__ != "builtins" and not kind.__module__.startswith("rota.")
    if foreign or not isinstance(error, Exception) or not _survives(error):
        return RemoteError(f"{kind.__name__}: {error}", type_name=f"{kind.__module__}.{kind.__qualname__}", trace=text)
    return error


def _survives(error: Exception) -> bool:
    """An exception with own constructor arguments may be impossible to rebuild at the caller."""
    with UserCode() as copying:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - made one line above
    return not copying.failed
