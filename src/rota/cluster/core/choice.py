"""Choice among the shapes that a job may have: sizes of its roles and types of device, by what each is worth."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np

from rota.cluster.core.jobs import Allocations, Choice, JobAsk, LiveJob, Shape, Slot, Wait, compile_shape
from rota.cluster.core.profile import Objective, Profile
from rota.cluster.core.promises import UNCOVERED, promise_level
from rota.cluster.core.splits import GAIN_MIN, is_measured, left_s_of, sizes_of, step_of, timed
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.spec.gang import GangRequest
from rota.spec.ids import GangId, JobId
from rota.spec.job import JobSpec, RoleSpec, RoleStart, SizedPlan, started_spec
from rota.spec.reasons import Reason
from rota.spec.resources import counted, types_of

WASTE_MAX = 2.0
"""A shape is too costly where a step takes more than this times the least device-seconds on devices of its types."""
_BASIS = {"finish": "the shortest time for all", "goodput": "the least device time"}


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choice of a job that starts (None: it has one shape), where it lies, and a sentence on why it is this one."""

    choice: Choice | None
    held: Allocations
    text: str = ""


CHOICES_MAX = 64
"""Shapes of one job that are compared at a start."""


def choices_of(spec: JobSpec, requests_of: Callable[[JobSpec], tuple[GangRequest, ...]]) -> tuple[Choice, ...]:
    """The shapes that a job may start with: a planned size of each role on one type of device, its fewest first.

    A step of a job is over when the slowest of its roles is. Of more than ``CHOICES_MAX`` those of least time stay.
    Empty where no role has several sizes or types with a predicted time.
    """
    if any(role.splits for role in spec.roles):
        return _splits_of(spec, requests_of)
    planned = [role for role in spec.roles if role.plans and all(one.step_s for one in role.plans)]
    options = [[_step_of(role, one, kind) for one in role.plans for kind in _kinds_of(role, one)] for role in planned]
    if not any(len(found) > 1 for found in options):
        return ()
    fewest = tuple(min(found, key=lambda one: (one[0].replicas, -one[1])) for found in options)
    base = tuple((replace(start, gpu_type=None), step_s) for start, step_s in fewest)
    rest = sorted(product(*options), key=lambda one: max(step_s for _, step_s in one))[:CHOICES_MAX]
    return tuple(
        Choice(
            shape=compile_shape(requests_of(started_spec(spec, starts))),
            step_s=max(step_s for _, step_s in one),
            starts=starts,
        )
        for one in dict.fromkeys((base, *rest))
        for starts in (tuple(start for start, _ in one),)
    )


def split_roles(spec: JobSpec) -> list[RoleSpec]:
    """The roles between which the scheduler splits devices: classes with ``plan: auto``, and ranges of what serves."""
    splits = any(role.splits for role in spec.roles)
    return [role for role in spec.roles if role.splits or (splits and role.serves and role.resizes)]


def splits_count(spec: JobSpec) -> int:
    """How many splits there are between the roles of a job."""
    return prod(len(_sizes_for(role)) for role in split_roles(spec))


def _sizes_for(role: RoleSpec) -> list[int]:
    return [n for n in range(role.replicas_min, role.replicas_max + 1) if role.serves or role.divides_batch(n)]


def _splits_of(spec: JobSpec, requests_of: Callable[[JobSpec], tuple[GangRequest, ...]]) -> tuple[Choice, ...]:
    """A choice for each split, the fewest first; until it is measured each role counts as an equal part of a step."""
    roles = split_roles(spec)
    options = [[RoleStart(role=role.name, replicas=n) for n in _sizes_for(role)] for role in roles]
    return tuple(
        Choice(
            shape=compile_shape(requests_of(started_spec(spec, starts))),
            step_s=sum(role.replicas_min / one.replicas for role, one in zip(roles, starts)) / len(roles),
            starts=starts,
            basis="assumed",
        )
        for starts in product(*options)
    )


def _kinds_of(role: RoleSpec, plan: SizedPlan) -> tuple[str | None, ...]:
    able = types_of(role.res.gpu_type)
    return tuple(kind for kind, _ in plan.steps if not able or kind in able) or (None,)


def _step_of(role: RoleSpec, plan: SizedPlan, kind: str | None) -> tuple[RoleStart, float]:
    step_s = plan.step_s if kind is None else dict(plan.steps)[kind]
    return RoleStart(role=role.name, replicas=plan.replicas, gpu_type=kind), step_s


def amount_of(shape: Shape) -> int:
    """Thousandths of devices of a shape, or of cores where it has no devices."""
    return shape.gpu_milli or sum(slot.cpu_milli for slot in shape.slots)


def cost_of(choice: Choice) -> float:
    """Device-seconds of a step, or core-seconds where it has no devices."""
    return choice.step_s * amount_of(choice.shape) / 1000


