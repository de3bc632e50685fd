"""Listeners for ports of jobs: each passes requests of a browser that is logged in on to one port of one instance.

A port has a listener of its own, so it is another origin than the page: its scripts cannot read what the service
answers. The session cookie and tokens of Rota stay here. One request a connection, except where it is upgraded.
Cookies know no ports: what the program of one job sets, the browser also sends to those of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

from rota.runtime.clock import Clock
from rota.service.accounts import Caller
from rota.service.rest.auth import COOKIE, Auth, AuthRequest
from rota.spec.errors import LimitExceeded, NotAllowed, NotReachable, RotaError
from rota.spec.ids import JobId

FORWARDS_MAX = 64
"""Ports of jobs that are open at once."""
CONNECTIONS_MAX = 128
"""Connections to one of them at once."""
HEAD_BYTES_MAX, HEAD_S = 65_536, 10.0
CONNECT_S = 5.0
CHUNK_BYTES = 65_536
_CSS = "font-family:sans-serif;max-width:40em;margin:4em auto"
_TOKEN = re.compile(r"\brota_[0-9a-z]+_")

Key = tuple[JobId, str, str]
"""Job, instance, name of the port."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Head:
    """First line and headers of a request or an answer, as they came."""

    first: str
    lines: tuple[str, ...]

    @staticmethod
    def of(raw: bytes) -> Head:
        """Raises ValueError for bytes that are not such a head."""
        first, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        if len(first.split(" ", 2)) < 2 or any(":" not in line or line[:1] in " \t" for line in lines):
            raise ValueError("no head of HTTP/1.1")
        return Head(first, tuple(lines))

    def get(self, name: str) -> str:
        """All values of a header, joined; empty without one."""
        values = [_value(line) for line in self.lines if _name(line) == name]
        return ("; " if name == "cookie" else ", ").join(values)

    @property
    def upgrades(self) -> bool:
        """True for a request such as that of a WebSocket."""
        return "upgrade" in self.get("connection").lower()

    @property
    def interim(self) -> bool:
        """True for an answer that another one follows; 101 is the last one of HTTP."""
        status = self.first.split(" ")[1]
        return status.startswith("1") and status != "101"

    def sent_on(self) -> bytes:
        """The request for the program of the job: without what belongs to Rota, to be answered and closed."""
        kept = [line for line in self.lines if _name(line) not in ("cookie", "connection", "keep-alive")]
        kept = [line for line in kept if not (_name(line) == "authorization" and _TOKEN.search(line))]
        others = [one for one in self.get("cookie").split("; ") if one and one.partition("=")[0] != COOKIE]
        kept += [f"Cookie: {'; '.join(others)}"] if others else []
        kept += ["Connection: Upgrade" if self.upgrades else "Connection: close"]
        return "\r\n".join((self.first, *kept, "", "")).encode("latin-1")

    def sent_back(self) -> bytes:
        """The answer for the browser: the program sets no session of Rota."""
        own = f"{COOKIE}="
        kept = [line for line in self.lines if _name(line) != "set-cookie" or not _value(line).startswith(own)]
        return "\r\n".join((self.first, *kept, "", "")).encode("latin-1")

    def asked(self, address: str) -> AuthRequest:
        """What of the request matters for its permission; a change needs no header of Rota: it is not for Rota.

        Raises NotAllowed for what a page elsewhere makes a browser send.
        """
        headers = {_name(line): _value(line) for line in self.lines}
        if not _TOKEN.search(headers.get("authorization", "")):
            headers.pop("authorization", None)  # it is for the program
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            raise NotAllowed("a page elsewhere may not ask this port")
        cookie = ""
        with contextlib.suppress(CookieError):
            found = SimpleCookie(self.get("cookie")).get(COOKIE)
            cookie = found.value if found is not None else ""
        return AuthRequest(method="GET", headers=headers, cookie=cookie, address=address)


def _name(line: str) -> str:
    return line.partition(":")[0].strip().lower()


def _value(line: str) -> str:
    return line.partition(":")[2].strip()


@dataclass(slots=True)
class Forward:
    """One open port: where the browser asks, where the program listens, when it was last used (monotonic seconds)."""

    server: asyncio.Server
    target: str
    used_s: float
    connections: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    @property
    def port(self) -> int:
        """The number at which the browser asks."""
        return int(self.server.sockets[0].getsockname()[1])


