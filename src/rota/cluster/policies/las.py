"""Least attained service, in two dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rota.cluster.core.plugins import Profile
from rota.cluster.core.snapshot import JobRow, State
from rota.cluster.policies.fifo import Fit, LimitsOnly


@dataclass(frozen=True, slots=True)
class LeastService:
    """Jobs below the threshold of device-seconds first, then the others; first come first served inside a level.

    Two levels keep jobs of like service from taking turns for ever. Source: Tiresias (NSDI'19), 2D-LAS.
    """

    threshold_gpu_s: float = 8 * 3600.0
    by_job = True

    def rank(self, state: State, row: JobRow, now: float) -> tuple[Any, ...]:
        served = row.served_s * row.ask.shape.gpu_milli / 1000
        return (served >= self.threshold_gpu_s,)


def las() -> Profile:
    """Who got least so far comes first."""
    return Profile(name="las", order=LeastService(), division=LimitsOnly(), placer=Fit())
