"""Weights that a model has under several names, as an embedding that is its head, too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rota.spec.errors import BadInput
from rota.train.parallel.mesh import PlanMesh, local
from rota.train.parallel.model_parts import Parts, stages_of
from rota.train.plan.model import ParallelPlan

Names = tuple[str, ...]


def tied_names(model: nn.Module) -> list[Names]:
    """All names of each parameter that has several, in the order of the model."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [tuple(same) for same in names.values() if len(same) > 1]


def holders(model: nn.Module, names: Names, parts: Parts, plan: ParallelPlan) -> list[int]:
    """The pipeline ranks that have the parameter under any of its names."""
    if plan.mesh.pp == 1:
        return [0]
    stages = {rank: [plan.stages[index] for index in stages_of(plan, rank)] for rank in range(plan.mesh.pp)}
    return [rank for rank, own in stages.items() if _held([parts.cut(model, stage) for stage in own], names)]


def tie_again(piece: nn.Module, ties: Sequence[Names]) -> None:
    """One parameter again where splitting the layers has made one of each name, if all were split alike."""
    for names in ties:
        held = _held([piece], names)
        first = next(iter(held.values()), None)
        for name, other in held.items():
            if first is not None and isinstance(first, DTensor) and _layout(other) == _layout(first):
                owner, _, key = name.rpartition(".")
                setattr(piece.get_submodule(owner), key, first)


class TiedWeights:
    """The tied parameters of this rank: their gradients are summed over the stages that share them."""

    def __init__(self, ties: Sequence[tuple[Names, list[int]]], pieces: Sequence[nn.Module], mesh: PlanMesh) -> None:
        """Collective over the world. Raises BadInput for a parameter that this rank holds twice by now."""
        self.first: dict[str, str] = {}
        self.elsewhere: list[torch.Tensor] = []
        """Parameters whose gradients count on another stage, for a norm."""
        self._shared: list[tuple[torch.Tensor, dist.ProcessGroup]] = []
        place, lines = mesh.index("pp"), mesh.root.mesh.flatten(1).t().tolist()
        for names, ranks in ties:
            copies = list(dict.fromkeys(_held(pieces, names).values()))
            apart = torch.tensor(len(copies) > 1, device=mesh.root.device_type, dtype=torch.int32)
            dist.all_reduce(apart, dist.ReduceOp.MAX)  # all refuse, or none waits for the others
            if apart:
                raise BadInput(
                    f"model: {' and '.join(names)} are one parameter, this plan splits them apart",
                    hint="give embed and head the same tp, hold both in one ZeRO unit (no zbv), or untie them",
                )
            self.first |= dict.fromkeys(names, names[0])
            for line in lines if len(ranks) > 1 else ():
                group = dist.new_group([line[rank] for rank in ranks])  # every rank of the world takes part
                if dist.get_rank() in line and place in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    self._shared.append((copies[0], group))
            if copies and place != ranks[0]:
                self.elsewhere += copies

    def sum_gradients(self) -> None:
        """Each stage has the part of the gradient that its own use gives; afterwards all have the whole."""
        for parameter, group in self._shared:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local(parameter.grad), group=group)


def _held(pieces: Sequence[nn.Module], names: Names) -> dict[str, nn.Parameter]:
    found = {name: one for piece in pieces for name, one in piece.named_parameters(remove_duplicate=False)}
    return {name: found[name] for name in names if name in found}


def _layout(parameter: nn.Parameter) -> object:
    return (parameter.placements, parameter.shape) if isinstance(parameter, DTensor) else None
