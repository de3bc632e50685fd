"""Families of devices: what a machine has of each, which are unfit, and the variables that show a process its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from rota.runtime import process
from rota.runtime.clock import SystemClock
from rota.runtime.topology import numa_nodes, nvlink_islands, sockets_of
from rota.spec.errors import BadInput
from rota.spec.reasons import Reason
from rota.spec.resources import Device, parse_size
from rota.spec.user_code import UserCode

FAKE_VARIABLE = "ROTA_FAKE_DEVICES"
FAMILIES_VARIABLE = "ROTA_DEVICE_FAMILIES"
"""Variable with families of this installation, ``MODULE:CLASS`` with spaces between; they come before all others."""
ENTRY_POINTS = "rota.devices"
"""Group of entry points by which an installed package offers a family."""
GPUS_MAX_VARIABLE = "ROTA_GPUS_MAX"
"""Variable with the number of devices of this machine that may be used, as ``rota join --gpus`` gave it."""
_FAKE = re.compile(r"^(\d+)x([A-Za-z0-9_.-]+)(?::(\S+))?$")
_QUERY_S = 10.0
_MIB = 1 << 20
XID_RECENT_S = 600.0
"""An older report says nothing about the present: the device may have been reset."""
XIDS: Mapping[int, Reason] = {
    **dict.fromkeys((48, 64, 94, 95, 140), Reason.GPU_ECC),
    **dict.fromkeys((79, 119, 120), Reason.GPU_LOST),
}
"""Reports of the driver that are the device's own fault, not that of what runs on it. Source: NVIDIA, "Xid Errors",
catalog for Ampere and newer: uncorrectable and contained memory errors, failed remaps; off the bus, firmware silent."""
_XID = re.compile(r"^\[\s*(\d+\.\d+)\].*NVRM: Xid \(PCI:([0-9a-f:]+)[.0-9]*\): (\d+),(.*)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFault:
    """Why a device must not be given out: ``GPU_LOST`` (does not answer) or ``GPU_ECC`` (memory), and what is said."""

    index: int
    text: str
    reason: Reason = Reason.GPU_LOST


class DeviceFamily:
    """Devices of one kind on this machine; a subclass without arguments says what is there.

    ``name`` is for messages, ``variable`` lists the devices that a process sees, ``backend`` is torch's name of the
    device and the backend of its collectives (``cuda:nccl``; empty: tensors of process groups are on the CPU), ``tool``
    the command that shows them. Methods may block for 10 s; they do not raise where a tool is missing.
    """

    name = ""
    variable = ""
    backend = ""
    tool = ""

    def inventory(self) -> tuple[Device, ...]:
        """The devices with index, type, memory in bytes and uuid, numbered as ``variable`` numbers them."""
        raise NotImplementedError(f"{type(self).__name__} has no inventory()")

    def is_here(self) -> bool:
        """Whether this machine has any; override it where ``inventory`` is slow: each start of a process asks."""
        return bool(self.inventory())

    def present(self) -> frozenset[int]:
        """Indices of the devices that answer now; override it where ``inventory`` is slow: it is asked every 10 s."""
        return frozenset(device.index for device in self.inventory())

    def faults(self, devices: Sequence[int]) -> Sequence[DeviceFault]:
        """Devices that are unfit now; only these need be looked at. They are not given out, and end their instances."""
        return ()

    def memory_errors(self) -> Mapping[int, int]:
        """Uncorrectable memory errors by index since the driver was loaded; an instance ends when its device's rise."""
        return {}

    def environment(self, devices: Sequence[int]) -> dict[str, str]:
        """Variables with which a process sees these devices alone, none of them where there are none."""
        return {self.variable: ",".join(map(str, devices))}

    def sockets(self) -> int:
        """Into how many equal groups the devices fall that are closer to each other than to the rest."""
        return 1


def nvidia_type(model: str) -> str:
    """The type of a device from the driver's name of its model, without maker and memory: ``H100``, ``RTX-4090``."""
    words = [word for word in model.split() if word not in ("NVIDIA", "GeForce", "Tesla", "Quadro")]
    of_two = words[:1] in (["RTX"], ["GTX"], ["TITAN"])
    return "-".join(words[: 2 if of_two else 1]) or "GPU"


