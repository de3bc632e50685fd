"""What people read: tables that fit their lines, results, waits, failures and plans."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from rota.service.cli.app import call
from rota.service.cli.flags import Flags
from rota.service.cli.output import Table, Terminal
from rota.service.cli.verbs import inspect, plan, run
from rota.service.cli.verbs.formatting import clock_time
from rota.service.cli.verbs.logs import event_text
from rota.service.client import Client
from rota.service.process import daemon

ENDED = {"id": "hello-1", "state": "SUCCEEDED", "text": "all roles ended", "run_s": 2.0, "output": "/out"}
WAIT = {"source": "loop/0", "target": "actor/0", "kind": "call", "what": "step", "age_s": 3.0}


def printed(draw: Callable[[Terminal], None], **given: Any) -> tuple[str, str]:
    """Stdout and stderr of what ``draw`` prints."""
    out, err = io.StringIO(), io.StringIO()
    draw(Terminal(out=out, err=err, **given))
    return out.getvalue(), err.getvalue()


def test_a_table_leaves_extra_columns_out_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(columns={"A": "a", "B": "b", "C": "c"}, extra=("C", "B"), sparse=("C",))
    row = {"a": "x" * 20, "b": "y" * 20, "c": "z" * 20}
    for width, names in ((80, ["A", "B", "C"]), (50, ["A", "C"]), (30, ["A"])):
        monkeypatch.setattr("rota.service.cli.output.WIDTH_PIPE", width)
        out, _ = printed(lambda term: table.print(term, [row]))
        assert out.splitlines()[0].split() == names and "x" * 20 in out
    out, _ = printed(lambda term: table.print(term, [row | {"c": ""}]), wide=True)
    assert out.splitlines()[0].split() == ["A", "B"], "a sparse column without values"


def test_a_table_on_80_columns_splits_no_header_and_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    job = {"id": "grpo-sums-large-run-1234", "state": "RECOVERING", "why": "Needs 16 GPUs; 3 are free", "node": "r2n3"}
    columns = {"INSTANCE": "id", "STATE": "state", "NOT READY": "node", "LOST COMMITS": "node", "WHY": "why"}
    text, _ = printed(lambda term: Table(columns=columns).print(term, [job]), live=True)
    head, _, *rows = text.splitlines()
    assert all(name in head for name in columns) and "grpo-sums-large-run-1234" in rows[0]
    assert len(rows) > 1 and max(map(len, rows)) <= 80, "the text is folded between its words"
    long = job | {"id": "x" * 39, "node": "y" * 38}
    text, _ = printed(lambda term: Table(columns=columns).print(term, [long]), live=True)
    assert "x" * 39 in text and "y" * 38 in text, "ids are whole, and the lines longer than the terminal"


def test_a_quiet_run_that_waits_prints_how_the_job_ended() -> None:
    shown = cast("Any", ENDED)
    out, err = printed(lambda term: run.show_end(cast("Client", None), term, shown), quiet=True)
    assert (out, err) == ("hello-1 SUCCEEDED\n", "")
    out, err = printed(lambda term: run.show_end(cast("Client", None), term, shown))
    assert (out, err.splitlines()[0]) == ("", "hello-1 SUCCEEDED after 2.0s: all roles ended")


def test_each_wait_is_listed_once_with_its_greatest_age() -> None:
    doc = {"culprits": [], "suspects": [], "slow": [], "dropped": [], "items": [], "stacks": {}, "see": "x"}
    doc["vertices"] = [{"name": "master", "state": "RECOVERING", "doing": "not ready yet: actor/0"}]
    waits = [WAIT, WAIT | {"age_s": 75.0}, WAIT | {"what": "other"}]
    out, _ = printed(lambda term: inspect._waits(term, doc | {"waits": waits}))
    rows = [line.split() for line in out.splitlines() if line.startswith("loop/0")]
    assert rows == [["loop/0", "actor/0", "call", "step", "1m15s"], ["loop/0", "actor/0", "call", "other", "3.0s"]]
    assert out.startswith("master: not ready yet: actor/0\n")


def test_a_job_whose_code_cannot_be_imported_is_not_said_to_have_no_failures() -> None:
    end = {"instance": "", "reason": "IMPORT_ERROR", "text": "no module named x", "traceback": ""}
    doc = {"job": "bad-1", "state": "FAILED", "first": None, "end": end, "items": [], "open_losses": []}
    out, _ = printed(lambda term: inspect._failures(term, doc))
    assert out.splitlines() == [
        "bad-1: FAILED, no instance failed",
        "",
        "end: IMPORT_ERROR: no module named x",
    ]
    out, _ = printed(lambda term: inspect._failures(term, doc | {"state": "RUNNING", "end": None}))
    assert out == "bad-1: no failures\n"


def test_a_share_that_rounding_leaves_is_zero() -> None:
    doc = {"summary": [], "binds": "x", "breakdown_s": {"a": 0.5, "b": -8.9e-16}, "memory_gib_by_class": {}}
    out, _ = printed(lambda term: plan._explained(term, doc))
    assert [line.split() for line in out.splitlines() if line[:2] in ("a ", "b ")] == [
        ["a", "0.5", "100.0"],
        ["b", "0", "0.0"],
    ]


def test_cancelling_all_jobs_says_so_before_it_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("ROTA_HOME", str(tmp_path))
    done = {"state": "down", "ended": [], "stopped_jobs": ["a-1"], "left_jobs": {}, "still_running": [], "text": ""}
    monkeypatch.setattr(daemon, "live_by_user", lambda _: {"ann": 2})
    monkeypatch.setattr(daemon, "down", lambda *_, **__: done)
    assert call(["down", "--jobs", "cancel", "--yes"]) == 0
    assert capsys.readouterr().err == "cancelling 2 jobs (2 of ann) ...\n"


def test_a_template_names_the_path_that_it_was_written_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["init", "ddp", "--dir", "mine"]) == 0
    text = (tmp_path / "mine" / "job.yaml").read_text()
    assert "rota run mine/job.yaml" in text and "rota run job.yaml" not in text


def test_following_a_job_that_waits_says_why_once_before_its_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [("QUEUED", "NO_FREE_DEVICES", "Needs 4 GPUs; 0 are free."), ("SUCCEEDED", "COMPLETED", "done")]

    class Service:
        def job(self, _: str) -> dict[str, str]:
            state, reason, text = states.pop(0)
            return {"id": "a-1", "state": state, "reason": reason, "text": text}

        def logs(self, *_: object, **__: object) -> list[dict[str, str]]:
            return [{"instance": "main/0", "text": "hello", "ts": ""}]

    monkeypatch.setattr(Flags, "client", lambda _: nullcontext(Service()))
    assert call(["logs", "-f", "a-1"]) == 0
    out, err = capsys.readouterr()
    assert out == "main/0 | hello\n"
    assert err.splitlines() == [
        "a-1 is QUEUED: NO_FREE_DEVICES: Needs 4 GPUs; 0 are free.",
        "its output follows once it runs; see: rota explain a-1",
        "a-1 SUCCEEDED: done",
    ]


def test_values_of_an_event_are_not_printed_as_python() -> None:
    event = {
        "kind": "X",
        "at": None,
        "pairs": [["a", "b"], ["c", "d"]],
        "names": ["x", "y"],
        "map": {"k": 1},
        "on": True,
        "due_at": 1e9,
    }
    moves = {"kind": "MoveAsked", "at": None, "node": "n1", "due_at": 1e9}
    assert "node=n1" in event_text(moves) and "moves at a commit before that" in event_text(moves)
    assert "the job stays" in event_text(moves | {"due_at": None})
    said = event_text(event).strip()
    assert said == f"X pairs=a:b,c:d names=x,y map=k=1 on=true due_at={clock_time(1e9)}"


@pytest.mark.parametrize(
    ("restore", "lost", "source", "shown"),
    [(0, 0, "", ("no commit", None)), (0, 3, "", ("no commit", 3)), (5, 0, "", (5, 0)), (5, 2, "m1", ("5 (m1)", 2))],
)
def test_a_recovery_of_a_job_without_commits_is_told_as_a_new_start_and_not_as_one_that_lost_nothing(
    restore: int, lost: int, source: str, shown: tuple[object, object]
) -> None:
    item = {"restore": restore, "lost_commits": lost, "restored_from": source}
    assert tuple(inspect.FAILURES.columns[name](item) for name in ("BACK TO", "LOST COMMITS")) == shown
