"""Plans for the ranks and the machine there are: a new world gets a new plan with the same global batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from rota.runtime import environ
from rota.runtime.devices import local_node
from rota.spec.errors import BadInput, Infeasible
from rota.train.plan.hardware import DeviceSpec, Hardware, LevelSpec, cpu_ranks
from rota.train.plan.layers import ModelShape
from rota.train.plan.memory import GIB, memory
from rota.train.plan.model import Dtype, ParallelPlan
from rota.train.plan.search import search
from rota.train.plan.space import SearchRequest

FP32 = Dtype()


def plan_for_world(model: nn.Module, batch: int) -> ParallelPlan:
    """The planner's best plan for the ranks of the default process group on machines like this one. Collective.

    Raises BadInput for a model without a ``shape``, Infeasible as ``replan`` does.
    """
    shape = getattr(model, "shape", None)
    if not isinstance(shape, ModelShape):
        raise BadInput(
            f"plan: {type(model).__name__} has no 'shape', so no plan can be searched",
            hint="give fit(plan=...) or set model.shape = ModelShape(layers=..., hidden=..., ...)",
        )
    box: list[ParallelPlan | Infeasible | None] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = replan(shape, ranks=dist.get_world_size(), batch=batch, hardware=this_machine())
        except Infeasible as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    answer = box[0]
    if isinstance(answer, ParallelPlan):
        return answer
    assert answer is not None
    raise answer


def replan(shape: ModelShape, *, ranks: int, batch: int, hardware: Hardware, dtype: Dtype = FP32) -> ParallelPlan:
    """The best plan of ``batch`` sequences a step for ``ranks`` devices: losing ranks means more micro-batches.

    Raises Infeasible with the nearest smaller number of ranks that has a plan, when there is one.
    """
    best = _search(shape, ranks, batch, hardware, dtype)
    if best is not None:
        return best
    smaller = next((n for n in range(ranks - 1, 0, -1) if _search(shape, n, batch, hardware, dtype)), None)
    hint = f"use {smaller} of them" if smaller else "use devices with more memory, or a smaller model"
    raise Infeasible(
        f"no plan for {ranks} ranks: batch {batch}, {shape.layers} layers and {shape.heads} heads must divide over "
        f"them, and each has {hardware.device.memory_gib:.1f} GiB",
        hint=hint,
    )


def _search(shape: ModelShape, ranks: int, batch: int, hardware: Hardware, dtype: Dtype) -> ParallelPlan | None:
    question = SearchRequest(
        model=shape,
        hardware=hardware,
        gpus=ranks,
        memory_gib=hardware.device.memory_gib,
        batch=batch,
        dtype=dtype,
    )
    found = search(question, top=1)
    return found.best[0].plan if found.best else None


GPU_GB_S, GPU_LATENCY_US, GPU_MEMORY_GB_S = 100.0, 10.0, 2000.0
GPU_TFLOPS = {"bf16": 300.0, "fp16": 300.0, "fp32": 60.0}


def this_machine() -> Hardware:
    """Devices like those of this machine: its GPUs, else equal shares of its memory for the ranks it runs."""
    if torch.cuda.is_available():
        device = DeviceSpec(
            memory_gib=torch.cuda.get_device_properties(0).total_memory / GIB,
            memory_gb_s=GPU_MEMORY_GB_S,
            peak_tflops=GPU_TFLOPS,
        )
        level = LevelSpec(name="node", size=torch.cuda.device_count(), gb_s=GPU_GB_S, latency_us=GPU_LATENCY_US)
    else:
        return cpu_ranks(local_node().memory_bytes / GIB, int(environ.get("LOCAL_WORLD_SIZE", "1")))
    return Hardware(name="this-machine", provenance="orders of magnitude", device=device, levels=(level,))


def check_memory(plan: ParallelPlan, shape: ModelShape, hardware: Hardware) -> None:
    """Raises Infeasible with both numbers when a rank of the plan needs more memory than a device has."""
    needs = max((stage.total for stage in memory(plan, shape)), default=0.0)
    device = hardware.device
    if needs > (device.memory_gib - device.reserve_gib) * GIB:
        raise Infeasible(
            f"plan: its fullest rank needs {needs / GIB:.2f} GiB, a device of {hardware.name} has "
            f"{device.memory_gib:.2f} GiB less a reserve of {device.reserve_gib:.2f} GiB",
            hint="shard more (zero 3, tp, pp), recompute, use smaller micro-batches or more ranks",
        )
