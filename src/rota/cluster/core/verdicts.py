"""Verdicts that hold until something is given back: lines of waiting jobs that need not be tried again."""

from __future__ import annotations

from collections.abc import Sequence

from rota.cluster.core.jobs import LineKey, LiveJob
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId
from rota.spec.reasons import Reason

VERDICTS_MAX = 50_000
"""Forgotten then, all at once: each is reached again when its line is tried."""


class VerdictCache:
    """Verdicts of "no" that hold as long as nothing was given back since they were reached.

    It is not part of the state: a pass that is undone leaves what it has learned, so that the next one gets further.
    What a Txn undoes are the takings, and no two givings share a number: a verdict of a trial is found again only where
    the same was taken from the same.

    For the cluster (empty name) and for each queue it keeps what was taken since the last time that something was
    given back. A verdict is good on every continuation of the takings under which it was reached; the numbers behind it
    are not, so only the reason is kept.
    """

    def __init__(self) -> None:
        self._takings: dict[str, tuple[int, list[int]]] = {}
        self._verdicts: dict[tuple[str, LineKey], tuple[int, int, int, Reason]] = {}
        self._count = 0
        self._cut_short = 0
        self._vain: dict[JobId, int] = {}
        self.held_back: dict[JobId, Sequence[JobId]] = {}
        """Job to those that its policy would stop for it, and that are not, as that would close a circle."""
        self.places: dict[JobId, tuple[LiveJob, object, tuple[object, ...]]] = {}
        """Of jobs that have a rank of their own: the row, the order, and the place in that order."""
        self.columns: dict[JobId, tuple[LiveJob, tuple[float, ...]]] = {}
        """Of running jobs that a policy ranks in bulk: the row, and what of it the ranks follow from."""

    def tries_max(self, first: int) -> int:
        """Requests that the next pass may try: twice as many after each one in a row that could not try them all."""
        return first << self._cut_short

    def pass_ended(self, *, cut_short: bool, stopped_some: bool = False) -> None:
        """Count the passes in a row that had tried enough before all were tried.

        Once all were tried, or jobs are stopped, it may help again to stop others for any job.
        """
        self._cut_short = self._cut_short + 1 if cut_short else 0
        if stopped_some or not cut_short:
            self._vain.clear()

    def is_vain(self, job: JobId, happened: int) -> bool:
        """Whether a pass found that stopping others does not help a job, and these many events are still all."""
        return self._vain.get(job) == happened

    def learn_vain(self, job: JobId, happened: int) -> None:
        """Stopping others for a job does not help after these many events."""
        self._vain[job] = happened

    def forget_vain(self, job: JobId) -> None:
        """Stopping others may help a job again."""
        self._vain.pop(job, None)

    def forget(self, job: JobId) -> None:
        """A job is gone."""
        for known in (self.places, self.columns, self.held_back):
            known.pop(job, None)

    def learn_held_back(self, job: JobId, others: Sequence[JobId]) -> None:
        """These are not stopped for a job, as that would close a circle; none: nothing holds it back."""
        if others:
            self.held_back[job] = others
        else:
            self.held_back.pop(job, None)

    def took(self, txn: Txn, row: LiveJob) -> None:
        """A job was given devices."""
        taking = hash((row.ask.id, row.held))
        for name in ("", row.ask.queue):
            _, steps = self._of(name)
            steps.append(hash((steps[-1] if steps else 0, taking)))
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
