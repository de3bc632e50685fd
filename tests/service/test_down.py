"""What ``down`` asks for before it ends the processes: a stop of every job, and the end of all on a given engine."""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from standing import Standing, with_service

from rota.runtime import environ, process
from rota.runtime.environ import Home
from rota.runtime.ray.client import RECORD, GatewayClient, command_of, namespace_of, settings_mark
from rota.runtime.ray.engine import EngineSettings
from rota.service.cli import app
from rota.service.config import Settings, load_settings
from rota.service.process import daemon
from rota.service.rest.deps import AppState
from rota.service.rest.routes import cluster
from rota.service.views.job_history import JobHistory
from rota.spec.errors import EngineUnavailable, NotReachable
from rota.spec.events import Event, GangReleased, JobEnded, JobRequeued, MasterStarted, Reattached
from rota.spec.ids import Epoch, JobId
from rota.spec.reasons import Reason
from rota.spec.states import JobState


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


class Slow(Stubborn):
    """A service that answers a hold only when its last job is back in the queue."""

    queued = threading.Event()
    asked = 0

    def do_GET(self) -> None:
        Slow.asked += 1
        if Slow.asked > 2:
            Slow.queued.set()
        jobs = {"QUEUED": 1} if Slow.queued.is_set() else {"RUNNING": 1}
        self._say(200, {"cluster": {"jobs": jobs}, "parts": {"engine": {"state": "up"}}})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Slow.queued.wait(60)
        with contextlib.suppress(OSError):
            self._say(202, {})


@contextlib.contextmanager
def served(home: Home, by: type[BaseHTTPRequestHandler]) -> Iterator[None]:
    """The home has a service, whose record names this process."""
    me = process.own_id()
    home.token.write_text("t")
    with ThreadingHTTPServer(("127.0.0.1", 0), by) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        record = {"url": f"http://127.0.0.1:{server.server_port}", "pid": me.pid, "start_time": me.start_time}
        home.service_record.write_text(json.dumps(record | {"boot_id": process.boot_id()}))
        yield
        server.shutdown()


def test_down_waits_for_jobs_also_when_asking_them_all_takes_longer_than_an_answer_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home.of(tmp_path).make()
    monkeypatch.setattr(daemon, "REQUEST_TIMEOUT_S", 0.5)
    with served(home, Slow):
        assert daemon._requeue_jobs(home) == {"QUEUED": 1}


class Deaf(Stubborn):
    """A service that gives no list of its jobs."""

    def do_GET(self) -> None:
        self._say(503, {"detail": "the event log is away"})


def test_jobs_that_cannot_be_counted_are_not_cancelled_without_a_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home.of(tmp_path).make()
    monkeypatch.setenv("ROTA_HOME", str(home.root))
    monkeypatch.setattr(daemon, "down", lambda *_, **__: pytest.fail("it went on"))
    with served(home, Deaf):
        assert app.call(["down", "--jobs", "cancel"]) == 1
    assert "the event log is away" in capsys.readouterr().err


def test_a_job_that_cannot_be_stopped_keeps_no_other_from_it_and_is_not_called_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home.of(tmp_path).make()
    Stubborn.live = ["first", "second"]
    with served(home, Stubborn):
        monkeypatch.setattr(daemon, "STOP_JOBS_S", 0.15)
        assert daemon._stop_jobs(home) == ["second"]
        assert Stubborn.live == ["first"]


class Dying(Stubborn):
    """A service that is killed in the middle of an answer."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "23")
        self.end_headers()


def test_an_answer_that_is_cut_off_is_no_answer(tmp_path: Path) -> None:
    home = Home.of(tmp_path).make()
    with served(home, Dying), pytest.raises(NotReachable, match="does not answer: IncompleteRead"):
        daemon.ask(home, "GET", "/readyz")


WATCHER = """
import signal, sys, time
def end(*_):
    open(sys.argv[1], "w").write("ended in order")
    sys.exit()
