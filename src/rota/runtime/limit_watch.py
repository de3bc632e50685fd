"""Watcher of an instance's limits: ends it and all it started when it uses more than its role may.

A program of its own, started with ``python -I -S``, so that neither a busy interpreter nor an engine that ends the
instance holds it up; it leaves its parent at once. Argument: a JSON object with ``pid`` and ``start`` (clock ticks
since boot) of the instance, ``limits`` (``memory`` and ``disk`` in bytes, ``processes``; 0: none), ``folders``
that ``disk`` counts, and ``report``, the file in which it says what was exceeded before it ends anything.

Memory is anonymous and shared pages and swap of the processes, each page of several processes in equal parts, less what
the instance had at its start. A process that left the tree stays a member once it was seen in it.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time

TICK_S = 0.1
"""Pause between two looks at the processes that are known."""
TABLE_LOAD_MAX, TABLE_PAUSE_MAX_S = 0.02, 1.0
"""New ones are looked for when the machine has made any, for at most this share of the time."""
DISK_TICK_S, DISK_LOAD_MAX = 0.5, 0.02
STOP_ROUNDS_MAX = 50
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
KINDS = ("memory", "processes", "disk")
_FIELDS = {"memory": "resources.memory", "processes": "limits.processes", "disk": "limits.disk"}

Table = dict[int, tuple[int, int, str]]
"""By process: its parent, its start in clock ticks, the letter of its state."""


def exceeded(limits: dict[str, int], used: dict[str, int]) -> dict[str, object] | None:
    """What of ``used`` is above its limit, with both figures and a sentence; None when all is within."""
    for kind, field in _FIELDS.items():
        limit, now = limits.get(kind, 0), used.get(kind, 0)
        if limit and now > limit:
            shown = str if kind == "processes" else size
            what = {"memory": "of memory", "processes": "processes", "disk": "in the folders of its job"}[kind]
            text = f"used {shown(now)} {what}; the limit is {shown(limit)} ({field} of its role)"
            return {"kind": kind, "used": now, "limit": limit, "text": text}
    return None


def size(value: float) -> str:
    """Bytes for people: ``512MiB``."""
    step = 0
    while value >= 1024 and step < len(_UNITS) - 1:
        value, step = value / 1024, step + 1
    return f"{value:.4g}{_UNITS[step]}"


def members(table: Table, root: int, known: dict[int, int]) -> dict[int, int]:
    """Living processes of an instance, with their starts: the tree below ``root``, and below all that were in it."""
    below: dict[int, list[int]] = {}
    for pid, (parent, _, _) in table.items():
        below.setdefault(parent, []).append(pid)
    found: dict[int, int] = {}
    left = [pid for pid, start in known.items() if pid in table and table[pid][1] == start]
    left += [root] if root in table else []
    while left:
        pid = left.pop()
        if pid not in found:
            found[pid] = table[pid][1]
            left += below.get(pid, ())
    return {pid: start for pid, start in found.items() if table[pid][2] not in "ZX"}


def processes() -> Table:
    """All processes of this machine."""
    found: Table = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - see _text
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = _text(f"/proc/{name}/stat").rpartition(")")[2].split()
                found[int(name)] = (int(fields[1]), int(fields[19]), fields[0])
    return found


def memory(pids: list[int], enough: int) -> int:
    """Bytes that the processes use; a quick sum that counts shared pages several times while that is enough."""
    quick = sum(_kib(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:", "VmSwap:")) for pid in pids)
    if quick <= enough:
        return quick
    exact = [_kib(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")) for pid in pids]
    return sum(exact) or quick


def _kib(path: str, names: tuple[str, ...]) -> int:
    try:
        rows = [line.split() for line in _text(path).splitlines()]
    except OSError:  # it has ended
        return 0
    return sum(int(row[1]) * 1024 for row in rows if len(row) > 1 and row[0] in names)


def _text(path: str) -> str:
    with open(path) as file:  # noqa: PTH123 - pathlib takes twice the time to import that all else here takes
        return file.read()


def disk(folders: list[str]) -> int:
    """Bytes on the disk below the folders; links are not followed."""
    total, left = 0, list(folders)
    while left:
        with contextlib.suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


class LimitWatch:
    """One instance and all it started."""

    def __init__(self, pid: int, start: int, limits: dict[str, int], folders: list[str]) -> None:
        self.pid, self.limits, self.folders = pid, limits, folders
        self.known = {pid: start}
        self.used: dict[str, int] = {}
        self._base = memory([pid], 0) if limits.get("memory") else 0
        self._newest, self._next_s = "", 0.0

    def look(self) -> bool:
        """Measure; False when the instance has ended."""
        began, newest = time.monotonic(), _text("/proc/loadavg").split()[-1]
        if newest != self._newest and began >= self._next_s:
            self.know()
            pause = (time.monotonic() - began) / TABLE_LOAD_MAX
            self._newest, self._next_s = newest, began + min(pause, TABLE_PAUSE_MAX_S)
        if not _is_same(self.pid, self.known.get(self.pid, -1)):
            return False
        self.used["processes"] = len(self.known)
        if self.limits.get("memory"):
            enough = self.limits["memory"] + self._base
            self.used["memory"] = max(0, memory(list(self.known), enough) - self._base)
        return True

    def know(self) -> None:
        """Look up which processes belong to it now; this process was started by it, and does not."""
        table = processes()
        table.pop(os.getpid(), None)
        self.known = members(table, self.pid, self.known)

    def follow_disk(self) -> None:
        """For ever: what the folders hold; a large tree is read less often."""
        while True:
            began = time.monotonic()
            self.used["disk"] = disk(self.folders)
            time.sleep(max(DISK_TICK_S, (time.monotonic() - began) / DISK_LOAD_MAX))

    def stop(self) -> None:
        """Hold all of them, the instance first: what does not run starts nothing, and reports no end of another."""
        held: dict[int, int] = {}
        for _ in range(STOP_ROUNDS_MAX):
            new = {pid: start for pid, start in self.known.items() if pid not in held}
            if not new:
                return
            _send(new, signal.SIGSTOP)
            held |= new
            self.know()

    def kill(self) -> None:
        """End all of them, the instance first."""
        _send(self.known, signal.SIGKILL)


def _send(which: dict[int, int], signum: int) -> None:
    """To each process that is still the same: its number may have been given to another one."""
    for pid, start in which.items():
        with contextlib.suppress(ProcessLookupError):
            if _is_same(pid, start):
                os.kill(pid, signum)


def _is_same(pid: int, start: int) -> bool:
    """Whether the process lives that began then."""
    try:
        fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and int(fields[19]) == start


def run(watch: LimitWatch, report: str) -> None:
    """Look until the instance has ended, or end it."""
    if watch.limits.get("disk"):
        threading.Thread(target=watch.follow_disk, daemon=True).start()
    while watch.look():
        if (found := exceeded(watch.limits, watch.used)) is not None:
            watch.stop()
            with contextlib.suppress(OSError):  # a full disk: it ends all the same
                _write(report, json.dumps(found))
                print(f"rota: the instance ends: it {found['text']}", file=sys.stderr, flush=True)  # noqa: T201 - its only output
            watch.kill()
            return
        time.sleep(TICK_S)


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120 - see _text
    partial = f"{path}.{os.getpid()}"
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(partial, path)  # noqa: PTH105 - see _text


def main() -> None:
    """Read the argument, leave the parent, watch."""
    asked = json.loads(sys.argv[1])
    watch = LimitWatch(asked["pid"], asked["start"], asked["limits"], asked["folders"])
    if os.fork():
        os._exit(0)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    run(watch, asked["report"])


if __name__ == "__main__":
    main()
