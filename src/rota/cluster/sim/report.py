"""Reports of simulated runs: figures, tables, and drawings as SVG."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypedDict
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

JOBS_SHOWN_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """One job of a finished run; times in seconds, None where it never came to that."""

    job_id: str
    vc: str
    gpus: float
    submit_s: float
    first_start_s: float | None
    first_work_s: float | None
    end_s: float | None
    attempts: int
    preemptions: int
    lost_gpu_s: float
    used_gpu_s: float
    level: str
    state: str
    guaranteed: bool
    work_s: float
    deadline_s: float | None = None
    reason: str = ""
    """Why it never started, with a sentence in ``text``."""
    text: str = ""

    @property
    def wait_s(self) -> float | None:
        """From submission to the first start, when it was given devices."""
        return None if self.first_start_s is None else self.first_start_s - self.submit_s

    @property
    def response_s(self) -> float | None:
        """From submission to the first work: the wait, the start cost, and attempts that ended before it was over."""
        return None if self.first_work_s is None else self.first_work_s - self.submit_s

    @property
    def jct_s(self) -> float | None:
        """From submission to the end."""
        return None if self.end_s is None else self.end_s - self.submit_s

    def row(self, columns: Sequence[str]) -> TableRow:
        """The values of these columns."""
        return {name: getattr(self, name) for name in columns}


TableRow = dict[str, str | float | None]
JOB_COLUMNS = (
    *("job_id", "vc", "gpus", "submit_s", "first_start_s", "end_s", "wait_s", "jct_s", "attempts", "preemptions"),
    *("lost_gpu_s", "level", "state", "response_s"),
)
"""The job table."""
NEVER_STARTED_COLUMNS = ("job_id", "vc", "gpus", "state", "reason", "text")


@dataclass(slots=True, kw_only=True)
class RunFigures:
    """Figures of a run as a whole; ``decision_s`` has the wall time of every pass."""

    gpus: int
    first_s: float
    last_s: float
    used_gpu_s: float = 0.0
    fragmentation: float = 0.0
    share_gap: float = 0.0
    preemptions: int = 0
    migrations: int = 0
    turns: int = 0
    resizes: int = 0
    decisions: int = 0
    violations: int = 0
    wall_s: float = 0.0
    decision_s: list[float] = field(default_factory=list[float])


class Percentiles(TypedDict):
    """Mean, median, 95th and 99th percentile and maximum; None of no values."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


class DecisionTimes(TypedDict):
    """Wall time of a pass in milliseconds."""

    p50: float | None
    p99: float | None


class Summary(TypedDict):
    """Figures of a run: ``wait_s`` from submission to devices, ``response_s`` to first work, ``jct_s`` to the end."""

    jobs: int
    finished: int
    skipped: int
    unschedulable: int
    makespan_s: float
    throughput_jobs_h: float | None
    wait_s: Percentiles
    response_s: Percentiles
    jct_s: Percentiles
    slowdown: Percentiles
    utilisation: float | None
    fragmentation: float
    fairness_jain: float | None
    dominant_share_gap: float
    preemptions: int
    migrations: int
    turns: int
    resizes: int
    lost_gpu_s: float
    deadline_hit: float | None
    decisions: int
    invariant_violations: int
    wall_s: float
    jobs_per_s: float | None
    decision_ms: DecisionTimes


class TenantFigures(TypedDict):
    """Waits, completion and use of one tenant."""

    jobs: int
    wait_s: Percentiles
    jct_s: Percentiles
    used_gpu_s: float
    borrowed_gpu_s: float


class Delay(TypedDict):
    """Seconds by which jobs started later than in the baseline."""

    mean: float
    max: float


class BaselineFigures(TypedDict):
    """The jobs of a run compared with the same jobs of a baseline."""

    later_jobs: int
    later_guaranteed: int
    extra_s: Delay
    earlier_jobs: int
    wait_ratio_by_vc: dict[str, float | None]
    jct_ratio: float | None


def spread_of(values: Sequence[float]) -> Percentiles:
    """Mean, median, 95th and 99th percentile and maximum; None of nothing."""
    if not values:
        return {"mean": None, "p50": None, "p95": None, "p99": None, "max": None}
    data = np.asarray(values, dtype=np.float64)
    p50, p95, p99 = (float(v) for v in np.percentile(data, (50, 95, 99)))
    return {"mean": float(data.mean()), "p50": p50, "p95": p95, "p99": p99, "max": float(data.max())}


def jain(shares: Sequence[float]) -> float | None:
    """Jain's index of fairness, ``(sum x)^2 / (n sum x^2)``: 1 when all are equal, 1/n when one has all."""
    data = np.asarray(shares, dtype=np.float64)
    square = float((data**2).sum())
    return float(data.sum()) ** 2 / (len(data) * square) if square else None


