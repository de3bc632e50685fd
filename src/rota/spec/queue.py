"""A node of the tenant tree: guarantee, limit, weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from rota.spec import codec
from rota.spec.resources import Res

DEFAULT_QUEUE = "default"
OwnedLevel = Literal["device", "node", "rack"]
QueueState = Literal["open", "stopped", "closed", "draining"]
"""``open`` takes jobs and starts those it has, ``stopped`` only takes, ``draining`` only starts, ``closed`` neither.

As the states UP, DOWN, DRAIN and INACTIVE of a partition of Slurm.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedCells:
    """A number of cells of a level (``rack``, ``node``, ``device``), of one type of device or of any."""

    level: OwnedLevel
    count: int
    gpu_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """One queue. ``path`` is slash separated (``research/rl``); only leaves hold jobs.

    Under the profile ``hived`` a leaf owns ``cells`` in place of those made of its guarantee, and beside them the nodes
    and racks with the names in ``pinned``, on which only jobs run that name one (label ``rota.cell``).
    ``guaranteed`` and the limits are None for "nothing promised" and "no limit"; ``user_limit`` is the most that the
    jobs of one user hold in it and below. Under the profile ``yarn`` a user of a leaf has at most the larger of an
    equal part of it and ``min_user_percent`` of it, and at most ``user_limit_factor`` times its guarantee. ``weight``
    divides what is left over, and where a policy has tiers, those of higher ``priority`` get of it first.
    """

    path: str
    guaranteed: Res | None = None
    cells: tuple[OwnedCells, ...] = ()
    pinned: tuple[str, ...] = ()
    limit: Res | None = None
    user_limit: Res | None = None
    min_user_percent: float | None = None
    user_limit_factor: float | None = None
    weight: float = 1.0
    priority: int = 100
    preemptible: bool = True
    state: QueueState = "open"
    run_as: str | None = None
    """User of the operating system (a name, or ``uid:gid``) of the commands of its jobs and those of queues below."""

    @property
    def starts_jobs(self) -> bool:
        """Whether the jobs that are in it may start, as far as its own state says."""
        return self.state in ("open", "draining")

    @property
    def parent(self) -> str | None:
        """Path of the enclosing queue, None for a top one."""
        return self.path.rpartition("/")[0] or None


def queue_from_json(raw: Mapping[str, object]) -> Queue:
    """A queue from its JSON value; in a guarantee or limit a dimension that is not given is not limited."""
    filled = dict(raw)
    for key in ("guaranteed", "limit", "user_limit"):
        if isinstance(given := filled.get(key), dict):
            filled[key] = {"cpus": 0.0, **cast("dict[str, object]", given)}
    return codec.from_json_value(Queue, filled)
