"""Calibration of estimated starts: how true earlier ones were says how wide the next ones have to be."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import floor

from rota.cluster.sim.forecast import PESSIMISM, Estimates, Start
from rota.spec.ids import JobId
from rota.spec.resources import counted

KEPT = 200
"""Jobs whose estimates are remembered, those that started last."""
TAIL = 0.1
"""As many starts lie before ``p10``, and after ``p90``."""
SHORT_S = 60.0
"""Added to each wait: of one that is far shorter no part is taken."""

_Told = tuple[float, float, float]
"""When a job had its first estimate, with the early wait and the late one."""


class Calibration:
    """First estimates of jobs, and what became of them, for wider intervals of those that wait now.

    Plays know nothing of jobs that come later, so that true starts lie outside of them more often than they should.
    Split conformal prediction, each tail by itself (Romano, Patterson, Candes, "Conformalized Quantile Regression",
    NeurIPS 2019), on what part of the early wait, and of the late one, the true wait was, as waits differ by orders of
    magnitude. No interval becomes narrower. It follows from no log: a service that starts learns anew, and until enough
    jobs have started each may wait ``PESSIMISM`` times as long as the plays say is likely.
    """

    def __init__(self) -> None:
        self._told: dict[JobId, _Told] = {}
        self._parts: deque[tuple[float, float]] = deque(maxlen=KEPT)

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
            self._parts.append(_parts(told, at))

    def of(self, made: Estimates, now: float) -> Estimates:
        """These estimates with intervals that as many starts lie in as should."""
        if not (low := floor((len(self._parts) + 1) * TAIL)):
            return replace(made, starts={job: _without_evidence(start, now) for job, start in made.starts.items()})
        first = min(1.0, sorted(part for part, _ in self._parts)[low - 1])
        last = max(1.0, self._late_part(now))

        def wider(start: Start) -> Start:
            early, likely, late = start
            early = None if early is None else now + max(0.0, (early - now + SHORT_S) * first - SHORT_S)
            late = None if late is None else now + (late - now + SHORT_S) * last - SHORT_S
            return (early, likely, late)

        basis = f"{made.basis}; intervals by what became of {counted(len(self._parts), 'estimate')}"
        return replace(made, starts={job: wider(start) for job, start in made.starts.items()}, basis=basis)

    def _late_part(self, now: float) -> float:
        """What part of the late wait one of ten exceeds. Of jobs that still wait only what they waited so far is known.

        The product-limit estimate of E. Kaplan and P. Meier (JASA 53, 1958), with one job more that exceeds all.
        """
        known = sorted(
            [(part, True) for _, part in self._parts] + [(_parts(t, now)[1], False) for t in self._told.values()]
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


def _parts(told: _Told, at: float) -> tuple[float, float]:
    since, early_s, late_s = told
    wait_s = at - since + SHORT_S
    return wait_s / (early_s + SHORT_S), wait_s / (late_s + SHORT_S)
