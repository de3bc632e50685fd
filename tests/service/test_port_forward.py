"""Ports of jobs: who is logged in reaches the program, nobody else; nothing of Rota's own gets there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from rota.runtime.clock import SystemClock
from rota.runtime.random import SystemRandom
from rota.service.accounts import Caller
from rota.service.rest import forward
from rota.service.rest.auth import COOKIE, Auth, bracketed, host_of
from rota.service.rest.forward import Forwards, Key
from rota.spec.errors import NotAllowed, UnknownName
from rota.spec.ids import JobId

TOKEN = "rota_abcdefgh_" + "s" * 40
KEY: Key = (JobId("book-1"), "main/0", "notebook")
OTHER: Key = (JobId("book-2"), "main/0", "notebook")
WEB_SOCKET = "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"


@dataclass
class Program:
    """Stands in for what a job runs: keeps what it is sent, and answers each request."""

    got: list[bytes] = field(default_factory=list[bytes])
    answer: bytes = b"HTTP/1.1 200 OK\r\nSet-Cookie: rota_session=mine\r\nSet-Cookie: a=b\r\n\r\nhello"
    address: str = ""
    talk: list[asyncio.StreamWriter] = field(default_factory=list[asyncio.StreamWriter])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.talk.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        self.got.append(head)
        if b"websocket" in head:
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n")
            while data := await reader.read(100):
                writer.write(data.upper())
        else:
            if b"ength: 5" in head:
                self.got.append(await reader.readexactly(5))
            writer.write(self.answer)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def opened(program: Program) -> AsyncIterator[tuple[Forwards, int, Auth]]:
    server = await asyncio.start_server(program.serve, "127.0.0.1", 0)
    program.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    auth = Auth.of(TOKEN, clock=SystemClock(), random_source=SystemRandom(), hosts=frozenset({"127.0.0.1", "::1"}))

    async def find(key: Key) -> str:
        if key not in (KEY, OTHER):
            raise UnknownName(f"no port {key[2]!r}")
        return program.address

    forwards = Forwards(auth, SystemClock(), "127.0.0.1", 7700, lambda *_: None, find)
    try:
        yield forwards, await forwards.open(KEY), auth
    finally:
        await forwards.close()
        server.close()


async def ask(port: int, *lines: str, body: bytes = b"", method: str = "GET", host: str = "127.0.0.1") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "\r\n".join((f"{method} /tree?x=1 HTTP/1.1", f"Host: {host}:{port}", *lines, "", ""))
    writer.write(head.encode() + body)
    found = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return found


def run(body: Callable[[Forwards, int, str, Program], Awaitable[Any]], program: Program | None = None) -> Any:
    async def main() -> Any:
        here = program or Program()
        async with opened(here) as (forwards, port, auth):
            cookie = f"{COOKIE}={auth.session_of(auth.own.id)}"
            return await body(forwards, port, cookie, here)

    return asyncio.run(main())


def test_a_request_with_the_session_reaches_the_program_without_what_belongs_to_rota() -> None:
    async def body(forwards: Forwards, port: int, cookie: str, program: Program) -> None:
        found = await ask(port, f"Cookie: a=1; {cookie}; b=2", "Connection: keep-alive")
        assert found.endswith(b"hello") and b"rota_session" not in found
        head = program.got[0].decode()
        assert head.startswith("GET /tree?x=1 HTTP/1.1\r\n") and "Cookie:" not in head
        assert COOKIE not in head and "Connection: close" in head and "keep-alive" not in head
        found = await ask(port, f"Authorization: Bearer {TOKEN}")
        assert found.endswith(b"hello") and TOKEN.encode() not in program.got[1]

    run(body)


def test_a_token_of_the_program_is_its_own_and_a_token_of_rota_stays_here() -> None:
    async def body(__: Forwards, port: int, session: str, program: Program) -> None:
        cookie = f"Cookie: {session}"
        for _ in range(12):  # more than wrong tokens of one address may be
            assert b"hello" in await ask(port, cookie, "Authorization: Bearer sk-app")
        assert b"Bearer sk-app" in program.got[-1]
        assert b"hello" in await ask(port, f"Authorization: Bearer {TOKEN}")
        assert TOKEN.encode() not in program.got[-1]

    run(body)


@pytest.mark.parametrize("head", [b"HTTP/1.1 103 Early Hints\r\nSet-Cookie: rota_session=mine\r\n\r\n", b""])
def test_a_program_sets_no_session_of_rota_whatever_it_sends_first(head: bytes) -> None:
    async def body(_: Forwards, port: int, session: str, __: Program) -> None:
        answer = await ask(port, f"Cookie: {session}")
        assert b"rota_session" not in answer and b"_a=hb; HttpOnly" in answer and answer.startswith(b"HTTP/1.1 200 OK")

    last = b"HTTP/1.1 200 OK\r\nSet-Cookie : rota_session=mine\r\nSet-Cookie: a=b\r\n\r\nhello"
    run(body, Program(answer=head + last))


def test_a_port_that_is_asked_for_twice_at_once_has_one_listener() -> None:
    async def body(forwards: Forwards, port: int, _: str, __: Program) -> None:
        await forwards.close()
        first, second = await asyncio.gather(forwards.open(KEY), forwards.open(KEY))
        assert first == second

    run(body)


def test_a_body_is_passed_on_and_nothing_after_it() -> None:
    async def body(forwards: Forwards, port: int, cookie: str, program: Program) -> None:
        second = f"GET / HTTP/1.1\r\nCookie: {cookie}\r\n\r\n".encode()
        await ask(port, f"Cookie: {cookie}", "Content-Length: 5", body=b"12345" + second, method="POST")
        assert program.got[1:] == [b"12345"]
        refused = await ask(port, f"Cookie: {cookie}", "Transfer-Encoding: chunked", method="POST")
        assert refused.startswith(b"HTTP/1.1 411")

    run(body)


def test_a_web_socket_passes_both_ways() -> None:
    async def body(forwards: Forwards, port: int, cookie: str, program: Program) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{WEB_SOCKET}Cookie: {cookie}\r\n\r\n".encode())
        assert b"101 Switching" in await reader.readuntil(b"\r\n\r\n")
        for text in (b"one", b"two"):
            writer.write(text)
            assert await asyncio.wait_for(reader.readexactly(3), 20) == text.upper()
        writer.close()

    run(body)


def test_who_is_not_logged_in_or_comes_from_a_page_elsewhere_is_refused() -> None:
    async def body(forwards: Forwards, port: int, cookie: str, program: Program) -> None:
        login = await ask(port, "Accept: text/html")
        assert (
            login.startswith(b"HTTP/1.1 303")
            and b"http://127.0.0.1:7700/login?next=/ports/book-1/main/0/notebook" in login
        )
        assert b"http://[::1]:7700/login?next=" in await ask(port, "Accept: text/html", host="[::1]")
        assert [bracketed(host_of(one)) for one in ("[::1]:7700", "[::1]", "head", "head:80")] == [
            "[::1]",
            "[::1]",
            "head",
            "head",
        ]
        assert (await ask(port)).startswith(b"HTTP/1.1 401")
        assert (await ask(port, f"Cookie: {COOKIE}=9999999999.abc.def")).startswith(b"HTTP/1.1 401")
        for elsewhere in (
            "Origin: http://127.0.0.1:1",
            "Sec-Fetch-Site: same-site\r\nSec-Fetch-Mode: cors",
            "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors",
        ):
            assert (await ask(port, f"Cookie: {cookie}", elsewhere)).startswith(b"HTTP/1.1 403"), elsewhere

        def refuse(caller: Caller, job: JobId) -> None:
            raise NotAllowed("not yours")

        forwards.may = refuse
        assert (await ask(port, f"Cookie: {cookie}")).startswith(b"HTTP/1.1 403")
        assert program.got == []

    run(body)


def cookies_of(answer: bytes) -> dict[str, str]:
    """What a browser would keep of an answer, by name."""
    made = [line[12:] for line in answer.decode().split("\r\n") if line.startswith("Set-Cookie: ")]
    return {one.partition("=")[0]: one.partition("=")[2] for one in made}


def test_the_cookies_of_a_program_come_back_to_its_port_alone() -> None:
    async def body(forwards: Forwards, port: int, session: str, program: Program) -> None:
        kept = cookies_of(await ask(port, f"Cookie: {session}"))
        other = await forwards.open(OTHER)
        of_other = cookies_of(await ask(other, f"Cookie: {session}"))
        assert {"login", "_xsrf"} & kept.keys() == {"_xsrf"} and len(kept) == 3, (
            "scripts see the token against forged requests alone"
        )
        assert all("HttpOnly" in value for name, value in kept.items() if name != "_xsrf")
        assert not any("Domain" in value for value in kept.values())
        assert set(kept) & set(of_other) == {"_xsrf"}
        jar = "; ".join(f"{name}={value.partition(';')[0]}" for name, value in (kept | of_other).items())
        for one in (port, other):
            program.got.clear()
            await ask(one, f"Cookie: {session}; {jar}; planted=1")
            assert "Cookie: login=secret; _xsrf=t1\r\n" in program.got[0].decode(), one
        mine = "; ".join(f"{name}={value.partition(';')[0]}" for name, value in kept.items() if name != "_xsrf")
        await ask(other, f"Cookie: {session}; {mine}")
        assert b"Cookie:" not in program.got[-1]
        program.answer = b"HTTP/1.1 200 OK\r\n\r\nhello"
        again = cookies_of(await ask(port, f"Cookie: {session}; {mine}", "Sec-Fetch-Mode: navigate"))
        assert again == {"_xsrf": "t1; Path=/; SameSite=Lax"}, "the copy may be that of another job by now"
        assert cookies_of(await ask(port, f"Cookie: {session}; {mine}")) == {}

    made = b"Set-Cookie: login=secret; Domain=127.0.0.1\r\nSet-Cookie: _xsrf=t1; Path=/lab\r\n"
    run(body, Program(answer=b"HTTP/1.1 200 OK\r\n" + made + b"\r\nhello"))


def test_a_program_that_was_replaced_is_asked_from_then_on_and_one_that_is_gone_is_said() -> None:
    async def body(forwards: Forwards, port: int, cookie: str, program: Program) -> None:
        assert (await ask(port, f"Cookie: {cookie}")).endswith(b"hello")
        right, newer = program.address, Program()
        server = await asyncio.start_server(newer.serve, "127.0.0.1", 0)
        program.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert (await ask(port, f"Cookie: {cookie}")).endswith(b"hello")
        assert len(newer.got) == 1 and len(program.got) == 1, "its old number may be that of another program"
        server.close()
        program.address = "127.0.0.1:1"
        gone = await ask(port, f"Cookie: {cookie}")
        assert gone.startswith(b"HTTP/1.1 502") and b"\r\nRefresh: 2\r\n" in gone, "it may still be starting"
        program.address = right
        assert await forwards.open(KEY) == port
        with pytest.raises(UnknownName):
            await forwards.open((KEY[0], KEY[1], "other"))

    run(body)


async def web_socket(port: int, cookie: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{WEB_SOCKET}Cookie: {cookie}\r\n\r\n".encode())
    assert b"101 Switching" in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


@pytest.mark.parametrize("ends", ["rights", "silence"])
def test_an_open_connection_ends_with_the_rights_of_its_caller_or_after_a_long_silence(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "CHECK_S", 0.05)
    monkeypatch.setattr(forward, "IDLE_S", 1.0 if ends == "silence" else 600.0)

    async def body(forwards: Forwards, port: int, cookie: str, program: Program) -> None:
        reader, writer = await web_socket(port, cookie)
        for _ in range(4):  # what is in use stays open, for longer than the limit
            await asyncio.sleep(0.3)
            writer.write(b"one")
            assert await asyncio.wait_for(reader.readexactly(3), 20) == b"ONE"
        if ends == "rights":

            def refuse(caller: Caller, job: JobId) -> None:
                raise NotAllowed("not yours any more")

            forwards.may = refuse
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        async with asyncio.timeout(20):
            while forwards.connections_of.total() or not program.talk[-1].is_closing():
                await asyncio.sleep(0.01)

    run(body)


def test_a_user_has_a_limit_of_open_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "CONNECTIONS_OF_USER_MAX", 2)

    async def body(forwards: Forwards, port: int, cookie: str, _: Program) -> None:
        pairs = [await web_socket(port, cookie), await web_socket(await forwards.open(OTHER), cookie)]
        assert (await ask(port, f"Cookie: {cookie}")).startswith(b"HTTP/1.1 503")
        pairs[1][1].close()
        async with asyncio.timeout(20):
            while not (await ask(port, f"Cookie: {cookie}")).startswith(b"HTTP/1.1 200"):
                await asyncio.sleep(0.01)
        pairs[0][1].close()

    run(body)


def test_use_is_noted_and_closing_ends_it() -> None:
    async def body(forwards: Forwards, port: int, cookie: str, program: Program) -> None:
        before = forwards.used_s(KEY[0])
        await ask(port)
        assert forwards.used_s(KEY[0]) == before, "a request that was refused is no use"
        await ask(port, f"Cookie: {cookie}")
        assert forwards.used_s(KEY[0]) > before > 0
        await forwards.close(KEY[0])
        assert forwards.used_s(KEY[0]) == 0
        with pytest.raises(OSError):
            await ask(port, f"Cookie: {cookie}")

    run(body)
