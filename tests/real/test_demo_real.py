"""The demonstration, stopped from outside: it ends what it started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_demonstration_that_is_stopped_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "rota", "demo", "--out", str(tmp_path)]
    env = {**os.environ, "TMPDIR": "/tmp"}  # paths of sockets are short
    demo = subprocess.Popen(words, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, env=env)
    assert demo.stdout is not None
    up = next(line for line in demo.stdout if "service up" in line)
    home = re.search(r"home (\S+);", up)
    assert home is not None, up
    demo.send_signal(how)
    told = demo.communicate(timeout=200)[0]
    assert demo.returncode == (130 if how is signal.SIGINT else 128 + how), told
    lines = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    assert [words for words in lines if home[1] in " ".join(words)] == []
    assert not Path(home[1]).exists()
