"""A command beside a process: its status and output, nothing left behind, whatever it does with its pipes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from rota.runtime.execute import OUTPUT_BYTES_MAX, execute_command
from rota.runtime.process import identify, wait_gone


def sh(script: str, timeout_s: float = 20.0):
    return asyncio.run(execute_command(["sh", "-c", script], timeout_s=timeout_s))


def test_status_and_both_streams_are_those_of_the_command() -> None:
    assert sh("echo out; echo err >&2; exit 9") == {
        "exit_status": 9, "stdout": "out\n", "stderr": "err\n", "cut": False, "timed_out": False
    }  # fmt: skip
    assert sh("kill -TERM $$")["exit_status"] == 143
    assert asyncio.run(execute_command(["/no/such"], timeout_s=9))["exit_status"] == 127
    assert asyncio.run(execute_command(["/etc/passwd"], timeout_s=9))["exit_status"] == 126
    assert asyncio.run(execute_command(["a\0b"], timeout_s=9))["exit_status"] == 126


def test_what_it_started_ends_with_it_and_is_not_waited_for(tmp_path: Path) -> None:
    began = time.monotonic()
    done = sh(f"sleep 300 & echo $! > {tmp_path}/pid; exit 3")
    assert done["exit_status"] == 3 and time.monotonic() - began < 20
    # One that is killed closes its pipes, which is what is waited for, an instant before it is gone.
    left = identify(int((tmp_path / "pid").read_text()))
    assert left is None or wait_gone((left,), 5.0) == ()


def test_one_that_does_not_end_is_killed_with_its_output_so_far() -> None:
    done = sh("echo begun; exec sleep 300", timeout_s=0.1)
    assert (done["stdout"], done["timed_out"], done["exit_status"]) == ("begun\n", True, 137)


def test_endless_output_is_kept_up_to_a_limit() -> None:
    done = sh("head -c 3000000 /dev/zero")
    assert len(done["stdout"]) == OUTPUT_BYTES_MAX and done["cut"] and done["exit_status"] == 0
