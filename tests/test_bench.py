"""The runner of the benchmarks: scripts that fail, hang or skip, and the table at the end."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, cast

import pytest

from rota.runtime.environ import Home
from rota.runtime.event_log.interface import INSTALL_SCOPE, Writer
from rota.runtime.event_log.sql import SqlLog
from rota.spec.events import Committed, JobEnded, PartReplaced
from rota.spec.ids import Epoch, JobId
from rota.spec.reasons import Reason
from rota.spec.states import JobState

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
HEAD = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\nfrom run import Row, hand_in, skip\n"
GOOD = (
    HEAD
    + 'hand_in([Row("a get", 0.5, "us", 2.0, "Ray"), Row("a put", 30.0, "us", 20.0), Row("a start", 27900.4, "s")])'
)


def run(folder: Path, scripts: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Write the scripts, run the runner over them."""
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--folder", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def table(shown: str) -> list[str]:
    """The lines of the table, with single blanks between columns."""
    lines = [re.sub(r" {2,}", " | ", line) for line in shown.splitlines()]
    return lines[lines.index(next(line for line in lines if line.startswith("script |"))) :]


def test_one_table_has_the_rows_of_all_scripts_and_their_ratios(tmp_path: Path) -> None:
    done = run(tmp_path, {"a": GOOD, "b": HEAD + 'hand_in([Row("b", 1.0, "s")])'})
    assert done.returncode == 0, done.stderr
    shown = table(done.stdout)
    assert shown[:5] == [
        "script | claim | ours | peer | ratio",
        "a | a get | 0.5 us | Ray 2 us | 0.25",
        "a | a put | 30 us | limit 20 us | 1.5",
        "a | a start | 27,900 s",
        "b | b | 1 s",
    ]
    assert [line.split(" | ")[::2] for line in shown[6:]] == [["a", "done"], ["b", "done"]]


def test_scripts_that_fail_do_not_stop_the_others_and_the_exit_status_is_1(tmp_path: Path) -> None:
    usage = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--trace', required=True)\np.parse_args()"
    done = run(tmp_path, {"a": usage, "b": "raise RuntimeError('b broke')", "c": GOOD})
    assert done.returncode == 1
    assert "--trace" in done.stderr and "b broke" in done.stderr
    shown = table(done.stdout)
    assert "c | a get | 0.5 us | Ray 2 us | 0.25" in shown
    assert [line.split(" | ")[2] for line in shown[-3:]] == ["failed: exit status 2", "failed: exit status 1", "done"]


@pytest.mark.slow
def test_a_ratio_that_became_worse_by_a_third_fails_and_a_smaller_change_does_not(tmp_path: Path) -> None:
    scripts = {"a": HEAD + 'hand_in([Row("get", 2.0, "us", 1.0, "Ray"), Row("put", 9.0, "us", 1.0, "Ray")])'}
    recorded = tmp_path / "ratios.json"

    def runs(value: dict[str, float | None], *words: str) -> subprocess.CompletedProcess[str]:
        recorded.write_text(json.dumps(value))
        return run(tmp_path, scripts, "--ratios", str(recorded), *words)

    good, worse, gone = runs({"a: get": 1.6}), runs({"a: get": 1.5}), runs({"a: take": 1.0, "b: x": 1.0})
    assert (good.returncode, worse.returncode, gone.returncode) == (0, 1, 1)
    assert table(worse.stdout)[-1] == "slower than recorded: a: get: 2 times its peer, recorded 1.5"
    assert table(gone.stdout)[-1] == "not measured: a: take"
    assert runs({"a: get": None}).returncode == 0
    assert runs({"a: get": 1.0, "a: put": None, "b: x": 3.0}, "--record").returncode == 0
    assert json.loads(recorded.read_text()) == {"a: get": 2.0, "a: put": 9.0, "b: x": 3.0}


