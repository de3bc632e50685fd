"""A copy of the newest steps in shared memory that outlives the processes which train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rota.spec.errors import BadInput, TensorError
from rota.tensors.plane import Plane
from rota.train.checkpoint import Tensors
from rota.train.state import local

KEPT = 2
"""The step being copied and the one before it: until every rank has copied, the older is the truth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The newest step of which every rank's part is in memory."""

    step: int
    extra: dict[str, Any]


class MemoryCheckpoints:
    """The shards of one run on this machine as one group of the tensor plane: a step is visible with its last part.

    ``rank`` is this process in the world, ``part`` = (place, processes) on this machine.

    Shards stay as they lie, so only the same plan finds them; for another one the copy on disk is resharded.
    """

    def __init__(self, plane: Plane, run: str, *, plan: str, rank: int = 0, part: tuple[int, int] = (0, 1)) -> None:
        self._plane, self._group, self._plan = plane, f"ckpt/{run}", plan
        self._rank, self._part = rank, part

    def save(self, tensors: Tensors, *, step: int, extra: Mapping[str, Any]) -> None:
        """Copy this rank's tensors; blocks for the copy alone. Raises TensorError when memory is full."""
        self._plane.publish_group(
            self._group,
            {f"{self._rank}/{name}": local(tensor) for name, tensor in tensors.items()},
            step=step,
            part=self._part,
            retain=KEPT,
            meta={"plan": self._plan, "extra": dict(extra)},
        )

    def find(self) -> Held | None:
        """The newest whole step that was copied under the same plan; None without one."""
        try:
            found = self._plane.get_group(self._group)
        except TensorError:
            return None
        metas = found.meta if isinstance(found.meta, list) else [found.meta]  # one for each part
        mine = any(name.startswith(f"{self._rank}/") for name in found)
        if not mine or {meta["plan"] for meta in metas} != {self._plan}:
            return None
        return Held(step=found.step, extra=metas[0]["extra"])

    def load(self, held: Held, tensors: Tensors) -> None:
        """Fill ``tensors`` in place. Raises TensorError when the step is gone, BadInput when it is of another model."""
        found, mine = self._plane.get_group(self._group, step=held.step), f"{self._rank}/"
        kept = {name.removeprefix(mine): tuple(found[name].shape) for name in found if name.startswith(mine)}
        unlike = [name for name, one in tensors.items() if kept.get(name) != tuple(local(one).shape)]
        if unlike := unlike + [name for name in kept if name.startswith("model.") and name not in tensors]:
            raise BadInput(
                f"memory: the copy of step {held.step} is of another model: {unlike[0]} and {len(unlike) - 1} more",
                hint="give the run another name, fit(memory=...), or build the model that was copied",
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                local(tensor).copy_(found[f"{self._rank}/{name}"])

    def find_tensor(self, held: Held, name: str) -> torch.Tensor | None:
        """What this rank kept as ``name``; None without it. Raises TensorError when the step is gone."""
        found = self._plane.get_group(self._group, step=held.step)
        full = f"{self._rank}/{name}"
        return found[full].clone() if full in found else None

    def drop(self) -> None:
        """Forget everything: the run continues from an older step."""
        self._plane.delete(self._group, missing_ok=True)
