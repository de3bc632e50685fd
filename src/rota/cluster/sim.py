"""Run the same cycle on a trace, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

from rota.cluster.core import cycle, facts
from rota.cluster.core.asks import JobAsk, Shape, Slot
from rota.cluster.core.binding import unusable_share
from rota.cluster.core.check import violations
from rota.cluster.core.plugins import Admit, Preempt, Profile, WaitOn, WakeAt
from rota.cluster.core.quota import GPU, UNLIMITED
from rota.cluster.core.snapshot import TENANT_LABEL, Held, JobRow, LineKey, State, line_key
from rota.cluster.policies.profiles import get_profile
from rota.cluster.report import JOBS_SHOWN_MAX, JobLine, RunFigures, per_tenant, summary, versus, write_jobs
from rota.cluster.traces import Tenant, Trace, TraceError, TraceJob, read_tenants, read_trace
from rota.runtime.clock import Clock, SystemClock
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import Queue
from rota.spec.resources import Device, Health, Node, Res

END, RELEASE, FAIL, ARRIVE, WAKE = range(5)
"""Kinds of events in the order in which those of one instant are taken: what frees devices comes before what asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimJob:
    """A job with its true length: ``work_s`` seconds on devices of speed 1 that are close enough."""

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


@dataclass(slots=True, kw_only=True)
class JobRun:
    """What happened to one job."""

    job: SimJob
    state: str = "QUEUED"
    first_start_s: float | None = None
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


@dataclass(slots=True, kw_only=True)
class SimResult:
    """Everything a report needs; ``decision_s`` has the wall time of every pass."""

    runs: dict[JobId, JobRun]
    first_s: float
    last_s: float
    gpus: int
    used_gpu_s: float = 0.0
    borrowed_gpu_s: dict[str, float] = field(default_factory=dict[str, float])
    fragmentation: float = 0.0
    preemptions: int = 0
    decisions: int = 0
    violations: int = 0
    wall_s: float = 0.0
    decision_s: list[float] = field(default_factory=list[float])


