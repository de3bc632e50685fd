"""Calibration of estimated starts: how true earlier ones were says how wide the next ones have to be."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import floor
from statistics import fmean

from rota.cluster.sim.forecast import PESSIMISM, Estimates, Start
from rota.spec.ids import JobId
from rota.spec.resources import counted

KEPT = 200
"""Jobs whose estimates are remembered, those that started last."""
TAIL = 0.1
"""As many starts lie before ``p10``, and after ``p90``."""
SHORT_S = 60.0
"""Added to each wait at least: of one that is far shorter no part is taken."""

_Told = tuple[float, float, float]
"""When a job had its first estimate, with the early wait and the late one."""


class Calibration:
    """First estimates of jobs, and what became of them, for wider intervals of those that wait now.

    Plays know little of jobs that come later, so that true starts lie outside of them more often than they should.
    Split conformal prediction, each tail by itself (Romano, Patterson, Candes, "Conformalized Quantile Regression",
    NeurIPS 2019), on what part of the early wait, and of the late one, the true wait was, as waits differ by orders
    of magnitude. To each the mean of the true ones is added, else a job that should have started at once and waited
    for a day would make all intervals a thousand times as long. No interval becomes narrower. It follows from no log:
    a service that starts learns anew, and until enough jobs have started each may wait ``PESSIMISM`` times as long as
    the plays say is likely.
    """

    def __init__(self) -> None:
        self._told: dict[JobId, _Told] = {}
        self._waits: deque[tuple[float, float, float]] = deque(maxlen=KEPT)
        """Of each job that started: how long it waited, and the early and the late wait of its estimate."""

    def tell(self, made: Estimates, now: float) -> None:
        """Jobs that wait have these estimates; of each the first one counts. The others wait no more."""
        before, self._told = self._told, {}
        for job, (early, _, late) in made.starts.items():
            if job in before:
                self._told[job] = before[job]
            elif early is not None and late is not None:
                self._told[job] = (now, early - now, late - now)

    def started(self, job: JobId, at: float) -> None:
        """A job started."""
        if (told := self._told.pop(job, None)) is not None:
            since, early_s, late_s = told
            self._waits.append((at - since, early_s, late_s))

    def of(self, made: Estimates, now: float) -> Estimates:
        """These estimates with intervals that as many starts lie in as should."""
        if not (low := floor((len(self._waits) + 1) * TAIL)):
            return replace(made, starts={job: _without_evidence(start, now) for job, start in made.starts.items()})
        more_s = max(SHORT_S, fmean(waited_s for waited_s, _, _ in self._waits))
        first = min(
            1.0, sorted((waited_s + more_s) / (early_s + more_s) for waited_s, early_s, _ in self._waits)[low - 1]
        )
        last = max(1.0, self._late_part(now, more_s))

        def wider(start: Start) -> Start:
            early, likely, late = start
            early = None if early is None else now + max(0.0, (early - now + more_s) * first - more_s)
            late = None if late is None else now + (late - now + more_s) * last - more_s
            return (early, likely, late)

        basis = f"{made.basis}; intervals by what became of {counted(len(self._waits), 'estimate')}"
        return replace(made, starts={job: wider(start) for job, start in made.starts.items()}, basis=basis)

    def _late_part(self, now: float, more_s: float) -> float:
        """What part of the late wait one of ten exceeds. Of jobs that still wait only what they waited so far is known.

        The product-limit estimate of E. Kaplan and P. Meier (JASA 53, 1958), with one job more that exceeds all.
        """
        known = sorted(
            [((waited_s + more_s) / (late_s + more_s), True) for waited_s, _, late_s in self._waits]
            + [((now - since + more_s) / (late_s + more_s), False) for since, _, late_s in self._told.values()]
        )
        more, left = 1.0, len(known) + 1
        for part, has_started in known:
            more -= more / left if has_started else 0.0
            left -= 1
            if more <= TAIL:
                return part
        return known[-1][0]


def _without_evidence(start: Start, now: float) -> Start:
    early, likely, late = start
    if likely is None or late is None:
        return start
    return (early, likely, max(late, now + (likely - now) * PESSIMISM))
