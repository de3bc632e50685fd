"""Webhooks: signed, at least once and in order, also over a receiver that fails and a service that is killed."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from standing import HELLO, Standing, standing

from rota.service import notify
from rota.service.notify import check_url
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
        notifier = service.doors.notifier
        notifier.allowed = frozenset({"127.0.0.1"})
        running = asyncio.create_task(notifier.run())
        yield service
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def until(what, limit_s: float = 20) -> None:
    async with asyncio.timeout(limit_s):
        while not what():
            await asyncio.sleep(0.01)


def test_notices_are_signed_in_order_and_survive_failures_and_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "RETRY_S", (0.01, 0.02))
    monkeypatch.setattr(notify, "POLL_S", 0.01)

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


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/x", "http://169.254.169.254/latest", "http://10.1.2.3/", "http://[::1]/"]
)
def test_an_address_inside_needs_to_be_allowed(url: str) -> None:
    with pytest.raises(NotAllowed, match="an address inside"):
        check_url(url, frozenset())
    check_url(url, frozenset({"127.0.0.1", "169.254.169.254", "10.1.2.3", "::1"}))


@pytest.mark.parametrize("url", ["ftp://example.org", "http://", "file:///etc/passwd", "x"])
def test_what_is_no_http_address_is_refused(url: str) -> None:
    with pytest.raises(BadInput):
        check_url(url, frozenset())
