"""Measurements of machines: current usage, and network checks of each pair; REST returns them unchanged."""

from __future__ import annotations

from typing_extensions import TypedDict


class NetworkUsage(TypedDict):
    """An interface that is up; ``bits_per_s`` is what its card can do, 0 where it does not say."""

    name: str
    address: str
    bits_per_s: int
    received_bytes_per_s: float
    sent_bytes_per_s: float


class DiskUsage(TypedDict):
    """A file system, by the folder it is mounted on."""

    path: str
    total_bytes: int
    used_bytes: int


class DeviceUsage(TypedDict):
    """An NVIDIA device, as its driver measures it; None where it does not."""

    index: int
    name: str
    busy: float | None
    memory_used_bytes: int | None
    memory_bytes: int | None
    power_w: float | None
    temperature_c: float | None


class ProcessUsage(TypedDict):
    """A process of a job: ``member`` is ``role/rank`` or ``master``; ``cores`` are those it kept busy."""

    job: str
    member: str
    pid: int
    cores: float
    memory_bytes: int


class MachineUsage(TypedDict):
    """What a machine does, measured over ``period_s``; ``cores_busy`` of ``cores``."""

    period_s: float
    cores: int
    cores_busy: float
    load: float
    memory_bytes: int
    memory_used_bytes: int
    shared_bytes: int
    shared_used_bytes: int
    network: list[NetworkUsage]
    disks: list[DiskUsage]
    devices: list[DeviceUsage]
    processes: list[ProcessUsage]


class MachineFacts(TypedDict):
    """A machine of the check: its address, and versions by package, empty for one that is not installed."""

    node: str
    host_name: str
    address: str
    versions: dict[str, str]
    error: str


class PairFacts(TypedDict):
    """What one machine sees of another; None for what could not be measured, ``error`` says why."""

    source: str
    target: str
    resolves: bool
    latency_s: float | None
    skew_s: float | None
    bytes_per_s: float | None
    error: str


class CheckFacts(TypedDict):
    """All that was measured."""

    machines: list[MachineFacts]
    pairs: list[PairFacts]
