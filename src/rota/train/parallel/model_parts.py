"""Parts of a model: the pipeline stages cut from them and their schedule, recompute, weights under several names."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.tensor import DTensor

from rota.spec.errors import BadInput
from rota.train.parallel.mesh import PlanMesh, local
from rota.train.plan.model import Layer, ParallelPlan, Stage

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle


class Absent(nn.Module):
    """In the place of a part that another stage holds: what comes in goes out, so ``forward`` needs no change."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Names of the parts of a model, dotted where they lie deeper: ``stack`` is a ModuleList or a Sequential, and
    forward is head(layers(embed(x))). A plan that treats none of them unlike the rest does not need them."""

    embed: str = "embed"
    stack: str = "layers"
    head: str = "head"

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the lists of layers, in the order in which the plan counts them."""
        return (self.stack,)

    def ends(self, model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules before the layers and after them, absent ones included."""
        return [model.get_submodule(self.embed)], [model.get_submodule(self.head)]

    def check(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Raises BadInput when the model lacks a part that the plan treats unlike the rest."""
        cut = max(plan.mesh.pp, plan.mesh.tp, plan.mesh.cp) > 1
        for name in (self.embed, self.stack, self.head) if cut else (self.stack,) if apart(plan) else ():
            if find_module(model, name) is None:
                raise BadInput(
                    f"model: {type(model).__name__} has no module {name!r}",
                    hint="name its parts: parallelize(..., parts=Parts(embed=..., stack=..., head=...))",
                )
        if (cut or apart(plan)) and not self.count(model):
            text = f"model.{self.stack} is not a ModuleList or Sequential with layers"
            raise BadInput(text, hint="hold the layers in one ModuleList")

    def lists(self, model: nn.Module) -> dict[str, nn.ModuleList | nn.Sequential]:
        """The lists of layers that the model has, by name."""
        found = {name: find_module(model, name) for name in self.stacks}
        return {name: one for name, one in found.items() if isinstance(one, nn.ModuleList | nn.Sequential)}

    def count(self, model: nn.Module) -> int:
        """Number of layers, absent ones included; 0 for a model that is one whole."""
        return sum(map(len, self.lists(model).values()))

    def layers(self, model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
        """The layers that are present, with their global index; one in several places once, with the first."""
        for index, _, layer in self.named_layers(model):
            yield index, layer

    def named_layers(self, model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
        """As ``layers``, with the name of each."""
        seen: set[nn.Module] = set()
        named = [(f"{name}.{key}", one) for name, held in self.lists(model).items() for key, one in enumerate(held)]
        for index, (name, layer) in enumerate(named):
            if not isinstance(layer, Absent) and layer not in seen:
                seen.add(layer)
                yield index, name, layer

    def rest(self, model: nn.Module, plan: ParallelPlan) -> Layer:
        """What the plan says of everything outside the layers."""
        return plan.embed if self.count(model) else plan.layers[0]

    def kind(self, plan: ParallelPlan, index: int) -> Layer:
        """What the plan says of layer ``index``."""
        for run in plan.layers:
            if index < run.count:
                return run
            index -= run.count
        raise BadInput(f"layers: the plan describes {sum(run.count for run in plan.layers)} layers, the model has more")

    def cut(self, model: nn.Module, stage: Stage) -> nn.Module:
        """A copy of the model that shares the parts of ``stage`` and has the others absent: names stay global."""
        piece = Copy(model)
        first, last = stage.layers
        for name, stack in self.lists(model).items():
            kept = [layer if first <= index < last else Absent() for index, layer in enumerate(stack)]
            piece.put(name, nn.Sequential(*kept) if isinstance(stack, nn.Sequential) else nn.ModuleList(kept))
        if not stage.embed:
            piece.put(self.embed, Absent())
        if not stage.head:
            piece.put(self.head, Absent())
        return piece.top


def apart(plan: ParallelPlan) -> bool:
    """True when the plan treats some layers unlike others, or unlike the rest of the model."""
    kinds = {replace(run, count=1) for run in plan.layers}
    return plan.mesh.ep > 1 or len(kinds) > 1 or any(kind.recompute != "none" for kind in kinds)


def find_module(model: nn.Module, name: str) -> nn.Module | None:
    """The module of a dotted name, None without one."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


class Copy:
    """A copy of a model in which modules are replaced, and which shares all others with the original."""

    def __init__(self, model: nn.Module) -> None:
        self.top = self._of(model)
        self._made: dict[str, nn.Module] = {"": self.top}

    def put(self, name: str, module: nn.Module) -> None:
        """Replace the module of a dotted name; those above it become copies."""
        owner, _, key = name.rpartition(".")
        self._copied(owner)._modules[key] = module

    def _copied(self, name: str) -> nn.Module:
        if name not in self._made:
            owner, _, key = name.rpartition(".")
            above = self._copied(owner)
            self._made[name] = above._modules[key] = self._of(above.get_submodule(key))
        return self._made[name]

    @staticmethod
    def _of(module: nn.Module) -> nn.Module:
        made = copy.copy(module)
        made._modules = dict(module._modules)
        return made


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def stages_of(plan: ParallelPlan, rank: int) -> list[int]:
    """Indices of the stages that pipeline rank ``rank`` runs.

    Stages lie in a circle over the ranks; for zbv in a V: rank 0 has the first and the last (Qi et al. 2024).
    """
    pp, count = plan.mesh.pp, len(plan.stages)
    if plan.schedule == "zbv":
        return [rank, count - 1 - rank]
    return list(range(rank, count, pp))


def schedule(
    pieces: list[nn.Module], plan: ParallelPlan, mesh: PlanMesh, device: torch.device, loss: Loss
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """The schedule of this rank over its pieces of the model. ``loss`` is already scaled: gradients are summed."""
    # Loads more than a second of torch, which plans without stages do not need.
    pipelining = importlib.import_module("torch.distributed.pipelining")
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    indices = stages_of(plan, mesh.index("pp"))
    stages = [
        pipelining.PipelineStage(piece, index, len(plan.stages), device, group=mesh.group("pp"))
        for index, piece in zip(indices, pieces, strict=True)
    ]
    one = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
    if plan.schedule in one:
        return one[plan.schedule](stages[0], plan.micro_batches, loss_fn=loss, scale_grads=False)
    several = {
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zb": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
    }
    return several[plan.schedule](stages, plan.micro_batches, loss_fn=loss, scale_grads=False)


def recompute(layer: nn.Module, kind: Layer) -> None:
    """Compute activations of this layer again in backward instead of keeping them.

    ``full`` repeats the whole layer; ``selective`` the attention core alone, whose activations grow with the square of
    the sequence and cost little time (Korthikanti et al. 2022, section 5). Raises BadInput without a ``core``.
    """
    if kind.recompute == "full":
        checkpoint(layer)
    elif kind.recompute == "selective":
        cores = [part for name, part in layer.named_modules() if name.rsplit(".", 1)[-1] == "core"]
        if not cores:
            raise BadInput(
                f"layers.recompute = selective: {type(layer).__name__} has no module named 'core' around its attention",
                hint="use recompute full, or put the attention without its projections into a module 'core'",
            )
        for core in cores:
            checkpoint(core)


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


def tie_again(piece: nn.Module, ties: Sequence[Names], *, split: bool = True) -> None:
    """One parameter again where there is now one of each name: by ``split``, if all were split alike, or in any way."""
    for names in ties:
        held = _held([piece], names)
        first = next(iter(held.values()), None)
        for name, other in held.items():
            if first is not None and (not split or isinstance(first, DTensor)) and _layout(other) == _layout(first):
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
