"""Probes of processes: hang detection, load, stacks.

A process hangs when it was stopped by a signal at each of three looks a second apart, or when it gave no answer at ten
looks and wanted no processor in that time. One that computes, or waits for a core or the disk, is busy, however long it
is silent; one under a debugger is left alone. Looks are counted, not seconds: where the one who looks was held up
itself, as on a suspended machine, nothing is held against the other.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from rota.runtime import process
from rota.runtime.clock import Clock, blocking_sleep
from rota.runtime.process import ProcessId

LOOK_S = 1.0
"""Between two looks at a process."""
STOPPED_LOOKS, SILENT_LOOKS = 3, 10
ANSWER_S = 1.0
"""Longest wait for the answer of a port, so that one silent process does not hide another."""
_WANTS = 0.05
"""Cores that a process must have used or waited for since the look before, to count as busy."""
_KEPT_MAX = 100
_CALLS = 4
# The preface of a client of HTTP/2 with an empty SETTINGS frame (RFC 9113): every gRPC server answers with its own.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


class HangWatch:
    """The looks at the process of one part; ``look`` is to be called about every ``LOOK_S``."""

    def __init__(self) -> None:
        self.which: ProcessId | None = None

    def look(self, which: ProcessId, *, answers: bool = True) -> str:
        """Why the process counts as hung, empty while it does not; another one than before is counted anew.

        ``answers``: it answered since the last look.
        """
        if which != self.which:
            self.which, self._stopped, self._silent, self._before = which, 0, 0, None
        stopped, wants = process.is_stopped(which), self._wants(which)
        self._stopped = self._stopped + 1 if stopped else 0
        self._silent = 0 if answers or wants else self._silent + 1
        if self._stopped >= STOPPED_LOOKS:
            return "was stopped by a signal"
        if self._silent >= SILENT_LOOKS:
            return f"gave no answer for {SILENT_LOOKS * LOOK_S:.0f} s and used no processor"
        return ""

    def _wants(self, which: ProcessId) -> bool:
        demand, now_s = process.demand_of(which), time.monotonic()
        if demand is None:  # it is gone, which is not a hang
            return True
        before, self._before = self._before, (now_s, demand.seconds)
        if before is None or demand.runs:
            return True
        return demand.seconds - before[1] > _WANTS * (now_s - before[0])


def listens_http2(port: int) -> bool:
    """True when a gRPC server on this machine answers the first words of a client."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as asked:
        asked.sendall(_GREETING)
        return len(asked.recv(9)) > 0
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A part of the installation that hung or died and was replaced: ``at`` in wall time, ``why`` after its name."""

    part: str
    pid: int
    why: str
    at: float

    @property
    def id(self) -> str:
        return f"{self.part}-{self.pid}-{self.at:.6f}"


def master_part(job: str) -> str:
    """The name of a job's master among the parts that are replaced."""
    return f"master of {job}"


def end_hung(which: ProcessId, run: Path, part: str, why: str, *, wait_s: float = 0.0) -> bool:
    """SIGKILL a process that hangs and note it in the folder ``run`` of the installation; False when it was gone.

    Waits up to ``wait_s`` for its end.
    """
    if not process.send_signal(which, signal.SIGKILL):
        return False
    note_replaced(run, part, which.pid, why)
    process.wait_gone((which,), wait_s)
    return True


def note_replaced(run: Path, part: str, pid: int, why: str) -> None:
    """Leave a note for the service, which puts it into the log; without room on the disk there is none."""
    found = Replaced(part=part, pid=pid, why=why, at=time.time())
    folder = run / "replaced"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if sum(1 for _ in folder.iterdir()) < _KEPT_MAX:  # while no service takes them
            process.write_private(folder / f"{found.id.replace('/', '_')}.json", json.dumps(asdict(found)))


