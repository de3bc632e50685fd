"""This machine as a hardware file: matrix products, memory and all-reduces measured, each with its spread.

``python -m rota.train.measure RANKS`` prints ``{"hardware": ..., "measured": [...]}``.
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
from torch.multiprocessing.spawn import spawn

from rota.runtime.clock import SystemClock
from rota.spec import codec
from rota.train.elastic import this_machine
from rota.train.plan.hardware import Hardware

SIDES = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
COPY_BYTES = 64 << 20
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
    products = [(2.0 * side**3, _product(device, side)) for side in SIDES[device.type]]
    memory, launch = _copy(device), _launch(device)
    base = this_machine()
    peak = max(one.value for _, one in products)
    curve = tuple((flops, one.value / peak) for flops, one in products)
    spec = replace(
        base.device,
        peak_tflops=dict.fromkeys(("bf16", "fp16", "fp32"), peak),
        gemm_efficiency=curve,
        memory_gb_s=memory.value,
        memory_efficiency=1.0,
        launch_us=launch.value,
    )
    found = [*(one for _, one in products), memory, launch]
    level = base.levels[0]
    if ranks > 1:
        link = _link(ranks)
        found += link
        level = replace(level, size=ranks, gb_s=link[0].value, latency_us=link[1].value)
    text = f"measured on {device.type} in fp32, medians of {REPEATS}" + ("" if ranks > 1 else "; the link is a guess")
    return Hardware(name="measured", provenance=text, device=spec, levels=(level,)), tuple(found)


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


def _product(device: torch.device, side: int) -> Measured:
    left, right = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
    taken = _times_s(device, lambda: left @ right)
    return _measured(f"product of {side} (TFLOP/s)", [2e-12 * side**3 / one for one in taken])


def _copy(device: torch.device) -> Measured:
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    taken = _times_s(device, lambda: target.copy_(source))
    return _measured("memory, read and written (GB/s)", [2e-9 * COPY_BYTES / one for one in taken])


def _launch(device: torch.device) -> Measured:
    small = torch.ones(8, device=device)
    many = 200
    taken = _times_s(device, lambda: [small.add_(1.0) for _ in range(many)])
    return _measured("launch (us)", [1e6 * one / many for one in taken])


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