def test_a_small_ratio_is_recorded_with_four_digits_so_that_a_third_more_is_seen(tmp_path: Path) -> None:
    recorded = tmp_path / "ratios.json"
    recorded.write_text('{"a: get again": 1.0}')
    row = HEAD + 'hand_in([Row("get again", 0.123456, "us", 100.0, "Ray")])'
    assert run(tmp_path, {"a": row}, "--ratios", str(recorded), "--record").returncode == 0
    assert json.loads(recorded.read_text()) == {"a: get again": 0.001235}
    slow = HEAD + 'hand_in([Row("get again", 0.1611, "us", 100.0, "Ray")])'
    assert run(tmp_path, {"a": slow}, "--ratios", str(recorded)).returncode == 1
    assert run(tmp_path, {"a": slow.replace("0.1611", "0.16")}, "--ratios", str(recorded)).returncode == 0


def test_the_watched_ratios_are_of_a_decision_calls_and_gets() -> None:
    watched = json.loads((BENCHMARKS / "ratios.json").read_text())
    assert {name.partition(":")[0] for name in watched} == {"scheduling", "calls", "tensors"}


def test_a_script_that_has_nothing_to_measure_is_skipped_and_nothing_fails(tmp_path: Path) -> None:
    done = run(tmp_path, {"gpu": HEAD + "skip('CUDA device not found')", "other": GOOD})
    assert done.returncode == 0
    assert table(done.stdout)[-2].endswith("skipped: CUDA device not found")


@pytest.mark.slow
def test_a_script_past_its_limit_ends_with_what_it_started(tmp_path: Path) -> None:
    hangs = f"""
        import subprocess, sys, time
        left = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(2, 1); time.sleep(600)"])
        open({str(tmp_path / "left")!r}, "w").write(str(left.pid))
        try:
            time.sleep(600)
        finally:
            open({str(tmp_path / "cleaned")!r}, "w").close()
    """
    done = run(tmp_path, {"hangs": hangs, "other": GOOD}, "--limit", "3")
    assert done.returncode == 1
    assert table(done.stdout)[-2].endswith("failed: over its limit of 3 s")
    assert (tmp_path / "cleaned").exists()
    with pytest.raises(ProcessLookupError):
        until_gone(int((tmp_path / "left").read_text()))


