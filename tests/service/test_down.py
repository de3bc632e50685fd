"""What ``down`` asks for before it ends the processes: a stop of every job, and the end of all on a given engine."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rota.runtime import process
from rota.runtime.engine import EngineSettings
from rota.runtime.environ import Home
from rota.runtime.gateway_client import GatewayClient, command_of
from rota.service import daemon
from rota.service.config import Settings, load_settings
from rota.spec.errors import EngineUnavailable
from rota.spec.ids import JobId


class Stubborn(BaseHTTPRequestHandler):
    """A service with two jobs, of which it refuses to stop the first."""

    live: list[str]

    def do_GET(self) -> None:
        self._say(200, {"items": [{"id": job} for job in self.live]})

    def do_POST(self) -> None:
        job = self.path.rpartition("/")[2].removesuffix(":stop")
        self.rfile.read(int(self.headers["Content-Length"]))
        if job == "first":
            return self._say(409, {"detail": "not now"})
        self.live.remove(job)
        return self._say(200, {})

    def _say(self, status: int, body: dict[str, object]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_job_that_cannot_be_stopped_keeps_no_other_from_it_and_is_not_called_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, me = Home.of(tmp_path).make(), process.own_id()
    home.token.write_text("t")
    Stubborn.live = ["first", "second"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Stubborn) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        record = {"url": f"http://127.0.0.1:{server.server_port}", "pid": me.pid, "start_time": me.start_time}
        home.service_record.write_text(json.dumps(record | {"boot_id": process.boot_id()}))
        monkeypatch.setattr(daemon, "STOP_JOBS_S", 0.15)
        assert daemon._stop_jobs(home) == ["second"]
        assert Stubborn.live == ["first"]
        server.shutdown()


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Settings, set[str]]]:
    """A home whose service and gateway died, and the jobs on the engine they used."""
    settings, there = load_settings({"home": str(tmp_path)}, environ={}), {"a-1", "b-1"}
    command = command_of(tmp_path, EngineSettings(address="head:6379"))
    dead = process.ProcessId(pid=2**22 + 1, start_time=1.0)
    process.RunFolder(Home.of(tmp_path).make().run).write("gateway", dead, command)

    async def list_jobs(self: GatewayClient, **_: object) -> tuple[JobId, ...]:
        assert self._settings.address == "head:6379"
        if "away" in there:
            raise EngineUnavailable("no answer")
        return tuple(JobId(job) for job in sorted(there))

    async def sweep(self: GatewayClient, job: JobId, *, grace_s: float = 0.0) -> None:
        if job == "kept-1":
            raise EngineUnavailable("it stays")
        there.remove(job)

    async def let_go(self: GatewayClient) -> None:
        assert not there

    monkeypatch.setattr(GatewayClient, "let_go", let_go)
    monkeypatch.setattr(GatewayClient, "list_jobs", list_jobs)
    monkeypatch.setattr(GatewayClient, "sweep", sweep)
    yield settings, there


def test_down_ends_what_jobs_have_on_a_given_engine(given: tuple[Settings, set[str]]) -> None:
    settings, there = given
    assert (daemon.down(settings, force=True)["state"], there) == ("down", set())


@pytest.mark.parametrize(("job", "said"), [("kept-1", "is left of: kept-1"), ("away", "does not tell what runs there")])
def test_down_says_what_is_left_on_a_given_engine(given: tuple[Settings, set[str]], job: str, said: str) -> None:
    settings, there = given
    there.add(job)
    document = daemon.down(settings)
    assert (document["state"], said in document["text"]) == ("stuck", True)
    assert "head:6379" in document["text"]


@pytest.fixture
def ending() -> Iterator[contextlib.ExitStack]:
    """What a test must end, whether it fails or not."""
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_second_down_still_says_what_is_left(
    given: tuple[Settings, set[str]], monkeypatch: pytest.MonkeyPatch, ending: contextlib.ExitStack
) -> None:
    settings, there = given
    run = process.RunFolder(Home.of(settings.home).run)
    sleeps = [sys.executable, "-c", "import time; time.sleep(99)"]
    gateway, stubborn = (subprocess.Popen(sleeps, start_new_session=True) for _ in range(2))
    for one in (gateway, stubborn):
        ending.callback(one.wait)
        ending.callback(one.kill)
    known = {one.pid: process.identify(one.pid) for one in (gateway, stubborn)}
    command = command_of(Path(settings.home), EngineSettings(address="head:6379"))
    for name, one in (("gateway", gateway), ("other", stubborn)):
        run.write(name, process.ProcessId(pid=one.pid, start_time=known[one.pid].start_time), command)
    real = process.stop_tree

    def stop_tree(one: process.ProcessId, **limits: float) -> tuple[process.ProcessId, ...]:
        return (one,) if one.pid == stubborn.pid and "kept-1" in there else real(one, **limits)

    monkeypatch.setattr(process, "stop_tree", stop_tree)
    there.add("kept-1")
    for _ in range(2):
        document = daemon.down(settings, force=True)
        assert (document["state"], document["still_running"]) == ("stuck", [stubborn.pid])
        assert "is left of: kept-1" in document["text"]
    there.remove("kept-1")
    assert (daemon.down(settings, force=True)["state"], stubborn.wait(30), gateway.wait(30)) == ("down", -9, -9)
    assert daemon.down(settings, force=True)["ended"] == []


def test_what_was_left_and_ended_by_itself_leaves_no_record(given: tuple[Settings, set[str]]) -> None:
    settings, _ = given
    run = process.RunFolder(Home.of(settings.home).run)
    run.write("left-7", process.ProcessId(pid=2**22 + 1, start_time=1.0), ())
    assert (daemon.down(settings, force=True)["state"], run.read("left-7")) == ("down", None)


def test_down_tidies_up_after_processes_that_were_killed(tmp_path: Path) -> None:
    settings, home = load_settings({"home": str(tmp_path)}, environ={}), Home.of(tmp_path).make()
    write = "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('PRAGMA journal_mode=WAL')\n"
    write += "c.execute('CREATE TABLE t (n)'); c.execute('INSERT INTO t VALUES (7)'); c.commit(); os._exit(9)"
    subprocess.run([sys.executable, "-c", write, str(home.db)], check=False)
    (home.run / "gateway.sock").touch()
    beside = {"gateway.sock", "rota.db-wal", "rota.db-shm"}
    assert beside <= {one.name for one in tmp_path.rglob("*")}
    assert daemon.down(settings)["state"] == "down"
    assert not beside & {one.name for one in tmp_path.rglob("*")}
    with contextlib.closing(sqlite3.connect(home.db)) as store:
        assert store.execute("SELECT n FROM t").fetchall() == [(7,)]
