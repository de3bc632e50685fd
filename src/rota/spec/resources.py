"""Devices, nodes, and the arithmetic of what fits where; sizes and durations with units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rota.spec.ids import NodeId

_SIZE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_BINARY = re.compile(r"^([KMGT])I?$")
"""``2G`` and ``2Gi`` are how others write 2GiB."""
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*$")
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_WORDS = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]+)")
_LONG_UNITS = {"sec": "s", "second": "s", "min": "m", "minute": "m", "hr": "h", "hour": "h", "day": "d"}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_size(text: str) -> int:
    """Bytes of a size with a unit, for example ``512MiB``. Raises ValueError that suggests one for a bare number."""
    match = _SIZE.match(text)
    if match is None or match.group(2).upper() not in _SIZE_UNITS:
        bare = text.strip()
        hint = f"; write {bare}MiB or {bare}GiB" if bare.replace(".", "", 1).isdigit() else "; for example 512MiB"
        if match is not None and (unit := _BINARY.match(match.group(2).upper())):
            hint = f"; write {match.group(1)}{unit.group(1)}iB"
        raise ValueError(f"{text!r} is not a size with a unit{hint}")
    return int(float(match.group(1)) * _SIZE_UNITS[match.group(2).upper()])


def parse_duration(text: str) -> float:
    """Seconds of a duration with units, for example ``90s`` or ``1h30m``. Raises ValueError for a bare number."""
    compact = text.replace(" ", "")
    parts = _DURATION_PART.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        hint = f"; write {compact}s or {compact}m" if compact.isdigit() else "; for example 90s, 5m, 8h, 2d"
        if short := _in_short_units(compact):
            hint = f"; write {short}"
        raise ValueError(f"{text!r} is not a duration with a unit{hint}")
    return sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)


def _in_short_units(compact: str) -> str:
    """``10min`` and ``1hour30minutes`` with the units that are read; empty for what is not a duration in words."""
    words = _DURATION_WORDS.findall(compact)
    units = [
        unit.lower() if unit.lower() in _DURATION_UNITS else _LONG_UNITS.get(unit.lower().rstrip("s"))
        for _, unit in words
    ]
    if not all(units) or "".join(number + unit for number, unit in words) != compact:
        return ""
    return "".join(f"{number}{unit}" for (number, _), unit in zip(words, units, strict=True))


def types_of(gpu_type: str | None) -> tuple[str, ...]:
    """The device types that ``A100|H100`` names, in that order and each once; nothing for any type."""
    return tuple(dict.fromkeys(name.strip() for name in gpu_type.split("|"))) if gpu_type else ()


def counted(count: float | str, noun: str, many: str = "") -> str:
    """``1 job``, ``2 jobs``, ``1..4 instances``: how many of a thing; ``many`` where its plural has more than an s."""
    text = f"{count:g}" if isinstance(count, float) else str(count)
    return f"{text} {noun if text == '1' else many or f'{noun}s'}"


def format_duration(seconds: float) -> str:
    """A duration with one or two units: ``0.3s``, ``12s``, ``5m10s``, ``3h05m``, ``2d04h``."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_size(size_bytes: int) -> str:
    """The largest binary unit that keeps at most three digits before the point: ``1.5GiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g}{unit}"
        value /= 1024
    return f"{value:.4g}TiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Res:
    """What one instance asks for.

    ``cpus`` are logical cores (fractions allowed), ``gpus`` whole devices or, for shared devices, a fraction below 1,
    ``gpu_type`` a device type label, several with ``|`` between them, or None for any, ``memory_bytes`` host memory.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    gpu_type: str | None = None
    memory_bytes: int = 0

    def __add__(self, other: Res) -> Res:
        return Res(
            cpus=self.cpus + other.cpus,
            gpus=self.gpus + other.gpus,
            gpu_type=self.gpu_type or other.gpu_type,
            memory_bytes=self.memory_bytes + other.memory_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one instance may use at most, beside ``Res.memory_bytes``; 0: no limit.

    ``processes`` counts those that it and its children start, itself included; ``files`` are open files and sockets of
    one process; ``disk_bytes`` is what the folder of its job, logs and output included, may hold on its machine.
    """

    processes: int = 0
    files: int = 0
    disk_bytes: int = 0


class Health(StrEnum):
    """Fitness of a device or node for new work."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    BAD = "bad"
    DRAINED = "drained"
    QUARANTINED = "quarantined"
    CORDONED = "cordoned"
    """Nothing new comes; unlike on a drained node, what is there stays."""


LOST_BY = "engine"
"""Who marks a node that a job reports as lost. Unlike one that a job left, it is fit once the engine has it again."""
FAILOVER = "failover"
"""Who marks a node that a job left, or on which it reports a broken device: suspect until an admin marks it healthy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator of a node: its index there, type label, memory, and cells it lies in (switch, socket)."""

    index: int
    type: str
    memory_bytes: int = 0
    uuid: str = ""
    health: Health = Health.HEALTHY


DEVICES_MAX = 160_000
"""Of the largest cluster; a node without devices counts as one."""
CORES_LABEL = "cores"
"""Node label: how many cores there are, where more than that may be asked because they are shared in time."""
SOCKETS_LABEL = "rota.sockets"
"""Node label: into how many equal sockets the devices of the node fall; 1 if absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine as the scheduler sees it.

    ``host`` is the label of the engine node that runs its processes: the node itself, or, on a pretend cluster, the
    one real machine for all of them. ``cells`` are the enclosing cells from the outside in, for example
    ``("rack-0",)``; equal paths mean the same cell.
    """

    id: NodeId
    host: str
    cpus: float
    memory_bytes: int
    devices: tuple[Device, ...] = ()
    cells: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = field(default=())
    health: Health = Health.HEALTHY

    @property
    def capacity(self) -> Res:
        """Everything the node has when it is empty."""
        return Res(cpus=self.cpus, gpus=float(len(self.devices)), memory_bytes=self.memory_bytes)

    def with_health(self, health: Health) -> Node:
        """The same node with another fitness."""
        return replace(self, health=health)

    def with_lost(self, devices: Mapping[int, Device]) -> Node:
        """The same node with those of these devices, by index, that it lacks, as bad ones."""
        there = {device.index for device in self.devices}
        lost = [replace(device, health=Health.BAD) for index, device in sorted(devices.items()) if index not in there]
        return replace(self, devices=(*self.devices, *lost)) if lost else self


def pretend_nodes(shape: str, *, host: str) -> tuple[Node, ...]:
    """Nodes of a pretend cluster from ``RACKSxNODESxDEVICES``, for example ``3x4x8``: 3 racks of 4 nodes of 8 devices.

    Raises ValueError for any other form or for more than ``DEVICES_MAX`` devices.
    """
    try:
        racks, nodes, devices = (int(part) for part in shape.lower().split("x"))
    except ValueError:
        raise ValueError(f"{shape!r} is not RACKSxNODESxDEVICES, for example 3x4x8") from None
    if min(racks, nodes) < 1 or devices < 0 or racks * nodes * max(devices, 1) > DEVICES_MAX:
        raise ValueError(f"{shape!r}: racks and nodes must be at least 1, with at most {DEVICES_MAX} devices in all")
    return tuple(
        Node(
            id=NodeId(f"r{rack}n{node}"),
            host=host,
            cpus=16.0,
            memory_bytes=64 * 2**30,
            devices=tuple(
                Device(index=i, type="PRETEND", memory_bytes=80 * 2**30, uuid=f"r{rack}n{node}-{i}")
                for i in range(devices)
            ),
            cells=(f"rack-{rack}",),
        )
        for rack in range(racks)
        for node in range(nodes)
    )
