"""Who asked for which change, from where, and what came of it: two lines a request, below ``$ROTA_HOME``."""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Iterator
from heapq import merge
from pathlib import Path
from typing import Any, cast

from rota.runtime.clock import Clock, iso
from rota.runtime.environ import PRIVATE_FILE
from rota.service.models.accounts import AuditLine
from rota.spec.errors import StoreUnavailable

FILE_BYTES_MAX = 32 * 2**20
"""At this size a file becomes ``audit.jsonl.1`` in place of the one before."""
STRANGERS_MAX, STRANGERS_WINDOW_S = 60, 60.0
"""Lines about requests of nobody known in one window; the rest are counted, lest a flood wash the others out."""


class Audit:
    """The file of requests that change something, refused ones too.

    ``begin`` writes who asks for what before it is done, and nothing is done that could not be written; ``end`` adds
    the status before the answer leaves. So a full disk refuses a command and never hides one that was acknowledged. Not
    in the event log: what was done stands there already (``by``), and what was refused did not happen. Strangers have a
    file of their own: they push out their own lines alone. For one thread.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._strangers_path = path, path.with_name(f"strangers-{path.name}")
        self._clock = clock
        self._window_s, self._strangers, self._left_out = float("-inf"), 0, 0

    def begin(self, line: dict[str, Any]) -> None:
        """Write who asks for what; ``request_id`` names it. Raises StoreUnavailable when that is impossible."""
        try:
            self._write({"at": iso(self._clock.wall_s()), **line, "status": None})
        except OSError as error:
            raise self._refused(error) from error

    def add(self, request_id: str, **more: str | bool) -> None:
        """Say more of a request before it is done. Raises StoreUnavailable when that is impossible."""
        try:
            self._write({"request_id": request_id, **more})
        except OSError as error:
            raise self._refused(error) from error

    def end(self, request_id: str, status: int) -> None:
        """Write what came of it. Raises OSError; that it was begun stands there."""
        self._write({"request_id": request_id, "status": status})

    def stranger(self, line: dict[str, Any]) -> None:
        """Write a refusal of somebody who showed no good token; of a flood only how many. Raises OSError."""
        now = self._clock.monotonic_s()
        if now - self._window_s >= STRANGERS_WINDOW_S:
            self._window_s, self._strangers = now, 0
        self._strangers += 1
        if self._strangers > STRANGERS_MAX:
            self._left_out += 1
            return
        left_out = {"left_out": self._left_out} if self._left_out else {}
        self._write({"at": iso(self._clock.wall_s()), **line, **left_out}, self._strangers_path)
        self._left_out = 0

    def _refused(self, error: OSError) -> StoreUnavailable:
        text = f"nothing was done: the audit {self._path} cannot be written: {error.strerror}"
        return StoreUnavailable(text, hint="free space on that disk, then ask again")

    def _write(self, line: dict[str, Any], path: Path | None = None) -> None:
        """Add one line. Blocks for as long as one small write takes."""
        path = path or self._path
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)
        try:
            raw = json.dumps(line, ensure_ascii=False).encode() + b"\n"
            size = os.fstat(file).st_size
            if os.write(file, raw) < len(raw):
                os.ftruncate(file, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            full = size + len(raw) > FILE_BYTES_MAX
        finally:
            os.close(file)
        if full:
            path.replace(_older(path))

    def newest(self, count: int, *, user: str = "") -> list[AuditLine]:
        """The last requests, the newest first; of one user if named. A line that a crash cut short is left out.

        ``status`` is None of one that is under way or whose service died before it answered.
        """
        found: deque[dict[str, Any]] = deque(maxlen=count)
        open_ones: dict[str, dict[str, Any]] = {}
        for line in _lines(self._path):
            if "at" not in line:
                open_ones.get(line.get("request_id", ""), {}).update(line)
                if "status" in line:
                    open_ones.pop(line.get("request_id", ""), None)
            elif not user or line.get("user") == user:
                found.append(line)
                if line.get("status") is None:
                    open_ones[line.get("request_id", "")] = line
        strangers = deque([] if user else _lines(self._strangers_path), maxlen=count)
        newest = list(merge(found, strangers, key=lambda line: line["at"]))[: -count - 1 : -1]
        return cast("list[AuditLine]", newest)


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for one in (_older(path), path):
        if one.exists():
            with one.open(encoding="utf-8") as file:
                for text in file:
                    try:
                        yield json.loads(text)
                    except ValueError:
                        continue
