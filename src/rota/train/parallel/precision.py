"""Number formats and activation recompute."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint

from rota.spec.errors import BadInput
from rota.train.plan.model import Layer, ParallelPlan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def mixed(plan: ParallelPlan) -> bool:
    """True when a master copy in another format than the computation's is kept."""
    return plan.dtype.param != plan.dtype.master


def recompute(layer: nn.Module, kind: Layer) -> None:
    """Compute activations of this layer again in backward instead of keeping them.

    ``full`` repeats the whole layer; ``selective`` the attention core alone, whose activations grow with the square of
    the sequence and cost little time (Korthikanti et al. 2022, section 5). Raises BadInput without a ``core``.
    """
    if kind.recompute == "full":
        checkpoint(layer)
    elif kind.recompute == "selective":
        cores = [part for name, part in layer.named_modules() if name.rsplit(".", 1)[-1] == "core"]
        if not cores:
            raise BadInput(
                f"layers.recompute = selective: {type(layer).__name__} has no module named 'core' around its attention",
                hint="use recompute full, or put the attention without its projections into a module 'core'",
            )
        for core in cores:
            checkpoint(core)
