"""Listeners for ports of jobs: each passes requests of a browser that is logged in on to one port of one instance.

A port has a listener of its own, so it is another origin than the page: its scripts cannot read what the service
answers. The session cookie and tokens of Rota stay here. One request a connection, except where it is upgraded.

Cookies know no ports: what one program sets, the browser would also send to those of other jobs. So each cookie gets a
name that belongs to its port and no script can read, and only those come back to it. Tokens against forged requests,
which scripts send back in a header, have a copy under their own name as well; that copy reaches no program, and is made
anew when a page loads, as another job may have the same name.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

from rota.runtime.clock import Clock
from rota.service.accounts import Caller
from rota.service.rest.auth import COOKIE, Auth, AuthRequest, bracketed, host_of
from rota.spec.errors import LimitExceeded, NotAllowed, NotReachable, RotaError
from rota.spec.ids import JobId

FORWARDS_MAX = 64
"""Ports of jobs that are open at once."""
CONNECTIONS_MAX = 128
"""Connections to one of them at once."""
CONNECTIONS_OF_USER_MAX = 256
"""Connections of one user to all of them at once."""
IDLE_S = 600.0
"""A connection on which no byte came for this time, in neither direction, is closed."""
CHECK_S = 15.0
"""How often the rights of whoever has an open connection are looked at again."""
RELOAD_S = 2
"""How often a browser asks again while nothing listens yet."""
KEEPALIVE_S = 60
"""Silence after which the kernel asks whether the other side is still there."""
HEAD_BYTES_MAX, HEAD_S = 65_536, 10.0
CONNECT_S = 5.0
CHUNK_BYTES = 65_536
_CSS = "font-family:sans-serif;max-width:40em;margin:4em auto"
_TOO_MANY = f"{CONNECTIONS_OF_USER_MAX} connections of you to ports of jobs are open: close a tab, then reload."
_TOKEN = re.compile(r"\brota_[0-9a-z]+_")

PREFIX = "rota_port_"
"""Begin of the names of cookies of programs; what follows is of one port, and no script can read or guess it."""
COPIED, HIDDEN = "c", "h"
"""Begin of their values: whether scripts of the page find a copy of the cookie."""
FORGERY = re.compile("xsrf|csrf", re.IGNORECASE)
"""Names of tokens against forged requests: each is worth nothing without the session that it belongs to."""

Key = tuple[JobId, str, str]
"""Job, instance, name of the port."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class RequestHead:
    """First line and headers of a request or an answer, as they came."""

    first: str
    lines: tuple[str, ...]

    @staticmethod
    def of(raw: bytes) -> RequestHead:
        """Raises ValueError for bytes that are not such a head."""
        first, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        if len(first.split(" ", 2)) < 2 or any(":" not in line or line[:1] in " \t" for line in lines):
            raise ValueError("no head of HTTP/1.1")
        return RequestHead(first, tuple(lines))

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

    def sent_on(self, prefix: str) -> bytes:
        """The request for the program of the job: without what belongs to Rota, to be answered and closed.

        Of the cookies those that the program of this port made, under the names that it gave them.
        """
        kept = [line for line in self.lines if _name(line) not in ("cookie", "connection", "keep-alive")]
        kept = [line for line in kept if not (_name(line) == "authorization" and _TOKEN.search(line))]
        own = [f"{name}={value[1:]}" for name, value in self.cookies(prefix)]
        kept += [f"Cookie: {'; '.join(own)}"] if own else []
        kept += ["Connection: Upgrade" if self.upgrades else "Connection: close"]
        return "\r\n".join((self.first, *kept, "", "")).encode("latin-1")

    def cookies(self, prefix: str) -> list[tuple[str, str]]:
        """Name and value of the cookies whose name begins so, without that; values begin with COPIED or HIDDEN."""
        pairs = (one.partition("=") for one in self.get("cookie").split("; "))
        return [(name.removeprefix(prefix), value) for name, _, value in pairs if name.startswith(prefix) and value]

    def sent_back(self, prefix: str, asked: RequestHead) -> bytes:
        """The answer for the browser: cookies of the program belong to its port, and none is a session of Rota."""
        kept = [line for line in self.lines if _name(line) != "set-cookie"]
        made = [_value(line) for line in self.lines if _name(line) == "set-cookie"]
        named = {one.partition("=")[0].strip() for one in made}
        for one in made:
            kept += [f"Set-Cookie: {each}" for each in _owned(one, prefix)]
        if asked.loads_page:
            again = [(name, value) for name, value in asked.cookies(prefix) if value[0] == COPIED]
            kept += [
                f"Set-Cookie: {name}={value[1:]}; Path=/; SameSite=Lax" for name, value in again if name not in named
            ]
        return "\r\n".join((self.first, *kept, "", "")).encode("latin-1")

    @property
    def loads_page(self) -> bool:
        """True for a request whose answer becomes what a tab or a frame shows."""
        return self.get("sec-fetch-mode") == "navigate" or "text/html" in self.get("accept")

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


