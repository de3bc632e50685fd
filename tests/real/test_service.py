"""The real service: started, asked, killed with -9 in every part, adopted, and ended without a trace."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rota.runtime import process
from rota.runtime.environ import Home
from rota.runtime.secrets import Vault
from rota.service.config import Settings, load_settings
from rota.service.process import daemon
from rota.spec.errors import NotReachable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 180.0
DONE = ("SUCCEEDED", "FAILED", "CANCELLED")
COUNTER = """
import pathlib, time
n = 0
while not pathlib.Path({flag!r}).exists():
    print(f"tick {{n}}", flush=True)
    n += 1
    time.sleep(0.05)
print("seen the flag", flush=True)
"""


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def made_settings(home: Path, **flags: Any) -> Settings:
    return load_settings({"home": str(home), "port": free_port(), "pretend": "1x2x4", **flags}, environ={})


def of_home(home: Path) -> list[str]:
    """Command lines of every living process that names the home in its command, folder or environment."""
    mark, found = str(home).encode(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + b"\0" + (entry / "environ").read_bytes()
        except OSError:
            continue
        if mark in text and process.identify(int(entry.name)) is not None:
            found.append(text.split(b"\0\0")[0].replace(b"\0", b" ")[:200].decode(errors="replace"))
    return found


def command(pid: int) -> bytes:
    """Its command line; nothing of a process that has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


