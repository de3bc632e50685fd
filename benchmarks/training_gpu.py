"""A step of a GPT on one GPU, measured: its time and memory beside what the planner predicts, and beside torch alone.

``python benchmarks/training_gpu.py [--hardware NAME-OR-FILE ...] [--layers 24] [--hidden 1024] [--kinds bf16,fp32]``
prints one JSON document: for each kind of plan the median step of ``--rounds``, the peak of the memory that torch's
allocator gave out, and the prediction by each description of hardware. With ``--device cpu --layers 2 --hidden 64
--seq 32 --vocab 64`` the same runs without a GPU, which proves the program, not a speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from rota.service.plans import find_hardware
from rota.train.apply import Parallel, parallelize
from rota.train.loop import world
from rota.train.models.gpt import Gpt
from rota.train.plan.cost import step_time
from rota.train.plan.memory import GIB, memory
from rota.train.plan.model import Dtype, Layer, ModelShape, ParallelPlan, data_parallel
from run import Row, hand_in, skip

ADAMW = partial(torch.optim.AdamW, lr=1e-4)
WARM_UP = 2
BF16 = Dtype(param="bf16")
KINDS: dict[str, tuple[Dtype, Layer]] = {
    "fp32": (Dtype(), Layer()),
    "bf16": (BF16, Layer()),
    "bf16, selective recompute": (BF16, Layer(recompute="selective")),
    "bf16, full recompute": (BF16, Layer(recompute="full")),
    "bf16, zero 3": (BF16, Layer(zero=3)),
    "bf16, optimizer on the host": (BF16, Layer(offload="optimizer_cpu")),
    "bf16, zero 3, all on the host": (BF16, Layer(zero=3, offload="all_cpu")),
}
ALONE = ("fp32", "bf16")
"""Kinds of which torch alone is measured too."""

Step = Callable[[torch.Tensor, torch.Tensor], float]


def plan_of(kind: str, shape: ModelShape, asked: argparse.Namespace) -> ParallelPlan:
    dtype, layer = KINDS[kind]
    plain = data_parallel(
        layers=shape.layers, dp=1, micro_batch=asked.micro_batch, micro_batches=asked.micro_batches, zero=layer.zero
    )
    return replace(plain, dtype=dtype, layers=(replace(layer, count=shape.layers),), embed=layer, head=layer)


def model(shape: ModelShape, device: torch.device) -> Gpt:
    torch.manual_seed(0)
    with device:
        return Gpt(shape)


def alone(kind: str, shape: ModelShape, device: torch.device, micro_batches: int) -> Step:
    """The loop a user would write: gradients of micro-batches add up, autocast where the plan computes in bf16."""
    trained = model(shape, device)
    optimizer = ADAMW(trained.parameters())

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        total = 0.0
        for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            with torch.autocast(device.type, torch.bfloat16, enabled=kind != "fp32"):
                logits = trained(x)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten()) / micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def loss_of(trained: Parallel, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    return trained.step(inputs, targets).loss


def measure(step: Step, ids: torch.Tensor, rounds: int) -> dict[str, float]:
    """Median, fastest and slowest step in milliseconds, the peak of allocated memory in GiB, the last loss."""
    cuda, taken, loss = ids.is_cuda, list[float](), 0.0
    for number in range(WARM_UP + rounds):
        if number == WARM_UP and cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        loss = step(ids[:, :-1], ids[:, 1:])
        if cuda:
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - began))
    kept = taken[WARM_UP:]
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
    return {
        "step_ms": statistics.median(kept), "fastest_ms": min(kept), "slowest_ms": max(kept),
        "memory_gib": peak, "loss": loss,
    }  # fmt: skip


def measure_kind(kind: str, shape: ModelShape, ids: torch.Tensor, asked: argparse.Namespace) -> dict[str, Any]:
    """One kind of plan: measured, predicted by each description, and torch alone where it has a peer."""
    plan = plan_of(kind, shape, asked)
    trained = parallelize(model(shape, ids.device), plan, optimizer=ADAMW)
    found: dict[str, Any] = measure(partial(loss_of, trained), ids, asked.rounds)
    trained.close()
    del trained
    clean()
    if kind in ALONE:
        found["torch"] = measure(alone(kind, shape, ids.device, plan.micro_batches), ids, asked.rounds)
        clean()
    described = {name: find_hardware(name) for name in asked.hardware}
    predicted = {
        name: 1e3 * step_time(plan, shape, one).total_s
        for name, one in described.items()
        if one.host.gb_s or plan.layers[0].offload == "none"
    }
    need = memory(plan, shape)[0]
    return {"kind": kind, **found, "predicted_ms": predicted, "predicted_gib": need.total / GIB,
            "predicted_by_class": need.by_class_gib()}  # fmt: skip


def clean() -> None:
    """Models under a plan hold cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--hardware", nargs="*", default=["h100-96g"])
    parser.add_argument("--kinds", default=";".join(KINDS), help="separated by semicolons")
    parser.add_argument("--rounds", type=int, default=5)
    for name, value in (("layers", 24), ("hidden", 1024), ("seq", 1024), ("vocab", 50304)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=2)
    asked = parser.parse_args()
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        skip("CUDA device not found")
        print(json.dumps({"device": asked.device, "skipped": "CUDA device not found; --device cpu runs the same"}))
        return 0
    device, heads = torch.device(asked.device), max(1, asked.hidden // 64)
    shape = ModelShape(
        layers=asked.layers, hidden=asked.hidden, heads=heads, seq=asked.seq, vocab=asked.vocab, tied=False,
        positions=True,
    )  # fmt: skip
    rows = asked.micro_batch * asked.micro_batches
    ids = torch.randint(0, shape.vocab, (rows, shape.seq + 1), generator=torch.Generator().manual_seed(1)).to(device)
    with world():
        found = [measure_kind(kind, shape, ids, asked) for kind in asked.kinds.split(";")]
    hand_in(
        Row(f"a step, {one['kind']}", one["step_ms"], "ms", predicted, name)
        for one in found
        for name, predicted in one["predicted_ms"].items()
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(json.dumps({"device": name, "torch": torch.__version__, "shape": vars(asked), "kinds": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
