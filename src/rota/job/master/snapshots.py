"""The context of a job beside its log: a new master begins with the newest that can be read, and replays the rest."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from rota.job.core.context import JobContext
from rota.job.core.machine import initial
from rota.runtime.event_log.interface import EventLog, KeptContext, Writer
from rota.spec import codec
from rota.spec.ids import JobId

KEEP_EVERY = 1000
"""Records of the job from one kept context to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A context and the number in the log of the last record that is in it."""

    ctx: JobContext
    number: int = 0


def newest(log: EventLog, job: JobId) -> Replayed:
    """The newest kept context that this code reads; without one, the context before the first record. Blocks."""
    for kept in log.contexts(job):
        try:
            return Replayed(ctx=JobContext.from_json(json.loads(kept.body)), number=kept.number)
        except (ValueError, TypeError, KeyError) as error:
            left_out(kept, error)
    return Replayed(ctx=initial(job))


def left_out(kept: KeptContext, error: Exception) -> None:
    """Report a kept context that this code does not read: the master replays more records, and loses nothing."""
    sys.stderr.write(f"the context kept at record {kept.seq} is left out: {error}\n")


def keep(log: EventLog, found: Replayed, writer: Writer) -> None:
    """Write a context beside the log. Blocks. Raises Fenced, StoreUnavailable."""
    kept = KeptContext(seq=found.ctx.seq, number=found.number, body=codec.dumps(found.ctx.to_json()))
    log.keep_context(found.ctx.job, kept, writer=writer)
