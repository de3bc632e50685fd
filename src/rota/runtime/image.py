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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rota.runtime import cache, environ, process
from rota.runtime.clock import SystemClock
from rota.runtime.environ import Home

TOOLS = ("podman", "docker", "apptainer")
FOLDER = "ROTA_IMAGE_DIR"
"""Variable of an instance with an image: the folder with ``root`` and ``environment.json``."""
PULL_MAX_S = 3 * 3600.0
UNUSED_S = 30 * 86_400.0
"""An image that no process has used for this long is removed when another one is unpacked."""
LINES_SHOWN = 12
_ASK_S = 60.0
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
    asked of the tool's own store first: an image that is there is not pulled again.
    """
    if not (tool := find_tool()):
        raise ImageFailed(MISSING)
    folder = home.root / "cache" / "images"
    folder.mkdir(mode=environ.PRIVATE_DIR, parents=True, exist_ok=True)
    with process.locked(folder / ".pulling", wait_s=PULL_MAX_S):
        content, variables = _content(tool, image, say)
        found = folder / hashlib.sha256(content.encode()).hexdigest()[:32]
        cache.hold(found.with_suffix(".lock"))
        if not (done := found / "environment.json").exists():
            cache.remove_unused(folder.glob("*.lock"), SystemClock().wall_s() - UNUSED_S, _remove)
            shutil.rmtree(found, ignore_errors=True)  # what one that was killed left
            say(f"image: unpacking {image}")
            (found / "root").mkdir(mode=0o755, parents=True)
            _fill(tool, image, found / "root", say)
            process.write_private(done, json.dumps(variables))
            say("image: unpacked")
    return found


def _content(tool: str, image: str, say: Callable[[str], None]) -> tuple[str, Mapping[str, str]]:
    """What identifies the content of an image, and its variables; it is pulled where the tool does not have it."""
    if tool == "apptainer":  # it keeps no images by name, and its folders set their variables by scripts
        return image, {}
    asked = (tool, "image", "inspect", "--format", "{{.Id}} {{json .Config.Env}}", image)
    if (known := process.output_of(asked, timeout_s=_ASK_S)) is None:
        say(f"image: pulling {image}")
        _run((tool, "pull", image), say)
        if (known := process.output_of(asked, timeout_s=_ASK_S)) is None:
            raise ImageFailed(f"{tool} pulled {image} and does not know it")
    identity, _, variables = known.strip().partition(" ")
    return identity, dict(one.split("=", 1) for one in json.loads(variables) or ())


def _fill(tool: str, image: str, root: Path, say: Callable[[str], None]) -> None:
    """The files of an image; devices are those of the machine."""
    if tool == "apptainer":
        source = image if "://" in image or Path(image).exists() else f"docker://{image}"
        return _run((tool, "build", "--force", "--sandbox", str(root), source), say)
    made = subprocess.run((tool, "create", image, "/bin/true"), capture_output=True, text=True, timeout=PULL_MAX_S)
    if made.returncode:
        raise ImageFailed(_failed((tool, "create", image), made.returncode, made.stderr.splitlines()))
    container = made.stdout.split()[-1]
    unpacking = ("tar", "-x", "--numeric-owner", "-p", "--exclude=dev/*", "-C", str(root))
    try:
        with subprocess.Popen((tool, "export", container), stdout=subprocess.PIPE) as exporting:
            done = subprocess.run(unpacking, stdin=exporting.stdout, capture_output=True, text=True, timeout=PULL_MAX_S)
        if status := done.returncode or exporting.returncode:
            raise ImageFailed(_failed((tool, "export", container), status, done.stderr.splitlines()))
    finally:
        subprocess.run((tool, "rm", container), capture_output=True, timeout=_ASK_S)


def _run(command: Sequence[str], say: Callable[[str], None]) -> None:
    last = list[str]()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        assert child.stdout is not None, "it was asked for"
        for line in filter(None, map(str.rstrip, child.stdout)):
            say(f"image: {line}")
            last = [*last, line][-LINES_SHOWN:]
    if child.returncode:
        raise ImageFailed(_failed(command, child.returncode, last))


def _failed(command: Sequence[str], status: int, lines: Sequence[str]) -> str:
    words = " ".join(command[:2])
    return "\n".join((f"{words} ended with status {status}; its last lines:", *lines[-LINES_SHOWN:]))


def _remove(lock: Path) -> None:
    cache.remove_folder(lock.with_suffix(""))


def driver_files() -> list[str]:
    """Programs, libraries and sockets of NVIDIA's driver that a container needs; none without its container tools."""
    found = process.output_of(("nvidia-container-cli", "list"), timeout_s=_DRIVER_S) or ""
    return [path for path in found.splitlines() if path.startswith("/") and not path.startswith("/dev/")]


def main() -> int:
    """Unpack what the arguments name."""
    home, image = sys.argv[1:]
    try:
        folder = unpack(Home.of(home), image, lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201 - its only output
    except (ImageFailed, OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(str(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
