"""Requests about terminals beside instances: open one, follow its output over lost connections, type into it."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from rota.service.api import API_PATH, ApiRequest, job_path, request
from rota.service.http import RECONNECTS_MAX, Sse, not_reachable

if TYPE_CHECKING:
    from rota.service.models.jobs import TerminalDocument, TerminalInputDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalOutput:
    """What a program wrote to its terminal; the last one says how it ended: ``exit_status``, or why none is known."""

    data: bytes = b""
    ended: bool = False
    exit_status: int | None = None
    text: str = ""


def _path(job: str, terminal: str) -> str:
    return job_path(job, f"terminals/{quote(terminal, safe='')}")


class TerminalApi:
    """Requests about terminals."""

    @request
    def open_terminal(
        self,
        job: str,
        instance: str = "",
        argv: Sequence[str] = (),
        *,
        term: str = "dumb",
        rows: int = 24,
        columns: int = 80,
    ) -> ApiRequest[TerminalDocument]:
        """``Terminal``: run a command (else a shell) on a terminal beside an instance (else the first).

        It is hung up when nothing was sent to it for 30 s. Raises Conflict when the instance does not run.
        """
        body = {"instance": instance, "argv": list(argv), "term": term, "rows": rows, "columns": columns}
        return ApiRequest(method="POST", path=f"{API_PATH}{job_path(job)}:terminal", body=body, safe=False)

    @request
    def type_into(
        self,
        job: str,
        terminal: str,
        data: bytes = b"",
        *,
        offset: int = 0,
        size: tuple[int, int] | None = None,
        leave: bool = False,
    ) -> ApiRequest[TerminalInputDocument]:
        """``TerminalInput``: send input that begins at an offset of all input, a new size (rows, columns), or hang up.

        Without any it is a sign of life. What was ``taken`` before is not taken twice.
        """
        rows, columns = size or (None, None)
        body = {"offset": offset, "data": base64.b64encode(data).decode(), "rows": rows, "columns": columns}
        return ApiRequest(method="POST", path=API_PATH + _path(job, terminal), body={**body, "leave": leave})


async def follow_terminal(
    stream: Callable[[str, Mapping[str, object], str], AsyncGenerator[Sse]],
    wait: Callable[[int], Awaitable[None]],
    url: str,
    job: str,
    terminal: str,
) -> AsyncIterator[TerminalOutput]:
    """What the program on a terminal writes, over lost connections and a new service, until it has ended.

    ``stream`` gives events of a path with parameters after an id, ``wait`` waits before one more try.

    Raises UnknownName for a job that is not there, NotReachable when the service stays away.
    """
    last, closed = "", 0
    while True:
        async with aclosing(stream(_path(job, terminal), {}, last)) as events:
            async for event in events:
                last, closed = event.id or last, 0
                found = cast("dict[str, Any]", event.document())
                if event.event == "end":
                    yield TerminalOutput(ended=True, exit_status=found["exit_status"], text=found["text"])
                    return
                yield TerminalOutput(data=base64.b64decode(found["data"]))
        closed += 1  # the service ends, and not the program
        if closed > RECONNECTS_MAX:
            raise not_reachable(url, "it closes the connection again and again")
        last = last or "0"
        await wait(closed)