@dataclass(slots=True)
class Forwards:
    """The open ports of jobs. ``may`` raises RotaError for a caller who may not run code in the job.

    ``find`` gives where the program of a port listens now, ``host:port``. Raises RotaError where there is none.
    """

    auth: Auth
    clock: Clock
    host: str
    page_port: int
    may: Callable[[Caller, JobId], object]
    find: Callable[[Key], Awaitable[str]]
    open_ports: dict[Key, Forward] = field(default_factory=dict[Key, Forward])
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self, key: Key) -> int:
        """The port of this machine that leads there, opened now or before.

        Raises LimitExceeded, NotReachable, or what ``find`` raises.
        """
        async with self._opening:
            return await self._opened(key)

    async def _opened(self, key: Key) -> int:
        target = await self.find(key)
        if (known := self.open_ports.get(key)) is not None:
            known.target, known.used_s = target, self.clock.monotonic_s()
            return known.port
        if len(self.open_ports) >= FORWARDS_MAX:
            raise LimitExceeded(f"{FORWARDS_MAX} ports of jobs are open", hint="stop a job that has one")

        def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            forward = self.open_ports.get(key)
            if forward is None or len(forward.connections) >= CONNECTIONS_MAX:
                writer.close()
                return
            task = asyncio.create_task(self._connection(key, forward, (reader, writer)), name="port")
            forward.connections.add(task)
            task.add_done_callback(forward.connections.discard)

        try:
            server = await asyncio.start_server(taken, self.host, 0, limit=HEAD_BYTES_MAX)
        except OSError as error:
            raise NotReachable(f"no port could be opened at {self.host}: {error.strerror}") from None
        self.open_ports[key] = Forward(server, target, self.clock.monotonic_s())
        return self.open_ports[key].port

    def used_s(self, job: JobId) -> float:
        """When a port of a job was last used, in monotonic seconds; 0 where none was opened."""
        return max((one.used_s for key, one in self.open_ports.items() if key[0] == job), default=0.0)

    async def close(self, job: JobId | None = None) -> None:
        """Close the ports of a job, or all."""
        for key in [key for key in self.open_ports if job in (None, key[0])]:
            forward = self.open_ports.pop(key)
            forward.server.close()
            for task in forward.connections:
                task.cancel()
            await asyncio.gather(*forward.connections, return_exceptions=True)

    async def _connection(self, key: Key, forward: Forward, browser: Streams) -> None:
        program: Streams | None = None
        try:
            async with asyncio.timeout(HEAD_S):
                head = Head.of(await browser[0].readuntil(b"\r\n\r\n"))
            refusal = self._refusal(key, head, browser)
            if not refusal:
                program = await self._reached(key, forward)
                refusal = _page("502 Bad Gateway", f"Nothing listens at port {key[2]} of {key[1]} yet. Reload.")
            if program is None:
                browser[1].write(refusal)
                await browser[1].drain()
            else:
                await self._relay(forward, head, browser, program)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # either side is gone, or spoke no HTTP
        finally:
            for _, writer in filter(None, (browser, program)):
                writer.close()

    async def _reached(self, key: Key, forward: Forward) -> Streams | None:
        """A connection to the program; its port is looked up again where nothing listens: it may have been replaced."""
        for again in (False, True):
            try:
                if again:
                    forward.target = await self.find(key)
                host, _, port = forward.target.rpartition(":")
                async with asyncio.timeout(CONNECT_S):
                    return await asyncio.open_connection(host, int(port), limit=HEAD_BYTES_MAX)
            except (OSError, TimeoutError, RotaError):
                continue
        return None

    def _refusal(self, key: Key, head: Head, browser: Streams) -> bytes:
        """The answer to a request that may not pass; empty for one that may."""
        job, instance, name = key
        if head.get("transfer-encoding"):
            return _page("411 Length Required", "Send the body with its length.")
        try:
            self.may(self.auth.check(head.asked(browser[1].get_extra_info("peername")[0])), job)
        except NotAllowed as error:
            return _page("403 Forbidden", error.message)
        except RotaError as error:
            if "text/html" in head.get("accept"):
                name_asked = head.get("host").rpartition(":")[0]
                where = f"http://{name_asked}:{self.page_port}/login?next=/ports/{job}/{instance}/{name}"
                return f"HTTP/1.1 303 See Other\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode()
            return _page("401 Unauthorized", error.message)
        return b""

    async def _relay(self, forward: Forward, head: Head, browser: Streams, program: Streams) -> None:
        """Both ways until the program has answered: of the browser the body alone, or all once it is upgraded."""

        async def up() -> None:
            left = int(head.get("content-length") or 0)
            while head.upgrades or left > 0:
                data = await browser[0].read(CHUNK_BYTES if head.upgrades else min(left, CHUNK_BYTES))
                if not data:
                    break
                left -= len(data)
                forward.used_s = self.clock.monotonic_s()
                program[1].write(data)
                await program[1].drain()
            if head.upgrades and program[1].can_write_eof():
                program[1].write_eof()

        forward.used_s = self.clock.monotonic_s()
        program[1].write(head.sent_on())
        sending = asyncio.create_task(up(), name="port, up")
        try:
            answer = Head.of(await program[0].readuntil(b"\r\n\r\n"))
            while answer.interim:
                answer = Head.of(await program[0].readuntil(b"\r\n\r\n"))
            browser[1].write(answer.sent_back())
            while data := await program[0].read(CHUNK_BYTES):
                browser[1].write(data)
                await browser[1].drain()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


def _page(status: str, text: str) -> bytes:
    """A small document with its status."""
    safe = text.replace("&", "&amp;").replace("<", "&lt;")
    body = f"<!doctype html><title>{status}</title><p style='{_CSS}'>{safe}</p>".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
