"""Stages cut from a model, and their schedules."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rota.train.mesh import PlanMesh
from rota.train.plan.model import ParallelPlan

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def stages_of(plan: ParallelPlan, rank: int) -> list[int]:
    """Indices of the stages that pipeline rank ``rank`` runs.

    Stages lie in a circle over the ranks; for zbv in a V: rank 0 has the first and the last (Qi et al. 2024).
    """
    pp, count = plan.mesh.pp, len(plan.stages)
    if plan.schedule == "zbv":
        return [rank, count - 1 - rank]
    return list(range(rank, count, pp))


def schedule(
    pieces: list[nn.Module], plan: ParallelPlan, mesh: PlanMesh, device: torch.device, loss: Loss
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """The schedule of this rank over its pieces of the model. ``loss`` is already scaled: gradients are summed."""
    # Loads more than a second of torch, which plans without stages do not need.
    pipelining: Any = importlib.import_module("torch.distributed.pipelining")
    schedules: Any = importlib.import_module("torch.distributed.pipelining.schedules")
    indices = stages_of(plan, mesh.index("pp"))
    stages = [
        pipelining.PipelineStage(piece, index, len(plan.stages), device, group=mesh.group("pp"))
        for index, piece in zip(indices, pieces, strict=True)
    ]
    one = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
    if plan.schedule in one:
        return one[plan.schedule](stages[0], plan.micro_batches, loss_fn=loss, scale_grads=False)
    several = {
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zb": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
    }
    return several[plan.schedule](stages, plan.micro_batches, loss_fn=loss, scale_grads=False)