class Simulation:
    """One run. Give it a state without the jobs; it plays arrivals, ends and failures through the same cycle."""

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
        stop_when_started: JobId | None = None,
        now: float | None = None,
        wall_max_s: float = float("inf"),
    ) -> None:
        self.state, self.profile, self.clock = state, profile, clock
        self.overheads = overheads or Overheads()
        self.check_every, self.until_s, self.stop_when_started = check_every, until_s, stop_when_started
        self.wall_max_s = wall_max_s
        self.runs: dict[JobId, JobRun] = {job.ask.id: JobRun(job=job) for job in jobs}
        self.heap: list[tuple[float, int, str, int, object]] = []
        self.wakes: set[float] = set()
        self._empty: State | None = None
        self._feasible: dict[LineKey, bool] = {}
        first = min((job.submit_s for job in jobs), default=0.0) if now is None else now
        self.result = SimResult(runs=self.runs, first_s=first, last_s=first, gpus=int(state.free[state.usable].sum()))
        self._borrowed = np.zeros(len(state.queues.rows))
        promised = state.queues.guaranteed[:, GPU]
        self._promised = np.where(promised > 0, promised, UNLIMITED)
        self._samples: list[float] = []
        self.now = first
        for job in jobs:
            if job.ask.id in state.jobs and state.jobs[job.ask.id].held:
                self._already_running(job)
            else:
                heappush(self.heap, (job.submit_s, ARRIVE, job.ask.id, 0, None))
        for failure in failures:
            heappush(self.heap, (failure.at_s, FAIL, failure.node, 0, None))
            heappush(self.heap, (failure.back_s, FAIL, failure.node, 1, Health.HEALTHY))

    def run(self) -> SimResult:
        """Play everything to the end; jobs that wait for ever stay QUEUED."""
        began = self.clock.monotonic_s()
        while self.heap and self.heap[0][0] <= self.until_s:
            self._advance(self.heap[0][0])
            while self.heap and self.heap[0][0] == self.now:
                _, kind, name, attempt, extra = heappop(self.heap)
                self._happen(kind, name, attempt, extra)
            self._decide()
            if self.stop_when_started is not None and self.runs[self.stop_when_started].first_start_s is not None:
                break
            if self.clock.monotonic_s() - began > self.wall_max_s:
                break
        result = self.result
        result.borrowed_gpu_s = {
            queue.path: float(seconds) for queue, seconds in zip(self.state.queues.rows, self._borrowed)
        }
        result.fragmentation = float(np.mean(self._samples)) if self._samples else 0.0
        result.violations += len(violations(self.state))
        result.wall_s = self.clock.monotonic_s() - began
        return result

    def _already_running(self, job: SimJob) -> None:
        run = self.runs[job.ask.id]
        run.attempts, run.state = 1, "RUNNING"
        run.first_start_s = run.started_s = self.now
        run.work_from_s = self.state.jobs[job.ask.id].started_at
        heappush(self.heap, (max(self.now, run.work_from_s + job.work_s), END, job.ask.id, 1, None))
        if self.state.jobs[job.ask.id].phase == "stopping":
            heappush(self.heap, (self.now + job.ask.grace_s, RELEASE, job.ask.id, 1, None))

    def _advance(self, to: float) -> None:
        seconds = to - self.now
        if seconds > 0:
            over = self.state.used[:, GPU] - self._promised
            if (over > 0).any():
                self._borrowed += np.maximum(over, 0) * (seconds / 1000)
        self.now = to

    # -- what happens ------------------------------------------------------------------------------------------------

    def _happen(self, kind: int, name: str, attempt: int, extra: object) -> None:
        if kind == ARRIVE:
            self._arrive(self.runs[JobId(name)])
        elif kind in (END, RELEASE):
            # A job that was stopped meanwhile neither ends nor lets go by what was expected of its last attempt.
            run = self.runs[JobId(name)]
            if run.attempts == attempt and run.state == "RUNNING":
                (self._end if kind == END else self._release)(JobId(name))
        elif kind == FAIL:
            self._fail(NodeId(name), extra if isinstance(extra, Health) else None)

    def _arrive(self, run: JobRun) -> None:
        if not self._could_ever_run(run.job.ask):
            run.state = "UNSCHEDULABLE"
            return
        cycle.apply(self.state, facts.JobArrived(ask=run.job.ask), self.now)

    def _could_ever_run(self, ask: JobAsk) -> bool:
        """Whether the profile would start the job on the empty cluster; one answer for all equal jobs."""
        row = JobRow(ask=ask)
        key = line_key(row)
        if key not in self._feasible:
            if self._empty is None:
                self._empty = State(self.state.nodes, self.state.queues.rows)
            with self._empty.txn() as txn:
                self._empty.put(txn, row)
                self._feasible[key] = (
                    self.profile.division.verdict(self._empty, row) is None
                    and self.profile.placer.place(self._empty, txn, row) is not None
                )
        return self._feasible[key]

    def _end(self, job: JobId) -> None:
        run = self.runs[job]
        self._account(run)
        run.state, run.end_s = "SUCCEEDED", self.now
        self.result.last_s = max(self.result.last_s, self.now)
        run.attempts = -run.attempts
        cycle.apply(self.state, facts.JobGone(job=job), self.now)

    def _release(self, job: JobId) -> None:
        """A preempted job lets go; what was not saved is lost."""
        run = self.runs[job]
        self._account(run)
        worked = max(0.0, self.now - run.work_from_s)
        every = run.job.checkpoint_every_s
        kept = worked // every * every if every else 0.0
        run.done_s += kept * run.rate
        run.lost_gpu_s += (worked - kept) * run.job.ask.shape.gpus
        run.state = "QUEUED"
        cycle.apply(self.state, facts.JobReleased(job=job, back_at=self.now + self.profile.cool_down_s), self.now)

    def _account(self, run: JobRun) -> None:
        used = (self.now - run.started_s) * run.job.ask.shape.gpu_milli / 1000
        run.used_gpu_s += used
        self.result.used_gpu_s += used

    def _fail(self, node: NodeId, health: Health | None) -> None:
        """A node goes (None) or comes back; gangs on it stop and wait again."""
        row = self.state.node_row[node]
        cycle.apply(self.state, facts.NodeChanged(node=node, health=health), self.now)
        if health is None:
            for job in self.state.holding():
                if any(held.node == row for held in job.held):
                    self._release(job.ask.id)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        began = self.clock.monotonic_s()
        decisions = cycle.step(self.state, facts.Tick(), self.profile, self.now)
        self.result.decision_s.append(self.clock.monotonic_s() - began)
        self.result.decisions += 1
        for decision in decisions:
            match decision:
                case Admit(job=job, held=held):
                    self._start(job, held)
                case Preempt(job=job):
                    self.runs[job].preemptions += 1
                    self.result.preemptions += 1
                    at = self.now + self.overheads.preempt_delay_s
                    heappush(self.heap, (at, RELEASE, job, self.runs[job].attempts, None))
                case WakeAt(at=at):
                    self._wake(at)
                case WaitOn():
                    pass
        if self.result.decisions % self.check_every == 0:
            self.result.violations += len(violations(self.state))
            if self.state.lines:
                self._samples.append(unusable_share(self.state))

    def _wake(self, at: float) -> None:
        if at > self.now and at not in self.wakes:
            self.wakes.add(at)
            heappush(self.heap, (at, WAKE, "", 0, None))

    def _start(self, job: JobId, held: tuple[Held, ...]) -> None:
        run, costs = self.runs[job], self.overheads
        run.attempts += 1
        run.state, run.started_s = "RUNNING", self.now
        run.level = self.state.level_of(held)
        if run.first_start_s is None:
            run.first_start_s = self.now
        kinds = {self.state.types[int(self.state.dev_type[d])] for slot in held for d in slot.devices}
        speed = min((costs.speeds.get(kind, 1.0) for kind in kinds), default=1.0)
        run.rate = speed * costs.locality.get(run.level, 1.0)
        delay = costs.start_s + (costs.restore_s if run.attempts > 1 else 0.0)
        run.work_from_s = self.now + delay
        left = (run.job.work_s - run.done_s) / run.rate
        every = run.job.checkpoint_every_s
        saves = (left // every) * costs.checkpoint_s if every else 0.0
        heappush(self.heap, (run.work_from_s + left + saves, END, job, run.attempts, None))


# -- runs from files --


@dataclass(frozen=True, slots=True, kw_only=True)
class SimInput:
    """A trace laid over the nodes of its tenants."""

    trace: Trace
    tenants: tuple[Tenant, ...]
    scale: float
    seed: int

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node, tenant by tenant."""
        return tuple(
            Node(
                id=NodeId(f"{tenant.vc}-{i}"),
                host="sim",
                cpus=tenant.cpu_milli / 1000,
                memory_bytes=tenant.mem_mib * 2**20,
                devices=tuple(Device(index=d, type=tenant.gpu_type) for d in range(tenant.gpus_per_node)),
                labels=((TENANT_LABEL, tenant.path),),
            )
            for tenant in self.tenants
            for i in range(tenant.nodes)
        )

    @property
    def queues(self) -> tuple[Queue, ...]:
        """One queue a tenant; its guarantee is its own nodes unless the file says otherwise."""
        return tuple(
            Queue(
                path=tenant.path,
                guaranteed=Res(cpus=0, gpus=tenant.entitled),
                limit=None if tenant.limit is None else Res(cpus=0, gpus=tenant.limit),
                weight=tenant.weight,
            )
            for tenant in self.tenants
        )

    def jobs(self) -> list[SimJob]:
        """The jobs of the trace as asks; equal gangs share one shape."""
        shapes: dict[tuple[object, ...], Shape] = {}
        paths = {tenant.vc: tenant.path for tenant in self.tenants}
        return [_sim_job(job, paths[job.vc], shapes) for job in self.trace.jobs]


def _sim_job(job: TraceJob, queue: str, shapes: dict[tuple[object, ...], Shape]) -> SimJob:
    key = (job.gang, job.gpu_type, job.milli_gpu, job.cpu_milli, job.mem_mib)
    shape = shapes.get(key)
    if shape is None:
        slot = Slot(
            gpus=0 if 0 < job.milli_gpu < 1000 else job.gang[1],
            milli=job.milli_gpu if job.milli_gpu < 1000 else 0,
            type=job.gpu_type[0] if len(job.gpu_type) == 1 else None,
            cpu_milli=job.cpu_milli,
            mem=job.mem_mib * 2**20,
        )
        shape = shapes[key] = Shape(slots=(slot,) * job.gang[0])
    ask = JobAsk(
        id=JobId(job.job_id),
        shape=shape,
        queue=queue,
        user=job.user or "local",
        priority=job.priority,
        queued_at=job.submit_s,
        est_s=job.est_s,
        preemptible=job.preemptible,
    )
    return SimJob(
        ask=ask,
        submit_s=job.submit_s,
        work_s=job.duration_s,
        deadline_s=job.deadline_s,
        checkpoint_every_s=job.checkpoint_every_s,
    )


def load(trace: Path, vcs: Path, *, scale: float = 1.0, seed: int = 0) -> SimInput:
    """Read a trace and its tenants. Raises TraceError."""
    if not scale > 0:
        raise TraceError(f"scale: {scale} is not above 0")
    tenants = tuple(tenant.scaled(scale) for tenant in read_tenants(vcs))
    return SimInput(trace=read_trace(trace, tenants), tenants=tenants, scale=scale, seed=seed)


def simulate(given: SimInput, profile: str, clock: Clock, overheads: Overheads | None = None) -> SimResult:
    """Play a trace under a profile. Raises UnknownName for a profile that does not exist."""
    state = State(given.nodes, given.queues)
    return Simulation(state, get_profile(profile), given.jobs(), clock, overheads=overheads).run()


def lines_of(given: SimInput, result: SimResult) -> list[JobLine]:
    """The finished run as a table, in order of submission."""
    names = {tenant.path: tenant.vc for tenant in given.tenants}
    return [
        JobLine(
            job_id=run.job.ask.id,
            vc=names[run.job.ask.queue],
            gpus=run.job.ask.shape.gpu_milli / 1000,
            submit_s=run.job.submit_s,
            first_start_s=run.first_start_s,
            end_s=run.end_s,
            attempts=abs(run.attempts),
            preemptions=run.preemptions,
            lost_gpu_s=run.lost_gpu_s,
            used_gpu_s=run.used_gpu_s,
            level=run.level,
            state=run.state,
            guaranteed=not run.job.ask.opportunistic,
            work_s=run.job.work_s,
            deadline_s=run.job.deadline_s,
        )
        for run in result.runs.values()
    ]


def document(given: SimInput, profile: str, result: SimResult, *, all_jobs: bool = False) -> dict[str, Any]:
    """The JSON document of ``rota sim run``."""
    lines = lines_of(given, result)
    figures = RunFigures(
        gpus=result.gpus,
        first_s=result.first_s,
        last_s=result.last_s,
        used_gpu_s=result.used_gpu_s,
        fragmentation=result.fragmentation,
        preemptions=result.preemptions,
        migrations=0,
        decisions=result.decisions,
        violations=result.violations,
        wall_s=result.wall_s,
        decision_s=result.decision_s,
        skipped=given.trace.skipped,
    )
    names = {tenant.path: tenant.vc for tenant in given.tenants}
    borrowed = {names[path]: seconds for path, seconds in result.borrowed_gpu_s.items() if path in names}
    shown = {
        "profile": profile,
        "trace": given.trace.name,
        "scale": given.scale,
        "seed": given.seed,
        "cluster": {
            "nodes": sum(tenant.nodes for tenant in given.tenants),
            "gpus": result.gpus,
            "vcs": {tenant.vc: tenant.nodes for tenant in given.tenants},
        },
        "summary": summary(lines, figures, {tenant.vc: tenant.entitled for tenant in given.tenants}),
        "vcs": per_tenant(lines, borrowed),
    }
    if all_jobs or len(lines) <= JOBS_SHOWN_MAX:
        shown["jobs"] = [line.row() for line in lines]
    return shown


def run_sim(
    trace: Path,
    vcs: Path,
    profile: str,
    *,
    scale: float = 1.0,
    seed: int = 0,
    out_jobs: Path | None = None,
    all_jobs: bool = False,
    overheads: Overheads | None = None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Play a trace under a profile and return the document of ``rota sim run --json``.

    Raises TraceError for a file that cannot be used and UnknownName for a profile that does not exist.
    """
    given = load(trace, vcs, scale=scale, seed=seed)
    result = simulate(given, profile, clock or SystemClock(), overheads)
    if out_jobs is not None:
        write_jobs(out_jobs, lines_of(given, result))
    return document(given, profile, result, all_jobs=all_jobs)


def compare(
    trace: Path,
    vcs: Path,
    profiles: Sequence[str],
    *,
    scale: float = 1.0,
    seed: int = 0,
    tolerance_s: float = 0.0,
    overheads: Overheads | None = None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Play a trace under several profiles; the first is the baseline of the ``rota sim compare --json`` document.

    Raises as ``run_sim`` does.
    """
    given = load(trace, vcs, scale=scale, seed=seed)
    lines: dict[str, list[JobLine]] = {}
    shown: dict[str, Any] = {}
    for profile in profiles:
        result = simulate(given, profile, clock or SystemClock(), overheads)
        lines[profile] = lines_of(given, result)
        shown[profile] = {
            "summary": document(given, profile, result)["summary"],
            "vs_baseline": versus(lines[profiles[0]], lines[profile], tolerance_s),
        }
    return {"baseline": profiles[0], "profiles": shown}
