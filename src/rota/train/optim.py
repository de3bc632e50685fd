"""Optimizers of a plan: ZeRO-1, state on the host or in files, clipping by the global norm, state for checkpoints."""

from __future__ import annotations

import functools
import json
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rota.spec.errors import BadInput
from rota.train.parallel.mesh import PlanMesh, local
from rota.train.parallel.model_parts import Parts
from rota.train.plan.model import Layer, Offload, ParallelPlan

State: TypeAlias = "dict[torch.Tensor, dict[str, Any]]"
"""What torch's optimizers keep for each parameter, by key: tensors and numbers."""
MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
PerParameter = Callable[[str, torch.Tensor], Mapping[str, object]]
"""(name, whole parameter) to the options of its group, as ``{"weight_decay": 0.0}``: torch's per-parameter options."""
OPTIONS = "rota_options"
"""The key of a parameter group, and the attribute of a parameter, that hold those options as JSON."""
FILE_BUDGET_BYTES = 64 << 20
"""State that may be resident at once: of the group that steps, the one before it and the one after."""
LINE_BYTES = 64
"""Of a cache line: each tensor of a file begins at one."""
NEEDS_WHOLE, NEEDS_CLOSURE = {"Adafactor", "Rprop"}, {"LBFGS"}
"""Kinds that step a whole parameter only, in torch 2.13, and those that compute the loss again."""


def optimizer_for(
    make: MakeOptimizer,
    pieces: Sequence[nn.Module],
    parts: Parts,
    plan: ParallelPlan,
    group: dist.ProcessGroup,
    folder: Path | None,
    options: Mapping[str, str],
) -> torch.optim.Optimizer:
    """The optimizer over the parameters of this rank, each where its layer's ``zero`` and ``offload`` want it.

    ``group`` are the data ranks, ``folder`` is where files of state go, ``options`` are those of ``options_of``.
    Raises BadInput for what cannot be kept so.
    """
    if options:
        _mark(pieces, options)
    made: list[torch.optim.Optimizer] = []
    make = functools.partial(_checked, make, sorted(set(options.values())))
    for (shared, offload), parameters in _by_kind(pieces, parts, plan).items():
        place = functools.partial(_placed, make, offload, folder)
        made.append(ZeroOneOptimizer(place, parameters, group) if shared and group.size() > 1 else place(parameters))
    optimizer = made[0] if len(made) == 1 else ComposedOptimizer(made)
    for settings in optimizer.param_groups:
        meshes = {one.device_mesh if isinstance(one, DTensor) else None for one in settings["params"]}
        if meshes != {None}:  # operators on lists refuse lists of sharded and plain tensors
            settings["foreach"] = len(meshes) == 1 and all(one.is_cuda for one in settings["params"])
    return optimizer


def options_of(model: nn.Module, choose: PerParameter | None) -> dict[str, str]:
    """The options of each parameter as JSON, by all its names; empty when none are chosen.

    A parameter with several names is asked for by its first. Raises BadInput for options that JSON does not hold.
    """
    found: dict[str, str] = {}
    texts: dict[torch.Tensor, str] = {}
    if choose is None:
        return found
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in texts:
            chosen = choose(name, parameter)
            try:
                texts[parameter] = json.dumps(dict(chosen), sort_keys=True)
            except (TypeError, ValueError) as error:
                hint = 'give a mapping, as {"weight_decay": 0.0}'
                raise BadInput(f"per_parameter: {chosen!r} for {name}: {error}", hint=hint) from error
        found[name] = texts[parameter]
    return found


def _mark(pieces: Sequence[nn.Module], options: Mapping[str, str]) -> None:
    """Let each parameter hold its options. Raises BadInput for one that the whole model has under no name."""
    for piece in pieces:
        for name, parameter in piece.named_parameters(remove_duplicate=False):
            if name not in options:
                raise BadInput(
                    f"per_parameter: this plan makes {name}, which the whole model does not have",
                    hint="leave per_parameter out, or use a plan without expert ranks",
                )
            setattr(parameter, OPTIONS, options[name])


