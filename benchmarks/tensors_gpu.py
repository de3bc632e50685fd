"""What sharing tensors on a device costs, beside a plain copy on that device and torch.multiprocessing, in one run.

``python benchmarks/tensors_gpu.py [--device cuda:0] [--mib 1024] [--publishes 1000] [--kills 8]`` prints one JSON
document. ``first get`` is a reader's of a version that it has not seen; torch's is the rebuilding of a tensor that came
through a pipe; both also of tensors of ``SIZES``, beside a copy on the device. ``load`` is a reader's copy of the group
into weights of its own. ``--kills`` readers are killed while they hold the group. With ``--device fakecuda:0 --mib 32``
the same calls run on CPU, which proves the program, not a speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

import rota.tensors
from run import Row, hand_in, skip

MIB = 1 << 20
TENSORS = 64
FIRST_ROUNDS = 50
SIZES = (4 << 10, 64 << 20, 1 << 30)
"""Bytes of single tensors; those above ``--mib`` are left out."""
LIMIT_S = 120.0


def median_s(action: Callable[[], object], rounds: int) -> float:
    times: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def done(device: str) -> None:
    """Wait for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def used_bytes(plane: Any) -> int:
    """Device memory that versions have, once views and leases have ended."""
    gc.collect()
    plane.gc()
    devices = plane._space.devices
    deadline = time.monotonic() + 10
    while devices.ask(devices.uuid, {"op": "blocks"})["blocks"] and time.monotonic() < deadline:
        time.sleep(0.02)
    facts = devices.ask(devices.uuid, {"op": "stat"})
    return facts["bytes"] - facts["free_bytes"]


def reader(home: str, device: str, pipe: Connection) -> None:
    """A process that takes what it is asked for, keeps the last of it, and answers with the seconds."""
    kept: Any = None
    own: dict[str, torch.Tensor] = {}
    with rota.tensors.connect(home=home, device=device) as plane:

        def load(name: str) -> object:
            group = plane.get_group(name)
            for key, tensor in group.items():
                own.setdefault(key, torch.empty_like(tensor)).copy_(tensor)
            done(device)
            return group

        takes: dict[str, Callable[[Any], object]] = {
            "get": plane.get, "group": plane.get_group, "torch": pickle.loads, "load": load,
        }  # fmt: skip
        pipe.send(0.0)
        while (asked := pipe.recv()) is not None:
            how, what = asked
            began = time.perf_counter()
            kept = takes[how](what)
            pipe.send(time.perf_counter() - began)
        del kept


