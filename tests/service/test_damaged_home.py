"""A home whose files were cut short, filled with garbage or removed: named errors, and nothing left running."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from standing import HELLO, Standing, with_service

from rota.runtime import process
from rota.runtime.environ import Home
from rota.runtime.event_log.interface import Writer
from rota.runtime.event_log.sql import SqlLog
from rota.runtime.process import SUPERVISOR, RunFolder, write_private
from rota.service import http
from rota.service.config import load_settings
from rota.service.process import daemon
from rota.spec.errors import StoreCorrupt
from rota.spec.events import WebhookSet

LIMIT_S = 60.0


@pytest.mark.parametrize(
    "text", ["", "\n", "\xa0", "rota_abc_", "rota_abcdefgh_tooshort", "short", "with a blank in it 1"]
)
def test_a_service_refuses_to_start_on_a_token_file_without_a_whole_token(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)

    async def enter(service: Standing) -> None:
        stranger = httpx.AsyncClient(transport=service.http._transport, base_url="http://127.0.0.1:7700")
        answer = await stranger.get("/api/v1/whoami", headers=[(b"Authorization", b"Bearer \xa0")])
        raise AssertionError(f"it serves, and a stranger gets {answer.status_code}")

    with pytest.raises(StoreCorrupt, match="token holds no whole token"):
        with_service(tmp_path, enter)


@pytest.mark.parametrize("text", ["a-token-of-my-own-choice\n", "rota_abc_" + "x" * 43])
def test_a_service_starts_on_a_whole_token(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)

    async def test(service: Standing) -> None:
        assert (await service.http.get("/api/v1/whoami")).json()["name"] == "local"
        for blank in (b"Bearer \xa0", b"Bearer  ", b"Bearer\t"):
            stranger = httpx.AsyncClient(transport=service.http._transport, base_url="http://127.0.0.1:7700")
            assert (await stranger.get("/api/v1/whoami", headers=[(b"Authorization", blank)])).status_code == 401

    with_service(tmp_path, test)


def test_a_private_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced, fsync = tmp_path / "token", list[tuple[bytes, bool]](), os.fsync

    def watched(fd: int) -> None:
        synced.append((Path(f"/proc/self/fd/{fd}").read_bytes(), path.exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    write_private(path, "whole")
    assert (synced, path.read_text()) == ([(b"whole", False)], "whole")


def test_a_private_file_that_cannot_be_written_is_named_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_private(path, "whole")
    (tmp_path / f".token.{os.getpid()}").symlink_to("/dev/full")  # a disk that takes nothing
    with pytest.raises(OSError) as raised:
        write_private(path, "more")
    assert (raised.value.errno, raised.value.filename, path.read_text()) == (errno.ENOSPC, str(path), "whole")


@pytest.mark.parametrize("garbage", [b"garbage", b"\0" * 20, b"-5", b"123456789012345678901"])
def test_garbage_in_the_mark_of_the_log_is_named_with_its_file(tmp_path: Path, garbage: bytes) -> None:
    url = f"sqlite:///{tmp_path}/rota.db"
    log = SqlLog(url, migrate=True)
    log.append([WebhookSet(id="w", url="http://x")], writer=Writer(scope="install", epoch=log.take_epoch("install")))
    log.close()
    mark = tmp_path / "rota.db-mark"
    assert int(mark.read_bytes()) == 1
    mark.write_bytes(garbage)
    with pytest.raises(StoreCorrupt, match=r"rota\.db-mark holds no number") as raised:
        SqlLog(url)
    assert "delete that file" in raised.value.hint
    mark.unlink()
    SqlLog(url).close()


@pytest.mark.parametrize(
    "garbage", ["", "{", "[]", "7", '"x"', "{}", '{"pid": "x", "start_time": 1, "boot_id": "", "url": 7}']
)
def test_garbage_in_the_record_of_the_service_is_named_and_down_and_up_go_past_it(tmp_path: Path, garbage: str) -> None:
    settings, home = load_settings({"home": str(tmp_path)}, environ={}), Home.of(tmp_path).make()
    home.service_record.write_text(garbage)
    with pytest.raises(StoreCorrupt, match=r"service\.json is not the record of a service") as raised:
        daemon.status(settings)
    assert "rota down" in raised.value.hint
    with pytest.raises(StoreCorrupt, match=r"service\.json is not the record of a service"):
        http._recorded_url(settings)
    assert daemon.down(settings)["state"] == "down"
    assert daemon.status(settings)["state"] == "down"


@contextlib.contextmanager
def started(home: Path) -> Iterator[dict[str, Any]]:
    """A service process of its own, as ``rota up`` starts it, without the engine; ended in any case."""
    settings = load_settings({"home": str(home), "port": 0, "pretend": "1x1x1"}, environ={})
    document = daemon.up(settings)
    me = process.identify(document["pid"])
    assert me is not None
    try:
        yield document
    finally:
        process.stop_tree(me, grace_s=5)


def suspended(home: Path) -> list[str]:
    """Stop what runs of a home, so that it cannot end by itself when its files are gone; what that is."""
    found = daemon._unrecorded(Home.of(home))
    names = sorted(daemon._kind(Home.of(home), one) for one in found)
    for one in found:
        os.kill(one.pid, signal.SIGSTOP)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["home", "run", "record"])
def test_down_ends_the_service_of_a_home_that_lost_its_records(tmp_path: Path, lost: str) -> None:
    home = tmp_path / "home"
    settings = load_settings({"home": str(home)}, environ={})
    with started(home) as document:
        me = process.identify(document["pid"])
        assert me is not None
        deadline = time.monotonic() + LIMIT_S
        while RunFolder(home / "run").find_alive(SUPERVISOR) is None:  # it writes its record itself
            assert time.monotonic() < deadline
            time.sleep(0.02)
        there, named = suspended(home), ["service", "supervisor"]
        if lost == "record":
            Home.of(home).service_record.write_text("garbage")
            named.remove("supervisor")  # its own record is there: it ends as with each ``rota down``
        else:
            shutil.rmtree(home if lost == "home" else home / "run")
            assert any(f"process {me.pid}" in one for one in daemon.status(settings)["still_running"])
        ended = daemon.down(settings)
        assert there == ["service", "supervisor"]
        assert (ended["state"], sorted(ended["ended"]), ended["still_running"]) == ("down", named, [])
        assert not process.is_alive(me)
        assert (daemon.status(settings)["still_running"], daemon.down(settings)["ended"]) == ([], [])


@pytest.mark.slow
def test_down_finds_a_service_in_the_foreground_by_its_lock(tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-m", "rota", "up", "--foreground", "--port", "0", "--pretend", "1x1x1"]
    child = subprocess.Popen(command, env={**os.environ, "ROTA_HOME": str(home)}, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + LIMIT_S
        while daemon.find_service(Home.of(home)) is None:
            assert child.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        assert suspended(home) == ["service"]
        shutil.rmtree(home)
        assert daemon.down(load_settings({"home": str(home)}, environ={}))["ended"] == ["service"]
        child.wait(LIMIT_S)
    finally:
        child.kill()
        child.wait()


def test_the_password_of_a_webhook_is_in_no_answer_and_still_sent(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        got = asyncio.get_running_loop().create_future()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if not got.done():
                got.set_result(head.decode().lower())
            writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        service.app.notifier.allowed = frozenset({"127.0.0.1"})
        telling = asyncio.create_task(service.app.notifier.run())
        made = (await service.http.post("/api/v1/webhooks", json={"url": f"http://me:hunter22@{host}/x"})).json()
        assert made["url"] == f"http://me:***@{host}/x"
        listed = await service.http.get("/api/v1/webhooks")
        events = await service.http.get("/api/v1/events", params={"type": "WebhookSet"})
        assert events.json()["items"] and "hunter22" not in listed.text + events.text
        assert "hunter22" not in b"".join(one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()).decode(
            errors="replace"
        )
        old = WebhookSet(id="old", url=f"http://me:hunter22@{host}/x")
        await service.app.loop.append([old])  # as an earlier version kept it
        for path in ("/webhooks", "/events"):
            assert "hunter22" not in (await service.http.get(f"/api/v1{path}")).text
        await service.submit()
        head = await asyncio.wait_for(got, LIMIT_S)
        assert f"host: {host}" in head and "authorization: basic bwu6ahvudgvymji=" in head
        refused = await service.http.post("/api/v1/webhooks", json={"url": "ftp://me:hunter22@x/"})
        assert (refused.status_code, "hunter22" in refused.text) == (422, False)
        assert (await service.http.delete(f"/api/v1/webhooks/{made['id']}")).status_code == 200
        assert not [one for one in (tmp_path / "secrets" / "webhooks").iterdir() if one.name.startswith(made["id"])]
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        server.close()

    with_service(tmp_path, test)


@pytest.mark.parametrize("seed", ["1e400", "-1e400", ".inf", "9" * 400])
def test_a_number_without_an_end_is_a_mistake_at_its_line(tmp_path: Path, seed: str) -> None:
    async def test(service: Standing) -> None:
        answer = await service.http.post("/api/v1/jobs", json={"source": f"seed: {seed}\n{HELLO}"})
        assert (answer.status_code, answer.json()["errors"][0]["line"]) == (422, 1), answer.text

    with_service(tmp_path, test)


def test_the_status_warns_of_a_full_disk_and_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)

    async def test(service: Standing) -> None:
        for free, said in ((2**20, "is refused with 503"), (2**27, "soon nothing can be written"), (2**34, "")):
            monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
            found = [one for one in (await service.get("/status"))["warnings"] if "disk" in one]
            assert [said in one and str(tmp_path) in one for one in found] == ([True] if said else [])

    with_service(tmp_path, test)
