"""What a way of synchronising replicas adds to training: looked up by the names in a plan's ``sync``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from rota.spec.errors import BadInput
from rota.train.mesh import PlanMesh
from rota.train.plan.model import ParallelPlan


class Synchroniser(ABC):
    """One way to make replicas agree, made once for each ``Parallel``; what is below fits one without state.

    ``reduces`` True: ``attach`` gets the ``DistributedDataParallel`` and sets its communication hook; gradients are
    means over the replicas when backward ends. ``reduces`` False: ``attach`` gets the bare model, whose gradients are
    those of this replica's own mean loss, and ``update`` makes the replicas agree.
    """

    reduces: ClassVar[bool]

    @abstractmethod
    def attach(self, model: Any) -> None:
        """Called once, before the first step."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """In place of ``optimizer.step()``, with all gradients of this step in ``.grad``."""
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep: tensors and numbers, by name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have no state
        """Inverse of ``state_dict``."""

    def close(self) -> None:  # noqa: B027 - most have started nothing
        """End what it started; no update comes after. Not collective: a rank that failed calls it alone."""


Maker = Callable[[ParallelPlan, PlanMesh], Synchroniser]
_MAKERS: dict[str, Maker] = {}


def register(name: str) -> Callable[[Maker], Maker]:
    """Decorate the maker of a synchroniser.

    ``name`` is a ``sync.mode`` other than allreduce, a ``sync.compression`` other than none, or ``hierarchical``.
    """

    def keep(maker: Maker) -> Maker:
        _MAKERS[name] = maker
        return maker

    return keep


def synchroniser(plan: ParallelPlan, mesh: PlanMesh) -> Synchroniser | None:
    """The synchroniser a plan asks for; None for the plain all-reduce. Raises BadInput when it is not registered."""
    sync = plan.sync
    if sync.mode != "allreduce":
        name = sync.mode
    elif sync.compression != "none":
        name = sync.compression
    elif sync.hierarchical:
        name = "hierarchical"
    else:
        return None
    maker = _MAKERS.get(name)
    if maker is None:
        raise BadInput(
            f"sync: nothing is registered as {name!r}", hint=f"known: {', '.join(sorted(_MAKERS)) or 'none'}"
        )
    return maker(plan, mesh)
