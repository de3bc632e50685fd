"""rota sim on small traces: documents, tables, exit statuses."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import rota as package
from rota.service import plans
from rota.service.cli import app

TRACE = "job_id,submit_s,duration_s,gpus,vc\na,0,100,8,x\nb,10,100,8,x\nc,20,50,8,y\n"
VCS = "vc,nodes\nx,1\ny,1\n"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs.csv").write_text(TRACE)
    (tmp_path / "vcs.csv").write_text(VCS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_HOME", str(tmp_path / "home"))


def rota(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = app.call(list(words))
    return status, out.getvalue(), err.getvalue()


GIVEN = ("--trace", "jobs.csv", "--vcs", "vcs.csv")


def test_two_jobs_of_one_node_run_one_after_the_other(tmp_path: Path) -> None:
    status, out, _ = rota("sim", "run", *GIVEN, "--profile", "private", "--out-jobs", "out.csv", "--json")
    document: dict[str, Any] = json.loads(out)
    assert (status, document["kind"], document["summary"]["jobs"]) == (0, "SimRun", 3)
    starts = {job["job_id"]: job["first_start_s"] for job in document["jobs"]}
    assert starts == {"a": 0.0, "b": 100.0, "c": 20.0}
    assert (tmp_path / "out.csv").read_text().count("\n") == 4
    status, out, _ = rota("sim", "run", *GIVEN, "--profile", "private")
    assert status == 0
    assert "3 of 3 finished" in out and "1m30s" in out


@pytest.mark.slow
def test_work_that_would_be_lent_devices_and_jobs_of_unknown_tenants_are_said_as_what_they_are(tmp_path: Path) -> None:
    rows = "job_id,submit_s,duration_s,gpus,vc,priority\na,0,100,8,x,50\nd,0,100,8,y,-1\nu,0,100,8,unknown,50\n"
    (tmp_path / "jobs.csv").write_text(rows)
    status, out, _ = rota("sim", "run", *GIVEN, "--profile", "private")
    assert status == 0 and "1 job of tenants that the file of tenants lacks" in out
    assert (
        "never started: d of y: GUARANTEE_FULL_NO_BORROW: Work of a priority below 0 runs on devices that are lent"
        in out
    )
    status, out, _ = rota("sim", "compare", *GIVEN, "--profiles", "private,pool")
    assert status == 0 and "left out: 1 job of tenants that the file of tenants lacks: " in out
    status, _, err = rota("sim", "run", "--log", GIVEN[1])
    assert status == 2 and f"a log is rota.db or JSON\n      a trace: --trace {GIVEN[1]} --vcs TENANTS.csv" in err
    Path("not.db").write_text("a, b")
    status, _, err = rota("sim", "run", "--log", "not.db")
    assert status == 2 and "not.db: not a log" in err


@pytest.mark.slow
def test_a_job_that_can_never_start_is_named_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text(TRACE + "z,0,1,640,x\n")
    status, out, _ = rota("sim", "run", *GIVEN, "--profile", "fifo")
    assert status == 0
    assert out.rstrip().splitlines()[-1].startswith("never started: z of x: TOO_LARGE: the whole gang asks 640 GPUs")
    status, out, _ = rota("sim", "compare", *GIVEN, "--profiles", "fifo,pool")
    assert status == 0
    assert [line.partition(":")[0] for line in out.splitlines() if ": z of x: " in line] == [
        "never started under fifo",
        "never started under pool",
    ]
    err = rota("sim", "compare", "--trace", "none.csv", *GIVEN[2:], "--profiles", "fifo")[2]
    assert "none.csv: cannot be read: No such file or directory\n" in err


@pytest.mark.slow
def test_profiles_are_compared_with_the_first() -> None:
    status, out, _ = rota("sim", "compare", *GIVEN, "--profiles", "private,pool", "--json")
    document = json.loads(out)
    assert (status, document["kind"], document["baseline"]) == (0, "SimCompare", "private")
    assert {name: one["vs_baseline"]["later_jobs"] for name, one in document["profiles"].items()} == {
        "private": 0,
        "pool": 0,
    }
    assert re.search(
        r"private \(baseline\) +\d+ of \d+ ", rota("sim", "compare", *GIVEN, "--profiles", "private,pool")[1]
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", *GIVEN, "--profile", "fifoo"), "did you mean 'fifo'"),
        (("run", *GIVEN, "--scale", "0"), "--scale 0: above 0"),
        (("compare", *GIVEN, "--profiles", ","), "--profiles names none"),
        (("run", "--trace", "vcs.csv", "--vcs", "vcs.csv"), "vcs.csv"),
        (("cases", "jobs.csv"), "cannot be read as JSON"),
        (("cases", "nope.json"), "nope.json: no such file"),
        (("run",), "--trace"),
    ],
)
def test_a_mistake_exits_with_2_and_names_what_is_wrong(words: tuple[str, ...], said: str) -> None:
    status, _, err = rota("sim", *words)
    assert (status, said in err, "Traceback" in err) == (2, True, False)


def test_failing_cases_exit_with_1(tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text(
        json.dumps(
            {
                "physical_cluster": {"cellTypes": {}, "physicalCells": []},
                "virtual_clusters": {},
                "gangs": {},
                "pods": {},
                "cases": [{"id": "one", "title": "t", "config_overrides": {}, "steps": [{"op": "nonsense"}]}],
            }
        )
    )
    status, out, _ = rota("sim", "cases", "cases.json", "--json")
    document = json.loads(out)
    assert (status, document["kind"], document["failed"]) == (1, "SimCases", 1)
    assert "unsupported" in document["cases"][0]["why"]


CASE = {"id": "one", "kind": "gang", "given": {"gpus": 4, "jobs": {"a": {"tasks": 8}}}, "expect": {"waiting": ["a"]}}


def test_cases_without_the_proof_folder_exit_with_2_and_name_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "CHECKOUT", tmp_path)
    status, out, _ = rota("sim", "cases", "cases.json", "--json")
    document = json.loads(out)
    assert (status, document["kind"], document["code"]) == (2, "Error", "MISSING_EXTRA")
    assert f"are not part of an installed package: {tmp_path} has no folder tests/proof" in document["message"]
    assert "clone the repository" in document["hint"]


@pytest.mark.slow
@pytest.mark.parametrize("checkout", [True, False])
def test_cases_run_from_any_folder_of_a_checkout_and_not_from_an_installed_package(
    tmp_path: Path, checkout: bool
) -> None:
    """An installed package is a copy of the folder that the wheel has, without the tests beside it."""
    assert package.__file__ is not None
    source = Path(package.__file__).parent
    if not checkout:
        hidden = shutil.ignore_patterns("__pycache__", "ui")
        source = shutil.copytree(source, tmp_path / "site-packages" / "rota", ignore=hidden)
    (tmp_path / "cases.json").write_text(json.dumps({"cases": [CASE]}))
    done = subprocess.run(
        [sys.executable, "-m", "rota", "sim", "cases", "cases.json", "--json"],
        env={**os.environ, "PYTHONPATH": str(source.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if checkout:
        assert (done.returncode, json.loads(done.stdout)["passed"]) == (0, 1), done.stderr
    else:
        assert done.returncode == 2, done.stderr
        assert f"{tmp_path} has no folder tests/proof" in json.loads(done.stdout)["message"]
