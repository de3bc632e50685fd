"""Every life cycle as an enum with its terminal members.

The job: SUBMITTED -> QUEUED -> ADMITTED -> CHECKING -> STARTING -> RUNNING, with RUNNING <-> RECOVERING and
RESIZING, then STOPPING -> SUCCEEDED, FAILED or CANCELLED. Preemption is PREEMPTING -> QUEUED with the next attempt, a
pause PREEMPTING -> PAUSED -> QUEUED.
The instance: PLANNED -> STARTING -> STALE -> READY -> LOST, or STOPPING -> GONE.
The reservation of a gang: reserving -> reserved -> releasing; then it is gone.
The request for a gang beside those of the admission: wanted -> asked -> granted, or held -> granted; dropped when it is
not wanted any more, or not reserved.
The weights that an instance reads: STALE -> SYNCING -> SYNCED -> STALE or SUSPECT -> SYNCING; gone with the instance.
"""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """State of a job, the one used by master, scheduler, API and pages. Finer steps are a ``phase``."""

    SUBMITTED = "SUBMITTED"
    """Durable, not yet accepted by the scheduler."""
    QUEUED = "QUEUED"
    """Waits for devices; holds nothing; a reason says what binds it."""
    ADMITTED = "ADMITTED"
    """Has a placement; its devices are reserved for it; no process yet."""
    CHECKING = "CHECKING"
    """Its first processes come up, and each checks its node before any code of the job runs in it."""
    STARTING = "STARTING"
    """They are being assembled, and those that wait for them started."""
    RUNNING = "RUNNING"
    """Every instance of the gang was ready under the current epochs."""
    RECOVERING = "RECOVERING"
    """A failover is open; instances outside its scope continue."""
    RESIZING = "RESIZING"
    """A role is changing its size."""
    PREEMPTING = "PREEMPTING"
    """Asked to give its devices back; saving, then stopping; goes to QUEUED with its original queue time."""
    PAUSED = "PAUSED"
    """Stopped on purpose for a while; the reason says by whom."""
    STOPPING = "STOPPING"
    """Its end is decided; processes and reservations are being taken down."""
    SUCCEEDED = "SUCCEEDED"
    """Ended: what ``success_when`` names has ended well."""
    FAILED = "FAILED"
    """Ended: its failure contract was used up, or it could never run; a reason says which."""
    CANCELLED = "CANCELLED"
    """Ended: a user stopped it."""

    @property
    def terminal(self) -> bool:
        """True for states that are never left."""
        return self in _JOB_TERMINAL

    @property
    def holds_devices(self) -> bool:
        """True while the scheduler must count the placement of the job as used."""
        return self in _JOB_HOLDS


_JOB_TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
_JOB_HOLDS = frozenset(
    {
        JobState.ADMITTED,
        JobState.CHECKING,
        JobState.STARTING,
        JobState.RUNNING,
        JobState.RECOVERING,
        JobState.RESIZING,
        JobState.PREEMPTING,
        JobState.STOPPING,
    }
)


class InstanceState(StrEnum):
    """State of one instance as its master sees it."""

    PLANNED = "PLANNED"
    """Wanted, no process yet."""
    STARTING = "STARTING"
    """A process was asked for."""
    STALE = "STALE"
    """The process lives; its state or weights are not current, so it gets no work."""
    READY = "READY"
    """Set up under the current epoch; eligible for work."""
    LOST = "LOST"
    """Its process is known dead or fenced."""
    STOPPING = "STOPPING"
    """Asked to end."""
    GONE = "GONE"
    """Ended as asked, or returned; never comes back under this epoch."""

    @property
    def terminal(self) -> bool:
        """True when no process of this epoch can act any more."""
        return self in (InstanceState.LOST, InstanceState.GONE)


class GangState(StrEnum):
    """State of the reservation of one gang, as far as the log knows."""

    RESERVING = "reserving"
    """Granted by the scheduler; the engine was asked for it."""
    RESERVED = "reserved"
    """The engine holds it: processes may start there."""
    RELEASING = "releasing"
    """To be given back; gone once `GangReleased` is in the log."""


class AskState(StrEnum):
    """State of an ask for a gang beside those of the admission: a member that joins, or another place."""

    WANTED = "wanted"
    """`GangAsked` is not in the log yet: the scheduler does not know of it."""
    ASKED = "asked"
    """The scheduler can grant it."""
    HELD = "held"
    """Granted; its members still run on the node that they are to leave."""
    GRANTED = "granted"
    """Its members have their place there."""
    DROPPED = "dropped"
    """Not wanted any more, or not reserved; forgotten once `GangReleased` is in the log."""


class ReplicaState(StrEnum):
    """State of the weights that one instance reads over one weights edge."""

    STALE = "STALE"
    """Older than the last commit's, or none at all; loaded before the next operation."""
    SYNCING = "SYNCING"
    """A newer version is being loaded."""
    SYNCED = "SYNCED"
    """Those of the last commit that published."""
    SUSPECT = "SUSPECT"
    """Further behind than the lag of the edge allows, in versions or in seconds."""


class Level(StrEnum):
    """How wide a recovery is: one sub-graph's processes, a role, a node, or the whole job."""

    PROCESS = "process"
    """The lost process, with the sub-graph that it belongs to."""
    ROLE = "role"
    """All instances of its role."""
    NODE = "node"
    """What runs on its node, which is left."""
    JOB = "job"
    """The whole job, as a new attempt."""