class Nvidia(DeviceFamily):
    """Devices that the NVIDIA driver lists, in the order of bus addresses; ``root`` is its folder in ``/proc``."""

    name = "nvidia"
    variable = "CUDA_VISIBLE_DEVICES"
    backend = "cuda:nccl"
    tool = "nvidia-smi"

    def __init__(self, root: Path = Path("/proc/driver/nvidia/gpus")) -> None:
        self._root = root

    def is_here(self) -> bool:
        """True with a driver."""
        return self._root.is_dir()

    def inventory(self) -> tuple[Device, ...]:
        """Memory is asked of ``nvidia-smi``, 0 without it."""
        if not self.is_here():
            return ()
        asked = nvidia_rows("uuid", "memory.total")
        memory = {uuid: int(float(mib)) * _MIB for uuid, mib in asked if mib.replace(".", "").isdigit()}  # else [N/A]
        found: list[Device] = []
        for index, folder in enumerate(sorted(self._root.iterdir())):
            fields = _fields(folder / "information", ":")
            uuid = fields.get("GPU UUID", "")
            model = nvidia_type(fields.get("Model", ""))
            found.append(Device(index=index, type=model, memory_bytes=memory.get(uuid, 0), uuid=uuid))
        return tuple(found)

    def addresses(self) -> tuple[str, ...]:
        """Domain, bus and slot of each in the order of their indices, as ``0000:3b:00``."""
        return (
            tuple(sorted(one.name.partition(".")[0].lower() for one in self._root.iterdir())) if self.is_here() else ()
        )

    def faults(self, devices: Sequence[int]) -> Sequence[DeviceFault]:
        """Faults that the driver reports in the kernel log, where it may be read."""
        addresses = self.addresses()
        text = (process.output_of(("dmesg",), timeout_s=_QUERY_S) or "") if addresses else ""
        found = xid_faults(text.splitlines(), SystemClock().monotonic_s())
        return [
            DeviceFault(index=index, reason=found[bus][0], text=f"{found[bus][1]} ({bus})")
            for index, bus in enumerate(addresses)
            if index in devices and bus in found
        ]

    def memory_errors(self) -> Mapping[int, int]:
        """Devices that do not count (no ECC) are left out."""
        rows = nvidia_rows("index", "ecc.errors.uncorrected.volatile.total") if self.is_here() else []
        return {int(index): int(count) for index, count in rows if count.isdigit()}

    def environment(self, devices: Sequence[int]) -> dict[str, str]:
        """Numbered in the order of bus addresses, which CUDA does only on request."""
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **super().environment(devices)}

    def sockets(self) -> int:
        """Sockets, or groups that NVLink connects; a group lies within a socket."""
        buses = self.addresses()
        links = process.output_of(("nvidia-smi", "topo", "-m"), timeout_s=_QUERY_S) if len(buses) > 1 else ""
        return max(sockets_of(numa_nodes(buses)), sockets_of(nvlink_islands(links or "")))


class FakeDevices(Nvidia):
    """Devices that exist for the scheduler alone, from ``COUNTxTYPE[:MEMORY]``. Raises ValueError for other forms."""

    def __init__(self, text: str) -> None:
        super().__init__(Path("/nonexistent"))
        match = _FAKE.match(text)
        if match is None:
            raise ValueError(f"{FAKE_VARIABLE}={text!r} is not COUNTxTYPE[:MEMORY], for example 4xH100:80GiB")
        memory_bytes = parse_size(match.group(3)) if match.group(3) else 0
        self._devices = tuple(
            Device(index=index, type=match.group(2), memory_bytes=memory_bytes, uuid=f"fake-{index}")
            for index in range(int(match.group(1)))
        )

    def inventory(self) -> tuple[Device, ...]:
        """The devices of the text."""
        return self._devices


class Amd(DeviceFamily):
    """GPUs of the amdgpu driver, in the order of its topology in ``/sys``, which is that of HIP.

    Source: Linux, Documentation/gpu/amdgpu (RAS, product_name) and drivers/gpu/drm/amd/amdkfd/kfd_topology.c.
    """

    name = "amd"
    variable = "HIP_VISIBLE_DEVICES"
    backend = "cuda:nccl"  # torch for ROCm has its devices and RCCL under these names
    tool = "rocm-smi"

    def __init__(self, root: Path = Path("/sys/class")) -> None:
        self._root = root

    def _found(self) -> list[tuple[Path, dict[str, str], Path]]:
        """Folder in the topology, its properties, and folder of the PCI device, of each GPU that may be used here."""
        nodes = sorted((self._root / "kfd/kfd/topology/nodes").glob("[0-9]*"), key=lambda one: int(one.name))
        each = ((node, _fields(node / "properties", " ")) for node in nodes)
        return [
            (node, fields, self._root / "drm" / f"renderD{fields.get('drm_render_minor', '')}" / "device")
            for node, fields in each
            if fields.get("simd_count", "0") != "0"
        ]

    def inventory(self) -> tuple[Device, ...]:
        """The type is the number of the product (MI300X), else that of the architecture (gfx942)."""
        found: list[Device] = []
        for index, (node, fields, pci) in enumerate(self._found()):
            banks = [_fields(bank, " ") for bank in node.glob("mem_banks/*/properties")]
            memory = sum(int(one.get("size_in_bytes", 0)) for one in banks if one.get("heap_type") in ("1", "2"))
            product = re.search(r"MI\d+\w*", _read(pci / "product_name"))
            gfx = int(fields.get("gfx_target_version", 0))
            kind = product[0] if product else f"gfx{gfx // 10000}{gfx // 100 % 100:x}{gfx % 100:x}"
            found.append(Device(index=index, type=kind, memory_bytes=memory, uuid=fields.get("unique_id", "")))
        return tuple(found)

    def memory_errors(self) -> Mapping[int, int]:
        """Uncorrectable memory errors by device, as RAS counted them; empty without RAS."""
        counts = ((index, _fields(pci / "ras/umc_err_count", ":")) for index, (_, _, pci) in enumerate(self._found()))
        return {index: int(count["ue"]) for index, count in counts if count.get("ue", "").isdigit()}


