"""Named tensors shared by the processes of a machine: one writes, any other maps the same bytes, whoever dies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rota.tensors.handle import Location as Location
    from rota.tensors.handle import Pin as Pin
    from rota.tensors.handle import Snapshot as Snapshot
    from rota.tensors.handle import TensorRef as TensorRef
    from rota.tensors.handle import Version as Version
    from rota.tensors.plane import Plane as Plane
    from rota.tensors.plane import connect as connect
    from rota.tensors.plane import down as down

_HOMES = {
    **dict.fromkeys(("connect", "down", "Plane"), "rota.tensors.plane"),
    **dict.fromkeys(("Location", "Pin", "Snapshot", "TensorRef", "Version"), "rota.tensors.handle"),
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rota.tensors' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)
