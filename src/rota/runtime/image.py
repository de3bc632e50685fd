"""Images of containers: pulled by podman, docker or apptainer, unpacked once on a machine, kept by their content.

``python -m rota.runtime.image HOME IMAGE`` unpacks one and prints its folder on its last line; it ends with status 1
and the last lines of the tool when that fails. ``isolation.py`` runs commands in the folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rota.runtime import cache, environ, file_locks, process
from rota.runtime.clock import SystemClock
from rota.runtime.environ import Home
from rota.runtime.packages import LINES_SHOWN
from rota.spec.errors import RotaError
from rota.spec.resources import format_size

TOOLS = ("podman", "docker", "apptainer")
FOLDER = "ROTA_IMAGE_DIR"
"""Variable of an instance with an image: the folder with ``root`` and ``environment.json``."""
PULL_MAX_S = 3 * 3600.0
UNUSED_S = 30 * 86_400.0
"""An image that no process has used for this long is removed when another one is unpacked."""
LIMIT = "ROTA_IMAGE_CACHE"
"""Variable of a machine: most bytes of its images, such as ``500GiB``; by default a fifth of its disk."""
_ASK_S = 60.0
_DEVICES = ("--exclude=dev/*", "--exclude=./dev/*")
_DRIVER_S = 20.0
MISSING = (
    "this machine has neither podman, nor docker with a daemon that answers, nor apptainer: install one (for example"
    " apt install podman)"
)


class ImageFailed(Exception):
    """An image could not be had; the message has the last lines of the tool."""


def find_tool() -> str:
    """The first tool that is installed and works here; empty without one. Blocks for some seconds."""
    for tool in TOOLS:
        asked = "version" if tool == "apptainer" else "info"
        if shutil.which(tool) and process.output_of((tool, asked), timeout_s=_ASK_S) is not None:
            return tool
    return ""


def unpack(home: Home, image: str, say: Callable[[str], None]) -> Path:
    """The folder of an image; the first caller of a machine pulls and unpacks it, others wait. Raises ImageFailed.

    ``say`` gets the lines of the tool as they come. The folder is in use until this process ends. What a tag names is
    asked of the tool's own store first: an image that is there is not pulled again. Raises RotaError where another
    process pulls it for more than ``PULL_MAX_S``.
    """
    if not (tool := find_tool()):
        raise ImageFailed(MISSING)
    folder = home.root / "cache" / "images"
    folder.mkdir(mode=environ.PRIVATE_DIR, parents=True, exist_ok=True)
    if (known := _known(tool, image)) and (found := _held(folder, known[0])).exists():
        return found
    pulling = folder / f"{_key(image)}.pulling"
    with file_locks.locked(pulling, wait_s=PULL_MAX_S):
        content, variables = _known(tool, image) or _pulled(tool, image, say)
        if not (found := _held(folder, content)).exists():
            _clean(folder, tool, pulling)
            say(f"image: unpacking {image}")
            new = _new(pulling)
            try:
                _fill(tool, image, new, say)
                process.write_private(new / "environment.json", json.dumps(variables))
                _take(folder, new, found)
            finally:
                _delete(new)
            say("image: unpacked")
    return found


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _held(folder: Path, content: str) -> Path:
    """The folder of an image, in use from now on; it exists when the image is unpacked."""
    found = folder / _key(content)
    cache.hold(found.with_suffix(".lock"))
    return found


def _known(tool: str, image: str) -> tuple[str, Mapping[str, str]] | None:
    """What identifies the content of an image, and its variables; None where the tool does not have it."""
    if tool == "apptainer":  # it keeps no images by name, and its folders set their variables by scripts
        if not image.startswith("/"):
            return image, {}
        if not Path(image).exists():
            raise ImageFailed(f"{image}: no such file on this machine")
        status = Path(image).stat()
        return f"{image} {status.st_ino} {status.st_size} {status.st_mtime_ns}", {}
    asked = (tool, "image", "inspect", "--format", "{{.Id}} {{json .Config.Env}}", "--", image)
    if (found := process.output_of(asked, timeout_s=_ASK_S)) is None:
        return None
    identity, _, variables = found.strip().partition(" ")
    return identity, dict(one.split("=", 1) for one in json.loads(variables) or ())


def _pulled(tool: str, image: str, say: Callable[[str], None]) -> tuple[str, Mapping[str, str]]:
    say(f"image: pulling {image}")
    _run((tool, "pull", "--", image), say)
    if (known := _known(tool, image)) is None:
        raise ImageFailed(f"{tool} pulled {image} and does not list it: try {tool} image inspect {image}")
    return known


def _new(pulling: Path) -> Path:
    return pulling.with_suffix(".new")


def _remove_container(tool: str, new: Path) -> str:
    """Remove the container from which the files of an image are exported; its name, which no other home has."""
    name = f"rota-{_key(str(new))}"
    subprocess.run((tool, "rm", "-f", name), capture_output=True, timeout=_ASK_S)
    return name


def _clean(folder: Path, tool: str, pulling: Path) -> None:
    """Remove what processes left that were killed while they unpacked, and what was not used for long."""
    for new in folder.glob("*.new"):
        with cache.unused(lock := new.with_suffix(".pulling")) as free:
            if free or lock == pulling:
                if tool != "apptainer":
                    _remove_container(tool, new)
                _delete(new)
    cache.remove_unused(folder.glob("*.lock"), SystemClock().wall_s() - UNUSED_S, _remove)


def _take(folder: Path, new: Path, found: Path) -> None:
    """Give a finished folder its name, after others made room for it. Raises ImageFailed where they are in use."""
    size = sum(path.lstat().st_blocks * 512 for path in new.rglob("*"))
    (new / "bytes").write_text(str(size))
    with file_locks.locked(folder / "room"):
        if found.exists():  # unpacked meanwhile, under another name
            return
        try:
            limit = cache.limit_of(LIMIT, folder)
        except ValueError as error:
            raise ImageFailed(str(error)) from None
        there = [(lock.stat().st_mtime, _bytes(lock), lock) for lock in folder.glob("*.lock") if _bytes(lock)]
        if (left := cache.remove_oldest(there, limit - size, _remove_free)) + size > limit:
            kept = f", of which images in use have {format_size(left)}" if left else ""
            text = f"the image has {format_size(size)}, and the cache of images {format_size(limit)}{kept}"
            raise ImageFailed(f"{text}: set {LIMIT} of the service to more, or use a smaller image")
        new.rename(found)


def _bytes(lock: Path) -> int:
    try:
        return int((lock.with_suffix("") / "bytes").read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _remove_free(lock: Path) -> bool:
    with cache.unused(lock) as free:
        if free:
            _remove(lock)
        return free


def _fill(tool: str, image: str, new: Path, say: Callable[[str], None]) -> None:
    """The files of an image, as the folder ``root`` of ``new``; devices are those of the machine."""
    (root := new / "root").mkdir(mode=0o755, parents=True)
    if tool == "apptainer":
        source = image if "://" in image or image.startswith("/") else f"docker://{image}"
        return _run((tool, "build", "--force", "--sandbox", str(root), source), say)
    container = _remove_container(tool, new)
    unpacking = ("tar", "-x", "--numeric-owner", "-p", "--anchored", *_DEVICES, "-C", str(root))
    try:
        _run((tool, "create", "--name", container, "--", image, "/bin/true"), lambda _: None)
        export = ("setpriv", "--pdeathsig=KILL", tool, "export", container)  # podman without a reader keeps its locks
        with subprocess.Popen(export, stdout=subprocess.PIPE) as exporting:
            done = subprocess.run(unpacking, stdin=exporting.stdout, capture_output=True, text=True, timeout=PULL_MAX_S)
        if status := done.returncode or exporting.returncode:
            raise ImageFailed(_failed((tool, "export", container), status, done.stderr.splitlines()))
    finally:
        _remove_container(tool, new)


def _run(command: Sequence[str], say: Callable[[str], None]) -> None:
    """Run a tool for ``PULL_MAX_S`` at most. Raises ImageFailed."""
    last = deque[str](maxlen=LINES_SHOWN)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        assert child.stdout is not None, "it was asked for"
        own = process.identify(child.pid)
        stopped = list[object]()
        limit = threading.Timer(PULL_MAX_S, lambda: stopped.append(own and process.stop_tree(own, grace_s=0)))
        limit.start()
        for line in filter(None, map(str.rstrip, child.stdout)):
            say(f"image: {line}")
            last.append(line)
        child.wait()
        limit.cancel()
        limit.join()
    if stopped:
        last.append(f"it was stopped after {PULL_MAX_S:g} s")
    if child.returncode or stopped:
        raise ImageFailed(_failed(command, child.returncode, [*last]))


def _failed(command: Sequence[str], status: int, lines: Sequence[str]) -> str:
    words = " ".join(command[:2])
    return "\n".join((f"{words} ended with status {status}; its last lines:", *lines[-LINES_SHOWN:]))


def _remove(lock: Path) -> None:
    _delete(lock.with_suffix(""))


def _delete(folder: Path) -> None:
    """Remove a folder; an image may have folders that their owner cannot write."""
    if folder.is_dir():
        subprocess.run(("chmod", "-R", "u+rwX", str(folder)), capture_output=True, timeout=PULL_MAX_S)
    cache.remove_folder(folder)


def driver_files() -> list[str]:
    """Programs, libraries and sockets of NVIDIA's driver that a container needs; none without its container tools."""
    found = process.output_of(("nvidia-container-cli", "list"), timeout_s=_DRIVER_S) or ""
    return [path for path in found.splitlines() if path.startswith("/") and not path.startswith("/dev/")]


def library_links(paths: Iterable[str]) -> dict[str, str]:
    """The names by which programs load these libraries, with the paths: ``libcuda.so.1`` for ``libcuda.so.550.54``."""
    libraries = [Path(path) for path in paths if ".so." in path]
    names = ((path, path.parent.glob(f"{path.name.partition('.so.')[0]}.so*")) for path in libraries)
    return {one.name: str(path) for path, found in names for one in found if one.resolve() == path.resolve()}


def main() -> int:
    """Unpack what the arguments name."""
    home, image = sys.argv[1:]
    failures = (ImageFailed, RotaError, OSError, subprocess.TimeoutExpired)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - its only output

    return cache.print_folder(lambda: unpack(Home.of(home), image, say), *failures)


if __name__ == "__main__":
    sys.exit(main())