def delays(state: State, row: LiveJob) -> Callable[[Choice], float]:
    """By which part of its time a choice holds up all others together: each by the part of the devices that it takes.

    Device-seconds that one job has are gone for those beside it; with many of them the cheapest step is the best.
    """
    others, sums = crowd_of(state, row), dict[str, float]()

    def delay(choice: Choice) -> float:
        taken = 0.0
        for slot in choice.shape.slots:
            amount = slot.gpus * 1000 + slot.milli or slot.cpu_milli
            key = (slot.type or "") if slot.gpus or slot.milli else "cpu"
            if key not in sums:
                sums[key] = _all_of(state, slot)
            taken += amount / max(sums[key], 1.0)
        return others * taken

    return delay


def _all_of(state: State, slot: Slot) -> float:
    """Thousandths of devices of the types of a slot, or of cores, that there are."""
    if not (slot.gpus or slot.milli):
        return float(state.capacity[1])
    return 1000.0 * float(np.isin(state.dev_type, state.type_rows(slot.type)).sum())


def wastes(choice: Choice, choices: Sequence[Choice]) -> bool:
    """Whether a step takes more than ``WASTE_MAX`` times the device-seconds of the cheapest choice on those types."""
    return cost_of(choice) > WASTE_MAX * min(cost_of(one) for one in choices if _types(one) == _types(choice))


def share_of_free(state: State, row: LiveJob, now: float) -> int:
    """Thousandths of devices, or of cores, that a job may start with: its least, and its part of what no other needs.

    Each other waiting job whose time has come gets its least first, as far as there is enough; the rest is divided
    evenly.
    """
    first = row.ask.choices[0].shape
    free = int(state.free[state.usable].sum()) * 1000 if first.gpu_milli else int(state.cpu[state.usable].sum())
    rest, count = free - amount_of(first), 1
    for key, line in state.lines.items():
        if key.begins_at > now or state.jobs[line[0][1]].ask.spare:
            continue
        others = len(line) - any(job == row.ask.id for _, job in line)
        rest -= others * (key.shape.gpu_milli if first.gpu_milli else amount_of(key.shape))
        count += others
        if rest <= 0:
            return amount_of(first)
    return amount_of(first) + rest // count


def crowd_of(state: State, row: LiveJob) -> int:
    """How many other jobs there are, opportunistic ones and parts of jobs aside: they want devices now or will soon."""
    return sum(
        one.ask.part_of is None and not one.ask.opportunistic and one.ask.id != row.ask.id
        for one in state.jobs.values()
    )


def ranked(
    choices: Sequence[Choice], objective: Objective, share: int, delay: Callable[[Choice], float]
) -> list[Choice]:
    """The choices of at most ``share`` thousandths, best first, down to the first one, which is always there.

    ``finish``: the least time of a step for all, of those within ``WASTE_MAX``: its own, and that by which it holds up
    others, which is ``delay`` times as long; ``goodput``: the least device-seconds of one.
    """
    able = [one for one in choices[1:] if amount_of(one.shape) <= share]
    if objective == "finish":
        had = (choices[0], *able)
        able = [one for one in able if not wastes(one, had)]

    typed = any(sizes_of(one) == sizes_of(choices[0]) for one in choices[1:])

    def value(one: Choice) -> tuple[float, float, float]:
        by_time = (one.step_s * (1 + delay(one)), cost_of(one)) if objective == "finish" else (cost_of(one), one.step_s)
        return (typed and one is choices[0], *by_time)  # any type: only where no type by itself has a place

    found = sorted((*able, choices[0]), key=value)
    return found[: found.index(choices[0]) + 1]


def choose(
    state: State,
    profile: Profile,
    row: LiveJob,
    held: Allocations,
    now: float,
    fit: Callable[[LiveJob], Allocations | None],
) -> Chosen:
    """The best choice of a job that has a place with its first one (``held``); ``fit`` finds the place of another.

    What is kept for others stays so: ``fit`` places around reservations, a larger shape passes no limit and is covered
    by the same promise, and what other waiting jobs need is left to them.
    """
    if not row.ask.choices:
        return Chosen(None, held)
    row = timed(row, now)
    first, share = row.ask.choices[0], share_of_free(state, row, now)
    order, level = ranked(row.ask.choices, profile.objective, share, delays(state, row)), promise_level(state, row)
    without_room = list[Choice]()
    for choice in order[:-1]:
        other = row._replace(ask=row.ask.having(choice))
        covered = level == UNCOVERED or promise_level(state, other) <= level
        if covered and profile.division.verdict(state, other) is None and (found := fit(other)) is not None:
            return Chosen(choice, found, _why(row.ask, choice, profile.objective, share, without_room))
        without_room.append(choice)
    return Chosen(first, held, _why(row.ask, first, profile.objective, share, without_room))


