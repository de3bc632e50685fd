"""Commands of a job whose queue has a user of its own (``run_as``): how they start as that user, with what environment.

The folders that all instances of the job on a machine share as ``/tmp`` and ``/dev/shm`` are removed with the last.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rota.job.instance.runners import InstanceConfig
from rota.job.rpc.peers import checkpoint_dir
from rota.runtime import isolation
from rota.runtime.environ import PRIVATE_DIR, REDIS_URL, Home, snapshot
from rota.runtime.process import try_lock

SHM_PREFIX = "/dev/shm/rota-tenant-"
_KEPT = ("PATH", "LANG", "TZ", "TERM", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_KEPT_PREFIXES = ("ROTA_", "LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "PYTHON")


def command(config: InstanceConfig, argv: Sequence[str], *given: Path) -> tuple[str, ...]:
    """The command as it is started: by ``rota.runtime.isolation`` where the job has a user, else as it is.

    ``given`` are folders below the work folder that the user may write.
    """
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


def variables(config: InstanceConfig) -> dict[str, str]:
    """The variables of this process, with those of the job, which a process that starts tenants does not have."""
    return {**snapshot(), **(own_variables(config) if config.spec.run_as else {})}


def own_variables(config: InstanceConfig) -> dict[str, str]:
    """What the job file sets."""
    return {**dict(config.spec.env), **dict(config.role.env)}


def environment(found: Mapping[str, str], config: InstanceConfig, given: Collection[str] = ()) -> dict[str, str]:
    """The variables under which ``isolation`` starts: those of the command under other names, and nothing else.

    The command has what is the job's, and what programs need (``_KEPT``). Under their own names the loader and the
    interpreter would act on them before the user is changed.
    """
    own = {*given, *own_variables(config), *config.spec.secrets}
    return {"PATH": os.defpath} | {
        isolation.PREFIX + name: value
        for name, value in found.items()
        if name in own or name in _KEPT or (name.startswith(_KEPT_PREFIXES) and name != REDIS_URL)
    }


_locks = dict[Path, int]()


def _shared(path: Path) -> Path:
    """A folder that every user may write, kept by a lock of this process."""
    if path not in _locks:
        path.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
        _locks[path] = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        os.fchmod(_locks[path], 0o1777)
        fcntl.flock(_locks[path], fcntl.LOCK_SH)
    return path


def remove_shared() -> None:
    """At the end of an instance: remove what no other instance uses, also what killed ones left."""
    for path in [*_locks, *Path("/dev/shm").glob(f"{Path(SHM_PREFIX).name}*")]:
        file = _locks.pop(path, None)
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) if file is None else file
            if try_lock(file):
                shutil.rmtree(path, ignore_errors=True)
            os.close(file)
