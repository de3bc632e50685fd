"""Scheduling cycle: step(state, event) -> decisions, in numbered steps, and the order of waiting jobs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from rota.cluster.core.admission import too_few_free, waits_because, waits_for_preemption, with_spares
from rota.cluster.core.events import (
    Event,
    JobGone,
    JobHolds,
    JobReleased,
    JobResized,
    JobWaits,
    PairUndone,
    StopRequested,
    apply,
    fold,
)
from rota.cluster.core.jobs import Allocations, JobRow, LineKey, Wait, line_key, place_key
from rota.cluster.core.preemption import (
    BackfillReservation,
    BackfillReservations,
    TentativeAllocations,
    take_what_is_free,
)
from rota.cluster.core.profile import Admit, Decision, Preempt, Profile, Resize, Victim, WaitOn, WakeAt
from rota.cluster.core.state import LOST, InvariantBroken, State, Txn
from rota.spec.errors import nearest
from rota.spec.ids import JobId
from rota.spec.reasons import INFO, Reason

# -- order of waiting jobs --


PASSED_BY = frozenset({Reason.NOT_BEFORE, Reason.COOL_DOWN, Reason.USER_LIMIT})
"""Reasons that lie in the job or its user: those behind it in its queue need not wait with it."""

FOR_ONE_JOB = frozenset({Reason.AWAITING_PREEMPTION, Reason.RESERVED_FOR_OTHER})
"""Reasons that hold for one job of a line only: the next one may be shorter, or find victims of its own."""

BY_PLACE = {Reason.NO_FREE_DEVICES, Reason.FRAGMENTED, Reason.WRONG_TYPE, Reason.CPU_OR_MEMORY, Reason.TOPOLOGY}
"""Reasons of jobs whose queue might start them, and that find no place."""


class NextJob(NamedTuple):
    """A job that is to be tried: its place in the order, its line or queue, how far down, and the starts until then."""

    place: tuple[object, ...]
    job: JobId
    track: LineKey | str
    depth: int
    starts: int


@dataclass(frozen=True, slots=True)
class RememberedRefusal:
    """A "no" that was reached before: its numbers are found when a job gets it as its reason."""

    reason: Reason


class TryOrder:
    """The first job of every line of equal jobs, or of every queue, in the order of the policy; then who is behind it.

    ``starts`` counts starts and claims so far: ranks stay as they are until there is one more.
    """

    def __init__(
        self, state: State, profile: Profile, now: float, reservations: BackfillReservations, starts: Callable[[], int]
    ) -> None:
        self._state, self._profile, self._now, self._starts = state, profile, now, starts
        self._reservations = reservations
        self._by_job, self._by_queue = profile.order.by_job, profile.block == "queue"
        tracks = state.asking if self._by_queue else state.lines
        self._heap = [
            self._at(track, depth)
            for track, jobs in tracks.items()
            for depth in range(len(jobs) if self._by_job else 1)
        ]
        heapify(self._heap)

    def next(self) -> tuple[NextJob, JobRow, LineKey] | None:
        """The turn that comes first, with its job and the line of that."""
        heap = self._heap
        while heap:
            turn = heap[0]
            row = self._state.jobs[turn.job]
            if turn.starts != self._starts():
                again = self._turn(row, turn.track, turn.depth)
                if again.place > turn.place:
                    heapreplace(heap, again)
                    continue
            heappop(heap)
            return turn, row, line_key(row) if isinstance(turn.track, str) else turn.track
        return None

    def after(self, turn: NextJob, wait: Wait | RememberedRefusal | None) -> None:
        """Who of the line, or queue, is tried after this one: the next, unless what stops this one stops them all."""
        depth = turn.depth + 1
        if wait is None:
            depth = turn.depth
        elif wait.reason is Reason.RESERVED_FOR_OTHER and not isinstance(turn.track, str):
            depth = self._shorter(turn.track, turn.depth)
        elif wait.reason not in FOR_ONE_JOB and not (self._by_queue and wait.reason in PASSED_BY):
            return
        if not self._by_job and depth < len(self._entries(turn.track)):
            heappush(self._heap, self._at(turn.track, depth))

    def _shorter(self, key: LineKey, depth: int) -> int:
        """The next in the line that is over before the last of the reservations that this one would outlive."""
        line, jobs = self._state.lines[key], self._state.jobs
        ends = [r.at for r in self._reservations.outlived_by(jobs[line[depth][1]])]
        if not ends:  # it was not tried in this pass, which had tried enough: nor are those behind it
            return len(line)
        left = ((i, jobs[line[i][1]].left_s) for i in range(depth + 1, len(line)))
        return next((i for i, left_s in left if left_s is not None and self._now + left_s <= max(ends)), len(line))

    def _entries(self, track: LineKey | str) -> Sequence[tuple[float, JobId] | tuple[int, float, JobId]]:
        """The waiting jobs of a queue, or of a line, first to last."""
        return self._state.asking.get(track, ()) if isinstance(track, str) else self._state.lines.get(track, ())

    def _at(self, track: LineKey | str, depth: int) -> NextJob:
        return self._turn(self._state.jobs[self._entries(track)[depth][-1]], track, depth)

    def _turn(self, row: JobRow, track: LineKey | str, depth: int) -> NextJob:
        place = place_in_order(self._state, self._profile, row, self._now)
        return NextJob(place, row.ask.id, track, depth, self._starts())


def place_in_order(state: State, profile: Profile, row: JobRow, now: float) -> tuple[object, ...]:
    """Place of a waiting job: opportunistic ones last, then the rank, queue time, and id (the last element)."""
    return (row.ask.opportunistic, *profile.order.rank(state, row, now), row.ask.queued_at, row.ask.id)


def wait_of(state: State, profile: Profile, job: JobId, now: float) -> Wait | None:
    """Reason of a waiting job by the last passes, or None: what holds for one that is tried before it holds for it.

    A pass tries no more of a line, or of a queue that is held up, than it must; the others keep their last reason.
    """
    row = state.jobs.get(job)
    if row is None or row.phase != "queued" or row.wait is None or row.begins_at > now:
        return None if row is None else row.wait
    if profile.order.by_job:
        return _as_of_now(state, profile, row, row.wait)
    by_queue = profile.block == "queue"
    for *_, other in state.asking[row.ask.queue] if by_queue else state.lines[line_key(row)]:
        if other == job:
            break
        wait = state.jobs[other].wait
        if wait is None or wait.reason is Reason.AWAITING_PREEMPTION or (by_queue and wait.reason in PASSED_BY):
            continue
        if wait.reason is Reason.RESERVED_FOR_OTHER and _is_shorter(row, wait, now):
            continue
        wait = _as_of_now(state, profile, state.jobs[other], wait)
        text = f"It is behind {other}: {wait.text or INFO[wait.reason].text}"
        reason = Reason.BEHIND_IN_ORDER if by_queue else wait.reason
        return replace(wait, reason=reason, text=text, fields={**wait.fields, "behind": other})
    return _as_of_now(state, profile, row, row.wait)


def _as_of_now(state: State, profile: Profile, row: JobRow, last: Wait) -> Wait:
    """What a job that finds no place waits for by now: more may be taken since it got its reason."""
    if last.reason not in BY_PLACE:
        return last
    return profile.division.verdict(state, row) or too_few_free(state, row.ask.shape) or last


def _is_shorter(row: JobRow, wait: Wait, now: float) -> bool:
    """Whether a job would be over before what another one has to wait for."""
    return row.left_s is not None and now + row.left_s <= wait.number("until")


# -- cycle --


def step(state: State, event: Event, profile: Profile, now: float) -> list[Decision]:
    """Fold an event, decide, and carry the decisions out in the state. Equal inputs give equal decisions.

    What a pass tried is what its decisions do, so it stays; only claims on devices that are still held are undone.
    """
    apply(state, event, now)
    if profile.prepare is not None:
        profile.prepare(state)
    with state.txn() as txn:
        walk = _Pass(state, txn, profile, now)
        decisions = walk.run()
        if not walk.tentative:
            txn.keep()
            state.version += 1
            return decisions
    for decision in decisions:
        match decision:
            case Admit(job=job, held=held):
                apply(state, JobHolds(job=job, held=held), now)
            case Preempt(job=job, undone=undone):
                apply(state, StopRequested(job=job), now)
                if undone is not None:
                    apply(state, PairUndone(job=job, pair=undone), now)
            case Resize(job=job, held=held):
                apply(state, JobResized(job=job, held=held), now)
            case WaitOn(job=job, wait=wait):
                apply(state, JobWaits(job=job, wait=wait), now)
            case WakeAt():
                pass
    return decisions


def decide(state: State, profile: Profile, now: float, until: JobId | None = None) -> list[Decision]:
    """What should happen now; with ``until`` no further than what it says of that job.

    The state stays as it was: the caller that carries a decision out applies its event.
    """
    if profile.prepare is not None:
        profile.prepare(state)
    with state.txn() as txn:
        return _Pass(state, txn, profile, now, until).run()


BEYOND_QUEUE = frozenset({Reason.QUOTA_LIMIT, Reason.USER_LIMIT, Reason.CPU_OR_MEMORY})
"""Reasons that jobs of other queues may undo, also where devices are promised to each queue by themselves."""


class _Pass:
    """One walk over the waiting jobs, in a transaction of the state: what it keeps is what its decisions do.

    A trial of the next pass ends ``until`` a job, has the ``spares`` of the pass that asks, and shares no devices.
    """

    cut_short = False

    def __init__(self, state: State, txn: Txn, profile: Profile, now: float, until: JobId | None = None) -> None:
        self.state, self.txn, self.profile, self.now, self.until = state, txn, profile, now, until
        self.spares = state.spares(profile.spares)
        self.aside: dict[int, int] = {}
        self.decisions: list[Decision] = []
        self.blocked: dict[str, JobId] = {}
        self.verdicts: dict[LineKey, Wait | RememberedRefusal] = {}
        self.full: dict[LineKey, Reason] = {}
        self.wake: list[float] = []
        self.reservations = BackfillReservations(state, txn, profile.placer, now)
        self.fits: dict[tuple[object, ...], tuple[int, Allocations | None]] = {}
        self.tentative = TentativeAllocations(state, txn)
        self.started = 0
        self.sharing, self.joins, self.shared = profile.sharing, True, False
        self.tried = self.sets = 0
        self.tries_max = profile.candidates_max << state.memory.cut_short

    def run(self) -> list[Decision]:
        # 0. end sharing that does not pay; jobs that are left alone get their devices whole
        if self.joins and self.sharing is not None:
            self.shared = self.sharing.has_pairs(self.state)
            self._separate(self.sharing.separate(self.state, self.now))
        # 1. the first job of every line of equal jobs, or of every queue, in the order of the policy
        turns = TryOrder(self.state, self.profile, self.now, self.reservations, self._starts)
        # 2. start it, or learn why not; what holds for the first of a line holds for the line
        fresh = {line_key(self.state.jobs[job]) for job in self.state.fresh}
        while (one := turns.next()) is not None:
            turn, row, key = one
            if row.ask.queue in self.blocked and row.wait is not None:
                continue
            try:
                wait = self._try(key, row)
            except Exception as error:
                raise InvariantBroken(f"trying it failed with {error!r}", row.ask.id) from error
            if isinstance(wait, RememberedRefusal) and key in fresh:
                wait = self.verdicts[key] = self._because(row)  # the numbers at its turn, remembered or not
            if wait is not None:
                self._give_reason(row, wait)
            if self.until is not None and (row.ask.id == self.until or self._is_settled(self.until)):
                break
            turns.after(turn, wait)
        # 3. jobs that arrived since the last pass learn why they wait
        for job in sorted(self.state.fresh if self.until is None else self.state.fresh.keys() & {self.until}):
            row = self.state.jobs[job]
            key = line_key(row)
            if wait := self.verdicts.get(key) or self._gate_time(row) or self._gate_queue(row) or self._gate_order(row):
                if isinstance(wait, RememberedRefusal):
                    wait = self.verdicts[key] = self._because(row)
                self._give_reason(row, wait)
        if self.until is not None:
            return self.decisions
        # 4. lend what is idle when no job waits for it
        if self.sharing is not None and not self.state.lines:
            self._resize(self.sharing.lend(self.state, self.txn, self.profile.placer))
        # 5. wake up when time alone will change something, or to try more, until all were tried
        self.state.memory.cut_short = self.state.memory.cut_short + 1 if self.cut_short else 0
        if self.cut_short:
            self.wake.append(self.now)
        if (round_s := self.profile.round_s) and (self.shared or self._some_wait_beside_others()):
            self.wake.append((self.now // round_s + 1) * round_s)
        if self.wake:
            self.decisions.append(WakeAt(at=min(self.wake)))
        return self.decisions

    def _is_settled(self, job: JobId) -> bool:
        row = self.state.jobs[job]
        verdict = None if self.profile.order.by_job else self.verdicts.get(line_key(row))
        return row.ask.queue in self.blocked or (verdict is not None and verdict.reason not in FOR_ONE_JOB)

    def _some_wait_beside_others(self) -> bool:
        return bool(self.state.lines) and any(self.state.running.values())

    def _starts(self) -> int:
        """Starts and claims so far: ranks stay as they are until there is one more."""
        return self.started + len(self.tentative.jobs)

    def _give_reason(self, row: JobRow, wait: Wait | RememberedRefusal) -> None:
        """Give a job its reason if it differs from the last one, with the numbers of now."""
        if not row.has_reason(wait.reason) and self.until in (None, row.ask.id):
            wait = self._because(row) if isinstance(wait, RememberedRefusal) else wait
            if not row.has_reason(wait.reason):
                self.decisions.append(WaitOn(job=row.ask.id, wait=wait))
                self.state.put(self.txn, replace(row, wait=wait))

    def _because(self, row: JobRow) -> Wait:
        """The reason behind a "no", and its numbers."""
        with self._aside(row) as spares:
            wait = self.profile.division.verdict(self.state, row)
            wait = wait or waits_because(self.state, row.ask, self.profile.placer)
        return self._with_spares(wait, spares)

    def _with_spares(self, wait: Wait, spares: list[int]) -> Wait:
        return with_spares(wait, [self.state.nodes[place].id for place in spares]) if spares else wait

    def _try(self, key: LineKey, row: JobRow) -> Wait | RememberedRefusal | None:
        """Start the job, or say why not: gates, then quota, then place, then preempt."""
        if (known := self.verdicts.get(key)) is not None and known.reason not in FOR_ONE_JOB:
            return known
        wait = self._gate_time(row) or self._gate_queue(row) or self._gate_order(row)
        if wait is None and self.tried >= self.tries_max:
            self.cut_short = True
            return row.wait or Wait(reason=Reason.BEHIND_IN_ORDER)
        if wait is None:
            local = self.profile.local and not row.ask.opportunistic
            known = self.state.memory.recall(self._beside_spares(), key, local=local)
            wait = None if known is None else RememberedRefusal(known)
            if wait is None:
                self.tried += 1
                wait = self._start(key, row)
                if (
                    isinstance(wait, Wait)
                    and wait.reason not in FOR_ONE_JOB
                    and not self.tentative
                    and self.profile.remember
                    and self.profile.block != "reserve"
                    and not (local and wait.reason in BEYOND_QUEUE)
                ):
                    self.state.memory.learn(self._beside_spares(), key, wait.reason, local=local)
            if wait is not None and self._holds_up(wait):
                self.blocked.setdefault(row.ask.queue, row.ask.id)
        if wait is not None:
            self.verdicts[key] = wait
        return wait

    def _beside_spares(self) -> str:
        """Under what a "no" is remembered: it may not hold any more once other nodes are kept back."""
        return f"{self.profile.name} beside {self.spares}"

    def _holds_up(self, wait: Wait | RememberedRefusal) -> bool:
        """Whether those behind a job in its queue wait with it; a claim on what victims give back counts as a start."""
        claimed = self.profile.victims is not None and wait.reason is Reason.AWAITING_PREEMPTION
        return self.profile.block == "queue" and not claimed and wait.reason not in PASSED_BY

    def _start(self, key: LineKey, row: JobRow) -> Wait | RememberedRefusal | None:
        """Start the job, or say why not."""
        if not self.spares and not row.ask.avoid:
            return self._start_anywhere(place_key(key), row)
        with self._aside(row) as spares:
            wait = self._start_anywhere(place_key(key), row)
        return self._with_spares(wait, spares) if isinstance(wait, Wait) else wait

    @contextmanager
    def _aside(self, row: JobRow) -> Generator[list[int]]:
        """Nothing is placed on the nodes that the job avoids, nor on the spares kept from it, meanwhile.

        Asked for another job in between, it is that one's nodes alone.
        """
        state, outer = self.state, self.aside
        for place, health in outer.items():
            self.txn.set(state.node_health, place, health)
        spares = [] if row.ask.opportunistic or row.ask.failover else self.spares
        places = [*spares, *(state.node_row[node] for node in row.ask.avoid if node in state.node_row)]
        healths = {place: int(state.node_health[place]) for place in places}
        for place in healths:
            self.txn.set(state.node_health, place, LOST)
        self.aside = healths
        yield spares
        self.aside = outer
        for place, health in healths.items():
            self.txn.set(state.node_health, place, health)
        for place in outer:
            self.txn.set(state.node_health, place, LOST)

    def _start_anywhere(self, key: LineKey, row: JobRow) -> Wait | RememberedRefusal | None:
        """Start the job, or say why not; ``key`` is that of its place."""
        if (wait := self.profile.division.verdict(self.state, row)) is not None:
            return wait
        full = self._recall_full(key)
        fits = self._fit(key, row) if full is None else None
        if fits is not None:
            self._reserve()
            if (wait := self._gate_order(row)) is not None:
                return wait
        outlived = self.reservations.outlived_by(row)
        held = fits if fits is None or not outlived else self._fit(key, row, outlived)
        held = held or self._join(row)
        if held is not None:
            nodes = {slot.node for slot in held}
            why: dict[str, object] = {"profile": self.profile.name, "order": self.started, "nodes": len(nodes)}
            if row.ask.data:
                why["nodes_with_data"] = int(self.state.holds_data(row.ask)[sorted(nodes)].sum())
            self.state.hold(self.txn, row.ask.id, held, now=self.now)
            self.decisions.append(Admit(job=row.ask.id, held=held, why=why))
            self.started += 1
            return None
        wait = self._preempt(key, row)
        if wait is None and fits is not None:
            ahead = [r.job for r in outlived]
            text = f"Free devices are kept for {', '.join(ahead[:3])}."
            until = max(r.at for r in outlived)
            return Wait(reason=Reason.RESERVED_FOR_OTHER, text=text, fields={"for": ahead, "until": until})
        if wait is None and self.profile.block == "reserve":
            self.reservations.owe(row)
        if wait is None and full is None:
            return self._learn_full(key, row)
        return wait or (RememberedRefusal(full) if full else None)

    def _recall_full(self, key: LineKey) -> Reason | None:
        """Why the job did not fit when it was last tried, if nothing was given back since."""
        if self.profile.block != "reserve":
            return None
        return self.full.get(key) or self.state.memory.recall(f"full {self._beside_spares()}", key, local=False)

    def _learn_full(self, key: LineKey, row: JobRow) -> Wait | RememberedRefusal:
        if self.until is not None and key != place_key(line_key(self.state.jobs[self.until])):
            # None of these gets its reason, so that they do not fit is enough.
            self.full[key] = Reason.NO_FREE_DEVICES
            return RememberedRefusal(Reason.NO_FREE_DEVICES)
        wait = waits_because(self.state, row.ask, self.profile.placer)
        if self.profile.block == "reserve":
            self.full[key] = wait.reason
            if self.profile.remember and not self.tentative:
                self.state.memory.learn(f"full {self._beside_spares()}", key, wait.reason, local=False)
        return wait

    def _place(self, row: JobRow) -> Allocations | None:
        """Where the job fits now, or once others have given back what they were lent."""
        if not self.profile.starts:
            return None
        held = self.profile.placer.place(self.state, self.txn, row)
        if held is None and self.sharing is not None:
            self._resize(self.sharing.give_back(self.state, self.txn, row, self.profile.placer))
            held = self.profile.placer.place(self.state, self.txn, row)
        return held

    def _join(self, row: JobRow) -> Allocations | None:
        """A part of the devices of a running job, which keeps the other part."""
        found = self.sharing.join(self.state, row) if self.joins and self.sharing is not None else None
        if found is None:
            return None
        self.shared = True
        other, keeps, held = found
        self._resize({other: keeps})
        return held

    def _separate(self, decisions: Sequence[Resize | Preempt]) -> None:
        for decision in decisions:
            if isinstance(decision, Resize):
                self._resize({decision.job: decision.held})
                continue
            self.decisions.append(decision)
            self.state.put(self.txn, replace(self.state.jobs[decision.job], phase="stopping"))
            if decision.undone is not None:
                self.txn.put(self.state.undone, decision.undone, None)

    def _resize(self, changes: dict[JobId, Allocations]) -> None:
        for job, held in changes.items():
            self.state.resize(self.txn, job, held)
            self.decisions.append(Resize(job=job, held=held))

    def _fit(self, key: LineKey, row: JobRow, around: Sequence[BackfillReservation] = ()) -> Allocations | None:
        """Where the job fits out of the way of these reservations. Equal requests share the answer.

        A place is good until a job starts; that there is none holds for the pass, in which nothing comes back.
        """
        if self.profile.block != "reserve":
            return self._place(row)
        asked = (key, row.ask.data, *(reservation.job for reservation in around))
        known = self.fits.get(asked)
        if known is None or (known[1] is not None and known[0] != self._starts()):
            with self.txn.trial():
                for slot in (slot for reservation in around for slot in reservation.held):
                    take_what_is_free(self.state, self.txn, slot)
                known = self.fits[asked] = (self._starts(), self._place(row))
        return known[1]

    def _reserve(self) -> None:
        """Make the reservations that are owed; who has starved without a known time holds up its queue."""
        for row in self.reservations.make(self._aside):
            if self.now - row.ask.queued_at >= self.profile.starve_s:
                self.blocked.setdefault(row.ask.queue, row.ask.id)

    def _preempt(self, key: LineKey, row: JobRow) -> Wait | None:
        """Claim what stopping jobs will free; else ask the cheapest victims to stop. None if neither helps."""
        stopping, profile = sorted(self.state.stopping), self.profile
        victims = profile.victims if self.sets < profile.victim_sets_max else None
        tried = (key, "stopping", len(stopping))
        claims = bool(stopping) and profile.starts and tried not in self.fits
        claims = claims and self.tentative.given_back(stopping) >= row.ask.shape.gpu_milli
        if victims is not profile.victims:
            self.wake.append(self.now)
        if victims is not None and profile.stops is not None and not profile.stops(self.state, row):
            victims = None
        if not claims and victims is None:
            return None
        with self.txn.trial():
            self.tentative.release_all(stopping)
            held = profile.placer.place(self.state, self.txn, row) if claims else None
            if claims and held is None and profile.block == "reserve":
                self.fits[tried] = (0, None)
            chosen = None
            if held is None and victims is not None:
                chosen = victims.victims(self.state, self.txn, row, profile.placer, self.now)
        if held is not None:
            return self._claim(row, stopping, held)
        if not chosen or not self._would_start(row, stopping, chosen):
            return None
        for victim in chosen:
            ask = self.state.jobs[victim.job].ask
            fold(self.state, self.txn, StopRequested(job=victim.job), self.now)
            self.decisions.append(
                Preempt(
                    job=victim.job,
                    for_job=row.ask.id,
                    reason=victim.reason,
                    grace_s=min(ask.grace_s, self.profile.grace_max_s),
                    lost_gpu_s=victim.lost_gpu_s,
                    to=victim.to,
                )
            )
        self.sets += 1
        stopping = sorted(self.state.stopping)
        with self.txn.trial():
            self.tentative.release_all(stopping)
            held = profile.placer.place(self.state, self.txn, row)
        wait = None if held is None else self._claim(row, stopping, held)
        for victim in chosen:
            self.tentative.keep(victim.to)
        return wait

    def _would_start(self, row: JobRow, stopping: list[JobId], chosen: Sequence[Victim]) -> bool:
        """Whether the next pass starts the job once these have let go and wait again, or lie where they were moved to.

        Jobs before it in the order come first, its victims too: without this test jobs would take each other's place
        for ever.
        """
        if not self.profile.starts:
            return True
        with self.txn.trial():
            for job in (*stopping, *(one for victim in chosen for one in self.state.whole(victim.job))):
                is_part = self.state.jobs[job].ask.part_of is not None  # which is asked for anew, if it is at all
                fold(self.state, self.txn, JobGone(job=job) if is_part else JobReleased(job=job), self.now)
            self.tentative.release_all([])
            for victim in chosen:
                if victim.to and victim.job in self.state.jobs:
                    self.state.hold(self.txn, victim.job, victim.to, now=self.now)
            for job in self.tentative.jobs:
                self.state.put(self.txn, replace(self.state.jobs[job], phase="paused"))
            profile = replace(self.profile, victims=None, remember=False)
            then = _Pass(self.state, self.txn, profile, self.now, row.ask.id)
            then.spares, then.joins = self.spares, False
            then.run()
            return bool(self.state.jobs[row.ask.id].held)

    def _claim(self, row: JobRow, stopping: list[JobId], held: Allocations) -> Wait:
        """Keep others off what the job will use once these jobs have let go."""
        self.state.charge(self.txn, row, 1)
        for book in self.state.books:
            book.reserve(self.txn, self.state, row)
        self.tentative.keep(held)
        self.tentative.jobs.append(row.ask.id)
        nodes = sorted({self.state.nodes[slot.node].id for slot in held})
        return waits_for_preemption(self.state, stopping, nodes)

    # -- gates -------------------------------------------------------------------------------------------------------

    def _gate_time(self, row: JobRow) -> Wait | None:
        until = row.begins_at
        if until <= self.now:
            return None
        self.wake.append(until)
        return Wait(
            reason=Reason.NOT_BEFORE if until == row.ask.not_before else Reason.COOL_DOWN, fields={"until": until}
        )

    def _gate_queue(self, row: JobRow) -> Wait | None:
        tree, path = self.state.queues, row.ask.queue
        if path not in tree.row:
            return Wait(
                reason=Reason.QUEUE_CLOSED, text=f"There is no queue {path}; {nearest(path, tree.row, 'queues')}"
            )
        for queue in tree.line_of(path):
            if tree.rows[queue].state != "open":
                return Wait(reason=Reason.QUEUE_CLOSED, fields={"queue": tree.rows[queue].path})
        return None

    def _gate_order(self, row: JobRow) -> Wait | None:
        first = self.blocked.get(row.ask.queue)
        if first is not None:
            return Wait(reason=Reason.BEHIND_IN_ORDER, text=f"{first} must start first.", fields={"behind": first})
        return None
