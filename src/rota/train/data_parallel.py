"""DDP, FSDP2, HSDP and the ZeRO stages."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from rota.train.experts import find_experts
from rota.train.keep import DTYPES, mixed
from rota.train.mesh import PlanMesh
from rota.train.parts import Parts
from rota.train.plan.model import Layer, ParallelPlan

BUCKET_MIB = 25


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
    given: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload}
    if kind.zero < 2:
        replicate(module, mesh=axes, **given)
    else:
        fully_shard(module, mesh=axes, reshard_after_forward=kind.zero == 3, **given)


def sync_gradients(model: nn.Module, parts: Parts, plan: ParallelPlan, *, last: bool) -> None:
    """What the coming backward of this FSDP model does beside gradients; ``last`` is that of the last micro-batch.

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
