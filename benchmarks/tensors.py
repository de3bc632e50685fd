"""What the tensor store costs, beside its peers and its physical limits, interleaved in one run on one machine.

``python benchmarks/tensors.py [get put memory restore recover reclaim start all] [--rounds N] [--no-ray]`` prints one
JSON document: for each measure the median over the rounds in microseconds (or milliseconds), and the ratios with the
target each must meet. ``tensors_gpu.py`` measures tensors on devices.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import mmap
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import rota.tensors
from rota.tensors.writer import Copier, threads_wanted
from run import Row, hand_in

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


def each_of(
    action: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """Seconds of one call: the mean of a long loop, else the median of ``repeats`` calls timed one by one.

    With ``time.thread_time`` the CPU it costs its own thread, with ``time.process_time`` that of all threads: what it
    is worth on a machine that others load.
    """

    def loop() -> float:
        began = clock()
        for _ in range(repeats):
            action()
        return (clock() - began) / repeats

    def one() -> float:
        began = clock()
        action()
        return clock() - began

    return loop if repeats >= LOOP_MIN else lambda: statistics.median(one() for _ in range(repeats))


def faults_of(action: Callable[[], object]) -> int:
    """Pages that one call had to be given."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    action()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def shared_memory(folder: Path, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory of the very kind that tensors lie in: pages of 4 KiB of shared memory, where private memory has 2 MiB."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)


def judge(value: float, limit: float, *, least: bool = False) -> dict[str, Any]:
    return {"value": round(value, 3), "target": limit, "met": value >= limit if least else value <= limit}


def bench_get(plane: Any, ray: Any, rounds: int) -> dict[str, Any]:
    """Repeated and cold reads of one small tensor, and of three hundred names."""
    plane.put("one", torch.zeros(256))
    for index in range(300):
        plane.put(f"many/{index}", torch.zeros(256))
    plane.publish_group("group", {str(i): torch.zeros(256) for i in range(300)}, step=1)
    names = [f"many/{index}" for index in range(300)]
    source, refs = torch.zeros(256), list[Any]()
    plain = source.numpy()  # what Ray shares without a copy; a torch tensor it pickles
    held = plane.get_many(names), plane.get_group("group"), plane.get("one")

    def cold() -> float:
        plane.release("one")
        began = time.perf_counter()
        plane.get("one")
        return time.perf_counter() - began

    def first() -> float:
        """A version this process has never seen, as a rollout meets it after each publish."""
        plane.put("new", source)
        began = time.perf_counter()
        plane.get("new")
        return time.perf_counter() - began

    def first_of_ray() -> float:
        refs[:] = [ray.put(plain)]
        began = time.perf_counter()
        ray.get(refs[0])
        return time.perf_counter() - began

    def cpu_first() -> float:
        plane.put("new", source)
        return each_of(lambda: plane.get("new"), 1, time.thread_time)()

    def cpu_first_of_ray() -> float:
        refs[:] = [ray.put(plain)]
        return each_of(lambda: ray.get(refs[0]), 1, time.thread_time)()

    measures: dict[str, Callable[[], float]] = {
        "get again": each_of(lambda: plane.get("one"), 20_000),
        "get again, CPU": each_of(lambda: plane.get("one"), 20_000, time.thread_time),
        "get cold, segment mapped": lambda: statistics.median(cold() for _ in range(100)),
        "get of a new version": lambda: statistics.median(first() for _ in range(50)),
        "get of a new version, CPU": lambda: statistics.median(cpu_first() for _ in range(50)),
        "get_many of 300 again, a name": lambda: each_of(lambda: plane.get_many(names), 20)() / 300,
        "get_group of 300 again": each_of(lambda: plane.get_group("group"), 10_000),
        "get_group of 300 again, CPU": each_of(lambda: plane.get_group("group"), 10_000, time.thread_time),
    }
    if ray is not None:
        ref = ray.put(plain)
        ray.get(ref)
        measures["ray.get again"] = each_of(lambda: ray.get(ref), 200)
        measures["ray.get of a new object"] = lambda: statistics.median(first_of_ray() for _ in range(50))
        measures["ray.get of a new object, CPU"] = lambda: statistics.median(cpu_first_of_ray() for _ in range(50))
        measures["ray.put"] = each_of(lambda: ray.put(plain), 100)
    timed = Rounds(rounds)
    timed.run(measures)
    del held
    checks = {
        "get again <= 1 us": judge(timed.median("get again") * 1e6, 1),
        "get again <= 0.5 us, CPU": judge(timed.median("get again, CPU") * 1e6, 0.5),
        "get cold <= 60 us": judge(timed.median("get cold, segment mapped") * 1e6, 60),
        "get_many <= 10 us a name": judge(timed.median("get_many of 300 again, a name") * 1e6, 10),
        "get_group again <= 1 us": judge(timed.median("get_group of 300 again") * 1e6, 1),
        "get_group again <= 1 us, CPU": judge(timed.median("get_group of 300 again, CPU") * 1e6, 1),
    }
    if ray is not None:
        ratio = timed.median("ray.get again") / timed.median("get again")
        checks["get again >= 50x faster than ray.get"] = judge(ratio, 50, least=True)
        ratio = timed.median("get of a new version") / timed.median("ray.get of a new object")
        checks["get of a new version <= 1x ray.get"] = judge(ratio, 1)
        ratio = timed.median("get of a new version, CPU") / timed.median("ray.get of a new object, CPU")
        checks["get of a new version <= 1x ray.get, CPU"] = judge(ratio, 1)
    return {"measures": timed.document(), "checks": checks}


