"""Preflight checks of a node for an instance: folders, disk, memory, devices; if full, arithmetic and a collective."""

from __future__ import annotations

import errno
import importlib
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from rota.job.core.progress import (
    Pair,
    Verdict,
    first_round,
    memory_faults,
    second_round,
    storage_reason,
    verdict,
)
from rota.runtime.clock import SystemClock
from rota.runtime.devices import local_family
from rota.runtime.node import accelerator
from rota.spec.reasons import Reason
from rota.tensors.core import Tensor

CHECK_MAX_S = 60.0
"""Limit of each part of the check: a folder, driver or device that does not answer is unfit too."""
DEVICES_EVERY_S = 10.0
"""A process with devices looks at them this often while it works."""
REMEDY = "drain the node, reset the device"
FREE_MIN_BYTES = 64 * 2**20
PROBE = b"rota" * 1024
ALLOCATION_BYTES = 16 * 2**20
MATRIX_N = 512
"""Side of the matrices of small whole numbers whose product is checked; a product of theirs is exact in float32."""
PAIR_MAX_S, PAIR_TIMES = 15.0, 3
"""A pair that takes longer has failed; the shortest of this number of sums counts, which excludes late starts."""
DEVICE_TIMES = 16
"""Factor by which the matrices of a device are larger: some 20 ms of an H100."""
COLLECTIVE_N = 2**18
"""Numbers in the collective that is checked (1 MiB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """What is wrong with the node: which check failed, for which reason, and what to do."""

    check: str
    reason: Reason
    text: str


class GroupWork(Protocol):
    """A send, a receive or a collective under way."""

    def wait(self, timeout: timedelta, /) -> object:
        """Return when it is done. Raises RuntimeError when it failed, or not within ``timeout``."""
        ...


class RankGroup(Protocol):
    """What the checks use of a ``torch.distributed.ProcessGroup``."""

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> GroupWork: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> GroupWork: ...
    def allreduce(self, tensors: list[Tensor], /) -> GroupWork: ...


class RankStore(Protocol):
    """What the checks use of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> object: ...


class NodeUnfit(Exception):
    """The node cannot host this instance; ``reason`` goes into the event of the loss."""

    def __init__(self, found: Sequence[Unfit]) -> None:
        super().__init__("this node is unfit: " + "; ".join(one.text for one in found))
        self.reason = found[0].reason


@dataclass(slots=True)
class DeviceWatch:
    """The devices of one process; memory errors that they counted before its first look are not held against them."""

    devices: Sequence[int]
    errors: dict[int, int] | None = None

    def look(self) -> list[Unfit]:
        """What is wrong with them now. Blocks for seconds where a driver is slow, not at all without devices.

        They are compared with those that the driver of this node lists; where it lists none, nothing can be compared.
        """
        if not self.devices:
            return []
        found, family = list[Unfit](), local_family()
        present = family.present()
        if present and (missing := sorted(set(self.devices) - present)):
            look = f"see {family.tool}, " if family.tool else ""
            text = f"device {missing[0]} is not there (the node has {len(present)}); {look}drain the node"
            found.append(Unfit(check="devices", reason=Reason.GPU_LOST, text=text))
        for fault in family.faults(self.devices):
            if fault.index in self.devices:
                text = f"device {fault.index} is faulty: {fault.text}; {REMEDY}"
                found.append(Unfit(check="devices", reason=fault.reason, text=text))
        errors = dict(family.memory_errors())
        self.errors = errors if self.errors is None else self.errors
        for index, count in memory_faults(self.errors, errors).items():
            if index in self.devices:
                text = f"device {index} had {count} uncorrectable memory errors since it was checked first; {REMEDY}"
                found.append(Unfit(check="devices", reason=Reason.GPU_ECC, text=text))
        return found


def quick(folders: Iterable[Path], *, free_min_bytes: int = FREE_MIN_BYTES) -> list[Unfit]:
    """What is wrong with folders and memory, nothing when they are fit. Milliseconds; may block on a bad disk."""
    found = [problem for folder in dict.fromkeys(folders) if (problem := _folder(folder, free_min_bytes))]
    try:
        bytearray(ALLOCATION_BYTES)
    except MemoryError:
        text = f"{ALLOCATION_BYTES >> 20} MiB of memory cannot be had"
        found.append(Unfit(check="memory", reason=Reason.OOM_KILLED, text=text))
    return found


def compute(devices: int) -> list[Unfit]:
    """Devices of this process that multiply wrongly; the processor where torch sees none of them. Imports torch."""
    torch: Any = importlib.import_module("torch")
    kind = accelerator()
    devices = 0 if kind == "cpu" else min(devices, torch.get_device_module(kind).device_count())
    row = torch.arange(MATRIX_N) % 7
    left, right = row.repeat(MATRIX_N, 1), (row.flip(0) - 3).repeat(MATRIX_N, 1).T.contiguous()
    wanted = int((row * (row.flip(0) - 3)).sum())
    for place in [f"{kind}:{index}" for index in range(devices)] or ["cpu"]:
        product = left.float().to(place) @ right.float().to(place)
        wrong = int((product != wanted).sum())
        if wrong:
            text = f"{place} computes {wrong} of {MATRIX_N**2} products wrong; take the node out of use and test it"
            return [Unfit(check="compute", reason=Reason.NODE_SUSPECT, text=text)]
    return []


