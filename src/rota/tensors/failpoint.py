"""Named points where a test may kill or stop this process; the one place that reads ``ROTA_TENSORS_DIE_AT``."""

from __future__ import annotations

import signal
from collections import Counter

from rota.runtime import environ

_WANTED, _NTH, _HOW = (environ.get("ROTA_TENSORS_DIE_AT") + "::").split(":")[:3]
_seen: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Die here by SIGKILL when ``ROTA_TENSORS_DIE_AT`` is ``name`` or ``name:n`` (the n-th passage); ``name:n:stop``
    stops."""
    if name != _WANTED:
        return
    _seen[name] += 1
    if _seen[name] == int(_NTH or 1):
        # Sent to this thread: one for the process may go to another, and this one would continue until that wakes up.
        signal.raise_signal(signal.SIGSTOP if _HOW == "stop" else signal.SIGKILL)
