"""Output of instances as stamped lines: write the stamp, read a tail without the rest, merge by time, follow.

One file an instance, ``<role>-<rank>.log``; one line each ``<ISO time> <attempt>/<epoch> <stream> <text>``, where
stream is ``out``, ``err`` or ``rota`` (what Rota itself says of the instance).
"""

from __future__ import annotations

import contextlib
import heapq
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

BLOCK_BYTES = 64 * 1024
LINE_BYTES_MAX = 64 * 1024
_STREAM_NAMES = {"stdout": "out", "stderr": "err"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StampedLine:
    """One line of an instance. ``offset`` is its place in the file; ``end`` where the next line begins."""

    instance: str
    offset: int
    end: int
    ts: float
    attempt: int
    epoch: int
    stream: str
    text: str
    node: str = ""
    """The machine that has the line; empty where the reader has it itself."""


class LogFile(Protocol):
    """The log of one instance, wherever it lies; ``node`` as in ``StampedLine``. Raises OSError where unreadable."""

    @property
    def instance(self) -> str: ...
    @property
    def node(self) -> str: ...
    def size(self) -> int:
        """Bytes that are there now; 0 without a file."""
        ...

    def read(self, offset: int, count: int) -> bytes:
        """At most ``count`` bytes; fewer at the end, and where one read gives no more."""
        ...


@dataclass(frozen=True, slots=True)
class LocalLog:
    """A log on this machine."""

    path: Path
    node: str = ""

    @property
    def instance(self) -> str:
        return instance_of(self.path)

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def read(self, offset: int, count: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                return os.pread(file.fileno(), count, offset)
        except FileNotFoundError:
            return b""


def log_name(role: str, rank: int) -> str:
    """File name of the output of an instance."""
    return f"{role}-{rank}.log"


def instance_of(path: Path) -> str:
    """``role/rank`` of a log file."""
    role, _, rank = path.stem.rpartition("-")
    return f"{role}/{rank}"


def log_files(folder: Path, *, role: str = "", rank: int | None = None) -> dict[str, Path]:
    """The files of a job by instance, those of one role or instance alone if asked."""
    wanted = f"{role}/{rank}" if rank is not None else ""
    found = {instance_of(path): path for path in sorted(folder.glob("*.log"))}
    return {
        instance: path
        for instance, path in found.items()
        if (not role or instance.rpartition("/")[0] == role) and (not wanted or instance == wanted)
    }


def read_lines(log: Path | LogFile, offset: int, *, bytes_max: int = 4 * 2**20) -> list[StampedLine]:
    """Whole lines from ``offset`` on, at most about ``bytes_max``; a last line without its end is left for later."""
    log = _log(log)
    data = log.read(offset, bytes_max)
    end = data.rfind(b"\n") + 1
    if not end and len(data) >= LINE_BYTES_MAX:
        end = len(data)  # one endless line: hand it out in pieces
    return list(_parse(log, data[:end], offset))


def last_line(log: Path) -> str:
    """The last line of a log that is not stamped, cut to 500 characters; empty when there is none."""
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else ""
    return ""


def tail_lines(log: Path | LogFile, count: int) -> list[StampedLine]:
    """The last ``count`` lines, read from the end."""
    log = _log(log)
    start, data = log.size(), b""
    while start > 0 and data.count(b"\n") <= count:
        step = min(BLOCK_BYTES, start)
        start -= step
        data = log.read(start, step) + data
    if start > 0:  # blocks are cut anywhere: half a line has no stamp
        cut = data.find(b"\n") + 1
        start, data = start + cut, data[cut:]
    data = data[: data.rfind(b"\n") + 1]
    return list(_parse(log, data, start))[-count:] if count else []


def find_offset(log: Path | LogFile, since: float) -> int:
    """Where the first line at or after ``since`` begins, by bisection over blocks."""
    log = _log(log)
    size = log.size()
    low, high = 0, size // BLOCK_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        ts = _first_stamp(log, middle * BLOCK_BYTES)
        low, high = (low, middle - 1) if ts is None or ts >= since else (middle, high)
    offset = low * BLOCK_BYTES
    if offset:  # the time of half a line cannot be read
        head = log.read(offset, LINE_BYTES_MAX)
        offset += head.find(b"\n") + 1 or len(head)
    while lines := read_lines(log, offset):
        for line in lines:
            if line.ts >= since:
                return line.offset
        offset = lines[-1].end
    return size


def _log(log: Path | LogFile) -> LogFile:
    return LocalLog(log) if isinstance(log, Path) else log


def _first_stamp(log: LogFile, offset: int) -> float | None:
    data = log.read(offset, 2 * BLOCK_BYTES)
    for raw in data.split(b"\n")[1:]:
        stamp = raw.split(b" ", 1)[0].decode(errors="replace")
        if (ts := _wall(stamp)) is not None:
            return ts
    return None


def merge(files: Iterable[list[StampedLine]]) -> Iterator[StampedLine]:
    """Lines of several files in the order of time; lines of one file keep their order."""
    return heapq.merge(*files, key=lambda line: line.ts)


def follow_batch(files: Mapping[str, Path | LogFile], offsets: dict[str, int]) -> list[StampedLine]:
    """What was written since ``offsets``, merged; the offsets are moved on. A file that cannot be read is left out."""
    batches = []
    for key, log in files.items():
        try:
            lines = read_lines(log, offsets.get(key, 0))
        except OSError:
            continue
        if lines:
            offsets[key] = lines[-1].end
            batches.append(lines)
    return list(merge(batches))


def key_of(line: StampedLine | LogFile) -> str:
    """The file of a line: ``role/rank``, and ``@node`` where another machine has it."""
    return f"{line.instance}@{line.node}" if line.node else line.instance


def _parse(log: LogFile, data: bytes, offset: int) -> Iterator[StampedLine]:
    instance, node = log.instance, log.node
    ts, attempt, epoch = 0.0, 0, 0
    for raw in io.BytesIO(data):
        end = offset + len(raw)
        line = raw.rstrip(b"\r\n").decode(errors="replace")
        stamp, _, rest = line.partition(" ")
        when = _wall(stamp)
        stream, text = "out", line
        if when is not None:
            run, _, rest = rest.partition(" ")
            first, _, second = run.partition("/")
            if first.isdigit() and second.isdigit():
                ts, attempt, epoch = max(ts, when), int(first), int(second)
                stream, _, text = rest.partition(" ")
                stream = _STREAM_NAMES.get(stream, stream)
        yield StampedLine(
            instance=instance,
            offset=offset,
            end=end,
            ts=ts,
            attempt=attempt,
            epoch=epoch,
            stream=stream,
            text=text,
            node=node,
        )
        offset = end


def _wall(stamp: str) -> float | None:
    if len(stamp) < 20 or stamp[4] != "-" or stamp[10] != "T":
        return None
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return None