def bench_put(plane: Any, ray: Any, rounds: int) -> dict[str, Any]:
    """Publishing 64 MiB into recycled memory beside a plain copy and ray.put; publishing in place by size."""
    source = torch.arange(16 * MIB, dtype=torch.float32)
    flat = source.view(torch.uint8).numpy()
    target, shared = np.empty(64 * MIB, np.uint8), shared_memory(plane.folder, 64 * MIB)
    target[:] = shared[:] = flat

    copier = Copier(threads_wanted())

    def copy(to: np.ndarray[Any, np.dtype[np.uint8]]) -> Callable[[], None]:
        def once() -> None:
            to[:] = flat

        return once

    def create(size: int) -> Callable[[], None]:
        def once() -> None:
            with plane.create(f"made/{size}", (size,), torch.uint8):
                pass

        return once

    actions: dict[str, Callable[[], object]] = {
        "memcpy 64 MiB": copy(target),
        "memcpy 64 MiB to shared memory": copy(shared),
        "memcpy 64 MiB by the threads of a put": lambda: copier.copy([(target, flat)]),
        "memcpy 64 MiB to shared memory by the threads of a put": lambda: copier.copy([(shared, flat)]),
        "put 64 MiB": lambda: plane.put("big", source),
    }
    measures = {name: each_of(action, 1) for name, action in actions.items()}
    measures |= {f"{name}, CPU": each_of(action, 1, time.process_time) for name, action in actions.items()}
    measures["put 1 KiB"] = each_of(lambda: plane.put("small", source[:256]), 100)
    for _ in range(3):  # the files that names leave each other in turn are mapped once, and stay so
        plane.put("big", source)
    if ray is not None:

        def ray_put() -> float:
            began = time.perf_counter()
            ref = ray.put(flat)  # an array: a torch tensor Ray pickles
            took = time.perf_counter() - began
            del ref
            gc.collect()
            return took

        measures["ray.put 64 MiB"] = ray_put
    timed = Rounds(rounds)
    timed.run(measures)
    # Apart: nobody writes what is created here, and a put into memory that never was written takes its pages first.
    timed.run({"create 1 KiB": each_of(create(1024), 50), "create 64 MiB": each_of(create(64 * MIB), 20)})
    checks = {
        f"put 64 MiB <= 1.15x {peer}{how}": judge(timed.median(f"put 64 MiB{how}") / timed.median(f"{peer}{how}"), 1.15)
        for peer in actions
        if peer != "put 64 MiB"
        for how in ("", ", CPU")
    } | {
        "put 64 MiB takes no new page": judge(min(faults_of(lambda: plane.put("big", source)) for _ in range(3)), 16),
        "create <= 100 us": judge(timed.median("create 1 KiB") * 1e6, 100),
        "create 64 MiB within 20 % of 1 KiB": judge(timed.median("create 64 MiB") / timed.median("create 1 KiB"), 1.2),
    }
    if ray is not None:
        ratio = timed.median("ray.put 64 MiB") / timed.median("put 64 MiB")
        checks["put >= 2x faster than ray.put"] = judge(ratio, 2, least=True)
    return {"threads": threads_wanted(), "measures": timed.document(), "checks": checks}


