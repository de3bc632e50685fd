"""Every page in a real browser: drawn without an error, light and dark, small and very large, clean by axe-core."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ui.conftest import refusal_wanted
from tests.ui.seeded import Seeded, seeded

from rota.runtime.environ import Home
from rota.service.config import Settings
from rota.service.process import daemon

ROOT = Path(__file__).resolve().parents[2]
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
PAGES = {
    "overview": "/",
    "queues": "/queues",
    "jobs": "/jobs",
    "graph": "/jobs/learn-1",
    "timeline": "/jobs/learn-1/timeline",
    "failures": "/jobs/learn-1/failures",
    "logs": "/jobs/learn-1/logs",
    "metrics": "/jobs/learn-1/metrics",
    "placement": "/jobs/learn-1/placement",
    "explain": "/jobs/big-1/explain",
    "spec": "/jobs/big-1/spec",
    "failed": "/jobs/eval-1",
    "nodes": "/nodes",
    "node": "/nodes/r0n0",
    "submit": "/submit",
    "compare": "/compare",
    "admin": "/admin",
}
SHOWS = {
    "overview": "26 / 32",
    "queues": "vision",
    "jobs": "6 jobs",
    "graph": "6 READY",
    "timeline": "11 commits",
    "failures": "Recovery 1: ✓ healed",
    "logs": "440 lines",
    "metrics": "reward",
    "placement": "rollout/5",
    "explain": "QUOTA_LIMIT",
    "spec": "priority: 70",
    "failed": "the batch is empty",
    "nodes": "r1n1 cordoned",
    "node": "80.0 GiB",
    "submit": "multimodal",
    "compare": "Play both",
    "admin": "fan 3 is slow",
}
ZONED = re.compile(r"GMT[+-]\d{4}|Z$")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.environ.get("ROTA_DEEP") != "1", reason="ROTA_DEEP is not set"),
]


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeded]:
    with seeded(tmp_path_factory.mktemp("day")) as service:
        yield service


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 720), (3840, 2160)])
def test_every_page_is_drawn_and_clean(
    opened: Any, shot: Any, day: Seeded, theme: str, width: int, height: int
) -> None:
    from playwright.sync_api import expect

    if not AXE.exists():
        pytest.skip("axe-core is not there: run 'npm ci' in web/")
    found: list[str] = []
    with opened(day.door(), theme=theme, viewport={"width": width, "height": height}) as page:
        for name, path in PAGES.items():
            page.goto(day.url + path)
            expect(page.locator("main")).to_contain_text(SHOWS[name])
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                f"{name} is wider than the window"
            )
            shot(page, f"{name}-{theme}-{width}")
            hovered = page.evaluate("[...document.querySelectorAll('time')].map(one => one.title)")
            found += [f"{name}: a time without its zone: {one}" for one in hovered if not ZONED.search(one)]
            # the debugging protocol may load what the page's own policy would refuse
            page.evaluate(AXE.read_text())
            result = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'best-practice']})")
            found += [f"{name}: {one['id']}: {one['nodes'][0]['html'][:160]}" for one in result["violations"]]
    assert not found, "\n".join(found)


def test_the_keyboard_alone_goes_everywhere(opened: Any, day: Seeded) -> None:
    from playwright.sync_api import expect

    with opened(day.door()) as page:
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        page.keyboard.press("g")
        page.keyboard.press("j")
        expect(page).to_have_url(re.compile("/jobs$"))
        expect(page.get_by_role("link", name="learn-1")).to_be_visible()
        page.keyboard.press("/")
        page.keyboard.type("LEARN")
        expect(page).to_have_url(re.compile("text=LEARN"))
        expect(page.get_by_role("link", name="big-1")).to_have_count(0)
        page.get_by_role("heading", name="Jobs").click()
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile("/jobs/learn-1$"))
        page.go_back()
        expect(page.get_by_label("Job or user has")).to_have_value("LEARN")
        page.goto(f"{day.url}/nodes")
        page.locator(".heat-node").first.focus()
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.textContent").startswith("r0n1")


def test_an_edit_is_shown_and_one_from_an_old_page_is_refused(opened: Any, day: Seeded) -> None:
    from playwright.sync_api import expect

    with opened(day.door()) as page:
        page.goto(f"{day.url}/jobs/vision-1/spec")
        value = page.get_by_label("New value")
        value.fill("55")
        page.get_by_role("button", name="Change it").click()
        expect(page.get_by_label("Edit by local")).to_contain_text("+ priority: 55")
        # what the page knows is held still while somebody else edits
        page.route(
            "**/api/v1/jobs/vision-1", lambda route: route.continue_() if route.request.method == "PATCH" else None
        )
        changed = day.ask("PATCH", "/api/v1/jobs/vision-1", {"changes": {"priority": 56}})
        assert changed["version"] == 3
        value.fill("57")
        page.get_by_role("button", name="Change it").click()
        expect(page.get_by_role("alert")).to_contain_text("VERSION_MISMATCH")
        page.unroute_all(behavior="ignoreErrors")
        refusal_wanted(page, 412)
    assert day.ask("GET", "/api/v1/jobs/vision-1")["priority"] == 56


@pytest.mark.real
def test_a_page_left_open_tells_that_the_service_is_away_and_goes_on_when_it_is_back(
    opened: Any, served: tuple[Settings, str]
) -> None:
    from playwright.sync_api import expect

    settings, url = served
    home = Home.of(settings.home)
    with opened(url) as page:
        expect(page.get_by_text("Nothing failed")).to_be_visible()
        killed = json.loads(home.service_record.read_text())["pid"]
        os.kill(killed, signal.SIGKILL)
        expect(page.locator(".banner")).to_contain_text("reconnecting", timeout=30_000)
        assert page.get_by_role("heading", name="Nodes and devices").is_visible(), "what was known stays on the page"
        daemon.up(settings)
        expect(page.locator(".banner")).to_be_hidden(timeout=30_000)
        assert json.loads(home.service_record.read_text())["pid"] != killed
        page.rota_wrong.clear()  # Chromium tells every refused connection
