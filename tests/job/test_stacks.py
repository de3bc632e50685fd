"""Whose threads and tasks a dump of stacks shows."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.makers import at

from rota.job.health.stacks import is_of_the_job, of_the_job, own_stacks
from rota.job.inspect import inspect_all
from rota.job.instance import bootstrap
from rota.job.instance.instance import failure_of
from rota.runtime.event_loop import EventLoopThread
from rota.spec.ids import Epoch
from rota.spec.reasons import Reason


def stuck_in_the_job(stop: threading.Event) -> None:
    stop.wait(20.0)


async def waiting_in_the_job(begun: threading.Event) -> None:
    begun.set()
    await asyncio.sleep(20.0)


def test_only_threads_and_tasks_that_run_code_of_the_job_are_shown() -> None:
    stop, begun, lane, control = (
        threading.Event(),
        threading.Event(),
        EventLoopThread("user"),
        EventLoopThread("control"),
    )
    thread = threading.Thread(target=stuck_in_the_job, args=(stop,), daemon=True)
    thread.start()
    waits = lane.submit(waiting_in_the_job(begun))
    assert begun.wait(5.0)
    time.sleep(0.05)
    text = own_stacks(lane.loop)
    assert "stuck_in_the_job" in text and "waiting_in_the_job" in text
    assert re.fullmatch(r"\d+ more threads? of Rota, Ray and Python", text.splitlines()[-1])
    assert "lanes.py" not in text.replace("waiting_in_the_job", "") or "_work" not in text, "Rota's own are left out"
    stop.set()
    waits.cancel()
    for one in (lane, control):
        one.close()


def test_a_dump_without_code_of_the_job_is_shown_whole() -> None:
    dump = f'Thread 0x1 (most recent call first):\n  File "{threading.__file__}", line 1 in wait\n'
    assert of_the_job(dump) == dump
    assert not is_of_the_job(threading.__file__)
    assert not is_of_the_job(EventLoopThread.__init__.__code__.co_filename)
    assert is_of_the_job("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py")
    assert is_of_the_job(__file__)


PACKAGES = "/venv/lib/python3.11/site-packages"
BOOTSTRAP = bootstrap.__file__
SPIED = f"""Process 71: python -m rota.job.instance.bootstrap train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 71 (idle): "MainThread"
    all_reduce ({PACKAGES}/torch/distributed/distributed_c10d.py:2967)
    wrapper ({PACKAGES}/torch/distributed/c10d_logger.py:81)
    step (/home/me/train.py:8)
    <module> (/home/me/train.py:12)
    _run_code (<frozen runpy>:88)
    main ({BOOTSTRAP}:84)
    <module> ({BOOTSTRAP}:88)
    _run_module_as_main (<frozen runpy>:198)
Thread 72 (idle): "rota-progress"
    work ({BOOTSTRAP}:38)
    run ({threading.__file__}:982)
"""
IMPORTING = f"""Thread 0x00007fc7ad6446c0 (most recent call first):
  File "{BOOTSTRAP}", line 38 in work
  File "{threading.__file__}", line 982 in run

Current thread 0x00007fc7aedddb80 (most recent call first):
  File "<frozen importlib._bootstrap>", line 690 in _load_unlocked
  File "{PACKAGES}/torch/ao/quantization/__init__.py", line 17 in <module>
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "{PACKAGES}/torch/__init__.py", line 2370 in <module>
  File "<frozen importlib._bootstrap>", line 1176 in _find_and_load
  File "/home/me/train.py", line 2 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "{BOOTSTRAP}", line 84 in main
"""


def test_of_a_rank_its_own_frames_are_shown_without_imports_of_libraries_and_threads_of_rota() -> None:
    assert of_the_job(SPIED).splitlines() == [
        'Thread 71 (idle): "MainThread"',
        "    all_reduce (torch/distributed/distributed_c10d.py:2967)",
        "    wrapper (torch/distributed/c10d_logger.py:81)",
        "    step (/home/me/train.py:8)",
        "    <module> (/home/me/train.py:12)",
        "",
        "1 more thread of Rota, Ray and Python",
    ]
    assert of_the_job(IMPORTING).splitlines() == [
        "Current thread 0x00007fc7aedddb80 (most recent call first):",
        '  File "torch/ao/quantization/__init__.py", line 17 in <module>',
        '  File "/home/me/train.py", line 2 in <module>',
        "",
        "1 more thread of Rota, Ray and Python",
    ]
    outside = "process 71 is stopped by a signal\n"
    assert of_the_job(outside + SPIED).startswith(outside), "the state of the process comes first"


def test_threads_of_the_users_code_come_first_and_those_of_rota_and_ray_in_a_library_are_counted() -> None:
    def thread(number: int, *frames: str) -> str:
        lines = (f'  File "{path}", line 5 in f' for path in frames)
        return "\n".join([f"Thread {number} (most recent call first):", *lines, ""])

    ours = thread(1, f"{PACKAGES}/redis/client.py", BOOTSTRAP)
    rays = thread(2, f"{PACKAGES}/grpc/x.py", f"{PACKAGES}/ray/y.py")
    loader = thread(3, f"{PACKAGES}/torch/utils/data/pin.py")
    user = thread(4, "/home/me/train.py", BOOTSTRAP)
    shown = of_the_job("\n".join((ours, loader, rays, user)))
    assert [line for line in shown.splitlines() if line and not line.startswith("  ")] == [
        "Thread 4 (most recent call first):",
        "Thread 3 (most recent call first):",
        "2 more threads of Rota, Ray and Python",
    ]
    installed = "\n".join((ours, loader))
    assert of_the_job(installed).count("Thread ") == 2, "code of the job may be in an installed package alone"


def test_a_module_that_is_missing_is_told_with_the_remedy_and_without_frames_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_with_a_gap.py").write_text("import absent_module.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    answer = inspect_all({"w": "mine_with_a_gap:W"}, {})["w"]
    missing, _, remedy = answer["error"].partition("; ")
    assert missing == "ModuleNotFoundError: No module named 'absent_module'"
    assert remedy.startswith("put absent_module beside the job file (workdir), or install it into ")
    assert answer["traceback"].count("  File ") == 1 and "mine_with_a_gap.py" in answer["traceback"]
    assert inspect_all({"w": "absent_module:W"}, {})["w"]["traceback"] == "", "the text says it all"


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
    answer = inspect_all({"w": "mine_that_fails:W"}, {})["w"]
    assert answer["error"] == text
    assert answer["traceback"].count("  File ") == answer["traceback"].count("mine_that_fails.py") == frames


def test_an_error_that_has_a_reason_of_its_own_kind_is_a_failure_like_any_other() -> None:
    with pytest.raises(UnicodeDecodeError) as caught:
        b"\xff".decode()
    found = failure_of(caught.value, at("main/0"), Epoch(1))
    assert (found.reason, found.text.partition(":")[0]) == (Reason.USER_ERROR, "UnicodeDecodeError")
    assert __file__ in found.traceback