def noted(run: Path) -> dict[Path, Replaced]:
    """The notes that no service has taken yet, the oldest first; to be removed by who has put them into the log."""
    found: dict[Path, Replaced] = {}
    for path in (run / "replaced").glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found[path] = Replaced(**json.loads(path.read_text()))
    return dict(sorted(found.items(), key=lambda pair: pair[1].at))


_STACKS_S, _STOPPED_STACKS_S = 10.0, 2.0
_ASKED_S = 0.5
"""A process writes its stacks within milliseconds; a busy machine takes longer."""
_ASKED_BYTES_MAX = 1 << 20


class Load:
    """Cores and memory that a process and everything below it use, between two readings.

    The first reading of a process covers the time since its start.
    """

    def __init__(self, clock: Clock, root: ProcessId) -> None:
        self._clock, self._root = clock, root
        self._before = dict[ProcessId, tuple[float, float]]()

    def read(self) -> dict[str, float]:
        """``cpus`` since the reading before (1.0 = one whole core) and ``rss_bytes`` now; some 30 us a process."""
        cpus, rss_bytes, seen = 0.0, 0, dict[ProcessId, tuple[float, float]]()
        for which in (self._root, *process.descendants(self._root)):
            usage, now_s = process.usage_of(which), self._clock.monotonic_s()
            if usage is None:
                continue
            before_s, cpu_s = self._before.get(which, (which.start_time, 0.0))
            cpus += max(0.0, usage.cpu_s - cpu_s) / max(now_s - before_s, 1e-3)
            rss_bytes += usage.rss_bytes
            seen[which] = now_s, usage.cpu_s
        self._before = seen
        return {"cpus": round(cpus, 3), "rss_bytes": rss_bytes}


def stacks_of(which: ProcessId) -> str:
    """Python stacks of a process, by py-spy; empty where it is not installed or may not look. Blocks up to 10 s."""
    spy = _py_spy()
    if not spy:
        return ""
    stopped = process.is_stopped(which)  # it does not run: py-spy need not stop it, which may take long
    command = (spy, "dump", "--full-filenames", "--pid", str(which.pid), *(("--nonblocking",) if stopped else ()))
    return process.output_of(command, timeout_s=_STOPPED_STACKS_S if stopped else _STACKS_S) or ""


def calls_of(which: ProcessId) -> str:
    """Innermost calls of the main thread of a process, without those of imports; empty where ``stacks_of`` is."""
    _, _, thread = stacks_of(which).partition(f"\nThread {which.pid} ")
    lines = thread.partition("\n\n")[0].splitlines()[1:]
    calls = (line.strip() for line in lines if "<frozen importlib" not in line)
    return " < ".join(itertools.islice(calls, _CALLS))


@contextlib.contextmanager
def plain_file(path: Path) -> Iterator[BinaryIO]:
    """A file that a job wrote, open for reading. Raises OSError for a link, a pipe or a device in its place.

    A job may have another user than this process, and would have it read what it may not read itself.
    """
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(opened, "rb") as file:  # noqa: PTH123 - of a descriptor
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        yield file


def requested_stacks(which: ProcessId, file: Path) -> str:
    """Stacks that a process writes to ``file`` at SIGUSR1; empty when it does not listen to that. Blocks a second."""
    try:
        with plain_file(file) as opened:
            opened.seek(0, os.SEEK_END)
            if process.send_signal(which, signal.SIGUSR1):
                blocking_sleep(_ASKED_S)
            return opened.read(_ASKED_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""


def probe_process(which: ProcessId) -> str:
    """What a process of this node does, without its help: its state in words, then its stacks; empty when it is gone.

    One that was stopped by a signal, or that waits in the kernel, says nothing itself. Without py-spy it is asked by
    SIGUSR1 to write its stacks to its own log (every instance listens to that). Blocks up to 10 s.
    """
    words = process.state_of(which)
    if words is None or not ((text := stacks_of(which)) or process.send_signal(which, signal.SIGUSR1)):
        return ""
    return f"process {which.pid} {words}\n{text or f'process {which.pid} was asked to write its stacks to its log'}"


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")
