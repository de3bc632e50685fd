"""Models on the meta device: no rank ever holds more of them than its part and one whole module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from rota.spec.errors import BadInput
from rota.train.parallel.mesh import spread
from rota.train.parallel.model_parts import Names, find_module, tie_again
from rota.train.plan.model import ParallelPlan

Initial = Callable[[nn.Module], None]
"""Fills the parameters and buffers that a module holds itself, as ``reset_parameters`` of torch's modules does."""
UNSET = torch.iinfo(torch.int32).min
"""What integers hold until they are filled; numbers hold NaN."""


class MetaModel:
    """The modules of a model that have no values yet, as they are before a plan splits them."""

    def __init__(self, model: nn.Module, plan: ParallelPlan, initial: Initial | None, ties: Sequence[Names]) -> None:
        """Raises BadInput for expert ranks, and for a module that nothing initialises."""
        self._ties, self._dtypes = ties, {name: one.dtype for name, one in own_tensors(model)}
        self._modules = {name: one for name, one in model.named_modules() if any(t.is_meta for _, t in held_by(one))}
        chosen = initial or cast("Initial | None", getattr(model, "_init_weights", None))
        self._initial = {name: chosen or reset_of(one) for name, one in self._modules.items()}
        unknown = [name for name, found in self._initial.items() if found is None]
        if unknown:
            raise BadInput(
                f"model: {unknown[0] or type(model).__name__} is on the meta device and has no reset_parameters",
                hint="give parallelize(..., initial=), which fills the weights of one module, or build on cpu",
            )
        if self._modules and plan.mesh.ep > 1:
            raise BadInput(
                f"mesh.ep = {plan.mesh.ep}: experts on the meta device are not spread over ranks", hint="build on cpu"
            )

    def fill(self, pieces: Sequence[nn.Module], device: torch.device) -> None:
        """Make room for the parts of this rank and fill them; the values are the same under every plan.

        All modules of the model are drawn in their order, one at a time. Raises BadInput for what stays without values.
        """
        for piece in pieces if self._modules else ():
            piece._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one)
            tie_again(piece, self._ties, split=False)
        done: set[torch.Tensor] = set()
        for name, module in self._modules.items():
            whole = self._drawn(name, module)
            for piece in pieces:
                here = find_module(piece, name)
                for key, one in held_by(here) if here is not None else ():
                    if key in whole and one not in done:
                        spread(one.detach(), whole[key], f"{name}.{key}")
                        done.add(one)

    def _drawn(self, name: str, module: nn.Module) -> dict[str, torch.Tensor]:
        """The whole values of a module."""
        drawn = copy.copy(module)
        drawn._parameters, drawn._buffers = dict(module._parameters), dict(module._buffers)
        for key, one in held_by(module):
            shape, dtype = tuple(one.shape), self._dtypes[f"{name}.{key}"]
            value = torch.full(shape, float("nan") if dtype.is_floating_point else UNSET, dtype=dtype)
            if isinstance(one, nn.Parameter):
                drawn._parameters[key] = nn.Parameter(value, requires_grad=one.requires_grad)
            else:
                drawn._buffers[key] = value
        with torch.no_grad():
            cast("Initial", self._initial[name])(drawn)
        found = {key: one.detach() for key, one in held_by(drawn)}
        for key, one in found.items():
            if one.numel() and bool((one.isnan() if one.is_floating_point() else one == UNSET).any()):
                raise BadInput(
                    f"model: {name}.{key} is on the meta device and its initialisation leaves it without values",
                    hint="fill it in parallelize(..., initial=), or build the model on cpu",
                )
        return found


def held_by(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of the module itself."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def own_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, under all their names."""
    for name, module in model.named_modules():
        for key, one in held_by(module):
            yield f"{name}.{key}", one


def reset_of(module: nn.Module) -> Initial | None:
    """What torch calls the initialisation of a module; None for one without."""
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, name, None)):
            return lambda one: cast("Any", getattr(one, name))()
    return None
