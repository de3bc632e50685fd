"""Commands of a job whose queue has a user (``run_as``), or that names an image: how they start, with what environment.

The folders that all instances of the job on a machine share as ``/tmp`` and ``/dev/shm`` are removed with the last.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rota.job.instance.runners import InstanceConfig, environment_of
from rota.job.place import checkpoint_dir
from rota.runtime import image, isolation
from rota.runtime.devices import local_family
from rota.runtime.environ import EPOCH, HOME, INSTANCE, JOB, NODE, PRIVATE_DIR, ROLE, Home, get
from rota.runtime.file_locks import take_lock, try_lock
from rota.runtime.node import NODE_ADDRESS
from rota.runtime.undo import undone_if_raised

SHM_PREFIX = "/dev/shm/rota-tenant-"
_KEPT = ("PATH", "LANG", "TZ", "TERM", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_PROGRAMS = {"PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV"}
_KEPT_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "PYTHON", "ROTA_PORT_")
_OF_INSTANCE = ("ROTA_ATTEMPT", "ROTA_OUTPUT_DIR", "ROTA_CHECKPOINT_DIR", "ROTA_DATA_DIR")
_KEPT_OF_ROTA = (HOME, JOB, ROLE, INSTANCE, EPOCH, NODE, NODE_ADDRESS, *_OF_INSTANCE)
"""What an instance is given of Rota; other variables that begin so are settings of the service, maybe passwords."""
LOCK_S = 10.0
"""Longest wait for an instance of the same job that starts, or removes the shared folders."""
_OPEN = "shared"
"""The part of a shared folder that the tenant sees: what is locked is above it, where no user can lock it."""


def command(config: InstanceConfig, argv: Sequence[str], *given: Path) -> tuple[str, ...]:
    """The command as it is started: by ``rota.runtime.isolation`` where the job has a user or image, else as it is.

    ``given`` are folders below the work folder that the user may write.
    """
    if config.spec.image:
        return _in_image(config, argv)
    if not config.spec.run_as:
        return tuple(argv)
    home, job = Home.of(config.place.home), config.place.job
    dirs = home.job(job)
    work = dirs.work / f"{config.id.role}-{config.id.rank}"
    own = [dirs.output, work]  # not what the job names: a folder of another one could become the user's
    if Path(checkpoint_dir(config.spec, config.place)) == home.root / "checkpoints" / job:
        own.append(home.root / "checkpoints" / job)
    asked = {
        "user": config.spec.run_as,
        "home": str(home.root.resolve()),
        "programs": [sys.prefix],
        "given": [str(path) for path in (*own, *given) if path.is_dir()],
        "shown": [str(path) for path in own if path.is_dir()],
        "tmp": str(_shared(dirs.root / "tmp")),
        "shm": str(_shared(Path(SHM_PREFIX + job))),
    }
    return (sys.executable, "-I", "-S", isolation.__file__, json.dumps(asked), *argv)


def _in_image(config: InstanceConfig, argv: Sequence[str]) -> tuple[str, ...]:
    """With the home of the installation, the code, and the folders that the job names, at their paths."""
    spec, data = config.spec, get("ROTA_DATA_DIR") or config.spec.data or ""
    named = (spec.output_dir, checkpoint_dir(spec, config.place), data)
    found = [config.place.home, str(Path.cwd()), *(one for one in named if one and Path(one).is_absolute())]
    drivers = image.driver_files() if config.devices else []
    given, links = [*dict.fromkeys((*found, *drivers))], image.library_links(drivers)
    asked = {"image": get(image.FOLDER), "name": spec.image, "given": given, "links": links}
    return (sys.executable, "-I", "-S", isolation.__file__, json.dumps(asked), *argv)


def variables(config: InstanceConfig) -> dict[str, str]:
    """The variables of this process, with those of the job, which a process that starts tenants does not have."""
    return {**environment_of(config), **(own_variables(config) if config.spec.run_as else {})}


def own_variables(config: InstanceConfig) -> dict[str, str]:
    """What the job file sets."""
    return {**dict(config.spec.env), **dict(config.role.env)}


def environment(found: Mapping[str, str], config: InstanceConfig, given: Collection[str] = ()) -> dict[str, str]:
    """The variables under which ``isolation`` starts: those of the command under other names, and nothing else.

    The command has what the job file and ``given`` set, the variables of an instance (``_KEPT_OF_ROTA``), and
    from the environment of the service what programs, devices and their libraries need (``_KEPT``,
    ``_KEPT_PREFIXES``); where it runs in an image, programs and libraries are those of the image. Under their own names
    the loader and the interpreter would act on them before the user is changed. Without a user or image, all that is
    ``found``.
    """
    if not (config.spec.run_as or config.spec.image):
        return dict(found)
    devices = local_family().environment(config.devices)
    own = {*given, *own_variables(config), *config.spec.secrets, *_KEPT, *_KEPT_OF_ROTA, *devices}
    if config.spec.image:
        own -= _PROGRAMS - own_variables(config).keys()
    return {"PATH": os.defpath} | {
        isolation.PREFIX + name: value
        for name, value in found.items()
        if name in own or (name.startswith(_KEPT_PREFIXES) and not (config.spec.image and name.startswith("PYTHON")))
    }


_locks = dict[Path, int]()
_changing = threading.Lock()


def _shared(path: Path) -> Path:
    """A folder that every user may write, below ``path``, which is kept by a lock of this process.

    Raises TimedOut when another process holds the lock for ``LOCK_S``.
    """
    with _changing:
        while path not in _locks:
            path.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
            try:
                file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:  # removed meanwhile
                continue
            with undone_if_raised(os.close, file):
                take_lock(path, lambda one=file: try_lock(one, shared=True), LOCK_S)
                kept = _is_at(file, path)
            if kept:
                _locks[path] = file
            else:  # it was removed before the lock was had: this one is of a folder without a name
                os.close(file)
        found = path / _OPEN
        found.mkdir(exist_ok=True)
        found.chmod(0o1777)
        return found


def _is_at(file: int, path: Path) -> bool:
    """Whether the open folder is the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def remove_shared() -> None:
    """At the end of an instance: remove what no other instance uses, also what killed ones left."""
    with _changing:
        for path in [*_locks, *Path("/dev/shm").glob(f"{Path(SHM_PREFIX).name}*")]:
            file = _locks.pop(path, None)
            with contextlib.suppress(OSError):
                file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) if file is None else file
                if try_lock(file):
                    shutil.rmtree(path, ignore_errors=True)
                os.close(file)
