"""Terminals beside instances and shells as jobs, as people use them: from a real terminal, over the real service."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import termios
import time
from pathlib import Path

import psutil
import pytest
from tests.real.test_cli_real import LIMIT_S, Installation, OnTerminal, installation

__all__ = ["installation"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HELD = """\
name: held
roles:
  main:
    run: "while ! test -e GATE; do sleep 0.1; done"
    env: {FLAVOUR: plum}
"""


def hold(installation: Installation) -> None:
    (installation.folder / "job.yaml").write_text(HELD)
    assert installation.rota("run", "job.yaml", "-d").returncode == 0
    wait_for(installation, "held-1", "RUNNING")


def wait_for(installation: Installation, job: str, state: str) -> dict[str, object]:
    until = time.monotonic() + LIMIT_S
    while True:
        shown = json.loads(installation.rota("show", job, "--json").stdout or "{}")
        if shown.get("state") == state:
            return shown
        assert time.monotonic() < until and shown.get("state") not in ("FAILED", "CANCELLED"), shown
        time.sleep(0.2)


def typed(terminal: OnTerminal, text: str) -> None:
    os.write(terminal.fd, text.encode())


def resize(terminal: OnTerminal, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    os.kill(terminal.pid, signal.SIGWINCH)


def gone(pid: int, within_s: float) -> float:
    """Seconds until a process has ended."""
    began = time.monotonic()
    while psutil.pid_exists(pid):
        assert time.monotonic() - began < within_s, psutil.Process(pid).cmdline()
        time.sleep(0.1)
    return time.monotonic() - began


def test_exec_on_a_terminal_has_keys_ctrl_c_window_size_and_the_status_of_the_program(
    installation: Installation,
) -> None:
    hold(installation)
    shell = OnTerminal(installation, "exec", "-it", "held-1", "--", "sh")
    shell.until(r"[$#] ")
    typed(shell, "echo at $ROTA_INSTANCE $FLAVOUR $TERM; tty; test -t 0 && test -t 1 && echo a-tty\n")
    shell.until(r"at main/0 plum xterm\r\n/dev/pts/\d+\r\na-tty")
    resize(shell, 40, 132)
    typed(shell, "sleep 0.5; stty size\n")
    shell.until(r"\r\n40 132\r\n")
    typed(shell, "sh -c 'echo begun-$((1+1)); exec sleep 600'\n")
    shell.until(r"begun-2")
    typed(shell, "\x03")
    shell.until(r"\^C\s+[$#] $")
    typed(shell, "echo after-$((4+4))\n")
    shell.until(r"after-8")
    typed(shell, "head -c 300000 /dev/zero | tr '\\0' x; echo; echo all-$((40+2))\n")
    shell.until(r"all-42")
    assert shell.text.count("x") >= 300_000
    typed(shell, "exit 7\n")
    assert shell.end() == 7
    audit = json.loads(installation.rota("audit", "--json").stdout)["items"]
    lines = [one for one in audit if one["path"].endswith(":terminal")]
    assert [(one["instance"], one["command"], one["status"]) for one in lines] == [("main/0", "sh", 201)]
    assert not [one for one in audit if "/terminals/" in one["path"]]  # what is typed is not in the audit


def test_exec_on_a_terminal_takes_its_input_from_a_pipe_and_names_what_is_wrong(installation: Installation) -> None:
    hold(installation)
    done = installation.rota("exec", "-it", "held-1/main/0", "--", "sh", stdin="echo sum=$((40+2))\n")
    assert (done.returncode, "sum=42" in done.stdout) == (0, True), done
    missing = installation.rota("exec", "-it", "held-1", "--", "no-such-program")
    assert (missing.returncode, "no-such-program: No such file" in missing.stdout) == (127, True), missing
    unknown = installation.rota("exec", "-it", "held-1/nope/0")
    assert (unknown.returncode, "no role 'nope'" in unknown.stderr) == (125, True), unknown
    assert installation.rota("exec", "held-1", "main", "--", "echo", "plain").stdout == "plain\n"


def test_a_terminal_outlives_the_service_and_ends_soon_after_its_user_is_killed(installation: Installation) -> None:
    hold(installation)
    shell = OnTerminal(installation, "exec", "-it", "held-1", "--", "sh")
    shell.until(r"[$#] ")
    typed(shell, "echo pid=$$.\n")
    pid = int(shell.until(r"pid=(\d+)\.").rpartition("pid=")[2].partition(".")[0])
    service = json.loads(installation.rota("status", "--json").stdout)["pid"]
    os.kill(service, signal.SIGKILL)
    time.sleep(1.0)
    typed(shell, "echo still-$((20+1))\n")
    shell.until(r"still-21")
    assert psutil.pid_exists(pid)
    os.kill(shell.pid, signal.SIGKILL)
    shell.end()
    assert gone(pid, 60) < 45
    assert wait_for(installation, "held-1", "RUNNING")


def test_a_shell_is_a_job_that_waits_in_its_queue_and_ends_with_the_shell(
    installation: Installation, tmp_path: Path
) -> None:
    assert installation.rota("up", "--pretend", "1x1x2").returncode == 0
    first = installation.rota(
        "run", "-d", "-n", "before", "--gpus", "2", "--", "sh", "-c", "while ! test -e GATE; do sleep 0.1; done"
    )
    assert first.returncode == 0, first.stderr
    wait_for(installation, "before-1", "RUNNING")
    shell = OnTerminal(installation, "run", "--shell", "--gpus", "1", "-e", "FLAVOUR=plum", "--", "sh")
    shell.until(r"shell-1 QUEUED")  # the live line
    assert "[$#] " not in shell.text
    (installation.folder / "GATE").touch()
    shell.until(r"[$#] $")
    typed(shell, "echo $ROTA_JOB $FLAVOUR devices=$CUDA_VISIBLE_DEVICES.\n")
    shell.until(r"shell-1 plum devices=")
    typed(shell, "exit 3\n")
    assert shell.end() == 3
    shown = wait_for(installation, "shell-1", "SUCCEEDED")
    assert shown["restarts"] == 0


def test_the_job_of_a_shell_ends_when_its_user_is_killed_or_leaves_while_it_waits(installation: Installation) -> None:
    assert installation.rota("up", "--pretend", "1x1x2").returncode == 0
    killed = OnTerminal(installation, "run", "--shell", "-n", "killed", "--", "sh")
    killed.until(r"[$#] $")
    os.kill(killed.pid, signal.SIGKILL)
    killed.end()
    wait_for(installation, "killed-1", "SUCCEEDED")
    first = installation.rota("run", "-d", "-n", "before", "--gpus", "2", "--", "sleep", "600")
    assert first.returncode == 0, first.stderr
    left = OnTerminal(installation, "run", "--shell", "-n", "left", "--gpus", "1")
    left.until(r"left-1 QUEUED")
    os.kill(left.pid, signal.SIGINT)
    assert left.end() == 130
    shown = json.loads(installation.rota("show", "left-1", "--json").stdout)
    assert shown["state"] == "CANCELLED"
