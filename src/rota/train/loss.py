"""The loss of a micro-batch: the sum that gradients need, and its scale where they are computed in fp16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from rota.spec.errors import BadInput
from rota.train.state import local

IGNORED = -100
"""Targets with this value count neither for the loss nor as tokens, as in torch's cross entropy."""

FACTOR, FACTOR_MAX, GROW_STEPS = 2.0**12, 2.0**24, 2000
"""Loss scale in fp16: where it begins, its limit, and the steps without overflow after which it doubles."""

SAME = 1e-3
"""Relative difference below which two losses count as equal."""


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum over the real tokens: logits ``[..., V]`` and targets ``[...]``, computed in fp32."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def known_as_sum(loss: Callable[[Any, torch.Tensor], torch.Tensor], output: Any, targets: torch.Tensor) -> bool:
    """Compare the loss of one sequence with that of two copies of it; False when these data do not show what it is.

    Raises BadInput for a mean: it does not change, where a sum doubles.
    """
    leaves = tree_leaves(output)
    if not all(isinstance(one, torch.Tensor) and one.shape[:1] == targets.shape[:1] for one in leaves):
        return True  # of an output that has no rows nothing can be said
    if not targets.numel() or targets.is_meta:
        return False
    try:
        with torch.no_grad():
            first = tree_map(lambda one: one[:1].detach(), (output, targets))
            alone = float(loss(*first))
            twice = float(loss(*tree_map(lambda one: torch.cat([one, one]), first)))
    except Exception:  # noqa: BLE001 - a loss of the user's that takes whole micro-batches only
        return True
    if not math.isfinite(alone) or not math.isfinite(twice) or alone == 0.0:
        return False
    if abs(twice - alone) <= SAME * abs(alone):
        raise BadInput(
            f"loss: gives {alone:.4g} for one sequence and {twice:.4g} for two copies of it, as a mean does",
            hint="give the sum over the real tokens (reduction='sum'); it is divided by the tokens of the global batch",
        )
    return True


class LossScale:
    """A factor on the loss, so that gradients of fp16 do not vanish (Micikevicius et al. 2018, section 3.2).

    It is halved by a step whose gradients overflow, which is skipped, and doubled after ``GROW_STEPS`` others.
    """

    def __init__(self) -> None:
        self.factor, self._good = FACTOR, 0

    def scale_back(self, parameters: Iterable[torch.Tensor], device: torch.device) -> bool:
        """Divide all gradients by the factor. False when one of any rank is not finite. Collective over the world."""
        overflow = torch.zeros((), device=device)
        for parameter in parameters:
            if parameter.grad is not None:
                grad = local(parameter.grad).mul_(1.0 / self.factor)
                overflow = torch.maximum(overflow, (~grad.isfinite().all()).to(overflow))
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
        finite = not overflow
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.factor = max(1.0, self.factor / 2)
        elif self._good >= GROW_STEPS:
            self.factor, self._good = min(FACTOR_MAX, self.factor * 2), 0
        return finite
