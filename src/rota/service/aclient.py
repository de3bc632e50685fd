"""AsyncClient: the requests of the API, awaited; what both clients do is written here, over an ``AsyncIo``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, Unpack, cast

import httpx

from rota.service.api import (
    AccountApi,
    ApiRequest,
    Built,
    CommandResources,
    EventFilters,
    JobApi,
    JobFilters,
    LogFilters,
    Overrides,
    body_of,
    copy_of,
    events_path,
    get,
    job_path,
)
from rota.service.copy import Copied, chosen, incoming, targets
from rota.service.http import (
    RETRIES_MAX,
    STREAM_SILENCE_S,
    TIMEOUT_S,
    HttpBase,
    HttpOptions,
    Sse,
    SseReader,
    refused,
    timed_out,
)
from rota.service.terminal import TerminalApi, TerminalOutput, follow_terminal
from rota.service.user_process import monotonic, pause
from rota.spec.ids import parts_of
from rota.spec.states import JobState

if TYPE_CHECKING:
    from rota.service.models.jobs import EventList, EventRecord, FileRow, JobDocument, JobRow, LogLine, LogPage
    from rota.spec.job import JobSpec

D = TypeVar("D")
T = TypeVar("T")
PAGE_MAX = 200


class AsyncIo:
    """The network, time, and work that takes long, for a client in an event loop."""

    def __init__(self, options: HttpOptions, transport: httpx.AsyncBaseTransport | None) -> None:
        self.http = httpx.AsyncClient(**options, transport=transport)

    async def send(self, request: httpx.Request) -> httpx.Response:
        """The answer, read."""
        return await self.http.send(request)

    async def lines(self, request: httpx.Request) -> AsyncGenerator[str]:
        """Lines of an answer as they come. Raises the exception of a refusal."""
        answer = await self.http.send(request, stream=True)
        try:
            if answer.status_code >= 400:
                await answer.aread()
                raise refused(answer)
            async for line in answer.aiter_lines():
                yield line
        finally:
            await answer.aclose()

    async def sleep(self, pause_s: float) -> None:
        """Wait."""
        await pause(pause_s)

    async def do(self, work: Callable[[], T]) -> T:
        """The result of work that may take long."""
        return await asyncio.to_thread(work)

    async def close(self) -> None:
        """Close the connections."""
        await self.http.aclose()


class AsyncAccounts(AccountApi):
    """``AsyncClient.accounts``: users, tokens, secrets, webhooks, the audit log."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def ask(self, request: ApiRequest[D]) -> D:
        """As that of the client."""
        return await self._client.ask(request)


