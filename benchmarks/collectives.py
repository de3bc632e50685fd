"""Collectives in shared memory beside Gloo and a plain copy, in one run of interleaved rounds.

``python benchmarks/collectives.py [--ranks N] [--rounds N] [--mib 1 16 64]`` prints one JSON document: for each
operation and size the median milliseconds of both groups, of one memcpy of the tensor, and the ratio Gloo over shm: its
median over the rounds, and that of the least disturbed rounds, which other processes on the machine change least.
Tensors are private float32; each rank uses one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import rota.tensors
from rota.train import shm
from run import Row, hand_in

SMALL_MIB = 4 / 1024
Operation = Callable[[Any], object]


def operations(elements: int, ranks: int) -> dict[str, Operation]:
    """Each operation as a call with a group."""
    full, part = torch.randn(elements), torch.empty(elements // ranks)
    joined = torch.empty(elements * ranks)
    return {
        "all_reduce": lambda group: dist.all_reduce(full, dist.ReduceOp.MAX, group=group),
        "all_gather": lambda group: dist.all_gather_single(joined, full, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_single(part, full, dist.ReduceOp.MAX, group=group),
        "broadcast": lambda group: dist.broadcast(full, src=0, group=group),
    }


def timed_ms(act: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) * 1e3


def measure(rank: int, ranks: int, port: int, sizes: list[float], rounds: int, out: str) -> None:
    """One rank: rounds alternate between the groups; all ranks start a call together."""
    torch.set_num_threads(1)
    shm.register()
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    groups = {"shm": dist.new_group(backend=shm.NAME), "gloo": dist.new_group(backend="gloo")}
    gate, rows = groups["shm"], []
    for mib in sizes:
        elements = int(mib * 2**20) // 4 // ranks * ranks
        source, target = torch.randn(elements), torch.empty(elements)
        for name, act in operations(elements, ranks).items():
            seen: dict[str, list[float]] = {"shm": [], "gloo": [], "memcpy": []}
            for _ in range(rounds * (20 if mib < 1 else 1)):
                for kind, group in groups.items():
                    dist.barrier(group=gate)
                    seen[kind].append(timed_ms(partial(act, group)))
                dist.barrier(group=gate)
                seen["memcpy"].append(timed_ms(partial(target.copy_, source)))
            median = {kind: round(statistics.median(values), 3) for kind, values in seen.items()}
            ratio = round(statistics.median(a / b for a, b in zip(seen["gloo"], seen["shm"], strict=True)), 2)
            least = round(min(seen["gloo"]) / min(seen["shm"]), 2)
            row = {"operation": name, "mib": round(mib, 4), **median, "gloo_over_shm": ratio, "least_over_least": least}
            rows.append(row)
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=float, nargs="+", default=[SMALL_MIB, 1, 4, 16, 64])
    asked = parser.parse_args()
    home = tempfile.mkdtemp(prefix="rb")
    os.environ["ROTA_HOME"] = home
    port_holder = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = port_holder.port
    del port_holder
    try:
        given = (asked.ranks, port, asked.mib, asked.rounds, f"{home}/rows.json")
        mp.spawn(measure, given, nprocs=asked.ranks)
        rows = json.loads(Path(home, "rows.json").read_text())
    finally:
        rota.tensors.down(home)
        shutil.rmtree(home, ignore_errors=True)
    sides = ("operation", "mib", "shm", "gloo")
    hand_in(
        Row(f"{what}, {mib:g} MiB", ours, "ms", peer, "Gloo")
        for what, mib, ours, peer in ([row[name] for name in sides] for row in rows)
    )
    machine = {"cpus": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 1), "kernel": platform.release()}
    print(json.dumps({"machine": machine, "torch": torch.__version__, "ranks": asked.ranks, "rows_ms": rows}, indent=1))


if __name__ == "__main__":
    main()
