"""Stages cut from a model, and their schedules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from rota.train.mesh import PlanMesh
from rota.train.plan.model import ParallelPlan

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Pipeline = (
    Schedule1F1B | ScheduleGPipe | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble | ScheduleZBVZeroBubble
)

_ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL = {
    "interleaved": ScheduleInterleaved1F1B,
    "zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def stages_of(plan: ParallelPlan, rank: int) -> list[int]:
    """Indices of the stages that pipeline rank ``rank`` runs.

    Stages lie in a circle over the ranks; for zbv in a V: rank 0 has the first and the last (Qi et al. 2024).
    """
    pp, count = plan.mesh.pp, len(plan.stages)
    if plan.schedule == "zbv":
        return [rank, count - 1 - rank]
    return list(range(rank, count, pp))


def schedule(pieces: list[nn.Module], plan: ParallelPlan, mesh: PlanMesh, device: torch.device, loss: Loss) -> Pipeline:
    """The schedule of this rank over its pieces of the model. ``loss`` is already scaled: gradients are summed."""
    indices = stages_of(plan, mesh.index("pp"))
    stages = [
        PipelineStage(piece, index, len(plan.stages), device, group=mesh.group("pp"))
        for index, piece in zip(indices, pieces, strict=True)
    ]
    if plan.schedule in _ONE_STAGE:
        return _ONE_STAGE[plan.schedule](stages[0], plan.micro_batches, loss_fn=loss, scale_grads=False)
    return _SEVERAL[plan.schedule](stages, plan.micro_batches, loss_fn=loss, scale_grads=False)
