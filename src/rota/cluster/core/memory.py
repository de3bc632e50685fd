"""Verdicts of "no" that need not be reached again."""

from __future__ import annotations

from rota.cluster.core.rows import JobRow, LineKey
from rota.cluster.core.txn import Txn
from rota.spec.reasons import Reason

VERDICTS_MAX = 50_000
"""Forgotten then, all at once: each is reached again when its line is tried."""


class Memory:
    """Verdicts of "no" that hold as long as nothing was given back since they were reached.

    For the cluster (empty name) and for each queue it keeps what was taken since the last time that something was
    given back. A verdict is good on every continuation of the takings under which it was reached; the numbers behind it
    are not, so only the reason is kept.
    """

    def __init__(self) -> None:
        self._takings: dict[str, tuple[int, list[int]]] = {}
        self._verdicts: dict[tuple[str, LineKey], tuple[int, int, int, Reason]] = {}
        self._count = 0
        self.cut_short = 0
        """Passes in a row that had tried enough before all were tried; each of them tries twice as many as the last."""

    def took(self, txn: Txn, row: JobRow) -> None:
        """A job was given devices."""
        for name in ("", row.ask.queue):
            _, steps = self._of(name)
            steps.append(hash((steps[-1] if steps else 0, row.ask.id, row.held)))
            txn.did(steps.pop)

    def gave(self, txn: Txn, queue: str | None) -> None:
        """Devices of a queue, or anything at all (None), came back."""
        self._count += 1
        for name in ("", queue) if queue is not None else tuple(self._takings):
            txn.put(self._takings, name, (self._count, []))

    def _of(self, name: str) -> tuple[int, list[int]]:
        return self._takings.setdefault(name, (0, []))

    def learn(self, profile: str, key: LineKey, reason: Reason, *, local: bool) -> None:
        """Remember why a line could not start."""
        if len(self._verdicts) >= VERDICTS_MAX:
            self._verdicts.clear()
        epoch, steps = self._of(key.queue if local else "")
        self._verdicts[profile, key] = (epoch, len(steps), steps[-1] if steps else 0, reason)

    def recall(self, profile: str, key: LineKey, *, local: bool) -> Reason | None:
        """Why a line could not start, if that still holds. With ``local`` only its own queue matters."""
        known = self._verdicts.get((profile, key))
        if known is None:
            return None
        now, steps = self._of(key.queue if local else "")
        epoch, length, last, reason = known
        holds = epoch == now and len(steps) >= length and (length == 0 or steps[length - 1] == last)
        return reason if holds else None
