"""Client and AsyncClient against a whole service; lost connections against a server that cuts them."""

from __future__ import annotations

import asyncio
import inspect
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from standing import HELLO, Standing, listening
from standing import with_service as with_parts

from rota.service import http
from rota.service.api import body_of, source_of
from rota.service.client import AsyncClient, Client
from rota.spec import errors
from rota.spec.errors import (
    BadInput,
    Conflict,
    IdempotencyConflict,
    Infeasible,
    JobFileError,
    NoToken,
    NotReachable,
    RotaError,
    TimedOut,
    UnknownName,
)
from rota.spec.events import JobEnded
from rota.spec.reasons import Reason
from rota.spec.states import JobState

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _retries_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "RETRY_FIRST_S", 0.01)


def with_service(home: Path, test: Callable[[Standing], Awaitable[None]]) -> None:
    """A whole service that listens on a port."""

    async def opened(service: Standing) -> None:
        async with listening(service) as http:
            await test(replace(service, http=http))

    with_parts(home, opened)


def address(service: Standing) -> dict[str, str]:
    return {"server": str(service.http.base_url).rstrip("/"), "token": service.http.headers["authorization"].split()[1]}


async def asked(service: Standing, question: Callable[[Client], T]) -> T:
    """One question of the blocking client, beside the running service."""

    def ask() -> T:
        with Client(**address(service)) as client:
            return question(client)

    return await asyncio.to_thread(ask)


async def reached(service: Standing, job: str, state: JobState) -> None:
    """Ask until the job is in this state, at most 20 s."""
    async with asyncio.timeout(60):
        while (await service.get(f"/jobs/{job}"))["state"] != state:
            await asyncio.sleep(0.02)


def end(service: Standing, job: str) -> int:
    return service.as_master(job, JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED, text="all done"))


