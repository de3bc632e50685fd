"""Promises to queues: which jobs are within a guarantee, of a leaf or of a queue above it, by type of device too."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from rota.cluster.core.capacity import GPU, QueueTable
from rota.cluster.core.jobs import LiveJob
from rota.cluster.core.state import LeafUse, Need, QueueEntry, State, entry_of
from rota.spec.ids import JobId

ANSWERS_MAX = 10_000
"""Answers of ``promise_level`` that are kept; each is found again when it is asked for."""
USES_MAX = 16
"""Uses of each queue that are kept: that of the state, and those of trials, which come back when they are undone."""
STEPS_MAX = 100
"""Changes of a queue after which its use is counted anew from the first job."""
PIECE = 32
"""Jobs that are counted before it is seen whether the rest is as it was."""
UNCOVERED = 99
"""The level of what no promise covers."""


def promise_level(state: State, row: LiveJob) -> int:
    """Which promise covers a job if it runs: 0 that to its queue, 1 that to the queue above, ``UNCOVERED`` none.

    A queue keeps its promise to its jobs in their order, to those first that a promise below covers. What may not be
    preempted counts, and what runs before the job and is covered; what runs behind it does not. A job without
    devices, or an opportunistic one, is never covered.
    """
    if row.ask.opportunistic or not row.ask.shape.gpu_milli or row.ask.queue not in state.queues.row:
        return UNCOVERED
    line = state.queues.line_of(row.ask.queue)
    if state.queues.promises[line[0]] and _covered_by_leaf(state, row, line[0]):
        return 0
    if not any(state.queues.promises[queue] for queue in line[1:]):
        return UNCOVERED
    key = (row.ask.queue, entry_of(row), row.ask.shape)
    stamp = state.ranked_at.get(top_of(row.ask.queue), -1)
    known = state.answers.promised.get(key)
    if known is not None and known[0] == stamp:
        return known[1]
    if len(state.answers.promised) > ANSWERS_MAX:
        state.answers.promised.clear()
    levels: dict[JobId, int] = {}
    _use(state, line[-1], row, levels)
    found = levels.get(row.ask.id, UNCOVERED)
    state.answers.promised[key] = (stamp, found)
    return found


def waits_for(row: LiveJob, level: int, other: LiveJob, ahead: int) -> bool:
    """Whether a job under promise ``level`` lets another under ``ahead`` go first, as what is promised does.

    In one queue a higher priority goes before what the job is promised.
    """
    if row.ask.queue == other.ask.queue:
        return ahead <= level or other.ask.priority > row.ask.priority
    return ahead <= level and level > 0


def next_level(state: State, first: LiveJob) -> int:
    """``promise_level`` of the first job of a queue, asked for each job of it: kept until something changes."""
    queue = first.ask.queue
    stamp = state.ranked_at.get(top_of(queue), -1)
    known = state.answers.next_level.get(queue)
    if known is None or known[0] != stamp or known[1] is not first.ask:
        known = state.answers.next_level[queue] = (stamp, first.ask, promise_level(state, first))
    return known[2]


def _covered_by_leaf(state: State, row: LiveJob, queue: int) -> bool:
    """Whether the promise to its own queue covers a job."""
    tree, need = state.queues, state.queues.devices(row.ask.shape)
    if not tree.promises_types and state.used[queue, GPU] + need[0] <= tree.promised[queue][0]:
        return True  # it covers all that the queue has, in whatever order
    use = leaf_use(state, row.ask.queue)
    before = use.before[bisect_left(use.entries, entry_of(row))]
    return _within(tree, queue, [a + b for a, b in zip(before, need)], need)


def leaf_use(state: State, path: str) -> LeafUse:
    """The running jobs of a leaf against its promise; after a change only what follows it is counted anew."""
    stamp, steps = state.ranked_at.get(path, -1), list[tuple[QueueEntry, bool]]()
    known = latest = state.answers.leaf_uses.get((path, stamp))
    before = stamp
    while latest is None and len(steps) < STEPS_MAX and (step := state.answers.steps.get(before)) is not None:
        before, entry, member = step
        steps.append((entry, member))
        latest = state.answers.leaf_uses.get((path, before))
    if known is None:
        known = None if latest is None else _after_steps(state, path, latest, steps)
        if len(state.answers.leaf_uses) > USES_MAX * len(state.queues.rows):
            del state.answers.leaf_uses[next(iter(state.answers.leaf_uses))]
        known = state.answers.leaf_uses[path, stamp] = known or counted_anew(state, path)
    return known


def counted_anew(state: State, path: str) -> LeafUse:
    """The use of a leaf from its first job on."""
    tree, jobs = state.queues, state.jobs
    kept = [0] * (len(tree.device_dims) if tree.promises_types else 1)
    entries, needs = list[QueueEntry](), list[Need]()
    for entry in state.ranked.get(path, ()):
        ask = jobs[entry[2]].ask
        need = tree.devices(ask.shape)
        if ask.preemptible:
            entries.append(entry)
            needs.append(need)
        else:
            kept = [a + b for a, b in zip(kept, need)]
    before, rest = [tuple(kept)], list[tuple[QueueEntry, Need]]()
    _cover(tree, tree.row[path], zip(entries, needs), before, rest)
    return LeafUse(entries, needs, before, rest)


def _after_steps(state: State, path: str, use: LeafUse, steps: Sequence[tuple[QueueEntry, bool]]) -> LeafUse | None:
    """The use of a leaf after these changes, newest first; None if one of them may not be preempted."""
    tree, changes = state.queues, dict[QueueEntry, tuple[bool, bool]]()
    for entry, member in steps:  # whether it is a member now, and whether it was one before
        changes[entry] = (changes[entry][0] if entry in changes else member, not member)
    entries, needs, first = list(use.entries), list(use.needs), len(use.entries)
    for entry, (member, was_member) in changes.items():
        at = bisect_left(entries, entry)
        listed = at < len(entries) and entries[at] == entry
        if listed is not was_member:
            return None
        if listed:
            del entries[at], needs[at]
        if member:
            ask = state.jobs[entry[2]].ask
            if not ask.preemptible:
                return None
            entries.insert(at, entry)
            needs.insert(at, tree.devices(ask.shape))
        first = min(first, at)
    moved = max(changes)
    before, rest = use.before[: first + 1], use.rest[: bisect_left(use.rest, min(changes), key=itemgetter(0))]
    # Behind all changes nothing differs from where as much is in use as before.
    tail = bisect_left(entries, moved)
    _cover(tree, tree.row[path], zip(entries[first:tail], needs[first:tail]), before, rest)
    shift = len(use.entries) - len(entries)
    while tail < len(entries):
        if entries[tail] > moved and before[-1] == use.before[tail + shift]:
            before += use.before[tail + shift + 1 :]
            rest += use.rest[bisect_left(use.rest, entries[tail], key=itemgetter(0)) :]
            break
        piece = slice(tail, tail + PIECE)
        _cover(tree, tree.row[path], zip(entries[piece], needs[piece]), before, rest)
        tail += PIECE
    return LeafUse(entries, needs, before, rest)


def _cover(
    tree: QueueTable,
    queue: int,
    jobs: Iterable[tuple[QueueEntry, Need]],
    before: list[Need],
    rest: list[tuple[QueueEntry, Need]],
) -> None:
    """Cover jobs in order: ``before`` gets what is covered up to and with each, ``rest`` those that are not."""
    kept, promised = before[-1], tree.promises[queue]
    if len(kept) == 1:  # no type is promised
        (total,), most = kept, tree.promised[queue][0]
        for entry, need in jobs:
            if total + need[0] <= most:
                total += need[0]
                kept = (total,)
            else:
                rest.append((entry, need))
            before.append(kept)
        return
    for entry, need in jobs:
        used = tuple(a + b for a, b in zip(kept, need))
        if promised and _within(tree, queue, used, need):
            kept = used
        else:
            rest.append((entry, need))
        before.append(kept)


def beyond(state: State, row: LiveJob) -> set[JobId]:
    """Running jobs that are beyond the promises to their queues once this job runs."""
    own, tree = top_of(row.ask.queue), state.queues
    found = {job for _, _, job in (entry for entry, _ in _use(state, tree.row[own], row).rest)}
    for queue in tree.rows:
        if queue.parent is None and queue.path != own:
            found |= _beyond_of(state, queue.path)
    return found


def top_of(path: str) -> str:
    """The queue at the top of the line of a queue."""
    return path.partition("/")[0]


def _beyond_of(state: State, top: str) -> set[JobId]:
    """Running jobs of the tree below ``top`` that no promise covers."""
    key = (top, state.ranked_at.get(top, -1))
    known = state.answers.beyond.get(key)
    if known is None:
        if len(state.answers.beyond) > USES_MAX * len(state.queues.rows):
            state.answers.beyond.clear()
        rest = _use(state, state.queues.row[top]).rest
        known = state.answers.beyond[key] = {entry[-1] for entry, _ in rest}
    return known


@dataclass(slots=True)
class _Use:
    """What covered jobs below a queue use, and the others in their order with what each needs."""

    kept: Need
    rest: list[tuple[QueueEntry, Need]]


def _use(state: State, queue: int, row: LiveJob | None = None, levels: dict[JobId, int] | None = None) -> _Use:
    """The use of a queue with ``row`` among the running jobs; ``levels`` learns which promise covers it."""
    tree, below = state.queues, state.queues.below[queue]
    before, rest = list[Need](), list[tuple[QueueEntry, Need]]()
    if below:
        parts = [_use(state, child, row, levels) for child in below]
        before.append(tuple(sum(column) for column in zip(*(part.kept for part in parts))))
        mixed = sorted((one for part in parts for one in part.rest), key=itemgetter(0))
        _cover(tree, queue, mixed, before, rest)
    else:
        use = leaf_use(state, tree.rows[queue].path)
        if row is None or row.ask.queue != tree.rows[queue].path:
            return _Use(use.before[-1], use.rest)
        entry = entry_of(row)
        at = bisect_left(use.entries, entry)
        before, rest = use.before[: at + 1], [one for one in use.rest if one[0] < entry]
        mixed = [(entry, tree.devices(row.ask.shape)), *zip(use.entries[at:], use.needs[at:])]
        _cover(tree, queue, mixed, before, rest)
    if levels is not None and row is not None and row.ask.id not in levels:
        line = tree.line_of(row.ask.queue)
        covers = queue in line and all(entry[-1] != row.ask.id for entry, _ in rest)
        levels |= {row.ask.id: line.index(queue)} if covers else {}
    return _Use(before[-1], rest)


def _within(tree: QueueTable, queue: int, used: Sequence[int], need: Need) -> bool:
    """Whether this use is within the promise to a queue; a promise of a type counts devices of that type."""
    total, *typed = tree.promised[queue]
    if used[0] > (total or sum(typed)):
        return False
    for have, most, asked in zip(used[1:], typed, need[1:]):
        if asked and (have > most if most else not total):
            return False
    return True
