"""Scheduling events: what happened to jobs and nodes, and how they change the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rota.cluster.core.choice import sizes_now
from rota.cluster.core.jobs import Allocations, Choice, JobAsk, LiveJob, Wait
from rota.cluster.core.run_time import expected, learn, paced
from rota.cluster.core.splits import noted
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId, NodeId
from rota.spec.resources import Health


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArrived:
    """A job waits for devices from now on; again with another ask when the job changed while it waited."""

    ask: JobAsk


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHolds:
    """A job was given these devices, for one of its choices if it has some."""

    job: JobId
    held: Allocations
    choice: Choice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResized:
    """A running job has these devices now, at least those that it asked for."""

    job: JobId
    held: Allocations


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRegained:
    """A job that stops, as nodes lacked what it was given, has these devices now that they are back."""

    job: JobId
    held: Allocations


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMeasured:
    """How fast a job runs on the devices that it shares, 1 = as fast as alone."""

    job: JobId
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairUndone:
    """Jobs of these kinds did not gain by sharing devices and are not to be tried again."""

    job: JobId
    pair: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """A job was asked for all its devices, or for those of a part of it; it holds them until it lets go.

    ``final``: then it ends or is paused, and does not wait again. ``for_job``: for whom it is, if for one.
    """

    job: JobId
    final: bool = False
    for_job: JobId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReleased:
    """A job released all devices and is queued again; with ``back_at`` not before that time.

    ``done_s`` is how much of its estimated time is over with in all attempts, None: no more than before.
    """

    job: JobId
    back_at: float = 0.0
    done_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSaved:
    """A job made its progress durable; ``n`` is the number of the commit, 0 unknown.

    ``waited`` has the seconds that it waited for each role since the one before.
    """

    job: JobId
    n: int = 0
    waited: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWasDown:
    """Nothing of a job ran since that time, though it held what it holds."""

    job: JobId
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPaused:
    """A waiting job is not to be tried, or to be tried again."""

    job: JobId
    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonGiven:
    """It became known why a job waits."""

    job: JobId
    wait: Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGone:
    """A job ended."""

    job: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanged:
    """The fitness of a node or some of its devices changed; None = the node left."""

    node: NodeId
    health: Health | None
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesLaidOut:
    """The node table was rebuilt, with the jobs; allocations beyond the new capacity stay allocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed."""


_OF_NO_JOB = (JobArrived, NodeChanged, NodesLaidOut, Tick)

Event = (
    JobArrived
    | JobHolds
    | JobResized
    | JobRegained
    | JobMeasured
    | PairUndone
    | StopRequested
    | JobReleased
    | JobSaved
    | JobWasDown
    | JobPaused
    | ReasonGiven
    | JobGone
    | NodeChanged
    | NodesLaidOut
    | Tick
)


def apply(state: State, event: Event, now: float) -> None:
    """Fold one event into the state. Events of jobs that are not there change nothing: they came late or twice."""
    note(state, event, now)
    with state.txn() as txn:
        fold(state, txn, event, now)
        txn.keep()


def note(state: State, event: Event, now: float) -> None:
    """Remember an event for the message of an internal error; those that change no job or node are left out."""
    match event:
        case NodesLaidOut() | Tick() | ReasonGiven():
            return
        case JobArrived(ask=ask):
            subject = ask.id
        case NodeChanged(node=node):
            subject = node
        case _:
            subject = event.job
    state.events.append((now, subject, type(event).__name__))
    state.happened += 1


def fold(state: State, txn: Txn, event: Event, now: float) -> None:
    """Fold one event into the state, inside a transaction of the caller, which may be undone."""
    row = None if isinstance(event, _OF_NO_JOB) else state.jobs.get(event.job)
    if state.stopped_for and _is_from_outside(event, row):
        for pair in tuple(state.stopped_for):
            txn.drop(state.stopped_for, pair)
    match event:
        case JobArrived(ask=ask):
            old = state.jobs.get(ask.id)
            if old is None or not old.held:
                same = old is not None and old.ask.after == ask.after
                likely_s, late_s = expected(state.taken, ask)
                known = LiveJob(ask=ask, likely_s=likely_s, late_s=late_s)
                if old is not None:
                    wait = old.wait if same else None
                    known = old._replace(ask=ask, wait=wait, likely_s=likely_s, late_s=late_s)
                state.put(txn, known)
        case JobHolds(job=job, held=held, choice=choice) if row and held and row.phase in ("queued", "paused"):
            state.hold(txn, job, held, now=now, choice=choice)
        case JobGone(job=job) if row is not None:
            learn(state.taken, txn, row, now)
            state.drop(txn, job)
        case NodeChanged(node=node, health=health, devices=devices):
            state.mark(txn, node, health, devices)
        case NodesLaidOut():
            state.note_shrunk(txn)
        case JobResized(job=job, held=held) if row is not None and row.phase == "running":
            state.resize(txn, job, held)
        case JobRegained(job=job, held=held) if row is not None and row.held:
            state.resize(txn, job, held)
        case JobMeasured(rate=rate) if row is not None and row.held:
            state.put(txn, row._replace(rate=rate))
        case PairUndone(pair=pair):
            txn.put(state.undone, pair, None)
        case StopRequested(job=job, final=final, for_job=for_job) if row is not None and row.held:
            for one in state.whole(job):
                state.put(txn, state.jobs[one]._replace(phase="stopping", final=final))
            if for_job:
                txn.put(state.stopped_for, (job, for_job), now)
        case JobReleased(job=job, back_at=back_at, done_s=done_s) if row is not None and row.held:
            served_s, done_s = row.served_by(now), row.done_s if done_s is None else done_s
            # A time that is over is none: else each of those that let go would wait in a line of its own.
            after = back_at if back_at > now else 0.0
            state.release(txn, job, back_at=after, left_at=now, served_s=served_s, done_s=done_s)
        case JobSaved(n=n, waited=waited) if row is not None:
            row = paced(row._replace(saved_at=now), n, now)
            state.put(txn, noted(row, sizes_now(state, row), n, now, waited) if waited and row.ask.choices else row)
        case JobWasDown(since=since) if row is not None and row.held:
            away_s = max(0.0, now - max(since, row.started_at))
            state.put(txn, row._replace(served_s=row.served_s - away_s, done_s=row.done_s - away_s))
        case JobPaused(paused=paused) if row is not None and row.phase in ("queued", "paused"):
            state.put(txn, row._replace(phase="paused" if paused else "queued"))
        case ReasonGiven(wait=wait) if row is not None and not row.held:
            state.put(txn, row._replace(wait=wait))
        case _:
            pass


def _is_from_outside(event: Event, row: LiveJob | None) -> bool:
    """Whether an event changes requests or capacity, and does not only follow from decisions."""
    match event:
        case JobArrived(ask=ask):
            return ask.part_of is None
        case JobGone():
            return row is not None and row.ask.part_of is None
        case JobReleased():
            return row is not None and (row.phase != "stopping" or row.final)
        case JobPaused(paused=paused):
            return not paused
        case NodeChanged():
            return True
        case _:
            return False
