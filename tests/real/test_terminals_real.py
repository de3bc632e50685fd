"""Terminals beside instances and shells as jobs, as people use them: from a real terminal, over the real service."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.real.test_cli_real import LIMIT_S, Installation, OnTerminal

from rota.spec.errors import RotaError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HELD = """\
name: held
roles:
  main:
    run: "while ! test -e GATE; do sleep 0.1; done"
    env: {FLAVOUR: plum}
"""


def wait_for(installation: Installation, job: str, state: str) -> dict[str, object]:
    until, shown = time.monotonic() + LIMIT_S, dict[str, object]()
    with installation.client() as client:
        while shown.get("state") != state:
            assert time.monotonic() < until and shown.get("state") not in ("FAILED", "CANCELLED"), shown
            time.sleep(0.2)
            with contextlib.suppress(RotaError):  # a service that was killed is back soon
                shown = dict(client.job(job))
    return shown


Homes = Callable[[], AbstractContextManager[Path]]


@pytest.fixture(scope="module")
def held(short_home: Homes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """An installation with a job that runs until the end of these tests."""
    with short_home() as home:
        made = Installation(home, tmp_path_factory.mktemp("held"))
        try:
            (made.folder / "job.yaml").write_text(HELD)
            assert made.rota("run", "job.yaml", "-d").returncode == 0
            wait_for(made, "held-1", "RUNNING")
            yield made
        finally:
            made.rota("down", "--force")


@pytest.fixture(scope="module")
def two_devices(short_home: Homes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """An installation of two pretended devices."""
    with short_home() as home:
        made = Installation(home, tmp_path_factory.mktemp("two"))
        try:
            assert made.rota("up", "--pretend", "1x1x2").returncode == 0
            yield made
        finally:
            made.rota("down", "--force")


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


def audited(installation: Installation) -> list[dict[str, Any]]:
    """The newest entries of the audit."""
    return json.loads(installation.rota("audit", "--json").stdout)["items"]


def test_exec_on_a_terminal_has_keys_ctrl_c_window_size_and_the_status_of_the_program(held: Installation) -> None:
    before = audited(held)
    shell = OnTerminal(held, "exec", "-it", "held-1", "--", "sh")
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
    audit = [one for one in audited(held) if one not in before]
    lines = [one for one in audit if one["path"].endswith(":terminal")]
    assert [(one["instance"], one["command"], one["status"]) for one in lines] == [("main/0", "sh", 201)]
    assert not [one for one in audit if "/terminals/" in one["path"]]  # what is typed is not in the audit


def test_exec_on_a_terminal_takes_its_input_from_a_pipe_and_names_what_is_wrong(held: Installation) -> None:
    done = held.rota("exec", "-it", "held-1/main/0", "--", "sh", stdin="echo sum=$((40+2))\n")
    assert (done.returncode, "sum=42" in done.stdout) == (0, True), done
    missing = held.rota("exec", "-it", "held-1", "--", "no-such-program")
    assert (missing.returncode, "no-such-program: No such file" in missing.stdout) == (127, True), missing
    unknown = held.rota("exec", "-it", "held-1/nope/0")
    assert (unknown.returncode, "no role 'nope'" in unknown.stderr) == (125, True), unknown
    assert held.rota("exec", "held-1", "main", "--", "echo", "plain").stdout == "plain\n"


def test_a_terminal_outlives_the_service_and_ends_soon_after_its_user_is_killed(held: Installation) -> None:
    shell = OnTerminal(held, "exec", "-it", "held-1", "--", "sh")
    shell.until(r"[$#] ")
    typed(shell, "echo pid=$$.\n")
    pid = int(shell.until(r"pid=(\d+)\.").rpartition("pid=")[2].partition(".")[0])
    service = json.loads(held.rota("status", "--json").stdout)["pid"]
    os.kill(service, signal.SIGKILL)
    time.sleep(1.0)
    typed(shell, "echo still-$((20+1))\n")
    shell.until(r"still-21")
    assert psutil.pid_exists(pid)
    os.kill(shell.pid, signal.SIGKILL)
    shell.end()
    assert gone(pid, 60) < 45
    assert wait_for(held, "held-1", "RUNNING")


def test_a_shell_is_a_job_that_waits_in_its_queue_and_ends_with_the_shell(two_devices: Installation) -> None:
    first = two_devices.rota(
        "run", "-d", "-n", "before", "--gpus", "2", "--", "sh", "-c", "while ! test -e GATE; do sleep 0.1; done"
    )
    assert first.returncode == 0, first.stderr
    wait_for(two_devices, "before-1", "RUNNING")
    shell = OnTerminal(two_devices, "run", "--shell", "--gpus", "1", "-e", "FLAVOUR=plum", "--", "sh")
    shell.until(r"shell-1 QUEUED")  # the live line
    assert "[$#] " not in shell.text
    (two_devices.folder / "GATE").touch()
    shell.until(r"[$#] $")
    typed(shell, "echo $ROTA_JOB $FLAVOUR devices=$CUDA_VISIBLE_DEVICES.\n")
    shell.until(r"shell-1 plum devices=")
    typed(shell, "exit 3\n")
    assert shell.end() == 3
    shown = wait_for(two_devices, "shell-1", "SUCCEEDED")
    assert shown["restarts"] == 0


def test_the_job_of_a_shell_ends_when_its_user_is_killed_or_leaves_while_it_waits(two_devices: Installation) -> None:
    killed = OnTerminal(two_devices, "run", "--shell", "-n", "killed", "--", "sh")
    killed.until(r"[$#] $")
    os.kill(killed.pid, signal.SIGKILL)
    killed.end()
    first = two_devices.rota("run", "-d", "-n", "before", "--gpus", "2", "--", "sleep", "600")
    assert first.returncode == 0, first.stderr
    left = OnTerminal(two_devices, "run", "--shell", "-n", "left", "--gpus", "1")
    left.until(r"left-1 QUEUED")
    os.kill(left.pid, signal.SIGINT)
    assert left.end() == 130
    shown = json.loads(two_devices.rota("show", "left-1", "--json").stdout)
    assert shown["state"] == "CANCELLED"
    wait_for(two_devices, "killed-1", "SUCCEEDED")
