"""What connections may cost the service: strangers who send much, slowly or nothing, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from standing import Standing, listening, with_service

from rota.runtime.clock import SystemClock
from rota.runtime.environ import Home
from rota.service.process.daemon import find_service
from rota.service.rest import app, connections
from rota.service.rest.auth import FAILURES_MAX

LIMIT_S = 30.0


async def opened(http: httpx.AsyncClient, *lines: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of its own that has sent these lines of a request."""
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    writer.write("".join(f"{line}\r\n" for line in lines).encode())
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("size", ["Content-Length: 15000000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("token", ["", "Authorization: Bearer rota_x_wrong"])
def test_a_body_is_not_read_before_the_token_is_known(tmp_path: Path, size: str, token: str) -> None:
    async def test(service: Standing) -> None:
        async with listening(service) as http:
            head = ["POST /api/v1/jobs HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", size]
            reader, writer = await opened(http, *head, *filter(None, [token]), "")
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)  # though no byte of the body came
            assert answer.startswith(b"HTTP/1.1 401 ")
            writer.close()

    with_service(tmp_path, test)


def test_a_body_that_does_not_come_is_a_408_and_the_service_answers_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "BODY_S", 0.3)

    async def test(service: Standing) -> None:
        async with listening(service) as http:
            token = f"Authorization: {service.http.headers['authorization']}"
            kind = "Content-Type: application/json"
            head = ["POST /api/v1/jobs HTTP/1.1", "Host: 127.0.0.1", kind, "Content-Length: 90", token, "", '{"source']
            reader, writer = await opened(http, *head)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
            assert answer.startswith(b"HTTP/1.1 408 ")
            writer.close()
            assert (await http.get("/api/v1/jobs")).status_code == 200

    with_service(tmp_path, test)


def test_the_limit_of_a_body_is_one_of_the_clock_of_the_service(tmp_path: Path) -> None:
    """Time that the event loop does not count, as while the machine was suspended, counts for a body too."""

    class Suspended(SystemClock):
        slept_s = 0.0

        def monotonic_s(self) -> float:
            return super().monotonic_s() + self.slept_s

    async def test(service: Standing) -> None:
        clock = service.app.clock = Suspended()
        async with listening(service) as http:
            head = ["POST /api/v1/jobs HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
            reader, writer = await opened(http, *head, "Content-Length: 90", _token(service), "", '{"source')
            await asyncio.sleep(0.3)  # it waits for the rest
            clock.slept_s = app.BODY_S
            writer.write(b'": "')
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
            assert answer.startswith(b"HTTP/1.1 408 ")
            writer.close()

    with_service(tmp_path, test)


@pytest.mark.parametrize("sent", [[], ["GET /healthz HTTP/1.1", "Host: 127.0.0.1"], ["GET /healthz HTTP/1.1", ""]])
def test_a_connection_that_sends_no_whole_request_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: list[str]
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)

    async def test(service: Standing) -> None:
        async with listening(service) as http:
            reader, writer = await opened(http, *sent)
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), LIMIT_S)
            assert reader.at_eof() or reader.exception() is not None
            writer.close()
            stream = await opened(
                http, "GET /api/v1/events?follow=true HTTP/1.1", "Host: 127.0.0.1", _token(service), ""
            )
            await asyncio.sleep(1)  # more than three times the limit: an answer under way has no such limit
            await service.submit()
            await asyncio.wait_for(stream[0].readuntil(b"JobSubmitted"), LIMIT_S)
            stream[1].close()

    with_service(tmp_path, test)


