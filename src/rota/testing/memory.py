"""A clock that moves when it is advanced, and an event log in memory with the contract of the SQL one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rota.runtime.clock import Clock, LoopTimers
from rota.runtime.event_log.interface import (
    CONTEXTS_KEPT,
    KeptContext,
    Writer,
    check_fence,
    check_job,
    check_seq,
    ends,
)
from rota.spec.errors import SeqConflict
from rota.spec.events import Event, Record
from rota.spec.ids import Epoch, JobId


class VirtualClock(LoopTimers):
    """A clock that moves by ``advance``, or by a virtual event loop.

    ``advance`` moves both readings; sleepers wake when their time is reached, in order of their deadline.
    """

    def __init__(self, *, start_s: float = 0.0, wall_start_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s
        self._wall_offset_s = wall_start_s - start_s

    def monotonic_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s + self._wall_offset_s

    def advance(self, seconds: float) -> None:
        """Move time forward. Raises ValueError for a negative amount."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now_s += seconds


class MemoryLog:
    """The event log in memory: nothing is durable."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: list[Record] = []
        self._seqs: dict[JobId, int] = defaultdict(int)
        self._fences: dict[str, Epoch] = {}
        self._contexts: dict[JobId, dict[int, KeptContext]] = defaultdict(dict)

    def take_epoch(self, scope: str, *, expected: Epoch | None = None) -> Epoch:
        current = self.fence(scope)
        if expected is not None and expected != current:
            raise SeqConflict(f"{scope}: epoch {current} was taken since {expected}", scope=scope, fence=current)
        self._fences[scope] = Epoch(current + 1)
        return self._fences[scope]

    def fence(self, scope: str) -> Epoch:
        return self._fences.get(scope, Epoch(0))

    def append(
        self, events: Sequence[Event], *, writer: Writer, job: JobId | None = None, expected_seq: int | None = None
    ) -> tuple[Record, ...]:
        check_job(events, job)
        check_fence(writer, self.fence(writer.scope))
        if job is not None:
            check_seq(job, self._seqs[job], expected_seq)
        written: list[Record] = []
        for event in events:
            if job is not None:
                self._seqs[job] += 1
            number = len(self._records) + 1
            seq = self._seqs[job] if job is not None else 0
            record = Record(number=number, job=job, seq=seq, at=self._clock.wall_s(), event=event)
            self._records.append(record)
            written.append(record)
        if job is not None and ends(events):
            self._contexts.pop(job, None)
        return tuple(written)

    def read(
        self, *, after: int = 0, job: JobId | None = None, limit: int = 10_000, cluster: bool = False
    ) -> tuple[Record, ...]:
        found = (
            record
            for record in self._records[after:]
            if (job is None or record.job == job) and (not cluster or record.job is None)
        )
        return tuple(record for record, _ in zip(found, range(limit)))

    def sample(self, job: JobId, kind: str, points: int) -> tuple[Record, ...]:
        found = [one for one in self._records if one.job == job and type(one.event).__name__ == kind]
        return tuple(found[:: -max(1, -(-len(found) // points))][::-1])

    def last_number(self) -> int:
        return len(self._records)

    def keep_context(self, job: JobId, kept: KeptContext, *, writer: Writer) -> None:
        check_fence(writer, self.fence(writer.scope))
        self._contexts[job][kept.seq] = kept
        self._contexts[job] = {one.seq: one for one in self.contexts(job)[:CONTEXTS_KEPT]}

    def contexts(self, job: JobId) -> tuple[KeptContext, ...]:
        found = self._contexts.get(job, {})
        return tuple(found[seq] for seq in sorted(found, reverse=True))
