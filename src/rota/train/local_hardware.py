"""Hardware of this machine, estimated or measured, and the plans for the ranks that it runs.

A new world gets a new plan with the same global batch. ``python -m rota.train.local_hardware RANKS`` measures matrix
products, memory and all-reduces, each with its spread, and prints ``{"hardware": ..., "measured": [...]}``.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from rota.runtime import environ
from rota.runtime.clock import SystemClock
from rota.runtime.node import local_node
from rota.spec import codec
from rota.spec.errors import BadInput, Infeasible
from rota.train.models.gpt import Block
from rota.train.plan.cost import OPERATORS
from rota.train.plan.hardware import DeviceSpec, Hardware, HostSpec, LevelSpec, cpu_ranks
from rota.train.plan.memory import GIB, memory
from rota.train.plan.model import Dtype, ModelShape, ParallelPlan
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
            hint="give fit(plan=...), as data_parallel(layers=, dp=, micro_batch=) of rota.train.plan.model makes, "
            "or set model.shape = ModelShape(layers=..., hidden=..., ...)",
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
"""Of a GPU of which nothing was measured: orders of magnitude of an A100 or H100 and its NVLink, of which those of
``plan/hardware.py`` have sources. They order plans and predict no time."""


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


SIDES = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
FORMATS = {"cpu": ("fp32",), "cuda": ("bf16", "fp16", "fp32")}
"""Number formats that are measured; the share of the peak by size is that of the first."""
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
IN_A_ROW = {"cpu": 1, "cuda": 10}
"""Products between two looks at the clock: a device is waited for once, as in training."""
SENT_BYTES = (4 << 10, 4 << 20, 16 << 20)
REPEATS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One quantity: the median of ``REPEATS`` runs, and the lower and upper quartile as error bar."""

    name: str
    value: float
    low: float
    high: float


