"""Supervised fitting: cross-entropy of the right answers, the start of the policy that reinforcement then sharpens."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor  # the loop reads the constants and loads no torch

STEPS, BATCH = int(os.environ.get("SFT_STEPS", "120")), 512
LR_PEAK, WARMUP_STEPS, LR_FLOOR_SHARE = 4e-3, 10, 0.05
BETAS = (0.9, 0.95)
"""Adam's averages are short: the phase has too few steps for the usual 0.999."""


def learning_rate(step: int) -> float:
    """Rate of step 1..STEPS: linear warm-up, then linear decay to a floor."""
    return LR_PEAK * min(step / WARMUP_STEPS, 1.0) * max(LR_FLOOR_SHARE, 1 - step / STEPS)


def sft_loss(logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum over the rows of the mean negative log-probability of a right answer; divide by the rows of all ranks."""
    return -((logp_BT * mask_BT).sum(dim=1) / mask_BT.sum(dim=1)).sum()
