"""The user's terminal and shell as the command line finds them: no other module of it reads any."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

from rota.service.user_process import variable

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 and the number of SIGINT."""


def width() -> int:
    """Characters in a line of the terminal."""
    return shutil.get_terminal_size().columns


def colour_wanted() -> bool:
    """False where NO_COLOR or a terminal without colours says so, or stdout is not a terminal."""
    return sys.stdout.isatty() and not (variable("NO_COLOR") or variable("TERM") == "dumb")


def draws_in_place() -> bool:
    """True when stdout is a terminal on which a line can be drawn again."""
    return sys.stdout.isatty() and variable("TERM") != "dumb"


def err_draws_in_place() -> bool:
    """The same of stderr, where progress goes."""
    return sys.stderr.isatty() and variable("TERM") != "dumb"


def terminal_size() -> tuple[int, int]:
    """Rows and columns of the terminal of stdin or stdout; 24 and 80 where neither is one."""
    for fd in (0, 1):
        with contextlib.suppress(OSError):
            found = os.get_terminal_size(fd)
            return max(found.lines, 1), max(found.columns, 1)
    return 24, 80


def terminal_name() -> str:
    """What kind of terminal this is, from $TERM; ``dumb`` without one."""
    return variable("TERM") or "dumb"


def own_shell() -> str:
    """Name of the shell that the user logs in with, from $SHELL; empty without one."""
    return Path(variable("SHELL")).name
