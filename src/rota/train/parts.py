"""The parts of a model that a plan speaks about: embedding, layers, head; and what is left of them on one stage."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from rota.spec.errors import BadInput
from rota.train.plan.model import Layer, ParallelPlan, Stage


class Absent(nn.Module):
    """In the place of a part that another stage holds: what comes in goes out, so ``forward`` needs no change."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Names of the attributes of a model: ``layers`` is a ModuleList, and forward is head(layers(embed(x)))."""

    embed: str = "embed"
    stack: str = "layers"
    head: str = "head"

    def check(self, model: nn.Module) -> None:
        """Raises BadInput when the model lacks a part."""
        for name in (self.embed, self.stack, self.head):
            if not isinstance(getattr(model, name, None), nn.Module):
                raise BadInput(
                    f"model: {type(model).__name__} has no module {name!r}",
                    hint="name its parts: parallelize(..., parts=Parts(embed=..., stack=..., head=...))",
                )
        if not isinstance(getattr(model, self.stack), nn.ModuleList):
            raise BadInput(f"model.{self.stack} is no ModuleList", hint="hold the layers in one ModuleList")

    def count(self, model: nn.Module) -> int:
        """Number of layers, absent ones included."""
        return len(getattr(model, self.stack))

    def layers(self, model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
        """The layers that are present, with their global index."""
        for index, layer in enumerate(getattr(model, self.stack)):
            if not isinstance(layer, Absent):
                yield index, layer

    def kind(self, plan: ParallelPlan, index: int) -> Layer:
        """What the plan says of layer ``index``."""
        for run in plan.layers:
            if index < run.count:
                return run
            index -= run.count
        raise BadInput(f"layers: the plan describes {sum(run.count for run in plan.layers)} layers, the model has more")

    def cut(self, model: nn.Module, stage: Stage) -> nn.Module:
        """A copy of the model that shares the parts of ``stage`` and has the others absent: names stay global."""
        piece = copy.copy(model)
        piece._modules = dict(model._modules)
        first, last = stage.layers
        stack = getattr(model, self.stack)
        kept = [layer if first <= index < last else Absent() for index, layer in enumerate(stack)]
        setattr(piece, self.stack, nn.ModuleList(kept))
        if not stage.embed:
            setattr(piece, self.embed, Absent())
        if not stage.head:
            setattr(piece, self.head, Absent())
        return piece
