"""Whose threads and tasks a dump of stacks shows."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path

import pytest

from rota.job.inspect import inspect_all
from rota.job.lanes import Lane
from rota.job.stacks import is_of_the_job, of_the_job, own_stacks
from rota.job.worker import failure_of
from rota.spec.ids import Epoch
from rota.spec.reasons import Reason


def stuck_in_the_job(stop: threading.Event) -> None:
    stop.wait(20.0)


async def waiting_in_the_job(begun: threading.Event) -> None:
    begun.set()
    await asyncio.sleep(20.0)


def test_only_threads_and_tasks_that_run_code_of_the_job_are_shown() -> None:
    stop, begun, lane, control = threading.Event(), threading.Event(), Lane("user"), Lane("control")
    thread = threading.Thread(target=stuck_in_the_job, args=(stop,), daemon=True)
    thread.start()
    waits = lane.submit(waiting_in_the_job(begun))
    assert begun.wait(5.0)
    time.sleep(0.05)
    text = own_stacks(lane.loop)
    assert "stuck_in_the_job" in text and "waiting_in_the_job" in text
    assert "lanes.py" not in text.replace("waiting_in_the_job", "") or "_work" not in text, "Rota's own are left out"
    stop.set()
    waits.cancel()
    for one in (lane, control):
        one.close()


def test_a_dump_without_code_of_the_job_is_shown_whole() -> None:
    dump = 'Thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 1 in wait\n'
    assert of_the_job(dump) == dump
    assert not is_of_the_job(threading.__file__)
    assert not is_of_the_job(Lane.__init__.__code__.co_filename)
    assert is_of_the_job("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py")
    assert is_of_the_job(__file__)


def test_a_module_that_is_missing_is_told_with_the_remedy_and_without_frames_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_with_a_gap.py").write_text("import absent_module.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    answer = inspect_all({"w": "mine_with_a_gap:W"})["w"]
    missing, _, remedy = answer["error"].partition("; ")
    assert missing == "ModuleNotFoundError: No module named 'absent_module'"
    assert remedy.startswith("put absent_module beside the job file (workdir), or install it into ")
    assert answer["traceback"].count("  File ") == 1 and "mine_with_a_gap.py" in answer["traceback"]


@pytest.mark.parametrize(
    ("code", "text", "frames"),
    [
        ("def f():\n    raise RuntimeError('no such luck')\nf()\n", "RuntimeError: no such luck", 2),
        ("W = 3\n", "BadInput: 3 is not a class, async function or function", 0),
        ("X = 3\n", "BadInput: module 'mine_that_fails' has no 'W'; there is X", 0),
        ("def f(:\n", "SyntaxError: invalid syntax (mine_that_fails.py, line 1)", 1),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3", 1),
    ],
)
def test_code_that_fails_at_its_import_is_told_with_its_own_frames_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, text: str, frames: int
) -> None:
    (tmp_path / "mine_that_fails.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_that_fails", raising=False)
    answer = inspect_all({"w": "mine_that_fails:W"})["w"]
    assert answer["error"] == text
    assert answer["traceback"].count("  File ") == answer["traceback"].count("mine_that_fails.py") == frames


def test_an_error_that_has_a_reason_of_its_own_kind_is_a_failure_like_any_other() -> None:
    with pytest.raises(UnicodeDecodeError) as caught:
        b"\xff".decode()
    found = failure_of(caught.value, Epoch(1))
    assert (found.reason, found.text.partition(":")[0]) == (Reason.USER_ERROR, "UnicodeDecodeError")
    assert __file__ in found.traceback
