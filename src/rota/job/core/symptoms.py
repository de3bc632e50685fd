"""Symptoms read from numbers and lines: slow members, dropped rates, faults of devices, memory, disk, bad losses."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from rota.spec.reasons import Reason

SLOW_FACTOR = 1.5
SLOW_STEPS = 20
"""A member is slow when the median of so many steps is so much longer than the median of its role."""
DROP_SHARE = 0.6
DROP_S = 30.0
XID_RECENT_S = 600.0
"""An older report says nothing about the present: the device may have been reset."""
XIDS: Mapping[int, Reason] = {
    **dict.fromkeys((48, 64, 94, 95, 140), Reason.GPU_ECC),
    **dict.fromkeys((79, 119, 120), Reason.GPU_LOST),
}
"""Reports of the driver that are the device's own fault, not that of what runs on it. Source: NVIDIA, "Xid Errors",
catalog for Ampere and newer: uncorrectable and contained memory errors, failed remaps; off the bus, firmware silent."""
_XID = re.compile(r"^\[\s*(\d+\.\d+)\].*NVRM: Xid \(PCI:([0-9a-f:]+)[.0-9]*\): (\d+),(.*)$", re.IGNORECASE)
BASELINE_SAMPLES = 60
BASELINE_SAMPLES_MIN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast an instance goes: the median seconds of its last ``steps`` steps."""

    steps: int
    step_s: float


def stragglers(paces: Mapping[str, Pace]) -> dict[str, float]:
    """Members of one role that are slow, with how many times the median of the role their step takes.

    Only those with ``SLOW_STEPS`` steps are compared, and a role needs three of them: of two, none is the normal one.
    """
    known = {name: pace.step_s for name, pace in paces.items() if pace.steps >= SLOW_STEPS and pace.step_s > 0}
    if len(known) < 3:
        return {}
    middle = median(known.values())
    return {name: step_s / middle for name, step_s in known.items() if step_s > SLOW_FACTOR * middle}


@dataclass(frozen=True, slots=True, kw_only=True)
class RateWatch:
    """Watches a rate that follows work (power of a device in watts, cores in use) for a training that stopped silently.

    The baseline is the median of samples taken while progress was marked; the rate has dropped when it is below
    ``DROP_SHARE`` of the way from ``idle`` to the baseline for ``DROP_S`` seconds without an excuse (a declared
    silence, a wait that the graph explains). It restarts nothing by itself: it halves the limit on progress.
    """

    idle: float = 0.0
    working: tuple[float, ...] = ()
    low_since_s: float | None = None
    now_s: float = 0.0

    def seen(self, at_s: float, rate: float, *, progress: bool, excused: bool) -> RateWatch:
        """The watch after a sample; ``progress``: some was marked since the sample before."""
        low = self.is_low(rate)
        working = (*self.working, rate)[-BASELINE_SAMPLES:] if progress and not excused else self.working
        if excused or progress or not low:
            return replace(self, working=working, low_since_s=None, now_s=at_s)
        since_s = at_s if self.low_since_s is None else self.low_since_s
        return replace(self, working=working, low_since_s=since_s, now_s=at_s)

    def is_low(self, rate: float) -> bool:
        """True when a rate is too low for work; never before there is a baseline."""
        if len(self.working) < BASELINE_SAMPLES_MIN:
            return False
        return rate < self.idle + DROP_SHARE * (median(self.working) - self.idle)

    @property
    def dropped(self) -> bool:
        """True while the rate has been low for too long."""
        return self.low_since_s is not None and self.now_s - self.low_since_s >= DROP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFault:
    """What the kernel log says of a device: its bus address in lower case, and the reason."""

    bus: str
    reason: Reason
    text: str


def device_faults(lines: Iterable[str], now_s: float) -> tuple[DeviceFault, ...]:
    """Faults of devices in lines of the kernel log, whose stamps and ``now_s`` count from boot; the first of each."""
    found: dict[str, DeviceFault] = {}
    for line in lines:
        match = _XID.match(line)
        if match is None or int(match[3]) not in XIDS or now_s - float(match[1]) > XID_RECENT_S:
            continue
        text = f"Xid {match[3]}:{match[4]}"
        found.setdefault(match[2].lower(), DeviceFault(bus=match[2].lower(), reason=XIDS[int(match[3])], text=text))
    return tuple(found.values())


def memory_faults(before: Mapping[int, int], now: Mapping[int, int]) -> dict[int, int]:
    """Devices whose count of uncorrectable memory errors rose, and by how much; a reset sets a count back to 0.

    What a device corrected by itself is no fault and is not counted. Source: NVIDIA, "GPU Memory Error Management".
    """
    return {index: n - before[index] for index, n in now.items() if n > before.get(index, n)}


def memory_evidence(signal: int | None, kills_before: int | None, kills_after: int | None) -> str:
    """What proves that a process was ended for memory; empty without proof.

    A process that the kernel's out-of-memory killer ends dies by SIGKILL, and the control group counts it. A SIGKILL
    alone is somebody else's, and a word in a text is no evidence.
    """
    if signal != 9 or kills_before is None or kills_after is None or kills_after <= kills_before:
        return ""
    return f"the kernel ended it for memory: oom_kill of its control group went from {kills_before} to {kills_after}"


_STORAGE: dict[int, Reason] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EROFS), Reason.OUTPUT_FULL),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO), Reason.DATA_UNREACHABLE),
}


def storage_reason(error: BaseException | None) -> Reason | None:
    """OUTPUT_FULL or DATA_UNREACHABLE when an error, or one it came from, is of the disk: by its number."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _STORAGE:
            return _STORAGE[error.errno]
        error = error.__cause__ or error.__context__
    return None


def bad_losses(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of reported losses (``loss``, ``policy_loss``, ``loss/value`` ...) that are not finite."""
    return tuple(name for name, value in metrics.items() if "loss" in name.lower() and not _finite(value))


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return True