def pairwise(
    group: RankGroup, store: RankStore, rank: int, world: int, device: str, *, limit_s: float = PAIR_MAX_S
) -> Verdict:
    """Who of a mesh is broken or slow, from products and sums of pairs; every member calls it, and all learn the same.

    Blocks for twice ``limit_s`` a round at most, and longer where one good member has to measure several others.
    """
    first = _round(group, store, rank, first_round(world), device, limit_s)
    return verdict(first, _round(group, store, rank, second_round(world, first), device, limit_s))


def _round(
    group: RankGroup, store: RankStore, rank: int, pairs: tuple[Pair, ...], device: str, limit_s: float
) -> dict[Pair, float | None]:
    """Seconds that each pair of a round took. Both members report; a pair failed if one says so, or none in time."""
    turns = max(Counter(n for pair in pairs for n in pair).values(), default=0)
    until_s = SystemClock().monotonic_s() + limit_s * (turns + 1)
    for pair in (one for one in pairs if rank in one):
        store.set(f"{pair}/{rank}", str(_pair(group, rank, pair, device, limit_s)))
    found: dict[Pair, float | None] = {}
    for pair in pairs:
        keys, left_s = [f"{pair}/{n}" for n in pair], until_s - SystemClock().monotonic_s()
        try:
            store.wait(keys, timedelta(seconds=max(0.001, left_s)))
            found[pair] = max(float(store.get(key)) for key in keys)
        except (RuntimeError, ValueError):  # no answer in time, or one without a number
            found[pair] = None
    return found


def _pair(group: RankGroup, rank: int, pair: Pair, device: str, limit_s: float) -> float | None:
    """Seconds in which both members of a pair multiply and add their numbers up; None when it fails or is wrong."""
    torch: Any = importlib.import_module("torch")
    other, clock, best_s = sum(pair) - rank, SystemClock(), math.inf
    numbers, n = torch.arange(COLLECTIVE_N, device=device) % 1000, MATRIX_N * (1 if device == "cpu" else DEVICE_TIMES)
    ones = torch.ones(n, n, device=device)
    mine = theirs = torch.zeros_like(numbers)
    for _ in range(PAIR_TIMES):
        began_s = clock.monotonic_s()
        try:
            for turn in pair:
                if turn == rank:
                    # Scaled by what was just multiplied, so that the time of it is part of the exchange.
                    mine = numbers * (rank + 1) * int((ones @ ones)[0, 0].item()) // n
                    group.send([mine], other, 0).wait(timedelta(seconds=limit_s))
                else:
                    group.recv([theirs], other, 0).wait(timedelta(seconds=limit_s))
        except RuntimeError:
            return None
        best_s = min(best_s, clock.monotonic_s() - began_s)
    # Judged at the end: the other one goes through all of it, whoever is wrong.
    return best_s if torch.equal(mine + theirs, numbers * (rank + other + 2)) else None


def findings_for(judged: Verdict, rank: int, *, exclude: bool) -> list[Unfit]:
    """What a verdict says of one member; that it is slow counts only where the contract leaves slow ones out."""
    if rank in judged.faulty:
        text = "a sum with a neighbour fails, and with a member whose own was right too; take the node out of use"
        return [Unfit(check="pairs", reason=Reason.NODE_SUSPECT, text=text)]
    if exclude and rank in judged.slow:
        return [Unfit(check="pairs", reason=Reason.NODE_SUSPECT, text=slow_text(judged.slow[rank]))]
    return []


def slow_text(factor: float) -> str:
    """What is said of a slow member."""
    return f"this node takes {factor:.1f} times as long as others for a product and a sum with them; look at its load"


def collective(group: RankGroup, rank: int, world: int, device: str) -> list[Unfit]:
    """What is wrong with a sum over all members of a mesh; every member calls it. Blocks for a minute at most."""
    torch: Any = importlib.import_module("torch")
    numbers = torch.arange(COLLECTIVE_N, device=device) % 1000
    wanted, mine = numbers * (world * (world + 1) // 2), numbers * (rank + 1)
    try:
        work = group.allreduce([mine])
        work.wait(timedelta(seconds=CHECK_MAX_S))
    except RuntimeError as error:
        text = f"a sum over the {world} members of the mesh is not done in {CHECK_MAX_S:g} s: {error}"
        return [Unfit(check="collective", reason=Reason.COLLECTIVE_TIMEOUT, text=text)]
    if torch.equal(mine, wanted):
        return []
    text = f"a sum over the {world} members of the mesh is wrong; a link or a device between them is broken"
    return [Unfit(check="collective", reason=Reason.COLLECTIVE_WRONG, text=text)]


def _folder(folder: Path, free_min_bytes: int) -> Unfit | None:
    """Write, sync, read back and remove a small file; look at the space that is left."""
    path = folder / f".rota-check-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(PROBE)
            file.flush()
            os.fsync(file.fileno())
        if path.read_bytes() != PROBE:
            raise OSError(errno.EIO, "what was written is not what is read")
        path.unlink()
        stat = os.statvfs(folder)
    except OSError as error:
        text = f"{folder} takes no writes: {error.strerror or error}; check the mount and its permissions"
        return Unfit(check="disk", reason=storage_reason(error) or Reason.OUTPUT_FULL, text=text)
    free = stat.f_bavail * stat.f_frsize
    if free < free_min_bytes:
        text = f"{folder} has {free >> 20} MiB left, {free_min_bytes >> 20} are needed; make room"
        return Unfit(check="disk", reason=Reason.OUTPUT_FULL, text=text)
    return None
