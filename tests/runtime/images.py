"""A small image of this machine's shell, made without a registry; tests with it skip where no tool can hold it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rota.runtime.image import find_tool

PROGRAMS = ("sh", "cat", "id", "sleep", "env")


def small_root(root: Path) -> Path:
    """A folder with ``PROGRAMS``, a file ``/marker``, and files below two folders ``dev``."""
    for program in map(shutil.which, PROGRAMS):
        assert program is not None
        libraries = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in (program, *re.findall(r"/\S+", libraries)):
            place = root / ("bin" if path == program else path.lstrip("/").rpartition("/")[0])
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    for name in ("marker", "dev/own", "usr/lib/app/dev/index.js"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("of the image\n")
    return root


@contextlib.contextmanager
def small_image(folder: Path) -> Iterator[str]:
    """The name of an image of a ``small_root``."""
    if (tool := find_tool()) not in ("podman", "docker"):
        pytest.skip("neither podman nor docker works here")
    root = small_root(folder / "image-root")
    name = f"localhost/rota-test-{os.getpid()}:1"
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as packing:
        made = [tool, "import", "--change", "ENV FLAVOUR=plain", "--change", "ENV PATH=/bin", "-", name]
        subprocess.run(made, stdin=packing.stdout, check=True, capture_output=True, timeout=120)
    try:
        yield name
    finally:
        subprocess.run([tool, "rmi", "-f", name], check=True, capture_output=True, timeout=120)
