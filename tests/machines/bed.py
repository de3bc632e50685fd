"""Machines on one computer, for tests: each with a network, host name, processes, ``/tmp`` and ``/dev/shm`` of its own.

``bed(n)`` makes n machines whose interfaces hang on one bridge, which lies in a namespace too: the network of the
computer stays as it is. What lies outside ``/tmp`` and ``/dev/shm`` all of them share. Faults: ``Machine.kill`` ends
all processes of a machine at once (a power cut), ``start`` brings it back with its name, its address, its ``DISK`` and
nothing else in ``/tmp``; ``link`` cuts its cable; ``deaf_to`` drops what it sends to one other; ``shape`` limits what
it sends. Linux, as root, with ``ip`` and ``nsenter``; ``missing`` says which of these is not here.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ip", "tc", "nsenter", "unshare")
MACHINES_MAX = 9
DISKS = "/var/tmp"
END_S = 120.0
"""How long the kernel may take to end all processes of a machine, on a computer with much else to do."""
INTERFACE = "eth0"
DISK = "/tmp/disk"
"""A folder of each machine that survives a power cut."""
_PREFIX = "rota-bed"
_UNSHARE = ("unshare", "-m", "-u", "-i", "-p", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
_INIT = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
print("up", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.1)
"""
"""First process of a machine: it reaps what loses its parent, and all others die with it."""


def missing() -> str:
    """Why no machines can be made here; empty when they can."""
    if sys.platform != "linux":
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(absent)} (Debian: apt install iproute2 util-linux)"
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    steps = (
        ("unshare", "-m", "-u", "-i", "-p", "--fork", "--mount-proc", "true"),
        ("ip", "netns", "add", probe),
        ("ip", "-n", probe, "link", "add", "br0", "type", "bridge"),
        ("ip", "-n", probe, "link", "add", "p0", "type", "veth", "peer", "name", "p1"),
        ("ip", "netns", "exec", probe, "true"),
    )
    try:
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                return f"cannot make machines: {' '.join(step)}: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return ""


def _mounts(disk: Path) -> list[str]:
    """Commands that give a machine its own ``/tmp`` and ``/dev/shm``; a checkout below ``/tmp`` stays where it is."""
    checkout = shlex.quote(str(ROOT))
    own = [f"mkdir -p {DISK}", f"mount --bind {shlex.quote(str(disk))} {DISK}"]
    if not ROOT.is_relative_to("/tmp"):
        return ["mount -t tmpfs tmpfs /tmp", "mount -t tmpfs tmpfs /dev/shm", *own]
    return [
        f"mount --bind {checkout} /dev/shm",  # held here while /tmp is hidden
        "mount -t tmpfs tmpfs /tmp",
        f"mkdir -p {checkout}",
        f"mount --move /dev/shm {checkout}",
        "mount -t tmpfs tmpfs /dev/shm",
        *own,
    ]


