"""Python packages of a role: an environment for each list of them, built once on a machine and kept by its content.

``python -m rota.runtime.packages HOME WORKDIR JSON`` builds one and prints its folder; it ends with status 1 and the
last lines of pip when that fails. An environment lies on top of the interpreter of Rota: what that has is there too,
and is not installed again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rota.runtime import cache, environ, file_locks
from rota.runtime.clock import SystemClock
from rota.runtime.environ import Home

PYTHON = "ROTA_PYTHON"
"""Variable of an instance with packages: the interpreter of its commands."""
UNUSED_S = 30 * 86_400.0
"""An environment that no process has used for this long is removed when another one is built."""
LINES_SHOWN = 12
_SETTINGS = ("PIP_",)
_PARENT = "rota_parent.pth"


class PackagesFailed(Exception):
    """The packages of a role could not be installed; the message has the last lines of pip."""


def key_of(packages: Sequence[str], files: Mapping[str, bytes], settings: Mapping[str, str]) -> str:
    """Name of an environment: requirements in their order, contents of files among them, settings of pip, Python."""
    parts = {
        "packages": list(packages),
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())},
        "settings": {name: value for name, value in sorted(settings.items()) if name.startswith(_SETTINGS)},
        "python": [sys.version, sys.prefix],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def requirement_arguments(packages: Sequence[str], workdir: Path) -> list[str]:
    """Arguments of pip: a ``*.txt`` is a file of requirements in the workdir, all else one requirement or path."""
    found: list[str] = []
    for one in packages:
        found += ["-r", str(workdir / one)] if one.endswith(".txt") else [one]
    return found


def environment_of(home: Home, packages: Sequence[str], workdir: str, settings: Mapping[str, str]) -> Path:
    """The folder of the environment of these packages, built or not. Raises PackagesFailed for a missing file."""
    files = dict[str, bytes]()
    for one in packages:
        path = Path(workdir) / one
        if one.endswith(".txt") or path.is_file():
            try:
                files[one] = path.read_bytes()
            except OSError as error:
                raise PackagesFailed(f"packages: {path} cannot be read: {error.strerror}") from None
    return home.root / "cache" / "packages" / key_of(packages, files, settings)


def build(
    home: Home, packages: Sequence[str], workdir: str, settings: Mapping[str, str], say: Callable[[str], None]
) -> Path:
    """The folder of the environment with these packages; the first caller of a machine builds it, others wait.

    ``say`` gets the lines of pip as they come. The lock is held by this process until it ends: an environment in use is
    not removed. Raises PackagesFailed.
    """
    folder = environment_of(home, packages, workdir, settings)
    folder.parent.mkdir(mode=environ.PRIVATE_DIR, parents=True, exist_ok=True)
    cache.hold(folder.with_suffix(".lock"))
    done = folder / "complete"
    if not done.exists():
        with file_locks.locked(folder.with_suffix(".making")):
            if not done.exists():
                cache.remove_unused(folder.parent.glob("*.lock"), SystemClock().wall_s() - UNUSED_S, _remove)
                say(f"packages: installing {', '.join(packages)}")
                _install(folder, requirement_arguments(packages, Path(workdir)), workdir, settings, say)
                done.touch()
                say("packages: installed")
    return folder


def _install(
    folder: Path, arguments: list[str], workdir: str, settings: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """An empty environment over the one of this interpreter, then pip of this interpreter into it."""
    shutil.rmtree(folder, ignore_errors=True)  # what a build that was killed left
    venv.create(folder, symlinks=True, with_pip=False)
    parents = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    above = "\n".join(f"import site; site.addsitedir({path!r})" for path in parents)
    (site_of(folder) / _PARENT).write_text(f"{above}\n")
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    pip = [sys.executable, "-m", "pip", "--python", str(python_of(folder)), "install", *options, *arguments]
    last = list[str]()
    with subprocess.Popen(
        pip,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=workdir or None,
        env={**environ.snapshot(), **settings},
    ) as child:
        assert child.stdout is not None, "it was asked for"
        for line in _lines(child.stdout):
            say(f"packages: {line}")
            last = [*last, line][-LINES_SHOWN:]
    if child.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        raise PackagesFailed("\n".join((f"pip ended with status {child.returncode}; its last lines:", *last)))


def _lines(text: Iterator[str]) -> Iterator[str]:
    for line in text:
        if (shown := line.rstrip()) and not shown.startswith("Requirement already satisfied"):
            yield shown


def _remove(lock: Path) -> None:
    cache.remove_folder(lock.with_suffix(""))


def installed_version(package: str) -> str:
    """The version of a package that this interpreter has; empty without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def site_of(folder: Path) -> Path:
    """Where the packages of an environment are."""
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def activate(folder: Path) -> None:
    """Let this process, and the commands that it starts, import from an environment before anything else."""
    before = list(sys.path)
    site.addsitedir(str(site_of(folder)))
    sys.path[:] = [path for path in sys.path if path not in before] + before
    importlib.invalidate_caches()
    os.environ[PYTHON] = str(python_of(folder))
    os.environ["VIRTUAL_ENV"] = str(folder)
    os.environ["PATH"] = f"{folder / 'bin'}:{environ.get('PATH', '/usr/bin:/bin')}"


def interpreter() -> str:
    """The Python that runs commands of this instance: that of its packages, else the one of Rota."""
    return environ.get(PYTHON, sys.executable)


def main() -> int:
    """Build what the arguments name."""
    home, workdir, given = sys.argv[1:]
    asked = json.loads(given)
    made = partial(build, Home.of(home), asked["packages"], workdir, asked["settings"], lambda line: None)
    return cache.print_folder(made, PackagesFailed)


if __name__ == "__main__":
    sys.exit(main())
