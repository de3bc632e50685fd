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
    "now": "/jobs/learn-1/now",
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
    "access": "/access",
    "admin": "/admin",
}
SHOWS = {
    "overview": "learn-1 recovered from the loss of rollout/3",
    "queues": "vision",
    "jobs": "6 jobs",
    "graph": "6 READY",
    "now": "Who waits for whom",
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
    "access": "admin of all queues",
    "admin": "/api/v1/nodes/r1n1:cordon",
}
OUTSIDE = """document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll('body *')]
  .filter(one => one.getBoundingClientRect().right > innerWidth + 1)
  .map(one => one.outerHTML.slice(0, 80)).slice(0, 3)"""
"""What makes a page wider than its window."""
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
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1024, 768), (1440, 900), (3840, 2160)])
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
            found += [f"{name}: {one} is outside the window" for one in page.evaluate(OUTSIDE)]
            if width < 400:
                assert page.evaluate("document.querySelector('header').offsetHeight") < 110, "two rows of the menu"
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


def test_find_searches_all_lines_and_leads_to_what_is_around_one(opened: Any, day: Seeded) -> None:
    from playwright.sync_api import expect

    with opened(day.door()) as page:
        page.goto(f"{day.url}/jobs/learn-1/logs")
        expect(page.locator("main")).to_contain_text("440 lines")
        first = page.locator(".log-line").first.inner_text()
        word = first.split()[-1]
        page.get_by_label("Find in the output").fill(word.upper())
        expect(page).to_have_url(re.compile("find="))
        expect(page.locator("[role=status]", has_text="with “")).to_be_visible()
        page.reload()
        expect(page.get_by_label("Find in the output")).to_have_value(word.upper())
        page.locator("button.found").first.click()
        expect(page).to_have_url(re.compile("at="))
        expect(page.locator(".log-line.marked")).to_contain_text(word)
        assert page.locator(".log-line.marked").count() == 1
        assert word in page.locator(".log-line.marked").inner_text()


def test_keys_alerts_and_the_way_out(opened: Any, day: Seeded, shot: Any) -> None:
    from playwright.sync_api import expect

    with opened(day.door()) as page:
        expect(page.get_by_role("heading", name="Waiting, and why")).to_be_visible()
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_contain_text("next and previous job")
        page.keyboard.press("Escape")
        page.get_by_label("Alerts").get_by_role("button", name="Acknowledge").first.click()
        expect(page.get_by_text("1 acknowledged alert")).to_be_visible()
        assert day.ask("GET", "/api/v1/alerts")["items"][-1]["acknowledged_by"] == "local"
        page.goto(f"{day.url}/jobs/big-1/explain")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Token")).to_be_visible()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        expect(page.locator(".banner")).to_be_hidden()
        shot(page, "sign-in")
        code = day.door().partition("code=")[2]
        page.get_by_label("Code").fill(code)
        page.locator("form").get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", name="Why it waits")).to_be_visible()
        expect(page).to_have_url(re.compile("/jobs/big-1/explain$"))
        refusal_wanted(page, 401)


@pytest.mark.parametrize("width", [1024, 1440])
def test_the_reason_of_a_waiting_job_is_in_view(opened: Any, day: Seeded, width: int) -> None:
    from playwright.sync_api import expect

    with opened(day.door(), viewport={"width": width, "height": 800}) as page:
        page.goto(f"{day.url}/jobs")
        reason = page.locator("tr", has=page.get_by_role("link", name="big-1")).locator("td.cut")
        expect(reason).to_contain_text("QUOTA_LIMIT")
        box = reason.bounding_box()
        assert box["x"] + box["width"] < width