def test_a_job_runs_through_the_client_from_submit_to_its_end(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        handle = await asked(service, lambda client: client.run(HELLO, set={"roles.main.resources.gpus": 1}))
        assert handle.id == "hello-1"
        assert [row["id"] for row in (await asked(service, Client.jobs))["items"]] == ["hello-1"]
        await reached(service, "hello-1", JobState.ADMITTED)
        document = await asked(service, lambda client: client.explain("hello"))
        assert (document["kind"], document["state"]) == ("Explanation", "ADMITTED")
        assert (await asked(service, lambda client: client.placement("hello-1")))["items"][0]["devices"] == [0]
        await service.seen(end(service, "hello-1"))
        ended = await asked(service, lambda client: client.attach("hello-1").wait(60))
        assert (await asked(service, lambda client: client.attach("hello-1").why()))["kind"] == "WaitGraph"
        path = tmp_path / "trace.json"
        trace = await asked(service, lambda client: client.attach("hello-1").trace(path))
        assert json.loads(path.read_text()) == trace and trace["kind"] == "Trace"
        assert (ended.state, ended.reason) == (JobState.SUCCEEDED, "COMPLETED")

    with_service(tmp_path, test)


def test_events_follow_to_the_end_and_an_async_client_sees_the_same(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        await reached(service, "hello-1", JobState.ADMITTED)
        following = asyncio.create_task(
            asked(service, lambda client: [event["kind"] for event in client.events("hello-1", follow=True)])
        )
        async with AsyncClient(**address(service)) as client:
            kinds: list[str] = []
            async for event in client.events("hello-1", follow=True):
                kinds.append(event["kind"])
                if event["kind"] == "JobAdmitted":
                    end(service, "hello-1")
            assert (await client.wait("hello-1", timeout_s=5))["state"] == "SUCCEEDED"
        assert kinds == ["JobSubmitted", "JobQueued", "JobAdmitted", "JobEnded"]
        assert await asyncio.wait_for(following, 60) == kinds
        paged = await asked(service, lambda client: [one["kind"] for one in client.events("hello-1", limit=1)])
        assert paged == kinds, "a story longer than a page is told to its end"
        async with AsyncClient(**address(service)) as client:
            assert [one["kind"] async for one in client.events("hello-1", limit=1)] == kinds

    with_service(tmp_path, test)


@pytest.mark.parametrize(
    ("question", "error", "words"),
    [
        (lambda c: c.job("nope"), UnknownName, "no job 'nope'"),
        (lambda c: c.run("name: t\nroles: {a: {runn: x}}\n"), JobFileError, "job.yaml:2:13: roles.a.runn: unknown"),
        (lambda c: c.run("name: t\nqueue: q\nroles: {a: {run: x}}\n"), UnknownName, "queue 'q' does not exist"),
        (lambda c: c.run(HELLO, set=["roles.main.resources.gpus=99"]), Infeasible, "asks 99 GPUs"),
        (lambda c: [c.submit(source_of(t), key="k") for t in (HELLO, HELLO + "#\n")], IdempotencyConflict, "key 'k'"),
        (lambda c: (c.run(HELLO), c.wait("hello-1", timeout_s=0.1)), TimedOut, "it keeps running"),
        (lambda c: c.change("nope", {"priority": 1}), UnknownName, "no job"),
    ],
)  # fmt: skip
def test_a_refusal_is_the_exception_that_the_service_raised(
    tmp_path: Path, question: Callable[[Client], Any], error: type[RotaError], words: str
) -> None:
    async def test(service: Standing) -> None:
        with pytest.raises(error, match=words.replace("(", r"\(")) as caught:
            await asked(service, question)
        assert type(caught.value) is error
        printed = "".join(traceback.format_exception_only(caught.value))
        assert not caught.value.hint or printed.count(caught.value.hint) == 1, "a traceback has it, and once"

    with_service(tmp_path, test)


def test_a_home_with_a_free_port_and_no_service_is_named_and_not_port_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROTA_HOME", str(tmp_path))
    monkeypatch.setenv("ROTA_PORT", "0")
    with pytest.raises(NotReachable, match=f"no Rota service runs for {tmp_path}") as refused, Client() as client:
        client.jobs()
    assert refused.value.hint == "start it with 'rota up'"


def test_stopping_an_ended_job_is_a_conflict_and_the_same_key_is_one_job(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        body = source_of(HELLO)
        first = await asked(service, lambda client: client.submit(body, key="one"))
        again = await asked(service, lambda client: client.submit(body, key="one"))
        assert first["id"] == again["id"] == "hello-1"
        await reached(service, "hello-1", JobState.ADMITTED)
        await service.seen(end(service, "hello-1"))
        with pytest.raises(Conflict, match="has ended: SUCCEEDED"):
            await asked(service, lambda client: client.stop("hello-1"))

    with_service(tmp_path, test)


def test_a_wrong_token_and_a_silent_address_are_told_apart(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        def wrong() -> None:
            with Client(address(service)["server"], "rota_x_y") as client:
                client.status()

        with pytest.raises(NoToken, match="invalid or expired token"):
            await asyncio.to_thread(wrong)

    with_service(tmp_path, test)
    with Client("http://127.0.0.1:9", "t") as client, pytest.raises(NotReachable) as caught:
        client.status()
    assert "127.0.0.1:9" in caught.value.message


class CuttingServer:
    """Serves one event a connection and cuts it; notes the Last-Event-ID of every connection."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.seen: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        given = [line.partition(": ")[2] for line in head.split("\r\n") if line.lower().startswith("last-event-id")]
        self.seen += given or [""]
        number = int(given[0]) + 1 if given else 1
        kind = "event" if number <= self.last else "end"
        body = f'id: {number}\nevent: {kind}\ndata: {{"kind": "E", "number": {number}}}\n\n'
        size = len(body) + (50 if number <= self.last else 0)  # promised, but cut off
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {size}\r\n\r\n{body}".encode()
        )
        await writer.drain()
        writer.close()


async def with_server(handler: CuttingServer, test: Callable[[str], Awaitable[None]]) -> None:
    server = await asyncio.start_server(handler.handle, "127.0.0.1", 0)
    async with server:
        await test(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


def test_a_cut_stream_goes_on_after_the_last_event_without_gap_or_double() -> None:
    server = CuttingServer(last=4)

    async def test(url: str) -> None:
        def read() -> list[int]:
            with Client(url, "t") as client:
                return [event["number"] for event in client.events("j", follow=True)]

        assert await asyncio.to_thread(read) == [1, 2, 3, 4]
        assert server.seen == ["", "1", "2", "3", "4"]

    asyncio.run(with_server(server, test))


class Cut(httpx.SyncByteStream):
    """One event, then the connection is gone."""

    def __iter__(self) -> Iterator[bytes]:
        yield b'id: 7\nevent: event\ndata: {"number": 7}\n\n'
        raise httpx.ReadError("cut")


def test_a_stream_that_never_began_is_given_up_at_once_and_a_lost_one_is_tried_again() -> None:
    with Client("http://127.0.0.1:9", "t") as client, pytest.raises(NotReachable):
        list(client.events("j", follow=True))
    tries: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        tries.append(request.headers.get("last-event-id", ""))
        if len(tries) == 1:
            return httpx.Response(200, stream=Cut())
        if len(tries) < 4:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, text="id: 8\nevent: end\ndata: {}\n\n")

    with Client("http://x", "t", transport=httpx.MockTransport(answer)) as client:
        assert [event["number"] for event in client.events("j", follow=True)] == [7]
    assert tries == ["", "7", "7", "7"]


def test_who_stops_reading_gives_the_connection_back_at_once_also_under_a_running_loop() -> None:
    """A loop ends generators that nobody has any more some time later."""
    closed: list[str] = []

    class Endless(Cut, httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for part in self:
                yield part

        def close(self) -> None:
            closed.append("Client")

        async def aclose(self) -> None:
            closed.append("AsyncClient")

    async def test() -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Endless()))
        events = Client("http://x", "t", transport=transport).events("j", follow=True)
        awaited = AsyncClient("http://x", "t", transport=transport).events("j", follow=True)
        assert next(events) == await anext(awaited) == {"number": 7}
        del events
        await awaited.aclose()
        assert closed == ["Client", "AsyncClient"]

    asyncio.run(test())


def flaky(failures: int, calls_seen: list[str]) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        calls_seen.append(request.method)
        if len(calls_seen) <= failures:
            raise httpx.RemoteProtocolError("cut", request=request)
        return httpx.Response(200, json={"items": []})

    return httpx.MockTransport(answer)


def test_safe_requests_are_sent_again_and_others_are_not() -> None:
    seen: list[str] = []
    with Client("http://x", "t", transport=flaky(2, seen)) as client:
        assert client.nodes() == {"items": []}
    assert seen == ["GET"] * 3
    seen.clear()
    with Client("http://x", "t", transport=flaky(2, seen)) as client, pytest.raises(NotReachable, match="cut"):
        client.change("j", {"priority": 1})
    assert seen == ["PATCH"]


def test_every_error_of_the_tree_comes_back_as_itself() -> None:
    for code, cls in http.BY_CODE.items():
        text = httpx.Response(cls.http, json={"code": code, "detail": "d", "hint": "h", "fields": {"n": 1}}).text
        found = http.error_of(cls.http, text, url="u")
        assert (type(found), found.message, found.hint, found.fields["n"]) == (cls, "d", "h", 1)


@pytest.mark.parametrize(
    ("status", "text", "cls"),
    [
        (502, "<html>Bad Gateway</html>", RotaError),
        (503, "", NotReachable),
        (404, '{"code": "UNKNOWN_QUEUE", "detail": "no"}', UnknownName),
        (413, "[]", RotaError),
        (422, '{"detail": "no"}', BadInput),
    ],
)
def test_an_answer_of_something_else_still_has_a_kind(status: int, text: str, cls: type[RotaError]) -> None:
    assert type(http.error_of(status, text, url="u")) is cls


def test_a_body_is_made_of_a_path_a_text_and_a_spec(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(HELLO)
    assert source_of(path, sets={"a": 1}) == {
        "source": HELLO,
        "filename": str(path),
        "sets": ["a=1"],
        "workdir": str(tmp_path),
    }
    assert source_of(str(path))["source"] == HELLO
    assert source_of(HELLO)["filename"] == "job.yaml"
    from rota.service.jobfile.reader import read_job

    spec = read_job(HELLO, filename="j")
    assert source_of(spec)["spec"] == spec.to_json()
    for wrong in (tmp_path / "none.yaml", tmp_path, 5):
        with pytest.raises(BadInput):
            source_of(wrong)
    for given in ({"job": path}, {"job": None, "command": ["true"]}):
        with pytest.raises(BadInput, match=r"run\(\) takes no 'labels'") as refused:
            body_of(**given, res={"labels": {"a": "b"}})
        assert refused.value.hint == "a field of the job: set={'labels': ...}, or Job(..., labels=...) of a built one"
    with pytest.raises(BadInput, match="takes no 'gpu'") as refused:
        body_of(None, command=["true"], res={"gpu": 1})
    assert refused.value.hint == "did you mean 'gpus'?"


def test_a_command_becomes_a_job_of_one_role_and_a_job_can_be_changed(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        job = await asked(service, lambda client: client.run(command=["./t.sh", "--lr", "1e-3"], gpus=1, workdir="/x"))
        spec = (await asked(service, lambda client: client.spec(job.id)))["spec"]
        assert (spec["name"], spec["roles"][0]["run"]) == ("t", ["./t.sh", "--lr", "1e-3"])
        assert (spec["roles"][0]["shell"], spec["roles"][0]["res"]["gpus"]) == (False, 1.0)
        changed = await asked(service, lambda client: client.attach(job.id).set(priority=80))
        assert changed.document["priority"] == 80

    with_service(tmp_path, test)


def test_the_client_is_a_public_name_of_rota() -> None:
    import rota

    assert rota.Client is Client


def test_both_clients_have_the_same_methods() -> None:
    def names(cls: type) -> set[str]:
        return {name for name in vars(cls) if not name.startswith("_")}

    assert names(Client) - names(AsyncClient) == {"attach", "close"}
    assert not names(AsyncClient) - names(Client)
    for name in names(AsyncClient) - {"run"}:
        taken = [list(inspect.signature(getattr(one, name)).parameters) for one in (Client, AsyncClient)]
        assert taken[0] == taken[1], name


def test_errors_of_spec_are_all_known_to_the_client() -> None:
    assert http.BY_CODE["INVALID"] is errors.BadInput
    assert http.BY_CODE["INFEASIBLE"] is errors.Infeasible