signal.signal(signal.SIGTERM, end)
open(sys.argv[1], "w").write("runs")
time.sleep(60)
"""
GATEWAY = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"


def test_down_kills_no_watcher_of_the_engine_with_its_gateway(tmp_path: Path) -> None:
    settings = load_settings({"home": str(tmp_path / "home")}, environ={})
    home, said = Home.of(settings.home).make(), tmp_path / "said"
    command = (sys.executable, "-c", GATEWAY, WATCHER, str(said))
    what = process.Spawn(command=command, env={environ.SERVICE: settings.home})
    gateway = process.spawn(what, name=RECORD, run=process.RunFolder(home.run))
    while not said.exists() or not said.read_text():
        time.sleep(0.01)
    assert daemon.down(settings)["state"] == "down"
    gateway.wait()
    assert said.read_text() == "ended in order", "one that is killed with it may first see its part die, and note it"


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


@pytest.mark.parametrize(("job", "said"), [("kept-1", "is left of: kept-1"), ("away", "does not report what runs")])
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
    command = command_of(Path(settings.home), EngineSettings(address="head:6379"))
    for name, one in (("gateway", gateway), ("other", stubborn)):
        which = process.identify(one.pid)
        assert which is not None
        run.write(name, which, command)
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


def test_down_from_a_shell_without_the_stores_of_the_service_keeps_its_gateway(
    given: tuple[Settings, set[str]], monkeypatch: pytest.MonkeyPatch, ending: contextlib.ExitStack
) -> None:
    settings, there = given
    home, engine = Home.of(settings.home), EngineSettings(address="head:6379")
    monkeypatch.setenv(environ.DB_URL, "postgresql://ann@db/rota")
    asked, mark = list[str](), settings_mark(engine, namespace_of(home.root, engine))
    what = process.Spawn(command=(sys.executable, "-c", "import time; time.sleep(99)"), env={})
    gateway = process.spawn(what, name=RECORD)
    ending.callback(gateway.wait)
    ending.callback(gateway.kill)
    which = process.identify(gateway.pid)
    assert which is not None
    process.RunFolder(home.run).write(RECORD, which, command_of(home.root, engine))
    monkeypatch.delenv(environ.DB_URL)

    async def list_jobs(self: GatewayClient, **_: object) -> tuple[JobId, ...]:
        asked.append(self._mark)
        return ()

    monkeypatch.setattr(GatewayClient, "list_jobs", list_jobs)
    there.clear()
    assert daemon.down(settings, force=True)["state"] == "down"
    assert asked == [mark], "a gateway of another mark would be replaced"
    assert not environ.get(environ.DB_URL)


def test_a_standby_that_is_left_over_is_not_called_a_service(tmp_path: Path, ending: contextlib.ExitStack) -> None:
    settings = load_settings({"home": str(tmp_path)}, environ={})
    command = (sys.executable, "-c", "import time; time.sleep(99)", daemon.SERVE_MODULE, "{}", daemon.PRESTARTED)
    standby = process.spawn(process.Spawn(command=command, env={environ.SERVICE: settings.home}), name="service")
    ending.callback(standby.wait)
    ending.callback(standby.kill)
    while not process.marked(f"{environ.SERVICE}={settings.home}"):
        time.sleep(0.01)
    assert daemon.status(settings)["still_running"] == [f"standby (process {standby.pid})"]
    assert daemon.down(settings, force=True)["ended"] == ["standby"]


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


def cordoned(home: Path, jobs: int) -> Settings:
    """A real service without an engine whose only node takes no work, with jobs of two users that wait for it."""
    settings = load_settings({"home": str(home), "port": 0, "pretend": "1x1x4"}, environ={})
    daemon.up(settings)
    where = Home.of(home)
    daemon.ask(where, "POST", "/api/v1/nodes/r0n0:cordon", {})
    daemon.ask(where, "PUT", "/api/v1/users/ann", {"grants": [{"queue": "", "role": "user"}]})
    hers = daemon.ask(where, "POST", "/api/v1/tokens", {"user": "ann"})["token"]
    mine = where.token.read_text()
    for n in range(jobs):
        where.token.write_text(mine if n else hers)
        daemon.ask(where, "POST", "/api/v1/jobs", {"source": "name: w\nroles: {main: {run: [x], replicas: 1}}\n"})
    where.token.write_text(mine)
    return settings


def states(settings: Settings) -> list[str]:
    found = daemon.ask(Home.of(settings.home), "GET", "/api/v1/jobs?all=true")["items"]
    return sorted(row["state"] for row in found if row["state"] != "SUBMITTED")


@pytest.mark.slow
def test_down_leaves_the_jobs_of_all_users_in_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = cordoned(tmp_path / "home", jobs=3)
    monkeypatch.setenv("ROTA_HOME", settings.home)
    try:
        document = daemon.down(settings)
        assert (document["stopped_jobs"], sum(document["left_jobs"].values())) == ([], 3)
        daemon.up(settings)
        assert not {"CANCELLED", "FAILED"} & set(states(settings))
        assert sum(daemon.live_by_user(settings).values()) == 3
    finally:
        daemon.down(settings, force=True)


@pytest.mark.slow
def test_jobs_are_cancelled_only_with_the_flag_and_a_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = cordoned(tmp_path / "home", jobs=3)
    monkeypatch.setenv("ROTA_HOME", settings.home)
    try:
        for flag in ("cancel", "stop"):
            assert app.call(["down", "--jobs", flag]) == 2
            assert "cancel 3 jobs (2 of local, 1 of ann); add --yes" in capsys.readouterr().err
        terminal = io.StringIO("n\n")
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", terminal)
        assert app.call(["down", "--jobs", "cancel"]) == 2
        assert "cancel 3 jobs (2 of local, 1 of ann)? [y/N]" in capsys.readouterr().err
        assert app.call(["down", "--jobs", "cancel", "--force"]) == 2
        assert "leave one of them out" in capsys.readouterr().err
        assert sum(daemon.live_by_user(settings).values()) == 3
        assert app.call(["down", "--jobs", "cancel", "--yes"]) == 0
        assert "cancelled 3 jobs" in capsys.readouterr().out
        daemon.up(settings)
        assert states(settings) == ["CANCELLED"] * 3
    finally:
        daemon.down(settings, force=True)


def test_a_service_that_is_taken_down_starts_nothing_and_requeues_what_runs(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        await service.until("hello-1", JobState.ADMITTED)
        held = (await service.http.post("/api/v1/service:hold", json={"grace_s": 5})).json()
        assert held["jobs"] == {"PREEMPTING": 1}
        await service.submit()
        await service.until("hello-2", JobState.QUEUED)
        asked = [one for one in (await service.get("/jobs/hello-1/events"))["items"] if one["kind"] == "PreemptAsked"]
        assert [(one["reason"], one["grace_s"]) for one in asked] == [("SERVICE_DOWN", 5)]
        gang, first = service.app.loop.installation.find("hello-1").ctx.gangs[0], Epoch(1)
        released = GangReleased(gang=gang.id, epoch=gang.epoch)
        requeued = JobRequeued(attempt=1, reason=Reason.SERVICE_DOWN, counts=False)
        began = (MasterStarted(master_epoch=first, pid=1), Reattached(master_epoch=first))
        await service.seen(service.as_master("hello-1", *began, released, requeued))
        await service.until("hello-1", JobState.QUEUED)
        for _ in range(20):  # rounds of the loop, each of which would admit them
            service.app.loop.decide_from_now()
            service.app.loop._wake.set()
            await service.app.clock.sleep(0.02)
        assert {row["state"] for row in (await service.get("/jobs"))["items"]} == {"QUEUED"}
        assert any("being taken down" in one for one in (await service.get("/status"))["warnings"])
        why = (await service.get("/jobs/hello-1/explain"))["why"]
        assert (why["code"], why["text"]) == ("SERVICE_DOWN", "the service is being taken down")

    async def after(service: Standing) -> None:
        for job in ("hello-1", "hello-2"):
            document = await service.until(job, JobState.ADMITTED)
        assert document["state"] == "ADMITTED"

    with_service(tmp_path, test)
    with_service(tmp_path, after)


def test_a_job_that_ends_while_others_are_asked_to_save_keeps_none_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(service: Standing) -> None:
        for job in ("hello-1", "hello-2"):
            await service.submit()
            await service.until(job, JobState.ADMITTED)
        real = cluster.append_live

        async def append_live(app: AppState, story: JobHistory, event: Event) -> None:
            if story.id == "hello-1":
                end = JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED)
                await service.seen(service.as_master(story.id, end))
            await real(app, story, event)

        monkeypatch.setattr(cluster, "append_live", append_live)
        held = await service.http.post("/api/v1/service:hold", json={})
        assert (held.status_code, held.json()["jobs"]) == (202, {"PREEMPTING": 1})

    with_service(tmp_path, test)


def test_a_hold_ends_with_the_last_one_and_unknown_machines_stay_unknown(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        loop = service.app.loop
        loop.unknown = "the machines are not known"
        loop.hold(0.01)
        while "taken down" in loop.undecided:
            await service.app.clock.sleep(0.01)
        assert loop.undecided == "the machines are not known"
        loop.decide_from_now()
        assert loop.undecided == ""
        loop.hold(0.01)
        loop.hold(600.0)
        await service.app.clock.sleep(0.1)
        assert "taken down" in loop.undecided

    with_service(tmp_path, test)


def test_a_service_that_is_not_taken_down_after_all_starts_jobs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "HOLD_S", 0.3)

    async def test(service: Standing) -> None:
        assert (await service.http.post("/api/v1/service:hold", json={})).status_code == 202
        await service.submit()
        assert (await service.until("hello-1", JobState.ADMITTED))["attempt"] == 1

    with_service(tmp_path, test)


def test_a_cancel_without_a_service_says_how_many_jobs_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def submit(service: Standing) -> None:
        for _ in range(2):
            await service.submit("name: big\nroles: {m: {run: [x], resources: {gpus: 4}}}\n")
        await service.submit()
        await service.until("hello-1", JobState.QUEUED, JobState.ADMITTED)

    with_service(tmp_path, submit, pretend="1x1x4")
    monkeypatch.setenv("ROTA_HOME", str(tmp_path))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert app.call(["down", "--jobs", "cancel", "--yes"]) == 1
    assert "3 jobs left" in out.getvalue() and "no job was cancelled, as no service runs" in err.getvalue()
