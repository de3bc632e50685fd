"""A node of the tenant tree: guarantee, limit, weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rota.spec.resources import Res

DEFAULT_QUEUE = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """One queue. ``path`` is slash separated (``research/rl``); only leaves hold jobs.

    ``guaranteed`` and the limits are None for "nothing promised" and "no limit"; ``user_limit`` is the most that the
    jobs of one user hold in it and below. ``weight`` divides what is left over, and where a policy has tiers, those of
    higher ``priority`` get of it first.
    """

    path: str
    guaranteed: Res | None = None
    limit: Res | None = None
    user_limit: Res | None = None
    weight: float = 1.0
    priority: int = 100
    preemptible: bool = True
    state: Literal["open", "closed", "draining"] = "open"
    run_as: str | None = None
    """User of the operating system (a name, or ``uid:gid``) of the commands of its jobs and those of queues below."""

    @property
    def parent(self) -> str | None:
        """Path of the enclosing queue, None for a top one."""
        return self.path.rpartition("/")[0] or None
