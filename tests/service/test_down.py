"""What ``down`` asks for before it ends the processes: a stop of every job, and the end of all on a given engine."""

from __future__ import annotations

import json
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
