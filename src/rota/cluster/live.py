"""Live scheduler: the cycle on the real cluster, records of the log in, events to append out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rota.cluster.core import admission, events, explain
from rota.cluster.core.choice import choices_of, find_better_split
from rota.cluster.core.grants import (
    Place,
    ask_of_gang,
    back_of,
    bundles_of,
    divided,
    held_at,
    home_in,
    in_rows_of,
    left_at,
    missing_of,
    moves_of,
    placement_of,
    row_of,
)
from rota.cluster.core.guarded import guarded, overdrawn, violations
from rota.cluster.core.jobs import Allocations, Choice, JobAsk, Wait, ask_of, compile_shape
from rota.cluster.core.profile import Admit, Preempt, Profile, Resize, WaitOn, WakeAt
from rota.cluster.core.queue_order import wait_of, waits_now
from rota.cluster.core.state import State
from rota.spec.events import (
    CheckpointSaved,
    Committed,
    DowntimePassed,
    Event,
    GangAsked,
    GangGranted,
    GangReleased,
    GangWaits,
    InstanceStarted,
    JobAdmitted,
    JobChanged,
    JobEnded,
    JobQueued,
    JobRequeued,
    JobSubmitted,
    JobWaits,
    MoveAsked,
    NodeJoined,
    NodeLost,
    NodeMarked,
    PreemptAsked,
    QueuesChanged,
    Record,
    StopAsked,
    UploadStarted,
)
from rota.spec.gang import BundleGrant, GangRequest, Grant
from rota.spec.ids import Epoch, GangId, InstanceId, JobId, NodeId
from rota.spec.job import After, JobSpec, RoleStart, changed_spec, started_spec
from rota.spec.queue import Queue, queue_from_json
from rota.spec.reasons import Reason, final_state
from rota.spec.resources import FAILOVER, LOST_BY, Health, Node
from rota.spec.states import JobState

RequestsOf = Callable[[JobSpec], tuple[GangRequest, ...]]
STOPS_FOR_NO_JOB = frozenset({Reason.PAUSED, Reason.SERVICE_DOWN, Reason.NODE_REMOVED, Reason.RESIZED})
"""Reasons of stops that make room for no other job."""
IDLE_WAIT_S_MAX = 1.0
"""Maximum time that work of another thread is held back; decisions are far shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What the log says about one live job beyond the scheduling state."""

    spec: JobSpec
    user: str
    requests: tuple[GangRequest, ...]
    queued_at: float
    queued: bool = False
    asks: tuple[GangRequest, ...] = ()
    """Gangs beside those of the admission, asked for or held; each is a row of its own in the state."""
    attempts: int = 0
    epoch: int = 0
    own: tuple[Place, ...] = ()
    """What the row of the job itself holds: the gangs of the admission, or those that took their place."""
    bundles: int = 0
    """Bundles of the admission; ``own`` has fewer while a gang is released and its replacement is not granted."""
    beside: tuple[Place, ...] = ()
    """What was granted of ``asks``."""
    arrived: frozenset[InstanceId] = frozenset()
    """Members that started in a place beside the admission."""
    left: Mapping[GangId, frozenset[GangId]] = field(default_factory=dict[GangId, frozenset[GangId]])
    """Gang of cores that stay reserved at places that were left, to the gangs of which they are."""
    gone: frozenset[GangId] = frozenset()
    """Gangs of this attempt that were given back for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOutcome:
    """What ``decide`` wants: events to append, in order, and when to ask again if nothing happens until then.

    ``broken`` has the bugs of the scheduler that were met; what they touch is left alone, the rest continues.
    """

    events: tuple[tuple[JobId, Event], ...]
    wake_at: float | None = None
    marks: tuple[NodeMarked, ...] = ()
    broken: tuple[str, ...] = ()


