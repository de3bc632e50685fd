"""Webhooks: signed, at least once and in order, also over a receiver that fails and a service that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from standing import HELLO, Standing, standing

from rota.service import webhooks
from rota.service.webhooks import addresses_of, post
from rota.spec.errors import BadInput, NotAllowed
from rota.spec.states import JobState


class Receiver:
    """A server that takes notices; the first ``failures`` posts get 500."""

    def __init__(self, failures: int = 0) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.failures, self.posts, self.url = failures, 0, ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            assert line.startswith(b"POST /hook ")
            headers: dict[str, str] = {}
            while (line := await reader.readline()) != b"\r\n":
                name, _, value = line.decode().partition(": ")
                headers[name.lower()] = value.strip()
            body = await reader.readexactly(int(headers["content-length"]))
            self.posts += 1
            fails = self.posts <= self.failures
            if not fails:
                self.got.append((headers, body))
            writer.write(f"HTTP/1.1 {500 if fails else 204} x\r\nContent-Length: 0\r\n\r\n".encode())
            await writer.drain()
        writer.close()


@asynccontextmanager
async def receiving(failures: int = 0) -> AsyncIterator[Receiver]:
    receiver = Receiver(failures)
    server = await asyncio.start_server(receiver.answer, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    yield receiver
    server.close()


@asynccontextmanager
async def telling(home: Path) -> AsyncIterator[Standing]:
    """A service whose notifier runs, and may tell this machine."""
    async with standing(home) as service:
        notifier = service.app.notifier
        notifier.allowed = frozenset({"127.0.0.1"})
        running = asyncio.create_task(notifier.run())
        yield service
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def until(what, limit_s: float = 60) -> None:
    async with asyncio.timeout(limit_s):
        while not what():
            await asyncio.sleep(0.01)


def test_notices_are_signed_in_order_and_survive_failures_and_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "RETRY_S", (0.01, 0.02))
    monkeypatch.setattr(webhooks, "POLL_S", 0.01)

    async def test() -> None:
        async with receiving(failures=2) as receiver:
            async with telling(tmp_path) as service:
                body = {"url": receiver.url, "on": ["started", "finished"]}
                made = (await service.http.post("/api/v1/webhooks", json=body)).json()
                listed = await service.http.get("/api/v1/webhooks")
                assert listed.json()["items"][0]["id"] == made["id"] and made["secret"] not in listed.text
                await service.submit()
                await service.until("hello-1", JobState.ADMITTED)
                await until(lambda: len(receiver.got) == 1)
                assert receiver.posts == 3
            async with telling(tmp_path) as service:
                for name in ("a", "b", "c"):
                    await service.submit(HELLO.replace("hello", name).replace("gpus: 2", "gpus: 4"))
                await service.http.post("/api/v1/jobs/c-1:stop")
                await service.until("c-1", JobState.CANCELLED)
                await until(lambda: len({headers["rota-event-id"] for headers, _ in receiver.got}) >= 3)
                assert (await service.http.delete(f"/api/v1/webhooks/{made['id']}")).status_code == 200
                assert (await service.get("/webhooks"))["items"] == []
        told = [json.loads(body) for _, body in receiver.got]
        assert [(one["event"], one["job"]) for one in told if one["job"] != "a-1"][:1] == [("started", "hello-1")]
        numbers = [one["number"] for one in told]  # one that was under way when the service ended may come twice
        assert (
            numbers == sorted(numbers)
            and len(numbers) - len(set(numbers)) <= 1
            and ("finished", "c-1") in {(one["event"], one["job"]) for one in told}
        )
        for headers, raw in receiver.got:
            at, _, given = headers["rota-signature"].removeprefix("t=").partition(",v1=")
            wanted = hmac.new(made["secret"].encode(), f"{at}.".encode() + raw, hashlib.sha256).hexdigest()
            assert given == wanted and headers["rota-event-id"] == str(json.loads(raw)["number"])

    asyncio.run(test())


def test_a_place_that_cannot_be_written_tells_nothing_twice_and_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "POLL_S", 0.01)
    monkeypatch.setattr(webhooks, "RETRY_S", (0.01, 0.02))

    async def test() -> None:
        async with receiving() as receiver, telling(tmp_path) as service:
            made = await service.http.post("/api/v1/webhooks", json={"url": receiver.url, "on": ["started"]})
            place = service.app.home.webhooks / made.json()["id"]
            for name in ("a", "b"):
                await service.submit(HELLO.replace("hello", name).replace("gpus: 2", "gpus: 1"))
                await until(lambda name=name: any(json.loads(body)["job"] == f"{name}-1" for _, body in receiver.got))
                if name == "a":
                    await until(place.is_file)
                    place.unlink()
                    place.mkdir()
            place.rmdir()
            await until(place.is_file)
            last = int(receiver.got[-1][0]["rota-event-id"])
            await until(lambda: int(place.read_text() or 0) >= last)
            assert [json.loads(body)["job"] for _, body in receiver.got] == ["a-1", "b-1"]

    asyncio.run(test())


def test_a_webhook_whose_key_is_gone_is_tried_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhooks, "POLL_S", 0.001)
    monkeypatch.setattr(webhooks, "RETRY_S", (30.0, 60.0))

    async def test() -> None:
        async with standing(tmp_path) as service:
            notifier = service.app.notifier
            notifier.allowed = frozenset({"127.0.0.1"})
            made = await service.http.post("/api/v1/webhooks", json={"url": "http://127.0.0.1:9/"})
            service.app.vault.remove(webhooks.OWNER, made.json()["id"])
            running = asyncio.create_task(notifier.run())
            for _ in range(20):
                await asyncio.sleep(0.002)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        told = [record.getMessage() for record in caplog.records if record.name == "rota.service"]
        assert len(told) == 1 and "waits 30 s" in told[0]

    asyncio.run(test())


def test_the_pause_after_a_failure_is_short_again_once_a_webhook_was_served_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It doubled with each failure in the life of the service: after a dozen in months each one cost an hour."""
    monkeypatch.setattr(webhooks, "RETRY_S", (1.0, 60.0))
    now_s, served, paused = [0.0], [0.0, 0.0, 0.0, 3600.0, 0.0], list[float]()

    class Clock:
        def monotonic_s(self) -> float:
            return now_s[0]

        async def sleep(self, seconds: float) -> None:
            paused.append(seconds)
            if not served:
                raise asyncio.CancelledError

    async def serve(one: str) -> None:
        now_s[0] += served.pop(0)
        raise ValueError(one)

    async def test() -> None:
        async with standing(tmp_path) as service:
            notifier = service.app.notifier
            monkeypatch.setattr(notifier, "_clock", Clock())
            monkeypatch.setattr(notifier, "_serve", serve)
            with contextlib.suppress(asyncio.CancelledError):
                await notifier._keep("hook-1")
        assert paused == [1.0, 2.0, 4.0, 1.0, 2.0]

    asyncio.run(test())


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/x", "http://169.254.169.254/latest", "http://10.1.2.3/", "http://[::1]/"]
)
def test_an_address_inside_needs_to_be_allowed(url: str) -> None:
    host = url.partition("//")[2].partition("/")[0].removesuffix(":9").strip("[]")
    with pytest.raises(NotAllowed, match=f"^{host} is an address inside"):
        addresses_of(url, frozenset())
    assert addresses_of(url, frozenset({host})) == (host,)