def _do(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


@dataclass(slots=True)
class Machine:
    """One machine of a bed; ``pid`` is its first process as this computer counts, 0 while it is off."""

    name: str
    address: str
    namespace: str
    environ: Mapping[str, str]
    disk: Path
    pid: int = 0
    _init: subprocess.Popen[str] | None = None
    _children: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])

    def start(self) -> None:
        """Start its first process, with an empty ``/dev/shm``, and ``DISK`` alone in ``/tmp``."""
        script = f'hostname {self.name} && {" && ".join(_mounts(self.disk))} && exec "$0" -c "$1"'
        self._init = subprocess.Popen(
            [*("ip", "netns", "exec", self.namespace), *_UNSHARE, "sh", "-c", script, sys.executable, _INIT],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._init.stdout is not None and self._init.stderr is not None
        if self._init.stdout.readline() != "up\n":
            raise RuntimeError(f"{self.name} did not start: {self._init.stderr.read()}")
        (child,) = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
        self.pid = int(child)

    def send_kill(self) -> None:
        """Have the kernel end every process of the machine, and wait for none."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        elif self._init is not None:  # it was never up
            self._init.kill()

    def kill(self) -> None:
        """End every process of the machine at once; what it had in ``/tmp`` and ``/dev/shm`` is lost."""
        if self._init is None:
            return
        self.send_kill()
        self._init.wait(END_S)
        for child in self._children:
            child.wait(END_S)
        self._children.clear()
        self._init, self.pid = None, 0

    def entered(self, argv: Sequence[str]) -> list[str]:
        """A command of this computer that runs ``argv`` on the machine."""
        assert self.pid, f"{self.name} is off"
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "-i", "-p", "--wd=/", *argv]

    def spawn(self, *argv: str, env: Mapping[str, str] | None = None, log: Path | None = None) -> subprocess.Popen[str]:
        """Start a process on the machine; its output goes to ``log`` of this computer, or to a pipe."""
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(log.open("ab")) if log else subprocess.PIPE
            child = subprocess.Popen(
                self.entered(argv),
                env={**self.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._children.append(child)
        return child

    def run(self, *argv: str, env: Mapping[str, str] | None = None, timeout_s: float = 120.0, ok: bool = True) -> str:
        """Run a command on the machine; its stdout. Raises AssertionError with both streams if it failed and ``ok``."""
        done = subprocess.run(
            self.entered(argv),
            env={**self.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        said = f"{self.name}: {' '.join(argv)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0 or not ok, said
        return done.stdout

    def path(self, inside: str) -> Path:
        """A path of the machine as this computer sees it."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def processes(self) -> dict[int, str]:
        """Command lines of all processes of the machine but the first, by pid on this computer."""
        found = dict[int, str]()
        own = Path(f"/proc/{self.pid}/ns/pid").readlink()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.pid:
                continue
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                if line and (entry / "ns" / "pid").readlink() == own:
                    found[int(entry.name)] = line.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def left_in_memory(self) -> list[str]:
        """Files in the shared memory of the machine."""
        root = self.path("/dev/shm")
        return sorted(str(one.relative_to(root)) for one in root.rglob("*") if one.is_file())

    def link(self, *, up: bool) -> None:
        """Plug the cable in, or pull it."""
        _do("ip", "-n", self.namespace, "link", "set", INTERFACE, "up" if up else "down")

    def deaf_to(self, other: Machine, *, on: bool = True) -> None:
        """Drop what this machine sends to ``other``, which is still heard: a partition of one way."""
        _do("ip", "-n", self.namespace, "route", "add" if on else "del", "blackhole", f"{other.address}/32")

    def shape(self, *what: str) -> None:
        """Slow what the machine sends, in the words of ``tc``: ``tbf rate 100mbit ...``, ``netem delay 20ms``.

        Without words it sends at full speed again. Raises RuntimeError where the kernel has no such discipline.
        """
        at = ("dev", INTERFACE, "root")
        subprocess.run(["tc", "-n", self.namespace, "qdisc", "del", *at], capture_output=True)
        if what:
            _do("tc", "-n", self.namespace, "qdisc", "add", *at, *what)


def _sweep() -> None:
    """Remove the namespaces of processes that ended without doing so."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        name = line.split()[0] if line.strip() else ""
        if name.startswith(_PREFIX) and not Path(f"/proc/{name.split('-')[2]}").exists():
            _remove(name)


def _remove(namespace: str) -> None:
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    deadline = time.monotonic() + END_S
    while subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split():
        assert time.monotonic() < deadline, f"processes of {namespace} do not end"
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


@contextlib.contextmanager
def bed(count: int, *, subnet: int = 77, environ: Mapping[str, str] | None = None) -> Iterator[list[Machine]]:
    """``count`` machines ``m0``, ``m1``, ... at 10.SUBNET.0.1, 10.SUBNET.0.2, ...; all end with the block."""
    assert 1 <= count <= MACHINES_MAX
    _sweep()
    base = f"{_PREFIX}-{os.getpid()}-{subnet}"
    hub, made = f"{base}-hub", list[Machine]()
    names = {name: value for name, value in os.environ.items() if not name.startswith(("ROTA_", "RAY_"))}
    try:
        _do("ip", "netns", "add", hub)
        _do("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", hub, "link", "set", "br0", "up")
        for index in range(count):
            one = Machine(
                name=f"m{index}",
                address=f"10.{subnet}.0.{index + 1}",
                namespace=f"{base}-{index}",
                environ={**names, **(environ or {}), "TMPDIR": "/tmp"},
                disk=Path(tempfile.mkdtemp(prefix=f"{base}-{index}-", dir=DISKS)),
            )
            made.append(one)
            _do("ip", "netns", "add", one.namespace)
            port = f"p{index}"
            _do("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", one.namespace)
            _do("ip", "-n", hub, "link", "set", port, "master", "br0", "up")
            _do("ip", "-n", one.namespace, "addr", "add", f"{one.address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _do("ip", "-n", one.namespace, "link", "set", device, "up")
            one.start()
        yield made
    finally:
        for one in made:
            one.send_kill()
        for one in made:
            one.kill()
            _remove(one.namespace)
            shutil.rmtree(one.disk, ignore_errors=True)
        _remove(hub)
