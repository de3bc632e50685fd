"""Client: everything the REST interface answers, as documents; errors as the tree of spec/errors.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import monotonic, sleep  # noqa: TID251 - runs in the user's process, where Rota has no clock
from typing import Any, Self

import httpx

from rota.service import calls
from rota.service.account_calls import AccountCalls
from rota.service.async_client import AsyncClient as AsyncClient
from rota.service.calls import Ask, Sse, SseReader
from rota.service.questions import Questions
from rota.service.wire import (
    PAGE_MAX,
    RETRIES_MAX,
    STREAM_SILENCE_S,
    TIMEOUT_S,
    Document,
    Wire,
    body_of,
    timed_out,
)
from rota.spec.states import JobState


class Client(Wire, Questions[Document]):
    """The REST interface in Python.

    ``server`` and ``token`` default to ROTA_SERVER and ROTA_TOKEN, then to the service of this machine. Every method
    gives the JSON document of the interface as a dict and raises the exceptions of ``rota.spec.errors``: NotReachable
    when nobody answers, UnknownName for a job that does not exist, JobFileError with every problem of a job file.
    """

    def __init__(
        self,
        server: str = "",
        token: str = "",
        *,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(server, token, timeout_s)
        self._http = httpx.Client(**self.http_options, transport=transport)
        self.accounts = AccountCalls(self.ask)
        """Users, tokens, secrets, the audit."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def ask(self, ask: Ask) -> Document:
        """Send one request; ``safe`` ones again when the connection broke."""
        for attempt in range(RETRIES_MAX + 1):
            try:
                answer = self._http.request(
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
                sleep(self.wait_s(attempt))
            else:
                return self.read(answer)
        raise AssertionError("the last attempt returns or raises")

    def run(
        self,
        job: Any = None,
        *,
        set: Mapping[str, Any] | Sequence[str] = (),
        command: Sequence[str] = (),
        workdir: str = "",
        key: str = "",
        **resources: Any,
    ) -> JobHandle:
        """Submit a job (path, text, JobSpec or ``rota.Job``), or a ``command`` with cpus, gpus, memory.

        Durable when this returns. Raises JobFileError, Infeasible, UnknownName, LimitExceeded.
        """
        body = body_of(job, sets=set, command=command, workdir=workdir, res=resources)
        return JobHandle(self, self.submit(body, key=key))

    def attach(self, job: str) -> JobHandle:
        """The handle of a job that exists."""
        return JobHandle(self, self.job(job))

    def all_jobs(self, **filters: Any) -> Iterator[Document]:
        """Every job of the list, page by page."""
        cursor = ""
        while True:
            page = self.jobs(**{**filters, "cursor": cursor, "limit": PAGE_MAX})
            yield from page["items"]
            cursor = page.get("next") or ""
            if not cursor:
                return

    def log_pages(self, job: str, **filters: Any) -> Iterator[Document]:
        """``LogPage``, page after page until there is nothing more; one page of the last lines with ``tail``."""
        page = self.log_page(job, **filters)
        yield page
        while filters.get("tail") is None and page["next"] != filters.get("cursor", ""):
            filters["cursor"] = page["next"]
            page = self.log_page(job, **filters)
            yield page

    def logs(self, job: str, *, follow: bool = False, **filters: Any) -> Iterator[Document]:
        """Log lines in the order of time; with ``follow`` until the job has ended.

        ``filters``: ``instance`` (``role/rank`` or a role), ``attempt``, ``since``, ``until`` (seconds since 1970),
        ``grep``, ``stream``, ``tail``. Raises BadInput for any other.
        """
        if not follow:
            for page in self.log_pages(job, **filters):
                yield from page["items"]
            return
        seen: dict[str, int] = {}
        for event in self._stream(calls.job_path(job, "logs"), {**filters, "follow": True}):
            line = event.document()
            # after a lost connection the service repeats the batch that was under way
            if event.event == "line" and line["offset"] > seen.get(line["instance"], -1):
                seen[line["instance"]] = line["offset"]
                yield line

    def events(self, job: str = "", *, follow: bool = False, **filters: Any) -> Iterator[Document]:
        """Events in order, of a job or of everything; with ``follow`` without gap over lost connections, until the job
        has ended.
        """
        if not follow:
            for page in self.event_pages(job, **filters):
                yield from page["items"]
            return
        for event in self._stream(calls.events_path(job), {**filters, "follow": True}):
            if event.event == "event":
                yield event.document()

    def event_pages(self, job: str = "", **filters: Any) -> Iterator[Document]:
        """``EventList``, page after page until there is no next one."""
        page = self.event_page(job, **filters)
        yield page
        while page["next"] is not None:
            page = self.event_page(job, **{**filters, "after": page["next"]})
            yield page

    def _stream(self, path: str, params: Mapping[str, Any]) -> Iterator[Sse]:
        ask, last, broken = calls.get(path, **params), "", 0
        while True:
            try:
                for event in self._stream_once(ask, last):
                    last, broken = event.id or last, 0
                    yield event
                    if event.event == "end":
                        return
            except httpx.TransportError as exc:
                broken += 1
                if not self.may_reconnect(exc, broken, last):
                    raise self.unreachable(exc) from exc
                sleep(self.wait_s(broken))
            else:
                return  # the service closed the stream in order

    def _stream_once(self, ask: Ask, last: str) -> Iterator[Sse]:
        timeout = httpx.Timeout(self.timeout_s, read=STREAM_SILENCE_S)
        headers = self.stream_headers(last)
        with self._http.stream("GET", ask.path, params=dict(ask.params), headers=headers, timeout=timeout) as answer:
            if answer.status_code >= 400:
                answer.read()
                raise calls.error_of(answer.status_code, answer.text, url=str(answer.request.url))
            reader = SseReader()
            for line in answer.iter_lines():
                event = reader.line(line)
                if event is not None:
                    yield event

    def wait(self, job: str, *, timeout_s: float | None = None, poll_s: float = 0.2) -> Document:
        """The ``Job`` document once the job has ended. Raises TimedOut; the job goes on then."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        while True:
            document = self.job(job)
            if JobState(document["state"]).terminal:
                return document
            if deadline is not None and monotonic() + poll_s > deadline:
                raise timed_out(document, timeout_s or 0.0)
            sleep(poll_s)


class JobHandle:
    """One job of a client. ``state``, ``reason`` and ``document`` are those of the last answer."""

    def __init__(self, client: Client, document: Document) -> None:
        self._client = client
        self.document = document

    @property
    def id(self) -> str:
        return str(self.document["id"])

    @property
    def state(self) -> JobState:
        return JobState(self.document["state"])

    @property
    def reason(self) -> str:
        return str(self.document.get("reason") or "")

    def refresh(self) -> Self:
        """Ask again."""
        self.document = self._client.job(self.id)
        return self

    def wait(self, timeout_s: float | None = None) -> Self:
        """Until the job has ended. Raises TimedOut."""
        self.document = self._client.wait(self.id, timeout_s=timeout_s)
        return self

    def logs(self, instance: str = "", *, follow: bool = False, **filters: Any) -> Iterator[Document]:
        """Log lines of ``role/rank``, of a role, or of all."""
        return self._client.logs(self.id, follow=follow, instance=instance, **filters)

    def events(self, *, follow: bool = False, **filters: Any) -> Iterator[Document]:
        """Events."""
        return self._client.events(self.id, follow=follow, **filters)

    def explain(self) -> Document:
        """Why it is where it is."""
        return self._client.explain(self.id)

    def failures(self) -> Document:
        """What failed, and what was done."""
        return self._client.failures(self.id)

    def set(self, **changes: Any) -> Self:
        """Change priority, queue, time_limit_s or labels."""
        self.document = self._client.change(self.id, changes)
        return self

    def pause(self, *, grace_s: float | None = None) -> Self:
        """Ask it to give its devices back and wait."""
        self.document = self._client.pause(self.id, grace_s=grace_s)
        return self

    def resume(self) -> Self:
        """Put it into the queue again."""
        self.document = self._client.resume(self.id)
        return self

    def scale(self, role: str, n: int) -> Self:
        """Ask for ``n`` instances of a role."""
        self.document = self._client.scale(self.id, role, n)
        return self

    def stop(self, *, grace_s: float | None = None) -> Self:
        """Ask it to end."""
        self._client.stop(self.id, grace_s=grace_s)
        return self.refresh()
