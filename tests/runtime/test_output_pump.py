"""The pump stamps every line of both pipes, keeps what a dead writer left, and ends with its last writer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rota.runtime import output_pump
from rota.runtime.clock import SystemClock, blocking_sleep

WAIT_S = 60.0
STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z 2/7 (stdout|stderr) ")


def start_pump(log: Path) -> tuple[subprocess.Popen, int, int]:
    (out_read, out), (err_read, err) = os.pipe(), os.pipe()
    command = [sys.executable, "-I", "-S", output_pump.__file__, str(log), "2/7", str(out_read), str(err_read)]
    pump = subprocess.Popen(command, pass_fds=(out_read, err_read))
    os.close(out_read)
    os.close(err_read)
    return pump, out, err


def finish(pump: subprocess.Popen, *fds: int) -> None:
    for fd in fds:
        os.close(fd)
    assert pump.wait(WAIT_S) == 0


def texts(log: Path) -> list[str]:
    lines = log.read_text().splitlines()
    assert all(STAMP.match(line) for line in lines), lines
    return [line.split(" ", 2)[2] for line in lines]


def test_lines_of_both_streams_are_stamped_and_a_last_line_without_end_is_kept(tmp_path: Path) -> None:
    pump, out, err = start_pump(tmp_path / "x.log")
    os.write(out, b"one\ntw")
    os.write(out, b"o\n\nrest")
    os.close(out)
    os.write(err, "schön\n".encode())
    finish(pump, err)
    found = texts(tmp_path / "x.log")
    assert [text for text in found if text.startswith("stdout")] == [
        "stdout one",
        "stdout two",
        "stdout ",
        "stdout rest",
    ]
    assert "stderr schön" in found
    assert (tmp_path / "x.log").stat().st_mode & 0o777 == 0o600


def until_shown(log: Path, text: str) -> None:
    clock = SystemClock()
    ends_s = clock.monotonic_s() + WAIT_S
    while not log.exists() or text not in log.read_text():
        assert clock.monotonic_s() < ends_s
        blocking_sleep(0.01)


def test_of_a_progress_bar_the_log_has_what_a_terminal_shows(tmp_path: Path) -> None:
    pump, out, err = start_pump(tmp_path / "x.log")
    os.write(out, b"begin\r\n\r 0%|   |")  # the first state at once, the others only after a while
    until_shown(tmp_path / "x.log", " 0%|   |")
    for done in range(1, 101):
        os.write(out, b"\r%d%%|###|" % done)
    os.write(out, b" done\nend\n")
    os.write(err, b"1 of 2\r")
    until_shown(tmp_path / "x.log", "1 of 2")
    os.write(err, b"2 of 2\r")
    os.close(out)
    finish(pump, err)
    found = texts(tmp_path / "x.log")
    assert [one[7:] for one in found if one.startswith("stdout")] == ["begin", " 0%|   |", "100%|###| done", "end"]
    assert [one[7:] for one in found if one.startswith("stderr")] == ["1 of 2", "2 of 2"]


def test_a_killed_writer_loses_nothing_and_a_log_is_appended_to(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    for _ in range(2):
        pump, out, err = start_pump(log)
        code = "import os; os.write(1, b'last words\\n' * 1000); os.kill(os.getpid(), 9)"
        done = subprocess.run([sys.executable, "-c", code], stdout=out, stderr=err, check=False)
        assert done.returncode == -signal.SIGKILL
        finish(pump, out, err)
    assert texts(log) == ["stdout last words"] * 2000


def test_an_endless_line_is_cut_and_signals_are_left_to_the_instance(tmp_path: Path) -> None:
    pump, out, err = start_pump(tmp_path / "x.log")
    os.write(err, b"ready\n")
    while "ready" not in ((tmp_path / "x.log").read_text() if (tmp_path / "x.log").exists() else ""):
        assert pump.poll() is None
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pump.pid, signum)
    with os.fdopen(out, "wb") as file:
        file.write(b"x" * 200_000)
    finish(pump, err)
    pieces = [text.removeprefix("stdout ") for text in texts(tmp_path / "x.log") if text.startswith("stdout")]
    assert len(pieces) > 1 and "".join(pieces) == "x" * 200_000


@pytest.mark.slow
def test_the_pump_of_an_instance_is_none_of_its_children_so_the_end_of_an_instance_loses_no_last_line(
    tmp_path: Path,
) -> None:
    """An engine that ends an instance kills its children."""
    log = tmp_path / "x.log"
    code = f"""
import os, psutil
from pathlib import Path
from rota.runtime.ray.host import redirect_output
redirect_output(Path({str(log)!r}), "2/7", hide=("secret",))
for child in psutil.Process().children():
    child.kill()
os.write(1, b"last words of secret\\n")
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)
    clock = SystemClock()
    ends_s = clock.monotonic_s() + WAIT_S
    while not (log.exists() and log.read_text()) and clock.monotonic_s() < ends_s:
        blocking_sleep(0.01)
    assert texts(log) == ["stdout last words of ******"]


@pytest.mark.slow
def test_a_killed_pump_is_replaced_and_no_writer_is_told_of_a_broken_pipe_or_held_up(tmp_path: Path) -> None:
    """The second one may be replaced no more. It has one end of a pipe of its own, or it would outlive the instance."""
    log = tmp_path / "x.log"
    code = f"""
import os, signal, subprocess, time
from pathlib import Path
from rota.runtime.ray import host
host.PUMPS_MAX = 1
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
pumps, run, log = [], subprocess.run, Path({str(log)!r})
def noted(*command, **options):
    done = run(*command, **options)
    pumps.append(int(done.stdout))
    return done
subprocess.run = noted
def wait(so):
    ends_s = time.monotonic() + {WAIT_S}
    while not so() and time.monotonic() < ends_s:
        time.sleep(0.01)
host.redirect_output(log, "2/7")
for n, word in enumerate(("before", "after")):
    wait(lambda: len(pumps) > n)
    os.write(1, word.encode() + b"\\n")
    wait(lambda: log.exists() and word in log.read_text())
    fds = Path("/proc") / str(pumps[n]) / "fd"
    ends = [os.readlink(fd) for fd in fds.iterdir()]
    assert ends.count(os.readlink("/proc/self/fd/2")) == 1, ends
    os.kill(pumps[n], signal.SIGKILL)
os.write(2, b"x" * 1_000_000)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)
    assert texts(log) == ["stdout before", "stdout after"]


def test_a_full_disk_costs_the_lines_and_nothing_else() -> None:
    pump, out, err = start_pump(Path("/dev/full"))
    os.write(out, b"lost\n" * 100_000)
    finish(pump, out, err)
    assert pump.returncode == 0
