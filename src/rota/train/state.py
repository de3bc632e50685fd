"""Everything a checkpoint keeps of a model under a plan, by names that know no stage, rank or wrapper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rota.spec.errors import BadInput


def model_tensors(pieces: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """``model.<name>`` of each parameter and persistent buffer on this rank: shards are DTensors."""
    found: dict[str, torch.Tensor] = {}
    for piece in pieces:
        for name, tensor in piece.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                found[f"model.{name}"] = tensor.detach()
    return found


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


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The numbers of each parameter group (rate, decay, ...), as JSON."""
    return [
        {key: value for key, value in group.items() if key != "params" and _is_json(value)}
        for group in optimizer.param_groups
    ]


def restore_settings(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Inverse of ``settings``; ``foreach`` and ``fused`` stay as this plan needs them.

    Groups that were all alike are those of any number of groups. Raises BadInput for another number of different ones.
    """
    if groups and all(group == groups[0] for group in groups):
        groups = [groups[0]] * len(optimizer.param_groups)
    if len(groups) != len(optimizer.param_groups):
        raise BadInput(f"checkpoint: {len(groups)} parameter groups, the optimizer has {len(optimizer.param_groups)}")
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        for key, value in given.items():
            if key not in ("foreach", "fused"):
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _is_json(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, int | float | str | bool)
        or (isinstance(value, tuple | list) and all(isinstance(item, int | float) for item in value))
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this rank holds of a shard, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
