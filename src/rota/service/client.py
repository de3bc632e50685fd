"""Client: the requests of the API, answered with their documents; errors as the tree of spec/errors.py."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from functools import partial, wraps
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import httpx

from rota.service.aclient import AsyncClient as AsyncClient
from rota.service.aclient import AsyncIo
from rota.service.api import (
    AccountApi,
    ApiRequest,
    EventFilters,
    JobApi,
    LineFilters,
    Overrides,
)
from rota.service.http import TIMEOUT_S, HttpOptions, refused
from rota.service.notebook import pairs_html
from rota.service.terminal import TerminalApi
from rota.service.user_process import monotonic, sleep
from rota.spec.errors import TimedOut
from rota.spec.states import JobState

if TYPE_CHECKING:
    from rota.service.models.jobs import (
        EventRecord,
        JobDocument,
        LogLine,
        TraceDocument,
    )
    from rota.service.models.reasons import Explanation, FailureList, WaitGraphDocument, WhatIf

D = TypeVar("D")
P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
PROGRESS_S = 1.0
"""Between two looks at a job whose progress is printed."""


class _BlockingIo(AsyncIo):
    """Waits where it is called: no coroutine over it is ever suspended, so that ``_now`` and ``_each`` need no loop."""

    def __init__(self, options: HttpOptions, transport: httpx.BaseTransport | None) -> None:
        self.http = httpx.Client(**options, transport=transport)

    async def send(self, request: httpx.Request) -> httpx.Response:
        return self.http.send(request)

    async def lines(self, request: httpx.Request) -> AsyncGenerator[str]:
        answer = self.http.send(request, stream=True)
        try:
            if answer.status_code >= 400:
                answer.read()
                raise refused(answer)
            for line in answer.iter_lines():
                yield line
        finally:
            answer.close()

    async def sleep(self, pause_s: float) -> None:
        sleep(pause_s)

    async def do(self, work: Callable[[], T]) -> T:
        return work()

    async def close(self) -> None:
        self.http.close()


def _now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that is never suspended."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("blocking input and output never suspends")


def _each(items: AsyncIterator[T]) -> Iterator[T]:
    """The items of an asynchronous generator that is never suspended."""
    assert isinstance(items, AsyncGenerator)
    try:
        while True:
            yield _now(items.__anext__())
    except StopAsyncIteration:
        return
    finally:
        _now(items.aclose())


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], S], wait: Callable[[S], T]
) -> Callable[Concatenate[Client, P], T]:
    """The method of ``Client`` that waits with ``wait`` for what one of ``AsyncClient`` gives."""

    @wraps(method)
    def call(client: Client, /, *args: P.args, **given: P.kwargs) -> T:
        return wait(method(client._async, *args, **given))

    return call


def _handle(
    submit: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, JobDocument]],
) -> Callable[Concatenate[Client, P], JobHandle]:
    """The method of ``Client`` that gives the handle of the job which a method of ``AsyncClient`` submits."""

    @wraps(submit)
    def call(client: Client, /, *args: P.args, **given: P.kwargs) -> JobHandle:
        return JobHandle(client, _now(submit(client._async, *args, **given)))

    return call


class Accounts(AccountApi):
    """``Client.accounts``: users, tokens, secrets, webhooks, the audit log."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def ask(self, request: ApiRequest[D]) -> D:
        """As that of the client."""
        return self._client.ask(request)


