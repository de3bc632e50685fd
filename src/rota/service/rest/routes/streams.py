"""Routes of logs and events: pages as JSON or text, or as they happen by server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rota.runtime.clock import iso
from rota.runtime.output import log_files
from rota.service.accounts import Caller, Role, Veil
from rota.service.models.base import Sent
from rota.service.models.jobs import EventList, LogPage
from rota.service.rest.deps import AppState, Asker, Document, Parts, check_attempt, member_of
from rota.service.rest.follow import (
    LogQuery,
    follow_events,
    follow_logs,
    line_document,
    read_cursor,
    read_page,
    record_document,
    write_cursor,
)
from rota.service.views.jobs import API
from rota.spec.errors import BadInput, UnknownName, unknown
from rota.spec.events import KINDS, AccountEvent, Record
from rota.spec.ids import JobId

EVENT_STREAM = "text/event-stream"
TAIL_MAX = 100_000
NUMBER_MAX = 2**62
"""Above every number of a record; what a store takes as a number at all."""

router = APIRouter(prefix="/api/v1", tags=["streams"])

_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {EVENT_STREAM: {}}}}
"""What the routes answer beside a page: the same items as they come."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@router.get("/events", response_model=Sent[EventList], responses=_STREAM)
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
    return await _events(app, caller, None, _number(last_event_id, after), limit, type, stream)


@router.get("/jobs/{job}/events", response_model=Sent[EventList], responses=_STREAM)
async def job_events(
    job: str,
    app: Parts,
    caller: Asker,
    after: Annotated[int, Query(ge=0, le=NUMBER_MAX)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    follow: bool = False,
    type: str = "",
    accept: Annotated[str, Header()] = "",
    last_event_id: Annotated[str, Header()] = "",
) -> Response:
    """The events of one job; a stream of them ends with the job."""
    found, stream = app.read(caller, job).id, follow or EVENT_STREAM in accept
    return await _events(app, caller, found, _number(last_event_id, after), limit, type, stream)


async def _events(
    app: AppState, caller: Caller, job: JobId | None, after: int, limit: int, kind: str, stream: bool
) -> Response:
    if kind and kind not in KINDS:
        raise unknown(f"no event is of the type {kind!r}", kind, sorted(KINDS), "types")

    def view() -> Callable[[Record], Document | None]:
        now = app.auth.again(caller)
        if job is not None:
            app.read(now, job)
        return partial(_shown, app, now, app.veil(now))

    if stream:
        return _stream(app, caller, follow_events(app.loop, view, job=job, after=after, kind=kind))
    shown = view()
    records = await asyncio.to_thread(app.loop.log.read, after=after, job=job, limit=limit)
    items = [document for record in records if (document := shown(record)) is not None]
    document = {
        "api": API,
        "kind": "EventList",
        "job": job,
        "items": [item for item in items if not kind or item["kind"] == kind],
        "next": records[-1].number if len(records) == limit else None,
        "last": records[-1].number if records else after,
    }
    return JSONResponse(document)


def _shown(app: AppState, caller: Caller, veil: Veil, record: Record) -> Document | None:
    """A record as the caller may see it: whole, only that something happened to a job, or not at all."""
    if record.job is None:
        private = isinstance(record.event, AccountEvent)
        return None if private and not caller.has(Role.ADMIN) else record_document(record)
    story = app.loop.installation.jobs.get(record.job)
    if caller.has(Role.QUEUE_ADMIN) or (story is not None and caller.reads(story)):
        return veil.over(record_document(record))
    if story is None or not caller.sees(story):
        return None
    document = record_document(record)
    return {name: document[name] for name in ("number", "job", "seq", "at", "kind")}


@router.get("/jobs/{job}/logs", response_model=Sent[LogPage], responses=_STREAM)
async def logs(
    job: str,
    app: Parts,
    caller: Asker,
    instance: str = "",
    follow: bool = False,
    tail: Annotated[int | None, Query(ge=0, le=TAIL_MAX)] = None,
    since: float | None = None,
    until: float | None = None,
    grep: str = "",
    stream: str = "",
    attempt: int | None = None,
    cursor: str = "",
    accept: Annotated[str, Header()] = "",
    last_event_id: Annotated[str, Header()] = "",
) -> Response:
    """Output of all instances merged by time, or of one role or instance; ``since`` and ``until`` in Unix seconds."""
    story = app.read(caller, job)
    folder = app.home.job(story.id).logs
    role, rank = member_of(story, instance, log_files(folder)) if instance else ("", None)
    query = LogQuery(
        role=role,
        rank=rank,
        cursor=last_event_id or cursor,
        since=since,
        until=until,
        tail=tail,
        grep=grep,
        stream=stream,
        attempt=attempt,
    )
    read_cursor(query.cursor)
    stream_it = follow or EVENT_STREAM in accept
    check_attempt(story, attempt, may_come=stream_it and story.ended is None)
    if story.ended is not None and not folder.is_dir():
        cause = "they were removed some days after its end (logs_kept_days), or a back-up was without them"
        raise UnknownName(f"{story.id} has no logs any more", hint=cause)
    if stream_it:

        def check() -> None:
            app.read(app.auth.again(caller), story.id)

        return _stream(app, caller, follow_logs(app.loop, story, folder, query, check))
    lines, offsets = await asyncio.to_thread(read_page, folder, query)
    if "text/plain" in accept:
        text = "".join(f"{iso(line.ts) if line.ts else '-'} {line.instance} {line.text}\n" for line in lines)
        return PlainTextResponse(text)
    return JSONResponse(
        {
            "api": API,
            "kind": "LogPage",
            "job": story.id,
            "items": [line_document(line) for line in lines],
            "next": write_cursor(offsets),
            "ended": story.ended is not None,
        }
    )


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


def _stream(app: AppState, caller: Caller, frames: AsyncIterator[bytes]) -> StreamingResponse:
    app.open_stream(caller.user)
    return _Counted(app, caller.user, frames)


def _number(last_event_id: str, after: int) -> int:
    if not last_event_id:
        return after
    if not last_event_id.isdecimal() or len(last_event_id) > len(str(NUMBER_MAX)):
        raise BadInput(f"Last-Event-ID {last_event_id[:40]!r} is not the number of an event")
    return min(int(last_event_id), NUMBER_MAX)