def summary(jobs: Sequence[JobLine], run: RunFigures, entitled: Mapping[str, float], *, skipped: int) -> Summary:
    """The ``summary`` of a run. ``entitled`` is the number of devices each tenant may count on, ``skipped`` of
    jobs of the trace that could not be played.
    """
    span = run.last_s - run.first_s
    done = [job for job in jobs if job.jct_s is not None]
    waits = [job.wait_s for job in jobs if job.wait_s is not None]
    deadlines = [job for job in jobs if job.deadline_s is not None]
    used: dict[str, float] = dict.fromkeys(entitled, 0.0)
    for job in jobs:
        used[job.vc] = used.get(job.vc, 0.0) + job.used_gpu_s
    return {
        "jobs": len(jobs),
        "finished": len(done),
        "skipped": skipped,
        "unschedulable": sum(job.state == "UNSCHEDULABLE" for job in jobs),
        "makespan_s": span,
        "throughput_jobs_h": len(done) * 3600 / span if span else None,
        "wait_s": spread_of(waits),
        "response_s": spread_of([job.response_s for job in jobs if job.response_s is not None]),
        "jct_s": spread_of([job.jct_s for job in done if job.jct_s is not None]),
        "slowdown": spread_of([(job.jct_s or 0) / max(job.work_s, 1.0) for job in done]),
        "utilisation": run.used_gpu_s / (run.gpus * span) if span and run.gpus else None,
        "fragmentation": run.fragmentation,
        "fairness_jain": jain([used[vc] / entitled[vc] for vc in entitled if entitled[vc] > 0]),
        "dominant_share_gap": run.share_gap,
        "preemptions": run.preemptions,
        "migrations": run.migrations,
        "turns": run.turns,
        "resizes": run.resizes,
        "lost_gpu_s": sum(job.lost_gpu_s for job in jobs),
        "deadline_hit": sum(job.end_s is not None and job.end_s <= (job.deadline_s or 0) for job in deadlines)
        / len(deadlines)
        if deadlines
        else None,
        "decisions": run.decisions,
        "invariant_violations": run.violations,
        "wall_s": run.wall_s,
        "jobs_per_s": len(jobs) / run.wall_s if run.wall_s else None,
        "decision_ms": {
            "p50": float(np.percentile(run.decision_s, 50)) * 1000 if run.decision_s else None,
            "p99": float(np.percentile(run.decision_s, 99)) * 1000 if run.decision_s else None,
        },
    }


def never_started(jobs: Sequence[JobLine]) -> list[TableRow]:
    """Jobs without a start, and why: with the state UNSCHEDULABLE not even an empty cluster would hold them."""
    return [job.row(NEVER_STARTED_COLUMNS) for job in jobs if job.first_start_s is None]


def per_tenant(jobs: Sequence[JobLine], borrowed: Mapping[str, float]) -> dict[str, TenantFigures]:
    """Waits, completion and use of each tenant that has jobs."""
    groups: dict[str, list[JobLine]] = {}
    for job in jobs:
        groups.setdefault(job.vc, []).append(job)
    return {
        vc: {
            "jobs": len(mine),
            "wait_s": spread_of([job.wait_s for job in mine if job.wait_s is not None]),
            "jct_s": spread_of([job.jct_s for job in mine if job.jct_s is not None]),
            "used_gpu_s": sum(job.used_gpu_s for job in mine),
            "borrowed_gpu_s": borrowed.get(vc, 0.0),
        }
        for vc, mine in sorted(groups.items())
    }


def write_jobs(path: Path, jobs: Sequence[JobLine]) -> None:
    """Write the job table as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=JOB_COLUMNS if jobs else ["job_id"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(job.row(JOB_COLUMNS) for job in jobs)


def versus(base: Sequence[JobLine], other: Sequence[JobLine], tolerance_s: float) -> BaselineFigures:
    """How the jobs of a run did against the same jobs of a baseline; later = start > baseline start + tolerance.

    A job that starts in the baseline only counts as later without a number of seconds.
    """
    baseline = {job.job_id: job for job in base}
    later: list[JobLine] = []
    extra: list[float] = []
    earlier = 0
    for job in other:
        before, now = baseline[job.job_id].first_start_s, job.first_start_s
        if before is None or now is None:
            if before is not None:
                later.append(job)
            continue
        if now > before + tolerance_s:
            later.append(job)
            extra.append(now - before)
        elif now < before - tolerance_s:
            earlier += 1
    return {
        "later_jobs": len(later),
        "later_guaranteed": sum(job.guaranteed for job in later),
        "extra_s": {
            "mean": float(np.mean(extra)) if extra else 0.0,
            "max": max(extra, default=0.0),
        },
        "earlier_jobs": earlier,
        "wait_ratio_by_vc": _wait_ratios(base, other),
        "jct_ratio": _ratio(_mean([j.jct_s for j in other]), _mean([j.jct_s for j in base])),
    }


def _wait_ratios(base: Sequence[JobLine], other: Sequence[JobLine]) -> dict[str, float | None]:
    tenants = sorted({job.vc for job in base})
    return {
        vc: _ratio(
            _mean([job.wait_s for job in other if job.vc == vc]), _mean([job.wait_s for job in base if job.vc == vc])
        )
        for vc in tenants
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _ratio(value: float | None, base: float | None) -> float | None:
    if value is None or base is None:
        return None
    if base == 0:
        return 1.0 if value == 0 else None
    return value / base


class Sample(NamedTuple):
    """What held from ``at`` on for ``seconds``; ``share_gap`` as the summary has it, 0 while no job waits."""

    at: float
    seconds: float
    used_gpus: float
    waiting: int
    share_gap: float


WIDTH, HEIGHT, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 780, 340, 70, 36, 530, 250
POINTS_MAX = 400
"""Points of one line; each is the mean over its part of the time."""
LINES_MAX = 20
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
Numbers = NDArray[np.float64]
Curves = dict[str, tuple[Numbers, Numbers]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What is drawn of a run."""

    gpus: int
    samples: Sequence[Sample]
    jobs: Sequence[JobLine]


