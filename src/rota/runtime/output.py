"""Output of instances as stamped lines: write the stamp, read a tail without the rest, merge by time, follow.

One file an instance, ``<role>-<rank>.log``; one line each ``<ISO time> <attempt>/<epoch> <stream> <text>``, where
stream is ``out``, ``err`` or ``rota`` (what Rota itself says of the instance).
"""

from __future__ import annotations

import heapq
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

BLOCK_BYTES = 64 * 1024
LINE_BYTES_MAX = 64 * 1024
_STREAM_NAMES = {"stdout": "out", "stderr": "err"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of an instance. ``offset`` is its place in the file; ``end`` where the next line begins."""

    instance: str
    offset: int
    end: int
    ts: float
    attempt: int
    epoch: int
    stream: str
    text: str


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


def read_lines(path: Path, offset: int, *, bytes_max: int = 4 * 2**20) -> list[LogLine]:
    """Whole lines from ``offset`` on, at most about ``bytes_max``; a last line without its end is left for later."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(bytes_max)
    except FileNotFoundError:
        return []
    end = data.rfind(b"\n") + 1
    if not end and len(data) >= LINE_BYTES_MAX:
        end = len(data)  # one endless line: hand it out in pieces
    return list(_parse(instance_of(path), data[:end], offset))


def tail_lines(path: Path, count: int) -> list[LogLine]:
    """The last ``count`` lines, read from the end."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return []
    start, data = size, b""
    with path.open("rb") as file:
        while start > 0 and data.count(b"\n") <= count:
            step = min(BLOCK_BYTES, start)
            start -= step
            file.seek(start)
            data = file.read(step) + data
    if start > 0:  # the first piece is a part of a line
        cut = data.find(b"\n") + 1
        start, data = start + cut, data[cut:]
    data = data[: data.rfind(b"\n") + 1]
    return list(_parse(instance_of(path), data, start))[-count:] if count else []


def find_offset(path: Path, since: float) -> int:
    """Where the first line at or after ``since`` begins, by bisection over blocks."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return 0
    with path.open("rb") as file:
        low, high = 0, size // BLOCK_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            ts = _first_stamp(file.fileno(), middle * BLOCK_BYTES)
            low, high = (low, middle - 1) if ts is None or ts >= since else (middle, high)
    offset = low * BLOCK_BYTES
    if offset:
        offset += _line_start(path, offset)  # the block begins inside a line
    while lines := read_lines(path, offset):
        for line in lines:
            if line.ts >= since:
                return line.offset
        offset = lines[-1].end
    return size


def _line_start(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        file.seek(offset)
        return len(file.readline(LINE_BYTES_MAX))


def _first_stamp(fd: int, offset: int) -> float | None:
    data = os.pread(fd, 2 * BLOCK_BYTES, offset)
    for raw in data.split(b"\n")[1:]:
        stamp = raw.split(b" ", 1)[0].decode(errors="replace")
        if (ts := _wall(stamp)) is not None:
            return ts
    return None


def merge(files: Iterable[list[LogLine]]) -> Iterator[LogLine]:
    """Lines of several files in the order of time; lines of one file keep their order."""
    return heapq.merge(*files, key=lambda line: line.ts)


def follow_batch(files: Mapping[str, Path], offsets: dict[str, int]) -> list[LogLine]:
    """What was written since ``offsets``, merged; the offsets are moved on."""
    batches = []
    for instance, path in files.items():
        lines = read_lines(path, offsets.get(instance, 0))
        if lines:
            offsets[instance] = lines[-1].end
            batches.append(lines)
    return list(merge(batches))


def _parse(instance: str, data: bytes, offset: int) -> Iterator[LogLine]:
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
        yield LogLine(
            instance=instance, offset=offset, end=end, ts=ts, attempt=attempt, epoch=epoch, stream=stream, text=text
        )
        offset = end


def _wall(stamp: str) -> float | None:
    if len(stamp) < 20 or stamp[4] != "-" or stamp[10] != "T":
        return None
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return None