class Scheduler:
    """The scheduler of one installation, driven by log records.

    ``apply`` folds a record; ``decide`` returns the events that the service should append. It never writes by itself:
    a decision becomes true when its record comes back through ``apply``. Replaying a log gives the same state.
    """

    GIVEN = frozenset({"profile", "_requests_of", "_idle", "_empties"})
    """Attributes that no record changes, or that follow from the others."""

    def __init__(self, profile: Profile, requests_of: RequestsOf) -> None:
        self.profile = profile
        self._state = State(())
        self._to_lay_out_at: float | None = None
        self._requests_of = requests_of
        self._nodes: dict[NodeId, Node] = {}
        self._lost: set[NodeId] = set()
        self._queues: tuple[Queue, ...] = ()
        self._jobs: dict[JobId, _Known] = {}
        self._suspects: dict[NodeId, NodeMarked] = {}
        self._left: dict[JobId, tuple[NodeId, ...]] = {}
        """Row of a gang that is asked for to the nodes that its members leave."""
        self._gone: dict[JobId, tuple[NodeId, ...]] = {}
        """The same of nodes that were lost, or not fit: they may be used again once they are back."""
        self._lost_for: dict[JobId, tuple[NodeId, ...]] = {}
        """Those of them that the engine lost."""
        self._back: dict[JobId, tuple[NodeId, ...]] = {}
        """Nodes of these that joined again, until the job knows."""
        self._drains: dict[NodeId, tuple[float, str]] = {}
        """Nodes that jobs must leave: until when, and why."""
        self._unsuccessful: dict[JobId, str] = {}
        """Jobs that ended without success, and how, for those that are submitted after them."""
        self._dependents: dict[JobId, dict[JobId, None]] = {}
        """Jobs that start after one that has not ended."""
        self._never_satisfied: dict[JobId, None] = {}
        """Jobs that can never start, as one that had to succeed before did not."""
        self._misplaced: dict[JobId, None] = {}
        """Jobs that were admitted to nodes or devices which were lost by then, and are not asked to stop yet."""
        self._short: dict[JobId, tuple[tuple[Place, ...], Choice | None]] = {}
        """Rows on nodes that were lost: the places they were given, until they give back what they hold."""
        self._asked_to_leave: dict[tuple[NodeId, JobId], float] = {}
        """Jobs that were asked to leave, and until when."""
        self._empties = admission.EmptyTwins()
        self._idle = threading.Event()
        self._idle.set()

    @property
    def state(self) -> State:
        """The current state. Nodes that joined one after another are laid out once, when the state is read."""
        self._lay_out()
        return self._state

    def _lay_out(self) -> None:
        if self._to_lay_out_at is not None:
            at, self._to_lay_out_at = self._to_lay_out_at, None
            self._rebuild(at)

    def apply(self, record: Record) -> None:
        """Fold one record of the log, of any kind; kinds that do not concern scheduling change nothing.

        Nodes that joined are laid out before a record of another kind is folded: what is laid out follows from the log
        alone, and not from when the state was read.
        """
        if not isinstance(record.event, NodeJoined):
            self._lay_out()
        match record.event:
            case NodeJoined(node=node):
                if node.id in self._lost:
                    self._nodes.pop(node.id, None)
                self._nodes[node.id] = node
                self._lost.discard(node.id)
                self._drains.pop(node.id, None)
                self._to_lay_out_at = record.at
                if node.health is Health.HEALTHY:
                    self._is_back(node.id, record.at)
            case NodeLost(node=node):
                self._lost.add(node)
                self._happened(events.NodeChanged(node=node, health=None), record.at)
            case NodeMarked():
                self._marked(record.event, record.at)
            case QueuesChanged(queues=queues):
                self._queues = tuple(queue_from_json(raw) for raw in queues)
                self._rebuild(record.at)
            case _:
                if record.job is not None:
                    self._job_record(record.job, record.event, record.at)

    def _job_record(self, job: JobId, event: Event, at: float) -> None:
        known = self._jobs.get(job)
        match event:
            case JobSubmitted(spec=spec, user=user):
                self._jobs[job] = _Known(spec=spec, user=user, requests=self._requests_of(spec), queued_at=at)
                for one in spec.after:
                    self._dependents.setdefault(JobId(one.job), {})[job] = None
                self._check_dependencies(job, spec)
            case JobQueued(spec=spec) if known is not None:
                self._learn(job, replace(known, spec=spec or known.spec, queued=True), at)
                self._happened(events.JobPaused(job=job, paused=False), at)
            case JobChanged(changes=changes) if known is not None:
                self._learn(job, replace(known, spec=changed_spec(known.spec, changes)), at)
            case JobAdmitted(placement=placement, starts=starts) if known is not None:
                requests = self._requests_of(started_spec(known.spec, starts))
                own = tuple((request, placement.gang(request.gang)) for request in requests)
                known = replace(known, attempts=event.attempt, epoch=int(event.epoch), own=own, bundles=bundles_of(own))
                self._jobs[job] = replace(known, arrived=frozenset(), gone=frozenset())
                self._hold(job, own, self._choice(job, starts, requests), at)
            case JobWaits(reason=reason) if job in self.state.jobs:
                wait = Wait(reason=reason, text=event.text, fields=event.fields)
                self._happened(events.ReasonGiven(job=job, wait=wait), at)
            case PreemptAsked(gang=str(gang), for_job=other):
                self._happened(events.StopRequested(job=row_of(job, gang), for_job=JobId(other)), at)
            case PreemptAsked(reason=reason, for_job=other):
                self._stop(job, known, at, final=reason is Reason.PAUSED, for_job=JobId(other))
            case MoveAsked(node=node, due_at=None):
                self._asked_to_leave.pop((node, job), None)
            case MoveAsked(node=node, due_at=float(due_at)):
                self._asked_to_leave[(node, job)] = due_at
            case StopAsked():
                self._stop(job, known, at, final=True)
            case UploadStarted():  # as of a job that is paused: all is given back
                self._forget_all(job, known, at)
                self._release(job, at)
                self._happened(events.JobPaused(job=job, paused=True), at)
            case JobRequeued(reason=reason):
                self._forget_all(job, known, at)
                self._release(job, at, cools=reason not in STOPS_FOR_NO_JOB)
                if known is not None and bundles_of(known.own) != known.bundles:
                    self._learn(job, replace(self._jobs[job], own=(), bundles=0), at)  # as its spec says
                self._happened(events.JobPaused(job=job, paused=reason is Reason.PAUSED), at)
            case Committed() | CheckpointSaved() | DowntimePassed():
                for one in in_rows_of(job, known.asks if known else (), event):
                    self._happened(one, at)
            case JobEnded():
                self._forget_all(job, known, at)
                self._jobs.pop(job, None)
                self._never_satisfied.pop(job, None)
                self._happened(events.JobGone(job=job), at)
                self._release_dependents(job, event, at)
            case _:
                self._gang_record(job, known, event, at)

    def _gang_record(self, job: JobId, known: _Known | None, event: Event, at: float) -> None:
        match event:
            case GangAsked() if known is not None:
                self._asked(job, known, event)
            case GangGranted() if known is not None:
                self._granted(job, known, event, at)
            case GangWaits(gang=gang, reason=reason):
                row, wait = row_of(job, gang), Wait(reason=reason, text=event.text)
                if row in self._back:
                    self._back[row] = tuple(one for one in self._back[row] if one not in event.back)
                self._happened(events.ReasonGiven(job=row, wait=wait), at)
            case InstanceStarted(role=role, rank=rank, node=node) if known is not None:
                self._started(job, known, InstanceId(role, rank), node, at)
            case GangReleased(gang=gang, gone=gone) if known is not None:
                if gone:
                    known = self._free_cores(job, known, gang, at)
                if gone and any(request.gang == gang for request, _ in known.own):
                    self._moved(job, known, gang, at)
                else:
                    self._forget(job, known, lambda request: request.gang == gang, at)
            case _:
                pass

    def _stop(self, job: JobId, known: _Known | None, at: float, *, final: bool, for_job: JobId | None = None) -> None:
        """A job is asked to let go, and waits for no gang any more; where it is ``final``, for nothing else either."""
        self._misplaced.pop(job, None)
        self._happened(events.StopRequested(job=job, final=final, for_job=for_job), at)
        self._forget(job, known, lambda request: not self._holds(row_of(job, request.gang)), at)
        if final:
            self._happened(events.JobPaused(job=job, paused=True), at)

    def _learn(self, job: JobId, known: _Known, at: float) -> None:
        known = self._jobs[job] = replace(known, requests=self._requests_of(known.spec))
        if known.queued:
            ask = self._ask_of(job, known.spec, known.user, known.queued_at)
            self._happened(events.JobArrived(ask=ask), at)

    def _release_dependents(self, job: JobId, ended: JobEnded, at: float) -> None:
        """A job ended: those that start after it have one less to wait for, or can never start."""
        if ended.state is not JobState.SUCCEEDED:
            self._unsuccessful[job] = f"{ended.state} ({ended.reason})"
        for other in self._dependents.pop(job, ()):
            if (waiting := self._jobs.get(other)) is not None:
                self._check_dependencies(other, waiting.spec)
                self._learn(other, waiting, at)

    def _check_dependencies(self, job: JobId, spec: JobSpec) -> None:
        if any(self._failed(one) for one in spec.after):
            self._never_satisfied[job] = None

    def _after(self, spec: JobSpec) -> tuple[JobId, ...]:
        """The jobs that have not ended as a job asks in its ``after``."""
        return tuple(JobId(one.job) for one in spec.after if one.job in self._jobs or self._failed(one))

    def _failed(self, after: After) -> str | None:
        """How a job ended that had to succeed and did not."""
        return self._unsuccessful.get(JobId(after.job)) if after.when == "succeeded" else None

    def _ends_of_never_satisfied(self) -> list[tuple[JobId, Event]]:
        """Ends of jobs that can never start, as one that had to succeed before did not."""
        ends: list[tuple[JobId, Event]] = []
        for job in self._never_satisfied:
            name, how = next((one.job, end) for one in self._jobs[job].spec.after if (end := self._failed(one)))
            text = f"{name} had to succeed first; it ended as {how}"
            reason = Reason.DEPENDENCY_FAILED
            ends.append((job, JobEnded(state=final_state(reason), reason=reason, text=text)))
        return ends

    def _choice(self, job: JobId, starts: tuple[RoleStart, ...], requests: tuple[GangRequest, ...]) -> Choice | None:
        """What a job was admitted as; the log counts, also where the choices are others by now."""
        row = self.state.jobs.get(job)
        if row is None or not row.ask.choices:
            return None
        known = (one for one in row.ask.choices if one.starts == starts)
        return next(known, None) or Choice(shape=compile_shape(requests), starts=starts)

    def _asked(self, job: JobId, known: _Known, event: GangAsked) -> None:
        """A gang beside those of the admission: for the policies it is one more request of the same user and queue."""
        row, request = row_of(job, event.request.gang), event.request
        if row in self.state.jobs:
            return
        self._jobs[job] = replace(known, asks=(*known.asks, request))
        ask = ask_of_gang(job, known.spec, request, user=known.user, queued_at=known.queued_at)
        spare = self._can_spare(job, event.request.gang)
        ask = replace(ask, spare=spare, avoid=(*event.avoid, *event.apart), failover=bool(event.avoid))
        self._happened(events.JobArrived(ask=ask), known.queued_at)
        self._left[row], self._gone[row] = event.avoid, event.avoid if event.lost else ()
        lost = self._lost_for[row] = self._gone[row] if event.lost_nodes is None else event.lost_nodes
        for node in self._gone[row]:
            what, by = ("lost", LOST_BY) if node in lost else ("not fit", FAILOVER)
            self._suspects |= self._suspect(node, f"{what}, as {job} reports", by)

    def _granted(self, job: JobId, known: _Known, event: GangGranted, at: float) -> None:
        row = row_of(job, event.gang)
        request = next((one for one in known.asks if one.gang == event.gang), None)
        if request is None or row not in self.state.jobs:
            return
        self._gone.pop(row, None)
        self._back.pop(row, None)
        for node in self._left.pop(row, ()):
            self._suspects |= self._suspect(node, f"{job} left it after its processes died there")
        place = (request, Grant(gang=event.gang, bundles=event.bundles))
        if not self._hold(row, (place,), None, at):
            return  # its master finds no node there, and gives the gang back
        self._jobs[job] = replace(known, beside=(*known.beside, place))
        if bundles_of(known.own) < known.bundles:
            self._settle(job, self._jobs[job], known.own, at)

    def _suspect(self, node: NodeId, text: str, by: str = FAILOVER) -> dict[NodeId, NodeMarked]:
        """A node that a job had to leave, or that is overdrawn, takes no new work until it is marked healthy."""
        known = None if by == LOST_BY and node in self._suspects else self._nodes.get(node)  # another mark counts
        mark = NodeMarked(node=node, health=Health.SUSPECT, by=by, text=text)
        return {node: mark} if known is not None and known.health is Health.HEALTHY else {}

    def _is_back(self, node: NodeId, at: float) -> None:
        """A node that was lost may be used again, also by those that wait for another one in its place."""
        for row in [row for row, gone in self._gone.items() if node in gone and row in self.state.jobs]:
            self._gone[row] = tuple(one for one in self._gone[row] if one != node)
            self._back[row] = (*self._back.get(row, ()), *(one for one in self._lost_for[row] if one == node))
            self._left[row] = tuple(one for one in self._left[row] if one != node)
            avoid = list(self.state.jobs[row].ask.avoid)
            avoid.remove(node)  # once: another reason to be apart from it stays
            self._happened(events.JobArrived(ask=replace(self.state.jobs[row].ask, avoid=tuple(avoid))), at)

    def _forget(self, job: JobId, known: _Known | None, which: Callable[[GangRequest], bool], at: float) -> None:
        gone = [request for request in known.asks if which(request)] if known else []
        for request in gone:
            row = row_of(job, request.gang)
            for known_of in (self._left, self._gone, self._lost_for, self._back, self._short):
                known_of.pop(row, None)
            self._happened(events.JobGone(job=row), at)
        if known is not None and gone:
            self._jobs[job] = replace(known, asks=tuple(one for one in known.asks if one not in gone))

    def _forget_all(self, job: JobId, known: _Known | None, at: float) -> None:
        """An attempt is over: its gangs and the moves that it was asked for."""
        self._misplaced.pop(job, None)
        self._short.pop(job, None)
        self._asked_to_leave = {one: due_at for one, due_at in self._asked_to_leave.items() if one[1] != job}
        self._forget(job, known, lambda request: True, at)

    def _moved(self, job: JobId, known: _Known, gang: GangId, at: float) -> None:
        """A reservation is gone: what took its place is the holding of the job itself, else the rest of the gangs is.

        A job that has no gang left is paused: it is not admitted anew, its gangs are granted.
        """
        if self.state.jobs[job].phase != "running":
            return  # all of it comes back at once
        own = tuple(place for place in known.own if place[0].gang != gang)
        if not self._settle(job, known, own, at):
            self._jobs[job] = replace(known, own=own)
            self._hold_own(job, at)

    def _hold(self, row: JobId, places: tuple[Place, ...], choice: Choice | None, at: float) -> bool:
        """A row holds these places; of those with a lost or removed node only what is there, until it gives it back.

        A decision may reach the log after the loss of its node. A job that was admitted so is asked to stop.
        """
        held, missing = held_at(self.state, places), missing_of(self.state, places)
        if held:
            self._happened(events.JobHolds(job=row, held=held, choice=choice), at)
        if missing:
            self._happened(events.StopRequested(job=row) if held else events.JobPaused(job=row, paused=True), at)
            self._short[row] = (places, choice)
            self._misplaced |= {row: None} if row in self._jobs else {}
        return not missing

    def _hold_what_is_back(self, at: float) -> None:
        """Rows that were given more than there was take what is there again: the engine may reserve it for them."""
        for row, (places, choice) in self._short.items():
            if (held := held_at(self.state, places)) and self._holds(row):
                self._happened(events.JobRegained(job=row, held=held), at)
            elif held:
                self._happened(events.JobHolds(job=row, held=held, choice=choice), at)
                self._happened(events.StopRequested(job=row), at)
        self._happened(events.NodesLaidOut(), at)

    def _settle(self, job: JobId, known: _Known, own: tuple[Place, ...], at: float) -> bool:
        """Make ``own`` and what is held beside it the holding of the job itself; False when that is too little."""
        have = bundles_of(own)
        instead: list[Place] = []
        for place in sorted(known.beside, key=lambda place: self._can_spare(job, place[0].gang)):
            if self._holds(row_of(job, place[0].gang)) and have + len(place[0].bundles) <= known.bundles:
                instead.append(place)
                have += len(place[0].bundles)
        if have != known.bundles:
            return False
        self._jobs[job] = replace(known, own=(*own, *instead))
        self._forget(job, self._jobs[job], lambda request: any(request is place[0] for place in instead), at)
        self._hold_own(job, at)
        return True

    def _hold_own(self, job: JobId, at: float) -> None:
        """The row of a job holds what is its own, and asks no more than that; without anything it is paused."""
        known = self._jobs[job]
        self._release(job, at)
        if not (held := held_at(self.state, known.own)):
            self._happened(events.JobPaused(job=job, paused=True), at)
            return
        row, bundles, choice = self.state.jobs[job], bundles_of(known.own), None
        if row.ask.choices:
            choice = Choice(shape=compile_shape(tuple(request for request, _ in known.own)))
        elif len(row.ask.shape.slots) != bundles:
            requests = known.requests if bundles == known.bundles else tuple(request for request, _ in known.own)
            ask = replace(row.ask, shape=compile_shape(requests))
            self._happened(events.JobArrived(ask=ask), at)
        self._happened(events.JobHolds(job=job, held=held, choice=choice), at)

    def _started(self, job: JobId, known: _Known, member: InstanceId, node: NodeId, at: float) -> None:
        """A member that moved has left its first place, though others of its gang run on: no device is held there.

        The new place becomes a part of the holding of the job itself once all members that were to move started there.
        The engine gives the cores of a reservation back as a whole, so they stay held until the gang is released.
        """
        places = [place for place in known.beside if self._holds(row_of(job, place[0].gang))]
        move = next((place for place in reversed(places) if home_in(place, member) == node), None)
        if move is None or self.state.jobs[job].phase != "running":
            return
        known = self._jobs[job] = replace(known, arrived=known.arrived | {member})
        moved = {ask.members: given for ask, given in zip(move[0].bundles, move[1].bundles)}
        homes = {ask.members for request, _ in known.own for ask in request.bundles}
        admitted = {ask.members for request in known.requests for ask in request.bundles}
        movers = {one for members in moved for one in members}
        if not (moved.keys() <= homes | admitted and movers <= known.arrived):
            return
        own = [one for place in known.own for one in divided(place, move[0].gang, moved)]
        own += [one for one in divided(move, move[0].gang, {}) if one[0].bundles[0].members not in homes]
        self._jobs[job] = replace(known, own=tuple(own), arrived=known.arrived - movers)
        self._forget(job, self._jobs[job], lambda request: request is move[0], at)
        self._hold_own(job, at)
        before = [(grant.gang, given) for _, grant in known.own for given in grant.bundles]
        after = [given for _, grant in own for given in grant.bundles]
        left = [(gang, old) for (gang, old), new in zip(before, after) if old != new and gang not in known.gone]
        if left:
            self._keep_cores(job, [old for _, old in left], frozenset(gang for gang, _ in left), move[0].gang, at)

    def _keep_cores(
        self, job: JobId, left: Sequence[BundleGrant], gangs: frozenset[GangId], moved_to: GangId, at: float
    ) -> None:
        """A row of its own for the cores that the engine keeps reserved at the places that a job has left."""
        known, (request, grant) = self._jobs[job], left_at(left, moved_to)
        ask = ask_of_gang(job, known.spec, request, user=known.user, queued_at=known.queued_at)
        self._jobs[job] = replace(known, asks=(*known.asks, request), left={**known.left, request.gang: gangs})
        self._happened(events.JobArrived(ask=ask), known.queued_at)
        held = held_at(self.state, ((request, grant),))
        self._happened(events.JobHolds(job=row_of(job, request.gang), held=held), at)

    def _free_cores(self, job: JobId, known: _Known, gang: GangId, at: float) -> _Known:
        """A reservation is gone: its cores are free at the places that were left, too."""
        known = self._jobs[job] = replace(known, gone=known.gone | {gang})
        free = {row for row, gangs in known.left.items() if gangs <= known.gone}
        self._forget(job, known, lambda request: request.gang in free, at)
        return self._jobs[job]

    def _release(self, job: JobId, at: float, *, cools: bool = False) -> None:
        """All is given back. A time limit counts every second on devices, whether its work was kept or not.

        A job that others asked for its devices ``cools`` down; one that its user paused may continue at once.
        """
        row = self.state.jobs.get(job)
        back_at = at + self.profile.cool_down_s if cools and row and row.phase == "stopping" else 0.0
        self._happened(events.JobReleased(job=job, back_at=back_at, done_s=row.served_by(at) if row else 0.0), at)

    def _holds(self, row: JobId) -> bool:
        return row in self.state.jobs and bool(self.state.jobs[row].held)

    def _marked(self, event: NodeMarked, at: float) -> None:
        self._suspects.pop(event.node, None)
        node = self._nodes.get(event.node)
        if node is None:
            return
        there = [device.index for device in node.devices if device.index in event.devices]
        if event.devices:
            devices = tuple(replace(d, health=event.health) if d.index in there else d for d in node.devices)
            self._nodes[event.node] = replace(node, devices=devices)
        else:
            self._nodes[event.node] = node.with_health(event.health)
        if event.node in self._lost or (event.devices and not there):
            return  # it is not there, whatever its health was; what comes back joins with its own
        if not event.devices:
            self._drains.pop(event.node, None)
            if event.health is Health.DRAINED and event.notice_s is not None:
                self._drains[event.node] = (at + event.notice_s, event.text)
        self._happened(events.NodeChanged(node=event.node, health=event.health, devices=tuple(there)), at)
        if event.health is Health.HEALTHY and not event.devices:
            self._is_back(event.node, at)

    def _happened(self, event: events.Event, at: float) -> None:
        events.apply(self.state, event, at)

    def _rebuild(self, at: float) -> None:
        """Lay the jobs over the new inventory. What a job still holds of lost nodes and devices stays, unusable."""
        held = self.state.held_devices()
        for node in self._lost - held.keys():
            self._nodes.pop(node, None)
        self._lost &= held.keys()
        nodes = tuple(node.with_lost(held.get(node.id, {})) for node in self._nodes.values())
        self._state = self.state.with_cluster(nodes, self._queues)
        self._hold_what_is_back(at)
        for node in sorted(self._lost):
            self._happened(events.NodeChanged(node=node, health=None), at)
        if self.profile.prepare is not None:  # a reason of now may be asked for before the next pass
            self.profile.prepare(self._state)

    def wait_idle(self) -> None:
        """Wait while the thread of the scheduler decides or explains: for long work of other threads."""
        self._idle.wait(IDLE_WAIT_S_MAX)

    @contextmanager
    def _at_work(self) -> Generator[None]:
        self._idle.clear()
        try:
            yield
        finally:
            self._idle.set()

    def decide(self, now: float) -> SchedulingOutcome:
        """What should be appended now; ask again after applying it.

        The state stays as it is, unless its counts are not those of its jobs: then it is laid out anew first.
        """
        with self._at_work():
            if broken := violations(self.state):
                self._to_lay_out_at = now
            return self._decide(now, broken)

    def _decide(self, now: float, broken: Sequence[str]) -> SchedulingOutcome:
        suspects = dict(self._suspects)
        for row in (avoid := overdrawn(self.state)):
            suspects |= self._suspect(self.state.nodes[row].id, "more of it is given than there is", "scheduler")
        events = self._ends_of_never_satisfied()
        events += ((job, PreemptAsked(reason=Reason.NODE_LOST, grace_s=0.0)) for job in self._misplaced)
        with self.state.txn():  # undone: the log carries the decisions out
            decisions, refused, learned = guarded(self.state, self.profile, now, avoid)
        self.state.memory.take_in(learned)
        wake = [one.at for one in decisions if isinstance(one, WakeAt)]
        decided = {one.job for one in decisions if not isinstance(one, WakeAt)}
        again = ((row, self.state.jobs[row].wait) for row in self._back if row not in decided and self._back_of(row))
        decisions = [*decisions, *(WaitOn(job=row, wait=wait) for row, wait in again if wait is not None)]
        stopped = {one.job for one in decisions if isinstance(one, Preempt)}
        for decision in decisions:
            if isinstance(decision, WakeAt):
                continue
            job, gang = self._key_of(decision.job)
            if job in self._never_satisfied:
                continue
            match decision:
                case Admit(held=held) if gang is not None:
                    request = next(one for one in self._jobs[job].asks if one.gang == gang)
                    bundles = placement_of(self.state, (request,), held).gangs[0].bundles
                    events.append((job, GangGranted(gang=gang, bundles=bundles)))
                case WaitOn(wait=wait) if gang is not None:
                    back = self._back_of(decision.job)
                    events.append((job, GangWaits(gang=gang, reason=wait.reason, text=wait.text, back=back)))
                case Preempt(reason=reason, grace_s=grace_s, for_job=for_job):
                    other, only = self._key_of(for_job)[0], gang if self._can_spare(job, gang) else None
                    if gang is None or job not in stopped:  # what a job holds beside stops with it
                        events.append((job, PreemptAsked(reason=reason, grace_s=grace_s, for_job=other, gang=only)))
                case Admit(held=held, choice=choice, why=why):
                    events.append((job, self._admitted(job, held, choice, why)))
                case WaitOn(wait=wait):
                    events.append((job, JobWaits(reason=wait.reason, text=wait.text, fields=wait.fields)))
                case Resize():
                    raise AssertionError(
                        f"{job}: a live scheduler resizes no job; profile {self.profile.name} must not share devices"
                    )
        events += moves_of(self.state, self._drains, self._asked_to_leave)
        if not events and (row := find_better_split(self.state, self.profile, now)) is not None:
            events.append((row.ask.id, PreemptAsked(reason=Reason.RESIZED, grace_s=row.ask.grace_s)))
        return SchedulingOutcome(
            events=tuple(events),
            wake_at=min(wake, default=None),
            marks=tuple(suspects.values()),
            broken=(*broken, *(f"{job}: {self.state.broken(text, job)}" for job, text in refused.items())),
        )

    def _admitted(self, job: JobId, held: Allocations, choice: Choice | None, why: dict[str, object]) -> JobAdmitted:
        known, starts = self._jobs[job], choice.starts if choice is not None else ()
        placement = placement_of(self.state, self._requests_of(started_spec(known.spec, starts)), held)
        attempt, epoch = known.attempts + 1, Epoch(known.epoch + 1)
        return JobAdmitted(attempt=attempt, epoch=epoch, placement=placement, starts=starts, why=why)

    def _key_of(self, row: JobId) -> tuple[JobId, GangId | None]:
        return self.state.jobs[row].ask.key

    def _can_spare(self, job: JobId, gang: GangId | None) -> bool:
        """Whether a gang is beyond what the job needs: none of its members is of the admission."""
        known = self._jobs[job]
        members = [member for ask in known.asks if ask.gang == gang for one in ask.bundles for member in one.members]
        return bool(members) and all(one.rank >= known.spec.role(one.role).gang_size for one in members)

    def _back_of(self, row: JobId) -> tuple[NodeId, ...]:
        """Nodes that a gang avoids and that are back, with places of its job that no other can have."""
        known = self._jobs[self._key_of(row)[0]]
        sure = [node for node in self._back.get(row, ()) if node not in self._suspects]
        return back_of(self.state, (*known.own, *known.beside), sure)

    def infeasible(self, spec: JobSpec) -> admission.Shortfall | None:
        """Why the empty cluster and the limits of its queue could never hold this job, or None."""
        spares = self.profile.spares if spec.priority >= 0 else 0  # opportunistic work may lie on them
        short = admission.shape_feasible(
            self._empties.of(self.state, spares), compile_shape(self._requests_of(spec)), spec.queue
        )
        follow = () if short is None else [one for one in short.nearest if admission.can_follow(spec, one)]
        return None if short is None else replace(short, nearest=tuple(follow))

    def find_queue(self, path: str) -> str | None:
        """None if jobs may be submitted to this queue; else a sentence that says why not and what to use."""
        return self.state.queues.find_problem(path)

    def explain(self, job: JobId, now: float) -> explain.SchedulerExplanation | None:
        """Why a live job waits, and what would make it start now; None for a job that is not known here."""
        if job not in self.state.jobs:
            return None
        with self._at_work():
            found = explain.explain(self.state, self.profile, job, now)
        if (known := self._jobs.get(job)) is None:
            return found
        offers = [one for one in found.would_start_now_with if admission.can_follow(known.spec, one["change"])]
        return replace(found, would_start_now_with=tuple(offers))

    def wait_of(self, job: JobId, now: float) -> Wait | None:
        """Why a job waits, with what holds for one that is tried before it; None where no pass gave it a reason."""
        return wait_of(self.state, self.profile, job, now)

    def waits_now(self, now: float) -> Callable[[JobId], Wait | None]:
        """The same for many jobs, to be asked before the next record is applied."""
        return waits_now(self.state, self.profile, now)

    def explain_spec(self, spec: JobSpec, now: float, user: str) -> explain.SchedulerExplanation:
        """The same for a job that was not submitted: would it start now, and if not, why not."""
        return self.explain_ask(self._ask_of(JobId("(dry run)"), spec, user, now), now)

    def explain_ask(self, ask: JobAsk, now: float) -> explain.SchedulerExplanation:
        """The same for what a job asks, or would ask if it were changed; the state is as it was afterwards."""
        with self._at_work():
            return explain.explain_ask(self.state, self.profile, ask, now)

    def ask_with(self, job: JobId, spec: JobSpec) -> JobAsk:
        """What a live job would ask with another spec, at its own place in the queue."""
        known = self._jobs[job]
        return self._ask_of(job, spec, known.user, known.queued_at)

    def _ask_of(self, job: JobId, spec: JobSpec, user: str, queued_at: float) -> JobAsk:
        ask = ask_of(job, spec, self._requests_of(spec), user=user, queued_at=queued_at)
        return replace(ask, after=self._after(spec), choices=choices_of(spec, self._requests_of))
