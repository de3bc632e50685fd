"""Remove the logs and traces of jobs that ended long ago; what the event log, specs and outputs hold stays."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterable, Mapping

from rota.runtime.clock import Clock
from rota.runtime.environ import Home
from rota.service.views.story import JobStory
from rota.spec.ids import JobId

PERIOD_S = 3600.0
DAY_S = 86_400.0

_log = logging.getLogger("rota.service")


def old_jobs(jobs: Mapping[JobId, JobStory], *, now: float, kept_days: float) -> list[JobId]:
    """Jobs that ended more than so many days before ``now``; none for 0 days, which keeps logs for ever."""
    if not kept_days:
        return []
    since = now - kept_days * DAY_S
    return [one.id for one in jobs.values() if one.ended_at is not None and one.ended_at < since]


def remove_logs(home: Home, jobs: Iterable[JobId]) -> int:
    """How many jobs lost their logs now. What cannot be removed is told, and tried again the next time; blocks."""
    removed = 0
    for job in jobs:
        dirs = home.job(job)
        there = [path for path in (dirs.logs, dirs.spans) if path.is_dir()]
        for path in there:
            try:
                shutil.rmtree(path)
            except OSError as error:
                _log.warning("the logs of %s stay: %s", job, error)
        removed += bool(there)
    return removed


async def keep_logs(jobs: Mapping[JobId, JobStory], home: Home, clock: Clock, kept_days: float) -> None:
    """Until cancelled: look once an hour."""
    while kept_days:
        old = old_jobs(jobs, now=clock.wall_s(), kept_days=kept_days)
        if removed := await asyncio.to_thread(remove_logs, home, old):
            _log.info("removed the logs of %s jobs that ended %g days ago", removed, kept_days)
        await clock.sleep(PERIOD_S)
