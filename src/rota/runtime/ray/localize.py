"""The start of an instance on its machine: paths rewritten, code and secrets fetched from the service's machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayError

from rota.runtime import cache, environ, file_locks, secrets
from rota.runtime.clock import SystemClock
from rota.runtime.code_pack import CodeCache, unpack
from rota.runtime.environ import Home, JobDirs
from rota.runtime.job_files import machine_home, sees
from rota.runtime.launcher import CallTimeout
from rota.runtime.ray.agent import ANSWER_S, SERVICE, namespace_of, packed
from rota.spec.errors import RotaError

if TYPE_CHECKING:
    from rota.runtime.ray.host import Boot

FETCH_S = 120.0
"""Limit of the attempts to reach the agent of the service's machine."""
_RETRY_S = 0.5
UNUSED_S = 86_400.0
"""Unpacked code that no process has used for this long may be removed."""


def localized(boot: Boot) -> tuple[Boot, dict[str, str]]:
    """The start with the paths of this machine, and the values of its secrets.

    The code of a job that was packed at its submit is unpacked for all of its instances, and is their working folder.
    An instance on a machine that does not see the home of the service has home, log, output and checkpoints in the home
    of this machine, and its secrets from the service's machine. Raises CallTimeout while that cannot be reached.
    """
    service_home = boot.env.get(environ.HOME, "")
    place = cast("dict[str, str] | None", boot.args.get("place"))
    if place is None:
        return boot, secrets.open_from_environ(boot.env)
    if sees(service_home, boot.installation):
        job, home = place["job"], Home.of(service_home)
        if boot.installation and boot.workdir and home.job(job).code_name.exists():
            boot = replace(boot, workdir=str(_code_of(job, home, lambda: _archive_here(home, job, boot.workdir))))
        return boot, secrets.open_from_environ(boot.env)
    home = machine_home(service_home, boot.installation).make()
    fetch = partial(_fetched, boot.namespace, place["job"], boot.workdir, home)
    workdir = boot.workdir and str(_code_of(place["job"], home, fetch))

    def here(path: str) -> str:
        inside = path == service_home or path.startswith(f"{service_home}/")
        return f"{home.root}{path.removeprefix(service_home)}" if inside else path

    env = {name: here(value) for name, value in boot.env.items()}
    named = env.get(secrets.VARIABLE, "")
    opened: dict[str, str] = _asked(boot.namespace, "secrets", named) if named else {}
    there = replace(
        boot,
        env=env,
        workdir=workdir,
        log_path=boot.log_path and here(boot.log_path),
        args={**boot.args, "place": {**place, "home": str(home.root), "workdir": workdir}},
    )
    return there, opened


def _code_of(job: str, home: Home, archive: Callable[[], Path]) -> Path:
    """The unpacked code of a job, made by the first instance of this machine; the others wait for it.

    Each process shares a lock on it until it ends: what no process holds is removed when the code of others comes.
    """
    dirs = home.job(job).make()
    cache.hold(dirs.code_lock)
    with file_locks.locked(dirs.root / "code.making"):
        if not dirs.code.is_dir():
            unpack(archive(), dirs.code)
            remove_unused(home)
    return dirs.code


def _archive_here(home: Home, job: str, workdir: str) -> Path:
    return CodeCache(home.code_archives).path(packed(home, job, workdir)[0])


def _fetched(namespace: str, job: str, workdir: str, home: Home) -> Path:
    """The archive of a job from the service's machine, unless this machine has it from another job."""
    archives = CodeCache(home.code_archives)
    digest, size = _asked(namespace, "code", job, workdir)
    if (found := archives.find(digest)) is None:
        found = archives.put(digest, _parts(namespace, digest, size))
        archives.trim({digest})
    return found


def remove_unused(home: Home, unused_s: float = UNUSED_S) -> None:
    """Remove the unpacked code of jobs that no process has held for ``unused_s``; each can be unpacked again."""
    locks = (JobDirs(root=folder).code_lock for folder in home.jobs.iterdir())
    before_s = SystemClock().wall_s() - unused_s
    cache.remove_unused(locks, before_s, lambda lock: cache.remove_folder(JobDirs(root=lock.parent).code))


def _parts(namespace: str, digest: str, size: int) -> Iterator[bytes]:
    offset = 0
    while offset < size:
        part: bytes = _asked(namespace, "code_part", digest, offset)
        if not part:
            return  # it was cut: the digest shows it
        offset += len(part)
        yield part


def _asked(namespace: str, method: str, *args: object) -> Any:
    """Ask the agent of the service's machine, from a process that starts. Raises CallTimeout, or what it answers."""
    deadline = time.monotonic() + FETCH_S
    while True:
        try:
            agent = ray.get_actor(SERVICE, namespace=namespace_of(namespace))
            answer: Any = ray.get(getattr(agent, method).remote(*args), timeout=ANSWER_S)
            break
        except (RayError, ValueError, TimeoutError) as error:  # ValueError: Ray knows no such actor (yet)
            if time.monotonic() > deadline:
                text = f"the machine of the service did not send what this instance needs ({method}): {error}"
                raise CallTimeout(text) from error
            time.sleep(_RETRY_S)
    if isinstance(answer, RotaError):
        raise answer
    return answer