def until_gone(pid: int) -> None:
    """Wait until the system has no process of this number. Raises ProcessLookupError then."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        os.kill(pid, 0)
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError(pid)
        time.sleep(0.01)


def test_an_interrupt_ends_the_script_and_shows_what_is_there(tmp_path: Path) -> None:
    waits = f"open({str(tmp_path / 'began')!r}, 'w').close()\nimport time; time.sleep(600)"
    for name, text in {"a": GOOD, "b": waits, "c": GOOD}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--folder", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        deadline = time.monotonic() + 30
        while not (tmp_path / "began").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        shown, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    assert [line.split(" | ")[0] for line in table(shown)[-1:]] == ["a"]


def test_a_name_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    done = run(tmp_path, {"a": GOOD}, "b")
    assert done.returncode == 2
    assert "no benchmark is named b; there are a" in done.stderr


@pytest.mark.slow
def test_the_script_of_the_scheduler_measures_everything_without_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    scheduling = importlib.import_module("scheduling")
    monkeypatch.setattr(scheduling, "GENERATED", 60)
    monkeypatch.setitem(scheduling.WITHOUT_COMMAND, "decide", ("--devices", "128", "--queued", "20", "--rounds", "5"))
    monkeypatch.setenv("ROTA_BENCH_RESULT", str(tmp_path / "result.json"))
    scheduling.main([])
    assert set(json.loads(capsys.readouterr().out)["result"]) == {"decide", "sim", "guarantee"}
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["ours"] > 0 for row in rows] == [*[True] * 5, False]  # none starts later than in a private cluster
    with pytest.raises(SystemExit) as refused:
        scheduling.main(["sim", "--trace", "jobs.csv"])
    assert refused.value.code == 2 and "--vcs" in capsys.readouterr().err


def test_chaos_and_ettr_see_every_record_of_a_job_that_has_more_than_one_read_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setitem(cast("dict[str, Any]", SqlLog.read.__kwdefaults__), "limit", 100)
    chaos, ettr = importlib.import_module("chaos"), importlib.import_module("ettr")
    home = Home.of(tmp_path).make()
    log = SqlLog(home.db_url, migrate=True)
    writer = Writer(scope=INSTALL_SCOPE, epoch=log.take_epoch(INSTALL_SCOPE))
    commits = [Committed(n=n, loop_epoch=Epoch(1)) for n in range(1, 150)]
    log.append(commits, writer=writer, job=JobId("chaos-1"))
    log.append([PartReplaced(part="raylet", pid=1, found_at=1.0)], writer=writer)

    class Submitted(chaos.Site):
        def _submit(self) -> str:
            return "chaos-1"

    site = Submitted(home, random.Random(0))
    assert site.committed() == 149
    log.append([Committed(n=150, loop_epoch=Epoch(1))], writer=writer, job=JobId("chaos-1"))
    assert site.committed() == 150
    log.append([JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED)], writer=writer, job=JobId("chaos-1"))
    assert ettr.ended_at(chaos.Records(log, JobId("chaos-1")), 0.0) is not None
    assert isinstance(chaos.Records(log).now()[149].event, PartReplaced)
    site.log.close()
    log.close()


@pytest.mark.slow
def test_without_a_cuda_device_the_script_of_devices_says_so_and_ends_well() -> None:
    command = [sys.executable, str(BENCHMARKS / "tensors_gpu.py")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout)["skipped"].startswith("CUDA device not found")


@pytest.mark.slow
def test_on_a_pretended_device_the_script_of_devices_shares_reads_kills_readers_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    words = ["--device", "fakecuda:0", "--mib", "4", "--publishes", "20", "--kills", "2", "--rounds", "2"]
    environment = os.environ | {"ROTA_BENCH_RESULT": str(tmp_path / "result.json")}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "tensors_gpu.py"), *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert checks["20 publishes and 2 killed readers leave 0 bytes"] == {"value": 0, "met": True}
    assert checks["the last publish is read whole"]["met"]
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["named"] for row in rows] == ["device copy", "torch", "limit", "limit"]


@pytest.mark.slow
def test_the_script_of_training_on_a_gpu_runs_on_the_cpu_with_every_kind_and_its_predictions(tmp_path: Path) -> None:
    sizes = ["--layers", "2", "--hidden", "64", "--seq", "16", "--vocab", "32", "--micro-batch", "1", "--rounds", "1"]
    words = ["--device", "cpu", *sizes, "--hardware", "h200-141g", "cpu-local"]
    environment = os.environ | {"ROTA_BENCH_RESULT": str(tmp_path / "result.json"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "training_gpu.py"), *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kinds = json.loads(done.stdout)["kinds"]
    assert len(kinds) == 7
    assert all(one["step_ms"] > 0 and one["predicted_gib"] > 0 for one in kinds)
    assert kinds[0]["torch"]["loss"] == pytest.approx(kinds[0]["loss"], abs=1e-4)
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["named"] for row in rows].count(
        "h200-141g"
    ) == 7  # a description without a host says nothing of offload
    assert [row["named"] for row in rows].count("cpu-local") == 5


def test_what_a_job_leaves_behind_is_waited_for_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that fails is a finding: nothing may be overlooked because it could not be listed."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    chaos = importlib.import_module("chaos")
    answers = iter([["actor a", "actor b"], ["actor a"], []])
    assert chaos.gone_within(lambda: next(answers)) == []
    monkeypatch.setattr(chaos, "LEFT_MAX_S", 0.0)
    assert chaos.gone_within(lambda: ["actor a"]) == ["actor a"]
    words = [sys.executable, "-c", "import sys; print('[]'); sys.exit(len(sys.argv) - 1)"]
    assert chaos.listed(words, dict(os.environ), json.loads) == []
    assert len(chaos.listed([*words, "more"], dict(os.environ), json.loads)) == 1


def test_chaos_hands_in_findings_leaks_and_the_slowest_return_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    chaos = importlib.import_module("chaos")
    found = {
        "wrong": ["actor a is left"],
        "left": {"processes": 0, "in the engine": 1, "tensors": 0},
        "goodput": 0.75,
        "faults": [{}, {}],
        "back_s": {"master SIGKILL": {"job_max_s": 7.5}},
    }
    assert [(row.claim, row.ours) for row in chaos.rows(found)] == [
        ("findings under faults", 1),
        ("left behind by the job", 1),
        ("time lost to 2 faults", 25.0),
        ("the job commits again after master SIGKILL, at most", 7.5),
    ]
    assert [row.ours for row in chaos.rows({"wrong": ["it never ran"]})] == [1, 0]
