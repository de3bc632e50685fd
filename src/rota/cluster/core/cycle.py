"""Scheduling cycle: step(state, event) -> decisions, in numbered steps."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rota.cluster.core.admission import (
    AWAITED,
    LIMITS,
    NAMED_MAX,
    HeldBack,
    held_back,
    waits_because,
    waits_for_others,
    with_held_back,
    with_spares,
)
from rota.cluster.core.age_bound import AgeBound
from rota.cluster.core.choice import choose, gate_growth
from rota.cluster.core.events import (
    Event,
    JobGone,
    JobHolds,
    JobPaused,
    JobReleased,
    JobResized,
    PairUndone,
    ReasonGiven,
    StopRequested,
    apply,
    fold,
    note,
)
from rota.cluster.core.jobs import Allocations, LineKey, LiveJob, Wait, line_key, place_key
from rota.cluster.core.preemption import (
    BackfillReservation,
    BackfillReservations,
    TentativeAllocations,
    take_what_is_free,
)
from rota.cluster.core.profile import Admit, Decision, Preempt, Profile, Resize, Victim, Victims, WaitOn, WakeAt
from rota.cluster.core.promises import UNCOVERED, promise_level
from rota.cluster.core.queue_order import FOR_ONE_JOB, PASSED_BY, NextJob, RememberedRefusal, TryOrder
from rota.cluster.core.state import LOST, State, entry_of
from rota.cluster.core.txn import Txn
from rota.cluster.core.verdicts import Learned
from rota.spec.errors import nearest
from rota.spec.ids import JobId
from rota.spec.reasons import Reason


def step(state: State, event: Event, profile: Profile, now: float) -> list[Decision]:
    """Fold an event, decide, and carry the decisions out in the state."""
    apply(state, event, now)
    with state.txn() as txn:
        decisions, learned = carried_out(state, txn, profile, now)
        txn.keep()
    state.memory.take_in(learned)
    note_decisions(state, decisions, now)
    return decisions


def carried_out(state: State, txn: Txn, profile: Profile, now: float) -> tuple[list[Decision], Learned]:
    """The decisions of one pass and the refusals it cached; the state of this transaction includes the decisions.

    What a pass tried is what its decisions do, so it stays. One that also claims devices that are still held is undone,
    and its decisions are folded.
    """
    if profile.prepare is not None:
        profile.prepare(state)
    before, walk = txn.changes, _Pass(state, txn, profile, now)
    decisions = walk.run()
    if walk.tentative:
        txn.undo(before)
        for event in events_of(decisions):
            fold(state, txn, event, now)
    return decisions, walk.learned


def note_decisions(state: State, decisions: Sequence[Decision], now: float) -> None:
    """Remember decisions that were carried out for internal errors; they are no events from outside."""
    happened = state.happened
    for event in events_of(decisions):
        note(state, event, now)
    state.happened = happened


def events_of(decisions: Sequence[Decision]) -> Iterator[Event]:
    """What happens when decisions are carried out at once."""
    for decision in decisions:
        match decision:
            case Admit(job=job, held=held, choice=choice):
                yield JobHolds(job=job, held=held, choice=choice)
            case Preempt(job=job, for_job=for_job, undone=undone):
                yield StopRequested(job=job, for_job=for_job)
                if undone is not None:
                    yield PairUndone(job=job, pair=undone)
            case Resize(job=job, held=held):
                yield JobResized(job=job, held=held)
            case WaitOn(job=job, wait=wait):
                yield ReasonGiven(job=job, wait=wait)
            case WakeAt():
                pass


def decide(state: State, profile: Profile, now: float) -> list[Decision]:
    """What should happen now; the caller that carries a decision out applies its event."""
    return tried(state, profile, now)[0]


def tried(state: State, profile: Profile, now: float, until: JobId | None = None) -> tuple[list[Decision], Learned]:
    """What should happen now, and what the pass has learned; with ``until`` no further than what it says of that job.

    The state stays as it was, and so does its memory: two passes of one state decide alike.
    """
    if profile.prepare is not None:
        profile.prepare(state)
    with state.txn() as txn:
        walk = _Pass(state, txn, profile, now, until)
        return walk.run(), walk.learned


BEYOND_QUEUE = frozenset({Reason.QUOTA_LIMIT, Reason.USER_LIMIT, Reason.CPU_OR_MEMORY})
"""Reasons that jobs of other queues may undo, also where devices are promised to each queue by themselves."""


def gate_jobs(row: LiveJob) -> Wait | None:
    """The wait of a job for others to end: checked for each job of a line, as each has others."""
    if not row.ask.after:
        return None
    text = f"It starts after {' and '.join(row.ask.after[:NAMED_MAX])}."
    return Wait(reason=Reason.DEPENDENCY, text=text, fields={"after": list(row.ask.after)})


class _Pass:
    """One scheduling pass over the waiting jobs in a transaction; the writes it keeps are the effect of its decisions.

    With ``until`` the pass stops at that job: a trial of the next pass, with the ``spares`` of the pass that tries it.
    Such a trial shares no devices.
    """

    cut_short = False

    def __init__(self, state: State, txn: Txn, profile: Profile, now: float, until: JobId | None = None) -> None:
        self.state, self.txn, self.profile, self.now, self.until = state, txn, profile, now, until
        self.spares = state.spares(profile.spares)
        self.excluded: dict[int, int] = {}
        self.decisions: list[Decision] = []
        self.blocked: dict[str, JobId] = {}
        self.verdicts: dict[LineKey, Wait | RememberedRefusal] = {}
        self.full: dict[LineKey, Reason] = {}
        self.wake: list[float] = []
        self.reservations = BackfillReservations(state, txn, profile.placer, now)
        self.fits: dict[tuple[object, ...], tuple[int, Allocations | None]] = {}
        self.unclaimable = set[tuple[LineKey, int]]()
        """Requests that fit nowhere when this number of stopping jobs have released their devices."""
        self.tentative = TentativeAllocations(state, txn)
        self.started = 0
        self.sharing, self.joins, self.shared = profile.sharing, True, False
        self.tried = self.sets = self.vain = 0
        self.overtaken = set[JobId]()
        self.held_back: dict[JobId, HeldBack] = {}
        self.age_bound = AgeBound(state, txn, profile, now, self._excluding)
        self.learned = Learned(state.memory)
        self.tries_max = state.memory.tries_max(profile.candidates_max)

    def run(self) -> list[Decision]:
        # 0. end sharing that does not pay; jobs that are left alone get their devices whole
        if self.joins and self.sharing is not None:
            self.shared = self.sharing.has_pairs(self.state)
            self._separate(self.sharing.separate(self.state, self.now))
        # 1. the first job of every line of equal jobs, or of every queue, in the order of the policy
        turns = TryOrder(self.state, self.profile, self.now, self.reservations, self._starts, self.until)
        # 2. start it, or learn why not; the answer for the first job of a line applies to the line
        overtaken = list[tuple[NextJob, LineKey]]()
        fresh = {self.state.line_of(self.state.jobs[job]) for job in self.state.arrivals}
        while (one := turns.next()) is not None:
            turn, row, key = one
            if self.cut_short and self.until is None:
                break  # nothing more starts in this pass; the next one, at once, continues
            if row.ask.queue in self.blocked and row.wait is not None:
                continue
            try:
                wait = self._try(key, row)
            except Exception as error:
                raise self.state.broken(f"trying it failed with {error!r}", row.ask.id) from error
            if isinstance(wait, RememberedRefusal) and key in fresh:
                wait = self.verdicts[key] = self._because(row)  # the numbers at its turn, remembered or not
            if wait is not None:
                self._give_reason(row, wait)
            if self.until is not None and (row.ask.id == self.until or self._is_settled(self.until)):
                break
            turns.after(turn, wait)
            if wait is None:
                self._try_overtaken(turns, overtaken)
            elif row.ask.id in self.overtaken and wait.reason not in FOR_ONE_JOB:
                overtaken.append((turn, key))
        # 3. jobs that arrived since the last pass learn why they wait
        for job in sorted(self.state.arrivals if self.until is None else self.state.arrivals.keys() & {self.until}):
            row = self.state.jobs[job]
            key = self.state.line_of(row)
            wait = gate_jobs(row) or self.verdicts.get(key) or self._gates(row)
            if wait is None and self.cut_short and row.wait is None:
                wait = Wait(reason=Reason.BEHIND_IN_ORDER)
            if wait is not None:
                if isinstance(wait, RememberedRefusal):
                    wait = self.verdicts[key] = self._because(row)
                self._give_reason(row, wait)
        if self.until is not None:
            return self.decisions
        # 4. lend what is idle when no job waits for it
        if self.sharing is not None and not self.state.lines:
            self._resize(self.sharing.lend(self.state, self.txn, self.profile.placer))
        # 5. wake up when time alone will change something, or to try more, until all were tried
        self.learned.cut_short, self.learned.stopped_some = self.cut_short, self.sets > 0
        if self.cut_short:
            self.wake.append(self.now)
        if (round_s := self.profile.round_s) and (self.shared or self._some_wait_beside_others()):
            self.wake.append((self.now // round_s + 1) * round_s)
        if self.wake:
            self.decisions.append(WakeAt(at=min(self.wake)))
        for job in tuple(self.state.started):
            self.txn.drop(self.state.started, job)
        return self.decisions

    def _try_overtaken(self, turns: TryOrder, overtaken: list[tuple[NextJob, LineKey]]) -> None:
        """After a start: the promised jobs for which nothing was stopped, as another would have started before them."""
        for turn, key in overtaken:
            self.verdicts.pop(key, None)
            self.learned.vain[turn.job] = -1
            turns.again(turn)
        overtaken.clear()
        self.overtaken.clear()

    def _is_settled(self, job: JobId) -> bool:
        row = self.state.jobs[job]
        verdict = None if self.profile.order.by_job else self.verdicts.get(self.state.line_of(row))
        return row.ask.queue in self.blocked or (verdict is not None and verdict.reason not in FOR_ONE_JOB)

    def _some_wait_beside_others(self) -> bool:
        return bool(self.state.lines) and any(self.state.running.values())

    def _starts(self) -> int:
        """Starts and claims so far: ranks stay as they are until there is one more."""
        return self.started + len(self.tentative.jobs)

    def _give_reason(self, row: LiveJob, wait: Wait | RememberedRefusal) -> None:
        """Give a job its reason if it differs from the last one, with the numbers of now."""
        if not row.has_reason(wait.reason) and self.until in (None, row.ask.id):
            wait = self._because(row) if isinstance(wait, RememberedRefusal) else wait
            if not row.has_reason(wait.reason):
                found = self.held_back.get(row.ask.id, HeldBack())
                wait = with_held_back(wait, found, until_round=self.profile.round_s > 0)
                self.decisions.append(WaitOn(job=row.ask.id, wait=wait))
                self.state.put(self.txn, row._replace(wait=wait))

    def _because(self, row: LiveJob) -> Wait:
        """The reason behind a "no", and its numbers."""
        with self._excluding(row) as spares:
            wait = self.profile.division.verdict(self.state, row)
            wait = wait or waits_because(self.state, row.ask, self.profile.placer)
        return self._with_spares(wait, spares)

    def _with_spares(self, wait: Wait, spares: list[int]) -> Wait:
        return with_spares(wait, [self.state.nodes[place].id for place in spares]) if spares else wait

    def _try(self, key: LineKey, row: LiveJob) -> Wait | RememberedRefusal | None:
        """Start the job, or say why not: gates, then quota, then place, then preempt."""
        if (wait := gate_jobs(row)) is not None:
            return wait
        if (known := self.verdicts.get(key)) is not None and known.reason not in FOR_ONE_JOB:
            return known
        wait = self._gates(row)
        if wait is None and (self.tried >= self.tries_max or self.vain >= self.profile.vain_max):
            self.cut_short = True
            return row.wait or Wait(reason=Reason.BEHIND_IN_ORDER)
        if wait is None:
            local = self.profile.local and not row.ask.opportunistic
            known = self.learned.recall(self._beside_spares(), key, local=local)
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
                    self.learned.learn(self._beside_spares(), key, wait.reason, local=local)
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
        claimed = self.profile.victims is not None and wait.reason in AWAITED
        return self.profile.block == "queue" and not claimed and wait.reason not in PASSED_BY

    def _start(self, key: LineKey, row: LiveJob) -> Wait | RememberedRefusal | None:
        """Start the job, or say why not."""
        if not self.spares and not row.ask.avoid:
            return self._start_anywhere(place_key(key), row)
        with self._excluding(row) as spares:
            wait = self._start_anywhere(place_key(key), row)
        return self._with_spares(wait, spares) if isinstance(wait, Wait) else wait

    @contextmanager
    def _excluding(self, row: LiveJob) -> Generator[list[int]]:
        """Nothing is placed on the nodes that the job avoids, nor on the spares kept from it, meanwhile.

        Nested use for another job replaces the excluded nodes instead of adding to them.
        """
        health, outer = self.state.node_health, self.excluded
        spares = [] if row.ask.opportunistic or row.ask.failover else self.spares
        places = [*spares, *(self.state.node_row[node] for node in row.ask.avoid if node in self.state.node_row)]
        with self.txn.meanwhile(health, outer):
            self.excluded = {place: int(health[place]) for place in places}
            with self.txn.meanwhile(health, dict.fromkeys(places, LOST)):
                try:
                    yield spares
                finally:
                    self.excluded = outer

    def _start_anywhere(self, key: LineKey, row: LiveJob) -> Wait | RememberedRefusal | None:
        """Start the job, or say why not; ``key`` is that of its place."""
        if (wait := self.profile.division.verdict(self.state, row)) is not None:
            limited = wait.reason in LIMITS and self._runs_lower(row)
            return (self._preempt(key, row) if limited else None) or wait
        if (wait := self.age_bound.verdict(row, self.tentative.jobs)) is not None:
            return wait
        full = self._recall_full(key)
        fits = self._fit(key, row) if full is None else None
        if fits is not None:
            self.reservations.make(self._excluding)
        outlived = self.reservations.outlived_by(row)
        held = fits if fits is None or not outlived else self._fit(key, row, outlived)
        held = held or self._join(row)
        if held is not None:
            found = choose(
                self.state, self.profile, row, held, self.now, lambda other: self._fit_choice(other, outlived)
            )
            held, nodes = found.held, {slot.node for slot in found.held}
            why: dict[str, object] = {"profile": self.profile.name, "order": self.started, "nodes": len(nodes)}
            if row.ask.data:
                why["nodes_with_data"] = int(self.state.holds_data(row.ask)[sorted(nodes)].sum())
            if found.choice is not None:
                why["choice"] = found.text
            self.state.hold(self.txn, row.ask.id, held, now=self.now, choice=found.choice)
            self.txn.put(self.state.started, row.ask.id, None)
            self.decisions.append(Admit(job=row.ask.id, held=held, choice=found.choice, why=why))
            self.started += 1
            return None
        wait = self._preempt(key, row)
        if wait is None and fits is not None:
            ahead = [r.job for r in outlived]
            text = f"Free devices are kept for {', '.join(ahead[:3])}."
            until = max(r.at for r in outlived)
            return Wait(reason=Reason.RESERVED_FOR_OTHER, text=text, fields={"for": ahead, "until": until})
        if wait is None and self.profile.block == "reserve" and not row.ask.spare:
            self.reservations.owe(row)
        if wait is None and full is None:
            return self._learn_full(key, row)
        return wait or (RememberedRefusal(full) if full else None)

    def _fit_choice(self, row: LiveJob, around: Sequence[BackfillReservation]) -> Allocations | None:
        if self.profile.block != "reserve":
            return self.profile.placer.place(self.state, self.txn, row)
        return self._fit(place_key(line_key(row)), row, around)

    def _recall_full(self, key: LineKey) -> Reason | None:
        """Why the job did not fit when it was last tried, if nothing was given back since."""
        if self.profile.block != "reserve":
            return None
        return self.full.get(key) or self.learned.recall(f"full {self._beside_spares()}", key, local=False)

    def _learn_full(self, key: LineKey, row: LiveJob) -> Wait | RememberedRefusal:
        if self.until is not None and key != place_key(line_key(self.state.jobs[self.until])):
            # None of these gets its reason, so that they do not fit is enough.
            self.full[key] = Reason.NO_FREE_DEVICES
            return RememberedRefusal(Reason.NO_FREE_DEVICES)
        wait = waits_because(self.state, row.ask, self.profile.placer)
        if self.profile.block == "reserve":
            self.full[key] = wait.reason
            if self.profile.remember and not self.tentative:
                self.learned.learn(f"full {self._beside_spares()}", key, wait.reason, local=False)
        return wait

    def _place(self, row: LiveJob) -> Allocations | None:
        """Where the job fits now, or once others have given back what they were lent."""
        if not self.profile.starts:
            return None
        held = self.profile.placer.place(self.state, self.txn, row)
        if held is None and self.sharing is not None:
            self._resize(self.sharing.give_back(self.state, self.txn, row, self.profile.placer))
            held = self.profile.placer.place(self.state, self.txn, row)
        return held

    def _join(self, row: LiveJob) -> Allocations | None:
        """A part of the devices of a running job, which keeps the other part."""
        found = self.sharing.join(self.state, row) if self.joins and self.sharing is not None else None
        if found is None:
            return None
        self.shared = True
        other, keeps, held = found
        self._resize({other: keeps})
        return held

    def _separate(self, decisions: Sequence[Resize | Preempt]) -> None:
        for event in events_of(decisions):
            fold(self.state, self.txn, event, self.now)
        self.decisions += decisions

    def _resize(self, changes: dict[JobId, Allocations]) -> None:
        for job, held in changes.items():
            self.state.resize(self.txn, job, held)
            self.decisions.append(Resize(job=job, held=held))

    def _fit(self, key: LineKey, row: LiveJob, around: Sequence[BackfillReservation] = ()) -> Allocations | None:
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

    def _runs_lower(self, row: LiveJob) -> bool:
        """Whether the queue of a job runs work of lower priority, which could be stopped so that it passes no limit."""
        queue, priority = row.ask.queue, row.ask.priority
        return self.profile.victims is not None and any(
            self.profile.order.by_job or (jobs and path == queue and other < priority)
            for (path, other), jobs in self.state.running.items()
        )

    def _preempt(self, key: LineKey, row: LiveJob) -> Wait | None:
        """Claim what stopping jobs will free; else ask the cheapest victims to stop. None if neither helps."""
        stopping, victims = sorted(self.state.stopping), self._victims_for(row)
        claims = bool(stopping) and self.profile.starts and (key, len(stopping)) not in self.unclaimable
        claims = claims and self.tentative.given_back(stopping) >= row.ask.shape.gpu_milli
        if not claims and victims is None:
            return None
        chosen: Sequence[Victim] = ()
        with self.txn.trial():
            self.tentative.release_all(stopping)
            held = self._place_released(key, row, len(stopping)) if claims else None
            if held is None and victims is not None:
                chosen = victims.victims(self.state, self.txn, row, self.profile.placer, self.now) or ()
        if held is not None:
            return self._claim(row, stopping, held)
        counts = victims is not None and self.until is None
        return self._stop(row, chosen) if self._would_help(row, stopping, chosen, counts=counts) else None

    def _victims_for(self, row: LiveJob) -> Victims | None:
        """The victim choice of the profile; None if no job may be stopped for this one in this pass."""
        profile = self.profile
        if profile.victims is None:
            return None
        if self.sets >= profile.victim_sets_max:
            self.wake.append(self.now)
            return None
        if self.until is None and self.learned.is_vain(row.ask.id, self.state.happened):
            return None
        return profile.victims if profile.stops is None or profile.stops(self.state, row) else None

    def _place_released(self, key: LineKey, row: LiveJob, stopping: int) -> Allocations | None:
        """Where the job fits once all that stop have let go, if it passes no limit then."""
        if self.state.over_limit(row.ask.queue, row.ask.user, row.ask.shape):
            return None
        held = self.profile.placer.place(self.state, self.txn, row)
        if held is None and self.profile.block == "reserve":
            self.unclaimable.add((key, stopping))
        return held

    def _would_help(self, row: LiveJob, stopping: list[JobId], chosen: Sequence[Victim], *, counts: bool) -> bool:
        """Whether the job starts once these have let go too; if not, and it ``counts``, that is remembered."""
        others = [victim.job for victim in chosen]
        found = held_back(self.state, row, others, self.profile.round_s, self.now) if others else HeldBack()
        self.held_back[row.ask.id] = found
        if counts:
            self.learned.held_back[row.ask.id] = others if found.jobs else []
        if chosen and not found.jobs and self._would_start(row, stopping, chosen):
            return True
        if chosen and self.profile.promises and self._is_covered(row.ask.id):
            self.overtaken.add(row.ask.id)
        if counts:
            self.vain += 1
            self.learned.vain[row.ask.id] = self.state.happened
        return False

    def _stop(self, row: LiveJob, chosen: Sequence[Victim]) -> Wait | None:
        """Ask these to stop, and claim what the job will have of them."""
        for victim in chosen:
            ask = self.state.jobs[victim.job].ask
            fold(self.state, self.txn, StopRequested(job=victim.job, for_job=row.ask.id), self.now)
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
            held = self.profile.placer.place(self.state, self.txn, row)
        wait = None if held is None else self._claim(row, stopping, held)
        for victim in chosen:
            self.tentative.keep(victim.to)
        return wait

    def _would_start(self, row: LiveJob, stopping: list[JobId], chosen: Sequence[Victim]) -> bool:
        """Whether the next pass starts the job once these have let go and wait again, or lie where they were moved to.

        Jobs before it in the order come first, its victims too: without this test jobs would take each other's place
        for ever. A promised job may also stop others for another one, which waits like it and would start instead.
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
                fold(self.state, self.txn, JobPaused(job=job, paused=True), self.now)
            profile = replace(self.profile, victims=None, remember=False)
            then = _Pass(self.state, self.txn, profile, self.now, row.ask.id)
            then.spares, then.joins, then.learned = self.spares, False, self.learned
            instead = [one.job for one in then.run() if isinstance(one, Admit)]
            if self.state.jobs[row.ask.id].held:
                return True
        return self.profile.promises and self._is_covered(row.ask.id) and any(map(self._is_covered_in_vain, instead))

    def _is_covered(self, job: JobId) -> bool:
        return promise_level(self.state, self.state.jobs[job]) < UNCOVERED

    def _is_covered_in_vain(self, job: JobId) -> bool:
        """Whether a promised job waits though others would be stopped for it: what they give back goes to this one too.

        Without this test each of two such jobs could be placed first after the victims of the other left, and neither
        would ever start.
        """
        vain = job in self.overtaken or self.learned.is_vain(job, self.state.happened)
        return vain and self.state.jobs[job].phase == "queued" and self._is_covered(job)

    def _claim(self, row: LiveJob, stopping: list[JobId], held: Allocations) -> Wait:
        """Keep others off what the job will use once these jobs have let go."""
        self.state.charge(self.txn, row, 1)
        self.txn.put(self.state.claimed, row.ask.id, None)
        if not row.ask.opportunistic:
            self.state.rank(self.txn, row.ask.queue, entry_of(row))
        for book in self.state.books:
            book.reserve(self.txn, self.state, row)
        self.tentative.keep(held)
        self.tentative.jobs.append(row.ask.id)
        nodes = sorted({self.state.nodes[slot.node].id for slot in held})
        return waits_for_others(self.state, stopping, nodes)

    def _gates(self, row: LiveJob) -> Wait | None:
        wait = self._gate_time(row) or self._gate_queue(row) or self._gate_order(row)
        return wait or gate_growth(self.state, self.txn, self.profile, row, self.now)

    def _gate_time(self, row: LiveJob) -> Wait | None:
        until = row.begins_at
        if until <= self.now:
            return None
        self.wake.append(until)
        return Wait(
            reason=Reason.NOT_BEFORE if until == row.ask.not_before else Reason.COOL_DOWN, fields={"until": until}
        )

    def _gate_queue(self, row: LiveJob) -> Wait | None:
        tree, path = self.state.queues, row.ask.queue
        if path not in tree.row:
            return Wait(
                reason=Reason.QUEUE_CLOSED, text=f"Queue {path} does not exist; {nearest(path, tree.row, 'queues')}"
            )
        if (held := tree.holds_back(path)) is None:
            return None
        text = (
            f"Queue {held.path} is {held.state} and starts none of its jobs; an admin of it opens it with state: open"
        )
        return Wait(reason=Reason.QUEUE_CLOSED, text=text, fields={"queue": held.path, "state": held.state})

    def _gate_order(self, row: LiveJob) -> Wait | None:
        first = self.blocked.get(row.ask.queue)
        if first is not None:
            return Wait(reason=Reason.BEHIND_IN_ORDER, text=f"{first} must start first.", fields={"behind": first})
        return None
