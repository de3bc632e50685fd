"""Stages of a model whose forward is its own: it runs as written, with stubs in the place of what the stage lacks."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import nn

from rota.train.batch import Inputs, call, main_tensor
from rota.train.parallel.model_parts import Absent, Copy
from rota.train.plan.model import Stage

INPUTS = "stage_inputs"
"""The keyword under which a batch of one tensor reaches every stage."""


class Reached(Exception):
    """Raised where the next stage begins; carries what it gets."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Zeros(Absent):
    """In the place of a module before the layers: the layers of this stage get what the stage before gives."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._table = module.embedding_dim if isinstance(module, nn.Embedding) else None
        self._shape, self._dtype = shape, next(module.parameters()).dtype
        self.__dict__["_empty"] = _empty(module)  # not a module of this one, so that it has no parameters

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_empty"], name)

    def forward(self, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        shape = (*x.shape, self._table) if self._table else (x.shape[0], *self._shape[1:])
        return torch.zeros(shape, dtype=self._dtype, device=x.device)


def _empty(module: nn.Module) -> nn.Module:
    """A copy without values."""
    made = copy.copy(module)
    made._parameters = {
        name: None if one is None else nn.Parameter(torch.empty_like(one, device="meta"), requires_grad=False)
        for name, one in module._parameters.items()
    }
    made._modules = {name: None if one is None else _empty(one) for name, one in module._modules.items()}
    return made


class Received(Absent):
    """In the place of an earlier layer: gives what the stage before has sent."""

    def __init__(self, layer: nn.Module, *, in_tuple: bool) -> None:
        super().__init__()
        for name, value in vars(layer).items():  # a model may read settings of its layers, as the kind of attention
            if not name.startswith("_") and name != "forward" and not isinstance(value, torch.Tensor):
                self.__dict__[name] = value
        self.__dict__["hidden"], self._in_tuple = None, in_tuple

    def forward(self, x: torch.Tensor | None = None, *_: object, **__: object) -> torch.Tensor:
        hidden = self.__dict__["hidden"]
        return cast("torch.Tensor", (hidden,)) if self._in_tuple else hidden


class Next(Absent):
    """In the place of the first layer of the next stage: ends this one."""

    def forward(self, x: torch.Tensor | None = None, *_: object, **named: object) -> torch.Tensor:
        given = named.values() if x is None else (x,)
        raise Reached(next(one for one in given if isinstance(one, torch.Tensor)))


class StageForward:
    """``forward`` of a stage: the first takes the batch, the others what the stage before gives, and the batch too."""

    def __init__(self, piece: nn.Module, first: bool, earlier: list[Received]) -> None:
        self.piece, self.first, self.earlier = piece, first, earlier

    def __call__(self, *args: torch.Tensor, **batch: object) -> torch.Tensor:
        """What the next stage gets, or the main tensor of the output."""
        if not self.first:
            for stub in self.earlier:
                stub.__dict__["hidden"] = args[0]
        inputs = cast("Inputs", batch.pop(INPUTS) if INPUTS in batch else batch)
        if self.first and args:
            inputs = args[0]
        try:
            return main_tensor(call(cast("nn.Module", _Plain(self.piece)), inputs))
        except Reached as end:
            return end.hidden
        finally:
            for stub in self.earlier:
                stub.__dict__["hidden"] = None


class _Plain:
    """Calls the forward that the class of a module has."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: object, **named: object) -> torch.Tensor:
        return type(self._module).forward(self._module, *args, **named)


def cut_stage(
    model: nn.Module,
    stack: str,
    stage: Stage,
    before: Mapping[str, tuple[int, ...]],
    after: Collection[str],
    *,
    tuples: bool,
) -> nn.Module:
    """A copy of ``model`` that holds and runs ``stage`` alone; ``before`` gives shapes of what the modules before the
    layers make, ``tuples`` is True where layers give a tuple."""
    piece, (first, last) = Copy(model), stage.layers
    layers = list(cast("nn.ModuleList", model.get_submodule(stack)))  # one may be in several places
    held = [
        Received(layer, in_tuple=tuples) if index < first else layer if index < last else Next()
        for index, layer in enumerate(layers)
    ]
    in_order = isinstance(model.get_submodule(stack), nn.Sequential)
    piece.put(stack, nn.Sequential(*held) if in_order else nn.ModuleList(held))
    if not stage.embed:
        for name, shape in before.items():
            piece.put(name, Zeros(model.get_submodule(name), shape))
    if not stage.head:
        for name in after:
            piece.put(name, Absent())
    earlier = [one for one in held if isinstance(one, Received)]
    piece.top.forward = StageForward(piece.top, stage.embed, earlier)
    return piece.top
