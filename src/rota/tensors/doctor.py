"""What is wrong with the tensor plane on this machine, and what to do: server, memory, limits, old leases."""

from __future__ import annotations

import os
import resource
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rota.tensors.session import Session, shm_base

_SHM_BYTES_MIN: Final = 1 << 30
_SHM_FREE_SHARE_MIN: Final = 0.1
_OPEN_FILES_MIN: Final = 1024
_LEASE_OLD_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: ``ok``, ``warn`` or ``fail``, what was found, what to do."""

    name: str
    level: Literal["ok", "warn", "fail"]
    value: str
    remedy: str = ""


def _server(session: Session) -> Finding:
    facts = session.machine.info("server") | session.machine.info("memory")
    name = "valkey" if "valkey_version" in facts else "redis"
    version = facts.get("valkey_version") or facts.get("redis_version", "?")
    ours = "started here" if session.server.ours else "given by URL"
    text = f"{name} {version}, {ours}, {facts.get('used_memory_human', '?')}, at {session.server.address.url}"
    return Finding(name="registry server", level="ok", value=text)


def _socket(session: Session) -> Finding:
    path = session.server.address.path
    if not path:
        remedy = "a handle of memory carries no permission check: use an ACL user, or a unix socket"
        return Finding(name="registry access", level="warn", value=session.server.address.url, remedy=remedy)
    mode = stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode)  # noqa: PTH116, PTH120  # a socket's folder, by its text
    if mode & 0o077:
        return Finding(name="registry access", level="fail", value=f"folder mode {mode:04o}", remedy="chmod 700")
    return Finding(name="registry access", level="ok", value=f"unix socket, folder mode {mode:04o}")


def _memory(folder: Path) -> list[Finding]:
    facts = os.statvfs(folder)
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    kind = _file_system(str(folder))
    found = [
        Finding(name="shared memory", level="ok", value=f"{kind} at {folder}, {size >> 20} MiB, {free >> 20} free")
    ]
    if kind != "tmpfs":
        remedy = "set ROTA_SHM_DIR to a tmpfs: on a disk every publish is ten times slower"
        found.append(Finding(name="shared memory kind", level="fail", value=kind, remedy=remedy))
    if size < _SHM_BYTES_MIN:
        remedy = "start the container with a larger shm size (docker run --shm-size)"
        found.append(Finding(name="shared memory size", level="fail", value=f"{size >> 20} MiB", remedy=remedy))
    if free < size * _SHM_FREE_SHARE_MIN:
        remedy = "rota tensors top shows who holds it; rota tensors gc gives free blocks back"
        found.append(Finding(name="shared memory free", level="warn", value=f"{free >> 20} MiB", remedy=remedy))
    return found


def _file_system(path: str) -> str:
    best, kind = "", "?"
    with open("/proc/self/mounts") as mounts:  # noqa: PTH123  # a kernel file, read as it is
        for line in mounts:
            _, point, name, *_ = line.split(" ")
            if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
                best, kind = point, name
    return kind


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES_MIN:
        remedy = f"ulimit -n {min(hard, 65536)}: each large tensor in use keeps a file open"
        return Finding(name="open files", level="warn", value=str(soft), remedy=remedy)
    return Finding(name="open files", level="ok", value=str(soft))


def _old_leases(session: Session) -> Finding:
    now_ms, oldest = session.clock.wall_s() * 1000, 0.0
    what = ""
    for key, fields in session.space.registry.dump().items():
        age_ms = now_ms - int(fields["at"]) if key.startswith("v:") and fields["st"] == "d" else 0
        if age_ms > max(oldest, _LEASE_OLD_S * 1000):
            oldest, what = age_ms, f"{fields['name']} v{key[2:]}, {fields['len']} bytes"
    if what:
        remedy = "rota tensors stat NAME shows the holders; their views keep the memory"
        return Finding(name="old leases", level="warn", value=f"{what}, for {oldest / 1000:.0f} s", remedy=remedy)
    return Finding(name="old leases", level="ok", value=f"none over {_LEASE_OLD_S:.0f} s")


def document(session: Session | None) -> dict[str, Any]:
    """The document of ``rota tensors doctor``, of the machine alone where no registry runs.

    None of the remedies is needed to work at all.
    """
    if session is None:
        base = shm_base()
        there = next(folder for folder in (base, *base.parents) if folder.exists())
        none = Finding(name="registry server", level="ok", value="none runs here: nothing is shared")
        found = [none, *_memory(there), _open_files()]
    else:
        folder = session.space.folder
        found = [_server(session), _socket(session), *_memory(folder), _open_files(), _old_leases(session)]
    return {"checks": [asdict(each) for each in found]}
