"""Diagnosis of hangs from heartbeats and their absence: who waits for whom, which instance is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypedDict

from rota.job.core.context import InstanceRecord, JobContext, Process
from rota.job.core.desired import next_emit
from rota.job.core.progress import (
    Pace,
    RankStatus,
    RateWatch,
    Root,
    VertexStatus,
    WaitEdge,
    WaitGraph,
    collective_waits,
    memory_evidence,
    stragglers,
)
from rota.job.health.heartbeat import BEAT_S, SETTING_UP, Heartbeat
from rota.runtime.clock import Clock
from rota.runtime.probe import LOOK_S, STOPPED_LOOKS
from rota.spec import codec
from rota.spec.codec import JsonObject
from rota.spec.events import InstanceLost, JobEvent, ProgressStalled
from rota.spec.ids import Epoch, InstanceId, RoleName
from rota.spec.job import Fail
from rota.spec.reasons import Reason
from rota.spec.states import InstanceState

SILENCE_MAX_S = 80.0
"""After this long without a beat the master treats an instance as gone: it has ended itself before."""
SILENT_S = (4 * BEAT_S, 30.0)
"""An instance counts as silent after half its limit on progress without a beat, but within these bounds."""
SUSPECT_S = 2.0
"""Without progress for this time an instance is named by ``rota why`` before any limit is reached."""
WORKING_CPUS, WORKING_FACTOR = 0.5, 12.0
"""A loop that uses this share of a core computes; without ``f.quiet`` its limit on silence is longer by this factor."""
MARKS_NOTHING = "its command has marked no progress yet"
MARKS_COLLECTIVES = "its command marks no step, only collectives"
"""Such a command has no limit unless its role gives one, but it is suspected when it makes no progress."""
STILL_MIN_S = 1.5
"""Without progress for this time a member of a process group waits in a collective."""
STACKS_AT_ONCE_MAX = 4
MASTER = "master"
STRANGER = "no part of this job"
STOPPED = "nothing: its process is stopped by a signal"

Heard = Mapping[InstanceId, Heartbeat | None]
"""The last beat of each instance under its present epoch."""
InstanceEpoch = tuple[InstanceId, Epoch]
Absent = Mapping[str, tuple[str, ...]]
"""Role to the instances that have not come to the meeting of its process group."""


class RootRow(TypedDict):
    """Where waiting ends: one culprit, or several that wait for each other along ``cycle``; and who waits for them."""

    members: list[str]
    deadlock: bool
    text: str
    cycle: list[JsonObject]
    """``WaitEdge`` as plain values."""
    waiters: list[str]


class SlowInstance(TypedDict):
    """An instance that is slower than the others by ``factor``."""

    instance: str
    factor: float


class WhyDocument(TypedDict):
    """The wait-for graph now; ``stacks`` by instance are those of culprits and suspects."""

    vertices: list[JsonObject]
    """``VertexStatus`` as plain values, with ``stuck`` and the ``state`` of the instance; the master comes last."""
    slow: list[SlowInstance]
    dropped: list[str]
    waits: list[JsonObject]
    culprits: list[RootRow]
    suspects: list[RootRow]
    stacks: dict[str, str]


@dataclass(slots=True)
class DiagnosisManager:
    """The last beat of each instance, and what follows from it; belongs to one master.

    ``since`` is when the master first saw an instance ready under its epoch: a new master, and a new epoch, give every
    instance the whole limit again.
    """

    clock: Clock
    oom_kills: Callable[[], int | None] = lambda: None
    """How many processes the kernel has ended for memory here; None when it is not counted."""
    is_stopped: Callable[[Process], bool] = lambda which: False
    """Whether a process of this node is stopped by a signal."""
    halted: Mapping[InstanceEpoch, int] = field(default_factory=dict[InstanceEpoch, int])
    """Looks in a row that found the process of an instance stopped."""
    kills: int | None = None
    beats: dict[InstanceId, tuple[Heartbeat, float]] = field(default_factory=dict[InstanceId, tuple[Heartbeat, float]])
    since: dict[InstanceEpoch, float] = field(default_factory=dict[InstanceEpoch, float])
    rates: dict[InstanceId, RateWatch] = field(default_factory=dict[InstanceId, RateWatch])
    """Cores in use: where they drop without an excuse, the limit on progress is halved."""
    stalled: set[InstanceEpoch] = field(default_factory=set[InstanceEpoch])
    late: Mapping[InstanceEpoch, InstanceState] = field(default_factory=dict[InstanceEpoch, InstanceState])
    """Instances that are not ready yet, with their states; ``came_s`` is when one of them last made progress."""
    came_s: float = 0.0

    def __post_init__(self) -> None:
        """Count from now on."""
        self.kills, self.came_s = self.oom_kills(), self.clock.monotonic_s()

    def with_evidence(self, lost: InstanceLost) -> InstanceLost:
        """A SIGKILL that the kernel counted as one for memory was that."""
        before, now = self.kills, self.oom_kills()
        evidence = memory_evidence(lost.signal, before, now)
        # One count proves one death: where the kernel ended several, the next report has its own.
        self.kills = before + 1 if evidence and before is not None else now
        return replace(lost, reason=Reason.OOM_KILLED, text=evidence) if evidence else lost

    def heard(self, beat: Heartbeat) -> None:
        """Note a beat."""
        now_s = self.clock.monotonic_s()
        older, _ = self.beats.get(beat.id, (None, 0.0))
        self.beats[beat.id] = (beat, now_s)
        computes = beat.cpus >= WORKING_CPUS and not (beat.waits or beat.inside)
        if SETTING_UP in beat.busy and (beat.idle_s < 2 * BEAT_S or computes):
            self.came_s = now_s
        if older is None or older.epoch != beat.epoch:
            self.rates[beat.id] = RateWatch()
            return
        excused = bool(beat.quiet or beat.waits or not beat.busy)
        progress = beat.progress_n > older.progress_n
        self.rates[beat.id] = self.rates[beat.id].seen(now_s, beat.cpus, progress=progress, excused=excused)

    def coming(self, ctx: JobContext) -> tuple[float, dict[str, str]]:
        """Seconds without progress in the present start, and what each instance last reported.

        A process that appears, one that gets ready, an import, a mark of progress and work of a core are steps; a beat
        is none, nor is a processor that spins in a collective.
        """
        now_s, late = self.clock.monotonic_s(), dict[InstanceEpoch, InstanceState]()
        for one in ctx.instances.values():
            if one.state in (InstanceState.STARTING, InstanceState.STALE):
                late[one.id, one.epoch] = one.state
        if late != self.late:
            self.late, self.came_s = late, now_s
        heard = {one: beat for one, _ in late if (beat := self._beat(ctx.instances[one])) is not None}
        doing = {
            str(one): f"last heard {now_s - self.beats[one][1]:.0f} s ago, in {', '.join(beat.busy) or 'nothing'}"
            for one, beat in heard.items()
        }
        return now_s - self.came_s, doing

    def slow(self, ctx: JobContext) -> dict[str, float]:
        """Members that are much slower than their role, with how many times its median step theirs takes."""
        found: dict[str, float] = {}
        for members in ctx.plan.ranks.values():
            beats = [self._beat(ctx.instances[one]) for one in members if one in ctx.instances]
            found |= stragglers({str(one.id): Pace(steps=one.steps, step_s=one.step_s) for one in beats if one})
        return found

    def graph(self, ctx: JobContext, absent: Absent | None = None) -> WaitGraph:
        """The wait-for graph now. Works on the last beats; a beat of another epoch says nothing."""
        if ctx.spec is None:
            return WaitGraph(statuses={})
        present = [one for one in ctx.instances.values() if not (one.ended or one.retired)]
        heard = {one.id: self._beat(one) for one in present}
        waits = list(self._reported(ctx, heard, absent or {}))
        waits += self._collectives(ctx, heard)
        waits += self._starts(ctx, present)
        waited: dict[str, float] = {}
        for wait in waits:
            waited[wait.target] = max(waited.get(wait.target, 0.0), wait.age_s)
        statuses = {str(one.id): self._status(ctx, one, waited.get(str(one.id))) for one in present}
        strangers = set(waited) - set(statuses) - {MASTER}
        limit_s = max((role.fail.progress_s for role in ctx.spec.roles), default=0.0)
        statuses |= {
            name: VertexStatus(name=name, limit_s=limit_s, still_s=waited[name], doing=STRANGER) for name in strangers
        }
        return WaitGraph(waits=tuple(waits), statuses=statuses)

    def _beat(self, one: InstanceRecord) -> Heartbeat | None:
        beat, _ = self.beats.get(one.id, (None, 0.0))
        return beat if beat is not None and beat.epoch == one.epoch else None

    def _silent_s(self, one: InstanceRecord) -> float:
        """Seconds without a beat, counted for as long as this master could have heard one."""
        now_s = self.clock.monotonic_s()
        _, at_s = self.beats.get(one.id, (None, 0.0))
        return now_s - max(at_s, self.since.get((one.id, one.epoch), now_s))

    def _is_silent(self, ctx: JobContext, one: InstanceRecord) -> bool:
        least_s, most_s = SILENT_S
        return self._silent_s(one) > min(most_s, max(least_s, _limit_s(ctx, one) / 2))

    def _reported(self, ctx: JobContext, heard: Heard, absent: Absent) -> Iterator[WaitEdge]:
        """The waits that instances report; those of a silent one are out of date: it is what others wait for."""
        names = {str(one) for one in heard}
        for instance, beat in heard.items():
            one = ctx.instances[instance]
            if beat is None or self._is_silent(ctx, one):
                continue
            age_s = self.clock.monotonic_s() - self.beats[instance][1]
            for wait in beat.waits:
                older = replace(wait, age_s=round(wait.age_s + age_s, 3))
                if wait.kind == "meeting":
                    missing = [name for name in absent.get(instance.role, ()) if name != wait.source]
                    yield from (replace(older, target=name) for name in missing)
                elif wait.target in names or wait.target not in ctx.plan.ranks:
                    yield older
                else:
                    members = (str(member.id) for member in ctx.of_role(RoleName(wait.target)))
                    yield from (replace(older, target=name) for name in members if name in names)

    def _collectives(self, ctx: JobContext, heard: Heard) -> Iterator[WaitEdge]:
        for members in ctx.plan.ranks.values():
            beats = {member: heard[member] for member in members if member in heard and ctx.instances[member].active}
            ranks = [
                RankStatus(
                    name=str(member),
                    entered=beat.collectives,
                    inside=bool(beat.inside),
                    silent=self._is_silent(ctx, ctx.instances[member]) or beat.stopped_s > 0,
                    still_s=beat.idle_s,
                )
                for member, beat in beats.items()
                if beat is not None
            ]
            if len(ranks) > 1 and len(ranks) == len(beats):
                yield from collective_waits(ranks, still_min_s=STILL_MIN_S)

    def _starts(self, ctx: JobContext, present: Iterable[InstanceRecord]) -> Iterator[WaitEdge]:
        age_s = max(0.0, self.clock.wall_s() - ctx.starting_s)
        for one in present:
            if one.state in (InstanceState.STARTING, InstanceState.STALE):
                what = "to start" if one.state is InstanceState.STARTING else "to be set up"
                yield WaitEdge(source=MASTER, target=str(one.id), kind="start", what=what, age_s=round(age_s, 3))

    def _status(self, ctx: JobContext, one: InstanceRecord, waited_s: float | None) -> VertexStatus:
        beat, limit_s, silent_s = self._beat(one), _limit_s(ctx, one), self._silent_s(one)
        role = ctx.role(one.id.role)
        if beat is not None and self.rates[one.id].dropped:
            limit_s /= 2
        elif beat is not None and role.is_loop and beat.cpus >= WORKING_CPUS:
            limit_s *= WORKING_FACTOR
        still_s = excuse = doing = None
        if one.state is not InstanceState.READY:
            excuse = f"it is {one.state.value}"
        elif beat is None:
            # Nothing was heard under this epoch yet: what is known is how long others have waited.
            still_s = 0.0 if waited_s is None else min(waited_s, silent_s)
        else:
            excuse, doing = beat.quiet, ": ".join(text for text in (", ".join(beat.busy), beat.held_up) if text)
            unmarked = role.run is not None and beat.progress_n == 0 and role.fail.progress_s == Fail().progress_s
            if unmarked and not (beat.stopped_s or self._is_silent(ctx, one)):
                excuse = excuse or (MARKS_NOTHING if beat.collectives < 0 else MARKS_COLLECTIVES)
            extra_s = silent_s if self._is_silent(ctx, one) else 0.0
            if SETTING_UP in beat.busy:
                still_s = 0.0  # it is ready, so this was reported before: slow is not hung
            elif beat.busy:
                idle_s = 0.0 if unmarked and beat.stopped_s else beat.idle_s
                still_s = max(idle_s, beat.stopped_s) + extra_s
            elif waited_s is not None:
                still_s = min(waited_s, beat.still_s + extra_s)
        if looks := self.halted.get((one.id, one.epoch), 0):
            still_s, excuse, doing = max(still_s or 0.0, looks * LOOK_S), "", STOPPED
        return VertexStatus(
            name=str(one.id),
            limit_s=limit_s,
            still_s=round(still_s or 0.0, 3),
            silent_s=round(silent_s, 3) if one.state is InstanceState.READY else 0.0,
            excuse=excuse or "",
            doing=doing or "",
        )

    def overdue(self, ctx: JobContext, absent: Absent | None = None) -> list[JobEvent]:
        """Events of silences that are too long now, each once an epoch; only instances that hold up the rest."""
        now_s = self.clock.monotonic_s()
        watched = [one for one in ctx.instances.values() if one.state is InstanceState.READY]
        self.since = {key: self.since.get(key, now_s) for key in ((one.id, one.epoch) for one in watched)}
        self.stalled &= set(self.since)
        found: dict[InstanceId, JobEvent] = {}
        if ctx.spec is None:
            return []
        for one in watched:
            if (silent_s := self._silent_s(one)) > SILENCE_MAX_S:
                text = f"no beat for {silent_s:.0f} s"
                found[one.id] = InstanceLost(
                    role=one.id.role, rank=one.id.rank, epoch=one.epoch, reason=Reason.HANG, text=text
                )
        self.coming(ctx)
        self._look(ctx)
        graph = self.graph(ctx, absent)
        found |= dict(self._stopped(ctx, graph))
        for root in graph.roots():
            for one in self._at_fault(graph, root, watched):
                found.setdefault(one.id, _stall(graph, root, one))
        fresh = {(one, ctx.instances[one].epoch): event for one, event in found.items()}
        new = [event for key, event in fresh.items() if key not in self.stalled]
        self.stalled |= set(fresh)
        return new

    def _look(self, ctx: JobContext) -> None:
        """Count the looks that found a process stopped. It cannot make progress, whatever its limit is."""
        alive = [one for one in ctx.instances.values() if one.process is not None and one.alive]
        stopped = [(one.id, one.epoch) for one in alive if one.process is not None and self.is_stopped(one.process)]
        self.halted = {key: self.halted.get(key, 0) + 1 for key in stopped}

    def _stopped(self, ctx: JobContext, graph: WaitGraph) -> Iterator[tuple[InstanceId, JobEvent]]:
        """Instances that are given up because their process was stopped at each of the last looks."""
        for (one, epoch), looks in self.halted.items():
            if looks < STOPPED_LOOKS:
                continue
            pid = process.pid if (process := ctx.instances[one].process) is not None else 0
            text = f"{one} makes no progress: its process {pid} is stopped by a signal"
            if waiters := graph.waiters(Root(members=(str(one),))):
                text = f"{text}; {_are_waiting(waiters)}"
            role, rank, reason = one.role, one.rank, Reason.NO_PROGRESS
            if ctx.instances[one].state is InstanceState.READY:
                idle_s = looks * LOOK_S
                yield one, ProgressStalled(role=role, rank=rank, epoch=epoch, idle_s=idle_s, reason=reason, text=text)
            else:
                yield one, InstanceLost(role=role, rank=rank, epoch=epoch, reason=reason, text=text, alive=True)

    def _at_fault(self, graph: WaitGraph, root: Root, watched: Iterable[InstanceRecord]) -> list[InstanceRecord]:
        """The members of a root; when it is not part of the job, those who wait for it: only they can be replaced."""
        inside = [one for one in watched if str(one.id) in root.members]
        if inside or not root.members:
            return inside
        direct = {wait.source for wait in graph.waits if wait.target in root.members}
        direct = {name for name in direct if name in graph.statuses and graph.statuses[name].stuck}
        return [one for one in watched if str(one.id) in direct]

    def suspects(self, graph: WaitGraph) -> tuple[Root, ...]:
        """The instances at fault if every limit were ``SUSPECT_S``: shown before the limit is reached."""
        statuses = {
            name: replace(
                one,
                limit_s=min(one.limit_s, SUSPECT_S),
                excuse="" if one.excuse == MARKS_COLLECTIVES else one.excuse,
            )
            for name, one in graph.statuses.items()
        }
        return replace(graph, statuses=statuses).roots()

    async def explain(
        self, ctx: JobContext, absent: Absent, stacks: Callable[[str, int], Awaitable[str]]
    ) -> WhyDocument:
        """The graph as a document; culprits, and who is suspected before a limit is reached, with their stacks."""
        document = self._document(ctx, self.graph(ctx, absent))
        named = {name for root in (*document["culprits"], *document["suspects"]) for name in root["members"]}
        blamed = [one for one in ctx.instances if str(one) in named][:STACKS_AT_ONCE_MAX]
        found = await asyncio.gather(*(stacks(one.role, one.rank) for one in blamed))
        return {**document, "stacks": {str(one): text for one, text in zip(blamed, found, strict=True)}}

    def _document(self, ctx: JobContext, graph: WaitGraph) -> WhyDocument:
        culprits = graph.roots()
        suspects = tuple(root for root in self.suspects(graph) if root not in culprits)
        return {
            "vertices": [
                {**codec.to_json_value(one), "stuck": one.stuck, "state": _state(ctx, name)}
                for name, one in graph.statuses.items()
            ]
            + [_master_row(ctx)],
            "slow": [{"instance": name, "factor": round(factor, 2)} for name, factor in self.slow(ctx).items()],
            "dropped": [str(one) for one, watch in self.rates.items() if watch.dropped and one in ctx.instances],
            "waits": [codec.to_json_value(wait) for wait in graph.waits],
            "culprits": [_root(graph, root) for root in culprits],
            "suspects": [_root(graph, root) for root in suspects],
            "stacks": {},
        }


def _limit_s(ctx: JobContext, one: InstanceRecord) -> float:
    return ctx.role(one.id.role).fail.progress_s


def _state(ctx: JobContext, name: str) -> str:
    return next((one.state.value for one in ctx.instances.values() if str(one.id) == name), "")


def _master_row(ctx: JobContext) -> JsonObject:
    """What the master waits for before it takes its next decision, as a vertex."""
    step = next_emit(ctx)
    doing = f"about to write {type(step.event).__name__}" if step else step.why
    status = VertexStatus(name=MASTER, limit_s=0.0, doing=doing)
    return {**codec.to_json_value(status), "stuck": status.stuck, "state": ctx.state}


def _root(graph: WaitGraph, root: Root) -> RootRow:
    return {
        "members": list(root.members),
        "deadlock": root.deadlock,
        "text": sentence(graph, root),
        "cycle": [codec.to_json_value(wait) for wait in root.cycle],
        "waiters": list(graph.waiters(root)),
    }


def sentence(graph: WaitGraph, root: Root) -> str:
    """What people read: who makes no progress, at what, since when, and who waits for it."""
    if root.deadlock:
        return "; ".join(str(wait) for wait in root.cycle)
    one = graph.statuses[root.members[0]]
    parts = [f"{one.name} made no progress for {one.still_s:.0f} s"]
    if one.doing == STRANGER:
        parts = [f"{one.name}, no part of this job, was waited for {one.still_s:.0f} s"]
    elif one.doing:
        parts.append(f"in {one.doing}")
    if one.silent_s > SILENT_S[0]:
        parts.append(f"and does not answer since {one.silent_s:.0f} s")
    waiters = graph.waiters(root)
    return " ".join(parts) + (f"; {_are_waiting(waiters)}" if waiters else "")


def _are_waiting(waiters: tuple[str, ...]) -> str:
    return f"{', '.join(waiters[:8])} {'waits' if len(waiters) == 1 else 'wait'} for it"


def _stall(graph: WaitGraph, root: Root, one: InstanceRecord) -> ProgressStalled:
    reason = Reason.HANG if root.deadlock else Reason.NO_PROGRESS
    still_s = graph.statuses[str(one.id)].still_s
    return ProgressStalled(
        role=one.id.role,
        rank=one.id.rank,
        epoch=one.epoch,
        idle_s=still_s,
        reason=reason,
        text=sentence(graph, root),
    )
