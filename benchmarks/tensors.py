"""What the tensor plane costs, beside its peers and its physical limits, interleaved in one run on one machine.

``python benchmarks/tensors.py [get put start all] [--rounds N] [--no-ray]`` prints one JSON document: for each
measure the median over the rounds in microseconds (or milliseconds), and the ratios with the target each must meet.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rota.tensors

MIB = 1 << 20
LOOP_MIN = 5000


class Rounds:
    """Times measures in turn, so that what else runs on the machine meets all of them alike."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.samples: dict[str, list[float]] = defaultdict(list)

    def run(self, measures: dict[str, Callable[[], float]]) -> None:
        for _ in range(self.count):
            for name, measure in measures.items():
                self.samples[name].append(measure())

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def document(self, scale: float = 1e6, unit: str = "us") -> dict[str, Any]:
        return {
            name: {f"median_{unit}": round(self.median(name) * scale, 3), f"min_{unit}": round(min(s) * scale, 3)}
            for name, s in self.samples.items()
        }


def each_of(action: Callable[[], object], repeats: int) -> Callable[[], float]:
    """Seconds of one call: the mean of a long loop, else the median of ``repeats`` calls timed one by one."""

    def loop() -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            action()
        return (time.perf_counter() - began) / repeats

    def one() -> float:
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    return loop if repeats >= LOOP_MIN else lambda: statistics.median(one() for _ in range(repeats))


def judge(value: float, limit: float, *, least: bool = False) -> dict[str, Any]:
    return {"value": round(value, 3), "target": limit, "met": value >= limit if least else value <= limit}


def bench_get(plane: Any, ray: Any, rounds: int) -> dict[str, Any]:
    """Repeated and cold reads of one small tensor, and of three hundred names."""
    plane.put("one", torch.zeros(256))
    for index in range(300):
        plane.put(f"many/{index}", torch.zeros(256))
    plane.publish_group("group", {str(i): torch.zeros(256) for i in range(300)}, step=1)
    names = [f"many/{index}" for index in range(300)]
    held = plane.get_many(names), plane.get_group("group"), plane.get("one")

    def cold() -> float:
        plane.release("one")
        began = time.perf_counter()
        plane.get("one")
        return time.perf_counter() - began

    measures: dict[str, Callable[[], float]] = {
        "get again": each_of(lambda: plane.get("one"), 20_000),
        "get cold, segment mapped": lambda: statistics.median(cold() for _ in range(100)),
        "get_many of 300 again, a name": lambda: each_of(lambda: plane.get_many(names), 20)() / 300,
        "get_group of 300 again": each_of(lambda: plane.get_group("group"), 10_000),
    }
    if ray is not None:
        ref = ray.put(torch.zeros(256))
        ray.get(ref)
        measures["ray.get again"] = each_of(lambda: ray.get(ref), 200)
        measures["ray.put"] = each_of(lambda: ray.put(torch.zeros(256)), 100)
    timed = Rounds(rounds)
    timed.run(measures)
    del held
    checks = {
        "get again <= 0.5 us": judge(timed.median("get again") * 1e6, 0.5),
        "get cold <= 60 us": judge(timed.median("get cold, segment mapped") * 1e6, 60),
        "get_many <= 5 us a name": judge(timed.median("get_many of 300 again, a name") * 1e6, 5),
        "get_group again <= 1 us": judge(timed.median("get_group of 300 again") * 1e6, 1),
    }
    if ray is not None:
        ratio = timed.median("ray.get again") / timed.median("get again")
        checks["get again >= 100x faster than ray.get"] = judge(ratio, 100, least=True)
    return {"measures": timed.document(), "checks": checks}


