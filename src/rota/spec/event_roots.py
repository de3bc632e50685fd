"""The two roots of all events: facts about one job, and facts about nodes, queues, users or the installation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """A fact about one job; the log record names the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEvent:
    """A fact about nodes, queues or the installation."""