_READER = """
import sys, rota.tensors
def private():
    with open('/proc/self/smaps_rollup') as file:
        return sum(int(line.split()[1]) for line in file if line.startswith('Private_')) * 1024
plane = rota.tensors.connect(home=sys.argv[1])
plane.get('small', as_='numpy').sum()
before = private()
view = plane.get('big', as_='numpy')
total = int(view.sum())
print(private() - before, total, flush=True)
sys.stdin.read(1)
"""


def bench_memory(home: Path, plane: Any) -> dict[str, Any]:
    """What eight readers of one tensor of 64 MiB take for themselves, all of them looking at every byte."""
    size, count = 64 * MIB, 8
    plane.put("big", np.ones(size, np.uint8))
    plane.put("small", np.ones(8, np.uint8))
    assert plane.get("big", as_="numpy").sum() == size  # mapped here: what one process alone maps counts as private
    command = [sys.executable, "-c", _READER, str(home)]
    readers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    said = [reader.stdout.readline().split() for reader in readers if reader.stdout is not None]
    for reader in readers:
        reader.communicate(b"x")
    assert [int(total) for _, total in said] == [size] * count
    taken = sum(max(int(extra), 0) for extra, _ in said)
    facts = plane._session.machine.info("memory")
    checks = {"8 readers <= 1 % of 8 copies": judge(100 * taken / (size * count), 1)}
    return {"measures": {"private_bytes": taken, "server_bytes": int(facts["used_memory_rss"])}, "checks": checks}


