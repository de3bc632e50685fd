"""This machine as the planner sees it, and whether a plan fits it."""

from __future__ import annotations

import torch

from rota.runtime import environ
from rota.runtime.devices import local_node
from rota.spec.errors import Infeasible
from rota.train.plan.hardware import DeviceSpec, Hardware, LevelSpec, cpu_ranks
from rota.train.plan.layers import ModelShape
from rota.train.plan.memory import GIB, memory
from rota.train.plan.model import ParallelPlan

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
