"""Who asked for which change, from where, and what came of it: one line a request, below ``$ROTA_HOME``."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rota.runtime.environ import PRIVATE_FILE

FILE_BYTES_MAX = 32 * 2**20
"""At this size the file becomes ``audit.jsonl.1`` in place of the one before."""


class Audit:
    """The file of requests that change something, refused ones too.

    A line is written before its answer leaves, so a killed service loses none that anybody was told of. Not in the
    event log: what was done stands there already (``by``), and what was refused did not happen.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._old = path, path.with_name(f"{path.name}.1")

    def write(self, line: dict[str, Any]) -> None:
        """Add one line. Blocks for as long as one small write takes."""
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)
        try:
            os.write(file, json.dumps(line, ensure_ascii=False).encode() + b"\n")
            full = os.fstat(file).st_size > FILE_BYTES_MAX
        finally:
            os.close(file)
        if full:
            self._path.replace(self._old)

    def newest(self, count: int, *, user: str = "") -> list[dict[str, Any]]:
        """The last lines, the newest first; of one user if named. A line that a crash cut short is left out."""
        found = (line for line in self._lines() if not user or line.get("user") == user)
        return list(reversed(deque(found, maxlen=count)))

    def _lines(self) -> Iterator[dict[str, Any]]:
        for path in (self._old, self._path):
            if path.exists():
                with path.open(encoding="utf-8") as file:
                    for text in file:
                        try:
                            yield json.loads(text)
                        except ValueError:
                            continue