def measure(ranks: int = 1) -> tuple[Hardware, tuple[Measured, ...]]:
    """A hardware description of one device here, and what it rests on.

    ``ranks`` > 1 is the number of processes of the all-reduce; with 1 the link keeps its order of magnitude. Rates come
    in TFLOP/s, GB/s and microseconds. Raises what torch raises where a device or its memory is missing.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    products = {
        name: [(2.0 * side**3, _product(device, side, name)) for side in SIDES[device.type]]
        for name in FORMATS[device.type]
    }
    memory, launch = _copy(device), _launch(device)
    base, host = this_machine(), list[Measured]()
    peaks = {name: max(one.value for _, one in rows) for name, rows in products.items()}
    first = FORMATS[device.type][0]
    curve = tuple((flops, one.value / peaks[first]) for flops, one in products[first])
    spec = replace(
        base.device,
        peak_tflops={name: peaks.get(name, peaks["fp32"]) for name in ("bf16", "fp16", "fp32")},
        gemm_efficiency=curve,
        memory_gb_s=memory.value,
        memory_efficiency=1.0,
        launch_us=launch.value,
    )
    if device.type == "cuda":
        host = [_dispatch(device), _to_host(device)]
        spec = replace(spec, dispatch_us=host[0].value)
        behind = HostSpec(memory_gib=local_node().memory_bytes / GIB / torch.cuda.device_count(), gb_s=host[1].value)
        base = replace(base, host=behind)
    found = [*(one for rows in products.values() for _, one in rows), memory, launch, *host]
    level = base.levels[0]
    if ranks > 1:
        link = _link(ranks)
        found += link
        level = replace(level, size=ranks, gb_s=link[0].value, latency_us=link[1].value)
    guess = "" if ranks > 1 else "; the link is a guess"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    text = f"measured on {name} in {', '.join(products)} with torch {torch.__version__}, medians of {REPEATS}{guess}"
    return replace(base, name="measured", provenance=text, device=spec, levels=(level,)), tuple(found)


def _measured(name: str, values: list[float]) -> Measured:
    low, middle, high = statistics.quantiles(values, n=4)
    return Measured(name=name, value=middle, low=low, high=high)


def _times_s(device: torch.device, run: Callable[[], object]) -> list[float]:
    """Seconds of each of ``REPEATS`` runs after one that warms up."""
    clock, taken = SystemClock(), list[float]()
    for _ in range(REPEATS + 1):
        began_s = clock.monotonic_s()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(clock.monotonic_s() - began_s)
    return taken[1:]


def _product(device: torch.device, side: int, number: str) -> Measured:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[number]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    many = IN_A_ROW[device.type]
    taken = _times_s(device, lambda: [left @ right for _ in range(many)])
    return _measured(f"{number} product of {side} (TFLOP/s)", [2e-12 * many * side**3 / one for one in taken])


def _copy(device: torch.device) -> Measured:
    size = COPY_BYTES[device.type]
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    taken = _times_s(device, lambda: target.copy_(source))
    return _measured("memory, read and written (GB/s)", [2e-9 * size / one for one in taken])


def _to_host(device: torch.device) -> Measured:
    """A copy to memory of the host as an offloaded optimizer makes it, which is not pinned."""
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty(source.shape)
    taken = _times_s(device, lambda: target.copy_(source))
    return _measured("to the host (GB/s)", [1e-9 * source.nbytes / one for one in taken])


LAUNCHES, LAYERS = 200, 20
"""Kernels, and layers, between two looks at the clock."""


def _launch(device: torch.device) -> Measured:
    """The fixed cost of a kernel on the device; on a GPU in a graph, where no host is waited for."""
    small = torch.ones(8, device=device)

    def run() -> None:
        for _ in range(LAUNCHES):
            small.add_(1.0)

    replay: Callable[[], object] = run
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        run()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    return _measured("launch (us)", [1e6 * one / LAUNCHES for one in _times_s(device, replay)])


def _dispatch(device: torch.device) -> Measured:
    """What the host spends on an operator, in microseconds: time / (3 ``OPERATORS`` ``LAYERS``).

    Measured over both passes, in mixed precision, of ``LAYERS`` layers too small to keep the device busy. The formula
    is that of ``host_s`` in ``plan/cost.py``: ``OPERATORS`` for a forward pass, twice as many for a backward one. A
    median of ``REPEATS``, as all figures here; recompute is not in it.
    """
    layer = Block(ModelShape(layers=1, hidden=64, heads=1, seq=16, vocab=2)).to(device)
    inputs = torch.randn(1, 16, 64, device=device)

    def run() -> None:
        output = inputs
        with torch.autocast(device.type, torch.bfloat16):
            for _ in range(LAYERS):
                output = layer(output)
        output.sum().backward()

    return _measured("dispatch (us)", [1e6 * one / (3 * OPERATORS * LAYERS) for one in _times_s(device, run)])


def _link(ranks: int) -> list[Measured]:
    """Bandwidth and latency of an all-reduce between processes of this machine, of a ring's formula."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_reduce, args=(ranks, folder), nprocs=ranks)
        taken: dict[int, list[float]] = torch.load(Path(folder, "taken"))
    small, large = SENT_BYTES[0], SENT_BYTES[-1]
    moved = 2 * (ranks - 1) / ranks * large
    return [
        _measured("all-reduce (GB/s)", [1e-9 * moved / one for one in taken[large]]),
        _measured("all-reduce latency (us)", [1e6 * one / (2 * (ranks - 1)) for one in taken[small]]),
    ]


def _reduce(rank: int, ranks: int, folder: str) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    taken: dict[int, list[float]] = {}
    for size in SENT_BYTES:
        sent = torch.ones(size // 4, device=device)
        taken[size] = _times_s(device, lambda sent=sent: dist.all_reduce(sent))
    if rank == 0:
        torch.save(taken, Path(folder, "taken"))
    dist.destroy_process_group()


if __name__ == "__main__":
    made, quantities = measure(int(sys.argv[1]))
    text = {"hardware": codec.to_json_value(made), "measured": [codec.to_json_value(one) for one in quantities]}
    sys.stdout.write(json.dumps(text) + "\n")
