"""The command line: exit statuses, mistakes in one line, exactly one JSON document, tables for people."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from standing import HELLO, Standing, listening, with_service
from tests.makers import format_line

from rota.job.inspect import import_target
from rota.runtime.clock import iso
from rota.service.accounts import Caller
from rota.service.cli import app, completion
from rota.service.cli.completion import flags_of
from rota.service.cli.output import Terminal
from rota.service.jobfile.reader import read_job
from rota.service.rest.auth import Auth, AuthRequest
from rota.service.views.installation import Installation
from rota.spec.errors import BadInput
from rota.spec.events import (
    FailoverStarted,
    GangReleased,
    InstanceLost,
    JobEnded,
    JobRequeued,
    MasterStarted,
    PreemptAsked,
    Reattached,
)
from rota.spec.ids import Epoch, JobId, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import JobState, Level

GOLDEN = Path(__file__).with_name("golden_kinds.json")
NO_SERVICE = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Done:
    """What a command left: exit status, stdout, stderr."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.out)


def rota(*words: str) -> Done:
    """One command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = app.call(list(words))
    return Done(status, out.getvalue(), err.getvalue())


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ROTA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ROTA_SERVER", raising=False)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


Test = Callable[[Standing, Callable[..., Any]], Any]


def with_cli(home: Path, test: Test) -> None:
    """Run a test with ``ask(*words)``: a command against a service that listens on a port."""

    async def opened(service: Standing) -> None:
        async with listening(service) as http:
            server = ["--server", str(http.base_url).rstrip("/"), "--token", http.headers["authorization"].split()[1]]
            await test(service, lambda *words: asyncio.to_thread(rota, *server, *words))

    with_service(home, opened)


async def reached(service: Standing, job: str, state: JobState) -> None:
    async with asyncio.timeout(60):
        while (await service.get(f"/jobs/{job}"))["state"] != state:
            await asyncio.sleep(0.02)


@pytest.mark.slow
def test_a_command_runs_beside_an_instance_with_its_own_status_and_stands_in_the_audit(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        assert (await ask("exec", "nope", "main", "--", "true")).status == 125
        await service.submit()
        await service.until("hello-1", JobState.ADMITTED)
        await service.until_asked("hello-1")
        done = await ask("exec", "hello-1", "main/0", "--", "sh", "-c", "echo said; echo wrong >&2; exit 7")
        assert (done.status, done.out, done.err) == (7, "said\n", "wrong\n")
        told = json.loads(
            (await ask("exec", "hello-1", "main", "--json", "--", "head", "-c", "90000", "/dev/zero")).out
        )
        assert (told["kind"], told["exit_status"], told["cut"], len(told["stdout"])) == ("Exec", 0, True, 80_000)
        missing = await ask("exec", "hello-1", "main/0", "--", "no-such-command")
        assert missing.status == 127 and "no-such-command" in missing.err
        late = await ask("exec", "hello-1", "main", "-t", "1s", "--", "sh", "-c", "echo begun; sleep 60 & wait")
        assert (late.status, late.out) == (125, "begun\n") and "killed after 1s" in late.err
        assert "no role 'x'" in (await ask("exec", "hello-1", "x/0", "--", "true")).err
        newest = service.app.audit.newest(3)[-1]
        assert (newest["instance"], newest["command"], newest["status"]) == ("main/0", "no-such-command", 200)
        service.engine.alive.clear()
        assert "does not run" in (await ask("exec", "hello-1", "main", "--", "true")).err

    with_cli(tmp_path, test)


# -- without a service ------------------------------------------------------------------------------------------------


PLAN = ("plan", "search", "--model", "m", "--gpus", "8", "--batch", "4")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["sumbit"], 2, "unknown verb 'sumbit'\n      use: rota run FILE"),
        (["exlpain", "x"], 2, "unknown verb 'exlpain'\n      did you mean 'explain'?"),
        (["ps", "--al"], 2, "Unknown option: --al. Did you mean --all?"),
        (["sim", "rn"], 2, 'Unknown command "rn". Did you mean "run"?'),
        (["ps", "-o", "xml"], 2, "-o xml: not a form"),
        (["ps", "--since", "7"], 2, "'7' is not a duration with a unit; write 7s or 7m"),
        (["ps", "--sort", "x"], 2, "--sort x: unknown"),
        (["show"], 2, "show needs a JOB"),
        (["run"], 2, "missing job file or command\n      rota run job.yaml, or rota run -- python train.py"),
        (["run", "none.yaml"], 2, "none.yaml: no such file"),
        (["run", "train.py"], 2, "train.py is not a job file\n      rota run -- python train.py"),
        (["run", "."], 2, ". is a folder"),
        (["run", "j.yaml", "--", "x"], 2, "give a job file or a command after '--', not both"),
        (["run", "-e", "novalue", "--", "x"], 2, "-e novalue: not K=V"),
        (["--server", NO_SERVICE, "run", "-w", "--timeout", "5", "--", "x"], 2, "'5' is not a duration with a unit"),
        (["--server", NO_SERVICE, "run", "--timeout", "5s", "--", "x"], 2, "--timeout 5s is how long to wait"),
        (["stop"], 2, "missing JOB"),
        (["scale", "j", "w"], 2, "scale w: missing N\n      rota scale JOB ROLE N, or ROLE=N"),
        (["set", "j", "priority=high"], 2, "priority=high: a whole number from -1 to 100"),
        (["set", "j", "grace=10"], 2, "write 10s or 10m"),
        (["set", "j", "prioriy=8"], 2, "did you mean 'priority'"),
        (["set", "j", "grace_s=8"], 2, "did you mean 'grace'"),
        (["nodes", "remove", "n1"], 2, "rota nodes remove n1: not understood"),
        (["init", "pppo"], 2, "no template 'pppo'\n      did you mean 'ppo'?"),
        (["completion", "show", "csh"], 2, "no completion for the shell 'csh'"),
        (["up", "--pretend", "3x4"], 2, "pretend=3x4 (from flag) is not a cluster: '3x4' is not RACKSxNODESxDEVICES"),
        (["sim", "run", "--trace", "x.csv", "--vcs", "y.csv"], 2, "y.csv: cannot be read"),
        (["sim", "cases", "x.json"], 2, "x.json: no such file"),
        (["logs", "j", "--tail", "-3"], 2, "--tail -3: below 0"),
        (["scale", "j", "w", "0"], 2, "scale w=0: at least 1"),
        (["--server", "foo", "ps"], 2, "server=foo (from flag) is not an address\n      write http://HOST:PORT"),
        (["run", "--set", "roles.mian.replicas=3", "--check", "--", "x"], 2, "did you mean 'main'?"),
        (["tensors", "stat", "x"], 2, "no tensor is named 'x': no tensor registry runs here"),
        (["--server", NO_SERVICE, "ps"], 3, f"answers at {NO_SERVICE} (connection refused)\n      start"),
        (["--server", NO_SERVICE, "run", "--", "true"], 3, f"no Rota service answers at {NO_SERVICE}"),
        (["status"], 3, "no Rota service runs for"),
        (["run", "-t", "10", "--check", "--", "true"], 2, "-t 10: time_limit: '10' is not a duration with a unit"),
        (["run", "-n", "x", "--set", "priority=900", "--check", "--", "true"], 2, "--set #1:1:10: priority: expected"),
        ([*PLAN, "--memory", "40GiB"], 2, "m: No such file"),
        ([*PLAN, "--memory", "40Gi"], 2, "--memory 40Gi: '40Gi' is not a size with a unit; write 40GiB"),
        (["run", "-t", "10min", "--check", "--", "true"], 2, "'10min' is not a duration with a unit; write 10m"),
        (["run", "--workdir", "none", "--", "true"], 2, "--workdir none: no such folder"),
        (["run", "sh"], 2, "sh is a program, not a job file\n      rota run -- sh"),
        (["run", "--memory", "2Gi", "--check", "--", "true"], 2, "write 2GiB"),
        (["run", "--memory", "2G", "--check", "--", "true"], 2, "--memory 2G: roles.main.resources.memory: '2G'"),
        (["restore", "none.tgz"], 2, "none.tgz: no such file\n      rota backup FILE makes one"),
        (["run", "--set", "replicas=3", "--check", "--", "true"], 2, "did you mean 'roles.NAME.replicas'?"),
        (["run", "--set", "depends_on=[a]", "--check", "--", "true"], 2, "did you mean 'after'?"),
        (["up", "--port", "99999"], 2, "port=99999 (from flag) is not between 0 and 65535"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_the_next_step(words: list[str], status: int, said: str) -> None:
    done = rota(*words)
    assert (done.status, "Traceback" in done.err) == (status, False)
    assert said in done.err


@pytest.mark.parametrize(
    "words", [["--json", "sumbit"], ["ps", "--json", "--server", NO_SERVICE], ["ps", "-o", "json", "--x"]]
)
def test_a_mistake_with_json_is_one_document_too(words: list[str]) -> None:
    done = rota(*words)
    assert done.document["kind"] == "Error"
    assert done.document["exit"] == done.status
    assert done.document["hint"]


def test_every_mistake_of_a_job_file_has_its_place_and_a_caret(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: t\nroles:\n  a: {runn: hi, replicas: -1}\nretyr: 1\n")
    done = rota("run", "job.yaml", "--check")
    assert done.status == 2
    assert done.err.splitlines() == [
        "job.yaml:3:7: roles.a.runn: unknown field; did you mean 'run'?",
        "      a: {runn: hi, replicas: -1}",
        "          ^",
        "job.yaml:3:27: roles.a.replicas: expected a whole number from 1 to 100000, got '-1'",
        "      a: {runn: hi, replicas: -1}",
        "                              ^",
        "job.yaml:4:1: retyr: unknown field; did you mean 'retry'?",
        "    retyr: 1",
        "    ^",
    ]
    errors = rota("run", "job.yaml", "--check", "--json").document["errors"]
    assert [(error["line"], error["col"], error["code"]) for error in errors] == [
        (3, 7, "UNKNOWN_FIELD"),
        (3, 27, "OUT_OF_RANGE"),
        (4, 1, "UNKNOWN_FIELD"),
    ]


def test_check_and_short_flags_read_the_file_as_changed(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(HELLO)
    done = rota("run", "job.yaml", "--check", "-n", "other", "--set", "roles.main.replicas=3", "-e", "A=1", "--json")
    assert (done.status, done.document["name"], done.document["instances"]) == (0, "other", 3)


def test_dry_run_without_a_service_plans_on_this_machine_or_a_pretend_one(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(HELLO)
    done = rota("run", "job.yaml", "--dry-run", "--pretend", "1x2x4", "--json")
    report = done.document
    assert (done.status, report["kind"], report["starts_now"]) == (0, "PlanReport", True)
    assert report["placement"]["gangs"][0]["bundles"][0]["devices"] == [0, 1]
    assert report["roles"][0]["blast_radius"]["text"].startswith("losing main/0 restarts main/0")
    refused = rota("run", "job.yaml", "--dry-run", "--pretend", "1x2x1")
    assert refused.status == 4
    assert "would fit with gpus 1 instead of 2" in refused.err


def test_graph_of_a_file_needs_no_service(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(HELLO)
    assert rota("graph", "job.yaml", "--json").document["roles"][0]["name"] == "main"
    assert '"main" [label="main x1"];' in rota("graph", "job.yaml", "--format", "dot").out


def test_templates_are_valid_jobs_and_are_not_written_over(tmp_path: Path) -> None:
    names = [item["name"] for item in rota("init", "--list", "--json").document["items"]]
    assert names == ["ddp", "multimodal", "notebook", "online", "ppo", "sft", "torchrun"]
    for name in names:
        made = rota("init", name, "--json")
        assert made.status == 0 and all(Path(item).is_file() for item in made.document["items"])
        assert read_job((tmp_path / name / "job.yaml").read_text(), filename=name).roles
        script = next(Path(item) for item in made.document["items"] if item.endswith(".py"))
        compile(script.read_text(), str(script), "exec")
    (tmp_path / "ddp" / "train.py").write_text("mine")
    assert rota("init", "ddp").status == 2
    assert (tmp_path / "ddp" / "train.py").read_text() == "mine"
    assert (again := rota("init", "ddp", "--force")).status == 0 and again.err.startswith("check it: rota run ddp/")


def test_doctor_finds_open_modes_and_mends_them(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    (home / "token").write_text("rota_x")
    (home / "token").chmod(0o644)
    done = rota("doctor", "--json")
    marks = {item["name"]: item["mark"] for item in done.document["items"]}
    assert (done.status, marks["token"], marks["home"], marks["python"]) == (1, "fail", "warn", "ok")
    mended = rota("doctor", "--fix", "--json")
    assert mended.status == 0
    assert len(mended.document["fixed"]) == 2
    assert (home / "token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_goes_in_and_out_and_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    path = Path(rota("completion", "install", shell, "--json").document["file"])
    assert "rota completion words" in path.read_text()
    rota("completion", "uninstall", shell)
    assert not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("alias x=y")
    rota("completion", "install", shell)
    rota("completion", "install", shell)
    assert path.read_text().count("rota completion words") == 1
    rota("completion", "uninstall", shell)
    assert path.read_text().rstrip("\n") == "alias x=y"


def test_what_is_misspelt_is_told_with_what_was_meant_and_a_short_list_that_it_is_one() -> None:
    with pytest.raises(BadInput, match="has no 'JobStat'") as misspelt:
        import_target("rota.spec.states:JobStat")
    assert misspelt.value.hint == "did you mean 'JobState'?"
    jobs: Any = {f"j-{n}": SimpleNamespace(id=f"j-{n}", ended=None) for n in range(6)}
    with pytest.raises(BadInput, match=r"fits 6 jobs: j-0, j-1, j-2, j-3, j-4, \.\.\. "):
        Installation(jobs=jobs).find("j-")


def test_completion_offers_verbs_flags_and_templates() -> None:
    assert rota("completion", "words", "--", "expl").out.split() == ["explain"]
    assert {"--after", "--samples"} <= {*rota("completion", "words", "--", "run", "--").out.split()}
    assert rota("completion", "words", "--", "plan", "s").out.split() == ["search", "show"]
    assert "ppo" in rota("completion", "words", "--", "init", "").out.split()


def test_every_verb_takes_json() -> None:
    assert [verb for verb in app.VERBS if "--json" not in flags_of(app.verb_function(verb))] == []


@pytest.mark.parametrize("verb", list(app.VERBS))
def test_every_help_page_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.call([*verb.split(), "--help"]) == 0
    page = capsys.readouterr().out
    assert "Examples:" in page
    assert f"rota {verb}" in page.partition("Examples:")[2]


# -- with a service ---------------------------------------------------------------------------------------------------


def test_a_job_from_run_to_its_failure_as_people_and_programs_see_it(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(HELLO)

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        done = await ask("run", "job.yaml")
        assert (done.status, done.out) == (0, "hello-1\n")
        assert "hello-1 submitted" in done.err
        assert [job["id"] for job in (await ask("ps", "--json")).document["items"]] == ["hello-1"]
        assert "hello-1" in (await ask("ps")).out
        await reached(service, "hello-1", JobState.ADMITTED)
        assert "placed on  r0n0" in (await ask("explain", "hello")).out
        role, epoch = RoleName("main"), Epoch(1)
        lost = InstanceLost(role=role, rank=0, epoch=epoch, reason=Reason.USER_ERROR, text="boom", traceback="Tb: boom")
        ended = JobEnded(
            state=JobState.FAILED, reason=Reason.USER_ERROR, text="boom", role=role, rank=0, traceback="Tb: boom"
        )
        given_up = FailoverStarted(
            failover=1, level=Level.JOB, scope=(), restore=0, reason=lost.reason, role=role, rank=0, text="boom"
        )
        await service.play_start("hello-1", "main/0")
        await service.seen(service.as_master("hello-1", lost, given_up, ended))
        shown = await ask("show", "hello-1")
        assert "FAILED" in shown.out and "Tb: boom" in shown.out
        assert re.search(rf"output +{tmp_path}/service/jobs/hello-1/output", shown.out), shown.out
        failed = (await ask("failures", "hello-1")).out
        assert re.search(r"main/0 +USER_ERROR[ -]+the job ended", failed), "the last one is in the table too"
        assert "first: main/0 USER_ERROR: boom" in failed and "end: main/0 USER_ERROR: boom" in failed
        assert failed.count("Tb: boom") == 1
        assert (await ask("ps")).out.startswith("no jobs")
        assert "hello-1" in (await ask("ps", "-a")).out
        assert (await ask("stop", "hello-1")).status == 2

    with_cli(tmp_path / "service", test)


def test_waiting_gives_up_with_5_and_a_failed_job_with_1(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        done = await ask("run", "-w", "--timeout", "300ms", "-n", "slow", "--", "sleep", "9")
        assert (done.status, "it keeps running" in done.err) == (5, True)
        waiting = asyncio.create_task(ask("run", "-w", "-n", "bad", "--", "false"))
        await reached_when_there(service, "bad-1")
        failed = JobEnded(
            state=JobState.FAILED, reason=Reason.EXIT_NONZERO, text="exit 1", role=RoleName("main"), rank=0
        )
        service.as_master("bad-1", failed)
        done = await asyncio.wait_for(waiting, 60)
        assert done.status == 1
        assert "bad-1 FAILED" in done.err and "first failure: main/0 EXIT_NONZERO: exit 1" in done.err

    with_cli(tmp_path / "service", test)


async def reached_when_there(service: Standing, job: str) -> None:
    async with asyncio.timeout(60):
        while not any(row["id"] == job for row in (await service.get("/jobs", all=True))["items"]):
            await asyncio.sleep(0.02)
    await reached(service, job, JobState.ADMITTED)


def test_too_large_a_request_names_the_nearest_one_and_exits_with_4(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(HELLO)

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        done = await ask("run", "job.yaml", "--gpus", "999")
        assert done.status == 4
        assert "gpus 4 instead of 999" in done.err
        assert (await ask("ps", "-a", "--json")).document["items"] == []
        wrong = await ask("run", "job.yaml", "-q", "nowhere", "--json")
        assert (wrong.status, wrong.document["code"]) == (2, "UNKNOWN_QUEUE")

    with_cli(tmp_path / "service", test)


@pytest.mark.parametrize("name", ["NO_COLOR", "TERM"])
def test_colour_is_for_terminals_that_want_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rota.service.cli.output import terminal_for

    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Tty())
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal_for(form="table", quiet=False, no_color=False).colour
    assert not terminal_for(form="table", quiet=False, no_color=True).colour
    monkeypatch.setenv(name, "dumb")
    assert not terminal_for(form="table", quiet=False, no_color=False).colour


@pytest.mark.parametrize("width", [80, 200])
def test_a_table_fills_the_terminal_it_is_drawn_on_and_cuts_nothing(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = " ".join(f"word{number:03}" for number in range(40))
    out = io.StringIO()
    Terminal(live=True, out=out).draw(("ID", "WHY"), [("learn-1", text)])
    lines = out.getvalue().splitlines()
    assert width - 8 <= max(map(len, lines)) <= width
    assert " ".join(out.getvalue().split()[-40:]) == text


def test_completion_offers_the_names_of_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "ANSWER_S", 20.0)

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await service.submit()
        assert (await ask("completion", "words", "--", "show", "he")).out.split() == ["hello-1"]
        assert (await ask("completion", "words", "--", "nodes", "drain", "r0")).out.split() == ["r0n0", "r0n1"]

    with_cli(tmp_path / "service", test)


def test_an_unwritable_home_is_told_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_HOME", "/proc/nowhere")
    done = rota("up")
    assert (done.status, "Traceback" in done.err, "rota doctor" in done.err) == (2, False, True)
    found = {item["name"]: item for item in rota("doctor", "--json").document["items"]}
    assert found["home"]["mark"] == "fail" and "ROTA_HOME" in found["home"]["remedy"]


def test_a_bug_is_told_in_one_line_and_keeps_its_story(monkeypatch: pytest.MonkeyPatch) -> None:
    from rota.service.cli.verbs import jobs

    monkeypatch.setattr(jobs, "ago_s", lambda text: 1 / 0)
    done = rota("ps", "--since", "1h")
    assert (done.status, "Traceback" in done.err) == (1, False)
    story = Path(done.err.partition("traceback: ")[2].strip())
    assert "ZeroDivisionError" in story.read_text()
    story.unlink()


def test_a_preempted_job_says_for_whom_and_waits_from_then(tmp_path: Path) -> None:
    small = HELLO.replace("hello", "small").replace("gpus: 2", "gpus: 4") + "    replicas: 2\n"

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await service.submit(small)
        await service.until("small-1", JobState.ADMITTED)
        first = Epoch(1)
        service.as_master("small-1", MasterStarted(master_epoch=first, pid=1))
        await service.seen(service.as_master("small-1", Reattached(master_epoch=first)))
        story = service.app.loop.installation.jobs[JobId("small-1")]
        rows = service.app.loop.scheduler.state.jobs
        queued_at = rows[story.id].ask.queued_at
        asked = PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, for_job="hello-1")
        await service.app.loop.append([asked], job=story.id, expected_seq=story.seq)
        assert "PREEMPTED_PRIORITY, makes room for hello-1" in (await ask("ps")).out
        assert "It made room for hello-1." in (await ask("explain", "small-1")).out
        assert (await ask("nodes", "cordon", "r0n1")).status == 0  # so that it has no room again
        gang = story.ctx.gangs[0]
        service.as_master("small-1", GangReleased(gang=gang.id, epoch=gang.epoch))
        gone = JobRequeued(attempt=1, reason=Reason.PREEMPTED_PRIORITY, counts=False)
        await service.seen(service.as_master("small-1", gone))
        small_line = next(line for line in (await ask("ps")).out.splitlines() if line.startswith("small-1"))
        assert "QUEUED" in small_line and small_line.endswith(" preempted for hello-1")
        assert (rows[story.id].ask.queued_at, rows[story.id].phase) == (queued_at, "queued"), "its place in the queue"
        told = (await ask("explain", "small-1")).out
        assert "placed on" not in told and "(preempted for hello-1)" in told and "attempt ended (attempt 1)" in told
        shown = (await ask("show", "small-1", "--json")).document
        where = [(one["node"], one["devices"]) for one in shown["instances"]]
        assert (shown["nodes"], where) == ([], [("", []), ("", [])]), "it holds nothing"
        assert (await ask("show", "small-1", "--json")).document["attempts"][0]["for_job"] == "hello-1"
        text = (await service.http.get("/metrics")).text
        oldest = float(text.partition('rota_oldest_pending_seconds{queue="default"} ')[2].partition("\n")[0])
        assert 0 < oldest <= service.app.clock.wall_s() - story.since
        assert (await service.get("/queues"))["items"][0]["oldest_wait_since"] == iso(story.since)
        asked_before = service.engine.asked.count(story.id)
        assert (await ask("stop", "small-1", "--yes")).status == 0
        await reached(service, "small-1", JobState.CANCELLED)
        assert service.engine.asked.count(story.id) == asked_before, "no new master only to end it"

    with_cli(tmp_path / "service", test)


def test_times_are_local_with_their_zone_for_people_and_iso_with_zone_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        at_s = service.app.clock.wall_s()
        local = f"{(datetime.fromtimestamp(at_s, UTC) + timedelta(hours=9)):%H:%M:%S} +09"
        await service.submit()
        folder = service.app.home.job("hello-1").logs
        folder.mkdir(exist_ok=True)
        (folder / "main-0.log").write_text(format_line(at_s, 1, 1, "out", "said"))
        assert (await ask("logs", "hello-1", "--timestamps")).out == f"{local} main/0 | said\n"
        for words in (["show", "hello-1"], ["explain", "hello-1"], ["events", "hello-1"]):
            assert re.search(r"\b\d\d:\d\d:\d\d \+09\b", (await ask(*words)).out), words
        document = (await ask("show", "hello-1", "--json")).document
        assert abs(datetime.fromisoformat(document["submitted_at"]).timestamp() - at_s) < 20
        assert document["submitted_at"].endswith("Z")

    try:
        monkeypatch.setenv("TZ", "<+09>-9")
        time.tzset()
        with_cli(tmp_path / "service", test)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_home_without_a_service_says_whose_the_one_at_its_port_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_check = Auth.check

    async def test(service: Standing) -> None:
        async with listening(service) as http:
            monkeypatch.setenv("ROTA_PORT", str(http.base_url.port))
            (tmp_path / "home").mkdir()
            (tmp_path / "home" / "token").write_text("kept to itself")
            shown = list[str | None]()

            def check(auth: Auth, asked: AuthRequest) -> Caller:
                shown.append(asked.headers.get("authorization"))
                return known_check(auth, asked)

            monkeypatch.setattr(Auth, "check", check)
            done = await asyncio.to_thread(rota, "ps")
            assert shown == [None]
            said = f"no service of {tmp_path / 'home'} runs; the one at {http.base_url} is of another home"
            assert (done.status, said in done.err, "rota up --port 0" in done.err) == (3, True, True)
            found = {one["name"]: one for one in rota("doctor", "--json").document["items"]}
            assert f"is taken by process {os.getpid()} (" in found["port"]["fact"]

    with_service(tmp_path / "other", test)


def test_queues_and_nodes_change_only_as_told(tmp_path: Path) -> None:
    (tmp_path / "queues.yaml").write_text("[{path: default},{path: prod, guaranteed: {gpus: 2},user_limit: {gpus: 1}}]")
    (tmp_path / "lower.yaml").write_text("[{path: default},{path: both},{path: cores, limit: {gpus: 1}}]")
    (tmp_path / "cores.yaml").write_text(
        "- {path: cores, limit: {cpus: 8, memory: 1.5GiB}, user_limit: {cpus: 2}}\n"
        "- {path: both, guaranteed: {gpus: 2, cpus: 1}}\n- {path: default}\n"
    )
    (tmp_path / "bad.yaml").write_text("queues:\n- {pth: a}\n")
    (tmp_path / "wrong.yaml").write_text(
        "- {path: default}\n- {path: a, guaranteed: {gpus: 8}}\n- {path: a/b,   guaranteed: {gpus: 9}}\n- {path: a}\n"
        "- {path: c, limit:        {gpus: 1, gpu_type: PRETEN}}\n- {path: d, guaranteed:   {gpus: 8}}\n- {path: e/f}\n"
    )

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        assert (await ask("queues", "apply", "queues.yaml", "--dry-run", "--json")).document["added"] == ["prod"]
        assert [one["path"] for one in (await ask("queues", "--json")).document["items"]] == ["default"]
        assert (await ask("queues", "apply", "queues.yaml")).status == 0
        shown = (await ask("queues", "--json")).document["items"]
        assert [(one["guaranteed_gpus"], bool(one["user_limit"])) for one in shown] == [(None, False), (2.0, True)]
        bad = await ask("queues", "apply", "bad.yaml")
        assert (bad.status, "bad.yaml:2:4: [0].pth: unknown field" in bad.err.replace("queues[0]", "[0]")) == (2, True)
        wrong = await ask("queues", "apply", "wrong.yaml")
        assert wrong.status == 2
        for told in (
            "wrong.yaml:3:29: queues[2].guaranteed: with 'a/b' 9 GPUs are promised, 'a' is promised 8",
            "wrong.yaml:4:10: queues[3].path: 'a' is there twice; the first is number 2",
            "wrong.yaml:5:27: queues[4].limit: no node has devices of type 'PRETEN'; did you mean 'PRETEND'?",
            "wrong.yaml:6:27: queues[5].guaranteed: with 'd' 16 GPUs are promised, the cluster has 8",
            "wrong.yaml:7:10: queues[6].path: 'e/f' has no parent 'e'; list the parent too",
        ):
            assert told in wrong.err
        assert [one["guaranteed_gpus"] for one in (await ask("queues", "--json")).document["items"]] == [None, 2.0]
        assert (await ask("queues", "apply", "cores.yaml")).status == 0
        table = re.sub(" +", " ", (await ask("queues")).out)
        rows = "both open 0 0 2, 1 CPU - - 0|cores open 0 0 - 8 CPUs, 1.5GiB 2 CPUs 0|default open 0 0 - - - 0"
        for row in rows.split("|"):
            assert row in table
        (tmp_path / "job.yaml").write_text(HELLO)
        assert (await ask("run", "job.yaml", "-q", "cores", "-d")).status == 0
        await service.until("hello-1", JobState.ADMITTED)
        assert re.search(r" 1 CPU used, limit 8 CPUs\n", (await ask("explain", "hello-1")).out)
        assert "cores uses 2 GPUs, above a limit of 1 GPU" in (await ask("queues", "apply", "lower.yaml")).out
        assert (await ask("nodes", "drain", "r0n1", "--reason", "new driver")).status == 0
        found = [(one["id"], one["state"], one["text"]) for one in (await ask("nodes", "--json")).document["items"]]
        assert found == [("r0n0", "healthy", ""), ("r0n1", "drained", "new driver")]

    with_cli(tmp_path / "service", test)


def paths(value: Any, prefix: str = "") -> set[str]:
    """Every key path of a document; the items of a list share one."""
    if isinstance(value, dict):
        return {prefix or "."} | {path for key, item in value.items() for path in paths(item, f"{prefix}.{key}")}
    if isinstance(value, list):
        return {prefix} | {path for item in value[:5] for path in paths(item, f"{prefix}[]")}
    return {prefix}


@pytest.mark.slow
def test_documents_keep_the_fields_that_programs_rely_on(tmp_path: Path) -> None:
    """Fields may be added; one that is gone or renamed breaks somebody's program. The golden file has them all."""
    (tmp_path / "job.yaml").write_text(HELLO)
    found: dict[str, list[str]] = {}

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await ask("run", "job.yaml", "-d")
        await reached(service, "hello-1", JobState.ADMITTED)
        for words in (
            ["ps"], ["show", "hello-1"], ["explain", "hello-1"], ["failures", "hello-1"], ["why", "hello-1"],
            ["graph", "hello-1"], ["events", "hello-1"], ["logs", "hello-1"], ["nodes"], ["queues"], ["status"],
            ["run", "job.yaml", "--dry-run"], ["run", "job.yaml", "--check"], ["show", "hello-1", "--spec"],
            ["stop", "hello-1"], ["doctor"], ["init", "--list"], ["status", "--settings"], ["show", "none"],
            ["nodes", "drain", "r0n1", "--dry-run"], ["tensors", "ls"],
        ):  # fmt: skip
            done = await ask(*words, "--json")
            document = done.document
            assert document["api"] == "rota/v1", words
            assert done.out.count('"api"') == 1
            found[document["kind"]] = sorted(paths(document))

    with_cli(tmp_path / "service", test)
    if not GOLDEN.exists():
        GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    golden: dict[str, list[str]] = json.loads(GOLDEN.read_text())
    for kind, fields in golden.items():
        assert set(fields) <= set(found[kind]), f"{kind} lost {sorted(set(fields) - set(found[kind]))}"