GROW_S = 60.0
"""What it costs a running job to grow: its members start anew from the state of the last step."""
LIMITED = frozenset({Reason.QUOTA_LIMIT, Reason.USER_LIMIT, Reason.QUEUE_CLOSED, Reason.NON_PREEMPTIBLE_OVER_QUOTA})
"""Reasons of jobs that free devices do not start."""


def gate_growth(state: State, txn: Txn, profile: Profile, row: LiveJob, now: float) -> Wait | None:
    """Why a job with choices may not have this further member now; what replaces a lost one is not held back.

    It grows while no other job waits, to a size that has a place as a whole, and only where the time that it saves
    until its end is more than the move takes.
    """
    job = state.jobs.get(row.ask.part_of) if row.ask.part_of is not None and row.ask.spare else None
    if job is None or not job.ask.choices or row.ask.failover:
        return None
    job = timed(job, now)
    if (first := _first_waiting(state, now)) is not None:
        text = f"The job grows once no other waits; {first} does."
        return Wait(reason=Reason.BEHIND_IN_ORDER, text=text, fields={"behind": first})
    role, has = row.ask.shape.role(0), sizes_now(state, job)
    left_s = left_s_of(job, now)
    now_s, text = step_s_of(job.ask, has), f"No larger size of {role} saves more time than the move takes."
    types, delay = _types(job.ask.chosen or job.ask.choices[0]), delays(state, job)
    now_delay = max(
        (delay(one) for one in job.ask.choices if _types(one) == types and dict(sizes_of(one)) == has), default=0.0
    )
    for choice in sorted(job.ask.choices[1:], key=lambda one: one.step_s):
        more = dict(sizes_of(choice)).get(role, 0) - has.get(role, 0)
        if more < 1 or _types(choice) != types or wastes(choice, job.ask.choices):
            continue
        if any(n > has.get(name, 0) for name, n in sizes_of(choice) if name != role):
            continue
        if left_s * (1 - choice.step_s / now_s) <= GROW_S:
            continue
        if choice.step_s * (1 + delay(choice)) >= now_s * (1 + now_delay):
            continue
        grown = row._replace(ask=replace(row.ask, shape=Shape(slots=row.ask.shape.slots * more)))
        if profile.placer.place(state, txn, grown) is not None:
            return None
        text = f"{more} more instances of {role}, which its next size needs, have no place at once."
    return Wait(reason=Reason.NO_FREE_DEVICES, text=text)


def _first_waiting(state: State, now: float) -> JobId | None:
    """A job that waits for devices which a running one could leave to it."""
    for key, line in state.lines.items():
        first = state.jobs[line[0][1]]
        limited = first.wait is not None and first.wait.reason in LIMITED
        if key.begins_at <= now and not first.ask.spare and not limited:
            return first.ask.id
    return None


def find_better_split(state: State, profile: Profile, now: float) -> LiveJob | None:
    """A running job that should start anew with another split: a better one, or one without a place that is lost."""
    for row in state.jobs.values():
        if row.ask.choices and row.phase == "running" and row.ask.choices[0].basis != "predicted":
            lost = any(_lacks_place(state.jobs[part]) for part in state.parts.get(row.ask.id, ()))
            find = _chosen_anew if lost else better_split
            if find(state, profile, row.ask.id, now) is not None:
                return row
    return None


def _lacks_place(part: LiveJob) -> bool:
    """Whether members that lost their node wait for another place in vain."""
    return part.ask.failover and not part.held and part.wait is not None


def better_split(state: State, profile: Profile, job: JobId, now: float) -> Choice | None:
    """The split for which a running job should start anew, from its last commit; None: the present one stays.

    It is the one that the job would start with on what is free and what it holds, if that saves more until its end than
    the job took from its devices to its first commit, and no other job waits. ``splits`` says for how fast a split is
    taken that was not tried.
    """
    row = timed(state.jobs[job], now)
    speeds = row.speeds
    if row.phase != "running" or speeds is None or not is_measured(speeds) or _first_waiting(state, now) is not None:
        return None
    if speeds.attempt != row.attempt or dict(speeds.sizes) != sizes_now(state, row):
        return None
    now_s = step_of(speeds, speeds.sizes)
    left_s = left_s_of(row, now)
    most_s = now_s * min(1 - GAIN_MIN, 1 - speeds.start_s / max(left_s, speeds.start_s))
    parts, cores = state.parts.get(job, ()), not row.ask.choices[0].shape.gpu_milli
    free = int(state.cpu[state.usable].sum()) if cores else int(state.free[state.usable].sum()) * 1000
    has = [slot for one in (row, *(state.jobs[part] for part in parts)) for slot in one.held]
    room = free + sum(slot.cpu_milli if cores else len(slot.devices) * 1000 for slot in has)
    if all(one.step_s > most_s or amount_of(one.shape) > room for one in row.ask.choices):
        return None
    found = _chosen_anew(state, profile, job, now)
    return found if found is not None and found.step_s <= most_s else None


