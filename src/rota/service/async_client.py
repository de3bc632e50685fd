"""AsyncClient: the questions of Client, awaited."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from time import monotonic  # noqa: TID251 - runs in the user's process, where Rota has no clock
from typing import Any, Self

import httpx

from rota.service import calls
from rota.service.calls import Ask, Sse, SseReader
from rota.service.wire import RETRIES_MAX, STREAM_SILENCE_S, TIMEOUT_S, Document, Wire, source_of, timed_out
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
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=self.headers, timeout=self.timeout, transport=transport, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, ask: Ask) -> Document:
        """Send one request; ``safe`` ones again when the connection broke."""
        for attempt in range(RETRIES_MAX + 1):
            try:
                answer = await self._http.request(
                    ask.method, ask.path, params=dict(ask.params), json=ask.body, headers=dict(ask.headers)
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

    async def run(self, job: Any, *, set: Mapping[str, Any] | Sequence[str] = (), workdir: str = "") -> Document:
        """Submit a job; gives the ``Job`` document."""
        return await self.submit(await asyncio.to_thread(source_of, job, sets=set, workdir=workdir))

    async def plan(self, body: Mapping[str, Any]) -> Document:
        """See ``Client.plan``."""
        return await self.ask(calls.plan(body))

    async def jobs(self, **filters: Any) -> Document:
        """See ``Client.jobs``."""
        return await self.ask(calls.jobs(filters))

    async def job(self, job: str) -> Document:
        """See ``Client.job``."""
        return await self.ask(calls.get(calls.job_path(job)))

    async def part(self, job: str, name: str, **params: Any) -> Document:
        """``explain``, ``why``, ``failures``, ``graph``, ``placement``, ``spec``, ``logs`` or ``events`` of a job."""
        return await self.ask(calls.get(calls.job_path(job, name), **params))

    async def stop(self, job: str, *, grace_s: float | None = None) -> Document:
        """See ``Client.stop``."""
        return await self.ask(calls.stop(job, grace_s=grace_s))

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

    async def events(self, job: str, **filters: Any) -> AsyncIterator[Document]:
        """Events of a job as they happen, until it has ended; without gap over lost connections."""
        ask, last, broken = calls.get(calls.job_path(job, "events"), **{**filters, "follow": True}), "", 0
        while True:
            try:
                async for event in self._stream_once(ask, last):
                    last, broken = event.id or last, 0
                    if event.event == "end":
                        return
                    if event.event == "event":
                        yield event.document()
            except httpx.TransportError as exc:
                broken += 1
                if broken > RETRIES_MAX:
                    raise self.unreachable(exc) from exc
                await asyncio.sleep(self.wait_s(broken))
            else:
                return

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