# -- as a process -----------------------------------------------------------------------------------------------------


def process(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rota", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.slow
def test_a_pipe_gets_no_colour_and_both_ways_to_start_agree() -> None:
    done = process("ps", "--server", NO_SERVICE, FORCE_COLOR="", TERM="xterm-256color")
    assert (done.returncode, done.stdout) == (3, "")
    assert "\x1b" not in done.stderr
    done = process("init", "--list")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout and "ppo" in done.stdout


def test_users_tokens_and_secrets_by_command_and_a_login_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        assert (await ask("user", "create", "ann", "--queue", "default", "--json")).document["name"] == "ann"
        made = (await ask("token", "create", "--user", "ann", "--ttl", "1h", "--json")).document
        assert made["token"].startswith("rota_") and made["expires_at"]
        url = str(service.http.base_url)
        async with listening(service) as http:
            url = str(http.base_url).rstrip("/")
            monkeypatch.setattr("sys.stdin", io.StringIO(made["token"] + "\n"))
            assert "user of default" in (await asyncio.to_thread(rota, "login", url)).out
            kept = tmp_path / "home" / "login.json"
            assert oct(kept.stat().st_mode & 0o777) == "0o600"
            assert (await asyncio.to_thread(rota, "user", "--json")).document["name"] == "ann"
            assert (await asyncio.to_thread(rota, "token")).out.strip() == made["token"]
            monkeypatch.setattr("sys.stdin", io.StringIO("s3cret-value\n"))
            assert (await asyncio.to_thread(rota, "secret", "set", "API_KEY")).out == "API_KEY: set\n"
            assert (await asyncio.to_thread(rota, "secret", "--json")).document["items"] == [{"name": "API_KEY"}]
            assert service.app.vault.open("ann", ["API_KEY"]) == {"API_KEY": "s3cret-value"}
            more = await asyncio.to_thread(rota, "token", "create", "--role", "admin")
            assert "it gives user of default: no token" in more.err, more.err
            refused = await asyncio.to_thread(rota, "user", "ls")
            assert refused.status == 2 and "this needs the role admin" in refused.err
            assert (await asyncio.to_thread(rota, "logout")).out == f"logged out of {url}\n"
            assert not kept.exists()
        rows = (await ask("audit", "--user", "ann", "--json")).document["items"]
        asked = [(one["method"], one["path"]) for one in reversed(rows)]
        assert asked == [("PUT", "/api/v1/secrets/API_KEY"), ("POST", "/api/v1/tokens")]
        listed = next(line for line in (await ask("token", "ls")).out.splitlines() if made["id"] in line)
        assert "user of default" in listed
        assert (await ask("token", "rm", made["id"], "--json")).document["revoked"]
        assert (await ask("user", "create", "ann", "--queue", "default", "--role", "none", "--json")).status == 0
        assert "ann" not in (await ask("user", "ls")).out

    with_cli(tmp_path / "served", test)


@pytest.mark.slow
def test_logs_of_nothing_say_why_and_events_without_a_job_are_those_of_everything(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await service.submit(HELLO.replace("gpus: 2", "gpus: 4, cpus: 1"))
        await reached(service, "hello-1", JobState.ADMITTED)
        assert (
            "hello-1 is ADMITTED and has written nothing yet; rota logs -f hello-1"
            in (await ask("logs", "hello-1")).err
        )
        await service.submit(HELLO.replace("hello", "later").replace("gpus: 2", "gpus: 4"))
        await service.submit(HELLO.replace("hello", "last"))
        await reached(service, "last-1", JobState.QUEUED)
        assert "last-1 is QUEUED and has not started: rota explain last-1" in (await ask("logs", "last-1")).err
        await ask("stop", "last-1", "--yes")
        await reached(service, "last-1", JobState.CANCELLED)
        assert "last-1 CANCELLED without output: stopped by local" in (await ask("logs", "last-1")).err
        assert (await ask("logs", "last-1")).out == ""
        everything = (await ask("events", "--json")).document
        kinds = [one["kind"] for one in everything["items"]]
        assert {"ServiceStarted", "NodeJoined", "JobSubmitted", "JobEnded"} <= set(kinds)
        lines = (await ask("events", "--type", "JobEnded")).out.splitlines()
        assert len(lines) == 1 and lines[0].startswith("last-1 ")
        for words in (["events", "--type", "Comitted"], ["events", "hello-1", "-f", "--type", "Comitted"]):
            unknown = await ask(*words)
            assert (unknown.status, "did you mean 'Committed'?" in unknown.err) == (2, True)
        unknown = await ask("logs", "trainer/0")
        assert "no job 'trainer'; the job comes first\n      rota logs JOB trainer/0" in unknown.err
        joint = await ask("logs", "hello-1/main/0")
        assert (joint.status, "has written nothing yet" in joint.err) == (0, True)
        absent = await ask("logs", "hello-1", "--attempt", "9")
        assert (absent.status, "no attempt 9\n      attempts: 1 to 1" in absent.err) == (2, True)
        of_one = await ask("logs", "hello-1", "--attempt", "1", "--tail", "5")
        assert (of_one.status, "has written nothing yet" in of_one.err) == (0, True)

    with_cli(tmp_path / "served", test)


def test_up_refuses_what_the_service_that_runs_was_not_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds the service is replaced; what it says of its settings is its own."""
    monkeypatch.setattr("rota.service.process.daemon.up", lambda _: {"started": False, "state": "up", "kind": "Status"})

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        running = service.app.settings
        same = await ask("up", "--profile", running.profile, "--port", str(running.port))
        assert same.status == 0, same.err
        other = await ask("up", "--policy", "drf")
        assert (other.status, "profile=drf is not applied\n      rota down, then" in other.err) == (2, True)
        assert "port=9999 is not applied" in (await ask("up", "--port", "9999")).err

    with_cli(tmp_path / "served", test)


def test_the_settings_are_those_of_the_service_and_hide_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        hidden = "postgresql://rota:s3cret-word@db/rota"
        service.app.settings = replace(service.app.settings, db_url=hidden)
        done = await ask("status", "--settings")
        assert "s3cret-word" not in done.out and "postgresql://rota:***@db/rota" in done.out
        rows = {one["name"]: one["value"] for one in (await ask("status", "--settings", "--json")).document["items"]}
        assert (rows["pretend"], rows["home"]) == ("1x2x4", str(tmp_path / "served"))

    with_cli(tmp_path / "served", test)
    monkeypatch.setenv("ROTA_PORT", NO_SERVICE.rpartition(":")[2])
    alone = rota("status", "--settings")
    assert alone.status == 0 and "no service answers; it would start with these" in alone.err


def test_a_report_adds_up_what_jobs_held(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await service.submit()
        await reached(service, "hello-1", JobState.ADMITTED)
        story = service.app.loop.installation.jobs[JobId("hello-1")]
        story.attempts[0].admitted_at -= 3600 * 5
        [row] = (await ask("report", "--by", "queue", "--since", "3h", "--json")).document["items"]
        assert (row["queue"], row["jobs"], round(row["gpu_hours"], 2)) == ("default", 1, 6.0)
        [row] = (await ask("report", "--by", "gpu_type", "--json")).document["items"]
        assert row["gpu_type"] == "PRETEND" and round(row["gpu_hours"], 2) == 10.0
        lines = (await ask("report", "--csv")).out.splitlines()
        assert lines[0].startswith("user,jobs,succeeded") and lines[1].startswith("local,1,0,0,0,10.0")
        assert (await ask("report", "--by", "moon")).status == 2

    with_cli(tmp_path / "served", test)


def test_a_lone_dash_is_the_job_file_that_comes_by_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["run", "--check", "-"], ["run", "-", "--check"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("name: x\nroles:\n  main: {run: echo hi, resources: {cpus: 1}}\n"))
        done = rota(*words)
        assert (done.status, done.out.partition(" is valid")[0]) == (0, "stdin: x"), done.err
