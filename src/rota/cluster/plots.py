"""Drawings of simulated runs as SVG: devices in use, jobs that wait, fairness, and waits of each tenant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from rota.cluster.report import JobLine
from rota.cluster.sim import Sample

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
        title = f"waits under {profile}: part of the jobs that waited at most so long"
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
    at = np.linspace(edges[0], edges[-1], min(POINTS_MAX, 20 * len(samples)) + 1)
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