@pytest.mark.parametrize(
    "host",
    [
        "::ffff:7f00:1",
        "64:ff9b::a00:1",
        "2002:a00:1::",
        "ff02::1",
        "224.0.0.1",
        "fec0::1",
        "::a00:1",
        "64:ff9b:1::a00:1",
        "::ffff:0:a00:1",
    ],
)
def test_an_address_inside_is_known_in_any_clothes(host: str) -> None:
    with pytest.raises(NotAllowed, match="an address inside"):
        addresses_of(f"http://[{host}]/" if ":" in host else f"http://{host}/", frozenset())


class Names:
    """A resolver that gives ``hooks.test`` the next of some addresses at each look, and counts the looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
        self.looks, self._addresses, self._really = 0, addresses, socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: Any, port: Any, *given: Any, **named: Any) -> Any:
        if host not in ("hooks.test", b"hooks.test"):
            return self._really(host, port, *given, **named)
        self.looks += 1
        address = self._addresses[min(self.looks, len(self._addresses)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]


def test_a_name_that_moves_inside_after_it_was_checked_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "RETRY_S", (0.01, 0.02))
    monkeypatch.setattr(webhooks, "POLL_S", 0.01)

    async def test() -> None:
        async with receiving() as receiver, telling(tmp_path) as service:
            # one look when it is made, one at each post: were the connection to look again, it would arrive
            names = Names(monkeypatch, "192.0.9.1", "192.0.9.1", "127.0.0.1")
            url = receiver.url.replace("127.0.0.1", "hooks.test")
            connecting = monkeypatch_connect(monkeypatch)
            assert (await service.http.post("/api/v1/webhooks", json={"url": url})).status_code == 201
            await service.submit()
            await until(lambda: names.looks >= 4)
            assert receiver.posts == 0 and set(connecting) == {"192.0.9.1"}, "only what was checked is connected to"
            service.app.notifier.allowed = frozenset({"hooks.test"})
            await until(lambda: bool(receiver.got))
            assert receiver.got[0][0]["host"] == url.partition("//")[2].partition("/")[0]

    asyncio.run(test())


def monkeypatch_connect(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes where connections go; those to the address outside end as if nobody listened there."""
    seen: list[str] = []
    really = anyio.connect_tcp

    async def connect(remote_host: str, *given: Any, **named: Any) -> Any:
        seen.append(remote_host)
        if remote_host == "192.0.9.1":
            raise ConnectionRefusedError(remote_host)
        return await really(remote_host, *given, **named)

    monkeypatch.setattr(anyio, "connect_tcp", connect)
    return seen


