"""Client: everything the REST interface answers, as documents; errors as the tree of spec/errors.py."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from time import sleep  # noqa: TID251 - runs in the user's process, where Rota has no clock
from typing import Any, Self, TypeVar

import httpx

from rota.service.account_calls import AccountCalls
from rota.service.aclient import AsyncClient as AsyncClient
from rota.service.aclient import AsyncWay
from rota.service.calls import Ask
from rota.service.http import TIMEOUT_S, Document, refused
from rota.service.questions import Questions
from rota.spec.states import JobState

T = TypeVar("T")


class _BlockingWay(AsyncWay):
    """Waits where it is called: no coroutine over it is ever suspended, so that ``_now`` and ``_each`` need no loop."""

    def __init__(self, options: dict[str, Any], transport: Any) -> None:
        self._http = httpx.Client(**options, transport=transport)

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._http.request(method, path, **options)

    async def lines(self, path: str, **options: Any) -> AsyncGenerator[str]:
        with self._http.stream("GET", path, **options) as answer:
            if answer.status_code >= 400:
                answer.read()
                raise refused(answer)
            for line in answer.iter_lines():
                yield line

    async def sleep(self, pause_s: float) -> None:
        sleep(pause_s)

    async def do(self, work: Callable[[], T]) -> T:
        return work()

    async def close(self) -> None:
        self._http.close()


class _Blocking(AsyncClient):
    _way_of = _BlockingWay


def _now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that is never suspended."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a way that blocks does not suspend")


def _each(items: AsyncIterator[T]) -> Iterator[T]:
    """What an asynchronous generator that is never suspended gives."""
    assert isinstance(items, AsyncGenerator)
    try:
        while True:
            yield _now(items.__anext__())
    except StopAsyncIteration:
        return
    finally:
        _now(items.aclose())


class Client(Questions[Document]):
    """The REST interface in Python.

    ``server`` and ``token`` default to ROTA_SERVER and ROTA_TOKEN, then to the service of this machine. Every method
    gives the JSON document of the interface as a dict and raises the exceptions of ``rota.spec.errors``: NotReachable
    when nobody answers, UnknownName for a job that does not exist, JobFileError with every problem of a job file.
    """

    def __init__(
        self, server: str = "", token: str = "", *, timeout_s: float = TIMEOUT_S, transport: Any = None
    ) -> None:
        self._talk = _Blocking(server, token, timeout_s=timeout_s, transport=transport)
        self.url = self._talk.url
        self.accounts = AccountCalls(self.ask)
        """Users, tokens, secrets, the audit."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        _now(self._talk.__aexit__())

    def ask(self, ask: Ask) -> Document:
        """Send one request; ``safe`` ones again when the connection broke."""
        return _now(self._talk.ask(ask))

    def run(
        self,
        job: Any = None,
        *,
        set: Mapping[str, Any] | Sequence[str] = (),
        command: Sequence[str] | None = None,
        workdir: str = "",
        key: str = "",
        ignore_image: bool = False,
        **resources: Any,
    ) -> JobHandle:
        """Submit a job (path, text, JobSpec or ``rota.Job``), or a ``command`` (words, or a text for a shell)
        with cpus, gpus, memory. One that names an image is refused without ``ignore_image``.

        Durable when this returns. Raises JobFileError, Infeasible, UnknownName, LimitExceeded.
        """
        given: dict[str, Any] = {"command": command, "workdir": workdir, "key": key, "ignore_image": ignore_image}
        made = self._talk.run(job, set=set, **given, **resources)
        return JobHandle(self, _now(made))

    def attach(self, job: str) -> JobHandle:
        """The handle of a job that exists."""
        return JobHandle(self, self.job(job))

    def all_jobs(self, **filters: Any) -> Iterator[Document]:
        """Every job of the list, page by page."""
        return _each(self._talk.all_jobs(**filters))

    def log_pages(self, job: str, **filters: Any) -> Iterator[Document]:
        """``LogPage``, page after page until there is nothing more; one page of the last lines with ``tail``."""
        return _each(self._talk.log_pages(job, **filters))

    def logs(self, job: str, *, follow: bool = False, **filters: Any) -> Iterator[Document]:
        """Log lines in the order of time; with ``follow`` until the job has ended.

        ``filters``: ``instance`` (``role/rank`` or a role), ``attempt``, ``since``, ``until`` (seconds since 1970),
        ``grep``, ``stream``, ``tail``. Raises BadInput for any other.
        """
        return _each(self._talk.logs(job, follow=follow, **filters))

    def events(self, job: str = "", *, follow: bool = False, **filters: Any) -> Iterator[Document]:
        """Events in order, of a job or of everything; with ``follow`` without gap over lost connections, until the job
        has ended.
        """
        return _each(self._talk.events(job, follow=follow, **filters))

    def event_pages(self, job: str = "", **filters: Any) -> Iterator[Document]:
        """``EventList``, page after page until there is no next one."""
        return _each(self._talk.event_pages(job, **filters))

    def wait(self, job: str, *, timeout_s: float | None = None, poll_s: float = 0.2) -> Document:
        """The ``Job`` document once the job has ended. Raises TimedOut; the job goes on then."""
        return _now(self._talk.wait(job, timeout_s=timeout_s, poll_s=poll_s))


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

    @property
    def output_dir(self) -> Path:
        """The folder of what it leaves."""
        return Path(self.document["output"])

    def __repr__(self) -> str:
        return f"<{self.id} {self.state.value}>"

    def refresh(self) -> Self:
        """Ask again."""
        self.document = self._client.job(self.id)
        return self

    def wait(self, timeout_s: float | None = None) -> Self:
        """Until the job has ended. Raises TimedOut."""
        self.document = self._client.wait(self.id, timeout_s=timeout_s)
        return self

    def logs(self, instance: str = "", *, role: str = "", follow: bool = False, **filters: Any) -> Iterator[Document]:
        """Log lines of ``role/rank``, of a role, or of all."""
        return self._client.logs(self.id, follow=follow, instance=instance or role, **filters)

    def events(self, *, follow: bool = False, **filters: Any) -> Iterator[Document]:
        """Events."""
        return self._client.events(self.id, follow=follow, **filters)

    def explain(self) -> Document:
        """Why it is where it is."""
        return self._client.explain(self.id)

    def why(self) -> Document:
        """Who waits for whom in it."""
        return self._client.why(self.id)

    def trace(self, path: str | Path = "") -> Document:
        """What every instance ran and waited for; written to ``path``, if given, for Perfetto."""
        found = self._client.trace(self.id)
        if path:
            Path(path).write_text(json.dumps(found), encoding="utf-8")
        return found

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
