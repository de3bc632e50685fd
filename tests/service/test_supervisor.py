"""The service and its supervisor, stopped and killed: each starts the other again, and ``down`` ends both for good."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from rota.runtime import process
from rota.runtime.environ import Home
from rota.runtime.process import SUPERVISOR, ProcessId, RunFolder
from rota.service.config import Settings, load_settings
from rota.service.process import daemon, supervisor
from rota.service.process.daemon import ServiceRecord
from rota.spec.errors import BadInput, Conflict, RotaError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LIMIT_S = 180.0
T = TypeVar("T")


@pytest.fixture
def settings() -> Iterator[Settings]:
    root = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    found = load_settings({"home": str(root), "port": 0, "pretend": "1x2x4"}, environ={})
    try:
        yield found
    finally:
        daemon.down(found, force=True)
        left = [pid for pid in process._pids() if str(root) in process.command_line(pid)]
        shutil.rmtree(root, ignore_errors=True)
        assert left == []


def until(found: Callable[[], T | None], what: str, log: Path | None = None) -> T:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if (value := found()) is not None:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} not within {LIMIT_S} s; {log.read_text() if log else ''}")


def another_service(home: Home, old: ServiceRecord) -> ServiceRecord | None:
    record = daemon.find_service(home)
    try:
        answers = record is not None and record["pid"] != old["pid"] and daemon.ask(home, "GET", "/readyz")["ok"]
    except RotaError:
        return None
    return record if answers else None


def another_supervisor(home: Home, old: ProcessId) -> ProcessId | None:
    record = RunFolder(home.run).find_alive(SUPERVISOR)
    return record.id if record is not None and record.id != old else None


def supervisor_of(home: Home) -> ProcessId:
    return until(lambda: another_supervisor(home, ProcessId(pid=0, start_time=0.0)), "a supervisor")


def standby_of(supervisor: ProcessId, *, serves: int) -> int:
    def found() -> int | None:
        below = [pid for pid in process.children_of(supervisor.pid) if pid != serves]
        return next((pid for pid in below if daemon.PRESTARTED in process.command_line(pid)), None)

    return until(found, "a standby of the supervisor")


def parts(home: Home) -> list[str]:
    return [one["part"] for one in daemon.ask(home, "GET", "/api/v1/events?type=PartReplaced")["items"]]


def test_a_service_that_hangs_or_dies_is_back_at_its_address_and_says_so(settings: Settings) -> None:
    home = Home.of(settings.home)
    daemon.up(settings)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        old = daemon.find_service(home)
        assert old is not None
        standby = standby_of(supervisor_of(home), serves=old["pid"])
        os.kill(old["pid"], number)
        new = until(
            lambda old=old: another_service(home, old), f"another service after {number.name}", home.service_log
        )
        assert new["url"] == old["url"], "clients keep its address"
        assert new["pid"] == standby, "the process that had imported everything takes over"
    until(lambda: parts(home) == ["service", "service"] or None, "two events")
    assert any("service, process" in text for text in daemon.ask(home, "GET", "/api/v1/status")["warnings"])


def test_a_supervisor_that_hangs_or_dies_is_started_again_by_the_service(settings: Settings) -> None:
    home = Home.of(settings.home)
    served = daemon.up(settings)["pid"]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        old = supervisor_of(home)
        os.kill(old.pid, number)
        until(lambda old=old: another_supervisor(home, old), f"another supervisor after {number.name}")
    assert daemon.ask(home, "GET", "/api/v1/status")["pid"] == served


def test_up_after_a_kill_needs_no_supervisor_and_down_is_the_end(settings: Settings) -> None:
    home = Home.of(settings.home)
    daemon.up(settings)
    supervisor = supervisor_of(home)
    record = daemon.find_service(home)
    assert record is not None
    process.send_signal(supervisor, signal.SIGSTOP)  # so that it cannot be the faster one
    os.kill(record["pid"], signal.SIGKILL)
    process.wait_gone((daemon.identity_of(record),), LIMIT_S)
    assert daemon.up(settings)["started"] is True
    process.send_signal(supervisor, signal.SIGCONT)
    assert daemon.down(settings)["state"] == "down"
    assert not process.is_alive(supervisor) and not process.children_of(supervisor.pid)
    assert daemon.find_service(home) is None
    assert daemon.status(settings)["still_running"] == []


def test_a_standby_that_is_stopped_does_not_keep_the_service_down(settings: Settings) -> None:
    home = Home.of(settings.home)
    daemon.up(settings)
    old = daemon.find_service(home)
    assert old is not None
    standby = standby_of(supervisor_of(home), serves=old["pid"])
    os.kill(standby, signal.SIGSTOP)
    os.kill(old["pid"], signal.SIGKILL)
    new = until(lambda: another_service(home, old), "another service", home.service_log)
    assert new["pid"] != standby
    until(lambda: process.identify(standby) is None or None, "the end of the stopped standby")


def test_a_standby_ends_with_its_supervisor(settings: Settings) -> None:
    home = Home.of(settings.home)
    daemon.up(settings)
    supervisor = supervisor_of(home)
    standby = standby_of(supervisor, serves=0)
    process.send_signal(supervisor, signal.SIGKILL)
    until(lambda: process.identify(standby) is None or None, "the end of the standby")
    record = daemon.find_service(home)
    assert record is not None and record["pid"] != standby, "the service runs, and not in the standby"


def test_a_service_whose_home_is_removed_ends_with_its_supervisor(settings: Settings) -> None:
    home = Home.of(settings.home)
    daemon.up(settings)
    record, supervisor = daemon.find_service(home), supervisor_of(home)
    assert record is not None
    shutil.rmtree(home.root)
    until(lambda: not process.is_alive(daemon.identity_of(record)) or None, "the end of the service")
    until(lambda: not process.is_alive(supervisor) or None, "the end of the supervisor")


def test_up_listens_where_the_last_one_was_asked_to(tmp_path: Path) -> None:
    home = Home.of(tmp_path).make()
    home.last_up.write_text('{"port": 0, "listen": "10.0.0.5"}')

    def before(**flags: object) -> tuple[int, str, str, str]:
        found = daemon.as_before(load_settings({"home": str(tmp_path), **flags}, environ={}), home)
        return found.port, found.listen, found.host, found.ray_address

    def pretended(**flags: object) -> str:
        return daemon.as_before(load_settings({"home": str(tmp_path), **flags}, environ={}), home).pretend

    assert before() == (0, "10.0.0.5", "10.0.0.5", "")
    assert before(port=7701, host="0.0.0.0") == (7701, "10.0.0.5", "0.0.0.0", "")
    assert before(ray_address="head:6379") == (0, "", "127.0.0.1", "head:6379")
    assert before(pretend="1x1x1")[1] == ""
    home.last_up.write_text('{"port": 0, "pretend": "1x2x8"}')
    assert pretended() == "1x2x8"
    home.last_up.write_text('{"profile": "yarn"}')
    profiles = [load_settings({"home": str(tmp_path), **flags}, environ={}) for flags in ({}, {"profile": "default"})]
    assert [daemon.as_before(one, home).profile for one in profiles] == ["yarn", "default"]
    assert pretended(pretend="1x1x1") == "1x1x1" and pretended(listen="10.0.0.5") == ""
    assert pretended(pretend="none") == "", "back to this machine"
    home.last_up.write_text("garbage")
    assert before() == (7700, "", "127.0.0.1", "")


def test_a_free_port_is_taken_again_after_down(settings: Settings) -> None:
    assert daemon.up(settings)["started"]
    daemon.down(settings)
    plain = load_settings({"home": settings.home, "pretend": settings.pretend}, environ={})
    assert not daemon.up(plain)["url"].endswith(":7700")


def test_waits_between_failed_starts_are_limited_and_forgotten_once_a_service_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = supervisor.Supervisor(load_settings({"home": str(tmp_path)}, environ={}))
    kept._failures, kept._taken, kept._died_s = 5000, True, kept._clock.monotonic_s()
    record = ServiceRecord(url="http://x:1", pid=1, start_time=0.0, boot_id="b", version="0", pretend="")
    kept._start_again(record, daemon.identity_of(record))
    assert kept._failures == 5000, "it waits, it does not try"
    records = iter([{"pid": os.getpid()}, None])
    monkeypatch.setattr(supervisor, "last_service", lambda _: next(records))
    monkeypatch.setattr(supervisor, "identity_of", lambda _: process.own_id())
    for name in ("reap_adopted", "wait_gone"):
        monkeypatch.setattr(process, name, lambda *_: [])
    kept.run()
    assert (kept._failures, kept._taken) == (0, False)


def test_why_a_service_did_not_start_is_the_error_that_it_wrote(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    for error in (BadInput("device family 'x:Y' is not there", hint="take it out"), Conflict("taken", hint="wait")):
        said = {"code": error.code, "message": error.message, "hint": error.hint, "exit": error.exit}
        log.write_text(f"rota serve failed: {json.dumps(said)}\n")
        found = daemon._failure(log, 0, error.exit)
        assert (type(found), found.message, found.hint) == (type(error), error.message, error.hint)
