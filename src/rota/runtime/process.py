"""Processes by pid and start time: spawn, record, signal, reap, who locks a file, OOM kills; also private files."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import os
import platform
import select
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from rota.spec.codec import JsonValue

_PR_SET_CHILD_SUBREAPER = 36
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KILL_S = 5.0
"""Seconds that a process may take to be gone after SIGKILL."""
_SWEEP_ROUNDS_MAX = 50
SUPERVISOR = "supervisor"
"""The record of the process that watches the service."""
# struct pidfd_info of linux/pidfd.h: mask, cgroup id, eleven identifiers, wait status.
_PIDFD_INFO = struct.Struct("=QQ11Ii")
_PIDFD_GET_INFO = 0xC000FF0B | _PIDFD_INFO.size << 16
_PIDFD_INFO_EXIT = 1 << 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process of this boot: its pid and its start time in seconds since boot (a pid alone may be reused)."""

    pid: int
    start_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord(JsonValue):
    """Record on disk of a long-lived child, so that after a crash it can be adopted or ended."""

    name: str
    pid: int
    start_time: float
    boot_id: str
    command: tuple[str, ...]

    @property
    def id(self) -> ProcessId:
        return ProcessId(pid=self.pid, start_time=self.start_time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Usage of one process: processor seconds since its start, resident bytes, number of threads."""

    cpu_s: float
    rss_bytes: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """CPU demand of a process: seconds that its threads ran or were runnable; ``runs``: one runs or is runnable now,
    or is in uninterruptible sleep."""

    seconds: float
    runs: bool


def boot_id() -> str:
    """Identifier of this boot of the machine: recorded pids mean nothing under another one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def machine_id() -> str:
    """Twelve digits that stay over reboots, and differ on machines of one image as long as their names do."""
    try:
        installed = Path("/etc/machine-id").read_text()
    except OSError:
        installed = ""
    return hashlib.sha256(f"{installed} {platform.node()}".encode()).hexdigest()[:12]


def start_time_of(pid: int) -> float | None:
    """Start time in seconds since boot, or None when it does not exist (a zombie still has one)."""
    stat = _stat_of(pid)
    return None if stat is None else int(stat[19]) / _TICKS_PER_S


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process, or None when it is gone or a zombie."""
    stat = _stat_of(pid)
    if stat is None or stat[0] in ("Z", "X"):
        return None
    return ProcessId(pid=pid, start_time=int(stat[19]) / _TICKS_PER_S)


def _stat_of(pid: int) -> list[str] | None:
    """Fields of ``/proc/<pid>/stat`` after the name, state first (the name may hold spaces and parentheses)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits in the kernel for I/O",
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
}


def state_of(process: ProcessId) -> str | None:
    """State of a process in words, as the kernel reports it; None when it is gone."""
    stat = _stat_of(process.pid)
    return None if stat is None or not is_alive(process) else _STATES.get(stat[0], f"is in state {stat[0]}")


def is_stopped(process: ProcessId) -> bool:
    """True when this very process is stopped by a signal (SIGSTOP and its like), not by a debugger."""
    stat = _stat_of(process.pid)
    return stat is not None and stat[0] == "T" and is_alive(process)


def demand_of(process: ProcessId) -> Demand | None:
    """Processor time used and waited for by all threads of a process since they began; None when it is gone."""
    seconds, runs = 0.0, False
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                stat = (task / "stat").read_text().rpartition(")")[2].split()
                runs = runs or stat[0] in "RD"
                try:
                    used, waited = (task / "schedstat").read_text().split()[:2]
                    seconds += (int(used) + int(waited)) / 1e9
                except OSError:  # a kernel without schedstat: ticks of 10 ms are better than nothing
                    seconds += (int(stat[11]) + int(stat[12])) / _TICKS_PER_S
    return Demand(seconds=seconds, runs=runs) if is_alive(process) else None


def is_alive(process: ProcessId) -> bool:
    """True while exactly this process runs; a zombie does not."""
    return identify(process.pid) == process


