"""This machine as a node: its devices, cores, addresses, and the backend of its process groups."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import ipaddress
import math
import os
import platform
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from rota.runtime import process
from rota.runtime.devices import DeviceFault, local_devices, local_family
from rota.spec.ids import NodeId
from rota.spec.resources import CORES_LABEL, SOCKETS_LABEL, Health, Node

LOCAL_HOST = "local"
CPUS_MIN = 16.0
"""Cores are time-shared on one machine, so that a job of a handful of roles fits a laptop."""
FAULTS_LABEL = "rota.unfit-devices"
NODE_ADDRESS = "ROTA_NODE_ADDRESS"
"""Variable with the address at which processes on other machines reach those of this one."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Where Gloo, NCCL and TensorPipe look for the network interface to use; else each guesses."""


def local_node(host: str = LOCAL_HOST) -> Node:
    """This machine, with devices that are unfit as bad ones; ``host`` is its label in the engine."""
    family, found = local_family(), local_devices()
    faults = family.faults([device.index for device in found])
    unfit = {one.index for one in faults}
    cores = float(cores_allowed())
    shared = ((CORES_LABEL, f"{cores:g}"),) if cores < CPUS_MIN else ()
    return Node(
        id=NodeId(host),
        host=host,
        cpus=max(CPUS_MIN, cores),
        memory_bytes=psutil.virtual_memory().total,
        devices=tuple(replace(one, health=Health.BAD) if one.index in unfit else one for one in found),
        labels=(("arch", platform.machine()), *shared, *_of_devices(family.sockets(), faults)),
    )


def _of_devices(parts: int, faults: Sequence[DeviceFault]) -> tuple[tuple[str, str], ...]:
    """Labels of a node: how its devices lie, and why some of them are not given out."""
    sockets = ((SOCKETS_LABEL, str(parts)),) if parts > 1 else ()
    text = "; ".join(f"device {one.index}: {one.text}" for one in faults)
    return (*sockets, *(((FAULTS_LABEL, text),) if text else ()))


def accelerator() -> str:
    """torch's name of the devices of this machine's family, ``cpu`` where torch sees none of them. Imports torch.

    Devices of a pretend cluster are not seen by torch, so their processes meet over Gloo.
    """
    kind = local_family().backend.partition(":")[0]
    module = getattr(importlib.import_module("torch"), kind, None) if kind else None
    return kind if module is not None and module.is_available() and module.device_count() > 0 else "cpu"


def group_backend() -> str:
    """Backend of a process group for this process: Gloo, and that of its devices beside it where torch has it."""
    backend = local_family().backend
    there = importlib.import_module("torch.distributed").is_backend_available
    return f"cpu:gloo,{backend}" if accelerator() != "cpu" and there(backend.partition(":")[2]) else "gloo"


def cores_allowed(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process can keep busy: those of its affinity mask, or fewer under a quota of CPU time.

    That is the least one of its control groups and those above them: ``cpu.max`` (v2) or ``cpu.cfs_quota_us`` (v1).
    """
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError):
        for line in groups.read_text(encoding="utf-8").splitlines():
            _, kinds, path = line.split(":", 2)
            base = root / "cpu" if kinds else root
            own = base / path.lstrip("/")
            if not kinds or "cpu" in kinds.split(","):
                cores = min([cores, *(_quota(one) for one in (own, *own.parents) if one.is_relative_to(base))])
    return max(1, math.ceil(cores))


def _quota(group: Path) -> float:
    """Cores that a control group may use; infinite without a limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((group / name).read_text(encoding="utf-8") for name in names).split()
            if int(quota) > 0:
                return int(quota) / int(period)
    return math.inf


def own_names() -> frozenset[str]:
    """Host name and addresses of this machine, in lower case."""
    addresses = {one.address.partition("%")[0] for found in psutil.net_if_addrs().values() for one in found}
    name = socket.gethostname()
    return frozenset(one.lower() for one in (*addresses, name, name.partition(".")[0]))


def host_name() -> str:
    """Short name of this machine, as a label in Ray's table may be."""
    name = socket.gethostname().partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)[:63].strip("-_") or "machine"


def machine_identity() -> str:
    """Twelve digits of this boot and network namespace: two raylets with one host name run on one machine, or not."""
    try:
        network = str(Path("/proc/self/ns/net").readlink())
    except OSError:
        network = ""
    return hashlib.sha256(f"{process.boot_id()} {network}".encode()).hexdigest()[:12]


def address_towards(host: str, port: int) -> str:
    """The address from which this machine sends to another one. Raises OSError without a route or such a name."""
    family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def network_environment(address: str) -> dict[str, str]:
    """Variables of a process on a machine that others reach at ``address``, an IPv4 or IPv6 address.

    A machine whose engine is reached at the loopback address alone works by itself: its libraries choose as ever.
    """
    if ipaddress.ip_address(address).is_loopback:
        return {NODE_ADDRESS: address}
    found = [name for name, given in psutil.net_if_addrs().items() if any(one.address == address for one in given)]
    return {NODE_ADDRESS: address, **{variable: found[0] for variable in INTERFACE_VARIABLES if found}}
