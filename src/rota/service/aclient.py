"""AsyncClient: the questions of Client, awaited; what both clients do is written here, over a way to the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from time import monotonic  # noqa: TID251 - runs in the user's process, where Rota has no clock
from typing import Any, Self, TypeVar

import httpx

from rota.service import calls
from rota.service.account_calls import AccountCalls
from rota.service.calls import Ask, Sse, SseReader
from rota.service.http import (
    PAGE_MAX,
    RETRIES_MAX,
    STREAM_SILENCE_S,
    TIMEOUT_S,
    Document,
    Wire,
    body_of,
    refused,
    timed_out,
)
from rota.service.questions import Questions
from rota.spec.states import JobState

T = TypeVar("T")


class AsyncWay:
    """What a client waits for: the network, time, and work that takes long. Here the event loop waits."""

    def __init__(self, options: dict[str, Any], transport: Any) -> None:
        self._http = httpx.AsyncClient(**options, transport=transport)

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return await self._http.request(method, path, **options)

    async def lines(self, path: str, **options: Any) -> AsyncGenerator[str]:
        async with self._http.stream("GET", path, **options) as answer:
            if answer.status_code >= 400:
                await answer.aread()
                raise refused(answer)
            async for line in answer.aiter_lines():
                yield line

    async def sleep(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)

    async def do(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    async def close(self) -> None:
        await self._http.aclose()


class AsyncClient(Wire, Questions[Coroutine[Any, Any, Document]]):
    """The same questions as ``Client``, awaited."""

    _way_of = AsyncWay

    def __init__(
        self, server: str = "", token: str = "", *, timeout_s: float = TIMEOUT_S, transport: Any = None
    ) -> None:
        super().__init__(server, token, timeout_s)
        self._way = self._way_of(self.http_options, transport)
        self.accounts = AccountCalls(self.ask)
        """Users, tokens, secrets, the audit."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._way.close()

    async def ask(self, ask: Ask) -> Document:
        """Send one request; ``safe`` ones again when the connection broke."""
        for attempt in range(RETRIES_MAX + 1):
            try:
                answer = await self._way.request(
                    ask.method,
                    ask.path,
                    params=dict(ask.params),
                    json=ask.body,
                    headers=dict(ask.headers),
                    timeout=self.timeout_of(ask),
                )
            except httpx.TransportError as exc:
                if not self.may_retry(ask, exc, attempt):
                    raise self.unreachable(exc) from exc
                await self._way.sleep(self.wait_s(attempt))
            else:
                return self.read(answer)
        raise AssertionError("the last attempt returns or raises")

    async def run(
        self,
        job: Any = None,
        *,
        set: Mapping[str, Any] | Sequence[str] = (),
        command: Sequence[str] | None = None,
        workdir: str = "",
        key: str = "",
        ignore_image: bool = False,
        **resources: Any,
    ) -> Document:
        """See ``Client.run``; gives the ``Job`` document."""
        made = partial(body_of, job, sets=set, command=command, workdir=workdir, res=resources)
        return await self.submit(await self._way.do(made) | ({"ignore_image": True} if ignore_image else {}), key=key)

    async def wait(self, job: str, *, timeout_s: float | None = None, poll_s: float = 0.2) -> Document:
        """See ``Client.wait``."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        while True:
            document = await self.job(job)
            if JobState(document["state"]).terminal:
                return document
            if deadline is not None and monotonic() + poll_s > deadline:
                raise timed_out(document, timeout_s or 0.0)
            await self._way.sleep(poll_s)

    async def all_jobs(self, **filters: Any) -> AsyncIterator[Document]:
        """See ``Client.all_jobs``."""
        cursor = ""
        while True:
            page = await self.jobs(**{**filters, "cursor": cursor, "limit": PAGE_MAX})
            for one in page["items"]:
                yield one
            cursor = page.get("next") or ""
            if not cursor:
                return

    async def log_pages(self, job: str, **filters: Any) -> AsyncIterator[Document]:
        """See ``Client.log_pages``."""
        page = await self.log_page(job, **filters)
        yield page
        while filters.get("tail") is None and page["next"] != filters.get("cursor", ""):
            filters["cursor"] = page["next"]
            page = await self.log_page(job, **filters)
            yield page

    async def logs(self, job: str, *, follow: bool = False, **filters: Any) -> AsyncIterator[Document]:
        """See ``Client.logs``."""
        if not follow:
            async for page in self.log_pages(job, **filters):
                for line in page["items"]:
                    yield line
            return
        seen: dict[str, int] = {}
        async with aclosing(self._stream(calls.job_path(job, "logs"), {**filters, "follow": True})) as events:
            async for event in events:
                line = event.document()
                # after a lost connection the service repeats the batch that was under way
                if event.event == "line" and line["offset"] > seen.get(line["instance"], -1):
                    seen[line["instance"]] = line["offset"]
                    yield line

    async def event_pages(self, job: str = "", **filters: Any) -> AsyncIterator[Document]:
        """See ``Client.event_pages``."""
        page = await self.event_page(job, **filters)
        yield page
        while page["next"] is not None:
            page = await self.event_page(job, **{**filters, "after": page["next"]})
            yield page

    async def events(self, job: str = "", *, follow: bool = False, **filters: Any) -> AsyncIterator[Document]:
        """See ``Client.events``."""
        if not follow:
            async for page in self.event_pages(job, **filters):
                for event in page["items"]:
                    yield event
            return
        async with aclosing(self._stream(calls.events_path(job), {**filters, "follow": True})) as events:
            async for event in events:
                if event.event == "event":
                    yield event.document()

    async def _stream(self, path: str, params: Mapping[str, Any]) -> AsyncGenerator[Sse]:
        ask, last, broken = calls.get(path, **params), "", 0
        while True:
            try:
                async with aclosing(self._stream_once(ask, last)) as events:
                    async for event in events:
                        last, broken = event.id or last, 0
                        yield event
                        if event.event == "end":
                            return
            except httpx.TransportError as exc:
                broken += 1
                if not self.may_reconnect(exc, broken, last):
                    raise self.unreachable(exc) from exc
                await self._way.sleep(self.wait_s(broken))
            else:
                return  # the service closed the stream in order

    async def _stream_once(self, ask: Ask, last: str) -> AsyncGenerator[Sse]:
        timeout = httpx.Timeout(self.timeout_s, read=STREAM_SILENCE_S)
        headers, reader = self.stream_headers(last), SseReader()
        lines = self._way.lines(ask.path, params=dict(ask.params), headers=headers, timeout=timeout)
        async with aclosing(lines):  # a connection is given back with the last iterator, and not at some time
            async for line in lines:
                if (event := reader.line(line)) is not None:
                    yield event
