"""Spans of one process: what it ran and what it waited for, and when; a bounded file beside its log."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

from rota.job.core.timeline import Span
from rota.runtime.clock import Clock
from rota.spec import codec

SPANS_MAX = 5000
"""Spans kept between two writes; of more than that the oldest go."""
BYTES_MAX = 8 * 2**20
"""A file that is longer is set aside once: two such files an instance are the whole past that a trace shows."""


class Spans:
    """Collects spans and appends them to a file; ``add`` may be called from any thread, about 1 us."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._new: deque[tuple[str, str, float, float, str, str]] = deque(maxlen=SPANS_MAX)

    def add(self, kind: str, name: str, since_s: float, *, target: str = "", call: str = "") -> float:
        """Something ended now that began at ``since_s`` of the monotonic clock; the seconds that it took."""
        took_s = self._clock.monotonic_s() - since_s
        self._new.append((kind, name, self._clock.wall_s() - took_s, took_s, target, call))
        return took_s

    def write(self, path: Path) -> None:
        """Append what is new. Blocks on the disk. Raises OSError."""
        lines: list[str] = []
        while self._new:
            kind, name, at_s, took_s, target, call = self._new.popleft()
            span = Span(kind=kind, name=name, at_s=round(at_s, 6), s=round(took_s, 6), target=target, call=call)
            lines.append(json.dumps(codec.to_json_value(span), separators=(",", ":")))
        if not lines:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > BYTES_MAX:
            path.replace(path.with_suffix(".old"))
        with path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


def read_spans(folder: Path) -> dict[str, list[Span]]:
    """The spans of every instance ``role/rank`` of a job, in the order in which they ended; a torn line is left out."""
    found: dict[str, list[Span]] = {}
    for path in sorted(folder.glob("*.old")) + sorted(folder.glob("*.jsonl")):
        role, _, rank = path.stem.rpartition("-")
        spans = found.setdefault(f"{role}/{rank}", [])
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                spans.append(codec.from_json_value(Span, json.loads(line)))
            except (ValueError, TypeError, KeyError):
                continue
    return found
