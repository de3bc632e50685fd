"""The story of one job: what its events say of its state, its instances, its attempts and its failures."""

from __future__ import annotations

from dataclasses import dataclass, field

from rota.job.core.placement import requests_of
from rota.spec import events as e
from rota.spec.events import Record
from rota.spec.gang import BundleGrant
from rota.spec.ids import Epoch, InstanceId, JobId, RoleName
from rota.spec.job import JobSpec
from rota.spec.placement import Placement
from rota.spec.reasons import Reason
from rota.spec.states import InstanceState, JobState, Level

Key = tuple[str, int]
NO_EPOCH = Epoch(0)


@dataclass(slots=True, kw_only=True)
class Instance:
    """One member of a role as the log knows it. ``restarts`` counts its processes after the first of the job."""

    role: str
    rank: int
    state: InstanceState = InstanceState.PLANNED
    epoch: Epoch = NO_EPOCH
    node: str = ""
    pid: int = 0
    start_time: float = 0.0
    processes: int = 0
    since: float = 0.0
    restored: int = 0
    error: e.InstanceLost | None = None
    error_at: float = 0.0

    @property
    def restarts(self) -> int:
        return max(0, self.processes - 1)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One admission of the job, from its devices to their return."""

    attempt: int
    epoch: Epoch
    admitted_at: float
    placement: Placement
    why: dict[str, object]
    running_at: float | None = None
    ended_at: float | None = None
    reason: Reason | None = None


@dataclass(slots=True, kw_only=True)
class Failure:
    """One recovery: what was seen, what was decided, when it was over. ``ended_at`` is None while it is open."""

    started: e.FailoverStarted
    attempt: int
    seen_at: float
    decided_at: float
    losses: tuple[tuple[float, e.InstanceLost], ...]
    ended_at: float | None = None
    joined_by: int | None = None
    lost_commits: int = 0


@dataclass(slots=True, kw_only=True)
class JobStory:
    """Everything the log says of one job; changed by ``apply`` alone."""

    id: JobId
    submitted: e.JobSubmitted
    submitted_at: float
    spec: JobSpec
    seq: int = 0
    last_number: int = 0
    state: JobState = JobState.SUBMITTED
    since: float = 0.0
    queued_at: float | None = None
    waits: e.JobWaits | None = None
    waits_at: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)
    instances: dict[Key, Instance] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    unclaimed: list[tuple[float, e.InstanceLost]] = field(default_factory=list)
    master: e.MasterStarted | None = None
    master_at: float = 0.0
    commit: e.Committed | None = None
    commit_at: float = 0.0
    checkpoint: e.CheckpointSaved | None = None
    stop: e.StopAsked | None = None
    preempt: e.PreemptAsked | None = None
    changes: list[tuple[float, e.JobChanged]] = field(default_factory=list)
    fenced_writes: int = 0
    ended: e.JobEnded | None = None
    ended_at: float | None = None

    @property
    def placement(self) -> Placement | None:
        """Where the present or last attempt runs."""
        return self.attempts[-1].placement if self.attempts else None

    @property
    def running_at(self) -> float | None:
        """When the job first ran."""
        return next((attempt.running_at for attempt in self.attempts if attempt.running_at is not None), None)

    @property
    def priority(self) -> int:
        """The priority now: that of the spec unless it was changed."""
        changed = [change.changes["priority"] for _, change in self.changes if "priority" in change.changes]
        return int(changed[-1]) if changed else self.spec.priority

    @property
    def queue(self) -> str:
        """The queue now: that of the spec unless it was changed."""
        changed = [change.changes["queue"] for _, change in self.changes if "queue" in change.changes]
        return str(changed[-1]) if changed else self.spec.queue

    @property
    def master_is_current(self) -> bool:
        """True when a master took the present attempt."""
        return bool(self.attempts) and self.master is not None and self.master_at >= self.attempts[-1].admitted_at

    def bundle_of(self, role: str, rank: int) -> BundleGrant | None:
        """Where the present or last attempt has put an instance."""
        if self.placement is None:
            return None
        wanted = InstanceId(RoleName(role), rank)
        for request in requests_of(self.spec):
            for bundle in request.bundles:
                if wanted in bundle.members:
                    grant = next((one for one in self.placement.gangs if one.gang == request.gang), None)
                    return None if grant is None else grant.bundles[bundle.index]
        return None

    def apply(self, record: Record) -> None:
        """Take in one record of this job, in order. A record that was applied before changes nothing."""
        if record.seq <= self.seq:
            return
        self.seq, self.last_number = record.seq, record.number
        if self.ended is None:
            self._scheduling(record.at, record.event)
            self._instances(record.at, record.event)
            self._recovery(record.at, record.event)

    def _move(self, state: JobState, at: float) -> None:
        if state is not self.state:
            self.state, self.since = state, at

    def _scheduling(self, at: float, event: e.Event) -> None:
        match event:
            case e.JobQueued():
                self.spec = event.spec or self.spec
                self.queued_at = at
                self._move(JobState.QUEUED, at)
            case e.JobWaits():
                self.waits, self.waits_at = event, at
            case e.JobAdmitted():
                self._admitted(at, event)
            case e.StopAsked():
                self.stop = event
                if self.state.holds_devices:
                    self._move(JobState.STOPPING, at)
            case e.PreemptAsked():
                self.preempt = event
                self._move(JobState.PREEMPTING, at)
            case e.JobChanged():
                self.changes.append((at, event))
            case e.JobRequeued():
                self._close_attempt(at, event.reason)
                self.preempt = None
                self._move(JobState.QUEUED, at)
            case e.JobEnded():
                self._close_attempt(at, event.reason)
                self.ended, self.ended_at = event, at
                self._move(event.state, at)
            case _:
                pass

    def _admitted(self, at: float, event: e.JobAdmitted) -> None:
        attempt = Attempt(
            attempt=event.attempt, epoch=event.epoch, admitted_at=at, placement=event.placement, why=dict(event.why)
        )
        self.attempts.append(attempt)
        self.waits = None
        self._move(JobState.ADMITTED, at)
        for role in self.spec.roles:
            for rank in range(role.replicas_min):
                known = self.instances.setdefault((role.name, rank), Instance(role=role.name, rank=rank))
                known.state, known.since, known.node, known.pid = InstanceState.PLANNED, at, "", 0

    def _close_attempt(self, at: float, reason: Reason) -> None:
        if self.attempts and self.attempts[-1].ended_at is None:
            self.attempts[-1].ended_at, self.attempts[-1].reason = at, reason

    def _instances(self, at: float, event: e.Event) -> None:
        match event:
            case e.GangReserved() if self.state is JobState.ADMITTED:
                self._move(JobState.STARTING, at)
            case e.InstanceStarted():
                if instance := self._current(event.role, event.rank, event.epoch):
                    instance.node, instance.pid, instance.start_time = event.node, event.pid, event.start_time
                    instance.processes += 1
                    self._turn(instance, InstanceState.STALE, at)
                if self.state is JobState.ADMITTED:
                    self._move(JobState.STARTING, at)
            case e.InstanceReady():
                if instance := self._current(event.role, event.rank, event.epoch):
                    instance.restored = event.restored
                    self._turn(instance, InstanceState.READY, at)
                self._maybe_running(at)
            case e.InstanceLost():
                if instance := self._current(event.role, event.rank, event.epoch):
                    instance.error, instance.error_at = event, at
                    self._turn(instance, InstanceState.STALE if event.alive else InstanceState.LOST, at)
                    self.unclaimed.append((at, event))
            case e.InstanceEnded() | e.InstanceStopped():
                if instance := self._current(event.role, event.rank, event.epoch):
                    self._turn(instance, InstanceState.GONE, at)
            case e.ProgressStalled():
                if instance := self._current(event.role, event.rank, event.epoch):
                    self._turn(instance, InstanceState.SUSPECT, at)
            case _:
                pass

    def _current(self, role: str, rank: int, epoch: Epoch) -> Instance | None:
        """The instance, unless ``epoch`` is an older one of it; a newer one is taken over."""
        instance = self.instances.setdefault((role, rank), Instance(role=role, rank=rank))
        if epoch < instance.epoch:
            return None
        instance.epoch = epoch
        return instance

    def _turn(self, instance: Instance, state: InstanceState, at: float) -> None:
        instance.state, instance.since = state, at

    def _maybe_running(self, at: float) -> None:
        settled = (InstanceState.READY, InstanceState.GONE)
        if self.state is JobState.STARTING and all(i.state in settled for i in self.instances.values()):
            self.attempts[-1].running_at = at
            self._move(JobState.RUNNING, at)

    def _recovery(self, at: float, event: e.Event) -> None:
        match event:
            case e.MasterStarted():
                self.master, self.master_at, self.waits = event, at, None
            case e.Committed():
                self.commit, self.commit_at = event, at
            case e.CheckpointSaved():
                self.checkpoint = event
            case e.FencedWrite():
                self.fenced_writes += event.count
            case e.FailoverStarted():
                self._failover_started(at, event)
            case e.RolledBack() if self.failures:
                self.failures[-1].lost_commits += max(0, event.from_commit - event.to_commit)
            case e.FailoverEnded():
                for failure in self.failures:
                    if failure.ended_at is None and failure.started.failover <= event.failover:
                        failure.ended_at = at
                if self.state is JobState.RECOVERING:
                    self._move(JobState.RUNNING, at)
            case _:
                pass

    def _failover_started(self, at: float, event: e.FailoverStarted) -> None:
        for failure in self.failures:
            if failure.ended_at is None and failure.joined_by is None:
                failure.joined_by = event.failover
        seen_at = self.unclaimed[0][0] if self.unclaimed else at
        self.failures.append(
            Failure(
                started=event,
                attempt=self.attempts[-1].attempt if self.attempts else 0,
                seen_at=seen_at,
                decided_at=at,
                losses=tuple(self.unclaimed),
            )
        )
        self.unclaimed.clear()
        if event.level is not Level.JOB and self.state in (JobState.RUNNING, JobState.STARTING):
            self._move(JobState.RECOVERING, at)
        for role, rank, epoch in event.scope:
            instance = self.instances.setdefault((role, rank), Instance(role=role, rank=rank))
            alive = instance.state not in (InstanceState.LOST, InstanceState.GONE)
            instance.epoch = epoch
            self._turn(instance, InstanceState.STALE if alive else InstanceState.STARTING, at)


def begin_story(record: Record) -> JobStory:
    """The story that starts with a JobSubmitted record. Raises ValueError for another event."""
    event = record.event
    if not isinstance(event, e.JobSubmitted) or record.job is None:
        raise ValueError(f"a job begins with JobSubmitted, not with {type(event).__name__}")
    return JobStory(
        id=record.job,
        submitted=event,
        submitted_at=record.at,
        spec=event.spec,
        seq=record.seq,
        last_number=record.number,
        since=record.at,
    )
