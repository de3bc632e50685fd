"""Event log: its interface, and the rules of fences and sequence numbers that every store enforces by it.

One log serves the whole installation. Records have a total order (``number``) and, for events of a job, an order inside
that job (``seq``, from 1). A writer names its scope and epoch: the write happens only if no higher epoch was ever taken
for that scope, so a writer that was replaced while it slept is refused. Scopes: ``install`` (the service),
``job/<id>`` (the master of a job). A kept context saves a master the replay of the records before it and is never the
truth: without one, or with one that cannot be read, the records alone give the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rota.spec.errors import Fenced, SeqConflict
from rota.spec.events import ClusterEvent, Event, JobEnded, Record
from rota.spec.ids import Epoch, JobId

INSTALL_SCOPE = "install"


def master_scope(job: JobId) -> str:
    """The scope under which the master of ``job`` writes."""
    return f"job/{job}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Writer of an append: its scope, and the epoch it took for it."""

    scope: str
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptContext:
    """What replaying a job up to its record ``seq`` (``number`` in the log) gives, as JSON text."""

    seq: int
    number: int
    body: str


CONTEXTS_KEPT = 2
"""Of one job: the newest, and one more in case that one cannot be read."""


class EventLog(Protocol):
    """Truth about everything. Every method blocks; call it from a thread in an event loop.

    Raises StoreUnavailable when the store does not answer.
    """

    def take_epoch(self, scope: str, *, expected: Epoch | None = None) -> Epoch:
        """Take the next epoch of ``scope`` and fence every older writer.

        With ``expected`` the fence must still be that; else SeqConflict (another writer took it first).
        """
        ...

    def fence(self, scope: str) -> Epoch:
        """The highest epoch ever taken for ``scope``; 0 if none."""
        ...

    def append(
        self, events: Sequence[Event], *, writer: Writer, job: JobId | None = None, expected_seq: int | None = None
    ) -> tuple[Record, ...]:
        """Append all or nothing; durable when it returns.

        ``job`` is required for job events and refused for cluster events. ``expected_seq`` is the last ``seq`` of the
        job that the writer has seen. Raises Fenced for a writer of an older epoch, SeqConflict when the job moved on.
        """
        ...

    def read(
        self, *, after: int = 0, job: JobId | None = None, limit: int = 10_000, cluster: bool = False
    ) -> tuple[Record, ...]:
        """Records with ``number > after`` in order: of one job, of the cluster alone, or of everything."""
        ...

    def sample(self, job: JobId, kind: str, points: int) -> tuple[Record, ...]:
        """At most ``points`` records of one kind of a job, in order and evenly spread, the newest among them."""
        ...

    def last_number(self) -> int:
        """Number of the newest record; 0 for an empty log."""
        ...

    def keep_context(self, job: JobId, kept: KeptContext, *, writer: Writer) -> None:
        """Keep a context beside the records, the newest ``CONTEXTS_KEPT`` of a job; its end drops them.

        Raises Fenced for a writer of an older epoch.
        """
        ...

    def contexts(self, job: JobId) -> tuple[KeptContext, ...]:
        """The kept contexts of a job, the newest first; without those that fail their checksum."""
        ...


def ends(events: Sequence[Event]) -> bool:
    """True when these events end their job, so that no master replays it again."""
    return any(isinstance(event, JobEnded) for event in events)


def check_job(events: Sequence[Event], job: JobId | None) -> None:
    """Job events need a job, cluster events none. Raises ValueError (a bug of the caller)."""
    for event in events:
        if isinstance(event, ClusterEvent) is not (job is None):
            raise ValueError(f"{type(event).__name__} with job={job!r}")


def check_fence(writer: Writer, fence: Epoch) -> None:
    """Refuse a writer whose epoch is not the newest of its scope. Raises Fenced."""
    if writer.epoch != fence:
        raise Fenced(
            f"{writer.scope}: epoch {writer.epoch} is fenced by {fence}",
            hint="another process took over; this one must stop",
            scope=writer.scope,
            epoch=writer.epoch,
            fence=fence,
        )


def check_seq(job: JobId, current: int, expected: int | None) -> None:
    """Refuse a write decided on an older state of the job. Raises SeqConflict."""
    if expected is not None and expected != current:
        raise SeqConflict(f"{job}: at {current}, expected {expected}", job=job, seq=current, expected=expected)
