"""The proof folder of a development checkout (decision 0037): recorded cases and tables, which no wheel has."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import rota
from rota.spec.errors import MissingExtra

CHECKOUT = Path(rota.__file__).resolve().parents[2]
"""Root of the checkout, where the package runs from one."""


def load_proof(name: str, what: str) -> ModuleType:
    """The module ``tests.proof.NAME`` of the checkout; ``what`` it holds is for the message.

    Raises MissingExtra (exit status 2) in an installation without a checkout.
    """
    if not (CHECKOUT / "tests" / "proof" / "__init__.py").is_file():
        raise MissingExtra(
            f"{what} are not part of an installed package: {CHECKOUT} has no folder tests/proof",
            hint="clone the repository, run make setup there, and run this command with its .venv/bin/rota",
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return importlib.import_module(f"tests.proof.{name}")
