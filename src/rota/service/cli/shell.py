"""The user's terminal, shell and clock as the command line finds them: no other module of it reads any."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep  # noqa: TID251 - the user's process, where Rota has no clock

__all__ = [
    "colour_wanted",
    "draws_in_place",
    "err_draws_in_place",
    "monotonic",
    "now",
    "own_shell",
    "sleep",
    "terminal_name",
    "terminal_size",
    "width",
]


def now() -> datetime:
    """The present time of this machine, with zone."""
    return datetime.now(UTC)  # noqa: TID251 - the user's process, where Rota has no clock


def width() -> int:
    """Characters in a line of the terminal."""
    return shutil.get_terminal_size().columns


def colour_wanted() -> bool:
    """False where NO_COLOR or a terminal without colours says so, or stdout is not a terminal."""
    return sys.stdout.isatty() and not (_environ("NO_COLOR") or _environ("TERM") == "dumb")


def draws_in_place() -> bool:
    """True when stdout is a terminal on which a line can be drawn again."""
    return sys.stdout.isatty() and _environ("TERM") != "dumb"


def err_draws_in_place() -> bool:
    """The same of stderr, where progress goes."""
    return sys.stderr.isatty() and _environ("TERM") != "dumb"


def terminal_size() -> tuple[int, int]:
    """Rows and columns of the terminal of stdin or stdout; 24 and 80 where neither is one."""
    for fd in (0, 1):
        with contextlib.suppress(OSError):
            found = os.get_terminal_size(fd)
            return max(found.lines, 1), max(found.columns, 1)
    return 24, 80


def terminal_name() -> str:
    """What kind of terminal this is, from $TERM; ``dumb`` without one."""
    return _environ("TERM") or "dumb"


def own_shell() -> str:
    """Name of the shell that the user logs in with, from $SHELL; empty without one."""
    return Path(_environ("SHELL")).name


def _environ(name: str) -> str:
    return os.environ.get(name, "")  # noqa: TID251 - how a terminal looks is not a setting of Rota
