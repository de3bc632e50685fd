"""Which pictures are learned from, and when: numbers alone, so that the loop loads neither torch nor pictures."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

STEPS, BATCH, LR = int(os.environ.get("MM_STEPS", "300")), 96, 1e-2
"""The learning rate of step 1 decays to 0."""
PICTURES = np.arange(1797)
HELD_OUT = PICTURES[::5]
"""Never trained on."""
TRAIN = PICTURES[PICTURES % 5 != 0]


def batch(seed: int, step: int) -> NDArray[np.int64]:
    """Numbers of the pictures of step 1, 2, ...: a function of its arguments alone."""
    return np.random.default_rng((seed, step)).choice(TRAIN, BATCH, replace=False)
