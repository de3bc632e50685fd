"""What happens on this node: load of the machine and of each process, stacks of a process that hangs."""

from __future__ import annotations

import ipaddress
import shutil
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from rota.runtime import process
from rota.runtime.clock import Clock, blocking_sleep
from rota.runtime.process import ProcessId, Usage

_STACKS_S, _STOPPED_STACKS_S = 10.0, 2.0
_ASKED_S = 0.5
"""A process writes its stacks within milliseconds; a busy machine takes longer."""


NODE_ADDRESS = "ROTA_NODE_ADDRESS"
"""Variable with the address at which processes on other machines reach those of this one."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Where Gloo, NCCL and TensorPipe look for the network interface to use; else each guesses."""


def network_environment(address: str) -> dict[str, str]:
    """Variables of a process on a machine that others reach at ``address``, an IPv4 or IPv6 address.

    A machine whose engine is reached at the loopback address alone works by itself: its libraries choose as ever.
    """
    if ipaddress.ip_address(address).is_loopback:
        return {NODE_ADDRESS: address}
    found = [name for name, given in psutil.net_if_addrs().items() if any(one.address == address for one in given)]
    return {NODE_ADDRESS: address, **{variable: found[0] for variable in INTERFACE_VARIABLES if found}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """Load of one process since the sample before: cores in use (1.0 = one whole core), resident bytes, threads."""

    process: ProcessId
    cpus: float
    rss_bytes: int
    threads: int


class Sampler:
    """Turns counters into rates; the first sample of a process covers the time since its start."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = dict[ProcessId, tuple[float, Usage]]()

    def processes(self, which: Iterable[ProcessId]) -> tuple[ProcessSample, ...]:
        """The load of these processes alone; those that are gone are left out."""
        found = [sample for each in which if (sample := self._process(each)) is not None]
        alive = {sample.process for sample in found}
        self._last = {known: value for known, value in self._last.items() if known in alive}
        return tuple(found)

    def _process(self, which: ProcessId) -> ProcessSample | None:
        usage, now_s = process.usage_of(which), self._clock.monotonic_s()
        if usage is None:
            return None
        before_s, before = self._last.get(which, (which.start_time, Usage(cpu_s=0.0, rss_bytes=0, threads=0)))
        self._last[which] = (now_s, usage)
        cpus = max(0.0, usage.cpu_s - before.cpu_s) / max(now_s - before_s, 1e-3)
        return ProcessSample(process=which, cpus=cpus, rss_bytes=usage.rss_bytes, threads=usage.threads)


class Load:
    """Cores and memory that this process and everything below it use, between two readings."""

    def __init__(self, clock: Clock) -> None:
        self._sampler, self._own = Sampler(clock), process.own_id()

    def read(self) -> dict[str, float]:
        """``cpus`` since the reading before and ``rss_bytes`` now; some 30 us a process."""
        found = self._sampler.processes((self._own, *process.descendants(self._own)))
        return {"cpus": round(sum(one.cpus for one in found), 3), "rss_bytes": sum(one.rss_bytes for one in found)}


def spied(which: ProcessId) -> str:
    """Python stacks of a process, by py-spy; empty where it is not installed or may not look. Blocks up to 10 s."""
    spy = _py_spy()
    if not spy:
        return ""
    stopped = process.is_stopped(which)  # it does not run: py-spy need not stop it, which may take long
    command = (spy, "dump", "--full-filenames", "--pid", str(which.pid), *(("--nonblocking",) if stopped else ()))
    return process.output_of(command, timeout_s=_STOPPED_STACKS_S if stopped else _STACKS_S) or ""


def asked_for_stacks(which: ProcessId, file: Path) -> str:
    """Stacks that a process writes to ``file`` at SIGUSR1; empty when it does not listen to that. Blocks a second."""
    if not file.exists():
        return ""
    before = file.stat().st_size
    if process.send_signal(which, signal.SIGUSR1):
        blocking_sleep(_ASKED_S)
    return file.read_text()[before:]


def seen_from_outside(which: ProcessId) -> str:
    """What a process of this node does, without its help: its state in words, then its stacks; empty when it is gone.

    One that was stopped by a signal, or that waits in the kernel, says nothing itself. Without py-spy it is asked by
    SIGUSR1 to write its stacks to its own log (every instance listens to that). Blocks up to 10 s.
    """
    words = process.state_of(which)
    if words is None or not ((text := spied(which)) or process.send_signal(which, signal.SIGUSR1)):
        return ""
    return f"process {which.pid} {words}\n{text or f'process {which.pid} was asked to write its stacks to its log'}"


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")