def write_plots(folder: Path, runs: Mapping[str, Drawn]) -> list[str]:
    """Draw runs, by profile, into a folder, and return the names of the files: one of waits for each run."""
    over_time: dict[str, tuple[str, Callable[[Drawn, Sample], float]]] = {
        "utilisation": ("part of the devices in use", lambda run, one: one.used_gpus / max(run.gpus, 1)),
        "queue": ("jobs that wait", lambda run, one: one.waiting),
        "fairness": ("gap of dominant shares, 0 = equal", lambda run, one: one.share_gap),
    }
    drawings: dict[str, str] = {}
    for name, (label, value) in over_time.items():
        curves = {
            profile: means(run.samples, [value(run, one) for one in run.samples]) for profile, run in runs.items()
        }
        drawings[name] = chart(f"{name}: {label}", "hours since the first job", curves)
    for profile, run in runs.items():
        title = f"waits under {profile}: part of the jobs that waited at most this long"
        drawings[f"waits-{profile}"] = chart(title, "seconds, each step ten times longer", waits(run.jobs), powers=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in drawings.items():
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")
    return [f"{name}.svg" for name in drawings]


def means(samples: Sequence[Sample], values: Sequence[float]) -> tuple[Numbers, Numbers]:
    """Hours since the first sample, and the mean of the values over each of equal parts of the time."""
    if not samples:
        return np.zeros(0), np.zeros(0)
    edges = np.array([*(one.at for one in samples), samples[-1].at + samples[-1].seconds])
    area = np.concatenate(([0.0], np.cumsum(np.array(values) * np.diff(edges))))
    points = min(POINTS_MAX, 20 * len(samples)) + 1
    at = np.linspace(float(edges[0]), float(edges[-1]), points, dtype=np.float64)
    return (at[:-1] - edges[0]) / 3600, np.diff(np.interp(at, edges, area)) / np.diff(at)


def waits(jobs: Sequence[JobLine]) -> Curves:
    """Per tenant the distribution of waits until the first start; x is the power of ten of the seconds, from 1 s up."""
    found: Curves = {}
    for vc in sorted({job.vc for job in jobs}):
        mine = [job.wait_s for job in jobs if job.vc == vc]
        started = np.sort(np.array([wait for wait in mine if wait is not None], dtype=np.float64))
        picked = np.unique(np.linspace(0, len(started) - 1, min(POINTS_MAX, len(started))).astype(int))
        found[vc] = (np.log10(np.maximum(started[picked], 1.0)), (picked + 1) / len(mine))
    return found


def chart(title: str, x_label: str, curves: Curves, *, powers: bool = False) -> str:
    """One SVG with a line a name; who has no point has no line, and of many names the first are drawn."""
    shown = dict(list(curves.items())[:LINES_MAX])
    x_most = _round_up(max((float(x.max(initial=0)) for x, _ in shown.values()), default=0), whole=powers)
    y_most = _round_up(max((float(y.max(initial=0)) for _, y in shown.values()), default=0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{LEFT + PLOT_WIDTH // 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>',
    ]
    steps = round(x_most) if powers else 5
    for i in range(steps + 1):
        x, value = LEFT + PLOT_WIDTH * i / steps, x_most * i / steps
        text = f"{10**value:g}" if powers else f"{value:g}"
        parts.append(f'<text x="{x:.1f}" y="{TOP + PLOT_HEIGHT + 18}" text-anchor="middle">{text}</text>')
    for i in range(6):
        y, value = TOP + PLOT_HEIGHT * (5 - i) / 5, y_most * i / 5
        parts.append(f'<path d="M{LEFT} {y:.1f}h{PLOT_WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for i, (name, (xs, ys)) in enumerate(shown.items()):
        colour, y = COLOURS[i % len(COLOURS)], TOP + 14 * i
        dots = zip(LEFT + PLOT_WIDTH * xs / x_most, TOP + PLOT_HEIGHT * (1 - ys / y_most), strict=True)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{LEFT + PLOT_WIDTH + 12}" y="{y + 4}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _round_up(value: float, *, whole: bool = False) -> float:
    """The next number above that reads well on an axis: a whole one, or 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    if whole:
        return float(np.ceil(value))
    power = 10.0 ** np.floor(np.log10(value))
    return next(float(m * power) for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-9))
