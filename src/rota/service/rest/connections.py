"""Connections to the service: how many there may be, how long each may keep it waiting; one log line for many."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from collections import Counter
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from rota.runtime.clock import Clock, SystemClock
from rota.spec.codec import JsonObject

HEAD_S = 10.0
"""From the opening of a connection, or its last answer, until the next request has come up to its body."""
CONNECTIONS_MAX = 1024
BACKLOG_MAX = 128
"""Connections that the system keeps until they are taken, and that are taken at once."""
RESERVED_DESCRIPTORS = 32
"""Of those that the process may have open, for the log, files and children: not for connections."""
SHUTDOWN_S = 3
REPEAT_S = 60.0
"""One line of the log for all of a kind within this time."""
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 21\r\n\r\ntoo many connections\n"
)

_log = logging.getLogger("rota.service")


class RateLimitedLog:
    """Logs a warning at most once in ``REPEAT_S``, with the number of those left out since."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._until, self._left_out = now, 0.0, 0

    def warn(self, text: str) -> None:
        """Log the text, or count it."""
        if self._now() < self._until:
            self._left_out += 1
            return
        more = f" ({self._left_out} more of this kind in the last minute)" if self._left_out else ""
        _log.warning("%s%s", text, more)
        self._until, self._left_out = self._now() + REPEAT_S, 0


class Connections:
    """The open connections of one server, the longest without a request of a known caller first.

    When there are too many, in all or of one address, one without a known caller makes room for the new one; if each
    has one, the new one is refused.
    """

    def __init__(self, most: int, clock: Clock) -> None:
        self.clock = clock
        self.most, self.most_of_address = most, max(1, most // 2)
        self._open: dict[HttpConnection, str] = {}
        self._of: Counter[str] = Counter()
        self._full = RateLimitedLog(clock.monotonic_s)

    def admit(self, one: HttpConnection, address: str) -> bool:
        """Accept a connection, closing another one for it if needed; False when the limit is reached."""
        if self._of[address] >= self.most_of_address:
            room = self._make_room(address)
        else:
            room = len(self._open) < self.most or self._make_room(self._of.most_common(1)[0][0]) or self._make_room("")
        if room:
            self._open[one] = address
            self._of[address] += 1
        return room

    def _make_room(self, address: str) -> bool:
        victim = next((one for one, of in self._open.items() if address in ("", of) and not one.serves_known), None)
        count = f"{len(self._open)} connections are open, {self._of[address]} of {address}" if address else "all in use"
        self._full.warn(f"{count}: {'one that sends nothing is closed' if victim else 'a new one is refused'}")
        if victim is None:
            return False
        self.forget(victim)
        victim.transport.abort()
        return True

    def forget(self, one: HttpConnection) -> None:
        """Remove a closed connection; a no-op if it was removed before."""
        if (address := self._open.pop(one, None)) is not None:
            self._of -= Counter([address])  # drops an address at 0: else the table grows with each that ever came

    def renew(self, one: HttpConnection) -> None:
        """Mark as most recently used: it has had an answer."""
        if (address := self._open.pop(one, None)) is not None:
            self._open[one] = address


class HttpConnection(H11Protocol):
    """One connection: closed when no request comes within ``HEAD_S``, however slowly it sends."""

    def __init__(self, shared: Connections, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._shared = shared
        self._late: asyncio.TimerHandle | None = None

    @property
    def serves_known(self) -> bool:
        """True while it answers a request of a caller whose token or session was good."""
        answers = self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison] - None at first
        return answers and bool({"asker", "caller"} & self.cycle.scope.get("state", {}).keys())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] - as uvicorn declares it
        """Accept the connection, or refuse it."""
        super().connection_made(transport)
        if not self._shared.admit(self, self.client[0] if self.client else ""):
            transport.write(_BUSY)
            transport.close()
            return
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection is closed, by either side."""
        self._shared.forget(self)
        self._have_request()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle received data; the limit for a request ends with its head."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._have_request()

    def on_response_complete(self) -> None:
        """The next request may come."""
        self._shared.renew(self)
        self._wait_for_request()
        super().on_response_complete()

    def _wait_for_request(self) -> None:
        self._have_request()
        self._late = self._shared.clock.call_later(HEAD_S, self.transport.abort)

    def _have_request(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def server_config(app: ASGIApp, shared: Connections | None = None) -> uvicorn.Config:
    """How the service is served.

    Without ``shared`` there may be as many connections as the process has descriptors for.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = max(8, soft - RESERVED_DESCRIPTORS)
    backlog = min(BACKLOG_MAX, free // 4)
    shared = shared or Connections(min(CONNECTIONS_MAX, free - backlog), SystemClock())

    def connection(*args: Any, **named: Any) -> HttpConnection:
        return HttpConnection(shared, *args, **named)

    return uvicorn.Config(
        app,
        http=connection,  # type: ignore[arg-type] - any callable does
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=SHUTDOWN_S,
        backlog=backlog,
        ws="none",
    )


def watch_accepts(loop: asyncio.AbstractEventLoop) -> None:
    """A process without a free descriptor says so in a line a minute: the loop would log thousands of tracebacks."""
    limited = RateLimitedLog(SystemClock().monotonic_s)

    def handle(loop: asyncio.AbstractEventLoop, context: JsonObject) -> None:
        error = context.get("exception")
        if "socket" in context and isinstance(error, OSError) and error.errno in _OUT_OF_DESCRIPTORS:
            limited.warn(f"no connection can be taken: {error.strerror}; raise the limit of open files (ulimit -n)")
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
