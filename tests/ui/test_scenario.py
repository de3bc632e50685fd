"""One story in a browser over a real service and engine: submit, watch, kill, heal, explain, drain, compare."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
from tests.ui.conftest import refusal_wanted

from rota.runtime.environ import Home
from rota.service.config import Settings
from rota.service.process import daemon

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_MS = 60_000
PAIR = """name: pair
time_limit: 1h
roles:
  left: {run: "while :; do echo tick; sleep 0.2; done", resources: {cpus: 0.5, gpus: 1}}
  right: {run: "while :; do echo tock; sleep 0.2; done", resources: {cpus: 0.5, gpus: 1}}
"""
WIDE_JOB = """name: wide
time_limit: 1h
roles:
  main: {run: "sleep 100", replicas: 2, resources: {cpus: 0.5, gpus: 4}}
"""


def write_job(page: Any, source: str) -> None:
    page.get_by_role("link", name="Submit").click()
    page.get_by_label("Job file").fill(source)


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def tab(page: Any, name: str) -> None:
    page.get_by_role("navigation", name="Parts of").get_by_role("link", name=name).click()


def test_a_job_is_submitted_watched_killed_healed_and_its_neighbours_explained(
    browser: Any, opened: Any, shot: Any, served: tuple[Settings, str]
) -> None:
    settings, url = served
    with opened(url) as page:
        from playwright.sync_api import expect

        # 1. a mistake leads to its line, a dry run says that the job would start, submitting shows its graph
        write_job(page, PAIR.replace("gpus: 1", "gpu: 1", 1))
        press(page, "Dry run")
        expect(page.get_by_role("alert")).to_contain_text("line 4")
        refusal_wanted(page, 422)
        write_job(page, PAIR)
        press(page, "Dry run")
        expect(page.get_by_role("heading", name="It would start now")).to_be_visible(timeout=LIMIT_MS)
        press(page, "Submit")
        expect(page).to_have_url(re.compile(r"/jobs/pair-1$"))
        for role in ("left", "right"):
            box = page.get_by_role("button", name=f"Role {role}: 1 READY")
            expect(box).to_be_visible(timeout=LIMIT_MS)
        expect(page.locator(".head .state")).to_contain_text("RUNNING")
        shot(page, "story-running")

        # 2. kill one role; the failure and its recovery come by themselves
        job = daemon.ask(Home.of(settings.home), "GET", "/api/v1/jobs/pair-1")
        pid = next(one["pid"] for one in job["instances"] if one["role"] == "left")
        tab(page, "Failures")
        expect(page.get_by_text("Nothing has failed")).to_be_visible()
        os.kill(pid, signal.SIGKILL)
        healed = page.get_by_role("heading", name="Recovery 1: ✓ healed")
        expect(healed).to_be_visible(timeout=LIMIT_MS)
        expect(page.get_by_role("region", name="Failed first")).to_contain_text("left/0")
        shot(page, "story-healed")
        tab(page, "Timeline")
        expect(page.locator("svg rect.tl-lost title")).to_contain_text("left/0")
        assert page.locator("svg rect.tl-recover").count() == 1

        # 3. its output, as it comes
        tab(page, "Logs")
        page.get_by_label("Instance").select_option("right/0")
        expect(page.locator(".log-line").first).to_contain_text("tock")

        # 4. a job that must wait says why, with numbers
        write_job(page, WIDE_JOB)
        press(page, "Submit")
        card = page.get_by_role("region", name="Why it waits")
        expect(card).to_be_visible(timeout=LIMIT_MS)
        expect(card.locator("code").first).to_have_text(re.compile("NO_FREE_DEVICES|FRAGMENTED"))
        expect(card.get_by_role("group", name="Jobs that hold devices")).to_contain_text("pair-1")
        shot(page, "story-waiting")

        # 5. draining first tells whom it touches
        node = daemon.ask(Home.of(settings.home), "GET", "/api/v1/jobs/pair-1")["nodes"][0]
        page.get_by_role("link", name="Nodes").click()
        page.get_by_role("link", name=re.compile(f"^{node}, healthy; 2 of 4 devices held; by pair-1")).click()
        press(page, "Drain")
        expect(page.get_by_text("touches 1 job")).to_be_visible()
        press(page, "Drain it now")
        expect(page.locator(".head .state")).to_contain_text("draining")  # pair-1 is still there

        # 6. what another policy would do with these jobs
        page.get_by_role("link", name="Compare").click()
        press(page, "Play both")
        table = page.get_by_role("group", name="Start of each job under both policies")
        expect(table).to_contain_text("wide-1", timeout=LIMIT_MS)
        expect(table).to_contain_text("runs")
        shot(page, "story-compared")
