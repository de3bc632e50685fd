"""Splits of a job between its roles: what a commit takes with each, from the seconds in which its loop waited for each.

A step is what the loop does by itself and its waits, one after the other: ``rest + sum(waits[role] * scale(role, n))``.
Calls that overlap count with the part of the step that they fill together. A measured scale is the ratio of two medians
on both sides of one change, so that a job whose steps become longer for another reason does not change it. Between
measured sizes, and past them, a scale follows the line ``a + b / n`` through the nearest two (Amdahl: a part that
members share and one that they do not). Of a role with one measured size only bounds are known: more members help
between not at all and by their number. A split is then taken for as fast as it may be, so that it is tried, where the
worst of it costs less than ``GAIN_MIN`` of what is left of the job; else for as fast as with ``b / n`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from rota.cluster.core.jobs import Choice, LiveJob, Sizes, Speeds

WINDOW = 8
"""Commits with one split after which it counts as measured; the latest of that number are kept."""
GAIN_MIN = 0.05
"""Part of its step by which another split must be faster (less is noise), and of what is left that a trial may cost."""
HIDDEN_S = 1e-4
"""Least wait for a role: one whose calls are hidden behind others has a size that was tried, too."""
HORIZON_S = 3600.0
"""How long a job without an estimate is taken to run on."""


def noted(row: LiveJob, has: Mapping[str, int], n: int, now: float, waited: Mapping[str, float]) -> LiveJob:
    """The row of a job that made commit ``n`` with these members, and the seconds that it waited for each role."""
    sizes, old = tuple(sorted(has.items())), row.speeds
    new = Speeds(row.attempt, sizes, (n, now), now - row.started_at)
    if old is None:
        return row._replace(speeds=new)
    if old.sizes != sizes:
        before = (old.sizes, _waits(old)) if is_measured(old) else old.before
        start_s = new.start_s if old.attempt != row.attempt else old.start_s
        return row._replace(speeds=new._replace(scales=old.scales, before=before, start_s=start_s))
    if old.attempt != row.attempt:
        return row._replace(speeds=old._replace(attempt=row.attempt, last=new.last, start_s=new.start_s))
    commits = old.commits
    if n == old.last[0] + 1:
        commits = (*commits, (now - old.last[1], waited))[-WINDOW:]
    return row._replace(speeds=_scaled(old._replace(commits=commits, last=(n, now))))


def is_measured(speeds: Speeds | None) -> bool:
    """Whether the present split of a job has made enough commits."""
    return speeds is not None and len(speeds.commits) == WINDOW


def _scaled(new: Speeds) -> Speeds:
    """With the scales of the roles that changed, once as many commits were made as before the change."""
    if new.before is None or not is_measured(new):
        return new
    sizes, waits, scales = dict(new.before[0]), _waits(new), dict(new.scales)
    for role, n in new.sizes:
        was_s, now_s = new.before[1].get(role, HIDDEN_S), waits[role]
        if sizes.get(role, n) != n:
            scale = scales.setdefault((role, sizes[role]), _scale(new, role, sizes[role]))
            scales[role, n] = scale * now_s / was_s
    return new._replace(scales=scales, before=None)


def _known(speeds: Speeds, role: str) -> dict[int, float]:
    """Measured scales of a role by its members; one that never changed has its present size alone."""
    known = {n: scale for (name, n), scale in speeds.scales.items() if name == role}
    now = dict(speeds.sizes)[role]
    return known or {now: 1 / now}


def _bounds(known: Mapping[int, float], n: int) -> tuple[float, float]:
    """Least and most that a scale can be: from the nearest size, members help by their number, or not at all."""
    near = min(known, key=lambda m: abs(1 / m - 1 / n))
    ends = known[near], known[near] * near / n
    return min(ends), max(ends)


def _scale(speeds: Speeds, role: str, n: int) -> float:
    known = _known(speeds, role)
    if n in known:
        return known[n]
    first, *others = sorted(known, key=lambda m: abs(1 / m - 1 / n))
    if not others:
        return known[first] * first / n
    slope = (known[others[0]] - known[first]) / (1 / others[0] - 1 / first)
    least, most = _bounds(known, n)
    return min(max(known[first] + slope * (1 / n - 1 / first), least), most)


def _waits(speeds: Speeds) -> dict[str, float]:
    return {
        role: max(HIDDEN_S, median(waited.get(role, 0.0) for _, waited in speeds.commits)) for role, _ in speeds.sizes
    }


def step_of(speeds: Speeds, sizes: Sizes) -> float:
    """Seconds a step with these members, by what was measured."""
    return _step(speeds, {role: _scale(speeds, role, n) for role, n in sizes})


def _step(speeds: Speeds, scales: Mapping[str, float]) -> float:
    step_s, waits, now = median(seconds for seconds, _ in speeds.commits), _waits(speeds), dict(speeds.sizes)
    part = min(1.0, step_s / max(sum(waits.values()), 1e-9))
    times = ((waits[role], scale / _scale(speeds, role, now[role])) for role, scale in scales.items())
    return step_s + part * sum(seconds * (ratio - 1) for seconds, ratio in times)


def left_s_of(row: LiveJob, now: float) -> float:
    """Seconds that a job has still to run, as far as is known."""
    if row.left_s is None:
        return HORIZON_S
    return row.left_s - (now - row.started_at if row.phase == "running" else 0.0)


def timed(row: LiveJob, now: float) -> LiveJob:
    """The row with the seconds of its choices as they are known now, where it has a split that was measured."""
    speeds = row.speeds
    if speeds is None or not is_measured(speeds) or all(one.basis == "predicted" for one in row.ask.choices):
        return row
    left_s = left_s_of(row, now)
    return row._replace(ask=replace(row.ask, choices=tuple(_timed(one, speeds, left_s) for one in row.ask.choices)))


def _timed(choice: Choice, speeds: Speeds, left_s: float) -> Choice:
    sizes = sizes_of(choice)
    known = {role: _known(speeds, role) for role, _ in sizes}
    if all(n in known[role] for role, n in sizes):
        return replace(choice, step_s=step_of(speeds, sizes), basis="measured")

    best, worst = dict[str, float](), dict[str, float]()
    for role, n in sizes:
        scale = _scale(speeds, role, n)
        single = len(known[role]) == 1 and n not in known[role]
        best[role], worst[role] = _bounds(known[role], n) if single else (scale, scale)
    grows = any(n > dict(speeds.sizes)[role] for role, n in sizes)
    trial_s = 2 * speeds.start_s + WINDOW * max(0.0, _step(speeds, worst) - step_of(speeds, speeds.sizes))
    if grows and trial_s <= GAIN_MIN * left_s:
        return replace(choice, step_s=_step(speeds, best), basis="estimated at best")
    return replace(choice, step_s=step_of(speeds, sizes), basis="estimated")


def sizes_of(choice: Choice) -> Sizes:
    """Members of each role of a choice."""
    return tuple((str(one.role), one.replicas) for one in choice.starts)
