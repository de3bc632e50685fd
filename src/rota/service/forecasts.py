"""When the waiting jobs would start: one play of the live jobs answers for all of them, until something changes."""

from __future__ import annotations

import asyncio

from rota.cluster.core.snapshot import State
from rota.cluster.forecast import Estimate, Estimates, Forecast
from rota.cluster.live import Scheduler
from rota.runtime.clock import Clock
from rota.spec.ids import JobId

FRESH_S = 10.0
"""For so long an answer holds when nothing changes, and may be given while a newer one is played when something did."""
STALE_S = 300.0
"""How old an answer may be that is given while a newer one is played though nothing changed: jobs may overrun."""
PATIENCE_S = 0.1
"""How long a newer answer is waited for when there is an older one to give."""
PLAYS_MAX = 2
"""The play under way may have begun before the job came; the next one knows it."""


class Forecasts:
    """Estimates of the live jobs; at most one play is under way."""

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._made = Estimates(starts={}, basis="")
        self._made_of: tuple[State, int] | None = None
        self._made_at = float("-inf")
        self._playing: asyncio.Task[None] | None = None

    async def of(self, job: JobId) -> Estimate:
        """When a job that waits would start; unknown for one that does not wait any more."""
        for _ in range(PLAYS_MAX):
            age_s = self._clock.monotonic_s() - self._made_at
            known, same = job in self._made.starts, self._made_of == self._now_of()
            if known and same and age_s < FRESH_S:
                break
            if self._playing is None:
                self._playing = asyncio.create_task(self._play())
                self._playing.add_done_callback(_seen)
            serves = known and age_s < (STALE_S if same else FRESH_S)
            done, _ = await asyncio.wait({self._playing}, timeout=PATIENCE_S if serves else None)
            for task in done:
                task.result()
            if serves:
                break
        return self._made.of(job, self._clock.wall_s())

    def _now_of(self) -> tuple[State, int]:
        state = self._scheduler.state
        return state, state.version

    async def _play(self) -> None:
        try:
            made_of, at = self._now_of(), self._clock.monotonic_s()
            forecast = Forecast(made_of[0], self._scheduler.profile, self._clock.wall_s())
            self._made = await asyncio.to_thread(forecast.play, self._clock)
            self._made_of, self._made_at = made_of, at
        finally:
            self._playing = None


def _seen(play: asyncio.Task[None]) -> None:
    """Whoever asked may have left before the play failed."""
    if not play.cancelled():
        play.exception()