class Installation:
    """One home with its service, asked through the REST door."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.home = settings, Home.of(settings.home)

    def up(self) -> dict[str, Any]:
        return daemon.up(self.settings)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return daemon.ask(self.home, "GET" if body is None else "POST", f"/api/v1{path}", body)

    def submit_counter(self, name: str, replicas: int = 2, **more: Any) -> str:
        """A job that counts until its flag exists."""
        flag = self.home.root / f"{name}.flag"
        code = COUNTER.format(flag=str(flag))
        spec = {"name": name, "roles": {"main": {"run": [sys.executable, "-c", code], "replicas": replicas}}} | more
        return str(self.ask("/jobs", {"source": json.dumps(spec), "filename": "job.json"})["id"])

    def finish(self, job: str) -> None:
        (self.home.root / f"{job.rpartition('-')[0]}.flag").touch()

    def wait(self, job: str, wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        until = time.monotonic() + LIMIT_S
        document: dict[str, Any] = {}
        while time.monotonic() < until:
            document = self.ask(f"/jobs/{job}")
            if wanted(document):
                return document
            assert document["state"] not in ("FAILED", "CANCELLED"), document["error"]
            time.sleep(0.1)
        raise AssertionError(f"{job}: not {what} within {LIMIT_S} s, but {document}")

    def running(self, job: str) -> dict[str, Any]:
        return self.wait(job, lambda one: one["state"] == "RUNNING", "running")

    def ended(self, job: str) -> dict[str, Any]:
        return self.wait(job, lambda one: one["state"] in DONE, "ended")

    def kill(self, pid: int) -> None:
        identity = process.identify(pid)
        assert identity is not None
        os.kill(pid, signal.SIGKILL)
        process.wait_gone([identity], 60)

    def events(self, job: str) -> list[str]:
        return [event["kind"] for event in self.ask(f"/jobs/{job}/events")["items"]]

    def idle(self) -> set[int]:
        """Processes of the engine that wait for an actor."""
        raylet = self.ask("/status")["parts"]["engine"]["raylet_pid"]
        found = process.children_of(raylet)
        return {pid for pid in found if command(pid).startswith(b"ray::IDLE")}


@pytest.fixture(scope="module")
def site() -> Iterator[Installation]:
    home = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    installation = Installation(made_settings(home))
    installation.up()
    try:
        yield installation
    finally:
        document = daemon.down(installation.settings, force=True)
        left = of_home(home)
        shutil.rmtree(home, ignore_errors=True)
        assert document["state"] == "down"
        assert left == []


def test_a_master_and_an_instance_take_processes_that_were_started_ahead(site: Installation) -> None:
    site.finish(first := site.submit_counter("ahead"))
    site.ended(first)
    until = time.monotonic() + LIMIT_S
    while len(ahead := site.idle()) < 2:
        assert time.monotonic() < until, f"only {ahead} wait"
        time.sleep(0.1)
    job = site.submit_counter("taken", replicas=1)
    shown = site.running(job)
    site.finish(job)
    site.ended(job)
    assert {shown["master"]["pid"], shown["instances"][0]["pid"]} <= ahead


def test_a_job_runs_to_its_end_and_is_shown_with_pids_lines_and_attempt(site: Installation) -> None:
    job = site.submit_counter("plain")
    shown = site.running(job)
    pids = [one["pid"] for one in shown["instances"]]
    assert all(process.identify(pid) is not None for pid in [*pids, shown["master"]["pid"]])
    beating = site.wait(job, lambda one: all(i["progress"] for i in one["instances"]), "heard of by its master")
    assert all(one["progress"]["idle_s"] < LIMIT_S for one in beating["instances"])
    assert job in [row["id"] for row in site.ask("/jobs")["items"]]
    site.finish(job)
    ended = site.ended(job)
    assert (ended["state"], ended["reason"], ended["attempts"][0]["reason"]) == ("SUCCEEDED", "COMPLETED", "COMPLETED")
    lines = site.ask(f"/jobs/{job}/logs?tail=2")["items"]
    assert {(line["instance"], line["text"]) for line in lines} == {
        ("main/0", "seen the flag"),
        ("main/1", "seen the flag"),
    }
    assert site.ask("/status")["parts"]["engine"]["state"] == "running"
    assert process.wait_gone([p for pid in pids if (p := process.identify(pid))], 10) == ()


def test_a_service_killed_under_a_running_job_is_replaced_and_nothing_is_lost(site: Installation) -> None:
    job = site.submit_counter("served")
    before = site.running(job)
    engine = site.ask("/status")["parts"]["engine"]["raylet_pid"]
    history = site.events(job)
    site.kill(site.up()["pid"])
    again = site.up()
    assert again["started"] is True
    after = site.ask(f"/jobs/{job}")
    assert after["state"] == "RUNNING"
    assert [one["pid"] for one in after["instances"]] == [one["pid"] for one in before["instances"]]
    assert after["submitted_at"] == before["submitted_at"]
    assert site.events(job)[: len(history)] == history
    site.finish(job)
    assert site.ended(job)["state"] == "SUCCEEDED"
    assert site.ask(f"/jobs/{job}/failures")["items"] == []
    assert site.ask("/status")["parts"]["engine"]["raylet_pid"] == engine


def test_a_killed_instance_is_healed_and_a_command_beside_it_has_its_environment(site: Installation) -> None:
    value = "correct-horse-battery"
    Vault(site.home).put("local", "API_KEY", value)
    job = site.submit_counter("healed", secrets=["API_KEY"], env={"FLAVOUR": "plum"})
    victim = site.running(job)["instances"][1]
    asked = ["sh", "-c", "echo $ROTA_JOB $ROTA_INSTANCE $FLAVOUR key=$API_KEY $PPID; sleep 300 & exit 3"]
    done = site.ask(f"/jobs/{job}:exec", {"instance": "main/1", "argv": asked})
    said = f"{job} main/1 plum key=****** {victim['pid']}\n"
    assert (done["stdout"], done["exit_status"]) == (said, 3), done
    assert value not in json.dumps(done)
    site.kill(victim["pid"])
    healed = site.wait(job, lambda one: one["restarts"] == 1 and one["state"] == "RUNNING", "healed")
    assert healed["instances"][1]["pid"] != victim["pid"]
    failures = site.ask(f"/jobs/{job}/failures")
    assert [item["instance"] for item in failures["items"]] == ["main/1"]
    assert (failures["items"][0]["reason"], failures["first"]["signal"]) == ("SIGNALLED", 9)
    assert 0 < failures["items"][0]["seconds"] < 30
    site.finish(job)
    assert site.ended(job)["state"] == "SUCCEEDED"


def test_a_killed_gateway_comes_back_and_stalls_no_job(site: Installation) -> None:
    job = site.submit_counter("gated")
    before = site.running(job)
    gateway = site.ask("/status")["parts"]["gateway"]["pid"]
    site.kill(gateway)
    until = time.monotonic() + LIMIT_S
    while (part := site.ask("/status")["parts"]["gateway"]).get("pid") in (None, gateway):
        assert time.monotonic() < until, part
        time.sleep(0.05)
    site.finish(job)
    ended = site.ended(job)
    assert ended["state"] == "SUCCEEDED"
    assert [one["pid"] for one in ended["instances"]] == [one["pid"] for one in before["instances"]]
    assert site.ask(f"/jobs/{job}/failures")["items"] == []


def test_a_killed_master_is_replaced_under_a_new_epoch_and_leaves_instances_alone(site: Installation) -> None:
    job = site.submit_counter("mastered")
    before = site.running(job)
    site.kill(before["master"]["pid"])
    after = site.wait(job, lambda one: one["master"]["epoch"] > before["master"]["epoch"], "under a new master")
    assert [one["pid"] for one in after["instances"]] == [one["pid"] for one in before["instances"]]
    site.finish(job)
    assert site.ended(job)["state"] == "SUCCEEDED"
    assert site.ask(f"/jobs/{job}/failures")["items"] == []


def test_a_running_job_that_is_stopped_ends_cancelled_and_its_processes_are_gone(site: Installation) -> None:
    job = site.submit_counter("stopped")
    alive = [p for one in site.running(job)["instances"] if (p := process.identify(one["pid"]))]
    site.ask(f"/jobs/{job}:stop", {"grace_s": 2})
    ended = site.wait(job, lambda one: one["state"] == "CANCELLED", "cancelled")
    assert ended["reason"] == "STOPPED_BY_USER"
    assert process.wait_gone(alive, 60) == ()


def test_service_gateway_and_engine_killed_at_once_the_job_still_ends(site: Installation) -> None:
    job = site.submit_counter("stormed")
    site.running(job)
    status = site.up()
    parts = status["parts"]
    for pid in (status["pid"], parts["gateway"]["pid"], parts["engine"]["gcs_pid"], parts["engine"]["raylet_pid"]):
        site.kill(pid)
    site.up()
    again = site.wait(job, lambda one: one["attempt"] == 2 and one["state"] == "RUNNING", "running again")
    assert again["attempts"][0]["reason"] == "ENGINE_LOST"
    site.finish(job)
    assert site.ended(job)["state"] == "SUCCEEDED"
    assert site.events(job).count("MasterStarted") == 2


def test_up_again_is_the_same_service_and_a_taken_port_is_named(site: Installation) -> None:
    first, second = site.up(), site.up()
    assert (first["pid"], second["started"]) == (second["pid"], False)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as other:
        taken = (
            rf"port {site.settings.port} .* is taken by the Rota service of {site.home.root} \(process {first['pid']}\)"
        )
        with pytest.raises(NotReachable, match=taken) as refused:
            daemon.up(made_settings(Path(other), port=site.settings.port))
        assert "rota up --port" in refused.value.hint
        assert of_home(Path(other)) == []


def test_down_ends_service_gateway_and_engine_and_stops_its_jobs() -> None:
    home = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    site = Installation(made_settings(home))
    try:
        site.up()
        job = site.submit_counter("last", replicas=1)
        site.running(job)
        stranger = subprocess.Popen(["sleep", "60"])
        document = daemon.down(site.settings, jobs="cancel")
        assert (document["state"], document["still_running"], document["left_jobs"]) == ("down", [], {})
        assert {"service", "gateway", "engine"} <= set(document["ended"]) and document["stopped_jobs"] == [job]
        assert of_home(home) == []
        assert stranger.poll() is None
        stranger.kill()
        stranger.wait()
        assert daemon.status(site.settings)["state"] == "down"
        with pytest.raises(NotReachable):
            site.ask("/jobs")
        site.up()
        assert site.ask(f"/jobs/{job}")["state"] == "CANCELLED"
    finally:
        daemon.down(site.settings, force=True)
        shutil.rmtree(home, ignore_errors=True)


def test_jobs_continue_after_down_and_up_each_where_it_was() -> None:
    """One runs and has committed, one waits for its devices: both are there again, and nothing ran in between."""
    home = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    site = Installation(made_settings(home, pretend="1x1x4"))
    try:
        site.up()
        runs = site.submit_counter("runs", replicas=1, time_limit="1h")
        site.running(runs)
        big = {"name": "waits", "roles": {"main": {"run": ["true"], "resources": {"gpus": 4, "cpus": 1}}}}
        holder = {"name": "holds", "roles": {"main": {"run": ["sleep", "600"], "resources": {"gpus": 4, "cpus": 1}}}}
        held = str(site.ask("/jobs", {"source": json.dumps(holder), "filename": "job.json"})["id"])
        site.running(held)
        waits = str(site.ask("/jobs", {"source": json.dumps(big), "filename": "job.json"})["id"])
        site.wait(waits, lambda one: one["state"] == "QUEUED", "queued")
        document = daemon.down(site.settings)
        assert (document["state"], document["stopped_jobs"], document["left_jobs"]) == ("down", [], {"QUEUED": 3})
        assert of_home(home) == []
        site.up()
        for job in (runs, held):
            again = site.wait(job, lambda one: one["attempt"] == 2 and one["state"] == "RUNNING", "running again")
            assert again["attempts"][0]["reason"] == "SERVICE_DOWN"
            assert "InstanceLost" not in site.events(job), "it was asked to end, and no retry was used"
        assert site.ask(f"/jobs/{waits}")["state"] == "QUEUED"
        site.finish(runs)
        assert site.ended(runs)["state"] == "SUCCEEDED"
    finally:
        daemon.down(site.settings, force=True)
        shutil.rmtree(home, ignore_errors=True)


WITHOUT_RAY = """
import sys
sys.modules["ray"] = sys.modules["torch"] = sys.modules["redis"] = None
from rota.service.process.serve import main
status = main(sys.argv[1:])
assert not [name for name in sys.modules if name.split(".")[0] in ("ray", "torch") and sys.modules[name]]
sys.exit(status)
"""


def test_the_service_runs_where_ray_and_torch_cannot_be_imported() -> None:
    import json

    home = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    site = Installation(made_settings(home))
    flags = {"home": str(home), "port": site.settings.port, "pretend": "1x2x4"}
    child = subprocess.Popen([sys.executable, "-c", WITHOUT_RAY, json.dumps(flags)])
    try:
        until = time.monotonic() + LIMIT_S
        while daemon.find_service(site.home) is None:
            assert child.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        assert site.up()["pid"] == child.pid
        job = site.submit_counter("unborn")
        site.wait(job, lambda one: one["reason"] == "ENGINE_STARTING", "told to wait for the engine")
        assert "not installed" in site.ask(f"/jobs/{job}")["text"]
        assert site.ask("/status")["parts"]["engine"]["state"] == "off"
        assert site.ask(f"/jobs/{job}/explain")["placement"]["nodes"] == ["r0n0"]
        child.terminate()
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.wait()
        daemon.down(site.settings, force=True)
        shutil.rmtree(home, ignore_errors=True)