class Reader:
    """The other end of ``reader``."""

    def __init__(self, home: Path, device: str) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=reader, args=(str(home), device, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> float:
        """The next answer. Raises RuntimeError when there is none within the limit."""
        if not self.pipe.poll(LIMIT_S):
            raise RuntimeError(f"a reader has not answered within {LIMIT_S:g} s")
        return self.pipe.recv()

    def ask(self, how: str, what: Any) -> float:
        """Seconds that it took there."""
        self.pipe.send((how, what))
        return self.answer()


def first_gets(plane: Any, home: Path, device: str, source: torch.Tensor) -> dict[str, float]:
    """Seconds of a reader for a version it has not seen and for a tensor of torch's, in turn; the very first; those of
    a put, of making and handing on torch's, and of a plain copy of as much."""
    one = Reader(home, device)
    one.answer()
    plane.put("new", source)
    target = torch.empty_like(source)
    found: dict[str, list[float]] = {"get": [], "torch": [], "put": [], "clone": [], "copy": []}
    opened = one.ask("get", "new")
    for _ in range(FIRST_ROUNDS):
        found["copy"].append(median_s(lambda: (target.copy_(source), done(device)), 1))
        found["put"].append(median_s(lambda: plane.put("new", source), 1))
        found["get"].append(one.ask("get", "new"))
        began = time.perf_counter()
        shared = source.clone()
        done(device)
        text = bytes(ForkingPickler.dumps(shared))
        found["clone"].append(time.perf_counter() - began)
        found["torch"].append(one.ask("torch", text))
    one.pipe.send(None)
    one.process.join(LIMIT_S)
    plane.delete("new")
    return {"opened": opened, **{name: statistics.median(values) for name, values in found.items()}}


def of_sizes(plane: Any, home: Path, device: str, where: str, mib: int) -> dict[str, dict[str, float]]:
    """``first_gets`` of tensors of ``SIZES``, in microseconds."""
    found: dict[str, dict[str, float]] = {}
    for size in (size for size in SIZES if size <= mib * MIB):
        source = torch.rand(size // 4, device=where)
        found[str(size)] = {
            f"{name}_us": round(value * 1e6, 1) for name, value in first_gets(plane, home, device, source).items()
        }
    return found


def loads(plane: Any, home: Path, device: str) -> float:
    """Median seconds of a reader that copies the group into weights of its own."""
    one = Reader(home, device)
    one.answer()
    one.ask("load", "group")
    taken = [one.ask("load", "group") for _ in range(9)]
    one.pipe.send(None)
    one.process.join(LIMIT_S)
    return statistics.median(taken)


def kill_readers(home: Path, device: str, kills: int) -> None:
    """kill -9 of readers that hold the group, as many at once as there are cores."""
    while kills > 0:
        some = [Reader(home, device) for _ in range(min(kills, os.cpu_count() or 1))]
        for one in some:
            one.answer()
            one.ask("group", "group")
        for one in some:
            one.process.kill()
            one.process.join(LIMIT_S)
        kills -= len(some)


def bench(plane: Any, home: Path, asked: argparse.Namespace) -> dict[str, Any]:
    device, mib, publishes, rounds = asked.device, asked.mib, asked.publishes, asked.rounds
    real = device.startswith("cuda")
    where = device if real else "cpu"

    each = mib * MIB // TENSORS // 4
    source = {str(index): torch.full((each,), float(index), device=where) for index in range(TENSORS)}
    target = {name: torch.empty_like(tensor) for name, tensor in source.items()}
    plane.put("small", torch.ones(256, device=where))

    def copy() -> None:
        for name, tensor in source.items():
            target[name].copy_(tensor)
        done(device)

    def publish() -> None:
        plane.publish_group("group", source)
        done(device)

    def cold() -> None:
        plane.release("small")
        plane.get("small")

    for action in (copy, publish, publish, publish, cold):
        action()
    plain, shared = [], []
    for _ in range(rounds):  # interleaved: what else runs meets both
        plain.append(median_s(copy, 1))
        shared.append(median_s(publish, 1))
    held = plane.get("small")
    again = median_s(lambda: [plane.get("small") for _ in range(10_000)], 5) / 10_000
    cold_s = median_s(cold, 200)
    for index in range(publishes):
        plane.put("w", source[str(index % TENSORS)][: 1 + index])
    sound = bool((plane.get("w") == (publishes - 1) % TENSORS).all())
    del held
    first = first_gets(plane, home, device, source["1"])
    load_s = loads(plane, home, device)
    sizes = of_sizes(plane, home, device, where, mib)
    kill_readers(home, device, asked.kills)
    for name in ("w", "group", "small"):
        plane.delete(name)
    left = used_bytes(plane)
    ratio = statistics.median(shared) / statistics.median(plain)
    return {
        "device": torch.cuda.get_device_name() if real else device, "torch": torch.__version__, "mib": mib,
        "copy_ms": round(statistics.median(plain) * 1e3, 3),
        "publish_group_ms": round(statistics.median(shared) * 1e3, 3), "get_again_us": round(again * 1e6, 3),
        "get_cold_us": round(cold_s * 1e6, 1), "first_get_us": round(first["get"] * 1e6, 1),
        "first_get_of_torch_us": round(first["torch"] * 1e6, 1), "opened_us": round(first["opened"] * 1e6, 1),
        "load_ms": round(load_s * 1e3, 3), "sizes": sizes, "kills": asked.kills,
        "checks": {
            "group <= 1.2x device copy": {"value": round(ratio, 3), "met": ratio <= 1.2},
            "get again <= 1 us": {"value": round(again * 1e6, 3), "met": again <= 1e-6},
            "get cold <= 300 us": {"value": round(cold_s * 1e6, 1), "met": cold_s <= 3e-4},
            f"{publishes} publishes and {asked.kills} killed readers leave 0 bytes": {"value": left, "met": left == 0},
            "the last publish is read whole": {"value": sound, "met": sound},
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--publishes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kills", type=int, default=8)
    asked = parser.parse_args()
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        skip("CUDA device not found")
        how = "--device fakecuda:0 --mib 32 runs the same on CPU"
        print(json.dumps({"device": asked.device, "skipped": f"CUDA device not found; {how}"}))
        return 0
    os.environ.setdefault("ROTA_FAKECUDA_BYTES", str(6 * asked.mib * MIB))
    home = Path(tempfile.mkdtemp(prefix="rb"))
    try:
        with rota.tensors.connect(home=home, device=asked.device) as plane:
            result = bench(plane, home, asked)
    finally:
        rota.tensors.down(home)
        shutil.rmtree(home, ignore_errors=True)
    copied = result["copy_ms"]
    hand_in(
        [
            Row(f"publish a group of {asked.mib} MiB", result["publish_group_ms"], "ms", copied, "device copy"),
            Row("first get of a version", result["first_get_us"], "us", result["first_get_of_torch_us"], "torch"),
            Row("get again", result["get_again_us"], "us", 1.0),
            Row("get cold", result["get_cold_us"], "us", 300.0),
        ]
    )
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