def _checked(make: MakeOptimizer, options: Sequence[str], parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer with one group for each of ``options``, also where no parameter here has them: groups are equal on
    all ranks. Raises BadInput for one that steps a whole parameter only and was given parts of it, needs a closure, or
    does not know an option."""
    parameters = list(parameters)
    groups = [
        {"params": [one for one in parameters if getattr(one, OPTIONS, options[0]) == text] or [placeholder()]}
        | json.loads(text)
        | {OPTIONS: text}
        for text in options
    ]
    optimizer = make(cast("list[torch.Tensor]", groups) if groups else parameters)
    if not isinstance(cast("object", optimizer), torch.optim.Optimizer):
        hint = "return it: lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
        raise BadInput(f"optimizer: the function gives {type(optimizer).__name__}, not an optimizer", hint=hint)
    if unknown := sorted({key for text in options for key in json.loads(text)} - set(optimizer.defaults)):
        raise BadInput(
            f"per_parameter: {type(optimizer).__name__} has no option {unknown[0]!r}",
            hint=f"it has {', '.join(optimizer.defaults)}",
        )
    kinds, given = {kind.__name__ for kind in type(optimizer).__mro__}, optimizer.param_groups
    if kinds & NEEDS_CLOSURE:
        raise BadInput(
            f"optimizer: {type(optimizer).__name__} computes the loss again in its step, which a plan cannot"
        )
    if kinds & NEEDS_WHOLE and any(isinstance(one, DTensor) for group in given for one in group["params"]):
        raise BadInput(
            f"optimizer: {type(optimizer).__name__} needs whole parameters, ZeRO 2 and 3, tp and ep give it parts",
            hint="use zero 0 or 1 without tp and ep, or AdamW",
        )
    return optimizer


def _by_kind(
    pieces: Sequence[nn.Module], parts: Parts, plan: ParallelPlan
) -> dict[tuple[bool, Offload], list[torch.Tensor]]:
    """Parameters by whether their state is dealt out over data ranks, and by where it lies."""
    kinds: dict[torch.Tensor, Layer] = {}
    for piece in pieces:
        for index, layer in parts.layers(piece):
            kinds.update(dict.fromkeys(layer.parameters(), parts.kind(plan, index)))
    found: dict[tuple[bool, Offload], dict[torch.Tensor, None]] = {}
    for piece in pieces:
        for parameter in piece.parameters():
            if parameter.requires_grad:
                kind = kinds.get(parameter, parts.rest(piece, plan))
                same = found.setdefault((kind.zero == 1, kind.offload), {})
                same[parameter] = None  # a tied one may be in two pieces
    return {kind: list(same) for kind, same in found.items()} or {(False, "none"): [placeholder()]}


def placeholder() -> torch.Tensor:
    """What an optimizer has that would have nothing: a stage may be frozen, and parameters fewer than ranks."""
    return nn.Parameter(torch.empty(0))


def _placed(
    make: MakeOptimizer, offload: Offload, folder: Path | None, parameters: Iterable[torch.Tensor]
) -> torch.optim.Optimizer:
    match offload:
        case "optimizer_cpu":
            return HostOptimizer(make, list(parameters))
        case "optimizer_nvme":
            if folder is None:
                raise BadInput(
                    "offload = optimizer_nvme: no folder for its files",
                    hint="give fit(checkpoint=), or parallelize(offload_folder=)",
                )
            return FileOptimizer(make, list(parameters), folder, FILE_BUDGET_BYTES)
        case _:
            return make(parameters)


class ComposedOptimizer(torch.optim.Optimizer):
    """An optimizer made of others: one set of groups and one state for schedules, clipping and checkpoints."""

    def __init__(
        self, parts: Sequence[torch.optim.Optimizer], of_model: Mapping[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        """``of_model`` gives for each parameter of the parts the one of the model whose state it has."""
        self._of_model = of_model or {}
        super().__init__([{"params": group["params"]} for part in parts for group in part.param_groups], {})
        self.parts, self.defaults = list(parts), parts[0].defaults  # schedules look there for momentum
        self.param_groups = [group for part in parts for group in part.param_groups]

    @property
    def state(self) -> State:  # pyright: ignore[reportIncompatibleVariableOverride] - a view of the parts
        """The state of all parts, by the parameter of the model."""
        held = {parameter: kept for part in self.parts for parameter, kept in part.state.items()}
        return {self._of_model.get(parameter, parameter): kept for parameter, kept in held.items()}

    @state.setter
    def state(self, value: object) -> None:  # pyright: ignore[reportIncompatibleVariableOverride] - as above
        """The base class sets an empty one."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: losses are not computed again
        """Step every part."""
        assert closure is None
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of every part."""
        for part in self.parts:
            part.zero_grad(set_to_none)


def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make the state that it otherwise makes in its first step; no weight changes."""
    if isinstance(optimizer, ComposedOptimizer):
        for part in optimizer.parts:
            fill_state(part)
        return
    missing = {p for group in optimizer.param_groups for p in group["params"] if not optimizer.state.get(p)}
    if not missing:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    kept = {p: p.grad for group in optimizer.param_groups for p in group["params"]}
    for parameter in kept:
        parameter.grad = torch.zeros_like(parameter) if parameter in missing else None
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, grad in kept.items():
        parameter.grad = grad
    for parameter in missing:
        count = optimizer.state.get(parameter, {}).get("step")
        if isinstance(count, torch.Tensor):
            count.zero_()


class ZeroOneOptimizer(ComposedOptimizer):
    """ZeRO-1 (Rajbhandari et al. 2020, section 5.1): each data rank steps its share of the parameters and sends them.

    Whole parameters are dealt out, largest first, to the rank with the least; gradients must be equal on all ranks.
    """

    def __init__(self, make: MakeOptimizer, parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self.group, self.shares = group, partition(parameters, group.size())
        self.all = list(parameters)
        super().__init__([make(self.shares[group.rank()] or [placeholder()])])

    def step(self, closure: None = None) -> None:
        """Step the own share, then send it to the others and receive theirs."""
        super().step(closure)
        with torch.no_grad():
            for owner, share in enumerate(self.shares):
                if not share:
                    continue
                flat = torch.cat([local(parameter).flatten() for parameter in share])
                dist.broadcast(flat, group=self.group, group_src=owner)
                if owner != self.group.rank():
                    for parameter, new in zip(share, flat.split([local(p).numel() for p in share]), strict=True):
                        local(parameter).copy_(new.view_as(local(parameter)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all parameters, not of the own share alone."""
        _zero_grad(self.all, set_to_none)


def partition(parameters: Sequence[torch.Tensor], ranks: int) -> list[list[torch.Tensor]]:
    """Parameters of each rank, balanced by elements; the same on all ranks."""
    shares: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for parameter in sorted(parameters, key=lambda one: -one.numel()):
        min(shares, key=lambda share: sum(one.numel() for one in share)).append(parameter)
    return shares


class HostOptimizer(ComposedOptimizer):
    """ZeRO-Offload (Ren et al. 2021): a copy of the weights and all state on the host, where the update is computed."""

    def __init__(self, make: MakeOptimizer, parameters: Sequence[torch.Tensor]) -> None:
        self.device_of: dict[torch.Tensor, torch.Tensor] = {
            nn.Parameter(local(one).detach().to("cpu", copy=True)): one for one in parameters
        }
        for host, one in self.device_of.items():
            vars(host).update({key: value for key, value in vars(one).items() if key == OPTIONS})
        self.versions = [local(one)._version for one in parameters]
        super().__init__([make(list(self.device_of))], self.device_of)

    def step(self, closure: None = None) -> None:
        """Gradients to the host, step there, weights back. Weights that another hand changed are fetched first."""
        with torch.no_grad():
            for (host, one), version in zip(self.device_of.items(), self.versions, strict=True):
                host.grad = None if one.grad is None else local(one.grad).to("cpu")
                if local(one)._version != version:
                    host.copy_(local(one))
            super().step(closure)
            for host, one in self.device_of.items():
                local(one).copy_(host)
        self.versions = [local(one)._version for one in self.device_of.values()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the model's parameters."""
        _zero_grad(self.device_of.values(), set_to_none)


class FileOptimizer(ComposedOptimizer):
    """State in memory-mapped files (after ZeRO-Infinity, Rajbhandari et al. 2021): while a group of parameters steps,
    the pages of the next are read ahead, and those of the last are written back and let go.

    Files are allocated before the first step, so that a full disk is an OSError here and no weight has changed.
    """

    def __init__(
        self, make: MakeOptimizer, parameters: Sequence[torch.Tensor], folder: Path, budget_bytes: int
    ) -> None:
        super().__init__([make(group) for group in by_bytes(parameters, budget_bytes // 6)])
        for part in self.parts:
            fill_state(part)
        folder.mkdir(parents=True, exist_ok=True)
        self.maps = [_to_file(part, folder) for part in self.parts]

    def step(self, closure: None = None) -> None:
        """Step the groups in order."""
        assert closure is None
        for index, part in enumerate(self.parts):
            if index + 1 < len(self.maps):
                self.maps[index + 1].madvise(mmap.MADV_WILLNEED)
            part.step()
            self.maps[index].flush()
            self.maps[index].madvise(mmap.MADV_DONTNEED)


def by_bytes(parameters: Sequence[torch.Tensor], bytes_max: int) -> list[list[torch.Tensor]]:
    """Runs of parameters of at most ``bytes_max`` each, or of one parameter that is larger."""
    groups: list[list[torch.Tensor]] = [[]]
    for parameter in parameters:
        held = sum(local(one).nbytes for one in groups[-1])
        if groups[-1] and held + local(parameter).nbytes > bytes_max:
            groups.append([])
        groups[-1].append(parameter)
    return groups


def _zero_grad(parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


def _to_file(part: torch.optim.Optimizer, folder: Path) -> mmap.mmap:
    """Move the state of one part into a file that has no name: it goes with the process."""
    held = [
        (kept, key, value)
        for kept in part.state.values()
        for key, value in kept.items()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    room = sum(_aligned(local(value).nbytes) for *_, value in held)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, max(room, LINE_BYTES))
        mapped = mmap.mmap(file.fileno(), max(room, LINE_BYTES))
    offset = 0
    for kept, key, value in held:
        inner = local(value)
        here = torch.frombuffer(mapped, dtype=inner.dtype, count=inner.numel(), offset=offset).view(inner.shape)
        here.copy_(inner)
        kept[key] = _like(value, here)
        offset += _aligned(inner.nbytes)
    return mapped


def _like(tensor: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return inner
    return DTensor.from_local(
        inner, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )


def _aligned(size: int) -> int:
    return -(-size // LINE_BYTES) * LINE_BYTES


def clip_global_norm(
    parameters: Iterable[torch.Tensor], elsewhere: Collection[torch.Tensor], norm_max: float, mesh: PlanMesh
) -> float:
    """Scale all gradients so that their L2 norm is at most ``norm_max``; returns the norm before. Collective.

    Sharded gradients count once over every axis that shards them, never over replicas: a DTensor knows its axes, and
    the stages of a pipeline hold different parameters, so their squares add up; those ``elsewhere`` count on another.
    """
    grads = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = defaultdict(list)
    for parameter, grad in grads.items():
        if not any(parameter is other for other in elsewhere):
            by_mesh[grad.device_mesh if isinstance(grad, DTensor) else None].append(grad)
    squared = torch.zeros((), device=mesh.root.device_type)
    for same in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(same, foreach=False)
        squared += (norm.full_tensor() if isinstance(norm, DTensor) else norm).float() ** 2
    if mesh.degrees.pp > 1:
        dist.all_reduce(squared, group=mesh.group("pp"))
    total = float(squared.sqrt())
    factor = norm_max / (total + 1e-6)
    if factor < 1.0:
        for grad in grads.values():
            grad.mul_(factor)
    return total


def optimizer_tensors(
    pieces: Sequence[nn.Module], optimizer: torch.optim.Optimizer, first: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """``optim.<parameter>.<key>`` of every tensor that the optimizer keeps for the parameters of this rank.

    ``first`` gives each name of a parameter with several its first one: the same whatever of them are on this rank.
    """
    names: dict[torch.Tensor, str] = {
        parameter: first.get(name, name) for piece in pieces for name, parameter in piece.named_parameters()
    }
    return {
        f"optim.{names[parameter]}.{key}": value
        for parameter, kept in optimizer.state.items()
        for key, value in kept.items()
        if isinstance(value, torch.Tensor) and parameter in names
    }


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """The numbers of each parameter group (rate, decay, ...), as JSON."""
    return [
        {key: value for key, value in group.items() if key != "params" and _is_json(value)}
        for group in optimizer.param_groups
    ]


def restore_settings(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, object]]) -> None:
    """Inverse of ``settings``; ``foreach`` and ``fused`` stay as this plan needs them.

    Groups that were all alike are those of any number of groups; with options for each parameter, those of equal
    options. Raises BadInput for other options, and for another number of different groups.
    """
    here, there = ({str(group.get(OPTIONS, "")) for group in held} for held in (optimizer.param_groups, groups))
    if here != there:
        raise BadInput(
            f"checkpoint: per_parameter gave the options {sorted(there)}, now {sorted(here)}",
            hint="continue with the same per_parameter",
        )
    alike = {str(group.get(OPTIONS, "")): group for group in groups}
    if all(group == alike[str(group.get(OPTIONS, ""))] for group in groups):
        groups = [alike[str(group.get(OPTIONS, ""))] for group in optimizer.param_groups]
    if len(groups) != len(optimizer.param_groups):
        text = f"checkpoint: {len(groups)} parameter groups, the optimizer has {len(optimizer.param_groups)}"
        raise BadInput(text, hint="continue with the same optimizer and per_parameter")
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        for key, value in given.items():
            if key not in ("foreach", "fused"):
                group[key] = tuple(cast("list[float]", value)) if isinstance(group.get(key), tuple) else value


def _is_json(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(item, int | float) for item in cast("list[object]", value))
    return value is None or isinstance(value, int | float | str | bool)
