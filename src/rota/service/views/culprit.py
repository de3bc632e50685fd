"""Whose failure it was: the one answer that the command line, every tab of the page and the lists of failures show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rota.service.views.story import Failure, JobStory
from rota.spec.events import InstanceLost, JobEnded
from rota.spec.ids import Epoch
from rota.spec.states import JobState

Losses = Sequence[tuple[float, InstanceLost]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """An instance (a role alone where no instance was started yet), and how and when it was lost."""

    instance: str
    at: float
    loss: InstanceLost


def culprit_of(story: JobStory, *, attempt: int | None = None) -> Culprit | None:
    """Who failed so that the others did: the root cause on which the master decided.

    Of a failed job it is the one that its end names, and None where the end names none (a time limit). Of others it is
    the cause of the first recovery, or of one ``attempt``; before one began, the first loss.
    """
    ended = story.ended
    if ended is not None and ended.state is JobState.FAILED and attempt in (None, len(story.attempts)):
        return _of_end(story, ended)
    first = next((one for one in story.failures if attempt in (None, one.attempt)), None)
    if first is not None:
        return _found(first.losses, first.cause, first.seen_at)
    return _found(story.unclaimed, story.unclaimed[0][1], story.unclaimed[0][0]) if story.unclaimed else None


def culprit_in(failure: Failure) -> Culprit:
    """The same of one recovery."""
    return _found(failure.losses, failure.cause, failure.seen_at)


def _of_end(story: JobStory, ended: JobEnded) -> Culprit | None:
    if ended.role is None:
        return None
    losses = [one for failure in story.failures for one in failure.losses] + story.unclaimed
    cause = InstanceLost(
        role=ended.role,
        rank=ended.rank or 0,
        epoch=Epoch(0),
        reason=ended.reason,
        text=ended.text,
        traceback=ended.traceback,
    )
    if ended.rank is None:
        return Culprit(instance=ended.role, at=story.ended_at or 0.0, loss=cause)
    return _found(losses[::-1], cause, story.ended_at or 0.0)


def _found(losses: Losses, cause: InstanceLost, at: float) -> Culprit:
    """The loss of that instance with all that was reported of it, else what the decision says."""
    place = (cause.role, cause.rank)
    when, loss = next(((at, one) for at, one in losses if (one.role, one.rank) == place), (at, cause))
    return Culprit(instance=f"{loss.role}/{loss.rank}", at=when, loss=loss)
