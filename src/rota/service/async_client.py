"""AsyncClient: the questions of Client, awaited."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from time import monotonic  # noqa: TID251 - runs in the user's process, where Rota has no clock
from typing import Any, Self

import httpx

from rota.service import calls
from rota.service.account_calls import AccountCalls
from rota.service.calls import Ask, Sse, SseReader
from rota.service.wire import PAGE_MAX, RETRIES_MAX, STREAM_SILENCE_S, TIMEOUT_S, Document, Wire, body_of, timed_out
from rota.spec.states import JobState


class AsyncClient(Wire):
    """The same questions as ``Client``, awaited."""

    def __init__(
        self,
        server: str = "",
        token: str = "",
        *,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(server, token, timeout_s)
        self._http = httpx.AsyncClient(**self.http_options, transport=transport)
        self.accounts = AccountCalls(self.ask)
        """Users, tokens, secrets, the audit."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, ask: Ask) -> Document:
        """Send one request; ``safe`` ones again when the connection broke."""
        for attempt in range(RETRIES_MAX + 1):
            try:
                answer = await self._http.request(
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
                await asyncio.sleep(self.wait_s(attempt))
            else:
                return self.read(answer)
        raise AssertionError("the last attempt returns or raises")

    async def submit(self, body: Mapping[str, Any], *, key: str = "") -> Document:
        """See ``Client.submit``."""
        return await self.ask(calls.submit(body, key=key or secrets.token_hex(16)))

    async def run(
        self,
        job: Any = None,
        *,
        set: Mapping[str, Any] | Sequence[str] = (),
        command: Sequence[str] = (),
        workdir: str = "",
        key: str = "",
        **resources: Any,
    ) -> Document:
        """See ``Client.run``; gives the ``Job`` document."""
        body = await asyncio.to_thread(body_of, job, sets=set, command=command, workdir=workdir, res=resources)
        return await self.submit(body, key=key)

    async def plan(self, body: Mapping[str, Any]) -> Document:
        """See ``Client.plan``."""
        return await self.ask(calls.plan(body))

    async def jobs(self, **filters: Any) -> Document:
        """See ``Client.jobs``."""
        return await self.ask(calls.jobs(filters))

    async def job(self, job: str) -> Document:
        """See ``Client.job``."""
        return await self.ask(calls.get(calls.job_path(job)))

    async def explain(self, job: str) -> Document:
        """See ``Client.explain``."""
        return await self._part(job, "explain")

    async def why(self, job: str) -> Document:
        """See ``Client.why``."""
        return await self._part(job, "why")

    async def failures(self, job: str, *, attempt: int | None = None) -> Document:
        """See ``Client.failures``."""
        return await self._part(job, "failures", attempt=attempt)

    async def trace(self, job: str) -> Document:
        """See ``Client.trace``."""
        return await self._part(job, "trace")

    async def graph(self, job: str) -> Document:
        """See ``Client.graph``."""
        return await self._part(job, "graph")

    async def placement(self, job: str) -> Document:
        """See ``Client.placement``."""
        return await self._part(job, "placement")

    async def spec(self, job: str) -> Document:
        """See ``Client.spec``."""
        return await self._part(job, "spec")

    async def log_page(self, job: str, **filters: Any) -> Document:
        """See ``Client.log_page``."""
        return await self._part(job, "logs", **filters)

    async def event_page(self, job: str = "", **filters: Any) -> Document:
        """See ``Client.event_page``."""
        return await self.ask(calls.get(calls.events_path(job), **filters))

    async def _part(self, job: str, name: str, **params: Any) -> Document:
        return await self.ask(calls.get(calls.job_path(job, name), **params))

    async def change(self, job: str, changes: Mapping[str, Any]) -> Document:
        """See ``Client.change``."""
        return await self.ask(calls.change(job, changes))

    async def mark_node(
        self, node: str, action: str, *, reason: str = "", notice_s: float | None = None, dry_run: bool = False
    ) -> Document:
        """See ``Client.mark_node``."""
        return await self.ask(calls.mark_node(node, action, reason=reason, notice_s=notice_s, dry_run=dry_run))

    async def apply_queues(
        self, queues: list[Document] | str, *, filename: str = "queues.yaml", dry_run: bool = False
    ) -> Document:
        """See ``Client.apply_queues``."""
        return await self.ask(calls.apply_queues(queues, filename=filename, dry_run=dry_run))

    async def stop(self, job: str, *, grace_s: float | None = None) -> Document:
        """See ``Client.stop``."""
        return await self.ask(calls.stop(job, grace_s=grace_s))

    async def pause(self, job: str, *, grace_s: float | None = None) -> Document:
        """See ``Client.pause``."""
        return await self.ask(calls.pause(job, grace_s=grace_s))

    async def resume(self, job: str) -> Document:
        """See ``Client.resume``."""
        return await self.ask(calls.resume(job))

    async def execute(self, job: str, instance: str, argv: Sequence[str], *, timeout_s: float = 60.0) -> Document:
        """See ``Client.execute``."""
        return await self.ask(calls.execute(job, instance, argv, timeout_s=timeout_s))

    async def scale(self, job: str, role: str, n: int) -> Document:
        """See ``Client.scale``."""
        return await self.ask(calls.scale(job, role, n))

    async def nodes(self) -> Document:
        """See ``Client.nodes``."""
        return await self.ask(calls.get("/nodes"))

    async def queues(self) -> Document:
        """See ``Client.queues``."""
        return await self.ask(calls.get("/queues"))

    async def status(self) -> Document:
        """See ``Client.status``."""
        return await self.ask(calls.get("/status"))

    async def wait(self, job: str, *, timeout_s: float | None = None, poll_s: float = 0.2) -> Document:
        """See ``Client.wait``."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        while True:
            document = await self.job(job)
            if JobState(document["state"]).terminal:
                return document
            if deadline is not None and monotonic() + poll_s > deadline:
                raise timed_out(document, timeout_s or 0.0)
            await asyncio.sleep(poll_s)

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
        async for event in self._stream(calls.job_path(job, "logs"), {**filters, "follow": True}):
            line = event.document()
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
        async for event in self._stream(calls.events_path(job), {**filters, "follow": True}):
            if event.event == "event":
                yield event.document()

    async def _stream(self, path: str, params: Mapping[str, Any]) -> AsyncIterator[Sse]:
        ask, last, broken = calls.get(path, **params), "", 0
        while True:
            try:
                async for event in self._stream_once(ask, last):
                    last, broken = event.id or last, 0
                    yield event
                    if event.event == "end":
                        return
            except httpx.TransportError as exc:
                broken += 1
                if not self.may_reconnect(exc, broken, last):
                    raise self.unreachable(exc) from exc
                await asyncio.sleep(self.wait_s(broken))
            else:
                return  # the service closed the stream in order

    async def _stream_once(self, ask: Ask, last: str) -> AsyncIterator[Sse]:
        timeout = httpx.Timeout(self.timeout_s, read=STREAM_SILENCE_S)
        headers = self.stream_headers(last)
        async with self._http.stream(
            "GET", ask.path, params=dict(ask.params), headers=headers, timeout=timeout
        ) as answer:
            if answer.status_code >= 400:
                await answer.aread()
                raise calls.error_of(answer.status_code, answer.text, url=str(answer.request.url))
            reader = SseReader()
            async for line in answer.aiter_lines():
                event = reader.line(line)
                if event is not None:
                    yield event
