"""A program of a job in a browser over a real service and engine: opened from the page, ended when it is idle."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rota.service.client import Client
from rota.service.config import Settings

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_MS = 120_000
APP = """
import http.server, os, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        which = self.server.which
        body = f"<title>lab</title><p>{which}, asked with {self.headers['Cookie']}</p>".encode()
        body += b"<p id=seen></p><script>seen.textContent = 'scripts see ' + document.cookie</script>"
        self.send_response(200 if self.path == "/" else 204)
        self.send_header("Content-Type", "text/html")
        self.send_header("Set-Cookie", f"login={which}; HttpOnly")
        if not self.headers["Cookie"]:
            self.send_header("Set-Cookie", f"_xsrf={which}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
for which in ("cells", "board"):
    address = os.environ["ROTA_NODE_ADDRESS"], int(os.environ[f"ROTA_PORT_{which.upper()}"])
    server = http.server.ThreadingHTTPServer(address, Handler)
    server.which = which
    threading.Thread(target=server.serve_forever).start()
"""


def test_a_port_opens_from_the_page_with_its_login_and_the_job_ends_when_idle(
    browser: Any, opened: Any, served: tuple[Settings, str], tmp_path: Any
) -> None:
    from playwright.sync_api import expect

    settings, url = served
    role = {"run": ["python", "app.py"], "ports": ["cells", "board"], "resources": {"cpus": 0.2}}
    (tmp_path / "app.py").write_text(APP)
    path = tmp_path / "job.json"
    source = {"name": "lab", "idle_limit": "15s", "time_limit": "9m", "roles": {"main": role}}
    path.write_text(json.dumps(source))
    with Client(settings.url, (settings.root / "token").read_text().strip()) as client:
        job = client.run(path)
        with opened(url) as page:
            page.goto(f"{settings.url}/jobs/{job.id}")
            with page.expect_popup(timeout=LIMIT_MS) as popup:
                page.get_by_role("link", name="cells").click(timeout=LIMIT_MS)
            # the page of a port that is not open yet asks in between, so cookies of the program itself may be there
            first = re.compile(r"^cells, asked with (None|login=cells; _xsrf=cells)$")
            expect(popup.value.get_by_text(first)).to_be_visible(timeout=LIMIT_MS)
            assert popup.value.url.startswith("http://127.0.0.1:") and popup.value.url.rstrip("/") != settings.url
            address = popup.value.url
            with page.expect_popup(timeout=LIMIT_MS) as other:
                page.get_by_role("link", name="board").click(timeout=LIMIT_MS)
            expect(other.value.get_by_text("board, asked with None")).to_be_visible(timeout=LIMIT_MS)
            for one, which in ((popup.value, "cells"), (other.value, "board")):  # both are of one host
                one.reload()
                own = f"{which}, asked with login={which}; _xsrf={which}"
                expect(one.get_by_text(own, exact=True)).to_be_visible(timeout=LIMIT_MS)
                expect(one.get_by_text(f"scripts see _xsrf={which}", exact=True)).to_be_visible(timeout=LIMIT_MS)
        with opened(address) as stranger:  # a fresh session
            expect(stranger.get_by_role("heading", name="Sign in")).to_be_visible(timeout=LIMIT_MS)
            stranger.goto("about:blank")
            stranger.rota_wrong.clear()  # its requests were refused: it is not logged in
        ended = job.wait(timeout_s=120)
        assert (ended.state, ended.reason) == ("CANCELLED", "IDLE")
