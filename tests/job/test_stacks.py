"""Whose threads and tasks a dump of stacks shows."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from rota.job.inspect import inspect_all
from rota.job.lanes import Lane
from rota.job.stacks import is_of_the_job, of_the_job, own_stacks


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
