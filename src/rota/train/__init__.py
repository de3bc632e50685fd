"""Training of one model by several workers: loop, parallelism, synchronisation, checkpoints, data, and the planner."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rota.train.apply import parallelize as parallelize
    from rota.train.loop import fit as fit

_HOMES = {"parallelize": "rota.train.apply", "fit": "rota.train.loop"}


def __getattr__(name: str) -> object:  # planning needs no torch, so nothing here loads it before it is asked for
    if name not in _HOMES:
        raise AttributeError(f"module 'rota.train' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
