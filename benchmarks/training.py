"""What a plan costs beside the same training written with torch alone: DDP and FSDP2 on two processes.

``python benchmarks/training.py [--rounds N] [--steps N] [--json]``. Both sides train equal models on equal batches in
the same processes; rounds of a few steps alternate, so that a slow moment of the machine meets both. The overhead is
the median over the rounds of the ratio of two neighbouring ones in processor time of all ranks, which other processes
do not stretch as they stretch the clock's; the quartiles stand beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from rota.train.apply import parallelize
from rota.train.models.gpt import Gpt
from rota.train.plan.model import ModelShape, data_parallel
from run import Row, hand_in

WORLD = 2
BATCH = 4
SHAPE = ModelShape(layers=4, hidden=256, heads=4, seq=128, vocab=256, tied=False)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)

Step = Callable[[torch.Tensor, torch.Tensor], float]


def model() -> Gpt:
    torch.manual_seed(0)
    return Gpt(SHAPE)


def plain(kind: str) -> Step:
    """The loop a user would write."""
    trained: torch.nn.Module = model()
    if kind == "ddp":
        trained = DistributedDataParallel(trained, gradient_as_bucket_view=True)
    else:
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in trained.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(trained, mesh=mesh)
    optimizer = ADAMW(trained.parameters())

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = F.cross_entropy(trained(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=kind != "ddp")
        return loss.item()

    return step


def ours(kind: str) -> Step:
    """The same through a plan."""
    zero = 0 if kind == "ddp" else 3
    plan = data_parallel(layers=SHAPE.layers, dp=WORLD, micro_batch=BATCH, zero=zero)
    trained = parallelize(model(), plan, optimizer=ADAMW)
    return lambda inputs, targets: trained.step(inputs, targets).loss


def rank_main(rank: int, port: int, rounds: int, steps: int, out: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo")
    ids = torch.randint(0, SHAPE.vocab, (BATCH, SHAPE.seq + 1), generator=torch.Generator().manual_seed(rank))
    found = {kind: measure(plain(kind), ours(kind), ids, rounds, steps) for kind in ("ddp", "fsdp2")}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(theirs: Step, mine: Step, ids: torch.Tensor, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step by the clock and of processors, round by round; the side that goes first changes."""
    taken: dict[str, list[float]] = {f"{who}_{what}_s": [] for who in ("torch", "rota") for what in ("wall", "cpu")}
    sides = [("torch", theirs), ("rota", mine)]
    for _, step in sides * 2:
        step(ids[:, :-1], ids[:, 1:])
    for number in range(rounds):
        for name, step in sides if number % 2 else sides[::-1]:
            dist.barrier()
            since, cpu_since = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step(ids[:, :-1], ids[:, 1:])
            spent = torch.tensor((time.perf_counter() - since, time.process_time() - cpu_since)) / steps
            dist.all_reduce(spent)
            taken[f"{name}_wall_s"].append(spent[0].item() / WORLD)
            taken[f"{name}_cpu_s"].append(spent[1].item())
    return taken


def ratios(taken: dict[str, list[float]], what: str) -> list[float]:
    """Lower quartile, median and upper quartile of Rota's time over torch's."""
    pairs = zip(taken[f"rota_{what}_s"], taken[f"torch_{what}_s"], strict=True)
    return statistics.quantiles([mine / theirs for mine, theirs in pairs], n=4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        spawn(rank_main, args=(port, given.rounds, given.steps, str(out)), nprocs=WORLD)
        found = json.loads(out.read_text())
    hand_in(
        Row(
            f"a step of {kind}",
            1e3 * statistics.median(taken["rota_cpu_s"]),
            "ms, CPU",
            1e3 * statistics.median(taken["torch_cpu_s"]),
            "torch",
        )
        for kind, taken in found.items()
    )
    for kind, taken in found.items():
        row = {"kind": kind, "rounds": given.rounds, **{name: statistics.median(one) for name, one in taken.items()}}
        row |= {"cpu_ratio": ratios(taken, "cpu"), "wall_ratio": ratios(taken, "wall")}
        if given.json:
            print(json.dumps(row))
            continue
        for what in ("cpu", "wall"):
            low, middle, high = (100 * (one - 1) for one in row[f"{what}_ratio"])
            ms = [1000 * row[f"{who}_{what}_s"] for who in ("torch", "rota")]
            print(
                f"{kind:6s} {what:4s}  torch {ms[0]:7.1f} ms   Rota {ms[1]:7.1f} ms   {middle:+.1f} %"
                f" ({low:+.1f} to {high:+.1f})"
            )


if __name__ == "__main__":
    sys.exit(main())
