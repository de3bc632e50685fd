"""What the command line does with the streams it is given."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import Any

import pytest

from rota.service.cli.output import Table, Terminal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "words", "status"),
    [("stdout", ["--help"], 0), ("stdout", ["sumbit", "--json"], 0), ("stderr", ["sumbit"], 2)],
)
def test_a_reader_that_had_its_fill_ends_a_verb_with_status_0(closed: str, words: list[str], status: int) -> None:
    read, write = os.pipe()
    os.close(read)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, closed: write}
    done = subprocess.run([sys.executable, "-m", "rota", *words], check=False, timeout=180, **streams)
    os.close(write)
    assert (done.returncode, done.stdout or b"", done.stderr or b"") == (status, b"", b"")


def test_a_line_that_nobody_reads_ends_the_process_in_order() -> None:
    read, write = os.pipe()
    os.close(read)
    out = os.fdopen(write, "w")
    with pytest.raises(SystemExit) as left:
        Terminal(out=out).line("never read")
    os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # what is still to be flushed
    out.close()
    assert left.value.code == 0


def test_lines_of_a_table_off_a_terminal_have_no_blanks_at_their_end() -> None:
    out = io.StringIO()
    plain: dict[str, Any] = dict.fromkeys(("yaml", "wide", "quiet", "colour", "live", "json"), False)
    rows = [{"name": "a", "state": "RUNNING"}, {"name": "longer", "state": None}]
    Table(columns={"NAME": "name", "STATE": "state"}).print(Terminal(**plain, out=out), rows)
    lines = out.getvalue().splitlines()
    assert lines[-1].split() == ["longer", "-"] and len(lines) >= 3
    assert [line for line in lines if line != line.rstrip()] == []
