"""Play a recorded event log through the scheduler again: does it decide what was decided then?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rota.cluster.core.profile import Profile
from rota.cluster.core.state import InvariantBroken
from rota.cluster.live import RequestsOf, Scheduler
from rota.spec.events import (
    Event,
    GangGranted,
    GangWaits,
    JobAdmitted,
    JobWaits,
    PreemptAsked,
    Record,
    event_to_json,
)
from rota.spec.ids import JobId
from rota.spec.reasons import Reason

SHOWN_MAX = 100
"""Differences listed at most; all are counted."""


def replayed(records: Iterable[Record], profile: Profile, requests_of: RequestsOf) -> dict[str, Any]:
    """What happened is taken from the log; each decision in it is compared with what the profile decides there.

    A service decides at one moment and appends one decision after the other, so those of one pass are looked up in the
    outcome of that pass. A different decision counts once; the recorded one is taken for all that follows.
    """
    scheduler = Scheduler(profile, requests_of)
    open_ones: list[tuple[JobId, Event]] = []
    seen, compared, different = 0, 0, list[dict[str, Any]]()
    for record in records:
        seen += 1
        if record.job is not None and _decided(record.event):
            recorded = (record.job, _decision(record.event))
            if recorded not in open_ones:
                outcome = scheduler.decide(record.at)
                if outcome.broken:
                    raise InvariantBroken("; ".join(outcome.broken))
                open_ones = [(job, _decision(event)) for job, event in outcome.events]
            compared += 1
            if recorded in open_ones:
                open_ones.remove(recorded)
            else:
                different.append(_difference(record, open_ones))
        scheduler.apply(record)
    return {
        "profile": profile.name,
        "records": seen,
        "decisions": compared,
        "same": compared - len(different),
        "different": different[:SHOWN_MAX],
    }


def _decided(event: Event) -> bool:
    """Whether the scheduler made this event, and not the service or a user."""
    match event:
        case JobAdmitted() | GangGranted() | GangWaits():
            return True
        case PreemptAsked(reason=reason):
            return reason is not Reason.PAUSED
        case JobWaits(reason=reason):
            return reason is not Reason.ENGINE_STARTING
        case _:
            return False


def _decision(event: Event) -> Event:
    """The event without the words that explain it."""
    match event:
        case JobAdmitted():
            return replace(event, why={})
        case JobWaits():
            return replace(event, text="", fields={})
        case GangWaits():
            return replace(event, text="")
        case _:
            return event


def _difference(record: Record, here: list[tuple[JobId, Event]]) -> dict[str, Any]:
    mine = [event_to_json(event) for job, event in here if job == record.job]
    return {"number": record.number, "job": record.job, "recorded": event_to_json(record.event), "here": mine}
