"""Usage of a machine now: processors, memory, network, disks, devices, and the processes of jobs, measured there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping

import psutil

from rota.runtime import process
from rota.runtime.clock import blocking_sleep
from rota.runtime.devices import nvidia_rows
from rota.runtime.node import cores_allowed
from rota.spec.measured import DeviceUsage, DiskUsage, MachineUsage, NetworkUsage, ProcessUsage

PERIOD_S = 0.5
"""Time over which rates are measured."""
PROCESSES_MAX = 200
_TITLE = re.compile(r"^ray::([a-z0-9][a-z0-9-]*)/(master|[^/\s]+/\d+)(?=[/:\s]|$)")
_DEVICE_FIELDS = ("index", "name", "utilization.gpu", "memory.used", "memory.total", "power.draw", "temperature.gpu")
_MIB = 2**20


def machine_usage(period_s: float = PERIOD_S) -> MachineUsage:
    """Usage of this machine; blocks for ``period_s``."""
    members = _members()
    for one, _, _ in members:
        _busy(one)
    psutil.cpu_percent()
    before = _counters()
    blocking_sleep(period_s)
    busy = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
    memory, shared = psutil.virtual_memory(), shutil.disk_usage("/dev/shm")
    return {
        "period_s": period_s,
        "cores": cores_allowed(),
        "cores_busy": round(busy, 2),
        "load": round(psutil.getloadavg()[0], 2),
        "memory_bytes": memory.total,
        "memory_used_bytes": memory.total - memory.available,
        "shared_bytes": shared.total,
        "shared_used_bytes": shared.used,
        "network": _network(before, period_s),
        "disks": _disks(),
        "devices": device_usage(),
        "processes": [row for one, job, member in members if (row := _process(one, job, member)) is not None],
    }


def member_of(title: str) -> tuple[str, str] | None:
    """Job and member of the title of a process, as the engine writes it; None for others."""
    found = _TITLE.match(title)
    return None if found is None else (found[1], found[2])


def _members() -> list[tuple[psutil.Process, str, str]]:
    found: list[tuple[psutil.Process, str, str]] = []
    for one in psutil.process_iter():
        member = member_of(process.command_line(one.pid))
        if member is not None and len(found) < PROCESSES_MAX:
            found.append((one, *member))
    return sorted(found, key=lambda row: row[1:])


def _busy(one: psutil.Process) -> float:
    """Cores that a process kept busy since the last call; 0 for one that is gone."""
    try:
        return round(one.cpu_percent() / 100, 2)
    except psutil.Error:
        return 0.0


def _process(one: psutil.Process, job: str, member: str) -> ProcessUsage | None:
    try:
        memory = one.memory_info().rss
    except psutil.Error:
        return None
    return {"job": job, "member": member, "pid": one.pid, "cores": _busy(one), "memory_bytes": memory}


def _counters() -> dict[str, tuple[int, int]]:
    """Bytes that each interface received and sent."""
    return {name: (one.bytes_recv, one.bytes_sent) for name, one in psutil.net_io_counters(pernic=True).items()}


def _network(before: Mapping[str, tuple[int, int]], period_s: float) -> list[NetworkUsage]:
    after, cards, addresses = _counters(), psutil.net_if_stats(), psutil.net_if_addrs()
    found: list[NetworkUsage] = []
    for name, card in sorted(cards.items()):
        if name not in before or name not in after or not card.isup:
            continue
        known = [one.address for one in addresses.get(name, ()) if one.family.name in ("AF_INET", "AF_INET6")]
        received, sent = (now - then for now, then in zip(after[name], before[name], strict=True))
        found.append(
            {
                "name": name,
                "address": known[0].partition("%")[0] if known else "",
                "bits_per_s": card.speed * 10**6,
                "received_bytes_per_s": round(received / period_s, 1),
                "sent_bytes_per_s": round(sent / period_s, 1),
            }
        )
    return found


def _disks() -> list[DiskUsage]:
    """Each device once, with the shortest of its paths; the root always."""
    by_device: dict[str, str] = {}
    for one in sorted(psutil.disk_partitions(), key=lambda part: len(part.mountpoint)):
        by_device.setdefault(one.device, one.mountpoint)
    found: list[DiskUsage] = []
    for path in sorted({"/", *by_device.values()}):
        try:
            usage = shutil.disk_usage(path)
        except OSError:
            continue
        found.append({"path": path, "total_bytes": usage.total, "used_bytes": usage.used})
    return found


def device_usage() -> list[DeviceUsage]:
    """Usage of each NVIDIA device; none without a driver. Blocks up to 10 s."""
    found: list[DeviceUsage] = []
    for cells in nvidia_rows(*_DEVICE_FIELDS):
        if not cells[0].isdigit():
            continue
        busy, used, total, power, temperature = map(_number, cells[2:])
        found.append(
            {
                "index": int(cells[0]),
                "name": cells[1],
                "busy": None if busy is None else busy / 100,
                "memory_used_bytes": None if used is None else int(used) * _MIB,
                "memory_bytes": None if total is None else int(total) * _MIB,
                "power_w": power,
                "temperature_c": temperature,
            }
        )
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # the driver writes [N/A] for what a device does not measure
        return None
