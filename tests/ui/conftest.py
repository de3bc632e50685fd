"""A real browser for the tests of the UI: headless Chromium, driven by Playwright; skipped where there is none."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rota.service.config import Settings, load_settings
from rota.service.process import daemon

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE = {"width": 1440, "height": 900}
SHOTS = Path(os.environ.get("ROTA_UI_SHOTS", "")) if os.environ.get("ROTA_UI_SHOTS") else None
"""Where screenshots go; none are made without it."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium with a fresh profile, closed at the end of a file: until then this thread counts as an event loop."""
    if not CHROMIUM:
        pytest.skip("no Chromium on PATH: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with playwright.sync_playwright() as driver:
        playwright.expect.set_options(timeout=30_000)  # its own 5 s are short where Ray starts beside it
        running = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def served() -> Iterator[tuple[Settings, str]]:
    """A service of its own over two pretend nodes of four devices, and the address that opens the UI."""
    home = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = int(door.getsockname()[1])
    settings = load_settings({"home": str(home), "port": port, "pretend": "1x2x4"}, environ={})
    document = daemon.up(settings)
    try:
        yield settings, document["login"]
    finally:
        daemon.down(settings, force=True)
        shutil.rmtree(home, ignore_errors=True)


Opened = Callable[..., Any]


@pytest.fixture
def opened(browser: Any) -> Opened:
    """``with opened(url) as page``: a page of a fresh session; an error in its console fails the test.

    ``page.rota_wrong`` lists them, for a test that wants one.
    """

    @contextmanager
    def open_page(url: str, *, theme: str = "light", viewport: dict[str, int] = WIDE) -> Iterator[Any]:
        context = browser.new_context(color_scheme=theme, viewport=viewport)
        page = context.new_page()
        page.set_default_timeout(20_000)
        wrong: list[str] = []
        page.rota_wrong, page.rota_refusals = wrong, set[int]()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.goto(url)
        yield page
        context.close()
        for status in page.rota_refusals:
            refusal_wanted(page, status)
        assert not wrong, wrong

    return open_page


def refusal_wanted(page: Any, status: int) -> None:
    """Forget what Chromium told of requests that were refused with this status: the test wanted that.

    A page of nobody asks again every few seconds, so call it for 401 once what only the signed-in page has is visible.
    """
    page.rota_wrong[:] = [one for one in page.rota_wrong if f"status of {status} " not in one]


def refused_from_now(page: Any, status: int) -> None:
    """As `refusal_wanted`, until the page is closed too: for a test that ends on a page of nobody."""
    page.rota_refusals.add(status)


@pytest.fixture
def shot() -> Callable[[Any, str], None]:
    """Keep a picture of a page, where somebody asked for them."""

    def take(page: Any, name: str) -> None:
        if SHOTS is not None:
            SHOTS.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=SHOTS / f"{name}.png")

    return take