def command_line(pid: int) -> str:
    """The words a process was started with (or named itself), one blank between them; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def own_id() -> ProcessId:
    """The identity of the calling process."""
    found = identify(os.getpid())
    assert found is not None
    return found


def become_subreaper() -> None:
    """Become the parent of every descendant whose parent dies, in place of init. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def reap_adopted(mine: Iterable[int] = ()) -> list[int]:
    """Reap dead children that have no other waiter; ``mine`` are left to their ``Popen``. Returns the pids reaped."""
    kept, reaped = set(mine), list[int]()
    for child in children_of(os.getpid()):
        if child in kept:
            continue
        with contextlib.suppress(ChildProcessError):
            pid, _ = os.waitpid(child, os.WNOHANG)
            if pid:
                reaped.append(pid)
    return reaped


def children_of(pid: int) -> list[int]:
    """The direct children of a process, those of all its threads; empty when it is gone."""
    found = list[int]()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def send_signal(process: ProcessId, signum: int) -> bool:
    """Signal exactly this process; False when it is gone. Never hits another one that got the same pid."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; real-time signals between the first and the last have no name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def wait_gone(processes: Iterable[ProcessId], timeout_s: float) -> tuple[ProcessId, ...]:
    """Wait until all are gone (or zombies); returns those that still run when the time is up."""
    deadline = time.monotonic() + timeout_s
    left = tuple(processes)
    for process in left:
        _wait_exit(process, max(0.0, deadline - time.monotonic()))
    return tuple(process for process in left if is_alive(process))


def _wait_exit(process: ProcessId, timeout_s: float) -> None:
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if is_alive(process):
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(timeout_s * 1000)
    finally:
        os.close(fd)


def descendants(process: ProcessId) -> tuple[ProcessId, ...]:
    """Every running process below this one, children before grandchildren; empty when it is gone."""
    if not is_alive(process):
        return ()
    found, pending = dict[int, ProcessId](), [process.pid]
    while pending:
        for child in children_of(pending.pop()):
            if (identity := identify(child)) is not None and child not in found:
                found[child] = identity
            pending.append(child)
    return tuple(found.values())


def stop(process: ProcessId, *, grace_s: float, kill_s: float = KILL_S) -> bool:
    """SIGTERM, then SIGKILL when it still runs after ``grace_s``; True when it is gone within ``kill_s`` more."""
    if grace_s > 0 and send_signal(process, signal.SIGTERM):
        send_signal(process, signal.SIGCONT)  # one that was stopped can end by itself, too
        wait_gone((process,), grace_s)
    send_signal(process, signal.SIGKILL)
    return not wait_gone((process,), kill_s)


def stop_tree(process: ProcessId, *, grace_s: float, in_turn: bool = False) -> tuple[ProcessId, ...]:
    """Stop a process and everything below it; returns what still runs ``KILL_S`` after the last SIGKILL.

    With ``in_turn`` those below get SIGTERM when those above have ended, within ``grace_s``: a shell passes none on."""
    below, until_s = descendants(process), time.monotonic() + grace_s
    for each in (process, *(below if in_turn else ())):
        stop(each, grace_s=until_s - time.monotonic())
    left = tuple({*below, *(p for known in below for p in descendants(known))})
    for each in left:
        send_signal(each, signal.SIGKILL)
    return wait_gone((process, *left), KILL_S)


def marked(mark: str) -> tuple[ProcessId, ...]:
    """Every running process of this user that inherited the environment entry ``mark`` (``NAME=value``).

    A process that writes its own title may overwrite the entry (Ray's do): see ``session_of``.
    """
    wanted, found = mark.encode(), list[ProcessId]()
    for pid in _pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or another user's
            continue
        identity = identify(pid) if wanted in environment else None
        if identity is not None:
            found.append(identity)
    return tuple(found)


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process of this user was started with; empty for one that is gone."""
    try:
        return psutil.Process(pid).environ()
    except psutil.Error:
        return {}


def locking(path: Path) -> tuple[ProcessId, ...]:
    """Every running process of this user that has this file locked, also when it was removed meanwhile.

    One that merely has it open, as an editor or a back-up may, is left out.
    """
    wanted, found = (str(path), f"{path} (deleted)"), list[ProcessId]()
    for pid in _pids():
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            opened = [one.name for one in Path(f"/proc/{pid}/fd").iterdir() if _link(one) in wanted]
            if any("lock:" in Path(f"/proc/{pid}/fdinfo/{fd}").read_text() for fd in opened):
                identity = identify(pid)
                found += [] if identity is None else [identity]
    return tuple(found)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # closed meanwhile
        return ""


def session_of(leader: ProcessId) -> tuple[ProcessId, ...]:
    """Every running process of the session that ``leader`` opened, dead or alive; none if its pid is another's now."""
    if start_time_of(leader.pid) not in (None, leader.start_time):
        return ()
    found = list[ProcessId]()
    for pid in _pids():
        stat = _stat_of(pid)
        identity = identify(pid) if stat is not None and int(stat[3]) == leader.pid else None
        if identity is not None:
            found.append(identity)
    return tuple(found)


def lost_environment(process: ProcessId) -> bool:
    """True when the process wrote its title over its environment, so that a mark in it cannot be found."""
    try:
        start = Path(f"/proc/{process.pid}/environ").read_bytes()[:1]
    except OSError:
        return False
    return bool(start) and not (start.isalpha() or start == b"_")


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def kill_all(find: Callable[[], Iterable[ProcessId]]) -> tuple[ProcessId, ...]:
    """SIGKILL what ``find`` returns until that is nothing; the caller itself is spared. Returns what remains."""
    deadline = time.monotonic() + KILL_S
    for _ in range(_SWEEP_ROUNDS_MAX):
        left = tuple(process for process in find() if process.pid != os.getpid())
        if not left or time.monotonic() > deadline:
            return left
        for process in left:
            send_signal(process, signal.SIGKILL)
        wait_gone(left, 1.0)
        reap_adopted()
    return tuple(process for process in find() if process.pid != os.getpid())


def usage_of(process: ProcessId) -> Usage | None:
    """Processor time and memory of a process, or None when it is gone."""
    try:
        handle = psutil.Process(process.pid)
        with handle.oneshot():
            times = handle.cpu_times()
            usage = Usage(
                cpu_s=times.user + times.system, rss_bytes=handle.memory_info().rss, threads=handle.num_threads()
            )
    except psutil.NoSuchProcess:
        return None
    return usage if is_alive(process) else None


def listening_on(port: int) -> tuple[int, str, tuple[str, ...]] | None:
    """Pid, name and open files of the process that listens on a TCP port; None of one of another user."""
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.pid and one.laddr[1:] == (port,):
            with contextlib.suppress(psutil.Error):  # it may end meanwhile
                holder = psutil.Process(one.pid)
                return holder.pid, holder.name(), tuple(file.path for file in holder.open_files())
    return None


def ports_of(process: ProcessId) -> tuple[int, ...]:
    """The TCP ports that a process of this user listens on, sorted; none when it is gone."""
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(process.pid).net_connections("tcp")
        return tuple(sorted({one.laddr[1] for one in found if one.status == psutil.CONN_LISTEN}))
    return ()


class ExitWatch:
    """Exit status of a process that is not a child (Linux 6.15 and later; else nothing is known)."""

    def __init__(self, process: ProcessId) -> None:
        self.which = process
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.pidfd_open(process.pid)
        if not is_alive(process):
            self.close()

    def status(self) -> int | None:
        """Exit status, or minus the number of the signal that ended it, once it was reaped; None if unknown."""
        if self._fd is None:
            return None
        buffer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(self._fd, _PIDFD_GET_INFO, buffer)
        except OSError:
            return None
        fields = _PIDFD_INFO.unpack(buffer)
        return os.waitstatus_to_exitcode(fields[-1]) if fields[0] & _PIDFD_INFO_EXIT else None

    @property
    def unreaped(self) -> bool:
        """True while the process has ended and its parent has not asked for its status."""
        return self._fd is not None and Path(f"/proc/{self.which.pid}").exists() and not is_alive(self.which)

    def close(self) -> None:
        """Close the pidfd."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class RunFolder:
    """The records of long children: one JSON file ``<name>.json`` each, in a folder of mode 0700."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, name: str, process: ProcessId, command: Sequence[str]) -> ProcessRecord:
        """Record a process under ``name``, atomically; an older record of that name is replaced."""
        record = ProcessRecord(
            name=name, pid=process.pid, start_time=process.start_time, boot_id=boot_id(), command=tuple(command)
        )
        write_private(self.path / f"{name}.json", json.dumps(asdict(record)))
        return record

    def read(self, name: str) -> ProcessRecord | None:
        """The record of that name, whether or not its process still runs."""
        try:
            return ProcessRecord.from_json(json.loads((self.path / f"{name}.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def find_alive(self, name: str) -> ProcessRecord | None:
        """The record of that name if its very process still runs under this boot."""
        record = self.read(name)
        return record if record is not None and record.boot_id == boot_id() and is_alive(record.id) else None

    def alive(self) -> tuple[ProcessRecord, ...]:
        """Every recorded process that still runs: what a start may adopt, and what a stop must end."""
        names = sorted(path.stem for path in self.path.glob("*.json"))
        return tuple(record for name in names if (record := self.find_alive(name)) is not None)

    def forget(self, name: str) -> None:
        """Remove a record; harmless if there is none."""
        (self.path / f"{name}.json").unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600 by rename, so that a reader sees the old or the new text and never half of it.

    Also after a loss of power: the text is on the disk before the name is. Raises OSError, which names the file.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    partial.replace(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn:
    """What to start: command, added environment (``None`` removes a variable), working folder, where output goes.

    With ``input`` the child reads what is written to ``stdin`` of the handle, and its end when the parent dies.
    """

    command: tuple[str, ...]
    env: Mapping[str, str | None]
    log: Path | None = None
    cwd: Path | None = None
    input: bool = False


Child = subprocess.Popen[bytes]
"""The handle of a child, for its parent."""


def spawn(what: Spawn, *, name: str, run: RunFolder | None = None) -> Child:
    """Start a child in its own session, recorded in ``run`` under ``name``. Raises OSError when it cannot start."""
    environment = {key: value for key, value in {**os.environ, **what.env}.items() if value is not None}
    output = what.log.open("ab") if what.log is not None else contextlib.nullcontext(subprocess.DEVNULL)
    with output as sink:
        child = subprocess.Popen(
            what.command,
            env=environment,
            cwd=what.cwd,
            stdin=subprocess.PIPE if what.input else subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    identity = identify(child.pid)
    if run is not None and identity is not None:
        run.write(name, identity, what.command)
    return child


def output_of(command: Sequence[str], *, timeout_s: float) -> str | None:
    """Stdout of a short command; None when it is missing, fails, or takes longer (then it is killed)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def watch_exits(processes: Iterable[ProcessId], wake_fd: int, timeout_s: float | None) -> tuple[ProcessId, ...]:
    """Wait until one of the processes ends, ``wake_fd`` gets readable, or the time is up; returns those that ended."""
    poller, fds, known = select.poll(), dict[int, ProcessId](), tuple(processes)
    poller.register(wake_fd, select.POLLIN)
    try:
        for process in known:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(process.pid)
                fds[fd] = process
                poller.register(fd, select.POLLIN)
        if all(is_alive(process) for process in known):
            poller.poll(None if timeout_s is None else timeout_s * 1000)
    finally:
        for fd in fds:
            os.close(fd)
    return tuple(process for process in known if not is_alive(process))


def oom_kills(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Number of processes that the kernel ended for memory in this control group; None where they are not counted.

    Reads ``memory.events`` (cgroup v2) or ``memory/memory.oom_control`` (v1) of the group that this process sees.
    """
    for path in (root / "memory.events", root / "memory" / "memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            fields = dict(line.split()[:2] for line in path.read_text().splitlines() if line.strip())
            if "oom_kill" in fields:
                return int(fields["oom_kill"])
    return None
