"""Tracing of calls in this process: open waits with their ages, finished spans, counts, place in collectives."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rota.job.core.progress import Span, WaitEdge, WaitKind
from rota.runtime.clock import Clock
from rota.spec import codec

WAITS_MAX = 64
"""Maximum number of open waits in one heartbeat, the oldest first."""
FRAMES_MAX = 80
ITEMS_MAX = 8
"""Items of a list or dict whose size is looked at; the rest is taken to be alike."""
DEPTH_MAX = 4


@dataclass(slots=True)
class Count:
    """Calls of one kind: how many came back, how many of them without an answer, seconds waited, bytes both ways."""

    n: int = 0
    failed: int = 0
    seconds: float = 0.0
    bytes: int = 0


class _Open(NamedTuple):
    target: str
    kind: WaitKind
    what: str
    since_s: float
    call: str


class Waiting:
    """Open waits of one process; safe to use from any thread, about 1 us a wait.

    ``counts`` maps (kind, role or thing waited for, operation) to what came of it: the observed edges of the job.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.spans = Spans(clock)
        self._open: dict[int, _Open] = {}
        self._tokens = itertools.count(1)
        self.counts: dict[tuple[str, str, str], Count] = {}

    def begin(self, target: str, kind: WaitKind, what: str = "", *, call: str = "") -> int:
        """A wait for ``target`` (``role/rank``, a role, ``master`` or any name) begins; its token."""
        token = next(self._tokens)
        self._open[token] = _Open(target, kind, what, self._clock.monotonic_s(), call)
        return token

    def end(self, token: int, *, ok: bool = True, size: int = 0) -> None:
        """The wait is over; ``size`` in bytes is what was moved."""
        was = self._open.pop(token, None)
        if was is None:
            return
        took_s = self.spans.add(was.kind, was.what, was.since_s, target=was.target, call=was.call)
        what = was.what if was.kind in ("call", "weights", "stream") else ""
        key = (was.kind, was.target.partition("/")[0], what)
        count = self.counts.get(key) or self.counts.setdefault(key, Count())
        count.n += 1
        count.failed += not ok
        count.seconds += took_s
        count.bytes += size

    @contextlib.contextmanager
    def on(self, target: str, kind: WaitKind, what: str = "") -> Iterator[None]:
        """Waiting for ``target`` while the block runs."""
        token = self.begin(target, kind, what)
        try:
            yield
        finally:
            self.end(token)

    def read(self, source: str) -> tuple[WaitEdge, ...]:
        """The open waits of ``source``, the oldest first."""
        now_s = self._clock.monotonic_s()
        waits = sorted(self._open.copy().values(), key=lambda one: one.since_s)[:WAITS_MAX]
        return tuple(
            WaitEdge(
                source=source, target=one.target, kind=one.kind, what=one.what, age_s=round(now_s - one.since_s, 3)
            )
            for one in waits
        )


def size_of(value: object, depth: int = 0) -> int:
    """About how many bytes a value is: exact for arrays, tensors and texts, an estimate for what holds them."""
    if isinstance(value, (bytes, str, bytearray)):
        return len(value)
    found = getattr(value, "nbytes", None)
    if isinstance(found, int):
        return found
    if depth == DEPTH_MAX or not isinstance(value, (tuple, list, dict, Mapping, Sequence)):
        return 8
    some = list(itertools.islice(value.values() if isinstance(value, Mapping) else value, ITEMS_MAX))
    return sum(size_of(one, depth + 1) for one in some) * len(value) // len(some) if some else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Position of an instance in the collectives of torch: of its own process, or of the ranks of its command.

    ``entered`` counts those of the default process group (-1: no group), ``inside`` is the Python call under way (empty
    for one that DDP starts in backward). ``activity`` changes whenever the instance moves: it counts the collectives of
    all groups and, for a command, the modules that its ranks have imported. ``held_up`` says which rank of a command
    the others wait for, ``stopped_s`` for how long a rank has been stopped by a signal.
    """

    entered: int = -1
    inside: str = ""
    activity: int = 0
    held_up: str = ""
    stopped_s: float = 0.0


def own_collectives() -> Collectives:
    """The position of this process; torch itself numbers the collectives of a ``ProcessGroup``."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    # Another thread may be importing it: then it is there without its attributes.
    group = getattr(getattr(module, "GroupMember", None), "WORLD", None)
    if group is None or (entered := _sequence_number(group)) is None:
        return Collectives()
    groups = list(getattr(getattr(module, "_world", None), "pg_map", None) or (group,))
    return Collectives(entered=entered, inside=_inside(), activity=sum(_sequence_number(one) or 0 for one in groups))


def _sequence_number(group: Any) -> int | None:
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return None


def _inside() -> str:
    for frame in sys._current_frames().values():
        here, depth = frame, 0
        while here is not None and depth < FRAMES_MAX:
            if here.f_code.co_filename.endswith("distributed_c10d.py"):
                return here.f_code.co_name
            here, depth = here.f_back, depth + 1
    return ""


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
    """The spans in a folder, as ``spans_of`` gives them."""
    return spans_of((path.name, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.*")))


def spans_of(files: Iterable[tuple[str, str]]) -> dict[str, list[Span]]:
    """The spans of every instance ``role/rank`` of a job, in the order in which they ended; a torn line is left out.

    ``files`` are names and texts.
    """
    found: dict[str, list[Span]] = {}
    for name, text in sorted(files, key=lambda file: not file[0].endswith(".old")):
        stem, _, kind = name.rpartition(".")
        role, _, rank = stem.rpartition("-")
        if kind not in ("old", "jsonl"):
            continue
        spans = found.setdefault(f"{role}/{rank}", [])
        for line in text.splitlines():
            try:
                spans.append(codec.from_json_value(Span, json.loads(line)))
            except (ValueError, TypeError, KeyError):
                continue
    return found
