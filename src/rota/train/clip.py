"""The norm of all gradients of a model that is spread over ranks, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rota.train.mesh import PlanMesh


def clip_global_norm(
    parameters: Iterable[torch.Tensor], elsewhere: Collection[torch.Tensor], norm_max: float, mesh: PlanMesh
) -> float:
    """Scale all gradients so that their L2 norm is at most ``norm_max``; returns the norm before. Collective.

    Sharded gradients count once over every axis that shards them, never over replicas: a DTensor knows its axes, and
    the stages of a pipeline hold different parameters, so their squares add up; those ``elsewhere`` count on another.
    """
    grads = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = defaultdict(list)
    for parameter, grad in grads.items():
        if not any(parameter is other for other in elsewhere):
            by_mesh[grad.device_mesh if isinstance(grad, DTensor) else None].append(grad)
    squared = torch.zeros((), device=mesh.root.device_type)
    for same in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(same, foreach=False)
        squared += (norm.full_tensor() if isinstance(norm, DTensor) else norm).float() ** 2
    if mesh.degrees.pp > 1:
        dist.all_reduce(squared, group=mesh.group("pp"))
    total = float(squared.sqrt())
    factor = norm_max / (total + 1e-6)
    if factor < 1.0:
        for grad in grads.values():
            grad.mul_(factor)
    return total
