"""How the page is opened: by a link for a user, made when it is asked for and by no read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from standing import Standing, listening, with_service
from test_cli import own_home, rota, with_cli

from rota.runtime.process import SUPERVISOR, RunFolder, boot_id, own_id
from rota.service.config import load_settings
from rota.service.process import daemon

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
