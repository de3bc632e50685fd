"""How long jobs run: what ended jobs took of the time they asked, by queue, user and size, and what others may take.

A job that asked for no time counts with its seconds, apart from those that did. What is said of a job is a mixture over
its groups, each within the one before: all, those that asked about as long, of its queue, of its user, of its size. A
wider group weighs as much as ``WIDER`` ended jobs of the narrower one (a Polya tree of empirical distributions; the
idea of predictions from the user's own jobs: Tsafrir, Etsion, Feitelson, "Backfilling Using System-Generated
Predictions", TPDS 2007).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import log
from typing import NamedTuple

from rota.cluster.core.jobs import JobAsk, LiveJob
from rota.cluster.core.txn import Txn

KEPT = 100
"""Ended jobs that are remembered of a group, the latest."""
GROUPS_MAX = 10_000
"""Groups that are remembered; of more the half of which no job ended for longest is forgotten, narrow ones first."""
WIDER = 4.0
"""How many ended jobs the next wider group weighs."""
LIKELY, LATE = 0.5, 0.9
UNKNOWN_S = (60.0, 300.0, 1200.0, 3600.0, 10800.0, 28800.0, 86400.0)
"""Seconds of a job that asked for no time while none has ended: from a test run to a day, by equal steps of a log."""
OVERDUE = (1.05, 1.2, 1.5, 2.0, 3.0)
"""By how much a job that outlasts all that are known is taken to be longer than it is."""
BIN = 3.0
"""Jobs whose limits differ by less than this factor are of one group: who asks most overstates most."""
EVIDENCE = 8
"""Ended jobs below which nothing is said of jobs that asked for no time, nor of how true limits are."""
ASKED, UNKNOWN = "asked", "unknown"
DIGITS = 4
"""Of a ratio that is kept: a job that took what it asked counts as exactly 1."""

Group = tuple[str, ...]


class Taken(NamedTuple):
    """What the latest ended jobs of a group took, as ratios of what they asked or in seconds.

    ``likely`` and ``late`` are the quantiles of a job of this group as of ``at`` ended jobs of ``ended``; the last one
    ended at ``last_s``.
    """

    ended: int
    values: tuple[float, ...]
    at: int
    likely: float
    late: float
    last_s: float = 0.0


Book = dict[Group, Taken]


def groups_of(ask: JobAsk) -> tuple[Group, ...]:
    """The groups of a job, the widest first."""
    return _groups(ask.est_s, ask.queue, ask.user, ask.shape.gpu_milli)


@lru_cache(maxsize=1024)  # asked when a job arrives, when it starts, and when it has ended
def _groups(est_s: float | None, queue: str, user: str, gpu_milli: int) -> tuple[Group, ...]:
    kind = (ASKED, str(round(log(est_s, BIN)))) if est_s and est_s > 0 else (UNKNOWN, "")
    own = (queue, user, str(gpu_milli))
    return (kind[:1], kind, (*kind, *own[:1]), (*kind, *own[:2]), (*kind, *own))


@dataclass(frozen=True, slots=True)
class Spread:
    """Possible run times of one job in seconds, in order, with the probability of each and of all up to it."""

    seconds: tuple[float, ...]
    up_to: tuple[float, ...]

    def at(self, part: float, beyond_s: float = 0.0) -> float:
        """The quantile ``part`` (0 to 1) of a job that has run for ``beyond_s`` seconds already."""
        first = bisect_right(self.seconds, beyond_s) if beyond_s > 0 else 0
        if first == len(self.seconds):
            return beyond_s * OVERDUE[min(int(part * len(OVERDUE)), len(OVERDUE) - 1)]
        before = self.up_to[first - 1] if first else 0.0
        reached = before + part * (self.up_to[-1] - before)
        return self.seconds[min(max(bisect_right(self.up_to, reached), first), len(self.seconds) - 1)]

    @property
    def is_known(self) -> bool:
        """Whether there is only one possible time."""
        return self.seconds[0] == self.seconds[-1]


def times_of(book: Mapping[Group, Taken], ask: JobAsk) -> Spread:
    """What ended jobs say of the run time of a job; without any, the time that it asked."""
    return _mixture(book, groups_of(ask), ask.est_s)


def _mixture(book: Mapping[Group, Taken], groups: Sequence[Group], est_s: float | None) -> Spread:
    mass, counted, weights = 1.0, 0, dict[float, float]()
    prior, known = (1.0,) if est_s else UNKNOWN_S, book.get(groups[0])
    if known is not None:  # a few jobs that took a fifth of their limit say more than the limit
        mass -= (part := WIDER / (known.ended**2 + WIDER))
        weights = {value: part / len(prior) for value in prior}
    for group in reversed(groups):
        if (taken := book.get(group)) is None or taken.ended == counted:
            continue
        more = min(taken.ended - counted, KEPT)  # those of the narrower group have had their part
        counted, part = taken.ended, mass * more / (more + WIDER)
        for value in taken.values:
            weights[value] = weights.get(value, 0.0) + part / len(taken.values)
        mass -= part
    for value in prior if known is None else known.values:
        weights[value] = weights.get(value, 0.0) + mass / len(prior if known is None else known.values)
    values = sorted(weights)
    return Spread(
        tuple(value * (est_s or 1.0) for value in values), tuple(accumulate(weights[value] for value in values))
    )


def expected(book: Mapping[Group, Taken], ask: JobAsk) -> tuple[float | None, float | None]:
    """Likely and late run time of a job in seconds; None: it asked for none and nothing is known of its like."""
    if not ask.est_s and ((known := book.get((UNKNOWN,))) is None or known.ended < EVIDENCE):
        return None, None
    for group in reversed(groups_of(ask)):
        if (taken := book.get(group)) is not None:
            scale = ask.est_s or 1.0
            return taken.likely * scale, taken.late * scale
    return ask.est_s, ask.est_s


def predicted_s(ask: JobAsk) -> float | None:
    """Run time of a job by the predicted step of the choice that it has; None where one of both is not known."""
    choice = (ask.chosen or ask.choices[0]) if ask.choices else None
    return ask.steps * choice.step_s or None if choice is not None and choice.basis == "predicted" else None


def paced(row: LiveJob, n: int, now: float) -> LiveJob:
    """The row of a job that made commit ``n``: by its speed since the first commit of its size it knows its length."""
    if not (row.held and row.ask.steps and n):
        return row
    if row.pace is None or n <= row.pace[0]:
        return row._replace(pace=(n, now))
    left_s = max(0, row.ask.steps - n) * (now - row.pace[1]) / (n - row.pace[0])
    return row._replace(reported_s=row.done_s + now - row.started_at + left_s)


def learn(book: Book, txn: Txn, row: LiveJob, now: float) -> None:
    """A job ended: what it took counts for the groups that it is of; parts of jobs and jobs that never ran do not."""
    took_s = row.done_s + (now - row.started_at if row.held else 0.0)
    if row.ask.part_of is not None or took_s <= 0:
        return
    value = round(took_s / row.ask.est_s, DIGITS) if row.ask.est_s else took_s
    groups = groups_of(row.ask)
    for depth, group in enumerate(groups):
        old = book.get(group)
        count = old.ended + 1 if old else 1
        values = (*old.values[-KEPT + 1 :], value) if old else (value,)
        if old is not None and count < old.at * 1.2 + 1:
            txn.put(book, group, Taken(count, values, old.at, old.likely, old.late, now))
            continue
        txn.put(book, group, Taken(count, values, count, 0.0, 0.0))  # counted by the mixture that it is read with
        ratios = _mixture(book, groups[: depth + 1], 1.0 if row.ask.est_s else None)
        txn.put(book, group, Taken(count, values, count, ratios.at(LIKELY), ratios.at(LATE), now))
    if len(book) > GROUPS_MAX:
        for group in sorted(book, key=lambda one: (book[one].last_s, -len(one), one))[: len(book) // 2]:
            txn.drop(book, group)
