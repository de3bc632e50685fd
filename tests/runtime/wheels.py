"""Wheels of a few lines, made without a network: what tests install."""

from __future__ import annotations

import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str, version: str = "1.0", *, needs: str = "", code: str = "") -> Path:
    """A wheel of one module that has ``VERSION`` and ``code``; ``needs`` is a requirement of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    info, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    files = {
        f"{name}.py": f"VERSION = {version!r}\n{code}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: rota\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD")))
    return path


def settings(folder: Path) -> dict[str, str]:
    """Variables with which pip looks there and nowhere else."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