def bench_put(plane: Any, ray: Any, rounds: int) -> dict[str, Any]:
    """Publishing 64 MiB into recycled memory beside a plain copy and ray.put; publishing in place by size."""
    source = torch.arange(16 * MIB, dtype=torch.float32)
    target = np.empty(64 * MIB, np.uint8)
    flat = source.view(torch.uint8).numpy()
    target[:] = flat
    for _ in range(3):
        plane.put("big", source)

    def copy() -> None:
        target[:] = flat

    def create(size: int) -> Callable[[], None]:
        def once() -> None:
            with plane.create(f"made/{size}", (size,), torch.uint8):
                pass

        return once

    measures: dict[str, Callable[[], float]] = {
        "memcpy 64 MiB": each_of(copy, 1),
        "put 64 MiB": each_of(lambda: plane.put("big", source), 1),
        "create 1 KiB": each_of(create(1024), 50),
        "create 64 MiB": each_of(create(64 * MIB), 20),
        "put 1 KiB": each_of(lambda: plane.put("small", source[:256]), 100),
    }
    for make in (create(1024), create(64 * MIB)):
        make(), make()
    if ray is not None:

        def ray_put() -> float:
            began = time.perf_counter()
            ref = ray.put(source)
            took = time.perf_counter() - began
            del ref
            gc.collect()
            return took

        measures["ray.put 64 MiB"] = ray_put
    timed = Rounds(rounds)
    timed.run(measures)
    checks = {
        "put 64 MiB <= 1.10x memcpy": judge(timed.median("put 64 MiB") / timed.median("memcpy 64 MiB"), 1.10),
        "create <= 100 us": judge(timed.median("create 1 KiB") * 1e6, 100),
        "create 64 MiB within 20 % of 1 KiB": judge(timed.median("create 64 MiB") / timed.median("create 1 KiB"), 1.2),
    }
    if ray is not None:
        ratio = timed.median("ray.put 64 MiB") / timed.median("put 64 MiB")
        checks["put >= 2x faster than ray.put"] = judge(ratio, 2, least=True)
    return {"measures": timed.document(), "checks": checks}


def bench_start(rounds: int) -> dict[str, Any]:
    """``connect()`` that starts the server, and one that joins it under another namespace."""
    timed = Rounds(rounds)

    def start_and_join() -> None:
        home = Path(tempfile.mkdtemp(prefix="rb"))
        began = time.perf_counter()
        with rota.tensors.connect(home=home):
            timed.samples["start"].append(time.perf_counter() - began)
            began = time.perf_counter()
            with rota.tensors.connect(home=home, namespace="other"):
                timed.samples["join"].append(time.perf_counter() - began)
        shutil.rmtree(home, ignore_errors=True)

    for _ in range(rounds):
        start_and_join()
    checks = {
        "start <= 300 ms": judge(timed.median("start") * 1e3, 300),
        "join <= 20 ms": judge(timed.median("join") * 1e3, 20),
    }
    return {"measures": timed.document(1e3, "ms"), "checks": checks}


def start_ray() -> tuple[Any, str]:
    import ray

    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    ray.init(
        address="local", num_cpus=1, include_dashboard=False, _temp_dir=folder, object_store_memory=1 << 30,
        log_to_driver=False, logging_level="error",
    )  # fmt: skip
    return ray, folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["all"], help="get put start all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-ray", action="store_true")
    asked = parser.parse_args()
    wanted = {"get", "put", "start"} if "all" in asked.what else set(asked.what)
    home = Path(tempfile.mkdtemp(prefix="rb"))
    ray, folder = (None, "") if asked.no_ray or wanted == {"start"} else start_ray()
    machine = {"cpus": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 1), "kernel": platform.release()}
    result: dict[str, Any] = {"machine": machine, "python": platform.python_version(), "rounds": asked.rounds}
    try:
        with rota.tensors.connect(home=home) as plane:
            if "get" in wanted:
                result["get"] = bench_get(plane, ray, asked.rounds)
            if "put" in wanted:
                result["put"] = bench_put(plane, ray, asked.rounds)
        if "start" in wanted:
            result["start"] = bench_start(asked.rounds)
    finally:
        if ray is not None:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
        rota.tensors.down(home)
        shutil.rmtree(home, ignore_errors=True)
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