class Client(JobApi, TerminalApi):
    """The REST API in Python.

    ``server`` and ``token`` default to ROTA_SERVER and ROTA_TOKEN, then to the service of this machine. Every method
    returns the JSON document of the API as a dict and raises the exceptions of ``rota.spec.errors``: NotReachable
    when no service answers, UnknownName for a job that does not exist, JobFileError with every problem of a job file.
    """

    def __init__(
        self,
        server: str = "",
        token: str = "",
        *,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        io = partial(_BlockingIo, transport=transport)
        self._async = AsyncClient(server, token, timeout_s=timeout_s, io=io)
        self.url = self._async.url
        self.accounts = Accounts(self)
        """Users, tokens, secrets, webhooks, the audit log."""

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        _now(self._async.__aexit__())

    def ask(self, request: ApiRequest[D]) -> D:
        """Send one request; ``safe`` ones again when the connection broke."""
        return _now(self._async.ask(request))

    run = _handle(AsyncClient.run)
    clone = _handle(AsyncClient.clone)
    wait = _blocking(AsyncClient.wait, _now)
    copy = _blocking(AsyncClient.copy, _now)
    all_jobs = _blocking(AsyncClient.all_jobs, _each)
    log_pages = _blocking(AsyncClient.log_pages, _each)
    logs = _blocking(AsyncClient.logs, _each)
    event_pages = _blocking(AsyncClient.event_pages, _each)
    events = _blocking(AsyncClient.events, _each)
    terminal_output = _blocking(AsyncClient.terminal_output, _each)

    def attach(self, job: str) -> JobHandle:
        """The handle of a job that exists."""
        return JobHandle(self, self.job(job))


class JobHandle:
    """One job of a client. ``state``, ``reason`` and ``document`` are those of the last answer."""

    def __init__(self, client: Client, document: JobDocument) -> None:
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

    @property
    def output_dir(self) -> Path:
        """The folder of its results."""
        return Path(self.document["output"])

    def __repr__(self) -> str:
        why = self.document["text"] or self.document["phase"]
        return f"<{self.id} {self.state.value}{': ' if why else ''}{why}>"

    def _repr_html_(self) -> str:
        """The job as a notebook shows it."""
        one = self.document
        ready = f"{one['instances_ready']} of {one['instances_total']}"
        commit = (one["progress"] or {}).get("commit")
        facts = {"state": one["state"], "step": one["phase"], "why": one["text"], "queue": one["queue"], "ready": ready}
        more = {"commit": commit, "failovers": one["failovers"] or None, "output": one["output"], "page": one["url"]}
        shown = [(name, value) for name, value in (facts | more).items() if value not in (None, "")]
        return f"<b>{escape(self.id)}</b>{pairs_html(shown)}"

    def refresh(self) -> Self:
        """Ask again."""
        self.document = self._client.job(self.id)
        return self

    def wait(self, timeout_s: float | None = None, *, progress: bool | None = None) -> Self:
        """Until the job has ended. Raises TimedOut.

        ``progress`` prints each change of its state, step or reason on stderr; by default in a notebook.
        """
        if not ("ipykernel" in sys.modules if progress is None else progress):
            self.document = self._client.wait(self.id, timeout_s=timeout_s)
            return self
        began_s, shown = monotonic(), ""
        while True:
            if (text := repr(self).strip("<>")) != shown:
                sys.stderr.write(f"{text}\n")
                shown = text
            if self.state.terminal:
                return self
            left_s = PROGRESS_S if timeout_s is None else min(PROGRESS_S, timeout_s - (monotonic() - began_s))
            try:
                self.document = self._client.wait(self.id, timeout_s=max(left_s, 0.0))
            except TimedOut:
                if left_s < PROGRESS_S:
                    raise
                self.refresh()

    def logs(
        self, instance: str = "", *, role: str = "", follow: bool = False, **filters: Unpack[LineFilters]
    ) -> Iterator[LogLine]:
        """Log lines of ``role/rank``, of a role, or of all."""
        return self._client.logs(self.id, follow=follow, instance=instance or role, **filters)

    def events(self, *, follow: bool = False, **filters: Unpack[EventFilters]) -> Iterator[EventRecord]:
        """Events."""
        return self._client.events(self.id, follow=follow, **filters)

    def explain(self) -> Explanation:
        """Why it waits, or where it runs."""
        return self._client.explain(self.id)

    def what_if(self, changes: Overrides) -> WhatIf:
        """When it would start with these changes, and what would bind it; none is made."""
        return self._client.what_if(self.id, changes)

    def why(self) -> WaitGraphDocument:
        """Which instance waits for which."""
        return self._client.why(self.id)

    def trace(self, path: str | Path = "") -> TraceDocument:
        """What every instance ran and waited for; written to ``path``, if given, for Perfetto."""
        found = self._client.trace(self.id)
        if path:
            Path(path).write_text(json.dumps(found), encoding="utf-8")
        return found

    def failures(self) -> FailureList:
        """What failed, and what was done."""
        return self._client.failures(self.id)

    def set(self, **changes: object) -> Self:
        """Change priority, queue, time_limit_s or labels."""
        self.document = self._client.change(self.id, changes)
        return self

    def pause(self, *, grace_s: float | None = None) -> Self:
        """Ask it to give its devices back and wait."""
        self.document = self._client.pause(self.id, grace_s=grace_s)
        return self

    def resume(self, *, from_commit: int | None = None) -> Self:
        """Put it into the queue again, at its last commit or at ``from_commit``.

        Of a job that ended ``from_commit`` begins a new job; this is then the handle of that one.
        """
        self.document = self._client.resume(self.id, from_commit=from_commit)
        return self

    def scale(self, role: str, n: int) -> Self:
        """Ask for ``n`` instances of a role."""
        self.document = self._client.scale(self.id, role, n)
        return self

    def stop(self, *, grace_s: float | None = None) -> Self:
        """Ask it to end."""
        self._client.stop(self.id, grace_s=grace_s)
        return self.refresh()
