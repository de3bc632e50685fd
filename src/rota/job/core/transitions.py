"""Which state may follow which, for jobs and instances; what docs and tests hold the machine to."""

from __future__ import annotations

from collections.abc import Mapping

from rota.spec.states import InstanceState, JobState

_J = JobState
_I = InstanceState
_ENDS = frozenset({_J.SUCCEEDED, _J.FAILED, _J.CANCELLED})
_TURNS = frozenset({_J.RECOVERING, _J.PREEMPTING, _J.STOPPING}) | _ENDS
"""From any live state: a failure, the scheduler, or a decided end; JobEnded may come from the service at any time."""

JOB: Mapping[JobState, frozenset[JobState]] = {
    _J.SUBMITTED: frozenset({_J.QUEUED, _J.ADMITTED, _J.STOPPING}) | _ENDS,
    _J.QUEUED: frozenset({_J.ADMITTED, _J.PAUSED, _J.STOPPING}) | _ENDS,
    _J.PAUSED: frozenset({_J.QUEUED, _J.ADMITTED, _J.STOPPING}) | _ENDS,
    _J.ADMITTED: frozenset({_J.CHECKING, _J.STARTING}) | _TURNS,
    _J.CHECKING: frozenset({_J.STARTING}) | _TURNS,
    _J.STARTING: frozenset({_J.RUNNING}) | _TURNS,
    _J.RUNNING: frozenset({_J.RESIZING}) | _TURNS,
    _J.RESIZING: frozenset({_J.RUNNING}) | _TURNS,
    _J.RECOVERING: frozenset({_J.STARTING, _J.RUNNING, _J.PREEMPTING, _J.STOPPING, _J.QUEUED, _J.PAUSED}) | _ENDS,
    _J.PREEMPTING: frozenset({_J.QUEUED, _J.PAUSED, _J.STOPPING}) | _ENDS,
    _J.STOPPING: _ENDS,
    **{end: frozenset[JobState]() for end in _ENDS},
}
"""A job stays in its state or goes to one of these. A restart of the whole job is RECOVERING until it is QUEUED."""

_LEAVES = frozenset({_I.PLANNED, _I.STOPPING, _I.GONE})
"""A recovery plans a new process; the end of the attempt stops what there is, or finds nothing to stop."""

INSTANCE: Mapping[InstanceState, frozenset[InstanceState]] = {
    _I.PLANNED: frozenset({_I.STARTING}) | _LEAVES,
    _I.STARTING: frozenset({_I.STALE, _I.LOST}) | _LEAVES,
    _I.STALE: frozenset({_I.READY, _I.LOST, _I.STARTING}) | _LEAVES,
    _I.READY: frozenset({_I.STALE, _I.LOST, _I.STARTING}) | _LEAVES,
    _I.SUSPECT: frozenset({_I.READY, _I.LOST}) | _LEAVES,
    _I.LOST: frozenset({_I.STARTING}) | _LEAVES,
    _I.STOPPING: frozenset({_I.GONE, _I.PLANNED}),
    _I.GONE: frozenset({_I.STALE, _I.STARTING, _I.STOPPING, _I.PLANNED}),
}
"""GONE is left when a recovery takes an instance in that had returned, or when the next attempt plans it anew."""


def allowed(before: JobState, after: JobState) -> bool:
    """True when a job may go from one state to the other in one step."""
    return before is after or after in JOB[before]


def instance_allowed(before: InstanceState, after: InstanceState) -> bool:
    """True when an instance may go from one state to the other in one step."""
    return before is after or after in INSTANCE[before]