def _chosen_anew(state: State, profile: Profile, job: JobId, now: float) -> Choice | None:
    """What a job would start with on what is free and what it holds; None: it has no place."""
    with state.txn() as txn:
        for part in tuple(state.parts.get(job, ())):
            state.drop(txn, part)
        state.release(txn, job)
        waiting = state.jobs[job]

        def fit(other: LiveJob) -> Allocations | None:
            return profile.placer.place(state, txn, other)

        held = fit(waiting)
        return choose(state, profile, waiting, held, now, fit).choice if held is not None else None


def parts_of(ask: JobAsk) -> list[JobAsk]:
    """What a job that starts with a choice asks for beside it: each further instance of its larger sizes by itself."""
    chosen, parts = ask.chosen, list[JobAsk]()
    for start in chosen.starts if chosen is not None else ():
        largest = max(dict(sizes_of(one)).get(start.role, 0) for one in ask.choices)
        slot = next(i for i in range(len(ask.shape.slots)) if ask.shape.role(i) == start.role)
        shape = Shape(slots=(ask.shape.slots[slot],), names=(("", 0, start.role),))
        for rank in range(start.replicas, largest):
            gang = GangId(f"{start.role}-{rank}")
            row, part = JobId(f"{ask.id}~{gang}"), replace(ask, shape=shape, choices=(), chosen=None)
            parts.append(replace(part, id=row, gang=gang, part_of=ask.id, spare=True))
    return parts


def sizes_now(state: State, job: LiveJob) -> dict[str, int]:
    """Instances of each role of a running job: those that it started with, and those that it was given since."""
    has = dict(sizes_of(job.ask.chosen or job.ask.choices[0]))
    for part in state.parts.get(job.ask.id, ()):
        held = state.jobs[part]
        for slot in range(len(held.held)):
            has[held.ask.shape.role(slot)] = has.get(held.ask.shape.role(slot), 0) + 1
    return has


def step_s_of(ask: JobAsk, has: Mapping[str, int]) -> float:
    """Predicted seconds a step with these instances of each role: of the best size that they hold, on its types."""
    chosen = ask.chosen or ask.choices[0]
    inside = [one for one in ask.choices if _types(one) == _types(chosen)]
    inside = [one for one in inside if all(n <= has.get(role, 0) for role, n in sizes_of(one))]
    return min((one.step_s for one in inside), default=chosen.step_s)


def step_s_on(ask: JobAsk, kinds: Collection[str]) -> float:
    """Predicted seconds a step of the size that a job has on devices of these types; the slowest counts."""
    has = ask.chosen or ask.choices[0]
    same = [one for one in ask.choices[1:] if sizes_of(one) == sizes_of(has) and not _types(one).isdisjoint(kinds)]
    return max((one.step_s for one in same), default=has.step_s)


def name_of(choice: Choice) -> str:
    """Sizes and types of a choice: ``4 of train on H100``."""
    parts = (f"{one.replicas} of {one.role}{f' on {one.gpu_type}' if one.gpu_type else ''}" for one in choice.starts)
    return " and ".join(parts)


def _types(choice: Choice) -> set[str]:
    return {one.gpu_type for one in choice.starts if one.gpu_type}


def _why(ask: JobAsk, choice: Choice, objective: Objective, share: int, without_room: Sequence[Choice]) -> str:
    unit = "device" if ask.choices[0].shape.gpu_milli else "core"
    text = f"{name_of(choice)}, {_step(choice)} as {choice.basis}: {_BASIS[objective]} of a step"
    text += f" with at most {counted(share // 1000, unit)}, its part of what is free"
    if without_room:
        text += f"; no room now for {', '.join(map(name_of, without_room[:3]))}"
    typed = any(sizes_of(one) == sizes_of(ask.choices[0]) for one in ask.choices[1:])
    others = [one for one in ask.choices[typed:] if one is not choice and one not in without_room]
    if others:
        others.sort(key=lambda one: one.step_s)
        if choice.basis != "predicted":
            listed = (f"{name_of(one)} {_step(one)} ({one.basis})" for one in others)
            return f"{text}; others: {'; '.join(listed)}."
        listed = (f"{name_of(one)} {one.step_s:.3g} s, {cost_of(one):.3g} {unit}-seconds" for one in others[:3])
        text += f". It takes {cost_of(choice):.3g} {unit}-seconds a step; others: {'; '.join(listed)}"
    return f"{text}."


def _step(choice: Choice) -> str:
    """How long a step takes; before anything was measured, which part of one with the fewest members."""
    return f"{choice.step_s:.0%} of a step" if choice.basis == "assumed" else f"{choice.step_s:.3g} s a step"
