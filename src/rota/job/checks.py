"""Is this node fit for an instance? Folders that take writes, free disk, memory, devices; before any user code runs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rota.job.core.symptoms import storage_reason
from rota.runtime.devices import local_devices
from rota.spec.reasons import Reason

CHECK_MAX_S = 60.0
"""A folder that does not answer for so long (a file system that is gone) is unfit too."""
FREE_MIN_BYTES = 64 * 2**20
PROBE = b"rota" * 1024
ALLOCATION_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """What is wrong with the node: which check failed, for which reason, and what to do."""

    check: str
    reason: Reason
    text: str


class NodeUnfit(Exception):
    """The node cannot host this instance; ``reason`` goes into the event of the loss."""

    def __init__(self, found: Sequence[Unfit]) -> None:
        super().__init__("this node is unfit: " + "; ".join(one.text for one in found))
        self.reason = found[0].reason


def quick(folders: Iterable[Path], devices: Sequence[int], *, free_min_bytes: int = FREE_MIN_BYTES) -> list[Unfit]:
    """Everything that is wrong, nothing when the node is fit. Milliseconds on a healthy node; may block on a bad disk.

    Devices are compared with those that the driver of this node lists; where it lists none there is nothing to compare.
    """
    found = [problem for folder in dict.fromkeys(folders) if (problem := _folder(folder, free_min_bytes))]
    present = {device.index for device in local_devices()} if devices else set[int]()
    if present and (missing := sorted(set(devices) - present)):
        text = f"device {missing[0]} is not there (the node has {len(present)}); see nvidia-smi, drain the node"
        found.append(Unfit(check="devices", reason=Reason.GPU_LOST, text=text))
    try:
        bytearray(ALLOCATION_BYTES)
    except MemoryError:
        text = f"{ALLOCATION_BYTES >> 20} MiB of memory cannot be had"
        found.append(Unfit(check="memory", reason=Reason.OOM_KILLED, text=text))
    return found


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