def _owned(cookie: str, prefix: str) -> list[str]:
    """What a browser is to keep of a cookie that a program makes: that of the port, and the copy for scripts."""
    pair, *attributes = (part.strip() for part in cookie.split(";"))
    name, _, value = pair.partition("=")
    if not name or name == COOKIE or name.startswith(PREFIX):
        return []
    kinds = {part.partition("=")[0].strip().lower(): part for part in attributes}
    kinds.pop("domain", None)
    hidden = kinds.pop("httponly", None) is not None or not FORGERY.search(name)
    own = [f"{prefix}{name}={HIDDEN if hidden else COPIED}{value}", *kinds.values(), "HttpOnly"]
    copy = [pair, *(part for kind, part in kinds.items() if kind != "path"), "Path=/"]
    return ["; ".join(own)] if hidden else ["; ".join(own), "; ".join(copy)]


def _name(line: str) -> str:
    return line.partition(":")[0].strip().lower()


def _value(line: str) -> str:
    return line.partition(":")[2].strip()


@dataclass(slots=True)
class Forward:
    """One open port: where the browser asks, when it was last used (monotonic seconds), the prefix of its cookies."""

    server: asyncio.Server
    used_s: float
    prefix: str
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
    connections_of: Counter[str] = field(default_factory=Counter[str])
    """Open connections that may pass, by user."""
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self, key: Key) -> int:
        """The port of this machine that leads there, opened now or before.

        Raises LimitExceeded, NotReachable, or what ``find`` raises.
        """
        async with self._opening:
            return await self._opened(key)

    async def _opened(self, key: Key) -> int:
        await self.find(key)
        if (known := self.open_ports.get(key)) is not None:
            known.used_s = self.clock.monotonic_s()
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
        prefix = f"{PREFIX}{self.auth.sign('/'.join(key), 'port')[:16]}_"
        self.open_ports[key] = Forward(server, self.clock.monotonic_s(), prefix)
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
        try:
            async with self.clock.timeout(HEAD_S):
                head = RequestHead.of(await browser[0].readuntil(b"\r\n\r\n"))
            address = str(browser[1].get_extra_info("peername")[0])
            refusal, caller = self._checked(key, head, address)
            if caller is None or self.connections_of[caller.user] >= CONNECTIONS_OF_USER_MAX:
                browser[1].write(refusal or _page("503 Service Unavailable", _TOO_MANY))
                await browser[1].drain()
                return
            self.connections_of[caller.user] += 1
            try:
                await self._pass_on(key, forward, Relay(head, browser, self.clock), address)
            finally:
                self.connections_of[caller.user] -= 1
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # either side is gone, or spoke no HTTP
        finally:
            browser[1].close()

    async def _pass_on(self, key: Key, forward: Forward, relay: Relay, address: str) -> None:
        """Until the program has answered, or either side, the rights of the caller or all traffic has ended."""
        program = await self._reached(key)
        if program is None:
            where = f"Nothing listens at port {key[2]} of {key[1]} yet. This page loads again every {RELOAD_S} s."
            relay.browser[1].write(_page("502 Bad Gateway", where, f"Refresh: {RELOAD_S}\r\n"))
            await relay.browser[1].drain()
            return
        works = (relay.run(forward, program), self._watch(key, relay, address))
        tasks = [asyncio.create_task(work, name="port") for work in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            program[1].close()

    async def _watch(self, key: Key, relay: Relay, address: str) -> None:
        """Return when the connection is to be closed: it is idle, or its caller may not have it any more."""
        while self.clock.monotonic_s() - relay.used_s < IDLE_S:
            await self.clock.sleep(CHECK_S)
            if self._checked(key, relay.head, address)[1] is None:
                return

    async def _reached(self, key: Key) -> Streams | None:
        """A connection to the program where it listens now: a restart of its instance gives it another port."""
        try:
            host, _, port = (await self.find(key)).rpartition(":")
            async with self.clock.timeout(CONNECT_S):
                program = await asyncio.open_connection(host, int(port), limit=HEAD_BYTES_MAX)
        except (OSError, TimeoutError, RotaError):
            return None
        return program

    def _checked(self, key: Key, head: RequestHead, address: str) -> tuple[bytes, Caller | None]:
        """The caller of a request that may pass; else the answer to it."""
        job, instance, name = key
        if head.get("transfer-encoding"):
            return _page("411 Length Required", "Send the body with its length."), None
        try:
            caller = self.auth.check(head.asked(address))
            self.may(caller, job)
        except NotAllowed as error:
            return _page("403 Forbidden", error.message), None
        except RotaError as error:
            if "text/html" in head.get("accept"):
                asked_host = bracketed(host_of(head.get("host")))
                where = f"http://{asked_host}:{self.page_port}/login?next=/ports/{job}/{instance}/{name}"
                return f"HTTP/1.1 303 See Other\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode(), None
            return _page("401 Unauthorized", error.message), None
        return b"", caller


@dataclass(slots=True)
class Relay:
    """One request of a browser on its way; ``used_s`` is when a byte last came, from either side."""

    head: RequestHead
    browser: Streams
    clock: Clock
    used_s: float = 0.0

    def __post_init__(self) -> None:
        self.used_s = self.clock.monotonic_s()

    async def run(self, forward: Forward, program: Streams) -> None:
        """Both ways until the program has answered: of the browser the body alone, or all once it is upgraded."""
        for _, writer in (self.browser, program):
            _keep_alive(writer)
        forward.used_s = self.clock.monotonic_s()
        program[1].write(self.head.sent_on(forward.prefix))
        sending = asyncio.create_task(self._up(forward, program[1]), name="port, up")
        try:
            answer = RequestHead.of(await program[0].readuntil(b"\r\n\r\n"))
            while answer.interim:
                answer = RequestHead.of(await program[0].readuntil(b"\r\n\r\n"))
            self.browser[1].write(answer.sent_back(forward.prefix, self.head))
            while data := await program[0].read(CHUNK_BYTES):
                self.used_s = self.clock.monotonic_s()
                self.browser[1].write(data)
                await self.browser[1].drain()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _up(self, forward: Forward, program: asyncio.StreamWriter) -> None:
        head, left = self.head, int(self.head.get("content-length") or 0)
        while head.upgrades or left > 0:
            data = await self.browser[0].read(CHUNK_BYTES if head.upgrades else min(left, CHUNK_BYTES))
            if not data:
                break
            left -= len(data)
            forward.used_s = self.used_s = self.clock.monotonic_s()
            program.write(data)
            await program.drain()
        if head.upgrades and program.can_write_eof():
            program.write_eof()


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Let the kernel ask a silent side, so that one that vanished ends its connection."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)


def _page(status: str, text: str, more: str = "") -> bytes:
    """A small document with its status, and ``more`` lines of the head."""
    safe = text.replace("&", "&amp;").replace("<", "&lt;")
    body = f"<!doctype html><title>{status}</title><p style='{_CSS}'>{safe}</p>".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{more}Connection: close\r\n\r\n".encode() + body
