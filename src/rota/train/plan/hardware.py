"""Devices and links, each constant with its source, and the time of a collective over a link (alpha-beta model).

In the formulas ``K`` is the number of ranks, ``N`` the bytes of the whole tensor, ``B`` bytes a second of one device
in one direction, ``a`` the latency of one message in seconds. Source: Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from rota.spec import codec
from rota.spec.check import nearest
from rota.spec.errors import BadInput

Json = Mapping[str, Any]
"""An object of a file, whose values are not checked yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator.

    ``gemm_efficiency`` lists (floating-point operations of one matrix product, share of peak reached), interpolated on
    the logarithm of the operations; ``memory_efficiency`` is the share of ``memory_gb_s`` that element-wise kernels
    reach; ``launch_us`` the fixed cost of a kernel on the device; ``dispatch_us`` what the host spends on an operator,
    which bounds layers that are too small to keep the device busy.
    """

    memory_gib: float
    peak_tflops: dict[str, float]
    reserve_gib: float = 2.0
    memory_gb_s: float = 1000.0
    memory_efficiency: float = 0.8
    launch_us: float = 5.0
    dispatch_us: float = 0.0
    gemm_efficiency: tuple[tuple[float, float], ...] = ((1e9, 0.5),)

    def efficiency(self, flops: float) -> float:
        """Share of peak of a matrix product of ``flops`` operations."""
        points = self.gemm_efficiency
        if flops <= points[0][0]:
            return points[0][1]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if flops <= x1:
                share = (math.log(flops) - math.log(x0)) / (math.log(x1) - math.log(x0))
                return y0 + share * (y1 - y0)
        return points[-1][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSpec:
    """One level of the topology from the inside out: devices in it (None: the rest), bandwidth a device, latency."""

    name: str
    gb_s: float
    size: int | None = None
    latency_us: float = 0.0

    @property
    def link(self) -> Link:
        """The level as a link of the collective formulas."""
        return Link(gb_s=self.gb_s, latency_us=self.latency_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Share of communication that hides behind compute, by axis; ``gather`` is that of parameters that data ranks
    gather, as ``dp`` when left out."""

    dp: float = 0.8
    tp: float = 0.0
    pp: float = 0.0
    gather: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """Host memory behind each device, for offload."""

    memory_gib: float = 0.0
    gb_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeSpec:
    """Local disks behind each device, for offload."""

    gib: float = 0.0
    gb_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A kind of cluster as the planner sees it; ``provenance`` says where each constant comes from."""

    name: str
    device: DeviceSpec
    levels: tuple[LevelSpec, ...]
    provenance: str = ""
    overlap: Overlap = Overlap()
    host: HostSpec = HostSpec()
    nvme: NvmeSpec = NvmeSpec()

    def link_of(self, ranks: int, stride: int = 1) -> Link:
        """The link that ``ranks`` ranks, ``stride`` apart, see when they talk in a ring.

        Inside one unit of a level it is that of the level. A group that crosses units uses the outer links of all of
        its members in a unit side by side, as rings over several adapters do, and is not faster than inside a unit.
        """
        held, beside, inner = 1, 1, math.inf
        for level in self.levels:
            held = held * level.size if level.size else max(held, ranks * stride)
            gb_s = min(level.gb_s * beside, inner)
            if ranks * stride <= held or level is self.levels[-1]:
                return Link(gb_s=gb_s, latency_us=level.latency_us)
            beside = max(1, min(held // stride, ranks))
            inner = level.gb_s if beside > 1 else math.inf
        raise AssertionError("a hardware has at least one level")

    def with_memory(self, at_most_gib: float) -> Hardware:
        """The same with no more memory a device than this."""
        memory_gib = min(self.device.memory_gib, at_most_gib)
        return replace(self, device=replace(self.device, memory_gib=memory_gib))

    def link_over(self, first: int, last: int) -> Link:
        """The link of the innermost level with a unit that holds both ranks."""
        held = 1
        for level in self.levels:
            held = held * level.size if level.size else last + 1
            if first // held == last // held:
                return level.link
        return self.levels[-1].link


_NESTED: dict[str, type] = {"device": DeviceSpec, "overlap": Overlap, "host": HostSpec, "nvme": NvmeSpec}


def refuse_unknown(cls: type, raw: object, where: str) -> Json:
    """The fields of an object of a file. Raises BadInput when it is none, or has one that ``cls`` does not."""
    if not isinstance(raw, Mapping):
        raise BadInput(f"{where}: expected an object, got {type(raw).__name__}")
    pairs, known = dict(cast("Json", raw)), [field.name for field in fields(cls)]
    for key in pairs:
        if key not in known:
            raise BadInput(f"{where}.{key}: unknown field", hint=nearest(key, known))
    return pairs


def hardware_from_json(raw: Json) -> Hardware:
    """Read a hardware file. Raises BadInput that names the missing, unknown or malformed field."""
    refuse_unknown(Hardware, raw, "hardware")
    for key, cls in _NESTED.items():
        if key in raw:
            refuse_unknown(cls, raw[key], f"hardware.{key}")
    device = raw.get("device")
    if not isinstance(device, Mapping) or "memory_gib" not in device or "peak_tflops" not in device:
        raise BadInput("hardware.device: memory_gib and peak_tflops are required")
    if not raw.get("levels"):
        raise BadInput("hardware.levels: at least one level is required, the innermost first")
    try:
        return codec.from_json_value(Hardware, dict(raw))
    except (TypeError, ValueError) as error:
        raise BadInput(f"hardware: {error}") from error


A100_80G_DGX = Hardware(
    name="a100-80g-dgx",
    provenance=(
        "peak and memory bandwidth: vendor data sheet of the A100 80 GB SXM; NVLink 3: 300 GB/s a direction of which "
        "collectives reach about three quarters; one 200 Gb/s adapter a device; efficiency curve, launch and share of "
        "memory bandwidth: typical of large and small kernels on this device; dispatch: small models, as measured, "
        "take no less than 3.4 ms a layer for both passes with full recompute, however small the layer; host: 1 TB for "
        "eight devices, PCIe 4 x16 less a fifth"
    ),
    device=DeviceSpec(
        memory_gib=80,
        reserve_gib=2,
        memory_gb_s=2039,
        memory_efficiency=0.75,
        peak_tflops={"bf16": 312, "fp16": 312, "fp32": 19.5},
        launch_us=10,
        dispatch_us=28,
        gemm_efficiency=((1e9, 0.25), (1e10, 0.50), (1e11, 0.76)),
    ),
    levels=(
        LevelSpec(name="node", size=8, gb_s=230, latency_us=15),
        LevelSpec(name="cluster", gb_s=22, latency_us=14),
    ),
    overlap=Overlap(dp=0.0, tp=0.0, pp=0.0),
    host=HostSpec(memory_gib=125, gb_s=20),
)

H100_96G = replace(
    A100_80G_DGX,
    name="h100-96g",
    provenance=(
        "peak: vendor data sheet of the H100 SXM, dense; 96 GB of HBM2e at 2.4 TB/s; NVLink 4: 450 GB/s a direction; "
        "one 400 Gb/s adapter a device; shares of peak, links and memory that are reached: those of a100-80g-dgx"
    ),
    device=replace(
        A100_80G_DGX.device, memory_gib=96, memory_gb_s=2400, peak_tflops={"bf16": 989, "fp16": 989, "fp32": 67}
    ),
    levels=(
        LevelSpec(name="node", size=8, gb_s=345, latency_us=15),
        LevelSpec(name="cluster", gb_s=44, latency_us=14),
    ),
)

H200_141G = replace(
    H100_96G,
    name="h200-141g",
    provenance=(
        "measured on one H200 with torch 2.11 (driver 580.159): memory and the share of its bandwidth by a copy of "
        "1 GiB, shares of peak by bf16 products of 512 to 8192, launch by a graph, host by copies that are not pinned; "
        "peak and bandwidth: vendor data sheet, dense; links: those of h100-96g, dispatch: that of a100-80g-dgx"
    ),
    device=replace(
        H100_96G.device,
        memory_gib=139.8,
        memory_gb_s=4800,
        memory_efficiency=0.86,
        launch_us=1,
        gemm_efficiency=((2.7e8, 0.017), (2.1e9, 0.14), (1.7e10, 0.66), (1.4e11, 0.78), (1.1e12, 0.69)),
    ),
    host=HostSpec(memory_gib=125, gb_s=12),
)

CPU_GB_S, CPU_LATENCY_US = 1.1, 100.0
"""Gloo between two processes of one machine: an all-reduce of 16 MiB takes about 15 ms."""
CPU_TFLOPS, CPU_MEMORY_GB_S = 0.05, 5.0
"""Orders of magnitude of one core. Plans for one machine are only compared with each other."""
CPU_RESERVE = 1 / 8
"""Share of the memory of a CPU rank that is left to everything else."""


def cpu_ranks(memory_gib: float, ranks: int) -> Hardware:
    """``ranks`` processes on the cores of a machine that share its memory equally."""
    share_gib = memory_gib / ranks
    device = DeviceSpec(
        memory_gib=share_gib,
        reserve_gib=share_gib * CPU_RESERVE,
        memory_gb_s=CPU_MEMORY_GB_S,
        peak_tflops=dict.fromkeys(("bf16", "fp16", "fp32"), CPU_TFLOPS),
    )
    level = LevelSpec(name="node", size=ranks, gb_s=CPU_GB_S, latency_us=CPU_LATENCY_US)
    return Hardware(name="this-machine", provenance="orders of magnitude", device=device, levels=(level,))


CPU_LOCAL = replace(cpu_ranks(16, 2), name="cpu-local")
"""Two cores and 16 GiB, so that a plan for a small machine can be searched on any; a real one is measured."""

CPU_TYPE = "cpu"
"""The name under which an installation keeps the description of nodes without devices."""

DESCRIBED: dict[str, Hardware] = {"A100": A100_80G_DGX, "H100": H100_96G, "H200": H200_141G}
"""The description of each family of devices, by the word that names it in a type such as ``A100-SXM4-80GB``."""


def hardware_of_type(gpu_type: str, memory_bytes: int = 0) -> Hardware | None:
    """The description of devices of this type, None where there is none.

    A device that has less memory than the described one has what its type says (``40GB``), or ``memory_bytes``.
    """
    words = re.split(r"[^A-Z0-9]+", gpu_type.upper())
    found = next((DESCRIBED[word] for word in words if word in DESCRIBED), None)
    if found is None:
        return None
    said = [float(size.group(1)) for word in words if (size := re.fullmatch(r"(\d{2,3})(?:G|GB|GIB)?", word))]
    return found.with_memory(min(*said, memory_bytes / 2**30 or math.inf, math.inf))


SHIPPED: dict[str, Hardware] = {one.name: one for one in (A100_80G_DGX, H100_96G, H200_141G, CPU_LOCAL)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one device can send over a level: gigabytes (10^9) a second in one direction, latency in microseconds."""

    gb_s: float
    latency_us: float = 0.0

    @property
    def seconds_per_byte(self) -> float:
        """1 / B."""
        return 1.0 / (self.gb_s * 1e9)

    @property
    def latency_s(self) -> float:
        """a."""
        return self.latency_us * 1e-6


