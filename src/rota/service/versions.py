"""Versions of Python, Ray and Rota, which must be the same on all machines of an installation."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

from rota.service.config import rota_version

EQUAL = ("python", "ray", "rota")
"""What must be equal: of Python its first two numbers, for what is pickled by one is read by the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionConflict:
    """A package whose versions differ; ``wanted`` is what to install ``there``."""

    name: str
    there: str
    here: str

    @property
    def wanted(self) -> str:
        """In the words of pip, but for Python itself."""
        return f"Python {compared(self.name, self.here)}" if self.name == "python" else f"{self.name}=={self.here}"


def own_versions() -> dict[str, str]:
    """Versions on this machine by package; empty for one that is not installed."""
    return {
        "python": platform.python_version(),
        "ray": _installed("ray"),
        "rota": rota_version(),
        "torch": _installed("torch"),
    }


def _installed(name: str) -> str:
    try:
        return version_of(name)
    except PackageNotFoundError:
        return ""


def compared(name: str, version: str) -> str:
    """The part of a version that must be equal."""
    return ".".join(version.split(".")[:2]) if name == "python" else version


def version_conflicts(there: Mapping[str, str], here: Mapping[str, str]) -> list[VersionConflict]:
    """The packages that two machines must have in one version, and have not."""
    return [
        VersionConflict(name=name, there=there.get(name, ""), here=here.get(name, ""))
        for name in EQUAL
        if compared(name, there.get(name, "")) != compared(name, here.get(name, ""))
    ]