def test_a_certificate_must_be_that_of_the_name_though_the_connection_goes_to_an_address(tmp_path: Path) -> None:
    certificate, key = tmp_path / "hooks.pem", tmp_path / "hooks.key"
    made_certificate("hooks.test", certificate, key)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))

    async def test() -> None:
        receiver = Receiver()
        server = await asyncio.start_server(receiver.answer, "127.0.0.1", 0, ssl=serving)
        port = server.sockets[0].getsockname()[1]
        trusts = httpx.AsyncClient(verify=trusting)
        async with httpx.AsyncClient(verify=trusting) as http, trusts, httpx.AsyncClient() as strict:
            answer = await post(http, f"https://hooks.test:{port}/hook", "127.0.0.1", body=b"{}", headers={})
            assert answer.status_code == 204 and receiver.got[0][0]["host"] == f"hooks.test:{port}"
            for client, name in ((trusts, "other.test"), (strict, "hooks.test")):
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await post(client, f"https://{name}:{port}/hook", "127.0.0.1", body=b"{}", headers={})
        server.close()

    asyncio.run(test())


def made_certificate(name: str, certificate: Path, key: Path) -> None:
    """A certificate of that name, signed by itself."""
    private = ec.generate_private_key(ec.SECP256R1())
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    built = x509.CertificateBuilder(named, named, private.public_key(), x509.random_serial_number())
    built = built.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    built = built.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    signed = built.sign(private, hashes.SHA256())
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


@pytest.mark.parametrize("url", ["ftp://example.org", "http://", "file:///etc/passwd", "x"])
def test_what_is_no_http_address_is_refused(url: str) -> None:
    with pytest.raises(BadInput):
        addresses_of(url, frozenset())
