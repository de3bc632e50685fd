"""What each replica keeps of its own beside a shared checkpoint: residues, rounds, shards of servers, its weights."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist

from rota.spec.errors import BadInput
from rota.train.apply import Parallel
from rota.train.state import local


def own_name() -> str:
    """The name of this rank's part in a checkpoint."""
    return f"sync.{dist.get_rank()}"


def own_state(trained: Parallel) -> dict[str, torch.Tensor]:
    """``{own_name(): bytes}`` of what this rank alone has; empty for a plan whose replicas are equal.

    Where gradients are not reduced, replicas differ between rounds or pushes, so their weights and moments are in it.
    """
    state = {} if trained.agree is None else trained.agree.state_dict()
    if trained.agree is None or (trained.agree.reduces and not state):
        return {}
    tensors = {} if trained.agree.reduces else {name: local(one) for name, one in trained.state_dict().items()}
    file = io.BytesIO()
    torch.save({"world": dist.get_world_size(), "state": state, "tensors": tensors}, file)
    return {own_name(): torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)}


def restore_own(trained: Parallel, found: torch.Tensor | None) -> None:
    """Inverse of ``own_state``; before the first step. Raises BadInput when the checkpoint is of another world.

    None = the checkpoint has no such part, which is right for a plan whose replicas are equal.
    """
    if trained.agree is None or (trained.agree.reduces and not trained.agree.state_dict()):
        return
    kept: dict[str, Any] | None = None
    if found is not None:
        kept = torch.load(io.BytesIO(found.numpy().tobytes()), weights_only=False)  # our own file, sums checked
    if kept is None or kept["world"] != dist.get_world_size():
        sync, had = trained.plan.sync, "none" if kept is None else f"{kept['world']} replicas"
        raise BadInput(
            f"checkpoint: state of {had} for sync.mode {sync.mode} with compression {sync.compression} on "
            f"{dist.get_world_size()}",
            hint="go on with the plan and the world it was written under, or with mode allreduce and compression none",
        )
    trained.agree.load_state_dict(kept["state"])
    with torch.no_grad():
        for name, tensor in trained.state_dict().items() if kept["tensors"] else ():
            local(tensor).copy_(kept["tensors"][name])
