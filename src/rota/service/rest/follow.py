"""Logs and events as they happen: server-sent events that resume without a gap."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi.sse import format_sse_event

from rota.runtime.clock import iso
from rota.runtime.output import LogLine, find_offset, follow_batch, log_files, merge, read_lines, tail_lines
from rota.service.control.loop import ServiceLoop
from rota.service.views.story import JobStory
from rota.service.webhooks import without_password
from rota.spec.errors import BadInput, NotAllowed, NoToken, UnknownName
from rota.spec.events import JobEnded, Record, WebhookSet, event_to_json
from rota.spec.ids import JobId

REFUSALS = (NotAllowed, NoToken, UnknownName)
"""What tells a stream under way that its reader may not go on."""
KEEP_ALIVE_S = 15.0
LOG_POLL_S = 0.15
BEHIND_MAX = 10_000
SETTLE_S = 1.0
LINES_MAX = 10_000
MARK_EVERY = 50
OFFSET_DIGITS_MAX = 18


def record_document(record: Record) -> dict[str, Any]:
    """One event of the log; the address of a webhook without its password."""
    event = record.event
    if isinstance(event, WebhookSet):  # one of before, when it was kept whole
        event = replace(event, url=without_password(event.url))
    return {
        "number": record.number,
        "job": record.job,
        "seq": record.seq,
        "at": iso(record.at),
        **event_to_json(event),
    }


def line_document(line: LogLine) -> dict[str, Any]:
    """One line of output."""
    return {
        "kind": "LogLine",
        "instance": line.instance,
        "attempt": line.attempt,
        "epoch": line.epoch,
        "offset": line.offset,
        "ts": iso(line.ts) if line.ts else None,
        "stream": line.stream,
        "text": line.text,
    }


def frame(data: Any, *, event: str | None = None, id: str | None = None) -> bytes:
    """One server-sent event."""
    return format_sse_event(data_str=json.dumps(data, ensure_ascii=False), event=event, id=id)


async def follow_events(
    loop: ServiceLoop,
    view: Callable[[], Callable[[Record], dict[str, Any] | None]],
    *,
    job: JobId | None,
    after: int,
    kind: str = "",
) -> AsyncIterator[bytes]:
    """Every record after ``after``, then each new one, of all kinds or of one; of one job until it ended.

    ``view`` is asked at each batch and each sign of life for what makes the document of a record, or None of one that
    this reader may not see; when it raises NotAllowed, NoToken or UnknownName the stream ends, and a reader that comes
    back is told why.

    A reader that is more than ``BEHIND_MAX`` records behind gets ``reset`` with the newest number and goes on there.
    """
    cursor = after
    if job is None and loop.installation.number - cursor > BEHIND_MAX:
        cursor = loop.installation.number
        yield frame({"number": cursor}, event="reset", id=str(cursor))
    while not loop.stopping:
        records = await asyncio.to_thread(loop.log.read, after=cursor, job=job, limit=1000)
        try:
            shown = view()
        except REFUSALS:
            return
        for record in records:
            cursor = record.number
            document = shown(record)
            if document is not None and (not kind or document["kind"] == kind):
                yield frame(document, event="event", id=str(cursor))
            if job is not None and isinstance(record.event, JobEnded):
                yield frame({"state": record.event.state}, event="end")
                return
        if not records:
            if job is not None and _is_over(loop, job):
                yield frame({}, event="end")
                return
            try:
                await asyncio.wait_for(loop.wait_for(loop.installation.number + 1), KEEP_ALIVE_S)
            except TimeoutError:
                yield format_sse_event(comment="alive")


def _is_over(loop: ServiceLoop, job: JobId) -> bool:
    return job not in loop.installation.live


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """Which lines: of a role or instance, from a cursor, a time, or the last ``tail`` ones; ``grep`` is plain text."""

    role: str = ""
    rank: int | None = None
    cursor: str = ""
    since: float | None = None
    until: float | None = None
    tail: int | None = None
    grep: str = ""
    stream: str = ""
    attempt: int | None = None

    def wants(self, line: LogLine) -> bool:
        """True when the line passes every filter."""
        return (
            (not self.grep or self.grep in line.text)
            and (not self.stream or line.stream == self.stream)
            and (self.attempt is None or line.attempt == self.attempt)
            and (self.until is None or line.ts <= self.until)
            and (self.since is None or line.ts >= self.since)
        )


def write_cursor(offsets: dict[str, int]) -> str:
    """``role/rank:offset`` of every file: where to go on, exactly."""
    return ",".join(f"{instance}:{offset}" for instance, offset in sorted(offsets.items()))


def read_cursor(text: str) -> dict[str, int]:
    """Inverse of ``write_cursor``. Raises BadInput."""
    offsets: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        instance, _, offset = part.rpartition(":")
        if not instance or not offset.isdecimal() or len(offset) > OFFSET_DIGITS_MAX:
            raise BadInput(f"{text[:80]!r} is not a cursor of logs", hint="use 'next', or the id of the last event")
        offsets[instance] = int(offset)
    return offsets


def read_page(folder: Path, query: LogQuery) -> tuple[list[LogLine], dict[str, int]]:
    """Lines now, merged by time, and the offsets after them. At most about ``LINES_MAX``; blocks on the disk."""
    files = log_files(folder, role=query.role, rank=query.rank)
    offsets = read_cursor(query.cursor)
    batches: list[list[LogLine]] = []
    for instance, path in files.items():
        if query.tail is not None and not query.cursor:
            newest = tail_lines(path, max(query.tail, 1))
            offsets[instance] = newest[-1].end if newest else 0
            batches.append(newest[-query.tail :] if query.tail else [])
            continue
        start = offsets.get(instance, 0)
        if not query.cursor and query.since is not None:
            start = find_offset(path, query.since)
        lines = read_lines(path, start)
        offsets[instance] = lines[-1].end if lines else start
        batches.append(lines)
    merged = [line for line in merge(batches) if query.wants(line)]
    if query.tail is not None and not query.cursor:
        return merged[-query.tail :] if query.tail else [], offsets
    if len(merged) > LINES_MAX:
        merged = merged[:LINES_MAX]
        offsets = _ends(merged, read_cursor(query.cursor))
    return merged, offsets


def _ends(lines: Sequence[LogLine], start: dict[str, int]) -> dict[str, int]:
    ends = dict(start)
    for line in lines:
        ends[line.instance] = line.end
    return ends


async def follow_logs(
    loop: ServiceLoop, story: JobStory, folder: Path, query: LogQuery, check: Callable[[], None]
) -> AsyncIterator[bytes]:
    """The page of ``query``, then every new line until the job ended and its files are still.

    The id of every ``MARK_EVERY``-th event names every offset: a reader that comes back with it misses nothing, and
    drops the few lines it saw already by ``(instance, offset)``. ``check`` is as ``view`` of ``follow_events``.
    """
    lines, offsets = await asyncio.to_thread(read_page, folder, query)
    for chunk in _frames(lines, offsets):
        yield chunk
    quiet_since = last_sent = loop.clock.monotonic_s()
    while not loop.stopping:
        over = story.ended is not None
        files = await asyncio.to_thread(log_files, folder, role=query.role, rank=query.rank)
        lines = await asyncio.to_thread(follow_batch, files, offsets)
        try:
            check()
        except REFUSALS:
            return
        now = loop.clock.monotonic_s()
        if lines:
            quiet_since = last_sent = now
            for chunk in _frames([line for line in lines if query.wants(line)], offsets):
                yield chunk
        elif over and now - quiet_since >= SETTLE_S:
            state = story.ended.state if story.ended else story.state
            yield frame({"state": state, "cursor": write_cursor(offsets)}, event="end")
            return
        elif now - last_sent > KEEP_ALIVE_S:
            last_sent = now
            yield format_sse_event(comment="alive")
        if not lines:
            await loop.clock.sleep(LOG_POLL_S)


def _frames(lines: Sequence[LogLine], ends: dict[str, int]) -> Iterator[bytes]:
    """Lines as events; every few of them carry the exact place to go on from, the last one ``ends``."""
    here = dict(ends)
    for line in reversed(lines):
        here[line.instance] = line.offset
    last = len(lines) - 1
    for i, line in enumerate(lines):
        here[line.instance] = line.end
        marked = i == last or i % MARK_EVERY == MARK_EVERY - 1
        yield frame(line_document(line), event="line", id=write_cursor(here) if marked else None)
