"""Schedules, runs and heals deep-learning jobs of many roles; public names load lazily, nothing heavy at import."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rota import tensors as tensors
    from rota.job.builder import Fail as Fail
    from rota.job.builder import Group as Group
    from rota.job.builder import Job as Job
    from rota.job.builder import Limits as Limits
    from rota.job.builder import Res as Res
    from rota.job.builder import spmd as spmd
    from rota.job.workload import Workload as Workload
    from rota.job.workload import op as op
    from rota.service.client import Client as Client
    from rota.spec.dispatch import Concat as Concat
    from rota.spec.dispatch import Each as Each
    from rota.spec.dispatch import First as First
    from rota.spec.dispatch import Mean as Mean
    from rota.spec.dispatch import Rank as Rank
    from rota.spec.dispatch import Same as Same
    from rota.spec.dispatch import Shard as Shard
    from rota.spec.dispatch import Stream as Stream
    from rota.spec.dispatch import Sum as Sum
    from rota.spec.job import Bound as Bound
    from rota.train.plan.model import ParallelPlan as ParallelPlan

__version__ = "0.1.0"

_DISPATCH = ("Same", "Shard", "Each", "Rank", "Concat", "Mean", "Sum", "First", "Stream")
_HOMES: dict[str, str] = {
    **dict.fromkeys(("Workload", "op"), "rota.job.workload"),
    "Bound": "rota.spec.job",
    **dict.fromkeys(("Job", "Group", "spmd", "Res", "Limits", "Fail"), "rota.job.builder"),
    **dict.fromkeys(_DISPATCH, "rota.spec.dispatch"),
    "Client": "rota.service.client",
    "ParallelPlan": "rota.train.plan.model",
}
_MODULES = ("tensors",)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"rota.{name}")
    if name == "__all__":
        return __dir__()
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rota' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_MODULES, "__version__"])
