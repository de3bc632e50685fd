"""Routes of logs and events: pages as JSON or text, or server-sent events that resume without a gap."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, cast

from fastapi import APIRouter, Header, Query
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.sse import format_sse_event
from starlette.types import Receive, Scope, Send

from rota.runtime.clock import iso
from rota.runtime.output import (
    LogFile,
    StampedLine,
    find_offset,
    follow_batch,
    key_of,
    log_files,
    merge,
    read_lines,
    tail_lines,
)
from rota.service.accounts import Caller, Redactor, UserRole
from rota.service.control.job_files import JobFilesElsewhere, local_logs, wanted_logs
from rota.service.control.loop import ServiceLoop
from rota.service.models.base import REFUSAL, Sent, document
from rota.service.models.jobs import EventList, EventRecord, LogLine, LogPage
from rota.service.rest.deps import AppState, Asker, JobAccess, Parts, ReadJob, check_attempt, member_of
from rota.service.views.job_history import JobHistory
from rota.service.webhooks import without_password
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput, NotAllowed, NoToken, UnknownName, unknown
from rota.spec.events import KINDS, AccountEvent, JobEnded, Record, WebhookSet, event_to_json
from rota.spec.ids import JobId

EVENT_STREAM = "text/event-stream"
TAIL_MAX = 100_000
NUMBER_MAX = 2**62
"""Above every number of a record; what a store takes as a number at all."""

POINTS_MAX = 2000

router = APIRouter(prefix="/api/v1", tags=["streams"], responses=REFUSAL)

STREAM: dict[int | str, JsonObject] = {200: {"content": {EVENT_STREAM: {}}}}
"""What the routes answer beside a page: the same items as they come."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@router.get("/events", response_model=Sent[EventList], responses=STREAM)
async def events(
    app: Parts,
    caller: Asker,
    after: Annotated[int, Query(ge=0, le=NUMBER_MAX)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    follow: bool = False,
    type: str = "",
    accept: Annotated[str, Header()] = "",
    last_event_id: Annotated[str, Header()] = "",
) -> Response:
    """Every event of the installation after a number: a page, or a stream that resumes by ``Last-Event-ID``."""
    stream = follow or EVENT_STREAM in accept
    return await _events(app, caller, None, event_number(last_event_id, after), limit, type, stream)


@router.get("/jobs/{job}/events", response_model=Sent[EventList], responses=STREAM)
async def job_events(
    on: ReadJob,
    after: Annotated[int, Query(ge=0, le=NUMBER_MAX)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    follow: bool = False,
    type: str = "",
    points: Annotated[int | None, Query(ge=1, le=POINTS_MAX)] = None,
    accept: Annotated[str, Header()] = "",
    last_event_id: Annotated[str, Header()] = "",
) -> Response:
    """The events of one job; a stream of them ends with the job.

    With ``points``: that many of one type at most, evenly spread over the job, the newest among them.
    """
    stream = follow or EVENT_STREAM in accept
    if points is not None:
        return await _sampled(on, _known_kind(type), points)
    return await _events(on.app, on.caller, on.job.id, event_number(last_event_id, after), limit, type, stream)


async def _events(
    app: AppState, caller: Caller, job: JobId | None, after: int, limit: int, kind: str, stream: bool
) -> Response:
    if kind:
        _known_kind(kind)

    def view() -> Callable[[Record], EventRecord | None]:
        now = app.auth.renewed(caller)
        if job is not None:
            app.read(now, job)
        return partial(_shown, app, now, app.redactor(now))

    if stream:
        return counted_stream(app, caller, follow_events(app.loop, view, job=job, after=after, kind=kind))
    shown = view()
    records = await asyncio.to_thread(app.loop.log.read, after=after, job=job, limit=limit)
    items = [item for record in records if (item := shown(record)) is not None]
    page = document(
        EventList,
        job=job,
        items=[item for item in items if not kind or item["kind"] == kind],
        next=records[-1].number if len(records) == limit else None,
        last=records[-1].number if records else after,
    )
    return JSONResponse(page)


def _known_kind(kind: str) -> str:
    if kind not in KINDS:
        raise unknown(f"no event is of the type {kind!r}", kind, sorted(KINDS), "types")
    return kind


async def _sampled(on: JobAccess, kind: str, points: int) -> Response:
    records = await asyncio.to_thread(on.app.loop.log.sample, on.job.id, kind, points)
    shown = partial(_shown, on.app, on.caller, on.app.redactor(on.caller))
    items = [item for record in records if (item := shown(record)) is not None]
    last = records[-1].number if records else 0
    return JSONResponse(document(EventList, job=on.job.id, items=items, next=None, last=last))


def _shown(app: AppState, caller: Caller, redactor: Redactor, record: Record) -> EventRecord | None:
    """A record as the caller may see it: whole, only that something happened to a job, or not at all."""
    if record.job is None:
        private = isinstance(record.event, AccountEvent)
        return None if private and not caller.has(UserRole.ADMIN) else record_document(record)
    job = app.loop.installation.jobs.get(record.job)
    if caller.has(UserRole.QUEUE_ADMIN) or (job is not None and caller.reads(job)):
        return redactor.redact(record_document(record))
    if job is None or not caller.sees(job):
        return None
    return document(EventRecord, record_document(record))


@router.get("/jobs/{job}/logs", response_model=Sent[LogPage], responses=STREAM)
async def logs(
    on: ReadJob,
    instance: str = "",
    follow: bool = False,
    tail: Annotated[int | None, Query(ge=0, le=TAIL_MAX)] = None,
    since: float | None = None,
    until: float | None = None,
    grep: str = "",
    ignore_case: bool = False,
    stream: str = "",
    attempt: int | None = None,
    cursor: str = "",
    accept: Annotated[str, Header()] = "",
    last_event_id: Annotated[str, Header()] = "",
) -> Response:
    """Output of all instances merged by time, or of one role or instance; ``since`` and ``until`` in Unix seconds."""
    app, caller, job = on.app, on.caller, on.job
    folder = app.home.job(job.id).logs
    elsewhere = JobFilesElsewhere(job, app.loop.installation, app.engine, app.seen_logs, app.clock)
    sources = LogSources(folder, elsewhere)
    role, rank = member_of(job, instance, log_files(folder)) if instance else ("", None)
    query = LogQuery(
        role=role,
        rank=rank,
        cursor=last_event_id or cursor,
        since=since,
        until=until,
        tail=tail,
        grep=grep.lower() if ignore_case else grep,
        ignore_case=ignore_case,
        stream=stream,
        attempt=attempt,
    )
    read_cursor(query.cursor)
    stream_it = follow or EVENT_STREAM in accept
    check_attempt(job, attempt, may_come=stream_it and job.ended is None)
    if job.ended is not None and not folder.is_dir() and not elsewhere.hosts:
        cause = "they were removed some days after its end (logs_kept_days), or a back-up was without them"
        raise UnknownName(f"{job.id} has no logs any more", hint=cause)
    if stream_it:

        def check() -> None:
            app.read(app.auth.renewed(caller), job.id)

        return counted_stream(app, caller, follow_logs(app.loop, job, sources, query, check))
    lines, offsets = await elsewhere.in_thread(partial(read_page, sources, query))
    notices = elsewhere.notices()
    if "text/plain" in accept:
        text = "".join(f"{iso(line.ts) if line.ts else '-'} {line.instance} {line.text}\n" for line in lines)
        return PlainTextResponse(text + "".join(f"- rota {notice}\n" for notice in notices))
    items, ended = [line_document(line) for line in lines], job.ended is not None
    page = document(LogPage, job=job.id, items=items, next=write_cursor(offsets), ended=ended, notices=notices)
    return JSONResponse(page)


class _Counted(StreamingResponse):
    """A stream that gives its place back however it ends, also when its reader left before the first byte."""

    def __init__(self, app: AppState, user: str, frames: AsyncIterator[bytes]) -> None:
        super().__init__(frames, media_type=EVENT_STREAM, headers=_HEADERS)
        self._app, self._user = app, user

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._app.close_stream(self._user)


def counted_stream(app: AppState, caller: Caller, frames: AsyncIterator[bytes]) -> StreamingResponse:
    """Server-sent events, counted among those of the caller. Raises LimitExceeded."""
    app.open_stream(caller.user)
    return _Counted(app, caller.user, frames)


def event_number(last_event_id: str, after: int) -> int:
    """Where a stream continues. Raises BadInput."""
    if not last_event_id:
        return after
    if not last_event_id.isdecimal() or len(last_event_id) > len(str(NUMBER_MAX)):
        raise BadInput(f"Last-Event-ID {last_event_id[:40]!r} is not the number of an event")
    return min(int(last_event_id), NUMBER_MAX)


REFUSALS = (NotAllowed, NoToken, UnknownName)
"""Errors that end a stream under way: its reader may not read further."""
KEEP_ALIVE_S = 15.0
LOG_POLL_S = 0.15
REMOTE_POLL_S = 0.3
"""A machine is asked once for all of its logs."""
BEHIND_MAX = 10_000
SETTLE_S = 1.0
LINES_MAX = 10_000
MARK_EVERY = 50
OFFSET_DIGITS_MAX = 18


def record_document(record: Record) -> EventRecord:
    """One event of the log; the address of a webhook without its password."""
    event = record.event
    if isinstance(event, WebhookSet):  # one of before, when it was kept whole
        event = replace(event, url=without_password(event.url))
    head = {"number": record.number, "job": record.job, "seq": record.seq, "at": iso(record.at)}
    return cast("EventRecord", head | event_to_json(event))


def line_document(line: StampedLine) -> LogLine:
    """One line of output."""
    return document(LogLine, line, ts=line.ts or None)


def frame(data: object, *, event: str | None = None, id: str | None = None) -> bytes:
    """One server-sent event."""
    return format_sse_event(data_str=json.dumps(data, ensure_ascii=False), event=event, id=id)


async def follow_events(
    loop: ServiceLoop,
    view: Callable[[], Callable[[Record], EventRecord | None]],
    *,
    job: JobId | None,
    after: int,
    kind: str = "",
) -> AsyncIterator[bytes]:
    """Every record after ``after``, then each new one, of all kinds or of one; of one job until it ended.

    ``view`` is asked at each batch and each sign of life for what makes the document of a record, or None of one that
    this reader may not see; when it raises NotAllowed, NoToken or UnknownName the stream ends, and a reader that comes
    back gets the reason.

    A reader that is more than ``BEHIND_MAX`` records behind gets ``reset`` with the newest number and continues there.
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
            item = shown(record)
            if item is not None and (not kind or item["kind"] == kind):
                yield frame(item, event="event", id=str(cursor))
            if job is not None and isinstance(record.event, JobEnded):
                yield frame({"state": record.event.state}, event="end")
                return
        if not records:
            if job is not None and _is_over(loop, job):
                yield frame({}, event="end")
                return
            try:
                async with loop.clock.timeout(KEEP_ALIVE_S):
                    await loop.wait_for(loop.installation.number + 1)
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
    ignore_case: bool = False
    stream: str = ""
    attempt: int | None = None

    def wants(self, line: StampedLine) -> bool:
        """True when the line passes every filter."""
        return (
            (not self.grep or self.grep in (line.text.lower() if self.ignore_case else line.text))
            and (not self.stream or line.stream == self.stream)
            and (self.attempt is None or line.attempt == self.attempt)
            and (self.until is None or line.ts <= self.until)
            and (self.since is None or line.ts >= self.since)
        )


@dataclass(frozen=True, slots=True)
class LogSources:
    """Where the logs of a job are: in a folder of this machine, and on others."""

    folder: Path
    elsewhere: JobFilesElsewhere

    def files(self, query: LogQuery) -> dict[str, LogFile]:
        """The logs that are wanted, as they are now; blocks."""
        return wanted_logs(local_logs(self.folder) | self.elsewhere.logs(), query.role, query.rank)


def write_cursor(offsets: dict[str, int]) -> str:
    """``role/rank:offset`` of every file, ``role/rank@node:offset`` on other machines: where to continue exactly."""
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


def read_page(sources: LogSources, query: LogQuery) -> tuple[list[StampedLine], dict[str, int]]:
    """Lines now, merged by time, and the offsets after them. At most about ``LINES_MAX``; blocks."""
    offsets = read_cursor(query.cursor)
    batches: list[list[StampedLine]] = []
    for key, log in sources.files(query).items():
        start = offsets.get(key, 0)
        try:
            if query.tail is not None and not query.cursor:
                newest = tail_lines(log, max(query.tail, 1))
                offsets[key] = newest[-1].end if newest else 0
                batches.append(newest[-query.tail :] if query.tail else [])
                continue
            if not query.cursor and query.since is not None:
                start = find_offset(log, query.since)
            lines = read_lines(log, start)
        except OSError:  # its machine went away: a notice says so, and the cursor stays
            offsets[key] = start
            continue
        offsets[key] = lines[-1].end if lines else start
        batches.append(lines)
    merged = [line for line in merge(batches) if query.wants(line)]
    if query.tail is not None and not query.cursor:
        return merged[-query.tail :] if query.tail else [], offsets
    if len(merged) > LINES_MAX:
        merged = merged[:LINES_MAX]
        offsets = _ends(merged, read_cursor(query.cursor))
    return merged, offsets


def _ends(lines: Sequence[StampedLine], start: dict[str, int]) -> dict[str, int]:
    ends = dict(start)
    for line in lines:
        ends[key_of(line)] = line.end
    return ends


async def follow_logs(
    loop: ServiceLoop, job: JobHistory, sources: LogSources, query: LogQuery, check: Callable[[], None]
) -> AsyncIterator[bytes]:
    """The page of ``query``, then every new line until the job ended and its files are still.

    The id of every ``MARK_EVERY``-th event names every offset: a reader that comes back with it misses nothing, and
    drops the few lines it saw already by ``(instance, node, offset)``. A ``notice`` says which machine does not answer.
    ``check`` is as ``view`` of ``follow_events``.
    """
    lines, offsets = await sources.elsewhere.in_thread(partial(read_page, sources, query))
    for chunk in _frames(lines, offsets):
        yield chunk
    said = set[str]()
    quiet_since = last_sent = loop.clock.monotonic_s()
    while not loop.stopping:
        over = job.ended is not None
        files = await sources.elsewhere.in_thread(partial(sources.files, query))
        lines = await sources.elsewhere.in_thread(partial(follow_batch, files, offsets))
        silent = sources.elsewhere.silent
        if new := silent.keys() - said:
            for host, notice in zip(sorted(silent), sources.elsewhere.notices(), strict=True):
                if host in new:
                    yield frame({"node": host, "text": notice}, event="notice")
        said = set(silent)
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
            state = job.ended.state if job.ended else job.state
            yield frame({"state": state, "cursor": write_cursor(offsets)}, event="end")
            return
        elif now - last_sent > KEEP_ALIVE_S:
            last_sent = now
            yield format_sse_event(comment="alive")
        if not lines:
            await loop.clock.sleep(REMOTE_POLL_S if sources.elsewhere.hosts else LOG_POLL_S)


def _frames(lines: Sequence[StampedLine], ends: dict[str, int]) -> Iterator[bytes]:
    """Lines as events; every few of them carry the exact place to continue at, the last one ``ends``."""
    here = dict(ends)
    for line in reversed(lines):
        here[key_of(line)] = line.offset
    last = len(lines) - 1
    for i, line in enumerate(lines):
        here[key_of(line)] = line.end
        marked = i == last or i % MARK_EVERY == MARK_EVERY - 1
        yield frame(line_document(line), event="line", id=write_cursor(here) if marked else None)
