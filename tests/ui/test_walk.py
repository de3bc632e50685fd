"""Forty steps in a browser, as a researcher, an admin and an evaluator take them in their first hour.

The researcher has a service, an engine and processes of her own; the others look at a service with a day's work in it.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.ui.conftest import refusal_wanted, refused_from_now
from tests.ui.seeded import Seeded, seeded

from rota.runtime.environ import Home
from rota.service.config import Settings
from rota.service.process import daemon

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 40
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


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeded]:
    with seeded(tmp_path_factory.mktemp("day")) as service:
        yield service


def test_the_walk_has_forty_steps_in_order() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    numbers = [int(one) for one in re.findall(r"^ +step\((\d+),", text, re.MULTILINE)]
    assert numbers == list(range(1, STEPS + 1))


@dataclass
class Step:
    """Names each step in what a failing test prints, with a picture of what was there before it."""

    page: Any
    shot: Any
    done: list[int] = field(default_factory=list[int])

    def __call__(self, number: int, what: str) -> None:
        print(f"{number:2}. {what}")
        self.shot(self.page, f"walk-{number:02}")
        self.done.append(number)


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def tab(page: Any, name: str) -> None:
    page.get_by_role("navigation", name="Parts of").get_by_role("link", name=name).click()


def visit(page: Any, name: str) -> None:
    page.get_by_role("navigation", name="Pages").get_by_role("link", name=name).click()


def write_job(page: Any, source: str) -> None:
    visit(page, "Submit")
    page.get_by_label("Job file").fill(source)


def sign_in(page: Any, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.locator("form").get_by_role("button", name="Sign in").click()


def answer(page: Any, *, accept: bool) -> list[str]:
    """Answer the next question of the page; the list then has its words."""
    said: list[str] = []

    def heard(dialog: Any) -> None:
        said.append(dialog.message)
        if accept:
            dialog.accept()
        else:
            dialog.dismiss()

    page.once("dialog", heard)
    return said


def researcher(settings: Settings) -> str:
    """A token of the user ada."""
    home = Home.of(settings.home)
    daemon.ask(home, "PUT", "/api/v1/users/ada", {"grants": [{"queue": "", "role": "user"}]})
    return str(daemon.ask(home, "POST", "/api/v1/tokens", {"user": "ada", "name": "browser"})["token"])


def test_a_researcher_submits_watches_loses_and_understands_a_job(
    opened: Any, shot: Any, served: tuple[Settings, str]
) -> None:
    settings, _ = served
    token = researcher(settings)
    with opened(settings.url) as page:
        from playwright.sync_api import expect

        step = Step(page, shot)
        step(1, "sign in with a token")
        sign_in(page, token)
        expect(page.get_by_role("link", name="ada")).to_be_visible()
        refusal_wanted(page, 401)
        step(2, "the keys behind ?")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_contain_text("next and previous job")
        page.keyboard.press("Escape")
        step(3, "an empty list names the next step")
        visit(page, "Jobs")
        expect(page.locator("main")).to_contain_text("rota run job.yaml")
        submit_with_mistake_then_dry_then_real(page, step)
        watch_kill_heal(page, step, settings)
        wait_and_ask(page, step)
        end(page, step)
    assert step.done == [*range(1, 22)]
    jobs = {one["id"]: one for one in daemon.ask(Home.of(settings.home), "GET", "/api/v1/jobs?all=true")["items"]}
    assert {name: one["state"] for name, one in jobs.items()} == {"pair-1": "CANCELLED", "wide-1": "RUNNING"}


def submit_with_mistake_then_dry_then_real(page: Any, step: Step) -> None:
    from playwright.sync_api import expect

    step(4, "a mistake leads to its line")
    write_job(page, PAIR.replace("gpus: 1", "gpu: 1", 1))
    press(page, "Dry run")
    expect(page.get_by_role("alert")).to_contain_text("line 4")
    refusal_wanted(page, 422)
    step(5, "a dry run says that the job would start")
    write_job(page, PAIR)
    press(page, "Dry run")
    expect(page.get_by_role("heading", name="It would start now")).to_be_visible(timeout=LIMIT_MS)
    step(6, "submit")
    press(page, "Submit")
    expect(page).to_have_url(re.compile(r"/jobs/pair-1$"))
    step(7, "both roles become ready on the graph")
    for role in ("left", "right"):
        expect(page.get_by_role("button", name=f"Role {role}: 1 READY")).to_be_visible(timeout=LIMIT_MS)
    expect(page.locator(".head .state")).to_contain_text("RUNNING")


def watch_kill_heal(page: Any, step: Step, settings: Settings) -> None:
    from playwright.sync_api import expect

    step(8, "what each instance does now")
    tab(page, "Now")
    expect(page.get_by_role("group", name="What each instance does")).to_contain_text("left/0")
    step(9, "a process is killed: its recovery comes by itself")
    job = daemon.ask(Home.of(settings.home), "GET", "/api/v1/jobs/pair-1")
    tab(page, "Failures")
    expect(page.get_by_text("Nothing has failed")).to_be_visible()
    os.kill(next(one["pid"] for one in job["instances"] if one["role"] == "left"), signal.SIGKILL)
    expect(page.get_by_role("heading", name="Recovery 1: restarted, not proven yet")).to_be_visible(timeout=LIMIT_MS)
    step(10, "who failed first")
    expect(page.get_by_role("region", name="Failed first")).to_contain_text("left/0")
    step(11, "the timeline shows the loss and the recovery")
    tab(page, "Timeline")
    expect(page.locator("svg rect.tl-lost title")).to_contain_text("left/0")
    assert page.locator("svg rect.tl-recover").count() == 1
    step(12, "the output of one instance, as it comes")
    tab(page, "Logs")
    page.get_by_label("Instance").select_option("right/0")
    expect(page.locator(".log-line").first).to_contain_text("tock")
    step(13, "find in all lines")
    page.get_by_label("Instance").select_option("")
    page.get_by_label("Find in the output").fill("TICK")
    expect(page.locator("[role=status]", has_text="with “TICK”")).to_be_visible()
    step(14, "where it runs")
    tab(page, "Placement")
    expect(page.locator("main")).to_contain_text("by the profile default")
    tab(page, "Failures")  # it is healed once it has run for a minute
    expect(page.get_by_role("heading", name="Recovery 1: ✓ healed")).to_be_visible(timeout=2 * LIMIT_MS)


def wait_and_ask(page: Any, step: Step) -> None:
    from playwright.sync_api import expect

    step(15, "a job that must wait says why, with numbers")
    write_job(page, WIDE_JOB)
    press(page, "Submit")
    card = page.get_by_role("region", name="Why it waits")
    expect(card).to_be_visible(timeout=LIMIT_MS)
    expect(card.locator("code").first).to_have_text(re.compile("NO_FREE_DEVICES|FRAGMENTED"))
    expect(card).to_contain_text("8 GPUs")
    step(16, "who holds the devices")
    expect(card.get_by_role("group", name="Jobs that hold devices")).to_contain_text("pair-1")
    step(17, "a change that preempts names whom, and is not made without a yes")
    tab(page, "Spec")
    said = answer(page, accept=False)
    page.get_by_label("New value").fill("90")
    press(page, "Change it")
    expect(page.get_by_role("button", name="Change it")).to_be_enabled()
    page.wait_for_function("() => document.querySelector('main').textContent.includes('now 50')")
    while not said:
        page.wait_for_timeout(50)
    assert said == ["This preempts pair-1 of ada. Change it?"]


def end(page: Any, step: Step) -> None:
    from playwright.sync_api import expect

    step(18, "the holder is stopped, after a question, and the one that waits starts")
    page.goto(page.url.replace("/jobs/wide-1/spec", "/jobs/pair-1"))
    said = answer(page, accept=True)
    press(page, "Stop")
    expect(page.locator(".head .state")).to_contain_text("CANCELLED", timeout=LIMIT_MS)
    assert said == ["Stop pair-1?"]
    visit(page, "Jobs")
    expect(page.get_by_role("row", name=re.compile("wide-1"))).to_contain_text("RUNNING", timeout=LIMIT_MS)
    step(19, "tabs by state, with totals")
    page.get_by_role("link", name="Cancelled (1)").click()
    expect(page.locator("main")).to_contain_text("pair-1")
    expect(page.get_by_role("link", name="wide-1")).to_have_count(0)
    step(20, "submit again opens its file")
    page.get_by_role("link", name="pair-1").click()
    page.get_by_role("link", name="Submit again").click()
    expect(page.get_by_label("Job file")).to_have_value(PAIR)
    step(21, "sign out")
    refused_from_now(page, 401)
    press(page, "Sign out")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_an_admin_sees_what_needs_attention_and_who_may_do_what(opened: Any, shot: Any, day: Seeded) -> None:
    with opened(day.door()) as page:
        step = Step(page, shot)
        attend(page, step)
        token = grant(page, step)
        with opened(day.url) as other:
            be_refused(other, step, token)
            revoke(page, other, step)
        look_back(page, step)
    assert step.done == [*range(22, 34)]


def attend(page: Any, step: Step) -> None:
    from playwright.sync_api import expect

    step(22, "an alert is acknowledged")
    page.get_by_label("Alerts").get_by_role("button", name="Acknowledge").first.click()
    expect(page.get_by_text("1 acknowledged alert")).to_be_visible()
    step(23, "draining first tells whom it touches")
    visit(page, "Nodes")
    page.get_by_role("link", name=re.compile("^r0n0, healthy; 8 of 8 devices held; by learn-1")).click()
    press(page, "Drain")
    expect(page.get_by_text("touches 1 job")).to_be_visible()
    press(page, "Leave it")
    expect(page.locator(".head .state")).to_contain_text("healthy")
    step(24, "a cordoned node is used again")
    visit(page, "Nodes")
    page.get_by_role("link", name=re.compile("^r1n1, cordoned")).click()
    press(page, "Use it again")
    expect(page.locator(".head .state")).to_contain_text("healthy")


def grant(page: Any, step: Step) -> str:
    from playwright.sync_api import expect

    step(25, "a new user with a role on a queue")
    visit(page, "Access")
    form = page.get_by_role("form", name="Give a role")
    form.get_by_role("textbox", name="User").fill("eve")
    form.get_by_label("Queue of the role").select_option("research/rl")
    form.get_by_role("button", name="Give this role").click()
    expect(page.get_by_role("group", name="Users and their roles")).to_contain_text("user of research/rl")
    step(26, "a token for that user, shown once")
    form = page.get_by_role("form", name="Make a token")
    form.get_by_label("For user").fill("eve")
    form.get_by_label("Name").fill("laptop")
    form.get_by_role("button", name="Make a token").click()
    return str(page.get_by_label("New token").inner_text()).strip()


def be_refused(other: Any, step: Step, token: str) -> None:
    from playwright.sync_api import expect

    step(27, "the user signs in and sees no users")
    sign_in(other, token)
    expect(other.get_by_role("link", name="eve")).to_be_visible()
    visit(other, "Access")
    expect(other.get_by_role("heading", name="Tokens")).to_be_visible()
    expect(other.get_by_role("heading", name="Users")).to_have_count(0)
    step(28, "the user may not drain a node, and is told so")
    visit(other, "Nodes")
    other.locator(".heat-node").first.click()
    press(other, "Cordon")
    expect(other.get_by_role("alert")).to_contain_text("NOT_ALLOWED")


def revoke(page: Any, other: Any, step: Step) -> None:
    from playwright.sync_api import expect

    step(29, "a revoked token ends its session")
    answer(page, accept=True)
    press(page, "Revoke laptop")
    expect(page.get_by_role("button", name="Revoke laptop")).to_have_count(0)
    refused_from_now(other, 401)
    other.goto(other.url)
    expect(other.get_by_role("heading", name="Sign in")).to_be_visible()
    step(30, "the user is removed")
    answer(page, accept=True)
    press(page, "Remove eve")
    expect(page.get_by_role("button", name="Remove eve")).to_have_count(0)
    refusal_wanted(other, 403)


def look_back(page: Any, step: Step) -> None:
    from playwright.sync_api import expect

    step(31, "guarantees, limits and what is borrowed")
    visit(page, "Queues")
    expect(page.get_by_role("row", name=re.compile("^rl "))).to_contain_text("24")
    step(32, "the audit is searched by the service")
    visit(page, "Service")
    page.get_by_label("User, path or address has").fill("users/eve")
    expect(page.get_by_role("group", name="Requests, newest first")).to_contain_text("DELETE /api/v1/users/eve")
    step(33, "several jobs are stopped, after a question")
    visit(page, "Jobs")
    page.get_by_label("Choose serve-1").check()
    said = answer(page, accept=True)
    press(page, "Stop them")
    expect(page.get_by_role("row", name=re.compile("serve-1 "))).to_contain_text("STOPPING")
    assert said == ["Stop serve-1?"]


def test_an_evaluator_judges_a_busy_cluster(opened: Any, shot: Any, day: Seeded) -> None:
    from playwright.sync_api import expect

    with opened(f"{day.url}/jobs/big-1/explain", theme="dark") as page:
        step = Step(page, shot)
        step(34, "a link to a page keeps its target through sign-in")
        page.get_by_label("Code").fill(day.door().partition("code=")[2])
        page.locator("form").get_by_role("button", name="Sign in").click()
        card = page.get_by_role("region", name="Why it waits")
        expect(card).to_contain_text("QUOTA_LIMIT")
        refusal_wanted(page, 401)
        expect(page).to_have_url(re.compile("/jobs/big-1/explain$"))
        step(35, "why it waits, when it starts, what is ahead, rule by rule")
        for words in ("Likely", "Ahead in", "Nodes that fit, rule by rule"):
            expect(card).to_contain_text(words)
        step(36, "the overview says what waits and why, and whose the devices are")
        visit(page, "Overview")
        expect(page.get_by_role("region", name="Waiting, and why")).to_contain_text("limit of 24 GPUs")
        expect(page.locator(".legend").first).to_contain_text("learn-1 10")
        step(37, "use over time, as a picture and as a table")
        used = page.get_by_role("region", name="Use over time")
        expect(used.locator("canvas")).to_be_visible()
        used.get_by_text("as a table").click()
        expect(used.get_by_role("group", name="Use over time")).to_contain_text("Jobs waiting")
        step(38, "the jobs of now under another policy")
        visit(page, "Compare")
        press(page, "Play both")
        table = page.get_by_role("group", name="Start of each job under both policies")
        expect(table).to_contain_text("big-1", timeout=LIMIT_MS)
        step(39, "curves, smoothed, beside another job; the address keeps both")
        page.goto(f"{day.url}/jobs/learn-1/metrics")
        page.get_by_label("Smoothing").fill("0.6")
        page.get_by_label("Beside").fill("eval-1")
        press(page, "Compare")
        expect(page).to_have_url(re.compile(r"smooth=0\.6.*with=eval-1"))
        page.reload()
        expect(page.get_by_role("button", name="eval-1 ✕")).to_be_visible()
        step(40, "everything fits a phone")
        page.set_viewport_size({"width": 390, "height": 844})
        for path in ("/", "/jobs", "/jobs/learn-1", "/access"):
            page.goto(day.url + path)
            expect(page.locator("main h1")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
