"""Group-relative policy optimisation: advantages within a group, the clipped loss and its KL term.

Source: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), section 4.1, equations 3 and 4.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor  # the loop computes advantages and loads no torch

STEPS, PROMPTS, GROUP = int(os.environ.get("GRPO_STEPS", "150")), 32, 8
WINDOW = 10
"""Steps over which the mean reward at the start and at the end is taken."""
UPDATES = 2
"""Optimiser steps on each batch; from the second on the policy differs from the one that sampled, so the clip acts."""
LR, BETAS = 1.5e-4, (0.9, 0.99)
"""Learning rate of the first step; it decays to 0, which lets the noise of small groups settle. 5e-4 harms."""
CLIP, KL_WEIGHT = 0.2, 0.005
SCALE_FLOOR = 1e-4
"""Added to a group's standard deviation: a group of equal rewards has no advantage, not a division by zero."""


def learning_rate(step: int) -> float:
    """Rate of step 1..STEPS: linear decay."""
    return LR * (1 - (step - 1) / STEPS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Sums over the rows given; divide by the rows of all ranks to get the means of the paper."""

    total: Tensor
    kl: Tensor
    clipped: Tensor
    """Share of a row's tokens whose ratio lies outside 1 ± CLIP."""


def advantages(rewards_NG: NDArray[np.float64]) -> NDArray[np.float32]:
    """Reward minus the mean of its group, over the group's standard deviation [N, G]."""
    centred = rewards_NG - rewards_NG.mean(axis=1, keepdims=True)
    return (centred / (rewards_NG.std(axis=1, keepdims=True) + SCALE_FLOOR)).astype(np.float32)


def policy_loss(logp_BT: Tensor, old_BT: Tensor, ref_BT: Tensor, advantage_B: Tensor, mask_BT: Tensor) -> Loss:
    """Clipped surrogate with the KL estimator exp(d) - d - 1, d = ref - new; a row is a mean over its tokens."""
    ratio_BT = (logp_BT - old_BT).exp()
    advantage_B1 = advantage_B.unsqueeze(1)
    gain_BT = (ratio_BT * advantage_B1).minimum(ratio_BT.clamp(1 - CLIP, 1 + CLIP) * advantage_B1)
    gap_BT = ref_BT - logp_BT
    kl_BT = gap_BT.exp() - gap_BT - 1
    outside_BT = ((ratio_BT - 1).abs() > CLIP).to(mask_BT.dtype)

    def rows(value_BT: Tensor) -> Tensor:
        return ((value_BT * mask_BT).sum(dim=1) / mask_BT.sum(dim=1)).sum()

    return Loss(total=rows(KL_WEIGHT * kl_BT - gain_BT), kl=rows(kl_BT).detach(), clipped=rows(outside_BT))