class AsyncClient(HttpBase, JobApi, TerminalApi):
    """The methods of ``Client``, awaited."""

    def __init__(
        self,
        server: str = "",
        token: str = "",
        *,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
        io: Callable[[HttpOptions], AsyncIo] | None = None,
    ) -> None:
        super().__init__(server, token, timeout_s)
        self._io = io(self.http_options) if io else AsyncIo(self.http_options, transport)
        self.accounts = AsyncAccounts(self)
        """Users, tokens, secrets, webhooks, the audit log."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._io.close()

    async def ask(self, request: ApiRequest[D]) -> D:
        """Send one request; ``safe`` ones again when the connection broke."""
        return cast("D", self.read(await self._answer(request)))

    async def _answer(self, request: ApiRequest[D]) -> httpx.Response:
        for attempt in range(RETRIES_MAX + 1):
            try:
                return await self._io.send(self._built(request))
            except httpx.TransportError as exc:
                if not self.may_retry(request, exc, attempt):
                    raise self.unreachable(exc) from exc
                await self._io.sleep(self.wait_s(attempt))
        raise AssertionError("the last attempt returns or raises")

    def _built(
        self, request: ApiRequest[D], headers: dict[str, str] | None = None, timeout: httpx.Timeout | None = None
    ) -> httpx.Request:
        return self._io.http.build_request(
            request.method,
            request.path,
            params=cast("dict[str, str]", request.params),
            json=request.body,
            headers={**request.headers, **(headers or {})},
            timeout=timeout or self.timeout_of(request),
        )

    async def run(
        self,
        job: str | Path | JobSpec | Built | None = None,
        *,
        set: Overrides = (),
        command: Sequence[str] | None = None,
        workdir: str = "",
        key: str = "",
        ignore_image: bool = False,
        **resources: Unpack[CommandResources],
    ) -> JobDocument:
        """Submit a job (path, text, JobSpec or ``rota.Job``), or a ``command`` (words, or a text for a shell)
        with cpus, gpus, memory. ``ignore_image`` runs one that names an image without it.

        Durable when this returns. Raises JobFileError, Infeasible, UnknownName, LimitExceeded.
        """
        made = partial(body_of, job, sets=set, command=command, workdir=workdir, res=resources)
        body = await self._io.do(made)
        if ignore_image:
            body["ignore_image"] = True
        return await self.submit(body, key=key)

    async def clone(self, job: str, *, set: Overrides = (), key: str = "", ignore_image: bool = False) -> JobDocument:
        """Submit a job, live or ended, again as it is now, with ``set`` over it. It begins anew, without its commits.

        Raises what ``run`` raises, and UnknownName for a job that does not exist.
        """
        body = copy_of(await self.job(job), await self.spec(job), sets=set, ignore_image=ignore_image)
        return await self.submit(body, key=key)

    async def wait(self, job: str, *, timeout_s: float | None = None, poll_s: float = 0.2) -> JobDocument:
        """The ``Job`` document once the job has ended. Raises TimedOut; the job keeps running then."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        while True:
            document = await self.job(job)
            if JobState(document["state"]).terminal:
                return document
            if deadline is not None and monotonic() + poll_s > deadline:
                raise timed_out(document, timeout_s or 0.0)
            await self._io.sleep(poll_s)

    async def copy(self, job: str, path: str = "", target: str | Path = ".", *, node: str = "") -> Copied:
        """Copy a file or folder of the output folder of a job, from whichever machine has it.

        As with ``cp -r``: into ``target`` where that is a folder, else under that name. Links are left out, files are
        whole or not there. Raises UnknownName, BadInput (a path outside), Conflict (machines have different files of
        that name and no ``node`` was given).
        """
        root, found = Path(target), await self.files(job, path, node=node)
        files: list[tuple[FileRow, Path]] = []
        left_out: list[str] = []
        for row, where in targets(chosen(found["items"]), "/".join(parts_of(path)), root):
            if row["kind"] == "folder":
                where.mkdir(parents=True, exist_ok=True)
            elif row["kind"] == "other":
                left_out.append(row["path"])
            else:
                with incoming(where, root if root.is_dir() else where.parent, row["bytes"]) as file:
                    while data := await self._part(job, row, file.tell()):
                        file.write(data)
                files.append((row, where))
        return Copied(files=tuple(files), left_out=tuple(left_out), notices=tuple(found["notices"]))

    async def _part(self, job: str, row: FileRow, offset: int) -> bytes:
        where = {"path": row["path"], "node": row["node"], "offset": offset}
        answer = await self._answer(get(job_path(job, "files/part"), where))
        if answer.status_code >= 400:
            raise refused(answer)
        return answer.content

    async def all_jobs(self, **filters: Unpack[JobFilters]) -> AsyncIterator[JobRow]:
        """Every job of the list, page by page."""
        page = await self.jobs(**{**filters, "cursor": "", "limit": PAGE_MAX})
        while True:
            for one in page["items"]:
                yield one
            if not page["next"]:
                return
            page = await self.jobs(**{**filters, "cursor": page["next"], "limit": PAGE_MAX})

    async def log_pages(self, job: str, **filters: Unpack[LogFilters]) -> AsyncIterator[LogPage]:
        """``LogPage``, page after page until there is nothing more; one page of the last lines with ``tail``."""
        page = await self.log_page(job, **filters)
        yield page
        while filters.get("tail") is None and page["next"] != filters.get("cursor", ""):
            filters["cursor"] = page["next"]
            page = await self.log_page(job, **filters)
            yield page

    async def logs(
        self,
        job: str,
        *,
        follow: bool = False,
        notice: Callable[[str], None] = lambda _: None,
        **filters: Unpack[LogFilters],
    ) -> AsyncIterator[LogLine]:
        """Log lines in the order of time; with ``follow`` until the job has ended.

        ``notice`` is called with a sentence for each machine that has lines and does not answer. Raises BadInput for an
        unknown filter.
        """
        if not follow:
            notices = dict[str, None]()
            async for page in self.log_pages(job, **filters):
                notices |= dict.fromkeys(page["notices"])
                for line in page["items"]:
                    yield line
            for text in notices:
                notice(text)
            return
        seen: dict[tuple[str, str], int] = {}
        async with aclosing(self._stream(job_path(job, "logs"), {**filters, "follow": True})) as events:
            async for event in events:
                if event.event == "notice":
                    notice(str(cast("Mapping[str, object]", event.document())["text"]))
                if event.event != "line":
                    continue
                line = cast("LogLine", event.document())
                # after a lost connection the service repeats the batch that was under way
                file = line["instance"], line["node"]
                if line["offset"] > seen.get(file, -1):
                    seen[file] = line["offset"]
                    yield line

    async def event_pages(self, job: str = "", **filters: Unpack[EventFilters]) -> AsyncIterator[EventList]:
        """``EventList``, page after page to the last one."""
        page = await self.event_page(job, **filters)
        yield page
        while page["next"] is not None:
            page = await self.event_page(job, **{**filters, "after": page["next"]})
            yield page

    async def events(
        self, job: str = "", *, follow: bool = False, **filters: Unpack[EventFilters]
    ) -> AsyncIterator[EventRecord]:
        """Events in order, of a job or of everything; with ``follow`` without gap over lost connections, until the job
        has ended.
        """
        if not follow:
            async for page in self.event_pages(job, **filters):
                for event in page["items"]:
                    yield event
            return
        async with aclosing(self._stream(events_path(job), {**filters, "follow": True})) as events:
            async for event in events:
                if event.event == "event":
                    yield cast("EventRecord", event.document())

    def terminal_output(self, job: str, terminal: str) -> AsyncIterator[TerminalOutput]:
        """What the program on a terminal writes, over lost connections and a new service, until it has ended.

        Raises UnknownName for a job that is not there, NotReachable when the service stays away.
        """
        return follow_terminal(self._stream, self._wait_before, self.url, job, terminal)

    async def _wait_before(self, tries: int) -> None:
        """Wait before one more try, the longer the more there were."""
        await self._io.sleep(self.wait_s(tries))

    async def _stream(self, path: str, params: Mapping[str, object], last: str = "") -> AsyncGenerator[Sse]:
        """Server-sent events after the id ``last``, over lost connections, until one ``end`` or the service ends."""
        request, broken = get(path, params), 0
        while True:
            try:
                async with aclosing(self._stream_once(request, last)) as events:
                    async for event in events:
                        last, broken = event.id or last, 0
                        yield event
                        if event.event == "end":
                            return
            except httpx.TransportError as exc:
                broken += 1
                if not self.may_reconnect(exc, broken, last):
                    raise self.unreachable(exc) from exc
                await self._wait_before(broken)
            else:
                return  # the service closed the stream in order

    async def _stream_once(self, request: ApiRequest[object], last: str) -> AsyncGenerator[Sse]:
        timeout, reader = httpx.Timeout(self.timeout_s, read=STREAM_SILENCE_S), SseReader()
        lines = self._io.lines(self._built(request, self.stream_headers(last), timeout))
        async with aclosing(lines):  # a connection is given back with the last iterator, and not at some time
            async for line in lines:
                if (event := reader.line(line)) is not None:
                    yield event
