"""Data parallel: DDP, FSDP2, HSDP, the ZeRO stages, number formats, and buffers that are equal on all ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from rota.spec.errors import BadInput, first_of
from rota.train.parallel.experts import find_experts
from rota.train.parallel.mesh import PlanMesh
from rota.train.parallel.model_parts import Parts
from rota.train.plan.model import Layer, ParallelPlan

BUCKET_MIB = 25
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def mixed(plan: ParallelPlan) -> bool:
    """True when a master copy in another format than the computation's is kept."""
    return plan.dtype.param != plan.dtype.master


def only_data(plan: ParallelPlan) -> bool:
    """True when every rank holds the whole model and nothing but data is split: what DDP was made for."""
    mesh = plan.mesh
    whole = max(kind.zero for kind in (*plan.layers, plan.embed, plan.head)) < 2
    return whole and mesh.pp == mesh.tp == mesh.ep == 1


def replicate_model(model: nn.Module, mesh: PlanMesh) -> nn.Module:
    """DDP over all data axes; gradients are views of its buckets."""
    if mesh.axis("data").size() == 1:
        return model
    return DistributedDataParallel(
        model,
        process_group=mesh.group("data"),
        forward_sync_buffers=False,  # those that change are sent after the step
        gradient_as_bucket_view=True,
        bucket_cap_mb=BUCKET_MIB,
    )


def check_reduced(model: DistributedDataParallel) -> None:
    """After a backward that reduces gradients: raises BadInput when some were not, with the parameters behind it.

    DDP sends a bucket when all gradients of it are there, and notices only in the next forward pass that one was not
    sent: the weights would have been updated with gradients of this rank alone.
    """
    try:
        model.reducer._rebuild_buckets()  # what that forward begins with
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        trained = [name for name, one in model.module.named_parameters() if one.requires_grad]
        listed = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
        names = [trained[int(index)] for index in listed[1].split() if int(index) < len(trained)] if listed else []
        raise BadInput(
            f"mesh.dp: the loss of this step does not depend on {first_of(names) or 'some parameters'}: gradients were "
            "not reduced, nothing was updated",
            hint="set requires_grad to False for what is never used; ZeRO 2 or 3 takes what all ranks leave out",
        ) from error


def shard_model(model: nn.Module, parts: Parts, plan: ParallelPlan, mesh: PlanMesh) -> nn.Module:
    """Wrap each layer, then the rest, by its ZeRO stage: 0 and 1 replicate, 2 keeps the gathered weights until
    backward, 3 frees them after forward. Gradients are means over all data axes."""
    needed = mesh.axis("data").size() > 1 or mixed(plan) or any(kind.offload == "all_cpu" for kind in plan.layers)
    if not needed:
        return model
    for index, layer in parts.layers(model):
        kind = parts.kind(plan, index)
        for experts in find_experts(layer) if plan.mesh.ep > 1 else ():
            _wrap(experts, kind, plan, mesh.axis("expert_data"))
        _wrap(layer, kind, plan, data_axes(kind, mesh))
    rest = parts.rest(model, plan)
    _wrap(model, rest, plan, data_axes(rest, mesh))
    return model


def data_axes(kind: Layer, mesh: PlanMesh) -> DeviceMesh:
    """All data ranks for replicas; for shards two axes when groups of shards are replicated (HSDP)."""
    if kind.zero < 2:
        return mesh.axis("data")
    return mesh.root["dp_replicate", "fsdp"] if mesh.degrees.dp_replicate > 1 else mesh.axis("fsdp")


def _wrap(module: nn.Module, kind: Layer, plan: ParallelPlan, axes: DeviceMesh) -> None:
    param, master = DTYPES[plan.dtype.param], DTYPES[plan.dtype.master]
    policy = MixedPrecisionPolicy(
        param_dtype=param if param != master else None, reduce_dtype=DTYPES[plan.dtype.reduce], cast_forward_inputs=True
    )
    offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=False) if kind.offload == "all_cpu" else OffloadPolicy()
    if kind.zero < 2:
        replicate(module, mesh=axes, mp_policy=policy, offload_policy=offload)
    else:
        after = kind.zero == 3
        fully_shard(module, mesh=axes, reshard_after_forward=after, mp_policy=policy, offload_policy=offload)


def sync_gradients(model: nn.Module, parts: Parts, plan: ParallelPlan, *, last: bool) -> None:
    """Set gradient sync and resharding for the next backward of an FSDP model; ``last``: of the last micro-batch.

    ZeRO 2 and 3 scatter gradients in every micro-batch, so that no rank ever holds all of them; 2 keeps the gathered
    weights from one micro-batch to the next. Replicas reduce once; replicas of groups of shards with every scatter.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(last)
    wrapped = [(layer, parts.kind(plan, index)) for index, layer in parts.layers(model)]
    wrapped += [(experts, kind) for layer, kind in wrapped for experts in find_experts(layer)]
    for module, kind in (*wrapped, (model, parts.rest(model, plan))):
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last or kind.zero >= 2, recurse=False)
            module.set_reshard_after_backward(last or kind.zero != 2, recurse=False)


class Buffers:
    """Buffers (BatchNorm statistics ...) of the modules on this rank. After a step all ranks have those of the first
    data rank, as in ``DistributedDataParallel``: statistics come from the batch of one rank, also in a checkpoint."""

    def __init__(self, pieces: Sequence[nn.Module], mesh: PlanMesh) -> None:
        self._pieces = pieces
        self._groups = [mesh.group(name) for name in ("tp", "data") if mesh.axis(name).size() > 1]
        self._device = mesh.root.device_type
        norms = {name for name, module, _ in self._all() if isinstance(module, _NormBase)}
        self._statistics = norms  # torch writes these without counting a new version
        self._seen = {name: (one, one._version) for name, one in self._held().items()}

    def agree(self) -> None:
        """Broadcast changed buffers from the first rank of each group; a no-op without buffers.

        Collective over the ranks with equal weights.
        """
        held = self._held() if self._groups else {}
        if not held:
            return
        changed = torch.tensor([self._is_new(name, one) for name, one in held.items()], device=self._device)
        changed = changed.to(torch.int32)
        for group in self._groups:  # control flow may differ between ranks: what changed on any is sent by all
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=group)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for one, new in zip(held.values(), changed.tolist(), strict=True):
            if new:
                by_dtype[one.dtype].append(one)
        for same in by_dtype.values():
            flat = torch.cat([one.detach().flatten() for one in same]).to(self._device)
            for group in self._groups:
                dist.broadcast(flat, group=group, group_src=0)
            for one, new in zip(same, flat.split([one.numel() for one in same]), strict=True):
                one.detach().copy_(new.view_as(one))
        self._seen = {name: (one, one._version) for name, one in held.items()}

    def _is_new(self, name: str, one: torch.Tensor) -> bool:
        before = self._seen.get(name)
        return name in self._statistics or before is None or before[0] is not one or before[1] != one._version

    def _held(self) -> dict[str, torch.Tensor]:
        return {name: one for name, _, one in self._all()}

    def _all(self) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
        for index, piece in enumerate(self._pieces):
            for path, module in piece.named_modules():
                for name, one in module.named_buffers(recurse=False):
                    if not isinstance(one, DTensor):
                        yield f"{index}.{path}.{name}", module, one
