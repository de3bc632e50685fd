"""How the page is opened: by a link for a user, made when it is asked for and by no read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from standing import Standing, listening, with_service
from test_cli import own_home, rota, with_cli

from rota.runtime.process import SUPERVISOR, RunFolder, boot_id, own_id
from rota.service.config import load_settings
from rota.service.process import daemon
from rota.service.rest.auth import Audit, audit_cursor
from rota.testing.memory import VirtualClock

assert own_home  # the fixture of every test here, too


def test_ui_gives_a_user_an_address_that_opens_the_page_once(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await ask("user", "create", "ann", "--queue", "default")
        token = (await ask("token", "create", "--user", "ann", "--json")).document["token"]
        server = (await ask("ui", "--json")).document["url"].partition("/login")[0]
        url = (await asyncio.to_thread(rota, "ui", "--print", "--server", server, "--token", token)).out.strip()
        assert url.startswith(f"{server}/login?code=")
        async with httpx.AsyncClient(trust_env=False) as browser:
            assert (await browser.get(url)).status_code == 303
            assert (await browser.get(url.replace("/login", "/api/v1/whoami").partition("?")[0])).json()[
                "name"
            ] == "ann"
            assert (await browser.get(url)).status_code == 422

    with_cli(tmp_path / "service", test)


@pytest.mark.slow
def test_status_and_up_of_a_running_service_can_be_asked_again_and_again(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        async with listening(service) as http:
            me = own_id()
            record = {"url": str(http.base_url).rstrip("/"), "pid": me.pid, "start_time": me.start_time}
            service.app.home.service_record.write_text(json.dumps(record | {"boot_id": boot_id()}))
            settings = load_settings({"home": str(tmp_path)}, environ={})
            for _ in range(34):
                document = await asyncio.to_thread(daemon.status, settings)
                assert document["login"] == f"{record['url']}/login"
            assert not service.app.auth._codes, "a read creates nothing"
            assert not list(service.app.audit.newest(10))
            try:
                for _ in range(34):
                    assert "?code=" in (await asyncio.to_thread(daemon.up, settings))["login"]
            finally:  # the supervisor that up started ends with the record, and would start a service without one
                service.app.home.service_record.unlink()
                async with asyncio.timeout(60):
                    while RunFolder(service.app.home.run).find_alive(SUPERVISOR) is not None:
                        await asyncio.sleep(0.05)

    with_service(tmp_path, test)


def test_a_link_keeps_its_target_through_sign_in_and_a_session_ends_at_sign_out(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await service.submit()
        url = (await ask("ui", "hello", "--print")).out.strip()
        assert url.endswith("&next=/jobs/hello-1")
        server = url.partition("/login")[0]
        async with httpx.AsyncClient(trust_env=False, headers={"Rota-CSRF": "1"}) as browser:
            opened = await browser.get(url)
            assert (opened.status_code, opened.headers["location"]) == (303, "/jobs/hello-1")
            assert (await browser.get(f"{server}/api/v1/whoami")).status_code == 200
            assert (await browser.post(f"{server}/logout")).status_code == 204
            assert (await browser.get(f"{server}/api/v1/whoami")).status_code == 401
            for outside in (
                "https://evil.example/x",
                "//evil.example/x",
                "////evil.example/x",
                "/\\evil.example",
                "evil",
            ):
                code = (await ask("ui", "--json")).document["code"]
                opened = await browser.get(f"{server}/login", params={"code": code, "next": outside})
                assert opened.headers["location"] == "/", outside
            used = await browser.get(url, headers={"accept": "text/html"})
            assert (used.status_code, "<html" in used.text) == (422, True), "a page, not JSON"

    with_cli(tmp_path / "service", test)


def test_requests_of_one_millisecond_are_each_on_one_page_of_the_audit(tmp_path: Path) -> None:
    audit, seen, cursor = Audit(tmp_path / "audit.jsonl", VirtualClock(wall_start_s=1_700_000_000.1234)), [], ""
    for n in range(7):
        line = {"request_id": f"{7 * n % 10}", "path": f"/{n}"}  # ids are not in the order of the requests
        audit.begin(line) if n % 2 else audit.anonymous(line)
    while page := audit.newest(3, before=cursor):
        seen += [one["path"] for one in page]
        cursor = audit_cursor(page[-1])
    assert seen == [f"/{n}" for n in reversed(range(7))]


def test_the_audit_is_read_page_by_page_and_searched_by_the_server(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        for n in range(7):
            await service.http.post(f"/api/v1/jobs/nope-{n}:stop")
        await service.http.post("/api/v1/nodes/r0n0:cordon", json={})
        pages, cursor = [], ""
        while len(pages) < 10:
            page = await service.get("/audit", limit=3, text="jobs/nope", cursor=cursor)
            pages.append([one["path"][-6] for one in page["items"]])
            if (cursor := page["next"] or "") == "":
                break
        assert pages == [["6", "5", "4"], ["3", "2", "1"], ["0"]]

    with_cli(tmp_path / "service", test)
