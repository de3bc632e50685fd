"""Forecasts of starts: one simulation of the live jobs answers for all, repeated in a thread of the service."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from rota.cluster.core.state import State
from rota.cluster.live import Scheduler
from rota.cluster.sim.calibration import Calibration
from rota.cluster.sim.forecast import Estimate, Estimates, Forecast
from rota.runtime.clock import Clock
from rota.spec.events import JobAdmitted, Record
from rota.spec.ids import JobId

FRESH_S = 10.0
"""How old an answer may be for which nothing newer is played though nothing changed: jobs may overrun."""
SOON_S = 1.0
"""How long after a change the next play begins by itself; what changes until then is in it too."""
REST_FACTOR = 9.0
"""Pause after a play, as a multiple of its duration, where an answer is known: plays take a tenth of a core."""
REST_S_MAX = 60.0
"""Longest pause: on a busy machine a play takes long because it gives way, not because it works."""
PATIENCE_S = 0.1
"""How long a newer answer is waited for when there is an older one to give."""
NEW_S = 1.0
"""How long the first answer for a job is waited for."""
PLAY_MAX_S = 4.0
"""Time limit of the plays of a forecast; no request waits for it."""
PLAYS_MAX = 2
"""The play under way may have begun before the job came; the next one knows it."""

UNPLAYED = "the job is in no forecast yet; ask again in some seconds"

_log = logging.getLogger("rota.service")


class _Closed(Exception):
    """Ends a play when the service stops."""


class Forecasts:
    """Estimates of the live jobs. At most one play is under way, in a thread that yields to the scheduler.

    No request waits for a slow play: its answer is then that of the last one, with its age. ``changed`` listens to
    every record and starts a newer play where jobs wait, from ``begin`` to ``close``.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler, self._clock, self.calibration = scheduler, clock, Calibration()
        self._made = Estimates(starts={}, basis="")
        self._made_of: tuple[State, int] | None = None
        self._made_at = float("-inf")
        self._took_s = 0.0
        self._rests_until_s = float("-inf")
        self._playing: asyncio.Task[None] | None = None
        self._due: asyncio.TimerHandle | None = None
        self._open = False

    def begin(self) -> None:
        """Play from now on: the scheduler knows the whole log."""
        self._open = True
        self.changed()

    def close(self) -> None:
        """Play nothing more; one under way ends at its next pass, for the end of the process waits for its thread."""
        self._open = False
        if self._due is not None:
            self._due.cancel()

    def changed(self, record: Record | None = None) -> None:
        """Have a newer forecast played soon, unless one is due already."""
        if record is not None and record.job is not None and isinstance(record.event, JobAdmitted):
            self.calibration.started(record.job, record.at)
        if self._open and self._due is None:
            rest_s = max(SOON_S, self._rest_s())
            self._due = self._clock.call_later(rest_s, self._play_if_needed)

    async def of(self, job: JobId) -> tuple[Estimate, float | None]:
        """When a job that waits would start, and how many seconds ago that was played.

        Nothing is known of a job that came after the last play, or that does not wait any more; it has no age.
        """
        for _ in range(PLAYS_MAX):
            known = job in self._made.starts
            if known and (self._rests() or (self._made_of == self._now_of() and self._age_s() < FRESH_S)):
                break
            patience_s = PATIENCE_S if known else NEW_S
            done, _ = await asyncio.wait({self._play()}, timeout=patience_s if self._took_s < patience_s else 0.0)
            for task in done:
                task.result()
            if known:
                break
        if job not in self._made.starts:
            return Estimate(p10=None, p50=None, p90=None, basis=UNPLAYED), None
        estimate, age_s = self._made.of(job, self._clock.wall_s()), self._age_s()
        if age_s >= FRESH_S:
            estimate = replace(estimate, basis=f"{estimate.basis}; as of {age_s:.0f} s ago")
        return estimate, age_s

    def _age_s(self) -> float:
        return self._clock.monotonic_s() - self._made_at

    def _rest_s(self) -> float:
        return min(REST_FACTOR * self._took_s, REST_S_MAX)

    def _rests(self) -> bool:
        return self._playing is None and self._clock.monotonic_s() < self._rests_until_s

    def _now_of(self) -> tuple[State, int]:
        state = self._scheduler.state
        return state, state.version

    def _play_if_needed(self) -> None:
        self._due = None
        if self._scheduler.state.lines and self._made_of != self._now_of():
            self._play()

    def _play(self) -> asyncio.Task[None]:
        if self._playing is None:
            self._playing = asyncio.create_task(self._played())
            self._playing.add_done_callback(_seen)
        return self._playing

    async def _played(self) -> None:
        try:
            made_of, at, now = self._now_of(), self._clock.monotonic_s(), self._clock.wall_s()
            forecast = Forecast(made_of[0], self._scheduler.profile, now, wall_max_s=PLAY_MAX_S)
            made = await asyncio.to_thread(forecast.play, self._clock, self._aside)
            waits = self._scheduler.state.jobs
            starts = {job: start for job, start in made.starts.items() if job in waits and waits[job].phase == "queued"}
            self.calibration.tell(replace(made, starts=starts), now)
            self._made = self.calibration.of(made, now)
            ended_s = self._clock.monotonic_s()
            self._made_of, self._made_at, self._took_s = made_of, at, ended_s - at
            self._rests_until_s = ended_s + self._rest_s()
            self.changed()  # what was due meanwhile found this play under way
        except _Closed:
            pass
        finally:
            self._playing = None

    def _aside(self) -> None:
        self._scheduler.wait_idle()
        if not self._open:
            raise _Closed


def _seen(play: asyncio.Task[None]) -> None:
    """Log the failure of a play: the request that started it may be over, and one that was due had none."""
    if not play.cancelled() and (error := play.exception()) is not None:
        _log.error("the forecast failed", exc_info=error)
