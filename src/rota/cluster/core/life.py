"""The life of a job as the scheduler sees it: retries, preemptions, the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from rota.spec.states import JobState


class LifeEvent(StrEnum):
    """What may happen to a job."""

    ACCEPTED = "accepted"
    ADMITTED = "admitted"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PLATFORM_FAILED = "platform_failed"
    PREEMPTED = "preempted"
    RELEASED = "released"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    RESUMED = "resumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A job between submission and end. ``attempts`` counts starts; a preemption or lost node uses up no retry.

    Invariant: ``attempts = failures + platform_failures + preemptions + 1`` while it runs.
    """

    state: JobState = JobState.SUBMITTED
    retries_max: int = 0
    attempts: int = 0
    retries_used: int = 0
    platform_failures: int = 0
    preemptions: int = 0

    @property
    def holds(self) -> bool:
        """Whether the job has devices."""
        return self.state.holds_devices


_RUNNING = (
    JobState.ADMITTED,
    JobState.CHECKING,
    JobState.STARTING,
    JobState.RUNNING,
    JobState.RECOVERING,
    JobState.RESIZING,
    JobState.STOPPING,
)


def live(life: Life, event: LifeEvent) -> Life:
    """The life after an event; an event that means nothing in this state (late, twice, after the end) changes nothing.

    A failure with ``retries_used < retries_max`` queues the job again, so N retries are N + 1 attempts. A job that
    finishes before it was stopped for a preemption has finished.
    """
    if life.state.terminal:
        return life
    match life.state, event:
        case JobState.SUBMITTED, LifeEvent.ACCEPTED:
            return replace(life, state=JobState.QUEUED)
        case JobState.QUEUED, LifeEvent.ADMITTED:
            return replace(life, state=JobState.ADMITTED, attempts=life.attempts + 1)
        case ((JobState.ADMITTED | JobState.CHECKING), LifeEvent.STARTING):
            return replace(life, state=JobState.STARTING)
        case ((JobState.ADMITTED | JobState.CHECKING | JobState.STARTING), LifeEvent.RUNNING):
            return replace(life, state=JobState.RUNNING)
        case JobState.QUEUED, LifeEvent.PAUSED:
            return replace(life, state=JobState.PAUSED)
        case JobState.RUNNING, LifeEvent.PAUSED:
            return replace(life, state=JobState.PAUSED)
        case JobState.PAUSED, LifeEvent.RESUMED:
            return replace(life, state=JobState.QUEUED)
        case _, LifeEvent.CANCELLED:
            return replace(life, state=JobState.CANCELLED)
        case JobState.PREEMPTING, LifeEvent.RELEASED:
            return replace(life, state=JobState.QUEUED)
        case (state, LifeEvent.PREEMPTED) if state in _RUNNING:
            return replace(life, state=JobState.PREEMPTING, preemptions=life.preemptions + 1)
        case (state, LifeEvent.SUCCEEDED) if state in (*_RUNNING, JobState.PREEMPTING):
            return replace(life, state=JobState.SUCCEEDED)
        case (state, LifeEvent.PLATFORM_FAILED) if state in _RUNNING:
            return replace(life, state=JobState.QUEUED, platform_failures=life.platform_failures + 1)
        case (state, LifeEvent.FAILED) if state in (*_RUNNING, JobState.PREEMPTING):
            return _failed(life)
        case _:
            return life


def _failed(life: Life) -> Life:
    if life.retries_used < life.retries_max:
        return replace(life, state=JobState.QUEUED, retries_used=life.retries_used + 1)
    return replace(life, state=JobState.FAILED)