def all_reduce_s(ranks: int, size_bytes: float, link: Link) -> float:
    """The cheaper of ring, ``2 (K-1)/K N/B + 2 (K-1) a``, and tree, ``2 N/B + 2 log2(K) a``."""
    if ranks < 2:
        return 0.0
    moved = size_bytes * link.seconds_per_byte
    ring = 2 * (ranks - 1) / ranks * moved + 2 * (ranks - 1) * link.latency_s
    tree = 2 * moved + 2 * math.ceil(math.log2(ranks)) * link.latency_s
    return min(ring, tree)


def reduce_scatter_s(ranks: int, size_bytes: float, link: Link) -> float:
    """``(K-1)/K N/B + (K-1) a``; ``N`` is the full size."""
    if ranks < 2:
        return 0.0
    return (ranks - 1) / ranks * size_bytes * link.seconds_per_byte + (ranks - 1) * link.latency_s


def all_gather_s(ranks: int, size_bytes: float, link: Link) -> float:
    """The same as reduce-scatter; ``N`` is the gathered size."""
    return reduce_scatter_s(ranks, size_bytes, link)


def send_s(size_bytes: float, link: Link) -> float:
    """Point to point: ``N/B + a``."""
    return size_bytes * link.seconds_per_byte + link.latency_s
