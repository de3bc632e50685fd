"""Inventory of this machine as the scheduler sees it: cores, memory, devices."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from rota.spec.ids import NodeId
from rota.spec.resources import Device, Node

LOCAL_HOST = "local"
CPUS_MIN = 16.0
"""Cores are time-shared on one machine, so that a job of a handful of roles fits a laptop."""
_NVIDIA = Path("/proc/driver/nvidia/gpus")


def local_node(host: str = LOCAL_HOST) -> Node:
    """This machine; ``host`` is its label in the engine."""
    return Node(
        id=NodeId(host),
        host=host,
        cpus=max(CPUS_MIN, float(os.cpu_count() or 1)),
        memory_bytes=psutil.virtual_memory().total,
        devices=nvidia_devices(),
        labels=(("arch", platform.machine()),),
    )


def nvidia_devices(root: Path = _NVIDIA) -> tuple[Device, ...]:
    """Devices that the NVIDIA driver lists, in the order of their bus addresses (the order of CUDA with
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``). Without a driver there are none. Memory is not told here and stays 0.
    """
    if not root.is_dir():
        return ()
    found: list[Device] = []
    for index, folder in enumerate(sorted(root.iterdir())):
        fields = _fields(folder / "information")
        model = fields.get("Model", "GPU").removeprefix("NVIDIA ").split(" ")[0] or "GPU"
        found.append(Device(index=index, type=model, uuid=fields.get("GPU UUID", "")))
    return tuple(found)


def _fields(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, sep, value in pairs if sep}
