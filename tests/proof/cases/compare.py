"""How an outcome is held against what a case expects."""

from __future__ import annotations

from typing import Any


class Mismatch(Exception):
    """The outcome differs from what the case expects; the message has both."""


class Unsupported(Exception):
    """The case uses a word that is not known here."""


def expect_equal(what: str, expected: Any, got: Any) -> None:
    """Raise Mismatch unless both are equal."""
    if expected != got:
        raise Mismatch(f"{what}: expected {expected}, got {got}")
