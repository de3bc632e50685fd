"""Named tensors in shared memory: one process writes, others map the same bytes, other machines fetch them once."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rota.tensors.api.store import Pin as Pin
    from rota.tensors.api.store import Plane as Plane
    from rota.tensors.api.store import TensorRef as TensorRef
    from rota.tensors.api.store import connect as connect
    from rota.tensors.api.store import down as down
    from rota.tensors.inspect import Location as Location
    from rota.tensors.reader import Snapshot as Snapshot
    from rota.tensors.writer import Version as Version

_HOMES = {
    **dict.fromkeys(("Pin", "Plane", "TensorRef", "connect", "down"), "rota.tensors.api.store"),
    "Location": "rota.tensors.inspect",
    "Snapshot": "rota.tensors.reader",
    "Version": "rota.tensors.writer",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rota.tensors' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)
