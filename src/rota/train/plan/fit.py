"""Multipliers of the parts of a step from a few measured points, with a prior at 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NOISE, SPREAD = 0.1, 0.2
"""Relative error of one measured point, and how far a multiplier is expected to lie from 1."""
OUTLIER = 2 * NOISE
"""Points further off than this weigh less, in proportion (Huber 1964)."""
FITS, ROUNDS = 3, 60


def fit_multipliers(parts: Sequence[Mapping[str, float]], measured_s: Sequence[float]) -> dict[str, float]:
    """Non-negative ridge regression on relative errors, by coordinate descent.

    ``parts`` has the predicted seconds of each point by name, ``measured_s`` what each took. Minimises
    ``sum_i w_i (sum_j x_j a_ij / y_i - 1)^2 + (NOISE / SPREAD)^2 sum_j (x_j - 1)^2``: a part that the points say little
    of keeps its prediction. The weights ``w_i`` of outliers are lowered from fit to fit.
    """
    names = sorted({name for part in parts for name in part})
    shares = [[part.get(name, 0.0) / y for name in names] for part, y in zip(parts, measured_s, strict=True)]
    x, left = [1.0] * len(names), [1 - sum(row) for row in shares]
    for _ in range(FITS):
        weights = [min(1.0, OUTLIER / abs(rest)) if rest else 1.0 for rest in left]
        for _ in range(ROUNDS):
            for j in range(len(names)):
                left = _improve(shares, weights, x, left, j)
    return dict(zip(names, x, strict=True))


def _improve(
    shares: Sequence[Sequence[float]], weights: Sequence[float], x: list[float], left: list[float], j: int
) -> list[float]:
    """Set ``x[j]`` to its best value with the others fixed; returns what is left of each point."""
    prior = (NOISE / SPREAD) ** 2
    square = sum(w * row[j] ** 2 for w, row in zip(weights, shares, strict=True))
    along = sum(w * row[j] * (rest + row[j] * x[j]) for w, row, rest in zip(weights, shares, left, strict=True))
    new = max(0.0, (along + prior) / (square + prior))
    left = [rest - row[j] * (new - x[j]) for row, rest in zip(shares, left, strict=True)]
    x[j] = new
    return left
