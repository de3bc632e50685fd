"""Named points where a test may kill this process; the one place that reads ``ROTA_TENSORS_DIE_AT``."""

from __future__ import annotations

import os
import signal
from collections import Counter

from rota.runtime import environ

_WANTED, _, _NTH = environ.get("ROTA_TENSORS_DIE_AT").partition(":")
_seen: Counter[str] = Counter()


def point(name: str) -> None:
    """Die here by SIGKILL when ``ROTA_TENSORS_DIE_AT`` is ``name`` or ``name:n`` (the n-th passage)."""
    if name != _WANTED:
        return
    _seen[name] += 1
    if _seen[name] >= int(_NTH or 1):
        os.kill(os.getpid(), signal.SIGKILL)
