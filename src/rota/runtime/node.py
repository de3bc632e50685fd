"""This machine as a node: its devices and their health, cores, addresses; fake devices from the environment."""

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
from collections.abc import Mapping
from pathlib import Path

import psutil

from rota.runtime import process
from rota.runtime.topology import SOCKETS_LABEL, numa_nodes, nvlink_islands, sockets_of
from rota.spec.ids import NodeId
from rota.spec.resources import CORES_LABEL, Device, Node, parse_size

LOCAL_HOST = "local"
CPUS_MIN = 16.0
"""Cores are time-shared on one machine, so that a job of a handful of roles fits a laptop."""
FAKE_VARIABLE = "ROTA_FAKE_DEVICES"
GPUS_MAX_VARIABLE = "ROTA_GPUS_MAX"
"""Variable with the number of devices of this machine that may be used, as ``rota join --gpus`` gave it."""
_FAKE = re.compile(r"^(\d+)x([A-Za-z0-9_.-]+)(?::(\S+))?$")
NODE_ADDRESS = "ROTA_NODE_ADDRESS"
"""Variable with the address at which processes on other machines reach those of this one."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Where Gloo, NCCL and TensorPipe look for the network interface to use; else each guesses."""
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_QUERY_S = 10.0
_MIB = 1 << 20


def local_node(host: str = LOCAL_HOST) -> Node:
    """This machine; ``host`` is its label in the engine."""
    cores = float(cores_allowed())
    shared = ((CORES_LABEL, f"{cores:g}"),) if cores < CPUS_MIN else ()
    return Node(
        id=NodeId(host),
        host=host,
        cpus=max(CPUS_MIN, cores),
        memory_bytes=psutil.virtual_memory().total,
        devices=local_devices(),
        labels=(("arch", platform.machine()), *shared, *_sockets()),
    )


def _sockets() -> tuple[tuple[str, str], ...]:
    """Into how many sockets, or groups that NVLink connects, the devices fall; a group lies within a socket."""
    buses = () if FAKE_VARIABLE in os.environ else bus_addresses()
    links = process.output_of(("nvidia-smi", "topo", "-m"), timeout_s=_QUERY_S) if len(buses) > 1 else ""
    parts = max(sockets_of(numa_nodes(buses)), sockets_of(nvlink_islands(links or "")))
    return ((SOCKETS_LABEL, str(parts)),) if parts > 1 else ()


def group_backend() -> str:
    """Backend of a process group for this process: Gloo, and NCCL beside it where torch sees CUDA devices.

    Devices of a pretend cluster are not seen by torch, so their processes meet over Gloo. Imports torch.
    """
    cuda = importlib.import_module("torch.cuda")
    with_nccl = importlib.import_module("torch.distributed").is_nccl_available()
    return "cpu:gloo,cuda:nccl" if with_nccl and cuda.is_available() and cuda.device_count() > 0 else "gloo"


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


def local_devices(environment: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """Devices of this machine in the order of their bus addresses; those of ``ROTA_FAKE_DEVICES`` if it is set.

    The first ``ROTA_GPUS_MAX`` of them if that is set. Raises ValueError when the former variable has another form than
    ``COUNTxTYPE[:MEMORY]``, for example ``4xH100:80GiB``.
    """
    fake, most = environment.get(FAKE_VARIABLE), environment.get(GPUS_MAX_VARIABLE)
    found = nvidia_devices() if fake is None else fake_devices(fake)
    return found[: int(most)] if most else found


def fake_devices(text: str) -> tuple[Device, ...]:
    """Devices that exist for the scheduler alone, from ``COUNTxTYPE[:MEMORY]``. Raises ValueError for other forms."""
    match = _FAKE.match(text)
    if match is None:
        raise ValueError(f"{FAKE_VARIABLE}={text!r} is not COUNTxTYPE[:MEMORY], for example 4xH100:80GiB")
    memory_bytes = parse_size(match.group(3)) if match.group(3) else 0
    return tuple(
        Device(index=index, type=match.group(2), memory_bytes=memory_bytes, uuid=f"fake-{index}")
        for index in range(int(match.group(1)))
    )


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


def nvidia_devices(root: Path = _NVIDIA) -> tuple[Device, ...]:
    """Devices that the NVIDIA driver lists, in the order of their bus addresses (the order of CUDA with
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``). Without a driver there are none. Memory is asked of ``nvidia-smi``, 0 without it.
    """
    if not root.is_dir():
        return ()
    memory = {uuid: int(float(mib)) * _MIB for uuid, mib in nvidia_rows("uuid", "memory.total")}
    found: list[Device] = []
    for index, folder in enumerate(sorted(root.iterdir())):
        fields = _fields(folder / "information")
        model = fields.get("Model", "GPU").removeprefix("NVIDIA ").split(" ")[0] or "GPU"
        uuid = fields.get("GPU UUID", "")
        found.append(Device(index=index, type=model, memory_bytes=memory.get(uuid, 0), uuid=uuid))
    return tuple(found)


def memory_errors() -> dict[int, int]:
    """Uncorrectable memory errors of each NVIDIA device, by its index, since its driver was loaded or it was reset.

    Blocks up to 10 s. Devices that do not count (no ECC) are left out.
    """
    rows = nvidia_rows("index", "ecc.errors.uncorrected.volatile.total") if _NVIDIA.is_dir() else []
    return {int(index): int(count) for index, count in rows if count.isdigit()}


def kernel_lines() -> tuple[str, ...]:
    """Lines of the NVIDIA driver in the kernel log, stamped in seconds since boot; none where it may not be read."""
    text = process.output_of(("dmesg",), timeout_s=_QUERY_S) or ""
    return tuple(line for line in text.splitlines() if "NVRM" in line)


def bus_addresses(root: Path = _NVIDIA) -> tuple[str, ...]:
    """Domain, bus and slot of each NVIDIA device in the order of their indices, as ``0000:3b:00``."""
    return tuple(sorted(one.name.partition(".")[0].lower() for one in root.iterdir())) if root.is_dir() else ()


def nvidia_rows(*fields: str) -> list[list[str]]:
    """What ``nvidia-smi``, which asks NVML, prints of these fields: a row a device; none without it. Blocks 10 s."""
    command = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    text = process.output_of(command, timeout_s=_QUERY_S) or ""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return [row for row in rows if len(row) == len(fields)]


def _fields(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, sep, value in pairs if sep}
