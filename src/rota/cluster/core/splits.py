"""Splits of a job between its roles: what a commit takes with each, from the seconds in which its loop waited for each.

A step is what the loop does by itself and its waits, one after the other: ``rest + sum(waits[role] * scale(role, n))``,
where the scale of a role is 1 / members until it was measured. Calls that overlap count with the part of the step that
they fill together. A scale is the ratio of two medians on both sides of one change, so that a job whose steps become
longer for another reason does not change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from rota.cluster.core.jobs import Choice, LiveJob, Sizes, Speeds

WINDOW = 8
"""Commits with one split after which it counts as measured; the latest of that number are kept."""


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
        was_s, now_s = new.before[1].get(role, 0.0), waits.get(role, 0.0)
        if sizes.get(role, n) != n and was_s > 0 and now_s > 0:
            scales[role, n] = _scale(new, role, sizes[role]) * now_s / was_s
            scales.setdefault((role, sizes[role]), 1 / sizes[role])
    return new._replace(scales=scales, before=None)


def _scale(speeds: Speeds, role: str, n: int) -> float:
    return speeds.scales.get((role, n), 1 / n)


def _waits(speeds: Speeds) -> dict[str, float]:
    roles = {role for _, waited in speeds.commits for role in waited}
    return {role: median(waited.get(role, 0.0) for _, waited in speeds.commits) for role in roles}


def step_of(speeds: Speeds, sizes: Sizes) -> float:
    """Seconds a step with these members, by what was measured."""
    step_s, waits, now = median(seconds for seconds, _ in speeds.commits), _waits(speeds), dict(speeds.sizes)
    part = min(1.0, step_s / max(sum(waits.values()), 1e-9))
    return step_s + sum(
        part * waits.get(role, 0.0) * (_scale(speeds, role, n) / _scale(speeds, role, now[role]) - 1)
        for role, n in sizes
    )


def timed(row: LiveJob) -> LiveJob:
    """The row with the seconds of its choices as they are known now, where it has a split that was measured."""
    speeds = row.speeds
    if speeds is None or not is_measured(speeds) or all(one.basis == "predicted" for one in row.ask.choices):
        return row
    return row._replace(ask=replace(row.ask, choices=tuple(_timed(one, speeds) for one in row.ask.choices)))


def _timed(choice: Choice, speeds: Speeds) -> Choice:
    sizes = sizes_of(choice)
    known = all(one in speeds.scales or one in speeds.sizes for one in sizes)
    return replace(choice, step_s=step_of(speeds, sizes), basis="measured" if known else "estimated")


def sizes_of(choice: Choice) -> Sizes:
    """Members of each role of a choice."""
    return tuple((str(one.role), one.replicas) for one in choice.starts)