class Ascend(DeviceFamily):
    """NPUs of Huawei, as ``npu-smi`` numbers and describes them. Source: Ascend, "npu-smi Command Reference".

    A call of it may take seconds: sizes of memory are asked once in a process, health only of the devices in question.
    """

    name = "ascend"
    variable = "ASCEND_RT_VISIBLE_DEVICES"
    backend = "npu:hccl"
    tool = "npu-smi info"

    def __init__(self, nodes: Path = Path("/dev")) -> None:
        self._nodes = nodes
        self._known = dict[int, tuple[str, str, str]]()
        self._memory = dict[int, int]()

    def is_here(self) -> bool:
        """True with a device node of the driver."""
        return any(self._nodes.glob("davinci[0-9]*"))

    def _chips(self) -> dict[int, tuple[str, str, str]]:
        """Number of the card, of the chip on it, and name, by the number that processes use."""
        text = _output_of("npu-smi", "info", "-m") if self.is_here() else ""
        rows = re.findall(r"^\s*(\d+)\s+(\d+)\s+(\d+)\s+Ascend (\S+)", text, re.MULTILINE)
        self._known = {int(logical): (card, chip, kind) for card, chip, logical, kind in rows}
        return self._known

    def _ask(self, what: str, card: str, chip: str, field: str) -> str:
        text = _output_of("npu-smi", "info", "-t", what, "-i", card, "-c", chip)
        match = re.search(rf"^\s*{re.escape(field)}\s*:\s*(\S+)", text, re.MULTILINE)
        return match[1] if match else ""

    def inventory(self) -> tuple[Device, ...]:
        """The type is the number of the chip, as 910B3."""
        found: list[Device] = []
        for index, (card, chip, kind) in sorted(self._chips().items()):
            if index not in self._memory and (mib := self._ask("usages", card, chip, "HBM Capacity(MB)")):
                self._memory[index] = int(mib) * _MIB
            memory = self._memory.get(index, 0)
            found.append(Device(index=index, type=kind, memory_bytes=memory, uuid=f"{card}-{chip}"))
        return tuple(found)

    def present(self) -> frozenset[int]:
        """The chips that are listed, without their memory."""
        return frozenset(self._chips())

    def faults(self, devices: Sequence[int]) -> Sequence[DeviceFault]:
        """Faults of devices whose health is an alarm or critical; a warning does not keep a device from work."""
        chips = [(index, one) for index, one in (self._known or self._chips()).items() if index in devices]
        asked = ((index, self._ask("health", card, chip, "Health")) for index, (card, chip, _) in chips)
        return [
            DeviceFault(index=index, text=f"npu-smi says {health}")
            for index, health in asked
            if health in ("Alarm", "Critical")
        ]


_TPUS = {"0x005e": ("v4", 32), "0x0062": ("v5p", 95), "0x0063": ("v5e", 16), "0x006f": ("v6e", 32)}
"""Generation and GiB of memory by the id of the PCI device. Source: jax, jax/_src/hardware_utils.py; Google, "TPU
architecture"."""


class Tpu(DeviceFamily):
    """TPU chips of Google on the PCI bus of this machine. Process groups of torch_xla are made by its own means."""

    name = "tpu"
    variable = "TPU_VISIBLE_CHIPS"
    tool = "tpu-info"

    def __init__(self, buses: Path = Path("/sys/bus/pci/devices")) -> None:
        self._buses = buses

    def inventory(self) -> tuple[Device, ...]:
        """In the order of bus addresses."""
        ours = [one for one in sorted(self._buses.glob("*")) if _read(one / "vendor") == "0x1ae0"]
        kinds = [(one.name, _TPUS[kind]) for one in ours if (kind := _read(one / "device")) in _TPUS]
        return tuple(
            Device(index=index, type=kind, memory_bytes=gib << 30, uuid=bus)
            for index, (bus, (kind, gib)) in enumerate(kinds)
        )

    def environment(self, devices: Sequence[int]) -> dict[str, str]:
        """One chip, or two of a host, need their shape too. Source: Ray, _private/accelerators/tpu.py."""
        bounds = {1: "1,1,1", 2: "1,2,1"}.get(len(devices))
        shape = {"TPU_CHIPS_PER_HOST_BOUNDS": bounds, "TPU_HOST_BOUNDS": "1,1,1"} if bounds else {}
        return {**super().environment(devices), **shape}


