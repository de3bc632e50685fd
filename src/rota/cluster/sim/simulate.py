"""Simulation of a trace: the same cycle in virtual time, and its runs from files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota.cluster.core import cycle, events
from rota.cluster.core.admission import shape_feasible, unusable_share
from rota.cluster.core.capacity import GPU, UNLIMITED
from rota.cluster.core.choice import parts_of, sizes_now, step_s_of, step_s_on
from rota.cluster.core.guarded import guarded, violations
from rota.cluster.core.jobs import Allocations, JobAsk, LineKey, LiveJob, Wait, line_key
from rota.cluster.core.profile import Admit, Preempt, Profile, Resize, WaitOn, WakeAt
from rota.cluster.core.state import State
from rota.cluster.sim.report import (
    RunFigures,
    Sample,
)
from rota.cluster.sim.sharing import HALF, pair_of, partners
from rota.runtime.clock import Clock
from rota.spec.ids import JobId, NodeId
from rota.spec.reasons import Reason
from rota.spec.resources import Health
from rota.spec.user_code import UserCode

PASSES_MAX = 10_000
"""Passes at one instant; more of them mean that decisions undo each other for ever."""
END, RELEASE, FAIL, ARRIVE, WAKE = range(5)
"""Kinds of events in the order in which those of one instant are taken: what frees devices comes before what asks."""


class Due(NamedTuple):
    """An event that is to come, in the order of the queue of events.

    ``name`` is that of a job or of a node. ``number`` is the plan of an END and the attempt of a RELEASE, void where
    there is a newer one; of a node it puts the loss before the return.
    """

    at: float
    kind: int
    name: str = ""
    number: int = 0
    saved_s: float | None = None
    """RELEASE: when the job saved to be suspended."""
    health: Health | None = None
    """FAIL: that of the node that comes back; None: it goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimJob:
    """A job with its true length: ``work_s`` seconds on devices of speed 1 that are close enough.

    Of a job with choices it is the time of its first one, whose predicted seconds a step the others are compared with.
    """

    ask: JobAsk
    submit_s: float
    work_s: float
    deadline_s: float | None = None
    checkpoint_every_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """A node that is gone from ``at_s`` to ``back_s``."""

    node: NodeId
    at_s: float
    back_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Seconds that starting, restoring and giving back take, and how fast devices and placements are.

    ``speeds`` by device type and ``locality`` by level (device, node, rack, cluster); 1 where nothing is said.
    """

    start_s: float = 0.0
    restore_s: float = 0.0
    checkpoint_s: float = 0.0
    preempt_delay_s: float = 0.0
    speeds: Mapping[str, float] = field(default_factory=dict[str, float])
    locality: Mapping[str, float] = field(default_factory=dict[str, float])
    sharing: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """How fast each of two jobs on the same devices runs, by their kinds in order; else ``sharing_speed``."""
    sharing_speed: float = 0.5


@dataclass(slots=True, kw_only=True)
class JobRun:
    """What happened to one job."""

    job: SimJob
    first_start_s: float | None = None
    first_work_s: float | None = None
    """When it first computed: its start cost was over and it still had its devices."""
    end_s: float | None = None
    attempts: int = 0
    preemptions: int = 0
    lost_gpu_s: float = 0.0
    used_gpu_s: float = 0.0
    level: str = ""
    done_s: float = 0.0
    started_s: float = 0.0
    work_from_s: float = 0.0
    rate: float = 1.0
    plan: int = 0
    """Grows with every start and every change of the rate; an expected end of an older plan is void."""
    gpus: float = 0.0
    """Devices that it has now; half of each where two share them."""
    never: Wait | None = None
    """Why it would not start on the empty cluster either."""
    row: LiveJob | None = None
    """The job when the run is over, unless it ended or never was in the state."""

    @property
    def state(self) -> str:
        """What has become of it when the run is over."""
        if self.end_s is not None:
            return "SUCCEEDED"
        if self.row is not None and self.row.held:
            return "RUNNING"
        return "UNSCHEDULABLE" if self.never and self.first_start_s is None else "QUEUED"

    @property
    def why(self) -> Wait | None:
        """Why it never starts, or waits when the run is over."""
        return self.row.wait if self.row is not None else self.never


@dataclass(slots=True, kw_only=True)
class SimResult(RunFigures):
    """Everything a report needs."""

    runs: dict[JobId, JobRun]
    borrowed_gpu_s: dict[str, float] = field(default_factory=dict[str, float])
    samples: list[Sample] = field(default_factory=list[Sample])


class Simulation:
    """One simulated run: feeds arrivals, ends and node failures to the scheduling cycle; ``state`` has no jobs yet."""

    def __init__(
        self,
        state: State,
        profile: Profile,
        jobs: Sequence[SimJob],
        clock: Clock,
        *,
        overheads: Overheads | None = None,
        failures: Sequence[NodeFailure] = (),
        check_every: int = 1000,
        until_s: float = float("inf"),
        stop_when_started: Iterable[JobId] = (),
        now: float | None = None,
        wall_max_s: float = float("inf"),
        between_passes: Callable[[], None] = lambda: None,
    ) -> None:
        self.state, self.profile, self.clock = state, profile, clock
        self.overheads = overheads or Overheads()
        self.check_every, self.until_s, self._to_start = check_every, until_s, set(stop_when_started)
        self._stops_early = bool(self._to_start)
        self.wall_max_s, self._between_passes = wall_max_s, between_passes
        self.runs: dict[JobId, JobRun] = {job.ask.id: JobRun(job=job) for job in jobs}
        self.heap: list[Due] = []
        self.wakes: set[float] = set()
        self.measured: dict[JobId, float] = {}
        self._dependents: dict[JobId, list[JobId]] = {}
        self._empty: State | None = None
        self._never: dict[LineKey, Wait | None] = {}
        self._left_out = set[JobId]()
        first = min((job.submit_s for job in jobs), default=0.0) if now is None else now
        usable = state.usable[state.dev_node] & (state.dev_health == 0)  # also those that jobs have now
        self.result = SimResult(runs=self.runs, first_s=first, last_s=first, gpus=int(usable.sum()))
        self._borrowed = [0.0] * len(state.queues.rows)
        promised: list[int] = state.queues.guaranteed[:, GPU].tolist()
        self._promised = [milli or UNLIMITED for milli in promised]
        self._roots = [row for row, queue in enumerate(state.queues.rows) if queue.parent is None]
        self._samples: list[float] = []
        self._whole, self._part = _shares_of(state)
        self._gap_s = self._waiting_s = 0.0
        self.now = first
        for job in jobs:
            row = state.jobs.get(job.ask.id)
            if row is not None:
                self.runs[job.ask.id].done_s = row.done_s
            if row is not None and row.held:
                self._resume_run(job)
            else:
                heappush(self.heap, Due(job.submit_s, ARRIVE, job.ask.id))
        for failure in failures:
            heappush(self.heap, Due(failure.at_s, FAIL, failure.node))
            heappush(self.heap, Due(failure.back_s, FAIL, failure.node, 1, health=Health.HEALTHY))

    def run(self) -> SimResult:
        """Play everything to the end; jobs that wait for ever stay QUEUED. Raises InvariantBroken if time stops."""
        began, passes = self.clock.monotonic_s(), 0
        while self.heap and self.heap[0].at <= self.until_s:
            passes = passes + 1 if self.heap[0].at == self.now else 0
            if passes > PASSES_MAX:
                raise self.state.broken(f"{PASSES_MAX} passes at {self.now}: jobs are started and stopped in a circle")
            self._advance(self.heap[0].at)
            happened = False
            while self.heap and self.heap[0].at == self.now:
                happened = self._happen(heappop(self.heap)) or happened
            if not happened:
                continue
            self._between_passes()
            self._decide()
            if self._stops_early and not self._to_start:
                break
            if self.clock.monotonic_s() - began > self.wall_max_s:
                break
        result = self.result
        result.borrowed_gpu_s = {queue.path: seconds for queue, seconds in zip(self.state.queues.rows, self._borrowed)}
        result.fragmentation = float(np.mean(self._samples)) if self._samples else 0.0
        result.share_gap = self._gap_s / self._waiting_s if self._waiting_s else 0.0
        for job in self.runs.keys() & self.state.jobs.keys():
            self.runs[job].row = self.state.jobs[job]
        result.violations += len(violations(self.state))
        result.wall_s = self.clock.monotonic_s() - began
        return result

    def _resume_run(self, job: SimJob) -> None:
        run = self.runs[job.ask.id]
        run.attempts = 1
        run.first_start_s = run.started_s = self.now
        run.work_from_s = self.state.jobs[job.ask.id].started_at
        run.gpus = job.ask.shape.gpu_milli / 1000
        ends_s = max(self.now, run.work_from_s + job.work_s - run.done_s)
        heappush(self.heap, Due(ends_s, END, job.ask.id, run.plan))
        if self.state.jobs[job.ask.id].phase == "stopping":
            heappush(self.heap, Due(self.now + job.ask.grace_s, RELEASE, job.ask.id, run.attempts))

    def _advance(self, to: float) -> None:
        seconds = to - self.now
        if seconds > 0:
            used: list[int] = self.state.used[:, GPU].tolist()
            for row, (milli, promised) in enumerate(zip(used, self._promised)):
                if milli > promised:
                    self._borrowed[row] += (milli - promised) * (seconds / 1000)
            gap = self._share_gap() if self.state.lines else 0.0
            if self.state.lines:
                self._gap_s += seconds * gap
                self._waiting_s += seconds
            waiting = sum(map(len, self.state.waiting.values()))
            self.result.samples.append(
                Sample(self.now, seconds, sum(used[row] for row in self._roots) / 1000, waiting, gap)
            )
        self.now = to

    def _share_gap(self) -> float:
        """How much more of its part the best served queue uses than the worst served of those that wait."""
        shares = (self.state.used[:, : len(self._whole)] / self._whole).max(axis=1) / self._part
        rows = [self.state.queues.row.get(queue, -1) for queue in self.state.waiting]
        return float(shares.max() - shares[rows].min())

    def _happen(self, due: Due) -> bool:
        """Take one event; False if it concerns an attempt of a job that is over."""
        job = JobId(due.name)
        if due.kind == ARRIVE:
            self._arrive(self.runs[job])
        elif due.kind in (END, RELEASE):
            # A job that was stopped meanwhile neither ends nor lets go by what was expected of its last attempt.
            run, row = self.runs[job], self.state.jobs.get(job)
            if row is None or not row.held or due.number != (run.plan if due.kind == END else run.attempts):
                return False
            if due.kind == END:
                self._end(job)
            else:
                self._release(job, due.saved_s)
        elif due.kind == FAIL:
            self._fail(NodeId(due.name), due.health)
        else:
            self.wakes.discard(self.now)
        return True

    def _arrive(self, run: JobRun) -> None:
        run.never = self._never_runs(run.job.ask)
        if run.never is not None:
            return
        ask = run.job.ask
        for other in ask.after:
            self._dependents.setdefault(other, []).append(ask.id)
        if over := {one for one in ask.after if one in self.runs and self.runs[one].end_s is not None}:
            ask = replace(ask, after=tuple(one for one in ask.after if one not in over))
        there = self.state.jobs.get(ask.id)
        if there is None or there.ask is not ask:
            events.apply(self.state, events.JobArrived(ask=ask), self.now)

    def _never_runs(self, ask: JobAsk) -> Wait | None:
        """Why the profile would not start the job even on the empty cluster; one answer for all equal jobs."""
        row = LiveJob(ask=ask)
        key = line_key(row)
        if key not in self._never:
            if self._empty is None:
                self._empty = State(self.state.nodes, self.state.queues.rows)
            wait = None
            with UserCode() as policy, self._empty.txn() as txn:  # of one that fails the decision says so
                self._empty.put(txn, row)
                wait = self.profile.division.verdict(self._empty, row)
                if wait is None and self.profile.placer.place(self._empty, txn, row) is None:
                    short = shape_feasible(self._empty, ask.shape)
                    text = (
                        f"{short.text}." if short else f"The empty cluster has no place for it ({self.profile.name})."
                    )
                    wait = Wait(reason=short.reason if short else Reason.TOO_LARGE, text=text)
            self._never[key] = None if policy.failed else wait
        return self._never[key]

    def _end(self, job: JobId) -> None:
        run = self.runs[job]
        self._account(run)
        run.end_s = self.now
        self.result.last_s = max(self.result.last_s, self.now)
        self._without_parts(job)
        events.apply(self.state, events.JobGone(job=job), self.now)
        for other in self._dependents.pop(job, ()):
            ask = self.state.jobs[other].ask
            ask = replace(ask, after=tuple(one for one in ask.after if one != job))
            events.apply(self.state, events.JobArrived(ask=ask), self.now)

    def _release(self, job: JobId, saved_s: float | None = None) -> None:
        """A preempted job lets go; what was not saved is lost. ``saved_s`` is when it saved to be suspended."""
        run = self.runs[job]
        self._account(run)
        worked = max(0.0, self.now - run.work_from_s)
        every = run.job.checkpoint_every_s
        kept = worked // every * every if every else 0.0
        if saved_s is not None:
            worked = kept = max(0.0, saved_s - run.work_from_s)
        run.done_s += kept * run.rate
        run.lost_gpu_s += (worked - kept) * run.job.ask.shape.gpus
        self._without_parts(job)
        back_at, final = self.now + self.profile.cool_down_s, self.state.jobs[job].final
        events.apply(self.state, events.JobReleased(job=job, back_at=back_at, done_s=run.done_s), self.now)
        if final:
            events.apply(self.state, events.JobPaused(job=job, paused=True), self.now)

    def _account(self, run: JobRun) -> None:
        if run.first_work_s is None and self.now >= run.work_from_s:
            run.first_work_s = run.work_from_s
        used = (self.now - run.started_s) * run.gpus
        run.used_gpu_s += used
        self.result.used_gpu_s += used

    def _resize(self, job: JobId, held: Allocations) -> None:
        """A job continues with other devices, or with another job beside it; that is done between two of its steps."""
        run = self.runs[job]
        self._account(run)
        run.done_s += max(0.0, self.now - run.work_from_s) * run.rate
        run.started_s, run.work_from_s = self.now, max(self.now, run.work_from_s)
        self.result.resizes += 1
        self._expect_end(run, held)

    def _rate(self, run: JobRun, held: Allocations) -> float:
        """Speed of a job on these devices: by their type, how close they are, how many, and who is there as well."""
        costs, row = self.overheads, self.state.jobs[run.job.ask.id]
        rows = {int(self.state.dev_type[d]) for slot in held for d in slot.devices}
        kinds = [self.state.types[row] for row in rows]
        if choices := row.ask.choices:
            grown = step_s_of(row.ask, sizes_now(self.state, row))
            return choices[0].step_s / min(step_s_on(row.ask, kinds), grown) * costs.locality.get(run.level, 1.0)
        speed = min((costs.speeds.get(kind, 1.0) for kind in kinds), default=1.0)
        rate = speed * costs.locality.get(run.level, 1.0) * len(held) / len(row.ask.shape.slots)
        if held[0].milli != HALF or not row.ask.shape.slots[0].gpus:
            return rate
        others = [r for pair in partners(self.state) for r in pair if r and r.held[0].devices == held[0].devices]
        other = next((r for r in others if r.ask.id != row.ask.id), None)
        shared = 1.0 if other is None else costs.sharing.get(pair_of(row, other), costs.sharing_speed)
        self.measured[row.ask.id] = shared
        return rate * shared

    def _fail(self, node: NodeId, health: Health | None) -> None:
        """A node goes (None) or comes back; gangs on it stop and wait again."""
        row = self.state.node_row[node]
        events.apply(self.state, events.NodeChanged(node=node, health=health), self.now)
        if health is None:
            lost = [job.ask for job in self.state.holders() if any(held.node == row for held in job.held)]
            for ask in sorted(lost, key=lambda ask: ask.id not in self.runs):  # jobs first: their parts go with them
                if ask.id in self.runs:
                    self._release(ask.id)
                elif ask.id in self.state.jobs:
                    self._give_part(ask.id)

    def _decide(self) -> None:
        for job, rate in self.measured.items():
            events.apply(self.state, events.JobMeasured(job=job, rate=rate), self.now)
        self.measured.clear()
        began = self.clock.monotonic_s()
        decisions, refused, learned = guarded(self.state, self.profile, self.now)
        self.state.memory.take_in(learned)
        cycle.note_decisions(self.state, decisions, self.now)
        self.result.decision_s.append(self.clock.monotonic_s() - began)
        self.result.decisions += 1
        self.result.violations += len(refused.keys() - self._left_out)
        self._left_out |= refused.keys()
        for decision in decisions:
            match decision:
                case Admit(job=job) if job not in self.runs:
                    self._change_size(job)
                case Preempt(job=job) if job not in self.runs:
                    self._give_part(job)
                case Admit(job=job, held=held):
                    self._start(job, held)
                case Preempt(job=job, reason=reason):
                    self._stop(job, reason)
                case Resize(job=job, held=held):
                    self._resize(job, held)
                case WakeAt(at=at):
                    self._wake(at)
                case WaitOn():
                    pass
        if self.result.decisions % self.check_every == 0:
            self.result.violations += len(violations(self.state))
            if self.state.lines:
                self._samples.append(unusable_share(self.state))

    def _change_size(self, part: JobId) -> None:
        """A running job has one member more or less: it works on at the speed of its new size once it has moved."""
        job = self.state.jobs[part].ask.part_of
        assert job is not None
        run = self.runs[job]
        held = tuple(slot for one in self.state.whole(job) for slot in self.state.jobs[one].held)
        before = run.rate
        self._resize(job, held)
        if run.rate != before:
            run.work_from_s = max(run.work_from_s, self.now + self.overheads.restore_s)
            self._expect_end(run, held)

    def _give_part(self, part: JobId) -> None:
        """A job gives a member back that others want, and asks for one again."""
        ask = self.state.jobs[part].ask
        events.apply(self.state, events.JobReleased(job=part), self.now)
        self._change_size(part)
        events.apply(self.state, events.JobArrived(ask=ask), self.now)

    def _without_parts(self, job: JobId) -> None:
        """A job lets go: what it held or asked for beside its start is gone."""
        for part in sorted(self.state.parts.get(job, ())):
            if part not in self.runs:
                events.apply(self.state, events.JobGone(job=part), self.now)

    def _stop(self, job: JobId, reason: Reason) -> None:
        """Ask a job for its devices. To move or to take turns it saves first; else its last checkpoint counts."""
        result, suspends = self.result, reason in (Reason.MIGRATED_AFFINITY, Reason.TIME_SLICE)
        self.runs[job].preemptions += 1
        result.preemptions += 1
        result.migrations += reason is Reason.MIGRATED_AFFINITY
        result.turns += reason is Reason.TIME_SLICE
        at = self.now + self.overheads.preempt_delay_s + (self.overheads.checkpoint_s if suspends else 0.0)
        saved_s = self.now + self.overheads.preempt_delay_s if suspends else None
        heappush(self.heap, Due(at, RELEASE, job, self.runs[job].attempts, saved_s))

    def _wake(self, at: float) -> None:
        if at >= self.now and at not in self.wakes:  # at once: the pass had tried enough
            self.wakes.add(at)
            heappush(self.heap, Due(at, WAKE))

    def _start(self, job: JobId, held: Allocations) -> None:
        run, costs = self.runs[job], self.overheads
        run.attempts += 1
        run.started_s = self.now
        run.level = self.state.level_of(held)
        if run.first_start_s is None:
            run.first_start_s = self.now
            self._to_start.discard(job)
        delay = costs.start_s + (costs.restore_s if run.attempts > 1 else 0.0)
        run.work_from_s = self.now + delay
        self._expect_end(run, held)
        for part in parts_of(self.state.jobs[job].ask):
            events.apply(self.state, events.JobArrived(ask=part), self.now)

    def _expect_end(self, run: JobRun, held: Allocations) -> None:
        run.plan += 1
        run.rate = self._rate(run, held)
        run.gpus = sum(len(slot.devices) * (slot.milli or 1000) for slot in held) / 1000
        left = (run.job.work_s - run.done_s) / run.rate
        every = run.job.checkpoint_every_s
        saves = (left // every) * self.overheads.checkpoint_s if every else 0.0
        heappush(self.heap, Due(run.work_from_s + left + saves, END, run.job.ask.id, run.plan))


def _shares_of(state: State) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What there is of devices, cores and memory, and per queue the part of the devices that it is promised, else all.

    A dominant share (DRF, NSDI'11) is the largest part of a resource that a queue uses; over what it is promised it is
    1 where it uses just that.
    """
    whole = np.maximum(state.capacity, 1.0)
    promised = state.queues.guaranteed[:, GPU] / whole[0]
    return whole, np.where(promised > 0, promised, 1.0)
