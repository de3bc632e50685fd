"""What must hold after every record of the log, and at the end of a run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from rota.job.core.context import JobContext
from rota.job.core.desired import timers
from rota.job.core.failover import PLATFORM
from rota.job.core.ledger import uids_of
from rota.job.core.machine import accepts_commit, fold, initial
from rota.job.core.repetition import SECONDARY_TEXTS
from rota.job.core.survival import WEIGHTS, keepers
from rota.spec.events import (
    Committed,
    FailoverStarted,
    GangGranted,
    GangReleased,
    InstanceLost,
    InstanceReady,
    InstanceStarted,
    JobAdmitted,
    JobEnded,
    JobQueued,
    JobRequeued,
    JobSubmitted,
    MasterStarted,
    NodeJoined,
    NodeMarked,
    PreemptAsked,
    ProgressStalled,
    Reattached,
    Record,
    RolledBack,
    StopAsked,
    TimerFired,
)
from rota.spec.gang import Grant, Placement
from rota.spec.ids import Epoch, InstanceId, JobId, NodeId
from rota.spec.job import After
from rota.spec.reasons import Reason
from rota.spec.resources import Health
from rota.spec.states import GangState, InstanceState, JobState
from tests.world.bodies import Store

GRACE_S = 10.0
"""Enough for a step and the disk, whatever the simulated calls take."""


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass(slots=True)
class Checkers:
    """Sees every record as it is written; keeps a shadow context of each job, replayed from the log alone."""

    capacity: dict[NodeId, float]
    store: Store = field(default_factory=Store)
    shadows: dict[JobId, JobContext] = field(default_factory=dict[JobId, JobContext])
    snapshots: dict[JobId, dict[str, Any]] = field(default_factory=dict[JobId, dict[str, Any]])
    holding: dict[JobId, Placement] = field(default_factory=dict[JobId, Placement])
    commits: dict[JobId, int] = field(default_factory=lambda: defaultdict(int))
    committed: set[tuple[JobId, int, int]] = field(default_factory=set[tuple[JobId, int, int]])
    loop_epochs: dict[tuple[JobId, int], int] = field(default_factory=dict[tuple[JobId, int], int])
    """The loop epoch under which a commit of a job was recorded last."""
    made_on: dict[tuple[JobId, int], dict[InstanceId, str]] = field(default_factory=lambda: defaultdict(dict))
    """The hosts where the instances were, when a commit of a job was recorded last."""
    after: dict[JobId, tuple[After, ...]] = field(default_factory=dict[JobId, tuple[After, ...]])
    """What each job starts after."""
    states: dict[JobId, JobState] = field(default_factory=dict[JobId, JobState])
    """How jobs ended."""
    masters: dict[JobId, Epoch] = field(default_factory=dict[JobId, Epoch])
    batches: dict[JobId, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(dict))
    """Job -> commit -> the items of streams that it made trained."""
    same: dict[JobId, dict[tuple[str, int], tuple[str, int]]] = field(default_factory=dict)
    """Job -> instance -> the error that it ended with last, and how often in a row."""
    ended: set[JobId] = field(default_factory=set[JobId])
    in_peace: dict[JobId, float] = field(default_factory=dict[JobId, float])
    """Jobs that give their devices back, nothing having failed since they were asked to, and their grace in seconds."""
    calm: bool = False
    """Nothing fails in this world: jobs are only moved, resized and asked to give their devices back."""
    hurried: set[JobId] = field(default_factory=set[JobId])
    """Jobs that were once given too little time to save."""
    restarts: dict[tuple[JobId, int, str], int] = field(default_factory=lambda: defaultdict(int))
    health: dict[NodeId, Health] = field(default_factory=dict[NodeId, Health])
    stops: dict[JobId, Reason] = field(default_factory=dict[JobId, Reason])
    """Jobs that somebody asked to stop, and why: they end for that reason."""
    paused: set[JobId] = field(default_factory=set[JobId])
    graces: dict[JobId, tuple[float, set[tuple[InstanceId, Epoch]]]] = field(default_factory=dict)
    """Until when those who are asked to leave have time (seconds of the wall clock), and who was ready then."""
    compared: dict[JobId, tuple[JobContext, JobContext]] = field(default_factory=dict)
    """The last context of a master that was found to be the one of the log, and that one: neither changes."""
    queues: dict[str, float] = field(default_factory=dict[str, float])
    """The limit of cores of each queue that has one."""

    def see(self, record: Record, *, snapshot: bool = False) -> None:
        """Check one record against everything before it."""
        job = record.job
        if job is None:
            self._nodes(record)
            return
        before = self.shadows.get(job) or initial(job)
        self._order(job, record)
        self._asked(job, record, before)
        self._placements(job, record)
        self._commits(job, record, before)
        self._samples(job, record, before)
        self._budgets(job, record, before)
        self._same_errors(job, record, before)
        self._stops(job, record, before)
        self._commands(job, record, before)
        after = fold(before, record)
        self.shadows[job] = after
        self._leaves_by_itself(job, record, before, after)
        self._compared(record, after)
        self._readiness(record, before, after)
        self._old_reports(record, before, after)
        if snapshot:
            self.snapshots[job] = after.to_json()

    def _order(self, job: JobId, record: Record) -> None:
        if job in self.ended:
            raise Violation(f"{job}: {type(record.event).__name__} after its end")
        match record.event:
            case JobEnded():
                self.ended.add(job)
                self.holding.pop(job, None)
            case MasterStarted(master_epoch=epoch):
                if epoch < self.masters.get(job, 0):  # a repeat is the same append after a lost answer
                    raise Violation(f"{job}: master epoch {epoch} after {self.masters[job]}")
                self.masters[job] = epoch
            case _:
                pass

    def _placements(self, job: JobId, record: Record) -> None:
        match record.event:
            case JobRequeued():
                self.holding.pop(job, None)
            case JobSubmitted(spec=spec):
                self.after[job] = spec.after
            case JobEnded(state=state):
                self.states[job] = state
            case JobAdmitted(placement=placement):
                for one in self.after.get(job, ()):
                    ended = self.states.get(JobId(one.job))
                    if ended is None or (one.when == "succeeded" and ended is not JobState.SUCCEEDED):
                        raise Violation(f"{job}: admitted before {one.job} has {one.when}")
                self.holding[job] = placement
                self._fit(job, placement)
                self._capacity(job)
            case GangGranted(gang=gang, bundles=bundles) if job in self.holding:
                grant = Grant(gang=gang, bundles=bundles)
                self.holding[job] = Placement(gangs=(*self.holding[job].gangs, grant))
                self._fit(job, Placement(gangs=(grant,)))
                self._capacity(job)
            case GangReleased(gang=gang, gone=gone) if job in self.holding and (
                gone or (gang != "all" and not gang.startswith("part"))
            ):
                left = tuple(grant for grant in self.holding[job].gangs if grant.gang != gang)
                self.holding[job] = Placement(gangs=left)
            case _:
                pass

    def _capacity(self, job: JobId) -> None:
        devices: set[tuple[NodeId, int]] = set()
        cpus: dict[NodeId, float] = defaultdict(float)
        for holder, placement in self.holding.items():
            for bundle in placement.bundles:
                cpus[bundle.node] += bundle.res.cpus
                for device in bundle.devices:
                    if (bundle.node, device) in devices:
                        raise Violation(f"{holder}: device {device} of {bundle.node} placed twice when {job} came")
                    devices.add((bundle.node, device))
        for node, used in cpus.items():
            if used > self.capacity[node] + 1e-9:
                raise Violation(f"{node}: {used} of {self.capacity[node]} CPUs placed when {job} came")

        for queue, limit in self.queues.items():
            mine = [placement for holder, placement in self.holding.items() if self._queue_of(holder) == queue]
            used = sum(bundle.res.cpus for placement in mine for bundle in placement.bundles)
            if used > limit + 1e-9:
                raise Violation(f"queue {queue}: {used} of {limit} CPUs held when {job} came")

    def _queue_of(self, job: JobId) -> str:
        spec = self.shadows[job].spec
        return spec.queue if spec is not None else ""

    def _fit(self, job: JobId, placement: Placement) -> None:
        for bundle in placement.bundles:
            health = self.health.get(bundle.node, Health.HEALTHY)
            if health is not Health.HEALTHY:
                raise Violation(f"{job}: placed on {bundle.node}, which is {health}")

    def _nodes(self, record: Record) -> None:
        match record.event:
            case NodeJoined(node=node):
                self.health.pop(node.id, None)
            case NodeMarked(node=node, health=health, devices=()):
                self.health[node] = health
            case _:
                pass

    def _asked(self, job: JobId, record: Record, before: JobContext) -> None:
        """Who was asked to stop ends for that reason; who is paused is not admitted; both have their grace."""
        match record.event:
            case StopAsked(reason=reason, grace_s=grace_s):
                if before.state is not JobState.STOPPING and not before.state.terminal:
                    self.stops[job] = reason
                    self._grace(job, record.at + grace_s, before)
            case PreemptAsked(gang=None, grace_s=grace_s):
                self._grace(job, record.at + grace_s, before)
            case JobRequeued(reason=reason):
                self.graces.pop(job, None)
                if reason is Reason.PAUSED:
                    self.paused.add(job)
            case JobQueued():
                self.paused.discard(job)
            case JobAdmitted() if job in self.paused:
                raise Violation(f"{job}: admitted while it is paused")
            case JobEnded(reason=reason):
                self.graces.pop(job, None)
                if self.stops.get(job, reason) is not reason:
                    raise Violation(f"{job}: asked to stop for {self.stops[job]}, and it ended for {reason}")
            case _:
                pass

    def _leaves_by_itself(self, job: JobId, record: Record, before: JobContext, after: JobContext) -> None:
        """At the end of a notice or of the time limit a job has the grace of its own file."""
        if isinstance(record.event, TimerFired) and before.ending is None and after.ending is not None:
            self._grace(job, record.at + after.ending.grace_s, before)

    def _compared(self, record: Record, after: JobContext) -> None:
        """After a new master has looked, the missing are not taken for alive, and the unexpected are to go."""
        if not isinstance(record.event, Reattached) or after.state.terminal:
            return
        found = {(InstanceId(role, rank), epoch) for role, rank, epoch in record.event.alive}
        for one in after.instances.values():
            works = one.state in (InstanceState.STALE, InstanceState.READY) and not one.ended
            if works and one.process is not None and (one.id, one.process.epoch) not in found:
                raise Violation(f"{after.job}: {one.id} is {one.state}, and no process of it was found")
        known = {(one.id, epoch) for one in after.instances.values() for epoch in one.terminating}
        known |= {(one.id, one.process.epoch) for one in after.instances.values() if one.process is not None}
        if found - known:
            raise Violation(f"{after.job}: {sorted(map(str, found - known))} were found, and are left alone")

    def _grace(self, job: JobId, until_s: float, before: JobContext) -> None:
        ready = {
            (one.id, one.process.epoch)
            for one in before.instances.values()
            if one.state is InstanceState.READY and one.process is not None
        }
        sooner, those = self.graces.get(job, (until_s, ready))
        self.graces[job] = (min(sooner, until_s), those)

    def stopping(self, job: JobId, instance: InstanceId, epoch: Epoch, until_s: float) -> None:
        """A process is being stopped, and killed at that time of the wall clock."""
        ending = self.shadows[job].ending if job in self.shadows else None
        if ending is not None and ending.reason is Reason.COMPLETED:
            return  # the job came to its end while it was preempted: the grace is its own
        promised_s, those = self.graces.get(job, (0.0, ()))
        if (instance, epoch) in those and until_s < promised_s - 1e-3:
            raise Violation(f"{job}: {instance} is killed {promised_s - until_s:.3f} s before its grace is over")

    def reserving(self, job: JobId, epoch: Epoch) -> None:
        """A reservation is asked for: older ones that go are given back before."""
        before = self.shadows.get(job)
        for gang in before.gangs if before is not None else ():
            if gang.state is GangState.RELEASING and gang.epoch < epoch:
                raise Violation(f"{job}: reserves under {epoch} before {gang.id} of {gang.epoch} is given back")

    def _old_reports(self, record: Record, before: JobContext, after: JobContext) -> None:
        """A timer of an earlier time and the death of an earlier process change nothing."""
        match record.event:
            case TimerFired(timer=timer) if timer not in {one.timer for one in timers(before)}:
                if after.losses != before.losses or after.ending != before.ending:
                    raise Violation(f"{after.job}: the timer {timer} of an earlier time counted")
            case InstanceLost(role=role, rank=rank, epoch=epoch):
                one = before.instances.get(InstanceId(role, rank))
                old = one is not None and (one.process is None or epoch < one.process.epoch)
                if old and len(after.losses) > len(before.losses):
                    raise Violation(f"{after.job}: the end of {role}/{rank} under {epoch} counted again")
            case _:
                pass

    def _commits(self, job: JobId, record: Record, before: JobContext) -> None:
        match record.event:
            case Committed(n=n, loop_epoch=epoch):
                if not accepts_commit(before, n, epoch):
                    raise Violation(f"{job}: commit {n} of loop epoch {epoch} recorded at {before.committed}")
                if n != self.commits[job] + 1:
                    raise Violation(f"{job}: commit {n} after {self.commits[job]}")
                self.commits[job] = n
                self.committed.add((job, n, int(epoch)))
                self.loop_epochs[(job, n)] = int(epoch)
                self.made_on[(job, n)] = {one: before.bundle(one)[1].host for one in before.bound}
                self._weights(job, record.event, before)
            case RolledBack(to_commit=n):
                if n > self.commits[job]:
                    raise Violation(f"{job}: rolled back to {n}, which was never made")
                self._survivors(job, n, before)
                self.commits[job] = n
            case _:
                pass

    def _survivors(self, job: JobId, to: int, before: JobContext) -> None:
        """A job goes back to the newest commit that survives: one on disk, or one that all find in memory.

        A commit of the same number that was given up, or never recorded, may be in the memory of another host: that
        is not its state.
        """
        durable = min(before.checkpoint_n, before.committed)
        if to < durable:
            raise Violation(f"{job}: rolled back to {to}, though commit {durable} is on disk")
        placed = [one for one in keepers(before) if one in before.bound]
        epoch = self.loop_epochs.get((job, before.committed))
        there = [self._left_there(before, one, epoch) for one in placed]
        looked = {loss.reason for loss in (*before.losses, *(one.cause for one in before.failovers[-1:]))}
        copied = [self._has_copy(before, one) for one in placed]
        if to < before.copied_n and placed and all(copied) and Reason.STATE_LOST not in looked:
            raise Violation(f"{job}: rolled back to {to}, though other machines have commit {before.copied_n}")
        if to < before.committed and placed and all(there) and Reason.STATE_LOST not in looked:
            raise Violation(f"{job}: rolled back to {to}, though all find the state of {before.committed}")

    def _left_there(self, before: JobContext, one: InstanceId, epoch: int | None) -> bool:
        """Its own commit left the state where it is now: nobody knows of a copy that was not acknowledged."""
        host = before.bundle(one)[1].host
        own = self.made_on[(before.job, before.committed)].get(one) == host
        return own and self.store.in_memory(host, before.job, one, before.committed, epoch)

    def _has_copy(self, before: JobContext, one: InstanceId) -> bool:
        epoch = self.loop_epochs.get((before.job, before.copied_n))
        hosts = [copy.host for copy in before.copies if copy.owner == one]
        return any(self.store.in_memory(host, before.job, one, before.copied_n, epoch) for host in hosts)

    def _weights(self, job: JobId, event: Committed, before: JobContext) -> None:
        """The cursor of a commit names the newest version of every weights edge, also of those not due with it."""
        for edge in before.spec.weights if before.spec is not None else ():
            due = event.n - event.n % edge.every
            _, known = event.cursor[WEIGHTS].get(edge.name, (0, 0))
            if known != due:
                raise Violation(f"{job}: commit {event.n} names version {known} of {edge.name}, {due} is the newest")

    def _samples(self, job: JobId, record: Record, before: JobContext) -> None:
        """Every item of a stream is trained once, dropped or open at each commit, and none was too old."""
        match record.event:
            case Committed(n=n, metrics=metrics, cursor=cursor) if "uids" in metrics and before.spec is not None:
                trained = {uid for uids in self.batches[job].values() for uid in uids}
                twice = trained & set(metrics["uids"])
                if twice or len(set(metrics["uids"])) < len(metrics["uids"]):
                    raise Violation(f"{job}: items {twice or metrics['uids']} trained twice at commit {n}")
                self.batches[job][n] = metrics["uids"]
                cut = cursor["cut"]["streams"]["groups"]
                trained |= set(metrics["uids"])
                left = list(uids_of(cut["open"]))
                gone = sum(cut["dropped"].values())
                if set(left) & trained or len(left) + len(trained) + gone != cut["cursor"] or gone < 0:
                    raise Violation(f"{job}: items lost or doubled at commit {n}: {sorted(trained)} trained, {cut}")
                if cut["trained"] != len(trained) or cut["admitted"] != cut["cursor"]:
                    raise Violation(f"{job}: the ledger at commit {n} counts {cut}, the log {len(trained)} trained")
                if metrics["made"] != metrics["ages"]:
                    raise Violation(f"{job}: ages {metrics['ages']} at commit {n}, by what was made {metrics['made']}")
                bound = before.spec.streams[1].stale
                if bound is not None and max(metrics["ages"], default=0) > bound.versions:
                    raise Violation(f"{job}: ages {metrics['ages']} at commit {n}, the bound is {bound.versions}")
            case RolledBack(to_commit=to):
                self.batches[job] = {n: uids for n, uids in self.batches[job].items() if n <= to}
            case _:
                pass

    def _budgets(self, job: JobId, record: Record, before: JobContext) -> None:
        """Count restarts from the log alone: more than the limit in one window is a budget that was forgotten."""
        match record.event:
            case FailoverStarted(role=role, level=level, failover=n, move_reason=why):
                free = (Reason.RESIZED_DEGRADED, Reason.NO_NODE)
                if level not in ("process", "role") or why in free or record.event.reason is Reason.RESIZED:
                    return
                if record.event.reason in PLATFORM or record.event.reason is Reason.STATE_LOST:
                    return  # no fault of the role
                if n != before.failover_count + 1 or before.spec is None:
                    return
                fail = before.spec.role(role).fail
                key = (job, before.attempt, f"{role} {level}")
                self.restarts[key] += 1
                if fail.limit_window_s >= 3600 and self.restarts[key] > fail.limit_n:
                    raise Violation(f"{job}: restart {self.restarts[key]} of {role}, its limit is {fail.limit_n}")
            case _:
                pass

    def _same_errors(self, job: JobId, record: Record, before: JobContext) -> None:
        """No instance is tried again once its tries ended with the same error and no commit between."""
        match record.event:
            case Committed() | JobQueued():
                self.same.pop(job, None)
            case TimerFired(timer=timer) if timer.startswith("healed/"):
                self.same.pop(job, None)
            case FailoverStarted(reason=Reason.USER_ERROR, role=role, rank=rank, text=text, failover=n, level=level):
                if n != before.failover_count + 1 or before.spec is None or level == "node":
                    return
                if any(one in text.lower() for one in SECONDARY_TEXTS):
                    return
                known = self.same.setdefault(job, {})
                last, count = known.get((role, rank), ("", 0))
                known[role, rank] = text, (count if text == last else 0) + 1
                most, over = before.spec.role(role).fail.same, record.event.move_reason is Reason.SAME_ERROR
                if not over and 0 < most <= known[role, rank][1]:
                    raise Violation(f"{job}: {role}/{rank} is tried again after {most} times {text!r} and no commit")
            case _:
                pass

    def _stops(self, job: JobId, record: Record, before: JobContext) -> None:
        """A job that was given time to stop at a commit loses none, wherever it comes up."""
        match record.event:
            case PreemptAsked(grace_s=grace_s, gang=None) if before.state is JobState.RUNNING and grace_s >= GRACE_S:
                self.in_peace[job] = grace_s
            case InstanceLost() | ProgressStalled() | MasterStarted() | StopAsked() | PreemptAsked() | JobEnded():
                self.in_peace.pop(job, None)
            case TimerFired(timer=timer) if timer.startswith("grace/save"):
                self.in_peace.pop(job, None)
            case InstanceReady():
                self.in_peace.pop(job, None)
            case RolledBack(from_commit=old, to_commit=new) if new < old and job in self.in_peace:
                grace_s = self.in_peace[job]
                raise Violation(f"{job}: back from {old} to {new}, though it had {grace_s:g} s to stop at a commit")
            case _:
                pass

    def _commands(self, job: JobId, record: Record, before: JobContext) -> None:
        """A command that writes a checkpoint when it is asked to end does nothing twice: stopped, moved or resized."""
        short = before.spec is not None and before.spec.grace_s < GRACE_S
        if short or (isinstance(record.event, PreemptAsked) and record.event.grace_s < GRACE_S):
            self.hurried.add(job)
        if self.calm and job not in self.hurried:
            for _, one, seconds in (found for found in self.store.redone if found[0] == job):
                raise Violation(f"{job}: {one} does {seconds:.1f} s of its work twice, and nothing had failed")

    def _readiness(self, record: Record, before: JobContext, after: JobContext) -> None:
        """A report of an epoch that is over must change nothing."""
        match record.event:
            case InstanceReady(role=role, rank=rank, epoch=epoch):
                for one in before.instances.values():
                    stale = one.id.role == role and one.id.rank == rank and one.epoch != epoch
                    if stale and after.instances != before.instances:
                        raise Violation(f"{after.job}: readiness of {one.id} under {epoch} counted at {one.epoch}")
                counted = after.instances != before.instances and role in after.plan.stateful
                restored, committed = record.event.restored, before.committed
                if counted and restored != committed:
                    raise Violation(f"{after.job}: {role}/{rank} is ready with commit {restored} at {committed}")
            case _:
                pass

    def live(self, ctx: JobContext) -> None:
        """The context in the memory of a master is the one that the log gives."""
        shadow = self.shadows.get(ctx.job)
        if (
            shadow is None
            or shadow.seq != ctx.seq
            or ((last := self.compared.get(ctx.job)) is not None and last[0] is shadow and last[1] is ctx)
        ):
            return
        if shadow != ctx:
            raise Violation(f"{ctx.job}: the live context at {ctx.seq} is not what the log gives")
        self.compared[ctx.job] = (shadow, ctx)

    def at_end(self, records: tuple[Record, ...]) -> None:
        """Acknowledged commits are in the log, nobody unfit was started, a snapshot and its tail are the whole log."""
        for record in records:
            match record.event:
                case InstanceStarted(role=role, rank=rank, pid=pid):
                    if (record.job, InstanceId(role, rank), pid) in self.store.unfit:
                        raise Violation(f"{record.job}: {role}/{rank} was started on a node that it had found unfit")
                case _:
                    pass
        for job, n, epoch in self.store.acknowledged:
            if (job, n, epoch) not in self.committed:
                raise Violation(f"{job}: commit {n} of loop epoch {epoch} was acknowledged and is not in the log")
        for job, raw in self.snapshots.items():
            ctx = JobContext.from_json(raw)
            for record in records:
                if record.job == job:
                    ctx = fold(ctx, record)
            if ctx != self.shadows[job]:
                raise Violation(f"{job}: snapshot and tail differ from the whole log")
        for job, ctx in self.shadows.items():
            if not ctx.state.terminal:
                raise Violation(f"{job}: still {ctx.state} at the end")