BUILT_IN: tuple[DeviceFamily, ...] = (Nvidia(), Amd(), Ascend(), Tpu())


def local_family(environment: Mapping[str, str] = os.environ) -> DeviceFamily:
    """The family of this machine's devices: the first that is here of the installation's own, the built-in ones, and
    those of installed packages. A machine without devices reports the first built-in family. A machine has devices of
    one family. Raises BadInput for one that cannot be loaded, ValueError for ``ROTA_FAKE_DEVICES`` of another form.
    """
    if (fake := environment.get(FAKE_VARIABLE)) is not None:
        return FakeDevices(fake)
    own = _named(environment.get(FAMILIES_VARIABLE, ""))
    found = next((one for one in (*own, *BUILT_IN) if _is_here(one)), None)
    return found or next((one for one in _installed() if _is_here(one)), BUILT_IN[0])


def local_devices(environment: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """Devices of this machine; the first ``ROTA_GPUS_MAX`` if that is set.

    Raises what ``local_family`` raises, and BadInput for an inventory that is none.
    """
    family, most = local_family(environment), environment.get(GPUS_MAX_VARIABLE)
    with _named_in_errors(family, "inventory()"):
        found = tuple(family.inventory())
        for one in found:
            if not isinstance(one, Device):
                raise TypeError(f"{one!r} is not a Device")
    return found[: int(most)] if most else found


def _is_here(family: DeviceFamily) -> bool:
    with _named_in_errors(family, "is_here()"):
        return family.is_here()


@contextmanager
def _named_in_errors(family: DeviceFamily, where: str) -> Iterator[None]:
    """Raises BadInput that names the family for what its code raises; what ``ROTA_FAKE_DEVICES`` raises stays."""
    with UserCode() as ran:
        yield
    if ran.failed:
        error = ran.take()
        if isinstance(family, FakeDevices):
            raise error
        hint = "repair the class, or take it out of device_families (or uninstall its package)"
        text = f"device family {type(family).__qualname__}: {where}: {type(error).__name__}: {error}"
        raise BadInput(text, hint=hint) from error


@lru_cache
def _named(text: str) -> tuple[DeviceFamily, ...]:
    return tuple(_made(EntryPoint(name, name, ENTRY_POINTS)) for name in text.split())


@lru_cache
def _installed() -> tuple[DeviceFamily, ...]:
    return tuple(map(_made, entry_points(group=ENTRY_POINTS)))


def _made(entry: EntryPoint) -> DeviceFamily:
    """Raises BadInput that names the package, where one brought the family."""
    name, package = f"device family {entry.value!r}", entry.dist.name if entry.dist else ""
    name += f" of the package {package}" if package else ""
    remedy = f"uninstall {package}" if package else "take it out of device_families"
    made: object = None
    with UserCode() as ran:
        made = entry.load()()
    if ran.failed:
        error = ran.take()
        hint = f"install what it needs on this machine, or {remedy}"
        raise BadInput(f"{name}: {type(error).__name__}: {error}", hint=hint) from error
    if not isinstance(made, DeviceFamily) or not made.variable:
        hint = f"make it a subclass of rota.runtime.devices.DeviceFamily, or {remedy}"
        raise BadInput(f"{name}: not a DeviceFamily with a variable", hint=hint)
    return made


def xid_faults(lines: Iterable[str], now_s: float) -> dict[str, tuple[Reason, str]]:
    """Reason and text by bus address, of lines of the kernel log whose stamps and ``now_s`` count from boot."""
    found: dict[str, tuple[Reason, str]] = {}
    for line in lines:
        match = _XID.match(line)
        if match is None or int(match[3]) not in XIDS or now_s - float(match[1]) > XID_RECENT_S:
            continue
        found.setdefault(match[2].lower(), (XIDS[int(match[3])], f"Xid {match[3]}:{match[4]}"))
    return found


def nvidia_rows(*fields: str) -> list[list[str]]:
    """What ``nvidia-smi``, which asks NVML, prints of these fields: a row a device; none without it. Blocks 10 s."""
    text = _output_of("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return [row for row in rows if len(row) == len(fields)]


def _output_of(*command: str) -> str:
    return process.output_of(command, timeout_s=_QUERY_S) or ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:  # not there, or not this container's
        return ""


def _fields(path: Path, separator: str) -> dict[str, str]:
    pairs = (line.partition(separator) for line in _read(path).splitlines())
    return {key.strip(): value.strip() for key, sep, value in pairs if sep}