def bench_restore(plane: Any, rounds: int) -> dict[str, Any]:
    """State of 64 MiB back in the tensors of a restarted process: from the plane, and from a file (which the page cache
    still has)."""
    into = {str(index): torch.empty(2 * MIB) for index in range(8)}
    state = {str(index): torch.full((2 * MIB,), float(index)) for index in range(8)}
    path = Path(tempfile.mkdtemp(prefix="rb")) / "state.pt"

    def save() -> None:
        torch.save(state, path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def from_memory() -> None:
        plane.release("state")
        fill(plane.get_group("state"))

    def fill(found: dict[str, Any]) -> None:
        for name, tensor in found.items():
            into[name].copy_(tensor)

    plane.publish_group("state", state, step=1)
    timed = Rounds(rounds)
    measures: dict[str, Callable[[], float]] = {
        "publish to memory": each_of(lambda: plane.publish_group("state", state), 1),
        "save to disk, synced": each_of(save, 1),
        "restore from memory": each_of(from_memory, 1),
        "restore from disk": each_of(lambda: fill(torch.load(path)), 1),
    }
    timed.run(measures)
    shutil.rmtree(path.parent)
    fill(dict.fromkeys(into, torch.zeros(1)))
    from_memory()
    assert all(torch.equal(into[name], state[name]) for name in state)
    checks = {
        "restore from memory <= 1x from disk": judge(
            timed.median("restore from memory") / timed.median("restore from disk"), 1
        ),
        "publish <= 1x save": judge(timed.median("publish to memory") / timed.median("save to disk, synced"), 1),
    }
    return {"measures": timed.document(1e3, "ms"), "checks": checks}


@contextlib.contextmanager
def _registry(home: Path) -> Iterator[None]:
    """Ended with its files, also when a measurement fails."""
    try:
        yield
    finally:
        rota.tensors.down(home)
        shutil.rmtree(home, ignore_errors=True)


def bench_recover(rounds: int) -> dict[str, Any]:
    """The registry killed under 1,000 names and 200 leases: from the kill to its first answer (reads need none)."""
    timed = Rounds(rounds)
    home = Path(tempfile.mkdtemp(prefix="rb"))
    with _registry(home), rota.tensors.connect(home=home) as plane:
        for index in range(1000):
            plane.put(f"x/{index}", np.full(100, index))
        held = [plane.get(f"x/{index}", as_="numpy") for index in range(200)]
        for _ in range(rounds):
            os.kill(_server_pid(plane), signal.SIGKILL)
            began = time.perf_counter()
            assert len(plane.ls()) == 1000
            timed.samples["kill to first answer"].append(time.perf_counter() - began)
            assert plane.stats()["leases"] == 200
            assert plane.get("x/999", as_="numpy")[0] == 999
            plane.release("x/999")
        broken = plane.fsck()["violations"]
        assert broken == [], broken
        assert all(view[0] == index for index, view in enumerate(held))
        del held
    checks = {"recovery of 1,000 names <= 2 s": judge(timed.median("kill to first answer") * 1e3, 2000)}
    return {"measures": timed.document(1e3, "ms"), "checks": checks}


_HOLDER = """
import os, sys, rota.tensors
plane = rota.tensors.connect(home=sys.argv[1])
held = plane.get_many(prefix='held/', as_='numpy')
print(len(held), flush=True)
sys.stdin.read(1)
"""


def bench_reclaim(home: Path, plane: Any, rounds: int) -> dict[str, Any]:
    """A process with 1,000 leases of versions that were replaced is killed: until none of its bytes is in use."""
    timed = Rounds(rounds)
    for _ in range(rounds):
        for index in range(1000):
            plane.put(f"held/{index}", np.full(100, index))
        holder = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert holder.stdout is not None and int(holder.stdout.readline()) == 1000
        for index in range(1000):
            plane.delete(f"held/{index}")
        assert plane.stats()["versions"]["doomed"] == 1000
        began = time.perf_counter()
        holder.kill()
        while plane.stats()["versions"].get("doomed"):
            time.sleep(0.002)
        timed.samples["kill to reclaimed"].append(time.perf_counter() - began)
        holder.communicate()
        assert plane.fsck()["violations"] == []
    slowest = max(timed.samples["kill to reclaimed"]) * 1e3
    checks = {"1,000 leases of a killed process gone <= 1 s, the slowest": judge(slowest, 1000)}
    return {"measures": timed.document(1e3, "ms"), "checks": checks}


def bench_small(plane: Any, rounds: int) -> dict[str, Any]:
    """Small objects again and again, beside a Redis server that gets their bytes and answers each call."""
    small, block = np.zeros(4096, np.uint8), np.zeros(65536, np.uint8)
    call, small_bytes, block_bytes = plane._session.machine.client.call, small.tobytes(), block.tobytes()

    def pair() -> None:
        plane.put("pair", block)
        plane.delete("pair")

    def redis_pair() -> None:
        call("SET", "bench/pair", block_bytes)
        call("DEL", "bench/pair")

    actions: dict[str, Callable[[], object]] = {
        "put 4 KiB": lambda: plane.put("small", small),
        "Redis SET 4 KiB": lambda: call("SET", "bench/small", small_bytes),
        "put and delete 64 KiB": pair,
        "Redis SET and DEL 64 KiB": redis_pair,
    }
    for action in actions.values():
        for _ in range(100):
            action()
    measures = {name: each_of(action, LOOP_MIN) for name, action in actions.items()}
    measures |= {f"{name}, CPU": each_of(action, LOOP_MIN, time.process_time) for name, action in actions.items()}
    server = psutil.Process(_server_pid(plane))
    measures |= {
        f"{name}, CPU of the server": each_of(action, LOOP_MIN, lambda: sum(server.cpu_times()[:2]))
        for name, action in actions.items()
    }
    timed = Rounds(rounds)
    timed.run(measures)
    call("DEL", "bench/small", "bench/pair")
    checks = {
        "put 4 KiB <= 80 us": judge(timed.median("put 4 KiB") * 1e6, 80),
        "put 4 KiB <= Redis SET": judge(timed.median("put 4 KiB") / timed.median("Redis SET 4 KiB"), 1),
        "put and delete 64 KiB <= 40 us": judge(timed.median("put and delete 64 KiB") * 1e6, 40),
    }
    return {"measures": timed.document(), "checks": checks}


def _server_pid(plane: Any) -> int:
    return int(plane._session.machine.info("server")["process_id"])


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


BESIDE = (
    ("get", "get again", "ray.get again"),
    ("get", "get of a new version", "ray.get of a new object"),
    ("put", "put 64 MiB", "memcpy 64 MiB"),
    ("put", "put 64 MiB", "memcpy 64 MiB to shared memory"),
    ("put", "put 64 MiB", "ray.put 64 MiB"),
    ("small", "put 4 KiB", "Redis SET 4 KiB"),
    ("small", "put and delete 64 KiB", "Redis SET and DEL 64 KiB"),
    ("restore", "restore from memory", "restore from disk"),
    ("restore", "publish to memory", "save to disk, synced"),
)
"""Measures that have another one of the same run as their peer."""
LIMITED = (
    ("memory", "8 readers <= 1 % of 8 copies", "private memory of 8 readers", "%"),
    ("recover", "recovery of 1,000 names <= 2 s", "1,000 names after the registry was killed", "ms"),
    ("reclaim", "1,000 leases of a killed process gone <= 1 s, the slowest", "1,000 leases of a killed process", "ms"),
    ("start", "start <= 300 ms", "connect, which starts the registry", "ms"),
    ("start", "join <= 20 ms", "connect, which joins it", "ms"),
)
"""Checks that have a limit, by what they measure."""


def rows(result: dict[str, Any]) -> list[Row]:
    """What was measured, as rows of the table."""
    found: list[Row] = []
    for part, ours, peer in BESIDE:
        measured = result.get(part, {}).get("measures", {})
        if ours in measured and peer in measured:
            (unit, mine), (_, theirs) = (next(iter(measured[name].items())) for name in (ours, peer))
            found.append(Row(ours, mine, unit.removeprefix("median_"), theirs, peer))
    for part, check, text, unit in LIMITED:
        if part in result:
            judged = result[part]["checks"][check]
            found.append(Row(text, judged["value"], unit, judged["target"]))
    return found


def start_ray() -> tuple[Any, str]:
    import ray

    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    ray.init(
        address="local", num_cpus=1, include_dashboard=False, _temp_dir=folder, object_store_memory=1 << 30,
        log_to_driver=False, logging_level=logging.ERROR,
    )  # fmt: skip
    return ray, folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what", nargs="*", default=["all"], help="get put small memory restore recover reclaim start all"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-ray", action="store_true")
    asked = parser.parse_args()
    wanted = (
        {"get", "put", "small", "memory", "restore", "recover", "reclaim", "start"}
        if "all" in asked.what
        else set(asked.what)
    )
    home = Path(tempfile.mkdtemp(prefix="rb"))
    ray, folder = (None, "") if asked.no_ray or not wanted & {"get", "put"} else start_ray()
    machine = {"cpus": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 1), "kernel": platform.release()}
    result: dict[str, Any] = {"machine": machine, "python": platform.python_version(), "rounds": asked.rounds}
    try:
        with _registry(home), rota.tensors.connect(home=home) as plane:
            if "get" in wanted:
                result["get"] = bench_get(plane, ray, asked.rounds)
            if "put" in wanted:
                result["put"] = bench_put(plane, ray, asked.rounds)
            if "small" in wanted:
                result["small"] = bench_small(plane, asked.rounds)
            if "memory" in wanted:
                result["memory"] = bench_memory(home, plane)
            if "restore" in wanted:
                result["restore"] = bench_restore(plane, asked.rounds)
            if "reclaim" in wanted:
                result["reclaim"] = bench_reclaim(home, plane, min(asked.rounds, 5))
        if "recover" in wanted:
            result["recover"] = bench_recover(min(asked.rounds, 5))
        if "start" in wanted:
            result["start"] = bench_start(asked.rounds)
    finally:
        if ray is not None:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
    hand_in(rows(result))
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
