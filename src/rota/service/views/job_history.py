"""JobHistory: the context of a job as its master has it, folded from the log, with times, nodes and attempts."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rota.job.core import context
from rota.job.core.context import JobContext, Loss
from rota.job.core.machine import fold, initial
from rota.job.core.placement import bindings
from rota.job.core.resize import leaves
from rota.job.core.survival import source_of
from rota.spec import events as e
from rota.spec.events import InstanceLost, JobEnded, Record
from rota.spec.gang import BundleGrant, Placement
from rota.spec.ids import Epoch, GangId, InstanceId, JobId, NodeId
from rota.spec.job import JobSpec, RoleSpec
from rota.spec.reasons import Reason
from rota.spec.resources import format_duration
from rota.spec.states import AskState, InstanceState, JobState, Level

Key = tuple[str, int]
STATE_CHANGES_MAX, DRAINS_MAX = 200, 100


@dataclass(slots=True, kw_only=True)
class InstanceHistory:
    """One member of a role: what the context says of it, with its last process, its last error and their times."""

    id: InstanceId
    now: context.InstanceRecord
    since: float = 0.0
    node: str = ""
    pid: int = 0
    start_time: float = 0.0
    error: e.InstanceLost | None = None
    error_at: float = 0.0
    works_since: float | None = None
    """When its job ran first with this start of it; None for a standby and until then."""

    @property
    def state(self) -> InstanceState:
        return self.now.state


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change after submit, with the job as asked for before and after it."""

    at: float
    by: str
    changes: dict[str, object]
    before: JobSpec
    after: JobSpec


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One admission of the job, from its devices to their return."""

    attempt: int
    epoch: Epoch
    admitted_at: float
    placement: Placement
    why: dict[str, object]
    started_at: float | None = None
    """When all of its instances were first ready."""
    downtimes: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """From when to when nothing of it ran, as service and engine were down; in order."""
    ended_at: float | None = None
    reason: Reason | None = None
    for_job: str = ""
    """Whom it made room for, when it was preempted for another job."""
    text: str = ""
    """What its reason does not say: the drain that ended it, and what was lost."""

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return self.placement.nodes

    def spans(self, begin: float, end: float) -> Iterator[tuple[float, float]]:
        """The parts of this time that are in no downtime, in order."""
        for down_at, up_at in self.downtimes:
            if begin < min(down_at, end):
                yield begin, min(down_at, end)
            begin = max(begin, up_at)
        if begin < end:
            yield begin, end


Outcome = Literal["waits", "moved", "queued", "withdrawn", "ended"]


@dataclass(slots=True, kw_only=True)
class Drain:
    """A node that the job was asked to leave by ``due_at``, in the words of who drained it, and what came of it."""

    at: float
    attempt: int
    node: NodeId
    due_at: float
    why: str
    outcome: Outcome = "waits"
    ended_at: float | None = None
    lost: str = ""
    """The work that went with it, in words; empty where nothing was lost."""
    gang: GangId | None = None
    """What was asked for in place of what is left; None: nothing yet."""
    waits_for: Reason | None = None
    """Why its instances there got no other place yet; None: not asked, or they got one."""
    granted: bool = False

    @property
    def limited(self) -> bool:
        """Whether a limit, and not the room on other nodes, keeps the job there."""
        return self.waits_for in (Reason.QUOTA_LIMIT, Reason.USER_LIMIT)

    @property
    def no_room(self) -> str:
        """Why the job did not move."""
        if self.granted:
            return "there was no time to move"
        return "a limit of its queue or user left no room elsewhere" if self.limited else "no other node had room"

    @property
    def cause(self) -> str:
        """The node and why it is drained."""
        return self._cause("is")

    def _cause(self, verb: str) -> str:
        return f"{self.node} {verb} drained" + (f" ({self.why})" if self.why else "")

    @property
    def text(self) -> str:
        """What came of it, as a sentence without its full stop."""
        came = {
            "waits": "the job must leave it",
            "moved": "its instances there moved to other nodes",
            "queued": f"{self.no_room}, so the job went back into its queue",
            "withdrawn": "the job stayed",
            "ended": "the job ended its attempt before it had to leave",
        }[self.outcome]
        lost = f" and lost {self.lost}" if self.lost else ""
        return f"{self._cause('is' if self.outcome == 'waits' else 'was')}: {came}{lost}"


@dataclass(slots=True, kw_only=True)
class Recovery:
    """One recovery: what was seen, what was decided, when everybody was ready again (``ended_at``; None: not yet).

    ``healed_by`` is the record that proved it: a commit, the end of the time that the job must run after it, or its
    success. One whose failure came again before that has healed nothing.
    ``number`` is that of the failover inside an attempt, None for a restart of the whole job.
    """

    number: int | None
    attempt: int
    level: Level
    cause: e.InstanceLost
    seen_at: float
    decided_at: float
    losses: tuple[tuple[float, e.InstanceLost], ...]
    scope: tuple[tuple[str, int, int], ...] = ()
    restore: int = 0
    moved_from: Level | None = None
    move_reason: Reason | None = None
    ended_at: float | None = None
    joined_by: int | None = None
    healed_by: int | None = None
    lost_commits: int = 0
    restored_from: str = ""
    """Where the state of commit ``restore`` was: ``memory``, ``peer``, ``checkpoint``, ``start``.

    Empty when no role had any.
    """


@dataclass(slots=True, kw_only=True)
class JobHistory:
    """Everything the log says of one job; changed by ``apply`` alone."""

    id: JobId
    submitted: e.JobSubmitted
    submitted_at: float
    ctx: JobContext
    last_number: int = 0
    since: float = 0.0
    state_changes: deque[tuple[float, JobState]] = field(default_factory=lambda: deque(maxlen=STATE_CHANGES_MAX))
    """The newest changes of its state."""
    queued_at: float | None = None
    waits: e.JobWaits | None = None
    waits_at: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)
    instances: dict[Key, InstanceHistory] = field(default_factory=dict)
    failures: list[Recovery] = field(default_factory=list)
    drains: deque[Drain] = field(default_factory=lambda: deque(maxlen=DRAINS_MAX))
    """The newest nodes that it was asked to leave."""
    unclaimed: list[tuple[float, e.InstanceLost]] = field(default_factory=list)
    master: e.MasterStarted | None = None
    master_at: float = 0.0
    commit: e.Committed | None = None
    commit_at: float = 0.0
    saved_at: float = 0.0
    """When all work was last saved: by a commit, or by a checkpoint of a job without a loop."""
    saved_at_boundary: bool = False
    """True when members may leave their node since just then, not since the end of the notice of a drain."""
    stop: e.StopAsked | None = None
    preempt: e.PreemptAsked | None = None
    edits: list[Edit] = field(default_factory=list)
    upload: e.UploadEnded | None = None
    ended: e.JobEnded | None = None
    ended_at: float | None = None
    ran_on: dict[NodeId, set[InstanceId]] = field(default_factory=dict)
    """Every node that had a process of the job, with the instances that it had."""

    @property
    def state(self) -> JobState:
        return self.ctx.state

    @property
    def seq(self) -> int:
        """Number of the last record inside the job."""
        return self.ctx.seq

    @property
    def spec(self) -> JobSpec:
        """The job as it is now: completed by inspection, with every change applied."""
        return self.ctx.spec or self.submitted.spec

    @property
    def version(self) -> int:
        """Counts the edits, from 1: what ``If-Match`` of a change is compared with."""
        return 1 + len(self.edits)

    @property
    def commits(self) -> tuple[int, ...]:
        """Commits at which the job can enter again: 0 is its start; the last one lies in memory alone until it ends."""
        last = () if self.ended else (self.ctx.committed,)
        return tuple(sorted({0, *(one.n for one in self.ctx.checkpoints), *last}))

    @property
    def queue(self) -> str:
        return self.spec.queue

    @property
    def priority(self) -> int:
        return self.spec.priority

    @property
    def placement(self) -> Placement | None:
        """Where the present attempt runs, or the last one of a job that ended, without the places that it left.

        Empty between two attempts and while the output is uploaded: the job holds nothing then.
        A bundle counts while a member of it has its place there, or has not gone from there yet.
        """
        ctx = self.ctx
        if self.ended is None and self.between_attempts:
            return Placement(gangs=())
        if not self.attempts or ctx.placement is None or not ctx.gangs:
            return self.attempts[-1].placement if self.attempts else None
        there, used = {gang.id for gang in ctx.gangs}, self._used()
        grants = [grant for grant in ctx.placement.gangs if grant.gang in there]
        return Placement(
            gangs=tuple(
                replace(grant, bundles=tuple(one for one in grant.bundles if (grant.gang, one.index) in used))
                for grant in grants
            )
        )

    def _used(self) -> set[tuple[GangId, int]]:
        """Gang and bundle of every place that a member has, is to have, or has not gone from yet."""
        ctx = self.ctx
        assert ctx.placement is not None
        used = {(gang, bundle.index) for gang, bundle in ctx.bound.values()}
        used |= {
            (ask.gang, i) for ask in ctx.asks if ask.state is not AskState.GRANTED for i in range(len(ask.members))
        }
        going = {one.id for one in ctx.instances.values() if one.terminating}
        if going:
            first = bindings(self.spec, ctx.placement)
            used |= {(gang, bundle.index) for member, (gang, bundle) in first.items() if member in going}
            used |= {(ask.gang, i) for ask in ctx.asks for i, who in enumerate(ask.members) if going.intersection(who)}
        return used

    @property
    def started_at(self) -> float | None:
        """When the job first ran."""
        return next((attempt.started_at for attempt in self.attempts if attempt.started_at is not None), None)

    @property
    def master_is_current(self) -> bool:
        """True when a master took the present attempt."""
        return bool(self.attempts) and self.master is not None and self.master_at >= self.attempts[-1].admitted_at

    @property
    def between_attempts(self) -> bool:
        """True once the last attempt is over: its processes are gone and its devices given back."""
        return bool(self.attempts) and self.attempts[-1].ended_at is not None

    @property
    def holds_nothing(self) -> bool:
        """True before the first attempt, and between two of a job that keeps no tensors and uploads no output."""
        keeps = self.ctx.shares_tensors or self.spec.output_url is not None
        return not self.attempts or (self.between_attempts and not keeps)

    def bundle_of(self, one: InstanceId) -> BundleGrant | None:
        """Where the present attempt, or the last one of a job that ended, has put an instance."""
        there = self.placement
        found = self.ctx.bound or (bindings(self.spec, there) if there is not None and there.gangs else {})
        return found[one][1] if one in found else None

    def gives_all_back(self, at: float, event: e.PreemptAsked) -> bool:
        """True when it is asked for everything, or cannot continue without the gang that it was asked for then."""
        return event.gang is None or (at, JobState.PREEMPTING) in self.state_changes

    def apply(self, record: Record) -> None:
        """Take in one record of this job, in order. A record that was applied before changes nothing."""
        if record.seq <= self.seq:
            return
        before, ended = self.ctx, self.ended is not None
        self.ctx, self.last_number = fold(self.ctx, record), record.number
        if ended:
            return
        if self.ctx.state is not before.state:
            self.since = record.at
            self.state_changes.append((record.at, self.ctx.state))
        self._note(record.at, before, record.event)
        self._follow_instances(record.at, before, record.event)
        self._follow_drains(record.at, before, record.event)
        self._follow_work(record.at, before, record.event)
        self._follow_attempts(record.at, before, record.event)
        self._follow_recovery(record.at, before, record.event)
        self._follow_healing(record, before)

    def _note(self, at: float, before: JobContext, event: e.Event) -> None:
        match event:
            case e.JobChanged(by=by, changes=changes):
                old = before.next_spec or before.spec or self.submitted.spec
                new = self.ctx.next_spec or self.spec
                self.edits.append(Edit(at=at, by=by, changes=changes, before=old, after=new))
            case e.JobQueued():
                self.queued_at, self.preempt = self.queued_at or at, None
            case e.JobWaits():
                self.waits, self.waits_at = event, at
            case e.StopAsked():
                self.stop = event
            case e.UploadEnded():
                self.upload = event
            case e.PreemptAsked() if self.gives_all_back(at, event):
                self.preempt = event
            case e.MasterStarted():
                self.master, self.master_at, self.waits = event, at, None
            case e.Committed() if event.n == self.ctx.committed:
                self.commit, self.commit_at = event, at
            case _:
                pass

    def _follow_work(self, at: float, before: JobContext, event: e.Event) -> None:
        ctx = self.ctx
        match event:
            case e.FailoverStarted() if ctx.open_failover == event.failover != before.open_failover:
                for role, rank, _ in event.scope:
                    if (one := self.instances.get((role, rank))) is not None:
                        one.works_since = None
            case e.JobRequeued():
                for one in self.instances.values():
                    one.works_since = None
            case e.Committed() if ctx.committed == event.n > before.committed:
                self.saved_at, self.saved_at_boundary = at, ctx.boundary
            case e.CheckpointSaved() if ctx.plan.loop is None:
                self.saved_at, self.saved_at_boundary = at, ctx.boundary
            case _ if not before.boundary and ctx.boundary:
                self.saved_at_boundary = False
            case _:
                pass
        if ctx.state is JobState.RUNNING is not before.state:
            for one in self.instances.values():
                if one.works_since is None and not one.now.spare:
                    one.works_since = at

    def _follow_instances(self, at: float, before: JobContext, event: e.Event) -> None:
        if self.ctx.instances is before.instances:
            return
        for one in self.ctx.instances.values():
            key = (one.id.role, one.id.rank)
            known = self.instances.setdefault(key, InstanceHistory(id=one.id, now=one, since=at))
            old, known.now = known.now, one
            if one.state is not old.state:
                known.since = at
            if one.process is not None and one.process.pid:
                process = one.process
                known.node, known.pid, known.start_time = process.node, process.pid, process.start_time
                self.ran_on.setdefault(process.node, set()).add(one.id)
            if one.error is not None and one.error is not old.error:
                known.error, known.error_at = _reported(one.error, event), at
                self.unclaimed.append((at, known.error))
        for key in self.instances.keys() - {(one.role, one.rank) for one in self.ctx.instances}:
            del self.instances[key]

    def _follow_drains(self, at: float, before: JobContext, event: e.Event) -> None:
        match event:
            case e.MoveAsked() if before.ending is not None:
                pass  # what ends the attempt is decided
            case e.MoveAsked(node=node, due_at=float(due_at)):
                self._end_drains(at, "withdrawn", node)  # the same node, by another time or for another reason
                self.drains.append(Drain(at=at, attempt=self.ctx.attempt, node=node, due_at=due_at, why=event.text))
            case e.MoveAsked(node=node):
                self._end_drains(at, "withdrawn", node)
            case e.GangAsked(request=request) if (due := self.drain("waits")) is not None:
                if any(one.gang == request.gang and leaves(self.ctx, one) for one in self.ctx.asks):
                    due.gang = request.gang
            case e.GangWaits(gang=gang, reason=reason) if (due := self.drain("waits")) and due.gang == gang:
                due.granted, due.waits_for = False, reason
            case e.GangGranted(gang=gang) if (due := self.drain("waits")) and due.gang == gang:
                due.granted, due.waits_for = True, None
            case e.FailoverStarted(reason=Reason.MIGRATED_DRAIN) if self.ctx.open_failover != before.open_failover:
                node = before.bundle(InstanceId(event.role, event.rank))[1].node
                moved = {(role, rank) for role, rank, _ in event.scope}
                at_once = before.boundary and self.saved_at_boundary
                self._end_drains(at, "moved", node, "" if at_once else self.at_stake(before, at, moved))
            case e.RolledBack(from_commit=old, to_commit=new) if new < old and before.failover is not None:
                if before.failover.cause.reason is Reason.MIGRATED_DRAIN and (left := self.drain("moved")) is not None:
                    commits = f"commit {old}" if old == new + 1 else f"commits {new + 1} to {old}"
                    left.lost = f"{left.lost}, and {commits}" if left.lost else commits
            case e.JobRequeued(reason=Reason.MIGRATED_DRAIN):
                if (due := self.drain("waits")) is not None:
                    self._end_drains(at, "queued", due.node, self.at_stake(before, at))
                self._end_drains(at, "ended")
            case e.JobRequeued() | e.JobEnded():
                self._end_drains(at, "ended")
            case _:
                pass

    def _end_drains(self, at: float, outcome: Outcome, node: NodeId | None = None, lost: str = "") -> None:
        for one in self.drains:
            if one.outcome == "waits" and node in (None, one.node):
                one.outcome, one.ended_at, one.lost = outcome, at, lost

    def drain(self, outcome: Outcome) -> Drain | None:
        """Of the drains of this attempt with this outcome the last that ended; of those yet open, the first due."""
        found = (one for one in self.drains if one.outcome == outcome and one.attempt == self.ctx.attempt)
        return max(found, key=lambda one: (one.ended_at or 0.0, -one.due_at), default=None)

    def at_stake(self, ctx: JobContext, at: float, members: Collection[Key] | None = None) -> str:
        """The work of these members (None: of all) that nothing has saved, in words; empty where they hold none.

        None is held before the job runs, for ``fail: {state: none}``, and beside a loop by who has no state.
        """
        roles = {role.name for role in self.spec.roles if _holds_work(ctx, role)}
        ours = (one for key, one in self.instances.items() if key[0] in roles and (members is None or key in members))
        begun = [one.works_since for one in ours if one.works_since is not None]
        if not begun:
            return ""
        since, by_hand = max(min(begun), self.saved_at), self.saved_at > min(begun)
        last = f"since commit {ctx.committed}" if ctx.committed else "since its last checkpoint"
        saved = last if ctx.committed or by_hand else "(no commit or checkpoint)"
        return f"{format_duration(at - since)} of work {saved}"

    def _follow_attempts(self, at: float, before: JobContext, event: e.Event) -> None:
        match event:
            case e.JobAdmitted(attempt=attempt) if attempt == len(self.attempts) + 1:
                self.attempts.append(
                    Attempt(
                        attempt=attempt,
                        epoch=event.epoch,
                        admitted_at=at,
                        placement=event.placement,
                        why=dict(event.why),
                    )
                )
                self.waits = None
            case e.JobRequeued(reason=reason):
                self._close_attempt(at, reason)
                if self.attempts and reason is Reason.MIGRATED_DRAIN and (left := self.drain("queued")) is not None:
                    self.attempts[-1].text = left.text
                self._restarted(at, before, event)
                if self.attempts and self.preempt is not None and self.preempt.reason is reason:
                    self.attempts[-1].for_job = self.preempt.for_job
                self.preempt = None
            case e.DowntimePassed(since=since) if self.attempts and self.attempts[-1].ended_at is None:
                self.attempts[-1].downtimes.append((since, at))
            case e.UploadStarted() if before.ending is not None:
                self._close_attempt(at, before.ending.reason)
            case e.JobEnded(reason=reason):
                self._close_attempt(at, reason)
                self.ended, self.ended_at = event, at
            case _:
                pass
        if self.state is JobState.RUNNING and self.attempts and self.attempts[-1].started_at is None:
            self.attempts[-1].started_at = at

    def _close_attempt(self, at: float, reason: Reason) -> None:
        if self.attempts and self.attempts[-1].ended_at is None:
            self.attempts[-1].ended_at, self.attempts[-1].reason = at, reason

    def _restarted(self, at: float, before: JobContext, event: e.JobRequeued) -> None:
        """The attempt ended by failures and the job waits for its next one: a recovery at the level of the job."""
        if not self.unclaimed:
            return
        blamed = (before.ending.role, before.ending.rank) if before.ending is not None else ()
        losses = [one for _, one in self.unclaimed]
        cause = next((one for one in losses if (one.role, one.rank) == blamed), losses[0])
        self._open(at, cause, attempt=event.attempt, restore=self.ctx.committed)

    def _follow_recovery(self, at: float, before: JobContext, event: e.Event) -> None:
        match event:
            case e.FailoverStarted(reason=Reason.RESIZED | Reason.MIGRATED_DRAIN):
                pass  # a size or a place that was asked for is not a failure
            case e.FailoverStarted() if self.ctx.open_failover == event.failover != before.open_failover:
                self._open(
                    at,
                    _loss(event, epoch=self.unclaimed[0][1].epoch if self.unclaimed else Epoch(0)),
                    attempt=self.ctx.attempt,
                    number=event.failover,
                    level=event.level,
                    scope=event.scope,
                    restore=event.restore,
                    moved_from=event.moved_from,
                    move_reason=event.move_reason,
                )
            case e.RolledBack(from_commit=old, to_commit=new):
                if before.open_failover is None and new < old and before.resume_from is None:
                    self._came_back_without(at, event)
                if self.failures and self.failures[-1].ended_at is None:
                    last = self.failures[-1]
                    last.restore, last.restored_from = new, source_of(before, new)
                    last.lost_commits += max(0, old - new)
            case _:
                pass
        if self.state is JobState.RUNNING and before.state is not JobState.RUNNING:
            for failure in self.failures:
                failure.ended_at = failure.ended_at or at

    def _follow_healing(self, record: Record, before: JobContext) -> None:
        proven = before.heals_s is not None and self.ctx.heals_s is None
        if proven or (isinstance(record.event, JobEnded) and record.event.state is JobState.SUCCEEDED):
            for failure in self.failures:
                if failure.ended_at is not None and failure.healed_by is None:
                    failure.healed_by = record.seq

    def healed_with(self, record: Record) -> list[Recovery]:
        """The recoveries that this record proved."""
        return [one for one in self.failures if one.healed_by == record.seq]

    def _came_back_without(self, at: float, event: e.RolledBack) -> None:
        """A new attempt begins where the last commit is not at hand: its cost belongs to what ended the one before."""
        ended = next((one for one in reversed(self.attempts) if one.ended_at is not None), None)
        if ended is None or ended.reason is None or (self.failures and self.failures[-1].ended_at is None):
            return
        first = next(iter(self.ctx.instances.values()))
        text = f"commit {event.from_commit} was only in the memory of other hosts"
        cause = e.InstanceLost(
            role=first.id.role, rank=first.id.rank, epoch=first.epoch, reason=ended.reason, text=text
        )
        self._open(at, cause, attempt=ended.attempt, seen_at=ended.ended_at or at, losses=())

    def _open(self, at: float, cause: e.InstanceLost, **more: Any) -> None:
        """A recovery begins: by default of the whole job, by the losses that none has begun for."""
        for earlier in self.failures:
            if earlier.ended_at is None and earlier.joined_by is None:
                earlier.joined_by = len(self.failures) + 1
        every = tuple((one.id.role, one.id.rank, one.now.epoch) for one in self.instances.values())
        seen_at = self.unclaimed[0][0] if self.unclaimed else at
        given: dict[str, Any] = {"number": None, "level": Level.JOB, "seen_at": seen_at, "scope": every, **more}
        self.failures.append(Recovery(cause=cause, decided_at=at, **{"losses": tuple(self.unclaimed), **given}))
        self.unclaimed.clear()


def _holds_work(ctx: JobContext, role: RoleSpec) -> bool:
    """True where work is lost with a process: beside a loop only what it or a role with state does, or a command."""
    if "none" in role.fail.state:
        return False
    plan = ctx.plan
    return plan.loop in (None, role.name) or role.name in plan.stateful or role.run is not None


def _loss(said: e.FailoverStarted | e.JobEnded, *, epoch: Epoch) -> e.InstanceLost:
    """The loss that a decision names."""
    assert said.role is not None, "the decision is about an instance"
    return e.InstanceLost(
        role=said.role, rank=said.rank or 0, epoch=epoch, reason=said.reason, text=said.text, traceback=said.traceback
    )


def _reported(loss: Loss, event: e.Event) -> e.InstanceLost:
    """The loss with all that was reported of it (exit code, signal), when ``event`` is its report."""
    who = loss.instance
    if isinstance(event, e.InstanceLost) and (event.role, event.rank) == (who.role, who.rank):
        return event
    return e.InstanceLost(
        role=who.role,
        rank=who.rank,
        epoch=loss.epoch,
        reason=loss.reason,
        text=loss.text,
        traceback=loss.traceback,
    )


def begin_history(record: Record) -> JobHistory:
    """The job that starts with a JobSubmitted record. Raises ValueError for another event."""
    event = record.event
    if not isinstance(event, e.JobSubmitted) or record.job is None:
        raise ValueError(f"a job begins with JobSubmitted, not with {type(event).__name__}")
    return JobHistory(
        id=record.job,
        submitted=event,
        submitted_at=record.at,
        ctx=fold(initial(record.job), record),
        last_number=record.number,
        since=record.at,
    )


Losses = Sequence[tuple[float, InstanceLost]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """An instance (a role alone where no instance was started yet), and how and when it was lost."""

    instance: str
    at: float
    loss: InstanceLost


def culprit_of(job: JobHistory, *, attempt: int | None = None) -> Culprit | None:
    """Who failed so that the others did: the root cause on which the master decided.

    Of a failed job it is the one that its end names, and None where the end names none (a time limit). Of others it is
    the cause of the first recovery, or of one ``attempt``; before one began, the first loss.
    """
    ended = job.ended
    if ended is not None and ended.state is JobState.FAILED and attempt in (None, len(job.attempts)):
        return _of_end(job, ended)
    first = next((one for one in job.failures if attempt in (None, one.attempt)), None)
    if first is not None:
        return _found(first.losses, first.cause, first.seen_at)
    return _found(job.unclaimed, job.unclaimed[0][1], job.unclaimed[0][0]) if job.unclaimed else None


def culprit_of_recovery(failure: Recovery) -> Culprit:
    """The same of one recovery."""
    return _found(failure.losses, failure.cause, failure.seen_at)


def _of_end(job: JobHistory, ended: JobEnded) -> Culprit | None:
    if ended.role is None:
        return None
    losses = [one for failure in job.failures for one in failure.losses] + job.unclaimed
    cause = _loss(ended, epoch=Epoch(0))
    if ended.rank is None:
        return Culprit(instance=ended.role, at=job.ended_at or 0.0, loss=cause)
    return _found(losses[::-1], cause, job.ended_at or 0.0)


def _found(losses: Losses, cause: InstanceLost, at: float) -> Culprit:
    """The loss of that instance with all that was reported of it, else what the decision says."""
    place = (cause.role, cause.rank)
    when, loss = next(((at, one) for at, one in losses if (one.role, one.rank) == place), (at, cause))
    return Culprit(instance=f"{loss.role}/{loss.rank}", at=when, loss=loss)