def test_idle_connections_make_room_and_those_of_known_callers_stay(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        most = 16
        shared = connections.Connections(most, SystemClock())
        async with listening(service, shared) as http:
            follow = ["GET /api/v1/events?follow=true HTTP/1.1", "Host: 127.0.0.1", _token(service), ""]
            stream, stream_out = await opened(http, *follow)
            await asyncio.wait_for(stream.readuntil(b"\r\n\r\n"), LIMIT_S)
            idle = [await opened(http) for _ in range(3 * most)]
            for _ in range(5):
                async with httpx.AsyncClient(base_url=http.base_url, headers=http.headers, trust_env=False) as fresh:
                    assert (await fresh.get("/api/v1/jobs", timeout=LIMIT_S)).status_code == 200
            await service.submit()
            await asyncio.wait_for(stream.readuntil(b"JobSubmitted"), LIMIT_S)
            assert len(shared._open) <= most // 2, "one address may have no more than half"
            for _, writer in [*idle, (stream, stream_out)]:
                writer.close()

    with_service(tmp_path, test)


def test_who_streams_as_much_as_a_user_may_keeps_nobody_else_from_it(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.http.put("/api/v1/users/ann", json={"grants": [{"queue": "", "role": "viewer"}]})
        token = (await service.http.post("/api/v1/tokens", json={"user": "ann"})).json()["token"]
        for _ in range(64):
            service.app.open_stream("local")
        refused = await service.http.get("/api/v1/events", params={"follow": True})
        assert (refused.status_code, refused.json()["code"]) == (429, "LIMIT_EXCEEDED")
        head = await service.http.head(
            "/api/v1/events", params={"follow": True}, headers={"Authorization": f"Bearer {token}"}
        )
        assert head.status_code == 200

    with_service(tmp_path, test)


def test_one_who_asks_for_codes_again_and_again_keeps_nobody_else_from_the_page(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.http.put("/api/v1/users/ann", json={"grants": [{"queue": "", "role": "viewer"}]})
        token = (await service.http.post("/api/v1/tokens", json={"user": "ann"})).json()["token"]
        as_ann = {"Authorization": f"Bearer {token}"}
        hers = (await service.http.post("/api/v1/login/code", headers=as_ann)).json()["code"]
        codes = [(await service.http.post("/api/v1/login/code")).json()["code"] for _ in range(40)]
        for code, status in ((hers, 303), (codes[-1], 303), (codes[0], 422)):
            assert (await service.http.get("/login", params={"code": code})).status_code == status
        assert len(service.app.auth._codes) == 31

    with_service(tmp_path, test)


def test_wrong_tokens_that_begin_like_a_right_one_do_not_lock_it_out(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        right = service.http.headers["authorization"]
        wrong = [f"{right[:-8]}{n:08}" for n in range(FAILURES_MAX + 3)]
        codes = [(await service.http.get("/api/v1/jobs", headers={"Authorization": w})).status_code for w in wrong]
        assert codes == [401] * FAILURES_MAX + [429] * 3
        assert (await service.http.get("/api/v1/jobs")).status_code == 200

    with_service(tmp_path, test)


@contextlib.contextmanager
def served(home: Path, *, descriptors: int) -> Iterator[str]:
    """A service process of its own with so many descriptors; its address."""
    settings = json.dumps({"home": str(home), "port": 0, "pretend": "1x1x1"})
    command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", sys.executable]
    with (home.parent / "service.log").open("wb") as log:
        child = subprocess.Popen(
            [*command, "-m", "rota.service.process.serve", settings],
            stderr=log,
            env={**os.environ, "ROTA_HOME": str(home)},
        )
    try:
        until = time.monotonic() + 2 * LIMIT_S
        while (record := find_service(Home.of(home))) is None:
            assert child.poll() is None and time.monotonic() < until, (home.parent / "service.log").read_text()
            time.sleep(0.05)
        yield record["url"]
    finally:
        child.terminate()
        child.wait(60)


@pytest.mark.slow
def test_ninety_connections_that_say_nothing_do_not_stop_a_service_with_64_descriptors(tmp_path: Path) -> None:
    with served(tmp_path / "home", descriptors=64) as url, contextlib.ExitStack() as stack:
        token = (tmp_path / "home" / "token").read_text().strip()
        host, _, port = url.removeprefix("http://").partition(":")
        for n in range(90):
            one = stack.enter_context(socket.socket())
            one.settimeout(LIMIT_S)
            one.connect((host, int(port)))
            with contextlib.suppress(ConnectionError):
                one.sendall(b"" if n % 2 else b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        with httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=LIMIT_S, trust_env=False
        ) as http:
            assert http.get("/api/v1/status").status_code == 200
            assert http.post("/api/v1/tokens", json={"name": "after"}).status_code == 201  # no job: no engine
    log = (tmp_path / "service.log").read_text()
    assert "Traceback" not in log
    assert log.count("connections are open") == 1, log


def test_a_loop_without_descriptors_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run_out() -> None:
        loop = asyncio.get_running_loop()
        connections.watch_accepts(loop)
        for _ in range(2000):
            context = {"message": "socket.accept() out of system resource", "socket": None}
            loop.call_exception_handler({**context, "exception": OSError(24, "Too many open files")})

    asyncio.run(run_out())
    assert [one.message for one in caplog.records] == [
        "no connection can be taken: Too many open files; raise the limit of open files (ulimit -n)"
    ]


def _token(service: Standing) -> str:
    return f"Authorization: {service.http.headers['authorization']}"
