"""Verdicts that hold until something is given back: lines of waiting jobs that need not be tried again."""

from __future__ import annotations

from collections.abc import Sequence

from rota.cluster.core.jobs import LineKey, LiveJob
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId
from rota.spec.reasons import Reason

Verdict = tuple[int, int, int, Reason]
"""Number of the last giving, how many takings there were since, a hash of them, and why a line could not start."""
VERDICTS_MAX = 50_000
"""Forgotten then, all at once: each is reached again when its line is tried."""


class VerdictCache:
    """Verdicts of "no" that hold as long as nothing was given back since they were reached.

    It is not part of the state, and a pass only reads it: what the pass learned is a value (``Learned``), which its
    caller takes in where the next pass is to get further. What a Txn undoes are the takings, and no two givings share a
    number: a verdict of a trial is found again only where the same was taken from the same.

    For the cluster (empty name) and for each queue it keeps what was taken since the last time that something was
    given back. A verdict is good on every continuation of the takings under which it was reached; the numbers behind it
    are not, so only the reason is kept.
    """

    def __init__(self) -> None:
        self._takings: dict[str, tuple[int, list[int]]] = {}
        self._verdicts: dict[tuple[str, LineKey], Verdict] = {}
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

    def take_in(self, learned: Learned) -> None:
        """Let the next pass know what one has learned, with the passes in a row that could not try them all.

        Once all were tried, or jobs are stopped, it may help again to stop others for any job.
        """
        self._cut_short = self._cut_short + 1 if learned.cut_short else 0
        if learned.stopped_some or not learned.cut_short:
            self._vain.clear()
        else:
            self._vain |= learned.vain
        for job, others in learned.held_back.items():
            if others:
                self.held_back[job] = others
            else:
                self.held_back.pop(job, None)
        if len(self._verdicts) + len(learned.verdicts) >= VERDICTS_MAX:
            self._verdicts.clear()
        self._verdicts |= learned.verdicts

    def is_vain(self, job: JobId, happened: int) -> bool:
        """Whether a pass found that stopping others does not help a job, and these many events are still all."""
        return self._vain.get(job) == happened

    def forget(self, job: JobId) -> None:
        """A job is gone."""
        for known in (self.places, self.columns, self.held_back):
            known.pop(job, None)

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
        self._verdicts[profile, key] = self.verdict(key, reason, local=local)

    def verdict(self, key: LineKey, reason: Reason, *, local: bool) -> Verdict:
        """Why a line could not start, with the takings under which that holds."""
        epoch, steps = self._of(key.queue if local else "")
        return (epoch, len(steps), steps[-1] if steps else 0, reason)

    def recall(self, profile: str, key: LineKey, *, local: bool, learned: Verdict | None = None) -> Reason | None:
        """Why a line could not start, if that still holds. With ``local`` only its own queue matters."""
        known = learned or self._verdicts.get((profile, key))
        if known is None:
            return None
        now, steps = self._of(key.queue if local else "")
        epoch, length, last, reason = known
        holds = epoch == now and len(steps) >= length and (length == 0 or steps[length - 1] == last)
        return reason if holds else None


class Learned:
    """What one pass has learned beside its decisions, over what a cache knew before it.

    ``vain``: jobs for which stopping others does not help, with the number of events at which that was found, -1 where
    it may help again; ``held_back``: jobs for which none is stopped, as that would close a circle, with those others;
    ``cut_short``: not all could be tried; ``stopped_some``: jobs are asked to stop.
    """

    def __init__(self, cache: VerdictCache) -> None:
        self._cache = cache
        self.verdicts: dict[tuple[str, LineKey], Verdict] = {}
        self.vain: dict[JobId, int] = {}
        self.held_back: dict[JobId, Sequence[JobId]] = {}
        self.cut_short = self.stopped_some = False

    def is_vain(self, job: JobId, happened: int) -> bool:
        """Whether it was found that stopping others does not help a job, and these many events are still all."""
        found = self.vain.get(job)
        return self._cache.is_vain(job, happened) if found is None else found == happened

    def learn(self, profile: str, key: LineKey, reason: Reason, *, local: bool) -> None:
        """Why a line could not start."""
        self.verdicts[profile, key] = self._cache.verdict(key, reason, local=local)

    def recall(self, profile: str, key: LineKey, *, local: bool) -> Reason | None:
        """Why a line could not start in this pass or one before, if that still holds."""
        return self._cache.recall(profile, key, local=local, learned=self.verdicts.get((profile, key)))
