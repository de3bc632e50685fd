"""Training of one model by several workers: loop, parallelism, synchronisation, checkpoints, data, and the planner."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rota.train.apply import parallelize as parallelize
    from rota.train.loop import fit as fit

_HOMES = {"parallelize": "rota.train.apply", "fit": "rota.train.loop"}
_RENAMED = {
    "rota.train.data_cache": "rota.train.data",
    "rota.train.elastic": "rota.train.local_hardware",
    "rota.train.experts": "rota.train.parallel.experts",
    "rota.train.plan.layers": "rota.train.plan.model",
    "rota.train.ps.embedding": "rota.train.sync",
    "rota.train.ps_client": "rota.train.ps.client",
    "rota.train.ps_server": "rota.train.ps.server",
    "rota.train.ps_table": "rota.train.ps.table",
    "rota.train.shm_group": "rota.train.shm",
}
"""Import paths of earlier releases that pages showed, and the modules that have their names now."""


def __getattr__(name: str) -> object:  # planning needs no torch, so nothing here loads it before it is asked for
    if name not in _HOMES:
        raise AttributeError(f"module 'rota.train' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


class _RenamedModules(MetaPathFinder, Loader):
    """Finder of the renamed modules: the old path gives the same classes and functions."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _RENAMED else None

    def exec_module(self, module: ModuleType) -> None:
        now = vars(importlib.import_module(_RENAMED[module.__name__]))
        vars(module).update({name: value for name, value in now.items() if not name.startswith("__")})


sys.meta_path.append(_RenamedModules())
