"""Clock, random numbers and terminal variables of the user's own process, which imports nothing of runtime."""

from __future__ import annotations

import os
import secrets
from asyncio import sleep as pause
from datetime import UTC, datetime
from time import monotonic, sleep

__all__ = ["fresh_key", "monotonic", "now", "pause", "sleep", "spread", "variable"]


def now() -> datetime:
    """The present time of this machine, with zone."""
    return datetime.now(UTC)


def spread() -> float:
    """A random number from 0 up to 1, in thousandths."""
    return secrets.randbelow(1000) / 1000


def fresh_key() -> str:
    """A random text of 32 hexadecimal digits."""
    return secrets.token_hex(16)


def variable(name: str) -> str:
    """A variable of the environment that says how a terminal or shell is; empty without one. Settings: config.py."""
    return os.environ.get(name, "")
