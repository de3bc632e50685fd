"""Runs of the simulator: one trace, several profiles on it, a cluster filled with tasks, a recorded log."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from rota.cluster.core.jobs import JobAsk, Shape, Slot
from rota.cluster.core.profile import Profile
from rota.cluster.core.state import TENANT_LABEL, InvariantBroken, State
from rota.cluster.live import STOPS_FOR_NO_JOB, RequestsOf, Scheduler
from rota.cluster.policies import get_profile
from rota.cluster.policies.fgd import POLICIES, WHOLE, Chooser, FreeNodeTable, Mix, TaskShape
from rota.cluster.sim.report import (
    JOB_COLUMNS,
    JOBS_SHOWN_MAX,
    BaselineFigures,
    Drawn,
    JobLine,
    Summary,
    TableRow,
    TenantFigures,
    never_started,
    per_tenant,
    summary,
    versus,
    write_jobs,
    write_plots,
)
from rota.cluster.sim.sharing import with_sharing
from rota.cluster.sim.simulate import Overheads, SimJob, SimResult, Simulation
from rota.cluster.sim.traces import Tenant, Trace, TraceError, TraceJob, read_tenants, read_trace, rows_of
from rota.runtime.clock import Clock, SystemClock
from rota.runtime.random import SeededRandom
from rota.spec.errors import UnknownName
from rota.spec.events import (
    Event,
    GangGranted,
    GangWaits,
    JobAdmitted,
    JobEnded,
    JobWaits,
    PreemptAsked,
    Record,
    event_to_json,
)
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import Queue
from rota.spec.reasons import INFO, Reason
from rota.spec.resources import Device, Node, Res


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
            type="|".join(job.gpu_type) or None,
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
        labels={"class": job.job_class} if job.job_class else {},
        slots_max=job.max_gpus // job.gang[1] if job.gang[1] else 0,
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
    made = with_sharing(get_profile(profile, seed=given.seed))
    run = Simulation(state, made, given.jobs(), clock, overheads=overheads)
    gc.collect()
    gc.freeze()  # the jobs stay: else the collector looks through all of them again and again
    try:
        return run.run()
    finally:
        gc.unfreeze()


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
            first_work_s=run.first_work_s,
            end_s=run.end_s,
            attempts=run.attempts,
            preemptions=run.preemptions,
            lost_gpu_s=run.lost_gpu_s,
            used_gpu_s=run.used_gpu_s,
            level=run.level,
            state=run.state,
            guaranteed=not run.job.ask.opportunistic,
            work_s=run.job.work_s,
            deadline_s=run.job.deadline_s,
            reason=run.why.reason if run.why else "",
            text=(run.why.text or INFO[run.why.reason].text) if run.why else "",
        )
        for run in result.runs.values()
    ]


class ClusterSize(TypedDict):
    """Nodes and devices of a run, and nodes by tenant."""

    nodes: int
    gpus: int
    vcs: dict[str, int]


class SimDocument(TypedDict):
    """JSON document of ``rota sim run``."""

    profile: str
    trace: str
    scale: float
    seed: int
    cluster: ClusterSize
    summary: Summary
    vcs: dict[str, TenantFigures]
    never_started: list[TableRow]
    unknown_tenants: list[str]
    jobs: NotRequired[list[TableRow]]
    plots: NotRequired[list[str]]


class ProfileFigures(TypedDict):
    """Figures of one profile of a comparison."""

    summary: Summary
    never_started: list[TableRow]
    vs_baseline: BaselineFigures


class CompareDocument(TypedDict):
    """JSON document of ``rota sim compare``."""

    baseline: str
    profiles: dict[str, ProfileFigures]
    unknown_tenants: list[str]
    plots: NotRequired[list[str]]


def document(given: SimInput, profile: str, result: SimResult, *, all_jobs: bool = False) -> SimDocument:
    """The JSON document of ``rota sim run``."""
    lines = lines_of(given, result)
    names = {tenant.path: tenant.vc for tenant in given.tenants}
    borrowed = {names[path]: seconds for path, seconds in result.borrowed_gpu_s.items() if path in names}
    shown: SimDocument = {
        "profile": profile,
        "trace": given.trace.name,
        "scale": given.scale,
        "seed": given.seed,
        "cluster": {
            "nodes": sum(tenant.nodes for tenant in given.tenants),
            "gpus": result.gpus,
            "vcs": {tenant.vc: tenant.nodes for tenant in given.tenants},
        },
        "summary": summary(lines, result, {one.vc: one.entitled for one in given.tenants}, skipped=given.trace.skipped),
        "vcs": per_tenant(lines, borrowed),
        "never_started": never_started(lines)[:JOBS_SHOWN_MAX],
        "unknown_tenants": [*given.trace.unknown],
    }
    if all_jobs or len(lines) <= JOBS_SHOWN_MAX:
        shown["jobs"] = [line.row(JOB_COLUMNS) for line in lines]
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
    plots: Path | None = None,
    overheads: Overheads | None = None,
    clock: Clock | None = None,
) -> SimDocument:
    """Play a trace under a profile and return the document of ``rota sim run --json``; ``plots`` takes drawings.

    Raises TraceError for a file that cannot be used and UnknownName for a profile that does not exist.
    """
    given = load(trace, vcs, scale=scale, seed=seed)
    result = simulate(given, profile, clock or SystemClock(), overheads)
    if out_jobs is not None:
        write_jobs(out_jobs, lines_of(given, result))
    shown = document(given, profile, result, all_jobs=all_jobs)
    if plots is not None:
        shown["plots"] = write_plots(plots, {profile: _drawn(given, result)})
    return shown


def _drawn(given: SimInput, result: SimResult) -> Drawn:
    return Drawn(gpus=result.gpus, samples=result.samples, jobs=lines_of(given, result))


def compare(
    trace: Path,
    vcs: Path,
    profiles: Sequence[str],
    *,
    scale: float = 1.0,
    seed: int = 0,
    tolerance_s: float = 0.0,
    plots: Path | None = None,
    overheads: Overheads | None = None,
    clock: Clock | None = None,
) -> CompareDocument:
    """Play a trace under several profiles; the first is the baseline of the ``rota sim compare --json`` document.

    Raises as ``run_sim`` does.
    """
    given = load(trace, vcs, scale=scale, seed=seed)
    clock = clock or SystemClock()
    return compared(given, profiles, clock, tolerance_s=tolerance_s, plots=plots, overheads=overheads)


def compared(
    given: SimInput,
    profiles: Sequence[str],
    clock: Clock,
    *,
    tolerance_s: float = 0.0,
    plots: Path | None = None,
    overheads: Overheads | None = None,
) -> CompareDocument:
    """The same of a trace in memory."""
    lines: dict[str, list[JobLine]] = {}
    shown: dict[str, ProfileFigures] = {}
    drawn: dict[str, Drawn] = {}
    for profile in profiles:
        result = simulate(given, profile, clock, overheads)
        lines[profile] = lines_of(given, result)
        if plots is not None:
            drawn[profile] = _drawn(given, result)
        played = document(given, profile, result)
        shown[profile] = {
            "summary": played["summary"],
            "never_started": played["never_started"],
            "vs_baseline": versus(lines[profiles[0]], lines[profile], tolerance_s),
        }
    found: CompareDocument = {
        "baseline": profiles[0],
        "profiles": shown,
        "unknown_tenants": [*given.trace.unknown],
    }
    if plots is not None:
        found["plots"] = write_plots(plots, drawn)
    return found


DEMANDS = tuple(range(50, 135, 5))
"""Asked parts of all devices, in percent, at which the given part is noted."""
NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
TASK_COLUMNS = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")


class FillDocument(TypedDict):
    """JSON document of ``rota sim fgd``: part of the devices given out at each asked part, in percent."""

    policy: str
    seed: int
    nodes: int
    gpus: int
    arrived: int
    dropped: int
    allocation_percent: dict[str, float]
    wall_s: float
    tasks_per_s: float | None


def fill(nodes: Path, pods: Path, policy: str, seed: int, clock: Clock) -> FillDocument:
    """Tasks arrive, shuffled, then drawn again and again, until 130 % of the devices were asked; what fits nowhere is
    dropped.

    The files have the columns of Alibaba's cluster-trace-gpu-v2023. Source: Fragmentation Gradient Descent (ATC'23),
    section 6.2. Raises TraceError and UnknownName.
    """
    if policy not in POLICIES:
        raise UnknownName(f"no placement has the name {policy!r}", hint=f"placements: {', '.join(POLICIES)}")
    models: dict[str, int] = {}
    board = _board(nodes, models)
    tasks = [_task(place, row, models) for place, row in rows_of(pods, TASK_COLUMNS)]
    if not tasks or not board.total:
        raise TraceError(f"{pods if board.total else nodes}: nothing to place or no device to place on")
    rng = SeededRandom(seed).rng()
    chooser = Chooser(policy, board, Mix(kind for kind, _ in tasks), rng.randrange)
    began, arrived, asked, given, dropped = clock.monotonic_s(), 0, 0, 0, 0
    shown: dict[str, float] = {}
    order = rng.sample(tasks, len(tasks))
    while asked * 100 < DEMANDS[-1] * board.total:
        kind, mem = order[arrived] if arrived < len(order) else rng.choice(tasks)
        arrived += 1
        asked += kind.devices * kind.share
        found = chooser.choose(kind, mem)
        if found is None:
            dropped += 1
        else:
            board.take(found[0], kind, mem, found[1])
            given += kind.devices * kind.share
        while len(shown) < len(DEMANDS) and asked * 100 >= DEMANDS[len(shown)] * board.total:
            shown[str(DEMANDS[len(shown)])] = round(100 * given / board.total, 2)
    wall = clock.monotonic_s() - began
    return {
        "policy": policy,
        "seed": seed,
        "nodes": len(board.cpu),
        "gpus": board.total // WHOLE,
        "arrived": arrived,
        "dropped": dropped,
        "allocation_percent": shown,
        "wall_s": wall,
        "tasks_per_s": arrived / wall if wall else None,
    }


def _whole(place: str, row: dict[str, str], name: str) -> int:
    try:
        return int(float(row[name] or 0))
    except ValueError:
        raise TraceError(f"{place}: {name}: {row[name]!r} is not a number") from None


def _board(path: Path, models: dict[str, int]) -> FreeNodeTable:
    rows = list(rows_of(path, NODE_COLUMNS))
    if not rows:
        raise TraceError(f"{path}: no nodes; the file needs at least one row below its header")
    seen: dict[str, str] = {}
    for place, row in rows:
        if row["sn"] in seen:
            raise TraceError(f"{place}: sn: node {row['sn']!r} is there twice; first at {seen[row['sn']]}")
        seen[row["sn"]] = place
    cpu, mem, gpus = ([_whole(place, row, name) for place, row in rows] for name in ("cpu_milli", "memory_mib", "gpu"))
    return FreeNodeTable(cpu, mem, gpus, [models.setdefault(row["model"], len(models)) for _, row in rows])


def _task(place: str, row: dict[str, str], models: dict[str, int]) -> tuple[TaskShape, int]:
    count = _whole(place, row, "num_gpu")
    types = tuple(sorted(models.get(name, -1) for name in (row.get("gpu_spec") or "").split("|") if name))
    kind = TaskShape(_whole(place, row, "cpu_milli"), count, _whole(place, row, "gpu_milli") if count else 0, types)
    return kind, _whole(place, row, "memory_mib")


SHOWN_MAX = 100
"""Differences listed at most; all are counted."""


class Difference(TypedDict):
    """A recorded decision that the profile does not make, and what it decides for that job."""

    number: int
    job: JobId | None
    recorded: dict[str, Any]
    here: list[dict[str, Any]]


class ReplayDocument(TypedDict):
    """JSON document of ``rota sim run --log``."""

    profile: str
    records: int
    decisions: int
    same: int
    different: list[Difference]


def replayed(records: Iterable[Record], profile: Profile, requests_of: RequestsOf) -> ReplayDocument:
    """What happened is taken from the log; each decision in it is compared with what the profile decides there.

    A service decides at one moment and appends one decision after the other, so those of one pass are looked up in the
    outcome of that pass. A different decision counts once; the recorded one is taken for all that follows.
    """
    scheduler = Scheduler(profile, requests_of)
    open_ones: list[tuple[JobId, Event]] = []
    seen, compared, different = 0, 0, list[Difference]()
    for record in records:
        seen += 1
        if record.job is not None and _decided(record.event):
            recorded = (record.job, _decision(record.event))
            if recorded not in open_ones:
                outcome = scheduler.decide(record.at)
                if outcome.broken:
                    raise InvariantBroken("; ".join(outcome.broken))
                open_ones = [(job, _decision(event)) for job, event in outcome.events]
            compared += 1
            if recorded in open_ones:
                open_ones.remove(recorded)
            else:
                different.append(_difference(record, open_ones))
        scheduler.apply(record)
    return {
        "profile": profile.name,
        "records": seen,
        "decisions": compared,
        "same": compared - len(different),
        "different": different[:SHOWN_MAX],
    }


def _decided(event: Event) -> bool:
    """Whether the scheduler made this event, and not the service or a user."""
    match event:
        case JobAdmitted() | GangGranted() | GangWaits():
            return True
        case PreemptAsked(reason=reason):
            return reason not in STOPS_FOR_NO_JOB
        case JobEnded(reason=reason):
            return reason is Reason.DEPENDENCY_FAILED
        case JobWaits(reason=reason):
            return reason is not Reason.ENGINE_STARTING
        case _:
            return False


def _decision(event: Event) -> Event:
    """The event without the words that explain it."""
    match event:
        case JobAdmitted():
            return replace(event, why={})
        case JobWaits():
            return replace(event, text="", fields={})
        case GangWaits():
            return replace(event, text="")
        case _:
            return event


def _difference(record: Record, here: list[tuple[JobId, Event]]) -> Difference:
    mine = [event_to_json(event) for job, event in here if job == record.job]
    return {"number": record.number, "job": record.job, "recorded": event_to_json(record.event), "here": mine}
